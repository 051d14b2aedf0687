"""Bytes that say where they belong: every 8-byte word follows from what it is part of and where it is in it, so that
a piece that is missing, torn, or in another's place is seen."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

UNWRITTEN: Final = np.uint64(0xA5A5A5A5A5A5A5A5)
_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def keys(*parts: int | Words) -> Words:
    """A 64-bit key for each combination of the parts, which are numbers or arrays of equal length (splitmix64)."""
    state = np.zeros(1, np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            state = (state + np.asarray(part, np.uint64) + np.uint64(1)) * _STEP
            for shift, factor in zip((30, 27), _FACTORS, strict=True):
                state = (state ^ (state >> np.uint64(shift))) * factor
            state ^= state >> np.uint64(31)
    return state


def words(of_keys: Words, first: int, count: int) -> Words:
    """Words ``first`` to ``first + count - 1`` of what each key names: [keys, count]."""
    steps = np.arange(first, first + count, dtype=np.uint64) * _STEP
    return of_keys[:, None] + steps[None, :]
