/* Sending end: slices for private memory, which wait for a slot of the destination client's bounce memory. The rail's
 * thread. */
#ifndef RAILRELAY_GRANTS_H
#define RAILRELAY_GRANTS_H

#include "plane.h"

struct rr_grants {
    struct rr_work *parked;                  /* asked for */
    struct rr_work *granted, *granted_last;  /* to be sent next */
    uint32_t parked_count;
    uint64_t next_want;
    struct rr_grant returns[RR_WINDOW];      /* to be given back unused */
    uint32_t return_count;
};

/* The caller asks for it under work->sequence. */
void rr_grants_park(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work);
/* 0, or -1 for an answer to nothing. */
int rr_grants_answer(struct rr_rail *rail, struct rr_grants *grants, uint64_t want, uint32_t code, const struct rr_grant *grant);
/* The next granted slice, or NULL. */
struct rr_work *rr_grants_next(struct rr_grants *grants);
/* Ends those of stopped transfers and of clients that leave: what was granted to them, or will be, goes back. */
void rr_grants_purge(struct rr_rail *rail, struct rr_grants *grants);
/* Lost: none of it was sent. */
void rr_grants_end_stopped(struct rr_rail *rail, struct rr_grants *grants);
void rr_grants_settle(struct rr_rail *rail, struct rr_grants *grants, uint32_t otherwise);

#endif
