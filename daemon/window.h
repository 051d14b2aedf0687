/* Frames of a sending connection that wait for their answer, and what becomes of them when the connection is lost. The rail's
 * thread. Answers come in any order: a receiver that one destination keeps waiting answers the others. */
#ifndef RAILRELAY_WINDOW_H
#define RAILRELAY_WINDOW_H

#include "plane.h"

struct rr_window {
    struct rr_work *works[RR_WINDOW]; /* NULL with a sequence: of a client that has left */
    uint64_t sequences[RR_WINDOW];    /* 0: free */
    struct rr_debt owed[RR_WINDOW];   /* lost connection: by entry */
    uint16_t free[RR_WINDOW];
    uint32_t free_count;
};

void rr_window_init(struct rr_window *window);
/* An entry for work->sequence; there is a free one. */
uint16_t rr_window_take(struct rr_window *window, struct rr_work *work);
void rr_window_free(struct rr_window *window, uint32_t entry);
uint32_t rr_window_count(const struct rr_window *window);

/* Queues work again that was not placed, or ends it if its transfer was stopped, its client has left, or `otherwise`
 * is not RR_OK. */
void rr_work_again(struct rr_rail *rail, struct rr_work *work, uint32_t otherwise);
/* Ends those in the list whose transfers were stopped. */
void rr_end_stopped(struct rr_rail *rail, struct rr_work **link);
/* A lost connection of which nothing is read any more: work of stopped transfers is owed, so that a peer that is gone for
 * good holds no slots that others need. */
void rr_window_owe_stopped(struct rr_rail *rail, struct rr_window *window);
/* The receiver is fenced: frames in acks, up to `placed`, ended with their codes; the rest goes through rr_work_again. Those
 * whose code is RR_UNSETTLED have arrived, but their owner has not copied them yet: they stay until it is called again.
 * How many. */
uint32_t rr_window_settle(struct rr_rail *rail, struct rr_window *window, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                          uint32_t otherwise);
/* Of a fenced connection: frames of a client that leaves do not wait for what becomes of them. */
void rr_window_let_go(struct rr_rail *rail, struct rr_window *window, const struct rr_client *client);

#endif
