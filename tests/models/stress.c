/* The real ring.h, lane.h, trace.h and sleep.h under load, for ThreadSanitizer and AddressSanitizer (tests/models/run builds
 * it against the product headers and against mutated copies). One process stands for all: threads are clients, the
 * main thread is the rail. Exits 0 if every word that arrived is the word that was sent.
 *
 *   stress ring | ring-ended | ring-hostile | lane | lane-hostile | trace | sleep
 */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "lane.h"
#include "ring.h"
#include "sleep.h"
#include "trace.h"

#define CLIENTS 3u

#define REQUIRE(condition, ...) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "stress: " __VA_ARGS__); \
            fprintf(stderr, " (%s)\n", #condition); \
            exit(1); \
        } \
    } while (0)

static void *allocate(size_t bytes)
{
    void *memory = aligned_alloc(RR_LINE_BYTES, (bytes + RR_LINE_BYTES - 1) / RR_LINE_BYTES * RR_LINE_BYTES);
    REQUIRE(memory != NULL, "out of memory");
    memset(memory, 0, bytes);
    return memory;
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void start(pthread_t *thread, void *(*body)(void *), void *argument)
{
    REQUIRE(pthread_create(thread, NULL, body, argument) == 0, "pthread_create");
}

#define RING_SLICES 64u
#define RING_BATCH 32u
#define RING_TOTAL 400000u

#define RING_HELD 16u

struct held_slice {
    uint64_t sequence;
    uint32_t position;
};

struct ring_pair {
    struct rr_ring_producer producer;
    struct rr_ring_consumer consumer;
    uint64_t *tables; /* by position: the rail reads it until it ends the slice; NULL: nobody asks when slices end */
    uint32_t client;
    uint64_t completed_seen;          /* producer */
    uint8_t under_way[RING_SLICES];   /* producer, by position */
    uint64_t taken, completed;        /* rail */
    struct held_slice held[RING_HELD];
    uint32_t held_count;
};

static struct rr_slice make_slice(uint32_t client, uint64_t sequence)
{
    struct rr_slice slice;
    uint64_t words[sizeof slice / 8];
    for (unsigned word = 0; word < sizeof slice / 8; word++) words[word] = (sequence << 8 | client) * (2 * word + 1);
    memcpy(&slice, words, sizeof slice);
    return slice;
}

static void make_ring(struct ring_pair *pair, uint32_t client, int ends)
{
    struct rr_ring *ring = allocate(sizeof *ring);
    struct rr_slice *slices = allocate(RING_SLICES * sizeof *slices);
    pair->producer = (struct rr_ring_producer){ring, slices, RING_SLICES - 1, 0, 0};
    pair->consumer = (struct rr_ring_consumer){ring, slices, RING_SLICES - 1, 0, 0};
    pair->tables = ends ? allocate(RING_SLICES * sizeof *pair->tables) : NULL;
    pair->client = client;
}

static void see_ended(struct ring_pair *pair)
{
    struct rr_ring *ring = pair->producer.ring;
    uint64_t completed = rr_load_acquire_u64(&ring->completed); /* SYNC ended */
    REQUIRE(completed - pair->completed_seen <= RING_SLICES, "client %u: more ended than pushed", pair->client);
    for (; pair->completed_seen != completed; pair->completed_seen++) {
        uint32_t position = rr_load_relaxed_u32(&ring->ended[pair->completed_seen % RR_MAX_RING_SLICES]);
        REQUIRE(position < RING_SLICES && pair->under_way[position], "client %u: position %u ended twice", pair->client, position);
        pair->under_way[position] = 0;
    }
}

static void *ring_client(void *argument)
{
    struct ring_pair *pair = argument;
    struct rr_slice batch[RING_BATCH];
    uint64_t sent = 0, random = 77 + pair->client;
    while (sent < RING_TOTAL) {
        uint32_t wanted = 1 + (uint32_t)(next_random(&random) % RING_BATCH), count = 0;
        if (pair->tables) see_ended(pair);
        for (; count < wanted && sent + count < RING_TOTAL; count++) {
            uint32_t position = (uint32_t)((sent + count) % RING_SLICES);
            if (pair->under_way[position]) break;
            if (pair->tables) {
                pair->under_way[position] = 1;
                pair->tables[position] = sent + count;
            }
            batch[count] = make_slice(pair->client, sent + count);
        }
        for (uint32_t done = 0; done < count;) {
            uint32_t pushed = rr_ring_push(&pair->producer, batch + done, count - done);
            done += pushed;
            if (pushed == 0) sched_yield();
        }
        sent += count;
        if (count == 0) sched_yield();
    }
    return NULL;
}

/* Slices end in any order. */
static void end_one(struct ring_pair *pair, uint64_t *random)
{
    uint32_t at = (uint32_t)(next_random(random) % pair->held_count);
    struct held_slice held = pair->held[at];
    pair->held[at] = pair->held[--pair->held_count];
    REQUIRE(pair->tables[held.position] == held.sequence, "client %u: table of slice %llu is another's", pair->client,
            (unsigned long long)held.sequence);
    rr_ring_end(pair->consumer.ring, &pair->completed, held.position);
}

static int run_ring(int ends)
{
    static struct ring_pair pairs[CLIENTS];
    pthread_t threads[CLIENTS];
    struct rr_slice out[RING_BATCH];
    uint64_t random = 5, left = (uint64_t)CLIENTS * RING_TOTAL;
    for (uint32_t client = 0; client < CLIENTS; client++) make_ring(&pairs[client], client, ends);
    for (uint32_t client = 0; client < CLIENTS; client++) start(&threads[client], ring_client, &pairs[client]);
    while (left != 0) {
        uint64_t before = left;
        for (uint32_t client = 0; client < CLIENTS; client++) {
            struct ring_pair *pair = &pairs[client];
            int64_t count = rr_ring_peek(&pair->consumer, out, 1 + (uint32_t)(next_random(&random) % RING_BATCH));
            REQUIRE(count >= 0, "ring of client %u reports a violation", client);
            for (int64_t i = 0; i < count; i++) {
                struct rr_slice expected = make_slice(client, pair->taken);
                REQUIRE(memcmp(&out[i], &expected, sizeof expected) == 0, "client %u: slice %llu is not what was sent",
                        client, (unsigned long long)pair->taken);
                if (pair->held_count == RING_HELD) end_one(pair, &random);
                if (ends) pair->held[pair->held_count++] = (struct held_slice){pair->taken, (uint32_t)(pair->taken % RING_SLICES)};
                pair->taken++;
            }
            if (count > 0)
                rr_ring_release(&pair->consumer, (uint32_t)count);
            else if (pair->held_count != 0)
                end_one(pair, &random);
            left -= (uint64_t)count;
        }
        if (left == before) sched_yield();
    }
    for (uint32_t client = 0; client < CLIENTS; client++) pthread_join(threads[client], NULL);
    return 0;
}

static int stress_ring(void) { return run_ring(0); }
static int stress_ring_ended(void) { return run_ring(1); }

/* A position that is possible, nearly possible, or anything. */
static uint64_t hostile_position(uint64_t near, uint64_t *random)
{
    uint64_t kind = next_random(random);
    if (kind % 8 == 0) return next_random(random);
    return near + kind / 8 % (2 * RING_SLICES) - RING_SLICES / 2;
}

static uint32_t hostile_stop;

static void *ring_scribbler(void *argument)
{
    struct ring_pair *pair = argument;
    uint64_t random = 99;
    while (!rr_load_relaxed_u32(&hostile_stop)) {
        uint64_t near = rr_load_relaxed_u64(&pair->producer.ring->consumed);
        rr_store_relaxed_u64(&pair->producer.ring->produced, hostile_position(near, &random));
        rr_store_relaxed_u64(&pair->producer.slices[random % RING_SLICES].inline_source, random);
    }
    return NULL;
}

static int64_t hostile_visit(struct ring_pair *pair, struct rr_slice *out, uint64_t *random)
{
    uint32_t max = 1 + (uint32_t)(next_random(random) % RING_BATCH);
    int64_t count = rr_ring_peek(&pair->consumer, out, max);
    REQUIRE(count >= -1 && count <= (int64_t)max, "peek of %u returned %lld", max, (long long)count);
    if (count > 0) rr_ring_release(&pair->consumer, (uint32_t)count);
    return count;
}

static int stress_ring_hostile(void)
{
    static struct ring_pair pair;
    struct rr_slice *out = allocate(RING_BATCH * sizeof *out);
    uint64_t random = 3, violations = 0, accepted = 0;
    make_ring(&pair, 0, 0);
    for (unsigned round = 0; round < 300000; round++) {
        struct rr_ring_consumer *c = &pair.consumer;
        uint64_t produced = hostile_position(c->consumed, &random);
        int looks = c->produced_seen == c->consumed;
        rr_store_relaxed_u64(&pair.producer.ring->produced, produced);
        uint64_t before = c->consumed;
        int64_t count = hostile_visit(&pair, out, &random);
        if (!looks) continue;
        REQUIRE((count < 0) == (produced - before > RING_SLICES), "produced %llu, consumed %llu: peek returned %lld",
                (unsigned long long)produced, (unsigned long long)before, (long long)count);
        violations += count < 0;
        accepted += count > 0;
    }
    REQUIRE(violations > 1000 && accepted > 1000, "a one-sided test");
    pthread_t thread;
    start(&thread, ring_scribbler, &pair);
    for (unsigned round = 0; round < 300000; round++) hostile_visit(&pair, out, &random);
    rr_store_relaxed_u32(&hostile_stop, 1);
    pthread_join(thread, NULL);
    free(out);
    return 0;
}

#define LANE_SLOTS 6u
#define LANE_TOTAL 200000u
#define SLOT_WORDS 32u
#define GIVEN_UP UINT64_MAX

struct lane_pair {
    struct rr_lane_producer producer;
    struct rr_lane_consumer consumer;
    uint64_t *tables; /* per slot: the position it was filled for, or GIVEN_UP */
    uint64_t *memory;
    uint32_t client;
    uint64_t taken, returned;
    uint32_t held[LANE_SLOTS], held_count;
};

static void make_lane(struct lane_pair *pair, uint32_t client)
{
    struct rr_lane *lane = allocate(sizeof *lane);
    rr_lane_producer_init(&pair->producer, lane, LANE_SLOTS);
    rr_lane_consumer_init(&pair->consumer, lane, LANE_SLOTS);
    pair->tables = allocate(LANE_SLOTS * sizeof *pair->tables);
    pair->memory = allocate(LANE_SLOTS * SLOT_WORDS * sizeof *pair->memory);
    pair->client = client;
}

static uint64_t slot_word(uint32_t client, uint64_t position, unsigned word) { return (position << 8 | client) * (2 * word + 1); }

static void *lane_client(void *argument)
{
    struct lane_pair *pair = argument;
    struct rr_lane_producer *p = &pair->producer;
    uint64_t random = 55 + pair->client;
    while (p->head < LANE_TOTAL) {
        uint32_t announced[LANE_SLOTS];
        uint32_t credit = rr_lane_credit(p);
        REQUIRE(credit + (p->head - p->completed_seen) == LANE_SLOTS, "client %u: %u slots free, %llu out", pair->client,
                credit, (unsigned long long)(p->head - p->completed_seen));
        if (credit == 0) {
            sched_yield();
            continue;
        }
        uint32_t count = 1 + (uint32_t)(next_random(&random) % credit);
        if (count > LANE_TOTAL - p->head) count = (uint32_t)(LANE_TOTAL - p->head);
        for (uint32_t i = 0; i < count; i++) {
            announced[i] = rr_lane_reserve(p);
            rr_lane_announce(p, announced[i]);
        }
        for (uint32_t i = 0; i < count; i++) {
            uint32_t slot = announced[i];
            if (next_random(&random) % 8 == 0) {
                pair->tables[slot] = GIVEN_UP;
            } else {
                pair->tables[slot] = p->doorbell;
                for (unsigned word = 0; word < SLOT_WORDS; word++)
                    pair->memory[slot * SLOT_WORDS + word] = slot_word(pair->client, p->doorbell, word);
            }
            rr_lane_ring_doorbell(p);
        }
    }
    return NULL;
}

static void lane_check(const struct lane_pair *pair, uint32_t slot, uint64_t position)
{
    uint64_t table = pair->tables[slot];
    if (table == GIVEN_UP) return;
    REQUIRE(table == position, "client %u: table of position %llu names %llu", pair->client, (unsigned long long)position,
            (unsigned long long)table);
    for (unsigned word = 0; word < SLOT_WORDS; word++)
        REQUIRE(pair->memory[slot * SLOT_WORDS + word] == slot_word(pair->client, position, word),
                "client %u: slot %u of position %llu is not what was filled", pair->client, slot, (unsigned long long)position);
}

static int stress_lane(void)
{
    static struct lane_pair pairs[CLIENTS];
    pthread_t threads[CLIENTS];
    uint64_t random = 9, left = (uint64_t)CLIENTS * LANE_TOTAL;
    for (uint32_t client = 0; client < CLIENTS; client++) make_lane(&pairs[client], client);
    for (uint32_t client = 0; client < CLIENTS; client++) start(&threads[client], lane_client, &pairs[client]);
    while (left != 0) {
        uint64_t before = left;
        for (uint32_t client = 0; client < CLIENTS; client++) {
            struct lane_pair *pair = &pairs[client];
            int32_t slot = rr_lane_take(&pair->consumer);
            REQUIRE(slot != RR_LANE_VIOLATION, "lane of client %u reports a violation", client);
            if (slot >= 0) {
                lane_check(pair, (uint32_t)slot, pair->taken);
                pair->taken++;
                pair->held[pair->held_count++] = (uint32_t)slot;
                left--;
            }
            /* the first slot stays with a dead peer; the others come back in any order */
            if (pair->held_count > 1 && (pair->held_count == LANE_SLOTS || next_random(&random) % 2)) {
                uint32_t at = 1 + (uint32_t)(next_random(&random) % (pair->held_count - 1));
                rr_lane_return(&pair->consumer, pair->held[at]);
                pair->held[at] = pair->held[--pair->held_count];
            }
        }
        if (left == before) sched_yield();
    }
    for (uint32_t client = 0; client < CLIENTS; client++) pthread_join(threads[client], NULL);
    return 0;
}

static int stress_lane_hostile(void)
{
    static struct lane_pair pair;
    struct rr_lane_consumer *c = allocate(sizeof *c);
    uint64_t random = 21, violations = 0, accepted = 0;
    uint8_t held[LANE_SLOTS] = {0};
    make_lane(&pair, 0);
    struct rr_lane *lane = pair.producer.lane;
    rr_lane_consumer_init(c, lane, LANE_SLOTS);
    for (unsigned round = 0; round < 1000000; round++) {
        uint64_t r = next_random(&random);
        uint64_t doorbell = c->taken + r % 3 - (r % 64 == 0), head = doorbell + r / 64 % 4 - (r / 256 % 16 == 0);
        uint32_t slot = r / 4096 % 32 == 0 ? LANE_SLOTS + (uint32_t)(r >> 40) % 512 : (uint32_t)(r >> 40) % LANE_SLOTS;
        int looks = c->taken == c->doorbell_seen;
        rr_store_relaxed_u64(&lane->head, head);
        rr_store_relaxed_u64(&lane->doorbell, doorbell);
        rr_store_relaxed_u32(&lane->announce[c->taken % RR_MAX_SLOTS], slot);
        uint64_t rung = doorbell - c->completed, announced = head - c->completed;
        int possible = !looks || (rung <= announced && announced <= LANE_SLOTS && doorbell >= c->doorbell_seen);
        int waits = !looks || doorbell != c->taken;
        int32_t taken = rr_lane_take(c);
        if (!possible || (waits && (slot >= LANE_SLOTS || held[slot]))) {
            REQUIRE(taken == RR_LANE_VIOLATION, "head %llu doorbell %llu completed %llu slot %u: take returned %d",
                    (unsigned long long)head, (unsigned long long)doorbell, (unsigned long long)c->completed, slot, taken);
            violations++;
        } else {
            REQUIRE(taken == (waits ? (int32_t)slot : -1), "slot %u: take returned %d", slot, taken);
            if (taken >= 0) {
                held[taken] = 1;
                accepted++;
            }
        }
        uint32_t give_back = (uint32_t)(next_random(&random) % LANE_SLOTS);
        if (held[give_back]) {
            rr_lane_return(c, give_back);
            held[give_back] = 0;
        }
    }
    REQUIRE(violations > 1000 && accepted > 1000, "a one-sided test");
    free(c);
    return 0;
}

#define SLEEP_NS 500000000ull
#define LOST_NS 1000000000ull

static struct {
    uint32_t work[CLIENTS][RR_LINE_BYTES / 4];
    uint32_t seen[CLIENTS][RR_LINE_BYTES / 4];
    uint32_t sleeping[RR_LINE_BYTES / 4];
    uint32_t count[RR_LINE_BYTES / 4];
    uint32_t stop;
    int event_fd; /* -1: the sleeper sleeps on the count */
} bed __attribute__((aligned(RR_LINE_BYTES)));

/* Publishes, wakes, and waits until that was seen, so that the sleeper is on its way to bed each time. */
static void *sleep_client(void *argument)
{
    uint32_t client = *(uint32_t *)argument, published = 0;
    uint64_t random = 41 + client;
    while (!rr_load_relaxed_u32(&bed.stop)) {
        rr_store_release_u32(bed.work[client], ++published);
        if (bed.event_fd < 0)
            rr_count_wake(bed.count, bed.sleeping);
        else if (rr_wake_needed(bed.sleeping))
            rr_kick(bed.event_fd);
        for (unsigned spin = 0; rr_load_acquire_u32(bed.seen[client]) != published; spin++)
            if (spin > 200) sched_yield();
        for (uint64_t pause = next_random(&random) % 64; pause; pause--) rr_pause();
    }
    return NULL;
}

static int look(uint32_t clients)
{
    int found = 0;
    for (uint32_t client = 0; client < clients; client++) {
        uint32_t published = rr_load_acquire_u32(bed.work[client]);
        found |= published != rr_load_relaxed_u32(bed.seen[client]);
        rr_store_release_u32(bed.seen[client], published);
    }
    return found;
}

static int waits(uint32_t clients)
{
    for (uint32_t client = 0; client < clients; client++)
        if (rr_load_acquire_u32(bed.work[client]) != rr_load_relaxed_u32(bed.seen[client])) return 1;
    return 0;
}

/* 1 if nobody woke the sleeper for LOST_NS. */
static int oversleeps(uint32_t count)
{
    if (bed.event_fd < 0) {
        uint64_t asleep_ns = rr_now_ns();
        rr_futex_wait(bed.count, count, LOST_NS);
        return rr_load_relaxed_u32(bed.count) == count && rr_now_ns() - asleep_ns >= LOST_NS;
    }
    struct pollfd fd = {bed.event_fd, POLLIN, 0};
    uint64_t kicks;
    if (poll(&fd, 1, (int)(LOST_NS / 1000000)) == 0) return 1;
    REQUIRE(read(bed.event_fd, &kicks, sizeof kicks) == sizeof kicks, "eventfd");
    return 0;
}

static void sleep_round(uint32_t clients, int event_fd)
{
    pthread_t threads[CLIENTS];
    uint32_t names[CLIENTS];
    memset(&bed, 0, sizeof bed);
    bed.event_fd = event_fd;
    for (uint32_t client = 0; client < clients; client++) {
        names[client] = client;
        start(&threads[client], sleep_client, &names[client]);
    }
    uint64_t end_ns = rr_now_ns() + SLEEP_NS;
    while (rr_now_ns() < end_ns) {
        if (look(clients)) continue;
        uint32_t count = rr_load_acquire_u32(bed.count); /* before arming: a wake after this moves it */
        rr_sleep_arm(bed.sleeping);
        if (!look(clients)) {
            /* twice, for a waker that lost its processor between publishing and waking */
            int lost = oversleeps(count) && waits(clients) && oversleeps(count);
            REQUIRE(!lost, "lost wakeup: slept for %llu ms over published work", (unsigned long long)(LOST_NS / 1000000));
        }
        rr_sleep_disarm(bed.sleeping);
    }
    rr_store_relaxed_u32(&bed.stop, 1);
    for (uint32_t client = 0; client < clients; client++) {
        while (pthread_tryjoin_np(threads[client], NULL) != 0) {
            look(clients);
            sched_yield();
        }
    }
}

static int stress_sleep(void)
{
    int event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    REQUIRE(event_fd >= 0, "eventfd");
    sleep_round(1, -1);
    sleep_round(1, event_fd);
    sleep_round(CLIENTS, -1);
    sleep_round(CLIENTS, event_fd);
    close(event_fd);
    return 0;
}

#define TRACE_RECORDS 8u
#define TRACE_TOTAL 3000000u

union trace_words {
    struct rr_trace_record record;
    uint64_t words[sizeof(struct rr_trace_record) / 8];
};

static struct rr_trace_record trace_records[TRACE_RECORDS] __attribute__((aligned(RR_LINE_BYTES)));

/* All words of a record are its position. Now and then the writer rests, so that a reader keeps up. */
static void *trace_writer(void *unused)
{
    (void)unused;
    struct rr_trace_writer writer = {trace_records, TRACE_RECORDS - 1, 0};
    uint64_t random = 43;
    for (uint64_t position = 1; position <= TRACE_TOTAL; position++) {
        union trace_words of;
        for (unsigned word = 0; word < sizeof of.words / 8; word++) of.words[word] = position;
        rr_trace_write(&writer, &of.record);
        if (position % 64 == 0)
            for (uint64_t pause = next_random(&random) % 512; pause; pause--) rr_pause();
    }
    return NULL;
}

static int stress_trace(void)
{
    pthread_t thread;
    struct rr_trace_reader reader;
    union trace_words of;
    uint64_t seen = 0, last = 0;
    rr_trace_reader_init(&reader, trace_records, TRACE_RECORDS - 1, 0);
    start(&thread, trace_writer, NULL);
    while (last != TRACE_TOTAL) {
        if (!rr_trace_next(&reader, &of.record)) continue;
        for (unsigned word = 1; word < sizeof of.words / 8; word++)
            REQUIRE(of.words[word] == of.words[0], "record %llu has a word of %llu", (unsigned long long)of.words[0],
                    (unsigned long long)of.words[word]);
        REQUIRE(of.words[0] > last, "record %llu after %llu", (unsigned long long)of.words[0], (unsigned long long)last);
        last = of.words[0];
        seen++;
    }
    pthread_join(thread, NULL);
    REQUIRE(seen + reader.lost == TRACE_TOTAL, "%llu records read, %llu lost", (unsigned long long)seen, (unsigned long long)reader.lost);
    return 0;
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*body)(void);
    } scenarios[] = {
        {"ring", stress_ring}, {"ring-ended", stress_ring_ended}, {"ring-hostile", stress_ring_hostile}, {"lane", stress_lane},
        {"lane-hostile", stress_lane_hostile}, {"trace", stress_trace}, {"sleep", stress_sleep},
    };
    for (unsigned i = 0; argc == 2 && i < sizeof scenarios / sizeof *scenarios; i++)
        if (strcmp(argv[1], scenarios[i].name) == 0) return scenarios[i].body();
    fprintf(stderr, "usage: stress ring|ring-ended|ring-hostile|lane|lane-hostile|trace|sleep\n");
    return 2;
}
