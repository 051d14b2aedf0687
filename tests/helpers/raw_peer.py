"""A daemon that connects to another and speaks the peer plane by hand: what that one must survive."""

from __future__ import annotations

import os
import socket
import ssl
from types import TracebackType
from typing import Final, TypeVar

import msgspec

from helpers.waiting import LIMIT_S
from railrelay.client import protocol
from railrelay.client.protocol import PeerMessage, RailFacts
from railrelay.daemon import authentication
from railrelay.daemon.authentication import ACCEPTING, CONNECTING, SEAL_BYTES, Keys

FACTS: Final = [RailFacts("rail0", "tcp", "127.0.0.1", 1)]
R = TypeVar("R")


class Refused(Exception):
    """The daemon answered so."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class RawPeer:
    """Of one control connection."""

    def __init__(self, stream: socket.socket, instance: int = 4711) -> None:
        stream.settimeout(LIMIT_S)
        self.stream = stream
        self.instance = instance
        self.session = "127.0.0.1:9"
        self.keys: Keys | None = None
        self._ids = 0
        self._sent = self._taken = 0

    @classmethod
    def dial(cls, session: str, instance: int = 4711, tls: ssl.SSLContext | None = None) -> RawPeer:
        host, port = protocol.parse_session(session)
        stream = socket.create_connection((host, port), LIMIT_S)
        return cls(stream if tls is None else tls.wrap_socket(stream, server_hostname=host), instance)

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def packet(self, message: PeerMessage) -> bytes:
        body = protocol.encode(message)
        if self.keys is not None:
            body = authentication.seal(self.keys.sends, self._sent, body) + body
            self._sent += 1
        return protocol.LENGTH_PREFIX.pack(len(body)) + body

    def send(self, message: PeerMessage) -> None:
        self.stream.sendall(self.packet(message))

    def receive(self) -> PeerMessage | None:
        """None at the end of the stream."""
        head = self._exactly(protocol.LENGTH_PREFIX.size)
        if len(head) < protocol.LENGTH_PREFIX.size:
            return None
        body = self._exactly(protocol.LENGTH_PREFIX.unpack(head)[0])
        if self.keys is not None:
            assert body[:SEAL_BYTES] == authentication.seal(self.keys.receives, self._taken, body[SEAL_BYTES:])
            self._taken += 1
            body = body[SEAL_BYTES:]
        return protocol.peer_message(body)

    def ask(self, message: PeerMessage, reply: type[R]) -> R:
        """Refused, ConnectionError at the end of the stream."""
        self.send(message)
        while True:
            answer = self.receive()
            if answer is None:
                raise ConnectionError("the daemon ended the connection")
            if isinstance(answer, protocol.Refused):
                raise Refused(answer.code, answer.text)
            if isinstance(answer, reply):
                return answer

    def open(self, version: int = protocol.PROTOCOL_VERSION) -> tuple[protocol.Opening, protocol.Challenge]:
        opening = protocol.Opening(self.new_id(), version, self.instance, authentication.nonce())
        return opening, self.ask(opening, protocol.Challenge)

    def hello(self, proofs: list[bytes] | None = None) -> protocol.Hello:
        return protocol.Hello(self.new_id(), self.session, 0, FACTS, proofs or [])

    def greet(self, *secrets: bytes) -> protocol.Welcome:
        """The whole handshake. Refused."""
        opening, challenge = self.open()
        bare = self.hello()
        proofs = authentication.proofs(secrets, CONNECTING, (opening, challenge, bare))
        said = msgspec.structs.replace(bare, proofs=proofs)
        welcome = self.ask(said, protocol.Welcome)
        messages = (opening, challenge, said, msgspec.structs.replace(welcome, proof=b""))
        secret = authentication.matching(secrets, ACCEPTING, messages, [welcome.proof])
        if secret is not None:
            self.keys = authentication.keys(secret, CONNECTING, messages)
        return welcome

    def hears_the_end(self) -> bool:
        """Whether the other end closes; what it still says is dropped."""
        try:
            while self.stream.recv(65536):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        return True

    def close(self) -> None:
        self.stream.close()

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exactly(self, nbytes: int) -> bytes:
        received = b""
        while len(received) < nbytes:
            try:
                part = self.stream.recv(nbytes - len(received))
            except ConnectionResetError:
                return b""
            if not part:
                return b""
            received += part
        return received


def new_secret() -> bytes:
    return os.urandom(32).hex().encode()


def greeting(
    instance: int, session: str = "127.0.0.1:9", rails: list[RailFacts] | None = None
) -> tuple[protocol.Opening, protocol.Hello]:
    """What a daemon without a secret begins with. It is answered by Challenge, and by Welcome or Refused."""
    opening = protocol.Opening(1, protocol.PROTOCOL_VERSION, instance, bytes(protocol.NONCE_BYTES))
    return opening, protocol.Hello(1, session, 0, FACTS if rails is None else rails, [])


def challenge(opening: protocol.Opening, instance: int) -> protocol.Challenge:
    """The answer of a daemon of this instance."""
    return protocol.Challenge(opening.id, protocol.PROTOCOL_VERSION, instance, bytes(protocol.NONCE_BYTES))
