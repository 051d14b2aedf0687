"""The trace of a rail: each record is read once and whole, or counted as lost."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterator

import pytest
from helpers.shim import Shared

from railrelay.shm_layout import abi
from railrelay.shm_layout.trace_ring import TraceReader

RECORDS = 8
SIZE = abi.SIZES["trace_record"]
WORDS = SIZE // 8


class Trace:
    """A trace in shared memory, and its writer."""

    def __init__(self, shim: ctypes.CDLL, start: int = 0, records: int = RECORDS) -> None:
        self.shim = shim
        self.shared = Shared(SIZE * records)
        self.records = records
        self.writer = shim.trace_writer(self.shared.address, records, start)

    def write(self, count: int = 1) -> None:
        """Records whose words are all their position."""
        self.shim.trace_write(self.writer, count)

    def tear(self, row: int) -> None:
        """As a writer leaves it that has begun to overwrite the row."""
        self.shared.poke("trace_record", "position", 0, base=row * SIZE)

    def reader(self, *, only_new: bool = False) -> TraceReader:
        return TraceReader(memoryview(self.shared.memory), 0, self.records, only_new=only_new)

    def close(self) -> None:
        self.shim.forget(self.writer)
        self.shared.close()


@pytest.fixture
def trace(shim: ctypes.CDLL) -> Iterator[Trace]:
    made = Trace(shim)
    yield made
    made.close()


def positions(raw: bytes) -> list[int]:
    """AssertionError if a record is torn."""
    found = []
    for words in struct.iter_unpack(f"<{WORDS}Q", raw):
        assert len(set(words)) == 1, f"torn: {words}"
        found.append(words[0])
    return found


def read(reader: TraceReader, most: int = 1000) -> list[int]:
    return positions(reader.read(most))


def test_each_record_is_read_once_in_order(trace: Trace) -> None:
    reader = trace.reader()
    assert read(reader) == []
    trace.write(3)
    assert read(reader, 2) == [1, 2]
    assert read(reader) == [3]
    trace.write(RECORDS)
    assert read(reader) == list(range(4, 4 + RECORDS))
    assert read(reader) == []
    assert reader.lost == 0
    reader.close()


def test_a_new_reader_begins_with_the_oldest_record_or_behind_the_newest(trace: Trace) -> None:
    trace.write(3 * RECORDS + 1)
    oldest, new = trace.reader(), trace.reader(only_new=True)
    assert read(oldest) == list(range(2 * RECORDS + 2, 3 * RECORDS + 2))
    assert read(new) == []
    trace.write()
    assert read(new) == [3 * RECORDS + 2]
    assert oldest.lost == new.lost == 0
    oldest.close()
    new.close()


def test_what_was_overwritten_is_counted_as_lost(trace: Trace) -> None:
    reader = trace.reader()
    trace.write(2)
    assert read(reader) == [1, 2]
    trace.write(5 * RECORDS)
    found = read(reader)
    assert found[-1] == 5 * RECORDS + 2
    assert found == list(range(found[0], found[-1] + 1))
    assert len(found) >= RECORDS - 1
    assert reader.lost + len(found) == 5 * RECORDS
    reader.close()


def test_a_record_that_is_being_overwritten_is_lost_and_not_shown(trace: Trace) -> None:
    trace.write(RECORDS)
    reader = trace.reader()
    trace.tear(1 % RECORDS)
    assert read(reader) == list(range(2, RECORDS + 1))
    assert reader.lost == 1
    reader.close()


def test_a_record_that_is_being_written_for_the_first_time_is_waited_for(trace: Trace) -> None:
    trace.write(2)
    reader = trace.reader()
    trace.tear(3)
    assert read(reader) == [1, 2]
    assert reader.lost == 0
    trace.write()
    assert read(reader) == [3]
    reader.close()


def test_positions_go_on_far_beyond_32_bits(shim: ctypes.CDLL) -> None:
    start = (1 << 40) + 5
    trace = Trace(shim, start)
    trace.write(RECORDS + 2)
    reader = trace.reader()
    assert read(reader) == list(range(start + 3, start + RECORDS + 3))
    reader.close()
    trace.close()


def test_a_writer_at_full_speed_tears_no_record_and_every_record_is_read_or_lost(shim: ctypes.CDLL) -> None:
    total, records = 2_000_000, 64
    trace = Trace(shim, records=records)
    reader = trace.reader()
    child = os.fork()
    if child == 0:
        for _ in range(total // 1000):
            trace.write(1000)
            os.sched_yield()
        os._exit(0)
    seen, last = 0, 0
    deadline = time.monotonic() + 60
    while last < total and time.monotonic() < deadline:
        for position in read(reader):
            assert position > last
            seen, last = seen + 1, position
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert last == total
    assert seen > records
    assert seen + reader.lost == total
    reader.close()
    trace.close()


@pytest.mark.parametrize(
    ("offset", "records"), [(0, 0), (0, 3), (0, 16), (SIZE, 8), (4, 4), (SIZE * 9, 1), (0, 1 << 63)]
)
def test_records_outside_the_memory_are_refused(offset: int, records: int) -> None:
    with pytest.raises(ValueError, match="trace records"):
        TraceReader(memoryview(bytes(RECORDS * SIZE)), offset, records, only_new=False)


def test_a_closed_reader_reads_nothing(trace: Trace) -> None:
    trace.write()
    reader = trace.reader()
    reader.close()
    assert reader.read(5) == b""
