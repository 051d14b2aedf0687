"""CUDA errors, and engines and daemons that are killed in the middle of copies."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from helpers import gpus, patterns, processes
from helpers.engines import Engine, EngineError, Engines
from helpers.gpus import Card, Control, Driver, Link, Place
from helpers.nodes import Node, Nodes
from helpers.waiting import until

from railrelay.client import Client, ErrorCode, RelayError, Result, Transfer, TransferError
from railrelay.client.gpu_memory import Copy, GpuOptions

pytestmark = [pytest.mark.gpu, pytest.mark.system]

KIB = 1 << 10
BLOCKS, BLOCK_BYTES = 64, 16 * KIB
NBYTES = BLOCKS * BLOCK_BYTES


class Stream:
    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


Begin = Callable[..., Link]


@pytest.fixture
def nodes_and_link(nodes: Nodes, gpu: Card, other_gpu: Card) -> Iterator[tuple[tuple[Node, Node], Begin]]:
    both = nodes.pair()
    with ExitStack() as stack:

        def begin(
            copy: Copy = Copy.AUTO,
            source: Place = "gpu",
            destination: Place = "private",
            *,
            sender_gpu: bool = True,
        ) -> Link:
            options = GpuOptions(copy=copy)
            chosen = gpu.ordinal if sender_gpu else None
            sender = stack.enter_context(both[0].connect(gpu=chosen, gpu_options=options))
            receiver = stack.enter_context(both[1].connect(gpu=other_gpu.ordinal, gpu_options=options))
            return gpus.link(
                sender,
                receiver,
                gpus.make(sender, NBYTES, source, gpu),
                gpus.make(receiver, NBYTES, destination, other_gpu),
            )

        yield both, begin


def write(link: Link, seed: int = 2, **options: object) -> Transfer:
    sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, seed)
    return link.sender.write(
        link.remote,
        sources + np.uint64(link.source.address),
        destinations + np.uint64(link.remote.address),
        BLOCK_BYTES,
        **options,  # type: ignore[arg-type]
    )


def works(link: Link, seed: int) -> bool:
    content = patterns.content(NBYTES, seed)
    link.source.write(content)
    write(link, seed).wait(20)
    return patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, seed)


def fails(link: Link) -> bool:
    try:
        write(link, timeout=10).wait(20)
    except RelayError:
        return True
    return False


def failed(link: Link, count: int) -> list[RelayError]:
    """What so many transfers, begun at once, end with if not well."""
    found: list[RelayError] = []
    moved: list[Transfer] = []
    try:
        moved += [write(link, number, timeout=20) for number in range(count)]
    except RelayError as failure:
        found.append(failure)
    for transfer in moved:
        try:
            transfer.wait(15)
        except TransferError as failure:
            found.append(failure)
    return found


def code_of(sender: Engine) -> str:
    """The error that the next transfer ends with, if any."""
    try:
        sender.ask("write", transfer="k", source="a", remote="a", blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=1)
        sender.ask("wait", transfer="k")
    except EngineError as failure:
        return failure.code
    return ""


def refused(client: Client) -> bool:
    """Whether the session is over."""
    try:
        client.register(np.zeros(64, np.uint8)).unregister()
    except RelayError:
        return True
    return False


@pytest.mark.parametrize(
    ("copy", "function"),
    [
        (Copy.STRIDED, "cuMemcpyBatchAsync"),
        (Copy.BATCH, "cuMemcpyBatchAsync"),
        (Copy.KERNEL, "cuLaunchKernel"),
        (Copy.AUTO, "cuStreamWriteValue64"),
        (Copy.AUTO, "cuCtxSetCurrent"),
    ],
)
def test_a_failing_copy_ends_the_session_and_a_new_client_works(
    nodes_and_link: tuple[tuple[Node, Node], Begin], control: Control, gpu: Card, copy: Copy, function: str
) -> None:
    (first, _), begin = nodes_and_link
    link = begin(copy)
    assert works(link, 1)
    control.fault(function, 2, 719)
    ended = failed(link, 6)
    assert ended
    for failure in ended:
        assert failure.code is ErrorCode.GPU_ERROR or getattr(failure, "result", None) is Result.GPU_ERROR, failure
        assert "CUDA_ERROR_LAUNCH_FAILED" in str(failure)
    until(lambda: refused(link.sender), "the session ends")
    with pytest.raises(RelayError) as refusal:
        write(link)
    assert refusal.value.code is ErrorCode.GPU_ERROR
    assert "CUDA_ERROR_LAUNCH_FAILED" in str(refusal.value)
    link.sender.close()
    again = first.connect(gpu=gpu.ordinal)
    with again:
        source = gpus.make(again, NBYTES, "gpu", gpu)
        assert works(gpus.link(again, link.receiver, source, link.destination), 3)


@pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
def test_a_lost_context(nodes_and_link: tuple[tuple[Node, Node], Begin], control: Control, gpu: Card, at: int) -> None:
    """An error that the GPU meets later: nothing is executed any more, no doorbell rings."""
    (first, _), begin = nodes_and_link
    link = begin()
    assert works(link, 1)
    control.fault("execution", at, 700, sticky=True)
    ended = failed(link, 4)
    assert ended
    assert all("CUDA_ERROR_ILLEGAL_ADDRESS" in str(failure) for failure in ended), ended
    link.sender.close()
    control.recover()
    fresh = Card(gpu.ordinal)
    with first.connect(gpu=gpu.ordinal) as again:
        source = gpus.make(again, NBYTES, "gpu", fresh)
        assert works(gpus.link(again, link.receiver, source, link.destination), 3)
    fresh.close()


def test_a_failing_event(nodes_and_link: tuple[tuple[Node, Node], Begin], control: Control, gpu: Card) -> None:
    _, begin = nodes_and_link
    link = begin()
    assert works(link, 1)
    stream = gpu.stream()
    with control.held():
        moved = write(link, ready=Stream(stream))
        control.fault("cuEventQuery", 1, 719)
        with pytest.raises(TransferError, match="CUDA_ERROR_LAUNCH_FAILED") as failure:
            moved.wait(20)
    assert failure.value.result is Result.GPU_ERROR


def test_the_first_thing_that_a_client_does_may_wait_for_a_stream(
    nodes_and_link: tuple[tuple[Node, Node], Begin], gpu: Card
) -> None:
    """No copy has made the context current on the feeder's thread before."""
    _, begin = nodes_and_link
    link = begin(source="private")
    write(link, ready=Stream(gpu.stream())).wait(20)


@pytest.mark.parametrize("function", ["cuMemcpyBatchAsync", "cuStreamSynchronize", "cuCtxSetCurrent", "execution"])
def test_a_failing_unbouncer(
    nodes_and_link: tuple[tuple[Node, Node], Begin], control: Control, other_gpu: Card, function: str
) -> None:
    """The receiver's copies out of bounce memory fail: its session ends, and the sender learns of it."""
    (_, second), begin = nodes_and_link
    link = begin(Copy.BATCH, source="private", destination="gpu", sender_gpu=False)
    assert works(link, 1)
    control.fault(function, 1, 719, sticky=function == "execution")
    until(lambda: fails(link), "the sender learns of it")
    until(lambda: refused(link.receiver), "the receiver's session ends")
    with pytest.raises(RelayError, match="CUDA_ERROR_LAUNCH_FAILED"):
        link.receiver.register(np.zeros(64, np.uint8))
    link.receiver.close()
    control.recover()
    fresh = Card(other_gpu.ordinal)
    with second.connect(gpu=fresh.ordinal) as again:
        destination = gpus.make(again, NBYTES, "gpu", fresh)
        assert works(gpus.link(link.sender, again, link.source, destination), 3)
    fresh.close()


def test_a_receiver_whose_gpu_fails_does_not_hold_up_others(
    nodes_and_link: tuple[tuple[Node, Node], Begin], control: Control
) -> None:
    (_, second), begin = nodes_and_link
    link = begin(source="private", destination="gpu", sender_gpu=False)
    with second.connect(1) as other:
        healthy = gpus.link(link.sender, other, link.source, gpus.make(other, NBYTES, "private"))
        control.fault("cuStreamSynchronize", 1, 719)
        until(lambda: fails(link), "the sender learns of it")
        sources, destinations = patterns.order(BLOCKS, BLOCK_BYTES, 1)
        for _ in range(4):
            link.sender.write(
                healthy.remote,
                sources + np.uint64(link.source.address),
                destinations + np.uint64(healthy.remote.address),
                BLOCK_BYTES,
            ).wait(20)


def test_transfers_and_events_may_outlive_their_client(
    nodes_and_link: tuple[tuple[Node, Node], Begin], gpu: Card, driver: Driver
) -> None:
    """Whoever keeps a Transfer keeps no CUDA event."""
    _, begin = nodes_and_link
    link = begin()
    stream = gpu.stream()
    moved = [write(link, ready=Stream(stream)) for _ in range(3)]
    for transfer in moved:
        transfer.wait(20)
        transfer.wait_settled(10)
    if driver.control is not None:
        until(lambda: driver.control is not None and driver.control.count("events") == 0, "no event is kept")
    last = write(link, ready=Stream(stream))
    link.sender.close()
    link.receiver.close()
    assert last.done
    gc.collect()
    if driver.control is not None:
        assert driver.control.count("events") == 0
    del moved, last
    gc.collect()


# ---- processes that are killed ----


@pytest.fixture
def two(engines: Engines, nodes: Nodes, driver: Driver) -> tuple[Node, Node, Engine, Engine]:
    first, second = nodes.pair()
    environment = dict(driver.environment)
    sender = engines.start_gpu(first, gpu=0, environment=environment)
    receiver = engines.start_gpu(second, gpu=0, environment=environment)
    return first, second, sender, receiver


def linked(sender: Engine, receiver: Engine, name: str = "a") -> None:
    sender.ask("memory", name=name, nbytes=NBYTES, seed=1)
    sender.ask("open", name=name, offer=receiver.ask("memory", name=name, nbytes=NBYTES))


def moves(sender: Engine, receiver: Engine, name: str = "a", seed: int = 5) -> bool:
    sender.ask("write", transfer="t", source=name, remote=name, blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=seed)
    sender.ask("wait", transfer="t")
    return bool(receiver.ask("arrived", name=name, source_seed=1, blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=seed))


@pytest.mark.parametrize("pause_us", [0, 300])
def test_an_engine_killed_in_the_middle_of_copies(
    two: tuple[Node, Node, Engine, Engine], engines: Engines, driver: Driver, pause_us: int
) -> None:
    """Its lanes drain, or are taken back, and serve the next one."""
    first, _, sender, receiver = two
    linked(sender, receiver)
    assert moves(sender, receiver)
    for number in range(5):
        if not driver.is_real:
            sender.ask("delay", most_us=pause_us)
        sender.ask("hammer", source="a", remote="a", block_bytes=BLOCK_BYTES)
        until(lambda: sender.ask("counters")["slots"] > 20, "slots are filled")  # noqa: B023
        sender.kill()
        until(lambda: first.cli("clients")["clients"] == [], "the daemon lets go of the engine")
        sender = engines.start_gpu(first, gpu=0, environment=driver.environment)
        sender.ask("memory", name="a", nbytes=NBYTES, seed=1)
        sender.ask("open", name="a", offer=receiver.ask("memory", name=f"a{number}", nbytes=NBYTES))
        sender.ask("write", transfer="t", source="a", remote="a", blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=number)
        sender.ask("wait", transfer="t")
        assert receiver.ask(
            "arrived", name=f"a{number}", source_seed=1, blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=number
        )


def test_a_receiving_engine_killed_in_the_middle_of_copies(
    two: tuple[Node, Node, Engine, Engine], engines: Engines, driver: Driver
) -> None:
    _, second, sender, receiver = two
    linked(sender, receiver)
    assert moves(sender, receiver)
    if not driver.is_real:
        receiver.ask("delay", most_us=300)
    for _ in range(3):
        sender.ask("write", transfer="k", source="a", remote="a", blocks=BLOCKS, block_bytes=BLOCK_BYTES, seed=1)
        receiver.kill()
        code = until(lambda: code_of(sender), "the sender learns of it")
        assert code in ("region_gone", "bad_region", "unsettled", "bad_argument"), code
        receiver = engines.start_gpu(second, gpu=0, environment=driver.environment)
        sender.ask("open", name="a", offer=receiver.ask("memory", name="a", nbytes=NBYTES))
        assert moves(sender, receiver)
    assert sender.ask("card_works")


@pytest.mark.parametrize("side", [0, 1])
def test_a_daemon_killed_in_the_middle_of_copies(
    two: tuple[Node, Node, Engine, Engine], nodes: Nodes, driver: Driver, side: int
) -> None:
    """The engines' contexts stay healthy; they attach to the next daemon."""
    killed: Node = two[0] if side == 0 else two[1]
    port = killed.session.rpartition(":")[2]  # the next one is found at the same address
    killed.config_path.write_text(killed.config_path.read_text().replace("[node]\n", f"[node]\nport = {port}\n", 1))
    sender, receiver = two[2:]
    linked(sender, receiver)
    assert moves(sender, receiver)
    for number in range(3):
        if not driver.is_real:
            for engine in (sender, receiver):
                engine.ask("delay", most_us=200)
        names = [f"t{i}" for i in range(4)]
        for name in names:
            sender.ask(
                "write", transfer=name, source="a", remote="a", blocks=BLOCKS, block_bytes=BLOCK_BYTES, timeout=3
            )
        killed.kill()
        killed = nodes.again(killed)  # what waits for the peer's word gets it
        for name in names:
            try:
                sender.ask("wait", transfer=name)
            except EngineError as failure:
                assert failure.code in ("daemon_gone", "peer_lost", "region_gone", "unsettled"), failure  # noqa: PT017
        for engine, node in ((sender, two[0]), (receiver, two[1])):
            if not driver.is_real:
                engine.ask("delay", most_us=0)
            assert engine.ask("card_works")
            if node.instance == killed.instance:
                engine.ask("close_client")
                engine.ask("connect", socket=killed.socket)
        linked(sender, receiver, f"n{number}")
        assert moves(sender, receiver, f"n{number}")
        sender.ask("rename", old=f"n{number}", new="a")
        receiver.ask("rename", old=f"n{number}", new="a")
    assert processes.alive(sender.pid)


@pytest.mark.parametrize("side", [0, 1])
def test_gpu_memory_is_registered_again_with_the_next_daemon(
    two: tuple[Node, Node, Engine, Engine], nodes: Nodes, side: int
) -> None:
    """By the client itself, killed in the middle of copies or at rest; lanes and bounce memory have copiers again."""
    killed: Node = two[0] if side == 0 else two[1]
    port = killed.session.rpartition(":")[2]
    killed.config_path.write_text(killed.config_path.read_text().replace("[node]\n", f"[node]\nport = {port}\n", 1))
    sender, receiver = two[2:]
    linked(sender, receiver)
    assert moves(sender, receiver)
    for number in range(3):
        sender.ask("write", transfer="k", source="a", remote="a", blocks=BLOCKS, block_bytes=BLOCK_BYTES)
        killed.kill()
        killed = nodes.again(killed)
        assert (sender, receiver)[side].ask("wait_attached") == number + 2
        with contextlib.suppress(EngineError):
            sender.ask("wait", transfer="k")
        assert sender.ask("state", transfer="k")["result"] in ("OK", "DAEMON_GONE", "PEER_LOST", "REGION_GONE")
        receiver.ask("fill", name="a", seed=99)
        sender.ask("open", name="a", offer=receiver.ask("offer", name="a"))
        assert moves(sender, receiver, seed=number)
    for engine in (sender, receiver):
        assert engine.ask("card_works")
