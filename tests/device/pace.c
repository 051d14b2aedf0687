/* Copies at a set rate, one slot at a time, each way alone, and how the end of a slot is learnt: what do they cost the
 * matmuls beside them? */
#include <stdatomic.h>
#include <stdlib.h>

#include "copies.h"

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */
#define STUCK_NS 5e9

struct op_operand {
    uint32_t type;
    uint64_t address, row_bytes, layer_rows;
    uint32_t hint[2];
};

struct op_3d { /* CUDA_MEMCPY3D_BATCH_OP */
    struct op_operand source, destination;
    uint64_t width, height, depth;
    uint32_t source_access_order, flags;
};
_Static_assert(sizeof(struct op_3d) == 112, "CUDA_MEMCPY3D_BATCH_OP");

#define OPERAND_POINTER 1
#define PREFER_OVERLAP 1 /* CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE */
#define OPS_MAX 64u

enum way { NOTHING, STRIDED, BATCH, KERNEL, STRIDED_OVERLAP, BATCH_OVERLAP, HOPS };
enum end { QUERY, STREAM_WRITE, EVENT, WORD_COPY };

/* What is the same in all calls. The words of `numbers` (on the GPU, number_count of them) say 1, 2, 3... */
struct rd_pacing {
    rg_result (*cuEventRecord)(void *event, void *stream);
    void *event;
    _Atomic uint64_t *word; /* host memory, and where the GPU has it */
    uint64_t gpu_word;
    uint64_t numbers, number_count;
    rg_result (*cuMemcpy3DBatchAsync)(uint64_t count, struct op_3d *operations, unsigned long long flags, void *stream); /* or NULL */
    uint64_t hop; /* a slot in the memory of another GPU */
};

struct rd_paced {
    uint64_t slots, bytes;
    double ns;
    double copy_ns;  /* from the first call for a slot until its end was seen, all slots */
    double issue_ns; /* of that, in calls */
};

static rg_result copy_2d(const struct rg_copier *copier, const struct rd_piece *piece, uint32_t rows, uint64_t source, uint64_t source_pitch)
{
    struct rg_2d copy = {.source_type = MEMORY_UNIFIED,
                         .source = source,
                         .source_pitch = source_pitch,
                         .destination_type = MEMORY_UNIFIED,
                         .destination = piece->destination,
                         .destination_pitch = piece[1].destination - piece->destination,
                         .width = piece->bytes,
                         .height = rows};
    return copier->api->cuMemcpy2DAsync(&copy, copier->stream);
}

static rg_result copy_strided(const struct rg_copier *copier, const struct rd_piece *pieces, uint64_t count, uint32_t rows)
{
    rg_result result = 0;
    for (uint64_t at = 0; at + rows <= count && !result; at += rows)
        result = copy_2d(copier, pieces + at, rows, pieces[at].source, pieces[at + 1].source - pieces[at].source);
    return result;
}

/* The slot, which is contiguous, to another GPU, and from there to the pages: both are copies between GPUs. */
static rg_result copy_by_hops(const struct rg_copier *copier, uint64_t hop, const struct rd_piece *pieces, uint64_t count, uint32_t rows)
{
    uint64_t of_page = (uint64_t)rows * pieces->bytes;
    rg_result result = copier->api->cuMemcpyAsync(hop, pieces->source, count / rows * of_page, copier->stream);
    for (uint64_t at = 0; at + rows <= count && !result; at += rows)
        result = copy_2d(copier, pieces + at, rows, hop + at / rows * of_page, pieces->bytes);
    return result;
}

static rg_result copy_strided_overlap(const struct rg_copier *copier, const struct rd_pacing *pacing, const struct rd_piece *pieces,
                                      uint64_t count, uint32_t rows)
{
    struct op_3d operations[OPS_MAX];
    uint64_t ops = 0;
    for (uint64_t at = 0; at + rows <= count && ops < OPS_MAX; at += rows)
        operations[ops++] = (struct op_3d){
            .source = {OPERAND_POINTER, pieces[at].source, pieces[at + 1].source - pieces[at].source, rows, {0, 0}},
            .destination = {OPERAND_POINTER, pieces[at].destination, pieces[at + 1].destination - pieces[at].destination, rows, {0, 0}},
            .width = pieces[at].bytes,
            .height = rows,
            .depth = 1,
            .source_access_order = ACCESS_ORDER_STREAM,
            .flags = PREFER_OVERLAP};
    return pacing->cuMemcpy3DBatchAsync(ops, operations, 0, copier->stream);
}

static rg_result copy_batch(const struct rg_copier *copier, const struct rd_piece *pieces, uint64_t count, uint32_t flags)
{
    struct rg_attributes attributes = {.source_access_order = ACCESS_ORDER_STREAM, .flags = flags};
    uint64_t start = 0;
    for (uint64_t i = 0; i < count; i++) {
        copier->destinations[i] = pieces[i].destination;
        copier->sources[i] = pieces[i].source;
        copier->sizes[i] = pieces[i].bytes;
    }
    return copier->api->cuMemcpyBatchAsync(copier->destinations, copier->sources, copier->sizes, count, &attributes, &start, 1, copier->stream);
}

static rg_result copy_by_kernel(struct rg_copier *copier, const struct rd_piece *pieces, uint64_t count)
{
    struct rg_listing listing = rg_list(copier, 0);
    int32_t forced = copier->forced;
    for (uint64_t i = 0; i < count; i++) rg_add(&listing, rd_run_of(pieces[i]));
    copier->forced = RG_KERNEL;
    rg_result result = rg_copy(copier, 0, listing.count);
    copier->forced = forced;
    return result;
}

/* A slot's pieces are pages of `rows` pieces, each a strided run. */
static rg_result copy_slot(struct rg_copier *copier, const struct rd_pacing *pacing, enum way way, const struct rd_piece *pieces,
                           uint64_t count, uint32_t rows)
{
    switch (way) {
    case STRIDED: return copy_strided(copier, pieces, count, rows);
    case BATCH: return copy_batch(copier, pieces, count, 0);
    case KERNEL: return copy_by_kernel(copier, pieces, count);
    case STRIDED_OVERLAP: return copy_strided_overlap(copier, pacing, pieces, count, rows);
    case BATCH_OVERLAP: return copy_batch(copier, pieces, count, PREFER_OVERLAP);
    case HOPS: return copy_by_hops(copier, pacing->hop, pieces, count, rows);
    case NOTHING: break;
    }
    return 0;
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
        const struct rd_piece *pieces = slots->pieces + slots->starts[slot];
        uint64_t count = slots->starts[slot + 1] - slots->starts[slot];
        for (uint64_t i = 0; i < count; i++) bytes += pieces[i].bytes;
        while ((now = rd_now_ns()) < due) rd_pause();
        double slot_ns = (double)bytes / bytes_per_ns;
        due = (now - due > slot_ns ? now : due) + slot_ns;
        result = copy_slot(copier, pacing, (enum way)way, pieces, count, rows);
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
