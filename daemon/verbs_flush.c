/* The verbs NIC: what was written to a GPU is there for it only once a read of the same device has come back behind the
 * writes. One read of each target serves all receivers of a rail on one device, and all frames that came before it.
 * Runs on the rail's thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>

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
#endif
