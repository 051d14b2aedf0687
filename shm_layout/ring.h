/* One client's ring of a rail's SliceQueue: single producer (the client process, under its own mutex),
 * single consumer (the rail thread). Each side keeps the other's position in private memory and looks again
 * only when that says full or empty. A producer that dies before the publishing store has published nothing. */
#ifndef RAILRELAY_RING_H
#define RAILRELAY_RING_H

#include <string.h>

#include "abi.h"
#include "atomics.h"

struct rr_ring_producer {
    struct rr_ring *ring;
    struct rr_slice *slices;
    uint64_t mask; /* ring slices - 1; a power of two */
    uint64_t produced;
    uint64_t consumed_seen;
};

struct rr_ring_consumer {
    struct rr_ring *ring;
    const struct rr_slice *slices;
    uint64_t mask;
    uint64_t consumed;
    uint64_t produced_seen;
};

static inline uint64_t rr_ring_free(struct rr_ring_producer *p, uint64_t wanted)
{
    uint64_t capacity = p->mask + 1;
    if (capacity - (p->produced - p->consumed_seen) < wanted) {
        uint64_t consumed = rr_load_acquire_u64(&p->ring->consumed); /* SYNC consumed */
        if (p->produced - consumed <= capacity) p->consumed_seen = consumed;
    }
    return capacity - (p->produced - p->consumed_seen);
}

/* Publishes up to count slices with one release; returns how many. */
static inline uint32_t rr_ring_push(struct rr_ring_producer *p, const struct rr_slice *slices, uint32_t count)
{
    uint64_t room = rr_ring_free(p, count);
    if (count > room) count = (uint32_t)room;
    if (count == 0) return 0;
    uint64_t at = p->produced & p->mask;
    uint64_t first = p->mask + 1 - at;
    if (first > count) first = count;
    memcpy(p->slices + at, slices, first * sizeof *slices);
    memcpy(p->slices, slices + first, (count - first) * sizeof *slices);
    p->produced += count;
    rr_store_release_u64(&p->ring->produced, p->produced); /* SYNC produced */
    return count;
}

/* How many slices wait, or -1 if the shared position is impossible. */
static inline int64_t rr_ring_available(struct rr_ring_consumer *c)
{
    if (c->produced_seen == c->consumed) {
        uint64_t produced = rr_load_acquire_u64(&c->ring->produced); /* SYNC produced */
        if (produced - c->consumed > c->mask + 1) return -1;
        c->produced_seen = produced;
    }
    return (int64_t)(c->produced_seen - c->consumed);
}

/* Copies up to max slices out, each word once; the ring keeps them until rr_ring_release. */
static inline int64_t rr_ring_peek(struct rr_ring_consumer *c, struct rr_slice *out, uint32_t max)
{
    int64_t available = rr_ring_available(c);
    if (available <= 0) return available;
    if (available < (int64_t)max) max = (uint32_t)available;
    for (uint32_t i = 0; i < max; i++) rr_copy_words(out + i, c->slices + ((c->consumed + i) & c->mask), sizeof *out);
    return max;
}

static inline void rr_ring_release(struct rr_ring_consumer *c, uint32_t count)
{
    c->consumed += count;
    rr_store_release_u64(&c->ring->consumed, c->consumed); /* SYNC consumed */
}

/* Consumer: the slice with this ticket has ended; the producer learns of its credit. */
static inline void rr_ring_end(struct rr_ring *ring, uint64_t *completed, uint32_t ticket)
{
    rr_store_relaxed_u32(&ring->ended[*completed % RR_MAX_RING_SLICES], ticket);
    ++*completed;
    rr_store_release_u64(&ring->completed, *completed); /* SYNC ended */
}

#endif
