/* The verbs NIC: what the plane knows of devices, and memory that is registered on them. Main thread and its workers. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* NULL: no such rail, or another NIC. */
struct verbs_nic *verbs_nic_of(struct rr_plane *plane, uint32_t rail)
{
    if (!plane->verbs || rail >= plane->rail_count) return NULL;
    struct rr_nic *nic = plane->rails[rail].nic;
    return nic && nic->ops == &rr_verbs_nic ? verbs(nic) : NULL;
}

static void leave_device(struct verbs_device *device)
{
    if (--device->refs == 0) verbs_close_device(device);
}

void verbs_leave_device(struct rr_plane *plane, struct verbs_device *device)
{
    pthread_mutex_lock(&plane->verbs->lock);
    leave_device(device);
    pthread_mutex_unlock(&plane->verbs->lock);
}

int rr_verbs_facts(struct rr_plane *plane, uint32_t rail, struct rr_verbs_facts *out)
{
    struct verbs_nic *nic = verbs_nic_of(plane, rail);
    if (!nic) return -ENOENT;
    struct verbs_device *device = nic->device;
    struct ibv_port_attr port;
    union ibv_gid gid;
    memset(&port, 0, sizeof port);
    memset(&gid, 0, sizeof gid);
    memset(out, 0, sizeof *out);
    int status = rr_ibv.query_port(device->context, (uint8_t)device->port, &port);
    if (status) return -status;
    if (device->gid_index >= 0 && rr_ibv.query_gid(device->context, (uint8_t)device->port, device->gid_index, &gid)) return -EIO;
    memcpy(out->gid, gid.raw, sizeof out->gid);
    out->lid = port.lid;
    out->mtu_bytes = verbs_mtu_bytes(port.active_mtu);
    out->port_up = port.state == IBV_PORT_ACTIVE;
    out->ethernet = (uint32_t)device->ethernet;
    out->max_sge = (uint32_t)device->limits.max_sge;
    out->max_qp_wr = (uint32_t)device->limits.max_qp_wr;
    out->max_cqe = (uint32_t)device->limits.max_cqe;
    out->max_mr_bytes = device->limits.max_mr_size;
    return 0;
}

int rr_verbs_queue_pairs(struct rr_plane *plane, uint32_t rail)
{
    struct verbs_nic *nic = verbs_nic_of(plane, rail);
    if (!nic) return -ENOENT;
    struct rr_verbs *state = plane->verbs;
    int count = 0;
    pthread_mutex_lock(&state->lock);
    for (uint32_t i = 0; i < ENDPOINTS_MAX; i++) count += state->endpoints[i] && state->endpoints[i]->port->device == nic->device;
    pthread_mutex_unlock(&state->lock);
    return count;
}

/* ---- registrations ---- */

int rr_verbs_register(struct rr_plane *plane, uint32_t through, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                      enum rr_verbs_use use, struct rr_verbs_key *out)
{
    int access = IBV_ACCESS_LOCAL_WRITE | (use == RR_VERBS_FLUSH ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
    struct verbs_nic *nic = verbs_nic_of(plane, through);
    if (!nic) return -ENOENT;
    struct verbs_key *key = calloc(1, sizeof *key);
    if (!key) return -ENOMEM;
    key->device = nic->device;
    key->mr = verbs_register(key->device, address, bytes, dmabuf_fd, dmabuf_offset, access);
    if (!key->mr) {
        int status = errno;
        free(key);
        return -status;
    }
    struct rr_verbs *state = plane->verbs;
    pthread_mutex_lock(&state->lock);
    key->id = state->next_key++;
    key->device->refs++;
    key->next = state->keys;
    state->keys = key;
    *out = (struct rr_verbs_key){key->id, key->mr->lkey, key->mr->rkey};
    pthread_mutex_unlock(&state->lock);
    return 0;
}

int rr_verbs_deregister(struct rr_plane *plane, uint64_t id)
{
    struct rr_verbs *state = plane->verbs;
    if (!state) return -ENOENT;
    pthread_mutex_lock(&state->lock);
    struct verbs_key **link = &state->keys, *key;
    while ((key = *link) && key->id != id) link = &key->next;
    if (key) *link = key->next;
    pthread_mutex_unlock(&state->lock);
    if (!key) return -ENOENT;
    int status = rr_ibv.dereg_mr(key->mr);
    verbs_leave_device(plane, key->device);
    free(key);
    return -status;
}

void rr_verbs_free(struct rr_plane *plane)
{
    struct rr_verbs *state = plane->verbs;
    if (!state) return;
    pthread_mutex_lock(&state->lock);
    state->reaper_stop = 1;
    pthread_cond_signal(&state->reaper_wake);
    pthread_mutex_unlock(&state->lock);
    pthread_join(state->reaper, NULL);
    for (struct verbs_key *key = state->keys, *next; key; key = next) {
        next = key->next;
        rr_ibv.dereg_mr(key->mr);
        leave_device(key->device);
        free(key);
    }
    verbs_free_state(state);
    plane->verbs = NULL;
}
#endif
