"""What `railrelay bench` measures against (plain_sockets.h)."""

import os

from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef extern from "plain_sockets.h" nogil:
    struct plain_connection:
        int fd, cpu
        const uint64_t *addresses
        const uint64_t *lengths
        uint64_t count, bytes_per_call
        uint32_t rounds
        uint64_t gap_ns
        int error
        uint64_t begin_ns, end_ns, cpu_ns
        uint64_t *round_ns
    void plain_send(plain_connection *connections, uint32_t count)
    void plain_receive(plain_connection *connections, uint32_t count)
    uint64_t plain_gather(const uint64_t *addresses, const uint64_t *lengths, uint64_t count, uint8_t *slots, uint64_t slot_bytes,
                          uint32_t slot_count)
    uint64_t plain_copy(const uint64_t *sources, const uint64_t *destinations, uint64_t count, uint64_t length)
    uint64_t plain_process_cpu_ns(int pid)


cdef run(fds, cpus, parts, uint64_t bytes_per_call, uint32_t rounds, uint64_t gap_ns, uint64_t[:, ::1] round_ns):
    cdef const uint64_t[::1] addresses, lengths
    cdef uint32_t i, count = len(fds)
    cdef bint sending = round_ns is not None
    cdef plain_connection *all = <plain_connection *> PyMem_Calloc(count, sizeof(plain_connection))
    if all is NULL:
        raise MemoryError
    try:
        for i in range(count):
            addresses, lengths = parts[i]
            if addresses.shape[0] != lengths.shape[0] or not addresses.shape[0] or not bytes_per_call:
                raise ValueError(f"{addresses.shape[0]} addresses, {lengths.shape[0]} lengths, {bytes_per_call} bytes a call")
            all[i].fd, all[i].cpu = fds[i], cpus[i]
            all[i].addresses, all[i].lengths, all[i].count = &addresses[0], &lengths[0], addresses.shape[0]
            all[i].bytes_per_call, all[i].rounds, all[i].gap_ns = bytes_per_call, rounds, gap_ns
            if sending:
                all[i].round_ns = &round_ns[i, 0]
        with nogil:
            if sending:
                plain_send(all, count)
            else:
                plain_receive(all, count)
        for i in range(count):
            if all[i].error:
                raise OSError(all[i].error, f"connection {i}: {os.strerror(all[i].error)}")
        return max(all[i].end_ns for i in range(count)) - min(all[i].begin_ns for i in range(count))
    finally:
        PyMem_Free(all)


def send(fds, cpus, parts, uint64_t bytes_per_call, uint64_t gap_ns, uint64_t[:, ::1] round_ns not None):
    return run(fds, cpus, parts, bytes_per_call, round_ns.shape[1], gap_ns, round_ns)


def receive(fds, cpus, parts, uint64_t bytes_per_call, uint32_t rounds):
    return run(fds, cpus, parts, bytes_per_call, rounds, 0, None)


def gather(const uint64_t[::1] addresses, const uint64_t[::1] lengths, uint8_t[::1] slots, uint64_t slot_bytes):
    cdef uint64_t count = addresses.shape[0]
    cdef uint32_t slot_count = slots.shape[0] // slot_bytes
    cdef uint64_t spent
    if not slot_count or not count or lengths.shape[0] != addresses.shape[0]:
        raise ValueError(f"{slots.shape[0]} bytes of slots, {count} addresses, {lengths.shape[0]} lengths")
    with nogil:
        spent = plain_gather(&addresses[0], &lengths[0], count, &slots[0], slot_bytes, slot_count)
    return spent


def copy(const uint64_t[::1] sources, const uint64_t[::1] destinations, uint64_t length):
    cdef uint64_t count = sources.shape[0]
    cdef uint64_t spent
    if not count or <uint64_t> destinations.shape[0] != count:
        raise ValueError(f"{sources.shape[0]} sources, {destinations.shape[0]} destinations")
    with nogil:
        spent = plain_copy(&sources[0], &destinations[0], count, length)
    return spent


def process_cpu_ns(int pid):
    return plain_process_cpu_ns(pid)
