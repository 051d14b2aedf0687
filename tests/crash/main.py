"""A campaign of kills: two daemons with TCP rails on this machine, and four engines that send to each other all the
time (straight, through lanes, into bounce memory, by the local route), cancel, abort, time out, and give memory back.
One daemon or engine after the other is killed, at every fault point (shm_layout/faults.h) and at random moments, and
comes back at once. After each kill a checked transfer must come through every stream.

Counted are: wrong_bytes, at a destination after `done`, or where nothing may land any more; hangs, of any wait above
20 s; leaks, of lane credits, shared memory objects, descriptors and threads; and the time from the death to the last
stream's first checked transfer. Fails if there are any, or if a fault point was not reached."""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from crash.campaign import POINTS, Campaign, Over, Tally
from railrelay.client.cli._numbers import whole

_LOG_LINES: Final = 60


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills",
        type=whole(1_000_000),
        default=100,
        metavar="N",
        help=f"at least, and one at each of the {len(POINTS)} fault points in any case (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the order of kills; default: another one each time")
    parser.add_argument("--json", action="store_true", help="for programs")
    args = parser.parse_args(words)
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    _say(f"seed {seed}")
    if args.kills < 2 * len(POINTS):
        _say(f"--kills {args.kills}: goes on until all {len(POINTS)} fault points were tried once, some by two kills")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="railrelay-crash-") as directory:
        campaign = Campaign(Path(directory), seed, _say)
        try:
            campaign.run(args.kills)
        except Over:
            for log in sorted(Path(directory).glob("*.log")):
                _say(f"---- {log.name}", *log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
        except KeyboardInterrupt:
            campaign.tally.problems.append("interrupted")
        finally:
            campaign.close()
    tally = campaign.tally
    for problem in tally.problems:
        _say(problem)
    if tally.missed:
        _say(f"fault points that were not reached: {', '.join(tally.missed)}")
    _say(f"ends: {', '.join(f'{how} {count}' for how, count in tally.ends.most_common())}")
    found = _figures(tally, time.monotonic() - began, seed)
    print(json.dumps(found) if args.json else _line(found, tally.good))
    return 0 if tally.good and tally.kills >= args.kills else 1


def _figures(tally: Tally, seconds: float, seed: int) -> dict[str, Any]:
    times = sorted(tally.recover_ms) or [0.0]
    return {
        "kills": tally.kills,
        "wrong_bytes": tally.wrong_bytes,
        "hangs": tally.hangs,
        "leaks": tally.leaks,
        "recover_ms_p50": round(times[len(times) // 2], 1),
        "recover_ms_max": round(times[-1], 1),
        "points": len(tally.reached),
        "missed": tally.missed,
        "transfers": tally.rounds,
        "seconds": round(seconds, 1),
        "seed": seed,
        "good": tally.good,
    }


def _line(found: dict[str, Any], good: bool) -> str:
    return (
        f"crash: {'good' if good else 'FAILED'}: {found['kills']} kills at {found['points']} fault points and at"
        f" random, {found['transfers']} checked transfers: {found['wrong_bytes']} wrong bytes, {found['hangs']} hangs,"
        f" {found['leaks']} leaks; back after {found['recover_ms_p50']} ms (median), {found['recover_ms_max']} ms"
        f" (longest); {found['seconds']} s"
    )


def _say(*lines: str) -> None:
    print(*lines, sep="\n", file=sys.stderr, flush=True)
