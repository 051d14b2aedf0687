"""A layout addresses the bytes that the same slice of a numpy array has."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from railrelay.client.errors import ArgumentError
from railrelay.client.layout import PageLayout, addresses, page_numbers

SMALL = st.integers(1, 5)
BASE = 1 << 40


@dataclass(frozen=True)
class Tensor:
    address: int
    nbytes: int


def offsets(layout: PageLayout, pages: int) -> np.ndarray:
    """Every byte a transfer of pages 0 .. pages - 1 reads, as [page, row, byte], from BASE."""
    page = np.arange(pages, dtype=np.uint64)[:, None, None] * np.uint64(layout.page_stride)
    byte = np.arange(layout.piece_bytes, dtype=np.uint64)
    return layout.starts()[None, :, None] + page + byte - np.uint64(BASE)


@given(layers=SMALL, pages=SMALL, heads=SMALL, head_bytes=SMALL, data=st.data())
def test_heads_of_a_head_major_cache(layers: int, pages: int, heads: int, head_bytes: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, heads - 1))
    count = data.draw(st.integers(1, heads - first))
    cache = np.arange(layers * pages * heads * head_bytes).reshape(layers, pages, heads, head_bytes)
    layout = PageLayout.strided(BASE, layers, cache[0].size, cache[0, 0].size, cache[0, 0].size)
    wanted = cache[:, :, first : first + count].reshape(layers, pages, -1).swapaxes(0, 1)
    assert np.array_equal(offsets(layout.heads(first, count, heads), pages), wanted)


@given(layers=SMALL, pages=SMALL, tokens=SMALL, heads=SMALL, data=st.data())
def test_heads_of_a_token_major_cache(layers: int, pages: int, tokens: int, heads: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, heads - 1))
    cache = np.arange(layers * pages * tokens * heads).reshape(layers, pages, tokens, heads)
    layout = PageLayout.strided(BASE, layers, cache[0].size, cache[0, 0].size, cache[0, 0].size)
    wanted = cache[:, :, :, first : first + 1].transpose(1, 0, 2, 3).reshape(pages, layers * tokens, 1)
    assert np.array_equal(offsets(layout.split(tokens).heads(first, 1, heads), pages), wanted)


def test_heads_of_heads_add_their_offsets() -> None:
    half = PageLayout.strided(BASE, 1, 0, 4096, 4096).heads(2, 2, 4)
    quarter = half.heads(1, 1, 2)
    assert (quarter.piece_offset, quarter.piece_bytes) == (3072, 1024)


def test_take_keeps_the_layers_of_a_stage() -> None:
    layout = PageLayout.strided(BASE, 8, 100, 64, 64, 16)
    assert layout.take(slice(2, 4)).starts().tolist() == [BASE + 216, BASE + 316]
    assert layout.take([7, 0]).rows.tolist() == [BASE + 700, BASE]


def test_tensors_are_addresses_or_registered_memory() -> None:
    assert PageLayout.tensors([16, Tensor(4096, 64)], 32, 32).rows.tolist() == [16, 4096]


def test_addresses_use_all_64_bits() -> None:
    assert PageLayout.strided((1 << 64) - 32, 2, 16, 16, 16).rows.tolist() == [(1 << 64) - 32, (1 << 64) - 16]


@pytest.mark.parametrize(
    ("stride", "piece", "offset"),
    [(0, 64, 0), (-64, 64, 0), (64, 0, 0), (64, -1, 0), (64, 64, -1)],
)
def test_sizes_that_cannot_be_are_refused(stride: int, piece: int, offset: int) -> None:
    with pytest.raises(ArgumentError, match="must be above 0"):
        PageLayout.strided(BASE, 1, 0, stride, piece, offset)


def test_no_rows_are_refused() -> None:
    with pytest.raises(ArgumentError, match="layout of 0 rows"):
        PageLayout.tensors([], 64, 64)


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (0, 0), (3, 2), (0, 5)])
def test_head_ranges_stay_inside(first: int, count: int) -> None:
    with pytest.raises(ArgumentError, match="of 4"):
        PageLayout.strided(BASE, 1, 0, 64, 64).heads(first, count, 4)


def test_pieces_divide_evenly() -> None:
    with pytest.raises(ArgumentError, match="64 bytes has no 3 equal parts"):
        PageLayout.strided(BASE, 1, 0, 64, 64).split(3)


def test_rows_cannot_be_changed_afterwards() -> None:
    rows = np.array([BASE], np.uint64)
    layout = PageLayout(rows, 64, 64)
    rows[0] = 0
    assert layout.rows[0] == BASE
    with pytest.raises(ValueError, match="read-only"):
        layout.rows[0] = 0


@pytest.mark.parametrize(
    "values", [[1, 2], np.array([1, 2], np.int32), (1, 2), np.array([1, 9, 2], np.uint64)[::1][:2]]
)
def test_addresses_take_any_integers(values: object) -> None:
    array = addresses(values, "sources")
    assert array.dtype == np.uint64
    assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("values", "text"),
    [([4, -1], r"sources\[1\] is -1"), ([1.5], "float64"), ([[1]], r"\(1, 1\)"), ([1 << 64], "object"), (3, r"\(\)")],
)
def test_what_is_no_address_is_named(values: object, text: str) -> None:
    with pytest.raises(ArgumentError, match=text):
        addresses(values, "sources")


def test_page_numbers_are_signed_for_the_core_and_never_negative() -> None:
    assert page_numbers([], "pages").dtype == np.int64
    with pytest.raises(ArgumentError, match="too large"):
        page_numbers(np.array([1 << 63], np.uint64), "pages")


@pytest.mark.parametrize("rows", [0, -1, (1 << 24) + 1, 1 << 31, 1 << 62])
def test_more_rows_than_can_be_are_named(rows: int) -> None:
    with pytest.raises(ArgumentError, match=f"{rows} rows"):
        PageLayout.strided(BASE, rows, 4096, 4096, 64)


def test_pieces_are_split_into_no_more_rows_than_can_be() -> None:
    with pytest.raises(ArgumentError, match=f"{1 << 25} rows"):
        PageLayout.strided(BASE, 1 << 4, 1 << 22, 1 << 30, 1 << 21).split(1 << 21)
