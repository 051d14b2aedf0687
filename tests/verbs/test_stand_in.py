"""The stand-in for libibverbs behaves as real devices do. The first part runs on both: in the machine of tests/vm/run
on soft-RoCE, elsewhere on the stand-in. The second is about what only the stand-in can be told to do."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest
from helpers import verbs_ends, verbs_stand_in
from helpers.verbs_ends import (
    ACTIVE,
    CQ_ERR,
    DOWN,
    ERR,
    FENCE,
    INIT,
    INLINE,
    LOCAL_WRITE,
    PORT_ACTIVE,
    PORT_ERR,
    QP_ACCESS_ERR,
    QP_FATAL,
    READ_ONLY,
    REMOTE_READ,
    RESET,
    RTR,
    RTS,
    SIGNALED,
    SOLICITED,
    End,
    Operation,
    Queue,
    Status,
    VerbsError,
    Work,
)
from helpers.verbs_stand_in import Fabric
from helpers.waiting import until

REAL: Final = dict(rail.split("=") for rail in os.environ.get("RAILRELAY_VERBS_RAILS", "").split(",") if rail)
DEVICES: Final = {"stub0": "127.1.0.1", "stub1": "127.1.0.2"}
FIRST, SECOND = list((REAL or DEVICES).values())[:2]
BLOCK: Final = 65536
BLOCKS: Final = 8
QUIET_S: Final = 0.3  # in which nothing may happen
NOT_COMPLETED: Final = "soft-RoCE of Linux 6.1 does not always complete a write from wrong local memory"
IMM: Final = 0x01020304
RECV, RECV_RDMA_WITH_IMM = 128, 129

if not REAL and verbs_stand_in.missing():
    pytest.skip(verbs_stand_in.missing(), allow_module_level=True)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return verbs_ends.compiled(tmp_path_factory.mktemp("verbs"))


@pytest.fixture
def fabric(tmp_path: Path) -> Fabric:
    if REAL:
        pytest.skip("real devices cannot be told to")
    return Fabric(tmp_path / "fabric")


class Pair:
    """Two processes on two devices, with connected queue pairs, filled memory here and empty memory there."""

    def __init__(self, stack: ExitStack, program: Path, fabric: Fabric | None) -> None:
        self._stack, self._program, self._fabric = stack, program, fabric
        self._names = list(REAL or DEVICES)
        self._environment = fabric.environment(DEVICES, verbose=True) if fabric else {}
        self.near, self.far = self.end(0), self.end(1)
        self.source = self.near.memory(BLOCKS * BLOCK, seed=1)
        self.target = self.far.memory(BLOCKS * BLOCK)
        self.sender, self.receiver = self.connected()

    def end(self, device: int) -> End:
        return self._stack.enter_context(End(self._program, self._names[device], self._environment))

    def connected(
        self,
        timeout: int = 17,
        retries: int = 6,
        rnr: int = 7,
        sends: int = 128,
        receives: int = 64,
        entries: int = 512,
    ) -> tuple[Queue, Queue]:
        near, far = self.near.queue(sends, receives, entries), self.far.queue()
        self.near.connect(near, self.far, far.number, timeout, retries, rnr)
        self.far.connect(far, self.near, near.number, timeout, retries, rnr)
        return near, far

    def write(self, block: int = 0, blocks: int = 1, **more: int) -> Work:
        """The same blocks there."""
        offset, nbytes = block * BLOCK, blocks * BLOCK
        changes = {"id": block, "flags": SIGNALED, "rkey": self.target.rkey, **more}
        return Work([self.source.piece(offset, nbytes)], self.target.address + offset, **changes)  # type: ignore[arg-type]

    def imm(self, id: int = 9, flags: int = SIGNALED) -> Work:
        """No bytes."""
        operation = Operation.WRITE_IMM
        return Work((), self.target.address, self.target.rkey, operation=operation, id=id, flags=flags, imm=IMM)

    def arrived(self, block: int = 0, blocks: int = 1) -> bool:
        place = (block * BLOCK, blocks * BLOCK)
        return self.near.sum(self.source, *place) == self.far.sum(self.target, *place)

    def statuses(self, count: int) -> list[tuple[int, str]]:
        return [done.short for done in self.near.poll(self.sender, count)]


@pytest.fixture
def pair(program: Path, tmp_path: Path) -> Iterator[Pair]:
    fabric = None if REAL else Fabric(tmp_path / "fabric")
    with ExitStack() as stack:
        yield Pair(stack, program, fabric)
        if fabric:
            for address in DEVICES.values():
                counts = fabric.counts(address)
                assert not counts.get("overruns")
                assert not counts.get("refused_hellos")


@pytest.fixture
def ends(program: Path, fabric: Fabric) -> Iterator[Pair]:
    """Of the stand-in."""
    with ExitStack() as stack:
        yield Pair(stack, program, fabric)


# ---- the same on real devices ----


def test_writes_are_placed_in_order_and_only_signaled_ones_complete(pair: Pair) -> None:
    pair.far.receive(pair.receiver, id=77)
    blocks = [pair.write(block, flags=0) for block in range(BLOCKS)]
    pair.near.post(pair.sender, *blocks, pair.imm())
    assert pair.statuses(1) == [(9, "SUCCESS")]
    (done,) = pair.far.poll(pair.receiver)
    assert (done.id, done.status, done.opcode, done.nbytes, done.imm) == (77, 0, RECV_RDMA_WITH_IMM, 0, IMM)
    assert pair.arrived(0, BLOCKS)
    assert pair.near.poll(pair.sender, limit_s=QUIET_S) == []


def test_a_list_of_pieces_becomes_one_run(pair: Pair) -> None:
    pieces = [pair.source.piece(BLOCK * block, 1000) for block in (3, 1, 2)]
    pair.near.post(pair.sender, Work(pieces, pair.target.address + 5, pair.target.rkey))
    assert pair.statuses(1) == [(0, "SUCCESS")]
    for at, block in enumerate((3, 1, 2)):
        assert pair.far.sum(pair.target, 5 + 1000 * at, 1000) == pair.near.sum(pair.source, BLOCK * block, 1000)


def test_inline_bytes_are_taken_when_they_are_posted(pair: Pair) -> None:
    expected = pair.near.sum(pair.source, 0, 40)
    inline = Work([pair.source.piece(0, 40)], pair.target.address, pair.target.rkey, flags=SIGNALED | INLINE)
    pair.near.post(pair.sender, inline)
    pair.near.fill(pair.source, 99, 0, 40)
    assert pair.statuses(1) == [(0, "SUCCESS")]
    assert pair.far.sum(pair.target, 0, 40) == expected


def test_a_write_with_imm_says_how_many_bytes(pair: Pair) -> None:
    pair.far.receive(pair.receiver, id=3)
    pair.near.post(pair.sender, pair.write(0, operation=Operation.WRITE_IMM, imm=7))
    (done,) = pair.far.poll(pair.receiver)
    assert (done.id, done.status, done.nbytes, done.imm) == (3, 0, BLOCK, 7)
    assert pair.arrived()


def test_messages_go_where_the_receives_say(pair: Pair) -> None:
    pair.far.receive(pair.receiver, pair.target.piece(BLOCK, 30), pair.target.piece(0, 70), id=1)
    pair.far.receive(pair.receiver, id=2)
    pair.near.post(
        pair.sender,
        Work([pair.source.piece(0, 100)], operation=Operation.SEND, id=5),
        Work([], operation=Operation.SEND_IMM, imm=IMM, id=6),
    )
    assert pair.statuses(2) == [(5, "SUCCESS"), (6, "SUCCESS")]
    first, second = pair.far.poll(pair.receiver, 2)
    assert (first.id, first.opcode, first.nbytes, first.imm) == (1, RECV, 100, None)
    assert (second.id, second.opcode, second.nbytes, second.imm) == (2, RECV, 0, IMM)
    assert pair.far.sum(pair.target, BLOCK, 30) == pair.near.sum(pair.source, 0, 30)
    assert pair.far.sum(pair.target, 0, 70) == pair.near.sum(pair.source, 30, 70)


def test_a_read_brings_bytes_and_what_is_fenced_waits_for_it(pair: Pair) -> None:
    expected = pair.far.fill(pair.target, 5, 0, 2 * BLOCK)
    read = Work([pair.source.piece(0, 2 * BLOCK)], pair.target.address, pair.target.rkey, Operation.READ, flags=0)
    back = Work(
        [pair.source.piece(0, 2 * BLOCK)],
        pair.target.address + 4 * BLOCK,
        pair.target.rkey,
        id=1,
        flags=FENCE | SIGNALED,
    )
    pair.near.post(pair.sender, read, back)
    assert pair.statuses(1) == [(1, "SUCCESS")]
    assert pair.near.sum(pair.source, 0, 2 * BLOCK) == expected
    assert pair.far.sum(pair.target, 4 * BLOCK, 2 * BLOCK) == expected


def test_a_queue_pair_can_be_connected_to_itself(pair: Pair) -> None:
    loop = pair.near.queue()
    pair.near.connect(loop, pair.near, loop.number)
    into = pair.near.memory(8)
    pair.near.post(loop, Work([into.piece()], pair.source.address, pair.source.rkey, Operation.READ, id=4))
    assert [done.short for done in pair.near.poll(loop)] == [(4, "SUCCESS")]
    assert pair.near.sum(into) == pair.near.sum(pair.source, 0, 8)


def test_both_directions_at_once(pair: Pair) -> None:
    back = pair.far.memory(BLOCKS * BLOCK, seed=8)
    into = pair.near.memory(BLOCKS * BLOCK)
    for block in range(BLOCKS):
        at = block * BLOCK
        pair.near.post(pair.sender, pair.write(block))
        pair.far.post(pair.receiver, Work([back.piece(at, BLOCK)], into.address + at, into.rkey, id=block))
    assert pair.statuses(BLOCKS) == [(block, "SUCCESS") for block in range(BLOCKS)]
    assert [done.id for done in pair.far.poll(pair.receiver, BLOCKS)] == list(range(BLOCKS))
    assert pair.arrived(0, BLOCKS)
    assert pair.near.sum(into) == pair.far.sum(back)


@pytest.mark.parametrize("wrong", ["key", "range", "rights", "deregistered"])
def test_wrong_remote_memory_fails_that_write_and_what_follows(pair: Pair, wrong: str) -> None:
    bad = pair.write(1, flags=0, rkey=pair.target.rkey ^ 0x5500)
    if wrong == "range":
        bad = Work(
            [pair.source.piece(0, BLOCK)], pair.target.address + BLOCKS * BLOCK - 1, pair.target.rkey, id=1, flags=0
        )
    elif wrong == "rights":
        other = pair.far.memory(BLOCK, LOCAL_WRITE | REMOTE_READ)
        bad = Work([pair.source.piece(0, BLOCK)], other.address, other.rkey, id=1, flags=0)
    elif wrong == "deregistered":
        other = pair.far.memory(BLOCK)
        pair.far.deregister(other)
        bad = Work([pair.source.piece(0, BLOCK)], other.address, other.rkey, id=1, flags=0)
    pair.far.receive(pair.receiver, id=70)
    pair.near.post(pair.sender, pair.write(0), bad, pair.write(2, flags=0), pair.write(3))
    assert pair.statuses(4) == [(0, "SUCCESS"), (1, "REM_ACCESS_ERR"), (2, "WR_FLUSH_ERR"), (3, "WR_FLUSH_ERR")]
    assert [done.short for done in pair.far.poll(pair.receiver)] == [(70, "WR_FLUSH_ERR")]
    assert pair.near.state(pair.sender) == ERR
    assert pair.far.state(pair.receiver) == ERR
    assert pair.arrived(0)
    assert not pair.arrived(2)


@pytest.mark.parametrize("wrong", ["key", "range", "deregistered"])
def test_wrong_local_memory_fails_that_write_and_what_follows(pair: Pair, wrong: str) -> None:
    if REAL and wrong == "deregistered":
        pytest.skip(NOT_COMPLETED)
    piece = pair.source.piece(0, BLOCK, wrong_key=True)
    if wrong == "range":
        piece = pair.source.piece(BLOCKS * BLOCK - 1, BLOCK)
    elif wrong == "deregistered":
        other = pair.near.memory(BLOCK)
        pair.near.deregister(other)
        piece = other.piece()
    bad = Work([piece], pair.target.address, pair.target.rkey, id=1, flags=0)
    pair.near.post(pair.sender, pair.write(0), bad, pair.write(2))
    completions = pair.near.poll(pair.sender, 3)
    if REAL and len(completions) < 3:
        pytest.skip(NOT_COMPLETED)
    first, second, third = completions
    assert [first.short, third.short] == [(0, "SUCCESS"), (2, "WR_FLUSH_ERR")]
    assert second.id == 1
    assert second.status in (Status.LOC_PROT_ERR, Status.LOC_QP_OP_ERR)  # soft-RoCE says the latter
    assert pair.near.state(pair.sender) == ERR


def test_no_bytes_need_no_key(pair: Pair) -> None:
    pair.far.receive(pair.receiver, id=1)
    pair.near.post(pair.sender, Work((), 0, 0, Operation.WRITE_IMM, imm=IMM), Work((), 0, 0, id=1))
    assert pair.statuses(2) == [(0, "SUCCESS"), (1, "SUCCESS")]
    assert pair.far.poll(pair.receiver)[0].imm == IMM


def test_a_message_that_is_too_long_fails_both_ends(pair: Pair) -> None:
    pair.far.receive(pair.receiver, pair.target.piece(0, 99), id=1)
    pair.near.post(pair.sender, Work([pair.source.piece(0, 100)], operation=Operation.SEND, id=5))
    (done,) = pair.near.poll(pair.sender)
    assert done.id == 5
    assert done.status in (Status.REM_INV_REQ_ERR, Status.REM_OP_ERR)  # soft-RoCE says the latter
    until(lambda: pair.far.state(pair.receiver) == ERR, "the receiver's queue pair is in ERR")


def test_an_error_state_flushes_all_that_is_posted_and_sends_that_are_posted_later(pair: Pair) -> None:
    for number in (1, 2):
        pair.far.receive(pair.receiver, id=number)
    pair.far.modify(pair.receiver, ERR)
    pair.far.post(pair.receiver, Work((), operation=Operation.SEND, id=3, flags=0))
    flushed = pair.far.poll(pair.receiver, 3)
    assert {done.status for done in flushed} == {Status.WR_FLUSH_ERR}
    assert sorted(done.id for done in flushed) == [1, 2, 3]
    assert [done.id for done in flushed if done.id < 3] == [1, 2]


def test_a_queue_pair_in_error_answers_nobody(pair: Pair) -> None:
    near, far = pair.connected(timeout=14, retries=1)
    pair.far.modify(far, ERR)
    pair.near.post(near, pair.write(0), pair.write(1, flags=0))
    assert [done.short for done in pair.near.poll(near, 2)] == [(0, "RETRY_EXC_ERR"), (1, "WR_FLUSH_ERR")]
    assert not pair.arrived()


def test_a_peer_that_is_killed_is_noticed_after_all_retries(pair: Pair) -> None:
    near, _ = pair.connected(timeout=14, retries=3)
    pair.far.kill()
    began = time.monotonic()
    pair.near.post(near, pair.write(0), pair.write(1))
    assert [done.short for done in pair.near.poll(near, 2)] == [(0, "RETRY_EXC_ERR"), (1, "WR_FLUSH_ERR")]
    assert time.monotonic() - began >= 4 * 4.096e-6 * 2**14
    assert pair.near.state(near) == ERR


def test_a_message_waits_for_its_receive(pair: Pair) -> None:
    pair.near.post(pair.sender, pair.write(0, flags=0), pair.imm())
    assert pair.near.poll(pair.sender, limit_s=QUIET_S) == []
    pair.far.receive(pair.receiver, id=1)
    assert pair.statuses(1) == [(9, "SUCCESS")]
    assert pair.far.poll(pair.receiver)[0].short == (1, "SUCCESS")


def test_a_receive_that_never_comes_fails_after_its_retries(pair: Pair) -> None:
    near, far = pair.connected(rnr=2)
    pair.near.post(near, Work([pair.source.piece(0, 100)], operation=Operation.SEND, id=5), pair.write(1))
    assert [done.short for done in pair.near.poll(near, 2)] == [(5, "RNR_RETRY_EXC_ERR"), (1, "WR_FLUSH_ERR")]
    assert pair.far.state(far) == RTS


def sent(pair: Pair, queue: Queue, number: int) -> VerbsError | None:
    try:
        pair.near.post(queue, Work((), operation=Operation.SEND, id=number))
    except VerbsError as refused:
        return refused
    return None


def test_a_full_send_queue_refuses_more(pair: Pair) -> None:
    near, far = pair.connected(sends=16)
    refused = next(filter(None, (sent(pair, near, number) for number in range(1000))))  # nothing completes
    assert (refused.errno, refused.bad) == (errno.ENOMEM, 0)
    pair.far.receive(far)
    assert pair.near.poll(near)[0].short == (0, "SUCCESS")
    pair.near.post(near, Work((), operation=Operation.SEND))


def test_work_can_be_posted_only_in_the_right_state(pair: Pair) -> None:
    queue = pair.near.queue()
    pair.near.only_init(queue)
    pair.near.receive(queue)
    assert pair.near.state(queue) == INIT
    with pytest.raises(VerbsError) as refused:
        pair.near.post(queue, pair.write())
    assert refused.value.errno == errno.EINVAL


@pytest.mark.parametrize(("state", "mask"), [(RTR, 0), (RTS, 0), (RTR, 1 << 7), (INIT, 1 << 9)])
def test_states_come_in_order_and_with_all_their_attributes(pair: Pair, state: int, mask: int) -> None:
    queue = pair.near.queue()
    pair.near.only_init(queue)
    with pytest.raises(VerbsError) as refused:
        pair.near.modify(queue, state, mask)
    assert refused.value.errno == errno.EINVAL
    pair.near.modify(queue, RESET)
    assert pair.near.state(queue) == RESET


def test_an_armed_queue_tells_once(pair: Pair) -> None:
    for number in range(3):
        pair.far.receive(pair.receiver, id=number)
    pair.near.post(pair.sender, pair.imm(flags=0))
    assert not pair.far.event(pair.receiver, QUIET_S)  # not armed
    assert len(pair.far.poll(pair.receiver)) == 1
    pair.far.arm(pair.receiver)
    pair.near.post(pair.sender, pair.imm(flags=0), pair.imm(flags=SIGNALED))
    assert pair.far.event(pair.receiver, 60)
    assert pair.statuses(1) == [(9, "SUCCESS")]
    assert not pair.far.event(pair.receiver, QUIET_S)
    assert len(pair.far.poll(pair.receiver, 2)) == 2


def test_a_queue_armed_for_solicited_completions_tells_of_no_other(pair: Pair) -> None:
    pair.far.receive(pair.receiver, id=1)
    pair.far.receive(pair.receiver, id=2)
    pair.far.arm(pair.receiver, solicited=True)
    pair.near.post(pair.sender, pair.imm())
    assert not pair.far.event(pair.receiver, QUIET_S)
    pair.near.post(pair.sender, pair.imm(flags=SIGNALED | SOLICITED))
    assert pair.far.event(pair.receiver, 60)


def test_memory_that_may_be_written_from_afar_may_be_written_here(pair: Pair) -> None:
    with pytest.raises(VerbsError) as refused:
        pair.near.memory(4096, verbs_ends.REMOTE_WRITE)
    assert refused.value.errno == errno.EINVAL
    pair.near.memory(4096, READ_ONLY)


# ---- the stand-in alone ----


def test_the_source_is_read_after_post_has_returned(ends: Pair, fabric: Fabric) -> None:
    with fabric.held(SECOND):
        time.sleep(0.05)
        ends.near.post(
            ends.sender, *[ends.write(block, flags=0) for block in range(BLOCKS - 1)], ends.write(BLOCKS - 1)
        )
        time.sleep(0.1)  # what fits is on the wire
        changed = ends.near.fill(ends.source, 44, (BLOCKS - 1) * BLOCK)
    assert ends.statuses(1) == [(BLOCKS - 1, "SUCCESS")]
    assert ends.far.sum(ends.target, (BLOCKS - 1) * BLOCK) == changed


@pytest.mark.parametrize("address", [FIRST, SECOND])
def test_held_packets_arrive_later_even_without_their_sender(ends: Pair, fabric: Fabric, address: str) -> None:
    with fabric.held(address):
        ends.near.post(ends.sender, ends.write())
        assert ends.near.poll(ends.sender, limit_s=QUIET_S) == []
        assert not ends.arrived()
        ends.near.modify(ends.sender, ERR)
        assert ends.statuses(1) == [(0, "WR_FLUSH_ERR")]
        ends.near.destroy(ends.sender)
        assert not ends.arrived()
    until(ends.arrived, "the block is placed")


def test_a_sender_whose_answers_are_held_does_not_learn_what_was_placed(ends: Pair, fabric: Fabric) -> None:
    near, far = ends.connected(timeout=14, retries=1)
    ends.far.receive(far, id=1)
    with fabric.held(FIRST, "to"):
        ends.near.post(near, ends.write(flags=0), ends.imm())
        assert ends.far.poll(far)[0].short == (1, "SUCCESS")
        assert ends.arrived()
        assert [done.short for done in ends.near.poll(near, 2)] == [(0, "RETRY_EXC_ERR"), (9, "WR_FLUSH_ERR")]


def test_held_packets_do_not_pass_a_fence(ends: Pair, fabric: Fabric) -> None:
    with fabric.held(SECOND):
        ends.near.post(ends.sender, ends.write())
        time.sleep(0.1)
        ends.far.receive(ends.receiver, id=1)
        ends.far.modify(ends.receiver, ERR)
        assert [done.short for done in ends.far.poll(ends.receiver)] == [(1, "WR_FLUSH_ERR")]
    time.sleep(QUIET_S)
    assert not ends.arrived()


def test_a_hold_that_lasts_too_long_exceeds_the_retries(ends: Pair, fabric: Fabric) -> None:
    near, far = ends.connected(timeout=14, retries=1)
    with fabric.held(SECOND):
        ends.near.post(near, ends.write(), ends.write(1))
        assert [done.short for done in ends.near.poll(near, 2)] == [(0, "RETRY_EXC_ERR"), (1, "WR_FLUSH_ERR")]
        assert ends.far.state(far) == RTS
        assert not ends.arrived()
    until(ends.arrived, "the late block is placed")


def test_a_short_hold_costs_nothing(ends: Pair, fabric: Fabric) -> None:
    with fabric.held(FIRST):
        ends.near.post(ends.sender, ends.write())
        time.sleep(0.2)
    assert ends.statuses(1) == [(0, "SUCCESS")]


def test_a_port_goes_down_and_up(ends: Pair, fabric: Fabric) -> None:
    fabric.port_down(SECOND)
    assert ends.far.asynchronous() == PORT_ERR
    assert (ends.far.port_state(), ends.near.port_state()) == (DOWN, ACTIVE)
    with pytest.raises(VerbsError) as refused:
        ends.far.connect(ends.far.queue(), ends.near, ends.sender.number)
    assert refused.value.errno == errno.ENETUNREACH
    fabric.port_up(SECOND)
    assert ends.far.asynchronous() == PORT_ACTIVE
    assert ends.far.port_state() == ACTIVE
    ends.near.post(ends.sender, ends.write())
    assert ends.statuses(1) == [(0, "SUCCESS")]


def test_an_error_state_flushes_receives_that_are_posted_later(ends: Pair) -> None:
    """Soft-RoCE of Linux 6.1 never gives them back."""
    ends.far.modify(ends.receiver, ERR)
    ends.far.receive(ends.receiver, id=2)
    assert [done.short for done in ends.far.poll(ends.receiver)] == [(2, "WR_FLUSH_ERR")]


def test_a_dropped_connection_exceeds_the_retries_at_both_ends(ends: Pair, fabric: Fabric) -> None:
    near, far = ends.connected(timeout=14, retries=1)
    ends.near.post(near, ends.write())
    assert ends.near.poll(near)[0].short == (0, "SUCCESS")
    assert fabric.drop_connections(SECOND, far.number) == 1
    ends.near.post(near, ends.write(1))
    ends.far.post(far, Work((), operation=Operation.SEND))
    assert ends.near.poll(near)[0].short == (1, "RETRY_EXC_ERR")
    assert ends.far.poll(far)[0].short == (0, "RETRY_EXC_ERR")


def test_a_queue_pair_can_be_made_to_fail(ends: Pair, fabric: Fabric) -> None:
    assert fabric.fail_queue_pairs(FIRST, ends.sender.number) == 1
    assert ends.near.asynchronous() == QP_FATAL
    assert ends.near.state(ends.sender) == ERR
    ends.near.post(ends.sender, ends.write())
    assert ends.statuses(1) == [(0, "WR_FLUSH_ERR")]
    assert [pair.state for pair in fabric.queue_pairs(FIRST)] == [ERR]


def test_the_victim_of_a_wrong_key_is_told(ends: Pair) -> None:
    ends.near.post(ends.sender, ends.write(rkey=ends.target.rkey ^ 0x5500))
    assert ends.statuses(1) == [(0, "REM_ACCESS_ERR")]
    assert ends.far.asynchronous() == QP_ACCESS_ERR


def test_a_queue_that_overruns_is_fatal_to_its_queue_pairs(ends: Pair, fabric: Fabric) -> None:
    near, _ = ends.connected(entries=4)
    ends.near.post(near, *[ends.write(0) for _ in range(5)])
    assert {ends.near.asynchronous(), ends.near.asynchronous()} == {CQ_ERR, QP_FATAL}
    assert ends.near.state(near) == ERR
    assert fabric.counts(FIRST)["overruns"]


def test_room_in_the_send_queue_comes_with_polled_completions(ends: Pair) -> None:
    near, _ = ends.connected(sends=4)
    ends.near.post(near, *[ends.write(0, flags=0) for _ in range(3)], ends.write(0))
    time.sleep(0.2)
    with pytest.raises(VerbsError) as refused:
        ends.near.post(near, ends.write())
    assert refused.value.errno == errno.ENOMEM
    assert ends.near.poll(near)[0].status == Status.SUCCESS
    ends.near.post(near, ends.write())


@pytest.mark.parametrize(("wrong_number", "mtu"), [(1, 0), (0, 3)])
def test_ends_that_were_told_different_things_do_not_talk(
    ends: Pair, fabric: Fabric, wrong_number: int, mtu: int
) -> None:
    near, far = ends.near.queue(), ends.far.queue()
    ends.near.connect(near, ends.far, far.number, 14, 1, mtu=mtu)
    ends.far.connect(far, ends.near, near.number + wrong_number, 14, 1)
    ends.near.post(near, ends.write())
    assert ends.near.poll(near)[0].short == (0, "RETRY_EXC_ERR")
    assert fabric.counts(SECOND)["refused_hellos"]


def test_registration_can_be_made_to_fail(ends: Pair, fabric: Fabric) -> None:
    fabric.fail_registration(FIRST)
    with pytest.raises(VerbsError) as refused:
        ends.near.memory(4096)
    assert refused.value.errno == errno.ENOMEM
    ends.far.memory(4096)
    fabric.clear()
    fabric.limit_memory(FIRST, BLOCKS * BLOCK + 8192)
    ends.near.memory(8192)
    with pytest.raises(VerbsError):
        ends.near.memory(4096)


def test_exported_memory_is_reached_at_its_own_address(ends: Pair, fabric: Fabric) -> None:
    with pytest.raises(VerbsError) as refused:
        ends.far.exported(BLOCK, 0x5000_0000_0001)
    assert refused.value.errno == errno.EINVAL  # not the descriptor's place in its page
    target = ends.far.exported(BLOCK, 0x5000_0000_0000)
    ends.near.post(ends.sender, Work([ends.source.piece(0, 1000)], target.address + 64, target.rkey))
    assert ends.statuses(1) == [(0, "SUCCESS")]
    assert ends.far.sum(target, 64, 1000) == ends.near.sum(ends.source, 0, 1000)
    fabric.fail_dmabuf_registration(SECOND)
    with pytest.raises(VerbsError) as refused:
        ends.far.exported(BLOCK, 0x5000_0000_0000)
    assert refused.value.errno == errno.EOPNOTSUPP


def test_holds_under_traffic_both_ways_lose_and_change_nothing(ends: Pair, fabric: Fabric) -> None:
    back, into = ends.far.memory(BLOCKS * BLOCK, seed=3), ends.near.memory(BLOCKS * BLOCK)
    queues = [ends.connected() for _ in range(4)]
    dice = random.Random(7)
    for turn in range(12):
        address = dice.choice([FIRST, SECOND])
        if turn % 2:
            fabric.hold(address)
        for block, (near, far) in enumerate(queues):
            at = block * BLOCK
            there = Work([back.piece(at, BLOCK)], into.address + at, into.rkey, Operation.WRITE_IMM, id=block)
            ends.near.receive(near, id=90)
            ends.far.receive(far, id=91)
            ends.far.post(far, there)
            ends.near.post(near, ends.write(block, operation=Operation.WRITE_IMM))
        fabric.release(address)
        for block, (near, far) in enumerate(queues):
            assert sorted(done.short for done in ends.near.poll(near, 2)) == [(block, "SUCCESS"), (90, "SUCCESS")]
            assert sorted(done.short for done in ends.far.poll(far, 2)) == [(block, "SUCCESS"), (91, "SUCCESS")]
        assert ends.arrived(0, len(queues))
        assert ends.near.sum(into, 0, len(queues) * BLOCK) == ends.far.sum(back, 0, len(queues) * BLOCK)
        ends.near.fill(ends.source, 100 + turn)
        ends.far.fill(back, 200 + turn)
    assert not fabric.counts(FIRST)["rnr"]
    assert not fabric.counts(SECOND)["rnr"]


def test_a_rate_is_kept(ends: Pair, fabric: Fabric) -> None:
    rate = 4 * BLOCK
    fabric.limit_rate(FIRST, rate)
    began = time.monotonic()
    ends.near.post(ends.sender, ends.write(0, 4))
    assert ends.statuses(1) == [(0, "SUCCESS")]
    assert time.monotonic() - began >= 4 * BLOCK / rate * 0.8
    assert ends.arrived(0, 4)


def test_a_message_without_a_receive_is_counted(ends: Pair, fabric: Fabric) -> None:
    ends.near.post(ends.sender, ends.imm())
    until(lambda: fabric.counts(SECOND)["rnr"] == 1, "it is counted")
    ends.far.receive(ends.receiver)
    assert ends.statuses(1) == [(9, "SUCCESS")]


def test_nothing_stays_behind(ends: Pair, fabric: Fabric) -> None:
    for end in (ends.near, ends.far):
        end.ask("close")
    left = sorted(path.name for path in fabric.directory.iterdir())
    assert left == []
