"""What the bench makes of its rounds, and what it refuses. (CI runs it.)"""

from __future__ import annotations

import pytest

from railrelay.client import ArgumentError
from railrelay.client.cli import _bench_fairness as bench


def test_a_round_in_which_the_machine_stood_still_does_not_decide() -> None:
    quiet, disturbed = [1_000] * 99 + [2_000], [1_000] * 90 + [900_000] * 10
    found = bench._compared([quiet] * 3, [[4_000] * 100, disturbed, [3_000] * 100])
    assert found["ratio"] == pytest.approx(4_000 / found["p99_us"] / 1e3)
    assert found["p50_us"] == 1


def test_the_ratio_of_throughput_is_the_median_of_pairs() -> None:
    assert bench._ratio_of([(100, 100), (100, 400), (90, 100)]) == pytest.approx(0.9)


def test_a_bulk_transfer_that_does_not_fit_is_refused_with_its_limits() -> None:
    for wanted in (1, 1 << 60):
        with pytest.raises(ArgumentError, match=rf"--bulk-bytes {wanted}: expected 67108864 to \d+"):
            bench._bulk_bytes(wanted)
