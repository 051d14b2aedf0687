"""One route of one case: fresh daemons and engines on a fabric, the traffic, every byte checked, and what was
measured."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from helpers.nodes import Nodes

from lab import fabric
from lab.cases import ROUTES, Traffic
from lab.engines import Done, Receiving, Sending
from lab.fabric import Fabric, Network, Reading, Series
from railrelay.client import limit
from railrelay.client.cli._workers import Worker

# A slot of 8 MiB is 168 us of a 400 Gbit/s NIC. The same time would be 4 KiB here, half a frame; so slots keep other
# ratios: a fifth of a usual transfer, many frames, many slots a lane. The limits that go by size shrink by the same 32.
GEOMETRY: Final[dict[str, dict[str, object]]] = {
    "relay": {
        "slots": 18,
        "slot_bytes": "256KiB",
        "table_entries": 512,
        "direct_slice_bytes": "256KiB",
        "express_bytes": "64KiB",
    },
    "tcp": {"notsent_lowat": "64KiB"},
}
PREFILL, DECODE = 0, 1
_LIMIT_S: Final = 300
_LOOK_S: Final = 0.5
_LEAD_NS: Final = 300_000_000
_SETTLE_S: Final = 0.3
_POINTS_S: Final = 0.1
_QUANTILES: Final = np.linspace(0, 100, 101)
_numbers: Final = itertools.count(1)


@dataclass(frozen=True)
class Cpu:
    """CPU seconds of the laboratory's own processes, and of the whole machine."""

    at_s: float
    own_s: float
    machine_s: float

    @classmethod
    def now(cls, pids: Sequence[int]) -> Cpu:
        fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = sum(fields) - fields[3] - fields[4]
        own = sum(limit.process_cpu_ns(pid) for pid in pids) / 1e9
        return cls(time.monotonic(), own, busy / os.sysconf("SC_CLK_TCK"))

    def shares(self, later: Cpu) -> dict[str, float]:
        """Of all cores."""
        cores_s = (later.at_s - self.at_s) * (os.cpu_count() or 1)
        return {
            "cpu_share": round((later.own_s - self.own_s) / cores_s, 3),
            "machine_cpu_share": round((later.machine_s - self.machine_s) / cores_s, 3),
        }


def measure(traffic: Traffic, on: Fabric, route: str, directory: Path) -> dict[str, Any]:
    """``seconds``: from the first submission to the last byte placed. A route that is not verified raises."""
    plan, network, number = traffic.plan, on.network, next(_numbers)
    on.check()
    with contextlib.ExitStack() as stack:
        nodes = Nodes(directory, limit_s=_LIMIT_S)
        stack.callback(nodes.close)
        daemons = [
            nodes.start(
                [network.address(node, rail) for rail in range(network.rails)],
                instance=f"{fabric.PREFIX}{os.getpid()}-{node}-{number}",
                prefix=["ip", "netns", "exec", on.nodes[node]],
                base=GEOMETRY,
                node={"host": network.control(node)},
                security={"allow_unauthenticated": True},  # nobody else is in the namespaces
                tcp={"congestion": network.congestion},
            )
            for node in (PREFILL, DECODE)
        ]
        decode = [
            stack.enter_context(
                Worker(f"decode engine {rank}", Receiving, on.nodes[DECODE], daemons[DECODE].socket, rank, plan)
            )
            for rank in range(len(plan.decode))
        ]
        place = (on.nodes[PREFILL], daemons[PREFILL].socket)
        prefill = [
            stack.enter_context(Worker(f"prefill engine {sender.share}", Sending, *place, sender, ROUTES[route], plan))
            for sender in traffic.senders
        ]
        for engine in (*decode, *prefill):
            engine.result()
        offers = _ask(on, decode, "offer")
        for engine in prefill:
            engine.ask("open", offers)
        _ask(on, [*prefill, *decode], "fill")
        time.sleep(_SETTLE_S)
        pids = [daemon.pid for daemon in daemons]
        everyone = [*pids, *on.pids, *(engine.pid for engine in (*decode, *prefill))]

        def play(paced: bool) -> dict[str, Any]:
            sent_again = sum(map(fabric.retransmits, pids))
            on.reset(pids)
            before = Cpu.now(everyone)
            done: list[list[Done]] = _ask(on, prefill, "play", time.monotonic_ns() + _LEAD_NS, paced)
            after = Cpu.now(everyone)
            figures = figures_of(traffic, network, done, on.read())
            sent_again = sum(map(fabric.retransmits, pids)) - sent_again
            return figures | {"retransmits": sent_again} | before.shares(after)

        result = play(paced=False)
        if any(sender.paced for sender in traffic.senders):
            result["paced"] = play(paced=True)
        wrong = [where or f"{bad} bytes" for bad, where in _ask(on, decode, "check") if bad]
    if wrong:
        raise RuntimeError(f"{route}: wrong bytes at decode: {'; '.join(wrong)}")
    return result


def _ask(on: Fabric, engines: Sequence[Worker], method: str, *arguments: object) -> list[Any]:
    """Their answers. Gives up at once if the fabric ends, and not when everything has timed out."""
    for engine in engines:
        engine.begin(method, *arguments)
    deadline = time.monotonic() + _LIMIT_S
    for engine in engines:
        while not engine.has_result(_LOOK_S) and time.monotonic() < deadline:
            on.check()
    return [engine.result(0.0) for engine in engines]


def figures_of(traffic: Traffic, network: Network, done: list[list[Done]], reading: Reading) -> dict[str, Any]:
    """``done``: what each sender's transfers did. ``rail_utilisation``: bytes on the wire over the line rate, of the
    prefill NICs' sending and of the decode NICs' receiving."""
    main = [one for sender, of in zip(traffic.senders, done, strict=True) if not sender.is_victim for one in of]
    begin_ns, end_ns = min(one.ready_ns for one in main), max(one.end_ns for one in main)
    seconds, nbytes = (end_ns - begin_ns) / 1e9, sum(one.nbytes for one in main)
    rails = sorted({one.decode for one in main})
    times_ms = [(one.end_ns - one.ready_ns) / 1e6 for one in main]
    window = _Window(reading, begin_ns, end_ns)
    line = network.line_bytes_per_second
    result: dict[str, Any] = {
        "seconds": round(seconds, 4),
        "gigabytes": round(nbytes / 1e9, 4),
        "share_of_line_rate": round(nbytes / seconds / (line * len(rails)), 4),
        "transfers": len(main),
        "p50_ms": round(float(np.percentile(times_ms, 50)), 2),
        "p99_ms": round(float(np.percentile(times_ms, 99)), 2),
        "switch_drops": reading.drops,
        "rail_utilisation": {
            "sent": window.means(reading.sent, PREFILL),
            "received": window.means(reading.received, DECODE),
        },
        "quantiles_ms": _quantiles(times_ms),
        "series_s": _POINTS_S,
        "series_received": window.series(reading.received, DECODE),
    }
    if pauses := reading.pauses:
        result |= {
            "pause_ms": round(pauses.nics_ms + pauses.inside_ms, 3),
            "pause_ms_nics": round(pauses.nics_ms, 3),
            "pause_ms_fabric": round(pauses.inside_ms, 3),
            "egress_queue_max_bytes": pauses.port_bytes_max,
            "switch_late_max_ms": round(pauses.late_max_ms, 2),
            "series_paused": window.series(pauses.of_nics, PREFILL),
        }
    if traffic.alone_s:
        result |= _victim(traffic, done, begin_ns, end_ns, line)
    if traffic.is_chunked:
        result |= _chunks(main)
    return result


def _quantiles(values: Sequence[float]) -> list[float]:
    return [round(float(value), 2) for value in np.percentile(values, _QUANTILES)]


def _victim(traffic: Traffic, done: list[list[Done]], begin_ns: int, end_ns: int, line: float) -> dict[str, Any]:
    """The stream's bytes that arrived, over those that fell due, before the incast and during it."""
    (stream,) = (of for sender, of in zip(traffic.senders, done, strict=True) if sender.is_victim)
    (sender,) = (sender for sender in traffic.senders if sender.is_victim)
    stop_ns = min(end_ns, max(one.ready_ns for one in stream))
    first_ns = min(one.ready_ns for one in stream)
    due_rate = stream[0].nbytes / (sender.queues[1][0].due_s - sender.queues[0][0].due_s)

    def rate(from_ns: int, to_ns: int) -> float:
        return sum(one.nbytes for one in stream if from_ns <= one.end_ns < to_ns) / ((to_ns - from_ns) / 1e9)

    during = [(one.end_ns - one.ready_ns) / 1e6 for one in stream if begin_ns <= one.ready_ns < stop_ns]
    alone = rate(first_ns + int(0.2e9), begin_ns)
    return {
        "victim_alone_share": round(alone / line, 4),
        "victim_share": round(rate(begin_ns, stop_ns) / line, 4),
        "victim_kept": round(rate(begin_ns, stop_ns) / due_rate, 4),
        "victim_p50_ms": round(float(np.percentile(during, 50)), 2),
        "victim_p99_ms": round(float(np.percentile(during, 99)), 2),
        "victim_quantiles_ms": _quantiles(during),
    }


def _chunks(done: Sequence[Done]) -> dict[str, Any]:
    """From when the last stage has computed its layers of a chunk until all stages' layers of it have arrived."""
    waits = []
    for chunk in sorted({one.request for one in done}):
        of = [one for one in done if one.request == chunk]
        waits.append((max(one.end_ns for one in of) - max(one.ready_ns for one in of)) / 1e6)
    return {
        "chunk_mean_ms": round(float(np.mean(waits)), 2),
        "chunk_p50_ms": round(float(np.percentile(waits, 50)), 2),
        "chunk_p99_ms": round(float(np.percentile(waits, 99)), 2),
        "chunk_quantiles_ms": _quantiles(waits),
    }


@dataclass(frozen=True)
class _Window:
    """The part of a reading's series between two times."""

    reading: Reading
    begin_ns: int
    end_ns: int

    def _cut(self, series: Series) -> Series:
        bucket_ns = self.reading.bucket_s * 1e9
        first = max(0, int((self.begin_ns - self.reading.begin_ns) / bucket_ns))
        last = int((self.end_ns - self.reading.begin_ns) / bucket_ns) + 1
        return series[first:last]

    def means(self, of: dict[tuple[int, int], Series], node: int) -> list[float]:
        seconds = (self.end_ns - self.begin_ns) / 1e9
        return [
            round(sum(self._cut(series)) * self.reading.bucket_s / seconds, 4)
            for (at, _), series in sorted(of.items())
            if at == node
        ]

    def series(self, of: dict[tuple[int, int], Series], node: int) -> list[Series]:
        step = max(1, round(_POINTS_S / self.reading.bucket_s))
        found = []
        for (at, _), series in sorted(of.items()):
            if at == node:
                cut = self._cut(series)
                found.append(
                    [round(sum(cut[i : i + step]) / len(cut[i : i + step]), 2) for i in range(0, len(cut), step)]
                )
        return found
