"""railrelay, the admin command. One module per verb: its docstring is the help, ``configure(parser)`` adds its options,
``run(args)`` does it and returns the exit status. Only the module of the verb that was asked for is imported."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Final

from railrelay.client.errors import ErrorCode, RelayError

OK: Final = 0
FAILED: Final = 1
NO_DAEMON: Final = 3

VERBS: Final = ("rails", "lanes", "clients", "peers", "errors", "trace", "topo", "doctor", "demo", "bench")
_HELP: Final = {
    "rails": "NICs, their ports and traffic, and which has taken over for another",
    "lanes": "slots, credit and traffic of each lane",
    "clients": "engines attached to the daemon",
    "peers": "daemons of other nodes",
    "errors": "distinct errors of the daemon, with how often and when",
    "trace": "a timeline of the latest slices, as a file for Perfetto",
    "topo": "which rail and NIC each GPU uses, and why",
    "doctor": "checks of this machine, and what to do",
    "demo": "a transfer on this machine, checked and explained",
    "bench": "measure transfers on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 ok, 1 failed, 2 wrong usage, 3 no daemon and no state of one."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="railrelay", description="Look at and try out the relay daemon of this node.", epilog=main.__doc__
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    if arguments[:1] == ["--version"]:
        print(f"railrelay {version('railrelay')}")
        return OK
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    asked = next((argument for argument in arguments if argument in VERBS), "")
    module = import_module(f"railrelay.client.cli.{asked}") if asked else None
    for verb in VERBS:
        subparser = subparsers.add_parser(verb, help=_HELP[verb])
        if module is not None and verb == asked:
            subparser.description = module.__doc__
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.configure(subparser)
    args = parser.parse_args(arguments)
    try:
        status: int = module.run(args) if module is not None else FAILED
        sys.stdout.flush()
    except RelayError as failure:
        print(f"railrelay {args.verb}: {failure}", file=sys.stderr)
        return NO_DAEMON if failure.code in (ErrorCode.NO_DAEMON, ErrorCode.DAEMON_GONE) else FAILED
    except BrokenPipeError:  # `railrelay lanes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status
