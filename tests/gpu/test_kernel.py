"""The gather kernel's arithmetic (gather.cu), run by threads of the CPU; test_copier.py has it on a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from helpers import patterns

from railrelay.client import cuda

AREA: Final = 1 << 20
RUN: Final = np.dtype(
    [
        *((name, "<u8") for name in ("source", "destination", "source_step", "destination_step")),
        *((name, "<u4") for name in ("bytes", "rows", "first", "reserved")),
    ]
)
Launch = Callable[..., None]


@pytest.fixture(scope="module", params=[(512, 1024), (4, 8), (1, 3)], ids=lambda tiles: f"tiles of {tiles}")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if not compiler:
        pytest.skip("needs a C++ compiler")
    directory = tmp_path_factory.mktemp("kernel")
    source = cuda.GATHER_SOURCE.read_text()
    for name, size in zip(("RUNS", "PIECES"), request.param, strict=True):
        source, found = re.subn(rf"#define {name} \d+u", f"#define {name} {size}u", source)
        assert found == 1
    (directory / "gather.cu").write_text(source)
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", f'-DKERNEL="{directory}/gather.cu"']
    made = directory / "kernel.so"
    wrapper = Path(__file__).with_name("kernel_on_cpu.cpp")
    subprocess.run([compiler, *flags, "-o", str(made), str(wrapper)], check=True, timeout=120)
    function = ctypes.CDLL(str(made)).launch
    function.argtypes, function.restype = [ctypes.c_void_p, *[ctypes.c_uint32] * 5], None
    return function


def runs_of(seed: int, count: int, most_rows: int, alignment: int) -> np.ndarray:
    """Random runs; the destinations are apart, each third one backwards. Offsets instead of addresses."""
    rng = np.random.default_rng(seed)
    runs = np.zeros(count, RUN)
    edge = 0
    for run in runs:
        row_count = int(rng.integers(1, most_rows + 1)) if most_rows > 0 else 1
        if most_rows < 0 and rng.integers(20) == 0:  # few long ones among single pieces
            row_count = -most_rows
        size = int(rng.integers(1, 1200 // alignment)) * alignment
        step = size + int(rng.integers(0, 3)) * alignment
        if edge + row_count * step > AREA:
            break
        first, destination_step = (edge, step) if rng.integers(3) else (edge + (row_count - 1) * step, -step)
        edge += row_count * step
        source_step = int(rng.integers(0, (AREA - size) // row_count // alignment)) * alignment
        source = int(rng.integers(0, (AREA - size - source_step * (row_count - 1)) // alignment)) * alignment
        steps = np.array([source_step, destination_step], np.int64).view(np.uint64)
        run["source"], run["destination"] = source, first
        run["source_step"], run["destination_step"] = steps
        run["bytes"], run["rows"] = size, row_count
    return runs[runs["rows"] > 0]


@pytest.mark.parametrize(("lanes", "alignment"), [(16, 1), (32, 4), (16, 16), (32, 16)])
@pytest.mark.parametrize(
    ("count", "most_rows", "blocks"),
    [(1, 1, 1), (1, 300, 4), (40, 1, 4), (30, 40, 4), (9, 200, 3), (3, 2, 7), (60, -300, 4)],
)
def test_every_piece_is_copied_once(
    launch: Launch, lanes: int, alignment: int, count: int, most_rows: int, blocks: int
) -> None:
    source = patterns.content(AREA, 3)
    for seed in range(1 if most_rows > 0 else 4):
        runs = runs_of(seed, count, most_rows, alignment)
        runs["first"] = np.concatenate([[0], np.cumsum(runs["rows"])[:-1]])
        found, expected = np.zeros(AREA + 16, np.uint8), np.zeros(AREA, np.uint8)
        found = found[-found.ctypes.data % 16 :][:AREA]
        aligned = np.zeros(AREA + 16, np.uint8)
        aligned = aligned[-aligned.ctypes.data % 16 :][:AREA]
        aligned[:] = source
        for run in runs:
            steps = np.array([run["source_step"], run["destination_step"]]).view(np.int64)
            for row in range(int(run["rows"])):
                taken, put = (
                    int(run[side]) + row * int(step)
                    for side, step in zip(("source", "destination"), steps, strict=True)
                )
                expected[put : put + int(run["bytes"])] = source[taken : taken + int(run["bytes"])]
        runs["source"] += np.uint64(aligned.ctypes.data)
        runs["destination"] += np.uint64(found.ctypes.data)
        launch(runs.ctypes.data, len(runs), int(runs["rows"].sum()), lanes, blocks, 32)
        assert bool((found == expected).all())
