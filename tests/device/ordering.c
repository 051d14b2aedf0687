/* Stamped slots: a writer that fills them by alternating ways and rings, and a reader in another process that checks
 * every 64-byte line of each once it was announced. */
#include <stdatomic.h>
#include <string.h>

#include "copies.h"

#define LINE_WORDS 8u
#define NOT_READY 600

/* In memory that both processes share; the doorbell is written by the GPU. */
struct rd_meeting {
    _Alignas(128) _Atomic uint64_t doorbell;
    _Alignas(128) _Atomic uint64_t read; /* reader: slots that may be filled again */
    _Alignas(128) _Atomic uint64_t torn_slots, torn_lines;
    _Atomic uint64_t stop;
};
_Static_assert(sizeof(struct rd_meeting) == 512, "ordering.py");

struct rd_ring {
    uint64_t slots, slot_bytes;
    uint64_t stamps;   /* source slots; slot number n is a copy of source slot n % stamps */
    uint64_t piece_bytes, pitch; /* of a piece in a source slot; distance of pieces there */
};

static uint64_t word_of(uint64_t stamp, uint64_t line) { return (stamp + 1) * 0x9e3779b97f4a7c15ull ^ (line + 1) * 0xbf58476d1ce4e5b9ull; }

/* The source memory's content: [stamps][pieces of a slot], pitch apart. */
void rd_stamp(const struct rd_ring *ring, uint8_t *sources)
{
    uint64_t pieces = ring->slot_bytes / ring->piece_bytes, lines = ring->piece_bytes / 64;
    for (uint64_t stamp = 0; stamp < ring->stamps; stamp++) {
        for (uint64_t line = 0; line < pieces * lines; line++) {
            uint64_t *words = (uint64_t *)(sources + (stamp * pieces + line / lines) * ring->pitch + line % lines * 64);
            for (uint32_t word = 0; word < LINE_WORDS; word++) words[word] = word_of(stamp, line);
        }
    }
}

/* Lines of a slot that are not those of the stamp. */
uint64_t rd_torn_lines(const uint64_t *slot, uint64_t bytes, uint64_t stamp)
{
    uint64_t torn = 0;
    for (uint64_t line = 0; line < bytes / 64; line++) {
        uint64_t expected = word_of(stamp, line), differs = 0;
        for (uint32_t word = 0; word < LINE_WORDS; word++) differs |= slot[line * LINE_WORDS + word] ^ expected;
        torn += differs != 0;
    }
    return torn;
}

/* Fills slots number first to end - 1. base: of the ring, for the GPU; doorbell: of the meeting, for the GPU. The way
 * changes from slot to slot: strided, batch, kernel, and both halves by different ones. ringer: on whose stream the
 * doorbells are; only the copier's own is right. timeout_ns: without progress of the reader; -1 then, -2 if the reader
 * said stop. */
rg_result rd_write_slots(struct rg_copier *copier, struct rg_copier *ringer, struct rd_meeting *meeting, const struct rd_ring *ring,
                         uint64_t sources, uint64_t base, uint64_t doorbell, uint64_t first, uint64_t end, double timeout_ns)
{
    uint64_t pieces = ring->slot_bytes / ring->piece_bytes;
    rg_result result = rg_enter(copier);
    for (uint64_t number = first; number < end && !result; number++) {
        double since = rd_now_ns();
        while (number - atomic_load_explicit(&meeting->read, memory_order_acquire) >= ring->slots) {
            if (rd_now_ns() - since > timeout_ns) return -1;
            if (atomic_load_explicit(&meeting->stop, memory_order_relaxed)) return -2;
            rd_pause();
        }
        uint32_t list = (uint32_t)(number % copier->list_count), way = number & 3;
        struct rg_listing listing = rg_list(copier, list);
        copier->forced = way < 3 ? (int32_t)way : RG_KERNEL;
        for (uint64_t i = 0; i < pieces; i++) {
            if (way == 3 && i == pieces / 2) { /* two lists' worth in one slot: the first half by the kernel, the rest by 2D copies */
                result = rg_copy(copier, list, listing.count);
                list = (list + copier->list_count / 2) % copier->list_count;
                listing = rg_list(copier, list);
                copier->forced = RG_STRIDED;
            }
            uint64_t at = (number % ring->stamps * pieces + i) * ring->pitch;
            rg_add(&listing, (struct rg_run){sources + at, base + number % ring->slots * ring->slot_bytes + i * ring->piece_bytes, 0, 0,
                                             (uint32_t)ring->piece_bytes, 1, 0, 0});
        }
        if (!result) result = rg_copy(copier, list, listing.count);
        if (!result) result = rg_signal(ringer, doorbell, number + 1);
    }
    copier->forced = -1;
    rg_result ended = copier->api->cuStreamSynchronize(copier->stream);
    return result ? result : ended;
}

/* The reader of slots in memory that it reads itself (copy NULL) or fetches to `copy` by fetch(). Returns slots read. */
uint64_t rd_read_slots(struct rd_meeting *meeting, const struct rd_ring *ring, uint64_t base, uint64_t *copy, rg_result (*fetch)(void *, uint64_t, uint64_t),
                       uint64_t first, uint64_t end, double timeout_ns)
{
    for (uint64_t number = first; number < end; number++) {
        double since = rd_now_ns();
        while (atomic_load_explicit(&meeting->doorbell, memory_order_acquire) <= number) {
            if (rd_now_ns() - since > timeout_ns || atomic_load_explicit(&meeting->stop, memory_order_relaxed)) return number - first;
            rd_pause();
        }
        uint64_t slot = base + number % ring->slots * ring->slot_bytes;
        if (copy && fetch(copy, slot, ring->slot_bytes)) return number - first;
        uint64_t torn = rd_torn_lines(copy ? copy : (const uint64_t *)(uintptr_t)slot, ring->slot_bytes, number % ring->stamps);
        if (torn) {
            atomic_fetch_add(&meeting->torn_slots, 1);
            atomic_fetch_add(&meeting->torn_lines, torn);
        }
        atomic_store_explicit(&meeting->read, number + 1, memory_order_release);
    }
    return end - first;
}
