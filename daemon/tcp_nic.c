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

#include "tcp_nic.h"

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

void tcp_close_socket(struct tcp_nic *nic, struct rr_connection *c)
{
    if (c->fd < 0) return;
    /* Closing is not enough where somebody else holds the socket too: epoll would go on reporting it. */
    epoll_ctl(nic->epoll_fd, EPOLL_CTL_DEL, c->fd, NULL);
    shutdown(c->fd, SHUT_RDWR);
    close(c->fd);
    c->fd = -1;
}

void tcp_free_connection(struct tcp_nic *nic, struct rr_connection *c)
{
    tcp_close_socket(nic, c);
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
    while (nic->connections) tcp_free_connection(nic, nic->connections);
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

struct rr_connection *tcp_add_connection(struct tcp_nic *nic, uint64_t id, enum role role, int fd, uint32_t events)
{
    struct rr_connection *c = calloc(1, sizeof *c);
    if (!c) abort();
    c->id = id;
    c->role = role;
    c->fd = fd;
    c->next_sequence = 1;
    rr_window_init(&c->window);
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
    if (epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, fd, &event)) c->watch_error = errno;
    return c;
}

/* After EFAULT: reads a byte of every page, so that guard.c replaces whatever its owner has cut off. */
void tcp_touch(const struct iovec *pieces, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        const volatile uint8_t *base = pieces[i].iov_base;
        for (size_t at = 0; at < pieces[i].iov_len; at += 4096) (void)base[at];
        if (pieces[i].iov_len) (void)base[pieces[i].iov_len - 1];
    }
}

/* How many of the pieces remain if there are to be `bytes` of them at most, above 0. */
uint32_t tcp_cut(struct iovec *pieces, uint32_t count, uint64_t bytes)
{
    for (uint32_t i = 0; i < count; i++) {
        if (pieces[i].iov_len >= bytes) {
            pieces[i].iov_len = bytes;
            return i + 1;
        }
        bytes -= pieces[i].iov_len;
    }
    return count;
}

void tcp_lose(struct rr_nic *base, struct rr_connection *c, int error)
{
    struct rr_rail *rail = base->rail;
    if (c->fd < 0) return;
    tcp_close_socket(tcp(base), c);
    rr_count(rail, RR_RAIL_CONNECTIONS_LOST, 1);
    if (c->role == SENDER) {
        c->path->connection = NULL;
        c->path->broken = 1;
        tcp(base)->some_lost = 1;
        rr_event_push(rail->plane, RR_EVENT_SENDER_LOST, rail->number, (int64_t)c->id, error, c->path->peer, c->path->remote_rail,
                      rr_window_count(&c->window));
    } else {
        rr_event_push(rail->plane, RR_EVENT_RECEIVER_LOST, rail->number, (int64_t)c->id, error, c->session, 0, 0);
    }
}

static int tcp_poll(struct rr_nic *base, int64_t timeout_ns)
{
    struct tcp_nic *nic = tcp(base);
    struct epoll_event events[EVENTS_PER_POLL];
    if (nic->some_lost) tcp_owe_lost(nic);
    int count = rr_epoll_wait(nic->epoll_fd, events, EVENTS_PER_POLL, timeout_ns);
    rr_rail_time_passes(base->rail);
    int work_count = 0;
    for (int i = 0; i < count; i++) {
        struct rr_connection *c = events[i].data.ptr;
        if (!c || c->fd < 0) continue;
        if (c->role == SENDER) {
            if (events[i].events & EPOLLOUT) c->blocked = 0;
            work_count += tcp_read_replies(nic, c);
            if (c->fd >= 0 && !c->blocked && (c->writing || c->grants.granted || c->grants.return_count || rr_grants_waiting(&c->grants))) {
                c->path->unfinished = 1;
                rr_path_activate(base->rail, c->path);
                work_count++;
            }
        } else {
            if (events[i].events & EPOLLOUT) tcp_flush_replies(nic, c);
            if (events[i].events & ~(uint32_t)EPOLLOUT) work_count += tcp_read_frames(nic, c);
        }
        rr_rail_time_passes(base->rail);
    }
    return work_count;
}

const struct rr_nic_ops rr_tcp_nic = {
    .name = "tcp",
    .bounce = &tcp_bounce_ops,
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
    .purge = tcp_purge,
    .abandon = tcp_abandon,
    .each_posted = tcp_each_posted,
    .close_senders = tcp_close_senders,
    .reclaim = tcp_reclaim,
    .drop_bounces = tcp_drop_bounces,
    .connection_id = tcp_connection_id,
};
