/* Sending end: slices for private memory, which wait for a slot of the destination client's bounce memory. The rail's
 * thread. */
#ifndef RAILRELAY_GRANTS_H
#define RAILRELAY_GRANTS_H

#include "plane.h"

struct rr_grants {
    struct rr_work *parked;                  /* asked for */
    struct rr_aside {
        struct rr_work *first, *last;
    } aside[RR_MAX_CLIENTS];                 /* by owner: must not ask yet */
    uint64_t owners_aside[RR_MAX_CLIENTS / 64]; /* bits: who has any */
    uint32_t next_owner;                     /* who is looked at first */
    uint16_t asked_by[RR_MAX_CLIENTS];       /* by owner, as `asked` */
    struct rr_work *granted, *granted_last;  /* to be sent next */
    uint64_t next_want;
    uint32_t asked;                          /* not answered yet, of parked slices or given up */
    uint32_t granted_count, given_up_count, return_count;
    struct rr_given_up {
        uint64_t want;
        uint32_t owner;
    } given_up[RR_WINDOW];                   /* asked for by slices that have ended */
    struct rr_grant returns[RR_WINDOW];      /* to be given back unused */
};

/* Of all that was asked for and neither used nor given back at most RR_WINDOW: a receiver whose owner has stopped keeps wants
 * whose slices ended long ago, and takes no more of one connection. One owner has at most RR_WANTS_OF_OWNER of them, and
 * one when half of all are out, so that owners that have stopped leave some for others. */
#define RR_WANTS_OF_OWNER 16u

/* Takes a slice for private memory. 1: the caller asks for it under work->sequence. 0: it waits for an answer that another
 * for the same owner has given up, or until it may ask. */
int rr_grants_want(struct rr_rail *rail, struct rr_grants *grants, struct rr_connection *connection, struct rr_work *work);
/* A slice that waited and may ask now, as above; NULL: none. */
struct rr_work *rr_grants_due(struct rr_rail *rail, struct rr_grants *grants);
/* Does any wait that has not asked yet? */
int rr_grants_waiting(const struct rr_grants *grants);
/* 0, or -1 for an answer to nothing. */
int rr_grants_answer(struct rr_rail *rail, struct rr_grants *grants, uint64_t want, uint32_t code, const struct rr_grant *grant);
/* The next granted slice, or NULL. */
struct rr_work *rr_grants_next(struct rr_grants *grants);
/* What rr_grants_next gave is not sent. */
void rr_grants_unused(struct rr_grants *grants, const struct rr_grant *grant);
/* Ends those of stopped transfers and of clients that leave: what was granted to them, or will be, goes back. */
void rr_grants_purge(struct rr_rail *rail, struct rr_grants *grants);
/* Lost: none of it was sent. */
void rr_grants_end_stopped(struct rr_rail *rail, struct rr_grants *grants);
void rr_grants_settle(struct rr_rail *rail, struct rr_grants *grants, uint32_t otherwise);

#endif
