"""Fixtures: real daemons, engine processes, and the proof that a test leaves nothing behind."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from helpers import leaks
from helpers.engines import Engines
from helpers.nodes import Nodes

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


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


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    """Starts engine processes; whatever still runs is killed."""
    engines = Engines(tmp_path)
    yield engines
    engines.close()
