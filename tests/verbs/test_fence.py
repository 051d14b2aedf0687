"""The fence with bytes still on their way: packets are held back, the transfer ends, its memory gets new content, and
the packets arrive. On real devices they wait in the bridge of the machine, else in the stand-in's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers import links, memory, patterns, rail_devices
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import Client, Result, Route, Transfer, TransferError, Unsettled
from railrelay.client.cli import _node
from railrelay.client.cli import rails as shown_rails

pytestmark = [
    pytest.mark.system,
    pytest.mark.parametrize("nic", [pytest.param("verbs", marks=rail_devices.marks("verbs"))]),
]

BLOCK = 65536
NBYTES = 2 << 20
BLOCKS = NBYTES // BLOCK
TAG = 77
WAIT_S = 30.0 * (4 if rail_devices.real() else 1)
QUIET_S = 0.3  # in which what was released arrives
TIMEOUTS = {"connect_s": 20, "peer_s": 20, "settle_s": 0.3, "fence_s": 20}


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Node, Node]:
    return nodes.pair(timeouts=TIMEOUTS)


@contextlib.contextmanager
def held_back(node: Node) -> Iterator[None]:
    """Nothing arrives at its device meanwhile; all of it has arrived afterwards."""
    [device] = node.devices
    with links.held_back(device.name) if node.fabric is None else node.fabric.held(device.address, "to"):
        yield
    if node.fabric is None:
        until(lambda: links.waiting_bytes(device.name) == 0, "the bridge is empty", WAIT_S)
    time.sleep(QUIET_S)


def counter(node: Node, label: str) -> int:
    with _node.open_node(node.instance) as opened:
        return sum(shown["counters"][label] for shown in shown_rails.read(opened))


def begin(link: Link, seed: int, timeout: float = 4 * WAIT_S) -> Transfer:
    taken, put = patterns.order(BLOCKS, BLOCK, seed)
    return link.sender.write(
        link.remote,
        taken + np.uint64(link.source.address),
        put + np.uint64(link.remote.address),
        BLOCK,
        tag=TAG + seed,
        timeout=timeout,
    )


def arrives(link: Link, seed: int) -> None:
    begin(link, seed).wait(WAIT_S)
    assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, seed)


def linked(sender: Client, receiver: Client) -> Link:
    link = memory.link(sender, receiver, NBYTES)
    link.source.array[:] = patterns.content(NBYTES, 1)
    return link


def on_their_way(prefill: Node, decode: Node, sent: int) -> None:
    """Bytes of a transfer that has begun."""
    until(lambda: counter(prefill, "frames_sent") > sent, "the NIC has it", WAIT_S)
    if decode.fabric is None:
        until(lambda: links.waiting_bytes(decode.devices[0].name) >= BLOCK, "bytes wait in the bridge", WAIT_S)


def times_out(link: Link, transfer: Transfer) -> None:
    with pytest.raises((TransferError, Unsettled)):
        transfer.wait(WAIT_S)
    transfer.wait_settled(WAIT_S)
    assert transfer.result in (Result.TIMED_OUT, Result.UNSETTLED), link


def is_cancelled(link: Link, transfer: Transfer) -> None:
    transfer.cancel(timeout=WAIT_S)
    assert transfer.result is Result.CANCELLED, link


def is_aborted(link: Link, transfer: Transfer) -> None:
    link.receiver.receiver.abort(TAG + 2, timeout=WAIT_S)
    with pytest.raises(TransferError):
        transfer.wait(WAIT_S)
    assert transfer.result is Result.ABORTED


def region_is_withdrawn(link: Link, transfer: Transfer) -> None:
    link.destination.region.unregister(timeout=WAIT_S)
    with pytest.raises(TransferError):
        transfer.wait(WAIT_S)
    assert transfer.result is Result.REGION_GONE


@pytest.mark.parametrize("end", [times_out, is_cancelled, is_aborted, region_is_withdrawn])
def test_what_was_held_back_does_not_land_after_the_transfer(
    pair: tuple[Node, Node], end: Callable[[Link, Transfer], None]
) -> None:
    prefill, decode = pair
    with prefill.connect(0, route=Route.DIRECT) as sender, decode.connect(0) as receiver:
        link, other = linked(sender, receiver), linked(sender, receiver)
        arrives(link, 1)
        with held_back(decode):
            sent = counter(prefill, "frames_sent")
            transfer = begin(link, 2, timeout=1.0 if end is times_out else 4 * WAIT_S)
            on_their_way(prefill, decode, sent)
            end(link, transfer)
            assert transfer.settled
            canary = patterns.content(NBYTES, 3)
            link.destination.array[:] = canary
        arrives(other, 4)
        assert (link.destination.array == canary).all()
        assert counter(decode, "fences") > 0 or end is region_is_withdrawn


def test_what_a_killed_sender_had_on_its_way_does_not_land_after_an_abort(
    pair: tuple[Node, Node], nodes: Nodes
) -> None:
    prefill, decode = pair
    with decode.connect(0) as receiver:
        with prefill.connect(0, route=Route.DIRECT) as sender:
            link = linked(sender, receiver)
            arrives(link, 1)
            with held_back(decode):
                sent = counter(prefill, "frames_sent")
                begin(link, 2)
                on_their_way(prefill, decode, sent)
                prefill.kill()
                receiver.receiver.abort(TAG + 2, timeout=WAIT_S)
                canary = patterns.content(NBYTES, 3)
                link.destination.array[:] = canary
        assert (link.destination.array == canary).all()
        assert counter(decode, "fences") > 0
        with nodes.again(prefill).connect(0) as sender:
            arrives(linked(sender, receiver), 5)
        assert (link.destination.array == canary).all()


def test_what_was_on_its_way_to_a_killed_receiver_does_not_land(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0, route=Route.DIRECT) as sender, decode.connect(0) as receiver:
        link = linked(sender, receiver)
        arrives(link, 1)
        with held_back(decode):
            sent = counter(prefill, "frames_sent")
            transfer = begin(link, 2)
            on_their_way(prefill, decode, sent)
            decode.kill()
            canary = patterns.content(NBYTES, 3)
            link.destination.array[:] = canary
        assert (link.destination.array == canary).all()
        assert transfer.result is not Result.OK
