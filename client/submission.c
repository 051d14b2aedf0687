/* Submissions: what callers' threads do. Checks a call against the regions, splits it into parts by way, hands them to
 * the feeder, waits for the end. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "client_core.h"

#define WAIT_SLICE_NS 250000000ull /* waiters look again this often: a dead daemon wakes nobody */
#define OVERLAP_BITS_MAX (1ull << 30)

__attribute__((format(printf, 3, 4))) static int fail(struct rc_error *error, const char *code, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    error->code = code;
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return -1;
}

struct rc_event *rc_event_new(void)
{
    struct rc_event *event = calloc(1, sizeof *event);
    if (event) event->references = 1;
    return event;
}

void rc_event_release(void *argument)
{
    struct rc_event *event = argument;
    if (rr_fetch_add_u32(&event->references, (uint32_t)-1) == 1) free(event);
}

static int event_query(void *argument) { return rr_load_acquire_u32(&((struct rc_event *)argument)->set) != 0; }

struct rc_ready rc_event_ready(struct rc_event *event)
{
    rr_fetch_add_u32(&event->references, 1);
    return (struct rc_ready){event_query, rc_event_release, event};
}

void rc_free_submission(struct rc_submission *s)
{
    if (s->ready.release) s->ready.release(s->ready.argument);
    free(s->blocks);
    free(s->pages.rows);
    free(s->pages.source_pages);
    free(s->pages.destination_pages);
    free(s->row_indices);
    free(s->parts);
    free(s->used);
    free(s);
}

/* ---- opening ---- */

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
        return fail(error, "abi", "the segment is not a railrelay segment (magic %#llx)", (unsigned long long)header->magic);
    if (version >> 16 != RR_ABI_MAJOR)
        return fail(error, "abi", "the daemon's shared memory has ABI %u.%u, this client has %u.%u; install the same version on both",
                    version >> 16, version & 0xffff, RR_ABI_MAJOR, RR_ABI_MINOR);
    if (header->kind != kind || header->segment_bytes > bytes)
        return fail(error, "abi", "segment of kind %u with %llu bytes, expected kind %u with at most %llu", header->kind,
                    (unsigned long long)header->segment_bytes, kind, (unsigned long long)bytes);
    return 0;
}

struct rc_core *rc_open(int segment_fd, uint64_t segment_bytes, int node_fd, uint64_t node_bytes, const int *kick_fds, uint32_t kick_count,
                        uint32_t own_rail, uint32_t route, uint64_t direct_slice_bytes, uint64_t express_bytes, int feeder_cpu,
                        struct rc_error *error)
{
    struct rc_core *core = calloc(1, sizeof *core);
    if (!core) return fail(error, "no_memory", "no memory for the client"), NULL;
    core->completion_fd = -1;
    core->pid = getpid();
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) core->kick_fds[i] = -1;
    pthread_mutex_init(&core->queue, NULL);
    pthread_rwlock_init(&core->tables, NULL);
    core->segment_bytes = segment_bytes;
    core->node_bytes = node_bytes;
    core->segment = map_segment(segment_fd, segment_bytes, PROT_READ | PROT_WRITE);
    core->node = map_segment(node_fd, node_bytes, PROT_READ);
    if (!core->segment || !core->node) {
        fail(error, "no_memory", "cannot map the daemon's segments: %s", strerror(errno));
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
    core->feeder_cpu = feeder_cpu;
    core->rails = area((void *)core->node, RR_AREA_RAILS);
    core->control = area(core->segment, RR_AREA_CONTROL);
    core->transfers = area(core->segment, RR_AREA_TRANSFERS);
    core->slot_heads = area(core->segment, RR_AREA_SLOT_HEADS);
    core->slot_tables = area(core->segment, RR_AREA_SLOT_TABLES);
    struct rr_ring *rings = area(core->segment, RR_AREA_RINGS);
    struct rr_slice *ring_slices = area(core->segment, RR_AREA_RING_SLICES);
    struct rr_block *ring_tables = area(core->segment, RR_AREA_RING_TABLES);
    struct rr_bounce *bounces = area(core->segment, RR_AREA_BOUNCES);
    struct rr_bounce_frame *bounce_frames = area(core->segment, RR_AREA_BOUNCE_HEADS);
    struct rr_run *bounce_runs = area(core->segment, RR_AREA_BOUNCE_RUNS);
    if (!core->rails || !core->control || !core->transfers || !core->slot_heads || !core->slot_tables || !rings || !ring_slices ||
        !ring_tables || !bounces || !bounce_frames || !bounce_runs || core->rail_count == 0 || core->rail_count > RR_MAX_RAILS ||
        kick_count < core->rail_count || own_rail >= core->rail_count) {
        fail(error, "abi", "the daemon's segment lacks an area or a rail (rails %u, kicks %u, own rail %u)", core->rail_count, kick_count, own_rail);
        goto broken;
    }
    for (uint32_t i = 0; i < core->rail_count; i++) {
        pthread_mutex_init(&core->lanes[i].lock, NULL);
        pthread_mutex_init(&core->rings[i].lock, NULL);
        struct rc_ring *ring = &core->rings[i];
        ring->producer.ring = &rings[i];
        ring->producer.slices = ring_slices + (size_t)i * core->facts.ring_slices;
        ring->producer.mask = core->facts.ring_slices - 1;
        ring->tables = ring_tables + (size_t)i * core->facts.ring_tables * core->facts.table_entries;
        ring->table_position = calloc(core->facts.ring_tables, sizeof *ring->table_position);
        core->kick_fds[i] = dup(kick_fds[i]);
        core->bounces[i].shared = &bounces[i];
        core->bounces[i].frames = bounce_frames + (size_t)i * core->facts.bounce_slots;
        core->bounces[i].runs = bounce_runs + (size_t)i * core->facts.bounce_slots * core->facts.table_entries;
        if (!ring->table_position || core->kick_fds[i] < 0) {
            fail(error, "no_memory", "no memory or descriptor for the rings: %s", strerror(errno));
            goto broken;
        }
    }
    core->region_bases = calloc(RC_REGIONS_MAX, sizeof *core->region_bases);
    core->generations = calloc(core->facts.transfers, sizeof *core->generations);
    core->free_entries = calloc(core->facts.transfers, sizeof *core->free_entries);
    core->completion_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!core->region_bases || !core->generations || !core->free_entries || core->completion_fd < 0) {
        fail(error, "no_memory", "no memory or descriptor for the transfer table: %s", strerror(errno));
        goto broken;
    }
    for (uint32_t i = 0; i < core->facts.transfers; i++) core->free_entries[i] = core->facts.transfers - 1 - i;
    core->free_count = core->facts.transfers;
    if (pthread_create(&core->feeder, NULL, rc_feeder_main, core)) {
        fail(error, "no_memory", "cannot start the feeder thread");
        goto broken;
    }
    core->feeder_started = 1;
    return core;
broken:
    rc_free(core);
    return NULL;
}

/* Ends every submission, stops the threads and unmaps relay and bounce memory. The segments stay mapped until rc_free,
 * because submissions that Python still holds look at them. */
void rc_close(struct rc_core *core)
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
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) {
        if (core->lanes[i].memory && here) munmap(core->lanes[i].memory, core->lanes[i].memory_bytes);
        if (core->bounces[i].memory && here) munmap(core->bounces[i].memory, core->bounces[i].memory_bytes);
        if (core->kick_fds[i] >= 0) close(core->kick_fds[i]);
        core->lanes[i].memory = core->bounces[i].memory = NULL;
        core->kick_fds[i] = -1;
    }
    if (core->completion_fd >= 0) close(core->completion_fd);
    core->completion_fd = -1;
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
    for (uint32_t i = 0; i < RR_MAX_RAILS; i++) free(core->rings[i].table_position);
    for (uint32_t i = 0; i < RC_PEERS_MAX; i++) free(core->local_rails[i]);
    free(core->regions);
    free(core->region_bases);
    free(core->remotes);
    free(core->generations);
    free(core->free_entries);
    free(core);
}

int rc_add_lane(struct rc_core *core, uint32_t rail, int fd, uint64_t bytes, uint64_t generation)
{
    if (rail >= core->rail_count || bytes < core->facts.slots * core->facts.slot_bytes) return -EINVAL;
    struct rc_lane *lane = &core->lanes[rail];
    struct rr_lane *shared = (struct rr_lane *)area(core->segment, RR_AREA_LANE) + rail;
    if (lane->memory) return -EBUSY;
    if (rr_load_acquire_u64(&shared->generation) != generation) return -ESTALE;
    uint8_t *memory = map_segment(fd, bytes, PROT_READ | PROT_WRITE);
    if (!memory) return -errno;
    madvise(memory, bytes, MADV_POPULATE_WRITE);
    pthread_mutex_lock(&lane->lock);
    rr_lane_producer_init(&lane->producer, shared, core->facts.slots);
    lane->memory_bytes = bytes;
    lane->memory = memory;
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
    bounce->memory_bytes = bytes;
    rr_store_release_pointer((void **)&bounce->memory, memory);
    if (!core->unbouncer_started) {
        if (pthread_create(&core->unbouncer, NULL, rc_unbouncer_main, core)) return -EAGAIN;
        core->unbouncer_started = 1;
    }
    return 0;
}

/* ---- tables of regions, sorted by address ---- */

static int grow(void **array, uint32_t count, uint32_t *capacity, size_t bytes)
{
    if (count < *capacity) return 0;
    uint32_t more = *capacity ? 2 * *capacity : 64;
    void *moved = realloc(*array, more * bytes);
    if (!moved) return -ENOMEM;
    *array = moved;
    *capacity = more;
    return 0;
}

int rc_add_region(struct rc_core *core, uint32_t index, uint64_t address, uint64_t bytes, int shared, uint32_t rail)
{
    if (index >= RC_REGIONS_MAX) return -EINVAL;
    pthread_rwlock_wrlock(&core->tables);
    int status = grow((void **)&core->regions, core->region_count, &core->region_capacity, sizeof *core->regions);
    uint32_t at = core->region_count;
    while (!status && at && core->regions[at - 1].address > address) at--;
    if (!status && ((at && core->regions[at - 1].address + core->regions[at - 1].bytes > address) ||
                    (at < core->region_count && address + bytes > core->regions[at].address)))
        status = -EEXIST;
    if (!status) {
        memmove(core->regions + at + 1, core->regions + at, (core->region_count - at) * sizeof *core->regions);
        core->regions[at] = (struct rc_region){address, bytes, index, rail, shared, 0};
        core->region_count++;
        core->private_regions += !shared;
        core->region_bases[index] = address;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

int rc_remove_region(struct rc_core *core, uint32_t index)
{
    int status = -ENOENT;
    pthread_rwlock_wrlock(&core->tables);
    for (uint32_t i = 0; i < core->region_count; i++) {
        struct rc_region *region = &core->regions[i];
        if (region->index != index) continue;
        status = rr_load_acquire_u32(&region->users) ? -EBUSY : 0;
        if (status) break;
        core->private_regions -= !region->shared;
        memmove(region, region + 1, (core->region_count - i - 1) * sizeof *region);
        core->region_count--;
        break;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

int rc_add_peer(struct rc_core *core, uint32_t peer, const uint8_t *local_rails, uint32_t count)
{
    if (peer >= RC_PEERS_MAX || count == 0 || count > RR_MAX_RAILS) return -EINVAL;
    uint8_t *copy = malloc(RR_MAX_RAILS);
    if (!copy) return -ENOMEM;
    memset(copy, 0, RR_MAX_RAILS);
    for (uint32_t i = 0; i < count; i++) copy[i] = local_rails[i] < core->rail_count ? local_rails[i] : 0;
    pthread_rwlock_wrlock(&core->tables);
    free(core->local_rails[peer]);
    core->local_rails[peer] = copy;
    core->remote_rails[peer] = count;
    pthread_rwlock_unlock(&core->tables);
    return 0;
}

int rc_add_remote(struct rc_core *core, struct rc_remote remote)
{
    if (remote.peer >= RC_PEERS_MAX || !core->local_rails[remote.peer] || remote.rail >= core->remote_rails[remote.peer]) return -EINVAL;
    pthread_rwlock_wrlock(&core->tables);
    int status = grow((void **)&core->remotes, core->remote_count, &core->remote_capacity, sizeof *core->remotes);
    uint32_t at = core->remote_count;
    while (!status && at && (core->remotes[at - 1].peer > remote.peer ||
                             (core->remotes[at - 1].peer == remote.peer && core->remotes[at - 1].address > remote.address)))
        at--;
    if (!status) {
        memmove(core->remotes + at + 1, core->remotes + at, (core->remote_count - at) * sizeof *core->remotes);
        core->remotes[at] = remote;
        core->remote_count++;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

int rc_remove_remote(struct rc_core *core, uint32_t index)
{
    int status = -ENOENT;
    pthread_rwlock_wrlock(&core->tables);
    for (uint32_t i = 0; i < core->remote_count; i++) {
        if (core->remotes[i].index != index) continue;
        status = rr_load_acquire_u32(&core->remotes[i].users) ? -EBUSY : 0;
        if (status) break;
        memmove(core->remotes + i, core->remotes + i + 1, (core->remote_count - i - 1) * sizeof *core->remotes);
        core->remote_count--;
        break;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

static const struct rc_region *find_region(const struct rc_core *core, uint64_t address, const struct rc_region *hint)
{
    if (hint && address >= hint->address && address - hint->address < hint->bytes) return hint;
    uint32_t low = 0, high = core->region_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (core->regions[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low || address - core->regions[low - 1].address >= core->regions[low - 1].bytes) return NULL;
    return &core->regions[low - 1];
}

static const struct rc_remote *find_remote(const struct rc_core *core, uint32_t peer, uint64_t address, const struct rc_remote *hint)
{
    if (hint && address >= hint->address && address - hint->address < hint->bytes) return hint;
    uint32_t low = 0, high = core->remote_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        const struct rc_remote *at = &core->remotes[middle];
        if (at->peer < peer || (at->peer == peer && at->address <= address))
            low = middle + 1;
        else
            high = middle;
    }
    if (!low) return NULL;
    const struct rc_remote *at = &core->remotes[low - 1];
    return at->peer == peer && address - at->address < at->bytes ? at : NULL;
}

/* ---- overlap of destinations ---- */

struct overlap {
    uint64_t low, high, granule_bits, granules;
    uint64_t *bits;
    struct {
        uint64_t start, end;
    } *spans;
    uint64_t span_count;
};

static void overlap_see(struct overlap *o, uint64_t address, uint64_t length)
{
    if (address < o->low) o->low = address;
    if (address + length > o->high) o->high = address + length;
    o->granule_bits |= address | length;
}

static int overlap_begin(struct overlap *o, uint64_t count)
{
    uint64_t granule = o->granule_bits & -o->granule_bits;
    o->low = o->low / granule * granule;
    o->granules = (o->high - o->low + granule - 1) / granule;
    o->granule_bits = granule;
    if (o->granules <= OVERLAP_BITS_MAX && o->granules <= 64 * count * 64)
        o->bits = calloc((o->granules + 63) / 64, 8);
    else
        o->spans = malloc(count * sizeof *o->spans);
    return o->bits || o->spans ? 0 : -1;
}

static int overlap_add(struct overlap *o, uint64_t address, uint64_t length)
{
    if (!o->bits) {
        o->spans[o->span_count].start = address;
        o->spans[o->span_count++].end = address + length;
        return 0;
    }
    uint64_t at = (address - o->low) / o->granule_bits, end = at + length / o->granule_bits;
    while (at < end) {
        uint64_t word = at / 64, from = at % 64, to = end - word * 64 < 64 ? end - word * 64 : 64;
        uint64_t mask = (to == 64 ? ~0ull : (1ull << to) - 1) & ~((1ull << from) - 1);
        if (o->bits[word] & mask) return -1;
        o->bits[word] |= mask;
        at = word * 64 + to;
    }
    return 0;
}

static int by_start(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static int overlap_end(struct overlap *o, uint64_t *where)
{
    int status = 0;
    if (o->spans) {
        qsort(o->spans, o->span_count, sizeof *o->spans, by_start);
        for (uint64_t i = 1; i < o->span_count && !status; i++) {
            if (o->spans[i].start < o->spans[i - 1].end) {
                status = -1;
                *where = o->spans[i].start;
            }
        }
    }
    free(o->bits);
    free(o->spans);
    return status;
}

/* ---- making a submission ---- */

/* Holding queue: gives the entry of every settled submission back. */
static void reap(struct rc_core *core)
{
    for (struct rc_submission *s = core->live, *next; s; s = next) {
        next = s->next;
        rc_harvest(s);
    }
}

static int take_entry(struct rc_core *core, struct rc_submission *s, struct rc_error *error)
{
    uint64_t give_up = s->timeout_ns ? rr_now_ns() + s->timeout_ns : 0;
    for (;;) {
        pthread_mutex_lock(&core->queue);
        if (core->dead) {
            pthread_mutex_unlock(&core->queue);
            return fail(error, "daemon_gone", "the relay daemon is gone; connect again once it runs");
        }
        if (!core->free_count) reap(core);
        if (core->free_count) {
            s->index = core->free_entries[--core->free_count];
            s->generation = ++core->generations[s->index];
            if (s->generation == 0) s->generation = ++core->generations[s->index];
            s->references = 2;
            s->next = core->live;
            core->live = s;
            pthread_mutex_unlock(&core->queue);
            break;
        }
        pthread_mutex_unlock(&core->queue);
        if (give_up && rr_now_ns() > give_up)
            return fail(error, "limit", "all %u transfers of this client are in flight and none ended within the time-out", core->facts.transfers);
        struct timespec nap = {0, 200000};
        nanosleep(&nap, NULL);
    }
    struct rr_transfer *shared = &core->transfers[s->index];
    rr_store_relaxed_u32(&shared->waiting, 0);
    rr_store_relaxed_u32(&shared->cancel, 0);
    rr_store_relaxed_u64(&shared->tag, s->tag);
    rr_store_relaxed_u64(&shared->timeout_ns, s->timeout_ns);
    rr_store_relaxed_u32(&shared->note, s->note);
    rr_store_release_u32(&shared->generation, s->generation);
    return 0;
}

struct way {
    uint32_t local_rail, remote_rail, owner, window_bytes, direct;
};

static struct way way_of(const struct rc_core *core, const struct rc_region *region, const struct rc_remote *remote)
{
    uint32_t local = core->local_rails[remote->peer][remote->rail];
    int relayed = core->route == RC_ROUTE_RELAY || core->route == RC_ROUTE_RELAY_ALL;
    struct way way = {core->own_rail, remote->rail, remote->owner, remote->window_bytes, (uint32_t)region->shared};
    if (relayed) {
        way.local_rail = local;
        way.direct = region->shared && local == core->own_rail && core->route == RC_ROUTE_RELAY;
    }
    return way;
}

static int same_way(const struct way *a, const struct way *b) { return memcmp(a, b, sizeof *a) == 0; }

#define WAYS_MAX 256u

static int find_way(struct way *ways, uint32_t *count, struct way way, uint32_t hint)
{
    if (hint < *count && same_way(&ways[hint], &way)) return (int)hint;
    for (uint32_t i = 0; i < *count; i++)
        if (same_way(&ways[i], &way)) return (int)i;
    if (*count == WAYS_MAX) return -1;
    ways[*count] = way;
    return (int)(*count)++;
}

static int make_parts(struct rc_submission *s, const struct way *ways, uint32_t count, struct rc_error *error)
{
    struct rc_core *core = s->core;
    s->parts = calloc(count, sizeof *s->parts);
    if (!s->parts) return fail(error, "no_memory", "no memory for %u parts", count);
    s->part_count = s->parts_left = count;
    for (uint32_t i = 0; i < count; i++) {
        struct rc_part *part = &s->parts[i];
        part->submission = s;
        part->local_rail = ways[i].local_rail;
        part->remote_rail = ways[i].remote_rail;
        part->owner = ways[i].owner;
        part->window_bytes = ways[i].window_bytes;
        part->direct = ways[i].direct;
        s->any_direct |= part->direct;
        if (!part->direct && !core->lanes[part->local_rail].memory)
            return fail(error, "no_lane", "lane of rail %u is not leased to this client", part->local_rail);
    }
    s->express = s->bytes <= core->express_bytes;
    return 0;
}

static int in_list(const uint32_t *list, uint32_t count, uint32_t index)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == index) return 1;
    return 0;
}

/* Counts the submission as a user of both, once each. Holding tables (shared: users is atomic). */
static int use(struct rc_submission *s, const struct rc_region *region, const struct rc_remote *remote)
{
    uint32_t total = s->used_regions + s->used_remotes;
    int new_region = !in_list(s->used, s->used_regions, region->index);
    int new_remote = !in_list(s->used + s->used_regions, s->used_remotes, remote->index);
    if (!new_region && !new_remote) return 0;
    uint32_t *more = realloc(s->used, (total + 2) * sizeof *more);
    if (!more) return -1;
    s->used = more;
    if (new_remote) {
        s->used[total++] = remote->index;
        s->used_remotes++;
        rr_fetch_add_u32((uint32_t *)&remote->users, 1);
    }
    if (new_region) {
        memmove(s->used + s->used_regions + 1, s->used + s->used_regions, s->used_remotes * sizeof *s->used);
        s->used[s->used_regions++] = region->index;
        rr_fetch_add_u32((uint32_t *)&region->users, 1);
    }
    return 0;
}

static void leave_regions(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    pthread_rwlock_rdlock(&core->tables);
    for (uint32_t r = 0; r < core->region_count; r++)
        if (in_list(s->used, s->used_regions, core->regions[r].index)) rr_fetch_add_u32(&core->regions[r].users, (uint32_t)-1);
    for (uint32_t r = 0; r < core->remote_count; r++)
        if (in_list(s->used + s->used_regions, s->used_remotes, core->remotes[r].index))
            rr_fetch_add_u32(&core->remotes[r].users, (uint32_t)-1);
    s->used_regions = s->used_remotes = 0;
    pthread_rwlock_unlock(&core->tables);
}

static struct rc_submission *begin(struct rc_core *core, uint32_t peer, uint64_t tag, uint64_t timeout_ns, int note, struct rc_ready ready,
                                   struct rc_error *error)
{
    if (peer >= RC_PEERS_MAX || !core->local_rails[peer]) {
        fail(error, "unknown_peer", "peer %u is not connected", peer);
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = calloc(1, sizeof *s);
    if (!s) {
        fail(error, "no_memory", "no memory for a transfer");
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    s->core = core;
    s->peer = peer;
    s->tag = tag;
    s->timeout_ns = timeout_ns;
    s->note = note != 0;
    s->ready = ready;
    return s;
}

typedef unsigned long long ull;

/* Resolves, checks and copies a list of blocks. Holding tables. */
static int take_blocks(struct rc_submission *s, const uint64_t *sources, const uint64_t *destinations, const uint64_t *lengths, uint64_t count,
                       struct rc_error *error)
{
    struct rc_core *core = s->core;
    struct way ways[WAYS_MAX];
    uint32_t way_count = 0, way = 0;
    uint64_t *way_blocks = calloc(WAYS_MAX, sizeof *way_blocks);
    uint8_t *way_of_block = NULL;
    const struct rc_region *region = NULL;
    const struct rc_remote *remote = NULL;
    struct overlap overlap = {.low = UINT64_MAX};
    s->blocks = malloc(count * sizeof *s->blocks);
    if (!s->blocks || !way_blocks) {
        free(way_blocks);
        return fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
    }
    int status = 0;
    for (uint64_t i = 0; i < count && !status; i++) {
        uint64_t length = lengths[i];
        if (length == 0 || length >> 63) {
            status = fail(error, "bad_length", "block %llu: length %lld, must be at least 1", (ull)i, (long long)length);
            break;
        }
        const struct rc_region *from = find_region(core, sources[i], region);
        const struct rc_remote *to = find_remote(core, s->peer, destinations[i], remote);
        if (!from) {
            status = fail(error, "unknown_region", "block %llu: source %#llx is in no registered region; register it first", (ull)i, (ull)sources[i]);
            break;
        }
        if (!to) {
            status = fail(error, "unknown_region", "block %llu: destination %#llx is in no region opened at this peer; open its offer first", (ull)i,
                          (ull)destinations[i]);
            break;
        }
        if (length > from->bytes - (sources[i] - from->address)) {
            status = fail(error, "out_of_bounds", "block %llu: source %#llx + %llu bytes passes the end of its region by %llu", (ull)i,
                          (ull)sources[i], (ull)length, (ull)(length - (from->bytes - (sources[i] - from->address))));
            break;
        }
        if (length > to->bytes - (destinations[i] - to->address)) {
            status = fail(error, "out_of_bounds", "block %llu: destination %#llx + %llu bytes passes the end of its region by %llu", (ull)i,
                          (ull)destinations[i], (ull)length, (ull)(length - (to->bytes - (destinations[i] - to->address))));
            break;
        }
        if (from != region || to != remote) {
            if (use(s, from, to)) status = fail(error, "no_memory", "no memory");
            int found = find_way(ways, &way_count, way_of(core, from, to), way);
            if (found < 0) status = fail(error, "limit", "more than %u destinations in one transfer", WAYS_MAX);
            if (found > 0 && !way_of_block) {
                way_of_block = calloc(count, 1);
                if (!way_of_block) status = fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
            }
            way = (uint32_t)found;
            region = from;
            remote = to;
        }
        if (status) break;
        if (way_of_block) way_of_block[i] = (uint8_t)way;
        way_blocks[way]++;
        s->blocks[i] = (struct rc_block){sources[i], destinations[i] - to->address, length, from->index, to->index};
        s->bytes += length;
        overlap_see(&overlap, destinations[i], length);
    }
    if (!status) {
        if (overlap_begin(&overlap, count)) status = fail(error, "no_memory", "no memory to check destinations");
        uint64_t i = 0, where = 0;
        for (; i < count && !status; i++)
            if (overlap_add(&overlap, destinations[i], lengths[i]))
                status = fail(error, "overlap", "block %llu: destination %#llx + %llu bytes overlaps another block of the same transfer", (ull)i,
                              (ull)destinations[i], (ull)lengths[i]);
        if (overlap_end(&overlap, &where) && !status)
            status = fail(error, "overlap", "destinations overlap at %#llx", (ull)where);
    }
    if (!status) status = make_parts(s, ways, way_count, error);
    if (!status) {
        struct rc_block *sorted = s->blocks;
        uint64_t start[WAYS_MAX], at = 0;
        for (uint32_t w = 0; w < way_count; at += way_blocks[w++]) start[w] = at;
        if (way_count > 1) {
            sorted = malloc(count * sizeof *sorted);
            if (!sorted) status = fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
            for (uint64_t i = 0; i < count && !status; i++) sorted[start[way_of_block[i]]++] = s->blocks[i];
            at = 0;
            for (uint32_t w = 0; w < way_count; at += way_blocks[w++]) start[w] = at;
            if (!status) {
                free(s->blocks);
                s->blocks = sorted;
            }
        }
        for (uint32_t w = 0; w < way_count && !status; w++) {
            s->parts[w].blocks = sorted + start[w];
            s->parts[w].block_count = way_blocks[w];
            for (uint64_t i = 0; i < way_blocks[w]; i++) s->parts[w].bytes_left += s->parts[w].blocks[i].length;
        }
    }
    free(way_blocks);
    free(way_of_block);
    return status;
}

struct rc_submission *rc_reserve(struct rc_core *core, uint32_t peer, const uint64_t *sources, const uint64_t *destinations,
                                 const uint64_t *lengths, uint64_t count, uint64_t tag, uint64_t timeout_ns, int note,
                                 struct rc_ready ready, struct rc_error *error)
{
    if (count == 0) {
        fail(error, "bad_length", "a transfer needs at least one block");
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = begin(core, peer, tag, timeout_ns, note, ready, error);
    if (!s) return NULL;
    pthread_rwlock_rdlock(&core->tables);
    int status = take_blocks(s, sources, destinations, lengths, count, error);
    pthread_rwlock_unlock(&core->tables);
    if (status || take_entry(core, s, error)) {
        leave_regions(s);
        rc_free_submission(s);
        return NULL;
    }
    return s;
}

static int take_rows(struct rc_submission *s, const uint64_t *source_rows, const uint64_t *destination_rows, struct rc_error *error)
{
    struct rc_core *core = s->core;
    struct rc_pages *p = &s->pages;
    int64_t source_low = INT64_MAX, source_high = INT64_MIN, destination_low = INT64_MAX, destination_high = INT64_MIN;
    for (uint32_t i = 0; i < p->page_count; i++) {
        if (p->source_pages[i] < source_low) source_low = p->source_pages[i];
        if (p->source_pages[i] > source_high) source_high = p->source_pages[i];
        if (p->destination_pages[i] < destination_low) destination_low = p->destination_pages[i];
        if (p->destination_pages[i] > destination_high) destination_high = p->destination_pages[i];
    }
    if (source_low < 0 || destination_low < 0)
        return fail(error, "out_of_bounds", "page index %lld is negative", (long long)(source_low < 0 ? source_low : destination_low));
    if ((uint64_t)source_high > (UINT64_MAX >> 2) / (p->source_stride ? p->source_stride : 1) ||
        (uint64_t)destination_high > (UINT64_MAX >> 2) / (p->destination_stride ? p->destination_stride : 1))
        return fail(error, "out_of_bounds", "page index %lld with a stride of %llu bytes is past any region",
                    (long long)(source_high > destination_high ? source_high : destination_high), (ull)p->source_stride);
    struct way ways[WAYS_MAX];
    uint32_t way_count = 0, way = 0, way_rows[WAYS_MAX] = {0};
    uint8_t *way_of_row = calloc(p->row_count, 1);
    p->rows = malloc(p->row_count * sizeof *p->rows);
    s->row_indices = malloc(p->row_count * sizeof *s->row_indices);
    if (!way_of_row || !p->rows || !s->row_indices) {
        free(way_of_row);
        return fail(error, "no_memory", "no memory for %u rows", p->row_count);
    }
    int status = 0;
    for (uint32_t r = 0; r < p->row_count && !status; r++) {
        uint64_t from_low = source_rows[r] + (uint64_t)source_low * p->source_stride;
        uint64_t from_span = (uint64_t)(source_high - source_low) * p->source_stride + p->piece_bytes;
        uint64_t to_low = destination_rows[r] + (uint64_t)destination_low * p->destination_stride;
        uint64_t to_span = (uint64_t)(destination_high - destination_low) * p->destination_stride + p->piece_bytes;
        const struct rc_region *from = find_region(core, from_low, NULL);
        const struct rc_remote *to = find_remote(core, s->peer, to_low, NULL);
        if (!from)
            status = fail(error, "unknown_region", "row %u: source page %lld at %#llx is in no registered region", r, (long long)source_low, (ull)from_low);
        else if (!to)
            status = fail(error, "unknown_region", "row %u: destination page %lld at %#llx is in no region opened at this peer", r,
                          (long long)destination_low, (ull)to_low);
        else if (from_span > from->bytes - (from_low - from->address))
            status = fail(error, "out_of_bounds", "row %u: source page %lld passes the end of its region by %llu bytes", r, (long long)source_high,
                          (ull)(from_span - (from->bytes - (from_low - from->address))));
        else if (to_span > to->bytes - (to_low - to->address))
            status = fail(error, "out_of_bounds", "row %u: destination page %lld passes the end of its region by %llu bytes", r,
                          (long long)destination_high, (ull)(to_span - (to->bytes - (to_low - to->address))));
        if (status) break;
        int found = find_way(ways, &way_count, way_of(core, from, to), way);
        if (found < 0) {
            status = fail(error, "limit", "more than %u destinations in one transfer", WAYS_MAX);
            break;
        }
        way = (uint32_t)found;
        way_of_row[r] = (uint8_t)way;
        way_rows[way]++;
        p->rows[r] = (struct rc_row){source_rows[r], destination_rows[r] - to->address, from->index, to->index};
        if (use(s, from, to)) status = fail(error, "no_memory", "no memory");
    }
    struct overlap overlap = {.low = UINT64_MAX};
    uint64_t count = (uint64_t)p->row_count * p->page_count, where = 0;
    for (uint32_t r = 0; r < p->row_count && !status; r++) {
        overlap_see(&overlap, destination_rows[r] + (uint64_t)destination_low * p->destination_stride, p->piece_bytes);
        overlap_see(&overlap, destination_rows[r] + (uint64_t)destination_high * p->destination_stride, p->piece_bytes);
    }
    overlap.granule_bits |= p->page_count > 1 ? p->destination_stride : 0;
    if (!status && overlap_begin(&overlap, count)) status = fail(error, "no_memory", "no memory to check destinations");
    for (uint32_t r = 0; r < p->row_count && !status; r++)
        for (uint32_t i = 0; i < p->page_count && !status; i++)
            if (overlap_add(&overlap, destination_rows[r] + (uint64_t)p->destination_pages[i] * p->destination_stride, p->piece_bytes))
                status = fail(error, "overlap", "row %u: destination page %lld overlaps another piece of the same transfer", r,
                              (long long)p->destination_pages[i]);
    if (overlap_end(&overlap, &where) && !status) status = fail(error, "overlap", "destinations overlap at %#llx", (ull)where);
    s->bytes = count * p->piece_bytes;
    if (!status) status = make_parts(s, ways, way_count, error);
    if (!status) {
        uint32_t at = 0;
        for (uint32_t w = 0; w < way_count; w++) {
            s->parts[w].row_indices = s->row_indices + at;
            s->parts[w].row_count = way_rows[w];
            s->parts[w].bytes_left = (uint64_t)way_rows[w] * p->page_count * p->piece_bytes;
            for (uint32_t r = 0; r < p->row_count; r++)
                if (way_of_row[r] == w) s->row_indices[at++] = r;
        }
    }
    free(way_of_row);
    return status;
}

struct rc_submission *rc_reserve_pages(struct rc_core *core, uint32_t peer, const uint64_t *source_rows, uint64_t source_stride,
                                       const int64_t *source_pages, const uint64_t *destination_rows, uint64_t destination_stride,
                                       const int64_t *destination_pages, uint32_t row_count, uint32_t page_count, uint64_t piece_bytes,
                                       uint64_t tag, uint64_t timeout_ns, int note, struct rc_ready ready, struct rc_error *error)
{
    if (row_count == 0 || page_count == 0 || piece_bytes == 0 || piece_bytes >> 62) {
        fail(error, "bad_length", "a paged transfer needs rows, pages and bytes: %u rows, %u pages, %lld bytes a piece", row_count, page_count,
             (long long)piece_bytes);
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = begin(core, peer, tag, timeout_ns, note, ready, error);
    if (!s) return NULL;
    s->pages.source_stride = source_stride;
    s->pages.destination_stride = destination_stride;
    s->pages.piece_bytes = piece_bytes;
    s->pages.row_count = row_count;
    s->pages.page_count = page_count;
    s->pages.source_pages = malloc(page_count * sizeof(int64_t));
    s->pages.destination_pages = malloc(page_count * sizeof(int64_t));
    int status = -1;
    if (s->pages.source_pages && s->pages.destination_pages) {
        memcpy(s->pages.source_pages, source_pages, page_count * sizeof(int64_t));
        memcpy(s->pages.destination_pages, destination_pages, page_count * sizeof(int64_t));
        pthread_rwlock_rdlock(&core->tables);
        status = take_rows(s, source_rows, destination_rows, error);
        pthread_rwlock_unlock(&core->tables);
    } else {
        fail(error, "no_memory", "no memory for %u pages", page_count);
    }
    if (status || take_entry(core, s, error)) {
        leave_regions(s);
        rc_free_submission(s);
        return NULL;
    }
    return s;
}

uint32_t rc_lanes_needed(struct rc_core *core, uint32_t peer)
{
    uint32_t needed = 0;
    pthread_rwlock_rdlock(&core->tables);
    for (uint32_t i = 0; i < core->remote_count; i++) {
        if (core->remotes[i].peer != peer) continue;
        for (uint32_t shared = 0; shared < 2; shared++) {
            if (!shared && !core->private_regions) continue;
            struct rc_region region = {.shared = (int)shared};
            struct way way = way_of(core, &region, &core->remotes[i]);
            if (!way.direct && !core->lanes[way.local_rail].memory) needed |= 1u << way.local_rail;
        }
    }
    pthread_rwlock_unlock(&core->tables);
    return needed;
}

/* ---- life of a submission ---- */

static void release_locked(struct rc_submission *s)
{
    if (--s->references == 0) rc_free_submission(s);
}

static void unlink_live(struct rc_submission *s)
{
    for (struct rc_submission **link = &s->core->live; *link; link = &(*link)->next) {
        if (*link != s) continue;
        *link = s->next;
        break;
    }
}

/* Holding queue. The entry may be used again only once the daemon has settled it and the feeder has let go. */
void rc_harvest(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    struct rr_transfer *shared = &core->transfers[s->index];
    if (s->entry_released) return;
    if (!s->done && s->published && rr_load_acquire_u32(&shared->done) == s->generation) { /* SYNC done */
        s->result = rr_load_relaxed_u32(&shared->result);
        s->bytes_done = rr_load_relaxed_u64(&shared->bytes);
        rr_store_release_u32(&s->done, 1);
    }
    if (!s->settled && s->done && rr_load_acquire_u32(&shared->settled) == s->generation) rr_store_release_u32(&s->settled, 1);
    if (!s->settled || !s->fed) return;
    s->entry_released = 1;
    rr_store_release_u32(&s->source_done, 1);
    core->free_entries[core->free_count++] = s->index;
    leave_regions(s);
    unlink_live(s);
    release_locked(s);
}

/* Holding queue: ends a submission of which the daemon knows nothing (or nothing any more). */
void rc_end_locally(struct rc_submission *s, uint32_t result)
{
    if (!s->done) {
        s->result = result;
        rr_store_release_u32(&s->done, 1);
    }
    if (result != RR_DAEMON_GONE) rr_store_release_u32(&s->settled, 1);
    rr_futex_wake(&s->core->transfers[s->index].done, INT_MAX);
    rr_futex_wake(&s->core->transfers[s->index].settled, INT_MAX);
    if (s->async_armed) rr_kick(s->core->completion_fd);
    rc_harvest(s);
}

void rc_publish(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    int exclusive = core->route == RC_ROUTE_SERIAL || core->route == RC_ROUTE_SCHEDULED;
    pthread_mutex_lock(&core->queue);
    if (s->published) {
        pthread_mutex_unlock(&core->queue);
        return;
    }
    s->published = 1;
    s->deadline_ns = s->timeout_ns ? rr_now_ns() + s->timeout_ns : 0;
    if (core->dead || s->cancelled) {
        s->fed = 1;
        rc_end_locally(s, core->dead ? core->dead : s->cancel_result);
        pthread_mutex_unlock(&core->queue);
        return;
    }
    /* One slice that its lane or ring takes at once needs no other thread. */
    if (s->express && s->part_count == 1 && !s->ready.query && !(exclusive && core->queued_parts) && rc_feed(core, s->parts, 1, 0) &&
        s->parts->exhausted) {
        s->fed = 1;
        if (!s->any_direct) rr_store_release_u32(&s->source_done, 1);
        core->counters.fast_submissions++;
        pthread_mutex_unlock(&core->queue);
        return;
    }
    s->in_feeder = 1;
    for (uint32_t i = 0; i < s->part_count; i++) {
        struct rc_part *part = &s->parts[i];
        if (part->exhausted) continue;
        part->next = NULL;
        if (core->last)
            core->last->next = part;
        else
            core->first = part;
        core->last = part;
        core->queued_parts++;
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
}

void rc_cancel(struct rc_submission *s, uint32_t result)
{
    struct rc_core *core = s->core;
    pthread_mutex_lock(&core->queue);
    rc_harvest(s);
    if (!s->done && !s->entry_released && !s->cancelled) {
        struct rr_transfer *shared = &core->transfers[s->index];
        s->cancelled = 1;
        s->cancel_result = result;
        rr_store_relaxed_u32(&shared->cancel_result, result);
        rr_store_release_u32(&shared->cancel, s->generation);
        if (!s->published) {
            s->published = s->fed = 1;
            rc_end_locally(s, result);
        }
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
}

static int reached(struct rc_submission *s, int what)
{
    return (int)rr_load_acquire_u32(what == 0 ? &s->done : what == 1 ? &s->source_done : &s->settled);
}

static int look(struct rc_submission *s, int what)
{
    if (reached(s, what)) return 1;
    pthread_mutex_lock(&s->core->queue);
    rc_harvest(s);
    pthread_mutex_unlock(&s->core->queue);
    return reached(s, what) || (what == 1 && reached(s, 0));
}

int rc_wait(struct rc_submission *s, int what, uint64_t timeout_ns)
{
    if (look(s, what)) return 1;
    if (!timeout_ns) return 0;
    struct rr_transfer *shared = &s->core->transfers[s->index];
    uint32_t *word = what == 2 ? &shared->settled : &shared->done;
    uint64_t end = rr_now_ns() + timeout_ns;
    if (end < timeout_ns) end = UINT64_MAX;
    for (;;) {
        uint32_t seen = rr_load_relaxed_u32(word);
        rr_fetch_or_u32(&shared->waiting, 1);
        if (look(s, what)) return 1;
        uint64_t now = rr_now_ns();
        if (now >= end) return 0;
        uint64_t slice = what == 1 ? 1000000 : WAIT_SLICE_NS;
        if (seen != s->generation || what == 1) rr_futex_wait(word, seen, end - now < slice ? end - now : slice);
    }
}

int rc_arm_async(struct rc_submission *s)
{
    if (look(s, 0)) return 0;
    pthread_mutex_lock(&s->core->queue);
    s->async_armed = 1;
    s->core->async_armed++;
    pthread_mutex_unlock(&s->core->queue);
    rr_fetch_or_u32(&s->core->transfers[s->index].waiting, 2);
    return !look(s, 0);
}

void rc_release(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    pthread_mutex_lock(&core->queue);
    if (!s->published) {
        s->published = s->fed = 1;
        rc_end_locally(s, RR_CANCELLED);
    }
    rc_harvest(s);
    release_locked(s);
    pthread_mutex_unlock(&core->queue);
}

void rc_fail_all(struct rc_core *core, uint32_t result)
{
    pthread_mutex_lock(&core->queue);
    core->dead = result;
    for (struct rc_submission *s = core->live, *next; s; s = next) {
        next = s->next;
        rc_harvest(s);
        if (s->entry_released) continue;
        if (!s->in_feeder) s->fed = 1;
        rc_end_locally(s, result);
    }
    pthread_mutex_unlock(&core->queue);
    rc_wake_feeder(core);
}
