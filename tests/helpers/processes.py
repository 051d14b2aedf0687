"""Child processes with a time limit that they cannot outlive, even if the tests are killed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final, Protocol

from helpers import forks
from helpers.forks import Forked, Forks

LIMIT_S: Final = 120
TESTS: Final = Path(__file__).resolve().parent.parent

# An alarm outlives exec, and nobody here handles SIGALRM; SIGTERM comes if the tests are killed.
_LAUNCHER: Final = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
    " signal.alarm(int(sys.argv[1])); os.execv(sys.argv[2], sys.argv[2:])"
)


_forks: Forks | None = None


class Process(Protocol):
    """A child, started or forked."""

    @property
    def pid(self) -> int: ...
    @property
    def stdin(self) -> IO[str] | None: ...
    @property
    def stdout(self) -> IO[str] | None: ...
    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


def start(
    arguments: Sequence[str],
    *,
    log: Path,
    limit_s: int = LIMIT_S,
    pass_fds: Sequence[int] = (),
    pipes: bool = False,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    anew: bool = False,
) -> Process:
    """Starts ``python arguments`` with helpers importable. What it says goes to ``log``; with ``pipes`` its stdin and
    stdout are pipes. ``prefix``: a command that runs it, such as unshare. ``anew``: never forked (helpers/forks.py)."""
    found = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": found, "PYTHONUNBUFFERED": "1"}
    if _forks is not None and not anew and not prefix and "LD_LIBRARY_PATH" not in (environment or {}):
        return _forked(_forks, arguments, log, limit_s, pass_fds, variables, pipes=pipes)
    launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(limit_s)]
    command = [*launcher, sys.executable, *arguments]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else output,
            stderr=output,
            pass_fds=pass_fds,
            env=variables,
            text=True,
        )


def _forked(
    server: Forks,
    arguments: Sequence[str],
    log: Path,
    limit_s: int,
    pass_fds: Sequence[int],
    environment: Mapping[str, str],
    *,
    pipes: bool,
) -> Forked:
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")).fileno()
        stdin, stdout, ours = stack.enter_context(open(os.devnull)).fileno(), output, None
        if pipes:
            (stdin, write_end), (read_end, stdout) = os.pipe(), os.pipe()
            stack.callback(os.close, stdin)
            stack.callback(os.close, stdout)
            ours = os.fdopen(write_end, "w"), os.fdopen(read_end)
        standard = (stdin, stdout, output)
        pid = server.start(arguments, standard=standard, pass_fds=pass_fds, environment=environment, limit_s=limit_s)
    return Forked(pid, *ours) if ours else Forked(pid)


def begin_forks() -> None:
    """Where children are forked, not started: before the first of them."""
    global _forks
    if forks.enabled():
        _forks = Forks()


def end_forks() -> None:
    global _forks
    if _forks is not None:
        _forks.close()
        _forks = None


def end(process: Process) -> int:
    """Kills what still runs; the exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    code = process.wait(10)
    for pipe in (process.stdin, process.stdout):
        _close(pipe)
    return code


def _close(pipe: IO[str] | None) -> None:
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, instead of getting lost."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        try:
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
        except FileNotFoundError:
            continue
    return found


def alive(pid: int) -> bool:
    """A zombie is not."""
    return state(pid) not in ("", "Z", "X")


def state(pid: int) -> str:
    """The letter of /proc/<pid>/stat; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def fork(child: Callable[[], None], limit_s: int = 30) -> int:
    """Runs ``child`` in a forked process, which then ends with 0, or with 1 and a traceback; its pid."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later, if there are threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(limit_s)
        child()
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(pid: int) -> int:
    """Waits for a forked child; negative: the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
