"""The verbs NIC between two data planes of one process, on the stand-in for libibverbs."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from helpers import processes, verbs_stand_in
from helpers.processes import TESTS

SCRIPT = TESTS / "verbs" / "plane_cases.py"
ADDRESSES = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]

pytestmark = pytest.mark.skipif(bool(verbs_stand_in.missing()), reason=verbs_stand_in.missing() or "there")


def cases() -> list[str]:
    tree = ast.parse(SCRIPT.read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]


@pytest.mark.parametrize("name", cases())
def test_verbs_nic(name: str, tmp_path: Path) -> None:
    fabric = verbs_stand_in.Fabric(tmp_path / "fabric")
    log = tmp_path / "log"
    process = processes.start([str(SCRIPT), name], log=log, environment=fabric.environment(ADDRESSES))
    try:
        assert process.wait(timeout=processes.LIMIT_S) == 0, log.read_text()[-8000:]
    finally:
        processes.end(process)
