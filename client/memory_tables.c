/* Regions of this client and of its peers, sorted by address, and who uses them. Any caller's thread. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client_core.h"

static int grow(void **array, uint32_t count, uint32_t *capacity, size_t bytes)
{
    if (count < *capacity) return 0;
    uint32_t more = *capacity ? 2 * *capacity : 64;
    void *moved = realloc(*array, more * bytes);
    if (!moved) return -ENOMEM;
    *array = moved;
    *capacity = more;
    return 0;
}

int rc_add_region(struct rc_core *core, uint32_t index, uint64_t address, uint64_t bytes, int shared, int on_gpu, uint32_t rail)
{
    if (index >= RC_REGIONS_MAX) return -EINVAL;
    pthread_rwlock_wrlock(&core->tables);
    int status = grow((void **)&core->regions, core->region_count, &core->region_capacity, sizeof *core->regions);
    uint32_t at = core->region_count;
    while (!status && at && core->regions[at - 1].address > address) at--;
    if (!status && ((at && core->regions[at - 1].address + core->regions[at - 1].bytes > address) ||
                    (at < core->region_count && address + bytes > core->regions[at].address)))
        status = -EEXIST;
    if (!status) {
        memmove(core->regions + at + 1, core->regions + at, (core->region_count - at) * sizeof *core->regions);
        core->regions[at] = (struct rc_region){address, bytes, index, rail, shared, on_gpu, 0};
        core->region_count++;
        core->region_bases[index] = address;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

static void reap(struct rc_core *core)
{
    pthread_mutex_lock(&core->queue);
    rc_reap(core);
    pthread_mutex_unlock(&core->queue);
}

int rc_remove_region(struct rc_core *core, uint32_t index)
{
    int status = -ENOENT;
    reap(core);
    pthread_rwlock_wrlock(&core->tables);
    for (uint32_t i = 0; i < core->region_count; i++) {
        struct rc_region *region = &core->regions[i];
        if (region->index != index) continue;
        status = rr_load_acquire_u32(&region->users) ? -EBUSY : 0;
        if (status) break;
        memmove(region, region + 1, (core->region_count - i - 1) * sizeof *region);
        core->region_count--;
        break;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

int rc_add_peer(struct rc_core *core, uint32_t peer, const uint8_t *local_rails, uint32_t count)
{
    if (peer >= RC_PEERS_MAX || count == 0 || count > RR_MAX_RAILS) return -EINVAL;
    uint8_t *copy = malloc(RR_MAX_RAILS);
    if (!copy) return -ENOMEM;
    memset(copy, 0, RR_MAX_RAILS);
    for (uint32_t i = 0; i < count; i++) copy[i] = local_rails[i] < core->rail_count ? local_rails[i] : 0;
    pthread_rwlock_wrlock(&core->tables);
    free(core->local_rails[peer]);
    core->local_rails[peer] = copy;
    core->remote_rails[peer] = count;
    pthread_rwlock_unlock(&core->tables);
    return 0;
}

int rc_add_remote(struct rc_core *core, struct rc_remote remote)
{
    if (remote.peer >= RC_PEERS_MAX || !core->local_rails[remote.peer] || remote.rail >= core->remote_rails[remote.peer]) return -EINVAL;
    pthread_rwlock_wrlock(&core->tables);
    int status = grow((void **)&core->remotes, core->remote_count, &core->remote_capacity, sizeof *core->remotes);
    uint32_t at = core->remote_count;
    while (!status && at && (core->remotes[at - 1].peer > remote.peer ||
                             (core->remotes[at - 1].peer == remote.peer && core->remotes[at - 1].address > remote.address)))
        at--;
    if (!status) {
        memmove(core->remotes + at + 1, core->remotes + at, (core->remote_count - at) * sizeof *core->remotes);
        core->remotes[at] = remote;
        core->remote_count++;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

int rc_remove_remote(struct rc_core *core, uint32_t index)
{
    int status = -ENOENT;
    reap(core);
    pthread_rwlock_wrlock(&core->tables);
    for (uint32_t i = 0; i < core->remote_count; i++) {
        if (core->remotes[i].index != index) continue;
        status = rr_load_acquire_u32(&core->remotes[i].users) ? -EBUSY : 0;
        if (status) break;
        memmove(core->remotes + i, core->remotes + i + 1, (core->remote_count - i - 1) * sizeof *core->remotes);
        core->remote_count--;
        break;
    }
    pthread_rwlock_unlock(&core->tables);
    return status;
}

const struct rc_region *rc_find_region(const struct rc_core *core, uint64_t address, const struct rc_region *hint)
{
    if (hint && address >= hint->address && address - hint->address < hint->bytes) return hint;
    uint32_t low = 0, high = core->region_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (core->regions[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low || address - core->regions[low - 1].address >= core->regions[low - 1].bytes) return NULL;
    return &core->regions[low - 1];
}

const struct rc_remote *rc_find_remote(const struct rc_core *core, uint32_t peer, uint64_t address, const struct rc_remote *hint)
{
    if (hint && address >= hint->address && address - hint->address < hint->bytes) return hint;
    uint32_t low = 0, high = core->remote_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        const struct rc_remote *at = &core->remotes[middle];
        if (at->peer < peer || (at->peer == peer && at->address <= address))
            low = middle + 1;
        else
            high = middle;
    }
    if (!low) return NULL;
    const struct rc_remote *at = &core->remotes[low - 1];
    return at->peer == peer && address - at->address < at->bytes ? at : NULL;
}

static int in_list(const uint32_t *list, uint32_t count, uint32_t index)
{
    for (uint32_t i = 0; i < count; i++)
        if (list[i] == index) return 1;
    return 0;
}

/* Counts the submission as a user of both, once each. Holding tables (shared: users is atomic). */
int rc_use_memory(struct rc_submission *s, const struct rc_region *region, const struct rc_remote *remote)
{
    uint32_t total = s->used_regions + s->used_remotes;
    int new_region = !in_list(s->used, s->used_regions, region->index);
    int new_remote = !in_list(s->used + s->used_regions, s->used_remotes, remote->index);
    if (!new_region && !new_remote) return 0;
    uint32_t *more = realloc(s->used, (total + 2) * sizeof *more);
    if (!more) return -1;
    s->used = more;
    if (new_remote) {
        s->used[total++] = remote->index;
        s->used_remotes++;
        rr_fetch_add_u32((uint32_t *)&remote->users, 1);
    }
    if (new_region) {
        memmove(s->used + s->used_regions + 1, s->used + s->used_regions, s->used_remotes * sizeof *s->used);
        s->used[s->used_regions++] = region->index;
        rr_fetch_add_u32((uint32_t *)&region->users, 1);
    }
    return 0;
}

void rc_leave_memory(struct rc_submission *s)
{
    struct rc_core *core = s->core;
    pthread_rwlock_rdlock(&core->tables);
    for (uint32_t r = 0; r < core->region_count; r++)
        if (in_list(s->used, s->used_regions, core->regions[r].index)) rr_fetch_add_u32(&core->regions[r].users, (uint32_t)-1);
    for (uint32_t r = 0; r < core->remote_count; r++)
        if (in_list(s->used + s->used_regions, s->used_remotes, core->remotes[r].index))
            rr_fetch_add_u32(&core->remotes[r].users, (uint32_t)-1);
    s->used_regions = s->used_remotes = 0;
    pthread_rwlock_unlock(&core->tables);
}
