/* The data plane of the daemon: what the rail threads (rail.c, collector.c, completion.c, tcp_nic.c) share with the
 * main thread (plane.pyx through control.c).
 *
 * Threads: everything in struct rr_rail and in what it owns belongs to that rail's thread, except the command list.
 * struct rr_client, its regions, remotes, exports and transfer contexts are shared; each says how below. */
#ifndef RAILRELAY_PLANE_H
#define RAILRELAY_PLANE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "abi.h"
#include "atomics.h"
#include "faults.h"
#include "lane.h"
#include "ring.h"
#include "sleep.h"
#include "trace.h"

#define RR_WIRE_RUNS_MAX 16384u
#define RR_WIRE_BYTES_MAX (1u << 30)
#define RR_WINDOW 256u        /* frames of one connection that wait for their acknowledgement */
#define RR_MAX_CLIENTS 256u
#define RR_CLASSES 2u         /* bulk, express */
#define RR_TOMBSTONES 65536u  /* aborted tags remembered for a client */
#define RR_QUANTUM_BYTES (1u << 20)

enum rr_event_kind {
    RR_EVENT_COMMAND_DONE = 1,
    RR_EVENT_CONNECT_WANTED,
    RR_EVENT_SENDER_ENDING, /* one-sided NICs: nothing more is posted; LOST follows once it is drained */
    RR_EVENT_SENDER_LOST,
    RR_EVENT_RECEIVER_LOST,
    RR_EVENT_RECEIVER_FENCED,
    RR_EVENT_FRAME_SETTLED,
    RR_EVENT_CLIENT_DETACHED,
    RR_EVENT_VIOLATION,
    RR_EVENT_NOTE_DUE,
    RR_EVENT_TRANSFER_ENDED,
    RR_EVENT_PORT_CHANGED
};

struct rr_event {
    int64_t kind, rail, a, b, c, d, e;
};

/* A file mapping whose file may be truncated by its owner: guard.c turns the SIGBUS into zero pages and `broken`. Or, with
 * guard RR_NONE, made-up addresses of memory that only a NIC can reach: bit 63 is set, nobody dereferences them. */
struct rr_mapping {
    uint8_t *base;
    uint64_t bytes;
    uint32_t broken;
    uint32_t guard;
};

/* Destination or source memory of a local client. Written by the main thread before `valid` is released; `valid` is
 * cleared first and the memory unmapped only after every rail has answered. */
struct rr_region {
    uint32_t valid;
    uint32_t reserved;
    uint64_t bytes;
    struct rr_mapping *mapping; /* NULL: private memory */
    uint8_t *base;
    uint32_t lkeys[RR_MAX_RAILS]; /* by the rail whose device reads it; 0: not registered there */
};

/* A region of a peer that this client opened; same rules. `valid` is another number after each change, so that a rail
 * which reads the fields can tell that they belong together. */
struct rr_remote {
    uint32_t valid;
    uint32_t peer;
    uint32_t handle;
    uint32_t rail;
    uint64_t bytes;
    uint32_t owner;
    uint32_t window_bytes;
    uint32_t window_runs;
    uint32_t rkey_count; /* 0: only the peer's daemon itself can write it */
    uint64_t iova;
    uint32_t rkeys[RR_MAX_RAILS]; /* by the peer's rail whose device writes it */
};

/* A local region as one peer session may write it; same rules. */
struct rr_export {
    uint32_t valid;
    uint32_t handle; /* number in this table plus a multiple of max_exports: a late frame meets no later user */
    uint32_t session;
    uint32_t client;
    uint32_t region;
    uint64_t bytes;
    uint8_t *base; /* NULL: through the client's bounce memory */
    struct rr_mapping *mapping;
};

/* word = generation << 32 | remaining. 0 remaining is idle; a live count starts at RR_COMPLETION_BIAS, so that it can
 * not reach zero before the final slice has said how many there are. */
/* Of a generation that nobody claimed yet the word still names an older one. */
enum rr_record_state { RR_RECORD_REPORTING = 1, RR_RECORD_REPORTED, RR_RECORD_ENDED };

#define RR_COMPLETION_BIAS 0x40000000u
#define RR_COMPLETION_ENDING 0xffffffffu

struct rr_context {
    uint64_t word;
    uint64_t tag;
    uint64_t started_ns;
    uint64_t timeout_ns;
    uint64_t bytes;
    uint64_t fault;  /* generation << 32 | first result other than RR_OK */
    uint64_t record; /* generation << 32 | who has the record: enum rr_record_state */
    uint32_t peer;
    uint32_t note;
    uint32_t watched;  /* generation whose end is an event */
    uint32_t handle;   /* one of the destinations, for abort by region owner */
    uint32_t owner;
};

struct rr_client;
struct rr_rail;
struct rr_plane;
struct rr_flow;
struct rr_path;
struct rr_connection;

struct rr_wire_run {
    uint64_t offset;
    uint32_t length;
    uint32_t handle;
};

/* How a frame ended at the receiver: what RailFenced carries. */
struct rr_ack {
    uint64_t sequence, code;
};

enum rr_work_state { RR_WORK_FREE = 0, RR_WORK_QUEUED, RR_WORK_PARKED, RR_WORK_POSTED };

/* A slot of bounce memory at the receiver. The keys: one-sided NICs. */
struct rr_grant {
    uint64_t grant; /* as the receiver says it; 0: none */
    uint64_t address, table_address;
    uint32_t rkey, owner;
};

/* One slice being moved: a private, checked copy of its block table as source pieces and remote runs. */
struct rr_work {
    struct rr_work *next;
    struct rr_source *source;
    struct rr_flow *flow;
    struct rr_connection *connection;
    struct iovec *pieces;
    struct rr_wire_run *runs;
    uint32_t *piece_regions, *run_remotes; /* one-sided NICs: where the keys are; NULL for others. Lanes: no regions */
    uint64_t sequence;
    uint64_t bytes;
    uint64_t tag;
    uint64_t parked_ns;
    uint64_t began_ns, filled_ns; /* the client's words: only shown */
    uint64_t taken_ns, posted_ns; /* posted: 0 until the NIC has it */
    uint32_t piece_count, run_count, block_count;
    uint32_t slot; /* lane: of the slot; ring: ticket of the slice */
    uint32_t transfer, generation;
    uint32_t peer, remote_rail, class_, owner, window_bytes, window_runs;
    uint32_t state;
    uint32_t inherits; /* parked: another slice has asked */
    struct rr_grant grant;
};

/* A slice of a transfer that was stopped, sent on a connection that was lost: its slot or ticket is given back, since
 * nothing reads it any more and it will not be sent again; that it has settled only the fence can say. */
struct rr_debt {
    struct rr_source *source; /* NULL: none */
    uint64_t bytes;
    uint32_t transfer, generation;
};

/* The slices of one source (a client's lane or ring) for one path: served in turn with the path's other flows. */
struct rr_flow {
    struct rr_flow *next;
    struct rr_source *source;
    struct rr_work *first, *last;
    uint64_t deficit;
    uint32_t active;
};

struct rr_source {
    struct rr_client *client;
    struct rr_flow *flows; /* [max_peers * RR_MAX_RAILS * RR_CLASSES] */
    struct rr_work *works; /* one a slot, or one a slice of the ring */
    struct rr_work *free; /* ring only: one work for each slice that the client may have under way */
    uint32_t work_count, in_flight;
    int is_lane;
};

struct rr_bounce_wait {
    struct rr_connection *connection;
    uint64_t sequence;
};

struct rr_bounce_pending {
    struct rr_connection *connection;
    uint64_t sequence, tag;
    uint32_t slot, window;
};

enum rr_slot_use { RR_SLOT_UNUSED = 0, RR_SLOT_FILLING, RR_SLOT_FILLED };

/* Bounce memory of one client on one rail: how frames reach memory that only its own process can write. */
struct rr_bouncer {
    struct rr_mapping *memory;
    uint32_t rkeys[RR_MAX_RAILS]; /* by the device that writes it; 0: not registered there */
    struct rr_bounce *shared; /* NULL: no bounce memory */
    struct rr_bounce *ring;   /* this and the next two are found at attach, while the segment's header can be trusted */
    struct rr_bounce_frame *frames;
    struct rr_run *runs;
    struct rr_bounce_pending *pending; /* [slots] by position */
    struct rr_connection **reserved_by; /* [slots]; NULL: free */
    uint8_t *in_use;                    /* [slots]: enum rr_slot_use */
    struct rr_bounce_wait *waits;
    uint32_t wait_count, wait_capacity;
    uint64_t filled, reclaimed;
    uint32_t slots, owner, serial;
};

/* What one rail keeps for one client. */
struct rr_port {
    struct rr_lane_consumer lane;
    struct rr_ring_consumer ring;
    uint64_t ring_completed;
    struct rr_source lane_source, ring_source;
    struct rr_mapping *lane_memory; /* NULL: not leased */
    uint32_t lane_lkeys[RR_MAX_RAILS];
    struct rr_lane_state *state;    /* row of the node segment */
    struct rr_bouncer bouncer;
    int kick_fd;
    uint32_t attached, detaching;
};

struct rr_client {
    struct rr_plane *plane;
    uint32_t number, serial;
    struct rr_mapping *segment;
    struct rr_segment_header *header; /* private copy, taken before the client could write */
    struct rr_client_control *control;
    struct rr_transfer *transfers;
    const struct rr_slice *slot_heads, *ring_slices;
    const struct rr_block *slot_tables, *ring_tables;
    const struct rr_slice_times *slot_times, *ring_times;
    uint32_t transfer_count;
    uint32_t faulted; /* a violation was reported: nothing of this client is collected any more */
    struct rr_context *contexts;
    struct rr_region *regions;
    struct rr_remote *remotes;
    struct rr_tombstones *tombstones; /* NULL until the first abort; newest set first */
    struct rr_port ports[RR_MAX_RAILS];
};

/* Aborted tags: open addressing, filled to half. When a set is full a new one goes in front and the one before the last
 * goes, so that at least the latest RR_TOMBSTONES tags are known; it is freed once every rail has been between two of its
 * cycles. Written by the main thread. */
struct rr_tombstones {
    struct rr_tombstones *older;
    uint32_t count;
    uint32_t readers; /* on its way out: rails that may still look at it */
    uint64_t tags[2 * RR_TOMBSTONES];
    uint64_t owners[2 * RR_TOMBSTONES]; /* of aborts by a peer's client: rr_peer_owner(); else 0 */
};

/* What clients of a peer have aborted, for NICs whose receiver cannot refuse. A peer's row serves another peer under
 * another incarnation, so that old entries say nothing of it; likewise the numbers of its clients. */
struct rr_peer_aborts {
    struct rr_tombstones *tombstones;
    uint32_t incarnation;
    uint32_t owners[RR_MAX_CLIENTS];
};

/* Peer, remote rail and class: where slices wait for a connection or for their turn on it. */
struct rr_path {
    struct rr_path *next_active;
    struct rr_connection *connection;
    struct rr_flow *flow_first, *flow_last; /* flows with queued slices, next to be served first */
    uint32_t peer, remote_rail, class_;
    uint32_t active, wanted, broken, epoch;
    uint32_t unfinished; /* stopped in the middle of a frame to give others their turn: to be visited again */
};

struct rr_command {
    struct rr_command *next;
    void (*run)(struct rr_rail *, struct rr_command *);
    void (*discard)(struct rr_command *); /* in place of run when the rail has ended: frees what it holds; NULL: nothing */
    uint64_t cookie;
    uint64_t a, b, c, d;
    void *pointer;
    uint64_t pointer_bytes;
};

/* The latest frame of a sending connection that names something. */
struct rr_mark {
    uint64_t connection, sequence;
};

/* An answer that waits until the client has emptied its bounce memory up to a position, and until the NIC writes
 * nothing of what is refused. Or, with marks, until these frames, and those before them, have ended. */
struct rr_deferred {
    struct rr_deferred *next;
    uint32_t client, handle;
    uint64_t cookie, until, tag;
    struct rr_mark *marks;
    uint32_t mark_count;
};

/* What a rail with a verbs NIC is opened with. */
enum rr_verbs_flush { RR_FLUSH_AUTO = 0, RR_FLUSH_ALWAYS, RR_FLUSH_NEVER };

struct rr_verbs_options {
    char device[64];
    int32_t port, gid_index;
    uint32_t send_depth, signal_every;
    uint32_t flush;
};

struct rr_rail {
    struct rr_plane *plane;
    struct rr_rail_state *state;
    uint64_t *counters;
    struct rr_client *clients[RR_MAX_CLIENTS]; /* attached ones, dense */
    struct rr_client *by_number[RR_MAX_CLIENTS];
    struct rr_client *leaving[RR_MAX_CLIENTS]; /* detached, with work that the NIC still has */
    uint32_t client_count, leaving_count;
    struct rr_path *paths; /* [max_peers * RR_MAX_RAILS * RR_CLASSES] */
    struct rr_path *active;
    struct rr_nic *nic;
    struct rr_deferred *deferred;
    uint32_t frames_ended; /* since the deferred answers with marks were looked at */
    struct rr_verbs_options verbs;
    struct rr_trace_writer trace;
    uint64_t now_ns; /* 0: not known (rr_rail_now) */
    uint64_t bytes_per_s; /* emulated NIC */
    int number, cpu, kick_fd;
    uint32_t stop;
    pthread_t thread;
    int started;
    pthread_mutex_t command_lock;
    struct rr_command *command_first, *command_last;
    uint32_t commands_waiting;
};

struct rr_plane {
    struct rr_segment_header *node;
    struct rr_rail_state *rail_states;
    struct rr_lane_state *lane_states;
    struct rr_trace_record *trace_records;
    uint64_t instance;
    uint32_t rail_count, max_clients, max_peers, max_sessions, max_exports, regions_per_client, remotes_per_client;
    uint32_t slots, table_entries, bounce_slots;
    uint32_t remote_version; /* main thread */
    struct rr_peer_aborts *peers; /* [max_peers] */
    uint64_t slot_bytes, direct_slice_bytes, spin_ns;
    struct rr_rail rails[RR_MAX_RAILS];
    struct rr_client **clients;
    struct rr_export *exports;
    struct rr_verbs *verbs; /* NULL: no such rail */
    char error[256];        /* why the last call on the main thread failed, if a number does not say it */
    int event_fd;
    pthread_mutex_t event_lock;
    struct rr_event *events;
    uint32_t event_count, event_capacity;
    struct rr_fence_record *fences;  /* under event_lock */
    struct rr_holder *holders;       /* under event_lock */
    uint32_t holder_count, holder_capacity;
};

struct rr_fence_record {
    struct rr_fence_record *next;
    uint64_t connection;
    uint32_t ack_count;
    struct rr_ack acks[RR_WINDOW];
};

struct rr_holder {
    uint64_t cookie, connection;
    int rail;
};

/* ---- control.c: main thread ---- */
struct rr_plane *rr_plane_create(void *node, uint64_t instance, uint32_t max_peers, uint32_t max_sessions, uint32_t max_exports,
                                 uint32_t regions_per_client, uint32_t remotes_per_client, uint64_t direct_slice_bytes, uint64_t spin_ns);
/* rail or -errno, with plane->error set where a number does not say it. options: verbs NIC. */
int rr_plane_add_rail(struct rr_plane *plane, const char *nic, int cpu, uint64_t bytes_per_s, const struct rr_verbs_options *options);
int rr_plane_fail_nic(struct rr_plane *plane, uint32_t rail, uint32_t result);
int rr_plane_start(struct rr_plane *plane);
void rr_plane_stop(struct rr_plane *plane);
void rr_plane_free(struct rr_plane *plane);
void rr_event_push(struct rr_plane *plane, int64_t kind, int64_t rail, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e);
uint32_t rr_plane_take_events(struct rr_plane *plane, struct rr_event *out, uint32_t max);
int rr_plane_attach_client(struct rr_plane *plane, uint32_t client, uint32_t serial, int fd, uint64_t bytes, uint64_t cookie);
int rr_plane_detach_client(struct rr_plane *plane, uint32_t client);
void rr_plane_release_client(struct rr_plane *plane, uint32_t client);
/* fd -1: memory that is not mapped here, at a made-up base. */
int rr_plane_lease_lane(struct rr_plane *plane, uint32_t client, uint32_t rail, int fd, uint64_t base, uint64_t bytes, uint64_t generation,
                        uint64_t cookie);
int rr_plane_add_bounce(struct rr_plane *plane, uint32_t client, uint32_t rail, int fd, uint64_t bytes, uint64_t cookie);
/* fd -1: private memory (base 0), or memory that is not mapped here, at a made-up base. */
int rr_plane_add_region(struct rr_plane *plane, uint32_t client, uint32_t region, int fd, uint64_t base, uint64_t offset, uint64_t bytes);
int rr_plane_remove_region(struct rr_plane *plane, uint32_t client, uint32_t region, uint64_t cookie);
void rr_plane_finish_region_removal(struct rr_plane *plane, uint32_t client, uint32_t region, int busy);
int rr_plane_add_remote(struct rr_plane *plane, uint32_t client, uint32_t remote, uint32_t peer, uint32_t handle, uint64_t bytes,
                        uint32_t rail, uint32_t owner, uint32_t window_bytes, uint32_t window_runs, uint64_t iova, const uint32_t *rkeys,
                        uint32_t rkey_count);
int rr_plane_set_lane_keys(struct rr_plane *plane, uint32_t client, uint32_t rail, const uint32_t *lkeys, uint32_t count, uint64_t cookie);
int rr_plane_set_region_keys(struct rr_plane *plane, uint32_t client, uint32_t region, const uint32_t *lkeys, uint32_t count);
int rr_plane_set_bounce_keys(struct rr_plane *plane, uint32_t client, uint32_t rail, const uint32_t *rkeys, uint32_t count, uint64_t cookie);
int rr_plane_drain_handle(struct rr_plane *plane, uint32_t peer, uint32_t handle, uint64_t cookie);
int rr_plane_add_peer_tombstone(struct rr_plane *plane, uint32_t peer, uint32_t owner, uint64_t tag);
int rr_plane_forget_peer_owner(struct rr_plane *plane, uint32_t peer, uint32_t owner);
void rr_plane_remove_remote(struct rr_plane *plane, uint32_t client, uint32_t remote);
int rr_plane_add_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint32_t peer, uint32_t remote_rail, int express,
                        uint32_t epoch, int fd);
int rr_plane_add_receiver(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint32_t session, int fd);
int rr_plane_settle_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint64_t placed, const struct rr_ack *acks,
                           uint32_t ack_count, uint64_t cookie);
int rr_plane_close_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection);
int rr_plane_fail_path(struct rr_plane *plane, uint32_t rail, uint32_t peer, uint32_t remote_rail, int express, uint32_t result,
                       uint64_t cookie);
int rr_plane_drop_peer(struct rr_plane *plane, uint32_t peer, uint32_t result, uint64_t cookie);
int rr_plane_forget_peer(struct rr_plane *plane, uint32_t peer);
int rr_plane_fence_receiver(struct rr_plane *plane, uint32_t rail, uint64_t connection);
int rr_plane_fence_acks(struct rr_plane *plane, uint64_t connection, struct rr_ack *acks); /* count or -1; forgets them */
int rr_plane_add_export(struct rr_plane *plane, uint32_t handle, uint32_t session, uint32_t client, uint32_t region, uint64_t bytes);
int rr_plane_remove_export(struct rr_plane *plane, uint32_t handle, uint64_t cookie);
int rr_plane_add_tombstone(struct rr_plane *plane, uint32_t client, uint64_t tag, uint64_t cookie);
int rr_plane_purge_stopped(struct rr_plane *plane);
int rr_plane_holders(struct rr_plane *plane, uint32_t client, uint32_t transfer, uint32_t generation, uint64_t cookie);
uint32_t rr_plane_holders_result(struct rr_plane *plane, uint64_t cookie, struct rr_holder *out, uint32_t max);

/* ---- guard.c: any thread ---- */
int rr_guard_install(void);
/* Of what a file of shared memory is mapped in: huge pages, perhaps. */
uint64_t rr_page_bytes(int fd);
struct rr_mapping *rr_map(int fd, uint64_t offset, uint64_t bytes, int *error);
/* Addresses that only a NIC understands, as a mapping. NULL: no memory. */
struct rr_mapping *rr_made_up(uint64_t base, uint64_t bytes);
static inline int rr_is_made_up(const struct rr_mapping *mapping) { return mapping && mapping->guard == RR_NONE; }
void rr_unmap(struct rr_mapping *mapping);
/* After EFAULT from a system call: replaces the mapping that holds the address by zero pages. 0 if none does. */
int rr_guard_patch(const void *address);
/* How many mappings were replaced so far. */
uint32_t rr_guard_patches(void);

/* ---- completion.c: rail threads and the main thread ---- */
int rr_transfer_open(struct rr_client *client, const struct rr_slice *slice, uint32_t handle, uint32_t owner);
int rr_transfer_total(struct rr_client *client, const struct rr_slice *slice);
int rr_transfer_slice_done(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result, uint64_t bytes, int rail);
uint32_t rr_transfer_stopped(const struct rr_client *client, uint32_t transfer, uint32_t generation);
int rr_transfer_cancel(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result);
int rr_transfer_report_unsettled(struct rr_client *client, uint32_t transfer, uint32_t generation);
int rr_transfer_finish_note(struct rr_client *client, uint32_t transfer, uint32_t generation, uint32_t result);
int rr_transfer_watch(struct rr_client *client, uint32_t transfer, uint32_t generation);
void rr_wake_feeder(struct rr_client *client);

/* ---- collector.c: rail thread ---- */
int rr_collect(struct rr_rail *rail);
/* Is there anything to collect? For the look before sleeping. */
int rr_collect_pending(struct rr_rail *rail);
int rr_collect_filling(struct rr_rail *rail); /* a slot is announced and not filled yet */
void rr_source_init(struct rr_source *source, struct rr_client *client, uint32_t works, uint32_t table_entries, uint32_t flows, int is_lane,
                    int one_sided);
void rr_source_free(struct rr_source *source);

/* ---- local_slices.c: rail thread ---- */
/* Takes a slice of the local route in place of rr_transfer_open(). 0, or -1 for one that no correct client publishes. */
int rr_local_take(struct rr_rail *rail, struct rr_work *work, const struct rr_slice *slice, uint32_t *result);

/* ---- rail.c: rail thread ---- */
void rr_purge(struct rr_rail *rail, int (*drop)(const struct rr_work *work, const void *context), const void *context, uint32_t result);
void rr_rail_command(struct rr_rail *rail, struct rr_command command); /* main thread */
void rr_rail_wake(struct rr_rail *rail);                               /* any thread */
struct rr_path *rr_path_of(struct rr_rail *rail, uint32_t peer, uint32_t remote_rail, uint32_t class_);
void rr_path_queue(struct rr_rail *rail, struct rr_work *work, int front);
void rr_path_activate(struct rr_rail *rail, struct rr_path *path); /* the rail visits it in each cycle, until it has nothing left */
/* The next slice of a path by deficit round robin over its flows; NULL if none waits. */
struct rr_work *rr_path_next(struct rr_rail *rail, struct rr_path *path);
void rr_work_done(struct rr_rail *rail, struct rr_work *work, uint32_t result);
struct rr_debt rr_work_owe(struct rr_rail *rail, struct rr_work *work);
void rr_debt_paid(struct rr_rail *rail, struct rr_debt *debt, uint32_t result);
void rr_violation(struct rr_rail *rail, struct rr_client *client, uint32_t result, uint64_t a, uint64_t b, uint64_t c);
void *rr_rail_main(void *rail);

/* The time of the step that the rail is at. Whoever has done something that may take a microsecond says so, and only
 * then is the clock read again: a small slice costs two readings, slices in a batch less. */
static inline uint64_t rr_rail_now(struct rr_rail *rail)
{
    if (!rail->now_ns) rail->now_ns = rr_now_ns();
    return rail->now_ns;
}

static inline void rr_rail_time_passes(struct rr_rail *rail) { rail->now_ns = 0; }

/* A NIC calls it when it begins to send the work. */
static inline void rr_work_posted(struct rr_rail *rail, struct rr_work *work)
{
    work->state = RR_WORK_POSTED;
    work->posted_ns = rr_rail_now(rail);
}

/* ---- any rail thread ---- */
int rr_has_tombstone(const struct rr_client *client, uint64_t tag);
int rr_aborted_by_peer(const struct rr_plane *plane, uint32_t peer, uint32_t owner, uint64_t tag);

static inline uint64_t rr_tombstone_hash(uint64_t tag) { return (tag * 0x9e3779b97f4a7c15ull >> 40) % (2 * RR_TOMBSTONES); }
static inline uint64_t rr_peer_owner(const struct rr_peer_aborts *aborts, uint32_t owner)
{
    return (uint64_t)rr_load_relaxed_u32(&aborts->incarnation) << 40 | (uint64_t)rr_load_relaxed_u32(&aborts->owners[owner]) << 8 | owner;
}

static inline void rr_count(struct rr_rail *rail, enum rr_rail_counter id, uint64_t value) { rr_counter_add(&rail->counters[id], value); }

#endif
