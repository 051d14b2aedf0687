"""The control port, where other daemons connect: each connection becomes a Link, behind TLS if it is configured. Main
thread only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import Final, NoReturn

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import addresses
from railrelay.daemon.acceptor import Acceptor
from railrelay.daemon.config import Config, ConfigError, check_listening
from railrelay.daemon.link import TLS_HANDSHAKE, Link
from railrelay.daemon.node_state import Report
from railrelay.daemon.tls import Tls

_BACKLOG: Final = 512


def listening(config: Config) -> socket.socket:
    """Bound; nothing is accepted yet. ConfigError, OSError with the option in its text."""
    host, port = config.node.host, config.node.port
    family, address = addresses.resolved(host, port)
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError as failure:
        raise OSError(failure.errno, f"node.host: {host!r}: {failure.strerror}") from None
    try:
        check_listening(config, "node.host", str(address[0]))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except ConfigError:
        listener.close()
        raise
    except OSError as failure:
        listener.close()
        raise OSError(failure.errno, f"node.port: cannot listen on {host} port {port}: {failure.strerror}") from None
    return listener


class ControlPort:
    """Owns the listener. ``new_link(address)`` gives None for a connection that is one too many; closing a link ends
    its connection, whether or not TLS is done. Closes idempotently."""

    def __init__(
        self,
        listener: socket.socket,
        tls: Tls,
        new_link: Callable[[str], Link | None],
        report: Report,
    ) -> None:
        listener.listen(_BACKLOG)
        self._tls = tls
        self._new_link = new_link
        self._report = report
        self._tasks: set[asyncio.Task[None]] = set()
        self._acceptor = Acceptor(listener, "control port", self._accept, report)

    def close(self) -> None:
        self._acceptor.close()
        for task in self._tasks:
            task.cancel()

    def _accept(self, accepted: socket.socket) -> None:
        try:
            address = str(accepted.getpeername()[0])
        except OSError:  # it has gone already
            accepted.close()
            return
        link = self._new_link(address)
        if link is None:
            accepted.close()
            return
        link.address = address
        task = asyncio.get_running_loop().create_task(self._connect(link, accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        link.closed.add_done_callback(lambda _: task.cancel())

    async def _connect(self, link: Link, accepted: socket.socket) -> None:
        tls = self._tls.accepting()
        try:
            if tls is not None and not await _speaks_tls(accepted):
                tls, link.handlers = None, {protocol.Opening: lambda _: self._want_tls(link)}
                link.lack = ", without TLS, which is configured here (security.tls_ca)"
            await asyncio.get_running_loop().connect_accepted_socket(lambda: link, accepted, ssl=tls)
        except OSError as failure:
            accepted.close()
            why = _reason(failure)
            if tls is not None:
                text = f"control connection of {link.address}: no TLS with a certificate of security.tls_ca: {why}"
                # OpenSSL has a reason for each alert that a stranger may make up.
                kind = "" if type(failure) is ssl.SSLError else why
                self._report(ErrorCode.UNAUTHENTICATED, text, key=f"{link.address}: TLS: {kind}")
            link.close(why)
        except BaseException:
            accepted.close()
            link.close("the daemon ends")
            raise

    def _want_tls(self, link: Link) -> NoReturn:
        link.handlers = {}
        wrong = (
            f"the peer at {link.address} connects without TLS; set security.tls_certificate, tls_key and tls_ca there"
        )
        self._report(ErrorCode.UNAUTHENTICATED, wrong, key=f"{link.address}: no TLS")
        asyncio.get_running_loop().call_soon(link.close, wrong)  # behind the answer
        raise RelayError(ErrorCode.UNAUTHENTICATED, wrong)


def _reason(failure: OSError) -> str:
    """Why there is no TLS, and which end is to be looked at."""
    if isinstance(failure, ssl.SSLCertVerificationError):
        return f"its certificate: {failure.verify_message}"
    if isinstance(failure, ssl.SSLError):
        return str(failure.reason or failure).replace("_", " ").lower()
    if isinstance(failure, ConnectionResetError):
        return "it ended the connection; perhaps its security.tls_ca does not know the certificate of this node"
    return failure.strerror or str(failure) or type(failure).__name__


async def _speaks_tls(accepted: socket.socket) -> bool:
    """By its first bytes, which stay to be read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(accepted.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(accepted.fileno())
    return accepted.recv(1, socket.MSG_PEEK) == TLS_HANDSHAKE[:1]
