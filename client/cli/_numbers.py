"""Types of options that are numbers, with their limits."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from contextlib import suppress


def whole(most: int) -> Callable[[str], int]:
    """A whole number from 1 on."""

    def parsed(text: str) -> int:
        found = int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0
        if not 1 <= found <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected 1 to {most}")
        return found

    return parsed


def amount(least: float, most: float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        found = math.nan
        with suppress(ValueError):
            found = float(text)
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text}: expected {least:g} to {most:g}")
        return found

    return parsed
