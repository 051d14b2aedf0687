"""kill -9 in the middle of traffic over emulated rails: of the sending engine, and of the daemon, again and again.
Nobody hangs, the survivors' CUDA contexts stay healthy, no byte is wrong, and GPU memory returns to where it was."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np

from device import cells, systems
from device.cells import CELL_BYTES, Cells
from device.report import MIB, Options, Report
from device.systems import RECEIVER, SENDER
from railrelay.client import Client, PageLayout, RelayError, RemoteRegion, Transfer, TransferError, cuda
from railrelay.client.cli import _node, clients
from railrelay.client.cli._bench_memory import Pool, pool
from railrelay.client.cli._nodes import Emulated, Node
from railrelay.client.cli._workers import Worker

KILLS: Final = 50
_ROWS: Final = 16
_SPARES: Final = 3
_STEP_S: Final = 20.0
_START_S: Final = 90.0
_BUDGET_S: Final = 170.0
_MOST_S: Final = 0.1  # of traffic before the kill
_LEFT_BYTES: Final = 32 * MIB
_SEED: Final = 5


def nbytes_of(options: Options) -> int:
    return (4 if options.small else 64) * MIB


def placement(nbytes: int) -> Cells:
    """Which source cell belongs into each cell of the destination: pages in its first half, blocks in its second."""
    half = nbytes // CELL_BYTES // 2
    taken, put, block_taken, block_put = _orders(half)
    placed = np.empty(2 * half, np.int64)
    rows = np.arange(_ROWS)[:, None] * (half // _ROWS)
    placed[rows + put] = rows + taken
    placed[half + block_put] = half + block_taken
    return placed


def _orders(half: int) -> list[Cells]:
    generator = np.random.default_rng(_SEED)
    return [generator.permutation(count) for count in (half // _ROWS, half // _ROWS, half, half)]


class Engine:
    """Memory and a GPU context that outlive clients."""

    def __init__(self, rail: int, options: Options) -> None:
        self._rail = rail
        self._options = options
        self._gpu = (systems.gpus_of(options) or ("", ""))[rail]
        self._pool: Pool | None = pool(nbytes_of(options), self._gpu) if self._gpu else None
        self._client: Client | None = None
        self._contexts = [cuda.Gpu(ordinal) for ordinal in range(options.gpus)]

    def attach(self, socket: str, name: str) -> bytes:
        self._client = systems.connect(socket, self._rail, self._options, name)
        if not self._gpu:  # shared memory belongs to its client
            self._pool = pool(nbytes_of(self._options), "")
        self._region = self.memory.add(self._client)
        return self._region.offer()

    def detach(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @property
    def memory(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def healthy(self) -> bool:
        """A small copy to and from each GPU in this process's contexts."""
        for gpu in self._contexts:
            sent = np.frombuffer(os.urandom(4096), np.uint8)
            found = np.zeros(4096, np.uint8)
            address = gpu.alloc(4096)
            gpu.to_gpu(address, int(sent.ctypes.data), 4096)
            gpu.synchronize()
            gpu.to_host(int(found.ctypes.data), address, 4096)
            if not np.array_equal(sent, found):
                return False
        return True

    def free_bytes(self) -> list[int]:
        return [gpu.memory()[0] for gpu in self._contexts]

    def close(self) -> None:
        self.detach()
        if self._pool is not None:
            self._pool.close()
        for gpu in self._contexts:
            gpu.close()


class Sender(Engine):
    def __init__(self, options: Options) -> None:
        super().__init__(SENDER, options)
        self._filled = False
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._ends: list[str] = []

    def open(self, offer: bytes) -> None:
        assert self._client is not None
        self._remote: RemoteRegion = self._client.open(offer)
        if not self._filled or not self._gpu:
            cells.fill(self.memory, 0, nbytes_of(self._options) // CELL_BYTES)
            self._filled = True

    def transfer(self) -> None:
        """Everything once."""
        for transfer in [self._pages(), self._blocks()]:
            transfer.wait()

    def start_traffic(self) -> None:
        """The same again and again, both halves at once."""
        self._stop.clear()
        self._ends = []
        self._threads = [threading.Thread(target=self._repeat, args=[send]) for send in (self._pages, self._blocks)]
        for thread in self._threads:
            thread.start()

    def end_of_traffic(self) -> list[str]:
        """How the transfers ended after the daemon was killed; "hangs" if they did not."""
        for thread in self._threads:
            thread.join(_STEP_S / 2)
        return self._ends + ["hangs" for thread in self._threads if thread.is_alive()]

    def _repeat(self, send: Any) -> None:  # noqa: ANN401
        try:
            while not self._stop.is_set():
                send().wait(_STEP_S / 2)
        except RelayError as failure:
            result = failure.result.name if isinstance(failure, TransferError) else failure.code.name
            self._ends.append(f"{type(failure).__name__} {result}")

    def _pages(self) -> Transfer:
        half = nbytes_of(self._options) // CELL_BYTES // 2
        taken, put, *_ = _orders(half)
        stride = half // _ROWS * CELL_BYTES
        layouts = [PageLayout.strided(base, _ROWS, stride, CELL_BYTES, CELL_BYTES) for base in self._bases()]
        return self._sending().write_pages(self._remote, layouts[0], taken, layouts[1], put)

    def _blocks(self) -> Transfer:
        half = nbytes_of(self._options) // CELL_BYTES // 2
        *_, taken, put = _orders(half)
        source, target = (base + half * CELL_BYTES for base in self._bases())
        return self._sending().write(
            self._remote, cells.addresses(source, taken), cells.addresses(target, put), CELL_BYTES
        )

    def _bases(self) -> tuple[int, int]:
        return self._region.address, self._remote.address

    def _sending(self) -> Client:
        assert self._client is not None
        return self._client


class Receiver(Engine):
    def __init__(self, options: Options) -> None:
        super().__init__(RECEIVER, options)
        self._placed = placement(nbytes_of(options))

    def wipe(self) -> None:
        self.memory.wipe()

    def wrong_lines(self, wiped_is_right: bool) -> int:
        return cells.wrong_lines(self.memory, 0, 0, self._placed, wiped_is_right=wiped_is_right)


class Spare(Worker):
    """A sender that is being made while others are killed."""

    def __init__(self, options: Options) -> None:
        super().__init__("sending engine", Sender, options)
        self._is_made = False

    def wait(self) -> None:
        if not self._is_made:
            self.result(_START_S)
            self._is_made = True


class Tally:
    """What came out of the kills so far."""

    def __init__(self) -> None:
        self.kills = self.wrong_lines = self.unhealthy = 0
        self.hangs: list[str] = []
        self.ends: collections.Counter[str] = collections.Counter()

    def row(self, report: Report, what: str, wanted: int, left: list[int], seconds: float, options: Options) -> None:
        moved = max((abs(nbytes) for nbytes in left), default=0)
        good = not self.hangs and not self.wrong_lines and not self.unhealthy and self.kills == wanted
        memory = f"GPU memory {', '.join(f'{nbytes / MIB:+.1f} MiB' for nbytes in left)}" if left else "no GPU"
        ends = f"; transfers ended with {', '.join(f'{name} ({count})' for name, count in self.ends.items())}"
        hung = f" ({self.hangs[0]})" if self.hangs else ""
        report.row(
            f"kill -9 of the {what} in traffic, {options.place}",
            f"{self.kills} of {wanted} kills: {len(self.hangs)} hangs{hung}, {self.unhealthy} contexts lost,"
            f" {self.wrong_lines} wrong lines; {memory}{ends if self.ends else ''}; {seconds:.0f} s",
            f"0 hangs, 0 lost, 0 wrong, memory within {_LEFT_BYTES // MIB} MiB",
            good and moved <= _LEFT_BYTES,
            **{**vars(self), "ends": dict(self.ends)},
            left_bytes=left,
        )


def engine(report: Report, options: Options) -> None:
    wanted, tally, began = _wanted(options), Tally(), time.monotonic()
    generator = random.Random(_SEED)
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(systems.daemon(options))
        receiver = stack.enter_context(Worker("receiving engine", Receiver, options))
        spares: collections.deque[Spare] = collections.deque()
        stack.callback(_close_all, spares)
        spares.extend(Spare(options) for _ in range(_spares(options)))
        receiver.result(_START_S)
        offer = receiver.ask("attach", node.socket, "receiver")
        before: list[int] = []
        for number in range(wanted + 1):  # the first does not count: memory is measured after it
            spares.append(Spare(options))
            victim = spares.popleft()
            try:
                victim.wait()
                _one_engine(node, victim, receiver, offer, tally, generator)
            except RelayError as failure:
                tally.hangs.append(str(failure))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                victim.close()
            if tally.hangs or time.monotonic() - began > _BUDGET_S:
                break
            if number == 0:
                before = _free(receiver, spares)
            else:
                tally.kills += 1
        left = [now - then for now, then in zip(_free(receiver, spares), before, strict=False)]
    tally.row(report, "engine", wanted, [-nbytes for nbytes in left], time.monotonic() - began, options)


def _one_engine(
    node: Node, victim: Worker, receiver: Worker, offer: bytes, tally: Tally, generator: random.Random
) -> None:
    victim.ask("attach", node.socket, "victim", timeout=_STEP_S)
    victim.ask("open", offer, timeout=_STEP_S)
    receiver.ask("wipe", timeout=_STEP_S)
    victim.ask("transfer", timeout=_STEP_S)
    tally.wrong_lines += receiver.ask("wrong_lines", False, timeout=_STEP_S)
    receiver.ask("wipe", timeout=_STEP_S)
    victim.ask("start_traffic", timeout=_STEP_S)
    time.sleep(generator.uniform(0, _MOST_S))
    os.kill(victim.pid, signal.SIGKILL)
    deadline = time.monotonic() + _STEP_S
    while _attached(node) > 1:
        if time.monotonic() > deadline:
            tally.hangs.append(f"the daemon keeps the killed engine for more than {_STEP_S:g} s")
            break
        time.sleep(0.005)
    tally.wrong_lines += receiver.ask("wrong_lines", True, timeout=_STEP_S)
    tally.unhealthy += not receiver.ask("healthy", timeout=_STEP_S)


def _attached(node: Node) -> int:
    with _node.open_node(node.instance) as segment:
        return len(clients.read(segment))


def _free(engine: Worker, spares: collections.deque[Spare]) -> list[int]:
    """Free GPU memory once every spare process has all that it will have."""
    for spare in spares:
        spare.wait()
    found: list[int] = engine.ask("free_bytes", timeout=_STEP_S)
    return found


def daemon(report: Report, options: Options) -> None:
    wanted, tally, began = _wanted(options), Tally(), time.monotonic()
    generator = random.Random(_SEED)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-device-")))
        starting = stack.enter_context(ThreadPoolExecutor(_spares(options) + 1))
        nodes: collections.deque[Future[Node]] = collections.deque()
        stack.callback(lambda: _close_all([node.result() for node in nodes]))
        sender = stack.enter_context(Worker("sending engine", Sender, options))
        receiver = stack.enter_context(Worker("receiving engine", Receiver, options))
        numbers = iter(range(wanted + 2 + _spares(options)))

        def start() -> None:
            nodes.append(starting.submit(_node_number, next(numbers), directory, options))

        for _ in range(_spares(options)):
            start()
        for worker in (sender, receiver):
            worker.result(_START_S)
        before: list[int] = []
        for number in range(wanted + 1):
            start()
            node = nodes.popleft().result()
            try:
                _one_daemon(node, sender, receiver, tally, generator)
            except RelayError as failure:
                tally.hangs.append(str(failure))
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(node.pid, signal.SIGKILL)
                node.close()
                _unlink(node.instance)
            if tally.hangs or time.monotonic() - began > _BUDGET_S:
                break
            if number == 0:
                before = _free_beside(receiver, nodes)
            else:
                tally.kills += 1
        left = [now - then for now, then in zip(_free_beside(receiver, nodes), before, strict=False)]
    tally.row(report, "daemon", wanted, [-nbytes for nbytes in left], time.monotonic() - began, options)


def _one_daemon(node: Node, sender: Worker, receiver: Worker, tally: Tally, generator: random.Random) -> None:
    offer = receiver.ask("attach", node.socket, "receiver", timeout=_STEP_S)
    sender.ask("attach", node.socket, "sender", timeout=_STEP_S)
    sender.ask("open", offer, timeout=_STEP_S)
    receiver.ask("wipe", timeout=_STEP_S)
    sender.ask("transfer", timeout=_STEP_S)
    tally.wrong_lines += receiver.ask("wrong_lines", False, timeout=_STEP_S)
    receiver.ask("wipe", timeout=_STEP_S)
    sender.ask("start_traffic", timeout=_STEP_S)
    time.sleep(generator.uniform(0, _MOST_S))
    os.kill(node.pid, signal.SIGKILL)
    ends = sender.ask("end_of_traffic", timeout=2 * _STEP_S)
    tally.ends.update(ends)
    if "hangs" in ends or len(ends) != 2:
        tally.hangs.append(f"transfers ended with {ends}")
    for worker in (sender, receiver):
        tally.unhealthy += not worker.ask("healthy", timeout=_STEP_S)
    tally.wrong_lines += receiver.ask("wrong_lines", True, timeout=_STEP_S)
    for worker in (sender, receiver):
        worker.ask("detach", timeout=_STEP_S)


def _free_beside(engine: Worker, nodes: collections.deque[Future[Node]]) -> list[int]:
    for node in nodes:
        node.result()
    time.sleep(0.5)  # the killed daemon's helpers are gone by then
    found: list[int] = engine.ask("free_bytes", timeout=_STEP_S)
    return found


def _node_number(number: int, directory: Path, options: Options) -> Node:
    nics = [Emulated(systems.rates(options), gpu) for gpu in systems.gpus_of(options) or ("", "")]
    geometry = systems.geometry(options)
    return Node(f"device-{os.getpid()}-kill-{number}", directory, geometry, (-1, -1), nics=nics)


def _unlink(instance: str) -> None:
    """What a killed daemon leaves: the next one of its name would do this."""
    for path in Path("/dev/shm").glob(f"railrelay.{instance}.*"):
        path.unlink(missing_ok=True)


def _close_all(things: Iterable[Worker | Node]) -> None:
    for thing in things:
        thing.close()


def _wanted(options: Options) -> int:
    return 3 if options.small else KILLS


def _spares(options: Options) -> int:
    return 1 if options.small else _SPARES
