"""The Unix socket that clients attach to: admission by credentials, packets with descriptors, and a client's death,
which its pidfd tells; the end of the stream means that it let go. Main thread only."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import stat
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode
from railrelay.client.protocol import Message
from railrelay.daemon.acceptor import Acceptor
from railrelay.daemon.descriptors import discard, hang_up, waiting
from railrelay.daemon.instance import InstanceTaken
from railrelay.daemon.node_state import Report

MAX_UNSENT: Final = 1024  # packets
NO_ROOM: Final = (errno.EMFILE, errno.ENFILE)
NO_DESCRIPTORS: Final = "the daemon has no descriptors left; raise its LimitNOFILE, or unregister memory"
MAX_EVENTS_UNSENT: Final = MAX_UNSENT // 2
MAX_FDS: Final = 4  # in a packet from a client
FDS_THAT_FIT: Final = 253  # in any packet: what was not received would be closed by the kernel, here and now
MAX_FDS_WAITING: Final = 4096  # of one process, until they are closed
PACKETS_A_TURN: Final = 16
ATTACH_TIMEOUT_S: Final = 5.0
_UCRED: Final = struct.Struct("iII")
_SO_PEERGROUPS: Final = 59
_GID: Final = struct.Struct("I")
_GROUPS_MAX: Final = 256  # more bytes Python does not ask for


class ClientSocket:
    """One connection of a local process. ``on_message(socket, message, fds)`` owns the descriptors; ``on_end(socket,
    reason)`` comes once, also after close(). Closes idempotently."""

    def __init__(
        self,
        unix: socket.socket,
        pid: int,
        on_message: Callable[[ClientSocket, protocol.ClientRequest, list[int]], None],
        on_end: Callable[[ClientSocket, str], None],
        report: Report,
    ) -> None:
        """ProcessLookupError if the process is gone already."""
        self.pid = pid
        self.closed = False
        self._unix = unix
        self._on_message = on_message
        self._on_end = on_end
        self._report = report
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._room = asyncio.Event()
        self._room.set()
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self.close, "exited")
        self._loop.add_reader(unix.fileno(), self._readable)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """The descriptors stay the caller's. Nothing happens on a closed connection."""
        if self.closed:
            return
        packet = protocol.encode(message)
        if not self._unsent and self._send(packet, list(fds)):
            return
        if self.closed:
            return
        if len(self._unsent) >= MAX_UNSENT:
            self.violate(f"does not read: {MAX_UNSENT} packets unsent")
            return
        if not self._unsent:
            self._loop.add_writer(self._unix.fileno(), self._writable)
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))  # noqa: PERF401 - those made before one that fails are closed
        except OSError as failure:
            discard(copies, self.pid)
            self.close(f"could not be sent {type(message).__name__}: {failure.strerror}")
            return
        self._unsent.append((packet, copies))
        if len(self._unsent) >= MAX_EVENTS_UNSENT:
            self._room.clear()

    @property
    def has_room(self) -> bool:
        """Whether events may be sent. A client that reads none gets none that can wait: only so many that answers still
        have room beside them."""
        return self._room.is_set()

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Also when the connection has ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._room.wait()
        return self.has_room

    def exited(self) -> bool:
        """Whether the process is gone, which the loop may not have seen yet."""
        poller = select.poll()
        if not self.closed:
            poller.register(self._pidfd, select.POLLIN)
        return self.closed or bool(poller.poll(0))

    def dup_pidfd(self) -> int:
        """A pidfd of the client's process for the caller, of a connection that is not closed."""
        return os.dup(self._pidfd)

    def violate(self, what: str) -> None:
        """Ends the session because of what the client did."""
        self._report(ErrorCode.PROTOCOL, f"client pid {self.pid}: {what}", key=f"client pid {self.pid}")
        self.send_last(ErrorCode.PROTOCOL, what)
        self.close(what)

    def send_last(self, code: ErrorCode, text: str) -> None:
        if not self.closed and not self._unsent:
            with contextlib.suppress(OSError):
                self._unix.send(protocol.encode(protocol.Failed(0, code, text)))

    def close(self, reason: str = "closed by the daemon") -> None:
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._unix.fileno())
        self._loop.remove_writer(self._unix.fileno())
        os.close(self._pidfd)
        hang_up(self._unix, self.pid)
        for _, fds in self._unsent:
            discard(fds, self.pid)
        self._unsent.clear()
        self._room.set()
        self._on_end(self, reason)

    def _send(self, packet: bytes, fds: list[int]) -> bool:
        """False if it would block or the connection has ended."""
        try:
            socket.send_fds(self._unix, [packet], fds)
        except BlockingIOError:
            return False
        except OSError as failure:
            self.close(f"hung up ({failure.strerror})")
            return False
        return True

    def _writable(self) -> None:
        while self._unsent:
            packet, fds = self._unsent[0]
            if not self._send(packet, fds):
                return
            self._unsent.popleft()
            discard(fds, self.pid)
        self._loop.remove_writer(self._unix.fileno())
        self._room.set()

    def _readable(self) -> None:
        for _ in range(PACKETS_A_TURN):
            try:
                packet, fds, cut_off = protocol.receive(self._unix, FDS_THAT_FIT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as failure:
                self.close(f"hung up ({failure.strerror})")
                return
            self._take(packet, fds, cut_off)
            if self.closed:
                return

    def _take(self, packet: bytes, fds: list[int], cut_off: bool) -> None:
        # Fewer than fit were cut off: there was no room for them in this process.
        no_room = cut_off and len(fds) < FDS_THAT_FIT and len(packet) < protocol.CLIENT_MESSAGE_BYTES
        if waiting(self.pid) > MAX_FDS_WAITING:
            discard(fds, self.pid)
            self.violate(f"sent descriptors whose close takes long: {MAX_FDS_WAITING} of them wait")
            return
        if packet and (no_room or not cut_off) and len(fds) <= MAX_FDS:
            try:
                message = protocol.client_request(packet)
            except msgspec.MsgspecError as failure:
                discard(fds, self.pid)
                self.violate(f"sent something that is not a request ({failure})")
                return
            if no_room:
                discard(fds, self.pid)
                self._report(ErrorCode.LIMIT, f"client pid {self.pid}: {type(message).__name__}: {NO_DESCRIPTORS}")
                self.send(protocol.Failed(message.id, ErrorCode.LIMIT, NO_DESCRIPTORS))
            else:
                self._on_message(self, message, fds)
            return
        discard(fds, self.pid)
        if packet:
            self.violate(f"sent a packet above {protocol.CLIENT_MESSAGE_BYTES} bytes or {MAX_FDS} descriptors")
        else:
            self.close("detached")


class ClientServer:
    """Owns the control socket of the daemon. Closes idempotently."""

    def __init__(
        self, path: Path, gid: int | None, admit: Callable[[socket.socket, int], None], report: Report
    ) -> None:
        """``admit(socket, pid)`` gets connections of the daemon's user, of root and of the group, if there is one.
        InstanceTaken, OSError."""
        self._path = path
        self._gid = gid
        self._admit = admit
        self._report = report
        self._acceptor = Acceptor(_listening(path, self._gid), f"control socket {path}", self._check, report)
        self._closed = False

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._acceptor.close()
            self._path.unlink(missing_ok=True)

    def _check(self, unix: socket.socket) -> None:
        pid, uid, gid = _UCRED.unpack(unix.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if pid and (uid in (0, os.geteuid()) or self._gid in (gid, *_groups(unix))):
            self._admit(unix, pid)
            return
        text = (
            f"uid {uid} (pid {pid}) may not use this daemon of uid {os.geteuid()}; run as that user, or set node.group"
            if pid
            else "the client's process is not visible from the daemon; run both in one pid namespace"
        )
        self._report(ErrorCode.DENIED, text)
        with contextlib.suppress(OSError):
            unix.send(protocol.encode(protocol.Failed(0, ErrorCode.DENIED, text)))
        hang_up(unix, pid)


def _groups(unix: socket.socket) -> list[int]:
    """Those that the process had beside its own when it connected, whatever the user database says of its user."""
    try:
        raw = unix.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_MAX * _GID.size)
    except OSError:  # it is in more: its own group has to do
        return []
    return [gid for (gid,) in _GID.iter_unpack(raw)]


def _listening(path: Path, gid: int | None) -> socket.socket:
    _remove_stale(path)
    unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)
        try:
            unix.bind(str(path))
        finally:
            os.umask(before)
        if gid is not None:
            os.chown(path, -1, gid)
            path.chmod(0o660)
        unix.listen(socket.SOMAXCONN)
    except OSError as failure:
        unix.close()
        raise OSError(failure.errno, f"control socket {path}: {failure.strerror}") from None
    return unix


def _remove_stale(path: Path) -> None:
    """A socket that nobody listens on is what a killed daemon left."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(
                None, f"control socket {path}: something else is there; remove it or choose another path"
            )
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as failure:
            raise OSError(failure.errno, f"control socket {path}: {failure.strerror}; remove it") from None
        else:
            raise InstanceTaken(f"control socket {path} is in use by another daemon; choose another node.socket")
