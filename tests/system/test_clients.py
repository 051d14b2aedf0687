"""Engines that come and go: ranks, exits, forks and kills in the middle of transfers, and what stays behind."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from helpers import memory, patterns, processes
from helpers.engines import EngineError, Engines
from helpers.nodes import Nodes
from helpers.waiting import until

from railrelay.client import ArgumentError, ConnectError, ErrorCode, RegionError, RelayError, TransferError

pytestmark = pytest.mark.system

BLOCKS, BLOCK = 2048, 16384
NBYTES = BLOCKS * BLOCK


def test_a_rank_has_as_many_clients_as_configured(nodes: Nodes) -> None:
    node = nodes.start(limits={"clients_per_rank": 2})
    with node.connect(3) as first, node.connect(3) as second:
        with pytest.raises(ConnectError, match=r"rank 3 is taken by .*clients_per_rank 2") as failure:
            node.connect(3)
        assert failure.value.code is ErrorCode.RANK_TAKEN
        assert "raise clients_per_rank" in str(failure.value)
        first.close()
        node.connect(3).close()
        for client in (second, node.connect(4)):
            link = memory.link(client, client, 4096)
            link.source.array[:] = 9
            client.write(link.remote, [link.source.address], [link.remote.address], 4096).wait(30)
            client.close()


def test_more_clients_than_rows_name_the_limit(nodes: Nodes) -> None:
    node = nodes.start(limits={"max_clients": 2})
    with node.connect(0), node.connect(1):
        with pytest.raises(ConnectError, match=r"raise limits\.max_clients") as failure:
            node.connect(2)
        assert failure.value.code is ErrorCode.LIMIT


def test_rows_of_clients_are_used_again_and_nothing_of_them_stays(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((2, 2))

    def round_trip(rank: int) -> None:
        for route, kind in (("relay", "private"), ("direct", "shared")):
            with prefill.connect(rank, route=route) as sender, decode.connect(rank) as receiver:
                link = memory.link(sender, receiver, 1 << 20, source=kind, destination=kind)  # type: ignore[arg-type]
                link.source.array[:] = patterns.content(1 << 20, rank)
                sender.write(
                    link.remote, [link.source.address], [link.remote.address], 1 << 20, notify=b"", tag=1
                ).wait(30)
                assert (link.destination.array == link.source.array).all()

    def quiet() -> list[str]:
        until(lambda: not any(".client." in name for name in prefill.objects() + decode.objects()), "clients end")
        return prefill.objects() + decode.objects()

    round_trip(1)
    objects = quiet()
    until(lambda: not decode.cli("clients")["clients"], "the decode node has no client")
    counts = [(processes.descriptors(node.pid), processes.threads(node.pid)) for node in (prefill, decode)]
    for rank in range(12):
        round_trip(rank)
    assert quiet() == objects
    until(
        lambda: all(
            processes.descriptors(node.pid) <= fds and processes.threads(node.pid) <= threads + 32
            for node, (fds, threads) in zip((prefill, decode), counts, strict=True)
        ),
        f"descriptors go back to {counts}",
    )


def test_a_client_that_exits_without_closing_leaves_nothing(nodes: Nodes, engines: Engines) -> None:
    node = nodes.start()
    engine = engines.start(node, route="relay")
    offer = engine.ask("memory", name="pages", nbytes=1 << 20, kind="private", seed=1)
    engine.ask("open", name="own", offer=offer)
    before = {"lock", "node"}
    engine.tell("exit", code=3)
    assert engine.process.wait(20) == 3
    until(lambda: {name.rsplit(".", 1)[1] for name in node.objects()} == before, "its segment and bounce memory go")
    assert not node.cli("clients")["clients"]


@pytest.mark.parametrize("kind", memory.KINDS)
def test_a_sender_killed_in_the_middle_leaves_the_others_alone(
    nodes: Nodes, engines: Engines, kind: memory.Kind
) -> None:
    prefill, decode = nodes.pair((2, 2))
    doomed = engines.start(prefill, rank=1)
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES, source=kind, destination=kind)
        link.source.array[:] = patterns.content(NBYTES, 1)
        other = memory.make(receiver, NBYTES, kind)
        doomed.ask("memory", name="pages", nbytes=NBYTES, kind=kind, seed=2)
        doomed.ask("open", name="there", offer=other.offer().hex())
        doomed.ask("write", transfer="lost", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        until(lambda: bool(other.array[::BLOCK].any()), "its first bytes land")
        doomed.kill()
        for seed in range(3):
            taken, put = patterns.order(BLOCKS, BLOCK, seed)
            sender.write(
                link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK
            ).wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, 2)
        until(lambda: len(prefill.cli("clients")["clients"]) == 1, "the killed client's row is free")
        # Nothing of it is in flight any more: what is written there now stays.
        other.array[:] = 0
        sender.write(link.remote, [link.source.address], [link.remote.address], BLOCK).wait(30)
        assert not other.array.any()
        again = engines.start(prefill, rank=1)
        again.ask("memory", name="pages", nbytes=NBYTES, kind=kind, seed=3)
        again.ask("open", name="there", offer=other.offer().hex())
        again.ask("write", transfer="good", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        again.ask("wait", transfer="good")
        assert patterns.arrived(patterns.content(NBYTES, 3), other.array, BLOCKS, BLOCK, 1)
    assert not any(f".client.{row}." in name for row in range(3, 8) for name in prefill.objects())


@pytest.mark.parametrize("kind", memory.KINDS)
def test_a_receiver_killed_in_the_middle_fails_the_transfer_by_name(
    nodes: Nodes, engines: Engines, kind: memory.Kind
) -> None:
    prefill, decode = nodes.pair()
    doomed = engines.start(decode, rank=1)
    with prefill.connect() as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        offer = doomed.ask("memory", name="pages", nbytes=NBYTES, kind=kind)
        remote = sender.open(bytes.fromhex(offer))
        taken, put = patterns.order(BLOCKS, BLOCK, 1)
        with doomed.paused():
            transfers = [
                sender.write(remote, taken + np.uint64(link.source.address), put + np.uint64(remote.address), BLOCK)
                for _ in range(3)
            ]
            doomed.kill()
        ends: set[str] = set()
        for transfer in transfers:
            try:
                transfer.wait(30)
                ends.add("OK")
            except TransferError as failure:
                ends.add(failure.result.name)
            assert transfer.settled
        assert "REGION_GONE" in ends
        assert ends <= {"OK", "REGION_GONE"}
        sender.write(
            link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK
        ).wait(30)
        assert patterns.arrived(link.source.array, link.destination.array, BLOCKS, BLOCK, 1)

        def refused() -> bool:
            with pytest.raises((TransferError, ValueError)) as failure:
                sender.write(remote, [link.source.address], [remote.address], 64).wait(30)
            return isinstance(failure.value, ValueError)

        until(refused, "the region is closed at the sender")
        with pytest.raises(RegionError):
            sender.open(bytes.fromhex(offer))


def test_a_forked_child_that_keeps_the_socket_does_not_keep_the_client_alive(nodes: Nodes, engines: Engines) -> None:
    prefill, decode = nodes.pair()
    engine = engines.start(prefill, rank=1)
    with decode.connect() as receiver:
        pages = memory.make(receiver, NBYTES)
        engine.ask("memory", name="pages", nbytes=NBYTES, seed=4)
        engine.ask("open", name="there", offer=pages.offer().hex())
        engine.ask("write", transfer="running", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        child = engine.ask("fork")
        engine.ask("wait", transfer="running")
        assert patterns.arrived(patterns.content(NBYTES, 4), pages.array, BLOCKS, BLOCK, 1)
        engine.kill()
        assert processes.alive(child)
        until(lambda: not prefill.cli("clients")["clients"], "its row is free though the child lives")
        again = engines.start(prefill, rank=1)
        again.ask("close")


def test_a_forked_child_cannot_use_the_clients_transfers(nodes: Nodes, engines: Engines) -> None:
    prefill, decode = nodes.pair()
    engine = engines.start(prefill)
    with decode.connect() as receiver:
        pages = memory.make(receiver, NBYTES)
        engine.ask("memory", name="pages", nbytes=NBYTES, seed=4)
        engine.ask("open", name="there", offer=pages.offer().hex())
        assert engine.ask("use_after_fork", source="pages", remote="there") == "forked"
        engine.ask("write", transfer="own", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        engine.ask("wait", transfer="own")


def test_a_restarted_engine_waits_for_the_drain_of_its_predecessor(nodes: Nodes, engines: Engines) -> None:
    prefill, decode = nodes.pair(limits={"clients_per_rank": 1})
    old = engines.start(prefill, rank=1)
    with decode.connect() as receiver:
        pages = memory.make(receiver, NBYTES)
        old.ask("memory", name="pages", nbytes=NBYTES, seed=4)
        old.ask("open", name="there", offer=pages.offer().hex())
        old.ask("write", transfer="warm", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        old.ask("wait", transfer="warm")
        decode.pause()
        old.ask("write", transfer="running", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        old.kill()
        resume = threading.Timer(0.5, decode.resume)
        resume.start()
        new = engines.start(prefill, rank=1)
        resume.join()
        pages.array[:] = 0
        new.ask("memory", name="pages", nbytes=NBYTES, seed=5)
        new.ask("open", name="there", offer=pages.offer().hex())
        new.ask("write", transfer="good", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
        new.ask("wait", transfer="good")
        assert patterns.arrived(patterns.content(NBYTES, 5), pages.array, BLOCKS, BLOCK, 1)


def test_a_new_client_of_a_row_gets_new_relay_memory(nodes: Nodes, engines: Engines) -> None:
    """Old KV must not be readable by the next owner of the lane."""
    prefill, decode = nodes.pair()
    with decode.connect() as receiver:
        pages = memory.make(receiver, 1 << 20)
        generations = []
        for _ in range(2):
            engine = engines.start(prefill, rank=0, route="relay")
            engine.ask("memory", name="pages", nbytes=1 << 20, kind="private", seed=4)
            engine.ask("open", name="there", offer=pages.offer().hex())
            engine.ask("write", transfer="x", source="pages", remote="there", blocks=64, block_bytes=BLOCK)
            engine.ask("wait", transfer="x")
            [lane] = [lane for lane in prefill.cli("lanes")["lanes"] if lane["leased"]]
            generations.append(lane["generation"])
            engine.kill()
            until(lambda: not prefill.cli("clients")["clients"], "its row is free")
        assert generations[0] != generations[1]


def test_several_engines_of_one_rank_and_of_all_ranks_send_at_once(nodes: Nodes, engines: Engines) -> None:
    prefill, decode = nodes.pair((2, 2))
    senders = [engines.start(prefill, rank=at % 3, route=("relay", "direct")[at % 2]) for at in range(6)]
    receivers = [engines.start(decode, rank=at) for at in range(2)]
    for at, sender in enumerate(senders):
        kind = memory.KINDS[at % 2]
        offer = receivers[at % 2].ask("memory", name=f"from {at}", nbytes=NBYTES, kind=kind)
        sender.ask("memory", name="pages", nbytes=NBYTES, kind=memory.KINDS[at // 3], seed=at)
        sender.ask("open", name="there", offer=offer)
    for at, sender in enumerate(senders):
        sender.ask(
            "write", transfer="x", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK, notify=f"{at}"
        )
    for sender in senders:
        sender.ask("wait", transfer="x")
    for at in range(6):
        receiver = receivers[at % 2]
        assert receiver.ask("arrived", name=f"from {at}", source_seed=at, blocks=BLOCKS, block_bytes=BLOCK, seed=1)
    notes = [receivers[at % 2].ask("notification") for at in range(6)]
    assert sorted(note[1] for note in notes) == [str(at) for at in range(6)]


def test_a_transfer_to_several_processes_of_a_node_needs_to_say_which(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(0) as sender, node.connect(1) as one, node.connect(2) as two:
        source = memory.make(sender, 4096)
        source.array[:] = 5
        first, second = memory.make(one, 4096), memory.make(two, 4096)
        remotes = [sender.open(first.offer()), sender.open(second.offer())]
        with pytest.raises(RelayError, match="regions of 2 processes"):
            sender.write(node.session, [source.address], [remotes[0].address], 4096)
        sender.write(remotes[1], [source.address], [remotes[1].address], 4096).wait(30)
        assert second.array.all()
        assert not first.array.any()
        remotes[1].close()
        sender.write(node.session, [source.address], [remotes[0].address], 4096).wait(30)
        assert first.array.all()


def test_processes_with_equal_addresses_are_told_apart(nodes: Nodes, engines: Engines) -> None:
    """Forked or CUDA address spaces overlap."""
    node = nodes.start()
    with node.connect(0) as sender:
        source = memory.make(sender, 1 << 20)
        receivers = [engines.start(node, rank=rank) for rank in (1, 2)]
        remotes = [
            sender.open(bytes.fromhex(receiver.ask("memory", name="pages", nbytes=1 << 20))) for receiver in receivers
        ]
        for seed, (receiver, remote) in enumerate(zip(receivers, remotes, strict=True)):
            source.array[:] = patterns.content(1 << 20, seed)
            sender.write(remote, [source.address], [remote.address], 1 << 20).wait(30)
            assert receiver.ask("holds", name="pages", seed=seed)
        assert receivers[0].ask("holds", name="pages", seed=0)


def test_a_write_that_its_region_left_does_not_find_another_process_there(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first and the last look at the region it goes, and one of another process at its address comes."""
    node = nodes.start()
    with node.connect(0) as sender, node.connect(1) as one, node.connect(2) as two:
        source, pages = memory.make(sender, 4096), np.zeros(4096, np.uint8)
        source.array[:] = 5
        meant = sender.open(one.register(pages).offer())

        def meanwhile(_: object) -> None:
            meant.close()
            assert sender.open(two.register(pages).offer()).address == meant.address

        monkeypatch.setattr(meant.peer.attachment, "event_of", meanwhile)
        with pytest.raises(ArgumentError, match=f"destination {meant.address:#x} is in no region"):
            sender.write(meant, [source.address], [meant.address], 4096, ready=object()).wait(30)
        assert not pages.any()


def test_a_client_that_does_not_attach_is_let_go(nodes: Nodes) -> None:
    node = nodes.start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as idle:
        idle.connect(node.socket)
        idle.settimeout(20)
        assert b"did not attach" in idle.recv(65536)
        assert idle.recv(1) == b""
    assert any("did not attach" in error["text"] for error in node.errors())


def test_the_library_says_so_when_its_daemon_is_killed(nodes: Nodes, engines: Engines) -> None:
    prefill, decode = nodes.pair()
    engine = engines.start(prefill)
    with decode.connect() as receiver:
        pages = memory.make(receiver, NBYTES)
        engine.ask("memory", name="pages", nbytes=NBYTES, seed=4)
        engine.ask("open", name="there", offer=pages.offer().hex())
        with decode.paused():
            engine.ask("write", transfer="x", source="pages", remote="there", blocks=BLOCKS, block_bytes=BLOCK)
            prefill.kill()
            with pytest.raises(EngineError, match=r"do not reuse|daemon exited") as failure:
                engine.ask("wait", transfer="x")
        assert failure.value.code == "daemon_gone"
        with pytest.raises(EngineError, match="start railrelayd again") as refusal:
            engine.ask("memory", name="more", nbytes=4096)
        assert refusal.value.kind == "DaemonGone"
        engine.ask("close")
