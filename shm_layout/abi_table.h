/* The field lists of abi.h as one constant table, for Python and for the golden table in tests. */
#ifndef RAILRELAY_ABI_TABLE_H
#define RAILRELAY_ABI_TABLE_H

#include "abi.h"

struct rr_field_facts {
    const char *structure, *name, *type, *writer;
    uint32_t offset, count, bytes;
};

struct rr_constant {
    const char *name;
    uint64_t value;
};

#define RR_FACTS_S(tag, type, name, offset, writer) {#tag, #name, #type, #writer, offset, 1, sizeof(type)},
#define RR_FACTS_A(tag, type, name, count, offset, writer) {#tag, #name, #type, #writer, offset, count, sizeof(type)},
#define RR_FACTS(tag) RR_FIELDS_##tag(RR_FACTS_S, RR_FACTS_A, tag)
static const struct rr_field_facts rr_fields[] = {RR_STRUCTS(RR_FACTS){0, 0, 0, 0, 0, 0, 0}};

#define RR_STRUCT_SIZE(tag) {#tag, sizeof(struct rr_##tag)},
static const struct rr_constant rr_sizes[] = {RR_STRUCTS(RR_STRUCT_SIZE){0, 0}};

#define RR_C(name) {#name, RR_##name}
static const struct rr_constant rr_constants[] = {
    RR_C(MAGIC), RR_C(ABI_MAJOR), RR_C(ABI_MINOR), RR_C(ABI_VERSION), RR_C(LINE_BYTES), RR_C(CELL_BYTES), RR_C(PACK_BYTES),
    RR_C(MAX_SLOTS), RR_C(MAX_RING_SLICES), RR_C(MAX_RAILS), RR_C(NONE), RR_C(AREA_TABLE_OFFSET), RR_C(AREAS_MAX),
    RR_C(SEGMENT_NODE), RR_C(SEGMENT_CLIENT),
    RR_C(AREA_RAILS), RR_C(AREA_LANES), RR_C(AREA_CLIENTS), RR_C(AREA_PEERS), RR_C(AREA_ERRORS), RR_C(AREA_CONTROL),
    RR_C(AREA_LANE), RR_C(AREA_SLOT_HEADS), RR_C(AREA_SLOT_TABLES), RR_C(AREA_RINGS), RR_C(AREA_RING_SLICES),
    RR_C(AREA_RING_TABLES), RR_C(AREA_TRANSFERS), RR_C(AREA_BOUNCES), RR_C(AREA_BOUNCE_HEADS), RR_C(AREA_BOUNCE_RUNS),
    RR_C(AREA_TRACE), RR_C(AREA_SLOT_TIMES), RR_C(AREA_RING_TIMES),
    RR_C(PHASE_RUNNING), RR_C(PHASE_DRAINING), RR_C(PHASE_CLOSED),
    RR_C(SLICE_FINAL), RR_C(SLICE_VOID), RR_C(SLICE_INLINE), RR_C(SLICE_EXPRESS), RR_C(SLICE_LOCAL),
    {0, 0}};

static const struct rr_constant rr_results[] = {
    RR_C(OK), RR_C(CANCELLED), RR_C(ABORTED), RR_C(TIMED_OUT), RR_C(UNSETTLED), RR_C(PEER_LOST), RR_C(REGION_GONE),
    RR_C(BAD_REGION), RR_C(OUT_OF_BOUNDS), RR_C(PROTOCOL), RR_C(SEGMENT_TRUNCATED), RR_C(DAEMON_GONE), RR_C(CLIENT_GONE),
    RR_C(RAIL_DOWN), RR_C(GPU_ERROR), {0, 0}};
#undef RR_C

#define RR_LABEL(id, label) label,
static const char *const rr_rail_counter_labels[] = {RR_RAIL_COUNTERS(RR_LABEL)};
#undef RR_LABEL
_Static_assert(sizeof rr_rail_counter_labels / sizeof *rr_rail_counter_labels == RR_RAIL_COUNTER_COUNT, "a label a counter");

#endif
