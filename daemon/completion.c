/* Transfer contexts: the biased count of unfinished slices of a transfer across rails, and its end. Any rail thread
 * and the main thread may call; the count is one 64-bit word, moved by compare-and-exchange once a slice. */
#include "plane.h"

static uint64_t word_of(uint32_t generation, uint32_t remaining) { return (uint64_t)generation << 32 | remaining; }

void rr_wake_feeder(struct rr_client *client)
{
    rr_full_barrier();
    if (rr_load_relaxed_u32(&client->control->feeder_sleeping) != RR_SLEEPING) return;
    rr_fetch_add_u32(&client->control->feeder_wake, 1);
    rr_futex_wake(&client->control->feeder_wake, INT_MAX);
}

static int live(uint32_t remaining) { return remaining != 0 && remaining != RR_COMPLETION_ENDING; }

/* 0, or -1: no correct client sends this slice. Several rails may open the same generation at once: they write equal
 * fields and one of them wins the exchange. */
int rr_transfer_open(struct rr_client *client, const struct rr_slice *slice, uint32_t handle, uint32_t owner)
{
    if (slice->transfer >= client->transfer_count || slice->generation == 0) return -1;
    struct rr_context *context = &client->contexts[slice->transfer];
    uint64_t word = rr_load_acquire_u64(&context->word);
    for (;;) {
        uint32_t generation = (uint32_t)(word >> 32), remaining = (uint32_t)word;
        if (live(remaining) && generation == slice->generation) break;
        if (remaining != 0 || generation == slice->generation) return -1;
        struct rr_transfer *shared = &client->transfers[slice->transfer];
        rr_store_relaxed_u64(&context->tag, rr_load_relaxed_u64(&shared->tag));
        rr_store_relaxed_u64(&context->timeout_ns, rr_load_relaxed_u64(&shared->timeout_ns));
        rr_store_relaxed_u64(&context->started_ns, rr_now_ns());
        rr_store_relaxed_u32(&context->note, rr_load_relaxed_u32(&shared->note) != 0);
        rr_store_relaxed_u32(&context->peer, slice->peer);
        rr_store_relaxed_u32(&context->handle, handle);
        rr_store_relaxed_u32(&context->owner, owner);
        if (rr_compare_exchange_u64(&context->word, &word, word_of(slice->generation, RR_COMPLETION_BIAS))) break;
    }
    return rr_load_relaxed_u32(&context->peer) == slice->peer ? 0 : -1;
}

/* Results other than RR_OK carry their generation, so that a late cancel cannot touch the entry's next user. */
static void set_fault(struct rr_context *context, uint32_t generation, uint32_t result)
{
    uint64_t fault = rr_load_acquire_u64(&context->fault);
    while ((int32_t)((uint32_t)(fault >> 32) - generation) < 0)
        if (rr_compare_exchange_u64(&context->fault, &fault, word_of(generation, result))) return;
}

static uint32_t fault_of(const struct rr_context *context, uint32_t generation)
{
    uint64_t fault = rr_load_acquire_u64(&context->fault);
    return (uint32_t)(fault >> 32) == generation ? (uint32_t)fault : RR_OK;
}

uint32_t rr_transfer_stopped(const struct rr_client *client, uint32_t transfer, uint32_t generation)
{
    return fault_of(&client->contexts[transfer], generation);
}

/* What the transfer would end as now. The client's own cancel may be in its segment before the main thread hears of it. */
static uint32_t result_so_far(const struct rr_client *client, uint32_t transfer, uint32_t generation)
{
    const struct rr_transfer *shared = &client->transfers[transfer];
    uint32_t result = fault_of(&client->contexts[transfer], generation);
    if (result == RR_OK && rr_load_acquire_u32(&shared->cancel) == generation)
        result = rr_load_relaxed_u32(&shared->cancel_result) == RR_TIMED_OUT ? RR_TIMED_OUT : RR_CANCELLED;
    return result;
}

static void wake_waiters(struct rr_client *client, struct rr_transfer *shared)
{
    rr_full_barrier();
    uint32_t waiting = rr_load_relaxed_u32(&shared->waiting);
    if (waiting & 1) {
        rr_futex_wake(&shared->done, INT_MAX);
        rr_futex_wake(&shared->settled, INT_MAX);
    }
    if (waiting & 2) {
        rr_fetch_add_u32(&client->control->feeder_wake, 1);
        rr_futex_wake(&client->control->feeder_wake, INT_MAX);
    }
}

static void write_record(struct rr_transfer *shared, uint32_t result, uint64_t bytes)
{
    rr_store_relaxed_u32(&shared->result, result);
    rr_store_relaxed_u64(&shared->bytes, bytes);
    rr_store_relaxed_u64(&shared->done_ns, rr_now_ns());
}

static int claim(struct rr_context *context, uint64_t *seen, uint32_t generation, enum rr_record_state state)
{
    return rr_compare_exchange_u64(&context->record, seen, word_of(generation, state));
}

/* The last slice has ended. Exactly one of this and rr_transfer_report_unsettled writes the record and `done`, and
 * whoever comes second of the two writes `settled`: after that the client may use the entry again. */
static void finish(struct rr_client *client, uint32_t transfer, uint32_t generation, int rail)
{
    struct rr_context *context = &client->contexts[transfer];
    struct rr_transfer *shared = &client->transfers[transfer];
    uint32_t result = result_so_far(client, transfer, generation);
    uint64_t bytes = rr_load_relaxed_u64(&context->bytes);
    rr_fault_point(RR_FAULT_DAEMON_TRANSFER_COUNTED);
    rr_store_relaxed_u64(&context->bytes, 0);
    /* The context is idle before the client can learn that it may use the entry again. */
    rr_store_release_u64(&context->word, word_of(generation, 0));
    rr_full_barrier(); /* with the one in rr_transfer_watch: one of the two sees the other */
    uint32_t watched = rr_load_relaxed_u32(&context->watched) == generation;
    uint64_t seen = rr_load_acquire_u64(&context->record);
    while (!claim(context, &seen, generation, RR_RECORD_ENDED)) continue;
    if (seen != word_of(generation, RR_RECORD_REPORTING)) {
        int reported = seen == word_of(generation, RR_RECORD_REPORTED);
        if (!reported) write_record(shared, result, bytes);
        rr_fault_point(RR_FAULT_DAEMON_TRANSFER_RECORDED);
        rr_store_release_u32(&shared->settled, generation);
        rr_fault_point(RR_FAULT_DAEMON_TRANSFER_SETTLED);
        if (!reported) rr_store_release_u32(&shared->done, generation); /* SYNC done */
        rr_fault_point(RR_FAULT_DAEMON_TRANSFER_DONE);
        wake_waiters(client, shared);
    }
    if (rail < 0)
        rr_wake_feeder(client); /* a rail does it after each slice */
    else
        rr_count(&client->plane->rails[rail], result ? RR_RAIL_TRANSFERS_FAILED : RR_RAIL_TRANSFERS_DONE, 1);
    if (watched) rr_event_push(client->plane, RR_EVENT_TRANSFER_ENDED, rail, client->number, transfer, generation, result, 0);
}

/* The final slice says how many there are: takes the bias away. 0, or -1 for counts that cannot be. */
int rr_transfer_total(struct rr_client *client, const struct rr_slice *slice)
{
    struct rr_context *context = &client->contexts[slice->transfer];
    uint32_t total = slice->total_slices;
    if (total == 0 || total >= RR_COMPLETION_BIAS / 2) return -1;
    uint64_t word = rr_load_acquire_u64(&context->word);
    for (;;) {
        uint32_t remaining = (uint32_t)word;
        /* This slice itself has not finished, so at least one of `total` is left. */
        if ((uint32_t)(word >> 32) != slice->generation || remaining > RR_COMPLETION_BIAS ||
            remaining < RR_COMPLETION_BIAS - total + 1)
            return -1;
        if (rr_compare_exchange_u64(&context->word, &word, word - (RR_COMPLETION_BIAS - total))) return 0;
    }
}

/* One slice ended. 0, or -1 if the count would go below zero. */
int rr_transfer_slice_done(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result, uint64_t bytes, int rail)
{
    struct rr_context *context = &client->contexts[transfer];
    if (result > RR_GPU_ERROR || result == RR_UNSETTLED) result = RR_PROTOCOL; /* a peer's word */
    if (result) {
        set_fault(context, generation, result);
        rr_store_release_u32(&client->transfers[transfer].stop, generation);
    } else {
        rr_fetch_add_u64(&context->bytes, bytes);
    }
    uint64_t word = rr_load_acquire_u64(&context->word);
    for (;;) {
        uint32_t remaining = (uint32_t)word;
        if ((uint32_t)(word >> 32) != generation || !live(remaining)) return -1;
        int note_left = remaining == 2 && rr_load_relaxed_u32(&context->note);
        int note_void = note_left && result_so_far(client, transfer, generation);
        uint64_t next = remaining == 1 || note_void ? word_of(generation, RR_COMPLETION_ENDING) : word - 1;
        if (!rr_compare_exchange_u64(&context->word, &word, next)) continue;
        if (remaining == 1 || note_void)
            finish(client, transfer, generation, rail);
        else if (note_left)
            rr_event_push(client->plane, RR_EVENT_NOTE_DUE, rail, client->number, transfer, generation, 0, 0);
        return 0;
    }
}

int rr_transfer_finish_note(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result)
{
    if (transfer >= client->transfer_count) return -1;
    return rr_transfer_slice_done(client, transfer, generation, result, 0, -1);
}

static int is_live(struct rr_client *client, uint32_t transfer, uint32_t generation)
{
    uint64_t word = rr_load_acquire_u64(&client->contexts[transfer].word);
    return (uint32_t)(word >> 32) == generation && (uint32_t)word != 0;
}

int rr_transfer_cancel(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result)
{
    if (transfer >= client->transfer_count || !is_live(client, transfer, generation)) return 0;
    set_fault(&client->contexts[transfer], generation, result);
    rr_store_release_u32(&client->transfers[transfer].stop, generation);
    rr_fetch_add_u32(&client->control->feeder_wake, 1);
    rr_futex_wake(&client->control->feeder_wake, INT_MAX);
    return 1;
}

int rr_transfer_report_unsettled(struct rr_client *client, uint32_t transfer, uint32_t generation)
{
    if (transfer >= client->transfer_count) return 0;
    struct rr_context *context = &client->contexts[transfer];
    struct rr_transfer *shared = &client->transfers[transfer];
    uint64_t seen = rr_load_acquire_u64(&context->record);
    if ((int32_t)((uint32_t)(seen >> 32) - generation) >= 0 || !claim(context, &seen, generation, RR_RECORD_REPORTING)) return 0;
    write_record(shared, RR_UNSETTLED, rr_load_relaxed_u64(&context->bytes));
    rr_store_release_u32(&shared->done, generation); /* SYNC done */
    seen = word_of(generation, RR_RECORD_REPORTING);
    if (!claim(context, &seen, generation, RR_RECORD_REPORTED)) rr_store_release_u32(&shared->settled, generation);
    wake_waiters(client, shared);
    return 1;
}

int rr_transfer_watch(struct rr_client *client, uint32_t transfer, uint32_t generation)
{
    if (transfer >= client->transfer_count) return 0;
    rr_store_relaxed_u32(&client->contexts[transfer].watched, generation);
    rr_full_barrier();
    return is_live(client, transfer, generation);
}
