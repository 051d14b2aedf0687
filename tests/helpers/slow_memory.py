"""Memory whose first reader waits until the test lets it go on: missing pages of a userfaultfd."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from typing import Final

import pytest

_USERFAULTFD: Final = {"x86_64": 323, "aarch64": 282}
_API, _REGISTER, _WAKE_ZERO = 0xC018AA3F, 0xC020AA00, 0xC020AA04  # UFFDIO_API, _REGISTER, _ZEROPAGE
_API_VERSION, _MISSING = 0xAA, 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


class SlowMemory:
    def __init__(self, nbytes: int) -> None:
        number = _USERFAULTFD.get(platform.machine())
        self._fd = -1 if number is None else _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            pytest.skip(f"userfaultfd: {os.strerror(ctypes.get_errno())}; needs root or vm.unprivileged_userfaultfd=1")
        fcntl.ioctl(self._fd, _API, bytearray(struct.pack("QQQ", _API_VERSION, 0, 0)))
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        fcntl.ioctl(self._fd, _REGISTER, bytearray(struct.pack("QQQQ", self.address, nbytes, _MISSING, 0)))

    def is_waited_for(self) -> bool:
        """Does a reader wait for a page?"""
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._fd, 32))
        return False

    def release(self) -> None:
        """All of it reads as zeroes. Idempotent."""
        if self._fd < 0:
            return
        with contextlib.suppress(FileExistsError):
            fcntl.ioctl(self._fd, _WAKE_ZERO, bytearray(struct.pack("QQQq", self.address, self.nbytes, 0, 0)))
        os.close(self._fd)
        self._fd = -1


@contextlib.contextmanager
def slow(nbytes: int) -> Iterator[SlowMemory]:
    memory = SlowMemory(nbytes)
    try:
        yield memory
    finally:
        memory.release()
