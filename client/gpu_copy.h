/* Copies of many pieces on one CUDA stream, and a word written after them in stream order. Used by a client's feeder
 * (slots) and by the emulated NIC's helper process. No cuda.h is needed to build: cuda.py resolves the driver's
 * functions. Calls take the thread that holds the copier; the CUDA context must be current there (rg_enter), but for
 * rg_calibrate.
 *
 * Pieces are listed as runs: equal pieces at constant distances on both sides, which nobody expands on the CPU. Three
 * ways, chosen for each run by what they cost against the time that the NIC needs for the same bytes: a run is one 2D
 * copy, long pieces go in one copy batch, and the rest is moved by a kernel of few thread blocks (gather.cu). */
#ifndef RAILRELAY_GPU_COPY_H
#define RAILRELAY_GPU_COPY_H

#include <stdint.h>

#define RG_CALIBRATION_BYTES (1u << 20)
#define RG_BATCH_PIECES 8192u

typedef int rg_result; /* CUresult; 0 is success */

struct rg_2d;         /* CUDA_MEMCPY2D */
struct rg_attributes; /* CUmemcpyAttributes */

/* The driver's functions, in the order in which cuda.py passes their addresses: name, arguments. */
#define RG_FUNCTIONS(X) \
    X(cuCtxSetCurrent, (void *context)) \
    X(cuCtxPushCurrent, (void *context)) \
    X(cuCtxPopCurrent, (void **context)) \
    X(cuMemcpyAsync, (uint64_t destination, uint64_t source, uint64_t bytes, void *stream)) \
    X(cuMemcpyBatchAsync, (uint64_t *destinations, uint64_t *sources, uint64_t *sizes, uint64_t count, struct rg_attributes *attributes, \
                           uint64_t *attribute_starts, uint64_t attribute_count, void *stream)) \
    X(cuMemcpy2DAsync, (const struct rg_2d *copy, void *stream)) \
    X(cuStreamWriteValue64, (void *stream, uint64_t address, uint64_t value, unsigned flags)) \
    X(cuStreamQuery, (void *stream)) \
    X(cuStreamSynchronize, (void *stream)) \
    X(cuEventQuery, (void *event)) \
    X(cuEventDestroy, (void *event)) \
    X(cuLaunchKernel, (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z, \
                       unsigned shared_bytes, void *stream, void **parameters, void **extra)) \
    X(cuGetErrorName, (rg_result result, const char **name))

struct rg_api {
#define RG_MEMBER(name, arguments) rg_result(*name) arguments;
    RG_FUNCTIONS(RG_MEMBER)
#undef RG_MEMBER
};

/* Piece i of a run, 0 to rows - 1: `bytes` from source + i * source_step to destination + i * destination_step. A step
 * may be negative, modulo 2^64; with one row it means nothing. The kernel reads arrays of these from pinned host memory. */
struct rg_run {
    uint64_t source, destination, source_step, destination_step;
    uint32_t bytes, rows;
    uint32_t first; /* rg_copy writes it: pieces of the list before this run's */
    uint32_t reserved;
};

/* A list that is being written. */
struct rg_listing {
    struct rg_run *runs;
    uint32_t count, max;
};

enum rg_way { RG_STRIDED = 0, RG_BATCH, RG_KERNEL, RG_WAYS };

/* What the ways cost on this machine: nanoseconds, and bytes a nanosecond (GB/s). */
struct rg_costs {
    double strided_ns, row_ns; /* one 2D copy, and each of its rows */
    double batched_ns;         /* one copy of a batch */
    double kernel_ns;          /* one launch */
    double kernel_piece_ns;    /* of the kernel: each piece, besides its bytes */
    double engine_rate, kernel_rate;
    double nic_rate; /* what the copies should keep up with; 0: as fast as can be */
};

struct rg_counters {
    uint64_t operations[RG_WAYS], pieces[RG_WAYS], bytes[RG_WAYS];
};

struct rg_copier {
    const struct rg_api *api;
    void *context, *stream;
    void *kernel; /* NULL: none was to be had */
    uint32_t thread_blocks;
    int32_t forced; /* a way, or -1: by cost */
    struct rg_run *lists; /* pinned: list_count arrays of list_runs */
    uint32_t list_count, list_runs;
    uint64_t *destinations, *sources, *sizes; /* [RG_BATCH_PIECES] */
    struct rg_costs costs;
    struct rg_counters counters;
};

/* lists: pinned host memory of list_count * list_runs * sizeof(struct rg_run) bytes, the caller's. -ENOMEM. */
int rg_open(struct rg_copier *copier, const struct rg_api *api, void *context, void *stream, void *kernel, void *lists, uint32_t list_count,
            uint32_t list_runs);
void rg_close(struct rg_copier *copier);
/* For threads of the library: of a caller's thread the context that is current, and with it torch's device, is the
 * caller's. */
rg_result rg_enter(const struct rg_copier *copier);

/* Where the caller lists the pieces of list number `list`, empty. Until everything that was enqueued from it has run,
 * it must not be written again. */
struct rg_listing rg_list(const struct rg_copier *copier, uint32_t list);
/* Appends a run, to the last one where it goes on from that; 0 if the list is full. Inline: millions a second. */
static inline __attribute__((always_inline)) int rg_add(struct rg_listing *listing, struct rg_run run);
/* Enqueues the copies of the first count runs of the list, changing their order. */
rg_result rg_copy(struct rg_copier *copier, uint32_t list, uint32_t count);
/* One copy a piece, also from and to host memory that is not pinned. */
rg_result rg_copy_each(const struct rg_copier *copier, const struct rg_run *runs, uint32_t count);
/* Then, in stream order and after all earlier copies are visible to everybody, writes an aligned word. */
rg_result rg_signal(struct rg_copier *copier, uint64_t address, uint64_t value);

/* Any thread: measures the costs with copies from source to destination (RG_CALIBRATION_BYTES each, the contents
 * of which are lost); waits for the stream. nic_rate as in rg_costs. */
rg_result rg_calibrate(struct rg_copier *copier, uint64_t source, uint64_t destination, double nic_rate);

const char *rg_error_name(const struct rg_api *api, rg_result result);

/* ---- listing ---- */

static inline int rg_push(struct rg_listing *listing, struct rg_run run)
{
    if (listing->count == listing->max) return 0;
    listing->runs[listing->count++] = run;
    return 1;
}

static inline __attribute__((always_inline)) int rg_add(struct rg_listing *listing, struct rg_run run)
{
    if (run.rows > 1 && run.source_step == run.bytes && run.destination_step == run.bytes && (uint64_t)run.rows * run.bytes <= UINT32_MAX) {
        run.bytes *= run.rows;
        run.rows = 1;
    }
    if (!listing->count) return rg_push(listing, run);
    struct rg_run *last = &listing->runs[listing->count - 1];
    uint64_t source = last->source, destination = last->destination; /* of its last piece */
    if (last->rows > 1) {
        source += (last->rows - 1) * last->source_step;
        destination += (last->rows - 1) * last->destination_step;
    }
    uint64_t source_step = run.source - source, destination_step = run.destination - destination;
    if (run.rows == 1 && source_step == last->bytes && destination_step == last->bytes && (uint64_t)last->bytes + run.bytes <= UINT32_MAX) {
        run.source = source; /* one longer piece; the run before it ends one piece earlier */
        run.destination = destination;
        run.bytes += last->bytes;
        if (last->rows > 1) {
            if (listing->count == listing->max) return 0;
            last->rows--;
            return rg_push(listing, run);
        }
        *last = run;
        return 1;
    }
    int goes_on = last->bytes == run.bytes && (last->rows == 1 || (last->source_step == source_step && last->destination_step == destination_step)) &&
                  (run.rows == 1 || (run.source_step == source_step && run.destination_step == destination_step));
    if (!goes_on) return rg_push(listing, run);
    last->rows += run.rows;
    last->source_step = source_step;
    last->destination_step = destination_step;
    return 1;
}

#endif
