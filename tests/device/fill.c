/* Slots filled by a bare loop over ready arrays, and as the feeder fills them. Each call ends with an empty stream. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "copies.h"

#define PITCH_MAX 0x7fffffffull
#define STUCK_NS 2e9 /* of one slot: the stream has failed, and says so when asked */

uint64_t rd_copier_bytes(void) { return sizeof(struct rg_copier); }

void rd_force(struct rg_copier *copier, int32_t way) { copier->forced = way; }

void rd_thread_blocks(struct rg_copier *copier, uint32_t count) { copier->thread_blocks = count; }

void rd_counters(const struct rg_copier *copier, struct rg_counters *counters) { *counters = copier->counters; }

void rd_costs(const struct rg_copier *copier, struct rg_costs *costs) { *costs = copier->costs; }

static rg_result finish(const struct rg_copier *copier, rg_result result, double begin, double issued, struct rd_time *time)
{
    rg_result ended = copier->api->cuStreamSynchronize(copier->stream);
    *time = (struct rd_time){rd_now_ns() - begin, issued - begin};
    return result ? result : ended;
}

/* cuMemcpyBatchAsync with arrays that were ready before. -1: no memory for them. */
rg_result rd_bare_batches(const struct rg_copier *copier, const struct rd_slots *slots, struct rd_time *time)
{
    uint64_t pieces = slots->starts[slots->count], start = 0;
    struct rg_attributes attributes = {.source_access_order = ACCESS_ORDER_STREAM};
    uint64_t *destinations = calloc(pieces, 3 * sizeof(uint64_t)), *sources = destinations + pieces, *sizes = sources + pieces;
    if (!destinations) return -1;
    for (uint64_t i = 0; i < pieces; i++) {
        destinations[i] = slots->pieces[i].destination;
        sources[i] = slots->pieces[i].source;
        sizes[i] = slots->pieces[i].bytes;
    }
    rg_result result = rg_enter(copier);
    double begin = rd_now_ns();
    for (uint64_t i = 0; i < slots->count && !result; i++) {
        uint64_t first = slots->starts[i];
        result = copier->api->cuMemcpyBatchAsync(destinations + first, sources + first, sizes + first, slots->starts[i + 1] - first, &attributes,
                                                 &start, 1, copier->stream);
    }
    result = finish(copier, result, begin, rd_now_ns(), time);
    free(destinations);
    return result;
}

/* Pieces from here on that are equal and at constant distances. */
static uint64_t run_of(const struct rd_piece *piece, uint64_t count)
{
    uint64_t rows = count < 2 ? count : 2;
    if (rows == 2 && (piece[1].bytes != piece->bytes || piece[1].source - piece->source > PITCH_MAX ||
                      piece[1].destination - piece->destination > PITCH_MAX))
        return 1;
    while (rows >= 2 && rows < count && piece[rows].bytes == piece->bytes &&
           piece[rows].source - piece[rows - 1].source == piece[1].source - piece->source &&
           piece[rows].destination - piece[rows - 1].destination == piece[1].destination - piece->destination)
        rows++;
    return rows;
}

/* cuMemcpy2DAsync with structures that were ready before, one for each strided run. -1: no memory for them. */
rg_result rd_bare_2d(const struct rg_copier *copier, const struct rd_slots *slots, struct rd_time *time)
{
    struct rg_2d *copies = calloc(slots->starts[slots->count], sizeof *copies);
    uint64_t count = 0;
    if (!copies) return -1;
    for (uint64_t i = 0; i < slots->count; i++) {
        for (uint64_t at = slots->starts[i], end = slots->starts[i + 1], rows; at < end; at += rows) {
            const struct rd_piece *piece = slots->pieces + at;
            rows = run_of(piece, end - at);
            copies[count++] = (struct rg_2d){.source_type = MEMORY_UNIFIED,
                                             .source = piece->source,
                                             .source_pitch = rows > 1 ? piece[1].source - piece->source : piece->bytes,
                                             .destination_type = MEMORY_UNIFIED,
                                             .destination = piece->destination,
                                             .destination_pitch = rows > 1 ? piece[1].destination - piece->destination : piece->bytes,
                                             .width = piece->bytes,
                                             .height = rows};
        }
    }
    rg_result result = rg_enter(copier);
    double begin = rd_now_ns();
    for (uint64_t i = 0; i < count && !result; i++) result = copier->api->cuMemcpy2DAsync(copies + i, copier->stream);
    result = finish(copier, result, begin, rd_now_ns(), time);
    free(copies);
    return result;
}

/* The runs of each slot's pieces, at most one a piece, and where each slot's begin. */
void rd_list_runs(const struct rd_slots *slots, struct rg_run *runs, uint64_t *run_starts)
{
    struct rg_listing listing = {runs, 0, 0};
    for (uint64_t i = 0; i < slots->count; i++) {
        listing.runs += listing.count;
        listing.count = 0;
        listing.max = (uint32_t)(slots->starts[i + 1] - slots->starts[i]);
        run_starts[i] = (uint64_t)(listing.runs - runs);
        for (uint64_t at = slots->starts[i]; at < slots->starts[i + 1]; at++) rg_add(&listing, rd_run_of(slots->pieces[at]));
    }
    run_starts[slots->count] = (uint64_t)(listing.runs + listing.count - runs);
}

/* As the feeder does it: list the runs of a slot, copy, ring. A list is written again once its slot's doorbell was
 * seen. doorbell_word: where the GPU's writes to the address `doorbell` appear; 0 at first. */
rg_result rd_feed(struct rg_copier *copier, const struct rd_slots *slots, _Atomic uint64_t *doorbell_word, uint64_t doorbell, uint32_t flags,
                  struct rd_time *time)
{
    rg_result result = rg_enter(copier);
    atomic_store(doorbell_word, 0);
    double begin = rd_now_ns();
    for (uint64_t i = 0; i < slots->count && !result; i++) {
        uint32_t list = (uint32_t)(i % copier->list_count), count = (uint32_t)(slots->run_starts[i + 1] - slots->run_starts[i]);
        double since = rd_now_ns();
        while (i >= copier->list_count && atomic_load_explicit(doorbell_word, memory_order_acquire) < i - copier->list_count + 1) {
            if (rd_now_ns() - since > STUCK_NS) return copier->api->cuStreamSynchronize(copier->stream);
            rd_pause();
        }
        memcpy(rg_list(copier, list).runs, slots->runs + slots->run_starts[i], count * sizeof *slots->runs);
        result = rg_copy(copier, list, count);
        if (!result) result = rg_signal(copier, doorbell, i + 1);
        if (!result && flags & SYNCHRONIZE) result = copier->api->cuStreamSynchronize(copier->stream);
    }
    return finish(copier, result, begin, rd_now_ns(), time);
}

/* From just before the issue of a doorbell on an idle stream until this thread sees it: ns, rounds of them. */
rg_result rd_ring(struct rg_copier *copier, _Atomic uint64_t *doorbell_word, uint64_t doorbell, uint32_t rounds, double *seen_ns, double *issue_ns)
{
    rg_result result = rg_enter(copier);
    atomic_store(doorbell_word, 0);
    for (uint64_t i = 0; i < rounds && !result; i++) {
        double begin = rd_now_ns();
        result = rg_signal(copier, doorbell, i + 1);
        issue_ns[i] = rd_now_ns() - begin;
        while (!result && atomic_load_explicit(doorbell_word, memory_order_acquire) != i + 1) {
            if (rd_now_ns() - begin > STUCK_NS) return copier->api->cuStreamSynchronize(copier->stream);
            rd_pause();
        }
        seen_ns[i] = rd_now_ns() - begin;
        double idle_until = rd_now_ns() + 20e3;
        while (rd_now_ns() < idle_until) rd_pause();
    }
    return result;
}

/* Spins on a word of shared memory, which another process or the GPU raises one by one: when each value from `first` on
 * was seen, CLOCK_MONOTONIC. Returns how many were; ends timeout_ns after the last. */
uint64_t rd_watch(const _Atomic uint64_t *word, uint64_t first, uint64_t count, double timeout_ns, double *seen_ns)
{
    double last = rd_now_ns();
    for (uint64_t i = 0; i < count;) {
        uint64_t value = atomic_load_explicit(word, memory_order_acquire);
        double now = rd_now_ns();
        while (i < count && first + i <= value) seen_ns[i++] = last = now;
        if (now - last > timeout_ns) return i;
        rd_pause();
    }
    return count;
}
