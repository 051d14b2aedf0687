"""Slices of the trace, and the trace events (Chrome's JSON format, which Perfetto reads) that show them.

A process row is a rail; its thread rows are its lanes and its direct slices. Complete events of one row have to nest,
so a lane whose slices overlap has as many rows as it has slices under way. All times are ns of CLOCK_MONOTONIC."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

Event = dict[str, Any]

PHASES: Final = ("fill", "doorbell", "queue", "place")
_HOUR_NS: Final = 3_600_000_000_000


class Owner(NamedTuple):
    """An engine that is attached."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Slice:
    """``began_ns`` and ``filled_ns`` are the client's word, None if they cannot be true; ``posted_ns`` is None if the
    slice never reached the NIC."""

    rail: int
    client: int
    client_serial: int
    direct: bool
    slot: int
    transfer: int
    generation: int
    tag: int
    peer: int
    remote_rail: int
    bytes: int
    blocks: int
    runs: int
    result: str
    began_ns: int | None
    filled_ns: int | None
    taken_ns: int
    posted_ns: int | None
    completed_ns: int

    @property
    def first_ns(self) -> int:
        return next(ns for ns in (self.began_ns, self.filled_ns, self.taken_ns) if ns is not None)

    def phases(self) -> Iterator[tuple[str, int, int]]:
        """(name, begin, end) of what is known."""
        sent = self.completed_ns if self.posted_ns is None else self.posted_ns
        marks = (self.began_ns, self.filled_ns, self.taken_ns, sent, self.completed_ns)
        for name, begin, end in zip(PHASES, marks, marks[1:], strict=False):
            if begin is not None and end is not None and not (name == "place" and self.posted_ns is None):
                yield name, begin, end


def slice_of(rail: int, record: Mapping[str, int], result: str) -> Slice:
    """``record``: of the structure trace_record."""
    taken = record["taken_ns"]
    filled = believed(record["filled_ns"], taken, taken)
    return Slice(
        rail=rail,
        direct=record["direct"] != 0,
        result=result,
        began_ns=believed(record["began_ns"], taken if filled is None else filled, taken),
        filled_ns=filled,
        taken_ns=taken,
        posted_ns=record["posted_ns"] or None,
        **{field: record[field] for field in _COPIED},
    )


_COPIED: Final = (
    "client",
    "client_serial",
    "slot",
    "transfer",
    "generation",
    "tag",
    "peer",
    "remote_rail",
    "bytes",
    "blocks",
    "runs",
    "completed_ns",
)


def believed(said_ns: int, latest_ns: int, taken_ns: int) -> int | None:
    """What a client says about a moment, or None: it lies in the hour before its rail took the slice."""
    return said_ns if taken_ns - _HOUR_NS <= said_ns <= latest_ns else None


def events(
    shown: Sequence[Slice],
    counted: Sequence[Slice],
    rails: Sequence[str],
    owners: Mapping[tuple[int, int], Owner],
    peers: Sequence[str],
) -> list[Event]:
    """Metadata first, then by time. Counters are of ``counted``, from the first to the last moment of ``shown``.
    ``owners``: by client and serial; ``peers``: session or "" of each row."""
    if not shown:
        return []
    base = min(one.first_ns for one in shown)
    end = max(one.completed_ns for one in shown)
    named: list[Event] = []
    timed: list[Event] = []
    for rail in sorted({one.rail for one in shown}):
        named.append(_metadata(rail, 0, "process_name", name=f"rail {rail} ({rails[rail]})"))
        named.append(_metadata(rail, 0, "process_sort_index", sort_index=rail))
        thread = 0
        here = [one for one in shown if one.rail == rail]
        for title, group in _groups(here, rail, owners):
            for number, row in enumerate(_rows(group)):
                thread += 1
                named.append(
                    _metadata(rail, thread, "thread_name", name=title if not number else f"{title} ({number + 1})")
                )
                named.append(_metadata(rail, thread, "thread_sort_index", sort_index=thread))
                for one in row:
                    timed += _slice_events(one, thread, base, owners, peers)
        timed += _counters([one for one in counted if one.rail == rail], rail, owners, base, end)
    timed.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return named + timed


def _groups(
    slices: Sequence[Slice], rail: int, owners: Mapping[tuple[int, int], Owner]
) -> Iterator[tuple[str, list[Slice]]]:
    """(title, slices) of each lane and of the direct slices."""
    lanes: dict[tuple[int, int, int], list[Slice]] = {}
    direct = [one for one in slices if one.direct]
    for one in slices:
        if not one.direct:
            owner = owners.get((one.client, one.client_serial))
            lanes.setdefault((owner.rank if owner else -1, one.client, one.client_serial), []).append(one)
    for _, lane in sorted(lanes.items()):
        yield _lane(lane[0], rail, owners), lane
    if direct:
        yield "direct", direct


def _lane(one: Slice, rail: int, owners: Mapping[tuple[int, int], Owner]) -> str:
    owner = owners.get((one.client, one.client_serial))
    if owner is None:
        return f"lane {rail}<-? client {one.client}.{one.client_serial}"
    return f"lane {rail}<-{owner.rank} client {one.client}"


def _rows(slices: Iterable[Slice]) -> list[list[Slice]]:
    """As few rows as hold them without overlap."""
    rows: list[list[Slice]] = []
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, row)
    for one in sorted(slices, key=lambda one: (one.first_ns, one.completed_ns)):
        while busy and busy[0][0] <= one.first_ns:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            row = heapq.heappop(free)
        else:
            row = len(rows)
            rows.append([])
        rows[row].append(one)
        heapq.heappush(busy, (one.completed_ns, row))
    return rows


def _slice_events(
    one: Slice, thread: int, base: int, owners: Mapping[tuple[int, int], Owner], peers: Sequence[str]
) -> Iterator[Event]:
    owner = owners.get((one.client, one.client_serial))
    peer = peers[one.peer] if one.peer < len(peers) else ""
    args: dict[str, str | int] = {
        "transfer": f"{one.transfer}.{one.generation}",
        "tag": f"{one.tag:#x}",
        "client": f"{one.client}{f' {owner.name}' if owner else ''}",
        "peer": peer or str(one.peer),
        "remote_rail": one.remote_rail,
        "ticket" if one.direct else "slot": one.slot,
        "bytes": one.bytes,
        "blocks": one.blocks,
        "runs": one.runs,
        "result": one.result,
    }
    unknown = [name for name, ns in (("began", one.began_ns), ("filled", one.filled_ns)) if ns is None]
    if unknown:
        args["unknown"] = ", ".join(unknown)
    if one.posted_ns is None:
        args["posted"] = "never"
    common = {"ph": "X", "pid": one.rail + 1, "tid": thread}
    first, category = one.first_ns, "direct" if one.direct else "lane"
    yield {
        **common,
        "name": f"transfer {args['transfer']}",
        "cat": category,
        "ts": _us(first - base),
        "dur": _us(one.completed_ns - first),
        "args": args,
    }
    for name, begin, end in one.phases():
        if begin < end:
            yield {**common, "name": name, "cat": "phase", "ts": _us(begin - base), "dur": _us(end - begin)}


def _counters(
    slices: Sequence[Slice], rail: int, owners: Mapping[tuple[int, int], Owner], base: int, end: int
) -> Iterator[Event]:
    steps: dict[tuple[str, str], dict[int, int]] = {}

    def step(track: tuple[str, str], begin_ns: int, end_ns: int, amount: int) -> None:
        moments = steps.setdefault(track, {})
        moments[begin_ns] = moments.get(begin_ns, 0) + amount
        moments[end_ns] = moments.get(end_ns, 0) - amount

    for one in slices:
        if not one.direct:
            step((f"{_lane(one, rail, owners)} slots", "slots"), one.first_ns, one.completed_ns, 1)
        if one.posted_ns is not None:
            step(("bytes in flight", "bytes"), one.posted_ns, one.completed_ns, one.bytes)
    for (name, unit), moments in sorted(steps.items()):
        level, before = 0, 0
        for ns, change in sorted(moments.items()):
            level += change
            if ns < base:
                before = level
                continue
            if ns > end:
                break
            if before:
                yield _counter(rail, name, 0, unit, before)
                before = 0
            yield _counter(rail, name, ns - base, unit, level)


def _counter(rail: int, name: str, ns: int, unit: str, level: int) -> Event:
    return {"ph": "C", "pid": rail + 1, "tid": 0, "name": name, "ts": _us(ns), "args": {unit: level}}


def _metadata(rail: int, thread: int, what: str, **args: str | int) -> Event:
    return {"ph": "M", "pid": rail + 1, "tid": thread, "name": what, "args": args}


def _us(ns: int) -> float:
    """The unit of the format. Readers go back to whole ns, some by cutting off: never below the value meant, or the
    last phase of a slice would end after the slice."""
    us = ns / 1000
    return us if int(us * 1000) >= ns else math.nextafter(us, math.inf)
