/* What fill.c, ordering.c and pace.c share; their Python modules call them through ctypes, each with the GIL released. Python
 * makes contexts, streams, memory and the driver's functions (client/cuda.py). */
#ifndef RAILRELAY_DEVICE_COPIES_H
#define RAILRELAY_DEVICE_COPIES_H

#include "gpu_copy.h"
#include <stdint.h>
#include <time.h>

#define MEMORY_UNIFIED 4      /* CU_MEMORYTYPE_UNIFIED */
#define ACCESS_ORDER_STREAM 1 /* CU_MEMCPY_SRC_ACCESS_ORDER_STREAM */
#define SYNCHRONIZE 1u /* fill: wait for the stream after each slot */

struct rd_piece {
    uint64_t source, destination;
    uint32_t bytes, reserved;
};

/* The driver's, as bare calls take them. */
struct rg_attributes { /* CUmemcpyAttributes */
    uint32_t source_access_order;
    uint32_t source_hint[2], destination_hint[2];
    uint32_t flags;
};

struct rg_2d { /* CUDA_MEMCPY2D */
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

/* Slots to fill, one after the other: pieces starts[i] to starts[i + 1] - 1 are slot i's; and the same as runs. */
struct rd_slots {
    const struct rd_piece *pieces;
    const uint64_t *starts;
    uint64_t count;
    const struct rg_run *runs; /* rd_list_runs makes them */
    const uint64_t *run_starts;
};

static inline struct rg_run rd_run_of(struct rd_piece piece)
{
    return (struct rg_run){piece.source, piece.destination, 0, 0, piece.bytes, 1, 0, 0};
}

struct rd_time {
    double ns;       /* from the first call until the stream is empty */
    double issue_ns; /* of that, in calls */
};

static inline double rd_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static inline void rd_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#endif
