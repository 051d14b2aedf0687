/* The TCP NIC, receiving end for private memory: frames land in bounce memory that the owner's own thread empties.
 * A sender asks for a slot of it (WANT) and sends only what was granted, so that an owner that has stopped holds up
 * nobody else's frames. The rail's thread. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tcp_nic.h"

struct rr_bouncer *tcp_bouncer_of(struct rr_rail *rail, uint32_t number)
{
    struct rr_client *client = number < RR_MAX_CLIENTS ? rail->by_number[number] : NULL;
    if (!client) return NULL;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    return bouncer->shared ? bouncer : NULL;
}

static uint32_t held_by(const struct rr_bouncer *bouncer, const struct rr_connection *c)
{
    uint32_t held = 0;
    for (uint32_t slot = 0; slot < bouncer->slots; slot++) held += bouncer->reserved_by[slot] == c;
    return held;
}

/* In the order of asking, but one connection never holds more than twice what is free (the dynamic threshold of
 * feeder.c): a sender that has stopped leaves a slot for the next. */
static void grant_waiting(struct tcp_nic *nic, struct rr_bouncer *bouncer)
{
    for (uint32_t i = 0; i < bouncer->wait_count;) {
        struct rr_bounce_wait wait = bouncer->waits[i];
        uint32_t free_slots = held_by(bouncer, NULL), slot = 0;
        if (!free_slots) return;
        if (wait.connection->fd < 0 || held_by(bouncer, wait.connection) >= 2 * free_slots) {
            i++;
            continue;
        }
        while (bouncer->reserved_by[slot]) slot++;
        bouncer->reserved_by[slot] = wait.connection;
        bouncer->in_use[slot] = 0;
        bouncer->wait_count--;
        memmove(bouncer->waits + i, bouncer->waits + i + 1, (bouncer->wait_count - i) * sizeof wait);
        wait.connection->wants--;
        tcp_queue_reply(nic, wait.connection, REPLY_GRANT, RR_OK, wait.sequence, slot + 1, bouncer->owner);
        tcp_flush_replies(nic, wait.connection);
    }
}

static void refuse_want(struct tcp_nic *nic, struct rr_connection *c, uint64_t sequence, uint16_t code)
{
    c->wants--;
    tcp_queue_reply(nic, c, REPLY_GRANT, code, sequence, 0, 0);
    tcp_flush_replies(nic, c);
}

void tcp_on_want(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_bouncer *bouncer = tcp_bouncer_of(rail, c->in.owner);
    if (c->wants++ == RR_WINDOW) {
        tcp_lose(&nic->base, c, EPROTO);
        return;
    }
    if (!bouncer || c->in.bytes > rail->plane->slot_bytes) {
        refuse_want(nic, c, c->in.sequence, bouncer ? RR_OUT_OF_BOUNDS : RR_REGION_GONE);
        return;
    }
    if (bouncer->wait_count == bouncer->wait_capacity) {
        /* Bounded by the connections there are times their window; grown once in a while, not for each frame. */
        uint32_t capacity = bouncer->wait_capacity ? 2 * bouncer->wait_capacity : RR_WINDOW;
        struct rr_bounce_wait *more = realloc(bouncer->waits, capacity * sizeof *more);
        if (!more) {
            tcp_lose(&nic->base, c, ENOMEM);
            return;
        }
        bouncer->waits = more;
        bouncer->wait_capacity = capacity;
    }
    bouncer->waits[bouncer->wait_count++] = (struct rr_bounce_wait){c, c->in.sequence};
    grant_waiting(nic, bouncer);
}

void tcp_free_bounce_slot(struct tcp_nic *nic, struct rr_bouncer *bouncer, uint32_t slot)
{
    bouncer->reserved_by[slot] = NULL;
    bouncer->in_use[slot] = 0;
    grant_waiting(nic, bouncer);
}

void tcp_on_return(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_bouncer *bouncer = tcp_bouncer_of(nic->base.rail, c->in.owner);
    uint64_t slot = c->in.grant - 1;
    if (bouncer && slot < bouncer->slots && bouncer->reserved_by[slot] == c && !bouncer->in_use[slot])
        tcp_free_bounce_slot(nic, bouncer, (uint32_t)slot);
}

void tcp_publish_bounce(struct tcp_nic *nic, struct rr_connection *c)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_plane *plane = rail->plane;
    struct rr_client *client = rail->by_number[c->in.owner];
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    uint64_t at = bouncer->filled % bouncer->slots;
    struct rr_bounce_frame *frame = &bouncer->frames[at];
    struct rr_run *runs = bouncer->runs + at * plane->table_entries;
    for (uint32_t i = 0; i < c->in.run_count; i++)
        runs[i] = (struct rr_run){c->runs[i].offset, c->runs[i].length, plane->exports[c->runs[i].handle % plane->max_exports].region};
    frame->slot = (uint32_t)c->bounce_slot;
    frame->run_count = c->in.run_count;
    frame->bytes = c->in.bytes;
    bouncer->pending[at] = (struct rr_bounce_pending){c, c->in.sequence, c->in.tag, (uint32_t)c->bounce_slot, c->in.window};
    c->bounces_pending++;
    bouncer->filled++;
    rr_store_release_u64(&bouncer->shared->filled, bouncer->filled); /* SYNC filled */
    rr_count(rail, RR_RAIL_BOUNCED_BYTES, c->in.bytes);
    rr_count_wake(&client->control->bounce_wake, &client->control->bounce_sleeping);
}

static void settle_bounce(struct tcp_nic *nic, struct rr_bounce_pending pending, uint16_t code)
{
    struct rr_connection *c = pending.connection;
    c->bounces_pending--;
    tcp_acknowledge(nic, c, pending.sequence, code, pending.window);
    tcp_flush_replies(nic, c);
}

/* A fence that waited for the last bounce frame of a connection goes on. */
static void resume_fences(struct tcp_nic *nic)
{
    for (struct rr_connection *c = nic->connections, *next; c; c = next) {
        next = c->next;
        if (c->role == RECEIVER && c->fencing && !c->bounces_pending) nic->base.ops->fence(&nic->base, c);
    }
}

int tcp_reclaim(struct rr_nic *base, struct rr_client *client)
{
    struct tcp_nic *nic = tcp(base);
    struct rr_rail *rail = base->rail;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    uint64_t emptied = rr_load_acquire_u64(&bouncer->shared->emptied); /* SYNC emptied */
    if (emptied - bouncer->reclaimed > bouncer->filled - bouncer->reclaimed) {
        rr_violation(rail, client, RR_PROTOCOL, emptied, bouncer->filled, 0);
        return 0;
    }
    int work_count = 0;
    while (bouncer->reclaimed != emptied) {
        uint64_t at = bouncer->reclaimed % bouncer->slots;
        struct rr_bounce_pending pending = bouncer->pending[at];
        uint32_t result = rr_load_relaxed_u32(&bouncer->frames[at].result);
        bouncer->reclaimed++;
        settle_bounce(nic, pending, result == RR_OK ? RR_OK : RR_REGION_GONE);
        tcp_free_bounce_slot(nic, bouncer, pending.slot);
        work_count++;
    }
    if (work_count) resume_fences(nic);
    return work_count;
}

/* The client is gone: nobody empties its bounce memory any more. */
void tcp_drop_bounces(struct rr_nic *base, struct rr_client *client)
{
    struct tcp_nic *nic = tcp(base);
    struct rr_bouncer *bouncer = &client->ports[base->rail->number].bouncer;
    if (!bouncer->shared) return;
    for (uint32_t i = 0; i < bouncer->wait_count; i++) refuse_want(nic, bouncer->waits[i].connection, bouncer->waits[i].sequence, RR_REGION_GONE);
    bouncer->wait_count = 0;
    while (bouncer->reclaimed != bouncer->filled) settle_bounce(nic, bouncer->pending[bouncer->reclaimed++ % bouncer->slots], RR_REGION_GONE);
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role == RECEIVER && c->stage == PAYLOAD && c->bounce_slot >= 0 && c->in.owner == client->number) {
            c->refused = 1;
            c->code = RR_REGION_GONE;
            c->bounce_slot = -1;
        }
    }
    bouncer->shared = NULL;
    resume_fences(nic);
}

/* The connection is fenced: what it waits for, was granted or had half read goes to others. */
void tcp_forget_bounces(struct tcp_nic *nic, struct rr_connection *c)
{
    for (uint32_t i = 0; i < RR_MAX_CLIENTS; i++) {
        struct rr_bouncer *bouncer = tcp_bouncer_of(nic->base.rail, i);
        if (!bouncer) continue;
        uint32_t kept = 0;
        for (uint32_t w = 0; w < bouncer->wait_count; w++)
            if (bouncer->waits[w].connection != c) bouncer->waits[kept++] = bouncer->waits[w];
        bouncer->wait_count = kept;
        for (uint32_t slot = 0; slot < bouncer->slots; slot++) {
            if (bouncer->reserved_by[slot] != c) continue;
            bouncer->reserved_by[slot] = NULL;
            bouncer->in_use[slot] = 0;
        }
        grant_waiting(nic, bouncer);
    }
}
