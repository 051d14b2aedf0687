"""What this process and its children hold: shared memory, descriptors, threads, processes."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helpers import processes
from helpers.nodes import PREFIX, SHM
from helpers.waiting import until

_SETTLE_S: Final = 5.0


@dataclass(frozen=True)
class Held:
    objects: frozenset[str]
    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[int]
    children: frozenset[int]

    def beyond(self, before: Held) -> dict[str, list[str]]:
        """What is held now and was not before, by kind; empty if nothing."""
        more: dict[str, frozenset[object]] = {
            "shared memory": frozenset(self.objects - before.objects),
            "descriptors": frozenset(self.descriptors - before.descriptors),
            "threads": frozenset(self.threads - before.threads),
            "children": frozenset(self.children - before.children),
        }
        return {kind: sorted(map(str, things)) for kind, things in more.items() if things}


def held() -> Held:
    tasks = Path("/proc/self/task")
    return Held(
        frozenset(name for name in os.listdir(SHM) if name.startswith(PREFIX) and not _is_foreign(name)),
        frozenset(_descriptors()),
        frozenset(int(task) for task in os.listdir(tasks)),
        frozenset(processes.children(os.getpid())),
    )


def left_behind(before: Held) -> dict[str, list[str]]:
    """What stays although it is given time to go: daemons and threads end on their own time."""
    gc.collect()
    found: dict[str, list[str]] = {}

    def clean() -> bool:
        found.clear()
        found.update(held().beyond(before))
        return not found

    try:
        until(clean, "nothing is left behind", _SETTLE_S)
    except AssertionError:
        return found
    return {}


def _descriptors() -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:  # that of listdir itself
            continue
    return found


def _is_foreign(name: str) -> bool:
    """Of a daemon that these tests did not start, as far as names and living processes tell."""
    instance = name.removeprefix(PREFIX).split(".")[0]
    numbers = re.findall(r"\d+", instance)
    if str(os.getpid()) in numbers:
        return False
    with contextlib.suppress(OSError):
        numbers += (SHM / f"{PREFIX}{instance}.lock").read_text().split()
    if any(processes.alive(int(number)) for number in numbers):
        return not any(_is_ours(int(number)) for number in numbers)
    return not instance.startswith(("demo-", "bench-"))


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return False
    return False
