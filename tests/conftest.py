"""Fixtures: real daemons, engine processes, and the proof that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from helpers import leaks, processes
from helpers import shim as shims
from helpers.engines import Engines
from helpers.nodes import Nodes

STEP_LIMIT_S = 90
_FAILED = pytest.StashKey[bool]()


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Nothing hangs: no step of a test takes anywhere near this long."""

    def give_up(*_: object) -> None:
        raise AssertionError(f"the test hangs: this step has run for {STEP_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(STEP_LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


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
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    """Starts daemons; they must end cleanly."""
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """ring.h and lane.h, compiled for Python."""
    return shims.build(tmp_path_factory.mktemp("shim"))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Starts engine processes; whatever still runs is killed."""
    engines = Engines(tmp_path)
    yield engines
    engines.close()
