/* The seam between a rail and its NIC. One implementation a transport (tcp_nic.c); all calls on the rail's thread.
 *
 * A connection carries frames one way, from a sender to a receiver, each numbered from 1, and answers each frame with
 * a result. A NIC takes work from its path with rr_path_next, calls rr_work_posted when it begins to send it, and gives
 * each piece back exactly once with rr_work_done (or, after a loss, through settle), after which nothing reads the
 * work's source. After what may take a microsecond it calls rr_rail_time_passes, or times in the trace are stale. */
#ifndef RAILRELAY_NIC_H
#define RAILRELAY_NIC_H

#include "plane.h"

struct rr_bounce_ops; /* bounce.h */

struct rr_nic_ops {
    const char *name;
    const struct rr_bounce_ops *bounce; /* NULL: it cannot reach private memory */
    int takes_made_up; /* it translates made-up addresses (struct rr_mapping) itself */
    int one_sided;     /* it writes peers' memory with keys; one connection serves both classes of a path */
    struct rr_nic *(*open)(struct rr_rail *rail);
    void (*close)(struct rr_nic *nic);
    /* Lets poll return when this eventfd is written; descriptors of one client, removed before they are closed. */
    int (*watch_kick)(struct rr_nic *nic, int fd, int watch);
    /* Sends what the path's slices and connections allow; work count. */
    int (*post)(struct rr_nic *nic, struct rr_path *path);
    /* Waits up to timeout_ns (0: only look) for the NIC or the rail's kick, and moves what is ready; work count. */
    int (*poll)(struct rr_nic *nic, int64_t timeout_ns);
    struct rr_connection *(*add_sender)(struct rr_nic *nic, uint64_t id, struct rr_path *path, uint32_t epoch, int fd);
    void (*add_receiver)(struct rr_nic *nic, uint64_t id, uint32_t session, int fd);
    struct rr_connection *(*find)(struct rr_nic *nic, uint64_t id);
    /* Sender: stops using the connection as if it had failed; RR_EVENT_SENDER_LOST follows. */
    void (*lose)(struct rr_nic *nic, struct rr_connection *connection, int error);
    /* Sender, lost: the frames in acks ended with their codes; the rest is queued again, or fails with `otherwise` if
     * that is not RR_OK. Those whose code is RR_UNSETTLED wait for another call; other slices do not. */
    void (*settle)(struct rr_nic *nic, struct rr_connection *connection, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                   uint32_t otherwise);
    /* Receiver: nothing more is placed; RR_EVENT_RECEIVER_FENCED follows. Frames that their owners have still to copy out of
     * bounce memory are told as RR_UNSETTLED there, each with a RR_EVENT_FRAME_SETTLED later. */
    void (*fence)(struct rr_nic *nic, struct rr_connection *connection);
    /* Receiver: frames under way to this export (or with this tag to this client) are refused from now on. */
    void (*refuse)(struct rr_nic *nic, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result);
    /* Receiver: may bytes of refused frames still land? NULL: never, once refuse has returned. */
    int (*landing)(struct rr_nic *nic, uint32_t client, uint32_t handle, uint64_t tag);
    /* One-sided: the posted frames, or frames of which that is not known any more, that name this handle of the peer, by the
     * latest of each connection. marks: NULL, or room for as many as there were a moment ago. How many. */
    uint32_t (*naming)(struct rr_nic *nic, uint32_t peer, uint32_t handle, struct rr_mark *marks);
    /* Has that frame ended, and those before it? Looked at when rail->frames_ended says so. */
    int (*ended)(struct rr_nic *nic, const struct rr_mark *mark);
    /* The NIC is of no use any more: everything posted, now and later, ends with this result. NULL: cannot happen. */
    void (*fail)(struct rr_nic *nic, uint32_t result);
    /* Ends work that is stopped and of which the receiver has nothing yet. */
    void (*purge)(struct rr_nic *nic);
    /* The client has left: lets go of its memory as soon as the NIC does not read it any more. */
    void (*abandon)(struct rr_nic *nic, struct rr_client *client);
    /* Calls visit for each posted piece of work that the fence would settle. */
    void (*each_posted)(struct rr_nic *nic, void (*visit)(void *context, struct rr_connection *connection, struct rr_work *work),
                        void *context);
    void (*close_senders)(struct rr_nic *nic, uint32_t peer, uint32_t result);
    /* Bounce memory of a client: give grants and acknowledgements for what the client has emptied; work count. */
    int (*reclaim)(struct rr_nic *nic, struct rr_client *client);
    void (*drop_bounces)(struct rr_nic *nic, struct rr_client *client);
    uint64_t (*connection_id)(const struct rr_connection *connection);
};

struct rr_nic {
    const struct rr_nic_ops *ops;
    struct rr_rail *rail;
};

/* The results that a receiver may answer with: another one would tell a client what is not true of its own daemon. */
static inline int rr_is_answer(uint64_t code)
{
    return code == RR_OK || code == RR_ABORTED || code == RR_REGION_GONE || code == RR_BAD_REGION || code == RR_OUT_OF_BOUNDS;
}

/* epoll_wait to the nanosecond; -1: no limit. */
struct epoll_event;
int rr_epoll_wait(int epoll_fd, struct epoll_event *events, int max, int64_t timeout_ns);

extern const struct rr_nic_ops rr_tcp_nic, rr_emulated_nic, rr_verbs_nic;

int rr_emulated_ring_fd(struct rr_nic *nic); /* emulated_ring.h; -1: another NIC */

#endif
