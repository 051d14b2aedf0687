"""The transfers of the soak, one coroutine each: a destination that must hold what its owner put there, a transfer into
it, perhaps ended early by either side or by both, and new content the moment that it has settled."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections import Counter, deque
from dataclasses import dataclass, field, fields
from typing import Any, Final

from soak.engine import KINDS
from soak.fleet import Engine, EngineGone, EngineRefused, Fleet

HANG_S: Final = 60.0
NOTE_SHARE: Final = 0.1
QUIET_RESULTS: Final = frozenset({"OK", "CANCELLED", "ABORTED", "TIMED_OUT"})
LOST: Final = frozenset({"REFUSED", "REGION_GONE", "PEER_LOST"})
DISTURBED_S: Final = 20.0  # so long after a fault its consequences may be seen


@dataclass
class Found:
    """What is counted; the first four must stay 0."""

    wrong_bytes: int = 0
    hangs: int = 0
    lost_notes: int = 0
    unexpected: int = 0  # results or errors that nothing explains
    transfers: int = 0
    ended_early: int = 0
    results: Counter[str] = field(default_factory=Counter)
    texts: list[str] = field(default_factory=list)  # of what is wrong

    def wrong(self, text: str) -> None:
        if len(self.texts) < 50:
            self.texts.append(text)

    def __iadd__(self, other: Found) -> Found:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self


class Traffic:
    """Keeps ``most`` transfers under way until stopped. ``early``: share of them that someone ends."""

    def __init__(
        self, fleet: Fleet, rng: random.Random, *, most: int, early: float, kinds: tuple[str, ...] = KINDS
    ) -> None:
        self.fleet = fleet
        self.found = Found()
        self.begun = 0
        self.limit: int | None = None
        self._rng = rng
        self._most = most
        self._early = early
        self._kinds = kinds
        self._seeds = itertools.count(1)
        self._free: dict[tuple[Engine, int, str], list[int]] = {}  # by engine and its epoch
        self._sending: Counter[Engine] = Counter()
        self._flights: set[asyncio.Task[None]] = set()
        self._going = asyncio.Event()
        self._changed = asyncio.Event()
        self._usual_ms: deque[float] = deque([5.0], maxlen=64)
        self._disturbed_until = 0.0
        self._places: dict[asyncio.Task[None], str] = {}

    def disturbed(self) -> None:
        """A fault begins or ends: for a while transfers may end by it."""
        self._disturbed_until = time.monotonic() + DISTURBED_S

    async def run(self) -> None:
        """Until cancelled, or ``limit`` transfers were begun and have ended."""
        self._going.set()
        while self.limit is None or self.begun < self.limit:
            await self._going.wait()
            if len(self._flights) >= self._most or not self._begin():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._changed.wait()
        await self.quiet()

    async def quiet(self) -> None:
        """Begins nothing, and returns when all that was begun has ended."""
        self._going.clear()
        while self._flights:
            await asyncio.wait(list(self._flights))

    def go_on(self) -> None:
        self._going.set()

    def under_way(self) -> list[str]:
        return [f"{at} since {task.get_name()}" for task, at in self._places.items() if not task.done()]

    # ---- one transfer ----

    def _begin(self) -> bool:
        engines = [engine for engine in self.fleet.engines if engine.attached and not engine.stopped]
        if len(engines) < 2:
            return False
        sender, receiver = self._rng.sample(engines, 2)
        if not self.fleet.know_each_other(sender, receiver):
            return False
        kind = self._rng.choice(self._kinds)
        key = (receiver, receiver.epoch, kind)
        free = self._free.setdefault(key, list(range(self.fleet.areas)))
        if not free or self._sending[sender] >= self.fleet.areas:
            return False
        area = free.pop(self._rng.randrange(len(free)))
        self.begun += 1
        self._sending[sender] += 1
        flight = Flight(
            self, sender, receiver, receiver.epoch, kind, area, next(self._seeds), self._rng.getrandbits(60)
        )
        task = asyncio.create_task(flight.run(), name=f"{time.monotonic():.1f}")
        self._flights.add(task)
        self._places[task] = str(flight)
        task.add_done_callback(lambda task: self._landed(task, flight))
        return True

    def _landed(self, task: asyncio.Task[None], flight: Flight) -> None:
        self._flights.discard(task)
        self._places.pop(task, None)
        self._sending[flight.sender] -= 1
        self._changed.set()
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.found.unexpected += 1
            self.found.wrong(f"{flight}: {type(failure).__name__}: {failure}")

    def free_area(self, flight: Flight) -> None:
        self._free[flight.receiver, flight.epoch, flight.kind].append(flight.area)
        self._changed.set()

    def forget_areas(self) -> None:
        """Of epochs that are over."""
        self._free = {key: free for key, free in self._free.items() if key[0].epoch == key[1]}

    @property
    def is_disturbed(self) -> bool:
        return time.monotonic() < self._disturbed_until

    def moment(self, rng: random.Random) -> float:
        """At random in the life of a transfer, in seconds."""
        return rng.uniform(0, statistics.median(self._usual_ms)) / 1e3

    def took(self, ms: float) -> None:
        self._usual_ms.append(ms)

    @property
    def early(self) -> float:
        return self._early


@dataclass(eq=False)
class Flight:
    traffic: Traffic
    sender: Engine
    receiver: Engine
    epoch: int
    kind: str
    area: int
    number: int
    random_bits: int
    may_end_early: bool = False
    note: bool = False

    def __str__(self) -> str:
        return f"transfer {self.number} {self.sender.name} -> {self.receiver.name} {self.kind} area {self.area}"

    async def run(self) -> None:
        found, rng = self.traffic.found, random.Random(self.random_bits)
        found.transfers += 1
        who = rng.choice(("sender", "receiver", "both")) if rng.random() < self.traffic.early else ""
        self.note = rng.random() < NOTE_SHARE
        self.may_end_early = bool(who)
        found.ended_early += bool(who)
        if not await self._prepared():
            return
        sending = asyncio.create_task(
            self.sender.ask(
                "send",
                peer=self.receiver.name,
                source=rng.choice(KINDS),
                kind=self.kind,
                area=self.area,
                seed=self.number,
                cancel_after=self.traffic.moment(rng) if who in ("sender", "both") else None,
                timeout=20.0,
                note=self.note,
            )
        )
        aborting = self._abort(self.traffic.moment(rng)) if who in ("receiver", "both") else None
        try:
            await self._settle(sending, aborting)
            if not sending.done():
                await self._until_done({sending}, "the sender's end")
            self._tally(sending)
        finally:
            for task in (sending, aborting):
                if task is not None and not task.done():
                    task.cancel()
            for task in (sending, aborting):
                if task is not None:
                    with contextlib.suppress(EngineGone, EngineRefused, asyncio.CancelledError):
                        await task

    async def _prepared(self) -> bool:
        with contextlib.suppress(EngineGone):
            wrong = await self._ask("prepare")
            if wrong is None:
                return False
            self._wrong(wrong, "late bytes, found before the next transfer into the area")
            return True
        return False

    async def _settle(self, sending: asyncio.Task[Any], aborting: asyncio.Task[Any] | None) -> None:
        """Returns when the area has new content and is free again, or its memory is gone."""
        pending = {task for task in (sending, aborting) if task is not None}
        while True:
            if not await self._until_done(pending, "an end that is settled"):
                return
            if aborting is not None and aborting.done():
                pending.discard(aborting)
                ended = self._result(aborting)
                if self.epoch != self.receiver.epoch:
                    return
                if ended is not None and ended["settled"]:
                    self.traffic.free_area(self)
                    return
                aborting = self._abort(0.05)
                pending.add(aborting)
            if sending in pending and sending.done():
                pending.discard(sending)
                ended = self._result(sending)
                if ended is not None and ended["settled"] and aborting is None:
                    await self._finish(ok=ended["result"] == "OK")
                    return
                if aborting is None:  # only the receiving side can say when nothing lands any more
                    self.may_end_early = True
                    aborting = self._abort(0.0)
                    pending.add(aborting)

    async def _finish(self, *, ok: bool) -> None:
        with contextlib.suppress(EngineGone):
            wrong = await self._ask("finish", ok=ok, seed=self.number, note=self.note)
            if wrong is None:
                return
            if wrong < 0:
                self.traffic.found.lost_notes += 1
                self.traffic.found.wrong(f"{self}: its note did not come")
            else:
                self._wrong(wrong, "after its end")
            self.traffic.free_area(self)

    def _abort(self, after: float) -> asyncio.Task[Any]:
        return asyncio.create_task(
            self.receiver.ask(
                "abort", kind=self.kind, area=self.area, flight=self.number, seed=self.number, after=after
            )
        )

    async def _ask(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401
        """None: the memory is gone."""
        if self.epoch != self.receiver.epoch:
            return None
        try:
            answer = await self.receiver.ask(verb, kind=self.kind, area=self.area, flight=self.number, **arguments)
        except EngineRefused:
            if self.epoch != self.receiver.epoch:
                return None
            raise
        return answer if self.epoch == self.receiver.epoch else None

    def _result(self, task: asyncio.Task[Any]) -> dict[str, Any] | None:
        """None: nobody is there any more to tell."""
        failure = task.exception()
        if failure is None:
            answer: dict[str, Any] = task.result()
            return answer
        if isinstance(failure, EngineRefused) and not self.traffic.is_disturbed:
            raise failure
        if isinstance(failure, EngineGone | EngineRefused):
            return None
        raise failure

    async def _until_done(self, tasks: set[asyncio.Task[Any]], what: str) -> bool:
        done, _ = await asyncio.wait(tasks, timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            self.traffic.found.hangs += 1
            self.traffic.found.wrong(f"{self}: not within {HANG_S:g} s: {what}")
        return bool(done)

    def _tally(self, sending: asyncio.Task[Any]) -> None:
        found = self.traffic.found
        if not sending.done():
            return
        ended = self._result(sending)
        result = ended["result"] if ended is not None else "SENDER_GONE"
        found.results[result] += 1
        if result in LOST:
            self.traffic.fleet.lost(self.sender, self.receiver)
        if ended is not None and result == "OK":
            self.traffic.took(ended["ms"])
        expected = QUIET_RESULTS if self.may_end_early else {"OK"}
        if result not in expected and not self.traffic.is_disturbed:
            found.unexpected += 1
            found.wrong(f"{self} ended as {result}: {ended and ended['text']}")

    def _wrong(self, count: int, when: str) -> None:
        if count:
            self.traffic.found.wrong_bytes += count
            self.traffic.found.wrong(f"{self}: {count} wrong bytes {when}")
