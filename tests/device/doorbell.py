"""From the doorbell to the rail: a stream write alone, and in a running daemon, where a thread of the client watches
the lane's doorbell and the trace has when the rail took the slice."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import Final

import numpy as np

from device import fill, systems
from device.report import MIB, Options, Report, percentile
from railrelay.client.cli import _node, trace

_LIMIT_US: Final = 6.0
_BLOCK_BYTES: Final = 4096
_STUCK_NS: Final = 5e9
_CORES: Final = 6


def run(report: Report, options: Options, library: ctypes.CDLL) -> None:
    if options.gpus:
        _alone(report, options, library)
    for gap_s, text in ((0.0, "one after the other"), (0.002, "2 ms apart, so that the rail sleeps")):
        _in_daemon(report, options, library, gap_s, text)


def _alone(report: Report, options: Options, library: ctypes.CDLL) -> None:
    with fill.ready(library, options) as bench:
        seen, issue = (list(times) for times in bench.ring(200 if options.small else 5000))
    report.row(
        "stream write, until another thread sees it",
        f"{_shown(seen)}; its issue {_shown(issue)}",
        p50_us=percentile(seen, 50),
        p99_us=percentile(seen, 99),
        issue_p50_us=percentile(issue, 50),
    )


def _in_daemon(report: Report, options: Options, library: ctypes.CDLL, gap_s: float, text: str) -> None:
    """Transfers of one small slot each."""
    count = 100 if options.small else 2000
    with systems.daemon(options) as node, systems.link(node, options, MIB) as link:
        one = np.uint64(_BLOCK_BYTES)
        source, target = np.array([link.source.address], np.uint64), np.array([link.remote.address], np.uint64)

        def send() -> None:
            link.sender.write(link.remote, source, target, int(one)).wait()

        for _ in range(20):
            send()
        core = link.sender.attachment.core
        word = core.segment_area[0] + core.doorbell_offset(systems.RECEIVER)
        first = ctypes.c_uint64.from_address(word).value + 1
        seen = np.zeros(count)
        found: list[int] = []

        def watch() -> None:
            found.append(library.rd_watch(word, first, count, _STUCK_NS, seen.ctypes.data))

        watcher = threading.Thread(target=watch)
        watcher.start()
        time.sleep(0.01)
        for _ in range(count):
            if gap_s:
                time.sleep(gap_s)
            send()
        watcher.join()
        with _node.open_node(node.instance) as segment:
            slices, _ = trace.read(segment)
    lane = sorted((one for one in slices if not one.direct and one.bytes), key=lambda one: one.taken_ns)[-count:]
    if found != [count] or len(lane) != count:
        raise RuntimeError(f"{found} of {count} doorbells were seen, {len(lane)} slices are in the trace")
    taken = [(one.taken_ns - float(ns)) / 1e3 for one, ns in zip(lane, seen, strict=True)]
    issued = [(one.taken_ns - one.filled_ns) / 1e3 for one in lane if one.filled_ns is not None]
    p50 = percentile(issued, 50)
    report.timed(
        f"issue of the doorbell after a 4 KiB copy, until the rail took the slice: {text}",
        f"{_shown(issued)}{f'; since the doorbell turned {_shown(taken)}' if _has_cores() else ''}",
        f"p50 <= {_LIMIT_US:g} us" if not gap_s else "",
        p50 <= _LIMIT_US if not gap_s else None,
        p50_us=p50,
        p99_us=percentile(issued, 99),
        turned_p50_us=percentile(taken, 50),
        turned_p99_us=percentile(taken, 99),
        slices=count,
    )


def _shown(times_us: list[float]) -> str:
    return f"p50 {percentile(times_us, 50):.2f} us, p99 {percentile(times_us, 99):.2f} us"


def _has_cores() -> bool:
    """Enough for the watching thread to watch all the time."""
    return len(os.sched_getaffinity(0)) >= _CORES
