/* One end of reliable connections, driven by lines on its standard input, each answered by one line: "ok ..." or
 * "errno <number>". Linked to libibverbs, so that the same orders run on the stand-in and on real devices.
 *
 *   open DEVICE                              -> ok GID MTU            memory BYTES RIGHTS       -> ok INDEX ADDRESS RKEY
 *   exported BYTES RIGHTS ADDRESS            the same, from a descriptor, for peers at that address
 *   queue SEND_WR RECV_WR CQE SGES INLINE    -> ok INDEX NUMBER       connect QP NUMBER GID MTU TIMEOUT RETRY RNR
 *   modify QP STATE MASK                     (attributes of the last connect)
 *   fill MEMORY OFFSET BYTES SEED            sum MEMORY OFFSET BYTES  -> ok SUM
 *   work OPCODE ID FLAGS IMM ADDRESS RKEY COUNT (MEMORY OFFSET BYTES)...     and  post QP -> ok | errno N INDEX_OF_BAD
 *   receive QP ID COUNT (MEMORY OFFSET BYTES)...
 *   poll QP COUNT MS                         -> ok ID,STATUS,OPCODE,BYTES,IMM,FLAGS,NUMBER ...
 *   arm QP SOLICITED                         event QP MS              -> ok 1 | ok 0
 *   asynchronous MS                          -> ok TYPE | ok -1
 *   state QP -> ok STATE      port -> ok STATE      deregister MEMORY      destroy QP      close
 *
 * MEMORY INDEX + 1000 means that memory with a wrong local key. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LIMIT_S 300 /* nobody hangs */
#define MOST 64
#define WORKS 4096
#define WRONG_KEY 1000

static struct ibv_context *device;
static struct ibv_pd *domain;
static int gid_index = -1;
static struct {
    struct ibv_mr *mr;
    uint8_t *bytes;
    uint64_t address;
} memories[MOST];
static struct {
    struct ibv_qp *qp;
    struct ibv_cq *cq;
    struct ibv_comp_channel *channel;
    struct ibv_qp_attr attributes;
} queues[MOST];
static int memory_count, queue_count, work_count;
static struct ibv_send_wr works[WORKS];
static struct ibv_sge sges[WORKS][16];
static char *rest; /* of the line */

static uint64_t word(void)
{
    char *token = strtok_r(NULL, " \n", &rest);
    return token ? strtoull(token, NULL, 0) : 0;
}

static const char *text(void)
{
    const char *token = strtok_r(NULL, " \n", &rest);
    return token ? token : "";
}

static void answer(int error)
{
    if (error)
        printf("errno %d\n", error);
    else
        printf("ok\n");
}

static struct ibv_sge piece(void)
{
    uint64_t memory = word(), offset = word(), bytes = word();
    struct ibv_mr *mr = memories[memory % WRONG_KEY].mr;
    uint32_t key = mr ? mr->lkey : 0x7fffff00; /* of deregistered memory: one that never was */
    return (struct ibv_sge){memories[memory % WRONG_KEY].address + offset, (uint32_t)bytes, memory >= WRONG_KEY ? key ^ 0x5500 : key};
}

static int find_gid(void)
{
    struct ibv_gid_entry entry;
    for (uint32_t i = 0; i < 16; i++) {
        if (ibv_query_gid_ex(device, 1, i, &entry, 0)) continue;
        static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
        if (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && !memcmp(entry.gid.raw, mapped, sizeof mapped)) return (int)i;
    }
    return -1;
}

static void open_device(void)
{
    const char *name = text();
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (int i = 0; list && list[i] && !device; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) device = ibv_open_device(list[i]);
    if (list) ibv_free_device_list(list);
    if (!device || !(domain = ibv_alloc_pd(device)) || (gid_index = find_gid()) < 0) {
        answer(errno ? errno : ENODEV);
        return;
    }
    fcntl(device->async_fd, F_SETFL, fcntl(device->async_fd, F_GETFL) | O_NONBLOCK);
    union ibv_gid gid;
    struct ibv_port_attr port;
    char name_of_gid[INET6_ADDRSTRLEN];
    ibv_query_gid(device, 1, gid_index, &gid);
    ibv_query_port(device, 1, &port);
    inet_ntop(AF_INET6, gid.raw, name_of_gid, sizeof name_of_gid);
    printf("ok %s %d\n", name_of_gid, (int)port.active_mtu);
}

static void add_memory(int is_exported)
{
    uint64_t bytes = word();
    unsigned rights = (unsigned)word();
    int fd = memfd_create("end", 0);
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) abort();
    uint8_t *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint64_t address = is_exported ? word() : (uint64_t)(uintptr_t)at;
    struct ibv_mr *mr = is_exported ? ibv_reg_dmabuf_mr(domain, 0, bytes, address, fd, (int)rights) : ibv_reg_mr(domain, at, bytes, rights);
    int error = errno;
    close(fd);
    if (!mr) {
        answer(error);
        munmap(at, bytes);
        return;
    }
    memories[memory_count].mr = mr;
    memories[memory_count].bytes = at;
    memories[memory_count].address = address;
    printf("ok %d %" PRIu64 " %u\n", memory_count++, address, mr->rkey);
}

static void add_queue(void)
{
    struct ibv_qp_init_attr wanted = {.qp_type = IBV_QPT_RC};
    wanted.cap.max_send_wr = (uint32_t)word();
    wanted.cap.max_recv_wr = (uint32_t)word();
    int entries = (int)word();
    wanted.cap.max_send_sge = wanted.cap.max_recv_sge = (uint32_t)word();
    wanted.cap.max_inline_data = (uint32_t)word();
    struct ibv_comp_channel *channel = ibv_create_comp_channel(device);
    if (channel) fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK);
    struct ibv_cq *cq = channel ? ibv_create_cq(device, entries, NULL, channel, 0) : NULL;
    wanted.send_cq = wanted.recv_cq = cq;
    struct ibv_qp *qp = cq ? ibv_create_qp(domain, &wanted) : NULL;
    if (!qp) {
        answer(errno);
        return;
    }
    queues[queue_count].qp = qp;
    queues[queue_count].cq = cq;
    queues[queue_count].channel = channel;
    printf("ok %d %u\n", queue_count++, qp->qp_num);
}

static int modify(int queue, enum ibv_qp_state state, int mask)
{
    queues[queue].attributes.qp_state = state;
    return ibv_modify_qp(queues[queue].qp, &queues[queue].attributes, mask | IBV_QP_STATE);
}

#define TO_INIT (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
#define TO_RTR (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
#define TO_RTS (IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC)

/* With MTU 0 only to INIT. */
static void connect_queue(void)
{
    int queue = (int)word();
    struct ibv_qp_attr *attributes = &queues[queue].attributes;
    *attributes = (struct ibv_qp_attr){.port_num = 1, .max_rd_atomic = 4, .max_dest_rd_atomic = 4, .min_rnr_timer = 12};
    attributes->qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    attributes->dest_qp_num = (uint32_t)word();
    attributes->ah_attr.is_global = 1;
    attributes->ah_attr.port_num = 1;
    attributes->ah_attr.grh.sgid_index = (uint8_t)gid_index;
    attributes->ah_attr.grh.hop_limit = 64;
    inet_pton(AF_INET6, text(), attributes->ah_attr.grh.dgid.raw);
    attributes->path_mtu = (enum ibv_mtu)word();
    attributes->timeout = (uint8_t)word();
    attributes->retry_cnt = (uint8_t)word();
    attributes->rnr_retry = (uint8_t)word();
    attributes->sq_psn = attributes->rq_psn = 0x123456;
    int error = modify(queue, IBV_QPS_INIT, TO_INIT);
    if (!error && attributes->path_mtu) error = modify(queue, IBV_QPS_RTR, TO_RTR);
    if (!error && attributes->path_mtu) error = modify(queue, IBV_QPS_RTS, TO_RTS);
    answer(error);
}

static void add_work(void)
{
    struct ibv_send_wr *work = &works[work_count % WORKS];
    *work = (struct ibv_send_wr){.opcode = (enum ibv_wr_opcode)word()};
    work->wr_id = word();
    work->send_flags = (unsigned)word();
    work->imm_data = htonl((uint32_t)word());
    work->wr.rdma.remote_addr = word();
    work->wr.rdma.rkey = (uint32_t)word();
    work->num_sge = (int)word();
    work->sg_list = sges[work_count % WORKS];
    for (int i = 0; i < work->num_sge && i < 16; i++) work->sg_list[i] = piece();
    if (work_count) works[work_count - 1].next = work;
    work_count++;
    answer(0);
}

static void post(void)
{
    struct ibv_send_wr *bad = NULL;
    int error = ibv_post_send(queues[word()].qp, works, &bad);
    work_count = 0;
    if (error)
        printf("errno %d %d\n", error, (int)(bad - works));
    else
        printf("ok\n");
}

static void receive(void)
{
    int queue = (int)word();
    struct ibv_sge list[16];
    struct ibv_recv_wr work = {.wr_id = word(), .sg_list = list}, *bad;
    work.num_sge = (int)word();
    for (int i = 0; i < work.num_sge && i < 16; i++) list[i] = piece();
    answer(ibv_post_recv(queues[queue].qp, &work, &bad));
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void poll_queue(void)
{
    int queue = (int)word(), wanted = (int)word();
    int64_t end = now_ms() + (int64_t)word();
    printf("ok");
    for (int got = 0;;) {
        struct ibv_wc wc;
        int found = ibv_poll_cq(queues[queue].cq, 1, &wc);
        if (found > 0) {
            int good = wc.status == IBV_WC_SUCCESS, imm = good && wc.wc_flags & IBV_WC_WITH_IMM;
            printf(" %" PRIu64 ",%d,%d,%u,%u,%u,%u", wc.wr_id, (int)wc.status, good ? (int)wc.opcode : -1,
                   good && wc.opcode & IBV_WC_RECV ? wc.byte_len : 0, imm ? ntohl(wc.imm_data) : 0, imm, wc.qp_num);
            if (++got == wanted) break;
        } else if (now_ms() >= end) {
            break;
        } else {
            usleep(200);
        }
    }
    printf("\n");
}

static void wait_for_event(void)
{
    int queue = (int)word();
    struct pollfd ready = {queues[queue].channel->fd, POLLIN, 0};
    struct ibv_cq *cq;
    void *cq_context;
    if (poll(&ready, 1, (int)word()) != 1 || ibv_get_cq_event(queues[queue].channel, &cq, &cq_context)) {
        printf("ok 0\n");
        return;
    }
    ibv_ack_cq_events(cq, 1);
    printf("ok %d\n", cq == queues[queue].cq);
}

static void wait_for_asynchronous(void)
{
    struct pollfd ready = {device->async_fd, POLLIN, 0};
    struct ibv_async_event event;
    if (poll(&ready, 1, (int)word()) != 1 || ibv_get_async_event(device, &event)) {
        printf("ok -1\n");
        return;
    }
    ibv_ack_async_event(&event);
    printf("ok %d\n", (int)event.event_type);
}

/* Not a plain sum: the place of each byte counts. Looks at memory while the device may write it, as tests want. */
__attribute__((no_sanitize("thread"))) static void fill_or_sum(int fills)
{
    uint64_t memory = word(), offset = word(), bytes = word(), seed = word(), sum = 0;
    uint8_t *at = memories[memory].bytes + offset;
    for (uint64_t i = 0; i < bytes; i++) {
        if (fills) at[i] = (uint8_t)((i + seed) * 2654435761u >> 13);
        sum = (sum + at[i]) * 6364136223846793005u + 1;
    }
    printf("ok %" PRIu64 "\n", sum);
}

static int destroy(int queue)
{
    int error = queues[queue].qp ? ibv_destroy_qp(queues[queue].qp) : 0;
    if (!error && queues[queue].cq) error = ibv_destroy_cq(queues[queue].cq);
    if (!error && queues[queue].channel) error = ibv_destroy_comp_channel(queues[queue].channel);
    memset(&queues[queue], 0, sizeof queues[queue]);
    return error;
}

static int deregister(int memory)
{
    int error = memories[memory].mr ? ibv_dereg_mr(memories[memory].mr) : 0;
    memories[memory].mr = NULL;
    return error;
}

static int close_all(void)
{
    int error = 0;
    for (int i = 0; i < queue_count; i++) error = error ? error : destroy(i);
    for (int i = 0; i < memory_count; i++) error = error ? error : deregister(i);
    if (!error && domain) error = ibv_dealloc_pd(domain);
    if (!error && device) error = ibv_close_device(device);
    queue_count = memory_count = 0;
    domain = NULL;
    device = NULL;
    return error;
}

static void obey(const char *order)
{
    struct ibv_qp_attr attributes;
    struct ibv_qp_init_attr created;
    struct ibv_port_attr port;
    if (!strcmp(order, "open")) return open_device();
    if (!strcmp(order, "memory")) return add_memory(0);
    if (!strcmp(order, "exported")) return add_memory(1);
    if (!strcmp(order, "queue")) return add_queue();
    if (!strcmp(order, "connect")) return connect_queue();
    if (!strcmp(order, "work")) return add_work();
    if (!strcmp(order, "post")) return post();
    if (!strcmp(order, "receive")) return receive();
    if (!strcmp(order, "poll")) return poll_queue();
    if (!strcmp(order, "event")) return wait_for_event();
    if (!strcmp(order, "asynchronous")) return wait_for_asynchronous();
    if (!strcmp(order, "fill")) return fill_or_sum(1);
    if (!strcmp(order, "sum")) return fill_or_sum(0);
    if (!strcmp(order, "deregister")) return answer(deregister((int)word()));
    if (!strcmp(order, "destroy")) return answer(destroy((int)word()));
    if (!strcmp(order, "close")) return answer(close_all());
    if (!strcmp(order, "modify")) {
        int queue = (int)word(), state = (int)word(), mask = (int)word();
        return answer(modify(queue, (enum ibv_qp_state)state, mask));
    }
    if (!strcmp(order, "arm")) {
        int queue = (int)word();
        return answer(ibv_req_notify_cq(queues[queue].cq, (int)word()));
    }
    if (!strcmp(order, "state")) {
        int error = ibv_query_qp(queues[word()].qp, &attributes, IBV_QP_STATE, &created);
        printf(error ? "errno %d\n" : "ok %d\n", error ? error : (int)attributes.qp_state);
        return;
    }
    if (!strcmp(order, "port")) {
        ibv_query_port(device, 1, &port);
        printf("ok %d\n", (int)port.state);
        return;
    }
    printf("errno %d\n", ENOSYS);
}

int main(void)
{
    static char line[65536];
    alarm(LIMIT_S);
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        const char *order = strtok_r(line, " \n", &rest);
        if (order) obey(order);
    }
    return 0;
}
