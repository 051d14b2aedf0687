"""Faults of the rails in the machine that tests/vm/run boots: there the device rxeK is on vK, and the other end of vK
is the port pK of the bridge."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from typing import Final

_LIMIT_S: Final = 60
_HELD_BYTES: Final = 256 << 20
_HELD_PACKETS: Final = 1_000_000


def set_down(device: str) -> None:
    """Packets are lost, and the port of ``device`` is down."""
    _ran("ip", f"link set {_link(device, 'v')} down")


def set_up(device: str) -> None:
    _ran("ip", f"link set {_link(device, 'v')} up")


@contextlib.contextmanager
def down(device: str) -> Iterator[None]:
    set_down(device)
    try:
        yield
    finally:
        set_up(device)


def hold_back(device: str) -> None:
    """Packets to ``device`` wait in the bridge from now on, until ``release``.

    They also pass a delay of next to nothing, because that takes them from their queue pair: soft-RoCE crashes when
    the packets of a destroyed queue pair are freed."""
    port = _link(device, "p")
    _ran(
        "tc",
        f"qdisc replace dev {port} root handle 1: netem delay 1us limit {_HELD_PACKETS}",
        f"qdisc replace dev {port} parent 1:1 handle 2: plug limit {_HELD_BYTES}",
        f"qdisc change dev {port} parent 1:1 handle 2: plug block",  # if it was there, and released
    )


def release(device: str) -> None:
    """They arrive now, in order and none lost, and later ones do not wait."""
    _ran("tc", f"qdisc change dev {_link(device, 'p')} parent 1:1 handle 2: plug release_indefinite")


@contextlib.contextmanager
def held_back(device: str) -> Iterator[None]:
    hold_back(device)
    try:
        yield
    finally:
        release(device)


@contextlib.contextmanager
def delayed(device: str, ms: float) -> Iterator[None]:
    """Each packet to ``device`` takes that much longer; those that are still under way when the block ends are lost."""
    port = _link(device, "p")
    _ran("tc", f"qdisc replace dev {port} root handle 1: netem delay {ms}ms limit {_HELD_PACKETS}")
    try:
        yield
    finally:
        _ran("tc", f"qdisc del dev {port} root")


def waiting_bytes(device: str) -> int:
    """That are held back or delayed on their way to ``device``."""
    shown = json.loads(_ran("tc", f"qdisc show dev {_link(device, 'p')}", options=("-s", "-j")))
    return max(int(discipline.get("backlog", 0)) for discipline in shown)


def _link(device: str, letter: str) -> str:
    return letter + device.removeprefix("rxe")


def _ran(tool: str, *lines: str, options: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [tool, *options, "-batch", "-"], input="\n".join(lines), capture_output=True, text=True, timeout=_LIMIT_S
    )
    assert done.returncode == 0, f"{tool}: {'; '.join(lines)}: {done.stderr}"
    return done.stdout
