"""Shows the lanes: which sender rank fills relay memory of which rail, and how far the rail has come.

Only lanes that are leased or have carried something, unless --all. A lane is written rail<-sender. CREDIT: slots that
the sender may still fill. HEAD, DOORBELL, COMPLETED: slots announced, filled, and placed at the peer. STALLS: how
often, and how long, the sender waited for credit. DIRECT: bytes that the rail sent straight from the sender's memory,
without a slot. LOCAL: bytes that the client copied to another client of this daemon by itself. NIC emulated: a process
of this node plays the wire, at a rate that the configuration sets. NIC verbs of 3: the device of rail 3 has taken over;
see `railrelay rails`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import duration, size, table
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import Area, Segment

_HEADINGS = (
    "LANE",
    "CLIENT",
    "PID",
    "NAME",
    "SLOTS",
    "CREDIT",
    "HEAD",
    "DOORBELL",
    "COMPLETED",
    "BYTES",
    "STALLS",
    "DIRECT",
    "LOCAL",
    "NIC",
)


def configure(parser: argparse.ArgumentParser) -> None:
    _node.configure(parser)
    parser.add_argument("--all", action="store_true", help="also lanes that nobody leased or used")


def run(args: argparse.Namespace) -> int:
    return _node.show(args, "lanes", lambda node: read(node, idle=args.all), _lines)


def read(node: Segment, *, idle: bool = False) -> list[Row]:
    """A row per lane, by rail and client row; ``idle``: also those without lease and traffic."""
    lanes = node.area(abi.CONSTANTS["AREA_LANES"], "lane_state")
    clients = node.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state")
    columns = node.header.get(0, "max_clients")
    nics = _node.nics(node)
    found = [_lane(lanes, clients, row, row // columns, nics[row // columns]) for row in range(lanes.count)]
    return [
        lane for lane in found if idle or lane["leased"] or lane["head"] or lane["direct_bytes"] or lane["local_bytes"]
    ]


def _lane(lanes: Area, clients: Area, row: int, rail: int, nic: str) -> Row:
    # The rail goes on meanwhile: read in this order, completed <= doorbell <= head holds.
    completed, doorbell, head = (lanes.get(row, field) for field in ("completed", "doorbell", "head"))
    slots, leased = lanes.get(row, "slots"), bool(lanes.get(row, "leased"))
    client = row % clients.count
    # A client that only sends from shared memory over its own rail never leased the lane: it is in its own row then.
    owner = lanes if leased else clients
    owner_row = row if leased else client
    known = clients.get(client, "pid") == owner.get(owner_row, "pid")
    return {
        "rail": rail,
        "nic": nic,
        "sender": owner.get(owner_row, "rank"),
        "client": client,
        "pid": owner.get(owner_row, "pid"),
        "name": clients.text(client, "name") if known else "",
        "leased": leased,
        "generation": lanes.get(row, "generation"),
        "slots": slots,
        "slot_bytes": lanes.get(row, "slot_bytes"),
        "credit": max(0, slots - (head - completed)),
        "head": head,
        "doorbell": doorbell,
        "completed": completed,
        **{
            field: lanes.get(row, field)
            for field in (
                "bytes",
                "blocks",
                "runs",
                "stalls",
                "stall_ns",
                "voids",
                "direct_bytes",
                "direct_slices",
                "local_bytes",
            )
        },
        "queued_slices": max(0, lanes.get(row, "produced") - lanes.get(row, "consumed")),
    }


def _lines(lanes: Sequence[Row]) -> str:
    return table(
        _HEADINGS,
        [
            [
                f"{lane['rail']}<-{lane['sender']}{'' if lane['leased'] else ' (free)'}",
                lane["client"],
                lane["pid"],
                lane["name"],
                lane["slots"],
                lane["credit"],
                lane["head"],
                lane["doorbell"],
                lane["completed"],
                size(lane["bytes"]),
                f"{lane['stalls']} ({duration(lane['stall_ns'])})" if lane["stalls"] else "0",
                size(lane["direct_bytes"]),
                size(lane["local_bytes"]),
                lane["nic"],
            ]
            for lane in lanes
        ],
    )
