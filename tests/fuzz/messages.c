/* A peer that says whatever it likes on an RDMA connection: immediates, messages, writes to bounce memory with the keys
 * that it was given; and that answers frames as it likes, while two clients transfer beside it. What else it writes is
 * between it and the device. */
#define _GNU_SOURCE
#include "world.h"

#include "device.h"
#include "verbs_inside.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#ifdef RR_HAVE_VERBS
_Static_assert(MESSAGE_BYTES == DEVICE_HEARD_BYTES, "messages are heard whole");

struct hostile_peer {
    uint64_t sequence, want; /* of what it sends */
    struct message granted;  /* the latest grant */
    uint64_t heard;          /* frames of GOOD_SENDER */
    uint64_t answered;
};

static uint32_t end_of(int end) { return end < 0 ? 0 : (uint32_t)end; } /* no queue pair has the number 0 */

static void say(struct input *in, int end, struct message *message)
{
    bend(in, message, sizeof *message);
    device_say(end_of(end), message, sizeof *message);
}

static void say_raw(struct input *in, int end)
{
    uint8_t bytes[2 * MESSAGE_BYTES] = {0};
    uint32_t count = byte(in) & 1 ? MESSAGE_BYTES : below(in, sizeof bytes);
    for (uint32_t i = 0; i < count && in->at < in->end; i++) bytes[i] = byte(in);
    device_say(end_of(end), bytes, count);
}

/* As end_frame() in verbs_sender.c, if nothing is bent. */
static void say_frame(struct world *w, struct hostile_peer *peer, struct input *in)
{
    if (!world_connect_hostile(w)) return;
    uint32_t bytes = 1 + below(in, 60000), immediate = (bytes - 1) << 2 | (uint32_t)(++peer->sequence & IMM_SEQUENCE);
    bend(in, &immediate, sizeof immediate);
    device_say_immediate(end_of(w->hostile_end), immediate);
}

static void hear_grants(const struct world *w, struct hostile_peer *peer)
{
    struct message heard;
    uint32_t immediate;
    enum device_heard kind;
    while ((kind = device_hear(end_of(w->hostile_end), (uint8_t *)&heard, &immediate)))
        if (kind == DEVICE_SEND && heard.type == MESSAGE_GRANT && !heard.one.code) peer->granted = heard;
}

/* Its own, or one like it that may be somebody else's. */
static uint64_t some_grant(const struct hostile_peer *peer, struct input *in)
{
    return byte(in) < 0xc0 ? peer->granted.grant : (peer->granted.grant & ~0xffull) + byte(in) % (BOUNCE_SLOTS + 3);
}

static void say_want(struct world *w, struct hostile_peer *peer, struct input *in)
{
    struct message message = {.magic = MESSAGE_MAGIC, .type = byte(in) & 3 ? MESSAGE_WANT : MESSAGE_RETURN};
    if (!world_connect_hostile(w)) return;
    hear_grants(w, peer);
    message.grant = some_grant(peer, in);
    message.one.sequence = ++peer->want;
    message.one.owner = GOOD_RECEIVER;
    message.one.bytes = 1 + below(in, SLOT_BYTES);
    say(in, w->hostile_end, &message);
}

static void write_slot(struct world *w, struct hostile_peer *peer, struct input *in)
{
    uint8_t bytes[256];
    uint64_t address = peer->granted.one.address + below(in, SLOT_BYTES);
    uint32_t rkey = peer->granted.one.rkey, count = byte(in);
    hear_grants(w, peer);
    memset(bytes, byte(in) & 0x7f, sizeof bytes); /* without bit 7, as all that is the fuzzer's */
    bend(in, &address, sizeof address);
    if (byte(in) > 250) bend(in, &rkey, sizeof rkey);
    int inside = address >= peer->granted.one.address && address - peer->granted.one.address + count <= SLOT_BYTES;
    device_write(end_of(w->hostile_end), inside ? rkey : 0, address, bytes, count); /* other slots of it are others' */
}

static void say_bounced(struct world *w, struct hostile_peer *peer, struct input *in)
{
    static const uint32_t handles[] = {PRIVATE_TO_1, PRIVATE_TO_1, PRIVATE_TO_1, LENT_TO_1, KEPT_BY_1, TO_PRIVATE, TO_TARGET, TO_HOSTILE};
    struct rr_wire_run runs[ENTRIES];
    uint8_t kind = byte(in);
    uint32_t count = 1 + byte(in) % ENTRIES, each = 1 + below(in, 1000), handle = handles[kind & 7];
    hear_grants(w, peer);
    struct message message = {.magic = MESSAGE_MAGIC, .type = MESSAGE_BOUNCED, .grant = some_grant(peer, in)};
    message.one.sequence = ++peer->sequence;
    message.one.owner = GOOD_RECEIVER;
    message.one.tag = 40;
    message.one.bytes = (uint64_t)each * count;
    message.one.run_count = count;
    message.one.code = kind >> 4 == 15 ? RR_CANCELLED : RR_OK;
    for (uint32_t i = 0; i < count; i++) {
        runs[i] = (struct rr_wire_run){i * 900ull, each, handle};
        if (kind & 8) bend(in, &runs[i], sizeof runs[i]);
    }
    if (count <= RUNS_IN_MESSAGE)
        memcpy(message.one.runs, runs, count * sizeof *runs);
    else
        device_write(end_of(w->hostile_end), peer->granted.one.rkey, peer->granted.one.table_address, runs, count * (uint32_t)sizeof *runs);
    say(in, w->hostile_end, &message);
}

/* What GOOD_SENDER has sent is answered, right or wrong. */
static void answer(struct world *w, struct hostile_peer *peer, struct input *in)
{
    struct message heard, message = {.magic = MESSAGE_MAGIC, .type = MESSAGE_DONE};
    uint32_t immediate, wrong = byte(in);
    enum device_heard kind = device_hear(end_of(w->away_end), (uint8_t *)&heard, &immediate);
    if (kind == DEVICE_SEND && heard.type == MESSAGE_WANT) {
        message.type = MESSAGE_GRANT;
        message.grant = 1ull << 32 | (1 + byte(in) % BOUNCE_SLOTS);
        message.one.sequence = heard.one.sequence;
        message.one.owner = heard.one.owner;
        message.one.address = 4096;
        message.one.rkey = 7;
        message.one.code = wrong < 0xc0 ? RR_OK : wrong & 31;
    } else {
        peer->heard += kind == DEVICE_IMMEDIATE || (kind == DEVICE_SEND && heard.type == MESSAGE_BOUNCED);
        message.count = (uint16_t)(1 + byte(in) % PAIRS_MAX);
        uint64_t waiting = peer->heard > peer->answered ? peer->heard - peer->answered : 0;
        if (message.count > waiting && wrong < 0xc0) message.count = (uint16_t)waiting;
        for (uint32_t i = 0; i < message.count; i++) message.pairs[i] = (struct rr_ack){++peer->answered, wrong & 0x20 ? wrong & 31 : RR_OK};
    }
    say(in, w->away_end, &message);
}

static void change_regions(struct world *w, struct input *in)
{
    struct rr_plane *plane = w->plane;
    switch (byte(in) % 10) {
    case 0: rr_plane_remove_export(plane, LENT_TO_1, 1); break;
    case 1: rr_plane_add_export(plane, LENT_TO_1 + EXPORTS, 1, GOOD_RECEIVER, LENT, REGION_BYTES); break;
    case 2: rr_plane_remove_export(plane, PRIVATE_TO_1, 1); break;
    case 3: rr_plane_add_tombstone(plane, GOOD_RECEIVER, 40, 1); break;
    case 4: rr_plane_remove_remote(plane, GOOD_SENDER, REMOTE_AWAY); break;
    case 5: rr_plane_drain_handle(plane, 1, 77 + (byte(in) & 1), 9); break;
    case 6: rr_plane_add_peer_tombstone(plane, 1, 5, 1 + byte(in) % 3); break;
    case 7: world_end_away(w, 0); break;
    case 8: world_end_away(w, 1); break;
    default: world_add_away(w, byte(in) & 1);
    }
}

static void end_connection(struct world *w, struct hostile_peer *peer, struct input *in)
{
    switch (byte(in) % 4) {
    case 0: world_close_away(w); break;
    case 1: rr_plane_close_sender(w->plane, 0, w->away_connection); break;
    case 2: rr_plane_fence_receiver(w->plane, 1, w->hostile_connection); break;
    default: world_close_hostile(w);
    }
    *peer = (struct hostile_peer){0};
}

static void stall(const struct world *w, struct input *in)
{
    uint8_t how = byte(in);
    device_stall(end_of(how & 1 ? w->away_end : w->hostile_end), how & 2, how >> 4 == 15);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct world *w = world_open(1, byte(&in) & 1);
    struct hostile_peer peer = {0};
    while (in.at < in.end) {
        switch (byte(&in) % 16) {
        case 0: {
            uint8_t steps = byte(&in);
            world_step(w, 1 + (steps > 0xf0 ? LOOK_CYCLES : steps % 4));
            break;
        }
        case 1: world_send(w, &in, REMOTE_AWAY); break;
        case 2: world_send(w, &in, byte(&in) & 1 ? REMOTE_TARGET : REMOTE_PRIVATE); break;
        case 3: case 4: answer(w, &peer, &in); break;
        case 5: change_regions(w, &in); break;
        case 6: end_connection(w, &peer, &in); break;
        case 7: world_detach(w, HOSTILE); break;
        case 8: say_raw(&in, w->away_end); break;
        case 9: say_raw(&in, w->hostile_end); break;
        case 10: case 11: say_want(w, &peer, &in); break;
        case 12: say_frame(w, &peer, &in); break;
        case 13: say_bounced(w, &peer, &in); break;
        case 14: write_slot(w, &peer, &in); break;
        default: stall(w, &in);
        }
    }
    world_close(w, 0);
    return 0;
}
#else
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) { return (void)data, (void)size, 0; }
#endif
