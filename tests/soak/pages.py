"""What the pages of the soak hold: every word follows from what was written there last and from where it is, so that
a byte of any earlier content is seen."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import numpy.typing as npt

from railrelay.client.cli import _content

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.uint64]

AREA_BYTES: Final = 1 << 20
_PAINT, _CONTENT = 1, 2
_SHAPES: Final = ((64, 256), (4096, 256), (65536, 16), (AREA_BYTES, 1))  # bytes of a block, most of them
_FULL_SHARE: Final = 0.25


def paint(seed: int) -> Bytes:
    """What the owner of a destination puts there once a transfer has ended."""
    return _area(_PAINT, seed)


def content(seed: int) -> Bytes:
    """What a transfer carries."""
    return _area(_CONTENT, seed)


def _area(kind: int, seed: int) -> Bytes:
    words = _content.words(_content.keys(kind, seed), 0, AREA_BYTES // 8)
    return words.reshape(-1).view(np.uint8)


def blocks(seed: int) -> tuple[Places, Places, int]:
    """(source offsets, destination offsets, bytes of a block) of a transfer: blocks of one size in random order, with
    gaps that it must not touch, or a whole area."""
    rng = random.Random(seed)
    nbytes, most = rng.choice(_SHAPES)
    places = AREA_BYTES // nbytes
    count = min(most, places) if rng.random() < _FULL_SHARE else rng.randint(1, min(most, places))
    ends = [np.array(rng.sample(range(places), count), np.uint64) * np.uint64(nbytes) for _ in range(2)]
    return ends[0], ends[1], nbytes


def placed(before: Bytes, seed: int) -> Bytes:
    """``before`` with the blocks of the transfer in it."""
    sources, destinations, nbytes = blocks(seed)
    after, carried = before.copy().reshape(-1, nbytes), content(seed).reshape(-1, nbytes)
    after[destinations // np.uint64(nbytes)] = carried[sources // np.uint64(nbytes)]
    return after.reshape(-1)
