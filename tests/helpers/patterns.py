"""Contents and orders that sender and receiver can make independently from a seed, and what a transfer should do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.uint64]


def content(nbytes: int, seed: int) -> Bytes:
    """Random bytes, none of them zero: cleared memory never looks like content."""
    return np.random.default_rng(seed).integers(1, 256, nbytes, dtype=np.uint8)


def order(blocks: int, block_bytes: int, seed: int) -> tuple[Offsets, Offsets]:
    """(source offsets, destination offsets) of equal blocks, both in random order."""
    rng = np.random.default_rng(seed)
    stride = np.uint64(block_bytes)
    return rng.permutation(blocks).astype(np.uint64) * stride, rng.permutation(blocks).astype(np.uint64) * stride


def arrived(source: Bytes, destination: Bytes, blocks: int, block_bytes: int, seed: int) -> bool:
    """Whether order(blocks, block_bytes, seed) has been carried out."""
    taken, put = (offsets // np.uint64(block_bytes) for offsets in order(blocks, block_bytes, seed))
    size = blocks * block_bytes
    old, new = (array[:size].reshape(blocks, block_bytes) for array in (source, destination))
    return bool((old[taken] == new[put]).all())


def mixed(
    source_bytes: int, destination_bytes: int, lengths: npt.ArrayLike, seed: int
) -> tuple[Offsets, Offsets, Offsets]:
    """(source offsets, destination offsets, lengths) of blocks of these lengths: sources anywhere, also overlapping,
    destinations in random order with random gaps that nobody may touch."""
    rng = np.random.default_rng(seed)
    lengths = rng.permutation(np.asarray(lengths, np.uint64))
    spare = destination_bytes - int(lengths.sum())
    assert spare >= 0, f"{int(lengths.sum())} bytes of blocks do not fit into {destination_bytes}"
    gaps = np.sort(rng.integers(0, spare + 1, len(lengths))).astype(np.uint64)
    starts = np.concatenate([np.zeros(1, np.uint64), np.cumsum(lengths)[:-1].astype(np.uint64)])
    sources = np.array([rng.integers(0, source_bytes - int(length) + 1) for length in lengths], np.uint64)
    shuffled = rng.permutation(len(lengths))
    return sources[shuffled], (starts + gaps)[shuffled], lengths[shuffled]


def after(source: Bytes, destination: Bytes, sources: Offsets, destinations: Offsets, lengths: Offsets) -> Bytes:
    """What ``destination`` looks like once the blocks are placed."""
    expected = destination.copy()
    for start, put, length in zip(sources.tolist(), destinations.tolist(), lengths.tolist(), strict=True):
        expected[put : put + length] = source[start : start + length]
    return expected
