/* A stand-in for libcuda.so.1 on host memory: the functions that railrelay and cuda-python's start need, for tests on
 * machines without a GPU. It keeps to what CUDA promises and to nothing more, so that tests find what relies on luck:
 * each stream is a thread of its own, copies within one call run in any order, device memory cannot be touched by the
 * CPU, host memory must be registered and has another address for the GPU, and a handle or an address is looked up
 * each time it is used.
 *
 * Environment: CUDA_DRIVER_GPUS (2), CUDA_DRIVER_VERSION (13000), CUDA_DRIVER_DELAY_US (0: longest pause between two
 * copies), CUDA_DRIVER_SEED, CUDA_DRIVER_GPU_BYTES (1 GiB), CUDA_DRIVER_DMABUF (0), CUDA_DRIVER_FAULT
 * ("function:call:error[:sticky]", separated by commas), CUDA_VISIBLE_DEVICES. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define GPUS_MAX 8
#define PAGE_BYTES 4096ull
#define GRANULARITY_BYTES (2ull << 20)
#define DIRTY_BYTES (64ull << 20)
#define PITCH_MAX 0x7fffffffull
#define CONTEXTS_MAX 16

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    CONTEXT_IS_DESTROYED = 709,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_SUPPORTED = 801,
};

static const struct {
    CUresult result;
    const char *name;
} error_names[] = {
    {SUCCESS, "CUDA_SUCCESS"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

/* ---- the world: everything below is guarded by its lock ---- */

enum kind { ALLOCATED, OPENED, MAPPED, HOST_ALLOCATED, HOST_REGISTERED };

struct allocation { /* of cuMemCreate; its handle is the address of this */
    struct allocation *next;
    uint64_t bytes;
    uint32_t handles, mappings;
    int fd, device, exportable;
};

/* Memory at an address for the GPU. The CPU reaches it at `memory`. */
struct range {
    struct range *next;
    enum kind kind;
    uint64_t address, bytes;
    uint8_t *memory;
    uint8_t *host; /* of HOST_REGISTERED: what the caller registered */
    struct allocation *allocation;
    int fd, device;
    const struct context *opener; /* of OPENED */
    uint32_t access;              /* of MAPPED: a bit a GPU */
    uint32_t users;               /* copies that run */
};

struct reservation {
    struct reservation *next;
    uint64_t address, bytes;
};

struct context {
    uint32_t retained;
    int device;
};

struct event {
    struct event *next;
    struct context *context;
    uint64_t recorded, reached; /* records asked for, and done */
    uint32_t references;
    int destroyed;
};

struct copy {
    uint64_t destination, source, bytes;
};

enum what { COPIES, KERNEL, WRITE, FILL, RECORD, WAIT };

struct operation {
    struct operation *next;
    enum what what;
    int by_engine; /* not a kernel: another GPU's memory needs no peer access */
    uint64_t count;
    struct copy *copies;
    uint8_t *staged; /* what was pageable memory when the call was made */
    uint64_t address, value;
    struct event *event;
};

struct stream {
    struct stream *next;
    struct context *context;
    struct operation *first, *last;
    uint64_t enqueued, executed;
    unsigned seed;
    int destroyed, is_default;
};

struct module {
    struct module *next;
    char function[64];
};

struct fault {
    struct fault *next;
    char function[48];
    uint64_t calls, at;
    CUresult error;
    int sticky;
};

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int pid; /* 0: before cuInit */
    int gpus, version, dmabuf;
    int gpu_of[GPUS_MAX]; /* by ordinal */
    uint64_t gpu_bytes, used_bytes[GPUS_MAX];
    unsigned delay_us, seed;
    struct context contexts[GPUS_MAX];
    struct range *ranges;
    struct allocation *allocations;
    struct reservation *reservations;
    struct stream *streams;
    struct event *events;
    struct module *modules;
    struct fault *faults;
    CUresult lost; /* the error that all calls have returned since a sticky one */
    int held;      /* no stream goes on */
    uint64_t contexts_ended_in_use;
} world = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER, .version = 13000, .gpu_bytes = 1ull << 30};

static __thread struct {
    struct context *stack[CONTEXTS_MAX];
    int depth;
} current;

static void lock(void) { pthread_mutex_lock(&world.lock); }
static void unlock(void) { pthread_mutex_unlock(&world.lock); }
static void changed(void) { pthread_cond_broadcast(&world.changed); }
static void wait_for_change(void) { pthread_cond_wait(&world.changed, &world.lock); }

static uint64_t number(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void *checked(void *memory)
{
    if (!memory) abort();
    return memory;
}

/* ---- faults ---- */

static void add_fault(const char *function, uint64_t at, CUresult error, int sticky)
{
    struct fault *fault = checked(calloc(1, sizeof *fault));
    snprintf(fault->function, sizeof fault->function, "%s", function);
    fault->at = at;
    fault->error = error;
    fault->sticky = sticky;
    fault->next = world.faults;
    world.faults = fault;
}

static CUresult fault_of(const char *function)
{
    CUresult result = SUCCESS;
    for (struct fault *fault = world.faults; fault; fault = fault->next) {
        if (strcmp(fault->function, function) || ++fault->calls != fault->at) continue;
        result = fault->error;
        if (fault->sticky) {
            world.lost = fault->error;
            changed();
        }
    }
    return result;
}

/* Takes the lock. */
static CUresult enter(const char *function, int despite_loss)
{
    lock();
    if (world.pid != getpid()) return NOT_INITIALIZED;
    CUresult fault = fault_of(function);
    if (fault) return fault;
    return despite_loss ? SUCCESS : world.lost;
}

static CUresult leave(CUresult result)
{
    unlock();
    return result;
}

#define BEGIN(name) \
    do { \
        CUresult refused = enter(#name, 0); \
        if (refused) return leave(refused); \
    } while (0)
/* Calls that need no context. */
#define BEGIN_ANYWAY(name) \
    do { \
        CUresult refused = enter(#name, 1); \
        if (refused) return leave(refused); \
    } while (0)

/* ---- contexts ---- */

static int is_context(const struct context *context)
{
    return context >= world.contexts && context < world.contexts + world.gpus && context->retained;
}

static struct context *here(void)
{
    struct context *context = current.depth ? current.stack[current.depth - 1] : NULL;
    return context && is_context(context) ? context : NULL;
}

/* ---- memory ---- */

static uint64_t rounded(uint64_t bytes) { return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

static uint64_t address_space(uint64_t bytes, uint64_t alignment)
{
    uint64_t room = rounded(bytes) + alignment;
    uint8_t *at = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return 0;
    uint64_t start = (uint64_t)(uintptr_t)at, aligned = (start + alignment - 1) / alignment * alignment;
    if (aligned > start) munmap(at, aligned - start);
    if (start + room > aligned + rounded(bytes)) munmap((void *)(uintptr_t)(aligned + rounded(bytes)), start + room - aligned - rounded(bytes));
    return aligned;
}

static void give_back(uint64_t address, uint64_t bytes) { munmap((void *)(uintptr_t)address, rounded(bytes)); }

/* What a driver hands out may hold what was there before: it has made no promise. */
static void make_dirty(int fd, uint64_t bytes)
{
    static uint8_t old[1 << 16];
    memset(old, 0xdb, sizeof old);
    for (uint64_t at = 0; at < bytes && at < DIRTY_BYTES; at += sizeof old)
        if (pwrite(fd, old, sizeof old, (off_t)at) < 0) return;
}

/* The name tells an importer which GPU the memory is of. */
static int gpu_memory(int device, uint64_t bytes, const char *kind)
{
    char name[32];
    snprintf(name, sizeof name, "cuda-%s-%d", kind, world.gpu_of[device]);
    int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)rounded(bytes))) {
        close(fd);
        return -1;
    }
    return fd;
}

static int gpu_of_memory(const char *path, const char *kind)
{
    char target[64] = "", expected[32];
    if (readlink(path, target, sizeof target - 1) < 0) return -1;
    int length = snprintf(expected, sizeof expected, "/memfd:cuda-%s-", kind);
    if (strncmp(target, expected, (size_t)length)) return -1;
    int gpu = atoi(target + length);
    for (int device = 0; device < world.gpus; device++)
        if (world.gpu_of[device] == gpu) return device;
    return -1;
}

static struct range *find(uint64_t address)
{
    for (struct range *range = world.ranges; range; range = range->next)
        if (address >= range->address && address - range->address < range->bytes) return range;
    return NULL;
}

/* By what a host address was registered or allocated as. */
static struct range *find_host(uint64_t address)
{
    for (struct range *range = world.ranges; range; range = range->next) {
        uint64_t host = (uint64_t)(uintptr_t)range->host;
        if (range->host && address >= host && address - host < range->bytes) return range;
    }
    return NULL;
}

static struct range *add_range(enum kind kind, uint64_t address, uint64_t bytes, uint8_t *memory, int fd, int device)
{
    struct range *range = checked(calloc(1, sizeof *range));
    range->kind = kind;
    range->address = address;
    range->bytes = bytes;
    range->memory = memory;
    range->fd = fd;
    range->device = device;
    range->next = world.ranges;
    world.ranges = range;
    return range;
}

/* Waits for the copies that run right now; later ones do not find it. */
static void remove_range(struct range *range)
{
    for (struct range **link = &world.ranges; *link; link = &(*link)->next)
        if (*link == range) {
            *link = range->next;
            break;
        }
    while (range->users) wait_for_change();
    switch (range->kind) {
    case ALLOCATED:
        world.used_bytes[range->device] -= rounded(range->bytes);
        /* fall through */
    case OPENED:
        munmap(range->memory, rounded(range->bytes));
        give_back(range->address, range->bytes);
        break;
    case MAPPED:
        munmap(range->memory, rounded(range->bytes));
        break;
    case HOST_ALLOCATED:
        munmap(range->memory, rounded(range->bytes));
        break;
    case HOST_REGISTERED:
        give_back(range->address / PAGE_BYTES * PAGE_BYTES, range->bytes + PAGE_BYTES);
        break;
    }
    if (range->fd >= 0) close(range->fd);
    free(range);
}

static void drop_allocation(struct allocation *allocation)
{
    if (allocation->handles || allocation->mappings) return;
    for (struct allocation **link = &world.allocations; *link; link = &(*link)->next)
        if (*link == allocation) {
            *link = allocation->next;
            break;
        }
    world.used_bytes[allocation->device] -= allocation->bytes;
    close(allocation->fd);
    free(allocation);
}

static struct allocation *allocation_of(uint64_t handle)
{
    for (struct allocation *allocation = world.allocations; allocation; allocation = allocation->next)
        if ((uint64_t)(uintptr_t)allocation == handle && allocation->handles) return allocation;
    return NULL;
}

/* ---- execution ---- */

static unsigned dice(struct stream *stream) { return (unsigned)rand_r(&stream->seed); }

static int may_reach(const struct range *range, int device, int by_engine)
{
    switch (range->kind) {
    case ALLOCATED:
        return by_engine || range->device == device;
    case MAPPED:
        return range->access >> device & 1;
    default:
        return 1;
    }
}

/* The memory behind an address and how much of it is contiguous; counts a user of the range. NULL: illegal. */
static uint8_t *reach(struct range **out, uint64_t address, uint64_t *bytes, int device, int by_engine)
{
    struct range *range = find(address);
    uint64_t begin = range ? range->address : 0;
    if (!range && by_engine && (range = find_host(address))) begin = (uint64_t)(uintptr_t)range->host;
    if (!range || !may_reach(range, device, by_engine)) return NULL;
    uint64_t at = address - begin;
    if (*bytes > range->bytes - at) *bytes = range->bytes - at;
    range->users++;
    *out = range;
    return range->memory + at;
}

static void done_with(struct range *range)
{
    if (!range) return;
    range->users--;
    if (!range->users) changed();
}

static void pause_a_little(struct stream *stream)
{
    unsigned delay_us = world.delay_us;
    if (!delay_us) return;
    struct timespec nap = {0, (long)(dice(stream) % delay_us) * 1000};
    nanosleep(&nap, NULL);
}

/* Piece by piece where memory is put together of several mappings. Copies with `plain` end in pageable memory. */
static CUresult carry_out(struct stream *stream, const struct operation *operation, struct copy copy)
{
    int device = stream->context->device;
    while (copy.bytes) {
        uint64_t bytes = copy.bytes;
        struct range *from = NULL, *to = NULL;
        lock();
        uint8_t *source = operation->staged ? operation->staged : reach(&from, copy.source, &bytes, device, operation->by_engine);
        uint8_t *destination = source ? reach(&to, copy.destination, &bytes, device, operation->by_engine) : NULL;
        if (source && !destination && operation->by_engine && !find(copy.destination)) destination = (uint8_t *)(uintptr_t)copy.destination;
        unlock();
        if (source && destination) memmove(destination, source, bytes);
        lock();
        done_with(from);
        done_with(to);
        unlock();
        if (!source || !destination) return ILLEGAL_ADDRESS;
        copy.source += bytes;
        copy.destination += bytes;
        copy.bytes -= bytes;
    }
    return SUCCESS;
}

static CUresult carry_out_all(struct stream *stream, const struct operation *operation, struct copy *copies, uint64_t count)
{
    for (uint64_t left = count; left; left--) { /* in any order */
        uint64_t chosen = left > 1 ? ((uint64_t)dice(stream) << 16 ^ dice(stream)) % left : 0;
        struct copy copy = copies[chosen];
        copies[chosen] = copies[left - 1];
        if (left % 16 == 0 || count < 16) pause_a_little(stream);
        CUresult result = carry_out(stream, operation, copy);
        if (result) return result;
    }
    return SUCCESS;
}

struct run { /* as gather.cu reads it */
    uint64_t source, destination, source_step, destination_step;
    uint32_t bytes, rows, first, reserved;
};

/* Also what gather.cu relies on: each run's `first` counts the pieces before it, and there are operation->value in all. */
static CUresult run_kernel(struct stream *stream, const struct operation *operation)
{
    struct range *list = NULL;
    uint64_t wanted = operation->count * sizeof(struct run), bytes = wanted, filled = 0;
    struct copy *copies = checked(calloc(operation->value ? operation->value : 1, sizeof *copies));
    lock();
    uint8_t *memory = reach(&list, operation->address, &bytes, stream->context->device, 0);
    unlock();
    CUresult result = memory && bytes == wanted ? SUCCESS : ILLEGAL_ADDRESS;
    for (uint64_t i = 0; i < operation->count && !result; i++) {
        struct run run;
        memcpy(&run, memory + i * sizeof run, sizeof run);
        if (run.first != filled || !run.rows || run.rows > operation->value - filled) result = ILLEGAL_ADDRESS;
        for (uint64_t row = 0; row < run.rows && !result; row++)
            copies[filled++] = (struct copy){run.destination + row * run.destination_step, run.source + row * run.source_step, run.bytes};
    }
    if (filled != operation->value && !result) result = ILLEGAL_ADDRESS;
    lock();
    done_with(list);
    unlock();
    if (!result) result = carry_out_all(stream, operation, copies, filled);
    free(copies);
    return result;
}

static CUresult write_word(struct stream *stream, const struct operation *operation)
{
    struct range *range = NULL;
    uint64_t bytes = sizeof(uint64_t);
    lock();
    uint8_t *memory = reach(&range, operation->address, &bytes, stream->context->device, 0);
    unlock();
    CUresult result = memory && bytes == sizeof(uint64_t) ? SUCCESS : ILLEGAL_ADDRESS;
    if (!result) __atomic_store_n((uint64_t *)(void *)memory, operation->value, __ATOMIC_RELEASE);
    lock();
    done_with(range);
    unlock();
    return result;
}

static CUresult fill(struct stream *stream, const struct operation *operation)
{
    uint64_t address = operation->address, left = operation->count;
    while (left) {
        struct range *range = NULL;
        uint64_t bytes = left;
        lock();
        uint8_t *memory = reach(&range, address, &bytes, stream->context->device, 1);
        unlock();
        if (memory) memset(memory, (int)operation->value, bytes);
        lock();
        done_with(range);
        unlock();
        if (!memory) return ILLEGAL_ADDRESS;
        address += bytes;
        left -= bytes;
    }
    return SUCCESS;
}

static void drop_event(struct event *event)
{
    if (--event->references) return;
    for (struct event **link = &world.events; *link; link = &(*link)->next)
        if (*link == event) {
            *link = event->next;
            break;
        }
    free(event);
}

static CUresult execute(struct stream *stream, struct operation *operation)
{
    switch (operation->what) {
    case COPIES:
        return carry_out_all(stream, operation, operation->copies, operation->count);
    case KERNEL:
        return run_kernel(stream, operation);
    case WRITE:
        return write_word(stream, operation);
    case FILL:
        return fill(stream, operation);
    default:
        return SUCCESS;
    }
}

static void free_operation(struct operation *operation)
{
    free(operation->copies);
    free(operation->staged);
    free(operation);
}

/* A lost context executes nothing any more. */
static void *run_stream(void *argument)
{
    struct stream *stream = argument;
    pthread_setname_np(pthread_self(), "cuda-stream");
    lock();
    for (;;) {
        while (!stream->first && !stream->destroyed) wait_for_change();
        if (!stream->first) break;
        struct operation *operation = stream->first;
        while (!world.lost && !stream->destroyed &&
               (world.held || (operation->what == WAIT && operation->event->reached < operation->value)))
            wait_for_change();
        CUresult fault = world.lost ? SUCCESS : fault_of("execution");
        if (fault) world.lost = fault;
        if (!world.lost) {
            unlock();
            pause_a_little(stream);
            CUresult result = execute(stream, operation);
            lock();
            if (result && !world.lost) world.lost = result;
            if (operation->what == RECORD && operation->event->reached < operation->value) operation->event->reached = operation->value;
        }
        stream->first = operation->next;
        if (!stream->first) stream->last = NULL;
        stream->executed++;
        if (operation->event) drop_event(operation->event);
        free_operation(operation);
        changed();
    }
    for (struct stream **link = &world.streams; *link; link = &(*link)->next)
        if (*link == stream) {
            *link = stream->next;
            break;
        }
    changed();
    unlock();
    free(stream);
    return NULL;
}

static struct stream *new_stream(struct context *context, int is_default)
{
    struct stream *stream = checked(calloc(1, sizeof *stream));
    pthread_attr_t attributes;
    pthread_t thread;
    sigset_t all, before;
    stream->context = context;
    stream->seed = world.seed++;
    stream->is_default = is_default;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &attributes, run_stream, stream);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(stream);
        return NULL;
    }
    stream->next = world.streams;
    world.streams = stream;
    return stream;
}

/* 0, 1 and 2 are the default streams; here one for each context, which waits for no other. */
static struct stream *stream_of(void *handle)
{
    struct context *context = here();
    int wants_default = (uintptr_t)handle <= 2;
    for (struct stream *stream = world.streams; stream; stream = stream->next) {
        if (stream->destroyed) continue;
        if (wants_default ? stream->is_default && stream->context == context : stream == handle) return stream;
    }
    return wants_default && context ? new_stream(context, 1) : NULL;
}

static struct event *event_of(void *handle)
{
    for (struct event *event = world.events; event; event = event->next)
        if (event == handle && !event->destroyed) return event;
    return NULL;
}

static uint64_t enqueue(struct stream *stream, struct operation *operation)
{
    if (stream->last)
        stream->last->next = operation;
    else
        stream->first = operation;
    stream->last = operation;
    changed();
    return ++stream->enqueued;
}

static struct operation *operation_of(enum what what)
{
    struct operation *operation = checked(calloc(1, sizeof *operation));
    operation->what = what;
    return operation;
}

/* Holding the lock, which is given up meanwhile: the stream may be gone afterwards. */
static CUresult wait_until(struct stream *stream, uint64_t position)
{
    while (!world.lost) {
        struct stream *found = world.streams;
        while (found && found != stream) found = found->next;
        if (!found || found->executed >= position) break;
        wait_for_change();
    }
    return world.lost;
}

static CUresult wait_for_context(const struct context *context)
{
    for (;;) {
        int busy = 0;
        for (const struct stream *stream = world.streams; stream; stream = stream->next)
            busy |= stream->context == context && stream->executed != stream->enqueued;
        if (world.lost || !busy) return world.lost;
        wait_for_change();
    }
}

static CUresult stream_here(void *handle, struct stream **out)
{
    struct context *context = here();
    if (!context) return INVALID_CONTEXT;
    *out = stream_of(handle);
    return *out && (*out)->context == context ? SUCCESS : INVALID_HANDLE;
}

/* ---- the API: start, devices, contexts ---- */

static CUresult init(unsigned flags)
{
    lock();
    int total = (int)number("CUDA_DRIVER_GPUS", 2);
    if (total > GPUS_MAX) total = GPUS_MAX;
    if (flags) return leave(INVALID_VALUE);
    if (world.pid && world.pid != getpid()) return leave(NOT_INITIALIZED);
    CUresult fault = fault_of("cuInit");
    if (fault) return leave(fault);
    if (!world.pid) {
        char uuid[64], names[256] = "", *rest = names, *name;
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        world.version = (int)number("CUDA_DRIVER_VERSION", 13000);
        world.gpu_bytes = number("CUDA_DRIVER_GPU_BYTES", 1ull << 30);
        world.delay_us = (unsigned)number("CUDA_DRIVER_DELAY_US", 0);
        world.seed = (unsigned)number("CUDA_DRIVER_SEED", 1);
        world.dmabuf = (int)number("CUDA_DRIVER_DMABUF", 0);
        if (visible) snprintf(names, sizeof names, "%s", visible);
        for (int gpu = 0; gpu < total && !visible; gpu++) world.gpu_of[world.gpus++] = gpu;
        while (visible && (name = strsep(&rest, ","))) {
            for (int gpu = 0; gpu < total && *name; gpu++) {
                snprintf(uuid, sizeof uuid, "GPU-7261696c-7265-6c61-7900-00000000000%d", gpu);
                if ((strncmp(name, uuid, strlen(name)) == 0 || (name[0] == '0' + gpu && !name[1])) && world.gpus < GPUS_MAX)
                    world.gpu_of[world.gpus++] = gpu;
            }
        }
        for (int device = 0; device < world.gpus; device++) world.contexts[device].device = device;
        char faults[512] = "";
        if (getenv("CUDA_DRIVER_FAULT")) snprintf(faults, sizeof faults, "%s", getenv("CUDA_DRIVER_FAULT"));
        for (rest = faults; (name = strsep(&rest, ","));) {
            char function[48], word[16] = "";
            unsigned long long at;
            int error;
            if (sscanf(name, "%47[^:]:%llu:%d:%15s", function, &at, &error, word) >= 3) add_fault(function, at, error, *word != 0);
        }
    }
    if (!world.gpus) return leave(NO_DEVICE);
    world.pid = getpid();
    return leave(SUCCESS);
}

static CUresult driver_get_version(int *version)
{
    *version = (int)number("CUDA_DRIVER_VERSION", 13000);
    return SUCCESS;
}

static CUresult get_error_name(CUresult result, const char **name)
{
    for (size_t i = 0; i < sizeof error_names / sizeof *error_names; i++)
        if (error_names[i].result == result) {
            *name = error_names[i].name;
            return SUCCESS;
        }
    *name = NULL;
    return INVALID_VALUE;
}

static CUresult device_get_count(int *count)
{
    BEGIN_ANYWAY(cuDeviceGetCount);
    *count = world.gpus;
    return leave(SUCCESS);
}

static CUresult device_get(CUdevice *device, int ordinal)
{
    BEGIN_ANYWAY(cuDeviceGet);
    if (ordinal < 0 || ordinal >= world.gpus) return leave(INVALID_DEVICE);
    *device = ordinal;
    return leave(SUCCESS);
}

static CUresult device_get_uuid(uint8_t *uuid, CUdevice device)
{
    BEGIN_ANYWAY(cuDeviceGetUuid);
    if (device < 0 || device >= world.gpus) return leave(INVALID_DEVICE);
    memcpy(uuid, "railrelay", 10);
    memset(uuid + 9, 0, 7);
    uuid[15] = (uint8_t)world.gpu_of[device];
    return leave(SUCCESS);
}

static CUresult device_get_name(char *name, int length, CUdevice device)
{
    BEGIN_ANYWAY(cuDeviceGetName);
    if (device < 0 || device >= world.gpus || length <= 0) return leave(INVALID_DEVICE);
    snprintf(name, (size_t)length, "stand-in %d", world.gpu_of[device]);
    return leave(SUCCESS);
}

static CUresult device_get_attribute(int *value, int attribute, CUdevice device)
{
    BEGIN_ANYWAY(cuDeviceGetAttribute);
    if (device < 0 || device >= world.gpus) return leave(INVALID_DEVICE);
    switch (attribute) {
    case 11: /* MAX_PITCH */
        *value = (int)PITCH_MAX;
        break;
    case 75: /* COMPUTE_CAPABILITY_MAJOR */
        *value = 9;
        break;
    case 76: /* COMPUTE_CAPABILITY_MINOR */
        *value = 0;
        break;
    case 124: /* DMA_BUF_SUPPORTED */
        *value = world.dmabuf;
        break;
    default:
        *value = 1;
    }
    return leave(SUCCESS);
}

static CUresult device_can_access_peer(int *can, CUdevice device, CUdevice peer)
{
    BEGIN_ANYWAY(cuDeviceCanAccessPeer);
    *can = device != peer;
    return leave(SUCCESS);
}

static CUresult primary_ctx_retain(struct context **context, CUdevice device)
{
    BEGIN(cuDevicePrimaryCtxRetain);
    if (device < 0 || device >= world.gpus) return leave(INVALID_DEVICE);
    *context = &world.contexts[device];
    (*context)->retained++;
    return leave(SUCCESS);
}

/* What is left in the context goes with it; counted, because whoever owns it has forgotten it. */
static void end_context(struct context *context)
{
    uint64_t left = 0;
    for (struct stream *stream = world.streams; stream; stream = stream->next) {
        if (stream->context != context) continue;
        left += !stream->is_default && !stream->destroyed;
        stream->destroyed = 1;
    }
    changed();
    for (int running = 1; running;) {
        running = 0;
        for (const struct stream *stream = world.streams; stream; stream = stream->next) running |= stream->context == context;
        if (running) wait_for_change();
    }
    for (struct event *event = world.events, *next; event; event = next) {
        next = event->next;
        if (event->context != context || event->destroyed) continue;
        left++;
        event->destroyed = 1;
        drop_event(event);
    }
    for (struct range *range = world.ranges, *next; range; range = next) {
        next = range->next;
        if (range->kind == OPENED ? range->opener != context : range->device != context->device || range->kind == MAPPED) continue;
        left++;
        remove_range(range);
    }
    world.contexts_ended_in_use += left;
}

static CUresult primary_ctx_release(CUdevice device)
{
    BEGIN_ANYWAY(cuDevicePrimaryCtxRelease);
    if (device < 0 || device >= world.gpus) return leave(INVALID_DEVICE);
    struct context *context = &world.contexts[device];
    if (!context->retained) return leave(INVALID_CONTEXT);
    if (!--context->retained) end_context(context);
    return leave(SUCCESS);
}

static CUresult ctx_set_current(struct context *context)
{
    BEGIN(cuCtxSetCurrent);
    if (context && !is_context(context)) return leave(CONTEXT_IS_DESTROYED);
    if (!current.depth) current.depth = 1;
    current.stack[current.depth - 1] = context;
    return leave(SUCCESS);
}

static CUresult ctx_get_current(struct context **context)
{
    BEGIN_ANYWAY(cuCtxGetCurrent);
    *context = current.depth ? current.stack[current.depth - 1] : NULL;
    return leave(SUCCESS);
}

static CUresult ctx_push_current(struct context *context)
{
    BEGIN(cuCtxPushCurrent);
    if (!is_context(context)) return leave(CONTEXT_IS_DESTROYED);
    if (current.depth == CONTEXTS_MAX) return leave(INVALID_VALUE);
    current.stack[current.depth++] = context;
    return leave(SUCCESS);
}

static CUresult ctx_pop_current(struct context **context)
{
    BEGIN_ANYWAY(cuCtxPopCurrent);
    if (!current.depth) return leave(INVALID_CONTEXT);
    current.depth--;
    if (context) *context = current.stack[current.depth];
    return leave(SUCCESS);
}

static CUresult ctx_synchronize(void)
{
    BEGIN(cuCtxSynchronize);
    struct context *context = here();
    return leave(context ? wait_for_context(context) : INVALID_CONTEXT);
}

static CUresult ctx_get_device(CUdevice *device)
{
    BEGIN_ANYWAY(cuCtxGetDevice);
    const struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    *device = context->device;
    return leave(SUCCESS);
}

static CUresult ctx_get_stream_priority_range(int *least, int *greatest)
{
    BEGIN(cuCtxGetStreamPriorityRange);
    if (!here()) return leave(INVALID_CONTEXT);
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return leave(SUCCESS);
}

/* ---- streams and events ---- */

static CUresult stream_create(struct stream **stream, unsigned flags)
{
    (void)flags;
    BEGIN(cuStreamCreate);
    struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    *stream = new_stream(context, 0);
    return leave(*stream ? SUCCESS : OUT_OF_MEMORY);
}

static CUresult stream_create_with_priority(struct stream **stream, unsigned flags, int priority)
{
    (void)flags;
    (void)priority;
    BEGIN(cuStreamCreateWithPriority);
    struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    *stream = new_stream(context, 0);
    return leave(*stream ? SUCCESS : OUT_OF_MEMORY);
}

/* What is enqueued still runs. */
static CUresult stream_destroy(void *handle)
{
    BEGIN(cuStreamDestroy);
    struct stream *stream = (uintptr_t)handle > 2 ? stream_of(handle) : NULL;
    if (!stream) return leave(INVALID_HANDLE);
    stream->destroyed = 1;
    changed();
    return leave(SUCCESS);
}

static CUresult stream_query(void *handle)
{
    BEGIN(cuStreamQuery);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    return leave(stream->executed == stream->enqueued ? SUCCESS : NOT_READY);
}

static CUresult stream_synchronize(void *handle)
{
    BEGIN(cuStreamSynchronize);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    return leave(result ? result : wait_until(stream, stream->enqueued));
}

static CUresult stream_wait_event(void *handle, void *event_handle, unsigned flags)
{
    (void)flags;
    BEGIN(cuStreamWaitEvent);
    struct stream *stream;
    struct event *event = event_of(event_handle);
    CUresult result = stream_here(handle, &stream);
    if (result || !event) return leave(result ? result : INVALID_HANDLE);
    struct operation *operation = operation_of(WAIT);
    operation->event = event;
    operation->value = event->recorded;
    event->references++;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static CUresult stream_write_value64(void *handle, CUdeviceptr address, uint64_t value, unsigned flags)
{
    BEGIN(cuStreamWriteValue64);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    if (address % 8 || flags || !find(address)) return leave(INVALID_VALUE);
    struct operation *operation = operation_of(WRITE);
    operation->address = address;
    operation->value = value;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static CUresult event_create(struct event **out, unsigned flags)
{
    (void)flags;
    BEGIN(cuEventCreate);
    struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    struct event *event = checked(calloc(1, sizeof *event));
    event->context = context;
    event->references = 1;
    event->next = world.events;
    world.events = event;
    *out = event;
    return leave(SUCCESS);
}

static CUresult event_record(void *handle, void *stream_handle)
{
    BEGIN(cuEventRecord);
    struct stream *stream;
    struct event *event = event_of(handle);
    CUresult result = stream_here(stream_handle, &stream);
    if (result || !event || event->context != stream->context) return leave(result ? result : INVALID_HANDLE);
    struct operation *operation = operation_of(RECORD);
    operation->event = event;
    operation->value = ++event->recorded;
    event->references++;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static CUresult event_query(void *handle)
{
    BEGIN(cuEventQuery);
    const struct event *event = event_of(handle);
    if (!here()) return leave(INVALID_CONTEXT);
    if (!event) return leave(INVALID_HANDLE);
    return leave(event->reached >= event->recorded ? SUCCESS : NOT_READY);
}

static CUresult event_synchronize(void *handle)
{
    BEGIN(cuEventSynchronize);
    struct event *event = event_of(handle);
    if (!event) return leave(INVALID_HANDLE);
    uint64_t until = event->recorded;
    event->references++;
    while (!world.lost && event->reached < until) wait_for_change();
    drop_event(event);
    return leave(world.lost);
}

static CUresult event_destroy(void *handle)
{
    BEGIN(cuEventDestroy);
    struct event *event = event_of(handle);
    if (!event) return leave(INVALID_HANDLE);
    event->destroyed = 1;
    drop_event(event);
    return leave(SUCCESS);
}

/* ---- memory ---- */

static int no_room(int device, uint64_t bytes)
{
    return bytes > world.gpu_bytes || world.used_bytes[device] > world.gpu_bytes - bytes;
}

/* Two mappings: at the GPU's address the CPU finds nothing. */
static CUresult map_memory(enum kind kind, int fd, uint64_t bytes, int device, uint64_t *address)
{
    *address = address_space(bytes, PAGE_BYTES);
    uint8_t *memory = mmap(NULL, rounded(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (!*address || memory == MAP_FAILED) {
        if (*address) give_back(*address, bytes);
        if (memory != MAP_FAILED) munmap(memory, rounded(bytes));
        close(fd);
        return OUT_OF_MEMORY;
    }
    add_range(kind, *address, bytes, memory, fd, device);
    return SUCCESS;
}

static CUresult mem_alloc(CUdeviceptr *address, size_t bytes)
{
    BEGIN(cuMemAlloc);
    const struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    if (!bytes) return leave(INVALID_VALUE);
    if (no_room(context->device, rounded(bytes))) return leave(OUT_OF_MEMORY);
    int fd = gpu_memory(context->device, bytes, "memory");
    if (fd < 0) return leave(OUT_OF_MEMORY);
    CUresult result = map_memory(ALLOCATED, fd, bytes, context->device, address);
    if (!result) world.used_bytes[context->device] += rounded(bytes);
    return leave(result);
}

static CUresult mem_free(CUdeviceptr address)
{
    BEGIN(cuMemFree);
    struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    CUresult result = wait_for_context(context);
    struct range *range = find(address);
    if (!range || range->kind != ALLOCATED || range->address != address) return leave(INVALID_VALUE);
    if (!result) remove_range(range);
    return leave(result);
}

static CUresult mem_get_info(size_t *available, size_t *total)
{
    BEGIN(cuMemGetInfo);
    const struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    *total = world.gpu_bytes;
    *available = world.gpu_bytes - world.used_bytes[context->device];
    return leave(SUCCESS);
}

static CUresult mem_host_alloc(void **out, size_t bytes, unsigned flags)
{
    (void)flags;
    BEGIN(cuMemHostAlloc);
    const struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    void *memory = bytes ? mmap(NULL, rounded(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (memory == MAP_FAILED) return leave(bytes ? OUT_OF_MEMORY : INVALID_VALUE);
    add_range(HOST_ALLOCATED, (uint64_t)(uintptr_t)memory, bytes, memory, -1, context->device);
    *out = memory;
    return leave(SUCCESS);
}

static CUresult mem_free_host(void *memory)
{
    BEGIN(cuMemFreeHost);
    struct context *context = here();
    if (!context) return leave(INVALID_CONTEXT);
    CUresult result = wait_for_context(context);
    struct range *range = find((uint64_t)(uintptr_t)memory);
    if (!range || range->kind != HOST_ALLOCATED || range->memory != memory) return leave(INVALID_VALUE);
    if (!result) remove_range(range);
    return leave(result);
}

static int is_mapped(uint64_t address, uint64_t bytes)
{
    uint64_t first = address / PAGE_BYTES * PAGE_BYTES;
    for (uint64_t page = first; page < address + bytes; page += PAGE_BYTES) {
        unsigned char resident;
        if (mincore((void *)(uintptr_t)page, PAGE_BYTES, &resident)) return 0;
    }
    return 1;
}

static CUresult mem_host_register(void *memory, size_t bytes, unsigned flags)
{
    (void)flags;
    BEGIN(cuMemHostRegister);
    const struct context *context = here();
    uint64_t address = (uint64_t)(uintptr_t)memory;
    if (!context) return leave(INVALID_CONTEXT);
    if (!memory || !bytes || !is_mapped(address, bytes)) return leave(INVALID_VALUE);
    for (const struct range *range = world.ranges; range; range = range->next) {
        uint64_t host = (uint64_t)(uintptr_t)range->host;
        if (range->host && address < host + range->bytes && host < address + bytes) return leave(ALREADY_REGISTERED);
    }
    uint64_t known = address_space(bytes + PAGE_BYTES, PAGE_BYTES);
    if (!known) return leave(OUT_OF_MEMORY);
    /* The page of the reservation's start is that of the memory's, so that alignments agree. */
    struct range *range = add_range(HOST_REGISTERED, known + address % PAGE_BYTES, bytes, memory, -1, context->device);
    range->host = memory;
    return leave(SUCCESS);
}

/* The memory must still be mapped. */
static CUresult mem_host_unregister(void *memory)
{
    BEGIN(cuMemHostUnregister);
    struct range *range = find_host((uint64_t)(uintptr_t)memory);
    if (!here()) return leave(INVALID_CONTEXT);
    if (!range || range->host != memory) return leave(NOT_REGISTERED);
    if (!is_mapped((uint64_t)(uintptr_t)memory, range->bytes)) return leave(INVALID_VALUE);
    remove_range(range);
    return leave(SUCCESS);
}

static CUresult mem_host_get_device_pointer(CUdeviceptr *address, void *memory, unsigned flags)
{
    BEGIN(cuMemHostGetDevicePointer);
    uint64_t host = (uint64_t)(uintptr_t)memory;
    const struct range *range = find_host(host);
    if (flags) return leave(INVALID_VALUE);
    if (range) {
        *address = range->address + (host - (uint64_t)(uintptr_t)range->host);
        return leave(SUCCESS);
    }
    range = find(host);
    if (!range || range->kind != HOST_ALLOCATED) return leave(INVALID_VALUE);
    *address = host;
    return leave(SUCCESS);
}

static CUresult pointer_get_attribute(void *data, int attribute, CUdeviceptr address)
{
    BEGIN(cuPointerGetAttribute);
    const struct range *range = find(address);
    if (!range) range = find_host(address);
    if (!range) return leave(INVALID_VALUE);
    int is_host = range->kind == HOST_ALLOCATED || range->kind == HOST_REGISTERED;
    uint64_t start = range->address, bytes = range->bytes;
    const struct reservation *reservation = range->kind == MAPPED ? world.reservations : NULL;
    while (reservation && address - reservation->address >= reservation->bytes) reservation = reservation->next;
    if (reservation) { /* as CUDA does: not what is mapped, but what was reserved */
        start = reservation->address;
        bytes = reservation->bytes;
    }
    switch (attribute) {
    case 2: /* MEMORY_TYPE */
        *(unsigned *)data = is_host ? 1 : 2;
        break;
    case 9: /* DEVICE_ORDINAL */
        *(int *)data = range->device;
        break;
    case 11: /* RANGE_START_ADDR */
        *(uint64_t *)data = start;
        break;
    case 12: /* RANGE_SIZE */
        *(size_t *)data = bytes;
        break;
    default:
        return leave(INVALID_VALUE);
    }
    return leave(SUCCESS);
}

static CUresult mem_get_address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    BEGIN(cuMemGetAddressRange);
    const struct range *range = find(address);
    if (!range) return leave(NOT_FOUND);
    if (base) *base = range->address;
    if (bytes) *bytes = range->bytes;
    return leave(SUCCESS);
}

struct ipc_handle {
    uint64_t magic, bytes;
    int32_t pid, fd;
    uint8_t unused[40];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "CUipcMemHandle");
#define IPC_MAGIC 0x6970632d6d656d00ull

static CUresult ipc_get_mem_handle(struct ipc_handle *handle, CUdeviceptr address)
{
    BEGIN(cuIpcGetMemHandle);
    const struct range *range = find(address);
    if (!range || range->kind != ALLOCATED) return leave(INVALID_VALUE);
    memset(handle, 0, sizeof *handle);
    handle->magic = IPC_MAGIC;
    handle->bytes = range->bytes;
    handle->pid = getpid();
    handle->fd = range->fd;
    return leave(SUCCESS);
}

/* The process that exported it cannot open it, as with CUDA. */
static CUresult ipc_open_mem_handle(CUdeviceptr *address, struct ipc_handle handle, unsigned flags)
{
    (void)flags;
    BEGIN(cuIpcOpenMemHandle);
    if (!here()) return leave(INVALID_CONTEXT);
    if (handle.magic != IPC_MAGIC) return leave(INVALID_VALUE);
    if (handle.pid == getpid()) return leave(INVALID_CONTEXT);
    char path[64];
    struct stat facts;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int device = gpu_of_memory(path, "memory");
    int fd = device < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return leave(INVALID_HANDLE);
    if (fstat(fd, &facts) || (uint64_t)facts.st_size < handle.bytes) {
        close(fd);
        return leave(INVALID_HANDLE);
    }
    CUresult result = map_memory(OPENED, fd, handle.bytes, device, address);
    if (!result) world.ranges->opener = here();
    return leave(result);
}

static CUresult ipc_close_mem_handle(CUdeviceptr address)
{
    BEGIN(cuIpcCloseMemHandle);
    struct range *range = find(address);
    if (!range || range->kind != OPENED || range->address != address) return leave(INVALID_VALUE);
    remove_range(range);
    return leave(SUCCESS);
}

/* ---- virtual memory management ---- */

struct location {
    int type, id;
};

struct properties { /* CUmemAllocationProp */
    int type, handle_types;
    struct location location;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
};
_Static_assert(sizeof(struct properties) == 32, "CUmemAllocationProp");

struct access {
    struct location location;
    int flags;
};

static CUresult mem_get_allocation_granularity(size_t *granularity, const struct properties *properties, int option)
{
    BEGIN_ANYWAY(cuMemGetAllocationGranularity);
    if (properties->type != 1 || properties->location.type != 1 || option < 0 || option > 1) return leave(INVALID_VALUE);
    if (properties->location.id < 0 || properties->location.id >= world.gpus) return leave(INVALID_DEVICE);
    *granularity = GRANULARITY_BYTES;
    return leave(SUCCESS);
}

static struct allocation *add_allocation(int fd, uint64_t bytes, int device, int exportable)
{
    struct allocation *allocation = checked(calloc(1, sizeof *allocation));
    allocation->fd = fd;
    allocation->bytes = bytes;
    allocation->device = device;
    allocation->exportable = exportable;
    allocation->handles = 1;
    allocation->next = world.allocations;
    world.allocations = allocation;
    world.used_bytes[device] += bytes;
    return allocation;
}

static CUresult mem_create(uint64_t *handle, size_t bytes, const struct properties *properties, uint64_t flags)
{
    BEGIN(cuMemCreate);
    int device = properties->location.id;
    if (flags || !bytes || bytes % GRANULARITY_BYTES || properties->type != 1 || properties->location.type != 1) return leave(INVALID_VALUE);
    if (device < 0 || device >= world.gpus) return leave(INVALID_DEVICE);
    if (no_room(device, bytes)) return leave(OUT_OF_MEMORY);
    int fd = gpu_memory(device, bytes, "vmm");
    if (fd < 0) return leave(OUT_OF_MEMORY);
    make_dirty(fd, bytes);
    *handle = (uint64_t)(uintptr_t)add_allocation(fd, bytes, device, properties->handle_types == 1);
    return leave(SUCCESS);
}

static CUresult mem_release(uint64_t handle)
{
    BEGIN(cuMemRelease);
    struct allocation *allocation = allocation_of(handle);
    if (!allocation) return leave(INVALID_VALUE);
    allocation->handles--;
    drop_allocation(allocation);
    return leave(SUCCESS);
}

static CUresult mem_retain_allocation_handle(uint64_t *handle, void *address)
{
    BEGIN(cuMemRetainAllocationHandle);
    const struct range *range = find((uint64_t)(uintptr_t)address);
    if (!range || range->kind != MAPPED) return leave(INVALID_VALUE);
    range->allocation->handles++;
    *handle = (uint64_t)(uintptr_t)range->allocation;
    return leave(SUCCESS);
}

static CUresult mem_export_to_shareable_handle(void *out, uint64_t handle, int type, uint64_t flags)
{
    BEGIN(cuMemExportToShareableHandle);
    const struct allocation *allocation = allocation_of(handle);
    if (!allocation || type != 1 || flags || !allocation->exportable) return leave(INVALID_VALUE);
    int fd = fcntl(allocation->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return leave(OUT_OF_MEMORY);
    *(int *)out = fd;
    return leave(SUCCESS);
}

static CUresult mem_import_from_shareable_handle(uint64_t *handle, void *source, int type)
{
    BEGIN(cuMemImportFromShareableHandle);
    char path[64];
    struct stat facts;
    int given = (int)(intptr_t)source;
    snprintf(path, sizeof path, "/proc/self/fd/%d", given);
    int device = type == 1 ? gpu_of_memory(path, "vmm") : -1;
    int fd = device < 0 ? -1 : fcntl(given, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return leave(INVALID_VALUE);
    if (fstat(fd, &facts)) {
        close(fd);
        return leave(INVALID_VALUE);
    }
    *handle = (uint64_t)(uintptr_t)add_allocation(fd, (uint64_t)facts.st_size, device, 1);
    return leave(SUCCESS);
}

static CUresult mem_address_reserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr hint, uint64_t flags)
{
    (void)hint;
    BEGIN(cuMemAddressReserve);
    if (!bytes || bytes % GRANULARITY_BYTES || alignment & (alignment - 1) || flags) return leave(INVALID_VALUE);
    *address = address_space(bytes, alignment > GRANULARITY_BYTES ? alignment : GRANULARITY_BYTES);
    if (!*address) return leave(OUT_OF_MEMORY);
    struct reservation *reservation = checked(calloc(1, sizeof *reservation));
    *reservation = (struct reservation){world.reservations, *address, bytes};
    world.reservations = reservation;
    return leave(SUCCESS);
}

static CUresult mem_address_free(CUdeviceptr address, size_t bytes)
{
    BEGIN(cuMemAddressFree);
    for (const struct range *range = world.ranges; range; range = range->next)
        if (range->kind == MAPPED && range->address >= address && range->address - address < bytes) return leave(INVALID_VALUE);
    for (struct reservation **link = &world.reservations; *link; link = &(*link)->next) {
        struct reservation *reservation = *link;
        if (reservation->address != address || reservation->bytes != bytes) continue;
        *link = reservation->next;
        give_back(address, bytes);
        free(reservation);
        return leave(SUCCESS);
    }
    return leave(INVALID_VALUE);
}

static CUresult mem_map(CUdeviceptr address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags)
{
    BEGIN(cuMemMap);
    struct allocation *allocation = allocation_of(handle);
    const struct reservation *reservation = world.reservations;
    while (reservation && (address < reservation->address || address - reservation->address >= reservation->bytes))
        reservation = reservation->next;
    if (!allocation || !reservation || flags || bytes % GRANULARITY_BYTES || address % GRANULARITY_BYTES || offset ||
        bytes > allocation->bytes || bytes > reservation->bytes - (address - reservation->address))
        return leave(INVALID_VALUE);
    for (const struct range *range = world.ranges; range; range = range->next)
        if (range->address < address + bytes && address < range->address + range->bytes) return leave(INVALID_VALUE);
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, allocation->fd, 0);
    if (memory == MAP_FAILED) return leave(OUT_OF_MEMORY);
    add_range(MAPPED, address, bytes, memory, -1, allocation->device)->allocation = allocation;
    allocation->mappings++;
    return leave(SUCCESS);
}

static CUresult mem_set_access(CUdeviceptr address, size_t bytes, const struct access *access, size_t count)
{
    BEGIN(cuMemSetAccess);
    uint64_t covered = 0;
    for (struct range *range = world.ranges; range; range = range->next) {
        if (range->kind != MAPPED || range->address < address || range->address - address >= bytes) continue;
        covered += range->bytes;
        for (size_t i = 0; i < count; i++) {
            if (access[i].location.type != 1 || access[i].location.id < 0 || access[i].location.id >= world.gpus) return leave(INVALID_DEVICE);
            uint32_t bit = 1u << access[i].location.id;
            range->access = access[i].flags == 3 ? range->access | bit : range->access & ~bit;
        }
    }
    return leave(covered == bytes ? SUCCESS : INVALID_VALUE);
}

static CUresult mem_unmap(CUdeviceptr address, size_t bytes)
{
    BEGIN(cuMemUnmap);
    uint64_t found = 0;
    for (struct range *range = world.ranges, *next; range; range = next) {
        next = range->next;
        if (range->kind != MAPPED || range->address < address || range->address - address >= bytes) continue;
        struct allocation *allocation = range->allocation;
        found += range->bytes;
        remove_range(range);
        allocation->mappings--;
        drop_allocation(allocation);
        next = world.ranges;
    }
    return leave(found == bytes ? SUCCESS : INVALID_VALUE);
}

static CUresult mem_get_handle_for_address_range(void *out, CUdeviceptr address, size_t bytes, int type, uint64_t flags)
{
    (void)flags;
    BEGIN(cuMemGetHandleForAddressRange);
    const struct range *range = find(address);
    if (type != 1 || address % PAGE_BYTES || bytes % PAGE_BYTES) return leave(INVALID_VALUE);
    if (!world.dmabuf) return leave(NOT_SUPPORTED);
    if (!range) return leave(INVALID_VALUE);
    int fd = fcntl(range->kind == MAPPED ? range->allocation->fd : range->fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return leave(INVALID_VALUE);
    *(int *)out = fd;
    return leave(SUCCESS);
}

/* ---- copies ---- */

/* Whether all of it is memory that the driver knows: 1, 0 (pageable), or -1 (it begins in known memory and passes its
 * end). */
static int is_known(uint64_t address, uint64_t bytes)
{
    int any = 0;
    while (bytes) {
        const struct range *range = find(address);
        uint64_t begin = range ? range->address : 0;
        if (!range && (range = find_host(address))) begin = (uint64_t)(uintptr_t)range->host;
        if (!range) return any ? -1 : 0;
        uint64_t left = range->bytes - (address - begin);
        if (left >= bytes) return 1;
        address += left;
        bytes -= left;
        any = 1;
    }
    return 1;
}

static CUresult memcpy_on(struct stream *stream, CUdeviceptr destination, CUdeviceptr source, size_t bytes, int synchronous)
{
    if (!bytes) return SUCCESS;
    int from = is_known(source, bytes), to = is_known(destination, bytes);
    if (from < 0 || to < 0) return INVALID_VALUE;
    struct operation *operation = operation_of(COPIES);
    operation->by_engine = 1;
    operation->count = 1;
    operation->copies = checked(calloc(1, sizeof *operation->copies));
    operation->copies[0] = (struct copy){destination, source, bytes};
    if (!from) { /* staged before the call returns */
        operation->staged = checked(malloc(bytes));
        memcpy(operation->staged, (const void *)(uintptr_t)source, bytes);
    }
    uint64_t position = enqueue(stream, operation);
    return synchronous || !to ? wait_until(stream, position) : SUCCESS;
}

static CUresult memcpy_async(CUdeviceptr destination, CUdeviceptr source, size_t bytes, void *handle)
{
    BEGIN(cuMemcpyAsync);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    return leave(result ? result : memcpy_on(stream, destination, source, bytes, 0));
}

static CUresult memcpy_sync(CUdeviceptr destination, CUdeviceptr source, size_t bytes)
{
    BEGIN(cuMemcpy);
    struct stream *stream;
    CUresult result = stream_here(NULL, &stream);
    return leave(result ? result : memcpy_on(stream, destination, source, bytes, 1));
}

static CUresult memcpy_dtoh(void *destination, CUdeviceptr source, size_t bytes)
{
    return memcpy_sync((uint64_t)(uintptr_t)destination, source, bytes);
}

static CUresult memcpy_htod(CUdeviceptr destination, const void *source, size_t bytes)
{
    return memcpy_sync(destination, (uint64_t)(uintptr_t)source, bytes);
}

struct copy_attributes {
    uint32_t access_order;
    struct location source_hint, destination_hint;
    uint32_t flags;
};
_Static_assert(sizeof(struct copy_attributes) == 24, "CUmemcpyAttributes");

static CUresult memcpy_batch_async(CUdeviceptr *destinations, CUdeviceptr *sources, size_t *sizes, size_t count, struct copy_attributes *attributes,
                                   size_t *attribute_starts, size_t attribute_count, void *handle)
{
    BEGIN(cuMemcpyBatchAsync);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    if ((uintptr_t)handle <= 2 || !count || !attribute_count || attribute_starts[0]) return leave(INVALID_VALUE);
    for (size_t i = 0; i < attribute_count; i++)
        if (attributes[i].access_order < 1 || attributes[i].access_order > 3) return leave(INVALID_VALUE);
    for (size_t i = 0; i < count; i++)
        if (!sizes[i] || is_known(sources[i], sizes[i]) != 1 || is_known(destinations[i], sizes[i]) != 1) return leave(INVALID_VALUE);
    struct operation *operation = operation_of(COPIES);
    operation->by_engine = 1;
    operation->count = count;
    operation->copies = checked(calloc(count, sizeof *operation->copies));
    for (size_t i = 0; i < count; i++) operation->copies[i] = (struct copy){destinations[i], sources[i], sizes[i]};
    enqueue(stream, operation);
    return leave(SUCCESS);
}

struct operand_3d {
    uint32_t type;
    uint64_t address, row_bytes, layer_rows;
    struct location hint;
};

struct copy_3d { /* CUDA_MEMCPY3D_BATCH_OP */
    struct operand_3d source, destination;
    uint64_t width, height, depth;
    uint32_t access_order, flags;
};
_Static_assert(sizeof(struct copy_3d) == 112, "CUDA_MEMCPY3D_BATCH_OP");

/* Of pointers, one layer each. */
static CUresult memcpy_3d_batch_async(size_t count, const struct copy_3d *copies, unsigned long long flags, void *handle)
{
    BEGIN(cuMemcpy3DBatchAsync);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    if ((uintptr_t)handle <= 2 || !count || flags) return leave(INVALID_VALUE);
    uint64_t rows = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        const struct copy_3d *copy = &copies[i];
        if (copy->source.type != 1 || copy->destination.type != 1 || !copy->width || !copy->height || copy->depth != 1 || copy->flags > 1 ||
            copy->access_order < 1 || copy->access_order > 3 || copy->source.row_bytes < copy->width || copy->destination.row_bytes < copy->width)
            return leave(INVALID_VALUE);
        rows += copy->height;
    }
    struct operation *operation = operation_of(COPIES);
    operation->by_engine = 1;
    operation->count = rows;
    operation->copies = checked(calloc(rows, sizeof *operation->copies));
    for (size_t i = 0; i < count; i++) {
        for (uint64_t row = 0; row < copies[i].height; row++) {
            struct copy one = {copies[i].destination.address + row * copies[i].destination.row_bytes,
                               copies[i].source.address + row * copies[i].source.row_bytes, copies[i].width};
            operation->copies[at++] = one;
            if (is_known(one.source, one.bytes) == 1 && is_known(one.destination, one.bytes) == 1) continue;
            free_operation(operation);
            return leave(INVALID_VALUE);
        }
    }
    enqueue(stream, operation);
    return leave(SUCCESS);
}

struct copy_2d { /* CUDA_MEMCPY2D */
    uint64_t source_x, source_y;
    uint32_t source_type;
    const void *source_host;
    uint64_t source;
    void *source_array;
    uint64_t source_pitch;
    uint64_t destination_x, destination_y;
    uint32_t destination_type;
    void *destination_host;
    uint64_t destination;
    void *destination_array;
    uint64_t destination_pitch;
    uint64_t width, height;
};
_Static_assert(sizeof(struct copy_2d) == 128, "CUDA_MEMCPY2D");

static CUresult memcpy_2d_async(const struct copy_2d *copy, void *handle)
{
    BEGIN(cuMemcpy2DAsync);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    if (copy->source_type != 4 || copy->destination_type != 4 || !copy->width || !copy->height || copy->source_x || copy->source_y ||
        copy->destination_x || copy->destination_y)
        return leave(INVALID_VALUE);
    if (copy->source_pitch < copy->width || copy->destination_pitch < copy->width || copy->source_pitch > PITCH_MAX ||
        copy->destination_pitch > PITCH_MAX)
        return leave(INVALID_VALUE);
    struct operation *operation = operation_of(COPIES);
    operation->by_engine = 1;
    operation->count = copy->height;
    operation->copies = checked(calloc(copy->height, sizeof *operation->copies));
    for (uint64_t row = 0; row < copy->height; row++) {
        struct copy one = {copy->destination + row * copy->destination_pitch, copy->source + row * copy->source_pitch, copy->width};
        operation->copies[row] = one;
        if (is_known(one.source, one.bytes) != 1 || is_known(one.destination, one.bytes) != 1) {
            free_operation(operation);
            return leave(INVALID_VALUE);
        }
    }
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static CUresult memset_d8_async(CUdeviceptr address, unsigned char byte, size_t bytes, void *handle)
{
    BEGIN(cuMemsetD8Async);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    if (is_known(address, bytes) != 1) return leave(INVALID_VALUE);
    struct operation *operation = operation_of(FILL);
    operation->address = address;
    operation->value = byte;
    operation->count = bytes;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

static CUresult memset_d8(CUdeviceptr address, unsigned char byte, size_t bytes) { return memset_d8_async(address, byte, bytes, NULL); }

/* ---- the gather kernel ---- */

static CUresult module_load_data(struct module **out, const void *image)
{
    BEGIN(cuModuleLoadData);
    struct module *module = checked(calloc(1, sizeof *module));
    if (!here() || sscanf(image, "stand-in cubin with %63s", module->function) != 1) {
        free(module);
        return leave(here() ? INVALID_IMAGE : INVALID_CONTEXT);
    }
    module->next = world.modules;
    world.modules = module;
    *out = module;
    return leave(SUCCESS);
}

static CUresult module_get_function(void **function, struct module *module, const char *name)
{
    BEGIN(cuModuleGetFunction);
    for (const struct module *known = world.modules; known; known = known->next)
        if (known == module) {
            *function = module;
            return leave(strcmp(name, module->function) ? NOT_FOUND : SUCCESS);
        }
    return leave(INVALID_HANDLE);
}

static CUresult module_unload(struct module *module)
{
    BEGIN(cuModuleUnload);
    for (struct module **link = &world.modules; *link; link = &(*link)->next) {
        if (*link != module) continue;
        *link = module->next;
        free(module);
        return leave(SUCCESS);
    }
    return leave(INVALID_HANDLE);
}

static CUresult launch_kernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                              unsigned block_z, unsigned shared_bytes, void *handle, void **parameters, void **extra)
{
    BEGIN(cuLaunchKernel);
    struct stream *stream;
    CUresult result = stream_here(handle, &stream);
    if (result) return leave(result);
    const struct module *module = world.modules;
    while (module && module != function) module = module->next;
    if (!module) return leave(INVALID_HANDLE);
    if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x > 1024 || block_y != 1 || block_z != 1 || shared_bytes > 49152 || extra)
        return leave(INVALID_VALUE);
    uint64_t list;
    uint32_t count, pieces, lanes;
    memcpy(&list, parameters[0], sizeof list);
    memcpy(&count, parameters[1], sizeof count);
    memcpy(&pieces, parameters[2], sizeof pieces);
    memcpy(&lanes, parameters[3], sizeof lanes);
    if (!lanes || block_x % lanes) return leave(INVALID_VALUE);
    struct operation *operation = operation_of(KERNEL);
    operation->address = list;
    operation->count = count;
    operation->value = pieces;
    enqueue(stream, operation);
    return leave(SUCCESS);
}

/* ---- what is there ---- */

typedef void (*function_pointer)(void);

static CUresult get_proc_address(const char *name, void **function, int version, uint64_t flags, int *status);

#define FUNCTION(name, implementation) {#name, (function_pointer)(implementation)}
static const struct {
    const char *name;
    function_pointer function;
} functions[] = {
    FUNCTION(cuInit, init),
    FUNCTION(cuDriverGetVersion, driver_get_version),
    FUNCTION(cuGetErrorName, get_error_name),
    FUNCTION(cuGetErrorString, get_error_name),
    FUNCTION(cuGetProcAddress, get_proc_address),
    FUNCTION(cuDeviceGetCount, device_get_count),
    FUNCTION(cuDeviceGet, device_get),
    FUNCTION(cuDeviceGetUuid, device_get_uuid),
    FUNCTION(cuDeviceGetName, device_get_name),
    FUNCTION(cuDeviceGetAttribute, device_get_attribute),
    FUNCTION(cuDeviceCanAccessPeer, device_can_access_peer),
    FUNCTION(cuDevicePrimaryCtxRetain, primary_ctx_retain),
    FUNCTION(cuDevicePrimaryCtxRelease, primary_ctx_release),
    FUNCTION(cuCtxSetCurrent, ctx_set_current),
    FUNCTION(cuCtxGetCurrent, ctx_get_current),
    FUNCTION(cuCtxPushCurrent, ctx_push_current),
    FUNCTION(cuCtxPopCurrent, ctx_pop_current),
    FUNCTION(cuCtxSynchronize, ctx_synchronize),
    FUNCTION(cuCtxGetDevice, ctx_get_device),
    FUNCTION(cuCtxGetStreamPriorityRange, ctx_get_stream_priority_range),
    FUNCTION(cuStreamCreate, stream_create),
    FUNCTION(cuStreamCreateWithPriority, stream_create_with_priority),
    FUNCTION(cuStreamDestroy, stream_destroy),
    FUNCTION(cuStreamQuery, stream_query),
    FUNCTION(cuStreamSynchronize, stream_synchronize),
    FUNCTION(cuStreamWaitEvent, stream_wait_event),
    FUNCTION(cuStreamWriteValue64, stream_write_value64),
    FUNCTION(cuEventCreate, event_create),
    FUNCTION(cuEventRecord, event_record),
    FUNCTION(cuEventQuery, event_query),
    FUNCTION(cuEventSynchronize, event_synchronize),
    FUNCTION(cuEventDestroy, event_destroy),
    FUNCTION(cuMemAlloc, mem_alloc),
    FUNCTION(cuMemFree, mem_free),
    FUNCTION(cuMemGetInfo, mem_get_info),
    FUNCTION(cuMemHostAlloc, mem_host_alloc),
    FUNCTION(cuMemFreeHost, mem_free_host),
    FUNCTION(cuMemHostRegister, mem_host_register),
    FUNCTION(cuMemHostUnregister, mem_host_unregister),
    FUNCTION(cuMemHostGetDevicePointer, mem_host_get_device_pointer),
    FUNCTION(cuPointerGetAttribute, pointer_get_attribute),
    FUNCTION(cuMemGetAddressRange, mem_get_address_range),
    FUNCTION(cuIpcGetMemHandle, ipc_get_mem_handle),
    FUNCTION(cuIpcOpenMemHandle, ipc_open_mem_handle),
    FUNCTION(cuIpcCloseMemHandle, ipc_close_mem_handle),
    FUNCTION(cuMemGetAllocationGranularity, mem_get_allocation_granularity),
    FUNCTION(cuMemCreate, mem_create),
    FUNCTION(cuMemRelease, mem_release),
    FUNCTION(cuMemRetainAllocationHandle, mem_retain_allocation_handle),
    FUNCTION(cuMemExportToShareableHandle, mem_export_to_shareable_handle),
    FUNCTION(cuMemImportFromShareableHandle, mem_import_from_shareable_handle),
    FUNCTION(cuMemAddressReserve, mem_address_reserve),
    FUNCTION(cuMemAddressFree, mem_address_free),
    FUNCTION(cuMemMap, mem_map),
    FUNCTION(cuMemSetAccess, mem_set_access),
    FUNCTION(cuMemUnmap, mem_unmap),
    FUNCTION(cuMemGetHandleForAddressRange, mem_get_handle_for_address_range),
    FUNCTION(cuMemcpy, memcpy_sync),
    FUNCTION(cuMemcpyAsync, memcpy_async),
    FUNCTION(cuMemcpyDtoH, memcpy_dtoh),
    FUNCTION(cuMemcpyHtoD, memcpy_htod),
    FUNCTION(cuMemcpyBatchAsync, memcpy_batch_async),
    FUNCTION(cuMemcpy3DBatchAsync, memcpy_3d_batch_async),
    FUNCTION(cuMemcpy2DAsync, memcpy_2d_async),
    FUNCTION(cuMemsetD8, memset_d8),
    FUNCTION(cuMemsetD8Async, memset_d8_async),
    FUNCTION(cuModuleLoadData, module_load_data),
    FUNCTION(cuModuleGetFunction, module_get_function),
    FUNCTION(cuModuleUnload, module_unload),
    FUNCTION(cuLaunchKernel, launch_kernel),
};

static CUresult get_proc_address(const char *name, void **function, int version, uint64_t flags, int *status)
{
    (void)flags;
    *function = NULL;
    if (status) *status = 1; /* SYMBOL_NOT_FOUND */
    int driver = (int)number("CUDA_DRIVER_VERSION", 13000);
    /* Only the signature of CUDA 13 is here. */
    if ((!strcmp(name, "cuMemcpyBatchAsync") || !strcmp(name, "cuMemcpy3DBatchAsync")) && (version < 13000 || driver < 13000)) {
        if (status) *status = 2; /* VERSION_NOT_SUFFICIENT */
        return NOT_FOUND;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) {
            memcpy(function, &functions[i].function, sizeof *function);
            if (status) *status = 0;
            return SUCCESS;
        }
    return NOT_FOUND;
}

EXPORTED CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
EXPORTED CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
    return get_proc_address(name, function, version, flags, status);
}

EXPORTED CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
EXPORTED CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
    return get_proc_address(name, function, version, flags, NULL);
}

/* ---- for tests ---- */

/* The at-th call of the function from now on returns the error; "execution" is the next thing that a stream does. A
 * sticky one is returned by every later call, and nothing is executed any more. */
EXPORTED void cuda_driver_fault(const char *function, uint64_t at, int error, int sticky);
EXPORTED void cuda_driver_fault(const char *function, uint64_t at, int error, int sticky)
{
    lock();
    add_fault(function, at, error, sticky);
    unlock();
}

EXPORTED void cuda_driver_recover(void);
EXPORTED void cuda_driver_recover(void)
{
    lock();
    while (world.faults) {
        struct fault *fault = world.faults;
        world.faults = fault->next;
        free(fault);
    }
    world.held = 0;
    world.delay_us = 0;
    uint64_t counted = world.contexts_ended_in_use;
    for (int device = 0; device < world.gpus && world.lost; device++) { /* as a reset of the GPUs would do */
        world.contexts[device].retained = 0;
        end_context(&world.contexts[device]);
    }
    while (world.modules && world.lost) {
        struct module *module = world.modules;
        world.modules = module->next;
        free(module);
    }
    world.contexts_ended_in_use = counted;
    world.lost = SUCCESS;
    changed();
    unlock();
}

EXPORTED void cuda_driver_hold(int held);
EXPORTED void cuda_driver_hold(int held)
{
    lock();
    world.held = held;
    changed();
    unlock();
}

EXPORTED void cuda_driver_dmabuf(int exported);
EXPORTED void cuda_driver_dmabuf(int exported)
{
    lock();
    world.dmabuf = exported;
    unlock();
}

EXPORTED void cuda_driver_delay(unsigned delay_us);
EXPORTED void cuda_driver_delay(unsigned delay_us)
{
    lock();
    world.delay_us = delay_us;
    unlock();
}

/* How many there are; -1 for a name that is unknown. */
EXPORTED int64_t cuda_driver_count(const char *name);
EXPORTED int64_t cuda_driver_count(const char *name)
{
    static const char *const kinds[] = {"allocated", "opened", "mapped", "host_allocated", "host_registered"};
    int64_t count = 0;
    lock();
    if (!strcmp(name, "contexts"))
        for (int i = 0; i < world.gpus; i++) count += world.contexts[i].retained;
    else if (!strcmp(name, "streams"))
        for (const struct stream *stream = world.streams; stream; stream = stream->next) count += !stream->is_default && !stream->destroyed;
    else if (!strcmp(name, "busy_streams"))
        for (const struct stream *stream = world.streams; stream; stream = stream->next) count += stream->executed != stream->enqueued;
    else if (!strcmp(name, "events"))
        for (const struct event *event = world.events; event; event = event->next) count += !event->destroyed;
    else if (!strcmp(name, "modules"))
        for (const struct module *module = world.modules; module; module = module->next) count++;
    else if (!strcmp(name, "handles"))
        for (const struct allocation *allocation = world.allocations; allocation; allocation = allocation->next) count += allocation->handles;
    else if (!strcmp(name, "reservations"))
        for (const struct reservation *reservation = world.reservations; reservation; reservation = reservation->next) count++;
    else if (!strcmp(name, "contexts_ended_in_use"))
        count = (int64_t)world.contexts_ended_in_use;
    else {
        size_t kind = 0;
        while (kind < sizeof kinds / sizeof *kinds && strcmp(name, kinds[kind])) kind++;
        if (kind == sizeof kinds / sizeof *kinds)
            count = -1;
        else
            for (const struct range *range = world.ranges; range; range = range->next) count += range->kind == (enum kind)kind;
    }
    unlock();
    return count;
}
