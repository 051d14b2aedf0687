/* Slots that a GPU fills: the feeder lists the pieces, announces the slot, and enqueues the copies and then the doorbell
 * on the lane's stream. A slot filled by the CPU in such a lane rings through the stream too, so that the doorbell
 * passes no slot that is still being filled. Everything here is the feeder's but for what opens and closes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "pieces.h"

#define CUDA_NOT_READY 600

int rc_use_gpu(struct rc_core *core, const uint64_t *functions, uint32_t count, void *context, int hang_up_fd)
{
    if (count * sizeof(void *) != sizeof core->gpu) return -EINVAL;
    if (core->gpu_context) return -EBUSY;
    core->hang_up_fd = dup(hang_up_fd);
    if (core->hang_up_fd < 0) return -errno;
    for (uint32_t i = 0; i < count; i++) {
        void *function = (void *)(uintptr_t)functions[i];
        memcpy((char *)&core->gpu + i * sizeof function, &function, sizeof function);
    }
    core->gpu_context = context;
    return 0;
}

int rc_add_gpu_lane(struct rc_core *core, uint32_t rail, uint64_t address, uint64_t bytes, uint64_t generation)
{
    if (rail >= core->rail_count || bytes < core->facts.slots * core->facts.slot_bytes) return -EINVAL;
    struct rc_lane *lane = &core->lanes[rail];
    struct rr_lane *shared = rc_shared_lane(core, rail);
    if (rc_lane_is_leased(lane)) return -EBUSY;
    if (rr_load_acquire_u64(&shared->generation) != generation) return -ESTALE;
    pthread_mutex_lock(&lane->lock);
    rr_lane_producer_init(&lane->producer, shared, core->facts.slots);
    lane->memory_bytes = bytes;
    lane->gpu_base = address;
    pthread_mutex_unlock(&lane->lock);
    return 0;
}

#define LOCAL_KERNEL_RATE 220 /* GB/s, 8 thread blocks between two H200s */

/* Costs are measured with copies to target; not those of the local route, which are as rg_open has them: its targets are
 * other engines' memory, and copies within one GPU say nothing about NVLink. */
static struct rg_copier *new_copier(struct rc_core *core, const struct rc_copier_facts *facts, uint64_t target, rg_result *result)
{
    struct rg_copier *copier = malloc(sizeof *copier);
    if (!copier) return NULL;
    if (rg_open(copier, &core->gpu, core->gpu_context, facts->stream, facts->kernel, facts->lists, facts->list_count, facts->list_runs)) {
        free(copier);
        return NULL;
    }
    copier->thread_blocks = facts->thread_blocks;
    copier->forced = facts->forced;
    copier->costs.nic_rate = facts->nic_rate;
    if (facts->nic_rate > 0)
        *result = rg_calibrate(copier, facts->scratch, target, facts->nic_rate);
    else
        copier->costs.kernel_rate = LOCAL_KERNEL_RATE;
    if (!*result) return copier;
    rg_close(copier);
    free(copier);
    return NULL;
}

int rc_set_lane_copier(struct rc_core *core, uint32_t rail, const struct rc_copier_facts *facts)
{
    if (rail >= core->rail_count || !rc_lane_is_leased(&core->lanes[rail]) || facts->list_count < core->facts.slots) return -EINVAL;
    struct rc_lane *lane = &core->lanes[rail];
    rg_result result = 0;
    /* Other threads may be sending host memory through the lane already: its memory is only for measuring while no slot
     * of it was ever used, and none is while the lock is held. */
    pthread_mutex_lock(&lane->lock);
    while (lane->filling) { /* their doorbells are stores; the stream's must come after them */
        struct timespec nap = {0, 50000};
        pthread_mutex_unlock(&lane->lock);
        nanosleep(&nap, NULL);
        pthread_mutex_lock(&lane->lock);
    }
    int unused = lane->producer.head == 0 && lane->producer.free_count == lane->producer.slots;
    uint64_t target = unused && lane->memory_bytes >= RG_CALIBRATION_BYTES ? facts->base : facts->scratch_target;
    struct rg_copier *copier = new_copier(core, facts, target, &result);
    if (copier) {
        lane->gpu_base = facts->base;
        lane->gpu_doorbell = facts->doorbell;
        rr_store_release_pointer((void **)&lane->copier, copier);
    }
    pthread_mutex_unlock(&lane->lock);
    return copier ? 0 : result ? result : -ENOMEM;
}

int rc_set_local_copier(struct rc_core *core, const struct rc_copier_facts *facts)
{
    rg_result result = 0;
    struct rg_copier *copier = new_copier(core, facts, facts->scratch_target, &result);
    if (!copier) return result ? result : -ENOMEM;
    core->local_signal = (uint64_t *)(uintptr_t)facts->base;
    rr_store_release_pointer((void **)&core->local_copier, copier);
    return 0;
}

int rc_set_bounce_copier(struct rc_core *core, uint32_t rail, const struct rc_copier_facts *facts)
{
    if (rail >= core->rail_count) return -EINVAL;
    rg_result result = 0;
    struct rg_copier *copier = new_copier(core, facts, facts->scratch_target, &result);
    if (!copier) return result ? result : -ENOMEM;
    core->bounces[rail].gpu_base = facts->base;
    rr_store_release_pointer((void **)&core->bounces[rail].copier, copier);
    return 0;
}

void rc_close_copiers(struct rc_core *core)
{
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) {
        struct rg_copier *copiers[] = {core->lanes[i].copier, core->bounces[i].copier};
        core->lanes[i].copier = core->bounces[i].copier = NULL;
        core->lanes[i].gpu_base = 0;
        for (int j = 0; j < 2; j++) {
            if (!copiers[j]) continue;
            rg_close(copiers[j]);
            free(copiers[j]);
        }
    }
    if (core->local_copier) {
        rg_close(core->local_copier);
        free(core->local_copier);
    }
    core->local_copier = NULL;
    if (core->hang_up_fd >= 0) close(core->hang_up_fd);
    core->hang_up_fd = -1;
}

/* ---- filling ---- */

/* A slot that is being listed: its runs for the copier, and its table. */
struct slot_listing {
    struct rg_listing runs;
    struct rr_block *table;
    uint64_t base, limit, end, bytes; /* end: of what is in the slot */
    uint32_t entries, entries_max;
};

static inline uint64_t packed(uint64_t at) { return (at + RR_PACK_BYTES - 1) & ~(uint64_t)(RR_PACK_BYTES - 1); }

/* Whether a piece goes on at the destination where the last entry ends; it then does in the slot too, unpacked. */
static inline int joins(const struct slot_listing *l, uint64_t destination, uint32_t remote)
{
    const struct rr_block *last = l->entries ? &l->table[l->entries - 1] : NULL;
    return last && last->destination + last->length == destination && last->remote_region == remote;
}

/* A piece, or the part of it that the slot has room for; how many bytes of it, 0 if the slot is full. */
static uint64_t list_piece(struct slot_listing *l, uint64_t source, uint64_t destination, uint64_t length, uint32_t remote)
{
    int joined = joins(l, destination, remote);
    uint64_t at = joined ? l->end : packed(l->end);
    if (at >= l->limit || (!joined && l->entries == l->entries_max)) return 0;
    uint64_t take = length < l->limit - at ? length : l->limit - at;
    if (!rg_add(&l->runs, (struct rg_run){source, l->base + at, 0, 0, (uint32_t)take, 1, 0, 0})) return 0;
    if (joined)
        l->table[l->entries - 1].length += (uint32_t)take;
    else
        l->table[l->entries++] = (struct rr_block){at, destination, (uint32_t)take, 0, remote, 0};
    l->bytes += take;
    l->end = at + take;
    return take;
}

/* As many whole pieces of the run as fit; how many. Where they join at the destination, how many there are costs nothing. */
static uint32_t list_run(struct slot_listing *l, const struct rc_run *run)
{
    const struct rc_piece *first = &run->first;
    int join_each_other = run->destination_step == first->length, joined = joins(l, first->destination, first->remote);
    uint64_t step = join_each_other ? first->length : packed(first->length), at = joined ? l->end : packed(l->end);
    if (at >= l->limit || first->length > l->limit - at) return 0;
    if (joined && !join_each_other && at != packed(at)) return 0; /* the second one is at another distance: as single pieces */
    uint64_t room = l->limit - at - first->length;
    uint32_t entries_left = l->entries_max - l->entries, count = run->count;
    if ((count - 1) * step > room) count = (uint32_t)(room / step) + 1;
    if (join_each_other && !joined && !entries_left) return 0;
    if (!join_each_other && count > entries_left + (uint32_t)joined) count = entries_left + (uint32_t)joined;
    if (!count || !rg_add(&l->runs, (struct rg_run){first->source, l->base + at, run->source_step, step, (uint32_t)first->length, count, 0, 0}))
        return 0;
    uint64_t bytes = count * first->length, length = join_each_other ? bytes : first->length;
    if (joined)
        l->table[l->entries - 1].length += (uint32_t)length;
    else
        l->table[l->entries++] = (struct rr_block){at, first->destination, (uint32_t)length, 0, first->remote, 0};
    for (uint32_t i = 1; i < count && !join_each_other; i++)
        l->table[l->entries++] = (struct rr_block){at + i * step, first->destination + i * run->destination_step, (uint32_t)length, 0, first->remote, 0};
    l->bytes += bytes;
    l->end = at + (count - 1) * step + first->length;
    return count;
}

/* Writes the slot's table and lists its pieces for the copier; returns how many runs those are. */
static uint32_t list_pieces(struct rc_part *part, struct rg_copier *copier, uint32_t slot, uint64_t base, struct rr_block *table, uint64_t limit,
                            uint64_t *filled, uint32_t *entries)
{
    struct slot_listing l = {rg_list(copier, slot), table, base, limit, 0, 0, 0, part->entries_max};
    struct rc_run run;
    struct rc_piece piece;
    for (;;) {
        if (rc_peek_run(part, &run) && run.count > 1) {
            uint32_t taken = list_run(&l, &run);
            if (taken) {
                rc_take_run(part, taken);
                continue;
            }
        }
        if (!rc_peek_piece(part, &piece)) break;
        uint64_t take = list_piece(&l, piece.source, piece.destination, piece.length, piece.remote);
        if (!take) break;
        rc_take_piece(part, take, piece.length);
    }
    *filled = l.bytes;
    *entries = l.entries;
    return l.runs.count;
}

static void copy_by_cpu(const struct rg_run *runs, uint32_t count)
{
    for (const struct rg_run *run = runs; run < runs + count; run++)
        for (uint64_t i = 0; i < run->rows; i++)
            memcpy((void *)(uintptr_t)(run->destination + i * run->destination_step), (const void *)(uintptr_t)(run->source + i * run->source_step),
                   run->bytes);
}

void rc_fill_by_gpu(struct rc_core *core, struct rc_part *part, uint32_t slot, uint64_t limit)
{
    struct rc_lane *lane = &core->lanes[part->local_rail];
    struct rg_copier *copier = lane->copier;
    uint64_t began_ns = rr_now_ns();
    size_t at = (size_t)part->local_rail * core->facts.slots + slot;
    uint64_t offset = (uint64_t)slot * core->facts.slot_bytes, bytes;
    uint32_t entries;
    int by_cpu = !part->on_gpu && lane->memory; /* host memory, and no GPU need touch it */
    uint64_t base = by_cpu ? (uint64_t)(uintptr_t)lane->memory + offset : lane->gpu_base + offset;
    uint32_t count = list_pieces(part, copier, slot, base, core->slot_tables + at * core->facts.table_entries, limit, &bytes, &entries);
    const struct rg_run *runs = rg_list(copier, slot).runs;
    if (by_cpu) copy_by_cpu(runs, count);
    rc_describe(&core->slot_heads[at], part, entries, bytes);
    rr_fetch_add_u64(&core->counters.slots, 1);
    rr_fetch_add_u64(&core->counters.copied_bytes, bytes);
    /* The GPU's doorbell wakes nobody: the rail learns by the head that one is about to ring. */
    rr_lane_announce(&lane->producer, slot);
    rc_wake_rail(core, part->local_rail);
    rg_result result = rg_enter(copier);
    if (!result && part->on_gpu) result = rg_copy(copier, slot, count);
    if (!result && !part->on_gpu && !by_cpu) result = rg_copy_each(copier, runs, count);
    rc_tell_times(&core->slot_times[at], began_ns);
    if (!result) result = rg_signal(copier, lane->gpu_doorbell, ++lane->producer.doorbell);
    rr_store_release_u64(&part->copied_at, lane->producer.doorbell);
    if (result) rc_gpu_failed(core, result);
}

/* ---- the local route ---- */

#define LOCAL_CHUNK_BYTES (32ull << 20) /* between two of them the stream stands still for some 20 us */
#define LOCAL_CALLS 8192u /* of a chunk, where each piece is a call */

/* Without the word nothing was enqueued yet, or nothing runs any more. */
static uint64_t local_copied(const struct rc_core *core)
{
    return core->local_signal ? rr_load_acquire_u64(core->local_signal) : UINT64_MAX;
}

void rc_forget_local_signal(struct rc_core *core)
{
    pthread_mutex_lock(&core->queue); /* who looks at a submission that has ended holds it */
    core->local_signal = NULL;
    pthread_mutex_unlock(&core->queue);
}

/* After a failure the stream is waited for once: copies may be under way. In a context that cannot be made current any more,
 * which is lost, nothing runs. */
int rc_local_gpu_has_reached(struct rc_core *core, uint64_t enqueued)
{
    if (local_copied(core) >= enqueued) return 1;
    if (!rr_load_acquire_u32(&core->gpu_failure)) return 0;
    const struct rg_copier *copier = core->local_copier;
    void *context = core->gpu_context;
    if (copier && !core->gpu.cuCtxPushCurrent(context)) { /* a caller's thread has a context of its own */
        core->gpu.cuStreamSynchronize(copier->stream);
        core->gpu.cuCtxPopCurrent(&context);
    }
    return 1;
}

int rc_part_is_copied(const struct rc_part *part)
{
    uint64_t copied_at = rr_load_acquire_u64(&part->copied_at);
    const struct rc_core *core = part->submission->core;
    if (!copied_at || part->direct) return 1;
    if (part->local) return local_copied(core) >= copied_at;
    const struct rr_lane *shared = core->lanes[part->local_rail].producer.lane;
    return (int64_t)(rr_load_acquire_u64(&shared->doorbell) - copied_at) >= 0; /* SYNC doorbell */
}

int rc_copy_chunk_by_gpu(struct rc_core *core, struct rc_part *part)
{
    struct rg_copier *copier = core->local_copier;
    if (rr_load_acquire_u32(&core->gpu_failure)) return RC_LOCAL_WAITS; /* the next round ends everything */
    if (core->local_enqueued - local_copied(core) >= copier->list_count) return RC_LOCAL_WAITS;
    uint32_t list = (uint32_t)(core->local_enqueued % copier->list_count), region = RR_NONE;
    int on_gpus = part->on_gpu && part->to_gpu;
    struct rg_listing listing = rg_list(copier, list);
    uint64_t left = LOCAL_CHUNK_BYTES, base = 0;
    uint32_t calls_left = on_gpus ? UINT32_MAX : LOCAL_CALLS;
    struct rc_run run;
    rg_result result = rg_enter(copier);
    /* Held until all is enqueued: whoever takes a mapping away then waits for the GPU. */
    pthread_rwlock_rdlock(&core->mappings_lock);
    while (left && calls_left) {
        int whole = rc_peek_run(part, &run);
        if (!whole) {
            run = (struct rc_run){.count = 1};
            if (!rc_peek_piece(part, &run.first)) break;
        }
        const struct rc_piece *first = &run.first;
        if (first->remote != region) {
            region = first->remote;
            base = (uint64_t)(uintptr_t)core->mappings[region].base;
            if (!base) break;
        }
        uint64_t bytes = first->length < left ? first->length : left, count = left / bytes;
        count = count < run.count ? count : run.count;
        count = count < calls_left ? count : calls_left;
        if (!rg_add(&listing, (struct rg_run){first->source, base + first->destination, run.source_step, run.destination_step, (uint32_t)bytes,
                                              (uint32_t)count, 0, 0}))
            break;
        left -= count * bytes;
        calls_left -= (uint32_t)count;
        if (whole && bytes == first->length)
            rc_take_run(part, (uint32_t)count);
        else
            rc_take_piece(part, bytes, first->length);
    }
    uint32_t count = listing.count;
    int gone = region != RR_NONE && !base;
    if (!result && count) result = on_gpus ? rg_copy(copier, list, count) : rg_copy_each(copier, listing.runs, count);
    if (!result && count) {
        rr_store_release_u64(&core->local_enqueued, core->local_enqueued + 1);
        rr_store_release_u64(&part->copied_at, core->local_enqueued);
        result = rg_signal(copier, (uint64_t)(uintptr_t)core->local_signal, core->local_enqueued);
    }
    pthread_rwlock_unlock(&core->mappings_lock);
    if (result) {
        rc_gpu_failed(core, result);
        return RC_LOCAL_WAITS; /* what was taken will never be copied */
    }
    part->local_bytes += LOCAL_CHUNK_BYTES - left;
    rr_fetch_add_u64(&core->counters.bytes_local, LOCAL_CHUNK_BYTES - left);
    return gone ? -1 : 0;
}

int rc_gpu_has_copied(const struct rc_submission *s)
{
    for (uint32_t i = 0; i < s->part_count; i++)
        if (!rc_part_is_copied(&s->parts[i])) return 0;
    return 1;
}

/* Any thread. The feeder ends everything (rc_end_after_gpu_failure): what a failed stream was to fill never arrives. */
void rc_gpu_failed(struct rc_core *core, rg_result result)
{
    uint32_t none = 0;
    rr_compare_exchange_u32(&core->gpu_failure, &none, (uint32_t)result);
    rc_wake_feeder(core);
}

int rc_gpu_is_filling(const struct rc_core *core)
{
    for (uint32_t i = 0; i < core->rail_count; i++) {
        const struct rc_lane *lane = &core->lanes[i];
        if (!rr_load_acquire_pointer((void *const *)&lane->copier)) continue;
        if (rr_load_relaxed_u64(&lane->producer.lane->doorbell) != lane->producer.doorbell) return 1;
    }
    return local_copied(core) < core->local_enqueued;
}

static void ask(struct rc_core *core, const struct rg_copier *copier)
{
    if (!copier) return;
    rg_result result = rg_enter(copier);
    if (!result) result = copier->api->cuStreamQuery(copier->stream);
    if (result && result != CUDA_NOT_READY) rc_gpu_failed(core, result);
}

void rc_ask_gpu(struct rc_core *core)
{
    for (uint32_t i = 0; i < core->rail_count; i++) ask(core, rr_load_acquire_pointer((void *const *)&core->lanes[i].copier));
    ask(core, rr_load_acquire_pointer((void *const *)&core->local_copier));
}

void rc_end_after_gpu_failure(struct rc_core *core)
{
    rc_fail_all(core, RR_GPU_ERROR);
    shutdown(core->hang_up_fd, SHUT_RDWR);
}

/* ---- events ---- */

static int event_query(void *argument)
{
    struct rc_gpu_event *event = argument;
    const struct rg_api *api = &event->core->gpu;
    rg_result result = api->cuCtxSetCurrent(event->core->gpu_context);
    if (!result) result = api->cuEventQuery(event->event);
    if (result && result != CUDA_NOT_READY) rc_gpu_failed(event->core, result);
    return result == 0;
}

struct rc_gpu_event *rc_gpu_event_new(struct rc_core *core, void *event)
{
    struct rc_gpu_event *made = malloc(sizeof *made);
    if (made) *made = (struct rc_gpu_event){core, event, 1};
    return made;
}

void rc_gpu_event_release(void *argument)
{
    struct rc_gpu_event *event = argument;
    const struct rg_api *api = &event->core->gpu;
    void *context = NULL;
    if (rr_fetch_add_u32(&event->references, (uint32_t)-1) != 1) return;
    if (!api->cuCtxPushCurrent(event->core->gpu_context)) {
        api->cuEventDestroy(event->event);
        api->cuCtxPopCurrent(&context);
    }
    free(event);
}

struct rc_ready rc_gpu_event_ready(struct rc_gpu_event *event)
{
    rr_fetch_add_u32(&event->references, 1);
    return (struct rc_ready){event_query, rc_gpu_event_release, event, 1};
}
