"""Made sysfs and procfs trees: NICs, GPUs and interfaces at places in PCI that the test names."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

V1: Final = "IB/RoCE v1"
V2: Final = "RoCE v2"
_LINK_LOCAL: Final = "fe80::1"


@dataclass
class Gids:
    """Rows (type, address) of a port's GID table, as a RoCE NIC has them for an interface with one address."""

    rows: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, address: str) -> Gids:
        return cls([(V1, _LINK_LOCAL), (V2, _LINK_LOCAL), (V1, address), (V2, address)])


@dataclass
class MachineTree:
    root: Path
    _routes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for folder in ("sys/bus/pci/devices", "sys/class/net", "proc/net", "dev/shm"):
            (self.root / folder).mkdir(parents=True)
        for node in range(2):
            (self.root / f"sys/devices/system/node/node{node}").mkdir(parents=True)

    def write(self, path: str, content: str | bytes) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode() + b"\n")

    def pci(self, path: str, *, numa: int = 0, attributes: Mapping[str, str] = MappingProxyType({})) -> Path:
        """A device and what is above it: "pci0000:15/0000:15:01.0/0000:16:00.0"."""
        at = Path("sys/devices")
        for part in path.split("/"):
            at = at / part
            link = self.root / "sys/bus/pci/devices" / part
            (self.root / at).mkdir(parents=True, exist_ok=True)
            if not part.startswith("pci") and not link.is_symlink():
                link.symlink_to(Path("../../../../") / at)
        self.write(f"{at}/numa_node", str(numa))
        for name, value in attributes.items():
            self.write(f"{at}/{name}", value)
        return at

    def gpu(self, path: str, *, numa: int = 0, uuid: str = "", vga: bool = False) -> None:
        at = self.pci(path, numa=numa, attributes={"vendor": "0x10de", "class": "0x030000" if vga else "0x030200"})
        if uuid:
            self.write(
                f"proc/driver/nvidia/gpus/{at.name}/information", f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}"
            )

    def interface(self, name: str, path: str = "", *, address: str = "", mtu: int = 9000, numa: int = 0) -> None:
        """``address`` with its prefix length."""
        folder = self.root / "sys/class/net" / name
        folder.mkdir(parents=True)
        self.write(f"sys/class/net/{name}/mtu", str(mtu))
        self.write(f"sys/class/net/{name}/operstate", "up")
        if path:
            (folder / "device").symlink_to(Path("../../../..") / self.pci(path, numa=numa))
        if address:
            network = ipaddress.ip_network(address, strict=False)
            assert isinstance(network, ipaddress.IPv4Network)
            words = [f"{struct.unpack('=I', one.packed)[0]:08X}" for one in (network.network_address, network.netmask)]
            self._routes.append(f"{name}\t{words[0]}\t00000000\t0001\t0\t0\t0\t{words[1]}\t0\t0\t0")
            heading = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"
            self.write("proc/net/route", "\n".join([heading, *self._routes]))

    def port(
        self,
        device: str,
        path: str = "",
        *,
        number: int = 1,
        state: str = "4: ACTIVE",
        gids: Gids | None = None,
        netdev: str = "",
        numa: int = 0,
        link_layer: str = "Ethernet",
        lid: int = 0,
    ) -> None:
        """A port of an RDMA device, and the device with its first one. Without ``path``: soft-RoCE over ``netdev``."""
        folder = f"sys/class/infiniband/{device}"
        if path and not (self.root / folder / "device").exists():
            (self.root / folder).mkdir(parents=True, exist_ok=True)
            (self.root / folder / "device").symlink_to(Path("../../../..") / self.pci(path, numa=numa))
        elif not path:
            self.write(f"{folder}/parent", netdev)
        at = f"{folder}/ports/{number}"
        self.write(f"{at}/state", state)
        self.write(f"{at}/link_layer", link_layer)
        self.write(f"{at}/lid", hex(lid))
        self.write(f"{at}/rate", "400 Gb/sec (4X NDR)")
        rows = list(gids.rows) if gids else []
        for index in range(len(rows) + 2):
            kind, address = rows[index] if index < len(rows) else ("", "::")
            one = ipaddress.ip_address(address)
            whole = ipaddress.IPv6Address(f"::ffff:{one}") if one.version == 4 else one
            self.write(f"{at}/gids/{index}", whole.exploded)
            if kind:  # empty rows have files that cannot be read
                self.write(f"{at}/gid_attrs/types/{index}", kind)
                self.write(f"{at}/gid_attrs/ndevs/{index}", netdev)

    def nic(
        self, device: str, path: str, address: str, *, numa: int = 0, mtu: int = 9000, state: str = "4: ACTIVE"
    ) -> None:
        """A RoCE NIC of one port with an interface "<device>-eth"; ``address`` with its prefix length."""
        netdev = f"{device}-eth"
        self.interface(netdev, path, address=address, mtu=mtu, numa=numa)
        gids = Gids.of(address.partition("/")[0])
        self.port(device, path, gids=gids, netdev=netdev, numa=numa, state=state)


def switch(number: int, device: int, *, root: int | None = None) -> str:
    """The path of device 0, 1 ... below PCIe switch ``number``, each of which has a host bridge of its own."""
    bus = 0x10 * (number + 1) if root is None else root
    return (
        f"pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0/"
        f"0000:{bus + 2:02x}:{device:02x}.0/0000:{bus + 3 + device:02x}:00.0"
    )


def dgx(root: Path) -> MachineTree:
    """8 GPUs and 8 NICs, one of each below every switch, four switches a NUMA node; names that order badly as text."""
    tree = MachineTree(root)
    for number in range(8):
        tree.gpu(switch(number, 0), numa=number // 4, uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000")
        tree.nic(f"mlx5_{number + 5}", switch(number, 1), f"10.{number}.0.1/24", numa=number // 4)
    return tree
