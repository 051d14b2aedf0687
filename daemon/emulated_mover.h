/* The moving part of the emulated NIC's helper process: takes requests from the ring, copies, and ends each when the
 * wire would have. One mover thread runs re_run; the control thread adds and removes memory meanwhile. */
#ifndef RAILRELAY_EMULATED_MOVER_H
#define RAILRELAY_EMULATED_MOVER_H

#include <pthread.h>
#include <stdint.h>

#include "emulated_ring.h"
#include "gpu_copy.h"
#include "plane.h"

#define RE_STARTED 8u /* requests whose copies have begun: that of one hides behind the pacing of those before it */

/* Memory by its address in the daemon. */
struct re_memory {
    uint64_t base, bytes;
    uint64_t here;              /* its address in this process, or on the GPU */
    struct rr_mapping *mapping; /* host memory: knows whether its owner has cut it off */
    uint64_t id;
};

struct re_started {
    uint32_t result;
    uint64_t copied_ns; /* when it was seen; 0: not yet */
};

struct re_mover {
    struct re_ring *ring;
    uint64_t ring_bytes;
    int kick_fd;
    pthread_mutex_t lock; /* of memories */
    struct re_memory *memories; /* by base */
    uint32_t memory_count, memory_capacity;
    uint32_t stop;
    struct re_piece *pieces; /* of the request being started, in this process's addresses */
    /* the mover thread */
    uint64_t started, placed;
    uint64_t wire_free_ns; /* when a wire that never waited for a copy would have sent all before */
    uint64_t ended_ns;     /* when the last one ended */
    struct re_started state[RE_STARTED];
    /* GPU; copier.api is NULL if memory is the host's */
    struct rg_copier copier;
    /* Only an event after each request's copies: a write by the stream is work for the GPU's front end, and a GPU that
     * computes for another process switches to this one for it. */
    rg_result (*cuEventRecord)(void *event, void *stream);
    void *events[RE_STARTED];
    rg_result gpu_error;
    const char *gpu_call;
};

/* 0 or -errno; the descriptors stay the caller's and must stay open. */
int re_open(struct re_mover *mover, int ring_fd, int kick_fd);
void re_close(struct re_mover *mover);
/* Host memory: maps the file. 0 or -errno. here_out: where. */
int re_add_file(struct re_mover *mover, uint64_t id, uint64_t base, uint64_t bytes, int fd, uint64_t offset, uint64_t *here);
int re_add_address(struct re_mover *mover, uint64_t id, uint64_t base, uint64_t bytes, uint64_t here);
/* The mover is to reach it at another address. 0 or -ENOENT. */
int re_relocate(struct re_mover *mover, uint64_t id, uint64_t here);
/* Nothing that was posted uses it any more. 0 or -ENOENT. */
int re_remove(struct re_mover *mover, uint64_t id);
/* Until re_stop: 0. -EIO: a CUDA call failed, see gpu_call and gpu_error. */
int re_run(struct re_mover *mover);
void re_stop(struct re_mover *mover); /* any thread */

#endif
