/* The copier on the stand-in driver, in a program of its own: built with sanitizers, which a Python process cannot
 * easily be. Prints nothing and returns 0 if every byte is right. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu_copy.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
            exit(1); \
        } \
    } while (0)

#define AREA_BYTES (1u << 20)
#define LISTS 3u
#define PIECES 1024u
#define ROUNDS 40u

rg_result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);
void cuda_driver_fault(const char *function, uint64_t at, int error, int sticky);
void cuda_driver_recover(void);
int64_t cuda_driver_count(const char *name);

static struct rg_api api;

#define GET(type, name) type name = (type)(uintptr_t)address(#name)

static void *address(const char *name)
{
    void *found = NULL;
    CHECK(!cuGetProcAddress_v2(name, &found, 13000, 0, NULL) && found);
    return found;
}

typedef rg_result (*init_call)(unsigned);
typedef rg_result (*retain_call)(void **, int);
typedef rg_result (*device_call)(int);
typedef rg_result (*pointer_call)(void *);
typedef rg_result (*stream_call)(void **, unsigned, int);
typedef rg_result (*alloc_call)(uint64_t *, size_t);
typedef rg_result (*host_alloc_call)(void **, size_t, unsigned);
typedef rg_result (*register_call)(void *, size_t, unsigned);
typedef rg_result (*device_pointer_call)(uint64_t *, void *, unsigned);
typedef rg_result (*address_call)(uint64_t);
typedef rg_result (*copy_call)(uint64_t, const void *, size_t);
typedef rg_result (*load_call)(void **, const void *);
typedef rg_result (*function_call)(void **, void *, const char *);

struct worker {
    pthread_t thread;
    void *context;
    void *kernel;
    int way;
};

static void *work(void *argument)
{
    struct worker *worker = argument;
    GET(stream_call, cuStreamCreateWithPriority);
    GET(pointer_call, cuStreamDestroy);
    GET(alloc_call, cuMemAlloc);
    GET(address_call, cuMemFree);
    GET(host_alloc_call, cuMemHostAlloc);
    GET(pointer_call, cuMemFreeHost);
    GET(register_call, cuMemHostRegister);
    GET(pointer_call, cuMemHostUnregister);
    GET(device_pointer_call, cuMemHostGetDevicePointer);
    GET(copy_call, cuMemcpyHtoD);
    void *stream, *lists;
    uint64_t source, target, doorbell_at;
    unsigned seed = (unsigned)worker->way;
    uint8_t *content = malloc(AREA_BYTES), *arrived = calloc(1, AREA_BYTES);
    uint64_t *doorbell = aligned_alloc(4096, 4096);
    struct rg_copier copier;
    CHECK(content && arrived && doorbell);
    *doorbell = 0;
    for (uint32_t i = 0; i < AREA_BYTES; i++) content[i] = (uint8_t)rand_r(&seed);
    CHECK(!api.cuCtxSetCurrent(worker->context) && !cuStreamCreateWithPriority(&stream, 1, -5));
    CHECK(!cuMemAlloc(&source, AREA_BYTES) && !cuMemHostAlloc(&lists, LISTS * PIECES * sizeof(struct rg_run), 3));
    CHECK(!cuMemHostRegister(arrived, AREA_BYTES, 3) && !cuMemHostGetDevicePointer(&target, arrived, 0));
    CHECK(!cuMemHostRegister(doorbell, 4096, 3) && !cuMemHostGetDevicePointer(&doorbell_at, doorbell, 0));
    CHECK(!cuMemcpyHtoD(source, content, AREA_BYTES));
    CHECK(!rg_open(&copier, &api, worker->context, stream, worker->kernel, lists, LISTS, PIECES));
    copier.forced = worker->way;
    CHECK(!rg_calibrate(&copier, source, target, 50));
    uint32_t slot_bytes = AREA_BYTES / LISTS / 4096 * 4096, piece = 256, count = slot_bytes / piece;
    uint32_t *from = malloc(LISTS * count * sizeof *from);
    CHECK(from && count > PIECES);
    count = PIECES;
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        uint32_t slot = round % LISTS;
        if (round > LISTS) { /* the slot was announced: all of it must be there */
            while (__atomic_load_n(doorbell, __ATOMIC_ACQUIRE) < round - LISTS) sched_yield();
            for (uint32_t i = 0; i < count; i++)
                CHECK(!memcmp(arrived + (size_t)slot * slot_bytes + (size_t)i * piece, content + from[slot * PIECES + i], piece));
        }
        struct rg_listing listing = rg_list(&copier, slot);
        for (uint32_t i = 0; i < count; i++) {
            uint32_t at = round % 2 ? (uint32_t)rand_r(&seed) % (AREA_BYTES - piece) : i * 2 * piece;
            from[slot * PIECES + i] = at;
            CHECK(rg_add(&listing, (struct rg_run){source + at, target + (uint64_t)slot * slot_bytes + (uint64_t)i * piece, 0, 0, piece, 1, 0, 0}));
        }
        CHECK(!rg_copy(&copier, slot, listing.count) && !rg_signal(&copier, doorbell_at, round));
    }
    CHECK(!api.cuStreamSynchronize(stream) && *doorbell == ROUNDS);
    rg_close(&copier);
    CHECK(!cuMemHostUnregister(doorbell) && !cuMemHostUnregister(arrived) && !cuMemFreeHost(lists) && !cuMemFree(source));
    CHECK(!cuStreamDestroy(stream));
    free(from);
    free(content);
    free(arrived);
    free(doorbell);
    return NULL;
}

int main(void)
{
    void **functions = (void **)&api;
#define RESOLVE(name, arguments) *functions++ = address(#name);
    RG_FUNCTIONS(RESOLVE)
    GET(init_call, cuInit);
    GET(retain_call, cuDevicePrimaryCtxRetain);
    GET(device_call, cuDevicePrimaryCtxRelease);
    GET(load_call, cuModuleLoadData);
    GET(function_call, cuModuleGetFunction);
    GET(pointer_call, cuModuleUnload);
    struct worker workers[RG_WAYS];
    void *context, *module, *kernel;
    CHECK(!cuInit(0) && !cuDevicePrimaryCtxRetain(&context, 0) && !api.cuCtxSetCurrent(context));
    CHECK(!cuModuleLoadData(&module, "stand-in cubin with railrelay_gather") && !cuModuleGetFunction(&kernel, module, "railrelay_gather"));
    for (int way = 0; way < RG_WAYS; way++) {
        workers[way] = (struct worker){.context = context, .kernel = kernel, .way = way};
        CHECK(!pthread_create(&workers[way].thread, NULL, work, &workers[way]));
    }
    for (int way = 0; way < RG_WAYS; way++) pthread_join(workers[way].thread, NULL);
    cuda_driver_fault("cuStreamQuery", 1, 719, 1);
    CHECK(api.cuStreamQuery(NULL) == 719 && api.cuCtxPushCurrent(context) == 719 && !strcmp(rg_error_name(&api, 719), "CUDA_ERROR_LAUNCH_FAILED"));
    cuda_driver_recover();
    CHECK(cuDevicePrimaryCtxRelease(0));
    CHECK(!cuDevicePrimaryCtxRetain(&context, 0) && !api.cuCtxSetCurrent(context));
    CHECK(cuModuleLoadData(&module, "nothing of it") == 200 && !cuModuleLoadData(&module, "stand-in cubin with x") && !cuModuleUnload(module));
    CHECK(!cuDevicePrimaryCtxRelease(0));
    const char *kinds[] = {"streams", "events", "allocated", "host_allocated", "host_registered", "modules", "contexts", "contexts_ended_in_use"};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) CHECK(cuda_driver_count(kinds[i]) == 0);
    return 0;
}
