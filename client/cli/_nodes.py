"""Relay daemons that demo and bench start for themselves on this machine, and the memory that they may take."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

from railrelay.client.cli._table import size
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.shm_layout import abi

MIB: Final = 1 << 20
GIB: Final = 1 << 30
ADDRESS: Final = "127.0.0.1"

_DAEMON: Final = (sys.executable, "-P", "-m", "railrelay.daemon.main")
_READY_S: Final = 20.0
_READY_VERBS_S: Final = 60.0  # where verbs can be tried without hardware the machine is emulated
_READY_GPU_S: Final = 90.0  # helpers make CUDA contexts, several at once
_EXIT_S: Final = 15.0
_LOG_LINES: Final = 12
_SHM_DIRECTORY: Final = "/dev/shm"
_CGROUP: Final = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class Geometry:
    """Sizes of a daemon's shared memory, named as in its configuration."""

    slots: int
    slot_bytes: int
    table_entries: int
    ring_tables: int
    ring_slices: int = 256
    bounce_slots: int = 4
    transfers: int = 1024

    @property
    def lane_bytes(self) -> int:
        return self.slots * self.slot_bytes

    def client_bytes(self, rails: int) -> int:
        """A client's segment, without its lanes: the tables that grow with the geometry, and one MiB for the rest."""
        entries = self.table_entries
        size = abi.SIZES
        a_rail = (
            self.slots * (size["slice"] + entries * size["block"])
            + self.ring_slices * size["slice"]
            + self.ring_tables * entries * size["block"]
            + self.bounce_slots * (size["bounce_frame"] + entries * size["run"])
        )
        return rails * a_rail + self.transfers * size["transfer"] + MIB

    def text(self) -> str:
        return f"{self.slots} slots of {_mib(self.slot_bytes)} a lane, {self.table_entries} blocks a slot"


# From the daemon's defaults down to what a container with 64 MiB of /dev/shm has room for.
GEOMETRIES: Final = (
    Geometry(18, 8 * MIB, 4096, 32),
    Geometry(18, 4 * MIB, 2048, 32),
    Geometry(18, 2 * MIB, 1024, 32),
    Geometry(18, MIB, 512, 32),
    Geometry(12, MIB, 512, 16),
    Geometry(8, MIB // 2, 256, 8),
    Geometry(6, MIB // 4, 128, 8, ring_slices=64, transfers=256),
    Geometry(4, MIB // 8, 64, 4, ring_slices=64, transfers=256),
)


def fitting_geometry(
    rails: int, clients: int, lanes: int, *, largest_slot_bytes: int = 8 * MIB, bounces: int = 0
) -> Geometry:
    """The largest that leaves half of /dev/shm and three quarters of the memory free. RelayError NO_MEMORY."""
    room = min(free_shared_bytes() // 2, free_bytes() // 4)
    for geometry in GEOMETRIES:
        if geometry.slot_bytes > largest_slot_bytes:
            continue
        bounce_bytes = bounces * geometry.bounce_slots * geometry.slot_bytes
        wanted = lanes * geometry.lane_bytes + clients * geometry.client_bytes(rails) + bounce_bytes + 4 * MIB
        if wanted <= room:
            return geometry
    raise RelayError(
        ErrorCode.NO_MEMORY,
        f"{size(wanted)} of shared memory wanted for the smallest relay memory, {size(room)} may be used (half of the"
        f" free {_SHM_DIRECTORY}, a quarter of the free memory); make {_SHM_DIRECTORY} larger",
    )


def free_shared_bytes() -> int:
    free = os.statvfs(_SHM_DIRECTORY)
    return free.f_bavail * free.f_frsize


def free_bytes() -> int:
    """Memory that may still be used, by the kernel's estimate and the limit of the control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):  # no limit, or no control group of version 2
        limit = int((_CGROUP / "memory.max").read_text())
        free = min(free, limit - int((_CGROUP / "memory.current").read_text()))
    return max(0, free)


@dataclass(frozen=True)
class Emulated:
    """The emulated NIC of a rail, the GPU whose memory its lanes are ("" for host memory), and how that one copies."""

    rate_gbit: float
    gpu: str = ""
    copies: str = "auto"

    def lines(self) -> list[str]:
        where = (
            ['memory = "device"', f"gpu = {json.dumps(self.gpu)}", f"copies = {json.dumps(self.copies)}"]
            if self.gpu
            else []
        )
        return ['nic = "emulated"', f"rate_gbit = {self.rate_gbit!r}", *where]


@dataclass(frozen=True)
class Verbs:
    """The RDMA device of a rail."""

    device: str
    gid_index: int = -1

    def lines(self) -> list[str]:
        return ['nic = "verbs"', f"device = {json.dumps(self.device)}", f"gid_index = {self.gid_index}"]


class Node:
    """A daemon of its own instance. Closes idempotently, and ends with this process however that ends."""

    def __init__(
        self,
        instance: str,
        directory: Path,
        geometry: Geometry,
        cpus: Sequence[int],
        congestion: str = "",
        nics: Sequence[Emulated | Verbs] = (),
    ) -> None:
        """``cpus``: the core of each rail's thread, -1 for none. ``nics``: of each rail; none: TCP. RelayError if it
        does not start."""
        self.instance = instance
        self.rails = len(cpus)
        self._log = directory / f"{instance}.log"
        config = directory / f"{instance}.toml"
        rails = [[f"cpu = {cpu}"] for cpu in cpus]
        for number, rail in enumerate(rails):
            nic = nics[number] if nics else None
            rail += nic.lines() if nic else []
            if not isinstance(nic, Verbs):
                rail.append(f'address = "{ADDRESS}"')
        config.write_text(_config(instance, directory / f"{instance}.sock", geometry, rails, congestion))
        ready, child_end = os.pipe()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [*_DAEMON, "--config", config, "--ready-fd", str(child_end)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[child_end],
                    process_group=0,  # Ctrl-C is for this process; it then ends the daemons, engines first
                    preexec_fn=_end_with_parent,
                )
        finally:
            os.close(child_end)
        of_gpu = any(isinstance(nic, Emulated) and nic.gpu for nic in nics)
        limit_s = _READY_GPU_S if of_gpu else _READY_VERBS_S if nics else _READY_S
        try:
            facts = json.loads(self._ready_line(ready, limit_s))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ready)
        self.pid = self._process.pid
        self.session: str = facts["session"]
        self.socket: str = facts["socket"]

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"  {line}" for line in lines)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_EXIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.returncode == -signal.SIGKILL:  # nobody comes after it under its name
            for name in os.listdir(_SHM_DIRECTORY):
                if name.startswith(f"railrelay.{self.instance}."):
                    Path(_SHM_DIRECTORY, name).unlink(missing_ok=True)

    def _ready_line(self, ready: int, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([ready], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(ready, 4096) if readable else b""
            if not part:
                why = "ended" if readable else f"was not ready after {limit_s:g} s"
                text = f"the daemon {self.instance} {why}; its log ends with\n{self.log_tail()}"
                raise RelayError(ErrorCode.INTERNAL, text)
            line += part
        return line

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack like Ctrl-C, so that daemons, engines and their memory are cleaned up."""

    def stop(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def congestion_controls() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def _config(instance: str, socket: Path, geometry: Geometry, rails: Sequence[Sequence[str]], congestion: str) -> str:
    lines = [
        "[node]",
        f'instance = "{instance}"',
        f"socket = {json.dumps(str(socket))}",
        f'host = "{ADDRESS}"',
        "[relay]",
        *(f"{option} = {value}" for option, value in vars(geometry).items()),
        "[tcp]",
        f'congestion = "{congestion}"',
    ]
    for rail in rails:
        lines += ["[[rail]]", *rail]
    return "\n".join(lines) + "\n"


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:g} MiB" if nbytes >= MIB or nbytes % 1024 else f"{nbytes // 1024} KiB"
