"""The daemon's log. A thread of its own writes the lines to stderr: a disk that is full, or a reader that has stopped,
stops nobody. What cannot be written is dropped, counted and told of later."""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import Final

MAX_WAITING: Final = 4096  # lines
END_S: Final = 1.0  # for what still waits when the process ends
STDERR: Final = 2


class LogHandler(logging.Handler):
    def __init__(self, fd: int = STDERR) -> None:
        super().__init__()
        self._fd = fd
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_WAITING)
        self._lost = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """What waits is written, if that is possible at once. Idempotent."""
        if self._thread is not None:
            try:
                self._lines.put_nowait(None)
            except queue.Full:
                pass
            else:
                self._thread.join(END_S)
        super().close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            lost = self._lost
            text = f"{lost} lines of the log were lost: they could not be written\n{line}" if lost else line
            if self._write(f"{text}\n".encode(errors="replace")):
                self._lost -= lost
            else:
                self._lost += 1

    def _write(self, data: bytes) -> bool:
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            return False
        return True
