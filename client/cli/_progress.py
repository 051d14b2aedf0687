"""What a long-running verb says on stderr while it works: a line a step, rewritten in place on a terminal."""

from __future__ import annotations

import sys
import time
from typing import Final

_EVERY_S: Final = 0.2  # on a terminal
_LINES_EVERY_S: Final = 5.0  # elsewhere


class Progress:
    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = 0.0
        self._open = False

    def step(self, text: str) -> None:
        """A line that stays."""
        self._end_line()
        print(text, file=sys.stderr, flush=True)
        self._next = time.monotonic() + (_EVERY_S if self._terminal else _LINES_EVERY_S)

    def update(self, text: str) -> None:
        """Replaces the last update; dropped if one was shown a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (_EVERY_S if self._terminal else _LINES_EVERY_S)
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            print(text, file=sys.stderr, flush=True)

    def _end_line(self) -> None:
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr)
            self._open = False
