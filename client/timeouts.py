"""Time-outs as callers of the library give them: seconds, and anything else before it was looked at here."""

from __future__ import annotations

import math
from typing import Final

from railrelay.client.errors import ArgumentError, ErrorCode

# 146 years: what clocks and locks add to the present must not wrap around.
LONGEST_S: Final = float(1 << 62) / 1e9


def seconds(timeout: float, *, above_zero: bool = False) -> float:
    """A time-out that ends; of more than a life it is that long. ArgumentError for what is no number or below 0, or is
    0 where that would end at once what it is for (``above_zero``)."""
    try:
        if timeout > 0 or (timeout == 0 and not above_zero):
            return float(min(timeout, LONGEST_S))
    except (TypeError, ValueError):  # no number, or many
        pass
    expected = "a number above 0" if above_zero else "a number, 0 or more"
    raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"timeout of {timeout!r} s; expected {expected}")


def nanoseconds(timeout: float | None) -> int:
    """For the C part, of a wait that may be without a limit: None, -1 there."""
    return -1 if timeout is None else math.ceil(seconds(timeout) * 1e9)
