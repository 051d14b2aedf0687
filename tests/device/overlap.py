"""Does the copy hide behind the NIC? `railrelay bench overlap` for each shape, in one set of daemons and engines."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from device import systems
from device.report import Options, Report, Skipped
from railrelay.client.cli import _bench_overlap
from railrelay.client.cli._bench_overlap import GPU_WAYS, REACHED, VALUES, Setup, Shape

KIB: Final = 1024
_PAGES_LIMIT: Final = 1.05
_LOADED_LIMIT: Final = 1.10
_SLOWED_LIMIT: Final = 0.01
_ENGINES_BYTES: Final = 32 * KIB

PAGES: Final = {
    "pages 72 KiB x 61 rows": Shape(72 * KIB, 480, 61),
    "pages 16 KiB x 160 rows": Shape(16 * KIB, 832, 160),
    "pages 4 KiB x 160 rows": Shape(4 * KIB, 3328, 160),
    "pages 18 KiB x 61 rows": Shape(18 * KIB, 1920, 61),
}
IRREGULAR: Final = {  # and the limit, as a multiple of the time at NIC rate
    "blocks of 64 KiB": (Shape(64 * KIB, 32768), 1.05),
    "blocks of 16 KiB": (Shape(16 * KIB, 131072), 1.15),
    "blocks of 4 KiB": (Shape(4 * KIB, 524288), 1.15),
    "256 B pieces that join into 4 KiB": (Shape(256, 262144, 16, pitch=512, tokens=True), 1.25),
    "pages 1,152 B x 61 rows": (Shape(1152, 15360, 61), 1.25),
}


def run(report: Report, options: Options) -> None:
    _each(report, options, load=False)


def loaded(report: Report, options: Options) -> None:
    if not options.gpus or options.stand_in:
        raise Skipped("matmuls need a GPU and torch")
    _each(report, options, load=True)


def _each(report: Report, options: Options, *, load: bool) -> None:
    """Beside matmuls the NIC must not compute, as no NIC does: what copy engines can carry is left to them alone, and
    its copies go from one GPU to another. Own-rail direct then is a copy within one: only idle it is a limit."""
    irregular = {name: shape for name, (shape, _) in IRREGULAR.items()}
    if not load:
        _some(report, options, {**PAGES, **irregular}, "auto", load=False)
        return
    long = {name: shape for name, shape in irregular.items() if shape.piece_bytes >= _ENGINES_BYTES}
    _some(report, options, {**PAGES, **long}, "engines", load=True)
    short = {name: shape for name, shape in irregular.items() if name not in long}
    _some(report, options, short, "auto", load=True)


def _some(report: Report, options: Options, shapes: dict[str, Shape], nic_copies: str, *, load: bool) -> None:
    """A shape that fails costs new daemons and engines, not the other shapes."""
    if options.small:
        shapes = {
            name: replace(shape, count=max(1, shape.count // (256 if options.gpus else 64)))
            for name, shape in shapes.items()
        }
    waiting = list(shapes)
    nbytes = max(shape.pieces * shape.step for shape in shapes.values())
    gpus, rate = systems.gpus_of(options), systems.rates(options)
    chosen = _bench_overlap.Options(gpus, rate, nic_copies=nic_copies, far=load)
    while waiting:
        try:
            with _bench_overlap.ready(nbytes, chosen) as setup:
                while waiting:
                    name = waiting.pop(0)
                    began = time.monotonic()
                    _measure(report, setup, name, shapes[name], options, load=load)
                    print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
            print("\n".join(setup.logs), flush=True)
        except Exception as failure:  # noqa: BLE001 - the other shapes go on
            traceback.print_exc()
            report.row(name, f"failed: {failure}", "", good=False)


def _measure(report: Report, setup: Setup, name: str, shape: Shape, options: Options, *, load: bool) -> None:
    beside = () if not load else VALUES if name in PAGES else VALUES[:1]
    found = setup.measure(shape, 3 if options.small else 9, load=beside)
    copied = found["copied_by"]
    whole = sum(copied.values()) or 1
    ways = " + ".join(f"{way} {copied[way] / whole:.0%}" for way in GPU_WAYS if way in copied) or "the CPU"
    checked = "" if found["verified"] else f"; {found['wrong_pieces']} WRONG PIECES"
    judge: Callable[..., None] = _judge_loaded if load else _judge
    judge(report, name, found, f"{ways}{checked}")


def _judge(report: Report, name: str, found: dict[str, Any], ways: str) -> None:
    figure = (
        f"{found['relay_to_direct']:.3f} x direct, {found['relay_to_rate']:.3f} x NIC rate;"
        f" direct {found['direct_ms']:.2f} ms ({found['direct_reached']:.3f} of the rate),"
        f" relay {found['relay_ms']:.2f}, feeder alone {found['feeder_ms']:.2f}; {found['hidden']:.1%} hidden;"
        f" late copies cost the NIC {found['nic_late_share']:.1%}; {ways}"
    )
    if name in PAGES:
        counts = found["counts"]
        limit = f"<= {_PAGES_LIMIT} x direct" if counts else f"direct below {REACHED}: does not count"
        good = found["relay_to_direct"] <= _PAGES_LIMIT if counts else None
    else:
        most = IRREGULAR[name][1]
        limit, good = f"<= {most} x NIC rate", found["relay_to_rate"] <= most
    report.timed(name, figure, limit, good, sound=found["verified"], **found)


def _judge_loaded(report: Report, name: str, found: dict[str, Any], ways: str) -> None:
    cool = found["load"]["zeros"]
    slowed = max(cool["matmul_slowdown"].values())
    figure = "; ".join([*(_beside(values, load) for values, load in found["load"].items()), ways])
    limit, good = "", None
    if name in PAGES and found["counts"]:
        limit = f"zeros: <= {_LOADED_LIMIT} x direct, matmuls <= {_SLOWED_LIMIT:.0%} slower"
        good = cool["relay_to_idle_direct"] <= _LOADED_LIMIT and slowed <= _SLOWED_LIMIT
    report.timed(f"{name}, loaded", figure, limit, good, sound=found["verified"], **found)


def _beside(values: str, load: dict[str, Any]) -> str:
    slower = ", ".join(f"{share:.2%} ({engine})" for engine, share in load["matmul_slowdown"].items())
    return (
        f"beside matmuls of {values}: {load['relay_to_idle_direct']:.3f} x direct idle, {load['relay_to_rate']:.3f} x"
        f" NIC rate, matmuls slower by {slower}, late copies cost the NIC {load['nic_late_share']:.1%}"
    )
