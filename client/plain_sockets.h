/* What plain C reaches between two processes over TCP, and what scattered copies cost: the limits of `railrelay bench`.
 * One thread a connection; nothing here knows of lanes, rails or the daemon. */
#ifndef RAILRELAY_PLAIN_SOCKETS_H
#define RAILRELAY_PLAIN_SOCKETS_H

#include <stdint.h>
#include <sys/uio.h>

struct plain_connection {
    int fd;  /* connected, blocking */
    int cpu; /* -1: none */
    const uint64_t *addresses, *lengths;
    uint64_t count, bytes_per_call;
    uint32_t rounds;
    uint64_t gap_ns; /* asleep between rounds */
    /* results */
    int error; /* errno */
    uint64_t begin_ns, end_ns, cpu_ns;
    uint64_t *round_ns; /* [rounds], sender only */
};

/* Each round: all blocks in order, then the other side's 32-byte reply, which says that they are in their places. */
void plain_send(struct plain_connection *connections, uint32_t count);
void plain_receive(struct plain_connection *connections, uint32_t count);

/* Copies the blocks one after the other into slots, which are used in turn; CPU time of it. */
uint64_t plain_gather(const uint64_t *addresses, const uint64_t *lengths, uint64_t count, uint8_t *slots, uint64_t slot_bytes, uint32_t slot_count);

/* Copies equal blocks one after the other; the time of it. */
uint64_t plain_copy(const uint64_t *sources, const uint64_t *destinations, uint64_t count, uint64_t length);

/* CPU time of a process since it began, all threads, or 0. */
uint64_t plain_process_cpu_ns(int pid);

#endif
