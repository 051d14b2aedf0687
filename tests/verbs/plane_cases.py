"""Cases of test_plane.py: each runs in a process of its own, with two planes that reach each other through the library
that LD_LIBRARY_PATH names. ``python plane_cases.py CASE``."""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
from helpers.verbs_plane import (
    BOUNCE_SLOTS,
    DEVICES,
    REAL,
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
)
from helpers.verbs_stand_in import Fabric

from railrelay.client.errors import Result
from railrelay.daemon import plane

CASES: Final[dict[str, Callable[[], None]]] = {}
PAGE: Final = 4096
MESSAGES: Final = 128  # on their way from one end
A0: Final = "127.0.0.1"
B0: Final = "127.0.0.2"


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
        transfer = a.direct(blocks)
        time.sleep(0.05)
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
        time.sleep(0.2)
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
    time.sleep(0.1)
    assert a.command(lambda cookie: a.plane.drain_handle(0, 9, cookie)) == [0]
    a.plane.remove_remote(0, remote)
    cookie = next(a.cookies)
    a.plane.drain_handle(0, 1, cookie)
    late = a.direct([(0, 0, 65536, 0, other), (0, 0, 65536, 0, remote)])
    time.sleep(0.2)
    a.pump()
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
    time.sleep(0.1)
    a.plane.detach_client(0)
    time.sleep(0.2)
    a.pump()
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
    time.sleep(0.1)
    a.command(lambda cookie: a.plane.drop_peer(0, int(Result.PEER_LOST), cookie))
    assert a.result(transfer) is Result.PEER_LOST
    close(a, b)


@stand_in_case
def express_goes_before_bulk_on_one_connection() -> None:
    a, b, remote = pair(nbytes=64 << 20)
    fabric().limit_rate(A0, 60 << 20)
    pair_ = connect(a, b)
    bulk = a.direct([(i << 20, i << 20, 1 << 20, 0, remote) for i in range(60)])
    time.sleep(0.1)
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
    time.sleep(0.1)
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
    time.sleep(0.1)
    assert a.plane.cancel_transfer(0, *first, int(Result.CANCELLED))
    time.sleep(0.1)
    assert emptied(b, a, first) is Result.CANCELLED
    second = a.direct(scattered(private, count=16), tag=9)
    time.sleep(0.1)
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
        time.sleep(0.002)
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


@stand_in_case
def a_connection_that_is_lost_with_frames_in_bounce_memory_loses_none() -> None:
    a, b, _, private = private_pair()
    content = fill(a)
    first = connect(a, b)
    transfer = a.direct(scattered(private, count=40))
    time.sleep(0.1)
    b.empty(most=1)
    time.sleep(0.05)
    assert fabric().fail_queue_pairs(A0)
    a.wait(plane.SENDER_LOST)
    b.plane.fence_receiver(0, first.receiver)
    time.sleep(0.1)
    b.pump()
    assert not [event for event in b.events if event[0] == plane.RECEIVER_FENCED]
    while not [event for event in b.events if event[0] == plane.RECEIVER_FENCED]:
        b.empty()
        b.pump(0.01)
    fence(a, b, first)
    connect(a, b, epoch=2)
    assert emptied(b, a, transfer) is Result.OK
    for source, destination, length, _, _ in scattered(private, count=40):
        assert b.regions[1].view[destination : destination + length] == content[source : source + length]
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
    time.sleep(0.2)
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
        time.sleep(0.1)
        b.plane.set_flush_targets(0, 0, [(b.regions[0].base + 8192, keys[1][2])], 900)
        b.plane.set_flush_targets(0, 0, [], 901)
        time.sleep(0.1)
        b.pump()
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
    settling: dict[int, int] = {}
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
                settling[ended.receiver] = ended.sender
                b.plane.fence_receiver(0, ended.receiver)
            assert event[0] != plane.VIOLATION, event
        a.events.clear()
        for event in b.events:
            if event[0] == plane.RECEIVER_FENCED:
                sender = settling.pop(event[2])
                a.plane.settle_sender(0, sender, event[3], b.plane.fence_acks(event[2]), 0)
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
    time.sleep(0.1)
    assert a.plane.new_endpoint(0, 0, sending=True)[0]
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
