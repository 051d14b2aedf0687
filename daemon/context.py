"""What every part of the conductor needs: configuration, identity, the data plane and the node segment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from railrelay.client.errors import ErrorCode
from railrelay.client.protocol import RailFacts
from railrelay.daemon.authentication import Secrets
from railrelay.daemon.commands import Commands
from railrelay.daemon.config import Config
from railrelay.daemon.emulated import Helpers
from railrelay.daemon.instance import Instance
from railrelay.daemon.node_state import NodeState
from railrelay.daemon.plane import DataPlane
from railrelay.daemon.tls import Tls
from railrelay.daemon.verbs import Verbs


class Closable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=Closable)


@dataclass
class Context:
    config: Config
    names: Instance
    instance: int
    session: str
    rails: list[RailFacts]
    state: NodeState
    plane: DataPlane
    commands: Commands
    helpers: Helpers
    verbs: Verbs
    secrets: Secrets
    tls: Tls
    nearest_rails: tuple[int, ...] = ()  # of the node's GPUs; empty if that is not known
    draining: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[object, object, None], what: str) -> asyncio.Task[None]:
        """Runs ``work`` beside everything else; an exception in it becomes an error record."""
        task = asyncio.get_running_loop().create_task(work, name=what)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self.state.error(ErrorCode.INTERNAL, f"{task.get_name()}: {type(failure).__name__}: {failure}")

    async def close_tasks(self) -> None:
        """Cancels what was spawned and waits for it. Idempotent."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        while tasks:  # again, should a task have swallowed it
            for task in tasks:
                task.cancel()
            _, left = await asyncio.wait(tasks, timeout=0.5)
            tasks = list(left)


async def on_worker(make: Callable[[], C]) -> C:
    """Runs ``make`` on a worker thread. If the waiter is cancelled meanwhile, what was made is closed."""
    future = asyncio.get_running_loop().run_in_executor(None, make)

    def discard(made: asyncio.Future[C]) -> None:
        if not made.cancelled() and made.exception() is None:
            made.result().close()

    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(discard)
        raise


async def run_on_worker(work: Callable[[], None]) -> None:
    """Runs ``work`` on a worker thread; it goes on there if the waiter is cancelled."""
    await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, work))
