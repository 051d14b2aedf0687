/* The verbs NIC: what was written to a GPU is there for it only once a read of the same device has come back behind the
 * writes. One read of each target serves all receivers of a rail on one device, and all frames that came before it.
 * Runs on the rail's thread, but for rr_verbs_set_flush: a worker of the main thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void start(struct verbs_port *port)
{
    struct rr_connection *flush = port->flush;
    if (flush->posted != flush->completed || flush->state != OPEN) return; /* what is under way came too early: again after it */
    for (struct rr_connection *c = flush->nic->connections; c; c = c->next)
        if (c->role == RECEIVER && c->port == port) c->flush_mark = c->due_pushed;
    for (uint32_t i = 0; i < port->target_count; i++) {
        struct ibv_send_wr *wr = verbs_next_wr(flush);
        wr->sg_list[0] = (struct ibv_sge){(uint64_t)(uintptr_t)flush->memory + MESSAGE_BYTES + 8 * i, 1, flush->mr->lkey};
        wr->num_sge = 1;
        wr->opcode = IBV_WR_RDMA_READ;
        wr->send_flags = IBV_SEND_SIGNALED;
        wr->wr.rdma.remote_addr = port->targets[i].address;
        wr->wr.rdma.rkey = port->targets[i].rkey;
    }
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

void verbs_on_flushed(struct rr_connection *flush)
{
    if (flush->posted != flush->completed) return; /* other targets */
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
    port->flush = NULL;
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role != RECEIVER || c->port != port) continue;
        verbs_lose(&nic->base, c, ENOTCONN);
        c->due_flushed = c->flush_mark = c->due_pushed;
        verbs_touch(c);
    }
    verbs_unlink(flush);
    verbs_destroy(flush);
}

/* ---- which memory it reads ---- */

struct flush_order {
    uint64_t endpoint; /* 0: the one that is there */
    uint32_t through, count;
    struct rr_verbs_target targets[RR_VERBS_TARGETS_MAX];
};

static void run_set_flush(struct rr_rail *rail, struct rr_command *command)
{
    struct flush_order *order = command->pointer;
    struct verbs_nic *nic = verbs(rail->nic);
    struct rr_connection *c = verbs_by_id(rail->plane, order->endpoint);
    struct verbs_port *port = nic->ports[order->through];
    if (c && port->flush) { /* somebody was faster */
        verbs_destroy(c);
    } else if (c) {
        c->next = nic->connections;
        nic->connections = c;
        rr_store_release_pointer((void **)&port->flush, c);
        if (!order->count) order->targets[order->count++] = (struct rr_verbs_target){(uint64_t)(uintptr_t)c->memory, c->mr->rkey};
    }
    if (order->count) memcpy(port->targets, order->targets, sizeof port->targets);
    port->target_count = order->count ? order->count : port->target_count;
    port->flush_needed = 1;
    free(order);
}

int rr_verbs_set_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, const struct rr_verbs_target *targets, uint32_t count, char *error)
{
    struct verbs_nic *nic = verbs_nic_of(plane, rail);
    if (!nic || !verbs_nic_of(plane, through)) return -ENOENT;
    uint32_t when = plane->rails[rail].verbs.flush;
    if (when == RR_FLUSH_NEVER || (when == RR_FLUSH_AUTO && !count)) return 0;
    if (count > RR_VERBS_TARGETS_MAX) return -EINVAL;
    pthread_mutex_lock(&plane->verbs->lock);
    const struct verbs_port *port = nic->ports[through];
    int there = port && rr_load_acquire_pointer((void *const *)&port->flush) != NULL;
    pthread_mutex_unlock(&plane->verbs->lock);
    struct flush_order *order = calloc(1, sizeof *order);
    if (!order) return -ENOMEM;
    order->through = through;
    order->count = count;
    if (count) memcpy(order->targets, targets, count * sizeof *targets);
    if (!there) {
        struct rr_verbs_endpoint made;
        struct rr_verbs_facts facts;
        int status = verbs_new_endpoint(plane, rail, through, 1, FLUSH, &made, error);
        if (!status) {
            order->endpoint = made.id;
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
            if (status) rr_verbs_drop_endpoint(plane, made.id);
        }
        if (status) {
            free(order);
            return status;
        }
    }
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_set_flush, .pointer = order});
    return 0;
}
#endif
