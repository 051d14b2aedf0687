"""PCI as sysfs shows it: where a device sits, how far two are apart, the bridges above one, and the node's GPUs.

Every function takes the folder that holds sys/ and proc/, which tests make up."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import total_ordering
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_HOST_BRIDGE: Final = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_NVIDIA: Final = "0x10de"
_GPU_CLASSES: Final = ("0x0300", "0x0302")  # VGA controller, 3D controller
_OPEN_TO_ALL: Final = 64  # of configuration space; only root reads the rest
_EXTENDED: Final = 0x100
_ACS: Final = 0x000D
_ACS_CONTROL: Final = 6
_ACS_REDIRECT: Final = 0b1100  # P2P request and P2P completion redirect

LEVELS: Final = ("PIX", "PXB", "PHB", "NODE", "SYS")
LEVEL_TEXT: Final = {
    "PIX": "behind the same PCIe switch",
    "PXB": "under the same root port, over several switches",
    "PHB": "under the same host bridge",
    "NODE": "on the same NUMA node",
    "SYS": "across NUMA nodes",
}


@dataclass(frozen=True)
class Place:
    """Where a PCI device sits. ``path``: host bridge, root port, bridges, the device. ``numa`` is -1 if unknown."""

    address: str
    path: tuple[str, ...]
    numa: int

    @property
    def order(self) -> tuple[int, ...]:
        return order_of(self.address)


@total_ordering
@dataclass(frozen=True)
class Distance:
    """Between two devices, named as `nvidia-smi topo` does; of equal names the one with fewer ``hops`` is nearer."""

    name: str
    hops: int

    def __lt__(self, other: Distance) -> bool:
        return (LEVELS.index(self.name), self.hops) < (LEVELS.index(other.name), other.hops)


@dataclass(frozen=True)
class Gpu:
    """``uuid`` is "" where the driver is not loaded, or has not this GPU."""

    index: int
    place: Place
    uuid: str


def text(path: Path) -> str:
    """A file of sysfs or procfs without its last newline; "" if it is not there or may not be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def order_of(address: str) -> tuple[int, ...]:
    match = _ADDRESS.fullmatch(address)
    return tuple(int(part, 16) for part in match.groups()) if match else ()


def place(device: Path, root: Path = ROOT) -> Place | None:
    """Of the PCI device that this folder of sysfs is or belongs to; None for what has none, such as soft-RoCE."""
    if not device.exists():
        return None
    parts = Path(os.path.realpath(device)).parts
    path = [part for part in parts if _HOST_BRIDGE.fullmatch(part) or _ADDRESS.fullmatch(part)]
    if not path or not _ADDRESS.fullmatch(path[-1]):
        return None
    folder = root / "sys/bus/pci/devices" / path[-1]
    return Place(path[-1], tuple(path), _numa(folder, root))


def _numa(folder: Path, root: Path) -> int:
    node = int(text(folder / "numa_node") or -1)
    return 0 if node < 0 and numa_nodes(root) == 1 else node


def numa_nodes(root: Path = ROOT) -> int:
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def distance(one: Place, other: Place) -> Distance:
    """By the length of the path that both have in common."""
    common = 0
    for left, right in zip(one.path, other.path, strict=False):
        if left != right:
            break
        common += 1
    below = (len(one.path) - common, len(other.path) - common)
    hops = sum(below)
    if common == 0:
        return Distance("NODE" if one.numa == other.numa >= 0 else "SYS", hops)
    if common == 1:
        return Distance("PHB", hops)
    # below a switch's upstream port: its downstream port, then the device
    return Distance("PIX" if max(below) <= 2 else "PXB", hops)


def gpus(root: Path = ROOT) -> list[Gpu]:
    """NVIDIA GPUs in the order of their PCI addresses. Where the driver is loaded, those that it shows (a container
    sees all in sysfs, but may use only these)."""
    found = []
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if text(device / "vendor") != _NVIDIA or not text(device / "class").startswith(_GPU_CLASSES):
            continue
        at = place(device, root)
        if at is not None:
            found.append((at, _uuid(at.address, root)))
    known = [gpu for gpu in found if gpu[1]]
    ordered = sorted(known or found, key=lambda gpu: gpu[0].order)
    return [Gpu(index, at, uuid) for index, (at, uuid) in enumerate(ordered)]


def _uuid(address: str, root: Path) -> str:
    about = text(root / "proc/driver/nvidia/gpus" / address / "information")
    match = re.search(r"GPU UUID:\s*(GPU-[0-9a-f-]+)", about)
    return match[1] if match else ""


def bridges(of: Place, root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """(address, folder) of the root port and the switch ports above a device."""
    for address in of.path[:-1]:
        if _ADDRESS.fullmatch(address):
            yield address, root / "sys/bus/pci/devices" / address


def acs_redirects(bridge: Path) -> bool | None:
    """Whether a port sends traffic between its devices up to the root complex. None if that may not be read."""
    try:
        config = (bridge / "config").read_bytes()
    except OSError:
        return None
    if len(config) <= _OPEN_TO_ALL:
        return None
    if len(config) <= _EXTENDED:
        return False  # not PCI Express
    at = _EXTENDED
    for _ in range((len(config) - _EXTENDED) // 8):  # a damaged list cannot be longer
        header = int.from_bytes(config[at : at + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return False
        if header & 0xFFFF == _ACS:
            return bool(config[at + _ACS_CONTROL] & _ACS_REDIRECT)
        at = header >> 20
        if at < _EXTENDED:
            return False
    return False
