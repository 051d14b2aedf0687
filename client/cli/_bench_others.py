"""The measurements of the bench that are no transfers: waiting, an event that is late, a large submission."""

from __future__ import annotations

import argparse
import statistics
from typing import Any, Final

from railrelay.client.cli._bench_engines import Case, Submission
from railrelay.client.cli._bench_setup import Placement, ready
from railrelay.client.cli._bench_targets import Target
from railrelay.client.cli._progress import Progress
from railrelay.client.client import Route

_CALLERS: Final = 8
_WAIT_S: Final = 5.0
_EVENT_S: Final = 0.1
_BLOCKS: Final = 500_000
_BLOCK_BYTES: Final = 1024


def waiting(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """8 callers who wait, and the idle daemon with 4 rails."""
    case = Case(4, 4096, rails=4, route=_route(args), congestion=args.congestion)
    with ready(case, Placement((-1,) * 4, (-1,) * 4)) as setup:
        progress.step(f"{_CALLERS} callers wait for {_WAIT_S:g} s")
        before = setup.usage()
        engine, daemon = setup.sender.ask("hold_back", _CALLERS, _WAIT_S, setup.nodes[0].pid)
        spent = setup.usage().since(before)
        wrong = setup.receiver.ask("check")  # that the callers' transfers ended well shows that they were alive
    result = {
        "mode": "waiting",
        "callers": _CALLERS,
        "rails": 4,
        "seconds": _WAIT_S,
        "engine_core_share": engine / _WAIT_S,
        "daemon_core_share": daemon / _WAIT_S,
        "core_share": (engine + daemon) / _WAIT_S,
        "receiving_daemon_core_share": spent.receiving_daemon / _WAIT_S,
        "verified": wrong <= 3,  # only the first of the 4 blocks was sent
    }
    return _judged(result, [Target("share of a core", result["core_share"], 0.02, at_least=False)])


def event(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """A transfer whose event is set 100 ms after the call."""
    rounds = args.runs or 20
    case = Case(256, 65536, route=_route(args), congestion=args.congestion)
    with ready(case, Placement((-1,), (-1,))) as setup:
        setup.transfer(3)
        plain = setup.transfer(rounds, gap_ns=int(_EVENT_S * 1e9))
        progress.step(f"{rounds} transfers of {case.nbytes >> 20} MiB that may begin {_EVENT_S * 1e3:g} ms late")
        setup.receiver.ask("wipe")
        found = setup.sender.ask("hold_event", rounds, _EVENT_S, setup.nodes[0].pid)
        wrong = setup.receiver.ask("check")
    feeder, rail, late = (statistics.median(column) for column in zip(*found, strict=True))
    result = {
        "mode": "event",
        "runs": rounds,
        "delay_seconds": _EVENT_S,
        "feeder_core_share": feeder / _EVENT_S,
        "rail_core_share": rail / _EVENT_S,
        "event_to_done_us": late * 1e6,
        "without_event_us": statistics.median(plain.round_ns) / 1e3,
        "verified": wrong == 0,
    }
    return _judged(
        result,
        [
            Target("feeder's share of a core", result["feeder_core_share"], 0.05, at_least=False),
            Target("rail thread's share of a core", result["rail_core_share"], 0.05, at_least=False),
        ],
    )


def submit(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """One call with 500,000 blocks of 1 KiB: how long it keeps other Python threads from running. A second thread looks
    at the clock all the time; it is silent while the call holds the GIL. The same during a sleep of equal length is the
    noise of the measurement."""
    rounds = args.runs or 9
    case = Case(_BLOCKS, _BLOCK_BYTES, route=_route(args), congestion=args.congestion)
    with ready(case, Placement((-1,), (-1,))) as setup:
        setup.transfer()
        wrong = setup.receiver.ask("check")
        setup.receiver.ask("wipe")
        progress.step(f"{rounds} calls with {_BLOCKS:,} blocks of {_BLOCK_BYTES} bytes")
        found = [Submission(*each) for each in setup.sender.ask("submit", rounds)]
        wrong += setup.receiver.ask("check")
    result = {
        "mode": "submit",
        "blocks": _BLOCKS,
        "block_bytes": _BLOCK_BYTES,
        "runs": rounds,
        "call_ms": statistics.median(each.call_ns for each in found) / 1e6,
        "gil_held_ms": statistics.median(each.held_ns for each in found) / 1e6,
        "gil_held_ms_least": min(each.held_ns for each in found) / 1e6,
        "noise_ms": statistics.median(each.noise_ns for each in found) / 1e6,
        "done_ms": statistics.median(each.done_ns for each in found) / 1e6,
        "verified": wrong == 0,
    }
    return _judged(result, [Target("ms with the GIL", result["gil_held_ms"], 50, at_least=False)])


OTHERS: Final = {"waiting": waiting, "event": event, "submit": submit}


def report(result: dict[str, Any]) -> str:
    lines = [f"{name.replace('_', ' ')}: {_shown(name, value)}" for name, value in result.items() if name != "targets"]
    return "\n".join([*lines, *(f"target: {target['text']}" for target in result["targets"])])


def _judged(result: dict[str, Any], targets: list[Target]) -> dict[str, Any]:
    return {**result, "targets": [{**target.facts(), "text": target.text()} for target in targets]}


def _shown(name: str, value: Any) -> str:  # noqa: ANN401
    if name.endswith("_core_share") or name == "core_share":
        return f"{value:.2%} of a core"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def _route(args: argparse.Namespace) -> Route:
    return Route.RELAY_ALL if args.route == "relay" else Route.DIRECT
