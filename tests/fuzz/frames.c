/* A peer that sends whatever it likes on a rail connection that was admitted, and answers frames as it likes, while two
 * clients transfer beside it. */
#define _GNU_SOURCE
#include "world.h"

#include "tcp_nic.h"

#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void put(int fd, const void *bytes, uint64_t count)
{
    if (fd < 0) return;
    ssize_t sent = send(fd, bytes, count, MSG_DONTWAIT | MSG_NOSIGNAL); /* what does not fit is lost: a fault like any other */
    (void)sent;
}

/* Bytes without bit 7, as all that is the fuzzer's. */
static void payload(struct world *w, struct input *in, uint64_t count)
{
    uint8_t bytes[4096];
    memset(bytes, byte(in) & 0x7f, sizeof bytes);
    for (; count; count -= count < sizeof bytes ? count : sizeof bytes) put(w->hostile_end, bytes, count < sizeof bytes ? count : sizeof bytes);
}

static void raw(struct input *in, int fd)
{
    uint8_t bytes[255], count = byte(in);
    for (uint8_t i = 0; i < count; i++) bytes[i] = byte(in);
    put(fd, bytes, count);
}

struct hostile_peer {
    uint64_t sequence, want;
};

static void send_frame(struct world *w, struct hostile_peer *peer, struct input *in)
{
    static const uint32_t handles[] = {LENT_TO_1, PRIVATE_TO_1, KEPT_BY_1, TO_TARGET};
    struct wire {
        struct frame header;
        struct rr_wire_run runs[ENTRIES];
    } wire;
    memset(&wire, 0, sizeof wire);
    uint8_t kind = byte(in);
    uint32_t handle = handles[kind >> 2 & 1], runs = byte(in) % 5, each = 1 + below(in, 2000);
    if (kind >> 4 == 15) handle = handles[kind >> 2 & 3];
    if (!world_connect_hostile(w)) return;
    wire.header = (struct frame){.magic = FRAME_MAGIC, .type = FRAME_DATA, .run_count = runs ? runs : 1, .owner = GOOD_RECEIVER,
                                 .sequence = ++peer->sequence, .bytes = (uint64_t)each * (runs ? runs : 1), .tag = 40,
                                 .grant = handle == PRIVATE_TO_1 ? 1 + (kind >> 5) % BOUNCE_SLOTS : 0, .run = {0, each, handle}};
    for (uint32_t i = 0; i < runs; i++) {
        wire.runs[i] = (struct rr_wire_run){i * 2500ull, each, handle};
        bend(in, &wire.runs[i], sizeof wire.runs[i]);
    }
    bend(in, &wire.header, sizeof wire.header);
    put(w->hostile_end, &wire, sizeof wire.header + (runs > 1 ? runs * sizeof *wire.runs : 0));
    if (!(kind & 1)) payload(w, in, (uint64_t)each * (runs ? runs : 1));
}

static void want(struct world *w, struct hostile_peer *peer, struct input *in, uint16_t type)
{
    struct frame header = {.magic = FRAME_MAGIC, .type = type, .owner = GOOD_RECEIVER, .sequence = ++peer->want, .bytes = 4000, .grant = 1 + byte(in) % 4};
    if (!world_connect_hostile(w)) return;
    bend(in, &header, sizeof header);
    put(w->hostile_end, &header, sizeof header);
}

/* Frames that GOOD_SENDER sends to the fuzzer are read, and answered right or wrong. */
static void answer(struct world *w, struct input *in)
{
    struct frame header;
    uint8_t ignored[4096];
    if (w->away_end < 0) return;
    ssize_t got = recv(w->away_end, &header, sizeof header, MSG_DONTWAIT);
    if (got == (ssize_t)sizeof header && header.magic == FRAME_MAGIC)
        for (uint64_t left = header.bytes + (header.run_count > 1 ? header.run_count * sizeof header.run : 0); left && got > 0; left -= (uint64_t)got)
            got = recv(w->away_end, ignored, left < sizeof ignored ? left : sizeof ignored, MSG_DONTWAIT);
    else
        header = (struct frame){.sequence = number(in), .window = byte(in)};
    struct reply reply = {REPLY_MAGIC, byte(in) & 1 ? REPLY_DONE : REPLY_GRANT, (uint16_t)(byte(in) % 20), header.sequence, byte(in), header.window};
    if (byte(in) & 1) bend(in, &reply, sizeof reply);
    put(w->away_end, &reply, sizeof reply);
}

static void change_regions(struct world *w, struct input *in)
{
    struct rr_plane *plane = w->plane;
    switch (byte(in) % 8) {
    case 0: rr_plane_remove_export(plane, LENT_TO_1, 1); break;
    case 1: rr_plane_add_export(plane, LENT_TO_1 + EXPORTS, 1, GOOD_RECEIVER, LENT, REGION_BYTES); break;
    case 2: rr_plane_remove_export(plane, PRIVATE_TO_1, 1); break;
    case 3: rr_plane_add_tombstone(plane, GOOD_RECEIVER, 40, 1); break;
    case 4: rr_plane_remove_remote(plane, GOOD_SENDER, REMOTE_AWAY); break;
    case 6: world_end_away(w, 0); break;
    case 7: world_end_away(w, 1); break;
    default: world_add_away(w, 1); /* now by grants */
    }
}

static void end_connection(struct world *w, struct hostile_peer *peer, struct input *in)
{
    uint8_t kind = byte(in) % 4;
    if (kind == 0) {
        world_close_away(w);
    } else if (kind == 1) {
        rr_plane_close_sender(w->plane, 0, w->away_connection);
    } else if (kind == 2) {
        rr_plane_fence_receiver(w->plane, 1, w->hostile_connection);
    } else if (kind == 3) {
        world_close_hostile(w);
        *peer = (struct hostile_peer){0};
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct world *w = world_open(0, 0);
    struct input in = {data, data + size};
    struct hostile_peer peer = {0};
    while (in.at < in.end) {
        uint8_t kind = byte(&in) % 16;
        switch (kind) {
        case 0: world_step(w, 1 + byte(&in) % 4); break;
        case 1: world_send(w, &in, REMOTE_AWAY); break;
        case 2: world_send(w, &in, byte(&in) & 1 ? REMOTE_TARGET : REMOTE_PRIVATE); break;
        case 3: case 4: answer(w, &in); break;
        case 5: change_regions(w, &in); break;
        case 6: end_connection(w, &peer, &in); break;
        case 7: world_detach(w, HOSTILE); break;
        case 8: raw(&in, w->away_end); break;
        case 9: raw(&in, w->hostile_end); break;
        case 10: want(w, &peer, &in, FRAME_WANT); break;
        case 11: want(w, &peer, &in, FRAME_RETURN); break;
        case 12: payload(w, &in, below(&in, 3000)); break;
        default: send_frame(w, &peer, &in);
        }
    }
    world_close(w, 0);
    return 0;
}
