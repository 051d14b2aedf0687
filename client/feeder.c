/* A, the feeder: one thread a client. Visits the parts of all published submissions, one slice each a round, and never
 * waits for one lane while another has credit. Small submissions may be fed by their caller's thread (rc_publish). */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>

#include "pieces.h"

#define RAMP_START_BYTES (1ull << 20)
#define HEARTBEAT_NS 1000000000ull
#define ASK_GPU_NS 100000000ull

void rc_wake_feeder(struct rc_core *core) { rr_count_wake(&core->control->feeder_wake, &core->control->feeder_sleeping); }

void rc_wake_rail(struct rc_core *core, uint32_t rail)
{
    if (rr_wake_needed(&core->rails[rail].sleeping)) rr_kick(core->kick_fds[rail]);
}

/* Bucket 0 of a ring is nobody's: peers and owners are numbered from 0. */
static uint32_t destination_id(const struct rc_part *part) { return part->submission->peer * 61 + part->owner + 1; }

/* ---- slices ---- */

void rc_describe(struct rr_slice *slice, struct rc_part *part, uint32_t block_count, uint64_t bytes)
{
    struct rc_submission *s = part->submission;
    memset(slice, 0, sizeof *slice);
    s->slices++;
    slice->transfer = s->index;
    slice->generation = s->generation;
    slice->peer = s->peer;
    slice->remote_rail = (uint16_t)part->remote_rail;
    slice->block_count = block_count;
    slice->bytes = (uint32_t)bytes;
    if (s->express) slice->flags |= RR_SLICE_EXPRESS;
    if (part->bytes_left == 0) {
        part->exhausted = 1;
        if (--s->parts_left == 0) {
            slice->flags |= RR_SLICE_FINAL;
            slice->total_slices = s->slices + s->note;
        }
    }
}

static void stall(struct rc_core *core, struct rc_part *part, struct rr_lane *lane)
{
    if (part->stalled) return;
    part->stalled = 1;
    part->stalled_since_ns = rr_now_ns();
    rr_fetch_add_u64(&core->counters.stalls, 1);
    if (lane) rr_counter_add(&lane->stalls, 1);
}

static void unstall(struct rc_core *core, struct rc_part *part, struct rr_lane *lane)
{
    if (!part->stalled) return;
    part->stalled = 0;
    uint64_t waited = rr_now_ns() - part->stalled_since_ns;
    rr_fetch_add_u64(&core->counters.stall_ns, waited);
    if (lane) rr_counter_add(&lane->stall_ns, waited);
}

/* Copies blocks into the slot and writes its table; returns how many entries. */
static uint32_t fill_slot(struct rc_part *part, uint8_t *slot, struct rr_block *table, uint64_t limit, uint64_t *filled)
{
    uint64_t at = 0, bytes = 0;
    uint32_t count = 0;
    struct rc_piece piece;
    while (at < limit && rc_peek_piece(part, &piece)) {
        uint64_t take = piece.length < limit - at ? piece.length : limit - at;
        struct rr_block *last = count ? &table[count - 1] : NULL;
        int joins = last && last->remote_region == piece.remote && last->destination + last->length == piece.destination &&
                    last->source + last->length == at;
        if (!joins && count == part->entries_max) break;
        memcpy(slot + at, (const void *)(uintptr_t)piece.source, take);
        rr_fault_point(RR_FAULT_CLIENT_LANE_COPYING);
        if (joins)
            last->length += (uint32_t)take;
        else
            table[count++] = (struct rr_block){at, piece.destination, (uint32_t)take, 0, piece.remote, 0};
        bytes += take;
        at = (at + take + RR_PACK_BYTES - 1) & ~(uint64_t)(RR_PACK_BYTES - 1);
        rc_take_piece(part, take, piece.length);
    }
    *filled = bytes;
    return count;
}

/* Dynamic threshold (Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998) with alpha 2: one destination
 * holds at most twice what is free, so that one which has stopped never takes the last slot from the others. */
static int below_threshold(uint64_t held, uint64_t credit) { return held < 2 * credit; }

static int lane_allows(struct rc_lane *lane, const struct rc_part *part, int small)
{
    uint32_t credit = rr_lane_credit(&lane->producer), slots = lane->producer.slots;
    if (credit == 0) return 0;
    if (!small && slots > 3 * RC_EXPRESS_SLOTS && credit <= RC_EXPRESS_SLOTS) return 0;
    if (small) return 1;
    uint32_t held = 0, destination = destination_id(part);
    for (uint32_t i = 0; i < slots; i++) held += !lane->producer.is_free[i] && lane->destination_of[i] == destination;
    if (lane->contended && held >= (slots + RC_ONE_PEER_SHARE - 1) / RC_ONE_PEER_SHARE) return 0;
    return below_threshold(held, credit);
}

static int feed_lane(struct rc_core *core, struct rc_part *part, int small, int wait_for_lock)
{
    struct rc_lane *lane = &core->lanes[part->local_rail];
    if (wait_for_lock)
        pthread_mutex_lock(&lane->lock);
    else if (pthread_mutex_trylock(&lane->lock))
        return 0;
    /* A caller's thread has its own CUDA context. After a failed copy the next doorbell would announce what it left. */
    int leased = lane->copier ? wait_for_lock && !rr_load_acquire_u32(&core->gpu_failure) : rc_lane_is_leased(lane);
    if (!leased || !lane_allows(lane, part, small)) {
        if (leased) stall(core, part, lane->producer.lane);
        pthread_mutex_unlock(&lane->lock);
        return 0;
    }
    unstall(core, part, lane->producer.lane);
    int idle = lane->producer.free_count == lane->producer.slots;
    lane->ramp_bytes = idle ? RAMP_START_BYTES : 2 * lane->ramp_bytes;
    if (lane->ramp_bytes > core->facts.slot_bytes) lane->ramp_bytes = core->facts.slot_bytes;
    uint64_t limit = lane->ramp_bytes;
    uint32_t slot = rr_lane_reserve(&lane->producer);
    lane->destination_of[slot] = destination_id(part);
    rr_fault_point(RR_FAULT_CLIENT_LANE_RESERVED);
    if (part->window_bytes && limit > part->window_bytes) limit = part->window_bytes;
    if (lane->copier) {
        rc_fill_by_gpu(core, part, slot, limit);
        pthread_mutex_unlock(&lane->lock);
        return 1;
    }
    lane->filling++;
    pthread_mutex_unlock(&lane->lock);

    uint64_t began_ns = rr_now_ns();
    size_t at = (size_t)part->local_rail * core->facts.slots + slot;
    uint64_t bytes;
    uint32_t count = fill_slot(part, lane->memory + (size_t)slot * core->facts.slot_bytes,
                               core->slot_tables + at * core->facts.table_entries, limit, &bytes);
    rc_describe(&core->slot_heads[at], part, count, bytes);
    rc_tell_times(&core->slot_times[at], began_ns);
    rr_fetch_add_u64(&core->counters.slots, 1);
    rr_fetch_add_u64(&core->counters.copied_bytes, bytes);

    rr_fault_point(RR_FAULT_CLIENT_LANE_FILLED);
    pthread_mutex_lock(&lane->lock);
    rr_lane_announce(&lane->producer, slot);
    rr_fault_point(RR_FAULT_CLIENT_LANE_ANNOUNCED);
    rr_lane_ring_doorbell(&lane->producer);
    lane->filling--;
    pthread_mutex_unlock(&lane->lock);
    rr_fault_point(RR_FAULT_CLIENT_LANE_RUNG);
    rc_wake_rail(core, part->local_rail);
    return 1;
}

/* Slices that may be published now. */
static uint64_t ring_credit(struct rc_ring *ring)
{
    uint64_t capacity = ring->producer.mask + 1, produced = ring->producer.produced;
    uint64_t completed = rr_load_acquire_u64(&ring->producer.ring->completed); /* SYNC ended */
    if (completed - ring->completed_seen > produced - ring->completed_seen) completed = ring->completed_seen;
    for (; ring->completed_seen != completed; ring->completed_seen++) {
        uint32_t ticket = rr_load_relaxed_u32(&ring->producer.ring->ended[ring->completed_seen % RR_MAX_RING_SLICES]);
        if (ticket >= capacity || ring->destination_of[ticket] == RC_DESTINATIONS) continue;
        ring->held[ring->destination_of[ticket]]--;
        ring->destination_of[ticket] = RC_DESTINATIONS;
        ring->tickets[ring->ticket_count++] = (uint16_t)ticket;
    }
    return rr_ring_free(&ring->producer, 1) ? ring->ticket_count : 0;
}

/* Holding the ring's lock and with credit. */
static void push(struct rc_ring *ring, struct rr_slice *slice, uint32_t bucket, uint64_t began_ns)
{
    rc_tell_times(&ring->times[ring->producer.produced & ring->producer.mask], began_ns);
    slice->ticket = ring->tickets[--ring->ticket_count];
    ring->destination_of[slice->ticket] = (uint16_t)bucket;
    ring->held[bucket]++;
    rr_ring_push(&ring->producer, slice, 1);
}

static int ring_ready(struct rc_core *core, struct rc_ring *ring, uint32_t bucket)
{
    uint64_t credit = ring_credit(ring);
    if (!credit || !below_threshold(ring->held[bucket], credit)) return 0;
    uint64_t position = ring->table_position[ring->next_table];
    if (position && ring->producer.consumed_seen < position) {
        rr_ring_free(&ring->producer, core->facts.ring_slices + 1ull);
        if (ring->producer.consumed_seen < position) return 0;
    }
    return 1;
}

static int feed_ring(struct rc_core *core, struct rc_part *part, int wait_for_lock)
{
    struct rc_ring *ring = &core->rings[part->local_rail];
    if (wait_for_lock)
        pthread_mutex_lock(&ring->lock);
    else if (pthread_mutex_trylock(&ring->lock))
        return 0;
    uint32_t bucket = destination_id(part) % RC_DESTINATIONS;
    if (!ring_ready(core, ring, bucket)) {
        stall(core, part, NULL);
        pthread_mutex_unlock(&ring->lock);
        return 0;
    }
    unstall(core, part, NULL);
    uint64_t began_ns = rr_now_ns();
    int idle = ring->ticket_count == core->facts.ring_slices;
    ring->ramp_bytes = idle ? RAMP_START_BYTES : 2 * ring->ramp_bytes;
    if (ring->ramp_bytes > core->direct_slice_bytes) ring->ramp_bytes = core->direct_slice_bytes;
    uint64_t limit = ring->ramp_bytes, bytes = 0;
    if (part->window_bytes && limit > part->window_bytes) limit = part->window_bytes;
    struct rr_block *table = ring->tables + (size_t)ring->next_table * core->facts.table_entries;
    uint32_t count = 0;
    struct rc_piece piece;
    while (bytes < limit && rc_peek_piece(part, &piece)) {
        uint64_t take = piece.length < limit - bytes ? piece.length : limit - bytes;
        uint64_t source = piece.source - core->region_bases[piece.region];
        struct rr_block *last = count ? &table[count - 1] : NULL;
        if (last && last->remote_region == piece.remote && last->source_region == piece.region &&
            last->destination + last->length == piece.destination && last->source + last->length == source) {
            last->length += (uint32_t)take;
        } else {
            if (count == part->entries_max) break;
            table[count++] = (struct rr_block){source, piece.destination, (uint32_t)take, piece.region, piece.remote, 0};
        }
        bytes += take;
        rc_take_piece(part, take, piece.length);
    }
    struct rr_slice slice;
    rc_describe(&slice, part, count, bytes);
    if (count == 1) {
        slice.flags |= RR_SLICE_INLINE;
        slice.inline_source = table[0].source;
        slice.inline_destination = table[0].destination;
        slice.inline_length = table[0].length;
        slice.inline_source_region = table[0].source_region;
        slice.inline_remote_region = table[0].remote_region;
    } else {
        slice.table = ring->next_table;
        ring->table_position[ring->next_table] = ring->producer.produced + 1;
        ring->next_table = (ring->next_table + 1) % core->facts.ring_tables;
    }
    rr_fetch_add_u64(&core->counters.direct_slices, 1);
    rr_fault_point(RR_FAULT_CLIENT_RING_DESCRIBED);
    push(ring, &slice, bucket, began_ns);
    pthread_mutex_unlock(&ring->lock);
    rr_fault_point(RR_FAULT_CLIENT_RING_PUBLISHED);
    rc_wake_rail(core, part->local_rail);
    return 1;
}

int rc_feed(struct rc_core *core, struct rc_part *part, int small, int wait_for_lock)
{
    if (part->local) return rc_feed_local(core, part);
    return part->direct ? feed_ring(core, part, wait_for_lock) : feed_lane(core, part, small, wait_for_lock);
}

uint64_t rc_push_void(struct rc_core *core, struct rr_slice slice)
{
    struct rc_ring *ring = &core->rings[core->own_rail];
    uint64_t position = 0;
    pthread_mutex_lock(&ring->lock);
    if (ring_credit(ring)) {
        push(ring, &slice, 0, rr_now_ns());
        position = ring->producer.produced;
    }
    pthread_mutex_unlock(&ring->lock);
    if (position) rc_wake_rail(core, core->own_rail);
    return position;
}

/* Tells the daemon that no more slices come: a void, final one. 0 if the ring is full. */
static int publish_end(struct rc_core *core, struct rc_submission *s)
{
    struct rr_slice slice = {.transfer = s->index,
                             .generation = s->generation,
                             .peer = s->peer,
                             .flags = RR_SLICE_FINAL | RR_SLICE_VOID,
                             .total_slices = s->slices + 1 + s->note};
    if (!rc_push_void(core, slice)) return 0;
    s->slices++;
    return 1;
}

/* ---- the round ---- */

struct feeder {
    struct rc_core *core;
    struct rc_part *first, *last; /* private; parts arrive through core->first */
    struct rc_submission *exclusive; /* serial and scheduled routes: the one that is being sent */
    uint64_t next_look_ns, asked_gpu_ns;
};

static void take_inbox(struct feeder *f)
{
    struct rc_core *core = f->core;
    pthread_mutex_lock(&core->queue);
    if (core->first) {
        if (f->last)
            f->last->next = core->first;
        else
            f->first = core->first;
        f->last = core->last;
        core->first = core->last = NULL;
    }
    if (core->async_armed) {
        for (struct rc_submission *s = core->live, *next; s; s = next) {
            next = s->next;
            if (s->async_armed) rc_harvest(s);
        }
    }
    pthread_mutex_unlock(&core->queue);
}

/* The feeder lets go of one part; of its submission with the last. */
static void drop_part(struct feeder *f, struct rc_part *part)
{
    struct rc_core *core = f->core;
    struct rc_submission *s = part->submission;
    pthread_mutex_lock(&core->queue);
    core->queued_parts--;
    part->exhausted = 1;
    uint32_t waiting = 0;
    for (uint32_t i = 0; i < s->part_count; i++) waiting += !s->parts[i].exhausted;
    if (!waiting) {
        s->fed = 1;
        s->in_feeder = 0;
        rc_let_ready_go(s);
        if (!s->any_direct && !s->any_gpu && !s->ended_early) {
            rr_store_release_u32(&s->source_done, 1);
            rr_futex_wake(&core->transfers[s->index].done, INT_MAX);
        }
        if (s->ended_early && !s->slices)
            rc_end_locally(s, core->dead ? core->dead : RR_CANCELLED, 1);
        else
            rc_harvest(s);
    }
    pthread_mutex_unlock(&core->queue);
}

static void look_again_at(struct feeder *f, uint64_t when_ns)
{
    if (when_ns < f->next_look_ns) f->next_look_ns = when_ns;
}

enum course { RUNS, ENDING, ENDED };

/* Ended: cancelled, timed out, stopped by the daemon, or the daemon is gone. Ending: the daemon could not be told yet. */
static enum course course_of(struct feeder *f, struct rc_part *part)
{
    struct rc_core *core = f->core;
    struct rc_submission *s = part->submission;
    if (rr_load_acquire_u32(&core->dead)) {
        s->ended_early = 1;
        return ENDED;
    }
    if (s->ended_early) return ENDED;
    if (!rr_load_acquire_u32(&s->cancelled) && s->deadline_ns) {
        if (rr_now_ns() >= s->deadline_ns)
            rc_cancel(s, RR_TIMED_OUT);
        else
            look_again_at(f, s->deadline_ns);
    }
    int stopped = rr_load_acquire_u32(&core->transfers[s->index].stop) == s->generation;
    if (!rr_load_acquire_u32(&s->cancelled) && !stopped) return RUNS;
    if (s->slices == 0 && !stopped) {
        s->ended_early = 1;
        pthread_mutex_lock(&core->queue);
        rc_end_locally(s, s->cancel_result, 1);
        pthread_mutex_unlock(&core->queue);
        return ENDED;
    }
    for (uint32_t i = 0; i < s->part_count; i++) {
        if (!s->parts[i].local || rc_part_is_copied(&s->parts[i])) continue;
        core->gpu_is_awaited = 1; /* it would count as settled while the GPU still writes */
        return ENDING;
    }
    s->ended_early = publish_end(core, s) != 0;
    return s->ended_early ? ENDED : ENDING;
}

/* Who waits for a CUDA event is asked again after a sixteenth of what it has waited, 10 to 500 us. */
static int is_ready(struct feeder *f, struct rc_submission *s)
{
    if (!s->ready.query) return 1;
    if (s->ready.query(s->ready.argument)) {
        rc_let_ready_go(s);
        return 1;
    }
    if (s->ready.polled) {
        uint64_t now = rr_now_ns();
        if (!s->ready_since_ns) s->ready_since_ns = now;
        uint64_t pause = (now - s->ready_since_ns) / 16;
        look_again_at(f, now + (pause < 10000 ? 10000 : pause > 500000 ? 500000 : pause));
    }
    return 0;
}

static void watch_gpu(struct feeder *f, uint64_t now)
{
    if (!rc_gpu_is_filling(f->core)) return;
    if (now - f->asked_gpu_ns >= ASK_GPU_NS) {
        rc_ask_gpu(f->core);
        f->asked_gpu_ns = now;
    }
    look_again_at(f, f->asked_gpu_ns + ASK_GPU_NS);
}

static int is_exclusive(const struct rc_core *core) { return core->route == RC_ROUTE_SERIAL || core->route == RC_ROUTE_SCHEDULED; }

/* Serial: in order of submission. Scheduled: the destination rail that this rank's turn is at, shifting each round. */
static void choose_exclusive(struct feeder *f)
{
    struct rc_core *core = f->core;
    if (f->exclusive) {
        pthread_mutex_lock(&core->queue);
        struct rc_submission *s = f->exclusive;
        rc_harvest(s);
        int done = s->done != 0;
        if (done && --s->references == 0) rc_free_submission(s);
        pthread_mutex_unlock(&core->queue);
        if (!done) return;
        f->exclusive = NULL;
    }
    struct rc_part *best = f->first;
    if (core->route == RC_ROUTE_SCHEDULED && best) {
        uint32_t turn = core->own_rail + core->scheduled_round++, nearest = UINT32_MAX;
        for (struct rc_part *part = f->first; part; part = part->next) {
            uint32_t distance = (part->remote_rail + RR_MAX_RAILS * 64 - turn % RR_MAX_RAILS) % RR_MAX_RAILS;
            if (distance < nearest) {
                nearest = distance;
                best = part;
            }
        }
    }
    if (!best) return;
    f->exclusive = best->submission;
    pthread_mutex_lock(&core->queue);
    best->submission->references++;
    pthread_mutex_unlock(&core->queue);
}

static void see_contention(struct feeder *f)
{
    struct rc_core *core = f->core;
    for (uint32_t i = 0; i < core->rail_count; i++) core->lanes[i].contended = core->lanes[i].first_destination = 0;
    for (struct rc_part *part = f->first; part; part = part->next) {
        struct rc_lane *lane = &core->lanes[part->local_rail];
        uint32_t destination = destination_id(part);
        if (part->direct || part->local) continue;
        if (!lane->first_destination) lane->first_destination = destination;
        if (lane->first_destination != destination) lane->contended = 1;
    }
}

/* One slice for every part that can have one; returns how many were fed or ended. */
static int round_of_parts(struct feeder *f)
{
    struct rc_core *core = f->core;
    int progress = 0;
    if (rr_load_acquire_u32(&core->gpu_failure) && !rr_load_acquire_u32(&core->dead)) rc_end_after_gpu_failure(core);
    take_inbox(f);
    if (!f->first) return 0;
    core->gpu_is_awaited = 0;
    if (is_exclusive(core)) choose_exclusive(f);
    see_contention(f);
    /* Small submissions first, then the rest in the order they came. */
    for (int small = 1; small >= 0; small--) {
        struct rc_part **link = &f->first, *previous = NULL;
        while (*link) {
            struct rc_part *part = *link;
            struct rc_submission *s = part->submission;
            int over = 0;
            if ((int)s->express == small) {
                enum course course = course_of(f, part);
                int its_turn = !is_exclusive(core) || f->exclusive == s;
                over = course == ENDED;
                if (course == RUNS && its_turn && is_ready(f, s) && rc_feed(core, part, small, 1)) {
                    progress++;
                    over = part->exhausted;
                }
            }
            if (!over) {
                previous = part;
                link = &part->next;
                continue;
            }
            *link = part->next;
            if (f->last == part) f->last = previous;
            progress++;
            drop_part(f, part);
        }
    }
    if (core->gpu_is_awaited) look_again_at(f, rr_now_ns() + 10000);
    return progress;
}

void *rc_feeder_main(void *argument)
{
    struct rc_core *core = argument;
    struct feeder f = {.core = core};
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    pthread_setname_np(pthread_self(), "rr-feeder");
    prctl(PR_SET_TIMERSLACK, 1000ul); /* it looks at a GPU every 10 us */
    if (core->feeder_cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(core->feeder_cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
    while (!rr_load_acquire_u32(&core->stop)) {
        if (round_of_parts(&f)) continue;
        uint32_t seen = rr_load_acquire_u32(&core->control->feeder_wake);
        rr_sleep_arm(&core->control->feeder_sleeping);
        uint64_t now = rr_now_ns();
        f.next_look_ns = now + HEARTBEAT_NS;
        if (!round_of_parts(&f) && !rr_load_acquire_u32(&core->stop)) {
            rr_store_relaxed_u64(&core->control->heartbeat_ns, now);
            core->counters.feeder_sleeps++;
            if (!f.first && !f.exclusive) rr_store_relaxed_u32(&core->control->feeder_sleeping, RR_SLEEPING_IDLE);
            now = rr_now_ns();
            watch_gpu(&f, now);
            if (f.next_look_ns > now) rr_futex_wait(&core->control->feeder_wake, seen, f.next_look_ns - now);
            core->counters.feeder_wakes++;
        }
        rr_sleep_disarm(&core->control->feeder_sleeping);
    }
    /* rc_close has ended every submission; let go of what is left. */
    take_inbox(&f);
    while (f.first) {
        struct rc_part *part = f.first;
        f.first = part->next;
        part->submission->ended_early = 1;
        drop_part(&f, part);
    }
    if (f.exclusive) {
        pthread_mutex_lock(&core->queue);
        if (--f.exclusive->references == 0) rc_free_submission(f.exclusive);
        pthread_mutex_unlock(&core->queue);
    }
    return NULL;
}
