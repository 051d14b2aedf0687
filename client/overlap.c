/* Do the destinations of one transfer overlap? A bit for each granule of the span they cover, where that is cheap;
 * otherwise a sort. */
#include <stdlib.h>

#include "overlap.h"

#define BITS_MAX (1ull << 30)

void rc_overlap_see(struct rc_overlap *o, uint64_t address, uint64_t length)
{
    if (address < o->low) o->low = address;
    if (address + length > o->high) o->high = address + length;
    o->granule_bits |= address | length;
}

int rc_overlap_begin(struct rc_overlap *o, uint64_t count)
{
    uint64_t granule = o->granule_bits & -o->granule_bits;
    o->low = o->low / granule * granule;
    o->granules = (o->high - o->low + granule - 1) / granule;
    o->granule_bits = granule;
    if (o->granules <= BITS_MAX && o->granules <= 64 * count * 64)
        o->bits = calloc((o->granules + 63) / 64, 8);
    else
        o->spans = malloc(count * sizeof *o->spans);
    return o->bits || o->spans ? 0 : -1;
}

int rc_overlap_add(struct rc_overlap *o, uint64_t address, uint64_t length)
{
    if (!o->bits) {
        o->spans[o->span_count].start = address;
        o->spans[o->span_count++].end = address + length;
        return 0;
    }
    uint64_t at = (address - o->low) / o->granule_bits, end = at + length / o->granule_bits;
    while (at < end) {
        uint64_t word = at / 64, from = at % 64, to = end - word * 64 < 64 ? end - word * 64 : 64;
        uint64_t mask = (to == 64 ? ~0ull : (1ull << to) - 1) & ~((1ull << from) - 1);
        if (o->bits[word] & mask) return -1;
        o->bits[word] |= mask;
        at = word * 64 + to;
    }
    return 0;
}

static int by_start(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

int rc_overlap_end(struct rc_overlap *o, uint64_t *where)
{
    int status = 0;
    if (o->spans) {
        qsort(o->spans, o->span_count, sizeof *o->spans, by_start);
        for (uint64_t i = 1; i < o->span_count && !status; i++) {
            if (o->spans[i].start < o->spans[i - 1].end) {
                status = -1;
                *where = o->spans[i].start;
            }
        }
    }
    free(o->bits);
    free(o->spans);
    return status;
}
