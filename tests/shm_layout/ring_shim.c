/* The inline functions of ring.h, lane.h and trace.h for Python tests, on memory of the caller. Private state is allocated here;
 * positions may start anywhere, so that a test need not count to 2^64. */
#include <stdlib.h>

#include "lane.h"
#include "ring.h"
#include "trace.h"

struct rr_ring_producer *ring_producer(struct rr_ring *ring, struct rr_slice *slices, uint64_t capacity, uint64_t start)
{
    struct rr_ring_producer *p = malloc(sizeof *p);
    *p = (struct rr_ring_producer){ring, slices, capacity - 1, start, start};
    return p;
}

struct rr_ring_consumer *ring_consumer(struct rr_ring *ring, const struct rr_slice *slices, uint64_t capacity, uint64_t start)
{
    struct rr_ring_consumer *c = malloc(sizeof *c);
    *c = (struct rr_ring_consumer){ring, slices, capacity - 1, start, start};
    return c;
}

uint64_t ring_free(struct rr_ring_producer *p, uint64_t wanted) { return rr_ring_free(p, wanted); }
uint32_t ring_push(struct rr_ring_producer *p, const struct rr_slice *slices, uint32_t count) { return rr_ring_push(p, slices, count); }
int64_t ring_available(struct rr_ring_consumer *c) { return rr_ring_available(c); }
int64_t ring_peek(struct rr_ring_consumer *c, struct rr_slice *out, uint32_t max) { return rr_ring_peek(c, out, max); }
void ring_release(struct rr_ring_consumer *c, uint32_t count) { rr_ring_release(c, count); }

struct rr_lane_producer *lane_producer(struct rr_lane *lane, uint32_t slots, uint64_t start)
{
    struct rr_lane_producer *p = malloc(sizeof *p);
    rr_lane_producer_init(p, lane, slots);
    p->head = p->doorbell = p->completed_seen = start;
    return p;
}

struct rr_lane_consumer *lane_consumer(struct rr_lane *lane, uint32_t slots, uint64_t start)
{
    struct rr_lane_consumer *c = malloc(sizeof *c);
    rr_lane_consumer_init(c, lane, slots);
    c->head_seen = c->doorbell_seen = c->taken = c->completed = start;
    return c;
}

uint32_t lane_credit(struct rr_lane_producer *p) { return rr_lane_credit(p); }
uint32_t lane_reserve(struct rr_lane_producer *p) { return rr_lane_reserve(p); }
void lane_announce(struct rr_lane_producer *p, uint32_t slot) { rr_lane_announce(p, slot); }
void lane_ring_doorbell(struct rr_lane_producer *p) { rr_lane_ring_doorbell(p); }
int32_t lane_take(struct rr_lane_consumer *c) { return rr_lane_take(c); }
void lane_return(struct rr_lane_consumer *c, uint32_t slot) { rr_lane_return(c, slot); }
struct rr_trace_writer *trace_writer(struct rr_trace_record *records, uint64_t count, uint64_t start)
{
    struct rr_trace_writer *w = malloc(sizeof *w);
    *w = (struct rr_trace_writer){records, count - 1, start};
    return w;
}

/* All words of a record are its position. */
void trace_write(struct rr_trace_writer *w, uint64_t count)
{
    while (count--) {
        union {
            struct rr_trace_record record;
            uint64_t words[sizeof(struct rr_trace_record) / 8];
        } of;
        for (size_t i = 0; i < sizeof of.words / 8; i++) of.words[i] = w->position + 1;
        rr_trace_write(w, &of.record);
    }
}

void forget(void *private_state) { free(private_state); }
