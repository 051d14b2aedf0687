"""The rules of Chrome's trace-event format that Perfetto keeps: what breaks them is dropped without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"},
    "C": {"name", "ph", "ts", "pid", "args"},
    "M": {"name", "ph", "pid", "args"},
}


def load(path: Path) -> list[Event]:
    """The events of a file that keeps the rules."""
    document = json.loads(path.read_text())
    assert isinstance(document["traceEvents"], list)
    events: list[Event] = document["traceEvents"]
    check(events)
    return events


def check(events: list[Event]) -> None:
    """AssertionError if an event lacks a key, is out of order, or ends after the one that it began in."""
    open_until: dict[tuple[int, int], list[int]] = {}
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    last = 0
    for event in events:
        assert set(event) >= KEYS[event["ph"]], event
        if event["ph"] == "M":
            assert not last, "metadata comes first"
            continue
        begin = ns(event["ts"])
        assert begin >= last, f"out of order: {event}"
        last = begin
        if event["ph"] == "C":
            assert all(value >= 0 for value in event["args"].values()), event
            continue
        assert (event["pid"], event["tid"]) in named, event
        end = begin + ns(event["dur"])
        stack = open_until.setdefault((event["pid"], event["tid"]), [])
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"overlaps another: {event}"
        assert end >= begin, event
        stack.append(end)


def ns(us: float) -> int:
    """As readers do it: cut off."""
    return int(us * 1000)


def slices(events: list[Event]) -> list[Event]:
    """The outer event of each slice."""
    return [event for event in events if event["ph"] == "X" and event["cat"] != "phase"]


def rows(events: list[Event], what: str = "thread_name") -> dict[tuple[int, int], str]:
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == what}
