/* B, the collector: turns rung doorbells and ring entries into checked, private work on the rail's paths. Runs on the
 * rail's thread. Each word of a block table is loaded once; only the copy is checked and used. */
#include <stdlib.h>

#include "nic.h"

#define LANE_BATCH 4u
#define RING_BATCH 8u
#define QUICK_BLOCKS 32u /* checked in less than a microsecond */

void rr_source_init(struct rr_source *source, struct rr_client *client, uint32_t works, uint32_t table_entries, uint32_t flows, int is_lane,
                    int one_sided)
{
    source->client = client;
    source->is_lane = is_lane;
    source->works = calloc(works, sizeof *source->works);
    source->flows = calloc(flows, sizeof *source->flows);
    struct iovec *pieces = malloc((size_t)works * table_entries * sizeof *pieces);
    struct rr_wire_run *runs = malloc((size_t)works * table_entries * sizeof *runs);
    uint32_t *indices = one_sided ? malloc((size_t)works * table_entries * 2 * sizeof *indices) : NULL;
    if (!source->works || !source->flows || !pieces || !runs || (one_sided && !indices)) {
        free(source->works);
        free(source->flows);
        free(pieces);
        free(runs);
        free(indices);
        source->works = NULL;
        return;
    }
    for (uint32_t i = 0; i < flows; i++) source->flows[i].source = source;
    for (uint32_t i = 0; i < works; i++) {
        struct rr_work *work = &source->works[i];
        work->source = source;
        work->pieces = pieces + (size_t)i * table_entries;
        work->runs = runs + (size_t)i * table_entries;
        if (one_sided) {
            work->run_remotes = indices + (size_t)i * 2 * table_entries;
            work->piece_regions = work->run_remotes + table_entries;
        }
        work->slot = i;
        if (!is_lane) {
            work->next = source->free;
            source->free = work;
        }
    }
    source->work_count = works;
}

void rr_source_free(struct rr_source *source)
{
    if (!source->works) return;
    free(source->works[0].pieces);
    free(source->works[0].runs);
    free(source->works[0].run_remotes);
    free(source->works);
    free(source->flows);
    source->works = NULL;
    source->free = NULL;
}

struct builder {
    struct rr_plane *plane;
    struct rr_client *client;
    struct rr_work *work;
    uint8_t *slot; /* NULL: blocks name source regions */
    int takes_made_up, one_sided;
};

struct remote {
    uint64_t bytes;
    uint32_t peer, rail, handle, owner, window_bytes, window_runs;
};

/* The fields are read between two looks at `valid`: the index may be given to a region of another peer meanwhile, and half of
 * one and half of the other could name a region that its client has never opened. 0: there is none. */
static int look_up(const struct rr_remote *at, struct remote *found)
{
    uint32_t version = rr_load_acquire_u32(&at->valid);
    found->bytes = rr_load_relaxed_u64(&at->bytes);
    found->peer = rr_load_relaxed_u32(&at->peer);
    found->rail = rr_load_relaxed_u32(&at->rail);
    found->handle = rr_load_relaxed_u32(&at->handle);
    found->owner = rr_load_relaxed_u32(&at->owner);
    found->window_bytes = rr_load_relaxed_u32(&at->window_bytes);
    found->window_runs = rr_load_relaxed_u32(&at->window_runs);
    rr_acquire_fence();
    return version && rr_load_relaxed_u32(&at->valid) == version;
}

/* Adds one block to the work: one more piece and run, or a longer last one where it continues both. */
static uint32_t add_block(struct builder *b, const struct rr_block *block)
{
    struct rr_plane *plane = b->plane;
    struct rr_work *work = b->work;
    uint64_t length = block->length;
    if (length == 0) return RR_OUT_OF_BOUNDS;
    if (block->remote_region >= plane->remotes_per_client) return RR_BAD_REGION;
    struct remote remote;
    if (!look_up(&b->client->remotes[block->remote_region], &remote)) return RR_REGION_GONE;
    if (remote.peer != work->peer || remote.rail != work->remote_rail) return RR_BAD_REGION;
    if (block->destination > remote.bytes || length > remote.bytes - block->destination) return RR_OUT_OF_BOUNDS;
    uint8_t *source;
    if (b->slot) {
        if (block->source > plane->slot_bytes || length > plane->slot_bytes - block->source) return RR_OUT_OF_BOUNDS;
        source = b->slot + block->source;
    } else {
        if (block->source_region >= plane->regions_per_client) return RR_BAD_REGION;
        struct rr_region *region = &b->client->regions[block->source_region];
        if (!rr_load_acquire_u32(&region->valid) || !region->base) return RR_BAD_REGION;
        if (rr_is_made_up(region->mapping) && !b->takes_made_up) return RR_BAD_REGION;
        if (block->source > region->bytes || length > region->bytes - block->source) return RR_OUT_OF_BOUNDS;
        source = region->base + block->source;
    }
    if (work->run_count == 0) {
        work->owner = remote.owner;
        work->window_bytes = remote.window_bytes;
        work->window_runs = remote.window_runs;
    } else if (work->owner != remote.owner || work->window_bytes != remote.window_bytes) {
        return RR_BAD_REGION;
    }
    struct iovec *piece = &work->pieces[work->piece_count];
    if (work->piece_count && (uint8_t *)piece[-1].iov_base + piece[-1].iov_len == source &&
        (!b->one_sided || b->slot || work->piece_regions[work->piece_count - 1] == block->source_region)) {
        piece[-1].iov_len += length;
    } else {
        piece->iov_base = source;
        piece->iov_len = length;
        if (b->one_sided) work->piece_regions[work->piece_count] = block->source_region;
        work->piece_count++;
    }
    struct rr_wire_run *run = &work->runs[work->run_count];
    if (work->run_count && run[-1].handle == remote.handle && run[-1].offset + run[-1].length == block->destination &&
        run[-1].length + length <= UINT32_MAX) {
        run[-1].length += (uint32_t)length;
    } else {
        run->offset = block->destination;
        run->length = (uint32_t)length;
        run->handle = remote.handle;
        if (b->one_sided) work->run_remotes[work->run_count] = block->remote_region;
        work->run_count++;
    }
    work->bytes += length;
    return RR_OK;
}

/* 0, or -1 for a slice that no correct client publishes. */
static int take_slice(struct rr_rail *rail, struct rr_client *client, struct rr_work *work, const struct rr_slice *slice,
                      const struct rr_block *table, const struct rr_slice_times *times, uint8_t *slot)
{
    struct rr_plane *plane = rail->plane;
    uint32_t count = slice->flags & RR_SLICE_VOID ? 0 : slice->block_count;
    if (slice->transfer >= client->transfer_count || count > plane->table_entries || slice->peer >= plane->max_peers ||
        slice->remote_rail >= RR_MAX_RAILS)
        return -1;
    work->transfer = slice->transfer;
    work->generation = slice->generation;
    work->peer = slice->peer;
    work->remote_rail = slice->remote_rail;
    work->piece_count = work->run_count = 0;
    work->block_count = count;
    work->bytes = 0;
    work->grant.grant = 0;
    work->sequence = 0;
    work->connection = NULL;
    work->began_ns = rr_load_relaxed_u64(&times->began_ns);
    work->filled_ns = rr_load_relaxed_u64(&times->filled_ns);
    work->taken_ns = rr_rail_now(rail);
    work->posted_ns = 0;
    uint32_t result = RR_OK;
    struct builder builder = {plane, client, work, slot, rail->nic->ops->takes_made_up, rail->nic->ops->one_sided};
    if (slice->flags & RR_SLICE_INLINE && !slot) {
        struct rr_block block = {slice->inline_source,        slice->inline_destination,   slice->inline_length,
                                 slice->inline_source_region, slice->inline_remote_region, 0};
        work->block_count = 1;
        result = add_block(&builder, &block);
    } else {
        for (uint32_t i = 0; i < count && result == RR_OK; i++) {
            struct rr_block block;
            rr_copy_words(&block, table + i, sizeof block);
            result = add_block(&builder, &block);
        }
    }
    if (count > QUICK_BLOCKS) rr_rail_time_passes(rail);
    /* So many direct slices, of so many bytes each, are all that a client can have under way beside its slots. */
    int too_large_to_be_direct = !slot && work->bytes > plane->direct_slice_bytes;
    int overfills = work->window_bytes && (work->bytes > work->window_bytes || work->run_count > work->window_runs);
    if (work->bytes > RR_WIRE_BYTES_MAX || too_large_to_be_direct || overfills)
        result = RR_OUT_OF_BOUNDS;
    if (slice->flags & RR_SLICE_LOCAL && !slot) {
        if (rr_local_take(rail, work, slice, &result)) return -1;
    } else if (rr_transfer_open(client, slice, work->run_count ? work->runs[0].handle : RR_NONE, work->run_count ? work->owner : RR_NONE)) {
        return -1;
    }
    work->tag = rr_load_relaxed_u64(&client->contexts[slice->transfer].tag);
    if (slice->flags & RR_SLICE_FINAL && rr_transfer_total(client, slice)) return -1;
    work->source->in_flight++;
    rr_fault_point(RR_FAULT_DAEMON_SLICE_OPENED);
    if (result == RR_OK) result = rr_transfer_stopped(client, slice->transfer, slice->generation);
    if (result != RR_OK || work->run_count == 0) {
        rr_work_done(rail, work, result);
        return 0;
    }
    work->class_ = slice->flags & RR_SLICE_EXPRESS && work->bytes <= RR_QUANTUM_BYTES;
    rr_count(rail, RR_RAIL_BLOCKS, work->block_count);
    rr_count(rail, RR_RAIL_RUNS, work->run_count);
    rr_path_queue(rail, work, 0);
    return 0;
}

static int collect_lane(struct rr_rail *rail, struct rr_client *client, struct rr_port *port)
{
    struct rr_plane *plane = rail->plane;
    int work_count = 0;
    while (work_count < (int)LANE_BATCH) {
        if (port->lane.taken == port->lane.doorbell_seen) rr_rail_time_passes(rail); /* rung after the last look at the clock */
        int32_t slot = rr_lane_take(&port->lane);
        if (slot == -1) break;
        if (slot < 0) {
            rr_violation(rail, client, RR_PROTOCOL, port->lane.completed, rr_load_relaxed_u64(&port->lane.lane->doorbell),
                         rr_load_relaxed_u64(&port->lane.lane->head));
            return work_count;
        }
        rr_fault_point(RR_FAULT_DAEMON_LANE_TAKEN);
        size_t at = (size_t)rail->number * plane->slots + (uint32_t)slot;
        struct rr_slice slice;
        rr_copy_words(&slice, &client->slot_heads[at], sizeof slice);
        struct rr_work *work = &port->lane_source.works[slot];
        if (slice.flags & RR_SLICE_VOID) rr_counter_add(&port->state->voids, 1);
        if (take_slice(rail, client, work, &slice, client->slot_tables + at * plane->table_entries, &client->slot_times[at],
                       port->lane_memory->base + (size_t)slot * plane->slot_bytes)) {
            rr_violation(rail, client, RR_PROTOCOL, slice.transfer, slice.generation, slice.total_slices);
            return work_count;
        }
        rr_counter_add(&port->state->bytes, work->bytes);
        rr_counter_add(&port->state->blocks, work->block_count);
        rr_counter_add(&port->state->runs, work->run_count);
        work_count++;
    }
    if (work_count) {
        rr_store_relaxed_u64(&port->state->head, port->lane.head_seen);
        rr_store_relaxed_u64(&port->state->doorbell, port->lane.doorbell_seen);
        rr_store_relaxed_u64(&port->state->stalls, rr_load_relaxed_u64(&port->lane.lane->stalls));
        rr_store_relaxed_u64(&port->state->stall_ns, rr_load_relaxed_u64(&port->lane.lane->stall_ns));
    }
    return work_count;
}

static int collect_ring(struct rr_rail *rail, struct rr_client *client, struct rr_port *port)
{
    struct rr_plane *plane = rail->plane;
    struct rr_slice slices[RING_BATCH];
    int64_t count = rr_ring_peek(&port->ring, slices, RING_BATCH);
    if (count < 0) {
        rr_violation(rail, client, RR_PROTOCOL, port->ring.consumed, rr_load_relaxed_u64(&port->ring.ring->produced), port->ring.mask + 1);
        return 0;
    }
    uint32_t taken = 0;
    if (count) rr_rail_time_passes(rail); /* published after the last look at the clock */
    while (taken < count) {
        const struct rr_slice *slice = &slices[taken];
        uint32_t tables = client->header->ring_tables;
        struct rr_work *work = port->ring_source.free;
        if (!work) { /* more under way than the ring has slices */
            rr_violation(rail, client, RR_PROTOCOL, port->ring_completed, port->ring.consumed + taken, port->ring.mask + 1);
            return (int)taken;
        }
        port->ring_source.free = work->next;
        work->slot = slice->ticket;
        uint32_t number = slice->table < tables ? slice->table : 0;
        const struct rr_block *table = client->ring_tables + ((size_t)rail->number * tables + number) * plane->table_entries;
        size_t row = (size_t)rail->number * (port->ring.mask + 1) + ((port->ring.consumed + taken) & port->ring.mask);
        if (slice->table != number || take_slice(rail, client, work, slice, table, &client->ring_times[row], NULL)) {
            rr_violation(rail, client, RR_PROTOCOL, slice->transfer, slice->generation, slice->table);
            return (int)taken;
        }
        if (slice->flags & RR_SLICE_LOCAL) {
            rr_counter_add(&port->state->local_bytes, work->bytes);
        } else {
            rr_counter_add(&port->state->direct_bytes, work->bytes);
            rr_counter_add(&port->state->direct_slices, 1);
        }
        taken++;
    }
    if (taken) {
        rr_fault_point(RR_FAULT_DAEMON_RING_TAKEN);
        rr_ring_release(&port->ring, taken);
        rr_store_relaxed_u64(&port->state->produced, port->ring.produced_seen);
        rr_store_relaxed_u64(&port->state->consumed, port->ring.consumed);
        rr_wake_feeder(client);
    }
    return (int)taken;
}

int rr_collect(struct rr_rail *rail)
{
    int work_count = 0;
    for (uint32_t i = 0; i < rail->client_count; i++) {
        struct rr_client *client = rail->clients[i];
        struct rr_port *port = &client->ports[rail->number];
        if (rr_load_relaxed_u32(&client->faulted)) continue;
        work_count += collect_ring(rail, client, port);
        if (port->lane_memory) work_count += collect_lane(rail, client, port);
        if (rr_load_relaxed_u32(&client->segment->broken)) rr_violation(rail, client, RR_SEGMENT_TRUNCATED, 0, 0, 0);
    }
    return work_count;
}

int rr_collect_filling(struct rr_rail *rail)
{
    for (uint32_t i = 0; i < rail->client_count; i++) {
        struct rr_client *client = rail->clients[i];
        const struct rr_port *port = &client->ports[rail->number];
        if (!port->lane_memory || rr_load_relaxed_u32(&client->faulted)) continue;
        if (rr_load_relaxed_u64(&port->lane.lane->head) != rr_load_relaxed_u64(&port->lane.lane->doorbell)) return 1;
    }
    return 0;
}

int rr_collect_pending(struct rr_rail *rail)
{
    for (uint32_t i = 0; i < rail->client_count; i++) {
        struct rr_client *client = rail->clients[i];
        struct rr_port *port = &client->ports[rail->number];
        if (rr_load_relaxed_u32(&client->faulted)) continue;
        if (rr_load_relaxed_u64(&port->ring.ring->produced) != port->ring.consumed) return 1;
        if (port->lane_memory && rr_load_relaxed_u64(&port->lane.lane->doorbell) != port->lane.taken) return 1;
        if (port->bouncer.shared && port->bouncer.filled != port->bouncer.reclaimed &&
            rr_load_relaxed_u64(&port->bouncer.shared->emptied) != port->bouncer.reclaimed)
            return 1;
    }
    return 0;
}
