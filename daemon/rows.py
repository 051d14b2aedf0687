"""Numbers of table rows. What was freed last is given out last, so that a late word about an old user meets no new
one."""

from __future__ import annotations

from collections import deque


class Rows:
    def __init__(self, count: int) -> None:
        self.count = count
        self._fresh = 0
        self._freed: deque[int] = deque()

    def take(self) -> int | None:
        """None if all are taken."""
        if self._fresh < self.count:
            self._fresh += 1
            return self._fresh - 1
        return self._freed.popleft() if self._freed else None

    @property
    def left(self) -> int:
        return self.count - self._fresh + len(self._freed)

    def free(self, row: int) -> None:
        self._freed.append(row)


class Handles:
    """Numbers whose remainder modulo ``count`` is a row; a row comes back under a new number."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._rows = Rows(count)
        self._uses: dict[int, int] = {}

    def take(self) -> int | None:
        """None if all rows are taken."""
        row = self._rows.take()
        if row is None:
            return None
        use = self._uses.get(row, -1) + 1
        if row + (use + 1) * self.count >= 1 << 32:
            use = 0
        self._uses[row] = use
        return row + use * self.count

    def free(self, handle: int) -> None:
        self._rows.free(handle % self.count)
