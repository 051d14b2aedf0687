"""The processes of the soak: two daemons and the engines of each, which can be killed, stopped and started again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helpers import processes, sockets
from helpers.nodes import Node, Nodes

from soak.engine import KINDS

RAILS: Final = 2
ANSWER_S: Final = 60.0
TIMEOUTS: Final = {
    "connect_s": 2,
    "peer_s": 3,
    "settle_s": 0.5,
    "fence_s": 1,
    "drain_s": 3,
    "session_linger_s": 2,
    "predecessor_s": 10,
}


class EngineGone(Exception):
    """The engine process was killed, or detached, before it answered."""


class EngineRefused(Exception):
    """What an engine's call raised."""


@dataclass(eq=False)
class Engine:
    """One place for an engine process. ``epoch`` counts how often its memory was made anew: with another one nothing
    that was asked before says anything about its areas."""

    name: str
    node: int
    rank: int
    route: str
    log: Path
    limit_s: int
    process: processes.Process | None = None
    offers: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    attached: bool = False
    stopped: bool = False
    spawned: int = 0
    _asked: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def start(self) -> None:
        self.process = processes.start(["-m", "soak.engine"], log=self.log, pipes=True, limit_s=self.limit_s)
        self.spawned += 1
        reader = asyncio.StreamReader(limit=1 << 20)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self.process.stdout)
        self._reader = asyncio.create_task(self._read(reader))

    @property
    def ended_alone(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            answer = json.loads(line)
            future = self._asked.pop(answer["n"], None)
            if future is None or future.done():
                continue
            if "error" in answer:
                future.set_exception(EngineRefused(f"{self.name}: {answer['error']}: {answer['text']}"))
            else:
                future.set_result(answer["result"])
        self.epoch += 1
        self._lose()

    def _lose(self) -> None:
        self.attached = False
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(EngineGone(self.name))

    async def ask(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401
        """EngineGone, EngineRefused."""
        process = self.process
        if process is None or process.poll() is not None:
            raise EngineGone(self.name)
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"n": number, "verb": verb, "arguments": arguments}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._lose()
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    async def kill(self) -> None:
        if self.process is None:
            return
        process, self.process, self.stopped = self.process, None, False
        process.send_signal(signal.SIGKILL)
        self.epoch += 1
        if self._reader is not None:
            await self._reader  # until the end of its output, which is its end
        self._lose()
        processes.end(process)

    def stop(self) -> None:
        if self.process is not None:
            self.stopped = True
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            self.stopped = False
            self.process.send_signal(signal.SIGCONT)

    async def end(self) -> int:
        """Lets it detach; its exit code."""
        if self.process is None:
            return 0
        assert self.process.stdin is not None
        self.process.stdin.close()
        process = self.process
        try:
            code = await asyncio.to_thread(process.wait, 30)
        except subprocess.TimeoutExpired:
            code = -1
        await self.kill()
        return code


class Fleet:
    """Two daemons, which keep their ports, and ``engines`` a node."""

    def __init__(self, directory: Path, engines: int, areas: int, limit_s: int, routes: Sequence[str]) -> None:
        self.nodes = Nodes(directory, limit_s=limit_s)
        self.areas = areas
        self.running: list[Node] = []
        self.stopped = [False, False]
        self._opening: set[asyncio.Task[None]] = set()
        self._opened: dict[tuple[Engine, Engine], tuple[int, int]] = {}  # sender and receiver -> their epochs
        self.engines = [
            Engine(
                f"{side}-{rank}",
                node,
                rank,
                routes[(node + rank) % len(routes)],
                directory / f"{side}-{rank}.log",
                limit_s,
            )
            for node, side in enumerate(("prefill", "decode"))
            for rank in range(engines)
        ]

    def of(self, node: int) -> list[Engine]:
        return [engine for engine in self.engines if engine.node == node]

    async def start(self) -> None:
        for port in sockets.free_ports(2):
            start = functools.partial(
                self.nodes.start, RAILS, timeouts=TIMEOUTS, node={"port": port}, relay={"transfers": 128}
            )
            self.running.append(await asyncio.to_thread(start))
        await asyncio.gather(*(engine.start() for engine in self.engines))
        await asyncio.gather(*(self.attach(engine) for engine in self.engines))
        await self.introduce(self.engines)

    async def attach(self, engine: Engine) -> None:
        """To the daemon of its node that runs now."""
        engine.attached = False
        engine.epoch += 1
        node = self.running[engine.node]
        answer = await engine.ask(
            "attach", socket=node.socket, rank=engine.rank, route=engine.route, areas=self.areas, name=engine.name
        )
        engine.offers = answer["offers"]
        engine.attached = True

    async def introduce(self, newcomers: Sequence[Engine]) -> None:
        """Everybody opens the memory of the newcomers, and they that of everybody."""
        pairs = [
            (one, other)
            for one in self.engines
            for other in self.engines
            if one is not other and (one in newcomers or other in newcomers) and one.attached and other.attached
        ]
        await asyncio.gather(*(self._open(one, other) for one, other in pairs))

    async def _open(self, one: Engine, other: Engine) -> None:
        """A daemon that has just come back may not be reachable yet, or go again: the traffic finds out."""
        epochs = one.epoch, other.epoch
        self._opened.pop((one, other), None)
        for attempt in range(8):
            try:
                await one.ask("open", peer=other.name, offers={kind: other.offers[kind] for kind in KINDS})
            except EngineGone:
                return
            except EngineRefused:
                if (one.epoch, other.epoch) != epochs or not one.attached or not other.attached:
                    return
                await asyncio.sleep(0.1 * (attempt + 1))
            else:
                self._opened[one, other] = epochs
                return

    def know_each_other(self, one: Engine, other: Engine) -> bool:
        """Whether ``one`` has opened the present memory of ``other``."""
        return self._opened.get((one, other)) == (one.epoch, other.epoch)

    def lost(self, one: Engine, other: Engine) -> None:
        """A transfer ended because the peer or its region was gone: it is opened again, as an engine would."""
        if self.know_each_other(one, other) and one.attached and other.attached:
            del self._opened[one, other]
            task = asyncio.create_task(self._open(one, other))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def restart_engine(self, engine: Engine) -> None:
        await engine.kill()
        await engine.start()
        await self.attach(engine)
        await self.introduce([engine])

    async def kill_daemon(self, number: int) -> None:
        node = self.running[number]
        for engine in self.of(number):
            engine.attached = False
        node.process.send_signal(signal.SIGKILL)
        node.process.wait(10)
        self.nodes.started.remove(node)  # its successor clears up after it, and has the same log

    async def restart_daemon(self, number: int) -> None:
        """A new one with the same port, and the node's engines attached to it."""
        self.stopped[number] = False
        self.running[number] = await asyncio.to_thread(self.nodes.again, self.running[number])
        own = self.of(number)
        await asyncio.gather(*(self._attach_again(engine) for engine in own))
        await self.introduce([engine for engine in own if engine.attached])

    async def _attach_again(self, engine: Engine) -> None:
        with contextlib.suppress(EngineGone):
            await self.attach(engine)

    def stop_daemon(self, number: int) -> None:
        self.stopped[number] = True
        self.running[number].process.send_signal(signal.SIGSTOP)

    def resume_daemon(self, number: int) -> None:
        self.stopped[number] = False
        self.running[number].process.send_signal(signal.SIGCONT)

    async def end(self) -> list[str]:
        """Problems."""
        codes = await asyncio.gather(*(engine.end() for engine in self.engines))
        problems = [
            f"{engine.name} ended with {code}" for engine, code in zip(self.engines, codes, strict=True) if code
        ]
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # logs, of which what matters is in the error
                await asyncio.to_thread(self.nodes.close)
        except AssertionError as failure:
            problems.append(str(failure))
        return problems

    async def abandon(self) -> None:
        for engine in self.engines:
            await engine.kill()
        for node in self.nodes.started:
            processes.end(node.process)


@contextlib.asynccontextmanager
async def fleet(
    directory: Path, *, engines: int, areas: int, limit_s: int, routes: Sequence[str]
) -> AsyncIterator[Fleet]:
    made = Fleet(directory, engines, areas, limit_s, routes)
    try:
        await made.start()
        yield made
    finally:
        await made.abandon()
        for name in os.listdir("/dev/shm"):
            if any(name.startswith(f"railrelay.{node.instance}.") for node in made.nodes.started):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"/dev/shm/{name}")
