"""Measures transfers between two relay daemons on this machine, beside their limit from the same run: a plain C sender
and receiver that move the same bytes from and to the same scattered places over loopback TCP, with as many connections
as rails and the best of 1, 4, 8 and 16 MiB per call. Both alternate; RATIO is the median of pairwise ratios. BOUND is
what is left of the limit when relaying, because the copy into the lanes takes its share of the cores. One small
transfer (up to 1 MiB in all) is measured with the daemons asleep before it; its limit is a raw round trip.

With --route local both engines are clients of one daemon, and the limit is a plain memcpy loop over the same scattered
blocks; without --block-bytes both cases that have a target are measured.

With --memory cuda, or as WHAT overlap, it measures instead how well the copy into relay memory hides behind the NIC:
one daemon with two emulated NICs, an engine on each rail, the same bytes by the own rail's NIC directly, by relay, and
by relay with a NIC that takes no time (the feeder alone). Hidden is 1 - (relay - direct) / feeder alone.

WHAT: transfer (the default); overlap; waiting, the CPU that 8 blocked callers and an idle daemon with 4 rails use;
event, the CPU while a transfer waits for its event; submit, how long a call with 500,000 blocks holds the GIL;
fairness, what small transfers lose beside a bulk one and beside others that are ended early, and transfers to one peer
beside another that is stopped or dead."""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from railrelay.client.cli import _bench_fairness, _bench_local, _bench_others, _bench_overlap, _node, _nodes
from railrelay.client.cli._bench_engines import Case
from railrelay.client.cli._bench_setup import Placement, Run, Setup, ready
from railrelay.client.cli._bench_targets import targets_of
from railrelay.client.cli._nodes import MIB, Verbs
from railrelay.client.cli._numbers import whole
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import size, table
from railrelay.client.client import Route
from railrelay.client.errors import ArgumentError, ErrorCode
from railrelay.shm_layout import abi

_BLOCKS: Final = 16384
_BLOCK_BYTES: Final = 65536
_MOST_BLOCKS: Final = 1 << 24
_MOST_RAILS: Final = abi.CONSTANTS["MAX_RAILS"]
_MOST_RUNS: Final = 10_000
_EACH: Final = frozenset(("route", "congestion"))
_DEFAULTS: Final = {  # of the options that not every kind takes
    "blocks": _BLOCKS,
    "block_bytes": None,
    "route": "relay",
    "private": False,
    "runs": None,
    "rails": 1,
    "nic": "tcp",
    "devices": "",
    "congestion": "reno",
    **_bench_overlap.DEFAULTS,
    **_bench_fairness.DEFAULTS,
}
_CALL_BYTES: Final = (1 * MIB, 4 * MIB, 8 * MIB, 16 * MIB)
_CALIBRATIONS: Final = 3
_PAIRS: Final = 11
_SHORT_PAIRS: Final = 31
_SHORT_NS: Final = 200_000_000
_SMALL_BYTES: Final = MIB
_SMALL_ROUNDS: Final = 100  # a pair
_SMALL_GAP_NS: Final = 1_000_000
_NOISE_CORES: Final = 0.15


Measure: TypeAlias = Callable[[argparse.Namespace, Progress], dict[str, Any]]
Report: TypeAlias = Callable[[dict[str, Any]], str]


def configure(parser: argparse.ArgumentParser) -> None:
    what = ["transfer", "overlap", "fairness", *_bench_others.OTHERS]
    parser.add_argument("what", nargs="?", choices=what, default=what[0], metavar="WHAT", help=", ".join(what))
    parser.set_defaults(refuse=parser.error)
    parser.add_argument("--blocks", type=whole(_MOST_BLOCKS), metavar="N", help=f"default: {_BLOCKS}")
    parser.add_argument("--block-bytes", type=whole(_nodes.GIB), metavar="B", help=f"default: {_BLOCK_BYTES}")
    parser.add_argument(
        "--route",
        choices=["relay", "direct", "local"],
        help="relay: every byte through a lane (default); local: between two engines of one daemon",
    )
    parser.add_argument(
        "--private", action="store_true", default=None, help="memory that the daemons cannot map, on both sides"
    )
    parser.add_argument(
        "--runs", type=whole(_MOST_RUNS), metavar="R", help=f"default: {_PAIRS} pairs, {_SHORT_PAIRS} if short"
    )
    parser.add_argument("--rails", type=whole(_MOST_RAILS), metavar="R", help="default: 1")
    parser.add_argument("--nic", choices=["tcp", "verbs"], help="of the rails (default: tcp)")
    parser.add_argument(
        "--devices",
        metavar="NAME[:GID],...",
        help="--nic verbs: RDMA devices of the sending daemon's rails, then of the receiving one's, which has the same"
        " if there are no more; with a row of the GID table, else that is looked for",
    )
    parser.add_argument("--congestion", metavar="NAME", help="TCP congestion control (default: reno)")
    parser.add_argument("--json", action="store_true", help="for programs")
    _bench_overlap.configure(parser)
    _bench_fairness.configure(parser)
    parser.epilog = _node.STABILITY


def run(args: argparse.Namespace) -> int:
    progress = Progress()
    kind = _settled(args)
    try:
        result = kind.measure(args, progress)
    except KeyboardInterrupt:
        progress.step("interrupted; daemons, engines and their memory are gone")
        return 130
    print(json.dumps(result, indent=2) if args.json else kind.report(result))
    return 0 if result["verified"] and result.get("met", True) else 1


@dataclass(frozen=True)
class _Kind:
    """``name``: by the options that chose it. ``takes``: the options that mean something to it."""

    name: str
    measure: Measure
    report: Report
    takes: frozenset[str]


def _kind(args: argparse.Namespace) -> _Kind:
    if args.what == "overlap" or (args.what == "transfer" and args.memory == "cuda"):
        name, takes = _bench_overlap.taken(args)
        return _Kind(name, _bench_overlap.overlap, _bench_overlap.report, takes)
    if args.what == "fairness":
        takes = _EACH | {"runs", "bulk_bytes", "rate_gbit"}
        return _Kind("fairness", _bench_fairness.fairness, _bench_fairness.report, takes)
    if args.what != "transfer":
        takes = _EACH if args.what == "waiting" else _EACH | {"runs"}
        return _Kind(args.what, _bench_others.OTHERS[args.what], _bench_others.report, takes)
    takes = frozenset(("route", "blocks", "block_bytes", "runs", "memory"))
    if args.route == "local":
        return _Kind("transfer --route local", _bench_local.local, _bench_local.report, takes)
    nic = args.nic or "tcp"
    takes |= {"private", "rails", "nic", "devices" if nic == "verbs" else "congestion"}
    return _Kind(f"transfer --nic {nic}", _transfer, _report, takes)


def _settled(args: argparse.Namespace) -> _Kind:
    """Gives options that are not set their defaults; ends the program, as argparse does, for one without meaning."""
    kind = _kind(args)
    for name, value in vars(args).items():
        if name in _DEFAULTS and value is None:
            setattr(args, name, _DEFAULTS[name])
        elif name in _DEFAULTS and name not in kind.takes:
            args.refuse(f"argument --{name.replace('_', '-')}: means nothing to {kind.name}")
    if args.route == "local" and args.what != "transfer":
        args.refuse(f"argument --route: local means nothing to {kind.name}")
    return kind


@dataclass(frozen=True)
class Pair:
    limit: Run
    ours: Run
    copy_seconds: float
    wrong: int

    @property
    def ratio(self) -> float:
        return statistics.median(self.limit.round_ns) / statistics.median(self.ours.round_ns)


def placement_of(case: Case) -> Placement:
    """One rail: each side's thread has a core. One small transfer: the sending side on one core, all of it. Several
    rails: wherever the scheduler puts them."""
    cores = sorted(os.sched_getaffinity(0))
    first, second = cores[0], cores[min(1, len(cores) - 1)]
    if case.rails > 1:
        return Placement((-1,) * case.rails, (-1,) * case.rails)
    if case.nbytes <= _SMALL_BYTES:
        return Placement((first,), (second,), caller=first, feeder=first)
    return Placement((first,), (second,))


def _transfer(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    relay = args.route == "relay"
    case = Case(
        args.blocks,
        args.block_bytes or _BLOCK_BYTES,
        args.rails,
        1 if relay and args.rails > 1 else 0,  # to another rank's rail, else to the own
        Route.RELAY_ALL if relay else Route.DIRECT,
        args.private,
        args.congestion,
        *_devices(args),
    )
    placement = placement_of(case)
    small = case.nbytes <= _SMALL_BYTES
    rounds, gap_ns = (_SMALL_ROUNDS, _SMALL_GAP_NS) if small else (1, 0)
    with ready(case, placement) as setup:
        progress.step(_described(args, case))
        progress.step(placement.text())
        progress.step(f"{setup.geometry.text()}; checking, and looking for the best bytes per call")
        setup.transfer()
        wrong = setup.receiver.ask("check")
        setup.receiver.ask("wipe")
        call_bytes, shortest_ns = _calibrated(setup, small)
        wrong += setup.receiver.ask("check")
        count = args.runs or (_SHORT_PAIRS if shortest_ns < _SHORT_NS else _PAIRS)
        lane_bytes = setup.lane_bytes()
        pairs: list[Pair] = []
        for number in range(count):
            pairs.append(_pair(setup, number, call_bytes, rounds, gap_ns))
            ratio = statistics.median(pair.ratio for pair in pairs)
            progress.update(f"  pair {number + 1} of {count}: ratio {pairs[-1].ratio:.3f}, median {ratio:.3f}")
        lane_bytes = setup.lane_bytes() - lane_bytes
        progress.step("checking again")
        setup.receiver.ask("wipe")
        setup.transfer()
        wrong += setup.receiver.ask("check") + sum(pair.wrong for pair in pairs)
        geometry = setup.geometry
    result = {
        **_figures(case, pairs, rounds),
        "lane_bytes": lane_bytes,
        "congestion_control": args.congestion,
        "verified": wrong == 0,
        "wrong_blocks": wrong,
        "route": args.route,
        "nic": args.nic,
        "blocks": case.blocks,
        "block_bytes": case.block_bytes,
        "bytes": case.nbytes,
        "rails": case.rails,
        "private": case.private,
        "pairs": len(pairs),
        "rounds_per_pair": rounds,
        "limit_bytes_per_call": call_bytes,
        "placement": vars(placement),
        "geometry": vars(geometry),
    }
    targets = targets_of(result) if args.nic == "tcp" else []
    return {**result, "targets": [{**target.facts(), "text": target.text()} for target in targets]}


def _devices(args: argparse.Namespace) -> tuple[tuple[Verbs, ...], tuple[Verbs, ...]]:
    """Of the rails of the sending and the receiving daemon; none for TCP. ArgumentError."""
    names = [name for name in args.devices.split(",") if name]
    if args.nic == "verbs" and not names:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, "--nic verbs needs --devices")
    rails = args.rails if names else 0
    if len(names) not in (rails, 2 * rails):
        text = f"--devices: {len(names)} of them for {rails} rails; expected {rails}, or twice as many"
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
    found = []
    for name in names:
        device, _, row = name.partition(":")
        if row and not row.isdecimal():
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"--devices {name}: expected NAME or NAME:GID, a number")
        found.append(Verbs(device, int(row) if row else -1))
    return tuple(found[:rails]), tuple(found[-rails:] if rails else [])


def _calibrated(setup: Setup, small: bool) -> tuple[int, int]:
    """(best bytes per call of the limit, ns of a run with it)"""
    shortest = {
        call_bytes: min(setup.plain(call_bytes).round_ns[0] for _ in range(_CALIBRATIONS))
        for call_bytes in (_CALL_BYTES[:1] if small else _CALL_BYTES)
    }
    best = min(shortest, key=lambda call_bytes: shortest[call_bytes])
    return best, shortest[best]


def _pair(setup: Setup, number: int, call_bytes: int, rounds: int, gap_ns: int) -> Pair:
    """The order changes from pair to pair, so that a drift of the machine hits both."""
    wrong = 0
    runs: dict[str, Run] = {}
    for what in ("limit", "ours") if number % 2 == 0 else ("ours", "limit"):
        setup.receiver.ask("wipe_sample", number)
        runs[what] = setup.transfer(rounds, gap_ns) if what == "ours" else setup.plain(call_bytes, rounds, gap_ns)
        wrong += setup.receiver.ask("check_sample", number)
    return Pair(runs["limit"], runs["ours"], setup.gather_seconds(), wrong)


def _figures(case: Case, pairs: list[Pair], rounds: int) -> dict[str, Any]:
    gigabytes = case.nbytes / 1e9
    ours_ns = sorted(ns for pair in pairs for ns in pair.ours.round_ns)
    limit_ns = sorted(ns for pair in pairs for ns in pair.limit.round_ns)
    ratio = statistics.median(pair.ratio for pair in pairs)
    ours_cpu = statistics.median(pair.ours.usage.all for pair in pairs) / rounds / gigabytes
    limit_cpu = statistics.median(pair.limit.usage.all for pair in pairs) / rounds / gigabytes
    copy_cpu = statistics.median(pair.copy_seconds for pair in pairs) / gigabytes
    copies = (
        2 if case.private else int(case.route is Route.RELAY_ALL)
    )  # private: into a lane, and out of a bounce buffer
    runs = [run for pair in pairs for run in (pair.limit, pair.ours)]
    spent = statistics.fmean(sum(run.round_ns) / 1e9 + rounds * _gap(rounds) for run in runs)
    return {
        "gigabytes_per_second": case.nbytes / statistics.median(ours_ns),
        "limit_gigabytes_per_second": case.nbytes / statistics.median(limit_ns),
        "ratio": ratio,
        "ratio_quartiles": _quartiles([pair.ratio for pair in pairs]),
        "latency_ratio": 1 / ratio,
        "p50_us": _percentile(ours_ns, 50) / 1e3,
        "p99_us": _percentile(ours_ns, 99) / 1e3,
        "limit_p50_us": _percentile(limit_ns, 50) / 1e3,
        "limit_p99_us": _percentile(limit_ns, 99) / 1e3,
        "cpu_seconds_per_gigabyte": ours_cpu,
        "limit_cpu_seconds_per_gigabyte": limit_cpu,
        "copy_cpu_seconds_per_gigabyte": copy_cpu,
        "bound": limit_cpu / (limit_cpu + copies * copy_cpu),
        "others_cores": max(0.0, statistics.fmean(run.usage.others for run in runs) / spent),
    }


def _gap(rounds: int) -> float:
    return _SMALL_GAP_NS / 1e9 if rounds > 1 else 0.0


def _percentile(in_order: list[int], percent: int) -> int:
    return in_order[min(len(in_order) - 1, len(in_order) * percent // 100)]


def _quartiles(values: list[float]) -> list[float]:
    in_order = sorted(values)
    return [in_order[len(in_order) // 4], in_order[(3 * len(in_order)) // 4]]


def _described(args: argparse.Namespace, case: Case) -> str:
    return (
        f"{case.blocks:,} block{'s' if case.blocks > 1 else ''} of {size(case.block_bytes)} ({size(case.nbytes)}),"
        f" {args.route}, {case.rails}"
        f" rail{'s' if case.rails > 1 else ''}, {'private' if case.private else 'shared'} memory,"
        f" {args.congestion if args.nic == 'tcp' else args.nic}"
    )


def _report(result: dict[str, Any]) -> str:
    small = result["bytes"] <= _SMALL_BYTES
    low, high = result["ratio_quartiles"]
    ratio = f"{result['ratio']:.3f} ({low:.3f} to {high:.3f}), bound {result['bound']:.3f}"
    rows = [["GB/s", f"{result['gigabytes_per_second']:.3g}", f"{result['limit_gigabytes_per_second']:.3g}", ratio]]
    for percentile in ("p50", "p99"):
        ours, its = result[f"{percentile}_us"], result[f"limit_{percentile}_us"]
        rows.append([percentile, _time(ours), _time(its), f"{ours / its:.2f}"])
    if not small:
        ours, its, copy = (result[f"{whose}cpu_seconds_per_gigabyte"] for whose in ("", "limit_", "copy_"))
        rows.append(["CPU s/GB", f"{ours:.3f}", f"{its:.3f}", f"{ours / its:.2f}; copy {copy:.3f}"])
    lines = [
        table(["", "RAILRELAY", "LIMIT", "RATIO"], rows),
        f"{result['pairs']} pairs, {size(result['lane_bytes'])} through lanes, limit with"
        f" {size(result['limit_bytes_per_call'])} per call;"
        f" {'content verified' if result['verified'] else str(result['wrong_blocks']) + ' WRONG BLOCKS'}",
    ]
    if result["nic"] == "verbs":
        lines.append("the limit is loopback TCP: what the devices can do says ib_write_bw")
    if result["others_cores"] > _NOISE_CORES:
        lines.append(f"other processes used {result['others_cores']:.2f} cores meanwhile: the figures are noisy")
    lines += [f"target: {target['text']}" for target in result["targets"]]
    return "\n".join(lines)


def _time(us: float) -> str:
    return f"{us / 1e3:.1f} ms" if us >= 10_000 else f"{us:.1f} us"
