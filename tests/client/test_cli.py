"""The admin verbs over a node segment that no daemon serves."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from railrelay.client import paths
from railrelay.client.cli import NO_DAEMON, OK, VERBS, main
from railrelay.client.errors import ErrorCode
from railrelay.client.protocol import RailFacts
from railrelay.daemon import config
from railrelay.daemon.node_state import NodeState
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import AreaPlan, ClientState, PeerState, Segment

RAILS, CLIENTS, SLOTS = 2, 3, 18
CHILD_SECONDS = 20
AREAS = {
    "rail_state": "RAILS",
    "lane_state": "LANES",
    "client_state": "CLIENTS",
    "peer_state": "PEERS",
    "error_record": "ERRORS",
}


@dataclass(frozen=True)
class Node:
    instance: str
    segment: Segment

    def write(self, structure: str, row: int, **values: int | str) -> None:
        self.segment.area(abi.CONSTANTS[f"AREA_{AREAS[structure]}"], structure).write(row, **values)

    def lane(self, rail: int, client: int, **values: int) -> None:
        self.write("lane_state", rail * CLIENTS + client, client=client, slots=SLOTS, slot_bytes=8 << 20, **values)


def make_node(instance: str, owner_pid: int) -> Segment:
    rows = {
        "rail_state": RAILS,
        "lane_state": RAILS * CLIENTS,
        "client_state": CLIENTS,
        "peer_state": 2,
        "error_record": 4,
    }
    plans = [AreaPlan(abi.CONSTANTS[f"AREA_{AREAS[name]}"], name, count) for name, count in rows.items()]
    header = {"rails": RAILS, "slots": SLOTS, "max_clients": CLIENTS, "instance": 1}
    made = segment.create(
        paths.node_segment(instance), abi.CONSTANTS["SEGMENT_NODE"], plans, header, mode=0o640, owner_pid=owner_pid
    )
    made.publish()
    return made


@pytest.fixture
def node() -> Iterator[Node]:
    instance = f"test-cli-{os.getpid()}"
    with make_node(instance, os.getpid()) as made:
        yield Node(instance, made)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_lanes_shows_who_fills_which_rail_and_the_credit_left(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.write("client_state", 2, state=ClientState.ATTACHED, pid=4711, rank=5, name="prefill-5")
    node.lane(
        1, 2, leased=1, pid=4711, rank=5, generation=9, head=12, doorbell=10, completed=8, stalls=3, bytes=3 << 20
    )
    found = as_json(capsys, "lanes", "--instance", node.instance)
    about = {"pid": os.getpid(), "alive": True, "process": "running", "phase": "running", "rails": RAILS}
    assert found["daemon"] == about
    [lane] = found["lanes"]
    assert (lane["rail"], lane["sender"], lane["client"], lane["pid"], lane["name"]) == (1, 5, 2, 4711, "prefill-5")
    assert (lane["credit"], lane["head"], lane["doorbell"], lane["completed"]) == (14, 12, 10, 8)
    assert main(["lanes", "--instance", node.instance]) == OK
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["LANE", "CLIENT"]
    assert line.split()[:4] == ["1<-5", "2", "4711", "prefill-5"]
    assert "3.0 MiB" in line


def test_lanes_hides_the_idle_ones_unless_asked(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.lane(0, 1, leased=0, direct_bytes=64)
    node.lane(0, 2, leased=0, local_bytes=64)
    assert [lane["client"] for lane in as_json(capsys, "lanes", "--instance", node.instance)["lanes"]] == [1, 2]
    assert len(as_json(capsys, "lanes", "--all", "--instance", node.instance)["lanes"]) == RAILS * CLIENTS


def test_json_keys_of_lanes_are_the_documented_ones(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    lane = as_json(capsys, "lanes", "--all", "--instance", node.instance)["lanes"][0]
    assert set(lane) >= {
        "rail", "sender", "client", "pid", "name", "leased", "generation", "slots", "slot_bytes", "credit", "head",
        "doorbell", "completed", "bytes", "blocks", "runs", "stalls", "stall_ns", "voids", "direct_bytes",
        "direct_slices", "local_bytes", "queued_slices",
    }  # fmt: skip


def test_a_lane_of_a_former_client_does_not_carry_the_name_of_the_next(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.write("client_state", 0, state=ClientState.ATTACHED, pid=2, name="the next one")
    node.lane(0, 0, leased=1, pid=1)
    assert as_json(capsys, "lanes", "--instance", node.instance)["lanes"][0]["name"] == ""


def test_clients_shows_those_that_are_attached(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.write("client_state", 1, state=ClientState.DRAINING, pid=12, rank=3, name="decode", regions=4, lanes=2)
    [client] = as_json(capsys, "clients", "--instance", node.instance)["clients"]
    assert (client["client"], client["state"], client["rank"], client["regions"]) == (1, "draining", 3, 4)
    assert main(["clients", "--instance", node.instance]) == OK
    assert "decode" in capsys.readouterr().out


def test_peers_shows_session_and_state(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.write(
        "peer_state", 1, state=PeerState.CONNECTED, session="[fd00::1]:4000", instance=0xABC, rails=8, since_ns=1
    )
    [peer] = as_json(capsys, "peers", "--instance", node.instance)["peers"]
    assert (peer["session"], peer["state"], peer["instance"]) == ("[fd00::1]:4000", "connected", "0000000000000abc")


def test_errors_come_in_the_order_in_which_they_last_happened(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    code = ErrorCode.VIOLATION.number
    node.write(
        "error_record", 0, count=3, first_ns=10**9, last_ns=9 * 10**9, code=code, text="lane 3<-5: head moved back"
    )
    node.write("error_record", 2, count=1, first_ns=10**9, last_ns=2 * 10**9, code=9_999, text="of a newer daemon")
    assert main(["errors", "--instance", node.instance]) == OK
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[-5:] == ["internal", "of", "a", "newer", "daemon"]
    assert second.split()[:3] == ["3", "1970-01-01", "00:00:01Z"]
    assert "violation" in second


def test_of_errors_with_one_cause_the_first_and_the_last_text_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    loaded = config.parse(f'[node]\ninstance = "test-texts-{os.getpid()}"\n')
    with closing(NodeState(loaded, 1, [RailFacts("rail0", "tcp", "127.0.0.1", 1)])) as state:
        for address in ("10.0.0.1", "10.0.0.2", "10.0.0.3"):
            state.error(ErrorCode.PROTOCOL, f"connection of {address}", key="connections")
        state.error(ErrorCode.LIMIT, "alone")
        instance = loaded.node.instance
        texts = [
            (row["text"], row["first_text"]) for row in as_json(capsys, "errors", "--instance", instance)["errors"]
        ]
        assert texts == [("connection of 10.0.0.3", "connection of 10.0.0.1"), ("alone", "alone")]
        assert main(["errors", "--instance", instance]) == OK
        _, first, second = capsys.readouterr().out.splitlines()
        assert first.endswith("  connection of 10.0.0.3 (at first: connection of 10.0.0.1)")
        assert second.endswith("  alone")


def test_nothing_to_show_is_said(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("lanes", "clients", "peers", "errors"):
        assert main([verb, "--instance", node.instance]) == OK
        assert capsys.readouterr().out == f"no {verb}\n"


def test_the_state_of_a_dead_daemon_is_shown_as_its_last(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        made = make_node(f"test-dead-{os.getpid()}", child.pid)
        child.communicate(b"\n", CHILD_SECONDS)
    with made:
        assert main(["lanes", "--instance", f"test-dead-{os.getpid()}"]) == OK
        assert capsys.readouterr().err == f"daemon pid {child.pid} is gone; this is its last state\n"
        assert as_json(capsys, "lanes", "--instance", f"test-dead-{os.getpid()}")["daemon"]["alive"] is False


def test_a_daemon_that_was_killed_and_not_reaped_is_not_alive(capsys: pytest.CaptureFixture[str]) -> None:
    instance = f"test-zombie-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        made = make_node(instance, child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with made:
            assert main(["lanes", "--instance", instance]) == OK
            assert capsys.readouterr().err == (
                f"daemon pid {child.pid} has ended and waits as a zombie for its parent process to notice;"
                " this is its last state\n"
            )
            about = as_json(capsys, "lanes", "--instance", instance)["daemon"]
            assert (about["alive"], about["process"]) == (False, "unreaped")


def test_a_missing_instance_is_named_with_those_that_exist(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanes", "--instance", "elsewhere"]) == NO_DAEMON
    told = capsys.readouterr().err
    assert "no such instance: 'elsewhere'" in told
    assert node.instance in told
    assert "start railrelayd" in told
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(CHILD_SECONDS)
    with make_node(f"{node.instance}-ended", child.pid):
        assert main(["trace", "--instance", "elsewhere"]) == NO_DAEMON
    live, ended = capsys.readouterr().err.split("of daemons that have ended")
    assert f"{node.instance}-ended" in ended
    assert "-ended" not in live
    assert node.instance in live


def test_another_major_version_is_refused_by_name(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.segment.header.set(0, "version", 99 << 16)
    assert main(["lanes", "--instance", node.instance]) == 1
    assert "99" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["lane"], ["lanes", "--rail", "3"]])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(f"\n    {verb} " in told for verb in VERBS)


def test_a_reader_that_leaves_early_is_no_error(node: Node) -> None:
    script = (
        f"import sys; from railrelay.client.cli import main; sys.exit(main(['lanes', '--instance', {node.instance!r}]))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as out:
        done = subprocess.run([sys.executable, "-c", script], stdout=out, stderr=subprocess.PIPE, timeout=CHILD_SECONDS)
    assert done.returncode == 1
    assert done.stderr == b""


def test_the_admin_verbs_need_no_data_path() -> None:
    script = (
        "import sys; from railrelay.client.cli import main; main(['lanes', '--instance', 'none']);"
        " sys.exit(any(name in sys.modules for name in ('numpy', 'railrelay.client.core')))"
    )
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.DEVNULL, timeout=CHILD_SECONDS)
    assert done.returncode == 0
