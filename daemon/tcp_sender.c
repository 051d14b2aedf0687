/* The TCP NIC, sending end: frames out, replies in, and what happens to both when the connection is lost. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "tcp_nic.h"

struct rr_connection *tcp_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int fd)
{
    struct rr_connection *c = tcp_add_connection(tcp(base), id, SENDER, fd, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    c->path = path;
    path->connection = c;
    path->epoch = epoch;
    path->wanted = 0;
    path->broken = 0;
    if (c->watch_error) tcp_lose(base, c, c->watch_error);
    return c;
}

static void start_frame(struct rr_connection *c, uint16_t type, const struct rr_work *work)
{
    memset(&c->out, 0, sizeof c->out);
    c->out.magic = FRAME_MAGIC;
    c->out.type = type;
    if (work) {
        c->out.owner = work->owner;
        c->out.bytes = work->bytes;
        c->out.tag = work->tag;
    }
    c->out_sent = 0;
    c->out_bytes = sizeof c->out;
    c->piece = 0;
    c->piece_sent = 0;
    c->writing = 1;
}

/* Chooses what to write next: granted slices, then the path's turn. 0 if there is nothing. */
static int next_frame(struct rr_rail *rail, struct rr_connection *c)
{
    struct rr_grants *grants = &c->grants;
    if (grants->return_count) {
        start_frame(c, FRAME_RETURN, NULL);
        c->out.grant = grants->returns[--grants->return_count].grant;
        c->out.owner = grants->returns[grants->return_count].owner;
        c->current = NULL;
        return 1;
    }
    if (!c->window.free_count) {
        rr_count(rail, RR_RAIL_WINDOW_FULL, 1);
        return 0;
    }
    struct rr_work *work = rr_grants_next(grants);
    if (!work) {
        work = rr_grants_due(rail, grants);
        while (!work) {
            work = rr_path_next(rail, c->path);
            if (!work) return 0;
            if (!work->window_bytes) break;
            if (!rr_grants_want(rail, grants, c, work)) work = NULL;
        }
        if (work->window_bytes) {
            start_frame(c, FRAME_WANT, work);
            c->out.sequence = work->sequence;
            c->current = NULL;
            return 1;
        }
    }
    rr_work_posted(rail, work);
    work->connection = c;
    work->sequence = c->next_sequence++;
    c->current = work;
    start_frame(c, FRAME_DATA, work);
    c->out.window = rr_window_take(&c->window, work);
    rr_fault_point(RR_FAULT_DAEMON_FRAME_BEGUN);
    c->out.sequence = work->sequence;
    c->out.run_count = work->run_count;
    c->out.grant = work->grant.grant;
    if (work->run_count == 1)
        c->out.run = work->runs[0];
    else
        c->out_bytes += work->run_count * sizeof *work->runs;
    return 1;
}

/* The kernel has its own copy of what was written: only a frame in the middle of being written still needs the source,
 * and the replies to come have nobody to go to. */
static void abandon_written(struct tcp_nic *nic, struct rr_client *client)
{
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role != SENDER || c->fd < 0) continue;
        for (uint32_t i = 0; i < RR_WINDOW; i++) {
            struct rr_work *work = c->window.works[i];
            if (!work || work == c->current || work->source->client != client) continue;
            c->window.works[i] = NULL;
            rr_work_done(nic->base.rail, work, RR_CLIENT_GONE);
        }
    }
}

/* Writes what the socket and the visit take of the current frame: 1 wrote all of it, 0 not all, -1 lost. */
static int write_frame(struct tcp_nic *nic, struct rr_connection *c, uint64_t *moved)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_work *work = c->current;
    struct iovec iov[PIECES_PER_CALL + 2];
    while (c->writing) {
        if (*moved >= VISIT_BYTES) return 0;
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
            pieces = tcp_cut(iov + count, pieces, VISIT_BYTES - *moved);
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
                tcp_touch(work->pieces, work->piece_count);
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
                rr_fault_point(RR_FAULT_DAEMON_FRAME_SENT);
                rr_count(rail, RR_RAIL_FRAMES_SENT, 1);
                rr_count(rail, RR_RAIL_BYTES_SENT, work->bytes);
            }
            c->current = NULL;
            if (work && work->source->client->ports[rail->number].detaching) abandon_written(nic, work->source->client);
        }
    }
    return 1;
}

int tcp_post(struct rr_nic *base, struct rr_path *path)
{
    struct rr_connection *c = path->connection;
    path->unfinished = 0;
    if (!c || c->blocked) return 0;
    uint64_t moved = 0;
    int work_count = 0;
    while (moved < VISIT_BYTES) {
        if (!c->writing && !next_frame(base->rail, c)) break;
        work_count++;
        int status = write_frame(tcp(base), c, &moved);
        rr_rail_time_passes(base->rail);
        if (status < 0) return work_count;
        if (!status) break;
    }
    if (c->writing && !c->blocked) {
        path->unfinished = 1;
        rr_path_activate(base->rail, path);
    }
    return work_count;
}

/* 0, or -1 for a reply to nothing. */
static int on_reply(struct rr_rail *rail, struct rr_connection *c, const struct reply *reply)
{
    if (reply->magic != REPLY_MAGIC) return -1;
    if (reply->type == REPLY_GRANT) {
        struct rr_grant grant = {.grant = reply->grant, .owner = (uint32_t)reply->window};
        return rr_grants_answer(rail, &c->grants, reply->sequence, reply->code, &grant);
    }
    if (reply->type != REPLY_DONE || reply->window >= RR_WINDOW || !reply->sequence ||
        c->window.sequences[reply->window] != reply->sequence || !rr_is_answer(reply->code))
        return -1;
    struct rr_work *work = c->window.works[reply->window];
    if (work && work == c->current) return -1;
    rr_window_free(&c->window, (uint32_t)reply->window);
    rr_fault_point(RR_FAULT_DAEMON_FRAME_SETTLED);
    if (work) rr_work_done(rail, work, reply->code);
    return 0;
}

int tcp_read_replies(struct tcp_nic *nic, struct rr_connection *c)
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
        rr_rail_time_passes(nic->base.rail);
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

/* What was not sent has ended; what was is owed. */
static void owe_stopped(struct rr_rail *rail, struct rr_connection *c)
{
    rr_grants_end_stopped(rail, &c->grants);
    rr_window_owe_stopped(rail, &c->window);
}

void tcp_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                uint32_t otherwise)
{
    struct rr_rail *rail = base->rail;
    if (c->role != SENDER) return;
    if (c->fd >= 0) {
        tcp_close_socket(tcp(base), c);
        c->path->connection = NULL;
    }
    if (!c->resting) c->path->broken = 0;
    rr_fault_point(RR_FAULT_DAEMON_SETTLE_BEGUN);
    c->resting = 1;
    c->current = NULL;
    uint32_t left = rr_window_settle(rail, &c->window, placed, acks, ack_count, otherwise);
    rr_grants_settle(rail, &c->grants, otherwise);
    if (left)
        tcp(base)->some_lost = 1;
    else
        tcp_free_connection(tcp(base), c);
}

void tcp_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result)
{
    struct rr_connection *c = tcp(base)->connections, *next;
    for (; c; c = next) {
        next = c->next;
        if (c->role == SENDER && c->path->peer == peer) tcp_settle(base, c, 0, NULL, 0, result);
    }
}

void tcp_owe_lost(struct tcp_nic *nic)
{
    nic->some_lost = 0;
    for (struct rr_connection *c = nic->connections; c; c = c->next)
        if (c->role == SENDER && c->fd < 0) owe_stopped(nic->base.rail, c);
}

/* Parked and granted work was never sent: its grant, now or when it comes, goes back. */
void tcp_purge(struct rr_nic *base)
{
    struct rr_rail *rail = base->rail;
    for (struct rr_connection *c = tcp(base)->connections; c; c = c->next) {
        if (c->role != SENDER) continue;
        if (c->fd < 0) {
            owe_stopped(rail, c);
            continue;
        }
        rr_grants_purge(rail, &c->grants);
        if ((c->grants.return_count || rr_grants_waiting(&c->grants)) && !c->blocked) tcp_post(base, c->path);
    }
}

void tcp_abandon(struct rr_nic *base, struct rr_client *client)
{
    abandon_written(tcp(base), client);
    for (struct rr_connection *c = tcp(base)->connections; c; c = c->next)
        if (c->role == SENDER && c->resting) rr_window_let_go(base->rail, &c->window, client);
    tcp_purge(base);
}

/* Not what only waits for its owner to empty bounce memory: the receiver has it, and a fence would wait for the same. */
void tcp_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context)
{
    for (struct rr_connection *c = tcp(base)->connections; c; c = c->next) {
        if (c->role != SENDER || c->resting) continue;
        for (uint32_t i = 0; i < RR_WINDOW; i++) {
            struct rr_work *work = c->window.works[i];
            if (work && (!work->window_bytes || work == c->current)) visit(context, c, work);
        }
    }
}
