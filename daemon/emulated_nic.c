/* The emulated NIC: a helper process copies each slice from its source to its destination on this machine and ends it
 * when a NIC of the configured rate would have. For measurements and tests; it reaches clients of its own daemon only.
 * Runs on the rail's thread.
 *
 * There is no receiving end: what a receiver checks is checked here before a request is posted, and requests end in the
 * order of posting. Nothing of a request is given back before the helper has ended it or is dead. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

#include "emulated_ring.h"
#include "nic.h"
#include "window.h"

#define EVENTS_PER_POLL 64
#define WINDOW_NS 1000000ull /* what is posted ahead of the wire; a connection may always post two slices */
#define WINDOW_SLICES 2u

/* OPEN; LOSING: RR_EVENT_SENDER_LOST follows once nothing is posted; CLOSING: then it is freed. */
enum state { OPEN, LOSING, LOST, CLOSING };

struct rr_connection {
    struct rr_connection *next;
    uint64_t id;
    struct rr_path *path;
    uint64_t posted_bytes;
    uint32_t posted;
    enum state state;
    int error;
    uint32_t otherwise;      /* CLOSING: result of what was not copied */
    struct rr_work *skipped; /* LOSING, LOST: not copied, newest first */
};

struct record {
    struct rr_work *work;
    struct rr_connection *connection;
    uint64_t pieces_end;
    uint32_t refused; /* result if it is not copied any more */
};

struct emulated_nic {
    struct rr_nic base;
    int epoll_fd, ring_fd;
    uint64_t ring_bytes;
    struct re_ring *ring;
    struct re_request *requests;
    struct re_piece *pieces;
    struct rr_connection *connections;
    uint64_t posted, placed;
    uint64_t pieces_begin, pieces_end; /* free-running */
    uint64_t window_bytes;
    uint32_t piece_count, request_pieces;
    uint32_t dead;
    struct record records[RE_REQUESTS];
};

static struct emulated_nic *emulated(struct rr_nic *nic) { return (struct emulated_nic *)nic; }

static void emulated_close(struct rr_nic *base)
{
    struct emulated_nic *nic = emulated(base);
    for (struct rr_connection *c = nic->connections, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    if (nic->ring) munmap(nic->ring, nic->ring_bytes);
    if (nic->ring_fd >= 0) close(nic->ring_fd);
    if (nic->epoll_fd >= 0) close(nic->epoll_fd);
    free(nic);
}

static struct rr_nic *emulated_open(struct rr_rail *rail)
{
    struct emulated_nic *nic = calloc(1, sizeof *nic);
    if (!nic) return NULL;
    nic->base.ops = &rr_emulated_nic;
    nic->base.rail = rail;
    nic->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    nic->ring_fd = memfd_create("railrelay-emulated-nic", MFD_CLOEXEC);
    /* Sources and destinations cut each other: a table of n blocks on both sides makes fewer than 2n copies. */
    nic->request_pieces = 2 * rail->plane->table_entries;
    nic->piece_count = 8 * nic->request_pieces;
    uint64_t pieces_at = sizeof(struct re_ring) + RE_REQUESTS * sizeof(struct re_request);
    nic->ring_bytes = pieces_at + nic->piece_count * sizeof(struct re_piece);
    nic->window_bytes = rail->bytes_per_s / (1000000000ull / WINDOW_NS);
    void *base = MAP_FAILED;
    if (nic->epoll_fd >= 0 && nic->ring_fd >= 0 && ftruncate(nic->ring_fd, (off_t)nic->ring_bytes) == 0)
        base = mmap(NULL, nic->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, nic->ring_fd, 0);
    if (base == MAP_FAILED) {
        int error = errno;
        emulated_close(&nic->base);
        errno = error;
        return NULL;
    }
    nic->ring = base;
    nic->ring->bytes_per_s = rail->bytes_per_s;
    nic->ring->total_bytes = nic->ring_bytes;
    nic->ring->requests = RE_REQUESTS;
    nic->ring->pieces = nic->piece_count;
    nic->ring->request_pieces = nic->request_pieces;
    nic->ring->requests_at = sizeof(struct re_ring);
    nic->ring->pieces_at = (uint32_t)pieces_at;
    rr_store_release_u64(&nic->ring->magic, RE_MAGIC);
    nic->requests = re_requests(nic->ring);
    nic->pieces = re_pieces(nic->ring);
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(nic->epoll_fd, EPOLL_CTL_ADD, rail->kick_fd, &event);
    return &nic->base;
}

int rr_emulated_ring_fd(struct rr_nic *nic) { return nic->ops == &rr_emulated_nic ? emulated(nic)->ring_fd : -1; }

static int emulated_watch_kick(struct rr_nic *nic, int fd, int watch)
{
    struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    return epoll_ctl(emulated(nic)->epoll_fd, watch ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, fd, &event);
}

/* ---- connections ---- */

static struct rr_connection *emulated_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int fd)
{
    struct rr_connection *c = calloc(1, sizeof *c);
    if (!c) abort();
    if (fd >= 0) close(fd);
    c->id = id;
    c->path = path;
    c->next = emulated(base)->connections;
    emulated(base)->connections = c;
    path->connection = c;
    path->epoch = epoch;
    path->wanted = path->broken = 0;
    return c;
}

/* The conductor gives tokens for rails with a TCP NIC only. */
static void emulated_add_receiver(struct rr_nic *base, uint64_t id, uint32_t session, int fd)
{
    close(fd);
    rr_event_push(base->rail->plane, RR_EVENT_RECEIVER_LOST, base->rail->number, (int64_t)id, EPROTO, session, 0, 0);
}

static struct rr_connection *emulated_find(struct rr_nic *nic, uint64_t id)
{
    struct rr_connection *c = emulated(nic)->connections;
    while (c && c->id != id) c = c->next;
    return c;
}

static uint64_t emulated_connection_id(const struct rr_connection *c) { return c->id; }

static void free_connection(struct emulated_nic *nic, struct rr_connection *c)
{
    struct rr_connection **link = &nic->connections;
    while (*link != c) link = &(*link)->next;
    *link = c->next;
    free(c);
}

/* The helper leaves out what it has not begun. */
static void cancel(struct emulated_nic *nic, uint64_t at)
{
    rr_store_relaxed_u32(&nic->requests[at % RE_REQUESTS].cancel, 1);
    rr_count_wake(&nic->ring->helper_wake, &nic->ring->helper_sleeping);
}

static void cancel_connection(struct emulated_nic *nic, const struct rr_connection *c)
{
    for (uint64_t at = nic->placed; at != nic->posted; at++)
        if (nic->records[at % RE_REQUESTS].connection == c) cancel(nic, at);
}

static void when_nothing_is_posted(struct emulated_nic *nic, struct rr_connection *c)
{
    if (c->posted) return;
    if (c->state == CLOSING) {
        free_connection(nic, c);
    } else if (c->state == LOSING) {
        c->state = LOST;
        uint32_t left = 0;
        for (struct rr_work *work = c->skipped; work; work = work->next) left++;
        rr_event_push(nic->base.rail->plane, RR_EVENT_SENDER_LOST, nic->base.rail->number, (int64_t)c->id, c->error, c->path->peer,
                      c->path->remote_rail, left);
    }
}

static void emulated_lose(struct rr_nic *base, struct rr_connection *c, int error)
{
    if (c->state != OPEN) return;
    c->state = LOSING;
    c->error = error;
    c->path->connection = NULL;
    c->path->broken = 1;
    rr_count(base->rail, RR_RAIL_CONNECTIONS_LOST, 1);
    cancel_connection(emulated(base), c);
    when_nothing_is_posted(emulated(base), c);
}

/* Everything that was posted has ended by itself (LOST), so that only what was not copied is left. */
static void emulated_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                            uint32_t otherwise)
{
    (void)placed;
    (void)acks;
    (void)ack_count;
    if (c->state != LOST) return;
    c->path->broken = 0;
    struct rr_work *skipped = c->skipped;
    free_connection(emulated(base), c);
    for (struct rr_work *work = skipped, *next; work; work = next) {
        next = work->next;
        work->next = NULL;
        rr_work_again(base->rail, work, otherwise);
    }
}

static void emulated_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result)
{
    struct emulated_nic *nic = emulated(base);
    for (struct rr_connection *c = nic->connections, *next; c; c = next) {
        next = c->next;
        if (c->state == CLOSING || c->path->peer != peer) continue;
        if (c->state == OPEN) {
            c->path->connection = NULL;
            cancel_connection(nic, c);
        }
        for (struct rr_work *work = c->skipped, *after; work; work = after) {
            after = work->next;
            work->next = NULL;
            rr_work_again(base->rail, work, result);
        }
        c->skipped = NULL;
        c->otherwise = result;
        c->state = CLOSING;
        when_nothing_is_posted(nic, c);
    }
}

static void emulated_fence(struct rr_nic *base, struct rr_connection *c)
{
    (void)base;
    (void)c;
}

/* ---- posting ---- */

/* What a receiver would answer. */
static uint32_t check(struct rr_rail *rail, const struct rr_work *work)
{
    struct rr_plane *plane = rail->plane;
    for (uint32_t i = 0; i < work->run_count; i++) {
        const struct rr_wire_run *run = &work->runs[i];
        const struct rr_export *export = &plane->exports[run->handle % plane->max_exports];
        if (!rr_load_acquire_u32(&export->valid) || export->handle != run->handle || export->client != work->owner) return RR_REGION_GONE;
        if (run->length == 0 || run->offset > export->bytes || run->length > export->bytes - run->offset) return RR_OUT_OF_BOUNDS;
        if (!export->base) return RR_BAD_REGION; /* private memory: nobody here can write it */
        if (rr_load_relaxed_u32(&export->mapping->broken)) return RR_REGION_GONE;
    }
    const struct rr_client *owner = work->owner < RR_MAX_CLIENTS ? rail->by_number[work->owner] : NULL;
    if (!owner) return RR_REGION_GONE;
    return rr_has_tombstone(owner, work->tag) ? RR_ABORTED : RR_OK;
}

/* Cuts source pieces and destination runs at each other's ends. */
static uint32_t cut(const struct rr_plane *plane, const struct rr_work *work, struct re_piece *pieces)
{
    uint32_t count = 0, at = 0;
    uint64_t into = 0;
    for (uint32_t i = 0; i < work->run_count; i++) {
        uint64_t destination = (uint64_t)(uintptr_t)plane->exports[work->runs[i].handle % plane->max_exports].base + work->runs[i].offset;
        uint64_t left = work->runs[i].length;
        while (left) {
            uint64_t source = (uint64_t)(uintptr_t)work->pieces[at].iov_base + into;
            uint64_t bytes = work->pieces[at].iov_len - into;
            if (bytes > left) bytes = left;
            struct re_piece *last = count ? &pieces[count - 1] : NULL;
            if (last && last->source + last->bytes == source && last->destination + last->bytes == destination)
                last->bytes += (uint32_t)bytes;
            else
                pieces[count++] = (struct re_piece){source, destination, (uint32_t)bytes, 0};
            destination += bytes;
            left -= bytes;
            into += bytes;
            if (into == work->pieces[at].iov_len) {
                at++;
                into = 0;
            }
        }
    }
    return count;
}

/* Where the pieces of the next request go: a contiguous run of the circle. 0 if there is no room for the longest. */
static int piece_room(struct emulated_nic *nic)
{
    uint64_t at = nic->pieces_end % nic->piece_count;
    uint64_t skip = nic->piece_count - at < nic->request_pieces ? nic->piece_count - at : 0;
    if (nic->pieces_end + skip + nic->request_pieces - nic->pieces_begin > nic->piece_count) return 0;
    nic->pieces_end += skip;
    return 1;
}

/* Each connection that has something to send gets its part of the window. */
static int may_post(struct emulated_nic *nic, const struct rr_connection *c)
{
    if (nic->posted - nic->placed == RE_REQUESTS) return 0;
    uint32_t busy = 0;
    for (const struct rr_connection *other = nic->connections; other; other = other->next)
        busy += other->posted || (other->state == OPEN && other->path->flow_first);
    if (c->posted >= WINDOW_SLICES && c->posted_bytes >= nic->window_bytes / (busy ? busy : 1)) return 0;
    return piece_room(nic);
}

static void push(struct emulated_nic *nic, struct rr_connection *c, struct rr_work *work)
{
    struct re_request *request = &nic->requests[nic->posted % RE_REQUESTS];
    uint32_t first = (uint32_t)(nic->pieces_end % nic->piece_count);
    uint32_t count = cut(nic->base.rail->plane, work, nic->pieces + first);
    nic->pieces_end += count;
    rr_rail_time_passes(nic->base.rail);
    rr_work_posted(nic->base.rail, work);
    *request = (struct re_request){.bytes = work->bytes, .posted_ns = work->posted_ns, .first_piece = first, .piece_count = count};
    work->connection = c;
    nic->records[nic->posted % RE_REQUESTS] = (struct record){work, c, nic->pieces_end, RR_OK};
    c->posted++;
    c->posted_bytes += work->bytes;
    nic->posted++;
    rr_store_release_u64(&nic->ring->posted, nic->posted); /* SYNC posted */
}

static int emulated_post(struct rr_nic *base, struct rr_path *path)
{
    struct emulated_nic *nic = emulated(base);
    struct rr_rail *rail = base->rail;
    struct rr_connection *c = path->connection;
    int work_count = 0, posted = 0;
    while (c && (nic->dead || may_post(nic, c))) {
        struct rr_work *work = rr_path_next(rail, path);
        if (!work) break;
        work_count++;
        uint32_t result = nic->dead ? RR_RAIL_DOWN : check(rail, work);
        if (result == RR_OK) {
            push(nic, c, work);
            posted = 1;
            continue;
        }
        if (!nic->dead) rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
        rr_work_done(rail, work, result);
    }
    if (posted) rr_count_wake(&nic->ring->helper_wake, &nic->ring->helper_sleeping);
    return work_count;
}

/* ---- the ends of requests ---- */

static void end_request(struct emulated_nic *nic, struct record *record, uint32_t result)
{
    struct rr_rail *rail = nic->base.rail;
    struct rr_work *work = record->work;
    struct rr_connection *c = record->connection;
    c->posted--;
    c->posted_bytes -= work->bytes;
    nic->pieces_begin = record->pieces_end;
    if (result == RR_CANCELLED && record->refused) {
        rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
        rr_work_done(rail, work, record->refused);
    } else if (result == RR_CANCELLED && c->state == LOSING) {
        work->next = c->skipped;
        c->skipped = work;
    } else if (result == RR_CANCELLED) {
        rr_work_again(rail, work, c->otherwise);
    } else {
        if (result == RR_OK) {
            rr_count(rail, RR_RAIL_FRAMES_SENT, 1);
            rr_count(rail, RR_RAIL_BYTES_SENT, work->bytes);
            rr_count(rail, RR_RAIL_FRAMES_RECEIVED, 1);
            rr_count(rail, RR_RAIL_BYTES_RECEIVED, work->bytes);
        }
        struct rr_client *owner = rail->by_number[work->owner];
        if (result == RR_SEGMENT_TRUNCATED) rr_violation(rail, work->source->client, RR_SEGMENT_TRUNCATED, 0, 0, 0);
        if (result == RR_REGION_GONE && owner) rr_violation(rail, owner, RR_SEGMENT_TRUNCATED, 0, 0, 0);
        rr_work_done(rail, work, result);
    }
    when_nothing_is_posted(nic, c);
}

static void show_statistics(struct emulated_nic *nic)
{
    const struct re_statistics *seen = &nic->ring->statistics;
    uint64_t *counters = nic->base.rail->counters;
    rr_store_relaxed_u64(&counters[RR_RAIL_NIC_BUSY_NS], rr_load_relaxed_u64(&seen->busy_ns));
    rr_store_relaxed_u64(&counters[RR_RAIL_NIC_ACTIVE_NS], rr_load_relaxed_u64(&seen->active_ns));
    rr_store_relaxed_u64(&counters[RR_RAIL_NIC_LATE_COPIES], rr_load_relaxed_u64(&seen->late_copies));
    rr_store_relaxed_u64(&counters[RR_RAIL_NIC_LATE_MAX_NS], rr_load_relaxed_u64(&seen->late_max_ns));
}

static int take_placed(struct emulated_nic *nic)
{
    uint64_t placed = rr_load_acquire_u64(&nic->ring->placed); /* SYNC placed */
    if (nic->dead || placed == nic->placed || placed - nic->placed > nic->posted - nic->placed) return 0;
    rr_rail_time_passes(nic->base.rail);
    show_statistics(nic);
    int work_count = 0;
    while (nic->placed != placed) {
        struct record *record = &nic->records[nic->placed % RE_REQUESTS];
        uint32_t result = nic->requests[nic->placed % RE_REQUESTS].result;
        nic->placed++;
        end_request(nic, record, result);
        work_count++;
    }
    return work_count;
}

/* Between two looks the helper's kick is edge-triggered like all others, and `placed` says it all. */
static int emulated_poll(struct rr_nic *base, int64_t timeout_ns)
{
    struct emulated_nic *nic = emulated(base);
    int work_count = take_placed(nic);
    if (timeout_ns == 0 || work_count) return work_count;
    struct epoll_event events[EVENTS_PER_POLL];
    rr_sleep_arm(&nic->ring->rail_sleeping);
    if (nic->dead || rr_load_relaxed_u64(&nic->ring->placed) == nic->placed)
        rr_epoll_wait(nic->epoll_fd, events, EVENTS_PER_POLL, timeout_ns);
    rr_sleep_disarm(&nic->ring->rail_sleeping);
    rr_rail_time_passes(base->rail);
    return take_placed(nic);
}

/* The helper's process has ended: nothing of it writes any more. */
static void emulated_fail(struct rr_nic *base, uint32_t result)
{
    struct emulated_nic *nic = emulated(base);
    if (nic->dead) return;
    take_placed(nic);
    nic->dead = 1;
    while (nic->placed != nic->posted) end_request(nic, &nic->records[nic->placed++ % RE_REQUESTS], result);
}

/* ---- refusal, cancel, clients that leave ---- */

static int concerns(const struct rr_work *work, uint32_t client, uint32_t handle, uint64_t tag)
{
    if (work->owner != client) return 0;
    if (handle == RR_NONE) return work->tag == tag;
    for (uint32_t i = 0; i < work->run_count; i++)
        if (work->runs[i].handle == handle) return 1;
    return 0;
}

static void emulated_refuse(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag, uint32_t result)
{
    struct emulated_nic *nic = emulated(base);
    for (uint64_t at = nic->placed; at != nic->posted; at++) {
        struct record *record = &nic->records[at % RE_REQUESTS];
        if (!concerns(record->work, client, handle, tag)) continue;
        record->refused = result;
        cancel(nic, at);
    }
}

static int emulated_landing(struct rr_nic *base, uint32_t client, uint32_t handle, uint64_t tag)
{
    struct emulated_nic *nic = emulated(base);
    for (uint64_t at = nic->placed; at != nic->posted; at++)
        if (concerns(nic->records[at % RE_REQUESTS].work, client, handle, tag)) return 1;
    return 0;
}

static void emulated_purge(struct rr_nic *base)
{
    struct emulated_nic *nic = emulated(base);
    for (uint64_t at = nic->placed; at != nic->posted; at++) {
        const struct rr_work *work = nic->records[at % RE_REQUESTS].work;
        const struct rr_client *client = work->source->client;
        if (client->ports[base->rail->number].detaching || rr_transfer_stopped(client, work->transfer, work->generation)) cancel(nic, at);
    }
}

static void emulated_abandon(struct rr_nic *base, struct rr_client *client)
{
    (void)client;
    emulated_purge(base);
}

static void emulated_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context)
{
    struct emulated_nic *nic = emulated(base);
    for (uint64_t at = nic->placed; at != nic->posted; at++) {
        struct record *record = &nic->records[at % RE_REQUESTS];
        visit(context, record->connection, record->work);
    }
}

static int emulated_reclaim(struct rr_nic *base, struct rr_client *client)
{
    (void)base;
    (void)client;
    return 0;
}

static void emulated_drop_bounces(struct rr_nic *base, struct rr_client *client)
{
    client->ports[base->rail->number].bouncer.shared = NULL;
}

const struct rr_nic_ops rr_emulated_nic = {
    .takes_made_up = 1,
    .name = "emulated",
    .open = emulated_open,
    .close = emulated_close,
    .watch_kick = emulated_watch_kick,
    .post = emulated_post,
    .poll = emulated_poll,
    .add_sender = emulated_add_sender,
    .add_receiver = emulated_add_receiver,
    .find = emulated_find,
    .lose = emulated_lose,
    .settle = emulated_settle,
    .fence = emulated_fence,
    .refuse = emulated_refuse,
    .landing = emulated_landing,
    .fail = emulated_fail,
    .purge = emulated_purge,
    .abandon = emulated_abandon,
    .each_posted = emulated_each_posted,
    .close_senders = emulated_close_senders,
    .reclaim = emulated_reclaim,
    .drop_bounces = emulated_drop_bounces,
    .connection_id = emulated_connection_id,
};
