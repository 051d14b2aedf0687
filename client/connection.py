"""The session with the local daemon: requests and replies over the Unix socket, events, and the daemon's death.

Any thread may ask. One control thread receives, in the order in which the daemon sent; it never waits for a reply, so
what it calls must not ask.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ArgumentError, ConnectError, DaemonGone, ErrorCode, RelayError, error
from railrelay.shm_layout import faults

LOCAL_TIMEOUT_S: Final = 30.0  # for requests that the local daemon answers alone
_LONGEST_CONNECT_S: Final = 1e6  # sockets count in ms, in 32 bits
_FDS_MAX: Final = 64
_LOOK_MS: Final = 20
_EXIT_S: Final = 0.2  # between the hang-up of an exiting daemon and its pidfd
_UCRED: Final = struct.Struct("iII")

Reply = TypeVar("Reply", bound=protocol.Message)
Event = protocol.Notification | protocol.PeerDown | protocol.RegionGone | protocol.Draining


class _Question(NamedTuple):
    future: Future[Any]
    reply: type[protocol.Message]
    then: Callable[[Any, list[int]], Any]


class Connection:
    """``on_event`` and ``on_gone`` are called on the control thread; ``on_gone`` once, when the daemon exits or ends
    the session, and not after close(). They are set in the ``then`` of the first request."""

    def __init__(self, path: Path, timeout: float) -> None:
        """ConnectError."""
        self.on_event: Callable[[Event], None] = lambda _: None
        self.on_gone: Callable[[], None] = lambda: None
        self.look: Callable[[], bool] = lambda: False  # on the control thread, after look_soon(); whether to look again
        self.why_gone: Callable[[], RelayError | None] = lambda: None  # if it was this process that ended the session
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._last_id = 0
        self._questions: dict[int, _Question] = {}
        self._last_words = ""
        self._was_ended = False
        self._refused = False  # by the socket: the control thread will see the end
        self.last_code = ErrorCode.NO_DAEMON  # why the daemon ended the session, if it said so
        self._gone: RelayError | None = None  # set before the questions are ended
        self._closed = False
        self._socket = _connected(path, timeout)
        self.daemon_pid: int = _UCRED.unpack(
            self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        )[0]
        self.pidfd = self._wake = -1  # pidfd: of the daemon; -1 if it is of another pid namespace
        self._thread = threading.Thread(target=self._receive_loop, name="railrelay-control", daemon=True)
        try:
            if self.daemon_pid:  # else the hang-up has to do
                self.pidfd = os.pidfd_open(self.daemon_pid)
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread.start()
        except (OSError, RuntimeError) as failure:  # the daemon has exited, or no descriptors or threads are left
            self._close_descriptors()
            raise _connect_error(path, timeout, failure) from None

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def check_process(self) -> None:
        """A forked child has neither the threads nor the mappings: RelayError FORKED."""
        if os.getpid() != self._pid:
            raise RelayError(
                ErrorCode.FORKED, f"this Client belongs to pid {self._pid}; pid {os.getpid()} is a forked child of it"
            )

    def check(self) -> None:
        """Raises if requests make no sense any more: FORKED, CLOSED, or DaemonGone."""
        self.check_process()
        if self._gone is not None:
            raise _again(self._gone)

    def is_over(self) -> bool:
        """The daemon has exited, or no longer takes requests; also before the control thread has seen it."""
        with self._lock:
            if self._closed or self._refused:
                return self._refused
            if self._gone is not None:
                return True
            return self.pidfd >= 0 and _exits(self.pidfd, 0)

    def was_ended(self) -> bool:
        """Whether the daemon said why, or a CUDA call of this process failed: not merely the daemon's exit."""
        return self._was_ended or self.why_gone() is not None

    @property
    def failure(self) -> RelayError | None:
        """Why the session is over, if it is."""
        return self._gone

    def new_id(self) -> int:
        with self._lock:
            self._last_id += 1
            return self._last_id

    def ask(self, request: protocol.ClientRequest, reply: type[Reply], timeout: float = LOCAL_TIMEOUT_S) -> Reply:
        """Sends ``request`` (its id from new_id()) and waits for its reply. Raises what Failed says, or WaitTimeout."""
        answer: Reply = self.ask_then(request, reply, _reply_alone, timeout)
        return answer

    def ask_then(
        self,
        request: protocol.ClientRequest,
        reply: type[Reply],
        then: Callable[[Reply, list[int]], Any],
        timeout: float = LOCAL_TIMEOUT_S,
        fds: Sequence[int] = (),
        late: Callable[[Reply, list[int]], Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """The same; returns what ``then(reply, descriptors)`` returns. That runs on the control thread before any later
        event is looked at, and owns the descriptors; ``late``, by default ``then``, runs instead if the reply comes
        after the time-out: the daemon has done it. ``fds`` are sent along and stay the caller's."""
        future: Future[Any] = Future()
        self.check()
        with self._lock:
            if self._gone is None:
                self._questions[request.id] = _Question(future, reply, then)
            else:
                future.set_exception(_again(self._gone))
        try:
            if not future.done():
                self._send(request, fds)
        except BaseException:
            with self._lock:
                self._questions.pop(request.id, None)
            raise
        try:
            return future.result(timeout)
        except TimeoutError:
            with self._lock:
                waiting = request.id in self._questions
                if waiting:
                    self._questions[request.id] = _Question(future, reply, late or then)
            if not waiting:  # it is being answered
                return future.result()
            raise error(
                ErrorCode.WAIT_TIMEOUT,
                f"daemon pid {self.daemon_pid} did not answer {type(request).__name__} in {timeout:g} s",
            ) from None

    def tell(self, request: protocol.ClientRequest) -> None:
        """Sends without waiting; the reply is dropped."""
        with contextlib.suppress(RelayError):
            self._send(request)

    def look_soon(self) -> None:
        """Not while or after close() runs."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Ends the session. Idempotent; not on the control thread. In a forked child only its own copies are closed."""
        if os.getpid() == self._pid:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                self._gone = self._gone or RelayError(ErrorCode.CLOSED, "this Client is closed")
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # a forked child may hold a copy: closing ours would not end it
            self._end_questions()
        elif self._closed:
            return
        self._closed = True
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._socket.close()
        close_all([fd for fd in (self._wake, self.pidfd) if fd >= 0])

    def _send(self, request: protocol.ClientRequest, fds: Sequence[int] = ()) -> None:
        try:
            packet = protocol.encode(request)
            protocol.client_request(packet)  # as the daemon does, which ends the session of who sends it something else
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as failure:
            text = f"{type(request).__name__} cannot be asked for: {failure}"
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, text) from None
        if len(packet) > protocol.CLIENT_MESSAGE_BYTES:
            raise error(
                ErrorCode.BAD_ARGUMENT,
                f"{type(request).__name__} of {len(packet)} bytes; at most {protocol.CLIENT_MESSAGE_BYTES}",
            )
        try:
            socket.send_fds(self._socket, [packet], fds)
            faults.point("client.request.sent")
        except OSError as failure:
            self._refused = not isinstance(failure, TimeoutError)
            self.check()
            reason = "does not read its socket" if isinstance(failure, TimeoutError) else failure.strerror
            raise self.why_gone() or DaemonGone(
                ErrorCode.DAEMON_GONE, f"daemon pid {self.daemon_pid}: {reason}"
            ) from None

    def _receive_loop(self) -> None:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        poller.register(self._socket, select.POLLIN)
        if self.pidfd >= 0:
            poller.register(self.pidfd, select.POLLIN)
        stopped = looks = False
        try:
            while not stopped:
                ready = {fd for fd, _ in poller.poll(_LOOK_MS if looks else None)}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                    stopped, looks = self._closed, True
                if looks and not stopped:
                    looks = self.look()
                # Replies that a dying daemon still sent come before the news of its death.
                told = ready - {self._wake}
                if told and not stopped and not (self._socket.fileno() in told and self._receive()):
                    break
        except Exception as failure:  # noqa: BLE001 - also of who is told of an event
            known = isinstance(failure, OSError | RelayError | msgspec.MsgspecError)
            self._last_words = self._last_words or (str(failure) if known else f"{type(failure).__name__}: {failure}")
        finally:
            if not stopped:
                self._end()

    def _receive(self) -> bool:
        """One packet; False at the end of the stream."""
        packet, fds, cut = protocol.receive(self._socket, _FDS_MAX)
        if not packet:
            return False
        if cut:
            close_all(fds)
            raise OSError(0, "a packet of the daemon was cut off; raise the limit of open files (RLIMIT_NOFILE)")
        message = protocol.client_reply(packet)
        if isinstance(message, Event):
            self.on_event(message)
        elif isinstance(message, protocol.Failed) and message.id == 0:
            failure = error(message.code, message.text)
            self._last_words, self.last_code, self._was_ended = failure.text, failure.code, True
        else:
            self._answer(message, fds)
        return True

    def _answer(self, message: protocol.ClientReply, fds: list[int]) -> None:
        assert not isinstance(message, Event)
        with self._lock:
            question = self._questions.pop(message.id, None)
        if question is None:  # nobody waits any more
            close_all(fds)
        elif isinstance(message, question.reply):
            try:
                question.future.set_result(question.then(message, fds))
            except Exception as failure:  # noqa: BLE001 - whoever asked waits for it, and other questions go on
                question.future.set_exception(failure)
        else:
            close_all(fds)
            question.future.set_exception(
                error(message.code, message.text)
                if isinstance(message, protocol.Failed)
                else error(ErrorCode.PROTOCOL, f"answered by {type(message).__name__}, not {question.reply.__name__}")
            )

    def _end(self) -> None:
        # A hang-up is only a hint: whether the process is gone, its pidfd knows.
        exited = self.pidfd < 0 or _exits(self.pidfd, _EXIT_S)
        text = f"daemon pid {self.daemon_pid} {'exited' if exited else 'closed this session'}"
        if self._last_words:
            text += f": {self._last_words}"
        with self._lock:
            self._gone = self._gone or self.why_gone() or DaemonGone(ErrorCode.DAEMON_GONE, text)
        try:
            self.on_gone()
        finally:
            self._end_questions()

    def _end_questions(self) -> None:
        with self._lock:
            questions, self._questions = self._questions, {}
        for question in questions.values():
            assert self._gone is not None
            question.future.set_exception(_again(self._gone))


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _reply_alone(reply: Reply, fds: list[int]) -> Reply:
    close_all(fds)
    return reply


def _again(failure: RelayError) -> RelayError:
    """A copy to raise: one exception object must not collect the tracebacks of several threads."""
    return type(failure)(failure.code, failure.text)


def _connected(path: Path, timeout: float) -> socket.socket:
    with contextlib.ExitStack() as undo:
        try:
            unix = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC))
            unix.settimeout(min(timeout, _LONGEST_CONNECT_S))
            unix.connect(str(path))
            unix.settimeout(LOCAL_TIMEOUT_S)
        except OSError as failure:
            raise _connect_error(path, timeout, failure) from None
        undo.pop_all()
    return unix


def _exits(pidfd: int, timeout_s: float) -> bool:
    """Not by select.select(), which takes no descriptor above 1023."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(round(timeout_s * 1000)))


def _connect_error(path: Path, timeout: float, failure: Exception) -> ConnectError:
    if isinstance(failure, OSError) and failure.errno in (errno.EMFILE, errno.ENFILE):
        return ConnectError(ErrorCode.LIMIT, f"no descriptor is left to connect to {path}; raise `ulimit -n`")
    if isinstance(failure, (FileNotFoundError, ConnectionRefusedError)):
        return ConnectError(ErrorCode.NO_DAEMON, f"no daemon listens at {path}")
    if isinstance(failure, PermissionError):
        text = f"uid {os.geteuid()} may not connect to {path}; run as the daemon's user or join its group"
        return ConnectError(ErrorCode.DENIED, text)
    if isinstance(failure, TimeoutError):
        return ConnectError(ErrorCode.NO_DAEMON, f"the daemon at {path} accepts no client within {timeout:g} s")
    return ConnectError(ErrorCode.NO_DAEMON, f"{path}: {getattr(failure, 'strerror', None) or failure}")
