/* The verbs NIC, receiving end: counts frames, answers them, and the fence. Runs on the rail's thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdlib.h>
#include <string.h>

void verbs_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int endpoint)
{
    struct rr_rail *rail = base->rail;
    struct rr_connection *c = verbs_adopt(verbs(base), (uint64_t)endpoint);
    if (!c) {
        rr_event_push(rail->plane, RR_EVENT_RECEIVER_LOST, rail->number, (int64_t)id, ENOENT, session, 0, 0);
        return;
    }
    c->id = id;
    c->role = RECEIVER;
    c->session = session;
}

static void answer(struct rr_connection *c, uint64_t sequence, uint32_t code)
{
    c->acks[c->ack_count++ % RR_WINDOW] = (struct rr_ack){sequence, code};
    if (c->due_count < RR_WINDOW) c->due[(c->due_at + c->due_count++) % RR_WINDOW] = (struct rr_ack){sequence, code};
}

/* 0, or -1: a frame too many, or another than was to come. */
int verbs_on_frame(struct rr_connection *c, uint32_t immediate)
{
    struct rr_rail *rail = c->nic->base.rail;
    uint64_t sequence = c->received + 1;
    if ((immediate & IMM_SEQUENCE) != (sequence & IMM_SEQUENCE) || c->due_count == RR_WINDOW) return -1;
    c->received = sequence;
    rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
    rr_count(rail, RR_RAIL_BYTES_RECEIVED, (immediate >> 2) + 1ull);
    answer(c, sequence, RR_OK);
    return 0;
}

int verbs_on_request(struct rr_connection *c, const struct message *message)
{
    (void)c;
    (void)message;
    return -1;
}

void verbs_send_answers(struct rr_connection *c)
{
    while (c->due_count && c->state == OPEN) {
        struct message *message = verbs_next_message(c, MESSAGE_DONE);
        if (!message) break; /* one that completes makes room */
        while (c->due_count && message->count < PAIRS_MAX) {
            message->pairs[message->count++] = c->due[c->due_at];
            c->due_at = (c->due_at + 1) % RR_WINDOW;
            c->due_count--;
        }
    }
    verbs_flush(c);
}

/* ---- the fence ---- */

static void fenced(struct rr_connection *c)
{
    struct rr_rail *rail = c->nic->base.rail;
    struct rr_plane *plane = rail->plane;
    struct rr_fence_record *record = calloc(1, sizeof *record);
    if (!record) abort();
    record->connection = c->id;
    record->ack_count = c->ack_count < RR_WINDOW ? (uint32_t)c->ack_count : RR_WINDOW;
    memcpy(record->acks, c->acks, record->ack_count * sizeof *record->acks);
    pthread_mutex_lock(&plane->event_lock);
    record->next = plane->fences;
    plane->fences = record;
    pthread_mutex_unlock(&plane->event_lock);
    rr_event_push(plane, RR_EVENT_RECEIVER_FENCED, rail->number, (int64_t)c->id, (int64_t)c->received, 0, 0, 0);
    verbs_unlink(c);
    verbs_destroy(c);
}

void verbs_receiver_drained(struct rr_connection *c)
{
    if (c->fencing && !c->bounces_pending) fenced(c);
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

int verbs_reclaim(struct rr_nic *base, struct rr_client *client)
{
    (void)base;
    (void)client;
    return 0;
}

void verbs_drop_bounces(struct rr_nic *base, struct rr_client *client) { client->ports[base->rail->number].bouncer.shared = NULL; }
#endif
