/* libibverbs, opened at run time, and devices. What the hot path calls (post, poll, request of a completion event) are
 * the library's own inline calls through the device's context. Any thread. */
#ifndef RAILRELAY_VERBS_API_H
#define RAILRELAY_VERBS_API_H

#if defined(__has_include)
#if __has_include(<infiniband/verbs.h>)
#define RR_HAVE_VERBS 1
#endif
#endif

#ifdef RR_HAVE_VERBS
#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

struct verbs_library {
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    const char *(*get_device_name)(struct ibv_device *);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
    int (*query_port)(struct ibv_context *, uint8_t, struct ibv_port_attr *);
    int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
    struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned);            /* NULL: old library */
    struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int); /* NULL: old library */
    int (*dereg_mr)(struct ibv_mr *);
    struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *);
    int (*destroy_comp_channel)(struct ibv_comp_channel *);
    struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
    int (*destroy_cq)(struct ibv_cq *);
    int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
    void (*ack_cq_events)(struct ibv_cq *, unsigned);
    struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
    int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
    int (*destroy_qp)(struct ibv_qp *);
    int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
    void (*ack_async_event)(struct ibv_async_event *);
};

extern struct verbs_library rr_ibv;

/* One NIC. `refs` is under the lock of struct rr_verbs; the last one closes it. */
struct verbs_device {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_device_attr limits;
    char name[64];
    int port, gid_index;
    int ethernet;
    uint32_t refs;
    uint32_t no_relaxed_ordering; /* it refused the flag once */
};

/* NULL, with errno and the reason in error[error_bytes]. */
struct verbs_device *verbs_open_device(const char *name, int port, int gid_index, char *error, size_t error_bytes);
void verbs_close_device(struct verbs_device *device);
/* NULL with errno. */
struct ibv_mr *verbs_register(struct verbs_device *device, uint64_t address, uint64_t bytes, int dmabuf_fd, uint64_t dmabuf_offset,
                              int access);
uint32_t verbs_mtu_bytes(enum ibv_mtu mtu);
enum ibv_mtu verbs_mtu(uint32_t bytes);

#endif
#endif
