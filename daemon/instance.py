"""One daemon an instance name: a lock that the kernel drops with its holder, and the removal of what a dead one left.

The lock is held on a shared-memory object beside the segments, because it is their names that must not be shared; two
daemons on different control sockets would otherwise take each other's segments for stale ones.
"""

from __future__ import annotations

import fcntl
import os

from railrelay.client import paths
from railrelay.shm_layout import segment


class InstanceTaken(Exception):
    """Another daemon runs under the name, or another user holds it."""


class Instance:
    """The right to the names of one instance. Closes idempotently and leaves none of them behind."""

    def __init__(self, name: str) -> None:
        """InstanceTaken."""
        self.name = paths.check_instance(name)
        self.prefix = f"/railrelay.{name}."
        self._lock = _locked(name, f"{self.prefix}lock")
        for stale in self._objects():
            segment.unlink(stale)

    def lane_memory(self, rail: int, client: int, generation: int) -> str:
        return f"{self.prefix}lane.{rail}.{client}.{generation}"

    def bounce_memory(self, rail: int, client: int, serial: int) -> str:
        return f"{self.prefix}bounce.{rail}.{client}.{serial}"

    def client_segment(self, client: int, serial: int) -> str:
        return f"{self.prefix}client.{client}.{serial}"

    def close(self) -> None:
        if self._lock < 0:
            return
        for name in self._objects():
            segment.unlink(name)
        segment.unlink(f"{self.prefix}lock")  # while the lock is held: nobody else can have taken it
        os.close(self._lock)
        self._lock = -1

    def _objects(self) -> list[str]:
        return [name for name in segment.objects(self.prefix) if name != f"{self.prefix}lock"]


def _locked(instance: str, name: str) -> int:
    while True:
        try:
            fd = segment.open_lock(name)
        except PermissionError:
            raise InstanceTaken(
                f"instance {instance!r}: shared memory {name} belongs to another user; choose another node.instance"
            ) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise InstanceTaken(
                f"instance {instance!r} is taken by railrelayd pid {holder}; stop it, or choose another node.instance"
            ) from None
        if segment.is_current(name, fd):  # the former holder may have unlinked it between our open and our lock
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        os.close(fd)
