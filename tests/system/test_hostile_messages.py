"""Messages and descriptors of clients and peers that mean harm: nobody else waits for them, loses its session or reads
what is not so."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import memory
from helpers.nodes import Node, Nodes
from helpers.raw_client import RawClient, Refused
from helpers.raw_peer import challenge, greeting
from helpers.sockets import lingering
from helpers.waiting import LIMIT_S, until

from railrelay.client import PeerError, Result, TransferError, protocol
from railrelay.client.protocol import RailFacts

pytestmark = pytest.mark.system

NBYTES = 1 << 20
MFD_HUGETLB = 4


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return nodes.start()


def others_work(node: Node) -> None:
    with node.connect(1) as client:
        link = memory.link(client, client, NBYTES)
        link.source.array[:] = 7
        client.write(link.remote, [link.source.address], [link.remote.address], NBYTES).wait(LIMIT_S)
        assert (link.destination.array == 7).all()


def descriptors(node: Node) -> int:
    return len(os.listdir(f"/proc/{node.pid}/fd"))


def register(raw: RawClient, **changes: object) -> protocol.Register:
    facts = {"address": 0, "bytes": 4096, "shared": True, "offset": 0, "rail": 0, "receive": True, **changes}
    return protocol.Register(raw.new_id(), **facts)  # type: ignore[arg-type]


# ---- descriptors ----


def test_descriptors_of_a_client_that_hangs_up_at_once_are_closed(node: Node) -> None:
    others_work(node)
    before = descriptors(node)
    for _ in range(8):
        with RawClient(node.socket, rank=2) as raw:
            raw.attach()
            fd = os.memfd_create("region")
            os.ftruncate(fd, 4096)
            with node.paused():  # it finds the requests and the end of the connection together
                for _ in range(4):
                    raw.send(register(raw), (fd,))
                raw.socket.close()
            os.close(fd)
    until(lambda: descriptors(node) <= before, "no descriptor is left")


GPU = {"shared": False, "memory": "device", "device": "GPU-1", "handle": "vmm", "handle_bytes": 4096}


@pytest.mark.parametrize("how", ["refused", "of no request", "too many", "kept as GPU memory", "unread"])
def test_nobody_waits_for_the_close_of_a_descriptor_that_a_client_sent(node: Node, how: str) -> None:
    others_work(node)
    before = descriptors(node)
    with lingering() as fd:
        with RawClient(node.socket, rank=2) as raw:
            raw.attach()
            sent = [fd] * 3 if how == "too many" else [fd]
            packet = protocol.encode(register(raw, **(GPU if how == "kept as GPU memory" else {})))
            with node.paused():
                if how == "unread":
                    raw.send_bytes(b"what ends the session first")
                socket.send_fds(raw.socket, [packet if how != "of no request" else b"?"], sent)
                os.close(fd)  # the daemon's is the last one
            raw.receive()
        others_work(node)  # while it lingers
    until(lambda: descriptors(node) <= before, "it is closed in the end")


def test_nobody_waits_for_the_close_of_a_descriptor_too_many(node: Node) -> None:
    others_work(node)
    with lingering() as fd:
        with RawClient(node.socket, rank=2) as raw:
            raw.attach()
            with node.paused():
                socket.send_fds(raw.socket, [protocol.encode(register(raw))], [raw.socket.fileno()] * 4 + [fd])
                os.close(fd)
            assert "4 descriptors" in raw.last_words()
        others_work(node)


def mapped_bytes(node: Node, name: str) -> int:
    """Of the memfds of this name: what the daemon need not fault in any more."""
    smaps = Path(f"/proc/{node.pid}/smaps").read_text()
    found = re.findall(rf"/memfd:{name} .*\n(?:[A-Z]\w+: .*\n)*?Rss: +(\d+) kB", smaps)
    return sum(int(kib) << 10 for kib in found)


def test_the_daemon_takes_no_memory_for_a_client_that_registers_holes(node: Node) -> None:
    pages, nbytes = [0, 7, 8, 4095], 256 << 20
    fd = os.memfd_create("holes")
    os.ftruncate(fd, nbytes)
    for page in pages:
        os.pwrite(fd, b"x", page * mmap.PAGESIZE)
    with RawClient(node.socket, rank=2) as raw:
        raw.attach()
        raw.ask(register(raw, bytes=nbytes), protocol.Registered, (fd,))
        assert os.fstat(fd).st_blocks * 512 == len(pages) * mmap.PAGESIZE
        assert mapped_bytes(node, "holes") == len(pages) * mmap.PAGESIZE
    os.close(fd)


def test_huge_pages_that_their_owner_cuts_off_end_its_session_alone(node: Node) -> None:
    huge = int(re.findall(r"Hugepagesize:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) << 10
    fd = os.memfd_create("huge", MFD_HUGETLB)
    os.ftruncate(fd, 2 * huge)
    try:
        mmap.mmap(fd, 2 * huge).close()
    except OSError:
        os.close(fd)
        pytest.skip("no huge pages are reserved: echo 2 > /proc/sys/vm/nr_hugepages")
    with node.connect(1) as sender, RawClient(node.socket, rank=2) as raw:
        raw.attach()
        offset = huge + 8192
        registered, _ = raw.ask(register(raw, offset=offset, bytes=65536), protocol.Registered, (fd,))
        source = memory.make(sender, 65536)
        source.array[:] = 9
        offer = {"session": node.session, "capability": registered.capability, "address": 0, "nbytes": 65536, "rail": 0}
        remote = sender.open(protocol.encode(offer))
        sender.write(remote, [source.address], [0], 65536).wait(LIMIT_S)
        with mmap.mmap(fd, 2 * huge) as seen:
            assert seen[offset : offset + 65536] == bytes([9]) * 65536
        os.ftruncate(fd, 0)
        transfer = sender.write(remote, [source.address], [0], 65536)
        with pytest.raises(TransferError) as failure:
            transfer.wait(LIMIT_S)
        assert failure.value.result is Result.REGION_GONE
        assert raw.last_words().startswith("violation:")
    os.close(fd)
    others_work(node)


# ---- peers ----


def test_a_client_that_waits_for_peers_that_are_not_there_leaves_others_some(nodes: Nodes) -> None:
    node = nodes.start(limits={"max_peers": 6})
    with RawClient(node.socket, rank=2) as raw:
        raw.attach()
        for port in range(1, 7):
            raw.send(protocol.ConnectPeer(raw.new_id(), f"127.0.0.1:{port}", LIMIT_S))
        for _ in range(2):
            failed, _ = raw.receive()
            assert isinstance(failed, protocol.Failed)
            assert failed.code == "limit"
            assert "alone uses or waits for 4 of 6 peers, and 2 are left" in failed.text
            assert "raise limits.max_peers" in failed.text
        others_work(node)


class FakePeer:
    """A peer's control port that answers each message of one connection by what ``answer`` makes of it."""

    def __init__(self, answer: Callable[[protocol.PeerMessage], protocol.PeerMessage | None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.session = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._answer = answer
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self._listener.settimeout(LIMIT_S)
        with contextlib.suppress(OSError):
            accepted, _ = self._listener.accept()
            with accepted, accepted.makefile("rb") as stream:
                while prefix := stream.read(protocol.LENGTH_PREFIX.size):
                    (length,) = protocol.LENGTH_PREFIX.unpack(prefix)
                    answer = self._answer(protocol.peer_message(stream.read(length)))
                    if answer is not None:
                        packet = protocol.encode(answer)
                        accepted.sendall(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(LIMIT_S)


@contextlib.contextmanager
def peer(answer: Callable[[protocol.PeerMessage], protocol.PeerMessage | None]) -> Iterator[str]:
    made = FakePeer(answer)
    try:
        yield made.session
    finally:
        made.close()


RAIL = RailFacts("rail0", "tcp", "127.0.0.1", 9)


@pytest.mark.parametrize(
    ("instance", "rail", "expected"),
    [
        (-1, RAIL, "instance -1"),
        (0, RAIL, "instance 0"),
        (7, RailFacts("x" * 32, "tcp", "127.0.0.1", 9), "identity 'xxxx"),
        (7, RailFacts("a\nb", "tcp", "127.0.0.1", 9), r"identity 'a\\nb'"),
    ],
)
def test_a_peer_that_describes_itself_wrongly_is_refused(
    node: Node, instance: int, rail: RailFacts, expected: str
) -> None:
    def welcome(message: protocol.PeerMessage) -> protocol.PeerMessage | None:
        if isinstance(message, protocol.Opening):
            return challenge(message, instance)
        return protocol.Welcome(message.id, 0, [rail], b"") if isinstance(message, protocol.Hello) else None

    with peer(welcome) as session, node.connect() as client, pytest.raises(PeerError, match=expected):
        client.peer(session, timeout=1)
    with socket.create_connection(protocol.parse_session(node.session)) as link, link.makefile("rb") as stream:
        for packet in map(protocol.encode, greeting(instance, "a:1", [rail])):
            link.sendall(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)
            (length,) = protocol.LENGTH_PREFIX.unpack(stream.read(4))
            refused = protocol.peer_message(stream.read(length))
    assert isinstance(refused, protocol.Refused)
    assert re.search(expected, refused.text)
    others_work(node)


def test_a_refusal_of_any_length_ends_no_session_and_forges_no_line_of_the_log(node: Node) -> None:
    text = "no\n2026-01-01 railrelayd[1] CRITICAL forged\x1b[2J" + "x" * 900_000

    def refuse(message: protocol.PeerMessage) -> protocol.PeerMessage | None:
        return protocol.Refused(message.id, "limit", text) if isinstance(message, protocol.Opening) else None

    with peer(refuse) as session, node.connect() as client:
        with pytest.raises(PeerError, match="refused: no"):
            client.peer(session, timeout=5)
        memory.link(client, client, NBYTES)  # its session goes on
    with RawClient(node.socket, rank=2) as raw:
        raw.attach()
        with pytest.raises(Refused):
            raw.ask(protocol.ConnectPeer(raw.new_id(), "a\nCRITICAL forged:1", 0.1), protocol.PeerConnected)
    others_work(node)
    assert not [line for line in node.log.splitlines() if "railrelayd" not in line or "\x1b" in line]
    assert max(map(len, node.log.splitlines())) < 10_000


def test_a_result_that_no_receiver_answers_with_is_none(node: Node) -> None:
    """Of the receiving daemon a sender takes only what a receiver can know: a time-out, say, is not for it to tell."""
    with socket.create_server(("127.0.0.1", 0)) as rail:
        facts = RailFacts("rail0", "tcp", "127.0.0.1", rail.getsockname()[1])

        def answer(message: protocol.PeerMessage) -> protocol.PeerMessage | None:
            match message:
                case protocol.Opening():
                    return challenge(message, 7)
                case protocol.Hello():
                    return protocol.Welcome(message.id, 0, [facts], b"")
                case protocol.PeerOpenRegion():
                    return protocol.PeerRegion(message.id, 1, 0, NBYTES, 0, 0, 0, 64)
                case protocol.RailConnect():
                    return protocol.RailToken(message.id, 1, bytes(16))
                case protocol.FenceRail():
                    return protocol.RailFenced(message.id, 1, struct.pack("<QQ", 1, 77))
                case _:
                    return protocol.PeerDone(message.id) if hasattr(message, "id") else None

        def serve_rail() -> None:
            accepted, _ = rail.accept()
            with accepted:
                accepted.recv(protocol.RAIL_PREAMBLE.size + 64, socket.MSG_WAITALL)
                accepted.sendall(struct.pack("<IHHQQQ", 0x4C504552, 1, 77, 1, 0, 0))
                while accepted.recv(65536):
                    continue

        thread = threading.Thread(target=serve_rail)
        thread.start()
        with peer(answer) as session, node.connect() as client:
            source = memory.make(client, 4096)
            offer = {"session": session, "capability": bytes(16), "address": 0, "nbytes": NBYTES, "rail": 0}
            remote = client.open(protocol.encode(offer))
            transfer = client.write(remote, np.array([source.address], np.uint64), [0], 4096)
            with pytest.raises(TransferError) as failure:
                transfer.wait(LIMIT_S)
            assert failure.value.result is Result.PEER_LOST
        thread.join(LIMIT_S)
    others_work(node)
