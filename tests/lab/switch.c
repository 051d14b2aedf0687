/* A lossless switch fabric in one process and one thread: a leaf switch per rail, one spine that joins the leaves, and
 * the NICs of the nodes. NIC r of a node is a TUN device "nic<r>" in the node's network namespace, address
 * 10.<r>.0.<node + 1>; the fabric forwards by destination address: NIC -> leaf -> NIC, or over leaf, spine, leaf.
 *
 * All timing is here, none in qdiscs. A link sends one frame after the other from its FIFO queue: NIC to leaf and leaf to
 * NIC at the line rate, leaf to spine and spine to leaf at the uplink rate (default: all NICs of a leaf together, so the
 * spine does not block). It is a discrete event simulation that the wall clock paces: events carry exact times, and a late
 * wake-up delays frames but costs a link none of its rate.
 *
 * Priority flow control with one priority: each switch has a shared buffer in which a frame counts for the ingress that
 * it came by until it has left. An ingress that holds xoff bytes or more pauses its upstream link (a NIC, or another
 * switch's egress) from the next frame on, until it holds xon bytes or less; so congestion spreads, egress by egress, to
 * frames that only share an ingress with it. Nothing is dropped in the switches. A paused NIC keeps its frames in order in
 * its own queue, which only the windows of the TCP connections bound.
 *
 * Commands on stdin: "reset" (counters and series), "dump" (one line of JSON on stdout); it exits at the end of stdin. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_RAILS = 16,
    MAX_NODES = 8,
    MAX_PORTS = MAX_RAILS * MAX_NODES,
    MAX_LINKS = 2 * MAX_PORTS + 2 * MAX_RAILS,
    MAX_INGRESSES = MAX_NODES + MAX_RAILS + 1,
    ETHERNET_BYTES = 14, /* counted like tbf counts: header, no preamble */
    FRAME_BYTES = 9216,
    MAX_FRAMES = 32768,
    MAX_BUCKETS = 12000,
};

struct frame {
    struct frame *next;
    uint16_t bytes, ingress; /* ingress at the switch that holds it */
    uint8_t port;            /* where it goes */
    uint8_t data[FRAME_BYTES];
};

struct counters {
    uint64_t bytes, frames, pause_ns, pauses, queue_max_bytes;
};

enum sink { TO_LEAF, TO_SPINE, TO_NIC };

struct link {
    struct frame *head, *tail;
    uint64_t queue_bytes;
    double ns_per_byte;
    uint64_t free_ns; /* when the frame under way has left */
    struct frame *under_way;
    int paused;
    uint64_t paused_since_ns;
    enum sink sink;
    uint16_t where, ingress; /* number of the leaf or port it leads to, and which of its ingresses it is */
    int from;                /* switch that it leaves, -1 for a NIC */
    struct counters counters;
    uint32_t *series_bytes, *series_pause_ns;
};

struct fabric_switch {
    uint64_t held[MAX_INGRESSES], held_max[MAX_INGRESSES], buffer_bytes, buffer_max_bytes;
    struct link *upstream[MAX_INGRESSES];
    int is_xoff[MAX_INGRESSES];
};

static int rails, nodes, ports;
static int tuns[MAX_PORTS];
static struct link links[MAX_LINKS];
static int link_count;
static struct link *nic_link[MAX_PORTS], *port_link[MAX_PORTS], *up_link[MAX_RAILS], *down_link[MAX_RAILS];
static struct fabric_switch leaves[MAX_RAILS], spine; /* ingresses of a leaf: its nodes, then the spine; of the spine: the leaves */
static double line_bits = 200e6, uplink_bits;
static uint64_t buffer_bytes = 2 << 20, xoff_bytes = 96 << 10, xon_bytes = 72 << 10;
static uint64_t tick_ns = 150000, bucket_ns = 20000000;
static struct frame *free_frames;
static uint64_t frames_made, drops, ignored, begin_ns, now_ns, late_max_ns;

static void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("switch: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(1);
}

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static struct frame *new_frame(void)
{
    struct frame *frame = free_frames;
    if (frame) {
        free_frames = frame->next;
        return frame;
    }
    if (frames_made == MAX_FRAMES) return NULL;
    frames_made++;
    return malloc(sizeof *frame);
}

static void free_frame(struct frame *frame)
{
    frame->next = free_frames;
    free_frames = frame;
}

/* ---- series ---- */

static uint64_t bucket_of(uint64_t at_ns) { return at_ns < begin_ns ? 0 : (at_ns - begin_ns) / bucket_ns; }

static void add_pause(struct link *link, uint64_t from_ns, uint64_t to_ns)
{
    if (from_ns < begin_ns) from_ns = begin_ns;
    if (to_ns <= from_ns) return;
    link->counters.pause_ns += to_ns - from_ns;
    for (uint64_t bucket = bucket_of(from_ns); from_ns < to_ns && bucket < MAX_BUCKETS; bucket++) {
        uint64_t end_ns = begin_ns + (bucket + 1) * bucket_ns;
        if (end_ns > to_ns) end_ns = to_ns;
        link->series_pause_ns[bucket] += (uint32_t)(end_ns - from_ns);
        from_ns = end_ns;
    }
}

/* ---- links and switches, at a time of the simulation ---- */

static void start(struct link *link, uint64_t at_ns)
{
    if (link->under_way || link->paused || !link->head) return;
    struct frame *frame = link->head;
    link->head = frame->next;
    link->queue_bytes -= frame->bytes;
    link->under_way = frame;
    if (link->free_ns < at_ns) link->free_ns = at_ns;
    link->free_ns += (uint64_t)(frame->bytes * link->ns_per_byte + 0.5);
}

static void enqueue(struct link *link, struct frame *frame, uint64_t at_ns)
{
    frame->next = NULL;
    if (link->head)
        link->tail->next = frame;
    else
        link->head = frame;
    link->tail = frame;
    link->queue_bytes += frame->bytes;
    if (link->queue_bytes > link->counters.queue_max_bytes) link->counters.queue_max_bytes = link->queue_bytes;
    start(link, at_ns);
}

static void enter(struct fabric_switch *at, int ingress, struct frame *frame, struct link *out, uint64_t at_ns)
{
    frame->ingress = (uint16_t)ingress;
    at->held[ingress] += frame->bytes;
    at->buffer_bytes += frame->bytes;
    if (at->held[ingress] > at->held_max[ingress]) at->held_max[ingress] = at->held[ingress];
    if (at->buffer_bytes > at->buffer_max_bytes) at->buffer_max_bytes = at->buffer_bytes;
    if (at->buffer_bytes > buffer_bytes) die("a buffer holds %" PRIu64 " bytes, more than it has; a fault of the model", at->buffer_bytes);
    struct link *upstream = at->upstream[ingress];
    if (!at->is_xoff[ingress] && at->held[ingress] >= xoff_bytes) {
        at->is_xoff[ingress] = 1;
        upstream->paused = 1;
        upstream->paused_since_ns = at_ns;
        upstream->counters.pauses++;
    }
    enqueue(out, frame, at_ns);
}

static void leave(struct fabric_switch *at, struct frame *frame, uint64_t at_ns)
{
    int ingress = frame->ingress;
    at->held[ingress] -= frame->bytes;
    at->buffer_bytes -= frame->bytes;
    if (at->is_xoff[ingress] && at->held[ingress] <= xon_bytes) {
        struct link *upstream = at->upstream[ingress];
        at->is_xoff[ingress] = 0;
        upstream->paused = 0;
        add_pause(upstream, upstream->paused_since_ns, at_ns);
        start(upstream, at_ns);
    }
}

/* The frame under way has left the link and is where the link leads. */
static void arrive(struct link *link)
{
    struct frame *frame = link->under_way;
    uint64_t at_ns = link->free_ns, bucket = bucket_of(at_ns);
    link->under_way = NULL;
    link->counters.bytes += frame->bytes;
    link->counters.frames++;
    if (bucket < MAX_BUCKETS) link->series_bytes[bucket] += frame->bytes;
    if (link->from >= 0) leave(link->from == MAX_RAILS ? &spine : &leaves[link->from], frame, at_ns);
    int rail = frame->port % rails;
    switch (link->sink) {
    case TO_LEAF:
        enter(&leaves[link->where], link->ingress, frame, rail == link->where ? port_link[frame->port] : up_link[link->where], at_ns);
        break;
    case TO_SPINE:
        enter(&spine, link->ingress, frame, down_link[rail], at_ns);
        break;
    case TO_NIC:
        if (write(tuns[link->where], frame->data, frame->bytes - ETHERNET_BYTES) < 0) drops++;
        free_frame(frame);
        break;
    }
    start(link, at_ns);
}

static struct link *next_link(void)
{
    struct link *next = NULL;
    for (int i = 0; i < link_count; i++)
        if (links[i].under_way && (!next || links[i].free_ns < next->free_ns)) next = &links[i];
    return next;
}

static void run_until(uint64_t until_ns)
{
    for (struct link *link; (link = next_link()) && link->free_ns <= until_ns;) {
        if (until_ns - link->free_ns > late_max_ns) late_max_ns = until_ns - link->free_ns;
        arrive(link);
    }
}

static int port_of(const uint8_t *packet, size_t bytes)
{
    if (bytes < 20 || packet[0] >> 4 != 4 || packet[16] != 10 || packet[17] >= rails || packet[18] != 0) return -1;
    int node = packet[19] - 1;
    return node < 0 || node >= nodes ? -1 : node * rails + packet[17];
}

static void read_nic(int port)
{
    for (;;) {
        struct frame *frame = new_frame();
        if (!frame) {
            static uint8_t lost[FRAME_BYTES];
            if (read(tuns[port], lost, sizeof lost) < 0) return;
            drops++;
            continue;
        }
        ssize_t bytes = read(tuns[port], frame->data, sizeof frame->data);
        if (bytes < 0) {
            free_frame(frame);
            if (errno == EAGAIN || errno == EINTR) return;
            die("nic%d of node %d: %s", port % rails, port / rails, strerror(errno));
        }
        int to = port_of(frame->data, (size_t)bytes);
        if (to < 0) {
            ignored++;
            free_frame(frame);
            continue;
        }
        frame->port = (uint8_t)to;
        frame->bytes = (uint16_t)(bytes + ETHERNET_BYTES);
        enqueue(nic_link[port], frame, now_ns);
    }
}

/* ---- set-up ---- */

static struct link *add_link(double bits, int from, enum sink sink, int where, int ingress)
{
    struct link *link = &links[link_count++];
    link->ns_per_byte = 8e9 / bits;
    link->from = from;
    link->sink = sink;
    link->where = (uint16_t)where;
    link->ingress = (uint16_t)ingress;
    link->series_bytes = calloc(MAX_BUCKETS, sizeof(uint32_t));
    link->series_pause_ns = calloc(MAX_BUCKETS, sizeof(uint32_t));
    if (!link->series_bytes || !link->series_pause_ns) die("no memory for the series");
    if (sink == TO_LEAF) leaves[where].upstream[ingress] = link;
    if (sink == TO_SPINE) spine.upstream[ingress] = link;
    return link;
}

static void build(void)
{
    for (int port = 0; port < ports; port++) {
        nic_link[port] = add_link(line_bits, -1, TO_LEAF, port % rails, port / rails);
        port_link[port] = add_link(line_bits, port % rails, TO_NIC, port, 0);
    }
    for (int rail = 0; rail < rails; rail++) {
        up_link[rail] = add_link(uplink_bits, rail, TO_SPINE, 0, rail);
        down_link[rail] = add_link(uplink_bits, MAX_RAILS, TO_LEAF, rail, nodes);
    }
}

static int open_tun(int rail)
{
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) die("/dev/net/tun: %s", strerror(errno));
    snprintf(request.ifr_name, sizeof request.ifr_name, "nic%d", rail);
    if (ioctl(fd, TUNSETIFF, &request)) die("%s: %s", request.ifr_name, strerror(errno));
    return fd;
}

static void open_nics(char **namespaces)
{
    for (int node = 0; node < nodes; node++) {
        char path[256];
        snprintf(path, sizeof path, "/run/netns/%s", namespaces[node]);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || setns(fd, CLONE_NEWNET)) die("%s: %s", path, strerror(errno));
        close(fd);
        for (int rail = 0; rail < rails; rail++) tuns[node * rails + rail] = open_tun(rail);
    }
}

static void read_options(int count, char **words)
{
    static const struct option options[] = {
        {"rails", 1, 0, 'r'}, {"rate", 1, 0, 'l'}, {"uplink", 1, 0, 'u'}, {"buffer", 1, 0, 'b'}, {"xoff", 1, 0, 'x'},
        {"xon", 1, 0, 'o'}, {"tick-us", 1, 0, 't'}, {"bucket-ms", 1, 0, 's'}, {0, 0, 0, 0}};
    for (int option; (option = getopt_long(count, words, "", options, NULL)) != -1;) {
        double value = optarg ? atof(optarg) : 0;
        if (option == '?' || value <= 0) die("usage: switch --rails N [--rate BITS --uplink BITS --buffer BYTES --xoff BYTES --xon BYTES"
                                             " --tick-us N --bucket-ms N] NAMESPACE...");
        if (option == 'r') rails = (int)value;
        if (option == 'l') line_bits = value;
        if (option == 'u') uplink_bits = value;
        if (option == 'b') buffer_bytes = (uint64_t)value;
        if (option == 'x') xoff_bytes = (uint64_t)value;
        if (option == 'o') xon_bytes = (uint64_t)value;
        if (option == 't') tick_ns = (uint64_t)(value * 1e3);
        if (option == 's') bucket_ns = (uint64_t)(value * 1e6);
    }
    nodes = count - optind;
    if (rails < 1 || rails > MAX_RAILS) die("%d rails; 1 to %d", rails, MAX_RAILS);
    if (nodes < 1 || nodes > MAX_NODES) die("%d nodes; 1 to %d", nodes, MAX_NODES);
    if (!uplink_bits) uplink_bits = nodes * line_bits;
    ports = rails * nodes;
    uint64_t ingresses = (uint64_t)(nodes + 1 > rails ? nodes + 1 : rails), needed = ingresses * (xoff_bytes + 2 * FRAME_BYTES);
    if (xon_bytes > xoff_bytes) die("xon is %" PRIu64 ", more than xoff, %" PRIu64, xon_bytes, xoff_bytes);
    if (needed > buffer_bytes)
        die("a buffer of %" PRIu64 " bytes is not lossless: %" PRIu64 " ingresses with xoff %" PRIu64 " and two frames of headroom need %" PRIu64,
            buffer_bytes, ingresses, xoff_bytes, needed);
}

/* ---- commands ---- */

static void reset(void)
{
    begin_ns = now_ns;
    drops = ignored = late_max_ns = 0;
    for (int i = 0; i < link_count; i++) {
        memset(&links[i].counters, 0, sizeof links[i].counters);
        memset(links[i].series_bytes, 0, MAX_BUCKETS * sizeof(uint32_t));
        memset(links[i].series_pause_ns, 0, MAX_BUCKETS * sizeof(uint32_t));
    }
    for (int rail = 0; rail <= rails; rail++) {
        struct fabric_switch *at = rail < rails ? &leaves[rail] : &spine;
        memcpy(at->held_max, at->held, sizeof at->held_max);
        at->buffer_max_bytes = at->buffer_bytes;
    }
}

static void dump_series(const char *name, const uint32_t *series, uint64_t count)
{
    printf(",\"%s\":[", name);
    for (uint64_t i = 0; i < count; i++) printf("%s%" PRIu32, i ? "," : "", series[i]);
    putchar(']');
}

static void dump_link(const char *kind, int node, int rail, struct link *link, uint64_t buckets, const char *separator)
{
    const struct counters *c = &link->counters;
    printf("%s{\"kind\":\"%s\",\"node\":%d,\"rail\":%d,\"bytes\":%" PRIu64 ",\"frames\":%" PRIu64 ",\"pause_ns\":%" PRIu64 ",\"pauses\":%" PRIu64
           ",\"queue_max_bytes\":%" PRIu64,
           separator, kind, node, rail, c->bytes, c->frames, c->pause_ns, c->pauses, c->queue_max_bytes);
    dump_series("series_bytes", link->series_bytes, buckets);
    dump_series("series_pause_ns", link->series_pause_ns, buckets);
    putchar('}');
}

static void dump(void)
{
    uint64_t buckets = bucket_of(now_ns) + 1;
    if (buckets > MAX_BUCKETS) buckets = MAX_BUCKETS;
    for (int i = 0; i < link_count; i++) {
        if (!links[i].paused) continue;
        add_pause(&links[i], links[i].paused_since_ns, now_ns);
        links[i].paused_since_ns = now_ns;
    }
    printf("{\"begin_ns\":%" PRIu64 ",\"end_ns\":%" PRIu64 ",\"bucket_ns\":%" PRIu64 ",\"drops\":%" PRIu64 ",\"ignored\":%" PRIu64
           ",\"late_max_ns\":%" PRIu64 ",\"buffers\":[",
           begin_ns, now_ns, bucket_ns, drops, ignored, late_max_ns);
    for (int rail = 0; rail <= rails; rail++)
        printf("%s%" PRIu64, rail ? "," : "", rail < rails ? leaves[rail].buffer_max_bytes : spine.buffer_max_bytes);
    printf("],\"links\":[");
    for (int port = 0; port < ports; port++) {
        dump_link("nic", port / rails, port % rails, nic_link[port], buckets, port ? "," : "");
        dump_link("port", port / rails, port % rails, port_link[port], buckets, ",");
    }
    for (int rail = 0; rail < rails; rail++) {
        dump_link("up", -1, rail, up_link[rail], buckets, ",");
        dump_link("down", -1, rail, down_link[rail], buckets, ",");
    }
    puts("]}");
    fflush(stdout);
}

/* 0 at the end of stdin. */
static int read_command(void)
{
    char line[64];
    ssize_t bytes = read(0, line, sizeof line - 1);
    if (bytes <= 0) return 0;
    line[bytes] = 0;
    if (strstr(line, "reset")) {
        reset();
        puts("{}");
        fflush(stdout);
    } else if (strstr(line, "dump")) {
        dump();
    }
    return 1;
}

int main(int count, char **words)
{
    read_options(count, words);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    prctl(PR_SET_TIMERSLACK, 1000);
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1}); /* where it may not: late_max_ns says so */
    build();
    open_nics(words + optind);
    struct pollfd polled[MAX_PORTS + 1];
    for (int port = 0; port < ports; port++) polled[port] = (struct pollfd){.fd = tuns[port], .events = POLLIN};
    polled[ports] = (struct pollfd){.fd = 0, .events = POLLIN};
    now_ns = clock_ns();
    reset();
    puts("{\"ready\":true}");
    fflush(stdout);
    for (;;) {
        /* With frames under way: one turn a tick, whatever arrives meanwhile. Without: until a frame comes. */
        struct link *next = next_link();
        if (next) {
            struct timespec until = {.tv_sec = (time_t)((now_ns + tick_ns) / 1000000000ull), .tv_nsec = (long)((now_ns + tick_ns) % 1000000000ull)};
            clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        }
        int found = ppoll(polled, (nfds_t)ports + 1, next ? &(struct timespec){0, 0} : NULL, NULL);
        now_ns = clock_ns();
        run_until(now_ns);
        if (found <= 0) continue;
        for (int port = 0; port < ports; port++)
            if (polled[port].revents) read_nic(port);
        if (polled[ports].revents && !read_command()) return 0;
    }
}
