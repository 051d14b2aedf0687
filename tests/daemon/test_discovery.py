"""Discovery on made machines: which port and GID each rail gets, and which rail each GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.machine_tree import V1, V2, Gids, MachineTree, dgx, switch
from hypothesis import given, settings
from hypothesis import strategies as st

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import discovery, pci, pyverbs_loader, verbs_ports
from railrelay.daemon.config import ConfigError
from railrelay.daemon.discovery import VerbsPort, nearest_rails, resolve
from railrelay.daemon.pci import Distance, Gpu, Place


@dataclass(frozen=True)
class Rail:
    device: str = ""
    port_number: int = 1
    gid_index: int = -1
    address: str = ""


def resolved(tree: MachineTree, *rails: Rail) -> list[VerbsPort]:
    return resolve(rails, read=lambda: verbs_ports.of_sysfs(tree.root), root=tree.root)


def refused(tree: MachineTree, *rails: Rail) -> str:
    with pytest.raises(ConfigError) as failure:
        resolved(tree, *rails)
    return str(failure.value)


@pytest.fixture
def tree(tmp_path: Path) -> MachineTree:
    return MachineTree(tmp_path / "machine")


# ---- rails ----


def test_eight_gpus_with_a_nic_each_get_it(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    found = resolved(tree, *[Rail()] * 8)
    assert [port.device for port in found] == [f"mlx5_{number + 5}" for number in range(8)]
    assert [port.address for port in found] == [f"10.{number}.0.1" for number in range(8)]
    assert {port.gid_index for port in found} == {3}
    assert found[2].gid == bytes(10) + b"\xff\xff" + bytes([10, 2, 0, 1])
    assert str(found[2].subnet) == "10.2.0.0/24"
    assert "PCI" not in found[0].why_gid
    assert found[0].why_gid == "RoCE v2, routable, on 10.0.0.0/24"
    nearest = nearest_rails(pci.gpus(tree.root), [port.place for port in found])
    assert [one.rail for one in nearest] == list(range(8))
    assert {one.distance for one in nearest} == {Distance("PIX", 4)}
    assert nearest[5].gpu.uuid.startswith("GPU-00000005")
    assert discovery.rail_of_rank([port.device for port in found], tree.root) == tuple(range(8))


def test_two_gpus_share_each_of_four_nics(tree: MachineTree) -> None:
    for number in range(4):
        for gpu in range(2):
            tree.gpu(switch(number, gpu), numa=number // 2)
        tree.nic(f"mlx5_{number}", switch(number, 2), f"10.{number}.0.1/24", numa=number // 2)
    found = resolved(tree, *[Rail()] * 4)
    assert discovery.rail_of_rank([port.device for port in found], tree.root) == (0, 0, 1, 1, 2, 2, 3, 3)


def test_two_gpus_beside_two_nics_take_one_each(tree: MachineTree) -> None:
    for gpu in range(2):
        tree.gpu(switch(0, gpu))
        tree.nic(f"mlx5_{gpu}", switch(0, 2 + gpu), f"10.{gpu}.0.1/24")
    nearest = nearest_rails(pci.gpus(tree.root), [port.place for port in resolved(tree, Rail(), Rail())])
    assert [one.rail for one in nearest] == [0, 1]
    assert "2 of 2 NICs are as near" in nearest[0].why


def test_without_gpus_rails_go_by_nic_order_alone(tree: MachineTree) -> None:
    tree.nic("mlx5_10", switch(1, 0), "10.1.0.1/24")
    tree.nic("mlx5_9", switch(0, 0), "10.0.0.1/24")
    assert [port.device for port in resolved(tree, Rail(), Rail())] == ["mlx5_9", "mlx5_10"]
    assert discovery.rail_of_rank(["mlx5_9", "mlx5_10"], tree.root) == ()


def test_soft_roce_has_no_place_and_goes_by_name(tree: MachineTree) -> None:
    tree.gpu(switch(0, 0))
    for number in (10, 2, 1):
        tree.interface(f"v{number}", address=f"10.77.{number}.1/24")
        tree.port(f"rxe{number}", gids=Gids.of(f"10.77.{number}.1"), netdev=f"v{number}")
    tree.nic("mlx5_0", switch(0, 1), "10.0.0.1/24")
    found = resolved(tree, *[Rail()] * 4)
    assert [port.device for port in found] == ["mlx5_0", "rxe1", "rxe2", "rxe10"]
    assert found[1].place is None
    (alone,) = nearest_rails(pci.gpus(tree.root), [None, None])
    assert (alone.rail, alone.distance) == (0, None)
    assert discovery.rail_of_rank(["rxe1", "rxe2"], tree.root) == ()
    assert discovery.rail_of_rank(["rxe1", "mlx5_0"], tree.root) == (1,)


def test_soft_roce_sits_where_its_interface_does(tree: MachineTree) -> None:
    tree.interface("eth0", switch(0, 0), address="10.0.0.1/24")
    tree.port("rxe0", gids=Gids.of("10.0.0.1"), netdev="eth0")
    (port,) = resolved(tree, Rail())
    assert port.place is not None
    assert port.place.address == switch(0, 0).rpartition("/")[2]


@pytest.mark.parametrize(
    ("nic", "numa", "name"),
    [
        (switch(0, 1), 0, "PIX"),
        ("pci0000:10/0000:10:01.0/0000:11:00.0/0000:12:05.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0", 0, "PXB"),
        ("pci0000:10/0000:10:02.0/0000:19:00.0", 0, "PHB"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", 0, "NODE"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", 1, "SYS"),
        ("pci0000:20/0000:20:01.0/0000:21:00.0", -1, "SYS"),
    ],
)
def test_a_distance_is_named_by_what_both_paths_share(tree: MachineTree, nic: str, numa: int, name: str) -> None:
    tree.gpu(switch(0, 0))
    tree.nic("mlx5_0", nic, "10.0.0.1/24", numa=numa)
    (port,) = resolved(tree, Rail())
    assert port.place is not None
    assert pci.distance(pci.gpus(tree.root)[0].place, port.place).name == name


def test_of_nics_behind_different_roots_the_nearest_is_taken(tree: MachineTree) -> None:
    tree.gpu(switch(4, 0), numa=1)
    tree.nic("mlx5_0", switch(0, 1), "10.0.0.1/24", numa=0)
    tree.nic("mlx5_1", switch(3, 1), "10.1.0.1/24", numa=1)
    tree.nic("mlx5_2", switch(4, 1), "10.2.0.1/24", numa=1)
    (one,) = nearest_rails(pci.gpus(tree.root), [port.place for port in resolved(tree, Rail(), Rail(), Rail())])
    assert (one.rail, one.distance) == (2, Distance("PIX", 4))
    (one,) = nearest_rails(pci.gpus(tree.root), [port.place for port in resolved(tree, Rail(), Rail())])
    assert (one.rail, one.why) == (1, "nearest: on the same NUMA node")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_every_gpu_gets_a_nearest_nic_and_equals_share_evenly(at: list[int], nic_at: list[int]) -> None:
    def place(number: int, device: int) -> Place:
        path = tuple(switch(number, device).split("/"))
        return Place(path[-1], path, number // 2)

    found = [Gpu(index, place(number, index), "") for index, number in enumerate(at)]
    nics = [place(number, 16 + index) for index, number in enumerate(nic_at)]
    nearest = nearest_rails(found, nics)
    for one in nearest:
        distances = [pci.distance(one.gpu.place, nic) for nic in nics]
        assert distances[one.rail] == min(distances)
    for number in range(4):
        beside = [rail for rail, where in enumerate(nic_at) if where == number]
        users = [sum(one.rail == rail and at[one.gpu.index] == number for one in nearest) for rail in beside]
        alone = all(where == number or where in nic_at for where in at)  # nobody else comes to these NICs
        assert not beside or not alone or max(users) - min(users) <= 1


def test_gpus_that_the_driver_does_not_show_are_left_out(tree: MachineTree) -> None:
    tree.gpu(switch(0, 0))
    tree.gpu(switch(1, 0), uuid="GPU-1")
    tree.pci(switch(2, 0), attributes={"vendor": "0x1234", "class": "0x030000"})
    assert [(gpu.index, gpu.uuid) for gpu in pci.gpus(tree.root)] == [(0, "GPU-1")]


# ---- ports and GIDs ----


def test_of_two_ports_the_active_one_is_taken(tree: MachineTree) -> None:
    tree.interface("eth1", address="10.1.0.1/24")
    tree.port("mlx4_0", switch(0, 0), number=1, state="1: DOWN")
    tree.port("mlx4_0", switch(0, 0), number=2, gids=Gids.of("10.1.0.1"), netdev="eth1")
    (port,) = resolved(tree, Rail())
    assert (port.device, port.port_number, port.address) == ("mlx4_0", 2, "10.1.0.1")
    assert "port 1 is DOWN" in refused(tree, Rail(), Rail())
    assert refused(tree, Rail(), Rail()).startswith("rail[1].device: no RDMA port is left for this rail")


def test_a_port_with_roce_v1_only_is_refused_and_may_be_configured(tree: MachineTree) -> None:
    tree.port("mlx4_0", switch(0, 0), gids=Gids([(V1, "fe80::1"), (V1, "10.0.0.1")]))
    text = refused(tree, Rail(device="mlx4_0"))
    assert text.startswith("rail[0].gid_index: mlx4_0 port 1 has only RoCE v1 GIDs (it has 0: RoCE v1 fe80::1; 1: RoCE")
    assert "cma_roce_mode" in text
    (port,) = resolved(tree, Rail(device="mlx4_0", gid_index=1))
    assert (port.gid_index, port.address, port.why_gid) == (1, "10.0.0.1", "configured")
    (port,) = resolved(tree, Rail("mlx4_0", gid_index=1, address="10.0.0.9"))
    assert port.why_gid == "configured; it has 10.0.0.1 and not the rail's address"
    assert "0: RoCE v1 fe80::1" in refused(tree, Rail(device="mlx4_0", gid_index=7))


@pytest.mark.parametrize("address", ["fe80::42", "169.254.3.4"])
def test_link_local_gids_alone_do_not_do(tree: MachineTree, address: str) -> None:
    tree.interface("eth7")
    tree.port("mlx5_0", switch(0, 0), gids=Gids.of(address), netdev="eth7")
    text = refused(tree, Rail(device="mlx5_0"))
    assert "only link-local GIDs" in text
    assert "give eth7 an address" in text


def test_an_ipv4_gid_is_taken_before_others_and_the_rails_address_before_all(tree: MachineTree) -> None:
    tree.interface("eth0", address="10.0.0.1/24")
    rows = [(V2, "fe80::1"), (V2, "fd00::1"), (V2, "10.0.0.1"), (V2, "10.0.0.9")]
    tree.port("mlx5_0", switch(0, 0), gids=Gids(rows), netdev="eth0")
    chosen = [resolved(tree, Rail(address=address))[0] for address in ("", "10.0.0.9", "fd00::1")]
    assert [port.gid_index for port in chosen] == [2, 3, 1]
    (port,) = resolved(tree, Rail(device="mlx5_0", address="10.0.0.77"))
    assert (port.gid_index, port.address) == (2, "10.0.0.77")
    assert port.why_gid == "RoCE v2, routable, on the subnet 10.0.0.0/24 of the rail's address"
    assert "no RoCE v2 GID on the subnet of 10.9.9.9" in refused(tree, Rail(device="mlx5_0", address="10.9.9.9"))


def test_an_address_names_the_port_whatever_the_order(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    found = resolved(tree, Rail(), Rail(address="10.0.0.1"), Rail(device="mlx5_6"), Rail())
    assert [port.device for port in found] == ["mlx5_7", "mlx5_5", "mlx5_6", "mlx5_8"]
    text = refused(tree, Rail(address="10.99.0.1"))
    assert text.startswith('rail[0].address: no RDMA port has "10.99.0.1"; this node has mlx5_5 port 1 (10.0.0.1)')


def test_a_port_is_of_one_rail_only(tmp_path: Path) -> None:
    tree = dgx(tmp_path / "machine")
    assert refused(tree, Rail(device="mlx5_5"), Rail(address="10.0.0.1")) == (
        "rail[1].device: mlx5_5 port 1 is rail[0]'s already; name another one"
    )


def test_a_device_that_is_not_there_is_named_with_those_that_are(tree: MachineTree) -> None:
    assert refused(tree, Rail(device="mlx5_0")).endswith("is not there; this node has no RDMA device")
    assert refused(tree, Rail()).endswith("(this node has no RDMA device); name one, or remove the rail")
    tree.nic("mlx5_0", switch(0, 0), "10.0.0.1/24")
    assert 'rail[0].device: "mlx5_0" port 2 is not there; this node has mlx5_0 port 1' in refused(
        tree, Rail(device="mlx5_0", port_number=2)
    )


def test_infiniband_takes_gid_0_and_tells_the_lid(tree: MachineTree) -> None:
    tree.port("mlx5_0", switch(0, 0), gids=Gids([("", "fe80::5")]), link_layer="InfiniBand", lid=17)
    (port,) = resolved(tree, Rail())
    assert (port.gid_index, port.address) == (0, "fe80::5")
    assert port.port is not None
    assert (port.port.lid, port.port.link_layer, port.port.gids[0].kind) == (17, "InfiniBand", "IB")


def test_nothing_of_pyverbs_is_needed_where_the_configuration_names_everything(tree: MachineTree) -> None:
    def read() -> list[verbs_ports.Port]:
        raise RelayError(ErrorCode.NOT_SUPPORTED, "discovery of RDMA NICs needs pyverbs")

    tree.nic("mlx5_0", switch(0, 0), "10.0.0.1/24")
    named = Rail(device="mlx5_0", gid_index=3)
    assert resolve([named], read=read, root=tree.root)[0].address == "10.0.0.1"
    elsewhere = Rail(device="other0", gid_index=1, address="10.5.0.1")
    (port,) = resolve([elsewhere], read=read, root=tree.root)
    assert (port.device, port.gid_index, port.address, port.port) == ("other0", 1, "10.5.0.1", None)
    with pytest.raises(ConfigError, match=r"^rail\[1\]\.device: discovery of RDMA NICs needs pyverbs"):
        resolve([named, Rail()], read=read, root=tree.root)
    with pytest.raises(ConfigError, match=r"^rail\[0\]\.gid_index: "):
        resolve([Rail(device="mlx5_0")], read=read, root=tree.root)


def test_names_are_ordered_by_their_numbers() -> None:
    names = ["mlx5_10", "mlx5_2", "mlx5_bond_0", "bnxt_re1", "mlx5_2s"]
    assert sorted(names, key=verbs_ports.natural) == ["bnxt_re1", "mlx5_2", "mlx5_2s", "mlx5_10", "mlx5_bond_0"]


@pytest.mark.parametrize(("mtu", "carried"), [(9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (64, 0)])
def test_an_interface_carries_packets_with_their_headers(mtu: int, carried: int) -> None:
    assert verbs_ports.carried_mtu(mtu) == carried


# ---- PCIe ports ----


@pytest.mark.parametrize(("control", "redirects"), [(0x1D, True), (0x08, True), (0x01, False), (0, False)])
def test_acs_is_read_from_configuration_space(tree: MachineTree, control: int, redirects: bool) -> None:
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 0x148 << 20).to_bytes(4, "little")  # error reporting, then ACS
    config[0x148:0x14C] = (0x000D).to_bytes(4, "little")
    config[0x14E] = control
    folder = tree.root / tree.pci(switch(0, 0))
    (folder / "config").write_bytes(config)
    assert pci.acs_redirects(folder) is redirects


def test_acs_is_unknown_where_only_root_may_read_it(tree: MachineTree) -> None:
    folder = tree.root / tree.pci(switch(0, 0))
    assert pci.acs_redirects(folder) is None
    (folder / "config").write_bytes(bytes(64))
    assert pci.acs_redirects(folder) is None
    (folder / "config").write_bytes(bytes(256))
    assert pci.acs_redirects(folder) is False
    (folder / "config").write_bytes(b"\x0d\x00\x01\x10" * 1024)  # a list that points to itself
    assert pci.acs_redirects(folder) in (True, False)


# ---- pyverbs ----


@pytest.fixture
def without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)


@pytest.mark.usefixtures("without_pyverbs")
def test_pyverbs_for_another_interpreter_is_not_loaded(tmp_path: Path) -> None:
    package = tmp_path / "pyverbs"
    package.mkdir()
    (package / "device.cpython-39-x86_64-linux-gnu.so").touch()
    with pytest.raises(RelayError, match="is not for this interpreter") as failure:
        pyverbs_loader.load(tmp_path)
    assert "install python3-pyverbs" in str(failure.value)


@pytest.mark.usefixtures("without_pyverbs")
def test_the_package_to_install_is_named(tmp_path: Path) -> None:
    with pytest.raises(RelayError, match=f"there is no {tmp_path}/pyverbs; install python3-pyverbs"):
        pyverbs_loader.load(tmp_path)
    assert str(tmp_path) not in sys.path


def test_the_version_is_that_of_the_library_that_is_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f0-7f1 r-xp 0 00:00 1   /usr/lib/x86_64-linux-gnu/libibverbs.so.1.14.44.0\n")
    assert pyverbs_loader.library_version(maps) == "44.0"
    maps.write_text("7f0-7f1 r-xp 0 00:00 1   /opt/libibverbs.so.1\n")
    assert pyverbs_loader.library_version(maps) == ""
