/* railrelay shared-memory ABI, major version 1. This header is the law: C includes it, Python reads the
 * tables that the same field lists expand to, nobody writes an offset by hand.
 *
 * Little-endian, fixed-width, no pointers. Positions (head, doorbell, completed, produced, consumed) are
 * free-running 64-bit counts. Every word that is written independently has its own 128-byte line and one
 * writer, named in the last column:
 *   creator  the daemon, before the version is published; constant afterwards
 *   daemon   the daemon's main thread
 *   rail     the data thread of one rail in the daemon
 *   client   the client process that the segment belongs to (its threads agree among themselves)
 *   stream   the client, or its GPU stream (cuStreamWriteValue64)
 *   any      a futex count: only ever incremented, its value means nothing
 *
 * SYNC labels (release on the left, acquire on the right)
 *   version    creator publishes the segment        -> opener
 *   head       client announced a slot              -> rail
 *   doorbell   client or stream filled it           -> rail
 *   completed  rail returned a slot                 -> client
 *   produced   client published slices              -> rail
 *   consumed   rail copied slices                   -> client
 *   ended      rail ended a slice of the ring       -> client
 *   done       daemon ended a transfer              -> client
 *   trace      rail recorded a slice that ended     -> reader of the node segment
 *   filled     rail filled a bounce slot            -> client
 *   emptied    client emptied a bounce slot         -> rail
 */
#ifndef RAILRELAY_ABI_H
#define RAILRELAY_ABI_H

#include <stddef.h>
#include <stdint.h>

#define RR_MAGIC 0x314c455259414c52ull /* "RLAYREL1" */
#define RR_ABI_MAJOR 1u
#define RR_ABI_MINOR 0u
#define RR_ABI_VERSION ((RR_ABI_MAJOR << 16) | RR_ABI_MINOR)
#define RR_LINE_BYTES 128u
#define RR_CELL_BYTES 65536u
#define RR_PACK_BYTES 256u /* blocks in a slot start at multiples of this */
#define RR_MAX_SLOTS 256u
#define RR_MAX_RING_SLICES 1024u
#define RR_MAX_RAILS 16u
#define RR_NONE 0xffffffffu

enum rr_segment_kind { RR_SEGMENT_NODE = 1, RR_SEGMENT_CLIENT = 2 };

/* Areas of a segment; readers find them in the header's table, never by arithmetic. */
enum rr_area_id {
    RR_AREA_RAILS = 1,        /* node: rr_rail_state [rails] */
    RR_AREA_LANES = 2,        /* node: rr_lane_state [rails * max_clients], row r, column client */
    RR_AREA_CLIENTS = 3,      /* node: rr_client_state [max_clients] */
    RR_AREA_PEERS = 4,        /* node: rr_peer_state [max_peers] */
    RR_AREA_ERRORS = 5,       /* node: rr_error_record [n] */
    RR_AREA_TRACE = 6,        /* node: rr_trace_record [trace_records] for each rail */
    RR_AREA_CONTROL = 16,     /* client: rr_client_control [1] */
    RR_AREA_LANE = 17,        /* client: rr_lane [rails] */
    RR_AREA_SLOT_HEADS = 18,  /* client: rr_slice [rails * slots] */
    RR_AREA_SLOT_TABLES = 19, /* client: rr_block [table_entries] for each of rails * slots */
    RR_AREA_RINGS = 20,       /* client: rr_ring [rails] */
    RR_AREA_RING_SLICES = 21, /* client: rr_slice [ring_slices] for each rail */
    RR_AREA_RING_TABLES = 22, /* client: rr_block [table_entries] for each of rails * ring_tables */
    RR_AREA_TRANSFERS = 23,   /* client: rr_transfer [n] */
    RR_AREA_BOUNCES = 24,     /* client: rr_bounce [rails] */
    RR_AREA_BOUNCE_HEADS = 25, /* client: rr_bounce_frame [bounce_slots] for each rail */
    RR_AREA_BOUNCE_RUNS = 26, /* client: rr_run [table_entries] for each of rails * bounce_slots */
    RR_AREA_SLOT_TIMES = 27,  /* client: rr_slice_times [rails * slots] */
    RR_AREA_RING_TIMES = 28   /* client: rr_slice_times [ring_slices] for each rail */
};
#define RR_AREAS_MAX 16u

enum rr_phase { RR_PHASE_RUNNING = 1, RR_PHASE_DRAINING = 2, RR_PHASE_CLOSED = 3 };

/* How a transfer or a slice ended. 0 is success; the text of each is in client/errors.py, held together by a test. */
enum rr_result {
    RR_OK = 0,
    RR_CANCELLED = 1,         /* by its owner */
    RR_ABORTED = 2,           /* by the decode engine */
    RR_TIMED_OUT = 3,         /* deadline passed; settled */
    RR_UNSETTLED = 4,         /* ended, but bytes may still land: pages must not be reused yet */
    RR_PEER_LOST = 5,         /* peer daemon gone or restarted; settled */
    RR_REGION_GONE = 6,       /* destination region unregistered or its owner exited */
    RR_BAD_REGION = 7,        /* a region index that was not opened by this client */
    RR_OUT_OF_BOUNDS = 8,     /* offset or length outside a region */
    RR_PROTOCOL = 9,          /* a word in shared memory that no correct client writes */
    RR_SEGMENT_TRUNCATED = 10, /* memory behind the client's mapping disappeared */
    RR_DAEMON_GONE = 11,      /* the local daemon exited; set by the client library */
    RR_CLIENT_GONE = 12,      /* the owning client exited */
    RR_RAIL_DOWN = 13,        /* no connection could be made on the rail */
    RR_GPU_ERROR = 14         /* a CUDA call of the client failed; set by the client library */
};

enum rr_slice_flags {
    RR_SLICE_FINAL = 1u << 0,   /* total_slices is valid: the transfer has no more slices than that */
    RR_SLICE_VOID = 1u << 1,    /* no blocks: the slot was announced and then given up */
    RR_SLICE_INLINE = 1u << 2,  /* ring only: one block, in the slice itself */
    RR_SLICE_EXPRESS = 1u << 3, /* small transfer: goes before bulk, on its own connection */
    RR_SLICE_LOCAL = 1u << 4    /* ring only, with VOID: the client itself copies to another client of this daemon. Before
                                 * it begins, inline_remote_region names one of the destinations, and the slice asks for
                                 * admission; at the end that is RR_NONE, inline_source the bytes copied, inline_length
                                 * RR_OK or RR_REGION_GONE */
};

/* ---- field lists: S scalar (struct, type, name, offset, writer), A array (struct, type, name, count, offset, writer) ---- */

#define RR_FIELDS_area(S, A, T) \
    S(T, uint32_t, id, 0, creator) \
    S(T, uint32_t, count, 4, creator) \
    S(T, uint64_t, offset, 8, creator) \
    S(T, uint64_t, stride, 16, creator) \
    S(T, uint64_t, reserved, 24, creator)

#define RR_FIELDS_segment_header(S, A, T) \
    S(T, uint64_t, magic, 0, creator) \
    S(T, uint32_t, kind, 8, creator) \
    S(T, uint32_t, line_bytes, 12, creator) \
    S(T, uint64_t, segment_bytes, 16, creator) \
    S(T, uint64_t, instance, 24, creator) \
    S(T, uint32_t, owner_pid, 32, creator) \
    S(T, uint32_t, area_count, 36, creator) \
    S(T, uint64_t, owner_start, 40, creator) \
    S(T, uint64_t, created_ns, 48, creator) \
    S(T, uint64_t, features, 56, creator) \
    S(T, uint32_t, rails, 64, creator) \
    S(T, uint32_t, slots, 68, creator) \
    S(T, uint64_t, slot_bytes, 72, creator) \
    S(T, uint32_t, table_entries, 80, creator) \
    S(T, uint32_t, ring_slices, 84, creator) \
    S(T, uint32_t, ring_tables, 88, creator) \
    S(T, uint32_t, bounce_slots, 92, creator) \
    S(T, uint32_t, transfers, 96, creator) \
    S(T, uint32_t, max_clients, 100, creator) \
    S(T, uint32_t, client, 104, creator) \
    S(T, uint32_t, client_serial, 108, creator) \
    S(T, uint32_t, trace_records, 112, creator) \
    S(T, uint32_t, reserved0, 116, creator) \
    S(T, uint64_t, reserved2, 120, creator) \
    S(T, uint32_t, version, 128, creator) \
    S(T, uint32_t, phase, 132, daemon) \
    A(T, uint64_t, reserved1, 15, 136, creator)

/* down: the port of the rail's NIC. taken_by: 1 + the rail whose NIC sends for it, 0: its own; takeovers: how often
 * another one began to. */
#define RR_FIELDS_rail_state(S, A, T) \
    S(T, uint32_t, sleeping, 0, rail) \
    S(T, uint32_t, reserved0, 4, rail) \
    A(T, uint64_t, reserved1, 15, 8, rail) \
    A(T, uint64_t, counters, 32, 128, rail) \
    A(T, char, name, 32, 384, creator) \
    A(T, char, address, 64, 416, creator) \
    S(T, uint32_t, port, 480, creator) \
    S(T, int32_t, cpu, 484, creator) \
    A(T, char, nic, 16, 488, creator) \
    S(T, uint16_t, down, 504, daemon) \
    S(T, uint16_t, taken_by, 506, daemon) \
    S(T, uint32_t, takeovers, 508, daemon)

#define RR_FIELDS_lane_state(S, A, T) \
    S(T, uint32_t, leased, 0, daemon) \
    S(T, uint32_t, client, 4, daemon) \
    S(T, uint32_t, pid, 8, daemon) \
    S(T, uint32_t, rank, 12, daemon) \
    S(T, uint64_t, generation, 16, daemon) \
    S(T, uint32_t, slots, 24, daemon) \
    S(T, uint32_t, reserved0, 28, daemon) \
    S(T, uint64_t, slot_bytes, 32, daemon) \
    A(T, uint64_t, reserved1, 11, 40, daemon) \
    S(T, uint64_t, head, 128, rail) \
    S(T, uint64_t, doorbell, 136, rail) \
    S(T, uint64_t, completed, 144, rail) \
    S(T, uint64_t, bytes, 152, rail) \
    S(T, uint64_t, blocks, 160, rail) \
    S(T, uint64_t, runs, 168, rail) \
    S(T, uint64_t, stalls, 176, rail) \
    S(T, uint64_t, stall_ns, 184, rail) \
    S(T, uint64_t, voids, 192, rail) \
    S(T, uint64_t, direct_bytes, 200, rail) \
    S(T, uint64_t, direct_slices, 208, rail) \
    S(T, uint64_t, produced, 216, rail) \
    S(T, uint64_t, consumed, 224, rail) \
    S(T, uint64_t, local_bytes, 232, rail) \
    A(T, uint64_t, reserved2, 2, 240, rail)

#define RR_FIELDS_client_state(S, A, T) \
    S(T, uint32_t, state, 0, daemon) \
    S(T, uint32_t, pid, 4, daemon) \
    S(T, uint32_t, rank, 8, daemon) \
    S(T, uint32_t, serial, 12, daemon) \
    S(T, uint64_t, attached_ns, 16, daemon) \
    S(T, uint32_t, regions, 24, daemon) \
    S(T, uint32_t, lanes, 28, daemon) \
    A(T, char, name, 64, 32, daemon) \
    S(T, uint64_t, refused, 96, daemon) \
    A(T, uint64_t, reserved, 3, 104, daemon)

#define RR_FIELDS_peer_state(S, A, T) \
    S(T, uint32_t, state, 0, daemon) \
    S(T, uint32_t, rails, 4, daemon) \
    S(T, uint64_t, instance, 8, daemon) \
    S(T, uint64_t, since_ns, 16, daemon) \
    S(T, uint32_t, regions, 24, daemon) \
    S(T, uint32_t, fences, 28, daemon) \
    A(T, char, session, 96, 32, daemon) \
    A(T, uint64_t, reserved, 16, 128, daemon)

#define RR_FIELDS_error_record(S, A, T) \
    S(T, uint64_t, first_ns, 0, daemon) \
    S(T, uint64_t, last_ns, 8, daemon) \
    S(T, uint64_t, count, 16, daemon) \
    S(T, uint32_t, code, 24, daemon) \
    S(T, uint32_t, text_bytes, 28, daemon) \
    A(T, char, text, 352, 32, daemon) \
    A(T, char, first_text, 352, 384, daemon) \
    A(T, uint32_t, reserved0, 8, 736, daemon)

#define RR_FIELDS_client_control(S, A, T) \
    S(T, uint64_t, heartbeat_ns, 0, client) \
    A(T, uint64_t, reserved0, 15, 8, client) \
    S(T, uint32_t, feeder_wake, 128, any) \
    A(T, uint32_t, reserved1, 31, 132, any) \
    S(T, uint32_t, feeder_sleeping, 256, client) \
    A(T, uint32_t, reserved2, 31, 260, client) \
    S(T, uint32_t, bounce_wake, 384, any) \
    A(T, uint32_t, reserved3, 31, 388, any) \
    S(T, uint32_t, bounce_sleeping, 512, client) \
    A(T, uint32_t, reserved4, 31, 516, client) \
    S(T, uint32_t, detached, 640, daemon) \
    A(T, uint32_t, reserved5, 31, 644, daemon)

/* announce[p % RR_MAX_SLOTS] is the slot that position p of the lane uses; freed[] returns slots the other way, in
 * the order in which they became free, so that a slot held by a dead peer holds back no other. */
#define RR_FIELDS_lane(S, A, T) \
    S(T, uint64_t, head, 0, client) \
    S(T, uint64_t, stalls, 8, client) \
    S(T, uint64_t, stall_ns, 16, client) \
    A(T, uint64_t, reserved0, 13, 24, client) \
    S(T, uint64_t, doorbell, 128, stream) \
    A(T, uint64_t, reserved1, 15, 136, stream) \
    S(T, uint64_t, completed, 256, rail) \
    A(T, uint64_t, reserved2, 15, 264, rail) \
    S(T, uint64_t, generation, 384, daemon) \
    A(T, uint64_t, reserved3, 15, 392, daemon) \
    A(T, uint32_t, announce, 256, 512, client) \
    A(T, uint32_t, freed, 256, 1536, rail)

/* source: bytes from the start of the slot (lane) or of the source region (ring). */
#define RR_FIELDS_block(S, A, T) \
    S(T, uint64_t, source, 0, client) \
    S(T, uint64_t, destination, 8, client) \
    S(T, uint32_t, length, 16, client) \
    S(T, uint32_t, source_region, 20, client) \
    S(T, uint32_t, remote_region, 24, client) \
    S(T, uint32_t, reserved, 28, client)

#define RR_FIELDS_slice(S, A, T) \
    S(T, uint32_t, transfer, 0, client) \
    S(T, uint32_t, generation, 4, client) \
    S(T, uint32_t, peer, 8, client) \
    S(T, uint16_t, remote_rail, 12, client) \
    S(T, uint16_t, flags, 14, client) \
    S(T, uint32_t, block_count, 16, client) \
    S(T, uint32_t, total_slices, 20, client) \
    S(T, uint32_t, table, 24, client) \
    S(T, uint32_t, bytes, 28, client) \
    S(T, uint64_t, inline_source, 32, client) \
    S(T, uint64_t, inline_destination, 40, client) \
    S(T, uint32_t, inline_length, 48, client) \
    S(T, uint32_t, inline_source_region, 52, client) \
    S(T, uint32_t, inline_remote_region, 56, client) \
    S(T, uint32_t, ticket, 60, client)

/* consumed: slices that the rail has copied. completed counts slices that ended, in any order; ended[] names them by
 * their ticket, a number below ring slices that no other slice under way has. credit = ring slices - (produced - completed). */
#define RR_FIELDS_ring(S, A, T) \
    S(T, uint64_t, produced, 0, client) \
    A(T, uint64_t, reserved0, 15, 8, client) \
    S(T, uint64_t, consumed, 128, rail) \
    A(T, uint64_t, reserved1, 15, 136, rail) \
    S(T, uint64_t, completed, 256, rail) \
    A(T, uint64_t, reserved2, 15, 264, rail) \
    A(T, uint32_t, ended, 1024, 384, rail)

#define RR_FIELDS_transfer(S, A, T) \
    S(T, uint32_t, generation, 0, client) \
    S(T, uint32_t, waiting, 4, client) \
    S(T, uint32_t, cancel, 8, client) \
    S(T, uint32_t, cancel_result, 12, client) \
    S(T, uint64_t, tag, 16, client) \
    S(T, uint64_t, timeout_ns, 24, client) \
    S(T, uint32_t, note, 32, client) \
    S(T, uint32_t, reserved1, 36, client) \
    A(T, uint64_t, reserved2, 11, 40, client) \
    S(T, uint32_t, done, 128, rail) \
    S(T, uint32_t, result, 132, rail) \
    S(T, uint64_t, bytes, 136, rail) \
    S(T, uint64_t, done_ns, 144, rail) \
    S(T, uint32_t, settled, 152, rail) \
    S(T, uint32_t, stop, 156, rail) \
    A(T, uint64_t, reserved4, 12, 160, rail)

#define RR_FIELDS_bounce(S, A, T) \
    S(T, uint64_t, filled, 0, rail) \
    A(T, uint64_t, reserved0, 15, 8, rail) \
    S(T, uint64_t, emptied, 128, client) \
    A(T, uint64_t, reserved1, 15, 136, client)

#define RR_FIELDS_bounce_frame(S, A, T) \
    S(T, uint32_t, slot, 0, rail) \
    S(T, uint32_t, run_count, 4, rail) \
    S(T, uint64_t, bytes, 8, rail) \
    A(T, uint64_t, reserved0, 14, 16, rail) \
    S(T, uint32_t, result, 128, client) \
    A(T, uint32_t, reserved1, 31, 132, client)

#define RR_FIELDS_run(S, A, T) \
    S(T, uint64_t, offset, 0, rail) \
    S(T, uint32_t, length, 8, rail) \
    S(T, uint32_t, region, 12, rail)

/* When the client began a slice (its slot is reserved, or its table begun) and when it was filled (all is copied into
 * the slot, or enqueued on the GPU stream that rings the doorbell): CLOCK_MONOTONIC. Written before the doorbell
 * is rung or enqueued, or the slice published; only shown, never trusted. */
#define RR_FIELDS_slice_times(S, A, T) \
    S(T, uint64_t, began_ns, 0, client) \
    S(T, uint64_t, filled_ns, 8, client) \
    A(T, uint64_t, reserved0, 14, 16, client)

/* A slice that ended, in row position % trace_records of its rail; positions count from 1, 0 is a record that is being
 * written. The first two times are the client's words; taken: the rail saw the doorbell, or the slice in the ring;
 * posted: handed to the NIC, the last time if it was sent again, 0 if never; completed: the rail learned of its end. */
#define RR_FIELDS_trace_record(S, A, T) \
    S(T, uint64_t, position, 0, rail) \
    S(T, uint64_t, began_ns, 8, rail) \
    S(T, uint64_t, filled_ns, 16, rail) \
    S(T, uint64_t, taken_ns, 24, rail) \
    S(T, uint64_t, posted_ns, 32, rail) \
    S(T, uint64_t, completed_ns, 40, rail) \
    S(T, uint64_t, tag, 48, rail) \
    S(T, uint64_t, bytes, 56, rail) \
    S(T, uint32_t, client, 64, rail) \
    S(T, uint32_t, client_serial, 68, rail) \
    S(T, uint32_t, transfer, 72, rail) \
    S(T, uint32_t, generation, 76, rail) \
    S(T, uint32_t, peer, 80, rail) \
    S(T, uint32_t, remote_rail, 84, rail) \
    S(T, uint32_t, direct, 88, rail) \
    S(T, uint32_t, slot, 92, rail) \
    S(T, uint32_t, blocks, 96, rail) \
    S(T, uint32_t, runs, 100, rail) \
    S(T, uint32_t, result, 104, rail) \
    S(T, uint32_t, reserved0, 108, rail) \
    A(T, uint64_t, reserved1, 2, 112, rail)

/* struct, name in the Python table */
#define RR_STRUCTS(X) \
    X(area) X(segment_header) X(rail_state) X(lane_state) X(client_state) X(peer_state) X(error_record) \
    X(client_control) X(lane) X(block) X(slice) X(ring) X(transfer) X(bounce) X(bounce_frame) X(run) \
    X(slice_times) X(trace_record)

#define RR_MEMBER(tag, type, name, offset, writer) type name;
#define RR_MEMBERS(tag, type, name, count, offset, writer) type name[count];
#define RR_DEFINE(tag) struct rr_##tag { RR_FIELDS_##tag(RR_MEMBER, RR_MEMBERS, tag) };
RR_STRUCTS(RR_DEFINE)
#undef RR_DEFINE
#undef RR_MEMBERS
#undef RR_MEMBER

#define RR_CHECK(tag, type, name, offset, writer) \
    _Static_assert(offsetof(struct rr_##tag, name) == (offset), "rr_" #tag "." #name);
#define RR_CHECKS(tag, type, name, count, offset, writer) RR_CHECK(tag, type, name, offset, writer)
#define RR_CHECK_STRUCT(tag) RR_FIELDS_##tag(RR_CHECK, RR_CHECKS, tag)
RR_STRUCTS(RR_CHECK_STRUCT)
#undef RR_CHECK_STRUCT
#undef RR_CHECKS
#undef RR_CHECK

#define RR_SIZE(tag, bytes) _Static_assert(sizeof(struct rr_##tag) == (bytes), "sizeof rr_" #tag)
RR_SIZE(area, 32);
RR_SIZE(segment_header, 256);
RR_SIZE(rail_state, 512);
RR_SIZE(lane_state, 256);
RR_SIZE(client_state, 128);
RR_SIZE(peer_state, 256);
RR_SIZE(error_record, 768);
RR_SIZE(client_control, 768);
RR_SIZE(lane, 2560);
RR_SIZE(block, 32);
RR_SIZE(slice, 64);
RR_SIZE(ring, 4480);
RR_SIZE(transfer, 256);
RR_SIZE(bounce, 256);
RR_SIZE(bounce_frame, 256);
RR_SIZE(run, 16);
RR_SIZE(slice_times, 128);
RR_SIZE(trace_record, 128);
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the ABI is little-endian");

/* Counters of a rail: id, label. A counter without a label does not compile. */
#define RR_RAIL_COUNTERS(X) \
    X(BYTES_SENT, "bytes_sent") \
    X(BYTES_RECEIVED, "bytes_received") \
    X(FRAMES_SENT, "frames_sent") \
    X(FRAMES_RECEIVED, "frames_received") \
    X(SLICES_DONE, "slices_done") \
    X(SLICES_FAILED, "slices_failed") \
    X(SLICES_RESENT, "slices_resent") \
    X(BLOCKS, "blocks") \
    X(RUNS, "runs") \
    X(CYCLES, "cycles") \
    X(SLEEPS, "sleeps") \
    X(SLEEP_NS, "sleep_ns") \
    X(SOCKET_FULL, "socket_full") \
    X(GRANT_WAITS, "grant_waits") \
    X(GRANT_WAIT_NS, "grant_wait_ns") \
    X(CONNECTION_WAITS, "connection_waits") \
    X(BOUNCED_BYTES, "bounced_bytes") \
    X(REFUSED_FRAMES, "refused_frames") \
    X(CONNECTIONS_LOST, "connections_lost") \
    X(FENCES, "fences") \
    X(VIOLATIONS, "violations") \
    X(TRANSFERS_DONE, "transfers_done") \
    X(TRANSFERS_FAILED, "transfers_failed") \
    X(WINDOW_FULL, "window_full") \
    X(NIC_BUSY_NS, "nic_busy_ns") \
    X(NIC_ACTIVE_NS, "nic_active_ns") \
    X(NIC_LATE_COPIES, "nic_late_copies") \
    X(NIC_LATE_MAX_NS, "nic_late_max_ns")

#define RR_COUNTER_ID(id, label) RR_RAIL_##id,
enum rr_rail_counter { RR_RAIL_COUNTERS(RR_COUNTER_ID) RR_RAIL_COUNTER_COUNT };
#undef RR_COUNTER_ID
_Static_assert(RR_RAIL_COUNTER_COUNT <= 32, "rail counters outgrow rr_rail_state.counters");

/* Word after the header: the table of areas. */
#define RR_AREA_TABLE_OFFSET 256u

#endif
