"""Shows the distinct errors of the daemon: each cause once, with how often and when, the latest last. Where the texts
of one cause differ, the last one is followed by the first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import moment, table
from railrelay.client.errors import ErrorCode
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import Segment

configure = _node.configure


def run(args: argparse.Namespace) -> int:
    return _node.show(args, "errors", read, _lines)


def read(node: Segment) -> list[Row]:
    area = node.area(abi.CONSTANTS["AREA_ERRORS"], "error_record")
    rows = [
        {
            "code": ErrorCode.of(area.get(row, "code")).value,
            "count": area.get(row, "count"),
            "first_ns": area.get(row, "first_ns"),
            "last_ns": area.get(row, "last_ns"),
            "text": area.text(row, "text"),
            "first_text": area.text(row, "first_text"),
        }
        for row in range(area.count)
        if area.get(row, "count")
    ]
    return sorted(rows, key=lambda row: row["last_ns"])


def _lines(errors: Sequence[Row]) -> str:
    return table(
        ["COUNT", "FIRST", "LAST", "CODE", "TEXT"],
        [
            [error["count"], moment(error["first_ns"]), moment(error["last_ns"]), error["code"], _text(error)]
            for error in errors
        ],
    )


def _text(error: Row) -> str:
    last, first = str(error["text"]), str(error["first_text"])
    return last if first in ("", last) else f"{last} (at first: {first})"
