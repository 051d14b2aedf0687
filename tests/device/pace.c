/* Copies at a set rate, one slot at a time, each way alone, and how the end of a slot is learnt: what do they cost the
 * matmuls beside them? */
#include <stdatomic.h>
#include <stdlib.h>

#include "copies.h"

#define MEMORY_UNIFIED 4
#define ACCESS_ORDER_STREAM 1
#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */
#define STUCK_NS 5e9

struct rg_attributes { /* CUmemcpyAttributes */
    uint32_t source_access_order;
    uint32_t source_hint[2], destination_hint[2];
    uint32_t flags;
};

struct rg_2d { /* CUDA_MEMCPY2D */
    uint64_t source_x, source_y;
    uint32_t source_type;
    const void *source_host;
    uint64_t source;
    void *source_array;
    uint64_t source_pitch;
    uint64_t destination_x, destination_y;
    uint32_t destination_type;
    void *destination_host;
    uint64_t destination;
    void *destination_array;
    uint64_t destination_pitch;
    uint64_t width, height;
};

enum way { NOTHING, STRIDED, BATCH, KERNEL };
enum end { QUERY, STREAM_WRITE, EVENT, WORD_COPY };

/* What is the same in all calls. The words of `numbers` (on the GPU, number_count of them) say 1, 2, 3... */
struct rd_pacing {
    rg_result (*cuEventRecord)(void *event, void *stream);
    void *event;
    _Atomic uint64_t *word; /* host memory, and where the GPU has it */
    uint64_t gpu_word;
    uint64_t numbers, number_count;
};

struct rd_paced {
    uint64_t slots, bytes;
    double ns;
    double copy_ns;  /* from the first call for a slot until its end was seen, all slots */
    double issue_ns; /* of that, in calls */
};

/* Each slot's pieces as one strided run every `rows` pieces. */
static rg_result copy_slot(struct rg_copier *copier, enum way way, const struct rg_piece *pieces, uint64_t count, uint32_t rows)
{
    const struct rg_api *api = copier->api;
    rg_result result = 0;
    if (way == STRIDED) {
        for (uint64_t at = 0; at + rows <= count && !result; at += rows) {
            struct rg_2d copy = {.source_type = MEMORY_UNIFIED,
                                 .source = pieces[at].source,
                                 .source_pitch = pieces[at + 1].source - pieces[at].source,
                                 .destination_type = MEMORY_UNIFIED,
                                 .destination = pieces[at].destination,
                                 .destination_pitch = pieces[at + 1].destination - pieces[at].destination,
                                 .width = pieces[at].bytes,
                                 .height = rows};
            result = api->cuMemcpy2DAsync(&copy, copier->stream);
        }
    } else if (way == BATCH && api->cuMemcpyBatchAsync) {
        struct rg_attributes attributes = {.source_access_order = ACCESS_ORDER_STREAM};
        uint64_t start = 0;
        for (uint64_t i = 0; i < count; i++) {
            copier->destinations[i] = pieces[i].destination;
            copier->sources[i] = pieces[i].source;
            copier->sizes[i] = pieces[i].bytes;
        }
        result = api->cuMemcpyBatchAsync(copier->destinations, copier->sources, copier->sizes, count, &attributes, &start, 1, copier->stream);
    } else if (way == KERNEL && copier->kernel) {
        struct rg_piece *list = rg_list(copier, 0);
        for (uint64_t i = 0; i < count; i++) list[i] = pieces[i];
        int32_t forced = copier->forced;
        copier->forced = RG_KERNEL;
        result = rg_copy(copier, 0, (uint32_t)count);
        copier->forced = forced;
    }
    return result;
}

static rg_result end_slot(const struct rg_copier *copier, const struct rd_pacing *pacing, enum end end, uint64_t number)
{
    uint64_t at = (number - 1) % pacing->number_count;
    switch (end) {
    case STREAM_WRITE: return copier->api->cuStreamWriteValue64(copier->stream, pacing->gpu_word, at + 1, 0);
    case EVENT: return pacing->cuEventRecord(pacing->event, copier->stream);
    case WORD_COPY: return copier->api->cuMemcpyAsync(pacing->gpu_word, pacing->numbers + 8 * at, 8, copier->stream);
    case QUERY: break;
    }
    return 0;
}

/* 0 or NOT_READY, or what failed. */
static rg_result has_ended(const struct rg_copier *copier, const struct rd_pacing *pacing, enum end end, uint64_t number)
{
    if (end == QUERY) return copier->api->cuStreamQuery(copier->stream);
    if (end == EVENT) return copier->api->cuEventQuery(pacing->event);
    return atomic_load_explicit(pacing->word, memory_order_acquire) == (number - 1) % pacing->number_count + 1 ? 0 : NOT_READY;
}

/* Until end_ns (CLOCK_MONOTONIC), the slots over and over; bytes_per_ns is what a NIC would take. A slot begins when it is
 * due and the one before has ended; what is more than a slot late is not made up for. */
rg_result rd_pace(struct rg_copier *copier, const struct rd_slots *slots, const struct rd_pacing *pacing, uint32_t way, uint32_t end,
                  uint32_t rows, double bytes_per_ns, double end_ns, struct rd_paced *found)
{
    rg_result result = rg_enter(copier);
    *found = (struct rd_paced){0};
    atomic_store(pacing->word, 0);
    double began = rd_now_ns(), due = began, now = began;
    for (uint64_t number = 1; !result && now < end_ns; number++) {
        uint64_t slot = number % slots->count, bytes = 0;
        const struct rg_piece *pieces = slots->pieces + slots->starts[slot];
        uint64_t count = slots->starts[slot + 1] - slots->starts[slot];
        for (uint64_t i = 0; i < count; i++) bytes += pieces[i].bytes;
        while ((now = rd_now_ns()) < due) rd_pause();
        double slot_ns = (double)bytes / bytes_per_ns;
        due = (now - due > slot_ns ? now : due) + slot_ns;
        result = copy_slot(copier, (enum way)way, pieces, count, rows);
        if (!result) result = end_slot(copier, pacing, (enum end)end, number);
        double issued = rd_now_ns();
        while (!result && (result = has_ended(copier, pacing, (enum end)end, number)) == NOT_READY) {
            if (rd_now_ns() - issued > STUCK_NS) return -1;
            result = 0;
            rd_pause();
        }
        double ended = rd_now_ns();
        found->slots++;
        found->bytes += bytes;
        found->copy_ns += ended - now;
        found->issue_ns += issued - now;
        now = ended;
    }
    found->ns = now - began;
    rg_result left = copier->api->cuStreamSynchronize(copier->stream);
    return result ? result : left;
}
