"""The local route with GPU memory: from and to memory of another client of the same daemon, without NIC and relay."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import gpus, patterns
from helpers.gpus import Card, Control, Link, Place
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import GpuOptions, PageLayout, RelayError, Result, TransferError

pytestmark = [pytest.mark.gpu, pytest.mark.system]

BLOCKS, BLOCK_BYTES = 300, 24 << 10
NBYTES = BLOCKS * BLOCK_BYTES


@pytest.fixture
def node(nodes: Nodes) -> Node:
    return nodes.start(2)


def moved(link: Link, seed: int) -> None:
    content = patterns.content(NBYTES, seed)
    link.source.write(content)
    link.destination.write(np.zeros(NBYTES, np.uint8))
    taken, put = patterns.order(BLOCKS, BLOCK_BYTES, seed)
    before = link.sender.counters()["bytes_local"]
    link.sender.write(
        link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK_BYTES
    ).wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, seed)
    assert link.sender.counters()["bytes_local"] - before == NBYTES


@pytest.mark.parametrize(
    ("source", "destination"),
    [("gpu", "vmm"), ("vmm", "vmm"), ("shared", "vmm"), ("private", "vmm"), ("gpu", "shared"), ("vmm", "shared")],
)
def test_between_every_two_places(node: Node, gpu: Card, other_gpu: Card, source: Place, destination: Place) -> None:
    with node.connect(0, gpu=gpu.ordinal) as sender, node.connect(1, gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender,
            receiver,
            gpus.make(sender, NBYTES, source, gpu),
            gpus.make(receiver, NBYTES, destination, other_gpu),
        )
        for seed in range(3):
            moved(link, seed)
        transfer = sender.write(link.remote, [link.source.address], [link.remote.address + 64], 64, notify=b"there")
        transfer.wait(20)
        assert transfer.source_done
        assert receiver.receiver.notifications.get(timeout=5).payload == b"there"
        link.remote.close()
        link.destination.region.unregister(10)


def test_memory_of_cuda_malloc_in_the_same_process_is_refused_with_a_way_out(
    node: Node, gpu: Card, control: Control
) -> None:
    assert control.count("opened") == 0
    with node.connect(1, gpu=gpu.ordinal) as receiver:
        destination = gpus.make(receiver, NBYTES, "gpu", gpu)
        with node.connect(0, gpu=gpu.ordinal) as sender, pytest.raises(RelayError) as failure:
            sender.open(destination.offer())
        assert "cuIpcOpenMemHandle says CUDA_ERROR_INVALID_CONTEXT: a process cannot open" in str(failure.value)
        assert "connect this client with local=False" in str(failure.value)
        with node.connect(0, gpu=gpu.ordinal, local=False) as sender:
            sender.open(destination.offer()).close()


def test_pages_of_many_rows(node: Node, gpu: Card, other_gpu: Card) -> None:
    rows, pages, piece = 61, 40, 1152
    nbytes = rows * pages * piece
    with node.connect(0, gpu=gpu.ordinal) as sender, node.connect(1, gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender, receiver, gpus.make(sender, nbytes, "gpu", gpu), gpus.make(receiver, nbytes, "vmm", other_gpu)
        )
        content = patterns.content(nbytes, 5)
        link.source.write(content)
        order = np.random.default_rng(5).permutation(pages)
        layouts = [
            PageLayout.strided(base, rows, pages * piece, piece, piece)
            for base in (link.source.address, link.remote.address)
        ]
        sender.write_pages(link.remote, layouts[0], range(pages), layouts[1], order).wait(20)
        found = link.destination.read().reshape(rows, pages, piece)
        assert (found[:, order] == content.reshape(rows, pages, piece)).all()


def test_what_is_cancelled_in_the_middle_has_landed_or_never_will(
    node: Node, gpu: Card, other_gpu: Card, control: Control
) -> None:
    """Settled means that the GPU writes no more, though its copies were enqueued long ago."""
    with node.connect(0, gpu=gpu.ordinal) as sender, node.connect(1, gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "vmm", other_gpu)
        )
        moved(link, 1)
        link.source.write(patterns.content(NBYTES, 2))
        with control.held():
            transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
            until(lambda: sender.counters()["bytes_local"] == 2 * NBYTES, "all copies are enqueued")
            transfer.cancel(wait=False)
            with pytest.raises(RelayError):
                transfer.wait_settled(0.3)
            assert not transfer.settled
        with pytest.raises(TransferError) as failure:
            transfer.wait(10)
        assert failure.value.result is Result.CANCELLED
        transfer.wait_settled(10)
        landed = link.destination.read()
        link.destination.write(np.zeros(NBYTES, np.uint8))
        gpu.synchronize()
        assert not link.destination.read().any()
        assert landed.any()


def test_a_region_goes_only_once_nothing_is_copied_there(
    node: Node, gpu: Card, other_gpu: Card, control: Control
) -> None:
    with node.connect(0, gpu=gpu.ordinal) as sender, node.connect(1, gpu=other_gpu.ordinal) as receiver:
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "vmm", other_gpu)
        )
        moved(link, 1)
        with control.held():
            transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
            until(lambda: sender.counters()["bytes_local"] == 2 * NBYTES, "all copies are enqueued")
            with pytest.raises(RelayError, match="written"):
                link.destination.region.unregister(0.1)
        link.destination.region.unregister(10)
        transfer.wait_settled(10)
        assert transfer.result in (Result.OK, Result.REGION_GONE)  # everything may have been enqueued by then


@pytest.mark.parametrize("function", ["cuLaunchKernel", "cuStreamWriteValue64"])
def test_what_the_gpu_did_not_copy_is_not_done(
    node: Node, gpu: Card, other_gpu: Card, control: Control, function: str
) -> None:
    options = GpuOptions(copy="kernel")
    with (
        node.connect(0, gpu=gpu.ordinal, gpu_options=options) as sender,
        node.connect(1, gpu=other_gpu.ordinal) as receiver,
    ):
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "vmm", other_gpu)
        )
        moved(link, 1)
        control.fault(function, 1, 719)
        transfer = sender.write(link.remote, [link.source.address], [link.remote.address], 65536)
        with pytest.raises(TransferError, match="CUDA_ERROR_LAUNCH_FAILED") as failure:
            transfer.wait(20)
        assert failure.value.result is Result.GPU_ERROR


def test_a_transfer_is_asked_after_its_client_was_closed(
    node: Node, gpu: Card, other_gpu: Card, control: Control
) -> None:
    with node.connect(1, gpu=other_gpu.ordinal) as receiver:
        with node.connect(0, gpu=gpu.ordinal) as sender:
            link = gpus.link(
                sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "vmm", other_gpu)
            )
            moved(link, 1)
            control.delay(2000)
            transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
        assert transfer.done
        assert transfer.settled in (True, False)
        assert transfer.source_done in (True, False)
