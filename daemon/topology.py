"""The map GPU -> rail -> NIC as the daemon would choose it, and why: the facts behind `railrelay topo`.

`python -m railrelay.daemon.topology [--config FILE]` prints them as JSON; the command runs it so."""

from __future__ import annotations

import argparse
import ipaddress
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import addresses, config, discovery, verbs_ports
from railrelay.daemon.config import Config, ConfigError, Rail
from railrelay.daemon.discovery import VerbsPort, nearest_rails
from railrelay.daemon.pci import ROOT, Gpu, Place, distance, gpus, text
from railrelay.daemon.verbs_ports import Port

Facts = dict[str, Any]


class PortName(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def port_number(self) -> int: ...


_ORDER: Final = "rank modulo rails"


def read_ports(root: Path = ROOT) -> tuple[list[Port], str]:
    """(all ports, why the active MTU is not known). Asks pyverbs, and reads sysfs where that is not to be had."""
    if not verbs_ports.devices(root):
        return [], ""
    if root == ROOT:
        try:
            return discovery.ports(root), ""
        except RelayError as failure:
            return verbs_ports.of_sysfs(root), failure.text
    return verbs_ports.of_sysfs(root), f"{root} has no verbs"


def chosen(
    loaded: Config, found: Sequence[Port], without_pyverbs: str = "", root: Path = ROOT
) -> tuple[list[VerbsPort | None], str]:
    """(the port of each rail, None for those that are not verbs or if it fails; what is wrong)."""

    def known() -> list[Port]:
        if without_pyverbs and root == ROOT:  # the daemon would not go by sysfs either
            raise RelayError(ErrorCode.NOT_SUPPORTED, without_pyverbs)
        return list(found)

    verbs = [index for index, rail in enumerate(loaded.rail) if rail.nic == "verbs"]
    names = [f"rail[{index}]" for index in verbs]
    ports: list[VerbsPort | None] = [None] * len(loaded.rail)
    try:
        resolved = discovery.resolve([loaded.rail[index] for index in verbs], names=names, read=known, root=root)
    except ConfigError as failure:
        return ports, str(failure)
    for index, port in zip(verbs, resolved, strict=True):
        ports[index] = port
    return ports, ""


def interface_mtus(loaded: Config, ports: Mapping[int, PortName], root: Path = ROOT) -> list[int]:
    """Of each rail; 0 if its interface is not known. ``ports`` of the rails that are verbs."""
    return [
        verbs_ports.interface_mtu(
            verbs_ports.interface_of_port(ports[index].device, ports[index].port_number, root)
            if index in ports
            else _interface(rail, root),
            root,
        )
        for index, rail in enumerate(loaded.rail)
    ]


def read(loaded: Config, source: str, root: Path = ROOT) -> Facts:
    """Everything that topo shows. ``source``: where the configuration comes from."""
    found, without_mtu = read_ports(root)
    ports, wrong = chosen(loaded, found, without_mtu, root)
    known_gpus = gpus(root)
    rails = [_rail(loaded, index, port, root) for index, port in enumerate(ports)]
    used = {(port.device, port.port_number) for port in ports if port is not None}
    return {
        "configuration": source,
        "error": "; ".join([wrong] * bool(wrong) + addresses.foreign(loaded, root)),
        "gpus": _gpus(loaded, known_gpus, [place for _, place in rails], ports, wrong),
        "rails": [facts for facts, _ in rails],
        "other_ports": [_other(port) for port in found if (port.device, port.number) not in used],
        "notes": _notes(loaded, found, known_gpus, without_mtu, root),
    }


def _rail(loaded: Config, index: int, resolved: VerbsPort | None, root: Path) -> tuple[Facts, Place | None]:
    rail = loaded.rail[index]
    facts: Facts = {"rail": index, "identity": loaded.identity(index), "nic": rail.nic}
    if resolved is None:
        netdev = "" if rail.nic == "verbs" else _interface(rail, root)
        subnet = verbs_ports.subnet_of(ipaddress.ip_address(rail.address), netdev, root) if netdev else None
        at = verbs_ports.place_of_interface(netdev, root) if netdev else None
        speed = text(root / "sys/class/net" / netdev / "speed") if netdev else ""
        facts |= {
            "device": rail.device,
            "port": rail.port_number if rail.device else 0,
            "gid_index": rail.gid_index,
            "gid": "",
            "gid_type": "",
            "address": rail.address,
            "subnet": str(subnet or ""),
            "interface": netdev,
            "link_layer": "",
            "state": text(root / "sys/class/net" / netdev / "operstate").upper() if netdev else "",
            "speed_gbit": max(0.0, int(speed) / 1000) if speed.lstrip("-").isdecimal() else 0.0,
            "active_mtu": 0,
            "interface_mtu": verbs_ports.interface_mtu(netdev, root),
            "why_device": "not found" if rail.nic == "verbs" else "configured" if loaded != Config() else "the default",
            "why_gid": "",
        }
    else:
        port = resolved.port
        kinds = {gid.index: gid.kind for gid in port.gids} if port else {}
        at = resolved.place
        facts |= {
            "device": resolved.device,
            "port": resolved.port_number,
            "gid_index": resolved.gid_index,
            "gid": ipaddress.IPv6Address(resolved.gid).exploded,
            "gid_type": kinds.get(resolved.gid_index, ""),
            "address": resolved.address,
            "subnet": str(resolved.subnet or ""),
            "interface": port.netdev if port else "",
            "link_layer": port.link_layer if port else "",
            "state": port.state if port else "unknown",
            "speed_gbit": port.speed_gbit if port else 0.0,
            "active_mtu": port.active_mtu if port else 0,
            "interface_mtu": port.interface_mtu if port else 0,
            "why_device": resolved.why_device,
            "why_gid": resolved.why_gid,
        }
    return facts | {"pci": at.address if at else "", "numa": at.numa if at else -1}, at


def _interface(rail: Rail, root: Path) -> str:
    if not rail.address:
        return ""
    address = ipaddress.ip_address(rail.address)
    return "lo" if address.is_loopback else verbs_ports.interface_of(address, root)


def _gpus(
    loaded: Config,
    found: Sequence[Gpu],
    places: Sequence[Place | None],
    ports: Sequence[VerbsPort | None],
    wrong: str,
) -> list[Facts]:
    by_distance = not wrong and all(port is not None for port in ports) and any(places)
    nearest = nearest_rails(found, places) if by_distance else []
    rows = []
    for gpu in found:
        if loaded.node.rail_of_rank or not by_distance:
            rail = loaded.rail_of(gpu.index)
            why = "node.rail_of_rank" if loaded.node.rail_of_rank else f"in order: {_ORDER}"
        else:
            rail, why = nearest[gpu.index].rail, nearest[gpu.index].why
        at = places[rail] if rail is not None else None
        apart = distance(gpu.place, at) if at is not None else None
        rows.append(
            {
                "gpu": gpu.index,
                "pci": gpu.place.address,
                "uuid": gpu.uuid,
                "numa": gpu.place.numa,
                "rail": rail,
                "distance": apart.name if apart else "",
                "hops": apart.hops if apart else 0,
                "why": why if rail is not None else "node.rail_of_rank does not name this rank",
            }
        )
    return rows


def _other(port: Port) -> Facts:
    return {
        "device": port.device,
        "port": port.number,
        "state": port.state,
        "pci": port.place.address if port.place else "",
        "why": discovery.unusable(port) or "free",
    }


def _notes(loaded: Config, found: Sequence[Port], known_gpus: Sequence[Gpu], without_mtu: str, root: Path) -> list[str]:
    notes = []
    kinds = {rail.nic for rail in loaded.rail}
    if not found:
        notes.append("no RDMA NIC: there is nothing in /sys/class/infiniband")
    elif "verbs" not in kinds:
        notes.append(f'{len(found)} RDMA ports, but no rail has nic = "verbs"')
    if not known_gpus:
        notes.append(
            f"no NVIDIA GPU: rank r sends by rail r modulo {len(loaded.rail)}, unless node.rail_of_rank says other"
        )
    if loaded == Config():
        notes.append("this is what railrelayd does without a configuration: one rail of TCP sockets on 127.0.0.1")
    if without_mtu and found:
        notes.append(f"active MTU not known: {without_mtu}")
    if unreachable := addresses.unreachable(loaded, root):
        notes.append(unreachable)
    return notes


def main(description: str = "", work: Callable[[argparse.Namespace, Config, str], Facts] | None = None) -> int:
    """The part of a command that needs the daemon's package: prints JSON; a configuration that cannot be used is exit
    status 2 and its text on stderr."""
    parser = argparse.ArgumentParser(description=description or __doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--pid", type=int, default=0)
    parser.add_argument("--peer", default="")
    args = parser.parse_args()
    try:
        loaded = config.load(args.config)
        source = str(args.config or "")
        found = work(args, loaded, source) if work else read(loaded, source)
    except ConfigError as failure:
        print(f"{args.config or 'configuration'}: {failure}", file=sys.stderr)  # noqa: T201
        return 2
    print(json.dumps(found))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
