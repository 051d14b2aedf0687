"""railrelay's verbs NIC against queue pairs of pyverbs: bytes, immediates and messages of its rails are written and
looked at by code that has nothing of railrelay's. What both say on the wire (daemon/verbs_inside.h) is spelled out here
a second time."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import random
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import pytest
from helpers.verbs_peer import POLL_S, Address, Completion, Memory, Peer, Write
from helpers.verbs_plane import (
    DEVICES,
    ROUTE,
    SLOT_BYTES,
    TABLE_ENTRIES,
    Node,
    endpoint_facts,
    export,
)
from helpers.verbs_plane import Memory as PlaneMemory

from railrelay.client.errors import Result
from railrelay.daemon import plane

DONE, GRANT, WANT, BOUNCED = 1, 2, 3, 5
HEAD: Final = struct.Struct("<4sHHQ")  # magic, type, pairs, grant
BODY: Final = struct.Struct("<QQQQQIIII")  # Message from `sequence` to `code`
PAIR: Final = struct.Struct("<QQ")
RUN: Final = struct.Struct("<QII")  # offset, length, handle
MESSAGE_BYTES: Final = 256
PAIRS_MAX: Final = 15
WINDOW: Final = 256  # frames without an answer
RECEIVES: Final = WINDOW + 8
REGION: Final = 1 << 20
MARGIN: Final = 65536  # registered too, and not offered
TAG, OWNER, HANDLE, CONNECTION = 5, 3, 9, 8


@dataclass(frozen=True)
class Message:
    kind: int
    grant: int
    pairs: list[tuple[int, int]]  # DONE
    sequence: int = 0
    nbytes: int = 0
    tag: int = 0
    address: int = 0
    table: int = 0
    rkey: int = 0
    owner: int = 0
    run_count: int = 0
    code: int = 0
    runs: tuple[tuple[int, int, int], ...] = ()


def immediate(sequence: int, nbytes: int) -> int:
    """What ends a frame; frames of a queue pair are numbered from 1."""
    return (nbytes - 1) << 2 | sequence & 3


def read(raw: bytes) -> Message:
    magic, kind, count, grant = HEAD.unpack_from(raw)
    assert magic == b"VRES"
    if kind == DONE:
        return Message(kind, grant, [PAIR.unpack_from(raw, HEAD.size + n * PAIR.size) for n in range(count)])
    message = Message(kind, grant, [], *BODY.unpack_from(raw, HEAD.size))
    inside = message.run_count if message.run_count <= 11 else 0
    runs = (RUN.unpack_from(raw, HEAD.size + BODY.size + n * RUN.size) for n in range(inside))
    return replace(message, runs=tuple(runs))


class Far:
    """The end that is pyverbs', and what it has received."""

    def __init__(self, device: str) -> None:
        self.peer = Peer(device)
        self.pair = self.peer.queue_pair(receives=RECEIVES)
        self.inbox = self.peer.memory(RECEIVES * MESSAGE_BYTES)
        self.outbox = self.peer.memory(64 * MESSAGE_BYTES)
        self.said = itertools.count()
        self.waiting: dict[bool, list[Completion]] = {True: [], False: []}  # by whether something was received

    def connect(self, node: Node, *, to_far: bool) -> None:
        """To rail 0 of the node, as the two conductors do it."""
        endpoint, facts = endpoint_facts(node, 0, 0, sending=to_far)
        gid = ipaddress.IPv6Address(facts["gid"]).exploded  # pyverbs reads no other
        self.pair.connect(Address(facts["qpn"], gid, facts["psn"]))
        self.pair.receive(RECEIVES, 0, self.inbox, MESSAGE_BYTES)
        own = self.pair.address
        remote = {"gid": ipaddress.IPv6Address(own.gid).packed, "lid": 0, "mtu": facts["mtu"], "remote_through": 0}
        node.plane.connect_endpoint(endpoint, qpn=own.number, psn=own.psn, **remote, **ROUTE)
        if to_far:
            node.plane.add_sender(0, CONNECTION, 0, 0, False, 1, endpoint)
        else:
            node.plane.add_receiver(0, CONNECTION, 0, endpoint)

    def take(self, count: int = 1, *, received: bool, limit_s: float = POLL_S) -> list[Completion]:
        """The next ones of what was received, or sent; fewer if there are no more within the limit."""
        found, deadline = self.waiting[received], time.monotonic() + limit_s
        while len(found) < count and (left := deadline - time.monotonic()) > 0:
            for one in self.peer.poll(limit_s=left):
                self.waiting[one.received].append(one)
        taken, self.waiting[received] = found[:count], found[count:]
        return taken

    def say(self, kind: int, body: bytes, *, pairs: int = 0, grant: int = 0) -> None:
        raw = (HEAD.pack(b"VRES", kind, pairs, grant) + body).ljust(MESSAGE_BYTES, b"\0")
        at = next(self.said) % 64 * MESSAGE_BYTES
        self.outbox.bytes[at : at + MESSAGE_BYTES] = raw
        self.pair.send(self.outbox, at, MESSAGE_BYTES)
        assert [done.status for done in self.take(received=False)] == ["SUCCESS"]

    def answer(self, *sequences: int, code: Result = Result.OK) -> None:
        for at in range(0, len(sequences), PAIRS_MAX):
            part = sequences[at : at + PAIRS_MAX]
            self.say(DONE, b"".join(PAIR.pack(sequence, code) for sequence in part), pairs=len(part))

    def immediates(self, count: int) -> list[int | None]:
        taken = self.take(count, received=True)
        assert all(one.status == "SUCCESS" for one in taken), taken
        return [one.imm for one in taken]

    def messages(self, count: int = 1) -> list[Message]:
        taken = self.take(count, received=True)
        assert [(one.status, one.nbytes, one.imm) for one in taken] == [("SUCCESS", MESSAGE_BYTES, None)] * count
        return [read(self.inbox.bytes[one.id * MESSAGE_BYTES :][:MESSAGE_BYTES]) for one in taken]

    def answers(self, count: int) -> dict[int, int]:
        """By sequence, out of as many messages as they come in."""
        found: dict[int, int] = {}
        while len(found) < count:
            [message] = self.messages()
            assert (message.kind, message.grant) == (DONE, 0)
            found.update(message.pairs)
        return found


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(DEVICES[:1])
    yield node
    node.close()
    node.close_memory()


@pytest.fixture
def far() -> Iterator[Far]:
    far = Far(DEVICES[1])
    with contextlib.closing(far.peer):
        yield far


@dataclass
class Target:
    """Memory of pyverbs with a region in its middle that is offered to the node, as remote ``remote`` there."""

    memory: Memory
    remote: int
    expected: bytearray

    def put(self, offset: int, content: bytes) -> None:
        self.expected[MARGIN + offset : MARGIN + offset + len(content)] = content

    def right(self) -> bool:
        return self.memory.bytes[:] == bytes(self.expected)


@pytest.fixture
def target(node: Node, far: Far) -> Target:
    node.region(REGION).view[:] = random.Random(1).randbytes(REGION)
    node.lease()
    memory = far.peer.memory(REGION + 2 * MARGIN)
    memory.bytes[:] = random.Random(2).randbytes(REGION + 2 * MARGIN)
    offered = PlaneMemory(-1, REGION, memory.bytes, memory.address + MARGIN, rkeys=(memory.rkey,))
    remote = node.open(0, HANDLE, REGION, of=offered)
    far.connect(node, to_far=True)
    return Target(memory, remote, bytearray(memory.bytes[:]))


# ---- from railrelay to pyverbs ----


def test_direct_slices_land_at_the_offered_addresses_and_are_done_once_they_are_answered(
    node: Node, far: Far, target: Target
) -> None:
    lengths = [1, 4097, 65536, 300_000, 65535]  # the fourth is more than one work request may write
    places = [REGION - 1, 3, 131072, 400_001, 262_144 - 65535]
    sources = [REGION - 1, 1, 65536, 200_000, 7]
    blocks = [(s, p, n, 0, target.remote) for s, p, n in zip(sources, places, lengths, strict=True)]
    transfer = node.direct(blocks, tag=TAG)
    assert far.immediates(len(blocks)) == [immediate(k, n) for k, n in enumerate(lengths, 1)]
    for source, place, length, _, _ in blocks:
        target.put(place, node.regions[0].view[source : source + length])
    assert target.right()
    far.answer(1, 2, 3, 4)
    node.cycle()
    assert not node.settled(transfer)
    far.answer(5)
    assert node.result(transfer) is Result.OK
    assert target.right()


def test_a_slot_is_scattered_by_one_frame_and_ends_as_its_receiver_says(node: Node, far: Far, target: Target) -> None:
    numbers = random.Random(3)
    for sequence, result in ((1, Result.OK), (2, Result.ABORTED)):
        places = numbers.sample(range(REGION // 4096), 40)
        parts = [(numbers.randbytes(numbers.randrange(1, 4096)), place * 4096, target.remote) for place in places]
        transfer = node.relay(parts, tag=TAG)
        assert far.immediates(1) == [immediate(sequence, sum(len(content) for content, _, _ in parts))]
        for content, place, _ in parts:
            target.put(place, content)
        assert target.right()
        far.answer(sequence, code=result)
        assert node.result(transfer) is result


def test_no_more_frames_than_a_window_are_sent_before_the_receiver_has_answered(
    node: Node, far: Far, target: Target
) -> None:
    blocks = [(n * 64, n * 4096, 64, 0, target.remote) for n in range(WINDOW)]
    filled = node.direct(blocks, tag=TAG)
    assert far.immediates(WINDOW) == [immediate(sequence, 64) for sequence in range(1, WINDOW + 1)]
    waits = node.relay([(b"behind", 64, target.remote)], tag=TAG)
    node.cycle()
    assert node.counters()["frames_sent"] == WINDOW
    assert far.take(received=True, limit_s=0.2) == []
    for source, place, length, _, _ in blocks:
        target.put(place, node.regions[0].view[source : source + length])
    assert target.right()
    far.answer(*range(1, WINDOW + 1))
    assert node.result(filled) is Result.OK
    assert far.immediates(1) == [immediate(WINDOW + 1, 6)]
    target.put(64, b"behind")
    assert target.right()
    far.answer(WINDOW + 1)
    assert node.result(waits) is Result.OK


@pytest.mark.parametrize("run_count", [3, 20])
def test_private_memory_is_asked_for_and_written_where_it_was_granted(
    node: Node, far: Far, target: Target, run_count: int
) -> None:
    private = node.open(0, 2, REGION, of=None, window_bytes=SLOT_BYTES, window_runs=TABLE_ENTRIES, owner=OWNER)
    contents = [random.Random(n).randbytes(100 + n) for n in range(run_count)]
    runs = tuple((n * 8192, len(content), 2) for n, content in enumerate(contents))
    transfer = node.relay([(content, run[0], private) for content, run in zip(contents, runs, strict=True)], tag=TAG)
    nbytes = sum(map(len, contents))
    [want] = far.messages()
    assert (want.kind, want.owner, want.nbytes) == (WANT, OWNER, nbytes)
    place, table = 8192, 524_288
    address = target.memory.address + MARGIN
    fields = (want.sequence, 0, 0, address + place, address + table, target.memory.rkey, OWNER, 0, 0)
    far.say(GRANT, BODY.pack(*fields), grant=77)
    [bounced] = far.messages()
    assert (bounced.kind, bounced.grant, bounced.code) == (BOUNCED, 77, 0)
    assert (bounced.sequence, bounced.nbytes, bounced.tag, bounced.owner) == (1, nbytes, TAG, OWNER)
    assert bounced.run_count == run_count
    target.put(place, b"".join(contents))
    if run_count <= 11:
        assert bounced.runs == runs
    else:
        target.put(table, b"".join(RUN.pack(*run) for run in runs))
    assert target.right()
    far.answer(1)
    assert node.result(transfer) is Result.OK


# ---- from pyverbs to railrelay ----


@dataclass
class Source:
    """Frames of pyverbs: memory of its own, and its own mapping of the node's region."""

    far: Far
    memory: Memory
    seen: Memory
    base: int
    rkey: int
    expected: bytearray

    def frame(self, sequence: int, parts: list[tuple[int, int, int]]) -> None:
        """(source, offset in the region, length) each; the last one carries the immediate."""
        nbytes = sum(length for _, _, length in parts)
        writes = [Write(at, length, self.base + place, self.rkey, signaled=False) for at, place, length in parts]
        writes[-1] = replace(writes[-1], imm=immediate(sequence, nbytes), signaled=True)
        self.far.pair.post(self.memory, writes)
        for at, place, length in parts:
            self.expected[place : place + length] = self.memory.bytes[at : at + length]

    def sent(self) -> str:
        [done] = self.far.take(received=False)
        return done.status

    def right(self) -> bool:
        return self.seen.bytes[:] == bytes(self.expected)


@pytest.fixture
def source(node: Node, far: Far) -> Source:
    region = node.region(REGION)
    region.view[:] = random.Random(4).randbytes(REGION)
    export(node, 0, HANDLE, REGION)
    memory, seen = far.peer.memory(REGION), far.peer.memory(REGION, region.fd)
    memory.bytes[:] = random.Random(5).randbytes(REGION)
    far.connect(node, to_far=False)
    return Source(far, memory, seen, region.base, region.rkeys[0], bytearray(region.view[:]))


def test_frames_of_pyverbs_are_counted_and_confirmed_and_stay_what_they_are_after_the_fence(
    node: Node, far: Far, source: Source
) -> None:
    frames = [
        [(0, 4096 * 7 + 1, 65536)],
        [(70_000 + n * 999, 262_144 + n * 4096, 999) for n in range(30)],
        [(5, REGION - 1, 1)],
    ]
    for sequence, parts in enumerate(frames, 1):
        source.frame(sequence, parts)
        assert source.sent() == "SUCCESS"
        assert far.answers(1) == {sequence: Result.OK}
        assert source.right()
    counted = node.counters()
    assert (counted["frames_received"], counted["bytes_received"]) == (3, 65536 + 30 * 999 + 1)
    node.plane.fence_receiver(0, CONNECTION)
    node.keep_fence(node.wait(plane.RECEIVER_FENCED))
    assert (node.placed[CONNECTION], node.fenced[CONNECTION]) == (3, dict.fromkeys((1, 2, 3), Result.OK))
    before = bytes(source.expected)
    source.frame(4, [(100_000, 0, 65536)])
    assert source.sent() != "SUCCESS"
    assert source.seen.bytes[:] == before


def test_a_frame_that_is_not_the_next_one_ends_the_connection(node: Node, source: Source) -> None:
    source.frame(2, [(0, 0, 4096)])
    lost = node.wait(plane.RECEIVER_LOST)
    assert (lost[2], lost[3]) == (CONNECTION, errno.EPROTO)
    node.plane.fence_receiver(0, CONNECTION)
    node.keep_fence(node.wait(plane.RECEIVER_FENCED))
    assert (node.placed[CONNECTION], node.counters()["frames_received"]) == (0, 0)


def test_pyverbs_reaches_private_memory_through_a_slot_that_it_is_granted(node: Node, far: Far) -> None:
    private = node.private_region(REGION)
    bounce = node.bounce()
    export(node, private, HANDLE, REGION)
    far.connect(node, to_far=False)
    memory = far.peer.memory(REGION)
    memory.bytes[:] = random.Random(6).randbytes(REGION)
    expected = bytearray(REGION)
    runs = [(n * 20_000 + n, 700 + n, HANDLE) for n in range(5)]
    nbytes = sum(length for _, length, _ in runs)
    far.say(WANT, BODY.pack(9, nbytes, 0, 0, 0, 0, 0, 0, 0))
    [granted] = far.messages()
    assert (granted.kind, granted.sequence, granted.code, granted.rkey) == (GRANT, 9, 0, bounce.rkeys[0])
    far.pair.post(memory, [Write(64, nbytes, granted.address, granted.rkey)])
    assert [done.status for done in far.take(received=False)] == ["SUCCESS"]
    body = BODY.pack(1, nbytes, TAG, 0, 0, 0, 0, len(runs), 0) + b"".join(RUN.pack(*run) for run in runs)
    far.say(BOUNCED, body, grant=granted.grant)
    node.counted("frames_received", 1)
    assert far.take(received=True, limit_s=0.2) == []  # its owner has not copied it yet
    assert node.empty() == 1
    assert far.answers(1) == {1: Result.OK}
    at = 64
    for place, length, _ in runs:
        expected[place : place + length] = memory.bytes[at : at + length]
        at += length
    assert node.regions[private].view[:] == bytes(expected)
