"""Waiting for a condition: it is polled, and only a limit far above any sane time makes the test fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

LIMIT_S: Final = 30.0
PAUSE_S: Final = 0.005

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, limit_s: float = LIMIT_S, pause_s: float = PAUSE_S) -> T:
    """The first true value of ``condition()``; AssertionError that names ``what`` after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(pause_s)
