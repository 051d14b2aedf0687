"""What a section finds: rows of a table, written one by one, so that those before a time limit are kept."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

NOT_MEASURED: Final = "not measured: "


class Skipped(Exception):
    """The section needs what this machine has not; the text says what."""


@dataclass(frozen=True)
class Options:
    """``gpus``: how many are used, 0 for host memory. ``quick``: enough to see that everything works. ``seconds``: how
    long the section "stress" goes on, 0 for as long as it should."""

    gpus: int
    quick: bool = False
    stand_in: bool = False
    seconds: float = 0.0

    @property
    def judges_times(self) -> bool:
        """Limits of times are for GPUs, and for whole sizes."""
        return self.gpus > 0 and not self.small

    @property
    def last_gpu(self) -> int:
        return max(0, self.gpus - 1)

    @property
    def small(self) -> bool:
        return self.quick or self.stand_in

    @property
    def place(self) -> str:
        """From where to where."""
        return "host" if not self.gpus else "same GPU" if self.gpus == 1 else "peer GPU"


@dataclass(frozen=True)
class Row:
    """``good``: None if there is nothing to hold it against."""

    section: str
    case: str
    figure: str
    limit: str = ""
    good: bool | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return not self.figure.startswith(NOT_MEASURED)


class Report:
    def __init__(self, section: str, path: Path, options: Options) -> None:
        self._section = section
        self._path = path
        self._judges_times = options.judges_times

    def timed(
        self, case: str, figure: str, limit: str = "", good: bool | None = None, *, sound: bool = True, **facts: object
    ) -> None:
        """A row whose limit is one of time, where those are judged; ``sound``: the bytes were right."""
        self.row(case, figure, limit, good if sound and self._judges_times else None if sound else False, **facts)

    def row(self, case: str, figure: str, limit: str = "", good: bool | None = None, **facts: object) -> None:
        row = Row(self._section, case, figure, limit, good, facts)
        with self._path.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")
        verdict = "" if good is None else "  good" if good else "  NOT GOOD"
        print(f"{case}: {figure}{f' ({limit})' if limit else ''}{verdict}", flush=True)


def read(path: Path) -> list[Row]:
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median, and the least and the largest."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def percentile(values: Sequence[float], percent: float) -> float:
    in_order = sorted(values)
    return in_order[min(len(in_order) - 1, int(len(in_order) * percent / 100))]


MIB: Final = 1 << 20
GIB: Final = 1 << 30
