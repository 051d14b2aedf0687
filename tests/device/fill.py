"""Fills slots in the memory of another GPU: against a bare loop over ready arrays, and each way alone."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from device import native
from device.native import PIECE, WAYS, Copier, Pieces, Shared, Slots, Time
from device.report import GIB, MIB, Options, Report, Skipped, spread

SLOT_BYTES: Final = 8 * MIB
SLOTS: Final = 18
TABLE_ENTRIES: Final = 4096
NIC_GBIT: Final = 400.0
_PACK: Final = 256
_PAIRS: Final = 11
_RATIO: Final = 0.9

Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Shape:
    """``pieces(base, room, wanted)``: addresses of about ``wanted`` bytes of pieces in ``room`` bytes of source."""

    name: str
    piece_bytes: int
    pieces: Callable[[int, int, int], Addresses]
    rows: int = 0
    most_pieces: int = TABLE_ENTRIES  # of a slot
    slow_batch: bool = False


def pages(piece_bytes: int, rows: int) -> Callable[[int, int, int], Addresses]:
    """A page has one piece in each row; pages in any order."""

    def make(base: int, room: int, wanted: int) -> Addresses:
        there = room // (rows * piece_bytes)
        chosen = np.random.default_rng(1).permutation(there)[: max(1, wanted // (rows * piece_bytes))]
        of_rows = np.arange(rows, dtype=np.uint64) * np.uint64(there * piece_bytes)
        places = chosen.astype(np.uint64)[:, None] * np.uint64(piece_bytes) + of_rows[None, :]
        return (places + np.uint64(base)).ravel()

    return make


def blocks(piece_bytes: int) -> Callable[[int, int, int], Addresses]:
    def make(base: int, room: int, wanted: int) -> Addresses:
        chosen = np.random.default_rng(2).permutation(room // piece_bytes)[: wanted // piece_bytes]
        return chosen.astype(np.uint64) * np.uint64(piece_bytes) + np.uint64(base)

    return make


def heads(piece_bytes: int, tokens: int, token_bytes: int) -> Callable[[int, int, int], Addresses]:
    """The same few heads of each token of a page: short strided runs, the pages in any order."""

    def make(base: int, room: int, wanted: int) -> Addresses:
        run = tokens * token_bytes
        chosen = np.random.default_rng(3).permutation(room // run)[: wanted // (tokens * piece_bytes)]
        of_tokens = np.arange(tokens, dtype=np.uint64) * np.uint64(token_bytes)
        return (chosen.astype(np.uint64)[:, None] * np.uint64(run) + of_tokens[None, :] + np.uint64(base)).ravel()

    return make


SHAPES: Final = (
    Shape("pages 72 KiB x 61 rows", 72 * 1024, pages(72 * 1024, 61), rows=61),
    Shape("pages 16 KiB x 160 rows", 16384, pages(16384, 160), rows=160),
    Shape("pages 4 KiB x 160 rows", 4096, pages(4096, 160), rows=160),
    Shape("pages 18 KiB x 61 rows", 18 * 1024, pages(18 * 1024, 61), rows=61),
    Shape("pages 1,152 B x 61 rows", 1152, pages(1152, 61), rows=61, slow_batch=True),
    Shape("blocks of 64 KiB", 65536, blocks(65536)),
    Shape("blocks of 16 KiB", 16384, blocks(16384)),
    Shape("blocks of 4 KiB", 4096, blocks(4096)),
    Shape("256 B pieces in 4 KiB runs", 256, heads(256, 16, 2048), most_pieces=SLOT_BYTES // 256, slow_batch=True),
)


def in_slots(
    sources: Addresses, piece_bytes: int, base: int, most_pieces: int
) -> tuple[Pieces, npt.NDArray[np.uint64]]:
    """Pieces packed into slots like the feeder does it, a piece that does not fit split: (pieces, starts)."""
    step = -(-piece_bytes // _PACK) * _PACK
    parts: list[Pieces] = []
    starts = [0]
    at, into = 0, 0  # the next piece, and bytes of it that are in the last slot
    while at < len(sources):
        slot = base + len(parts) % SLOTS * SLOT_BYTES
        first = min(piece_bytes - into, SLOT_BYTES)
        used = -(-first // _PACK) * _PACK
        whole = min(len(sources) - at - 1, most_pieces - 1, (SLOT_BYTES - used) // step)
        room = SLOT_BYTES - used - whole * step
        cut = room if at + 1 + whole < len(sources) and 1 + whole < most_pieces and 0 < room < piece_bytes else 0
        made = np.zeros(1 + whole + (cut > 0), PIECE)
        made["source"] = sources[at : at + len(made)]
        made["source"][0] += into
        made["destination"][0] = slot
        made["destination"][1:] = slot + used + np.arange(len(made) - 1, dtype=np.uint64) * np.uint64(step)
        made["bytes"] = piece_bytes
        made["bytes"][0] = first
        if cut:
            made["bytes"][-1] = cut
        at, into = at + 1 + whole, cut
        parts.append(made)
        starts.append(starts[-1] + len(made))
    return np.concatenate(parts), np.array(starts, np.uint64)


class Bench:
    """A source on the first GPU, slots on the last, a copier, and a doorbell in shared memory."""

    def __init__(
        self, library: ctypes.CDLL, copier: Copier, base: int, source: int, room: int, doorbell: Shared
    ) -> None:
        self._library = library
        self.copier = copier
        self._base = base
        self._source = source
        self._room = room
        self._shared = doorbell
        self._word = doorbell.address
        self._doorbell = copier.gpu.host_register(doorbell.address, doorbell.nbytes)

    def shape(self, shape: Shape, wanted: int) -> Work:
        sources = shape.pieces(self._source, self._room, wanted)
        return Work(self._library, *in_slots(sources, shape.piece_bytes, self._base, shape.most_pieces))

    def feed(self, work: Work, flags: int = 0) -> Time:
        found = Time()
        result = self._library.rd_feed(
            self.copier.address, ctypes.byref(work.slots), self._word, self._doorbell, flags, ctypes.byref(found)
        )
        self.copier.check("rd_feed", result)
        return found

    def bare_batches(self, work: Work) -> Time:
        found = Time()
        result = self._library.rd_bare_batches(self.copier.address, ctypes.byref(work.slots), ctypes.byref(found))
        self.copier.check("cuMemcpyBatchAsync", result)
        return found

    def bare_2d(self, work: Work) -> Time:
        found = Time()
        result = self._library.rd_bare_2d(self.copier.address, ctypes.byref(work.slots), ctypes.byref(found))
        self.copier.check("cuMemcpy2DAsync", result)
        return found

    def ring(self, rounds: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """us until a doorbell is seen, and of its issue."""
        seen, issue = np.zeros(rounds), np.zeros(rounds)
        result = self._library.rd_ring(
            self.copier.address, self._word, self._doorbell, rounds, seen.ctypes.data, issue.ctypes.data
        )
        self.copier.check("rd_ring", result)
        return seen / 1e3, issue / 1e3


class Work:
    def __init__(self, library: ctypes.CDLL, pieces: Pieces, starts: npt.NDArray[np.uint64]) -> None:
        self.slots = Slots.of(library, pieces, starts)
        self.nbytes = int(pieces["bytes"].sum())

    def rate(self, time: Time) -> float:
        """GB/s."""
        return self.nbytes / float(time.ns)


@contextlib.contextmanager
def ready(library: ctypes.CDLL, options: Options) -> Iterator[Bench]:
    room = (256 * MIB) if options.stand_in else 2 * GIB
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(native.opened_gpu(0))
        relay, _ = stack.enter_context(native.memory_on(options.last_gpu, gpu, SLOTS * SLOT_BYTES))
        source = gpu.alloc(room)
        gpu.fill(source, 0x5A, room)
        copier = Copier(library, gpu, SLOTS, relay.address, NIC_GBIT)
        stack.callback(copier.close)
        yield Bench(library, copier, relay.address, source, room, Shared(4096))


def run(report: Report, options: Options, library: ctypes.CDLL) -> None:
    if not options.gpus:
        raise Skipped("it fills slots by a GPU, and this run has none")
    with ready(library, options) as bench:
        print("costs:", bench.copier.costs())
        _against_bare(bench, report, options)
        for shape in SHAPES:
            _ways(bench, shape, report, options)


def _against_bare(bench: Bench, report: Report, options: Options) -> None:
    work = bench.shape(Shape("", 65536, blocks(65536)), 64 * MIB if options.small else GIB)
    bench.copier.force("auto")
    bench.bare_batches(work)
    before = bench.copier.counters()
    bench.feed(work)
    ratios, ours, bare = [], [], []
    for number in range(3 if options.small else _PAIRS):
        pair: dict[str, Time] = {}
        for what in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
            pair[what] = bench.bare_batches(work) if what == "bare" else bench.feed(work)
        ratios.append(pair["bare"].ns / pair["ours"].ns)
        ours.append(work.rate(pair["ours"]))
        bare.append(work.rate(pair["bare"]))
    ways = native.way_shares(before, bench.copier.counters())
    ratio = statistics.median(ratios)
    rates = f"{statistics.median(ours):.1f} GB/s, bare {statistics.median(bare):.1f}"
    report.timed(
        f"fill from 128 scattered 64 KiB blocks, {options.place}",
        f"ratio {spread(ratios)}; {rates}; {_shown(ways)}",
        f">= {_RATIO} x bare cuMemcpyBatchAsync",
        ratio >= _RATIO,
        ratio=ratio,
        pairs=len(ratios),
        gigabytes_per_second=statistics.median(ours),
        bare_gigabytes_per_second=statistics.median(bare),
    )


def _ways(bench: Bench, shape: Shape, report: Report, options: Options) -> None:
    """GB/s of what the cost model chooses, and of each way alone."""
    work = bench.shape(shape, 32 * MIB if options.small else 256 * MIB if shape.slow_batch else 512 * MIB)
    few = bench.shape(shape, 16 * MIB if options.small else 64 * MIB)
    found: dict[str, Any] = {}
    chosen: dict[str, float] = {}
    for way in ("auto", *WAYS):
        if (way == "strided" and not (shape.rows or shape.slow_batch)) or (
            way == "kernel" and not bench.copier.has_kernel
        ):
            continue
        bench.copier.force(way)
        some = few if way == "batch" and shape.piece_bytes < 16384 else work
        before = bench.copier.counters()
        times = [bench.feed(some) for _ in range(4)][1:]
        if way == "auto":
            chosen = native.way_shares(before, bench.copier.counters())
        best = min(times, key=lambda time: float(time.ns))
        found[way] = some.rate(best)
        found[f"{way}_issue_share"] = best.issue_ns / best.ns
    bench.copier.force("auto")
    if shape.rows:
        found["bare 2D"] = work.rate(min((bench.bare_2d(work) for _ in range(3)), key=lambda time: time.ns))
    rates = ", ".join(f"{way} {found[way]:.1f}" for way in ("auto", *WAYS, "bare 2D") if way in found)
    report.row(f"GB/s, {shape.name}", f"{rates}; chosen {_shown(chosen)}", chosen=chosen, **found)


def _shown(shares: dict[str, float]) -> str:
    return " + ".join(f"{way} {share:.0%}" for way, share in shares.items()) or "nothing"
