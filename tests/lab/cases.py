"""What moves in each case: the KV shapes of a real model, scaled down by the number of tokens alone, and when which
engine begins to send what. The same for every route, from the same seed.

A job is what one engine has of one request (or of one chunk of its prefill): a transfer for each decode rank. An
engine has four queues of jobs, as stock sglang has, and takes the next job of a queue when the one before has
arrived. Two kinds of load: *busy*, where the next job is there already (engines begin at different times, and there
is a little random work between jobs: GPUs never run in lockstep), and *paced*, where jobs become ready at given times
whether the one before has arrived or not, at a share of the rails' rate. With a busy load and equally many transfers
under way, the mean time of a transfer follows from the throughput alone (Little's law); the paced one shows what a
route does to a transfer's time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from railrelay.client.cli import _models
from railrelay.client.cli._models import MODELS, Cache, Model, Plan, Share
from railrelay.client.client import Route

QUEUES: Final = 4
_MODEL: Final = MODELS["llama-3.1-70b"]
_SLACK_PAGES: Final = 2  # at least one page that no request uses is where connections are warmed up
_SEED: Final = 1
_BEGIN_S: Final = 0.1  # engines begin up to so much apart
_PAUSE_S: Final = 0.01
_PACED_SHARE: Final = 0.8
_VICTIM_SHARE: Final = 0.6  # of its rail's rate; with its sender's part of the incast 0.85, so its NIC has room for it
_VICTIM_ROWS: Final = 10
_ALONE_S: Final = 1.5
_PIPELINE_SHARE: Final = 0.6


@dataclass(frozen=True)
class How:
    """``in_order``: stock sglang's loop, one decode session after the other, each awaited; else all at once.
    ``by_sessions``: requests for the same set of decode sessions share a queue (sglang takes the sum of their ports),
    so with one decode engine only one queue has work."""

    route: Route
    text: str
    in_order: bool = False
    by_sessions: bool = False


ROUTES: Final = {
    "serial": How(
        Route.DIRECT,
        "as stock sglang: own NIC, one decode rank after the other in loop order; one queue a set of decode ranks",
        in_order=True,
        by_sessions=True,
    ),
    "serial4": How(
        Route.DIRECT, "the same with all four queues at work, as with several decode engines", in_order=True
    ),
    "direct": How(Route.DIRECT, "own NIC, all decode ranks at once"),
    "matched": How(Route.MATCHED, "own memory out of the NIC of the destination's rail, no copy"),
    "scheduled": How(Route.SCHEDULED, "own NIC, one decode rank at a time in rounds with a shifting offset"),
    "relay": How(Route.RELAY, "through the lane of the destination's rail; own-rail bytes straight"),
    "relay-all": How(Route.RELAY_ALL, "the same, but own-rail bytes take a lane too"),
}
DEFAULT_ROUTES: Final = ("serial", "serial4", "direct", "matched", "scheduled", "relay")


@dataclass(frozen=True)
class Job:
    """Begins ``pause_s`` after the one before in its queue, and not before ``due_s`` after all began."""

    request: int
    due_s: float
    pause_s: float


Queues = tuple[tuple[Job, ...], ...]


@dataclass(frozen=True)
class Sender:
    """Engine of prefill share ``share`` of the plan, on GPU ``rank``. ``is_victim``: it always sends directly, and its
    jobs are judged apart from the others'. ``paced``: what it does in a second phase."""

    share: int
    rank: int
    queues: Queues
    is_victim: bool = False
    paced: Queues = ()


@dataclass(frozen=True)
class Traffic:
    plan: Plan
    senders: tuple[Sender, ...]
    is_chunked: bool = False  # its requests are chunks that the last stage completes
    alone_s: float = 0.0  # victim: until the others begin


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    rails: int
    make: Callable[[float], Traffic]  # from the line rate in bytes a second
    routes: tuple[str, ...] = DEFAULT_ROUTES


def _plan(
    request_pages: Sequence[int], prefill: Sequence[Share], decode: Sequence[Share], model: Model = _MODEL
) -> Plan:
    generator = np.random.default_rng(_SEED)

    def cache(share: Share) -> Cache:
        counts = [len(share.logical_pages(request_pages[request])) for request in share.requests]
        pool = sum(counts) + _SLACK_PAGES
        parts = np.split(generator.permutation(pool)[: sum(counts)], np.cumsum(counts)[:-1])
        return Cache(share, pool, dict(zip(share.requests, parts, strict=True)), share.heads * model.head_bytes)

    return Plan(model, tuple(request_pages), tuple(map(cache, prefill)), tuple(map(cache, decode)))


def _stages(count: int, requests: Sequence[int]) -> list[Share]:
    bounds = [-(-_MODEL.layers * stage // count) * _MODEL.rows_per_layer for stage in range(count + 1)]
    return [Share(begin, end, 0, _MODEL.heads, tuple(requests)) for begin, end in itertools.pairwise(bounds)]


def _in_turn(jobs: Sequence[Job]) -> Queues:
    return tuple(tuple(jobs[queue::QUEUES]) for queue in range(min(QUEUES, len(jobs))))


def _busy(share: int, requests: Sequence[int], due_s: float = 0.0) -> Queues:
    generator = np.random.default_rng([_SEED, share])
    begin_s = due_s + float(generator.uniform(0, _BEGIN_S))
    return _in_turn([Job(request, begin_s, float(generator.uniform(0, _PAUSE_S))) for request in requests])


def _paced(share: int, requests: Sequence[int], period_s: float) -> Queues:
    """One a period, at a random time in it."""
    generator = np.random.default_rng([_SEED, share, 1])
    return _in_turn(
        [Job(request, (at + float(generator.random())) * period_s, 0.0) for at, request in enumerate(requests)]
    )


def _sizes(count: int, least: int, most: int) -> list[int]:
    """Pages of requests."""
    return [int(pages) for pages in np.random.default_rng(_SEED).integers(least, most, count, endpoint=True)]


def _busy_then_paced(prefill: Sequence[Share], decode: Sequence[Share], pages: Sequence[int], line: float) -> Traffic:
    """Every prefill share holds a part of every request; the second half of them is paced."""
    plan = _plan(pages, prefill, decode)
    half = len(pages) // 2
    paced_bytes = sum(
        move.pieces * move.piece_bytes
        for share in range(len(prefill))
        for move in _models.moves_of(plan, share)
        if move.request >= half
    )
    period_s = paced_bytes / half / (_PACED_SHARE * line * len(decode))
    senders = [
        Sender(share, share, _busy(share, range(half)), paced=_paced(share, range(half, 2 * half), period_s))
        for share in range(len(prefill))
    ]
    return Traffic(plan, tuple(senders))


def _smoke(_: float) -> Traffic:
    requests = 8
    stages = _stages(4, range(requests))
    plan = _plan([4] * requests, stages, _models.decode_shares(_MODEL, "tp4", requests))
    return Traffic(plan, tuple(Sender(stage, stage, _busy(stage, range(requests))) for stage in range(len(stages))))


def _pp4_tp4(line: float) -> Traffic:
    requests = 48
    decode = _models.decode_shares(_MODEL, "tp4", requests)
    return _busy_then_paced(_stages(4, range(requests)), decode, _sizes(requests, 2, 6), line)


def _cp4_tp4(line: float) -> Traffic:
    requests = 48
    prefill, decode = _models.prefill_shares(_MODEL, "cp4", requests), _models.decode_shares(_MODEL, "tp4", requests)
    return _busy_then_paced(prefill, decode, [4 * pages for pages in _sizes(requests, 1, 2)], line)


def _to_one_rank(stages: int) -> Callable[[float], Traffic]:
    def make(line: float) -> Traffic:
        requests = range(48)
        whole = Share(0, _MODEL.rows, 0, _MODEL.heads, tuple(requests))
        return _busy_then_paced(_stages(stages, requests), [whole], _sizes(len(requests), 1, 2), line)

    return make


def _matched(_: float) -> Traffic:
    requests = 96
    shares = _models.decode_shares(_MODEL, "dp4", requests)
    plan = _plan([1] * requests, shares, shares)
    senders = [Sender(share, share, _busy(share, shares[share].requests)) for share in range(len(shares))]
    return Traffic(plan, tuple(senders))


def _victim(line_bytes_per_second: float) -> Traffic:
    incast, seconds = range(20), 6.0
    page_bytes = _VICTIM_ROWS * _MODEL.heads * _MODEL.head_bytes
    period_s = page_bytes / (_VICTIM_SHARE * line_bytes_per_second)
    stream = range(len(incast), len(incast) + round(seconds / period_s))
    bystander = Share(0, _VICTIM_ROWS, 0, _MODEL.heads, tuple(stream))
    stages = _stages(4, incast)
    plan = _plan(
        [1] * (len(incast) + len(stream)),
        [*stages, bystander],
        [Share(0, _MODEL.rows, 0, _MODEL.heads, tuple(incast)), bystander],
    )
    senders = [Sender(stage, stage, _busy(stage, incast, _ALONE_S)) for stage in range(len(stages))]
    open_loop = tuple((Job(request, at * period_s, 0.0),) for at, request in enumerate(stream))
    return Traffic(plan, (*senders, Sender(len(stages), 1, open_loop, is_victim=True)), alone_s=_ALONE_S)


def _pipeline(line_bytes_per_second: float) -> Traffic:
    chunks, pages = range(48), 2
    stages = _stages(4, chunks)
    plan = _plan([pages] * len(chunks), stages, _models.decode_shares(_MODEL, "tp4", len(chunks)))
    stage_bytes = pages * stages[0].rows * _MODEL.heads * _MODEL.head_bytes
    period_s = stage_bytes / (_PIPELINE_SHARE * line_bytes_per_second)
    generator = np.random.default_rng(_SEED)
    late_s = generator.uniform(0, 0.3 * period_s, (len(stages), len(chunks)))
    senders = []
    for stage in range(len(stages)):
        jobs = [Job(chunk, (chunk + stage) * period_s + float(late_s[stage, chunk]), 0.0) for chunk in chunks]
        senders.append(Sender(stage, stage, _in_turn(jobs)))
    return Traffic(plan, tuple(senders), is_chunked=True)


CASES: Final = {
    case.name: case
    for case in (
        Case("smoke", "a short pp4-tp4, direct and relay only", 4, _smoke, ("direct", "relay")),
        Case("pp4-tp4", "4 pipeline stages to 4 tensor-parallel decode ranks", 4, _pp4_tp4),
        Case("pp4-dp1", "4 pipeline stages to one decode rank (data-parallel attention)", 4, _to_one_rank(4)),
        Case("pp8-dp1", "8 pipeline stages to one decode rank (data-parallel attention)", 8, _to_one_rank(8)),
        Case(
            "cp4-tp4", "4 context-parallel ranks, all of them sending, to 4 tensor-parallel decode ranks", 4, _cp4_tp4
        ),
        Case(
            "victim",
            "4 pipeline stages to one decode rank, while GPU 1 also sends a steady stream, at"
            f" {_VICTIM_SHARE:g} of a rail, to the decode rank of its own rail",
            4,
            _victim,
        ),
        Case(
            "pipeline",
            f"chunked prefill, 4 stages to 4 decode ranks at {_PIPELINE_SHARE:g} of the rails' rate: each stage sends"
            " its layers of a chunk while the next computes it",
            4,
            _pipeline,
        ),
        Case(
            "matched",
            "one sender a rail, already on the rail of its decode rank",
            4,
            _matched,
            ("direct", "relay", "relay-all"),
        ),
    )
}
