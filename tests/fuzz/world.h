/* A data plane of two rails, TCP or RDMA, with three clients, run step by step on the fuzzer's thread: rail 0 sends to rail 1.
 *
 * Client HOSTILE is the fuzzer's. GOOD_SENDER and RECEIVER are well-behaved; what they transfer has to arrive whatever the
 * fuzzer does. Every byte of theirs has bit 7 set and every byte of the fuzzer's has not, so that one that is where it
 * must not be shows who read or wrote too much. */
#ifndef RAILRELAY_FUZZ_WORLD_H
#define RAILRELAY_FUZZ_WORLD_H

#include "nic.h"

enum { HOSTILE, GOOD_SENDER, GOOD_RECEIVER, CLIENTS };
enum { RAILS = 2, SLOTS = 4, SLOT_BYTES = 16384, ENTRIES = 16, RING_SLICES = 8, RING_TABLES = 4, BOUNCE_SLOTS = 4, TRANSFERS = 8, KEYS = 20 };
enum { BOUNCE_BYTES = BOUNCE_SLOTS * (SLOT_BYTES + ENTRIES * (int)sizeof(struct rr_wire_run)) }; /* as RDMA rails have it */
enum { REGION_BYTES = 15000, REGION_OFFSET = 100, FILE_BYTES = 20480 };
/* Regions of GOOD_RECEIVER, and of HOSTILE the first three. */
enum { TARGET, LENT, KEPT, PRIVATE_TARGET, PRIVATE_LENT, REGIONS };
/* Handles of exports. Session 0 is this plane itself, session 1 the fuzzer's. */
enum { TO_TARGET, TO_LENT, TO_HOSTILE, TO_PRIVATE, KEPT_BY_1, LENT_TO_1, PRIVATE_TO_1, EXPORTS = 16 };
/* Remotes of GOOD_SENDER. HOSTILE has LENT as 0, and as 1 until the fuzzer opens something else there. */
enum { REMOTE_TARGET, REMOTE_PRIVATE, REMOTE_HOSTILE, REMOTE_AWAY };

struct input {
    const uint8_t *at, *end;
};

struct fuzz_client {
    int segment_fd, lane_fd, region_fds[REGIONS], bounce_fd;
    uint8_t *segment, *lane, *regions[REGIONS], *bounce; /* as the client has them mapped */
    uint64_t segment_bytes, offsets[32];
    uint32_t attached, rails_left, drains_left, cut;
    uint32_t generations[TRANSFERS], produced, slots_announced;
    uint64_t emptied;
    uint32_t rkeys[REGIONS][RAILS]; /* by the rail whose device it is */
    uint64_t keys[KEYS];
    uint32_t key_count;
};

/* A transfer of GOOD_SENDER that has to arrive. */
struct sent {
    uint32_t live, generation, remote, offset, bytes;
};

struct world {
    struct rr_plane *plane;
    void *node;
    uint64_t node_bytes;
    struct fuzz_client clients[CLIENTS];
    struct sent sent[TRANSFERS];
    uint64_t next_connection;
    int verbs;
    int hostile_end;              /* the fuzzer's end of a connection of session 1 to rail 1: a socket, or the number of a queue pair; -1: none */
    uint64_t hostile_connection;
    int away_end;                 /* the fuzzer's end of a connection from rail 0 to peer 1; -1: none */
    uint64_t away_connection;
    uint64_t steps;
};

void say_and_abort(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
uint8_t byte(struct input *in);
uint32_t below(struct input *in, uint32_t limit);
/* A number that is often at an edge. */
uint64_t number(struct input *in);
/* A few words of it are changed. */
void bend(struct input *in, void *structure, uint32_t bytes);

/* verbs: RDMA rails, if they can be built; flushes: what arrives there is answered after a read. */
struct world *world_open(int verbs, int flushes);
/* One cycle of both rails, and what the main thread does about their events. */
void world_step(struct world *w, uint32_t steps);
/* A transfer of GOOD_SENDER, through its lane or its ring. */
void world_send(struct world *w, struct input *in, uint32_t remote);
/* The fuzzer's connections; 0: no more of them. */
int world_connect_hostile(struct world *w);
void world_close_hostile(struct world *w);
void world_close_away(struct world *w);
/* region: of the owner, where RDMA rails write straight; REGIONS: elsewhere. */
void world_add_remote(struct world *w, uint32_t client, uint32_t remote, uint32_t peer, uint32_t handle, uint32_t owner, uint32_t region, int windowed);
/* REMOTE_AWAY from now on: written straight, or by grants. */
void world_add_away(struct world *w, int windowed);
/* What was sent there and is not done is given up; fences: those that have it are told to end. */
void world_end_away(struct world *w, int fences);
void world_detach(struct world *w, uint32_t client);
/* All that GOOD_SENDER has sent must have arrived and no byte may be where it must not be; then everything must come to its
 * end. lends_to_client: HOSTILE alone wrote into the lent regions, or else a peer, whatever it liked. */
void world_close(struct world *w, int lends_to_client);

static inline void *area_of(struct fuzz_client *client, uint32_t id) { return client->segment + client->offsets[id]; }

#endif
