"""The peer protocol: daemons that send what they like to this one, and that answer it as they like when it connects to
them; and their rail connections from the preamble on. Without authentication, with a secret, and behind TLS: as who has
neither, and as one that has both and is to be trusted no more for it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from helpers.raw_client import RawClient

from fuzz.reading import Input, Known, bent, kinds_of, message
from fuzz.scene import Entry, Keyring, Scene, scene, turns
from railrelay.client import protocol
from railrelay.client.protocol import RailFacts
from railrelay.daemon import authentication
from railrelay.daemon.authentication import ACCEPTING, CONNECTING, SEAL_BYTES
from railrelay.shm_layout import abi

MESSAGES: Final[list[type[Any]]] = kinds_of(protocol.PeerMessage)
REQUESTS: Final[Sequence[type[Any]]] = (
    protocol.PeerOpenRegion, protocol.PeerCloseRegion, protocol.RailConnect, protocol.FenceRail, protocol.PeerNote,
    protocol.Hello, protocol.Look,
)  # fmt: skip
EVENTS: Final[Sequence[type[Any]]] = (
    protocol.PeerAbort, protocol.PeerRegionGone, protocol.RailLost, protocol.RailState, protocol.Ping,
)  # fmt: skip
ANSWERS: Final[dict[type[Any], type[Any]]] = {
    protocol.Opening: protocol.Challenge,
    protocol.Hello: protocol.Welcome,
    protocol.PeerOpenRegion: protocol.PeerRegion,
    protocol.RailConnect: protocol.RailToken,
    protocol.FenceRail: protocol.RailFenced,
}
SOURCE_BYTES: Final = 65536
HANDSHAKE_TURNS: Final = 20
PAUSES_S: Final = (0.0, 0.0, 0.0, 0.001, 0.01, 0.02, 0.03, 0.06)  # the time-outs of the scene, and less
ENTRIES: Final = (Entry.NOTHING, Entry.NOTHING, Entry.SECRET, Entry.TLS)


class Wire:
    """A control connection, by hand. ``tls``: it is behind TLS, if not told otherwise."""

    def __init__(self, connected: socket.socket, tls: ssl.SSLContext | None, *, accepted: bool = False) -> None:
        self.socket = connected
        self.socket.setblocking(False)
        self.known = Known()
        self.keys: authentication.Keys | None = None
        self.handshake: list[Any] = []  # what both ends have said of it
        self.shaken = tls is None
        self._sent = 0
        self._received = self._unsaid = b""
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: ssl.SSLObject | None = None
        if tls is not None:
            name = None if accepted else "127.0.0.1"
            self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_side=accepted, server_hostname=name)

    def send(self, packet: bytes, changes: Input | None = None) -> None:
        """``changes``: to the packet with its seal."""
        if self.keys is not None:
            packet = authentication.seal(self.keys.sends, self._sent, packet) + packet
            self._sent += 1
        if changes is not None:
            packet = bent(packet, changes)
        self.send_raw(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)

    def send_raw(self, data: bytes) -> None:
        if self._tls is None:
            self.send_below(data)
        else:
            self._unsaid += data
            self._speak()

    async def shake(self) -> None:
        """Its end of the handshake of TLS, if the other end has one."""
        for _ in range(HANDSHAKE_TURNS):
            if self.shaken:
                return
            with contextlib.suppress(OSError):
                self._incoming.write(self.socket.recv(65536))
            self._speak()
            await asyncio.sleep(0.001)

    def send_below(self, data: bytes) -> None:
        """Bytes of the stream itself, whatever TLS makes of them."""
        with contextlib.suppress(OSError):
            self.socket.send(data)

    def hear(self) -> list[Any]:
        with contextlib.suppress(OSError):
            while data := self.socket.recv(65536):
                if self._tls is None:
                    self._received += data
                else:
                    self._incoming.write(data)
        self._speak()
        heard: list[Any] = []
        size = protocol.LENGTH_PREFIX.size
        while len(self._received) >= size:
            (length,) = protocol.LENGTH_PREFIX.unpack_from(self._received)
            if len(self._received) < size + length:
                break
            sealed = SEAL_BYTES * (self.keys is not None)
            packet = self._received[size + sealed : size + length]
            with contextlib.suppress(msgspec.MsgspecError):  # sealed, but for who has said something else
                heard.append(protocol.peer_message(packet))
            self._received = self._received[size + length :]
        for said in heard:
            for name in ("handle", "connection", "session_index", "owner", "id"):
                self.known.numbers += [getattr(said, name)] if hasattr(said, name) else []
            self.known.secrets += [said.token] if isinstance(said, protocol.RailToken) else []
        return heard

    def _speak(self) -> None:
        if self._tls is None:
            return
        with contextlib.suppress(ssl.SSLError):  # more is wanted; or it is over, as the other end has been told
            self._tls.do_handshake()
            self.shaken = True
            while self._unsaid:
                self._unsaid = self._unsaid[self._tls.write(self._unsaid) :]
            while data := self._tls.read(65536):
                self._received += data
        self.send_below(self._outgoing.read())


def _rails(port: int, count: int = 1) -> list[RailFacts]:
    return [RailFacts(f"rail{index}", "tcp", "127.0.0.1", port) for index in range(count)]


class Sender:
    """A daemon that connects to this one."""

    def __init__(self, at: Scene, source: Input) -> None:
        self._likely = source.byte()
        self._keyring = at.keyring if self._likely < 0xF0 else Keyring(b"?" * 32)
        self.wire = Wire(socket.create_connection(protocol.parse_session(at.session)), self._keyring.connecting)
        self.wire.known.secrets.append(msgspec.msgpack.decode(at.link.destination.offer())["capability"])
        self.wire.known.texts.append(at.session)
        self.rails: list[socket.socket] = []
        self.tokens: list[protocol.RailToken] = []
        self._facts = at.conductor.ctx.rails

    async def greet(self, source: Input) -> None:
        opening: dict[str, object] = {}
        hello: dict[str, object] = {}
        if self._likely < 0xE0:
            opening = {"protocol": protocol.PROTOCOL_VERSION, "instance": 1 + self._likely}
            opening["nonce"] = bytes(protocol.NONCE_BYTES)
            hello = {"expect": 0, "session": "127.0.0.1:9", "rails": _rails(1, 2), "proofs": []}
        opens = message(protocol.Opening, source, self.wire.known, **opening)
        self.wire.send(protocol.encode(opens))
        greets = message(
            protocol.Look if self._likely == 0 else protocol.Hello,
            source,
            self.wire.known,
            **{name: value for name, value in hello.items() if self._likely or name == "proofs"},
        )
        secret = self._keyring.secret
        challenge = await self._answer(protocol.Challenge) if secret is not None and not greets.proofs else None
        if secret is not None and challenge is not None:
            proofs = authentication.proofs([secret], CONNECTING, (opens, challenge, greets))
            greets = msgspec.structs.replace(greets, proofs=proofs)
        self.wire.send(protocol.encode(greets))
        if secret is not None and challenge is not None:
            answer = await self._answer(protocol.Welcome)
            if answer is not None:
                said = (opens, challenge, greets, msgspec.structs.replace(answer, proof=b""))
                self.wire.keys = authentication.keys(secret, CONNECTING, said)

    async def _answer(self, kind: type[Any]) -> Any:  # noqa: ANN401
        """None: something else comes, or nothing."""
        for _ in range(HANDSHAKE_TURNS):
            await turns(2)
            for said in self.wire.hear():
                return said if isinstance(said, kind) else None
        return None

    async def step(self, source: Input) -> None:
        kind = source.byte() % 8
        if kind == 0:
            how = source.byte()
            (self.wire.send_below if how & 1 else self.wire.send_raw)(source.take(how))
        elif kind == 1:
            await turns(source.byte() % 16)
        elif kind == 2 and self.tokens:
            self._connect(source)
        elif kind == 3 and self.rails:
            with contextlib.suppress(OSError):
                source.choice(self.rails).send(source.take(source.byte()))
        else:
            said = message(source.choice(REQUESTS if kind < 7 else MESSAGES), source, self.wire.known)
            packet = protocol.encode(said)
            self.wire.send(bent(packet, source) if kind == 4 else packet, source if kind == 5 else None)
        self.tokens += [said for said in self.wire.hear() if isinstance(said, protocol.RailToken)]

    def _connect(self, source: Input) -> None:
        token = source.choice(self.tokens)
        rail = source.byte() % len(self._facts)
        shown = authentication.shown_token(self.wire.keys, token.token, token.connection, rail)
        preamble = protocol.RAIL_PREAMBLE.pack(
            protocol.RAIL_MAGIC, protocol.RAIL_VERSION, rail, token.connection, shown
        )
        connected = socket.create_connection(("127.0.0.1", self._facts[rail].port))
        connected.setblocking(False)
        self.rails.append(connected)
        with contextlib.suppress(OSError):
            connected.send(bent(preamble, source) if source.byte() & 1 else preamble)

    def close(self) -> None:
        for connected in (self.wire.socket, *self.rails):
            connected.close()


class Receiver:
    """A daemon that a local client of this one sends to."""

    def __init__(self, at: Scene) -> None:
        self._listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]  # control, rail
        for listener in self._listeners:
            listener.setblocking(False)
        self.session = f"127.0.0.1:{self._listeners[0].getsockname()[1]}"
        self.rail_port = self._listeners[1].getsockname()[1]
        self.wires: list[Wire] = []
        self.rails: list[socket.socket] = []
        self._path = at.socket
        self._keyring = at.keyring
        self.raw: RawClient | None = None
        self.told = 0

    async def lure(self, rank: int) -> None:
        """The client attaches and asks for a connection to this peer."""
        raw = self.raw = await asyncio.get_running_loop().run_in_executor(None, self._attached, rank)
        raw.send(protocol.ConnectPeer(raw.new_id(), self.session, 0.2))

    def _attached(self, rank: int) -> RawClient:
        raw = RawClient(self._path, rank)
        raw.attach()
        raw.register(SOURCE_BYTES)
        raw.socket.setblocking(False)
        return raw

    def hear_client(self) -> list[Any]:
        """What the daemon tells the client."""
        heard: list[Any] = []
        with contextlib.suppress(OSError):
            while self.raw is not None and (said := self.raw.receive()[0]) is not None:
                heard.append(said)
        return heard

    async def step(self, source: Input) -> None:
        with contextlib.suppress(OSError):
            self.wires.append(Wire(self._listeners[0].accept()[0], self._keyring.accepting, accepted=True))
            await self.wires[-1].shake()
        with contextlib.suppress(OSError):
            self.rails.append(self._listeners[1].accept()[0])
            self.rails[-1].setblocking(False)
        kind = source.byte() % 16
        if kind == 0:
            await asyncio.sleep(source.choice(PAUSES_S))
        elif kind == 1 and self.rails:
            with contextlib.suppress(OSError):
                source.choice(self.rails).send(source.take(source.byte()))
        elif kind == 2 and self.rails:
            self.rails.pop().close()
        elif kind == 3 and self.wires:
            self.wires.pop().socket.close()
        elif kind < 6:
            self._use(source)
        elif self.wires:
            self._talk(source, source.choice(self.wires), kind)
        await turns(6)

    def _talk(self, source: Input, wire: Wire, kind: int) -> None:
        if kind < 9:
            packet = protocol.encode(message(source.choice(EVENTS if kind < 8 else MESSAGES), source, wire.known))
            wire.send(bent(packet, source) if kind == 6 else packet)
        for said in wire.hear():
            self._answer(source, wire, said)

    def _answer(self, source: Input, wire: Wire, said: Any) -> None:  # noqa: ANN401
        likely = source.byte()
        expected = ANSWERS.get(type(said), protocol.PeerDone)
        if not hasattr(said, "id") or likely >= 0xF8:  # silence
            return
        fields: dict[str, object] = {"id": said.id}
        if expected is protocol.Challenge and likely < 0xC0:
            fields |= {"protocol": protocol.PROTOCOL_VERSION, "nonce": bytes(protocol.NONCE_BYTES)}
            fields |= {"instance": 5} if likely < 0xA0 else {}
        if expected is protocol.Welcome and likely < 0xC0:
            fields |= {"rails": _rails(self.rail_port, 1 + likely % 2), "proof": b""}
        if expected is protocol.PeerRegion and likely < 0xA0:
            fields |= {"handle": 3, "bytes": 1 << 20, "rail": 0, "owner": likely % 4, "owner_serial": 1}
            fields |= {
                "iova": 0,
                "rkeys": (),
                "aborted": b"",
                "address": 0,
                "window_bytes": 65536 * (likely & 1),
                "window_runs": 8,
            }
        if expected is protocol.RailFenced and likely < 0x80:
            fields |= {"placed": likely % 4, "acks": bytes(16 * (likely % 4))}
        kind: type[Any] = expected if likely < 0xF0 else source.choice(MESSAGES)
        given = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
        made = message(kind, source, wire.known, **given)
        if expected in (protocol.Challenge, protocol.Welcome):
            wire.handshake.append(said)
            made = self._prove(wire, made)
            wire.handshake.append(made)
        answer = protocol.encode(made)
        wire.send(bent(answer, source) if likely & 31 == 31 else answer)
        if isinstance(made, protocol.Welcome) and made.proof and self._keyring.secret is not None:
            said_all = (*wire.handshake[:3], msgspec.structs.replace(made, proof=b""))
            wire.keys = authentication.keys(self._keyring.secret, ACCEPTING, said_all)

    def _prove(self, wire: Wire, made: Any) -> Any:  # noqa: ANN401
        """A Welcome without a proof gets the right one."""
        if not isinstance(made, protocol.Welcome) or made.proof or self._keyring.secret is None:
            return made
        shown = authentication.proof(self._keyring.secret, ACCEPTING, (*wire.handshake, made))
        return msgspec.structs.replace(made, proof=shown)

    def _use(self, source: Input) -> None:
        """What the client does with the peer: opens a region, sends, notes, closes."""
        raw = self.raw
        if raw is None:
            return
        self.hear_client()
        kind, peer, remote = source.byte() % 6, source.byte() % 4, source.byte() % 2
        with contextlib.suppress(OSError, ValueError):
            if kind == 0:
                raw.send(protocol.OpenRegion(raw.new_id(), peer, bytes(16)))
            elif kind == 1:
                raw.send(protocol.Note(raw.new_id(), 0, self.told + 1, remote, source.byte(), b"x" * source.byte()))
            elif kind == 2:
                raw.send(protocol.CloseRegion(raw.new_id(), remote))
            elif kind == 3:
                raw.send(protocol.Fence(raw.new_id(), 0, self.told, 0.05))
            else:
                self._publish(raw, peer, remote, source.byte())

    def _publish(self, raw: RawClient, peer: int, remote: int, kind: int) -> None:
        """A direct slice of a transfer of its own."""
        ring_slices = 16
        timeout_ns = (kind & 2) * 10**7
        raw.area("TRANSFERS", "transfer").write(
            0, generation=self.told + 1, tag=5, note=kind & 1, timeout_ns=timeout_ns
        )
        raw.area("RING_SLICES", "slice").write(
            self.told % ring_slices,
            transfer=0,
            generation=self.told + 1,
            peer=peer,
            remote_rail=kind >> 2 & 1,
            total_slices=1,
            block_count=1,
            flags=abi.CONSTANTS["SLICE_FINAL"] | abi.CONSTANTS["SLICE_INLINE"],
            bytes=4096,
            inline_length=4096,
            inline_source=0,
            inline_destination=0,
            inline_source_region=0,
            inline_remote_region=remote,
            ticket=self.told % ring_slices,
        )
        self.told += 1
        raw.area("RINGS", "ring").set(0, "produced", self.told)
        raw.kick()

    def close(self) -> None:
        for opened in (*self._listeners, *self.rails, *(wire.socket for wire in self.wires)):
            opened.close()
        if self.raw is not None:
            self.raw.close()


async def _case(at: Scene, source: Input, sends: int) -> None:
    senders: list[Sender] = []
    receiver: Receiver | None = None
    try:
        if not sends:
            receiver = Receiver(at)
            await receiver.lure(2 + source.byte() % 60)
        while not source.ended:
            if receiver is not None:
                await receiver.step(source)
            elif not senders or (source.byte() == 1 and len(senders) < 3):
                senders.append(Sender(at, source))
                await senders[-1].greet(source)
                await turns(4)
            else:
                await source.choice(senders).step(source)
    finally:
        for sender in senders:
            sender.close()
        if receiver is not None:
            receiver.close()
        await turns(4)


def run(data: bytes) -> None:
    for entry in Entry:
        scene(entry)  # all of them first: descriptors are counted
    source = Input(data)
    kind = source.byte()
    at = scene(ENTRIES[kind >> 6])
    at.run(lambda: _case(at, source, kind & 1))
    if len(at.conductor._clients.by_row) > 8:
        at.settle()
