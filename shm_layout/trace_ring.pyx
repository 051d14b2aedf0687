"""The trace of one rail, read from a mapped node segment while its rail goes on writing (trace.h)."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from "trace.h" nogil:
    struct rr_trace_record:
        pass
    struct rr_trace_reader:
        uint64_t next
        uint64_t lost
    void rr_trace_reader_init(rr_trace_reader *, const rr_trace_record *, uint64_t mask, int only_new)
    int rr_trace_next(rr_trace_reader *, rr_trace_record *)


cdef class TraceReader:
    cdef const uint8_t[::1] memory
    cdef rr_trace_reader reader

    def __init__(self, memory, uint64_t offset, uint64_t records, *, bint only_new):
        cdef const uint8_t[::1] bytes = memory
        cdef uint64_t nbytes = bytes.shape[0]
        if records == 0 or records & (records - 1) or records > nbytes // sizeof(rr_trace_record) or (
                offset > nbytes - records * sizeof(rr_trace_record)) or offset % 8:
            raise ValueError(f"{records} trace records at {offset} in {nbytes} bytes; expected a power of two that fits, 8-byte aligned")
        self.memory = bytes
        rr_trace_reader_init(&self.reader, <const rr_trace_record *> (&bytes[0] + offset), records - 1, only_new)

    def close(self):
        self.memory = None

    @property
    def lost(self):
        return self.reader.lost

    def read(self, uint64_t most):
        cdef rr_trace_record record
        out = bytearray()
        cdef uint64_t count = 0
        while count < most and self.memory is not None and rr_trace_next(&self.reader, &record):
            out += (<char *> &record)[:sizeof(rr_trace_record)]
            count += 1
        return bytes(out)
