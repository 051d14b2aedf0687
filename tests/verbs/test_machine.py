"""The rails carry RDMA from pyverbs to pyverbs and can be made to fail: what all other tests of verbs stand on."""

from __future__ import annotations

import ipaddress
import random
import time
from collections.abc import Iterator

import pytest
from helpers import links
from helpers.verbs_peer import Memory, Peer, QueuePair, Write, connected
from helpers.verbs_rails import RAILS
from helpers.waiting import until

BLOCK = 65536
BLOCKS = 8
IMM = 0x01020304
HELD_S = 0.5
FIRST, SECOND = list(RAILS)[:2]


class Ends:
    """Connected queue pairs on the first two rails, with filled memory here and empty memory there."""

    def __init__(self, sender: Peer, receiver: Peer) -> None:
        self.sender, self.receiver = sender, receiver
        self.source, self.destination = sender.memory(BLOCKS * BLOCK), receiver.memory(BLOCKS * BLOCK)
        self.source.bytes[:] = random.Random(5).randbytes(BLOCKS * BLOCK)
        self.near, self.far = self.connected()

    def connected(self, timeout: int = 17, retries: int = 6) -> tuple[QueuePair, QueuePair]:
        near, far = self.sender.queue_pair(), self.receiver.queue_pair()
        connected(near, far, timeout, retries)
        return near, far

    def to(self, block: int, *, imm: int | None = None, signaled: bool = True) -> Write:
        """The same block there; with imm: nothing of it but the imm."""
        offset, nbytes = block * BLOCK, BLOCK if imm is None else 0
        return Write(offset, nbytes, self.destination.address + offset, self.destination.rkey, imm, signaled)

    def arrived(self, memory: Memory | None = None) -> bool:
        return self.source.bytes[:] == (memory or self.destination).bytes[:]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Peer(FIRST) as sender, Peer(SECOND) as receiver:
        yield Ends(sender, receiver)


@pytest.mark.parametrize("device", RAILS)
def test_each_device_has_an_active_port_and_a_roce_v2_gid_of_its_address(device: str) -> None:
    with Peer(device) as peer:
        assert peer.port_state() == "ACTIVE"
        assert ipaddress.IPv6Address(peer.gid).ipv4_mapped == ipaddress.IPv4Address(RAILS[device])


def test_writes_in_one_list_place_their_bytes_and_the_imm_that_follows_says_so(ends: Ends) -> None:
    ends.far.receive(first_id=77)
    blocks = [ends.to(block, signaled=False) for block in range(BLOCKS)]
    ends.near.post(ends.source, [*blocks, ends.to(0, imm=IMM)], first_id=100)
    sent, received = ends.sender.poll(), ends.receiver.poll()
    assert [(done.id, done.status) for done in sent] == [(100 + BLOCKS, "SUCCESS")]
    assert [(done.id, done.status, done.received, done.imm) for done in received] == [(77, "SUCCESS", True, IMM)]
    assert ends.arrived()


def test_a_wrong_key_fails_the_write_and_those_behind_it_and_both_queue_pairs(ends: Ends) -> None:
    wrong = Write(0, BLOCK, ends.destination.address, ends.destination.rkey ^ 0x5500, signaled=False)
    ends.near.post(ends.source, [wrong, ends.to(1, signaled=False), ends.to(2)])
    assert [done.status for done in ends.sender.poll(3)] == ["REM_ACCESS_ERR", "WR_FLUSH_ERR", "WR_FLUSH_ERR"]
    until(lambda: (ends.near.state(), ends.far.state()) == ("ERR", "ERR"), "both queue pairs are in ERR")
    assert not any(ends.destination.bytes[:])


def test_packets_that_are_held_back_arrive_later(ends: Ends) -> None:
    with links.held_back(SECOND):
        ends.near.post(ends.source, [ends.to(block) for block in range(BLOCKS)])
        assert ends.sender.poll(limit_s=HELD_S) == []
        assert links.waiting_bytes(SECOND) >= BLOCK
        assert not any(ends.destination.bytes[:])
    assert [done.status for done in ends.sender.poll(BLOCKS)] == ["SUCCESS"] * BLOCKS
    assert ends.arrived()


def test_held_packets_of_a_sender_that_is_gone_are_still_placed(ends: Ends) -> None:
    with links.held_back(SECOND):
        ends.near.post(ends.source, [ends.to(0)])
        until(lambda: links.waiting_bytes(SECOND) >= BLOCK, "the block is in the bridge")
        ends.near.close()
        assert not any(ends.destination.bytes[:])
    until(lambda: ends.destination.bytes[:BLOCK] == ends.source.bytes[:BLOCK], "the block is placed")


def test_delayed_packets_take_longer(ends: Ends) -> None:
    with links.delayed(SECOND, 1e3 * HELD_S):
        began = time.monotonic()
        ends.near.post(ends.source, [ends.to(0)])
        assert [done.status for done in ends.sender.poll()] == ["SUCCESS"]
        assert time.monotonic() - began >= HELD_S


def test_a_rail_that_is_down_fails_writes_until_it_is_up_and_there_is_a_new_queue_pair(ends: Ends) -> None:
    near, _ = ends.connected(timeout=14, retries=3)
    with links.down(SECOND):
        until(lambda: ends.receiver.port_state() == "DOWN", "the port is down")
        assert ends.sender.port_state() == "ACTIVE"
        near.post(ends.source, [ends.to(0)])
        assert [done.status for done in ends.sender.poll()] == ["RETRY_EXC_ERR"]
        assert near.state() == "ERR"
    until(lambda: ends.receiver.port_state() == "ACTIVE", "the port is active again")
    near, _ = ends.connected()
    near.post(ends.source, [ends.to(block) for block in range(BLOCKS)])
    assert [done.status for done in ends.sender.poll(BLOCKS)] == ["SUCCESS"] * BLOCKS
    assert ends.arrived()
