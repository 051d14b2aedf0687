"""Descriptors that came from clients. The last close of one may wait as long as its sender likes: of a socket that
lingers, of a file of a FUSE file system, of a Unix socket in which such ones lie unread. So nobody who serves others
closes them, and who sends such ones waits alone. Any thread."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Final

MOST_THREADS: Final = 256
OWN: Final = 0  # instead of a pid: descriptors that the daemon has made itself

_lock: Final = threading.Lock()
_waiting: Final[dict[int, deque[int]]] = {}  # by the pid that they came from; one with a thread always has a queue
_served: Final[set[int]] = set()  # pids with a thread


def discard(fds: Iterable[int], pid: int) -> None:
    """Closes what came from this process: shared memory at once, everything else on a thread, since that may wait. One
    thread a process: those of others go on."""
    for fd in fds:
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            _put(fd, pid)
        else:
            os.close(fd)


def hang_up(unix: socket.socket, pid: int) -> None:
    """Ends the connection with this process at once, and closes its socket, in which descriptors may lie unread."""
    with contextlib.suppress(OSError):
        unix.shutdown(socket.SHUT_RDWR)
    discard([unix.detach()], pid)


def waiting(pid: int) -> int:
    """How many of this process are still to be closed, beside the one that is being closed."""
    with _lock:
        return len(_waiting.get(pid, ()))


def _put(fd: int, pid: int) -> None:
    with _lock:
        _waiting.setdefault(pid, deque()).append(fd)
        if pid in _served or len(_served) == MOST_THREADS:
            return
        _served.add(pid)
    try:
        threading.Thread(target=_close, args=(pid,), name="descriptors", daemon=True).start()
    except RuntimeError:  # no more threads now: the next one is tried again
        with _lock:
            _served.discard(pid)


def _close(pid: int | None) -> None:
    while pid is not None:
        with _lock:
            queue = _waiting[pid]
            fd = queue.popleft() if queue else -1
            if fd < 0:
                del _waiting[pid]
                _served.discard(pid)
                # There is one only if all threads were taken when it came.
                pid = next((other for other in _waiting if other not in _served), None)
                if pid is not None:
                    _served.add(pid)
        if fd >= 0:
            os.close(fd)
