/* The trace of a rail: its latest slices, in the node segment. One writer, the rail thread, which waits for nobody;
 * any number of readers in other processes, each of which finds out what was overwritten before or while it read. */
#ifndef RAILRELAY_TRACE_H
#define RAILRELAY_TRACE_H

#include "abi.h"
#include "atomics.h"

struct rr_trace_writer {
    struct rr_trace_record *records;
    uint64_t mask; /* records - 1; a power of two */
    uint64_t position;
};

struct rr_trace_reader {
    const struct rr_trace_record *records;
    uint64_t mask;
    uint64_t next, lost;
};

static inline void rr_trace_write(struct rr_trace_writer *w, const struct rr_trace_record *record)
{
    struct rr_trace_record *at = &w->records[++w->position & w->mask];
    rr_store_relaxed_u64(&at->position, 0);
    rr_release_fence(); /* a reader that finds a new word finds the position changed */
    rr_store_words(&at->began_ns, &record->began_ns, sizeof *at - offsetof(struct rr_trace_record, began_ns));
    rr_store_release_u64(&at->position, w->position); /* SYNC trace */
}

static inline uint64_t rr_trace_newest(const struct rr_trace_reader *r)
{
    uint64_t newest = 0;
    for (uint64_t row = 0; row <= r->mask; row++) {
        uint64_t position = rr_load_relaxed_u64(&r->records[row].position);
        if (position > newest) newest = position;
    }
    return newest;
}

/* Starts at the oldest record, or behind the newest. */
static inline void rr_trace_reader_init(struct rr_trace_reader *r, const struct rr_trace_record *records, uint64_t mask, int only_new)
{
    *r = (struct rr_trace_reader){.records = records, .mask = mask};
    uint64_t newest = rr_trace_newest(r);
    r->next = only_new ? newest + 1 : newest > mask ? newest - mask : 1;
}

/* Copies the next record and returns 1, or 0 if it is not written yet. Overwritten ones are skipped and counted. */
static inline int rr_trace_next(struct rr_trace_reader *r, struct rr_trace_record *out)
{
    for (;;) {
        const struct rr_trace_record *at = &r->records[r->next & r->mask];
        if (rr_load_acquire_u64(&at->position) == r->next) { /* SYNC trace */
            rr_copy_words(out, at, sizeof *out);
            rr_acquire_fence();
            if (rr_load_relaxed_u64(&at->position) == r->next) {
                r->next++;
                return 1;
            }
        }
        uint64_t newest = rr_trace_newest(r);
        if (newest < r->next) return 0;
        if (newest - r->next >= r->mask) { /* overwritten, or just being so; else it was published between the two looks */
            uint64_t oldest = newest - r->mask + 1;
            r->lost += oldest - r->next;
            r->next = oldest;
        }
    }
}

#endif
