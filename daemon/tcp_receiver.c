/* The TCP NIC, receiving end: checks frames and places them, bounce memory, refusal and the fence. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "tcp_nic.h"

void tcp_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int fd)
{
    struct rr_connection *c = tcp_add_connection(tcp(base), id, RECEIVER, fd, EPOLLIN | EPOLLRDHUP);
    c->session = session;
    c->wake_bytes = 1;
    if (c->watch_error) tcp_lose(base, c, c->watch_error);
}

void tcp_flush_replies(struct tcp_nic *nic, struct rr_connection *c)
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
        rr_fault_point(RR_FAULT_DAEMON_FRAME_ACKNOWLEDGED);
    }
    if (c->blocked && c->fd >= 0) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(nic->epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
        c->blocked = 0;
    }
}

/* A sender that keeps to its window can never fill the list: one that does not is cut off. */
void tcp_queue_reply(struct tcp_nic *nic, struct rr_connection *c, uint16_t type, uint16_t code, uint64_t sequence, uint64_t grant,
                        uint64_t window)
{
    if (c->fd < 0) return;
    if (c->reply_count == REPLIES_MAX) {
        tcp_lose(&nic->base, c, EPROTO);
        return;
    }
    struct reply *reply = &c->out_replies[(c->reply_at + c->reply_count++) % REPLIES_MAX];
    *reply = (struct reply){REPLY_MAGIC, type, code, sequence, grant, window};
}

void tcp_acknowledge(struct tcp_nic *nic, struct rr_connection *c, uint64_t sequence, uint16_t code, uint32_t window)
{
    c->acks[c->ack_count++ % RR_WINDOW] = (struct rr_ack){sequence, code};
    tcp_queue_reply(nic, c, REPLY_DONE, code, sequence, 0, window);
}

static uint16_t check_runs(struct rr_rail *rail, struct rr_connection *c)
{
    c->iov_count = 0;
    return (uint16_t)rr_check_runs(rail, c->session, c->in.owner, c->in.tag, c->in.bytes, c->runs, c->in.run_count, c->in.grant ? NULL : c->iov,
                                   &c->iov_count);
}

static int start_payload(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    c->stage = PAYLOAD;
    c->patches = rr_guard_patches();
    c->payload_left = c->in.bytes;
    c->iov_at = 0;
    c->bounce_slot = -1;
    c->code = check_runs(rail, c);
    if (c->code == RR_PROTOCOL) return -1;
    if (c->in.grant) {
        struct rr_bouncer *bouncer = rr_bouncer_granted(rail, c->in.owner, c->in.grant);
        uint32_t slot = rr_bounce_slot_of(c->in.grant);
        if (!bouncer) {
            c->code = RR_REGION_GONE;
        } else if (rr_bounce_begin(rail, bouncer, c, c->in.grant, c->in.bytes, c->in.run_count)) {
            return -1;
        } else {
            c->bounce_slot = (int32_t)slot;
            c->iov[0].iov_base = bouncer->memory->base + slot * rail->plane->slot_bytes;
            c->iov[0].iov_len = c->in.bytes;
            c->iov_count = 1;
        }
    }
    rr_fault_point(RR_FAULT_DAEMON_FRAME_HEADER);
    c->refused = c->code != RR_OK;
    if (c->refused) rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
    return 0;
}

/* Did the owner cut off a region while the frame was placed in it? */
static int truncated(struct rr_rail *rail, struct rr_connection *c)
{
    for (uint32_t i = 0; i < c->in.run_count; i++) {
        const struct rr_export *export = &rail->plane->exports[c->runs[i].handle % rail->plane->max_exports];
        if (rr_load_acquire_u32(&export->valid) && export->mapping && rr_load_relaxed_u32(&export->mapping->broken)) return 1;
    }
    return 0;
}

static void on_frame(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    if (!c->refused && c->patches != rr_guard_patches() && truncated(rail, c)) {
        c->code = RR_REGION_GONE;
        struct rr_client *owner = rail->by_number[c->in.owner];
        if (owner) rr_violation(rail, owner, RR_SEGMENT_TRUNCATED, 0, 0, 0);
    }
    rr_fault_point(RR_FAULT_DAEMON_FRAME_PLACED);
    c->received = c->in.sequence;
    rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
    rr_count(rail, RR_RAIL_BYTES_RECEIVED, c->in.bytes);
    c->stage = HEADER;
    if (c->bounce_slot >= 0 && !c->refused) {
        tcp_publish_bounce(nic, c);
    } else {
        struct rr_bouncer *bouncer = c->bounce_slot >= 0 ? rr_bouncer_of(rail, c->in.owner) : NULL;
        if (bouncer) rr_bounce_free_slot(&nic->base, bouncer, (uint32_t)c->bounce_slot);
        tcp_acknowledge(nic, c, c->in.sequence, c->code, c->in.window);
    }
    c->bounce_slot = -1;
}

/* A whole header is there: 0 go on, -1 protocol error. */
static int on_header(struct tcp_nic *nic, struct rr_connection *c)
{
    c->in_have = 0;
    if (c->in.magic != FRAME_MAGIC) return -1;
    if (c->in.type == FRAME_WANT) {
        tcp_on_want(nic, c);
        return c->fd < 0 ? -2 : 0;
    }
    if (c->in.type == FRAME_RETURN) {
        rr_bounce_returned(&nic->base, c->in.owner, c, c->in.grant);
        return 0;
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

/* One read from the socket, into whatever the stage needs, at most so much of a payload, and what follows it into the
 * look-ahead. */
static ssize_t read_more(struct tcp_nic *nic, struct rr_connection *c, uint64_t most)
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
        pieces = tcp_cut(iov, pieces, most);
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
            tcp_touch(c->iov + c->iov_at, c->iov_count - c->iov_at);
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
    if (c->stage == PAYLOAD && placed) rr_fault_point(RR_FAULT_DAEMON_FRAME_PLACING);
    c->look_at = 0;
    c->look_have = (uint32_t)((uint64_t)got - placed);
    return got;
}

/* Never more than what must still come: the last bytes of a frame wake the rail whatever their number. */
static void set_wake_bytes(struct rr_connection *c)
{
    uint64_t left = c->stage == PAYLOAD ? c->payload_left : 1;
    uint32_t wanted = left >= RECEIVE_WAKE_BYTES ? RECEIVE_WAKE_BYTES : c->wake_bytes > 1 ? (uint32_t)left : 1;
    if (wanted == c->wake_bytes || c->fd < 0) return;
    int value = (int)wanted;
    if (setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &value, sizeof value) == 0) c->wake_bytes = wanted;
}

int tcp_read_frames(struct tcp_nic *nic, struct rr_connection *c)
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
                if (c->look_at == c->look_have) tcp_flush_replies(nic, c); /* the sender waits; the next read may find nothing */
                work_count++;
                continue;
            }
        }
        if (status < 0) {
            tcp_lose(&nic->base, c, EPROTO);
            break;
        }
        ssize_t got = moved < VISIT_BYTES ? read_more(nic, c, VISIT_BYTES - moved) : -EAGAIN;
        if (got == -EAGAIN) {
            set_wake_bytes(c);
            break;
        }
        if (got <= 0) {
            tcp_flush_replies(nic, c);
            tcp_lose(&nic->base, c, (int)-got);
            break;
        }
        moved += (uint64_t)got;
        work_count++;
    }
    tcp_flush_replies(nic, c);
    return work_count;
}

void tcp_fence(struct rr_nic *base, struct rr_connection *c)
{
    struct tcp_nic *nic = tcp(base);
    if (c->role != RECEIVER) return;
    tcp_close_socket(nic, c);
    rr_fault_point(RR_FAULT_DAEMON_FENCE_CLOSED);
    if (!c->fencing) {
        c->fencing = 1;
        rr_count(base->rail, RR_RAIL_FENCES, 1);
        rr_report_fence(base, c, c->id, c->received, c->acks, c->ack_count);
    }
    if (!c->bounces_pending) tcp_free_connection(nic, c);
}

void tcp_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result)
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
