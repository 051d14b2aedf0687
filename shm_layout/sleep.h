/* Sleep and wake. The sleeper: raise the flag, full barrier, look again, sleep, lower the flag. The waker: publish,
 * full barrier, look at the flag, wake. Rail threads sleep in epoll and are woken by an eventfd; client threads sleep on
 * futex counts in their own segment, which they read before they raise the flag. */
#ifndef RAILRELAY_SLEEP_H
#define RAILRELAY_SLEEP_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"

static inline uint64_t rr_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

#define RR_SLEEPING 1u
#define RR_SLEEPING_IDLE 2u /* a feeder without anything to feed: only its own process has a reason to wake it */

static inline void rr_sleep_arm(uint32_t *sleeping)
{
    rr_store_relaxed_u32(sleeping, RR_SLEEPING);
    rr_full_barrier();
}

static inline void rr_sleep_disarm(uint32_t *sleeping) { rr_store_relaxed_u32(sleeping, 0); }

static inline int rr_wake_needed(const uint32_t *sleeping)
{
    rr_full_barrier();
    return rr_load_relaxed_u32(sleeping) != 0;
}

/* Sleeps while *word == seen, at most timeout_ns (0: no limit). Wakes may be spurious. */
static inline void rr_futex_wait(uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
    struct timespec t = {(time_t)(timeout_ns / 1000000000ull), (long)(timeout_ns % 1000000000ull)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, timeout_ns ? &t : NULL, NULL, 0);
}

static inline void rr_futex_wake(uint32_t *word, int waiters) { syscall(SYS_futex, word, FUTEX_WAKE, waiters, NULL, NULL, 0); }

/* Wakes a thread that sleeps on a count. */
static inline void rr_count_wake(uint32_t *count, const uint32_t *sleeping)
{
    if (rr_wake_needed(sleeping)) {
        rr_fetch_add_u32(count, 1);
        rr_futex_wake(count, INT_MAX);
    }
}

static inline void rr_kick(int event_fd)
{
    uint64_t one = 1;
    ssize_t done;
    do done = write(event_fd, &one, sizeof one);
    while (done < 0 && errno == EINTR);
}

#endif
