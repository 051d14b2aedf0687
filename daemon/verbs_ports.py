"""RDMA ports as this machine has them: state, MTU, link layer and GID table, asked of pyverbs or read from sysfs; and
the network interface and the place in PCI of each. Functions take the folder that holds sys/ and proc/."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon.pci import ROOT, Place, place, text
from railrelay.daemon.pyverbs_loader import Pyverbs

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

IB: Final = "IB"
ROCE_V1: Final = "RoCE v1"
ROCE_V2: Final = "RoCE v2"
ETHERNET: Final = "Ethernet"
INFINIBAND: Final = "InfiniBand"
ACTIVE: Final = "ACTIVE"

_SYSFS_KINDS: Final = {"IB/RoCE v1": ROCE_V1, "RoCE v2": ROCE_V2}
_VERBS_KINDS: Final = (IB, ROCE_V1, ROCE_V2)  # by enum ibv_gid_type
_LEAST_MTU: Final = 256  # of enum ibv_mtu's 1
_NO_GATEWAY: Final = "00000000"


@dataclass(frozen=True)
class Gid:
    index: int
    kind: str
    raw: bytes
    netdev: str

    @property
    def address(self) -> Address:
        whole = ipaddress.IPv6Address(self.raw)
        return whole.ipv4_mapped or whole

    @property
    def routable(self) -> bool:
        return not (self.address.is_link_local or self.address.is_unspecified)

    def text(self) -> str:
        return f"{self.index}: {self.kind} {self.address}"


@dataclass(frozen=True)
class Port:
    """``active_mtu`` is 0 if only sysfs was asked, ``netdev`` "" where there is no network interface."""

    device: str
    number: int
    state: str
    link_layer: str
    lid: int
    active_mtu: int
    speed_gbit: float
    gids: tuple[Gid, ...]
    place: Place | None
    netdev: str
    interface_mtu: int

    @property
    def name(self) -> str:
        return f"{self.device} port {self.number}"

    @property
    def active(self) -> bool:
        return self.state == ACTIVE

    @property
    def order(self) -> tuple[object, ...]:
        """NIC order: by PCI address, what has none last; then by name with its numbers as numbers."""
        return (self.place is None, self.place.order if self.place else (), natural(self.device), self.number)


def natural(name: str) -> tuple[tuple[bool, int, str], ...]:
    parts = re.findall(r"\d+|\D+", name)
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)


def devices(root: Path = ROOT) -> list[str]:
    """Names in natural order."""
    return sorted((folder.name for folder in (root / "sys/class/infiniband").glob("*")), key=natural)


def of_sysfs(root: Path = ROOT) -> list[Port]:
    """All ports in NIC order, as the kernel's files describe them: without the active MTU."""
    found = [
        port_of_sysfs(device, int(folder.name), root)
        for device in devices(root)
        for folder in (root / "sys/class/infiniband" / device / "ports").glob("[0-9]*")
    ]
    return sorted(found, key=lambda port: port.order)


def port_of_sysfs(device: str, number: int, root: Path = ROOT) -> Port:
    folder = root / "sys/class/infiniband" / device / "ports" / str(number)
    _, _, state = text(folder / "state").partition(": ")
    gids = []
    for entry in (folder / "gids").glob("[0-9]*"):
        raw, index = text(entry), entry.name
        if not raw or not any(packed := ipaddress.IPv6Address(raw).packed):
            continue
        kind = _SYSFS_KINDS.get(text(folder / "gid_attrs/types" / index), IB)
        gids.append(Gid(int(index), kind, packed, text(folder / "gid_attrs/ndevs" / index)))
    layer = text(folder / "link_layer") or ETHERNET
    if layer == INFINIBAND:
        gids = [Gid(gid.index, IB, gid.raw, gid.netdev) for gid in gids]
    lid = int(text(folder / "lid") or "0", 0)
    return _port(root, device, number, state or "unknown", layer, lid, 0, gids)


def interface_of_port(device: str, number: int, root: Path = ROOT) -> str:
    """Without a look at the whole GID table, which may be long. "" if it has none."""
    folder = root / "sys/class/infiniband" / device
    return text(folder / "ports" / str(number) / "gid_attrs/ndevs/0") or text(folder / "parent")


def of_pyverbs(pyverbs: Pyverbs, names: Iterable[str], root: Path = ROOT) -> list[Port]:
    """All ports of these devices in NIC order. RelayError: a device may not be opened."""
    found = [port for name in names for port in _ports_of(pyverbs, name, root)]
    return sorted(found, key=lambda port: port.order)


def names_of_pyverbs(pyverbs: Pyverbs) -> list[str]:
    """Devices that libibverbs knows; those without a provider library are missing."""
    try:
        listed = pyverbs.device.get_device_list()
    except Exception as failure:  # noqa: BLE001 - its errors have moved between versions, and share no useful base
        text = f"libibverbs lists no devices ({failure}); load the NIC's kernel modules (ib_uverbs)"
        raise RelayError(ErrorCode.NOT_SUPPORTED, text) from None
    return sorted((device.name.decode() for device in listed), key=natural)


def _ports_of(pyverbs: Pyverbs, name: str, root: Path) -> list[Port]:
    try:
        with pyverbs.device.Context(name=name) as context:
            count = context.query_device().phys_port_cnt
            attributes = [context.query_port(number) for number in range(1, count + 1)]
            most = sum(attribute.gid_tbl_len for attribute in attributes)
            entries = context.query_gid_table(most)
    except Exception as failure:  # noqa: BLE001 - see above
        raise RelayError(
            ErrorCode.DENIED,
            f"RDMA device {name} cannot be asked ({failure}); check that this user may open /dev/infiniband/uverbs*,"
            " and that the provider library of the NIC (ibverbs-providers) is installed",
        ) from None
    return [
        _port(
            root,
            name,
            number,
            _state(pyverbs.enums, attribute.state),
            INFINIBAND if attribute.link_layer == pyverbs.enums.IBV_LINK_LAYER_INFINIBAND else ETHERNET,
            attribute.lid,
            _LEAST_MTU << (attribute.active_mtu - 1),
            [_gid(entry) for entry in entries if entry.port_num == number],
        )
        for number, attribute in enumerate(attributes, 1)
    ]


def _gid(entry: Any) -> Gid:  # noqa: ANN401 - pyverbs has no types
    netdev = ""
    with contextlib.suppress(OSError):  # it went away, or is in another network namespace
        netdev = socket.if_indextoname(entry.ndev_ifindex) if entry.ndev_ifindex else ""
    raw = ipaddress.IPv6Address(entry.gid_str()).packed
    return Gid(entry.gid_index, _VERBS_KINDS[entry.gid_type], raw, netdev)


def _state(enums: Any, state: int) -> str:  # noqa: ANN401
    for name in ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"):
        if getattr(enums, f"IBV_PORT_{name}") == state:
            return name
    return str(state)


def _port(
    root: Path, device: str, number: int, state: str, layer: str, lid: int, active_mtu: int, gids: Iterable[Gid]
) -> Port:
    entries = tuple(sorted(gids, key=lambda gid: gid.index))
    folder = root / "sys/class/infiniband" / device
    netdev = next((gid.netdev for gid in entries if gid.netdev), "") or text(folder / "parent")
    speed = re.match(r"[\d.]+", text(folder / "ports" / str(number) / "rate"))
    return Port(
        device,
        number,
        state,
        layer,
        lid,
        active_mtu,
        float(speed[0]) if speed else 0.0,
        entries,
        place_of(device, root),
        netdev,
        interface_mtu(netdev, root),
    )


def place_of(device: str, root: Path = ROOT) -> Place | None:
    """Soft-RoCE sits where the interface does that it was made over, if that is a PCI device."""
    folder = root / "sys/class/infiniband" / device
    parent = text(folder / "parent")
    return place(folder / "device", root) or (place_of_interface(parent, root) if parent else None)


# ---- network interfaces ----


def place_of_interface(netdev: str, root: Path = ROOT) -> Place | None:
    return place(root / "sys/class/net" / netdev / "device", root)


def interface_mtu(netdev: str, root: Path = ROOT) -> int:
    """0 if there is no such interface."""
    return int(text(root / "sys/class/net" / netdev / "mtu") or 0) if netdev else 0


def carried_mtu(mtu: int) -> int:
    """The largest RDMA MTU whose packets an interface of this MTU carries, by the kernel's rule for RoCE."""
    room = mtu - (40 + 8 + 12 + 4 + 28 + 4)  # IPv6, UDP, transport header, XRC and atomic extensions, checksum
    return max((size for size in (256, 512, 1024, 2048, 4096) if size <= room), default=0)


def subnets(netdev: str, root: Path = ROOT) -> list[Network]:
    """What the interface's own routes reach without a gateway."""
    found: list[Network] = []
    for line in text(root / "proc/net/route").splitlines()[1:]:
        name, destination, gateway, _, _, _, _, mask, *_ = line.split()
        if name == netdev and gateway == _NO_GATEWAY and mask != _NO_GATEWAY:
            found.append(ipaddress.ip_network(f"{_native(destination)}/{_native(mask)}"))
    for line in text(root / "proc/net/if_inet6").splitlines():
        raw, _, prefix, _, _, name = line.split()
        if name == netdev:
            found.append(ipaddress.ip_network((bytes.fromhex(raw), int(prefix, 16)), strict=False))
    return found


def subnet_of(address: Address, netdev: str, root: Path = ROOT) -> Network | None:
    """The narrowest of the interface's subnets that has the address."""
    within = [subnet for subnet in subnets(netdev, root) if address in subnet]
    return max(within, key=lambda subnet: subnet.prefixlen, default=None)


def interface_of(address: Address, root: Path = ROOT) -> str:
    """The interface on whose subnet the address is; "" if none, or if several are."""
    names = [folder.name for folder in (root / "sys/class/net").glob("*") if subnet_of(address, folder.name, root)]
    return names[0] if len(names) == 1 else ""


def _native(word: str) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(struct.pack("=I", int(word, 16)))
