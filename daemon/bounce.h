/* Receiving end for private memory: frames land in bounce memory that the owner's own thread empties. A sender asks for a
 * slot of it and sends only what was granted, so that an owner that has stopped holds up nobody else's frames. The
 * rail's thread. */
#ifndef RAILRELAY_BOUNCE_H
#define RAILRELAY_BOUNCE_H

#include "nic.h"

/* What a NIC does about its connections. */
struct rr_bounce_ops {
    int (*takes_grants)(const struct rr_connection *connection); /* 0: lost */
    void (*grant)(struct rr_nic *nic, struct rr_connection *connection, uint64_t want, const struct rr_bouncer *bouncer, uint32_t slot);
    void (*refuse)(struct rr_nic *nic, struct rr_connection *connection, uint64_t want, uint32_t code);
    /* The owner has copied the frame, or never will. */
    void (*settled)(struct rr_nic *nic, const struct rr_bounce_pending *pending, uint32_t code);
};

/* A frame that has arrived in a slot. */
struct rr_bounced {
    struct rr_connection *connection;
    const struct rr_wire_run *runs;
    uint64_t sequence, bytes, tag;
    uint32_t run_count, owner, slot, window;
};

/* NULL: no such client, or it has no bounce memory (any more). */
struct rr_bouncer *rr_bouncer_of(struct rr_rail *rail, uint32_t client);
/* What a sender is told of a slot; another client with the owner's number never has the same. */
static inline uint64_t rr_bounce_grant_of(const struct rr_bouncer *bouncer, uint32_t slot) { return (uint64_t)bouncer->serial << 32 | (slot + 1); }
static inline uint32_t rr_bounce_slot_of(uint64_t grant) { return (uint32_t)grant - 1; }
/* The bounce memory that the grant is of; NULL: none (any more), also if a later client has the owner's number. */
struct rr_bouncer *rr_bouncer_granted(struct rr_rail *rail, uint32_t client, uint64_t grant);
/* A connection asks for a slot: granted, put on the list, or refused. 0, or -ENOMEM. */
int rr_bounce_want(struct rr_nic *nic, uint32_t client, struct rr_connection *connection, uint64_t want, uint64_t bytes);
void rr_bounce_returned(struct rr_nic *nic, uint32_t client, const struct rr_connection *connection, uint64_t grant);
/* A frame begins to use a grant, which is good for one. 0, or -1: it was not granted, or the frame does not fit. */
int rr_bounce_begin(struct rr_rail *rail, struct rr_bouncer *bouncer, const struct rr_connection *connection, uint64_t grant, uint64_t bytes,
                    uint32_t run_count);
/* Its runs have been checked. */
void rr_bounce_publish(struct rr_rail *rail, const struct rr_bounced *frame);
void rr_bounce_free_slot(struct rr_nic *nic, struct rr_bouncer *bouncer, uint32_t slot);
int rr_bounce_reclaim(struct rr_nic *nic, struct rr_client *client);
/* The client is gone: nobody empties its bounce memory any more. */
void rr_bounce_drop(struct rr_nic *nic, struct rr_client *client);
/* The connection is fenced: tells what has arrived. What was granted to it or half written goes to others; what its owners
 * have not copied yet is told as RR_UNSETTLED, and what became of it later, by rr_bounce_settled_late: an owner that has
 * stopped keeps nobody else waiting. acks: circular; connection NULL: nothing ever came. */
void rr_report_fence(struct rr_nic *nic, const struct rr_connection *connection, uint64_t id, uint64_t received, const struct rr_ack *acks,
                     uint64_t ack_count);
void rr_bounce_settled_late(struct rr_nic *nic, uint64_t id, uint64_t sequence, uint32_t code);

/* Checks every run of a frame; the result decides whether any byte of it is placed. iov: where they are, merged, or NULL for
 * private memory. */
uint32_t rr_check_runs(struct rr_rail *rail, uint32_t session, uint32_t owner, uint64_t tag, uint64_t bytes, const struct rr_wire_run *runs,
                       uint32_t run_count, struct iovec *iov, uint32_t *iov_count);

#endif
