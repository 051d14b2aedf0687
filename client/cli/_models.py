"""KV caches of real models, which ranks hold what of them, and what each prefill rank owes each decode rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from railrelay.client.errors import ArgumentError, ErrorCode
from railrelay.client.layout import PageLayout

Pages = npt.NDArray[np.int64]

RANKS: Final = 4
PREFILLS: Final = {
    "pp4": "4 pipeline stages, each with its layers of all pages",
    "cp4": "4 context-parallel ranks, each with every 4th page of all layers; all of them send, which is not every"
    " engine's default",
}
DECODES: Final = {
    "tp4": "4 tensor-parallel ranks, each with its heads of all requests",
    "dp4": "4 data-parallel ranks, each with all heads of its requests",
}


@dataclass(frozen=True)
class Model:
    """A page of ``page_tokens`` tokens has ``rows`` rows, one per layer and K or V; a row is [heads, tokens, head size]
    (the HND order of attention kernels), so that a range of heads is one contiguous piece. A multi-head latent
    attention cache has one row a layer and one "head", the latent, which every tensor-parallel rank holds whole."""

    name: str
    layers: int
    rows_per_layer: int
    heads: int
    head_token_bytes: int
    page_tokens: int

    @property
    def rows(self) -> int:
        return self.layers * self.rows_per_layer

    @property
    def head_bytes(self) -> int:
        """One head of one row of a page."""
        return self.page_tokens * self.head_token_bytes

    @property
    def token_bytes(self) -> int:
        return self.rows * self.heads * self.head_token_bytes

    def text(self) -> str:
        kind = f"K and V of {self.heads} heads" if self.rows_per_layer == 2 else "one latent"
        return (
            f"{self.layers} layers, {kind} of {self.head_token_bytes} B a token, pages of {self.page_tokens} tokens,"
            f" {self.token_bytes:,} B a token"
        )


MODELS: Final = {
    model.name: model
    for model in (
        Model("llama-3.1-70b", layers=80, rows_per_layer=2, heads=8, head_token_bytes=128 * 2, page_tokens=16),
        Model("deepseek-v3", layers=61, rows_per_layer=1, heads=1, head_token_bytes=576 * 2, page_tokens=64),
    )
}


@dataclass(frozen=True)
class Share:
    """What one rank holds: rows ``first_row`` to ``end_row - 1``, ``heads`` heads from ``first_head`` on, of each
    request in ``requests`` the pages ``first_page``, ``first_page + page_step``, ..."""

    first_row: int
    end_row: int
    first_head: int
    heads: int
    requests: tuple[int, ...]
    first_page: int = 0
    page_step: int = 1

    @property
    def rows(self) -> int:
        return self.end_row - self.first_row

    def logical_pages(self, pages_of_request: int) -> Pages:
        return np.arange(self.first_page, pages_of_request, self.page_step, dtype=np.int64)


def prefill_shares(model: Model, prefill: str, requests: int) -> list[Share]:
    everything = tuple(range(requests))
    if prefill == "cp4":
        return [Share(0, model.rows, 0, model.heads, everything, rank, RANKS) for rank in range(RANKS)]
    bounds = [-(-model.layers * stage // RANKS) * model.rows_per_layer for stage in range(RANKS + 1)]
    return [Share(bounds[stage], bounds[stage + 1], 0, model.heads, everything) for stage in range(RANKS)]


def decode_shares(model: Model, decode: str, requests: int) -> list[Share]:
    if decode == "dp4":
        return [Share(0, model.rows, 0, model.heads, tuple(range(rank, requests, RANKS))) for rank in range(RANKS)]
    heads = model.heads // RANKS or model.heads  # fewer heads than ranks are replicated
    first = [rank * heads % model.heads for rank in range(RANKS)]
    return [Share(0, model.rows, first[rank], heads, tuple(range(requests))) for rank in range(RANKS)]


@dataclass(frozen=True)
class Cache:
    """One rank's pool of pages, row by row, all pages of a row in one tensor. ``tables[request][i]`` is the page of the
    pool that holds the i-th page that the rank has of the request."""

    share: Share
    pool_pages: int
    tables: dict[int, Pages]
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.share.rows * self.pool_pages * self.row_bytes

    def layout(self, base: int) -> PageLayout:
        return PageLayout.strided(
            base, self.share.rows, self.pool_pages * self.row_bytes, self.row_bytes, self.row_bytes
        )

    def unused_pages(self) -> Pages:
        used = np.concatenate([*self.tables.values(), np.empty(0, np.int64)])
        return np.setdiff1d(np.arange(self.pool_pages), used)


@dataclass(frozen=True)
class Plan:
    """Requests (pages of each), and the caches of both nodes with the pages of the requests scattered in them."""

    model: Model
    request_pages: tuple[int, ...]
    prefill: tuple[Cache, ...]
    decode: tuple[Cache, ...]

    @property
    def tokens(self) -> int:
        return sum(self.request_pages) * self.model.page_tokens

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in (*self.prefill, *self.decode))


@dataclass(frozen=True)
class Move:
    """One write_pages() call of a prefill rank: what it has of one request, for one decode rank."""

    request: int
    prefill: int
    decode: int
    pieces: int
    piece_bytes: int


def make_plan(
    model: Model, tokens: int, prefill: str, decode: str, requests: int = RANKS, slack: float = 0.25, seed: int = 1
) -> Plan:
    """Whole pages for at least ``tokens`` tokens, in ``requests`` requests or as many as there are pages; the pools
    have ``slack`` more pages than are used."""
    if tokens < 1:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{tokens} tokens; expected 1 or more")
    pages = -(-tokens // model.page_tokens)
    requests = min(requests, pages)
    request_pages = tuple(pages // requests + (request < pages % requests) for request in range(requests))
    generator = np.random.default_rng(seed)

    def cache(share: Share) -> Cache:
        counts = {request: len(share.logical_pages(request_pages[request])) for request in share.requests}
        used = sum(counts.values())
        pool = used + max(1, round(used * slack))
        scattered = generator.permutation(pool)
        ends = np.cumsum(list(counts.values()))
        tables = {
            request: scattered[end - count : end] for (request, count), end in zip(counts.items(), ends, strict=True)
        }
        return Cache(share, pool, tables, share.heads * model.head_bytes)

    return Plan(
        model,
        request_pages,
        tuple(cache(share) for share in prefill_shares(model, prefill, requests)),
        tuple(cache(share) for share in decode_shares(model, decode, requests)),
    )


def moves_of(plan: Plan, prefill: int) -> list[Move]:
    """What one prefill rank owes, request by request, to the decode ranks in an order that starts with its own."""
    cache = plan.prefill[prefill]
    moves = []
    for request in cache.share.requests:
        for step in range(len(plan.decode)):
            rank = (prefill + step) % len(plan.decode)
            pages = len(cache.tables[request])
            if pages and request in plan.decode[rank].tables:
                share = plan.decode[rank].share
                piece_bytes = share.heads * plan.model.head_bytes
                moves.append(Move(request, prefill, rank, pages * cache.share.rows, piece_bytes))
    return moves


def sides_of(
    plan: Plan, move: Move, source_base: int, destination_base: int
) -> tuple[PageLayout, Pages, PageLayout, Pages]:
    """The arguments of write_pages() for a move: layouts that agree in rows and heads, and the page numbers."""
    source, destination = plan.prefill[move.prefill], plan.decode[move.decode]
    rows = slice(source.share.first_row, source.share.end_row)
    heads = destination.share
    from_layout = source.layout(source_base).heads(heads.first_head, heads.heads, plan.model.heads)
    logical = source.share.logical_pages(plan.request_pages[move.request])
    return (
        from_layout,
        source.tables[move.request],
        destination.layout(destination_base).take(rows),
        destination.tables[move.request][logical],
    )
