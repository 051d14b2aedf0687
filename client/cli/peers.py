"""Shows the daemons of other nodes that this node's daemon knows. FENCES: connections closed to settle transfers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import moment, table
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import PeerState, Segment

configure = _node.configure


def run(args: argparse.Namespace) -> int:
    return _node.show(args, "peers", read, _lines)


def read(node: Segment) -> list[Row]:
    area = node.area(abi.CONSTANTS["AREA_PEERS"], "peer_state")
    return [
        {
            "peer": row,
            **area.record(row),
            "instance": f"{area.get(row, 'instance'):016x}",
            "state": PeerState(area.get(row, "state")).name.lower(),
        }
        for row in range(area.count)
        if area.get(row, "state") != PeerState.FREE
    ]


def _lines(peers: Sequence[Row]) -> str:
    return table(
        ["PEER", "SESSION", "STATE", "SINCE", "INSTANCE", "RAILS", "REGIONS", "FENCES"],
        [
            [
                peer["peer"],
                peer["session"],
                peer["state"],
                moment(peer["since_ns"]),
                peer["instance"],
                peer["rails"],
                peer["regions"],
                peer["fences"],
            ]
            for peer in peers
        ],
    )
