"""Descriptors that came from clients. The last close of one may wait as long as its sender likes: of a socket that
lingers, of a file of a FUSE file system. So nobody who serves others closes them. Any thread."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Iterable
from typing import Final

MOST_THREADS: Final = 16

_waiting: Final[queue.SimpleQueue[int]] = queue.SimpleQueue()
_lock: Final = threading.Lock()
_threads = 0


def discard(fds: Iterable[int]) -> None:
    """Closes them: shared memory at once, everything else on a thread, since that may wait."""
    for fd in fds:
        try:
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            _waiting.put(fd)
            _start()
        else:
            os.close(fd)


def _start() -> None:
    """One thread more, as long as there may be: those that there are may all be waiting."""
    global _threads
    with _lock:
        if _threads == MOST_THREADS:
            return
        _threads += 1
    threading.Thread(target=_close, name="descriptors", daemon=True).start()


def _close() -> None:
    global _threads
    while True:
        try:
            fd = _waiting.get_nowait()
        except queue.Empty:
            with _lock:
                if _waiting.empty():
                    _threads -= 1
                    return
            continue
        os.close(fd)
