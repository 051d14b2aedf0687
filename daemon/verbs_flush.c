/* The verbs NIC: what was written to a GPU is there for it only once a read of the same device has come back behind the
 * writes. One read of each target serves all receivers of a rail on one device, and all frames that came before it.
 * Runs on the rail's thread, but for the orders at the end: the main thread and its workers. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void read_target(struct rr_connection *flush, uint32_t number, struct rr_verbs_target target)
{
    struct ibv_send_wr *wr = verbs_next_wr(flush);
    wr->sg_list[0] = (struct ibv_sge){(uint64_t)(uintptr_t)flush->memory + MESSAGE_BYTES + 8 * number, 1, flush->mr->lkey};
    wr->num_sge = 1;
    wr->opcode = IBV_WR_RDMA_READ;
    wr->send_flags = IBV_SEND_SIGNALED;
    wr->wr.rdma.remote_addr = target.address;
    wr->wr.rdma.rkey = target.rkey;
}

static void start(struct verbs_port *port)
{
    struct rr_connection *flush = port->flush;
    if (flush->posted != flush->completed || flush->state != OPEN) return; /* what is under way came too early: again after it */
    for (struct rr_connection *c = flush->nic->connections; c; c = c->next)
        if (c->role == RECEIVER && c->port == port) c->flush_mark = c->due_pushed;
    for (uint32_t i = 0; i < port->target_count; i++) read_target(flush, i, port->targets[i]);
    if (flush->nic->base.rail->verbs.flush == RR_FLUSH_ALWAYS) /* host memory: any byte of it */
        read_target(flush, port->target_count, (struct rr_verbs_target){(uint64_t)(uintptr_t)flush->memory, flush->mr->rkey});
    verbs_post_batch(flush);
}

/* Does something that is to be answered wait for a flush? Starts one then. */
int verbs_flush_late(struct rr_connection *c)
{
    struct verbs_port *port = c->port;
    if (!port->flush_needed || c->due_flushed == c->due_pushed) return 0;
    if (port->flush)
        start(port);
    else if (c->state == OPEN)
        verbs_lose(&c->nic->base, c, ENOTCONN);
    else
        return 0;
    return 1;
}

void verbs_free_orders(struct verbs_port *port)
{
    for (struct verbs_flush_order *order = port->flush_orders, *next; order; order = next) {
        next = order->next;
        free(order);
    }
    port->flush_orders = NULL;
}

/* Nothing reads targets of before any more. */
static void answer_orders(struct verbs_port *port, struct rr_rail *rail)
{
    for (const struct verbs_flush_order *order = port->flush_orders; order; order = order->next)
        rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)order->cookie, 0, 0, 0, 0);
    verbs_free_orders(port);
}

void verbs_on_flushed(struct rr_connection *flush)
{
    if (flush->posted != flush->completed) return; /* other targets */
    answer_orders(flush->port, flush->nic->base.rail);
    for (struct rr_connection *c = flush->nic->connections, *next; c; c = next) {
        next = c->next;
        if (c->role != RECEIVER || c->port != flush->port) continue;
        c->due_flushed = c->flush_mark;
        verbs_touch(c);
    }
}

/* Drained: without it nothing is answered, so that receivers that need it are lost, and the conductor makes another. What a
 * fence waits for has long been there. */
void verbs_flush_failed(struct rr_connection *flush)
{
    struct verbs_port *port = flush->port;
    struct verbs_nic *nic = flush->nic;
    if (port->flush == flush) { /* and not one that failed before it was adopted */
        port->flush = NULL;
        answer_orders(port, nic->base.rail);
        for (struct rr_connection *c = nic->connections; c; c = c->next) {
            if (c->role != RECEIVER || c->port != port) continue;
            if (port->flush_needed) verbs_lose(&nic->base, c, ENOTCONN);
            c->due_flushed = c->flush_mark = c->due_pushed;
            verbs_touch(c);
        }
    }
    verbs_unlink(flush);
    verbs_destroy(flush);
}

/* ---- which memory it reads ---- */

static void run_adopt_flush(struct rr_rail *rail, struct rr_command *command)
{
    struct verbs_nic *nic = verbs(rail->nic);
    struct rr_connection *c = verbs_by_id(rail->plane, command->a);
    struct verbs_port *port = nic->ports[command->b]; /* made with its endpoint, and never unmade */
    if (!c) return;
    if (port->flush) { /* somebody was faster */
        verbs_unlink(c);
        verbs_destroy(c);
        return;
    }
    c->next = nic->connections;
    nic->connections = c;
    rr_store_release_pointer((void **)&port->flush, c);
    port->flush_needed = port->target_count || rail->verbs.flush == RR_FLUSH_ALWAYS;
}

int rr_verbs_open_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, char *error)
{
    struct verbs_nic *nic = verbs_nic_of(plane, rail);
    if (!nic || !verbs_nic_of(plane, through)) return -ENOENT;
    if (plane->rails[rail].verbs.flush == RR_FLUSH_NEVER) return 0;
    pthread_mutex_lock(&plane->verbs->lock);
    const struct verbs_port *port = rr_load_acquire_pointer((void *const *)&nic->ports[through]);
    int there = port && rr_load_acquire_pointer((void *const *)&port->flush) != NULL;
    pthread_mutex_unlock(&plane->verbs->lock);
    if (there) return 0;
    struct rr_verbs_endpoint made;
    struct rr_verbs_facts facts;
    int status = verbs_new_endpoint(plane, rail, through, 1, FLUSH, &made, error);
    if (status) return status;
    status = rr_verbs_facts(plane, through, &facts);
    struct rr_verbs_route route = {.qpn = made.qpn,
                                   .psn = made.psn,
                                   .lid = facts.lid,
                                   .mtu_bytes = facts.mtu_bytes,
                                   .timeout = 17,
                                   .retry_count = 6,
                                   .rnr_retry = 7};
    memcpy(route.gid, facts.gid, sizeof route.gid);
    if (!status) status = rr_verbs_connect(plane, made.id, &route, error);
    if (status) {
        rr_verbs_drop_endpoint(plane, made.id);
        return status;
    }
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_adopt_flush, .a = made.id, .b = through});
    return 0;
}

static void run_set_flush(struct rr_rail *rail, struct rr_command *command)
{
    struct verbs_flush_order *order = command->pointer;
    struct verbs_port *port = verbs(rail->nic)->ports[order->through];
    if (port) {
        memcpy(port->targets, order->targets, sizeof port->targets);
        port->target_count = order->count;
        port->flush_needed = rail->verbs.flush != RR_FLUSH_NEVER && (order->count || rail->verbs.flush == RR_FLUSH_ALWAYS);
        order->next = port->flush_orders;
        port->flush_orders = order;
        if (!port->flush || port->flush->posted == port->flush->completed) answer_orders(port, rail);
        return;
    }
    rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)order->cookie, 0, 0, 0, 0);
    free(order);
}

static void discard_order(struct rr_command *command) { free(command->pointer); }

int rr_verbs_set_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, const struct rr_verbs_target *targets, uint32_t count,
                       uint64_t cookie)
{
    if (!verbs_nic_of(plane, rail) || !verbs_nic_of(plane, through)) return -ENOENT;
    if (count > RR_VERBS_TARGETS_MAX) return -EINVAL;
    struct verbs_flush_order *order = calloc(1, sizeof *order);
    if (!order) return -ENOMEM;
    order->cookie = cookie;
    order->through = through;
    order->count = count;
    if (count) memcpy(order->targets, targets, count * sizeof *targets);
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_set_flush, .discard = discard_order, .pointer = order});
    return 0;
}
#endif
