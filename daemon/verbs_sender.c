/* The verbs NIC, sending end: slices become chains of writes, answers end them, and what happens to both when the
 * connection is lost. Runs on the rail's thread. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <endian.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct rr_connection *verbs_add_sender(struct rr_nic *base, uint64_t id, struct rr_path *path, uint32_t epoch, int endpoint)
{
    struct rr_rail *rail = base->rail;
    struct rr_connection *c = verbs_adopt(verbs(base), (uint64_t)endpoint, 1);
    if (!c) {
        rr_path_of(rail, path->peer, path->remote_rail, 0)->wanted = 0;
        rr_event_push(rail->plane, RR_EVENT_SENDER_LOST, rail->number, (int64_t)id, ENOENT, path->peer, path->remote_rail, 0);
        return NULL;
    }
    c->id = id;
    c->role = SENDER;
    for (uint32_t i = 0; i < RR_CLASSES; i++) {
        struct rr_path *of_class = rr_path_of(rail, path->peer, path->remote_rail, i);
        c->paths[i] = of_class;
        of_class->connection = c;
        of_class->epoch = epoch;
        of_class->wanted = of_class->broken = 0;
    }
    verbs_touch(c); /* slices may wait on both paths */
    return c;
}

/* ---- a slice as work requests ---- */

static uint32_t lkey_of(const struct rr_connection *c, const struct rr_work *work, uint32_t piece)
{
    const struct rr_client *client = work->source->client;
    if (work->source->is_lane) return client->ports[c->nic->base.rail->number].lane_lkeys[c->port->through];
    return client->regions[work->piece_regions[piece]].lkeys[c->port->through];
}

/* Where the run goes; private memory has no keys. Its fields are read between two looks at `valid`: a region may be withdrawn,
 * and its place in the table be given to another, at any time. */
static uint32_t resolve(struct rr_connection *c, const struct rr_work *work, uint32_t run)
{
    const struct rr_remote *remote = &work->source->client->remotes[work->run_remotes[run]];
    uint32_t version = rr_load_acquire_u32(&remote->valid);
    if (!version) return RR_REGION_GONE;
    uint32_t handle = rr_load_relaxed_u32(&remote->handle), peer = rr_load_relaxed_u32(&remote->peer);
    uint32_t count = rr_load_relaxed_u32(&remote->rkey_count);
    uint64_t iova = rr_load_relaxed_u64(&remote->iova);
    uint32_t rkey = c->remote_through < count ? rr_load_relaxed_u32(&remote->rkeys[c->remote_through]) : 0;
    rr_acquire_fence();
    if (rr_load_relaxed_u32(&remote->valid) != version || handle != work->runs[run].handle || peer != work->peer) return RR_REGION_GONE;
    if (work->window_bytes) return RR_OK;
    if (!rkey) return RR_BAD_REGION;
    c->address = iova + work->runs[run].offset;
    c->rkey = rkey;
    return RR_OK;
}

static uint32_t check(struct rr_connection *c, const struct rr_work *work)
{
    struct rr_plane *plane = c->nic->base.rail->plane;
    if (rr_aborted_by_peer(plane, work->peer, work->owner, work->tag)) return RR_ABORTED;
    /* All of them: one without a key would fail the queue pair, which serves all clients. */
    for (uint32_t piece = 0; piece < (work->source->is_lane ? 1 : work->piece_count); piece++)
        if (!lkey_of(c, work, piece)) return RR_BAD_REGION;
    return resolve(c, work, 0);
}

static struct rr_work *next_work(struct rr_rail *rail, struct rr_connection *c)
{
    struct rr_work *work = rr_path_next(rail, c->paths[1]);
    if (!work && c->in_flight_bytes < IN_FLIGHT_BYTES) work = rr_path_next(rail, c->paths[0]);
    return work;
}

/* Asks for bounce memory. */
static void ask(struct rr_connection *c, const struct rr_work *work)
{
    struct message *message = verbs_next_message(c, MESSAGE_WANT);
    message->one.sequence = work->sequence;
    message->one.owner = work->owner;
    message->one.bytes = work->bytes;
}

/* A slice for private memory asks for it, or waits until it may; 0: nothing can be asked now. */
static int want(struct rr_connection *c, struct rr_work *work)
{
    struct rr_rail *rail = c->nic->base.rail;
    if (!verbs_message_free(c)) {
        rr_path_queue(rail, work, 1);
        return 0;
    }
    if (rr_grants_want(rail, &c->grants, c, work)) ask(c, work);
    return 1;
}

static void give_back(struct rr_connection *c)
{
    while (c->grants.return_count && verbs_message_free(c)) {
        struct message *message = verbs_next_message(c, MESSAGE_RETURN);
        const struct rr_grant *grant = &c->grants.returns[--c->grants.return_count];
        message->grant = grant->grant;
        message->one.owner = grant->owner;
    }
}

/* Takes the next slice, unless one is being posted; 0 if there is none. */
static int begin(struct rr_connection *c)
{
    struct rr_rail *rail = c->nic->base.rail;
    give_back(c);
    if (!c->window.free_count) {
        rr_count(rail, RR_RAIL_WINDOW_FULL, 1);
        return 0;
    }
    struct rr_work *work = rr_grants_next(&c->grants);
    if (!work) {
        struct rr_work *due = verbs_message_free(c) ? rr_grants_due(rail, &c->grants) : NULL;
        if (due) {
            ask(c, due);
            return 1;
        }
        work = next_work(rail, c);
        if (!work) return 0;
        if (work->window_bytes) return want(c, work);
    }
    uint32_t result = check(c, work);
    if (result) {
        rr_count(rail, RR_RAIL_REFUSED_FRAMES, 1);
        if (work->window_bytes) rr_grants_unused(&c->grants, &work->grant);
        rr_work_done(rail, work, result);
        return 1;
    }
    rr_work_posted(rail, work);
    work->connection = c;
    work->sequence = c->next_sequence++;
    c->current = work;
    c->entry = rr_window_take(&c->window, work);
    c->frames[c->entry] = (struct frame){.bytes = work->bytes, .state = FRAME_POSTING};
    c->entry_of[work->sequence % RR_WINDOW] = (uint8_t)c->entry;
    c->in_flight_bytes += work->bytes;
    c->run = c->piece = 0;
    c->run_done = c->piece_done = 0;
    if (work->window_bytes) {
        c->address = work->grant.address;
        c->rkey = work->grant.rkey;
    }
    return 1;
}

static void frame_posted(struct rr_connection *c)
{
    struct rr_rail *rail = c->nic->base.rail;
    struct frame *frame = &c->frames[c->entry];
    frame->state = FRAME_POSTED;
    frame->last = c->posted;
    c->order[(c->order_at + c->order_count++) % RR_WINDOW] = (uint8_t)c->entry;
    rr_count(rail, RR_RAIL_FRAMES_SENT, 1);
    rr_count(rail, RR_RAIL_BYTES_SENT, c->current->bytes);
    c->current = NULL;
}

static void end_frame(struct rr_connection *c, struct ibv_send_wr *wr)
{
    wr->opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
    wr->imm_data = htobe32((uint32_t)(c->current->bytes - 1) << 2 | (uint32_t)(c->current->sequence & IMM_SEQUENCE));
    wr->send_flags = IBV_SEND_SIGNALED;
    c->unsignaled = 0;
    frame_posted(c);
}

/* What is left of the frame is not written: it ends with this, and the receiver counts it like others. */
static void cut_short(struct rr_connection *c, uint32_t result)
{
    struct ibv_send_wr *wr = verbs_next_wr(c);
    if (c->state != OPEN) return;
    c->frames[c->entry].override = result;
    wr->num_sge = 0;
    wr->wr.rdma.remote_addr = 0;
    wr->wr.rdma.rkey = 0;
    end_frame(c, wr);
}

/* The next work request to the current run: `length` bytes at c->address, of which c->run_done are written. */
static void write_more(struct rr_connection *c, struct ibv_send_wr *wr, uint64_t length)
{
    const struct rr_work *work = c->current;
    const uint32_t sges_each = c->sges_each, lane_lkey = work->source->is_lane ? lkey_of(c, work, 0) : 0;
    struct ibv_sge *sges = wr->sg_list;
    uint64_t left = length - c->run_done;
    if (left > WR_BYTES_MAX) left = WR_BYTES_MAX;
    uint64_t bytes = 0;
    uint32_t count = 0;
    while (left && count < sges_each) {
        const struct iovec *piece = &work->pieces[c->piece];
        uint64_t part = piece->iov_len - c->piece_done;
        if (part > left) part = left;
        sges[count].addr = (uint64_t)(uintptr_t)piece->iov_base + c->piece_done;
        sges[count].length = (uint32_t)part;
        sges[count].lkey = lane_lkey ? lane_lkey : lkey_of(c, work, c->piece);
        count++;
        bytes += part;
        left -= part;
        c->piece_done += part;
        if (c->piece_done == piece->iov_len) {
            c->piece++;
            c->piece_done = 0;
        }
    }
    wr->num_sge = (int)count;
    wr->wr.rdma.remote_addr = c->address + c->run_done;
    wr->wr.rdma.rkey = c->rkey;
    c->run_done += bytes;
}

static void more_follow(struct rr_connection *c, struct ibv_send_wr *wr)
{
    wr->opcode = IBV_WR_RDMA_WRITE;
    wr->send_flags = 0;
    if (++c->unsignaled == c->signal_every) {
        wr->send_flags = IBV_SEND_SIGNALED;
        c->unsignaled = 0;
    }
}

/* Work requests of the current slice, while there is room for them. */
static void write_some(struct rr_connection *c)
{
    const struct rr_work *work = c->current;
    uint32_t stopped = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
    if (stopped) {
        cut_short(c, stopped);
        return;
    }
    while (send_room(c)) {
        const struct rr_wire_run *run = &work->runs[c->run];
        if (c->run_done == 0) {
            uint32_t result = resolve(c, work, c->run);
            if (result) {
                cut_short(c, result);
                return;
            }
        }
        struct ibv_send_wr *wr = verbs_next_wr(c);
        if (c->state != OPEN) return;
        write_more(c, wr, run->length);
        if (c->run_done == run->length) {
            c->run++;
            c->run_done = 0;
            if (c->run == work->run_count) {
                end_frame(c, wr);
                return;
            }
        }
        more_follow(c, wr);
    }
}

/* A table of runs that the message has no room for; 0 if it must wait. */
static int write_table(struct rr_connection *c)
{
    const struct rr_work *work = c->current;
    const uint64_t table_bytes = c->nic->base.rail->plane->table_entries * sizeof *work->runs, bytes = work->run_count * sizeof *work->runs;
    if (c->stage_position[c->next_stage] > c->completed || send_room(c) < 2) return 0;
    uint8_t *stage = c->memory + (MESSAGES + RECEIVES) * MESSAGE_BYTES + c->next_stage * table_bytes;
    struct ibv_send_wr *wr = verbs_next_wr(c);
    if (c->state != OPEN) return 0;
    memcpy(stage, work->runs, bytes);
    wr->sg_list[0] = (struct ibv_sge){(uint64_t)(uintptr_t)stage, (uint32_t)bytes, c->mr->lkey};
    wr->num_sge = 1;
    wr->wr.rdma.remote_addr = work->grant.table_address;
    wr->wr.rdma.rkey = c->rkey;
    more_follow(c, wr);
    c->stage_position[c->next_stage] = c->posted;
    c->next_stage = (c->next_stage + 1) % STAGES;
    return 1;
}

/* The current slice, to bounce memory: its bytes, the runs, a message; 0: it must wait. c->run: its bytes are written. */
static int write_bounced(struct rr_connection *c)
{
    struct rr_work *work = c->current;
    struct frame *frame = &c->frames[c->entry];
    if (!frame->override) frame->override = rr_transfer_stopped(work->source->client, work->transfer, work->generation);
    while (!c->run && !frame->override) {
        if (!send_room(c)) return 0;
        struct ibv_send_wr *wr = verbs_next_wr(c);
        if (c->state != OPEN) return 0;
        write_more(c, wr, work->bytes);
        more_follow(c, wr);
        c->run = c->run_done == work->bytes;
    }
    int with_table = work->run_count > RUNS_IN_MESSAGE && !frame->override;
    if (!verbs_message_free(c) || (with_table && !write_table(c)) || c->state != OPEN) return 0;
    struct message *message = verbs_next_message(c, MESSAGE_BOUNCED);
    message->grant = work->grant.grant;
    message->one.sequence = work->sequence;
    message->one.owner = work->owner;
    message->one.bytes = work->bytes;
    message->one.tag = work->tag;
    message->one.run_count = work->run_count;
    message->one.code = frame->override;
    if (work->run_count <= RUNS_IN_MESSAGE) memcpy(message->one.runs, work->runs, work->run_count * sizeof *work->runs);
    if (c->state == OPEN) frame_posted(c);
    return 1;
}

int verbs_push(struct rr_connection *c)
{
    int work_count = 0;
    while (c->state == OPEN && send_room(c)) {
        if (!c->current) {
            if (!begin(c)) break;
            work_count++;
            if (!c->current) continue;
        }
        if (!c->current->window_bytes)
            write_some(c);
        else if (!write_bounced(c))
            break;
    }
    verbs_post_batch(c);
    return work_count;
}

int verbs_post(struct rr_nic *base, struct rr_path *path)
{
    (void)base;
    return path->connection ? verbs_push(path->connection) : 0;
}

/* ---- its end ---- */

/* Placed and answered, and nothing reads its source any more. */
static void frame_done(struct rr_connection *c, uint32_t entry)
{
    const struct frame *frame = &c->frames[entry];
    struct rr_work *work = c->window.works[entry];
    uint32_t code = frame->override ? frame->override : frame->code;
    rr_window_free(&c->window, entry);
    if (work) rr_work_done(c->nic->base.rail, work, code);
}

/* Nothing reads its source any more; a client that leaves does not wait for the answer. */
static void let_go(struct rr_connection *c, uint32_t entry)
{
    struct rr_rail *rail = c->nic->base.rail;
    struct rr_work *work = c->window.works[entry];
    if (!work || !work->source->client->ports[rail->number].detaching) return;
    c->window.works[entry] = NULL;
    rr_work_done(rail, work, RR_CLIENT_GONE);
}

/* Work requests have completed up to c->completed. */
void verbs_on_sent(struct rr_connection *c)
{
    while (c->order_count) {
        uint32_t entry = c->order[c->order_at];
        struct frame *frame = &c->frames[entry];
        if (frame->last > c->completed) break;
        c->order_at = (c->order_at + 1) % RR_WINDOW;
        c->order_count--;
        c->in_flight_bytes -= frame->bytes;
        if (c->state == OPEN) {
            c->ended = c->window.sequences[entry];
            c->nic->base.rail->frames_ended = 1;
        }
        if (frame->state == FRAME_ANSWERED) {
            frame_done(c, entry);
        } else if (c->state == OPEN) {
            frame->state = FRAME_READ;
            if (c->nic->base.rail->leaving_count) let_go(c, entry);
        }
    }
}

static int entry_of(const struct rr_connection *c, uint64_t sequence)
{
    uint32_t entry = c->entry_of[sequence % RR_WINDOW];
    if (!sequence) return -1;
    if (c->window.sequences[entry] == sequence) return (int)entry;
    for (entry = 0; entry < RR_WINDOW; entry++)
        if (c->window.sequences[entry] == sequence) return (int)entry;
    return -1;
}

/* 0, or -1 for an answer to nothing. */
int verbs_on_answer(struct rr_connection *c, const struct message *message)
{
    if (message->type == MESSAGE_GRANT) {
        struct rr_grant grant = {message->grant, message->one.address, message->one.table_address, message->one.rkey, message->one.owner};
        return rr_grants_answer(c->nic->base.rail, &c->grants, message->one.sequence, message->one.code, &grant);
    }
    if (message->type != MESSAGE_DONE || message->count > PAIRS_MAX) return -1;
    for (uint32_t i = 0; i < message->count; i++) {
        int entry = entry_of(c, message->pairs[i].sequence);
        if (entry < 0) return -1;
        struct frame *frame = &c->frames[entry];
        if (!frame->override && !rr_is_answer(message->pairs[i].code)) return -1;
        frame->code = (uint32_t)message->pairs[i].code;
        if (frame->state == FRAME_READ)
            frame_done(c, (uint32_t)entry);
        else if (frame->state == FRAME_POSTED)
            frame->state = FRAME_ANSWERED;
        else
            return -1;
    }
    return 0;
}

/* ---- a connection that ends ---- */

static void apply(struct rr_connection *c, const struct settlement *settlement)
{
    struct rr_rail *rail = c->nic->base.rail;
    for (uint32_t i = 0; i < RR_CLASSES && !c->resting; i++) c->paths[i]->broken = 0;
    c->resting = 1;
    rail->frames_ended = 1;
    uint32_t left = rr_window_settle(rail, &c->window, settlement->placed, settlement->acks, settlement->ack_count, settlement->otherwise);
    rr_grants_settle(rail, &c->grants, settlement->otherwise);
    if (left) {
        c->nic->some_lost = 1;
        free(c->settlement);
        c->settlement = NULL;
        return;
    }
    verbs_unlink(c);
    verbs_destroy(c);
}

/* Nothing is read any more. */
void verbs_sender_drained(struct rr_connection *c)
{
    struct rr_rail *rail = c->nic->base.rail;
    if (c->settlement) {
        apply(c, c->settlement);
        return;
    }
    c->nic->some_lost = 1;
    rr_event_push(rail->plane, RR_EVENT_SENDER_LOST, rail->number, (int64_t)c->id, c->error, c->paths[0]->peer, c->paths[0]->remote_rail,
                  rr_window_count(&c->window));
}

void verbs_settle(struct rr_nic *base, struct rr_connection *c, uint64_t placed, const struct rr_ack *acks, uint32_t ack_count,
                  uint32_t otherwise)
{
    (void)base;
    if (c->role != SENDER || c->settlement) return;
    struct settlement *settlement = calloc(1, sizeof *settlement);
    if (!settlement) abort();
    settlement->placed = placed;
    settlement->ack_count = ack_count < RR_WINDOW ? ack_count : RR_WINDOW;
    settlement->otherwise = otherwise;
    if (ack_count) memcpy(settlement->acks, acks, settlement->ack_count * sizeof *acks);
    c->settlement = settlement;
    if (c->state == OPEN) {
        for (uint32_t i = 0; i < RR_CLASSES; i++) c->paths[i]->connection = NULL;
        verbs_begin_drain(c);
    } else if (c->state == DRAINED) {
        apply(c, settlement);
    }
}

void verbs_close_senders(struct rr_nic *base, uint32_t peer, uint32_t result)
{
    for (struct rr_connection *c = verbs(base)->connections, *next; c; c = next) {
        next = c->next;
        if (c->role == SENDER && c->paths[0]->peer == peer) verbs_settle(base, c, 0, NULL, 0, result);
    }
}

void verbs_owe_lost(struct verbs_nic *nic)
{
    nic->some_lost = 0;
    for (struct rr_connection *c = nic->connections; c; c = c->next) {
        if (c->role != SENDER || c->state != DRAINED) continue;
        rr_grants_end_stopped(nic->base.rail, &c->grants);
        rr_window_owe_stopped(nic->base.rail, &c->window);
    }
}

void verbs_purge(struct rr_nic *base)
{
    for (struct rr_connection *c = verbs(base)->connections; c; c = c->next) {
        if (c->role != SENDER || c->state != OPEN) continue;
        rr_grants_purge(base->rail, &c->grants);
        if (c->grants.return_count || rr_grants_waiting(&c->grants)) verbs_touch(c);
    }
    verbs_owe_lost(verbs(base));
}

void verbs_abandon(struct rr_nic *base, struct rr_client *client)
{
    for (struct rr_connection *c = verbs(base)->connections; c; c = c->next) {
        if (c->role == SENDER && c->resting) rr_window_let_go(base->rail, &c->window, client);
        if (c->role != SENDER || c->state != OPEN) continue;
        for (uint32_t i = 0; i < RR_WINDOW; i++)
            if (c->window.works[i] && c->window.works[i]->source->client == client && c->frames[i].state == FRAME_READ) let_go(c, i);
    }
    verbs_purge(base);
}

void verbs_each_posted(struct rr_nic *base, void (*visit)(void *, struct rr_connection *, struct rr_work *), void *context)
{
    for (struct rr_connection *c = verbs(base)->connections; c; c = c->next) {
        if (c->role != SENDER || c->resting) continue;
        for (uint32_t i = 0; i < RR_WINDOW; i++)
            if (c->window.works[i] && (!c->window.works[i]->window_bytes || c->frames[i].state != FRAME_READ))
                visit(context, c, c->window.works[i]);
    }
}

static int names(const struct rr_work *work, uint32_t handle)
{
    for (uint32_t run = 0; run < work->run_count; run++)
        if (work->runs[run].handle == handle) return 1;
    return 0;
}

/* Of what was written the peer's NIC has all; what is owed is not known any more. */
static uint64_t latest_naming(const struct rr_connection *c, uint32_t handle)
{
    uint64_t latest = 0;
    for (uint32_t i = 0; i < RR_WINDOW; i++) {
        const struct rr_work *work = c->window.works[i];
        int named = c->window.owed[i].source != NULL || (work && c->frames[i].state != FRAME_READ && names(work, handle));
        if (named && c->window.sequences[i] > latest) latest = c->window.sequences[i];
    }
    return latest;
}

uint32_t verbs_naming(struct rr_nic *base, uint32_t peer, uint32_t handle, struct rr_mark *marks)
{
    uint32_t count = 0;
    for (struct rr_connection *c = verbs(base)->connections; c; c = c->next) {
        if (c->role != SENDER || c->resting || c->paths[0]->peer != peer) continue;
        uint64_t latest = latest_naming(c, handle);
        if (!latest) continue;
        if (marks) marks[count] = (struct rr_mark){c->id, latest};
        count++;
    }
    return count;
}

/* A connection that is lost is known to write nothing more once it is settled. */
int verbs_ended(struct rr_nic *base, const struct rr_mark *mark)
{
    const struct rr_connection *c = verbs(base)->connections;
    while (c && (c->role != SENDER || c->id != mark->connection)) c = c->next;
    return !c || c->resting || c->ended >= mark->sequence;
}
#endif
