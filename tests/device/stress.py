"""Two engines, each on a GPU of its own, each with four sending threads, both directions at once: every byte is checked
where it lands, and memory and descriptors must not grow."""

from __future__ import annotations

import contextlib
import os
import threading
import time
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
from railrelay.client.cli._workers import Worker

_THREADS: Final = 4
_ROWS: Final = 16
_SECONDS: Final = 180.0
_SETTLE_S: Final = 8.0  # until memory counts as what it will stay
_STUCK_S: Final = 30.0
_GROWTH_BYTES: Final = 32 * MIB
_GROWTH_FDS: Final = 4


@dataclass(frozen=True)
class Usage:
    resident_bytes: int
    fds: int


def usage(pid: int) -> Usage:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Usage(pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")))


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

    def stop_sending(self) -> None:
        """Both engines; the checkers go on until stop()."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * _STUCK_S)

    def stop(self) -> dict[str, Any]:
        self._stop_checking.set()
        self._checker.join(_STUCK_S)
        hangs = sum(thread.is_alive() for thread in (self._checker, *self._threads))
        nbytes = sum(self._sent) * self._zone_cells * CELL_BYTES
        ways = {way: self._client.counters()[f"gpu_{way}_bytes"] for way in ("strided", "batch", "kernel")}
        return {"sent": nbytes, "wrong": self._wrong, "failures": self._failures, "hangs": hangs, "ways": ways}

    def failures(self) -> list[str]:
        return self._failures

    def free_bytes(self) -> list[int]:
        return [gpu.memory()[0] for gpu in self._contexts]

    def close(self) -> None:
        self._stop.set()
        self._stop_checking.set()
        self._client.close()
        for thread in self._threads:
            thread.join(_STUCK_S)
        self._pool.close()
        self._source.close()
        for gpu in self._contexts:
            gpu.close()

    def _guarded(self, body: Any, *arguments: object) -> None:  # noqa: ANN401
        try:
            body(*arguments)
        except (RelayError, OSError, RuntimeError) as failure:
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


def run(report: Report, options: Options) -> None:
    seconds = 4.0 if options.small else _SECONDS
    settle = 1.0 if options.small else _SETTLE_S
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(systems.daemon(options))
        checked = Shared(4096)
        engines = [
            stack.enter_context(Worker(f"engine {rank}", Engine, node.socket, rank, options, os.getpid(), checked.fd))
            for rank in (systems.SENDER, systems.RECEIVER)
        ]
        for engine in engines:
            engine.result()
        offers = [engine.ask("offer") for engine in engines]
        for engine, offer in zip(engines, reversed(offers), strict=True):
            engine.ask("start", offer)
        pids = [engine.pid for engine in engines] + [node.pid, *systems.children(node.pid)]
        time.sleep(settle)
        before, free = [usage(pid) for pid in pids], engines[0].ask("free_bytes")
        deadline = time.monotonic() + seconds - settle
        while time.monotonic() < deadline and not any(engine.ask("failures") for engine in engines):
            time.sleep(0.5)
        after, left = [usage(pid) for pid in pids], engines[0].ask("free_bytes")
        for engine in engines:
            engine.begin("stop_sending")
        for engine in engines:
            engine.result()
        found = [engine.ask("stop") for engine in engines]
    grown = max(now.resident_bytes - then.resident_bytes for now, then in zip(after, before, strict=True))
    fds = max(now.fds - then.fds for now, then in zip(after, before, strict=True))
    gpu = max((then - now for now, then in zip(left, free, strict=True)), default=0)
    wrong, hangs = sum(one["wrong"] for one in found), sum(one["hangs"] for one in found)
    failures = [text for one in found for text in one["failures"]]
    ways = {way for one in found for way, nbytes in one["ways"].items() if nbytes}
    nbytes = sum(one["sent"] for one in found)
    good = not (wrong or hangs or failures) and fds <= _GROWTH_FDS and max(grown, gpu) <= _GROWTH_BYTES and nbytes > 0
    report.row(
        f"two engines, {_THREADS} threads each, both directions, {seconds:.0f} s, {options.place}",
        f"{nbytes / 1e9:.1f} GB checked, {wrong} wrong lines, {hangs} hangs,"
        f" {failures[0] if failures else 'no failure'}; grown by {grown / MIB:.1f} MiB resident, {gpu / MIB:.1f} MiB of"
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
