"""The laboratory without its network: what a result says, and what is asked of a machine first."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lab import main, measure
from lab.cases import CASES, Traffic
from lab.engines import Done
from lab.fabric import Network, Pauses, Reading
from railrelay.client.cli import _nodes

LINE_BITS = 200_000_000
NETWORK = Network(2, 4, LINE_BITS, "reno")
SECONDS = 2.0
BUCKET_S = 0.02
HALF = [0.5] * round(SECONDS / BUCKET_S)
ALL_HALF = dict.fromkeys(NETWORK.ports, HALF)
PAUSES = Pauses(nics_ms=30.0, inside_ms=12.0, port_bytes_max=9014, late_max_ms=1.0, of_nics=ALL_HALF)
FIGURES = {"seconds", "gigabytes", "share_of_line_rate", "p99_ms", "rail_utilisation"}


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return CASES["smoke"].make(NETWORK.line_bytes_per_second)


def figures(traffic: Traffic, pauses: Pauses | None) -> dict[str, object]:
    """Of rails that were half used: each sender has sent a quarter of that to each decode rank."""
    nbytes = round(NETWORK.line_bytes_per_second * SECONDS / 2 / 4)
    done = [
        [Done(0, decode, 0, round(SECONDS * 1e9), nbytes) for decode in range(len(traffic.plan.decode))]
        for _ in traffic.senders
    ]
    reading = Reading(begin_ns=0, bucket_s=BUCKET_S, drops=3, sent=ALL_HALF, received=ALL_HALF, pauses=pauses)
    return measure.figures_of(traffic, NETWORK, done, reading)


@pytest.mark.parametrize("pauses", [PAUSES, None], ids=["lossless", "lossy"])
def test_a_route_says_how_much_of_the_line_it_used_and_how_long_transfers_took(
    traffic: Traffic, pauses: Pauses | None
) -> None:
    found = json.loads(json.dumps(figures(traffic, pauses)))
    assert found.keys() >= FIGURES
    assert found["seconds"] == SECONDS
    assert found["gigabytes"] == pytest.approx(4 * LINE_BITS / 8 * SECONDS / 2 / 1e9)
    assert found["share_of_line_rate"] == pytest.approx(0.5)
    assert found["p99_ms"] == SECONDS * 1e3
    assert found["rail_utilisation"] == {way: [pytest.approx(0.5)] * 4 for way in ("sent", "received")}


def test_a_lossless_fabric_counts_pauses_and_a_lossy_one_only_drops(traffic: Traffic) -> None:
    lossless, lossy = figures(traffic, PAUSES), figures(traffic, None)
    assert (lossless["pause_ms"], lossless["switch_drops"]) == (42.0, 3)
    assert "pause_ms" not in lossy
    assert lossy["switch_drops"] == 3


@pytest.mark.parametrize("kind", ["lossless", "lossy"])
def test_the_table_of_a_result_has_a_line_a_route(traffic: Traffic, kind: str) -> None:
    cpu = {"retransmits": 7, "cpu_share": 0.2, "machine_cpu_share": 0.3}
    found = figures(traffic, PAUSES if kind == "lossless" else None) | cpu
    found["paced"] = dict(found)
    result = {
        "case": "smoke",
        "text": "",
        "fabric": kind,
        "fabric_text": "",
        "mbit_per_second": 200.0,
        "congestion": "reno",
        "routes": {"direct": found, "relay": found},
    }
    lines = main.report(result).splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["direct", "relay"]
    assert lines[-1].split()[1:3] == ["2.00", "0.500"]


def test_a_disturbed_run_is_said_to_be() -> None:
    quiet = {"switch_late_max_ms": 3.0, "cpu_share": 0.3, "machine_cpu_share": 0.4}
    assert main.disturbances(quiet | {"paced": quiet}) == []
    late, busy = quiet | {"switch_late_max_ms": 55.0}, quiet | {"machine_cpu_share": 1.0}
    assert main.disturbances(late | {"paced": busy}) == [
        "the switch did not run for 55 ms",
        "other processes used 70% of the cores (paced)",
    ]


@pytest.mark.parametrize("name", CASES)
def test_every_job_of_a_case_has_something_to_send(name: str) -> None:
    case = CASES[name]
    traffic = case.make(NETWORK.line_bytes_per_second)
    for sender in traffic.senders:
        requests = set(traffic.plan.prefill[sender.share].share.requests)
        for queues in (sender.queues, sender.paced):
            jobs = [job.request for queue in queues for job in queue]
            assert len(jobs) == len(set(jobs))
            assert set(jobs) <= requests
        assert 0 <= sender.rank < case.rails


def _not_root(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "geteuid", lambda: 1000)


def _no_tools(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(main, "_PATH", "/nowhere")


def _no_matplotlib(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(importlib.util, "find_spec", lambda _: None)


def _reno_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_nodes, "congestion_controls", lambda: ["reno"])


@pytest.mark.parametrize(
    ("lack", "says"),
    [
        (_not_root, "root, for network namespaces: sudo"),
        (_no_tools, "ip and tc: apt install iproute2"),
        (_no_matplotlib, "matplotlib, for --figures"),
        (_reno_only, "cubic in this kernel, which has reno: modprobe tcp_cubic"),
    ],
)
def test_what_is_missing_is_named_with_the_next_step_before_anything_is_made(
    lack: Callable[[pytest.MonkeyPatch], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lack(monkeypatch)
    monkeypatch.setattr(main, "run", lambda *_: pytest.fail("a run has begun"))
    figures_path = tmp_path / "figures"
    assert main.main(["--cc", "cubic", "--figures", str(figures_path)]) == 2
    assert says in capsys.readouterr().err
    assert not figures_path.exists()
