"""What the bench makes of its runs, and what the demo and the bench take of the machine."""

import pytest

from railrelay.client.cli import _bench_overlap, _nodes, bench, demo, main
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


def test_overlap_is_not_judged_where_the_nic_did_not_keep_its_rate() -> None:
    found = {"relay_to_direct": 0.5, "load": {"zeros": {"relay_to_idle_direct": 9.0}}}
    judged = _bench_overlap.targets_of({**found, "counts": True})
    assert [target.met for target in judged] == [True, False]
    for target in _bench_overlap.targets_of({**found, "counts": False}):
        assert target.facts()["met"] is None
        assert target.text().endswith(": not judged")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("fairness --rails 3", "--rails: means nothing to fairness"),
        ("fairness --route local", "--route: local means nothing to fairness"),
        ("fairness --rate 3", "--rate: means nothing to fairness"),
        ("waiting --runs 3", "--runs: means nothing to waiting"),
        ("submit --block-bytes 4096", "--block-bytes: means nothing to submit"),
        ("overlap --rails 2", "--rails: means nothing to overlap --memory host without --rows"),
        ("overlap --pages 3", "--pages: means nothing to overlap --memory host without --rows"),
        ("overlap --load", "--load: means nothing to overlap --memory host"),
        ("--memory cuda --rows 2 --blocks 3", "--blocks: means nothing to overlap --memory cuda with --rows"),
        ("--route local --private", "--private: means nothing to transfer --route local"),
        ("--rate-gbit 2", "--rate-gbit: means nothing to transfer --nic tcp"),
        ("--devices mlx5_0", "--devices: means nothing to transfer --nic tcp"),
        ("--nic verbs --congestion bbr", "--congestion: means nothing to transfer --nic verbs"),
        ("--runs 0", "--runs: 0: expected 1 to 10000"),
        ("--runs -1", "--runs: -1: expected 1 to 10000"),
        ("--rails 17", "--rails: 17: expected 1 to 16"),
        ("--blocks 1e6", "--blocks: 1e6: expected 1 to 16777216"),
        ("overlap --rate 0", "--rate: 0: expected 0.001 to 10000"),
        ("overlap --rate nan", "--rate: nan: expected 0.001 to 10000"),
        ("overlap --rate 1e9", "--rate: 1e9: expected 0.001 to 10000"),
        ("fairness --rate-gbit -1", "--rate-gbit: -1: expected 0.01 to 400"),
    ],
)
def test_an_option_without_meaning_or_out_of_its_limits_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", *words.split()])
    assert ended.value.code == 2
    assert f"error: argument {said}" in capsys.readouterr().err


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
