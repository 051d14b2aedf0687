"""What the engines of a campaign do all the time: streams of transfers, every byte of which is checked.

A stream is a sender thread in one engine and a receiver thread in another. They agree over datagram sockets, since
either of them may be replaced by a new process at any moment. The destination holds known content (a canary) whenever
no transfer is open: what lands then is a stale byte. A transfer is open from `begin` to the word that it ended."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from railrelay.client import (
    ArgumentError,
    Buffer,
    Client,
    DaemonGone,
    Region,
    RelayError,
    RemoteRegion,
    Result,
    Transfer,
    TransferError,
    Unsettled,
    WaitTimeout,
)

PAGE: Final = 4096
PAGES: Final = 192
NBYTES: Final = PAGE * PAGES
LIMIT_S: Final = 20.0  # of every wait: longer is a hang
_REPEAT_S: Final = 0.25
_PAUSE_S: Final = 0.005

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Message = dict[str, Any]
Report = Callable[..., None]


@dataclass(frozen=True)
class Stream:
    number: int
    sender: int  # engines
    receiver: int
    source: str  # "shared" or "private" memory
    destination: str


# Engines 0 and 1 are clients of daemon 0, 2 and 3 of daemon 1; i and i + 2 have rank i % 2, and so the same rail.
STREAMS: Final = (
    Stream(0, 0, 2, "shared", "shared"),  # straight from the own rail
    Stream(1, 1, 3, "private", "private"),  # lane, bounce memory
    Stream(2, 2, 1, "shared", "private"),  # lane of the other rail, bounce memory
    Stream(3, 0, 1, "shared", "shared"),  # local route
    Stream(4, 3, 0, "private", "shared"),  # lane of the other rail
)


class Hang(Exception):
    """Something did not happen within LIMIT_S."""


class Content:
    """Pages that both ends can make from a number."""

    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._words = generator.integers(0, 1 << 63, NBYTES // 8, dtype=np.uint64)

    def of(self, number: int) -> Bytes:
        return (self._words ^ np.uint64(number * 0x9E3779B97F4A7C15 % (1 << 64))).view(np.uint8)


def plan(tag: int) -> tuple[Words, Words]:
    """(source pages, destination pages) of the transfer with this tag."""
    generator = np.random.default_rng(tag)
    count = int(generator.choice([1, 7, 60, 120]))
    return (
        generator.permutation(PAGES)[:count].astype(np.uint64),
        generator.permutation(PAGES)[:count].astype(np.uint64),
    )


def memory_of(client: Client, kind: str) -> tuple[Buffer | Region, Bytes]:
    if kind == "shared":
        buffer = client.alloc(NBYTES)
        return buffer, buffer.array
    array = np.zeros(NBYTES, np.uint8)
    return client.register(array), array


def again(client: Client, work: Callable[[], Any]) -> Any:  # noqa: ANN401
    """``work()``, as often as the daemon exits meanwhile."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            return work()
        except (DaemonGone, WaitTimeout) as failure:
            if time.monotonic() > deadline:
                raise Hang(f"{failure}") from None
            client.wait_attached(LIMIT_S)
            time.sleep(_PAUSE_S)


class Endpoint:
    """One end of a stream on a datagram socket of the campaign's directory."""

    def __init__(self, directory: Path, stream: Stream, end: str) -> None:
        self._directory = directory
        self._stream = stream
        path = directory / f"{stream.number}.{end}"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))

    def send(self, end: str, message: Message) -> None:
        """The other process may be dead, or not born yet: whoever waits for its answer sends again."""
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps(message).encode(), str(self._directory / f"{self._stream.number}.{end}"))

    def receive(self, timeout_s: float) -> Message | None:
        self._socket.settimeout(max(timeout_s, 0.001))
        try:
            message: Message = json.loads(self._socket.recv(65536))
        except TimeoutError:
            return None
        return message


class Sender:
    """The sending thread of a stream. ``report(kind, **facts)`` goes to the campaign."""

    def __init__(self, client: Client, stream: Stream, directory: Path, content: Content, report: Report) -> None:
        self._client = client
        self._stream = stream
        self._content = content
        self._report = report
        self._random = random.Random()
        self._endpoint = Endpoint(directory, stream, "sender")
        self._identity = f"{os.getpid()}.{time.monotonic_ns()}"
        self.hurried = False  # every transfer has a time-out that it will not keep
        self._asked = 0
        self._began = 0.0
        self._memory, self._array = again(client, lambda: memory_of(client, stream.source))
        self._remote: RemoteRegion | None = None

    def run(self, stopping: Callable[[], bool]) -> None:
        while not stopping():
            self._began = time.monotonic()
            try:
                remote = self._open()
                while not stopping() and self._round(remote):
                    time.sleep(_PAUSE_S)
            except (DaemonGone, WaitTimeout):
                self._client.wait_attached(LIMIT_S)

    def _ask(self, verb: str, **facts: object) -> Message:
        """An answer of the receiver, whichever process that is by now."""
        self._asked += 1
        request = {"verb": verb, "of": self._identity, "number": self._asked, **facts}
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            self._endpoint.send("receiver", request)
            until = time.monotonic() + _REPEAT_S
            while (left := until - time.monotonic()) > 0:
                answer = self._endpoint.receive(left)
                if answer and (answer["of"], answer["number"]) == (self._identity, self._asked):
                    return answer
        raise Hang(f"the receiver does not answer {verb} within {LIMIT_S:g} s")

    def _open(self) -> RemoteRegion:
        deadline = time.monotonic() + LIMIT_S
        while True:
            hello = self._ask("hello")
            try:
                remote = self._client.open(bytes.fromhex(hello["offer"]), 2.0)
                break
            except (DaemonGone, WaitTimeout):
                raise
            except RelayError as failure:  # the receiver or its daemon has been replaced since
                if time.monotonic() > deadline:
                    raise Hang(f"the receiver's offer cannot be opened: {failure}") from None
                time.sleep(_PAUSE_S)
        if self._remote is not None and self._remote is not remote:
            self._remote.close()
        self._remote = remote
        return remote

    def _round(self, remote: RemoteRegion) -> bool:
        """One transfer; whether the next one may use the same offer."""
        self._began = time.monotonic()
        begun = self._ask("begin")
        tag = begun.get("tag", 0)
        if not tag:  # another receiver by now
            return False
        self._array[:] = self._content.of(tag)
        taken, put = plan(tag)
        deed = "late" if self.hurried else self._random.choices(["wait", "cancel", "late"], [85, 10, 5])[0]
        note = bool(self._random.getrandbits(1))
        try:
            transfer = self._client.write(
                remote,
                taken * np.uint64(PAGE) + np.uint64(self._memory.address),
                put * np.uint64(PAGE) + np.uint64(remote.address),
                PAGE,
                tag=tag,
                timeout=0.001 if deed == "late" else LIMIT_S / 2,
                notify=b"%d" % tag if note else None,
            )
        except ArgumentError as failure:
            if failure.code not in ("bad_region", "bad_argument"):
                raise
            return self._over(tag)
        except (DaemonGone, WaitTimeout):
            return self._void(tag)  # nothing of it was published, or the process that knows is gone
        except RelayError:
            return self._over(tag)
        if deed == "cancel":
            time.sleep(self._random.uniform(0, 0.002))
            with contextlib.suppress(Unsettled):
                transfer.cancel(timeout=1.0)
        return self._end(transfer, tag, note)

    def _end(self, transfer: Transfer, tag: int, note: bool) -> bool:
        try:
            transfer.wait(LIMIT_S)
        except Unsettled as failure:
            return self._settle(transfer, tag, failure.result)
        except TransferError as failure:
            self._report("ended", how=failure.result.name)
            return self._over(tag) and failure.result in (Result.CANCELLED, Result.ABORTED, Result.TIMED_OUT)
        except WaitTimeout as failure:
            raise Hang(f"{failure}") from None
        answer = self._ask("check", tag=tag, note=note)
        if answer["found"] == "right":
            self._report("round", stream=self._stream.number, began=self._began, at=time.monotonic())
        return bool(answer["found"] != "unknown")

    def _settle(self, transfer: Transfer, tag: int, result: Result) -> bool:
        self._report("ended", how=f"unsettled {result.name}")
        if result is not Result.DAEMON_GONE:
            with contextlib.suppress(Unsettled, DaemonGone):
                transfer.wait_settled(3.0)
                return self._over(tag)
        return self._void(tag)

    def _over(self, tag: int) -> bool:
        """It is settled."""
        return bool(self._ask("over", tag=tag)["found"] != "unknown")

    def _void(self, tag: int) -> bool:
        """Only the receiver can have it settled; a copy of this process has ended once it is attached again."""
        self._client.wait_attached(LIMIT_S)
        self._ask("abort", tag=tag)
        return False


class Receiver:
    """The receiving thread of a stream."""

    def __init__(self, client: Client, stream: Stream, directory: Path, content: Content, report: Report) -> None:
        self._client = client
        self._stream = stream
        self._content = content
        self._report = report
        self._random = random.Random()
        self._endpoint = Endpoint(directory, stream, "receiver")
        self._memory: Buffer | Region
        self._array: Bytes
        self._canary = 1
        self._open = 0  # tag
        self._noted: set[int] = set()
        self._peer = ""
        self._answered: Message = {}
        self._take_memory()

    def noted(self, tag: int) -> None:
        """The client has a note of it."""
        self._noted.add(tag)

    def run(self, stopping: Callable[[], bool]) -> None:
        while not stopping():
            request = self._endpoint.receive(_REPEAT_S)
            if request is None:
                continue
            if (request["of"], request["number"]) != (self._answered.get("of"), self._answered.get("number")):
                answer = getattr(self, f"_{request['verb']}")(request)
                self._answered = {"of": request["of"], "number": request["number"], **answer}
            self._endpoint.send("sender", self._answered)
            if request["verb"] == "begin" and self._open and self._random.random() < 0.05:
                time.sleep(self._random.uniform(0, 0.003))
                self._abort_open()

    # ---- requests of the sender ----

    def _hello(self, request: Message) -> Message:
        if self._open:  # its sender died or does not know how it ended
            self._abort_open()
        self._peer = request["of"]
        if self._random.random() < 0.1:
            self._check_canary("before the memory is given back")
            self._give_back()
            self._take_memory()
        self._check_canary("at hello")
        offer = again(self._client, self._memory.offer)
        return {"offer": offer.hex()}

    def _begin(self, request: Message) -> Message:
        if request["of"] != self._peer:
            return {"tag": 0}
        if self._open:
            self._abort_open()
        self._check_canary("at begin")
        self._open = self._random.getrandbits(63) | 1
        return {"tag": self._open}

    def _check(self, request: Message) -> Message:
        tag = request["tag"]
        if request["of"] != self._peer or tag != self._open:
            return {"found": "unknown"}
        self._open = 0
        expected = self._content.of(self._canary).copy()
        taken, put = plan(tag)
        expected.reshape(PAGES, PAGE)[put] = self._content.of(tag).reshape(PAGES, PAGE)[taken]
        right = self._compare(expected, f"after done of {tag:#x}")
        if request["note"]:
            deadline = time.monotonic() + LIMIT_S
            while tag not in self._noted and time.monotonic() < deadline:
                time.sleep(0.001)
            if tag not in self._noted:
                raise Hang(f"no note of transfer {tag:#x}, which is done")
        self._noted.clear()
        self._new_canary()
        return {"found": "right" if right else "wrong"}

    def _over(self, request: Message) -> Message:
        if request["of"] != self._peer or request["tag"] != self._open:
            return {"found": "unknown"}
        self._open = 0
        self._new_canary()
        return {"found": "settled"}

    def _abort(self, request: Message) -> Message:
        if request["tag"] == self._open:
            self._abort_open()
        return {"found": "settled"}

    # ---- memory ----

    def _abort_open(self) -> None:
        tag, self._open = self._open, 0
        count = self._client.attachments

        def abort() -> None:
            if self._client.attachments == count:  # else all that was under way ended with the daemon
                try:
                    self._client.receiver.abort(tag, LIMIT_S / 2)
                except Unsettled as failure:
                    raise WaitTimeout(failure.code, failure.text) from None

        again(self._client, abort)
        self._new_canary()

    def _take_memory(self) -> None:
        self._memory, self._array = again(self._client, lambda: memory_of(self._client, self._stream.destination))
        self._new_canary()

    def _give_back(self) -> None:
        memory = self._memory
        again(self._client, lambda: memory.close(LIMIT_S) if isinstance(memory, Buffer) else memory.unregister(LIMIT_S))

    def _new_canary(self) -> None:
        self._canary = self._random.getrandbits(62) << 1
        self._array[:] = self._content.of(self._canary)

    def _check_canary(self, when: str) -> None:
        if not self._compare(self._content.of(self._canary), when):
            self._new_canary()

    def _compare(self, expected: Bytes, when: str) -> bool:
        wrong = int(np.count_nonzero(self._array != expected))
        if wrong:
            pages = np.flatnonzero((self._array != expected).reshape(PAGES, PAGE).any(axis=1))
            self._report("wrong", stream=self._stream.number, bytes=wrong, when=when, pages=pages[:16].tolist())
        return not wrong
