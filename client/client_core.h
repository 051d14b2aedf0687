/* The client's data path in C: what the files about submissions (caller threads), feeder.c and gpu_lane.c (A, the feeder
 * thread) and unbouncer.c (the bounce thread) share. No function here holds the GIL.
 *
 * Locks are private to the process: `tables` guards regions, remotes and peers; `queue` guards the list of parts and
 * the table of submissions; each lane and ring has its own. Order: queue, then lane, ring or tables. */
#ifndef RAILRELAY_CLIENT_CORE_H
#define RAILRELAY_CLIENT_CORE_H

#include <pthread.h>
#include <stdint.h>

#include "abi.h"
#include "atomics.h"
#include "faults.h"
#include "gpu_copy.h"
#include "lane.h"
#include "ring.h"
#include "sleep.h"

#define RC_ERROR_TEXT 256
#define RC_PEERS_MAX 1024u
#define RC_REGIONS_MAX 65536u
#define RC_EXPRESS_SLOTS 2u /* slots of a lane that only small transfers may take */
#define RC_DESTINATIONS 256u
#define RC_ONE_PEER_SHARE 3u /* one destination holds at most a third of a lane while others wait */

enum rc_route { RC_ROUTE_RELAY = 0, RC_ROUTE_DIRECT, RC_ROUTE_SERIAL, RC_ROUTE_SCHEDULED, RC_ROUTE_RELAY_ALL, RC_ROUTE_MATCHED };

struct rc_error {
    const char *code;
    uint32_t rail; /* of "no_lane" */
    char text[RC_ERROR_TEXT];
};

struct rc_region {
    uint64_t address, bytes;
    uint32_t index, rail;
    int shared; /* the NIC of its rail reads it */
    int on_gpu;
    uint32_t users; /* unfinished submissions that read it */
};

struct rc_remote {
    uint64_t address, bytes;
    uint32_t index, peer, rail, owner, window_bytes, window_runs;
    uint32_t users; /* unfinished submissions that write to it */
    uint32_t local; /* memory of another client of the same daemon, mapped here when it was opened */
    uint32_t on_gpu; /* and on a GPU */
};

/* Where the memory of a local remote region is, until its owner or daemon wants it back. */
struct rc_mapping {
    uint8_t *base; /* NULL: not, or no longer */
    uint64_t bytes;
    uint32_t on_gpu; /* base is an address for the GPU */
};

/* Of a part of the local route: no byte is copied before the daemon has taken the slice that asks for admission. */
enum rc_local_stage { RC_LOCAL_NEW = 0, RC_LOCAL_ASKED, RC_LOCAL_COPYING, RC_LOCAL_LOST, RC_LOCAL_TOLD };

/* A contiguous source and destination: source is an address here, destination an offset in the remote region. */
struct rc_block {
    uint64_t source, destination, length;
    uint32_t region, remote;
};

/* A row of a paged transfer: piece of page p at source + source_pages[p] * source_stride, and so on. */
struct rc_row {
    uint64_t source, destination;
    uint32_t region, remote;
};

struct rc_pages {
    struct rc_row *rows;
    int64_t *source_pages, *destination_pages;
    uint64_t source_stride, destination_stride, piece_bytes;
    uint32_t row_count, page_count;
    uint32_t *page_ends; /* where a GPU copies: index after the last page at the same distance on both sides; else NULL */
};

struct rc_submission;

/* The blocks of one submission that go one way: to one destination rail and owner, through one lane or ring. */
struct rc_part {
    struct rc_part *next;
    struct rc_submission *submission;
    uint32_t local_rail, remote_rail, owner, window_bytes, entries_max, direct;
    uint32_t on_gpu;  /* its source */
    uint32_t to_gpu;  /* local route: its destination */
    uint32_t by_page; /* rows of pages: all rows of a page before the next page */
    uint64_t bytes_left;
    uint64_t copied_at; /* on_gpu: doorbell of the lane, or signal of the local route, once its last piece is copied; 0 before that is enqueued */
    const struct rc_block *blocks; /* list of blocks */
    uint64_t block_count, block_at, block_offset;
    const uint32_t *row_indices; /* or rows of pages */
    const uint32_t *row_ends;    /* by place in row_indices: as page_ends */
    uint32_t row_count, row_at, page_at;
    int exhausted, stalled;
    uint64_t stalled_since_ns;
    uint32_t local;
    enum rc_local_stage local_stage;
    uint64_t asked_position, local_bytes;
};

/* What a submission waits for before its source is read: asked by the feeder, given back when the submission is freed. */
struct rc_ready {
    int (*query)(void *argument);
    void (*release)(void *argument);
    void *argument;
    int polled; /* nobody wakes the feeder when it comes true */
};

struct rc_event {
    uint32_t references;
    uint32_t set;
};

/* A recorded CUDA event. */
struct rc_gpu_event {
    struct rc_core *core;
    void *event;
    uint32_t references;
};

/* Peers' addresses are below 2^56; what is above tells processes of one peer apart whose addresses are equal. */
#define RC_SPACE_SHIFT 56u
#define RC_ADDRESS(spaced) ((spaced) & ((1ull << RC_SPACE_SHIFT) - 1)) /* for people */

struct rc_list {
    const uint64_t *sources, *destinations, *lengths;
    uint64_t count, space; /* space: added to each destination */
    int one_length;        /* lengths[0] is every block's */
};

struct rc_core;

struct rc_submission {
    struct rc_core *core;
    struct rc_submission *next; /* live list */
    uint32_t references;
    uint32_t index, generation, peer;
    uint32_t source_done, done, settled, result; /* release-stored by whoever learns of it */
    uint64_t bytes_done;
    uint64_t tag, timeout_ns, deadline_ns, ready_since_ns, bytes;
    uint32_t note, express, async_armed, cancelled, cancel_result, published, fed, any_direct, entry_released, in_feeder, ended_early;
    uint32_t any_gpu;
    uint32_t slices, parts_left;
    struct rc_block *blocks;
    struct rc_pages pages;
    uint32_t *row_indices, *row_ends;
    struct rc_part *parts;
    uint32_t part_count;
    uint32_t *used; /* indices of its regions, then of its remotes */
    uint32_t used_regions, used_remotes;
    struct rc_ready ready;
};

/* What cuda.py prepares for a copier: see struct rg_copier. */
struct rc_copier_facts {
    void *stream, *kernel, *lists;
    uint32_t list_count, list_runs, thread_blocks;
    int32_t forced;
    uint64_t base, doorbell;          /* addresses for the GPU */
    uint64_t scratch, scratch_target; /* RG_CALIBRATION_BYTES each, to measure costs with */
    double nic_rate;
};

struct rc_lane {
    pthread_mutex_t lock;
    struct rr_lane_producer producer;
    uint8_t *memory; /* NULL: not leased, or a GPU's */
    uint64_t memory_bytes;
    struct rg_copier *copier; /* NULL: filled by the CPU, which rings the doorbell too */
    uint32_t filling;         /* slots that threads of the CPU have reserved and not announced */
    uint64_t gpu_base;        /* with a copier: addresses of the memory and of the doorbell for the GPU */
    uint64_t gpu_doorbell;
    uint32_t destination_of[RR_MAX_SLOTS];
    uint64_t ramp_bytes;
    uint32_t contended; /* parts for more than one destination wait (feeder only) */
    uint32_t first_destination;
};

struct rc_ring {
    pthread_mutex_t lock;
    struct rr_ring_producer producer;
    struct rr_block *tables;
    struct rr_slice_times *times; /* by position in the ring */
    uint64_t *table_position; /* ring position + 1 of the slice that uses the table */
    uint32_t next_table;
    uint64_t ramp_bytes;
    uint64_t completed_seen;
    uint16_t tickets[RR_MAX_RING_SLICES]; /* free ones: the credit */
    uint32_t ticket_count;
    uint16_t destination_of[RR_MAX_RING_SLICES]; /* by ticket: a bucket of `held`, RC_DESTINATIONS if not under way */
    uint16_t held[RC_DESTINATIONS];             /* slices under way */
};

struct rc_bounce {
    struct rr_bounce *shared;
    struct rr_bounce_frame *frames;
    const struct rr_run *runs;
    uint8_t *memory;
    uint64_t memory_bytes, emptied;
    struct rg_copier *copier; /* fills regions on a GPU */
    uint64_t gpu_base;
};

struct rc_counters {
    uint64_t feeder_sleeps, feeder_wakes, slots, copied_bytes, stalls, stall_ns, direct_slices, bounced_bytes, fast_submissions, bytes_local;
};

/* A caller for whom the table of transfers, or what may be in flight, has no room yet. */
struct rc_waiter {
    struct rc_waiter *next;
    pthread_cond_t turn; /* it is the first now, or there is room */
};

struct rc_core {
    void *segment;
    const void *node;
    uint64_t segment_bytes, node_bytes;
    const struct rr_segment_header *header;
    struct rr_segment_header facts; /* private copy */
    const struct rr_rail_state *rails;
    struct rr_client_control *control;
    struct rr_transfer *transfers;
    struct rr_slice *slot_heads;
    struct rr_block *slot_tables;
    struct rr_slice_times *slot_times;
    uint32_t rail_count, own_rail, route, rank;
    uint64_t direct_slice_bytes, express_bytes;
    uint64_t bytes_max, bytes_in_flight; /* of all transfers; bytes_max 0: no limit */
    int kick_fds[RR_MAX_RAILS];
    int completion_fd, feeder_cpu, pid;
    int daemon_pidfd;     /* -1: not to be had */
    struct rc_lane lanes[RR_MAX_RAILS];
    struct rc_ring rings[RR_MAX_RAILS];
    struct rc_bounce bounces[RR_MAX_RAILS];

    pthread_rwlock_t tables;
    struct rc_region *regions;
    uint32_t region_count, region_capacity;
    uint64_t *region_bases; /* by region index; valid while a submission uses the region */
    struct rc_remote *remotes;
    uint32_t remote_count, remote_capacity;
    /* By remote index. The feeder reads while it copies; whoever takes a mapping away writes, and goes first. */
    pthread_rwlock_t mappings_lock;
    struct rc_mapping *mappings;
    uint8_t *local_rails[RC_PEERS_MAX]; /* [peer][remote rail] */
    uint32_t remote_rails[RC_PEERS_MAX];

    pthread_mutex_t queue;
    struct rc_part *first, *last;
    struct rc_submission *live;
    uint32_t *generations;
    uint32_t *free_entries;
    uint32_t free_count;
    struct rc_waiter *waiting; /* in the order in which they came; on their stacks */
    uint32_t dead; /* rr_result once fail_all was called */
    uint32_t scheduled_round;
    uint32_t queued_parts, async_armed;
    uint32_t gpu_is_awaited; /* feeder: somebody waits for the GPU, which wakes nobody */

    struct rg_api gpu;    /* functions are NULL until rc_use_gpu */
    void *gpu_context;
    uint32_t gpu_failure; /* the first CUresult that was not 0 */
    struct rg_copier *local_copier;  /* of the local route */
    uint64_t *local_signal;          /* pinned: how many lists the GPU has copied */
    uint64_t local_enqueued;         /* lists */
    int hang_up_fd;       /* the control socket: shut down after a GPU failure, so that the daemon takes the lanes back */

    pthread_t feeder, unbouncer;
    int feeder_started, unbouncer_started;
    uint32_t stop;
    struct rc_counters counters;
};

/* Holding queue. */
static inline void rc_wake_first(struct rc_core *core)
{
    if (core->waiting) pthread_cond_signal(&core->waiting->turn);
}

static inline int rc_lane_is_leased(const struct rc_lane *lane) { return lane->memory || lane->gpu_base; }

/* ---- opening.c ---- */
struct rr_lane *rc_shared_lane(struct rc_core *core, uint32_t rail);
__attribute__((format(printf, 3, 4))) int rc_fail(struct rc_error *error, const char *code, const char *format, ...); /* -1 */
struct rc_core *rc_open(int segment_fd, uint64_t segment_bytes, int node_fd, uint64_t node_bytes, const int *kick_fds, uint32_t kick_count,
                        uint32_t own_rail, uint32_t route, uint64_t direct_slice_bytes, uint64_t express_bytes, uint64_t bytes_max, int feeder_cpu,
                        struct rc_error *error);
void rc_stop(struct rc_core *core);
void rc_close(struct rc_core *core);
void rc_free(struct rc_core *core);
/* What the daemon left in bounce memory is not placed once it has exited. pidfd: duplicated. 0, or -errno. */
int rc_watch_daemon(struct rc_core *core, int pidfd);
int rc_add_lane(struct rc_core *core, uint32_t rail, int fd, uint64_t bytes, uint64_t generation);
int rc_add_bounce(struct rc_core *core, uint32_t rail, int fd, uint64_t bytes);

/* ---- memory_tables.c ---- */
int rc_add_region(struct rc_core *core, uint32_t index, uint64_t address, uint64_t bytes, int shared, int on_gpu, uint32_t rail);
int rc_remove_region(struct rc_core *core, uint32_t index); /* -EBUSY, -ENOENT */
int rc_add_peer(struct rc_core *core, uint32_t peer, const uint8_t *local_rails, uint32_t count);
int rc_add_remote(struct rc_core *core, struct rc_remote remote);
int rc_remove_remote(struct rc_core *core, uint32_t index); /* -EBUSY, -ENOENT */
/* Holding tables. */
const struct rc_region *rc_find_region(const struct rc_core *core, uint64_t address, const struct rc_region *hint);
const struct rc_remote *rc_find_remote(const struct rc_core *core, uint32_t peer, uint64_t address, const struct rc_remote *hint);
int rc_use_memory(struct rc_submission *submission, const struct rc_region *region, const struct rc_remote *remote);
void rc_leave_memory(struct rc_submission *submission);

/* ---- submission.c ---- */
struct rc_submission *rc_reserve(struct rc_core *core, uint32_t peer, const struct rc_list *list, uint64_t tag, uint64_t timeout_ns, int note,
                                 struct rc_ready ready, struct rc_error *error);
struct rc_submission *rc_reserve_pages(struct rc_core *core, uint32_t peer, const uint64_t *source_rows, uint64_t source_stride,
                                       const int64_t *source_pages, const uint64_t *destination_rows, uint64_t destination_stride,
                                       const int64_t *destination_pages, uint32_t row_count, uint32_t page_count, uint64_t piece_bytes,
                                       uint64_t tag, uint64_t timeout_ns, int note, struct rc_ready ready, struct rc_error *error);

/* ---- submission_life.c ---- */
void rc_publish(struct rc_submission *submission);
void rc_cancel(struct rc_submission *submission, uint32_t result);
/* what: 0 done, 1 source done, 2 settled. At most timeout_ns; 1 if it is. */
int rc_wait(struct rc_submission *submission, int what, uint64_t timeout_ns);
int rc_arm_async(struct rc_submission *submission);
void rc_release(struct rc_submission *submission);
void rc_fail_all(struct rc_core *core, uint32_t result);
/* Takes over what the daemon has written about the submission. Holding queue. */
void rc_harvest(struct rc_submission *submission);
void rc_reap(struct rc_core *core);
/* Whoever keeps the submission keeps no event: once it has served, and at the end. Feeder, or who frees. */
void rc_let_ready_go(struct rc_submission *submission);
void rc_free_submission(struct rc_submission *submission);
void rc_end_locally(struct rc_submission *submission, uint32_t result, int settled);

struct rc_event *rc_event_new(void);
struct rc_ready rc_event_ready(struct rc_event *event);
void rc_event_release(void *event);

/* ---- feeder.c ---- */
void *rc_feeder_main(void *core);
void rc_wake_feeder(struct rc_core *core);
void rc_wake_rail(struct rc_core *core, uint32_t rail);
/* For the trace, before the doorbell or the ring's position that hands the slice to the rail. */
static inline void rc_tell_times(struct rr_slice_times *times, uint64_t began_ns)
{
    rr_store_relaxed_u64(&times->began_ns, began_ns);
    rr_store_relaxed_u64(&times->filled_ns, rr_now_ns());
}
/* Describes a slice of the part that has been filled; of a part without bytes left it is the last. */
void rc_describe(struct rr_slice *slice, struct rc_part *part, uint32_t block_count, uint64_t bytes);
/* Fills and publishes one slice of the part if its lane or ring allows; 1 done, 0 no credit. */
int rc_feed(struct rc_core *core, struct rc_part *part, int small, int wait_for_lock);

/* ---- gpu_lane.c ---- */
int rc_use_gpu(struct rc_core *core, const uint64_t *functions, uint32_t count, void *context, int hang_up_fd);
int rc_add_gpu_lane(struct rc_core *core, uint32_t rail, uint64_t address, uint64_t bytes, uint64_t generation);
/* The lane is filled by copies on this stream from now on. -errno, or a CUresult. */
int rc_set_lane_copier(struct rc_core *core, uint32_t rail, const struct rc_copier_facts *facts);
int rc_set_bounce_copier(struct rc_core *core, uint32_t rail, const struct rc_copier_facts *facts);
/* facts.base is the pinned word that the GPU counts in. */
int rc_set_local_copier(struct rc_core *core, const struct rc_copier_facts *facts);
/* Feeder: enqueues a chunk of a part of the local route. RC_LOCAL_WAITS: the GPU is behind; -1: a destination is gone. */
#define RC_LOCAL_WAITS 2
int rc_copy_chunk_by_gpu(struct rc_core *core, struct rc_part *part);
/* Whether the GPU has copied everything that was enqueued for the part so far. */
int rc_part_is_copied(const struct rc_part *part);
int rc_local_gpu_has_reached(struct rc_core *core, uint64_t enqueued);
/* After rc_stop, and when the GPU is idle: the pinned word goes. */
void rc_forget_local_signal(struct rc_core *core);
/* Feeder, holding the lane's lock: fills the reserved slot on the GPU and announces it. */
void rc_fill_by_gpu(struct rc_core *core, struct rc_part *part, uint32_t slot, uint64_t limit);
/* The source of a submission on a GPU is not read any more. */
int rc_gpu_has_copied(const struct rc_submission *submission);
void rc_gpu_failed(struct rc_core *core, rg_result result);
/* Feeder. A context that is lost executes nothing any more, so no doorbell rings, and only asking shows why. */
int rc_gpu_is_filling(const struct rc_core *core);
void rc_ask_gpu(struct rc_core *core);
void rc_end_after_gpu_failure(struct rc_core *core);
struct rc_gpu_event *rc_gpu_event_new(struct rc_core *core, void *event); /* takes over the CUDA event */
void rc_gpu_event_release(void *event);
struct rc_ready rc_gpu_event_ready(struct rc_gpu_event *event);
void rc_close_copiers(struct rc_core *core);
/* Publishes a slice without blocks on the own rail's ring: the ring's position after it, 0 if there is no credit. */
uint64_t rc_push_void(struct rc_core *core, struct rr_slice slice);

/* ---- local.c ---- */
int rc_mappings_init(struct rc_core *core);
void rc_mappings_free(struct rc_core *core); /* the feeder has ended */
/* Maps memory of another client of this daemon as the destination `remote`; bytes from offset of the file. 0 or -errno. */
int rc_map_remote(struct rc_core *core, uint32_t remote, int fd, uint64_t offset, uint64_t bytes);
int rc_map_gpu_remote(struct rc_core *core, uint32_t remote, uint64_t address, uint64_t bytes);
/* Touches the pages, so that no transfer has to. */
void rc_populate_remote(struct rc_core *core, uint32_t remote);
/* After this no byte is written there by the local route: 1 if it was mapped. */
int rc_unmap_remote(struct rc_core *core, uint32_t remote);
/* As rc_feed: asks for admission, copies a bounded number of bytes, or tells of the end. */
int rc_feed_local(struct rc_core *core, struct rc_part *part);

/* ---- unbouncer.c ---- */
void *rc_unbouncer_main(void *core);

#endif
