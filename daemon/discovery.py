"""Which RDMA port each rail uses, with which GID, and which rail each GPU is nearest to: what the configuration leaves
open is found, what it names is taken.

A rail without a device takes the port that has its address; without an address, the next ACTIVE port in NIC order (by
PCI address). A GID is found by its type (RoCE v2), by being routable, and by being on the rail's subnet."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from railrelay.client.errors import RelayError
from railrelay.daemon import pyverbs_loader, verbs_ports
from railrelay.daemon.config import ConfigError
from railrelay.daemon.pci import LEVEL_TEXT, ROOT, Distance, Gpu, Place, distance, gpus
from railrelay.daemon.verbs_ports import IB, INFINIBAND, ROCE_V1, ROCE_V2, Address, Gid, Network, Port

_UNKNOWN_GID: Final = bytes(16)


class Wanted(Protocol):
    """What a rail's configuration may name: device "", gid_index -1 and address "" are to be found."""

    @property
    def device(self) -> str: ...
    @property
    def port_number(self) -> int: ...
    @property
    def gid_index(self) -> int: ...
    @property
    def address(self) -> str: ...


@dataclass(frozen=True)
class VerbsPort:
    """The port of one rail. ``gid`` is all zero where only the library knows it: everything was configured, and sysfs
    has no such device. ``port`` is None then."""

    device: str
    port_number: int
    gid_index: int
    gid: bytes
    address: str
    why_device: str = ""
    why_gid: str = ""
    subnet: Network | None = None
    port: Port | None = None

    @property
    def place(self) -> Place | None:
        return self.port.place if self.port else None


class NoGid(Exception):
    """The port has none that would do; the text says why and what to do."""


def ports(root: Path = ROOT) -> list[Port]:
    """All ports in NIC order, asked of pyverbs. RelayError: no pyverbs, or a device that may not be opened."""
    if not verbs_ports.devices(root):
        return []
    pyverbs = pyverbs_loader.load()
    return verbs_ports.of_pyverbs(pyverbs, verbs_ports.names_of_pyverbs(pyverbs), root)


def resolve(
    rails: Sequence[Wanted],
    *,
    names: Sequence[str] | None = None,
    read: Callable[[], list[Port]] | None = None,
    root: Path = ROOT,
) -> list[VerbsPort]:
    """The port of each rail, all of which use verbs. ``names`` for errors, by default rail[0], rail[1] ...

    pyverbs is needed only if a rail leaves its device or its GID open. ConfigError names the rail and what there is."""
    names = names or [f"rail[{index}]" for index in range(len(rails))]
    if all(rail.device and rail.gid_index >= 0 for rail in rails):
        found = verbs_ports.of_sysfs(root)
    else:
        try:
            found = read() if read else ports(root)
        except RelayError as failure:
            raise ConfigError(f"{_first_open(rails, names)}: {failure.text}") from None
    chosen: dict[int, VerbsPort] = {}
    order = sorted(range(len(rails)), key=lambda index: (not rails[index].device, not rails[index].address, index))
    for index in order:  # what is named first, so that no other rail takes it
        taken = {(port.device, port.port_number): names[other] for other, port in chosen.items()}
        chosen[index] = _resolved(rails[index], names[index], found, taken, root)
    return [chosen[index] for index in range(len(rails))]


def _first_open(rails: Sequence[Wanted], names: Sequence[str]) -> str:
    return next(
        f"{name}.{'gid_index' if rail.device else 'device'}"
        for rail, name in zip(rails, names, strict=True)
        if not rail.device or rail.gid_index < 0
    )


def _resolved(
    rail: Wanted, name: str, found: Sequence[Port], taken: dict[tuple[str, int], str], root: Path
) -> VerbsPort:
    port, why = _port_of(rail, name, found, taken)
    if port is None:
        return VerbsPort(rail.device, rail.port_number, rail.gid_index, _UNKNOWN_GID, rail.address, why, "configured")
    owner = taken.get((port.device, port.number))
    if owner is not None:
        raise ConfigError(f"{name}.device: {port.name} is {owner}'s already; name another one")
    try:
        gid, why_gid = choose_gid(port, rail.gid_index, rail.address, root)
    except NoGid as failure:
        raise ConfigError(f"{name}.gid_index: {failure}") from None
    address = rail.address or str(gid.address)
    subnet = verbs_ports.subnet_of(ipaddress.ip_address(address), gid.netdev or port.netdev, root)
    return VerbsPort(port.device, port.number, gid.index, gid.raw, address, why, why_gid, subnet, port)


def _port_of(
    rail: Wanted, name: str, found: Sequence[Port], taken: dict[tuple[str, int], str]
) -> tuple[Port | None, str]:
    if rail.device:
        for port in found:
            if (port.device, port.number) == (rail.device, rail.port_number):
                return port, "configured"
        if rail.gid_index >= 0 and rail.address:
            return None, "configured"
        known = ", ".join(port.name for port in found) or "no RDMA device"
        raise ConfigError(f'{name}.device: "{rail.device}" port {rail.port_number} is not there; this node has {known}')
    if rail.address:
        address = ipaddress.ip_address(rail.address)
        for port in found:
            if any(gid.address == address for gid in port.gids):
                return port, f"its GID table has {address}"
        known = ", ".join(f"{port.name} ({_addresses(port)})" for port in found) or "no RDMA device"
        raise ConfigError(f'{name}.address: no RDMA port has "{address}"; this node has {known}')
    reasons = []
    for position, port in enumerate(found):
        if (port.device, port.number) in taken:
            continue
        lack = unusable(port)
        if not lack:
            return port, f"the next ACTIVE port in NIC order, {position + 1} of {len(found)}"
        reasons.append(f"{port.name} {lack}")
    left = "; ".join(reasons) or ("all others are taken" if found else "this node has no RDMA device")
    raise ConfigError(f"{name}.device: no RDMA port is left for this rail ({left}); name one, or remove the rail")


def unusable(port: Port) -> str:
    """Why no rail takes this port by itself; "" if one may."""
    if not port.active:
        return f"is {port.state}"
    try:
        choose_gid(port)
    except NoGid as failure:
        return str(failure)
    return ""


def _addresses(port: Port) -> str:
    return ", ".join(dict.fromkeys(str(gid.address) for gid in port.gids if gid.routable)) or "no routable GID"


def choose_gid(port: Port, index: int = -1, address: str = "", root: Path = ROOT) -> tuple[Gid, str]:
    """(GID, why). ``index`` as configured, or -1; ``address`` of the rail, or "". NoGid."""
    table = "; ".join(gid.text() for gid in port.gids[:8]) or "none"
    if index >= 0:
        for gid in port.gids:
            if gid.index == index:
                named = not address or gid.address == ipaddress.ip_address(address)
                return gid, "configured" if named else f"configured; it has {gid.address} and not the rail's address"
        raise NoGid(f"{index}: {port.name} has no GID there, but {table}")
    if port.link_layer == INFINIBAND:
        if not port.gids:
            raise NoGid(f"{port.name} has no GID; is a subnet manager running?")
        return port.gids[0], "InfiniBand: the port's own"
    second = [gid for gid in port.gids if gid.kind == ROCE_V2]
    if not second:
        kinds = "only RoCE v1" if any(gid.kind in (IB, ROCE_V1) for gid in port.gids) else "no"
        raise NoGid(
            f"{port.name} has {kinds} GIDs (it has {table}); RoCE v2 is needed, see `cma_roce_mode -d {port.device}"
            f" -p {port.number} -m 2`, or name gid_index"
        )
    routable = [gid for gid in second if gid.routable]
    if not routable:
        netdev = port.netdev or "its interface"
        raise NoGid(
            f"{port.name} has only link-local GIDs (it has {table}); give {netdev} an address, or name gid_index"
        )
    if address:
        return _on_subnet(port, routable, ipaddress.ip_address(address), table, root)
    # IPv4 first: an interface may have many IPv6 addresses, some of which change
    gid = min(routable, key=lambda gid: (gid.address.version, gid.index))
    subnet = verbs_ports.subnet_of(gid.address, gid.netdev or port.netdev, root)
    return gid, f"RoCE v2, routable{f', on {subnet}' if subnet else ''}"


def _on_subnet(port: Port, routable: Iterable[Gid], address: Address, table: str, root: Path) -> tuple[Gid, str]:
    for gid in routable:
        if gid.address == address:
            return gid, "RoCE v2, the rail's address"
    for gid in routable:
        subnet = verbs_ports.subnet_of(gid.address, gid.netdev or port.netdev, root)
        if subnet is not None and address in subnet:
            return gid, f"RoCE v2, routable, on the subnet {subnet} of the rail's address"
    raise NoGid(
        f"{port.name} has no RoCE v2 GID on the subnet of {address} (it has {table}); correct address, or name"
        " gid_index"
    )


# ---- GPUs and rails ----


@dataclass(frozen=True)
class Nearest:
    """The rail of one GPU. ``distance`` is None where PCI says nothing, such as soft-RoCE."""

    gpu: Gpu
    rail: int
    distance: Distance | None
    why: str


def nearest_rails(found: Sequence[Gpu], places: Sequence[Place | None]) -> list[Nearest]:
    """For each GPU the rail whose NIC, at that place, is nearest by PCIe; among equals the one with the fewest GPUs so
    far, then the first. So several GPUs share a NIC evenly, and two GPUs beside two NICs take one each."""
    users = [0] * len(places)
    nearest = []
    for gpu in found:
        distances = [None if at is None else distance(gpu.place, at) for at in places]
        known = [one for one in distances if one is not None]
        least = min(known, default=None)
        equals = [rail for rail, one in enumerate(distances) if one == least]
        rail = min(equals, key=lambda rail: (users[rail], rail))
        users[rail] += 1
        nearest.append(Nearest(gpu, rail, least, _why(least, len(equals), len(places))))
    return nearest


def _why(least: Distance | None, equals: int, rails: int) -> str:
    if least is None:
        return "no rail's NIC has a place in PCI: in order"
    among = f"; {equals} of {rails} NICs are as near, in order" if equals > 1 else ""
    return f"nearest: {LEVEL_TEXT[least.name]}{among}"


def rail_of_rank(devices: Sequence[str], root: Path = ROOT) -> tuple[int, ...]:
    """The default of node.rail_of_rank, rank i being GPU i in PCI order; empty (rank modulo rails) without GPUs, or if
    PCI has none of the NICs. ``devices``: of each rail."""
    places = [verbs_ports.place_of(name, root) for name in devices]
    return tuple(one.rail for one in nearest_rails(gpus(root), places)) if any(places) else ()
