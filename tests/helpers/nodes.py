"""Real daemons: configuration, start, end, and what they leave behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helpers import processes, rail_devices
from helpers.processes import Process
from helpers.rail_devices import Device, Devices
from helpers.verbs_stand_in import Fabric
from helpers.waiting import LIMIT_S, until
from railrelay.client import Client

SHM: Final = Path("/dev/shm")
PREFIX: Final = "railrelay."
_numbers: Final = itertools.count(1)

# Small, so that a few MiB fill and reuse everything many times, and quick to give up.
SMALL: Final[Mapping[str, Mapping[str, object]]] = {
    "relay": {
        "slots": 4,
        "slot_bytes": "256KiB",
        "table_entries": 512,
        "ring_slices": 16,
        "ring_tables": 8,
        "direct_slice_bytes": "256KiB",
        "express_bytes": "64KiB",
        "bounce_slots": 2,
        "transfers": 64,
    },
    "timeouts": {
        "connect_s": 2,
        "peer_s": 3,
        "settle_s": 0.3,
        "fence_s": 0.3,
        "drain_s": 3,
        "session_linger_s": 10,
        "predecessor_s": 3,
    },
    "tcp": {"congestion": "reno"},
}


Rails = int | Sequence[str] | Sequence[Device]


def new_instance() -> str:
    """A name that no other run uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


def config_text(instance: str, socket: Path | str, rails: Rails, sections: Mapping[str, Mapping[str, object]]) -> str:
    """TOML; ``rails``: how many on 127.0.0.1, or their addresses, or RDMA devices. ``sections`` may add to [node], and
    "rail" to each [[rail]]."""
    addresses = ["127.0.0.1"] * rails if isinstance(rails, int) else rails
    node: dict[str, object] = {"instance": instance, "socket": str(socket), **sections.get("node", {})}
    lines: list[str] = []
    of_rails = [f"{option} = {json.dumps(value)}" for option, value in sections.get("rail", {}).items()]
    for name, options in {**sections, "node": node}.items():
        if name == "rail":
            continue
        lines += [f"[{name}]", *(f"{option} = {json.dumps(value)}" for option, value in options.items())]
    for rail in addresses:
        own = rail.lines() if isinstance(rail, Device) else [f'address = "{rail}"']
        lines += ["[[rail]]", *own, *of_rails]
    return "\n".join(lines) + "\n"


def merged(
    base: Mapping[str, Mapping[str, object]], changes: Mapping[str, Mapping[str, object]]
) -> dict[str, dict[str, object]]:
    return {name: {**base.get(name, {}), **changes.get(name, {})} for name in {**base, **changes}}


@dataclass
class Node:
    """A daemon that has said that it is ready."""

    instance: str
    socket: str
    session: str
    log_path: Path
    config_path: Path
    process: Process
    devices: Sequence[Device] = ()  # of verbs rails
    fabric: Fabric | None = None
    ended: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def connect(self, rank: int = 0, **options: Any) -> Client:  # noqa: ANN401
        return Client.connect(self.socket, rank=rank, **options)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stopped by SIGSTOP meanwhile."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        until(lambda: processes.state(self.pid) == "T", "the daemon stops")

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        code = self.process.wait(LIMIT_S)
        self.ended = True
        return code

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.wait()

    def objects(self) -> list[str]:
        """Shared memory objects of this instance."""
        return sorted(name for name in os.listdir(SHM) if name.startswith(f"{PREFIX}{self.instance}."))

    def errors(self) -> list[dict[str, Any]]:
        """The distinct error log, as the command `railrelay errors` reads it."""
        return self.cli("errors")["errors"]  # type: ignore[no-any-return]

    def cli(self, verb: str, *arguments: str) -> dict[str, Any]:
        said = self.log_path.with_suffix(f".{verb}.log")
        command = ["-m", "railrelay.client.cli", verb, "--instance", self.instance, "--json", *arguments]
        process = processes.start(command, log=said, limit_s=int(LIMIT_S), pipes=True)
        try:
            assert process.stdout is not None
            text = process.stdout.read()
            assert process.wait(LIMIT_S) == 0, said.read_text()
        finally:
            processes.end(process)
        shown: dict[str, Any] = json.loads(text)
        return shown

    def peer_states(self) -> dict[str, str]:
        return {peer["session"]: peer["state"] for peer in self.cli("peers")["peers"]}


@dataclass
class Starting:
    node: Node
    ready_fd: int


@dataclass
class Nodes:
    """Starts daemons below ``directory`` and ends all of them. With nic "verbs" a number of rails means so many RDMA
    devices; nodes of a pair have different ones, if there are enough."""

    directory: Path
    nic: str = "tcp"
    limit_s: int = processes.LIMIT_S
    environment: dict[str, str] = field(default_factory=dict)  # more of it, for daemons
    started: list[Node] = field(default_factory=list)
    tolerated: list[str] = field(default_factory=list)  # what logs may say in spite of the rules of check()
    devices: Devices = field(init=False, repr=False)  # of verbs

    def __post_init__(self) -> None:
        if self.nic == "verbs":
            self.devices = rail_devices.devices(self.directory / "fabric")
            self.environment.update(self.devices.environment)

    def start(
        self,
        rails: Rails = 1,
        *,
        instance: str = "",
        prefix: Sequence[str] = (),
        base: Mapping[str, Mapping[str, object]] = SMALL,
        **sections: Mapping[str, object],
    ) -> Node:
        """``sections`` change single options of ``base``, as in relay={"slots": 2}."""
        [own] = self._rails([rails])
        return self._ready(self._begin(own, instance, prefix, self._sections(base, sections)))

    def start_file(self, instance: str, config: Path, *, anew: bool = False) -> Node:
        """With a configuration file of the test's own. ``anew``: with its own command line, by which it is found."""
        return self._ready(self._spawn(instance, config, (), anew=anew))

    def pair(
        self,
        rails: tuple[Rails, Rails] = (1, 1),
        *,
        prefix: Sequence[str] = (),
        base: Mapping[str, Mapping[str, object]] = SMALL,
        **sections: Mapping[str, object],
    ) -> tuple[Node, Node]:
        """A prefill and a decode node."""
        options = self._sections(base, sections)
        starting = [self._begin(own, "", prefix, options) for own in self._rails(rails)]
        first, second = (self._ready(one) for one in starting)
        return first, second

    def _rails(self, rails: Sequence[Rails]) -> list[Rails]:
        counts = [rail for rail in rails if isinstance(rail, int)]
        if self.nic != "verbs" or len(counts) < len(rails):
            return list(rails)
        return list(self.devices.split(counts))

    def _sections(
        self, base: Mapping[str, Mapping[str, object]], sections: Mapping[str, Mapping[str, object]]
    ) -> dict[str, dict[str, object]]:
        return merged(merged(base, rail_devices.SECTIONS if self.nic == "verbs" else {}), sections)

    def fails(self, text: str) -> tuple[int, str]:
        """Exit code and last line of the log of a daemon that cannot start with this configuration."""
        instance = new_instance()
        config = self.directory / f"{instance}.toml"
        config.write_text(text)
        log = self.directory / f"{instance}.log"
        process = processes.start(["-m", "railrelay.daemon.main", "--config", str(config)], log=log)
        try:
            code = process.wait(LIMIT_S)
        finally:
            processes.end(process)
        return code, log.read_text().strip().splitlines()[-1]

    def again(self, node: Node) -> Node:
        """A new daemon with the configuration of one that has ended."""
        return self.start_file(node.instance, node.config_path)

    def close(self) -> None:
        """Ends what runs; AssertionError if a daemon does not end cleanly or has logged what it must not."""
        problems: list[str] = []
        for node in self.started:
            if not node.ended and node.process.poll() is not None:
                problems.append(f"daemon {node.instance} ended on its own with {node.wait()}; its log:\n{node.log}")
            if not node.ended:
                node.process.send_signal(signal.SIGCONT)
                node.process.send_signal(signal.SIGTERM)
        for node in self.started:
            problems += self._end(node)
        self.started.clear()
        assert not problems, "\n".join(problems)

    def _end(self, node: Node) -> Iterator[str]:
        if not node.ended:
            try:
                code = node.wait()
            except subprocess.TimeoutExpired:
                node.kill()
                yield f"daemon {node.instance} did not end on SIGTERM; its log:\n{node.log}"
            else:
                if code:
                    yield f"daemon {node.instance} ended with {code}; its log:\n{node.log}"
        processes.end(node.process)
        print(f"---- log of daemon {node.instance}\n{node.log}")  # pytest shows it if the test fails
        last = [known for known in self.started if known.instance == node.instance][-1]
        if node is last and node.process.returncode == -signal.SIGKILL:
            for name in node.objects():  # a killed daemon leaves them for its successor, and there is none
                (SHM / name).unlink()
        bad = [
            line
            for line in node.log.splitlines()
            if ("Traceback" in line or "ERROR internal:" in line) and not any(known in line for known in self.tolerated)
        ]
        if bad:
            yield f"daemon {node.instance} logged {bad}"

    def _begin(
        self,
        rails: Rails,
        instance: str,
        prefix: Sequence[str],
        sections: Mapping[str, Mapping[str, object]],
    ) -> Starting:
        instance = instance or new_instance()
        config = self.directory / f"{instance}.toml"
        config.write_text(config_text(instance, self.directory / f"{instance}.sock", rails, sections))
        starting = self._spawn(instance, config, prefix)
        if self.nic == "verbs" and not isinstance(rails, int):
            starting.node.devices = [rail for rail in rails if isinstance(rail, Device)]
            starting.node.fabric = self.devices.fabric
        return starting

    def _spawn(self, instance: str, config: Path, prefix: Sequence[str], *, anew: bool = False) -> Starting:
        log = self.directory / f"{instance}.log"
        ready, told = os.pipe()
        try:
            process = processes.start(
                ["-m", "railrelay.daemon.main", "--config", str(config), "--ready-fd", str(told)],
                log=log,
                limit_s=self.limit_s,
                pass_fds=[told],
                prefix=prefix,
                environment=self.environment,
                anew=anew,
            )
        finally:
            os.close(told)
        node = Node(instance, "", "", log, config, process)
        self.started.append(node)
        return Starting(node, ready)

    def _ready(self, starting: Starting) -> Node:
        node = starting.node
        deadline = time.monotonic() + LIMIT_S
        said = b""
        with open(starting.ready_fd, "rb", buffering=0) as ready:
            while not said.endswith(b"\n"):
                more = b""
                if select.select([ready], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    more = ready.read(4096) or b""
                if not more:
                    node.ended = True
                    processes.end(node.process)
                    raise AssertionError(f"daemon {node.instance} is not ready; its log:\n{node.log}")
                said += more
        facts = json.loads(said)
        node.socket, node.session = facts["socket"], facts["session"]
        return node
