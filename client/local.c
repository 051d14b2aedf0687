/* The local route: destinations that belong to another client of the same daemon are mapped here, and the feeder copies
 * straight into them. Feeder's thread, except the mappings: they are made and taken away by others.
 *
 * The daemon hears of a part by void slices on the own rail's ring: one asks for admission before the first byte, one
 * tells of the end. In between the transfer is live like any other, and its `stop` word ends it between two chunks. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "client_core.h"
#include "pieces.h"
#include "populate.h"

#define CHUNK_BYTES (1ull << 20) /* a visit, so that other parts go on */
#define CHUNK_PIECES 4096u
#define POPULATE_BYTES (16ull << 20)

int rc_mappings_init(struct rc_core *core)
{
    pthread_rwlockattr_t attributes;
    pthread_rwlockattr_init(&attributes);
    /* A feeder that copies all the time must not keep the one out who takes a mapping away. */
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&core->mappings_lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    core->mappings = calloc(RC_REGIONS_MAX, sizeof *core->mappings);
    return core->mappings ? 0 : -ENOMEM;
}

void rc_mappings_free(struct rc_core *core)
{
    for (uint32_t i = 0; core->mappings && i < RC_REGIONS_MAX; i++) {
        if (core->mappings[i].base && !core->mappings[i].on_gpu) munmap(core->mappings[i].base, core->mappings[i].bytes);
        core->mappings[i].base = NULL;
    }
}

int rc_map_remote(struct rc_core *core, uint32_t remote, int fd, uint64_t offset, uint64_t bytes)
{
    if (remote >= RC_REGIONS_MAX || !bytes || offset % (uint64_t)sysconf(_SC_PAGESIZE)) return -EINVAL;
    uint8_t *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (base == MAP_FAILED) return -errno;
    madvise(base, bytes, MADV_DONTFORK);
    pthread_rwlock_wrlock(&core->mappings_lock);
    int taken = core->mappings[remote].base != NULL;
    if (!taken) core->mappings[remote] = (struct rc_mapping){base, bytes, 0};
    pthread_rwlock_unlock(&core->mappings_lock);
    if (taken) munmap(base, bytes);
    return taken ? -EEXIST : 0;
}

int rc_map_gpu_remote(struct rc_core *core, uint32_t remote, uint64_t address, uint64_t bytes)
{
    if (remote >= RC_REGIONS_MAX || !bytes) return -EINVAL;
    pthread_rwlock_wrlock(&core->mappings_lock);
    int taken = core->mappings[remote].base != NULL;
    if (!taken) core->mappings[remote] = (struct rc_mapping){(uint8_t *)(uintptr_t)address, bytes, 1};
    pthread_rwlock_unlock(&core->mappings_lock);
    return taken ? -EEXIST : 0;
}

void rc_populate_remote(struct rc_core *core, uint32_t remote)
{
    for (uint64_t at = 0, more = 1; more && remote < RC_REGIONS_MAX; at += POPULATE_BYTES) {
        pthread_rwlock_rdlock(&core->mappings_lock);
        const struct rc_mapping *mapping = &core->mappings[remote];
        more = mapping->base && !mapping->on_gpu && at < mapping->bytes;
        if (more) {
            uint64_t left = mapping->bytes - at;
            more = !rr_populate_resident(mapping->base + at, left < POPULATE_BYTES ? left : POPULATE_BYTES);
        }
        pthread_rwlock_unlock(&core->mappings_lock);
    }
}

int rc_unmap_remote(struct rc_core *core, uint32_t remote)
{
    if (remote >= RC_REGIONS_MAX) return 0;
    pthread_rwlock_wrlock(&core->mappings_lock);
    struct rc_mapping mapping = core->mappings[remote];
    core->mappings[remote].base = NULL;
    if (mapping.base && !mapping.on_gpu) munmap(mapping.base, mapping.bytes);
    uint64_t enqueued = rr_load_acquire_u64(&core->local_enqueued);
    pthread_rwlock_unlock(&core->mappings_lock);
    struct timespec nap = {0, 50000};
    while (mapping.base && mapping.on_gpu && !rc_local_gpu_has_reached(core, enqueued)) nanosleep(&nap, NULL);
    return mapping.base != NULL;
}

/* One chunk. 0, or -1 if a destination is not mapped any more. */
static int copy_chunk(struct rc_core *core, struct rc_part *part)
{
    uint64_t left = CHUNK_BYTES, copied = 0;
    uint32_t pieces = 0, region = RR_NONE;
    uint8_t *base = NULL;
    struct rc_piece piece;
    pthread_rwlock_rdlock(&core->mappings_lock);
    while (left && pieces++ < CHUNK_PIECES && rc_peek_piece(part, &piece)) {
        if (piece.remote != region) {
            region = piece.remote;
            base = core->mappings[region].base;
            if (!base) break;
        }
        uint64_t take = piece.length < left ? piece.length : left;
        memcpy(base + piece.destination, (const void *)(uintptr_t)piece.source, take);
        rr_fault_point(RR_FAULT_CLIENT_LOCAL_COPYING);
        left -= take;
        copied += take;
        rc_take_piece(part, take, piece.length);
    }
    pthread_rwlock_unlock(&core->mappings_lock);
    part->local_bytes += copied;
    rr_fetch_add_u64(&core->counters.bytes_local, copied);
    return region == RR_NONE || base ? 0 : -1;
}

static int copy_some(struct rc_core *core, struct rc_part *part)
{
    return part->on_gpu || part->to_gpu ? rc_copy_chunk_by_gpu(core, part) : copy_chunk(core, part);
}

static struct rr_slice slice_of(const struct rc_submission *s)
{
    return (struct rr_slice){.transfer = s->index, .generation = s->generation, .peer = s->peer, .flags = RR_SLICE_VOID | RR_SLICE_LOCAL};
}

static int ask(struct rc_core *core, struct rc_part *part)
{
    struct rc_piece first = {0};
    struct rr_slice slice = slice_of(part->submission);
    rc_peek_piece(part, &first);
    slice.inline_remote_region = first.remote;
    part->asked_position = rc_push_void(core, slice);
    if (!part->asked_position) return 0;
    part->submission->slices++;
    part->local_stage = RC_LOCAL_ASKED;
    rr_fault_point(RR_FAULT_CLIENT_LOCAL_ASKED);
    return 1;
}

/* The last slice of the part; with the last part's the transfer's total. */
static int tell_end(struct rc_core *core, struct rc_part *part, uint32_t result)
{
    struct rc_submission *s = part->submission;
    struct rr_slice slice = slice_of(s);
    slice.inline_remote_region = RR_NONE;
    slice.inline_length = result;
    slice.inline_source = part->local_bytes;
    if (result == RR_OK && s->parts_left == 1) {
        slice.flags |= RR_SLICE_FINAL;
        slice.total_slices = s->slices + 1 + s->note;
    }
    rr_fault_point(RR_FAULT_CLIENT_LOCAL_COPIED);
    if (!rc_push_void(core, slice)) return 0;
    s->slices++;
    part->local_stage = RC_LOCAL_TOLD;
    rr_fault_point(RR_FAULT_CLIENT_LOCAL_TOLD);
    if (result == RR_OK) {
        s->parts_left--;
        part->exhausted = 1;
    }
    return 1;
}

int rc_feed_local(struct rc_core *core, struct rc_part *part)
{
    const struct rc_submission *s = part->submission;
    switch (part->local_stage) {
    case RC_LOCAL_NEW: return ask(core, part);
    case RC_LOCAL_ASKED:
        if (rr_load_acquire_u64(&core->rings[core->own_rail].producer.ring->consumed) < part->asked_position) return 0; /* SYNC consumed */
        part->local_stage = RC_LOCAL_COPYING;
        if (rr_load_acquire_u32(&core->transfers[s->index].stop) == s->generation) return 1; /* refused: the round ends it */
        /* fall through */
    case RC_LOCAL_COPYING:
        switch (part->bytes_left ? copy_some(core, part) : 0) {
        case 0:
            if (part->bytes_left) return 1;
            if (rc_part_is_copied(part)) return tell_end(core, part, RR_OK);
            /* fall through */
        case RC_LOCAL_WAITS: core->gpu_is_awaited = 1; return 0;
        default: part->local_stage = RC_LOCAL_LOST;
        }
        /* fall through */
    case RC_LOCAL_LOST: return tell_end(core, part, RR_REGION_GONE);
    case RC_LOCAL_TOLD: break; /* lost: the daemon's stop ends the transfer */
    }
    return 0;
}
