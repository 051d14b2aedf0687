"""RDMA devices for tests without an RDMA NIC: a libibverbs.so.1 that moves bytes between processes (ibverbs.c)."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from helpers.processes import TESTS

HELPERS: Final = TESTS / "helpers"
SANITIZE: Final = "RAILRELAY_TEST_SANITIZE"  # "address,undefined" or "thread"
_FLAGS: Final = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread")
_LIMIT_S: Final = 10.0

Direction = Literal["to", "from", "both"]
_HELD: Final[Mapping[Direction, int]] = {"to": 1, "from": 2, "both": 3}


def missing() -> str:
    """Why it cannot be built; "" if it can."""
    probe = "#include <infiniband/verbs.h>\n"
    command = [os.environ.get("CC", "cc"), "-E", "-x", "c", "-o", os.devnull, "-"]
    try:
        found = subprocess.run(command, input=probe, capture_output=True, text=True, timeout=60, check=False)
    except OSError as error:
        return f"needs a C compiler: {error}"
    return "needs infiniband/verbs.h: install the Debian package libibverbs-dev" if found.returncode else ""


def flags() -> list[str]:
    """For the compiler. What is built to be sanitized loads only into programs that are."""
    sanitize = os.environ.get(SANITIZE)
    return [*_FLAGS, *([f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"] if sanitize else [])]


def build(directory: Path) -> Path:
    """The directory with the library under the name by which programs look for it."""
    linked = [
        *("-fvisibility=hidden", "-shared", "-fPIC", "-Wl,-soname,libibverbs.so.1"),
        f"-Wl,--version-script={HELPERS / 'ibverbs.map'}",
    ]
    target = directory / "libibverbs.so.1"
    command = [os.environ.get("CC", "cc"), *flags(), *linked, "-o", str(target), str(HELPERS / "ibverbs.c")]
    subprocess.run(command, check=True, timeout=120)
    return directory


@functools.cache
def library() -> Path:
    """The directory with the library, built once a run."""
    directory = Path(tempfile.mkdtemp(prefix="railrelay-verbs."))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return build(directory)


@dataclass(frozen=True)
class QueuePair:
    """As a process has it: ``address`` is its device's, ``state`` an ibv_qp_state, ``traffic_class`` and
    ``service_level`` those of its packets, the rest how many work requests."""

    pid: int
    address: str
    number: int
    state: int
    posted: int
    sent: int
    done: int
    receives: int
    traffic_class: int
    service_level: int


@dataclass
class Fabric:
    """Devices that reach each other. ``directory``: an empty one of their own. Faults are ordered by the address of a
    device and hold in all processes that have opened one when the call returns, and in those that do so later."""

    directory: Path
    library: Path = field(default_factory=library)
    _faults: dict[tuple[str, str], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.directory.mkdir(exist_ok=True)

    def environment(
        self,
        devices: Mapping[str, str] | Sequence[str],
        *,
        time_scale: float = 1.0,
        verbose: bool = False,
        null: bool = False,
        **limits: int,
    ) -> dict[str, str]:
        """For a process that has these devices: addresses by name, or addresses alone for stub0, stub1, ... Limits are
        max_sge, max_qp_wr, max_qp, max_cqe, max_mr_size, max_inline and mtu."""
        if not isinstance(devices, Mapping):
            devices = {f"stub{rail}": address for rail, address in enumerate(devices)}
        paths = [str(self.library), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
        return {
            "LD_LIBRARY_PATH": ":".join(filter(None, paths)),
            "RAILRELAY_IBVERBS_DIR": str(self.directory),
            "RAILRELAY_IBVERBS_DEVICES": ",".join(f"{name}={address}" for name, address in devices.items()),
            "RAILRELAY_IBVERBS_TIME_SCALE": str(time_scale),
            "RAILRELAY_IBVERBS_LIMITS": ",".join(f"{name}={limit}" for name, limit in limits.items()),
            "RAILRELAY_IBVERBS_VERBOSE": str(int(verbose)),
            "RAILRELAY_IBVERBS_NULL": str(int(null)),
        }

    # ---- faults that last ----

    def hold(self, address: str, direction: Direction = "both") -> None:
        """No packet arrives that goes "to" the device, comes "from" it, or either. What is on its way by then, or is
        sent meanwhile, arrives later. Held answers: bytes are placed, and the sender does not learn it."""
        self._set(address, "held", _HELD[direction])

    def release(self, address: str) -> None:
        self._set(address, "held", 0)

    @contextlib.contextmanager
    def held(self, address: str, direction: Direction = "both") -> Iterator[None]:
        self.hold(address, direction)
        try:
            yield
        finally:
            self.release(address)

    def port_down(self, address: str) -> None:
        """As ``hold``, and the device's processes get a port event, and no queue pair connects."""
        self._set(address, "down", 1)

    def port_up(self, address: str) -> None:
        self._set(address, "down", 0)

    def limit_rate(self, address: str, bytes_per_s: int) -> None:
        """Of what the device sends; 0: no limit."""
        self._set(address, "bytes_per_s", bytes_per_s)

    @contextlib.contextmanager
    def reads_held(self, address: str) -> Iterator[None]:
        """The device answers no RDMA read meanwhile."""
        self._set(address, "reads_held", 1)
        try:
            yield
        finally:
            self._set(address, "reads_held", 0)

    def fail_registration(self, address: str, error: int = errno.ENOMEM) -> None:
        """0: registrations succeed again. The same for the next two."""
        self._set(address, "registration", error)

    def fail_dmabuf_registration(self, address: str, error: int = errno.EOPNOTSUPP) -> None:
        self._set(address, "dmabuf", error)

    def fail_relaxed_ordering(self, address: str, error: int = errno.EINVAL) -> None:
        self._set(address, "relaxed", error)

    def limit_memory(self, address: str, nbytes: int) -> None:
        """Each process may register so much, as with RLIMIT_MEMLOCK; 0: no limit."""
        self._set(address, "memory_limit", nbytes)

    def slow_down(self, address: str, ms: int) -> None:
        """Of completion queues the making, and of queue pairs the end, takes so long."""
        self._set(address, "slow_ms", ms)

    def fail_error_state(self, address: str, error: int = errno.EIO) -> None:
        """Queue pairs cannot be put into ERR, as if the device were gone; 0: they can again."""
        self._set(address, "state", error)

    def clear(self) -> None:
        """No fault any more."""
        self._faults.clear()
        self._store()

    # ---- faults that happen once ----

    def fail_queue_pairs(self, address: str, number: int = 0) -> int:
        """That one of the device's queue pairs, or all, get IBV_EVENT_QP_FATAL and go into ERR; how many."""
        return self._acted(address, f"fail {number}")

    def drop_connections(self, address: str, number: int = 0) -> int:
        """No packet gets through that queue pair any more, nor any answer; how many."""
        return self._acted(address, f"drop {number}")

    def raise_event(self, address: str, event: int) -> None:
        """An event of the device or its port: from IBV_EVENT_DEVICE_FATAL (8) on."""
        self._order(f"event {event}", address)

    # ---- what the devices saw ----

    def counts(self, address: str, pid: int | None = None) -> dict[str, int]:
        """Sums over the processes that have opened the device, or of one process: objects that exist, and ``rnr`` (a
        message found no receive posted), ``reads`` (that it has answered), ``overruns`` (of completion queues),
        ``queue_full`` (post_send said ENOMEM), ``refused_hellos`` (the ends were told different things), ``unmapped``
        (registered memory that has gone)."""
        sums: dict[str, int] = {}
        for reply in self._order("counts", address):
            found = {name: int(value) for name, value in (pair.split("=") for pair in reply.split())}
            if found.pop("pid") != pid and pid is not None:
                continue
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + value
        return sums

    def queue_pairs(self, address: str) -> list[QueuePair]:
        found = []
        for path in self._controls(address):
            reply = self._ask(path, "queue_pairs")
            for line in filter(None, (reply or "").split(";")):
                number, *values = (int(word) for word in re.findall(r"\d+", line))
                found.append(QueuePair(int(path.name.split("-")[2]), address, number, *values))
        return found

    # ---- control sockets ----

    def _set(self, address: str, what: str, value: int) -> None:
        self._faults[address, what] = value
        self._store()

    def _store(self) -> None:
        lines = [f"{address} {what} {value}\n" for (address, what), value in self._faults.items()]
        new = self.directory / "faults.new"
        new.write_text("".join(lines))
        new.rename(self.directory / "faults")
        for path in self._controls("*"):
            reply = self._ask(path, "reload")
            assert reply in (None, "ok"), reply

    def _acted(self, address: str, order: str) -> int:
        return sum(int(reply.split()[1]) for reply in self._order(order, address))

    def _order(self, order: str, address: str) -> list[str]:
        return [reply for path in self._controls(address) if (reply := self._ask(path, order)) is not None]

    def _controls(self, address: str) -> list[Path]:
        return sorted(self.directory.glob(f"control-{address}-*"))

    def _ask(self, path: Path, order: str) -> str | None:
        """None: its process has gone. Through a descriptor: the path may be too long for a socket's name."""
        directory = os.open(self.directory, os.O_PATH | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
                control.settimeout(_LIMIT_S)
                control.connect(f"/proc/self/fd/{directory}/{path.name}")
                control.send(order.encode())
                return control.recv(4096).decode() or None
        except (ConnectionError, FileNotFoundError):
            return None
        finally:
            os.close(directory)
