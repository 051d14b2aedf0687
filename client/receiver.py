"""The decode side: news of placed transfers, and ending transfers that are on their way here."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

from railrelay.client import protocol
from railrelay.client.errors import ArgumentError, ErrorCode, Result, Unsettled, WaitTimeout
from railrelay.client.timeouts import seconds
from railrelay.client.transfer import tag_of, wake

if TYPE_CHECKING:
    from railrelay.client.connection import Connection

_REPLY_MARGIN_S: Final = 1.0


class Notifications:
    """What peers asked to be told, oldest first; each is given out once. Threads and loops may wait together. They are
    kept until taken: peers should send them only to an engine that takes them."""

    def __init__(self) -> None:
        self._connection: Connection
        self._changed = threading.Condition()
        self._items: deque[protocol.Notification] = deque()
        self._waiting: set[asyncio.Future[None]] = set()
        self._ended = False

    def get(self, timeout: float | None = None) -> protocol.Notification:
        """The next (tag, payload, session of the sender); all data of that transfer is placed. Raises WaitTimeout after
        ``timeout`` seconds, None: never; DaemonGone."""
        limit_s = None if timeout is None else seconds(timeout)
        self._connection.check_process()
        with self._changed:
            began = self._connection
            self._changed.wait_for(lambda: self._items or self._is_over(began), limit_s)
            if self._items:
                return self._items.popleft()
            over = self._is_over(began)
        if over:
            began.check()
        raise WaitTimeout(ErrorCode.WAIT_TIMEOUT, f"no notification within {timeout} s")

    async def get_async(self) -> protocol.Notification:
        """The same for asyncio, without a limit of its own."""
        self._connection.check_process()
        began = self._connection
        while True:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._changed:
                if self._items:
                    return self._items.popleft()
                if self._is_over(began):
                    began.check()
                self._waiting.add(future)
            try:
                await future
            finally:
                with self._changed:
                    self._waiting.discard(future)

    def put(self, notification: protocol.Notification) -> None:
        """Control thread."""
        with self._changed:
            self._items.append(notification)
            self._wake_all()

    def attach(self, connection: Connection) -> None:
        """What comes from now on comes over this one."""
        with self._changed:
            self._connection = connection
            self._ended = False

    def end(self) -> None:
        """After the connection: waiters get its error."""
        with self._changed:
            self._ended = True
            self._wake_all()

    def _is_over(self, connection: Connection) -> bool:
        """Holding the lock: what one who waits since then is told of, whether there is another one by now or not."""
        return self._ended or self._connection is not connection

    def _wake_all(self) -> None:
        self._changed.notify_all()
        for future in self._waiting:
            wake(future)


class Receiver:
    """Client.receiver."""

    def __init__(self) -> None:
        self._connection: Connection
        self.notifications = Notifications()

    def attach(self, connection: Connection) -> None:
        """At each attaching."""
        self._connection = connection
        self.notifications.attach(connection)

    def abort(self, tag: int | bytes | str, timeout: float = 10.0) -> int:
        """Ends all transfers with this tag (see tag_of) into this client's regions, at all peers. Once it returns no
        byte of them can land, now or later, and their pages may be reused. Returns how many were under way.

        Raises Unsettled if that could not be had within ``timeout`` seconds: abort again before reusing the pages."""
        number, timeout = tag_of(tag), seconds(timeout)
        if not number:
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, "tag 0 is that of all untagged transfers; give requests a tag")
        connection = self._connection
        request = protocol.Abort(connection.new_id(), number, timeout)
        try:
            aborted = connection.ask(request, protocol.Aborted, timeout + _REPLY_MARGIN_S)
        except WaitTimeout as late:
            raise Unsettled(Result.UNSETTLED, 0, f"abort of tag {number:#x}: {late.text}") from None
        if not aborted.settled:
            raise Unsettled(Result.UNSETTLED, 0, f"abort of tag {number:#x}: {aborted.text}")
        return aborted.transfers
