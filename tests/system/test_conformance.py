"""What any NIC, route and kind of memory must do: all bytes where they belong, none elsewhere, and news after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from _pytest.mark.structures import ParameterSet
from helpers import memory, patterns, rail_devices
from helpers.memory import KINDS, Kind, Memory
from helpers.nodes import Node, Nodes

from railrelay.client import Client, PageLayout, RemoteRegion, Result, Route

pytestmark = pytest.mark.system

RAILS = ((1, 1), (4, 4), (4, 2), (2, 3))
SLOW_RAILS = ((1, 1), (2, 3))  # for the emulated machine that has real verbs
EMULATED = (1, 4)  # rails of one node, which sends to itself
SOURCE_BYTES = 1 << 20
DESTINATION_BYTES = 1 << 20  # a rail
LENGTHS = [1, 3, 64, 64, 255, 256, 257, 4096, 4096, 4097, 65536, 100_001, 300_000, 262_144]  # a slot has 262,144


@dataclass
class Pair:
    prefill: Node
    decode: Node
    destination: Kind  # of the memory that is written


Case = tuple[str, int | tuple[int, int], Kind]


def _case(nic: str, rails: int | tuple[int, int], kind: Kind) -> ParameterSet:
    ends = str(rails) if isinstance(rails, int) else f"{rails[0]}to{rails[1]}"
    return pytest.param((nic, rails, kind), id=f"{ends}-{nic}-{kind}", marks=rail_devices.marks(nic))


CASES = [
    *(_case("tcp", *case) for case in product(RAILS, KINDS)),
    *(_case("verbs", *case) for case in product(RAILS, KINDS)),
    *(_case("emulated", rails, "shared") for rails in EMULATED),  # it refuses private destinations
]
if rail_devices.real():  # the others are tested elsewhere
    CASES = [_case("verbs", *case) for case in product(SLOW_RAILS, KINDS)]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    case: Case = request.param
    nic, rails, destination = case
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), nic=nic, limit_s=400 * rail_devices.slowness())
    if isinstance(rails, int):
        node = nodes.start(rails, rail={"nic": "emulated", "rate_gbit": 100})
        yield Pair(node, node, destination)
    else:
        yield Pair(*nodes.pair(rails), destination)
    nodes.close()


@dataclass
class Path:
    """One sender and one receiver with a region on each of its rails."""

    sender: Client
    receiver: Client
    source: Memory
    destinations: list[Memory]
    remotes: list[RemoteRegion]


@pytest.fixture(scope="module", params=product(Route, KINDS), ids="-".join)
def path(request: pytest.FixtureRequest, pair: Pair) -> Iterator[Path]:
    """On every route, from and to both kinds of memory. Ranks whose own rail is not the first."""
    route, source_kind = request.param
    with pair.prefill.connect(1, route=route, local=False) as sender, pair.decode.connect(1) as receiver:
        source = memory.make(sender, SOURCE_BYTES, source_kind)
        source.array[:] = patterns.content(SOURCE_BYTES, 1)
        destinations = [
            memory.make(receiver, DESTINATION_BYTES, pair.destination, rail) for rail in range(receiver.rails)
        ]
        remotes = [sender.open(destination.offer()) for destination in destinations]
        for remote in remotes:  # from now on there are lanes and bounce memory, which tests leave as they are
            sender.write(remote, [source.address], [remote.address], 4096).wait(30)
        yield Path(sender, receiver, source, destinations, remotes)


def test_blocks_of_any_length_land_where_they_belong_and_nowhere_else(path: Path) -> None:
    blocks = [patterns.mixed(SOURCE_BYTES, DESTINATION_BYTES, LENGTHS, seed) for seed in range(len(path.destinations))]
    expected = [
        patterns.after(path.source.array, destination.array, *three)
        for destination, three in zip(path.destinations, blocks, strict=True)
    ]
    rng = np.random.default_rng(5)
    sources = np.concatenate([three[0] + np.uint64(path.source.address) for three in blocks])
    destinations = np.concatenate(
        [three[1] + np.uint64(remote.address) for three, remote in zip(blocks, path.remotes, strict=True)]
    )
    lengths = np.concatenate([three[2] for three in blocks])
    shuffled = rng.permutation(len(lengths))
    transfer = path.sender.write(path.remotes[0], sources[shuffled], destinations[shuffled], lengths[shuffled])
    transfer.wait(30)
    assert (transfer.result, transfer.bytes) == (Result.OK, int(lengths.sum()))
    assert transfer.settled
    assert transfer.source_done
    for destination, wanted in zip(path.destinations, expected, strict=True):
        assert (destination.array == wanted).all()


def test_pages_of_some_layers_and_heads_land_between_the_others(path: Path) -> None:
    layers, heads, page_tokens, head_bytes, pages = 6, 4, 2, 96, 40
    row = page_tokens * heads * head_bytes
    page_stride = layers * row
    source = PageLayout.strided(path.source.address, layers, row, page_stride, row)
    destination = PageLayout.strided(path.remotes[-1].address, layers, row, page_stride, row)
    rng = np.random.default_rng(8)
    taken, put = rng.permutation(pages)[:25], rng.permutation(pages)[:25]
    some_layers, tokens = slice(1, 4), page_tokens
    transfer = path.sender.write_pages(
        path.remotes[-1],
        source.take(some_layers).split(tokens).heads(1, 2, heads),
        taken,
        destination.take(some_layers).split(tokens).heads(2, 2, heads),
        put,
    )
    expected = path.destinations[-1].array.copy()
    shape = (pages, layers, tokens, heads, head_bytes)
    size = pages * page_stride
    from_pages, to_pages = path.source.array[:size].reshape(shape), expected[:size].reshape(shape)
    to_pages[put, some_layers, :, 2:4] = from_pages[taken, some_layers, :, 1:3]
    transfer.wait(30)
    assert (path.destinations[-1].array == expected).all()
    assert transfer.bytes == 25 * 3 * tokens * 2 * head_bytes


def test_the_notification_comes_once_all_rails_have_placed_everything(path: Path) -> None:
    blocks, block_bytes = SOURCE_BYTES // 8192, 8192
    orders = [patterns.order(blocks, block_bytes, seed) for seed in range(len(path.remotes))]
    transfer = path.sender.write(
        path.remotes[0],
        np.concatenate([taken for taken, _ in orders]) + np.uint64(path.source.address),
        np.concatenate(
            [put + np.uint64(remote.address) for (_, put), remote in zip(orders, path.remotes, strict=True)]
        ),
        block_bytes,
        tag="request 7",
        notify=b"all of it",
    )
    note = path.receiver.receiver.notifications.get(30)
    for seed, destination in enumerate(path.destinations):
        assert patterns.arrived(path.source.array, destination.array, blocks, block_bytes, seed)
    assert (note.payload, note.session) == (b"all of it", path.sender.session)
    transfer.wait(30)


def test_large_and_64_byte_transfers_under_way_at_once_all_arrive(path: Path) -> None:
    target, to = path.remotes[0], path.destinations[0]
    quarter, block_bytes = DESTINATION_BYTES // 4, 4096
    orders = [patterns.order(quarter // block_bytes - 1, block_bytes, seed) for seed in range(4)]
    base, start = np.uint64(target.address), np.uint64(path.source.address)
    moving = [
        path.sender.write(target, taken + start, put + np.uint64(at * quarter) + base, block_bytes)
        for at, (taken, put) in enumerate(orders)
    ]
    ends = [(at + 1) * quarter - 64 for at in range(4)]
    moving += [path.sender.write(target, [path.source.address + end], [target.address + end], 64) for end in ends]
    for transfer in reversed(moving):
        transfer.wait(30)
    for at, end in enumerate(ends):
        part = to.array[at * quarter :]
        assert patterns.arrived(path.source.array, part, quarter // block_bytes - 1, block_bytes, at)
        assert (to.array[end : end + 64] == path.source.array[end : end + 64]).all()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_node_can_send_to_itself(pair: Pair, kind: Kind, local: bool) -> None:
    with pair.prefill.connect(0, local=local) as sender, pair.prefill.connect(2) as receiver:
        link = memory.link(sender, receiver, SOURCE_BYTES, source=kind, destination=pair.destination)
        link.source.array[:] = patterns.content(SOURCE_BYTES, 2)
        taken, put = patterns.order(256, 4096, 1)
        sender.write(
            link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), 4096
        ).wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, 256, 4096, 1)


@pytest.mark.parametrize("local", [False, True])
def test_an_engine_can_send_to_itself(pair: Pair, local: bool) -> None:
    with pair.prefill.connect(0, local=local) as client:
        link = memory.link(client, client, 65536)
        link.source.array[:] = patterns.content(65536, 2)
        client.write(link.remote, [link.source.address], [link.remote.address], 65536).wait(30)
        assert (link.destination.array == link.source.array).all()
