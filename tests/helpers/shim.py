"""Rings, lanes and the trace of the C headers, called from Python on memory of the test: compiled with the system's C
compiler."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.processes import TESTS
from railrelay.shm_layout import abi

HEADERS = Path(abi.__file__).parent
LINE = abi.CONSTANTS["LINE_BYTES"]
VIOLATION = -2
_SOURCE = TESTS / "shm_layout" / "ring_shim.c"


def build(directory: Path) -> ctypes.CDLL:
    library = directory / "ring_shim.so"
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *("-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"),
            *("-I", str(HEADERS), "-o", str(library), str(_SOURCE)),
        ],
        check=True,
        timeout=60,
    )
    shim = ctypes.CDLL(str(library))
    pointer, u32, u64, i32, i64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "ring_producer": (pointer, [pointer, pointer, u64, u64]),
        "ring_consumer": (pointer, [pointer, pointer, u64, u64]),
        "ring_free": (u64, [pointer, u64]),
        "ring_push": (u32, [pointer, pointer, u32]),
        "ring_available": (i64, [pointer]),
        "ring_peek": (i64, [pointer, pointer, u32]),
        "ring_release": (None, [pointer, u32]),
        "lane_producer": (pointer, [pointer, u32, u64]),
        "lane_consumer": (pointer, [pointer, u32, u64]),
        "lane_credit": (u32, [pointer]),
        "lane_reserve": (u32, [pointer]),
        "lane_announce": (None, [pointer, u32]),
        "lane_ring_doorbell": (None, [pointer]),
        "lane_take": (i32, [pointer]),
        "lane_return": (None, [pointer, u32]),
        "trace_writer": (pointer, [pointer, u64, u64]),
        "trace_write": (None, [pointer, u64]),
        "forget": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(shim, name)
        function.restype, function.argtypes = result, arguments
    return shim


class Shared:
    """Zeroed anonymous memory that forked children share, with typed words by structure and field."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self._view = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._view)

    def word(self, structure: str, field: str, index: int = 0, base: int = 0) -> int:
        at, size = self._place(structure, field, index)
        return int.from_bytes(self.memory[base + at : base + at + size], "little")

    def poke(self, structure: str, field: str, value: int, index: int = 0, base: int = 0) -> None:
        at, size = self._place(structure, field, index)
        self.memory[base + at : base + at + size] = value.to_bytes(size, "little")

    def close(self) -> None:
        del self._view
        self.memory.close()

    @staticmethod
    def _place(structure: str, field: str, index: int) -> tuple[int, int]:
        facts = abi.FIELDS[structure][field]
        size = facts.size // facts.count
        return facts.offset + index * size, size


@dataclass
class Ring:
    """A ring at the start of shared memory, its slices after it."""

    shim: ctypes.CDLL
    shared: Shared
    capacity: int
    producer: int
    consumer: int

    @classmethod
    def make(cls, shim: ctypes.CDLL, capacity: int, start: int = 0) -> Ring:
        size = abi.SIZES["ring"]
        shared = Shared(size + capacity * abi.SIZES["slice"])
        ends = (shared.address, shared.address + size, capacity, start)
        shared.poke("ring", "produced", start)
        shared.poke("ring", "consumed", start)
        return cls(shim, shared, capacity, shim.ring_producer(*ends), shim.ring_consumer(*ends))

    def push(self, *slices: bytes) -> int:
        pushed: int = self.shim.ring_push(self.producer, b"".join(slices), len(slices))
        return pushed

    def peek(self, most: int) -> list[bytes] | None:
        """None: the shared position is impossible."""
        size = abi.SIZES["slice"]
        out = ctypes.create_string_buffer(most * size)
        count = self.shim.ring_peek(self.consumer, out, most)
        return None if count < 0 else [out.raw[at * size : (at + 1) * size] for at in range(count)]

    def release(self, count: int) -> None:
        self.shim.ring_release(self.consumer, count)

    def slice_at(self, index: int) -> bytes:
        start, size = abi.SIZES["ring"] + index * abi.SIZES["slice"], abi.SIZES["slice"]
        return self.shared.memory[start : start + size]

    def close(self) -> None:
        self.shim.forget(self.producer)
        self.shim.forget(self.consumer)
        self.shared.close()


@dataclass
class Lane:
    """A lane at the start of shared memory, and ``extra`` bytes after it."""

    shim: ctypes.CDLL
    shared: Shared
    slots: int
    producer: int
    consumer: int

    @classmethod
    def make(cls, shim: ctypes.CDLL, slots: int, start: int = 0, extra: int = 0) -> Lane:
        shared = Shared(abi.SIZES["lane"] + extra)
        for field in ("head", "doorbell", "completed"):
            shared.poke("lane", field, start)
        return cls(
            shim,
            shared,
            slots,
            shim.lane_producer(shared.address, slots, start),
            shim.lane_consumer(shared.address, slots, start),
        )

    def credit(self) -> int:
        credit: int = self.shim.lane_credit(self.producer)
        return credit

    def reserve(self) -> int:
        slot: int = self.shim.lane_reserve(self.producer)
        return slot

    def announce(self, slot: int) -> None:
        self.shim.lane_announce(self.producer, slot)

    def ring_doorbell(self) -> None:
        self.shim.lane_ring_doorbell(self.producer)

    def take(self) -> int:
        slot: int = self.shim.lane_take(self.consumer)
        return slot

    def give_back(self, slot: int) -> None:
        self.shim.lane_return(self.consumer, slot)

    def positions(self) -> tuple[int, int, int]:
        """(head, doorbell, completed)"""
        return (
            self.shared.word("lane", "head"),
            self.shared.word("lane", "doorbell"),
            self.shared.word("lane", "completed"),
        )

    def close(self) -> None:
        self.shim.forget(self.producer)
        self.shim.forget(self.consumer)
        self.shared.close()
