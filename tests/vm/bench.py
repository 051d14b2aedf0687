"""Runs in the machine: 64 KiB blocks between the first two rails by ib_write_bw, directly and by relay, in turns;
writes MB/s and ratios to the file that is named. Exits with 1 if a ratio is below its limit.

The machine is emulated: only the ratios count. Each is the median over rounds of a route's MB/s to that of ib_write_bw
in the same round."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from railrelay.client.cli._bench_engines import Case, Sender
from railrelay.client.cli._bench_setup import Placement, Setup, ready
from railrelay.client.cli._nodes import Verbs
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Route

LIMIT: Final = 0.85
BLOCKS: Final = 512
BLOCK_BYTES: Final = 65536
ROUNDS: Final = 11
BARE: Final = "ib_write_bw"
ROUTES: Final = {"direct": Route.DIRECT, "relay": Route.RELAY_ALL}
_MIB: Final = 1 << 20
_FLAGS: Final = (*("-x", "1", "-t", "8", "-u", "20", "-F"), *("-s", str(BLOCK_BYTES), "-n", str(BLOCKS)))
_LIMIT_S: Final = 300
_LISTENING: Final = "0A"  # in /proc/net/tcp
_FIRST_PORT: Final = 18515
_ANY: Final = Placement((-1,), (-1,))


def main() -> int:
    devices = [rail.split("=")[0] for rail in os.environ["RAILRELAY_VERBS_RAILS"].split(",")][:2]
    sending, receiving = ((Verbs(device),) for device in devices)
    cases = {
        name: Case(BLOCKS, BLOCK_BYTES, route=route, sending=sending, receiving=receiving)
        for name, route in ROUTES.items()
    }
    with ready(cases["relay"], _ANY) as setup, _second_sender(setup, cases["direct"]) as second:
        senders = {"direct": second, "relay": setup.sender}
        ways: dict[str, Callable[[], float]] = {BARE: lambda: _bare(devices)}
        ways |= {name: _by(sender, cases[name].nbytes) for name, sender in senders.items()}
        for warm_up in ways.values():
            warm_up()
        rounds = [_round(ways, number) for number in range(ROUNDS)]
        wrong = sum(_checked(setup, sender) for sender in senders.values())
    found = _figures(rounds, wrong)
    Path(sys.argv[1]).write_text(json.dumps(found))
    for name in ROUTES:
        if found[f"{name}_ratio"] < LIMIT:
            print(f"{name}: {found[f'{name}_ratio']:.3f} of {BARE}, less than {LIMIT}", flush=True)
    return 0 if found["reached"] else 1


def _second_sender(setup: Setup, case: Case) -> Worker:
    """On the same daemons, to the same places."""
    made = Worker("second sending engine", Sender, case, setup.nodes[0].socket, (-1,), -1, -1)
    made.result()
    made.ask("fill")
    made.ask("open", setup.receiver.ask("offers"), setup.receiver.ask("destinations"))
    return made


def _round(ways: Mapping[str, Callable[[], float]], number: int) -> dict[str, float]:
    """In another order each time, so that a drift of the machine hits all."""
    names = list(ways)
    first = number % len(names)
    found = {name: ways[name]() for name in names[first:] + names[:first]}
    print(f"round {number + 1} of {ROUNDS}: {', '.join(f'{name} {found[name]:.1f}' for name in names)}", flush=True)
    return found


def _figures(rounds: Sequence[Mapping[str, float]], wrong: int) -> dict[str, Any]:
    """MB/s, ratios, and of each ratio the least, the quartiles and the most."""
    found: dict[str, Any] = {name: round(statistics.median(one[name] for one in rounds), 2) for name in (BARE, *ROUTES)}
    for name in ROUTES:
        ratios = sorted(round(one[name] / one[BARE], 3) for one in rounds)
        found[f"{name}_ratio"] = statistics.median(ratios)
        found[f"{name}_spread"] = [
            ratios[0],
            *(round(ratio, 3) for ratio in statistics.quantiles(ratios, n=4)[::2]),
            ratios[-1],
        ]
    found |= {
        "rounds": len(rounds),
        "blocks": BLOCKS,
        "block_bytes": BLOCK_BYTES,
        "wrong_blocks": wrong,
        "limit": LIMIT,
    }
    found["reached"] = wrong == 0 and all(found[f"{name}_ratio"] >= LIMIT for name in ROUTES)
    return found


# ---- railrelay ----


def _by(sender: Worker, nbytes: int) -> Callable[[], float]:
    def measured() -> float:
        [spent_ns] = sender.ask("transfer", 1, 0)
        return float(1e3 * nbytes / spent_ns)

    return measured


def _checked(setup: Setup, sender: Worker) -> int:
    """Wrong blocks."""
    setup.receiver.ask("wipe")
    sender.ask("transfer", 1, 0)
    return int(setup.receiver.ask("check"))


# ---- bare verbs ----


def _bare(devices: Sequence[str]) -> float:
    """MB/s of ib_write_bw, which says MB and means MiB."""
    near, far = ([BARE, "-d", device, "-p", str(_FIRST_PORT), *_FLAGS] for device in devices)
    server = subprocess.Popen(far, stdout=subprocess.DEVNULL)
    try:
        _listens(_FIRST_PORT)
        said = subprocess.run([*near, "127.0.0.1"], capture_output=True, text=True, check=True, timeout=_LIMIT_S).stdout
        server.wait(_LIMIT_S)
    finally:
        server.kill()
        server.wait()
    row = next(words for words in map(str.split, said.splitlines()) if words[:1] == [str(BLOCK_BYTES)])
    return float(row[3]) * _MIB / 1e6 or _bare(devices)  # emulated clocks differ, and now and then it says 0.00


def _listens(port: int) -> None:
    deadline = time.monotonic() + _LIMIT_S
    wanted = (f"{port:04X}", _LISTENING)
    while not any(
        (words[1].rpartition(":")[2], words[3]) == wanted
        for name in ("tcp", "tcp6")
        for words in map(str.split, Path("/proc/net", name).read_text().splitlines())
    ):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{BARE} does not listen on port {port}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
