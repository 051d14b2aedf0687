"""Python's handle of the client's data path (client_core.h)."""

import os
import threading
import weakref

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t, uintptr_t

from railrelay.shm_layout import faults

cdef extern from "client_core.h" nogil:
    enum:
        RC_ROUTE_RELAY
        RC_ROUTE_DIRECT
        RC_ROUTE_SERIAL
        RC_ROUTE_SCHEDULED
        RC_ROUTE_RELAY_ALL
        RC_ROUTE_MATCHED
        RR_MAX_RAILS
        RR_CANCELLED
        RR_DAEMON_GONE
    struct rc_error:
        const char *code
        uint32_t rail
        char *text
    struct rc_event:
        uint32_t references
        uint32_t set
    struct rc_ready:
        int (*query)(void *)
        void (*release)(void *)
        void *argument
        int polled
    struct rc_list:
        const uint64_t *sources
        const uint64_t *destinations
        const uint64_t *lengths
        uint64_t count, space
        int one_length
    struct rc_remote:
        uint64_t address, bytes
        uint32_t index, peer, rail, owner, window_bytes, window_runs, users, local, on_gpu
    struct rc_counters:
        uint64_t feeder_sleeps, feeder_wakes, slots, copied_bytes, stalls, stall_ns, direct_slices, bounced_bytes
        uint64_t fast_submissions, bytes_local
    struct rg_api:
        int (*cuGetErrorName)(int, const char **)
    struct rg_counters:
        uint64_t *operations
        uint64_t *pieces
        uint64_t *bytes
    struct rg_costs:
        double strided_ns, row_ns, batched_ns, kernel_ns, kernel_piece_ns, engine_rate, kernel_rate, nic_rate
    struct rg_copier:
        rg_counters counters
        rg_costs costs
    struct rc_copier_facts:
        void *stream
        void *kernel
        void *lists
        uint32_t list_count, list_runs, thread_blocks
        int32_t forced
        uint64_t base, doorbell, scratch, scratch_target
        double nic_rate
    struct rr_lane:
        uint64_t doorbell
    struct rc_lane:
        uint8_t *memory
        uint64_t memory_bytes
        rg_copier *copier
    struct rc_bounce:
        uint8_t *memory
        uint64_t memory_bytes
        rg_copier *copier
    struct rr_facts "rr_segment_header":
        uint32_t slots
        uint64_t slot_bytes
    struct rc_core:
        uint32_t rail_count
        int completion_fd, pid
        rc_lane *lanes
        rc_bounce *bounces
        rc_counters counters
        void *segment
        uint64_t segment_bytes
        rr_facts facts
        rg_api gpu
        rg_copier *local_copier
        void *gpu_context
        uint32_t gpu_failure, dead
    struct rc_submission:
        uint32_t index, generation, result
        uint64_t bytes_done, bytes
    rc_core *rc_open(int segment_fd, uint64_t segment_bytes, int node_fd, uint64_t node_bytes, const int *kick_fds, uint32_t kick_count,
                     uint32_t own_rail, uint32_t route, uint64_t direct_slice_bytes, uint64_t express_bytes, uint64_t bytes_max,
                     int feeder_cpu, rc_error *error)
    int rc_watch_daemon(rc_core *, int)
    void rc_stop(rc_core *)
    void rc_close_copiers(rc_core *)
    void rc_forget_local_signal(rc_core *)
    int rc_watch_daemon(rc_core *core, int pidfd)
    void rc_close(rc_core *)
    void rc_free(rc_core *)
    int rc_add_lane(rc_core *, uint32_t rail, int fd, uint64_t bytes, uint64_t generation)
    int rc_add_bounce(rc_core *, uint32_t rail, int fd, uint64_t bytes)
    int rc_add_region(rc_core *, uint32_t index, uint64_t address, uint64_t bytes, int shared, int on_gpu, uint32_t rail)
    int rc_use_gpu(rc_core *, const uint64_t *functions, uint32_t count, void *context, int hang_up_fd)
    int rc_add_gpu_lane(rc_core *, uint32_t rail, uint64_t address, uint64_t bytes, uint64_t generation)
    int rc_set_lane_copier(rc_core *, uint32_t rail, const rc_copier_facts *)
    int rc_set_bounce_copier(rc_core *, uint32_t rail, const rc_copier_facts *)
    int rc_set_local_copier(rc_core *, const rc_copier_facts *)
    int rc_lane_is_leased(const rc_lane *)
    rr_lane *rc_shared_lane(rc_core *, uint32_t rail)
    struct rc_gpu_event:
        pass
    rc_gpu_event *rc_gpu_event_new(rc_core *, void *event)
    void rc_gpu_event_release(void *)
    rc_ready rc_gpu_event_ready(rc_gpu_event *)
    const char *rg_error_name(const rg_api *, int result)
    int rc_remove_region(rc_core *, uint32_t index)
    int rc_add_peer(rc_core *, uint32_t peer, const uint8_t *local_rails, uint32_t count)
    int rc_add_remote(rc_core *, rc_remote remote)
    int rc_remove_remote(rc_core *, uint32_t index)
    int rc_map_remote(rc_core *, uint32_t remote, int fd, uint64_t offset, uint64_t bytes)
    int rc_map_gpu_remote(rc_core *, uint32_t remote, uint64_t address, uint64_t bytes)
    void rc_populate_remote(rc_core *, uint32_t remote)
    int rc_unmap_remote(rc_core *, uint32_t remote)
    rc_submission *rc_reserve(rc_core *, uint32_t peer, const rc_list *blocks, uint64_t tag, uint64_t timeout_ns, int note, rc_ready ready,
                              rc_error *error)
    rc_submission *rc_reserve_pages(rc_core *, uint32_t peer, const uint64_t *source_rows, uint64_t source_stride,
                                    const int64_t *source_pages, const uint64_t *destination_rows, uint64_t destination_stride,
                                    const int64_t *destination_pages, uint32_t row_count, uint32_t page_count, uint64_t piece_bytes,
                                    uint64_t tag, uint64_t timeout_ns, int note, rc_ready ready, rc_error *error)
    void rc_publish(rc_submission *)
    void rc_cancel(rc_submission *, uint32_t result)
    int rc_wait(rc_submission *, int what, uint64_t timeout_ns)
    int rc_arm_async(rc_submission *)
    void rc_release(rc_submission *)
    void rc_fail_all(rc_core *, uint32_t result)
    void rc_wake_feeder(rc_core *)
    rc_event *rc_event_new()
    rc_ready rc_event_ready(rc_event *)
    void rc_event_release(void *)

cdef extern from "gpu_names.h" nogil:
    const char *const rg_function_names[]
    uint32_t rg_function_count
    enum:
        RG_STRIDED
        RG_BATCH
        RG_KERNEL

cdef extern from "atomics.h" nogil:
    void rr_store_release_u32(uint32_t *, uint32_t)
    uint32_t rr_load_acquire_u32(const uint32_t *)

cdef extern from "faults.h" nogil:
    void rr_fault_arm(uint32_t point, uint32_t passages)

cdef extern from "<unistd.h>" nogil:
    int getpid()


def _arm_fault(uint32_t point, uint32_t passages):
    rr_fault_arm(point, passages)


faults.join(_arm_fault)

FUNCTION_NAMES = tuple((<bytes> rg_function_names[i]).decode() for i in range(rg_function_count))

ROUTE_RELAY = RC_ROUTE_RELAY
ROUTE_DIRECT = RC_ROUTE_DIRECT
ROUTE_SERIAL = RC_ROUTE_SERIAL
ROUTE_SCHEDULED = RC_ROUTE_SCHEDULED
ROUTE_RELAY_ALL = RC_ROUTE_RELAY_ALL
ROUTE_MATCHED = RC_ROUTE_MATCHED

cdef uint64_t SIGNAL_CHECK_NS = 100_000_000
_cores = weakref.WeakSet()
_cores_lock = threading.Lock()


def _forget_cores():
    """In a forked child: its parent's cores are not its own, and the lock may have been held."""
    global _cores, _cores_lock
    _cores = weakref.WeakSet()
    _cores_lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_cores)


class SubmitError(Exception):
    """Bad arguments of a submission: ``code`` names the kind, the text names the block, the value and the limit.
    "no_lane": lease the lane of ``rail`` and ask again."""

    def __init__(self, code, text, rail=-1):
        super().__init__(text)
        self.code = code
        self.rail = rail


cdef check(int status, what):
    if status < 0:
        raise OSError(-status, f"{what}: {os.strerror(-status)}")


cdef class HostEvent:
    cdef rc_event *event
    cdef object __weakref__

    cdef rc_ready ready(self):
        return rc_event_ready(self.event)

    def __cinit__(self):
        self.event = rc_event_new()
        if self.event is NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.event is not NULL:
            rc_event_release(self.event)

    def set(self):
        rr_store_release_u32(&self.event.set, 1)
        with _cores_lock:
            cores = list(_cores)
        for core in cores:
            (<ClientCore> core).wake()

    def is_set(self):
        return rr_load_acquire_u32(&self.event.set) != 0


cdef class GpuEvent:
    cdef ClientCore core
    cdef rc_gpu_event *event

    def __init__(self, ClientCore core, uintptr_t event):
        if self.event is not NULL:
            raise RuntimeError("a GpuEvent is initialised once")
        self.core = core
        self.event = rc_gpu_event_new(core.core, <void *> event)
        if self.event is NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.event is not NULL:
            rc_gpu_event_release(self.event)

    cdef rc_ready ready(self):
        return rc_gpu_event_ready(self.event)


cdef rc_ready ready_of(event) except *:
    cdef rc_ready when
    if event is None:
        when.query, when.release, when.argument, when.polled = NULL, NULL, NULL, 0
        return when
    if isinstance(event, GpuEvent):
        return (<GpuEvent> event).ready()
    return (<HostEvent?> event).ready()


cdef class Submission:
    cdef rc_submission *at
    cdef ClientCore core

    def __init__(self):
        raise TypeError("a Submission comes from ClientCore.reserve")

    def __dealloc__(self):
        # In a forked child the segments are not mapped and the locks may be held by threads that are not there.
        if self.at is not NULL and self.core.core is not NULL and self.core.core.pid == getpid():
            with nogil:
                rc_release(self.at)

    cdef bint look(self, int what) except -1:
        self.core.same_process()
        cdef int there
        with nogil:
            there = rc_wait(self.at, what, 0)
        return there

    @property
    def index(self):
        return self.at.index

    @property
    def generation(self):
        return self.at.generation

    @property
    def nbytes(self):
        return self.at.bytes

    @property
    def gpu_error(self):
        return self.core.gpu_error

    @property
    def done(self):
        return bool(self.look(0))

    @property
    def source_done(self):
        return bool(self.look(1))

    @property
    def settled(self):
        return bool(self.look(2))

    @property
    def result(self):
        return self.at.result

    @property
    def bytes(self):
        return self.at.bytes_done

    def publish(self):
        self.core.same_process()
        with nogil:
            rc_publish(self.at)

    cdef wait_for(self, int what, timeout_ns):
        self.core.same_process()
        cdef int64_t left = timeout_ns
        cdef uint64_t slice_ns
        cdef int there
        while True:
            slice_ns = SIGNAL_CHECK_NS if left < 0 or <uint64_t> left > SIGNAL_CHECK_NS else <uint64_t> left
            with nogil:
                there = rc_wait(self.at, what, slice_ns)
            if there:
                return True
            PyErr_CheckSignals()
            if left >= 0:
                left -= <int64_t> slice_ns
                if left <= 0:
                    return False

    def wait(self, timeout_ns):
        return self.wait_for(0, timeout_ns)

    def wait_source(self, timeout_ns):
        return self.wait_for(1, timeout_ns)

    def wait_settled(self, timeout_ns):
        return self.wait_for(2, timeout_ns)

    def cancel(self):
        self.core.same_process()
        with nogil:
            rc_cancel(self.at, RR_CANCELLED)

    def arm_async(self):
        self.core.same_process()
        return bool(rc_arm_async(self.at))


cdef class ClientCore:
    cdef rc_core *core
    cdef bint closed
    cdef object __weakref__

    def __init__(self, int segment_fd, uint64_t segment_bytes, int node_fd, uint64_t node_bytes, kick_fds, *, uint32_t own_rail,
                 uint32_t route, uint64_t direct_slice_bytes, uint64_t express_bytes, uint64_t bytes_max, int feeder_cpu):
        cdef int[RR_MAX_RAILS] kicks
        cdef rc_error error
        if self.core is not NULL:
            raise RuntimeError("a ClientCore is initialised once")
        if len(kick_fds) > RR_MAX_RAILS:
            raise SubmitError("abi", f"{len(kick_fds)} rails, at most {RR_MAX_RAILS}")
        for i, fd in enumerate(kick_fds):
            kicks[i] = fd
        self.core = rc_open(segment_fd, segment_bytes, node_fd, node_bytes, kicks, len(kick_fds), own_rail, route, direct_slice_bytes,
                            express_bytes, bytes_max, feeder_cpu, &error)
        if self.core is NULL:
            raise SubmitError(error.code.decode(), (<bytes> error.text).decode(errors="replace"))
        with _cores_lock:
            _cores.add(self)

    def __dealloc__(self):
        if self.core is not NULL:
            with nogil:
                rc_free(self.core)

    cdef int same_process(self) except -1:
        if self.core.pid != getpid():
            raise SubmitError("forked", f"this client belongs to process {self.core.pid}; a forked child connects its own")
        return 0

    cdef int here(self) except -1:
        self.same_process()
        if self.closed:
            if self.core.dead == RR_DAEMON_GONE:
                raise SubmitError("daemon_gone", "the relay daemon is gone")
            raise SubmitError("closed", "this client is closed")
        return 0

    cdef wake(self):
        if not self.closed and self.core.pid == getpid():
            rc_wake_feeder(self.core)

    @property
    def rails(self):
        return self.core.rail_count

    @property
    def completion_fd(self):
        return self.core.completion_fd

    def add_lane(self, uint32_t rail, int fd, uint64_t nbytes, uint64_t generation):
        self.here()
        cdef int status
        with nogil:
            status = rc_add_lane(self.core, rail, fd, nbytes, generation)
        check(status, f"lane of rail {rail}")

    def add_gpu_lane(self, uint32_t rail, uint64_t address, uint64_t nbytes, uint64_t generation):
        self.here()
        check(rc_add_gpu_lane(self.core, rail, address, nbytes, generation), f"lane of rail {rail}")

    def has_lane(self, uint32_t rail):
        return rail < self.core.rail_count and bool(rc_lane_is_leased(&self.core.lanes[rail]))

    def has_copier(self, uint32_t rail):
        return rail < self.core.rail_count and self.core.lanes[rail].copier is not NULL

    def has_bounce_copier(self, uint32_t rail):
        return rail < self.core.rail_count and self.core.bounces[rail].copier is not NULL

    # ---- GPU memory ----

    @property
    def slots(self):
        return self.core.facts.slots

    @property
    def segment_area(self):
        return <uintptr_t> self.core.segment, self.core.segment_bytes

    def doorbell_offset(self, uint32_t rail):
        return <uintptr_t> &rc_shared_lane(self.core, rail).doorbell - <uintptr_t> self.core.segment

    def lane_area(self, uint32_t rail):
        return <uintptr_t> self.core.lanes[rail].memory, self.core.lanes[rail].memory_bytes

    def bounce_area(self, uint32_t rail):
        return <uintptr_t> self.core.bounces[rail].memory, self.core.bounces[rail].memory_bytes

    def use_gpu(self, functions, uintptr_t context, int hang_up_fd):
        self.here()
        cdef uint64_t[32] addresses
        if len(functions) > 32:
            raise ValueError(f"{len(functions)} functions")
        for i, address in enumerate(functions):
            addresses[i] = address
        check(rc_use_gpu(self.core, addresses, len(functions), <void *> context, hang_up_fd), "GPU")

    def set_copier(self, int rail, *, bint bounce, uintptr_t stream, uintptr_t kernel, uintptr_t lists, uint32_t list_count,
                   uint32_t list_runs, uint32_t thread_blocks, int32_t forced, uint64_t base, uint64_t doorbell, scratch,
                   double nic_rate):
        cdef rc_copier_facts facts
        cdef int status
        self.here()
        facts.stream, facts.kernel, facts.lists = <void *> stream, <void *> kernel, <void *> lists
        facts.list_count, facts.list_runs, facts.thread_blocks, facts.forced = list_count, list_runs, thread_blocks, forced
        facts.base, facts.doorbell = base, doorbell
        facts.scratch, facts.scratch_target = scratch
        facts.nic_rate = nic_rate
        with nogil:
            if rail < 0:
                status = rc_set_local_copier(self.core, &facts)
            elif bounce:
                status = rc_set_bounce_copier(self.core, rail, &facts)
            else:
                status = rc_set_lane_copier(self.core, rail, &facts)
        if status > 0:
            raise SubmitError("gpu_error", f"measuring copies for rail {rail}: {rg_error_name(&self.core.gpu, status).decode()}")
        check(status, f"copies for rail {rail}")

    @property
    def gpu_error(self):
        if not self.core.gpu_failure:
            return ""
        return rg_error_name(&self.core.gpu, self.core.gpu_failure).decode()

    def copy_costs(self, uint32_t rail):
        return self.core.lanes[rail].copier.costs if self.has_copier(rail) else None

    def add_bounce(self, uint32_t rail, int fd, uint64_t nbytes):
        self.here()
        check(rc_add_bounce(self.core, rail, fd, nbytes), f"bounce memory of rail {rail}")

    def add_region(self, uint32_t region, uint64_t address, uint64_t nbytes, bint shared, bint on_gpu, uint32_t rail):
        self.here()
        cdef int status = rc_add_region(self.core, region, address, nbytes, shared, on_gpu, rail)
        if status == -17:
            raise SubmitError("overlap", f"region of {nbytes} bytes at {address:#x} overlaps one that is registered already")
        check(status, f"region at {address:#x}")

    def remove_region(self, uint32_t region):
        self.here()
        cdef int status
        with nogil:
            status = rc_remove_region(self.core, region)
        if status == -16:
            raise SubmitError("busy", f"region {region} is read by a transfer that has not ended; wait for it or cancel it")
        check(status, f"region {region}")

    def add_peer(self, uint32_t peer, local_rails):
        self.here()
        cdef bytes rails = bytes(local_rails)
        check(rc_add_peer(self.core, peer, rails, len(rails)), f"peer {peer}")

    def add_remote(self, uint32_t remote, uint32_t peer, uint64_t address, uint64_t nbytes, uint32_t rail, uint32_t owner,
                   uint32_t window_bytes, uint32_t window_runs, bint local, bint on_gpu):
        self.here()
        cdef rc_remote at
        at.address, at.bytes, at.index, at.peer, at.rail, at.owner, at.window_bytes, at.window_runs, at.users, at.local, at.on_gpu = (
            address, nbytes, remote, peer, rail, owner, window_bytes, window_runs, 0, local, on_gpu)
        check(rc_add_remote(self.core, at), f"remote region {remote}")

    def remove_remote(self, uint32_t remote):
        self.here()
        cdef int status
        with nogil:
            status = rc_remove_remote(self.core, remote)
        if status == -16:
            raise SubmitError("busy", f"remote region {remote} is written by a transfer that has not ended; wait for it or cancel it")
        check(status, f"remote region {remote}")

    def map_remote(self, uint32_t remote, int fd, uint64_t offset, uint64_t nbytes):
        self.here()
        check(rc_map_remote(self.core, remote, fd, offset, nbytes), f"memory of remote region {remote}")

    def map_gpu_remote(self, uint32_t remote, uint64_t address, uint64_t nbytes):
        self.here()
        check(rc_map_gpu_remote(self.core, remote, address, nbytes), f"memory of remote region {remote}")

    def populate_remote(self, uint32_t remote):
        self.here()
        with nogil:
            rc_populate_remote(self.core, remote)

    def unmap_remote(self, uint32_t remote):
        if self.closed or self.core.pid != getpid():
            return False
        cdef int mapped
        with nogil:
            mapped = rc_unmap_remote(self.core, remote)
        return bool(mapped)

    cdef Submission wrap(self, rc_submission *at, rc_error *error):
        if at is NULL:
            raise SubmitError(error.code.decode(), (<bytes> error.text).decode(errors="replace"), error.rail)
        cdef Submission submission = Submission.__new__(Submission)
        submission.at = at
        submission.core = self
        return submission

    def reserve(self, uint32_t peer, const uint64_t[::1] sources, const uint64_t[::1] destinations, const uint64_t[::1] lengths, *,
                uint64_t space, uint64_t tag, uint64_t timeout_ns, bint note, ready):
        self.here()
        cdef rc_error error
        cdef rc_submission *at
        cdef rc_ready when
        cdef rc_list blocks
        if destinations.shape[0] != sources.shape[0] or lengths.shape[0] not in (1, sources.shape[0]):
            raise SubmitError("bad_length", f"{sources.shape[0]} sources, {destinations.shape[0]} destinations, {lengths.shape[0]} lengths")
        if sources.shape[0] == 0:
            raise SubmitError("bad_length", "a transfer needs at least one block")
        blocks.sources, blocks.destinations, blocks.lengths = &sources[0], &destinations[0], &lengths[0]
        blocks.count, blocks.space, blocks.one_length = sources.shape[0], space, lengths.shape[0] == 1
        when = ready_of(ready)
        with nogil:
            at = rc_reserve(self.core, peer, &blocks, tag, timeout_ns, note, when, &error)
        return self.wrap(at, &error)

    def write_now(self, uint32_t peer, uint64_t space, const uint64_t[::1] sources, const uint64_t[::1] destinations,
                  const uint64_t[::1] lengths, uint64_t length, uint64_t tag, uint64_t timeout_ns):
        self.here()
        cdef rc_error error
        cdef rc_submission *at
        cdef rc_ready never = ready_of(None)
        cdef rc_list blocks
        blocks.count = sources.shape[0]
        blocks.one_length = lengths is None
        if blocks.count == 0 or <uint64_t> destinations.shape[0] != blocks.count or (
                lengths is not None and <uint64_t> lengths.shape[0] != blocks.count):
            raise SubmitError("bad_length", "sources, destinations and lengths differ in number, or are none")
        blocks.sources, blocks.destinations, blocks.space = &sources[0], &destinations[0], space
        blocks.lengths = &length if lengths is None else &lengths[0]
        with nogil:
            at = rc_reserve(self.core, peer, &blocks, tag, timeout_ns, 0, never, &error)
            if at is not NULL:
                rc_publish(at)
        return self.wrap(at, &error)

    def reserve_pages(self, uint32_t peer, const uint64_t[::1] source_rows, uint64_t source_stride, const int64_t[::1] source_pages,
                      const uint64_t[::1] destination_rows, uint64_t destination_stride, const int64_t[::1] destination_pages,
                      uint64_t piece_bytes, *, uint64_t tag, uint64_t timeout_ns, bint note, ready):
        self.here()
        cdef rc_error error
        cdef rc_submission *at
        cdef rc_ready when
        cdef uint32_t rows = source_rows.shape[0]
        cdef uint32_t pages = source_pages.shape[0]
        if destination_rows.shape[0] != source_rows.shape[0]:
            raise SubmitError("bad_length", f"{source_rows.shape[0]} source rows, {destination_rows.shape[0]} destination rows")
        if destination_pages.shape[0] != source_pages.shape[0]:
            raise SubmitError("bad_length", f"{source_pages.shape[0]} source pages, {destination_pages.shape[0]} destination pages")
        if rows == 0 or pages == 0:
            raise SubmitError("bad_length", f"a paged transfer needs rows and pages: {rows} rows, {pages} pages")
        when = ready_of(ready)
        with nogil:
            at = rc_reserve_pages(self.core, peer, &source_rows[0], source_stride, &source_pages[0], &destination_rows[0],
                                  destination_stride, &destination_pages[0], rows, pages, piece_bytes, tag, timeout_ns, note, when, &error)
        return self.wrap(at, &error)

    def fail_all(self, uint32_t result):
        if not self.closed:
            with nogil:
                rc_fail_all(self.core, result)

    def counters(self):
        c = self.core.counters
        return {
            "feeder_sleeps": c.feeder_sleeps,
            "feeder_wakes": c.feeder_wakes,
            "slots": c.slots,
            "copied_bytes": c.copied_bytes,
            "stalls": c.stalls,
            "stall_ns": c.stall_ns,
            "direct_slices": c.direct_slices,
            "bounced_bytes": c.bounced_bytes,
            "fast_submissions": c.fast_submissions,
            "bytes_local": c.bytes_local,
            **self.gpu_counters(),
        }

    cdef gpu_counters(self):
        """Copies by a GPU into lanes, out of bounce memory and by the local route, by way."""
        cdef uint64_t[3] operations, pieces, nbytes
        cdef rg_copier *copiers[3]
        cdef uint32_t rail, way, i
        for way in range(3):
            operations[way] = pieces[way] = nbytes[way] = 0
        for rail in range(self.core.rail_count):
            copiers[0], copiers[1] = self.core.lanes[rail].copier, self.core.bounces[rail].copier
            copiers[2] = self.core.local_copier if rail == 0 else NULL
            for i in range(3):
                if copiers[i] is NULL:
                    continue
                for way in range(3):
                    operations[way] += copiers[i].counters.operations[way]
                    pieces[way] += copiers[i].counters.pieces[way]
                    nbytes[way] += copiers[i].counters.bytes[way]
        counters = {}
        for way, name in ((RG_STRIDED, "strided"), (RG_BATCH, "batch"), (RG_KERNEL, "kernel")):
            counters[f"gpu_{name}_operations"] = operations[way]
            counters[f"gpu_{name}_pieces"] = pieces[way]
            counters[f"gpu_{name}_bytes"] = nbytes[way]
        return counters

    def watch_daemon(self, int pidfd):
        self.here()
        check(rc_watch_daemon(self.core, pidfd), f"pidfd {pidfd} of the daemon")

    def stop(self):
        if self.closed:
            return
        self.closed = True
        with nogil:
            rc_stop(self.core)

    def forget_local_signal(self):
        with nogil:
            rc_forget_local_signal(self.core)

    def close(self):
        self.stop()
        rc_close_copiers(self.core)  # with the GIL: counters() may be looking at them
        with nogil:
            rc_close(self.core)
