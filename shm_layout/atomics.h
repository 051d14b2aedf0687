/* The only home of the memory orders. Every acquire/release pair of the project carries the same
 * SYNC label at both call sites; the labels are listed with their words in abi.h. */
#ifndef RAILRELAY_ATOMICS_H
#define RAILRELAY_ATOMICS_H

#include <stdint.h>

static inline uint64_t rr_load_acquire_u64(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline uint32_t rr_load_acquire_u32(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline uint64_t rr_load_relaxed_u64(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline uint32_t rr_load_relaxed_u32(const uint32_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

static inline void rr_store_release_u64(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void rr_store_release_u32(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
static inline void rr_store_relaxed_u64(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }
static inline void rr_store_relaxed_u32(uint32_t *word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

/* Copies words that another process may be writing, each of them once. bytes: a multiple of 8. */
typedef uint64_t __attribute__((may_alias)) rr_word;
static inline void rr_copy_words(void *to, const void *from, unsigned bytes)
{
#pragma GCC unroll 8
    for (unsigned i = 0; i < bytes / 8; i++) ((rr_word *)to)[i] = __atomic_load_n((const rr_word *)from + i, __ATOMIC_RELAXED);
}

static inline void rr_store_words(void *to, const void *from, unsigned bytes)
{
#pragma GCC unroll 16
    for (unsigned i = 0; i < bytes / 8; i++) __atomic_store_n((rr_word *)to + i, ((const rr_word *)from)[i], __ATOMIC_RELAXED);
}

static inline void *rr_load_acquire_pointer(void *const *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
static inline void rr_store_release_pointer(void **word, void *value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

static inline uint64_t rr_fetch_add_u64(uint64_t *word, uint64_t value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }
static inline uint32_t rr_fetch_add_u32(uint32_t *word, uint32_t value) { return __atomic_fetch_add(word, value, __ATOMIC_ACQ_REL); }

static inline uint32_t rr_fetch_or_u32(uint32_t *word, uint32_t value) { return __atomic_fetch_or(word, value, __ATOMIC_SEQ_CST); }

static inline int rr_compare_exchange_u64(uint64_t *word, uint64_t *expected, uint64_t desired)
{
    return __atomic_compare_exchange_n(word, expected, desired, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

static inline int rr_compare_exchange_u32(uint32_t *word, uint32_t *expected, uint32_t desired)
{
    return __atomic_compare_exchange_n(word, expected, desired, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* A counter with one writer: no locked instruction, readers see whole values. */
static inline void rr_counter_add(uint64_t *word, uint64_t value)
{
    rr_store_relaxed_u64(word, rr_load_relaxed_u64(word) + value);
}

/* Store-load barrier: between raising a "sleeping" flag and looking again for work, and between publishing
 * work and looking at the flag (sleep.h). */
static inline void rr_full_barrier(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

/* Around words that are valid only while another word keeps its value (trace.h). */
static inline void rr_acquire_fence(void) { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
static inline void rr_release_fence(void) { __atomic_thread_fence(__ATOMIC_RELEASE); }

static inline void rr_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

#endif
