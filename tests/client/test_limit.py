"""The plain sender and receiver that the bench measures against."""

import os
import socket
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from railrelay.client import limit

Addresses = npt.NDArray[np.uint64]
LENGTHS = np.array([1, 4096, 70000, 3, 65536, 257], np.uint64)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def scattered(memory: npt.NDArray[np.uint8], seed: int) -> Addresses:
    """Addresses of blocks of LENGTHS, in a random order, with gaps."""
    order = np.random.default_rng(seed).permutation(len(LENGTHS))
    places = np.zeros(len(LENGTHS), np.uint64)
    places[order] = np.cumsum(LENGTHS[order] + np.uint64(7)) - LENGTHS[order]
    return places + np.uint64(memory.ctypes.data)


@pytest.mark.parametrize("bytes_per_call", [1000, 4096, 1 << 20])
def test_blocks_arrive_in_their_places_in_every_round(
    pair: tuple[socket.socket, socket.socket], bytes_per_call: int
) -> None:
    size = int(LENGTHS.sum()) + 8 * len(LENGTHS)
    source = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    destination = np.zeros(size, np.uint8)
    from_places, to_places = scattered(source, 1), scattered(destination, 2)
    receiving = threading.Thread(
        target=limit.receive, args=([pair[1].fileno()], [-1], [(to_places, LENGTHS)], bytes_per_call, 3)
    )
    receiving.start()
    round_ns = np.zeros((1, 3), np.uint64)
    spent = limit.send([pair[0].fileno()], [-1], [(from_places, LENGTHS)], bytes_per_call, 0, round_ns)
    receiving.join()
    assert 0 < round_ns.sum() <= spent
    written = np.zeros(size, bool)
    for start, end, length in zip(from_places, to_places, LENGTHS, strict=True):
        here, there = int(start) - source.ctypes.data, int(end) - destination.ctypes.data
        assert np.array_equal(source[here : here + int(length)], destination[there : there + int(length)])
        written[there : there + int(length)] = True
    assert not destination[~written].any()


def test_a_sender_whose_peer_closes_gets_an_error(pair: tuple[socket.socket, socket.socket]) -> None:
    memory = np.zeros(int(LENGTHS.sum()) + 8 * len(LENGTHS), np.uint8)
    pair[1].send(b"r")
    pair[1].close()
    with pytest.raises(OSError, match="connection 0"):
        limit.send([pair[0].fileno()], [-1], [(scattered(memory, 1), LENGTHS)], 4096, 0, np.zeros((1, 1), np.uint64))


def test_gather_fills_slots_in_turn_and_packs_blocks_at_256_bytes() -> None:
    source = np.arange(1024, dtype=np.uint64).view(np.uint8)
    slots = np.zeros(2 * 4096, np.uint8)
    places = np.uint64(source.ctypes.data) + np.array([0, 1000], np.uint64)
    limit.gather(places, np.array([100, 7000], np.uint64), slots, 4096)
    assert np.array_equal(slots[:100], source[:100])
    assert np.array_equal(slots[256 : 256 + 3840], source[1000:4840])
    assert np.array_equal(slots[4096 : 4096 + 3160], source[4840:8000])


def test_copy_puts_every_block_in_its_place() -> None:
    source, destination = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    places = np.uint64(source.ctypes.data) + np.array([0, 16], np.uint64)
    limit.copy(places, np.uint64(destination.ctypes.data) + np.array([48, 8], np.uint64), 8)
    assert np.array_equal(destination[48:56], source[:8])
    assert np.array_equal(destination[8:16], source[16:24])
    assert np.count_nonzero(destination) == 15


def test_cpu_time_of_a_process_grows_and_of_none_is_zero() -> None:
    first = limit.process_cpu_ns(os.getpid())
    sum(range(200_000))
    assert limit.process_cpu_ns(os.getpid()) > first > 0
    assert limit.process_cpu_ns((1 << 22) + 1) == 0  # above the highest pid
