/* The TCP NIC, receiving end for private memory (bounce.h): grants and acknowledgements as replies. The rail's thread. */
#include <errno.h>

#include "tcp_nic.h"

static int takes_grants(const struct rr_connection *c) { return c->fd >= 0; }

static void grant(struct rr_nic *base, struct rr_connection *c, uint64_t want, const struct rr_bouncer *bouncer, uint32_t slot)
{
    c->wants--;
    rr_fault_point(RR_FAULT_DAEMON_BOUNCE_GRANTED);
    tcp_queue_reply(tcp(base), c, REPLY_GRANT, RR_OK, want, rr_bounce_grant_of(bouncer, slot), bouncer->owner);
    tcp_flush_replies(tcp(base), c);
}

static void refuse_want(struct rr_nic *base, struct rr_connection *c, uint64_t want, uint32_t code)
{
    c->wants--;
    tcp_queue_reply(tcp(base), c, REPLY_GRANT, (uint16_t)code, want, 0, 0);
    tcp_flush_replies(tcp(base), c);
}

static void settled(struct rr_nic *base, const struct rr_bounce_pending *pending, uint32_t code)
{
    struct rr_connection *c = pending->connection;
    c->bounces_pending--;
    rr_fault_point(RR_FAULT_DAEMON_BOUNCE_RECLAIMED);
    if (c->fencing) {
        rr_bounce_settled_late(base, c->id, pending->sequence, code);
        return;
    }
    tcp_acknowledge(tcp(base), c, pending->sequence, (uint16_t)code, pending->window);
    tcp_flush_replies(tcp(base), c);
}

const struct rr_bounce_ops tcp_bounce_ops = {takes_grants, grant, refuse_want, settled};

void tcp_on_want(struct tcp_nic *nic, struct rr_connection *c)
{
    if (c->wants++ == RR_WINDOW) {
        tcp_lose(&nic->base, c, EPROTO);
        return;
    }
    int status = rr_bounce_want(&nic->base, c->in.owner, c, c->in.sequence, c->in.bytes);
    if (status) tcp_lose(&nic->base, c, -status);
}

void tcp_publish_bounce(struct tcp_nic *nic, struct rr_connection *c)
{
    c->bounces_pending++;
    rr_bounce_publish(nic->base.rail, &(struct rr_bounced){.connection = c,
                                                           .runs = c->runs,
                                                           .sequence = c->in.sequence,
                                                           .bytes = c->in.bytes,
                                                           .tag = c->in.tag,
                                                           .run_count = c->in.run_count,
                                                           .owner = c->in.owner,
                                                           .slot = (uint32_t)c->bounce_slot,
                                                           .window = c->in.window});
}

/* Fenced connections of which nothing lies in bounce memory any more. */
static void free_fenced(struct tcp_nic *nic)
{
    for (struct rr_connection *c = nic->connections, *next; c; c = next) {
        next = c->next;
        if (c->role == RECEIVER && c->fencing && !c->bounces_pending) tcp_free_connection(nic, c);
    }
}

int tcp_reclaim(struct rr_nic *base, struct rr_client *client)
{
    int work_count = rr_bounce_reclaim(base, client);
    if (work_count) free_fenced(tcp(base));
    return work_count;
}

void tcp_drop_bounces(struct rr_nic *base, struct rr_client *client)
{
    struct tcp_nic *nic = tcp(base);
    if (!client->ports[base->rail->number].bouncer.shared) return;
    rr_bounce_drop(base, client);
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role == RECEIVER && c->stage == PAYLOAD && c->bounce_slot >= 0 && c->in.owner == client->number) {
            c->refused = 1;
            c->code = RR_REGION_GONE;
            c->bounce_slot = -1;
        }
    }
    free_fenced(nic);
}
