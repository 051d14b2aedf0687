"""What a verb asks of the daemon's package, which this one may not import: a module that prints JSON is run, with the
configuration that was named, that of the running daemon, or the default."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from railrelay.client.cli import _node
from railrelay.client.errors import ErrorCode, RelayError

_LIMIT_S: Final = 60.0


@dataclass(frozen=True)
class Source:
    """``pid`` of the daemon that runs, 0 if none. ``path`` is None for the default configuration."""

    path: Path | None
    pid: int
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: that of the running daemon, if one runs")
    _node.configure(parser)


def source(args: argparse.Namespace) -> Source:
    """RelayError if the daemon's configuration is not known."""
    pid, unknown = _running(args.instance)
    if args.config is not None:
        return Source(args.config, pid, str(args.config))
    if not pid:
        return Source(None, 0, f"the default ({unknown or 'no daemon runs'}, and --config names no file)")
    path = _config_of(pid)
    if path is None:
        return Source(None, pid, f"the default (daemon pid {pid} was started without a file)")
    return Source(path, pid, f"{path}, of the daemon pid {pid}")


def _running(instance: str) -> tuple[int, str]:
    """(pid of the daemon, or 0; why it is not known whether one runs)"""
    try:
        with _node.open_node(instance) as node:
            about = _node.daemon(node)
    except RelayError as failure:
        return 0, "" if failure.code is ErrorCode.NO_DAEMON else failure.text
    return (int(about["pid"]), "") if about["alive"] else (0, _node.ended(about))


def _config_of(pid: int) -> Path | None:
    """From the daemon's command line; None if that names no file."""
    try:
        words = [os.fsdecode(word) for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
        for index, word in enumerate(words):
            name = words[index + 1] if word == "--config" else word.removeprefix("--config=")
            if word == "--config" or word.startswith("--config="):
                path = Path(name)
                return path if path.is_absolute() else Path(os.readlink(f"/proc/{pid}/cwd")) / path
    except (OSError, IndexError) as failure:
        text = f"the configuration of daemon pid {pid} is not known ({failure}); name it by --config"
        raise RelayError(ErrorCode.DENIED, text) from None
    return None


def ask(module: str, about: Source, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """RelayError: the configuration cannot be used."""
    chosen = [f"--config={about.path}"] if about.path else []
    command = [sys.executable, "-P", "-m", f"railrelay.daemon.{module}", f"--pid={about.pid}", *chosen, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise RelayError(ErrorCode.INTERNAL, f"{' '.join(command[:4])}: {failure}") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RelayError(ErrorCode.BAD_ARGUMENT if done.returncode == 2 else ErrorCode.INTERNAL, last)
    found: dict[str, Any] = json.loads(done.stdout)
    return found
