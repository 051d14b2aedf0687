"""railrelay trace: what it believes, what it draws, and what it counts."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from helpers import trace_files

from railrelay.client import paths
from railrelay.client.cli import FAILED, NO_DAEMON, OK, main
from railrelay.client.cli._trace_events import Owner, Slice, events, slice_of
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import AreaPlan, ClientState, PeerState, Segment

RAILS, CLIENTS, RECORDS = 2, 3, 64
NOW = 10**15
HOUR = 3_600_000_000_000
RAIL_NAMES = ("rail0", "rail1")
OWNERS = {(1, 7): Owner(5, "prefill-5")}


def record(**changes: int) -> dict[str, int]:
    made = {name: 0 for name in abi.FIELDS["trace_record"] if not name.startswith("reserved")}
    times = {"began_ns": NOW, "filled_ns": NOW + 1000, "taken_ns": NOW + 1500}
    ends = {"posted_ns": NOW + 2000, "completed_ns": NOW + 9000}
    what = {"client": 1, "client_serial": 7, "transfer": 3, "generation": 2, "bytes": 4096, "blocks": 2, "runs": 1}
    return {**made, **times, **ends, **what, **changes}


def one(rail: int = 0, **changes: int) -> Slice:
    return slice_of(rail, record(**changes), "ok")


def at(begin: int, end: int, rail: int = 0, **changes: int) -> Slice:
    """A slice of 4 equal phases."""
    step = (end - begin) // 4
    marks = ("began_ns", "filled_ns", "taken_ns", "posted_ns")
    times = {mark: NOW + begin + number * step for number, mark in enumerate(marks)}
    return one(rail, **times, completed_ns=NOW + end, **changes)


def drawn(*slices: Slice, counted: tuple[Slice, ...] = ()) -> list[trace_files.Event]:
    found = events(slices, counted or slices, RAIL_NAMES, OWNERS, ["10.0.0.2:4000"])
    trace_files.check(found)
    return found


# ---- times of the client ----


@pytest.mark.parametrize(
    ("began", "filled", "known"),
    [
        (NOW, NOW + 1, (NOW, NOW + 1)),
        (NOW + 1500, NOW + 1500, (NOW + 1500, NOW + 1500)),
        (NOW + 1500 - HOUR, NOW, (NOW + 1500 - HOUR, NOW)),
        (0, 0, (None, None)),
        (NOW + 1499 - HOUR, NOW, (None, NOW)),
        (NOW, NOW + 1501, (NOW, None)),  # filled after the rail saw it
        (NOW + 2, NOW + 1, (None, NOW + 1)),  # begun after it was filled
        ((1 << 64) - 1, (1 << 64) - 1, (None, None)),
        (NOW, 1, (NOW, None)),
    ],
)
def test_times_that_cannot_be_true_are_unknown(began: int, filled: int, known: tuple[int | None, int | None]) -> None:
    found = one(began_ns=began, filled_ns=filled)
    assert (found.began_ns, found.filled_ns) == known
    assert found.taken_ns >= found.first_ns
    phases = list(found.phases())
    assert all(begin <= end for _, begin, end in phases)
    names = [name for name, _, _ in phases]
    assert ("fill" in names) == (None not in known)
    assert ("doorbell" in names) == (known[1] is not None)
    [outer] = trace_files.slices(drawn(found))
    assert ("unknown" in outer["args"]) == (None in known)


def test_phases_follow_each_other_from_the_reservation_to_the_confirmation() -> None:
    phases = list(one().phases())
    assert [name for name, _, _ in phases] == ["fill", "doorbell", "queue", "place"]
    assert phases[0][1] == NOW
    assert phases[-1][2] == NOW + 9000
    assert all(left[2] == right[1] for left, right in itertools.pairwise(phases))


def test_a_slice_that_was_never_posted_ends_in_the_queue() -> None:
    found = one(posted_ns=0)
    assert list(found.phases())[-1] == ("queue", NOW + 1500, NOW + 9000)
    [outer] = trace_files.slices(drawn(found))
    assert outer["args"]["posted"] == "never"


# ---- events ----


def test_a_rail_is_a_process_and_a_lane_a_row_that_says_whose_it_is() -> None:
    found = drawn(at(0, 400), at(0, 400, direct=1), at(0, 400, client=2), at(0, 400, rail=1))
    assert trace_files.rows(found, "process_name") == {(1, 0): "rail 0 (rail0)", (2, 0): "rail 1 (rail1)"}
    assert sorted(trace_files.rows(found).values()) == [
        "direct",
        "lane 0<-5 client 1",
        "lane 0<-? client 2.7",
        "lane 1<-5 client 1",
    ]


def test_an_event_says_what_was_sent_and_where() -> None:
    [outer] = trace_files.slices(drawn(one(tag=7, slot=4, remote_rail=1, blocks=9, runs=8)))
    assert outer["name"] == "transfer 3.2"
    assert outer["args"] == {
        "transfer": "3.2",
        "tag": "0x7",
        "client": "1 prefill-5",
        "peer": "10.0.0.2:4000",
        "remote_rail": 1,
        "slot": 4,
        "bytes": 4096,
        "blocks": 9,
        "runs": 8,
        "result": "ok",
    }


def test_slices_of_a_lane_that_overlap_get_rows_of_their_own_and_as_few_as_need_be() -> None:
    found = drawn(at(0, 400), at(100, 500), at(400, 800), at(500, 900), at(1000, 1400))
    assert sorted(trace_files.rows(found).values()) == ["lane 0<-5 client 1", "lane 0<-5 client 1 (2)"]
    assert len(trace_files.slices(found)) == 5


def test_phases_of_any_length_nest_whatever_the_clock_says() -> None:
    slices = [
        one(
            began_ns=NOW + start,
            filled_ns=NOW + start + start % 7,
            taken_ns=NOW + start + start % 7 + start % 3,
            posted_ns=NOW + start + start % 7 + start % 3 + start % 2,
            completed_ns=NOW + start + start % 7 + start % 3 + start % 2 + start % 5 + 1,
        )
        for start in range(0, 3_000_000_007, 1_234_567)
    ]
    assert len(trace_files.slices(drawn(*slices))) == len(slices)


def test_counters_follow_slots_in_use_and_bytes_in_flight() -> None:
    found = drawn(at(0, 400), at(100, 500), at(600, 1000, direct=1))
    tracks: dict[str, list[tuple[int, int]]] = {}
    for event in found:
        if event["ph"] == "C":
            [value] = event["args"].values()
            tracks.setdefault(event["name"], []).append((trace_files.ns(event["ts"]), value))
    assert tracks["lane 0<-5 client 1 slots"] == [(0, 1), (100, 2), (400, 1), (500, 0)]
    assert tracks["bytes in flight"] == [(300, 4096), (400, 4096), (500, 0), (900, 4096), (1000, 0)]


def test_counters_of_one_transfer_also_count_the_others_that_were_under_way() -> None:
    shown, other = at(400, 800), at(0, 600, transfer=9)
    found = drawn(shown, counted=(shown, other))
    slots = [(event["ts"], event["args"]["slots"]) for event in found if "slots" in event.get("args", {})]
    assert slots == [(0, 1), (0, 2), (0.2, 1), (0.4, 0)]


# ---- the verb ----


@dataclass
class Node:
    instance: str
    segment: Segment
    written: list[int] = field(default_factory=lambda: [0] * RAILS)

    def add(self, rail: int = 0, **changes: int) -> None:
        self.written[rail] += 1
        row = rail * RECORDS + self.written[rail] % RECORDS
        area = self.segment.area(abi.CONSTANTS["AREA_TRACE"], "trace_record")
        area.write(row, **record(position=self.written[rail], **changes))


@pytest.fixture
def node() -> Iterator[Node]:
    instance = f"test-trace-{os.getpid()}"
    rows = {
        "RAILS": ("rail_state", RAILS),
        "CLIENTS": ("client_state", CLIENTS),
        "PEERS": ("peer_state", 2),
        "TRACE": ("trace_record", RAILS * RECORDS),
    }
    plans = [AreaPlan(abi.CONSTANTS[f"AREA_{name}"], structure, count) for name, (structure, count) in rows.items()]
    made = segment.create(
        paths.node_segment(instance),
        abi.CONSTANTS["SEGMENT_NODE"],
        plans,
        {"rails": RAILS, "max_clients": CLIENTS, "trace_records": RECORDS},
        mode=0o640,
        owner_pid=os.getpid(),
    )
    clients = made.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state")
    clients.write(1, state=ClientState.ATTACHED, serial=7, rank=5, name="prefill-5")
    peers = made.area(abi.CONSTANTS["AREA_PEERS"], "peer_state")
    peers.write(0, state=PeerState.CONNECTED, session="10.0.0.2:4000")
    made.publish()
    with made:
        yield Node(instance, made)


def traced(
    node: Node, path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[dict[str, Any], list[Any]]:
    """(summary, slices in the file)"""
    assert main(["trace", "--instance", node.instance, "-o", str(path), "--json", *options]) == OK
    found = json.loads(capsys.readouterr().out)
    assert found["daemon"]["alive"] is True
    return found["trace"], trace_files.slices(trace_files.load(path))


def test_the_summary_has_percentiles_of_each_phase(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(3):
        node.add()
    node.add(1, direct=1, result=abi.RESULTS["ABORTED"], began_ns=0)
    found, slices = traced(node, tmp_path / "t.json", capsys)
    assert len(slices) == 4
    assert (found["slices"], found["transfers"], found["failed"], found["unknown_times"], found["lost"]) == (
        4,
        1,
        1,
        1,
        0,
    )
    phases = {(phase["way"], phase["phase"]): phase for phase in found["phases"]}
    assert phases["lane", "fill"] == {"way": "lane", "phase": "fill", "slices": 3, "p50_us": 1.0, "p99_us": 1.0}
    assert phases["lane", "total"]["p99_us"] == 9.0
    assert ("direct", "fill") not in phases
    assert main(["trace", "--instance", node.instance, "-o", str(tmp_path / "t.json")]) == OK
    told = capsys.readouterr().out
    assert "4 slices of 1 transfer in 9.0 us; 1 failed; 1 with unknown times" in told
    assert str(tmp_path / "t.json") in told


def test_the_latest_slices_or_those_of_one_transfer(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(RECORDS + 5):
        node.add(transfer=number, tag=number * 2, completed_ns=NOW + 9000 + number)
    path = tmp_path / "t.json"
    found, slices = traced(node, path, capsys)
    assert (found["slices"], found["lost"]) == (RECORDS, 0)
    assert {slice_["args"]["transfer"] for slice_ in slices} == {f"{number}.2" for number in range(5, RECORDS + 5)}
    assert [slice_["args"]["transfer"] for slice_ in traced(node, path, capsys, "--last", "1")[1]] == ["68.2"]
    for option, count in (("9", 1), ("9.2", 1), ("9.1", 0), ("0x12", 1), ("0x13", 0)):
        assert len(traced(node, path, capsys, "--transfer", option)[1]) == count


def test_seconds_shows_only_what_ends_from_now_on(
    node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.add()
    found, slices = traced(node, tmp_path / "t.json", capsys, "--seconds", "0.02")
    assert (found["slices"], slices) == (0, [])


def test_a_file_without_slices_says_so(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    assert main(["trace", "--instance", node.instance, "-o", str(path), "--json"]) == OK
    assert capsys.readouterr().err == f"railrelay trace: {path} shows nothing: the rails keep no slice\n"
    node.add(tag=1)
    assert main(["trace", "--instance", node.instance, "-o", str(path), "--json", "--transfer", "0x2"]) == OK
    assert "shows nothing: none of the 1 slices is of this transfer" in capsys.readouterr().err
    traced(node, path, capsys)
    assert capsys.readouterr().err == ""


def test_a_file_that_cannot_be_written_is_named(node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "t.json"
    assert main(["trace", "--instance", node.instance, "-o", str(path)]) == FAILED
    assert f"{path}: No such file or directory" in capsys.readouterr().err


def test_without_a_daemon_nothing_is_written(tmp_path: Path) -> None:
    assert main(["trace", "--instance", "elsewhere", "-o", str(tmp_path / "t.json")]) == NO_DAEMON
    assert not (tmp_path / "t.json").exists()


@pytest.mark.parametrize(
    "options",
    [["--last", "0"], ["--seconds", "0"], ["--seconds", "61"], ["--transfer", "x"], ["--last", "1", "--seconds", "1"]],
)
def test_wrong_options_exit_with_2(options: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *options])
    assert ended.value.code == 2
