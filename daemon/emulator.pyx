"""The moving part of the emulated NIC's helper process (emulated_mover.c) for its Python part."""

import os

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "gpu_copy.h" nogil:
    ctypedef int rg_result
    struct rg_api:
        pass
    struct rg_run:
        pass
    struct rg_counters:
        uint64_t bytes[3]
    struct rg_copier:
        rg_counters counters
    int rg_open(rg_copier *, const rg_api *, void *context, void *stream, void *kernel, void *lists, uint32_t list_count,
                uint32_t list_runs)
    rg_result rg_enter(const rg_copier *)
    rg_result rg_calibrate(rg_copier *, uint64_t source, uint64_t destination, double nic_rate)
    const char *rg_error_name(const rg_api *, rg_result)

cdef extern from "emulated_mover.h" nogil:
    enum:
        RE_STARTED
    struct re_statistics:
        uint64_t requests, bytes, busy_ns, active_ns, late_copies, late_ns, late_max_ns
    struct re_ring:
        uint64_t bytes_per_s
        uint32_t request_pieces
        re_statistics statistics
    struct re_mover:
        re_ring *ring
        rg_copier copier
        void *cuEventRecord
        void *events[RE_STARTED]
        rg_result gpu_error
        const char *gpu_call
    int re_open(re_mover *, int ring_fd, int kick_fd)
    void re_close(re_mover *)
    int re_add_file(re_mover *, uint64_t id, uint64_t base, uint64_t bytes, int fd, uint64_t offset, uint64_t *here)
    int re_add_address(re_mover *, uint64_t id, uint64_t base, uint64_t bytes, uint64_t here)
    int re_relocate(re_mover *, uint64_t id, uint64_t here)
    int re_remove(re_mover *, uint64_t id)
    int re_run(re_mover *)
    void re_stop(re_mover *)

cdef extern from *:
    """
    #define RE_NAME(name, arguments) #name,
    static const char *const re_function_names[] = {RG_FUNCTIONS(RE_NAME)};
    #define RE_FUNCTIONS (sizeof re_function_names / sizeof *re_function_names)
    """
    const char **re_function_names
    enum:
        RE_FUNCTIONS

GPU_FUNCTIONS = (*(re_function_names[i].decode() for i in range(RE_FUNCTIONS)), "cuEventRecord")
EVENTS = RE_STARTED


cdef int check(int status) except -1:
    if status < 0:
        raise OSError(-status, os.strerror(-status))
    return status


cdef class Mover:
    cdef re_mover mover
    cdef rg_api api
    cdef bint opened

    def __init__(self, int ring_fd, int kick_fd):
        if self.opened:
            raise RuntimeError("a Mover is initialised once")
        check(re_open(&self.mover, ring_fd, kick_fd))
        self.opened = True

    def __dealloc__(self):
        if self.opened:
            re_close(&self.mover)

    @property
    def bytes_per_s(self):
        return self.mover.ring.bytes_per_s

    @property
    def list_bytes(self):
        return RE_STARTED * self.mover.ring.request_pieces * sizeof(rg_run)

    def use_gpu(self, functions, *, uint64_t context, uint64_t stream, uint64_t kernel, uint64_t lists, events,
                uint64_t scratch_source, uint64_t scratch_destination):
        if len(functions) != RE_FUNCTIONS + 1 or len(events) != RE_STARTED:
            raise ValueError(f"{len(functions)} functions and {len(events)} events, expected {RE_FUNCTIONS + 1}, {RE_STARTED}")
        cdef uint64_t *api = <uint64_t *> &self.api
        for i in range(RE_FUNCTIONS):
            api[i] = functions[i]
        check(rg_open(&self.mover.copier, &self.api, <void *> context, <void *> stream, <void *> kernel, <void *> lists,
                      RE_STARTED, self.mover.ring.request_pieces))
        self.mover.cuEventRecord = <void *> <uint64_t> functions[RE_FUNCTIONS]
        for i in range(RE_STARTED):
            self.mover.events[i] = <void *> <uint64_t> events[i]
        self.gpu_check("cuCtxSetCurrent", rg_enter(&self.mover.copier))
        self.gpu_check("calibration of copies", rg_calibrate(&self.mover.copier, scratch_source, scratch_destination,
                                                             self.mover.ring.bytes_per_s / 1e9))

    cdef int gpu_check(self, str call, rg_result result) except -1:
        if result:
            raise OSError(5, f"{call} says {rg_error_name(&self.api, result).decode()}")
        return 0

    def add_file(self, uint64_t memory, uint64_t base, uint64_t nbytes, int fd, uint64_t offset):
        cdef uint64_t here
        check(re_add_file(&self.mover, memory, base, nbytes, fd, offset, &here))
        return here

    def add_address(self, uint64_t memory, uint64_t base, uint64_t nbytes, uint64_t here):
        check(re_add_address(&self.mover, memory, base, nbytes, here))

    def relocate(self, uint64_t memory, uint64_t here):
        check(re_relocate(&self.mover, memory, here))

    def remove(self, uint64_t memory):
        check(re_remove(&self.mover, memory))

    def run(self):
        cdef int status
        with nogil:
            status = re_run(&self.mover)
        if status:
            self.gpu_check(self.mover.gpu_call.decode(), self.mover.gpu_error)

    def stop(self):
        re_stop(&self.mover)

    def statistics(self):
        return dict(self.mover.ring.statistics)

    def copied_by(self):
        return dict(zip(("strided", "batch", "kernel"), self.mover.copier.counters.bytes))
