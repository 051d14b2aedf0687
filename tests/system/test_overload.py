"""Too much of everything, and processes that stand still: callers wait or get an error that says why, nobody else is
touched, and nothing has to be started again."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from helpers import memory, patterns, sockets
from helpers.engines import Engine, EngineError, Engines
from helpers.memory import Kind, Link
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import (
    Buffer,
    Busy,
    Client,
    ConnectError,
    ErrorCode,
    RelayError,
    Result,
    TransferError,
    Unsettled,
    WaitTimeout,
)
from railrelay.daemon.client_socket import MAX_EVENTS_UNSENT

pytestmark = pytest.mark.system

BLOCK = 16384
NBYTES = 4 << 20


def linked(sender: Client, receiver: Client, nbytes: int = NBYTES, destination: Kind = "shared") -> Link:
    made = memory.link(sender, receiver, nbytes, destination=destination)
    made.source.array[:] = patterns.content(nbytes, 1)
    return made


def works(link: Link, seed: int = 1, timeout: float = 30.0) -> None:
    blocks = link.source.array.size // BLOCK
    taken, put = patterns.order(blocks, BLOCK, seed)
    link.sender.write(
        link.remote,
        taken + np.uint64(link.source.address),
        put + np.uint64(link.remote.address),
        BLOCK,
        timeout=timeout,
    ).wait(60)
    assert patterns.arrived(link.source.array, link.destination.array, blocks, BLOCK, seed)


# ---- more of them than there is room for ----


def test_a_full_table_of_clients_disturbs_none_of_them_and_takes_others_when_there_is_room(nodes: Nodes) -> None:
    node = nodes.start(limits={"max_clients": 4})
    with contextlib.ExitStack() as stack:
        first, *others = (stack.enter_context(node.connect(rank, local=False)) for rank in range(4))
        link = linked(first, others[0])
        for seed in range(40):
            with pytest.raises(ConnectError, match=r"4 clients are attached already; raise limits\.max_clients"):
                node.connect(7)
            works(link, seed)
        others[-1].close()
        last = until(lambda: admitted(node), "there is room")
        assert last is not None
        works(linked(stack.enter_context(last), first))


def admitted(node: Node) -> Client | None:
    try:
        return node.connect(7)
    except ConnectError:
        return None


def test_a_peer_that_finds_no_room_connects_once_another_has_left(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(limits={"max_peers": 1})
    other = nodes.start()
    with prefill.connect(0) as sender, decode.connect() as receiver, other.connect() as second:
        link = linked(sender, receiver)
        offer = second.alloc(BLOCK).offer()
        for seed in range(3):
            with pytest.raises(RelayError, match=r"raise limits\.max_peers"):
                sender.open(offer)
            works(link, seed)
    with prefill.connect(0) as sender, other.connect() as second:
        buffer = second.alloc(NBYTES)

        def opened() -> bool:
            with contextlib.suppress(RelayError):
                sender.open(buffer.offer())
                return True
            return False

        until(opened, "the row of the peer is free")


def test_more_transfers_than_a_client_may_have_wait_for_their_turn(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(relay={"transfers": 16})
    with prefill.connect() as sender, decode.connect() as receiver:
        link = linked(sender, receiver, 256 * BLOCK)
        transfers = [
            sender.write(link.remote, [link.source.address + at], [link.remote.address + at], BLOCK)
            for at in range(0, 256 * BLOCK, BLOCK)
        ]
        for transfer in transfers:
            transfer.wait(30)
        assert (link.destination.array == link.source.array).all()


# ---- who does not read ----


def test_an_engine_that_stands_still_gets_its_notifications_later_and_is_not_cut_off(
    nodes: Nodes, engines: Engines
) -> None:
    prefill, decode = nodes.pair()
    engine = engines.start(decode)
    offer = bytes.fromhex(engine.ask("memory", name="pages", nbytes=NBYTES))
    told = 0
    with prefill.connect() as sender, prefill.connect(1) as other, decode.connect(1) as receiver:
        source = sender.alloc(4096)
        remote, beside = sender.open(offer), linked(other, receiver)
        with engine.paused():
            while told < 4 * MAX_EVENTS_UNSENT:
                transfer = sender.write(remote, [source.address], [remote.address], 4096, tag=told + 1, notify=b"n")
                try:
                    transfer.wait(30)
                except TransferError as failure:
                    assert failure.result is Result.TIMED_OUT  # noqa: PT017
                    break
                told += 1
            assert transfer.settled
            assert MAX_EVENTS_UNSENT <= told < 4 * MAX_EVENTS_UNSENT
            works(beside)
        assert [engine.ask("notification")[0] for _ in range(told)] == list(range(1, told + 1))
        sender.write(remote, [source.address], [remote.address], 4096, tag=told + 9, notify=b"n").wait(30)
        assert engine.ask("notification")[0] == told + 9
    assert any("reads no notifications" in error["text"] for error in decode.errors())
    assert any("did not take a notification" in error["text"] for error in prefill.errors())


@pytest.mark.parametrize("verb", ["lanes", "errors"])
def test_an_admin_command_whose_output_nobody_reads_holds_up_nothing(nodes: Nodes, verb: str) -> None:
    node = nodes.start()
    with contextlib.closing(full_pipe()) as full, node.connect(0, local=False) as sender, node.connect(1) as receiver:
        command = [sys.executable, "-m", "railrelay.client.cli", verb, "--instance", node.instance]
        process = subprocess.Popen(command, stdout=full.writing)
        try:
            until(lambda: waits_in_write(process.pid), "it waits for its reader")
            link = linked(sender, receiver)
            for seed in range(3):
                works(link, seed)
        finally:
            process.kill()
            process.wait(10)


class full_pipe:  # noqa: N801
    """A pipe that takes nothing more; ``path``: the writing end for other processes."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.writing, bytes(4096))
        os.set_blocking(self.writing, True)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.writing}"

    def read(self, nbytes: int) -> bytes:
        return os.read(self._reading, nbytes)

    def close(self) -> None:
        os.close(self._reading)
        os.close(self.writing)


def waits_in_write(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "pipe" in Path(f"/proc/{pid}/wchan").read_text()
    return False


# ---- the log ----


def logging_to(nodes: Nodes, path: str) -> list[str]:
    script = nodes.directory / "logging-to.sh"
    script.write_text(f'exec "$@" 2>{path}\n')
    return ["sh", str(script)]


def test_a_daemon_whose_log_is_on_a_full_disk_works_and_ends_cleanly(nodes: Nodes) -> None:
    node = nodes.start(prefix=logging_to(nodes, "/dev/full"))
    with node.connect(0, local=False) as sender, node.connect(1) as receiver:
        works(linked(sender, receiver))
    assert node.terminate() == 0


def test_a_daemon_whose_log_nobody_reads_works_and_ends_cleanly(nodes: Nodes) -> None:
    with contextlib.closing(full_pipe()) as full:
        node = nodes.start(prefix=logging_to(nodes, full.path))
        for _ in range(3):
            with node.connect(0, local=False) as sender, node.connect(1) as receiver:
                works(linked(sender, receiver))
        assert node.terminate() == 0
        assert set(full.read(4096)) == {0}


# ---- descriptors ----


def test_a_daemon_out_of_descriptors_says_so_and_goes_on_when_it_has_some(nodes: Nodes) -> None:
    node = nodes.start(prefix=["prlimit", "--nofile=72:72"])
    with node.connect(0, local=False) as client, node.connect(1) as receiver:
        link = linked(client, receiver)
        works(link)
        held: list[Buffer] = []
        refusal = fill(client, held)
        assert refusal.code is ErrorCode.LIMIT
        assert "no descriptors left; raise its LimitNOFILE" in refusal.text
        assert 2 < len(held) < 72
        works(link, 2)
        for buffer in held:
            buffer.close()
        for _ in range(10):
            client.alloc(4096).close()
        works(link, 3)
    assert any("no descriptors left" in error["text"] for error in node.errors())


@contextlib.contextmanager
def without_descriptors(node: Node) -> Iterator[None]:
    """The daemon keeps those that it has, and gets no more."""
    before = resource.prlimit(node.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(node.pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("whose", ["sending", "receiving"])
def test_rails_that_get_no_descriptor_fail_by_name_and_are_connected_later(nodes: Nodes, whose: str) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect() as sender, decode.connect() as receiver:
        link = linked(sender, receiver)
        with without_descriptors(prefill if whose == "sending" else decode):
            with pytest.raises(TransferError) as failure:
                works(link, timeout=5)
            assert failure.value.result in (Result.RAIL_DOWN, Result.TIMED_OUT)
        until(lambda: sent(link), "rails are connected again")


def test_a_request_with_a_descriptor_that_finds_no_room_is_refused_and_the_session_goes_on(nodes: Nodes) -> None:
    node = nodes.start()
    with node.connect(0, local=False) as client, node.connect(1) as receiver:
        link = linked(client, receiver)
        with without_descriptors(node):
            for _ in range(3):
                with pytest.raises(RelayError, match=r"no descriptors left; raise its LimitNOFILE") as failure:
                    client.alloc(4096)
                assert failure.value.code is ErrorCode.LIMIT
            with pytest.raises(ConnectError):
                node.connect(2, timeout=1)
        client.alloc(4096).close()
        works(link)
        node.connect(2).close()


def fill(client: Client, held: list[Buffer]) -> RelayError:
    """Shared memory until the daemon has no descriptors left."""
    try:
        while len(held) < 100:
            held.append(client.alloc(4096))
    except RelayError as refusal:
        return refusal
    raise AssertionError("it has more descriptors than it was given")


def sent(link: Link) -> bool:
    with contextlib.suppress(TransferError):
        works(link, 2)
        return True
    return False


# ---- memory ----


def test_peers_that_have_gone_leave_no_memory_behind(nodes: Nodes) -> None:
    """What their engines have aborted fills a table each."""
    prefill, decode = nodes.start(), nodes.start(node={"port": sockets.free_port()})
    grown: list[int] = []
    with prefill.connect() as sender:
        tag = 0
        for _ in range(8):
            with decode.connect() as receiver:
                remote = sender.open(receiver.alloc(4096).offer())
                for _ in range(200):
                    tag += 1
                    receiver.receiver.abort(tag)
                grown.append(anonymous_bytes(prefill.pid))
            assert decode.terminate() == 0
            decode = nodes.again(decode)
            until(lambda: remote.peer.is_down, "the peer that has gone is dropped")  # noqa: B023
    assert grown[-1] - grown[1] < 4 << 20  # with the tables it is more than 6 MiB


def anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


# ---- clocks ----

_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_s(void)
{
    static volatile int64_t *mapped;
    if (!mapped) {
        int fd = open(getenv("TEST_CLOCK"), O_RDONLY | O_CLOEXEC);
        mapped = mmap(NULL, 4096, PROT_READ, MAP_SHARED, fd, 0);
        close(fd);
    }
    return mapped;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += *offset_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    (void)zone;
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture
def set_clock(tmp_path: Path, nodes: Nodes) -> Callable[[int], None]:
    """Moves the wall clock of daemons and engines that start from now on, by so many seconds from the true one."""
    source, library, clock = (tmp_path / name for name in ("clock.c", "clock.so", "clock"))
    source.write_text(_CLOCK)
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True, timeout=60)
    clock.write_bytes(bytes(4096))
    nodes.environment.update({"LD_PRELOAD": str(library), "TEST_CLOCK": str(clock)})

    def move(seconds: int) -> None:
        with clock.open("r+b") as opened:
            opened.write(struct.pack("q", seconds))

    return move


@pytest.mark.parametrize("jump_s", [86400, -86400], ids=["forwards", "backwards"])
def test_a_clock_that_jumps_changes_no_time_out(
    nodes: Nodes, engines: Engines, set_clock: Callable[[int], None], jump_s: int
) -> None:
    prefill, decode = nodes.pair()
    sender, receiver = (engines.bare(environment=nodes.environment) for _ in range(2))
    sender.ask("connect", socket=prefill.socket, rank=0)
    receiver.ask("connect", socket=decode.socket, rank=0)
    sender.ask("memory", name="source", nbytes=NBYTES, seed=1)
    sender.ask("open", name="pages", offer=receiver.ask("memory", name="pages", nbytes=NBYTES))
    for round_, offset_s in enumerate((0, jump_s, -jump_s)):
        with decode.paused():
            began = time.monotonic()
            sender.ask("write", transfer="t", source="source", remote="pages", blocks=256, block_bytes=BLOCK, timeout=1)
            set_clock(offset_s)
            with pytest.raises(EngineError, match=r"timed out|may still land|no connection"):
                sender.ask("wait", transfer="t")
            assert time.monotonic() - began >= 1
        sender.ask("cancel", transfer="t")
        sender.ask("write", transfer="t", source="source", remote="pages", blocks=256, block_bytes=BLOCK, seed=round_)
        sender.ask("wait", transfer="t")
        assert receiver.ask("arrived", name="pages", source_seed=1, blocks=256, block_bytes=BLOCK, seed=round_)
        with prefill.connect(1):
            [shown] = [each for each in prefill.cli("clients")["clients"] if each["rank"] == 1]
            assert abs(shown["attached_ns"] / 1e9 - time.time() - offset_s) < 3600  # the jump was seen


# ---- standing still ----

# All that may run out while a process stands still, and how long it does.
TIMEOUTS = {
    "connect_s": 1,
    "peer_s": 1,
    "settle_s": 0.2,
    "fence_s": 0.2,
    "session_linger_s": 1,
    "predecessor_s": 1,
    "drain_s": 3,
}
STILL_S = 4.0


@pytest.mark.parametrize("kind", ["shared", "private"])
@pytest.mark.parametrize("victim", ["sending engine", "receiving engine", "sending daemon", "receiving daemon"])
def test_whoever_stands_still_for_long_goes_on_and_nothing_is_started_again(
    nodes: Nodes, engines: Engines, victim: str, kind: Kind
) -> None:
    prefill, decode = nodes.pair(timeouts=TIMEOUTS, tcp={"user_timeout_s": 2})
    sender, receiver = engines.start(prefill), engines.start(decode)
    sender.ask("memory", name="source", nbytes=NBYTES, kind=kind, seed=1)
    offer = receiver.ask("memory", name="pages", nbytes=NBYTES, kind=kind)
    sender.ask("open", name="pages", offer=offer)
    send(sender, "first")
    sender.ask("wait", transfer="first")
    stops: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "sending engine": sender.paused,
        "receiving engine": receiver.paused,
        "sending daemon": prefill.paused,
        "receiving daemon": decode.paused,
    }
    with prefill.connect(1) as other, decode.connect(1) as beside:
        link = linked(other, beside)
        works(link)
        names = [f"t{number}" for number in range(6)]
        for name in names:
            send(sender, name, timeout=1.0)
        with stops[victim]():
            end = time.monotonic() + STILL_S
            while "engine" in victim and time.monotonic() < end:
                works(link)
            time.sleep(max(0.0, end - time.monotonic()))
        for name in names:
            until(functools.partial(settled, sender, name), f"{name} has ended and settled")
        until(lambda: arrives_again(sender, receiver, offer), "transfers arrive again")
        until(lambda: reopened(link), "and those of the others")


def send(sender: Engine, name: str, timeout: float = 30.0) -> None:
    sender.ask(
        "write", transfer=name, source="source", remote="pages", blocks=256, block_bytes=BLOCK, seed=3, timeout=timeout
    )


def settled(sender: Engine, name: str) -> bool:
    with contextlib.suppress(EngineError):
        sender.ask("cancel", transfer=name, timeout=1.0)
    return bool(sender.ask("state", transfer=name)["settled"])


def arrives_again(sender: Engine, receiver: Engine, offer: str) -> bool:
    receiver.ask("wipe", name="pages")
    with contextlib.suppress(EngineError):
        sender.ask("open", name="pages", offer=offer)
        send(sender, "again", timeout=5.0)
        sender.ask("wait", transfer="again")
        return bool(receiver.ask("arrived", name="pages", source_seed=1, blocks=256, block_bytes=BLOCK, seed=3))
    return False


def reopened(link: Link) -> bool:
    with contextlib.suppress(RelayError):
        link.remote = link.sender.open(link.destination.offer())
        works(link, timeout=5.0)
        return True
    return False


@pytest.mark.parametrize("what", ["cancel", "cancel without waiting", "unregister", "close", "open"])
def test_a_daemon_that_stands_still_holds_up_no_call_for_longer_than_its_limit(nodes: Nodes, what: str) -> None:
    prefill, decode = nodes.pair()
    with prefill.connect(local=False) as client, decode.connect() as other:
        link = linked(client, other)
        works(link, 1)
        offer, buffer = other.alloc(4096).offer(), client.alloc(4096)
        transfer = client.write(link.remote, [link.source.address], [link.remote.address], 4096)
        transfer.wait(30)
        calls: dict[str, tuple[Callable[[], object], type[Exception] | None]] = {
            "cancel": (lambda: transfer.cancel(timeout=1.0), Unsettled),
            "cancel without waiting": (lambda: transfer.cancel(wait=False), None),
            "unregister": (lambda: buffer.region.unregister(0.5), Busy),
            "close": (lambda: buffer.close(0.5), Busy),
            "open": (lambda: client.open(offer, 0.5), WaitTimeout),
        }
        call, error = calls[what]
        with prefill.paused():
            transfer = client.write(link.remote, [link.source.address], [link.remote.address], 4096)
            begin = time.monotonic()
            with contextlib.nullcontext() if error is None else pytest.raises(error):
                call()
            assert time.monotonic() - begin < 15.0  # of 30 s that the daemon has for an answer
        works(link, 2)
        client.open(offer)
        buffer.close()
