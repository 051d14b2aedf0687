"""railrelay topo: the map of a made machine, and of this one through the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.machine_tree import Gids, MachineTree, dgx, switch

from railrelay.client.cli import FAILED, OK, main, topo
from railrelay.daemon import config, topology
from railrelay.daemon.discovery import VerbsPort

VERBS = '[[rail]]\nnic = "verbs"\n'
TRUSTED = "[security]\nallow_unauthenticated = true\n"


def facts(tree: MachineTree, text: str) -> dict[str, Any]:
    return topology.read(config.parse(text), "made", tree.root)


def shown(tree: MachineTree, text: str) -> list[str]:
    return topo.report(facts(tree, text)).splitlines()


def test_each_gpu_has_its_rail_its_nic_the_distance_and_why(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    found = facts(tree, VERBS * 8)
    assert found["error"] == ""
    assert [(gpu["rail"], gpu["distance"], gpu["numa"]) for gpu in found["gpus"]] == [
        (number, "PIX", number // 4) for number in range(8)
    ]
    assert {gpu["why"] for gpu in found["gpus"]} == {"nearest: behind the same PCIe switch"}
    rail = found["rails"][3]
    expected = {
        "rail": 3, "identity": "rail3", "nic": "verbs", "device": "mlx5_8", "port": 1, "gid_index": 3,
        "gid": "0000:0000:0000:0000:0000:ffff:0a03:0001", "gid_type": "RoCE v2", "address": "10.3.0.1",
        "subnet": "10.3.0.0/24",
        "interface": "mlx5_8-eth", "state": "ACTIVE", "speed_gbit": 400.0, "interface_mtu": 9000,
        "why_device": "the next ACTIVE port in NIC order, 4 of 8", "why_gid": "RoCE v2, routable, on 10.3.0.0/24",
        "numa": 0,
    }  # fmt: skip
    assert {key: rail[key] for key in expected} == expected
    lines = shown(tree, VERBS * 8)
    assert lines[2].split() == ["GPU", "PCI", "NUMA", "RAIL", "NIC", "DISTANCE", "WHY"]
    assert lines[3].split()[3:8] == ["0", "mlx5_5", "port", "1", "PIX"]
    assert "rail 3: the next ACTIVE port in NIC order, 4 of 8; GID: RoCE v2, routable, on 10.3.0.0/24" in lines


def test_what_is_configured_is_said_to_be(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    text = f'[node]\nrail_of_rank = [1, 0]\n{VERBS}device = "mlx5_9"\ngid_index = 3\n{VERBS}address = "10.0.0.1"\n'
    found = facts(tree, text)
    assert [(gpu["rail"], gpu["distance"], gpu["why"]) for gpu in found["gpus"][:3]] == [
        (1, "PIX", "node.rail_of_rank"),
        (0, "SYS", "node.rail_of_rank"),
        (None, "", "node.rail_of_rank does not name this rank"),
    ]
    assert [(rail["device"], rail["why_device"], rail["why_gid"]) for rail in found["rails"]] == [
        ("mlx5_9", "configured", "configured"),
        ("mlx5_5", "its GID table has 10.0.0.1", "RoCE v2, the rail's address"),
    ]
    assert len(found["other_ports"]) == 6
    assert "no rail's: mlx5_6 port 1: free" in topo.report(found)


def test_a_configuration_that_cannot_be_had_is_shown_beside_what_there_is(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path / "machine")
    tree.gpu(switch(0, 0))
    tree.port("mlx5_0", switch(0, 1), gids=Gids.of("10.0.0.1"), state="1: DOWN")
    found = facts(tree, VERBS)
    assert found["error"].startswith("rail[0].device: no RDMA port is left for this rail (mlx5_0 port 1 is DOWN)")
    text = topo.report(found)
    assert "no rail's: mlx5_0 port 1: is DOWN" in text
    assert f"cannot be used here: {found['error']}" in text


def test_tcp_rails_show_their_interface_and_ranks_go_in_order(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path / "machine")
    tree.gpu(switch(0, 0))
    tree.gpu(switch(1, 0))
    tree.interface("eth0", switch(1, 1), address="10.0.0.1/24", mtu=1500)
    tree.interface("eth1", switch(0, 1), address="10.1.0.1/24")
    found = facts(tree, f'{TRUSTED}[[rail]]\naddress = "10.0.0.1"\n[[rail]]\naddress = "10.1.0.1"\n')
    assert [(rail["interface"], rail["subnet"], rail["interface_mtu"]) for rail in found["rails"]] == [
        ("eth0", "10.0.0.0/24", 1500),
        ("eth1", "10.1.0.0/24", 9000),
    ]
    assert [(gpu["rail"], gpu["why"]) for gpu in found["gpus"]] == [
        (0, "in order: rank modulo rails"),
        (1, "in order: rank modulo rails"),
    ]
    assert found["gpus"][0]["distance"] == "NODE"


def test_without_nics_and_gpus_it_says_what_the_default_does(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path / "machine")
    notes = facts(tree, "")["notes"]
    assert notes[0] == "no RDMA NIC: there is nothing in /sys/class/infiniband"
    assert notes[1].startswith("no NVIDIA GPU: rank r sends by rail r modulo 1")
    assert notes[2] == "this is what railrelayd does without a configuration: one rail of TCP sockets on 127.0.0.1"
    assert "RAIL  IDENTITY  NIC" in topo.report(facts(tree, ""))


def test_the_command_works_without_a_daemon(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["topo", "--instance", "none-such", "--json"]) == OK
    found = json.loads(capsys.readouterr().out)["topology"]
    assert found["configuration"] == "the default (no daemon runs, and --config names no file)"
    assert [(rail["nic"], rail["address"]) for rail in found["rails"]] == [("tcp", "127.0.0.1")]
    path = tmp_path / "railrelayd.toml"
    path.write_text(f'{VERBS}device = "none-such"\n')
    assert main(["topo", "--instance", "none-such", "--config", str(path)]) == FAILED
    told = capsys.readouterr().out
    assert told.startswith(f"configuration: {path}\n\ncannot be used here: rail[0].")
    path.write_text("[[rails]]\n")
    assert main(["topo", "--instance", "none-such", "--config", str(path)]) == FAILED
    assert f"{path}: rails: no such option" in capsys.readouterr().err


def test_the_mtu_of_each_rail_is_that_of_its_interface(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    tree.interface("eth9", address="10.9.0.1/24", mtu=1500)
    tcp = '[[rail]]\naddress = "10.9.0.1"\n[[rail]]\naddress = "10.8.0.1"\n'
    loaded = config.parse(f'{TRUSTED}{VERBS}device = "mlx5_6"\n{tcp}')
    (port,) = (port for port in topology.read_ports(tree.root)[0] if port.device == "mlx5_6")
    named = VerbsPort(port.device, port.number, 3, b"", "")
    assert topology.interface_mtus(loaded, {0: named}, tree.root) == [9000, 1500, 0]
