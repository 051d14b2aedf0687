"""Engine processes: children that attach to a daemon and do what the test asks, and that can be stopped and killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helpers import processes
from helpers.nodes import Node
from helpers.processes import Process
from helpers.waiting import until

ANSWER_S: Final = 60.0


class EngineError(Exception):
    """What the engine's call raised: ``kind`` is the class, ``code`` that of a RelayError."""

    def __init__(self, kind: str, code: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.code = code
        self.text = text


@dataclass
class Engine:
    process: Process
    log: Path
    forked: list[int] = field(default_factory=list)
    _received: bytes = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401
        """A method of EngineProcess. EngineError."""
        self.tell(verb, **arguments)
        return self.answer(verb)

    def tell(self, verb: str, **arguments: Any) -> None:  # noqa: ANN401
        """Asks without waiting; answer() comes later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
        self.process.stdin.flush()

    def answer(self, verb: str = "") -> Any:  # noqa: ANN401
        answer = json.loads(self._line(verb))
        if "error" in answer:
            raise EngineError(answer["error"], answer["code"], answer["text"])
        if verb == "fork":
            self.forked.append(answer["result"])
        return answer["result"]

    def _line(self, verb: str) -> bytes:
        assert self.process.stdout is not None
        fd, deadline = self.process.stdout.fileno(), time.monotonic() + ANSWER_S
        while b"\n" not in self._received:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(fd, 65536) if ready else b""
            assert more, f"engine pid {self.pid} does not answer {verb}; its log:\n{self.log.read_text()}"
            self._received += more
        line, _, self._received = self._received.partition(b"\n")
        return line

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped by SIGSTOP meanwhile."""
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: processes.state(self.pid) == "T", "the engine stops")
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@dataclass
class Engines:
    """Starts engine processes and ends them."""

    directory: Path
    started: list[Engine] = field(default_factory=list)

    def start(self, node: Node, rank: int = 0, route: str = "relay") -> Engine:
        engine = self.bare()
        engine.ask("connect", socket=node.socket, rank=rank, route=route)
        return engine

    def start_gpu(
        self,
        node: Node,
        rank: int = 0,
        gpu: int = 0,
        copy: str = "auto",
        environment: Mapping[str, str] | None = None,
        limit_s: int = processes.LIMIT_S,
    ) -> Engine:
        """One with a GPU: helpers.gpu_engine."""
        engine = self.bare("helpers.gpu_engine", environment, limit_s)
        engine.ask("connect", socket=node.socket, rank=rank, gpu=gpu, copy=copy)
        return engine

    def bare(
        self,
        module: str = "helpers.engine_process",
        environment: Mapping[str, str] | None = None,
        limit_s: int = processes.LIMIT_S,
    ) -> Engine:
        """One that is not attached."""
        log = self.directory / f"engine-{len(self.started)}.log"
        engine = Engine(
            processes.start(["-m", module], log=log, pipes=True, environment=environment, limit_s=limit_s), log
        )
        self.started.append(engine)
        return engine

    def close(self) -> None:
        for engine in self.started:
            processes.end(engine.process)
            for pid in engine.forked:  # orphans come to this process
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        self.started.clear()
