"""An engine process of the soak: sends to, and receives from, others as it is told. One JSON request a line on stdin,
one answer a line on stdout, in any order: ``n`` is the request's number. Run as ``python -m soak.engine``."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np

from railrelay.client import (
    Buffer,
    Client,
    DaemonGone,
    ErrorCode,
    Region,
    RelayError,
    RemoteRegion,
    Result,
    Transfer,
    TransferError,
    Unsettled,
)
from soak import pages
from soak.pages import AREA_BYTES, Bytes

KINDS: Final = ("shared", "private")
THREADS: Final = 24  # that wait for the daemon
SETTLE_S: Final = 5.0  # of one attempt
NOTE_S: Final = 10.0

T = TypeVar("T")


@dataclass
class Area:
    """A destination. ``paint``: seed of what its owner has put there; ``flight``: the transfer that may write it."""

    array: Bytes
    paint: int = 0
    flight: int = 0

    def paint_over(self, seed: int) -> None:
        self.paint, self.flight = seed, 0
        self.array[:] = pages.paint(seed)

    def wrong_bytes(self, expected: Bytes) -> int:
        return 0 if np.array_equal(self.array, expected) else int(np.count_nonzero(self.array != expected))


class Engine:
    def __init__(self) -> None:
        self._client: Client | None = None
        self._threads = ThreadPoolExecutor(THREADS)
        together = threading.Barrier(THREADS)
        list(self._threads.map(lambda _: together.wait(), range(THREADS)))  # all start now: their number is looked at
        self._private = {what: np.zeros(0, np.uint8) for what in ("sources", "areas")}
        self._owners: list[Buffer | Region] = []
        self._areas: dict[str, list[Area]] = {}
        self._sources: dict[str, list[Bytes]] = {}
        self._addresses: dict[str, int] = {}
        self._free: dict[str, list[int]] = {}
        self._remotes: dict[tuple[str, str], RemoteRegion] = {}
        self._paints = itertools.count(1)
        self._notes: set[int] = set()
        self._noted = asyncio.Event()
        self._hears: asyncio.Task[None] | None = None
        self._generation = 0

    async def _wait(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    # ---- attaching ----

    async def attach(self, socket: str, rank: int, route: str, areas: int, name: str) -> dict[str, Any]:
        """Again after the daemon was killed: private memory stays the same pages. Offers by kind of memory."""
        await self.detach()
        self._client = client = await self._wait(
            lambda: Client.connect(socket, rank=rank, route=route, name=name, timeout=20.0)
        )
        self._generation += 1
        offers = {}
        for kind in KINDS:
            whole = {}
            for what in ("sources", "areas"):
                whole[what], region = await self._wait(self._memory, client, kind, what, areas * AREA_BYTES)
                if what == "areas":
                    offers[kind] = region.offer().hex()
                else:
                    self._addresses[kind] = region.address
            parts = {what: np.split(array, areas) for what, array in whole.items()}
            self._sources[kind] = parts["sources"]
            self._areas[kind] = [Area(part) for part in parts["areas"]]
            self._free[kind] = list(range(areas))
            for area in self._areas[kind]:
                area.paint_over(next(self._paints))
        self._hears = asyncio.create_task(self._hear(client))
        return {"offers": offers, "session": client.session}

    def _memory(self, client: Client, kind: str, what: str, nbytes: int) -> tuple[Bytes, Buffer | Region]:
        if kind == "shared":
            buffer = client.alloc(nbytes)
            self._owners.append(buffer)
            return buffer.array, buffer
        if self._private[what].size != nbytes:
            self._private[what] = np.zeros(nbytes, np.uint8)
        region = client.register(self._private[what], receive=what == "areas")
        self._owners.append(region)
        return self._private[what], region

    async def detach(self) -> None:
        if self._client is None:
            return
        client, self._client = self._client, None
        self._generation += 1
        if self._hears is not None:
            self._hears.cancel()
        await self._wait(client.close)
        for table in (self._areas, self._sources, self._addresses, self._free, self._remotes):
            table.clear()
        self._owners.clear()

    async def _hear(self, client: Client) -> None:
        with contextlib.suppress(DaemonGone):
            while True:
                note = await client.receiver.notifications.get_async()
                self._notes.add(note.tag)
                self._noted.set()

    async def open(self, peer: str, offers: dict[str, str]) -> None:
        client = self._attached()
        for kind, offer in offers.items():
            old = self._remotes.pop((peer, kind), None)
            if old is not None:
                with contextlib.suppress(RelayError):
                    await self._wait(old.close)
            self._remotes[peer, kind] = await self._wait(client.open, bytes.fromhex(offer))

    def _attached(self) -> Client:
        if self._client is None:
            raise DaemonGone(ErrorCode.DAEMON_GONE, "not attached")
        return self._client

    # ---- sending ----

    async def send(
        self,
        peer: str,
        source: str,
        kind: str,
        area: int,
        seed: int,
        cancel_after: float | None,
        timeout: float,
        note: bool,
    ) -> dict[str, Any]:
        """The source gets new content once the transfer has settled. ``settled`` False: that could not be had."""
        client, generation = self._attached(), self._generation
        remote = self._remotes[peer, kind]
        if not self._free[source]:
            return {
                "result": "REFUSED",
                "settled": True,
                "ms": 0.0,
                "text": "all sources are of transfers that have not settled",
            }
        place = self._free[source].pop()
        memory = self._sources[source][place]
        memory[:] = pages.content(seed)
        taken, put, nbytes = pages.blocks(seed)
        began = time.perf_counter()
        try:
            transfer = client.write(
                remote,
                taken + np.uint64(self._addresses[source] + place * AREA_BYTES),
                put + np.uint64(remote.address + area * AREA_BYTES),
                nbytes,
                tag=seed,
                timeout=timeout,
                notify=b"note" if note else None,
            )
        except RelayError as refusal:
            self._free[source].append(place)
            return {"result": "REFUSED", "settled": True, "ms": 0.0, "text": str(refusal)}
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            with contextlib.suppress(Unsettled):
                await self._wait(lambda: transfer.cancel(timeout=SETTLE_S))
        text = await self._end_of(transfer)
        ended = {"result": _name(transfer), "ms": 1e3 * (time.perf_counter() - began), "text": text}
        settled = await self._settled(transfer)
        if settled and generation == self._generation:
            memory[:] = 0x5A
            self._free[source].append(place)
        return {**ended, "settled": settled}

    @staticmethod
    async def _end_of(transfer: Transfer) -> str:
        try:
            await transfer
        except (TransferError, Unsettled) as failure:
            return str(failure)
        return ""

    async def _settled(self, transfer: Transfer) -> bool:
        for _ in range(4):
            if transfer.settled:
                return True
            try:
                await self._wait(transfer.wait_settled, SETTLE_S)
            except Unsettled:
                if not self._client or self._client.closed or transfer.result is Result.DAEMON_GONE:
                    break
        return transfer.settled

    # ---- receiving ----

    async def prepare(self, kind: str, area: int, flight: int) -> int:
        """Bytes that are not what was put there: a transfer that has ended wrote them."""
        at = self._areas[kind][area]
        at.flight = flight
        return at.wrong_bytes(pages.paint(at.paint))

    async def abort(self, kind: str, area: int, flight: int, seed: int, after: float) -> dict[str, Any]:
        """The area gets new content the moment that the transfer has settled."""
        await asyncio.sleep(after)
        client, at = self._attached(), self._areas[kind][area]
        try:
            count = await self._wait(client.receiver.abort, seed, SETTLE_S)
        except Unsettled as failure:
            return {"settled": False, "text": str(failure)}
        if at.flight == flight:
            at.paint_over(next(self._paints))
        return {"settled": True, "count": count}

    async def finish(self, kind: str, area: int, flight: int, seed: int, ok: bool, note: bool) -> int:
        """The sender's word that the transfer has settled. Wrong bytes; -1 without the note that must have come."""
        at = self._areas[kind][area]
        wrong = 0
        if at.flight == flight:
            wrong = at.wrong_bytes(pages.placed(pages.paint(at.paint), seed)) if ok else 0
            at.paint_over(next(self._paints))
        elif at.flight == 0:
            wrong = at.wrong_bytes(pages.paint(at.paint))
        if ok and note and not await self._has_note(seed):
            return -1
        self._notes.discard(seed)
        return wrong

    async def _has_note(self, tag: int) -> bool:
        deadline = time.monotonic() + NOTE_S
        while tag not in self._notes:
            self._noted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._noted.wait()
            if time.monotonic() >= deadline:
                return tag in self._notes
        return True

    async def look(self) -> int:
        """Wrong bytes of all areas that no transfer may write now."""
        found = 0
        for areas in self._areas.values():
            found += sum(at.wrong_bytes(pages.paint(at.paint)) for at in areas if not at.flight)
        return found


def _name(transfer: Transfer) -> str:
    result = transfer.result
    return result.name if result is not None else "NONE"


async def serve(engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        request = json.loads(line)
        task = asyncio.create_task(_answer(request["n"], getattr(engine, request["verb"])(**request["arguments"])))
        running.add(task)
        task.add_done_callback(running.discard)
    await engine.detach()


async def _answer(number: int, work: Awaitable[Any]) -> None:
    answer: dict[str, Any]
    try:
        answer = {"n": number, "result": await work}
    except RelayError as failure:
        answer = {"n": number, "error": type(failure).__name__, "text": str(failure)}
    except Exception as failure:  # noqa: BLE001
        answer = {"n": number, "error": "bug", "text": f"{type(failure).__name__}: {failure}"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(serve(Engine()))
