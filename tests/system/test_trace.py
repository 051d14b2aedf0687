"""The trace of real transfers: each slice once, with times in order, whatever the client claims."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from helpers import memory, patterns, trace_files
from helpers.memory import Kind
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client.cli import trace
from railrelay.client.cli._node import open_node
from railrelay.client.cli._trace_events import Slice

pytestmark = pytest.mark.system

BLOCKS, BLOCK = 1024, 4096
NBYTES = BLOCKS * BLOCK


def slices_of(node: Node, transfer: int, generation: int) -> list[Slice]:
    with open_node(node.instance) as segment:
        found, lost = trace.read(segment)
    assert lost == 0
    return [one for one in found if (one.transfer, one.generation) == (transfer, generation)]


def in_order(one: Slice) -> bool:
    assert one.began_ns is not None
    assert one.filled_ns is not None
    assert one.posted_ns is not None
    return one.began_ns <= one.filled_ns <= one.taken_ns <= one.posted_ns <= one.completed_ns


@pytest.mark.parametrize(("route", "kind"), [("relay", "private"), ("direct", "shared")])
def test_every_slice_of_a_transfer_is_traced_once_with_times_in_order(
    nodes: Nodes, tmp_path: Path, route: str, kind: Kind
) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(rank=0, name="prefill", route=route) as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, NBYTES, source=kind, destination=kind)
        link.source.array[:] = patterns.content(NBYTES, 1)
        taken, put = patterns.order(BLOCKS, BLOCK, 3)
        for number in range(2):  # the second has all its predecessor's slots and tickets again
            counters, begin = sender.counters(), time.monotonic_ns()
            transfer = link.sender.write(
                link.remote,
                taken + np.uint64(link.source.address),
                put + np.uint64(link.remote.address),
                BLOCK,
                tag=40 + number,
            )
            transfer.wait(30)
            end = time.monotonic_ns()
            fed = {name: value - counters[name] for name, value in sender.counters().items()}
            slices = slices_of(prefill, transfer._submission.index, transfer._submission.generation)
            assert len(slices) == fed["slots"] + fed["direct_slices"] > 10
            assert sum(one.bytes for one in slices) == NBYTES
            assert BLOCKS - 20 < sum(one.blocks for one in slices) <= BLOCKS  # neighbours by chance are one
            assert {(one.direct, one.result, one.tag, one.rail) for one in slices} == {
                (route == "direct", "ok", 40 + number, 0)
            }
            assert all(in_order(one) for one in slices)
            assert begin <= min(one.first_ns for one in slices)
            assert max(one.completed_ns for one in slices) <= end
        path = tmp_path / "trace.json"
        summary = prefill.cli("trace", "-o", str(path), "--transfer", hex(41))["trace"]
        events = trace_files.load(path)
        shown = trace_files.slices(events)
        assert summary["slices"] == len(shown) == len(slices)
        assert summary["unknown_times"] == summary["lost"] == summary["failed"] == 0
        assert {event["args"]["client"].split()[1] for event in shown} == {"prefill"}
        assert {event["args"]["peer"] for event in shown} == {decode.session}
        rows = {title.split(" client")[0].split(" (")[0] for title in trace_files.rows(events).values()}
        assert rows == {"direct" if route == "direct" else "lane 0<-0"}


def test_the_newest_slices_are_kept_and_the_file_of_a_busy_rail_is_whole(nodes: Nodes, tmp_path: Path) -> None:
    prefill, decode = nodes.pair(limits={"trace_records": 64})
    with prefill.connect(route="direct") as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, NBYTES)

        def send(count: int) -> None:
            for _ in range(count):
                sender.write(link.remote, [link.source.address], [link.remote.address], 64).wait(30)

        send(100)
        path = tmp_path / "trace.json"
        assert prefill.cli("trace", "-o", str(path))["trace"]["slices"] == 64
        trace_files.load(path)
        with open_node(prefill.instance) as segment:
            found, lost = trace.read(segment)
        assert (len(found), lost) == (64, 0)


def test_a_cancelled_transfer_shows_how_its_slices_ended(nodes: Nodes) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(route="relay") as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, NBYTES, source="private")
        with decode.paused():
            transfer = link.sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
            until(lambda: sender.counters()["slots"] > 1, "slots are filled")
            transfer.cancel(wait=False)
        transfer.wait_settled(30)
        slices = slices_of(prefill, transfer._submission.index, transfer._submission.generation)
        assert slices
        assert {one.result for one in slices} <= {"ok", "cancelled"}
        assert any(one.result == "cancelled" for one in slices)
