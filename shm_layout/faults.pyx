"""Fault points (faults.h) for Python: their table, arming one, and passing one on the control path."""

import os

from libc.stdint cimport uint32_t

cdef extern from "faults.h" nogil:
    struct rr_fault_facts:
        const char *name
        const char *text
    const rr_fault_facts rr_fault_table[]
    enum:
        RR_FAULT_COUNT
    uint32_t rr_fault_armed
    void rr_fault_pass()
    void rr_fault_arm(uint32_t point, uint32_t passages)

VARIABLE = "RAILRELAY_FAULT"
POINTS = {rr_fault_table[i].name.decode(): rr_fault_table[i].text.decode() for i in range(RR_FAULT_COUNT - 1)}

cdef dict _numbers = {name: number for number, name in enumerate(POINTS, 1)}
cdef list _joined = []
cdef tuple _armed = (0, 0)


def join(arm):
    _joined.append(arm)
    arm(*_armed)


def parsed(str text):
    name, _, passages = text.partition(":")
    if passages and not passages.isdecimal():
        raise ValueError(f"fault point {text!r}: expected a name, or name:passage")
    if name not in _numbers:
        raise ValueError(f"fault point {name!r}: there is no such point; shm_layout/faults.h lists them")
    if passages and not 0 < int(passages) < 1 << 31:
        raise ValueError(f"fault point {name!r}: passage {passages}; expected 1 to {(1 << 31) - 1}")
    return name, int(passages or 1)


def arm(str text):
    global _armed
    name, passages = parsed(text) if text else ("", 1)
    _armed = (_numbers[name] if name else 0, passages)
    rr_fault_arm(_armed[0], _armed[1])
    for other in _joined:
        other(*_armed)


def point(str name):
    cdef uint32_t number = _numbers[name]
    if rr_fault_armed == number:
        rr_fault_pass()


arm(os.environ.get(VARIABLE, ""))
