/* Making of submissions, on callers' threads: checks a call against the tables of memory and splits it into parts, one
 * a way. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "client_core.h"
#include "overlap.h"

#define LOOK_NS 200000ull /* nobody is woken by transfers that nobody waits for */

static int has_room(const struct rc_core *core, const struct rc_submission *s)
{
    if (!core->free_count) return 0;
    return !core->bytes_max || !core->bytes_in_flight || (s->bytes <= core->bytes_max && core->bytes_in_flight <= core->bytes_max - s->bytes);
}

static void wait_until(struct rc_waiter *waiter, pthread_mutex_t *queue, uint64_t at_ns)
{
    struct timespec at = {(time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u)};
    pthread_cond_timedwait(&waiter->turn, queue, &at);
}

/* Holding queue, which it gives up while it waits. Callers get room in the order in which they came: what needs much does
 * not wait behind what needs little and came later. Whether there is room, and it is this caller's. */
static int wait_for_room(struct rc_core *core, const struct rc_submission *s, uint64_t give_up_ns)
{
    struct rc_waiter self = {.next = NULL}, **link = &core->waiting;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&self.turn, &monotonic);
    pthread_condattr_destroy(&monotonic);
    while (*link) link = &(*link)->next;
    *link = &self;
    int room = 0;
    while (!core->dead) {
        int first = core->waiting == &self;
        if (first) {
            if (!has_room(core, s)) rc_reap(core);
            room = has_room(core, s);
            if (room) break;
        }
        uint64_t now_ns = rr_now_ns(), look_ns = first ? now_ns + LOOK_NS : give_up_ns;
        if (now_ns > give_up_ns) break;
        wait_until(&self, &core->queue, look_ns < give_up_ns ? look_ns : give_up_ns);
    }
    for (link = &core->waiting; *link != &self;) link = &(*link)->next;
    *link = self.next;
    rc_wake_first(core);
    pthread_cond_destroy(&self.turn);
    return room;
}

static int no_room(const struct rc_core *core, const struct rc_submission *s, struct rc_error *error)
{
    const char *next = "within the time-out; wait for some, or raise";
    if (!core->free_count || !core->bytes_max)
        return rc_fail(error, "limit", "all %u transfers of this client are in flight and none ended %s relay.transfers", core->facts.transfers, next);
    return rc_fail(error, "limit", "%llu bytes beside %llu in flight, of %llu, and too few ended %s limits.bytes_per_client",
                   (unsigned long long)s->bytes, (unsigned long long)core->bytes_in_flight, (unsigned long long)core->bytes_max, next);
}

static int take_entry(struct rc_core *core, struct rc_submission *s, struct rc_error *error)
{
    pthread_mutex_lock(&core->queue);
    if (!core->waiting && !has_room(core, s)) rc_reap(core);
    int room = !core->waiting && has_room(core, s), status = 0;
    if (!room && !core->dead) room = wait_for_room(core, s, s->timeout_ns ? rr_now_ns() + s->timeout_ns : UINT64_MAX);
    if (core->gpu_failure && core->dead)
        status = rc_fail(error, "gpu_error", "%s: a CUDA call of this client failed; find out why, then connect a new Client",
                         rg_error_name(&core->gpu, (rg_result)core->gpu_failure));
    else if (core->dead == RR_CLIENT_GONE)
        status = rc_fail(error, "closed", "this Client is closed");
    else if (core->dead)
        status = rc_fail(error, "daemon_gone", "the relay daemon is gone");
    else if (!room)
        status = no_room(core, s, error);
    if (!status) {
        core->bytes_in_flight += s->bytes;
        s->index = core->free_entries[--core->free_count];
        s->generation = ++core->generations[s->index];
        if (s->generation == 0) s->generation = ++core->generations[s->index];
        s->references = 2;
        s->next = core->live;
        core->live = s;
    }
    pthread_mutex_unlock(&core->queue);
    if (status) return status;
    struct rr_transfer *shared = &core->transfers[s->index];
    rr_store_relaxed_u32(&shared->waiting, 0);
    rr_store_relaxed_u32(&shared->cancel, 0);
    rr_store_relaxed_u64(&shared->tag, s->tag);
    rr_store_relaxed_u64(&shared->timeout_ns, s->timeout_ns);
    rr_store_relaxed_u32(&shared->note, s->note);
    rr_store_release_u32(&shared->generation, s->generation);
    rr_fault_point(RR_FAULT_CLIENT_TRANSFER_RESERVED);
    return 0;
}

struct way {
    uint32_t local_rail, remote_rail, owner, window_bytes, window_runs, direct, on_gpu, to_gpu, local;
};

static struct way way_of(const struct rc_core *core, const struct rc_region *region, const struct rc_remote *remote)
{
    if (remote->local)
        return (struct way){.local_rail = core->own_rail, .owner = remote->owner, .on_gpu = (uint32_t)region->on_gpu, .to_gpu = remote->on_gpu, .local = 1};
    uint32_t local = core->local_rails[remote->peer][remote->rail];
    int relayed = core->route == RC_ROUTE_RELAY || core->route == RC_ROUTE_RELAY_ALL;
    uint32_t straight = region->shared != 0;
    struct way way = {core->own_rail, remote->rail, remote->owner, remote->window_bytes,
                      remote->window_runs, straight, (uint32_t)region->on_gpu, 0, 0};
    if (relayed) {
        way.local_rail = local;
        way.direct = straight && local == core->own_rail && core->route == RC_ROUTE_RELAY;
    } else if (core->route == RC_ROUTE_MATCHED) {
        way.local_rail = local;
    }
    if (region->on_gpu && region->rail != way.local_rail) way.direct = 0; /* another rail's NIC may not reach it */
    return way;
}

static int same_way(const struct way *a, const struct way *b) { return memcmp(a, b, sizeof *a) == 0; }

#define WAYS_MAX 256u

static int find_way(struct way *ways, uint32_t *count, struct way way, uint32_t hint)
{
    if (hint < *count && same_way(&ways[hint], &way)) return (int)hint;
    for (uint32_t i = 0; i < *count; i++)
        if (same_way(&ways[i], &way)) return (int)i;
    if (*count == WAYS_MAX) return -1;
    ways[*count] = way;
    return (int)(*count)++;
}

static int make_parts(struct rc_submission *s, const struct way *ways, uint32_t count, struct rc_error *error)
{
    struct rc_core *core = s->core;
    s->parts = calloc(count, sizeof *s->parts);
    if (!s->parts) return rc_fail(error, "no_memory", "no memory for %u parts", count);
    s->part_count = s->parts_left = count;
    for (uint32_t i = 0; i < count; i++) {
        struct rc_part *part = &s->parts[i];
        part->submission = s;
        part->local_rail = ways[i].local_rail;
        part->remote_rail = ways[i].remote_rail;
        part->owner = ways[i].owner;
        part->window_bytes = ways[i].window_bytes;
        part->entries_max = core->facts.table_entries;
        if (part->window_bytes && ways[i].window_runs < part->entries_max) part->entries_max = ways[i].window_runs;
        part->direct = ways[i].direct;
        part->on_gpu = ways[i].on_gpu;
        part->local = ways[i].local;
        s->any_direct |= part->direct;
        part->to_gpu = ways[i].to_gpu;
        error->rail = part->local_rail;
        const struct rc_lane *lane = &core->lanes[part->local_rail];
        /* Also host memory, which may be pinned: the GPU then reads it later than the call that asks for it. */
        s->any_gpu |= !part->direct && (part->on_gpu || part->to_gpu || (!part->local && !lane->memory));
        if (!part->direct && !part->local && !(part->on_gpu || !lane->memory ? (int)(lane->copier != NULL) : rc_lane_is_leased(lane)))
            return rc_fail(error, "no_lane", "lane of rail %u is not leased to this client", part->local_rail);
    }
    s->express = s->bytes <= core->express_bytes;
    return 0;
}

static struct rc_submission *begin(struct rc_core *core, uint32_t peer, uint64_t tag, uint64_t timeout_ns, int note, struct rc_ready ready,
                                   struct rc_error *error)
{
    if (peer >= RC_PEERS_MAX || !core->local_rails[peer]) {
        rc_fail(error, "peer_lost", "peer %u is not connected", peer);
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = calloc(1, sizeof *s);
    if (!s) {
        rc_fail(error, "no_memory", "no memory for a transfer");
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    s->core = core;
    s->peer = peer;
    s->tag = tag;
    s->timeout_ns = timeout_ns;
    s->note = note != 0;
    s->ready = ready;
    return s;
}

typedef unsigned long long ull;

/* Resolves, checks and copies a list of blocks. Holding tables. */
static int take_blocks(struct rc_submission *s, const struct rc_list *list, struct rc_error *error)
{
    struct rc_core *core = s->core;
    const uint64_t *sources = list->sources;
    uint64_t count = list->count;
    struct way ways[WAYS_MAX];
    uint32_t way_count = 0, way = 0;
    uint64_t *way_blocks = calloc(WAYS_MAX, sizeof *way_blocks);
    uint8_t *way_of_block = NULL;
    const struct rc_region *region = NULL;
    const struct rc_remote *remote = NULL;
    struct rc_overlap overlap = {.low = UINT64_MAX};
    s->blocks = malloc(count * sizeof *s->blocks);
    if (!s->blocks || !way_blocks) {
        free(way_blocks);
        return rc_fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
    }
    int status = 0;
    for (uint64_t i = 0; i < count && !status; i++) {
        uint64_t length = list->lengths[list->one_length ? 0 : i], destination = list->destinations[i] + list->space;
        if (length == 0 || length >> 63) {
            status = rc_fail(error, "bad_length", "block %llu: length %lld, must be at least 1", (ull)i, (long long)length);
            break;
        }
        if (list->destinations[i] >> RC_SPACE_SHIFT) {
            status = rc_fail(error, "bad_address", "block %llu: destination %#llx, must be below 2^%u", (ull)i, (ull)list->destinations[i],
                             RC_SPACE_SHIFT);
            break;
        }
        const struct rc_region *from = rc_find_region(core, sources[i], region);
        const struct rc_remote *to = rc_find_remote(core, s->peer, destination, remote);
        if (!from) {
            status = rc_fail(error, "bad_region", "block %llu: source %#llx is in no registered region; register it first", (ull)i, (ull)sources[i]);
            break;
        }
        if (!to) {
            status = rc_fail(error, "bad_region", "block %llu: destination %#llx is in no region opened at this peer; open its offer first", (ull)i,
                          (ull)list->destinations[i]);
            break;
        }
        if (length > from->bytes - (sources[i] - from->address)) {
            status = rc_fail(error, "out_of_bounds", "block %llu: source %#llx + %llu bytes passes the end of its region by %llu", (ull)i,
                          (ull)sources[i], (ull)length, (ull)(length - (from->bytes - (sources[i] - from->address))));
            break;
        }
        if (length > to->bytes - (destination - to->address)) {
            status = rc_fail(error, "out_of_bounds", "block %llu: destination %#llx + %llu bytes passes the end of its region by %llu", (ull)i,
                          (ull)list->destinations[i], (ull)length, (ull)(length - (to->bytes - (destination - to->address))));
            break;
        }
        if (from != region || to != remote) {
            if (rc_use_memory(s, from, to)) status = rc_fail(error, "no_memory", "no memory");
            int found = find_way(ways, &way_count, way_of(core, from, to), way);
            if (found < 0) status = rc_fail(error, "limit", "more than %u destinations in one transfer", WAYS_MAX);
            if (found > 0 && !way_of_block) {
                way_of_block = calloc(count, 1);
                if (!way_of_block) status = rc_fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
            }
            way = (uint32_t)found;
            region = from;
            remote = to;
        }
        if (status) break;
        if (way_of_block) way_of_block[i] = (uint8_t)way;
        way_blocks[way]++;
        s->blocks[i] = (struct rc_block){sources[i], destination - to->address, length, from->index, to->index};
        s->bytes += length;
        rc_overlap_see(&overlap, destination, length);
    }
    if (!status) {
        if (rc_overlap_begin(&overlap, count)) status = rc_fail(error, "no_memory", "no memory to check destinations");
        uint64_t i = 0, where = 0;
        for (; i < count && !status; i++)
            if (rc_overlap_add(&overlap, list->destinations[i] + list->space, s->blocks[i].length))
                status = rc_fail(error, "overlap", "block %llu: destination %#llx + %llu bytes overlaps another block of the same transfer", (ull)i,
                              (ull)list->destinations[i], (ull)s->blocks[i].length);
        if (rc_overlap_end(&overlap, &where) && !status)
            status = rc_fail(error, "overlap", "destinations overlap at %#llx", (ull)RC_ADDRESS(where));
    }
    if (!status) status = make_parts(s, ways, way_count, error);
    if (!status) {
        struct rc_block *sorted = s->blocks;
        uint64_t start[WAYS_MAX], at = 0;
        for (uint32_t w = 0; w < way_count; at += way_blocks[w++]) start[w] = at;
        if (way_count > 1) {
            sorted = malloc(count * sizeof *sorted);
            if (!sorted) status = rc_fail(error, "no_memory", "no memory for %llu blocks", (ull)count);
            for (uint64_t i = 0; i < count && !status; i++) sorted[start[way_of_block[i]]++] = s->blocks[i];
            at = 0;
            for (uint32_t w = 0; w < way_count; at += way_blocks[w++]) start[w] = at;
            if (!status) {
                free(s->blocks);
                s->blocks = sorted;
            }
        }
        for (uint32_t w = 0; w < way_count && !status; w++) {
            s->parts[w].blocks = sorted + start[w];
            s->parts[w].block_count = way_blocks[w];
            for (uint64_t i = 0; i < way_blocks[w]; i++) s->parts[w].bytes_left += s->parts[w].blocks[i].length;
        }
    }
    free(way_blocks);
    free(way_of_block);
    return status;
}

struct rc_submission *rc_reserve(struct rc_core *core, uint32_t peer, const struct rc_list *list, uint64_t tag, uint64_t timeout_ns, int note,
                                 struct rc_ready ready, struct rc_error *error)
{
    if (list->count == 0) {
        rc_fail(error, "bad_length", "a transfer needs at least one block");
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = begin(core, peer, tag, timeout_ns, note, ready, error);
    if (!s) return NULL;
    pthread_rwlock_rdlock(&core->tables);
    int status = take_blocks(s, list, error);
    pthread_rwlock_unlock(&core->tables);
    if (status || take_entry(core, s, error)) {
        rc_leave_memory(s);
        rc_free_submission(s);
        return NULL;
    }
    return s;
}

static int by_address(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Whether pieces of different pages or rows cannot overlap as long as no page comes twice: all pages of a row lie before
 * the next row, or all rows of a page before the next page. 0 also without memory to find out. */
static int rows_are_apart(const uint64_t *rows, uint32_t row_count, uint64_t stride, uint64_t piece_bytes, uint64_t page_span)
{
    uint64_t *sorted = malloc(row_count * sizeof *sorted), gap = UINT64_MAX;
    if (!sorted) return 0;
    memcpy(sorted, rows, row_count * sizeof *sorted);
    qsort(sorted, row_count, sizeof *sorted, by_address);
    for (uint32_t r = 1; r < row_count; r++)
        if (sorted[r] - sorted[r - 1] < gap) gap = sorted[r] - sorted[r - 1];
    uint64_t row_span = sorted[row_count - 1] - sorted[0] + piece_bytes;
    free(sorted);
    return (piece_bytes <= stride && gap >= page_span + piece_bytes) || (row_span <= stride && gap >= piece_bytes);
}

/* -1: no memory; 1: a page comes twice, and which. */
static int page_comes_twice(const int64_t *pages, uint32_t page_count, int64_t *twice)
{
    struct rc_overlap overlap = {.low = UINT64_MAX};
    uint64_t where = 0;
    int found = 0;
    for (uint32_t i = 0; i < page_count; i++) rc_overlap_see(&overlap, (uint64_t)pages[i], 1);
    if (rc_overlap_begin(&overlap, page_count)) return -1;
    for (uint32_t i = 0; i < page_count && !found; i++) {
        found = rc_overlap_add(&overlap, (uint64_t)pages[i], 1) != 0;
        where = (uint64_t)pages[i];
    }
    uint64_t sorted_where = 0;
    if (rc_overlap_end(&overlap, &sorted_where)) {
        found = 1;
        where = sorted_where;
    }
    *twice = (int64_t)where;
    return found;
}

/* -1 and the error if two pieces of the destination overlap. */
static int check_pieces(const struct rc_pages *p, const uint64_t *rows, int64_t low, int64_t high, struct rc_error *error)
{
    const uint64_t count = (uint64_t)p->row_count * p->page_count;
    if (rows_are_apart(rows, p->row_count, p->destination_stride, p->piece_bytes, (uint64_t)(high - low) * p->destination_stride)) {
        int64_t page = 0;
        int twice = page_comes_twice(p->destination_pages, p->page_count, &page);
        if (twice < 0) return rc_fail(error, "no_memory", "no memory to check destinations");
        return twice ? rc_fail(error, "overlap", "destination page %lld comes twice in one transfer", (long long)page) : 0;
    }
    struct rc_overlap overlap = {.low = UINT64_MAX};
    uint64_t where = 0;
    int status = 0;
    for (uint32_t r = 0; r < p->row_count; r++) {
        rc_overlap_see(&overlap, rows[r] + (uint64_t)low * p->destination_stride, p->piece_bytes);
        rc_overlap_see(&overlap, rows[r] + (uint64_t)high * p->destination_stride, p->piece_bytes);
    }
    overlap.granule_bits |= p->page_count > 1 ? p->destination_stride : 0;
    if (rc_overlap_begin(&overlap, count)) return rc_fail(error, "no_memory", "no memory to check destinations");
    for (uint32_t r = 0; r < p->row_count && !status; r++)
        for (uint32_t i = 0; i < p->page_count && !status; i++)
            if (rc_overlap_add(&overlap, rows[r] + (uint64_t)p->destination_pages[i] * p->destination_stride, p->piece_bytes))
                status = rc_fail(error, "overlap", "row %u: destination page %lld overlaps another piece of the same transfer", r,
                              (long long)p->destination_pages[i]);
    if (rc_overlap_end(&overlap, &where) && !status) status = rc_fail(error, "overlap", "destinations overlap at %#llx", (ull)RC_ADDRESS(where));
    return status;
}

/* Of items in a sequence: groups of which each destination goes on where the one before it ends, and runs at constant
 * distances. */
struct sequence {
    uint64_t joined, runs;
};

static struct sequence see_pages(struct rc_pages *p)
{
    struct sequence found = {0, 0};
    const int64_t *from = p->source_pages, *to = p->destination_pages;
    for (uint32_t first = 0, end; first < p->page_count; first = end) {
        end = first + 1;
        if (end < p->page_count)
            while (end < p->page_count && from[end] - from[end - 1] == from[first + 1] - from[first] && to[end] - to[end - 1] == to[first + 1] - to[first])
                end++;
        for (uint32_t i = first; i < end; i++) p->page_ends[i] = end;
        found.runs++;
    }
    for (uint32_t i = 0; i < p->page_count; i++)
        found.joined += i == 0 || (uint64_t)(to[i] - to[i - 1]) * p->destination_stride != p->piece_bytes;
    return found;
}

static struct sequence see_rows(const struct rc_pages *p, const uint32_t *rows, uint32_t row_count, uint32_t *ends)
{
    struct sequence found = {0, 0};
    for (uint32_t first = 0, end; first < row_count; first = end) {
        const struct rc_row *a = &p->rows[rows[first]], *b = first + 1 < row_count ? &p->rows[rows[first + 1]] : a;
        end = first + 1;
        for (const struct rc_row *before = a, *row; end < row_count; end++, before = row) {
            row = &p->rows[rows[end]];
            if (row->source - before->source != b->source - a->source || row->destination - before->destination != b->destination - a->destination ||
                row->region != a->region || row->remote != a->remote)
                break;
        }
        for (uint32_t i = first; i < end; i++) ends[i] = end;
        found.runs++;
    }
    for (uint32_t i = 0; i < row_count; i++) {
        const struct rc_row *row = &p->rows[rows[i]], *before = i ? &p->rows[rows[i - 1]] : NULL;
        found.joined += !before || row->remote != before->remote || row->destination - before->destination != p->piece_bytes;
    }
    return found;
}

/* For parts that a GPU copies: finds the runs, and goes by page or by row. What halves the remote writes decides; a few
 * pages that happen to follow each other must not take long runs of rows apart. Else it is the fewer runs. */
static int find_runs(struct rc_submission *s, struct rc_error *error)
{
    struct rc_pages *p = &s->pages;
    int any = 0;
    for (uint32_t i = 0; i < s->part_count; i++) any |= s->parts[i].on_gpu || s->parts[i].to_gpu;
    if (!any) return 0;
    p->page_ends = malloc(p->page_count * sizeof *p->page_ends);
    s->row_ends = malloc(p->row_count * sizeof *s->row_ends);
    if (!p->page_ends || !s->row_ends) return rc_fail(error, "no_memory", "no memory for runs of %u rows and %u pages", p->row_count, p->page_count);
    struct sequence pages = see_pages(p);
    for (uint32_t i = 0; i < s->part_count; i++) {
        struct rc_part *part = &s->parts[i];
        if (!part->on_gpu && !part->to_gpu) continue;
        uint32_t *ends = s->row_ends + (part->row_indices - s->row_indices);
        struct sequence rows = see_rows(p, part->row_indices, part->row_count, ends);
        part->row_ends = ends;
        uint64_t joined_by_page = rows.joined * p->page_count, joined_by_row = pages.joined * part->row_count;
        if (2 * joined_by_page <= joined_by_row)
            part->by_page = 1;
        else if (2 * joined_by_row > joined_by_page)
            part->by_page = rows.runs * p->page_count < pages.runs * part->row_count;
    }
    return 0;
}

static int take_rows(struct rc_submission *s, const uint64_t *source_rows, const uint64_t *destination_rows, struct rc_error *error)
{
    struct rc_core *core = s->core;
    struct rc_pages *p = &s->pages;
    int64_t source_low = INT64_MAX, source_high = INT64_MIN, destination_low = INT64_MAX, destination_high = INT64_MIN;
    for (uint32_t i = 0; i < p->page_count; i++) {
        if (p->source_pages[i] < source_low) source_low = p->source_pages[i];
        if (p->source_pages[i] > source_high) source_high = p->source_pages[i];
        if (p->destination_pages[i] < destination_low) destination_low = p->destination_pages[i];
        if (p->destination_pages[i] > destination_high) destination_high = p->destination_pages[i];
    }
    if (source_low < 0 || destination_low < 0)
        return rc_fail(error, "out_of_bounds", "page index %lld is negative", (long long)(source_low < 0 ? source_low : destination_low));
    if ((uint64_t)source_high > (UINT64_MAX >> 2) / (p->source_stride ? p->source_stride : 1) ||
        (uint64_t)destination_high > (UINT64_MAX >> 2) / (p->destination_stride ? p->destination_stride : 1))
        return rc_fail(error, "out_of_bounds", "page index %lld with a stride of %llu bytes is past any region",
                    (long long)(source_high > destination_high ? source_high : destination_high), (ull)p->source_stride);
    struct way ways[WAYS_MAX];
    uint32_t way_count = 0, way = 0, way_rows[WAYS_MAX] = {0};
    uint8_t *way_of_row = calloc(p->row_count, 1);
    p->rows = malloc(p->row_count * sizeof *p->rows);
    s->row_indices = malloc(p->row_count * sizeof *s->row_indices);
    if (!way_of_row || !p->rows || !s->row_indices) {
        free(way_of_row);
        return rc_fail(error, "no_memory", "no memory for %u rows", p->row_count);
    }
    int status = 0;
    for (uint32_t r = 0; r < p->row_count && !status; r++) {
        uint64_t from_low = source_rows[r] + (uint64_t)source_low * p->source_stride;
        uint64_t from_span = (uint64_t)(source_high - source_low) * p->source_stride + p->piece_bytes;
        uint64_t to_low = destination_rows[r] + (uint64_t)destination_low * p->destination_stride;
        uint64_t to_span = (uint64_t)(destination_high - destination_low) * p->destination_stride + p->piece_bytes;
        const struct rc_region *from = rc_find_region(core, from_low, NULL);
        const struct rc_remote *to = rc_find_remote(core, s->peer, to_low, NULL);
        if (!from)
            status = rc_fail(error, "bad_region", "row %u: source page %lld at %#llx is in no registered region", r, (long long)source_low, (ull)from_low);
        else if (!to)
            status = rc_fail(error, "bad_region", "row %u: destination page %lld at %#llx is in no region opened at this peer", r,
                          (long long)destination_low, (ull)RC_ADDRESS(to_low));
        else if (from_span > from->bytes - (from_low - from->address))
            status = rc_fail(error, "out_of_bounds", "row %u: source page %lld passes the end of its region by %llu bytes", r, (long long)source_high,
                          (ull)(from_span - (from->bytes - (from_low - from->address))));
        else if (to_span > to->bytes - (to_low - to->address))
            status = rc_fail(error, "out_of_bounds", "row %u: destination page %lld passes the end of its region by %llu bytes", r,
                          (long long)destination_high, (ull)(to_span - (to->bytes - (to_low - to->address))));
        if (status) break;
        int found = find_way(ways, &way_count, way_of(core, from, to), way);
        if (found < 0) {
            status = rc_fail(error, "limit", "more than %u destinations in one transfer", WAYS_MAX);
            break;
        }
        way = (uint32_t)found;
        way_of_row[r] = (uint8_t)way;
        way_rows[way]++;
        p->rows[r] = (struct rc_row){source_rows[r], destination_rows[r] - to->address, from->index, to->index};
        if (rc_use_memory(s, from, to)) status = rc_fail(error, "no_memory", "no memory");
    }
    if (!status) status = check_pieces(p, destination_rows, destination_low, destination_high, error);
    s->bytes = (uint64_t)p->row_count * p->page_count * p->piece_bytes;
    if (!status) status = make_parts(s, ways, way_count, error);
    if (!status) {
        uint32_t at = 0;
        for (uint32_t w = 0; w < way_count; w++) {
            s->parts[w].row_indices = s->row_indices + at;
            s->parts[w].row_count = way_rows[w];
            s->parts[w].bytes_left = (uint64_t)way_rows[w] * p->page_count * p->piece_bytes;
            for (uint32_t r = 0; r < p->row_count; r++)
                if (way_of_row[r] == w) s->row_indices[at++] = r;
        }
        status = find_runs(s, error);
    }
    free(way_of_row);
    return status;
}

struct rc_submission *rc_reserve_pages(struct rc_core *core, uint32_t peer, const uint64_t *source_rows, uint64_t source_stride,
                                       const int64_t *source_pages, const uint64_t *destination_rows, uint64_t destination_stride,
                                       const int64_t *destination_pages, uint32_t row_count, uint32_t page_count, uint64_t piece_bytes,
                                       uint64_t tag, uint64_t timeout_ns, int note, struct rc_ready ready, struct rc_error *error)
{
    if (row_count == 0 || page_count == 0 || piece_bytes == 0 || piece_bytes >> 62) {
        rc_fail(error, "bad_length", "a paged transfer needs rows, pages and bytes: %u rows, %u pages, %lld bytes a piece", row_count, page_count,
             (long long)piece_bytes);
        if (ready.release) ready.release(ready.argument);
        return NULL;
    }
    struct rc_submission *s = begin(core, peer, tag, timeout_ns, note, ready, error);
    if (!s) return NULL;
    s->pages.source_stride = source_stride;
    s->pages.destination_stride = destination_stride;
    s->pages.piece_bytes = piece_bytes;
    s->pages.row_count = row_count;
    s->pages.page_count = page_count;
    s->pages.source_pages = malloc(page_count * sizeof(int64_t));
    s->pages.destination_pages = malloc(page_count * sizeof(int64_t));
    int status = -1;
    if (s->pages.source_pages && s->pages.destination_pages) {
        memcpy(s->pages.source_pages, source_pages, page_count * sizeof(int64_t));
        memcpy(s->pages.destination_pages, destination_pages, page_count * sizeof(int64_t));
        pthread_rwlock_rdlock(&core->tables);
        status = take_rows(s, source_rows, destination_rows, error);
        pthread_rwlock_unlock(&core->tables);
    } else {
        rc_fail(error, "no_memory", "no memory for %u pages", page_count);
    }
    if (status || take_entry(core, s, error)) {
        rc_leave_memory(s);
        rc_free_submission(s);
        return NULL;
    }
    return s;
}
