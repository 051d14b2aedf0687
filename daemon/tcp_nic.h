/* Inside of the TCP NIC: what tcp_nic.c, tcp_sender.c and tcp_receiver.c share. The rail's thread. */
#ifndef RAILRELAY_TCP_NIC_H
#define RAILRELAY_TCP_NIC_H

#include "bounce.h"
#include "grants.h"
#include "window.h"

#define FRAME_MAGIC 0x4d415246u /* "FRAM" */
#define REPLY_MAGIC 0x4c504552u /* "REPL" */
#define FRAME_DATA 1u
#define FRAME_WANT 2u   /* asks for bounce memory */
#define FRAME_RETURN 3u /* gives a grant back unused */
#define REPLY_DONE 1u
#define REPLY_GRANT 2u
#define PIECES_PER_CALL 1022u
#define LOOKAHEAD_BYTES 8192u
#define VISIT_BYTES (1u << 20) /* moved for one connection before others get their turn */
#define SCRATCH_BYTES 65536u
#define EVENTS_PER_POLL 64
#define RECEIVE_WAKE_BYTES 262144u /* a receiver in the middle of a frame sleeps until this much more is there */
#define REPLIES_MAX (3 * RR_WINDOW)

struct frame {
    uint32_t magic;
    uint16_t type;
    uint16_t window; /* entry of the sender's window, repeated in the reply */
    uint32_t run_count;
    uint32_t owner; /* number of the destination client at the receiver */
    uint64_t sequence;
    uint64_t bytes;
    uint64_t tag;
    uint64_t grant; /* bounce slot + 1, or 0 */
    struct rr_wire_run run;
};
_Static_assert(sizeof(struct frame) == 64, "wire frame");

struct reply {
    uint32_t magic;
    uint16_t type;
    uint16_t code;
    uint64_t sequence;
    uint64_t grant;
    uint64_t window; /* of the frame; in a grant the owner of the bounce memory */
};
_Static_assert(sizeof(struct reply) == 32, "wire reply");

enum role { SENDER, RECEIVER };
enum stage { HEADER, RUNS, PAYLOAD };

struct rr_connection {
    struct rr_connection *next;
    enum role role;
    int fd; /* -1: lost */
    int watch_error;
    uint64_t id;

    /* sender */
    struct rr_path *path;
    struct frame out;
    struct rr_work *current; /* being written; NULL while `out` is a WANT or nothing is */
    uint64_t out_sent, out_bytes;
    uint32_t piece;
    uint64_t piece_sent;
    int writing, blocked;
    uint64_t next_sequence;
    struct rr_window window; /* frames without a reply */
    struct rr_grants grants;
    int resting; /* settled, but for frames that their owners have not copied yet */
    struct reply in_replies[128];
    uint32_t in_bytes;

    /* receiver */
    uint32_t session;
    enum stage stage;
    uint32_t wake_bytes; /* what SO_RCVLOWAT is set to */
    struct frame in;
    uint32_t in_have;
    uint32_t run_have; /* bytes */
    uint32_t iov_count, iov_at;
    uint64_t payload_left;
    uint16_t code;
    int refused;
    uint32_t patches; /* rr_guard_patches() when the frame began */
    int32_t bounce_slot; /* -1: none */
    uint32_t bounces_pending;
    uint32_t wants; /* not answered yet */
    int fencing;
    uint64_t received;   /* sequence of the last whole frame */
    struct rr_ack acks[RR_WINDOW]; /* the latest, circular; no more replies can be on their way */
    uint64_t ack_count;
    struct rr_wire_run *runs; /* [RR_WIRE_RUNS_MAX] */
    struct iovec *iov;        /* [RR_WIRE_RUNS_MAX] */
    uint8_t lookahead[LOOKAHEAD_BYTES];
    uint32_t look_at, look_have;
    struct reply *out_replies; /* circular, [REPLIES_MAX] */
    uint32_t reply_at, reply_count, reply_sent;
};

struct tcp_nic {
    struct rr_nic base;
    int epoll_fd;
    struct rr_connection *connections;
    uint8_t scratch[SCRATCH_BYTES];
    int some_lost; /* a sender, since tcp_owe_lost */
};

static inline struct tcp_nic *tcp(struct rr_nic *nic) { return (struct tcp_nic *)nic; }

/* tcp_nic.c */
struct rr_connection *tcp_add_connection(struct tcp_nic *nic, uint64_t id, enum role role, int fd, uint32_t events);
void tcp_close_socket(struct tcp_nic *nic, struct rr_connection *c);
void tcp_free_connection(struct tcp_nic *nic, struct rr_connection *c);
void tcp_touch(const struct iovec *pieces, uint32_t count);
uint32_t tcp_cut(struct iovec *pieces, uint32_t count, uint64_t bytes);
void tcp_lose(struct rr_nic *base, struct rr_connection *c, int error);

/* tcp_sender.c */
struct rr_connection *tcp_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int fd);
int tcp_post(struct rr_nic *base, struct rr_path *path);
int tcp_read_replies(struct tcp_nic *nic, struct rr_connection *c);
void tcp_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                       uint32_t otherwise);
void tcp_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result);
void tcp_purge(struct rr_nic *base);
void tcp_abandon(struct rr_nic *base, struct rr_client *client);
void tcp_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context);

/* tcp_bounce.c */
extern const struct rr_bounce_ops tcp_bounce_ops;
void tcp_on_want(struct tcp_nic *nic, struct rr_connection *c);
void tcp_publish_bounce(struct tcp_nic *nic, struct rr_connection *c);
int tcp_reclaim(struct rr_nic *base, struct rr_client *client);
void tcp_drop_bounces(struct rr_nic *base, struct rr_client *client);

/* tcp_receiver.c */
void tcp_queue_reply(struct tcp_nic *nic, struct rr_connection *c, uint16_t type, uint16_t code, uint64_t sequence, uint64_t grant,
                     uint64_t window);
void tcp_owe_lost(struct tcp_nic *nic);
void tcp_acknowledge(struct tcp_nic *nic, struct rr_connection *c, uint64_t sequence, uint16_t code, uint32_t window);
void tcp_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int fd);
void tcp_flush_replies(struct tcp_nic *nic, struct rr_connection *c);
int tcp_read_frames(struct tcp_nic *nic, struct rr_connection *c);
void tcp_fence(struct rr_nic *base, struct rr_connection *c);
void tcp_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result);

#endif
