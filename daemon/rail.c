/* The duty cycle of one rail: commands, B (collector), C (mover: rr_nic_ops.post and poll), then sleep. One thread a
 * rail, entered once, never holding the GIL. It sleeps in the NIC's epoll set, which includes the kick eventfds. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "nic.h"

void rr_rail_wake(struct rr_rail *rail) { rr_kick(rail->kick_fd); }

void rr_rail_command(struct rr_rail *rail, struct rr_command command)
{
    struct rr_command *node = malloc(sizeof *node);
    if (!node) abort();
    *node = command;
    node->next = NULL;
    pthread_mutex_lock(&rail->command_lock);
    if (rail->command_last)
        rail->command_last->next = node;
    else
        rail->command_first = node;
    rail->command_last = node;
    pthread_mutex_unlock(&rail->command_lock);
    rr_store_release_u32(&rail->commands_waiting, 1); /* private to the process; the kick below wakes a sleeper */
    rr_rail_wake(rail);
}

static int run_commands(struct rr_rail *rail)
{
    if (!rr_load_acquire_u32(&rail->commands_waiting)) return 0;
    pthread_mutex_lock(&rail->command_lock);
    struct rr_command *command = rail->command_first;
    rail->command_first = rail->command_last = NULL;
    rr_store_relaxed_u32(&rail->commands_waiting, 0);
    pthread_mutex_unlock(&rail->command_lock);
    int work_count = 0;
    while (command) {
        struct rr_command *next = command->next;
        command->run(rail, command);
        free(command);
        command = next;
        work_count++;
    }
    return work_count;
}

void rr_violation(struct rr_rail *rail, struct rr_client *client, uint32_t result, uint64_t a, uint64_t b, uint64_t c)
{
    uint32_t none = 0;
    if (!rr_compare_exchange_u32(&client->faulted, &none, result)) return;
    rr_count(rail, RR_RAIL_VIOLATIONS, 1);
    rr_event_push(rail->plane, RR_EVENT_VIOLATION, rail->number, client->number, result, (int64_t)a, (int64_t)b, (int64_t)c);
}

/* ---- paths: flows of slices in deficit round robin ---- */

static uint32_t path_index(uint32_t peer, uint32_t remote_rail, uint32_t class_) { return (peer * RR_MAX_RAILS + remote_rail) * RR_CLASSES + class_; }

struct rr_path *rr_path_of(struct rr_rail *rail, uint32_t peer, uint32_t remote_rail, uint32_t class_)
{
    struct rr_path *path = &rail->paths[path_index(peer, remote_rail, class_)];
    path->peer = peer;
    path->remote_rail = remote_rail;
    path->class_ = class_;
    return path;
}

static void want_connection(struct rr_rail *rail, struct rr_path *path)
{
    if (rail->nic->ops->one_sided && path->class_) path = rr_path_of(rail, path->peer, path->remote_rail, 0);
    if (path->connection || path->wanted || path->broken) return;
    path->wanted = 1;
    rr_count(rail, RR_RAIL_CONNECTION_WAITS, 1);
    rr_event_push(rail->plane, RR_EVENT_CONNECT_WANTED, rail->number, path->peer, path->remote_rail, path->class_, path->epoch + 1, 0);
}

static void pop_flow(struct rr_path *path)
{
    struct rr_flow *flow = path->flow_first;
    path->flow_first = flow->next;
    if (!path->flow_first) path->flow_last = NULL;
    flow->next = NULL;
}

/* The first flow has nothing queued. */
static void drop_flow(struct rr_path *path)
{
    struct rr_flow *flow = path->flow_first;
    pop_flow(path);
    flow->active = 0;
}

static void push_flow(struct rr_path *path, struct rr_flow *flow)
{
    if (path->flow_last)
        path->flow_last->next = flow;
    else
        path->flow_first = flow;
    path->flow_last = flow;
}

void rr_path_activate(struct rr_rail *rail, struct rr_path *path)
{
    if (path->active) return;
    path->active = 1;
    path->next_active = rail->active;
    rail->active = path;
}

void rr_path_queue(struct rr_rail *rail, struct rr_work *work, int front)
{
    struct rr_path *path = rr_path_of(rail, work->peer, work->remote_rail, work->class_);
    struct rr_flow *flow = &work->source->flows[path_index(work->peer, work->remote_rail, work->class_)];
    work->state = RR_WORK_QUEUED;
    work->flow = flow;
    if (front) {
        work->next = flow->first;
        flow->first = work;
        if (!flow->last) flow->last = work;
    } else {
        work->next = NULL;
        if (flow->last)
            flow->last->next = work;
        else
            flow->first = work;
        flow->last = work;
    }
    if (!flow->active) {
        flow->active = 1;
        flow->deficit = 0;
        flow->next = NULL;
        push_flow(path, flow);
    }
    rr_path_activate(rail, path);
    want_connection(rail, path);
}

struct rr_work *rr_path_next(struct rr_rail *rail, struct rr_path *path)
{
    struct rr_flow *flow;
    while ((flow = path->flow_first)) {
        struct rr_work *work = flow->first;
        if (!work) {
            drop_flow(path);
            continue;
        }
        if (flow->deficit < work->bytes) {
            flow->deficit += RR_QUANTUM_BYTES;
            pop_flow(path);
            push_flow(path, flow);
            continue;
        }
        flow->deficit -= work->bytes;
        flow->first = work->next;
        if (!flow->first) flow->last = NULL;
        work->next = NULL;
        uint32_t stopped = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
        if (!stopped) return work;
        rr_work_done(rail, work, stopped);
    }
    return NULL;
}

void rr_purge(struct rr_rail *rail, int (*drop)(const struct rr_work *work, const void *context), const void *context, uint32_t result)
{
    for (struct rr_path *path = rail->active; path; path = path->next_active) {
        for (struct rr_flow *flow = path->flow_first; flow; flow = flow->next) {
            struct rr_work *work = flow->first;
            flow->first = flow->last = NULL;
            while (work) {
                struct rr_work *next = work->next;
                work->next = NULL;
                if (drop(work, context)) {
                    uint32_t stopped = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
                    rr_work_done(rail, work, stopped ? stopped : result);
                } else {
                    if (flow->last)
                        flow->last->next = work;
                    else
                        flow->first = work;
                    flow->last = work;
                }
                work = next;
            }
        }
    }
}

/* Flows live in the client's memory: none may stay linked when the client is released. */
static void unlink_flows(struct rr_rail *rail, const struct rr_client *client)
{
    for (struct rr_path *path = rail->active; path; path = path->next_active) {
        struct rr_flow *flow = path->flow_first;
        path->flow_first = path->flow_last = NULL;
        while (flow) {
            struct rr_flow *next = flow->next;
            flow->next = NULL;
            if (flow->source->client == client)
                flow->active = 0;
            else
                push_flow(path, flow);
            flow = next;
        }
    }
}

/* Between other steps of the cycle, where nobody holds a pointer into a client's memory: the main thread may free it at
 * once. */
static int let_go(struct rr_rail *rail)
{
    int work_count = 0;
    for (uint32_t i = 0; i < rail->leaving_count;) {
        struct rr_client *client = rail->leaving[i];
        struct rr_port *port = &client->ports[rail->number];
        if (port->lane_source.in_flight || port->ring_source.in_flight) {
            i++;
            continue;
        }
        rail->leaving[i] = rail->leaving[--rail->leaving_count];
        unlink_flows(rail, client);
        rr_event_push(rail->plane, RR_EVENT_CLIENT_DETACHED, rail->number, client->number, 0, 0, 0, 0);
        work_count++;
    }
    return work_count;
}

static void trace(struct rr_rail *rail, const struct rr_work *work, uint32_t result)
{
    const struct rr_client *client = work->source->client;
    struct rr_trace_record record = {
        .began_ns = work->began_ns,
        .filled_ns = work->filled_ns,
        .taken_ns = work->taken_ns,
        .posted_ns = work->posted_ns,
        .completed_ns = rr_rail_now(rail),
        .tag = work->tag,
        .bytes = work->bytes,
        .client = client->number,
        .client_serial = client->serial,
        .transfer = work->transfer,
        .generation = work->generation,
        .peer = work->peer,
        .remote_rail = work->remote_rail,
        .direct = !work->source->is_lane,
        .slot = work->slot,
        .blocks = work->block_count,
        .runs = work->run_count,
        .result = result,
    };
    rr_trace_write(&rail->trace, &record);
}

/* Nothing reads the slot, or the source of a direct slice, any more. */
static void give_back(struct rr_rail *rail, struct rr_work *work)
{
    struct rr_source *source = work->source;
    struct rr_port *port = &source->client->ports[rail->number];
    work->state = RR_WORK_FREE;
    work->connection = NULL;
    if (source->is_lane) {
        rr_lane_return(&port->lane, work->slot);
        rr_store_relaxed_u64(&port->state->completed, port->lane.completed);
    } else {
        work->next = source->free;
        source->free = work;
        rr_ring_end(port->ring.ring, &port->ring_completed, work->slot);
    }
}

static void slice_done(struct rr_rail *rail, struct rr_source *source, uint32_t transfer, uint32_t generation, uint32_t result, uint64_t bytes)
{
    source->in_flight--;
    rr_count(rail, result ? RR_RAIL_SLICES_FAILED : RR_RAIL_SLICES_DONE, 1);
    if (rr_transfer_slice_done(source->client, transfer, generation, result, bytes, rail->number))
        rr_violation(rail, source->client, RR_PROTOCOL, transfer, generation, bytes);
    rr_wake_feeder(source->client);
}

void rr_work_done(struct rr_rail *rail, struct rr_work *work, uint32_t result)
{
    struct rr_source *source = work->source;
    uint32_t transfer = work->transfer, generation = work->generation;
    uint64_t bytes = work->bytes;
    trace(rail, work, result);
    /* The slot goes back before the transfer can end, so that a caller who was told "done" finds its credit. */
    give_back(rail, work);
    rr_fault_point(RR_FAULT_DAEMON_SLOT_RETURNED);
    slice_done(rail, source, transfer, generation, result, bytes);
}

struct rr_debt rr_work_owe(struct rr_rail *rail, struct rr_work *work)
{
    struct rr_debt debt = {work->source, work->bytes, work->transfer, work->generation};
    trace(rail, work, RR_UNSETTLED);
    give_back(rail, work);
    rr_wake_feeder(debt.source->client);
    return debt;
}

void rr_debt_paid(struct rr_rail *rail, struct rr_debt *debt, uint32_t result)
{
    struct rr_source *source = debt->source;
    debt->source = NULL;
    slice_done(rail, source, debt->transfer, debt->generation, result, debt->bytes);
}

static int has_tombstone(struct rr_tombstones *const *newest, uint64_t owner, uint64_t tag)
{
    const struct rr_tombstones *set = rr_load_acquire_pointer((void *const *)newest);
    /* Two sets are enough: a third may be on its way out. */
    for (int sets = 0; set && tag && sets < 2; set = rr_load_acquire_pointer((void *const *)&set->older), sets++) {
        for (uint64_t at = rr_tombstone_hash(tag);; at = (at + 1) % (2 * RR_TOMBSTONES)) {
            uint64_t seen = rr_load_acquire_u64(&set->tags[at]); /* its owner was written before */
            if (seen == tag && set->owners[at] == owner) return 1;
            if (!seen) break;
        }
    }
    return 0;
}

int rr_has_tombstone(const struct rr_client *client, uint64_t tag) { return has_tombstone(&client->tombstones, 0, tag); }

int rr_aborted_by_peer(const struct rr_plane *plane, uint32_t peer, uint32_t owner, uint64_t tag)
{
    const struct rr_peer_aborts *aborts = &plane->peers[peer];
    return owner < RR_MAX_CLIENTS && has_tombstone(&aborts->tombstones, rr_peer_owner(aborts, owner), tag);
}

/* ---- the cycle ---- */

int rr_epoll_wait(int epoll_fd, struct epoll_event *events, int max, int64_t timeout_ns)
{
    if (timeout_ns <= 0) return epoll_wait(epoll_fd, events, max, timeout_ns < 0 ? -1 : 0);
#ifdef SYS_epoll_pwait2
    struct timespec timeout = {timeout_ns / 1000000000, timeout_ns % 1000000000};
    int count = (int)syscall(SYS_epoll_pwait2, epoll_fd, events, max, &timeout, NULL, 0);
    if (count >= 0 || errno != ENOSYS) return count;
#endif
    return epoll_wait(epoll_fd, events, max, (int)((timeout_ns + 999999) / 1000000));
}

/* A GPU that fills a slot wakes nobody when it is done. Spins, then naps for an eighth of the time that it has waited,
 * so that a slot which is never filled costs little. */
#define FILLING_SPIN_NS 50000u

static int64_t nap_of(uint64_t waited_ns)
{
    uint64_t nap_ns = waited_ns / 8;
    return (int64_t)(nap_ns < 20000 ? 20000 : nap_ns > 1000000 ? 1000000 : nap_ns);
}

/* 1: it stays active. */
static int visit(struct rr_rail *rail, struct rr_path *path, int *work_count)
{
    *work_count += rail->nic->ops->post(rail->nic, path);
    while (path->flow_first && !path->flow_first->first) drop_flow(path);
    if (path->flow_first) want_connection(rail, path);
    if (path->flow_first || path->unfinished) return 1;
    path->active = 0;
    return 0;
}

/* All that is small, then of the rest one path that has something to send: what is small then waits for one visit,
 * however many peers there are. */
static int post(struct rr_rail *rail)
{
    int small_count = 0, work_count = 0;
    struct rr_path **link = &rail->active;
    while (*link) {
        struct rr_path *path = *link;
        if (path->class_ && !visit(rail, path, &small_count))
            *link = path->next_active;
        else
            link = &path->next_active;
    }
    struct rr_path *visited = NULL, **last = &visited;
    link = &rail->active;
    while (*link && !work_count) {
        struct rr_path *path = *link;
        if (path->class_) {
            link = &path->next_active;
            continue;
        }
        *link = path->next_active;
        path->next_active = NULL;
        if (!visit(rail, path, &work_count)) continue;
        *last = path;
        last = &path->next_active;
    }
    while (*link) link = &(*link)->next_active;
    *link = visited;
    return small_count + work_count;
}

static int still_landing(struct rr_rail *rail, const struct rr_deferred *deferred)
{
    const struct rr_nic_ops *ops = rail->nic->ops;
    const struct rr_client *client = rail->by_number[deferred->client];
    if (client && client->ports[rail->number].bouncer.reclaimed < deferred->until) return 1;
    return ops->landing && ops->landing(rail->nic, deferred->client, deferred->handle, deferred->tag);
}

static int still_named(struct rr_rail *rail, struct rr_deferred *deferred)
{
    while (deferred->mark_count && rail->nic->ops->ended(rail->nic, &deferred->marks[deferred->mark_count - 1])) deferred->mark_count--;
    return deferred->mark_count != 0;
}

static int reclaim(struct rr_rail *rail)
{
    int work_count = 0;
    for (uint32_t i = 0; i < rail->client_count; i++) {
        struct rr_bouncer *bouncer = &rail->clients[i]->ports[rail->number].bouncer;
        if (bouncer->shared && bouncer->filled != bouncer->reclaimed) work_count += rail->nic->ops->reclaim(rail->nic, rail->clients[i]);
    }
    uint32_t frames_ended = rail->frames_ended;
    rail->frames_ended = 0;
    struct rr_deferred **link = &rail->deferred;
    while (*link) {
        struct rr_deferred *deferred = *link;
        if (deferred->marks ? !frames_ended || still_named(rail, deferred) : still_landing(rail, deferred)) {
            link = &deferred->next;
            continue;
        }
        rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)deferred->cookie, 0, 0, 0, 0);
        *link = deferred->next;
        free(deferred->marks);
        free(deferred);
    }
    return work_count;
}

static void prepare_thread(struct rr_rail *rail)
{
    char name[16];
    snprintf(name, sizeof name, "rail-%d", rail->number);
    pthread_setname_np(pthread_self(), name);
    prctl(PR_SET_TIMERSLACK, 1000ul); /* naps are of 20 us */
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    if (rail->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(rail->cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
}

void *rr_rail_main(void *argument)
{
    struct rr_rail *rail = argument;
    uint64_t idle_since = 0;
    prepare_thread(rail);
    while (!rr_load_acquire_u32(&rail->stop)) {
        rr_rail_time_passes(rail);
        int work_count = run_commands(rail);
        work_count += rr_collect(rail);
        int aside = reclaim(rail) + let_go(rail);
        if (aside) rr_rail_time_passes(rail);
        work_count += aside;
        work_count += post(rail);
        work_count += rail->nic->ops->poll(rail->nic, 0);
        rr_count(rail, RR_RAIL_CYCLES, 1);
        if (work_count) {
            idle_since = 0;
            continue;
        }
        int64_t nap_ns = -1;
        int filling = rr_collect_filling(rail);
        if (rail->plane->spin_ns || filling) {
            uint64_t now = rr_now_ns();
            if (!idle_since) idle_since = now;
            uint64_t spin_ns = filling && rail->plane->spin_ns ? FILLING_SPIN_NS : rail->plane->spin_ns;
            if (now - idle_since < spin_ns) {
                rr_pause();
                continue;
            }
            if (filling) nap_ns = nap_of(now - idle_since);
        }
        if (!filling) idle_since = 0;
        rr_sleep_arm(&rail->state->sleeping);
        /* Without a nap's end also a head that moved since the last look keeps it awake: the doorbell will not wake it. */
        if (!rr_load_relaxed_u32(&rail->commands_waiting) && !rr_collect_pending(rail) && !(nap_ns < 0 && rr_collect_filling(rail)) &&
            !rr_load_relaxed_u32(&rail->stop)) {
            uint64_t before = rr_now_ns();
            rr_count(rail, RR_RAIL_SLEEPS, 1);
            rail->nic->ops->poll(rail->nic, nap_ns);
            rr_count(rail, RR_RAIL_SLEEP_NS, rr_now_ns() - before);
        }
        rr_sleep_disarm(&rail->state->sleeping);
    }
    return NULL;
}
