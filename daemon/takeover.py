"""Takeover: which pair of devices carries what one rail sends to another, and when the rail's own pair does again. Main
thread only.

The own devices carry while both ports are up and nothing speaks against it; else the next pair of rails that both nodes
have. A pair on which a queue pair could not be made or connected, or broke because the other end was not reached, is
suspect although its ports are up, until a probe over it has passed. What was taken over goes back once a probe over the
rail's own devices has passed.

The pair that would take over next is tried ahead, by such a probe: the first queue pair between two devices waits until
the kernel has found the other's link address, which may take a second. No queue pair is kept for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
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
        self._returning: dict[tuple[int, Pair], list[Callable[[], None]]] = {}  # by peer row and pair; being probed
        self._lost_at: dict[tuple[int, Pair], float] = {}  # the same
        self._wanted: set[tuple[int, Pair]] = set()  # the same: a connection that is to be made
        self._tried: dict[int, set[Pair]] = {}  # by peer row: pairs that have reached each other, or are being tried

    def choose(self, peer: Peer, rail: int, remote_rail: int) -> Pair:
        """If there is no better one a suspect one, or else the own one: its error is then the one to be shown."""
        own = Pair(rail, remote_rail)
        usable = [pair for pair in (own, *self._others(peer, own)) if self.usable(peer, pair)]
        good = [pair for pair in usable if pair not in self._suspects.get(peer.row, ())]
        return next(iter(good or usable), own)

    def _others(self, peer: Peer, own: Pair) -> Iterator[Pair]:
        theirs = len(peer.rails)
        for step in range(theirs):
            there = (own.there + step) % theirs
            pair = Pair(peer.local_rails[there], there)
            if pair != own:
                yield pair

    def usable(self, peer: Peer, pair: Pair) -> bool:
        """Both ports are up."""
        here, there = self._ctx.rails[pair.here], peer.rails[pair.there]
        return not peer.gone and here.nic == there.nic == "verbs" and here.up and there.up

    def suspect(self, peer: Peer, pair: Pair) -> None:
        if not peer.gone:  # else its row may be another's already
            self._suspects.setdefault(peer.row, set()).add(pair)
            self._probe_again(peer, pair)

    def lost(self, peer: Peer, rail: int, remote_rail: int, seen_at: float) -> None:
        """What carried it has gone; of several events before the next connection the first counts."""
        self._lost_at.setdefault((peer.row, Pair(rail, remote_rail)), seen_at)

    def wanted(self, peer: Peer, rail: int, remote_rail: int) -> None:
        """Slices wait for a connection."""
        self._wanted.add((peer.row, Pair(rail, remote_rail)))

    def given_up(self, peer: Peer, rail: int, remote_rail: int) -> None:
        """Of the slices, not of the rail."""
        self._wanted.discard((peer.row, Pair(rail, remote_rail)))
        self._lost_at.pop((peer.row, Pair(rail, remote_rail)), None)

    def settled(self, peer: Peer, rail: int, remote_rail: int) -> None:
        """What was under way over the lost connection is queued again, or was placed: then nothing waits."""
        if (peer.row, Pair(rail, remote_rail)) not in self._wanted:
            self._lost_at.pop((peer.row, Pair(rail, remote_rail)), None)

    def carries(self, peer: Peer, sender: Sender, give_back: Callable[[], None]) -> None:
        """A new connection is in use. ``give_back()`` comes if it is one of another pair, once the own one works."""
        pair, own = sender.pair, Pair(sender.rail, sender.remote_rail)
        if pair is None:
            return
        ctx = self._ctx
        lost_at = self._lost_at.pop((peer.row, own), None)
        self._wanted.discard((peer.row, own))
        if lost_at is not None:
            by = "its own device" if pair == own else ctx.rails[pair.here].identity
            name, ms = ctx.rails[own.here].identity, 1e3 * (time.monotonic() - lost_at)
            log.info("rail %s to %s: connected through %s %.1f ms after the loss", name, peer.session, by, ms)
        self._tried.setdefault(peer.row, set()).add(pair)
        self._try_next(peer, own)
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
        self._probe_again(peer, own).append(give_back)

    def _try_next(self, peer: Peer, own: Pair) -> None:
        tried = self._tried.setdefault(peer.row, set())
        following = next((pair for pair in self._others(peer, own) if self.usable(peer, pair)), None)
        if following is not None and following not in tried:
            tried.add(following)
            self._ctx.spawn(self._try(peer, following), f"first probe of rail {following.here} to {peer.session}")

    async def _try(self, peer: Peer, pair: Pair) -> None:
        try:
            await self._probe(peer, pair.here, pair.there)
        except (RelayError, OSError) as failure:  # OSError: the endpoint has gone meanwhile
            if not peer.gone:
                log.info("rail %s to %s: %s", self._ctx.rails[pair.here].identity, peer.session, failure)
                self._tried.get(peer.row, set()).discard(pair)

    def port_changed(
        self, up: bool, used: Iterable[Sender], *, here: int | None = None, there: int | None = None
    ) -> None:
        """Of a rail here or there; ``used``: the queue pairs to the peers that it concerns."""
        for sender in used:
            tried = self._tried.get(sender.peer.row, set())
            tried -= {pair for pair in tried if here in (None, pair.here) and there in (None, pair.there)}
            if up:
                self._try_next(sender.peer, Pair(sender.rail, sender.remote_rail))

    def _reason(self, peer: Peer, own: Pair) -> str:
        if not self._ctx.rails[own.here].up:
            return "its port is down"
        if not peer.rails[own.there].up:
            return "the port at the peer is down"
        return "the peer is not reached"

    def _probe_again(self, peer: Peer, pair: Pair) -> list[Callable[[], None]]:
        """What is called once a probe has passed."""
        key = (peer.row, pair)
        if key not in self._returning:
            self._returning[key] = []
            self._ctx.spawn(self._return(peer, pair), f"readmission of rail {pair.here} to {peer.session}")
        return self._returning[key]

    async def _return(self, peer: Peer, pair: Pair) -> None:
        identity = self._ctx.rails[pair.here].identity
        while not peer.gone:
            await asyncio.sleep(self._ctx.config.verbs.probe_s)
            if not self.usable(peer, pair):
                continue
            try:
                await self._probe(peer, pair.here, pair.there)
            except (RelayError, OSError) as failure:
                log.info("rail %s to %s: probe: %s", identity, peer.session, failure)
                continue
            log.info("rail %s to %s: its probe has passed, it is back", identity, peer.session)
            break
        if peer.gone:  # what is kept under its row may be another peer's
            return
        faults.point("daemon.takeover.returning")
        self._suspects.get(peer.row, set()).discard(pair)
        self._tried.setdefault(peer.row, set()).add(pair)
        for one in self._returning.pop((peer.row, pair), []):
            one()

    def forget(self, peer: Peer) -> None:
        """It is gone, and its row will be another's."""
        self._suspects.pop(peer.row, None)
        self._tried.pop(peer.row, None)
        self._returning = {key: waiting for key, waiting in self._returning.items() if key[0] != peer.row}
        self._lost_at = {key: at for key, at in self._lost_at.items() if key[0] != peer.row}
        self._wanted = {key for key in self._wanted if key[0] != peer.row}
