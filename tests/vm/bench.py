"""Runs in the machine: 64 KiB blocks between the first two rails, bare and by railrelay's bench; writes MB/s and ratios
to the file that is named.

The machine is emulated: only the ratios count. The bare figure is measured before, between and after the others."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

BLOCKS: Final = 512
BLOCK_BYTES: Final = 65536
_MIB: Final = 1 << 20
_FLAGS: Final = (*("-x", "1", "-t", "8", "-u", "20", "-F"), *("-s", str(BLOCK_BYTES), "-n", str(BLOCKS)))
_RUNS: Final = 5
_LIMIT_S: Final = 300
_LISTENING: Final = "0A"  # in /proc/net/tcp
_FIRST_PORT: Final = 18515
ROUTES: Final = ("direct", "relay")


def main() -> int:
    devices = [rail.split("=")[0] for rail in os.environ["RAILRELAY_VERBS_RAILS"].split(",")][:2]
    bare = [_bare(devices, _FIRST_PORT)]
    figures: dict[str, float | None] = {}
    for number, route in enumerate(ROUTES, 1):
        figures[route] = _railrelay(devices, route)
        bare.append(_bare(devices, _FIRST_PORT + number))
    limit = statistics.median(bare)
    ratios = {f"{route}_ratio": value and round(value / limit, 3) for route, value in figures.items()}
    Path(sys.argv[1]).write_text(json.dumps({"ib_write_bw": limit, **figures, **ratios}))
    return 0


def _bare(devices: list[str], port: int) -> float:
    """MB/s of ib_write_bw, which says MB and means MiB."""
    near, far = ([*("ib_write_bw", "-d", device, "-p", str(port)), *_FLAGS] for device in devices)
    server = subprocess.Popen(far, stdout=subprocess.DEVNULL)
    try:
        _listens(port)
        said = subprocess.run([*near, "127.0.0.1"], capture_output=True, text=True, check=True, timeout=_LIMIT_S).stdout
        server.wait(_LIMIT_S)
    finally:
        server.kill()
        server.wait()
    row = next(words for words in map(str.split, said.splitlines()) if words[:1] == [str(BLOCK_BYTES)])
    found = round(float(row[3]) * _MIB / 1e6, 2)
    print(f"ib_write_bw: {found} MB/s", flush=True)
    return found


def _listens(port: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    wanted = (f"{port:04X}", _LISTENING)
    while not any(
        (words[1].rpartition(":")[2], words[3]) == wanted
        for name in ("tcp", "tcp6")
        for words in map(str.split, Path("/proc/net", name).read_text().splitlines())
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"ib_write_bw does not listen on port {port}")
        time.sleep(0.1)


def _railrelay(devices: list[str], route: str) -> float | None:
    """MB/s between two daemons, one a device; None where the bench knows no verbs."""
    bench = [sys.executable, "-m", "railrelay.client.cli", "bench"]
    if "--nic" not in subprocess.run([*bench, "--help"], capture_output=True, text=True, check=True).stdout:
        print(f"{route}: railrelay bench has no --nic", flush=True)
        return None
    rails = ["--nic", "verbs", "--devices", ",".join(devices)]
    case = ["--blocks", str(BLOCKS), "--block-bytes", str(BLOCK_BYTES), "--route", route, "--runs", str(_RUNS)]
    command = [*bench, *rails, *case, "--json"]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=_LIMIT_S).stdout)
    if not found["verified"]:
        raise ValueError(f"{route}: {found['wrong_blocks']} wrong blocks")
    speed = round(1e3 * float(found["gigabytes_per_second"]), 2)
    print(f"{route}: {speed} MB/s", flush=True)
    return speed


if __name__ == "__main__":
    sys.exit(main())
