"""Connections between daemons that break: what was not placed is sent again after the fence, and only that; nothing is
lost, nothing lands late."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pytest
from helpers import memory, patterns, rail_devices, sockets
from helpers.engines import Engines
from helpers.memory import KINDS, Kind, Link
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import Client, Result, Route, Transfer, TransferError, Unsettled
from railrelay.shm_layout import abi, segment

pytestmark = [pytest.mark.system, rail_devices.every_nic()]

BLOCKS, BLOCK = 512 if rail_devices.real() else 2048, 16384
NBYTES = BLOCKS * BLOCK
BREAKS = 3 if rail_devices.real() else 6
RESETS = {"cut": False} if rail_devices.real() else {"cut": False, "reset": True}  # more of real ones: tests/verbs


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Node, Node]:
    prefill, decode = nodes.pair((2, 2), timeouts={"connect_s": 5, "peer_s": 5, "settle_s": 5})
    try:
        sockets.cut(prefill, decode)
    except PermissionError as failure:
        pytest.skip(f"needs to take descriptors of its own children: {failure}")
    return prefill, decode


def begin(link: Link, seed: int = 1, tag: int = 5) -> Transfer:
    taken, put = patterns.order(BLOCKS, BLOCK, seed)
    return link.sender.write(
        link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK, tag=tag
    )


def arrived(link: Link, seed: int = 1) -> bool:
    return patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, seed)


def counter(node: Node, label: str) -> int:
    """Sum over all rails."""
    with segment.open_segment(f"/railrelay.{node.instance}.node") as opened:
        rails = opened.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
        return sum(rails.array(rail, "counters")[abi.RAIL_COUNTERS.index(label)] for rail in range(rails.count))


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
@pytest.mark.parametrize("end", ["sender", "receiver"])
@pytest.mark.parametrize("destination", KINDS)
@pytest.mark.parametrize("route", [Route.RELAY, Route.DIRECT])
def test_rails_that_break_in_the_middle_cost_only_time(
    pair: tuple[Node, Node], route: Route, destination: Kind, end: str, reset: bool
) -> None:
    prefill, decode = pair
    first, second = (prefill, decode) if end == "sender" else (decode, prefill)
    with prefill.connect(0, route=route) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES, destination=destination)
        link.source.array[:] = patterns.content(NBYTES, 1)
        begin(link, 9).wait(30)
        broken = 0
        for seed in range(BREAKS):
            link.destination.array[:] = 0
            transfer = begin(link, seed)
            until(lambda: bool(link.destination.array[::BLOCK].any()), "the first bytes land")
            broken += sockets.cut(first, second, reset=reset)
            transfer.wait(30)
            assert arrived(link, seed)
        assert broken >= (BREAKS // 2 if prefill.devices else BREAKS)  # none of verbs rails while another takes over
        assert counter(prefill, "connections_lost") >= BREAKS
    assert not [error for error in prefill.errors() if error["code"] == "internal"]


def test_slices_that_were_on_their_way_are_sent_again(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    if prefill.devices:
        pytest.skip("the NIC of a daemon that stands still goes on; see tests/verbs")
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        begin(link, 9).wait(30)
        resent, sent = counter(prefill, "slices_resent"), counter(prefill, "frames_sent")
        with decode.paused():
            transfer = begin(link)
            until(lambda: counter(prefill, "frames_sent") > sent + 3, "frames are on their way")
            assert sockets.cut(decode, prefill, reset=True) > 0
        transfer.wait(30)
        assert arrived(link)
        assert counter(prefill, "slices_resent") > resent
        assert counter(decode, "fences") > 0


@pytest.mark.parametrize("destination", KINDS)
def test_control_connections_that_break_in_the_middle_cost_only_time(
    pair: tuple[Node, Node], destination: Kind
) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES, destination=destination)
        link.source.array[:] = patterns.content(NBYTES, 1)
        begin(link, 9).wait(30)
        for seed in range(4):
            link.destination.array[:] = 0
            transfer = begin(link, seed)
            until(lambda: bool(link.destination.array[::BLOCK].any()), "the first bytes land")
            assert sockets.cut(prefill, decode, control=True, rails=seed % 2 == 1) > 0
            transfer.wait(30)
            assert arrived(link, seed)
        until(lambda: prefill.peer_states() == {decode.session: "connected"}, "the peer is connected again")


def test_an_abort_settles_while_connections_break(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver, ThreadPoolExecutor(1) as threads:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        begin(link, 9).wait(30)
        for seed in range(6):
            transfer = begin(link, seed, tag=100 + seed)
            breaking = threads.submit(sockets.cut, prefill, decode, control=True)
            receiver.receiver.abort(100 + seed)
            link.destination.array[:] = 0
            breaking.result(30)
            try:
                transfer.wait(30)
            except TransferError as failure:
                assert failure.result is Result.ABORTED  # noqa: PT017
            assert not link.destination.array.any()
        begin(link, 9).wait(30)
        assert arrived(link, 9)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_the_fence_does_not_wait_for_an_engine_that_has_stopped(
    pair: tuple[Node, Node], engines: Engines, end: str
) -> None:
    prefill, decode = pair
    slow = engines.start(decode, rank=1)
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        begin(link, 9).wait(30)
        stuck = sender.open(bytes.fromhex(slow.ask("memory", name="pages", nbytes=NBYTES, kind="private")))
        taken, put = patterns.order(BLOCKS, BLOCK, 2)
        with slow.paused():
            frames = counter(decode, "bounced_bytes")
            waiting = sender.write(stuck, taken + np.uint64(link.source.address), put + np.uint64(stuck.address), BLOCK)
            until(lambda: counter(decode, "bounced_bytes") > frames, "frames lie in bounce memory")
            for seed in range(3):
                assert sockets.cut(prefill, decode, control=seed == 2) > 0
                begin(link, seed).wait(30)
                assert arrived(link, seed)
            assert not waiting.settled
            [said] = [error["text"] for error in decode.errors() if error["code"] == "busy"]
            assert f"pid {slow.pid}" in said
            if end == "is killed":
                slow.kill()
        if end == "is killed":
            with pytest.raises(TransferError) as failure:
                waiting.wait(30)
            assert failure.value.result is Result.REGION_GONE
        else:
            waiting.wait(30)
            assert slow.ask("arrived", name="pages", source_seed=1, blocks=BLOCKS, block_bytes=BLOCK, seed=2)
    assert not [error for node in pair for error in node.errors() if error["code"] == "internal"]


# ---- everything at once ----

AREA_BLOCKS = 64
AREAS = 24


@dataclass
class Area:
    """A part of the destination that one transfer at a time may write."""

    number: int
    transfer: Transfer | None = None
    seed: int = 0
    canary: int = 0  # content that must stay while no transfer is under way; 0: none

    @property
    def place(self) -> slice:
        return slice(self.number * AREA_BLOCKS * BLOCK, (self.number + 1) * AREA_BLOCKS * BLOCK)


@dataclass
class Chaos:
    """Random writes, cancels, aborts, pauses and broken connections; after each end the area is checked, if the
    transfer was OK, or else filled with new content that must stay."""

    prefill: Node
    decode: Node
    link: Link
    rng: random.Random
    areas: list[Area] = field(default_factory=lambda: [Area(number) for number in range(AREAS)])
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    ends: dict[str, int] = field(default_factory=dict)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        steps = [self.write] * 10 + [self.cancel] * 2 + [self.abort] * 2 + [self.collect] * 6
        steps += [self.cut, self.pause]
        while time.monotonic() < end:
            self.rng.choice(steps)()
        for area in self.areas:
            if area.transfer is not None:
                self.finish(area)
        self.write_all_once_more()

    def write(self) -> None:
        idle = [area for area in self.areas if area.transfer is None]
        if idle:
            self.start(self.rng.choice(idle), self.rng.choice([0.02, 0.3, 30, 30, 30]))

    def start(self, area: Area, timeout: float) -> None:
        self.keeps(area)
        area.seed = next(self.seeds)
        taken, put = patterns.order(AREA_BLOCKS, BLOCK, area.seed)
        at = np.uint64(area.place.start)
        area.transfer = self.link.sender.write(
            self.link.remote,
            taken + at + np.uint64(self.link.source.address),
            put + at + np.uint64(self.link.remote.address),
            BLOCK,
            tag=area.seed,
            timeout=timeout,
        )

    def cancel(self) -> None:
        area = self.under_way()
        if area is not None and area.transfer is not None:
            area.transfer.cancel(wait=False)

    def abort(self) -> None:
        area = self.under_way()
        if area is not None:
            try:
                self.link.receiver.receiver.abort(area.seed, timeout=10)
            except Unsettled:
                return
            self.put_canary(area)

    def collect(self) -> None:
        for area in self.areas:
            if area.transfer is not None and area.transfer.done and area.transfer.settled:
                self.finish(area)

    def cut(self) -> None:
        what = self.rng.choice([(True, False), (False, True), (True, True)])
        first, second = self.rng.sample([self.prefill, self.decode], 2)
        reset, seed = self.rng.random() < 0.5, self.rng.getrandbits(30)
        sockets.cut(first, second, rails=what[0], control=what[1], reset=reset, share=0.6, seed=seed)

    def pause(self) -> None:
        node = self.rng.choice([self.prefill, self.decode])
        with node.paused():
            time.sleep(self.rng.uniform(0, 0.1))

    def under_way(self) -> Area | None:
        busy = [area for area in self.areas if area.transfer is not None]
        return self.rng.choice(busy) if busy else None

    def finish(self, area: Area) -> None:
        assert area.transfer is not None
        try:
            area.transfer.wait(30)
        except TransferError:
            area.transfer.wait_settled(30)
        result = area.transfer.result
        assert result is not None
        assert area.transfer.settled
        self.ends[result.name] = self.ends.get(result.name, 0) + 1
        area.transfer = None
        if area.canary:
            self.keeps(area)
        elif result is Result.OK:
            source, destination = self.link.source.array[area.place], self.link.destination.array[area.place]
            assert patterns.arrived(source, destination, AREA_BLOCKS, BLOCK, area.seed)
        self.put_canary(area)

    def put_canary(self, area: Area) -> None:
        area.canary = next(self.seeds)
        self.link.destination.array[area.place] = patterns.content(AREA_BLOCKS * BLOCK, area.canary)

    def keeps(self, area: Area) -> None:
        if area.canary:
            wanted = patterns.content(AREA_BLOCKS * BLOCK, area.canary)
            assert (self.link.destination.array[area.place] == wanted).all(), f"late bytes in area {area.number}"
        area.canary = 0

    def write_all_once_more(self) -> None:
        for area in self.areas:
            self.start(area, 30)
        for area in self.areas:
            assert area.transfer is not None
            area.transfer.wait(30)
            self.finish(area)


@pytest.mark.parametrize(
    ("seed", "route", "source", "destination"),
    [
        (1, Route.RELAY, "shared", "shared"),
        (2, Route.RELAY, "private", "private"),
        (3, Route.DIRECT, "shared", "private"),
        (4, Route.DIRECT, "private", "shared"),
    ],
)
def test_no_byte_lands_late_whatever_breaks(
    pair: tuple[Node, Node], seed: int, route: Route, source: Kind, destination: Kind
) -> None:
    prefill, decode = pair
    with prefill.connect(1, route=route) as sender, decode.connect(0) as receiver:
        link = linked(sender, receiver, source, destination)
        chaos = Chaos(prefill, decode, link, random.Random(seed))
        chaos.run(6)
        assert chaos.ends["OK"] > 20
        assert len(chaos.ends) > 1


def linked(sender: Client, receiver: Client, source: Kind, destination: Kind) -> Link:
    nbytes = AREAS * AREA_BLOCKS * BLOCK
    link = memory.link(sender, receiver, nbytes, source=source, destination=destination)
    link.source.array[:] = patterns.content(nbytes, 1)
    return link
