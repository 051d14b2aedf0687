"""Fixtures: real daemons, engine processes, and the proof that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest
from helpers import leaks, processes, rail_devices
from helpers import shim as shims
from helpers.engines import Engines
from helpers.nodes import Nodes

STEP_LIMIT_S = 90
_FAILED = pytest.StashKey[bool]()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Nothing hangs: no step of a test takes anywhere near this long. Counts seconds in which this process could run,
    so that a machine that stood still is not taken for a hang."""
    began, ticks = time.monotonic(), 0

    limit_s = STEP_LIMIT_S * rail_devices.slowness()

    def tick(_signal: int, _frame: FrameType | None) -> None:
        nonlocal ticks
        ticks += 1
        if ticks == limit_s:
            raise AssertionError(
                f"the test hangs: this step ran for {limit_s} s, {time.monotonic() - began:.0f} s by the clock,"
                f" {time.process_time():.0f} s of CPU time in this process, load {os.getloadavg()[0]:.1f}\n{where()}"
            )

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def where() -> str:
    """Where each thread of this process stands, and what its child processes do."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines += [f"thread {names.get(ident, ident)}:", *traceback.format_stack(frame)[-6:]]
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            threads = ", ".join(f"{t.id}: {t.user_time + t.system_time:.1f} s" for t in child.threads())
            lines.append(f"child {child.pid} {child.name()} is {child.status()}; threads {threads}")
    return "\n".join(lines)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with limited():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with limited():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    with limited():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


def pytest_configure() -> None:
    processes.adopt_orphans()
    processes.begin_forks()


def pytest_unconfigure() -> None:
    processes.end_forks()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No shared memory object, descriptor, thread or child process that was not there before. A failed test keeps its
    own error: its traceback holds what it made."""
    before = leaks.held()
    yield
    request.node.funcargs.clear()  # or pytest keeps what other fixtures have made for a little longer
    found = {} if request.node.stash.get(_FAILED, False) else leaks.left_behind(before)
    assert not found, f"left behind: {found}"


@pytest.fixture
def nic() -> str:
    """Of the rails of daemons; a module that is marked with rail_devices.every_nic runs with each."""
    return "tcp"


@pytest.fixture
def nodes(tmp_path: Path, nic: str) -> Iterator[Nodes]:
    """Starts daemons; they must end cleanly."""
    nodes = Nodes(tmp_path, nic)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """ring.h, lane.h and trace.h, compiled for Python."""
    return shims.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Starts engine processes; whatever still runs is killed."""
    engines = Engines(tmp_path)
    yield engines
    engines.close()
