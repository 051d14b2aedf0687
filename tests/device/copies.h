/* What fill.c, ordering.c and pace.c share; their Python modules call them through ctypes, each with the GIL released. Python
 * makes contexts, streams, memory and the driver's functions (client/cuda.py). */
#ifndef RAILRELAY_DEVICE_COPIES_H
#define RAILRELAY_DEVICE_COPIES_H

#include "gpu_copy.h"
#include <stdint.h>
#include <time.h>

#define SYNCHRONIZE 1u /* fill: wait for the stream after each slot */

/* Slots to fill, one after the other: pieces starts[i] to starts[i + 1] - 1 are slot i's. */
struct rd_slots {
    const struct rg_piece *pieces;
    const uint64_t *starts;
    uint64_t count;
};

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
