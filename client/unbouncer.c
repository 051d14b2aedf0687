/* Empties bounce memory: copies frames that the daemon received for this client's private regions to where they
 * belong. One thread a client, started with the first bounce memory. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "client_core.h"

/* Waits until the GPU has copied what is listed. */
static rg_result flush(const struct rc_bounce *bounce, struct rg_listing *listing)
{
    struct rg_copier *copier = bounce->copier;
    rg_result result = rg_enter(copier);
    if (!result && listing->count) result = rg_copy(copier, 0, listing->count);
    if (!result) result = copier->api->cuStreamSynchronize(copier->stream);
    listing->count = 0;
    return result;
}

static rg_result to_gpu(const struct rc_bounce *bounce, uint64_t offset, uint64_t destination, uint32_t length, struct rg_listing *listing)
{
    if (!listing->runs) *listing = rg_list(rr_load_acquire_pointer((void *const *)&bounce->copier), 0);
    rg_result result = 0;
    struct rg_run run = {bounce->gpu_base + offset, destination, 0, 0, length, 1, 0, 0};
    if (!rg_add(listing, run)) {
        result = flush(bounce, listing);
        rg_add(listing, run);
    }
    return result;
}

static uint32_t place(struct rc_core *core, const struct rc_bounce *bounce, uint64_t position)
{
    uint32_t at = (uint32_t)(position % core->facts.bounce_slots);
    const struct rr_bounce_frame *frame = &bounce->frames[at];
    const struct rr_run *runs = bounce->runs + (size_t)at * core->facts.table_entries;
    uint32_t slot = frame->slot, count = frame->run_count, result = RR_OK;
    uint64_t taken = 0;
    struct rg_listing listing = {0};
    rg_result failure = 0;
    if (slot >= core->facts.bounce_slots || count > core->facts.table_entries) return RR_PROTOCOL;
    const uint8_t *source = bounce->memory + (size_t)slot * core->facts.slot_bytes;
    /* Held while copying: rc_remove_region returns only when nothing is written any more. */
    pthread_rwlock_rdlock(&core->tables);
    for (uint32_t i = 0; i < count && !result && !failure; i++) {
        struct rr_run run = runs[i];
        const struct rc_region *region = NULL;
        for (uint32_t r = 0; r < core->region_count; r++)
            if (core->regions[r].index == run.region) region = &core->regions[r];
        if (!region)
            result = RR_REGION_GONE;
        else if (run.offset > region->bytes || run.length > region->bytes - run.offset || run.length > core->facts.slot_bytes - taken)
            result = RR_OUT_OF_BOUNDS;
        else if (region->on_gpu)
            failure = to_gpu(bounce, (uint64_t)slot * core->facts.slot_bytes + taken, region->address + run.offset, run.length, &listing);
        else
            memcpy((void *)(uintptr_t)(region->address + run.offset), source + taken, run.length);
        taken += run.length;
        rr_fault_point(RR_FAULT_CLIENT_BOUNCE_COPYING);
    }
    if (listing.count || failure) { /* also then: nothing may be written any more once the tables are let go */
        rg_result last = flush(bounce, &listing);
        if (!failure) failure = last;
    }
    pthread_rwlock_unlock(&core->tables);
    if (failure) {
        rc_gpu_failed(core, failure);
        return RR_CLIENT_GONE;
    }
    core->counters.bounced_bytes += taken;
    return result;
}

/* Then peers' transfers may have ended already, and their next ones use the same pages. */
static int daemon_has_exited(const struct rc_core *core)
{
    struct pollfd exit = {core->daemon_pidfd, POLLIN, 0};
    return poll(&exit, 1, 0) == 1;
}

static int empty(struct rc_core *core, uint32_t rail)
{
    struct rc_bounce *bounce = &core->bounces[rail];
    if (!rr_load_acquire_pointer((void *const *)&bounce->memory)) return 0;
    uint64_t filled = rr_load_acquire_u64(&bounce->shared->filled); /* SYNC filled */
    int count = 0;
    while (bounce->emptied != filled && filled - bounce->emptied <= core->facts.bounce_slots && !daemon_has_exited(core)) {
        uint32_t result = place(core, bounce, bounce->emptied);
        rr_fault_point(RR_FAULT_CLIENT_BOUNCE_COPIED);
        rr_store_relaxed_u32(&bounce->frames[bounce->emptied % core->facts.bounce_slots].result, result);
        bounce->emptied++;
        rr_store_release_u64(&bounce->shared->emptied, bounce->emptied); /* SYNC emptied */
        rr_fault_point(RR_FAULT_CLIENT_BOUNCE_EMPTIED);
        if (rr_wake_needed(&core->rails[rail].sleeping)) rr_kick(core->kick_fds[rail]);
        count++;
    }
    return count;
}

void *rc_unbouncer_main(void *argument)
{
    struct rc_core *core = argument;
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, NULL);
    pthread_setname_np(pthread_self(), "rr-bounce");
    while (!rr_load_acquire_u32(&core->stop)) {
        int work_count = 0;
        for (uint32_t rail = 0; rail < core->rail_count; rail++) work_count += empty(core, rail);
        if (work_count) continue;
        uint32_t seen = rr_load_acquire_u32(&core->control->bounce_wake);
        rr_sleep_arm(&core->control->bounce_sleeping);
        for (uint32_t rail = 0; rail < core->rail_count; rail++) work_count += empty(core, rail);
        if (!work_count && !rr_load_acquire_u32(&core->stop)) rr_futex_wait(&core->control->bounce_wake, seen, 1000000000ull);
        rr_sleep_disarm(&core->control->bounce_sleeping);
    }
    return NULL;
}
