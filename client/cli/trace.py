"""Writes a timeline of the latest slices, for ui.perfetto.dev or chrome://tracing, and shows how long phases took.

A row for each lane (rail<-sender), more where its slices overlap, and one for slices sent directly; with counters of
the slots that each lane has in use and of the bytes that each rail has under way. The phases of a slice:

  fill      the slot is reserved -> all is copied into it, or the copies are enqueued on the GPU stream
            (direct: the table is begun -> published)
  doorbell  -> the rail saw the doorbell, with GPU memory once the copies are done (direct: saw it in the ring)
  queue     -> handed to the NIC: waits for its turn, a connection or a grant
  place     -> placed at the peer and confirmed

Times of fill and doorbell come from the engine and are left out where they cannot be true. The rails keep the latest
slices only (limits.trace_records of the daemon)."""

from __future__ import annotations

import argparse
import json
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TextIO

from railrelay.client.cli import _node
from railrelay.client.cli._node import Row
from railrelay.client.cli._numbers import amount, whole
from railrelay.client.cli._table import duration, table
from railrelay.client.cli._trace_events import PHASES, Event, Owner, Slice, events, slice_of
from railrelay.client.errors import ErrorCode, error
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import ClientState, PeerState, Segment
from railrelay.shm_layout.trace_ring import TraceReader

_LOOK_S: Final = 0.005
_MOST_S: Final = 60.0
_BATCH: Final = 4096
_RESULTS: Final = {number: name.lower() for name, number in abi.RESULTS.items()}
_FIELDS: Final = abi.FIELDS["trace_record"]
_RECORD: Final = struct.Struct(
    "<" + "".join(f"{facts.count}{({'u32': 'I', 'u64': 'Q'})[facts.ctype]}" for facts in _FIELDS.values())
)
_NAMES: Final = [name for name, facts in _FIELDS.items() for _ in range(facts.count)]

Owners = dict[tuple[int, int], Owner]


def configure(parser: argparse.ArgumentParser) -> None:
    _node.configure(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seconds",
        type=amount(0.001, _MOST_S),
        metavar="S",
        help=f"slices that end in the next S seconds, at most {_MOST_S:g}",
    )
    which.add_argument(
        "--last", type=whole(1 << 30), metavar="N", help="only the latest N slices (default: all that are kept)"
    )
    parser.add_argument(
        "--transfer",
        type=_selection,
        metavar="ID",
        help="only this one: its number as in errors (12), with its generation (12.3), or its tag (0x7)",
    )
    parser.add_argument(
        "-o",
        dest="output",
        type=Path,
        default=Path("railrelay-trace.json"),
        metavar="FILE",
        help="default: %(default)s",
    )


def run(args: argparse.Namespace) -> int:
    """Reads, writes the file, prints the summary."""
    with _node.open_node(args.instance) as node:
        about = _node.daemon(node)
        owners = owners_of(node)
        slices, lost = read(node, args.seconds)
        owners |= owners_of(node)
        rails, peers = _rails(node), _peers(node)
    shown = [one for one in slices if args.transfer is None or args.transfer(one)]
    shown = sorted(shown, key=lambda one: one.completed_ns)[-(args.last or 0) :]
    try:
        with args.output.open("w") as out:
            write(out, events(shown, slices, rails, owners, peers), args.instance)
    except OSError as failure:
        print(f"railrelay trace: {args.output}: {failure.strerror}; name another file with -o", file=sys.stderr)
        return 1
    found = {**summary(shown, lost), "file": str(args.output)}
    if not shown:
        kept = f"none of the {len(slices)} slices is of this transfer" if slices else "the rails keep no slice"
        print(f"railrelay trace: {args.output} shows nothing: {kept}", file=sys.stderr)
    if args.json:
        print(json.dumps({"instance": args.instance, "daemon": about, "trace": found}, indent=2))
        return 0
    if not about["alive"]:
        print(f"{_node.ended(about)}; these are its last slices", file=sys.stderr)
    print(_lines(found))
    return 0


def read(node: Segment, seconds: float | None = None) -> tuple[list[Slice], int]:
    """(slices that the rails keep, or those that end within ``seconds`` from now; how many were overwritten before
    they could be read), by rail and in order of their ends."""
    records = node.header.get(0, "trace_records")
    try:
        place = node.area(abi.CONSTANTS["AREA_TRACE"], "trace_record")
    except KeyError:
        raise error(ErrorCode.ABI, f"{node.name} has no trace: its daemon is older than this program") from None
    rails = place.count // records if records else 0
    readers = [
        TraceReader(node.buffer, place.offset + rail * records * _RECORD.size, records, only_new=seconds is not None)
        for rail in range(rails)
    ]
    found = [bytearray() for _ in range(rails)]
    try:
        deadline = time.monotonic() + (seconds or 0)
        while True:
            last = time.monotonic() >= deadline
            for rail, reader in enumerate(readers):
                found[rail] += reader.read(2 * records if last else _BATCH)
            if last:
                break
            time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
        lost = sum(reader.lost for reader in readers)
    finally:
        for reader in readers:
            reader.close()
    slices = [
        slice_of(rail, record, _RESULTS.get(record["result"], str(record["result"])))
        for rail, raw in enumerate(found)
        for record in (dict(zip(_NAMES, words, strict=True)) for words in _RECORD.iter_unpack(raw))
    ]
    return slices, lost


def owners_of(node: Segment) -> Owners:
    clients = node.area(abi.CONSTANTS["AREA_CLIENTS"], "client_state")
    return {
        (row, clients.get(row, "serial")): Owner(clients.get(row, "rank"), clients.text(row, "name"))
        for row in range(clients.count)
        if clients.get(row, "state") != ClientState.FREE
    }


def _rails(node: Segment) -> list[str]:
    rails = node.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
    return [rails.text(row, "name") for row in range(rails.count)]


def _peers(node: Segment) -> list[str]:
    peers = node.area(abi.CONSTANTS["AREA_PEERS"], "peer_state")
    return [
        peers.text(row, "session") if peers.get(row, "state") != PeerState.FREE else "" for row in range(peers.count)
    ]


def write(out: TextIO, found: Iterable[Event], instance: str) -> None:
    """An event a line."""
    out.write('{"displayTimeUnit": "ns", "otherData": ' + json.dumps({"instance": instance}) + ', "traceEvents": [')
    separator = "\n"
    for event in found:
        out.write(separator + json.dumps(event))
        separator = ",\n"
    out.write("\n]}\n")


def summary(slices: Sequence[Slice], lost: int) -> Row:
    """Counts, and p50 and p99 of each phase by the way the slices went."""
    times: dict[tuple[str, str], list[int]] = {}
    for one in slices:
        way = "direct" if one.direct else "lane"
        for name, begin, end in one.phases():
            times.setdefault((way, name), []).append(end - begin)
        times.setdefault((way, "total"), []).append(one.completed_ns - one.first_ns)
    return {
        "slices": len(slices),
        "transfers": len({(one.client, one.client_serial, one.transfer, one.generation) for one in slices}),
        "bytes": sum(one.bytes for one in slices),
        "failed": sum(one.result != "ok" for one in slices),
        "unknown_times": sum(one.began_ns is None or one.filled_ns is None for one in slices),
        "lost": lost,
        "span_ns": max(one.completed_ns for one in slices) - min(one.first_ns for one in slices) if slices else 0,
        "phases": [
            {"way": way, "phase": phase, **_figures(times[way, phase])}
            for way in ("lane", "direct")
            for phase in (*PHASES, "total")
            if (way, phase) in times
        ],
    }


def _figures(times_ns: list[int]) -> dict[str, float]:
    in_order = sorted(times_ns)
    p50, p99 = (in_order[min(len(in_order) - 1, len(in_order) * percent // 100)] for percent in (50, 99))
    return {"slices": len(in_order), "p50_us": p50 / 1e3, "p99_us": p99 / 1e3}


def _lines(found: Mapping[str, Any]) -> str:
    if not found["slices"]:
        return f"no slices{_losses(found)}"
    rows = [
        [phase["way"], phase["phase"], phase["slices"], f"{phase['p50_us']:.1f} us", f"{phase['p99_us']:.1f} us"]
        for phase in found["phases"]
    ]
    return "\n".join(
        [
            table(["WAY", "PHASE", "SLICES", "P50", "P99"], rows),
            f"{_number(found['slices'], 'slice')} of {_number(found['transfers'], 'transfer')} in"
            f" {duration(found['span_ns'])}{_losses(found)}",
            f"{found['file']}: open it at https://ui.perfetto.dev",
        ]
    )


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _losses(found: Mapping[str, Any]) -> str:
    what = (
        (found["lost"], "lost to overwriting"),
        (found["failed"], "failed"),
        (found["unknown_times"], "with unknown times"),
    )
    return "".join(f"; {number} {text}" for number, text in what if number)


def _selection(text: str) -> Callable[[Slice], bool]:
    if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
        tag = int(text, 16)
        return lambda one: one.tag == tag
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number, number.generation, or a tag such as 0x7")
    transfer, generation = int(match[1]), match[2] and int(match[2])
    return lambda one: one.transfer == transfer and generation in (None, one.generation)
