#include "bounce.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct rr_bouncer *rr_bouncer_of(struct rr_rail *rail, uint32_t number)
{
    struct rr_client *client = number < RR_MAX_CLIENTS ? rail->by_number[number] : NULL;
    if (!client) return NULL;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    return bouncer->shared ? bouncer : NULL;
}

struct rr_bouncer *rr_bouncer_granted(struct rr_rail *rail, uint32_t number, uint64_t grant)
{
    struct rr_bouncer *bouncer = rr_bouncer_of(rail, number);
    return bouncer && bouncer->serial == grant >> 32 ? bouncer : NULL;
}

static uint32_t held_by(const struct rr_bouncer *bouncer, const struct rr_connection *connection)
{
    uint32_t held = 0;
    for (uint32_t slot = 0; slot < bouncer->slots; slot++) held += bouncer->reserved_by[slot] == connection;
    return held;
}

/* In the order of asking, but one connection never holds more than twice what is free (the dynamic threshold of
 * feeder.c): a sender that has stopped leaves a slot for the next. */
static void grant_waiting(struct rr_nic *nic, struct rr_bouncer *bouncer)
{
    const struct rr_bounce_ops *ops = nic->ops->bounce;
    for (uint32_t i = 0; i < bouncer->wait_count;) {
        struct rr_bounce_wait wait = bouncer->waits[i];
        uint32_t free_slots = held_by(bouncer, NULL), slot = 0;
        if (!free_slots) return;
        if (!ops->takes_grants(wait.connection) || held_by(bouncer, wait.connection) >= 2 * free_slots) {
            i++;
            continue;
        }
        while (bouncer->reserved_by[slot]) slot++;
        bouncer->reserved_by[slot] = wait.connection;
        bouncer->in_use[slot] = RR_SLOT_UNUSED;
        bouncer->wait_count--;
        memmove(bouncer->waits + i, bouncer->waits + i + 1, (bouncer->wait_count - i) * sizeof wait);
        ops->grant(nic, wait.connection, wait.sequence, bouncer, slot);
    }
}

int rr_bounce_want(struct rr_nic *nic, uint32_t client, struct rr_connection *connection, uint64_t want, uint64_t bytes)
{
    struct rr_bouncer *bouncer = rr_bouncer_of(nic->rail, client);
    if (!bouncer || bytes > nic->rail->plane->slot_bytes) {
        nic->ops->bounce->refuse(nic, connection, want, bouncer ? RR_OUT_OF_BOUNDS : RR_REGION_GONE);
        return 0;
    }
    if (bouncer->wait_count == bouncer->wait_capacity) {
        /* Bounded by the connections there are times their window; grown once in a while, not for each frame. */
        uint32_t capacity = bouncer->wait_capacity ? 2 * bouncer->wait_capacity : RR_WINDOW;
        struct rr_bounce_wait *more = realloc(bouncer->waits, capacity * sizeof *more);
        if (!more) return -ENOMEM;
        bouncer->waits = more;
        bouncer->wait_capacity = capacity;
    }
    bouncer->waits[bouncer->wait_count++] = (struct rr_bounce_wait){connection, want};
    grant_waiting(nic, bouncer);
    return 0;
}

void rr_bounce_free_slot(struct rr_nic *nic, struct rr_bouncer *bouncer, uint32_t slot)
{
    bouncer->reserved_by[slot] = NULL;
    bouncer->in_use[slot] = RR_SLOT_UNUSED;
    grant_waiting(nic, bouncer);
}

void rr_bounce_returned(struct rr_nic *nic, uint32_t client, const struct rr_connection *connection, uint64_t grant)
{
    struct rr_bouncer *bouncer = rr_bouncer_granted(nic->rail, client, grant);
    uint32_t slot = rr_bounce_slot_of(grant);
    if (bouncer && slot < bouncer->slots && bouncer->reserved_by[slot] == connection && bouncer->in_use[slot] == RR_SLOT_UNUSED)
        rr_bounce_free_slot(nic, bouncer, slot);
}

int rr_bounce_begin(struct rr_rail *rail, struct rr_bouncer *bouncer, const struct rr_connection *connection, uint64_t grant, uint64_t bytes,
                    uint32_t run_count)
{
    uint32_t slot = rr_bounce_slot_of(grant);
    if (slot >= bouncer->slots || bouncer->reserved_by[slot] != connection || bouncer->in_use[slot] != RR_SLOT_UNUSED || bytes > rail->plane->slot_bytes ||
        run_count > rail->plane->table_entries)
        return -1;
    bouncer->in_use[slot] = RR_SLOT_FILLING;
    return 0;
}

void rr_bounce_publish(struct rr_rail *rail, const struct rr_bounced *arrived)
{
    struct rr_plane *plane = rail->plane;
    struct rr_client *client = rail->by_number[arrived->owner];
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    uint64_t at = bouncer->filled % bouncer->slots;
    struct rr_bounce_frame *frame = &bouncer->frames[at];
    struct rr_run *runs = bouncer->runs + at * plane->table_entries;
    for (uint32_t i = 0; i < arrived->run_count; i++) {
        const struct rr_wire_run *run = &arrived->runs[i];
        runs[i] = (struct rr_run){run->offset, run->length, plane->exports[run->handle % plane->max_exports].region};
    }
    frame->slot = arrived->slot;
    frame->run_count = arrived->run_count;
    frame->bytes = arrived->bytes;
    bouncer->pending[at] = (struct rr_bounce_pending){arrived->connection, arrived->sequence, arrived->tag, arrived->slot, arrived->window};
    bouncer->in_use[arrived->slot] = RR_SLOT_FILLED;
    bouncer->filled++;
    rr_fault_point(RR_FAULT_DAEMON_BOUNCE_FILLED);
    rr_store_release_u64(&bouncer->shared->filled, bouncer->filled); /* SYNC filled */
    rr_fault_point(RR_FAULT_DAEMON_BOUNCE_PUBLISHED);
    rr_count(rail, RR_RAIL_BOUNCED_BYTES, arrived->bytes);
    rr_count_wake(&client->control->bounce_wake, &client->control->bounce_sleeping);
}

int rr_bounce_reclaim(struct rr_nic *nic, struct rr_client *client)
{
    struct rr_rail *rail = nic->rail;
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
        nic->ops->bounce->settled(nic, &pending, result == RR_OK ? RR_OK : RR_REGION_GONE);
        rr_bounce_free_slot(nic, bouncer, pending.slot);
        work_count++;
    }
    return work_count;
}

void rr_bounce_drop(struct rr_nic *nic, struct rr_client *client)
{
    const struct rr_bounce_ops *ops = nic->ops->bounce;
    struct rr_bouncer *bouncer = &client->ports[nic->rail->number].bouncer;
    for (uint32_t i = 0; i < bouncer->wait_count; i++) ops->refuse(nic, bouncer->waits[i].connection, bouncer->waits[i].sequence, RR_REGION_GONE);
    bouncer->wait_count = 0;
    while (bouncer->reclaimed != bouncer->filled) ops->settled(nic, &bouncer->pending[bouncer->reclaimed++ % bouncer->slots], RR_REGION_GONE);
    bouncer->shared = NULL;
}

static void forget(struct rr_nic *nic, const struct rr_connection *connection)
{
    for (uint32_t i = 0; i < RR_MAX_CLIENTS; i++) {
        struct rr_bouncer *bouncer = rr_bouncer_of(nic->rail, i);
        if (!bouncer) continue;
        uint32_t kept = 0;
        for (uint32_t w = 0; w < bouncer->wait_count; w++)
            if (bouncer->waits[w].connection != connection) bouncer->waits[kept++] = bouncer->waits[w];
        bouncer->wait_count = kept;
        for (uint32_t slot = 0; slot < bouncer->slots; slot++) {
            if (bouncer->reserved_by[slot] != connection || bouncer->in_use[slot] == RR_SLOT_FILLED) continue;
            bouncer->reserved_by[slot] = NULL;
            bouncer->in_use[slot] = RR_SLOT_UNUSED;
        }
        grant_waiting(nic, bouncer);
    }
}

/* owner: of one of them. */
static uint32_t not_copied(struct rr_rail *rail, const struct rr_connection *connection, struct rr_ack *out, uint32_t *owner)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < RR_MAX_CLIENTS; i++) {
        const struct rr_bouncer *bouncer = rr_bouncer_of(rail, i);
        for (uint64_t at = bouncer ? bouncer->reclaimed : 0; bouncer && at != bouncer->filled; at++) {
            const struct rr_bounce_pending *pending = &bouncer->pending[at % bouncer->slots];
            if (pending->connection != connection || count == RR_WINDOW) continue;
            out[count++] = (struct rr_ack){pending->sequence, RR_UNSETTLED};
            *owner = i;
        }
    }
    return count;
}

/* A correct sender waits for no more than RR_WINDOW frames, and of those that were answered for the latest. */
void rr_report_fence(struct rr_nic *nic, const struct rr_connection *connection, uint64_t id, uint64_t received, const struct rr_ack *acks,
                     uint64_t ack_count)
{
    struct rr_plane *plane = nic->rail->plane;
    struct rr_fence_record *record = calloc(1, sizeof *record);
    if (!record) abort();
    record->connection = id;
    uint32_t owner = 0, left = connection ? not_copied(nic->rail, connection, record->acks, &owner) : 0;
    record->ack_count = left;
    for (uint64_t i = 1; i <= ack_count && record->ack_count < RR_WINDOW; i++) record->acks[record->ack_count++] = acks[(ack_count - i) % RR_WINDOW];
    pthread_mutex_lock(&plane->event_lock);
    record->next = plane->fences;
    plane->fences = record;
    pthread_mutex_unlock(&plane->event_lock);
    rr_event_push(plane, RR_EVENT_RECEIVER_FENCED, nic->rail->number, (int64_t)id, (int64_t)received, left, owner, 0);
    if (connection) forget(nic, connection);
}

void rr_bounce_settled_late(struct rr_nic *nic, uint64_t id, uint64_t sequence, uint32_t code)
{
    rr_event_push(nic->rail->plane, RR_EVENT_FRAME_SETTLED, nic->rail->number, (int64_t)id, (int64_t)sequence, code, 0, 0);
}

static uint32_t check_run(const struct rr_plane *plane, uint32_t session, uint32_t owner, int private, const struct rr_wire_run *run)
{
    const struct rr_export *export = &plane->exports[run->handle % plane->max_exports];
    if (!rr_load_acquire_u32(&export->valid) || export->handle != run->handle || export->session != session || export->client != owner)
        return RR_REGION_GONE;
    if (run->length == 0 || run->offset > export->bytes || run->length > export->bytes - run->offset) return RR_OUT_OF_BOUNDS;
    if (private != (export->base == NULL) || rr_is_made_up(export->mapping)) return RR_BAD_REGION;
    if (!private && rr_load_relaxed_u32(&export->mapping->broken)) return RR_REGION_GONE;
    return RR_OK;
}

uint32_t rr_check_runs(struct rr_rail *rail, uint32_t session, uint32_t owner, uint64_t tag, uint64_t bytes, const struct rr_wire_run *runs,
                       uint32_t run_count, struct iovec *iov, uint32_t *iov_count)
{
    struct rr_plane *plane = rail->plane;
    uint64_t total = 0;
    uint32_t result = RR_OK, count = 0;
    for (uint32_t i = 0; i < run_count; i++) {
        const struct rr_wire_run *run = &runs[i];
        total += run->length;
        if (!result) result = check_run(plane, session, owner, iov == NULL, run);
        if (result || !iov) continue;
        uint8_t *base = plane->exports[run->handle % plane->max_exports].base + run->offset;
        if (count && (uint8_t *)iov[count - 1].iov_base + iov[count - 1].iov_len == base)
            iov[count - 1].iov_len += run->length;
        else
            iov[count++] = (struct iovec){base, run->length};
    }
    if (iov) *iov_count = count;
    if (total != bytes) return RR_PROTOCOL;
    const struct rr_client *client = rail->by_number[owner];
    if (!client) return RR_REGION_GONE;
    if (!result && rr_has_tombstone(client, tag)) result = RR_ABORTED;
    return result;
}
