"""The soak: real daemons and engines under random traffic, every byte checked. Two nodes with two rails each; sizes
from 64 bytes to 1 MiB, every route (the local one too), shared and private memory, both directions, transfers ended
early by their sender, their receiver or both; engines and daemons are killed and come back, and stop for a while. What
a transfer wrote is checked when it has ended well, and its pages get new content the moment that it has settled: a byte
that lands later is found. Memory, descriptors, threads and shared memory of the processes that live on must stay flat;
they are looked at while nothing is under way.

--storm N instead begins N transfers, a third of which is ended at a random moment by either side or both: into shared
memory, into private memory, and while engines and daemons are killed and stopped. The last line sums up; the exit code
is 1 if anything was wrong."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from helpers import processes

from railrelay.client.cli import _nodes
from railrelay.client.cli._numbers import amount, whole
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import table
from soak.faults import Faults
from soak.fleet import Fleet, fleet
from soak.levels import FEWEST, LIMITS, OBJECTS_LIMIT, Series, enough, levels_of, objects
from soak.traffic import Found, Traffic

ENGINES: Final = 2  # a node
AREAS: Final = 16
MOST: Final = 24  # transfers under way
EARLY: Final = 1 / 3
ROUTES: Final = ("relay", "direct", "relay", "matched")
FAULT_PAUSE_S: Final = 2.0
STORM_PAUSE_S: Final = 0.4
LOOKS: Final = 60  # at the levels in a run, if it is long enough for that
SHORTEST_LOOK_S: Final = 8.0
SHORTEST_MINUTES: Final = 1
SETTLED_S: Final = 3.0  # lingering sessions have gone
MARGIN_S: Final = 300
PROBLEMS: Final = ("wrong_bytes", "hangs", "lost_notes", "unexpected")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=amount(SHORTEST_MINUTES, 100_000),
        default=1.5,
        metavar="N",
        help=f"from {SHORTEST_MINUTES}: less has too few looks to tell what grows (default: %(default)s)",
    )
    parser.add_argument(
        "--storm", type=whole(10_000_000), metavar="N", help="N transfers instead; the full form is 10000"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of all that is random; default: another each time")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(words)
    seed = secrets.randbits(31) if args.seed is None else args.seed
    processes.adopt_orphans()
    try:
        with _nodes.ended_by_signals():
            result = asyncio.run(storm(args.storm, seed) if args.storm else soak(60 * args.minutes, seed))
    except KeyboardInterrupt:
        print("interrupted; daemons, engines and their memory are gone", file=sys.stderr)
        return 130
    print(json.dumps(result, indent=2) if args.json else report(result))
    print(last_line(result), file=sys.stderr if args.json else sys.stdout)
    return 0 if result["good"] else 1


# ---- the soak ----


async def soak(seconds: float, seed: int) -> dict[str, Any]:
    progress = Progress()
    with tempfile.TemporaryDirectory(prefix="railrelay-soak-") as directory:
        async with fleet(
            Path(directory), engines=ENGINES, areas=AREAS, limit_s=int(seconds + MARGIN_S), routes=ROUTES
        ) as running:
            steady = running.of(1)[-1]
            traffic = Traffic(running, random.Random(seed), most=MOST, early=EARLY)
            faults = Faults(running, traffic, random.Random(seed + 1), (steady, 1))
            watched = {"the daemon": running.running[1].pid, "an engine": steady.pid}
            series = {name: Series(name, dict(LIMITS)) for name in watched}
            series["/dev/shm"] = Series("/dev/shm", {"objects": OBJECTS_LIMIT})
            progress.step(
                f"seed {seed}: {ENGINES * 2} engines, {MOST} transfers at a time, for {seconds / 60:g} minutes"
            )
            began = time.monotonic()
            sending = asyncio.create_task(traffic.run())
            look_s = max(SHORTEST_LOOK_S, seconds / LOOKS)
            # A busy machine takes longer over its looks.
            while (at := time.monotonic() - began) < seconds or not enough(len(series["the daemon"].values)):
                await _disturb(faults, max(SHORTEST_LOOK_S, min(look_s, seconds - at)))
                await _calm(traffic, running, sending)
                at = time.monotonic() - began
                for name, pid in watched.items():
                    series[name].add(at, levels_of(pid))
                series["/dev/shm"].add(at, {"objects": objects([node.instance for node in running.running])})
                progress.update(_so_far(at, seconds, traffic.found, faults, series))
                traffic.go_on()
            sending.cancel()
            await traffic.quiet()
            await _look(running, traffic.found)
            levels = [row for each in series.values() for row in each.judged()]
            problems = _died(running) + await running.end()
    result = _result("soak", seed, time.monotonic() - began, traffic.found, problems)
    growing = [f"{row['of']}: {row['what']}" for row in levels if not row["flat"]]
    good = result["good"] and not growing
    return {**result, "faults": dict(faults.done), "levels": levels, "growing": growing, "good": good}


async def _disturb(faults: Faults, seconds: float) -> None:
    """For ``seconds``; the fault that is under way then is undone first."""
    disturbing = asyncio.create_task(faults.run(FAULT_PAUSE_S))
    await asyncio.sleep(seconds)
    async with faults.between:
        disturbing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await disturbing


async def _calm(traffic: Traffic, running: Fleet, sending: asyncio.Task[None]) -> None:
    if sending.done():
        await sending
    await traffic.quiet()
    await asyncio.sleep(SETTLED_S)
    await _look(running, traffic.found)


async def _look(running: Fleet, found: Found) -> None:
    for engine in running.engines:
        if engine.attached and (wrong := await engine.ask("look")):
            found.wrong_bytes += wrong
            found.wrong(f"{engine.name}: {wrong} late bytes in areas that nobody may write")


def _so_far(at: float, seconds: float, found: Found, faults: Faults, series: dict[str, Series]) -> str:
    daemon = series["the daemon"].values[-1]
    return (
        f"  {at / 60:.1f} of {seconds / 60:g} min: {found.transfers} transfers, {found.results['OK']} good,"
        f" {sum(faults.done.values())} faults; daemon {daemon['pss_bytes'] >> 20} MiB, {daemon['fds']} fds,"
        f" {daemon['threads']} threads; {problems_of(found)}"
    )


# ---- the storm ----


async def storm(count: int, seed: int) -> dict[str, Any]:
    """Parts: (name, share of the transfers, kinds of memory, seconds between faults)."""
    parts = (
        ("shared memory", 0.35, ("shared",), 0.0),
        ("private memory", 0.35, ("private",), 0.0),
        ("with kills and stops", 0.3, ("shared", "private"), STORM_PAUSE_S),
    )
    progress = Progress()
    progress.step(f"seed {seed}: {count} transfers, {EARLY:.0%} of them ended early")
    whole, problems, rows, began = Found(), list[str](), [], time.monotonic()
    for number, (name, share, kinds, pause_s) in enumerate(parts):
        with tempfile.TemporaryDirectory(prefix="railrelay-storm-") as directory:
            async with fleet(Path(directory), engines=ENGINES, areas=AREAS, limit_s=3600, routes=ROUTES) as running:
                traffic = Traffic(running, random.Random(seed + number), most=MOST, early=EARLY, kinds=kinds)
                traffic.limit = int(count * share)
                faults = Faults(running, traffic, random.Random(seed - number), None)
                row = await _storm_part(running, traffic, faults, pause_s, name, progress)
                problems += _died(running) + await running.end()
        rows.append(row)
        whole += traffic.found
    return {**_result("storm", seed, time.monotonic() - began, whole, problems), "parts": rows}


async def _storm_part(
    running: Fleet, traffic: Traffic, faults: Faults, pause_s: float, name: str, progress: Progress
) -> dict[str, Any]:
    began = time.monotonic()
    sending = asyncio.create_task(traffic.run())
    disturbing = asyncio.create_task(faults.run(pause_s)) if pause_s else None
    while not sending.done():
        await asyncio.wait([sending], timeout=2.0)
        progress.update(f"  {name}: {traffic.begun} of {traffic.limit} begun, {problems_of(traffic.found)}")
        if traffic.begun == traffic.limit and disturbing is not None:
            async with faults.between:
                disturbing.cancel()
    await sending
    await _look(running, traffic.found)
    found = traffic.found
    return {
        "part": name,
        "seconds": time.monotonic() - began,
        "transfers": found.transfers,
        "ended_early": found.ended_early,
        "faults": dict(faults.done),
        "results": dict(found.results),
        **{problem: getattr(found, problem) for problem in PROBLEMS},
    }


# ---- results ----


def _died(running: Fleet) -> list[str]:
    return [
        f"{engine.name} ended on its own:\n{engine.log.read_text()[-4000:]}"
        for engine in running.engines
        if engine.ended_alone
    ]


def _result(mode: str, seed: int, seconds: float, found: Found, problems: list[str]) -> dict[str, Any]:
    return {
        "mode": mode,
        "seed": seed,
        "seconds": seconds,
        "transfers": found.transfers,
        "ended_early": found.ended_early,
        "results": dict(found.results),
        **{problem: getattr(found, problem) for problem in PROBLEMS},
        "texts": found.texts + problems,
        "good": not problems and not any(getattr(found, problem) for problem in PROBLEMS),
    }


def problems_of(found: Found) -> str:
    bad = [f"{getattr(found, problem)} {problem}" for problem in PROBLEMS if getattr(found, problem)]
    return ", ".join(bad) or "nothing wrong"


def report(result: dict[str, Any]) -> str:
    lines = [f"{name.lower()}: {count}" for name, count in sorted(result["results"].items())]
    lines += [f"{name}: {count}" for name, count in sorted(result.get("faults", {}).items())]
    if "parts" in result:
        shown = ("part", "transfers", "ended_early", *PROBLEMS, "seconds")
        rows = [
            [f"{row[name]:.1f}" if name == "seconds" else str(row[name]) for name in shown] for row in result["parts"]
        ]
        lines.append(table([name.upper().replace("_", " ") for name in shown], rows))
    if "levels" in result:
        rows = [
            [
                row["of"],
                row["what"],
                *(_level(row, key) for key in ("first", "last", "rise", "limit")),
                "flat" if row["flat"] else "GROWS" if row["looks"] >= FEWEST else "TOO FEW LOOKS",
            ]
            for row in result["levels"]
        ]
        lines.append(table(["OF", "WHAT", "FIRST", "LAST", "RISE", "LIMIT", ""], rows))
    return "\n".join(lines + result["texts"])


def _level(row: dict[str, Any], key: str) -> str:
    return f"{row[key] / (1 << 20):.1f} MiB" if row["what"].endswith("_bytes") else f"{row[key]:.3g}"


def last_line(result: dict[str, Any]) -> str:
    counted = ", ".join(f"{problem} {result[problem]}" for problem in PROBLEMS)
    levels = "" if "growing" not in result else f", growing: {', '.join(result['growing']) or 'nothing'}"
    return (
        f"{result['mode']}: seed {result['seed']}, {result['seconds'] / 60:.1f} min, {result['transfers']} transfers,"
        f" {result['ended_early']} ended early, {counted}{levels}: {'good' if result['good'] else 'FAILED'}"
    )
