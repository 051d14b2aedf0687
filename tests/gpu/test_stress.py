"""Two engines with four threads each send stamped lines to each other; nothing is torn, nothing grows.

RAILRELAY_STRESS_S: for how many seconds, 6 by default."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from helpers import processes
from helpers.engines import Engine, Engines
from helpers.gpus import Driver
from helpers.nodes import Nodes
from helpers.waiting import until

pytestmark = [pytest.mark.gpu, pytest.mark.system]

SECONDS = float(os.environ.get("RAILRELAY_STRESS_S", "6"))
THREADS = 4
PART_BYTES = 768 << 10
NBYTES = THREADS * PART_BYTES
GROWTH_KIB = 32 << 10


def resident_kib(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def held(pids: list[int]) -> list[tuple[int, int]]:
    """(descriptors, threads) of each"""
    return [(processes.descriptors(pid), processes.threads(pid)) for pid in pids]


def turn(engines: list[Engine], seconds: float) -> int:
    """Both directions at once for so long; how many transfers."""
    for number, engine in enumerate(engines):
        for thread in range(THREADS):
            engine.ask(
                "stress",
                source="source",
                remote="target",
                thread=thread,
                seed=number * THREADS + thread,
                words=PART_BYTES // 8,
                stride_words=PART_BYTES // 8,
            )
    time.sleep(seconds)
    rounds = 0
    for engine in engines:
        said = engine.ask("stop")
        assert not said["wrong"], said["wrong"]
        rounds += said["rounds"]
    for number, engine in enumerate(engines):
        wrong = engine.ask("is_stamped", name="target", who=1 - number, part_bytes=PART_BYTES, of_bytes=PART_BYTES)
        assert not wrong, wrong
    return rounds


@pytest.mark.parametrize("rails", [1, 2])
def test_two_engines_in_both_directions(nodes: Nodes, engines: Engines, driver: Driver, rails: int) -> None:
    nodes.limit_s = int(SECONDS) + 240
    both = nodes.pair((rails, rails))
    started = [
        engines.start_gpu(node, gpu=0, environment=driver.environment, limit_s=int(SECONDS) + 240) for node in both
    ]
    offers = []
    for number, engine in enumerate(started):
        engine.ask("memory", name="source", nbytes=NBYTES)
        engine.ask("stamp", name="source", who=number)
        offers.append(engine.ask("memory", name="target", nbytes=NBYTES))
    for engine, offer in zip(started, reversed(offers), strict=True):
        engine.ask("open", name="target", offer=offer)
    turn(started, 1)
    if not driver.is_real:
        for engine in started:
            engine.ask("delay", most_us=50)
    turn(started, 1)
    pids = [*(node.pid for node in both), *(engine.pid for engine in started)]
    before, memory = held(pids), [resident_kib(pid) for pid in pids]
    left = SECONDS
    while left > 0:  # in steps: each checks every byte
        assert turn(started, min(left, 20.0)) > 0
        left -= 20
    until(lambda: held(pids) == before, f"descriptors and threads are those of before: {before}, now {held(pids)}")
    grown = [resident_kib(pid) - at for pid, at in zip(pids, memory, strict=True)]
    assert max(grown) < GROWTH_KIB, f"memory grew by {grown} KiB"
