"""A GPU for every test here: a real one, or the stand-in driver."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from helpers import gpus
from helpers.gpus import Card, Control, Driver

from railrelay.client import cuda


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Which one it is, is printed. The real driver's contexts stay, as those of an engine do."""
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings: pip install .[test] or .[cuda]")
    found = gpus.load(tmp_path_factory.mktemp("driver"))
    os.environ.update(found.environment)
    missing = cuda.missing()
    assert not missing, missing
    names = ", ".join(cuda.uuid_of(ordinal) for ordinal in range(cuda.count()))
    print(f"GPUs: {names}; {'stand-in driver, ' + found.why if found.why else 'real driver'}")
    kept = [cuda.Gpu(ordinal) for ordinal in range(cuda.count())] if found.is_real else []
    if found.is_real:
        with contextlib.suppress(ImportError):  # so that what torch opens once belongs to no test
            import torch

            torch.zeros(1, device="cuda")
    yield found
    for gpu in kept:
        gpu.close()


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_driver(driver: Driver) -> Iterator[None]:
    """No object of the stand-in that was not there before."""
    if driver.control is None:
        yield
        return
    before = driver.control.counts()
    yield
    driver.control.recover()
    after = driver.control.counts()
    assert after == before, {what: after[what] - before[what] for what in after if after[what] != before[what]}


@pytest.fixture
def control(driver: Driver) -> Control:
    """For tests that only the stand-in can carry out."""
    if driver.control is None:
        pytest.skip("a real driver has no faults to order, and its streams cannot be held")
    return driver.control


@pytest.fixture
def gpu() -> Iterator[Card]:
    """The first GPU as the engine uses it: close() frees the engine's memory."""
    found = Card(0)
    yield found
    found.close()


@pytest.fixture
def other_gpu() -> Iterator[Card]:
    """The second one, or the same where there is one only."""
    found = Card(min(1, cuda.count() - 1))
    yield found
    found.close()


@pytest.fixture
def two_gpus(gpu: Card, other_gpu: Card) -> tuple[Card, Card]:
    if gpu.ordinal == other_gpu.ordinal:
        pytest.skip("needs two GPUs, there is one")
    return gpu, other_gpu
