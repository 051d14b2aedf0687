"""Clients of one daemon, also of different users: none opens, names or reads what is another's, or was."""

from __future__ import annotations

import contextlib
import grp
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import memory, processes
from helpers.nodes import SHM, Node, Nodes
from helpers.raw_client import RawClient, Refused
from helpers.waiting import until

from railrelay.client import Result, protocol
from railrelay.shm_layout import abi

pytestmark = pytest.mark.system

NBYTES = 1 << 20
C = abi.CONSTANTS
KV = os.urandom(16)  # what nobody else may ever see
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def lane_of(raw: RawClient) -> mmap.mmap:
    return raw.lease()


def bounce_of(raw: RawClient) -> mmap.mmap:
    request = protocol.Register(raw.new_id(), raw.new_id() << 30, NBYTES, False, 0, 0, True)
    registered, fds = raw.ask(request, protocol.Registered)
    assert registered.bounces
    return raw.map(fds[0], raw.facts.bounce_bytes)


def segment_tables(raw: RawClient) -> mmap.mmap:
    """The own segment; block tables and rings are what a client fills there."""
    return raw.memory


def count(found: mmap.mmap) -> int:
    """Of a neighbour's KV."""
    return found[:].count(KV)


def leave_kv(raw: RawClient) -> None:
    for found in (lane_of(raw), bounce_of(raw)):
        found[:] = KV * (len(found) // len(KV))
    for name in ("SLOT_TABLES", "RING_TABLES"):
        tables = raw.area(name, "block")
        nbytes = tables.stride * tables.count
        raw.memory[tables.offset : tables.offset + nbytes] = KV * (nbytes // len(KV))


@pytest.mark.parametrize("rank", [0, 1], ids=["same rank", "another rank"])
def test_what_a_client_leaves_behind_is_not_in_what_the_next_one_gets(nodes: Nodes, rank: int) -> None:
    node = nodes.start(limits={"max_clients": 2})
    for _ in range(3):  # rows of clients and names of objects come round
        with RawClient(node.socket, rank) as first:
            first.attach()
            leave_kv(first)
        until(lambda: not node.cli("clients")["clients"], "the first one is gone")
        with RawClient(node.socket) as second:
            second.attach()
            assert [count(found(second)) for found in (segment_tables, lane_of, bounce_of)] == [0, 0, 0]
        until(lambda: not node.cli("clients")["clients"], "the second one is gone")


# ---- naming what is another's ----


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Node, Node]:
    return nodes.pair()


@contextlib.contextmanager
def neighbours(prefill: Node, decode: Node) -> Iterator[tuple[RawClient, RawClient, dict[str, int], memory.Memory]]:
    """Two clients of one node; the first has a region, an open remote region, a lane and a transfer, numbers of which
    the second one uses; the memory that the first may write."""
    with decode.connect(0) as receiver, RawClient(prefill.socket, 1) as owner, RawClient(prefill.socket, 2) as thief:
        target = memory.make(receiver, NBYTES)
        owner.attach()
        thief.attach()
        registered, fd = owner.register(NBYTES)
        os.pwrite(fd, KV * 256, 0)
        _, peer, opened = owner.open(target.offer())
        owner.lease()
        yield owner, thief, {"region": registered.region, "remote": opened.remote, "peer": peer.peer}, target


def test_requests_name_only_what_is_ones_own(pair: tuple[Node, Node]) -> None:
    with neighbours(*pair) as (owner, thief, names, target):
        for request, code in (
            (protocol.Unregister(thief.new_id(), names["region"]), "bad_region"),
            (protocol.CloseRegion(thief.new_id(), names["remote"]), "bad_region"),
            (protocol.Note(thief.new_id(), 0, 1, names["remote"], 5, b"x"), "bad_region"),
            (protocol.OpenRegion(thief.new_id(), names["peer"], bytes(16)), "peer_lost"),
        ):
            with pytest.raises(Refused) as refused:
                thief.ask(request, protocol.Done)
            assert refused.value.code == code, request
        for harmless in (protocol.Cancel(thief.new_id(), 0, 1), protocol.Fence(thief.new_id(), 0, 1, 1.0)):
            thief.ask(harmless, protocol.Done)
        thief.ask(protocol.LetGo(thief.new_id(), [names["remote"]]), protocol.Done)
        thief.ask(protocol.Abort(thief.new_id(), 7, 1.0), protocol.Aborted)
        publish(owner, names, tag=7)  # it still has all of it
        assert result(owner) is Result.OK
        assert bytes(target.array[: 256 * len(KV)]) == KV * 256


def test_slices_name_only_what_is_ones_own(pair: tuple[Node, Node]) -> None:
    with neighbours(*pair) as (_, thief, names, target):
        own, _ = thief.register(NBYTES)
        publish(thief, {**names, "region": own.region})  # the owner's remote region and peer
        assert result(thief) in (Result.BAD_REGION, Result.REGION_GONE)
        assert not target.array.any()
    with neighbours(*pair) as (_, thief, names, target):
        _, peer, opened = thief.open(target.offer())
        publish(thief, {**names, "peer": peer.peer, "remote": opened.remote})  # the owner's source
        assert result(thief) is Result.BAD_REGION
        assert not target.array.any()


def publish(raw: RawClient, names: dict[str, int], tag: int = 0) -> None:
    """A direct slice of 4,096 bytes."""
    raw.area("TRANSFERS", "transfer").write(0, generation=1, tag=tag)
    raw.area("RING_SLICES", "slice").write(
        0,
        generation=1,
        peer=names["peer"],
        flags=C["SLICE_FINAL"] | C["SLICE_INLINE"],
        block_count=1,
        total_slices=1,
        bytes=4096,
        inline_length=4096,
        inline_source_region=names["region"],
        inline_remote_region=names["remote"],
    )
    raw.area("RINGS", "ring").set(0, "produced", 1)
    raw.kick()


def result(raw: RawClient) -> Result:
    transfers = raw.area("TRANSFERS", "transfer")
    until(lambda: transfers.get(0, "done") == 1, "the transfer ends")
    return Result(transfers.get(0, "result"))


# ---- other users ----


@pytest.fixture
def group() -> grp.struct_group:
    """Not root's."""
    return next(found for found in grp.getgrall() if found.gr_gid not in (0, 65534))


@pytest.fixture
def shared(nodes: Nodes, group: grp.struct_group) -> Iterator[Node]:
    """A daemon with a group, in a directory that everybody may search."""
    directory = Path(tempfile.mkdtemp(prefix="railrelay-test-", dir="/tmp"))
    try:
        directory.chmod(0o755)
        yield nodes.start(node={"socket": str(directory / "shared.sock"), "group": group.gr_name})
        nodes.close()
    finally:
        shutil.rmtree(directory)


def as_user(uid: int, groups: list[int], work: Callable[[], None]) -> int:
    """Pid of a process that does it; uid's own group has the same number."""

    def child() -> None:
        os.setgroups(groups)
        os.setgid(uid)
        os.setuid(uid)
        work()

    return processes.fork(child)


@AS_ROOT
def test_a_process_is_in_the_group_by_what_the_kernel_says_of_it(shared: Node, group: grp.struct_group) -> None:
    """As in a container: neither the user nor its membership is in the user database."""
    os.chmod(shared.socket, 0o666)  # so that it is the daemon that decides

    def attach() -> None:
        with RawClient(shared.socket) as raw:
            raw.attach()

    def denied() -> None:
        with RawClient(shared.socket) as raw:
            assert raw.last_words().startswith("denied: uid 54321")

    assert processes.exit_code(as_user(54321, [group.gr_gid], attach)) == 0
    assert processes.exit_code(as_user(54321, [group.gr_gid + 100, 65534], denied)) == 0
    os.chmod(shared.socket, 0o660)

    def kept_out() -> None:
        with pytest.raises(PermissionError):
            RawClient(shared.socket)

    assert processes.exit_code(as_user(54321, [], kept_out)) == 0


@AS_ROOT
def test_a_client_of_another_user_opens_nothing_of_its_neighbour(shared: Node, group: grp.struct_group) -> None:
    told, ready = os.pipe()
    end, ends = os.pipe()

    def neighbour() -> None:
        with RawClient(shared.socket) as raw:
            raw.attach()
            leave_kv(raw)
            raw.register(NBYTES)
            os.write(ready, b"x")
            os.read(end, 1)

    def thief() -> None:
        with RawClient(shared.socket, 1) as raw:
            raw.attach()
            names = shared.objects()
            assert len(names) >= 4  # the node's, the neighbour's segment, lane and bounce memory
            for name in names:
                for flags in (os.O_RDONLY, os.O_RDWR):
                    if name.endswith(".node") and flags == os.O_RDONLY:
                        os.close(os.open(SHM / name, flags))  # it holds no secret
                        continue
                    with pytest.raises(PermissionError):
                        os.open(SHM / name, flags)
            for pid in (shared.pid, victim):
                with pytest.raises(PermissionError):
                    os.listdir(f"/proc/{pid}/fd")
                with pytest.raises(PermissionError):
                    os.open(f"/proc/{pid}/mem", os.O_RDONLY)
            assert [count(found(raw)) for found in (segment_tables, lane_of, bounce_of)] == [0, 0, 0]
            with pytest.raises(OSError, match=r"Permission denied|Operation not permitted"):
                mmap.mmap(raw.node_fd, raw.facts.node_bytes)  # writable

    victim = as_user(54321, [group.gr_gid], neighbour)
    try:
        assert os.read(told, 1) == b"x"
        assert processes.exit_code(as_user(54322, [group.gr_gid], thief)) == 0
    finally:
        os.write(ends, b"x")
        assert processes.exit_code(victim) == 0
        for fd in (told, ready, end, ends):
            os.close(fd)
    until(lambda: not shared.cli("clients")["clients"], "both have left")

    def heir() -> None:
        with RawClient(shared.socket) as raw:
            raw.attach()
            assert [count(found(raw)) for found in (segment_tables, lane_of, bounce_of)] == [0, 0, 0]

    assert processes.exit_code(as_user(54322, [group.gr_gid], heir)) == 0
