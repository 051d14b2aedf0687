"""The local route: two engines of one daemon, bytes copied from memory to memory. On the host beside a plain memcpy, on
GPUs beside bare copies with everything prepared."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from device import cells, systems
from device.cells import CELL_BYTES, Cells
from device.fill import SLOTS
from device.native import PIECE, Copier, Slots, Time, opened_gpu
from device.report import MIB, NOT_MEASURED, Options, Report, spread
from railrelay.client import ErrorCode, PageLayout, RegionError, Transfer
from railrelay.client.cli._bench_memory import GpuPool

_PAIRS: Final = 11
_RATIO: Final = 0.9
_BATCH: Final = 128
_BLOCK_CELLS: Final = 16
_ROWS: Final = 160


def run(report: Report, options: Options, library: ctypes.CDLL) -> None:
    _host(report, options)
    if options.gpus:
        try:
            _gpu(report, options, library)
        except RegionError as failure:
            if failure.code is not ErrorCode.NOT_SUPPORTED:
                raise
            report.row("GPU memory", f"{NOT_MEASURED}{failure.text}")


def _host(report: Report, options: Options) -> None:
    words = [sys.executable, "-m", "railrelay.client.cli", "bench", "--route", "local", "--json"]
    words += ["--blocks", "512", "--runs", "3"] if options.small else []
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=180)
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"bench --route local: {done.stderr.strip().splitlines()[-1:]}")
    for case in json.loads(done.stdout)["cases"]:
        targets = case["targets"]
        report.row(
            f"host memory, {case['blocks']:,} x {case['block_bytes']:,} bytes",
            f"{case['ratio']:.3f} x memcpy; {case['gigabytes_per_second']:.2f} GB/s, memcpy"
            f" {case['limit_gigabytes_per_second']:.2f}; {case['wrong_blocks']} wrong blocks",
            f">= {targets[0]['limit']} x memcpy" if targets else "",
            False if not case["verified"] else None if options.small or not targets else targets[0]["met"],
            **case,
        )


def _gpu(report: Report, options: Options, library: ctypes.CDLL) -> None:
    blocks = 512 if options.small else 16384
    pages = 12 if options.small else 1664
    nbytes = max(blocks * _BLOCK_CELLS, pages * _ROWS) * CELL_BYTES
    with (
        systems.daemon(options) as node,
        systems.link(node, options, nbytes, local=True) as link,
        contextlib.ExitStack() as stack,
    ):
        assert isinstance(link.destination_pool, GpuPool)
        cells.fill(link.source_pool, 0, nbytes // CELL_BYTES)
        gpu = stack.enter_context(opened_gpu(0))
        fd = link.destination_pool.export()
        target = gpu.open_vmm(fd, link.destination_pool.nbytes)
        stack.callback(gpu.unmap, target)
        stack.callback(os.close, fd)
        copier = Copier(library, gpu, SLOTS, gpu.alloc(2 * MIB), 400)
        stack.callback(copier.close)
        bench = _Bench(report, options, library, copier, link, target.address)
        bench.blocks(blocks)
        bench.pages(pages)


class _Bench:
    def __init__(
        self,
        report: Report,
        options: Options,
        library: ctypes.CDLL,
        copier: Copier,
        link: systems.Link,
        target: int,
    ) -> None:
        self._report = report
        self._options = options
        self._library = library
        self._copier = copier
        self._link = link
        self._target = target

    def blocks(self, count: int) -> None:
        generator = np.random.default_rng(1)
        taken, put = generator.permutation(count), generator.permutation(count)
        nbytes = _BLOCK_CELLS * CELL_BYTES
        link = self._link
        sources, targets = cells.addresses(link.source.address, taken, nbytes), cells.addresses(0, put, nbytes)
        remote = targets + np.uint64(link.remote.address)
        inside = np.arange(_BLOCK_CELLS)
        placed = np.empty(count * _BLOCK_CELLS, np.int64)
        placed[put[:, None] * _BLOCK_CELLS + inside] = taken[:, None] * _BLOCK_CELLS + inside
        self._compare(
            f"GPU memory, {count:,} x 64 KiB",
            "cuMemcpyBatchAsync",
            lambda: link.sender.write(link.remote, sources, remote, nbytes),
            self._bare("rd_bare_batches", sources, targets, nbytes, _BATCH),
            placed,
        )

    def pages(self, count: int) -> None:
        generator = np.random.default_rng(2)
        taken, put = generator.permutation(count), generator.permutation(count)
        link = self._link
        bases = (link.source.address, link.remote.address)
        layouts = [PageLayout.strided(base, _ROWS, count * CELL_BYTES, CELL_BYTES, CELL_BYTES) for base in bases]
        rows = np.arange(_ROWS)[None, :] * count
        sources = cells.addresses(link.source.address, (taken[:, None] + rows).ravel())
        targets = cells.addresses(0, (put[:, None] + rows).ravel())
        placed = np.empty(count * _ROWS, np.int64)
        placed[(put[:, None] + rows).ravel()] = (taken[:, None] + rows).ravel()
        self._compare(
            f"GPU memory, {count:,} pages of 4 KiB x {_ROWS} rows",
            "2D copies",
            lambda: link.sender.write_pages(link.remote, layouts[0], taken, layouts[1], put),
            self._bare("rd_bare_2d", sources, targets, CELL_BYTES, _ROWS),
            placed,
        )

    def _bare(self, call: str, sources: Any, targets: Any, nbytes: int, each: int) -> Callable[[], float]:  # noqa: ANN401
        """ns of the same copies without the library, ``each`` pieces at a time."""
        pieces = np.zeros(len(sources), PIECE)
        pieces["source"], pieces["destination"] = sources, targets + np.uint64(self._target)
        pieces["bytes"] = nbytes
        starts = np.append(np.arange(0, len(pieces), each), len(pieces)).astype(np.uint64)
        slots = Slots.of(self._library, pieces, starts)

        def measure() -> float:
            found = Time()
            result = getattr(self._library, call)(self._copier.address, ctypes.byref(slots), ctypes.byref(found))
            self._copier.check(call, result)
            return float(found.ns)

        return measure

    def _compare(
        self, case: str, limit: str, send: Callable[[], Transfer], bare: Callable[[], float], placed: Cells
    ) -> None:
        link = self._link
        before = link.sender.counters()
        link.destination_pool.wipe()
        send().wait(60)
        wrong = cells.wrong_lines(link.destination_pool, 0, 0, placed)
        if link.sender.counters()["bytes_local"] == before["bytes_local"]:
            self._report.row(case, f"{NOT_MEASURED}the bytes did not take the local route")
            return
        bare()
        ratios, rates = [], []
        for number in range(3 if self._options.small else _PAIRS):
            spent: dict[str, float] = {}
            for what in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
                if what == "bare":
                    spent[what] = bare()
                else:
                    began = time.perf_counter_ns()
                    send().wait(60)
                    spent[what] = time.perf_counter_ns() - began
            ratios.append(spent["bare"] / spent["ours"])
            rates.append(len(placed) * CELL_BYTES / spent["ours"])
        ratio = statistics.median(ratios)
        ways = systems.copied_by(link.sender.counters(), before)
        self._report.timed(
            f"{case}, {self._options.place}",
            f"{spread(ratios)} x bare {limit}; {statistics.median(rates):.1f} GB/s; {ways}; {wrong} wrong lines",
            f">= {_RATIO} x bare {limit}",
            ratio >= _RATIO,
            sound=wrong == 0,
            ratio=ratio,
            gigabytes_per_second=statistics.median(rates),
        )
