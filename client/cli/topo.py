"""Shows which rail each GPU sends by and which NIC each rail has, and why: found by PCIe distance and NIC order, or
configured. Works with and without a daemon; without --config it shows the running daemon's configuration, else what
railrelayd does without one.

DISTANCE, as in `nvidia-smi topo -m`: PIX behind the same PCIe switch, PXB under the same root port over several, PHB
under the same host bridge, NODE on the same NUMA node, SYS across NUMA nodes. Exit status 1 if the configuration
cannot be had on this machine."""

from __future__ import annotations

import argparse
import json
from typing import Any

from railrelay.client.cli import _daemon_side, _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import table
from railrelay.shm_layout import abi

configure = _daemon_side.configure


def run(args: argparse.Namespace) -> int:
    about = _daemon_side.source(args)
    found = _daemon_side.ask("topology", about)
    found["configuration"] = about.text
    if about.pid and args.config is None and not found["error"] and _rails_of(args.instance) != _named(found["rails"]):
        found["notes"].append(
            f"daemon pid {about.pid} has other rails (`railrelay rails`): this changed since it started"
        )
    print(json.dumps({"topology": found}, indent=2) if args.json else report(found))
    return 1 if found["error"] else 0


def _rails_of(instance: str) -> list[tuple[str, str, str]]:
    with _node.open_node(instance) as node:
        rails = node.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
        return [
            (rails.text(rail, "name"), rails.text(rail, "nic"), rails.text(rail, "address"))
            for rail in range(rails.count)
        ]


def _named(rails: list[Row]) -> list[tuple[str, str, str]]:
    return [(rail["identity"], rail["nic"], rail["address"]) for rail in rails]


def report(found: dict[str, Any]) -> str:
    parts = [f"configuration: {found['configuration']}"]
    if found["error"]:
        parts.append(f"cannot be used here: {found['error']}")
    if found["gpus"]:
        heading = ["GPU", "PCI", "NUMA", "RAIL", "NIC", "DISTANCE", "WHY"]
        parts.append(table(heading, [_gpu(gpu, found["rails"]) for gpu in found["gpus"]]))
    heading = ["RAIL", "IDENTITY", "NIC", "GID", "ADDRESS", "SUBNET", "STATE", "SPEED", "MTU", "PCI", "NUMA"]
    parts.append(table(heading, [_rail(rail) for rail in found["rails"]]))
    parts.append("\n".join(f"rail {rail['rail']}: {_why(rail)}" for rail in found["rails"]))
    if found["other_ports"]:
        parts.append(
            "\n".join(
                f"no rail's: {port['device']} port {port['port']}: {port['why']}" for port in found["other_ports"]
            )
        )
    if found["notes"]:
        parts.append("\n".join(found["notes"]))
    return "\n\n".join(parts)


def _gpu(gpu: Row, rails: list[Row]) -> list[str | int]:
    if gpu["rail"] is None:
        return [gpu["gpu"], gpu["pci"], _numa(gpu), "-", "-", "-", gpu["why"]]
    rail = rails[gpu["rail"]]
    return [gpu["gpu"], gpu["pci"], _numa(gpu), str(gpu["rail"]), _nic(rail), gpu["distance"] or "-", gpu["why"]]


def _rail(rail: Row) -> list[str | int]:
    mtus = [str(mtu) for mtu in (rail["active_mtu"], rail["interface_mtu"]) if mtu]
    return [
        rail["rail"],
        rail["identity"],
        _nic(rail),
        f"{rail['gid_index']} {rail['gid_type']}".strip() if rail["gid_index"] >= 0 else "-",
        rail["address"] or "-",
        rail["subnet"] or "-",
        rail["state"] or "-",
        f"{rail['speed_gbit']:g} Gbit/s" if rail["speed_gbit"] else "-",
        " of ".join(mtus) or "-",
        rail["pci"] or "-",
        _numa(rail),
    ]


def _nic(rail: Row) -> str:
    if rail["device"]:
        return f"{rail['device']} port {rail['port']}"
    return f"{rail['nic']} {rail['interface']}".strip()


def _numa(row: Row) -> str:
    return str(row["numa"]) if row["numa"] >= 0 else "-"


def _why(rail: Row) -> str:
    return f"{rail['why_device']}; GID: {rail['why_gid']}" if rail["why_gid"] else str(rail["why_device"])
