"""Ends of reliable connections in processes of their own, on any libibverbs (verbs_end.c)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Final

from helpers import verbs_stand_in
from helpers.processes import TESTS

SOURCE: Final = TESTS / "helpers" / "verbs_end.c"
POLL_S: Final = 60.0
WRONG_KEY: Final = 1000
READ_ONLY, LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ = 0, 1, 2, 4
ALL_RIGHTS: Final = LOCAL_WRITE | REMOTE_WRITE | REMOTE_READ
SIGNALED, FENCE, SOLICITED, INLINE = 2, 1, 4, 8
RESET, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6
QP_FATAL, QP_ACCESS_ERR, CQ_ERR, PORT_ACTIVE, PORT_ERR = 1, 3, 0, 9, 10
DOWN, ACTIVE = 1, 4


class Operation(IntEnum):
    WRITE = 0
    WRITE_IMM = 1
    SEND = 2
    SEND_IMM = 3
    READ = 4


class Status(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13


class VerbsError(Exception):
    def __init__(self, error: int, bad: int | None) -> None:
        super().__init__(os.strerror(error))
        self.errno = error
        self.bad = bad  # of post: index of the work request that was refused


@dataclass(frozen=True)
class Memory:
    index: int
    address: int
    rkey: int
    nbytes: int

    def piece(self, offset: int = 0, nbytes: int | None = None, *, wrong_key: bool = False) -> tuple[int, int, int]:
        """An entry of a scatter/gather list."""
        return (
            self.index + WRONG_KEY * wrong_key,
            offset,
            self.nbytes - offset if nbytes is None else nbytes,
        )


@dataclass(frozen=True)
class Queue:
    index: int
    number: int


@dataclass(frozen=True)
class Completion:
    id: int
    status: Status
    opcode: int
    nbytes: int
    imm: int | None

    @property
    def short(self) -> tuple[int, str]:
        return self.id, self.status.name


@dataclass(frozen=True)
class Work:
    """By default a signaled write."""

    pieces: Sequence[tuple[int, int, int]] = ()
    address: int = 0
    rkey: int = 0
    operation: Operation = Operation.WRITE
    id: int = 0
    flags: int = SIGNALED
    imm: int = 0


def compiled(directory: Path) -> Path:
    target = directory / "verbs_end"
    command = [os.environ.get("CC", "cc"), *verbs_stand_in.flags(), "-o", str(target), str(SOURCE), "-libverbs"]
    subprocess.run(command, check=True, timeout=300)
    return target


class End:
    """A process with one device open. Ends with the context, and may be killed before."""

    def __init__(self, program: Path, device: str, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            [str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            text=True,
            bufsize=1,
        )
        gid, mtu = self.ask("open", device)
        self.gid, self.mtu = gid, int(mtu)

    def ask(self, *words: object) -> list[str]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        kind, *found = self.process.stdout.readline().split() or ["gone"]
        if kind == "errno":
            raise VerbsError(int(found[0]), int(found[1]) if len(found) > 1 else None)
        assert kind == "ok", (words, kind)
        return found

    # ---- objects ----

    def memory(self, nbytes: int, rights: int = ALL_RIGHTS, seed: int | None = None) -> Memory:
        index, address, rkey = map(int, self.ask("memory", nbytes, rights))
        made = Memory(index, address, rkey, nbytes)
        if seed is not None:
            self.fill(made, seed)
        return made

    def exported(self, nbytes: int, address: int, rights: int = ALL_RIGHTS) -> Memory:
        """Registered from a descriptor (dma-buf), at an address that means nothing to the process."""
        index, address, rkey = map(int, self.ask("exported", nbytes, rights, address))
        return Memory(index, address, rkey, nbytes)

    def queue(self, sends: int = 128, receives: int = 64, entries: int = 512, sges: int = 4, inline: int = 64) -> Queue:
        index, number = map(int, self.ask("queue", sends, receives, entries, sges, inline))
        return Queue(index, number)

    def connect(
        self, queue: Queue, other: End, number: int, timeout: int = 17, retries: int = 6, rnr: int = 7, mtu: int = 0
    ) -> None:
        self.ask("connect", queue.index, number, other.gid, mtu or self.mtu, timeout, retries, rnr)

    def only_init(self, queue: Queue) -> None:
        self.ask("connect", queue.index, 0, self.gid, 0, 0, 0, 0)

    def modify(self, queue: Queue, state: int, mask: int = 0) -> None:
        self.ask("modify", queue.index, state, mask)

    def state(self, queue: Queue) -> int:
        return int(self.ask("state", queue.index)[0])

    def port_state(self) -> int:
        return int(self.ask("port")[0])

    def deregister(self, memory: Memory) -> None:
        self.ask("deregister", memory.index)

    def destroy(self, queue: Queue) -> None:
        self.ask("destroy", queue.index)

    # ---- memory ----

    def fill(self, memory: Memory, seed: int, offset: int = 0, nbytes: int | None = None) -> int:
        return int(self.ask("fill", *memory.piece(offset, nbytes), seed)[0])

    def sum(self, memory: Memory, offset: int = 0, nbytes: int | None = None) -> int:
        """The same for equal bytes, wherever they are."""
        return int(self.ask("sum", *memory.piece(offset, nbytes))[0])

    # ---- work ----

    def post(self, queue: Queue, *works: Work) -> None:
        """As one list."""
        for work in works:
            pieces = [value for piece in work.pieces for value in piece]
            fixed = (int(work.operation), work.id, work.flags, work.imm, work.address, work.rkey, len(work.pieces))
            self.ask("work", *fixed, *pieces)
        self.ask("post", queue.index)

    def receive(self, queue: Queue, *pieces: tuple[int, int, int], id: int = 0) -> None:
        self.ask("receive", queue.index, id, len(pieces), *(value for piece in pieces for value in piece))

    def poll(self, queue: Queue, count: int = 1, limit_s: float = POLL_S) -> list[Completion]:
        """Fewer than ``count`` if there are no more within the limit."""
        found = []
        for entry in self.ask("poll", queue.index, count, int(limit_s * 1000)):
            number, status, opcode, nbytes, imm, has_imm, _ = map(int, entry.split(","))
            found.append(Completion(number, Status(status), opcode, nbytes, imm if has_imm else None))
        return found

    def arm(self, queue: Queue, *, solicited: bool = False) -> None:
        self.ask("arm", queue.index, int(solicited))

    def event(self, queue: Queue, limit_s: float) -> bool:
        """A completion event, acknowledged at once."""
        return self.ask("event", queue.index, int(limit_s * 1000)) == ["1"]

    def asynchronous(self, limit_s: float = POLL_S) -> int | None:
        """The next event of the device, acknowledged at once."""
        found = int(self.ask("asynchronous", int(limit_s * 1000))[0])
        return None if found < 0 else found

    # ---- the end ----

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            if self.process.poll() is None:
                self.ask("close")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        assert self.process.wait(60) in (0, -signal.SIGKILL)  # a sanitizer has its own codes

    def __enter__(self) -> End:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.close()
