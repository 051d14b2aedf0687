"""A daemon with emulated NICs, and clients of it in this process, for sections that need no others."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import psutil

from device.report import Options
from railrelay.client import Client, cuda
from railrelay.client.cli import _node, _nodes
from railrelay.client.cli._bench_memory import Pool, pool
from railrelay.client.cli._nodes import Emulated, Geometry, Node
from railrelay.client.client import Route
from railrelay.client.gpu_memory import GpuOptions
from railrelay.client.regions import Region, RemoteRegion
from railrelay.shm_layout import abi

HOST_GBIT: Final = 8.0
SMALL: Final = Geometry(18, _nodes.MIB, 4096, 32)
SENDER, RECEIVER = 0, 1
_numbers: Final = count(1)


def gpus_of(options: Options) -> tuple[str, ...]:
    """UUIDs of the sender's and the receiver's GPU."""
    return (cuda.uuid_of(0), cuda.uuid_of(options.last_gpu)) if options.gpus else ()


def rates(options: Options) -> float:
    """Gbit/s that the emulated NICs are set to."""
    return 400.0 if options.gpus and not options.stand_in else HOST_GBIT


def geometry(options: Options) -> Geometry:
    return _nodes.GEOMETRIES[0] if options.gpus and not options.stand_in else SMALL


@contextlib.contextmanager
def daemon(options: Options, sizes: Geometry | None = None, rate_gbit: float | None = None) -> Iterator[Node]:
    """Two rails, the first on the first GPU and the second on the last."""
    gpus = gpus_of(options) or ("", "")
    nics = [Emulated(rate_gbit or rates(options), gpu) for gpu in gpus]
    with tempfile.TemporaryDirectory(prefix="railrelay-device-") as directory:
        name = f"device-{os.getpid()}-{next(_numbers)}"
        node = Node(name, Path(directory), sizes or geometry(options), (-1, -1), nics=nics)
        try:
            yield node
        finally:
            node.close()
            print(node.log_tail(), flush=True)


def connect(
    node: Node | str, rank: int, options: Options, name: str, route: Route = Route.RELAY, *, local: bool = False,
    **gpu: Any,  # noqa: ANN401
) -> Client:  # fmt: skip
    """By NIC even between engines of one daemon, unless ``local``."""
    socket = node if isinstance(node, str) else node.socket
    uuids = gpus_of(options)
    extra: dict[str, Any] = {"gpu": uuids[rank], "gpu_options": GpuOptions(**gpu)} if uuids else {}
    return Client.connect(socket, rank=rank, name=name, route=route, local=local, **extra)


@dataclass(frozen=True)
class Link:
    """A sender, a receiver on the other rail, and memory of both."""

    sender: Client
    receiver: Client
    source_pool: Pool
    destination_pool: Pool
    source: Region
    destination: Region
    remote: RemoteRegion


@contextlib.contextmanager
def link(
    node: Node,
    options: Options,
    nbytes: int,
    route: Route = Route.RELAY,
    *,
    local: bool = False,
    **gpu: Any,  # noqa: ANN401
) -> Iterator[Link]:
    uuids = gpus_of(options) or ("", "")
    with contextlib.ExitStack() as stack:
        pools = []
        for uuid in uuids:
            made = pool(nbytes, uuid)
            stack.callback(made.close)
            pools.append(made)
        sender = stack.enter_context(connect(node, SENDER, options, "sender", route, local=local, **gpu))
        receiver = stack.enter_context(connect(node, RECEIVER, options, "receiver"))
        source, destination = pools[0].add(sender), pools[1].add(receiver)
        yield Link(sender, receiver, pools[0], pools[1], source, destination, sender.open(destination.offer()))


def rail_counters(node: Node) -> list[dict[str, int]]:
    with _node.open_node(node.instance) as segment:
        rails = segment.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
        names: Sequence[str] = abi.RAIL_COUNTERS
        return [dict(zip(names, rails.array(row, "counters"), strict=False)) for row in range(rails.count)]


def copied_by(counters: dict[str, int], before: dict[str, int]) -> str:
    """By which ways the GPU filled slots, as shares of the bytes."""
    ways = {way: counters[f"gpu_{way}_bytes"] - before[f"gpu_{way}_bytes"] for way in ("strided", "batch", "kernel")}
    whole = sum(ways.values())
    return " + ".join(f"{way} {nbytes / whole:.0%}" for way, nbytes in ways.items() if nbytes) if whole else "the CPU"


def children(pid: int) -> list[int]:
    """Of a daemon: the helpers of its emulated NICs."""
    return [child.pid for child in psutil.Process(pid).children()]
