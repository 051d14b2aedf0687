"""Moves the KV cache of some requests from the 4 ranks of a prefill node to the 4 ranks of a decode node, all on this
machine: two relay daemons with 4 rails each on 127.0.0.1 and one engine process per rank. Every byte is checked at
decode. Exit status 0 only if all of them were right.

Prefill: pp4, pipeline stages with a share of the layers each; cp4, context-parallel ranks with a share of the pages
each (all of them send, which is not every engine's default). Decode: tp4, tensor-parallel ranks with a share of the
heads each (a latent cache is replicated); dp4, data-parallel ranks with whole requests.

Routes: relay, through the lane of the destination's rail; direct, from the own rail to all others at once; serial,
one destination after the other; scheduled, in rounds with a shifting destination."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from railrelay.client import Client
from railrelay.client.cli import _content, _models, _node, _nodes, lanes
from railrelay.client.cli._models import DECODES, MODELS, PREFILLS, RANKS, Move, Pages, Plan
from railrelay.client.cli._node import Row
from railrelay.client.cli._nodes import MIB, Geometry, Node
from railrelay.client.cli._numbers import whole
from railrelay.client.cli._progress import Progress
from railrelay.client.cli._table import duration, size, table
from railrelay.client.cli._workers import Worker
from railrelay.client.client import Route
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.layout import PageLayout
from railrelay.client.transfer import Transfer
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import Segment

_ROUTES: Final = {
    "relay": Route.RELAY_ALL,
    "direct": Route.DIRECT,
    "serial": Route.SERIAL,
    "scheduled": Route.SCHEDULED,
}
_POOLS_BYTES: Final = 1280 * MIB  # of both nodes together, unless --tokens says otherwise
_MEMORY_SHARE: Final = 0.5  # of what is free
_SLOT_BYTES: Final = MIB  # small slots stay in the caches of the cores
_TRANSFER_S: Final = 300.0
_LOOK_S: Final = 0.1
_SEED: Final = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-70b", help="default: %(default)s")
    parser.add_argument(
        "--tokens", type=whole(1 << 40), metavar="N", help="of all requests together (default: what fits well)"
    )
    parser.add_argument("--prefill", choices=PREFILLS, default="pp4", help="default: %(default)s")
    parser.add_argument("--decode", choices=DECODES, default="tp4", help="default: %(default)s")
    parser.add_argument("--route", choices=_ROUTES, default="relay", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.epilog = _node.STABILITY


def run(args: argparse.Namespace) -> int:
    progress = Progress()
    try:
        with _nodes.ended_by_signals():
            result = _demo(args, progress)
    except KeyboardInterrupt:
        progress.step("interrupted; daemons, engines and their memory are gone")
        return 130
    print(json.dumps(result, indent=2) if args.json else _report(result))
    return 0 if result["verified"] else 1


def fitting_plan(model: str, tokens: int | None, prefill: str, decode: str, room: int) -> Plan:
    """Without ``tokens``: as many as the pools have bytes for, at most ``room``. RelayError NO_MEMORY."""
    shapes = MODELS[model]
    least = RANKS * shapes.page_tokens
    per_token = _models.make_plan(shapes, 64 * least, prefill, decode).nbytes / (64 * least)
    fitting = int(room / per_token) // least * least
    if tokens is None:
        tokens = max(least, min(fitting, int(_POOLS_BYTES / per_token) // least * least))
    plan = _models.make_plan(shapes, tokens, prefill, decode, seed=_SEED)
    if plan.nbytes > room:
        raise RelayError(
            ErrorCode.NO_MEMORY,
            f"{tokens} tokens need {size(plan.nbytes)} of KV cache pools, {size(room)} may be used (half of the free"
            f" memory); use --tokens {fitting} or fewer",
        )
    return plan


@dataclass(frozen=True)
class Sent:
    begin_ns: int
    end_ns: int
    placed_bytes: int


class PrefillEngine:
    """One prefill rank, in a process of its own."""

    def __init__(self, socket: str, rank: int, route: Route, plan: Plan) -> None:
        self._plan = plan
        self._rank = rank
        self._cache = plan.prefill[rank]
        self._client = Client.connect(socket, rank=rank, name=f"prefill-{rank}", route=route)
        self._buffer = self._client.alloc(self._cache.nbytes, rail=rank)

    def fill(self) -> None:
        cache, model = self._cache, self._plan.model
        pool = self._buffer.array.view(np.uint64).reshape(cache.share.rows, cache.pool_pages, cache.row_bytes // 8)
        for row in range(cache.share.rows):
            for request, pages in cache.tables.items():
                logical = cache.share.logical_pages(self._plan.request_pages[request])
                of_row = _content.keys(_SEED, request, cache.share.first_row + row, logical.view(np.uint64))
                pool[row, pages] = _content.words(of_row, 0, model.heads * model.head_bytes // 8)

    def open(self, offers: list[bytes]) -> None:
        """Also leases the lanes and has the rails connect, as in an engine that has run for a while: sends one page to
        each decode rank, to a page there that nothing else goes to."""
        self._remotes = [self._client.open(offer) for offer in offers]
        first = {move.decode: move for move in reversed(_models.moves_of(self._plan, self._rank))}
        for rank, move in first.items():
            source, pages, destination, _ = self._sides(move)
            unused = self._plan.decode[rank].unused_pages()
            self._client.write_pages(self._remotes[rank], source, pages[:1], destination, unused[:1]).wait()

    def send(self, begin_ns: int) -> Sent:
        """All that this rank owes, once the clock is at ``begin_ns``; returns when it is placed."""
        moves = _models.moves_of(self._plan, self._rank)
        calls = [self._sides(move) for move in moves]
        time.sleep(max(0.0, (begin_ns - time.monotonic_ns()) / 1e9))
        begin_ns = time.monotonic_ns()
        transfers: list[Transfer] = [
            self._client.write_pages(
                self._remotes[move.decode], *call, tag=move.request + 1, timeout=_TRANSFER_S, notify=_note(self._rank)
            )
            for move, call in zip(moves, calls, strict=True)
        ]
        for transfer in transfers:
            transfer.wait()
        return Sent(begin_ns, time.monotonic_ns(), sum(transfer.bytes for transfer in transfers))

    def _sides(self, move: Move) -> tuple[PageLayout, Pages, PageLayout, Pages]:
        return _models.sides_of(self._plan, move, self._buffer.address, self._remotes[move.decode].address)

    def close(self) -> None:
        self._client.close()


class DecodeEngine:
    """One decode rank, in a process of its own."""

    def __init__(self, socket: str, rank: int, plan: Plan) -> None:
        self._plan = plan
        self._rank = rank
        self._cache = plan.decode[rank]
        self._client = Client.connect(socket, rank=rank, name=f"decode-{rank}")
        self._buffer = self._client.alloc(self._cache.nbytes, rail=rank)

    def offer(self) -> bytes:
        return self._buffer.offer()

    def fill(self) -> None:
        """Marks every byte as unwritten."""
        self._buffer.array.view(np.uint64)[:] = _content.UNWRITTEN

    def receive(self) -> int:
        """Returns once every prefill rank has said of every request that its part is there; how many said so."""
        expected = {
            (move.request + 1, _note(move.prefill))
            for prefill in range(len(self._plan.prefill))
            for move in _models.moves_of(self._plan, prefill)
            if move.decode == self._rank
        }
        for _ in range(len(expected)):
            note = self._client.receiver.notifications.get(_TRANSFER_S)
            expected.remove((note.tag, note.payload))
        return len(expected)

    def check(self) -> tuple[int, str]:
        """(wrong bytes, where the first is)"""
        cache, share, model = self._cache, self._cache.share, self._plan.model
        pool = self._buffer.array.view(np.uint64).reshape(share.rows, cache.pool_pages, cache.row_bytes // 8)
        first_word = share.first_head * model.head_bytes // 8
        unused = cache.unused_pages()
        wrong, where = 0, ""
        for row in range(share.rows):
            for request, pages in cache.tables.items():
                logical = np.arange(len(pages), dtype=np.uint64)
                of_row = _content.keys(_SEED, request, share.first_row + row, logical)
                found = pool[row, pages]
                bad = _content.words(of_row, first_word, cache.row_bytes // 8) != found
                wrong += 8 * int(bad.sum())
                if bad.any() and not where:
                    page, word = (int(at[0]) for at in np.nonzero(bad))
                    where = f"request {request}, row {row}, page {page}, byte {8 * word}: {found[page, word]:#x}"
            stray = pool[row, unused] != _content.UNWRITTEN
            wrong += 8 * int(stray.sum())
            if stray.any() and not where:
                where = f"row {row}: an unused page was written"
        return wrong, where

    def close(self) -> None:
        self._client.close()


def _note(prefill: int) -> bytes:
    return b"prefill-%d" % prefill


def _demo(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    plan = fitting_plan(args.model, args.tokens, args.prefill, args.decode, int(_MEMORY_SHARE * _nodes.free_bytes()))
    geometry = _nodes.fitting_geometry(RANKS, 2 * RANKS, RANKS * RANKS, largest_slot_bytes=_SLOT_BYTES)
    for line in _choice(args, plan, geometry):
        progress.step(line)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="railrelay-demo-")))
        cpus = [-1] * RANKS
        nodes = [
            stack.enter_context(Node(f"demo-{side}-{os.getpid()}", directory, geometry, cpus))
            for side in ("prefill", "decode")
        ]
        progress.step(f"two daemons with {RANKS} rails each: pid {nodes[0].pid} and {nodes[1].pid}")
        decode = [
            stack.enter_context(Worker(f"decode engine {rank}", DecodeEngine, nodes[1].socket, rank, plan))
            for rank in range(RANKS)
        ]
        prefill = [
            stack.enter_context(
                Worker(f"prefill engine {rank}", PrefillEngine, nodes[0].socket, rank, _ROUTES[args.route], plan)
            )
            for rank in range(RANKS)
        ]
        for engine in (*decode, *prefill):
            engine.result()
        progress.step(f"{2 * RANKS} engines attached; filling the caches, pages scattered at random on both sides")
        offers = [engine.ask("offer") for engine in decode]
        _all(prefill, "open", offers)
        _all([*prefill, *decode], "fill")
        before = _facts(nodes)
        expected = sum(move.pieces * move.piece_bytes for rank in range(RANKS) for move in _models.moves_of(plan, rank))
        sent = _move(prefill, decode, nodes[1], expected, progress)
        facts = _since(_facts(nodes), before)
        progress.step("checking every byte at decode")
        checks = _all(decode, "check")
    seconds = (max(part.end_ns for part in sent) - min(part.begin_ns for part in sent)) / 1e9
    wrong = [(rank, bad, where) for rank, (bad, where) in enumerate(checks) if bad]
    for rank, bad, where in wrong:
        progress.step(f"decode engine {rank}: {bad} wrong bytes, the first: {where}")
    moves = [move for rank in range(RANKS) for move in _models.moves_of(plan, rank)]
    return {
        "verified": not wrong and sum(part.placed_bytes for part in sent) == expected,
        "bytes": expected,
        "blocks": sum(move.pieces for move in moves),
        "block_bytes": moves[0].piece_bytes,
        "seconds": seconds,
        "gigabytes_per_second": expected / seconds / 1e9,
        "route": args.route,
        "model": args.model,
        "tokens": plan.tokens,
        "requests": len(plan.request_pages),
        "transfers": len(moves),
        "prefill": args.prefill,
        "decode": args.decode,
        "geometry": vars(geometry),
        **facts,
    }


def _all(engines: list[Worker], method: str, *arguments: object) -> list[Any]:
    for engine in engines:
        engine.begin(method, *arguments)
    return [engine.result() for engine in engines]


def _move(prefill: list[Worker], decode: list[Worker], receiver: Node, expected: int, progress: Progress) -> list[Sent]:
    for engine in decode:
        engine.begin("receive")
    begin_ns = time.monotonic_ns() + 200_000_000
    for engine in prefill:
        engine.begin("send", begin_ns)
    progress.step(f"moving {size(expected)}")
    with _node.open_node(receiver.instance) as segment:
        sent = []
        for engine in prefill:
            while not engine.has_result(_LOOK_S):
                placed = sum(rail["bytes_received"] for rail in _rail_counters(segment))
                progress.update(f"  {placed / expected:4.0%}  {size(placed)}")
            sent.append(engine.result())
    for engine in decode:
        engine.result()
    return sent


def _rail_counters(segment: Segment) -> list[dict[str, int]]:
    area = segment.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
    return [dict(zip(abi.RAIL_COUNTERS, area.array(row, "counters"), strict=False)) for row in range(area.count)]


def _facts(nodes: list[Node]) -> dict[str, list[Row]]:
    """What the daemons have counted so far; the engines are still attached."""
    with _node.open_node(nodes[0].instance) as segment:
        sending, found = _rail_counters(segment), lanes.read(segment)
        nics = _node.nics(segment)
    with _node.open_node(nodes[1].instance) as segment:
        receiving = _rail_counters(segment)
    rails = [
        {
            "rail": rail,
            "nic": nics[rail],
            "bytes_sent": sent["bytes_sent"],
            "bytes_received": received["bytes_received"],
            "frames": sent["frames_sent"],
            "slices": sent["slices_done"],
            "resent": sent["slices_resent"],
        }
        for rail, (sent, received) in enumerate(zip(sending, receiving, strict=True))
    ]
    of_lane = ("rail", "sender", "slots", "slot_bytes", "bytes", "blocks", "stalls", "stall_ns", "direct_bytes")
    return {
        "rails": rails,
        "lanes": sorted(
            ({key: lane[key] for key in of_lane} | {"slots_sent": lane["completed"]} for lane in found),
            key=lambda lane: (lane["rail"], lane["sender"]),
        ),
    }


def _since(facts: dict[str, list[Row]], before: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Without what was counted before the move."""
    fixed = ("rail", "nic", "sender", "slots", "slot_bytes")
    return {
        what: [
            {key: value if key in fixed else value - then[key] for key, value in now.items()}
            for now, then in zip(rows, before[what], strict=True)
        ]
        for what, rows in facts.items()
    }


def _choice(args: argparse.Namespace, plan: Plan, geometry: Geometry) -> list[str]:
    pages = sum(plan.request_pages)
    copied = "; a latent has no heads to share, so each gets a copy" if plan.model.heads == 1 else ""
    return [
        f"{args.model}: {plan.model.text()}",
        f"prefill {args.prefill}: {PREFILLS[args.prefill]}",
        f"decode {args.decode}: {DECODES[args.decode]}{copied if args.decode == 'tp4' else ''}",
        f"chosen: {plan.tokens} tokens in {len(plan.request_pages)} requests ({pages} pages), pools of"
        f" {size(plan.nbytes)} of {size(_nodes.free_bytes())} free memory",
        f"chosen: {geometry.text()}, {size(RANKS * RANKS * geometry.lane_bytes)} for {RANKS * RANKS} lanes of"
        f" {size(_nodes.free_shared_bytes())} free in /dev/shm",
    ]


def _report(result: dict[str, Any]) -> str:
    rails = table(
        ["RAIL", "NIC", "SENT", "RECEIVED", "FRAMES", "SLICES", "RESENT"],
        [
            [
                rail["rail"],
                rail["nic"],
                size(rail["bytes_sent"]),
                size(rail["bytes_received"]),
                rail["frames"],
                rail["slices"],
                rail["resent"],
            ]
            for rail in result["rails"]
        ],
    )
    of_lanes = table(
        ["LANE", "SLOTS", "SLOTS SENT", "RELAYED", "DIRECT", "STALLS"],
        [
            [
                f"{lane['rail']}<-{lane['sender']}",
                f"{lane['slots']} x {size(lane['slot_bytes'])}",
                lane["slots_sent"],
                size(lane["bytes"]),
                size(lane["direct_bytes"]),
                f"{lane['stalls']} ({duration(lane['stall_ns'])})" if lane["stalls"] else "0",
            ]
            for lane in result["lanes"]
        ],
    )
    verdict = "every byte checked and right" if result["verified"] else "NOT VERIFIED: see above"
    return (
        f"{result['route']}: {size(result['bytes'])} in {result['blocks']:,} blocks, {result['transfers']} transfers,"
        f" {result['seconds']:.2f} s, {result['gigabytes_per_second']:.2f} GB/s: {verdict}\n\n"
        f"{rails}\n\nA lane is written rail<-sender.\n{of_lanes}"
    )
