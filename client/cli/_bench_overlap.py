"""Does the copy into relay memory hide behind the NIC? One daemon whose two rails have emulated NICs, an engine on
each: the same bytes to the other rail by the own rail's NIC, by relay, and by relay with a NIC that takes no time."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from railrelay.client import Client, PageLayout, cuda
from railrelay.client.cli import _content, _node, _nodes
from railrelay.client.cli._bench_memory import Load, Pool, Window, pool
from railrelay.client.cli._bench_targets import Target
from railrelay.client.cli._nodes import MIB, Emulated, Node
from railrelay.client.cli._numbers import amount, whole
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import size, table
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Route
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.gpu_memory import Copy, GpuOptions
from railrelay.client.regions import Region, RemoteRegion
from railrelay.shm_layout import abi

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Some = TypeVar("Some", np.int64, np.uint64)

WAYS: Final = ("direct", "relay", "feeder")
GPU_WAYS: Final = ("strided", "batch", "kernel")
VALUES: Final = ("zeros", "random")
REACHED: Final = 0.97  # of the set rate, by own-rail direct, for a row to count
HOST_GBIT: Final = 4.0
GPU_GBIT: Final = 400.0
_NO_TIME_GBIT: Final = 10_000.0
_RUNS: Final = 9
_REQUESTS: Final = 16  # transfers that the bytes of a run are sent in
_LOADED_WINDOWS: Final = 5
_WINDOW_S: Final = 0.5
_SEED: Final = 11
_CHUNK_BYTES: Final = 32 * MIB
_TIMEOUT_S: Final = 60.0
_LONG_S: Final = 300.0
_MEMORY_SHARE: Final = 0.75
_SENDER_RAIL, _RECEIVER_RAIL = 0, 1
_PAGES: Final = 256
_PIECE_BYTES: Final = 4096
_MOST_PAGES: Final = 1 << 24
_MOST_ROWS: Final = 65536
_RATES_GBIT: Final = (0.001, 10_000)  # of the daemon's option
DEFAULTS: Final = {
    "memory": "host",
    "rate": None,
    "rows": None,
    "pages": _PAGES,
    "piece": _PIECE_BYTES,
    "load": False,
    "copy": Copy.AUTO,
    "far": False,
    "nic_copies": "auto",
}


@dataclass(frozen=True)
class Shape:
    """``count`` pages with a piece of ``piece_bytes`` in each row, or so many blocks if there are no rows. The source
    has the pieces ``pitch`` bytes apart: those of a row, or with ``tokens`` those of a page, follow each other."""

    piece_bytes: int
    count: int
    rows: int = 0
    pitch: int = 0
    tokens: bool = False

    @property
    def pieces(self) -> int:
        return self.count * max(1, self.rows)

    @property
    def nbytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def step(self) -> int:
        return self.pitch or self.piece_bytes

    def text(self) -> str:
        if not self.rows:
            return f"{self.count:,} blocks of {size(self.piece_bytes)}"
        gap = f", {self.step} apart" if self.step != self.piece_bytes else ""
        return f"{self.count:,} pages of {size(self.piece_bytes)} x {self.rows} rows{gap}"

    def order(self, side: int) -> npt.NDArray[np.int64]:
        """Pages or blocks in the order in which they are sent."""
        return np.random.default_rng(_SEED + side).permutation(self.count)

    def cells(self, side: int) -> npt.NDArray[np.int64]:
        """Which cell of the memory each piece takes, in the order in which they are sent."""
        of_pages = self.order(side)
        if not self.rows:
            return of_pages
        rows = np.arange(self.rows)
        cells = of_pages[:, None] * self.rows + rows if self.tokens else rows * self.count + of_pages[:, None]
        return cells.ravel()

    def layout(self, base: int, step: int) -> PageLayout:
        if self.tokens:
            return PageLayout.strided(base, self.rows, step, self.rows * step, self.piece_bytes)
        return PageLayout.strided(base, self.rows, self.count * step, step, self.piece_bytes)

    def joined(self, base: int) -> PageLayout:
        """The pieces one after the other."""
        return PageLayout.strided(base, self.rows, self.piece_bytes, self.rows * self.piece_bytes, self.piece_bytes)


@dataclass(frozen=True)
class Options:
    """``gpus``: UUIDs of the sender's and of the receiver's, or none for host memory. ``copy``: how slots are filled;
    ``nic_copies``: how the emulated NICs copy, "auto" or "engines". ``far``: the destination is on the sender's GPU and
    the relay memory on the receiver's; between GPUs copy engines copy, within one the driver may compute."""

    gpus: tuple[str, ...]
    rate_gbit: float
    copy: Copy = Copy.AUTO
    thread_blocks: int = 4
    nic_copies: str = "auto"
    far: bool = False

    def gpu(self, rail: int) -> str:
        return self.gpus[min(rail, len(self.gpus) - 1)] if self.gpus else ""

    def memory_of(self, rail: int) -> str:
        """The GPU that an engine has its memory on."""
        return self.gpu(_SENDER_RAIL if self.far else rail)


class Engine:
    """What both have in common: clients, and memory that all of them know."""

    def __init__(self, rail: int, nbytes: int, options: Options) -> None:
        self._stack = contextlib.ExitStack()
        self._rail = rail
        self._options = options
        self._pool: Pool = pool(nbytes, options.memory_of(rail))
        self._stack.callback(self._pool.close)
        self._load: Load | None = None

    def _connect(self, socket: str, name: str, route: Route = Route.RELAY) -> tuple[Client, Region]:
        gpu = self._options.memory_of(self._rail)
        extra: dict[str, Any] = {"gpu": gpu} if gpu else {}
        gpu_options = GpuOptions(self._options.copy, self._options.rate_gbit, self._options.thread_blocks)
        client = Client.connect(
            socket,
            rank=self._rail,
            name=f"bench-{name}",
            route=route,
            local=False,  # through the NIC that is measured
            gpu_options=gpu_options,
            **extra,
        )
        self._stack.enter_context(client)
        return client, self._pool.add(client)

    def start_load(self, values: str) -> None:
        self._load = Load(self._options.gpu(self._rail), values)
        self._stack.callback(self._load.close)
        self._load.start()

    def matmul_ms(self, windows: Sequence[Window]) -> list[float]:
        assert self._load is not None
        return [self._load.matmul_ms(window) for window in windows]

    def stop_load(self) -> None:
        if self._load is not None:
            self._load.close()
            self._load = None

    def close(self) -> None:
        self.stop_load()
        self._stack.close()


class Sender(Engine):
    def __init__(self, nbytes: int, options: Options, socket: str, fast_socket: str) -> None:
        super().__init__(_SENDER_RAIL, nbytes, options)
        self._ends = {
            "direct": self._connect(socket, "direct", Route.DIRECT),
            "relay": self._connect(socket, "relay"),
            "feeder": self._connect(fast_socket, "feeder"),
        }
        self._remotes: dict[str, RemoteRegion] = {}

    def open(self, offer: bytes, fast_offer: bytes) -> None:
        for way, (client, _) in self._ends.items():
            self._remotes[way] = client.open(fast_offer if way == "feeder" else offer)

    def fill(self, shape: Shape) -> None:
        """Each piece with what its number says."""
        for first, pieces in _chunks(shape, shape.cells(0), shape.step):
            content = np.zeros((len(pieces), shape.step), np.uint8)
            content[:, : shape.piece_bytes] = _content_of(shape, pieces)
            self._pool.put(first * shape.step, content.reshape(-1))

    def prepare(self, shape: Shape) -> None:
        self._shape = shape
        self._source_order, self._destination_order = shape.order(0), shape.order(1)
        self._in_order = np.arange(shape.count)

    def transfer(self, way: str, rounds: int = 1) -> list[int]:
        """ns of each round from the call to the end of the wait."""
        shape = self._shape
        (client, region), remote = self._ends[way], self._remotes[way]
        far = self._in_order if way == "feeder" else self._destination_order
        spent = []
        for _ in range(rounds):
            if shape.rows:
                source = shape.layout(region.address, shape.step)
                joined = way == "feeder"
                target = shape.joined(remote.address) if joined else shape.layout(remote.address, shape.piece_bytes)
                before = time.perf_counter_ns()
                transfers = [
                    client.write_pages(remote, source, taken, target, put, timeout=_TIMEOUT_S)
                    for taken, put in zip(_requests(self._source_order), _requests(far), strict=True)
                ]
            else:
                step = np.uint64(shape.piece_bytes)
                sources = self._source_order.astype(np.uint64) * step + np.uint64(region.address)
                destinations = far.astype(np.uint64) * step + np.uint64(remote.address)
                before = time.perf_counter_ns()
                transfers = [
                    client.write(remote, taken, put, shape.piece_bytes, timeout=_TIMEOUT_S)
                    for taken, put in zip(_requests(sources), _requests(destinations), strict=True)
                ]
            for transfer in transfers:
                transfer.wait()
            spent.append(time.perf_counter_ns() - before)
        return spent

    def repeat(self, way: str, seconds: float) -> tuple[Window, list[int]]:
        begin = time.monotonic_ns()
        spent: list[int] = []
        while time.monotonic_ns() - begin < seconds * 1e9:
            spent += self.transfer(way)
        return Window(begin, time.monotonic_ns()), spent

    def counters(self, way: str) -> dict[str, int]:
        return self._ends[way][0].counters()


class Receiver(Engine):
    def __init__(self, nbytes: int, options: Options, socket: str, fast_socket: str) -> None:
        super().__init__(_RECEIVER_RAIL, nbytes, options)
        self._regions = [self._connect(socket, "receive")[1], self._connect(fast_socket, "receive")[1]]

    def offers(self) -> list[bytes]:
        return [region.offer() for region in self._regions]

    def wipe(self) -> None:
        self._pool.wipe()

    def check(self, shape: Shape, way: str) -> int:
        """Wrong pieces."""
        cells = np.arange(shape.pieces) if way == "feeder" else shape.cells(1)
        number = 1 if way == "feeder" else 0
        wrong = 0
        for first, pieces in _chunks(shape, cells, shape.piece_bytes):
            found = self._pool.get(number, first * shape.piece_bytes, len(pieces) * shape.piece_bytes)
            wrong += int((found.reshape(len(pieces), -1) != _content_of(shape, pieces)).any(axis=1).sum())
        return wrong


def _requests(every: npt.NDArray[Some]) -> list[npt.NDArray[Some]]:
    """As several prompts: the NIC begins while the later ones are still being submitted."""
    return np.array_split(every, min(_REQUESTS, len(every)))


def _chunks(shape: Shape, cells: npt.NDArray[np.int64], step: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(first cell, number of the piece in each cell from there on), a part of the memory at a time."""
    piece_in = np.empty(shape.pieces, np.int64)
    piece_in[cells] = np.arange(shape.pieces)
    each = max(1, _CHUNK_BYTES // step)
    for first in range(0, shape.pieces, each):
        yield first, piece_in[first : first + each]


def _content_of(shape: Shape, pieces: npt.NDArray[np.int64]) -> Bytes:
    whole = _content.words(_content.keys(_SEED, pieces.astype(np.uint64)), 0, -(-shape.piece_bytes // 8))
    return whole.view(np.uint8)[:, : shape.piece_bytes]


class Rail(NamedTuple):
    """What the emulated NICs of a daemon have done so far, all rails together."""

    busy_ns: int
    active_ns: int
    late_copies: int

    def late_share(self, after: Rail) -> float:
        """Of the time that the NICs were at work until ``after``: what late copies have cost them."""
        active = after.active_ns - self.active_ns
        return (active - (after.busy_ns - self.busy_ns)) / active if active else 0.0


class Setup:
    """Made by ready()."""

    def __init__(self, options: Options, node: Node, sender: Worker, receiver: Worker) -> None:
        self.options = options
        self.sender = sender
        self.receiver = receiver
        self.logs: list[str] = []  # how those of the daemons end; once they have ended
        self._node = node

    def measure(
        self, shape: Shape, runs: int = _RUNS, *, load: Sequence[str] = (), quiet: Progress | None = None
    ) -> dict[str, Any]:
        """One row: figures by name. ``load``: values of the matrices that both GPUs multiply meanwhile. RelayError."""
        self.sender.ask("prepare", shape)
        self.sender.ask("fill", shape, timeout=_LONG_S)
        wrong = 0
        for way in WAYS:  # the first transfer leases lanes and measures costs
            self.receiver.ask("wipe")
            self.sender.ask("transfer", way)
            wrong += self.receiver.ask("check", shape, way, timeout=_LONG_S)
        before = {way: self.sender.ask("counters", way) for way in ("relay", "feeder")}
        rail = self.rail()
        idle = self._times(runs, quiet)
        late = rail.late_share(self.rail())
        result = {**self._described(shape), **self._figures(shape, idle, before), "nic_late_share": late}
        if load:
            result["load"] = {values: self._under_load(result, values) for values in load}
        self.receiver.ask("wipe")
        self.sender.ask("transfer", "relay")
        wrong += self.receiver.ask("check", shape, "relay", timeout=_LONG_S)
        return {**result, "wrong_pieces": wrong, "verified": wrong == 0}

    def rail(self) -> Rail:
        with _node.open_node(self._node.instance) as segment:
            rails = segment.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
            names = abi.RAIL_COUNTERS
            rows = [dict(zip(names, rails.array(row, "counters"), strict=False)) for row in range(rails.count)]
        return Rail(*(sum(row[f"nic_{name}"] for row in rows) for name in Rail._fields))

    def _times(self, runs: int, quiet: Progress | None) -> list[dict[str, int]]:
        """ns of each way, in turns, so that a drift of the machine hits all."""
        found = []
        for number in range(runs):
            ways = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
            found.append({way: self.sender.ask("transfer", way)[0] for way in ways})
            if quiet is not None:
                ratio = statistics.median(run["relay"] / run["direct"] for run in found)
                quiet.update(f"  run {number + 1} of {runs}: relay takes {ratio:.3f} x own-rail direct")
        return found

    def _described(self, shape: Shape) -> dict[str, Any]:
        return {
            "nic": "emulated",
            "rate_gbit": self.options.rate_gbit,
            "memory": "cuda" if self.options.gpus else "host",
            "gpus": list(self.options.gpus),
            "far": self.options.far,
            "shape": shape.text(),
            "piece_bytes": shape.piece_bytes,
            "rows": shape.rows,
            "bytes": shape.nbytes,
        }

    def _figures(self, shape: Shape, runs: list[dict[str, int]], before: dict[str, dict[str, int]]) -> dict[str, Any]:
        direct, relay, feeder = (statistics.median(run[way] for run in runs) for way in WAYS)
        at_rate = shape.nbytes * 8 / self.options.rate_gbit
        counters = self.sender.ask("counters", "relay")
        spent = {name: counters[name] - before["relay"][name] for name in counters}
        ways = {way: spent.get(f"gpu_{way}_bytes", 0) for way in GPU_WAYS}
        return {
            "runs": len(runs),
            "direct_ms": direct / 1e6,
            "relay_ms": relay / 1e6,
            "feeder_ms": feeder / 1e6,
            "at_rate_ms": at_rate / 1e6,
            "relay_to_direct": statistics.median(run["relay"] / run["direct"] for run in runs),
            "relay_to_rate": relay / at_rate,
            "direct_reached": at_rate / direct,
            "counts": at_rate / direct >= REACHED,
            "feeder_gigabytes_per_second": shape.nbytes / feeder,
            "hidden": 1 - (relay - direct) / feeder,
            "lane_bytes": spent["copied_bytes"],
            "slots": spent["slots"],
            "stalls": spent["stalls"],
            "copied_by": {way: nbytes for way, nbytes in ways.items() if nbytes},
        }

    def _under_load(self, idle: dict[str, Any], values: str) -> dict[str, Any]:
        """Both GPUs multiply matrices meanwhile. A matmul's time while transfers run is held against that just before
        and after."""
        engines = {"sender": self.sender, "receiver": self.receiver}
        if len(set(self.options.gpus)) == 1:  # two processes would take turns on it
            del engines["receiver"]
        for engine in engines.values():
            engine.begin("start_load", values)
        for engine in engines.values():
            engine.result(_LONG_S)
        try:
            quiet, busy, relay, direct = [], [], [], []
            before = self.rail()
            quiet.append(self._idle_window())
            for _ in range(_LOADED_WINDOWS):
                window, spent = self.sender.ask("repeat", "relay", _WINDOW_S)
                relay += spent
                busy.append(Window(*window))
                quiet.append(self._idle_window())
            after = self.rail()
            for _ in range(2):
                direct += self.sender.ask("repeat", "direct", _WINDOW_S)[1]
            slowed = {}
            for name, engine in engines.items():
                alone, beside = engine.ask("matmul_ms", quiet), engine.ask("matmul_ms", busy)
                pairs = zip(beside, alone, alone[1:], strict=False)
                slowed[name] = statistics.median(2 * ms / (last + following) - 1 for ms, last, following in pairs)
        finally:
            for engine in engines.values():
                engine.ask("stop_load")
        relay_ms, direct_ms = statistics.median(relay) / 1e6, statistics.median(direct) / 1e6
        return {
            "relay_ms": relay_ms,
            "direct_ms": direct_ms,
            "relay_to_idle_direct": relay_ms / idle["direct_ms"],
            "relay_to_direct": relay_ms / direct_ms,
            "relay_to_rate": relay_ms / idle["at_rate_ms"],
            "nic_late_share": before.late_share(after),
            "nic_late_copies": after.late_copies - before.late_copies,
            "transfers": len(relay),
            "matmul_slowdown": slowed,
        }

    def _idle_window(self) -> Window:
        begin = time.monotonic_ns()
        time.sleep(_WINDOW_S)
        return Window(begin, time.monotonic_ns())


@contextlib.contextmanager
def ready(nbytes: int, options: Options) -> Iterator[Setup]:
    """Daemons, engines and ``nbytes`` of memory each. RelayError."""
    host = not options.gpus
    if host and 5 * nbytes > _MEMORY_SHARE * _nodes.free_bytes():
        text = f"{size(5 * nbytes)} wanted for three sources and two destinations; use fewer or smaller pieces"
        raise RelayError(ErrorCode.NO_MEMORY, text)
    geometry = _nodes.GEOMETRIES[0]
    if host:
        geometry = _nodes.fitting_geometry(2, 6, 4, largest_slot_bytes=MIB)
    rates = {"at-rate": options.rate_gbit, "no-time": _NO_TIME_GBIT}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_nodes.ended_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-bench-")))
        ended = stack.enter_context(contextlib.ExitStack())
        nodes = []
        for name, rate in rates.items():
            nics = [Emulated(rate, options.gpu(rail), options.nic_copies) for rail in (_SENDER_RAIL, _RECEIVER_RAIL)]
            nodes.append(
                stack.enter_context(Node(f"bench-{name}-{os.getpid()}", directory, geometry, (-1, -1), nics=nics))
            )
        sockets = [node.socket for node in nodes]
        sender = stack.enter_context(Worker("sending engine", Sender, nbytes, options, *sockets))
        receiver = stack.enter_context(Worker("receiving engine", Receiver, nbytes, options, *sockets))
        for engine in (sender, receiver):
            engine.result()
        sender.ask("open", *receiver.ask("offers"))
        setup = Setup(options, nodes[0], sender, receiver)
        for node in nodes:
            ended.callback(lambda node: setup.logs.append(node.log_tail()), node)
        yield setup


# ---- the verb ----


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("overlap")
    group.add_argument("--memory", choices=["host", "cuda"], help="default: host")
    group.add_argument(
        "--rate",
        type=amount(*_RATES_GBIT),
        metavar="GBIT",
        help=f"of the NICs, Gbit/s (default: {HOST_GBIT:g}, cuda {GPU_GBIT:g})",
    )
    group.add_argument("--rows", type=whole(_MOST_ROWS), metavar="R", help="pages with so many rows instead of blocks")
    group.add_argument("--pages", type=whole(_MOST_PAGES), metavar="N", help=f"with --rows; default: {_PAGES}")
    group.add_argument("--piece", type=whole(_nodes.GIB), metavar="B", help=f"bytes of a row (default: {_PIECE_BYTES})")
    group.add_argument(
        "--load", action="store_true", default=None, help="--memory cuda: matmuls on both GPUs meanwhile; needs torch"
    )
    group.add_argument("--copy", choices=list(Copy), help="--memory cuda: how slots are filled (default: auto)")
    group.add_argument(
        "--far",
        action="store_true",
        default=None,
        help="--memory cuda: the destination is not on the relay memory's GPU",
    )
    group.add_argument(
        "--nic-copies",
        choices=["auto", "engines"],
        help="--memory cuda: by what the emulated NICs copy: copy engines only, or a kernel where they are too slow"
        " (default: auto)",
    )


def taken(args: argparse.Namespace) -> tuple[str, frozenset[str]]:
    """(what is measured, the options that mean something then)"""
    memory = args.memory or "host"
    takes = {"runs", "memory", "rate", "rows"} | ({"pages", "piece"} if args.rows else {"blocks", "block_bytes"})
    if memory == "cuda":
        takes |= {"load", "copy", "far", "nic_copies"}
    return f"overlap --memory {memory} {'with' if args.rows else 'without'} --rows", frozenset(takes)


def options_of(args: argparse.Namespace) -> Options:
    """RelayError: no CUDA here."""
    if args.memory == "host":
        return Options((), args.rate or HOST_GBIT)
    if missing := cuda.missing():
        raise RelayError(ErrorCode.NOT_SUPPORTED, f"--memory cuda: {missing}")
    last = cuda.count() - 1
    gpus = (cuda.uuid_of(0), cuda.uuid_of(min(1, last)))
    return Options(gpus, args.rate or GPU_GBIT, Copy(args.copy), nic_copies=args.nic_copies, far=args.far)


def shape_of(args: argparse.Namespace) -> Shape:
    if args.rows:
        return Shape(args.piece, args.pages, args.rows)
    return Shape(args.block_bytes or 65536, args.blocks)


def overlap(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    options, shape = options_of(args), shape_of(args)
    with ready(shape.pieces * shape.step, options) as setup:
        progress.step(f"emulated NICs of {options.rate_gbit:g} Gbit/s; {shape.text()} ({size(shape.nbytes)})")
        result = setup.measure(shape, args.runs or _RUNS, load=VALUES if args.load else (), quiet=progress)
    return {**result, "targets": [{**target.facts(), "text": target.text()} for target in targets_of(result)]}


def targets_of(result: dict[str, Any]) -> list[Target]:
    """Not judged where the NIC did not keep its rate."""
    found = {"relay to own-rail direct": (result["relay_to_direct"], 1.05)} | {
        f"relay to own-rail direct, beside matmuls of {values}": (load["relay_to_idle_direct"], 1.10)
        for values, load in result.get("load", {}).items()
    }
    return [
        Target(what, figure, limit, at_least=False, judged=result["counts"]) for what, (figure, limit) in found.items()
    ]


def report(result: dict[str, Any]) -> str:
    rows = [["own-rail direct", *_times(result, "direct_ms")], ["relay", *_times(result, "relay_ms")]]
    rows.append(["feeder alone", *_times(result, "feeder_ms")])
    for values, load in result.get("load", {}).items():
        rows += [[f"{way}, {values}", *_times(result, f"{way}_ms", load[f"{way}_ms"])] for way in ("direct", "relay")]
    counts = "" if result["counts"] else f"; below {REACHED}, so that this run says nothing about relay"
    copied = ", ".join(f"{way} {size(nbytes)}" for way, nbytes in result["copied_by"].items()) or "the CPU"
    checked = "content verified" if result["verified"] else f"{result['wrong_pieces']} WRONG PIECES"
    lines = [
        f"emulated NIC, {result['rate_gbit']:g} Gbit/s, {result['memory']} memory; {result['shape']},"
        f" {size(result['bytes'])}",
        table(["", "TIME", "GB/s", "OF THE RATE"], rows),
        f"relay takes {result['relay_to_direct']:.3f} x own-rail direct; {result['hidden']:.1%} of the copy was hidden",
        f"own-rail direct reached {result['direct_reached']:.3f} of the set rate{counts}; late copies cost the NICs"
        f" {result['nic_late_share']:.1%}",
        f"copied by {copied}; {result['slots']} slots, {result['stalls']} stalls; median of {result['runs']} runs,"
        f" {checked}",
    ]
    for values, load in result.get("load", {}).items():
        slowed = ", ".join(f"{name} {share:+.2%}" for name, share in load["matmul_slowdown"].items())
        lines.append(
            f"matmuls of {values}, slower by: {slowed}; late copies cost the NICs {load['nic_late_share']:.1%}"
        )
    return "\n".join([*lines, *(f"target: {target['text']}" for target in result["targets"])])


def _times(result: dict[str, Any], name: str, ms: float | None = None) -> list[str]:
    taken = result[name] if ms is None else ms
    return [f"{taken:.2f} ms", f"{result['bytes'] / taken / 1e6:.2f}", f"{result['at_rate_ms'] / taken:.3f}"]
