/* A stand-in for libibverbs.so.1: reliable connections between processes of one machine, for tests on machines without
 * an RDMA NIC. It keeps to what verbs promise and to nothing more, so that tests find what relies on luck: a thread
 * for each open device reads the source and places bytes some time after post_send has returned, up to the moment at
 * which a queue pair has flushed; keys, ranges and rights are checked at each use; completions that nobody polled keep
 * their place in the queues; packets on their way survive their sender. Unlike a NIC, it stands still while its process
 * is stopped.
 *
 * A requester's packets and their answers travel on a Unix socket, one for each direction of a pair of queue pairs. A
 * queue pair listens as qp-<address>-<number> in the directory that all processes share. What the socket has taken is
 * on the wire.
 *
 * Environment: RAILRELAY_IBVERBS_DIR, RAILRELAY_IBVERBS_DEVICES ("stub0=127.1.0.1,stub1=127.1.0.2"),
 * RAILRELAY_IBVERBS_TIME_SCALE (1: factor of the time after which a retry counter is exceeded),
 * RAILRELAY_IBVERBS_LIMITS ("max_sge=4,max_qp_wr=1024,max_cqe=4096,max_mr_size=1048576,max_inline=64,mtu=4096"),
 * RAILRELAY_IBVERBS_NULL (1: no bytes move, all posted sends complete at once), RAILRELAY_IBVERBS_VERBOSE.
 * Faults: lines "<address> <what> <value>" in the directory's file `faults`, read when a device is opened and when its
 * control socket (control-<address>-<pid>-<number>) is told "reload"; see verbs_stand_in.py. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_get_device_list

#define EXPORTED __attribute__((visibility("default")))
#define DEVICES_MAX 16
#define FAULTS_MAX 64
#define FRAGMENT_BYTES 16384u
#define FRAGMENTS_AT_ONCE 8
#define SGE_MAX 32
#define READS_MAX 16
#define CONNECT_AGAIN_NS 5000000ll
#define GIDS 4 /* as on a NIC of two protocols: link-local v1 and v2, address v1 and v2 */
#define GIDS_ROCE_V2 3
#define MAGIC 0x52524942u
#define UNDEFINED 0x5252 /* fields that say nothing */

/* ---- packets ---- */

enum kind { HELLO = 1, HELLO_TAKEN, REQUEST, ACKNOWLEDGE, READ_RESPONSE };
enum { FIRST = 1, LAST = 2, SOLICITED = 4 };
enum { HELD_TO = 1, HELD_FROM = 2 };

struct packet {
    uint32_t magic, kind, flags, opcode;
    uint32_t payload_bytes; /* that follow this packet's header */
    uint32_t rkey, imm, status;
    uint64_t address, message_bytes, sequence;
    uint32_t source_qpn, psn, mtu, rnr_retry;
    uint32_t source_address, reserved;
};

/* ---- objects; what follows is guarded by the lock of the device's context unless it says otherwise ---- */

struct device {
    struct ibv_device base;
    uint32_t address; /* network order */
    char dotted[16];
};

struct fault {
    uint32_t address;
    int held, down, reads_held; /* held: HELD_ bits */
    int registration, dmabuf, relaxed, state; /* errno */
    uint64_t slow_ms;
    uint64_t bytes_per_s, memory_limit;
};

struct memory {
    struct ibv_mr base;
    struct memory *next;
    uint8_t *bytes; /* where the process has it */
    uint64_t iova;
    int access, mapped;
};

struct completion {
    struct ibv_wc wc;
    struct queue_pair *qp; /* NULL: destroyed since */
    uint64_t position;
    int is_receive;
};

struct completion_queue {
    struct ibv_cq base;
    struct completion_queue *next;
    struct completion *ring;
    uint32_t head;
    atomic_uint count; /* read without the lock too */
    int armed;         /* 1: any, 2: solicited only */
    int overrun, queue_pairs;
    uint64_t events_taken, events_acknowledged, async_taken, async_acknowledged;
};

struct event_node {
    struct event_node *next;
    struct completion_queue *cq;
    struct ibv_async_event async;
};

struct events { /* fd: an eventfd that counts the list's nodes */
    struct event_node *first, **end;
};

struct channel {
    struct ibv_comp_channel base;
    struct events events;
};

struct send_work {
    uint64_t wr_id, address, bytes;
    struct ibv_sge *sges;
    uint8_t *inline_bytes;
    uint32_t rkey, imm;
    int count, opcode, flags;
    enum ibv_wc_status status; /* found before it was sent */
};

struct receive_work {
    uint64_t wr_id, bytes;
    struct ibv_sge *sges;
    int count;
};

struct stream {
    int fd;               /* -1: none */
    int ended, taken;     /* the other end has gone; the hello was answered */
    int blocked;          /* the socket is full */
    int shut;             /* nobody reads at the other end; what it has sent may still be read */
    int readable;         /* says poll */
    uint32_t other;       /* address of the device at the other end */
    struct packet in, out;
    uint32_t in_bytes;    /* of the header */
    uint32_t in_payload;  /* still to come */
    uint32_t out_bytes, out_payload; /* still to go */
    uint64_t in_offset, out_offset;  /* of the payload in its message */
    int out_broken;       /* the rest of the fragment cannot be read any more */
};

struct queue_pair {
    union {
        struct ibv_qp base;
        struct ibv_qp_ex extended;
    };
    struct queue_pair *next;
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr created;
    enum ibv_qp_state state;
    int listener;
    int dying, resetting, flushed, lost; /* lost: the connection was dropped for good */

    struct send_work *sends;
    struct receive_work *receives;
    uint64_t posted, sent, done, reaped; /* sends: done <= sent <= posted; reaped: whose completion was polled */
    uint64_t receives_posted, receives_done, receives_reaped;
    uint64_t send_offset;
    int reads; /* under way */
    int64_t broken_since_ns, connect_at_ns;
    struct stream requester, responder;

    /* the responder's message */
    uint64_t answered, to_answer; /* messages: acknowledged, finished */
    int refused, waits_for_receive, reading;
    int64_t waits_since_ns;
    enum ibv_wc_status refusal;
    struct packet message;
    uint64_t read_offset;
    uint32_t other_rnr_retry;

    uint64_t async_taken, async_acknowledged;

    /* between wr_start and wr_complete; the caller's alone */
    struct ibv_send_wr *built;
    struct ibv_sge *built_sges; /* [max_send_sge] each */
    uint32_t built_count;
    int built_error;
};

struct domain {
    struct ibv_pd base;
    int users;
};

struct counters {
    uint64_t sends, receives, reads, bytes, placed_bytes, rnr, overruns, queue_full, refused_hellos, unmapped, errors, most_completions;
};

struct context {
    struct verbs_context extended;
    struct context *next;
    struct device *device;
    pthread_mutex_t lock;
    pthread_cond_t changed; /* the mover has taken note, or something was acknowledged */
    pthread_t mover;
    atomic_int callers; /* threads that want the lock */
    int stop, sleeping, changes, wake_fd, control_fd; /* changes: since the mover began its round */
    char control_name[64];
    struct fault faults[FAULTS_MAX];
    int fault_count, down;
    uint64_t registered_bytes;
    int64_t next_send_ns;
    uint32_t next_key, next_qpn;
    struct events async;
    struct queue_pair *queue_pairs;
    struct completion_queue *completion_queues;
    struct memory *memories;
    int domains, channels;
    struct counters counters;
};

static struct {
    pthread_mutex_t lock;
    int ready, directory, verbose, null;
    double time_scale;
    struct device devices[DEVICES_MAX];
    int device_count, opened, lists;
    struct ibv_device_attr limits;
    uint32_t max_inline;
    enum ibv_mtu mtu;
    struct context *contexts;
} world = {.lock = PTHREAD_MUTEX_INITIALIZER, .directory = -1};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

static void *checked(void *memory)
{
    if (!memory) abort();
    return memory;
}

static void *zeroed(size_t count, size_t bytes) { return checked(calloc(count ? count : 1, bytes)); }

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
    if (!world.verbose) return;
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (length > (int)sizeof line - 2) length = sizeof line - 2;
    line[length++] = '\n';
    if (write(2, line, (size_t)length) < 0) return;
}

/* Of the device that the queue pair is connected to. */
static uint32_t other_address(const struct queue_pair *qp)
{
    uint32_t address;
    memcpy(&address, &qp->attributes.ah_attr.grh.dgid.raw[12], sizeof address);
    return address;
}

static struct context *context_of(struct ibv_context *context)
{
    return (struct context *)(void *)((uint8_t *)context - offsetof(struct context, extended.context));
}

/* Application threads. The mover lets them go first. */
static void enter(struct context *context)
{
    atomic_fetch_add(&context->callers, 1);
    pthread_mutex_lock(&context->lock);
    atomic_fetch_sub(&context->callers, 1);
}

static void leave(struct context *context) { pthread_mutex_unlock(&context->lock); }

/* 1: the caller must write wake_fd. */
static int must_wake(struct context *context)
{
    int asleep = context->sleeping;
    context->changes = 1;
    context->sleeping = 0;
    return asleep;
}

static void wake(struct context *context)
{
    if (must_wake(context) && eventfd_write(context->wake_fd, 1)) abort();
}

/* The mover, between two pieces of work. */
static void breathe(struct context *context)
{
    if (!atomic_load(&context->callers)) return;
    pthread_mutex_unlock(&context->lock);
    for (int turn = 0; turn < 100 && atomic_load(&context->callers); turn++) sched_yield();
    pthread_mutex_lock(&context->lock);
}

static void wait_for_change(struct context *context) { pthread_cond_wait(&context->changed, &context->lock); }

/* ---- environment ---- */

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void read_limits(void)
{
    struct ibv_device_attr *limits = &world.limits;
    *limits = (struct ibv_device_attr){
        .fw_ver = "stand-in",
        .max_mr_size = ~0ull,
        .page_size_cap = 0xfffff000,
        .max_qp = 4096,
        .max_qp_wr = 8192,
        .device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN,
        .max_sge = 16,
        .max_sge_rd = 16,
        .max_cq = 4096,
        .max_cqe = 1 << 20,
        .max_mr = 1 << 20,
        .max_pd = 1024,
        .max_qp_rd_atom = READS_MAX,
        .max_qp_init_rd_atom = READS_MAX,
        .max_res_rd_atom = 4096 * READS_MAX,
        .max_pkeys = 1,
        .phys_port_cnt = 1,
    };
    world.max_inline = 220;
    world.mtu = IBV_MTU_4096;
    char text[512], *rest = text;
    snprintf(text, sizeof text, "%s", getenv("RAILRELAY_IBVERBS_LIMITS") ?: "");
    for (char *item; (item = strsep(&rest, ","));) {
        char *value = strchr(item, '=');
        if (!value) continue;
        *value++ = 0;
        uint64_t found = strtoull(value, NULL, 10);
        if (!strcmp(item, "max_sge")) limits->max_sge = (int)(found < SGE_MAX ? found : SGE_MAX);
        if (!strcmp(item, "max_qp_wr")) limits->max_qp_wr = (int)found;
        if (!strcmp(item, "max_qp")) limits->max_qp = (int)found;
        if (!strcmp(item, "max_cqe")) limits->max_cqe = (int)found;
        if (!strcmp(item, "max_mr_size")) limits->max_mr_size = found;
        if (!strcmp(item, "max_inline")) world.max_inline = (uint32_t)found;
        if (!strcmp(item, "mtu"))
            for (int mtu = IBV_MTU_256; mtu <= IBV_MTU_4096; mtu++)
                if (found == 128ull << mtu) world.mtu = (enum ibv_mtu)mtu;
    }
}

static void read_devices(void)
{
    char text[1024], *rest = text;
    snprintf(text, sizeof text, "%s", getenv("RAILRELAY_IBVERBS_DEVICES") ?: "");
    for (char *item; (item = strsep(&rest, ",")) && world.device_count < DEVICES_MAX;) {
        char *address = strchr(item, '=');
        if (!address) continue;
        *address++ = 0;
        struct device *device = &world.devices[world.device_count];
        *device = (struct device){0};
        if (inet_pton(AF_INET, address, &device->address) != 1) continue;
        snprintf(device->dotted, sizeof device->dotted, "%s", address);
        snprintf(device->base.name, sizeof device->base.name, "%s", item);
        snprintf(device->base.dev_name, sizeof device->base.dev_name, "uverbs%d", world.device_count);
        snprintf(device->base.dev_path, sizeof device->base.dev_path, "%s/sys/uverbs%d", getenv("RAILRELAY_IBVERBS_DIR"), world.device_count);
        snprintf(device->base.ibdev_path, sizeof device->base.ibdev_path, "%s/sys/%s", getenv("RAILRELAY_IBVERBS_DIR"), item);
        device->base.node_type = IBV_NODE_CA;
        device->base.transport_type = IBV_TRANSPORT_IB;
        world.device_count++;
    }
}

static int start(void)
{
    pthread_mutex_lock(&world.lock);
    world.lists++;
    if (!world.ready) {
        const char *directory = getenv("RAILRELAY_IBVERBS_DIR"), *scale = getenv("RAILRELAY_IBVERBS_TIME_SCALE");
        world.directory = directory ? open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC) : -1;
        world.time_scale = scale && *scale ? atof(scale) : 1;
        world.verbose = (int)number("RAILRELAY_IBVERBS_VERBOSE", 0);
        world.null = (int)number("RAILRELAY_IBVERBS_NULL", 0);
        read_limits();
        if (world.directory >= 0) read_devices();
        world.ready = 1;
    }
    if (world.directory < 0) world.lists--;
    int found = world.directory >= 0;
    pthread_mutex_unlock(&world.lock);
    return found;
}

/* When no device is open: the next list is read from the environment again. */
static void forget(void)
{
    pthread_mutex_lock(&world.lock);
    if (!world.contexts && !world.lists && world.ready) {
        if (world.directory >= 0) close(world.directory);
        world.directory = -1;
        world.ready = world.device_count = 0;
    }
    pthread_mutex_unlock(&world.lock);
}

/* Through the descriptor: the directory's name may be longer than a socket's may be. */
static struct sockaddr_un name_in_directory(const char *name)
{
    struct sockaddr_un found = {.sun_family = AF_UNIX};
    snprintf(found.sun_path, sizeof found.sun_path, "/proc/self/fd/%d/%s", world.directory, name);
    return found;
}

static void queue_pair_name(char *name, size_t bytes, uint32_t address, uint32_t qpn)
{
    char dotted[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &address, dotted, sizeof dotted);
    snprintf(name, bytes, "qp-%s-%06x", dotted, qpn);
}

static int listening(const char *name, int type, int backlog)
{
    struct sockaddr_un at = name_in_directory(name);
    int fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, backlog))) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

/* ---- events ---- */

static void add_event(struct events *events, int fd, struct event_node node)
{
    struct event_node *added = zeroed(1, sizeof *added);
    *added = node;
    added->next = NULL;
    if (!events->first) events->end = &events->first;
    *events->end = added;
    events->end = &added->next;
    if (eventfd_write(fd, 1)) abort();
}

static struct event_node *take_event(struct events *events)
{
    struct event_node *node = events->first;
    if (node) events->first = node->next;
    return node;
}

/* Those that nobody has taken, of an object that is destroyed. */
static void drop_events(struct events *events, int fd, const void *object)
{
    struct event_node *all = events->first;
    events->first = NULL;
    while (all) {
        struct event_node *node = all;
        all = node->next;
        int gone = node->cq == object || (const void *)node->async.element.qp == object;
        eventfd_t count; /* of one: the descriptor is a semaphore */
        struct pollfd ready = {fd, POLLIN, 0};
        if (poll(&ready, 1, 0) == 1 && eventfd_read(fd, &count)) abort();
        if (!gone) add_event(events, fd, *node);
        free(node);
    }
}

static void raise_async(struct context *context, enum ibv_event_type type, void *element)
{
    struct event_node node = {.async.event_type = type};
    if (type == IBV_EVENT_PORT_ACTIVE || type == IBV_EVENT_PORT_ERR || type == IBV_EVENT_GID_CHANGE)
        node.async.element.port_num = 1;
    else
        node.async.element.qp = element;
    add_event(&context->async, context->extended.context.async_fd, node);
}

/* ---- completions ---- */

static void enter_error(struct context *context, struct queue_pair *qp)
{
    if (qp->state == IBV_QPS_ERR) return;
    qp->state = IBV_QPS_ERR;
    qp->flushed = 0;
    wake(context);
}

static void overrun(struct context *context, struct completion_queue *cq)
{
    context->counters.overruns++;
    if (cq->overrun) return;
    cq->overrun = 1;
    say("ibverbs stand-in: a completion queue of %d entries overruns", cq->base.cqe);
    raise_async(context, IBV_EVENT_CQ_ERR, &cq->base);
    for (struct queue_pair *qp = context->queue_pairs; qp; qp = qp->next) {
        if (qp->base.send_cq != &cq->base && qp->base.recv_cq != &cq->base) continue;
        raise_async(context, IBV_EVENT_QP_FATAL, &qp->base);
        enter_error(context, qp);
    }
}

static void complete(struct context *context, struct queue_pair *qp, struct ibv_wc wc, uint64_t position, int is_receive, int solicited)
{
    struct completion_queue *cq = (struct completion_queue *)(is_receive ? qp->base.recv_cq : qp->base.send_cq);
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    wc.qp_num = qp->base.qp_num;
    if (wc.status != IBV_WC_SUCCESS) {
        wc.opcode = (enum ibv_wc_opcode)UNDEFINED;
        wc.byte_len = wc.vendor_err = UNDEFINED;
        solicited = 1;
    }
    if (cq->overrun || count == (uint32_t)cq->base.cqe) {
        overrun(context, cq);
        return;
    }
    cq->ring[(cq->head + count) % (uint32_t)cq->base.cqe] = (struct completion){wc, qp, position, is_receive};
    atomic_store_explicit(&cq->count, count + 1, memory_order_release);
    if (context->counters.most_completions < count + 1) context->counters.most_completions = count + 1;
    if (!cq->base.channel || !cq->armed || (cq->armed == 2 && !solicited)) return;
    cq->armed = 0;
    add_event(&((struct channel *)cq->base.channel)->events, cq->base.channel->fd, (struct event_node){.cq = cq});
}

static enum ibv_wc_opcode opcode_of(const struct send_work *work)
{
    switch (work->opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
        return IBV_WC_SEND;
    case IBV_WR_RDMA_READ:
        return IBV_WC_RDMA_READ;
    default:
        return IBV_WC_RDMA_WRITE;
    }
}

static struct send_work *send_at(struct queue_pair *qp, uint64_t position)
{
    return &qp->sends[position % qp->created.cap.max_send_wr];
}

static struct receive_work *receive_at(struct queue_pair *qp, uint64_t position)
{
    return &qp->receives[position % qp->created.cap.max_recv_wr];
}

static void complete_send(struct context *context, struct queue_pair *qp, enum ibv_wc_status status)
{
    struct send_work *work = send_at(qp, qp->done);
    if (work->opcode == IBV_WR_RDMA_READ && qp->done < qp->sent && qp->reads) qp->reads--;
    if (status != IBV_WC_SUCCESS || work->flags & IBV_SEND_SIGNALED || qp->created.sq_sig_all) {
        struct ibv_wc wc = {.wr_id = work->wr_id, .status = status, .opcode = opcode_of(work), .byte_len = (uint32_t)work->bytes};
        complete(context, qp, wc, qp->done, 0, 0);
    }
    if (status != IBV_WC_SUCCESS) context->counters.errors++;
    qp->done++;
    if (qp->sent < qp->done) qp->sent = qp->done;
}

static void complete_receive(struct context *context, struct queue_pair *qp, struct ibv_wc wc, int solicited)
{
    wc.wr_id = receive_at(qp, qp->receives_done)->wr_id;
    wc.src_qp = qp->attributes.dest_qp_num;
    complete(context, qp, wc, qp->receives_done, 1, solicited);
    qp->receives_done++;
}

/* The first one that is not done gets the status, whatever comes after it flushes. */
static void fail_sends(struct context *context, struct queue_pair *qp, enum ibv_wc_status status)
{
    if (qp->done < qp->posted) complete_send(context, qp, status);
    enter_error(context, qp);
}

static void flush(struct context *context, struct queue_pair *qp)
{
    while (qp->done < qp->posted) complete_send(context, qp, IBV_WC_WR_FLUSH_ERR);
    while (qp->receives_done < qp->receives_posted)
        complete_receive(context, qp, (struct ibv_wc){.status = IBV_WC_WR_FLUSH_ERR, .opcode = IBV_WC_RECV}, 1);
}

/* ---- memory ---- */

static struct memory *memory_of(struct context *context, const struct ibv_pd *pd, uint32_t key, uint64_t address, uint64_t bytes, int access)
{
    for (struct memory *memory = context->memories; memory; memory = memory->next) {
        if (memory->base.lkey != key) continue;
        int inside = address >= memory->iova && address - memory->iova <= memory->base.length && bytes <= memory->base.length - (address - memory->iova);
        return inside && memory->base.pd == pd && (memory->access & access) == access ? memory : NULL;
    }
    return NULL;
}

/* The process's addresses of `bytes` bytes from `offset` of a list. -1: a key, a range or a right is wrong. */
static int local_pieces(struct context *context, const struct ibv_pd *pd, const struct ibv_sge *sges, int count, uint64_t offset, uint64_t bytes,
                        int access, struct iovec *pieces)
{
    int found = 0;
    for (int i = 0; i < count && bytes; i++) {
        uint64_t length = sges[i].length;
        if (offset >= length) {
            offset -= length;
            continue;
        }
        uint64_t here = length - offset < bytes ? length - offset : bytes;
        struct memory *memory = memory_of(context, pd, sges[i].lkey, sges[i].addr, length, access);
        if (!memory) return -1;
        pieces[found++] = (struct iovec){memory->bytes + (sges[i].addr + offset - memory->iova), here};
        bytes -= here;
        offset = 0;
    }
    return bytes ? -1 : found;
}

static int list_is_valid(struct context *context, const struct ibv_pd *pd, const struct ibv_sge *sges, int count, int access)
{
    for (int i = 0; i < count; i++)
        if (sges[i].length && !memory_of(context, pd, sges[i].lkey, sges[i].addr, sges[i].length, access)) return 0;
    return 1;
}

/* ---- faults ---- */

static struct fault *fault_of(struct context *context, uint32_t address)
{
    static struct fault none;
    for (int i = 0; i < context->fault_count; i++)
        if (context->faults[i].address == address) return &context->faults[i];
    return &none;
}

static void read_faults(struct context *context)
{
    context->fault_count = 0;
    int fd = openat(world.directory, "faults", O_RDONLY | O_CLOEXEC);
    FILE *file = fd >= 0 ? fdopen(fd, "r") : NULL;
    char dotted[32], what[32];
    unsigned long long value;
    while (file && fscanf(file, "%31s %31s %llu", dotted, what, &value) == 3) {
        uint32_t address;
        if (inet_pton(AF_INET, dotted, &address) != 1) continue;
        struct fault *fault = fault_of(context, address);
        if (fault->address != address) {
            if (context->fault_count == FAULTS_MAX) break;
            fault = &context->faults[context->fault_count++];
            *fault = (struct fault){.address = address};
        }
        if (!strcmp(what, "held")) fault->held = (int)value;
        if (!strcmp(what, "down")) fault->down = (int)value;
        if (!strcmp(what, "reads_held")) fault->reads_held = (int)value;
        if (!strcmp(what, "bytes_per_s")) fault->bytes_per_s = value;
        if (!strcmp(what, "registration")) fault->registration = (int)value;
        if (!strcmp(what, "dmabuf")) fault->dmabuf = (int)value;
        if (!strcmp(what, "relaxed")) fault->relaxed = (int)value;
        if (!strcmp(what, "state")) fault->state = (int)value;
        if (!strcmp(what, "slow_ms")) fault->slow_ms = value;
        if (!strcmp(what, "memory_limit")) fault->memory_limit = value;
    }
    if (file) fclose(file);
    int down = fault_of(context, context->device->address)->down;
    if (down != context->down) raise_async(context, down ? IBV_EVENT_PORT_ERR : IBV_EVENT_PORT_ACTIVE, NULL);
    context->down = down;
}

/* Packets that come here from there. */
static int is_held(struct context *context, uint32_t other)
{
    const struct fault *here = fault_of(context, context->device->address), *there = fault_of(context, other);
    return here->held & HELD_TO || there->held & HELD_FROM || here->down || there->down;
}

/* Packets of either direction. */
static int is_cut(struct context *context, uint32_t other)
{
    const struct fault *here = fault_of(context, context->device->address), *there = fault_of(context, other);
    return here->held || there->held || here->down || there->down;
}

/* ---- the mover: streams ---- */

static void close_stream(struct stream *stream)
{
    if (stream->fd >= 0) close(stream->fd);
    *stream = (struct stream){.fd = -1};
}

static void end_stream(struct stream *stream)
{
    close_stream(stream);
    stream->ended = 1;
}

static struct packet packet_of(struct context *context, struct queue_pair *qp, enum kind kind)
{
    return (struct packet){.magic = MAGIC, .kind = kind, .source_qpn = qp->base.qp_num, .source_address = context->device->address};
}

static void put(struct stream *stream, struct packet packet)
{
    stream->out = packet;
    stream->out_bytes = sizeof packet;
    stream->out_payload = packet.payload_bytes;
    stream->out_broken = 0;
}

/* Sends what is left of the header and of the payload's pieces. 1: all of it is on the wire, 0: not yet, -1: lost. */
static int push_out(struct context *context, struct stream *stream, struct iovec *payload, int count)
{
    static const uint8_t zeroes[FRAGMENT_BYTES];
    struct iovec pieces[SGE_MAX + 1];
    int used = 0;
    if (stream->out_bytes)
        pieces[used++] = (struct iovec){(uint8_t *)&stream->out + sizeof stream->out - stream->out_bytes, stream->out_bytes};
    for (int i = 0; i < count; i++) pieces[used++] = payload[i];
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)used};
    ssize_t went = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (went < 0 && errno == EFAULT && count) { /* the pages of a real region would have been kept */
        context->counters.unmapped++;
        struct iovec nothing = {(void *)(uintptr_t)zeroes, stream->out_payload};
        pieces[stream->out_bytes ? 1 : 0] = nothing;
        message.msg_iovlen = stream->out_bytes ? 2 : 1;
        went = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    if (went < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ENOBUFS) {
            stream->blocked = 1;
            return 0;
        }
        return -1;
    }
    uint32_t header = (uint32_t)went < stream->out_bytes ? (uint32_t)went : stream->out_bytes;
    stream->out_bytes -= header;
    stream->out_payload -= (uint32_t)went - header;
    stream->out_offset += (uint32_t)went - header;
    context->counters.bytes += (uint32_t)went - header;
    return !stream->out_bytes && !stream->out_payload;
}

/* Takes what is there of a header. 1: complete, 0: not yet, -1: the other end has gone. */
static int pull_header(struct stream *stream)
{
    while (stream->in_bytes < sizeof stream->in) {
        ssize_t came = recv(stream->fd, (uint8_t *)&stream->in + stream->in_bytes, sizeof stream->in - stream->in_bytes, MSG_DONTWAIT);
        if (came < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
        if (came <= 0 || (stream->in_bytes == 0 && came >= 4 && stream->in.magic != MAGIC)) return -1;
        stream->in_bytes += (uint32_t)came;
        if (stream->in_bytes == sizeof stream->in) stream->in_payload = stream->in.payload_bytes;
    }
    return 1;
}

/* Takes payload into the pieces, or nowhere if there are none. 1: all of the fragment, 0: not yet, -1: gone. */
static int pull_payload(struct context *context, struct stream *stream, struct iovec *pieces, int count)
{
    static uint8_t nowhere[FRAGMENT_BYTES];
    struct iovec drop = {nowhere, stream->in_payload};
    struct msghdr message = {.msg_iov = count > 0 ? pieces : &drop, .msg_iovlen = count > 0 ? (size_t)count : 1};
    ssize_t came = recvmsg(stream->fd, &message, MSG_DONTWAIT);
    if (came < 0 && errno == EFAULT) {
        context->counters.unmapped++;
        came = recv(stream->fd, nowhere, stream->in_payload, MSG_DONTWAIT);
    }
    if (came < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (came <= 0) return -1;
    stream->in_payload -= (uint32_t)came;
    stream->in_offset += (uint32_t)came;
    if (count > 0) context->counters.placed_bytes += (uint32_t)came;
    return !stream->in_payload;
}

/* ---- the mover: requester ---- */

static void connect_requester(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->requester;
    uint32_t other = other_address(qp);
    char name[64];
    queue_pair_name(name, sizeof name, other, qp->attributes.dest_qp_num);
    struct sockaddr_un at = name_in_directory(name);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, sizeof at)) {
        if (fd >= 0) close(fd);
        qp->connect_at_ns = now_ns() + CONNECT_AGAIN_NS;
        return;
    }
    *stream = (struct stream){.fd = fd, .other = other};
    struct packet hello = packet_of(context, qp, HELLO);
    hello.psn = qp->attributes.sq_psn;
    hello.mtu = qp->attributes.path_mtu;
    hello.rnr_retry = qp->attributes.rnr_retry;
    put(stream, hello);
}

/* Begins the next fragment of the work at qp->sent. 0: not now. */
static int next_fragment(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->requester;
    if (qp->sent == qp->posted) return 0;
    struct send_work *work = send_at(qp, qp->sent);
    if (work->status != IBV_WC_SUCCESS) return 0;
    int is_read = work->opcode == IBV_WR_RDMA_READ;
    if (qp->send_offset == 0) {
        if (work->flags & IBV_SEND_FENCE && qp->reads) return 0;
        if (is_read && qp->reads >= qp->attributes.max_rd_atomic) return 0;
        if (!work->inline_bytes && !list_is_valid(context, qp->base.pd, work->sges, work->count, is_read ? IBV_ACCESS_LOCAL_WRITE : 0)) {
            work->status = IBV_WC_LOC_PROT_ERR;
            return 0;
        }
    }
    uint64_t left = work->bytes - qp->send_offset;
    struct packet packet = packet_of(context, qp, REQUEST);
    packet.opcode = (uint32_t)work->opcode;
    packet.rkey = work->rkey;
    packet.imm = work->imm;
    packet.message_bytes = work->bytes;
    packet.sequence = qp->sent;
    packet.address = work->address;
    packet.flags = (qp->send_offset ? 0 : FIRST) | (work->flags & IBV_SEND_SOLICITED ? SOLICITED : 0);
    packet.payload_bytes = is_read ? 0 : (uint32_t)(left < FRAGMENT_BYTES ? left : FRAGMENT_BYTES);
    if (is_read || left <= FRAGMENT_BYTES) packet.flags |= LAST;
    put(stream, packet);
    stream->out_offset = qp->send_offset;
    return 1;
}

/* The source of what is left of the fragment, at this moment. */
static int source_pieces(struct context *context, struct queue_pair *qp, struct iovec *pieces)
{
    static const uint8_t zeroes[FRAGMENT_BYTES];
    struct stream *stream = &qp->requester;
    struct send_work *work = send_at(qp, qp->sent);
    if (!stream->out_payload) return 0;
    if (work->inline_bytes) {
        pieces[0] = (struct iovec){work->inline_bytes + stream->out_offset, stream->out_payload};
        return 1;
    }
    int count = stream->out_broken
                    ? -1
                    : local_pieces(context, qp->base.pd, work->sges, work->count, stream->out_offset, stream->out_payload, 0, pieces);
    if (count >= 0) return count;
    stream->out_broken = 1; /* deregistered meanwhile */
    work->status = IBV_WC_LOC_PROT_ERR;
    pieces[0] = (struct iovec){(void *)(uintptr_t)zeroes, stream->out_payload};
    return 1;
}

static int64_t paced(struct context *context, uint32_t bytes)
{
    uint64_t rate = fault_of(context, context->device->address)->bytes_per_s;
    if (!rate) return 0;
    int64_t now = now_ns();
    if (context->next_send_ns < now) context->next_send_ns = now;
    context->next_send_ns += (int64_t)((double)bytes * 1e9 / (double)rate);
    return context->next_send_ns;
}

static int is_limited(struct context *context) { return fault_of(context, context->device->address)->bytes_per_s != 0; }

static int must_wait(struct context *context) { return is_limited(context) && now_ns() < context->next_send_ns; }

/* 1: there may be more to do at once. */
static int transmit(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->requester;
    struct iovec pieces[SGE_MAX];
    for (int turn = 0; turn < FRAGMENTS_AT_ONCE; turn++) {
        if (stream->fd < 0 || stream->blocked || stream->shut) return 0;
        int is_hello = stream->out_bytes && stream->out.kind == HELLO;
        if (!stream->out_bytes && !stream->out_payload && (must_wait(context) || !next_fragment(context, qp))) return 0;
        int result = push_out(context, stream, pieces, is_hello ? 0 : source_pieces(context, qp, pieces));
        if (result < 0) stream->shut = 1;
        if (result <= 0) return 0;
        if (is_hello) continue;
        struct send_work *work = send_at(qp, qp->sent);
        paced(context, stream->out.payload_bytes + (uint32_t)sizeof stream->out);
        qp->send_offset += stream->out.payload_bytes;
        if (!(stream->out.flags & LAST)) continue;
        qp->send_offset = 0;
        if (work->opcode == IBV_WR_RDMA_READ) qp->reads++;
        if (work->status != IBV_WC_SUCCESS) return 0;
        qp->sent++;
        context->counters.sends++;
    }
    return 1;
}

/* All before this one. */
static void acknowledged(struct context *context, struct queue_pair *qp, uint64_t sequence)
{
    while (qp->done < sequence && qp->done < qp->sent) complete_send(context, qp, IBV_WC_SUCCESS);
}

/* Bytes of a READ go where the list says; 0: not yet all of the fragment, -1: gone. */
static int take_read(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->requester;
    struct send_work *work = send_at(qp, stream->in.sequence);
    struct iovec pieces[SGE_MAX];
    if (!stream->in_payload) return 1;
    int count = local_pieces(context, qp->base.pd, work->sges, work->count, stream->in_offset, stream->in_payload, IBV_ACCESS_LOCAL_WRITE, pieces);
    if (count < 0) work->status = IBV_WC_LOC_PROT_ERR;
    return pull_payload(context, stream, pieces, count);
}

static int take_answers(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->requester;
    for (int turn = 0; turn < 4 * FRAGMENTS_AT_ONCE; turn++) {
        if (stream->fd < 0 || qp->state != IBV_QPS_RTS) return 0;
        int fresh = stream->in_bytes < sizeof stream->in;
        int result = pull_header(stream);
        const struct packet *in = &stream->in;
        if (result > 0 && in->kind == READ_RESPONSE) {
            if (in->sequence < qp->done || in->sequence >= qp->sent) {
                result = -1;
            } else {
                if (fresh) stream->in_offset = in->address;
                acknowledged(context, qp, in->sequence);
                result = take_read(context, qp);
            }
        }
        if (result < 0) end_stream(stream);
        if (result <= 0) return 0;
        stream->in_bytes = 0;
        if (in->kind == HELLO_TAKEN) {
            stream->taken = 1;
        } else if (in->kind == READ_RESPONSE) {
            struct send_work *work = send_at(qp, in->sequence);
            if (work->status != IBV_WC_SUCCESS)
                fail_sends(context, qp, work->status);
            else if (in->flags & LAST)
                acknowledged(context, qp, in->sequence + 1);
        } else if (in->status == IBV_WC_SUCCESS) {
            acknowledged(context, qp, in->sequence + 1);
        } else {
            acknowledged(context, qp, in->sequence);
            fail_sends(context, qp, (enum ibv_wc_status)in->status);
        }
        breathe(context);
    }
    return 1;
}

static int64_t patience_ns(const struct queue_pair *qp)
{
    if (!qp->attributes.timeout) return INT64_MAX;
    double once = 4096.0 * (double)(1ull << qp->attributes.timeout) * world.time_scale;
    return (int64_t)(once * (qp->attributes.retry_cnt + 1)) + 1;
}

/* Retries are counted as time, and only while no packet could get through: a slow machine loses no connection. */
static int64_t watch_retries(struct context *context, struct queue_pair *qp)
{
    int through = qp->requester.fd >= 0 && qp->requester.taken && !is_cut(context, qp->requester.other);
    if (qp->done == qp->posted || through) {
        qp->broken_since_ns = 0;
        return INT64_MAX;
    }
    int64_t now = now_ns();
    if (!qp->broken_since_ns) qp->broken_since_ns = now;
    int64_t patience = patience_ns(qp);
    if (patience == INT64_MAX) return INT64_MAX;
    if (now - qp->broken_since_ns >= patience) {
        fail_sends(context, qp, IBV_WC_RETRY_EXC_ERR);
        return 0;
    }
    return qp->broken_since_ns + patience;
}

/* ---- the mover: responder ---- */

static void refuse(struct context *context, struct queue_pair *qp, enum ibv_wc_status status)
{
    qp->refused = 1;
    qp->refusal = status;
    if (status == IBV_WC_REM_ACCESS_ERR) raise_async(context, IBV_EVENT_QP_ACCESS_ERR, &qp->base);
    if (status == IBV_WC_REM_INV_REQ_ERR) raise_async(context, IBV_EVENT_QP_REQ_ERR, &qp->base);
}

static int is_write(uint32_t opcode) { return opcode == IBV_WR_RDMA_WRITE || opcode == IBV_WR_RDMA_WRITE_WITH_IMM; }
static int is_send(uint32_t opcode) { return opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM; }

static int wants_receive(const struct packet *message) { return message->opcode != IBV_WR_RDMA_WRITE && message->opcode != IBV_WR_RDMA_READ; }

static void begin_message(struct context *context, struct queue_pair *qp, const struct packet *in)
{
    qp->message = *in;
    int rights = qp->attributes.qp_access_flags;
    int need = is_write(in->opcode) ? IBV_ACCESS_REMOTE_WRITE : in->opcode == IBV_WR_RDMA_READ ? IBV_ACCESS_REMOTE_READ : 0;
    if ((rights & need) != need)
        refuse(context, qp, IBV_WC_REM_INV_REQ_ERR);
    else if (need && in->message_bytes && !memory_of(context, qp->base.pd, in->rkey, in->address, in->message_bytes, need))
        refuse(context, qp, IBV_WC_REM_ACCESS_ERR);
}

/* 0: none is posted, the message waits. */
static int has_receive(struct context *context, struct queue_pair *qp)
{
    if (qp->receives_done < qp->receives_posted) {
        qp->waits_for_receive = 0;
        return 1;
    }
    if (!qp->waits_for_receive) {
        qp->waits_for_receive = 1;
        qp->waits_since_ns = now_ns();
        context->counters.rnr++;
        say("ibverbs stand-in: queue pair %06x has no receive posted", qp->base.qp_num);
    }
    return 0;
}

/* Where the rest of the fragment goes; 0: nowhere. */
static int destination_pieces(struct context *context, struct queue_pair *qp, struct iovec *pieces)
{
    struct stream *stream = &qp->responder;
    const struct packet *message = &qp->message;
    if (qp->refused) return 0;
    if (is_write(message->opcode)) {
        uint64_t at = message->address + stream->in_offset;
        struct memory *memory = memory_of(context, qp->base.pd, message->rkey, at, stream->in_payload, IBV_ACCESS_REMOTE_WRITE);
        if (!memory) {
            refuse(context, qp, IBV_WC_REM_ACCESS_ERR);
            return 0;
        }
        pieces[0] = (struct iovec){memory->bytes + (at - memory->iova), stream->in_payload};
        return 1;
    }
    struct receive_work *work = receive_at(qp, qp->receives_done);
    int too_long = message->message_bytes > work->bytes;
    int count = too_long ? -1
                         : local_pieces(context, qp->base.pd, work->sges, work->count, stream->in_offset, stream->in_payload,
                                        IBV_ACCESS_LOCAL_WRITE, pieces);
    if (count >= 0) return count;
    complete_receive(context, qp, (struct ibv_wc){.status = too_long ? IBV_WC_LOC_LEN_ERR : IBV_WC_LOC_PROT_ERR, .opcode = IBV_WC_RECV}, 1);
    refuse(context, qp, too_long ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_REM_OP_ERR);
    return 0;
}

static void end_message(struct context *context, struct queue_pair *qp)
{
    const struct packet *message = &qp->message;
    if (message->opcode == IBV_WR_RDMA_READ) {
        qp->reading = 1;
        qp->read_offset = 0;
    }
    if (wants_receive(message)) {
        int has_imm = message->opcode != IBV_WR_SEND;
        struct ibv_wc wc = {
            .opcode = is_send(message->opcode) ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
            .byte_len = (uint32_t)message->message_bytes,
            .imm_data = has_imm ? message->imm : 0,
            .wc_flags = has_imm ? IBV_WC_WITH_IMM : 0,
        };
        complete_receive(context, qp, wc, message->flags & SOLICITED);
        context->counters.receives++;
    }
    qp->to_answer = message->sequence + 1;
}

/* Acknowledgements, refusals and what READs ask for, in order. 0: the socket is full, or the bytes are paced. */
static int answer(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->responder;
    struct iovec pieces[1];
    for (;;) {
        if (stream->fd < 0) return 1;
        if (stream->shut) {
            qp->answered = qp->to_answer;
            qp->reading = 0;
            if (qp->refused) qp->refused = 2;
            return 1;
        }
        if (stream->blocked) return 0;
        if (!stream->out_bytes && !stream->out_payload) {
            struct packet packet = packet_of(context, qp, ACKNOWLEDGE);
            const struct packet *message = &qp->message;
            uint64_t up_to = qp->reading ? qp->to_answer - 1 : qp->to_answer;
            if (qp->answered < up_to) {
                packet.sequence = up_to - 1;
                qp->answered = up_to;
            } else if (qp->reading) {
                uint64_t left = message->message_bytes - qp->read_offset;
                if (must_wait(context) || fault_of(context, context->device->address)->reads_held) return 0;
                if (left && !memory_of(context, qp->base.pd, message->rkey, message->address, message->message_bytes, IBV_ACCESS_REMOTE_READ)) {
                    qp->reading = 0;
                    qp->to_answer--;
                    refuse(context, qp, IBV_WC_REM_ACCESS_ERR);
                    continue;
                }
                packet.kind = READ_RESPONSE;
                packet.sequence = message->sequence;
                packet.address = qp->read_offset;
                packet.payload_bytes = (uint32_t)(left < FRAGMENT_BYTES ? left : FRAGMENT_BYTES);
                packet.flags = packet.payload_bytes == left ? LAST : 0;
                paced(context, packet.payload_bytes + (uint32_t)sizeof packet);
            } else if (qp->refused == 1) {
                packet.sequence = message->sequence;
                packet.status = qp->refusal;
                qp->refused = 2;
            } else {
                return 1;
            }
            put(stream, packet);
        }
        int count = 0;
        if (stream->out_payload) {
            static const uint8_t zeroes[FRAGMENT_BYTES];
            uint64_t at = qp->message.address + stream->out.address + (stream->out.payload_bytes - stream->out_payload);
            struct memory *memory = memory_of(context, qp->base.pd, qp->message.rkey, at, stream->out_payload, IBV_ACCESS_REMOTE_READ);
            pieces[count++] = (struct iovec){memory ? memory->bytes + (at - memory->iova) : (void *)(uintptr_t)zeroes, stream->out_payload};
        }
        int result = push_out(context, stream, pieces, count);
        if (result < 0) stream->shut = 1;
        if (result < 0) continue;
        if (!result) return 0;
        if (stream->out.kind != READ_RESPONSE) continue;
        qp->read_offset += stream->out.payload_bytes;
        if (!(stream->out.flags & LAST)) continue;
        qp->reading = 0;
        qp->answered = qp->to_answer;
        context->counters.reads++;
    }
}

static int hello_is_right(struct context *context, struct queue_pair *qp, const struct packet *hello)
{
    const struct ibv_qp_attr *own = &qp->attributes;
    uint32_t other = other_address(qp);
    const char *wrong = hello->kind != HELLO                     ? "no hello"
                        : hello->source_qpn != own->dest_qp_num  ? "another queue pair"
                        : hello->source_address != other         ? "another address"
                        : hello->psn != own->rq_psn              ? "another packet sequence number"
                        : hello->mtu != (uint32_t)own->path_mtu  ? "another path MTU"
                                                                 : NULL;
    if (!wrong) return 1;
    context->counters.refused_hellos++;
    say("ibverbs stand-in: queue pair %06x takes no packets from %06x: %s than it was told", qp->base.qp_num, hello->source_qpn, wrong);
    return 0;
}

static void accept_requester(struct queue_pair *qp)
{
    struct stream *stream = &qp->responder;
    if (stream->fd >= 0 || stream->ended || qp->lost) return;
    int fd = accept4(qp->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) return;
    *stream = (struct stream){.fd = fd, .readable = 1};
    stream->other = other_address(qp);
}

static int take_hello(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->responder;
    int result = pull_header(stream);
    if (!result) return 0;
    if (result < 0 || !hello_is_right(context, qp, &stream->in)) {
        close_stream(stream); /* and the next one may try */
        return 1;
    }
    stream->taken = 1;
    stream->in_bytes = 0;
    qp->other_rnr_retry = stream->in.rnr_retry;
    put(stream, packet_of(context, qp, HELLO_TAKEN));
    return 1;
}

/* Every step may end in the middle; 1: there may be more to do at once. */
static int take_requests(struct context *context, struct queue_pair *qp)
{
    struct stream *stream = &qp->responder;
    struct iovec pieces[SGE_MAX];
    for (int turn = 0; turn < FRAGMENTS_AT_ONCE; turn++) {
        accept_requester(qp);
        if (stream->fd < 0) return 0;
        if (!stream->taken) {
            if (!take_hello(context, qp)) return 0;
            continue;
        }
        if (qp->reading || qp->refused) return 0;
        int fresh = stream->in_bytes < sizeof stream->in;
        int result = pull_header(stream);
        const struct packet *in = &stream->in;
        if (result > 0 && fresh) {
            if (in->flags & FIRST) {
                stream->in_offset = 0;
                begin_message(context, qp, in);
            }
        }
        if (result > 0 && !qp->refused && is_send(in->opcode) && !has_receive(context, qp)) return 0;
        if (result > 0 && stream->in_payload) result = pull_payload(context, stream, pieces, destination_pieces(context, qp, pieces));
        if (result < 0) end_stream(stream);
        if (result <= 0) return 0;
        if (in->flags & LAST && !qp->refused) {
            if (wants_receive(&qp->message) && !has_receive(context, qp)) return 0;
            if (in->flags & SOLICITED) qp->message.flags |= SOLICITED;
            end_message(context, qp);
        }
        stream->in_bytes = 0;
        if (!answer(context, qp)) return 0;
        breathe(context);
    }
    return 1;
}

static const int rnr_us[32] = {655360, 10,   20,   30,   40,   60,   80,    120,   160,   240,   320,   480,   640,   960,    1280,   1920,
                               2560,   3840, 5120, 7680, 10240, 15360, 20480, 30720, 40960, 61440, 81920, 122880, 163840, 245760, 327680, 491520};

static int64_t watch_receives(struct queue_pair *qp)
{
    uint32_t rnr_retry = qp->other_rnr_retry;
    if (!qp->waits_for_receive || rnr_retry >= 7) return INT64_MAX;
    int64_t end = qp->waits_since_ns + (int64_t)((double)rnr_us[qp->attributes.min_rnr_timer & 31] * 1000.0 * (rnr_retry + 1) * world.time_scale);
    if (now_ns() < end) return end;
    qp->waits_for_receive = 0;
    qp->refused = 1;
    qp->refusal = IBV_WC_RNR_RETRY_EXC_ERR;
    return 0;
}

/* ---- the mover: queue pairs ---- */

static void close_streams(struct queue_pair *qp)
{
    end_stream(&qp->requester);
    end_stream(&qp->responder);
}

static void leave_directory(struct context *context, struct queue_pair *qp)
{
    char name[64];
    queue_pair_name(name, sizeof name, context->device->address, qp->base.qp_num);
    close(qp->listener);
    unlinkat(world.directory, name, 0);
    qp->listener = -1;
}

/* Only the mover takes them off the list, on which it walks without the lock now and then. */
static void remove_queue_pair(struct context *context, struct queue_pair *qp)
{
    leave_directory(context, qp);
    for (struct queue_pair **link = &context->queue_pairs; *link; link = &(*link)->next)
        if (*link == qp) {
            *link = qp->next;
            break;
        }
}

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns when to come again at the latest: 0: at once. */
static int64_t progress(struct context *context, struct queue_pair *qp)
{
    int64_t next = INT64_MAX;
    int more = 0;
    if (qp->state == IBV_QPS_ERR) {
        if (!qp->flushed && !qp->dying && !qp->resetting) {
            /* What was on its way through the NIC ends only now. */
            if (qp->done < qp->posted) transmit(context, qp);
            if (qp->responder.fd >= 0 && qp->responder.taken && !qp->refused && !is_held(context, qp->responder.other)) take_requests(context, qp);
            answer(context, qp);
            close_streams(qp);
            qp->flushed = 1;
        }
        flush(context, qp);
    }
    if (qp->dying || qp->resetting) {
        close_streams(qp);
        if (qp->dying) remove_queue_pair(context, qp);
        qp->dying = qp->resetting = 0;
        pthread_cond_broadcast(&context->changed);
        return INT64_MAX;
    }
    if (qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS) {
        struct stream *responder = &qp->responder;
        if (!is_held(context, other_address(qp))) more |= take_requests(context, qp);
        int64_t again = watch_receives(qp);
        more |= !again;
        next = earlier(next, again);
        int answered = answer(context, qp);
        if (!answered && is_limited(context) && !responder->blocked) next = earlier(next, context->next_send_ns);
        if (answered && qp->refused == 2 && qp->refusal != IBV_WC_RNR_RETRY_EXC_ERR) enter_error(context, qp);
        if (answered && qp->refused == 2 && qp->refusal == IBV_WC_RNR_RETRY_EXC_ERR) end_stream(responder);
    }
    if (qp->state == IBV_QPS_RTS) {
        struct stream *requester = &qp->requester;
        if (requester->fd < 0 && !requester->ended && !qp->lost) {
            if (now_ns() >= qp->connect_at_ns) connect_requester(context, qp);
            if (requester->fd < 0) next = earlier(next, qp->connect_at_ns);
        }
        if (requester->fd >= 0 && requester->readable && !is_held(context, requester->other)) more |= take_answers(context, qp);
        if (qp->state == IBV_QPS_RTS) more |= transmit(context, qp);
        if (is_limited(context) && !requester->blocked && qp->sent < qp->posted) next = earlier(next, context->next_send_ns); /* be it over by now */
        if (qp->state == IBV_QPS_RTS && qp->done < qp->posted && qp->done == qp->sent && send_at(qp, qp->done)->status != IBV_WC_SUCCESS)
            fail_sends(context, qp, send_at(qp, qp->done)->status);
        if (qp->state == IBV_QPS_RTS) next = earlier(next, watch_retries(context, qp));
    }
    if (qp->state == IBV_QPS_ERR && !qp->flushed) return 0;
    return more ? 0 : next;
}

/* ---- the mover: control ---- */

static int each_named(struct context *context, uint32_t qpn, void (*act)(struct context *context, struct queue_pair *qp))
{
    int count = 0;
    for (struct queue_pair *qp = context->queue_pairs; qp; qp = qp->next) {
        if (qpn && qp->base.qp_num != qpn) continue;
        if (qp->state != IBV_QPS_RTR && qp->state != IBV_QPS_RTS) continue;
        act(context, qp);
        count++;
    }
    return count;
}

static void fail_queue_pair(struct context *context, struct queue_pair *qp)
{
    raise_async(context, IBV_EVENT_QP_FATAL, &qp->base);
    enter_error(context, qp);
}

static void drop_connection(struct context *context, struct queue_pair *qp)
{
    (void)context;
    qp->lost = 1;
    close_streams(qp);
}

static void obey(struct context *context, const char *order, char *reply, size_t bytes)
{
    unsigned qpn = 0;
    int event = 0;
    const struct counters *c = &context->counters;
    snprintf(reply, bytes, "what is '%.40s'?", order);
    if (!strcmp(order, "reload")) {
        read_faults(context);
        snprintf(reply, bytes, "ok");
    } else if (sscanf(order, "fail %u", &qpn) == 1) {
        snprintf(reply, bytes, "ok %d", each_named(context, qpn, fail_queue_pair));
    } else if (sscanf(order, "drop %u", &qpn) == 1) {
        snprintf(reply, bytes, "ok %d", each_named(context, qpn, drop_connection));
    } else if (sscanf(order, "event %d", &event) == 1 && event >= IBV_EVENT_DEVICE_FATAL) {
        raise_async(context, (enum ibv_event_type)event, NULL);
        snprintf(reply, bytes, "ok");
    } else if (!strcmp(order, "counts")) {
        int queue_pairs = 0, queues = 0, memories = 0;
        for (struct queue_pair *qp = context->queue_pairs; qp; qp = qp->next) queue_pairs++;
        for (struct completion_queue *cq = context->completion_queues; cq; cq = cq->next) queues++;
        for (struct memory *memory = context->memories; memory; memory = memory->next) memories++;
        snprintf(reply, bytes,
                 "pid=%d queue_pairs=%d completion_queues=%d memory_regions=%d registered_bytes=%llu domains=%d channels=%d sends=%llu"
                 " receives=%llu bytes=%llu placed_bytes=%llu rnr=%llu overruns=%llu queue_full=%llu refused_hellos=%llu unmapped=%llu"
                 " errors=%llu most_completions=%llu reads=%llu",
                 (int)getpid(), queue_pairs, queues, memories, (unsigned long long)context->registered_bytes, context->domains,
                 context->channels, (unsigned long long)c->sends, (unsigned long long)c->receives, (unsigned long long)c->bytes,
                 (unsigned long long)c->placed_bytes, (unsigned long long)c->rnr, (unsigned long long)c->overruns,
                 (unsigned long long)c->queue_full, (unsigned long long)c->refused_hellos, (unsigned long long)c->unmapped,
                 (unsigned long long)c->errors, (unsigned long long)c->most_completions, (unsigned long long)c->reads);
    } else if (!strcmp(order, "queue_pairs")) {
        size_t used = 0;
        reply[0] = 0;
        for (struct queue_pair *qp = context->queue_pairs; qp && used + 128 < bytes; qp = qp->next)
            used += (size_t)snprintf(reply + used, bytes - used, "%u state=%d posted=%llu sent=%llu done=%llu receives=%llu class=%d level=%d;", qp->base.qp_num,
                                     (int)qp->state, (unsigned long long)qp->posted, (unsigned long long)qp->sent,
                                     (unsigned long long)qp->done, (unsigned long long)(qp->receives_posted - qp->receives_done),
                                     qp->attributes.ah_attr.grh.traffic_class, qp->attributes.ah_attr.sl);
    }
}

static void take_orders(struct context *context)
{
    int fd;
    while ((fd = accept4(context->control_fd, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
        char order[128] = "", reply[4096] = "";
        struct timeval limit = {2, 0};
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        if (recv(fd, order, sizeof order - 1, 0) > 0) {
            obey(context, order, reply, sizeof reply);
            send(fd, reply, strlen(reply), MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        close(fd);
    }
}

static void watch(struct pollfd *polled, int *count, int fd, int events)
{
    polled[(*count)++] = (struct pollfd){fd, (short)events, 0};
}

static void *move(void *argument)
{
    struct context *context = argument;
    struct pollfd *polled = NULL;
    int room = 0;
    int64_t next = 0;
    pthread_mutex_lock(&context->lock);
    while (!context->stop) {
        int count = 0, queue_pairs = 0;
        for (struct queue_pair *qp = context->queue_pairs; qp; qp = qp->next) queue_pairs++;
        if (room < 2 + 3 * queue_pairs) {
            room = 2 * (2 + 3 * queue_pairs);
            free(polled);
            polled = zeroed((size_t)room, sizeof *polled);
        }
        watch(polled, &count, context->wake_fd, POLLIN);
        watch(polled, &count, context->control_fd, POLLIN);
        struct queue_pair *first = context->queue_pairs;
        for (struct queue_pair *qp = first; qp; qp = qp->next) {
            uint32_t other = other_address(qp);
            int ready = qp->state == IBV_QPS_RTR || qp->state == IBV_QPS_RTS, held = is_held(context, other);
            struct stream *in = &qp->responder, *out = &qp->requester;
            int takes = !qp->waits_for_receive && !qp->reading && !qp->refused;
            watch(polled, &count, ready && !held && in->fd < 0 && !in->ended && !qp->lost ? qp->listener : -1, POLLIN);
            watch(polled, &count, ready && (in->blocked || (takes && !held)) ? in->fd : -1, (in->blocked ? POLLOUT : 0) | (takes && !held ? POLLIN : 0));
            watch(polled, &count, ready && (out->blocked || !held) ? out->fd : -1, (out->blocked ? POLLOUT : 0) | (held ? 0 : POLLIN));
        }
        struct timespec limit = {0, 0}, *forever = NULL;
        if (context->changes) next = 0;
        if (next != INT64_MAX) {
            int64_t left = next - now_ns();
            if (left > 0) limit = (struct timespec){left / 1000000000, left % 1000000000};
            forever = &limit;
        }
        context->sleeping = !context->changes;
        pthread_mutex_unlock(&context->lock);
        ppoll(polled, (nfds_t)count, forever, NULL);
        pthread_mutex_lock(&context->lock);
        context->sleeping = 0;
        eventfd_t ignored;
        if (polled[0].revents) eventfd_read(context->wake_fd, &ignored);
        if (polled[1].revents) take_orders(context);
        int at = 2;
        for (struct queue_pair *qp = first; qp; qp = qp->next, at += 3) {
            if (polled[at + 1].revents & (POLLOUT | POLLHUP | POLLERR)) qp->responder.blocked = 0;
            if (polled[at + 2].revents & (POLLOUT | POLLHUP | POLLERR)) qp->requester.blocked = 0;
            qp->requester.readable = (polled[at + 2].revents & ~POLLOUT) != 0;
        }
        next = INT64_MAX;
        context->changes = 0;
        for (struct queue_pair *qp = context->queue_pairs, *after; qp; qp = after) {
            after = qp->next; /* its owner may free it once it is let go */
            next = earlier(next, progress(context, qp));
            breathe(context);
        }
    }
    pthread_mutex_unlock(&context->lock);
    free(polled);
    return NULL;
}

/* ---- the library's functions: devices ---- */

EXPORTED struct ibv_device **ibv_get_device_list(int *count)
{
    if (!start()) {
        if (count) *count = 0;
        errno = ENOSYS;
        return NULL;
    }
    struct ibv_device **list = zeroed((size_t)world.device_count + 1, sizeof *list);
    for (int i = 0; i < world.device_count; i++) list[i] = &world.devices[i].base;
    if (count) *count = world.device_count;
    return list;
}

EXPORTED void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
    pthread_mutex_lock(&world.lock);
    world.lists--;
    pthread_mutex_unlock(&world.lock);
    forget();
}

EXPORTED const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
EXPORTED int ibv_get_device_index(struct ibv_device *device) { return (int)((struct device *)device - world.devices); }
EXPORTED int ibv_fork_init(void) { return 0; }
EXPORTED enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

static uint64_t guid_of(const struct device *device) { return htobe64(0x0252540000000000ull | ntohl(device->address)); }

EXPORTED __be64 ibv_get_device_guid(struct ibv_device *device) { return guid_of((struct device *)device); }

static int null_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
static int null_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
static int null_poll_cq(struct ibv_cq *base, int count, struct ibv_wc *wc);
static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
static int poll_cq(struct ibv_cq *base, int count, struct ibv_wc *wc);
static int req_notify_cq(struct ibv_cq *base, int solicited_only);
static struct ibv_qp *create_qp_ex(struct ibv_context *base, struct ibv_qp_init_attr_ex *wanted);

static int start_mover(struct context *context)
{
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGABRT);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&context->mover, NULL, move, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

EXPORTED struct ibv_context *ibv_open_device(struct ibv_device *base)
{
    struct context *context = zeroed(1, sizeof *context);
    struct device *device = (struct device *)base;
    context->device = device;
    context->extended.context.device = base;
    context->extended.context.ops.post_send = world.null ? null_post_send : post_send;
    context->extended.context.ops.post_recv = world.null ? null_post_recv : post_recv;
    context->extended.context.ops.poll_cq = world.null ? null_poll_cq : poll_cq;
    context->extended.context.ops.req_notify_cq = req_notify_cq;
    context->extended.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->extended.sz = sizeof context->extended;
    context->extended.create_qp_ex = create_qp_ex;
    context->extended.context.cmd_fd = -1;
    context->extended.context.num_comp_vectors = 1;
    context->extended.context.async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    context->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&context->extended.context.mutex, NULL);
    pthread_mutex_init(&context->lock, NULL);
    pthread_cond_init(&context->changed, NULL);
    pthread_mutex_lock(&world.lock);
    int number = ++world.opened;
    pthread_mutex_unlock(&world.lock);
    snprintf(context->control_name, sizeof context->control_name, "control-%s-%d-%d", device->dotted, (int)getpid(), number);
    context->control_fd = listening(context->control_name, SOCK_SEQPACKET, 8);
    /* Two processes hardly ever have the same keys, so that a key of the wrong one is found out. */
    context->next_key = (uint32_t)getpid() * 2654435761u + (uint32_t)number * 40503u;
    context->next_qpn = 0x11 + ((uint32_t)getpid() * 64u & 0xffff);
    read_faults(context);
    struct event_node *at_start;
    while ((at_start = take_event(&context->async))) { /* a port that is down from the start is no event */
        eventfd_t count;
        eventfd_read(context->extended.context.async_fd, &count);
        free(at_start);
    }
    if (context->control_fd < 0 || context->extended.context.async_fd < 0 || context->wake_fd < 0 || (errno = start_mover(context))) {
        int error = errno;
        close(context->control_fd);
        close(context->extended.context.async_fd);
        close(context->wake_fd);
        free(context);
        errno = error;
        return NULL;
    }
    pthread_mutex_lock(&world.lock);
    context->next = world.contexts;
    world.contexts = context;
    pthread_mutex_unlock(&world.lock);
    return &context->extended.context;
}

EXPORTED int ibv_close_device(struct ibv_context *base)
{
    struct context *context = context_of(base);
    enter(context);
    context->stop = 1;
    wake(context);
    int left = context->domains || context->channels || context->queue_pairs || context->completion_queues;
    leave(context);
    pthread_join(context->mover, NULL);
    pthread_mutex_lock(&world.lock);
    for (struct context **link = &world.contexts; *link; link = &(*link)->next)
        if (*link == context) {
            *link = context->next;
            break;
        }
    pthread_mutex_unlock(&world.lock);
    for (struct queue_pair *qp = context->queue_pairs; qp; qp = qp->next) {
        close_streams(qp);
        leave_directory(context, qp);
    }
    close(context->control_fd);
    unlinkat(world.directory, context->control_name, 0);
    close(context->wake_fd);
    close(context->extended.context.async_fd);
    for (struct event_node *node; (node = take_event(&context->async));) free(node);
    if (left)
        say("ibverbs stand-in: %s is closed before what was made on it", context->device->base.name);
    else
        free(context); /* else the objects still point to it */
    forget();
    return 0;
}

EXPORTED int ibv_query_device(struct ibv_context *base, struct ibv_device_attr *attributes)
{
    *attributes = world.limits;
    attributes->node_guid = attributes->sys_image_guid = guid_of(context_of(base)->device);
    return 0;
}

EXPORTED int ibv_query_port(struct ibv_context *base, uint8_t port, struct _compat_ibv_port_attr *compat)
{
    struct context *context = context_of(base);
    if (port != 1) return EINVAL;
    enter(context);
    struct ibv_port_attr found = {
        .state = context->down ? IBV_PORT_DOWN : IBV_PORT_ACTIVE,
        .max_mtu = IBV_MTU_4096,
        .active_mtu = world.mtu,
        .gid_tbl_len = GIDS,
        .port_cap_flags = IBV_PORT_CM_SUP,
        .max_msg_sz = 1u << 30,
        .pkey_tbl_len = 1,
        .active_width = 2,
        .active_speed = 32,
        .phys_state = context->down ? 3 : 5,
        .link_layer = IBV_LINK_LAYER_ETHERNET,
    };
    leave(context);
    memcpy(compat, &found, offsetof(struct ibv_port_attr, port_cap_flags2));
    return 0;
}

static union ibv_gid gid_of(const struct device *device, int index)
{
    union ibv_gid gid = {.raw = {0}};
    if (index < 2) {
        gid.raw[0] = 0xfe;
        gid.raw[1] = 0x80;
        gid.raw[8] = 2;
    } else {
        gid.raw[10] = gid.raw[11] = 0xff;
    }
    memcpy(&gid.raw[12], &device->address, 4);
    return gid;
}

EXPORTED int ibv_query_gid(struct ibv_context *base, uint8_t port, int index, union ibv_gid *gid)
{
    if (port != 1 || index < 0 || index >= GIDS) {
        errno = EINVAL;
        return -1;
    }
    *gid = gid_of(context_of(base)->device, index);
    return 0;
}

EXPORTED int _ibv_query_gid_ex(struct ibv_context *base, uint32_t port, uint32_t index, struct ibv_gid_entry *entry, uint32_t flags, size_t bytes)
{
    if (port != 1 || index >= GIDS || flags || bytes < sizeof *entry) return EINVAL;
    *entry = (struct ibv_gid_entry){
        .gid = gid_of(context_of(base)->device, (int)index),
        .gid_index = index,
        .port_num = 1,
        .gid_type = index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1,
        .ndev_ifindex = 1,
    };
    return 0;
}

EXPORTED ssize_t _ibv_query_gid_table(struct ibv_context *base, struct ibv_gid_entry *entries, size_t most, uint32_t flags, size_t bytes)
{
    if (flags || bytes < sizeof *entries || most < GIDS) return -EINVAL;
    for (uint32_t i = 0; i < GIDS; i++) _ibv_query_gid_ex(base, 1, i, &entries[i], 0, sizeof entries[i]);
    return GIDS;
}

EXPORTED int ibv_query_gid_type(struct ibv_context *base, uint8_t port, unsigned index, int *type)
{
    (void)base;
    if (port != 1 || index >= GIDS) return -1;
    *type = index % 2; /* 0: InfiniBand or RoCE v1, 1: RoCE v2 */
    return 0;
}

EXPORTED int ibv_query_pkey(struct ibv_context *base, uint8_t port, int index, __be16 *pkey)
{
    (void)base;
    if (port != 1 || index) return -1;
    *pkey = htobe16(0xffff);
    return 0;
}

EXPORTED int ibv_get_pkey_index(struct ibv_context *base, uint8_t port, __be16 pkey)
{
    (void)base;
    return port == 1 && pkey == htobe16(0xffff) ? 0 : -1;
}

/* ---- events ---- */

EXPORTED int ibv_get_async_event(struct ibv_context *base, struct ibv_async_event *event)
{
    struct context *context = context_of(base);
    for (;;) {
        uint64_t one;
        if (read(base->async_fd, &one, sizeof one) != sizeof one) return -1;
        enter(context);
        struct event_node *node = take_event(&context->async);
        if (node) {
            *event = node->async;
            if (event->event_type == IBV_EVENT_CQ_ERR)
                ((struct completion_queue *)event->element.cq)->async_taken++;
            else if (event->event_type < IBV_EVENT_PATH_MIG_ERR)
                ((struct queue_pair *)event->element.qp)->async_taken++;
        }
        leave(context);
        free(node);
        if (node) return 0;
    }
}

EXPORTED void ibv_ack_async_event(struct ibv_async_event *event)
{
    struct context *context;
    uint64_t *acknowledged;
    switch (event->event_type) {
    case IBV_EVENT_CQ_ERR:
        context = context_of(event->element.cq->context);
        acknowledged = &((struct completion_queue *)event->element.cq)->async_acknowledged;
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
        context = context_of(event->element.qp->context);
        acknowledged = &((struct queue_pair *)event->element.qp)->async_acknowledged;
        break;
    default:
        return;
    }
    enter(context);
    ++*acknowledged;
    pthread_cond_broadcast(&context->changed);
    leave(context);
}

EXPORTED struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *base)
{
    struct context *context = context_of(base);
    struct channel *channel = zeroed(1, sizeof *channel);
    channel->base.context = base;
    channel->base.fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
    if (channel->base.fd < 0) {
        free(channel);
        return NULL;
    }
    enter(context);
    context->channels++;
    leave(context);
    return &channel->base;
}

EXPORTED int ibv_destroy_comp_channel(struct ibv_comp_channel *base)
{
    struct context *context = context_of(base->context);
    enter(context);
    int busy = base->refcnt > 0;
    context->channels -= !busy;
    leave(context);
    if (busy) return EBUSY;
    close(base->fd);
    free(base);
    return 0;
}

EXPORTED int ibv_get_cq_event(struct ibv_comp_channel *base, struct ibv_cq **cq, void **cq_context)
{
    struct context *context = context_of(base->context);
    for (;;) {
        uint64_t one;
        if (read(base->fd, &one, sizeof one) != sizeof one) return -1;
        enter(context);
        struct event_node *node = take_event(&((struct channel *)base)->events);
        if (node) {
            *cq = &node->cq->base;
            *cq_context = node->cq->base.cq_context;
            node->cq->events_taken++;
        }
        leave(context);
        free(node);
        if (node) return 0;
    }
}

EXPORTED void ibv_ack_cq_events(struct ibv_cq *base, unsigned count)
{
    struct context *context = context_of(base->context);
    enter(context);
    ((struct completion_queue *)base)->events_acknowledged += count;
    pthread_cond_broadcast(&context->changed);
    leave(context);
}

/* ---- protection domains and memory ---- */

EXPORTED struct ibv_pd *ibv_alloc_pd(struct ibv_context *base)
{
    struct context *context = context_of(base);
    struct domain *domain = zeroed(1, sizeof *domain);
    domain->base.context = base;
    enter(context);
    domain->base.handle = (uint32_t)++context->domains;
    leave(context);
    return &domain->base;
}

EXPORTED int ibv_dealloc_pd(struct ibv_pd *base)
{
    struct context *context = context_of(base->context);
    enter(context);
    int busy = ((struct domain *)base)->users > 0;
    context->domains -= !busy;
    leave(context);
    if (busy) return EBUSY;
    free(base);
    return 0;
}

/* All of it, and writable if asked for: what a NIC would pin. */
static int is_mapped(uint64_t address, uint64_t bytes, int writable)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512], rights[8];
    unsigned long long begin, end, at = address;
    while (maps && at < address + bytes && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%llx-%llx %7s", &begin, &end, rights) != 3 || end <= at) continue;
        if (begin > at || rights[0] != 'r' || (writable && rights[1] != 'w')) break;
        at = end;
    }
    if (maps) fclose(maps);
    return at >= address + bytes;
}

static int refuse_registration(struct context *context, uint64_t bytes, int access, int error)
{
    enter(context);
    const struct fault *fault = fault_of(context, context->device->address);
    if (!error) error = fault->registration;
    if (!error && access & IBV_ACCESS_RELAXED_ORDERING) error = fault->relaxed;
    if (!error && fault->memory_limit && context->registered_bytes + bytes > fault->memory_limit) error = ENOMEM;
    if (!error && bytes > world.limits.max_mr_size) error = ENOMEM;
    if (!error && (!bytes || (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE)))) error = EINVAL;
    leave(context);
    return error;
}

static struct ibv_mr *add_memory(struct ibv_pd *pd, void *address, uint8_t *bytes, uint64_t length, uint64_t iova, int access, int mapped)
{
    struct context *context = context_of(pd->context);
    struct memory *memory = zeroed(1, sizeof *memory);
    memory->base = (struct ibv_mr){.context = pd->context, .pd = pd, .addr = address, .length = length};
    memory->bytes = bytes;
    memory->iova = iova;
    memory->access = access;
    memory->mapped = mapped;
    enter(context);
    context->next_key += 0x101;
    memory->base.lkey = memory->base.rkey = memory->base.handle = context->next_key;
    memory->next = context->memories;
    context->memories = memory;
    context->registered_bytes += length;
    ((struct domain *)pd)->users++;
    leave(context);
    return &memory->base;
}

EXPORTED struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t bytes, uint64_t iova, unsigned access)
{
    struct context *context = context_of(pd->context);
    int error = refuse_registration(context, bytes, (int)access, 0);
    if (!error && !is_mapped((uint64_t)(uintptr_t)address, bytes, (access & IBV_ACCESS_LOCAL_WRITE) != 0)) error = EFAULT;
    if (error) {
        errno = error;
        return NULL;
    }
    return add_memory(pd, address, address, bytes, iova, (int)access, 0);
}

EXPORTED struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t bytes, int access)
{
    return ibv_reg_mr_iova2(pd, address, bytes, (uint64_t)(uintptr_t)address, (unsigned)access);
}

EXPORTED struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t bytes, uint64_t iova, int access)
{
    return ibv_reg_mr_iova2(pd, address, bytes, iova, (unsigned)access);
}

EXPORTED struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access)
{
    struct context *context = context_of(pd->context);
    uint64_t before = offset % (uint64_t)sysconf(_SC_PAGESIZE);
    enter(context);
    int error = fault_of(context, context->device->address)->dmabuf;
    leave(context);
    error = refuse_registration(context, bytes, access, error);
    uint8_t *mapped = MAP_FAILED;
    if (!error && (iova - offset) % (uint64_t)sysconf(_SC_PAGESIZE)) error = EINVAL;
    if (!error) mapped = mmap(NULL, before + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - before));
    if (!error && mapped == MAP_FAILED) error = errno == EBADF ? EBADF : EOPNOTSUPP;
    if (error) {
        errno = error;
        return NULL;
    }
    return add_memory(pd, NULL, mapped + before, bytes, iova, access, 1);
}

EXPORTED int ibv_dereg_mr(struct ibv_mr *base)
{
    struct context *context = context_of(base->context);
    struct memory *memory = (struct memory *)base;
    enter(context);
    for (struct memory **link = &context->memories; *link; link = &(*link)->next)
        if (*link == memory) {
            *link = memory->next;
            break;
        }
    context->registered_bytes -= base->length;
    ((struct domain *)base->pd)->users--;
    leave(context);
    uint64_t before = (uint64_t)(uintptr_t)memory->bytes % (uint64_t)sysconf(_SC_PAGESIZE);
    if (memory->mapped) munmap(memory->bytes - before, before + base->length);
    free(memory);
    return 0;
}

/* ---- completion queues ---- */

/* As a command of a device may be. */
static void take_time(struct context *context)
{
    enter(context);
    uint64_t ms = fault_of(context, context->device->address)->slow_ms;
    leave(context);
    struct timespec pause = {(time_t)(ms / 1000), (long)(ms % 1000) * 1000000};
    while (ms && nanosleep(&pause, &pause) && errno == EINTR) continue;
}

EXPORTED struct ibv_cq *ibv_create_cq(struct ibv_context *base, int entries, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
    struct context *context = context_of(base);
    if (entries < 1 || entries > world.limits.max_cqe || vector < 0 || vector >= base->num_comp_vectors) {
        errno = EINVAL;
        return NULL;
    }
    take_time(context);
    struct completion_queue *cq = zeroed(1, sizeof *cq);
    cq->base.context = base;
    cq->base.channel = channel;
    cq->base.cq_context = cq_context;
    cq->base.cqe = entries;
    cq->ring = zeroed((size_t)entries, sizeof *cq->ring);
    pthread_mutex_init(&cq->base.mutex, NULL);
    pthread_cond_init(&cq->base.cond, NULL);
    enter(context);
    if (channel) channel->refcnt++;
    cq->next = context->completion_queues;
    context->completion_queues = cq;
    leave(context);
    return &cq->base;
}

EXPORTED int ibv_destroy_cq(struct ibv_cq *base)
{
    struct context *context = context_of(base->context);
    struct completion_queue *cq = (struct completion_queue *)base;
    enter(context);
    if (cq->queue_pairs) {
        leave(context);
        return EBUSY;
    }
    for (struct completion_queue **link = &context->completion_queues; *link; link = &(*link)->next)
        if (*link == cq) {
            *link = cq->next;
            break;
        }
    if (base->channel) {
        drop_events(&((struct channel *)base->channel)->events, base->channel->fd, cq);
        base->channel->refcnt--;
    }
    drop_events(&context->async, context->extended.context.async_fd, cq);
    while (cq->events_taken != cq->events_acknowledged || cq->async_taken != cq->async_acknowledged) wait_for_change(context);
    leave(context);
    free(cq->ring);
    free(cq);
    return 0;
}

static int poll_cq(struct ibv_cq *base, int most, struct ibv_wc *wc)
{
    struct completion_queue *cq = (struct completion_queue *)base;
    struct context *context = context_of(base->context);
    if (!atomic_load_explicit(&cq->count, memory_order_acquire)) return 0;
    enter(context);
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    int taken = 0;
    while (taken < most && count) {
        const struct completion *completion = &cq->ring[cq->head];
        struct queue_pair *qp = completion->qp;
        wc[taken++] = completion->wc;
        if (qp && completion->is_receive) qp->receives_reaped = completion->position + 1;
        if (qp && !completion->is_receive) qp->reaped = completion->position + 1;
        cq->head = (cq->head + 1) % (uint32_t)base->cqe;
        count--;
    }
    atomic_store_explicit(&cq->count, count, memory_order_release);
    leave(context);
    return taken;
}

static int req_notify_cq(struct ibv_cq *base, int solicited_only)
{
    struct completion_queue *cq = (struct completion_queue *)base;
    struct context *context = context_of(base->context);
    enter(context);
    if (cq->armed != 1) cq->armed = solicited_only ? 2 : 1;
    leave(context);
    return 0;
}

/* ---- queue pairs ---- */

static int bind_queue_pair(struct context *context, struct queue_pair *qp)
{
    for (int attempt = 0; attempt < 65536; attempt++) {
        char name[64];
        qp->base.qp_num = context->next_qpn = context->next_qpn < 0xfffffe ? context->next_qpn + 1 : 0x11;
        queue_pair_name(name, sizeof name, context->device->address, qp->base.qp_num);
        qp->listener = listening(name, SOCK_STREAM, 8);
        if (qp->listener >= 0) return 0;
        if (errno != EADDRINUSE) return errno;
    }
    return ENOMEM;
}

EXPORTED struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *wanted)
{
    struct context *context = context_of(pd->context);
    const struct ibv_qp_cap *cap = &wanted->cap;
    int sges = world.limits.max_sge, works = world.limits.max_qp_wr, error = 0;
    if (wanted->qp_type != IBV_QPT_RC || wanted->srq) error = EOPNOTSUPP;
    if (!wanted->send_cq || !wanted->recv_cq || cap->max_send_wr > (uint32_t)works || cap->max_recv_wr > (uint32_t)works ||
        cap->max_send_sge > (uint32_t)sges || cap->max_recv_sge > (uint32_t)sges || cap->max_inline_data > world.max_inline)
        error = EINVAL;
    struct queue_pair *qp = zeroed(1, sizeof *qp);
    qp->requester.fd = qp->responder.fd = -1;
    enter(context);
    int made = 0;
    for (struct queue_pair *other = context->queue_pairs; other; other = other->next) made++;
    if (!error && made >= world.limits.max_qp) error = ENOMEM;
    if (!error) error = bind_queue_pair(context, qp);
    if (error) {
        leave(context);
        free(qp);
        errno = error;
        return NULL;
    }
    qp->created = *wanted;
    qp->base.context = pd->context;
    qp->base.qp_context = wanted->qp_context;
    qp->base.pd = pd;
    qp->base.send_cq = wanted->send_cq;
    qp->base.recv_cq = wanted->recv_cq;
    qp->base.qp_type = IBV_QPT_RC;
    qp->base.handle = qp->base.qp_num;
    qp->base.state = qp->state = IBV_QPS_RESET;
    pthread_mutex_init(&qp->base.mutex, NULL);
    pthread_cond_init(&qp->base.cond, NULL);
    qp->sends = zeroed(cap->max_send_wr, sizeof *qp->sends);
    qp->receives = zeroed(cap->max_recv_wr, sizeof *qp->receives);
    for (uint32_t i = 0; i < cap->max_send_wr; i++) qp->sends[i].sges = zeroed(cap->max_send_sge, sizeof(struct ibv_sge));
    for (uint32_t i = 0; i < cap->max_recv_wr; i++) qp->receives[i].sges = zeroed(cap->max_recv_sge, sizeof(struct ibv_sge));
    ((struct completion_queue *)wanted->send_cq)->queue_pairs++;
    ((struct completion_queue *)wanted->recv_cq)->queue_pairs++;
    ((struct domain *)pd)->users++;
    qp->next = context->queue_pairs;
    context->queue_pairs = qp;
    leave(context);
    return &qp->base;
}

static void forget_completions(struct completion_queue *cq, const struct queue_pair *qp)
{
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    for (uint32_t i = 0; i < count; i++) {
        struct completion *completion = &cq->ring[(cq->head + i) % (uint32_t)cq->base.cqe];
        if (completion->qp == qp) completion->qp = NULL;
    }
}

EXPORTED int ibv_destroy_qp(struct ibv_qp *base)
{
    struct context *context = context_of(base->context);
    struct queue_pair *qp = (struct queue_pair *)base;
    struct completion_queue *send_cq = (struct completion_queue *)base->send_cq, *recv_cq = (struct completion_queue *)base->recv_cq;
    take_time(context);
    enter(context);
    qp->dying = 1;
    wake(context);
    while (qp->dying) wait_for_change(context);
    forget_completions(send_cq, qp);
    forget_completions(recv_cq, qp);
    send_cq->queue_pairs--;
    recv_cq->queue_pairs--;
    ((struct domain *)base->pd)->users--;
    drop_events(&context->async, context->extended.context.async_fd, base);
    while (qp->async_taken != qp->async_acknowledged) wait_for_change(context);
    leave(context);
    for (uint32_t i = 0; i < qp->created.cap.max_send_wr; i++) {
        free(qp->sends[i].sges);
        free(qp->sends[i].inline_bytes);
    }
    for (uint32_t i = 0; i < qp->created.cap.max_recv_wr; i++) free(qp->receives[i].sges);
    free(qp->sends);
    free(qp->receives);
    free(qp->built);
    free(qp->built_sges);
    free(qp);
    return 0;
}

/* What the kernel's table asks for of a reliable connection. */
static int mask_is_right(enum ibv_qp_state from, enum ibv_qp_state to, int mask)
{
    const int first = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    int required = 0, optional = 0;
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) {
        optional = 0;
    } else if (from == IBV_QPS_RESET && to == IBV_QPS_INIT) {
        required = first;
    } else if (from == IBV_QPS_INIT && to == IBV_QPS_INIT) {
        optional = first;
    } else if (from == IBV_QPS_INIT && to == IBV_QPS_RTR) {
        required = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        optional = IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX;
    } else if (from == IBV_QPS_RTR && to == IBV_QPS_RTS) {
        required = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
        optional = IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE;
    } else if (from == IBV_QPS_RTS && to == IBV_QPS_RTS) {
        optional = IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE | IBV_QP_MIN_RNR_TIMER;
    } else {
        return 0;
    }
    return (mask & required) == required && !(mask & ~(required | optional | IBV_QP_STATE));
}

static int values_are_right(struct context *context, const struct ibv_qp_attr *wanted, int mask)
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    if (mask & IBV_QP_PORT && wanted->port_num != 1) return EINVAL;
    if (mask & IBV_QP_PKEY_INDEX && wanted->pkey_index) return EINVAL;
    if (mask & IBV_QP_TIMEOUT && wanted->timeout > 31) return EINVAL;
    if (mask & IBV_QP_RETRY_CNT && wanted->retry_cnt > 7) return EINVAL;
    if (mask & IBV_QP_RNR_RETRY && wanted->rnr_retry > 7) return EINVAL;
    if (mask & IBV_QP_MIN_RNR_TIMER && wanted->min_rnr_timer > 31) return EINVAL;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && wanted->max_rd_atomic > READS_MAX) return EINVAL;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC && wanted->max_dest_rd_atomic > READS_MAX) return EINVAL;
    if (mask & IBV_QP_PATH_MTU && (wanted->path_mtu < IBV_MTU_256 || wanted->path_mtu > world.mtu)) return EINVAL;
    if (mask & (IBV_QP_RQ_PSN | IBV_QP_SQ_PSN) && (wanted->rq_psn > 0xffffff || wanted->sq_psn > 0xffffff)) return EINVAL;
    if (mask & IBV_QP_AV) {
        const struct ibv_ah_attr *address = &wanted->ah_attr;
        if (!address->is_global || address->port_num != 1 || address->grh.sgid_index >= GIDS) return EINVAL;
        if (memcmp(address->grh.dgid.raw, mapped, sizeof mapped)) return EINVAL;
        if (address->grh.sgid_index != GIDS_ROCE_V2) return EINVAL; /* the other end speaks v2 */
        if (context->down) return ENETUNREACH;
    }
    return 0;
}

static void take_values(struct ibv_qp_attr *own, const struct ibv_qp_attr *wanted, int mask)
{
    if (mask & IBV_QP_ACCESS_FLAGS) own->qp_access_flags = wanted->qp_access_flags;
    if (mask & IBV_QP_PKEY_INDEX) own->pkey_index = wanted->pkey_index;
    if (mask & IBV_QP_PORT) own->port_num = wanted->port_num;
    if (mask & IBV_QP_AV) own->ah_attr = wanted->ah_attr;
    if (mask & IBV_QP_PATH_MTU) own->path_mtu = wanted->path_mtu;
    if (mask & IBV_QP_TIMEOUT) own->timeout = wanted->timeout;
    if (mask & IBV_QP_RETRY_CNT) own->retry_cnt = wanted->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY) own->rnr_retry = wanted->rnr_retry;
    if (mask & IBV_QP_RQ_PSN) own->rq_psn = wanted->rq_psn;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC) own->max_rd_atomic = wanted->max_rd_atomic;
    if (mask & IBV_QP_MIN_RNR_TIMER) own->min_rnr_timer = wanted->min_rnr_timer;
    if (mask & IBV_QP_SQ_PSN) own->sq_psn = wanted->sq_psn;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) own->max_dest_rd_atomic = wanted->max_dest_rd_atomic;
    if (mask & IBV_QP_DEST_QPN) own->dest_qp_num = wanted->dest_qp_num;
}

static void reset(struct context *context, struct queue_pair *qp)
{
    qp->state = IBV_QPS_RESET;
    qp->resetting = 1;
    wake(context);
    while (qp->resetting) wait_for_change(context);
    forget_completions((struct completion_queue *)qp->base.send_cq, qp);
    forget_completions((struct completion_queue *)qp->base.recv_cq, qp);
    qp->posted = qp->sent = qp->done = qp->reaped = qp->send_offset = 0;
    qp->receives_posted = qp->receives_done = qp->receives_reaped = 0;
    qp->answered = qp->to_answer = qp->read_offset = 0;
    qp->refused = qp->waits_for_receive = qp->reading = qp->reads = qp->flushed = qp->lost = 0;
    qp->broken_since_ns = qp->connect_at_ns = 0;
    qp->requester = qp->responder = (struct stream){.fd = -1};
}

EXPORTED int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *wanted, int mask)
{
    struct context *context = context_of(base->context);
    struct queue_pair *qp = (struct queue_pair *)base;
    enter(context);
    enum ibv_qp_state from = mask & IBV_QP_CUR_STATE ? wanted->cur_qp_state : qp->state;
    enum ibv_qp_state to = mask & IBV_QP_STATE ? wanted->qp_state : from;
    int error = from != qp->state || !mask_is_right(from, to, mask) ? EINVAL : values_are_right(context, wanted, mask);
    if (to == IBV_QPS_ERR && !error) error = fault_of(context, context->device->address)->state;
    if (!error) {
        take_values(&qp->attributes, wanted, mask);
        if (to == IBV_QPS_RESET) {
            reset(context, qp);
        } else if (to == IBV_QPS_ERR) {
            enter_error(context, qp);
        } else {
            qp->state = to;
            wake(context);
        }
        base->state = to;
    }
    leave(context);
    if (error) errno = error;
    return error;
}

EXPORTED int ibv_query_qp(struct ibv_qp *base, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *created)
{
    struct context *context = context_of(base->context);
    struct queue_pair *qp = (struct queue_pair *)base;
    (void)mask;
    enter(context);
    *attributes = qp->attributes;
    attributes->qp_state = attributes->cur_qp_state = base->state = qp->state;
    attributes->cap = qp->created.cap;
    *created = qp->created;
    leave(context);
    return 0;
}

static int take_send(struct context *context, struct queue_pair *qp, const struct ibv_send_wr *wr)
{
    int needs_memory = wr->opcode == IBV_WR_RDMA_WRITE || wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM || wr->opcode == IBV_WR_RDMA_READ;
    uint64_t bytes = 0;
    if (qp->state != IBV_QPS_RTS && qp->state != IBV_QPS_ERR) return EINVAL;
    if (!needs_memory && !is_send(wr->opcode)) return EINVAL;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->created.cap.max_send_sge) return EINVAL;
    if (qp->posted - qp->reaped >= qp->created.cap.max_send_wr) {
        context->counters.queue_full++;
        return ENOMEM;
    }
    for (int i = 0; i < wr->num_sge; i++) bytes += wr->sg_list[i].length;
    int is_inline = (wr->send_flags & IBV_SEND_INLINE) != 0;
    if (bytes > 1u << 30 || (is_inline && (bytes > qp->created.cap.max_inline_data || wr->opcode == IBV_WR_RDMA_READ))) return EINVAL;
    struct send_work *work = send_at(qp, qp->posted);
    struct ibv_sge *sges = work->sges;
    free(work->inline_bytes);
    *work = (struct send_work){.wr_id = wr->wr_id, .bytes = bytes, .sges = sges, .count = wr->num_sge, .opcode = (int)wr->opcode, .flags = (int)wr->send_flags};
    work->imm = wr->imm_data;
    if (needs_memory) {
        work->address = wr->wr.rdma.remote_addr;
        work->rkey = wr->wr.rdma.rkey;
    }
    if (wr->num_sge) memcpy(sges, wr->sg_list, (size_t)wr->num_sge * sizeof *sges);
    if (is_inline) {
        uint64_t at = 0;
        work->inline_bytes = zeroed(1, bytes);
        for (int i = 0; i < wr->num_sge; i++) {
            memcpy(work->inline_bytes + at, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
            at += wr->sg_list[i].length;
        }
    }
    qp->posted++;
    return 0;
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct context *context = context_of(base->context);
    int error = 0;
    enter(context);
    for (; wr && !error; wr = error ? wr : wr->next) error = take_send(context, (struct queue_pair *)base, wr);
    if (error) *bad = wr;
    int asleep = must_wake(context);
    leave(context); /* first, or the mover would wait for the lock at once */
    if (asleep && eventfd_write(context->wake_fd, 1)) abort();
    return error;
}

static int take_receive(struct queue_pair *qp, const struct ibv_recv_wr *wr)
{
    if (qp->state == IBV_QPS_RESET) return EINVAL;
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > qp->created.cap.max_recv_sge) return EINVAL;
    if (qp->receives_posted - qp->receives_reaped >= qp->created.cap.max_recv_wr) return ENOMEM;
    struct receive_work *work = receive_at(qp, qp->receives_posted);
    work->wr_id = wr->wr_id;
    work->count = wr->num_sge;
    work->bytes = 0;
    for (int i = 0; i < wr->num_sge; i++) {
        work->sges[i] = wr->sg_list[i];
        work->bytes += wr->sg_list[i].length;
    }
    qp->receives_posted++;
    return 0;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct context *context = context_of(base->context);
    struct queue_pair *qp = (struct queue_pair *)base;
    int error = 0;
    enter(context);
    for (; wr && !error; wr = error ? wr : wr->next) error = take_receive(qp, wr);
    if (error) *bad = wr;
    if (qp->waits_for_receive || qp->state == IBV_QPS_ERR) wake(context);
    leave(context);
    return error;
}

/* ---- work requests by calls: collected, and posted by wr_complete ---- */

static struct queue_pair *queue_pair_of(struct ibv_qp_ex *qp) { return (struct queue_pair *)qp; }

static void wr_start(struct ibv_qp_ex *base)
{
    struct queue_pair *qp = queue_pair_of(base);
    qp->built_count = 0;
    qp->built_error = 0;
}

static void build(struct ibv_qp_ex *base, enum ibv_wr_opcode opcode, uint32_t rkey, uint64_t address, __be32 imm)
{
    struct queue_pair *qp = queue_pair_of(base);
    if (qp->built_count == qp->created.cap.max_send_wr) {
        qp->built_error = ENOMEM;
        return;
    }
    struct ibv_send_wr *wr = &qp->built[qp->built_count];
    *wr = (struct ibv_send_wr){.wr_id = base->wr_id, .opcode = opcode, .send_flags = base->wr_flags, .imm_data = imm};
    wr->wr.rdma.remote_addr = address;
    wr->wr.rdma.rkey = rkey;
    wr->sg_list = &qp->built_sges[qp->built_count * qp->created.cap.max_send_sge];
    if (qp->built_count) wr[-1].next = wr;
    qp->built_count++;
}

static void wr_rdma_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t address) { build(qp, IBV_WR_RDMA_WRITE, rkey, address, 0); }
static void wr_rdma_read(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t address) { build(qp, IBV_WR_RDMA_READ, rkey, address, 0); }
static void wr_send(struct ibv_qp_ex *qp) { build(qp, IBV_WR_SEND, 0, 0, 0); }
static void wr_send_imm(struct ibv_qp_ex *qp, __be32 imm) { build(qp, IBV_WR_SEND_WITH_IMM, 0, 0, imm); }

static void wr_rdma_write_imm(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t address, __be32 imm)
{
    build(qp, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, address, imm);
}

static void wr_set_sge_list(struct ibv_qp_ex *base, size_t count, const struct ibv_sge *list)
{
    struct queue_pair *qp = queue_pair_of(base);
    if (qp->built_error || !qp->built_count) return;
    if (count > qp->created.cap.max_send_sge) {
        qp->built_error = EINVAL;
        return;
    }
    struct ibv_send_wr *wr = &qp->built[qp->built_count - 1];
    wr->num_sge = (int)count;
    if (count) memcpy(wr->sg_list, list, count * sizeof *list);
}

static void wr_set_sge(struct ibv_qp_ex *base, uint32_t lkey, uint64_t address, uint32_t bytes)
{
    struct ibv_sge piece = {address, bytes, lkey};
    wr_set_sge_list(base, 1, &piece);
}

/* All or nothing. */
static int wr_complete(struct ibv_qp_ex *base)
{
    struct queue_pair *qp = queue_pair_of(base);
    struct context *context = context_of(base->qp_base.context);
    struct ibv_send_wr *bad;
    if (qp->built_error || !qp->built_count) return qp->built_error;
    enter(context);
    int is_full = qp->posted + qp->built_count - qp->reaped > qp->created.cap.max_send_wr;
    leave(context);
    return is_full ? ENOMEM : ibv_post_send(&qp->base, qp->built, &bad);
}

static struct ibv_qp *create_qp_ex(struct ibv_context *base, struct ibv_qp_init_attr_ex *wanted)
{
    const uint64_t known = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |
                           IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ;
    int has_operations = (wanted->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) != 0;
    (void)base;
    if (wanted->comp_mask & ~(uint32_t)(IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) || !(wanted->comp_mask & IBV_QP_INIT_ATTR_PD) ||
        (has_operations && wanted->send_ops_flags & ~known)) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    struct queue_pair *qp = (struct queue_pair *)ibv_create_qp(wanted->pd, (struct ibv_qp_init_attr *)wanted);
    if (!qp || !has_operations) return qp ? &qp->base : NULL;
    qp->built = zeroed(wanted->cap.max_send_wr, sizeof *qp->built);
    qp->built_sges = zeroed((size_t)wanted->cap.max_send_wr * wanted->cap.max_send_sge, sizeof *qp->built_sges);
    qp->extended.wr_start = qp->extended.wr_abort = wr_start;
    qp->extended.wr_complete = wr_complete;
    qp->extended.wr_rdma_write = wr_rdma_write;
    qp->extended.wr_rdma_write_imm = wr_rdma_write_imm;
    qp->extended.wr_rdma_read = wr_rdma_read;
    qp->extended.wr_send = wr_send;
    qp->extended.wr_send_imm = wr_send_imm;
    qp->extended.wr_set_sge = wr_set_sge;
    qp->extended.wr_set_sge_list = wr_set_sge_list;
    return &qp->base;
}

EXPORTED struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
    return ((struct queue_pair *)qp)->built ? &((struct queue_pair *)qp)->extended : NULL;
}

/* ---- the null library: only the caller's own cost is left ---- */

static int null_post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct completion_queue *cq = (struct completion_queue *)base->send_cq;
    (void)bad;
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    for (; wr; wr = wr->next) {
        if (!(wr->send_flags & IBV_SEND_SIGNALED)) continue;
        struct ibv_wc *wc = &cq->ring[(cq->head + count++) % (uint32_t)cq->base.cqe].wc;
        wc->wr_id = wr->wr_id;
        wc->status = IBV_WC_SUCCESS;
        wc->opcode = IBV_WC_RDMA_WRITE;
        wc->qp_num = base->qp_num;
    }
    atomic_store_explicit(&cq->count, count, memory_order_relaxed);
    return 0;
}

static int null_post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)base;
    (void)wr;
    (void)bad;
    return 0;
}

static int null_poll_cq(struct ibv_cq *base, int most, struct ibv_wc *wc)
{
    struct completion_queue *cq = (struct completion_queue *)base;
    uint32_t count = atomic_load_explicit(&cq->count, memory_order_relaxed);
    int taken = 0;
    for (; taken < most && count; count--) {
        wc[taken++] = cq->ring[cq->head].wc;
        cq->head = (cq->head + 1) % (uint32_t)base->cqe;
    }
    atomic_store_explicit(&cq->count, count, memory_order_relaxed);
    return taken;
}

/* ---- names ---- */

#define NAME(table, value) ((unsigned)(value) < sizeof(table) / sizeof *(table) && (table)[value] ? (table)[value] : "unknown")

EXPORTED const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    static const char *const names[] = {
        [IBV_WC_SUCCESS] = "success",
        [IBV_WC_LOC_LEN_ERR] = "local length error",
        [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
        [IBV_WC_LOC_PROT_ERR] = "local protection error",
        [IBV_WC_WR_FLUSH_ERR] = "Work Request Flushed Error",
        [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
        [IBV_WC_REM_ACCESS_ERR] = "remote access error",
        [IBV_WC_REM_OP_ERR] = "remote operation error",
        [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
        [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
    };
    return NAME(names, status);
}

EXPORTED const char *ibv_port_state_str(enum ibv_port_state state)
{
    static const char *const names[] = {[IBV_PORT_DOWN] = "PORT_DOWN", [IBV_PORT_ACTIVE] = "PORT_ACTIVE"};
    return NAME(names, state);
}

EXPORTED const char *ibv_node_type_str(enum ibv_node_type type)
{
    static const char *const names[] = {[IBV_NODE_CA] = "InfiniBand channel adapter"};
    return NAME(names, type);
}

EXPORTED const char *ibv_event_type_str(enum ibv_event_type type)
{
    static const char *const names[] = {
        [IBV_EVENT_CQ_ERR] = "CQ error",
        [IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
        [IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
        [IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
        [IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
        [IBV_EVENT_PORT_ACTIVE] = "port active",
        [IBV_EVENT_PORT_ERR] = "port error",
        [IBV_EVENT_GID_CHANGE] = "GID table change",
    };
    return NAME(names, type);
}

/* ---- what programs link to and the stand-in has not ---- */

EXPORTED void *ibv_missing(void);
EXPORTED void *ibv_missing(void)
{
    errno = EOPNOTSUPP;
    return NULL;
}

EXPORTED int ibv_missing_int(void);
EXPORTED int ibv_missing_int(void) { return errno = EOPNOTSUPP; }

#define MISSING(name, as) __asm__(".globl " #name "\n.type " #name ", @function\n.set " #name ", " #as)
MISSING(ibv_attach_mcast, ibv_missing_int);
MISSING(ibv_copy_ah_attr_from_kern, ibv_missing);
MISSING(ibv_copy_path_rec_from_kern, ibv_missing);
MISSING(ibv_copy_qp_attr_from_kern, ibv_missing);
MISSING(ibv_create_ah, ibv_missing);
MISSING(ibv_create_ah_from_wc, ibv_missing);
MISSING(ibv_create_srq, ibv_missing);
MISSING(ibv_destroy_ah, ibv_missing_int);
MISSING(ibv_destroy_srq, ibv_missing_int);
MISSING(ibv_detach_mcast, ibv_missing_int);
MISSING(ibv_get_sysfs_path, ibv_missing);
MISSING(ibv_import_device, ibv_missing);
MISSING(ibv_import_dm, ibv_missing);
MISSING(ibv_import_mr, ibv_missing);
MISSING(ibv_import_pd, ibv_missing);
MISSING(ibv_modify_srq, ibv_missing_int);
MISSING(ibv_query_ece, ibv_missing_int);
MISSING(ibv_query_qp_data_in_order, ibv_missing_int);
MISSING(ibv_query_srq, ibv_missing_int);
MISSING(ibv_read_sysfs_file, ibv_missing_int);
MISSING(ibv_rereg_mr, ibv_missing_int);
MISSING(ibv_resize_cq, ibv_missing_int);
MISSING(ibv_set_ece, ibv_missing_int);
MISSING(ibv_unimport_dm, ibv_missing);
MISSING(ibv_unimport_mr, ibv_missing);
MISSING(ibv_unimport_pd, ibv_missing);
