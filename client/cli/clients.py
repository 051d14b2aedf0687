"""Shows the engines that are attached to the daemon, and those whose last slices are being drained. REFUSED: requests
for more than a limit of the configuration allows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import moment, table
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import ClientState, Segment

configure = _node.configure


def run(args: argparse.Namespace) -> int:
    return _node.show(args, "clients", read, _lines)


def read(node: Segment) -> list[Row]:
    area = node.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state")
    return [
        {"client": row, **area.record(row), "state": ClientState(area.get(row, "state")).name.lower()}
        for row in range(area.count)
        if area.get(row, "state") != ClientState.FREE
    ]


def _lines(clients: Sequence[Row]) -> str:
    return table(
        ["CLIENT", "RANK", "PID", "NAME", "STATE", "ATTACHED", "REGIONS", "LANES", "REFUSED"],
        [
            [
                client["client"],
                client["rank"],
                client["pid"],
                client["name"],
                client["state"],
                moment(client["attached_ns"]),
                client["regions"],
                client["lanes"],
                client["refused"],
            ]
            for client in clients
        ],
    )
