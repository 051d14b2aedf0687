/* The mover thread of the emulated NIC's helper process, and its table of memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>

#include "emulated_mover.h"
#include "populate.h"

#define COPY_STEP_BYTES (256u << 10) /* host copies look at the clock in between */
#define SPIN_NS 60000u               /* a sleep may last this much longer than asked for */
#define IDLE_SPIN_NS 20000u
#define LATENCY_NS 5000u /* a NIC has one too: a copy that ends within it after the wire has not held the wire up */
#define CUDA_NOT_READY 600

int re_open(struct re_mover *m, int ring_fd, int kick_fd)
{
    struct stat facts;
    memset(m, 0, sizeof *m);
    if (fstat(ring_fd, &facts)) return -errno;
    m->ring_bytes = (uint64_t)facts.st_size;
    m->ring = mmap(NULL, m->ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring_fd, 0);
    if (m->ring == MAP_FAILED) {
        m->ring = NULL;
        return -errno;
    }
    if (m->ring_bytes < sizeof *m->ring || rr_load_acquire_u64(&m->ring->magic) != RE_MAGIC || m->ring->total_bytes != m->ring_bytes ||
        m->ring->requests != RE_REQUESTS) {
        re_close(m);
        return -EPROTO;
    }
    m->pieces = malloc(m->ring->request_pieces * sizeof *m->pieces);
    if (!m->pieces) {
        re_close(m);
        return -ENOMEM;
    }
    m->kick_fd = kick_fd;
    pthread_mutex_init(&m->lock, NULL);
    int error = rr_guard_install();
    if (error) re_close(m);
    return error;
}

void re_close(struct re_mover *m)
{
    for (uint32_t i = 0; i < m->memory_count; i++) rr_unmap(m->memories[i].mapping);
    free(m->memories);
    free(m->pieces);
    if (m->copier.api) rg_close(&m->copier);
    if (m->ring) munmap(m->ring, m->ring_bytes);
    memset(m, 0, sizeof *m);
}

/* ---- memory ---- */

static int insert(struct re_mover *m, struct re_memory memory)
{
    pthread_mutex_lock(&m->lock);
    if (m->memory_count == m->memory_capacity) {
        uint32_t capacity = m->memory_capacity ? 2 * m->memory_capacity : 64;
        struct re_memory *more = realloc(m->memories, capacity * sizeof *more);
        if (!more) {
            pthread_mutex_unlock(&m->lock);
            return -ENOMEM;
        }
        m->memories = more;
        m->memory_capacity = capacity;
    }
    uint32_t at = m->memory_count++;
    for (; at && m->memories[at - 1].base > memory.base; at--) m->memories[at] = m->memories[at - 1];
    m->memories[at] = memory;
    pthread_mutex_unlock(&m->lock);
    return 0;
}

int re_add_address(struct re_mover *m, uint64_t id, uint64_t base, uint64_t bytes, uint64_t here)
{
    return insert(m, (struct re_memory){base, bytes, here, NULL, id});
}

int re_add_file(struct re_mover *m, uint64_t id, uint64_t base, uint64_t bytes, int fd, uint64_t offset, uint64_t *here)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), into = offset % page;
    int error = 0;
    struct rr_mapping *mapping = rr_map(fd, offset - into, bytes + into, &error);
    if (!mapping) return -error;
    *here = (uint64_t)(uintptr_t)mapping->base + into;
    rr_populate_resident(mapping->base, mapping->bytes);
    error = insert(m, (struct re_memory){base, bytes, *here, mapping, id});
    if (error) rr_unmap(mapping);
    return error;
}

int re_relocate(struct re_mover *m, uint64_t id, uint64_t here)
{
    int found = 0;
    pthread_mutex_lock(&m->lock);
    for (uint32_t i = 0; i < m->memory_count && !found; i++) {
        if (m->memories[i].id != id) continue;
        m->memories[i].here = here;
        found = 1;
    }
    pthread_mutex_unlock(&m->lock);
    return found ? 0 : -ENOENT;
}

int re_remove(struct re_mover *m, uint64_t id)
{
    struct rr_mapping *mapping = NULL;
    int found = 0;
    pthread_mutex_lock(&m->lock);
    for (uint32_t i = 0; i < m->memory_count; i++) {
        if (m->memories[i].id != id) continue;
        mapping = m->memories[i].mapping;
        memmove(m->memories + i, m->memories + i + 1, (--m->memory_count - i) * sizeof *m->memories);
        found = 1;
        break;
    }
    pthread_mutex_unlock(&m->lock);
    rr_unmap(mapping);
    return found ? 0 : -ENOENT;
}

/* The memory that holds all of the bytes; the caller holds the lock, and tries the one it found last first. */
static const struct re_memory *holder(const struct re_mover *m, uint64_t address, uint64_t bytes, const struct re_memory *last)
{
    if (last && address >= last->base && address - last->base < last->bytes && bytes <= last->bytes - (address - last->base)) return last;
    uint32_t low = 0, high = m->memory_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (m->memories[middle].base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low) return NULL;
    const struct re_memory *memory = &m->memories[low - 1];
    uint64_t into = address - memory->base;
    return into < memory->bytes && bytes <= memory->bytes - into ? memory : NULL;
}

/* Fills m->pieces. */
static uint32_t translate(struct re_mover *m, const struct re_request *request)
{
    const struct re_piece *pieces = re_pieces(m->ring) + request->first_piece;
    const struct re_memory *source = NULL, *destination = NULL;
    uint32_t result = RR_OK;
    pthread_mutex_lock(&m->lock);
    for (uint32_t i = 0; i < request->piece_count && result == RR_OK; i++) {
        source = holder(m, pieces[i].source, pieces[i].bytes, source);
        destination = holder(m, pieces[i].destination, pieces[i].bytes, destination);
        if (!source || !destination) {
            result = RR_BAD_REGION;
        } else {
            m->pieces[i] = (struct re_piece){pieces[i].source - source->base + source->here,
                                             pieces[i].destination - destination->base + destination->here, pieces[i].bytes, 0};
        }
    }
    pthread_mutex_unlock(&m->lock);
    return result;
}

/* After a copy, if any mapping was cut off meanwhile: whose? */
static uint32_t cut_off(struct re_mover *m, const struct re_request *request)
{
    const struct re_piece *pieces = re_pieces(m->ring) + request->first_piece;
    uint32_t result = RR_OK;
    pthread_mutex_lock(&m->lock);
    for (uint32_t i = 0; i < request->piece_count && result == RR_OK; i++) {
        const struct re_memory *source = holder(m, pieces[i].source, pieces[i].bytes, NULL);
        const struct re_memory *destination = holder(m, pieces[i].destination, pieces[i].bytes, NULL);
        if (source && source->mapping && rr_load_relaxed_u32(&source->mapping->broken))
            result = RR_SEGMENT_TRUNCATED;
        else if (destination && destination->mapping && rr_load_relaxed_u32(&destination->mapping->broken))
            result = RR_REGION_GONE;
    }
    pthread_mutex_unlock(&m->lock);
    return result;
}

/* ---- the wire ---- */

static uint64_t wire_ns(const struct re_mover *m, uint64_t bytes) { return (uint64_t)((double)bytes * 1e9 / (double)m->ring->bytes_per_s); }

static void raise_to(uint64_t *word, uint64_t value)
{
    if (value > rr_load_relaxed_u64(word)) rr_store_relaxed_u64(word, value);
}

static int gpu_failed(struct re_mover *m, const char *call, rg_result result)
{
    m->gpu_call = call;
    m->gpu_error = result;
    return -EIO;
}

/* Whether the copies of the oldest request have ended. -EIO: a CUDA call failed. */
static int is_copied(struct re_mover *m, struct re_started *state)
{
    if (state->copied_ns) return 1;
    rg_result result = m->copier.api->cuEventQuery(m->events[m->placed % RE_STARTED]);
    if (result == CUDA_NOT_READY) return 0;
    if (result) return gpu_failed(m, "cuEventQuery", result);
    state->copied_ns = rr_now_ns();
    return 1;
}

/* Ends the oldest request if its copies have ended and the wire would have sent it by now; 0 if not yet, -EIO: a CUDA
 * call failed. due_ns: until then nothing can end; 0: only its copies are waited for.
 *
 * A copy that is late holds up its own request, not the wire: those behind it catch up. Else each moment that this
 * thread or the GPU has for others would be lost for ever, which no real NIC does. Copies that are slower than the wire
 * are late each time, and then they alone are the pace. */
static int end_oldest(struct re_mover *m, uint64_t now, uint64_t *due_ns)
{
    *due_ns = 0;
    if (m->placed == m->started) return 0;
    struct re_request *request = &re_requests(m->ring)[m->placed % RE_REQUESTS];
    struct re_started *state = &m->state[m->placed % RE_STARTED];
    struct re_statistics *statistics = &m->ring->statistics;
    if (state->result == RR_OK) {
        uint64_t begin = request->posted_ns > m->wire_free_ns ? request->posted_ns : m->wire_free_ns;
        uint64_t due = begin + wire_ns(m, request->bytes);
        int cancelled = rr_load_relaxed_u32(&request->cancel) != 0;
        if (now + SPIN_NS < due && !cancelled) { /* the driver is not asked before it matters */
            *due_ns = due;
            return 0;
        }
        int copied = is_copied(m, state);
        if (copied <= 0) return copied;
        if (now < due && !cancelled) {
            *due_ns = due;
            return 0;
        }
        uint64_t late = state->copied_ns > due + LATENCY_NS ? state->copied_ns - due - LATENCY_NS : 0;
        uint64_t from = begin > m->ended_ns ? begin : m->ended_ns;
        m->wire_free_ns = due;
        if (due + late > m->ended_ns) m->ended_ns = due + late;
        rr_counter_add(&statistics->requests, 1);
        rr_counter_add(&statistics->bytes, request->bytes);
        rr_counter_add(&statistics->busy_ns, due - begin);
        rr_counter_add(&statistics->active_ns, m->ended_ns > from ? m->ended_ns - from : 0);
        rr_counter_add(&statistics->late_copies, late != 0);
        rr_counter_add(&statistics->late_ns, late);
        raise_to(&statistics->late_max_ns, late);
    }
    request->result = state->result;
    m->placed++;
    rr_store_release_u64(&m->ring->placed, m->placed); /* SYNC placed */
    if (rr_wake_needed(&m->ring->rail_sleeping)) rr_kick(m->kick_fd);
    return 1;
}

/* Host memory only: there the oldest is the last one that was copied. */
static void end_due(struct re_mover *m)
{
    uint64_t due;
    while (end_oldest(m, rr_now_ns(), &due) > 0) continue;
}

static uint32_t copy_on_host(struct re_mover *m, const struct re_request *request)
{
    uint32_t patches = rr_guard_patches();
    uint64_t since_look = 0;
    for (uint32_t i = 0; i < request->piece_count; i++) {
        const struct re_piece *piece = &m->pieces[i];
        for (uint32_t at = 0, step; at < piece->bytes; at += step) {
            step = piece->bytes - at < COPY_STEP_BYTES ? piece->bytes - at : COPY_STEP_BYTES;
            memmove((uint8_t *)(uintptr_t)piece->destination + at, (const uint8_t *)(uintptr_t)piece->source + at, step);
            since_look += step;
            if (since_look < COPY_STEP_BYTES) continue;
            since_look = 0;
            end_due(m);
        }
    }
    return patches == rr_guard_patches() ? (uint32_t)RR_OK : cut_off(m, request);
}

static int copy_on_gpu(struct re_mover *m, const struct re_request *request)
{
    uint32_t list = (uint32_t)(m->started % RE_STARTED);
    struct rg_listing listing = rg_list(&m->copier, list); /* has room for a run a piece */
    for (uint32_t i = 0; i < request->piece_count; i++)
        rg_add(&listing, (struct rg_run){m->pieces[i].source, m->pieces[i].destination, 0, 0, m->pieces[i].bytes, 1, 0, 0});
    rg_result result = rg_copy(&m->copier, list, listing.count);
    if (result) return gpu_failed(m, "copy", result);
    result = m->cuEventRecord(m->events[list], m->copier.stream);
    return result ? gpu_failed(m, "cuEventRecord", result) : 0;
}

/* Begins the next request's copy. 0 or -EIO. */
static int start_next(struct re_mover *m)
{
    struct re_request *request = &re_requests(m->ring)[m->started % RE_REQUESTS];
    struct re_started *state = &m->state[m->started % RE_STARTED];
    int status = 0;
    *state = (struct re_started){RR_OK, 0};
    if (rr_load_relaxed_u32(&request->cancel)) {
        state->result = RR_CANCELLED;
    } else if (request->piece_count > m->ring->request_pieces || request->first_piece > m->ring->pieces - request->piece_count) {
        state->result = RR_PROTOCOL;
    } else {
        state->result = translate(m, request);
        if (state->result == RR_OK && m->copier.api) {
            status = copy_on_gpu(m, request);
            m->started += status == 0;
            return status;
        }
        if (state->result == RR_OK) state->result = copy_on_host(m, request);
    }
    state->copied_ns = rr_now_ns();
    m->started++;
    return status;
}

/* timeout_ns 0: until there is something to do. */
static void sleep_at_most(struct re_mover *m, uint64_t timeout_ns)
{
    uint32_t seen = rr_load_relaxed_u32(&m->ring->helper_wake);
    rr_sleep_arm(&m->ring->helper_sleeping);
    int room = m->started - m->placed < RE_STARTED;
    int cancelled = m->placed != m->started && rr_load_relaxed_u32(&re_requests(m->ring)[m->placed % RE_REQUESTS].cancel);
    if (!(room && rr_load_relaxed_u64(&m->ring->posted) != m->started) && !cancelled && !rr_load_relaxed_u32(&m->stop))
        rr_futex_wait(&m->ring->helper_wake, seen, timeout_ns);
    rr_sleep_disarm(&m->ring->helper_sleeping);
}

int re_run(struct re_mover *m)
{
    uint64_t idle_since = 0;
    prctl(PR_SET_TIMERSLACK, 1000ul);
    prctl(PR_SET_NAME, "emulated-wire");
    if (m->copier.api) {
        rg_result result = rg_enter(&m->copier);
        if (result) return gpu_failed(m, "cuCtxSetCurrent", result);
    }
    while (!rr_load_acquire_u32(&m->stop)) {
        uint64_t posted = rr_load_acquire_u64(&m->ring->posted); /* SYNC posted */
        uint64_t due;
        int work_count = 0;
        if (m->started != posted && m->started - m->placed < RE_STARTED) {
            int status = start_next(m);
            if (status) return status;
            work_count = 1;
        }
        uint64_t now = rr_now_ns();
        int ended = end_oldest(m, now, &due);
        if (ended < 0) return ended;
        work_count += ended;
        if (work_count) {
            idle_since = 0;
            continue;
        }
        if (m->placed != m->started) {
            if (due > now + SPIN_NS)
                sleep_at_most(m, due - now - SPIN_NS);
            else
                rr_pause();
            continue;
        }
        if (!idle_since) idle_since = now;
        if (now - idle_since < IDLE_SPIN_NS)
            rr_pause();
        else
            sleep_at_most(m, 0);
    }
    return 0;
}

void re_stop(struct re_mover *m)
{
    rr_store_release_u32(&m->stop, 1);
    rr_fetch_add_u32(&m->ring->helper_wake, 1);
    rr_futex_wake(&m->ring->helper_wake, INT_MAX);
}
