/* Shared memory between a rail that has the emulated NIC and the helper process that plays the wire: requests one way,
 * how far they have come the other. One producer (the rail's thread), one consumer (the helper's mover thread); both
 * are of the same installation, so this layout is nobody else's contract.
 *
 * SYNC labels (release on the left, acquire on the right)
 *   posted     rail published a request      -> helper
 *   placed     helper ended a request        -> rail */
#ifndef RAILRELAY_EMULATED_RING_H
#define RAILRELAY_EMULATED_RING_H

#include <stddef.h>
#include <stdint.h>

#define RE_MAGIC 0x314e45594c52ull
#define RE_REQUESTS 256u /* a power of two */

/* One contiguous copy, in the daemon's addresses. */
struct re_piece {
    uint64_t source, destination;
    uint32_t bytes, reserved;
};

struct re_request {
    uint64_t bytes;
    uint64_t posted_ns;
    uint32_t first_piece, piece_count;
    uint32_t cancel; /* rail: leave it, if its copy has not begun */
    uint32_t result; /* helper: enum rr_result; RR_CANCELLED: nothing of it was copied */
    uint64_t reserved[4];
};

struct re_statistics {
    uint64_t requests, bytes;
    uint64_t busy_ns;   /* bytes at the NIC's rate */
    uint64_t active_ns; /* the same, and what late copies have cost for good: others did not make up for it */
    uint64_t late_copies, late_ns, late_max_ns; /* copies that ended after the wire would have, and how long after */
};

struct re_ring {
    uint64_t magic;
    uint64_t bytes_per_s;
    uint64_t total_bytes;
    uint32_t requests, pieces, request_pieces; /* request_pieces: the most of one request */
    uint32_t requests_at, pieces_at;           /* bytes from the start */
    _Alignas(128) uint64_t posted; /* rail */
    _Alignas(128) uint64_t placed; /* helper */
    _Alignas(128) uint32_t helper_sleeping; /* helper */
    _Alignas(128) uint32_t helper_wake; /* any */
    _Alignas(128) uint32_t rail_sleeping; /* rail */
    _Alignas(128) struct re_statistics statistics; /* helper */
};
_Static_assert(sizeof(struct re_request) == 64, "emulated request");
_Static_assert(sizeof(struct re_piece) == 24, "emulated piece");

static inline struct re_request *re_requests(struct re_ring *ring) { return (struct re_request *)((uint8_t *)ring + ring->requests_at); }
static inline struct re_piece *re_pieces(struct re_ring *ring) { return (struct re_piece *)((uint8_t *)ring + ring->pieces_at); }

#endif
