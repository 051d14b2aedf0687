"""Connecting to peers, takeover and registration where something fails: parts of the daemon over a fake data plane."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Endpoint, RailFacts
from railrelay.daemon import authentication, config, dmabuf, emulated
from railrelay.daemon.authentication import ACCEPTING, Secrets
from railrelay.daemon.commands import Commands
from railrelay.daemon.context import Context
from railrelay.daemon.emulated import Helpers
from railrelay.daemon.flush import Flush, Place
from railrelay.daemon.link import Link
from railrelay.daemon.offers import Offers
from railrelay.daemon.peers import Peer, Peers, Sender
from railrelay.daemon.plane import MAX_FLUSH_TARGETS
from railrelay.daemon.requests import Requests
from railrelay.daemon.sessions import DEBTS_AT_A_TIME, MAX_STRANGERS, STRANGERS_OF_A_HOST, Session, Sessions
from railrelay.daemon.takeover import Pair, Takeover
from railrelay.daemon.tls import Tls
from railrelay.daemon.verbs import Keys, RailPort, Verbs

if TYPE_CHECKING:
    from railrelay.daemon.client import Client
    from railrelay.daemon.rails import Rails

TIME_LIMIT_S = 10
LOADED = config.parse('[[rail]]\nnic = "verbs"\n[[rail]]\nnic = "verbs"\n[verbs]\nprobe_s = 0.05\n')
PORTS = {number: RailPort(f"mlx5_{number}", 1, 3, "") for number in range(2)}
REMOTE = Endpoint(0, bytes(16), 0, 1, 1, 1024)


def rail_facts() -> list[RailFacts]:
    return [RailFacts(f"rail{number}", "verbs", f"10.0.0.{number + 1}", 0) for number in range(2)]


class Plane:
    """Answers each command of a rail at once. ``broken``: devices that cannot be asked."""

    def __init__(self) -> None:
        self.commands = Commands(1)
        self.broken: set[int] = set()
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.made: set[int] = set()
        self.on_connect: Callable[[], None] = lambda: None

    def verbs_facts(self, rail: int) -> dict[str, object]:
        if rail in self.broken:
            raise OSError(errno.EIO, "Input/output error")
        return {
            "gid": bytes(10) + b"\xff\xff" + bytes([10, 0, 0, rail + 1]),
            "lid": 0,
            "mtu": 4096,
            "up": True,
            "ethernet": True,
            "max_sge": 30,
            "max_qp_wr": 8192,
            "max_cqe": 65536,
            "max_mr_size": 1 << 40,
        }

    def new_endpoint(self, _rail: int, _through: int, **_sending: bool) -> tuple[int, int, int]:
        number = len(self.calls) + 1
        self.made.add(number)
        self.calls.append(("new_endpoint", (number,)))
        return number, 1, 1

    def connect_endpoint(self, _number: int, **_route: object) -> None:
        self.on_connect()

    def drop_endpoint(self, number: int) -> None:
        self.made.discard(number)

    def deregister_memory(self, key: int) -> None:
        self.calls.append(("deregister_memory", (key,)))
        if key == 2:
            raise OSError(errno.EIO, "Input/output error")

    def drain_handle(self, *arguments: int) -> None:
        self.calls.append(("drain_handle", arguments[:-1]))
        asyncio.get_running_loop().call_soon(self.commands.answered, arguments[-1], 0)

    def drop_peer(self, *arguments: int) -> None:
        self.calls.append(("drop_peer", arguments[:1]))
        asyncio.get_running_loop().call_soon(self.commands.answered, arguments[-1], 0)

    def add_peer(self, row: int, rails: int) -> None:
        self.calls.append(("add_peer", (row, rails)))

    def add_sender(self, *arguments: object) -> None:
        self.calls.append(("add_sender", arguments))

    def close_sender(self, *arguments: object) -> None:
        self.calls.append(("close_sender", arguments))


class State:
    """Keeps error records and ignores the rest."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def error(self, _code: ErrorCode, text: str, *, key: str = "") -> None:
        self.errors.append(key + text)

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Node:
    def __init__(self) -> None:
        self.plane, self.state, facts = Plane(), State(), rail_facts()
        plane, state, unused = cast("Any", self.plane), cast("Any", self.state), cast("Any", None)
        self.verbs = Verbs(LOADED, plane, self.plane.commands, facts, PORTS)
        self.ctx = Context(
            LOADED, unused, 1, "here:1", facts, state, plane, self.plane.commands, unused, self.verbs,
            Secrets(LOADED.security), Tls(LOADED.security, state.error),
        )  # fmt: skip


def on_node(scenario: Callable[[Node], Coroutine[None, None, None]]) -> None:
    """Runs ``scenario(node)`` in a loop of its own, within TIME_LIMIT_S."""

    async def run() -> None:
        node = Node()
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                await scenario(node)
        finally:
            await node.ctx.close_tasks()

    asyncio.run(run())


async def until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.001)


# ---- a peer that is a bare TCP connection ----


class User:
    """A client that uses the peer."""

    def __init__(self) -> None:
        self.remotes: dict[int, object] = {}
        self.told: list[protocol.Message] = []

    def send(self, message: protocol.Message) -> None:
        self.told.append(message)


class Receiver:
    """Writes ``behind`` in one packet with Welcome. Its devices are all there but those of the rails ``broken``; its
    ends of the first ``fragile`` queue pairs are lost at once, which it says in one packet with their token. It answers
    no fence."""

    def __init__(self, behind: protocol.PeerMessage | None = None, broken: int = -1, fragile: int = 0) -> None:
        self.behind, self.broken, self.fragile = behind, broken, fragile
        self.connections = 0
        self.told: list[protocol.PeerMessage] = []
        self.welcomed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        prefix = protocol.LENGTH_PREFIX
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = prefix.unpack(await reader.readexactly(prefix.size))
                packets = map(protocol.encode, self.answers(protocol.peer_message(await reader.readexactly(length))))
                writer.write(b"".join(prefix.pack(len(packet)) + packet for packet in packets))
        writer.close()

    def answers(self, message: protocol.PeerMessage) -> list[protocol.PeerMessage]:
        if isinstance(message, protocol.Opening):
            return [protocol.Challenge(message.id, protocol.PROTOCOL_VERSION, 7, bytes(protocol.NONCE_BYTES))]
        if isinstance(message, protocol.Hello):
            self.welcomed += 1
            welcome = protocol.Welcome(message.id, 0, rail_facts(), b"")
            return [welcome] if self.behind is None else [welcome, self.behind]
        self.told.append(message)
        if isinstance(message, protocol.RailConnect):
            if message.through == self.broken:
                return [protocol.Refused(message.id, ErrorCode.RAIL_DOWN, "no queue pair")]
            self.connections += 1
            end = msgspec.structs.replace(REMOTE, through=message.through)
            token = protocol.RailToken(message.id, self.connections, b"", end)
            return [token, protocol.RailLost(self.connections)] if self.connections <= self.fragile else [token]
        return []

    def asked(self) -> list[int | None]:
        """By which of its rails the queue pairs were to go that are no probes."""
        return [one.through for one in self.told if isinstance(one, protocol.RailConnect) and not one.probe]

    def fenced(self) -> list[int]:
        """Connections whose fence was asked for."""
        return [one.connection for one in self.told if isinstance(one, protocol.FenceRail)]


@contextlib.asynccontextmanager
async def connected(node: Node, receiver: Receiver) -> AsyncIterator[tuple[Peers, Peer]]:
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peers = Peers(node.ctx, lambda _peer, _message: None)
    try:
        yield peers, await peers.connect(cast("Client", User()), f"{host}:{port}", TIME_LIMIT_S)
    finally:
        peers.close()
        server.close()


def test_debt_right_behind_welcome_is_taken_and_confirmed() -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver(protocol.PeerRegionGone(9, 5))
        async with connected(node, receiver) as (_, peer):
            await until(lambda: bool(receiver.told))
            assert receiver.told == [protocol.PeerDone(9)]
            assert ("drain_handle", (peer.row, 5)) in node.plane.calls
            assert peer.connected
        assert node.state.errors == []

    on_node(scenario)


def test_port_that_goes_down_right_behind_welcome_is_down() -> None:
    async def scenario(node: Node) -> None:
        async with connected(node, Receiver(protocol.RailState(1, up=False))) as (_, peer):
            await until(lambda: not peer.rails[1].up)
            assert peer.rails[0].up
            assert peer.connected
        assert node.state.errors == []

    on_node(scenario)


@pytest.mark.parametrize("end", ["here", "there"])
def test_rail_on_whose_device_no_queue_pair_can_be_made_is_taken_over(end: str) -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver(broken=0 if end == "there" else -1)
        if end == "here":
            node.plane.broken.add(0)
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: any(name == "add_sender" for name, _ in node.plane.calls))
            assert receiver.asked() == ([1] if end == "here" else [0, 1])
            assert len(node.plane.made) == 1
        assert len(node.state.errors) == 2  # why, and that rail 1 has taken over

    on_node(scenario)


def test_region_that_another_client_goes_on_writing_is_closed_without_a_drain() -> None:
    async def scenario(node: Node) -> None:
        receiver, close = Receiver(), protocol.PeerCloseRegion

        def drains() -> int:
            return sum(name == "drain_handle" for name, _ in node.plane.calls)

        async with connected(node, receiver) as (peers, peer):
            for _ in range(2):
                peers.region_opened(peer, 5)
            peers.close_region(peer, 5)
            await until(lambda: bool(receiver.told))
            assert drains() == 0
            peers.close_region(peer, 5)
            await until(lambda: len(receiver.told) == 2)
            assert drains() == 1
            assert [message.handle for message in receiver.told if isinstance(message, close)] == [5, 5]

    on_node(scenario)


class Refusing(Receiver):
    """Has a secret, and refuses what says Hello while it has a reason to."""

    def __init__(self, secret: bytes) -> None:
        super().__init__()
        self.secret = secret
        self.reason: ErrorCode | None = None
        self.proves = True
        self.refused = 0
        self.handshake: list[protocol.PeerMessage] = []

    def answers(self, message: protocol.PeerMessage) -> list[protocol.PeerMessage]:
        if isinstance(message, protocol.Opening):
            self.handshake = [message, *super().answers(message)]
            return self.handshake[1:]
        if not isinstance(message, protocol.Hello):
            return []
        answer: protocol.Welcome | protocol.Refused = protocol.Welcome(message.id, 0, rail_facts(), b"")
        if self.reason is not None:
            self.refused += 1
            answer = protocol.Refused(message.id, self.reason, "not you")
        proof = authentication.proof(self.secret, ACCEPTING, (*self.handshake, message, answer))
        return [msgspec.structs.replace(answer, proof=proof if self.proves else bytes(32))]


@pytest.mark.parametrize(
    ("reason", "proves"),
    [
        (ErrorCode.UNAUTHENTICATED, True),
        (ErrorCode.LIMIT, True),
        (ErrorCode.VERSION, True),
        (ErrorCode.PEER_LOST, False),
    ],
)
def test_only_the_peers_own_word_that_the_session_has_ended_ends_what_was_sent(
    tmp_path: Path, reason: ErrorCode, proves: bool
) -> None:
    secret = b"s" * 32
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(secret)

    async def scenario(node: Node) -> None:
        node.ctx = dataclasses.replace(node.ctx, secrets=Secrets(config.Security(secret_files=(str(path),))))
        receiver = Refusing(secret)
        async with connected(node, receiver) as (_, peer):
            assert peer.link is not None
            receiver.reason, receiver.proves = reason, proves
            peer.link.close("cut")
            await until(lambda: receiver.refused == 2)  # it tries again
            assert not peer.gone
            receiver.reason, receiver.proves = None, True
            await until(lambda: peer.connected)
            receiver.reason = ErrorCode.PEER_LOST
            peer.link.close("cut again")
            await until(lambda: peer.gone)
            await until(lambda: ("drop_peer", (peer.row,)) in node.plane.calls)

    on_node(scenario)


def added(node: Node) -> list[tuple[object, ...]]:
    return [arguments for name, arguments in node.plane.calls if name == "add_sender"]


def test_end_that_is_lost_before_it_is_used_is_not_used() -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver(fragile=1)
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            assert receiver.asked() == [0, 0]
            assert [sender.connection for sender in peers._senders.values()] == [2]
            assert any("the peer has lost its end" in error for error in node.state.errors)
            assert protocol.FenceRail in map(type, receiver.told)
            assert not peer.lost_early

    on_node(scenario)


def test_peer_that_breaks_every_connection_is_connected_more_and_more_seldom() -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver(protocol.RailState(9, up=True))
        server = await asyncio.start_server(receiver.serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        peers = Peers(node.ctx, lambda _peer, _message: None)
        with contextlib.suppress(RelayError):  # it may be seen while it is connected
            await peers.connect(cast("Client", User()), f"{host}:{port}", 1.0)
        peers.close()
        server.close()
        assert 1 <= receiver.welcomed <= 1 + 6  # after pauses of at least 25, 50, 100, 200, 400 and 800 ms
        assert any("tells the state of a rail 9" in error for error in node.state.errors)

    on_node(scenario)


def test_port_that_goes_down_while_its_queue_pair_is_connected_carries_nothing() -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver()
        async with connected(node, receiver) as (peers, peer):

            def down() -> None:
                peer.rails[0] = msgspec.structs.replace(peer.rails[0], up=False)

            node.plane.on_connect = down
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            assert receiver.asked() == [0, 1]
            assert any("a port went down" in error for error in node.state.errors)

    on_node(scenario)


def test_connection_that_is_lost_already_is_not_given_back() -> None:
    async def scenario(node: Node) -> None:
        async with connected(node, Receiver()) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            [(number, sender)] = peers._senders.items()
            peers.sender_lost(number, errno.ECONNRESET)
            peers._end_takeover(number)
            assert sender.lost
            assert not sender.given_back
            assert "close_sender" not in [name for name, _ in node.plane.calls]

    on_node(scenario)


# ---- the successor of a lost queue pair ----


@pytest.mark.parametrize("meanwhile", ["nothing", "its port goes down", "its other end is lost", "a better one works"])
def test_successor_is_used_if_nothing_has_ended_it_before_it_is_wanted(meanwhile: str) -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver()
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            [number] = peers._senders
            if meanwhile == "a better one works":
                peers._rail_state(peer, protocol.RailState(0, up=False))
            peers.sender_ending(number, errno.ECONNRESET, 3)
            [successor] = peers._successors.values()
            await until(lambda: successor.made is not None)
            assert successor.made is not None
            connection, endpoint = successor.made
            assert 1 in receiver.fenced()
            if meanwhile == "its port goes down":
                peers._rail_state(peer, protocol.RailState(0, up=False))
            if meanwhile == "its other end is lost":
                peers._rail_lost(peer, protocol.RailLost(connection))
            if meanwhile == "a better one works":
                peers._rail_state(peer, protocol.RailState(0, up=True))
            peers.connect_wanted(0, peer.row, 0, False, 2)
            await until(lambda: len(added(node)) == 2)
            used = added(node)[1][-1] == endpoint
            assert used == (meanwhile == "nothing")
            await until(lambda: used or connection in receiver.fenced())
            await until(lambda: used or endpoint not in node.plane.made)
            assert successor.pair == (Pair(1, 1) if meanwhile == "a better one works" else Pair(0, 0))
            assert not peers._successors

    on_node(scenario)


@pytest.mark.parametrize(
    ("error", "pair"),
    [
        (errno.ETIMEDOUT, Pair(1, 1)),
        (errno.EFAULT, Pair(1, 1)),  # of a device that could not send
        (errno.ECONNRESET, Pair(0, 0)),
    ],
)
def test_successor_goes_by_another_pair_if_the_own_one_did_not_reach_the_peer(error: int, pair: Pair) -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver()
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            [number] = peers._senders
            peers.sender_ending(number, error, 3)
            [successor] = peers._successors.values()
            assert successor.pair == pair
            await until(lambda: successor.made is not None)

    on_node(scenario)


def test_who_waits_for_a_successor_whose_port_goes_down_gets_another_at_once() -> None:
    async def scenario(node: Node) -> None:
        began, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            node.plane.on_connect = lambda: None
            began.set()
            goes_on.wait(TIME_LIMIT_S)

        receiver = Receiver()
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            [number] = peers._senders
            node.plane.on_connect = stand_still
            peers.sender_ending(number, errno.ECONNRESET, 3)
            await until(began.is_set)
            peers.connect_wanted(0, peer.row, 0, False, 2)
            peers._rail_state(peer, protocol.RailState(0, up=False))
            await until(lambda: len(added(node)) == 2)
            assert list(peers._senders.values())[-1].pair == Pair(1, 1)
            assert not goes_on.is_set()
            goes_on.set()
            await until(lambda: len(node.plane.made) == 2)  # those that were added
            assert receiver.asked()[:3] == [0, 0, 1]

    on_node(scenario)


def test_successor_that_nobody_wants_is_ended_at_both_ends() -> None:
    async def scenario(node: Node) -> None:
        receiver = Receiver()
        async with connected(node, receiver) as (peers, peer):
            peers.connect_wanted(0, peer.row, 0, False, 1)
            await until(lambda: bool(added(node)))
            [(number, sender)] = peers._senders.items()
            peers.sender_ending(number, errno.ECONNRESET, 3)
            [successor] = peers._successors.values()
            peers._end_unwanted(sender)
            assert not peers._successors
            await until(lambda: len(receiver.asked()) == 2)
            await until(lambda: not node.plane.made - {added(node)[0][-1]})
            await until(lambda: successor.made is None and 2 in receiver.fenced())

    on_node(scenario)


# ---- takeover ----


def sender_of(peer: Peer) -> Sender:
    """Of rail 0, which rail 1 has taken over."""
    return Sender(peer, 0, 0, 11, Pair(1, 1))


def test_peer_that_goes_while_its_readmission_sleeps_takes_nothing_from_the_next() -> None:
    async def scenario(node: Node) -> None:
        probed, given_back = list[Peer](), list[str]()

        async def probe(peer: Peer, _rail: int, _remote_rail: int) -> None:
            probed.append(peer)

        takeover = Takeover(node.ctx, probe)
        gone, following = (Peer(0, name, rails=rail_facts(), local_rails=[0, 1]) for name in ("gone", "following"))
        takeover.carries(gone, sender_of(gone), lambda: given_back.append("gone"))
        await asyncio.sleep(0)
        gone.gone = True
        takeover.forget(gone)
        takeover.suspect(gone, Pair(0, 0))
        assert takeover.choose(following, 0, 0) == Pair(0, 0)
        takeover.carries(following, sender_of(following), lambda: given_back.append("following"))
        await until(lambda: bool(given_back))
        assert probed == [following]
        assert given_back == ["following"]

    on_node(scenario)


def own_sender_of(peer: Peer) -> Sender:
    return Sender(peer, 0, 0, 11, Pair(0, 0))


def test_pair_that_would_take_over_is_tried_once_ahead_and_again_when_a_port_is_back() -> None:
    async def scenario(node: Node) -> None:
        probed = list[Pair]()

        async def probe(_peer: Peer, rail: int, remote_rail: int) -> None:
            probed.append(Pair(rail, remote_rail))

        takeover = Takeover(node.ctx, probe)
        peer = Peer(0, "peer", rails=rail_facts(), local_rails=[0, 1])
        sender = own_sender_of(peer)
        takeover.carries(peer, sender, lambda: None)
        takeover.carries(peer, sender, lambda: None)
        await until(lambda: bool(probed))
        takeover.port_changed(False, [sender], there=1)
        takeover.port_changed(True, [sender], there=1)
        await until(lambda: len(probed) == 2)
        assert probed == [Pair(1, 1), Pair(1, 1)]

    on_node(scenario)


def test_suspect_pair_carries_before_one_whose_port_is_down_and_is_cleared_by_a_probe() -> None:
    async def scenario(node: Node) -> None:
        reached = False

        async def probe(_peer: Peer, _rail: int, _remote_rail: int) -> None:
            if not reached:
                raise RelayError(ErrorCode.RAIL_DOWN, "not reached")

        takeover = Takeover(node.ctx, probe)
        peer = Peer(0, "peer", rails=rail_facts(), local_rails=[0, 1])
        takeover.suspect(peer, Pair(1, 1))
        peer.rails[0] = msgspec.structs.replace(peer.rails[0], up=False)
        assert takeover.choose(peer, 0, 0) == Pair(1, 1)
        peer.rails[0] = msgspec.structs.replace(peer.rails[0], up=True)
        assert takeover.choose(peer, 1, 1) == Pair(0, 0)
        reached = True
        await until(lambda: takeover.choose(peer, 1, 1) == Pair(1, 1))

    on_node(scenario)


def test_pair_of_the_receiving_rail_may_take_over_from_another_sending_one() -> None:
    async def scenario(node: Node) -> None:
        async def probe(*_: object) -> None:
            pass

        takeover = Takeover(node.ctx, probe)
        peer = Peer(0, "peer", rails=rail_facts(), local_rails=[0, 1])
        node.ctx.rails[1] = msgspec.structs.replace(node.ctx.rails[1], up=False)
        assert takeover.choose(peer, 1, 0) == Pair(0, 0)

    on_node(scenario)


# ---- verbs ----


def test_device_that_fails_has_its_rail_down_and_keeps_no_endpoint() -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def scenario(node: Node) -> None:
        number, own = await node.verbs.open(0, 0)
        node.plane.on_connect = fail
        with pytest.raises(RelayError, match="rail 0: queue pair on mlx5_0: Input/output error") as failure:
            await node.verbs.connect(0, number, own, REMOTE)
        assert failure.value.code is ErrorCode.RAIL_DOWN
        with pytest.raises(RelayError, match="rail 0: queue pair on mlx5_0: Input/output error") as failure:
            await node.verbs.open(0, 0, answers=REMOTE)
        assert failure.value.code is ErrorCode.RAIL_DOWN
        assert not node.plane.made
        node.plane.broken.add(0)
        with pytest.raises(RelayError, match="rail 1: queue pair on mlx5_0, through rail 0") as failure:
            await node.verbs.open(1, 0)
        assert failure.value.code is ErrorCode.RAIL_DOWN

    on_node(scenario)


def test_endpoint_is_dropped_when_its_connect_fails_after_the_waiter_has_gone() -> None:
    async def scenario(node: Node) -> None:
        began, goes_on = threading.Event(), threading.Event()

        def fail() -> None:
            began.set()
            goes_on.wait(TIME_LIMIT_S)
            raise OSError(errno.EIO, "Input/output error")

        node.plane.on_connect = fail
        number, own = await node.verbs.open(0, 0)
        connecting = asyncio.create_task(node.verbs.connect(0, number, own, REMOTE))
        await until(began.is_set)
        connecting.cancel()
        await asyncio.wait([connecting])
        assert node.plane.made == {number}  # the call still uses it
        goes_on.set()
        await until(lambda: not node.plane.made)

    on_node(scenario)


def test_registration_that_cannot_be_ended_keeps_no_other() -> None:
    async def scenario(node: Node) -> None:
        keys = Keys(ids=[1, 2, 3], dmabuf=os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(OSError, match="Input/output error"):
            await node.verbs.deregister(keys)
        assert [arguments for name, arguments in node.plane.calls if name == "deregister_memory"] == [(3,), (2,), (1,)]
        assert keys.dmabuf == -1

    on_node(scenario)


# ---- the receiving side ----


def sessions_of(node: Node) -> Sessions:
    return Sessions(node.ctx, cast("Rails", None), Offers("here:1", 16), cast("Flush", None))


def test_no_host_takes_the_places_of_others_before_it_has_authenticated() -> None:
    async def scenario(node: Node) -> None:
        sessions = sessions_of(node)

        def came(address: str, count: int) -> list[Link]:
            return [link for _ in range(count) if (link := sessions.new_link(address)) is not None]

        crowd = came("10.0.0.1", STRANGERS_OF_A_HOST + 1)
        assert [link.closed.done() for link in crowd] == [True] + [False] * STRANGERS_OF_A_HOST
        hosts = [came(f"2001:db8::{host:x}:0:0:0:1", 1)[0] for host in range(MAX_STRANGERS - STRANGERS_OF_A_HOST)]
        neighbours = came("2001:db8:1::1", 2) + came("2001:db8:1::2", 1)  # all places are taken
        assert [link.closed.done() for link in crowd] == [True] * 4 + [False] * (STRANGERS_OF_A_HOST - 3)
        assert not any(link.closed.done() for link in hosts + neighbours)
        sessions.close()

    on_node(scenario)


def test_limits_name_the_thing_the_value_the_limit_and_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a real peer or engine comes to only after very many."""

    async def scenario(node: Node) -> None:
        sessions = sessions_of(node)

        def room() -> None:
            session = Session(0, 7, "there:1", rail_facts())
            session.opening = 4 * len(node.ctx.rails) * len(session.rails)
            sessions._check_room(session)

        for _ in range(STRANGERS_OF_A_HOST + 1):
            sessions.new_link("10.0.0.1")
        [stranger] = node.state.errors
        expected = [
            (
                stranger,
                ["16 control connections of 10.0.0.1 without Hello", "most that may wait", "keep it from here:1"],
            ),
            (refusal(room), ["there:1 has 16 rail connections to here:1", "at most 16", "restart the daemon there"]),
        ]
        client = cast("Any", SimpleNamespace(remotes={1: None}))
        unused, transfers = cast("Any", None), cast("Any", SimpleNamespace(fence=None))
        requests = Requests(node.ctx, unused, sessions, unused, transfers, unused, unused)
        note = protocol.Note(1, 1024, 1, 1, 5, b"")
        words = ["notification of transfer 1024 with tag 5", "0 to 1023 (relay.transfers)", "same railrelay version"]
        expected.append((refusal(lambda: requests._note(client, note)), words))
        monkeypatch.setattr(emulated, "MAX_MEMORIES", 1)
        helpers = Helpers()
        helpers.new_memory()
        words = ["1 pieces of memory (lanes, bounce memory and regions of all clients)", "no more can be", "unregister"]
        expected.append((refusal(helpers.new_memory), words))
        flush = Flush(node.ctx)
        flush._keys = dict.fromkeys(range(MAX_FLUSH_TARGETS), cast("Any", None))
        with pytest.raises(RelayError) as failure:
            await flush._new(MAX_FLUSH_TARGETS, Keys(), Place("region 3", 0, 4096, 0))
        words = ["region 3: 64 clients of this daemon receive into GPU memory", "at most 64 can", "receive=False"]
        expected.append((failure.value.text, words))
        for text, parts in expected:
            assert all(part in text for part in parts), text
        sessions.close()

    on_node(scenario)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RelayError) as failure:
        call()
    return failure.value.text


def test_debt_that_ends_before_it_is_paid_is_no_error() -> None:
    async def scenario(node: Node) -> None:
        sessions = sessions_of(node)
        session, link = Session(0, 7, "there:1", rail_facts()), Link(node.ctx.state.error)
        session.owed["gone", 5, 0] = lambda number: protocol.PeerRegionGone(number, 5)
        sessions._connect(session, link)
        session.owed.clear()  # the sender has closed the region
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        session.ended = True
        link.close("the test ends")
        assert node.state.errors == []

    on_node(scenario)


def test_many_debts_are_paid_a_few_at_a_time_and_before_a_queue_pair_is_given() -> None:
    async def scenario(node: Node) -> None:
        sessions, session, link = sessions_of(node), Session(0, 7, "there:1", rail_facts()), Link(node.ctx.state.error)
        server = await asyncio.get_running_loop().create_server(lambda: link, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())

        async def received() -> protocol.PeerMessage:
            (length,) = protocol.LENGTH_PREFIX.unpack(await reader.readexactly(protocol.LENGTH_PREFIX.size))
            return protocol.peer_message(await reader.readexactly(length))

        def say(message: protocol.PeerMessage) -> None:
            packet = protocol.encode(message)
            writer.write(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)

        await until(lambda: link.address != "?")
        tags = list(range(1, 1 + 3 * DEBTS_AT_A_TIME))
        for tag in tags:
            session.owed["abort", 1, tag] = lambda number, tag=tag: protocol.PeerAbort(number, tag, [], 0, 1)  # type: ignore[misc]
        sessions._connect(session, link)
        told, heard = asyncio.create_task(sessions._told(session, link)), list[int]()
        while len(heard) < len(tags):
            assert not told.done()
            debts = [await received() for _ in range(DEBTS_AT_A_TIME)]
            say(protocol.Ping(9999))
            assert await received() == protocol.PeerDone(9999)  # no more come until these are answered
            for debt in debts:
                assert isinstance(debt, protocol.PeerAbort)
                heard.append(debt.tag)
                say(protocol.PeerAborted(debt.id, True, 0))
        assert heard == tags
        await told
        await until(lambda: not session.owed)
        session.ended = True
        link.close("the test ends")
        writer.close()
        server.close()

    on_node(scenario)


# ---- the dma-buf of relay memory ----


class Exporter:
    """A helper process that is slow to end."""

    def __init__(self) -> None:
        self.waited = asyncio.Event()

    def kill(self) -> None:
        pass

    async def wait(self) -> int:
        self.waited.set()
        await asyncio.sleep(TIME_LIMIT_S)
        return 0


@pytest.mark.parametrize("missing", ["dup", "socketpair", "fork"])
def test_export_that_cannot_begin_is_refused_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def fail(*_arguments: object, **_options: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    place: dict[str, tuple[object, str]] = {
        "dup": (os, "dup"),
        "socketpair": (socket, "socketpair"),
        "fork": (asyncio, "create_subprocess_exec"),
    }

    async def scenario(_node: Node) -> None:
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(*place[missing], fail)
        with pytest.raises(RelayError, match=r"no dma-buf: .*Too many open files") as failure:
            await dmabuf.export(0, 4096, "GPU-0")
        monkeypatch.undo()
        assert failure.value.code is ErrorCode.NO_MEMORY
        assert os.listdir("/proc/self/fd") == before

    on_node(scenario)


def test_descriptor_is_closed_if_the_waiter_goes_while_the_helper_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(_node: Node) -> None:
        exported, helper = os.open(os.devnull, os.O_RDONLY), Exporter()

        async def start(*_arguments: object, **_options: object) -> Exporter:
            return helper

        async def at_once(_end: object) -> None:
            pass

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(dmabuf, "_readable", at_once)
        monkeypatch.setattr(dmabuf, "_received", lambda _end: ("", exported))
        exporting = asyncio.create_task(dmabuf.export(0, 4096, "GPU-0"))
        await helper.waited.wait()
        exporting.cancel()
        await asyncio.wait([exporting])
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(exported)

    on_node(scenario)
