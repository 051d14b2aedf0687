"""What do copies cost the matmuls beside them, and what of the copies does? Bare calls at a NIC's rate, no daemon: each
way alone, each way to learn that a slot has ended, from the process that multiplies and from another one on its GPU."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import math
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from device import fill, native
from device.native import Copier, Shared
from device.report import MIB, NOT_MEASURED, Options, Report, Skipped
from railrelay.client import cuda
from railrelay.client.cli._workers import Worker
from railrelay.client.errors import ErrorCode, RelayError

KIB: Final = 1024
_SIZE: Final = 8192
_AHEAD: Final = 4  # matmuls that the GPU has to do while the thread waits
_WARM_MATMULS: Final = 40
_BUDGET_S: Final = 24.0  # of windows, all cases together, with matrices of each kind
_WINDOW_S: Final = 0.2
_ROUNDS: Final = 3
_SLOTS: Final = 16
_NUMBERS: Final = 4096
_START_S: Final = 60.0
_ASK_S: Final = 20.0
_POLL_MS: Final = 50
_WAYS: Final = ("nothing", "2D", "batch", "kernel", "2D overlap", "batch overlap", "hops")
_ENDS: Final = ("query", "stream write", "event", "word copy")


@dataclass(frozen=True)
class Case:
    """``side``: who copies. "sender": fills slots in the receiver's GPU. "receiver", and "nic", a process of its own
    that does not multiply: from slots to pages of the receiver's GPU, or if ``far`` of the sender's."""

    name: str
    side: str
    way: str
    end: str
    gbyte: float
    piece_bytes: int = 4 * KIB
    rows: int = 160
    far: bool = False


CASES: Final = (
    Case("sender: 2D copies, 25 GB/s", "sender", "2D", "query", 25),
    Case("sender: 2D copies, 50 GB/s", "sender", "2D", "query", 50),
    Case("sender: the same of 16 KiB pieces", "sender", "2D", "query", 50, 16 * KIB),
    Case("sender: 2D copies, a stream write a slot", "sender", "2D", "stream write", 50),
    Case("sender: 2D copies, an event a slot", "sender", "2D", "event", 50),
    Case("sender: 2D copies, a word copied a slot", "sender", "2D", "word copy", 50),
    Case("sender: batch of 64 KiB blocks", "sender", "batch", "query", 50, 64 * KIB, 16),
    Case("sender: gather kernel, 4 thread blocks", "sender", "kernel", "query", 50),
    Case("sender: a thread that copies nothing", "sender", "nothing", "query", 50),
    Case("sender: stream writes only", "sender", "nothing", "stream write", 50),
    Case("receiver's GPU, same process: local 2D copies", "receiver", "2D", "query", 50),
    Case("receiver's GPU, other process: local 2D copies", "nic", "2D", "query", 50),
    Case("receiver's GPU, other process: 2D, a stream write a slot", "nic", "2D", "stream write", 50),
    Case("receiver's GPU, other process: 2D, an event a slot", "nic", "2D", "event", 50),
    Case("receiver's GPU, other process: 2D, a word copied a slot", "nic", "2D", "word copy", 50),
    Case("receiver's GPU, other process: 2D, asked to overlap", "nic", "2D overlap", "event", 50),
    Case("receiver's GPU, other process: batch of 64 KiB", "nic", "batch", "event", 50, 64 * KIB, 16),
    Case("receiver's GPU, other process: batch, asked to overlap", "nic", "batch overlap", "event", 50, 64 * KIB, 16),
    Case("receiver's GPU, other process: 2D to the sender's GPU", "nic", "2D", "event", 50, far=True),
    Case("receiver's GPU, other process: 2D by way of another GPU", "nic", "hops", "event", 50),
    Case("receiver's GPU, other process: gather kernel", "nic", "kernel", "query", 50),
)


class Pacing(ctypes.Structure):
    _fields_ = (
        ("record", ctypes.c_void_p),
        ("event", ctypes.c_void_p),
        ("word", ctypes.c_void_p),
        ("gpu_word", ctypes.c_uint64),
        ("numbers", ctypes.c_uint64),
        ("number_count", ctypes.c_uint64),
        ("batch_3d", ctypes.c_void_p),
        ("hop", ctypes.c_uint64),
    )


class Paced(ctypes.Structure):
    _fields_ = (
        ("slots", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("ns", ctypes.c_double),
        ("copy_ns", ctypes.c_double),
        ("issue_ns", ctypes.c_double),
    )


# ---- one process: matmuls, copies, or both ----


class Matmuls:
    """Back to back in a thread of its own, each timed by the GPU. ``stand_in``: naps instead."""

    def __init__(self, ordinal: int, stand_in: bool) -> None:
        self._ordinal = ordinal
        self.cool = False  # zeros: the GPU stays below its power limit
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._failure = ""
        self._found: list[tuple[int, float, float]] = []  # when its end was seen, its ms, ms since the last one
        self._thread = threading.Thread(target=self._guarded, args=[self._nap if stand_in else self._multiply])
        self._thread.start()
        self._warm.wait(_START_S)
        if self._failure or not self._warm.is_set():
            self._stop.set()
            raise RelayError(ErrorCode.NOT_SUPPORTED, f"matmuls need torch with CUDA: {self._failure or 'no matmul'}")

    def between(self, begin: int, end: int) -> tuple[float, float, int]:
        """Of those that ended within: mean ms, mean ms between one and the next, and how many."""
        inside = [(ms, gap) for at, ms, gap in list(self._found) if begin <= at < end]
        if not inside:
            return math.nan, math.nan, 0
        return statistics.fmean(ms for ms, _ in inside), statistics.fmean(gap for _, gap in inside), len(inside)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(_ASK_S)

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception as failure:  # noqa: BLE001 - belongs to who started it
            traceback.print_exc()
            self._failure = f"{type(failure).__name__}: {failure}"
            self._warm.set()

    def _seen(self, ms: float, gap: float) -> None:
        self._found.append((time.monotonic_ns(), ms, gap))
        if len(self._found) == _WARM_MATMULS:
            self._warm.set()

    def _nap(self) -> None:
        while not self._stop.wait(0.002):
            self._seen(2.0, 0.0)

    def _multiply(self) -> None:
        import torch

        torch.cuda.set_device(self._ordinal)
        left, right, product = (torch.randn((_SIZE, _SIZE), device="cuda").to(torch.bfloat16) for _ in range(3))
        zeros = torch.zeros_like(left)
        waiting: collections.deque[Any] = collections.deque()
        last: Any = None
        while not self._stop.is_set():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            torch.matmul(*((zeros, zeros) if self.cool else (left, right)), out=product)
            end.record()
            waiting.append((begin, end))
            if len(waiting) > _AHEAD:
                begin, end = waiting.popleft()
                end.synchronize()
                self._seen(begin.elapsed_time(end), last.elapsed_time(begin) if last is not None else 0.0)
                last = end
        torch.cuda.synchronize()


class Side:
    """``push``: fills slots in the memory of the last GPU, else copies from its own slots to its own pages."""

    def __init__(self, library_path: Path, ordinal: int, options: Options, push: bool, multiplies: bool) -> None:
        self._stack = contextlib.ExitStack()
        try:
            self._library = native.load(library_path)
            self._gpu = self._stack.enter_context(native.opened_gpu(ordinal))
            self._room = (64 if options.stand_in else 512) * MIB
            slots_on = options.last_gpu if push else ordinal
            relay, _ = self._stack.enter_context(native.memory_on(slots_on, self._gpu, _SLOTS * fill.SLOT_BYTES))
            self._slots = relay.address
            hop, _ = self._stack.enter_context(native.memory_on(0, self._gpu, fill.SLOT_BYTES))
            self._hop = hop.address
            far, _ = self._stack.enter_context(native.memory_on(0, self._gpu, self._room))
            self._far = far.address
            self._pages = self._gpu.alloc(self._room)
            self._gpu.fill(self._pages, 0x5A, self._room)
            self._push = push
            self._copier = Copier(self._library, self._gpu, 2, relay.address, fill.NIC_GBIT)
            self._stack.callback(self._copier.close)
            self._pacing = self._made_pacing()
            self._made: dict[Case, tuple[fill.Work, int]] = {}
            self._matmuls = Matmuls(ordinal, options.stand_in) if multiplies else None
        except BaseException:
            self._stack.close()
            raise

    def pace(self, case: Case, end_ns: int) -> dict[str, float]:
        work, rows = self._made[case]
        found = Paced()
        result = self._library.rd_pace(
            self._copier.address, ctypes.byref(work.slots), ctypes.byref(self._pacing), _WAYS.index(case.way),
            _ENDS.index(case.end), rows, case.gbyte, float(end_ns), ctypes.byref(found),
        )  # fmt: skip
        self._copier.check("rd_pace", result)
        slots = max(1, found.slots)
        return {
            "gbyte": found.bytes / max(1.0, found.ns),
            "copy_us": found.copy_ns / slots / 1e3,
            "issue_us": found.issue_ns / slots / 1e3,
        }

    def prepare(self, case: Case) -> bool:
        """Makes its pieces, and copies a little; whether it can be done here."""
        if (case.way == "kernel" and not self._copier.has_kernel) or (
            case.way == "2D overlap" and not self._pacing.batch_3d
        ):
            return False
        self._made[case] = self._work(case)
        self.pace(case, time.monotonic_ns() + 20_000_000)
        return True

    def set_cool(self, cool: bool) -> None:
        if self._matmuls is not None:
            self._matmuls.cool = cool

    def matmuls(self, windows: Sequence[tuple[int, int]]) -> list[tuple[float, float, int]]:
        assert self._matmuls is not None
        return [self._matmuls.between(*window) for window in windows]

    def close(self) -> None:
        if self._matmuls is not None:
            self._matmuls.close()
        self._stack.close()

    def _work(self, case: Case) -> tuple[fill.Work, int]:
        """Slots of whole pages: rows of a page are a constant stride apart on both sides."""
        of_page = case.rows * case.piece_bytes
        in_slot = fill.SLOT_BYTES // of_page
        there = self._room // of_page
        chosen = np.random.default_rng(1).permutation(there)[: _SLOTS * in_slot]
        slots = len(chosen) // in_slot
        if case.way.startswith("batch"):  # scattered: no two are a constant stride apart
            cells = np.random.default_rng(2).permutation(there * case.rows)[: slots * in_slot * case.rows]
        else:
            rows = np.arange(case.rows) * there
            cells = (rows + chosen[: slots * in_slot, None]).ravel()
        far = cells.astype(np.uint64) * np.uint64(case.piece_bytes)
        each = in_slot * case.rows
        inside = np.arange(each, dtype=np.uint64) * np.uint64(case.piece_bytes)
        near = (np.arange(slots, dtype=np.uint64)[:, None] * np.uint64(fill.SLOT_BYTES) + inside).ravel()
        pieces = np.zeros(slots * each, native.PIECE)
        pages, relay = far + np.uint64(self._far if case.far else self._pages), near + np.uint64(self._slots)
        pieces["source"], pieces["destination"] = (pages, relay) if self._push else (relay, pages)
        pieces["bytes"] = case.piece_bytes
        return fill.Work(self._library, pieces, np.arange(slots + 1, dtype=np.uint64) * np.uint64(each)), case.rows

    def _made_pacing(self) -> Pacing:
        self._word = Shared(4096)
        numbers = self._gpu.alloc(8 * _NUMBERS)
        values = np.arange(1, _NUMBERS + 1, dtype=np.uint64)
        self._gpu.to_gpu(numbers, int(values.ctypes.data), values.nbytes)
        event = self._gpu.recorded(self._copier.stream)
        record, batch_3d = cuda.function_addresses(["cuEventRecord", "cuMemcpy3DBatchAsync"])
        known = self._gpu.host_register(self._word.address, self._word.nbytes)
        return Pacing(record, event, self._word.address, known, numbers, _NUMBERS, batch_3d, self._hop)


# ---- clocks and power ----


class Clocks:
    """What nvidia-smi says of each GPU, polled meanwhile; nothing if it does not."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._found: list[tuple[int, str, float, float]] = []
        self._process: subprocess.Popen[bytes] | None = None
        command = ["nvidia-smi", f"--id={','.join(uuids)}", "--format=csv,noheader,nounits"]
        for power in ("power.draw.instant", "power.draw"):
            query = f"--query-gpu=uuid,clocks.sm,{power}"
            try:
                tried = subprocess.run([*command, query], capture_output=True, text=True, check=False, timeout=10)
                if tried.returncode or _reading(tried.stdout.partition("\n")[0]) is None:
                    continue
                # To a pipe it would write many lines at once, long after they were true.
                ours, theirs = os.openpty()
                try:
                    self._process = subprocess.Popen(
                        [*command, query, f"--loop-ms={_POLL_MS}"],
                        stdin=subprocess.DEVNULL, stdout=theirs, stderr=subprocess.DEVNULL,
                    )  # fmt: skip
                finally:
                    os.close(theirs)
            except (OSError, subprocess.SubprocessError):
                continue
            threading.Thread(target=self._read, args=[ours], daemon=True).start()
            return

    def between(self, gpu: str, windows: Sequence[tuple[int, int]]) -> str:
        """Mean MHz and W."""
        inside = [
            (mhz, watts)
            for at, uuid, mhz, watts in list(self._found)
            if uuid == gpu and any(begin <= at < end for begin, end in windows)
        ]
        if not inside:
            return "clock unknown"
        return f"{statistics.fmean(mhz for mhz, _ in inside):.0f} MHz {statistics.fmean(w for _, w in inside):.0f} W"

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _read(self, fd: int) -> None:
        with contextlib.suppress(OSError), os.fdopen(fd) as lines:  # EIO: it has ended
            for line in lines:
                reading = _reading(line)
                if reading is not None:
                    self._found.append((time.monotonic_ns(), *reading))


def _reading(line: str) -> tuple[str, float, float] | None:
    words = [word.strip() for word in line.split(",")]
    try:
        return words[0], float(words[1]), float(words[2])
    except (IndexError, ValueError):
        return None


# ---- the section ----


@dataclass
class Window:
    begin: int
    end: int
    paced: dict[str, float]


def _windows(
    report: Report, sides: dict[str, Worker], cases: Sequence[Case], window_s: float
) -> tuple[list[tuple[int, int]], dict[Case, list[tuple[int, Window]]]]:
    """(idle windows, and each case's with the number of the idle one before): idle, a case, idle, a case..."""
    idle: list[tuple[int, int]] = []
    busy: dict[Case, list[tuple[int, Window]]] = {case: [] for case in cases}
    until = time.monotonic() + _BUDGET_S

    def rest() -> None:
        begin = time.monotonic_ns()
        time.sleep(window_s)
        idle.append((begin, time.monotonic_ns()))

    rest()
    for number in range(_ROUNDS):
        order = cases if number % 2 == 0 else cases[::-1]
        for case in order:
            if time.monotonic() > until:
                return idle, busy
            begin = time.monotonic_ns()
            try:
                paced = sides[case.side].ask("pace", case, begin + int(window_s * 1e9), timeout=_ASK_S)
            except RelayError as failure:  # its context may be lost: what was measured before still counts
                report.row(case.name, f"failed: {failure}", "", good=False)
                return idle, busy
            busy[case].append((len(idle) - 1, Window(begin, time.monotonic_ns(), paced)))
            rest()
        print(f"round {number + 1} of {_ROUNDS}", flush=True)
    return idle, busy


def _without_edges(windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A matmul that began in the window before is not this one's."""
    return [(begin + 10_000_000, end) for begin, end in windows]


def run(report: Report, options: Options, library_path: Path) -> None:
    if not options.gpus:
        raise Skipped("matmuls need a GPU and torch")
    two = options.gpus > 1
    cases = [case for case in CASES if two or case.side != "receiver"]
    with contextlib.ExitStack() as stack:
        made: dict[str, tuple[int, bool, bool]] = {"sender": (0, True, True)}
        if two:
            made["receiver"] = (options.last_gpu, False, True)
        made["nic"] = (options.last_gpu, False, False)
        sides = {
            name: stack.enter_context(Worker(name, Side, library_path, ordinal, options, push, multiplies))
            for name, (ordinal, push, multiplies) in made.items()
        }
        for side in sides.values():
            side.result(_START_S)
        cases = [case for case in cases if sides[case.side].ask("prepare", case, timeout=_ASK_S)]
        uuids = {"sender": cuda.uuid_of(0), "receiver": cuda.uuid_of(options.last_gpu)}
        clocks = Clocks(list(dict.fromkeys(uuids.values())))
        stack.callback(clocks.close)
        multiplying: list[str] = [name for name in ("sender", "receiver") if name in sides]
        for values in ("random values", "zeros"):
            for side in sides.values():
                side.ask("set_cool", values == "zeros")
            time.sleep(0.5)
            idle, busy = _windows(report, sides, cases, 0.05 if options.small else _WINDOW_S)
            alone = {name: sides[name].ask("matmuls", _without_edges(idle)) for name in multiplying}
            for name in multiplying:
                ms = statistics.median(found[0] for found in alone[name])
                report.row(
                    f"{_SIZE}^3 matmuls of {values} alone, {name}'s GPU",
                    f"{ms:.4f} ms; {statistics.median(found[1] for found in alone[name]) * 1e3:.1f} us between them;"
                    f" {clocks.between(uuids[name], idle)}",
                    matmul_ms=[found[0] for found in alone[name]],
                )
            for case in cases:
                _tell(report, values, case, busy[case], sides, alone, clocks, uuids)


def _tell(
    report: Report,
    values: str,
    case: Case,
    windows: list[tuple[int, Window]],
    sides: dict[str, Worker],
    alone: dict[str, list[tuple[float, float, int]]],
    clocks: Clocks,
    uuids: dict[str, str],
) -> None:
    if not windows:
        report.row(f"{values}, {case.name}", f"{NOT_MEASURED}no time left")
        return
    spans = [(window.begin, window.end) for _, window in windows]
    texts: list[str] = []
    facts: dict[str, Any] = {}
    for name, idle in alone.items():
        beside = sides[name].ask("matmuls", _without_edges(spans))
        slower, later = [], []
        for (before, _), found in zip(windows, beside, strict=True):
            ms, gap = ((idle[before][at] + idle[before + 1][at]) / 2 for at in (0, 1))
            slower.append(found[0] / ms - 1)
            later.append((found[1] - gap) / ms)
        facts[f"{name}_slower"], facts[f"{name}_gaps"] = slower, later
        texts.append(
            f"{name} {statistics.median(slower):+.2%} ({min(slower):+.2%} to {max(slower):+.2%}), gaps"
            f" {statistics.median(later):+.2%}, {clocks.between(uuids[name], spans)}"
        )
    paced: dict[str, Any] = {
        what: statistics.median(window.paced[what] for _, window in windows) for what in windows[0][1].paced
    }
    report.row(
        f"{values}, {case.name}",
        f"matmuls slower: {'; '.join(texts)}; {paced['gbyte']:.1f} GB/s of {case.gbyte:g}, a slot took"
        f" {paced['copy_us']:.0f} us, {paced['issue_us']:.0f} of it in calls",
        **facts,
        **paced,
    )


if __name__ == "__main__":
    sys.exit("run tests/device/run --section load")
