"""Slots that alternate between 2D copies, batches and the gather kernel in one lane of a running daemon, through the
emulated NIC: three threads send pages, large blocks and small blocks at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from device import cells, systems
from device.cells import CELL_BYTES, Cells
from device.report import GIB, MIB, Options, Report
from railrelay.client import PageLayout, Transfer
from railrelay.client.cli._nodes import Geometry

SLOT_BYTES: Final = 65536
_SLOT_CELLS: Final = SLOT_BYTES // CELL_BYTES
_SLOTS: Final = 100_000
_BATCH: Final = 32  # slots a transfer
_UNDER_WAY: Final = 4
_NIC_GBIT: Final = 100.0  # at which 2D copies of 64 KiB keep up; the NIC itself is faster
_GEOMETRY: Final = Geometry(18, SLOT_BYTES, 4096, 32)


def run(report: Report, options: Options) -> None:
    nbytes = 24 * MIB if options.small else GIB
    per_round = nbytes // SLOT_BYTES
    rounds = 1 if options.small else -(-_SLOTS // per_round)
    third = nbytes // 3 // (SLOT_BYTES * _BATCH) * (SLOT_BYTES * _BATCH)
    count = third // CELL_BYTES
    with (
        systems.daemon(options, replace(_GEOMETRY)) as node,
        systems.link(node, options, nbytes, nic_gbit=_NIC_GBIT) as link,
    ):
        cells.fill(link.source_pool, 0, 3 * count)
        wrong, slots, began = 0, 0, time.monotonic()
        before = link.sender.counters()
        sending = 0.0
        for number in range(rounds):
            link.destination_pool.wipe()
            began = time.monotonic()
            placed = _round(link, count, number)
            sending += time.monotonic() - began
            wrong += cells.wrong_lines(link.destination_pool, 0, 0, placed)
        counters = link.sender.counters()
        slots = counters["slots"] - before["slots"]
        ways = systems.copied_by(counters, before)
    report.row(
        f"ordering through the emulated NIC, ways alternating in one lane, {options.place}",
        f"{wrong} torn lines in {slots:,} slots of {SLOT_BYTES >> 10} KiB; {ways};"
        f" {8 * rounds * 3 * third / sending / 1e9:.1f} Gbit/s",
        f"0 torn of >= {0 if options.small else _SLOTS:,} slots",
        wrong == 0 and slots >= (1 if options.small else _SLOTS),
        torn_lines=wrong,
        slots=slots,
        ways=ways,
    )


def _round(link: systems.Link, count: int, seed: int) -> Cells:
    """Sends three parts of ``count`` cells at once; which source cell belongs into each destination cell."""
    generator = np.random.default_rng(seed)
    pages = count // _SLOT_CELLS
    taken, put = generator.permutation(pages), generator.permutation(pages)
    placed = np.empty(3 * count, np.int64)
    rows = np.arange(_SLOT_CELLS)[:, None] * pages
    placed[rows + put] = rows + taken

    def strided(first: int) -> Transfer:
        part = slice(first, first + _BATCH)
        layouts = [PageLayout.strided(base, _SLOT_CELLS, pages * CELL_BYTES, CELL_BYTES, CELL_BYTES) for base in bases]
        return link.sender.write_pages(link.remote, layouts[0], taken[part], layouts[1], put[part])

    bases = (link.source.address, link.remote.address)
    senders: list[Callable[[int], Transfer]] = [strided]
    for part, block_cells in ((1, 1), (2, _SLOT_CELLS // 2)):
        senders.append(_blocks(link, part * count, count, block_cells, generator, placed))
    failures: list[BaseException] = []

    def send(sender: Callable[[int], Transfer]) -> None:
        try:
            waiting = []
            for first in range(0, pages, _BATCH):
                waiting.append(sender(first))
                if len(waiting) > _UNDER_WAY:
                    waiting.pop(0).wait()
            for transfer in waiting:
                transfer.wait()
        except BaseException as failure:  # noqa: BLE001 - raised below
            failures.append(failure)

    threads = [threading.Thread(target=send, args=[sender]) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return placed


def _blocks(
    link: systems.Link, first_cell: int, count: int, block_cells: int, generator: np.random.Generator, placed: Cells
) -> Callable[[int], Transfer]:
    """Blocks in any order to places in any order."""
    taken, put = (generator.permutation(count // block_cells) for _ in range(2))
    inside = np.arange(block_cells)
    placed[first_cell + put[:, None] * block_cells + inside] = first_cell + taken[:, None] * block_cells + inside
    each = _SLOT_CELLS // block_cells  # blocks of a slot
    nbytes = block_cells * CELL_BYTES
    start = first_cell * CELL_BYTES

    def send(first: int) -> Transfer:
        part = slice(first * each, (first + _BATCH) * each)
        return link.sender.write(
            link.remote,
            cells.addresses(link.source.address + start, taken[part], nbytes),
            cells.addresses(link.remote.address + start, put[part], nbytes),
            nbytes,
        )

    return send
