"""The node segment, as the verbs that show the daemon's state read it: by name, read-only, also after its daemon."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from railrelay.client import paths
from railrelay.client.errors import ErrorCode, RelayError, error
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import OwnerState, Segment, SegmentError, SegmentState

Row = dict[str, Any]

STABILITY: Final = (
    "With --json the keys of a major version keep their names and meanings; new ones may be added. Sizes are in bytes,"
    " *_ns is nanoseconds or, for points in time, Unix time."
)
_PREFIX: Final = "/railrelay."
_SUFFIX: Final = ".node"
_PHASES: Final = {
    abi.CONSTANTS["PHASE_RUNNING"]: "running",
    abi.CONSTANTS["PHASE_DRAINING"]: "draining",
    abi.CONSTANTS["PHASE_CLOSED"]: "closed",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--instance", default="default", metavar="NAME", help="of the daemon (default: default)")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.epilog = STABILITY


def open_node(instance: str) -> Segment:
    """RelayError NO_DAEMON says which instances there are."""
    name = paths.node_segment(instance)
    try:
        return segment.open_segment(name)
    except SegmentError as failure:
        if failure.state is SegmentState.ABSENT:
            raise RelayError(ErrorCode.NO_DAEMON, f"no such instance: {instance!r}; {_others()}") from None
        code = ErrorCode.ABI if failure.state is SegmentState.INCOMPATIBLE else ErrorCode.INTERNAL
        raise error(code, str(failure)) from None
    except PermissionError:
        raise error(
            ErrorCode.DENIED, f"node segment {name} may not be read; run as the daemon's user or in its group"
        ) from None


def nics(node: Segment) -> list[str]:
    """The kind of NIC of each rail: tcp, verbs or emulated; and whose it is, while another rail's has taken over."""
    rails = node.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
    return [
        rails.text(rail, "nic") + (f" of {by - 1}" if (by := rails.get(rail, "taken_by")) else "")
        for rail in range(rails.count)
    ]


def _others() -> str:
    """Which instances there are to ask for."""
    found = [name[len(_PREFIX) : -len(_SUFFIX)] for name in segment.objects(_PREFIX) if name.endswith(_SUFFIX)]
    live = [name for name in found if _runs(name)]
    ended = [name for name in found if name not in live]
    known = [", ".join(live)] * bool(live) + [f"of daemons that have ended {', '.join(ended)}"] * bool(ended)
    return f"this node has {'; '.join(known)}; use --instance" if known else "this node has none"


def _runs(instance: str) -> bool:
    """Also of one that cannot be asked: its user may."""
    try:
        with segment.open_segment(paths.node_segment(instance)) as node:
            return bool(daemon(node)["alive"])
    except SegmentError:
        return False
    except PermissionError:
        return True


def daemon(node: Segment) -> Row:
    header = node.header
    state = segment.owner_state(node)
    return {
        "pid": header.get(0, "owner_pid"),
        "alive": state is OwnerState.RUNNING,
        "process": state.value,
        "phase": _PHASES.get(header.get(0, "phase"), "unknown"),
        "rails": header.get(0, "rails"),
    }


def ended(about: Row) -> str:
    """What became of a daemon that does not run; "" of one that does."""
    if about["process"] == OwnerState.UNREAPED.value:
        return f"daemon pid {about['pid']} has ended and waits as a zombie for its parent process to notice"
    return "" if about["alive"] else f"daemon pid {about['pid']} is gone"


def show(
    args: argparse.Namespace,
    key: str,
    read: Callable[[Segment], Sequence[Row]],
    lines: Callable[[Sequence[Row]], str],
) -> int:
    """Prints what ``read`` finds, as JSON or as ``lines``."""
    with open_node(args.instance) as node:
        about = daemon(node)
        rows = read(node)
    if args.json:
        print(json.dumps({"instance": args.instance, "daemon": about, key: rows}, indent=2))
        return 0
    if not about["alive"]:
        print(f"{ended(about)}; this is its last state", file=sys.stderr)
    elif about["phase"] != "running":
        print(f"daemon pid {about['pid']} is {about['phase']}", file=sys.stderr)
    print(lines(rows) if rows else f"no {key}")
    return 0
