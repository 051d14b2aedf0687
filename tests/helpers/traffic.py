"""Transfers one after another, each of them checked, for tests that break something meanwhile: what was lost, what was
wrong, and what came late."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from types import TracebackType

import numpy as np

from helpers import memory, patterns
from helpers.memory import Memory
from railrelay.client import Client, RelayError, RemoteRegion, Transfer


@dataclass
class Found:
    """Bytes, but for transfers, and hangs: transfers that did not end in time."""

    transfers: int = 0
    lost: int = 0
    wrong: int = 0
    late: int = 0
    hangs: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Traffic:
    """To one of two destinations on the rail ``rail`` of the receiver, in turn. What a transfer has written is checked
    when it has ended and is then cleared; what lands there before the next transfer to it begins is late. Runs in a
    thread of its own."""

    def __init__(
        self, sender: Client, receiver: Client, rails: Sequence[int], nbytes: int, block_bytes: int, limit_s: float
    ) -> None:
        self._sender = sender
        self._block_bytes, self._blocks, self._limit_s = block_bytes, nbytes // block_bytes, limit_s
        self._source = memory.make(sender, nbytes)
        self._source.array[:] = patterns.content(nbytes, 1)  # no byte of it is zero
        self._targets: dict[int, list[tuple[Memory, RemoteRegion]]] = {}
        for rail in rails:
            pair = [memory.make(receiver, nbytes, rail=rail) for _ in range(2)]
            self._targets[rail] = [(made, sender.open(made.offer())) for made in pair]
        self.rail = rails[0]  # of the next transfer
        self.found = Found()
        self.failure: BaseException | None = None
        self._now = (self.rail, self._targets[self.rail][0][0])  # what the present transfer goes to
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic")

    def under_way(self) -> bool:
        """On the rail ``rail`` some of the present transfer has arrived, and some has not, as far as blocks tell."""
        rail, target = self._now
        began = target.array[:: self._block_bytes] != 0
        return bool(rail == self.rail and began.any() and not began.all()) or not self._thread.is_alive()

    def check(self) -> None:
        """Raises what has ended it."""
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._once()
        except BaseException as failure:  # noqa: BLE001 - told by __exit__
            self.failure = failure

    def _once(self) -> None:
        targets = self._targets[rail := self.rail]
        targets.reverse()
        target, remote = targets[0]
        found, size = self.found, np.uint64(self._block_bytes)
        found.late += int(np.count_nonzero(target.array))
        target.array[:] = 0
        self._now = (rail, target)
        taken, put = patterns.order(self._blocks, self._block_bytes, found.transfers)
        transfer = self._sender.write(
            remote,
            taken + np.uint64(self._source.address),
            put + np.uint64(remote.address),
            self._block_bytes,
            timeout=2 * self._limit_s,
        )
        self._wait(transfer)
        found.transfers += 1
        expected = self._source.array.reshape(self._blocks, -1)[taken // size]
        placed = target.array.reshape(self._blocks, -1)[put // size]
        if not np.array_equal(expected, placed):
            missing = int(np.count_nonzero(placed == 0))
            found.lost += missing
            found.wrong += int(np.count_nonzero(expected != placed)) - missing
        target.array[:] = 0

    def _wait(self, transfer: Transfer) -> None:
        try:
            transfer.wait(self._limit_s)
        except TimeoutError:
            self.found.hangs += 1
            raise
        except RelayError:
            self.found.lost += self._blocks * self._block_bytes
            raise

    def last_look(self, pause_s: float) -> None:
        """After the end of all transfers."""
        time.sleep(pause_s)
        for target, _ in chain(*self._targets.values()):
            self.found.late += int(np.count_nonzero(target.array))

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self.check()
