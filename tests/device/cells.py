"""Content that says where it belongs: memory in cells of 4 KiB, each line of 64 bytes unlike any other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railrelay.client.cli import _content
from railrelay.client.cli._bench_memory import WIPED, Pool

CELL_BYTES: Final = 4096
LINE_BYTES: Final = 64
_CHUNK: Final = 8192  # cells
_SEED: Final = 23

Cells = npt.NDArray[np.int64]


def fill(pool: Pool, first: int, count: int) -> None:
    """Cells ``first`` to ``first + count - 1`` with what their numbers say."""
    for at, step in _chunks(first, count):
        pool.put(at * CELL_BYTES, _content_of(np.arange(at, at + step)).reshape(-1))


def wrong_lines(pool: Pool, number: int, first: int, sources: Cells, *, wiped_is_right: bool = False) -> int:
    """Lines, from cell ``first`` on, that are not those of the cells ``sources``; with ``wiped_is_right``, that have a
    byte that is neither right nor untouched."""
    wrong = 0
    for at, step in _chunks(0, len(sources)):
        raw = pool.get(number, (first + at) * CELL_BYTES, step * CELL_BYTES)
        found = raw.reshape(-1, LINE_BYTES)
        expected = _content_of(sources[at : at + step]).reshape(-1, LINE_BYTES)
        differs = found != expected
        if wiped_is_right:
            differs &= found != WIPED
        wrong += int(differs.any(axis=1).sum())
    return wrong


def addresses(base: int, cells: Cells, cell_bytes: int = CELL_BYTES) -> npt.NDArray[np.uint64]:
    return cells.astype(np.uint64) * np.uint64(cell_bytes) + np.uint64(base)


def _content_of(cells: Cells) -> npt.NDArray[np.uint8]:
    words: npt.NDArray[Any] = _content.words(_content.keys(_SEED, cells.astype(np.uint64)), 0, CELL_BYTES // 8)
    return words.view(np.uint8)


def _chunks(first: int, count: int) -> Iterator[tuple[int, int]]:
    for at in range(first, first + count, _CHUNK):
        yield at, min(_CHUNK, first + count - at)
