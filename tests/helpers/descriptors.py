"""Duplicates of descriptors of another process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from typing import Final

_PIDFD_GETFD: Final = 438
_libc: Final = ctypes.CDLL(None, use_errno=True)


def duplicates(pid: int, wanted: Callable[[str], bool]) -> Iterator[int]:
    """Of those whose link in /proc is ``wanted``; each belongs to the caller. PermissionError if the kernel does not
    show them."""
    pidfd = os.pidfd_open(pid)
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if not wanted(os.readlink(f"/proc/{pid}/fd/{name}")):
                    continue
                fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
                if fd < 0:
                    number = ctypes.get_errno()
                    if number in (errno.EBADF, errno.ESRCH):  # closed meanwhile, or the process is ending
                        continue
                    raise PermissionError(number, os.strerror(number))
                yield fd
    finally:
        os.close(pidfd)
