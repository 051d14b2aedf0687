/* What posting and polling cost the rail's thread: the daemon's verbs NIC as it is, over a library that completes all
 * sends at once and moves nothing (RAILRELAY_IBVERBS_NULL). Of the rail only these are replaced (ld --wrap), by slices that
 * are always ready, and there is a peer that answers them once they are posted. The answers' cost is in the figures.
 *
 *   bench_post [runs [work requests a run]]      exits 1 if the median of the first case is over the limit
 *   bench_post only N                            the first case, N work requests, nothing measured: for callgrind */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#include "verbs_inside.h"

#define LIMIT_NS 120.0
#define MOST_RUNS 101u
#define SLICES 18u /* slots of a lane */
#define RUNS_MOST 128u
#define HANDLE 5u

static struct rr_plane plane;
static struct rr_client client;
static struct rr_source source = {.client = &client};
static struct rr_path paths[RR_CLASSES];
static struct rr_remote remotes[1];
static struct rr_region regions[1];
static struct rr_work slices[SLICES];
static struct rr_wire_run runs[SLICES][RUNS_MOST];
static struct iovec pieces[SLICES][RUNS_MOST];
static uint32_t zeroes[RUNS_MOST];
static uint32_t next_slice, slices_out;
static struct rr_connection *sender;
static uint64_t answered;
static int (*poll_of_library)(struct ibv_cq *cq, int most, struct ibv_wc *wc);

/* ---- the rail ---- */

struct rr_work *__wrap_rr_path_next(struct rr_rail *rail, struct rr_path *path);
struct rr_work *__wrap_rr_path_next(struct rr_rail *rail, struct rr_path *path)
{
    (void)rail;
    if (path->class_ || slices_out == SLICES) return NULL;
    slices_out++;
    struct rr_work *work = &slices[next_slice];
    next_slice = (next_slice + 1) % SLICES;
    return work;
}

void __wrap_rr_work_done(struct rr_rail *rail, struct rr_work *work, uint32_t result);
void __wrap_rr_work_done(struct rr_rail *rail, struct rr_work *work, uint32_t result)
{
    (void)rail, (void)work;
    if (result) {
        fprintf(stderr, "bench_post: a slice ends with result %u\n", result);
        exit(2);
    }
    slices_out--;
}

struct rr_path *__wrap_rr_path_of(struct rr_rail *rail, uint32_t peer, uint32_t remote_rail, uint32_t class_);
struct rr_path *__wrap_rr_path_of(struct rr_rail *rail, uint32_t peer, uint32_t remote_rail, uint32_t class_)
{
    (void)rail, (void)peer, (void)remote_rail;
    return &paths[class_];
}

int __wrap_rr_aborted_by_peer(const struct rr_plane *of, uint32_t peer, uint32_t owner, uint64_t tag);
int __wrap_rr_aborted_by_peer(const struct rr_plane *of, uint32_t peer, uint32_t owner, uint64_t tag)
{
    (void)of, (void)peer, (void)owner, (void)tag;
    return 0;
}

uint32_t __wrap_rr_transfer_stopped(const struct rr_client *of, uint32_t transfer, uint32_t generation);
uint32_t __wrap_rr_transfer_stopped(const struct rr_client *of, uint32_t transfer, uint32_t generation)
{
    (void)of, (void)transfer, (void)generation;
    return 0;
}

void __wrap_rr_event_push(struct rr_plane *of, int64_t kind, int64_t rail, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e);
void __wrap_rr_event_push(struct rr_plane *of, int64_t kind, int64_t rail, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e)
{
    (void)of, (void)rail, (void)c, (void)d, (void)e;
    fprintf(stderr, "bench_post: event %" PRId64 ": %" PRId64 ", %" PRId64 "\n", kind, a, b);
    exit(2);
}

/* ---- the peer ---- */

static int poll_with_answers(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    int taken = poll_of_library(cq, most, wc);
    uint64_t posted = sender->next_sequence - 1 - (sender->current != NULL);
    if (answered == posted || taken == most) return taken;
    uint64_t position = sender->received_completed;
    struct message *message = (struct message *)(sender->memory + (MESSAGES + position % RECEIVES) * MESSAGE_BYTES);
    message->magic = MESSAGE_MAGIC;
    message->type = MESSAGE_DONE;
    for (message->count = 0; message->count < PAIRS_MAX && answered < posted; message->count++)
        message->pairs[message->count] = (struct rr_ack){.sequence = ++answered, .code = RR_OK};
    wc[taken] = (struct ibv_wc){.wr_id = WR_RECEIVE | sender->wr_tag | (uint32_t)position, .opcode = IBV_WC_RECV, .byte_len = MESSAGE_BYTES};
    return taken + 1;
}

static void prepare(uint32_t run_count, uint32_t run_bytes, int is_lane)
{
    source.is_lane = is_lane;
    for (uint32_t i = 0; i < SLICES; i++) {
        for (uint32_t k = 0; k < run_count; k++) {
            uint64_t at = (i * RUNS_MOST + k) * (uint64_t)run_bytes;
            runs[i][k] = (struct rr_wire_run){.handle = HANDLE, .offset = 2 * at, .length = run_bytes};
            pieces[i][k] = (struct iovec){(void *)(uintptr_t)(0x10000000 + at), run_bytes};
        }
        slices[i] = (struct rr_work){
            .source = &source,
            .pieces = pieces[i],
            .runs = runs[i],
            .piece_regions = zeroes,
            .run_remotes = zeroes,
            .bytes = (uint64_t)run_count * run_bytes,
            .piece_count = run_count,
            .run_count = run_count,
        };
    }
}

static void must(int status, const char *what, const char *why)
{
    if (status >= 0) return;
    fprintf(stderr, "bench_post: %s: %s %s\n", what, strerror(-status), why);
    exit(2);
}

static void connect_to_itself(struct rr_rail *rail)
{
    struct rr_verbs_facts facts;
    struct rr_verbs_endpoint endpoint;
    char error[RR_VERBS_ERROR_BYTES] = "";
    must(rr_verbs_facts(&plane, 0, &facts), "facts", "");
    must(rr_verbs_new_endpoint(&plane, 0, 0, 1, &endpoint, error), "endpoint", error);
    struct rr_verbs_route route = {.qpn = endpoint.qpn, .psn = endpoint.psn, .mtu_bytes = facts.mtu_bytes, .timeout = 17, .retry_count = 7, .rnr_retry = 7};
    memcpy(route.gid, facts.gid, sizeof route.gid);
    must(rr_verbs_connect(&plane, endpoint.id, &route, error), "connect", error);
    sender = rr_verbs_nic.add_sender(rail->nic, 1, &paths[0], 1, (int)endpoint.id);
    must(sender ? 0 : -ENOENT, "sender", "");
    poll_of_library = sender->qp->context->ops.poll_cq;
    sender->qp->context->ops.poll_cq = poll_with_answers;
}

/* Its name is what callgrind counts in. */
__attribute__((noinline)) void measured(struct rr_nic *nic, uint64_t wanted);
__attribute__((noinline)) void measured(struct rr_nic *nic, uint64_t wanted)
{
    uint64_t end = sender->posted + wanted;
    while (sender->posted < end) {
        rr_verbs_nic.post(nic, &paths[0]);
        rr_verbs_nic.poll(nic, 0);
    }
}

static void finish(struct rr_nic *nic)
{
    for (int turn = 0; turn < 1000 && (slices_out || sender->current); turn++) {
        uint32_t out = slices_out;
        slices_out = SLICES; /* no new ones */
        rr_verbs_nic.post(nic, &paths[0]);
        rr_verbs_nic.poll(nic, 0);
        slices_out = out - (SLICES - slices_out);
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *what;
        uint32_t runs, bytes;
        int is_lane;
    } cases[] = {
        {"slots of 128 x 64 KiB", 128, 65536, 1},
        {"direct slices of 128 x 64 KiB", 128, 65536, 0},
        {"slices of 8 x 64 KiB", 8, 65536, 1},
        {"slices of 1 x 4 KiB", 1, 4096, 1},
    };
    int only = argc > 1 && !strcmp(argv[1], "only");
    unsigned count = argc > 1 ? (unsigned)atoi(argv[1]) : 15;
    uint64_t each = argc > 2 ? strtoull(argv[2], NULL, 10) : 1u << 20;
    double found[MOST_RUNS], first = 0;
    if (count == 0 || count > MOST_RUNS) count = MOST_RUNS;

    struct rr_rail *rail = &plane.rails[0];
    plane.rail_count = 1;
    plane.table_entries = 4096;
    rail->plane = &plane;
    rail->counters = calloc(RR_RAIL_COUNTER_COUNT, sizeof *rail->counters);
    rail->kick_fd = eventfd(0, EFD_NONBLOCK);
    rail->verbs = (struct rr_verbs_options){.port = 1, .gid_index = 3, .send_depth = 1024, .signal_every = 64};
    snprintf(rail->verbs.device, sizeof rail->verbs.device, "stub0");
    for (uint32_t i = 0; i < RR_CLASSES; i++) paths[i].class_ = i;
    client.plane = &plane;
    client.remotes = remotes;
    client.regions = regions;
    client.ports[0].lane_lkeys[0] = regions[0].lkeys[0] = 7;
    remotes[0] = (struct rr_remote){.valid = 1, .handle = HANDLE, .bytes = 1ull << 40, .rkey_count = 1, .iova = 1ull << 40, .rkeys = {9}};
    rail->nic = rr_verbs_nic.open(rail);
    must(rail->nic ? 0 : -ENODEV, "stub0", plane.error);
    connect_to_itself(rail);

    if (only) {
        prepare(cases[0].runs, cases[0].bytes, cases[0].is_lane);
        measured(rail->nic, each);
        return 0;
    }
    printf("posting and polling, ns per work request: median of %u runs of %" PRIu64 " (quartiles); limit %.0f\n", count, each, LIMIT_NS);
    for (unsigned n = 0; n < sizeof cases / sizeof *cases; n++) {
        prepare(cases[n].runs, cases[n].bytes, cases[n].is_lane);
        measured(rail->nic, each / 8);
        for (unsigned i = 0; i < count; i++) {
            uint64_t from = sender->posted, start_ns = rr_now_ns();
            measured(rail->nic, each);
            found[i] = (double)(rr_now_ns() - start_ns) / (double)(sender->posted - from);
        }
        finish(rail->nic);
        qsort(found, count, sizeof *found, by_value);
        double median = found[count / 2];
        if (n == 0) first = median;
        printf("%-32s %6.1f (%.1f to %.1f), %.2f of the limit\n", cases[n].what, median, found[count / 4], found[3 * count / 4], median / LIMIT_NS);
    }
    return first > LIMIT_NS;
}
