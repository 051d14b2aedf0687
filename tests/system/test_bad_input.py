"""Arguments that cannot work: one clear error each, before anything is sent, and the client goes on."""

from __future__ import annotations

import gc
import math
import mmap
import os
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import memory
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import (
    ArgumentError,
    Client,
    ConnectError,
    ErrorCode,
    GpuOptions,
    PageLayout,
    PeerError,
    RegionError,
    RelayError,
    Transfer,
    WaitTimeout,
)
from railrelay.client.regions import Offer, decode_offer

pytestmark = pytest.mark.system

NBYTES = 1 << 20


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), limit_s=300)
    yield nodes.pair((2, 1), limits={"regions_per_client": 8})
    nodes.close()


@pytest.fixture
def link(pair: tuple[Node, Node]) -> Iterator[Link]:
    """Both clients still work after the test."""
    with pair[0].connect() as sender, pair[1].connect() as receiver:
        made = memory.link(sender, receiver, NBYTES)
        yield made
        made.source.array[:64] = 7
        sender.write(made.remote, [made.source.address], [made.remote.address], 64).wait(30)
        assert (made.destination.array[:64] == 7).all()


def write(link: Link, sources: list[int], destinations: list[int], lengths: list[int]) -> RelayError:
    """Offsets in both regions; the error."""
    with pytest.raises(ArgumentError) as failure:
        link.sender.write(
            link.remote,
            [link.source.address + offset for offset in sources],
            [link.remote.address + offset for offset in destinations],
            lengths,
        )
    return failure.value


def test_a_source_in_no_region_is_named(link: Link) -> None:
    failure = write(link, [0, 1 << 40], [0, 4096], [4096, 4096])
    assert failure.code is ErrorCode.BAD_REGION
    assert f"block 1: source {link.source.address + (1 << 40):#x}" in failure.text


def test_a_destination_in_no_region_is_named(link: Link) -> None:
    failure = write(link, [0, 4096], [0, 1 << 40], [4096, 4096])
    assert failure.code is ErrorCode.BAD_REGION
    assert f"block 1: destination {link.remote.address + (1 << 40):#x}" in failure.text


@pytest.mark.parametrize(
    ("end", "source", "destination"), [("source", NBYTES - 100, 0), ("destination", 0, NBYTES - 100)]
)
def test_a_block_past_the_end_says_by_how_much(link: Link, end: str, source: int, destination: int) -> None:
    failure = write(link, [source], [destination], [101])
    assert failure.code is ErrorCode.OUT_OF_BOUNDS
    assert f"block 0: {end}" in failure.text
    assert "passes the end of its region by 1" in failure.text


def test_a_length_that_wraps_around_is_past_the_end(link: Link) -> None:
    assert write(link, [0], [0], [(1 << 63) - 1]).code is ErrorCode.OUT_OF_BOUNDS


def test_a_length_of_zero_is_named(link: Link) -> None:
    failure = write(link, [0, 4096, 8192], [0, 4096, 8192], [4096, 0, 4096])
    assert failure.code is ErrorCode.BAD_LENGTH
    assert "block 1: length 0" in failure.text


def test_a_negative_length_is_named(link: Link) -> None:
    failure = write(link, [0, 4096], [0, 4096], [4096, -1])
    assert failure.code in (ErrorCode.BAD_ARGUMENT, ErrorCode.BAD_LENGTH)
    assert "-1" in failure.text


def test_a_negative_address_is_named(link: Link) -> None:
    with pytest.raises(ArgumentError, match=r"sources\[1\] is -4096"):
        link.sender.write(link.remote, [link.source.address, -4096], [link.remote.address] * 2, 1)


@pytest.mark.parametrize(
    ("destinations", "lengths"),
    [
        ([0, 0], [4096, 4096]),
        ([0, 4095], [4096, 4096]),
        ([8192, 0], [4096, 8193]),
        ([1, 0], [1, 3]),
        ([0, NBYTES - 64, 100], [64, 64, NBYTES - 163]),
    ],
)
def test_overlapping_destinations_are_refused(link: Link, destinations: list[int], lengths: list[int]) -> None:
    failure = write(link, [0] * len(lengths), destinations, lengths)
    assert failure.code is ErrorCode.OVERLAP
    assert "overlap" in failure.text


def test_blocks_that_touch_do_not_overlap(link: Link) -> None:
    link.sender.write(
        link.remote,
        [link.source.address] * 3,
        [link.remote.address + offset for offset in (8193, 0, 8192)],
        [1, 8192, 1],
    ).wait(30)


def test_one_overlap_among_many_blocks_is_found(link: Link) -> None:
    destinations = np.arange(0, NBYTES, 64, dtype=np.uint64)
    destinations[777] = destinations[12345]
    failure = write(link, [0] * len(destinations), destinations.tolist(), [64] * len(destinations))
    assert failure.code is ErrorCode.OVERLAP


def test_no_blocks_are_no_transfer(link: Link) -> None:
    assert write(link, [], [], []).code in (ErrorCode.BAD_LENGTH, ErrorCode.BAD_ARGUMENT)


def test_arrays_of_different_lengths_are_counted(link: Link) -> None:
    with pytest.raises(ArgumentError, match="2 sources, 1 destinations, 2 lengths"):
        link.sender.write(link.remote, [1, 2], [3], [4, 5])


def test_arrays_that_are_not_integers_are_refused(link: Link) -> None:
    for values in ([0.5], [["1"]], "text"):
        with pytest.raises(ArgumentError):
            link.sender.write(link.remote, values, [link.remote.address], [1])


def write_pages(link: Link, timeout: Any) -> Transfer:  # noqa: ANN401
    layout, to = (PageLayout.strided(of.address, 1, 4096, 4096, 4096) for of in (link.source, link.remote))
    return link.sender.write_pages(link.remote, layout, [0], to, [0], timeout=timeout)


LIMITED: dict[str, Callable[[Link, Any], object]] = {  # all that ends a wait, or a transfer
    "connect": lambda link, timeout: Client.connect(link.sender.attachment.wish.path, rank=0, timeout=timeout),
    "write": lambda link, timeout: link.sender.write(
        link.remote, [link.source.address], [link.remote.address], 64, timeout=timeout
    ),
    "write with arrays": lambda link, timeout: link.sender.write(
        link.remote,
        np.array([link.source.address], np.uint64),
        np.array([link.remote.address], np.uint64),
        64,
        timeout=timeout,
    ),
    "write_pages": write_pages,
    "wait_attached": lambda link, timeout: link.sender.wait_attached(timeout),
    "peer": lambda link, timeout: link.sender.peer(link.receiver.session, timeout),
    "open": lambda link, timeout: link.sender.open(link.destination.offer(), timeout),
    "peer.open": lambda link, timeout: link.remote.peer.open(link.destination.offer(), timeout),
    "unregister": lambda link, timeout: link.sender.register(np.zeros(64, np.uint8)).unregister(timeout),
    "close": lambda link, timeout: link.sender.alloc(64).close(timeout),
    "wait": lambda link, timeout: written(link).wait(timeout),
    "wait_source": lambda link, timeout: written(link).wait_source(timeout),
    "wait_settled": lambda link, timeout: written(link).wait_settled(timeout),
    "cancel": lambda link, timeout: written(link).cancel(timeout=timeout),
    "cancel at once": lambda link, timeout: written(link).cancel(wait=False, timeout=timeout),
    "abort": lambda link, timeout: link.receiver.receiver.abort(5, timeout),
    "notifications": lambda link, timeout: notified(link).receiver.notifications.get(timeout),
}
WAITING_FOR_EVER = ("wait", "wait_source", "notifications")  # with None
MORE_THAN_0 = ("connect", "write", "write with arrays", "write_pages")


def written(link: Link) -> Transfer:
    return link.sender.write(link.remote, [link.source.address], [link.remote.address], 64)


def notified(link: Link) -> Client:
    link.sender.write(link.remote, [link.source.address], [link.remote.address], 64, notify=b"").wait(30)
    return link.receiver


@pytest.mark.parametrize(
    ("call", "timeout"),
    [
        (call, timeout)
        for call in LIMITED
        for timeout in (0, -1, math.nan, -math.inf, None, "5", [1.0, 2.0], 1j)
        if not (timeout is None and call in WAITING_FOR_EVER) and not (timeout == 0 and call not in MORE_THAN_0)
    ],
)
def test_a_timeout_that_is_none_is_refused_at_once(link: Link, call: str, timeout: object) -> None:
    expected = "a number above 0" if call in MORE_THAN_0 else "a number, 0 or more"
    with pytest.raises(ArgumentError, match=re.escape(f"timeout of {timeout!r} s; expected {expected}")):
        LIMITED[call](link, timeout)


@pytest.mark.parametrize("call", LIMITED)
def test_a_call_whose_timeout_is_more_than_a_life_does_what_it_does(link: Link, call: str) -> None:
    for timeout in (math.inf, 1 << 70, np.float32(5)):
        outcome = LIMITED[call](link, timeout)
        if isinstance(outcome, Client):
            outcome.close()


@pytest.mark.parametrize("timeout", [float("inf"), 1e30, 1.84e10])
def test_a_timeout_of_more_than_a_life_is_that_long(link: Link, timeout: float) -> None:
    """Also where the end in nanoseconds would not fit the clock."""
    moved = link.sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES, timeout=timeout)
    moved.wait(timeout)
    moved.wait_settled(timeout)


@pytest.mark.parametrize(
    "call",
    [
        lambda link: link.receiver.receiver.abort(True, 1.0),
        lambda link: link.sender.register(np.zeros(4096, np.uint8), rail=0.0),
        lambda link: link.sender.register(np.zeros(4096, np.uint8), rail=True),
        lambda link: link.sender.alloc(4096, rail=np.int64(0)),
        lambda link: link.sender.write(
            link.remote, [link.source.address], [link.remote.address], 64, tag=True, notify=b""
        ),
    ],
)
def test_an_argument_of_another_type_ends_nothing_else(link: Link, call: Callable[[Link], object]) -> None:
    """The daemon takes what is no request for a broken client, and would end all of its transfers."""
    with pytest.raises(ArgumentError, match="cannot be asked for"):
        call(link)


def test_pages_past_the_end_are_named(link: Link) -> None:
    source = PageLayout.strided(link.source.address, 2, 4096, 8192, 4096)
    destination = PageLayout.strided(link.remote.address, 2, 4096, 8192, 4096)
    for from_pages, to_pages, end in (([0, 128], [0, 1], "source"), ([0, 1], [5, 128], "destination")):
        with pytest.raises(ArgumentError, match=f"row 0: {end} page 128") as failure:
            link.sender.write_pages(link.remote, source, from_pages, destination, to_pages)
        assert failure.value.code is ErrorCode.OUT_OF_BOUNDS
    with pytest.raises(ArgumentError, match=r"source_pages\[1\] is -1"):
        link.sender.write_pages(link.remote, source, [0, -1], destination, [0, 1])


def test_a_page_number_that_wraps_around_is_past_the_end(link: Link) -> None:
    layout = PageLayout.strided(link.source.address, 1, 4096, 1 << 40, 4096)
    to = PageLayout.strided(link.remote.address, 1, 4096, 4096, 4096)
    with pytest.raises(ArgumentError) as failure:
        link.sender.write_pages(link.remote, layout, [1 << 24], to, [0])
    assert failure.value.code in (ErrorCode.OUT_OF_BOUNDS, ErrorCode.BAD_REGION)


# Row stride and page stride of destinations with two rows of pieces of 4096 bytes.
PAGE_OF_ROWS, ROW_OF_PAGES, INTERLEAVED = (4096, 8192), (8 * 4096, 4096), (3 * 4096, 8192)


@pytest.mark.parametrize(("row_stride", "page_stride"), [PAGE_OF_ROWS, ROW_OF_PAGES, INTERLEAVED])
def test_the_same_destination_page_twice_overlaps(link: Link, row_stride: int, page_stride: int) -> None:
    source = PageLayout.strided(link.source.address, 2, 4096, 8192, 4096)
    destination = PageLayout.strided(link.remote.address, 2, row_stride, page_stride, 4096)
    with pytest.raises(ArgumentError) as failure:
        link.sender.write_pages(link.remote, source, [1, 2, 3], destination, [4, 5, 4])
    assert failure.value.code is ErrorCode.OVERLAP
    link.sender.write_pages(link.remote, source, [1, 2, 3], destination, [4, 5, 6]).wait(30)


@pytest.mark.parametrize(
    ("row_stride", "page_stride", "piece", "pages"),
    [
        (8192, 8192, 4096, [0, 1]),  # row 1 of page 0 is row 0 of page 1
        (0, 8192, 4096, [0, 1]),  # both rows are one
        (4096, 8192, 4097, [0, 1]),  # longer than the distance of the rows
        (4 * 4096, 4096, 4097, [0, 1]),  # longer than the distance of the pages
        (2 * 4096, 4096, 4096, [0, 1, 2]),  # page 2 of row 0 is page 0 of row 1
    ],
)
def test_pieces_of_different_rows_overlap(
    link: Link, row_stride: int, page_stride: int, piece: int, pages: list[int]
) -> None:
    source = PageLayout.strided(link.source.address, 2, 3 << 16, 1 << 16, piece)
    destination = PageLayout.strided(link.remote.address, 2, row_stride, page_stride, piece)
    with pytest.raises(ArgumentError) as failure:
        link.sender.write_pages(link.remote, source, range(len(pages)), destination, pages)
    assert failure.value.code is ErrorCode.OVERLAP


def test_layouts_that_do_not_fit_each_other_are_refused(link: Link) -> None:
    two = PageLayout.strided(link.source.address, 2, 4096, 8192, 4096)
    one = PageLayout.strided(link.remote.address, 1, 4096, 8192, 4096)
    with pytest.raises(ArgumentError, match="2 rows of 4096 bytes, destination layout 1 of 4096"):
        link.sender.write_pages(link.remote, two, [0], one, [0])
    with pytest.raises(ArgumentError, match="2 source_pages, 1 destination_pages"):
        link.sender.write_pages(link.remote, two, [0, 1], two, [0])


def test_reading_from_a_peer_is_refused(link: Link) -> None:
    with pytest.raises(RelayError, match="does not read") as failure:
        link.remote.peer.read()
    assert failure.value.code is ErrorCode.NOT_SUPPORTED


def test_what_is_no_memory_of_this_process_is_refused(link: Link) -> None:
    """Before the first use of it ends the process."""
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as memory:
        start = np.frombuffer(memory, np.uint8).ctypes.data
        read_only = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
        never = np.frombuffer(read_only, np.uint8).ctypes.data
        for address, nbytes in ((0x7F0000000000, 4096), (start, 1 << 40), (never, mmap.PAGESIZE)):
            with pytest.raises(ArgumentError, match="memory of this process"):
                link.sender.register((address, nbytes))
        link.sender.register((never, mmap.PAGESIZE), receive=False).unregister()
        link.sender.register((start, 3 * mmap.PAGESIZE)).unregister()


@pytest.mark.parametrize("span", [(4096.5, 64), (4096, 64.9), ("4096", 64), (4096,), (4096, 64, 1)], ids=str)
def test_a_pair_that_is_not_two_integers_is_refused(link: Link, span: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError) as failure:
        link.sender.register(span)
    assert failure.value.text == f"{span!r}: expected (address, bytes), two integers"


@pytest.mark.parametrize("span", [(0, 64), (4096, 0), (-4096, 64), ((1 << 64) - 64, 65)])
def test_a_span_that_no_address_space_has_is_refused(link: Link, span: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="expected an address and a size above 0, 2\\*\\*64 at most together"):
        link.sender.register(span)


def test_arrays_of_python_objects_are_refused(link: Link) -> None:
    kinds: tuple[Any, ...] = (object, [("key", "u8"), ("value", object)])
    for dtype in kinds:
        for receive in (True, False):
            with pytest.raises(ArgumentError, match="array of Python objects: its bytes are pointers"):
                link.sender.register(np.empty(64, dtype), receive=receive)


@pytest.mark.parametrize(
    "options",
    [{"copy": {}}, {"thread_blocks": 2.5}, {"thread_blocks": "4"}, {"nic_gbit": "4"}, {"nic_gbit": math.inf},
     {"nic_gbit": math.nan}, {"nic_gbit": None}, {"thread_blocks": 0}],
    ids=str,
)  # fmt: skip
def test_gpu_options_of_wrong_types_are_refused_when_they_are_made(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="nic_gbit a number above 0 and at most 10000, thread_blocks a whole"):
        GpuOptions(**options)


def test_gpu_options_that_are_none_are_refused_before_connecting() -> None:
    options: Any = {"copy": "batch"}
    with pytest.raises(ArgumentError, match=r"gpu_options {'copy': 'batch'}: expected GpuOptions\(copy="):
        Client.connect("/none/such", rank=0, gpu_options=options)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"feeder_cpu": "x"}, "feeder_cpu 'x': expected an integer"),
        ({"feeder_cpu": 1.0}, "feeder_cpu 1.0: expected an integer"),
        ({"feeder_cpu": -2}, "feeder_cpu -2; expected -1, or 0 to"),
        ({"feeder_cpu": 1 << 20}, "feeder_cpu 1048576; expected -1, or 0 to"),
        ({"rank": "0"}, "rank '0': expected an integer"),
        ({"rank": None}, "rank None: expected an integer"),
        ({"name": b"prefill"}, "name b'prefill': expected text"),
        ({"socket": 7}, "socket 7"),
        ({"socket": None, "instance": 7}, "instance 7"),
    ],
)
def test_what_no_client_can_be_asked_for_is_refused_before_a_daemon_is(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(text)):
        Client.connect(**{"socket": "/none/such", "rank": 0, **arguments})


def test_registering_what_overlaps_a_region_is_refused(link: Link) -> None:
    with pytest.raises(RelayError) as failure:
        link.sender.register(link.source.array[4096:8192])
    assert failure.value.code is ErrorCode.OVERLAP
    assert f"{link.source.address + 4096:#x}" in failure.value.text


def test_registering_on_a_rail_that_is_not_there_is_refused(link: Link) -> None:
    with pytest.raises(ArgumentError, match="rail 2; this node has 0 to 1"):
        link.sender.register(np.zeros(4096, np.uint8), rail=2)


def test_more_regions_than_allowed_name_the_limit(link: Link) -> None:
    regions = [link.sender.register(np.zeros(4096, np.uint8), receive=False) for _ in range(7)]
    with pytest.raises(RegionError, match=r"raise limits\.regions_per_client") as failure:
        link.sender.register(np.zeros(4096, np.uint8), receive=False)
    assert failure.value.code is ErrorCode.LIMIT
    for region in regions:
        region.unregister()
    link.sender.register(np.zeros(4096, np.uint8), receive=False).unregister()


@pytest.mark.parametrize("kind", memory.KINDS)
def test_registered_memory_lives_on_though_nobody_holds_it(
    link: Link, pair: tuple[Node, Node], kind: memory.Kind
) -> None:
    """Peers may write it until it is unregistered or its client closed."""
    with pair[1].connect(1) as receiver:
        forgotten = memory.make(receiver, 65536, kind)
        watched, offer = weakref.ref(forgotten.array), forgotten.offer()
        del forgotten
        gc.collect()
        remote = link.sender.open(offer)
        link.sender.write(remote, [link.source.address], [remote.address], 65536).wait(30)
        remote.close()
        assert watched() is not None
    gc.collect()
    assert watched() is None


def test_shared_memory_of_no_size_is_refused(link: Link) -> None:
    for nbytes in (0, -1):
        with pytest.raises(ArgumentError, match="expected 1 or more"):
            link.sender.alloc(nbytes)


def test_more_shared_memory_than_there_is_is_refused(link: Link) -> None:
    with pytest.raises(RegionError, match=f"alloc of {1 << 50} bytes") as failure:
        link.sender.alloc(1 << 50)
    assert failure.value.code is ErrorCode.NO_MEMORY


def test_an_offer_that_nobody_made_is_refused(link: Link) -> None:
    good = decode_offer(link.destination.offer())
    forged = Offer(good.session, bytes(16), good.address, good.nbytes, good.rail)
    with pytest.raises(RegionError) as failure:
        link.sender.open(msgspec.msgpack.encode(forged))
    assert failure.value.code is ErrorCode.BAD_CAPABILITY
    with pytest.raises(ArgumentError, match="not an offer"):
        link.sender.open(b"garbage")


def test_an_offer_of_memory_that_was_unregistered_is_refused(link: Link) -> None:
    region = link.receiver.register(np.zeros(4096, np.uint8))
    offer = region.offer()
    region.unregister()
    with pytest.raises(RegionError) as failure:
        link.sender.open(offer)
    assert failure.value.code is ErrorCode.BAD_CAPABILITY


def test_memory_that_is_only_a_source_is_no_destination(link: Link) -> None:
    region = link.receiver.register(np.zeros(4096, np.uint8), receive=False)
    with pytest.raises(RegionError, match="source only"):
        link.sender.open(region.offer())


@pytest.mark.parametrize("session", ["", "host", "host:", ":1", "host:0", "host:65536", "::1:4000", "[::1]", "host:x"])
def test_a_session_that_is_none_is_refused(link: Link, session: str) -> None:
    with pytest.raises(ArgumentError, match="session"):
        link.sender.peer(session)


def test_a_port_where_nobody_listens_is_unreachable(link: Link) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        session = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PeerError, match=session) as failure:
            link.sender.peer(session, timeout=0.3)
    assert failure.value.code is ErrorCode.PEER_UNREACHABLE


def test_a_peer_that_never_answers_is_unreachable_after_the_time_out(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        session = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises((PeerError, WaitTimeout), match=session) as failure:
            link.sender.peer(session, timeout=0.3)
        assert failure.value.code is ErrorCode.PEER_UNREACHABLE


def test_a_peer_that_speaks_something_else_is_named(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        session = f"127.0.0.1:{other.getsockname()[1]}"
        other.settimeout(10)
        failures: list[RelayError] = []

        def connect() -> None:
            with pytest.raises(RelayError) as failure:
                link.sender.peer(session, timeout=1)
            failures.append(failure.value)

        thread = threading.Thread(target=connect)
        thread.start()
        accepted, _ = other.accept()
        with accepted:
            accepted.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            thread.join()
    assert session in failures[0].text


def test_a_rank_without_a_rail_is_refused(pair: tuple[Node, Node]) -> None:
    for rank in (-1, 1 << 20):
        with pytest.raises(ConnectError) as failure:
            pair[0].connect(rank)
        assert failure.value.code is ErrorCode.BAD_RANK


# ---- limits ----


def test_more_open_regions_than_the_peer_allows_name_its_limit(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(limits={"max_exports": 2})
    with prefill.connect() as sender, decode.connect() as receiver:
        regions = [memory.make(receiver, 4096) for _ in range(3)]
        offers = [region.offer() for region in regions]
        remotes = [sender.open(offer) for offer in offers[:2]]
        with pytest.raises(RelayError, match=r"has 2 regions open;.* raise limits\.max_exports there") as failure:
            sender.open(offers[2])
        assert failure.value.code is ErrorCode.LIMIT
        remotes[0].close()
        until(lambda: opens(sender, offers[2]), "the handle is free")


def opens(client: Client, offer: bytes) -> bool:
    try:
        client.open(offer)
    except RelayError as failure:
        assert failure.code is ErrorCode.LIMIT  # noqa: PT017
        return False
    return True


def test_more_remote_regions_than_allowed_name_the_limit(nodes: Nodes) -> None:
    node = nodes.start(limits={"remotes_per_client": 2})
    with node.connect() as client:
        regions = [memory.make(client, 4096) for _ in range(3)]
        offers = [region.offer() for region in regions]
        for offer in offers[:2]:
            client.open(offer)
        with pytest.raises(RelayError, match=r"raise limits\.remotes_per_client"):
            client.open(offers[2])


def test_more_peers_than_allowed_name_the_limit(nodes: Nodes) -> None:
    node, other = nodes.start(limits={"max_peers": 1}), nodes.start(limits={"max_peers": 1})
    with node.connect() as client:
        client.peer(other.session)
        with pytest.raises(RelayError, match=r"raise limits\.max_peers") as failure:
            client.peer(node.session)
        assert failure.value.code is ErrorCode.LIMIT
        with node.connect(1) as second:
            second.peer(other.session)


def test_more_senders_than_the_peer_serves_name_its_limit(nodes: Nodes) -> None:
    decode = nodes.start(limits={"max_peers": 1})
    first, second = nodes.pair()
    with first.connect() as one, second.connect() as two:
        one.peer(decode.session)
        with pytest.raises(RelayError, match=r"serves 1 senders already; raise limits\.max_peers there"):
            two.peer(decode.session)


def test_memory_for_a_rail_that_is_not_there_is_not_made(nodes: Nodes) -> None:
    with nodes.start().connect() as client:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ArgumentError, match="rail 99"):
            client.alloc(4096, rail=99)
        assert len(os.listdir("/proc/self/fd")) == len(before)
