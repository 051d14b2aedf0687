"""Coverage-guided fuzzing of what clients and peers can say to a daemon: `tests/fuzz/run --seconds 60`.

    words     what a client writes into its shared memory, cuts off, and asks for, on
              TCP and RDMA rails                                                       libFuzzer, ASan, UBSan
    frames    what a peer sends on a TCP rail connection, and answers                  libFuzzer, ASan, UBSan
    messages  the same of an RDMA connection: immediates, messages, bounce memory      libFuzzer, ASan, UBSan
    control   messages and descriptors on the control socket                           atheris
    peers     the handshake of daemons, with secrets and TLS, their messages, and
              the preamble of rail connections                                         atheris
    config    the configuration file                                                   atheris

Two well-behaved clients transfer meanwhile: their bytes must arrive, and none may be where it must not be. Starts with
tests/fuzz/corpus, which the tests run again. What finds a fault stays there; --keep adds what reached new code, too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final, NoReturn

from helpers.nodes import SHM

from fuzz.scene import INSTANCES
from fuzz.targets import (
    C_TARGETS,
    PYTHON_TARGETS,
    TARGETS,
    build,
    builds,
    corpus,
    environment,
    has_verbs,
    keep,
    python_target,
    unpack,
)
from railrelay.client.cli._numbers import whole

LONGEST_INPUT: Final = 1024
FLAGS: Final = (f"-max_len={LONGEST_INPUT}", "-handle_bus=0")  # SIGBUS is the daemon's own
KEPT_BYTES: Final = 400
INPUT_LIMIT_S: Final = 60
PROGRESS_S: Final = 15.0
_NO_INPUT: Final = "int LLVMFuzzerTestOneInput(void) { return 0; }"
_STATUS: Final = re.compile(r"#(\d+)\s+\S+\s+cov: (\d+)")
_running: Final[list[subprocess.Popen[bytes]]] = []
_FINDING: Final = re.compile(r"AssertionError|ERROR: |runtime error: |Uncaught|fuzz: |a transfer of|bytes ")


@dataclass
class Outcome:
    target: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    inputs: int = 0
    branches: int = 0
    found: list[str] = field(default_factory=list)
    said: str = ""


def main() -> int:
    options = _options()
    lacking = _lacking(options.target)
    if lacking:
        print(f"fuzz: {lacking}")
        return 2
    signal.signal(signal.SIGTERM, _end)
    with tempfile.TemporaryDirectory(prefix="railrelay-fuzz.") as name:
        work = Path(name)
        commands = {target: python_target(target) for target in options.target}
        if set(options.target) & set(C_TARGETS):
            print("building", flush=True)
            try:
                binaries = build(work, "clang", fuzzer=True)
            except subprocess.CalledProcessError as failure:
                print(f"fuzz: cannot build: {failure}")
                return 2
            commands.update({target: [str(binaries[target])] for target in options.target if target in binaries})
        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = list(pool.map(lambda target: _fuzz(target, commands[target], work, options), options.target))
    found = sum(len(outcome.found) for outcome in outcomes)
    inputs = sum(outcome.inputs for outcome in outcomes)
    idle = [outcome.target for outcome in outcomes if not outcome.inputs]
    if options.json:
        print(json.dumps({"seconds": options.seconds, "found": found, "targets": [asdict(one) for one in outcomes]}))
    else:
        for outcome in outcomes:
            if outcome.found:
                print(f"{outcome.target}: {'; '.join(outcome.found)}\n{outcome.said}")
        names = ", ".join(options.target)
        print(
            f"fuzz: {names}: {options.seconds} s each, {inputs} inputs, {found} findings"
            + f"; none ran: {idle}" * bool(idle)
        )
    return 1 if found or idle else 0


def _end(*_: object) -> NoReturn:
    """Nothing stays behind: what the targets leave is cleaned up after them."""
    for process in _running:
        process.terminate()
    sys.exit(128 + signal.SIGTERM)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests/fuzz/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=whole(1_000_000), required=True, metavar="N", help="for each target")
    parser.add_argument("--target", action="append", choices=TARGETS, help="only this one; may be repeated")
    parser.add_argument("--jobs", type=whole(64), default=1, metavar="N", help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="add inputs that reached new code to the corpus")
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    options = parser.parse_args()
    options.target = options.target or list(TARGETS)
    return options


def _lacking(targets: Sequence[str]) -> str:
    if set(targets) & set(C_TARGETS) and not builds("clang", "-fsanitize=fuzzer,address,undefined", _NO_INPUT):
        return f"{', '.join(C_TARGETS)} need clang and its libFuzzer: apt-get install clang libclang-rt-dev"
    if "messages" in targets and not has_verbs("clang"):
        return "messages needs infiniband/verbs.h: apt-get install libibverbs-dev"
    if set(targets) & set(PYTHON_TARGETS) and importlib.util.find_spec("atheris") is None:
        return f"{', '.join(PYTHON_TARGETS)} need atheris: {sys.executable} -m pip install atheris"
    return ""


def _fuzz(target: str, command: list[str], work: Path, options: argparse.Namespace) -> Outcome:
    own = work / f"{target}.d"
    fresh, found, log = own / "fresh", own / "found", own / "log"
    for directory in (own, fresh, found):
        directory.mkdir()
    kept = own / "kept"
    unpack(corpus(target), kept)
    instances = f"fuzz-{os.getpid()}-{target}-"
    around = {**environment(), INSTANCES: instances, "TMPDIR": str(own)}
    begin = time.monotonic()
    limits = [f"-max_total_time={options.seconds}", f"-timeout={INPUT_LIMIT_S}", f"-report_slow_units={INPUT_LIMIT_S}"]
    flags = [*limits, f"-artifact_prefix={found}/", "-len_control=10", *FLAGS]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags, str(fresh), str(kept)], stdout=output, stderr=output, env=around)
    _running.append(process)
    ended = os.pidfd_open(process.pid)
    while not select.select([ended], [], [], PROGRESS_S)[0]:
        inputs, branches = _status(log)
        print(f"{target}: {time.monotonic() - begin:.0f} s, {inputs} inputs, {branches} branches", flush=True)
    os.close(ended)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    _running.remove(process)
    outcome = Outcome(
        target, round(time.monotonic() - begin, 1), round(used.ru_utime + used.ru_stime, 1), *_status(log)
    )
    inputs_found = {one.read_bytes(): one.name.partition("-")[0] for one in found.iterdir()}
    outcome.found = [f"{fault}: {data.hex()}" for data, fault in inputs_found.items()]
    if process.returncode and not outcome.found:
        outcome.found.append(f"exit {process.returncode}")
    if outcome.found:
        said = log.read_text(errors="replace")
        at = _FINDING.search(said)
        outcome.said = said[max(at.start() - 200, 0) if at else -4000 :][:4000]
        keep(target, corpus(target) | inputs_found)
    elif options.keep:
        _keep(target, command, fresh, own, around)
    for left in SHM.glob(f"railrelay.{instances}*"):  # libFuzzer ends a process without letting it end itself
        left.unlink()
    what = f"{outcome.inputs} inputs, {outcome.branches} branches, {outcome.cpu_seconds} s of CPU"
    print(f"{target}: {what}", *outcome.found, flush=True)
    return outcome


def _status(log: Path) -> tuple[int, int]:
    """Inputs so far, and branches that they reached."""
    lines = _STATUS.findall(log.read_text(errors="replace"))
    return (int(lines[-1][0]), int(lines[-1][1])) if lines else (0, 0)


def _keep(target: str, command: list[str], fresh: Path, own: Path, around: Mapping[str, str]) -> None:
    """The corpus becomes the few small inputs that reach everything that it and the fresh ones reached."""
    small, merged = own / "small", own / "merged"
    before = corpus(target)
    inputs = [*before, *(one.read_bytes() for one in fresh.iterdir())]
    unpack([data for data in inputs if len(data) <= KEPT_BYTES], small)
    merged.mkdir()
    subprocess.run(
        [*command, "-merge=1", "-use_counters=0", *FLAGS, str(merged), str(small)],
        check=True,
        env=around,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    faults = {data: fault for data, fault in before.items() if fault}
    keep(target, {one.read_bytes(): "" for one in merged.iterdir()} | faults)
