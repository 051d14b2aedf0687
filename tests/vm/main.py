"""Real RDMA verbs without an RDMA NIC: boots a virtual machine with soft-RoCE devices as rails, runs the tests of
tests/verbs in it and what tests/system demands of every NIC, and exits with pytest's status. All further arguments go
to pytest; paths among them replace these tests.

Takes about a minute to prepare the first time, then 10 to 120 s to boot. The machine is emulated, needs no privileges
and changes no file of the host. Other statuses: 5, no test was run of a folder or file that should be, be it that all
skipped; 123, something is missing; 124, over the limit; 125, the machine did not boot; 126, it crashed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final
from xml.etree import ElementTree

from vm import interpreter, kernel, packages
from vm.interpreter import ROOT
from vm.machine import CRASHED, NOT_BOOTED, OVER_LIMIT, Machine, addresses
from vm.packages import NotPrepared

NOTHING_RAN: Final = 5
NOT_PREPARED: Final = 123
_LIMIT_S: Final = 840
_STACKS_S: Final = 360  # a test of this length hangs; shorter ones are only emulated
_TESTS: Final = (
    "tests/verbs",
    *(f"tests/system/test_{name}.py" for name in ("conformance", "settling", "lost_connections")),
)
_CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "railrelay-vm"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--bench", action="store_true", help="prints MB/s of bare verbs and of railrelay as JSON")
    parser.add_argument("--shell", metavar="COMMAND", help="runs this instead, in the current folder")
    parser.add_argument("--rails", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, metavar="S", help="for all (default: %(default)s)")
    parser.add_argument("--python", type=Path, metavar="PATH", help="has railrelay and pytest (default: built for it)")
    parser.add_argument("--cache", type=Path, default=_CACHE, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="the folder of the run: kernel log, files of /run/vm")
    args, pytest_args = parser.parse_known_args(words)
    if (args.shell or args.bench) and pytest_args:
        parser.error(f"unknown: {' '.join(pytest_args)}")
    deadline = time.monotonic() + args.limit
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        packages.installed()
        machine_kernel = kernel.prepared(args.cache)
        python = interpreter.checked(args.python.absolute() if args.python else interpreter.built(args.cache))
    except NotPrepared as lack:
        _say(f"run: {lack}")
        return NOT_PREPARED
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=args.cache))
    try:
        return _run(args, pytest_args, Machine(machine_kernel, folder, args.rails), python, deadline)
    except KeyboardInterrupt:
        _say("interrupted; the machine is gone")
        return 130
    finally:
        if args.keep:
            _say(f"vm: kept {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _run(args: argparse.Namespace, pytest_args: list[str], machine: Machine, python: Path, deadline: float) -> int:
    output = sys.stderr.buffer if args.bench else sys.stdout.buffer
    environment = {
        "PATH": f"{python.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "TMPDIR": "/run/tmp",
        "PYTHONUNBUFFERED": "1",
        "RAILRELAY_TEST_FORKS": "1",
        "RAILRELAY_VERBS_RAILS": ",".join(f"{device}={address}" for device, address in addresses(args.rails).items()),
    }
    if args.shell:
        command = f"cd {shlex.quote(os.getcwd())} || exit\n{args.shell}"
    elif args.bench:
        command = shlex.join([str(python), str(ROOT / "tests" / "vm" / "bench.py"), "/run/vm/figures.json"])
    else:
        command = f"cd {shlex.quote(str(ROOT))} || exit\n" + shlex.join(_pytest(python, pytest_args))
    began = time.monotonic()
    status = machine.run(command, environment, deadline - began, output)
    _say(f"vm: the machine ran for {time.monotonic() - began:.1f} s")
    if status == NOT_BOOTED:
        _say(f"run: the machine did not boot; the last that it said:\n{machine.tail()}")
    elif status == OVER_LIMIT:
        _say(f"run: not done within {args.limit:g} s")
    elif status == CRASHED:
        _say(f"run: the machine crashed; the last that it said:\n{machine.tail()}")
    if args.bench and (machine.folder / "figures.json").exists():
        print(json.dumps(json.loads((machine.folder / "figures.json").read_text())))
    if status == 0 and not args.shell and not args.bench:
        missing = _not_run(machine.folder / "junit.xml", () if pytest_args else _TESTS)
        if missing:
            _say(f"run: no test was run of {', '.join(missing)}")
            return NOTHING_RAN
    return status


def _pytest(python: Path, args: list[str]) -> list[str]:
    named = any("/" in arg and (ROOT / arg.partition("::")[0]).exists() for arg in args)  # -k client is no path
    paths = [] if named else _TESTS
    # hypothesis works without its plugin, which takes 20 s to load under emulation
    left_out = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    slow = ["-o", f"faulthandler_timeout={_STACKS_S}"]
    color = ["--color=yes"] if sys.stdout.isatty() else []
    return [str(python), "-m", "pytest", *left_out, *slow, *color, "--junitxml=/run/vm/junit.xml", *args, *paths]


def _not_run(report: Path, wanted: Sequence[str]) -> list[str]:
    """Those of ``wanted`` of which every test was skipped, or there is none; "tests" if there is none at all."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    ran = {case.get("classname", "") for case in cases if case.find("skipped") is None}
    modules = {path: path.removesuffix(".py").replace("/", ".") for path in (*wanted, "tests")}
    return [path for path, name in modules.items() if not any(f"{one}.".startswith(f"{name}.") for one in ran)]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
