/* The verbs NIC: one-sided writes over RC queue pairs, from a rail's device to the same rail's device at the peer.
 *
 * Threads: a rail's thread owns its connections, queue pairs that carry one, and its completion queues (one set for each
 * device that it uses: its own, and others' while it is taken over). Everything in the second half of this file is called by
 * the main thread or its workers, without the GIL: devices, registrations and endpoints that are not a connection yet
 * are under one lock.
 *
 * An endpoint is a queue pair on the device of rail `through` that serves rail `rail`: rr_verbs_new_endpoint, then
 * rr_verbs_connect (receives are posted before it can receive), then rr_plane_add_sender or rr_plane_add_receiver, which
 * take its id in place of a socket. Receiver: add_receiver before the peer is told its queue pair number, or what comes
 * early is lost. */
#ifndef RAILRELAY_VERBS_NIC_H
#define RAILRELAY_VERBS_NIC_H

#include "nic.h"

struct rr_verbs_facts {
    uint8_t gid[16];
    uint32_t lid, mtu_bytes, port_up, ethernet;
    uint32_t max_sge, max_qp_wr, max_cqe;
    uint64_t max_mr_bytes;
};

struct rr_verbs_key {
    uint64_t id;
    uint32_t lkey, rkey;
};

struct rr_verbs_endpoint {
    uint64_t id;
    uint32_t qpn, psn;
};

/* The peer's end and how to reach it. */
struct rr_verbs_route {
    uint8_t gid[16];
    uint32_t qpn, psn, lid, mtu_bytes;
    uint32_t remote_through; /* the peer's rail whose device the peer's end is on */
    uint32_t timeout, retry_count, rnr_retry, min_rnr_timer, traffic_class, service_level;
};

/* What a key may be used for. */
enum rr_verbs_use { RR_VERBS_DATA, RR_VERBS_FLUSH };

/* A byte of memory that a read makes sure of: after it, what was written before can be seen there. */
struct rr_verbs_target {
    uint64_t address;
    uint32_t rkey; /* RR_VERBS_FLUSH */
};

#define RR_VERBS_TARGETS_MAX 64u
#define RR_VERBS_ERROR_BYTES 256u

/* 0 or -errno; where error[RR_VERBS_ERROR_BYTES] is given it says what failed, with the value and the limit. */
int rr_verbs_facts(struct rr_plane *plane, uint32_t rail, struct rr_verbs_facts *out);
int rr_verbs_queue_pairs(struct rr_plane *plane, uint32_t rail); /* on the rail's device */
int rr_verbs_register(struct rr_plane *plane, uint32_t through, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                      enum rr_verbs_use use, struct rr_verbs_key *out);
int rr_verbs_deregister(struct rr_plane *plane, uint64_t id);
int rr_verbs_new_endpoint(struct rr_plane *plane, uint32_t rail, uint32_t through, int sending, struct rr_verbs_endpoint *out,
                          char *error);
int rr_verbs_connect(struct rr_plane *plane, uint64_t endpoint, const struct rr_verbs_route *route, char *error);
int rr_verbs_drop_endpoint(struct rr_plane *plane, uint64_t endpoint);
/* Writes zero bytes with an immediate through a connected endpoint; COMMAND_DONE with 0, or the completion's status. */
int rr_verbs_probe(struct rr_plane *plane, uint64_t endpoint, uint64_t cookie);
/* The queue pair by which receivers of the rail through this device read targets: made if it is not there, as before the
 * first one and when it was lost. If flush is "always", connecting a receiver's end does that. */
int rr_verbs_open_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, char *error);
/* From now on receivers read these targets before they answer; those that need the queue pair are lost if it is not there.
 * Without targets nothing is read, but for a byte of host memory if flush is "always". The rail answers once nothing
 * reads the targets of before any more. */
int rr_verbs_set_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, const struct rr_verbs_target *targets, uint32_t count,
                       uint64_t cookie);
void rr_verbs_free(struct rr_plane *plane); /* after all rails have stopped */

#endif
