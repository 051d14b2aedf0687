"""Engine processes of demo and bench: each holds one object, whose methods the parent calls over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

from railrelay.client.errors import ErrorCode, RelayError

TIMEOUT_S: Final = 120.0
_EXIT_S: Final = 5.0
_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class Closes(Protocol):
    def close(self) -> None: ...


class Worker:
    """A process that makes ``make(*arguments)`` and serves it until close(), or until its parent is gone."""

    def __init__(self, name: str, make: Callable[..., Closes], *arguments: object) -> None:
        """Does not wait until the object is made: the first result() does."""
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, child_end = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_end, make, arguments), name=name, daemon=True)
        resource_tracker.ensure_running()  # else start() does it, and that unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a process that is half started cannot be ended
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            child_end.close()
        self._pending = 1

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def begin(self, method: str, *arguments: object) -> None:
        self._pending += 1
        try:
            self._pipe.send((method, arguments))
        except OSError:
            raise self._ended() from None

    def result(self, timeout: float = TIMEOUT_S) -> Any:  # noqa: ANN401
        """Of the oldest begin(), or of making the object. RelayError if it failed or the process ended."""
        try:
            if not self._pipe.poll(timeout):
                text = f"{self.name} (pid {self.pid}): no answer within {timeout:g} s"
                raise RelayError(ErrorCode.WAIT_TIMEOUT, text)
            good, answer = self._pipe.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        self._pending -= 1
        if not good:
            raise RelayError(ErrorCode.INTERNAL, f"{self.name}: {answer}")
        return answer

    def has_result(self, timeout: float) -> bool:
        return self._pipe.poll(timeout)

    def ask(self, method: str, *arguments: object, timeout: float = TIMEOUT_S) -> Any:  # noqa: ANN401
        self.begin(method, *arguments)
        return self.result(timeout)

    def close(self) -> None:
        self._pipe.close()
        if self._pending:  # it works on something that nobody waits for any more
            self._process.terminate()
        self._process.join(_EXIT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ended(self) -> RelayError:
        self._process.join(1)
        return RelayError(ErrorCode.INTERNAL, f"{self.name} (pid {self.pid}) ended with {self._process.exitcode}")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, make: Callable[..., Closes], arguments: tuple[object, ...]) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS - {signal.SIGINT})  # Ctrl-C is for the parent
    with contextlib.suppress(EOFError, ConnectionError):  # the parent is gone or wants no more
        good, made = _attempt(make, arguments)
        pipe.send((good, None if good else made))
        if not good:
            return
        with contextlib.closing(made):
            while True:
                method, arguments = pipe.recv()
                pipe.send(_attempt(getattr(made, method), arguments))
    sys.stderr.flush()


def _attempt(call: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[bool, Any]:
    try:
        return True, call(*arguments)
    except RelayError as failure:
        return False, str(failure)
    except Exception as failure:  # noqa: BLE001 - whatever it is, it belongs to the parent
        return False, f"{type(failure).__name__}: {failure}"
