"""Cases of test_plane.py: each runs in a process of its own, with two planes that reach each other through the library
that LD_LIBRARY_PATH names. ``python plane_cases.py CASE``."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
from helpers.verbs_plane import (
    BOUNCE_SLOTS,
    DEVICES,
    REAL,
    RING_SLICES,
    ROUTE,
    SLOT_BYTES,
    TABLE_ENTRIES,
    Block,
    Node,
    Pair,
    connect,
    endpoint_facts,
    export,
    fence,
    lost,
    memory,
    settle,
    settle_late,
)
from helpers.verbs_stand_in import Fabric
from helpers.waiting import until

from railrelay.client.errors import Result
from railrelay.daemon import plane

CASES: Final[dict[str, Callable[[], None]]] = {}
PAGE: Final = 4096
HELD: Final = BOUNCE_SLOTS - 1  # of one connection: a slot is left for another
MESSAGES: Final = 128  # on their way from one end
A0: Final = "127.0.0.1"
B0: Final = "127.0.0.2"
OTHER_A, OTHER_B = "127.0.0.2", "127.0.0.4"  # second rails, where there are two


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def stand_in_case(function: Callable[[], None]) -> Callable[[], None]:
    """One that orders faults of the stand-in."""
    return case(function)


def pair(rails: int = 1, nbytes: int = 8 << 20, **options: object) -> tuple[Node, Node, int]:
    """(sender, receiver, remote): region 0 of each; the receiver's is handle 1."""
    a = Node(DEVICES[:rails], **options)
    b = Node(DEVICES[rails : 2 * rails], **options)
    a.region(nbytes)
    b.region(nbytes)
    export(b, 0, 1, nbytes)
    return a, b, a.open(0, 1, nbytes, of=b.regions[0])


def fill(a: Node, seed: int = 1) -> bytes:
    content = random.Random(seed).randbytes(a.regions[0].nbytes)
    a.regions[0].view[:] = content
    return content


@case
def direct_slices_land_where_they_should() -> None:
    a, b, remote = pair()
    content = fill(a)
    blocks = [(i * 65536, ((i * 37) % 128) * 65536, 65536, 0, remote) for i in range(128)]
    transfer = a.direct(blocks)
    wanted = a.wait(plane.CONNECT_WANTED)
    assert wanted[1:6] == (0, 0, 0, 0, 1), wanted
    connect(a, b)
    assert a.result(transfer) is Result.OK
    for source, destination, length, _, _ in blocks:
        assert b.regions[0].view[destination : destination + length] == content[source : source + length]
    assert a.counters()["bytes_sent"] == b.counters()["bytes_received"] == 8 << 20
    assert b.counters()["frames_received"] == 128
    a.close()
    b.close()


@case
def slots_are_scattered_in_one_frame_each() -> None:
    a, b, remote = pair()
    a.lease()
    connect(a, b)
    numbers = random.Random(3)
    expected = bytearray(8 << 20)
    places = numbers.sample(range(2048), 40 * 30)
    transfers = []
    for slot in range(40):
        parts = []
        for place in places[slot * 30 : slot * 30 + 30]:
            content = numbers.randbytes(numbers.randrange(1, PAGE))
            parts.append((content, place * PAGE, remote))
            expected[place * PAGE : place * PAGE + len(content)] = content
        transfers.append(a.relay(parts))
    assert all(a.result(transfer) is Result.OK for transfer in transfers)
    assert b.regions[0].view[:] == bytes(expected)
    assert a.counters()["frames_sent"] == b.counters()["frames_received"] == 40
    a.close()
    b.close()


def fabric() -> Fabric:
    """The stand-in's devices: rail r of the sender has ADDRESSES[r], of the receiver those that follow."""
    return Fabric(Path(os.environ["RAILRELAY_IBVERBS_DIR"]), Path(os.environ["LD_LIBRARY_PATH"].split(":")[0]))


def scattered(remote: int, count: int = 128, nbytes: int = 65536, seed: int = 5) -> list[Block]:
    places = list(range(count))
    random.Random(seed).shuffle(places)
    return [(i * nbytes, places[i] * nbytes, nbytes, 0, remote) for i in range(count)]


def check(b: Node, content: bytes, blocks: list[Block]) -> None:
    for source, destination, length, _, _ in blocks:
        assert b.regions[0].view[destination : destination + length] == content[source : source + length], destination


def close(*nodes: Node) -> None:
    for node in nodes:
        node.close()


@case
def one_run_of_many_pieces_is_cut_to_what_a_work_request_holds() -> None:
    a, b, remote = pair()
    a.lease()
    connect(a, b)
    numbers = random.Random(4)
    contents = [numbers.randbytes(numbers.randrange(1, 700)) for _ in range(500)]
    at, parts = 0, []
    for content in contents:
        parts.append((content, at, remote))
        at += len(content)
    assert a.result(a.relay(parts)) is Result.OK
    assert b.regions[0].view[:at] == b"".join(contents)
    assert a.counters()["runs"] == 1
    close(a, b)


@case
def more_runs_than_the_send_queue_holds() -> None:
    a, b, remote = pair(sq_depth=128, signal_every=32)
    a.lease()
    connect(a, b)
    numbers = random.Random(6)
    expected = bytearray(8 << 20)
    transfers = []
    places = numbers.sample(range(8192), 3 * 512)
    for slot in range(3):
        parts = []
        for place in places[slot * 512 : slot * 512 + 512]:
            content = numbers.randbytes(64)
            parts.append((content, place * 1024, remote))
            expected[place * 1024 : place * 1024 + 64] = content
        transfers.append(a.relay(parts))
    assert all(a.result(transfer) is Result.OK for transfer in transfers)
    assert b.regions[0].view[:] == bytes(expected)
    if not REAL:
        assert fabric().counts(A0)["queue_full"] == 0
    close(a, b)


@case
def thousands_of_small_frames_never_find_a_receiver_without_a_receive() -> None:
    a, b, remote = pair()
    content = fill(a)
    connect(a, b)
    blocks = [(i * 64, ((i * 7919) % 131072) * 64, 64, 0, remote) for i in range(600 if REAL else 5000)]
    transfer = a.direct(blocks)
    assert a.result(transfer, limit_s=300) is Result.OK
    check(b, content, blocks)
    for address in () if REAL else (A0, B0):
        counts = fabric().counts(address)
        assert counts["rnr"] == counts["overruns"] == counts["queue_full"] == 0
    close(a, b)


@stand_in_case
def a_failed_queue_pair_loses_nothing() -> None:
    a, b, remote = pair()
    content, verbs = fill(a), fabric()
    verbs.limit_rate(A0, 30 << 20)
    for epoch, address in enumerate((A0, B0, A0, B0), 1):
        first = connect(a, b, epoch=2 * epoch)
        b.regions[0].view[:] = bytes(8 << 20)
        blocks = scattered(remote, seed=epoch)
        frames = b.counters()["frames_received"]
        transfer = a.direct(blocks)
        b.counted("frames_received", frames + 1)
        assert verbs.fail_queue_pairs(address)
        lost(a, first)
        placed = fence(a, b, first)
        second = connect(a, b, epoch=2 * epoch + 1)
        assert a.result(transfer) is Result.OK
        assert 0 <= placed < 128
        check(b, content, blocks)
        a.plane.close_sender(0, second.sender)
        lost(a, second)
        fence(a, b, second)
    counts = verbs.counts(A0)
    assert counts["rnr"] == counts["overruns"] == 0
    close(a, b)


@stand_in_case
def bytes_held_back_on_the_way_never_land_after_the_fence() -> None:
    a, b, remote = pair()
    content, verbs = fill(a), fabric()
    first = connect(a, b, timeout=18)
    assert a.result(a.direct([(0, 0, 4096, 0, remote)])) is Result.OK
    with verbs.held(B0):
        transfer = a.direct(scattered(remote))
        a.counted("frames_sent", 129)
        assert a.plane.cancel_transfer(0, *transfer, int(Result.CANCELLED))
        a.plane.close_sender(0, first.sender)
        a.wait(plane.SENDER_LOST)
        assert not a.settled(transfer)
        placed = fence(a, b, first)
        assert placed == 1
        assert a.result(transfer) is Result.CANCELLED
        before = b.regions[0].view[:]
        fill(a, 2)
    time.sleep(0.3)
    assert b.regions[0].view[:] == before
    connect(a, b, epoch=2)
    content = a.regions[0].view[:]
    assert a.result(a.direct(scattered(remote))) is Result.OK
    check(b, content, scattered(remote))
    close(a, b)


@case
def a_wrong_key_ends_the_connection_and_nothing_else() -> None:
    a, b, remote = pair()
    content = fill(a)
    wrong = a.open(0, 2, 8 << 20, of=b.regions[0])
    a.plane.add_remote(
        0, wrong, 0, 2, 8 << 20, 0, 0, 0, 0, iova=b.regions[0].base, rkeys=[b.regions[0].rkeys[0] ^ 0x55]
    )
    first = connect(a, b)
    bad = a.direct([(0, 0, 4096, 0, wrong)])
    error = a.wait(plane.SENDER_LOST)[3]
    assert error == errno.EACCES, os.strerror(error)
    good = a.direct(scattered(remote))
    assert a.plane.cancel_transfer(0, *bad, int(Result.CANCELLED))
    assert fence(a, b, first) == 0
    assert a.result(bad) is Result.CANCELLED
    connect(a, b, epoch=2)
    assert a.result(good) is Result.OK
    check(b, content, scattered(remote))
    close(a, b)


@stand_in_case
def a_peer_that_does_not_answer_is_lost_in_time() -> None:
    a, b, remote = pair()
    fill(a)
    first = connect(a, b)
    assert a.result(a.direct([(0, 0, 4096, 0, remote)])) is Result.OK
    fabric().drop_connections(B0)
    transfer = a.direct(scattered(remote))
    assert lost(a, first)[3] == errno.ETIMEDOUT
    fence(a, b, first)
    connect(a, b, epoch=2)
    assert a.result(transfer) is Result.OK
    close(a, b)


@stand_in_case
def a_region_that_is_withdrawn_is_drained_and_then_refused() -> None:
    a, b, remote = pair()
    fill(a)
    other = a.open(0, 9, 8 << 20, of=b.regions[0])
    connect(a, b, timeout=18)
    verbs = fabric()
    verbs.hold(B0)
    transfer = a.direct([(0, 0, 65536, 0, remote)])
    a.counted("frames_sent", 1)
    assert a.command(lambda cookie: a.plane.drain_handle(0, 9, cookie)) == [0]
    a.plane.remove_remote(0, remote)
    cookie = next(a.cookies)
    a.plane.drain_handle(0, 1, cookie)
    late = a.direct([(0, 0, 65536, 0, other), (0, 0, 65536, 0, remote)])
    a.cycle()
    assert not [event for event in a.events if event[:3:2] == (plane.COMMAND_DONE, cookie)]
    assert not a.settled(transfer)
    verbs.release(B0)
    a.wait(plane.COMMAND_DONE, where=lambda event: event[2] == cookie)
    assert a.result(transfer) is Result.OK
    assert a.result(late) is Result.REGION_GONE
    close(a, b)


@case
def a_place_in_the_table_that_names_another_region_now_is_not_taken_for_the_old_one() -> None:
    a, b, remote = pair()
    fill(a)
    transfer = a.direct([(0, 0, 65536, 0, remote)])  # waits for a connection
    a.wait(plane.CONNECT_WANTED)
    a.plane.remove_remote(0, remote)
    a.plane.add_remote(0, remote, 0, 5, 8 << 20, 0, 0, 0, 0, iova=b.regions[0].base, rkeys=list(b.regions[0].rkeys))
    connect(a, b)
    assert a.result(transfer) is Result.REGION_GONE
    assert not any(b.regions[0].view[:65536])
    close(a, b)


@case
def what_a_peer_has_aborted_is_not_posted() -> None:
    a, b, remote = pair()
    content = fill(a)
    connect(a, b)
    assert a.result(a.direct([(0, 0, 4096, 0, remote)], tag=77)) is Result.OK
    a.plane.add_peer_tombstone(0, 0, 77)
    a.plane.add_peer_tombstone(0, 1, 78)
    assert a.result(a.direct([(0, 8192, 4096, 0, remote)], tag=77)) is Result.ABORTED
    assert not any(b.regions[0].view[8192:12288])
    assert a.result(a.direct([(0, 8192, 4096, 0, remote)], tag=78)) is Result.OK
    assert b.regions[0].view[8192:12288] == content[:4096]
    a.command(lambda cookie: a.plane.drop_peer(0, int(Result.PEER_LOST), cookie))
    connect(a, b, epoch=2)
    assert a.result(a.direct([(0, 0, 4096, 0, remote)], tag=77)) is Result.OK
    close(a, b)


@stand_in_case
def a_rail_is_served_through_the_device_of_another() -> None:
    a, b, remote = pair(rails=2)
    a.lease()
    content, verbs = fill(a), fabric()
    verbs.port_down(A0)
    event = a.wait(plane.PORT_CHANGED)
    assert event[1:3] == (0, 0), event
    other = connect(a, b, through=1, remote_through=1)
    assert a.result(a.direct(scattered(remote))) is Result.OK
    check(b, content, scattered(remote))
    assert a.result(a.relay([(b"x" * 5000, 12345, remote)])) is Result.OK
    assert b.regions[0].view[12345:17345] == b"x" * 5000
    probe, facts = endpoint_facts(a, 0, 0, sending=True)
    answer, answer_facts = endpoint_facts(b, 0, 0, sending=False)
    verbs.port_up(A0)
    event = a.wait(plane.PORT_CHANGED)
    assert event[1:3] == (0, 1), event
    b.plane.connect_endpoint(answer, **facts, **ROUTE)
    a.plane.connect_endpoint(probe, **answer_facts, **ROUTE)
    assert a.command(lambda cookie: a.plane.probe_endpoint(probe, cookie)) == [0]
    a.plane.drop_endpoint(probe)
    b.plane.drop_endpoint(answer)
    transfer = a.direct(scattered(remote, seed=9))
    a.plane.close_sender(0, other.sender)
    a.wait(plane.SENDER_LOST)
    fence(a, b, other)
    connect(a, b, epoch=2)
    assert a.result(transfer) is Result.OK
    check(b, content, scattered(remote, seed=9))
    close(a, b)


@stand_in_case
def a_probe_of_a_dead_route_fails() -> None:
    a, b, _ = pair()
    probe, facts = endpoint_facts(a, 0, 0, sending=True)
    answer, answer_facts = endpoint_facts(b, 0, 0, sending=False)
    b.plane.connect_endpoint(answer, **facts, **ROUTE)
    a.plane.connect_endpoint(probe, **answer_facts, **ROUTE)
    fabric().hold(B0)
    [status] = a.command(lambda cookie: a.plane.probe_endpoint(probe, cookie))
    assert status == 12, status  # IBV_WC_RETRY_EXC_ERR
    a.plane.drop_endpoint(probe)
    a.plane.drop_endpoint(answer)
    b.plane.drop_endpoint(answer)
    close(a, b)


@stand_in_case
def a_client_that_leaves_does_not_wait_for_answers_but_for_its_memory() -> None:
    a, b, remote = pair()
    fill(a)
    connect(a, b, timeout=18)
    verbs = fabric()
    verbs.hold(B0)
    a.direct(scattered(remote, count=8))
    a.counted("frames_sent", 8)
    a.plane.detach_client(0)
    a.cycle()
    assert not [event for event in a.events if event[0] == plane.CLIENT_DETACHED]
    verbs.release(B0)
    a.wait(plane.CLIENT_DETACHED)
    close(a, b)


@stand_in_case
def a_peer_that_is_dropped_ends_what_is_posted() -> None:
    a, b, remote = pair()
    fill(a)
    connect(a, b, timeout=18)
    verbs = fabric()
    verbs.hold(B0)
    transfer = a.direct(scattered(remote))
    a.counted("frames_sent", 128)
    a.command(lambda cookie: a.plane.drop_peer(0, int(Result.PEER_LOST), cookie))
    assert a.result(transfer) is Result.PEER_LOST
    close(a, b)


@stand_in_case
def express_goes_before_bulk_on_one_connection() -> None:
    a, b, remote = pair(nbytes=64 << 20)
    fabric().limit_rate(A0, 60 << 20)
    pair_ = connect(a, b)
    bulk = a.direct([(i << 20, i << 20, 1 << 20, 0, remote) for i in range(60)])
    a.counted("frames_sent", 1)
    express = a.direct([(0, 0, 4096, 0, remote)], express=True)
    assert a.result(express) is Result.OK
    assert not a.settled(bulk)
    assert a.result(bulk) is Result.OK
    assert a.command(lambda cookie: a.plane.holders(0, *bulk, cookie)) == [0]
    assert pair_.sender
    close(a, b)


def private_pair(nbytes: int = 8 << 20) -> tuple[Node, Node, int, int]:
    """As pair(), and a remote of private memory: region 1 of the receiver, handle 2."""
    a, b, remote = pair(nbytes=nbytes)
    b.private_region(nbytes)
    b.bounce()
    export(b, 1, 2, nbytes)
    return a, b, remote, a.open(0, 2, nbytes, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES)


def emptied(b: Node, a: Node, transfer: tuple[int, int]) -> Result:
    deadline = time.monotonic() + 30
    while not a.settled(transfer) and time.monotonic() < deadline:
        if not b.empty():
            time.sleep(0.001)
    return a.result(transfer)


def arrives(b: Node, frames: int) -> None:
    """In bounce memory that nobody empties."""
    deadline = time.monotonic() + 30
    while b.filled() < frames:
        assert time.monotonic() < deadline, b.counters()
        time.sleep(0.001)


@case
def private_memory_is_reached_through_bounce_memory() -> None:
    a, b, _, remote = private_pair()
    a.lease()
    content = fill(a)
    connect(a, b)
    blocks = scattered(remote)
    assert emptied(b, a, a.direct(blocks)) is Result.OK
    for source, destination, length, _, _ in blocks:
        assert b.regions[1].view[destination : destination + length] == content[source : source + length]
    numbers = random.Random(8)
    for runs in (1, 11, 12, 512):
        places = numbers.sample(range(2048), runs)
        parts = [(numbers.randbytes(numbers.randrange(1, 1800)), place * 4096, remote) for place in places]
        assert emptied(b, a, a.relay(parts)) is Result.OK
        for part, place, _ in parts:
            assert b.regions[1].view[place : place + len(part)] == part
    assert b.counters()["bounced_bytes"] == b.counters()["bytes_received"]
    close(a, b)


@case
def an_owner_that_stops_holds_up_nobody_else() -> None:
    a, b, remote, private = private_pair()
    content = fill(a)
    connect(a, b)
    stuck = a.direct(scattered(private, count=64))
    arrives(b, HELD)
    blocks = scattered(remote)
    for seed in range(6):  # more frames than the window has
        blocks = scattered(remote, seed=seed)
        assert a.result(a.direct(blocks)) is Result.OK
        check(b, content, blocks)
    assert not a.settled(stuck)
    assert emptied(b, a, stuck) is Result.OK
    close(a, b)


@case
def what_waits_for_bounce_memory_can_be_cancelled_and_aborted() -> None:
    a, b, _, private = private_pair()
    fill(a)
    connect(a, b)
    first = a.direct(scattered(private, count=16), tag=8)
    arrives(b, HELD)
    assert a.plane.cancel_transfer(0, *first, int(Result.CANCELLED))
    a.cycle()
    assert emptied(b, a, first) is Result.CANCELLED
    second = a.direct(scattered(private, count=16), tag=9)
    arrives(b, HELD)
    b.command(lambda cookie: b.plane.add_tombstone(0, 9, cookie), answers=0)
    assert emptied(b, a, second) is Result.ABORTED
    third = a.direct(scattered(private, count=16), tag=10)
    assert emptied(b, a, third) is Result.OK
    b.command(lambda cookie: b.plane.remove_export(2, cookie))
    assert emptied(b, a, a.direct(scattered(private, count=4))) is Result.REGION_GONE
    close(a, b)


@stand_in_case
def grants_that_wait_for_the_send_queue_are_not_sent_for_another_client() -> None:
    a, b, remote, private = private_pair()
    fill(a)
    connect(a, b, timeout=18)
    verbs = fabric()
    verbs.hold(A0, "to")
    for number in range(MESSAGES):  # each is answered by a message of its own, and none of these arrives
        a.direct(scattered(remote, count=1))
        while b.counters()["frames_received"] <= number:
            time.sleep(0.001)
        b.cycle()
    stuck = a.direct(scattered(private, count=BOUNCE_SLOTS))
    time.sleep(0.1)
    b.plane.remove_export(1, next(b.cookies))
    b.plane.remove_export(2, next(b.cookies))
    b.another_client()
    b.private_region(8 << 20)
    b.bounce()
    export(b, 0, 3, 8 << 20)
    third = a.open(0, 3, 8 << 20, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES)
    verbs.release(A0)
    assert a.result(stuck) is Result.REGION_GONE
    assert emptied(b, a, a.direct(scattered(third, count=16))) is Result.OK
    assert not [event for event in a.events if event[0] == plane.SENDER_LOST]
    close(a, b)


def landed(b: Node, content: bytes, blocks: list[Block]) -> bool:
    """In private memory."""
    return all(
        b.regions[1].view[destination : destination + length] == content[source : source + length]
        for source, destination, length, _, _ in blocks
    )


@stand_in_case
def a_fence_does_not_wait_for_an_owner_that_has_stopped() -> None:
    a, b, remote, private = private_pair()
    content, blocks = fill(a), scattered(remote)
    first = connect(a, b)
    waiting = a.direct(scattered(private, count=40))
    arrives(b, 1)
    assert b.empty(most=1) == 1
    arrives(b, HELD)
    assert fabric().fail_queue_pairs(A0)
    lost(a, first)
    assert fence(a, b, first) == HELD + 1
    assert list(b.fenced[first.receiver].values()).count(Result.UNSETTLED) == HELD
    connect(a, b, epoch=2)
    assert a.result(a.direct(blocks)) is Result.OK  # while the owner does nothing
    check(b, content, blocks)
    assert a.command(lambda cookie: a.plane.holders(0, *waiting, cookie)) == [0]  # nothing that a fence would settle
    assert a.command(lambda cookie: a.plane.drain_handle(0, 2, cookie)) == [0]
    resent = a.counters()["slices_resent"]
    while Result.UNSETTLED in b.fenced[first.receiver].values():
        b.empty()
        settle_late(a, b, first)
    assert emptied(b, a, waiting) is Result.OK
    assert landed(b, content, scattered(private, count=40))
    assert a.counters()["slices_resent"] == resent
    close(a, b)


def unsettled() -> tuple[Node, Node, Pair, tuple[int, int]]:
    """A transfer whose frames all wait for an owner that has stopped, over a connection that is fenced."""
    a, b, _, private = private_pair()
    fill(a)
    first = connect(a, b)
    waiting = a.direct(scattered(private, count=HELD))
    arrives(b, HELD)
    a.plane.close_sender(0, first.sender)
    lost(a, first)
    fence(a, b, first)
    assert not a.settled(waiting)
    return a, b, first, waiting


@stand_in_case
def a_client_that_leaves_does_not_wait_for_a_stopped_owner() -> None:
    a, b, _, _ = unsettled()
    a.plane.detach_client(0)
    a.wait(plane.CLIENT_DETACHED)
    close(a, b)


@stand_in_case
def what_waits_for_a_stopped_owner_ends_with_its_peer() -> None:
    a, b, _, waiting = unsettled()
    a.command(lambda cookie: a.plane.drop_peer(0, int(Result.PEER_LOST), cookie))
    assert a.result(waiting) is Result.PEER_LOST
    close(a, b)


@stand_in_case
def what_was_cancelled_settles_when_its_stopped_owner_ends() -> None:
    a, b, first, waiting = unsettled()
    assert a.plane.cancel_transfer(0, *waiting, int(Result.CANCELLED))
    while len(a.tickets[0]) < RING_SLICES:  # they go back, although bytes may still land
        a.take_tickets(0)
    assert not a.settled(waiting)
    b.plane.detach_client(0)
    b.wait(plane.CLIENT_DETACHED)
    while Result.UNSETTLED in b.fenced[first.receiver].values():
        settle_late(a, b, first)
    assert a.result(waiting) is Result.CANCELLED
    close(a, b)


@stand_in_case
def owners_that_have_stopped_leave_wants_for_others() -> None:
    a, b, remote, private = private_pair()
    content = fill(a)
    a.lease()
    connect(a, b)
    stuck = [a.direct(scattered(private, count=RING_SLICES, nbytes=16384))]
    arrives(b, HELD)
    stuck += [a.relay([(content[:4096], 4 << 20, private)]) for _ in range(HELD)]  # a window of wants
    gone = a.open(0, 3, 8 << 20, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES, owner=1)
    for number in range(3):
        assert a.result(a.relay([(b"x" * 4096, 0, gone)])) is Result.REGION_GONE  # there is no client 1; it was asked
        part = content[number * 4096 :][:4096]
        assert a.result(a.relay([(part, number * 4096, remote)])) is Result.OK
    assert not any(map(a.settled, stuck))
    assert a.counters()["grant_waits"] > RING_SLICES
    for transfer in stuck:
        assert emptied(b, a, transfer) is Result.OK
    assert landed(b, content, scattered(private, count=RING_SLICES, nbytes=16384))
    close(a, b)


@stand_in_case
def what_waits_until_it_may_ask_can_be_cancelled_and_outlives_its_connection() -> None:
    a, b, _, private = private_pair()
    content = fill(a)
    first = connect(a, b)
    cancelled = a.direct(scattered(private, count=64))
    kept = a.direct(scattered(private, count=64, seed=6))
    arrives(b, HELD)
    assert a.plane.cancel_transfer(0, *cancelled, int(Result.CANCELLED))
    while len(a.tickets[0]) < RING_SLICES - 64 - HELD:
        a.take_tickets(0)
        a.pump(0.001)
    a.plane.close_sender(0, first.sender)
    lost(a, first)
    fence(a, b, first)
    connect(a, b, epoch=2)
    while Result.UNSETTLED in b.fenced[first.receiver].values():
        b.empty()
        settle_late(a, b, first)
    assert emptied(b, a, kept) is Result.OK
    assert a.result(cancelled) is Result.CANCELLED
    assert landed(b, content, scattered(private, count=64, seed=6))
    close(a, b)


@stand_in_case
def a_grant_that_comes_back_late_is_not_another_clients() -> None:
    a, b, _, private = private_pair()
    fill(a)
    connect(a, b, timeout=18)
    verbs = fabric()
    stuck = a.direct(scattered(private, count=2 * BOUNCE_SLOTS))
    arrives(b, HELD)
    verbs.hold(A0, "to")  # of what is granted now the sender hears when its owner has gone
    assert b.empty() == HELD
    granted = b.counters()["frames_received"]
    b.plane.remove_export(2, next(b.cookies))
    b.another_client()
    b.private_region(8 << 20)
    b.bounce()
    export(b, 1 - 1, 3, 8 << 20)
    third = a.open(0, 3, 8 << 20, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES)
    assert a.plane.cancel_transfer(0, *stuck, int(Result.CANCELLED))
    until(lambda: a.counters()["slices_failed"] == 2 * BOUNCE_SLOTS - HELD, "those that wait have been given up")
    other = a.direct(scattered(third, count=BOUNCE_SLOTS))
    verbs.release(A0)
    assert emptied(b, a, other) is Result.OK
    assert a.result(stuck) is Result.CANCELLED
    assert b.counters()["frames_received"] >= granted
    assert not [event for event in a.events if event[0] == plane.SENDER_LOST]
    close(a, b)


@stand_in_case
def frames_are_answered_only_after_a_read_behind_them() -> None:
    a, b, remote = pair(flush="always")
    content, verbs = fill(a), fabric()
    connected = connect(a, b)
    for seed in range(3):
        blocks = scattered(remote, count=127, seed=seed)
        assert a.result(a.direct(blocks)) is Result.OK
        check(b, content, blocks)
    [loop] = [one for one in verbs.queue_pairs(B0) if one.done and not one.receives - 768]
    assert 3 <= loop.done <= 3 * 127
    verbs.fail_queue_pairs(B0, loop.number)
    event = b.wait(plane.RECEIVER_LOST)
    assert event[2:4] == (connected.receiver, errno.ENOTCONN), event
    a.plane.close_sender(0, connected.sender)
    a.wait(plane.SENDER_LOST)
    assert fence(a, b, connected) == 3 * 127
    connect(a, b, epoch=2)
    assert a.result(a.direct(blocks)) is Result.OK
    close(a, b)


@stand_in_case
def a_fence_waits_for_the_read_too() -> None:
    a, b, remote = pair(flush="always")
    content, verbs = fill(a), fabric()
    b.plane.open_flush(0, 0)
    connected = connect(a, b)
    verbs.limit_rate(A0, 20 << 20)
    transfer = a.direct(scattered(remote))
    b.counted("frames_received", 1)
    a.plane.close_sender(0, connected.sender)
    a.wait(plane.SENDER_LOST)
    assert 0 < fence(a, b, connected) < 128
    connect(a, b, epoch=2)
    assert a.result(transfer) is Result.OK
    check(b, content, scattered(remote))
    close(a, b)


def targets(node: Node, *found: tuple[int, int]) -> None:
    node.command(lambda cookie: node.plane.set_flush_targets(0, 0, list(found), cookie))


@stand_in_case
def what_is_read_changes_once_nothing_reads_what_was_before() -> None:
    a, b, remote = pair()
    content, verbs = fill(a), fabric()
    keys = [b.plane.register_memory(0, b.regions[0].base + at, 64, flush=True) for at in (0, 8192)]
    connected = connect(a, b)
    blocks = scattered(remote, count=8)
    assert a.result(a.direct(blocks)) is Result.OK
    before = verbs.counts(B0)["reads"]
    assert before == 0
    b.plane.open_flush(0, 0)
    targets(b, (b.regions[0].base, keys[0][2]))
    with verbs.reads_held(B0):
        transfer = a.direct(blocks)
        b.counted("frames_received", 16)
        b.plane.set_flush_targets(0, 0, [(b.regions[0].base + 8192, keys[1][2])], 900)
        b.plane.set_flush_targets(0, 0, [], 901)
        b.cycle()
        assert not [event for event in b.events if event[0] == plane.COMMAND_DONE]
    assert {b.wait(plane.COMMAND_DONE)[2] for _ in range(2)} == {900, 901}
    for key, *_ in keys:
        b.plane.deregister_memory(key)
    assert a.result(transfer) is Result.OK
    after = verbs.counts(B0)["reads"]
    assert after > 0
    assert a.result(a.direct(blocks)) is Result.OK
    assert verbs.counts(B0)["reads"] == after
    check(b, content, blocks)

    targets(b, (b.regions[0].base, 0xBAD))  # nothing that was written there could be made sure of
    lost = a.direct(blocks)
    event = b.wait(plane.RECEIVER_LOST)
    assert event[2:4] == (connected.receiver, errno.ENOTCONN), event
    targets(b)
    a.plane.close_sender(0, connected.sender)
    a.wait(plane.SENDER_LOST)
    fence(a, b, connected)
    connect(a, b, epoch=2)
    assert a.result(lost) is Result.OK
    assert verbs.counts(B0)["reads"] == after
    close(a, b)


@stand_in_case
def queue_pairs_are_killed_under_traffic_and_nothing_is_lost_wrong_or_late() -> None:
    """Each transfer has a place of its own at the receiver, which is overwritten once it is done: late bytes show."""
    a, b, remote = pair(nbytes=32 << 20)
    b.private_region(32 << 20)
    b.bounce()
    export(b, 1, 2, 32 << 20)
    private = a.open(0, 2, 32 << 20, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES)
    a.lease()
    content, verbs, numbers = fill(a), fabric(), random.Random(11)
    verbs.limit_rate(A0, 200 << 20)
    connections: dict[int, Pair] = {}
    settling: dict[int, Pair] = {}
    epoch = kills = 0
    live: list[tuple[tuple[int, int], int, int, bytes, int]] = []
    places = list(range(0, 32 << 20, 256 << 10))
    numbers.shuffle(places)
    done: list[tuple[int, int, int]] = []
    began = time.monotonic()

    def serve() -> None:
        nonlocal epoch
        a.pump(0.002)
        b.pump()
        b.empty()
        for event in a.events:
            if event[0] == plane.CONNECT_WANTED:
                epoch += 1
                made = connect(a, b, epoch=epoch)
                connections[made.sender] = made
            elif event[0] == plane.SENDER_LOST:
                ended = connections.pop(event[2])
                settling[ended.receiver] = ended
                b.plane.fence_receiver(0, ended.receiver)
            assert event[0] != plane.VIOLATION, event
        a.events.clear()
        for event in b.events:
            if event[0] == plane.RECEIVER_LOST:  # whoever waits for a grant sends nothing that could fail
                for made in connections.values():
                    if made.receiver == event[2]:
                        a.plane.close_sender(0, made.sender)
            if event[0] == plane.RECEIVER_FENCED:
                b.keep_fence(event)
            if event[0] in (plane.RECEIVER_FENCED, plane.FRAME_SETTLED):
                b.note_late(event)
                settle(a, b, settling[event[2]], 0)
        b.events.clear()

    while kills < 50 or live:
        if kills < 50 and places and len(live) < 4:
            place, kind = places.pop(), numbers.randrange(3)
            region = 1 if kind == 2 else 0
            if kind == 1:
                part = numbers.randbytes(256 << 10)
                live.append(
                    (
                        a.relay([(part[i : i + 8192], place + i, remote) for i in range(0, 256 << 10, 8192)]),
                        place,
                        0,
                        part,
                        0,
                    )
                )
            else:
                source = numbers.randrange(31 << 20)
                blocks = [
                    (source + i, place + i, 16384, 0, private if kind == 2 else remote)
                    for i in range(0, 256 << 10, 16384)
                ]
                expected = content[source : source + (256 << 10)]
                live.append((a.direct(blocks, express=numbers.random() < 0.3), place, region, expected, 0))
        if kills < 50 and numbers.random() < 0.2 and connections:
            kills += 1
            what = numbers.randrange(3)
            if what == 0:
                verbs.fail_queue_pairs(numbers.choice((A0, B0)))
            elif what == 1:
                verbs.drop_connections(numbers.choice((A0, B0)))
            else:
                a.plane.close_sender(0, next(iter(connections)))
        serve()
        for entry in list(live):
            transfer, place, region, expected, _ = entry
            if not a.settled(transfer):
                continue
            assert a.result(transfer) is Result.OK
            assert b.regions[region].view[place : place + (256 << 10)] == expected, place
            mark = numbers.randrange(256)
            b.regions[region].view[place : place + (256 << 10)] = bytes([mark]) * (256 << 10)
            done.append((place, region, mark))
            live.remove(entry)
        if not places and not live and kills < 50:
            places = [place for place, _, _ in done]
            for place, region, mark in done:
                assert b.regions[region].view[place : place + (256 << 10)] == bytes([mark]) * (256 << 10), place
            done.clear()
        assert time.monotonic() - began < 100, (kills, [entry[:3] for entry in live], a.counters())
    verbs.limit_rate(A0, 0)
    time.sleep(0.3)
    for place, region, mark in done:
        assert b.regions[region].view[place : place + (256 << 10)] == bytes([mark]) * (256 << 10), place
    for address in (A0, B0):
        counts = verbs.counts(address)
        assert counts["rnr"] == counts["overruns"] == counts["queue_full"] == 0, counts
    assert a.counters()["slices_resent"] > 0
    close(a, b)


@case
def what_comes_before_the_receiver_is_added_waits_for_it() -> None:
    a, b, remote = pair()
    content = fill(a)
    ours, our_facts = endpoint_facts(a, 0, 0, sending=True)
    theirs, their_facts = endpoint_facts(b, 0, 0, sending=False)
    b.plane.connect_endpoint(theirs, **our_facts, **ROUTE)
    a.plane.connect_endpoint(ours, **their_facts, **ROUTE)
    blocks = scattered(remote, count=32)
    transfer = a.direct(blocks)
    a.plane.add_sender(0, 2, 0, 0, False, 1, ours)
    b.plane.add_receiver(0, 3, 0, theirs)
    assert a.result(transfer) is Result.OK
    check(b, content, blocks)
    assert a.plane.queue_pairs(0) == b.plane.queue_pairs(0) == 1
    close(a, b)


@case
def ends_that_cannot_be_taken_are_told_of() -> None:
    a, b, _ = pair()
    endpoint, _, _ = b.plane.new_endpoint(0, 0, sending=False)
    b.plane.add_receiver(0, 3, 0, endpoint)  # not connected
    assert b.wait(plane.RECEIVER_FENCED)[2:4] == (3, 0)
    assert b.plane.fence_acks(3) == b""
    a.plane.add_sender(0, 2, 0, 0, False, 1, 12345)
    assert a.wait(plane.SENDER_LOST)[2:4] == (2, errno.ENOENT)
    a.plane.drop_endpoint(12345)
    b.plane.drop_endpoint(endpoint)
    deadline = time.monotonic() + 10
    while b.plane.queue_pairs(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    close(a, b)


@stand_in_case
def nothing_stays_on_a_device_that_is_closed() -> None:
    a, b, remote = pair()
    fill(a)
    a.lease()
    b.bounce()
    connect(a, b)
    assert a.result(a.direct(scattered(remote))) is Result.OK
    verbs = fabric()
    before = verbs.counts(A0)
    assert before["queue_pairs"] == 1, before
    key = a.plane.register_memory(0, a.regions[0].base, 4096)[0]
    assert verbs.counts(A0)["memory_regions"] == before["memory_regions"] + 1
    a.plane.deregister_memory(key)
    assert verbs.counts(A0)["memory_regions"] == before["memory_regions"]
    a.close()
    counts = verbs.counts(A0)
    assert counts["queue_pairs"] == counts["completion_queues"] == counts["channels"] == 0, counts
    del a.plane
    gc.collect()
    assert verbs.counts(A0) == {}
    b.close()


@stand_in_case
def a_rail_goes_on_while_a_completion_queue_is_made_for_it() -> None:
    a, b, remote = pair(rails=2)
    content, verbs = fill(a), fabric()
    ours, our_facts = endpoint_facts(a, 0, 0, sending=True)
    theirs, their_facts = endpoint_facts(b, 0, 0, sending=False)
    b.plane.connect_endpoint(theirs, **our_facts, **ROUTE)
    b.plane.add_receiver(0, 3, 0, theirs)
    a.plane.connect_endpoint(ours, **their_facts, **ROUTE)
    verbs.slow_down(OTHER_A, 3000)
    with ThreadPoolExecutor(1) as worker:
        making = worker.submit(a.plane.new_endpoint, 0, 1, sending=True)  # the first of the rail on that device
        while not making.running():
            time.sleep(0.001)
        time.sleep(0.1)
        a.plane.add_sender(0, 2, 0, 0, False, 1, ours)
        blocks = scattered(remote)
        assert a.result(a.direct(blocks)) is Result.OK
        assert not making.done()
        verbs.slow_down(OTHER_A, 0)
        a.plane.drop_endpoint(making.result()[0])
    check(b, content, blocks)
    close(a, b)


@stand_in_case
def a_rail_goes_on_while_a_queue_pair_of_a_device_that_is_gone_is_destroyed() -> None:
    a, b, remote = pair(rails=2)
    export(b, 0, 2, 8 << 20)
    content, verbs = fill(a), fabric()
    first = connect(a, b)
    second = connect(a, b, through=1, remote_rail=1)
    other = a.open(0, 2, 8 << 20, rail=1, of=b.regions[0])
    assert a.result(a.direct([(0, 0, 4096, 0, remote)])) is Result.OK
    assert a.result(a.direct([(0, 0, 4096, 0, other)], remote_rail=1)) is Result.OK
    verbs.fail_error_state(A0)
    verbs.slow_down(A0, 3000)
    a.plane.close_sender(0, first.sender)
    blocks = scattered(other)
    assert a.result(a.direct(blocks, remote_rail=1)) is Result.OK
    a.pump()
    assert not [event for event in a.events if event[0] == plane.SENDER_LOST]
    check(b, content, blocks)
    lost(a, first)
    verbs.clear()
    assert fence(a, b, first) == 1
    connect(a, b, epoch=2)
    assert a.result(a.direct([(0, 0, 4096, 0, remote)])) is Result.OK
    assert second.sender
    close(a, b)


@stand_in_case
def a_probe_that_is_dropped_when_its_queue_pair_fails_is_on_no_list() -> None:
    """What is freed is overwritten (MALLOC_PERTURB_, as the test sets it). A rail that has much to do finds both
    commands, and enough after them, at once."""
    a, b, remote = pair(rails=2)
    fill(a)
    verbs, probes = fabric(), []
    for number in range(32):
        ours, theirs = ends(a, b)
        b.plane.add_receiver(0, 2 * number + 1, 0, theirs)
        a.plane.add_sender(0, 2 * number + 2, number // 16, number % 16, False, 1, ours)
    with verbs.held(OTHER_B):
        for _ in range(20):
            probe, answer = ends(a, b, through=1, timeout=20)
            b.plane.drop_endpoint(answer)
            a.plane.probe_endpoint(probe, next(a.cookies))
            probes.append(probe)
        a.cycle()
        look_through_windows(a, 20000)
        assert verbs.fail_queue_pairs(OTHER_A) == len(probes)
        time.sleep(0.02)  # rail 1 tells rail 0
        for probe in probes:
            a.plane.drop_endpoint(probe)
        look_through_windows(a, 20000)
        a.cycle()
    assert a.result(a.direct([(0, 0, 4096, 0, remote)])) is Result.OK
    close(a, b)


def ends(a: Node, b: Node, *, through: int = 0, timeout: int = 17) -> tuple[int, int]:
    """Endpoints of rail 0 of both, connected."""
    ours, our_facts = endpoint_facts(a, 0, through, sending=True)
    theirs, their_facts = endpoint_facts(b, 0, through, sending=False)
    b.plane.connect_endpoint(theirs, **our_facts, **{**ROUTE, "timeout": timeout})
    a.plane.connect_endpoint(ours, **their_facts, **{**ROUTE, "timeout": timeout})
    return ours, theirs


def look_through_windows(node: Node, times: int) -> None:
    """A microsecond a connection, and no answer."""
    for _ in range(times):
        node.plane.holders(0, 0, 0, 0)


@case
def a_slice_of_which_one_piece_has_no_key_fails_alone() -> None:
    a, b, remote = pair()
    content = fill(a)
    fresh = memory(65536)
    a.plane.add_region(0, 1, fresh.fd, 0, fresh.nbytes)  # registered, but its keys are not known yet
    a.regions.append(fresh)
    first = connect(a, b)
    bad = a.table([(0, 0, 4096, 0, remote), (0, 4096, 4096, 1, remote)])
    assert a.result(bad) is Result.BAD_REGION
    assert a.result(a.table([(0, 0, 4096, 0, remote), (8192, 4096, 4096, 0, remote)])) is Result.OK
    assert b.regions[0].view[:8192] == content[:4096] + content[8192:12288]
    a.pump()
    assert not [event for event in a.events if event[0] == plane.SENDER_LOST]
    assert first.sender
    close(a, b)


@stand_in_case
def queue_pairs_that_do_not_fit_are_refused() -> None:
    os.environ["RAILRELAY_IBVERBS_LIMITS"] = "max_cqe=8192,max_qp=40"
    a = Node(DEVICES[:1])
    made, text = [], ""
    for _ in range(50):
        try:
            made.append(a.plane.new_endpoint(0, 0, sending=True)[0])
        except OSError as failure:
            text = failure.strerror or ""
            break
    assert "queue pair" in text or "completion" in text, text
    assert len(made) > 8
    for endpoint in made:
        a.plane.drop_endpoint(endpoint)
    deadline = time.monotonic() + 10
    while a.plane.queue_pairs(0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    again: list[int] = []
    while len(again) < len(made):  # their room comes back
        assert time.monotonic() < deadline
        with contextlib.suppress(OSError):
            again.append(a.plane.new_endpoint(0, 0, sending=True)[0])
    close(a)


@stand_in_case
def what_is_wrong_with_a_rail_is_said() -> None:
    for device, options, said in (
        ("none0", {}, "not among the 4 RDMA devices"),
        ("stub0", {"port": 2}, "port 2 of 1"),
        ("stub0", {"gid_index": 99}, "GID index 99"),
        ("stub0", {"sq_depth": 64}, "sq_depth 64"),
    ):
        with pytest.raises((OSError, ValueError), match=said):
            Node([device], **options)
    a = Node(["stub0"])
    verbs = fabric()
    verbs.fail_registration(A0, errno.ENOMEM)
    with pytest.raises(OSError, match="Cannot allocate"):
        a.region(4096)
    verbs.fail_registration(A0, 0)
    verbs.fail_relaxed_ordering(A0)
    a.regions.append(a.regions[0] if a.regions else memory(4096))  # the index is in use
    a.region(4096)
    a.close()


if __name__ == "__main__":
    CASES[sys.argv[1]]()
