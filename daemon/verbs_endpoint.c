/* The verbs NIC: endpoints from their making until a rail's thread takes them, and their end. Main thread and its workers,
 * under the lock of struct rr_verbs, but for what says otherwise. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>

static void free_parts(struct rr_connection *c)
{
    if (c->qp) rr_ibv.destroy_qp(c->qp);
    if (c->mr) rr_ibv.dereg_mr(c->mr);
    free(c->memory);
    free(c->sges);
    free(c->settlement);
    free(c);
}

static void run_queue_pair_gone(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *c = verbs_endpoint_at(rail->plane, (uint32_t)command->a, (uint32_t)command->b);
    if (!c) return;
    c->completed = c->posted;
    c->received_completed = c->received_posted;
    verbs_touch(c);
}

/* Under the lock, but for the call itself. */
static void bury_orphan(struct rr_verbs *state)
{
    struct verbs_orphan *orphan = state->orphans;
    state->orphans = orphan->next;
    state->reaping = 1;
    pthread_mutex_unlock(&state->lock);
    rr_ibv.destroy_qp(orphan->qp);
    rr_rail_command(orphan->rail, (struct rr_command){.run = run_queue_pair_gone, .a = orphan->slot, .b = orphan->generation});
    free(orphan);
    pthread_mutex_lock(&state->lock);
    state->reaping = 0;
    if (!state->dead && !state->orphans) pthread_cond_broadcast(&state->reaper_idle);
}

static void *reap(void *argument)
{
    struct rr_verbs *state = argument;
    pthread_mutex_lock(&state->lock);
    while (state->dead || state->orphans || !state->reaper_stop) {
        if (state->orphans) { /* first: what it was part of may be among the dead already */
            bury_orphan(state);
            continue;
        }
        struct rr_connection *c = state->dead;
        if (!c) {
            pthread_cond_wait(&state->reaper_wake, &state->lock);
            continue;
        }
        state->dead = c->next;
        state->reaping = 1;
        struct verbs_port *port = c->port;
        uint32_t cq = c->cq, entries = c->cq_entries;
        pthread_mutex_unlock(&state->lock);
        free_parts(c);
        pthread_mutex_lock(&state->lock);
        port->room[cq] += entries;
        state->reaping = 0;
        if (!state->dead && !state->orphans) pthread_cond_broadcast(&state->reaper_idle);
    }
    pthread_mutex_unlock(&state->lock);
    return NULL;
}

/* Main thread: afterwards nothing is on its completion queues that was destroyed before. */
void verbs_wait_for_reaper(struct rr_verbs *state)
{
    pthread_mutex_lock(&state->lock);
    while (state->dead || state->orphans || state->reaping) pthread_cond_wait(&state->reaper_idle, &state->lock);
    pthread_mutex_unlock(&state->lock);
}

void verbs_free_state(struct rr_verbs *state)
{
    pthread_cond_destroy(&state->reaper_wake);
    pthread_cond_destroy(&state->reaper_idle);
    pthread_mutex_destroy(&state->making);
    pthread_mutex_destroy(&state->lock);
    free(state);
}

/* Main thread, before any rail runs. */
struct rr_verbs *verbs_state(struct rr_plane *plane)
{
    if (plane->verbs) return plane->verbs;
    struct rr_verbs *state = calloc(1, sizeof *state);
    if (!state) return NULL;
    pthread_mutex_init(&state->lock, NULL);
    pthread_mutex_init(&state->making, NULL);
    pthread_cond_init(&state->reaper_wake, NULL);
    pthread_cond_init(&state->reaper_idle, NULL);
    state->next_key = 1;
    if (pthread_create(&state->reaper, NULL, reap, state)) {
        verbs_free_state(state);
        return NULL;
    }
    plane->verbs = state;
    return state;
}

/* Under `making` alone. */
static struct verbs_port *new_port(struct rr_verbs *state, struct verbs_nic *nic, struct verbs_device *device, uint32_t through)
{
    struct verbs_port *port = calloc(1, sizeof *port);
    if (!port) return NULL;
    port->device = device;
    port->through = through;
    port->channel = rr_ibv.create_comp_channel(device->context);
    if (!port->channel) {
        free(port);
        return NULL;
    }
    fcntl(port->channel->fd, F_SETFL, fcntl(port->channel->fd, F_GETFL) | O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = port};
    if (epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, port->channel->fd, &event)) {
        rr_ibv.destroy_comp_channel(port->channel);
        free(port);
        return NULL;
    }
    pthread_mutex_lock(&state->lock);
    device->refs++;
    pthread_mutex_unlock(&state->lock);
    rr_store_release_pointer((void **)&nic->ports[through], port);
    return port;
}

static int take_room(struct rr_verbs *state, struct verbs_port *port, uint32_t entries)
{
    int found = -1;
    pthread_mutex_lock(&state->lock);
    for (uint32_t i = 0; i < port->cq_count && found < 0; i++) {
        if (port->room[i] < entries) continue;
        port->room[i] -= entries;
        found = (int)i;
    }
    pthread_mutex_unlock(&state->lock);
    return found;
}

/* A completion queue with room for this many: every work request and receive of a queue pair may complete unseen. Under
 * `making` alone: a device takes milliseconds to make a large one. */
static int take_cq(struct rr_verbs *state, struct verbs_port *port, uint32_t entries, char *error)
{
    struct verbs_device *device = port->device;
    int found = take_room(state, port, entries);
    if (found >= 0) return found;
    uint32_t most = (uint32_t)device->limits.max_cqe < CQ_ENTRIES ? (uint32_t)device->limits.max_cqe : CQ_ENTRIES;
    if (most < entries || port->cq_count == CQS_MAX) {
        snprintf(error, RR_VERBS_ERROR_BYTES,
                 "device %s: no room for %u completions (%u queues, max_cqe %d): fewer peers, or a smaller sq_depth", device->name, entries, port->cq_count, device->limits.max_cqe);
        return -ENOSPC;
    }
    uint32_t size = CQ_ENTRIES_FIRST; /* small at first: a rail that takes over for another waits for it */
    for (uint32_t i = 0; i < port->cq_count && size < most; i++) size *= 2;
    while (size < entries) size *= 2;
    if (size > most) size = most;
    struct ibv_cq *cq = rr_ibv.create_cq(device->context, (int)size, NULL, port->channel, 0);
    if (!cq) {
        int status = errno ? errno : ENOMEM;
        snprintf(error, RR_VERBS_ERROR_BYTES, "device %s: no completion queue of %u: %s", device->name, size, strerror(status));
        return -status;
    }
    cq->cq_context = NULL;
    pthread_mutex_lock(&state->lock);
    port->cqs[port->cq_count] = cq;
    port->room[port->cq_count] = size - entries;
    rr_store_release_u32(&port->cq_count, port->cq_count + 1);
    pthread_mutex_unlock(&state->lock);
    return (int)port->cq_count - 1;
}

/* 0 or the error. */
static int make_parts(struct rr_connection *c, struct verbs_device *device, const struct rr_verbs_options *options, uint32_t table_entries,
                      int sending, char *error)
{
    c->sges_each = (uint32_t)device->limits.max_sge < SGE_MAX ? (uint32_t)device->limits.max_sge : SGE_MAX;
    c->sges = calloc((size_t)WR_BATCH * c->sges_each, sizeof *c->sges);
    for (uint32_t i = 0; i < WR_BATCH; i++) {
        c->wrs[i].next = &c->wrs[i + 1 < WR_BATCH ? i + 1 : 0];
        c->wrs[i].sg_list = c->sges + i * c->sges_each;
    }
    c->memory_bytes = (MESSAGES + RECEIVES) * MESSAGE_BYTES + (sending ? (uint64_t)STAGES * table_entries * sizeof(struct rr_wire_run) : 0);
    void *memory;
    if (!c->sges || posix_memalign(&memory, 4096, c->memory_bytes)) return ENOMEM;
    c->memory = memory;
    memset(c->memory, 0, c->memory_bytes);
    c->mr = verbs_register(device, (uint64_t)(uintptr_t)c->memory, c->memory_bytes, -1, 0,
                           IBV_ACCESS_LOCAL_WRITE | (c->role == FLUSH ? IBV_ACCESS_REMOTE_READ : 0));
    if (!c->mr) {
        int status = errno;
        snprintf(error, RR_VERBS_ERROR_BYTES, "device %s: cannot register %llu bytes for messages: %s", device->name,
                 (unsigned long long)c->memory_bytes, strerror(status));
        return status;
    }
    c->depth = sending ? options->send_depth : 2 * MESSAGES;
    c->receives = RECEIVES;
    c->signal_every = options->signal_every;
    if (c->depth + 1 > (uint32_t)device->limits.max_qp_wr || c->receives > (uint32_t)device->limits.max_qp_wr) {
        snprintf(error, RR_VERBS_ERROR_BYTES,
                 "device %s: %u work requests and %u receives in a queue pair; its limit is %d (max_qp_wr): lower sq_depth", device->name, c->depth + 1, c->receives, device->limits.max_qp_wr);
        return EINVAL;
    }
    struct ibv_qp_init_attr init;
    memset(&init, 0, sizeof init);
    init.send_cq = init.recv_cq = c->port->cqs[c->cq];
    init.qp_type = IBV_QPT_RC;
    init.cap.max_send_wr = c->depth + 1;
    init.cap.max_recv_wr = c->receives;
    init.cap.max_send_sge = c->sges_each;
    init.cap.max_recv_sge = 1;
    init.qp_context = c;
    errno = 0;
    c->qp = rr_ibv.create_qp(device->pd, &init);
    if (c->qp) return 0;
    int status = errno ? errno : EIO;
    snprintf(error, RR_VERBS_ERROR_BYTES, "device %s: no queue pair of %u work requests and %u receives: %s", device->name, c->depth + 1, c->receives,
             strerror(status));
    return status;
}

/* 0, or -1: no slot. */
static int publish(struct rr_verbs *state, struct rr_connection *c)
{
    for (uint32_t i = 0; i < ENDPOINTS_MAX; i++) {
        uint32_t slot = (state->next_slot + i) % ENDPOINTS_MAX;
        if (state->endpoints[slot]) continue;
        state->generations[slot] = state->generations[slot] % 0x7fff + 1;
        c->slot = slot;
        c->generation = state->generations[slot];
        c->wr_tag = (uint64_t)slot << 48 | (uint64_t)c->generation << 32;
        state->next_slot = slot + 1;
        rr_store_release_pointer((void **)&state->endpoints[slot], c);
        return 0;
    }
    return -1;
}

int verbs_new_endpoint(struct rr_plane *plane, uint32_t rail, uint32_t through, int sending, enum role role, struct rr_verbs_endpoint *out,
                       char *error)
{
    struct verbs_nic *nic = verbs_nic_of(plane, rail), *other = verbs_nic_of(plane, through);
    if (!nic || !other) return -ENOENT;
    struct rr_verbs *state = plane->verbs;
    const struct rr_verbs_options *options = &plane->rails[rail].verbs;
    struct rr_connection *c = calloc(1, sizeof *c);
    if (!c) return -ENOMEM;
    rr_window_init(&c->window);
    c->nic = nic;
    c->sending = sending;
    c->role = role;
    c->next_sequence = 1;
    c->cq_entries = (sending ? options->send_depth : 2 * MESSAGES) + 1 + RECEIVES;
    if (getrandom(&c->psn, sizeof c->psn, GRND_NONBLOCK) != sizeof c->psn) c->psn = (uint32_t)rr_now_ns();
    c->psn &= 0xffffff;
    pthread_mutex_lock(&state->making);
    c->port = nic->ports[through] ? nic->ports[through] : new_port(state, nic, other->device, through);
    int cq = c->port ? take_cq(state, c->port, c->cq_entries, error) : -ENOMEM;
    pthread_mutex_unlock(&state->making);
    if (cq < 0) {
        free(c);
        return cq;
    }
    c->cq = (uint32_t)cq;
    int status = make_parts(c, other->device, options, plane->table_entries, sending, error);
    pthread_mutex_lock(&state->lock);
    if (!status && publish(state, c)) {
        snprintf(error, RR_VERBS_ERROR_BYTES, "%u queue pairs are open", ENDPOINTS_MAX);
        status = ENOSPC;
    }
    if (status) c->port->room[c->cq] += c->cq_entries;
    pthread_mutex_unlock(&state->lock);
    if (status) {
        free_parts(c);
        return -status;
    }
    *out = (struct rr_verbs_endpoint){(uint64_t)c->generation << 16 | c->slot, c->qp->qp_num, c->psn};
    return 0;
}

int rr_verbs_new_endpoint(struct rr_plane *plane, uint32_t rail, uint32_t through, int sending, struct rr_verbs_endpoint *out, char *error)
{
    return verbs_new_endpoint(plane, rail, through, sending, NEW, out, error);
}

/* Any thread; NULL: another, or none, is there now. */
struct rr_connection *verbs_endpoint_at(struct rr_plane *plane, uint32_t slot, uint32_t generation)
{
    if (slot >= ENDPOINTS_MAX) return NULL;
    struct rr_connection *c = rr_load_acquire_pointer((void *const *)&plane->verbs->endpoints[slot]);
    return c && c->generation == generation ? c : NULL;
}

struct rr_connection *verbs_by_id(struct rr_plane *plane, uint64_t id)
{
    return plane->verbs ? verbs_endpoint_at(plane, (uint32_t)(id & 0xffff), (uint32_t)(id >> 16)) : NULL;
}

/* The owner only: a worker that connects it, or the rail's thread. */
int verbs_post_receives(struct rr_connection *c, uint32_t count)
{
    struct ibv_recv_wr wrs[RECEIVE_BATCH], *bad;
    struct ibv_sge sges[RECEIVE_BATCH];
    while (count) {
        uint32_t batch = count < RECEIVE_BATCH ? count : RECEIVE_BATCH;
        for (uint32_t i = 0; i < batch; i++) {
            uint64_t position = c->received_posted + i;
            uint8_t *at = c->memory + (MESSAGES + position % RECEIVES) * MESSAGE_BYTES;
            sges[i] = (struct ibv_sge){(uint64_t)(uintptr_t)at, MESSAGE_BYTES, c->mr->lkey};
            wrs[i] = (struct ibv_recv_wr){WR_RECEIVE | c->wr_tag | (uint32_t)position, i + 1 < batch ? &wrs[i + 1] : NULL, &sges[i], 1};
        }
        int status = ibv_post_recv(c->qp, wrs, &bad);
        if (status) {
            c->received_posted += (uint64_t)(bad - wrs);
            return status < 0 ? -status : status;
        }
        c->received_posted += batch;
        count -= batch;
    }
    return 0;
}

void verbs_run_drop(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *c = verbs_by_id(rail->plane, command->a);
    if (!c || c->role == SENDER || c->role == RECEIVER || c->port->flush == c) return;
    if (c->role == PROBE && c->probe_cookie)
        rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)c->probe_cookie, IBV_WC_WR_FLUSH_ERR, 0, 0, 0);
    verbs_unlink(c); /* an event of its queue pair may have put it on a list */
    verbs_destroy(c);
}

int rr_verbs_drop_endpoint(struct rr_plane *plane, uint64_t endpoint)
{
    if (!plane->verbs) return -ENOENT;
    pthread_mutex_lock(&plane->verbs->lock);
    struct rr_connection *c = verbs_by_id(plane, endpoint);
    struct rr_rail *rail = c && !c->busy && !c->doomed ? c->nic->base.rail : NULL;
    if (c) c->doomed = 1;
    pthread_mutex_unlock(&plane->verbs->lock);
    if (rail) rr_rail_command(rail, (struct rr_command){.run = verbs_run_drop, .a = endpoint});
    return c ? 0 : -ENOENT;
}

static void run_probe(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *c = verbs_by_id(rail->plane, command->a);
    int64_t status = IBV_WC_GENERAL_ERR;
    if (c && c->role == NEW && c->state == OPEN) {
        struct ibv_send_wr wr = {.wr_id = send_wr_id(c, c->posted + 1), .opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr *bad;
        if (ibv_post_send(c->qp, &wr, &bad) == 0) {
            c->posted++;
            c->role = PROBE;
            c->probe_cookie = command->cookie;
            return;
        }
    }
    rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)command->cookie, status, 0, 0, 0);
}

int rr_verbs_probe(struct rr_plane *plane, uint64_t endpoint, uint64_t cookie)
{
    if (!plane->verbs) return -ENOENT;
    pthread_mutex_lock(&plane->verbs->lock);
    struct rr_connection *c = verbs_by_id(plane, endpoint);
    struct rr_rail *rail = c ? c->nic->base.rail : NULL;
    pthread_mutex_unlock(&plane->verbs->lock);
    if (!rail) return -ENOENT;
    rr_rail_command(rail, (struct rr_command){.run = run_probe, .a = endpoint, .cookie = cookie});
    return 0;
}

/* The rail's thread: from now on nobody else uses it. NULL: not there, not connected, or dropped; it is now. */
struct rr_connection *verbs_adopt(struct verbs_nic *nic, uint64_t endpoint, int sending)
{
    struct rr_plane *plane = nic->base.rail->plane;
    pthread_mutex_lock(&plane->verbs->lock);
    struct rr_connection *c = verbs_by_id(plane, endpoint);
    if (c && (c->nic != nic || c->role != NEW || c->state != OPEN || c->sending != sending || c->doomed)) c = NULL;
    if (c) {
        c->next = nic->connections;
        nic->connections = c;
    }
    pthread_mutex_unlock(&plane->verbs->lock);
    if (!c) rr_verbs_drop_endpoint(plane, endpoint);
    return c;
}

/* The rail's thread, or the main thread when it has ended. What still comes from its completion queue is told by its
 * generation. */
void verbs_destroy(struct rr_connection *c)
{
    struct rr_verbs *state = c->nic->base.rail->plane->verbs;
    pthread_mutex_lock(&state->lock);
    rr_store_release_pointer((void **)&state->endpoints[c->slot], NULL);
    c->next = state->dead;
    state->dead = c;
    pthread_cond_signal(&state->reaper_wake);
    pthread_mutex_unlock(&state->lock);
}

/* The rail's thread. Without its queue pair the device reads and writes nothing for it; the rail is told when it is gone. */
void verbs_destroy_queue_pair(struct rr_connection *c)
{
    struct rr_rail *rail = c->nic->base.rail;
    struct rr_verbs *state = rail->plane->verbs;
    struct verbs_orphan *orphan = malloc(sizeof *orphan);
    if (!orphan) abort();
    pthread_mutex_lock(&state->lock); /* on_queue_pair_event looks at c->qp */
    *orphan = (struct verbs_orphan){state->orphans, c->qp, rail, c->slot, c->generation};
    c->qp = NULL;
    state->orphans = orphan;
    pthread_cond_signal(&state->reaper_wake);
    pthread_mutex_unlock(&state->lock);
}
#endif
