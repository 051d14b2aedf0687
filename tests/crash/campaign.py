"""Kills one process after another, brings each back at once, and looks at what became of everything else. One thread:
it forks."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from helpers.nodes import SHM, SMALL, config_text, merged

from crash import children
from crash.children import Child
from crash.streams import LIMIT_S, STREAMS, Content
from railrelay.client.cli import _node, clients
from railrelay.shm_layout import abi, faults

NODES: Final = 2
ENGINES: Final = 4
RAILS: Final = 2
ELSEWHERE: Final = "daemon.takeover."  # of verbs rails, which there are none of here
POINTS: Final = tuple(point for point in faults.POINTS if not point.startswith(ELSEWHERE))
_PASSES_S: Final = 0.4  # what traffic passes at all it passes within this time
_TURN_S: Final = 2.0
_SILENCE_S: Final = 1.0  # longer than settle_s, shorter than peer_s
_SETTLE_S: Final = 5.0
_FDS: Final = (
    16  # what a process may have more of later: connections and worker threads come when they are first needed
)
_THREADS: Final = 8
_CHECK_EVERY: Final = 20  # cycles
# How points are passed, where traffic alone is not enough; else the ways are tried one after the other.
_LIKELY: Final = {
    "client.attach": "start",
    "client.lane.leased": "start",
    "client.reattach": "restart",
    "daemon.start": "start",
    "daemon.attach": "engine",
    "daemon.detach": "engine",
    "daemon.lane.leased": "engine",
    "daemon.lane.reserved": "engine",
    "daemon.bounce.made": "engine",
    "daemon.peer": "peer",
    "daemon.session": "peer",
    "daemon.rail": "peer",
    "daemon.fence.answered": "silence",
    "daemon.settle": "silence",
    "daemon.fence": "peer",
}
_TIMEOUTS: Final = {"connect_s": 2, "peer_s": 2, "session_linger_s": 2}


Way = tuple[str, Callable[[str], Child | None]]  # how a point may be passed, and what does it: whoever died, or None


class Over(Exception):
    """The campaign cannot go on; the tally says why."""


@dataclass
class Tally:
    kills: int = 0
    wrong_bytes: int = 0
    hangs: int = 0
    leaks: int = 0
    recover_ms: list[float] = field(default_factory=list)
    reached: Counter[str] = field(default_factory=Counter)
    missed: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return not (self.wrong_bytes or self.hangs or self.leaks or self.missed or self.problems)


class Campaign:
    def __init__(self, directory: Path, seed: int, say: Callable[[str], None]) -> None:
        self.tally = Tally()
        self._random = random.Random(seed)
        self._say = say
        self._directory = directory
        self._content = Content(seed)
        self._instances = [f"crash-{os.getpid()}-{node}" for node in range(NODES)]
        self._sockets = [directory / f"{node}.sock" for node in range(NODES)]
        for node, instance in enumerate(self._instances):
            sections = merged(SMALL, {"node": {"port": _free_port()}, "timeouts": _TIMEOUTS})
            text = config_text(instance, self._sockets[node], RAILS, sections)
            (directory / f"{node}.toml").write_text(text)
        self._children: dict[str, Child] = {}
        self._expected: set[int] = set()  # pids that may die by SIGKILL
        self._dead: list[Child] = []
        self._rounds: dict[int, tuple[float, float]] = {}  # by stream: the first round that began after _since, its end
        self._since = 0.0
        self._paused: set[int] = set()
        self._hints: dict[str, str] = {}
        self._first: dict[int, tuple[int, int]] = {}  # pid -> descriptors and threads when it was first looked at

    # ---- the whole ----

    def run(self, kills: int) -> None:
        """At every fault point, and at random moments until there are ``kills``."""
        for node in range(NODES):
            self._start(f"daemon{node}")
        for number in range(ENGINES):
            self._start(f"engine{number}")
        self._recover(time.monotonic())
        points = list(POINTS)
        cycles, told = 0, time.monotonic()
        while self.tally.kills < kills or cycles < len(points):
            lap, at = divmod(cycles, 2 * len(points))
            if at == 0:
                self._random.shuffle(points)
            if at < len(points):
                self._at_point(points[at], lap)
            else:
                self._at_random()
            cycles += 1
            if cycles % _CHECK_EVERY == 0:
                self._check()
            if time.monotonic() - told > 5:
                told = time.monotonic()
                self._progress(kills)
        self.tally.missed = sorted(set(points) - set(self.tally.reached))
        self._check(last=True)  # all senders are between two rounds then, and ask no receiver that has ended
        self._end()

    def _progress(self, kills: int) -> None:
        tally = self.tally
        times = sorted(tally.recover_ms) or [0.0]
        self._say(
            f"{tally.kills} kills of at least {kills}, {len(tally.reached)} points, {tally.rounds} checked transfers,"
            f" {tally.wrong_bytes} wrong bytes, {tally.leaks} leaks; back after {times[len(times) // 2]:.0f} ms,"
            f" at most {times[-1]:.0f}"
        )

    # ---- a kill ----

    def _at_point(self, point: str, lap: int) -> None:
        often = lap > 0 and self._hints.get(point, "").startswith("traffic")
        order = f"{point}:{self._random.choice([1, 2, 5]) if often else 1}"
        kind = point.split(".")[0]
        ways = self._client_ways() if kind == "client" else self._daemon_ways()
        likely = next((way for prefix, way in _LIKELY.items() if point.startswith(prefix)), "traffic")
        hint = self._hints.get(point, likely)  # a whole way, or its first word
        for name, way in sorted(ways, key=lambda known: not known[0].startswith(hint)):
            victim = way(order)
            if victim is not None:
                self._hints[point] = name
                self.tally.reached[point] += 1
                self._recover(self._since)
                return

    def _client_ways(self) -> list[Way]:
        engines = self._random.sample(range(ENGINES), ENGINES)
        return [
            *((f"traffic {number}", partial(self._armed, f"engine{number}")) for number in engines),
            *((f"start {number}", partial(self._from_start, f"engine{number}")) for number in engines),
            *(
                (f"restart {number}", partial(self._armed, f"engine{number}", kill=f"daemon{number // 2}"))
                for number in engines
            ),
        ]

    def _daemon_ways(self) -> list[Way]:
        nodes = self._random.sample(range(NODES), NODES)
        own = [f"engine{2 * node + self._random.randrange(2)}" for node in range(NODES)]
        return [
            *((f"traffic {node}", partial(self._armed, f"daemon{node}")) for node in nodes),
            *((f"engine {node}", partial(self._armed, f"daemon{node}", kill=own[node])) for node in nodes),
            *((f"peer {node}", partial(self._armed, f"daemon{node}", kill=f"daemon{1 - node}")) for node in nodes),
            *((f"start {node}", partial(self._from_start, f"daemon{node}")) for node in nodes),
            *((f"silence {node}", partial(self._armed, f"daemon{node}", stop=f"daemon{1 - node}")) for node in nodes),
        ]

    def _armed(self, name: str, order: str, *, kill: str = "", stop: str = "") -> Child | None:
        """Arms a running process, and kills another one if the point is passed only then, or stops it for a while. The
        one that died, or None."""
        child = self._children[name]
        self._expected.add(child.pid)
        child.arm(order)
        if kill:
            self._kill(kill)
        if stop:
            self._silence(stop)
        if self._dies(child, _TURN_S if kill or stop else _PASSES_S):
            self._start(name)
            return child
        if self._dies_disarmed(child):
            self._start(name)
            return child
        self._expected.discard(child.pid)
        if kill or stop:
            self._recover(self._since)
        return None

    def _dies_disarmed(self, child: Child) -> bool:
        """Whether it has passed the point before it heard that it need not."""
        child.arm("")
        deadline = time.monotonic() + LIMIT_S
        while child not in self._dead and not child.has_armed():
            if time.monotonic() > deadline:
                self._hang(f"{child.name} handles no signal")
            self._pump(0.01)
        return self._dies(child, 0.05)

    def _silence(self, name: str) -> None:
        """A daemon answers nothing for a while, and what waits for it times out: it is asked to fence."""
        child = self._children[name]
        engines = [engine for other, engine in self._children.items() if other.startswith("engine")]
        for engine in engines:
            engine.command("hurry")
        child.signal(signal.SIGSTOP)
        deadline = time.monotonic() + _SILENCE_S
        while (left := deadline - time.monotonic()) > 0:
            self._pump(left)
        child.signal(signal.SIGCONT)
        for engine in engines:
            engine.command("calm")

    def _from_start(self, name: str, order: str) -> Child | None:
        self._kill(name, order)
        child = self._children[name]
        self._expected.add(child.pid)
        if self._dies(child, _TURN_S):
            self._start(name)
            return child
        if self._dies_disarmed(child):
            self._start(name)
            return child
        self._expected.discard(child.pid)
        self._recover(self._since)
        return None

    def _at_random(self) -> None:
        deadline = time.monotonic() + self._random.uniform(0, 0.15)
        while (left := deadline - time.monotonic()) > 0:
            self._pump(left)
        names = [name for name in self._children if name.startswith("engine") or self._random.random() < 0.5]
        for name in self._random.sample(names, 2 if self._random.random() < 0.1 else 1):
            self._kill(name)
        self._recover(self._since)

    def _kill(self, name: str, order: str = "") -> None:
        child = self._children[name]
        self._expected.add(child.pid)
        child.signal(signal.SIGKILL)
        if not self._dies(child, LIMIT_S):
            self._hang(f"{name} does not die of SIGKILL")
        self._start(name, order)

    def _start(self, name: str, order: str = "") -> None:
        number = int(name[-1])
        if name.startswith("daemon"):
            work = children.daemon(self._directory / f"{number}.toml")
        else:
            work = children.engine(number, self._sockets[number // 2], self._directory, self._content)
        self._children[name] = children.fork(name, self._directory / f"{name}.log", order, work)

    def _dies(self, child: Child, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while child not in self._dead:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._pump(left)
        self._dead.remove(child)
        return True

    def _recover(self, since: float) -> None:
        """Until a checked transfer that began after the last kill has come through every stream."""
        deadline = time.monotonic() + LIMIT_S
        while len(self._rounds) < len(STREAMS) or self._since != since:
            since = self._since
            for child in list(self._dead):  # armed and disarmed too late
                self._dead.remove(child)
                self._start(child.name)
            left = deadline - time.monotonic()
            if left <= 0:
                lacking = sorted({stream.number for stream in STREAMS} - set(self._rounds))
                self._hang(f"streams {lacking} have not come back {LIMIT_S:g} s after the last kill")
            self._pump(min(left, 0.1))
        if self.tally.kills:
            self.tally.recover_ms.append(1e3 * (max(end for _, end in self._rounds.values()) - self._since))

    def _hang(self, text: str) -> None:
        self.tally.hangs += 1
        self.tally.problems.append(text)
        for child in self._children.values():
            child.signal(signal.SIGUSR2)  # stacks of its threads
        time.sleep(0.5)
        raise Over

    # ---- what the children say ----

    def _pump(self, timeout_s: float) -> None:
        """Waits for something to happen, at most ``timeout_s``, and takes it in."""
        poller = select.poll()
        by_fd: dict[int, Child] = {}
        for child in self._children.values():
            if child in self._dead:
                continue
            for fd in (child.pidfd, child.reports):
                poller.register(fd, select.POLLIN)
                by_fd[fd] = child
        ended: list[Child] = []
        for fd, _ in poller.poll(max(0, timeout_s) * 1e3 + 1):
            child = by_fd[fd]
            for report in child.take_reports():
                self._take(child, report)
            if fd == child.pidfd:
                ended.append(child)
        for child in ended:
            self._ended(child)

    def _ended(self, child: Child) -> None:
        code = child.reap()
        self._first.pop(child.pid, None)
        if code == -signal.SIGKILL and child.pid in self._expected:
            self._expected.discard(child.pid)
            self.tally.kills += 1
            self._since = time.monotonic()
            self._rounds.clear()
            self._dead.append(child)
            return
        self.tally.problems.append(
            f"{child.name} ended on its own with {code}; the end of its log:\n{_tail(child.log)}"
        )
        raise Over

    def _take(self, child: Child, report: dict[str, Any]) -> None:
        match report.get("kind", "ready"):
            case "round":
                self.tally.rounds += 1
                if report["began"] > self._since:
                    self._rounds.setdefault(report["stream"], (report["began"], report["at"]))
            case "ended":
                self.tally.ends[report["how"]] += 1
            case "wrong":
                self.tally.wrong_bytes += report["bytes"]
                self.tally.problems.append(
                    f"stream {report['stream']}: {report['bytes']} wrong bytes {report['when']},"
                    f" pages {report['pages']}"
                )
            case "paused":
                self._paused.add(child.pid)
            case "failed":
                self._hang(f"{child.name}: {report['text']}")

    # ---- looking ----

    def _check(self, *, last: bool = False) -> None:
        """Everything stands still: credits are back, no object or descriptor is left of who was killed."""
        engines = [child for name, child in self._children.items() if name.startswith("engine")]
        self._paused.clear()
        for child in engines:
            child.command("pause")
        deadline = time.monotonic() + LIMIT_S
        while {child.pid for child in engines} - self._paused:
            if time.monotonic() > deadline:
                self._hang("engines do not pause")
            self._pump(0.1)
        deadline = time.monotonic() + _SETTLE_S
        while problems := [*self._credits(), *self._objects(), *self._growth()]:
            if time.monotonic() > deadline:
                self.tally.leaks += len(problems)
                self.tally.problems += problems
                break
            self._pump(0.05)
        for child in [] if last else engines:
            child.command("resume")

    def _credits(self) -> Iterable[str]:
        for node, instance in enumerate(self._instances):
            with _node.open_node(instance) as segment:
                lanes = segment.area(abi.CONSTANTS["AREA_LANES"], "lane_state")
                for row in range(lanes.count):
                    head, doorbell, completed, produced, consumed = (
                        lanes.get(row, field) for field in ("head", "doorbell", "completed", "produced", "consumed")
                    )
                    if lanes.get(row, "leased") and not head == doorbell == completed:
                        yield f"daemon{node}: lane {row}: head {head}, doorbell {doorbell}, completed {completed}"
                    if produced != consumed:
                        yield f"daemon{node}: ring {row}: {produced} slices produced, {consumed} consumed"

    def _objects(self) -> Iterable[str]:
        for node, instance in enumerate(self._instances):
            with _node.open_node(instance) as segment:
                attached = {client["client"]: client for client in clients.read(segment)}
            if len(attached) != ENGINES // NODES:
                yield f"daemon{node}: {len(attached)} clients are attached, expected {ENGINES // NODES}"
            names = [name.split(".")[2:] for name in os.listdir(SHM) if name.startswith(f"railrelay.{instance}.")]
            for kind, *numbers in names:
                row = {"client": 0, "lane": 1, "bounce": 1}.get(kind)
                if row is not None and int(numbers[row]) not in attached:
                    yield f"daemon{node}: {kind}.{'.'.join(numbers)} is left in {SHM}"
            segments = sum(kind == "client" for kind, *_ in names)
            if segments != len(attached):
                yield f"daemon{node}: {segments} segments of {len(attached)} clients"

    def _growth(self) -> Iterable[str]:
        for child in self._children.values():
            have = child.descriptors(), child.threads()
            fds, threads = self._first.setdefault(child.pid, have)
            if have[0] > fds + _FDS or have[1] > threads + _THREADS:
                now = f"{have[0]} descriptors and {have[1]} threads"
                yield f"{child.name} pid {child.pid}: {now}, at first {fds} and {threads}"

    # ---- the end ----

    def _end(self) -> None:
        """Everybody is asked to."""
        self._end_all("engine", lambda child: child.command("end"))
        self._end_all("daemon", lambda child: child.signal(signal.SIGTERM))
        left = [name for instance in self._instances for name in os.listdir(SHM) if f".{instance}." in name]
        self.tally.leaks += len(left)
        self.tally.problems += [f"{name} is left in {SHM}" for name in left]

    def _end_all(self, kind: str, ask: Callable[[Child], None]) -> None:
        for name in [name for name in self._children if name.startswith(kind)]:
            child = self._children[name]
            ask(child)
            if not select.select([child.pidfd], [], [], LIMIT_S)[0]:
                self._hang(f"{name} does not end")
            code = child.reap()
            del self._children[name]
            if code:
                self.tally.problems.append(f"{name} ended with {code}; the end of its log:\n{_tail(child.log)}")

    def close(self) -> None:
        """Whatever happened: kills what runs and removes what it leaves."""
        for child in self._children.values():
            if not child.reaped:
                child.signal(signal.SIGKILL)
                child.reap()
        self._children.clear()
        for instance in self._instances:
            for path in SHM.glob(f"railrelay.{instance}.*"):
                path.unlink(missing_ok=True)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _free_port() -> int:
    """Below the range that the kernel chooses from, so that a daemon finds it free again when it comes back."""
    generator = random.Random()
    while True:
        port = generator.randrange(20000, 30000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
