"""Do transfers leave each other their shares? Small transfers alone and beside a bulk transfer that fills the same
rail; small ones beside neighbours that run to their end, or are ended early; throughput to one peer while another is
stopped or dead. Each figure is a ratio of runs that alternate, and has a limit."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from railrelay.client import Client
from railrelay.client.cli import _content, _nodes
from railrelay.client.cli._bench_targets import Target
from railrelay.client.cli._nodes import MIB, Geometry, Node
from railrelay.client.cli._numbers import amount, whole
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import size, table
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Route
from railrelay.client.errors import ArgumentError, ErrorCode, RelayError, TransferError
from railrelay.client.regions import RemoteRegion
from railrelay.client.transfer import Transfer

Places = npt.NDArray[np.uint64]
Rounds: TypeAlias = list[list[int]]  # ns

BULK_LIMIT: Final = 5.0  # p99 of small transfers, beside bulk over alone
EARLY_LIMIT: Final = 1.2  # the same, beside neighbours that are ended early over ones that are not
PEER_LIMIT: Final = 0.95  # throughput, with a peer that has gone over without

_BULK_BYTES: Final = 10_000_000_000
_SMALL_BYTES: Final = MIB
_SOURCE_BYTES: Final = 256 * MIB
_STREAM_BYTES: Final = 64 * MIB  # of a run to a peer beside one that has gone
_NEIGHBOUR_BYTES: Final = 8 * MIB
_NEIGHBOURS: Final = 3
_BLOCK: Final = 64 * 1024
_ROUNDS: Final = 9
_SMALL_COUNT: Final = 120  # a round
_SMALL_GAP_S: Final = 0.001
_STREAM_COUNT: Final = 6  # a run
_SEED: Final = 23
_TIMEOUT_S: Final = 120.0
_LONG_S: Final = 300.0
_MEMORY_SHARE: Final = 0.6
_CLONE_NEWNET: Final = 0x40000000
_QUEUE_S: Final = 0.001  # that one connection may have in the queue of a slow loopback
_BURST_BYTES: Final = 256 * 1024  # above the loopback's MTU
_TBF_BYTES: Final = 16 * MIB  # above all that connections may have in it: nothing is dropped
_PATH: Final = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
DEFAULTS: Final = {"bulk_bytes": None, "rate_gbit": None}
_STUCK_S: Final = 0.1  # transfers to a peer that has gone have filled what they may


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bulk-bytes",
        type=whole(1 << 50),
        metavar="B",
        help="fairness: of the bulk transfer (default: 10 GB, or what the memory has room for)",
    )
    parser.add_argument(
        "--rate-gbit",
        type=amount(0.01, 400),
        metavar="R",
        help="fairness: of the rails, in a network namespace (needs root and iproute2); else the cores are the limit",
    )


class Sender:
    """One engine of the sending node. Its source holds ``_SOURCE_BYTES``, which longer transfers send over and over."""

    def __init__(self, socket: str, route: Route, name: str) -> None:
        self._client = Client.connect(socket, rank=0, route=route, name=name)
        self._source = self._client.alloc(_SOURCE_BYTES)
        self._source.array[:] = _content_of(np.arange(_SOURCE_BYTES // _BLOCK)).reshape(-1)
        self._remotes: dict[str, RemoteRegion] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._moved: list[tuple[int, int]] = []
        self._stuck: list[Transfer] = []

    def open(self, name: str, offer: bytes) -> None:
        self._remotes[name] = self._client.open(offer)

    def small(self, name: str, count: int, place: int) -> list[int]:
        """ns of each transfer from the call to the end of the wait; ``place``: where they go, in blocks."""
        sources, destinations = self._blocks(name, place, _SMALL_BYTES // _BLOCK)
        spent = []
        for _ in range(count):
            time.sleep(_SMALL_GAP_S)
            before = time.perf_counter_ns()
            self._write(name, sources, destinations).wait()
            spent.append(time.perf_counter_ns() - before)
        return spent

    def stream(self, name: str, count: int) -> int:
        """ns of ``count`` transfers one after the other, two at a time."""
        sources, destinations = self._blocks(name, 0, _STREAM_BYTES // _BLOCK)
        before = time.perf_counter_ns()
        transfers = [self._write(name, sources, destinations)]
        for _ in range(count - 1):
            transfers.append(self._write(name, sources, destinations))
            transfers.pop(0).wait()
        transfers.pop().wait()
        return time.perf_counter_ns() - before

    def start_bulk(self, name: str, nbytes: int) -> None:
        """Transfers of ``nbytes``, one after the other, until end() or cancel()."""
        sources, destinations = self._blocks(name, 0, nbytes // _BLOCK)

        def bulk() -> None:
            before = time.perf_counter_ns()
            self._bulk = self._write(name, sources, destinations)
            with contextlib.suppress(TransferError):
                self._bulk.wait()
            if not self._bulk.result:
                self._moved.append((nbytes, time.perf_counter_ns() - before))

        self._start(bulk)

    def start_neighbours(self, name: str, early: bool, seed: int) -> None:
        """A few transfers at a time; ``early``: one in three is cancelled at a random moment."""
        rng = np.random.default_rng(seed)
        each = _NEIGHBOUR_BYTES // _BLOCK
        areas = [self._blocks(name, number * each, each) for number in range(_NEIGHBOURS)]

        def neighbours() -> None:
            before = time.perf_counter_ns()
            transfers = [self._write(name, sources, destinations) for sources, destinations in areas]
            ends = rng.random() < _NEIGHBOURS / 3 and early
            if ends:
                time.sleep(rng.uniform(0, usual[0]))
                transfers[rng.integers(len(transfers))].cancel()
            for transfer in transfers:
                with contextlib.suppress(TransferError):
                    transfer.wait()
            if not ends:
                usual[0] = 0.9 * usual[0] + 0.1e-9 * (time.perf_counter_ns() - before)
            self._moved.append((_NEIGHBOURS * _NEIGHBOUR_BYTES, time.perf_counter_ns() - before))

        usual = [0.01]
        self._start(neighbours)

    def _start(self, step: Callable[[], None]) -> None:
        self._stop.clear()
        self._moved.clear()

        def run() -> None:
            while not self._stop.is_set():
                step()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def cancel(self) -> None:
        """Ends the bulk transfer that is under way."""
        self._stop.set()
        self._bulk.cancel()
        self.end()

    def end(self) -> float:
        """Bytes per second of what was started; returns when it has ended. 0 if nothing has ended well."""
        assert self._thread is not None
        self._stop.set()
        self._thread.join()
        self._thread = None
        return 1e9 * sum(nbytes for nbytes, _ in self._moved) / max(1, sum(ns for _, ns in self._moved))

    def get_stuck(self, name: str) -> None:
        """Begins transfers to a peer that does not, or soon will not, answer."""
        sources, destinations = self._blocks(name, 0, _STREAM_BYTES // _BLOCK)
        self._stuck = [self._write(name, sources, destinations) for _ in range(2)]

    def get_loose(self, answers: bool) -> list[str]:
        """How they ended; of a peer that does not come back only that they were given up."""
        for transfer in self._stuck:
            if answers:
                transfer.wait()
            else:
                transfer.cancel(wait=False)
        return [repr(transfer) for transfer in self._stuck]

    def _write(self, name: str, sources: Places, destinations: Places) -> Transfer:
        return self._client.write(self._remotes[name], sources, destinations, _BLOCK, timeout=_TIMEOUT_S)

    def _blocks(self, name: str, first: int, count: int) -> tuple[Places, Places]:
        """Destinations in random order; block d holds what source block d modulo the source's size has."""
        numbers = np.random.default_rng(_SEED + first).permutation(count).astype(np.uint64) + np.uint64(first)
        sources = numbers % np.uint64(_SOURCE_BYTES // _BLOCK) * np.uint64(_BLOCK) + np.uint64(self._source.address)
        return sources, numbers * np.uint64(_BLOCK) + np.uint64(self._remotes[name].address)

    def close(self) -> None:
        if self._thread is not None:
            self._stop.set()
        self._client.close()


class Receiver:
    def __init__(self, socket: str, nbytes: int) -> None:
        self._client = Client.connect(socket, rank=0, name="bench-receiver")
        self._memory = self._client.alloc(nbytes)

    def offer(self) -> bytes:
        return self._memory.offer()

    def wipe(self, first: int, count: int) -> None:
        self._memory.array[first * _BLOCK : (first + count) * _BLOCK] = 0xA5

    def wrong(self, first: int, count: int) -> int:
        """Blocks that do not hold what was sent there."""
        found = self._memory.array.reshape(-1, _BLOCK)[first : first + count]
        each = _SOURCE_BYTES // _BLOCK
        source = _content_of(np.arange(each))
        wrong = 0
        for at in range(0, count, each):
            part = found[at : at + each]
            expected = np.take(source, np.arange(first + at, first + at + len(part)) % each, axis=0)
            wrong += int((part.view(np.uint64) != expected.view(np.uint64)).any(axis=1).sum())
        return wrong

    def close(self) -> None:
        self._client.close()


def _content_of(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    return _content.words(_content.keys(_SEED, numbers.astype(np.uint64)), 0, _BLOCK // 8).view(np.uint8)


@dataclass
class Nodes:
    """The sending node with two engines, and receiving ones."""

    directory: Path
    geometry: Geometry
    congestion: str
    stack: contextlib.ExitStack
    started: int = 0

    def daemon(self, name: str) -> Node:
        self.started += 1
        instance = f"bench-{name}-{self.started}-{os.getpid()}"
        return self.stack.enter_context(Node(instance, self.directory, self.geometry, (-1,), self.congestion))

    def engine(self, name: str, make: Callable[..., Any], *arguments: object) -> Worker:
        worker = self.stack.enter_context(Worker(name, make, *arguments))
        worker.result()
        return worker


@contextlib.contextmanager
def _nodes_for(congestion: str) -> Iterator[Nodes]:
    geometry = _nodes.fitting_geometry(1, 5, 2)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_nodes.ended_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-bench-")))
        yield Nodes(directory, geometry, congestion, stack)


def fairness(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """RelayError, ArgumentError."""
    bulk_bytes = _bulk_bytes(args.bulk_bytes)
    if args.rate_gbit is not None:
        _limit_rate(args.rate_gbit)
    route = Route.RELAY_ALL if args.route == "relay" else Route.DIRECT
    rounds = args.runs or _ROUNDS
    with _nodes_for(args.congestion) as nodes:
        sending, receiving = nodes.daemon("prefill"), nodes.daemon("decode")
        receiver = nodes.engine("receiving engine", Receiver, receiving.socket, bulk_bytes + _SMALL_BYTES)
        bulk = nodes.engine("bulk engine", Sender, sending.socket, route, "bench-bulk")
        small = nodes.engine("small engine", Sender, sending.socket, route, "bench-small")
        for engine in (bulk, small):
            engine.ask("open", "decode", receiver.ask("offer"))
        progress.step(f"{args.route}, small transfers of {size(_SMALL_BYTES)}, bulk of {size(bulk_bytes)}")
        found = {
            "bulk": _beside_bulk(receiver, bulk, small, bulk_bytes, rounds, progress),
            "early": _beside_early_ends(receiver, bulk, small, rounds, progress),
            "peers": _beside_gone_peers(nodes, receiver, bulk, rounds, progress),
        }
    wrong = sum(part["wrong_blocks"] for part in found.values())
    targets = [
        *(
            Target(f"p99 beside bulk of {whose} engine over p99 alone", part["ratio"], BULK_LIMIT, at_least=False)
            for whose, part in found["bulk"]["of"].items()
        ),
        Target(
            "p99 beside transfers that are ended early over ones that are not",
            found["early"]["ratio"],
            EARLY_LIMIT,
            at_least=False,
        ),
        *(
            Target(f"throughput beside a {what} peer", part["ratio"], PEER_LIMIT, at_least=True)
            for what, part in found["peers"]["of"].items()
        ),
    ]
    return {
        "mode": "fairness",
        "route": args.route,
        "rate_gbit": args.rate_gbit,
        "bulk_bytes": bulk_bytes,
        "small_bytes": _SMALL_BYTES,
        "rounds": rounds,
        **found,
        "wrong_blocks": wrong,
        "verified": wrong == 0,
        "targets": [{**target.facts(), "text": target.text()} for target in targets],
        "met": all(target.met for target in targets),
    }


def _limit_rate(gbit: float) -> None:
    """This process, and those that it starts, get a loopback of their own that is so fast."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise RelayError(ErrorCode.DENIED, f"--rate-gbit: no network namespace of its own: {reason}; run as root")
    bytes_per_s = gbit * 1e9 / 8
    Path("/proc/sys/net/ipv4/tcp_limit_output_bytes").write_text(str(int(bytes_per_s * _QUEUE_S)))
    shape = f"tbf rate {int(gbit * 1e9)}bit burst {_BURST_BYTES} limit {_TBF_BYTES}"
    for command in ("ip link set lo up", f"tc qdisc add dev lo root {shape}"):
        try:
            subprocess.run(
                command.split(), check=True, capture_output=True, text=True, env={**os.environ, "PATH": _PATH}
            )
        except (OSError, subprocess.CalledProcessError) as failure:
            reason = getattr(failure, "stderr", "") or str(failure)
            text = f"--rate-gbit: {command}: {reason.strip()}; is iproute2 installed?"
            raise RelayError(ErrorCode.NOT_SUPPORTED, text) from None


def _bulk_bytes(wanted: int | None) -> int:
    room = int(_MEMORY_SHARE * (_nodes.free_bytes() - 2 * _SOURCE_BYTES)) // _BLOCK * _BLOCK
    if wanted is not None and not _STREAM_BYTES <= wanted <= room:
        text = f"--bulk-bytes {wanted}: expected {_STREAM_BYTES} to {room}, which is what the free memory has room for"
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
    if room < _STREAM_BYTES:
        raise RelayError(ErrorCode.NO_MEMORY, f"{size(room)} may be used; {size(_STREAM_BYTES)} are needed")
    return min(wanted or _BULK_BYTES, room) // _BLOCK * _BLOCK


def _beside_bulk(
    receiver: Worker, bulk: Worker, small: Worker, bulk_bytes: int, rounds: int, progress: Progress
) -> dict[str, Any]:
    """Of the same engine, and of another one of the same rank: both on the rail that bulk fills."""
    place, blocks = bulk_bytes // _BLOCK, _SMALL_BYTES // _BLOCK
    receiver.ask("wipe", 0, bulk_bytes // _BLOCK, timeout=_LONG_S)
    wrong, rate = 0, 0.0
    alone: dict[str, Rounds] = {"the same": [], "another": []}
    beside: dict[str, Rounds] = {"the same": [], "another": []}
    for number in range(rounds):
        engines = {"the same": bulk, "another": small}
        for whose, engine in engines.items():
            receiver.ask("wipe", place, blocks)
            alone[whose].append(engine.ask("small", "decode", _SMALL_COUNT, place))
            wrong += receiver.ask("wrong", place, blocks)
        bulk.ask("start_bulk", "decode", bulk_bytes)
        for whose, engine in engines.items():
            receiver.ask("wipe", place, blocks)
            beside[whose].append(engine.ask("small", "decode", _SMALL_COUNT, place))
            wrong += receiver.ask("wrong", place, blocks)
        rate = bulk.ask("end" if number == rounds - 1 else "cancel", timeout=_LONG_S)
        ratios = ", ".join(f"{whose} engine {_p99(beside[whose]) / _p99(alone[whose]):.2f}" for whose in alone)
        progress.update(f"  beside bulk, round {number + 1} of {rounds}: {ratios}")
    wrong += receiver.ask("wrong", 0, bulk_bytes // _BLOCK, timeout=_LONG_S)
    return {
        "of": {whose: _compared(alone[whose], beside[whose]) for whose in alone},
        "bulk_gigabytes_per_second": rate / 1e9,
        "wrong_blocks": wrong,
    }


def _beside_early_ends(
    receiver: Worker, bulk: Worker, small: Worker, rounds: int, progress: Progress
) -> dict[str, Any]:
    place, blocks = _NEIGHBOURS * _NEIGHBOUR_BYTES // _BLOCK, _SMALL_BYTES // _BLOCK
    spent: dict[bool, Rounds] = {False: [], True: []}
    wrong = 0
    for number in range(2 * rounds):
        for early in (False, True) if number % 2 else (True, False):
            receiver.ask("wipe", place, blocks)
            bulk.ask("start_neighbours", "decode", early, number)
            spent[early].append(small.ask("small", "decode", _SMALL_COUNT, place))
            bulk.ask("end")
            wrong += receiver.ask("wrong", place, blocks)
        progress.update(
            f"  beside early ends, round {number + 1} of {2 * rounds}: {_p99(spent[True]) / _p99(spent[False]):.2f}"
        )
    return {**_compared(spent[False], spent[True]), "wrong_blocks": wrong}


def _beside_gone_peers(nodes: Nodes, receiver: Worker, bulk: Worker, rounds: int, progress: Progress) -> dict[str, Any]:
    """Transfers to a peer that is stopped, then killed, are under way meanwhile."""
    wrong = 0
    pairs: dict[str, list[tuple[int, int]]] = {"stopped": [], "dead": []}
    bulk.ask("stream", "decode", _STREAM_COUNT)
    receiver.ask("wipe", 0, _STREAM_BYTES // _BLOCK)
    for number in range(rounds):
        other = nodes.daemon("other")
        its = nodes.engine("other engine", Receiver, other.socket, _STREAM_BYTES)
        bulk.ask("open", "other", its.ask("offer"))
        bulk.ask("stream", "other", 1)
        for what in pairs:
            without = [bulk.ask("stream", "decode", _STREAM_COUNT)]
            os.kill(other.pid, signal.SIGSTOP)
            bulk.ask("get_stuck", "other")
            time.sleep(_STUCK_S)
            if what == "dead":
                os.kill(other.pid, signal.SIGKILL)
            beside = bulk.ask("stream", "decode", _STREAM_COUNT)
            if what == "stopped":
                os.kill(other.pid, signal.SIGCONT)
            bulk.ask("get_loose", what == "stopped")
            pairs[what].append((without[0], beside))
        its.close()
        wrong += receiver.ask("wrong", 0, _STREAM_BYTES // _BLOCK)
        shown = ", ".join(f"{what} {_ratio_of(pairs[what]):.3f}" for what in pairs)
        progress.update(f"  beside a peer that has gone, round {number + 1} of {rounds}: {shown}")
    return {"of": {what: {"ratio": _ratio_of(found)} for what, found in pairs.items()}, "wrong_blocks": wrong}


def _ratio_of(pairs: list[tuple[int, int]]) -> float:
    """Median of the pairs' ratios of throughput."""
    return statistics.median(without / beside for without, beside in pairs)


def _compared(without: Rounds, beside: Rounds) -> dict[str, float]:
    return {
        "p50_us": _p50(without) / 1e3,
        "p99_us": _p99(without) / 1e3,
        "beside_p50_us": _p50(beside) / 1e3,
        "beside_p99_us": _p99(beside) / 1e3,
        "ratio": _p99(beside) / _p99(without),
    }


def _p50(rounds: Rounds) -> float:
    return statistics.median(ns for each in rounds for ns in each)


def _p99(rounds: Rounds) -> float:
    """The median of the rounds': what disturbs the machine for a moment is not counted."""
    return statistics.median(float(np.percentile(each, 99)) for each in rounds)


def report(result: dict[str, Any]) -> str:
    rows = []
    for whose, part in result["bulk"]["of"].items():
        rows.append([f"small alone / beside bulk, {whose} engine", *_times(part)])
    rows.append(["beside transfers that end / are ended early", *_times(result["early"])])
    lines = [
        table(["", "P50", "P99", "BESIDE P50", "BESIDE P99", "RATIO OF P99"], rows),
        f"bulk {result['bulk']['bulk_gigabytes_per_second']:.3g} GB/s meanwhile;"
        f" {'content verified' if result['verified'] else str(result['wrong_blocks']) + ' WRONG BLOCKS'}",
    ]
    return "\n".join([*lines, *(f"target: {target['text']}" for target in result["targets"])])


def _times(part: dict[str, float]) -> list[str]:
    names = ("p50_us", "p99_us", "beside_p50_us", "beside_p99_us")
    return [*(f"{part[name] / 1e3:.2f} ms" for name in names), f"{part['ratio']:.2f}"]
