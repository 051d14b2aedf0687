"""railrelay doctor: each check on made machines, and the command on this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.machine_tree import Gids, MachineTree, dgx, switch

from railrelay.client.cli import FAILED, doctor, main
from railrelay.daemon import checks, config
from railrelay.daemon.checks import Finding, Node

VERBS = '[[rail]]\nnic = "verbs"\n'
NAMES = [name for name, _ in checks.CHECKS]
PID = 4711


def node(tree: MachineTree, text: str = VERBS, pid: int = 0) -> Node:
    return Node(config.parse(text), pid, tree.root)


@pytest.fixture
def tree(tmp_path: Path) -> MachineTree:
    tree = MachineTree(tmp_path / "machine")
    tree.nic("mlx5_0", switch(0, 1), "10.0.0.1/24")
    return tree


def process(tree: MachineTree, limit: str, capabilities: int = 0) -> None:
    tree.write(
        f"proc/{PID}/limits", f"Limit   Soft Limit   Hard Limit   Units\nMax locked memory   {limit}   {limit}   bytes"
    )
    tree.write(f"proc/{PID}/status", f"Name:\trailrelayd\nCapEff:\t{capabilities:016x}")


@pytest.mark.parametrize(
    ("limit", "capabilities", "result"),
    [("unlimited", 0, "ok"), ("8388608", 0, "fail"), (str(1 << 40), 0, "warn"), ("8388608", 1 << 14, "ok")],
)
def test_memlock_is_that_of_the_daemon(tree: MachineTree, limit: str, capabilities: int, result: str) -> None:
    process(tree, limit, capabilities)
    found = checks.memlock(node(tree, pid=PID))
    assert found.result == result
    assert f"daemon pid {PID}" in found.seen
    assert ("LimitMEMLOCK=infinity" in found.todo) == (result != "ok")


def test_memlock_counts_each_lane_for_each_nic(tree: MachineTree) -> None:
    """2 ranks with 2 lanes of 144 MiB, each on 2 NICs."""
    for limit, result in ((1152, "warn"), (1151, "fail")):
        process(tree, str(limit << 20))
        found = checks.memlock(node(tree, VERBS * 2, PID))
        assert (found.result, "all lanes take 1152 MiB" in found.todo) == (result, True)


def test_shared_memory_must_hold_what_the_configuration_asks_for(tree: MachineTree) -> None:
    small = '[relay]\nslots = 2\nslot_bytes = "64KiB"\ntable_entries = 16\n'
    assert checks.shared_memory(node(tree, small + VERBS)).result == "ok"
    huge = checks.shared_memory(node(tree, f'[relay]\nslots = 256\nslot_bytes = "1GiB"\n{VERBS}'))
    assert huge.result == "fail"
    assert "not even one client with one lane fits" in huge.seen
    assert "docker: --shm-size" in huge.todo


def test_ports_that_are_down_fail_and_say_which_link_to_raise(tree: MachineTree) -> None:
    assert checks.port_state(node(tree)) == Finding("ok", "rail 0: mlx5_0 port 1 ACTIVE")
    tree.write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    found = checks.port_state(node(tree, f'{VERBS}device = "mlx5_0"\n'))
    assert (found.result, found.seen) == ("fail", "rail 0: mlx5_0 port 1 DOWN")
    assert "`ip link set mlx5_0-eth up`" in found.todo
    assert checks.gid(node(tree)).result == "fail"


def test_the_gid_of_each_rail_is_shown_or_what_is_wrong_with_it(tree: MachineTree) -> None:
    found = checks.gid(node(tree))
    assert found == Finding("ok", "rail 0: mlx5_0 3: 10.0.0.1 (RoCE v2, routable, on 10.0.0.0/24)")
    tree.port("mlx5_1", switch(1, 1), gids=Gids.of("fe80::2"))
    found = checks.gid(node(tree, VERBS * 2))
    assert found.result == "fail"
    assert "mlx5_1 port 1 has only link-local GIDs" in found.seen


@pytest.mark.parametrize(("mtu", "result"), [(9000, "ok"), (1500, "warn"), (4096, "warn")])
def test_an_mtu_that_halves_the_packets_is_a_warning(tmp_path: Path, mtu: int, result: str) -> None:
    tree = MachineTree(tmp_path / "machine")
    tree.nic("mlx5_0", switch(0, 1), "10.0.0.1/24", mtu=mtu)
    found = checks.mtu(node(tree))
    assert found.result == result
    assert found.seen == f"rail 0: unknown on mlx5_0-eth {mtu}"
    assert ("mtu 9000" in found.todo) == (result == "warn")


def test_acs_redirect_between_gpu_and_nic_is_a_warning(tree: MachineTree) -> None:
    assert checks.acs(node(tree)).seen.startswith("not needed")
    tree.gpu(switch(0, 0))
    found = checks.acs(node(tree))
    assert (found.result, found.todo, found.root) == ("warn", "run doctor as root", True)
    config_space = bytearray(4096)
    config_space[0x100:0x102] = (0x000D).to_bytes(2, "little")
    for folder in (tree.root / "sys/bus/pci/devices").iterdir():
        (folder / "config").write_bytes(config_space)
    assert checks.acs(node(tree)).result == "ok"
    config_space[0x106] = 0x1D
    (tree.root / "sys/bus/pci/devices/0000:12:01.0/config").write_bytes(config_space)
    found = checks.acs(node(tree))
    assert (found.result, found.seen) == ("warn", "redirects at 0000:12:01.0")
    assert "setpci" in found.todo


@pytest.mark.parametrize(("kind", "result"), [("", "ok"), ("identity", "ok"), ("DMA-FQ", "warn")])
def test_an_iommu_that_translates_is_a_warning(tree: MachineTree, kind: str, result: str) -> None:
    if kind:
        tree.write("sys/bus/pci/devices/0000:14:00.0/iommu_group/type", kind)
    found = checks.iommu(node(tree))
    assert found.result == result
    assert ("iommu=pt" in found.todo) == (result == "warn")


def test_the_clock_source_and_the_governor_are_looked_at(tree: MachineTree) -> None:
    tree.write("sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet")
    assert checks.clock(node(tree)).result == "warn"
    tree.write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc")
    assert checks.clock(node(tree)).result == "ok"
    assert checks.frequency(node(tree)).result == "ok"
    tree.write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave")
    assert checks.frequency(node(tree)) == Finding(
        "warn", "powersave", "`cpupower frequency-set -g performance`", root=True
    )


def test_huge_pages_matter_to_lanes_of_rdma_rails_in_host_memory(tree: MachineTree) -> None:
    tree.write("proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid,huge=within_size 0 0")
    tree.write("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never deny force")
    assert checks.huge_pages(node(tree)).result == "ok"
    tree.write("proc/mounts", "tmpfs /dev/shm tmpfs rw,nosuid 0 0")
    found = checks.huge_pages(node(tree))
    assert found.result == "warn"
    assert "a lane in 4 KiB pages takes 36864" in found.todo
    assert checks.huge_pages(node(tree, "")).result == "ok"


def test_relay_memory_on_a_gpu_that_is_not_to_be_had_fails(tree: MachineTree) -> None:
    found = checks.cuda_driver(node(tree, f'{VERBS}memory = "device"\ngpu = "GPU-none"'))
    assert (found.result, "rail[0].gpu: GPU GPU-none: " in found.seen) == ("fail", True)
    assert "railrelayd does not start" in found.todo
    assert checks.cuda_driver(node(tree)).seen == "not needed: no NVIDIA GPU"


def test_device_files_are_those_of_the_machine(tree: MachineTree) -> None:
    assert checks.devices(node(tree)).result == "fail"
    tree.write("dev/infiniband/uverbs0", "")
    assert checks.devices(node(tree)) == Finding("ok", "1 device files may be opened")


def test_without_rdma_rails_nothing_of_rdma_fails(tmp_path: Path) -> None:
    found = list(checks.run(node(MachineTree(tmp_path / "machine"), "")))
    assert {row["check"] for row in found if row["result"] == "fail"} <= {"shared memory"}
    assert sum("not needed" in str(row["seen"]) for row in found) >= 8


def test_each_check_has_its_time_and_one_that_breaks_hides_no_other(tree: MachineTree) -> None:
    def broken(_: Node) -> Finding:
        raise OSError(5, "Input/output error")

    rows = list(checks.run(node(tree), (("broken", broken), *checks.CHECKS[:2])))
    assert [row["check"] for row in rows] == ["broken", *NAMES[:2]]
    assert (rows[0]["result"], rows[0]["todo"]) == ("fail", "report this")
    assert "Input/output error" in str(rows[0]["seen"])
    assert all(isinstance(row["ns"], int) and row["ns"] > 0 for row in rows)


def test_a_machine_with_eight_gpus_gets_a_row_for_every_check(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    rows = list(checks.run(node(tree, VERBS * 8)))
    assert [row["check"] for row in rows] == NAMES
    text = doctor.report(rows)
    assert text.splitlines()[0].split() == ["RESULT", "CHECK", "TIME", "ROOT", "SEEN"]
    assert all(f"\n{row['check']}: {row['todo']}" in text for row in rows if row["todo"])


def test_the_command_works_without_a_daemon_and_exits_by_what_failed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status = main(["doctor", "--instance", "none-such", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [check["check"] for check in found["checks"]] == NAMES
    assert set(found["checks"][0]) == {"check", "result", "seen", "todo", "root", "ns"}
    assert (status == FAILED) == any(check["result"] == "fail" for check in found["checks"])
    path = tmp_path / "railrelayd.toml"
    path.write_text(f'{VERBS}device = "none-such"\n')
    assert main(["doctor", "--instance", "none-such", "--config", str(path)]) == FAILED
    assert "none-such" in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["nonsense", "", "10.0.0.1", "10.0.0.1:0", "::1:4100"])
def test_a_peer_that_cannot_be_is_a_wrong_option(capsys: pytest.CaptureFixture[str], peer: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--instance", "none-such", "--peer", peer])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"railrelay doctor: error: argument --peer: session {peer!r}: ")
    assert ":port" in last
