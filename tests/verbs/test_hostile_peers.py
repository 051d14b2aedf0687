"""Peers that break the rules of the control connection, as senders and as receivers, on verbs rails: the daemon says
what was wrong, closes that connection, and goes on for others."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np
import pytest
from helpers import memory, patterns, processes, rail_devices
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.raw_peer import challenge, greeting
from helpers.waiting import until

from railrelay.client import RelayError, Unsettled, protocol
from railrelay.client.protocol import Endpoint, PeerMessage, RailFacts
from railrelay.client.regions import decode_offer

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(bool(rail_devices.missing()), reason=rail_devices.missing() or "there"),
    pytest.mark.skipif(rail_devices.real(), reason="the peers have no devices"),
]

BLOCKS, BLOCK = 64, 16384
NBYTES = BLOCKS * BLOCK
FACTS: Final = [RailFacts(f"hostile{number}", "verbs", "127.1.0.9", 0) for number in range(2)]
END: Final = Endpoint(0, bytes(10) + b"\xff\xff\x7f\x01\x00\x09", 0, 5, 5, 1024)
INSTANCES: Final = itertools.count(5000)


def framed(message: PeerMessage) -> bytes:
    return packed(protocol.encode(message))


def packed(packet: bytes) -> bytes:
    return protocol.LENGTH_PREFIX.pack(len(packet)) + packet


def raw(**fields: object) -> bytes:
    """A message whose fields have wrong types, or too many or too few."""
    return packed(msgspec.msgpack.encode(fields))


def received(link: socket.socket) -> PeerMessage | None:
    """None: the other end has closed."""
    with contextlib.suppress(ConnectionResetError):
        prefix = link.recv(4, socket.MSG_WAITALL)
        if len(prefix) == 4:
            (length,) = protocol.LENGTH_PREFIX.unpack(prefix)
            return protocol.peer_message(link.recv(length, socket.MSG_WAITALL))
    return None


@dataclass
class Scene:
    prefill: Node
    decode: Node
    link: Link
    seeds: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def others_work(self) -> None:
        seed = next(self.seeds)
        taken, put = patterns.order(BLOCKS, BLOCK, seed)
        source, remote = np.uint64(self.link.source.address), self.link.remote
        self.link.sender.write(remote, taken + source, put + np.uint64(remote.address), BLOCK).wait(30)
        assert patterns.arrived(self.link.source.array, self.link.destination.array, BLOCKS, BLOCK, seed)

    def said(self, node: Node, text: str) -> None:
        """One record says it."""
        until(lambda: any(text in error["text"] for error in node.errors()), f"{text!r} is said")
        assert "protocol" in {error["code"] for error in node.errors() if text in error["text"]}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One pair of daemons has to survive all of these tests."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), "verbs", limit_s=400)
    prefill, decode = nodes.pair((2, 2), limits={"max_peers": 256}, timeouts={"connect_s": 2, "peer_s": 5})
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        yield Scene(prefill, decode, link)
    nodes.close()


# ---- a sender ----


@pytest.fixture
def sender(scene: Scene) -> Iterator[socket.socket]:
    """The control connection of a session."""
    with socket.create_connection(protocol.parse_session(scene.decode.session)) as link:
        link.settimeout(20)
        link.sendall(b"".join(framed(one) for one in greeting(next(INSTANCES), "hostile:1", FACTS)))
        assert isinstance(received(link), protocol.Challenge)
        assert isinstance(received(link), protocol.Welcome)
        yield link
    scene.others_work()
    assert processes.alive(scene.decode.pid)


def ends(link: socket.socket) -> None:
    """What it still says is dropped."""
    while received(link) is not None:
        pass


def connect(number: int, **changes: object) -> protocol.RailConnect:
    return msgspec.structs.replace(protocol.RailConnect(number, 0, 0, False, 1, END, 0), **changes)


WRONG: Final = [
    raw(t="RailConnect", id=1),
    raw(t="RailConnect", id="x", local_rail=0, remote_rail=0, express=False, epoch=1),
    raw(t="RailConnect", id=1, local_rail=0, remote_rail=0, express=False, epoch=1, endpoint=[1, 2]),
    raw(t="RailConnect", id=1, local_rail=0, remote_rail=0, express=False, epoch=1, more=1),
    raw(t="FenceRail", id=1, connection=1.5),
    raw(t="FenceRail", id=1, connection=1, wait_s="long"),
    raw(t="RailState", rail="0", up=True),
    raw(t="RailLost", connection=None),
    raw(t="Look", id=None),
    raw(t="PeerRegionGone", id=1, handle=b"x"),
    raw(t="Nothing", id=1),
    raw(id=1),
    packed(b"\xc1"),
    packed(b""),
    b"\xff\xff\xff\xff",
]


@pytest.mark.parametrize("packet", WRONG, ids=range(len(WRONG)))
def test_a_message_of_wrong_shape_ends_its_session(scene: Scene, sender: socket.socket, packet: bytes) -> None:
    sender.sendall(packet)
    ends(sender)
    scene.said(scene.decode, "control connection of hostile:1")


@pytest.mark.parametrize(
    "message",
    [
        *greeting(9999),
        protocol.Challenge(2, protocol.PROTOCOL_VERSION, 9999, bytes(32)),
        protocol.Look(2, []),
        protocol.Looked(2, FACTS, [1500, 1500], b""),
        protocol.PeerRegionGone(2, 1),
        protocol.PeerAbort(2, 5, [0], 0, 1),
        protocol.RailLost(1),
        protocol.RailState(0, up=False),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_that_no_sender_sends_ends_its_session(
    scene: Scene, sender: socket.socket, message: PeerMessage
) -> None:
    sender.sendall(framed(message))
    ends(sender)
    scene.said(scene.decode, f"unexpected {type(message).__name__}")


def test_answers_that_nobody_waits_for_are_nothing(sender: socket.socket) -> None:
    for answer in (
        protocol.RailToken(77, 1, b"", END),
        protocol.RailFenced(77, 1 << 62, b"odd"),
        protocol.PeerRegion(77, -1, -1, -1, -1, -1, -1, -1),
        protocol.PeerDone(-5),
    ):
        sender.sendall(framed(answer))
    sender.sendall(framed(protocol.Ping(3)))
    assert received(sender) == protocol.PeerDone(3)


@pytest.mark.parametrize(
    "endpoint",
    [
        {"gid": b""},
        {"gid": bytes(17)},
        {"qpn": -1},
        {"qpn": 1 << 24},
        {"psn": 1 << 24},
        {"lid": 1 << 16},
        {"lid": -1},
        {"mtu": 0},
        {"mtu": 1500},
        {"through": 2},
        {"through": -1},
    ],
    ids=str,
)
def test_a_queue_pair_that_cannot_be_ends_its_session(
    scene: Scene, sender: socket.socket, endpoint: dict[str, int | bytes]
) -> None:
    sender.sendall(framed(connect(2, endpoint=msgspec.structs.replace(END, **endpoint))))
    refused = received(sender)
    assert isinstance(refused, protocol.Refused)
    assert refused.code == "protocol"
    ends(sender)
    scene.said(scene.decode, "describes a queue pair that cannot be")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (connect(2, remote_rail=2), "bad_rail"),
        (connect(2, remote_rail=-1), "bad_rail"),
        (connect(2, local_rail=2), "bad_rail"),
        (connect(2, through=7), "bad_rail"),
        (connect(2, through=-1), "bad_rail"),
        (connect(2, endpoint=None), "bad_rail"),
        (protocol.FenceRail(2, 12345), "peer_lost"),
        (protocol.FenceRail(2, -1, float("nan")), "peer_lost"),
        (protocol.PeerCloseRegion(2, 4711), "bad_region"),
        (protocol.PeerCloseRegion(2, -1), "bad_region"),
        (protocol.PeerOpenRegion(2, b""), "bad_capability"),
        (protocol.PeerNote(2, 4711, 1, b""), "region_gone"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(sender: socket.socket, message: PeerMessage, code: str) -> None:
    sender.sendall(framed(message))
    refused = received(sender)
    assert isinstance(refused, protocol.Refused)
    assert refused.code == code
    sender.sendall(framed(protocol.Ping(3)))
    assert received(sender) == protocol.PeerDone(3)


@pytest.mark.parametrize("instance", [0, -1, 1 << 63, (1 << 64) - 1])
def test_an_instance_that_cannot_be_is_refused(scene: Scene, instance: int) -> None:
    with socket.create_connection(protocol.parse_session(scene.decode.session)) as link:
        link.settimeout(20)
        link.sendall(b"".join(framed(one) for one in greeting(instance, "hostile:1", FACTS)))
        assert isinstance(received(link), protocol.Challenge)
        refused = received(link)
        assert isinstance(refused, protocol.Refused)
        assert refused.code == "protocol"
        ends(link)
    scene.said(scene.decode, f"has instance {instance}; expected")
    scene.others_work()


def test_more_queue_pairs_than_two_nodes_need_are_refused(scene: Scene, sender: socket.socket) -> None:
    """All of them asked for in one packet."""
    sender.sendall(b"".join(framed(connect(number, probe=number % 2 == 0)) for number in range(2, 202)))
    answers = [received(sender) for _ in range(200)]
    assert sum(isinstance(answer, protocol.RailToken) for answer in answers) <= 4 * 2 * 2
    refused = [answer for answer in answers if isinstance(answer, protocol.Refused)]
    assert {answer.code for answer in refused} == {"limit"}
    sender.close()
    assert scene.decode.fabric is not None
    device = scene.decode.devices[0].address
    until(lambda: scene.decode.fabric.queue_pairs(device).__len__() <= 4, "they are gone")  # type: ignore[union-attr]


def test_a_flood_of_requests_holds_up_nobody(scene: Scene, sender: socket.socket) -> None:
    numbers = range(2, 5000)
    sender.sendall(b"".join(framed(protocol.FenceRail(number, number, 1e9)) for number in numbers))
    scene.others_work()
    left = set(numbers)
    with sender.makefile("rb") as answers:
        while left:
            (length,) = protocol.LENGTH_PREFIX.unpack(answers.read(4))
            left.discard(getattr(protocol.peer_message(answers.read(length)), "id", 0))


@pytest.mark.parametrize("more", [connect(9), protocol.Look(9, [])])
def test_a_stranger_may_look_once_and_no_more(scene: Scene, more: PeerMessage) -> None:
    with socket.create_connection(protocol.parse_session(scene.decode.session)) as link:
        link.settimeout(20)
        opening, _ = greeting(1)
        link.sendall(framed(opening) + framed(protocol.Look(2, [])))
        assert isinstance(received(link), protocol.Challenge)
        looked = received(link)
        assert isinstance(looked, protocol.Looked)
        assert looked.id == 2
        link.sendall(framed(more))
        ends(link)
    scene.others_work()


# ---- a receiver ----


class Receiver:
    """Answers Opening by Challenge, Hello by Welcome, which ``then`` follows, and other requests as ``answer`` says."""

    def __init__(
        self, then: bytes, answer: Callable[[PeerMessage], PeerMessage | None], welcome: dict[str, object]
    ) -> None:
        self._then, self._answer = then, answer
        self._challenge = {name: value for name, value in welcome.items() if name == "instance"}
        self._welcome = {name: value for name, value in welcome.items() if name != "instance"}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._link: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        instance = next(INSTANCES)
        with contextlib.suppress(OSError):
            while True:
                link, _ = self._listener.accept()
                self._link = link
                self.connections += 1
                with link, contextlib.suppress(ConnectionError):
                    self._talk(link, instance)

    def _talk(self, link: socket.socket, instance: int) -> None:
        while (message := received(link)) is not None:
            if isinstance(message, protocol.Opening):
                link.sendall(framed(msgspec.structs.replace(challenge(message, instance), **self._challenge)))
            elif isinstance(message, protocol.Hello):
                welcome = protocol.Welcome(message.id, 0, FACTS, b"")
                link.sendall(framed(msgspec.structs.replace(welcome, **self._welcome)) + self._then)
            elif isinstance(message, protocol.Ping):
                link.sendall(framed(protocol.PeerDone(message.id)))
            elif (answer := self._answer(message)) is not None:
                link.sendall(framed(answer))

    def offer(self) -> bytes:
        """Of a region that is not there."""
        facts = {"session": self.session, "capability": bytes(16), "address": 0, "nbytes": 4096, "rail": 0}
        return msgspec.msgpack.encode(facts)

    def close(self) -> None:
        for end in filter(None, [self._listener, self._link]):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._thread.join(20)
        self._listener.close()


@contextlib.contextmanager
def receiving(
    scene: Scene,
    then: bytes = b"",
    answer: Callable[[PeerMessage], PeerMessage | None] = lambda _: None,
    welcome: dict[str, object] | None = None,
) -> Iterator[Receiver]:
    made = Receiver(then, answer, welcome or {})
    try:
        yield made
    finally:
        made.close()
        scene.others_work()
        assert processes.alive(scene.prefill.pid)


def region(number: int, **changes: object) -> protocol.PeerRegion:
    whole = protocol.PeerRegion(number, 7, 1 << 40, 4096, 0, 0, 0, 512, 1, 1 << 40, (5, 5))
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    ("then", "text"),
    [
        (framed(protocol.RailState(2, up=False)), "tells the state of a rail 2"),
        (framed(protocol.RailState(-1, up=True)), "tells the state of a rail -1"),
        (framed(protocol.PeerRegionGone(1, -1)), "PeerRegionGone with a number that cannot be"),
        (framed(protocol.PeerRegionGone(1, 1 << 32)), "PeerRegionGone with a number that cannot be"),
        (framed(protocol.PeerAbort(1, 5, [1], 256, 1)), "names a client 256"),
        (framed(protocol.PeerAbort(1, 5, [1], 0, -1)), "names a client 0 of serial -1"),
        (framed(protocol.PeerAbort(1, -5, [1], 0, 1)), "PeerAbort with a number that cannot be"),
        (framed(protocol.RailConnect(1, 0, 0, False, 1)), "unexpected RailConnect"),
        (framed(protocol.FenceRail(1, 1)), "unexpected FenceRail"),
        (framed(protocol.Look(1, [])), "unexpected Look"),
        (framed(protocol.Looked(1, FACTS, [], b"")), "unexpected Looked"),
        (framed(greeting(5)[0]), "unexpected Opening"),
        (framed(greeting(5)[1]), "unexpected Hello"),
        (raw(t="RailState", rail=0, up=2), "not a message"),
        (raw(t="RailLost", connection=[]), "not a message"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_receiver_says_ends_its_connection(scene: Scene, then: bytes, text: str) -> None:
    with receiving(scene, then) as peer, contextlib.suppress(RelayError):
        scene.link.sender.peer(peer.session, 0.3)
        scene.said(scene.prefill, text)
        until(lambda: peer.connections > 1, "it is connected again")
    with contextlib.suppress(RelayError):  # whether it has been seen to be gone is no matter
        scene.link.sender.peer(peer.session, 0.1)


@pytest.mark.parametrize(
    "then",
    [framed(protocol.RailLost(number)) for number in (-1, 0, 1, 1 << 63)]
    + [framed(protocol.PeerRegionGone(1, 4711)), framed(protocol.RailState(0, up=False)) * 1000],
    ids=range(6),
)
def test_news_of_what_is_not_known_is_harmless(scene: Scene, then: bytes) -> None:
    with receiving(scene, then) as peer:
        scene.link.sender.peer(peer.session, 5)
        scene.others_work()
        assert peer.connections == 1


@pytest.mark.parametrize("welcome", [{"instance": 0}, {"instance": -1}, {"instance": 1 << 63}, {"rails": []}], ids=str)
def test_a_welcome_that_cannot_be_is_an_error_of_that_peer(scene: Scene, welcome: dict[str, object]) -> None:
    with receiving(scene, welcome=welcome) as peer:
        with pytest.raises(RelayError, match=r"has instance|has 0 rails"):
            scene.link.sender.peer(peer.session, 1)
        assert not [error for error in scene.prefill.errors() if error["code"] == "internal"]


@pytest.mark.parametrize(
    "change",
    [
        {"handle": -1},
        {"handle": 1 << 32},
        {"rail": 2},
        {"rail": -1},
        {"bytes": 0},
        {"bytes": 1 << 63},
        {"owner": 256},
        {"owner": -1},
        {"owner_serial": -1},
        {"owner_serial": 1 << 63},
        {"window_bytes": -1},
        {"iova": (1 << 64) - 1},
        {"rkeys": (1,)},
        {"rkeys": (1 << 32, 1)},
        {"rkeys": tuple(range(17))},
        {"aborted": b"odd"},
        {"aborted": bytes(8 * 65537)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_region_that_cannot_be_ends_its_connection(scene: Scene, change: dict[str, object]) -> None:
    def answer(message: PeerMessage) -> PeerMessage | None:
        return region(message.id, **change) if isinstance(message, protocol.PeerOpenRegion) else None

    with receiving(scene, answer=answer) as peer:
        with pytest.raises(RelayError) as failure:
            scene.link.sender.open(peer.offer())
        assert failure.value.code.value == "protocol"
        until(lambda: peer.connections > 1, "the connection was closed, and there is another")
        assert not [error for error in scene.prefill.errors() if error["code"] == "internal"]


@pytest.mark.parametrize("endpoint", [{"qpn": 1 << 24}, {"through": 1}, {"mtu": 7}, {"gid": b"short"}], ids=str)
def test_the_other_end_of_a_queue_pair_that_cannot_be_ends_its_connection(
    scene: Scene, endpoint: dict[str, int | bytes]
) -> None:
    def answer(message: PeerMessage) -> PeerMessage | None:
        if isinstance(message, protocol.PeerOpenRegion):
            return region(message.id)
        if isinstance(message, protocol.RailConnect):
            through = msgspec.structs.replace(END, through=message.through)
            return protocol.RailToken(message.id, 3, b"", msgspec.structs.replace(through, **endpoint))
        return None

    with receiving(scene, answer=answer) as peer:
        remote = scene.link.sender.open(peer.offer())
        transfer = scene.link.sender.write(remote, [scene.link.source.address], [remote.address], 4096, timeout=1)
        scene.said(scene.prefill, "describes a queue pair that cannot be")
        until(lambda: peer.connections > 1, "the connection was closed, and there is another")
        with pytest.raises(RelayError):
            transfer.wait(30)
    assert decode_offer(peer.offer()).session == peer.session


def test_the_next_queue_pair_is_made_while_a_fence_is_waited_for_and_ended_if_no_slice_wants_it(scene: Scene) -> None:
    """The peer's queue pair answers nothing, and the peer says what was placed once it is asked for another one."""
    connected: list[int] = []
    fenced: list[int] = []

    def answer(message: PeerMessage) -> PeerMessage | None:
        match message:
            case protocol.PeerOpenRegion():
                return region(message.id)
            case protocol.RailConnect():
                number = 900 if message.probe else 3 + len(connected)
                connected.extend([] if message.probe else [number])
                end = msgspec.structs.replace(END, through=message.through)
                return protocol.RailToken(message.id, number, b"", end)
            case protocol.FenceRail() if len(connected) > 1 or message.connection == 900:
                fenced.append(message.connection)
                return protocol.RailFenced(message.id, 0, b"")
        return None

    with receiving(scene, answer=answer) as peer:
        remote = scene.link.sender.open(peer.offer())
        transfer = scene.link.sender.write(remote, [scene.link.source.address], [remote.address], 4096, timeout=1)
        until(lambda: len(connected) == 2, "another queue pair is made")
        assert 3 not in fenced
        with pytest.raises(Unsettled):
            transfer.wait(30)
        until(lambda: 4 in fenced, "the fence is asked for again, and the other queue pair is ended", 30)
        assert connected == [3, 4]
        assert fenced.index(3) < fenced.index(4)


def test_names_that_a_peer_makes_up_fill_no_table_of_errors(scene: Scene) -> None:
    before = len(scene.decode.errors())
    for number in range(20):
        with socket.create_connection(protocol.parse_session(scene.decode.session)) as link:
            link.settimeout(20)
            name = f"made up {number}"
            link.sendall(b"".join(framed(one) for one in greeting(next(INSTANCES), name, FACTS)))
            assert isinstance(received(link), protocol.Challenge)
            assert isinstance(received(link), protocol.Welcome)
            link.sendall(framed(protocol.RailState(9, up=True)))
            ends(link)
    scene.said(scene.decode, "made up 19")
    assert len(scene.decode.errors()) <= before + 1
