/* The main thread's side of the data plane: it owns clients, regions, exports and connections, and changes what rail
 * threads use only by commands that each rail runs between two of its cycles. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "verbs_nic.h"

static const struct rr_nic_ops *const nics[] = {&rr_tcp_nic, &rr_emulated_nic, &rr_verbs_nic};

static void *area(const void *segment, uint32_t id)
{
    const struct rr_segment_header *header = segment;
    const struct rr_area *areas = (const struct rr_area *)((const uint8_t *)segment + RR_AREA_TABLE_OFFSET);
    for (uint32_t i = 0; i < header->area_count && i < RR_AREAS_MAX; i++)
        if (areas[i].id == id) return (uint8_t *)segment + areas[i].offset;
    return NULL;
}

struct rr_plane *rr_plane_create(void *node, uint64_t instance, uint32_t max_peers, uint32_t max_sessions, uint32_t max_exports,
                                 uint32_t regions_per_client, uint32_t remotes_per_client, uint64_t direct_slice_bytes, uint64_t spin_ns)
{
    struct rr_plane *plane = calloc(1, sizeof *plane);
    if (!plane) return NULL;
    plane->node = node;
    plane->instance = instance;
    plane->max_clients = plane->node->max_clients;
    plane->max_peers = max_peers;
    plane->max_sessions = max_sessions;
    plane->max_exports = max_exports;
    plane->regions_per_client = regions_per_client;
    plane->remotes_per_client = remotes_per_client;
    plane->slots = plane->node->slots;
    plane->table_entries = plane->node->table_entries;
    plane->bounce_slots = plane->node->bounce_slots;
    plane->slot_bytes = plane->node->slot_bytes;
    plane->direct_slice_bytes = direct_slice_bytes;
    plane->spin_ns = spin_ns;
    plane->rail_states = area(node, RR_AREA_RAILS);
    plane->lane_states = area(node, RR_AREA_LANES);
    plane->trace_records = area(node, RR_AREA_TRACE);
    plane->clients = calloc(plane->max_clients, sizeof *plane->clients);
    plane->exports = calloc(max_exports, sizeof *plane->exports);
    plane->peers = calloc(max_peers, sizeof *plane->peers);
    plane->event_capacity = 1024;
    plane->events = calloc(plane->event_capacity, sizeof *plane->events);
    plane->holder_capacity = 1024;
    plane->holders = calloc(plane->holder_capacity, sizeof *plane->holders);
    plane->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&plane->event_lock, NULL);
    if (!plane->rail_states || !plane->lane_states || !plane->trace_records || !plane->clients || !plane->exports || !plane->peers || !plane->events || !plane->holders ||
        plane->event_fd < 0 || plane->max_clients > RR_MAX_CLIENTS || rr_guard_install()) {
        rr_plane_free(plane);
        return NULL;
    }
    return plane;
}

int rr_plane_add_rail(struct rr_plane *plane, const char *nic, int cpu, uint64_t bytes_per_s, const struct rr_verbs_options *options)
{
    plane->error[0] = 0;
    const struct rr_nic_ops *ops = NULL;
    for (size_t i = 0; i < sizeof nics / sizeof *nics; i++)
        if (strcmp(nics[i]->name, nic) == 0) ops = nics[i];
    if (!ops) return -ENOTSUP;
    if (plane->rail_count == RR_MAX_RAILS || plane->rail_count == plane->node->rails) return -ENOSPC;
    struct rr_rail *rail = &plane->rails[plane->rail_count];
    rail->plane = plane;
    rail->number = (int)plane->rail_count;
    rail->cpu = cpu;
    rail->bytes_per_s = bytes_per_s;
    rail->verbs = *options;
    rail->state = &plane->rail_states[rail->number];
    rail->counters = rail->state->counters;
    rail->trace.mask = plane->node->trace_records - 1;
    rail->trace.records = plane->trace_records + (size_t)rail->number * plane->node->trace_records;
    rail->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    rail->paths = calloc((size_t)plane->max_peers * RR_MAX_RAILS * RR_CLASSES, sizeof *rail->paths);
    pthread_mutex_init(&rail->command_lock, NULL);
    if (rail->kick_fd < 0 || !rail->paths) return -ENOMEM;
    errno = ENOMEM;
    rail->nic = ops->open(rail);
    if (!rail->nic) {
        int error = errno;
        free(rail->paths);
        close(rail->kick_fd);
        return -error;
    }
    return (int)plane->rail_count++;
}

int rr_plane_start(struct rr_plane *plane)
{
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        struct rr_rail *rail = &plane->rails[i];
        if (rail->started) continue;
        int error = pthread_create(&rail->thread, NULL, rr_rail_main, rail);
        if (error) return -error;
        rail->started = 1;
    }
    return 0;
}

void rr_plane_stop(struct rr_plane *plane)
{
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        rr_store_release_u32(&plane->rails[i].stop, 1);
        if (plane->rails[i].started) rr_rail_wake(&plane->rails[i]);
    }
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        struct rr_rail *rail = &plane->rails[i];
        if (rail->started) pthread_join(rail->thread, NULL);
        rail->started = 0;
    }
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        struct rr_rail *rail = &plane->rails[i];
        if (rail->nic) rail->nic->ops->close(rail->nic);
        rail->nic = NULL;
    }
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        struct rr_rail *rail = &plane->rails[i];
        for (struct rr_command *command = rail->command_first, *next; command; command = next) {
            next = command->next;
            if (command->discard) command->discard(command);
            free(command);
        }
        rail->command_first = rail->command_last = NULL;
        while (rail->deferred) {
            struct rr_deferred *next = rail->deferred->next;
            free(rail->deferred->marks);
            free(rail->deferred);
            rail->deferred = next;
        }
    }
}

static void free_tombstones(struct rr_tombstones *set)
{
    while (set) {
        struct rr_tombstones *older = set->older;
        free(set);
        set = older;
    }
}

static void free_client(struct rr_plane *plane, struct rr_client *client)
{
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        struct rr_port *port = &client->ports[i];
        if (port->kick_fd > 0) close(port->kick_fd);
        rr_source_free(&port->lane_source);
        rr_source_free(&port->ring_source);
        rr_unmap(port->lane_memory);
        rr_unmap(port->bouncer.memory);
        free(port->bouncer.pending);
        free(port->bouncer.reserved_by);
        free(port->bouncer.in_use);
        free(port->bouncer.waits);
    }
    for (uint32_t i = 0; client->regions && i < plane->regions_per_client; i++) rr_unmap(client->regions[i].mapping);
    free(client->contexts);
    free(client->regions);
    free(client->remotes);
    free_tombstones(client->tombstones);
    free(client->header);
    rr_unmap(client->segment);
    free(client);
}

void rr_plane_free(struct rr_plane *plane)
{
    if (!plane) return;
    rr_plane_stop(plane);
    rr_verbs_free(plane);
    for (uint32_t i = 0; plane->clients && i < plane->max_clients; i++)
        if (plane->clients[i]) free_client(plane, plane->clients[i]);
    for (uint32_t i = 0; i < plane->rail_count; i++) {
        free(plane->rails[i].paths);
        close(plane->rails[i].kick_fd);
    }
    while (plane->fences) {
        struct rr_fence_record *next = plane->fences->next;
        free(plane->fences);
        plane->fences = next;
    }
    if (plane->event_fd >= 0) close(plane->event_fd);
    for (uint32_t i = 0; plane->peers && i < plane->max_peers; i++) free_tombstones(plane->peers[i].tombstones);
    free(plane->peers);
    free(plane->clients);
    free(plane->exports);
    free(plane->events);
    free(plane->holders);
    free(plane);
}

/* ---- events ---- */

void rr_event_push(struct rr_plane *plane, int64_t kind, int64_t rail, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e)
{
    pthread_mutex_lock(&plane->event_lock);
    if (plane->event_count == plane->event_capacity) {
        struct rr_event *more = realloc(plane->events, 2 * plane->event_capacity * sizeof *more);
        if (!more) abort();
        plane->events = more;
        plane->event_capacity *= 2;
    }
    plane->events[plane->event_count++] = (struct rr_event){kind, rail, a, b, c, d, e};
    int first = plane->event_count == 1;
    pthread_mutex_unlock(&plane->event_lock);
    if (first) rr_kick(plane->event_fd);
}

uint32_t rr_plane_take_events(struct rr_plane *plane, struct rr_event *out, uint32_t max)
{
    uint64_t ignored;
    ssize_t got = read(plane->event_fd, &ignored, sizeof ignored);
    (void)got;
    pthread_mutex_lock(&plane->event_lock);
    uint32_t count = plane->event_count < max ? plane->event_count : max;
    memcpy(out, plane->events, count * sizeof *out);
    plane->event_count -= count;
    memmove(plane->events, plane->events + count, plane->event_count * sizeof *out);
    int more = plane->event_count != 0;
    pthread_mutex_unlock(&plane->event_lock);
    if (more) rr_kick(plane->event_fd);
    return count;
}

static void done(struct rr_rail *rail, const struct rr_command *command, int64_t value)
{
    if (command->cookie) rr_event_push(rail->plane, RR_EVENT_COMMAND_DONE, rail->number, (int64_t)command->cookie, value, 0, 0, 0);
}

/* Of a command that was not run. */
static void free_pointer(struct rr_command *command) { free(command->pointer); }

static void to_all(struct rr_plane *plane, struct rr_command command)
{
    for (uint32_t i = 0; i < plane->rail_count; i++) rr_rail_command(&plane->rails[i], command);
}

/* ---- clients ---- */

static struct rr_client *client_at(struct rr_plane *plane, uint32_t client) { return client < plane->max_clients ? plane->clients[client] : NULL; }

static void run_attach(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct rr_port *port = &client->ports[rail->number];
    port->attached = 1;
    rail->nic->ops->watch_kick(rail->nic, port->kick_fd, 1);
    rail->by_number[client->number] = client;
    rail->clients[rail->client_count++] = client;
    done(rail, command, 0);
}

int rr_plane_attach_client(struct rr_plane *plane, uint32_t number, uint32_t serial, int fd, uint64_t bytes, uint64_t cookie)
{
    if (number >= plane->max_clients || plane->clients[number]) return -EBUSY;
    struct rr_client *client = calloc(1, sizeof *client);
    if (!client) return -ENOMEM;
    int error = 0;
    client->segment = rr_map(fd, 0, bytes, &error);
    if (!client->segment) {
        free(client);
        return -error;
    }
    void *base = client->segment->base;
    /* A private copy: the client may scribble over the shared one. */
    struct rr_segment_header *header = malloc(sizeof *header);
    struct rr_lane *lanes = area(base, RR_AREA_LANE);
    struct rr_ring *rings = area(base, RR_AREA_RINGS);
    struct rr_bounce *bounces = area(base, RR_AREA_BOUNCES);
    struct rr_bounce_frame *bounce_frames = area(base, RR_AREA_BOUNCE_HEADS);
    struct rr_run *bounce_runs = area(base, RR_AREA_BOUNCE_RUNS);
    client->plane = plane;
    client->number = number;
    client->serial = serial;
    client->control = area(base, RR_AREA_CONTROL);
    client->transfers = area(base, RR_AREA_TRANSFERS);
    client->slot_heads = area(base, RR_AREA_SLOT_HEADS);
    client->slot_tables = area(base, RR_AREA_SLOT_TABLES);
    client->ring_slices = area(base, RR_AREA_RING_SLICES);
    client->ring_tables = area(base, RR_AREA_RING_TABLES);
    client->slot_times = area(base, RR_AREA_SLOT_TIMES);
    client->ring_times = area(base, RR_AREA_RING_TIMES);
    client->contexts = header ? calloc(((struct rr_segment_header *)base)->transfers, sizeof *client->contexts) : NULL;
    client->regions = calloc(plane->regions_per_client, sizeof *client->regions);
    client->remotes = calloc(plane->remotes_per_client, sizeof *client->remotes);
    int status = -ENOMEM;
    int good = header && lanes && rings && bounces && bounce_frames && bounce_runs && client->control && client->transfers && client->slot_heads && client->slot_tables &&
               client->ring_slices && client->ring_tables && client->slot_times && client->ring_times && client->contexts && client->regions && client->remotes;
    if (header) memcpy(header, base, sizeof *header);
    client->header = header;
    if (good) client->transfer_count = header->transfers;
    good = good && header->ring_slices <= RR_MAX_RING_SLICES;
    for (uint32_t i = 0; good && i < plane->rail_count; i++) {
        struct rr_port *port = &client->ports[i];
        port->ring.ring = &rings[i];
        port->ring.slices = client->ring_slices + (size_t)i * header->ring_slices;
        port->ring.mask = header->ring_slices - 1;
        port->lane.lane = &lanes[i];
        port->bouncer.slots = plane->bounce_slots;
        port->bouncer.owner = number;
        port->bouncer.serial = serial;
        port->bouncer.ring = &bounces[i];
        port->bouncer.frames = &bounce_frames[(size_t)i * plane->bounce_slots];
        port->bouncer.runs = &bounce_runs[(size_t)i * plane->bounce_slots * plane->table_entries];
        port->state = &plane->lane_states[i * plane->max_clients + number];
        memset(&port->state->head, 0, sizeof *port->state - offsetof(struct rr_lane_state, head));
        port->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        rr_source_init(&port->ring_source, client, header->ring_slices, plane->table_entries,
                       plane->max_peers * RR_MAX_RAILS * RR_CLASSES, 0, plane->rails[i].nic->ops->one_sided);
        good = port->kick_fd > 0 && port->ring_source.works;
        if (port->kick_fd < 0) status = -errno;
    }
    if (!good) {
        free_client(plane, client);
        return status;
    }
    plane->clients[number] = client;
    to_all(plane, (struct rr_command){.run = run_attach, .cookie = cookie, .pointer = client});
    return 0;
}

static int of_client(const struct rr_work *work, const void *context) { return work->source->client == context; }

static void run_detach(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct rr_port *port = &client->ports[rail->number];
    if (!port->attached) return;
    port->attached = 0;
    port->detaching = 1;
    rail->nic->ops->watch_kick(rail->nic, port->kick_fd, 0);
    rail->by_number[client->number] = NULL;
    for (uint32_t i = 0; i < rail->client_count; i++) {
        if (rail->clients[i] != client) continue;
        rail->clients[i] = rail->clients[--rail->client_count];
        break;
    }
    rail->nic->ops->drop_bounces(rail->nic, client);
    rr_purge(rail, of_client, client, RR_CLIENT_GONE);
    rail->nic->ops->abandon(rail->nic, client);
    rail->leaving[rail->leaving_count++] = client;
}

int rr_plane_detach_client(struct rr_plane *plane, uint32_t number)
{
    struct rr_client *client = client_at(plane, number);
    if (!client) return -ENOENT;
    rr_store_relaxed_u32(&client->faulted, RR_CLIENT_GONE);
    to_all(plane, (struct rr_command){.run = run_detach, .pointer = client});
    return 0;
}

void rr_plane_release_client(struct rr_plane *plane, uint32_t number)
{
    struct rr_client *client = client_at(plane, number);
    if (!client) return;
    plane->clients[number] = NULL;
    free_client(plane, client);
}

static void discard_lease(struct rr_command *command) { rr_unmap((struct rr_mapping *)(uintptr_t)command->a); }

static void run_lease(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct rr_port *port = &client->ports[rail->number];
    rr_lane_consumer_init(&port->lane, port->lane.lane, rail->plane->slots);
    port->lane_memory = (struct rr_mapping *)(uintptr_t)command->a;
    done(rail, command, 0);
}

int rr_plane_lease_lane(struct rr_plane *plane, uint32_t number, uint32_t rail, int fd, uint64_t base, uint64_t bytes, uint64_t generation,
                        uint64_t cookie)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || rail >= plane->rail_count) return -ENOENT;
    struct rr_port *port = &client->ports[rail];
    if (port->lane_source.works) return -EBUSY;
    if (bytes < plane->slots * plane->slot_bytes) return -EINVAL;
    int error = ENOMEM;
    struct rr_mapping *memory = fd < 0 ? rr_made_up(base, bytes) : rr_map(fd, 0, bytes, &error);
    if (!memory) return -error;
    rr_source_init(&port->lane_source, client, plane->slots, plane->table_entries, plane->max_peers * RR_MAX_RAILS * RR_CLASSES, 1,
                   plane->rails[rail].nic->ops->one_sided);
    if (!port->lane_source.works) {
        rr_unmap(memory);
        return -ENOMEM;
    }
    rr_store_release_u64(&port->lane.lane->generation, generation);
    rr_rail_command(&plane->rails[rail],
                    (struct rr_command){.run = run_lease,
                                        .discard = discard_lease,
                                        .cookie = cookie,
                                        .pointer = client,
                                        .a = (uint64_t)(uintptr_t)memory});
    return 0;
}

static void run_bounce(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct rr_bouncer *bouncer = &client->ports[rail->number].bouncer;
    bouncer->shared = (struct rr_bounce *)(uintptr_t)command->a;
    done(rail, command, 0);
}

int rr_plane_add_bounce(struct rr_plane *plane, uint32_t number, uint32_t rail, int fd, uint64_t bytes, uint64_t cookie)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || rail >= plane->rail_count) return -ENOENT;
    struct rr_bouncer *bouncer = &client->ports[rail].bouncer;
    if (bouncer->memory) return -EBUSY;
    uint64_t table_bytes = plane->rails[rail].nic->ops->one_sided ? plane->table_entries * sizeof(struct rr_wire_run) : 0;
    if (bytes < plane->bounce_slots * (plane->slot_bytes + table_bytes)) return -EINVAL;
    int error = 0;
    struct rr_mapping *memory = rr_map(fd, 0, bytes, &error);
    if (!memory) return -error;
    bouncer->pending = calloc(bouncer->slots, sizeof *bouncer->pending);
    bouncer->reserved_by = calloc(bouncer->slots, sizeof *bouncer->reserved_by);
    bouncer->in_use = calloc(bouncer->slots, sizeof *bouncer->in_use);
    bouncer->memory = memory;
    if (!bouncer->pending || !bouncer->reserved_by || !bouncer->in_use) return -ENOMEM;
    rr_rail_command(&plane->rails[rail],
                    (struct rr_command){.run = run_bounce, .cookie = cookie, .pointer = client, .a = (uint64_t)(uintptr_t)bouncer->ring});
    return 0;
}

int rr_plane_add_region(struct rr_plane *plane, uint32_t number, uint32_t region, int fd, uint64_t base, uint64_t offset, uint64_t bytes)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || region >= plane->regions_per_client) return -ENOENT;
    struct rr_region *at = &client->regions[region];
    if (at->valid || at->mapping) return -EBUSY;
    if (fd >= 0) {
        uint64_t into = offset % rr_page_bytes(fd);
        int error = 0;
        at->mapping = rr_map(fd, offset - into, bytes + into, &error);
        if (!at->mapping) return -error;
        at->base = at->mapping->base + into;
    } else if (base) {
        at->mapping = rr_made_up(base, bytes);
        if (!at->mapping) return -ENOMEM;
        at->base = at->mapping->base;
    }
    at->bytes = bytes;
    rr_store_release_u32(&at->valid, 1);
    return 0;
}

static void run_region_use(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct rr_source *source = &client->ports[rail->number].ring_source;
    const struct rr_region *region = &client->regions[command->a];
    int64_t busy = 0;
    for (uint32_t i = 0; i < source->work_count && region->base; i++) {
        const struct rr_work *work = &source->works[i];
        if (work->state == RR_WORK_FREE) continue;
        for (uint32_t p = 0; p < work->piece_count; p++) {
            const uint8_t *piece = work->pieces[p].iov_base;
            if (piece >= region->base && piece < region->base + region->bytes) {
                busy++;
                break;
            }
        }
    }
    done(rail, command, busy);
}

int rr_plane_remove_region(struct rr_plane *plane, uint32_t number, uint32_t region, uint64_t cookie)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || region >= plane->regions_per_client || !client->regions[region].valid) return -ENOENT;
    rr_store_release_u32(&client->regions[region].valid, 0);
    to_all(plane, (struct rr_command){.run = run_region_use, .cookie = cookie, .pointer = client, .a = region});
    return 0;
}

void rr_plane_finish_region_removal(struct rr_plane *plane, uint32_t number, uint32_t region, int busy)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || region >= plane->regions_per_client) return;
    struct rr_region *at = &client->regions[region];
    if (busy) {
        rr_store_release_u32(&at->valid, 1);
        return;
    }
    rr_unmap(at->mapping);
    memset(at, 0, sizeof *at);
}

int rr_plane_add_remote(struct rr_plane *plane, uint32_t number, uint32_t remote, uint32_t peer, uint32_t handle, uint64_t bytes,
                        uint32_t rail, uint32_t owner, uint32_t window_bytes, uint32_t window_runs, uint64_t iova, const uint32_t *rkeys,
                        uint32_t rkey_count)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || remote >= plane->remotes_per_client || peer >= plane->max_peers || rail >= RR_MAX_RAILS) return -ENOENT;
    if (rkey_count > RR_MAX_RAILS || owner >= RR_MAX_CLIENTS) return -EINVAL;
    struct rr_remote *at = &client->remotes[remote];
    rr_store_relaxed_u32(&at->valid, 0);
    rr_full_barrier(); /* nobody takes new fields for old ones: collector.c and verbs_sender.c look twice */
    at->peer = peer;
    at->handle = handle;
    at->rail = rail;
    at->bytes = bytes;
    at->owner = owner;
    at->window_bytes = window_bytes;
    at->window_runs = window_runs;
    at->iova = iova;
    at->rkey_count = rkey_count;
    if (rkey_count) memcpy(at->rkeys, rkeys, rkey_count * sizeof *rkeys);
    if (++plane->remote_version == 0) plane->remote_version = 1;
    rr_store_release_u32(&at->valid, plane->remote_version);
    return 0;
}

void rr_plane_remove_remote(struct rr_plane *plane, uint32_t number, uint32_t remote)
{
    struct rr_client *client = client_at(plane, number);
    if (client && remote < plane->remotes_per_client) rr_store_release_u32(&client->remotes[remote].valid, 0);
}

/* ---- keys of registered memory, by the rail whose device it is registered on ---- */

struct keys {
    uint32_t keys[RR_MAX_RAILS];
};

static struct keys *copied_keys(const uint32_t *keys, uint32_t count)
{
    struct keys *copy = calloc(1, sizeof *copy);
    if (copy) memcpy(copy->keys, keys, count * sizeof *keys);
    return copy;
}

static void discard_keys(struct rr_command *command) { free((void *)(uintptr_t)command->a); }

static void run_lane_keys(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct keys *keys = (struct keys *)(uintptr_t)command->a;
    memcpy(client->ports[rail->number].lane_lkeys, keys->keys, sizeof keys->keys);
    free(keys);
    done(rail, command, 0);
}

static void run_bounce_keys(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_client *client = command->pointer;
    struct keys *keys = (struct keys *)(uintptr_t)command->a;
    memcpy(client->ports[rail->number].bouncer.rkeys, keys->keys, sizeof keys->keys);
    free(keys);
    done(rail, command, 0);
}

static int send_keys(struct rr_plane *plane, uint32_t number, uint32_t rail, const uint32_t *keys, uint32_t count, uint64_t cookie,
                     void (*run)(struct rr_rail *, struct rr_command *))
{
    struct rr_client *client = client_at(plane, number);
    if (!client || rail >= plane->rail_count) return -ENOENT;
    if (count > RR_MAX_RAILS) return -EINVAL;
    struct keys *copy = copied_keys(keys, count);
    if (!copy) return -ENOMEM;
    rr_rail_command(&plane->rails[rail],
                    (struct rr_command){.run = run, .discard = discard_keys, .cookie = cookie, .pointer = client, .a = (uint64_t)(uintptr_t)copy});
    return 0;
}

int rr_plane_set_lane_keys(struct rr_plane *plane, uint32_t number, uint32_t rail, const uint32_t *lkeys, uint32_t count, uint64_t cookie)
{
    return send_keys(plane, number, rail, lkeys, count, cookie, run_lane_keys);
}

int rr_plane_set_bounce_keys(struct rr_plane *plane, uint32_t number, uint32_t rail, const uint32_t *rkeys, uint32_t count, uint64_t cookie)
{
    return send_keys(plane, number, rail, rkeys, count, cookie, run_bounce_keys);
}

/* Before the client learns of the region: no slice names it yet. */
int rr_plane_set_region_keys(struct rr_plane *plane, uint32_t number, uint32_t region, const uint32_t *lkeys, uint32_t count)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || region >= plane->regions_per_client || !client->regions[region].valid) return -ENOENT;
    if (count > RR_MAX_RAILS) return -EINVAL;
    for (uint32_t i = 0; i < count; i++) rr_store_relaxed_u32(&client->regions[region].lkeys[i], lkeys[i]);
    rr_store_release_u32(&client->regions[region].valid, 1);
    return 0;
}

/* ---- sending side ---- */

/* Of a sender or receiver that is not added any more: a socket; endpoints end with their devices. */
static void discard_descriptor(struct rr_command *command)
{
    if ((int)command->d >= 0) close((int)command->d);
}

static void (*discard_of(const struct rr_rail *rail))(struct rr_command *) { return rail->nic->ops->one_sided ? NULL : discard_descriptor; }

static void run_add_sender(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_path *path = rr_path_of(rail, (uint32_t)command->b, (uint32_t)(command->b >> 32), (uint32_t)(command->c & 1));
    if (path->connection) {
        if (rail->nic->ops->one_sided)
            rr_verbs_drop_endpoint(rail->plane, command->d);
        else
            close((int)command->d);
        rr_event_push(rail->plane, RR_EVENT_SENDER_LOST, rail->number, (int64_t)command->a, EEXIST, path->peer, path->remote_rail, 0);
        return;
    }
    rail->nic->ops->add_sender(rail->nic, command->a, path, (uint32_t)(command->c >> 32), (int)command->d);
}

int rr_plane_add_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint32_t peer, uint32_t remote_rail, int express,
                        uint32_t epoch, int fd)
{
    if (rail >= plane->rail_count || peer >= plane->max_peers || remote_rail >= RR_MAX_RAILS) return -ENOENT;
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_add_sender,
                                                             .discard = discard_of(&plane->rails[rail]),
                                                             .a = connection,
                                                             .b = (uint64_t)remote_rail << 32 | peer,
                                                             .c = (uint64_t)epoch << 32 | (express != 0),
                                                             .d = (uint64_t)fd});
    return 0;
}

struct settlement {
    uint32_t ack_count;
    struct rr_ack acks[RR_WINDOW];
};

static void run_settle(struct rr_rail *rail, struct rr_command *command)
{
    struct settlement *settlement = command->pointer;
    struct rr_connection *connection = rail->nic->ops->find(rail->nic, command->a);
    if (connection) rail->nic->ops->settle(rail->nic, connection, command->b, settlement->acks, settlement->ack_count, RR_OK);
    free(settlement);
    done(rail, command, connection != NULL);
}

int rr_plane_settle_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint64_t placed, const struct rr_ack *acks,
                           uint32_t ack_count, uint64_t cookie)
{
    if (rail >= plane->rail_count) return -ENOENT;
    struct settlement *settlement = malloc(sizeof *settlement);
    if (!settlement) return -ENOMEM;
    settlement->ack_count = ack_count < RR_WINDOW ? ack_count : RR_WINDOW;
    memcpy(settlement->acks, acks, settlement->ack_count * sizeof *acks);
    rr_rail_command(&plane->rails[rail],
                    (struct rr_command){
                        .run = run_settle, .discard = free_pointer, .cookie = cookie, .a = connection, .b = placed, .pointer = settlement});
    return 0;
}

static void run_close_sender(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *connection = rail->nic->ops->find(rail->nic, command->a);
    if (connection) rail->nic->ops->lose(rail->nic, connection, ECANCELED);
}

int rr_plane_close_sender(struct rr_plane *plane, uint32_t rail, uint64_t connection)
{
    if (rail >= plane->rail_count) return -ENOENT;
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_close_sender, .a = connection});
    return 0;
}

struct path_key {
    uint32_t peer, remote_rail, class_; /* RR_NONE: any */
};

static int of_path(const struct rr_work *work, const void *context)
{
    const struct path_key *key = context;
    return work->peer == key->peer && (key->remote_rail == RR_NONE || work->remote_rail == key->remote_rail) &&
           (key->class_ == RR_NONE || work->class_ == key->class_);
}

static void run_fail_path(struct rr_rail *rail, struct rr_command *command)
{
    struct path_key key = {(uint32_t)command->a, (uint32_t)command->b, (uint32_t)command->d};
    if (rail->nic->ops->one_sided) key.class_ = RR_NONE;
    rr_path_of(rail, key.peer, key.remote_rail, key.class_ == RR_NONE ? 0 : key.class_)->wanted = 0;
    rr_purge(rail, of_path, &key, (uint32_t)command->c);
    done(rail, command, 0);
}

int rr_plane_fail_path(struct rr_plane *plane, uint32_t rail, uint32_t peer, uint32_t remote_rail, int express, uint32_t result,
                       uint64_t cookie)
{
    if (rail >= plane->rail_count || peer >= plane->max_peers || remote_rail >= RR_MAX_RAILS) return -ENOENT;
    rr_rail_command(&plane->rails[rail],
                    (struct rr_command){.run = run_fail_path, .cookie = cookie, .a = peer, .b = remote_rail, .c = result, .d = express != 0});
    return 0;
}

static void run_drop_peer(struct rr_rail *rail, struct rr_command *command)
{
    struct path_key key = {(uint32_t)command->a, RR_NONE, RR_NONE};
    rail->nic->ops->close_senders(rail->nic, key.peer, (uint32_t)command->b);
    rr_purge(rail, of_path, &key, (uint32_t)command->b);
    for (uint32_t remote = 0; remote < RR_MAX_RAILS; remote++) {
        for (uint32_t class_ = 0; class_ < RR_CLASSES; class_++) {
            struct rr_path *path = rr_path_of(rail, key.peer, remote, class_);
            path->wanted = path->broken = path->epoch = 0;
        }
    }
    done(rail, command, 0);
}

int rr_plane_drop_peer(struct rr_plane *plane, uint32_t peer, uint32_t result, uint64_t cookie)
{
    if (peer >= plane->max_peers) return -ENOENT;
    rr_fetch_add_u32(&plane->peers[peer].incarnation, 1);
    to_all(plane, (struct rr_command){.run = run_drop_peer, .cookie = cookie, .a = peer, .b = result});
    return 0;
}

/* Every rail has answered the drop: none looks at what its clients have aborted. */
int rr_plane_forget_peer(struct rr_plane *plane, uint32_t peer)
{
    if (peer >= plane->max_peers) return -ENOENT;
    struct rr_tombstones *set = plane->peers[peer].tombstones;
    rr_store_release_pointer((void **)&plane->peers[peer].tombstones, NULL);
    free_tombstones(set);
    return 0;
}

static void run_fail_nic(struct rr_rail *rail, struct rr_command *command)
{
    if (rail->nic->ops->fail) rail->nic->ops->fail(rail->nic, (uint32_t)command->a);
}

int rr_plane_fail_nic(struct rr_plane *plane, uint32_t rail, uint32_t result)
{
    if (rail >= plane->rail_count) return -ENOENT;
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_fail_nic, .a = result});
    return 0;
}

struct holder_query {
    struct rr_rail *rail;
    struct rr_client *client;
    uint32_t transfer, generation;
    uint64_t cookie;
    int64_t found;
};

static void visit_holder(void *context, struct rr_connection *connection, struct rr_work *work)
{
    struct holder_query *query = context;
    struct rr_plane *plane = query->rail->plane;
    if (work->source->client != query->client || work->transfer != query->transfer || work->generation != query->generation) return;
    query->found++;
    pthread_mutex_lock(&plane->event_lock);
    if (plane->holder_count == plane->holder_capacity) {
        struct rr_holder *more = realloc(plane->holders, 2 * plane->holder_capacity * sizeof *more);
        if (!more) abort();
        plane->holders = more;
        plane->holder_capacity *= 2;
    }
    plane->holders[plane->holder_count++] =
        (struct rr_holder){query->cookie, query->rail->nic->ops->connection_id(connection), query->rail->number};
    pthread_mutex_unlock(&plane->event_lock);
}

static int of_stopped(const struct rr_work *work, const void *context)
{
    (void)context;
    return rr_transfer_stopped(work->source->client, work->transfer, work->generation) != RR_OK;
}

static void run_purge(struct rr_rail *rail, struct rr_command *command)
{
    (void)command;
    rr_purge(rail, of_stopped, NULL, RR_CANCELLED);
    rail->nic->ops->purge(rail->nic);
}

int rr_plane_purge_stopped(struct rr_plane *plane)
{
    to_all(plane, (struct rr_command){.run = run_purge});
    return 0;
}

static void run_holders(struct rr_rail *rail, struct rr_command *command)
{
    struct holder_query query = {rail, command->pointer, (uint32_t)command->a, (uint32_t)command->b, command->cookie, 0};
    rail->nic->ops->each_posted(rail->nic, visit_holder, &query);
    done(rail, command, query.found);
}

int rr_plane_holders(struct rr_plane *plane, uint32_t number, uint32_t transfer, uint32_t generation, uint64_t cookie)
{
    struct rr_client *client = client_at(plane, number);
    if (!client) return -ENOENT;
    to_all(plane, (struct rr_command){.run = run_holders, .cookie = cookie, .pointer = client, .a = transfer, .b = generation});
    return 0;
}

uint32_t rr_plane_holders_result(struct rr_plane *plane, uint64_t cookie, struct rr_holder *out, uint32_t max)
{
    uint32_t count = 0, kept = 0;
    pthread_mutex_lock(&plane->event_lock);
    for (uint32_t i = 0; i < plane->holder_count; i++) {
        if (plane->holders[i].cookie == cookie && count < max)
            out[count++] = plane->holders[i];
        else if (plane->holders[i].cookie != cookie)
            plane->holders[kept++] = plane->holders[i];
    }
    plane->holder_count = kept;
    pthread_mutex_unlock(&plane->event_lock);
    return count;
}

/* One-sided NICs: the peer has withdrawn its region. Rails take no new slice for it, since the remotes are gone; what
 * they posted before has to end. */
static void run_drain_handle(struct rr_rail *rail, struct rr_command *command)
{
    const struct rr_nic_ops *ops = rail->nic->ops;
    uint32_t peer = (uint32_t)command->a, handle = (uint32_t)command->b, count = ops->naming ? ops->naming(rail->nic, peer, handle, NULL) : 0;
    if (!count) {
        done(rail, command, 0);
        return;
    }
    struct rr_deferred *deferred = calloc(1, sizeof *deferred);
    struct rr_mark *marks = calloc(count, sizeof *marks);
    if (!deferred || !marks) abort();
    ops->naming(rail->nic, peer, handle, marks);
    *deferred = (struct rr_deferred){.next = rail->deferred, .cookie = command->cookie, .marks = marks, .mark_count = count};
    rail->deferred = deferred;
}

int rr_plane_drain_handle(struct rr_plane *plane, uint32_t peer, uint32_t handle, uint64_t cookie)
{
    if (peer >= plane->max_peers) return -ENOENT;
    to_all(plane, (struct rr_command){.run = run_drain_handle, .cookie = cookie, .a = peer, .b = handle});
    return 0;
}

static void let_go_of(struct rr_tombstones *set)
{
    if (rr_fetch_add_u32(&set->readers, ~0u) == 1) free(set);
}

static void run_let_go(struct rr_rail *rail, struct rr_command *command)
{
    (void)rail;
    let_go_of(command->pointer);
}

static void discard_let_go(struct rr_command *command) { let_go_of(command->pointer); }

/* Not in the list any more, but a rail may be reading it. */
static void end_tombstones(struct rr_plane *plane, struct rr_tombstones *set)
{
    if (!set) return;
    set->readers = plane->rail_count;
    if (plane->rail_count)
        to_all(plane, (struct rr_command){.run = run_let_go, .discard = discard_let_go, .pointer = set});
    else
        free(set);
}

static int bury(struct rr_plane *plane, struct rr_tombstones **newest, uint64_t owner, uint64_t tag)
{
    struct rr_tombstones *set = *newest;
    if (!set || set->count == RR_TOMBSTONES) {
        struct rr_tombstones *fresh = calloc(1, sizeof *fresh);
        if (!fresh) return -ENOMEM;
        struct rr_tombstones *last = set && set->older ? set->older->older : NULL;
        if (last) rr_store_release_pointer((void **)&set->older->older, NULL);
        end_tombstones(plane, last);
        fresh->older = set;
        rr_store_release_pointer((void **)newest, fresh);
        set = fresh;
    }
    uint64_t at = rr_tombstone_hash(tag);
    while (set->tags[at] && (set->tags[at] != tag || set->owners[at] != owner)) at = (at + 1) % (2 * RR_TOMBSTONES);
    if (!set->tags[at]) {
        set->owners[at] = owner;
        rr_store_release_u64(&set->tags[at], tag);
        set->count++;
    }
    return 0;
}

int rr_plane_add_peer_tombstone(struct rr_plane *plane, uint32_t peer, uint32_t owner, uint64_t tag)
{
    if (peer >= plane->max_peers || owner >= RR_MAX_CLIENTS) return -ENOENT;
    if (!tag) return -EINVAL;
    return bury(plane, &plane->peers[peer].tombstones, rr_peer_owner(&plane->peers[peer], owner), tag);
}

/* Another client of the peer has this number now. */
int rr_plane_forget_peer_owner(struct rr_plane *plane, uint32_t peer, uint32_t owner)
{
    if (peer >= plane->max_peers || owner >= RR_MAX_CLIENTS) return -ENOENT;
    rr_fetch_add_u32(&plane->peers[peer].owners[owner], 1);
    return 0;
}

/* ---- receiving side ---- */

static void run_add_receiver(struct rr_rail *rail, struct rr_command *command)
{
    rail->nic->ops->add_receiver(rail->nic, command->a, (uint32_t)command->b, (int)command->d);
}

int rr_plane_add_receiver(struct rr_plane *plane, uint32_t rail, uint64_t connection, uint32_t session, int fd)
{
    if (rail >= plane->rail_count) return -ENOENT;
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_add_receiver,
                                                             .discard = discard_of(&plane->rails[rail]),
                                                             .a = connection,
                                                             .b = session,
                                                             .d = (uint64_t)fd});
    return 0;
}

static void run_fence(struct rr_rail *rail, struct rr_command *command)
{
    struct rr_connection *connection = rail->nic->ops->find(rail->nic, command->a);
    if (connection) rail->nic->ops->fence(rail->nic, connection);
}

int rr_plane_fence_receiver(struct rr_plane *plane, uint32_t rail, uint64_t connection)
{
    if (rail >= plane->rail_count) return -ENOENT;
    rr_rail_command(&plane->rails[rail], (struct rr_command){.run = run_fence, .a = connection});
    return 0;
}

int rr_plane_fence_acks(struct rr_plane *plane, uint64_t connection, struct rr_ack *acks)
{
    int count = -1;
    pthread_mutex_lock(&plane->event_lock);
    for (struct rr_fence_record **link = &plane->fences; *link; link = &(*link)->next) {
        struct rr_fence_record *record = *link;
        if (record->connection != connection) continue;
        count = (int)record->ack_count;
        memcpy(acks, record->acks, record->ack_count * sizeof *acks);
        *link = record->next;
        free(record);
        break;
    }
    pthread_mutex_unlock(&plane->event_lock);
    return count;
}

int rr_plane_add_export(struct rr_plane *plane, uint32_t handle, uint32_t session, uint32_t number, uint32_t region, uint64_t bytes)
{
    struct rr_client *client = client_at(plane, number);
    if (!client || handle == RR_NONE || region >= plane->regions_per_client || !client->regions[region].valid) return -ENOENT;
    if (bytes > client->regions[region].bytes) return -EINVAL;
    struct rr_export *export = &plane->exports[handle % plane->max_exports];
    if (export->valid) return -EBUSY;
    export->handle = handle;
    export->session = session;
    export->client = number;
    export->region = region;
    export->bytes = bytes;
    export->base = client->regions[region].base;
    export->mapping = client->regions[region].mapping;
    rr_store_release_u32(&export->valid, 1);
    return 0;
}

/* Refuses what comes; answers once the client has copied what lies in its bounce memory now, and the NIC has ended what
 * it was writing. */
static void refuse(struct rr_rail *rail, struct rr_command *command, uint32_t handle, uint64_t tag, uint32_t result)
{
    const struct rr_nic_ops *ops = rail->nic->ops;
    uint32_t number = (uint32_t)command->a;
    ops->refuse(rail->nic, number, handle, tag, result);
    rr_fault_point(RR_FAULT_DAEMON_REFUSE_BEGUN);
    struct rr_client *client = rail->by_number[number];
    struct rr_bouncer *bouncer = client ? &client->ports[rail->number].bouncer : NULL;
    int bounced = bouncer && bouncer->shared && bouncer->filled != bouncer->reclaimed;
    if (!bounced && !(ops->landing && ops->landing(rail->nic, number, handle, tag))) {
        done(rail, command, 0);
        return;
    }
    struct rr_deferred *deferred = malloc(sizeof *deferred);
    if (!deferred) abort();
    *deferred = (struct rr_deferred){.next = rail->deferred,
                                     .client = number,
                                     .handle = handle,
                                     .cookie = command->cookie,
                                     .until = bounced ? bouncer->filled : 0,
                                     .tag = tag};
    rail->deferred = deferred;
}

static void run_remove_export(struct rr_rail *rail, struct rr_command *command)
{
    refuse(rail, command, (uint32_t)command->b, 0, RR_REGION_GONE);
}

int rr_plane_remove_export(struct rr_plane *plane, uint32_t handle, uint64_t cookie)
{
    struct rr_export *export = &plane->exports[handle % plane->max_exports];
    if (!export->valid || export->handle != handle) return -ENOENT;
    rr_store_release_u32(&export->valid, 0);
    to_all(plane, (struct rr_command){.run = run_remove_export, .cookie = cookie, .a = export->client, .b = handle});
    return 0;
}

static void run_tombstone(struct rr_rail *rail, struct rr_command *command)
{
    refuse(rail, command, RR_NONE, command->b, RR_ABORTED);
}

int rr_plane_add_tombstone(struct rr_plane *plane, uint32_t number, uint64_t tag, uint64_t cookie)
{
    struct rr_client *client = client_at(plane, number);
    if (!client) return -ENOENT;
    if (!tag) return -EINVAL;
    int status = bury(plane, &client->tombstones, 0, tag);
    if (status) return status;
    to_all(plane, (struct rr_command){.run = run_tombstone, .cookie = cookie, .a = number, .b = tag});
    return 0;
}
