"""Transfers between every place that memory can be in, on real daemons."""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import gpus, patterns
from helpers.gpus import Card, Control, Driver, Link, Place
from helpers.nodes import SMALL, Node, Nodes, merged
from helpers.patterns import Bytes, Offsets
from helpers.waiting import until

from railrelay.client import ArgumentError, Busy, Client, HostEvent, RelayError, Result, Transfer, WaitTimeout
from railrelay.client.gpu_memory import Copy, GpuOptions
from railrelay.client.layout import PageLayout

pytestmark = [pytest.mark.gpu, pytest.mark.system]

KIB = 1 << 10
BLOCKS, BLOCK_BYTES = 40, 24 * KIB
NBYTES = BLOCKS * BLOCK_BYTES


def driver_module() -> Any:  # noqa: ANN401 - cuda-python has no types
    from cuda.bindings import driver

    return driver


@pytest.mark.parametrize("destination", ["gpu", "vmm", "shared", "private"])
@pytest.mark.parametrize("source", ["gpu", "vmm", "shared", "private"])
def test_every_source_to_every_destination(
    nodes: Nodes, gpu: Card, other_gpu: Card, source: Place, destination: Place
) -> None:
    first, second = nodes.pair()
    with first.connect(gpu=gpu.ordinal) as sender, second.connect(gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender,
            receiver,
            gpus.make(sender, NBYTES, source, gpu),
            gpus.make(receiver, NBYTES, destination, other_gpu),
        )
        content = patterns.content(NBYTES, 1)
        link.source.write(content)
        taken, put = patterns.order(BLOCKS, BLOCK_BYTES, 2)
        for round_number in range(3):
            moved = sender.write(
                link.remote,
                taken + np.uint64(link.source.address),
                put + np.uint64(link.remote.address),
                BLOCK_BYTES,
                tag=round_number,
            )
            moved.wait(20)
            assert moved.source_done
            assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)
            link.destination.write(np.zeros(NBYTES, np.uint8))
        if source in ("gpu", "vmm"):
            assert sum(sender.counters()[f"gpu_{way}_bytes"] for way in ("strided", "batch", "kernel")) == 3 * NBYTES


@dataclass
class Pair:
    """A sender with the first GPU and a receiver with the other, on two nodes."""

    nodes: tuple[Node, Node]
    sender: Client
    receiver: Client
    gpu: Card
    other: Card

    def link(self, nbytes: int, source: Place = "gpu", destination: Place = "gpu", rail: int | None = None) -> Link:
        return gpus.link(
            self.sender,
            self.receiver,
            gpus.make(self.sender, nbytes, source, self.gpu),
            gpus.make(self.receiver, nbytes, destination, self.other, rail),
        )


Connect = Callable[..., Pair]


@pytest.fixture
def connect(nodes: Nodes, gpu: Card, other_gpu: Card) -> Iterator[Connect]:
    with ExitStack() as stack:

        def pair(
            rails: int = 1,
            copy: Copy = Copy.AUTO,
            route: str = "relay",
            rank: int = 0,
            **sections: Mapping[str, object],
        ) -> Pair:
            both = nodes.pair((rails, rails), base=merged(SMALL, sections))
            options = GpuOptions(copy=copy)
            sender = both[0].connect(rank, gpu=gpu.ordinal, gpu_options=options, route=route)
            receiver = both[1].connect(gpu=other_gpu.ordinal, gpu_options=options)
            stack.enter_context(sender)
            stack.enter_context(receiver)
            return Pair(both, sender, receiver, gpu, other_gpu)

        yield pair


def write(link: Link, sources: Offsets, destinations: Offsets, lengths: Offsets | int, **options: Any) -> Transfer:  # noqa: ANN401
    return link.sender.write(
        link.remote,
        sources + np.uint64(link.source.address),
        destinations + np.uint64(link.remote.address),
        lengths,
        **options,
    )


def carried(link: Link, sources: Offsets, destinations: Offsets, lengths: Offsets, content: Bytes) -> bool:
    expected = patterns.after(content, np.zeros(link.destination.nbytes, np.uint8), sources, destinations, lengths)
    return bool((link.destination.read() == expected).all())


@pytest.mark.parametrize("copy", list(Copy))
def test_mixed_lengths_by_each_way(connect: Connect, copy: Copy) -> None:
    link = connect(copy=copy).link(4 << 20)
    content = patterns.content(4 << 20, 1)
    link.source.write(content)
    lengths = [1, 3, 63, 64, 65, 256, 1152, 4096, 4097, 65536, 300_000, *[100] * 500, *[2048] * 100]
    blocks = patterns.mixed(4 << 20, 4 << 20, lengths, 2)
    write(link, *blocks).wait(20)
    assert carried(link, *blocks, content)
    counters = link.sender.counters()
    if copy is Copy.KERNEL:
        assert counters["gpu_kernel_pieces"] > 0
        assert counters["gpu_batch_pieces"] == 0


@pytest.mark.parametrize("piece_bytes", [256, 1152, 18 * KIB, 72 * KIB])
@pytest.mark.parametrize("copy", [Copy.AUTO, Copy.STRIDED, Copy.KERNEL])
@pytest.mark.parametrize("source", ["gpu", "private"])
def test_pages(connect: Connect, piece_bytes: int, copy: Copy, source: Place) -> None:
    row_count, page_count = 61, 9 if piece_bytes < 64 * KIB else 3
    row_bytes = (page_count + 2) * piece_bytes
    link = connect(copy=copy).link(row_count * row_bytes, source)
    content = patterns.content(row_count * row_bytes, 3)
    link.source.write(content)
    offsets = np.arange(row_count) * row_bytes

    def layout(address: int) -> PageLayout:
        rows = offsets.astype(np.uint64) + np.uint64(address)
        return PageLayout(rows=rows, page_stride=piece_bytes, piece_bytes=piece_bytes)

    rng = np.random.default_rng(4)
    taken, put = (rng.permutation(page_count + 2)[:page_count] for _ in range(2))
    link.sender.write_pages(link.remote, layout(link.source.address), taken, layout(link.remote.address), put).wait(20)
    blocks = [
        (int(offset) + int(page) * piece_bytes, int(offset) + int(to) * piece_bytes)
        for offset in offsets
        for page, to in zip(taken, put, strict=True)
    ]
    sources, destinations = (np.array(side, np.uint64) for side in zip(*blocks, strict=True))
    assert carried(link, sources, destinations, np.full(len(blocks), piece_bytes, np.uint64), content)
    if source == "gpu" and piece_bytes < 64 * KIB and copy is Copy.STRIDED:
        assert link.sender.counters()["gpu_strided_pieces"] > 0


def test_small_pieces_whose_destinations_join(connect: Connect) -> None:
    """Heads of unequal tensor parallelism: 256 bytes of every 1 KiB at the source, contiguous at the destination."""
    link = connect().link(2 << 20)
    content = patterns.content(2 << 20, 5)
    link.source.write(content)
    count = 2048
    sources = np.arange(count, dtype=np.uint64) * np.uint64(1024)
    destinations = np.arange(count, dtype=np.uint64) * np.uint64(256)
    write(link, sources, destinations, 256).wait(20)
    assert carried(link, sources, destinations, np.full(count, 256, np.uint64), content)
    lane = link.sender.counters()
    assert lane["gpu_strided_pieces"] + lane["gpu_batch_pieces"] + lane["gpu_kernel_pieces"] == count


@dataclass(frozen=True)
class Heads:
    """Of unequal tensor parallelism: one of ``of`` heads of each token in each layer goes where pages hold ``onto``."""

    head_bytes: int
    tokens: int = 16
    layers: int = 3
    of: int = 4
    onto: int = 1

    def layout(self, heads: int, which: int, address: int, page_count: int) -> PageLayout:
        page_bytes = self.tokens * heads * self.head_bytes
        whole = PageLayout.strided(address, self.layers, page_count * page_bytes, page_bytes, page_bytes)
        return whole.split(self.tokens).heads(which, 1, heads)

    def room(self, heads: int, page_count: int) -> int:
        return -(-self.layers * page_count * self.tokens * heads * self.head_bytes // 4096) * 4096


def blocks_of(layout: PageLayout, pages: Offsets, address: int) -> Offsets:
    return (
        layout.starts()[None, :] - np.uint64(address) + pages.astype(np.uint64)[:, None] * np.uint64(layout.page_stride)
    ).ravel()


ORDERS: dict[str, Callable[[int], Any]] = {
    "in order": lambda count: (np.arange(count), np.arange(count)),
    "shuffled": lambda count: tuple(np.random.default_rng(side).permutation(count) for side in (1, 2)),
    "every other, back": lambda count: (np.arange(count)[::2], np.arange(count)[::-1][::2]),
    "from few to many": lambda count: (
        np.arange(count // 2),
        np.random.default_rng(3).permutation(count)[: count // 2],
    ),
}


@pytest.mark.parametrize(
    "heads",
    [
        Heads(256),
        Heads(128),
        Heads(96),
        Heads(1),
        Heads(256, onto=2),
        Heads(1152, tokens=1),
        Heads(300, 7, 5, 3),
        Heads(256, 1, 40),
    ],
    ids=str,
)
@pytest.mark.parametrize("copy", [Copy.KERNEL, Copy.STRIDED])
def test_heads_of_unequal_tensor_parallelism(connect: Connect, heads: Heads, copy: Copy) -> None:
    """Slots of 64 KiB end anywhere in a page, and in a piece."""
    page_count = 41
    pair = connect(copy=copy, relay={"slots": 4, "slot_bytes": "64KiB", "direct_slice_bytes": "64KiB"})
    source = gpus.make(pair.sender, heads.room(heads.of, page_count), "gpu", pair.gpu)
    destination = gpus.make(pair.receiver, heads.room(heads.onto, page_count), "gpu", pair.other)
    link = gpus.link(pair.sender, pair.receiver, source, destination)
    content = patterns.content(source.nbytes, 3)
    source.write(content)
    from_layout = heads.layout(heads.of, heads.of - 1, source.address, page_count)
    to_layout = heads.layout(heads.onto, 0, link.remote.address, page_count)
    for order in ORDERS.values():
        taken, put = order(page_count)
        pair.sender.write_pages(link.remote, from_layout, taken, to_layout, put).wait(20)
        sources = blocks_of(from_layout, taken, source.address)
        destinations = blocks_of(to_layout, put, link.remote.address)
        assert carried(link, sources, destinations, np.full(len(sources), heads.head_bytes, np.uint64), content)
        link.destination.write(np.zeros(link.destination.nbytes, np.uint8))


@pytest.mark.parametrize(
    ("heads", "order", "most"),
    [
        (Heads(256), "shuffled", 3 * 41),  # a page of a layer
        (Heads(64), "shuffled", 3 * 41),
        (Heads(256, tokens=1), "in order", 3),  # a layer
    ],
    ids=str,
)
def test_pieces_that_join_are_few_remote_writes(connect: Connect, heads: Heads, order: str, most: int) -> None:
    page_count = 41
    pair = connect(relay={"slots": 4, "slot_bytes": "1MiB"})
    link = pair.link(2 << 20)
    taken, put = ORDERS[order](page_count)
    from_layout = heads.layout(heads.of, 1, link.source.address, page_count)
    to_layout = heads.layout(heads.onto, 0, link.remote.address, page_count)
    pair.sender.write_pages(link.remote, from_layout, taken, to_layout, put).wait(20)
    (lane,) = (lane for lane in pair.nodes[0].cli("lanes")["lanes"] if lane["bytes"])
    assert lane["blocks"] <= most


@pytest.mark.parametrize("rails", [1, 3])
def test_several_rails(connect: Connect, rails: int) -> None:
    pair = connect(rails=rails)
    content = patterns.content(NBYTES, 1)
    source = gpus.make(pair.sender, NBYTES, "gpu", pair.gpu)
    source.write(content)
    links = []
    for rail in range(rails):
        destination = gpus.make(pair.receiver, NBYTES, "gpu", pair.other, rail)
        links.append(gpus.link(pair.sender, pair.receiver, source, destination))
    moved = []
    for number, link in enumerate(links):
        sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, number)
        moved.append(write(link, sources, destinations, BLOCK_BYTES))
    for number, link in enumerate(links):
        moved[number].wait(20)
        assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, number)
    for transfer in moved:
        transfer.wait_settled(10)


@pytest.mark.parametrize("route", ["relay", "relay_all", "direct", "matched", "serial", "scheduled"])
def test_routes(connect: Connect, route: str) -> None:
    link = connect(rails=2, route=route).link(NBYTES, rail=1)
    content = patterns.content(NBYTES, 1)
    link.source.write(content)
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
    write(link, sources, destinations, BLOCK_BYTES).wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)


def test_host_and_gpu_sources_interleave_in_one_lane(connect: Connect, driver: Driver) -> None:
    """Slots that the CPU, the copy engine and the kernel fill take turns; the doorbell passes none too early."""
    if driver.control is not None:
        driver.control.delay(200)
    pair = connect(rails=2)
    content = {place: patterns.content(NBYTES, seed) for seed, place in enumerate(("gpu", "vmm", "private", "shared"))}
    links = {}
    for place, filled in content.items():
        links[place] = pair.link(NBYTES, place, rail=1)  # type: ignore[arg-type]
        links[place].source.write(filled)
    moved = []
    for number in range(6):
        for place, link in links.items():
            size = (256, 24 * KIB, 3 * KIB)[number % 3]
            sources, destinations = (offsets // np.uint64(6) for offsets in patterns.order(BLOCKS, BLOCK_BYTES, number))
            shift = np.uint64(number * (NBYTES // 6) if size < 24 * KIB else 0)
            length = min(size, BLOCK_BYTES // 6)
            moved.append((place, number, length, shift, write(link, sources + shift, destinations + shift, length)))
    for *_, transfer in moved:
        transfer.wait(30)
    for place, link in links.items():
        found = link.destination.read()
        for place_of, number, length, shift, _ in moved:
            if place_of != place or any(n > number and s == shift for p, n, _, s, _ in moved if p == place):
                continue
            sources, destinations = (offsets // np.uint64(6) for offsets in patterns.order(BLOCKS, BLOCK_BYTES, number))
            for source, destination in zip((sources + shift).tolist(), (destinations + shift).tolist(), strict=True):
                assert bool(
                    (found[destination : destination + length] == content[place][source : source + length]).all()
                )


@pytest.mark.parametrize("copy", [Copy.AUTO, Copy.KERNEL])
def test_many_transfers_through_few_slots(connect: Connect, driver: Driver, copy: Copy) -> None:
    """Every line has its stamp; each slot is reused many times, with pauses between copies where they can be had."""
    if driver.control is not None:
        driver.control.delay(100)
    link = connect(copy=copy).link(1 << 20)
    stamps = np.arange((1 << 20) // 64, dtype=np.uint64)
    lines = np.empty((len(stamps), 8), np.uint64)
    for number in range(8):
        lines[:] = (stamps + np.uint64(number << 32))[:, None]
        link.source.write(lines.view(np.uint8).reshape(-1))
        sizes = 4096 if number % 2 else 64 * KIB
        sources, destinations = patterns.order((1 << 20) // sizes, sizes, number)
        moved = write(link, sources, destinations, sizes)
        moved.wait(30)
        arrived = link.destination.read()
        assert patterns.arrived(lines.view(np.uint8).reshape(-1), arrived, (1 << 20) // sizes, sizes, number)
        words = arrived.view(np.uint64).reshape(-1, 8)
        assert bool((words == words[:, :1]).all()), "torn lines"


def test_a_list_of_more_pieces_than_a_slot_takes(connect: Connect) -> None:
    """64-byte pieces that join at the destination: a slot of 4 MiB closes when its list is full."""
    link = connect(relay={"slots": 4, "slot_bytes": "4MiB"}).link(8 << 20)
    content = patterns.content(8 << 20, 5)
    link.source.write(content)
    count = 40_000
    rng = np.random.default_rng(6)
    sources = rng.permutation(count).astype(np.uint64) * np.uint64(128)
    destinations = np.arange(count, dtype=np.uint64) * np.uint64(64)
    write(link, sources, destinations, 64).wait(30)
    assert carried(link, sources, destinations, np.full(count, 64, np.uint64), content)


@pytest.mark.parametrize("slots", [{"slots": 2, "slot_bytes": "64KiB"}, {"slots": 8, "slot_bytes": "64KiB"}])
def test_lanes_smaller_than_what_costs_are_measured_with(connect: Connect, slots: Mapping[str, object]) -> None:
    link = connect(relay={**slots, "direct_slice_bytes": "64KiB"}).link(NBYTES)
    content = patterns.content(NBYTES, 1)
    link.source.write(content)
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
    write(link, sources, destinations, BLOCK_BYTES).wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)


# ---- readiness, ends ----


class Stream:
    """As torch's and cuda-python's: with the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


class TorchStream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class TorchEvent:
    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


@pytest.mark.parametrize("kind", ["stream", "torch stream", "torch event"])
def test_the_source_is_read_once_the_stream_is_there(connect: Connect, control: Control, kind: str) -> None:
    pair = connect()
    link = pair.link(NBYTES)
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
    write(link, sources, destinations, BLOCK_BYTES).wait(20)  # all is prepared
    stream, event = pair.gpu.stream(), 0
    content = patterns.content(NBYTES, 9)
    staged = pair.gpu.host_alloc(NBYTES)
    np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(staged))[:] = content
    with control.held():
        with pair.gpu.current():
            (result,) = driver_module().cuMemcpyAsync(link.source.address, staged, NBYTES, stream)
            assert not result
        if kind == "torch event":
            event = pair.gpu.recorded(stream)
        ready: object = {"stream": Stream(stream), "torch stream": TorchStream(stream)}.get(kind, TorchEvent(event))
        moved = write(link, sources, destinations, BLOCK_BYTES, ready=ready)
        with pytest.raises(WaitTimeout):
            moved.wait(0.2)
        assert link.sender.counters()["slots"] == link.sender.counters()["slots"]
        assert not moved.source_done
    moved.wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)
    if event:
        with pair.gpu.current():
            driver_module().cuEventDestroy(event)


def test_host_event_and_default_stream(connect: Connect) -> None:
    link = connect().link(NBYTES)
    content = patterns.content(NBYTES, 9)
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
    event = HostEvent()
    moved = write(link, sources, destinations, BLOCK_BYTES, ready=event)
    link.source.write(content)
    assert not moved.done
    event.set()
    moved.wait(20)
    write(link, sources, destinations, BLOCK_BYTES, ready=Stream(0)).wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)


def test_what_ready_must_be(connect: Connect) -> None:
    pair = connect()
    link = pair.link(NBYTES)
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
    with pytest.raises(ArgumentError, match="ready is str; expected HostEvent, or a CUDA stream or event"):
        write(link, sources, destinations, BLOCK_BYTES, ready="now")
    wrong: tuple[Any, ...] = ("x", "7", 7.5, -1, 1 << 64, b"7", [])
    for handle in wrong:
        for name, ready in (("__cuda_stream__", Stream(handle)), ("cuda_stream", TorchStream(handle))):
            with pytest.raises(ArgumentError, match=f"of which {name} gives {re.escape(repr(handle))}; expected"):
                write(link, sources, destinations, BLOCK_BYTES, ready=ready)
    with pair.nodes[0].connect(1) as host_only:
        host = gpus.link(host_only, pair.receiver, gpus.make(host_only, NBYTES, "private"), link.destination)
        with pytest.raises(ArgumentError, match="has no GPU memory"):
            write(host, sources, destinations, BLOCK_BYTES, ready=Stream(0))


def test_source_done_only_once_it_is_copied(connect: Connect, control: Control) -> None:
    link = connect(copy=Copy.BATCH).link(NBYTES, destination="shared")
    sources, destinations = patterns.order(4, BLOCK_BYTES, 2)
    write(link, sources, destinations, BLOCK_BYTES).wait(20)
    slots = link.sender.counters()["slots"]
    with control.held():
        moved = write(link, sources, destinations, BLOCK_BYTES)
        until(lambda: link.sender.counters()["slots"] > slots, "the slot is enqueued")
        assert not moved.source_done
        with pytest.raises(WaitTimeout):
            moved.wait_source(0.1)
        with pytest.raises(Busy):
            link.source.region.unregister(0.1)
    moved.wait_source(20)
    moved.wait(20)
    link.source.region.unregister(10)


@pytest.mark.parametrize("how", ["cancel", "time-out", "abort"])
def test_an_early_end_in_the_middle_of_copies(connect: Connect, control: Control, how: str) -> None:
    link = connect().link(4 << 20, destination="shared")
    content = patterns.content(4 << 20, 1)
    link.source.write(content)
    sources, destinations = patterns.order(1024, 4096, 2)
    write(link, sources, destinations, 4096).wait(20)
    with control.held():
        moved = write(link, sources, destinations, 4096, tag=7, timeout=0.5 if how == "time-out" else 30)
        until(lambda: control.count("busy_streams") > 0, "copies are enqueued")
        if how == "cancel":
            moved.cancel(wait=False)
        elif how == "abort":
            with pytest.raises(WaitTimeout):
                moved.wait(0.1)
        else:
            time.sleep(0.6)
    if how == "abort":
        link.receiver.receiver.abort(7, 10)
    moved.wait_settled(20)
    assert (
        moved.result
        in {
            "cancel": (Result.CANCELLED, Result.OK),
            "time-out": (Result.TIMED_OUT, Result.UNSETTLED),
            "abort": (Result.ABORTED, Result.OK),
        }[how]
    )
    moved.wait_source(10)
    link.destination.write(np.zeros(4 << 20, np.uint8))
    again = patterns.content(4 << 20, 2)
    link.source.write(again)
    write(link, sources, destinations, 4096).wait(20)
    assert patterns.arrived(again, link.destination.read(), 1024, 4096, 2)
    link.source.region.unregister(10)


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_close_in_the_middle_of_copies(connect: Connect, driver: Driver, side: str) -> None:
    pair = connect()
    link = pair.link(4 << 20)
    sources, destinations = patterns.order(1024, 4096, 2)
    write(link, sources, destinations, 4096).wait(20)
    if driver.control is not None:
        driver.control.delay(300)
    moved = [write(link, sources, destinations, 4096, timeout=5) for _ in range(4)]
    (link.sender if side == "sender" else link.receiver).close()
    for transfer in moved:
        with pytest.raises(RelayError):
            transfer.wait(20)
    if driver.control is not None:
        driver.control.delay(0)
    node, card = (pair.nodes[0], pair.gpu) if side == "sender" else (pair.nodes[1], pair.other)
    with node.connect(gpu=card.ordinal) as successor:
        sender, receiver = (successor, pair.receiver) if side == "sender" else (pair.sender, successor)
        source = gpus.make(sender, NBYTES, "gpu", pair.gpu)
        fresh = gpus.link(sender, receiver, source, gpus.make(receiver, NBYTES, "gpu", pair.other))
        content = patterns.content(NBYTES, 1)
        fresh.source.write(content)
        sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 2)
        write(fresh, sources, destinations, BLOCK_BYTES).wait(20)
        assert patterns.arrived(content, fresh.destination.read(), BLOCKS, BLOCK_BYTES, 2)
