/* The verbs NIC: an endpoint becomes one end of a reliable connection. On a worker of the main thread, which has the
 * endpoint for itself meanwhile. */
#define _GNU_SOURCE
#include "verbs_inside.h"

#ifdef RR_HAVE_VERBS
#include <errno.h>
#include <stdio.h>
#include <string.h>

static int initialise(struct rr_connection *c)
{
    struct ibv_qp_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = (uint8_t)c->port->device->port;
    attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | (c->role == FLUSH ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
    return rr_ibv.modify_qp(c->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
}

static int ready_to_receive(struct rr_connection *c, const struct rr_verbs_route *route)
{
    const struct verbs_device *device = c->port->device;
    struct ibv_qp_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = verbs_mtu(route->mtu_bytes);
    attr.dest_qp_num = route->qpn;
    attr.rq_psn = route->psn;
    attr.max_dest_rd_atomic = 1;
    attr.min_rnr_timer = (uint8_t)route->min_rnr_timer;
    attr.ah_attr.port_num = (uint8_t)device->port;
    attr.ah_attr.sl = (uint8_t)route->service_level;
    attr.ah_attr.dlid = (uint16_t)route->lid;
    if (device->ethernet) {
        attr.ah_attr.is_global = 1;
        memcpy(attr.ah_attr.grh.dgid.raw, route->gid, sizeof route->gid);
        attr.ah_attr.grh.sgid_index = (uint8_t)device->gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.traffic_class = (uint8_t)route->traffic_class;
    }
    return rr_ibv.modify_qp(c->qp, &attr,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
                                IBV_QP_MIN_RNR_TIMER);
}

static int ready_to_send(struct rr_connection *c, const struct rr_verbs_route *route)
{
    struct ibv_qp_attr attr;
    memset(&attr, 0, sizeof attr);
    attr.qp_state = IBV_QPS_RTS;
    attr.sq_psn = c->psn;
    attr.timeout = (uint8_t)route->timeout;
    attr.retry_cnt = (uint8_t)route->retry_count;
    attr.rnr_retry = (uint8_t)route->rnr_retry;
    attr.max_rd_atomic = 1;
    return rr_ibv.modify_qp(c->qp, &attr,
                            IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
}

int rr_verbs_connect(struct rr_plane *plane, uint64_t endpoint, const struct rr_verbs_route *route, char *error)
{
    if (!plane->verbs) return -ENOENT;
    pthread_mutex_lock(&plane->verbs->lock);
    struct rr_connection *c = verbs_by_id(plane, endpoint);
    int usable = c && c->state == MADE && !c->busy && !c->doomed;
    if (usable) c->busy = 1;
    pthread_mutex_unlock(&plane->verbs->lock);
    if (!usable) return c ? -EBUSY : -ENOENT;
    c->remote_through = route->remote_through;
    const char *step = "INIT";
    int status = initialise(c);
    if (!status) {
        step = "receives";
        status = verbs_post_receives(c, c->receives);
    }
    if (!status) {
        step = "RTR";
        status = ready_to_receive(c, route);
    }
    if (!status) {
        step = "RTS";
        status = ready_to_send(c, route);
    }
    if (status)
        snprintf(error, RR_VERBS_ERROR_BYTES, "device %s: queue pair to %u of lid %u: %s: %s", c->port->device->name, route->qpn, route->lid, step,
                 strerror(status));
    pthread_mutex_lock(&plane->verbs->lock);
    c->busy = 0;
    if (!status) c->state = OPEN;
    int doomed = c->doomed, receiving = !c->sending && c->role == NEW;
    uint32_t through = c->port->through;
    struct rr_rail *rail = c->nic->base.rail;
    pthread_mutex_unlock(&plane->verbs->lock);
    if (doomed) rr_rail_command(rail, (struct rr_command){.run = verbs_run_drop, .a = endpoint});
    /* Its rail hears of the flush before it hears of the receiver. */
    if (!status && receiving && rail->verbs.flush == RR_FLUSH_ALWAYS) return rr_verbs_open_flush(plane, (uint32_t)rail->number, through, error);
    return -status;
}
#endif
