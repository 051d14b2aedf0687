"""Runs the checks of `railrelay doctor` and prints them as JSON; the command runs it so."""

from __future__ import annotations

import argparse
import sys

from railrelay.daemon import checks, topology
from railrelay.daemon.checks import Node
from railrelay.daemon.config import Config
from railrelay.daemon.topology import Facts


def examine(args: argparse.Namespace, loaded: Config, source: str) -> Facts:
    return {"configuration": source, "checks": list(checks.run(Node(loaded, args.pid, peer=args.peer)))}


if __name__ == "__main__":
    sys.exit(topology.main(__doc__ or "", examine))
