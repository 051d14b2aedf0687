"""Accepts connections of a listening socket on the event loop; rests a moment when descriptors run out, instead of
spinning on a socket that stays readable."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from railrelay.client.errors import ErrorCode
from railrelay.daemon.node_state import Report

REST_S = 0.5


class Acceptor:
    """Owns the listener. Closes idempotently."""

    def __init__(
        self,
        listener: socket.socket,
        what: str,
        on_socket: Callable[[socket.socket], None],
        report: Report,
    ) -> None:
        self._listener = listener
        self._what = what
        self._on_socket = on_socket
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._rest: asyncio.TimerHandle | None = None
        self._start()

    def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    def _start(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as failure:
            self._report(ErrorCode.LIMIT, f"{self._what}: cannot accept: {failure.strerror}; raise LimitNOFILE")
            self._loop.remove_reader(self._listener.fileno())
            self._rest = self._loop.call_later(REST_S, self._start)
            return
        accepted.setblocking(False)
        self._on_socket(accepted)
