"""Fault points: each of the table stands in the code of its process, and an armed one kills at the passage that was
asked for."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Final

import pytest
from helpers import processes
from helpers.nodes import Nodes, config_text
from helpers.processes import TESTS

from railrelay.shm_layout import faults

HEADER: Final = TESTS.parent / "shm_layout" / "faults.h"


def passed_in(folder: str) -> list[str]:
    """Names of the points that the code of a folder passes, as often as it does."""
    symbols = dict(re.findall(r'X\((\w+), "([\w.]+)"', HEADER.read_text()))
    found: list[str] = []
    for path in (TESTS.parent / folder).glob("*.[cp]*"):
        found += [symbols[symbol] for symbol in re.findall(r"rr_fault_point\(RR_FAULT_(\w+)\)", path.read_text())]
        found += re.findall(r'faults\.point\("([\w.]+)"\)', path.read_text())
    return found


@pytest.mark.parametrize("folder", ["client", "daemon"])
def test_every_point_of_a_process_stands_in_its_code(folder: str) -> None:
    named = {name for name in faults.POINTS if name.startswith(f"{folder}.")}
    assert len(named) > 20
    assert set(passed_in(folder)) == named


def test_every_point_belongs_to_a_process_and_says_what_has_happened() -> None:
    for name, text in faults.POINTS.items():
        assert re.fullmatch(r"(client|daemon)\.[a-z]+\.[a-z_]+", name), name
        assert text, name


def test_a_process_dies_at_the_passage_that_it_was_told_and_not_before() -> None:
    reading, writing = os.pipe()

    def child() -> None:
        faults.arm("daemon.note.due:3")
        for passage in (1, 2, 3):
            faults.point("daemon.note.delivered")
            faults.point("daemon.note.due")
            os.write(writing, str(passage).encode())

    code = processes.exit_code(processes.fork(child))
    os.close(writing)
    assert (os.read(reading, 100), code) == (b"12", -signal.SIGKILL)
    os.close(reading)


def test_a_point_that_was_disarmed_is_passed() -> None:
    def child() -> None:
        faults.arm("daemon.note.due")
        faults.arm("")
        faults.point("daemon.note.due")

    assert processes.exit_code(processes.fork(child)) == 0


def test_compiled_code_is_armed_whether_it_is_imported_before_or_after() -> None:
    told: list[tuple[int, int]] = []

    def child() -> None:
        faults.arm("client.lane.rung:2")
        faults.join(lambda number, passages: told.append((number, passages)))
        faults.arm("client.lane.filled")
        assert told == [(number("client.lane.rung"), 2), (number("client.lane.filled"), 1)]

    def number(name: str) -> int:
        return list(faults.POINTS).index(name) + 1

    assert processes.exit_code(processes.fork(child)) == 0


@pytest.mark.parametrize("text", ["client.lane.rang", "client.lane.rung:0", "client.lane.rung:x", ":2"])
def test_what_names_no_passage_of_a_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fault point"):
        faults.arm(text)


def test_the_environment_arms_a_process_and_a_bad_name_there_is_an_error() -> None:
    def run(value: str) -> subprocess.CompletedProcess[str]:
        code = "from railrelay.shm_layout import faults; faults.point('client.request.sent'); print('on')"
        environment = {**os.environ, faults.VARIABLE: value}
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False, env=environment
        )

    assert run("client.request.sent").returncode == -signal.SIGKILL
    assert run("client.request.sent:2").stdout == "on\n"
    assert "there is no such point" in run("client.request").stderr


@pytest.mark.system
def test_a_daemon_dies_at_the_point_of_its_configuration_and_refuses_another(nodes: Nodes) -> None:
    node = nodes.start(node={"fault": "daemon.attach.segment:2"})
    with node.connect(0):
        assert node.process.poll() is None
        with pytest.raises(Exception, match=r"daemon pid \d+ exited"):
            node.connect(0)
    assert node.wait() == -signal.SIGKILL
    code, said = nodes.fails(config_text("x", nodes.directory / "x", 1, {"node": {"fault": "daemon.attach"}}))
    assert code == 2
    assert "node.fault: fault point 'daemon.attach': there is no such point" in said
