"""The verbs NIC between two data planes of one process: on the stand-in for libibverbs, or on real devices, as in the
virtual machine of tests/vm."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers import processes, verbs_stand_in
from helpers.processes import TESTS
from helpers.verbs_plane import REAL

SCRIPT = TESTS / "verbs" / "plane_cases.py"
ADDRESSES = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]
LACK = "" if REAL else verbs_stand_in.missing()

pytestmark = pytest.mark.skipif(bool(LACK), reason=LACK or "there")


def cases() -> list[str]:
    wanted = {"case"} if REAL else {"case", "stand_in_case"}
    found = [node for node in ast.parse(SCRIPT.read_text()).body if isinstance(node, ast.FunctionDef)]
    return [
        one.name
        for one in found
        if any(isinstance(mark, ast.Name) and mark.id in wanted for mark in one.decorator_list)
    ]


@pytest.mark.parametrize("name", cases())
def test_verbs_nic(name: str, tmp_path: Path) -> None:
    environment = {} if REAL else verbs_stand_in.Fabric(tmp_path / "fabric").environment(ADDRESSES)
    environment["MALLOC_PERTURB_"] = "165"  # what reads freed memory fails
    log, limit_s = tmp_path / "log", 600 if REAL else processes.LIMIT_S
    process = processes.start([str(SCRIPT), name], log=log, limit_s=limit_s, environment=environment)
    try:
        assert process.wait(timeout=limit_s) == 0, log.read_text()[-8000:]
    finally:
        processes.end(process)
