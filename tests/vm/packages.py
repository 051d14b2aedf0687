"""Debian packages that the machine is made with, or that are used in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

PACKAGES: Final = (
    *("qemu-system-x86", "busybox-static", "cpio", "kmod"),
    *("iproute2", "rdma-core", "ibverbs-providers", "ibverbs-utils", "libibverbs-dev", "perftest", "python3-pyverbs"),
)
_LIMIT_S: Final = 600


class NotPrepared(Exception):
    """What is missing, and the next step."""


def installed() -> None:
    """Installs what is missing if it may."""
    if shutil.which("dpkg-query") is None:
        raise NotPrepared("this is no Debian or Ubuntu: the machine's kernel and the tools come from their packages")
    missing = [name for name in PACKAGES if name not in _there()]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NotPrepared(f"missing packages: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    print(f"vm: installing {' '.join(missing)}", flush=True)
    update()
    said(["apt-get", "-qq", "-y", "-o", "DPkg::Lock::Timeout=300", "install", "--no-install-recommends", *missing])


def update() -> None:
    """apt's lists, where this process may."""
    if os.geteuid() == 0:
        said(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "update"])


def said(command: list[str], cwd: Path | None = None, **variables: str) -> str:
    """What the command printed; NotPrepared if it failed."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **variables}
    try:
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise NotPrepared(f"{' '.join(command)}: {failure}") from None
    if done.returncode != 0:
        raise NotPrepared(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _there() -> set[str]:
    shown = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,  # it also fails because one is missing
    )
    return {line.split()[0] for line in shown.stdout.splitlines() if line.endswith(" installed")}
