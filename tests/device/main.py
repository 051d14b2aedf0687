"""Measures on this machine's GPUs what the design promises of them, section after section, each with a time limit; the
tables come last. Logs, rows and RESULTS.md go to $OUT (default: /tmp/railrelay-device). NICs are emulated throughout.

Without a GPU --host runs what can be run on host memory; the figures then say nothing about GPUs. --stand-in runs the
GPU sections on the tests' stand-in for the driver, to try the sections themselves."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import faulthandler
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, util
from pathlib import Path
from typing import IO, Any, Final

from device.report import NOT_MEASURED, Options, Report, Row, Skipped, read

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
OUT: Final = Path(os.environ.get("OUT") or "/tmp/railrelay-device")
BUILT: Final = Path(tempfile.gettempdir()) / f"railrelay-device-build-{os.getuid()}"
_TOTAL_S: Final = 570.0
_LEAST_S: Final = 10.0
_DAY_S: Final = 86_400.0
_MOST_GPUS: Final = 64
_KILL_S: Final = 5.0
_STACKS_S: Final = 2.0
_STRESS_MORE_S: Final = 60  # than --seconds: to start, and to end when something hangs
_TAIL_LINES: Final = 25
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class Section:
    text: str
    limit_s: int
    module: str
    function: str = "run"
    host: bool = False  # also without a GPU


SECTIONS: Final = {
    "tests": Section("the tests of tests/gpu", 240, "gpu_tests"),
    "fill": Section("slots filled, against a bare loop, and each way alone", 90, "fill"),
    "ordering": Section("slots of all ways on one stream, read by another process", 120, "ordering"),
    "doorbell": Section("from the doorbell to the rail", 60, "doorbell", host=True),
    "overlap": Section("relay against own-rail direct, NICs emulated", 150, "overlap", host=True),
    "alternate": Section("slots of all ways in one lane, through the emulated NIC", 90, "alternate", host=True),
    "kill-engine": Section("kill -9 of the sending engine, again and again", 200, "kill", "engine", host=True),
    "kill-daemon": Section("kill -9 of the daemon, again and again", 200, "kill", "daemon", host=True),
    "memory": Section("GPU memory of the daemon beyond the buffers", 60, "gpu_memory"),
    "local": Section("between engines of one daemon, against memcpy and bare copies", 120, "local", host=True),
    "stress": Section("two engines, both directions at once, every byte checked", 240, "stress", host=True),
    "load": Section("matmuls beside bare copies at a NIC's rate, each way alone", 110, "load"),
    "loaded": Section("the same beside matmuls on all GPUs", 330, "overlap", "loaded"),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="the sections")
    parser.add_argument("--section", nargs="+", choices=SECTIONS, metavar="NAME", help="only these; see --list")
    parser.add_argument(
        "--gpus", type=_within(int, 1, _MOST_GPUS), metavar="N", help="use so many GPUs (default: 2, or what there is)"
    )
    parser.add_argument("--host", action="store_true", help="no GPU: host memory")
    parser.add_argument("--stand-in", action="store_true", help="two GPUs of the stand-in driver of the tests")
    parser.add_argument("--quick", action="store_true", help="small sizes; shows that everything works")
    parser.add_argument(
        "--seconds", type=_within(float, 1, _DAY_S), metavar="S", help="how long stress goes on (default: 180)"
    )
    parser.add_argument(
        "--limit",
        type=_within(float, _LEAST_S, _DAY_S),
        default=_TOTAL_S,
        metavar="S",
        help="for all; what does not fit in is left out, with its reason (default: %(default)g)",
    )
    parser.add_argument("--results", type=_new_file, metavar="FILE", help="writes the tables there too, as Markdown")
    parser.add_argument(
        "--from",
        nargs="+",
        type=_earlier,
        metavar="ROWS",
        dest="earlier",
        help="only print these rows.json of earlier runs",
    )
    parser.add_argument("--one", nargs=2, metavar=("NAME", "ROWS"), help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.list:
        width = max(map(len, SECTIONS))
        for name, section in SECTIONS.items():
            print(
                f"{name:{width}} {section.text}{'' if section.host else ' (needs a GPU)'}; {section.limit_s} s at most"
            )
        return 0
    if args.one:
        return _one(args)
    if args.earlier:
        return _shown(_joined(args.earlier), args.results)
    if args.host and (args.gpus or args.stand_in):
        parser.error("--host uses no GPU: it goes without --gpus and --stand-in")
    if args.seconds and "stress" not in (args.section or SECTIONS):
        parser.error("argument --seconds: is for the section stress only")
    try:
        with _nothing_left_running():
            return _all(args, time.monotonic() + args.limit)
    except RuntimeError as failure:
        print(f"run: {failure}", file=sys.stderr)
        return 2


def _within(kind: Callable[[str], float], least: float, most: float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        found = math.nan
        with contextlib.suppress(ValueError):
            found = kind(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least:g} to {most:g}")
        return found

    return parsed


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: expected a file in a folder that there is and that may be written")
    return path


def _earlier(text: str) -> dict[str, Any]:
    """What a rows.json holds."""
    try:
        facts: dict[str, Any] = json.loads(Path(text).read_text())
        known = {Row(**row).section for row in facts["rows"]} <= set(SECTIONS) and {"date", "text", "gpus"} <= set(
            facts
        )
    except OSError as failure:
        raise argparse.ArgumentTypeError(f"{text}: {failure.strerror}") from None
    except (ValueError, TypeError, KeyError):
        known = False
    if not known:
        raise argparse.ArgumentTypeError(f"{text}: not the rows.json of a run")
    return facts


# ---- one section, in a process of its own ----


def _one(args: argparse.Namespace) -> int:
    name, path = args.one
    section = SECTIONS[name]
    if args.limit > _STACKS_S:  # where it stands, if it is about to be stopped
        faulthandler.dump_traceback_later(args.limit - _STACKS_S)
    options = Options(args.gpus or 0, args.quick, args.stand_in, args.seconds or 0.0)
    function = getattr(import_module(f"device.{section.module}"), section.function)
    given: dict[str, Any] = {
        "report": Report(name, Path(path), options),
        "options": options,
        "library_path": args.library,
    }
    wanted = function.__code__.co_varnames[: function.__code__.co_argcount]
    try:
        if "library" in wanted:
            from device import native

            given["library"] = native.load(args.library)
        function(*(given[argument] for argument in wanted))
    except Skipped as reason:
        given["report"].row(section.text, f"{NOT_MEASURED}{reason}")
    except KeyboardInterrupt:
        return 130
    except Exception as failure:  # noqa: BLE001 - the other sections go on
        traceback.print_exc()
        given["report"].row(section.text, f"failed: {type(failure).__name__}: {failure}", "", good=False)
        return 1
    return 0


# ---- all of them ----


def _all(args: argparse.Namespace, deadline: float) -> int:
    try:
        OUT.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise RuntimeError(f"OUT={OUT}: {failure.strerror}; name a folder that can be made") from None
    environment = _environment(args)
    machine = _machine(environment)
    gpus = _gpus(args, machine)
    print(f"{machine['text']}; {gpus or 'no'} GPU{'s' if gpus != 1 else ''} used", flush=True)
    possible = [name for name, section in SECTIONS.items() if gpus or section.host]
    names = args.section or possible
    if lacking := [name for name in names if name not in possible]:
        raise RuntimeError(f"--section {' '.join(lacking)}: needs a GPU; without --host, or with --stand-in")
    with tempfile.TemporaryDirectory(prefix="railrelay-device-") as work:
        library = _library(Path(work), environment)
        rows: list[Row] = []
        with (OUT / "device.log").open("w") as log:
            for name in names:
                options = ["--gpus", str(gpus)] if gpus else ["--host"]
                options += ["--quick"] * args.quick + ["--stand-in"] * args.stand_in
                limit_s = SECTIONS[name].limit_s
                if name == "stress" and args.seconds:
                    options += ["--seconds", str(args.seconds)]
                    limit_s = int(args.seconds) + _STRESS_MORE_S
                rows += _run(name, options, limit_s, library, Path(work), environment, log, deadline)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    facts = {"date": date, "gpus": gpus, **machine, "rows": [vars(row) for row in rows]}
    (OUT / "rows.json").write_text(json.dumps(facts, indent=1) + "\n")
    (OUT / "RESULTS.md").write_text(markdown(rows, facts))
    print(f"logs are in {OUT}")
    return _shown(facts, args.results)


def _shown(facts: dict[str, Any], results: Path | None) -> int:
    """Prints the tables; the exit status: 1 if a figure is missed, or if there is none."""
    rows = [Row(**row) for row in facts["rows"]]
    if results:
        results.write_text(markdown(rows, facts))
    print(tables(rows))
    missed = [row for row in rows if row.good is False]
    judged = sum(row.good is not None for row in rows)
    print(f"\n{judged - len(missed)} of {judged} figures are within their limits")
    left_out = dict.fromkeys(row.section for row in rows if not row.is_measured)
    if left_out:
        print(f"not all was measured of: {', '.join(left_out)}")
    if not any(row.is_measured for row in rows):
        print("nothing was measured", file=sys.stderr)
        return 1
    return 1 if missed else 0


def _joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of runs on one kind of machine; a section that was run again counts as it was last."""
    by_section: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        by_section |= {name: [row for row in run["rows"] if row["section"] == name] for name in _sections(run)}
    rows = [row for name in SECTIONS for row in by_section.get(name, [])]
    dates = dict.fromkeys(run["date"] for run in runs)
    machines = dict.fromkeys(run["text"] for run in runs)
    return {**runs[-1], "date": ", ".join(dates), "text": "; ".join(machines), "rows": rows}


def _sections(run: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["section"] for row in run["rows"]))


def _run(
    name: str, options: list[str], limit_s: int, library: Path, work: Path, environment: dict[str, str], log: IO[str],
    deadline: float,
) -> list[Row]:  # fmt: skip
    section = SECTIONS[name]
    path = work / f"{name}.rows"
    left = deadline - time.monotonic()
    if left < _LEAST_S:
        return [Row(name, section.text, f"{NOT_MEASURED}no time left")]
    limit = min(limit_s, left)
    print(f"== {name}: {section.text}", flush=True)
    log.write(f"== {name}\n")
    log.flush()
    at, began = log.tell(), time.monotonic()
    command = [sys.executable, str(HERE / "run"), *options, "--limit", str(limit), "--library", str(library)]
    command += ["--one", name, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=work)
    code: int | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(limit)
    end_children(process)
    rows = read(path)
    took = time.monotonic() - began
    if code is None:
        rows.append(Row(name, section.text, f"stopped after {limit:.0f} s", "", good=False))
    elif code and not any(row.good is False for row in rows):
        rows.append(Row(name, section.text, f"ended with {code}", "", good=False))
    log.flush()
    text = Path(log.name).read_text(errors="replace")[at:].splitlines()
    if code != 0:
        print("\n".join(f"   {line}" for line in text[-_TAIL_LINES:]), flush=True)
    print(f"== {name}: {took:.0f} s", flush=True)
    return rows


def end_children(process: subprocess.Popen[bytes] | None = None) -> None:
    """Everything that descends from this process: first what it started, then what that left behind."""
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _KILL_S
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        while descendants() and time.monotonic() < deadline:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)
        if not descendants():
            return


def descendants() -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


@contextlib.contextmanager
def _nothing_left_running() -> Iterator[None]:
    """Orphans of sections become children of this process, and end with it."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        end_children()


# ---- what there is, and what is built ----


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """Of the sections: with the package, built here if it is not installed, and the stand-in driver."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if not _is_installed():
        environment["PYTHONPATH"] = f"{_build_package()}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    if args.stand_in:
        environment["LD_LIBRARY_PATH"] = f"{_build_stand_in()}{os.pathsep}{environment.get('LD_LIBRARY_PATH', '')}"
    return environment


def _is_installed() -> bool:
    try:
        return util.find_spec("railrelay.daemon.plane") is not None
    except ModuleNotFoundError:
        return False


def _build_package() -> Path:
    print("building railrelay", flush=True)
    with tempfile.TemporaryDirectory() as copy:
        tree = Path(copy) / "railrelay"
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.egg-info", "*.so", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        shutil.rmtree(BUILT, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
        done = subprocess.run(
            [*command, "--target", BUILT, tree], capture_output=True, text=True, check=False, timeout=300
        )
    if done.returncode:
        raise RuntimeError(f"railrelay does not build here; install it first\n{done.stderr[-2000:]}")
    return BUILT


def _build_stand_in() -> Path:
    directory = BUILT.with_name(f"{BUILT.name}-stand-in")
    directory.mkdir(exist_ok=True)
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    for source, name in (("cuda_driver.c", "libcuda.so.1"), ("nvrtc.c", "libnvrtc.so.13")):
        paths = ["-o", str(directory / name), str(HERE.parent / "helpers" / source)]
        command = ["gcc", *flags, f"-Wl,-soname,{name}", *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in driver does not build\n{done.stderr[-2000:]}")
    return directory


def _library(work: Path, environment: dict[str, str]) -> Path:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from device import native;"
        " print(native.build(Path(sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, HERE.parent, work], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr.splitlines()[-1] if done.stderr else "native.py does not build")
    return Path(done.stdout.strip())


def _driver_version(text: str) -> str:
    found = re.search(r"\d+\.\d+(\.\d+)*", text)
    return found[0] if found else "unknown"


def _machine(environment: dict[str, str]) -> dict[str, Any]:
    """What the sections run on, asked of the driver in a process of its own."""
    code = (
        "import json\n"
        "from railrelay.client import cuda\n"
        "from cuda.bindings import driver\n"
        "missing = cuda.missing()\n"
        "count = 0 if missing else cuda.count()\n"
        "names = [driver.cuDeviceGetName(64, n)[1].decode().strip(chr(0) + ' ') for n in range(count)]\n"
        "version = 0 if missing else driver.cuDriverGetVersion()[1]\n"
        "print(json.dumps({'missing': missing, 'names': names, 'cuda': version}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    lines = done.stdout.splitlines()
    words = done.stderr.strip().splitlines() or ["no answer"]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"missing": words[-1], "names": [], "cuda": 0}
    kernel_module = ""
    with contextlib.suppress(OSError, IndexError):
        kernel_module = f", driver {_driver_version(Path('/proc/driver/nvidia/version').read_text())}"
    gpus = f"no GPU ({found['missing']})"
    if names := found["names"]:
        major, minor = divmod(found["cuda"], 1000)
        gpus = f"{len(names)} x {names[0]}{kernel_module}, CUDA {major}.{minor // 10}"
    text = f"{gpus}, {len(os.sched_getaffinity(0))} CPU cores, Python {platform.python_version()}"
    return {**found, "text": text}


def _gpus(args: argparse.Namespace, machine: dict[str, Any]) -> int:
    there = 0 if args.host else len(machine["names"])
    if args.gpus and args.gpus > there:
        raise RuntimeError(f"--gpus {args.gpus}: this machine has {there}")
    if not there and not args.host:
        raise RuntimeError(f"no GPU: {machine['missing']}; --host measures on host memory")
    return args.gpus or min(there, 2)


# ---- the tables ----


def tables(rows: Sequence[Row]) -> str:
    lines = []
    for name in dict.fromkeys(row.section for row in rows):
        lines += ["", f"{name}: {SECTIONS[name].text}"]
        for row in (row for row in rows if row.section == name):
            verdict = " " * 4 if row.good is None else "good" if row.good else "NOT "
            limit = f"  [{row.limit}]" if row.limit else ""
            lines.append(f"  {verdict} {row.case}: {row.figure}{limit}")
    return "\n".join(lines)


def markdown(rows: Sequence[Row], facts: dict[str, Any]) -> str:
    template = (HERE / "results.md.in").read_text()
    blocks = []
    for name in dict.fromkeys(row.section for row in rows):
        lines = [f"## {name}: {SECTIONS[name].text}", "", "| case | figure | limit | |", "|---|---|---|---|"]
        for row in (row for row in rows if row.section == name):
            verdict = "" if row.good is None else "met" if row.good else "**missed**"
            lines.append(f"| {_cell(row.case)} | {_cell(row.figure)} | {_cell(row.limit)} | {verdict} |")
        blocks.append("\n".join(lines))
    one = "One GPU was used: sender and relay memory are on the same GPU.\n\n" if facts["gpus"] == 1 else ""
    return template.format(date=facts["date"], machine=facts["text"], one=one, tables="\n\n".join(blocks))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
