"""Engine processes of the laboratory: those of the demo, in a node's network namespace, with a timetable."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from lab.cases import How, Job, Queues, Sender
from lab.fabric import enter
from railrelay.client import Client
from railrelay.client.cli import _models
from railrelay.client.cli._models import Move, Plan
from railrelay.client.cli.demo import DecodeEngine, PrefillEngine
from railrelay.client.client import Route

_TRANSFER_S: Final = 120.0


class Done(NamedTuple):
    """A transfer that has arrived; times by the monotonic clock. ``ready_ns``: since when its job could have begun."""

    request: int
    decode: int
    ready_ns: int
    end_ns: int
    nbytes: int


class Sending(PrefillEngine):
    def __init__(self, namespace: str, socket: str, sender: Sender, how: How, plan: Plan) -> None:
        enter(namespace)
        self._plan = plan
        self._rank = sender.share
        self._cache = plan.prefill[sender.share]
        self._sender = sender
        self._in_order = how.in_order and not sender.is_victim
        self._by_sessions = how.by_sessions and not sender.is_victim
        route = Route.DIRECT if sender.is_victim else how.route
        self._client = Client.connect(socket, rank=sender.rank, name=f"prefill-{sender.share}", route=route)
        self._buffer = self._client.alloc(self._cache.nbytes)

    def play(self, begin_ns: int, paced: bool) -> list[Done]:
        """All jobs of a phase, due times counted from ``begin_ns``; returns once everything is placed."""
        moves: dict[int, list[Move]] = {}
        for move in _models.moves_of(self._plan, self._rank):
            moves.setdefault(move.request, []).append(move)
        if self._in_order:
            moves = {request: sorted(of, key=lambda move: move.decode) for request, of in moves.items()}
        queues = self._sender.paced if paced else self._sender.queues
        if self._by_sessions:
            by_sessions: dict[tuple[int, ...], list[Job]] = {}
            for job in sorted(itertools.chain(*queues), key=lambda job: (job.due_s, job.request)):
                by_sessions.setdefault(tuple(sorted(move.decode for move in moves[job.request])), []).append(job)
            queues = tuple(map(tuple, by_sessions.values()))
        self._done: list[Done] = []
        asyncio.run(self._play(begin_ns, queues, moves))
        return self._done

    async def _play(self, begin_ns: int, queues: Queues, moves: dict[int, list[Move]]) -> None:
        await asyncio.gather(*(self._queue(begin_ns, queue, moves) for queue in queues))

    async def _queue(self, begin_ns: int, jobs: Sequence[Job], moves: dict[int, list[Move]]) -> None:
        for job in jobs:
            now_s = (time.monotonic_ns() - begin_ns) / 1e9
            await asyncio.sleep(max(0.0, job.due_s - now_s) + job.pause_s)
            due_ns = begin_ns + int(job.due_s * 1e9)
            ready_ns = time.monotonic_ns() if job.pause_s else due_ns
            if self._in_order:
                for move in moves[job.request]:
                    await self._send(move, ready_ns)
            else:
                await asyncio.gather(*(self._send(move, ready_ns) for move in moves[job.request]))

    async def _send(self, move: Move, ready_ns: int) -> None:
        transfer = self._client.write_pages(
            self._remotes[move.decode], *self._sides(move), tag=move.request + 1, timeout=_TRANSFER_S
        )
        await transfer
        self._done.append(Done(move.request, move.decode, ready_ns, time.monotonic_ns(), transfer.bytes))


class Receiving(DecodeEngine):
    def __init__(self, namespace: str, socket: str, rank: int, plan: Plan) -> None:
        enter(namespace)
        super().__init__(socket, rank, plan)
