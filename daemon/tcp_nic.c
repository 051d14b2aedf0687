/* The TCP NIC: frames over sockets bound to the rail's own address. Runs on the rail's thread.
 *
 * Sender to receiver: a 64-byte header, run_count runs of 16 bytes (none if run_count is 1: it is in the header), then
 * the bytes of the runs in order. Receiver to sender: 32-byte replies, one a frame, after the bytes are placed, and
 * grants of bounce memory. The receiver checks all runs of a frame before it places any of it, and places straight
 * into the mapped destination. It never stops reading because its own replies are blocked: they wait in memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "nic.h"

#define FRAME_MAGIC 0x4d415246u /* "FRAM" */
#define REPLY_MAGIC 0x4c504552u /* "REPL" */
#define FRAME_DATA 1u
#define FRAME_WANT 2u
#define REPLY_DONE 1u
#define REPLY_GRANT 2u
#define PIECES_PER_CALL 1022u
#define LOOKAHEAD_BYTES 8192u
#define VISIT_BYTES (8u << 20) /* moved for one connection before others get their turn */
#define SCRATCH_BYTES 65536u
#define EVENTS_PER_POLL 64
#define REPLIES_MAX (2 * RR_WINDOW + RR_BOUNCE_WAITS)

struct frame {
    uint32_t magic;
    uint16_t type;
    uint16_t reserved;
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
    uint64_t bytes;
};
_Static_assert(sizeof(struct reply) == 32, "wire reply");

enum role { SENDER, RECEIVER };
enum stage { HEADER, RUNS, PAYLOAD };

struct rr_connection {
    struct rr_connection *next;
    enum role role;
    int fd; /* -1: lost */
    uint64_t id;

    /* sender */
    struct rr_path *path;
    struct frame out;
    struct rr_work *current; /* being written; NULL while `out` is a WANT or nothing is */
    uint64_t out_sent, out_bytes;
    uint32_t piece;
    uint64_t piece_sent;
    int writing, blocked;
    uint64_t next_sequence, oldest;
    struct rr_work *window[RR_WINDOW];
    struct rr_work *parked;  /* waiting for a grant */
    struct rr_work *granted, *granted_last;
    uint64_t next_want;
    struct reply in_replies[128];
    uint32_t in_bytes;

    /* receiver */
    uint32_t session;
    enum stage stage;
    struct frame in;
    uint32_t in_have;
    uint32_t run_have; /* bytes */
    uint32_t iov_count, iov_at;
    uint64_t payload_left;
    uint16_t code;
    int refused;
    int32_t bounce_slot; /* -1: none */
    uint32_t bounces_pending;
    int fencing;
    uint64_t received;   /* sequence of the last whole frame */
    uint8_t codes[RR_WINDOW];
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
};

static struct tcp_nic *tcp(struct rr_nic *nic) { return (struct tcp_nic *)nic; }

/* ---- shared by both roles ---- */

static struct rr_nic *tcp_open(struct rr_rail *rail)
{
    struct tcp_nic *nic = calloc(1, sizeof *nic);
    if (!nic) return NULL;
    nic->base.ops = &rr_tcp_nic;
    nic->base.rail = rail;
    nic->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (nic->epoll_fd < 0) {
        free(nic);
        return NULL;
    }
    /* Kicks are edge-triggered and never read: a client that holds the descriptor can then neither steal a wake nor
     * block the rail in a read. */
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, rail->kick_fd, &event);
    return &nic->base;
}

static int tcp_watch_kick(struct rr_nic *nic, int fd, int watch)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    return epoll_ctl(tcp(nic)->epoll_fd, watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, &event);
}

static void close_socket(struct rr_connection *c)
{
    if (c->fd >= 0) close(c->fd);
    c->fd = -1;
}

static void free_connection(struct tcp_nic *nic, struct rr_connection *c)
{
    close_socket(c);
    for (struct rr_connection **link = &nic->connections; *link; link = &(*link)->next) {
        if (*link == c) {
            *link = c->next;
            break;
        }
    }
    free(c->runs);
    free(c->iov);
    free(c->out_replies);
    free(c);
}

static void tcp_close(struct rr_nic *base)
{
    struct tcp_nic *nic = tcp(base);
    while (nic->connections) free_connection(nic, nic->connections);
    close(nic->epoll_fd);
    free(nic);
}

static struct rr_connection *tcp_find(struct rr_nic *nic, uint64_t id)
{
    struct rr_connection *c = tcp(nic)->connections;
    while (c && c->id != id) c = c->next;
    return c;
}

static uint64_t tcp_connection_id(const struct rr_connection *c) { return c->id; }

static struct rr_connection *add_connection(struct tcp_nic *nic, uint64_t id, enum role role, int fd, uint32_t events)
{
    struct rr_connection *c = calloc(1, sizeof *c);
    if (!c) abort();
    c->id = id;
    c->role = role;
    c->fd = fd;
    c->next_sequence = c->oldest = 1;
    c->bounce_slot = -1;
    if (role == RECEIVER) {
        c->runs = malloc(RR_WIRE_RUNS_MAX * sizeof *c->runs);
        c->iov = malloc(RR_WIRE_RUNS_MAX * sizeof *c->iov);
        c->out_replies = malloc(REPLIES_MAX * sizeof *c->out_replies);
        if (!c->runs || !c->iov || !c->out_replies) abort();
    }
    c->next = nic->connections;
    nic->connections = c;
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, fd, &event);
    return c;
}

/* After EFAULT: reads a byte of every page, so that guard.c replaces whatever its owner has cut off. */
static void touch(const struct iovec *pieces, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const volatile uint8_t *base = pieces[i].iov_base;
        for (size_t at = 0; at < pieces[i].iov_len; at += 4096) (void)base[at];
        if (pieces[i].iov_len) (void)base[pieces[i].iov_len - 1];
    }
}

/* ---- sender ---- */

static struct rr_connection *tcp_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int fd)
{
    struct rr_connection *c = add_connection(tcp(base), id, SENDER, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    c->path = path;
    path->connection = c;
    path->epoch = epoch;
    path->wanted = 0;
    path->broken = 0;
    return c;
}

static uint32_t in_window(const struct rr_connection *c)
{
    uint32_t count = 0;
    for (uint64_t s = c->oldest; s < c->next_sequence; s++) count += c->window[s % RR_WINDOW] != NULL;
    return count;
}

static void tcp_lose(struct rr_nic *base, struct rr_connection *c, int error)
{
    struct rr_rail *rail = base->rail;
    if (c->fd < 0) return;
    close_socket(c);
    rr_count(rail, RR_RAIL_CONNECTIONS_LOST, 1);
    if (c->role == SENDER) {
        c->path->connection = NULL;
        c->path->broken = 1;
        rr_event_push(rail->plane, RR_EVENT_SENDER_LOST, rail->number, (int64_t)c->id, error, c->path->peer, c->path->remote_rail,
                      in_window(c));
    } else {
        rr_event_push(rail->plane, RR_EVENT_RECEIVER_LOST, rail->number, (int64_t)c->id, error, c->session, 0, 0);
    }
}

static void start_frame(struct rr_connection *c, uint16_t type, const struct rr_work *work)
{
    memset(&c->out, 0, sizeof c->out);
    c->out.magic = FRAME_MAGIC;
    c->out.type = type;
    c->out.owner = work->owner;
    c->out.bytes = work->bytes;
    c->out.tag = work->tag;
    c->out_sent = 0;
    c->out_bytes = sizeof c->out;
    c->piece = 0;
    c->piece_sent = 0;
    c->writing = 1;
}

/* Chooses what to write next: granted slices, then the path's turn. 0 if there is nothing. */
static int next_frame(struct rr_rail *rail, struct rr_connection *c)
{
    struct rr_work *work = c->granted;
    if (c->next_sequence - c->oldest >= RR_WINDOW) {
        rr_count(rail, RR_RAIL_WINDOW_FULL, 1);
        return 0;
    }
    if (work) {
        c->granted = work->next;
        if (!c->granted) c->granted_last = NULL;
        work->next = NULL;
    } else {
        work = rr_path_next(rail, c->path);
        if (!work) return 0;
        if (work->window_bytes) {
            work->state = RR_WORK_PARKED;
            work->connection = c;
            work->sequence = ++c->next_want;
            work->parked_ns = rr_now_ns();
            work->next = c->parked;
            c->parked = work;
            rr_count(rail, RR_RAIL_GRANT_WAITS, 1);
            start_frame(c, FRAME_WANT, work);
            c->out.sequence = work->sequence;
            c->current = NULL;
            return 1;
        }
    }
    work->state = RR_WORK_POSTED;
    work->connection = c;
    work->sequence = c->next_sequence++;
    c->window[work->sequence % RR_WINDOW] = work;
    c->current = work;
    start_frame(c, FRAME_DATA, work);
    c->out.sequence = work->sequence;
    c->out.run_count = work->run_count;
    c->out.grant = work->grant;
    if (work->run_count == 1)
        c->out.run = work->runs[0];
    else
        c->out_bytes += work->run_count * sizeof *work->runs;
    return 1;
}

/* Writes what the socket takes of the current frame: 1 wrote all of it, 0 blocked, -1 lost. */
static int write_frame(struct tcp_nic *nic, struct rr_connection *c, uint64_t *moved)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_work *work = c->current;
    struct iovec iov[PIECES_PER_CALL + 2];
    while (c->writing) {
        uint32_t count = 0;
        if (c->out_sent < sizeof c->out) {
            iov[count].iov_base = (uint8_t *)&c->out + c->out_sent;
            iov[count++].iov_len = sizeof c->out - c->out_sent;
        }
        if (c->out_sent < c->out_bytes && c->out_bytes > sizeof c->out) {
            uint64_t at = c->out_sent > sizeof c->out ? c->out_sent - sizeof c->out : 0;
            iov[count].iov_base = (uint8_t *)work->runs + at;
            iov[count++].iov_len = c->out_bytes - sizeof c->out - at;
        }
        uint32_t pieces = 0;
        if (work) {
            pieces = work->piece_count - c->piece;
            if (pieces > PIECES_PER_CALL) pieces = PIECES_PER_CALL;
            memcpy(iov + count, work->pieces + c->piece, pieces * sizeof *iov);
            if (pieces) {
                iov[count].iov_base = (uint8_t *)iov[count].iov_base + c->piece_sent;
                iov[count].iov_len -= c->piece_sent;
            }
        }
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = count + pieces};
        ssize_t sent = sendmsg(c->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                c->blocked = 1;
                rr_count(rail, RR_RAIL_SOCKET_FULL, 1);
                return 0;
            }
            if (errno == EFAULT && work) {
                touch(work->pieces, work->piece_count);
                rr_violation(rail, work->source->client, RR_SEGMENT_TRUNCATED, 0, 0, 0);
                continue;
            }
            tcp_lose(&nic->base, c, errno);
            return -1;
        }
        uint64_t left = (uint64_t)sent;
        if (c->out_sent < c->out_bytes) {
            uint64_t head = c->out_bytes - c->out_sent;
            if (head > left) head = left;
            c->out_sent += head;
            left -= head;
        }
        *moved += left;
        while (left) {
            uint64_t rest = work->pieces[c->piece].iov_len - c->piece_sent;
            if (left < rest) {
                c->piece_sent += left;
                break;
            }
            left -= rest;
            c->piece++;
            c->piece_sent = 0;
        }
        if (c->out_sent == c->out_bytes && (!work || c->piece == work->piece_count)) {
            c->writing = 0;
            if (work) {
                rr_count(rail, RR_RAIL_FRAMES_SENT, 1);
                rr_count(rail, RR_RAIL_BYTES_SENT, work->bytes);
            }
            c->current = NULL;
        }
    }
    return 1;
}

static int tcp_post(struct rr_nic *base, struct rr_path *path)
{
    struct rr_connection *c = path->connection;
    if (!c || c->blocked) return 0;
    uint64_t moved = 0;
    int work_count = 0;
    while (moved < VISIT_BYTES) {
        if (!c->writing && !next_frame(base->rail, c)) break;
        work_count++;
        if (write_frame(tcp(base), c, &moved) <= 0) break;
    }
    return work_count;
}

static struct rr_work *unpark(struct rr_connection *c, uint64_t want)
{
    for (struct rr_work **link = &c->parked; *link; link = &(*link)->next) {
        struct rr_work *work = *link;
        if (work->sequence != want) continue;
        *link = work->next;
        work->next = NULL;
        return work;
    }
    return NULL;
}

/* 0, or -1 for a reply to nothing. */
static int on_reply(struct rr_rail *rail, struct rr_connection *c, const struct reply *reply)
{
    if (reply->magic != REPLY_MAGIC) return -1;
    if (reply->type == REPLY_GRANT) {
        struct rr_work *work = unpark(c, reply->sequence);
        if (!work) return -1;
        rr_count(rail, RR_RAIL_GRANT_WAIT_NS, rr_now_ns() - work->parked_ns);
        if (reply->code) {
            rr_work_done(rail, work, reply->code);
            return 0;
        }
        work->grant = reply->grant;
        if (c->granted_last)
            c->granted_last->next = work;
        else
            c->granted = work;
        c->granted_last = work;
        return 0;
    }
    if (reply->type != REPLY_DONE || reply->sequence < c->oldest || reply->sequence >= c->next_sequence) return -1;
    struct rr_work **at = &c->window[reply->sequence % RR_WINDOW];
    struct rr_work *work = *at;
    if (!work || work->sequence != reply->sequence || work == c->current) return -1;
    *at = NULL;
    while (c->oldest < c->next_sequence && !c->window[c->oldest % RR_WINDOW]) c->oldest++;
    rr_work_done(rail, work, reply->code);
    return 0;
}

static int read_replies(struct tcp_nic *nic, struct rr_connection *c)
{
    int work_count = 0;
    while (c->fd >= 0) {
        ssize_t got = recv(c->fd, (uint8_t *)c->in_replies + c->in_bytes, sizeof c->in_replies - c->in_bytes, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (got <= 0) {
            tcp_lose(&nic->base, c, got < 0 ? errno : 0);
            return work_count + 1;
        }
        c->in_bytes += (uint32_t)got;
        uint32_t whole = c->in_bytes / sizeof(struct reply);
        for (uint32_t i = 0; i < whole; i++, work_count++) {
            if (on_reply(nic->base.rail, c, &c->in_replies[i])) {
                tcp_lose(&nic->base, c, EPROTO);
                return work_count + 1;
            }
        }
        uint32_t used = whole * (uint32_t)sizeof(struct reply);
        memmove(c->in_replies, (uint8_t *)c->in_replies + used, c->in_bytes - used);
        c->in_bytes -= used;
    }
    return work_count;
}

static void again(struct rr_rail *rail, struct rr_work *work, uint32_t otherwise)
{
    struct rr_client *client = work->source->client;
    uint32_t result = rr_transfer_stopped(client, work->transfer, work->generation);
    if (!result && client->ports[rail->number].detaching) result = RR_CLIENT_GONE;
    if (!result) result = otherwise;
    work->connection = NULL;
    work->grant = 0;
    if (result) {
        rr_work_done(rail, work, result);
    } else {
        rr_count(rail, RR_RAIL_SLICES_RESENT, 1);
        rr_path_queue(rail, work, 1);
    }
}

static void tcp_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const uint8_t *codes, uint32_t code_count,
                       uint32_t otherwise)
{
    struct rr_rail *rail = base->rail;
    if (c->role != SENDER) return;
    if (c->fd >= 0) {
        close_socket(c);
        c->path->connection = NULL;
    }
    c->path->broken = 0;
    /* Newest first: again() puts each in front, so they end up in their old order. */
    for (uint64_t s = c->next_sequence; s-- > c->oldest;) {
        struct rr_work *work = c->window[s % RR_WINDOW];
        if (!work) continue;
        c->window[s % RR_WINDOW] = NULL;
        if (s <= placed && placed - s < code_count)
            rr_work_done(rail, work, codes[code_count - 1 - (placed - s)]);
        else
            again(rail, work, otherwise);
    }
    struct rr_work *lists[2] = {c->granted, c->parked};
    for (int i = 0; i < 2; i++) {
        for (struct rr_work *work = lists[i], *next; work; work = next) {
            next = work->next;
            work->next = NULL;
            again(rail, work, otherwise);
        }
    }
    free_connection(tcp(base), c);
}

static void tcp_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result)
{
    struct rr_connection *c = tcp(base)->connections, *next;
    for (; c; c = next) {
        next = c->next;
        if (c->role == SENDER && c->path->peer == peer) tcp_settle(base, c, 0, NULL, 0, result);
    }
}

static void tcp_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context)
{
    for (struct rr_connection *c = tcp(base)->connections; c; c = c->next) {
        if (c->role != SENDER) continue;
        for (uint64_t s = c->oldest; s < c->next_sequence; s++)
            if (c->window[s % RR_WINDOW]) visit(context, c, c->window[s % RR_WINDOW]);
        for (struct rr_work *work = c->parked; work; work = work->next) visit(context, c, work);
        for (struct rr_work *work = c->granted; work; work = work->next) visit(context, c, work);
    }
}

/* ---- receiver ---- */

static void tcp_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int fd)
{
    struct rr_connection *c = add_connection(tcp(base), id, RECEIVER, fd, EPOLLIN | EPOLLRDHUP);
    c->session = session;
}

static void flush_replies(struct tcp_nic *nic, struct rr_connection *c)
{
    while (c->reply_count && c->fd >= 0) {
        uint32_t first = c->reply_at, run = REPLIES_MAX - first;
        if (run > c->reply_count) run = c->reply_count;
        ssize_t sent = send(c->fd, (uint8_t *)&c->out_replies[first] + c->reply_sent, run * sizeof(struct reply) - c->reply_sent,
                            MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP, .data.ptr = c};
            epoll_ctl(nic->epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
            c->blocked = 1;
            return;
        }
        if (sent < 0) {
            tcp_lose(&nic->base, c, errno);
            return;
        }
        uint64_t total = c->reply_sent + (uint64_t)sent;
        uint32_t whole = (uint32_t)(total / sizeof(struct reply));
        c->reply_sent = (uint32_t)(total % sizeof(struct reply));
        c->reply_at = (c->reply_at + whole) % REPLIES_MAX;
        c->reply_count -= whole;
    }
    if (c->blocked && c->fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(nic->epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
        c->blocked = 0;
    }
}

/* A sender that keeps to its window can never fill the list: one that does not is cut off. */
static void queue_reply(struct tcp_nic *nic, struct rr_connection *c, uint16_t type, uint16_t code, uint64_t sequence, uint64_t grant)
{
    if (c->fd < 0) return;
    if (c->reply_count == REPLIES_MAX) {
        tcp_lose(&nic->base, c, EPROTO);
        return;
    }
    struct reply *reply = &c->out_replies[(c->reply_at + c->reply_count++) % REPLIES_MAX];
    *reply = (struct reply){REPLY_MAGIC, type, code, sequence, grant, 0};
}

static void acknowledge(struct tcp_nic *nic, struct rr_connection *c, uint64_t sequence, uint16_t code)
{
    c->codes[sequence % RR_WINDOW] = (uint8_t)code;
    queue_reply(nic, c, REPLY_DONE, code, sequence, 0);
}

static struct rr_bouncer *bouncer_of(struct rr_rail *rail, uint32_t number)
{
    struct rr_client *client = number < RR_MAX_CLIENTS ? rail->by_number[number] : NULL;
    if (!client) return NULL;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    return bouncer->shared ? bouncer : NULL;
}

static void grant_waiting(struct tcp_nic *nic, struct rr_bouncer *bouncer)
{
    while (bouncer->waits_head != bouncer->waits_tail) {
        struct rr_bounce_wait *wait = &bouncer->waits[bouncer->waits_head % RR_BOUNCE_WAITS];
        if (wait->connection) {
            uint32_t slot = 0;
            while (slot < bouncer->slots && bouncer->reserved_by[slot]) slot++;
            if (slot == bouncer->slots) return;
            bouncer->reserved_by[slot] = wait->connection;
            queue_reply(nic, wait->connection, REPLY_GRANT, RR_OK, wait->sequence, slot + 1);
            flush_replies(nic, wait->connection);
        }
        bouncer->waits_head++;
    }
}

static void on_want(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_bouncer *bouncer = bouncer_of(rail, c->in.owner);
    if (!bouncer) {
        queue_reply(nic, c, REPLY_GRANT, RR_REGION_GONE, c->in.sequence, 0);
    } else if (c->in.bytes > rail->plane->slot_bytes) {
        queue_reply(nic, c, REPLY_GRANT, RR_OUT_OF_BOUNDS, c->in.sequence, 0);
    } else if (bouncer->waits_tail - bouncer->waits_head >= RR_BOUNCE_WAITS) {
        tcp_lose(&nic->base, c, ENOBUFS);
    } else {
        bouncer->waits[bouncer->waits_tail++ % RR_BOUNCE_WAITS] = (struct rr_bounce_wait){c, c->in.sequence};
        grant_waiting(nic, bouncer);
    }
}

static int tombstone(const struct rr_client *client, uint64_t tag)
{
    const uint64_t *table = rr_load_acquire_pointer((void *const *)&client->tombstones);
    if (!table || !tag) return 0;
    for (uint64_t at = tag * 0x9e3779b97f4a7c15ull >> 47;; at++) {
        uint64_t seen = rr_load_relaxed_u64(&table[at % (2 * RR_TOMBSTONES)]);
        if (seen == tag) return 1;
        if (!seen) return 0;
    }
}

/* Checks every run of the frame; the result decides whether any byte of it is placed. */
static uint16_t check_runs(struct rr_rail *rail, struct rr_connection *c)
{
    struct rr_plane *plane = rail->plane;
    uint64_t total = 0;
    uint16_t result = RR_OK;
    c->iov_count = 0;
    int private = c->in.grant != 0;
    for (uint32_t i = 0; i < c->in.run_count; i++) {
        const struct rr_wire_run *run = &c->runs[i];
        total += run->length;
        if (result) continue;
        struct rr_export *export = run->handle < plane->max_exports ? &plane->exports[run->handle] : NULL;
        if (!export || !rr_load_acquire_u32(&export->valid) || export->session != c->session || export->client != c->in.owner) {
            result = RR_REGION_GONE;
            continue;
        }
        if (run->length == 0 || run->offset > export->bytes || run->length > export->bytes - run->offset) {
            result = RR_OUT_OF_BOUNDS;
            continue;
        }
        if (private != (export->base == NULL)) {
            result = RR_BAD_REGION;
            continue;
        }
        uint8_t *base = export->base + run->offset;
        struct iovec *iov = &c->iov[c->iov_count];
        if (private) continue;
        if (c->iov_count && (uint8_t *)iov[-1].iov_base + iov[-1].iov_len == base) {
            iov[-1].iov_len += run->length;
        } else {
            iov->iov_base = base;
            iov->iov_len = run->length;
            c->iov_count++;
        }
    }
    if (total != c->in.bytes) return RR_PROTOCOL;
    struct rr_client *owner = rail->by_number[c->in.owner];
    if (!owner) return RR_REGION_GONE;
    if (!result && tombstone(owner, c->in.tag)) result = RR_ABORTED;
    return result;
}

static int start_payload(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    c->stage = PAYLOAD;
    c->payload_left = c->in.bytes;
    c->iov_at = 0;
    c->bounce_slot = -1;
    c->code = check_runs(rail, c);
    if (c->code == RR_PROTOCOL) return -1;
    if (c->in.grant) {
        struct rr_bouncer *bouncer = bouncer_of(rail, c->in.owner);
        uint64_t slot = c->in.grant - 1;
        if (!bouncer) {
            c->code = RR_REGION_GONE;
        } else if (slot >= bouncer->slots || bouncer->reserved_by[slot] != c || c->in.bytes > rail->plane->slot_bytes ||
                   c->in.run_count > rail->plane->table_entries) {
            return -1;
        } else {
            c->bounce_slot = (int32_t)slot;
            c->iov[0].iov_base = bouncer->memory->base + slot * rail->plane->slot_bytes;
            c->iov[0].iov_len = c->in.bytes;
            c->iov_count = 1;
        }
    }
    c->refused = c->code != RR_OK;
    if (c->refused) rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
    return 0;
}

static void free_bounce_slot(struct tcp_nic *nic, struct rr_bouncer *bouncer, uint32_t slot)
{
    bouncer->reserved_by[slot] = NULL;
    grant_waiting(nic, bouncer);
}

static void publish_bounce(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_plane *plane = rail->plane;
    struct rr_client *client = rail->by_number[c->in.owner];
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    uint64_t at = bouncer->filled % bouncer->slots;
    struct rr_bounce_frame *frame = &bouncer->frames[at];
    struct rr_run *runs = bouncer->runs + at * plane->table_entries;
    for (uint32_t i = 0; i < c->in.run_count; i++)
        runs[i] = (struct rr_run){c->runs[i].offset, c->runs[i].length, plane->exports[c->runs[i].handle].region};
    frame->slot = (uint32_t)c->bounce_slot;
    frame->run_count = c->in.run_count;
    frame->bytes = c->in.bytes;
    bouncer->pending[at] = (struct rr_bounce_pending){c, c->in.sequence, c->in.tag, (uint32_t)c->bounce_slot};
    c->bounces_pending++;
    bouncer->filled++;
    rr_store_release_u64(&bouncer->shared->filled, bouncer->filled); /* SYNC filled */
    rr_count(rail, RR_RAIL_BOUNCED_BYTES, c->in.bytes);
    rr_count_wake(&client->control->bounce_wake, &client->control->bounce_sleeping);
}

static void on_frame(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    c->received = c->in.sequence;
    rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
    rr_count(rail, RR_RAIL_BYTES_RECEIVED, c->in.bytes);
    c->stage = HEADER;
    if (c->bounce_slot >= 0 && !c->refused) {
        publish_bounce(nic, c);
    } else {
        struct rr_bouncer *bouncer = c->bounce_slot >= 0 ? bouncer_of(rail, c->in.owner) : NULL;
        if (bouncer) free_bounce_slot(nic, bouncer, (uint32_t)c->bounce_slot);
        acknowledge(nic, c, c->in.sequence, c->code);
    }
    c->bounce_slot = -1;
}

/* A whole header is there: 0 go on, -1 protocol error. */
static int on_header(struct tcp_nic *nic, struct rr_connection *c)
{
    c->in_have = 0;
    if (c->in.magic != FRAME_MAGIC) return -1;
    if (c->in.type == FRAME_WANT) {
        on_want(nic, c);
        return c->fd < 0 ? -2 : 0;
    }
    if (c->in.type != FRAME_DATA || c->in.sequence != c->received + 1 || c->in.run_count == 0 || c->in.run_count > RR_WIRE_RUNS_MAX ||
        c->in.bytes == 0 || c->in.bytes > RR_WIRE_BYTES_MAX || c->in.owner >= nic->base.rail->plane->max_clients)
        return -1;
    c->run_have = 0;
    if (c->in.run_count == 1) {
        c->runs[0] = c->in.run;
        return start_payload(nic, c);
    }
    c->stage = RUNS;
    return 0;
}

static uint32_t from_lookahead(struct rr_connection *c, void *to, uint64_t wanted)
{
    uint32_t have = c->look_have - c->look_at;
    if (have > wanted) have = (uint32_t)wanted;
    memcpy(to, c->lookahead + c->look_at, have);
    c->look_at += have;
    return have;
}

/* Moves the payload position by count bytes. */
static void advance(struct rr_connection *c, uint64_t count)
{
    c->payload_left -= count;
    while (count && !c->refused) {
        struct iovec *iov = &c->iov[c->iov_at];
        if (count < iov->iov_len) {
            iov->iov_base = (uint8_t *)iov->iov_base + count;
            iov->iov_len -= count;
            return;
        }
        count -= iov->iov_len;
        c->iov_at++;
    }
}

static void payload_from_lookahead(struct tcp_nic *nic, struct rr_connection *c)
{
    while (c->payload_left && c->look_at < c->look_have) {
        void *to = c->refused ? (void *)nic->scratch : c->iov[c->iov_at].iov_base;
        uint64_t room = c->refused ? SCRATCH_BYTES : c->iov[c->iov_at].iov_len;
        advance(c, from_lookahead(c, to, room < c->payload_left ? room : c->payload_left));
    }
}

/* One read from the socket, into whatever the stage needs and what follows it into the look-ahead. */
static ssize_t read_more(struct tcp_nic *nic, struct rr_connection *c)
{
    struct iovec iov[PIECES_PER_CALL + 2];
    uint32_t count = 0;
    uint64_t wanted = 0;
    int to_end = 1;
    if (c->stage == RUNS) {
        iov[0].iov_base = (uint8_t *)c->runs + c->run_have;
        wanted = iov[0].iov_len = c->in.run_count * sizeof *c->runs - c->run_have;
        count = 1;
    } else if (c->stage == PAYLOAD && c->refused) {
        iov[0].iov_base = nic->scratch;
        wanted = iov[0].iov_len = c->payload_left < SCRATCH_BYTES ? c->payload_left : SCRATCH_BYTES;
        count = 1;
        to_end = wanted == c->payload_left;
    } else if (c->stage == PAYLOAD) {
        uint32_t pieces = c->iov_count - c->iov_at;
        if (pieces > PIECES_PER_CALL) pieces = PIECES_PER_CALL;
        memcpy(iov, c->iov + c->iov_at, pieces * sizeof *iov);
        count = pieces;
        for (uint32_t i = 0; i < pieces; i++) wanted += iov[i].iov_len;
        to_end = wanted == c->payload_left;
    }
    if (to_end) {
        iov[count].iov_base = c->lookahead;
        iov[count++].iov_len = LOOKAHEAD_BYTES;
    }
    ssize_t got;
    for (;;) {
        got = readv(c->fd, iov, (int)count);
        if (got >= 0) break;
        if (errno == EINTR) continue;
        if (errno == EFAULT && c->stage == PAYLOAD && !c->refused) {
            touch(c->iov + c->iov_at, c->iov_count - c->iov_at);
            c->code = RR_REGION_GONE;
            struct rr_client *client = nic->base.rail->by_number[c->in.owner];
            if (client) rr_violation(nic->base.rail, client, RR_SEGMENT_TRUNCATED, 0, 0, 0);
            continue;
        }
        return errno == EAGAIN || errno == EWOULDBLOCK ? -EAGAIN : -errno;
    }
    if (got == 0) return 0;
    uint64_t placed = (uint64_t)got < wanted ? (uint64_t)got : wanted;
    if (c->stage == RUNS)
        c->run_have += (uint32_t)placed;
    else if (c->stage == PAYLOAD)
        advance(c, placed);
    c->look_at = 0;
    c->look_have = (uint32_t)((uint64_t)got - placed);
    return got;
}

static int read_frames(struct tcp_nic *nic, struct rr_connection *c)
{
    uint64_t moved = 0;
    int work_count = 0;
    while (c->fd >= 0) {
        int status = 0;
        if (c->stage == HEADER) {
            c->in_have += from_lookahead(c, (uint8_t *)&c->in + c->in_have, sizeof c->in - c->in_have);
            if (c->in_have == sizeof c->in) {
                status = on_header(nic, c);
                if (status == -2) break;
                if (status == 0) {
                    work_count++;
                    continue;
                }
            }
        } else if (c->stage == RUNS) {
            uint32_t all = c->in.run_count * (uint32_t)sizeof *c->runs;
            c->run_have += from_lookahead(c, (uint8_t *)c->runs + c->run_have, all - c->run_have);
            if (c->run_have == all) {
                status = start_payload(nic, c);
                if (status == 0) continue;
            }
        } else {
            payload_from_lookahead(nic, c);
            if (c->payload_left == 0) {
                on_frame(nic, c);
                work_count++;
                continue;
            }
        }
        if (status < 0) {
            tcp_lose(&nic->base, c, EPROTO);
            break;
        }
        if (moved >= VISIT_BYTES) break;
        ssize_t got = read_more(nic, c);
        if (got == -EAGAIN) break;
        if (got <= 0) {
            flush_replies(nic, c);
            tcp_lose(&nic->base, c, (int)-got);
            break;
        }
        moved += (uint64_t)got;
        work_count++;
    }
    flush_replies(nic, c);
    return work_count;
}

static int tcp_reclaim(struct rr_nic *base, struct rr_client *client)
{
    struct tcp_nic *nic = tcp(base);
    struct rr_rail *rail = base->rail;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    uint64_t emptied = rr_load_acquire_u64(&bouncer->shared->emptied); /* SYNC emptied */
    if (emptied - bouncer->reclaimed > bouncer->filled - bouncer->reclaimed) {
        rr_violation(rail, client, RR_PROTOCOL, emptied, bouncer->filled, 0);
        return 0;
    }
    int work_count = 0;
    while (bouncer->reclaimed != emptied) {
        uint64_t at = bouncer->reclaimed % bouncer->slots;
        struct rr_bounce_pending pending = bouncer->pending[at];
        uint32_t result = rr_load_relaxed_u32(&bouncer->frames[at].result);
        bouncer->reclaimed++;
        pending.connection->bounces_pending--;
        acknowledge(nic, pending.connection, pending.sequence, result == RR_OK ? RR_OK : RR_REGION_GONE);
        flush_replies(nic, pending.connection);
        if (pending.connection->fencing) base->ops->fence(base, pending.connection);
        free_bounce_slot(nic, bouncer, pending.slot);
        work_count++;
    }
    return work_count;
}

/* The client is gone: nobody empties its bounce memory any more. */
static void tcp_drop_bounces(struct rr_nic *base, struct rr_client *client)
{
    struct tcp_nic *nic = tcp(base);
    struct rr_bouncer *bouncer = &client->ports[base->rail->number].bouncer;
    if (!bouncer->shared) return;
    while (bouncer->waits_head != bouncer->waits_tail) {
        struct rr_bounce_wait *wait = &bouncer->waits[bouncer->waits_head++ % RR_BOUNCE_WAITS];
        if (!wait->connection) continue;
        queue_reply(nic, wait->connection, REPLY_GRANT, RR_REGION_GONE, wait->sequence, 0);
        flush_replies(nic, wait->connection);
    }
    while (bouncer->reclaimed != bouncer->filled) {
        struct rr_bounce_pending pending = bouncer->pending[bouncer->reclaimed++ % bouncer->slots];
        pending.connection->bounces_pending--;
        acknowledge(nic, pending.connection, pending.sequence, RR_REGION_GONE);
        flush_replies(nic, pending.connection);
        if (pending.connection->fencing) base->ops->fence(base, pending.connection);
    }
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role == RECEIVER && c->stage == PAYLOAD && c->bounce_slot >= 0 && c->in.owner == client->number) {
            c->refused = 1;
            c->code = RR_REGION_GONE;
            c->bounce_slot = -1;
        }
    }
    memset(bouncer->reserved_by, 0, bouncer->slots * sizeof *bouncer->reserved_by);
    bouncer->shared = NULL;
}

static void tcp_fence(struct rr_nic *base, struct rr_connection *c)
{
    struct tcp_nic *nic = tcp(base);
    struct rr_rail *rail = base->rail;
    struct rr_plane *plane = rail->plane;
    if (c->role != RECEIVER) return;
    close_socket(c);
    if (!c->fencing) rr_count(rail, RR_RAIL_FENCES, 1);
    c->fencing = 1;
    if (c->bounces_pending) return; /* tcp_reclaim comes back */
    for (uint32_t i = 0; i < RR_MAX_CLIENTS; i++) {
        struct rr_bouncer *bouncer = bouncer_of(rail, i);
        if (!bouncer) continue;
        for (uint64_t at = bouncer->waits_head; at != bouncer->waits_tail; at++)
            if (bouncer->waits[at % RR_BOUNCE_WAITS].connection == c) bouncer->waits[at % RR_BOUNCE_WAITS].connection = NULL;
        for (uint32_t slot = 0; slot < bouncer->slots; slot++)
            if (bouncer->reserved_by[slot] == c) bouncer->reserved_by[slot] = NULL;
        grant_waiting(nic, bouncer);
    }
    struct rr_fence_record *record = calloc(1, sizeof *record);
    if (!record) abort();
    record->connection = c->id;
    record->code_count = c->received < RR_WINDOW ? (uint32_t)c->received : RR_WINDOW;
    for (uint32_t i = 0; i < record->code_count; i++)
        record->codes[i] = c->codes[(c->received - record->code_count + 1 + i) % RR_WINDOW];
    pthread_mutex_lock(&plane->event_lock);
    record->next = plane->fences;
    plane->fences = record;
    pthread_mutex_unlock(&plane->event_lock);
    rr_event_push(plane, RR_EVENT_RECEIVER_FENCED, rail->number, (int64_t)c->id, (int64_t)c->received, 0, 0, 0);
    free_connection(nic, c);
}

static void tcp_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result)
{
    for (struct rr_connection *c = tcp(base)->connections; c; c = c->next) {
        if (c->role != RECEIVER || c->stage != PAYLOAD || c->refused || c->in.owner != client) continue;
        int hit = handle == RR_NONE && c->in.tag == tag;
        for (uint32_t i = 0; i < c->in.run_count && !hit && handle != RR_NONE; i++) hit = c->runs[i].handle == handle;
        if (!hit) continue;
        c->refused = 1;
        c->code = (uint16_t)result;
    }
}

/* ---- both ---- */

static int tcp_poll(struct rr_nic *base, int64_t timeout_ns)
{
    struct tcp_nic *nic = tcp(base);
    struct epoll_event events[EVENTS_PER_POLL];
    int timeout_ms = timeout_ns < 0 ? -1 : (int)(timeout_ns / 1000000);
    int count = epoll_wait(nic->epoll_fd, events, EVENTS_PER_POLL, timeout_ms);
    int work_count = 0;
    for (int i = 0; i < count; i++) {
        struct rr_connection *c = events[i].data.ptr;
        if (!c || c->fd < 0) continue;
        if (c->role == SENDER) {
            if (events[i].events & EPOLLOUT) c->blocked = 0;
            work_count += read_replies(nic, c);
            if (c->fd >= 0 && !c->blocked && (c->writing || c->granted)) work_count += tcp_post(base, c->path);
        } else {
            if (events[i].events & EPOLLOUT) flush_replies(nic, c);
            if (events[i].events & ~(uint32_t)EPOLLOUT) work_count += read_frames(nic, c);
        }
    }
    return work_count;
}

const struct rr_nic_ops rr_tcp_nic = {
    .name = "tcp",
    .open = tcp_open,
    .close = tcp_close,
    .watch_kick = tcp_watch_kick,
    .post = tcp_post,
    .poll = tcp_poll,
    .add_sender = tcp_add_sender,
    .add_receiver = tcp_add_receiver,
    .find = tcp_find,
    .lose = tcp_lose,
    .settle = tcp_settle,
    .fence = tcp_fence,
    .refuse = tcp_refuse,
    .each_posted = tcp_each_posted,
    .close_senders = tcp_close_senders,
    .reclaim = tcp_reclaim,
    .drop_bounces = tcp_drop_bounces,
    .connection_id = tcp_connection_id,
};
