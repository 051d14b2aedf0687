"""Checks whether this machine is fit for the rails that are configured, and says what to do.

Nothing is changed and no check needs root, but root sees more: ROOT marks where that is so, or where only root can do
what is to be done. TIME is what the check took. With --peer the MTU of the rails' interfaces is compared with that at
another node; whether the switches between carry it, `ping -M do -s BYTES -I ADDRESS ADDRESS_THERE` shows. Exit status:
0, nothing failed (there may be warnings); 1, something failed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Final

from railrelay.client import protocol
from railrelay.client.cli import _daemon_side
from railrelay.client.cli._node import Row
from railrelay.client.cli._table import duration, table

_RESULTS: Final = ("ok", "warn", "fail")


def configure(parser: argparse.ArgumentParser) -> None:
    _daemon_side.configure(parser)
    parser.add_argument("--peer", type=_session, metavar="HOST:PORT", help="session of another node's daemon")


def _session(text: str) -> str:
    try:
        protocol.parse_session(text)
    except ValueError as failure:
        raise argparse.ArgumentTypeError(str(failure)) from None
    return text


def run(args: argparse.Namespace) -> int:
    about = _daemon_side.source(args)
    found = _daemon_side.ask("doctor", about, [f"--peer={args.peer}"] if args.peer else [])
    found["configuration"] = about.text
    if args.json:
        print(json.dumps({"instance": args.instance, "pid": about.pid, **found}, indent=2))
    else:
        print(f"configuration: {about.text}\n\n{report(found['checks'])}")
    return int(any(check["result"] == "fail" for check in found["checks"]))


def report(checks: Sequence[Row]) -> str:
    rows = [
        [check["result"], check["check"], duration(check["ns"]), "root" if check["root"] else "", check["seen"]]
        for check in checks
    ]
    todo = [f"{check['check']}: {check['todo']}" for check in checks if check["todo"]]
    counts = {result: sum(check["result"] == result for check in checks) for result in _RESULTS}
    parts = [table(["RESULT", "CHECK", "TIME", "ROOT", "SEEN"], rows)]
    if todo:
        parts.append("what to do:\n" + "\n".join(todo))
    parts.append(", ".join(f"{count} {result}" for result, count in counts.items()))
    return "\n\n".join(parts)
