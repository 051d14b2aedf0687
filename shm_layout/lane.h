/* The lane (r, s): slots of relay memory that sender s fills for rail r. The producer is the client, the consumer the
 * rail thread. Positions are announced in order (head), filled in order (doorbell) and returned in any order
 * (completed counts returns, freed[] names them). credit = slots - (head - completed). */
#ifndef RAILRELAY_LANE_H
#define RAILRELAY_LANE_H

#include "abi.h"
#include "atomics.h"

#define RR_LANE_VIOLATION (-2)

struct rr_lane_producer {
    struct rr_lane *lane;
    uint32_t slots;
    uint32_t free_count;
    uint64_t head;
    uint64_t doorbell;
    uint64_t completed_seen;
    uint16_t free_slots[RR_MAX_SLOTS];
    uint8_t is_free[RR_MAX_SLOTS];
};

struct rr_lane_consumer {
    struct rr_lane *lane;
    uint32_t slots;
    uint32_t reserved;
    uint64_t head_seen;
    uint64_t doorbell_seen;
    uint64_t taken;
    uint64_t completed;
    uint8_t in_use[RR_MAX_SLOTS];
};

static inline void rr_lane_producer_init(struct rr_lane_producer *p, struct rr_lane *lane, uint32_t slots)
{
    p->lane = lane;
    p->slots = slots;
    p->head = p->doorbell = p->completed_seen = 0;
    p->free_count = slots;
    for (uint32_t i = 0; i < slots; i++) {
        p->free_slots[i] = (uint16_t)(slots - 1 - i);
        p->is_free[i] = 1;
    }
}

static inline void rr_lane_consumer_init(struct rr_lane_consumer *c, struct rr_lane *lane, uint32_t slots)
{
    c->lane = lane;
    c->slots = slots;
    c->reserved = 0;
    c->head_seen = c->doorbell_seen = c->taken = c->completed = 0;
    for (uint32_t i = 0; i < RR_MAX_SLOTS; i++) c->in_use[i] = 0;
}

/* Producer: slots that may be reserved now. */
static inline uint32_t rr_lane_credit(struct rr_lane_producer *p)
{
    uint64_t completed = rr_load_acquire_u64(&p->lane->completed); /* SYNC completed */
    if (completed - p->completed_seen > p->head - p->completed_seen) completed = p->completed_seen;
    while (p->completed_seen != completed) {
        uint32_t slot = rr_load_relaxed_u32(&p->lane->freed[p->completed_seen % RR_MAX_SLOTS]);
        p->completed_seen++;
        if (slot < p->slots && !p->is_free[slot]) {
            p->is_free[slot] = 1;
            p->free_slots[p->free_count++] = (uint16_t)slot;
        }
    }
    return p->free_count;
}

/* Producer: takes a slot; the caller has credit. Nothing is visible until rr_lane_announce. */
static inline uint32_t rr_lane_reserve(struct rr_lane_producer *p)
{
    uint32_t slot = p->free_slots[--p->free_count];
    p->is_free[slot] = 0;
    return slot;
}

static inline void rr_lane_announce(struct rr_lane_producer *p, uint32_t slot)
{
    rr_store_relaxed_u32(&p->lane->announce[p->head % RR_MAX_SLOTS], slot);
    p->head++;
    rr_store_release_u64(&p->lane->head, p->head); /* SYNC head */
}

/* Producer: the oldest announced slot and its table are filled (host memory; a GPU stream writes the same word). */
static inline void rr_lane_ring_doorbell(struct rr_lane_producer *p)
{
    p->doorbell++;
    rr_store_release_u64(&p->lane->doorbell, p->doorbell); /* SYNC doorbell */
}

/* Consumer: next filled slot, -1 if none, RR_LANE_VIOLATION if completed <= doorbell <= head <= completed + slots
 * does not hold or the slot named is out of range or already held. Doorbell is read before head: head may run ahead
 * between the two loads, doorbell must not. */
static inline int32_t rr_lane_take(struct rr_lane_consumer *c)
{
    if (c->taken == c->doorbell_seen) {
        uint64_t doorbell = rr_load_acquire_u64(&c->lane->doorbell); /* SYNC doorbell */
        uint64_t head = rr_load_acquire_u64(&c->lane->head);         /* SYNC head */
        if (doorbell - c->completed > c->slots || head - c->completed > c->slots ||
            doorbell - c->completed > head - c->completed ||
            doorbell - c->completed < c->doorbell_seen - c->completed)
            return RR_LANE_VIOLATION;
        c->doorbell_seen = doorbell;
        c->head_seen = head;
        if (c->taken == doorbell) return -1;
    }
    uint32_t slot = rr_load_relaxed_u32(&c->lane->announce[c->taken % RR_MAX_SLOTS]);
    if (slot >= c->slots || c->in_use[slot]) return RR_LANE_VIOLATION;
    c->in_use[slot] = 1;
    c->taken++;
    return (int32_t)slot;
}

/* Consumer: nothing reads the slot any more. */
static inline void rr_lane_return(struct rr_lane_consumer *c, uint32_t slot)
{
    c->in_use[slot] = 0;
    rr_store_relaxed_u32(&c->lane->freed[c->completed % RR_MAX_SLOTS], slot);
    c->completed++;
    rr_store_release_u64(&c->lane->completed, c->completed); /* SYNC completed */
}

#endif
