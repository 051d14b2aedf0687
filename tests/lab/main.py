"""The incast laboratory: what a fabric does to KV transfers on each route, with real daemons and engines on this
machine.

A prefill and a decode node are network namespaces with one NIC a rail, all of one slow rate, so that the links are
the limit and not the cores; "cpu" shows how much of the machine was used. Between them is a fabric with a leaf switch
a rail and a spine: "lossless" has shared buffers and priority flow control and counts pauses (switch.c), "lossy" has
shallow queues and drops. All routes of a case run one after the other with the same traffic, and every byte is
checked at decode.

Needs root, iproute2 and a C compiler; --figures needs matplotlib (pip install '.[lab]')."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from lab import cases, fabric, measure
from lab.cases import CASES, ROUTES, Case
from lab.fabric import KINDS, Network
from railrelay.client.cli import _nodes
from railrelay.client.cli._numbers import whole
from railrelay.client.cli._table import table
from railrelay.client.errors import RelayError

_SERIES: Final = (
    "victim_quantiles_ms",
    "chunk_quantiles_ms",
    "quantiles_ms",
    "series_s",
    "series_received",
    "series_paused",
)
_MBIT: Final = 1_000_000
_LATE_MS: Final = 40  # a stall of the machine this long empties the NICs' queues
_OTHERS_SHARE: Final = 0.35
_COMPILER: Final = os.environ.get("CC", "cc")
_TUN: Final = Path("/dev/net/tun")
_TOOLS: Final = {"iproute2": ("ip", "tc"), "gcc libc6-dev": (_COMPILER,)}
_PATH: Final = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # of root, whoever asks
_FAILURES: Final = (RuntimeError, RelayError, OSError, AssertionError, subprocess.SubprocessError)
CONGESTION_CONTROLS: Final = ("reno", "bbr", "cubic")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="names of cases and routes")
    parser.add_argument("--case", choices=CASES, default="smoke", help="default: %(default)s")
    parser.add_argument("--fabric", choices=KINDS, default="lossless", help="default: %(default)s")
    parser.add_argument("--routes", help="separated by commas (default: those of the case)")
    parser.add_argument("--cc", choices=CONGESTION_CONTROLS, default="reno", help="default: %(default)s")
    parser.add_argument(
        "--rate", type=whole(100_000), default=200, metavar="MBIT", help="of a NIC, Mbit/s (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="writes <date>-<case>-<fabric>-<cc>.png and .json")
    args = parser.parse_args(words)
    if args.list:
        print(_listing())
        return 0
    if lacks := missing(args.cc, figures=args.figures is not None):
        _say("\n".join(["run: this is missing:", *(f"  {lack}" for lack in lacks)]))
        return 2
    case = CASES[args.case]
    routes = args.routes.split(",") if args.routes else list(case.routes)
    for route in routes:
        if route not in ROUTES:
            parser.error(f"no route {route!r}; there are {', '.join(ROUTES)}")
    try:
        os.environ["PATH"] = _PATH
        with _nodes.ended_by_signals():
            result = run(case, args.fabric, routes, args.cc, args.rate * _MBIT)
    except KeyboardInterrupt:
        _say("interrupted; namespaces, daemons and engines are gone")
        return 130
    except _FAILURES as failure:
        _say(f"run: {_reason(failure)}")
        return 1
    if args.figures and result["routes"]:
        from lab import figures

        args.figures.mkdir(parents=True, exist_ok=True)
        stem = f"{result['date'][:10]}-{case.name}-{args.fabric}-{args.cc}"
        (args.figures / f"{stem}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
        figures.draw(result, args.figures / f"{stem}.png")
    if args.json:
        print(json.dumps(_without_series(result), indent=2))
    elif result["routes"]:
        print(report(result))
    for route, reason in result["failed"].items():
        _say(f"run: no figures of {route}: {reason}")
    lossless_drops = args.fabric == "lossless" and any(found["switch_drops"] for found in result["routes"].values())
    if lossless_drops:
        _say("run: the lossless fabric dropped frames (switch_drops); these figures do not count")
    return 1 if lossless_drops or result["failed"] else 0


def missing(congestion: str, *, figures: bool) -> list[str]:
    """What this machine lacks for a run, each with the next step."""
    lacks = []
    if os.geteuid() != 0:
        lacks.append(f"root, for network namespaces: sudo {sys.executable} {sys.argv[0]} ...")
    elif not _TUN.exists():
        lacks.append(f"{_TUN}: modprobe tun, or give the device to the container")
    for package, tools in _TOOLS.items():
        if absent := [tool for tool in tools if shutil.which(tool, path=_PATH) is None]:
            lacks.append(f"{' and '.join(absent)}: apt install {package}")
    if congestion not in (available := _nodes.congestion_controls()):
        lacks.append(f"{congestion} in this kernel, which has {' '.join(available)}: modprobe tcp_{congestion}")
    if figures and importlib.util.find_spec("matplotlib") is None:
        lacks.append(f"matplotlib, for --figures: {sys.executable} -m pip install '.[lab]'")
    return lacks


def run(case: Case, kind: str, routes: Sequence[str], congestion: str, bits_per_second: int) -> dict[str, Any]:
    network = Network(2, case.rails, bits_per_second, congestion)
    traffic = case.make(network.line_bytes_per_second)
    found: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        on = stack.enter_context(KINDS[kind](network))
        directory = Path(stack.enter_context(fabric.scratch()))
        for route in routes:
            try:
                found[route] = measure.measure(traffic, on, route, directory)
            except _FAILURES as failure:  # it costs the others nothing
                failed[route] = _reason(failure)
                _say(f"{case.name} {kind} {route}: failed: {failed[route]}")
                continue
            _say(f"{case.name} {kind} {route}: {json.dumps(_brief(found[route]))}")
            for disturbance in disturbances(found[route]):
                _say(f"{route}: {disturbance}; if its figures are odd, measure again")
        described = on.describe()
    return {
        "case": case.name,
        "text": case.text,
        "fabric": kind,
        "fabric_text": described,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mbit_per_second": bits_per_second / _MBIT,
        "congestion": congestion,
        "window_bytes": network.window_bytes,
        "geometry": measure.GEOMETRY,
        "cores": os.cpu_count(),
        "routes": found,
        "failed": failed,
    }


def disturbances(found: dict[str, Any]) -> list[str]:
    """What else this machine did meanwhile that may have changed the figures."""
    said = []
    for phase, of in (("", found), (" (paced)", found.get("paced", {}))):
        if (late_ms := of.get("switch_late_max_ms", 0.0)) > _LATE_MS:
            said.append(f"the switch did not run for {late_ms:.0f} ms{phase}")
        if (others := of.get("machine_cpu_share", 0.0) - of.get("cpu_share", 0.0)) > _OTHERS_SHARE:
            said.append(f"other processes used {others:.0%} of the cores{phase}")
    return said


def report(result: dict[str, Any]) -> str:
    lossless = result["fabric"] == "lossless"
    head = ["ROUTE", "SECONDS", "SHARE", "P50 MS", "P99 MS"]
    head += ["PAUSE MS NICS", "FABRIC", "LATE MS"] if lossless else ["DROPS"]
    head += ["RETRANSMITS", "CPU", "MACHINE"]
    extras = {
        "victim_kept": "VICTIM KEEPS",
        "victim_p99_ms": "VICTIM P99 MS",
        "chunk_mean_ms": "CHUNK MEAN MS",
        "chunk_p99_ms": "CHUNK P99 MS",
    }
    shown = [key for key in extras if any(key in found for found in result["routes"].values())]
    paced = any("paced" in found for found in result["routes"].values())
    rows = []
    for route, found in result["routes"].items():
        row = [route, f"{found['seconds']:.2f}", f"{found['share_of_line_rate']:.3f}"]
        row += [f"{found['p50_ms']:.0f}", f"{found['p99_ms']:.0f}"]
        row += (
            [f"{found['pause_ms_nics']:.0f}", f"{found['pause_ms_fabric']:.0f}", f"{found['switch_late_max_ms']:.0f}"]
            if lossless
            else [found["switch_drops"]]
        )
        row += [found["retransmits"], f"{found['cpu_share']:.0%}", f"{found['machine_cpu_share']:.0%}"]
        row += [f"{found[key]:.2f}" if key == "victim_kept" else f"{found[key]:.0f}" for key in shown]
        if paced:
            of = found["paced"]
            row += [
                f"{of['p50_ms']:.0f}",
                f"{of['p99_ms']:.0f}",
                f"{of['pause_ms']:.0f}" if lossless else of["switch_drops"],
            ]
        rows.append(row)
    after = ["PACED P50", "P99", "PAUSE" if lossless else "DROPS"] if paced else []
    some = next(iter(result["routes"].values()))
    return (
        f"{result['case']}: {result['text']}\n"
        f"{result['fabric']}: {result['fabric_text']}; NICs of {result['mbit_per_second']:g} Mbit/s, MTU"
        f" {fabric.MTU_BYTES}, {result['congestion']}; {some['gigabytes']:.2f} GB in {some['transfers']} transfers,"
        f" every byte checked\n\n{table([*head, *(extras[key] for key in shown), *after], rows)}"
    )


def _listing() -> str:
    return "\n".join(
        [
            "cases",
            *(f"  {case.name:<10} {case.text}" for case in CASES.values()),
            "routes",
            *(f"  {name:<10} {how.text}" for name, how in cases.ROUTES.items()),
        ]
    )


def _reason(failure: BaseException | None) -> str:
    """With what had failed before, if tidying up after it failed too."""
    reasons = []
    while failure is not None:
        reasons.append(str(failure) or type(failure).__name__)
        failure = None if failure.__suppress_context__ else failure.__context__
    return "; after: ".join(reasons)


def _without_series(result: dict[str, Any]) -> dict[str, Any]:
    routes = {route: _brief(found) for route, found in result["routes"].items()}
    return result | {"routes": routes}


def _brief(found: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _brief(value) if isinstance(value, dict) else value for key, value in found.items() if key not in _SERIES
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
