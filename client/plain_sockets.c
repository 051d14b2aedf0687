#define _GNU_SOURCE
#include "plain_sockets.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define REPLY_BYTES 32
#define PIECES_PER_CALL 1024u /* IOV_MAX */
#define PACK_BYTES 256u

typedef ssize_t (*transfer_call)(int fd, const struct iovec *iov, int count);

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    if (clock_gettime(clock, &t)) return 0;
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static int move_exactly(int fd, void *buffer, size_t bytes, int sending)
{
    uint8_t *at = buffer;
    while (bytes) {
        ssize_t moved = sending ? send(fd, at, bytes, MSG_NOSIGNAL) : read(fd, at, bytes);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved ? errno : ECONNRESET;
        at += moved;
        bytes -= (size_t)moved;
    }
    return 0;
}

/* Blocks longer than a call are split, so that every call can be full. */
static struct iovec *make_pieces(const struct plain_connection *c, uint64_t *piece_count)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < c->count; i++) count += (c->lengths[i] + c->bytes_per_call - 1) / c->bytes_per_call;
    struct iovec *pieces = malloc((count ? count : 1) * sizeof *pieces);
    *piece_count = 0;
    if (!pieces) return NULL;
    for (uint64_t i = 0; i < c->count; i++) {
        for (uint64_t at = 0; at < c->lengths[i]; at += c->bytes_per_call) {
            uint64_t left = c->lengths[i] - at;
            pieces[(*piece_count)++] = (struct iovec){(void *)(uintptr_t)(c->addresses[i] + at), left < c->bytes_per_call ? left : c->bytes_per_call};
        }
    }
    return pieces;
}

static int move_all(const struct plain_connection *c, struct iovec *pieces, uint64_t piece_count, transfer_call call)
{
    uint64_t at = 0, done = 0; /* done: bytes of piece `at` */
    while (at < piece_count) {
        struct iovec whole = pieces[at];
        uint64_t end = at, bytes = 0;
        pieces[at].iov_base = (uint8_t *)whole.iov_base + done;
        pieces[at].iov_len = whole.iov_len - done;
        while (end < piece_count && end - at < PIECES_PER_CALL && bytes + pieces[end].iov_len <= c->bytes_per_call)
            bytes += pieces[end++].iov_len;
        ssize_t moved = call(c->fd, pieces + at, (int)(end - at));
        int error = moved < 0 ? errno : moved == 0 ? ECONNRESET : 0;
        pieces[at] = whole;
        if (error == EINTR) continue;
        if (error) return error;
        done += (uint64_t)moved;
        while (at < piece_count && done >= pieces[at].iov_len) done -= pieces[at++].iov_len;
    }
    return 0;
}

static void enter_thread(struct plain_connection *c)
{
    if (c->cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(c->cpu, &set);
        pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    }
}

static void *send_rounds(void *argument)
{
    struct plain_connection *c = argument;
    char reply[REPLY_BYTES];
    uint64_t piece_count;
    enter_thread(c);
    struct iovec *pieces = make_pieces(c, &piece_count);
    c->error = pieces ? move_exactly(c->fd, reply, 1, 0) : ENOMEM; /* the receiver is ready */
    c->begin_ns = clock_ns(CLOCK_MONOTONIC);
    uint64_t cpu_before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint32_t round = 0; round < c->rounds && !c->error; round++) {
        if (c->gap_ns) {
            struct timespec gap = {(time_t)(c->gap_ns / 1000000000ull), (long)(c->gap_ns % 1000000000ull)};
            nanosleep(&gap, NULL);
        }
        uint64_t before = clock_ns(CLOCK_MONOTONIC);
        c->error = move_all(c, pieces, piece_count, writev);
        if (!c->error) c->error = move_exactly(c->fd, reply, sizeof reply, 0);
        c->round_ns[round] = clock_ns(CLOCK_MONOTONIC) - before;
    }
    c->cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
    c->end_ns = clock_ns(CLOCK_MONOTONIC);
    if (c->error) shutdown(c->fd, SHUT_RDWR); /* the other side shall not wait */
    free(pieces);
    return NULL;
}

static void *receive_rounds(void *argument)
{
    struct plain_connection *c = argument;
    char reply[REPLY_BYTES] = {1};
    uint64_t piece_count;
    enter_thread(c);
    struct iovec *pieces = make_pieces(c, &piece_count);
    c->error = pieces ? move_exactly(c->fd, reply, 1, 1) : ENOMEM;
    c->begin_ns = clock_ns(CLOCK_MONOTONIC);
    uint64_t cpu_before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint32_t round = 0; round < c->rounds && !c->error; round++) {
        c->error = move_all(c, pieces, piece_count, readv);
        if (!c->error) c->error = move_exactly(c->fd, reply, sizeof reply, 1);
    }
    c->cpu_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
    c->end_ns = clock_ns(CLOCK_MONOTONIC);
    if (c->error) shutdown(c->fd, SHUT_RDWR); /* the other side shall not wait */
    free(pieces);
    return NULL;
}

static void run(struct plain_connection *connections, uint32_t count, void *(*rounds)(void *))
{
    pthread_t *threads = calloc(count, sizeof *threads);
    uint32_t started = 0;
    while (threads && started < count && !pthread_create(&threads[started], NULL, rounds, &connections[started])) started++;
    for (uint32_t i = started; i < count; i++) {
        connections[i].error = EAGAIN;
        shutdown(connections[i].fd, SHUT_RDWR);
    }
    for (uint32_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    free(threads);
}

void plain_send(struct plain_connection *connections, uint32_t count) { run(connections, count, send_rounds); }

void plain_receive(struct plain_connection *connections, uint32_t count) { run(connections, count, receive_rounds); }

uint64_t plain_gather(const uint64_t *addresses, const uint64_t *lengths, uint64_t count, uint8_t *slots, uint64_t slot_bytes, uint32_t slot_count)
{
    uint64_t at = 0, slot = 0, before = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    for (uint64_t i = 0; i < count; i++) {
        for (uint64_t done = 0, take; done < lengths[i]; done += take) {
            if (at >= slot_bytes) {
                at = 0;
                slot = (slot + 1) % slot_count;
            }
            take = lengths[i] - done < slot_bytes - at ? lengths[i] - done : slot_bytes - at;
            memcpy(slots + slot * slot_bytes + at, (const void *)(uintptr_t)(addresses[i] + done), take);
            at = (at + take + PACK_BYTES - 1) & ~(uint64_t)(PACK_BYTES - 1);
        }
    }
    return clock_ns(CLOCK_THREAD_CPUTIME_ID) - before;
}

uint64_t plain_copy(const uint64_t *sources, const uint64_t *destinations, uint64_t count, uint64_t length)
{
    uint64_t before = clock_ns(CLOCK_MONOTONIC);
    for (uint64_t i = 0; i < count; i++) memcpy((void *)(uintptr_t)destinations[i], (const void *)(uintptr_t)sources[i], length);
    return clock_ns(CLOCK_MONOTONIC) - before;
}

uint64_t plain_process_cpu_ns(int pid)
{
    clockid_t clock;
    return clock_getcpuclockid(pid, &clock) ? 0 : clock_ns(clock);
}
