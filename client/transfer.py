"""Transfers: waiting for one from threads and from asyncio, ending one early, and settling."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Generator, Iterator
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from railrelay.client import core, protocol
from railrelay.client.connection import LOCAL_TIMEOUT_S
from railrelay.client.errors import (
    RESULT_TEXT,
    ArgumentError,
    DaemonGone,
    ErrorCode,
    RelayError,
    Result,
    TransferError,
    Unsettled,
    WaitTimeout,
    error,
)
from railrelay.client.timeouts import nanoseconds, seconds

if TYPE_CHECKING:
    from railrelay.client.connection import Connection

_FENCE_MARGIN_S: Final = 1.0


def tag_of(tag: int | bytes | str) -> int:
    """A tag of 64 bits: an int from 0 to 2**64 - 1 as it is; text (UTF-8) and bytes as their 8-byte blake2b hash,
    little-endian. Both engines name one request by the same tag. 0 means untagged."""
    if isinstance(tag, int):
        if not 0 <= tag < 1 << 64:
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"tag {tag}; expected 0 to 2**64 - 1")
        return tag
    data = tag.encode() if isinstance(tag, str) else tag
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


@contextlib.contextmanager
def core_errors() -> Iterator[None]:
    """Turns what the C part refuses into the library's errors."""
    try:
        yield
    except core.SubmitError as refusal:
        raise error(refusal.code, str(refusal)) from None


class Completions:
    """Wakes asyncio waiters. One completion eventfd serves all loops: whichever loop reads it looks at every armed
    transfer and wakes their loops."""

    def __init__(self, client_core: core.ClientCore) -> None:
        self._core = client_core  # its descriptor stays open until the last loop has let go of it
        self._event_fd = client_core.completion_fd
        self._lock = threading.Lock()
        self._waiting: dict[asyncio.Future[None], core.Submission] = {}
        self._readers: dict[asyncio.AbstractEventLoop, int] = {}

    async def wait(self, submission: core.Submission) -> None:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._waiting[future] = submission
            self._readers[loop] = self._readers.get(loop, 0) + 1
            if self._readers[loop] == 1:
                loop.add_reader(self._event_fd, self.dispatch)
        try:
            if submission.arm_async():
                await future
        finally:
            with self._lock:
                del self._waiting[future]
                self._readers[loop] -= 1
                if not self._readers[loop]:
                    del self._readers[loop]
                    loop.remove_reader(self._event_fd)

    def dispatch(self) -> None:
        """Runs in any of the loops, and on the control thread when the daemon is gone."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        with self._lock:
            done = [future for future, submission in self._waiting.items() if submission.done]
        for future in done:
            wake(future)


def wake(future: asyncio.Future[None]) -> None:
    """From any thread; a loop that has closed meanwhile has no waiter left."""
    with contextlib.suppress(RuntimeError):
        future.get_loop().call_soon_threadsafe(_finish, future)


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Transfer:
    """What one write() or write_pages() call began: many blocks, one completion.

    ``wait()`` and ``await transfer`` return once every byte is placed at the decode node and its daemon confirmed it.
    The transfer's own time-out ends it; the time-out of a wait only ends the wait, and waiting again is allowed.
    Transfers complete in any order. Any number of threads and loops may wait."""

    def __init__(
        self, submission: core.Submission, connection: Connection, completions: Completions, tag: int, session: str
    ) -> None:
        self._submission = submission
        self._connection = connection
        self._completions = completions
        self._tag = tag
        self._session = session

    @property
    def done(self) -> bool:
        """Ended, well or not."""
        return self._own().done

    @property
    def source_done(self) -> bool:
        """The source is no longer read and may be overwritten."""
        return self._own().source_done

    @property
    def settled(self) -> bool:
        """No byte can land any more: the pages may be reused."""
        return self._own().settled

    @property
    def result(self) -> Result | None:
        """None while it runs."""
        submission = self._own()
        return Result(submission.result) if submission.done else None

    @property
    def bytes(self) -> int:
        """Bytes placed; 0 while it runs."""
        submission = self._own()
        return submission.bytes if submission.done else 0

    def wait(self, timeout: float | None = None) -> None:
        """Sleeps until done. Raises TransferError (failed, settled), Unsettled, or WaitTimeout after ``timeout`` s."""
        try:
            ended = self._submission.wait(nanoseconds(timeout))
        except core.SubmitError:
            self._own()
            raise
        if not ended:
            raise self._still_runs(timeout)
        if self._submission.result:
            self._raise_if_failed()

    def __await__(self) -> Generator[object, None, None]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> None:
        submission = self._own()
        if not submission.done:
            await self._completions.wait(submission)
        self._raise_if_failed()

    def wait_source(self, timeout: float | None = None) -> None:
        """Sleeps until the source may be overwritten, however the transfer ends. Raises WaitTimeout."""
        if not self._own().wait_source(nanoseconds(timeout)):
            raise self._still_runs(timeout)

    def cancel(self, *, wait: bool = True, timeout: float = 10.0) -> None:
        """Ends the transfer early; it may still turn out to be OK. With ``wait`` returns once it is settled, however it
        ended, and raises Unsettled if that cannot be had within ``timeout`` seconds. Idempotent."""
        submission = self._own()
        timeout = seconds(timeout)
        deadline = time.monotonic() + timeout
        if not submission.done:
            submission.cancel()
            request = protocol.Cancel(self._connection.new_id(), submission.index, submission.generation)
            if not wait:
                self._connection.tell(request)
                return
            with contextlib.suppress(DaemonGone, WaitTimeout):  # it has ended by that; or what follows says so
                self._connection.ask(request, protocol.Done, min(timeout, LOCAL_TIMEOUT_S))
        if wait:
            self.wait_settled(max(0.0, deadline - time.monotonic()))

    def wait_settled(self, timeout: float = 10.0) -> None:
        """Returns once no byte of the transfer can land any more, however it ended. An unsettled one is fenced: the
        receiving daemon is asked to close what may still carry it. Raises Unsettled after ``timeout`` seconds."""
        submission = self._own()
        timeout = seconds(timeout)
        deadline = time.monotonic() + timeout
        if not submission.wait(nanoseconds(timeout)):
            raise Unsettled(Result.UNSETTLED, 0, f"{self._what} has not ended within {timeout:g} s")
        why = ""
        while not submission.wait_settled(0):
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._unsettled(why)
            request = protocol.Fence(self._connection.new_id(), submission.index, submission.generation, left)
            try:
                self._connection.ask(request, protocol.Done, left + _FENCE_MARGIN_S)
            except DaemonGone as gone:
                raise self._unsettled(f" ({gone})") from None
            except RelayError as refusal:
                why = f" ({refusal})"
                if refusal.code == ErrorCode.CLOSED:
                    raise self._unsettled(why) from None
            submission.wait_settled(nanoseconds(min(0.1, left)))

    @property
    def _what(self) -> str:
        return f"transfer {self._submission.index} (tag {self._tag:#x}) to {self._session}"

    def _own(self) -> core.Submission:
        self._connection.check_process()
        return self._submission

    def _still_runs(self, timeout: float | None) -> RelayError:
        return WaitTimeout(
            ErrorCode.WAIT_TIMEOUT, f"{self._what} still runs after {timeout or 0:g} s; wait again or cancel() it"
        )

    def _raise_if_failed(self) -> None:
        result = Result(self._submission.result)
        if result == Result.OK:
            return
        if not self._submission.settled:
            raise self._unsettled("")
        text = "ended early and has settled since" if result == Result.UNSETTLED else self._text_of(result)
        raise TransferError(result, self.bytes, f"{self._what}: {text}")

    def _text_of(self, result: Result) -> str:
        name = self._submission.gpu_error if result == Result.GPU_ERROR else ""
        return f"{name}: {RESULT_TEXT[result]}" if name else RESULT_TEXT[result]

    def _unsettled(self, why: str) -> Unsettled:
        result = Result(self._submission.result)
        text = RESULT_TEXT[Result.UNSETTLED]
        if result != Result.UNSETTLED:
            text = f"{self._text_of(result)}; {text}"
        return Unsettled(result, self.bytes, f"{self._what}: {text}{why}")

    def __repr__(self) -> str:
        return f"<Transfer {self._submission.index} (tag {self._tag:#x}) to {self._session}: {self._state()}>"

    def _state(self) -> str:
        try:
            submission = self._own()
        except RelayError:  # a forked child cannot see it
            return "of another process"
        if not submission.done:
            return "running, source done" if submission.source_done else "running"
        name = Result(submission.result).name.lower()
        return name if submission.settled or name == "unsettled" else f"{name}, not settled"
