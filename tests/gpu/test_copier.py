"""The copier (gpu_copy.c): its three ways, the choice between them, and the word that is written after the copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers import gpus, patterns
from helpers.gpus import Card, Control
from helpers.patterns import Bytes

from railrelay.client import core, cuda

pytestmark = pytest.mark.gpu

KIB: Final = 1 << 10
CLIENT: Final = Path(cuda.__file__).parent
REPOSITORY: Final = Path(__file__).resolve().parents[2]
STRIDED, BATCH, KERNEL = range(3)
AUTO: Final = -1
WAYS: Final = ("strided", "batch", "kernel")
AREA: Final = 4 << 20
LIST_RUNS: Final = 1024
LISTS: Final = 4
RUN_BYTES: Final = 48

Pieces = Sequence[tuple[int, int, int]]  # offsets of source and destination, bytes
Runs = Sequence[tuple[int, int, int, int, int, int]]  # offsets of source and destination, their steps, bytes, rows


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    here = Path(__file__).parent
    target = tmp_path_factory.mktemp("copier") / "copier.so"
    source = REPOSITORY / "client" / "gpu_copy.c"
    gpus.compiled(here / "copier_shim.c", target, "-shared", "-fPIC", "-I", str(source.parent), str(source))
    shim = ctypes.CDLL(str(target))
    pointer, u32, u64 = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    shim.shim_open.restype = pointer
    shim.shim_open.argtypes = [pointer, u32, pointer, pointer, pointer, pointer, u32, u32, ctypes.c_int32]
    shim.shim_put.argtypes, shim.shim_put.restype = [pointer, u32, u32, pointer], u32
    shim.shim_copy.argtypes = [pointer, u32, u32]
    shim.shim_signal.argtypes = [pointer, u64, u64]
    shim.shim_calibrate.argtypes = [pointer, u64, u64, ctypes.c_double]
    shim.shim_error_name.argtypes, shim.shim_error_name.restype = [pointer, ctypes.c_int], ctypes.c_char_p
    for name in ("shim_close", "shim_enter"):
        getattr(shim, name).argtypes = [pointer]
    for name in ("shim_costs", "shim_set_costs", "shim_counters"):
        getattr(shim, name).argtypes = [pointer, pointer]
    return shim


@dataclass
class Copier:
    """One between two areas: the source on the GPU, the destination in pinned host memory unless told otherwise."""

    shim: ctypes.CDLL
    at: int
    gpu: Card
    stream: int
    source: int
    destination: int
    content: Bytes

    def put(self, pieces: Pieces | Runs, which: int = 0) -> int:
        """How many runs the list then has."""
        runs = np.zeros((len(pieces), 6), np.int64)
        for number, (source, destination, *rest) in enumerate(pieces):
            source_step, destination_step, size, count = rest if len(rest) > 1 else (0, 0, *rest, 1)
            runs[number] = (
                self.source + source,
                self.destination + destination,
                source_step,
                destination_step,
                size,
                count,
            )
        listed: int = self.shim.shim_put(self.at, which, len(runs), runs.ctypes.data)
        return listed

    def copy(self, pieces: Pieces | Runs, which: int = 0) -> int:
        listed = self.put(pieces, which)
        with self.gpu.current():
            assert self.shim.shim_copy(self.at, which, listed) == 0
        return listed

    def moves(self, pieces: Pieces | Runs) -> int:
        """Copies, and checks every byte of the destination, also those that nobody may touch."""
        before = self.gpu.read(self.destination, AREA)
        listed = self.copy(pieces)
        self.gpu.synchronize()
        for source, destination, size in expanded(pieces):
            before[destination : destination + size] = self.content[source : source + size]
        assert bool((self.gpu.read(self.destination, AREA) == before).all())
        return listed

    def counters(self) -> dict[str, tuple[int, int, int]]:
        """(operations, pieces, bytes) by way"""
        found = np.zeros(9, np.uint64)
        self.shim.shim_counters(self.at, found.ctypes.data)
        table = found.reshape(3, 3).astype(int)
        return {way: (int(table[0, i]), int(table[1, i]), int(table[2, i])) for i, way in enumerate(WAYS)}

    def costs(self) -> list[float]:
        found = np.zeros(8)
        self.shim.shim_costs(self.at, found.ctypes.data)
        return list(found)

    def set_costs(self, **changes: float) -> None:
        names = (
            *("strided_ns", "row_ns", "batched_ns", "kernel_ns"),
            *("kernel_piece_ns", "engine_rate", "kernel_rate", "nic_rate"),
        )
        costs = np.array([float(changes.get(name, cost)) for name, cost in zip(names, self.costs(), strict=True)])
        self.shim.shim_set_costs(self.at, costs.ctypes.data)


Make = Callable[..., Copier]

COSTS: Final = {
    "strided_ns": 2000,
    "row_ns": 4,
    "batched_ns": 500,
    "kernel_ns": 4000,
    "kernel_piece_ns": 2,
    "engine_rate": 300,
    "kernel_rate": 100,
    "nic_rate": 50,
}


@pytest.fixture
def make(library: ctypes.CDLL, gpu: Card) -> Iterator[Make]:
    made: list[int] = []
    names = list(core.FUNCTION_NAMES)

    def build(
        forced: int = AUTO,
        *,
        kernel: bool = True,
        onto: Card | None = None,
        shift: int = 0,
        list_runs: int = LIST_RUNS,
        functions: Callable[[list[int]], list[int]] = lambda addresses: addresses,
    ) -> Copier:
        addresses = np.array(functions(cuda.function_addresses(names)), np.uint64)
        lists = gpu.host_alloc(LISTS * list_runs * RUN_BYTES)
        stream = gpu.stream()
        at = library.shim_open(
            addresses.ctypes.data,
            len(addresses),
            gpu.context,
            stream,
            gpu.gather_kernel() if kernel else 0,
            lists,
            LISTS,
            list_runs,
            forced,
        )
        assert at
        made.append(at)
        content = patterns.content(AREA, 7)
        source = gpu.alloc(AREA + 256) + shift
        gpu.write(source, content)
        destination = (onto.allocated(AREA, "gpu") if onto else gpu.host_alloc(AREA + 256)) + shift
        return Copier(library, at, gpu, stream, source, destination, content)

    yield build
    gpu.synchronize()
    for at in made:
        library.shim_close(at)


def scattered(sizes: Sequence[int], seed: int, unit: int = 1) -> list[tuple[int, int, int]]:
    """Pieces of these sizes at multiples of ``unit`` on both sides, in random order, with gaps."""
    room = [-(-size // unit) * unit + unit for size in sizes]
    sources, destinations, _ = patterns.mixed(AREA // unit, AREA // unit, [size // unit for size in room], seed)
    rng = np.random.default_rng(seed)
    order = np.argsort(np.array(patterns.mixed(AREA // unit, AREA // unit, [size // unit for size in room], seed)[2]))
    by_room = np.argsort(np.array(room), kind="stable")
    pieces = [
        (int(sources[place]) * unit, int(destinations[place]) * unit, sizes[which])
        for place, which in zip(order, by_room, strict=True)
    ]
    rng.shuffle(pieces)
    return pieces


def expanded(pieces: Pieces | Runs) -> Iterator[tuple[int, int, int]]:
    for source, destination, *rest in pieces:
        source_step, destination_step, size, count = rest if len(rest) > 1 else (0, 0, *rest, 1)
        for row in range(count):
            yield source + row * source_step, destination + row * destination_step, size


def rows(count: int, size: int, source_step: int, destination_step: int, at: tuple[int, int] = (0, 0)) -> Pieces:
    return [(at[0] + i * source_step, at[1] + i * destination_step, size) for i in range(count)]


@pytest.mark.parametrize("forced", [STRIDED, BATCH, KERNEL, AUTO])
@pytest.mark.parametrize("alignment", [1, 4, 16])
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_scattered_pieces_by_each_way(make: Make, forced: int, alignment: int, shift: int) -> None:
    copier = make(forced, shift=shift)
    rng = np.random.default_rng(alignment)
    sizes = [int(size) * alignment for size in rng.integers(1, 6000 // alignment, 300)]
    copier.moves(scattered(sizes, alignment, alignment))
    expected = "kernel" if forced == KERNEL else "batch"
    if forced != AUTO:
        assert copier.counters()[expected] == (1, 300, sum(sizes))


@pytest.mark.parametrize("size", [1, 3, 15, 16, 17, 255, 256, 4096, 65537])
def test_any_size_by_the_kernel(make: Make, size: int) -> None:
    copier = make(KERNEL)
    copier.moves(scattered([size] * min(40, AREA // (2 * size + 2)), size))


@pytest.mark.parametrize("forced", [STRIDED, BATCH, KERNEL])
@pytest.mark.parametrize("count", [1, 2, 3, 4, LIST_RUNS])
def test_lists_of_every_length(make: Make, forced: int, count: int) -> None:
    copier = make(forced)
    copier.moves(scattered([2048] * count, count, 256))
    assert sum(pieces for _, pieces, _ in copier.counters().values()) == count


@pytest.mark.parametrize(
    ("pieces", "strided"),
    [
        (rows(61, 1152, 4096, 1152), 61),
        (rows(3, 1152, 4096, 1152), 0),  # too few
        (rows(4, 1152, 4096, 1152), 4),
        (rows(20, 512, 512, 8192), 20),  # the source is contiguous
        (rows(20, 512, 256, 512), 0),  # rows of the source overlap
        (list(reversed(rows(20, 512, 1024, 512))), 0),  # backwards
        ([*rows(10, 512, 1024, 512), *rows(10, 512, 2048, 512, (1 << 20, 1 << 20))], 20),
        ([*rows(10, 512, 1024, 512), (1 << 20, 1 << 20, 77), *rows(2, 64, 128, 64, (2 << 20, 2 << 20))], 10),
        ([*rows(9, 512, 1024, 512), (9 * 1024, 9 * 512, 511)], 9),  # the last one is shorter
    ],
)
def test_rows_at_constant_distances_are_one_strided_copy(make: Make, pieces: Pieces, strided: int) -> None:
    copier = make(STRIDED)
    copier.moves(pieces)
    counted = copier.counters()
    assert counted["strided"][1] == strided
    assert counted["batch"][1] == len(pieces) - strided


def mixture(seed: int, count: int) -> Runs:
    """Runs and single pieces of any length, step and alignment; destinations apart, sources anywhere."""
    rng = np.random.default_rng(seed)
    made = []
    edge = 0
    for _ in range(count):
        unit = int(rng.choice([1, 4, 16]))
        row_count = int(rng.choice([1, 1, 2, 3, 16, 61, int(rng.integers(1, 700))]))
        size = int(rng.integers(1, 1 + max(1, 4096 // row_count))) * unit
        gap = int(rng.choice([0, 0, unit, 37 * unit]))
        span = (size + gap) * row_count
        if edge + span + 64 > AREA:
            break
        first = -(-edge // unit) * unit + unit * int(rng.integers(0, 3))
        edge = first + span
        source_step = int(rng.choice([size, 0, size + unit, 2 * size, -size, -2 * size])) if row_count > 1 else 0
        reach = source_step * (row_count - 1)
        source = int(rng.integers(max(0, -reach), AREA - size - max(0, reach)) // unit * unit)
        source = max(source, -reach)
        if rng.random() < 0.5:
            made.append((source, first, source_step, size + gap, size, row_count))
        else:  # backwards
            last = first + (size + gap) * (row_count - 1)
            made.append((source, last, source_step, -(size + gap), size, row_count))
    return made


@pytest.mark.parametrize("forced", [STRIDED, BATCH, KERNEL, AUTO])
@pytest.mark.parametrize("seed", range(6))
def test_runs_and_single_pieces_in_one_list(make: Make, forced: int, seed: int) -> None:
    runs = mixture(seed, 400)
    copier = make(forced, shift=seed % 3)
    copier.moves(runs)
    counted = copier.counters()
    assert sum(nbytes for *_, nbytes in counted.values()) == sum(size * count for *_, size, count in runs)
    if forced == STRIDED:
        assert counted["strided"][0] > 0


@pytest.mark.parametrize(
    ("pieces", "listed"),
    [
        (rows(61, 1152, 4096, 1280), 1),
        (rows(61, 1152, 1152, 1152), 1),  # one long piece
        ([*rows(30, 512, 1024, 512), *rows(30, 512, 1024, 512, (30 * 1024, 30 * 512))], 1),  # goes on
        ([*rows(30, 512, 1024, 512), *rows(30, 512, 1024, 512, (30 * 1024, 31 * 512))], 2),
        ([(0, 0, 1024, 512, 512, 30), (30 * 1024, 30 * 512, 1024, 512, 512, 9)], 1),
        ([(0, 0, 1024, 512, 512, 30), (30 * 1024, 30 * 512, 1024, 1024, 512, 9)], 2),  # another distance
        ([(0, 0, 1024, 512, 512, 30), (29 * 1024 + 512, 30 * 512, 99)], 2),  # joins the last piece of the run
        ([(0, 0, 512), (4096, 4096, 1024, 512, 512, 9)], 2),
        ([(0, 0, 512), (1024, 512, 1024, 512, 512, 9)], 1),
        ([(0, 0, 512), (1024, 512, 512), (4096, 1024, 512), (512, 4096, 512)], 2),
        ([(0, 0, 512), (1024, 512, 513)], 2),
        ([(0, 0, 100), (100, 100, 200), (300, 300, 1)], 1),
    ],
)
@pytest.mark.parametrize("forced", [STRIDED, BATCH, KERNEL])
def test_pieces_are_listed_as_runs(make: Make, pieces: Pieces | Runs, listed: int, forced: int) -> None:
    assert make(forced).moves(pieces) == listed


def test_a_full_list_takes_what_goes_on_and_nothing_else(make: Make) -> None:
    copier = make(KERNEL, list_runs=512)
    apart = [(8192 * i, 4096 * i, 1 + i) for i in range(512)]
    tail = (8192 * 511 + 512, 4096 * 511 + 512, 64)
    assert copier.moves([*apart, tail]) == 512
    assert copier.counters()["kernel"][1] == 512
    assert copier.moves([*apart, (99, 3 << 20, 7)][:512]) == 512


def test_more_pieces_than_a_batch_takes(make: Make) -> None:
    copier = make(BATCH)
    copier.moves([(0, 0, 64, 96, 64, 20_000), (64, 2 << 20, 1 << 10, 1 << 11, 77, 3)])
    assert copier.counters()["batch"] == (3, 20_003, 20_000 * 64 + 3 * 77)


def test_distances_above_the_largest_pitch_are_not_strided(make: Make) -> None:
    """No memory is that large here: what the copier hands to the driver is looked at."""
    calls: list[str] = []
    kinds = {
        "cuMemcpy2DAsync": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        "cuMemcpyBatchAsync": ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 8),
    }

    def note(name: str) -> Callable[..., int]:
        def called(*_: object) -> int:
            calls.append(name)
            return 0

        return called

    callbacks = {name: kind(note(name)) for name, kind in kinds.items()}

    def replaced(addresses: list[int]) -> list[int]:
        names = list(core.FUNCTION_NAMES)
        for name, callback in callbacks.items():
            addresses[names.index(name)] = ctypes.cast(callback, ctypes.c_void_p).value or 0
        return addresses

    copier = make(STRIDED, functions=replaced)
    for step, expected in ((0x7FFFFFFF, "cuMemcpy2DAsync"), (0x80000000, "cuMemcpyBatchAsync")):
        for pieces in (rows(8, 256, step, 256), rows(8, 256, 256, step)):
            calls.clear()
            copier.copy(pieces)
            assert calls == [expected]


def test_without_a_kernel_the_copy_engine_does_all(make: Make) -> None:
    for forced in (AUTO, KERNEL):
        copier = make(forced, kernel=False)
        copier.moves(scattered([256] * 500, 3, 64))
        counters = copier.counters()
        assert counters["kernel"] == (0, 0, 0)
        assert counters["batch"] == (1, 500, 128000)


def test_without_copy_batches_pieces_are_copied_one_by_one(make: Make) -> None:
    where = list(core.FUNCTION_NAMES).index("cuMemcpyBatchAsync")
    copier = make(BATCH, functions=lambda all_of: [*all_of[:where], 0, *all_of[where + 1 :]])
    copier.moves(scattered([777] * 300, 4))
    assert copier.counters()["batch"] == (1, 300, 300 * 777)


def test_the_cheapest_way_that_keeps_up_is_chosen(make: Make) -> None:
    copier = make()
    copier.set_costs(**COSTS)
    large = scattered([64 * KIB] * 20, 1, 256)
    small = scattered([256] * 1000, 2, 64)
    copier.copy(large)
    assert copier.counters()["batch"][1] == 20
    copier.copy(small, 1)
    assert copier.counters()["kernel"][1] == 1000
    copier.copy(rows(61, 8 * KIB, 16 * KIB, 8 * KIB), 2)
    assert copier.counters()["strided"][1] == 61
    copier.copy(rows(61, 64, 128, 64), 3)  # a 2D copy for so little would cost more than the NIC's time
    assert copier.counters()["strided"][1] == 61
    copier.gpu.synchronize()
    copier.set_costs(kernel_rate=1)  # slower than the NIC: then the copy engine where it is faster
    copier.copy(rows(61, 1152, 4096, 1152), 0)
    assert copier.counters()["strided"][1] == 2 * 61
    copier.set_costs(kernel_rate=100, kernel_piece_ns=40)
    copier.copy(rows(61, 64, 128, 64), 1)
    assert copier.counters()["strided"][1] == 3 * 61
    copier.gpu.synchronize()


def test_the_rest_of_a_page_does_not_wait_for_a_kernel_where_the_engines_keep_up(make: Make) -> None:
    copier = make()
    copier.set_costs(**COSTS)
    page, slot = 80 * 8192 + 512, 80 * 4096 + 256  # the gaps end the runs
    pages = [piece for number in (0, 1) for piece in rows(80, 4096, 8192, 4096, (number * page, number * slot))]
    cut = [*rows(2, 4096, 8192, 4096, (2 * page, 2 * slot)), (2 * page + 3 * 8192, 2 * slot + 3 * 4096, 512)]
    copier.moves([*pages, *cut])
    assert copier.counters()["kernel"] == (0, 0, 0)
    assert copier.counters()["strided"][:2] == (2, 160)
    assert copier.counters()["batch"][1] == 3
    copier.set_costs(nic_rate=500)  # which no way reaches: then the fastest
    copier.moves([*pages, *cut])
    assert copier.counters()["strided"][1] + copier.counters()["kernel"][1] > 160


def test_without_a_nic_one_of_engines_and_kernel_has_the_whole_list(make: Make) -> None:
    copier = make()
    page, slot = 80 * 8192 + 512, 80 * 4096 + 256
    pages = [piece for number in (0, 1) for piece in rows(80, 4096, 8192, 4096, (number * page, number * slot))]
    cut = [*rows(2, 4096, 8192, 4096, (2 * page, 2 * slot)), (2 * page + 3 * 8192, 2 * slot + 3 * 4096, 512)]
    copier.set_costs(**{**COSTS, "nic_rate": 0, "kernel_rate": 1000})
    copier.moves([*pages, *cut])
    assert copier.counters()["kernel"][1] == len(pages) + len(cut)
    copier.set_costs(kernel_rate=1)
    copier.moves([*pages, *cut])
    assert copier.counters()["kernel"][1] == len(pages) + len(cut)
    assert copier.counters()["strided"][:2] == (2, 160)
    assert copier.counters()["batch"][1] == len(cut)


def test_mixed_lists_take_several_ways_at_once(make: Make) -> None:
    copier = make()
    copier.set_costs(
        strided_ns=200,
        row_ns=1,
        batched_ns=5000,
        kernel_ns=100,
        kernel_piece_ns=1,
        engine_rate=300,
        kernel_rate=300,
        nic_rate=50,
    )
    half = AREA // 2
    pieces = [
        *rows(100, 2048, 4096, 2048),
        *[(half + source % half, half + i * 512, 300) for i, (source, _, _) in enumerate(scattered([300] * 200, 5))],
        *rows(40, 4096, 8192, 4096, (half, half + 200 * 512)),
    ]
    pieces = [piece for piece in pieces if piece[0] + piece[2] <= AREA]
    copier.moves(pieces)
    counted = copier.counters()
    assert counted["strided"][0] == 2
    assert counted["kernel"][0] == 1
    assert sum(count for _, count, _ in counted.values()) == len(pieces)


def test_calibration_keeps_counters_and_finds_costs(make: Make, gpu: Card) -> None:
    copier = make()
    scratch = gpu.alloc(1 << 20)
    assert copier.shim.shim_calibrate(copier.at, scratch, copier.destination, 50.0) == 0
    assert copier.counters() == dict.fromkeys(WAYS, (0, 0, 0))
    costs = copier.costs()
    assert all(cost > 0 for cost in costs)
    assert costs[7] == 50.0
    assert bool((gpu.read(copier.destination + (1 << 20), 4096) == 0).all()), "more than 1 MiB was written"


def test_a_copy_onto_another_gpu(make: Make, two_gpus: tuple[Card, Card]) -> None:
    copier = make(BATCH, onto=two_gpus[1])
    copier.moves(scattered([4096] * 200, 6, 16))


@pytest.mark.parametrize("forced", [STRIDED, BATCH, KERNEL])
def test_the_word_is_written_after_all_copies_before_it(make: Make, gpu: Card, forced: int) -> None:
    """Lists in turn, the doorbell watched: what it announces is there, and a list is used again only then."""
    copier = make(forced)
    word = gpu.host_alloc(8)
    seen = ctypes.c_uint64.from_address(word)
    piece, count = 512, 256
    slot_bytes = piece * count
    slots = (ctypes.c_uint8 * AREA).from_address(copier.destination)
    arrived = np.ctypeslib.as_array(slots)
    order = np.random.default_rng(1)
    expected: dict[int, Bytes] = {}
    for number in range(1, 60):
        slot = number % LISTS
        limit = number - LISTS
        while seen.value < limit:
            pass
        if limit > 0:
            old = expected.pop(limit)
            assert bool((arrived[slot * slot_bytes : (slot + 1) * slot_bytes] == old).all()), f"torn: {limit}"
        chosen = order.permutation(AREA // piece - 1)[:count]
        pieces = [(int(at) * piece, slot * slot_bytes + i * piece, piece) for i, at in enumerate(chosen)]
        expected[number] = np.concatenate([copier.content[source : source + piece] for source, _, _ in pieces])
        copier.copy(pieces, slot)
        with gpu.current():
            assert copier.shim.shim_signal(copier.at, word, number) == 0
    gpu.synchronize()
    assert seen.value == 59


def test_errors_of_the_driver_are_handed_on(make: Make, control: Control) -> None:
    calls = {STRIDED: "cuMemcpy2DAsync", BATCH: "cuMemcpyBatchAsync", KERNEL: "cuLaunchKernel"}
    for forced, name in calls.items():
        copier = make(forced)
        listed = copier.put(rows(64, 256, 512, 256))
        control.fault(name, 1, 719)
        with copier.gpu.current():
            assert copier.shim.shim_copy(copier.at, 0, listed) == 719
            assert copier.shim.shim_copy(copier.at, 0, listed) == 0
        assert copier.shim.shim_error_name(copier.at, 719) == b"CUDA_ERROR_LAUNCH_FAILED"
        assert copier.shim.shim_error_name(copier.at, 12345) == b"CUDA_ERROR_UNKNOWN"


@pytest.mark.usefixtures("control")  # of the stand-in, which counts them
def test_compiling_the_kernel_leaves_no_program(gpu: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = ctypes.CDLL("libnvrtc.so.13").stand_in_programs
    monkeypatch.setenv("CUDA_DRIVER_NVRTC_FAILS", "1")
    cuda._compiled.cache_clear()
    with pytest.raises(cuda.CudaError, match="NVRTC says"):
        gpu.gather_kernel()
    assert programs() == 0
    monkeypatch.delenv("CUDA_DRIVER_NVRTC_FAILS")
    assert gpu.gather_kernel()
    assert programs() == 0
