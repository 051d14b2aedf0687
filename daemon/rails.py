"""Rails: where each one listens, the single-use tokens that admit a connection, and the sockets between two rails. Main
thread only; a socket goes to the data plane once its preamble has passed."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import itertools
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import RailFacts
from railrelay.daemon.acceptor import Acceptor
from railrelay.daemon.authentication import Keys, shown_token
from railrelay.daemon.config import IDENTITY_BYTES, MAX_RAILS, Config, Tcp
from railrelay.daemon.node_state import Report

PREAMBLE_TIMEOUT_S: Final = 5.0
TOKEN_LIFE_S: Final = 30.0
MAX_STRANGERS: Final = 256  # connections that have not shown their token yet
LISTEN_BACKLOG: Final = 512


@dataclass(frozen=True)
class Token:
    """shown: what its connection has to show."""

    shown: bytes
    rail: int
    session: int
    expiry: asyncio.TimerHandle


class Rails:
    """Owns the listeners of all rails. ``admit(rail, connection, session, socket)`` gets each connection that showed
    its token; ``expired(connection, session)`` tells that a token was never used. Closes idempotently."""

    def __init__(self, config: Config, report: Report) -> None:
        """Binds; nothing is accepted before serve(). OSError with the option in its text."""
        self._report = report
        self._tokens: dict[int, Token] = {}
        self._strangers: set[asyncio.Task[None]] = set()
        self._ids = itertools.count(
            1, 2
        )  # odd; sender connections have even ones, so that a daemon can be its own peer
        self._admit: Callable[[int, int, int, socket.socket], None] | None = None
        self._expired: Callable[[int, int], None] | None = None
        self._listeners: dict[int, socket.socket] = {}  # by rail
        self._acceptors: list[Acceptor] = []
        self.facts: list[RailFacts] = []
        try:
            for index, rail in enumerate(config.rail):
                if rail.nic != "tcp":  # nobody connects to it
                    self.facts.append(RailFacts(config.identity(index), rail.nic, rail.address, 0))
                    continue
                listener = self._listeners[index] = _listening(f"rail[{index}]", rail.address, rail.port)
                _set_options(listener, config.tcp)  # accepted sockets inherit them; what cannot be had shows now
                self.facts.append(RailFacts(config.identity(index), rail.nic, rail.address, listener.getsockname()[1]))
        except OSError:
            self.close()
            raise

    def serve(self, admit: Callable[[int, int, int, socket.socket], None], expired: Callable[[int, int], None]) -> None:
        self._admit, self._expired = admit, expired
        for rail, listener in self._listeners.items():
            self._acceptors.append(Acceptor(listener, f"rail {rail}", partial(self._accept, rail), self._report))

    def new_connection(self) -> int:
        """The id of a connection that needs no token."""
        return next(self._ids)

    def issue(self, rail: int, session: int, keys: Keys | None) -> tuple[int, bytes]:
        """(connection id, token) for one connection to ``rail``; keys of the control connection that asks."""
        connection, token = next(self._ids), secrets.token_bytes(16)
        shown = shown_token(keys, token, connection, rail)
        expiry = asyncio.get_running_loop().call_later(TOKEN_LIFE_S, self._expire, connection)
        self._tokens[connection] = Token(shown, rail, session, expiry)
        return connection, token

    def revoke(self, connection: int) -> Token | None:
        """From now on the token admits nobody; None if it was used already or never issued."""
        token = self._tokens.pop(connection, None)
        if token is not None:
            token.expiry.cancel()
        return token

    def close(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for task in self._strangers:
            task.cancel()
        for connection in list(self._tokens):
            self.revoke(connection)
        for listener in self._listeners.values():
            listener.close()

    def _expire(self, connection: int) -> None:
        token = self.revoke(connection)
        if token is not None and self._expired is not None:
            self._expired(connection, token.session)

    def _accept(self, rail: int, stranger: socket.socket) -> None:
        if len(self._strangers) >= MAX_STRANGERS:
            text = (
                f"rail {rail}: {len(self._strangers)} connections have shown no token yet, the most that may wait, and"
                " another was closed: a daemon shows its token at once, keep others from"
                f" {self.facts[rail].address} port {self.facts[rail].port}"
            )
            self._report(ErrorCode.LIMIT, text, key=f"rail {rail}: connections without a token")
            stranger.close()
            return
        task = asyncio.get_running_loop().create_task(self._check(rail, stranger))
        self._strangers.add(task)
        task.add_done_callback(self._strangers.discard)

    async def _check(self, rail: int, stranger: socket.socket) -> None:
        try:
            address = "?"
            try:
                address = stranger.getpeername()[0]
                async with asyncio.timeout(PREAMBLE_TIMEOUT_S):
                    preamble = await _received(stranger, protocol.RAIL_PREAMBLE.size)
                connection, token = self._redeemed(rail, preamble)
            except (OSError, ValueError) as failure:
                reason = "no preamble" if isinstance(failure, TimeoutError) else failure
                origin = f"rail {rail}: connection from {address}"
                self._report(ErrorCode.PROTOCOL, f"{origin}: {reason}", key=origin)
            else:
                if self._admit is not None:
                    self._admit(rail, connection, token.session, stranger)
        finally:
            stranger.close()  # no effect on an admitted one, which was detached

    def _redeemed(self, rail: int, preamble: bytes) -> tuple[int, Token]:
        magic, version, wanted_rail, connection, shown = protocol.RAIL_PREAMBLE.unpack(preamble)
        if magic != protocol.RAIL_MAGIC:
            raise ValueError("not a rail of railrelay")
        if version != protocol.RAIL_VERSION:
            raise ValueError(
                f"rail protocol {version}, expected {protocol.RAIL_VERSION}; install the same railrelay version"
            )
        token = self._tokens.get(connection)
        if token is None or not hmac.compare_digest(token.shown, shown):
            raise ValueError("unknown or used token")
        if token.rail != rail or wanted_rail != rail:
            raise ValueError(f"a token for rail {token.rail}")
        self.revoke(connection)
        return connection, token


def check_facts(session: str, instance: int, rails: list[RailFacts]) -> None:
    """Refuses what a peer says of itself if it cannot be right. RelayError."""
    if not 0 < instance < 1 << 63:
        raise RelayError(ErrorCode.PROTOCOL, f"{session} has instance {instance}; expected 1 to 2**63 - 1")
    if not 1 <= len(rails) <= MAX_RAILS:
        raise RelayError(ErrorCode.RAIL_MISMATCH, f"{session} has {len(rails)} rails; expected 1 to {MAX_RAILS}")
    for index, facts in enumerate(rails):
        if len(facts.identity.encode()) > IDENTITY_BYTES or not facts.identity.isprintable():
            raise RelayError(
                ErrorCode.RAIL_MISMATCH,
                f"{session}, rail {index}: identity {facts.identity[:64]!r}; expected at most {IDENTITY_BYTES} bytes",
            )
        try:
            ipaddress.ip_address(facts.address)
        except ValueError:
            raise RelayError(
                ErrorCode.RAIL_MISMATCH, f"{session}, rail {index}: {facts.address[:64]!r} is not an IP address"
            ) from None
        without_port = facts.nic in ("verbs", "emulated") and facts.port == 0
        if not without_port and (facts.nic != "tcp" or not 0 < facts.port < 65536):
            raise RelayError(
                ErrorCode.RAIL_MISMATCH,
                f"{session}, rail {index}: {facts.nic[:16]!r} on port {facts.port}; expected tcp, verbs or emulated",
            )


async def connect(
    local: RailFacts, remote: RailFacts, rail: int, connection: int, shown: bytes, tcp: Tcp, timeout_s: float
) -> socket.socket:
    """A connected socket from the local rail's address to the peer's, its preamble sent. RelayError RAIL_DOWN."""
    family = socket.AF_INET6 if ":" in remote.address else socket.AF_INET
    loop = asyncio.get_running_loop()
    sender: socket.socket | None = None
    try:
        sender = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        _set_options(sender, tcp)
        sender.bind((local.address, 0))
        async with asyncio.timeout(timeout_s):
            await loop.sock_connect(sender, (remote.address, remote.port))
            preamble = protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, protocol.RAIL_VERSION, rail, connection, shown)
            await loop.sock_sendall(sender, preamble)
    except BaseException as failure:
        if sender is not None:
            sender.close()
        if not isinstance(failure, (OSError, ValueError, struct.error)):
            raise
        reason = f"no connection within {timeout_s:g} s" if isinstance(failure, TimeoutError) else str(failure)
        raise RelayError(
            ErrorCode.RAIL_DOWN,
            f"rail {local.identity} ({local.address}) to {remote.identity} ({remote.address} port {remote.port}):"
            f" {reason}",
        ) from None
    return sender


def _set_options(sender: socket.socket, tcp: Tcp) -> None:
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, tcp.notsent_lowat)
    sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(tcp.user_timeout_s * 1000))
    if tcp.congestion:
        try:
            sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, tcp.congestion.encode())
        except OSError as failure:
            raise OSError(
                failure.errno, f"tcp.congestion {tcp.congestion!r} is not available here ({failure.strerror})"
            ) from None


async def _received(stranger: socket.socket, nbytes: int) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < nbytes:
        part = await loop.sock_recv(stranger, nbytes - len(received))
        if not part:
            raise ValueError(f"closed after {len(received)} of {nbytes} bytes of the preamble")
        received += part
    return received


def _listening(option: str, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(LISTEN_BACKLOG)
    except OSError as failure:
        listener.close()
        raise OSError(failure.errno, f"{option}: cannot listen on {address} port {port}: {failure.strerror}") from None
    return listener
