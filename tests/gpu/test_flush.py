"""GPU memory that a verbs rail receives into: an answer comes only after a read of its GPU, behind the writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from helpers import gpus, patterns, rail_devices
from helpers.engines import Engines
from helpers.gpus import Card, Control, Memory
from helpers.nodes import Node, Nodes
from helpers.raw_client import RawClient
from helpers.verbs_stand_in import Fabric
from helpers.waiting import until

from railrelay.client import Client, RelayError, RemoteRegion, Transfer, WaitTimeout, cuda, protocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.system,
    pytest.mark.skipif(rail_devices.real(), reason="needs what only the stand-in's devices can do"),
    pytest.mark.parametrize("nic", [pytest.param("verbs", marks=rail_devices.marks("verbs"))]),
]

BLOCKS, BLOCK = 40, 24 << 10
NBYTES = BLOCKS * BLOCK
PAGE = 4096
TIMEOUTS = {"connect_s": 5, "peer_s": 5, "settle_s": 5}


@pytest.fixture(autouse=True)
def dmabufs(control: Control) -> Iterator[None]:
    with control.dmabufs():
        yield


@dataclass
class Receiving:
    """``sender`` is a client of the first node, and what is counted are the devices of the second."""

    prefill: Node
    decode: Node
    sender: Client
    source: Memory
    fabric: Fabric
    seed: int = 0

    def counts(self, rail: int = 0) -> dict[str, int]:
        return self.fabric.counts(self.decode.devices[rail].address, self.decode.pid)

    def registered(self) -> list[int]:
        return [self.counts(rail)["memory_regions"] for rail in range(len(self.decode.devices))]

    def begin(self, remote: RemoteRegion) -> Transfer:
        self.seed += 1
        taken, put = patterns.order(BLOCKS, BLOCK, self.seed)
        addresses = taken + np.uint64(self.source.address), put + np.uint64(remote.address)
        return self.sender.write(remote, *addresses, BLOCK, timeout=60)

    def arrived(self, memory: Memory) -> bool:
        return patterns.arrived(self.source.read(), memory.read(), BLOCKS, BLOCK, self.seed)

    def moved(self, memory: Memory, remote: RemoteRegion | None = None, rail: int = 0) -> int:
        """How many reads the device has answered meanwhile."""
        before = self.counts(rail)["reads"]
        self.begin(remote or self.sender.open(memory.offer())).wait(30)
        assert self.arrived(memory)
        return self.counts(rail)["reads"] - before

    def waits_for_a_read(self, memory: Memory, remote: RemoteRegion, rail: int = 0) -> None:
        with self.fabric.reads_held(self.decode.devices[rail].address):
            transfer = self.begin(remote)
            until(lambda: self.arrived(memory), "the bytes are there")
            with pytest.raises(WaitTimeout):
                transfer.wait(0.3)
        transfer.wait(30)


@pytest.fixture
def rails() -> int:
    return 1


@pytest.fixture
def flush() -> str:
    return "auto"


@pytest.fixture
def receiving(nodes: Nodes, rails: int, flush: str) -> Iterator[Receiving]:
    prefill, decode = nodes.pair((rails, rails), timeouts=TIMEOUTS, verbs={"probe_s": 0.2, "flush": flush})
    assert nodes.devices.fabric is not None
    with prefill.connect(0) as sender:
        source = gpus.make(sender, NBYTES, "shared")
        source.write(patterns.content(NBYTES, 1))
        yield Receiving(prefill, decode, sender, source, nodes.devices.fabric)


@pytest.mark.parametrize("into", [0, 512], ids=["page", "inside a page"])
@pytest.mark.parametrize("place", ["gpu", "vmm"])
def test_an_answer_comes_after_a_read_of_the_gpu(receiving: Receiving, gpu: Card, place: gpus.Place, into: int) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        address = gpu.allocated(NBYTES + PAGE, place) + into
        memory = Memory(address, NBYTES, receiver.register((address, NBYTES)), gpu=gpu)
        remote = receiving.sender.open(memory.offer())
        assert receiving.moved(memory, remote) > 0
        receiving.waits_for_a_read(memory, remote)


def test_host_memory_needs_no_read(receiving: Receiving) -> None:
    with receiving.decode.connect(0) as receiver:
        assert receiving.moved(gpus.make(receiver, NBYTES, "shared")) == 0


@pytest.mark.parametrize("flush", ["always"])
def test_always_reads_host_memory_and_gpus(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        host = gpus.make(receiver, NBYTES, "shared")
        remote = receiving.sender.open(host.offer())
        assert receiving.moved(host, remote) > 0
        receiving.waits_for_a_read(host, remote)
        memory = gpus.make(receiver, NBYTES, "gpu", gpu)
        remote = receiving.sender.open(memory.offer())
        assert receiving.moved(memory, remote) % 2 == 0
        receiving.waits_for_a_read(memory, remote)


@pytest.mark.parametrize("flush", ["never"])
def test_never_reads_nothing(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        assert receiving.moved(gpus.make(receiver, NBYTES, "gpu", gpu)) == 0


@pytest.mark.parametrize("rails", [2])
def test_a_key_is_of_a_region_that_is_there(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        host = gpus.make(receiver, NBYTES, "shared")
        to_host = receiving.sender.open(host.offer())
        assert receiving.moved(host, to_host) == 0
        until(lambda: receiving.registered()[1] == 1, "a pair that was tried ahead is given back")
        before = receiving.registered()
        first = gpus.make(receiver, NBYTES, "gpu", gpu)  # there are receivers already
        assert receiving.moved(first) > 0
        second = gpus.make(receiver, NBYTES, "gpu", gpu)
        with_both = receiving.registered()
        remote = receiving.sender.open(second.offer())
        first.region.unregister(10)
        assert [have - had for have, had in zip(receiving.registered(), with_both, strict=True)] == [-1, -1]
        assert receiving.moved(second, remote) > 0
        receiving.waits_for_a_read(second, remote)
        second.region.unregister(10)
        assert receiving.moved(host, to_host) == 0
        left = receiving.registered()
    assert left[0] - before[0] <= 1  # of the queue pair that read
    assert left[1] == before[1]


def test_each_gpu_is_read(receiving: Receiving, two_gpus: tuple[Card, Card]) -> None:
    first, second = two_gpus
    with (
        receiving.decode.connect(0, gpu=first.ordinal) as one,
        receiving.decode.connect(1, gpu=second.ordinal) as other,
    ):
        of_one = gpus.make(one, NBYTES, "gpu", first)
        receiving.moved(of_one)
        of_other = gpus.make(other, NBYTES, "gpu", second)
        to_other = receiving.sender.open(of_other.offer())
        reads = receiving.moved(of_other, to_other)
        assert reads > 0
        assert reads % 2 == 0
        receiving.waits_for_a_read(of_other, to_other)
        of_one.region.unregister(10)
        receiving.waits_for_a_read(of_other, to_other)


@pytest.mark.parametrize("rails", [2])
def test_a_device_that_takes_over_reads_too(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        memory = gpus.make(receiver, NBYTES, "gpu", gpu)
        remote = receiving.sender.open(memory.offer())
        assert receiving.moved(memory, remote) > 0
        rail_devices.port(receiving.decode.devices[0], receiving.fabric, up=False)
        assert receiving.moved(memory, remote, rail=1) > 0
        receiving.waits_for_a_read(memory, remote, rail=1)
        second = gpus.make(receiver, NBYTES, "gpu", gpu)
        to_second = receiving.sender.open(second.offer())
        memory.region.unregister(10)
        receiving.waits_for_a_read(second, to_second, rail=1)
        rail_devices.port(receiving.decode.devices[0], receiving.fabric, up=True)
        until(lambda: receiving.prefill.cli("rails")["rails"][0]["through"] == 0, "the rail is back")
        assert receiving.moved(second, to_second) > 0
        receiving.waits_for_a_read(second, to_second)


def test_a_key_of_a_killed_client_is_replaced(receiving: Receiving, gpu: Card, engines: Engines) -> None:
    doomed = engines.start_gpu(receiving.decode, 0, gpu.ordinal, environment={"CUDA_DRIVER_DMABUF": "1"})
    offer = bytes.fromhex(doomed.ask("memory", name="first", nbytes=NBYTES))
    receiving.begin(receiving.sender.open(offer)).wait(30)
    with receiving.decode.connect(1, gpu=gpu.ordinal) as receiver:
        memory = gpus.make(receiver, NBYTES, "gpu", gpu)
        remote = receiving.sender.open(memory.offer())
        with_both = receiving.registered()[0]
        doomed.kill()
        until(lambda: receiving.registered()[0] < with_both, "its memory is given back")
        assert receiving.moved(memory, remote) > 0
        receiving.waits_for_a_read(memory, remote)
    until(lambda: receiving.registered()[0] < with_both - 1, "nothing of either is left")


def test_what_a_client_says_of_its_gpu_counts_for_itself_alone(receiving: Receiving, gpu: Card) -> None:
    """One that offers other memory as that of the GPU: reads of it make sure of nothing there."""
    with RawClient(receiving.decode.socket, rank=1) as liar, receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        liar.attach()
        pages = os.memfd_create("pages of its own")
        os.ftruncate(pages, PAGE)
        request = protocol.Register(
            liar.new_id(),
            1 << 40,
            PAGE,
            False,
            0,
            0,
            True,
            memory="device",
            device=cuda.uuid_of(gpu.ordinal),
            dmabuf=True,
        )
        liar.ask(request, protocol.Registered, (pages,))
        os.close(pages)
        before = receiving.registered()[0]
        memory = gpus.make(receiver, NBYTES, "gpu", gpu)
        assert receiving.registered()[0] == before + 2  # it, and a key of it for the reads
        remote = receiving.sender.open(memory.offer())
        assert receiving.moved(memory, remote) % 2 == 0
        with_both = receiving.registered()[0]
        liar.close()
        until(lambda: receiving.registered()[0] == with_both - 2, "nothing of the other is left")
        receiving.waits_for_a_read(memory, remote)


def test_a_change_waits_for_reads_that_are_under_way(receiving: Receiving, gpu: Card) -> None:
    """What they read is registered until then."""
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver, ThreadPoolExecutor(1) as threads:
        first, second = (gpus.make(receiver, NBYTES, "gpu", gpu) for _ in range(2))
        remote = receiving.sender.open(second.offer())
        receiving.moved(second, remote)
        registered = receiving.registered()[0]
        with receiving.fabric.reads_held(receiving.decode.devices[0].address):
            transfer = receiving.begin(remote)
            until(lambda: receiving.arrived(second), "the bytes are there")
            ending = threads.submit(first.region.unregister, 10)
            until(lambda: receiving.registered()[0] == registered + 1, "there is a second key")
            with pytest.raises(TimeoutError):
                ending.result(0.3)
            assert receiving.registered()[0] == registered + 1
        ending.result(10)
        transfer.wait(30)
        assert receiving.registered()[0] == registered - 1
        receiving.waits_for_a_read(second, remote)


def test_a_flush_that_fails_costs_a_connection_and_no_bytes(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        memory = gpus.make(receiver, NBYTES, "gpu", gpu)
        remote = receiving.sender.open(memory.offer())
        receiving.moved(memory, remote)
        for _ in range(3):
            assert receiving.fabric.fail_queue_pairs(receiving.decode.devices[0].address) > 0
            assert receiving.moved(memory, remote) > 0
        receiving.waits_for_a_read(memory, remote)


def test_a_key_that_cannot_be_made_is_an_error_of_the_registration(receiving: Receiving, gpu: Card) -> None:
    device = receiving.decode.devices[0]
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        before = receiving.counts()
        receiving.fabric.limit_memory(device.address, before["registered_bytes"] + NBYTES)
        address = gpu.allocated(NBYTES)
        with pytest.raises(RelayError, match=rf"flush key of region 0 .*{device.name}.*memory"):
            receiver.register((address, NBYTES))
        assert receiving.counts()["memory_regions"] == before["memory_regions"]
        receiving.fabric.clear()
        memory = Memory(address, NBYTES, receiver.register((address, NBYTES)), gpu=gpu)
        assert receiving.moved(memory) > 0


def test_a_source_needs_no_key(receiving: Receiving, gpu: Card) -> None:
    with receiving.decode.connect(0, gpu=gpu.ordinal) as receiver:
        before = receiving.counts()["memory_regions"]
        address = gpu.allocated(NBYTES)
        receiver.register((address, NBYTES), receive=False)
        assert receiving.counts()["memory_regions"] == before + 1
