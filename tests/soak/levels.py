"""What the processes hold over time, and whether it grows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from helpers import processes
from helpers.nodes import SHM

MIB: Final = 1 << 20
WARM_SHARE: Final = 0.25  # of the samples: caches fill, paths are used for the first time
# The most that a fitted line may rise from the first sample to the last one.
# A thread that a pool makes on demand is a step of one, of which the line makes more than one.
LIMITS: Final = {"pss_bytes": 8 * MIB, "rss_bytes": 8 * MIB, "anonymous_bytes": 6 * MIB, "fds": 4, "threads": 2}
OBJECTS_LIMIT: Final = 1
FEWEST: Final = 4


def enough(looks: int) -> bool:
    """To judge levels by."""
    return looks - int(looks * WARM_SHARE) >= FEWEST


def levels_of(pid: int) -> dict[str, int]:
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return {
        "pss_bytes": fields["Pss"],
        "rss_bytes": fields["Rss"],
        "anonymous_bytes": fields.get("Pss_Anon", fields["Anonymous"]),
        "fds": processes.descriptors(pid),
        "threads": processes.threads(pid),
    }


def objects(instances: Sequence[str]) -> int:
    """In /dev/shm, of these daemons."""
    return sum(name.startswith(f"railrelay.{instance}.") for name in os.listdir(SHM) for instance in instances)


@dataclass
class Series:
    name: str
    limits: dict[str, int]
    at_s: list[float] = field(default_factory=list)
    values: list[dict[str, int]] = field(default_factory=list)

    def add(self, at_s: float, levels: dict[str, int]) -> None:
        self.at_s.append(at_s)
        self.values.append(levels)

    def judged(self) -> list[dict[str, Any]]:
        """One row a level: first, last, the rise of the fitted line, its limit. Too few looks are not flat."""
        warm = int(len(self.at_s) * WARM_SHARE)
        rows = []
        for what, limit in self.limits.items():
            values = np.array([levels[what] for levels in self.values[warm:]], float)
            rise = 0.0
            if len(values) >= FEWEST:
                at = np.array(self.at_s[warm:])
                rise = float(np.polyfit(at, values, 1)[0] * (at[-1] - at[0]))
            rows.append(
                {
                    "of": self.name,
                    "what": what,
                    "first": int(values[0]) if len(values) else 0,
                    "last": int(values[-1]) if len(values) else 0,
                    "rise": rise,
                    "limit": limit,
                    "looks": len(values),
                    "flat": rise <= limit and len(values) >= FEWEST,
                }
            )
        return rows
