"""Child processes that are forked from one that has imported what they need, instead of started anew: where the machine
is emulated, Python takes seconds to start. Only there (tests/vm sets the variable); elsewhere each is started.

``python -m helpers.forks FD`` is the process that forks: a request a message, its descriptors with it."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

VARIABLE: Final = "RAILRELAY_TEST_FORKS"
TESTS: Final = Path(__file__).resolve().parent.parent

_PR_SET_PDEATHSIG: Final = 1
_REQUEST_BYTES: Final = 1 << 17
_DESCRIPTORS: Final = 64
_ADOPTED_S: Final = 60.0
# Not what children run as __main__: that is run in each.
_IMPORTS: Final = (
    *("pytest", "numpy", "railrelay.client", "railrelay.daemon.conductor", "railrelay.daemon.verbs_ports", "uvloop"),
    *("helpers.patterns", "helpers.verbs_plane", "helpers.verbs_stand_in"),
    *(f"railrelay.client.cli.{verb}" for verb in ("rails", "lanes", "peers", "errors", "topo", "doctor")),
)


@dataclass
class Forked:
    """A child of this process; as subprocess.Popen."""

    pid: int
    stdin: IO[str] | None = None
    stdout: IO[str] | None = None
    returncode: int | None = field(default=None, init=False)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                select.select([descriptor], [], [], timeout)
            finally:
                os.close(descriptor)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Forks:
    """The process that forks, seen from the one whose children those become, by adoption."""

    def __init__(self) -> None:
        self._asks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            variables = {**os.environ, "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, "-m", "helpers.forks", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=variables)

    def start(
        self,
        arguments: Sequence[str],
        *,
        standard: Sequence[int],
        pass_fds: Sequence[int],
        environment: Mapping[str, str],
        limit_s: int,
    ) -> int:
        """Its pid. ``standard``: its stdin, stdout and stderr."""
        request = {
            "arguments": list(arguments),
            "targets": [0, 1, 2, *pass_fds],
            "environment": dict(environment),
            "folder": os.getcwd(),
            "parent": os.getpid(),
            "limit_s": limit_s,
        }
        socket.send_fds(self._asks, [json.dumps(request).encode()], [*standard, *pass_fds])
        answer = self._asks.recv(64)
        assert answer, "the process that forks has ended"
        return int(answer)

    def close(self) -> None:
        self._asks.close()
        self._process.wait()


def enabled() -> bool:
    return bool(os.environ.get(VARIABLE))


# ---- the process that forks ----


def _requested(asks: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Returns in each child, and at the end."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(asks, _REQUEST_BYTES, _DESCRIPTORS)
        if not data:
            return None
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                os.close(reader)
                os.close(writer)
                return json.loads(data), descriptors
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(between, 0)  # from now on the child is its adopter's
        asks.send(os.read(reader, 64))
        for descriptor in (reader, *descriptors):
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    targets = request["targets"]
    above = max(*targets, *descriptors) + 1  # no target is overwritten before it is read
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for target, descriptor in zip(targets, moved, strict=True):
        os.dup2(descriptor, target)
    kept = [-1, *sorted(targets), os.sysconf("SC_OPEN_MAX")]
    for before, after in itertools.pairwise(kept):
        if before + 1 < after:
            os.closerange(before + 1, after)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != request["parent"]:
        if time.monotonic() > deadline:
            sys.exit("not adopted")
        time.sleep(0.001)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.alarm(request["limit_s"])


def main() -> None:
    for name in _IMPORTS:
        import_module(name)
    with socket.socket(fileno=int(sys.argv[1])) as asks:
        found = _requested(asks)
        if found is None:
            return
        asks.detach()
    request, descriptors = found
    _become(request, descriptors)
    arguments = request["arguments"]
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
