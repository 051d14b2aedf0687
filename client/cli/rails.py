"""Shows the rails of this node: their NICs, and what each has carried.

PORT: up or down; of verbs rails only, others do not know. BY: the rail whose device sends what this rail takes: itself,
unless its port, or the one at the peer, is down or not reached. TAKEN OVER: how often another one began to. LOST:
connections that broke. RESENT: slices sent once more after that."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import size, table
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import Area, Segment

_HEADINGS = ("RAIL", "NAME", "NIC", "ADDRESS", "PORT", "BY", "TAKEN OVER", "SENT", "RECEIVED", "LOST", "RESENT")


def configure(parser: argparse.ArgumentParser) -> None:
    _node.configure(parser)


def run(args: argparse.Namespace) -> int:
    return _node.show(args, "rails", read, _lines)


def read(node: Segment) -> list[Row]:
    rails = node.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
    return [_rail(rails, rail) for rail in range(rails.count)]


def _rail(rails: Area, rail: int) -> Row:
    counters = dict(zip(abi.RAIL_COUNTERS, rails.array(rail, "counters"), strict=False))
    return {
        "rail": rail,
        **{field: rails.text(rail, field) for field in ("name", "nic", "address")},
        "port": rails.get(rail, "port"),
        "cpu": rails.get(rail, "cpu"),
        "up": not rails.get(rail, "down"),
        "through": rails.get(rail, "taken_by") - 1 if rails.get(rail, "taken_by") else rail,
        "takeovers": rails.get(rail, "takeovers"),
        "counters": counters,
    }


def _lines(rails: Sequence[Row]) -> str:
    return table(
        _HEADINGS,
        [
            [
                rail["rail"],
                rail["name"],
                rail["nic"],
                f"{rail['address']} port {rail['port']}" if rail["port"] else rail["address"],
                ("up" if rail["up"] else "down") if rail["nic"] == "verbs" else "-",
                rail["through"],
                rail["takeovers"],
                size(rail["counters"]["bytes_sent"]),
                size(rail["counters"]["bytes_received"]),
                rail["counters"]["connections_lost"],
                rail["counters"]["slices_resent"],
            ]
            for rail in rails
        ],
    )
