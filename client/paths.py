"""Where the daemon of an instance is found: its control socket and the name of its node segment."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from railrelay.client.errors import ConnectError, ErrorCode

SYSTEM_DIRECTORY = Path("/run/railrelay")


def check_instance(instance: str) -> str:
    """The name, if it can be part of a file name. ConnectError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", instance):
        raise ConnectError(
            ErrorCode.BAD_ARGUMENT, f"instance {instance!r}: expected 1 to 32 letters, digits, '-' or '_'"
        )
    return instance


def default_socket(instance: str, *, create: bool = False) -> Path:
    """Control socket of an instance when none is configured.

    The daemon (``create``) takes the first directory that it may write, and makes it: /run/railrelay (made by root or
    systemd), $XDG_RUNTIME_DIR/railrelay, /tmp/railrelay-<uid>; the last two are private to the user. A client takes the
    first of these that holds the socket, or else the one where a daemon of this user would put it. ConnectError if a
    private directory belongs to somebody else."""
    name = f"{check_instance(instance)}.sock"
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    private = Path(runtime) / "railrelay" if runtime else Path(f"/tmp/railrelay-{uid}")
    if not create and os.path.lexists(SYSTEM_DIRECTORY / name):
        return SYSTEM_DIRECTORY / name
    if _is_root() or os.access(SYSTEM_DIRECTORY, os.W_OK | os.X_OK):
        if create:
            SYSTEM_DIRECTORY.mkdir(mode=0o755, exist_ok=True)
        return SYSTEM_DIRECTORY / name
    if create:
        private.mkdir(mode=0o700, exist_ok=True)
    if os.path.lexists(private):
        found = private.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
            raise ConnectError(
                ErrorCode.DENIED,
                f"{private} must be a directory of uid {uid} with mode 0700; found owner {found.st_uid},"
                f" mode {found.st_mode:#o}; remove it or name a socket",
            )
    return private / name


def _is_root() -> bool:
    return os.geteuid() == 0


def node_segment(instance: str) -> str:
    """Name of the node segment, as shm_open wants it."""
    return f"/railrelay.{check_instance(instance)}.node"
