#ifndef RAILRELAY_OVERLAP_H
#define RAILRELAY_OVERLAP_H

#include <stdint.h>

/* Start with low = UINT64_MAX; see every block (or what bounds them), begin, add every block, end. */
struct rc_overlap {
    uint64_t low, high, granule_bits, granules;
    uint64_t *bits;
    struct {
        uint64_t start, end;
    } *spans;
    uint64_t span_count;
};

void rc_overlap_see(struct rc_overlap *o, uint64_t address, uint64_t length);
int rc_overlap_begin(struct rc_overlap *o, uint64_t count);           /* -1: no memory */
int rc_overlap_add(struct rc_overlap *o, uint64_t address, uint64_t length); /* -1: overlaps one added before */
int rc_overlap_end(struct rc_overlap *o, uint64_t *where);            /* -1: two overlap at `where`. Frees. */

#endif
