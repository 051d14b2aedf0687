/* Opening and closing of a client: segments, lanes, bounce memory, threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client_core.h"

int rc_fail(struct rc_error *error, const char *code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    error->code = code;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return -1;
}

static void *map_segment(int fd, uint64_t bytes, int protection)
{
    void *base = mmap(NULL, bytes, protection, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return NULL;
    madvise(base, bytes, MADV_DONTFORK);
    return base;
}

static void *area(void *segment, uint32_t id)
{
    struct rr_segment_header *header = segment;
    struct rr_area *areas = (struct rr_area *)((uint8_t *)segment + RR_AREA_TABLE_OFFSET);
    for (uint32_t i = 0; i < header->area_count && i < RR_AREAS_MAX; i++)
        if (areas[i].id == id && areas[i].offset < header->segment_bytes) return (uint8_t *)segment + areas[i].offset;
    return NULL;
}

static int check_header(void *base, uint64_t bytes, uint32_t kind, struct rc_error *error)
{
    const struct rr_segment_header *header = base;
    uint32_t version = rr_load_acquire_u32(&header->version); /* SYNC version */
    if (bytes < sizeof *header + RR_AREAS_MAX * sizeof(struct rr_area) || header->magic != RR_MAGIC)
        return rc_fail(error, "abi", "the segment is not a railrelay segment (magic %#llx)", (unsigned long long)header->magic);
    if (version >> 16 != RR_ABI_MAJOR)
        return rc_fail(error, "abi", "the daemon's shared memory has ABI %u.%u, this client has %u.%u; install the same version on both",
                    version >> 16, version & 0xffff, RR_ABI_MAJOR, RR_ABI_MINOR);
    if (header->kind != kind || header->segment_bytes > bytes)
        return rc_fail(error, "abi", "segment of kind %u with %llu bytes, expected kind %u with at most %llu", header->kind,
                    (unsigned long long)header->segment_bytes, kind, (unsigned long long)bytes);
    return 0;
}

struct rc_core *rc_open(int segment_fd, uint64_t segment_bytes, int node_fd, uint64_t node_bytes, const int *kick_fds, uint32_t kick_count,
                        uint32_t own_rail, uint32_t route, uint64_t direct_slice_bytes, uint64_t express_bytes, uint64_t bytes_max, int feeder_cpu,
                        struct rc_error *error)
{
    struct rc_core *core = calloc(1, sizeof *core);
    if (!core) return rc_fail(error, "no_memory", "no memory for the client"), NULL;
    core->completion_fd = core->hang_up_fd = core->daemon_pidfd = -1;
    core->pid = getpid();
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) core->kick_fds[i] = -1;
    pthread_mutex_init(&core->queue, NULL);
    pthread_rwlock_init(&core->tables, NULL);
    if (rc_mappings_init(core)) {
        rc_fail(error, "no_memory", "no memory for the table of mappings");
        goto broken;
    }
    core->segment_bytes = segment_bytes;
    core->node_bytes = node_bytes;
    core->segment = map_segment(segment_fd, segment_bytes, PROT_READ | PROT_WRITE);
    core->node = map_segment(node_fd, node_bytes, PROT_READ);
    if (!core->segment || !core->node) {
        rc_fail(error, "no_memory", "cannot map the daemon's segments: %s", strerror(errno));
        goto broken;
    }
    if (check_header(core->segment, segment_bytes, RR_SEGMENT_CLIENT, error)) goto broken;
    if (check_header((void *)core->node, node_bytes, RR_SEGMENT_NODE, error)) goto broken;
    core->header = core->segment;
    core->facts = *core->header;
    core->rail_count = core->facts.rails;
    core->own_rail = own_rail;
    core->route = route;
    core->direct_slice_bytes = direct_slice_bytes;
    core->express_bytes = express_bytes;
    core->bytes_max = bytes_max;
    core->feeder_cpu = feeder_cpu;
    core->rails = area((void *)core->node, RR_AREA_RAILS);
    core->control = area(core->segment, RR_AREA_CONTROL);
    core->transfers = area(core->segment, RR_AREA_TRANSFERS);
    core->slot_heads = area(core->segment, RR_AREA_SLOT_HEADS);
    core->slot_tables = area(core->segment, RR_AREA_SLOT_TABLES);
    core->slot_times = area(core->segment, RR_AREA_SLOT_TIMES);
    struct rr_slice_times *ring_times = area(core->segment, RR_AREA_RING_TIMES);
    struct rr_ring *rings = area(core->segment, RR_AREA_RINGS);
    struct rr_slice *ring_slices = area(core->segment, RR_AREA_RING_SLICES);
    struct rr_block *ring_tables = area(core->segment, RR_AREA_RING_TABLES);
    struct rr_bounce *bounces = area(core->segment, RR_AREA_BOUNCES);
    struct rr_bounce_frame *bounce_frames = area(core->segment, RR_AREA_BOUNCE_HEADS);
    struct rr_run *bounce_runs = area(core->segment, RR_AREA_BOUNCE_RUNS);
    if (!core->rails || !core->control || !core->transfers || !core->slot_heads || !core->slot_tables || !core->slot_times || !ring_times || !rings || !ring_slices ||
        !ring_tables || !bounces || !bounce_frames || !bounce_runs || core->rail_count == 0 || core->rail_count > RR_MAX_RAILS || core->facts.ring_slices > RR_MAX_RING_SLICES ||
        kick_count < core->rail_count || own_rail >= core->rail_count) {
        rc_fail(error, "abi", "the daemon's segment lacks an area or a rail (rails %u, kicks %u, own rail %u)", core->rail_count, kick_count, own_rail);
        goto broken;
    }
    for (uint32_t i = 0; i < core->rail_count; i++) {
        pthread_mutex_init(&core->lanes[i].lock, NULL);
        pthread_mutex_init(&core->rings[i].lock, NULL);
        struct rc_ring *ring = &core->rings[i];
        ring->producer.ring = &rings[i];
        ring->producer.slices = ring_slices + (size_t)i * core->facts.ring_slices;
        ring->producer.mask = core->facts.ring_slices - 1;
        ring->ticket_count = core->facts.ring_slices;
        for (uint32_t t = 0; t < ring->ticket_count; t++) {
            ring->tickets[t] = (uint16_t)t;
            ring->destination_of[t] = RC_DESTINATIONS;
        }
        ring->tables = ring_tables + (size_t)i * core->facts.ring_tables * core->facts.table_entries;
        ring->times = ring_times + (size_t)i * core->facts.ring_slices;
        ring->table_position = calloc(core->facts.ring_tables, sizeof *ring->table_position);
        core->kick_fds[i] = dup(kick_fds[i]);
        core->bounces[i].shared = &bounces[i];
        core->bounces[i].frames = bounce_frames + (size_t)i * core->facts.bounce_slots;
        core->bounces[i].runs = bounce_runs + (size_t)i * core->facts.bounce_slots * core->facts.table_entries;
        if (!ring->table_position || core->kick_fds[i] < 0) {
            rc_fail(error, "no_memory", "no memory or descriptor for the rings: %s", strerror(errno));
            goto broken;
        }
    }
    core->region_bases = calloc(RC_REGIONS_MAX, sizeof *core->region_bases);
    core->generations = calloc(core->facts.transfers, sizeof *core->generations);
    core->free_entries = calloc(core->facts.transfers, sizeof *core->free_entries);
    core->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!core->region_bases || !core->generations || !core->free_entries || core->completion_fd < 0) {
        rc_fail(error, "no_memory", "no memory or descriptor for the transfer table: %s", strerror(errno));
        goto broken;
    }
    for (uint32_t i = 0; i < core->facts.transfers; i++) core->free_entries[i] = core->facts.transfers - 1 - i;
    core->free_count = core->facts.transfers;
    if (pthread_create(&core->feeder, NULL, rc_feeder_main, core)) {
        rc_fail(error, "no_memory", "cannot start the feeder thread");
        goto broken;
    }
    core->feeder_started = 1;
    return core;
broken:
    rc_free(core);
    return NULL;
}

int rc_watch_daemon(struct rc_core *core, int pidfd)
{
    core->daemon_pidfd = fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
    return core->daemon_pidfd < 0 ? -errno : 0;
}

/* Ends every submission and stops the threads. */
void rc_stop(struct rc_core *core)
{
    int here = core->pid == getpid();
    if (here && core->control) rc_fail_all(core, RR_CLIENT_GONE);
    rr_store_release_u32(&core->stop, 1);
    if (core->feeder_started && here) {
        rr_fetch_add_u32(&core->control->feeder_wake, 1);
        rr_futex_wake(&core->control->feeder_wake, INT_MAX);
        pthread_join(core->feeder, NULL);
    }
    if (core->unbouncer_started && here) {
        rr_fetch_add_u32(&core->control->bounce_wake, 1);
        rr_futex_wake(&core->control->bounce_wake, INT_MAX);
        pthread_join(core->unbouncer, NULL);
    }
    core->feeder_started = core->unbouncer_started = 0;
}

/* Unmaps relay and bounce memory. The segments stay mapped until rc_free, because submissions that Python still holds
 * look at them; so does the completion eventfd, which event loops may still watch. */
void rc_close(struct rc_core *core)
{
    int here = core->pid == getpid();
    rc_stop(core);
    rc_close_copiers(core);
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) {
        if (core->lanes[i].memory && here) munmap(core->lanes[i].memory, core->lanes[i].memory_bytes);
        if (core->bounces[i].memory && here) munmap(core->bounces[i].memory, core->bounces[i].memory_bytes);
        if (core->kick_fds[i] >= 0) close(core->kick_fds[i]);
        core->lanes[i].memory = core->bounces[i].memory = NULL;
        core->kick_fds[i] = -1;
    }
    if (here) rc_mappings_free(core);
}

void rc_free(struct rc_core *core)
{
    rc_close(core);
    while (core->live) {
        struct rc_submission *next = core->live->next;
        rc_free_submission(core->live);
        core->live = next;
    }
    /* In a forked child the mappings are not there (MADV_DONTFORK), and something else may be. */
    if (core->pid == getpid()) {
        if (core->segment) munmap(core->segment, core->segment_bytes);
        if (core->node) munmap((void *)core->node, core->node_bytes);
    }
    if (core->completion_fd >= 0) close(core->completion_fd);
    if (core->daemon_pidfd >= 0) close(core->daemon_pidfd);
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) free(core->rings[i].table_position);
    for (uint32_t i = 0; i < RC_PEERS_MAX; i++) free(core->local_rails[i]);
    free(core->regions);
    free(core->mappings);
    free(core->region_bases);
    free(core->remotes);
    free(core->generations);
    free(core->free_entries);
    free(core);
}

struct rr_lane *rc_shared_lane(struct rc_core *core, uint32_t rail) { return (struct rr_lane *)area(core->segment, RR_AREA_LANE) + rail; }

int rc_add_lane(struct rc_core *core, uint32_t rail, int fd, uint64_t bytes, uint64_t generation)
{
    if (rail >= core->rail_count || bytes < core->facts.slots * core->facts.slot_bytes) return -EINVAL;
    struct rc_lane *lane = &core->lanes[rail];
    struct rr_lane *shared = rc_shared_lane(core, rail);
    if (rc_lane_is_leased(lane)) return -EBUSY;
    if (rr_load_acquire_u64(&shared->generation) != generation) return -ESTALE;
    uint8_t *memory = map_segment(fd, bytes, PROT_READ | PROT_WRITE);
    if (!memory) return -errno;
    madvise(memory, bytes, MADV_POPULATE_WRITE);
    pthread_mutex_lock(&lane->lock);
    rr_lane_producer_init(&lane->producer, shared, core->facts.slots);
    lane->memory_bytes = bytes;
    rr_store_release_pointer((void **)&lane->memory, memory);
    pthread_mutex_unlock(&lane->lock);
    return 0;
}

int rc_add_bounce(struct rc_core *core, uint32_t rail, int fd, uint64_t bytes)
{
    if (rail >= core->rail_count || bytes < core->facts.bounce_slots * core->facts.slot_bytes) return -EINVAL;
    struct rc_bounce *bounce = &core->bounces[rail];
    if (bounce->memory) return -EBUSY;
    uint8_t *memory = map_segment(fd, bytes, PROT_READ | PROT_WRITE);
    if (!memory) return -errno;
    madvise(memory, bytes, MADV_POPULATE_WRITE);
    bounce->memory_bytes = bytes;
    rr_store_release_pointer((void **)&bounce->memory, memory);
    if (!core->unbouncer_started) {
        if (pthread_create(&core->unbouncer, NULL, rc_unbouncer_main, core)) return -EAGAIN;
        core->unbouncer_started = 1;
    }
    return 0;
}
