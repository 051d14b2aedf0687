#define _GNU_SOURCE
#include "world.h"

#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include "../../daemon/rail.c" /* its steps, without its thread */
#include "device.h"
#include "verbs_api.h"
#include "verbs_nic.h"

#ifdef RR_HAVE_VERBS
#define HAS_VERBS 1
#else
#define HAS_VERBS 0
#endif

#define ARRIVES_WITHIN 3000u /* steps */

/* Loops over memory that teach the fuzzer nothing. */
#ifdef __clang__
#define UNWATCHED __attribute__((no_sanitize("coverage", "address", "undefined")))
#else
#define UNWATCHED
#endif

void say_and_abort(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

#define demand(good, ...) \
    do { \
        if (!(good)) say_and_abort(__VA_ARGS__); \
    } while (0)

uint8_t byte(struct input *in) { return in->at < in->end ? *in->at++ : 0; }

uint32_t below(struct input *in, uint32_t limit)
{
    uint32_t value = byte(in);
    if (limit > 256) value |= (uint32_t)byte(in) << 8;
    return limit ? value % limit : 0;
}

uint64_t number(struct input *in)
{
    static const uint64_t edges[] = {0,          1,           2,          ENTRIES,    SLOTS,      RING_SLICES, SLOT_BYTES, REGION_BYTES,
                                     UINT16_MAX, UINT32_MAX, 1ull << 30, 1ull << 31, 1ull << 32, 1ull << 63,  UINT64_MAX, 4096};
    uint8_t kind = byte(in);
    if (kind < 0x80) return kind;
    if (kind < 0xe0) return edges[kind & 15] + (uint64_t)(int64_t)((kind >> 4 & 3) - 1); /* and its neighbours */
    uint64_t value = 0;
    for (int i = 0; i < (kind & 7) + 1; i++) value = value << 8 | byte(in);
    return value;
}

void bend(struct input *in, void *structure, uint32_t bytes)
{
    for (uint32_t changes = byte(in) % 3; changes; changes--) {
        uint32_t at = byte(in) % (bytes / 2) * 2;
        uint64_t value = number(in);
        memcpy((uint8_t *)structure + at, &value, at + 8 <= bytes && byte(in) & 1 ? 8 : 2);
    }
}

/* ---- memory ---- */

static int file_of(uint64_t bytes)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC);
    demand(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, "no memory");
    return fd;
}

static void *mapped(int fd, uint64_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    demand(base != MAP_FAILED, "cannot map");
    return base;
}

struct plan {
    uint32_t id;
    uint64_t size, count;
};

static const struct plan client_plan[] = {
    {RR_AREA_CONTROL, sizeof(struct rr_client_control), 1},
    {RR_AREA_LANE, sizeof(struct rr_lane), RAILS},
    {RR_AREA_SLOT_HEADS, sizeof(struct rr_slice), RAILS *SLOTS},
    {RR_AREA_SLOT_TABLES, sizeof(struct rr_block), RAILS *SLOTS *ENTRIES},
    {RR_AREA_RINGS, sizeof(struct rr_ring), RAILS},
    {RR_AREA_RING_SLICES, sizeof(struct rr_slice), RAILS *RING_SLICES},
    {RR_AREA_RING_TABLES, sizeof(struct rr_block), RAILS *RING_TABLES *ENTRIES},
    {RR_AREA_TRANSFERS, sizeof(struct rr_transfer), TRANSFERS},
    {RR_AREA_BOUNCES, sizeof(struct rr_bounce), RAILS},
    {RR_AREA_BOUNCE_HEADS, sizeof(struct rr_bounce_frame), RAILS *BOUNCE_SLOTS},
    {RR_AREA_BOUNCE_RUNS, sizeof(struct rr_run), RAILS *BOUNCE_SLOTS *ENTRIES},
    {RR_AREA_SLOT_TIMES, sizeof(struct rr_slice_times), RAILS *SLOTS},
    {RR_AREA_RING_TIMES, sizeof(struct rr_slice_times), RAILS *RING_SLICES},
};
static const struct plan node_plan[] = {
    {RR_AREA_RAILS, sizeof(struct rr_rail_state), RAILS},
    {RR_AREA_LANES, sizeof(struct rr_lane_state), RAILS *CLIENTS},
    {RR_AREA_TRACE, sizeof(struct rr_trace_record), RAILS * 16},
};

static uint64_t planned(const struct plan *plans, uint32_t count, uint8_t *segment, uint64_t *offsets)
{
    uint64_t at = 1024;
    struct rr_area *areas = segment ? (struct rr_area *)(segment + RR_AREA_TABLE_OFFSET) : NULL;
    for (uint32_t i = 0; i < count; i++) {
        if (areas) areas[i] = (struct rr_area){plans[i].id, (uint32_t)plans[i].count, at, plans[i].size, 0};
        if (offsets) offsets[plans[i].id] = at;
        at += (plans[i].size * plans[i].count + RR_LINE_BYTES - 1) / RR_LINE_BYTES * RR_LINE_BYTES;
    }
    if (segment)
        *(struct rr_segment_header *)segment = (struct rr_segment_header){
            .area_count = count, .rails = RAILS, .slots = SLOTS, .slot_bytes = SLOT_BYTES, .table_entries = ENTRIES,
            .ring_slices = RING_SLICES, .ring_tables = RING_TABLES, .bounce_slots = BOUNCE_SLOTS, .transfers = TRANSFERS,
            .max_clients = CLIENTS, .trace_records = 16};
    return at;
}

#define PLANNED(plan, segment, offsets) planned(plan, sizeof plan / sizeof *plan, segment, offsets)

static uint8_t sources[FILE_BYTES]; /* what GOOD_SENDER has */

UNWATCHED static void make_sources(void)
{
    for (uint32_t i = 0; i < FILE_BYTES; i++) sources[i] = (uint8_t)(0x80 | (i * 7 + i / 251));
}

static void add_client(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    client->segment_bytes = PLANNED(client_plan, NULL, client->offsets);
    client->segment_fd = file_of(client->segment_bytes);
    client->segment = mapped(client->segment_fd, client->segment_bytes);
    PLANNED(client_plan, client->segment, NULL);
    demand(rr_plane_attach_client(w->plane, number, number + 1, client->segment_fd, client->segment_bytes, 0) == 0, "attach");
    client->attached = 1;
    client->rails_left = RAILS;
    client->lane_fd = client->bounce_fd = -1;
    for (uint32_t i = 0; i < REGIONS; i++) client->region_fds[i] = -1;
}

static void add_lane(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    client->lane_fd = file_of(SLOTS * SLOT_BYTES);
    client->lane = mapped(client->lane_fd, SLOTS * SLOT_BYTES);
    demand(rr_plane_lease_lane(w->plane, number, 0, client->lane_fd, 0, SLOTS * SLOT_BYTES, 1, 0) == 0, "lease");
}

static void add_bounce(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    client->bounce_fd = file_of(BOUNCE_BYTES);
    client->bounce = mapped(client->bounce_fd, BOUNCE_BYTES);
    demand(rr_plane_add_bounce(w->plane, number, 1, client->bounce_fd, BOUNCE_BYTES, 0) == 0, "bounce");
}

static void add_region(struct world *w, uint32_t number, uint32_t region, int shared)
{
    struct fuzz_client *client = &w->clients[number];
    int fd = -1;
    if (shared) {
        fd = client->region_fds[region] = file_of(FILE_BYTES);
        client->regions[region] = mapped(fd, FILE_BYTES);
    } else {
        client->regions[region] = calloc(1, FILE_BYTES);
    }
    demand(rr_plane_add_region(w->plane, number, region, fd, 0, REGION_OFFSET, REGION_BYTES) == 0, "region");
}

static uint8_t *region_of(struct world *w, uint32_t client, uint32_t region) { return w->clients[client].regions[region] + REGION_OFFSET; }

static void add_export(struct world *w, uint32_t handle, uint32_t session, uint32_t client, uint32_t region)
{
    demand(rr_plane_add_export(w->plane, handle, session, client, region, REGION_BYTES) == 0, "export");
}

static void make_key(struct world *w, struct fuzz_client *client, uint32_t rail, const void *base, uint64_t bytes, uint32_t *lkey, uint32_t *rkey)
{
    struct rr_verbs_key key;
    demand(client->key_count < KEYS, "too many keys");
    demand(rr_verbs_register(w->plane, rail, (uint64_t)(uintptr_t)base, bytes, -1, 0, RR_VERBS_DATA, &key) == 0, "no key");
    client->keys[client->key_count++] = key.id;
    *lkey = key.lkey;
    *rkey = key.rkey;
}

/* What the main thread registers with the devices: on both, of what is shared. */
static void make_keys(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    const struct rr_client *at = w->plane->clients[number];
    uint32_t lkeys[RAILS], rkeys[RAILS];
    for (uint32_t region = 0; region < REGIONS; region++) {
        if (!at->regions[region].mapping || (number == HOSTILE && region == KEPT)) continue; /* that one is not registered yet */
        for (uint32_t rail = 0; rail < RAILS; rail++)
            make_key(w, client, rail, at->regions[region].base, REGION_BYTES, &lkeys[rail], &client->rkeys[region][rail]);
        rr_plane_set_region_keys(w->plane, number, region, lkeys, RAILS);
    }
    if (at->ports[0].lane_memory) {
        for (uint32_t rail = 0; rail < RAILS; rail++) make_key(w, client, rail, at->ports[0].lane_memory->base, SLOTS * SLOT_BYTES, &lkeys[rail], &rkeys[rail]);
        rr_plane_set_lane_keys(w->plane, number, 0, lkeys, RAILS, 0);
    }
    if (at->ports[1].bouncer.memory) {
        for (uint32_t rail = 0; rail < RAILS; rail++) make_key(w, client, rail, at->ports[1].bouncer.memory->base, BOUNCE_BYTES, &lkeys[rail], &rkeys[rail]);
        rr_plane_set_bounce_keys(w->plane, number, 1, rkeys, RAILS, 0);
    }
}

void world_add_remote(struct world *w, uint32_t client, uint32_t remote, uint32_t peer, uint32_t handle, uint32_t owner, uint32_t region, int windowed)
{
    static const uint32_t made_up[RAILS] = {0x50000, 0x50001};
    const uint32_t *rkeys = region < REGIONS ? w->clients[owner].rkeys[region] : made_up;
    uint64_t iova = region < REGIONS ? (uint64_t)(uintptr_t)w->plane->clients[owner]->regions[region].base : 0;
    demand(rr_plane_add_remote(w->plane, client, remote, peer, handle, REGION_BYTES, 1, owner, windowed ? SLOT_BYTES : 0, ENTRIES, iova, rkeys,
                               w->verbs ? RAILS : 0) == 0,
           "remote");
}

void world_add_away(struct world *w, int windowed) { world_add_remote(w, GOOD_SENDER, REMOTE_AWAY, 1, windowed ? 78 : 77, 5, REGIONS, windowed); }

struct world *world_open(int verbs, int flushes)
{
    struct world *w = calloc(1, sizeof *w);
    demand(w, "no memory");
    w->hostile_end = w->away_end = -1;
    w->next_connection = 2;
    w->node_bytes = PLANNED(node_plan, NULL, NULL);
    demand(posix_memalign(&w->node, RR_LINE_BYTES, w->node_bytes) == 0, "no memory");
    memset(w->node, 0, w->node_bytes);
    PLANNED(node_plan, w->node, NULL);
    w->plane = rr_plane_create(w->node, 1, 2, 2, EXPORTS, 8, 8, SLOT_BYTES, 0);
    demand(w->plane, "no plane");
    w->verbs = verbs && HAS_VERBS;
    for (int i = 0; i < RAILS; i++) {
        struct rr_verbs_options options = {.port = 1, .send_depth = 128, .signal_every = 16, .flush = flushes ? RR_FLUSH_ALWAYS : RR_FLUSH_NEVER};
        snprintf(options.device, sizeof options.device, "fuzz%d", i);
        demand(rr_plane_add_rail(w->plane, w->verbs ? "verbs" : "tcp", -1, 0, &options) == i, "no rail: %s", w->plane->error);
    }
    for (uint32_t i = 0; i < CLIENTS; i++) add_client(w, i);
    add_lane(w, HOSTILE);
    add_lane(w, GOOD_SENDER);
    add_bounce(w, HOSTILE);
    add_bounce(w, GOOD_RECEIVER);
    add_region(w, HOSTILE, TARGET, 1);
    add_region(w, HOSTILE, LENT, 0);
    add_region(w, HOSTILE, KEPT, 1);
    add_region(w, GOOD_SENDER, TARGET, 1);
    for (uint32_t region = 0; region < REGIONS; region++) add_region(w, GOOD_RECEIVER, region, region < PRIVATE_TARGET);
    if (!sources[0]) make_sources();
    memcpy(w->clients[GOOD_SENDER].regions[TARGET], sources, FILE_BYTES);
    memset(w->clients[GOOD_RECEIVER].regions[KEPT], 0xff, FILE_BYTES);
    /* What surrounds the fuzzer's region belongs to it, but is not part of the region. */
    memset(w->clients[HOSTILE].regions[TARGET], 0xee, FILE_BYTES);
    memset(region_of(w, HOSTILE, TARGET), 0x11, REGION_BYTES);
    memset(w->clients[HOSTILE].lane, 0x22, SLOTS * SLOT_BYTES);
    add_export(w, TO_TARGET, 0, GOOD_RECEIVER, TARGET);
    add_export(w, TO_LENT, 0, GOOD_RECEIVER, LENT);
    add_export(w, TO_HOSTILE, 0, HOSTILE, LENT);
    add_export(w, TO_PRIVATE, 0, GOOD_RECEIVER, PRIVATE_TARGET);
    add_export(w, KEPT_BY_1, 1, GOOD_RECEIVER, KEPT);
    add_export(w, LENT_TO_1, 1, GOOD_RECEIVER, LENT);
    add_export(w, PRIVATE_TO_1, 1, GOOD_RECEIVER, PRIVATE_LENT);
    rr_plane_remove_export(w->plane, KEPT_BY_1, 0); /* gone before anybody wrote */
    world_step(w, 2);
    for (uint32_t i = 0; i < CLIENTS && w->verbs; i++) make_keys(w, i);
    world_add_remote(w, HOSTILE, 0, 0, TO_LENT, GOOD_RECEIVER, LENT, 0);
    world_add_remote(w, GOOD_SENDER, REMOTE_TARGET, 0, TO_TARGET, GOOD_RECEIVER, TARGET, 0);
    world_add_remote(w, GOOD_SENDER, REMOTE_PRIVATE, 0, TO_PRIVATE, GOOD_RECEIVER, REGIONS, 1);
    world_add_remote(w, GOOD_SENDER, REMOTE_HOSTILE, 0, TO_HOSTILE, HOSTILE, REGIONS, 1);
    world_add_away(w, 0);
    world_step(w, 2);
    return w;
}

/* ---- what the main thread does ---- */

enum { DRAINED = 1000 }; /* cookies of withdraw(), and the client's number */

static void no_connection(struct world *w, uint64_t id, uint32_t peer)
{
    if (peer == 1) { /* a made-up answer to the fence, or none: the slices are sent again */
        if (w->away_connection == id) world_close_away(w);
        struct rr_ack ack = {w->steps % 5, w->steps % 19};
        rr_plane_settle_sender(w->plane, 0, id, w->steps % 7, &ack, 1, 0);
    } else {
        rr_plane_fence_receiver(w->plane, 1, id + 1);
    }
}

static void open_endpoint(struct world *w, int sends, struct rr_verbs_endpoint *made)
{
    char error[RR_VERBS_ERROR_BYTES] = "";
    demand(rr_verbs_new_endpoint(w->plane, !sends, !sends, sends, made, error) == 0, "no endpoint: %s", error);
}

static void join(struct world *w, const struct rr_verbs_endpoint *from, uint32_t queue_pair)
{
    char error[RR_VERBS_ERROR_BYTES] = "";
    struct rr_verbs_route route = {.qpn = queue_pair, .mtu_bytes = 4096, .remote_through = 1};
    demand(rr_verbs_connect(w->plane, from->id, &route, error) == 0, "not connected: %s", error);
}

/* A connection from rail 0 (sends) or to rail 1, whose other end is this plane's, too, or the fuzzer's. */
static void make_ends(struct world *w, int sends, int own, int ends[2])
{
    if (!w->verbs) {
        demand(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "no sockets");
        return;
    }
    struct rr_verbs_endpoint one, other;
    open_endpoint(w, sends, &one);
    if (own) {
        open_endpoint(w, !sends, &other);
        join(w, &other, one.qpn);
    }
    join(w, &one, own ? other.qpn : DEVICE_STRANGER);
    ends[0] = (int)one.id;
    ends[1] = own ? (int)other.id : (int)one.qpn;
}

static void connect_rails(struct world *w, const struct rr_event *event)
{
    uint32_t peer = (uint32_t)event->a, remote_rail = (uint32_t)event->b, express = (uint32_t)event->c, epoch = (uint32_t)event->d;
    if (event->rail != 0 || remote_rail != 1 || (peer == 1 && w->away_end >= 0)) {
        rr_plane_fail_path(w->plane, (uint32_t)event->rail, peer, remote_rail, (int)express, RR_RAIL_DOWN, 0);
        return;
    }
    int ends[2];
    make_ends(w, 1, peer == 0, ends);
    uint64_t id = w->next_connection;
    w->next_connection += 2;
    rr_plane_add_sender(w->plane, 0, id, peer, 1, (int)express, epoch, ends[0]);
    if (peer == 0) {
        rr_plane_add_receiver(w->plane, 1, id + 1, 0, ends[1]);
    } else {
        w->away_end = ends[1];
        w->away_connection = id;
    }
}

static void release(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    for (uint32_t handle = 0; handle < EXPORTS; handle++)
        if (w->plane->exports[handle].valid && w->plane->exports[handle].client == number) rr_plane_remove_export(w->plane, handle, 0);
    for (uint32_t rail = 0; rail < RAILS; rail++) run_commands(&w->plane->rails[rail]);
    while (client->key_count) demand(rr_verbs_deregister(w->plane, client->keys[--client->key_count]) == 0, "a key is not there");
    rr_plane_release_client(w->plane, number);
}

/* Where nothing can refuse a write, the senders let go of what the client has first. */
static void withdraw(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    for (uint32_t handle = 0; handle < EXPORTS && w->verbs; handle++) {
        const struct rr_export *export = &w->plane->exports[handle];
        if (!export->valid || export->client != number || export->session != 0) continue;
        for (uint32_t user = 0; user < CLIENTS; user++) {
            struct rr_client *at = w->plane->clients[user];
            for (uint32_t remote = 0; at && remote < w->plane->remotes_per_client; remote++)
                if (at->remotes[remote].valid && at->remotes[remote].peer == 0 && at->remotes[remote].handle == handle)
                    rr_plane_remove_remote(w->plane, user, remote);
        }
        client->drains_left += RAILS;
        rr_plane_drain_handle(w->plane, 0, handle, DRAINED + number);
    }
    if (!client->drains_left) release(w, number);
}

void world_detach(struct world *w, uint32_t number)
{
    struct fuzz_client *client = &w->clients[number];
    if (!client->attached) return;
    client->attached = 0;
    rr_plane_detach_client(w->plane, number);
}

static void handle(struct world *w, const struct rr_event *event)
{
    uint32_t number = (uint32_t)event->a;
    switch (event->kind) {
    case RR_EVENT_CONNECT_WANTED: connect_rails(w, event); break;
    case RR_EVENT_SENDER_LOST: no_connection(w, (uint64_t)event->a, (uint32_t)event->c); break;
    case RR_EVENT_RECEIVER_LOST: rr_plane_fence_receiver(w->plane, (uint32_t)event->rail, (uint64_t)event->a); break;
    case RR_EVENT_RECEIVER_FENCED: {
        struct rr_ack acks[RR_WINDOW];
        int count = rr_plane_fence_acks(w->plane, (uint64_t)event->a, acks);
        demand(count >= 0, "a fence without its record");
        if ((uint64_t)event->a == w->hostile_connection)
            world_close_hostile(w);
        else
            rr_plane_settle_sender(w->plane, 0, (uint64_t)event->a - 1, (uint64_t)event->b, acks, (uint32_t)count, 0);
        break;
    }
    case RR_EVENT_VIOLATION:
        demand(number == HOSTILE, "client %u was ended by what another did: result %d, words %lld %lld %lld", number, (int)event->b,
               (long long)event->c, (long long)event->d, (long long)event->e);
        world_detach(w, number);
        break;
    case RR_EVENT_CLIENT_DETACHED:
        if (--w->clients[number].rails_left == 0) withdraw(w, number);
        break;
    case RR_EVENT_COMMAND_DONE:
        if (number >= DRAINED && number < DRAINED + CLIENTS && --w->clients[number - DRAINED].drains_left == 0) release(w, number - DRAINED);
        break;
    case RR_EVENT_NOTE_DUE:
        if (w->clients[number].attached)
            rr_transfer_finish_note(w->plane->clients[number], (uint32_t)event->b, (uint32_t)event->c, (uint32_t)(w->steps % 3));
        break;
    default: break;
    }
}

/* What the library of a receiving client does with frames in bounce memory. */
static void empty_bounces(struct world *w)
{
    struct fuzz_client *client = &w->clients[GOOD_RECEIVER];
    if (!client->attached) return;
    struct rr_bounce *ring = (struct rr_bounce *)area_of(client, RR_AREA_BOUNCES) + 1;
    struct rr_bounce_frame *frames = (struct rr_bounce_frame *)area_of(client, RR_AREA_BOUNCE_HEADS) + BOUNCE_SLOTS;
    struct rr_run *all = (struct rr_run *)area_of(client, RR_AREA_BOUNCE_RUNS) + BOUNCE_SLOTS * ENTRIES;
    while (client->emptied != rr_load_acquire_u64(&ring->filled)) {
        uint64_t at = client->emptied % BOUNCE_SLOTS, total = 0;
        const struct rr_run *runs = all + at * ENTRIES;
        demand(frames[at].slot < BOUNCE_SLOTS && frames[at].run_count <= ENTRIES && frames[at].bytes <= SLOT_BYTES, "a bounce frame that cannot be");
        for (uint32_t i = 0; i < frames[at].run_count; i++) {
            demand(runs[i].region == PRIVATE_TARGET || runs[i].region == PRIVATE_LENT, "a bounce frame for region %u", runs[i].region);
            demand(runs[i].offset <= REGION_BYTES && runs[i].length <= REGION_BYTES - runs[i].offset && total + runs[i].length <= frames[at].bytes,
                   "a bounce frame with a run that cannot be");
            memcpy(region_of(w, GOOD_RECEIVER, runs[i].region) + runs[i].offset, client->bounce + frames[at].slot * SLOT_BYTES + total, runs[i].length);
            total += runs[i].length;
        }
        frames[at].result = RR_OK;
        rr_store_release_u64(&ring->emptied, ++client->emptied);
    }
}

static void cycle(struct world *w)
{
    for (uint32_t i = 0; i < RAILS; i++) {
        struct rr_rail *rail = &w->plane->rails[i];
        rr_rail_time_passes(rail);
        run_commands(rail);
        rr_collect(rail);
        reclaim(rail);
        let_go(rail);
        post(rail);
        rail->nic->ops->poll(rail->nic, 0);
        rr_collect_filling(rail);
        rr_collect_pending(rail);
    }
}

void world_step(struct world *w, uint32_t steps)
{
    while (steps--) {
        w->steps++;
        cycle(w);
        empty_bounces(w);
        struct rr_event events[64];
        uint32_t count = rr_plane_take_events(w->plane, events, 64);
        for (uint32_t i = 0; i < count; i++) handle(w, &events[i]);
    }
}

/* ---- the well-behaved sender ---- */

void world_send(struct world *w, struct input *in, uint32_t remote)
{
    struct fuzz_client *client = &w->clients[GOOD_SENDER];
    uint32_t transfer = 0, through_lane = byte(in) & 1, express = byte(in) & 1;
    while (transfer < TRANSFERS && w->sent[transfer].live) transfer++;
    if (transfer == TRANSFERS) return;
    uint32_t offset = below(in, REGION_BYTES), bytes = 1 + below(in, REGION_BYTES - offset), first = 1 + below(in, bytes);
    struct rr_lane *lane = area_of(client, RR_AREA_LANE);
    struct rr_ring *ring = area_of(client, RR_AREA_RINGS);
    if (through_lane ? client->slots_announced - lane->completed >= SLOTS : client->produced - ring->completed >= RING_SLICES) return;
    struct rr_transfer *shared = (struct rr_transfer *)area_of(client, RR_AREA_TRANSFERS) + transfer;
    struct rr_slice slice = {.transfer = transfer, .generation = ++client->generations[transfer], .peer = remote == REMOTE_AWAY, .remote_rail = 1,
                             .flags = RR_SLICE_FINAL | (express ? RR_SLICE_EXPRESS : 0), .total_slices = 1, .bytes = bytes,
                             .block_count = first < bytes ? 2 : 1};
    struct rr_block blocks[2] = {{offset, offset, first, TARGET, remote, 0}, {offset + first, offset + first, bytes - first, TARGET, remote, 0}};
    shared->generation = slice.generation;
    shared->tag = 1 + w->steps % 3;
    w->sent[transfer] = (struct sent){1, slice.generation, remote, offset, bytes};
    if (through_lane) {
        uint32_t slot = client->slots_announced < SLOTS ? client->slots_announced : lane->freed[(client->slots_announced - SLOTS) % RR_MAX_SLOTS];
        uint8_t *to = client->lane + slot * SLOT_BYTES;
        memcpy(to, region_of(w, GOOD_SENDER, TARGET) + offset, bytes);
        blocks[0].source = 0;
        blocks[1].source = first;
        memcpy((struct rr_block *)area_of(client, RR_AREA_SLOT_TABLES) + slot * ENTRIES, blocks, sizeof blocks);
        ((struct rr_slice *)area_of(client, RR_AREA_SLOT_HEADS))[slot] = slice;
        lane->announce[client->slots_announced % RR_MAX_SLOTS] = slot;
        rr_store_release_u64(&lane->head, ++client->slots_announced);
        rr_store_release_u64(&lane->doorbell, client->slots_announced);
        return;
    }
    slice.table = client->produced % RING_TABLES;
    slice.ticket = client->produced % RING_SLICES;
    if (slice.block_count == 1) {
        slice.flags |= RR_SLICE_INLINE;
        slice.inline_source = slice.inline_destination = offset;
        slice.inline_length = bytes;
        slice.inline_source_region = TARGET;
        slice.inline_remote_region = remote;
    } else if (client->produced - ring->completed >= RING_TABLES) { /* its table is in use */
        w->sent[transfer].live = 0;
        client->generations[transfer]--;
        return;
    }
    if (slice.block_count == 2) memcpy((struct rr_block *)area_of(client, RR_AREA_RING_TABLES) + slice.table * ENTRIES, blocks, sizeof blocks);
    ((struct rr_slice *)area_of(client, RR_AREA_RING_SLICES))[client->produced % RING_SLICES] = slice;
    rr_store_release_u64(&ring->produced, ++client->produced);
}

void world_end_away(struct world *w, int fences)
{
    for (uint32_t i = 0; i < TRANSFERS; i++) {
        const struct sent *sent = &w->sent[i];
        if (!sent->live || sent->remote != REMOTE_AWAY) continue;
        rr_transfer_cancel(w->plane->clients[GOOD_SENDER], i, sent->generation, RR_CANCELLED);
        if (!fences) continue;
        rr_plane_holders(w->plane, GOOD_SENDER, i, sent->generation, 9);
        world_step(w, 1);
        struct rr_holder holders[8];
        uint32_t count = rr_plane_holders_result(w->plane, 9, holders, 8);
        for (uint32_t k = 0; k < count; k++) rr_plane_close_sender(w->plane, (uint32_t)holders[k].rail, holders[k].connection);
    }
    rr_plane_purge_stopped(w->plane);
}

/* Forgets those that are done; how many to these remotes are not. */
static uint32_t unfinished(struct world *w, uint32_t remotes)
{
    struct rr_transfer *shared = area_of(&w->clients[GOOD_SENDER], RR_AREA_TRANSFERS);
    uint32_t count = 0;
    for (uint32_t i = 0; i < TRANSFERS; i++) {
        struct sent *sent = &w->sent[i];
        if (!sent->live) continue;
        if (rr_load_acquire_u32(&shared[i].done) != sent->generation) {
            count += remotes >> sent->remote & 1;
            continue;
        }
        sent->live = 0;
        demand(shared[i].result < RR_GPU_ERROR && shared[i].result != RR_DAEMON_GONE && shared[i].result != RR_UNSETTLED,
               "a peer's word %u became the result of a transfer", shared[i].result);
        if (sent->remote > REMOTE_PRIVATE) continue;
        demand(shared[i].result == RR_OK, "a transfer of a good client to a good client ended with %u", shared[i].result);
        demand(shared[i].bytes == sent->bytes, "%lu of %u bytes", (unsigned long)shared[i].bytes, sent->bytes);
        uint32_t region = sent->remote == REMOTE_TARGET ? TARGET : PRIVATE_TARGET;
        demand(memcmp(region_of(w, GOOD_SENDER, TARGET) + sent->offset, region_of(w, GOOD_RECEIVER, region) + sent->offset, sent->bytes) == 0, "wrong bytes");
    }
    return count;
}

static void arrive(struct world *w, uint32_t remotes)
{
    for (uint32_t i = 0; unfinished(w, remotes); i++) {
        demand(i < ARRIVES_WITHIN, "a transfer of a good client does not end, to one of the remotes %x", remotes);
        world_step(w, 1);
    }
}

/* ---- the fuzzer's connections ---- */

int world_connect_hostile(struct world *w)
{
    int ends[2];
    if (w->hostile_end >= 0) return 1;
    if (w->next_connection > 64) return 0;
    make_ends(w, 0, 0, ends);
    if (w->verbs && w->hostile_connection) rr_plane_fence_receiver(w->plane, 1, w->hostile_connection); /* nobody hears that its end is gone */
    w->hostile_connection = w->next_connection + 1;
    w->next_connection += 2;
    w->hostile_end = ends[1];
    rr_plane_add_receiver(w->plane, 1, w->hostile_connection, 1, ends[0]);
    return 1;
}

static void leave_end(const struct world *w, int *end)
{
    if (*end >= 0 && w->verbs) device_leave((uint32_t)*end);
    if (*end >= 0 && !w->verbs) close(*end);
    *end = -1;
}

void world_close_hostile(struct world *w)
{
    leave_end(w, &w->hostile_end);
}

void world_close_away(struct world *w) { leave_end(w, &w->away_end); }

/* ---- the end ---- */

/* What is in a region when all is done: nothing or what GOOD_SENDER has there; the fuzzer's; 0xff. */
enum content { SENT, FOREIGN, UNTOUCHED, ANYTHING };

UNWATCHED static void check_region(struct world *w, uint32_t region, enum content content)
{
    const uint8_t *memory = w->clients[GOOD_RECEIVER].regions[region], *inside = memory + REGION_OFFSET;
    uint8_t around = content == UNTOUCHED ? 0xff : 0;
    uint32_t outside = 0, wrong = 0;
    for (uint32_t i = 0; i < REGION_OFFSET; i++) outside += memory[i] != around;
    for (uint32_t i = REGION_OFFSET + REGION_BYTES; i < FILE_BYTES; i++) outside += memory[i] != around;
    for (uint32_t i = 0; i < REGION_BYTES; i++) {
        uint8_t value = inside[i];
        wrong += content == SENT        ? value && value != sources[REGION_OFFSET + i]
                 : content == FOREIGN   ? value >> 7
                 : content == UNTOUCHED ? value != 0xff
                                        : 0;
    }
    demand(!outside, "%u bytes outside of region %u were written", outside, region);
    demand(!wrong, "%u bytes in region %u that must not be there", wrong, region);
}

static void free_client_memory(struct fuzz_client *client)
{
    munmap(client->segment, client->segment_bytes);
    close(client->segment_fd);
    if (client->lane_fd >= 0) {
        munmap(client->lane, SLOTS * SLOT_BYTES);
        close(client->lane_fd);
    }
    if (client->bounce_fd >= 0) {
        munmap(client->bounce, BOUNCE_BYTES);
        close(client->bounce_fd);
    }
    for (uint32_t i = 0; i < REGIONS; i++) {
        if (client->region_fds[i] < 0) {
            free(client->regions[i]);
        } else {
            munmap(client->regions[i], FILE_BYTES);
            close(client->region_fds[i]);
        }
    }
}

void world_close(struct world *w, int lends_to_client)
{
    arrive(w, 1u << REMOTE_TARGET);
    world_close_hostile(w); /* it may hold all of GOOD_RECEIVER's bounce memory */
    if (w->hostile_connection) rr_plane_fence_receiver(w->plane, 1, w->hostile_connection);
    arrive(w, 1u << REMOTE_TARGET | 1u << REMOTE_PRIVATE);
    world_detach(w, HOSTILE);
    arrive(w, 1u << REMOTE_TARGET | 1u << REMOTE_PRIVATE | 1u << REMOTE_HOSTILE);
    world_close_away(w);
    rr_plane_remove_remote(w->plane, GOOD_SENDER, REMOTE_AWAY); /* first, as the main thread does */
    rr_plane_drop_peer(w->plane, 1, RR_PEER_LOST, 0);
    world_step(w, 4);
    arrive(w, ~0u);
    check_region(w, TARGET, SENT);
    check_region(w, PRIVATE_TARGET, SENT);
    check_region(w, LENT, lends_to_client ? FOREIGN : ANYTHING);
    check_region(w, PRIVATE_LENT, lends_to_client ? FOREIGN : ANYTHING);
    check_region(w, KEPT, UNTOUCHED);
    for (uint32_t i = 0; i < CLIENTS; i++) world_detach(w, i);
    for (uint32_t i = 0; w->plane->clients[0] || w->plane->clients[1] || w->plane->clients[2]; i++) {
        demand(i < ARRIVES_WITHIN, "a client that has left is not let go");
        world_step(w, 1);
    }
    rr_plane_free(w->plane);
    device_check();
    for (uint32_t i = 0; i < CLIENTS; i++) free_client_memory(&w->clients[i]);
    free(w->node);
    free(w);
}
