"""Cases of test_plane.py: each runs in a process of its own, with two planes that reach each other through the library that
LD_LIBRARY_PATH names. ``python plane_cases.py CASE``."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Final

from helpers.verbs_plane import Node, connect, export, fence
from railrelay.client.errors import Result
from railrelay.daemon import plane

CASES: Final[dict[str, Callable[[], None]]] = {}
PAGE: Final = 4096


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def pair(rails: int = 1, nbytes: int = 8 << 20, **options: object) -> tuple[Node, Node, int]:
    """(sender, receiver, remote): region 0 of each; the receiver's is handle 1."""
    a = Node([f"stub{rail}" for rail in range(rails)], **options)
    b = Node([f"stub{rails + rail}" for rail in range(rails)], **options)
    a.region(nbytes)
    b.region(nbytes)
    export(b, 0, 1, nbytes)
    return a, b, a.open(0, 1, nbytes, of=b.regions[0])


def fill(a: Node, seed: int = 1) -> bytes:
    content = random.Random(seed).randbytes(a.regions[0].nbytes)
    a.regions[0].view[:] = content
    return content


@case
def direct_slices_land_where_they_should() -> None:
    a, b, remote = pair()
    content = fill(a)
    blocks = [(i * 65536, ((i * 37) % 128) * 65536, 65536, 0, remote) for i in range(128)]
    transfer = a.direct(blocks)
    wanted = a.wait(plane.CONNECT_WANTED)
    assert wanted[1:6] == (0, 0, 0, 0, 1), wanted
    connect(a, b)
    assert a.result(transfer) is Result.OK
    for source, destination, length, _, _ in blocks:
        assert b.regions[0].view[destination : destination + length] == content[source : source + length]
    assert a.counters()["bytes_sent"] == b.counters()["bytes_received"] == 8 << 20
    assert b.counters()["frames_received"] == 128
    a.close()
    b.close()


@case
def slots_are_scattered_in_one_frame_each() -> None:
    a, b, remote = pair()
    a.lease()
    connect(a, b)
    numbers = random.Random(3)
    expected = bytearray(8 << 20)
    places = numbers.sample(range(2048), 40 * 30)
    transfers = []
    for slot in range(40):
        parts = []
        for place in places[slot * 30 : slot * 30 + 30]:
            content = numbers.randbytes(numbers.randrange(1, PAGE))
            parts.append((content, place * PAGE, remote))
            expected[place * PAGE : place * PAGE + len(content)] = content
        transfers.append(a.relay(parts))
    assert all(a.result(transfer) is Result.OK for transfer in transfers)
    assert b.regions[0].view[:] == bytes(expected)
    assert a.counters()["frames_sent"] == b.counters()["frames_received"] == 40
    a.close()
    b.close()


if __name__ == "__main__":
    CASES[sys.argv[1]]()
