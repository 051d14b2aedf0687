"""Rails with the emulated NIC: its pace, whom it reaches, and what happens when it, its daemon or an engine goes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers import memory, patterns, processes
from helpers.engines import Engines
from helpers.memory import Link
from helpers.nodes import SHM, Node, Nodes
from helpers.raw_client import RawClient
from helpers.waiting import until

from railrelay.client import Busy, RelayError, Result, Route, Transfer, TransferError, Unsettled
from railrelay.client.errors import ErrorCode
from railrelay.shm_layout import abi, segment

pytestmark = pytest.mark.system

NBYTES = 4 << 20
BLOCK = 4096
TAG = 7
LARGE: dict[str, object] = {"slot_bytes": "4MiB", "direct_slice_bytes": "4MiB"}  # 34 ms of a rail of 1 Gbit/s


@pytest.fixture
def nodes(nodes: Nodes) -> Nodes:
    nodes.tolerated.append("rail_down:")
    return nodes


def emulated(nodes: Nodes, rails: int = 1, *, rate_gbit: float = 100, relay: dict[str, object] | None = None) -> Node:
    return nodes.start(rails, rail={"nic": "emulated", "rate_gbit": rate_gbit}, relay=relay or {})


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return emulated(nodes)


@pytest.fixture
def slow(nodes: Nodes) -> Node:
    """4 MiB take 1.7 s."""
    return emulated(nodes, rate_gbit=0.02)


def helpers(node: Node) -> list[int]:
    return processes.children(node.pid)


def counters(node: Node, rail: int = 0) -> dict[str, int]:
    with segment.open_segment(f"/railrelay.{node.instance}.node") as opened:
        rails = opened.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
        return dict(zip(abi.RAIL_COUNTERS, rails.array(rail, "counters"), strict=False))


@pytest.fixture(params=Route)
def link(request: pytest.FixtureRequest, node: Node) -> Iterator[Link]:
    with node.connect(0, local=False, route=request.param) as sender, node.connect(1) as receiver:
        yield filled(memory.link(sender, receiver, NBYTES))


@pytest.fixture
def slow_link(slow: Node) -> Iterator[Link]:
    with slow.connect(0, local=False) as sender, slow.connect(1) as receiver:
        yield filled(memory.link(sender, receiver, NBYTES))


def filled(link: Link) -> Link:
    link.source.array[:] = patterns.content(link.source.array.size, 1)
    return link


def send(link: Link, *, seed: int = 1, tag: int = TAG, timeout: float = 30.0) -> Transfer:
    taken, put = patterns.order(link.source.array.size // BLOCK, BLOCK, seed)
    return link.sender.write(
        link.remote,
        taken + np.uint64(link.source.address),
        put + np.uint64(link.remote.address),
        BLOCK,
        tag=tag,
        timeout=timeout,
    )


def begun(link: Link) -> None:
    until(lambda: bool(link.destination.array[::BLOCK].any()), "the first bytes land")


def stays(link: Link) -> None:
    """Nothing lands any more."""
    link.destination.array[:] = 0
    time.sleep(0.2)
    assert not link.destination.array.any()


def result(transfer: Transfer) -> Result:
    try:
        transfer.wait(30)
    except TransferError as failure:
        return failure.result
    return Result.OK


# ---- pace ----


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("rails", [1, 2])
def test_a_rail_sends_at_its_rate(nodes: Nodes, rails: int, route: Route) -> None:
    rate_gbit, nbytes = 1.0, 64 << 20
    node = emulated(nodes, rails, rate_gbit=rate_gbit, relay=LARGE)
    with node.connect(0, local=False, route=route) as sender, node.connect(1) as receiver:
        source = memory.make(sender, nbytes)
        source.array[:] = patterns.content(nbytes, 1)
        destinations = [memory.make(receiver, nbytes, rail=rail) for rail in range(rails)]
        remotes = [sender.open(destination.offer()) for destination in destinations]

        def seconds() -> float:
            for destination in destinations:
                destination.array[:] = 0
            begin = time.perf_counter()
            moving = [sender.write(remote, [source.address], [remote.address], nbytes) for remote in remotes]
            for transfer in moving:
                transfer.wait(60)
            return time.perf_counter() - begin

        seconds()  # leases lanes, connects
        own_rail_only = route in (Route.DIRECT, Route.SERIAL, Route.SCHEDULED)
        out_of_one = rails if own_rail_only else 1
        wanted = 8e-9 * nbytes * out_of_one / rate_gbit
        tries: list[float] = []
        while not tries or (min(tries) > 1.05 * wanted and len(tries) < 5):  # other work of the machine costs time
            tries.append(seconds())
            assert all((destination.array == source.array).all() for destination in destinations)
        assert min(tries) >= 0.99 * wanted
        assert min(tries) <= 1.25 * wanted  # 1.01 on a quiet machine
    told = counters(node)
    assert told["nic_active_ns"] >= told["nic_busy_ns"] >= 0.99e9 * wanted


def test_late_copies_are_counted(nodes: Nodes) -> None:
    node = emulated(nodes, rate_gbit=10_000)  # no memory copies that fast
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = filled(memory.link(sender, receiver, NBYTES))
        assert result(send(link)) is Result.OK
    told = counters(node)
    assert told["nic_late_copies"] > 0
    assert told["nic_late_max_ns"] > 0
    assert told["nic_active_ns"] > told["nic_busy_ns"]


# ---- whom it reaches ----


def test_outputs_say_emulated(link: Link, node: Node) -> None:
    assert result(send(link)) is Result.OK
    lanes = node.cli("lanes")["lanes"]
    assert lanes
    assert {lane["nic"] for lane in lanes} == {"emulated"}


def test_private_destinations_are_refused_by_name(node: Node) -> None:
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        private = memory.make(receiver, NBYTES, "private")
        with pytest.raises(
            RelayError, match=r"the emulated NIC of rail rail0 .* cannot write private memory"
        ) as failure:
            sender.open(private.offer())
        assert failure.value.code is ErrorCode.NOT_SUPPORTED


def test_private_sources_go_through_lanes(node: Node) -> None:
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = filled(memory.link(sender, receiver, NBYTES, source="private"))
        assert result(send(link)) is Result.OK
        assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 1)


@pytest.mark.parametrize("local", ["emulated", "tcp"])
def test_another_daemon_is_not_reached(nodes: Nodes, local: str) -> None:
    remote = "tcp" if local == "emulated" else "emulated"
    near, far = nodes.start(rail={"nic": local}), nodes.start(rail={"nic": remote})
    with near.connect() as sender, far.connect() as receiver:
        link = filled(memory.link(sender, receiver, NBYTES))
        assert result(send(link)) is Result.RAIL_DOWN
    texts = " ".join(error["text"] for error in near.errors())
    assert f"rail rail0 ({local}) to rail0 ({remote}) of {far.session}: the emulated NIC only reaches" in texts


def test_two_daemons_with_emulated_rails_do_not_reach_each_other(nodes: Nodes) -> None:
    near, far = emulated(nodes), emulated(nodes)
    with near.connect() as sender, far.connect() as receiver:
        link = filled(memory.link(sender, receiver, NBYTES))
        assert result(send(link)) is Result.RAIL_DOWN


def test_tcp_and_emulated_rails_in_one_node(nodes: Nodes) -> None:
    instance = "mixed" + str(time.time_ns())
    config = nodes.directory / f"{instance}.toml"
    config.write_text(
        f'[node]\ninstance = "{instance}"\nsocket = "{nodes.directory / instance}.sock"\n'
        '[[rail]]\naddress = "127.0.0.1"\n[[rail]]\naddress = "127.0.0.1"\nnic = "emulated"\nrate_gbit = 50\n'
        "[relay]\nslots = 4\n"
    )
    node = nodes.start_file(instance, config)
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        source = memory.make(sender, NBYTES)
        source.array[:] = patterns.content(NBYTES, 1)
        destinations = [memory.make(receiver, NBYTES, rail=rail) for rail in range(2)]
        for destination in destinations:
            remote = sender.open(destination.offer())
            sender.write(remote, [source.address], [remote.address], NBYTES).wait(30)
            assert (destination.array == source.array).all()
    assert [counters(node, rail)["bytes_sent"] for rail in range(2)] == [NBYTES, NBYTES]


# ---- ends before the end ----


def test_after_cancel_nothing_lands(slow_link: Link) -> None:
    transfer = send(slow_link)
    begun(slow_link)
    begin = time.monotonic()
    transfer.cancel()
    assert transfer.settled
    assert time.monotonic() - begin < 5
    stays(slow_link)
    assert transfer.result is Result.CANCELLED


def test_after_abort_by_the_decode_side_nothing_lands(slow_link: Link) -> None:
    transfer = send(slow_link)
    begun(slow_link)
    slow_link.receiver.receiver.abort(TAG)
    stays(slow_link)
    assert result(transfer) is Result.ABORTED
    assert result(send(slow_link)) is Result.ABORTED


def test_after_unregister_of_the_destination_nothing_lands(slow_link: Link) -> None:
    transfer = send(slow_link)
    begun(slow_link)
    slow_link.destination.region.unregister(20)
    stays(slow_link)
    assert result(transfer) is Result.REGION_GONE


def test_a_time_out_settles(slow_link: Link) -> None:
    transfer = send(slow_link, timeout=0.2)
    assert result(transfer) is Result.TIMED_OUT
    assert transfer.settled
    stays(slow_link)


def test_a_small_transfer_does_not_wait_for_a_large_one(slow_link: Link) -> None:
    large = send(slow_link)
    begun(slow_link)
    link = slow_link
    link.sender.write(link.remote, [link.source.address], [link.remote.address], 64).wait(30)
    assert not large.done
    large.cancel()


def test_a_source_can_be_unregistered_once_its_transfer_is_cancelled(slow_link: Link) -> None:
    transfer = send(slow_link)
    begun(slow_link)
    with pytest.raises(Busy):
        slow_link.source.region.unregister(0)
    transfer.cancel()
    slow_link.source.region.unregister(20)


# ---- processes that go ----


def test_a_stopped_helper_leaves_a_transfer_unsettled_until_it_goes_on(node: Node) -> None:
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = filled(memory.link(sender, receiver, NBYTES))
        assert result(send(link)) is Result.OK
        [helper] = helpers(node)
        try:
            os.kill(helper, signal.SIGSTOP)
            until(lambda: processes.state(helper) == "T", "the helper stops")
            transfer = send(link, seed=2, timeout=0.2)
            with pytest.raises(Unsettled):
                transfer.wait(30)
            assert not transfer.settled
        finally:
            os.kill(helper, signal.SIGCONT)
        transfer.wait_settled(30)
        stays(link)
        assert result(send(link, seed=3)) is Result.OK
        assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 3)


def test_a_killed_helper_takes_its_rail_down_and_no_other(nodes: Nodes) -> None:
    node = emulated(nodes, 2, rate_gbit=0.02)
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        links = [filled(memory.link(sender, receiver, NBYTES))]
        other = memory.make(receiver, 65536, rail=0)
        remote = sender.open(other.offer())
        moving = [send(links[0]) for _ in range(3)]
        begun(links[0])
        victim = next(pid for pid in helpers(node) if b"rail1" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)
        assert [result(transfer) for transfer in moving] == [Result.RAIL_DOWN] * 3
        assert all(transfer.settled for transfer in moving)
        stays(links[0])
        assert result(send(links[0])) is Result.RAIL_DOWN
        sender.write(remote, [links[0].source.address], [remote.address], 65536).wait(30)
        more = memory.make(receiver, 4096)  # memory still comes and goes
        more.region.unregister(10)
    [text] = [error["text"] for error in node.errors() if error["code"] == "rail_down"]
    assert (
        text
        == f"rail rail1: emulated NIC: its helper process (pid {victim}) was killed by signal 9; restart the daemon"
    )


def test_the_helper_ends_with_a_killed_daemon(node: Node) -> None:
    [helper] = helpers(node)
    with node.connect(0, local=False):
        node.kill()
    until(lambda: not processes.alive(helper), "the helper ends")
    os.waitpid(helper, 0)  # an orphan, adopted


def test_the_helper_ends_with_its_daemon_and_says_what_it_did(node: Node) -> None:
    [helper] = helpers(node)
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        assert result(send(filled(memory.link(sender, receiver, NBYTES)))) is Result.OK
    assert node.terminate() == 0
    assert not processes.alive(helper)
    assert "emulated NIC of 100 Gbit/s: 4.0 MiB in" in node.log
    assert not node.objects()


def test_a_killed_sender_leaves_the_others_alone(nodes: Nodes, engines: Engines) -> None:
    node = emulated(nodes, rate_gbit=0.2)
    doomed = engines.start(node, rank=2)
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = filled(memory.link(sender, receiver, NBYTES))
        there = memory.make(receiver, NBYTES)
        doomed.ask("memory", name="pages", nbytes=NBYTES, kind="private", seed=2)
        doomed.ask("open", name="there", offer=there.offer().hex())
        doomed.ask("write", transfer="lost", source="pages", remote="there", blocks=NBYTES // BLOCK, block_bytes=BLOCK)
        until(lambda: bool(there.array[::BLOCK].any()), "its first bytes land")
        doomed.kill()
        until(lambda: len(node.cli("clients")["clients"]) == 2, "its row is free")
        there.array[:] = 0
        assert result(send(link)) is Result.OK
        assert not there.array.any()


def test_a_killed_receiver_fails_the_transfer_by_name(nodes: Nodes, engines: Engines) -> None:
    node = emulated(nodes, rate_gbit=0.02)
    doomed = engines.start(node, rank=2)
    with node.connect(0, local=False) as sender:
        source = memory.make(sender, NBYTES)
        offer = doomed.ask("memory", name="pages", nbytes=NBYTES, kind="shared")
        remote = sender.open(bytes.fromhex(offer))
        transfer = sender.write(remote, [source.address], [remote.address], NBYTES)
        doomed.kill()
        assert result(transfer) is Result.REGION_GONE


def test_relay_memory_that_is_truncated_ends_its_client_alone(node: Node) -> None:
    with node.connect(0, local=False) as sender, node.connect(1) as receiver, RawClient(node.socket, rank=5) as raw:
        link = filled(memory.link(sender, receiver, NBYTES))
        raw.attach()
        raw.lease()
        [name] = [name for name in node.objects() if f".lane.0.{raw.facts.client}." in name]
        os.truncate(SHM / name, 4096)
        assert result(send(link)) is Result.OK
        assert patterns.arrived(link.source.array, link.destination.array, NBYTES // BLOCK, BLOCK, 1)


def test_a_destination_that_is_truncated_fails_alone(node: Node) -> None:
    with node.connect(0, local=False) as sender, node.connect(1) as receiver, RawClient(node.socket, rank=6) as raw:
        link = filled(memory.link(sender, receiver, NBYTES))
        raw.attach()
        registered, fd = raw.register(NBYTES)
        content = {"session": node.session, "capability": registered.capability, "address": 1 << 40}
        remote = sender.open(msgspec.msgpack.encode({**content, "nbytes": NBYTES, "rail": 0}))
        os.ftruncate(fd, 0)
        transfer = sender.write(remote, [link.source.address], [remote.address], NBYTES)
        assert result(transfer) is Result.REGION_GONE
        assert raw.last_words().startswith("violation:")
        assert result(send(link)) is Result.OK
    assert len(helpers(node)) == 1


# ---- many at once ----


def test_many_transfers_over_four_rails_arrive(nodes: Nodes) -> None:
    node = emulated(nodes, 4)
    with node.connect(1, local=False) as sender, node.connect(2) as receiver:
        source = memory.make(sender, NBYTES, "private")
        source.array[:] = patterns.content(NBYTES, 1)
        destinations = [memory.make(receiver, NBYTES, rail=rail) for rail in range(4)]
        remotes = [sender.open(destination.offer()) for destination in destinations]
        for seed in range(10):
            moving = [send(Link(sender, receiver, source, to, remote), seed=seed)
                      for to, remote in zip(destinations, remotes, strict=True)]  # fmt: skip
            for transfer in moving:
                transfer.wait(30)
            for to in destinations:
                assert patterns.arrived(source.array, to.array, NBYTES // BLOCK, BLOCK, seed)
    assert min(counters(node, rail)["bytes_sent"] for rail in range(4)) == 10 * NBYTES
