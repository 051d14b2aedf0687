"""Two daemons and two engine processes, ready to move a case; their CPU time and that of the rest of the machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

from railrelay.client import limit
from railrelay.client.cli import _node, _nodes, lanes
from railrelay.client.cli._bench_engines import Case, Receiver, Sender
from railrelay.client.cli._nodes import Geometry, Node
from railrelay.client.cli._table import size
from railrelay.client.cli._workers import Worker
from railrelay.client.errors import ArgumentError, ErrorCode, RelayError

_MEMORY_SHARE: Final = 0.75  # of what is free
_BUSY_FIELDS: Final = (1, 2, 3, 6, 7)  # of /proc/stat: user, nice, system, irq, softirq


@dataclass(frozen=True)
class Placement:
    """Cores, -1 for any. ``sending`` and ``receiving``: of each rail's thread, and of the limit's threads likewise.
    ``caller``: of the sending engine's main thread."""

    sending: tuple[int, ...]
    receiving: tuple[int, ...]
    caller: int = -1
    feeder: int = -1

    def text(self) -> str:
        def cores(cpus: tuple[int, ...]) -> str:
            if set(cpus) == {-1}:
                return "any core"
            return f"core {', '.join(str(cpu) for cpu in dict.fromkeys(cpus))}"

        return (
            f"sending threads on {cores(self.sending)}, receiving threads on {cores(self.receiving)},"
            f" feeder on {cores((self.feeder,))}, caller on {cores((self.caller,))}"
        )


@dataclass(frozen=True)
class Usage:
    """CPU seconds."""

    sending_daemon: float
    receiving_daemon: float
    sending_engine: float
    receiving_engine: float
    others: float  # every other process of the machine

    @property
    def all(self) -> float:
        return self.sending_daemon + self.receiving_daemon + self.sending_engine + self.receiving_engine

    def since(self, before: Usage) -> Usage:
        return Usage(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))


@dataclass(frozen=True)
class Run:
    """One or more rounds, the same transfer each."""

    round_ns: list[int]
    usage: Usage


class Setup:
    """Made by ready()."""

    def __init__(self, nodes: list[Node], sender: Worker, receiver: Worker, geometry: Geometry) -> None:
        self.nodes = nodes
        self.sender = sender
        self.receiver = receiver
        self.geometry = geometry

    def usage(self) -> Usage:
        pids = (self.nodes[0].pid, self.nodes[1].pid, self.sender.pid, self.receiver.pid)
        spent = [limit.process_cpu_ns(pid) / 1e9 for pid in pids]
        fields = Path("/proc/stat").read_text().split(maxsplit=11)
        busy = sum(int(fields[field]) for field in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
        return Usage(spent[0], spent[1], spent[2], spent[3], busy - sum(spent))

    def transfer(self, rounds: int = 1, gap_ns: int = 0) -> Run:
        before = self.usage()
        round_ns = self.sender.ask("transfer", rounds, gap_ns)
        return Run(round_ns, self.usage().since(before))

    def plain(self, bytes_per_call: int, rounds: int = 1, gap_ns: int = 0) -> Run:
        before = self.usage()
        self.receiver.begin("plain_receive", bytes_per_call, rounds)
        round_ns = self.sender.ask("plain_send", bytes_per_call, rounds, gap_ns)
        self.receiver.result()
        return Run(round_ns, self.usage().since(before))

    def gather_seconds(self) -> float:
        """CPU time of copying all blocks into slots once."""
        spent_ns: int = self.sender.ask("gather", self.geometry.slots, self.geometry.slot_bytes)
        return spent_ns / 1e9

    def lane_bytes(self) -> int:
        """That went through the sender's lanes so far."""
        with _node.open_node(self.nodes[0].instance) as segment:
            return sum(lane["bytes"] for lane in lanes.read(segment))


@contextlib.contextmanager
def ready(case: Case, placement: Placement) -> Iterator[Setup]:
    """Starts everything, fills the source, wipes the destination, connects. RelayError, ArgumentError."""
    _check(case)
    bounces = 2 * case.rails if case.private else 0
    geometry = _nodes.fitting_geometry(case.rails, 2 * case.rails, case.rails, bounces=bounces)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_nodes.ended_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-bench-")))
        nodes = [
            stack.enter_context(Node(f"bench-{side}-{os.getpid()}", directory, geometry, cpus, case.congestion, nics))
            for side, cpus, nics in (
                ("prefill", placement.sending, case.sending),
                ("decode", placement.receiving, case.receiving),
            )
        ]
        sender = stack.enter_context(
            Worker(
                "sending engine", Sender, case, nodes[0].socket, placement.sending, placement.caller, placement.feeder
            )
        )
        receiver = stack.enter_context(Worker("receiving engine", Receiver, case, nodes[1].socket, placement.receiving))
        for engine in (sender, receiver):
            engine.result()
        for engine, method in ((sender, "fill"), (receiver, "wipe")):
            engine.begin(method)
        for engine in (sender, receiver):
            engine.result()
        sender.ask("open", receiver.ask("offers"), receiver.ask("destinations"))
        port = receiver.ask("listen")
        receiver.begin("accept")
        sender.ask("connect", port)
        receiver.result()
        yield Setup(nodes, sender, receiver, geometry)


def _check(case: Case) -> None:
    def demand(good: bool, option: str, value: Any, expected: str) -> None:  # noqa: ANN401
        if not good:
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{option} {value}: expected {expected}")

    demand(case.blocks >= case.rails, "--blocks", case.blocks, "one for each rail, or more")
    controls = _nodes.congestion_controls()
    demand(case.congestion in ("", *controls), "--congestion", case.congestion, f"one of {', '.join(controls)}")
    room = int(_MEMORY_SHARE * _nodes.free_bytes())
    if 2 * case.nbytes > room:
        raise RelayError(
            ErrorCode.NO_MEMORY,
            f"{case.blocks} blocks of {case.block_bytes} bytes need {size(2 * case.nbytes)} for source and destination,"
            f" {size(room)} may be used (three quarters of the free memory); use fewer or smaller blocks",
        )
