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
_Static_assert(sizeof(struct rg_run) == 48, "gather.cu reads the same");

int rg_open(struct rg_copier *copier, const struct rg_api *api, void *context, void *stream, void *kernel, void *lists, uint32_t list_count,
            uint32_t list_runs)
{
    memset(copier, 0, sizeof *copier);
    copier->destinations = calloc(RG_BATCH_PIECES, 3 * sizeof(uint64_t));
    if (!copier->destinations) return -ENOMEM;
    copier->sources = copier->destinations + RG_BATCH_PIECES;
    copier->sizes = copier->sources + RG_BATCH_PIECES;
    copier->api = api;
    copier->context = context;
    copier->stream = stream;
    copier->kernel = kernel;
    copier->thread_blocks = 4;
    copier->forced = -1;
    copier->lists = lists;
    copier->list_count = list_count;
    copier->list_runs = list_runs;
    /* Until rg_calibrate: two H200 joined by NVLink, driver 580. */
    copier->costs = (struct rg_costs){2200, 4, 550, 4000, 2, 340, 160, 50};
    return 0;
}

void rg_close(struct rg_copier *copier)
{
    free(copier->destinations);
    copier->destinations = NULL;
}

rg_result rg_enter(const struct rg_copier *copier) { return copier->api->cuCtxSetCurrent(copier->context); }

static struct rg_run *runs_of(const struct rg_copier *copier, uint32_t list) { return copier->lists + (size_t)list * copier->list_runs; }

struct rg_listing rg_list(const struct rg_copier *copier, uint32_t list) { return (struct rg_listing){runs_of(copier, list), 0, copier->list_runs}; }

static void count(struct rg_copier *copier, enum rg_way way, uint64_t operations, uint64_t pieces, uint64_t bytes)
{
    copier->counters.operations[way] += operations;
    copier->counters.pieces[way] += pieces;
    copier->counters.bytes[way] += bytes;
}

/* ---- the three ways ---- */

static rg_result copy_strided(struct rg_copier *copier, const struct rg_run *run)
{
    struct rg_2d copy = {.source_type = MEMORY_UNIFIED,
                         .source = run->source,
                         .source_pitch = run->source_step,
                         .destination_type = MEMORY_UNIFIED,
                         .destination = run->destination,
                         .destination_pitch = run->destination_step,
                         .width = run->bytes,
                         .height = run->rows};
    count(copier, RG_STRIDED, 1, run->rows, (uint64_t)run->rows * run->bytes);
    return copier->api->cuMemcpy2DAsync(&copy, copier->stream);
}

rg_result rg_copy_each(const struct rg_copier *copier, const struct rg_run *runs, uint32_t run_count)
{
    rg_result result = 0;
    for (const struct rg_run *run = runs; run < runs + run_count; run++)
        for (uint64_t i = 0; i < run->rows && !result; i++)
            result = copier->api->cuMemcpyAsync(run->destination + i * run->destination_step, run->source + i * run->source_step, run->bytes,
                                                copier->stream);
    return result;
}

static rg_result flush_batch(const struct rg_copier *copier, uint64_t piece_count)
{
    struct rg_attributes attributes = {.source_access_order = ACCESS_ORDER_STREAM};
    uint64_t start = 0;
    return copier->api->cuMemcpyBatchAsync(copier->destinations, copier->sources, copier->sizes, piece_count, &attributes, &start, 1, copier->stream);
}

static rg_result copy_batch(struct rg_copier *copier, const struct rg_run *runs, uint32_t run_count, uint64_t piece_count, uint64_t bytes)
{
    int each = piece_count < 3 || !copier->api->cuMemcpyBatchAsync;
    count(copier, RG_BATCH, each ? 1 : (piece_count + RG_BATCH_PIECES - 1) / RG_BATCH_PIECES, piece_count, bytes);
    if (each) return rg_copy_each(copier, runs, run_count);
    rg_result result = 0;
    uint32_t filled = 0;
    for (const struct rg_run *run = runs; run < runs + run_count; run++)
        for (uint64_t i = 0; i < run->rows && !result; i++) {
            copier->destinations[filled] = run->destination + i * run->destination_step;
            copier->sources[filled] = run->source + i * run->source_step;
            copier->sizes[filled++] = run->bytes;
            if (filled < RG_BATCH_PIECES) continue;
            result = flush_batch(copier, filled);
            filled = 0;
        }
    return result || !filled ? result : flush_batch(copier, filled);
}

static rg_result copy_by_kernel(struct rg_copier *copier, struct rg_run *runs, uint32_t run_count, uint32_t piece_count, uint64_t bytes)
{
    uint32_t lanes = bytes / piece_count < 512 ? 16 : 32; /* threads of one piece: 16 bytes each at a time */
    uint64_t list = (uint64_t)(uintptr_t)runs;
    void *parameters[] = {&list, &run_count, &piece_count, &lanes};
    count(copier, RG_KERNEL, 1, piece_count, bytes);
    return copier->api->cuLaunchKernel(copier->kernel, copier->thread_blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, copier->stream, parameters, NULL);
}

/* ---- the choice ---- */

static int may_be_strided(const struct rg_run *run)
{
    return run->source_step >= run->bytes && run->destination_step >= run->bytes && run->source_step <= PITCH_MAX &&
           run->destination_step <= PITCH_MAX;
}

/* Without the launch, which the whole list shares. */
static double kernel_ns(const struct rg_costs *costs, uint64_t pieces, uint64_t bytes)
{
    return (double)pieces * costs->kernel_piece_ns + (double)bytes / costs->kernel_rate;
}

static double strided_ns(const struct rg_costs *costs, const struct rg_run *run)
{
    return costs->strided_ns + run->rows * costs->row_ns + (double)run->rows * run->bytes / costs->engine_rate;
}

static double batch_ns(const struct rg_costs *costs, const struct rg_run *run)
{
    double issue = run->rows * costs->batched_ns, move = (double)run->rows * run->bytes / costs->engine_rate;
    return issue > move ? issue : move;
}

static int cheaper_strided(const struct rg_costs *costs, const struct rg_run *run)
{
    return run->rows > 1 && may_be_strided(run) && strided_ns(costs, run) < batch_ns(costs, run);
}

/* Do the copy engines move the whole list as fast as the NIC? Then they do: they take no multiprocessors from the model,
 * and a kernel for a few rows that are left over would wait until a running matmul lets go of some. Without a NIC: as fast
 * as the kernel? One of them has it all then, for a stream that goes from engine to kernel and back stands still. */
static int engines_keep_up(const struct rg_copier *copier, const struct rg_run *runs, uint32_t run_count)
{
    const struct rg_costs *costs = &copier->costs;
    if (copier->forced >= 0) return 0;
    if (costs->nic_rate <= 0 && !copier->kernel) return 1;
    uint64_t bytes = 0, pieces = 0;
    for (uint32_t i = 0; i < run_count; i++) {
        bytes += (uint64_t)runs[i].rows * runs[i].bytes;
        pieces += runs[i].rows;
    }
    double left = costs->nic_rate > 0 ? (double)bytes / costs->nic_rate : costs->kernel_ns + kernel_ns(costs, pieces, bytes);
    for (uint32_t i = 0; i < run_count && left >= 0; i++) left -= cheaper_strided(costs, &runs[i]) ? strided_ns(costs, &runs[i]) : batch_ns(costs, &runs[i]);
    return left >= 0;
}

/* Of a list that is too much for the engines: they have what they move as fast as the NIC, or as the kernel. */
static int strided_keeps_up(const struct rg_copier *copier, const struct rg_run *run)
{
    const struct rg_costs *costs = &copier->costs;
    if (copier->forced >= 0) return copier->forced == RG_STRIDED;
    uint64_t bytes = (uint64_t)run->rows * run->bytes;
    double strided = strided_ns(costs, run);
    if (strided <= (double)bytes / costs->nic_rate) return 1;
    return strided < (copier->kernel ? kernel_ns(costs, run->rows, bytes) : run->rows * costs->batched_ns);
}

static int batch_keeps_up(const struct rg_copier *copier, uint64_t piece_count, uint64_t bytes)
{
    const struct rg_costs *costs = &copier->costs;
    if (!copier->kernel) return 1;
    if (copier->forced >= 0) return copier->forced != RG_KERNEL;
    double batch = (double)piece_count * costs->batched_ns;
    return batch <= costs->kernel_ns + kernel_ns(costs, piece_count, bytes) || batch <= (double)bytes / costs->nic_rate;
}

rg_result rg_copy(struct rg_copier *copier, uint32_t list, uint32_t run_count)
{
    struct rg_run *runs = runs_of(copier, list);
    uint32_t rest = 0;
    uint64_t rest_pieces = 0, rest_bytes = 0;
    uint32_t rows = 0, bytes = 0; /* of the run that was decided last: most are like the one before */
    int keeps_up = 0, engines = engines_keep_up(copier, runs, run_count);
    int kernel = !engines && copier->forced < 0 && copier->costs.nic_rate <= 0;
    for (uint32_t at = 0; at < run_count; at++) {
        if (runs[at].rows != rows || runs[at].bytes != bytes) {
            rows = runs[at].rows;
            bytes = runs[at].bytes;
            keeps_up = !engines && !kernel && rows >= ROWS_MIN && strided_keeps_up(copier, &runs[at]);
        }
        if (engines ? cheaper_strided(&copier->costs, &runs[at]) : keeps_up && may_be_strided(&runs[at])) {
            rg_result result = copy_strided(copier, &runs[at]);
            if (result) return result;
            continue;
        }
        if (rest != at) runs[rest] = runs[at];
        runs[rest++].first = (uint32_t)rest_pieces;
        rest_pieces += rows;
        rest_bytes += (uint64_t)rows * bytes;
    }
    if (!rest) return 0;
    if (engines || (!kernel && batch_keeps_up(copier, rest_pieces, rest_bytes))) return copy_batch(copier, runs, rest, rest_pieces, rest_bytes);
    return copy_by_kernel(copier, runs, rest, (uint32_t)rest_pieces, rest_bytes);
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

/* Pieces of piece_bytes in runs of `rows`, by one way. */
static struct measured measure(struct rg_copier *copier, enum rg_way way, uint64_t source, uint64_t destination, uint32_t piece_count,
                               uint32_t piece_bytes, uint32_t rows)
{
    struct measured best = {0, 0};
    int32_t forced = copier->forced;
    copier->forced = (int32_t)way;
    for (int round = 0; round < 4 && !best.result; round++) { /* the first one warms up */
        struct rg_run *runs = runs_of(copier, 0);
        uint32_t run_count = piece_count / rows;
        for (uint32_t i = 0; i < run_count; i++) {
            uint64_t at = (uint64_t)i * rows * piece_bytes;
            runs[i] = (struct rg_run){source + 2 * at, destination + at, 2ull * piece_bytes, piece_bytes, piece_bytes, rows, 0, 0};
        }
        double begin = now_ns();
        best.result = rg_copy(copier, 0, run_count);
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

static rg_result measure_all(struct rg_copier *copier, uint64_t source, uint64_t destination)
{
    struct rg_costs *costs = &copier->costs;
    struct measured one = measure(copier, RG_STRIDED, source, destination, 16, 256, 16);
    struct measured many = measure(copier, RG_STRIDED, source, destination, 512, 256, 16);
    struct measured tall = measure(copier, RG_STRIDED, source, destination, 512, 256, 512);
    struct measured few = measure(copier, RG_BATCH, source, destination, 4, 256, 1);
    struct measured batch = measure(copier, RG_BATCH, source, destination, 512, 256, 1);
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
        const uint32_t bytes = RG_CALIBRATION_BYTES / 2, large = bytes / 4096, small = bytes / 256;
        struct measured empty = measure(copier, RG_KERNEL, source, destination, 4, 256, 1);
        struct measured full = measure(copier, RG_KERNEL, source, destination, large, 4096, 1);
        struct measured fine = measure(copier, RG_KERNEL, source, destination, small, 256, 16);
        result = empty.result;
        keep_first(&result, full);
        keep_first(&result, fine);
        if (!result) {
            costs->kernel_piece_ns = at_least((fine.ns - full.ns) / (small - large), 0.01);
            costs->kernel_rate = bytes / at_least(full.ns - empty.ns - large * costs->kernel_piece_ns, 1);
        }
    }
    return result;
}

rg_result rg_calibrate(struct rg_copier *copier, uint64_t source, uint64_t destination, double nic_rate)
{
    struct rg_counters counters = copier->counters;
    void *context = NULL;
    copier->costs.nic_rate = nic_rate;
    if (copier->list_runs < 512) return 0;
    rg_result result = copier->api->cuCtxPushCurrent(copier->context);
    if (result) return result;
    result = measure_all(copier, source, destination);
    copier->api->cuCtxPopCurrent(&context);
    copier->counters = counters;
    return result;
}

const char *rg_error_name(const struct rg_api *api, rg_result result)
{
    const char *name = NULL;
    if (api->cuGetErrorName(result, &name) || !name) return "CUDA_ERROR_UNKNOWN";
    return name;
}
