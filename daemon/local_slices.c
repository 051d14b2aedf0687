/* Slices of the local route: the client copies to another client of this daemon by itself, and tells of it in void
 * slices, so that abort, cancel, time-out, notes and the count of slices treat it as they treat any other. Runs on the
 * rail's thread, where tombstones, exports and remotes may be looked at.
 *
 * No byte is copied before the first slice has been taken. An abort that comes later finds the transfer; of one that
 * came before, the tombstone is seen here. */
#include "plane.h"

/* The client that owns the destination, or NULL if it is gone. */
static const struct rr_client *owner_of(struct rr_rail *rail, const struct rr_remote *remote)
{
    const struct rr_export *export = &rail->plane->exports[remote->handle % rail->plane->max_exports];
    if (!rr_load_acquire_u32(&export->valid) || export->handle != remote->handle) return NULL;
    return rail->by_number[export->client];
}

int rr_local_take(struct rr_rail *rail, struct rr_work *work, const struct rr_slice *slice, uint32_t *result)
{
    struct rr_client *client = work->source->client;
    if (!(slice->flags & RR_SLICE_VOID) || slice->flags & RR_SLICE_INLINE) return -1;
    if (slice->inline_remote_region == RR_NONE) {
        if (slice->inline_length != RR_OK && slice->inline_length != RR_REGION_GONE) return -1;
        if (rr_transfer_open(client, slice, RR_NONE, RR_NONE)) return -1;
        *result = slice->inline_length;
        work->bytes = slice->inline_source;
        return 0;
    }
    if (slice->inline_remote_region >= rail->plane->remotes_per_client) return -1;
    const struct rr_remote *remote = &client->remotes[slice->inline_remote_region];
    int valid = rr_load_acquire_u32(&remote->valid) && remote->peer == slice->peer;
    const struct rr_client *owner = valid ? owner_of(rail, remote) : NULL;
    if (rr_transfer_open(client, slice, owner ? remote->handle : RR_NONE, owner ? remote->owner : RR_NONE)) return -1;
    if (!owner)
        *result = RR_REGION_GONE;
    else if (rr_has_tombstone(owner, rr_load_relaxed_u64(&client->contexts[slice->transfer].tag)))
        *result = RR_ABORTED;
    return 0;
}
