"""A daemon that exits and comes back: engines stay up, what was under way ends with one error, clients attach again by
themselves, and nothing of before is used after."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import memory, patterns, rail_devices, slow_memory, sockets
from helpers.engines import Engine, Engines
from helpers.memory import Kind, Link, Memory
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import (
    ArgumentError,
    Buffer,
    Busy,
    Client,
    ConnectError,
    DaemonGone,
    ErrorCode,
    PeerError,
    Region,
    RegionError,
    RelayError,
    RemoteRegion,
    Result,
    Transfer,
    TransferError,
    Unsettled,
    WaitTimeout,
    attachment,
)
from railrelay.client import client as attaching

pytestmark = [pytest.mark.system, rail_devices.every_nic()]

BLOCKS, BLOCK = 256, 16384
NBYTES = BLOCKS * BLOCK


@dataclass
class Pair:
    prefill: Node
    decode: Node
    sender: Client
    receiver: Client

    def link(self, source: Kind = "shared", destination: Kind = "shared") -> Link:
        made = memory.link(self.sender, self.receiver, NBYTES, source=source, destination=destination)
        made.source.array[:] = patterns.content(NBYTES, 1)
        return made


@pytest.fixture
def pair(nodes: Nodes) -> Iterator[Pair]:
    """The decode daemon comes back on the same port."""
    prefill, decode = nodes.start(), nodes.start(node={"port": sockets.free_port()})
    with prefill.connect(name="prefill") as sender, decode.connect(name="decode") as receiver:
        yield Pair(prefill, decode, sender, receiver)


def begin(sender: Client, source: Memory, remote: RemoteRegion, seed: int, timeout: float = 30.0) -> Transfer:
    taken, put = patterns.order(BLOCKS, BLOCK, seed)
    return sender.write(
        remote, taken + np.uint64(source.address), put + np.uint64(remote.address), BLOCK, timeout=timeout, tag=seed
    )


def send(link: Link, remote: RemoteRegion, seed: int) -> None:
    begin(link.sender, link.source, remote, seed).wait(30)
    assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, seed)


def under_way(pair: Pair, link: Link, seed: int) -> Transfer:
    """A transfer that its receiving daemon, which is stopped, has not confirmed."""
    transfer = begin(pair.sender, link.source, link.remote, seed)
    with pytest.raises(WaitTimeout):
        transfer.wait(0.2)
    return transfer


@pytest.mark.parametrize(("source", "destination"), [("shared", "shared"), ("private", "private")])
def test_a_sender_attaches_again_when_its_daemon_was_killed_and_sends_from_the_same_memory(
    nodes: Nodes, pair: Pair, source: Kind, destination: Kind
) -> None:
    link = pair.link(source, destination)
    send(link, link.remote, 1)
    offer = link.destination.offer()
    with pair.decode.paused():
        transfer = under_way(pair, link, 2)
        pair.prefill.kill()
        with pytest.raises(Unsettled, match="once the client is attached again") as failure:
            transfer.wait(30)
    assert failure.value.result is Result.DAEMON_GONE
    again = nodes.again(pair.prefill)
    assert pair.sender.wait_attached(30) == 2
    assert pair.sender.session == again.session
    pair.receiver.receiver.abort(2)
    link.destination.array[:] = 0
    send(link, pair.sender.open(offer), 3)
    [client] = again.cli("clients")["clients"]
    assert (client["name"], client["regions"]) == ("prefill", 1)


@pytest.mark.parametrize(("source", "destination"), [("shared", "shared"), ("private", "private")])
def test_a_receiver_attaches_again_when_its_daemon_was_killed_and_offers_the_same_memory(
    nodes: Nodes, pair: Pair, source: Kind, destination: Kind
) -> None:
    link = pair.link(source, destination)
    send(link, link.remote, 1)
    old = link.destination.offer()
    pair.decode.pause()
    transfer = under_way(pair, link, 2)
    pair.decode.kill()
    again = nodes.again(pair.decode)
    assert again.session == pair.decode.session
    assert pair.receiver.wait_attached(30) == 2
    with pytest.raises(TransferError) as failure:
        transfer.wait(30)
    assert (failure.value.result, transfer.settled) == (Result.PEER_LOST, True)
    until(lambda: link.remote.peer.is_down, "the sender hears of it")
    link.destination.array[:] = 0
    with pytest.raises(RelayError) as refusal:
        pair.sender.open(old)
    assert refusal.value.code in (ErrorCode.BAD_CAPABILITY, ErrorCode.PEER_LOST)
    with pytest.raises((PeerError, ArgumentError)):
        begin(pair.sender, link.source, link.remote, 3)
    new = link.destination.offer()
    assert new != old
    send(link, pair.sender.open(new), 4)


def test_a_daemon_that_was_told_to_end_is_attached_to_again_too(nodes: Nodes, pair: Pair) -> None:
    link = pair.link()
    send(link, link.remote, 1)
    assert pair.prefill.terminate() == 0
    nodes.again(pair.prefill)
    pair.sender.wait_attached(30)
    assert pair.sender.draining == ""
    send(link, pair.sender.open(link.destination.offer()), 2)


def test_what_was_opened_before_is_refused_after_and_may_be_closed(nodes: Nodes, pair: Pair) -> None:
    link = pair.link()
    pair.prefill.kill()
    nodes.again(pair.prefill)
    pair.sender.wait_attached(30)
    with pytest.raises(DaemonGone, match="open the offers again"):
        begin(pair.sender, link.source, link.remote, 1)
    with pytest.raises(DaemonGone):
        link.remote.peer.open(link.destination.offer())
    link.remote.close()
    assert not link.destination.array.any()
    send(link, pair.sender.open(link.destination.offer()), 2)


def test_every_client_of_a_node_attaches_again_and_the_local_route_works_between_them(nodes: Nodes) -> None:
    node = nodes.start(2)
    with node.connect(0) as sender, node.connect(1) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        send(link, link.remote, 1)
        for restart in range(3):
            node.kill()
            node = nodes.again(node)
            for client in (sender, receiver):
                assert client.wait_attached(30) == restart + 2
            link.destination.array[:] = 0
            send(link, sender.open(link.destination.offer()), restart + 2)
            assert sender.counters()["bytes_local"] == NBYTES


def test_a_note_that_comes_after_the_restart_reaches_who_waited_before(nodes: Nodes, pair: Pair) -> None:
    link = pair.link()
    pair.decode.kill()
    with pytest.raises(DaemonGone):
        pair.receiver.receiver.notifications.get(30)
    nodes.again(pair.decode)
    pair.receiver.wait_attached(30)
    remote = pair.sender.open(link.destination.offer())
    pair.sender.write(remote, [link.source.address], [remote.address], NBYTES, notify=b"there").wait(30)
    assert pair.receiver.receiver.notifications.get(30).payload == b"there"


def test_an_event_loop_that_waits_gets_the_error_and_goes_on_with_the_next_daemon(nodes: Nodes, pair: Pair) -> None:
    link = pair.link()

    async def run() -> None:
        pair.decode.pause()
        transfer = under_way(pair, link, 2)
        waiting = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        pair.prefill.kill()
        with pytest.raises(Unsettled):
            await waiting
        pair.decode.resume()
        nodes.again(pair.prefill)
        await asyncio.to_thread(pair.sender.wait_attached, 30)
        remote = await asyncio.to_thread(pair.sender.open, link.destination.offer())
        await begin(pair.sender, link.source, remote, 3)

    asyncio.run(run())


# ---- while there is no daemon ----


def test_calls_fail_at_once_while_there_is_no_daemon_and_memory_may_be_given_back(nodes: Nodes, pair: Pair) -> None:
    link = pair.link("private")
    kept = memory.make(pair.sender, 4096)
    pair.prefill.kill()
    until(lambda: refused(pair.sender), "the client notices")
    for call in (
        lambda: pair.sender.open(link.destination.offer()),
        lambda: pair.sender.peer("127.0.0.1:1"),
        kept.offer,
    ):
        with pytest.raises(DaemonGone):
            call()
    with pytest.raises(WaitTimeout, match="no daemon at"):
        pair.sender.wait_attached(0.2)
    link.source.region.unregister()
    with pytest.raises(RegionError):
        link.source.offer()
    again = nodes.again(pair.prefill)
    pair.sender.wait_attached(30)
    assert [client["regions"] for client in again.cli("clients")["clients"]] == [1]
    assert kept.offer()


def refused(client: Client) -> bool:
    try:
        client.alloc(4096).close()
    except DaemonGone:
        return True
    return False


def test_a_client_that_waits_for_a_daemon_can_be_closed(pair: Pair) -> None:
    pair.prefill.kill()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pair.sender.wait_attached, 30)
        until(lambda: refused(pair.sender), "the client notices")
        pair.sender.close()
        with pytest.raises(RelayError) as failure:
            waiting.result(30)
    assert failure.value.code in (ErrorCode.CLOSED, ErrorCode.DAEMON_GONE)


def test_a_daemon_that_dies_while_a_client_attaches_again_is_waited_for_once_more(nodes: Nodes, pair: Pair) -> None:
    link = pair.link("private", "private")
    text = pair.prefill.config_path.read_text()
    pair.prefill.kill()
    for point in ("daemon.attach.on_rails", "daemon.region.mapped", "daemon.region.offered", "daemon.start.listening"):
        pair.prefill.config_path.write_text(text.replace("[node]", f'[node]\nfault = "{point}"'))
        with contextlib.suppress(AssertionError):  # it may die before its readiness is read
            doomed = nodes.again(pair.prefill)
            assert doomed.wait() == -signal.SIGKILL
    pair.prefill.config_path.write_text(text)
    nodes.again(pair.prefill)
    pair.sender.wait_attached(30)
    send(link, pair.sender.open(link.destination.offer()), 2)


# ---- who does not attach again ----


def test_a_client_that_was_told_not_to_stays_without_a_daemon(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(reattach=False) as client:
        node.kill()
        again = nodes.again(node)
        with pytest.raises(DaemonGone, match=f"daemon pid {node.pid} exited"):
            client.wait_attached(30)
        assert again.cli("clients")["clients"] == []
        with pytest.raises(DaemonGone):
            client.alloc(4096)


def test_a_client_whose_session_the_daemon_ended_does_not_come_back_by_itself(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.tolerated.append("sent something that is not a request")
    with node.connect() as client:
        with socket.socket(fileno=socket.dup(client.attachment.connection.fd)) as own:
            own.send(b"nonsense")
        until(lambda: refused(client), "the client notices")
        with pytest.raises(DaemonGone, match="not a request"):
            client.wait_attached(30)
        until(lambda: node.cli("clients")["clients"] == [], "the daemon has let go of it")
        assert client.attachments == 1


# ---- memory and descriptors of the engine while there is no daemon ----


def test_a_region_is_busy_while_a_thread_of_the_library_reads_it(pair: Pair) -> None:
    target = memory.make(pair.receiver, NBYTES)
    remote = pair.sender.open(target.offer())
    with slow_memory.slow(1 << 20) as source:
        region = pair.sender.register((source.address, source.nbytes), receive=False)
        pair.sender.write(remote, [source.address], [remote.address], source.nbytes, timeout=30)
        until(source.is_waited_for, "the library reads the source")
        pair.prefill.kill()
        until(lambda: pair.sender.attachment.gone, "the daemon's death is noticed")
        with pytest.raises(Busy):
            region.unregister(1.0)
        source.release()
        region.unregister(10.0)


def configured_anew(nodes: Nodes, node: Node, old: str, new: str) -> Node:
    """The daemon, killed, and started with another configuration."""
    text = node.config_path.read_text()
    assert old in text
    node.kill()
    node.config_path.write_text(text.replace(old, new))
    return nodes.again(node)


def test_regions_that_the_next_daemon_does_not_take_end_alone_and_say_why(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_PATIENCE_S", 0.5)
    node = nodes.start(2, limits={"regions_per_client": 8})
    with node.connect(0) as client, node.connect(0) as sender:
        first, too_many = (client.alloc(4096, rail=0) for _ in range(2))
        of_rail_1 = client.alloc(4096, rail=1)
        with mmap.mmap(-1, 4096) as pages:
            of_caller = client.register((np.frombuffer(pages, np.uint8).ctypes.data, 4096), rail=0)
        text = node.config_path.read_text()
        text = text.replace("regions_per_client = 8", "regions_per_client = 1")
        node.kill()
        last_rail = text.rindex("[[rail]]")
        node.config_path.write_text(text[:last_rail])
        node = nodes.again(node)
        assert client.wait_attached(30) == 2
        ended: dict[Region | Buffer, tuple[str, str]] = {
            too_many: ("limit", "raise limits.regions_per_client"),
            of_rail_1: ("bad_rail", "rail 1; this node has rails 0 to 0"),
            of_caller: ("bad_address", "no readable and writable memory of this process"),
        }
        for region, (code, why) in ended.items():
            for _ in range(2):
                with pytest.raises(RegionError, match=f"the daemon that came did not take it: .*{why}") as refused:
                    region.offer()
                assert refused.value.code == code
            (region.close if isinstance(region, Buffer) else region.unregister)()
        sender.wait_attached(30)
        source = sender.alloc(4096)
        source.array[:] = 5
        sender.write(sender.open(first.offer()), [source.address], [first.address], 4096).wait(30)
        assert first.array.all()
        node = configured_anew(nodes, node, "regions_per_client = 1", "regions_per_client = 2")
        assert client.wait_attached(30) == 3
        first.offer()
        client.alloc(4096)


def test_a_wait_for_a_daemon_that_refuses_says_why_and_ends_when_it_no_longer_does(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attaching, "_PATIENCE_S", 600)
    node = nodes.start(limits={"max_clients": 8, "regions_per_client": 8})
    with node.connect(0) as one, node.connect(1) as other:
        regions = [one.alloc(4096), one.alloc(4096)]
        node = configured_anew(nodes, node, "regions_per_client = 8", "regions_per_client = 1")
        with pytest.raises(WaitTimeout, match=r"has 1 regions; raise limits\.regions_per_client"):
            one.wait_attached(2)
        node = configured_anew(nodes, node, "regions_per_client = 1", "regions_per_client = 8")
        one.wait_attached(30)
        assert all(region.offer() for region in regions)
        other.wait_attached(30)
        node = configured_anew(nodes, node, "max_clients = 8", "max_clients = 1")
        until(lambda: sorted((one.attachment.gone, other.attachment.gone)) == [False, True], "one has the place")
        first, second = (one, other) if other.attachment.gone else (other, one)
        with pytest.raises(WaitTimeout, match=r"1 clients are attached already; raise limits\.max_clients"):
            second.wait_attached(2)
        first.close()
        second.wait_attached(30)


def test_a_client_that_lacks_descriptors_attaches_once_it_has_some(pair: Pair) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(os.listdir("/proc/self/fd"))
    pair.prefill.kill()
    until(lambda: pair.sender.attachment.connection.failure is not None, "the daemon's death is noticed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # what is open stays; poll() takes no more than so many
    try:
        with pytest.raises(WaitTimeout, match="ulimit -n"):
            pair.sender.wait_attached(3.0)
        with pytest.raises(ConnectError) as refused:
            pair.prefill.connect()
        assert refused.value.code == ErrorCode.LIMIT
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_what_a_daemon_left_in_bounce_memory_is_not_placed_after_its_end(
    pair: Pair, nodes: Nodes, engines: Engines
) -> None:
    engine = engines.start(pair.decode, rank=1)
    offer = engine.ask("memory", name="target", nbytes=NBYTES, kind="private")
    remote = pair.sender.open(bytes.fromhex(offer))
    source = memory.make(pair.sender, NBYTES)
    source.array[:] = patterns.content(NBYTES, 1)
    pair.sender.write(remote, [source.address], [remote.address], BLOCK).wait(30)
    engine.ask("wipe", name="target")
    with engine.paused():
        transfer = begin(pair.sender, source, remote, 2)
        with pytest.raises(WaitTimeout):  # its frames lie there
            transfer.wait(0.5)
        pair.decode.kill()
        nodes.again(pair.decode)
        with pytest.raises(TransferError):
            transfer.wait(30)
    engine.ask("wait_attached")
    assert transfer.settled
    assert engine.ask("touched", name="target") == 0


LINGER_S = 0.2


def impatient(nodes: Nodes, engines: Engines) -> tuple[Node, Node, Engine, bytes]:
    """A prefill and a decode node that soon give sessions up; an engine with private memory, and the offer of it."""
    times = {"peer_s": 1, "session_linger_s": LINGER_S, "settle_s": 1}
    prefill, decode = nodes.start(timeouts=times), nodes.start(timeouts=times)
    engine = engines.start(decode, rank=1)
    return prefill, decode, engine, bytes.fromhex(engine.ask("memory", name="target", nbytes=NBYTES, kind="private"))


def is_given_up(sender: Node, by: Node) -> None:
    with sender.paused():
        until(lambda: "control connection ended" in by.log, "the sender's silence is noticed")
        time.sleep(2 * LINGER_S)


def test_a_session_that_was_given_up_settles_nothing_that_may_still_land(nodes: Nodes, engines: Engines) -> None:
    prefill, decode, engine, offer = impatient(nodes, engines)
    with prefill.connect() as sender:
        remote = sender.open(offer)
        source = memory.make(sender, NBYTES)
        source.array[:] = patterns.content(NBYTES, 1)
        with engine.paused():
            transfer = begin(sender, source, remote, 1)
            with pytest.raises(WaitTimeout):  # its frames lie there
                transfer.wait(0.5)
            is_given_up(prefill, decode)
            with pytest.raises(Unsettled):
                transfer.wait_settled(3.0)
        until(lambda: transfer.settled, "the transfer settles once the engine has emptied its memory")
        engine.ask("wipe", name="target")
        time.sleep(0.5)
        assert engine.ask("touched", name="target") == 0


def test_a_session_that_was_given_up_keeps_nobody_from_engines_that_run(nodes: Nodes, engines: Engines) -> None:
    prefill, decode, engine, offer = impatient(nodes, engines)
    with prefill.connect(0) as sender, prefill.connect(1) as other, decode.connect(0) as receiver:
        remote = sender.open(offer)
        source = memory.make(sender, NBYTES)
        link = memory.link(other, receiver, NBYTES)
        with engine.paused():
            transfer = begin(sender, source, remote, 1)
            with pytest.raises(WaitTimeout):
                transfer.wait(0.5)
            is_given_up(prefill, decode)
            begin(other, link.source, link.remote, 2).wait(20)
            assert not transfer.done
        transfer.wait(20)


# ---- answers that come after the time-out ----


def test_a_daemon_that_answered_too_late_can_be_asked_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    with pair.prefill.connect(rank=1, route="relay_all") as sender:
        link = memory.link(sender, pair.receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        private = np.zeros(NBYTES, np.uint8)
        with monkeypatch.context() as patched:
            patched.setattr(attachment, "LOCAL_TIMEOUT_S", 0.2)
            with pair.decode.paused(), pytest.raises(WaitTimeout):
                pair.receiver.register(private)
            with pair.prefill.paused(), pytest.raises(WaitTimeout):
                begin(sender, link.source, link.remote, 1)
        send(link, link.remote, 2)
        region = pair.receiver.register(private)
        begin(sender, link.source, sender.open(region.offer()), 3).wait(30)
        assert patterns.arrived(link.source.array, private, BLOCKS, BLOCK, 3)
