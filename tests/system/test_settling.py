"""Early ends: time-outs, cancel, abort by either side, the fence. Once a transfer has settled no byte of it lands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import memory, patterns, rail_devices
from helpers.engines import EngineError, Engines
from helpers.memory import KINDS, Kind, Link
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import (
    Busy,
    Client,
    HostEvent,
    RegionError,
    Result,
    Route,
    Transfer,
    TransferError,
    Unsettled,
    WaitTimeout,
)

pytestmark = [pytest.mark.system, rail_devices.every_nic()]

NBYTES = (16 if rail_devices.real() else 32) << 20  # much more than sockets and slots hold
BLOCK = 16384
TAG = 77
ROUTES = (Route.RELAY, Route.DIRECT) if rail_devices.real() else tuple(Route)


@dataclass
class Pair:
    prefill: Node
    decode: Node
    sender: Client
    receiver: Client

    def link(self, *, source: Kind = "shared", destination: Kind = "shared", nbytes: int = NBYTES) -> Link:
        made = memory.link(self.sender, self.receiver, nbytes, source=source, destination=destination)
        made.source.array[:] = patterns.content(nbytes, 1)
        return made


@pytest.fixture
def pair(nodes: Nodes) -> Iterator[Pair]:
    prefill, decode = nodes.pair()
    with prefill.connect(name="prefill") as sender, decode.connect(name="decode") as receiver:
        yield Pair(prefill, decode, sender, receiver)


def send(
    link: Link, *, seed: int = 1, tag: int = TAG, timeout: float = 30.0, ready: HostEvent | None = None
) -> Transfer:
    taken, put = patterns.order(link.source.array.size // BLOCK, BLOCK, seed)
    return link.sender.write(
        link.remote,
        taken + np.uint64(link.source.address),
        put + np.uint64(link.remote.address),
        BLOCK,
        tag=tag,
        timeout=timeout,
        ready=ready,
    )


def warm(link: Link) -> None:
    """From now on there are connections for it."""
    send(link, seed=9, tag=TAG + 9).wait(30)
    link.destination.array[:] = 0


def begun(link: Link) -> None:
    until(lambda: bool(link.destination.array[::BLOCK].any()), "the first bytes land")


def still_right(link: Link) -> None:
    """A further transfer of everything works."""
    send(link, seed=2, tag=TAG + 1).wait(30)
    assert patterns.arrived(link.source.array, link.destination.array, link.source.array.size // BLOCK, BLOCK, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_after_cancel_the_pages_hold_what_is_written_next(nodes: Nodes, kind: Kind, route: Route) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(route=route) as sender, decode.connect() as receiver:
        link = Pair(prefill, decode, sender, receiver).link(source=kind, destination=kind)
        transfer = send(link)
        begun(link)
        transfer.cancel()
        assert transfer.settled
        link.destination.array[:] = 0
        still_right(link)
        assert transfer.result in (Result.CANCELLED, Result.OK)
        assert transfer.source_done
        if transfer.result is Result.CANCELLED:
            with pytest.raises(TransferError, match="cancelled by its owner"):
                transfer.wait(1)


def test_cancel_twice_and_after_the_end_does_nothing(pair: Pair) -> None:
    link = pair.link()
    transfer = send(link)
    transfer.cancel()
    transfer.cancel()
    good = send(link, seed=3)
    good.wait(30)
    good.cancel()
    assert good.result is Result.OK


def test_a_transfer_whose_event_never_comes_can_be_cancelled(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    event = HostEvent()
    transfer = send(link, ready=event)
    with pytest.raises(WaitTimeout, match="still runs"):
        transfer.wait(0.1)
    transfer.cancel()
    assert transfer.result is Result.CANCELLED
    assert not link.destination.array.any()
    event.set()
    still_right(link)


def test_no_source_byte_is_read_before_the_event(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    final = patterns.content(1 << 20, 9)
    event = HostEvent()
    transfer = send(link, ready=event)
    with pytest.raises(WaitTimeout):
        transfer.wait(0.1)
    assert not link.destination.array.any()
    link.source.array[:] = final
    event.set()
    transfer.wait(30)
    assert patterns.arrived(final, link.destination.array, (1 << 20) // BLOCK, BLOCK, 1)


def test_a_timeout_ends_a_transfer_that_waits_for_its_event(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    begin = time.monotonic()
    transfer = send(link, ready=HostEvent(), timeout=0.3)
    with pytest.raises(TransferError, match="timed out") as failure:
        transfer.wait(30)
    assert failure.value.result is Result.TIMED_OUT
    assert time.monotonic() - begin >= 0.3
    assert transfer.settled
    still_right(link)


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_stops_reading_leaves_the_transfer_unsettled_until_it_goes_on(pair: Pair, kind: Kind) -> None:
    link = pair.link(source=kind)
    warm(link)
    with pair.decode.paused():
        transfer = send(link, timeout=0.5)
        with pytest.raises(Unsettled, match="do not reuse its pages"):
            transfer.wait(30)
        assert transfer.result is Result.UNSETTLED
        assert not transfer.settled
        with pytest.raises(Unsettled):
            transfer.wait_settled(0.2)
        with pytest.raises(Unsettled):
            transfer.cancel(timeout=0.2)
    transfer.wait_settled(20)
    assert transfer.settled
    link.destination.array[:] = 0
    with pytest.raises(TransferError, match="has settled since"):
        transfer.wait(0)
    still_right(link)


def test_a_peer_that_stops_before_its_rails_are_connected_is_a_rail_that_is_down(pair: Pair) -> None:
    link = pair.link()
    with pair.decode.paused():
        transfer = send(link)
        with pytest.raises(TransferError, match="no connection could be made on the rail") as failure:
            transfer.wait(30)
        assert failure.value.result is Result.RAIL_DOWN
        assert transfer.settled
    assert any(error["code"] == "rail_down" for error in pair.prefill.errors())
    still_right(link)


def test_a_peer_that_stops_for_a_moment_costs_only_time(pair: Pair) -> None:
    link = pair.link()
    warm(link)
    with pair.decode.paused():
        transfer = send(link)
        with pytest.raises(WaitTimeout):
            transfer.wait(0.3)
    transfer.wait(30)
    assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 1)


def test_a_stopped_peer_holds_up_nobody_elses_transfers(pair: Pair, nodes: Nodes) -> None:
    other = nodes.start()
    stuck = pair.link()
    warm(stuck)
    with other.connect() as receiver:
        moving = memory.link(pair.sender, receiver, 1 << 20)
        moving.source.array[:] = patterns.content(1 << 20, 4)
        with pair.decode.paused():
            blocked = send(stuck, timeout=60)
            with pytest.raises(WaitTimeout):
                blocked.wait(0.3)
            for seed in range(5):
                send(moving, seed=seed).wait(10)
            assert patterns.arrived(moving.source.array, moving.destination.array, (1 << 20) // BLOCK, BLOCK, 4)
        blocked.wait(30)


def test_a_stopped_engine_with_private_memory_holds_up_nobody_elses_transfers(pair: Pair, engines: Engines) -> None:
    slow = engines.start(pair.decode, rank=1)
    stuck = pair.sender.open(bytes.fromhex(slow.ask("memory", name="pages", nbytes=NBYTES, kind="private")))
    link = pair.link()
    warm(link)
    taken, put = patterns.order(NBYTES // BLOCK, BLOCK, 1)
    with slow.paused():
        blocked = pair.sender.write(
            stuck, taken + np.uint64(link.source.address), put + np.uint64(stuck.address), BLOCK, timeout=1.0
        )
        for seed in range(5):
            send(link, seed=seed).wait(10)
        assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 4)
        with pytest.raises(TransferError):
            blocked.wait(20)
        send(link, seed=6).wait(10)
        assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 6)
    blocked.wait_settled(20)


def test_a_stopped_engine_that_transfers_are_given_up_to_holds_up_nobody_else(pair: Pair, engines: Engines) -> None:
    """Many more of them than frames that a connection may have without an answer."""
    slow = engines.start(pair.decode, rank=1)
    offer = bytes.fromhex(slow.ask("memory", name="pages", nbytes=1 << 20, kind="private"))
    links = [pair.link(destination=kind, nbytes=1 << 20) for kind in KINDS]
    for link in links:
        warm(link)
    with pair.prefill.connect(name="impatient", route=Route.DIRECT) as impatient:
        stuck, own = impatient.open(offer), memory.make(impatient, 8 * BLOCK)
        with slow.paused():
            for _ in range(40):  # a ring has 16 slices
                given_up = [
                    impatient.write(stuck, [own.address], [stuck.address], 8 * BLOCK, timeout=0.1) for _ in range(12)
                ]
                for transfer in given_up:
                    with pytest.raises(TransferError):
                        transfer.wait(20)
            for link in links:
                still_right(link)
            [rail] = pair.prefill.cli("rails")["rails"]
            assert rail["counters"]["grant_waits"] >= 300
        for transfer in given_up:
            transfer.wait_settled(20)
        for link in links:
            still_right(link)
    assert not [error for error in pair.prefill.errors() if error["code"] == "connection_lost"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("route", ROUTES)
def test_after_abort_by_the_decode_side_pages_hold_what_is_written_next(nodes: Nodes, kind: Kind, route: Route) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(route=route) as sender, decode.connect() as receiver:
        link = Pair(prefill, decode, sender, receiver).link(source=kind, destination=kind)
        transfer = send(link)
        begun(link)
        receiver.receiver.abort(TAG)
        link.destination.array[:] = 0
        try:
            transfer.wait(30)
        except TransferError as failure:
            assert failure.result is Result.ABORTED  # noqa: PT017
        assert transfer.settled
        assert not link.destination.array.any()
        still_right(link)


def test_an_aborted_tag_is_refused_from_then_on(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    assert pair.receiver.receiver.abort(TAG) == 0
    late = send(link)
    with pytest.raises(TransferError, match="aborted by the decode engine"):
        late.wait(30)
    assert not link.destination.array.any()
    still_right(link)


def test_abort_counts_and_ends_only_the_transfers_of_its_tag(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    other = memory.make(pair.receiver, 1 << 20)
    target = pair.sender.open(other.offer())
    kept = pair.sender.write(target, [link.source.address], [target.address], 1 << 20, tag=TAG + 1)
    with pair.decode.paused():
        ended = send(link)
        with pytest.raises(WaitTimeout):
            ended.wait(0.1)
    pair.receiver.receiver.abort(TAG)
    kept.wait(30)
    assert (other.array == link.source.array).all()


@pytest.mark.parametrize("kind", KINDS)
def test_abort_settles_though_the_sending_daemon_is_silent(pair: Pair, kind: Kind) -> None:
    link = pair.link(destination=kind)
    transfer = send(link)
    begun(link)
    with pair.prefill.paused():
        pair.receiver.receiver.abort(TAG, timeout=2)
        new = patterns.content(NBYTES, 5)
        link.destination.array[:] = new
    with pytest.raises(TransferError) as failure:
        transfer.wait(30)
    assert failure.value.result is Result.ABORTED
    assert (link.destination.array == new).all()
    still_right(link)


def test_abort_by_an_engine_that_does_not_empty_its_bounce_memory_is_unsettled(pair: Pair, engines: Engines) -> None:
    """The engine's Python still runs, its daemon does not answer: the engine must not reuse the pages."""
    decode = engines.start(pair.decode, rank=1)
    decode.ask("memory", name="pages", nbytes=1 << 20)
    with pair.decode.paused(), pytest.raises(EngineError, match=r"do not reuse|did not answer") as failure:
        decode.ask("abort", tag=TAG, timeout=0.3)
    assert failure.value.kind == "Unsettled"
    assert decode.ask("abort", tag=TAG) == 0


def test_aborting_untagged_transfers_is_refused(pair: Pair) -> None:
    with pytest.raises(ValueError, match="tag 0"):
        pair.receiver.receiver.abort(0)


def test_many_tags_can_be_aborted(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    for tag in range(1000, 1400):
        pair.receiver.receiver.abort(tag)
    with pytest.raises(TransferError):
        send(link, tag=1399).wait(30)
    still_right(link)


def test_a_region_of_a_running_transfer_is_busy_and_goes_when_it_ends(pair: Pair) -> None:
    link = pair.link()
    region = link.source.region
    with pair.decode.paused():
        transfer = send(link)
        with pytest.raises(Busy, match="wait for it or cancel"):
            region.unregister(timeout=0.2)
        with pytest.raises(WaitTimeout):
            transfer.wait(0)
    transfer.wait(30)
    region.unregister()
    region.unregister()
    with pytest.raises(RegionError, match="not registered any more"):
        region.offer()


@pytest.mark.parametrize("kind", KINDS)
def test_unregister_at_the_decode_side_ends_what_is_written_there(pair: Pair, kind: Kind) -> None:
    link = pair.link(destination=kind)
    transfer = send(link)
    begun(link)
    link.destination.region.unregister()
    new = patterns.content(NBYTES, 6)
    link.destination.array[:] = new
    try:
        transfer.wait(30)
    except TransferError as failure:
        assert failure.result is Result.REGION_GONE  # noqa: PT017
        assert transfer.settled
    assert (link.destination.array == new).all()


def test_a_region_that_is_gone_is_refused_by_name(pair: Pair) -> None:
    link = pair.link(nbytes=1 << 20)
    link.destination.region.unregister()

    def refused() -> bool:
        with pytest.raises((TransferError, ValueError)) as failure:
            send(link).wait(30)
        return isinstance(failure.value, ValueError)

    until(refused, "the sender learns that the region is gone")


def test_close_in_the_middle_ends_the_transfer_for_its_waiters(pair: Pair) -> None:
    link = pair.link()
    warm(link)
    with pair.decode.paused():
        transfer = send(link)
        pair.sender.close()
        with pytest.raises(TransferError, match="the owning client exited") as failure:
            transfer.wait(10)
        assert failure.value.result is Result.CLIENT_GONE


def test_close_wakes_threads_that_wait(pair: Pair) -> None:
    link = pair.link()
    warm(link)
    with pair.decode.paused(), ThreadPoolExecutor(1) as threads:
        transfer = send(link)
        waiting = threads.submit(transfer.wait, 30)
        with pytest.raises(TimeoutError):
            waiting.result(0.2)
        pair.sender.close()
        with pytest.raises(TransferError, match="the owning client exited"):
            waiting.result(30)


def test_close_does_not_claim_that_bytes_in_flight_have_settled(pair: Pair) -> None:
    link = pair.link()
    warm(link)
    with pair.decode.paused(), ThreadPoolExecutor(1) as threads:
        transfer = send(link)
        waiting = threads.submit(transfer.wait_settled, 5)
        with pytest.raises(TimeoutError):
            waiting.result(0.3)
        pair.sender.close()
        with pytest.raises(Unsettled):
            waiting.result(30)
