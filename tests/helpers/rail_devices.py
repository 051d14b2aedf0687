"""RDMA devices as rails of the daemons that tests start: those that RAILRELAY_VERBS_RAILS names ("rxe0=10.77.0.1,..."),
as in the virtual machine of tests/vm, or else those of the stand-in (verbs_stand_in.py)."""

from __future__ import annotations

import functools
import ipaddress
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from helpers import links, queue_pairs, verbs_stand_in
from helpers.verbs_stand_in import Fabric

VARIABLE: Final = "RAILRELAY_VERBS_RAILS"
STAND_IN_DEVICES: Final = 8
STAND_IN_GID_INDEX: Final = 3
STAND_IN_TIME_SCALE: Final = 0.1
_SYSFS: Final = Path("/sys/class/infiniband")

# Soft-RoCE takes 7 retries for ever, and is slow where it is emulated.
SECTIONS: Final = {"verbs": {"timeout": 17, "retry_count": 3, "probe_s": 0.2}}


@dataclass(frozen=True)
class Device:
    name: str
    address: str
    gid_index: int

    def lines(self) -> list[str]:
        """Of a [[rail]] section."""
        return [
            'nic = "verbs"',
            f'device = "{self.name}"',
            f'address = "{self.address}"',
            f"gid_index = {self.gid_index}",
        ]


@functools.cache
def missing() -> str:
    """Why there are no devices; "" if there are."""
    if os.environ.get(VARIABLE):
        return ""
    lack = verbs_stand_in.missing()
    return f"{VARIABLE} names no RDMA devices, and their stand-in {lack}" if lack else ""


def real() -> bool:
    return bool(os.environ.get(VARIABLE))


def slowness() -> int:
    """By what factor limits grow where verbs are real: the machine that has them is emulated."""
    return 10 if real() else 1


def marks(nic: str) -> list[pytest.MarkDecorator]:
    """Of tests that need this NIC."""
    lack = missing() if nic == "verbs" else ""
    return [pytest.mark.skipif(bool(lack), reason=lack)] if lack else []


def every_nic() -> pytest.MarkDecorator:
    """Of tests whose daemons may have rails of any NIC that reaches other nodes. Where verbs are real, the others are
    tested elsewhere."""
    nics = ("verbs",) if real() else ("tcp", "verbs")
    return pytest.mark.parametrize("nic", [pytest.param(nic, marks=marks(nic)) for nic in nics])


@dataclass(frozen=True)
class Devices:
    """``fabric``: of the stand-in's; None for real ones. ``environment``: for daemons."""

    all: list[Device]
    environment: dict[str, str]
    fabric: Fabric | None = None

    def split(self, counts: Sequence[int]) -> list[list[Device]]:
        """So many for each node: different ones, if there are enough."""
        if max(counts) > len(self.all):
            raise ValueError(f"{max(counts)} rails wanted, {len(self.all)} devices there")
        apart = sum(counts) <= len(self.all)
        starts = [sum(counts[:node]) if apart else 0 for node in range(len(counts))]
        return [self.all[start : start + count] for start, count in zip(starts, counts, strict=True)]


def devices(directory: Path) -> Devices:
    """``directory``: for what the stand-in's devices share."""
    if real():
        named = dict(entry.split("=") for entry in os.environ[VARIABLE].split(","))
        return Devices([Device(name, address, _gid_index(name, address)) for name, address in named.items()], {})
    fabric = Fabric(directory)
    addresses = [f"127.1.0.{number + 1}" for number in range(STAND_IN_DEVICES)]
    found = [Device(f"stub{number}", address, STAND_IN_GID_INDEX) for number, address in enumerate(addresses)]
    return Devices(found, fabric.environment(addresses, time_scale=STAND_IN_TIME_SCALE), fabric)


def break_connections(device: Device, fabric: Fabric | None, *, silently: bool = False) -> int:
    """How many queue pairs. ``silently``: no end sees it before its retries are over. Of real devices then the port
    goes down, and up again."""
    if fabric is not None:
        return fabric.drop_connections(device.address) if silently else fabric.fail_queue_pairs(device.address)
    if not silently:
        return queue_pairs.fail(device.name)
    with links.down(device.name):
        time.sleep(0.2)
    return 1


def port(device: Device, fabric: Fabric | None, *, up: bool) -> None:
    if fabric is None:
        (links.set_up if up else links.set_down)(device.name)
    elif up:
        fabric.port_up(device.address)
    else:
        fabric.port_down(device.address)


def _gid_index(device: str, address: str) -> int:
    """The row of RoCE v2 with this address."""
    wanted = ipaddress.IPv6Address(f"::ffff:{address}")
    port = _SYSFS / device / "ports" / "1"
    for row in sorted(int(path.name) for path in (port / "gids").iterdir()):
        try:
            kind = (port / "gid_attrs" / "types" / str(row)).read_text().strip()
        except OSError:  # an empty row
            continue
        gid = ipaddress.IPv6Address((port / "gids" / str(row)).read_text().strip())
        if kind == "RoCE v2" and gid == wanted:
            return row
    raise LookupError(f"{device} has no GID of RoCE v2 with {address}")
