"""Commands to rail threads and their answers, paired by cookie. Main thread only."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class _Pending:
    answers: int
    done: asyncio.Future[int]
    total: int = 0


@dataclass
class Commands:
    rails: int
    _cookies: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _pending: dict[int, _Pending] = field(default_factory=dict)

    def send(self, command: Callable[[int], object], answers: int = 1) -> asyncio.Future[int]:
        """Runs ``command`` with a new cookie. The result is the sum of the rails' values, once all have answered."""
        cookie = next(self._cookies)
        done = asyncio.get_running_loop().create_future()
        self._pending[cookie] = _Pending(answers, done)
        try:
            command(cookie)
        except BaseException:
            del self._pending[cookie]
            raise
        return done

    def to_all(self, command: Callable[[int], object]) -> asyncio.Future[int]:
        return self.send(command, self.rails)

    def answered(self, cookie: int, value: int) -> None:
        pending = self._pending.get(cookie)
        if pending is None:
            return  # answered after close()
        pending.answers -= 1
        pending.total += value
        if not pending.answers:
            del self._pending[cookie]
            if not pending.done.done():
                pending.done.set_result(pending.total)

    def close(self) -> None:
        """Whoever still waits is cancelled. Idempotent."""
        for pending in self._pending.values():
            pending.done.cancel()
        self._pending.clear()
