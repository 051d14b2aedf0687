"""railrelay topo and doctor beside running daemons."""

from __future__ import annotations

import json
import signal
import socket

import pytest
from helpers import processes
from helpers.nodes import Nodes
from helpers.waiting import until

from railrelay.client.cli import FAILED, main

pytestmark = pytest.mark.system


def test_topo_shows_the_configuration_of_the_daemon_that_runs(nodes: Nodes) -> None:
    node = nodes.start(["127.0.0.1", "127.0.0.2"])
    found = node.cli("topo")["topology"]
    assert found["configuration"] == f"{node.config_path}, of the daemon pid {node.pid}"
    assert [rail["address"] for rail in found["rails"]] == ["127.0.0.1", "127.0.0.2"]
    assert not any("other rails" in note for note in found["notes"])
    node.config_path.write_text(node.config_path.read_text().replace('"127.0.0.2"', '"127.0.0.3"'))
    assert any("has other rails" in note for note in node.cli("topo")["topology"]["notes"])


def test_a_daemon_that_was_killed_and_not_reaped_is_none_that_runs(nodes: Nodes) -> None:
    node = nodes.start()
    node.process.send_signal(signal.SIGKILL)
    until(lambda: processes.state(node.pid) == "Z", "the daemon has ended")
    assert "waits as a zombie" in node.cli("topo")["topology"]["configuration"]
    assert node.cli("lanes")["daemon"]["process"] == "unreaped"
    node.wait()


def test_doctor_compares_the_mtu_with_that_of_the_peer(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    near, far = nodes.pair((2, 1))
    checks = {check["check"]: check for check in near.cli("doctor", "--peer", far.session)["checks"]}
    compared = checks["mtu of the peer"]
    assert compared["result"] == "warn"
    assert compared["seen"] == "rail0 65536 here, 65536 there; only at one end: rail1"
    assert far.errors() == []
    (same,) = [c for c in far.cli("doctor", "--peer", far.session)["checks"] if c["check"] == "mtu of the peer"]
    assert (same["result"], same["seen"]) == ("ok", "rail0 65536 here, 65536 there")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        session = f"127.0.0.1:{closed.getsockname()[1]}"
    assert main(["doctor", "--instance", near.instance, "--peer", session, "--json"]) == FAILED
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["mtu of the peer"]["result"] == "fail"
    assert "Connection refused" in checks["mtu of the peer"]["seen"]
