"""Two engines, each on a GPU of its own, each with four sending threads, both directions at once: every byte is checked
where it lands, and memory and descriptors must not grow."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from device import cells, systems
from device.cells import CELL_BYTES, Cells
from device.native import Shared
from device.report import MIB, Options, Report
from railrelay.client import PageLayout, RelayError, RemoteRegion, Transfer, cuda
from railrelay.client.cli._bench_memory import pool
from railrelay.client.cli._nodes import Node
from railrelay.client.cli._workers import Worker

_THREADS: Final = 4
_ROWS: Final = 16
_SECONDS: Final = 180.0
_SETTLE_SHARE: Final = 1 / 3  # until memory counts as what it will stay: allocators have seen all sizes by then
_STUCK_S: Final = 20.0
_START_S: Final = 60.0
_ASK_S: Final = 10.0
_END_S: Final = 30.0  # for the threads of an engine, all together
_TOLD_S: Final = 10.0
_GROWTH_BYTES: Final = 32 * MIB
_GROWTH_FDS: Final = 4


@dataclass(frozen=True)
class Usage:
    private_bytes: int
    fds: int


def usage(pid: int) -> Usage:
    """Without what it shares: pages of relay memory count as resident only once they were used."""
    resident, shared = (int(word) for word in Path(f"/proc/{pid}/statm").read_text().split()[1:3])
    return Usage((resident - shared) * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))


def growth(used: list[list[Usage]]) -> tuple[int, int]:
    """Bytes and descriptors of the process that has grown most, from one half of the samples to the other. Medians:
    what threads hold while they make the next transfer comes and goes."""
    samples = np.array([[(one.private_bytes, one.fds) for one in processes] for processes in used])
    half = len(samples) // 2
    grown = np.median(samples[half:], axis=0) - np.median(samples[:half], axis=0)
    nbytes, fds = grown.max(axis=0)
    return int(nbytes), int(fds)


def order(seed: int, pages: int) -> tuple[Cells, Cells]:
    generator = np.random.default_rng(seed)
    return generator.permutation(pages), generator.permutation(pages)


def placement(seed: int, zone_cells: int) -> Cells:
    """Source cell in each cell of the zone: by pages if the seed is even, else by blocks of 1, 4 or 16 cells."""
    if seed % 2 == 0:
        pages = zone_cells // _ROWS
        taken, put = order(seed, pages)
        rows = np.arange(_ROWS)[:, None] * pages
        placed = np.empty(zone_cells, np.int64)
        placed[rows + put] = rows + taken
        return placed
    each = block_cells(seed)
    taken, put = order(seed, zone_cells // each)
    inside = np.arange(each)
    placed = np.empty(zone_cells, np.int64)
    placed[put[:, None] * each + inside] = taken[:, None] * each + inside
    return placed


def block_cells(seed: int) -> int:
    return (1, 4, 16)[seed // 2 % 3]


class Engine:
    """Sends into its zones at the other engine, and checks what the other one sends. ``checked``: shared words, one a
    zone of each receiving rank: the seed that was found right."""

    def __init__(self, socket: str, rank: int, options: Options, checked_pid: int, checked_fd: int) -> None:
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        self._rank = rank
        self._zone_cells = (1 if options.small else 16) * MIB // CELL_BYTES
        self._pool = pool(_THREADS * self._zone_cells * CELL_BYTES, (systems.gpus_of(options) or ("", ""))[rank])
        self._source = pool(self._zone_cells * CELL_BYTES, (systems.gpus_of(options) or ("", ""))[rank])
        self._client = systems.connect(socket, rank, options, f"engine-{rank}")
        self._landing, self._taken = self._pool.add(self._client), self._source.add(self._client)
        cells.fill(self._source, 0, self._zone_cells)
        fd = os.open(f"/proc/{checked_pid}/fd/{checked_fd}", os.O_RDWR)
        self._checked = Shared(4096, fd).words
        self._stop, self._stop_checking = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._failures: list[str] = []
        self._sent = [0] * _THREADS
        self._wrong = 0
        self._contexts = [cuda.Gpu(ordinal) for ordinal in range(options.gpus)]

    def offer(self) -> bytes:
        return self._landing.offer()

    def start(self, offer: bytes) -> None:
        remote = self._client.open(offer)
        self._checker = threading.Thread(target=self._guarded, args=[self._check])
        self._threads = [
            threading.Thread(target=self._guarded, args=[self._send, remote, number]) for number in range(_THREADS)
        ]
        for thread in (self._checker, *self._threads):
            thread.start()

    def stop_sending(self) -> int:
        """Both engines; the checkers go on until stop(). How many threads hang."""
        self._stop.set()
        return self._left(self._threads, _END_S)

    def _left(self, threads: list[threading.Thread], seconds: float) -> int:
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
        return sum(thread.is_alive() for thread in threads)

    def progress(self) -> tuple[int, list[str]]:
        """Bytes that were checked at the other engine, and what has failed."""
        return sum(self._sent) * self._zone_cells * CELL_BYTES, self._failures

    def stop(self) -> dict[str, Any]:
        self._stop_checking.set()
        self._left([self._checker], _ASK_S / 2)
        hangs = sum(thread.is_alive() for thread in (self._checker, *self._threads))
        nbytes = sum(self._sent) * self._zone_cells * CELL_BYTES
        ways = {way: self._client.counters()[f"gpu_{way}_bytes"] for way in ("strided", "batch", "kernel")}
        return {
            "sent": nbytes,
            "least": min(self._sent),
            "wrong": self._wrong,
            "failures": self._failures,
            "hangs": hangs,
            "ways": ways,
        }

    def free_bytes(self) -> list[int]:
        return [gpu.memory()[0] for gpu in self._contexts]

    def close(self) -> None:
        self._stop.set()
        self._stop_checking.set()
        self._client.close()
        self._left(self._threads, _ASK_S)
        self._pool.close()
        self._source.close()
        for gpu in self._contexts:
            gpu.close()

    def _guarded(self, body: Any, *arguments: object) -> None:  # noqa: ANN401
        try:
            body(*arguments)
        except Exception as failure:  # noqa: BLE001 - a thread that ends for any reason is a failure
            traceback.print_exc()
            self._failures.append(f"{type(failure).__name__}: {failure}")
            self._stop.set()

    def _send(self, remote: RemoteRegion, number: int) -> None:
        word = (1 - self._rank) * _THREADS + number
        seed = 0
        while not self._stop.is_set():
            seed += 1
            self._write(remote, number, seed).wait(_STUCK_S)
            deadline = time.monotonic() + _STUCK_S
            while int(self._checked[word]) != seed:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"zone {number} was not checked within {_STUCK_S:g} s")
                time.sleep(0.0002)
            self._sent[number] += 1

    def _write(self, remote: RemoteRegion, number: int, seed: int) -> Transfer:
        source, target = self._taken.address, remote.address + number * self._zone_cells * CELL_BYTES
        note = f"{number} {seed}".encode()
        if seed % 2 == 0:
            pages = self._zone_cells // _ROWS
            taken, put = order(seed, pages)
            layouts = [
                PageLayout.strided(base, _ROWS, pages * CELL_BYTES, CELL_BYTES, CELL_BYTES) for base in (source, target)
            ]
            return self._client.write_pages(remote, layouts[0], taken, layouts[1], put, notify=note)
        each = block_cells(seed)
        taken, put = order(seed, self._zone_cells // each)
        nbytes = each * CELL_BYTES
        return self._client.write(
            remote, cells.addresses(source, taken, nbytes), cells.addresses(target, put, nbytes), nbytes, notify=note
        )

    def _check(self) -> None:
        while not self._stop_checking.is_set():
            with contextlib.suppress(TimeoutError):
                note = self._client.receiver.notifications.get(0.1)
                number, seed = (int(word) for word in note.payload.split())
                first = number * self._zone_cells
                self._wrong += cells.wrong_lines(self._pool, 0, first, placement(seed, self._zone_cells))
                self._checked[self._rank * _THREADS + number] = seed


def _measured(
    node: Node, engines: list[Worker], seconds: float, settle: float
) -> tuple[list[dict[str, Any]], int, int, int]:
    """What the engines have found, and by how much the most grown process has grown: bytes, bytes of GPU memory,
    descriptors. RelayError."""
    for engine in engines:
        engine.result(_START_S)
    offers = [engine.ask("offer", timeout=_ASK_S) for engine in engines]
    for engine, offer in zip(engines, reversed(offers), strict=True):
        engine.ask("start", offer, timeout=_ASK_S)
    began = time.monotonic()
    pids = [engine.pid for engine in engines] + [node.pid, *systems.children(node.pid)]
    time.sleep(settle)
    free = engines[0].ask("free_bytes", timeout=_ASK_S)
    used: list[list[Usage]] = []
    told, failed = began, False
    while time.monotonic() < began + seconds and not failed:
        time.sleep(0.5)
        progress = [engine.ask("progress", timeout=_ASK_S) for engine in engines]
        used.append([usage(pid) for pid in pids])
        failed = any(failures for _, failures in progress)
        if failed or time.monotonic() - told > _TOLD_S:
            told = time.monotonic()
            most = max(one.private_bytes for one in used[-1])
            sent = " and ".join(f"{nbytes / 1e9:.1f}" for nbytes, _ in progress)
            print(f"{told - began:.0f} s: {sent} GB checked, most private memory {most / MIB:.1f} MiB", flush=True)
    left = engines[0].ask("free_bytes", timeout=_ASK_S)
    for engine in engines:
        engine.begin("stop_sending")
    hangs = [engine.result(_END_S + _ASK_S) for engine in engines]
    if any(hangs):
        _show_stacks(engines)
    found = [engine.ask("stop", timeout=_ASK_S) for engine in engines]
    grown, fds = growth(used)
    return found, grown, max((then - now for now, then in zip(left, free, strict=True)), default=0), fds


def _show_stacks(engines: list[Worker]) -> None:
    """Of the engines' Python threads, in the log."""
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGUSR1)
    time.sleep(1)  # until they are written


def run(report: Report, options: Options) -> None:
    seconds = options.seconds or (4.0 if options.small else _SECONDS)
    settle = seconds * _SETTLE_SHARE
    name = f"two engines, {_THREADS} threads each, both directions, {seconds:.0f} s, {options.place}"
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(systems.daemon(options))
        checked = Shared(4096)
        engines = [
            stack.enter_context(Worker(f"engine {rank}", Engine, node.socket, rank, options, os.getpid(), checked.fd))
            for rank in (systems.SENDER, systems.RECEIVER)
        ]
        try:
            found, grown, gpu, fds = _measured(node, engines, seconds, settle)
        except RelayError as failure:  # no answer, or an engine has ended
            _show_stacks(engines)
            report.row(name, f"failed: {failure}", "", good=False)
            return
    wrong, hangs = sum(one["wrong"] for one in found), sum(one["hangs"] for one in found)
    failures = [text for one in found for text in one["failures"]]
    ways = {way for one in found for way, nbytes in one["ways"].items() if nbytes}
    nbytes = sum(one["sent"] for one in found)
    least = min(one["least"] for one in found)
    kept = fds <= _GROWTH_FDS and max(grown, gpu) <= _GROWTH_BYTES
    good = not (wrong or hangs or failures) and kept and least > 0
    report.row(
        name,
        f"{nbytes / 1e9:.1f} GB checked, {wrong} wrong lines, {hangs} hangs, {least} rounds of the slowest thread,"
        f" {failures[0] if failures else 'no failure'}; grown by {grown / MIB:.1f} MiB, {gpu / MIB:.1f} MiB of"
        f" GPU memory, {fds} descriptors at most; by {', '.join(sorted(ways)) or 'the CPU'}",
        f"0 wrong, growth <= {_GROWTH_BYTES // MIB} MiB and {_GROWTH_FDS} descriptors",
        good,
        sent_bytes=nbytes,
        wrong_lines=wrong,
        failures=failures,
        grown_bytes=grown,
        grown_gpu_bytes=gpu,
        grown_fds=fds,
    )
