"""Rails with the emulated NIC: one helper process each, started with the daemon, that maps lanes and regions and copies
between them. Main thread only.

A helper that ends takes its rail down: nothing that it had posted can land any more, and transfers over the rail fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Message
from railrelay.daemon.config import ConfigError, Rail
from railrelay.daemon.descriptors import OWN, discard
from railrelay.daemon.emulated_helper import (
    MESSAGE_BYTES,
    AddMemory,
    Ready,
    Refused,
    RemoveMemory,
    encode,
    reply,
)

READY_S: Final = 60.0  # a GPU's context may take seconds
MAX_MEMORIES: Final = (1 << 23) - 1  # made-up addresses have 23 bits for their number
EXIT_S: Final = 5.0

log = logging.getLogger("railrelay")


@dataclass(frozen=True)
class Source:
    """Memory for a helper, by its address in the data plane. The descriptor is the caller's."""

    base: int
    nbytes: int
    kind: str = "host"  # or "vmm", "ipc"
    offset: int = 0
    fd: int = -1
    handle: bytes = b""
    handle_bytes: int = 0
    wipe: bool = False
    pid: int = OWN  # of the process that the descriptor came from


class Helper:
    """The helper process of one rail. Closes idempotently."""

    def __init__(self, rail: int, name: str, options: Rail, ring_fd: int, kick_fd: int) -> None:
        self.rail = rail
        self.name = name
        self.memory = options.memory
        self.device = ""
        self.failure = ""  # why it is of no use any more
        self._option = f"rail[{rail}].{'gpu' if options.memory == 'device' else 'nic'}"
        self._turn = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Message] = self._loop.create_future()  # first: that it is ready
        self._on_end: Callable[[Helper], None] | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        fds = (ring_fd, kick_fd, theirs.fileno())
        command = [sys.executable, "-P", "-m", "railrelay.daemon.emulated_helper", "--rail", name]
        for option, value in zip(("ring-fd", "kick-fd", "socket-fd", "daemon"), (*fds, os.getpid()), strict=True):
            command += [f"--{option}", str(value)]
        if options.memory == "device":
            command += ["--gpu", str(options.gpu), "--copies", options.copies]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._ended)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    async def start(self, on_end: Callable[[Helper], None]) -> None:
        """``on_end(helper)`` comes once if the process ends before close(). ConfigError."""
        try:
            async with asyncio.timeout(READY_S):
                answer = await self._answer
        except TimeoutError:
            answer = Refused(f"its helper process was not ready within {READY_S:g} s")
        if not isinstance(answer, Ready):
            text = answer.text if isinstance(answer, Refused) else "its helper process does not start"
            raise ConfigError(f"{self._option}: {text}")
        self.device = answer.device
        self._on_end = on_end
        if self.failure:  # it has ended while others were waited for
            raise ConfigError(f"{self._option}: {self.failure}")
        log.info("rail %s: emulated NIC, helper pid %d%s", self.name, self.pid, self.device and f", {self.device}")

    async def add(self, memory: int, source: Source) -> None:
        """RelayError if the helper cannot map it. Nothing happens once the rail is down."""
        message = AddMemory(
            memory, source.base, source.nbytes, source.kind, source.offset, source.handle, source.handle_bytes,
            source.wipe,
        )  # fmt: skip
        await self._ask(message, [source.fd] if source.fd >= 0 else [], source.pid)

    async def remove(self, memory: int) -> None:
        """Nothing posted may use it any more. Nothing happens if the helper does not know it."""
        with contextlib.suppress(RelayError):
            await self._ask(RemoveMemory(memory), [])

    async def _ask(self, message: Message, fds: Sequence[int], pid: int = OWN) -> None:
        kept = [os.dup(fd) for fd in fds]
        # It goes on if its waiter is cancelled: a late answer must not be taken for the next one.
        answer = await asyncio.shield(self._loop.create_task(self._exchange(message, kept, pid)))
        if isinstance(answer, Refused) and not self.failure:
            raise RelayError(ErrorCode.NO_MEMORY, f"rail {self.name}, emulated NIC: {answer.text}")

    async def _exchange(self, message: Message, fds: Sequence[int], pid: int) -> Message:
        try:
            async with self._turn:  # one at a time: the answers need no numbers, and the socket never fills
                if self.failure:
                    return Refused(self.failure)
                self._answer = self._loop.create_future()
                with contextlib.suppress(OSError):  # it is ending, and the answer says so
                    socket.send_fds(self._socket, [encode(message)], fds)
                return await self._answer
        finally:
            discard(fds, pid)

    def _readable(self) -> None:
        try:
            packet = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._loop.remove_reader(self._socket.fileno())  # its pidfd says that it has ended
        elif not self._answer.done():
            try:
                self._answer.set_result(reply(packet))
            except msgspec.MsgspecError as failure:
                self._answer.set_result(Refused(str(failure)))

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        self.failure = f"its helper process (pid {self.pid}) {how}"
        if not self._answer.done():
            self._answer.set_result(Refused(self.failure))
        if self._on_end is not None:
            self._on_end(self)

    def close(self) -> None:
        if self._pidfd < 0:
            return
        self._on_end = None
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        if not self.failure and not poller.poll(EXIT_S * 1000):
            self._process.kill()
        self._process.wait()
        os.close(self._pidfd)
        self._pidfd = -1


class Helpers:
    """The helpers of all rails that have one, and the numbers of memory that they know. Closes idempotently."""

    def __init__(self) -> None:
        self._by_rail: dict[int, Helper] = {}
        self._memories: set[int] = set()  # numbers in use
        self._latest_memory = 0

    async def start(
        self, rails: Sequence[Rail], names: Sequence[str], fds: Callable[[int], tuple[int, int]],
        on_end: Callable[[Helper], None],
    ) -> None:  # fmt: skip
        """ConfigError, OSError."""
        for number, (rail, name) in enumerate(zip(rails, names, strict=True)):
            if rail.nic == "emulated":
                self._by_rail[number] = Helper(number, name, rail, *fds(number))
        for helper in self._by_rail.values():
            await helper.start(on_end)

    def get(self, rail: int) -> Helper | None:
        return self._by_rail.get(rail)

    def device(self, rail: int) -> str:
        """UUID of the GPU whose memory the rail's lanes are; "" if they are host memory."""
        helper = self._by_rail.get(rail)
        return helper.device if helper is not None else ""

    def new_memory(self) -> int:
        """A number that has not been in use for the longest time. RelayError LIMIT."""
        if len(self._memories) == MAX_MEMORIES:
            raise RelayError(
                ErrorCode.LIMIT,
                f"{MAX_MEMORIES} pieces of memory (lanes, bounce memory and regions of all clients) are registered with"
                " the emulated NICs, and no more can be; unregister regions, or end clients",
            )
        number = self._latest_memory % MAX_MEMORIES + 1
        while number in self._memories:
            number = number % MAX_MEMORIES + 1
        self._memories.add(number)
        self._latest_memory = number
        return number

    def free_memory(self, number: int) -> None:
        """That no helper knows (any more). Idempotent."""
        self._memories.discard(number)

    async def add(self, memory: int, source: Source, rail: int | None = None) -> None:
        """To one rail's helper, or to all that can reach such memory. RelayError: remove() it again."""
        for helper in self._that_reach(source.kind, rail):
            await helper.add(memory, source)

    async def remove(self, memory: int, kind: str = "host", rail: int | None = None) -> None:
        for helper in self._that_reach(kind, rail):
            await helper.remove(memory)
        self.free_memory(memory)

    def _that_reach(self, kind: str, rail: int | None) -> list[Helper]:
        found = self._by_rail.values() if rail is None else filter(None, [self._by_rail.get(rail)])
        return [helper for helper in found if kind == "host" or helper.memory == "device"]

    def close(self) -> None:
        for helper in self._by_rail.values():
            helper.close()


def made_up_base(memory: int) -> int:
    """The address under which the data plane knows memory that is not mapped in the daemon; see plane.h, rr_mapping."""
    return 1 << 63 | memory << 40
