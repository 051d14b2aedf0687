"""What the bench makes of its runs, and what the demo and the bench take of the machine."""

import pytest

from railrelay.client.cli import _nodes, bench, demo
from railrelay.client.cli._bench_engines import Case
from railrelay.client.cli._bench_setup import Run, Usage
from railrelay.client.cli._bench_targets import targets_of
from railrelay.client.client import Route
from railrelay.client.errors import ErrorCode, RelayError

CASE = Case(16384, 65536)
GIGABYTES = CASE.nbytes / 1e9


def run(seconds: float, cpu_seconds: float) -> Run:
    return Run([int(seconds * 1e9)], Usage(cpu_seconds, 0, 0, 0, 0))


def pairs(*seconds: tuple[float, float]) -> list[bench.Pair]:
    """Of (limit, ours); the limit uses 0.4 CPU s/GB, ours 0.5, the copy 0.1."""
    return [
        bench.Pair(run(its, 0.4 * GIGABYTES), run(ours, 0.5 * GIGABYTES), 0.1 * GIGABYTES, 0) for its, ours in seconds
    ]


def test_the_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians() -> None:
    figures = bench._figures(CASE, pairs((1, 2), (2, 4), (8, 4)), 1)
    assert figures["ratio"] == 0.5
    assert figures["gigabytes_per_second"] == pytest.approx(GIGABYTES / 4)
    assert figures["limit_gigabytes_per_second"] == pytest.approx(GIGABYTES / 2)


@pytest.mark.parametrize(
    ("route", "private", "bound"),
    [(Route.RELAY_ALL, False, 0.8), (Route.DIRECT, False, 1.0), (Route.RELAY_ALL, True, 0.4 / 0.6)],
)
def test_the_bound_leaves_the_copies_their_share_of_the_cores(route: Route, private: bool, bound: float) -> None:
    case = Case(CASE.blocks, CASE.block_bytes, route=route, private=private)
    assert bench._figures(case, pairs((1, 1)), 1)["bound"] == pytest.approx(bound)


def test_targets_of_the_relay_are_relative_to_the_bound_and_to_the_cpu_of_limit_and_copy() -> None:
    facts = {"blocks": CASE.blocks, "block_bytes": CASE.block_bytes, "bytes": CASE.nbytes, "rails": 1, "private": False}
    ratio, cpu = targets_of({**bench._figures(CASE, pairs((1, 2)), 1), **facts, "route": "relay"})
    assert ratio.limit == pytest.approx(0.85 * 0.8)
    assert not ratio.met
    assert cpu.figure == pytest.approx(1.0)
    assert cpu.met


def test_a_case_that_nobody_named_has_no_target() -> None:
    facts = {"blocks": 7, "block_bytes": 12345, "bytes": 7 * 12345, "rails": 1, "private": False, "route": "direct"}
    assert targets_of(facts) == []


@pytest.mark.parametrize(("free", "slot_bytes"), [(64 << 30, 8 << 20), (64 << 20, 64 << 10)])
def test_geometry_fits_into_the_shared_memory_that_is_free(
    monkeypatch: pytest.MonkeyPatch, free: int, slot_bytes: int
) -> None:
    monkeypatch.setattr(_nodes, "free_shared_bytes", lambda: free)
    monkeypatch.setattr(_nodes, "free_bytes", lambda: 64 << 30)
    geometry = _nodes.fitting_geometry(rails=4, clients=8, lanes=16)
    assert slot_bytes <= geometry.slot_bytes
    assert 16 * geometry.lane_bytes + 8 * geometry.client_bytes(4) <= free // 2


def test_too_little_shared_memory_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nodes, "free_shared_bytes", lambda: 1 << 20)
    with pytest.raises(RelayError, match="/dev/shm") as caught:
        _nodes.fitting_geometry(rails=4, clients=8, lanes=16)
    assert caught.value.code == ErrorCode.NO_MEMORY


def test_the_demo_takes_fewer_tokens_where_memory_is_short_and_says_how_many_fit_if_asked_for_more() -> None:
    room = 200 << 20
    plan = demo.fitting_plan("llama-3.1-70b", None, "pp4", "tp4", room)
    assert 0 < plan.nbytes <= room
    with pytest.raises(RelayError, match=rf"use --tokens {plan.tokens} or fewer"):
        demo.fitting_plan("llama-3.1-70b", 1_000_000, "pp4", "tp4", room)
