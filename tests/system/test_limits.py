"""What one client may have at a time, and what it is told when that is not enough."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import memory
from helpers.nodes import Nodes
from helpers.raw_client import RawClient, Refused
from helpers.waiting import until

from railrelay.client import ErrorCode, RegionError, RelayError, Transfer

pytestmark = pytest.mark.system

MIB = 1 << 20


def test_a_client_that_asks_for_more_than_its_limits_is_told_and_counted(nodes: Nodes) -> None:
    node = nodes.start(2, limits={"lanes_per_client": 1, "regions_per_client": 2})
    with RawClient(node.socket) as raw, node.connect(1) as other:
        raw.attach()
        raw.lease(1)
        with pytest.raises(Refused, match=r"limit: lane 0<-0: client .* has 1; raise limits\.lanes_per_client"):
            raw.lease(0)
        raw.register(4096)
        raw.register(4096)
        with pytest.raises(Refused, match=r"limit: client .* has 2 regions; raise limits\.regions_per_client"):
            raw.register(4096)
        other.alloc(4096)  # has its own
        shown = {client["rank"]: client for client in node.cli("clients")["clients"]}
        assert (shown[0]["refused"], shown[1]["refused"]) == (2, 0)
        assert sum(error["code"] == "limit" for error in node.errors()) == 2


def test_shared_memory_that_a_client_registers_is_limited_and_leaves_others_theirs(nodes: Nodes) -> None:
    node = nodes.start(limits={"shared_bytes_per_client": "8MiB"})
    with node.connect(0) as client, node.connect(1) as other:
        first, second = client.alloc(4 * MIB), client.alloc(4 * MIB)
        expected = rf"client .* has {8 * MIB} of {8 * MIB} bytes .*raise limits\.shared_bytes_per_client"
        with pytest.raises(RegionError, match=f"region of 1 bytes: {expected}") as wrong:
            client.alloc(1)
        assert wrong.value.code is ErrorCode.LIMIT
        client.register(np.zeros(4096, np.uint8))  # is not mapped by the daemon
        first.close()
        with pytest.raises(RegionError, match=rf"has {4 * MIB} of"):
            client.alloc(5 * MIB)
        client.alloc(4 * MIB)
        second.close()
        other.alloc(8 * MIB)


def test_holes_do_not_take_the_address_space_of_the_daemon(nodes: Nodes) -> None:
    node = nodes.start()
    with RawClient(node.socket) as raw, node.connect(1) as other:
        raw.attach()
        for _ in range(3):
            with pytest.raises(Refused, match=rf"limit: region of {1 << 46} bytes: .*limits\.shared_bytes_per_client"):
                raw.register(1 << 46)
        raw.register(1 << 30)
        other.alloc(MIB)


def test_a_region_for_which_there_is_no_address_space_is_a_lack_of_memory(nodes: Nodes) -> None:
    node = nodes.start(limits={"shared_bytes_per_client": f"{1 << 30}GiB"})
    with RawClient(node.socket) as raw, node.connect(1) as other:
        raw.attach()
        with pytest.raises(Refused, match=rf"no_memory: region of {1 << 48} bytes cannot be mapped: Cannot allocate"):
            raw.register(1 << 48)
        other.alloc(MIB)


def waits_behind(write: Callable[[int, float], Transfer]) -> bool:
    """One byte, for which there is room."""
    try:
        write(1, 0.2)
    except RegionError as refused:
        return "limits.bytes_per_client" in refused.text
    return False


def test_bytes_in_flight_are_waited_for_and_a_larger_transfer_goes_alone(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(
        limits={"bytes_per_client": "2MiB"}, timeouts={"peer_s": 30, "settle_s": 20, "fence_s": 20}
    )
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, 4 * MIB)
        link.source.array[:] = 5

        def write(nbytes: int, timeout: float = 60.0) -> Transfer:
            return sender.write(link.remote, [link.source.address], [link.remote.address], nbytes, timeout=timeout)

        write(4 * MIB).wait(30)
        with decode.paused():
            first = [write(MIB), write(MIB)]
            expected = r"1 bytes beside 2097152 in flight, of 2097152,.*bytes_per_client"
            with pytest.raises(RegionError, match=expected) as wrong:
                write(1, timeout=0.3)
            assert wrong.value.code is ErrorCode.LIMIT
        for one in first:
            one.wait(30)
        write(2 * MIB).wait(30)
        assert (link.destination.array == 5).all()


def test_who_needs_room_for_much_does_not_wait_behind_those_who_came_later_for_little(nodes: Nodes) -> None:
    prefill, decode = nodes.pair(
        limits={"bytes_per_client": "2MiB"}, timeouts={"peer_s": 30, "settle_s": 20, "fence_s": 20}
    )
    with prefill.connect(0) as sender, decode.connect(0) as receiver, ThreadPoolExecutor(8) as threads:
        link = memory.link(sender, receiver, 4 * MIB)

        def write(nbytes: int, timeout: float = 60.0) -> Transfer:
            return sender.write(link.remote, [link.source.address], [link.remote.address], nbytes, timeout=timeout)

        with decode.paused():
            small = write(MIB)
            large = threads.submit(write, 4 * MIB)
            until(lambda: waits_behind(write), "what would have room beside the first waits for the second")
            others = [threads.submit(write, MIB) for _ in range(6)]
            assert not large.done()
        for transfer in (small, large.result(30), *(other.result(30) for other in others)):
            transfer.wait(30)


def test_who_waits_for_room_hears_that_the_client_was_closed(nodes: Nodes) -> None:
    times = {"peer_s": 30, "settle_s": 20, "fence_s": 20}
    prefill, decode = nodes.pair(limits={"bytes_per_client": "2MiB"}, timeouts=times)
    with prefill.connect(0) as sender, decode.connect(0) as receiver, ThreadPoolExecutor(1) as threads:
        link = memory.link(sender, receiver, 4 * MIB)

        def write(nbytes: int, timeout: float = 60.0) -> Transfer:
            return sender.write(link.remote, [link.source.address], [link.remote.address], nbytes, timeout=timeout)

        with decode.paused():
            write(MIB)
            waits = threads.submit(write, 4 * MIB)
            until(lambda: waits_behind(write), "what would have room waits for who came before")
            sender.close()
            with pytest.raises(RelayError) as closed:
                waits.result(30)
            assert closed.value.code is ErrorCode.CLOSED


def test_who_waits_for_room_waits_for_its_time_out_once(nodes: Nodes) -> None:
    times = {"peer_s": 30, "connect_s": 30, "settle_s": 20, "fence_s": 20}
    prefill, decode = nodes.pair(limits={"bytes_per_client": "1MiB"}, timeouts=times)
    with prefill.connect(0) as sender, decode.connect(0) as receiver, ThreadPoolExecutor(2) as threads:
        link = memory.link(sender, receiver, MIB)
        ends: list[str] = []

        def is_refused(name: str, source: object, destination: object, timeout: float) -> None:
            with pytest.raises(RegionError, match=r"within the time-out; .*limits\.bytes_per_client"):
                sender.write(link.remote, source, destination, MIB, timeout=timeout)  # type: ignore[arg-type]
            ends.append(name)

        source, destination = [link.source.address], [link.remote.address]
        with decode.paused():
            transfer = sender.write(link.remote, source, destination, MIB)
            arrays = np.array(source, np.uint64), np.array(destination, np.uint64)
            waits = [
                threads.submit(is_refused, "arrays", *arrays, 1.5),
                threads.submit(is_refused, "lists", source, destination, 2.5),
            ]
            for wait in waits:
                wait.result(30)
            assert ends == ["arrays", "lists"]
        transfer.wait(30)
