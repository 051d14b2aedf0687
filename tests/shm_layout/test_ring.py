"""The ring of ring.h, byte by byte, and between two processes."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from helpers import processes
from helpers.shim import Ring
from helpers.waiting import until

from railrelay.shm_layout import abi

CAPACITY = 8
SLICE = abi.SIZES["slice"]
Make = Callable[..., Ring]


@pytest.fixture
def make(shim: ctypes.CDLL) -> Iterator[Make]:
    rings: list[Ring] = []

    def make_one(capacity: int = CAPACITY, start: int = 0) -> Ring:
        rings.append(Ring.make(shim, capacity, start))
        return rings[-1]

    yield make_one
    for ring in rings:
        ring.close()


def slice_of(number: int) -> bytes:
    """64 bytes, all telling the number."""
    return number.to_bytes(8, "little") * (SLICE // 8)


def produced(ring: Ring) -> int:
    return ring.shared.word("ring", "produced")


def consumed(ring: Ring) -> int:
    return ring.shared.word("ring", "consumed")


def test_new_memory_is_an_empty_ring(make: Make) -> None:
    ring = make()
    assert ring.peek(CAPACITY) == []
    assert ring.shim.ring_free(ring.producer, CAPACITY) == CAPACITY
    assert not any(ring.shared.memory[:])


def test_a_push_writes_its_slices_and_one_word(make: Make) -> None:
    ring = make()
    assert ring.push(slice_of(1), slice_of(2), slice_of(3)) == 3
    expected = bytearray(len(ring.shared.memory))
    at = abi.FIELDS["ring"]["produced"].offset
    expected[at : at + 8] = (3).to_bytes(8, "little")
    start = abi.SIZES["ring"]
    expected[start : start + 3 * SLICE] = slice_of(1) + slice_of(2) + slice_of(3)
    assert ring.shared.memory[:] == bytes(expected)


def test_a_peek_writes_nothing_and_a_release_one_word(make: Make) -> None:
    ring = make()
    ring.push(slice_of(1), slice_of(2))
    before = ring.shared.memory[:]
    assert ring.peek(CAPACITY) == [slice_of(1), slice_of(2)]
    assert ring.peek(1) == [slice_of(1)]
    assert ring.shared.memory[:] == before
    ring.release(1)
    after = bytearray(before)
    at = abi.FIELDS["ring"]["consumed"].offset
    after[at : at + 8] = (1).to_bytes(8, "little")
    assert ring.shared.memory[:] == bytes(after)
    assert ring.peek(CAPACITY) == [slice_of(2)]


def test_the_end_of_the_ring_goes_on_at_its_start(make: Make) -> None:
    ring = make()
    ring.push(*(slice_of(number) for number in range(6)))
    ring.peek(6)
    ring.release(6)
    assert ring.push(*(slice_of(number) for number in range(10, 15))) == 5
    assert [ring.slice_at(index) for index in (6, 7, 0, 1, 2)] == [slice_of(number) for number in range(10, 15)]
    assert ring.slice_at(3) == slice_of(3)
    assert ring.peek(CAPACITY) == [slice_of(number) for number in range(10, 15)]


def test_a_full_ring_takes_what_fits_and_then_nothing(make: Make) -> None:
    ring = make()
    assert ring.push(*(slice_of(number) for number in range(11))) == CAPACITY
    assert ring.push(slice_of(99)) == 0
    assert produced(ring) == CAPACITY
    ring.peek(3)
    ring.release(3)
    assert ring.push(*(slice_of(number) for number in range(8, 13))) == 3
    assert ring.peek(CAPACITY) == [slice_of(number) for number in range(3, 8)]  # what was known to be there
    ring.release(5)
    assert ring.peek(CAPACITY) == [slice_of(8), slice_of(9), slice_of(10)]


def test_positions_run_on_over_the_end_of_64_bits(make: Make) -> None:
    ring = make(start=(1 << 64) - 3)
    for number in range(50):
        assert ring.push(slice_of(number), slice_of(number + 1)) == 2
        assert ring.peek(CAPACITY) == [slice_of(number), slice_of(number + 1)]
        ring.release(2)
    assert produced(ring) == consumed(ring) == 100 - 3


def test_a_copy_that_was_taken_does_not_change_with_the_ring(make: Make) -> None:
    ring = make()
    ring.push(slice_of(1))
    taken = ring.peek(1)
    start = abi.SIZES["ring"]
    ring.shared.memory[start : start + SLICE] = slice_of(2)
    assert taken == [slice_of(1)]


@pytest.mark.parametrize("position", [CAPACITY + 1, 1 << 63, (1 << 64) - 1])
def test_a_produced_position_that_cannot_be_is_a_violation(make: Make, position: int) -> None:
    ring = make()
    ring.shared.poke("ring", "produced", position)
    assert ring.peek(CAPACITY) is None


def test_a_produced_position_that_went_back_is_a_violation(make: Make) -> None:
    ring = make()
    ring.push(slice_of(1), slice_of(2))
    ring.peek(2)
    ring.release(2)
    ring.shared.poke("ring", "produced", 1)
    assert ring.peek(CAPACITY) is None


@pytest.mark.parametrize("position", [CAPACITY + 1, 1 << 63, (1 << 64) - 1])
def test_a_consumed_position_that_cannot_be_makes_no_room(make: Make, position: int) -> None:
    ring = make()
    ring.push(*(slice_of(number) for number in range(CAPACITY)))
    ring.shared.poke("ring", "consumed", position)
    assert ring.push(slice_of(99)) == 0
    assert ring.slice_at(0) == slice_of(0)


# ---- two processes ----


def test_another_process_gets_everything_in_order(make: Make) -> None:
    ring, count = make(64), 40_000

    def produce() -> None:
        number = 0
        while number < count:
            number += ring.push(*(slice_of(at) for at in range(number, min(count, number + 13))))

    child = processes.fork(produce)
    wanted = 0
    while wanted < count:
        found = ring.peek(32)
        assert found is not None
        for one in found:
            assert one == slice_of(wanted)
            wanted += 1
        ring.release(len(found))
    assert processes.exit_code(child) == 0
    assert (produced(ring), consumed(ring)) == (count, count)


@pytest.mark.parametrize("after_s", [0.02, 0.05, 0.1])
def test_a_producer_killed_at_any_moment_leaves_whole_slices_in_order(make: Make, after_s: float) -> None:
    ring = make(64)

    def produce() -> None:
        number = 0
        while True:
            number += ring.push(*(slice_of(at) for at in range(number, number + 7)))

    child = processes.fork(produce)
    wanted = 0

    def drain() -> int:
        nonlocal wanted
        found = ring.peek(64)
        assert found is not None
        for one in found:
            assert one == slice_of(wanted)
            wanted += 1
        ring.release(len(found))
        return len(found)

    until(drain, "the producer starts")
    end = time.monotonic() + after_s
    while time.monotonic() < end:
        drain()
    os.kill(child, signal.SIGKILL)
    assert processes.exit_code(child) == -signal.SIGKILL
    while drain():
        pass
    assert wanted == produced(ring) == consumed(ring)
    assert wanted % 7 == 0 or wanted > 64  # a batch is published whole, unless the ring was full


def test_slices_of_a_producer_that_died_before_publishing_never_show(make: Make) -> None:
    ring = make()

    def write_and_die() -> None:
        ring.push(slice_of(1))
        start = abi.SIZES["ring"] + SLICE
        ring.shared.memory[start : start + SLICE] = slice_of(2)
        os.kill(os.getpid(), signal.SIGKILL)

    assert processes.exit_code(processes.fork(write_and_die)) == -signal.SIGKILL
    assert ring.peek(CAPACITY) == [slice_of(1)]


def test_a_producer_that_stops_holds_up_only_its_own_ring(make: Make) -> None:
    """The SliceQueue is one ring a producer."""
    rings = [make(64), make(64)]

    def produce(ring: Ring) -> None:
        number = 0
        while True:
            number += ring.push(slice_of(number))

    children = [processes.fork(lambda ring=ring: produce(ring)) for ring in rings]  # type: ignore[misc]
    try:
        for ring in rings:
            until(lambda ring=ring: produced(ring), "both start")  # type: ignore[misc]
        os.kill(children[0], signal.SIGSTOP)
        until(lambda: processes.state(children[0]) == "T", "the first stops")
        for _ in range(2):
            found = until(lambda: rings[1].peek(64), "the second goes on")
            assert found
            rings[1].release(len(found))
            left = rings[0].peek(64)
            assert left is not None
            rings[0].release(len(left))
        assert rings[0].peek(64) == []
        os.kill(children[0], signal.SIGCONT)
        assert until(lambda: rings[0].peek(64), "the first goes on")
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            processes.exit_code(child)
