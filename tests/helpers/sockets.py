"""TCP connections of another process, and breaking them: what a failing link or switch does to a daemon."""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helpers import rail_devices
from helpers.descriptors import duplicates
from helpers.nodes import Node
from helpers.waiting import LIMIT_S
from railrelay.client import protocol

_NOWHERE: Final = socket.AF_UNSPEC.to_bytes(2, sys.byteorder) + bytes(14)
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Connection:
    """A duplicate of a connected socket that a daemon holds too."""

    socket: socket.socket
    is_control: bool

    def cut(self) -> None:
        """Both ends see that it has ended; what was sent may still arrive."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """The same, and what is on its way is lost: a connect() to nowhere."""
        _libc.connect(self.socket.fileno(), _NOWHERE, len(_NOWHERE))


@contextlib.contextmanager
def connections(one: Node, other: Node) -> Iterator[list[Connection]]:
    """Those that ``one`` has with ``other``, whoever connected. PermissionError if the kernel does not show them."""
    found: list[Connection] = []
    control = {protocol.parse_session(node.session)[1] for node in (one, other)}
    with contextlib.ExitStack() as stack:
        ports = _ports(other)
        for duplicate in _sockets(one.pid):
            stack.enter_context(duplicate)
            with contextlib.suppress(OSError):
                near, far = duplicate.getsockname()[1], duplicate.getpeername()[1]
                if far in ports:
                    found.append(Connection(duplicate, bool({near, far} & control)))
        yield found


def cut(
    one: Node,
    other: Node,
    *,
    rails: bool = True,
    control: bool = False,
    reset: bool = False,
    share: float = 1.0,
    seed: int = 0,
) -> int:
    """Cuts, or resets, a share of the rail connections, of the control connections, or both; how many."""
    rng = random.Random(seed)
    if one.devices:
        chosen = [device for device in one.devices if rails and rng.random() < share]
        broken = sum(rail_devices.break_connections(device, one.fabric, silently=reset) for device in chosen)
        return broken + (_cut(one, other, rng, share, rails=False, control=True, reset=reset) if control else 0)
    return _cut(one, other, rng, share, rails=rails, control=control, reset=reset)


def _cut(one: Node, other: Node, rng: random.Random, share: float, *, rails: bool, control: bool, reset: bool) -> int:
    with connections(one, other) as found:
        chosen = [
            connection for connection in found if (control if connection.is_control else rails) and rng.random() < share
        ]
        for connection in chosen:
            if reset:
                connection.reset()
            else:
                connection.cut()
        return len(chosen)


def _ports(node: Node) -> set[int]:
    """Local ports of all TCP sockets of a daemon."""
    found: set[int] = set()
    for duplicate in _sockets(node.pid):
        with duplicate, contextlib.suppress(OSError):
            found.add(duplicate.getsockname()[1])
    return found


def _sockets(pid: int) -> Iterator[socket.socket]:
    for fd in duplicates(pid, lambda link: link.startswith("socket:")):
        duplicate = socket.socket(fileno=fd)
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            yield duplicate
        else:
            duplicate.close()


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """A socket whose last close waits for a peer that does not read."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        slow = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 4 * int(LIMIT_S)))
        slow.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                slow.send(bytes(1 << 20))
        yield slow.detach()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # resets: nobody lingers any more


def free_ports(count: int) -> list[int]:
    """Ports for daemons that keep theirs over a restart: below what the system gives to others meanwhile."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(range(first // 2, first), first // 4):
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError(f"{len(found)} of {count} ports between {first // 2} and {first} are free")


def free_port() -> int:
    return free_ports(1)[0]
