"""Where the overlap bench puts its pieces, and what it says of a run."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import processes

from railrelay.client.cli import _bench_overlap
from railrelay.client.cli._bench_overlap import Shape

SHAPES = (
    Shape(4096, 7),
    Shape(1152, 5, rows=3),
    Shape(256, 6, rows=16, pitch=512, tokens=True),
)


@pytest.mark.parametrize("shape", SHAPES, ids=Shape.text)
@pytest.mark.parametrize("side", [0, 1])
def test_each_piece_has_a_cell_of_its_own(shape: Shape, side: int) -> None:
    assert sorted(shape.cells(side)) == list(range(shape.pieces))


@pytest.mark.parametrize("shape", SHAPES[1:], ids=Shape.text)
@pytest.mark.parametrize("side", [0, 1])
def test_the_layout_takes_pieces_from_their_cells(shape: Shape, side: int) -> None:
    step = (shape.step, shape.piece_bytes)[side]
    layout = shape.layout(0, step)
    of_pages = shape.order(side).astype(np.uint64) * np.uint64(layout.page_stride)
    addresses = (of_pages[:, None] + layout.starts()[None, :]).ravel()
    assert addresses.tolist() == (shape.cells(side) * step).tolist()


@pytest.mark.parametrize("shape", SHAPES[1:], ids=Shape.text)
def test_joined_pieces_follow_each_other_in_the_order_in_which_they_are_sent(shape: Shape) -> None:
    layout = shape.joined(0)
    of_pages = np.arange(shape.count, dtype=np.uint64) * np.uint64(layout.page_stride)
    addresses = (of_pages[:, None] + layout.starts()[None, :]).ravel()
    assert addresses.tolist() == [number * shape.piece_bytes for number in range(shape.pieces)]


def test_what_was_hidden_is_what_relay_did_not_take_longer() -> None:
    setup = _bench_overlap.Setup.__new__(_bench_overlap.Setup)
    setup.options = _bench_overlap.Options((), 8.0)  # a byte a nanosecond

    class Sender:
        def ask(self, *_: object) -> dict[str, int]:
            return {"copied_bytes": 3, "slots": 2, "stalls": 1, "gpu_batch_bytes": 3}

    setup.sender = Sender()  # type: ignore[assignment]
    before = {"relay": dict.fromkeys(("copied_bytes", "slots", "stalls", "gpu_batch_bytes"), 0)}
    runs = [{"direct": 1_000_000, "relay": 1_100_000, "feeder": 200_000}]
    figures = setup._figures(Shape(1000, 980), runs, before)
    assert figures["hidden"] == pytest.approx(0.5)
    assert figures["relay_to_direct"] == pytest.approx(1.1)
    assert figures["direct_reached"] == pytest.approx(0.98)
    assert figures["counts"]
    assert figures["copied_by"] == {"batch": 3}


@pytest.mark.system
def test_a_run_on_the_host_is_checked_and_says_that_its_nic_is_emulated() -> None:
    words = [sys.executable, "-m", "railrelay.client.cli", "bench", "overlap", "--runs", "1", "--json"]
    words += ["--rows", "16", "--pages", "64", "--piece", "4096"]
    before = set(processes.children(os.getpid()))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    for pid in set(processes.children(os.getpid())) - before:  # multiprocessing's tracker outlives its parent a little
        processes.exit_code(pid)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"]
    assert found["nic"] == "emulated"
    assert found["lane_bytes"] == 64 * 16 * 4096
