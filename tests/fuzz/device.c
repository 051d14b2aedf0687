#define _GNU_SOURCE
#include "device.h"

#include "world.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

static void *device_symbol(const char *name);

/* The library that it opens is this one. */
#define dlopen(name, flags) ((void)(name), (void *)&rr_ibv)
#define dlsym(library, name) ((void)(library), device_symbol(name))
#include "../../daemon/verbs_api.c"

#ifdef RR_HAVE_VERBS
enum { DEVICES = 2, HEARD = 32, MOST_SGES = 4, MOST_WORK = 2048, MOST_COMPLETIONS = 65536 };

struct receive {
    uint64_t wr_id;
    struct ibv_sge sge;
};

struct heard {
    enum device_heard kind;
    uint32_t immediate;
    uint8_t bytes[DEVICE_HEARD_BYTES];
};

struct held {
    struct ibv_send_wr wr;
    struct ibv_sge sges[MOST_SGES];
};

struct queue_pair {
    struct ibv_qp base;
    struct queue_pair *next;
    struct ibv_qp_init_attr made;
    enum ibv_qp_state state;
    uint32_t remote, stalled, left;
    struct receive *receives;
    uint64_t receives_posted, receives_done;
    struct held *held;
    uint32_t held_count;
    struct heard heard[HEARD];
    uint64_t heard_pushed, heard_taken;
};

struct completions {
    struct ibv_cq base;
    struct ibv_wc *ring;
    uint64_t pushed, taken;
};

struct region {
    struct ibv_mr base;
    struct region *next;
    uint64_t address, bytes;
    int access;
};

struct context {
    struct ibv_context base;
    struct ibv_qp *events[8]; /* of access errors */
    uint32_t event_count;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* queue pairs are destroyed by a thread of their own */
static struct ibv_device devices[DEVICES];
static struct queue_pair *queue_pairs;
static struct region *regions;
static uint32_t next_queue_pair = 1, next_key = 1, objects;

static void enter(void) { pthread_mutex_lock(&lock); }
static void leave(void) { pthread_mutex_unlock(&lock); }

static void *made(uint64_t bytes)
{
    void *object = calloc(1, bytes);
    if (!object) say_and_abort("no memory");
    __atomic_fetch_add(&objects, 1, __ATOMIC_RELAXED);
    return object;
}

static int unmade(void *object)
{
    free(object);
    __atomic_fetch_sub(&objects, 1, __ATOMIC_RELAXED);
    return 0;
}

/* ---- completions, under the lock ---- */

static void complete(struct ibv_cq *base, struct ibv_wc wc)
{
    struct completions *cq = (struct completions *)base;
    if (cq->pushed - cq->taken == (uint64_t)base->cqe) say_and_abort("a completion queue of %d runs over", base->cqe);
    cq->ring[cq->pushed++ % (uint64_t)base->cqe] = wc;
}

static void complete_receive(struct queue_pair *qp, struct ibv_wc wc)
{
    wc.wr_id = qp->receives[qp->receives_done++ % qp->made.cap.max_recv_wr].wr_id;
    wc.qp_num = qp->base.qp_num;
    complete(qp->made.recv_cq, wc);
}

static void complete_send(struct queue_pair *qp, const struct ibv_send_wr *wr, enum ibv_wc_status status)
{
    if (status == IBV_WC_SUCCESS && !(wr->send_flags & IBV_SEND_SIGNALED)) return;
    complete(qp->made.send_cq, (struct ibv_wc){.wr_id = wr->wr_id, .status = status, .opcode = IBV_WC_SEND, .qp_num = qp->base.qp_num});
}

static void fail(struct queue_pair *qp)
{
    if (qp->state == IBV_QPS_ERR) return;
    qp->state = IBV_QPS_ERR;
    for (uint32_t i = 0; i < qp->held_count; i++) complete_send(qp, &qp->held[i].wr, IBV_WC_WR_FLUSH_ERR);
    qp->held_count = 0;
    while (qp->receives_done < qp->receives_posted) complete_receive(qp, (struct ibv_wc){.status = IBV_WC_WR_FLUSH_ERR});
}

/* ---- memory, under the lock ---- */

static struct region *region_of_key(uint32_t key)
{
    struct region *region = regions;
    while (region && region->base.lkey != key) region = region->next;
    return region;
}

static int allowed(uint32_t key, uint64_t address, uint64_t bytes, int access)
{
    const struct region *region = region_of_key(key);
    return region && (region->access & access) == access && address >= region->address && bytes <= region->bytes &&
           address - region->address <= region->bytes - bytes;
}

static void must_be_allowed(const char *what, uint32_t key, uint64_t address, uint64_t bytes, int access)
{
    if (!allowed(key, address, bytes, access))
        say_and_abort("%s: %lu bytes at %lx are not in a region of key %u", what, (unsigned long)bytes, (unsigned long)address, key);
}

/* ---- queue pairs, under the lock ---- */

static struct queue_pair *numbered(uint32_t number)
{
    struct queue_pair *qp = queue_pairs;
    while (qp && qp->base.qp_num != number) qp = qp->next;
    return qp;
}

static int receives(const struct queue_pair *qp) { return qp && (qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS); }

/* 0: not ready. */
static int deliver(struct queue_pair *qp, const void *bytes, uint32_t count, const uint32_t *immediate)
{
    if (qp->receives_done == qp->receives_posted) return 0;
    const struct receive *receive = &qp->receives[qp->receives_done % qp->made.cap.max_recv_wr];
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = immediate ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV, .byte_len = count};
    if (immediate) {
        wc.imm_data = htobe32(*immediate);
        wc.wc_flags = IBV_WC_WITH_IMM;
    } else if (count > receive->sge.length) {
        complete_receive(qp, (struct ibv_wc){.status = IBV_WC_LOC_LEN_ERR});
        fail(qp);
        return 1;
    } else {
        must_be_allowed("receive", receive->sge.lkey, receive->sge.addr, receive->sge.length, IBV_ACCESS_LOCAL_WRITE);
        if (count) memcpy((void *)(uintptr_t)receive->sge.addr, bytes, count);
    }
    complete_receive(qp, wc);
    return 1;
}

static void hear(struct queue_pair *qp, const struct ibv_send_wr *wr)
{
    if (wr->opcode != IBV_WR_SEND && wr->opcode != IBV_WR_RDMA_WRITE_WITH_IMM) return;
    struct heard *heard = &qp->heard[qp->heard_pushed++ % HEARD];
    if (qp->heard_pushed - qp->heard_taken > HEARD) qp->heard_taken++;
    heard->kind = wr->opcode == IBV_WR_SEND ? DEVICE_SEND : DEVICE_IMMEDIATE;
    heard->immediate = be32toh(wr->imm_data);
    if (heard->kind == DEVICE_SEND) memcpy(heard->bytes, (const void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length);
}

static void reach(struct queue_pair *other, const struct ibv_send_wr *wr)
{
    uint64_t at = wr->wr.rdma.remote_addr;
    uint32_t immediate = be32toh(wr->imm_data);
    for (int i = 0; i < wr->num_sge && wr->opcode != IBV_WR_SEND; i++) {
        void *local = (void *)(uintptr_t)wr->sg_list[i].addr, *remote = (void *)(uintptr_t)at;
        uint32_t length = wr->sg_list[i].length;
        int reads = wr->opcode == IBV_WR_RDMA_READ;
        must_be_allowed(reads ? "read" : "write", wr->wr.rdma.rkey, at, length, reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE);
        memcpy(reads ? local : remote, reads ? remote : local, length);
        at += length;
    }
    int ready = 1;
    if (wr->opcode == IBV_WR_SEND)
        ready = deliver(other, (const void *)(uintptr_t)wr->sg_list->addr, wr->sg_list->length, NULL);
    else if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
        ready = deliver(other, NULL, 0, &immediate);
    if (!ready) say_and_abort("queue pair %u has no receive left", other->base.qp_num);
}

static void carry_out(struct queue_pair *qp, const struct ibv_send_wr *wr)
{
    for (int i = 0; i < wr->num_sge; i++)
        must_be_allowed("work request", wr->sg_list[i].lkey, wr->sg_list[i].addr, wr->sg_list[i].length,
                        wr->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_LOCAL_WRITE : 0);
    if (wr->opcode == IBV_WR_SEND && (wr->num_sge != 1 || wr->sg_list->length > DEVICE_HEARD_BYTES)) say_and_abort("a message that cannot be");
    struct queue_pair *other = qp->remote == DEVICE_STRANGER ? NULL : numbered(qp->remote);
    if (qp->remote == DEVICE_STRANGER && !qp->left) {
        hear(qp, wr);
    } else if (receives(other)) {
        reach(other, wr);
    } else {
        complete_send(qp, wr, IBV_WC_RETRY_EXC_ERR);
        fail(qp);
        return;
    }
    complete_send(qp, wr, IBV_WC_SUCCESS);
}

static int take_send(struct queue_pair *qp, const struct ibv_send_wr *wr)
{
    if (qp->state == IBV_QPS_ERR) {
        complete_send(qp, wr, IBV_WC_WR_FLUSH_ERR);
        return 0;
    }
    if (qp->state != IBV_QPS_RTS || wr->num_sge > (int)qp->made.cap.max_send_sge) say_and_abort("a work request that cannot be");
    if (!qp->stalled) {
        carry_out(qp, wr);
        return 0;
    }
    if (qp->held_count == qp->made.cap.max_send_wr) say_and_abort("a send queue of %u runs over", qp->made.cap.max_send_wr);
    struct held *held = &qp->held[qp->held_count++];
    held->wr = *wr;
    held->wr.sg_list = held->sges;
    for (int i = 0; i < wr->num_sge; i++) held->sges[i] = wr->sg_list[i];
    return 0;
}

/* ---- the fuzzer's side ---- */

void device_say(uint32_t number, const void *bytes, uint32_t count)
{
    enter();
    struct queue_pair *qp = numbered(number);
    if (receives(qp)) deliver(qp, bytes, count, NULL);
    leave();
}

void device_say_immediate(uint32_t number, uint32_t immediate)
{
    enter();
    struct queue_pair *qp = numbered(number);
    if (receives(qp)) deliver(qp, NULL, 0, &immediate);
    leave();
}

enum device_heard device_hear(uint32_t number, uint8_t *bytes, uint32_t *immediate)
{
    enum device_heard kind = DEVICE_NOTHING;
    enter();
    struct queue_pair *qp = numbered(number);
    if (qp && qp->heard_taken < qp->heard_pushed) {
        const struct heard *heard = &qp->heard[qp->heard_taken++ % HEARD];
        kind = heard->kind;
        *immediate = heard->immediate;
        memcpy(bytes, heard->bytes, sizeof heard->bytes);
    }
    leave();
    return kind;
}

void device_write(uint32_t number, uint32_t rkey, uint64_t address, const void *bytes, uint32_t count)
{
    enter();
    struct queue_pair *qp = numbered(number);
    if (receives(qp)) {
        if (allowed(rkey, address, count, IBV_ACCESS_REMOTE_WRITE)) {
            memcpy((void *)(uintptr_t)address, bytes, count);
        } else {
            struct context *context = (struct context *)qp->base.context;
            if (context->event_count < sizeof context->events / sizeof *context->events) {
                context->events[context->event_count++] = &qp->base;
                eventfd_write(context->base.async_fd, 1);
            }
            fail(qp);
        }
    }
    leave();
}

void device_stall(uint32_t number, int stalled, int error)
{
    enter();
    struct queue_pair *qp = numbered(number);
    if (qp && qp->remote == DEVICE_STRANGER) {
        qp->stalled = (uint32_t)stalled;
        for (uint32_t i = 0; i < qp->held_count && !error && !stalled && qp->state == IBV_QPS_RTS; i++) carry_out(qp, &qp->held[i].wr);
        if (error && qp->held_count && qp->state == IBV_QPS_RTS) {
            complete_send(qp, &qp->held[0].wr, IBV_WC_RETRY_EXC_ERR);
            memmove(qp->held, qp->held + 1, --qp->held_count * sizeof *qp->held);
            for (uint32_t i = 0; i < qp->held_count; i++) qp->held[i].wr.sg_list = qp->held[i].sges;
            fail(qp);
        } else if (!stalled) {
            qp->held_count = 0;
        }
    }
    leave();
}

void device_leave(uint32_t number)
{
    enter();
    struct queue_pair *qp = numbered(number);
    if (qp) qp->left = 1;
    leave();
    device_stall(number, 0, 1);
}

void device_check(void)
{
    if (objects || queue_pairs || regions) say_and_abort("%u objects of devices are left", objects);
}

/* ---- the library ---- */

static struct ibv_device **get_device_list(int *count)
{
    struct ibv_device **list = made((DEVICES + 1) * sizeof *list);
    for (int i = 0; i < DEVICES; i++) list[i] = &devices[i];
    *count = DEVICES;
    return list;
}

static void free_device_list(struct ibv_device **list) { unmade(list); }

static const char *get_device_name(struct ibv_device *device)
{
    static const char *const names[DEVICES] = {"fuzz0", "fuzz1"};
    return names[device - devices];
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)bad;
    enter();
    for (; wr; wr = wr->next) take_send((struct queue_pair *)base, wr);
    leave();
    return 0;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct queue_pair *qp = (struct queue_pair *)base;
    (void)bad;
    enter();
    for (; wr; wr = wr->next) {
        if (qp->receives_posted - qp->receives_done == qp->made.cap.max_recv_wr || wr->num_sge != 1) say_and_abort("a receive too many");
        qp->receives[qp->receives_posted++ % qp->made.cap.max_recv_wr] = (struct receive){wr->wr_id, *wr->sg_list};
        if (qp->state == IBV_QPS_ERR) complete_receive(qp, (struct ibv_wc){.status = IBV_WC_WR_FLUSH_ERR});
    }
    leave();
    return 0;
}

static int poll_cq(struct ibv_cq *base, int most, struct ibv_wc *wc)
{
    struct completions *cq = (struct completions *)base;
    int count = 0;
    enter();
    while (count < most && cq->taken < cq->pushed) wc[count++] = cq->ring[cq->taken++ % (uint64_t)base->cqe];
    leave();
    return count;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited)
{
    (void)cq, (void)solicited;
    return 0;
}

static struct ibv_context *open_device(struct ibv_device *device)
{
    struct context *context = made(sizeof *context);
    context->base.device = device;
    context->base.async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    context->base.ops.post_send = post_send;
    context->base.ops.post_recv = post_recv;
    context->base.ops.poll_cq = poll_cq;
    context->base.ops.req_notify_cq = req_notify_cq;
    return &context->base;
}

static int close_device(struct ibv_context *context)
{
    close(context->async_fd);
    return unmade(context);
}

static int query_device(struct ibv_context *context, struct ibv_device_attr *out)
{
    (void)context;
    *out = (struct ibv_device_attr){.max_mr_size = 1ull << 40, .max_qp_wr = MOST_WORK, .max_sge = MOST_SGES, .max_cqe = MOST_COMPLETIONS, .phys_port_cnt = 1};
    return 0;
}

static int query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out)
{
    (void)context, (void)port;
    *out = (struct ibv_port_attr){.state = IBV_PORT_ACTIVE, .active_mtu = IBV_MTU_4096, .gid_tbl_len = 1, .link_layer = IBV_LINK_LAYER_ETHERNET};
    return 0;
}

static int query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out)
{
    (void)context, (void)port, (void)index;
    *out = (union ibv_gid){.raw = {1}};
    return 0;
}

static struct ibv_pd *alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = made(sizeof *pd);
    pd->context = context;
    return pd;
}

static int dealloc_pd(struct ibv_pd *pd) { return unmade(pd); }

static struct ibv_mr *reg_mr(struct ibv_pd *pd, void *address, size_t bytes, int access)
{
    struct region *region = made(sizeof *region);
    region->address = (uint64_t)(uintptr_t)address;
    region->bytes = bytes;
    region->access = access;
    region->base.context = pd->context;
    enter();
    region->base.lkey = region->base.rkey = next_key++;
    region->next = regions;
    regions = region;
    leave();
    return &region->base;
}

static int dereg_mr(struct ibv_mr *mr)
{
    enter();
    struct region **link = &regions;
    while (&(*link)->base != mr) link = &(*link)->next;
    *link = (*link)->next;
    leave();
    return unmade(mr);
}

static struct ibv_comp_channel *create_comp_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = made(sizeof *channel);
    channel->context = context;
    channel->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return channel;
}

static int destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    return unmade(channel);
}

static struct ibv_cq *create_cq(struct ibv_context *context, int entries, void *tag, struct ibv_comp_channel *channel, int vector)
{
    struct completions *cq = made(sizeof *cq);
    (void)vector;
    cq->base.context = context;
    cq->base.channel = channel;
    cq->base.cq_context = tag;
    cq->base.cqe = entries;
    cq->ring = malloc((size_t)entries * sizeof *cq->ring);
    if (!cq->ring) say_and_abort("no memory");
    return &cq->base;
}

static int destroy_cq(struct ibv_cq *base)
{
    free(((struct completions *)base)->ring);
    return unmade(base);
}

static int get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **tag)
{
    (void)channel, (void)cq, (void)tag;
    errno = EAGAIN;
    return -1;
}

static void ack_cq_events(struct ibv_cq *cq, unsigned count) { (void)cq, (void)count; }

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *wanted)
{
    struct queue_pair *qp = made(sizeof *qp);
    qp->made = *wanted;
    qp->base.context = pd->context;
    qp->state = IBV_QPS_RESET;
    qp->receives = malloc(wanted->cap.max_recv_wr * sizeof *qp->receives);
    qp->held = malloc(wanted->cap.max_send_wr * sizeof *qp->held);
    if (!qp->receives || !qp->held) say_and_abort("no memory");
    enter();
    qp->base.qp_num = next_queue_pair++ % DEVICE_STRANGER;
    qp->next = queue_pairs;
    queue_pairs = qp;
    leave();
    return &qp->base;
}

static int modify_qp(struct ibv_qp *base, struct ibv_qp_attr *wanted, int mask)
{
    struct queue_pair *qp = (struct queue_pair *)base;
    enter();
    if (mask & IBV_QP_DEST_QPN) qp->remote = wanted->dest_qp_num;
    if (wanted->qp_state == IBV_QPS_ERR)
        fail(qp);
    else if (qp->state != IBV_QPS_ERR)
        qp->state = wanted->qp_state;
    leave();
    return 0;
}

static int destroy_qp(struct ibv_qp *base)
{
    struct queue_pair *qp = (struct queue_pair *)base, **link = &queue_pairs;
    struct context *context = (struct context *)base->context;
    enter();
    while (*link != qp) link = &(*link)->next;
    *link = qp->next;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < context->event_count; i++)
        if (context->events[i] != base) context->events[kept++] = context->events[i];
    context->event_count = kept;
    leave();
    free(qp->receives);
    free(qp->held);
    return unmade(qp);
}

static int get_async_event(struct ibv_context *base, struct ibv_async_event *event)
{
    struct context *context = (struct context *)base;
    eventfd_t ignored;
    enter();
    int any = context->event_count > 0;
    if (any)
        *event = (struct ibv_async_event){.element.qp = context->events[--context->event_count], .event_type = IBV_EVENT_QP_ACCESS_ERR};
    else
        eventfd_read(base->async_fd, &ignored);
    leave();
    return any ? 0 : -1;
}

static void ack_async_event(struct ibv_async_event *event) { (void)event; }

static void *device_symbol(const char *name)
{
    static const struct {
        const char *name;
        void *function;
    } functions[] = {
#define FUNCTION(name) {"ibv_" #name, (void *)name}
        FUNCTION(get_device_list), FUNCTION(free_device_list), FUNCTION(get_device_name), FUNCTION(open_device), FUNCTION(close_device),
        FUNCTION(query_device), FUNCTION(query_port), FUNCTION(query_gid), FUNCTION(alloc_pd), FUNCTION(dealloc_pd), FUNCTION(reg_mr),
        FUNCTION(dereg_mr), FUNCTION(create_comp_channel), FUNCTION(destroy_comp_channel), FUNCTION(create_cq), FUNCTION(destroy_cq),
        FUNCTION(get_cq_event), FUNCTION(ack_cq_events), FUNCTION(create_qp), FUNCTION(modify_qp), FUNCTION(destroy_qp),
        FUNCTION(get_async_event), FUNCTION(ack_async_event),
#undef FUNCTION
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) return functions[i].function;
    return NULL;
}
#else
void device_leave(uint32_t number) { (void)number; }
void device_check(void) {}
#endif
