/* A client that writes whatever it likes into everything that it can map, cuts it off, and uses the daemon as it likes,
 * while two others transfer; on TCP or RDMA rails. */
#define _GNU_SOURCE
#include "world.h"

#include <string.h>
#include <unistd.h>

static const uint32_t areas[] = {RR_AREA_CONTROL,     RR_AREA_LANE,        RR_AREA_SLOT_HEADS, RR_AREA_SLOT_TABLES, RR_AREA_RINGS,
                                 RR_AREA_RING_SLICES, RR_AREA_RING_TABLES, RR_AREA_TRANSFERS,  RR_AREA_BOUNCES,     RR_AREA_BOUNCE_HEADS,
                                 RR_AREA_BOUNCE_RUNS, RR_AREA_SLOT_TIMES,  RR_AREA_RING_TIMES};

static uint64_t *a_word(struct fuzz_client *client, struct input *in)
{
    uint32_t area = byte(in) % (sizeof areas / sizeof *areas + 1);
    uint64_t at = area < sizeof areas / sizeof *areas ? client->offsets[areas[area]] : 0; /* else the header */
    at += below(in, 65535) * 8ull;
    return (uint64_t *)(client->segment + (at + 8 <= client->segment_bytes ? at : at % (client->segment_bytes / 8 * 8)));
}

/* Words that change while the rails read them, and in the end maybe their memory. */
struct storm {
    uint64_t *words[4], values[4][2];
    uint32_t count, stop;
    int cut_fd;
};

static void *blow(void *argument)
{
    struct storm *storm = argument;
    for (uint32_t turn = 0; !rr_load_relaxed_u32(&storm->stop); turn++) {
        for (uint32_t i = 0; i < storm->count; i++) rr_store_relaxed_u64(storm->words[i], storm->values[i][turn & 1]);
        if (turn == 100 && storm->cut_fd >= 0 && ftruncate(storm->cut_fd, 0) == 0) break;
    }
    return NULL;
}

static int file_to_cut(struct fuzz_client *client, struct input *in)
{
    switch (byte(in) % 4) {
    case 0: client->cut = 1; return client->segment_fd;
    case 1: return client->lane_fd;
    case 2: return client->region_fds[TARGET];
    default: return client->bounce_fd;
    }
}

static void storm(struct world *w, struct input *in)
{
    struct fuzz_client *client = &w->clients[HOSTILE];
    struct storm storm = {.count = 1 + byte(in) % 4, .cut_fd = -1};
    pthread_t thread;
    for (uint32_t i = 0; i < storm.count; i++) {
        storm.words[i] = a_word(client, in);
        storm.values[i][0] = number(in);
        storm.values[i][1] = number(in);
    }
    uint8_t cut = byte(in);
    if (cut & 1) storm.cut_fd = file_to_cut(client, in);
    if (pthread_create(&thread, NULL, blow, &storm)) say_and_abort("no thread");
    world_step(w, 20);
    rr_store_relaxed_u32(&storm.stop, 1);
    pthread_join(thread, NULL);
}

static void changed(struct input *in, void *structure, uint32_t bytes)
{
    for (uint32_t changes = byte(in) % 4; changes; changes--) {
        uint32_t at = byte(in) % (bytes / 4) * 4;
        uint32_t value = (uint32_t)number(in);
        memcpy((uint8_t *)structure + at, &value, 4);
    }
}

/* A slice as the library would publish it, with changes. */
static void publish(struct fuzz_client *client, struct input *in, int through_lane)
{
    uint32_t which = byte(in), transfer = which % TRANSFERS, region = which >> 6 == 3 ? KEPT : TARGET;
    uint32_t remote = byte(in) & 1, blocks = byte(in) % 4;
    uint32_t generation = client->generations[transfer] += !(byte(in) & 1);
    struct rr_slice slice = {.transfer = transfer, .generation = generation, .remote_rail = 1, .flags = RR_SLICE_FINAL, .block_count = blocks,
                             .total_slices = 1, .table = client->produced % RING_TABLES, .ticket = client->produced % RING_SLICES,
                             .inline_length = 100, .inline_source_region = region, .inline_remote_region = remote};
    if (!blocks && !through_lane) slice.flags |= RR_SLICE_INLINE;
    if (byte(in) == 1) slice.flags = RR_SLICE_FINAL | RR_SLICE_VOID | RR_SLICE_LOCAL;
    uint32_t slot = client->slots_announced % SLOTS, row = through_lane ? slot : slice.table;
    struct rr_block *table = (struct rr_block *)area_of(client, through_lane ? RR_AREA_SLOT_TABLES : RR_AREA_RING_TABLES) + row * ENTRIES;
    for (uint32_t i = 0; i < blocks; i++) {
        table[i] = (struct rr_block){i * 512, i * 1024, 300, region, remote, 0};
        changed(in, &table[i], sizeof table[i]);
    }
    changed(in, &slice, sizeof slice);
    if (through_lane) {
        struct rr_lane *lane = area_of(client, RR_AREA_LANE);
        ((struct rr_slice *)area_of(client, RR_AREA_SLOT_HEADS))[slot] = slice;
        lane->announce[client->slots_announced % RR_MAX_SLOTS] = slot;
        rr_store_release_u64(&lane->head, ++client->slots_announced);
        rr_store_release_u64(&lane->doorbell, client->slots_announced);
    } else {
        struct rr_ring *ring = area_of(client, RR_AREA_RINGS);
        ((struct rr_slice *)area_of(client, RR_AREA_RING_SLICES))[client->produced % RING_SLICES] = slice;
        rr_store_release_u64(&ring->produced, ++client->produced);
    }
}

/* The main thread closes remote 1 and opens another there, while the rail takes slices that name it: of this plane what
 * was lent, and of peer 1 a region whose number here means the target of somebody else. */
struct reopening {
    struct world *world;
    uint32_t stop;
};

static void *reopen(void *argument)
{
    struct reopening *reopening = argument;
    for (uint32_t away = 0; !rr_load_relaxed_u32(&reopening->stop); away = !away) {
        rr_plane_remove_remote(reopening->world->plane, HOSTILE, 1);
        world_add_remote(reopening->world, HOSTILE, 1, away, away ? TO_TARGET : TO_LENT, GOOD_RECEIVER, away ? REGIONS : LENT, 0);
    }
    return NULL;
}

static void reopen_under_slices(struct world *w)
{
    struct fuzz_client *client = &w->clients[HOSTILE];
    struct reopening reopening = {w, 0};
    pthread_t thread;
    if (pthread_create(&thread, NULL, reopen, &reopening)) say_and_abort("no thread");
    for (uint32_t i = 0; i < 50 && client->attached; i++) { /* it is released in a later step than it is detached */
        struct rr_ring *ring = area_of(client, RR_AREA_RINGS);
        uint32_t transfer = i % TRANSFERS;
        struct rr_slice *slice = (struct rr_slice *)area_of(client, RR_AREA_RING_SLICES) + client->produced % RING_SLICES;
        *slice = (struct rr_slice){.transfer = transfer, .generation = ++client->generations[transfer], .remote_rail = 1, .total_slices = 1,
                                   .flags = RR_SLICE_FINAL, .block_count = ENTRIES, .table = 0};
        struct rr_block *table = area_of(client, RR_AREA_RING_TABLES);
        for (uint32_t b = 0; b < ENTRIES; b++) table[b] = (struct rr_block){0, b * 8, 8, TARGET, 1, 0};
        rr_store_release_u64(&ring->produced, ++client->produced);
        world_step(w, 1);
    }
    rr_store_relaxed_u32(&reopening.stop, 1);
    pthread_join(thread, NULL);
}

/* What the main thread does for the client: requests, time-outs. */
static void ask(struct world *w, struct input *in)
{
    struct rr_plane *plane = w->plane;
    struct rr_client *client = plane->clients[HOSTILE];
    uint32_t transfer = byte(in) % (TRANSFERS + 1), generation = (uint32_t)number(in);
    if (!client || !w->clients[HOSTILE].attached) return;
    switch (byte(in) % 8) {
    case 0: rr_transfer_cancel(client, transfer, generation, RR_CANCELLED); break;
    case 1: rr_transfer_report_unsettled(client, transfer, generation); break;
    case 2: rr_transfer_watch(client, transfer, generation); break;
    case 3: rr_plane_purge_stopped(plane); break;
    case 4: rr_plane_remove_remote(plane, HOSTILE, 0); break;
    case 5:
        if (!w->clients[HOSTILE].cut) reopen_under_slices(w);
        break;
    case 6: rr_plane_add_tombstone(plane, HOSTILE, 1 + generation, 0); break;
    default:
        rr_plane_holders(plane, HOSTILE, transfer, generation, 9);
        world_step(w, 1);
        struct rr_holder holders[8];
        uint32_t count = rr_plane_holders_result(plane, 9, holders, 8);
        for (uint32_t i = 0; i < count; i++) rr_plane_close_sender(plane, (uint32_t)holders[i].rail, holders[i].connection);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    uint8_t rails = byte(&in);
    struct world *w = world_open(rails & 1, rails & 2);
    struct fuzz_client *client = &w->clients[HOSTILE];
    while (in.at < in.end) {
        uint8_t kind = byte(&in) % 16;
        switch (kind) {
        case 0: world_step(w, 1 + byte(&in) % 8); break;
        case 1: world_send(w, &in, byte(&in) & 1 ? REMOTE_TARGET : REMOTE_PRIVATE); break;
        case 2: world_send(w, &in, REMOTE_HOSTILE); break;
        case 3: ask(w, &in); break;
        case 4: world_detach(w, HOSTILE); break;
        case 5: {
            int fd = file_to_cut(client, &in);
            if (ftruncate(fd, byte(&in) & 1 ? 4096 : 0)) say_and_abort("not cut");
            break;
        }
        case 6: {
            uint64_t half = number(&in);
            if (!client->cut) memcpy((uint8_t *)a_word(client, &in) + (half & 1 ? 4 : 0), &half, 4);
            break;
        }
        case 7:
            if (!client->cut) storm(w, &in);
            break;
        case 8: case 9: case 10:
            if (!client->cut) publish(client, &in, kind & 1);
            break;
        default: {
            if (client->cut) break;
            uint64_t *word = a_word(client, &in);
            rr_store_relaxed_u64(word, number(&in));
        }
        }
    }
    world_close(w, 1);
    return 0;
}
