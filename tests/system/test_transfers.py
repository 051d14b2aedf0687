"""Many blocks, many transfers, many threads, and the ways of waiting for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import memory, patterns
from helpers.memory import KINDS, Kind, Link
from helpers.nodes import SMALL, Node, Nodes
from helpers.waiting import until

from railrelay.client import (
    ArgumentError,
    DaemonGone,
    HostEvent,
    PageLayout,
    Result,
    Transfer,
    TransferError,
    WaitTimeout,
    tag_of,
)

pytestmark = pytest.mark.system

NBYTES = 4 << 20
DEFAULTS = {"tcp": SMALL["tcp"], "timeouts": SMALL["timeouts"]}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), limit_s=400)
    yield nodes.pair()
    nodes.close()


@pytest.fixture(params=("relay", "direct"))
def link(request: pytest.FixtureRequest, pair: tuple[Node, Node]) -> Iterator[Link]:
    """Shared memory through the own rail, and private memory through lanes and bounce memory."""
    kind: Kind = "shared" if request.param == "direct" else "private"
    with pair[0].connect(route=request.param) as sender, pair[1].connect() as receiver:
        made = memory.link(sender, receiver, NBYTES, source=kind, destination=kind)
        made.source.array[:] = patterns.content(NBYTES, 1)
        yield made


def send(link: Link, at: int = 0, nbytes: int = NBYTES, **options: object) -> Transfer:
    """One block from and to offset ``at``."""
    return link.sender.write(
        link.remote,
        [link.source.address + at],
        [link.remote.address + at],
        nbytes,
        **options,  # type: ignore[arg-type]
    )


# ---- how many, how large ----


@pytest.mark.parametrize("blocks", [2049, 16384])
def test_thousands_of_blocks_in_one_call(link: Link, blocks: int) -> None:
    taken, put = patterns.order(blocks, 192, 3)
    transfer = link.sender.write(
        link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), 192
    )
    transfer.wait(60)
    assert transfer.bytes == blocks * 192
    assert patterns.arrived(link.source.array, link.destination.array, blocks, 192, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_million_blocks_in_one_call_with_the_default_sizes(nodes: Nodes, kind: Kind) -> None:
    prefill, decode = nodes.pair(base=DEFAULTS)
    blocks, block_bytes = 500_000, 128
    with prefill.connect() as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, blocks * block_bytes, source=kind, destination=kind)
        link.source.array[:] = patterns.content(blocks * block_bytes, 1)
        taken, put = patterns.order(blocks, block_bytes, 3)
        sender.write(
            link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), block_bytes
        ).wait(60)
        assert patterns.arrived(link.source.array, link.destination.array, blocks, block_bytes, 3)


def test_a_block_larger_than_all_slots_together(link: Link) -> None:
    send(link).wait(30)
    assert (link.destination.array == link.source.array).all()


def test_one_byte_and_unaligned_addresses(link: Link) -> None:
    link.sender.write(
        link.remote,
        [link.source.address + 1, link.source.address + 12345],
        [link.remote.address + NBYTES - 1, link.remote.address + 333],
        [1, 54321],
    ).wait(30)
    assert link.destination.array[-1] == link.source.array[1]
    assert (link.destination.array[333:][:54321] == link.source.array[12345:][:54321]).all()
    assert np.count_nonzero(link.destination.array) == 54322


def test_more_transfers_than_the_table_holds_wait_for_their_turn(link: Link) -> None:
    blocks = NBYTES // 4096
    transfers = [send(link, at * 4096, 4096) for at in range(blocks)]  # the table has 64
    for transfer in transfers:
        transfer.wait(30)
    assert (link.destination.array == link.source.array).all()


def test_pages_by_the_thousand_with_a_row_a_tensor(link: Link) -> None:
    """As engines with one tensor per layer have it, and pages in random order on both sides."""
    layers, pages, piece = 5, 700, 1024
    gap = pages * piece + 4096
    source = PageLayout.tensors([link.source.address + layer * gap for layer in range(layers)], piece, piece)
    to = PageLayout.tensors([link.remote.address + layer * gap for layer in range(layers)], piece, piece)
    rng = np.random.default_rng(2)
    taken, put = rng.permutation(pages), rng.permutation(pages)
    link.sender.write_pages(link.remote, source, taken, to, put).wait(30)
    for layer in range(layers):
        rows = slice(layer * gap, layer * gap + pages * piece)
        old, new = (memory_.array[rows].reshape(pages, piece) for memory_ in (link.source, link.destination))
        assert (old[taken] == new[put]).all()
    assert np.count_nonzero(link.destination.array) == layers * pages * piece


# ---- threads ----


def test_eight_threads_wait_for_one_transfer(link: Link) -> None:
    event = HostEvent()
    transfer = send(link, ready=event)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(transfer.wait, 30) for _ in range(8)]
        with pytest.raises(WaitTimeout):
            transfer.wait(0.05)
        assert not any(future.done() for future in waiting)
        event.set()
        for future in waiting:
            future.result(30)
    assert transfer.result is Result.OK


def test_sixteen_threads_submit_at_once(link: Link) -> None:
    threads, each = 16, NBYTES // 16
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for round_ in range(12):
                nbytes = [64, 4096, 70_000, each][round_ % 4]
                send(link, number * each, nbytes, tag=number + 1).wait(30)
        except BaseException as failure:  # noqa: BLE001
            failures.append(failure)

    started = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert not failures
    assert (link.destination.array == link.source.array).all()


def test_threads_that_connect_and_open_the_same_peer_share_one(pair: tuple[Node, Node]) -> None:
    with pair[0].connect() as sender, pair[1].connect() as receiver, ThreadPoolExecutor(8) as threads:
        offer = memory.make(receiver, 4096).offer()
        remotes = list(threads.map(lambda _: sender.open(offer), range(16)))
        assert all(remote is remotes[0] for remote in remotes)


# ---- asyncio ----


def test_await_returns_when_all_is_placed(link: Link) -> None:
    async def main() -> None:
        await send(link)
        assert (link.destination.array == link.source.array).all()

    asyncio.run(main())


def test_many_tasks_await_transfers_of_one_client(link: Link) -> None:
    async def main() -> None:
        await asyncio.gather(*(send(link, at * 4096, 4096) for at in range(200)))

    asyncio.run(main())
    assert (link.destination.array[: 200 * 4096] == link.source.array[: 200 * 4096]).all()


def test_loops_of_two_threads_await_the_same_transfer(link: Link) -> None:
    event = HostEvent()
    transfer = send(link, ready=event)

    async def wait() -> str:
        await transfer
        return "placed"

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(lambda: asyncio.run(wait())) for _ in range(2)]
        with pytest.raises(WaitTimeout):
            transfer.wait(0.05)
        event.set()
        assert [future.result(30) for future in waiting] == ["placed", "placed"]


def test_a_transfer_shows_its_number_and_its_state(link: Link) -> None:
    event = HostEvent()
    transfer = send(link, ready=event, tag=7)
    assert repr(transfer) == f"<Transfer {transfer._submission.index} (tag 0x7) to {link.remote.peer.session}: running>"
    event.set()
    transfer.wait(30)
    assert repr(transfer).endswith(": ok>")
    ended = send(link, ready=HostEvent())
    ended.cancel()
    assert repr(ended).endswith(": cancelled>")


def test_an_await_that_is_cancelled_leaves_the_transfer_alone(link: Link) -> None:
    async def main() -> None:
        event = HostEvent()
        transfer = send(link, ready=event)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wrapped(transfer), 0.05)
        event.set()
        await transfer

    asyncio.run(main())


async def wrapped(transfer: Transfer) -> None:
    await transfer


def test_a_failed_transfer_raises_where_it_is_awaited(link: Link) -> None:
    async def main() -> None:
        with pytest.raises(TransferError, match="timed out"):
            await send(link, ready=HostEvent(), timeout=0.05)

    asyncio.run(main())


def test_notifications_come_to_asyncio_in_order_and_once(link: Link) -> None:
    async def main() -> None:
        receiver = link.receiver.receiver
        waiting = [asyncio.ensure_future(receiver.notifications.get_async()) for _ in range(20)]
        for number in range(20):
            await send(link, number * 64, 64, tag=f"request {number}", notify=bytes([number]))
        notes = await asyncio.gather(*waiting)
        assert sorted(note.payload[0] for note in notes) == list(range(20))
        assert {note.tag for note in notes} == {tag_of(f"request {number}") for number in range(20)}

    asyncio.run(main())


# ---- source_done and notifications ----


def test_the_source_may_be_overwritten_once_it_is_done(link: Link) -> None:
    wanted = link.source.array.copy()
    transfer = send(link)
    transfer.wait_source(30)
    assert transfer.source_done
    link.source.array[:] = 0
    transfer.wait(30)
    assert (link.destination.array == wanted).all()


def test_a_relayed_source_is_done_while_its_peer_is_stopped(nodes: Nodes) -> None:
    """It is in the slots; nobody waits for the network with the source."""
    prefill, decode = nodes.pair(relay={**SMALL["relay"], "slots": 16})
    with prefill.connect() as sender, decode.connect() as receiver:
        link = memory.link(sender, receiver, 1 << 20, source="private")
        link.source.array[:] = 5
        send(link, nbytes=1 << 20).wait(30)
        with decode.paused():
            transfer = send(link, nbytes=1 << 20)
            transfer.wait_source(30)
            assert not transfer.done
            link.source.array[:] = 0
        transfer.wait(30)
        assert (link.destination.array == 5).all()


def test_a_notification_is_only_for_the_owner_of_the_destination(pair: tuple[Node, Node]) -> None:
    with pair[0].connect() as sender, pair[1].connect(0) as one, pair[1].connect(1) as two:
        link = memory.link(sender, two, 4096)
        send(link, nbytes=4096, notify=b"x").wait(30)
        assert two.receiver.notifications.get(10).payload == b"x"
        with pytest.raises(WaitTimeout, match="no notification"):
            one.receiver.notifications.get(0.05)


def test_the_largest_notification_passes_and_a_larger_one_is_refused(link: Link) -> None:
    largest = bytes(range(256)) * 64
    send(link, nbytes=64, notify=largest).wait(30)
    assert link.receiver.receiver.notifications.get(10).payload == largest
    with pytest.raises(ArgumentError, match="16385 bytes; at most 16384"):
        send(link, nbytes=64, notify=largest + b"x")


def test_no_notification_comes_of_a_transfer_that_failed(link: Link) -> None:
    with pytest.raises(TransferError):
        send(link, ready=HostEvent(), timeout=0.05, notify=b"never").wait(30)
    send(link, nbytes=64, notify=b"good").wait(30)
    assert link.receiver.receiver.notifications.get(10).payload == b"good"


def test_waiting_for_a_notification_ends_with_the_client(pair: tuple[Node, Node]) -> None:
    with pair[1].connect() as receiver, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.receiver.notifications.get, 30)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        receiver.close()
        with pytest.raises(Exception, match="closed") as failure:
            waiting.result(30)
        assert not isinstance(failure.value, DaemonGone)


def test_unregistering_and_registering_the_same_memory_again_works(link: Link) -> None:
    array = np.zeros(1 << 20, np.uint8)
    for seed in range(5):
        region = link.receiver.register(array)
        remote = link.sender.open(region.offer())
        link.sender.write(remote, [link.source.address + seed], [remote.address], 1 << 20).wait(30)
        assert (array == link.source.array[seed : seed + (1 << 20)]).all()
        region.unregister()
        until(lambda remote=remote: not remote.peer.has_open(remote), "the sender hears of it")  # type: ignore[misc]


# ---- more than two nodes, and both directions ----


@pytest.mark.parametrize("kind", KINDS)
def test_two_nodes_that_send_to_each_other_do_not_block_each_other(nodes: Nodes, kind: Kind) -> None:
    """A rail never stops reading because its writes are blocked."""
    both = nodes.pair((2, 2))
    nbytes = 16 << 20
    with both[0].connect() as one, both[1].connect() as two:
        links = [memory.link(one, two, nbytes, source=kind, destination=kind)]
        links += [memory.link(two, one, nbytes, source=kind, destination=kind)]
        for seed, link in enumerate(links):
            link.source.array[:] = patterns.content(nbytes, seed)
        moving = [send(link, nbytes=nbytes) for _ in range(4) for link in links]
        for transfer in moving:
            transfer.wait(60)
        for link in links:
            assert (link.destination.array == link.source.array).all()


def test_several_prefill_nodes_send_to_one_decode_engine_at_once(nodes: Nodes) -> None:
    decode = nodes.start(2)
    prefills = [*nodes.pair((2, 1)), nodes.start(1)]
    nbytes = 8 << 20
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(decode.connect())
        senders = [stack.enter_context(node.connect()) for node in prefills]
        links = [memory.link(sender, receiver, nbytes, destination="private") for sender in senders]
        for seed, link in enumerate(links):
            link.source.array[:] = patterns.content(nbytes, seed)
        moving = [send(link, nbytes=nbytes, notify=b"") for _ in range(3) for link in links]
        for transfer in moving:
            transfer.wait(60)
        for link in links:
            assert (link.destination.array == link.source.array).all()
        sessions = [receiver.receiver.notifications.get(10).session for _ in moving]
        assert sorted(sessions) == sorted(node.session for node in prefills for _ in range(3))


def test_a_region_that_is_closed_in_the_middle_still_gets_what_was_under_way(link: Link) -> None:
    transfer = send(link)
    link.remote.close()
    with pytest.raises(ArgumentError, match="is not open"):
        send(link)
    transfer.wait(30)
    assert (link.destination.array == link.source.array).all()
    again = link.sender.open(link.destination.offer())
    link.sender.write(again, [link.source.address], [again.address], NBYTES).wait(30)
