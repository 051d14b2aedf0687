"""What the project wants to reach, for the cases that it names; printed beside the figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

KIB: Final = 1024

_RATIO: Final = {  # (large blocks, relay, several rails) -> of the bound
    (True, False, False): 0.9,
    (True, True, False): 0.85,
    (False, False, False): 0.8,
    (False, True, False): 0.8,
    (True, False, True): 0.85,
    (False, False, True): 0.85,
    (True, True, True): 0.75,
    (False, True, True): 0.75,
}
_CPU: Final = {(True, False): 1.2, (True, True): 1.15, (False, False): 1.35, (False, True): 1.25}
_LATENCY: Final = 1.5


@dataclass(frozen=True)
class Target:
    what: str
    figure: float
    limit: float
    at_least: bool
    judged: bool = True

    @property
    def met(self) -> bool | None:
        if not self.judged:
            return None
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def text(self) -> str:
        relation = ">=" if self.at_least else "<="
        verdict = {True: "met", False: "MISSED", None: "not judged"}[self.met]
        return f"{self.what} {self.figure:.3g} {relation} {self.limit:.3g}: {verdict}"

    def facts(self) -> dict[str, Any]:
        return {"what": self.what, "figure": self.figure, "limit": self.limit, "met": self.met}


def targets_of(result: dict[str, Any]) -> list[Target]:
    """For the result of a bench; none for a case that has no target."""
    block_bytes, relay, many = result["block_bytes"], result["route"] == "relay", result["rails"] > 1
    if result["blocks"] == 1 and block_bytes == 4 * KIB:
        return [Target("p50 over a raw round trip's", result["latency_ratio"], _LATENCY, at_least=False)]
    if block_bytes not in (4 * KIB, 64 * KIB) or result["bytes"] < 1 << 29 or result["private"]:
        return []
    large = block_bytes == 64 * KIB
    share = _RATIO[large, relay, many]
    what = f"ratio (>= {share:g} x bound)" if relay else "ratio"
    found = [Target(what, result["ratio"], share * result["bound"], at_least=True)]
    if not many:
        allowed = result["limit_cpu_seconds_per_gigabyte"]
        if relay:
            allowed += result["copy_cpu_seconds_per_gigabyte"]
        used = result["cpu_seconds_per_gigabyte"] / allowed
        what = "CPU over (limit's + copy's)" if relay else "CPU over limit's"
        found.append(Target(what, used, _CPU[large, relay], at_least=False))
    return found
