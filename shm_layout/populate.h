/* Maps pages ahead, so that the first transfer does not take a fault for each. */
#ifndef RAILRELAY_POPULATE_H
#define RAILRELAY_POPULATE_H

#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it, and pages are then mapped on first use */
#endif
#define RR_POPULATE_PAGES 4096u /* a step, so that page tables are not locked for long */

/* Of shared memory that another process has made: only pages that it has filled. To fill its holes would be to take
 * memory for whoever makes a large file. -1 at the first refusal, as of a range that is not mapped any more. */
static inline int rr_populate_resident(uint8_t *base, uint64_t bytes)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    unsigned char resident[RR_POPULATE_PAGES];
    while (bytes) {
        uint64_t step = bytes < RR_POPULATE_PAGES * page ? bytes : RR_POPULATE_PAGES * page;
        uint64_t pages = (step + page - 1) / page;
        if (mincore(base, step, resident)) return -1;
        for (uint64_t first = 0, end; first < pages; first = end) {
            for (end = first + 1; end < pages && (resident[end] & 1) == (resident[first] & 1);) end++;
            if (resident[first] & 1 && madvise(base + first * page, (end - first) * page, MADV_POPULATE_WRITE)) return -1;
        }
        base += step;
        bytes -= step;
    }
    return 0;
}

#endif
