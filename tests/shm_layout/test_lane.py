"""The lane of lane.h, byte by byte, and between two processes."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections.abc import Callable, Iterator

import pytest
from helpers import processes
from helpers.shim import VIOLATION, Lane

from railrelay.shm_layout import abi

SLOTS = 4
NONE = -1
Make = Callable[..., Lane]


@pytest.fixture
def make(shim: ctypes.CDLL) -> Iterator[Make]:
    lanes: list[Lane] = []

    def make_one(slots: int = SLOTS, start: int = 0, extra: int = 0) -> Lane:
        lanes.append(Lane.make(shim, slots, start, extra))
        return lanes[-1]

    yield make_one
    for lane in lanes:
        lane.close()


def fill(lane: Lane) -> int:
    assert lane.credit() > 0
    slot = lane.reserve()
    lane.announce(slot)
    lane.ring_doorbell()
    return slot


def test_new_memory_is_a_lane_with_all_credit(make: Make) -> None:
    lane = make()
    assert lane.credit() == SLOTS
    assert lane.take() == NONE
    assert not any(lane.shared.memory[:])


def test_a_reservation_is_seen_by_nobody(make: Make) -> None:
    lane = make()
    assert [lane.reserve() for _ in range(SLOTS)] == [0, 1, 2, 3]
    assert lane.credit() == 0
    assert not any(lane.shared.memory[:])


def test_an_announcement_names_the_slot_and_moves_the_head_alone(make: Make) -> None:
    lane = make()
    lane.reserve()
    lane.announce(lane.reserve())
    expected = bytearray(abi.SIZES["lane"])
    fields = abi.FIELDS["lane"]
    expected[fields["head"].offset] = 1
    expected[fields["announce"].offset] = 1
    assert lane.shared.memory[:] == bytes(expected)
    assert lane.take() == NONE
    lane.ring_doorbell()
    expected[fields["doorbell"].offset] = 1
    assert lane.shared.memory[:] == bytes(expected)
    assert lane.take() == 1
    assert lane.shared.memory[:] == bytes(expected)


def test_a_returned_slot_is_named_and_counted(make: Make) -> None:
    lane = make()
    slots = [fill(lane) for _ in range(3)]
    assert [lane.take() for _ in range(4)] == [*slots, NONE]
    before = bytearray(lane.shared.memory[:])
    lane.give_back(2)
    lane.give_back(0)
    fields = abi.FIELDS["lane"]
    before[fields["completed"].offset] = 2
    before[fields["freed"].offset : fields["freed"].offset + 8] = bytes([2, 0, 0, 0, 0, 0, 0, 0])
    assert lane.shared.memory[:] == bytes(before)
    assert lane.credit() == 3
    assert {lane.reserve() for _ in range(3)} == {0, 2, 3}  # slot 1 is still with the rail


def test_slots_are_taken_in_the_order_of_their_doorbells_and_returned_in_any(make: Make) -> None:
    lane, rng = make(), random.Random(1)
    filled: list[int] = []
    taken: list[int] = []
    for _ in range(2000):
        if lane.credit() and rng.random() < 0.6:
            filled.append(fill(lane))
        if rng.random() < 0.5:
            slot = lane.take()
            assert slot == (filled.pop(0) if filled else NONE)
            taken += [slot] if slot != NONE else []
        if taken and rng.random() < 0.5:
            lane.give_back(taken.pop(rng.randrange(len(taken))))
        assert len(filled) + len(taken) + lane.credit() == SLOTS
    head, doorbell, completed = lane.positions()
    assert completed <= doorbell == head
    assert head > 500


def test_positions_run_on_over_the_end_of_64_bits(make: Make) -> None:
    lane = make(start=(1 << 64) - 5)
    for _ in range(40):
        assert lane.take() == NONE
        slot = fill(lane)
        assert lane.take() == slot
        lane.give_back(slot)
    assert lane.positions() == (35, 35, 35)
    assert lane.credit() == SLOTS


@pytest.mark.parametrize(
    ("head", "doorbell"),
    [
        (0, 1),  # filled, but not announced
        (1, 2),
        (SLOTS + 1, 1),  # more than there are
        (SLOTS + 1, SLOTS + 1),
        ((1 << 64) - 1, 0),  # backwards
        ((1 << 64) - 1, (1 << 64) - 1),
        (1 << 63, 1 << 63),
    ],
)
def test_positions_that_cannot_be_are_a_violation(make: Make, head: int, doorbell: int) -> None:
    lane = make()
    lane.shared.poke("lane", "head", head)
    lane.shared.poke("lane", "doorbell", doorbell)
    assert lane.take() == VIOLATION


def test_a_doorbell_that_goes_back_is_a_violation(make: Make) -> None:
    lane = make()
    for _ in range(3):
        fill(lane)
        lane.take()
    lane.shared.poke("lane", "doorbell", 1)
    assert lane.take() == VIOLATION


@pytest.mark.parametrize("slot", [SLOTS, 255, 256, (1 << 32) - 1])
def test_a_slot_that_is_not_there_is_a_violation(make: Make, slot: int) -> None:
    lane = make()
    lane.announce(slot)
    lane.ring_doorbell()
    assert lane.take() == VIOLATION


def test_a_slot_that_the_rail_still_holds_is_a_violation(make: Make) -> None:
    lane = make()
    assert lane.take() == NONE
    for _ in range(2):
        lane.announce(3)
        lane.ring_doorbell()
    assert lane.take() == 3
    assert lane.take() == VIOLATION
    lane.give_back(3)
    assert lane.take() == 3


@pytest.mark.parametrize("completed", [1, SLOTS, 1 << 63, (1 << 64) - 1])
def test_a_completed_position_ahead_of_the_head_gives_no_credit(make: Make, completed: int) -> None:
    lane = make()
    for _ in range(SLOTS):
        lane.reserve()
    lane.shared.poke("lane", "completed", completed)
    assert lane.credit() == 0


@pytest.mark.parametrize("slot", [SLOTS, (1 << 32) - 1, 3])
def test_a_freed_slot_that_cannot_be_gives_no_credit(make: Make, slot: int) -> None:
    lane = make()
    fill(lane)
    lane.shared.poke("lane", "freed", slot)  # 3 is free already
    lane.shared.poke("lane", "completed", 1)
    assert lane.credit() == SLOTS - 1


# ---- two processes ----

SLOT_BYTES = 4096


def content(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SLOT_BYTES // 8)


def slot_place(slot: int) -> slice:
    start = abi.SIZES["lane"] + slot * SLOT_BYTES
    return slice(start, start + SLOT_BYTES)


def produce(lane: Lane, count: int) -> None:
    for number in range(count):
        while not lane.credit():
            pass
        slot = lane.reserve()
        lane.announce(slot)
        lane.shared.memory[slot_place(slot)] = content(number)
        lane.ring_doorbell()


def test_another_process_finds_every_slot_filled(make: Make) -> None:
    count, rng = 5000, random.Random(2)
    lane = make(extra=SLOTS * SLOT_BYTES)
    child = processes.fork(lambda: produce(lane, count))
    number = 0
    held: list[tuple[int, int]] = []
    while number < count or held:
        slot = lane.take()
        assert slot != VIOLATION
        if slot != NONE:
            held.append((slot, number))
            number += 1
        if held and (slot == NONE or rng.random() < 0.5):
            slot, wanted = held.pop(rng.randrange(len(held)))
            assert lane.shared.memory[slot_place(slot)] == content(wanted)
            lane.give_back(slot)
    assert processes.exit_code(child) == 0
    assert lane.positions() == (count, count, count)


@pytest.mark.parametrize("seed", range(4))
def test_a_producer_killed_at_any_moment_leaves_only_filled_slots(make: Make, seed: int) -> None:
    lane, rng = make(extra=SLOTS * SLOT_BYTES), random.Random(seed)
    child = processes.fork(lambda: produce(lane, 1 << 40))
    number, last = 0, rng.randrange(50, 400)

    def take_one() -> bool:
        nonlocal number
        slot = lane.take()
        assert slot != VIOLATION
        if slot == NONE:
            return False
        assert lane.shared.memory[slot_place(slot)] == content(number)
        lane.give_back(slot)
        number += 1
        return True

    while number < last:
        take_one()
    os.kill(child, signal.SIGKILL)
    assert processes.exit_code(child) == -signal.SIGKILL
    while take_one():
        pass
    head, doorbell, completed = lane.positions()
    assert completed == doorbell == number
    assert head - doorbell in (0, 1)


def test_a_slot_that_was_announced_by_one_who_died_is_never_taken(make: Make) -> None:
    lane = make()

    def announce_and_die() -> None:
        fill(lane)
        lane.announce(lane.reserve())
        os.kill(os.getpid(), signal.SIGKILL)

    assert processes.exit_code(processes.fork(announce_and_die)) == -signal.SIGKILL
    assert [lane.take(), lane.take()] == [0, NONE]
