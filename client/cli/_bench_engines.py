"""The two engine processes of the bench. Each has one client and one region per rail, with blocks scattered in it, and
moves them through the relay daemons or, for the limit, by plain sockets from and to the same places."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from railrelay.client import Client, limit
from railrelay.client.cli import _content
from railrelay.client.cli._nodes import ADDRESS, MIB, Verbs
from railrelay.client.client import Route
from railrelay.client.core import HostEvent
from railrelay.client.regions import Region, RemoteRegion

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]
Part = tuple[Addresses, Addresses]  # and lengths

_SEED: Final = 7
_CHUNK_BYTES: Final = 32 * MIB  # of content made at a time
_SAMPLE_BYTES: Final = 16 * MIB
_SAMPLE_BLOCKS: Final = 256
_TIMEOUT_S: Final = 60.0
_SETTLE_S: Final = 0.05
_SWITCH_S: Final = 0.0005  # that a thread which wants the GIL waits
_SILENCE_NS: Final = 50_000  # shorter ones are the ticker's own


@dataclass(frozen=True)
class Case:
    """``blocks`` of ``block_bytes``, spread over the rails; rank r of the sender writes to the receiver's rail
    ``r + shift``."""

    blocks: int
    block_bytes: int
    rails: int = 1
    shift: int = 0
    route: Route = Route.RELAY_ALL
    private: bool = False
    congestion: str = ""
    sending: tuple[Verbs, ...] = ()  # of each rail; none: TCP
    receiving: tuple[Verbs, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes

    def first_block(self, rail: int) -> int:
        return self.blocks * rail // self.rails

    def count(self, rail: int) -> int:
        return self.first_block(rail + 1) - self.first_block(rail)


class Side:
    """What sender and receiver have in common."""

    def __init__(self, side: int, case: Case, path: str, cpus: Sequence[int], feeder_cpu: int = -1) -> None:
        """``cpus``: core of each thread that moves the limit's bytes, -1 for any."""
        self.case = case
        self._cpus = list(cpus)
        self._stack = contextlib.ExitStack()
        self._sockets: list[socket.socket] = []
        self.clients: list[Client] = []
        self.regions: list[Region] = []
        self._memory: list[Bytes] = []
        self._order: list[npt.NDArray[np.int64]] = []
        generator = np.random.default_rng(_SEED + side)
        for rank in range(case.rails):
            name = f"bench-{'receive' if side else 'send'}-{rank}"
            client = Client.connect(path, rank=rank, name=name, route=case.route, feeder_cpu=feeder_cpu)
            self.clients.append(self._stack.enter_context(client))
        for rank in range(case.rails):
            blocks = case.count(rank if side == 0 else (rank - case.shift) % case.rails)
            nbytes = max(1, blocks) * case.block_bytes
            if case.private:
                memory = np.zeros(nbytes, np.uint8)
                memory[:] = 1  # every page is there now
                region = self.clients[rank].register(memory, rail=rank)
            else:
                buffer = self.clients[rank].alloc(nbytes, rail=rank)
                memory, region = buffer.array, buffer.region
            self.regions.append(region)
            self._memory.append(memory)
            self._order.append(generator.permutation(blocks))

    def offers(self) -> list[bytes]:
        return [region.offer() for region in self.regions]

    def close(self) -> None:
        for connected in self._sockets:
            connected.close()
        self._stack.close()

    def addresses(self, rank: int) -> Addresses:
        """Of the blocks of a region, in the order in which they are sent."""
        places = self._order[rank].astype(np.uint64) * np.uint64(self.case.block_bytes)
        return places + np.uint64(self.regions[rank].address)

    def _blocks(self, rank: int) -> Bytes:
        count = len(self._order[rank])
        return self._memory[rank][: count * self.case.block_bytes].reshape(count, self.case.block_bytes)

    def _part(self, rank: int) -> Part:
        addresses = self.addresses(rank)
        return addresses, np.full(len(addresses), self.case.block_bytes, np.uint64)

    def _content(self, sender_rank: int, first: int, count: int) -> Bytes:
        return self._content_of(np.arange(first, first + count) + self.case.first_block(sender_rank))

    def _content_of(self, blocks: npt.NDArray[np.int64]) -> Bytes:
        whole = _content.words(_content.keys(_SEED, blocks.astype(np.uint64)), 0, -(-self.case.block_bytes // 8))
        return whole.view(np.uint8)[:, : self.case.block_bytes]


class Sender(Side):
    def __init__(self, case: Case, path: str, cpus: Sequence[int], caller_cpu: int, feeder_cpu: int) -> None:
        super().__init__(0, case, path, cpus, feeder_cpu)
        self._slots: Bytes | None = None
        self._calls: list[tuple[Client, RemoteRegion, Addresses, Addresses, Addresses]] = []
        if caller_cpu >= 0:
            os.sched_setaffinity(0, [caller_cpu])

    def fill(self) -> None:
        for rank in range(self.case.rails):
            blocks, order = self._blocks(rank), self._order[rank]
            step = max(1, _CHUNK_BYTES // self.case.block_bytes)
            for first in range(0, len(order), step):
                places = order[first : first + step]
                blocks[places] = self._content(rank, first, len(places))

    def open(self, offers: list[bytes], destinations: list[Addresses]) -> None:
        for rank, client in enumerate(self.clients):
            far = (rank + self.case.shift) % self.case.rails
            remote = client.open(offers[far])
            sources, lengths = self._part(rank)
            if len(sources):
                self._calls.append((client, remote, sources, destinations[far], lengths))

    def transfer(self, rounds: int, gap_ns: int) -> list[int]:
        """ns from the call to the end of the wait, each round."""
        spent = []
        for _ in range(rounds):
            if gap_ns:
                time.sleep(gap_ns / 1e9)
            before = time.perf_counter_ns()
            transfers = [
                client.write(remote, sources, destinations, lengths, timeout=_TIMEOUT_S)
                for client, remote, sources, destinations, lengths in self._calls
            ]
            for transfer in transfers:
                transfer.wait()
            spent.append(time.perf_counter_ns() - before)
        return spent

    def connect(self, port: int) -> None:
        for _ in range(self.case.rails):
            self._sockets.append(_tuned(socket.create_connection((ADDRESS, port), _TIMEOUT_S), self.case.congestion))

    def plain_send(self, bytes_per_call: int, rounds: int, gap_ns: int) -> list[int]:
        """ns of each round, until the last connection's reply."""
        round_ns = np.zeros((self.case.rails, rounds), np.uint64)
        parts = [self._part(rank) for rank in range(self.case.rails)]
        fds = [connected.fileno() for connected in self._sockets]
        spent = limit.send(fds, self._cpus, parts, bytes_per_call, gap_ns, round_ns)
        return [int(ns) for ns in round_ns.max(axis=0)] if rounds > 1 else [spent]

    def gather(self, slots: int, slot_bytes: int) -> int:
        """CPU time, ns, of copying all blocks into slots once."""
        if self._slots is None:
            self._slots = np.ones(slots * slot_bytes, np.uint8)
        return sum(limit.gather(*self._part(rank), self._slots, slot_bytes) for rank in range(self.case.rails))

    # ---- for the other measurements ----

    def hold_back(self, callers: int, seconds: float, daemon_pid: int) -> tuple[float, float]:
        """CPU seconds that this process and the daemon use while ``callers`` threads wait for transfers whose event is
        not set."""
        event = HostEvent()
        client, remote, sources, destinations, lengths = self._calls[0]
        transfers = [
            client.write(remote, sources[:1], destinations[:1], lengths[:1], ready=event, timeout=seconds + _TIMEOUT_S)
            for _ in range(callers)
        ]
        threads = [threading.Thread(target=transfer.wait) for transfer in transfers]
        for thread in threads:
            thread.start()
        time.sleep(_SETTLE_S)
        pids = (os.getpid(), daemon_pid)
        before = [limit.process_cpu_ns(pid) for pid in pids]
        time.sleep(seconds)
        spent = [limit.process_cpu_ns(pid) - ns for pid, ns in zip(pids, before, strict=True)]
        event.set()
        for thread in threads:
            thread.join()
        return spent[0] / 1e9, spent[1] / 1e9

    def hold_event(self, rounds: int, delay_s: float, daemon_pid: int) -> list[tuple[float, float, float]]:
        """Each round begins a transfer whose event is set ``delay_s`` later: CPU seconds of the feeder and of the
        rail's thread meanwhile, seconds from the event to the end of the transfer."""
        client, remote, sources, destinations, lengths = self._calls[0]
        threads = (_thread_named("rr-feeder", os.getpid()), _thread_named("rail-0", daemon_pid))
        found = []
        for _ in range(rounds):
            event = HostEvent()
            before = [_cpu_ns(thread) for thread in threads]
            transfer = client.write(remote, sources, destinations, lengths, ready=event, timeout=_TIMEOUT_S)
            time.sleep(delay_s)
            feeder, rail = (_cpu_ns(thread) - ns for thread, ns in zip(threads, before, strict=True))
            begin = time.perf_counter_ns()
            event.set()
            transfer.wait()
            found.append((feeder / 1e9, rail / 1e9, (time.perf_counter_ns() - begin) / 1e9))
        return found

    def submit(self, rounds: int) -> list[Submission]:
        client, remote, sources, destinations, lengths = self._calls[0]
        sys.setswitchinterval(_SWITCH_S)
        found = []
        for _ in range(rounds):
            with _Ticker() as ticker:
                begin = time.perf_counter_ns()
                transfer = client.write(remote, sources, destinations, lengths, timeout=_TIMEOUT_S)
                end = time.perf_counter_ns()
            transfer.wait()
            took = time.perf_counter_ns() - begin
            with _Ticker() as idle:
                idle_begin = time.perf_counter_ns()
                time.sleep((end - begin) / 1e9)
                idle_end = time.perf_counter_ns()
            found.append(
                Submission(end - begin, ticker.silent_ns(begin, end), idle.silent_ns(idle_begin, idle_end), took)
            )
        return found


class Submission(NamedTuple):
    """ns: the write() call; that another Python thread could not run meanwhile, which is how long the call held the
    GIL; the same during a sleep of that length (the noise of the measurement); until the transfer was done."""

    call_ns: int
    held_ns: int
    noise_ns: int
    done_ns: int


class _Ticker:
    """A Python thread that only looks at the clock: when it is silent, it did not get the GIL, or no core."""

    def __init__(self) -> None:
        self._silences: list[tuple[int, int]] = []
        self._stop = False
        self._thread = threading.Thread(target=self._tick)

    def _tick(self) -> None:
        last = time.perf_counter_ns()
        while not self._stop:
            now = time.perf_counter_ns()
            if now - last > _SILENCE_NS:
                self._silences.append((last, now))
            last = now

    def silent_ns(self, begin: int, end: int) -> int:
        return sum(max(0, min(end, until) - max(begin, since)) for since, until in self._silences)

    def __enter__(self) -> _Ticker:
        self._thread.start()
        time.sleep(_SETTLE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def _thread_named(name: str, pid: int) -> Path:
    """/proc directory of a thread."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return task
    raise LookupError(f"process {pid} has no thread {name}")


def _cpu_ns(task: Path) -> int:
    return int((task / "schedstat").read_text().split()[0])


class Receiver(Side):
    def __init__(self, case: Case, path: str, cpus: Sequence[int]) -> None:
        super().__init__(1, case, path, cpus)

    def destinations(self) -> list[Addresses]:
        return [self.addresses(rank) for rank in range(self.case.rails)]

    def listen(self) -> int:
        self._listener = self._stack.enter_context(socket.create_server((ADDRESS, 0)))
        self._listener.settimeout(_TIMEOUT_S)
        _tuned(self._listener, self.case.congestion, keep_timeout=True)
        port: int = self._listener.getsockname()[1]
        return port

    def accept(self) -> None:
        """In the order of the sender's ranks."""
        for _ in range(self.case.rails):
            self._sockets.append(_tuned(self._listener.accept()[0], self.case.congestion))

    def plain_receive(self, bytes_per_call: int, rounds: int) -> None:
        parts = [self._part((rank + self.case.shift) % self.case.rails) for rank in range(self.case.rails)]
        limit.receive([connected.fileno() for connected in self._sockets], self._cpus, parts, bytes_per_call, rounds)

    def wipe(self) -> None:
        for memory in self._memory:
            memory[:] = 0xA5

    def check(self) -> int:
        """Wrong blocks."""
        wrong = 0
        for rank in range(self.case.rails):
            blocks, order = self._blocks(rank), self._order[rank]
            sender = (rank - self.case.shift) % self.case.rails
            step = max(1, _CHUNK_BYTES // self.case.block_bytes)
            for first in range(0, len(order), step):
                places = order[first : first + step]
                wrong += int((blocks[places] != self._content(sender, first, len(places))).any(axis=1).sum())
        return wrong

    def wipe_sample(self, seed: int) -> None:
        for rank, places, _ in self._sample(seed):
            self._blocks(rank)[places] = 0xA5

    def check_sample(self, seed: int) -> int:
        """Wrong blocks among those that wipe_sample() wiped."""
        return sum(
            int((self._blocks(rank)[places] != self._content_of(blocks)).any(axis=1).sum())
            for rank, places, blocks in self._sample(seed)
        )

    def _sample(self, seed: int) -> list[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """(rank, places in its region, blocks)"""
        generator = np.random.default_rng(seed)
        found = []
        for rank, order in enumerate(self._order):
            if not len(order):
                continue
            most = max(1, min(_SAMPLE_BLOCKS, _SAMPLE_BYTES // self.case.block_bytes) // self.case.rails)
            at = np.unique(generator.integers(0, len(order), most))
            sender = (rank - self.case.shift) % self.case.rails
            found.append((rank, order[at], at + self.case.first_block(sender)))
        return found


def _tuned(connected: socket.socket, congestion: str, *, keep_timeout: bool = False) -> socket.socket:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if congestion:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
    if not keep_timeout:
        connected.settimeout(None)
    return connected
