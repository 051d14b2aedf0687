"""Python's handle of the data plane (control.c). Main thread only; no call here blocks on a rail."""

import os

from cpython.buffer cimport PyBUF_WRITABLE, PyObject_GetBuffer, PyBuffer_Release, Py_buffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from railrelay.shm_layout import faults

cdef extern from "faults.h" nogil:
    void rr_fault_arm(uint32_t point, uint32_t passages)

cdef extern from "plane.h" nogil:
    enum:
        RR_EVENT_COMMAND_DONE
        RR_EVENT_CONNECT_WANTED
        RR_EVENT_SENDER_ENDING
        RR_EVENT_SENDER_LOST
        RR_EVENT_RECEIVER_LOST
        RR_EVENT_RECEIVER_FENCED
        RR_EVENT_FRAME_SETTLED
        RR_EVENT_CLIENT_DETACHED
        RR_EVENT_VIOLATION
        RR_EVENT_NOTE_DUE
        RR_EVENT_TRANSFER_ENDED
        RR_EVENT_PORT_CHANGED
        RR_WINDOW
        RR_NONE
        RR_FLUSH_AUTO
        RR_FLUSH_ALWAYS
        RR_FLUSH_NEVER
    struct rr_verbs_options:
        char device[64]
        int port, gid_index
        uint32_t send_depth, signal_every, flush
    struct rr_event:
        int64_t kind, rail, a, b, c, d, e
    struct rr_ack:
        uint64_t sequence, code
    struct rr_holder:
        uint64_t cookie, connection
        int rail
    struct rr_context:
        uint64_t word, tag, started_ns, timeout_ns, fault
        uint32_t peer, handle
    struct rr_mapping:
        uint8_t *base
        uint64_t bytes
        uint32_t guard
    struct rr_region:
        rr_mapping *mapping
        uint8_t *base
    struct rr_bouncer:
        rr_mapping *memory
    struct rr_port:
        int kick_fd
        rr_mapping *lane_memory
        rr_bouncer bouncer
    struct rr_client:
        rr_context *contexts
        uint32_t transfer_count
        rr_region *regions
        rr_port *ports
    struct rr_nic:
        pass
    struct rr_rail:
        rr_nic *nic
        int kick_fd
    struct rr_plane:
        rr_rail *rails
        int event_fd
        char error[256]
        uint32_t rail_count, max_clients, regions_per_client
        rr_client **clients
    rr_plane *rr_plane_create(void *node, uint64_t instance, uint32_t max_peers, uint32_t max_sessions, uint32_t max_exports,
                              uint32_t regions_per_client, uint32_t remotes_per_client, uint64_t direct_slice_bytes, uint64_t spin_ns)
    int rr_plane_add_rail(rr_plane *, const char *nic, int cpu, uint64_t bytes_per_s, const rr_verbs_options *)
    int rr_plane_fail_nic(rr_plane *, uint32_t rail, uint32_t result)
    int rr_plane_start(rr_plane *)
    void rr_plane_stop(rr_plane *)
    void rr_plane_free(rr_plane *)
    uint32_t rr_plane_take_events(rr_plane *, rr_event *out, uint32_t max)
    int rr_plane_attach_client(rr_plane *, uint32_t client, uint32_t serial, int fd, uint64_t bytes, uint64_t cookie)
    int rr_plane_detach_client(rr_plane *, uint32_t client)
    void rr_plane_release_client(rr_plane *, uint32_t client)
    int rr_plane_lease_lane(rr_plane *, uint32_t client, uint32_t rail, int fd, uint64_t base, uint64_t bytes, uint64_t generation,
                            uint64_t cookie)
    int rr_plane_add_bounce(rr_plane *, uint32_t client, uint32_t rail, int fd, uint64_t bytes, uint64_t cookie)
    int rr_plane_add_region(rr_plane *, uint32_t client, uint32_t region, int fd, uint64_t base, uint64_t offset, uint64_t bytes)
    int rr_plane_remove_region(rr_plane *, uint32_t client, uint32_t region, uint64_t cookie)
    void rr_plane_finish_region_removal(rr_plane *, uint32_t client, uint32_t region, int busy)
    int rr_plane_add_remote(rr_plane *, uint32_t client, uint32_t remote, uint32_t peer, uint32_t handle, uint64_t bytes,
                            uint32_t rail, uint32_t owner, uint32_t window_bytes, uint32_t window_runs, uint64_t iova,
                            const uint32_t *rkeys, uint32_t rkey_count)
    int rr_plane_set_lane_keys(rr_plane *, uint32_t client, uint32_t rail, const uint32_t *lkeys, uint32_t count, uint64_t cookie)
    int rr_plane_set_region_keys(rr_plane *, uint32_t client, uint32_t region, const uint32_t *lkeys, uint32_t count)
    int rr_plane_set_bounce_keys(rr_plane *, uint32_t client, uint32_t rail, const uint32_t *rkeys, uint32_t count, uint64_t cookie)
    int rr_plane_drain_handle(rr_plane *, uint32_t peer, uint32_t handle, uint64_t cookie)
    int rr_plane_add_peer_tombstone(rr_plane *, uint32_t peer, uint32_t owner, uint64_t tag)
    int rr_plane_forget_peer_owner(rr_plane *, uint32_t peer, uint32_t owner)
    void rr_plane_remove_remote(rr_plane *, uint32_t client, uint32_t remote)
    int rr_plane_add_sender(rr_plane *, uint32_t rail, uint64_t connection, uint32_t peer, uint32_t remote_rail, int express,
                            uint32_t epoch, int fd)
    int rr_plane_add_receiver(rr_plane *, uint32_t rail, uint64_t connection, uint32_t session, int fd)
    int rr_plane_settle_sender(rr_plane *, uint32_t rail, uint64_t connection, uint64_t placed, const rr_ack *acks,
                               uint32_t ack_count, uint64_t cookie)
    int rr_plane_close_sender(rr_plane *, uint32_t rail, uint64_t connection)
    int rr_plane_fail_path(rr_plane *, uint32_t rail, uint32_t peer, uint32_t remote_rail, int express, uint32_t result, uint64_t cookie)
    int rr_plane_drop_peer(rr_plane *, uint32_t peer, uint32_t result, uint64_t cookie)
    int rr_plane_forget_peer(rr_plane *, uint32_t peer)
    int rr_plane_fence_receiver(rr_plane *, uint32_t rail, uint64_t connection)
    int rr_plane_fence_acks(rr_plane *, uint64_t connection, rr_ack *acks)
    int rr_plane_add_export(rr_plane *, uint32_t handle, uint32_t session, uint32_t client, uint32_t region, uint64_t bytes)
    int rr_plane_remove_export(rr_plane *, uint32_t handle, uint64_t cookie)
    int rr_plane_add_tombstone(rr_plane *, uint32_t client, uint64_t tag, uint64_t cookie)
    int rr_plane_purge_stopped(rr_plane *)
    int rr_plane_holders(rr_plane *, uint32_t client, uint32_t transfer, uint32_t generation, uint64_t cookie)
    uint32_t rr_plane_holders_result(rr_plane *, uint64_t cookie, rr_holder *out, uint32_t max)
    int rr_transfer_cancel(rr_client *, uint32_t transfer, uint32_t generation, uint32_t result)
    int rr_transfer_report_unsettled(rr_client *, uint32_t transfer, uint32_t generation)
    int rr_transfer_finish_note(rr_client *, uint32_t transfer, uint32_t generation, uint32_t result)
    int rr_transfer_watch(rr_client *, uint32_t transfer, uint32_t generation)

cdef extern from "nic.h" nogil:
    int rr_emulated_ring_fd(rr_nic *)

cdef extern from "verbs_nic.h" nogil:
    enum:
        RR_VERBS_ERROR_BYTES
        RR_VERBS_TARGETS_MAX
    struct rr_verbs_facts:
        uint8_t gid[16]
        uint32_t lid, mtu_bytes, port_up, ethernet, max_sge, max_qp_wr, max_cqe
        uint64_t max_mr_bytes
    struct rr_verbs_key:
        uint64_t id
        uint32_t lkey, rkey
    struct rr_verbs_target:
        uint64_t address
        uint32_t rkey
    enum rr_verbs_use:
        RR_VERBS_DATA
        RR_VERBS_FLUSH
    struct rr_verbs_endpoint:
        uint64_t id
        uint32_t qpn, psn
    struct rr_verbs_route:
        uint8_t gid[16]
        uint32_t qpn, psn, lid, mtu_bytes, remote_through, timeout, retry_count, rnr_retry, min_rnr_timer, traffic_class, service_level
    int rr_read_verbs_facts "rr_verbs_facts"(rr_plane *, uint32_t rail, rr_verbs_facts *out)
    int rr_verbs_queue_pairs(rr_plane *, uint32_t rail)
    int rr_verbs_register(rr_plane *, uint32_t through, uint64_t address, uint64_t nbytes, int dmabuf_fd, uint64_t dmabuf_offset,
                          rr_verbs_use use, rr_verbs_key *out)
    int rr_verbs_open_flush(rr_plane *, uint32_t rail, uint32_t through, char *error)
    int rr_verbs_set_flush(rr_plane *, uint32_t rail, uint32_t through, const rr_verbs_target *targets, uint32_t count, uint64_t cookie)
    int rr_verbs_deregister(rr_plane *, uint64_t id)
    int rr_verbs_new_endpoint(rr_plane *, uint32_t rail, uint32_t through, int sending, rr_verbs_endpoint *out, char *error)
    int rr_verbs_connect(rr_plane *, uint64_t endpoint, const rr_verbs_route *route, char *error)
    int rr_verbs_drop_endpoint(rr_plane *, uint64_t endpoint)
    int rr_verbs_probe(rr_plane *, uint64_t endpoint, uint64_t cookie)

cdef extern from "atomics.h" nogil:
    uint64_t rr_load_acquire_u64(const uint64_t *)
    uint64_t rr_load_relaxed_u64(const uint64_t *)
    uint32_t rr_load_relaxed_u32(const uint32_t *)

cdef extern from "<sys/mman.h>" nogil:
    int madvise(void *, size_t, int)

cdef extern from "populate.h" nogil:
    int MADV_POPULATE_WRITE
    int rr_populate_resident(uint8_t *base, uint64_t bytes)

COMMAND_DONE = RR_EVENT_COMMAND_DONE
CONNECT_WANTED = RR_EVENT_CONNECT_WANTED
SENDER_ENDING = RR_EVENT_SENDER_ENDING
SENDER_LOST = RR_EVENT_SENDER_LOST
RECEIVER_LOST = RR_EVENT_RECEIVER_LOST
RECEIVER_FENCED = RR_EVENT_RECEIVER_FENCED
FRAME_SETTLED = RR_EVENT_FRAME_SETTLED
CLIENT_DETACHED = RR_EVENT_CLIENT_DETACHED
VIOLATION = RR_EVENT_VIOLATION
NOTE_DUE = RR_EVENT_NOTE_DUE
TRANSFER_ENDED = RR_EVENT_TRANSFER_ENDED
PORT_CHANGED = RR_EVENT_PORT_CHANGED
MAX_FLUSH_TARGETS = RR_VERBS_TARGETS_MAX


def _arm_fault(uint32_t point, uint32_t passages):
    rr_fault_arm(point, passages)


faults.join(_arm_fault)


cdef int check(int status) except -1:
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return status


cdef int check_text(int status, const char *text) except -1:
    if status < 0:
        raise OSError(-status, text.decode("utf-8", "replace") or os.strerror(-status))
    return status


cdef uint32_t key_list(keys, uint32_t *out) except? 0xffffffff:
    if len(keys) > 16:
        raise ValueError(f"{len(keys)} keys; one for each rail, at most 16")
    for i, key in enumerate(keys):
        out[i] = key
    return len(keys)


cdef void prefault(uint8_t *base, uint64_t left):
    # In steps, so that page tables of one process are not locked for long. An unmapped range is refused, no more.
    cdef uint64_t step
    with nogil:
        while left:
            step = left if left < 64 << 20 else 64 << 20
            if madvise(base, step, MADV_POPULATE_WRITE):
                break
            base += step
            left -= step


cdef class DataPlane:
    cdef rr_plane *plane
    cdef Py_buffer node
    cdef bint has_node

    def __init__(self, node_segment, *, uint64_t instance, uint32_t max_peers, uint32_t max_sessions, uint32_t max_exports,
                 uint32_t regions_per_client, uint32_t remotes_per_client, uint64_t direct_slice_bytes, uint32_t spin_us):
        if self.plane is not NULL:
            raise RuntimeError("a DataPlane is initialised once")
        PyObject_GetBuffer(node_segment, &self.node, PyBUF_WRITABLE)
        self.has_node = True
        self.plane = rr_plane_create(self.node.buf, instance, max_peers, max_sessions, max_exports, regions_per_client,
                                     remotes_per_client, direct_slice_bytes, <uint64_t> spin_us * 1000)
        if self.plane is NULL:
            raise MemoryError("the data plane could not be created")

    def __dealloc__(self):
        rr_plane_free(self.plane)
        if self.has_node:
            PyBuffer_Release(&self.node)

    @property
    def event_fd(self):
        return self.plane.event_fd

    cdef rr_client *client(self, uint32_t client) noexcept:
        return self.plane.clients[client] if client < self.plane.max_clients else NULL

    def add_rail(self, *, nic, int cpu, uint64_t bytes_per_s=0, device="", int port=1, int gid_index=0, uint32_t sq_depth=1024,
                 uint32_t signal_every=64, flush="auto"):
        if nic not in ("tcp", "emulated", "verbs"):
            raise ValueError(f'nic: {nic!r} is not one of "tcp", "emulated", "verbs"')
        cdef rr_verbs_options options
        name = device.encode()
        if len(name) > 63:
            raise ValueError(f"device: {device!r} is longer than 63 bytes")
        memcpy(options.device, <const char *> name, len(name) + 1)
        options.port, options.gid_index = port, gid_index
        options.send_depth, options.signal_every = sq_depth, signal_every
        options.flush = {"auto": RR_FLUSH_AUTO, "always": RR_FLUSH_ALWAYS, "never": RR_FLUSH_NEVER}[flush]
        return check_text(rr_plane_add_rail(self.plane, nic.encode(), cpu, bytes_per_s, &options), self.plane.error)

    def verbs_facts(self, uint32_t rail):
        cdef rr_verbs_facts facts
        cdef int status
        with nogil:
            status = rr_read_verbs_facts(self.plane, rail, &facts)
        check(status)
        return {
            "gid": <bytes> (<const char *> facts.gid)[:16], "lid": facts.lid, "mtu": facts.mtu_bytes, "up": bool(facts.port_up),
            "ethernet": bool(facts.ethernet), "max_sge": facts.max_sge, "max_qp_wr": facts.max_qp_wr, "max_cqe": facts.max_cqe,
            "max_mr_size": facts.max_mr_bytes,
        }

    def queue_pairs(self, uint32_t rail):
        return check(rr_verbs_queue_pairs(self.plane, rail))

    def register_memory(self, uint32_t through, uint64_t address, uint64_t nbytes, *, int dmabuf_fd=-1, uint64_t dmabuf_offset=0,
                        bint flush=False):
        cdef rr_verbs_key key
        cdef int status
        with nogil:
            status = rr_verbs_register(self.plane, through, address, nbytes, dmabuf_fd, dmabuf_offset,
                                       RR_VERBS_FLUSH if flush else RR_VERBS_DATA, &key)
        check(status)
        return key.id, key.lkey, key.rkey

    def deregister_memory(self, uint64_t key):
        cdef int status
        with nogil:
            status = rr_verbs_deregister(self.plane, key)
        check(status)

    def set_lane_keys(self, uint32_t client, uint32_t rail, lkeys, uint64_t cookie):
        cdef uint32_t[16] keys
        cdef uint32_t count = key_list(lkeys, keys)
        check(rr_plane_set_lane_keys(self.plane, client, rail, keys, count, cookie))

    def set_region_keys(self, uint32_t client, uint32_t region, lkeys):
        cdef uint32_t[16] keys
        cdef uint32_t count = key_list(lkeys, keys)
        check(rr_plane_set_region_keys(self.plane, client, region, keys, count))

    def set_bounce_keys(self, uint32_t client, uint32_t rail, rkeys, uint64_t cookie):
        cdef uint32_t[16] keys
        cdef uint32_t count = key_list(rkeys, keys)
        check(rr_plane_set_bounce_keys(self.plane, client, rail, keys, count, cookie))

    def bounce_base(self, uint32_t client, uint32_t rail):
        cdef rr_client *at = self.client(client)
        if at is NULL or rail >= self.plane.rail_count or at.ports[rail].bouncer.memory is NULL:
            raise KeyError((client, rail))
        return <uint64_t> at.ports[rail].bouncer.memory.base

    def new_endpoint(self, uint32_t rail, uint32_t through, *, bint sending):
        cdef rr_verbs_endpoint endpoint
        cdef char[256] error
        cdef int status
        error[0] = 0
        with nogil:
            status = rr_verbs_new_endpoint(self.plane, rail, through, sending, &endpoint, error)
        check_text(status, error)
        return endpoint.id, endpoint.qpn, endpoint.psn

    def connect_endpoint(self, uint64_t endpoint, *, bytes gid, uint32_t qpn, uint32_t psn, uint32_t lid, uint32_t mtu,
                         uint32_t remote_through, uint32_t timeout, uint32_t retry_count, uint32_t rnr_retry,
                         uint32_t min_rnr_timer=12, uint32_t traffic_class=0, uint32_t service_level=0):
        cdef rr_verbs_route route
        cdef char[256] error
        cdef int status
        if len(gid) != 16:
            raise ValueError(f"gid of {len(gid)} bytes; expected 16")
        memcpy(route.gid, <const char *> gid, 16)
        route.qpn, route.psn, route.lid, route.mtu_bytes, route.remote_through = qpn, psn, lid, mtu, remote_through
        route.timeout, route.retry_count, route.rnr_retry, route.min_rnr_timer = timeout, retry_count, rnr_retry, min_rnr_timer
        route.traffic_class, route.service_level = traffic_class, service_level
        error[0] = 0
        with nogil:
            status = rr_verbs_connect(self.plane, endpoint, &route, error)
        check_text(status, error)

    def drop_endpoint(self, uint64_t endpoint):
        rr_verbs_drop_endpoint(self.plane, endpoint)

    def probe_endpoint(self, uint64_t endpoint, uint64_t cookie):
        check(rr_verbs_probe(self.plane, endpoint, cookie))

    def open_flush(self, uint32_t rail, uint32_t through):
        cdef char[256] error
        cdef int status
        error[0] = 0
        with nogil:
            status = rr_verbs_open_flush(self.plane, rail, through, error)
        check_text(status, error)

    def set_flush_targets(self, uint32_t rail, uint32_t through, targets, uint64_t cookie):
        cdef rr_verbs_target[RR_VERBS_TARGETS_MAX] found
        cdef uint32_t count = len(targets)
        if count > MAX_FLUSH_TARGETS:
            raise ValueError(f"{count} targets; at most {MAX_FLUSH_TARGETS}")
        for i, (address, rkey) in enumerate(targets):
            found[i].address, found[i].rkey = address, rkey
        check(rr_verbs_set_flush(self.plane, rail, through, found, count, cookie))

    def drain_handle(self, uint32_t peer, uint32_t handle, uint64_t cookie):
        check(rr_plane_drain_handle(self.plane, peer, handle, cookie))

    def forget_peer_owner(self, uint32_t peer, uint32_t owner):
        check(rr_plane_forget_peer_owner(self.plane, peer, owner))

    def add_peer_tombstone(self, uint32_t peer, uint32_t owner, uint64_t tag):
        check(rr_plane_add_peer_tombstone(self.plane, peer, owner, tag))

    def start(self):
        check(rr_plane_start(self.plane))

    def stop(self):
        with nogil:
            rr_plane_stop(self.plane)

    def events(self):
        cdef rr_event[256] batch
        out = []
        cdef uint32_t count = 256
        while count == 256:
            count = rr_plane_take_events(self.plane, batch, 256)
            for i in range(count):
                event = batch[i]
                out.append((event.kind, event.rail, event.a, event.b, event.c, event.d, event.e))
        return out

    def attach_client(self, uint32_t client, uint32_t serial, int segment_fd, uint64_t segment_bytes, uint64_t cookie):
        check(rr_plane_attach_client(self.plane, client, serial, segment_fd, segment_bytes, cookie))
        return [self.plane.clients[client].ports[i].kick_fd for i in range(self.plane.rail_count)]

    def detach_client(self, uint32_t client):
        check(rr_plane_detach_client(self.plane, client))

    def release_client(self, uint32_t client):
        rr_plane_release_client(self.plane, client)

    def emulated_fds(self, uint32_t rail):
        if rail >= self.plane.rail_count:
            raise IndexError(rail)
        return rr_emulated_ring_fd(self.plane.rails[rail].nic), self.plane.rails[rail].kick_fd

    def fail_nic(self, uint32_t rail, uint32_t result):
        check(rr_plane_fail_nic(self.plane, rail, result))

    def lease_lane(self, uint32_t client, uint32_t rail, int fd, uint64_t nbytes, uint64_t generation, uint64_t cookie, *,
                   uint64_t base=0):
        check(rr_plane_lease_lane(self.plane, client, rail, fd, base, nbytes, generation, cookie))

    def lane_base(self, uint32_t client, uint32_t rail):
        cdef rr_client *at = self.client(client)
        if at is NULL or rail >= self.plane.rail_count or at.ports[rail].lane_memory is NULL:
            raise KeyError((client, rail))
        return <uint64_t> at.ports[rail].lane_memory.base

    def add_bounce(self, uint32_t client, uint32_t rail, int fd, uint64_t nbytes, uint64_t cookie):
        check(rr_plane_add_bounce(self.plane, client, rail, fd, nbytes, cookie))

    def add_region(self, uint32_t client, uint32_t region, int fd, uint64_t offset, uint64_t nbytes, *, uint64_t base=0):
        check(rr_plane_add_region(self.plane, client, region, fd, base, offset, nbytes))

    def region_base(self, uint32_t client, uint32_t region):
        cdef rr_client *at = self.client(client)
        if at is NULL or region >= self.plane.regions_per_client:
            raise KeyError((client, region))
        return <uint64_t> at.regions[region].base

    def remove_region(self, uint32_t client, uint32_t region, uint64_t cookie):
        check(rr_plane_remove_region(self.plane, client, region, cookie))

    def prefault_region(self, uint32_t client, uint32_t region):
        cdef rr_client *at = self.client(client)
        if at is NULL or region >= self.plane.regions_per_client:
            return
        # Both are read before the GIL is given up: the client may be released meanwhile.
        cdef rr_mapping found
        if at.regions[region].mapping is not NULL and at.regions[region].mapping.guard != RR_NONE:
            found = at.regions[region].mapping[0]
            with nogil:
                rr_populate_resident(found.base, found.bytes)

    def prefault_rail(self, uint32_t client, uint32_t rail):
        cdef rr_client *at = self.client(client)
        if at is NULL or rail >= self.plane.rail_count:
            return
        # Both are read before the GIL is given up: the client may be released meanwhile.
        cdef rr_mapping[2] found
        found[0].bytes = found[1].bytes = 0
        if at.ports[rail].lane_memory is not NULL and at.ports[rail].lane_memory.guard != RR_NONE:
            found[0] = at.ports[rail].lane_memory[0]
        if at.ports[rail].bouncer.memory is not NULL:
            found[1] = at.ports[rail].bouncer.memory[0]
        prefault(found[0].base, found[0].bytes)
        prefault(found[1].base, found[1].bytes)

    def finish_region_removal(self, uint32_t client, uint32_t region, bint busy):
        rr_plane_finish_region_removal(self.plane, client, region, busy)

    def add_remote(self, uint32_t client, uint32_t remote, uint32_t peer, uint32_t handle, uint64_t nbytes, uint32_t rail,
                   uint32_t owner, uint32_t window_bytes, uint32_t window_runs, *, uint64_t iova=0, rkeys=()):
        cdef uint32_t[16] keys
        cdef uint32_t count = key_list(rkeys, keys)
        check(rr_plane_add_remote(self.plane, client, remote, peer, handle, nbytes, rail, owner, window_bytes,
                                  window_runs, iova, keys, count))

    def remove_remote(self, uint32_t client, uint32_t remote):
        rr_plane_remove_remote(self.plane, client, remote)

    def cancel_transfer(self, uint32_t client, uint32_t transfer, uint32_t generation, uint32_t result):
        cdef rr_client *at = self.client(client)
        if at is NULL or not rr_transfer_cancel(at, transfer, generation, result):
            return False
        rr_plane_purge_stopped(self.plane)
        return True

    def report_unsettled(self, uint32_t client, uint32_t transfer, uint32_t generation):
        cdef rr_client *at = self.client(client)
        return at is not NULL and bool(rr_transfer_report_unsettled(at, transfer, generation))

    def find_transfers(self, uint64_t tag, uint32_t peer, handles):
        wanted = set(handles)
        found = []
        cdef rr_client *at
        cdef rr_context *context
        cdef uint64_t word
        for number in range(self.plane.max_clients):
            at = self.plane.clients[number]
            if at is NULL:
                continue
            for i in range(at.transfer_count):
                context = &at.contexts[i]
                word = rr_load_acquire_u64(&context.word)
                if not word & 0xffffffff or rr_load_relaxed_u64(&context.tag) != tag or rr_load_relaxed_u32(&context.peer) != peer:
                    continue
                if wanted and rr_load_relaxed_u32(&context.handle) not in wanted:
                    continue
                found.append((number, i, <uint32_t> (word >> 32)))
        return found

    def overdue(self, uint64_t now_ns):
        out = []
        cdef rr_client *at
        cdef rr_context *context
        cdef uint64_t word, timeout, started, fault
        cdef uint32_t number, i
        for number in range(self.plane.max_clients):
            at = self.plane.clients[number]
            if at is NULL:
                continue
            for i in range(at.transfer_count):
                context = &at.contexts[i]
                word = rr_load_acquire_u64(&context.word)
                if not word & 0xffffffff:
                    continue
                timeout = rr_load_relaxed_u64(&context.timeout_ns)
                started = rr_load_relaxed_u64(&context.started_ns)
                if timeout and now_ns > started and now_ns - started > timeout:
                    fault = rr_load_acquire_u64(&context.fault)
                    result = <uint32_t> fault if fault >> 32 == word >> 32 else 0
                    out.append((number, i, <uint32_t> (word >> 32), result, now_ns - started - timeout))
        return out

    def live_transfers(self):
        """How many transfers have not settled, over all clients."""
        cdef rr_client *at
        cdef uint32_t number, i, count = 0
        for number in range(self.plane.max_clients):
            at = self.plane.clients[number]
            if at is not NULL:
                for i in range(at.transfer_count):
                    count += (rr_load_acquire_u64(&at.contexts[i].word) & 0xffffffff) != 0
        return count

    def watch(self, uint32_t client, uint32_t transfer, uint32_t generation):
        cdef rr_client *at = self.client(client)
        return at is not NULL and bool(rr_transfer_watch(at, transfer, generation))

    def holders(self, uint32_t client, uint32_t transfer, uint32_t generation, uint64_t cookie):
        check(rr_plane_holders(self.plane, client, transfer, generation, cookie))

    def holders_result(self, uint64_t cookie):
        cdef rr_holder[256] found
        out = set()
        cdef uint32_t count = 256
        while count == 256:
            count = rr_plane_holders_result(self.plane, cookie, found, 256)
            for i in range(count):
                out.add((found[i].rail, found[i].connection))
        return sorted(out)

    def finish_note(self, uint32_t client, uint32_t transfer, uint32_t generation, uint32_t result):
        cdef rr_client *at = self.client(client)
        if at is not NULL:
            rr_transfer_finish_note(at, transfer, generation, result)

    def add_peer(self, uint32_t peer, uint32_t remote_rails):
        if remote_rails == 0:
            raise ValueError(f"peer {peer} has no rails")

    def add_sender(self, uint32_t rail, uint64_t connection, uint32_t peer, uint32_t remote_rail, bint express, uint32_t epoch, int fd):
        check(rr_plane_add_sender(self.plane, rail, connection, peer, remote_rail, express, epoch, fd))

    def settle_sender(self, uint32_t rail, uint64_t connection, uint64_t placed, bytes acks, uint64_t cookie):
        if len(acks) % sizeof(rr_ack):
            raise ValueError(f"acknowledgements of {len(acks)} bytes: not a multiple of {sizeof(rr_ack)}")
        check(rr_plane_settle_sender(self.plane, rail, connection, placed, <const rr_ack *> <const char *> acks,
                                     len(acks) // sizeof(rr_ack), cookie))

    def close_sender(self, uint32_t rail, uint64_t connection):
        check(rr_plane_close_sender(self.plane, rail, connection))

    def fail_path(self, uint32_t rail, uint32_t peer, uint32_t remote_rail, bint express, uint32_t result, uint64_t cookie):
        check(rr_plane_fail_path(self.plane, rail, peer, remote_rail, express, result, cookie))

    def drop_peer(self, uint32_t peer, uint32_t result, uint64_t cookie):
        check(rr_plane_drop_peer(self.plane, peer, result, cookie))

    def forget_peer(self, uint32_t peer):
        check(rr_plane_forget_peer(self.plane, peer))

    def add_receiver(self, uint32_t rail, uint64_t connection, uint32_t session, int fd):
        check(rr_plane_add_receiver(self.plane, rail, connection, session, fd))

    def fence_receiver(self, uint32_t rail, uint64_t connection):
        check(rr_plane_fence_receiver(self.plane, rail, connection))

    def fence_acks(self, uint64_t connection):
        cdef rr_ack[RR_WINDOW] acks
        cdef int count = rr_plane_fence_acks(self.plane, connection, acks)
        if count < 0:
            raise KeyError(connection)
        return (<char *> acks)[:count * sizeof(rr_ack)]

    def add_export(self, uint32_t handle, uint32_t session, uint32_t client, uint32_t region, uint64_t nbytes):
        check(rr_plane_add_export(self.plane, handle, session, client, region, nbytes))

    def remove_export(self, uint32_t handle, uint64_t cookie):
        check(rr_plane_remove_export(self.plane, handle, cookie))

    def add_tombstone(self, uint32_t client, uint64_t tag, uint64_t cookie):
        check(rr_plane_add_tombstone(self.plane, client, tag, cookie))
