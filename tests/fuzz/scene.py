"""A daemon in this process, two well-behaved clients that transfer through it, and a look at what it says: an exception
that nobody expected, or an error record "internal", is a finding."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import shutil
import ssl
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from helpers import memory
from helpers.certificates import Authority
from helpers.nodes import SMALL, config_text, merged

from railrelay.client import Client
from railrelay.daemon import config
from railrelay.daemon.conductor import Conductor

BLOCK: Final = 4096
NBYTES: Final = 16 * BLOCK
SECTIONS: Final[dict[str, dict[str, object]]] = {
    "limits": {
        "max_clients": 16,
        "max_peers": 512,
        "max_exports": 64,
        "regions_per_client": 8,
        "remotes_per_client": 8,
    },
    "timeouts": {
        "connect_s": 0.05,
        "peer_s": 5,  # of the good ones; a machine may be loaded
        "settle_s": 0.02,
        "fence_s": 0.02,
        "session_linger_s": 5,
        "predecessor_s": 0.02,
    },
    "data": {"spin_us": 0},
}
INSTANCES: Final = "RAILRELAY_FUZZ_INSTANCES"  # environment: how names begin, for who clears away after a crash
CHECKED_EVERY: Final = 16  # inputs
MOST_SESSIONS: Final = 400


class Entry(Enum):
    """What a peer needs in order to be let in."""

    NOTHING = "nothing"
    SECRET = "secret"
    TLS = "tls"  # and the secret


@dataclass(frozen=True)
class Keyring:
    """What the right peer has."""

    secret: bytes | None = None
    connecting: ssl.SSLContext | None = None
    accepting: ssl.SSLContext | None = None


def _security(entry: Entry, directory: Path) -> tuple[dict[str, object], Keyring]:
    if entry is Entry.NOTHING:
        return {}, Keyring()
    secret, path = b"s" * 32, directory / "secret"
    path.touch(0o600)
    path.write_bytes(secret)
    section: dict[str, object] = {"secret_files": [str(path)]}
    if entry is Entry.SECRET:
        return section, Keyring(secret)
    authority = Authority.make(directory / "authority")
    accepting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.ca.issue_cert("127.0.0.1").configure_cert(accepting)
    section |= authority.section("127.0.0.1")
    return section, Keyring(secret, authority.connecting("127.0.0.1"), accepting)


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("internal:"):
            self.heard.append(text)


class Scene:
    def __init__(self, entry: Entry) -> None:
        warnings.simplefilter("error")
        self.loop = uvloop.new_event_loop()
        directory = temporary()
        self._listener = _Listener()
        log = logging.getLogger("railrelay")
        log.addHandler(self._listener)
        log.propagate = False
        security, self.keyring = _security(entry, directory)
        sections = merged(merged(SMALL, SECTIONS), {"security": security})
        path = directory / "daemon.toml"
        instance = f"{os.environ.get(INSTANCES, 't')}{os.getpid()}-{entry.value}"
        path.write_text(config_text(instance, directory / "socket", 2, sections))
        self.conductor = Conductor(config.load(path))
        self.loop.run_until_complete(self.conductor.start())
        self.loop.set_exception_handler(self._on_exception)
        self.socket = str(self.conductor.socket_path)
        self.session = self.conductor.session
        self.sender = self.on_thread(lambda: Client.connect(self.socket, rank=0))
        self.receiver = self.on_thread(lambda: Client.connect(self.socket, rank=1))
        self.link = self.on_thread(lambda: memory.link(self.sender, self.receiver, NBYTES))
        self.kept = self.on_thread(lambda: memory.make(self.receiver, NBYTES))
        self.kept.array[:] = 0xFF
        self.problems: list[str] = []
        sys.unraisablehook = lambda what: self.problems.append(f"{what.err_msg} {what.exc_value!r}")
        self._inputs = 0
        self._rows = len(self.conductor._clients.by_row)
        self._descriptors = 0

    def _on_exception(self, loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
        self.conductor.on_exception(loop, facts)
        failure = facts.get("exception")
        if failure is not None:
            self.problems.append(f"{facts['message']}: {failure!r}")

    def on_thread(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401
        """What the library does blocks; the daemon has to go on meanwhile."""
        return self.loop.run_until_complete(asyncio.wait_for(self.loop.run_in_executor(None, work), 30))

    def run(self, case: Callable[[], Any]) -> None:
        """One input. AssertionError: a finding."""
        self.loop.run_until_complete(asyncio.wait_for(case(), 30))
        self._inputs += 1
        if self._inputs % CHECKED_EVERY == 0:
            self.check()
        self.problems += self._listener.heard
        self._listener.heard = []
        assert not self.problems, self.problems

    def check(self) -> None:
        """The well-behaved transfer, and nothing of the input is left."""
        source, destination = self.link.source, self.link.destination
        source.array[:] = np.random.default_rng(self._inputs).integers(1, 255, NBYTES, dtype=np.uint8)
        destination.array[:] = 0
        offsets = np.arange(0, NBYTES, BLOCK, dtype=np.uint64)
        self.on_thread(
            lambda: self.sender.write(
                self.link.remote, offsets + source.address, offsets + self.link.remote.address, BLOCK
            ).wait(20)
        )
        assert (source.array == destination.array).all(), "wrong bytes"
        assert (self.kept.array == 0xFF).all(), "bytes in memory that nobody has opened"
        self.settle()

    def settle(self) -> None:
        """Clients of earlier inputs go, most of the sessions, and what they held."""
        deadline = time.monotonic() + 20
        route = self.conductor._clients._local
        while left := self._left():
            assert time.monotonic() < deadline, left
            for holder in list(route._holders.values()):
                if holder.client.leaving:  # it holds what it opened until its process has ended, which is this one
                    self.loop.call_soon(route._drop, holder)
            self.loop.run_until_complete(asyncio.sleep(0.01))

    def _left(self) -> str:
        """What of earlier inputs is still there, and should go by itself."""
        clients, sessions = self.conductor._clients.by_row, self.conductor._sessions._by_index
        if len(clients) > self._rows or len(sessions) > MOST_SESSIONS:
            return f"not gone: {clients} {sessions}"
        held = _descriptors()
        self._descriptors = self._descriptors or len(held) + 16
        return f"{len(held)} descriptors are open: {held}" if len(held) > self._descriptors else ""

    def close(self) -> None:
        self.on_thread(self.sender.close)
        self.on_thread(self.receiver.close)
        self.loop.run_until_complete(self.conductor.close())
        self.loop.close()


def temporary() -> Path:
    """A directory that goes with this process."""
    directory = tempfile.mkdtemp(prefix="railrelay-fuzz.")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def _descriptors() -> list[str]:
    held: list[str] = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            held.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(held)


_scenes: Final[dict[Entry, Scene]] = {}


def scene(entry: Entry = Entry.NOTHING) -> Scene:
    """The one of this process."""
    if entry not in _scenes:
        _scenes[entry] = Scene(entry)
    return _scenes[entry]


def close() -> None:
    """A last look at each scene of this process."""
    for current in _scenes.values():
        current.check()
        current.close()


async def turns(count: int) -> None:
    """Lets the daemon work."""
    for _ in range(count):
        await asyncio.sleep(0)
