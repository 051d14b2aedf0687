"""The inputs that fuzzing has kept, each of them once more."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fuzz.targets import C_TARGETS, PYTHON_TARGETS, build, builds, corpus, environment, has_verbs, python_target, unpack

pytestmark = pytest.mark.system

LIMIT_S = 300


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = os.environ.get("CC", "cc")
    directory = tmp_path_factory.mktemp("fuzz")
    if not builds(compiler, "-fsanitize=address,undefined", "int main(void) { return 0; }"):
        pytest.skip(f"{compiler} has no AddressSanitizer")
    return build(directory, compiler, fuzzer=False)


def runs(command: list[str]) -> None:
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S, env=environment())
    assert ended.returncode == 0, f"{ended.stdout[-500:]}\n{ended.stderr[-8000:]}"


@pytest.mark.parametrize("target", C_TARGETS)
def test_every_input_of_the_corpus_runs_without_a_fault(binaries: dict[str, Path], target: str, tmp_path: Path) -> None:
    if target == "messages" and not has_verbs(os.environ.get("CC", "cc")):
        pytest.skip("no infiniband/verbs.h; apt-get install libibverbs-dev")
    inputs = unpack(corpus(target), tmp_path / target)
    assert inputs
    runs([str(binaries[target]), *map(str, inputs)])


@pytest.mark.parametrize("target", PYTHON_TARGETS)
def test_every_input_of_a_python_target_runs_without_a_fault(target: str, tmp_path: Path) -> None:
    inputs = unpack(corpus(target), tmp_path / target)
    assert inputs
    runs([*python_target(target), "--replay", *map(str, inputs)])
