"""Discovery of real RDMA devices with the distribution's pyverbs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import links
from helpers.nodes import SMALL, Nodes, config_text, merged, new_instance
from helpers.verbs_rails import RAILS

from railrelay.client.cli import main
from railrelay.daemon import discovery, verbs_ports
from railrelay.daemon.config import ConfigError, Rail
from railrelay.daemon.discovery import resolve

FIRST, SECOND = list(RAILS)[:2]
CHILD_SECONDS = 60
VERBS = {"rail": {"nic": "verbs"}}


def open_rails(count: int) -> list[Rail]:
    return [Rail(nic="verbs")] * count


def test_pyverbs_and_the_kernels_files_say_the_same() -> None:
    asked = discovery.ports()
    assert [port.device for port in asked] == list(RAILS)
    assert {port.active_mtu for port in asked} == {4096}
    assert [dataclasses.replace(port, active_mtu=0) for port in asked] == verbs_ports.of_sysfs()


def test_rails_that_name_nothing_get_the_devices_in_order_and_a_routable_gid() -> None:
    found = resolve(open_rails(len(RAILS)))
    assert {port.device: port.address for port in found} == RAILS
    for one in found:
        assert one.port is not None
        (gid,) = (gid for gid in one.port.gids if gid.index == one.gid_index)
        assert (gid.kind, gid.raw, str(gid.address)) == (verbs_ports.ROCE_V2, one.gid, one.address)
        assert str(one.subnet) == "10.77.0.0/24"
        assert one.port.netdev == gid.netdev == one.device.replace("rxe", "v")


def test_an_address_or_a_device_names_the_rail() -> None:
    found = resolve([Rail(nic="verbs"), Rail(nic="verbs", address=RAILS[FIRST]), Rail(nic="verbs", device=SECOND)])
    assert [port.device for port in found[1:]] == [FIRST, SECOND]
    assert found[0].device not in (FIRST, SECOND)
    by_index = Rail(nic="verbs", device=SECOND, gid_index=found[2].gid_index)
    assert resolve([by_index])[0].gid == found[2].gid


def test_a_port_that_is_down_is_no_rails_unless_it_is_named() -> None:
    with links.down(SECOND):
        found = resolve(open_rails(len(RAILS) - 1))
        assert [port.device for port in found] == [device for device in RAILS if device != SECOND]
        with pytest.raises(ConfigError, match=f"{SECOND} port 1 is DOWN"):
            resolve(open_rails(len(RAILS)))
        (named,) = resolve([Rail(nic="verbs", device=SECOND)])
        assert named.port is not None
        assert not named.port.active


def test_pyverbs_is_taken_from_the_distribution_and_nothing_else_is() -> None:
    script = (
        "import json, sys; before = list(sys.path)\n"
        "from railrelay.daemon import pyverbs_loader\n"
        "loaded = pyverbs_loader.load()\n"
        "folder = str(pyverbs_loader.DISTRIBUTION) + '/'\n"
        "names = [n for n, m in sys.modules.items() if (getattr(m, '__file__', '') or '').startswith(folder)]\n"
        "print(json.dumps([before == sys.path, str(loaded.folder), loaded.version, sorted(names)]))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=CHILD_SECONDS)
    assert done.returncode == 0, done.stderr
    unchanged, folder, version, names = json.loads(done.stdout)
    assert unchanged
    assert folder.endswith("/pyverbs")
    assert version
    assert all(name.partition(".")[0] == "pyverbs" for name in names)


@pytest.fixture
def configuration(tmp_path: Path) -> str:
    path = tmp_path / "railrelayd.toml"
    path.write_text("".join('[[rail]]\nnic = "verbs"\n' for _ in RAILS))
    return str(path)


def found_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    status = main([*arguments, "--instance", "none", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def test_topo_shows_the_device_and_gid_of_each_rail(capsys: pytest.CaptureFixture[str], configuration: str) -> None:
    status, found = found_by(capsys, "topo", "--config", configuration)
    assert status == 0
    rails = found["topology"]["rails"]
    assert {rail["device"]: rail["address"] for rail in rails} == RAILS
    assert {(rail["active_mtu"], rail["interface_mtu"], rail["state"]) for rail in rails} == {(4096, 9000, "ACTIVE")}
    assert rails[1]["why_device"] == f"the next ACTIVE port in NIC order, 2 of {len(RAILS)}"
    assert rails[1]["why_gid"] == "RoCE v2, routable, on 10.77.0.0/24"


def test_doctor_finds_a_port_that_is_down(capsys: pytest.CaptureFixture[str], configuration: str) -> None:
    status, found = found_by(capsys, "doctor", "--config", configuration)
    results = {check["check"]: check["result"] for check in found["checks"]}
    assert status == 0, found
    assert {results[name] for name in ("device files", "gid", "port state", "mtu", "libibverbs", "pyverbs")} == {"ok"}
    path = Path(configuration)
    path.write_text("".join(f'[[rail]]\nnic = "verbs"\ndevice = "{device}"\n' for device in RAILS))
    with links.down(SECOND):
        status, found = found_by(capsys, "doctor", "--config", configuration)
    (state,) = [check for check in found["checks"] if check["check"] == "port state"]
    assert (status, state["result"]) == (1, "fail")
    assert f"{SECOND} port 1 DOWN" in state["seen"]
    assert f"ip link set {SECOND.replace('rxe', 'v')} up" in state["todo"]


@pytest.mark.system
def test_a_daemon_finds_its_rails_and_tells_a_peer_of_them(nodes: Nodes, tmp_path: Path) -> None:
    instance = new_instance()
    path = tmp_path / "found.toml"
    path.write_text(config_text(instance, tmp_path / "found.sock", [""] * len(RAILS), merged(SMALL, VERBS)))
    node = nodes.start_file(instance, path, anew=True)
    assert [rail["address"] for rail in node.cli("rails")["rails"]] == list(RAILS.values())
    topology = node.cli("topo")["topology"]
    assert {rail["device"]: rail["address"] for rail in topology["rails"]} == RAILS
    assert not any("other rails" in note for note in topology["notes"])
    checks = {check["check"]: check for check in node.cli("doctor", "--peer", node.session)["checks"]}
    assert checks["mtu of the peer"]["result"] == "ok"
    assert "rail0 9000 here, 9000 there" in checks["mtu of the peer"]["seen"]
