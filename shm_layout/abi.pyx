"""The shared-memory ABI as Python tables, expanded from the field lists of abi.h. Nothing else in Python knows an offset."""

from dataclasses import dataclass

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "abi_table.h":
    struct rr_field_facts:
        const char *structure
        const char *name
        const char *type
        const char *writer
        uint32_t offset
        uint32_t count
        uint32_t bytes
    struct rr_constant:
        const char *name
        uint64_t value
    const rr_field_facts rr_fields[]
    const rr_constant rr_sizes[]
    const rr_constant rr_constants[]
    const rr_constant rr_results[]
    const char *const rr_rail_counter_labels[]
    enum:
        RR_RAIL_COUNTER_COUNT


@dataclass(frozen=True)
class Field:
    """offset and size in bytes from the start of the structure; count > 1 for arrays; ctype is 'u8' to 'u64', 'i32' or 'char'."""

    offset: int
    count: int
    ctype: str
    size: int
    writer: str


_CTYPES = {"uint16_t": "u16", "uint32_t": "u32", "uint64_t": "u64", "int32_t": "i32", "char": "char"}


def _fields():
    tables = {}
    cdef int i = 0
    while rr_fields[i].structure != NULL:
        facts = rr_fields[i]
        table = tables.setdefault(facts.structure.decode(), {})
        table[facts.name.decode()] = Field(
            facts.offset, facts.count, _CTYPES[facts.type.decode()], facts.bytes * facts.count, facts.writer.decode()
        )
        i += 1
    return tables


cdef dict _constants(const rr_constant *table):
    values = {}
    cdef int i = 0
    while table[i].name != NULL:
        values[table[i].name.decode()] = table[i].value
        i += 1
    return values


FIELDS = _fields()
SIZES = _constants(rr_sizes)
CONSTANTS = _constants(rr_constants)
RESULTS = _constants(rr_results)
RAIL_COUNTERS = tuple(rr_rail_counter_labels[i].decode() for i in range(RR_RAIL_COUNTER_COUNT))
