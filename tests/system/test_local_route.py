"""The local route: engines of one daemon, bytes copied from memory to memory by the sending client. It must keep every
promise that the routes with a NIC keep."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from helpers import memory, patterns
from helpers.engines import Engine, EngineError, Engines
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.raw_client import RawClient
from helpers.waiting import until

from railrelay.client import (
    Client,
    HostEvent,
    PageLayout,
    RegionError,
    Result,
    Route,
    Transfer,
    Unsettled,
    protocol,
)
from railrelay.shm_layout import abi

pytestmark = pytest.mark.system

BLOCK = 64  # many small pieces: long enough to be met in the middle
BLOCKS = 1 << 19
NBYTES = BLOCKS * BLOCK
TAG = 77
C = abi.CONSTANTS


@dataclass
class Scene:
    node: Node
    sender: Client
    receiver: Client

    def link(self, nbytes: int = NBYTES, **kinds: Any) -> Link:  # noqa: ANN401
        made = memory.link(self.sender, self.receiver, nbytes, **kinds)
        made.source.array[:] = patterns.content(nbytes, 1)
        return made


@pytest.fixture
def scene(nodes: Nodes) -> Iterator[Scene]:
    node = nodes.start(2)
    with node.connect(0, name="prefill") as sender, node.connect(1, name="decode") as receiver:
        yield Scene(node, sender, receiver)


def send(link: Link, *, seed: int = 1, block: int = BLOCK, **options: Any) -> Transfer:  # noqa: ANN401
    taken, put = patterns.order(link.source.array.size // block, block, seed)
    return link.sender.write(
        link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), block, **options
    )


def arrived(link: Link, *, seed: int = 1, block: int = BLOCK) -> bool:
    return patterns.arrived(link.source.array, link.destination.array, link.source.array.size // block, block, seed)


def begun(link: Link) -> None:
    until(lambda: bool(link.destination.array[:: BLOCK * 16].any()), "the first bytes land")


def carried(node: Node, field: str) -> int:
    return sum(int(lane[field]) for lane in node.cli("lanes")["lanes"])


@pytest.mark.parametrize(
    ("route", "block"), [*((route, 4096) for route in Route), (Route.RELAY, 64), (Route.RELAY, 3 << 20)]
)
def test_lists_arrive_without_a_nic_on_every_route(nodes: Nodes, route: Route, block: int) -> None:
    node = nodes.start(2)
    with node.connect(0, route=route) as sender, node.connect(1) as receiver:
        link = Scene(node, sender, receiver).link(24 << 20)
        send(link, block=block).wait(30)
        assert arrived(link, block=block)
        assert sender.counters()["bytes_local"] == 24 << 20
        assert sender.counters()["slots"] == sender.counters()["direct_slices"] == 0
        assert carried(node, "local_bytes") == 24 << 20
        assert carried(node, "bytes") == carried(node, "direct_bytes") == 0


def test_a_source_that_the_daemon_cannot_map_is_copied_too(scene: Scene) -> None:
    link = scene.link(source="private")
    transfer = send(link)
    transfer.wait(30)
    assert arrived(link)
    assert transfer.bytes == NBYTES
    assert transfer.source_done


def test_blocks_of_every_length_leave_the_gaps_alone(scene: Scene) -> None:
    link = scene.link(8 << 20)
    sources, destinations, lengths = patterns.mixed(8 << 20, 8 << 20, [1, 63, 4097, 70001, 2 << 20] * 3, 5)
    expected = patterns.after(link.source.array, link.destination.array, sources, destinations, lengths)
    scene.sender.write(
        link.remote, sources + np.uint64(link.source.address), destinations + np.uint64(link.remote.address), lengths
    ).wait(30)
    assert (link.destination.array == expected).all()


def test_pages_arrive(scene: Scene) -> None:
    rows, pages, page = 7, 33, 4096
    link = scene.link(rows * pages * page)
    rng = np.random.default_rng(3)
    from_pages, to_pages = rng.permutation(pages), rng.permutation(pages)

    def layout(base: int) -> PageLayout:
        return PageLayout.strided(base, rows=rows, row_stride=pages * page, page_stride=page, piece_bytes=page // 4)

    scene.sender.write_pages(
        link.remote, layout(link.source.address), from_pages, layout(link.remote.address), to_pages
    ).wait(30)
    old, new = (array.reshape(rows, pages, page) for array in (link.source.array, link.destination.array))
    assert (new[:, to_pages, : page // 4] == old[:, from_pages, : page // 4]).all()
    assert not new[:, :, page // 4 :].any()
    assert scene.sender.counters()["bytes_local"] == rows * pages * page // 4


def test_a_client_that_wants_no_local_route_goes_through_the_nic(nodes: Nodes) -> None:
    node = nodes.start(2)
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        link = Scene(node, sender, receiver).link(4 << 20)
        send(link, block=4096).wait(30)
        assert arrived(link, block=4096)
        assert sender.counters()["bytes_local"] == 0
        assert carried(node, "bytes") == 4 << 20


def test_an_engine_may_send_to_itself(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect() as client:
        link = Scene(node, client, client).link(4 << 20)
        send(link, notify=b"there").wait(30)
        assert arrived(link)
        assert client.receiver.notifications.get(10).payload == b"there"
        link.destination.region.unregister()


def test_memory_that_only_its_owner_can_write_goes_through_the_nic(scene: Scene) -> None:
    link = scene.link(4 << 20, destination="private")
    send(link, block=4096).wait(30)
    assert arrived(link, block=4096)
    assert scene.sender.counters()["bytes_local"] == 0


def test_a_transfer_with_local_and_other_parts_is_one(scene: Scene) -> None:
    half = 4 << 20
    link = scene.link(half)
    other = memory.make(scene.receiver, half, "private")
    far = scene.sender.open(other.offer())
    more = memory.make(scene.sender, half)
    more.array[:] = patterns.content(half, 2)
    offsets = np.arange(half // 4096, dtype=np.uint64) * np.uint64(4096)
    for number in range(1, 4):
        link.destination.array[:] = other.array[:] = 0
        transfer = scene.sender.write(
            link.remote,
            np.concatenate([offsets + np.uint64(link.source.address), offsets + np.uint64(more.address)]),
            np.concatenate([offsets + np.uint64(link.remote.address), offsets + np.uint64(far.address)]),
            4096,
            notify=b"all",
            tag=number,
        )
        note = scene.receiver.receiver.notifications.get(20)
        assert (note.tag, note.payload) == (number, b"all")
        assert (link.destination.array == link.source.array).all()
        assert (other.array == more.array).all()
        transfer.wait(30)
        assert transfer.bytes == 2 * half
    assert scene.sender.counters()["bytes_local"] == 3 * half


def test_no_byte_is_read_before_the_event(scene: Scene) -> None:
    link = scene.link(1 << 20)
    event = HostEvent()
    transfer = send(link, ready=event)
    time.sleep(0.1)
    assert not link.destination.array.any()
    link.source.array[:] = patterns.content(1 << 20, 9)
    event.set()
    transfer.wait(30)
    assert arrived(link)


def test_after_cancel_nothing_lands(scene: Scene) -> None:
    link = scene.link()
    for seed in range(5):
        link.destination.array[:] = 0
        transfer = send(link, seed=seed)
        begun(link)
        transfer.cancel()
        assert transfer.settled
        assert transfer.result in (Result.CANCELLED, Result.OK)
        link.destination.array[:] = 0
        time.sleep(0.02)
        assert not link.destination.array.any()
    send(link, seed=8).wait(30)
    assert arrived(link, seed=8)


def test_after_a_time_out_nothing_lands(scene: Scene) -> None:
    link = scene.link()
    transfer = send(link, timeout=0.002)
    until(lambda: transfer.done, "the transfer ends")
    assert transfer.settled
    assert transfer.result in (Result.TIMED_OUT, Result.OK)
    link.destination.array[:] = 0
    time.sleep(0.02)
    assert not link.destination.array.any()


def test_after_abort_nothing_lands_now_or_later(scene: Scene) -> None:
    link = scene.link()
    transfer = send(link, tag=TAG)
    begun(link)
    scene.receiver.receiver.abort(TAG)
    link.destination.array[:] = 0
    until(lambda: transfer.done, "the transfer ends")
    assert transfer.settled
    assert transfer.result in (Result.ABORTED, Result.OK)
    later = send(link, tag=TAG)
    until(lambda: later.settled, "the later transfer ends")
    assert later.result is Result.ABORTED
    assert not link.destination.array.any()
    send(link, tag=TAG + 1).wait(30)
    assert arrived(link)


def test_an_abort_waits_for_a_sender_that_stands_still(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2)
    sender, receiver = engines.start(node, 0), engines.start(node, 1)
    blocks = 1 << 16
    connect(sender, receiver, nbytes=blocks * 4096)
    for tag in range(TAG, TAG + 10):
        sender.tell("write", transfer="t", source="source", remote="to", blocks=blocks, block_bytes=4096, tag=tag)
        until(lambda: receiver.ask("touched", name="destination", stride=4096), "the first bytes land")
        with sender.paused():
            under_way = receiver.ask("touched", name="destination", stride=4096) < blocks
            if under_way:
                with pytest.raises(EngineError) as failure:
                    receiver.ask("abort", tag=tag, timeout=0.5)
                assert failure.value.kind == Unsettled.__name__
                assert "has not confirmed" in failure.value.text
        sender.answer("write")
        receiver.ask("abort", tag=tag)
        if under_way:
            break
        receiver.ask("wipe", name="destination")
    assert under_way, "the sender was always too fast to be stopped in the middle"
    assert sender.ask("state", transfer="t")["result"] == "ABORTED"
    receiver.ask("wipe", name="destination")
    time.sleep(0.05)
    assert not receiver.ask("touched", name="destination", stride=4096)


def connect(sender: Engine, receiver: Engine, *, nbytes: int = NBYTES) -> None:
    sender.ask("memory", name="source", nbytes=nbytes, seed=1)
    offer = receiver.ask("memory", name="destination", nbytes=nbytes)
    sender.ask("open", name="to", offer=offer)


def test_unregistering_ends_what_is_under_way_and_nothing_lands_afterwards(scene: Scene) -> None:
    for _ in range(3):
        link = scene.link()
        offer = link.destination.offer()
        transfer = send(link)
        begun(link)
        link.destination.region.unregister()
        link.destination.array[:] = 0
        until(lambda ended=transfer: ended.settled, "the transfer ends")  # type: ignore[misc]
        assert transfer.result in (Result.REGION_GONE, Result.OK)
        assert not link.destination.array.any()
        with pytest.raises(RegionError):
            scene.sender.open(offer)


def test_unregistering_one_region_leaves_the_transfers_of_others_alone(scene: Scene) -> None:
    link, other = scene.link(), memory.make(scene.receiver, 1 << 20)
    scene.sender.open(other.offer())
    transfer = send(link)
    other.region.unregister()
    transfer.wait(30)
    assert arrived(link)


def test_a_sender_that_does_not_let_go_is_ended_and_only_its_death_counts(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2, timeouts={"peer_s": 0.6})
    sender, receiver = engines.start(node, 0), engines.start(node, 1)
    connect(sender, receiver)
    with sender.paused():
        with pytest.raises(EngineError) as failure:
            receiver.ask("unregister", name="destination", timeout=0.1)
        assert failure.value.code == "busy"
        assert f"pid {sender.pid}" in failure.value.text
        until(lambda: any("did not let go" in error["text"] for error in node.errors()), "its session is ended")
        with pytest.raises(EngineError) as failure:
            receiver.ask("unregister", name="destination", timeout=0.5)
        assert failure.value.code == "busy"
        sender.kill()
    receiver.ask("unregister", name="destination")
    again = engines.start(node, 0)
    again.ask("memory", name="source", nbytes=4096)


def test_a_sender_that_stood_still_for_a_moment_goes_on(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2)
    sender, receiver = engines.start(node, 0), engines.start(node, 1)
    connect(sender, receiver)
    with sender.paused(), pytest.raises(EngineError):
        receiver.ask("unregister", name="destination", timeout=0.1)
    receiver.ask("unregister", name="destination")
    offer = receiver.ask("memory", name="second", nbytes=NBYTES)
    sender.ask("open", name="to", offer=offer)
    sender.ask("write", transfer="t", source="source", remote="to", blocks=BLOCKS, block_bytes=BLOCK)
    sender.ask("wait", transfer="t")
    assert receiver.ask("arrived", name="second", source_seed=1, blocks=BLOCKS, block_bytes=BLOCK, seed=1)


def test_a_sender_that_is_killed_in_the_middle_is_forgotten(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2)
    receiver = engines.start(node, 1)
    for _ in range(3):
        sender = engines.start(node, 0)
        connect(sender, receiver)
        sender.ask("hammer", source="source", remote="to", block_bytes=4096)
        until(lambda: receiver.ask("touched", name="destination"), "the first bytes land")
        sender.kill()
        receiver.ask("unregister", name="destination")
    sender = engines.start(node, 0)
    connect(sender, receiver)
    sender.ask("write", transfer="t", source="source", remote="to", blocks=64, block_bytes=4096, notify="there")
    assert receiver.ask("notification")[1] == "there"


def test_a_receiver_that_is_killed_fails_the_transfer_by_name(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2)
    sender = engines.start(node, 0)
    sender.ask("memory", name="source", nbytes=NBYTES, seed=1)
    for _ in range(3):
        receiver = engines.start(node, 1)
        offer = receiver.ask("memory", name="destination", nbytes=NBYTES)
        sender.ask("open", name="to", offer=offer)
        sender.tell("write", transfer="t", source="source", remote="to", blocks=BLOCKS, block_bytes=BLOCK)
        until(lambda r=receiver: r.ask("touched", name="destination"), "the first bytes land")  # type: ignore[misc]
        receiver.kill()
        sender.answer("write")
        until(lambda: sender.ask("state", transfer="t")["settled"], "the transfer ends")
        assert sender.ask("state", transfer="t")["result"] in ("REGION_GONE", "OK")


def test_a_receiver_that_stands_still_holds_up_nobody(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start(2)
    sender, receiver = engines.start(node, 0), engines.start(node, 1)
    connect(sender, receiver)
    with receiver.paused():
        sender.ask("write", transfer="t", source="source", remote="to", blocks=BLOCKS, block_bytes=BLOCK)
        sender.ask("wait", transfer="t")
    assert receiver.ask("arrived", name="destination", source_seed=1, blocks=BLOCKS, block_bytes=BLOCK, seed=1)


def test_a_daemon_that_is_killed_fails_the_transfer(nodes: Nodes) -> None:
    node = nodes.start(2)
    with node.connect(0) as sender, node.connect(1) as receiver:
        link = Scene(node, sender, receiver).link()
        transfer = send(link)
        begun(link)
        node.kill()
        until(lambda: transfer.done, "the transfer ends")
        assert transfer.result in (Result.DAEMON_GONE, Result.OK)
        if transfer.result is not Result.OK:
            with pytest.raises(Unsettled):
                transfer.wait(1)


def test_a_client_that_closes_has_let_go(scene: Scene) -> None:
    link = scene.link()
    send(link)
    begun(link)
    scene.sender.close()
    link.destination.array[:] = 0
    link.destination.region.unregister(1.0)
    assert not link.destination.array.any()
    with scene.node.connect(0) as again:  # its rank is free
        assert again.rank == 0


def test_small_transfers_overtake_a_long_one(scene: Scene) -> None:
    link, small = scene.link(256 << 20), scene.link(4096)
    long = send(link, block=1 << 20)
    for seed in range(5):
        send(small, seed=seed).wait(30)
    long.wait(30)
    assert arrived(link, block=1 << 20)


def test_transfers_of_several_threads_and_directions_stay_right(scene: Scene) -> None:
    there = [scene.link(2 << 20) for _ in range(4)]
    back = [memory.link(scene.receiver, scene.sender, 2 << 20) for _ in range(4)]
    for link in back:
        link.source.array[:] = patterns.content(2 << 20, 4)
    for seed in range(10):
        transfers = [send(link, seed=seed, block=4096) for link in (*there, *back)]
        for transfer in transfers:
            transfer.wait(30)
        assert all(arrived(link, seed=seed, block=4096) for link in (*there, *back))


def test_a_hostile_sender_reaches_only_the_pages_that_it_was_offered(scene: Scene) -> None:
    offered, kept = memory.make(scene.receiver, 5000), memory.make(scene.receiver, 1 << 20)
    with RawClient(scene.node.socket, rank=2) as raw:
        raw.attach()
        _, opened, (fd,) = raw.open_local(offered.offer())
        assert opened.handle == "shm"
        assert os.fstat(fd).st_size == 5000
        with mmap.mmap(fd, 5000) as mapped:
            raw.ask(protocol.LetGo(raw.new_id(), [opened.remote]), protocol.Done)
            offered.region.unregister()
            mapped[:] = b"\x66" * 5000  # against its word
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(fd, 1 << 20)
        assert not kept.array.any()


def test_part_of_a_file_or_a_file_that_may_shrink_is_not_handed_out(scene: Scene) -> None:
    with RawClient(scene.node.socket, rank=2) as owner, RawClient(scene.node.socket, rank=3) as raw:
        owner.attach()
        raw.attach()
        session = owner.facts.session
        sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(sealed, 1 << 20)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        loose = os.memfd_create("loose")
        os.ftruncate(loose, 1 << 20)
        try:
            for fd, offset, nbytes, handle in (
                (sealed, 0, 1 << 20, "shm"),
                (sealed, 4096, (1 << 20) - 4096, ""),
                (sealed, 0, 4096, ""),
                (loose, 0, 1 << 20, ""),
            ):
                request = protocol.Register(owner.new_id(), owner.new_id() << 30, nbytes, True, offset, 0, True)
                registered, _ = owner.ask(request, protocol.Registered, (fd,))
                peer, _ = raw.ask(protocol.ConnectPeer(raw.new_id(), session, 5.0), protocol.PeerConnected)
                opened, fds = raw.ask(
                    protocol.OpenRegion(raw.new_id(), peer.peer, registered.capability, True), protocol.RegionOpened
                )
                assert opened.handle == handle
                assert len(fds) == bool(handle)
        finally:
            os.close(sealed)
            os.close(loose)


@pytest.mark.parametrize(
    "change",
    [
        {"flags": C["SLICE_LOCAL"] | C["SLICE_FINAL"]},
        {"flags": C["SLICE_LOCAL"] | C["SLICE_VOID"] | C["SLICE_INLINE"]},
        {"inline_remote_region": 1 << 20},
        {"inline_remote_region": C["NONE"], "inline_length": 9},
    ],
)
def test_a_local_slice_that_no_correct_client_writes_ends_its_client(scene: Scene, change: dict[str, int]) -> None:
    target = memory.make(scene.receiver, 4096)
    with RawClient(scene.node.socket, rank=2) as raw:
        raw.attach()
        peer, opened, _ = raw.open_local(target.offer())
        slice_ = {
            "transfer": 0,
            "generation": 1,
            "peer": peer.peer,
            "flags": C["SLICE_LOCAL"] | C["SLICE_VOID"],
            "inline_remote_region": opened.remote,
        }
        raw.area("TRANSFERS", "transfer").write(0, generation=1)
        raw.area("RING_SLICES", "slice").write(0, **{**slice_, **change})
        raw.area("RINGS", "ring").set(0, "produced", 1)
        raw.kick()
        assert raw.last_words().startswith("violation:")
    send(scene.link(1 << 20)).wait(30)
