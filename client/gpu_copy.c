#define _POSIX_C_SOURCE 200809L
#include "gpu_copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MEMORY_UNIFIED 4       /* CU_MEMORYTYPE_UNIFIED */
#define ACCESS_ORDER_STREAM 1  /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources were just written by kernels */
#define PITCH_MAX 0x7fffffffull /* CU_DEVICE_ATTRIBUTE_MAX_PITCH of every GPU so far */
#define ROWS_MIN 4u
#define BLOCK_THREADS 1024u

struct rg_2d {
    uint64_t source_x, source_y;
    uint32_t source_type;
    const void *source_host;
    uint64_t source;
    void *source_array;
    uint64_t source_pitch;
    uint64_t destination_x, destination_y;
    uint32_t destination_type;
    void *destination_host;
    uint64_t destination;
    void *destination_array;
    uint64_t destination_pitch;
    uint64_t width, height;
};
_Static_assert(sizeof(struct rg_2d) == 128, "CUDA_MEMCPY2D");

struct rg_attributes {
    uint32_t source_access_order;
    uint32_t source_hint[2], destination_hint[2];
    uint32_t flags;
};
_Static_assert(sizeof(struct rg_attributes) == 24, "CUmemcpyAttributes");
_Static_assert(sizeof(struct rg_piece) == 24, "gather.cu reads the same");

int rg_open(struct rg_copier *copier, const struct rg_api *api, void *context, void *stream, void *kernel, void *lists, uint32_t list_count,
            uint32_t list_pieces)
{
    memset(copier, 0, sizeof *copier);
    copier->destinations = calloc(list_pieces, 3 * sizeof(uint64_t));
    if (!copier->destinations) return -ENOMEM;
    copier->sources = copier->destinations + list_pieces;
    copier->sizes = copier->sources + list_pieces;
    copier->api = api;
    copier->context = context;
    copier->stream = stream;
    copier->kernel = kernel;
    copier->thread_blocks = 4;
    copier->forced = -1;
    copier->lists = lists;
    copier->list_count = list_count;
    copier->list_pieces = list_pieces;
    /* Until rg_calibrate: two H200 joined by NVLink, driver 580. */
    copier->costs = (struct rg_costs){2200, 4, 550, 4000, 340, 160, 50};
    return 0;
}

void rg_close(struct rg_copier *copier)
{
    free(copier->destinations);
    copier->destinations = NULL;
}

rg_result rg_enter(const struct rg_copier *copier) { return copier->api->cuCtxSetCurrent(copier->context); }

struct rg_piece *rg_list(const struct rg_copier *copier, uint32_t list) { return copier->lists + (size_t)list * copier->list_pieces; }

static void count(struct rg_copier *copier, enum rg_way way, uint64_t pieces, uint64_t bytes)
{
    copier->counters.operations[way]++;
    copier->counters.pieces[way] += pieces;
    copier->counters.bytes[way] += bytes;
}

/* ---- the three ways ---- */

static rg_result copy_strided(struct rg_copier *copier, const struct rg_piece *first, uint32_t rows)
{
    struct rg_2d copy = {.source_type = MEMORY_UNIFIED,
                         .source = first[0].source,
                         .source_pitch = first[1].source - first[0].source,
                         .destination_type = MEMORY_UNIFIED,
                         .destination = first[0].destination,
                         .destination_pitch = first[1].destination - first[0].destination,
                         .width = first[0].bytes,
                         .height = rows};
    count(copier, RG_STRIDED, rows, (uint64_t)rows * first[0].bytes);
    return copier->api->cuMemcpy2DAsync(&copy, copier->stream);
}

rg_result rg_copy_each(const struct rg_copier *copier, const struct rg_piece *pieces, uint32_t piece_count)
{
    rg_result result = 0;
    for (uint32_t i = 0; i < piece_count && !result; i++)
        result = copier->api->cuMemcpyAsync(pieces[i].destination, pieces[i].source, pieces[i].bytes, copier->stream);
    return result;
}

static rg_result copy_batch(struct rg_copier *copier, const struct rg_piece *pieces, uint32_t piece_count, uint64_t bytes)
{
    const struct rg_api *api = copier->api;
    count(copier, RG_BATCH, piece_count, bytes);
    if (piece_count < 3 || !api->cuMemcpyBatchAsync) return rg_copy_each(copier, pieces, piece_count);
    for (uint32_t i = 0; i < piece_count; i++) {
        copier->destinations[i] = pieces[i].destination;
        copier->sources[i] = pieces[i].source;
        copier->sizes[i] = pieces[i].bytes;
    }
    struct rg_attributes attributes = {.source_access_order = ACCESS_ORDER_STREAM};
    uint64_t start = 0;
    return api->cuMemcpyBatchAsync(copier->destinations, copier->sources, copier->sizes, piece_count, &attributes, &start, 1, copier->stream);
}

static rg_result copy_by_kernel(struct rg_copier *copier, const struct rg_piece *pieces, uint32_t piece_count, uint64_t bytes)
{
    uint32_t lanes = bytes / piece_count < 512 ? 16 : 32; /* threads of one piece: 16 bytes each at a time */
    uint64_t list = (uint64_t)(uintptr_t)pieces;
    void *parameters[] = {&list, &piece_count, &lanes};
    count(copier, RG_KERNEL, piece_count, bytes);
    return copier->api->cuLaunchKernel(copier->kernel, copier->thread_blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, copier->stream, parameters, NULL);
}

/* ---- the choice ---- */

/* How many pieces from here on are equal and at constant distances on both sides. */
static uint32_t strided_run(const struct rg_piece *pieces, uint32_t piece_count)
{
    if (piece_count < 2) return piece_count;
    uint64_t source_step = pieces[1].source - pieces[0].source, destination_step = pieces[1].destination - pieces[0].destination;
    if (source_step < pieces[0].bytes || destination_step < pieces[0].bytes || source_step > PITCH_MAX || destination_step > PITCH_MAX) return 1;
    uint32_t rows = 1;
    while (rows < piece_count && pieces[rows].bytes == pieces[0].bytes && pieces[rows].source - pieces[rows - 1].source == source_step &&
           pieces[rows].destination - pieces[rows - 1].destination == destination_step)
        rows++;
    return rows;
}

static int strided_keeps_up(const struct rg_copier *copier, uint32_t rows, uint64_t bytes)
{
    const struct rg_costs *costs = &copier->costs;
    if (copier->forced >= 0) return copier->forced == RG_STRIDED;
    double strided = costs->strided_ns + rows * costs->row_ns + (double)bytes / costs->engine_rate;
    if (strided <= (double)bytes / (costs->nic_rate > 0 ? costs->nic_rate : costs->kernel_rate)) return 1;
    return !copier->kernel && strided < rows * costs->batched_ns;
}

static int batch_keeps_up(const struct rg_copier *copier, uint32_t piece_count, uint64_t bytes)
{
    const struct rg_costs *costs = &copier->costs;
    if (!copier->kernel) return 1;
    if (copier->forced >= 0) return copier->forced != RG_KERNEL;
    double batch = piece_count * costs->batched_ns, kernel = costs->kernel_ns + (double)bytes / costs->kernel_rate;
    return batch <= kernel || (costs->nic_rate > 0 && batch <= (double)bytes / costs->nic_rate);
}

rg_result rg_copy(struct rg_copier *copier, uint32_t list, uint32_t piece_count)
{
    struct rg_piece *pieces = rg_list(copier, list);
    uint32_t rest = 0;
    uint64_t rest_bytes = 0;
    for (uint32_t at = 0, rows; at < piece_count; at += rows) {
        rows = strided_run(pieces + at, piece_count - at);
        uint64_t bytes = (uint64_t)rows * pieces[at].bytes;
        if (rows >= ROWS_MIN && strided_keeps_up(copier, rows, bytes)) {
            rg_result result = copy_strided(copier, pieces + at, rows);
            if (result) return result;
            continue;
        }
        if (rest != at) memmove(pieces + rest, pieces + at, rows * sizeof *pieces);
        rest += rows;
        rest_bytes += bytes;
    }
    if (!rest) return 0;
    if (batch_keeps_up(copier, rest, rest_bytes)) return copy_batch(copier, pieces, rest, rest_bytes);
    return copy_by_kernel(copier, pieces, rest, rest_bytes);
}

rg_result rg_signal(struct rg_copier *copier, uint64_t address, uint64_t value)
{
    return copier->api->cuStreamWriteValue64(copier->stream, address, value, 0);
}

/* ---- costs ---- */

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

struct measured {
    rg_result result;
    double ns; /* best of three */
};

/* rounds times: pieces of piece_bytes in runs of `rows`, by one way. */
static struct measured measure(struct rg_copier *copier, enum rg_way way, uint64_t source, uint64_t destination, uint32_t piece_count,
                               uint32_t piece_bytes, uint32_t rows)
{
    struct measured best = {0, 0};
    int32_t forced = copier->forced;
    copier->forced = (int32_t)way;
    for (int round = 0; round < 4 && !best.result; round++) { /* the first one warms up */
        struct rg_piece *pieces = rg_list(copier, 0);
        for (uint32_t i = 0; i < piece_count; i++) {
            uint64_t at = rows ? (uint64_t)i * piece_bytes + i / rows * 256ull : 2ull * i * piece_bytes; /* a gap ends a run */
            pieces[i] = (struct rg_piece){source + at, destination + at, piece_bytes, 0};
        }
        double begin = now_ns();
        best.result = rg_copy(copier, 0, piece_count);
        if (!best.result) best.result = copier->api->cuStreamSynchronize(copier->stream);
        double taken = now_ns() - begin;
        if (round == 1 || taken < best.ns) best.ns = taken;
    }
    copier->forced = forced;
    return best;
}

static void keep_first(rg_result *result, struct measured measured)
{
    if (!*result) *result = measured.result;
}

static double at_least(double value, double least) { return value > least ? value : least; }

rg_result rg_calibrate(struct rg_copier *copier, uint64_t source, uint64_t destination, double nic_rate)
{
    struct rg_costs *costs = &copier->costs;
    struct rg_counters counters = copier->counters;
    costs->nic_rate = nic_rate;
    if (copier->list_pieces < 512) return 0;
    rg_result entered = rg_enter(copier);
    if (entered) return entered;
    struct measured one = measure(copier, RG_STRIDED, source, destination, 16, 256, 16);
    struct measured many = measure(copier, RG_STRIDED, source, destination, 512, 256, 16);
    struct measured tall = measure(copier, RG_STRIDED, source, destination, 512, 256, 512);
    struct measured few = measure(copier, RG_BATCH, source, destination, 4, 256, 0);
    struct measured batch = measure(copier, RG_BATCH, source, destination, 512, 256, 0);
    rg_result result = one.result;
    keep_first(&result, many);
    keep_first(&result, tall);
    keep_first(&result, few);
    keep_first(&result, batch);
    if (!result) {
        costs->strided_ns = at_least((many.ns - one.ns) / 31, 100);
        costs->row_ns = at_least((tall.ns - one.ns) / 496, 1);
        costs->batched_ns = at_least((batch.ns - few.ns) / 508, 20);
    }
    if (!result && copier->kernel) {
        struct measured empty = measure(copier, RG_KERNEL, source, destination, 4, 256, 0);
        struct measured full = measure(copier, RG_KERNEL, source, destination, RG_CALIBRATION_BYTES / 2 / 4096, 4096, 0);
        result = empty.result;
        keep_first(&result, full);
        if (!result) costs->kernel_rate = RG_CALIBRATION_BYTES / 2 / at_least(full.ns - empty.ns, 1);
    }
    copier->counters = counters;
    return result;
}

const char *rg_error_name(const struct rg_api *api, rg_result result)
{
    const char *name = NULL;
    if (api->cuGetErrorName(result, &name) || !name) return "CUDA_ERROR_UNKNOWN";
    return name;
}
