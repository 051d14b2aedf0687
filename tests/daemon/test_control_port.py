"""Connections that are accepted, before there is anything to say over them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
import uvloop
from helpers.certificates import Authority

from railrelay.daemon.config import Security
from railrelay.daemon.control_port import ControlPort
from railrelay.daemon.link import Link
from railrelay.daemon.tls import Tls

TIME_LIMIT_S = 20


@pytest.fixture(scope="module", autouse=True)
def _signals() -> None:
    """Their pipe is made with the first loop and stays."""
    uvloop.new_event_loop().close()


class Newcomer:
    """Connects over TLS, as slowly as it likes."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext) -> None:
        self.stream = socket.create_connection(address, TIME_LIMIT_S)
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._came, self._goes, server_hostname=address[0])
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.do_handshake()
        self.hello = self._goes.read()

    def finish(self, rest: bytes) -> bool:
        """Whether the other end goes on with the handshake."""
        try:
            self.stream.sendall(rest)
            return self.stream.recv(65536) != b""
        except ConnectionError:
            return False
        finally:
            self.stream.close()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("sent", [0, 1, 20])
def test_a_link_that_is_closed_ends_its_connection_in_the_middle_of_tls(tmp_path: Path, sent: int) -> None:
    authority = Authority.make(tmp_path / "authority")
    security = Security(**authority.section("127.0.0.1"))  # type: ignore[arg-type]

    async def run() -> None:
        links: list[Link] = []

        def new_link(_address: str) -> Link:
            links.append(Link(lambda *_, **__: None))
            return links[-1]

        listener = socket.socket()
        listener.setblocking(False)
        listener.bind(("127.0.0.1", 0))
        port = ControlPort(listener, Tls(security, lambda *_, **__: None), new_link, lambda *_, **__: None)
        newcomer = Newcomer(listener.getsockname(), authority.connecting("127.0.0.1"))
        newcomer.stream.sendall(newcomer.hello[:sent])
        while not links:
            await asyncio.sleep(0)
        await turns()  # however far it has come
        links[0].close("too late")
        await turns()
        assert not await asyncio.to_thread(newcomer.finish, newcomer.hello[sent:])
        port.close()

    uvloop.run(run())
