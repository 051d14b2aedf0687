"""The network between the nodes: namespaces, the NICs in them, and one of two fabrics in the middle.

Every node is a network namespace with one interface a rail, "nic<r>" with 10.<r>.0.<node + 1>, and "control" in an
unshaped network of its own for the daemons' control connections. What a rail's address sends leaves by that rail's
NIC, whatever rail it is for (one routing table a NIC)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import re
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

PREFIX: Final = "rrlab"
MTU_BYTES: Final = 9000
ETHERNET_BYTES: Final = 14

_NAMES: Final = Path("/run/netns")
_CLONE_NEWNET: Final = 0x40000000
_LIMIT_S: Final = 30
_SAMPLE_S: Final = 0.05
_TABLE: Final = 100
_QUEUE_FRAMES: Final = 4000  # of a TUN device; the switch empties it at once
_LOSSY_NIC_BYTES: Final = 4_000_000
_BURST_FRAMES: Final = 2
_SOURCE: Final = Path(__file__).with_name("switch.c")

Series = list[float]


@dataclass(frozen=True)
class Network:
    """What the fabric is made of. ``window_bytes``: most socket buffer of a TCP connection, at either end.
    ``port_bytes``: queue of an egress of the lossy fabric; buffer, xoff and xon: of the lossless one."""

    nodes: int
    rails: int
    bits_per_second: int
    congestion: str
    window_bytes: int = 512 << 10
    buffer_bytes: int = 2 << 20
    xoff_bytes: int = 96 << 10
    xon_bytes: int = 72 << 10
    port_bytes: int = 128 << 10

    @property
    def line_bytes_per_second(self) -> float:
        return self.bits_per_second / 8

    def address(self, node: int, rail: int) -> str:
        return f"10.{rail}.0.{node + 1}"

    def control(self, node: int) -> str:
        return f"172.30.0.{node + 1}"

    @property
    def ports(self) -> list[tuple[int, int]]:
        return [(node, rail) for node in range(self.nodes) for rail in range(self.rails)]


@dataclass(frozen=True)
class Pauses:
    """What priority flow control did. ``of_nics``: share of each bucket that a NIC was paused, by (node, rail).
    ``port_bytes_max``: most that waited for one egress. ``late_max_ms``: longest time the switch did not run."""

    nics_ms: float
    inside_ms: float
    port_bytes_max: int
    late_max_ms: float
    of_nics: dict[tuple[int, int], Series]


@dataclass(frozen=True)
class Reading:
    """What a fabric has counted since reset(). Series by (node, rail): shares of the line rate, one value a bucket."""

    begin_ns: int
    bucket_s: float
    drops: int
    sent: dict[tuple[int, int], Series]
    received: dict[tuple[int, int], Series]
    pauses: Pauses | None  # of a lossless fabric


class Namespaces:
    """Network namespaces of this run, and those that a killed run left behind removed."""

    def __init__(self, names: Sequence[str]) -> None:
        remove_stale()
        self._lock = open(_lock_path(os.getpid()), "w")  # noqa: SIM115 - held until close()
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.names: list[str] = []
        try:
            for name in names:
                full = f"{PREFIX}{os.getpid()}-{name}"
                self.names.append(full)
                _run(["ip", "netns", "add", full])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=_LIMIT_S, check=False)
        self.names.clear()
        if not self._lock.closed:
            _lock_path(os.getpid()).unlink(missing_ok=True)
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fabric:
    """Common to both: the nodes' namespaces, their control network and routes."""

    kind = ""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as building:
            names = ["fabric", *(f"node{node}" for node in range(network.nodes))]
            namespaces = building.enter_context(Namespaces(names))
            self.middle, *self.nodes = namespaces.names
            self._stack = building.pop_all()
        try:
            self._connect_control()
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        raise NotImplementedError

    def reset(self, node_pids: Sequence[int]) -> None:
        """Begins to count. ``node_pids``: a process in each node's namespace."""
        raise NotImplementedError

    def read(self) -> Reading:
        raise NotImplementedError

    @property
    def pids(self) -> list[int]:
        return []

    def check(self) -> None:
        """RuntimeError if frames do not move any more."""

    def describe(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _connect_control(self) -> None:
        ip(self.middle, ["link add control type bridge", "link set control up", "link set lo up"])
        for node, name in enumerate(self.nodes):
            ip(
                self.middle,
                [
                    f"link add c{node} type veth peer name control netns {name}",
                    f"link set c{node} master control up",
                ],
            )
            ip(
                name,
                ["link set lo up", f"address add {self.network.control(node)}/24 dev control", "link set control up"],
            )
            window = self.network.window_bytes
            sysctl(
                name,
                {
                    "net.ipv6.conf.all.disable_ipv6": 1,
                    "net.ipv4.conf.all.rp_filter": 0,
                    "net.ipv4.conf.default.rp_filter": 0,
                    "net.ipv4.conf.all.arp_ignore": 1,
                    "net.ipv4.conf.all.arp_announce": 2,
                    "net.ipv4.tcp_no_metrics_save": 1,
                    "net.ipv4.tcp_rmem": f"4096 {min(131072, window)} {window}",
                    "net.ipv4.tcp_wmem": f"4096 {min(65536, window)} {window}",
                },
            )

    def _routes(self, node: int) -> list[str]:
        """Of interfaces that exist."""
        lines = []
        for rail in range(self.network.rails):
            own = self.network.address(node, rail)
            lines += [
                f"address add {own}/32 dev nic{rail}",
                f"link set nic{rail} mtu {MTU_BYTES} up",
                f"route add 10.0.0.0/8 dev nic{rail} src {own} table {_TABLE + rail}",
                f"rule add from {own} lookup {_TABLE + rail}",
            ]
        return lines


class Lossless(Fabric):
    """switch.c: shared buffers and priority flow control; nothing is dropped."""

    kind = "lossless"

    def _build(self) -> None:
        directory = Path(self._stack.enter_context(scratch()))
        binary = directory / "switch"
        warnings = ["-Wall", "-Wextra", "-Wno-missing-field-initializers"]
        _run([os.environ.get("CC", "cc"), "-std=gnu11", "-O2", *warnings, "-o", str(binary), str(_SOURCE)])
        options = {
            "rails": self.network.rails,
            "rate": self.network.bits_per_second,
            "buffer": self.network.buffer_bytes,
            "xoff": self.network.xoff_bytes,
            "xon": self.network.xon_bytes,
        }
        command = [str(binary), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        self._process = subprocess.Popen(
            [*command, *self.nodes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(self._end)
        self._answer()
        for node, name in enumerate(self.nodes):
            queue = [f"link set nic{rail} txqueuelen {_QUEUE_FRAMES}" for rail in range(self.network.rails)]
            ip(name, queue + self._routes(node))

    def describe(self) -> str:
        network = self.network
        return (
            f"leaf and spine switches with {network.buffer_bytes >> 10} KiB of shared buffer, pause at"
            f" {network.xoff_bytes >> 10} KiB an ingress, resume at {network.xon_bytes >> 10} KiB"
        )

    @property
    def pids(self) -> list[int]:
        return [self._process.pid]

    def check(self) -> None:
        if (code := self._process.poll()) is not None:
            raise RuntimeError(f"the switch ended with {code}")

    def reset(self, node_pids: Sequence[int]) -> None:
        self._pids = list(node_pids)
        self._dropped_before = self._device_drops()
        self._ask("reset")

    def read(self) -> Reading:
        counted = self._ask("dump")
        bucket_s = counted["bucket_ns"] / 1e9
        of_kind: dict[str, dict[tuple[int, int], dict[str, Any]]] = {"nic": {}, "port": {}, "up": {}, "down": {}}
        for link in counted["links"]:
            of_kind[link["kind"]][link["node"], link["rail"]] = link
        full = self.network.line_bytes_per_second * bucket_s

        def shares(kind: str) -> dict[tuple[int, int], Series]:
            return {at: [count / full for count in link["series_bytes"]] for at, link in of_kind[kind].items()}

        inner = [*of_kind["up"].values(), *of_kind["down"].values()]
        return Reading(
            begin_ns=counted["begin_ns"],
            bucket_s=bucket_s,
            drops=counted["drops"] + self._device_drops() - self._dropped_before,
            sent=shares("nic"),
            received=shares("port"),
            pauses=Pauses(
                nics_ms=sum(link["pause_ns"] for link in of_kind["nic"].values()) / 1e6,
                inside_ms=sum(link["pause_ns"] for link in inner) / 1e6,
                port_bytes_max=max(link["queue_max_bytes"] for link in of_kind["port"].values()),
                late_max_ms=counted["late_max_ns"] / 1e6,
                of_nics={
                    at: [ns / counted["bucket_ns"] for ns in link["series_pause_ns"]]
                    for at, link in of_kind["nic"].items()
                },
            ),
        )

    def _device_drops(self) -> int:
        """Frames that the nodes' TUN devices had no room for."""
        return sum(
            dropped
            for pid in self._pids
            for name, (_, _, dropped) in device_counters(pid).items()
            if name.startswith("nic")
        )

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # _answer() says that it has ended
            self._process.stdin.write(f"{command}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """Answers are one line, and there is one at a time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _LIMIT_S)[0]:
            raise RuntimeError(f"the switch (pid {self._process.pid}) has not answered for {_LIMIT_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the switch ended with {self._process.wait(_LIMIT_S)}; it says why above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(_LIMIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Lossy(Fabric):
    """Bridges: a leaf for each rail, a spine that joins them, token buckets at the NICs and at the leaves' egresses,
    whose queues are shallow."""

    kind = "lossy"

    def _build(self) -> None:
        network, rate = self.network, f"{self.network.bits_per_second}bit"
        burst = _BURST_FRAMES * MTU_BYTES
        bridges = ["link add spine type bridge", f"link set spine mtu {MTU_BYTES} up"]
        for rail in range(network.rails):
            bridges += [
                f"link add leaf{rail} type bridge",
                f"link set leaf{rail} mtu {MTU_BYTES} up",
                f"link add up{rail} type veth peer name down{rail}",
                f"link set up{rail} mtu {MTU_BYTES} master leaf{rail} up",
                f"link set down{rail} mtu {MTU_BYTES} master spine up",
            ]
        ip(self.middle, bridges)
        cut = f"mtu {MTU_BYTES} gso_max_size {MTU_BYTES + ETHERNET_BYTES} gso_max_segs 1"
        for node, name in enumerate(self.nodes):
            for rail in range(network.rails):
                port = f"p{node}x{rail}"
                ip(
                    self.middle,
                    [
                        f"link add {port} type veth peer name nic{rail} netns {name}",
                        f"link set {port} {cut} master leaf{rail} up",
                    ],
                )
                ip(name, [f"link set nic{rail} address {_mac(node, rail)} {cut}"])
                shape = f"root tbf rate {rate} burst {burst}"
                _run(["tc", "-n", name, *f"qdisc add dev nic{rail} {shape} limit {_LOSSY_NIC_BYTES}".split()])
                _run(["tc", "-n", self.middle, *f"qdisc add dev {port} {shape} limit {network.port_bytes}".split()])
            ip(name, self._routes(node) + self._neighbours(node))
        self._sampler: _Sampler | None = None
        self._stack.callback(self._stop)

    def describe(self) -> str:
        return f"bridges with queues of {self.network.port_bytes >> 10} KiB an egress"

    def reset(self, node_pids: Sequence[int]) -> None:
        self._stop()
        self._before = self._drops()
        self._sampler = _Sampler(self.network, node_pids)
        self._sampler.start()

    def read(self) -> Reading:
        assert self._sampler is not None
        self._sampler.stop()
        sent, received = self._sampler.shares()
        return Reading(
            begin_ns=self._sampler.begin_ns,
            bucket_s=_SAMPLE_S,
            drops=self._drops() - self._before,
            sent=sent,
            received=received,
            pauses=None,
        )

    def _neighbours(self, own: int) -> list[str]:
        return [
            f"neighbour add {self.network.address(node, rail)} lladdr {_mac(node, rail)} dev nic{through} nud permanent"
            for node, rail in self.network.ports
            for through in range(self.network.rails)
            if node != own
        ]

    def _drops(self) -> int:
        total = 0
        for name in (self.middle, *self.nodes):
            for qdisc in json.loads(_run(["tc", "-n", name, "-s", "-j", "qdisc"])):
                total += qdisc.get("drops", 0)
        return total

    def _stop(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()


class _Sampler(threading.Thread):
    """Reads the byte counters of the nodes' NICs at equal distances."""

    def __init__(self, network: Network, node_pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._network = network
        self._pids = list(node_pids)
        self._ended = threading.Event()
        self.begin_ns = time.monotonic_ns()
        self._samples: list[dict[tuple[int, int], tuple[int, int]]] = [self._look()]

    def run(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a run that is given up ends its nodes first
            while not self._ended.wait(max(0.0, self._next_s() - time.monotonic())):
                self._samples.append(self._look())

    def _next_s(self) -> float:
        return self.begin_ns / 1e9 + len(self._samples) * _SAMPLE_S

    def stop(self) -> None:
        self._ended.set()
        if self.is_alive():
            self.join()

    def shares(self) -> tuple[dict[tuple[int, int], Series], dict[tuple[int, int], Series]]:
        full = self._network.line_bytes_per_second * _SAMPLE_S
        found: list[dict[tuple[int, int], Series]] = []
        for way in range(2):
            counts = {at: [sample[at][way] for sample in self._samples] for at in self._network.ports}
            found.append({at: [(b - a) / full for a, b in itertools.pairwise(count)] for at, count in counts.items()})
        return found[0], found[1]

    def _look(self) -> dict[tuple[int, int], tuple[int, int]]:
        found = {}
        for node, pid in enumerate(self._pids):
            for name, (received, sent, _) in device_counters(pid).items():
                if name.startswith("nic"):
                    found[node, int(name.removeprefix("nic"))] = (sent, received)
        return found


KINDS: Final[Mapping[str, type[Fabric]]] = {kind.kind: kind for kind in (Lossless, Lossy)}


def device_counters(pid: int) -> dict[str, tuple[int, int, int]]:
    """(bytes received, bytes sent, frames not sent) of each interface in the namespace of a process."""
    found = {}
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = [int(number) for number in numbers.split()]
        found[name.strip()] = (fields[0], fields[8], fields[11])
    return found


def retransmits(pid: int) -> int:
    """TCP segments sent again in the namespace of a process."""
    names, values = (
        line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def scratch() -> tempfile.TemporaryDirectory[str]:
    """For files of this run."""
    return tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-")


def remove_stale() -> None:
    """Namespaces and files of runs that were killed: their lock is free."""
    temporary = Path(tempfile.gettempdir())
    left = [path.name for place in (_NAMES, _lock_path(0).parent, temporary) for path in place.glob(f"{PREFIX}[0-9]*")]
    for owner in {int(found[1]) for name in left if (found := re.match(rf"{PREFIX}(\d+)[-.]", name))}:
        if owner == os.getpid() or _held(owner):
            continue
        for path in _NAMES.glob(f"{PREFIX}{owner}-*"):
            subprocess.run(["ip", "netns", "delete", path.name], capture_output=True, timeout=_LIMIT_S, check=False)
        for path in temporary.glob(f"{PREFIX}{owner}-*"):
            shutil.rmtree(path, ignore_errors=True)
        _lock_path(owner).unlink(missing_ok=True)


def ip(namespace: str, lines: Sequence[str]) -> None:
    _run(["ip", "-n", namespace, "-batch", "-"], "\n".join(lines) + "\n")


def enter(namespace: str) -> None:
    """Moves this thread, and threads that it starts, into a network namespace."""
    fd = os.open(_NAMES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")
    finally:
        os.close(fd)


def sysctl(namespace: str, values: Mapping[str, object]) -> None:
    def write() -> None:
        enter(namespace)
        for name, value in values.items():
            Path("/proc/sys", *name.split(".")).write_text(str(value))

    with ThreadPoolExecutor(1) as thread:
        thread.submit(write).result()


def _lock_path(pid: int) -> Path:
    return Path(f"/run/{PREFIX}{pid}.lock")


def _held(pid: int) -> bool:
    try:
        with open(_lock_path(pid), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _mac(node: int, rail: int) -> str:
    return f"02:00:00:00:{rail:02x}:{node + 1:02x}"


def _run(command: Sequence[str], text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
