"""The checks of `railrelay doctor`, one function each. None changes anything; what only root can see says so.

A check that has nothing to look at, such as the GID of a node without RDMA rails, is OK and says why."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from railrelay.client import cuda, protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import addresses, dial, pyverbs_loader, tls, topology, verbs_ports
from railrelay.daemon.authentication import Secrets
from railrelay.daemon.config import Config, ConfigError, Rail, Security
from railrelay.daemon.discovery import VerbsPort
from railrelay.daemon.link import Link
from railrelay.daemon.memory import client_areas
from railrelay.daemon.pci import ROOT, Gpu, Place, acs_redirects, bridges, gpus, text
from railrelay.daemon.verbs_ports import ETHERNET, Port

OK: Final = "ok"
WARN: Final = "warn"
FAIL: Final = "fail"

_MIB: Final = 1 << 20
_BEST_MTU: Final = 4096
_CAP_IPC_LOCK: Final = 14
_CLOCK_READS: Final = 2000
_PEER_S: Final = 5.0
_UNLIMITED: Final = "unlimited"
_NO_RDMA: Final = "not needed: no RDMA rails"
_NO_START: Final = 'railrelayd does not start before that is mended, or the rail has memory = "host"'


@dataclass(frozen=True)
class Finding:
    """``todo`` is what to do about it; ``root``: more could be seen, or it can only be done, by root."""

    result: str
    seen: str
    todo: str = ""
    root: bool = False


@dataclass
class Node:
    """What the checks look at. ``pid`` of the running daemon, 0 without one; ``peer``: session of another node's."""

    config: Config
    pid: int = 0
    root: Path = ROOT
    peer: str = ""

    @cached_property
    def found(self) -> tuple[list[Port], str]:
        return topology.read_ports(self.root)

    @cached_property
    def chosen(self) -> tuple[list[VerbsPort | None], str]:
        return topology.chosen(self.config, *self.found, self.root)

    @cached_property
    def gpus(self) -> list[Gpu]:
        return gpus(self.root)

    @property
    def verbs_rails(self) -> list[tuple[int, Rail]]:
        return [(index, rail) for index, rail in enumerate(self.config.rail) if rail.nic == "verbs"]

    @property
    def ports(self) -> list[tuple[int, Port]]:
        """Of the rails whose port is known."""
        return [(index, one.port) for index, one in enumerate(self.chosen[0]) if one is not None and one.port]

    @property
    def places(self) -> list[Place]:
        nics = [port.place for _, port in self.ports if port.place is not None]
        return [*nics, *(gpu.place for gpu in self.gpus)] if nics else []

    @property
    def ranks(self) -> int:
        return len(self.gpus) or len(self.config.rail)

    @property
    def host_lane_bytes(self) -> int:
        """Of all lanes of all ranks that are in host memory."""
        rails = sum(rail.memory == "host" for rail in self.config.rail)
        return self.ranks * rails * self.config.relay.lane_bytes


def _mib(nbytes: int) -> str:
    return f"{nbytes / _MIB:.0f} MiB"


# ---- limits and memory ----


def memlock(node: Node) -> Finding:
    """Registered memory counts against it."""
    if not node.verbs_rails:
        return Finding(OK, _NO_RDMA)
    wanted = node.host_lane_bytes * len(node.verbs_rails)  # each rail's NIC locks it on its own account
    own, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limits = [("this process", -1 if own == resource.RLIM_INFINITY else own, "self")]
    if node.pid:
        limits.append((f"daemon pid {node.pid}", _memlock_of(node.root, node.pid), str(node.pid)))
    shown, worst = [], OK
    for who, limit, pid in limits:
        free = _has_capability(node.root, pid, _CAP_IPC_LOCK)
        shown.append(
            f"{who}: {_UNLIMITED if limit < 0 else _mib(limit)}{' (CAP_IPC_LOCK: not counted)' if free else ''}"
        )
        if limit >= 0 and not free and (who != "this process" or not node.pid):
            worst = FAIL if limit < wanted else WARN
    todo = (
        f"LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited` before railrelayd starts: all lanes take"
        f" {_mib(wanted)}, each once for each NIC, and what engines register is locked too"
    )
    return Finding(worst, "; ".join(shown), todo if worst != OK else "", root=worst != OK)


def _memlock_of(root: Path, pid: int) -> int:
    match = re.search(r"^Max locked memory +(\w+)", text(root / f"proc/{pid}/limits"), re.MULTILINE)
    return int(match[1]) if match and match[1].isdecimal() else -1


def _has_capability(root: Path, pid: str, number: int) -> bool:
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", text(root / f"proc/{pid}/status"), re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> number & 1)


def shared_memory(node: Node) -> Finding:
    """Lanes in host memory, bounce memory and the segments lie there."""
    folder = node.root / "dev/shm"
    space = os.statvfs(folder)
    size, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    segment = sum(plan.stride * plan.elements for plan in client_areas(node.config))
    wanted = node.host_lane_bytes + node.ranks * segment
    bounces = node.ranks * len(node.config.rail) * node.config.relay.bounce_bytes
    seen = (
        f"{_mib(size)}, {_mib(free)} free; {node.ranks} ranks with all lanes take {_mib(wanted)}, {_mib(bounces)} more"
        " if all receive into private memory"
    )
    todo = "mount -o remount,size=... /dev/shm (docker: --shm-size), or fewer or smaller relay.slots"
    if free < segment + node.config.relay.lane_bytes:
        return Finding(FAIL, f"{seen}; not even one client with one lane fits", todo, root=True)
    return Finding(WARN, seen, todo, root=True) if size < wanted else Finding(OK, seen)


def huge_pages(node: Node) -> Finding:
    """How many entries of the NIC's translation table the lanes take."""
    match = re.search(r"^HugePages_Total:\s*(\d+)", text(node.root / "proc/meminfo"), re.MULTILINE)
    reserved = match[1] if match else "0"
    setting = re.search(r"\[(\w+)\]", text(node.root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"))
    mount = re.search(r"^\S+ /dev/shm \S+ (\S+)", text(node.root / "proc/mounts"), re.MULTILINE)
    huge = re.search(r"\bhuge=(\w+)", mount[1]) if mount else None
    shm, memfd = huge[1] if huge else "never", setting[1] if setting else "never"
    seen = f"/dev/shm huge={shm}, shmem_enabled={memfd}, {reserved} reserved ones (none is used)"
    if not any(rail.memory == "host" for _, rail in node.verbs_rails):
        return Finding(OK, seen)
    if shm == "never" or memfd in ("never", "deny"):
        pages = node.config.relay.lane_bytes >> 12
        todo = (
            f"`mount -o remount,huge=within_size /dev/shm` and `echo advise >/sys/kernel/mm/transparent_hugepage/"
            f"shmem_enabled` save table entries of the NIC: a lane in 4 KiB pages takes {pages}"
        )
        return Finding(WARN, seen, todo, root=True)
    return Finding(OK, seen)


# ---- ports ----


def own_addresses(node: Node) -> Finding:
    """Of the rails and of the control port, as the daemon would listen on them."""
    wrong = addresses.foreign(node.config, node.root)
    if wrong:
        return Finding(FAIL, "; ".join(wrong), "railrelayd does not start before that is mended")
    if unreachable := addresses.unreachable(node.config, node.root):
        return Finding(WARN, unreachable, "set node.host, unless all peers are daemons of this machine")
    named = [rail.address for rail in node.config.rail if rail.nic == "tcp"]
    return Finding(OK, f"this machine has {', '.join(dict.fromkeys([node.config.node.host, *named]))}")


def devices(node: Node) -> Finding:
    """The device files of RDMA."""
    if not node.verbs_rails:
        return Finding(OK, _NO_RDMA)
    files = sorted((node.root / "dev/infiniband").glob("uverbs*"))
    if not files:
        return Finding(
            FAIL,
            "no /dev/infiniband/uverbs*",
            "load ib_uverbs and the NIC's module; in a container pass the device files in",
        )
    denied = [path.name for path in files if not os.access(path, os.R_OK | os.W_OK)]
    if denied:
        return Finding(
            FAIL, f"may not open {', '.join(denied)}", "give this user access (group rdma, or a udev rule)", root=True
        )
    return Finding(OK, f"{len(files)} device files may be opened")


def port_state(node: Node) -> Finding:
    """Of the ports that the rails use."""
    if not node.verbs_rails:
        return Finding(OK, _NO_RDMA)
    shown = ", ".join(f"rail {index}: {port.name} {port.state}" for index, port in node.ports)
    down = [port for _, port in node.ports if not port.active]
    if down:
        which = ", ".join(port.netdev or port.device for port in down)
        return Finding(
            FAIL,
            shown,
            f"check cable and switch of {which}; `ip link set {down[0].netdev or 'INTERFACE'} up`",
            root=True,
        )
    if len(node.ports) < len(node.verbs_rails):
        return Finding(FAIL, shown or "no rail has a port", "see gid")
    return Finding(OK, shown)


def gid(node: Node) -> Finding:
    """Of each RDMA rail, as the daemon would choose it."""
    if not node.verbs_rails:
        return Finding(OK, _NO_RDMA)
    ports, wrong = node.chosen
    if wrong:
        return Finding(FAIL, wrong, "`railrelay topo` shows what there is; name device and gid_index of the rail")
    shown = [
        f"rail {index}: {one.device} {one.gid_index}: {one.address} ({one.why_gid})"
        for index, one in enumerate(ports)
        if one is not None
    ]
    return Finding(OK, ", ".join(shown))


def mtu(node: Node) -> Finding:
    """Of the RDMA port, and of the interface that it is on."""
    if not node.verbs_rails:
        return Finding(OK, _NO_RDMA)
    shown, small, larger = [], [], []
    for index, port in node.ports:
        carried = verbs_ports.carried_mtu(port.interface_mtu) if port.link_layer == ETHERNET else port.active_mtu
        active = port.active_mtu or carried
        on = f" on {port.netdev} {port.interface_mtu}" if port.netdev else ""
        shown.append(f"rail {index}: {port.active_mtu or 'unknown'}{on}")
        if port.link_layer == ETHERNET and port.interface_mtu and active > carried:
            larger.append(port.netdev)
        elif active < _BEST_MTU:
            small.append(port.netdev or port.device)
    seen = ", ".join(shown) or "no rail has a port"
    if larger:
        return Finding(
            FAIL, seen, f"the RDMA MTU is more than {larger[0]} carries: raise the interface's MTU", root=True
        )
    if small:
        todo = (
            f"`ip link set {small[0]} mtu 9000` at both ends and in the switch, for RDMA packets of {_BEST_MTU} bytes"
        )
        return Finding(WARN, seen, todo, root=True)
    return Finding(OK, seen)


def security(node: Node) -> Finding:
    """Who may connect to the ports of the daemon."""
    chosen, todo = node.config.security, "set security.secret_files on all nodes: `openssl rand -hex 32`, mode 0600"
    try:
        Secrets(chosen).read()
        tls.accepting_context(chosen)
    except ConfigError as failure:
        return Finding(FAIL, str(failure), "the daemon refuses all peers until that is mended")
    if chosen.authenticates:
        ends = tls.ends(chosen)
        seen = f"peers authenticate by {'; '.join([chosen.ways, *map(str, ends)])}"
        late = [end for end in ends if end.soon]
        if late:
            return Finding(FAIL if any(end.expired for end in late) else WARN, seen, late[0].todo)
        return Finding(OK, seen)
    if chosen.allow_unauthenticated:
        return Finding(WARN, "no secret: whoever reaches the control port may connect (allow_unauthenticated)", todo)
    return Finding(OK, f"no secret: loopback addresses only; for other nodes {todo}")


def peer_mtu(node: Node) -> Finding:
    """Of the interface of each rail at both ends."""
    if not node.peer:
        return Finding(OK, "not asked: name a peer's daemon by --peer")
    try:
        looked = _looked(node.peer, node.config.security)
    except (OSError, ValueError, RelayError, ConfigError) as failure:
        todo = "check that railrelayd of the same version runs there and that its control port is reachable"
        number = failure.errno if isinstance(failure, OSError) else None
        seen = os.strerror(number) if number and number > 0 else failure  # asyncio has words of its own
        return Finding(FAIL, f"{node.peer}: {seen}", todo)
    ports = {index: one for index, one in enumerate(node.chosen[0]) if one is not None}
    own = dict(zip(map(node.config.identity, range(len(node.config.rail))), _own_mtus(node, ports), strict=True))
    theirs = {facts.identity: mtu for facts, mtu in zip(looked.rails, looked.mtus, strict=True)}
    both = [identity for identity in own if identity in theirs]
    shown = ", ".join(f"{identity} {own[identity] or '?'} here, {theirs[identity] or '?'} there" for identity in both)
    lacking = sorted(own.keys() ^ theirs.keys())
    if lacking:
        seen = f"{shown}{'; ' if shown else ''}only at one end: {', '.join(lacking)}"
        return Finding(WARN, seen, "give both ends of a rail the same identity")
    if any(own[identity] != theirs[identity] for identity in both):
        return Finding(
            WARN, shown, "one MTU at both ends and in the switches between, or packets are small or lost", root=True
        )
    return Finding(OK, shown)


def _own_mtus(node: Node, ports: dict[int, VerbsPort]) -> list[int]:
    return topology.interface_mtus(node.config, ports, node.root)


def _looked(session: str, security: Security) -> protocol.Looked:
    return asyncio.run(_look(session, security))


async def _look(session: str, security: Security) -> protocol.Looked:
    def ignore(code: ErrorCode, text: str, *, key: str = "") -> None:
        """What is wrong is raised as well."""

    link = await dial.connect(session, tls.connecting_context(security), lambda: Link(ignore), _PEER_S)
    try:
        _, looked = await dial.greet(
            link, Secrets(security), 0, lambda number: protocol.Look(number, []), protocol.Looked, _PEER_S
        )
    finally:
        link.close("has looked")
    if len(looked.rails) != len(looked.mtus):
        raise ValueError(f"tells {len(looked.mtus)} MTUs of {len(looked.rails)} rails")
    return looked


# ---- GPUs and PCIe ----


def cuda_driver(node: Node) -> Finding:
    """Needed as soon as GPU memory is registered or relay memory is on a GPU."""
    version = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text(node.root / "proc/driver/nvidia/version"))
    rails = [index for index, rail in enumerate(node.config.rail) if rail.memory == "device"]
    if not node.gpus and not rails:
        return Finding(OK, "not needed: no NVIDIA GPU")
    lack = cuda.missing()
    seen = f"{len(node.gpus)} GPUs, kernel module {version[1] if version else 'not loaded'}"
    if rails:
        try:
            on = [f"rail {index}: {node.config.gpu_of(index)}" for index in rails]
        except ConfigError as failure:
            return Finding(FAIL, f"{seen}; {failure}", _NO_START)
        return Finding(OK, f"{seen}; {', '.join(on)}")
    if version is None:
        return Finding(FAIL, seen, "install the NVIDIA driver and load its module", root=True)
    return (
        Finding(WARN, f"{seen}; {lack}", "engines with GPU memory need railrelay[cuda]") if lack else Finding(OK, seen)
    )


def dma_buf(node: Node) -> Finding:
    """How a NIC is given GPU memory."""
    if not node.gpus or not node.verbs_rails:
        return Finding(OK, "not needed: no GPU beside RDMA rails")
    kernel = _has_symbol(node.root, "ib_umem_dmabuf_get")
    try:
        exports = [cuda.exports_dmabuf(ordinal) for ordinal in range(cuda.count())]
        driver = "the driver exports it" if all(exports) else "the driver does not export it"
    except RelayError as failure:
        exports, driver = [], failure.text
    seen = f"kernel {'takes' if kernel else 'does not take'} it; {driver}"
    if kernel and exports and all(exports):
        return Finding(OK, seen)
    todo = "Linux 5.12 or newer with ib_core loaded, and the open NVIDIA kernel module (`modinfo nvidia`: Dual MIT)"
    return Finding(WARN if kernel and not exports else FAIL, seen, todo, root=True)


def _has_symbol(root: Path, name: str) -> bool:
    try:
        with (root / "proc/kallsyms").open() as symbols:
            return any(name in line for line in symbols)
    except OSError:
        return False


def peermem(node: Node) -> Finding:
    """The older way for GPU memory, which railrelay does not use."""
    loaded = (node.root / "sys/module/nvidia_peermem").exists()
    seen = f"nvidia_peermem is {'' if loaded else 'not '}loaded; not needed: GPU memory is registered by dma-buf"
    return Finding(OK, seen)


def acs(node: Node) -> Finding:
    """A port with redirect sends what a GPU and a NIC behind one switch exchange up to the CPU and back."""
    if not node.gpus or not node.places:
        return Finding(OK, "not needed: no GPU beside an RDMA NIC in PCI")
    ports = {address: folder for at in node.places for address, folder in bridges(at, node.root)}
    states = {address: acs_redirects(folder) for address, folder in sorted(ports.items())}
    redirecting = [address for address, state in states.items() if state]
    unknown = [address for address, state in states.items() if state is None]
    if redirecting:
        todo = (
            "turn ACS off in the firmware, or `setpci -s ADDRESS ECAP_ACS+6.w=0000` at each start (where no virtual"
            " machines are given devices)"
        )
        return Finding(WARN, f"redirects at {', '.join(redirecting)}", todo, root=True)
    if unknown:
        return Finding(WARN, f"unknown for {len(unknown)} of {len(states)} PCIe ports", "run doctor as root", root=True)
    return Finding(OK, f"no redirect at {len(states)} PCIe ports")


def iommu(node: Node) -> Finding:
    """Whether DMA of NICs and GPUs is translated."""
    if not node.places:
        return Finding(OK, "not needed: no RDMA NIC in PCI")
    folders = [node.root / "sys/bus/pci/devices" / at.address / "iommu_group/type" for at in node.places]
    kinds = sorted({text(folder) for folder in folders} - {""})
    if not kinds:
        return Finding(OK, "off")
    if all(kind == "identity" for kind in kinds):
        return Finding(OK, "passthrough")
    return Finding(WARN, f"translates ({', '.join(kinds)})", "boot with iommu=pt", root=True)


# ---- processor ----


def clock(node: Node) -> Finding:
    """The rails read it several times a slice."""
    source = text(node.root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    begin = time.perf_counter_ns()
    for _ in range(_CLOCK_READS):
        time.monotonic_ns()
    each_ns = (time.perf_counter_ns() - begin) // _CLOCK_READS
    seen = f"{source or 'unknown'}, {each_ns} ns a read from Python"
    if source in ("tsc", "arch_sys_counter", "kvm-clock"):
        return Finding(OK, seen)
    return Finding(WARN, seen, "boot with clocksource=tsc tsc=reliable if the machine's TSC is constant", root=True)


def frequency(node: Node) -> Finding:
    """Rail threads that have slept wake on a slow core."""
    folders = sorted((node.root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor"))
    governors = sorted({text(folder) for folder in folders} - {""})
    if not governors:
        return Finding(OK, "not controlled by this system")
    if governors == ["performance"]:
        return Finding(OK, "performance")
    return Finding(WARN, ", ".join(governors), "`cpupower frequency-set -g performance`", root=True)


def cores(node: Node) -> Finding:
    """A thread a rail, and the daemon's main thread."""
    usable, rails = len(os.sched_getaffinity(0)), len(node.config.rail)
    seen = f"{usable} usable cores for {rails} rail threads and the main thread"
    if usable > rails:
        return Finding(OK, seen)
    return Finding(WARN, f"{seen}; they sleep instead of spinning", "give railrelayd more cores, or fewer rails")


# ---- software ----


def libibverbs(node: Node) -> Finding:
    """The library that the rails call."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError as failure:
        if not node.verbs_rails:
            return Finding(OK, f"not installed; {_NO_RDMA}")
        return Finding(FAIL, str(failure), "install libibverbs1 and ibverbs-providers, or the NIC vendor's")
    return Finding(OK, pyverbs_loader.library_version() or "version unknown")


def pyverbs(node: Node) -> Finding:
    """What discovery asks."""
    rails = node.verbs_rails
    try:
        loaded = pyverbs_loader.load()
    except RelayError as failure:
        if not rails:
            return Finding(OK, f"not installed for this interpreter; {_NO_RDMA}")
        needed = any(not rail.device or rail.gid_index < 0 for _, rail in rails)
        return Finding(FAIL if needed else WARN, failure.text, f"install {pyverbs_loader.PACKAGE}")
    return Finding(OK, f"{loaded.folder}")


CHECKS: Final[tuple[tuple[str, Callable[[Node], Finding]], ...]] = (
    ("memlock", memlock),
    ("shared memory", shared_memory),
    ("huge pages", huge_pages),
    ("libibverbs", libibverbs),
    ("pyverbs", pyverbs),
    ("addresses", own_addresses),
    ("device files", devices),
    ("gid", gid),
    ("port state", port_state),
    ("mtu", mtu),
    ("security", security),
    ("mtu of the peer", peer_mtu),
    ("cuda driver", cuda_driver),
    ("dma-buf", dma_buf),
    ("peermem", peermem),
    ("acs", acs),
    ("iommu", iommu),
    ("clock", clock),
    ("frequency", frequency),
    ("cores", cores),
)


def run(node: Node, checks: tuple[tuple[str, Callable[[Node], Finding]], ...] = CHECKS) -> Iterator[dict[str, object]]:
    """A row a check, with the time that it took. One that breaks is a failed one; the others go on."""
    for name, check in checks:
        begin = time.perf_counter_ns()
        try:
            finding = check(node)
        except (OSError, ValueError, RelayError) as failure:
            finding = Finding(FAIL, f"the check itself failed: {type(failure).__name__}: {failure}", "report this")
        elapsed = time.perf_counter_ns() - begin
        yield {"check": name, **vars(finding), "ns": elapsed}
