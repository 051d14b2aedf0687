"""The control socket against a daemon of a few lines: replies, descriptors, events, and the ways in which it ends."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import processes
from helpers.waiting import until

from railrelay.client import protocol
from railrelay.client.connection import Connection, close_all
from railrelay.client.errors import ConnectError, DaemonGone, ErrorCode, RelayError, WaitTimeout
from railrelay.client.receiver import Notifications

CHILD_SECONDS = 20


class Daemon:
    """The daemon's end of one connection; requests are answered by the test, in its own thread."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(CHILD_SECONDS)
        self.socket = self._listener

    def accept(self) -> None:
        self.socket, _ = self._listener.accept()
        self.socket.settimeout(CHILD_SECONDS)

    def receive(self) -> protocol.ClientRequest:
        return protocol.client_request(self.socket.recv(protocol.CLIENT_MESSAGE_BYTES))

    def send(self, message: protocol.ClientReply, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [protocol.encode(message)], fds)

    def close(self) -> None:
        self.socket.close()
        self._listener.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "control.sock")
    yield daemon
    daemon.close()


@pytest.fixture
def connection(daemon: Daemon, tmp_path: Path) -> Iterator[Connection]:
    connection = Connection(tmp_path / "control.sock", 5)
    daemon.accept()
    yield connection
    connection.close()


def answering(daemon: Daemon, *replies: protocol.ClientReply, fds: tuple[int, ...] = ()) -> threading.Thread:
    def run() -> None:
        daemon.receive()
        for reply in replies:
            daemon.send(reply, fds)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def unregister(connection: Connection) -> protocol.Unregister:
    return protocol.Unregister(connection.new_id(), 7)


def open_descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_no_socket_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConnectError, match=r"absent\.sock; start railrelayd"):
        Connection(tmp_path / "absent.sock", 1)


def test_a_refusal_is_raised_with_its_code(daemon: Daemon, connection: Connection) -> None:
    request = unregister(connection)
    thread = answering(daemon, protocol.Failed(request.id, "busy", "region 7 has 3 slices in flight"))
    with pytest.raises(RelayError, match="region 7 has 3 slices") as raised:
        connection.ask(request, protocol.Done)
    assert raised.value.code is ErrorCode.BUSY
    thread.join()


def test_a_reply_of_the_wrong_kind_is_an_error(daemon: Daemon, connection: Connection) -> None:
    request = unregister(connection)
    thread = answering(daemon, protocol.Leased(request.id, 0, 1, 2))
    with pytest.raises(RelayError, match="Leased, not Done"):
        connection.ask(request, protocol.Done)
    thread.join()


def test_what_follows_a_reply_sees_it_handled(daemon: Daemon, connection: Connection) -> None:
    seen: list[str] = []
    connection.on_event = lambda event: seen.append(type(event).__name__)
    request = protocol.OpenRegion(connection.new_id(), 1, b"")
    opened = protocol.RegionOpened(request.id, 5, 0, 1, 0, 0, 0, 0, 0)
    thread = answering(daemon, opened, protocol.RegionGone(5))

    def then(_: protocol.RegionOpened, __: list[int]) -> None:
        time.sleep(0.05)
        seen.append("then")

    connection.ask_then(request, protocol.RegionOpened, then)
    thread.join()
    connection.close()
    assert seen[0] == "then"
    assert seen[1:] in ([], ["RegionGone"])


def test_descriptors_belong_to_who_asked_and_no_other_stays_open(daemon: Daemon, connection: Connection) -> None:
    memory = os.memfd_create("test")
    before = open_descriptors()
    asked, other, late = unregister(connection), unregister(connection), protocol.Done(10_000)
    thread = answering(daemon, late, protocol.Done(asked.id), fds=(memory, memory))
    fds = connection.ask_then(asked, protocol.Done, lambda _, fds: fds)
    thread.join()
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    for fd in fds:
        os.close(fd)
    thread = answering(daemon, protocol.Done(other.id), fds=(memory,))
    connection.ask(other, protocol.Done)
    thread.join()
    assert open_descriptors() == before
    os.close(memory)


def test_whatever_the_handling_of_a_reply_raises_is_its_callers_and_others_are_answered(
    daemon: Daemon, connection: Connection
) -> None:
    def then(*_: object) -> None:
        raise KeyError("no such column")

    first, second = unregister(connection), unregister(connection)
    thread = answering(daemon, protocol.Done(first.id))
    with pytest.raises(KeyError, match="no such column"):
        connection.ask_then(first, protocol.Done, then, timeout=20)
    thread.join()
    thread = answering(daemon, protocol.Done(second.id))
    connection.ask(second, protocol.Done)
    thread.join()


def test_an_event_that_cannot_be_handled_ends_the_session_and_says_why(daemon: Daemon, connection: Connection) -> None:
    told = threading.Event()

    def on_event(_: object) -> None:
        raise KeyError("no such region")

    connection.on_event, connection.on_gone = on_event, told.set
    thread = answering(daemon, protocol.RegionGone(5))
    with pytest.raises(DaemonGone, match="KeyError: 'no such region'"):
        connection.ask(unregister(connection), protocol.Done)
    thread.join()
    assert told.wait(20)


def test_no_answer_is_a_wait_timeout_and_the_session_goes_on(daemon: Daemon, connection: Connection) -> None:
    with pytest.raises(WaitTimeout, match="did not answer Unregister"):
        connection.ask(unregister(connection), protocol.Done, 0.05)
    daemon.receive()
    request = unregister(connection)
    thread = answering(daemon, protocol.Done(request.id))
    connection.ask(request, protocol.Done)
    thread.join()


def test_the_end_of_a_session_reaches_who_waits_with_the_daemons_reason(daemon: Daemon, connection: Connection) -> None:
    gone = threading.Event()
    connection.on_gone = gone.set

    def refuse() -> None:
        daemon.receive()
        daemon.send(protocol.Failed(0, "violation", "lane 3<-5: completed 19 ahead of head 17"))
        daemon.socket.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    with pytest.raises(DaemonGone, match="closed this session: lane 3<-5"):
        connection.ask(unregister(connection), protocol.Done)
    thread.join()
    assert gone.wait(5)
    with pytest.raises(DaemonGone, match="connect a new Client"):
        connection.check()


def test_garbage_from_the_daemon_ends_the_session(daemon: Daemon, connection: Connection) -> None:
    gone = threading.Event()
    connection.on_gone = gone.set
    daemon.socket.send(b"\xc1")
    assert gone.wait(5)
    with pytest.raises(DaemonGone, match="malformed"):
        connection.check()


def test_a_killed_daemon_is_noticed_though_a_child_of_it_keeps_the_socket(tmp_path: Path) -> None:
    script = """
import os, socket, sys, time
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen()
print("ready", flush=True)
accepted = listener.accept()
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""
    path = tmp_path / "control.sock"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "ready\n"
        gone = threading.Event()
        connection = Connection(path, 5)
        connection.on_gone = gone.set
        child = int(daemon.stdout.readline())
        try:
            daemon.kill()
            assert gone.wait(CHILD_SECONDS)
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)  # orphans come to this process
        with pytest.raises(DaemonGone, match=f"daemon pid {daemon.pid} exited"):
            connection.check()
        connection.close()


def test_a_forked_child_is_told_to_connect_itself(daemon: Daemon, connection: Connection) -> None:
    def use() -> None:
        with pytest.raises(RelayError) as failure:
            connection.check()
        assert failure.value.code is ErrorCode.FORKED
        connection.close()

    assert processes.exit_code(processes.fork(use)) == 0
    request = unregister(connection)
    thread = answering(daemon, protocol.Done(request.id))  # the child's close() has not ended the session
    connection.ask(request, protocol.Done)
    thread.join()


def test_close_ends_the_session_though_a_child_keeps_the_socket(daemon: Daemon, connection: Connection) -> None:
    child = processes.fork(lambda: time.sleep(CHILD_SECONDS))
    connection.close()
    connection.close()
    assert daemon.socket.recv(1) == b""
    os.kill(child, 9)
    assert processes.exit_code(child) == -9
    with pytest.raises(RelayError, match="this Client is closed"):
        connection.ask(unregister(connection), protocol.Done)


def test_sessions_leave_no_descriptor_behind(tmp_path: Path) -> None:
    before = open_descriptors()
    daemon = Daemon(tmp_path / "control.sock")
    for _ in range(3):
        connection = Connection(tmp_path / "control.sock", 5)
        daemon.accept()
        connection.close()
        daemon.socket.close()
    daemon.close()
    assert open_descriptors() == before


def test_what_a_dying_daemon_sent_is_heard_also_if_it_left_requests_unread(
    daemon: Daemon, connection: Connection
) -> None:
    """The kernel says "connection reset" then, and has the packets still."""
    heard: list[object] = []
    gone = threading.Event()
    connection.on_event = heard.append
    connection.on_gone = gone.set
    connection.tell(unregister(connection))
    note = protocol.Notification(7, b"placed", "127.0.0.1:1")
    daemon.send(note)
    daemon.send(note)
    daemon.socket.close()
    assert gone.wait(5)
    assert heard == [note, note]


def test_descriptors_above_a_thousand(daemon: Daemon, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    taken = [os.dup(0) for _ in range(1024)]
    try:
        connection = Connection(tmp_path / "control.sock", 5)
        daemon.accept()
        assert not connection.is_over()
        daemon.socket.close()
        until(lambda: connection.failure is not None, "the hang-up is seen")
        with pytest.raises(DaemonGone, match="closed this session"):
            connection.check()
        connection.close()
    finally:
        close_all(taken)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_late_answer_is_taken_by_what_undoes_it(daemon: Daemon, connection: Connection) -> None:
    seen: list[str] = []
    for late in (lambda *_: seen.append("late"), None):
        request = protocol.LeaseLane(connection.new_id(), 0)
        with pytest.raises(WaitTimeout):
            connection.ask_then(request, protocol.Done, lambda *_: seen.append("then"), 0.05, late=late)
        assert daemon.receive() == request
        daemon.send(protocol.Done(request.id))
    until(lambda: seen == ["late", "then"], "both answers")


def test_who_waits_for_a_notification_hears_of_the_end_even_if_the_next_daemon_is_there_first(
    daemon: Daemon, connection: Connection, tmp_path: Path
) -> None:
    following = Daemon(tmp_path / "following.sock")
    then = Connection(tmp_path / "following.sock", 5)
    notifications = Notifications()
    notifications.attach(connection)

    async def get_async() -> None:
        await notifications.get_async()

    ended: list[BaseException] = []

    def wait(get: Callable[[], object]) -> None:
        try:
            get()
        except Exception as failure:  # noqa: BLE001 - judged below
            ended.append(failure)

    ways = (lambda: notifications.get(None), lambda: notifications.get(60), lambda: asyncio.run(get_async()))
    waiting = [threading.Thread(target=wait, args=[way]) for way in ways]
    for thread in waiting:
        thread.start()
    until(lambda: len(notifications._waiting) + len(notifications._changed._waiters) == 3, "all wait")  # type: ignore[attr-defined]
    daemon.close()
    until(lambda: connection.failure is not None, "the session is over")
    with notifications._changed:  # nobody who waits runs in between
        notifications.end()
        notifications.attach(then)
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    assert [type(failure) for failure in ended] == [DaemonGone] * 3
    with pytest.raises(WaitTimeout, match=r"no notification within 0\.01 s"):
        notifications.get(0.01)
    then.close()
    following.close()
