"""Takeover: which pair of devices carries what one rail sends to another, and when the rail's own pair does again. Main
thread only.

The own devices carry while both ports are up and nothing speaks against it; else the next pair of rails that both nodes
have. A pair on which a queue pair could not be made or connected, or broke because the other end was not reached, is
suspect although its ports are up. What was taken over goes back once a probe over the rail's own devices has passed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.shm_layout import faults

if TYPE_CHECKING:
    from railrelay.daemon.context import Context
    from railrelay.daemon.peers import Peer, Sender

log = logging.getLogger("railrelay")

Probe = Callable[["Peer", int, int], Awaitable[None]]


@dataclass(frozen=True)
class Pair:
    """Rails whose devices have the two ends of a queue pair."""

    here: int
    there: int


class Takeover:
    def __init__(self, ctx: Context, probe: Probe) -> None:
        """``probe(peer, rail, remote rail)``: RelayError unless the devices of the two reach each other."""
        self._ctx = ctx
        self._probe = probe
        self._suspects: dict[int, set[Pair]] = {}  # by peer row
        self._returning: dict[tuple[int, Pair], list[Callable[[], None]]] = {}  # by peer row and own pair
        self._lost_at: dict[tuple[int, Pair], float] = {}  # the same

    def choose(self, peer: Peer, rail: int, remote_rail: int) -> Pair:
        """The own pair too if there is no better one: its error is then the one to be shown."""
        own = Pair(rail, remote_rail)
        theirs = len(peer.rails)
        others = ((remote_rail + step) % theirs for step in range(1, theirs))
        for pair in (own, *(Pair(peer.local_rails[there], there) for there in others)):
            if self._up(peer, pair) and pair not in self._suspects.get(peer.row, ()):
                return pair
        return own

    def _up(self, peer: Peer, pair: Pair) -> bool:
        here, there = self._ctx.rails[pair.here], peer.rails[pair.there]
        return not peer.gone and here.nic == there.nic == "verbs" and here.up and there.up

    def suspect(self, peer: Peer, pair: Pair) -> None:
        if not peer.gone:  # else its row may be another's already
            self._suspects.setdefault(peer.row, set()).add(pair)

    def lost(self, peer: Peer, rail: int, remote_rail: int) -> None:
        """What carried it has gone; of several events before the next connection the first counts."""
        self._lost_at.setdefault((peer.row, Pair(rail, remote_rail)), time.monotonic())

    def carries(self, peer: Peer, sender: Sender, give_back: Callable[[], None]) -> None:
        """A new connection is in use. ``give_back()`` comes if it is one of another pair, once the own one works."""
        pair, own = sender.pair, Pair(sender.rail, sender.remote_rail)
        if pair is None:
            return
        ctx = self._ctx
        lost_at = self._lost_at.pop((peer.row, own), None)
        if lost_at is not None:
            by = "its own device" if pair == own else ctx.rails[pair.here].identity
            name, ms = ctx.rails[own.here].identity, 1e3 * (time.monotonic() - lost_at)
            log.info("rail %s to %s: connected through %s %.1f ms after the loss", name, peer.session, by, ms)
        if pair == own:
            self._suspects.get(peer.row, set()).discard(own)
            return
        faults.point("daemon.takeover.carries")
        ctx.state.count_takeover(sender.rail)
        ctx.state.error(
            ErrorCode.RAIL_DOWN,
            f"rail {ctx.rails[own.here].identity} to {peer.session}: {self._reason(peer, own)}; rail"
            f" {ctx.rails[pair.here].identity} has taken over",
            key=f"takeover of rail {own.here} to {peer.session} by {pair.here}",
        )
        key = (peer.row, own)
        waiting = self._returning.get(key)
        if waiting is not None:
            waiting.append(give_back)
            return
        self._returning[key] = [give_back]
        ctx.spawn(self._return(peer, own), f"readmission of rail {own.here} to {peer.session}")

    def _reason(self, peer: Peer, own: Pair) -> str:
        if not self._ctx.rails[own.here].up:
            return "its port is down"
        if not peer.rails[own.there].up:
            return "the port at the peer is down"
        return "the peer is not reached"

    async def _return(self, peer: Peer, own: Pair) -> None:
        identity = self._ctx.rails[own.here].identity
        while not peer.gone:
            await asyncio.sleep(self._ctx.config.verbs.probe_s)
            if not self._up(peer, own):
                continue
            try:
                await self._probe(peer, own.here, own.there)
            except RelayError as failure:
                log.info("rail %s to %s: probe: %s", identity, peer.session, failure.text)
                continue
            log.info("rail %s to %s: its probe has passed, it is back", identity, peer.session)
            break
        if peer.gone:  # what is kept under its row may be another peer's
            return
        faults.point("daemon.takeover.returning")
        self._suspects.get(peer.row, set()).discard(own)
        for one in self._returning.pop((peer.row, own), []):
            one()

    def forget(self, peer: Peer) -> None:
        """It is gone, and its row will be another's."""
        self._suspects.pop(peer.row, None)
        self._returning = {key: waiting for key, waiting in self._returning.items() if key[0] != peer.row}
        self._lost_at = {key: at for key, at in self._lost_at.items() if key[0] != peer.row}
