/* Survives the truncation of shared memory by its owner. POSIX shared memory cannot be sealed, so a client may cut
 * off its own segment while a rail thread reads it: the SIGBUS handler puts zero pages over the whole mapping, marks
 * it broken and lets the thread go on; whoever looks at `broken` next ends that client alone. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/magic.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "plane.h"

#define GUARDS 65536u

/* Read by the signal handler: an entry is in use while bytes != 0; base and broken are written before bytes. */
static struct {
    uint8_t *base;
    uint32_t *broken;
    uint64_t bytes;
} guards[GUARDS];
static uint32_t guards_used, patches;
static pthread_mutex_t guards_lock = PTHREAD_MUTEX_INITIALIZER;

static int patch(uintptr_t address)
{
    uint32_t used = rr_load_acquire_u32(&guards_used);
    for (uint32_t i = 0; i < used; i++) {
        uint64_t bytes = rr_load_acquire_u64(&guards[i].bytes);
        uintptr_t base = (uintptr_t)guards[i].base;
        if (bytes == 0 || address < base || address - base >= bytes) continue;
        if (mmap(guards[i].base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
            return 0;
        rr_store_release_u32(guards[i].broken, 1);
        rr_fetch_add_u32(&patches, 1);
        return 1;
    }
    return 0;
}

static void on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    int saved = errno;
    if (!patch((uintptr_t)info->si_addr)) signal(number, SIG_DFL); /* not ours: fault again and die */
    errno = saved;
}

int rr_guard_install(void)
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = on_sigbus;
    action.sa_flags = SA_SIGINFO;
    return sigaction(SIGBUS, &action, NULL) ? -errno : 0;
}

int rr_guard_patch(const void *address) { return patch((uintptr_t)address); }

uint32_t rr_guard_patches(void) { return rr_load_acquire_u32(&patches); }

uint64_t rr_page_bytes(int fd)
{
    struct statfs facts;
    return fstatfs(fd, &facts) == 0 && facts.f_type == HUGETLBFS_MAGIC ? (uint64_t)facts.f_bsize : (uint64_t)sysconf(_SC_PAGESIZE);
}

/* Of whole pages: the kernel neither unmaps nor replaces a part of a huge one. */
struct rr_mapping *rr_map(int fd, uint64_t offset, uint64_t bytes, int *error)
{
    uint64_t page = rr_page_bytes(fd);
    struct rr_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping || bytes == 0 || offset % page) {
        *error = mapping ? EINVAL : ENOMEM;
        free(mapping);
        return NULL;
    }
    mapping->bytes = (bytes + page - 1) / page * page;
    mapping->base = mmap(NULL, mapping->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)offset);
    if (mapping->base == MAP_FAILED) {
        *error = errno;
        free(mapping);
        return NULL;
    }
    pthread_mutex_lock(&guards_lock);
    uint32_t i = 0;
    while (i < GUARDS && guards[i].bytes) i++;
    if (i < GUARDS) {
        guards[i].base = mapping->base;
        guards[i].broken = &mapping->broken;
        rr_store_release_u64(&guards[i].bytes, mapping->bytes);
        if (i >= guards_used) rr_store_release_u32(&guards_used, i + 1);
    }
    pthread_mutex_unlock(&guards_lock);
    if (i == GUARDS) {
        munmap(mapping->base, mapping->bytes);
        free(mapping);
        *error = ENFILE;
        return NULL;
    }
    mapping->guard = i;
    return mapping;
}

struct rr_mapping *rr_made_up(uint64_t base, uint64_t bytes)
{
    struct rr_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping) return NULL;
    mapping->base = (uint8_t *)(uintptr_t)base;
    mapping->bytes = bytes;
    mapping->guard = RR_NONE;
    return mapping;
}

void rr_unmap(struct rr_mapping *mapping)
{
    if (!mapping) return;
    if (mapping->guard == RR_NONE) {
        free(mapping);
        return;
    }
    pthread_mutex_lock(&guards_lock);
    rr_store_release_u64(&guards[mapping->guard].bytes, 0);
    pthread_mutex_unlock(&guards_lock);
    munmap(mapping->base, mapping->bytes);
    free(mapping);
}
