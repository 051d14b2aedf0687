/* The verbs NIC: its completion queues, the ends of connections, port events. Runs on the rail's thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

static struct rr_nic *not_opened(struct verbs_nic *nic, int status)
{
    if (nic->device) verbs_close_device(nic->device);
    free(nic->runs);
    free(nic);
    errno = status;
    return NULL;
}

static struct rr_nic *verbs_open(struct rr_rail *rail)
{
    const struct rr_verbs_options *options = &rail->verbs;
    char *error = rail->plane->error;
    if (options->send_depth < 4 * WR_BATCH || !options->signal_every || options->signal_every > options->send_depth / 2) {
        snprintf(error, sizeof rail->plane->error, "sq_depth %u, signal_every %u: at least %u, and at most half of that", options->send_depth,
                 options->signal_every, 4 * WR_BATCH);
        errno = EINVAL;
        return NULL;
    }
    struct verbs_nic *nic = calloc(1, sizeof *nic);
    if (nic) nic->runs = malloc(rail->plane->table_entries * sizeof *nic->runs);
    if (!nic || !nic->runs || !verbs_state(rail->plane)) {
        if (nic) free(nic->runs);
        free(nic);
        errno = ENOMEM;
        return NULL;
    }
    nic->base.ops = &rr_verbs_nic;
    nic->base.rail = rail;
    nic->device = verbs_open_device(options->device, options->port, options->gid_index, error, sizeof rail->plane->error);
    nic->epoll_fd = nic->device ? epoll_create1(EPOLL_CLOEXEC) : -1;
    if (nic->epoll_fd < 0) return not_opened(nic, errno);
    struct epoll_event kick = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL}, asynchronous = {.events = EPOLLIN, .data.ptr = nic};
    if (epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, rail->kick_fd, &kick) ||
        epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, nic->device->context->async_fd, &asynchronous)) {
        int status = errno;
        close(nic->epoll_fd);
        return not_opened(nic, status);
    }
    return &nic->base;
}

/* Main thread: all rails have ended, but other rails' queue pairs may still be on this device. */
static void verbs_close(struct rr_nic *base)
{
    struct verbs_nic *nic = verbs(base);
    struct rr_plane *plane = base->rail->plane;
    for (uint32_t i = 0; i < ENDPOINTS_MAX; i++) {
        struct rr_connection *c = plane->verbs->endpoints[i];
        if (c && c->nic == nic) verbs_destroy(c);
    }
    verbs_wait_for_reaper(plane->verbs);
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) {
        struct verbs_port *port = nic->ports[i];
        if (!port) continue;
        for (uint32_t q = 0; q < port->cq_count; q++) {
            if (port->unacknowledged[q]) rr_ibv.ack_cq_events(port->cqs[q], port->unacknowledged[q]);
            rr_ibv.destroy_cq(port->cqs[q]);
        }
        rr_ibv.destroy_comp_channel(port->channel);
        verbs_leave_device(plane, port->device);
        verbs_free_orders(port);
        free(port);
    }
    close(nic->epoll_fd);
    verbs_leave_device(plane, nic->device);
    free(nic->runs);
    free(nic);
}

static int verbs_watch_kick(struct rr_nic *nic, int fd, int watch)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    return epoll_ctl(verbs(nic)->epoll_fd, watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, &event);
}

static struct rr_connection *verbs_find(struct rr_nic *nic, uint64_t id)
{
    struct rr_connection *c = verbs(nic)->connections;
    while (c && c->id != id) c = c->next;
    return c;
}

static uint64_t verbs_connection_id(const struct rr_connection *c) { return c->id; }

void verbs_unlink(struct rr_connection *c)
{
    struct rr_connection **link = &c->nic->connections;
    while (*link && *link != c) link = &(*link)->next;
    if (*link) *link = c->next;
    link = &c->nic->touched;
    while (*link && *link != c) link = &(*link)->next_touched;
    if (*link) *link = c->next_touched;
}

void verbs_touch(struct rr_connection *c)
{
    if (c->listed) return;
    c->listed = 1;
    c->next_touched = c->nic->touched;
    c->nic->touched = c;
}

/* ---- posting ---- */

/* Hands over what verbs_next_wr has given out. */
void verbs_post_batch(struct rr_connection *c)
{
    uint32_t count = c->batch;
    if (!count) return;
    struct ibv_send_wr *last = &c->wrs[count - 1], *next = last->next, *bad = NULL;
    last->next = NULL;
    c->batch = 0;
    int status = c->state == OPEN ? ibv_post_send(c->qp, c->wrs, &bad) : EPIPE;
    last->next = next;
    rr_rail_time_passes(c->nic->base.rail);
    if (!status) return;
    c->posted -= count - (bad ? (uint64_t)(bad - c->wrs) : 0);
    verbs_lose(&c->nic->base, c, status < 0 ? -status : status);
}

/* The caller has looked for room in the send queue. */
struct ibv_send_wr *verbs_next_wr(struct rr_connection *c)
{
    if (c->batch == WR_BATCH) verbs_post_batch(c);
    struct ibv_send_wr *wr = &c->wrs[c->batch++];
    wr->wr_id = send_wr_id(c, ++c->posted);
    return wr;
}

int verbs_message_free(const struct rr_connection *c) { return send_room(c) && c->message_position[c->messages_posted % MESSAGES] <= c->completed; }

/* NULL: none of the buffers for messages, or no room in the send queue, is free. */
struct message *verbs_next_message(struct rr_connection *c, enum message_type type)
{
    if (!verbs_message_free(c)) return NULL;
    uint32_t at = (uint32_t)(c->messages_posted % MESSAGES);
    struct message *message = (struct message *)(c->memory + at * MESSAGE_BYTES);
    struct ibv_send_wr *wr = verbs_next_wr(c);
    wr->sg_list[0] = (struct ibv_sge){(uint64_t)(uintptr_t)message, MESSAGE_BYTES, c->mr->lkey};
    wr->num_sge = 1;
    wr->opcode = IBV_WR_SEND;
    wr->send_flags = IBV_SEND_SIGNALED;
    c->message_position[at] = c->posted;
    c->messages_posted++;
    c->unsignaled = 0;
    memset(message, 0, sizeof *message);
    message->magic = MESSAGE_MAGIC;
    message->type = (uint16_t)type;
    return message;
}

/* ---- the end of a connection ---- */

/* Nothing is sent or placed from here on but what is on its way; when all of it has come back, the touched list says so. The
 * last work request of all is signaled, since those before it may have succeeded unseen. */
void verbs_begin_drain(struct rr_connection *c)
{
    struct ibv_qp_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_ERR;
    c->state = DRAINING;
    c->posted -= c->batch;
    c->batch = 0;
    c->current = NULL;
    int status = rr_ibv.modify_qp(c->qp, &attr, IBV_QP_STATE);
    if (!status) {
        struct ibv_send_wr wr = {.wr_id = send_wr_id(c, c->posted + 1), .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
        status = ibv_post_send(c->qp, &wr, &bad);
        if (!status) c->posted++;
    }
    if (status) { /* the device is gone, or says nothing more: without its queue pair it reads and writes nothing */
        verbs_destroy_queue_pair(c);
        return;
    }
    verbs_touch(c);
}

void verbs_lose(struct rr_nic *base, struct rr_connection *c, int error)
{
    struct rr_rail *rail = base->rail;
    if (c->state != OPEN) return;
    c->error = error;
    if (c->role == SENDER || c->role == RECEIVER) rr_count(rail, RR_RAIL_CONNECTIONS_LOST, 1);
    if (c->role == SENDER) {
        for (uint32_t i = 0; i < RR_CLASSES; i++) {
            c->paths[i]->connection = NULL;
            c->paths[i]->broken = 1;
        }
        rr_event_push(rail->plane, RR_EVENT_SENDER_ENDING, rail->number, (int64_t)c->id, error, c->paths[0]->peer, c->paths[0]->remote_rail,
                      rr_window_count(&c->window));
    } else if (c->role == RECEIVER) {
        rr_event_push(rail->plane, RR_EVENT_RECEIVER_LOST, rail->number, (int64_t)c->id, error, c->session, 0, 0);
    }
    verbs_begin_drain(c);
}

static void when_drained(struct rr_connection *c)
{
    if (c->state == DRAINED && c->role == RECEIVER) {
        verbs_receiver_drained(c); /* flushed since */
        return;
    }
    if (c->state != DRAINING || c->completed != c->posted || c->received_completed != c->received_posted) return;
    c->state = DRAINED;
    if (c->role == SENDER)
        verbs_sender_drained(c);
    else if (c->role == RECEIVER)
        verbs_receiver_drained(c);
    else if (c->role == FLUSH)
        verbs_flush_failed(c);
}

static int error_of(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RESP_TIMEOUT_ERR: return ETIMEDOUT;
    case IBV_WC_RNR_RETRY_EXC_ERR: return ENOBUFS;
    case IBV_WC_REM_ACCESS_ERR: return EACCES;
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_QP_OP_ERR: return EFAULT;
    case IBV_WC_WR_FLUSH_ERR: return ECONNRESET;
    default: return EIO;
    }
}

/* ---- completions ---- */

static void on_received(struct rr_connection *c, const struct ibv_wc *wc)
{
    uint64_t position = c->received_completed++;
    if (wc->status != IBV_WC_SUCCESS) {
        verbs_lose(&c->nic->base, c, error_of(wc->status));
        return;
    }
    int status = -1;
    const struct message *message = (const struct message *)(c->memory + (MESSAGES + position % RECEIVES) * MESSAGE_BYTES);
    if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM && c->role == RECEIVER)
        status = verbs_on_frame(c, be32toh(wc->imm_data));
    else if (wc->opcode == IBV_WC_RECV && wc->byte_len == MESSAGE_BYTES && message->magic == MESSAGE_MAGIC)
        status = c->role == SENDER ? verbs_on_answer(c, message) : c->role == RECEIVER ? verbs_on_request(c, message) : 0;
    if (status) verbs_lose(&c->nic->base, c, EPROTO);
    c->receives_due++;
}

static void on_completion(struct verbs_nic *nic, struct rr_connection *c, const struct ibv_wc *wc)
{
    if (c->state == DRAINED || !c->qp) return;
    if (wc->wr_id & WR_RECEIVE) {
        on_received(c, wc);
    } else {
        c->completed += (uint32_t)((uint32_t)wc->wr_id - (uint32_t)c->completed);
        if (wc->status != IBV_WC_SUCCESS) verbs_lose(&nic->base, c, error_of(wc->status));
        if (c->role == SENDER) verbs_on_sent(c);
        if (c->role == FLUSH && wc->status == IBV_WC_SUCCESS) verbs_on_flushed(c);
        if (c->role == PROBE && c->probe_cookie) {
            rr_event_push(nic->base.rail->plane, RR_EVENT_COMMAND_DONE, nic->base.rail->number, (int64_t)c->probe_cookie, wc->status, 0, 0, 0);
            c->probe_cookie = 0;
        }
    }
    verbs_touch(c);
}

/* 0, or -1: the command that makes a connection of an endpoint is still to be run, since what the peer sends may overtake
 * it once the peer knows of the endpoint. One more cycle, then it is nobody's. */
static int take_held(struct verbs_nic *nic, struct verbs_port *port)
{
    struct rr_plane *plane = nic->base.rail->plane;
    while (port->held_at < port->held_count) {
        const struct ibv_wc *wc = &port->held[port->held_at];
        struct rr_connection *c = verbs_endpoint_at(plane, (uint32_t)(wc->wr_id >> 48) & 0x3fff, (uint32_t)(wc->wr_id >> 32) & 0x7fff);
        if (c && c->role == NEW && !c->early) {
            c->early = 1;
            return -1;
        }
        if (c) on_completion(nic, c, wc);
        port->held_at++;
    }
    port->held_count = port->held_at = 0;
    return 0;
}

#define BATCHES_PER_LOOK 8u

static int take_completions(struct verbs_nic *nic, struct verbs_port *port)
{
    int work_count = (int)(port->held_count - port->held_at);
    if (work_count && take_held(nic, port)) return work_count;
    uint32_t cq_count = rr_load_acquire_u32(&port->cq_count);
    for (uint32_t q = 0; q < cq_count; q++) {
        for (uint32_t batch = 0; batch < BATCHES_PER_LOOK; batch++) {
            int count = ibv_poll_cq(port->cqs[q], WC_BATCH, port->held);
            if (count <= 0) break;
            rr_rail_time_passes(nic->base.rail);
            port->held_count = (uint32_t)count;
            work_count += count;
            if (take_held(nic, port)) return work_count;
            if (count < (int)WC_BATCH) break;
        }
    }
    return work_count;
}

/* What completions have made room for. */
static int serve_touched(struct verbs_nic *nic)
{
    int work_count = 0;
    while (nic->touched) {
        struct rr_connection *c = nic->touched;
        nic->touched = c->next_touched;
        c->listed = 0;
        work_count++;
        if (c->state == OPEN && c->receives_due >= RECEIVE_BATCH) {
            uint32_t due = c->receives_due;
            c->receives_due = 0;
            int status = verbs_post_receives(c, due);
            if (status) verbs_lose(&nic->base, c, status);
        }
        if (c->state == OPEN && c->role == SENDER) verbs_push(c);
        if (c->state == OPEN && c->role == RECEIVER) verbs_send_answers(c);
        when_drained(c); /* may free it */
    }
    return work_count;
}

static int look(struct verbs_nic *nic)
{
    int work_count = 0;
    for (uint32_t i = 0; i < nic->base.rail->plane->rail_count; i++) {
        struct verbs_port *port = rr_load_acquire_pointer((void *const *)&nic->ports[i]);
        if (port) work_count += take_completions(nic, port);
    }
    return work_count + serve_touched(nic);
}

/* ---- descriptors ---- */

static void run_lose_endpoint(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *c = verbs_endpoint_at(rail->plane, (uint32_t)command->a, (uint32_t)command->b);
    if (c && c->role != NEW) verbs_lose(rail->nic, c, EIO);
}

/* A queue pair of this device may serve another rail, whose thread alone may end it. */
static void on_queue_pair_event(struct verbs_nic *nic, const struct ibv_qp *qp)
{
    struct rr_verbs *state = nic->base.rail->plane->verbs;
    pthread_mutex_lock(&state->lock);
    for (uint32_t i = 0; i < ENDPOINTS_MAX; i++) {
        struct rr_connection *c = state->endpoints[i];
        if (c && c->qp == qp)
            rr_rail_command(c->nic->base.rail, (struct rr_command){.run = run_lose_endpoint, .a = c->slot, .b = c->generation});
    }
    pthread_mutex_unlock(&state->lock);
}

static void take_asynchronous_events(struct verbs_nic *nic)
{
    struct rr_rail *rail = nic->base.rail;
    struct ibv_async_event event;
    while (rr_ibv.get_async_event(nic->device->context, &event) == 0) {
        switch (event.event_type) {
        case IBV_EVENT_PORT_ACTIVE:
        case IBV_EVENT_PORT_ERR:
            if (event.element.port_num == nic->device->port)
                rr_event_push(rail->plane, RR_EVENT_PORT_CHANGED, rail->number, event.event_type == IBV_EVENT_PORT_ACTIVE, event.event_type, 0, 0, 0);
            break;
        case IBV_EVENT_DEVICE_FATAL:
            rr_event_push(rail->plane, RR_EVENT_PORT_CHANGED, rail->number, 0, event.event_type, 0, 0, 0);
            break;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
            on_queue_pair_event(nic, event.element.qp);
            break;
        default: break;
        }
        rr_ibv.ack_async_event(&event); /* at once: destroying a queue pair waits for it */
    }
}

static void take_cq_events(struct verbs_port *port)
{
    struct ibv_cq *cq;
    void *context;
    while (rr_ibv.get_cq_event(port->channel, &cq, &context) == 0) {
        for (uint32_t q = 0; q < port->cq_count; q++) {
            if (port->cqs[q] != cq) continue;
            port->armed[q] = 0;
            if (++port->unacknowledged[q] == ACK_EVENTS) {
                rr_ibv.ack_cq_events(cq, ACK_EVENTS);
                port->unacknowledged[q] = 0;
            }
        }
    }
}

static void take_descriptors(struct verbs_nic *nic, int64_t timeout_ns)
{
    struct epoll_event events[EVENTS_PER_POLL];
    int count = rr_epoll_wait(nic->epoll_fd, events, EVENTS_PER_POLL, timeout_ns);
    rr_rail_time_passes(nic->base.rail);
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == nic)
            take_asynchronous_events(nic);
        else if (events[i].data.ptr)
            take_cq_events(events[i].data.ptr);
    }
}

static void arm(struct verbs_nic *nic)
{
    for (uint32_t i = 0; i < nic->base.rail->plane->rail_count; i++) {
        struct verbs_port *port = rr_load_acquire_pointer((void *const *)&nic->ports[i]);
        uint32_t cq_count = port ? rr_load_acquire_u32(&port->cq_count) : 0;
        for (uint32_t q = 0; q < cq_count; q++) {
            if (port->armed[q]) continue;
            if (ibv_req_notify_cq(port->cqs[q], 0) == 0) port->armed[q] = 1;
        }
    }
}

static int verbs_poll(struct rr_nic *base, int64_t timeout_ns)
{
    struct verbs_nic *nic = verbs(base);
    if (nic->some_lost) verbs_owe_lost(nic);
    int work_count = look(nic);
    if (work_count || timeout_ns == 0) {
        if (++nic->cycles % LOOK_CYCLES == 0) take_descriptors(nic, 0);
        return work_count;
    }
    /* Armed before the last look: what completes after it writes the channel. */
    arm(nic);
    work_count = look(nic);
    if (work_count) return work_count;
    take_descriptors(nic, timeout_ns);
    return look(nic);
}

const struct rr_nic_ops rr_verbs_nic = {
    .name = "verbs",
    .bounce = &verbs_bounce_ops,
    .takes_made_up = 1,
    .one_sided = 1,
    .open = verbs_open,
    .close = verbs_close,
    .watch_kick = verbs_watch_kick,
    .post = verbs_post,
    .poll = verbs_poll,
    .add_sender = verbs_add_sender,
    .add_receiver = verbs_add_receiver,
    .find = verbs_find,
    .lose = verbs_lose,
    .settle = verbs_settle,
    .fence = verbs_fence,
    .refuse = verbs_refuse,
    .naming = verbs_naming,
    .ended = verbs_ended,
    .purge = verbs_purge,
    .abandon = verbs_abandon,
    .each_posted = verbs_each_posted,
    .close_senders = verbs_close_senders,
    .reclaim = verbs_reclaim,
    .drop_bounces = verbs_drop_bounces,
    .connection_id = verbs_connection_id,
};
#endif
