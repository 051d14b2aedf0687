/* The SliceQueue (one ring.h ring per producer process) against a Vyukov bounded queue: producers are processes, one
 * consumer, 64-byte slices, batches of 32 on both sides, the same capacity, the same idling, pairs of runs in
 * alternating order. The Vyukov queue is spared the consumer's compare-and-swap, since there is one consumer.
 * Exits 1 if the median ratio misses the target for one or two producers.
 *
 *   slice_queue_bench [pairs]
 */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "ring.h"
#include "sleep.h"

#define MOST_PRODUCERS 4u
#define MOST_PAIRS 101u
#define CAPACITY 1024u /* slices per producer */
#define BATCH 32u
#define RUN_SLICES (6u << 20)
#define TARGET 1.5

struct cell {
    uint64_t sequence;
    struct rr_slice slice;
} __attribute__((aligned(RR_LINE_BYTES)));

struct shared {
    uint32_t go __attribute__((aligned(RR_LINE_BYTES)));
    uint64_t enqueued __attribute__((aligned(RR_LINE_BYTES)));
    struct rr_ring rings[MOST_PRODUCERS];
    struct rr_slice slices[MOST_PRODUCERS][CAPACITY] __attribute__((aligned(RR_LINE_BYTES)));
    struct cell cells[MOST_PRODUCERS * CAPACITY] __attribute__((aligned(RR_LINE_BYTES)));
};

static struct shared *shared;
static uint64_t cell_mask;

static void idle(unsigned *rounds)
{
    if (++*rounds % 32 == 0)
        sched_yield();
    else
        rr_pause();
}

static int enqueue(const struct rr_slice *slice)
{
    uint64_t position = __atomic_load_n(&shared->enqueued, __ATOMIC_RELAXED);
    for (;;) {
        struct cell *cell = &shared->cells[position & cell_mask];
        int64_t ahead = (int64_t)(__atomic_load_n(&cell->sequence, __ATOMIC_ACQUIRE) - position);
        if (ahead == 0) {
            if (__atomic_compare_exchange_n(&shared->enqueued, &position, position + 1, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
                cell->slice = *slice;
                __atomic_store_n(&cell->sequence, position + 1, __ATOMIC_RELEASE);
                return 1;
            }
        } else if (ahead < 0) {
            return 0;
        } else {
            position = __atomic_load_n(&shared->enqueued, __ATOMIC_RELAXED);
        }
    }
}

static int dequeue(uint64_t *position, struct rr_slice *slice)
{
    struct cell *cell = &shared->cells[*position & cell_mask];
    if (__atomic_load_n(&cell->sequence, __ATOMIC_ACQUIRE) != *position + 1) return 0;
    *slice = cell->slice;
    __atomic_store_n(&cell->sequence, *position + cell_mask + 1, __ATOMIC_RELEASE);
    ++*position;
    return 1;
}

static void produce(int vyukov, uint32_t producer, uint64_t total)
{
    struct rr_ring_producer ring = {&shared->rings[producer], shared->slices[producer], CAPACITY - 1, 0, 0};
    struct rr_slice batch[BATCH];
    unsigned idled = 0;
    memset(batch, 0, sizeof batch);
    for (uint32_t i = 0; i < BATCH; i++) batch[i].transfer = producer;
    while (!rr_load_acquire_u32(&shared->go)) idle(&idled);
    for (uint64_t sent = 0; sent < total; sent += BATCH) {
        for (uint32_t i = 0; i < BATCH; i++) batch[i].inline_source = sent + i;
        for (uint32_t done = 0; done < BATCH;) {
            uint32_t pushed = 0;
            if (vyukov)
                while (done + pushed < BATCH && enqueue(&batch[done + pushed])) pushed++;
            else
                pushed = rr_ring_push(&ring, batch + done, BATCH - done);
            done += pushed;
            if (pushed == 0) idle(&idled);
        }
    }
}

static void check(const struct rr_slice *slices, int64_t count, uint64_t *next)
{
    for (int64_t i = 0; i < count; i++) {
        if (slices[i].inline_source != next[slices[i].transfer]++) {
            fprintf(stderr, "slice_queue_bench: a slice is missing or out of order\n");
            exit(2);
        }
    }
}

/* Runs one queue, returns millions of slices a second. */
static double measure(int vyukov, uint32_t producers)
{
    uint64_t total = RUN_SLICES / producers / BATCH * BATCH, left = total * producers;
    uint64_t next[MOST_PRODUCERS] = {0}, position = 0;
    struct rr_ring_consumer consumers[MOST_PRODUCERS];
    struct rr_slice out[BATCH];
    unsigned idled = 0;
    pid_t children[MOST_PRODUCERS];

    memset(shared, 0, sizeof *shared);
    cell_mask = (uint64_t)producers * CAPACITY - 1;
    for (uint64_t i = 0; i <= cell_mask; i++) shared->cells[i].sequence = i;
    for (uint32_t p = 0; p < producers; p++)
        consumers[p] = (struct rr_ring_consumer){&shared->rings[p], shared->slices[p], CAPACITY - 1, 0, 0};
    for (uint32_t p = 0; p < producers; p++) {
        children[p] = fork();
        if (children[p] < 0) exit(2);
        if (children[p] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            produce(vyukov, p, total);
            _exit(0);
        }
    }
    uint64_t start_ns = rr_now_ns();
    rr_store_release_u32(&shared->go, 1);
    while (left != 0) {
        uint64_t before = left;
        if (vyukov) {
            uint32_t count = 0;
            while (count < BATCH && dequeue(&position, &out[count])) count++;
            check(out, count, next);
            left -= count;
        } else {
            for (uint32_t p = 0; p < producers; p++) {
                int64_t count = rr_ring_peek(&consumers[p], out, BATCH);
                if (count <= 0) continue;
                check(out, count, next);
                rr_ring_release(&consumers[p], (uint32_t)count);
                left -= (uint64_t)count;
            }
        }
        if (left == before) idle(&idled);
    }
    double ns = (double)(rr_now_ns() - start_ns);
    for (uint32_t p = 0; p < producers; p++) waitpid(children[p], NULL, 0);
    return (double)(total * producers) * 1000.0 / ns;
}

/* One processor fills a whole ring and then drains it: the rates of both sides while no cache line has to move. */
static void measure_alone(double *push, double *peek)
{
    struct rr_ring_producer producer = {&shared->rings[0], shared->slices[0], CAPACITY - 1, 0, 0};
    struct rr_ring_consumer consumer = {&shared->rings[0], shared->slices[0], CAPACITY - 1, 0, 0};
    struct rr_slice batch[BATCH], out[BATCH];
    uint64_t next[MOST_PRODUCERS] = {0}, push_ns = 0, peek_ns = 0;
    memset(shared, 0, sizeof *shared);
    memset(batch, 0, sizeof batch);
    for (uint64_t sent = 0; sent < RUN_SLICES; sent += CAPACITY) {
        uint64_t start_ns = rr_now_ns();
        for (uint64_t i = 0; i < CAPACITY; i += BATCH) {
            for (uint32_t k = 0; k < BATCH; k++) batch[k].inline_source = sent + i + k;
            rr_ring_push(&producer, batch, BATCH);
        }
        uint64_t filled_ns = rr_now_ns();
        for (uint64_t i = 0; i < CAPACITY; i += BATCH) {
            check(out, rr_ring_peek(&consumer, out, BATCH), next);
            rr_ring_release(&consumer, BATCH);
        }
        push_ns += filled_ns - start_ns;
        peek_ns += rr_now_ns() - filled_ns;
    }
    *push = RUN_SLICES * 1000.0 / (double)push_ns;
    *peek = RUN_SLICES * 1000.0 / (double)peek_ns;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double quantile(double *values, unsigned count, double q)
{
    qsort(values, count, sizeof *values, by_value);
    return values[(unsigned)(q * (count - 1) + 0.5)];
}

int main(int argc, char **argv)
{
    static const uint32_t producer_counts[] = {1, 2, 4};
    double ours[MOST_PAIRS], theirs[MOST_PAIRS], ratios[MOST_PAIRS];
    unsigned pairs = argc > 1 ? (unsigned)atoi(argv[1]) : 15;
    int missed = 0;
    if (pairs == 0 || pairs > MOST_PAIRS) pairs = MOST_PAIRS;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return 2;

    double push, peek;
    measure_alone(&push, &peek);
    printf("limit: with no cache line to move, a producer fills %.0f M slices/s and the consumer drains %.0f\n", push, peek);
    printf("producers  SliceQueue  Vyukov  M slices/s; median ratio of %u pairs (quartiles)\n", pairs);
    for (unsigned n = 0; n < sizeof producer_counts / sizeof *producer_counts; n++) {
        uint32_t producers = producer_counts[n];
        measure(0, producers);
        measure(1, producers);
        for (unsigned pair = 0; pair < pairs; pair++) {
            int vyukov_first = pair % 2 != 0;
            double first = measure(vyukov_first, producers), second = measure(!vyukov_first, producers);
            ours[pair] = vyukov_first ? second : first;
            theirs[pair] = vyukov_first ? first : second;
            ratios[pair] = ours[pair] / theirs[pair];
        }
        double ratio = quantile(ratios, pairs, 0.5);
        printf("%9u  %10.0f  %6.0f  %.2f (%.2f to %.2f)\n", producers, quantile(ours, pairs, 0.5), quantile(theirs, pairs, 0.5),
               ratio, quantile(ratios, pairs, 0.25), quantile(ratios, pairs, 0.75));
        missed |= producers <= 2 && ratio < TARGET;
    }
    printf("target %.1f for 1 and 2 producers: %s\n", TARGET, missed ? "missed" : "met");
    return missed;
}
