"""Several offers of one region: each is a right of its own to the same memory, for as long as it is registered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import memory, patterns, rail_devices
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.raw_peer import RawPeer
from helpers.waiting import until

from railrelay.client import (
    ArgumentError,
    Client,
    HostEvent,
    RelayError,
    RemoteRegion,
    Transfer,
    WaitTimeout,
    protocol,
)
from railrelay.client.regions import decode_offer

pytestmark = [pytest.mark.system, rail_devices.every_nic()]

NBYTES = 1 << 20


@dataclass
class Scene:
    sending: Node
    sender: Client
    receiver: Client

    def link(self) -> Link:
        return memory.link(self.sender, self.receiver, NBYTES)

    def has_open(self, count: int) -> None:
        """So many regions at the receiver's daemon."""
        until(lambda: [peer["regions"] for peer in self.sending.cli("peers")["peers"]] == [count], f"{count} are open")


@pytest.fixture(params=["another node", "the same node"])
def scene(nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[Scene]:
    sending, receiving = nodes.pair() if request.param == "another node" else [nodes.start()] * 2
    with sending.connect(0) as sender, receiving.connect(1) as receiver:
        yield Scene(sending, sender, receiver)


def begin(link: Link, remote: RemoteRegion, seed: int, ready: HostEvent | None = None) -> Transfer:
    link.source.array[:] = patterns.content(NBYTES, seed)
    return link.sender.write(remote, [link.source.address], [remote.address], NBYTES, ready=ready)


def send(link: Link, remote: RemoteRegion, seed: int) -> None:
    begin(link, remote, seed).wait(30)
    assert (link.destination.array == link.source.array).all()


def test_each_of_two_offers_of_a_region_may_be_used_and_closed_by_itself(scene: Scene) -> None:
    link = scene.link()
    first, region = link.remote, link.destination.region
    second = scene.sender.open(region.offer(to=scene.sender.session))
    third = scene.sender.open(region.offer(to=scene.sender.session))
    assert first is not second is third
    for seed, remote in enumerate((first, second, first)):
        send(link, remote, seed)
    scene.has_open(1)
    first.close()
    first.close()
    with pytest.raises(ArgumentError, match="is not open"):
        begin(link, first, 5)
    send(link, second, 6)
    again = scene.sender.open(region.offer())
    second.close()
    send(link, again, 7)
    again.close()
    scene.has_open(0)
    with pytest.raises(ArgumentError, match="is not open"):
        begin(link, again, 8)
    region.unregister(20)


def test_an_offer_may_be_opened_beside_a_transfer_by_another_one_and_after_its_region_was_closed(scene: Scene) -> None:
    link = scene.link()
    held, region = HostEvent(), link.destination.region
    transfer = begin(link, link.remote, 1, held)
    with pytest.raises(WaitTimeout):
        transfer.wait(0.05)
    by_another = scene.sender.open(region.offer(to=scene.sender.session))
    link.remote.close()
    by_another.close()
    again = scene.sender.open(region.offer())
    held.set()
    transfer.wait(30)
    assert (link.destination.array == link.source.array).all()
    send(link, again, 2)
    scene.has_open(1)


def test_what_was_registered_before_at_the_same_address_is_never_reached_by_its_old_offers(scene: Scene) -> None:
    link = scene.link()
    array = np.zeros(NBYTES, np.uint8)
    before = scene.receiver.register(array)
    old = [scene.sender.open(before.offer()), scene.sender.open(before.offer(to=scene.sender.session))]
    offers = [before.offer(), before.offer(to=scene.sender.session)]
    before.unregister(20)
    now = scene.sender.open(scene.receiver.register(array).offer())
    assert now.address == old[0].address
    for remote in old:
        with pytest.raises(RelayError, match="is not open"):
            begin(link, remote, 1)
    for offer in offers:
        with pytest.raises(RelayError, match="offers no such region"):
            scene.sender.open(offer)
    begin(link, now, 2).wait(30)
    assert (array == link.source.array).all()


def test_a_region_that_was_closed_beside_a_transfer_is_closed_there_when_that_has_ended(scene: Scene) -> None:
    link = scene.link()
    held = HostEvent()
    transfer = begin(link, link.remote, 1, held)
    link.remote.close()
    scene.has_open(1)
    held.set()
    transfer.wait(30)
    scene.has_open(0)


def test_a_region_that_is_opened_as_soon_as_it_was_closed_may_be_written(scene: Scene) -> None:
    link = scene.link()
    remote, region = link.remote, link.destination.region
    offers = region.offer(), region.offer(to=scene.sender.session)
    for seed in range(50):
        remote.close()
        remote = scene.sender.open(offers[seed % 2])
        send(link, remote, seed)
    scene.has_open(1)


def test_a_handle_that_its_sender_has_closed_is_not_given_out_again(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(1) as receiver, RawPeer.dial(node.session) as peer:
        peer.greet()
        region = receiver.alloc(NBYTES)
        capability = decode_offer(region.offer()).capability
        first = peer.ask(protocol.PeerOpenRegion(peer.new_id(), capability), protocol.PeerRegion)
        close = protocol.PeerCloseRegion(peer.new_id(), first.handle)
        again = protocol.PeerOpenRegion(peer.new_id(), capability)
        peer.stream.sendall(peer.packet(close) + peer.packet(again))
        answers = [peer.receive() for _ in range(2)]
        [second] = [answer for answer in answers if isinstance(answer, protocol.PeerRegion)]
        assert (second.address, second.handle == first.handle) == (region.address, False)
