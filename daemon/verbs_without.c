/* In place of the verbs NIC where the headers of rdma-core were missing: a rail that asks for it says so. */
#include <errno.h>
#include <stdio.h>

#include "verbs_api.h"
#include "verbs_nic.h"

#ifndef RR_HAVE_VERBS
static struct rr_nic *verbs_open(struct rr_rail *rail)
{
    snprintf(rail->plane->error, sizeof rail->plane->error, "built without rdma-core headers (install libibverbs-dev and reinstall)");
    errno = ENOTSUP;
    return NULL;
}

const struct rr_nic_ops rr_verbs_nic = {.name = "verbs", .takes_made_up = 1, .one_sided = 1, .open = verbs_open};

int rr_verbs_facts(struct rr_plane *plane, uint32_t rail, struct rr_verbs_facts *out)
{
    (void)plane, (void)rail, (void)out;
    return -ENOTSUP;
}

int rr_verbs_queue_pairs(struct rr_plane *plane, uint32_t rail)
{
    (void)plane, (void)rail;
    return -ENOTSUP;
}

int rr_verbs_register(struct rr_plane *plane, uint32_t through, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                      enum rr_verbs_use use, struct rr_verbs_key *out)
{
    (void)use, (void)plane, (void)through, (void)address, (void)bytes, (void)dmabuf_fd, (void)dmabuf_offset, (void)out;
    return -ENOTSUP;
}

int rr_verbs_deregister(struct rr_plane *plane, uint64_t id)
{
    (void)plane, (void)id;
    return -ENOTSUP;
}

int rr_verbs_new_endpoint(struct rr_plane *plane, uint32_t rail, uint32_t through, int sending, struct rr_verbs_endpoint *out, char *error)
{
    (void)plane, (void)rail, (void)through, (void)sending, (void)out, (void)error;
    return -ENOTSUP;
}

int rr_verbs_connect(struct rr_plane *plane, uint64_t endpoint, const struct rr_verbs_route *route, char *error)
{
    (void)plane, (void)endpoint, (void)route, (void)error;
    return -ENOTSUP;
}

int rr_verbs_drop_endpoint(struct rr_plane *plane, uint64_t endpoint)
{
    (void)plane, (void)endpoint;
    return -ENOTSUP;
}

int rr_verbs_probe(struct rr_plane *plane, uint64_t endpoint, uint64_t cookie)
{
    (void)plane, (void)endpoint, (void)cookie;
    return -ENOTSUP;
}

int rr_verbs_open_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, char *error)
{
    (void)plane, (void)rail, (void)through, (void)error;
    return -ENOTSUP;
}

int rr_verbs_set_flush(struct rr_plane *plane, uint32_t rail, uint32_t through, const struct rr_verbs_target *targets, uint32_t count,
                       uint64_t cookie)
{
    (void)plane, (void)rail, (void)through, (void)targets, (void)count, (void)cookie;
    return -ENOTSUP;
}

void rr_verbs_free(struct rr_plane *plane) { (void)plane; }
#endif
