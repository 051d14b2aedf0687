"""Transfers between every place that memory can be in, on real daemons."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import gpus, patterns
from helpers.gpus import Card, Place
from helpers.nodes import Nodes

pytestmark = [pytest.mark.gpu, pytest.mark.system]

KIB = 1 << 10
BLOCKS, BLOCK_BYTES = 40, 24 * KIB
NBYTES = BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("destination", ["gpu", "vmm", "shared", "private"])
@pytest.mark.parametrize("source", ["gpu", "vmm", "shared", "private"])
def test_every_source_to_every_destination(
    nodes: Nodes, gpu: Card, other_gpu: Card, source: Place, destination: Place
) -> None:
    first, second = nodes.pair()
    with first.connect(gpu=gpu.ordinal) as sender, second.connect(gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender,
            receiver,
            gpus.make(sender, NBYTES, source, gpu),
            gpus.make(receiver, NBYTES, destination, other_gpu),
        )
        content = patterns.content(NBYTES, 1)
        link.source.write(content)
        taken, put = patterns.order(BLOCKS, BLOCK_BYTES, 2)
        for round_number in range(3):
            moved = sender.write(
                link.remote,
                taken + np.uint64(link.source.address),
                put + np.uint64(link.remote.address),
                BLOCK_BYTES,
                tag=round_number,
            )
            moved.wait(20)
            assert moved.source_done
            assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, 2)
            link.destination.write(np.zeros(NBYTES, np.uint8))
        if source in ("gpu", "vmm"):
            assert sum(sender.counters()[f"gpu_{way}_bytes"] for way in ("strided", "batch", "kernel")) == 3 * NBYTES
