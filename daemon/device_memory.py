"""Relay memory on a GPU, made without a CUDA context: the daemon never has one. Imported only where a rail's memory is
"device"; runs on worker threads."""

from __future__ import annotations

from railrelay.client import cuda
from railrelay.daemon.memory import Memory


def reserve(device: str, nbytes: int) -> Memory:
    """Memory of the GPU with this UUID, as a descriptor alone: it lives as long as somebody has that or a mapping of
    it. At least ``nbytes``. RelayError: no such GPU, no memory left on it."""
    ordinal = cuda.ordinal_of(device)
    step = cuda.granularity(ordinal)
    whole = -(-nbytes // step) * step
    handle = cuda.create(ordinal, whole)
    try:
        return Memory("", cuda.export(handle), whole, device=device)
    finally:
        cuda.release(handle)
