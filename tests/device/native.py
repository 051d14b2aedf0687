"""fill.c, ordering.c and pace.c with the client's gpu_copy.c, built once a run, and their ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from railrelay.client import core, cuda

HERE: Final = Path(__file__).resolve().parent
CLIENT: Final = HERE.parents[1] / "client"
LIST_RUNS: Final = 8192
WAYS: Final = ("strided", "batch", "kernel")
PIECE: Final = np.dtype([("source", "<u8"), ("destination", "<u8"), ("bytes", "<u4"), ("reserved", "<u4")])
Pieces = npt.NDArray[np.void]
RUN_BYTES: Final = 48  # struct rg_run
_SCRATCH_BYTES: Final = 1 << 20
_COSTS: Final = (
    "strided_ns",
    "row_ns",
    "batched_ns",
    "kernel_ns",
    "kernel_piece_ns",
    "engine_rate",
    "kernel_rate",
    "nic_rate",
)


class Slots(ctypes.Structure):
    """struct rd_slots over arrays of pieces and of where each slot's begin."""

    _fields_ = (
        ("pieces", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("runs", ctypes.c_void_p),
        ("run_starts", ctypes.c_void_p),
    )
    _keep: tuple[object, ...]

    @classmethod
    def of(cls, library: ctypes.CDLL, pieces: Pieces, starts: npt.NDArray[np.uint64]) -> Slots:
        runs, run_starts = np.zeros(len(pieces) * RUN_BYTES, np.uint8), np.zeros(len(starts), np.uint64)
        made = cls(pieces.ctypes.data, starts.ctypes.data, len(starts) - 1, runs.ctypes.data, run_starts.ctypes.data)
        library.rd_list_runs(ctypes.byref(made), runs.ctypes.data, run_starts.ctypes.data)
        made._keep = (pieces, starts, runs, run_starts)
        return made


class Time(ctypes.Structure):
    _fields_ = (("ns", ctypes.c_double), ("issue_ns", ctypes.c_double))


class Counters(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64 * len(WAYS)) for name in ("operations", "pieces", "bytes"))


class Costs(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_double) for name in _COSTS)


def build(directory: Path) -> Path:
    """RuntimeError with the compiler's words."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler; install gcc")
    made = directory / "copies.so"
    sources = [HERE / "fill.c", HERE / "ordering.c", HERE / "pace.c", CLIENT / "gpu_copy.c"]
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-shared", "-fPIC", f"-I{CLIENT}"]
    done = subprocess.run([compiler, *flags, "-o", made, *sources], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"fill.c, ordering.c and pace.c do not build:\n{done.stderr}")
    return made


def load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    u32, u64, double, pointer = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p
    signatures: dict[str, tuple[Sequence[type], type | None]] = {
        "rd_copier_bytes": ((), u64),
        "rd_force": ((pointer, ctypes.c_int32), None),
        "rd_thread_blocks": ((pointer, u32), None),
        "rd_counters": ((pointer, pointer), None),
        "rd_costs": ((pointer, pointer), None),
        "rd_bare_batches": ((pointer, pointer, pointer), ctypes.c_int),
        "rd_bare_2d": ((pointer, pointer, pointer), ctypes.c_int),
        "rd_list_runs": ((pointer, pointer, pointer), None),
        "rd_feed": ((pointer, pointer, pointer, u64, u32, pointer), ctypes.c_int),
        "rd_ring": ((pointer, pointer, u64, u32, pointer, pointer), ctypes.c_int),
        "rd_watch": ((pointer, u64, u64, double, pointer), u64),
        "rd_stamp": ((pointer, pointer), None),
        "rd_pace": ((pointer, pointer, pointer, u32, u32, u32, double, double, pointer), ctypes.c_int),
        "rd_torn_lines": ((pointer, u64, u64), u64),
        "rd_write_slots": ((pointer, pointer, pointer, pointer, u64, u64, u64, u64, u64, double), ctypes.c_int),
        "rd_read_slots": ((pointer, pointer, u64, pointer, pointer, u64, u64, double), u64),
        "rg_open": ((pointer, pointer, pointer, pointer, pointer, pointer, u32, u32), ctypes.c_int),
        "rg_close": ((pointer,), None),
        "rg_calibrate": ((pointer, u64, u64, double), ctypes.c_int),
        "rg_error_name": ((pointer, ctypes.c_int), ctypes.c_char_p),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = list(arguments), result
    return library


class Shared:
    """Memory of a descriptor, or new memory, that processes share and a GPU knows."""

    def __init__(self, nbytes: int, fd: int = -1) -> None:
        self.nbytes = nbytes
        self.fd = fd
        if fd < 0:
            self.fd = os.memfd_create("railrelay-device")
            os.ftruncate(self.fd, nbytes)
        self._map = mmap.mmap(self.fd, nbytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.words = self.bytes[: nbytes // 8 * 8].view(np.uint64)


class Copier:
    """A struct rg_copier on one stream of a GPU, made as the client makes those of its lanes."""

    def __init__(self, library: ctypes.CDLL, gpu: cuda.Gpu, list_count: int, target: int, nic_gbit: float) -> None:
        """``target``: a MiB of the memory that is to be filled, the contents of which are lost."""
        self._library = library
        addresses = cuda.function_addresses(list(core.FUNCTION_NAMES))
        self._api = (ctypes.c_void_p * len(addresses))(*addresses)
        self._memory = ctypes.create_string_buffer(library.rd_copier_bytes())
        self.address = ctypes.addressof(self._memory)
        self.gpu = gpu
        self.stream = gpu.stream()
        try:
            kernel = gpu.gather_kernel()
        except cuda.CudaError as failure:
            print(f"no gather kernel: {failure.text}", flush=True)
            kernel = 0
        self.has_kernel = kernel != 0
        lists = gpu.host_alloc(list_count * LIST_RUNS * RUN_BYTES)
        if library.rg_open(
            self.address, self._api, gpu.context, self.stream, kernel or None, lists, list_count, LIST_RUNS
        ):
            raise MemoryError("rg_open")
        scratch = gpu.alloc(_SCRATCH_BYTES)
        self.check("rg_calibrate", library.rg_calibrate(self.address, scratch, target, nic_gbit / 8))

    def check(self, call: str, result: int) -> None:
        if result:
            name = self._library.rg_error_name(self._api, result).decode() if result > 0 else str(result)
            raise RuntimeError(f"{call}: {name}")

    def force(self, way: str) -> None:
        """ "auto" or one of WAYS."""
        self._library.rd_force(self.address, -1 if way == "auto" else WAYS.index(way))

    def counters(self) -> dict[str, list[int]]:
        found = Counters()
        self._library.rd_counters(self.address, ctypes.byref(found))
        return {name: list(getattr(found, name)) for name in ("operations", "pieces", "bytes")}

    def costs(self) -> dict[str, float]:
        found = Costs()
        self._library.rd_costs(self.address, ctypes.byref(found))
        return {name: round(float(getattr(found, name)), 1) for name in _COSTS}

    def close(self) -> None:
        self._library.rg_close(self.address)


def way_shares(before: dict[str, list[int]], after: dict[str, list[int]]) -> dict[str, float]:
    """Which share of the bytes went by each way."""
    moved = [now - then for now, then in zip(after["bytes"], before["bytes"], strict=True)]
    whole = sum(moved) or 1
    return {way: round(nbytes / whole, 3) for way, nbytes in zip(WAYS, moved, strict=True) if nbytes}


@contextlib.contextmanager
def opened_gpu(gpu: int) -> Iterator[cuda.Gpu]:
    made = cuda.Gpu(gpu)
    try:
        yield made
    finally:
        with contextlib.suppress(cuda.CudaError):
            made.synchronize()
        made.close()


@contextlib.contextmanager
def memory_on(owner: int, user: cuda.Gpu, nbytes: int) -> Iterator[tuple[cuda.Mapping, int]]:
    """New memory of GPU ``owner`` that ``user`` has mapped, as relay memory is; (mapping, its descriptor)."""
    unit = cuda.granularity(owner)
    rounded = -(-nbytes // unit) * unit
    handle = cuda.create(owner, rounded)
    fd = cuda.export(handle)
    cuda.release(handle)
    try:
        mapping = user.open_vmm(fd, rounded)
        try:
            yield mapping, fd
        finally:
            user.synchronize()
            user.unmap(mapping)
    finally:
        os.close(fd)
