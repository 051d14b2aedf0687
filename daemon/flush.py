"""Flushing: what a verbs device wrote to a GPU is there for it once a read of the same GPU has come back behind the
writes. Says what is read: one small key for each client that receives into GPU memory, on the device of each rail.
Main thread only.

The key is of a page of one of the client's regions, under a registration of its own. It is replaced by another region's
before that region is given back, and deregistered once no rail reads it any more. A client uses one GPU; which one only
the client says, so that what is read for it makes sure of nobody else's memory."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon.plane import MAX_FLUSH_TARGETS
from railrelay.daemon.verbs import Keys

if TYPE_CHECKING:
    from railrelay.daemon.context import Context

Pair = tuple[int, int]  # a rail that receives, and the rail whose device it does that through
Targets = list[tuple[int, int]]


@dataclass(frozen=True)
class Place:
    """The page of a region that is read: its address for devices, and where the dma-buf has it."""

    what: str
    address: int
    nbytes: int
    dmabuf_offset: int


@dataclass(frozen=True)
class _Key:
    region: Keys
    place: Place
    keys: Keys


class Flush:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._wanted = bool(ctx.verbs) and ctx.config.verbs.flush != "never"
        self._regions: dict[int, dict[Keys, Place]] = {}  # by the client's serial
        self._keys: dict[int, _Key] = {}  # the same
        self._retired: list[_Key] = []
        self._told: dict[Pair, Targets] = {}  # of every pair that has, or had, receivers
        self._lock = asyncio.Lock()

    async def add(self, client: int, region: Keys, place: Place) -> None:
        """``client``: its serial. Of registered GPU memory, before anybody may write it: all receivers read there when
        this returns. RelayError."""
        if not self._wanted:
            return
        self._regions.setdefault(client, {})[region] = place
        failures: list[RelayError] = []
        await asyncio.shield(self._ctx.spawn(self._settle(failures), f"flush key of {place.what}"))
        if failures:
            raise failures[0]

    async def remove(self, region: Keys) -> None:
        """Nobody writes it any more. Before it is deregistered; idempotent."""
        known = [client for client, places in self._regions.items() if places.pop(region, None) is not None]
        if known or any(key.region is region for key in [*self._keys.values(), *self._retired]):
            await asyncio.shield(self._ctx.spawn(self._settle([]), "end of a flush key"))

    async def prepare(self, rail: int, through: int) -> None:
        """Before each receiver of the rail through that device. RelayError."""
        if not self._wanted:
            return
        self._told.setdefault((rail, through), [])
        async with self._lock:
            if self._targets(through) or self._told[rail, through]:
                await self._tell(rail, through)

    async def _settle(self, failures: list[RelayError]) -> None:
        async with self._lock:
            for client in list({**self._regions, **self._keys}):
                await self._renew(client, failures)
            for rail, through in list(self._told):
                if self._told[rail, through] == self._targets(through):
                    continue
                try:
                    await self._tell(rail, through)
                except RelayError as failure:  # its receivers end rather than answer
                    failures.append(failure)
            while self._retired:
                await self._ctx.verbs.deregister(self._retired[-1].keys)
                self._retired.pop()

    async def _renew(self, client: int, failures: list[RelayError]) -> None:
        """Its key is of a region that is there; without one, as far as possible, it keeps the one that it has."""
        regions, old = self._regions.get(client, {}), self._keys.get(client)
        if old is not None and old.region in regions:
            return
        made: _Key | None = None
        refused: RelayError | None = None
        for region, place in list(regions.items()):
            try:
                made = await self._new(client, region, place)
            except RelayError as failure:
                refused = failure
            else:
                break
        if not regions:  # or not any more
            self._regions.pop(client, None)
            self._keys.pop(client, None)
            self._retired += [key for key in (old, made) if key is not None]
        elif made is not None:
            self._keys[client] = made
            self._retired += [old] if old is not None else []
        elif refused is not None and old is not None:
            self._ctx.state.error(refused.code, f"{refused.text}; its predecessor keeps GPU memory")
        elif refused is not None:
            failures.append(refused)

    async def _new(self, client: int, region: Keys, place: Place) -> _Key:
        if client not in self._keys and len(self._keys) == MAX_FLUSH_TARGETS:
            text = (
                f"{place.what}: {len(self._keys)} clients of this daemon receive into GPU memory, and at most"
                f" {MAX_FLUSH_TARGETS} can; register it with receive=False, or receive into memory of alloc()"
            )
            raise RelayError(ErrorCode.LIMIT, text)
        what, keys = f"flush key of {place.what}", Keys(pid=region.pid)
        try:
            keys.dmabuf = os.dup(region.dmabuf)
            await self._ctx.verbs.register(
                keys, what, place.address, place.nbytes, dmabuf_offset=place.dmabuf_offset, flush=True
            )
        except RelayError:
            keys.close()
            raise
        except OSError as failure:
            raise RelayError(ErrorCode.NO_MEMORY, f"{what}: {failure}") from None
        return _Key(region, place, keys)

    def _targets(self, through: int) -> Targets:
        return [(key.place.address, key.keys.rkeys[through]) for key in self._keys.values()]

    async def _tell(self, rail: int, through: int) -> None:
        """In force when this returns, or raises. RelayError: its receivers will end instead of answering."""
        verbs = self._ctx.verbs
        targets = self._told[rail, through] = self._targets(through)
        try:
            if targets:
                await verbs.open_flush(rail, through)
        finally:
            await verbs.set_flush_targets(rail, through, targets)
