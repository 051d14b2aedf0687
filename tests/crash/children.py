"""The processes that a campaign kills: daemons and engines, forked from the campaign itself, which has imported all
that they need and has no threads. A fork costs milliseconds where a start costs half a second of CPU time."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from crash.streams import LIMIT_S, STREAMS, Content, Hang, Receiver, Sender
from railrelay.client import Client, ConnectError, DaemonGone, WaitTimeout
from railrelay.daemon import main as daemon_main
from railrelay.shm_layout import faults

_PDEATHSIG: Final = 1
_LOOK_S: Final = 0.25


@dataclass
class Child:
    """A process of the campaign. ``reports``: lines of JSON come from it."""

    name: str
    pid: int
    pidfd: int
    reports: int
    commands: int
    order: mmap.mmap
    log: Path
    unread: bytes = b""
    reaped: bool = False

    def arm(self, text: str) -> None:
        """It kills itself at that fault point; "" for none."""
        _write(self.order, text)
        self.signal(signal.SIGUSR1)

    def has_armed(self) -> bool:
        """Whether it has done what arm() said."""
        return self.order[-1] == 1

    def signal(self, number: int) -> None:
        if self.reaped:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def command(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.commands, f"{text}\n".encode())

    def take_reports(self) -> list[dict[str, Any]]:
        """Those that have come whole."""
        with contextlib.suppress(BlockingIOError):
            while more := os.read(self.reports, 65536):
                self.unread += more
        *whole, self.unread = self.unread.split(b"\n")
        return [json.loads(line) for line in whole]

    def reap(self) -> int:
        """Waits for its end; negative: the signal that ended it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.reaped = True
        for fd in (self.pidfd, self.reports, self.commands):
            os.close(fd)
        self.order.close()
        return code

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def _write(order: mmap.mmap, text: str) -> None:
    order.seek(0)
    order.write(text.encode().ljust(len(order), b"\0"))


def _obey(order: mmap.mmap) -> None:
    faults.arm(bytes(order[:-1]).rstrip(b"\0").decode())
    order[-1] = 1


def fork(name: str, log: Path, order_text: str, work: Callable[[int, int], int]) -> Child:
    """``work(reports, commands)`` in a new process, which is armed from the start; it ends with what that returns."""
    order = mmap.mmap(-1, 256)
    _write(order, order_text)
    reports, reporting = os.pipe()
    commanded, commands = os.pipe()
    os.set_blocking(reports, False)
    pid = os.fork()
    if pid:
        os.close(reporting)
        os.close(commanded)
        return Child(name, pid, os.pidfd_open(pid), reports, commands, order, log)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        keep = {0, 1, 2, output, reporting, commanded}
        for fd in [int(fd) for fd in os.listdir("/proc/self/fd")]:
            if fd not in keep:
                with contextlib.suppress(OSError):
                    os.close(fd)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        signal.signal(signal.SIGUSR1, lambda *_: _obey(order))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        faults.arm(order_text)
        code = work(reporting, commanded)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


def daemon(config: Path) -> Callable[[int, int], int]:
    def work(reporting: int, _: int) -> int:
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)  # if the campaign is killed, it cleans up
        sys.argv = ["railrelayd", "--config", str(config), "--ready-fd", str(reporting)]
        return daemon_main.main()

    return work


def engine(number: int, socket: Path, directory: Path, content: Content) -> Callable[[int, int], int]:
    return lambda reporting, commanded: Engine(number, socket, directory, content, reporting).serve(commanded)


class Engine:
    """An engine process: a client, and a thread for each end of a stream that it has."""

    def __init__(self, number: int, socket: Path, directory: Path, content: Content, reporting: int) -> None:
        self._number = number
        self._socket = socket
        self._directory = directory
        self._content = content
        self._reporting = reporting
        self._stopped = False
        self._running = threading.Event()
        self._running.set()
        self._paused = threading.Semaphore(0)

    def report(self, kind: str, **facts: object) -> None:
        os.write(self._reporting, json.dumps({"kind": kind, "engine": self._number, **facts}).encode() + b"\n")

    def serve(self, commanded: int) -> int:
        client = self._connected()
        mine = [stream for stream in STREAMS if self._number in (stream.sender, stream.receiver)]
        receivers = [
            Receiver(client, stream, self._directory, self._content, self.report)
            for stream in mine
            if stream.receiver == self._number
        ]
        senders = [
            Sender(client, stream, self._directory, self._content, self.report)
            for stream in mine
            if stream.sender == self._number
        ]
        works: list[Callable[[], None]] = [lambda: self._take_notes(client, receivers)]
        works += [lambda end=end: end.run(lambda: self._stopped) for end in receivers]  # type: ignore[misc]
        works += [lambda end=end: end.run(self._between_rounds) for end in senders]  # type: ignore[misc]
        threads = [threading.Thread(target=self._guarded, args=[work], daemon=True) for work in works]
        for thread in threads:
            thread.start()
        with open(commanded) as commands:
            for line in commands:
                match line.strip():
                    case "pause":
                        self._running.clear()
                        for _ in senders:
                            if not self._paused.acquire(timeout=LIMIT_S):
                                raise Hang("a sender does not end its round")
                        self.report("paused", attachments=client.attachments)
                    case "resume":
                        self._running.set()
                    case "hurry" | "calm" as mood:
                        for sender in senders:
                            sender.hurried = mood == "hurry"
                    case "end":
                        break
        self._stopped = True
        self._running.set()
        for thread in threads:
            thread.join(LIMIT_S)
            if thread.is_alive():
                raise Hang(f"thread {thread.name} does not end")
        client.close()
        return 0

    def _connected(self) -> Client:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                return Client.connect(self._socket, rank=self._number % 2, name=f"engine-{self._number}")
            except ConnectError as failure:
                if time.monotonic() > deadline:
                    raise Hang(f"engine {self._number} cannot attach: {failure}") from None
                time.sleep(0.02)

    def _between_rounds(self) -> bool:
        if not self._running.is_set():
            self._paused.release()
            self._running.wait()
        return self._stopped

    def _take_notes(self, client: Client, receivers: list[Receiver]) -> None:
        while not self._stopped:
            try:
                note = client.receiver.notifications.get(_LOOK_S)
            except WaitTimeout:
                continue
            except DaemonGone:
                client.wait_attached(LIMIT_S)
                continue
            for receiver in receivers:
                receiver.noted(int(note.payload))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001
            if not self._stopped:
                text = traceback.format_exc()
                print(text, file=sys.stderr, flush=True)
                self.report("failed", text=text[-3000:])
