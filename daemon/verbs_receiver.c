/* The verbs NIC, receiving end: counts frames, answers them, and the fence. Runs on the rail's thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void verbs_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int endpoint)
{
    struct rr_connection *c = verbs_adopt(verbs(base), (uint64_t)endpoint, 0);
    if (!c) { /* lost before: nothing was received that anybody could have been told of */
        rr_report_fence(base, NULL, id, 0, NULL, 0);
        return;
    }
    c->id = id;
    c->role = RECEIVER;
    c->session = session;
}

static void answer(struct rr_connection *c, uint64_t sequence, uint32_t code)
{
    c->acks[c->ack_count++ % RR_WINDOW] = (struct rr_ack){sequence, code};
    if (c->due_pushed - c->due_sent < RR_WINDOW) c->due[c->due_pushed++ % RR_WINDOW] = (struct rr_ack){sequence, code};
}

/* 0, or -1: a frame too many, or another than was to come. */
int verbs_on_frame(struct rr_connection *c, uint32_t immediate)
{
    struct rr_rail *rail = c->nic->base.rail;
    uint64_t sequence = c->received + 1;
    if ((immediate & IMM_SEQUENCE) != (sequence & IMM_SEQUENCE) || c->due_pushed - c->due_sent == RR_WINDOW) return -1;
    c->received = sequence;
    rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
    rr_count(rail, RR_RAIL_BYTES_RECEIVED, (immediate >> 2) + 1ull);
    answer(c, sequence, RR_OK);
    return 0;
}

/* ---- private memory ---- */

static int takes_grants(const struct rr_connection *c) { return c->state == OPEN; }

static void queue_grant(struct rr_connection *c, struct due_grant grant)
{
    c->wants--;
    if (c->due_grant_count < RR_WINDOW) c->due_grants[(c->due_grant_at + c->due_grant_count++) % RR_WINDOW] = grant;
    verbs_touch(c);
}

static void grant(struct rr_nic *base, struct rr_connection *c, uint64_t want, const struct rr_bouncer *bouncer, uint32_t slot)
{
    (void)base;
    queue_grant(c, (struct due_grant){want, rr_bounce_grant_of(bouncer, slot), bouncer->owner, RR_OK});
}

static void refuse_want(struct rr_nic *base, struct rr_connection *c, uint64_t want, uint32_t code)
{
    (void)base;
    queue_grant(c, (struct due_grant){want, 0, 0, code});
}

static void settled(struct rr_nic *base, const struct rr_bounce_pending *pending, uint32_t code)
{
    struct rr_connection *c = pending->connection;
    c->bounces_pending--;
    if (c->fenced)
        rr_bounce_settled_late(base, c->id, pending->sequence, code);
    else
        answer(c, pending->sequence, code);
    verbs_touch(c);
}

const struct rr_bounce_ops verbs_bounce_ops = {takes_grants, grant, refuse_want, settled};

static uint64_t table_bytes(const struct rr_plane *plane) { return plane->table_entries * sizeof(struct rr_wire_run); }

/* The runs are copied once, out of memory that the client has too: only the copy is checked and used. */
static int on_bounced(struct rr_connection *c, const struct message *message)
{
    struct rr_rail *rail = c->nic->base.rail;
    const struct rr_plane *plane = rail->plane;
    uint32_t run_count = message->one.run_count, owner = message->one.owner;
    if (message->one.sequence != c->received + 1 || !run_count || run_count > plane->table_entries || owner >= plane->max_clients ||
        c->due_pushed - c->due_sent == RR_WINDOW)
        return -1;
    c->received++;
    rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
    rr_count(rail, RR_RAIL_BYTES_RECEIVED, message->one.bytes);
    struct rr_bouncer *bouncer = rr_bouncer_granted(rail, owner, message->grant);
    uint32_t code = message->one.code ? message->one.code : RR_REGION_GONE, slot = rr_bounce_slot_of(message->grant);
    if (bouncer) {
        if (rr_bounce_begin(rail, bouncer, c, message->grant, message->one.bytes, run_count)) return -1;
        if (!message->one.code) {
            const void *runs = message->one.runs;
            if (run_count > RUNS_IN_MESSAGE) runs = bouncer->memory->base + bouncer->slots * plane->slot_bytes + slot * table_bytes(plane);
            rr_copy_words(c->nic->runs, runs, run_count * (uint32_t)sizeof *c->nic->runs);
            code = rr_check_runs(rail, c->session, owner, message->one.tag, message->one.bytes, c->nic->runs, run_count, NULL, NULL);
        }
        if (code == RR_PROTOCOL) return -1;
    }
    if (code) {
        rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
        if (bouncer) rr_bounce_free_slot(&c->nic->base, bouncer, slot);
        answer(c, c->received, code);
        return 0;
    }
    c->bounces_pending++;
    rr_bounce_publish(rail, &(struct rr_bounced){.connection = c,
                                                 .runs = c->nic->runs,
                                                 .sequence = c->received,
                                                 .bytes = message->one.bytes,
                                                 .tag = message->one.tag,
                                                 .run_count = run_count,
                                                 .owner = owner,
                                                 .slot = slot});
    return 0;
}

/* 0, or -1 for what no correct sender says. */
int verbs_on_request(struct rr_connection *c, const struct message *message)
{
    switch (message->type) {
    case MESSAGE_WANT:
        if (c->wants++ == RR_WINDOW) return -1;
        return rr_bounce_want(&c->nic->base, message->one.owner, c, message->one.sequence, message->one.bytes) ? -1 : 0;
    case MESSAGE_RETURN:
        rr_bounce_returned(&c->nic->base, message->one.owner, c, message->grant);
        return 0;
    case MESSAGE_BOUNCED: return on_bounced(c, message);
    default: return -1;
    }
}

/* The sender writes the slot and its table by the key of this queue pair's device: never a slot that is not its own (any
 * more), which would be somebody else's. A grant may have waited long for room in the send queue. */
static void fill_grant(const struct rr_connection *c, struct message *message, const struct due_grant *due)
{
    struct rr_rail *rail = c->nic->base.rail;
    const struct rr_plane *plane = rail->plane;
    struct rr_bouncer *bouncer = due->code ? NULL : rr_bouncer_granted(rail, due->owner, due->grant);
    const uint64_t slot = rr_bounce_slot_of(due->grant);
    message->one.sequence = due->want;
    message->one.owner = due->owner;
    message->one.code = due->code;
    if (due->code) return;
    if (!bouncer || slot >= bouncer->slots || bouncer->reserved_by[slot] != c) {
        message->one.code = RR_REGION_GONE;
        return;
    }
    if (!bouncer->rkeys[c->port->through]) {
        message->one.code = RR_BAD_REGION;
        rr_bounce_returned(&c->nic->base, due->owner, c, due->grant);
        return;
    }
    message->grant = due->grant;
    message->one.address = (uint64_t)(uintptr_t)bouncer->memory->base + slot * plane->slot_bytes;
    message->one.table_address = (uint64_t)(uintptr_t)bouncer->memory->base + bouncer->slots * plane->slot_bytes + slot * table_bytes(plane);
    message->one.rkey = bouncer->rkeys[c->port->through];
}

void verbs_send_answers(struct rr_connection *c)
{
    while (c->due_grant_count && c->state == OPEN) {
        struct message *message = verbs_next_message(c, MESSAGE_GRANT);
        if (!message) break;
        struct due_grant due = c->due_grants[c->due_grant_at];
        c->due_grant_at = (c->due_grant_at + 1) % RR_WINDOW;
        c->due_grant_count--;
        fill_grant(c, message, &due);
    }
    uint64_t ready = verbs_flush_late(c) ? c->due_flushed : c->due_pushed;
    while (c->due_sent < ready && c->state == OPEN) {
        struct message *message = verbs_next_message(c, MESSAGE_DONE);
        if (!message) break; /* one that completes makes room */
        while (c->due_sent < ready && message->count < PAIRS_MAX) message->pairs[message->count++] = c->due[c->due_sent++ % RR_WINDOW];
    }
    verbs_post_batch(c);
}

/* ---- the fence ---- */

/* May free it. */
void verbs_receiver_drained(struct rr_connection *c)
{
    if (!c->fencing) return;
    if (!c->fenced) {
        if (verbs_flush_late(c)) return;
        c->fenced = 1;
        rr_report_fence(&c->nic->base, c, c->id, c->received, c->acks, c->ack_count);
    }
    if (c->bounces_pending) return;
    verbs_unlink(c);
    verbs_destroy(c);
}

void verbs_fence(struct rr_nic *base, struct rr_connection *c)
{
    if (c->role != RECEIVER) return;
    if (!c->fencing) rr_count(base->rail, RR_RAIL_FENCES, 1);
    c->fencing = 1;
    if (c->state == OPEN)
        verbs_begin_drain(c);
    else if (c->state == DRAINED)
        verbs_receiver_drained(c);
}

/* One-sided writes cannot be refused: the sender is asked, or the connection fenced, before memory is withdrawn. */
void verbs_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result)
{
    (void)base, (void)client, (void)handle, (void)tag, (void)result;
}

/* Fenced connections of which nothing lies in bounce memory any more. */
static void free_fenced(struct verbs_nic *nic)
{
    for (struct rr_connection *c = nic->connections, *next; c; c = next) {
        next = c->next;
        if (c->role == RECEIVER && c->state == DRAINED) verbs_receiver_drained(c);
    }
}

int verbs_reclaim(struct rr_nic *base, struct rr_client *client)
{
    int work_count = rr_bounce_reclaim(base, client);
    if (work_count) free_fenced(verbs(base));
    return work_count;
}

/* Its regions were withdrawn before: no sender writes its slots any more. */
void verbs_drop_bounces(struct rr_nic *base, struct rr_client *client)
{
    if (!client->ports[base->rail->number].bouncer.shared) return;
    rr_bounce_drop(base, client);
    free_fenced(verbs(base));
}
#endif
