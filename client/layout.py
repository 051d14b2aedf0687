"""How a region holds pages: what a connector keeps for its KV cache, and what one write_pages() call is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from railrelay.client.errors import ArgumentError, ErrorCode

if TYPE_CHECKING:
    from railrelay.client.regions import Addressed


MAX_ROWS: Final = 1 << 24  # addresses of 128 MiB


def _check_rows(rows: int) -> None:
    if not 0 < rows <= MAX_ROWS:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"layout of {rows} rows: expected 1 to {MAX_ROWS}")


@dataclass(frozen=True, eq=False)
class PageLayout:
    """Row r of page p is ``piece_bytes`` at ``rows[r] + p * page_stride + piece_offset`` (addresses and bytes).

    ``rows``, uint64 [number of rows], has one address per layer and K or V, and per token where a page keeps its heads
    token by token. A transfer pairs row r of the source with row r of the destination, so both layouts have the same
    number of rows and the same ``piece_bytes``; strides and offsets may differ. Raises ArgumentError (a ValueError).
    """

    rows: npt.NDArray[np.uint64]
    page_stride: int
    piece_bytes: int
    piece_offset: int = 0

    def __post_init__(self) -> None:
        rows = addresses(self.rows, "rows").copy()
        rows.flags.writeable = False
        object.__setattr__(self, "rows", rows)
        if not rows.size or self.page_stride <= 0 or self.piece_bytes <= 0 or self.piece_offset < 0:
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"layout of {rows.size} rows, page_stride {self.page_stride}, piece_bytes {self.piece_bytes},"
                f" piece_offset {self.piece_offset}: rows, stride and piece must be above 0, the offset not below 0",
            )

    @classmethod
    def strided(
        cls, base: int, rows: int, row_stride: int, page_stride: int, piece_bytes: int, piece_offset: int = 0
    ) -> PageLayout:
        """Rows at equal distances in one allocation: row r of page 0 is at ``base + r * row_stride``."""
        _check_rows(rows)
        addresses_of_rows = np.uint64(base) + np.arange(rows, dtype=np.uint64) * np.uint64(row_stride)
        return cls(addresses_of_rows, page_stride, piece_bytes, piece_offset)

    @classmethod
    def tensors(
        cls, tensors: Sequence[int | Addressed], page_stride: int, piece_bytes: int, piece_offset: int = 0
    ) -> PageLayout:
        """One tensor a row: addresses, or Region, Buffer and RemoteRegion objects, in the order of the rows."""
        rows = [tensor if isinstance(tensor, int) else tensor.address for tensor in tensors]
        return cls(addresses(rows, "tensors"), page_stride, piece_bytes, piece_offset)

    def take(self, rows: slice | Sequence[int]) -> PageLayout:
        """Only these rows, for example the layers of one pipeline stage: ``take(slice(0, 32))``."""
        return replace(self, rows=self.rows[rows])

    def split(self, parts: int) -> PageLayout:
        """Each piece as ``parts`` rows that follow each other, for example tokens: row r becomes rows r * parts, ...
        Needed before heads() where a page is [token, head, ...]; not where it is [head, token, ...]."""
        part = self._part_bytes(parts)
        _check_rows(len(self.rows) * parts)
        steps = np.arange(parts, dtype=np.uint64) * np.uint64(part)
        return replace(self, rows=(self.rows[:, None] + steps).reshape(-1), piece_bytes=part)

    def heads(self, first: int, count: int, of: int) -> PageLayout:
        """Heads ``first`` to ``first + count - 1`` of pieces that hold ``of`` heads one after the other."""
        head = self._part_bytes(of)
        if not 0 <= first < first + count <= of:
            text = f"heads {first} to {first + count - 1} of {of}; expected some of 0 to {of - 1}"
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
        return replace(self, piece_offset=self.piece_offset + first * head, piece_bytes=count * head)

    def starts(self) -> npt.NDArray[np.uint64]:
        """Address of each row's piece in page 0, offset included."""
        return self.rows + np.uint64(self.piece_offset)

    def _part_bytes(self, parts: int) -> int:
        if parts <= 0 or self.piece_bytes % parts:
            text = f"a piece of {self.piece_bytes} bytes has no {parts} equal parts"
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
        return self.piece_bytes // parts


def addresses(values: Any, name: str) -> npt.NDArray[np.uint64]:  # noqa: ANN401
    """Array-like of integers from 0 -> contiguous uint64 [n]. ArgumentError names a value that is none."""
    array = _integers(values, name)
    if array.dtype.kind == "i" and array.size and array.min() < 0:
        at = int(array.argmin())
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{name}[{at}] is {array[at]}; expected 0 or more")
    return np.ascontiguousarray(array, np.uint64)


def page_numbers(values: Any, name: str) -> npt.NDArray[np.int64]:  # noqa: ANN401
    """Array-like of page numbers -> contiguous int64 [n]."""
    array = addresses(values, name)
    if array.size and int(array.max()) >= 1 << 63:
        at = int(array.argmax())
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{name}[{at}] is {array[at]}; too large for a page number")
    return array.view(np.int64)


def _integers(values: Any, name: str) -> npt.NDArray[Any]:  # noqa: ANN401
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ArgumentError(
            ErrorCode.BAD_ARGUMENT,
            f"{name} has shape {array.shape} and type {array.dtype}; expected one dimension of integers",
        )
    return array
