"""The local route of the bench: two engines of one daemon, beside a plain memcpy of the same scattered blocks."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from railrelay.client import limit
from railrelay.client.cli import _nodes
from railrelay.client.cli._bench_targets import KIB, Target
from railrelay.client.cli._nodes import Node
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import size, table
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Client
from railrelay.client.errors import ErrorCode, RelayError

_PAIRS: Final = 21
_MEMORY_SHARE: Final = 0.75  # of what is free
_TARGETS: Final = {64 * KIB: 0.8, 4 * KIB: 0.6}
_TARGET_BLOCKS: Final = 16384


class Engines:
    """Both engines, in one process, so that the memcpy can use the same pages: it takes the receiver's own mapping of
    the destination, the sender has its own."""

    def __init__(self, socket: str, blocks: int, block_bytes: int) -> None:
        self._sender = Client.connect(socket, rank=0, name="bench-sender")
        self._receiver = Client.connect(socket, rank=1, name="bench-receiver")
        nbytes = blocks * block_bytes
        self._length = block_bytes
        self._source, self._destination = self._sender.alloc(nbytes), self._receiver.alloc(nbytes)
        self._remote = self._sender.open(self._destination.offer())
        rng = np.random.default_rng(1)
        self._source.array[:] = rng.integers(1, 256, nbytes, np.uint8)
        stride = np.uint64(block_bytes)
        self._taken, self._put = (rng.permutation(blocks).astype(np.uint64) for _ in range(2))
        self._sources = self._taken * stride + np.uint64(self._source.address)
        self._remotes = self._put * stride + np.uint64(self._remote.address)
        self._destinations = self._put * stride + np.uint64(self._destination.address)

    def transfer(self) -> int:
        """ns until the transfer is done."""
        before = time.monotonic_ns()
        self._sender.write(self._remote, self._sources, self._remotes, self._length).wait(60)
        return time.monotonic_ns() - before

    def memcpy(self) -> int:
        return limit.copy(self._sources, self._destinations, self._length)

    def wipe(self) -> None:
        self._destination.array[:] = 0

    def wrong(self) -> int:
        """Blocks that are not in their places."""
        shape = (len(self._taken), self._length)
        old, new = (buffer.array.reshape(shape) for buffer in (self._source, self._destination))
        return sum(not np.array_equal(old[t], new[p]) for t, p in zip(self._taken, self._put, strict=True))

    def bytes_local(self) -> int:
        return self._sender.counters()["bytes_local"]

    def close(self) -> None:
        self._sender.close()
        self._receiver.close()


def local(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    sizes = [args.block_bytes] if args.block_bytes else list(_TARGETS)
    cases = [_case(args.blocks, block_bytes, args.runs or _PAIRS, progress) for block_bytes in sizes]
    return {
        "route": "local",
        "verified": all(case["verified"] for case in cases),
        "cases": cases,
        "targets": [target for case in cases for target in case["targets"]],
    }


def report(result: dict[str, Any]) -> str:
    rows = []
    for case in result["cases"]:
        low, high = case["ratio_quartiles"]
        checked = "content verified" if case["verified"] else f"{case['wrong_blocks']} WRONG BLOCKS"
        rows.append(
            [
                f"{case['blocks']:,} x {size(case['block_bytes'])}",
                f"{case['gigabytes_per_second']:.3g}",
                f"{case['limit_gigabytes_per_second']:.3g}",
                f"{case['ratio']:.3f} ({low:.3f} to {high:.3f})",
                f"{case['pairs']} pairs, {checked}",
            ]
        )
    lines = [table(["BLOCKS", "RAILRELAY GB/s", "MEMCPY GB/s", "RATIO", ""], rows)]
    return "\n".join([*lines, *(f"target: {target['text']}" for target in result["targets"])])


def _case(blocks: int, block_bytes: int, count: int, progress: Progress) -> dict[str, Any]:
    _check(blocks, block_bytes)
    nbytes = blocks * block_bytes
    geometry = _nodes.fitting_geometry(1, 2, 0, largest_slot_bytes=_nodes.MIB)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_nodes.ended_by_signals())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-bench-")))
        node = stack.enter_context(Node(f"bench-local-{os.getpid()}", directory, geometry, (-1,)))
        engines = stack.enter_context(Worker("engines", Engines, node.socket, blocks, block_bytes))
        engines.result()
        progress.step(f"{blocks:,} blocks of {size(block_bytes)} ({size(nbytes)}), local, shared memory")
        engines.ask("transfer")
        wrong = engines.ask("wrong")
        engines.ask("memcpy")
        spent: list[tuple[int, int]] = []
        for number in range(count):
            # The order changes from pair to pair, so that a drift of the machine hits both.
            order = ("transfer", "memcpy") if number % 2 else ("memcpy", "transfer")
            found = {what: engines.ask(what) for what in order}
            spent.append((found["transfer"], found["memcpy"]))
            ratio = statistics.median(its / ours for ours, its in spent)
            latest = spent[-1][1] / spent[-1][0]
            progress.update(f"  pair {number + 1} of {count}: ratio {latest:.3f}, median {ratio:.3f}")
        engines.ask("wipe")
        engines.ask("transfer")
        wrong += engines.ask("wrong")
        carried = engines.ask("bytes_local")
    ratios = sorted(its / ours for ours, its in spent)
    ratio = statistics.median(ratios)
    targets: list[Target] = []
    if blocks == _TARGET_BLOCKS and block_bytes in _TARGETS:
        what = f"{blocks:,} x {size(block_bytes)} over memcpy"
        targets.append(Target(what, ratio, _TARGETS[block_bytes], at_least=True))
    return {
        "blocks": blocks,
        "block_bytes": block_bytes,
        "bytes": nbytes,
        "pairs": count,
        "gigabytes_per_second": nbytes / statistics.median(ours for ours, _ in spent),
        "limit_gigabytes_per_second": nbytes / statistics.median(its for _, its in spent),
        "ratio": ratio,
        "ratio_quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
        "bytes_local": carried,
        "verified": wrong == 0 and carried == (count + 2) * nbytes,
        "wrong_blocks": wrong,
        "targets": [{**target.facts(), "text": target.text()} for target in targets],
    }


def _check(blocks: int, block_bytes: int) -> None:
    nbytes, room = 2 * blocks * block_bytes, int(_MEMORY_SHARE * _nodes.free_bytes())
    if nbytes > room:
        raise RelayError(
            ErrorCode.NO_MEMORY,
            f"{blocks} blocks of {block_bytes} bytes need {size(nbytes)} for source and destination, {size(room)} may"
            " be used (three quarters of the free memory); use fewer or smaller blocks",
        )
