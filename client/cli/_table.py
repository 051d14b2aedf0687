"""Text for people: tables, sizes and times."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime


def table(headings: Sequence[str], rows: Sequence[Sequence[str | int]]) -> str:
    """Columns two spaces apart; numbers to the right."""
    cells = [list(headings), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    right = [all(isinstance(row[column], int) for row in rows) for column in range(len(headings))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )


def size(nbytes: int) -> str:
    if nbytes < 1024:
        return f"{nbytes} B"
    exponent = min((nbytes.bit_length() - 1) // 10, 5)
    return f"{nbytes / (1 << 10 * exponent):.1f} {'KMGTP'[exponent - 1]}iB"


def duration(ns: int) -> str:
    for unit_ns, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if ns >= unit_ns:
            return f"{ns / unit_ns:.1f} {unit}"
    return f"{ns} ns"


def moment(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if unix_ns else "-"
