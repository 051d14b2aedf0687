/* Opens libibverbs at run time, so that a daemon without verbs rails needs none: "libibverbs.so.1" as the dynamic linker
 * finds it. Any thread; the first call loads the library for good. */
#define _GNU_SOURCE
#include "verbs_api.h"

#include "atomics.h"

#ifdef RR_HAVE_VERBS
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct verbs_library rr_ibv;

static const struct {
    const char *name;
    size_t at;
    int optional;
} symbols[] = {
#define SYMBOL(name, optional) {"ibv_" #name, offsetof(struct verbs_library, name), optional}
    SYMBOL(get_device_list, 0), SYMBOL(free_device_list, 0),    SYMBOL(get_device_name, 0), SYMBOL(open_device, 0),
    SYMBOL(close_device, 0),    SYMBOL(query_device, 0),        SYMBOL(query_port, 0),      SYMBOL(query_gid, 0),
    SYMBOL(alloc_pd, 0),        SYMBOL(dealloc_pd, 0),          SYMBOL(reg_mr, 0),          SYMBOL(reg_mr_iova2, 1),
    SYMBOL(reg_dmabuf_mr, 1),   SYMBOL(dereg_mr, 0),            SYMBOL(create_comp_channel, 0),
    SYMBOL(destroy_comp_channel, 0), SYMBOL(create_cq, 0),      SYMBOL(destroy_cq, 0),      SYMBOL(get_cq_event, 0),
    SYMBOL(ack_cq_events, 0),   SYMBOL(create_qp, 0),           SYMBOL(modify_qp, 0),       SYMBOL(destroy_qp, 0),
    SYMBOL(get_async_event, 0), SYMBOL(ack_async_event, 0),
#undef SYMBOL
};

static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static char load_error[192];

static void load(void)
{
    void *library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(load_error, sizeof load_error, "%s; install libibverbs1 and ibverbs-providers", dlerror());
        return;
    }
    for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
        void *symbol = dlsym(library, symbols[i].name);
        if (!symbol && !symbols[i].optional) {
            snprintf(load_error, sizeof load_error, "libibverbs.so.1 has no %s; install a newer libibverbs1", symbols[i].name);
            return;
        }
        memcpy((char *)&rr_ibv + symbols[i].at, &symbol, sizeof symbol);
    }
}

uint32_t verbs_mtu_bytes(enum ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0; }

enum ibv_mtu verbs_mtu(uint32_t bytes)
{
    enum ibv_mtu mtu = IBV_MTU_256;
    while (mtu < IBV_MTU_4096 && verbs_mtu_bytes(mtu) < bytes) mtu++;
    return mtu;
}

void verbs_close_device(struct verbs_device *device)
{
    if (device->pd) rr_ibv.dealloc_pd(device->pd);
    if (device->context) rr_ibv.close_device(device->context);
    free(device);
}

static struct ibv_context *open_named(const char *name, char *error, size_t error_bytes)
{
    int count = 0;
    struct ibv_device **list = rr_ibv.get_device_list(&count);
    struct ibv_context *context = NULL;
    int found = 0;
    for (int i = 0; list && i < count && !found; i++) {
        if (strcmp(rr_ibv.get_device_name(list[i]), name)) continue;
        found = 1;
        context = rr_ibv.open_device(list[i]);
        if (!context) snprintf(error, error_bytes, "device %s: cannot be opened: %s", name, strerror(errno ? errno : EIO));
    }
    int status = context ? 0 : found && errno ? errno : ENODEV;
    if (!found) snprintf(error, error_bytes, "device %s: not among the %d RDMA devices of this node (rdma link show)", name, count);
    if (list) rr_ibv.free_device_list(list);
    errno = status;
    return context;
}

struct verbs_device *verbs_open_device(const char *name, int port, int gid_index, char *error, size_t error_bytes)
{
    pthread_once(&loaded, load);
    if (load_error[0]) {
        snprintf(error, error_bytes, "%s", load_error);
        errno = ENOENT;
        return NULL;
    }
    struct verbs_device *device = calloc(1, sizeof *device);
    if (!device) return NULL;
    device->refs = 1;
    device->port = port;
    device->gid_index = gid_index;
    snprintf(device->name, sizeof device->name, "%s", name);
    device->context = open_named(name, error, error_bytes);
    if (!device->context) {
        int status = errno;
        verbs_close_device(device);
        errno = status;
        return NULL;
    }
    struct ibv_port_attr port_attr;
    memset(&port_attr, 0, sizeof port_attr);
    int status = rr_ibv.query_device(device->context, &device->limits);
    if (!status && (port < 1 || port > device->limits.phys_port_cnt)) {
        snprintf(error, error_bytes, "device %s: port %d of %d", name, port, device->limits.phys_port_cnt);
        status = ENODEV;
    } else if (!status) {
        status = rr_ibv.query_port(device->context, (uint8_t)port, &port_attr);
        if (!status && gid_index >= port_attr.gid_tbl_len) {
            snprintf(error, error_bytes, "device %s: GID index %d; its table has %d", name, gid_index, port_attr.gid_tbl_len);
            status = EINVAL;
        }
    }
    if (!status) {
        device->pd = rr_ibv.alloc_pd(device->context);
        if (!device->pd) status = errno ? errno : ENOMEM;
    }
    if (status) {
        if (!error[0]) snprintf(error, error_bytes, "device %s: %s", name, strerror(status));
        verbs_close_device(device);
        errno = status;
        return NULL;
    }
    device->ethernet = port_attr.link_layer == IBV_LINK_LAYER_ETHERNET;
    int flags = fcntl(device->context->async_fd, F_GETFL);
    fcntl(device->context->async_fd, F_SETFL, flags | O_NONBLOCK);
    return device;
}

static struct ibv_mr *register_with(struct verbs_device *device, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                                    int access)
{
    if (dmabuf_fd >= 0) {
        if (rr_ibv.reg_dmabuf_mr) return rr_ibv.reg_dmabuf_mr(device->pd, dmabuf_offset, bytes, address, dmabuf_fd, access);
        errno = ENOSYS;
        return NULL;
    }
    if (access & IBV_ACCESS_RELAXED_ORDERING)
        return rr_ibv.reg_mr_iova2(device->pd, (void *)(uintptr_t)address, bytes, address, (unsigned)access);
    return rr_ibv.reg_mr(device->pd, (void *)(uintptr_t)address, bytes, access);
}

struct ibv_mr *verbs_register(struct verbs_device *device, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                              int access)
{
    struct ibv_mr *mr = NULL;
    errno = 0;
    if (bytes > device->limits.max_mr_size) errno = EINVAL;
    if (!errno && access & IBV_ACCESS_REMOTE_WRITE && rr_ibv.reg_mr_iova2 && !rr_load_relaxed_u32(&device->no_relaxed_ordering)) {
        mr = register_with(device, address, bytes, dmabuf_fd, dmabuf_offset, access | IBV_ACCESS_RELAXED_ORDERING);
        if (mr) return mr;
    }
    if (bytes <= device->limits.max_mr_size) {
        errno = 0;
        mr = register_with(device, address, bytes, dmabuf_fd, dmabuf_offset, access);
        if (mr && access & IBV_ACCESS_REMOTE_WRITE && rr_ibv.reg_mr_iova2) rr_store_relaxed_u32(&device->no_relaxed_ordering, 1);
    }
    if (!mr && !errno) errno = EIO;
    return mr;
}
#endif
