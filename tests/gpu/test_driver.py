"""The stand-in driver itself, and the copier on it, under sanitizers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from helpers import gpus
from helpers.gpus import Card, Control

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
CLIENT = HERE.parents[1] / "client"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_driver_and_copier_under_sanitizers(tmp_path: Path, sanitizer: str) -> None:
    flags = (f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all")
    probe = subprocess.run(
        [os.environ.get("CC", "cc"), *flags, "-x", "c", "-o", str(tmp_path / "probe"), "-"],
        input="int main(void) { return 0; }",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if probe.returncode:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer}")
    more = [str(gpus.HELPERS / "cuda_driver.c"), str(CLIENT / "gpu_copy.c"), "-I", str(CLIENT)]
    program = gpus.compiled(HERE / "driver_check.c", tmp_path / "check", *flags, *more)
    found = subprocess.run(
        [str(program)],
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        env={**os.environ, "CUDA_DRIVER_DELAY_US": "20", "CUDA_DRIVER_SEED": "7"},
    )
    assert found.returncode == 0, found.stderr[-4000:]


def test_the_cpu_finds_nothing_at_addresses_of_the_gpu(gpu: Card, control: Control) -> None:
    """Whoever forgets that memory is a GPU's finds out in tests."""
    address = gpu.alloc(4096)
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        begin, end = (int(part, 16) for part in span.split("-"))
        if begin <= address < end:
            assert access.startswith("---")
            break
    else:
        raise AssertionError("the address is not reserved")
    assert control.count("allocated") == 1


def test_a_driver_that_tests_do_not_know_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(gpus.FORCE, "standin")
    with pytest.raises(ValueError, match="RAILRELAY_TEST_GPU=standin: expected stand-in"):
        gpus.why_no_gpu()
