"""What happens to the processes of the soak while they work."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from soak.fleet import TIMEOUTS, Engine, Fleet
from soak.traffic import Traffic

SHORT_STOP_S: Final = 1.0  # less than any time-out: nobody may see an error
LONG_STOP_S: Final = 1.5 * TIMEOUTS["peer_s"]


class Faults:
    """``steady``: the engine and the number of the daemon that are never killed, so that what leaks would show."""

    def __init__(self, fleet: Fleet, traffic: Traffic, rng: random.Random, steady: tuple[Engine, int] | None) -> None:
        self.done: Counter[str] = Counter()
        self.between = asyncio.Lock()  # held while a fault is under way
        self._fleet = fleet
        self._traffic = traffic
        self._rng = rng
        self._mortal_engines = [engine for engine in fleet.engines if steady is None or engine is not steady[0]]
        self._mortal_daemons = [number for number in range(2) if steady is None or number != steady[1]]

    async def run(self, pause_s: float) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._rng.uniform(0.3, 1.7) * pause_s)
            async with self.between:
                await self.one()

    async def one(self) -> None:
        steps: list[tuple[int, str, Callable[[], Awaitable[None]]]] = [
            (6, "engine killed", self._kill_engine),
            (3, "daemon killed", self._kill_daemon),
            (8, "engine stopped", self._stop_engine),
            (6, "daemon stopped", self._stop_daemon),
            (1, "daemon stopped for long", self._stop_daemon_for_long),
        ]
        [(_, name, step)] = self._rng.choices(steps, [weight for weight, _, _ in steps])
        await step()
        self.done[name] += 1
        self._traffic.forget_areas()

    async def _kill_engine(self) -> None:
        self._traffic.disturbed()
        await self._fleet.restart_engine(self._rng.choice(self._mortal_engines))
        self._traffic.disturbed()

    async def _kill_daemon(self) -> None:
        number = self._rng.choice(self._mortal_daemons)
        self._traffic.disturbed()
        await self._fleet.kill_daemon(number)
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        await self._fleet.restart_daemon(number)
        self._traffic.disturbed()

    async def _stop_engine(self) -> None:
        engine = self._rng.choice(self._fleet.engines)
        engine.stop()
        await asyncio.sleep(self._rng.uniform(0.02, SHORT_STOP_S))
        engine.resume()

    async def _stop_daemon(self) -> None:
        number = self._rng.randrange(2)
        self._fleet.stop_daemon(number)
        await asyncio.sleep(self._rng.uniform(0.02, SHORT_STOP_S))
        self._fleet.resume_daemon(number)

    async def _stop_daemon_for_long(self) -> None:
        number = self._rng.randrange(2)
        self._traffic.disturbed()
        self._fleet.stop_daemon(number)
        await asyncio.sleep(LONG_STOP_S)
        self._fleet.resume_daemon(number)
        await asyncio.sleep(TIMEOUTS["connect_s"])
        # What its peers have given up meanwhile is opened again.
        await self._fleet.introduce(self._fleet.engines)
        self._traffic.disturbed()
