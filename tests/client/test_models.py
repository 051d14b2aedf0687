"""The demo's models: what each rank holds, and that the moves bring every decode rank exactly what it should have."""

import numpy as np
import pytest

from railrelay.client.cli import _content, _models
from railrelay.client.cli._models import DECODES, MODELS, PREFILLS, RANKS, Plan
from railrelay.client.errors import ArgumentError

BASE = 1 << 30


def spans(plan: Plan, side: str, rank: int) -> np.ndarray:
    """Addresses of all pieces that the moves read (or write) in the pool of one rank, relative to its start."""
    found = []
    for prefill in range(RANKS):
        for move in _models.moves_of(plan, prefill):
            if rank != (move.prefill if side == "prefill" else move.decode):
                continue
            source, source_pages, destination, pages = _models.sides_of(plan, move, BASE, BASE)
            layout, numbers = (source, source_pages) if side == "prefill" else (destination, pages)
            strides = np.asarray(numbers, np.uint64) * np.uint64(layout.page_stride)
            found.append((layout.starts()[:, None] + strides[None, :]).ravel() - np.uint64(BASE))
    return np.concatenate(found)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_token_has_the_size_that_its_model_documents(model: _models.Model) -> None:
    documented = {"llama-3.1-70b": 80 * 2 * 8 * 128 * 2, "deepseek-v3": 61 * 576 * 2}
    assert model.token_bytes == documented[model.name]


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_moves_write_every_used_page_of_each_decode_rank_once(model: _models.Model, prefill: str, decode: str) -> None:
    plan = _models.make_plan(model, 20 * model.page_tokens, prefill, decode)
    for rank, cache in enumerate(plan.decode):
        written = spans(plan, "decode", rank)
        used = np.concatenate(list(cache.tables.values()))
        rows = np.arange(cache.share.rows) * cache.pool_pages
        expected = ((rows[:, None] + used[None, :]) * cache.row_bytes).ravel()
        assert sorted(written.tolist()) == sorted(expected.tolist())
        assert not np.intersect1d(used, cache.unused_pages()).size


@pytest.mark.parametrize("prefill", PREFILLS)
def test_prefill_ranks_send_each_head_of_each_page_once_to_tensor_parallel_ranks(prefill: str) -> None:
    plan = _models.make_plan(MODELS["llama-3.1-70b"], 20 * 16, prefill, "tp4")
    read = 0
    for rank in range(RANKS):
        pieces = spans(plan, "prefill", rank)
        assert np.unique(pieces).size == pieces.size
        read += pieces.size * 2 * plan.model.head_bytes
    assert read == plan.tokens * plan.model.token_bytes


def test_a_latent_cache_is_copied_to_each_tensor_parallel_rank() -> None:
    plan = _models.make_plan(MODELS["deepseek-v3"], 20 * 64, "pp4", "tp4")
    moved = sum(move.pieces * move.piece_bytes for rank in range(RANKS) for move in _models.moves_of(plan, rank))
    assert moved == RANKS * plan.tokens * plan.model.token_bytes


def test_layers_that_do_not_divide_go_to_stages_of_almost_equal_size() -> None:
    shares = _models.prefill_shares(MODELS["deepseek-v3"], "pp4", 1)
    assert [share.rows for share in shares] == [16, 15, 15, 15]
    assert [share.first_row for share in shares] == [0, 16, 31, 46]


def test_fewer_pages_than_ranks_give_fewer_requests() -> None:
    plan = _models.make_plan(MODELS["llama-3.1-70b"], 1, "cp4", "dp4")
    assert plan.request_pages == (1,)
    assert [len(cache.tables) for cache in plan.decode] == [1, 0, 0, 0]


def test_no_tokens_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="0 tokens"):
        _models.make_plan(MODELS["llama-3.1-70b"], 0, "pp4", "tp4")


def test_content_tells_rows_pages_and_offsets_apart() -> None:
    pages = np.arange(50, dtype=np.uint64)
    content = np.concatenate(
        [_content.words(_content.keys(1, request, row, pages), 0, 64) for request in range(3) for row in range(5)]
    )
    assert np.unique(content).size == content.size
    part = _content.words(_content.keys(1, 2, 4, pages), 16, 8)
    assert np.array_equal(part, content[-50:, 16:24])
