/* Life of submissions, on callers' threads: publish, wait, cancel, and the end, which whoever sees it first takes over. */
#include <stdlib.h>
#include <string.h>

#include "client_core.h"

#define WAIT_SLICE_NS 250000000ull /* waiters look again this often: a dead daemon wakes nobody */

struct rc_event *rc_event_new(void)
{
    struct rc_event *event = calloc(1, sizeof *event);
    if (event) event->references = 1;
    return event;
}

void rc_event_release(void *argument)
{
    struct rc_event *event = argument;
    if (rr_fetch_add_u32(&event->references, (uint32_t)-1) == 1) free(event);
}

static int event_query(void *argument) { return rr_load_acquire_u32(&((struct rc_event *)argument)->set) != 0; }

struct rc_ready rc_event_ready(struct rc_event *event)
{
    rr_fetch_add_u32(&event->references, 1);
    return (struct rc_ready){event_query, rc_event_release, event, 0};
}

void rc_let_ready_go(struct rc_submission *s)
{
    struct rc_ready ready = s->ready;
    s->ready = (struct rc_ready){NULL, NULL, NULL, 0};
    if (ready.release) ready.release(ready.argument);
}

void rc_free_submission(struct rc_submission *s)
{
    rc_let_ready_go(s);
    free(s->blocks);
    free(s->pages.rows);
    free(s->pages.source_pages);
    free(s->pages.destination_pages);
    free(s->pages.page_ends);
    free(s->row_indices);
    free(s->row_ends);
    free(s->parts);
    free(s->used);
    free(s);
}

static void release_locked(struct rc_submission *s)
{
    if (--s->references == 0) rc_free_submission(s);
}

static void unlink_live(struct rc_submission *s)
{
    for (struct rc_submission **link = &s->core->live; *link; link = &(*link)->next) {
        if (*link != s) continue;
        *link = s->next;
        break;
    }
}

/* Holding queue. Whoever sees the end first tells the event loops: nobody else may look at the submission again. */
static void wake_async(struct rc_submission *s)
{
    if (!s->async_armed) return;
    s->async_armed = 0;
    s->core->async_armed--;
    rr_kick(s->core->completion_fd);
}

/* Holding queue. The entry may be used again only once the daemon has settled it and the feeder has let go. */
void rc_harvest(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    struct rr_transfer *shared = &core->transfers[s->index];
    if (s->entry_released) return;
    if (!s->done && s->published && rr_load_acquire_u32(&shared->done) == s->generation) { /* SYNC done */
        s->result = rr_load_relaxed_u32(&shared->result);
        s->bytes_done = rr_load_relaxed_u64(&shared->bytes);
        rr_store_release_u32(&s->done, 1);
        wake_async(s);
    }
    if (!s->settled && s->done && rr_load_acquire_u32(&shared->settled) == s->generation) rr_store_release_u32(&s->settled, 1);
    /* Nobody reads the source any more: all of it was placed, or the daemon has settled it or is dead and the feeder has
     * let go of it. */
    int all_placed = s->done && s->result == RR_OK;
    int copied = !s->any_gpu || rc_gpu_has_copied(s);
    if (all_placed || (copied && s->fed && (s->settled || core->dead == RR_DAEMON_GONE))) rr_store_release_u32(&s->source_done, 1);
    if (s->fed && copied && !s->any_direct && !s->ended_early) rr_store_release_u32(&s->source_done, 1);
    if (!s->settled || !s->fed) return;
    s->entry_released = 1;
    core->free_entries[core->free_count++] = s->index;
    core->bytes_in_flight -= s->bytes;
    rc_wake_first(core);
    rc_leave_memory(s);
    unlink_live(s);
    release_locked(s);
}

/* Holding queue: takes over the end of every submission that has ended, also of those that nobody waits for. */
void rc_reap(struct rc_core *core)
{
    for (struct rc_submission *s = core->live, *next; s; s = next) {
        next = s->next;
        rc_harvest(s);
    }
}

/* Holding queue: ends a submission without a word of the daemon. It is settled only if nothing of it was published. */
void rc_end_locally(struct rc_submission *s, uint32_t result, int settled)
{
    if (!s->done) {
        s->result = result;
        rr_store_release_u32(&s->done, 1);
    }
    if (settled) rr_store_release_u32(&s->settled, 1);
    rr_futex_wake(&s->core->transfers[s->index].done, INT_MAX);
    rr_futex_wake(&s->core->transfers[s->index].settled, INT_MAX);
    wake_async(s);
    rc_harvest(s);
}

void rc_publish(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    int exclusive = core->route == RC_ROUTE_SERIAL || core->route == RC_ROUTE_SCHEDULED;
    pthread_mutex_lock(&core->queue);
    if (s->published) {
        pthread_mutex_unlock(&core->queue);
        return;
    }
    s->published = 1;
    s->deadline_ns = s->timeout_ns ? rr_now_ns() + s->timeout_ns : 0;
    if (core->dead || s->cancelled) {
        s->fed = 1;
        rc_end_locally(s, core->dead && core->gpu_failure ? RR_GPU_ERROR : core->dead ? core->dead : s->cancel_result, 1);
        pthread_mutex_unlock(&core->queue);
        return;
    }
    /* One slice that its lane or ring takes at once needs no other thread. */
    if (s->express && s->part_count == 1 && !s->ready.query && !(exclusive && core->queued_parts) && rc_feed(core, s->parts, 1, 0) &&
        s->parts->exhausted) {
        s->fed = 1;
        if (!s->any_direct && !s->any_gpu) rr_store_release_u32(&s->source_done, 1);
        core->counters.fast_submissions++;
        pthread_mutex_unlock(&core->queue);
        rr_fault_point(RR_FAULT_CLIENT_TRANSFER_PUBLISHED);
        return;
    }
    s->in_feeder = 1;
    for (uint32_t i = 0; i < s->part_count; i++) {
        struct rc_part *part = &s->parts[i];
        if (part->exhausted) continue;
        part->next = NULL;
        if (core->last)
            core->last->next = part;
        else
            core->first = part;
        core->last = part;
        core->queued_parts++;
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
    rr_fault_point(RR_FAULT_CLIENT_TRANSFER_PUBLISHED);
}

void rc_cancel(struct rc_submission *s, uint32_t result)
{
    struct rc_core *core = s->core;
    pthread_mutex_lock(&core->queue);
    rc_harvest(s);
    if (!s->done && !s->entry_released && !s->cancelled) {
        struct rr_transfer *shared = &core->transfers[s->index];
        s->cancel_result = result;
        rr_store_release_u32(&s->cancelled, 1);
        rr_store_relaxed_u32(&shared->cancel_result, result);
        rr_store_release_u32(&shared->cancel, s->generation);
        rr_fault_point(RR_FAULT_CLIENT_TRANSFER_CANCELLED);
        if (!s->published) {
            s->published = s->fed = 1;
            rc_end_locally(s, result, 1);
        }
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
}

static int reached(struct rc_submission *s, int what)
{
    return (int)rr_load_acquire_u32(what == 0 ? &s->done : what == 1 ? &s->source_done : &s->settled);
}

static int look(struct rc_submission *s, int what)
{
    if (reached(s, what)) return 1;
    pthread_mutex_lock(&s->core->queue);
    rc_harvest(s);
    pthread_mutex_unlock(&s->core->queue);
    return reached(s, what);
}

int rc_wait(struct rc_submission *s, int what, uint64_t timeout_ns)
{
    if (look(s, what)) return 1;
    if (!timeout_ns) return 0;
    struct rr_transfer *shared = &s->core->transfers[s->index];
    uint32_t *word = what == 2 ? &shared->settled : &shared->done;
    uint64_t end = rr_now_ns() + timeout_ns;
    if (end < timeout_ns) end = UINT64_MAX;
    for (;;) {
        uint32_t seen = rr_load_relaxed_u32(word);
        rr_fetch_or_u32(&shared->waiting, 1);
        if (look(s, what)) return 1;
        uint64_t now = rr_now_ns();
        if (now >= end) return 0;
        uint64_t slice = what == 1 ? 1000000 : WAIT_SLICE_NS;
        if (seen != s->generation || what == 1) rr_futex_wait(word, seen, end - now < slice ? end - now : slice);
    }
}

int rc_arm_async(struct rc_submission *s)
{
    if (look(s, 0)) return 0;
    pthread_mutex_lock(&s->core->queue);
    if (!s->async_armed && !s->done) {
        s->async_armed = 1;
        s->core->async_armed++;
    }
    pthread_mutex_unlock(&s->core->queue);
    rr_fetch_or_u32(&s->core->transfers[s->index].waiting, 2);
    return !look(s, 0);
}

void rc_release(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    pthread_mutex_lock(&core->queue);
    if (!s->published) {
        s->published = s->fed = 1;
        rc_end_locally(s, RR_CANCELLED, 1);
    }
    rc_harvest(s);
    release_locked(s);
    pthread_mutex_unlock(&core->queue);
}

void rc_fail_all(struct rc_core *core, uint32_t result)
{
    pthread_mutex_lock(&core->queue);
    if (!core->dead) rr_store_release_u32(&core->dead, result);
    for (struct rc_submission *s = core->live, *next; s; s = next) {
        next = s->next;
        rc_harvest(s);
        if (s->entry_released) continue;
        if (!s->in_feeder) s->fed = 1;
        rc_end_locally(s, result, s->fed && s->slices == 0);
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
}
