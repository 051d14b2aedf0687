/* Inside of the verbs NIC: what the verbs_*.c share. The rail's thread, but for what says otherwise.
 *
 * On the wire, one queue pair for each direction between two rails. Sender to receiver: a frame is a chain of RDMA writes
 * whose last one carries an immediate, (bytes - 1) << 2 | the low bits of its sequence; frames are numbered from 1 on both
 * sides alike, since a reliable connection keeps their order. Receiver to sender: messages of (sequence, result) pairs
 * after the bytes are placed. At most RR_WINDOW frames are without an answer, and both ends keep more receives posted than
 * the other can need, so that no message finds a receiver that is not ready.
 *
 * Private memory (window_bytes): the sender asks with a WANT, is granted a bounce slot and its table of runs, writes both,
 * and ends the frame with a message in place of the immediate; what is never sent goes back with a RETURN. */
#ifndef RAILRELAY_VERBS_INSIDE_H
#define RAILRELAY_VERBS_INSIDE_H

#include "bounce.h"
#include "grants.h"
#include "verbs_api.h"
#include "verbs_nic.h"
#include "window.h"

#ifdef RR_HAVE_VERBS

#define WR_BATCH 32u            /* work requests handed over with one doorbell */
#define WR_BYTES_MAX 262144u    /* of one work request */
#define SGE_MAX 16u
#define WC_BATCH 32u
#define CQ_ENTRIES_FIRST 4096u  /* of the first completion queue; each further one has twice as many */
#define CQ_ENTRIES 65536u       /* at most, if the device has so many */
#define CQS_MAX 32u
#define ENDPOINTS_MAX 16384u
#define MESSAGE_BYTES 256u
#define MESSAGES 128u           /* on their way from one end */
#define RECEIVES (3u * RR_WINDOW) /* immediates or answers, wants or grants, and room for those posted again in batches */
#define RECEIVE_BATCH 32u
#define PAIRS_MAX 15u           /* in one message */
#define IMM_SEQUENCE 3u
#define RUNS_IN_MESSAGE 11u
#define STAGES 4u /* tables of runs on their way */
#define IN_FLIGHT_BYTES (16u << 20) /* posted before the next slice of bulk: what a slice of express may wait for */
#define LOOK_CYCLES 64u         /* looks at the completion queues between two looks at descriptors */
#define EVENTS_PER_POLL 16
#define ACK_EVENTS 64u
#define MESSAGE_MAGIC 0x53455256u /* "VRES" */

#define WR_RECEIVE (1ull << 63)

enum message_type { MESSAGE_DONE = 1, MESSAGE_GRANT, MESSAGE_WANT, MESSAGE_RETURN, MESSAGE_BOUNCED };

struct message {
    uint32_t magic;
    uint16_t type;
    uint16_t count; /* DONE: pairs */
    uint64_t grant; /* rr_bounce_grant_of */
    union {
        struct rr_ack pairs[PAIRS_MAX]; /* DONE */
        struct {
            uint64_t sequence; /* of the want; BOUNCED: of the frame */
            uint64_t bytes, tag;
            uint64_t address, table_address; /* GRANT */
            uint32_t rkey, owner;
            uint32_t run_count, code;
            struct rr_wire_run runs[RUNS_IN_MESSAGE]; /* BOUNCED: all of them, or none if there are more */
        } one;
    };
};
_Static_assert(sizeof(struct message) == MESSAGE_BYTES, "wire message");

enum role { NEW, SENDER, RECEIVER, PROBE, FLUSH };

/* MADE until verbs_connect; OPEN; DRAINING: in the error state, work requests and receives are coming back; DRAINED: the
 * NIC reads and writes nothing for it any more. */
enum state { MADE, OPEN, DRAINING, DRAINED };

struct verbs_flush_order {
    struct verbs_flush_order *next;
    uint64_t cookie;
    uint32_t through, count;
    struct rr_verbs_target targets[RR_VERBS_TARGETS_MAX];
};

/* What a rail's thread uses of one device: its completion queues and the channel that wakes it. Made by any thread under
 * `making`; the thread sees it once nic->ports[] or cq_count says so. */
struct verbs_port {
    struct verbs_device *device;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cqs[CQS_MAX];
    uint32_t room[CQS_MAX]; /* under the lock: completions that still fit */
    uint32_t unacknowledged[CQS_MAX];
    uint32_t cq_count;
    uint32_t through;
    uint32_t held_at, held_count;
    uint8_t armed[CQS_MAX];
    struct rr_connection *flush;         /* a queue pair connected to itself; NULL: none */
    struct verbs_flush_order *flush_orders; /* in force, but reads of before are still under way */
    struct rr_verbs_target targets[RR_VERBS_TARGETS_MAX];
    uint32_t target_count, flush_needed; /* needed: nothing is answered without it */
    struct ibv_wc held[WC_BATCH]; /* of an endpoint whose command is still to be run */
};

struct settlement {
    uint64_t placed;
    uint32_t ack_count, otherwise;
    struct rr_ack acks[RR_WINDOW];
};

enum frame_state { FRAME_POSTING, FRAME_POSTED, FRAME_READ, FRAME_ANSWERED };

/* READ: all its work requests have completed; ANSWERED: they have not. After both it is done. */
struct frame {
    uint64_t last; /* position of its last work request */
    uint64_t bytes;
    enum frame_state state;
    uint32_t code;     /* ANSWERED */
    uint32_t override; /* it ends with this, whatever the answer */
};

struct rr_connection {
    struct rr_connection *next;
    struct verbs_nic *nic;
    struct verbs_port *port;
    uint64_t id;         /* of the connection; 0: an endpoint only */
    uint64_t wr_tag;     /* in the wr_id of all its work requests */
    uint32_t slot, generation;
    enum role role;
    enum state state;
    int sending;
    int early;           /* its command was waited for */
    int busy, doomed;    /* under the lock: being connected; dropped meanwhile */
    int error;
    int listed;          /* in nic->touched */
    struct rr_connection *next_touched;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *memory;     /* messages out, messages in, staged tables of runs */
    uint64_t memory_bytes;
    uint32_t cq, cq_entries;
    uint32_t psn, remote_through;
    uint64_t probe_cookie;

    /* both ends */
    uint32_t depth;           /* of the send queue, without the one that ends a drain */
    uint32_t receives;
    uint64_t posted, completed; /* positions in the send queue, from 1 */
    uint64_t received_posted, received_completed;
    uint32_t receives_due;    /* to be posted again */
    uint64_t messages_posted;
    uint64_t message_position[MESSAGES];

    /* sender */
    struct rr_path *paths[RR_CLASSES];
    struct rr_window window;
    struct frame frames[RR_WINDOW]; /* by entry of the window */
    uint8_t entry_of[RR_WINDOW];    /* by sequence % RR_WINDOW: where it probably is */
    uint8_t order[RR_WINDOW];       /* circular: entries whose work requests complete next */
    uint32_t order_at, order_count;
    uint64_t in_flight_bytes;
    uint64_t next_sequence;
    struct rr_work *current;      /* being posted */
    uint32_t entry, run, piece;
    uint64_t run_done, piece_done, address;
    uint32_t rkey;
    struct rr_grants grants;
    uint64_t stage_position[STAGES]; /* of the work request that reads it */
    uint32_t next_stage;
    uint32_t batch, unsignaled;
    uint32_t signal_every;
    uint32_t sges_each;
    struct ibv_send_wr wrs[WR_BATCH];
    struct ibv_sge *sges;         /* [WR_BATCH * sges_each] */
    struct settlement *settlement; /* to be applied once drained */
    int resting;                   /* settled, but for frames that their owners have not copied yet */
    uint64_t ended;                /* sequence: this frame and those before it have been written, or have ended otherwise */

    /* receiver */
    uint32_t session;
    uint64_t received;
    struct rr_ack acks[RR_WINDOW]; /* the latest, circular */
    uint64_t ack_count;
    struct rr_ack due[RR_WINDOW];  /* answers to be sent: [due_sent, due_pushed), of which up to due_flushed may be */
    uint64_t due_sent, due_pushed, due_flushed, flush_mark;
    struct due_grant {
        uint64_t want, grant;
        uint32_t owner, code;
    } due_grants[RR_WINDOW];       /* circular */
    uint32_t due_grant_at, due_grant_count;
    uint32_t wants;                /* not answered yet */
    uint32_t bounces_pending;
    int fencing, fenced; /* asked for; told */
};

struct verbs_nic {
    struct rr_nic base;
    struct verbs_device *device;
    struct verbs_port *ports[RR_MAX_RAILS]; /* by through */
    struct rr_connection *connections;
    struct rr_connection *touched; /* by completions: something may be posted */
    struct rr_wire_run *runs;      /* [table_entries]: of a bounced frame, copied once */
    uint32_t cycles;
    int epoll_fd;
    int some_lost;
};

struct verbs_key {
    struct verbs_key *next;
    struct verbs_device *device;
    struct ibv_mr *mr;
    uint64_t id;
};

/* Of the whole plane. */
struct rr_verbs {
    pthread_mutex_t lock;
    pthread_mutex_t making; /* of ports and completion queues, which takes long: before the lock, which rails take */
    struct rr_connection *endpoints[ENDPOINTS_MAX]; /* written under the lock, read by rail threads */
    uint16_t generations[ENDPOINTS_MAX];
    uint32_t next_slot;
    struct verbs_key *keys;
    uint64_t next_key;
    pthread_t reaper; /* destroys queue pairs, which takes longer than a rail may stand still */
    pthread_cond_t reaper_wake, reaper_idle;
    struct verbs_orphan *orphans;
    struct rr_connection *dead;
    int reaping, reaper_stop;
};

/* A queue pair of a connection that ends without completions. */
struct verbs_orphan {
    struct verbs_orphan *next;
    struct ibv_qp *qp;
    struct rr_rail *rail;
    uint32_t slot, generation;
};

static inline struct verbs_nic *verbs(struct rr_nic *nic) { return (struct verbs_nic *)nic; }
static inline uint32_t send_room(const struct rr_connection *c) { return c->depth - (uint32_t)(c->posted - c->completed); }
static inline uint64_t send_wr_id(const struct rr_connection *c, uint64_t position) { return c->wr_tag | (uint32_t)position; }

/* verbs_memory.c; any thread */
struct verbs_nic *verbs_nic_of(struct rr_plane *plane, uint32_t rail);

/* verbs_endpoint.c */
int verbs_new_endpoint(struct rr_plane *plane, uint32_t rail, uint32_t through, int sending, enum role role, struct rr_verbs_endpoint *out,
                       char *error);
struct rr_connection *verbs_by_id(struct rr_plane *plane, uint64_t id);
void verbs_run_drop(struct rr_rail *rail, struct rr_command *command);
struct rr_verbs *verbs_state(struct rr_plane *plane);
void verbs_free_state(struct rr_verbs *state);
struct rr_connection *verbs_endpoint_at(struct rr_plane *plane, uint32_t slot, uint32_t generation);
struct rr_connection *verbs_adopt(struct verbs_nic *nic, uint64_t endpoint, int sending);
void verbs_destroy(struct rr_connection *c);
void verbs_destroy_queue_pair(struct rr_connection *c);
void verbs_wait_for_reaper(struct rr_verbs *state);
void verbs_leave_device(struct rr_plane *plane, struct verbs_device *device);
int verbs_post_receives(struct rr_connection *c, uint32_t count);

/* verbs_nic.c */
void verbs_lose(struct rr_nic *base, struct rr_connection *c, int error);
void verbs_begin_drain(struct rr_connection *c);
void verbs_touch(struct rr_connection *c);
void verbs_unlink(struct rr_connection *c);
struct ibv_send_wr *verbs_next_wr(struct rr_connection *c);
void verbs_post_batch(struct rr_connection *c);
int verbs_message_free(const struct rr_connection *c);
struct message *verbs_next_message(struct rr_connection *c, enum message_type type);

/* verbs_sender.c */
struct rr_connection *verbs_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int endpoint);
int verbs_post(struct rr_nic *base, struct rr_path *path);
int verbs_push(struct rr_connection *c);
int verbs_on_answer(struct rr_connection *c, const struct message *message);
void verbs_on_sent(struct rr_connection *c);
void verbs_sender_drained(struct rr_connection *c);
void verbs_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                  uint32_t otherwise);
void verbs_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result);
void verbs_purge(struct rr_nic *base);
void verbs_owe_lost(struct verbs_nic *nic);
void verbs_abandon(struct rr_nic *base, struct rr_client *client);
void verbs_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context);
uint32_t verbs_naming(struct rr_nic *base, uint32_t peer, uint32_t handle, struct rr_mark *marks);
int verbs_ended(struct rr_nic *base, const struct rr_mark *mark);

/* verbs_flush.c */
int verbs_flush_late(struct rr_connection *c);
void verbs_on_flushed(struct rr_connection *flush);
void verbs_flush_failed(struct rr_connection *flush);
void verbs_free_orders(struct verbs_port *port);

/* verbs_receiver.c */
void verbs_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int endpoint);
int verbs_on_frame(struct rr_connection *c, uint32_t immediate);
int verbs_on_request(struct rr_connection *c, const struct message *message);
void verbs_send_answers(struct rr_connection *c);
void verbs_receiver_drained(struct rr_connection *c);
void verbs_fence(struct rr_nic *base, struct rr_connection *c);
void verbs_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result);
extern const struct rr_bounce_ops verbs_bounce_ops;
int verbs_reclaim(struct rr_nic *base, struct rr_client *client);
void verbs_drop_bounces(struct rr_nic *base, struct rr_client *client);

#endif
#endif
