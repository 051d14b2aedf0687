"""Clients that break the rules: whatever one writes into its own shared memory, sends, or cuts off, it ends alone, with
an error that names it, while the transfers of others go on and stay right."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from helpers import memory, patterns, processes, trace_files
from helpers.memory import Link
from helpers.nodes import SHM, Node, Nodes
from helpers.raw_client import RawClient, Refused
from helpers.waiting import until

from railrelay.client import Client, Result, TransferError, protocol
from railrelay.client.regions import decode_offer
from railrelay.shm_layout import abi, segment

pytestmark = pytest.mark.system

BLOCKS, BLOCK = 128, 16384
NBYTES = BLOCKS * BLOCK
C = abi.CONSTANTS


@dataclass
class Scene:
    """A prefill and a decode node with a well-behaved pair of clients, and a hostile client of the prefill node that
    has a shared region, and one of the decode node opened."""

    prefill: Node
    decode: Node
    link: Link
    raw: RawClient
    region: int
    remote: int
    peer: int
    target: memory.Memory

    def others_work(self) -> None:
        for seed in range(2):
            taken, put = patterns.order(BLOCKS, BLOCK, seed)
            self.link.sender.write(
                self.link.remote,
                taken + np.uint64(self.link.source.address),
                put + np.uint64(self.link.remote.address),
                BLOCK,
            ).wait(30)
            assert patterns.arrived(self.link.source.array, self.link.destination.array, BLOCKS, BLOCK, seed)

    def ends(self, *, code: str = "violation") -> str:
        """What the daemon says when it ends the hostile session."""
        said = self.raw.last_words()
        assert said.startswith(f"{code}:"), said
        self.others_work()
        return said

    def publish(self, **changes: int) -> None:
        """A direct slice of 4,096 bytes by hand, with changes, as the first of the ring."""
        slice_ = {
            "transfer": 0,
            "generation": 1,
            "peer": self.peer,
            "remote_rail": 0,
            "flags": C["SLICE_FINAL"] | C["SLICE_INLINE"],
            "block_count": 1,
            "total_slices": 1,
            "bytes": 4096,
            "inline_source": 0,
            "inline_destination": 0,
            "inline_length": 4096,
            "inline_source_region": self.region,
            "inline_remote_region": self.remote,
        }
        self.raw.area("TRANSFERS", "transfer").write(0, generation=1)
        self.raw.area("RING_SLICES", "slice").write(0, **{**slice_, **changes})
        self.raw.area("RINGS", "ring").set(0, "produced", 1)
        self.raw.kick()

    def result(self) -> Result:
        """Of transfer 0, once it is done."""
        transfers = self.raw.area("TRANSFERS", "transfer")
        until(lambda: transfers.get(0, "done") == 1, "the transfer ends")
        return Result(transfers.get(0, "result"))

    def announce(self, position: int, slot: int) -> None:
        """Writes announce[position] of the lane of rail 0, and nothing else."""
        start = self.raw.area("LANE", "lane").offset + abi.FIELDS["lane"]["announce"].offset
        struct.pack_into("<I", self.raw.memory, start + 4 * position, slot)

    def fill(self, slot: int, **changes: int) -> None:
        """A slot of the lane of rail 0 with one block of 4,096 bytes."""
        table = self.raw.area("SLOT_TABLES", "block")
        table.write(slot, source=0, destination=0, length=4096, remote_region=self.remote)
        head = {
            "transfer": 0,
            "generation": 1,
            "peer": self.peer,
            "remote_rail": 0,
            "flags": C["SLICE_FINAL"],
            "block_count": 1,
            "total_slices": 1,
            "bytes": 4096,
        }
        self.raw.area("TRANSFERS", "transfer").write(0, generation=1)
        self.raw.area("SLOT_HEADS", "slice").write(slot, **{**head, **changes})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """One pair of daemons has to survive all of these tests."""
    nodes = Nodes(tmp_path_factory.mktemp("nodes"), limit_s=400)
    yield nodes.pair(limits={"max_peers": 512})
    nodes.close()


@pytest.fixture
def scene(pair: tuple[Node, Node]) -> Iterator[Scene]:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver, RawClient(prefill.socket, rank=5) as raw:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        raw.attach()
        registered, fd = raw.register(1 << 20)
        os.pwrite(fd, b"\x07" * 8192, 0)
        target = memory.make(receiver, 1 << 20)
        _, peer, opened = raw.open(target.offer())
        yield Scene(prefill, decode, link, raw, registered.region, opened.remote, peer.peer, target)
        assert processes.alive(prefill.pid)
        assert processes.alive(decode.pid)


# ---- the same by hand, and right ----


def test_a_slice_that_is_written_by_hand_arrives(scene: Scene) -> None:
    scene.publish()
    assert scene.result() is Result.OK
    assert (scene.target.array[:4096] == 7).all()
    assert not scene.target.array[4096:].any()
    assert scene.raw.area("RINGS", "ring").get(0, "consumed") == 1


@pytest.mark.parametrize("said", [0, 1, (1 << 63) + 5, (1 << 64) - 1])
def test_times_that_a_client_makes_up_are_shown_as_unknown(scene: Scene, tmp_path: Path, said: int) -> None:
    scene.raw.area("RING_TIMES", "slice_times").write(0, began_ns=said, filled_ns=said)
    scene.publish()
    assert scene.result() is Result.OK
    path = tmp_path / "trace.json"
    scene.prefill.cli("trace", "-o", str(path), "--last", "1")
    [slice_] = trace_files.slices(trace_files.load(path))
    assert slice_["args"]["unknown"] == "began, filled"
    assert 0 < slice_["dur"] < 60e6


def test_a_slot_that_is_filled_by_hand_arrives_and_its_memory_was_empty(scene: Scene) -> None:
    relay = scene.raw.lease()
    assert not any(relay[: 4 * 262144])
    relay[:4096] = b"\x09" * 4096
    scene.fill(0)
    lane = scene.raw.area("LANE", "lane")
    lane.write(0, head=1, doorbell=1)
    scene.raw.kick()
    assert scene.result() is Result.OK
    assert (scene.target.array[:4096] == 9).all()
    assert lane.get(0, "completed") == 1
    assert lane.array(0, "freed")[0] == 0


# ---- slices ----


@pytest.mark.parametrize(
    "change",
    [
        {"transfer": 64},
        {"transfer": 0xFFFFFFFF},
        {"generation": 0},
        {"peer": 1 << 30},
        {"remote_rail": 16},
        {"remote_rail": 0xFFFF},
        {"table": 8},
        {"table": 0xFFFFFFFF, "flags": 1, "block_count": 3},
        {"block_count": 513, "flags": 1},
        {"block_count": 0xFFFFFFFF, "flags": 1},
        {"total_slices": 0},
        {"total_slices": 0xFFFFFFFF},
    ],
    ids=str,
)
def test_a_slice_with_impossible_numbers_ends_its_client(scene: Scene, change: dict[str, int]) -> None:
    scene.publish(**change)
    assert "shared memory violates the protocol" in scene.ends()
    assert any(error["code"] == "violation" and "rank 5" in error["text"] for error in scene.prefill.errors())


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"inline_source": (1 << 20) - 4095}, Result.OUT_OF_BOUNDS),
        ({"inline_source": (1 << 64) - 4096}, Result.OUT_OF_BOUNDS),
        ({"inline_destination": (1 << 20) - 4095}, Result.OUT_OF_BOUNDS),
        ({"inline_destination": (1 << 64) - 4096}, Result.OUT_OF_BOUNDS),
        ({"inline_length": 0}, Result.OUT_OF_BOUNDS),
        ({"inline_length": 0xFFFFFFFF}, Result.OUT_OF_BOUNDS),
        ({"inline_length": 262145}, Result.OUT_OF_BOUNDS),  # more than relay.direct_slice_bytes
        ({"inline_source_region": 77}, Result.BAD_REGION),
        ({"inline_source_region": 0xFFFFFFFF}, Result.BAD_REGION),
        ({"inline_remote_region": 0xFFFFFFFF}, Result.BAD_REGION),
        ({"inline_remote_region": 4000}, Result.REGION_GONE),
    ],
    ids=str,
)
def test_a_block_outside_its_regions_fails_by_name_and_moves_nothing(
    scene: Scene, change: dict[str, int], result: Result
) -> None:
    scene.publish(**change)
    assert scene.result() is result
    scene.others_work()
    assert not scene.target.array.any()


def test_more_slices_than_the_ring_holds_end_the_client(scene: Scene) -> None:
    scene.raw.area("RINGS", "ring").set(0, "produced", 17)
    scene.raw.kick()
    scene.ends()


def test_a_ring_that_goes_backwards_ends_the_client(scene: Scene) -> None:
    scene.publish()
    assert scene.result() is Result.OK
    scene.raw.area("RINGS", "ring").set(0, "produced", 0)
    scene.raw.kick()
    scene.ends()


def test_a_generation_that_is_used_twice_ends_the_client(scene: Scene) -> None:
    scene.publish()
    assert scene.result() is Result.OK
    scene.raw.area("RING_SLICES", "slice").write(1, **slice_of(scene))
    scene.raw.area("RINGS", "ring").set(0, "produced", 2)
    scene.raw.kick()
    scene.ends()


def slice_of(scene: Scene) -> dict[str, int]:
    record = scene.raw.area("RING_SLICES", "slice").record(0)
    return {field: value for field, value in record.items() if isinstance(value, int)}


# ---- lanes ----


@pytest.mark.parametrize(
    ("head", "doorbell"), [(1, 2), (0, 1), (5, 5), (5, 0), (1 << 63, 1), ((1 << 64) - 1, (1 << 64) - 1)]
)
def test_a_lane_with_impossible_positions_ends_its_client(scene: Scene, head: int, doorbell: int) -> None:
    scene.raw.lease()
    scene.raw.area("LANE", "lane").write(0, head=head, doorbell=doorbell)
    scene.raw.kick()
    scene.ends()


def test_a_slot_that_is_not_there_ends_its_client(scene: Scene) -> None:
    scene.raw.lease()
    scene.announce(0, 4)
    scene.raw.area("LANE", "lane").write(0, head=1, doorbell=1)
    scene.raw.kick()
    scene.ends()


def test_a_slot_that_is_announced_twice_ends_its_client(scene: Scene) -> None:
    scene.raw.lease()
    scene.fill(2, flags=0)  # not final: the transfer stays open
    with scene.decode.paused():  # nothing is placed, so the slot stays in use
        scene.announce(0, 2)
        scene.announce(1, 2)
        scene.raw.area("LANE", "lane").write(0, head=2, doorbell=2)
        scene.raw.kick()
        said = scene.raw.last_words()
    assert said.startswith("violation:")
    scene.others_work()


def test_a_block_outside_its_slot_fails_by_name(scene: Scene) -> None:
    scene.raw.lease()
    scene.fill(0)
    scene.raw.area("SLOT_TABLES", "block").write(0, source=262144 - 4095)
    scene.raw.area("LANE", "lane").write(0, head=1, doorbell=1)
    scene.raw.kick()
    assert scene.result() is Result.OUT_OF_BOUNDS
    assert not scene.target.array.any()
    scene.others_work()


# ---- scribbling ----


@pytest.mark.parametrize("seed", range(6))
def test_a_client_that_scribbles_over_its_segment_harms_no_other(scene: Scene, seed: int) -> None:
    scene.raw.lease()
    hot = [scene.raw.area(name, structure).offset for name, structure in HOT]
    stop = threading.Event()
    rng = random.Random(seed)

    def scribble() -> None:
        word, whole = struct.Struct("<Q"), len(scene.raw.memory)
        while not stop.is_set():
            for _ in range(200):
                value = rng.choice([0, 1, 2, 3, rng.getrandbits(64), (1 << 64) - 1, rng.randrange(1 << 12)])
                word.pack_into(scene.raw.memory, rng.randrange(0, whole - 8) & ~7, value)
            for start in hot:
                word.pack_into(scene.raw.memory, start + rng.choice([0, 8, 128]), rng.randrange(6))
            scene.raw.kick()
            time.sleep(0.0002)  # the kick lets go of the GIL, but takes it again before a thread that waits can

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        for _ in range(8):
            scene.others_work()
    finally:
        stop.set()
        thread.join()
    scene.raw.close()
    until(lambda: len(scene.prefill.cli("clients")["clients"]) == 1, "the hostile client is gone")
    scene.others_work()


HOT = (("RINGS", "ring"), ("LANE", "lane"), ("TRANSFERS", "transfer"))
INTERESTING = [edge + step for edge in (1, 8, 64, 256, 512, 4096, 1 << 16, 1 << 20, 1 << 32) for step in (-1, 0, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_slices_with_random_faults_end_well_or_end_their_client(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    fields = [name for name in abi.FIELDS["slice"] if name != "reserved"]
    for round_ in range(60):
        with RawClient(scene.prefill.socket, rank=10 + round_ % 50) as raw:
            raw.attach()
            registered, _ = raw.register(1 << 20)
            _, peer, opened = raw.open(scene.target.offer())
            forged = replace(scene, raw=raw, region=registered.region, remote=opened.remote, peer=peer.peer)
            changes = {}
            for field in rng.sample(fields, rng.randrange(1, 4)):
                top = (1 << 8 * abi.FIELDS["slice"][field].size) - 1
                changes[field] = rng.choice([*INTERESTING, top, rng.getrandbits(32)]) & top
            forged.publish(**changes)
    scene.target.array[:] = 0
    scene.others_work()
    until(lambda: len(scene.prefill.cli("clients")["clients"]) == 2, "all of them are gone")
    scene.others_work()
    assert not scene.target.array.any()


def test_a_client_that_wiped_its_segment_can_register_private_memory_without_harm(scene: Scene) -> None:
    scene.raw.memory[:] = bytes(len(scene.raw.memory))
    for shared in (False, True):
        with contextlib.suppress(Refused, ConnectionError):
            scene.raw.register(65536, shared=shared)
    scene.others_work()


def test_a_client_that_forges_the_table_of_areas_can_register_private_memory_without_harm(scene: Scene) -> None:
    with memoryview(scene.raw.memory) as whole:
        for row in range(C["AREAS_MAX"]):
            at = C["AREA_TABLE_OFFSET"] + row * abi.SIZES["area"] + abi.FIELDS["area"]["offset"].offset
            struct.pack_into("<Q", whole, at, 1 << 46)
    with contextlib.suppress(Refused, ConnectionError):
        scene.raw.register(65536, shared=False)
        scene.raw.lease()
    scene.others_work()


def test_bounce_memory_that_was_emptied_before_it_was_filled_ends_the_client(scene: Scene) -> None:
    with RawClient(scene.decode.socket, rank=6) as private:
        private.attach()
        registered, _ = private.register(1 << 20, shared=False)
        bounces = private.area("BOUNCES", "bounce")
        offer = msgspec.msgpack.encode(
            {
                "session": scene.decode.session,
                "capability": registered.capability,
                "address": 0,
                "nbytes": 1 << 20,
                "rail": 0,
            }
        )
        remote = scene.link.sender.open(offer)
        bounces.set(0, "emptied", 99)
        transfer = scene.link.sender.write(remote, [scene.link.source.address], [remote.address], 1 << 20)
        assert private.last_words().startswith("violation:")
    with pytest.raises(TransferError):
        transfer.wait(30)
    assert transfer.settled
    scene.others_work()


# ---- truncating ----


def truncated(fd: int, nbytes: int = 0) -> None:
    os.ftruncate(fd, nbytes)


@pytest.mark.parametrize("nbytes", [0, 4096, 1 << 16])
def test_a_client_that_truncates_its_segment_ends_alone(scene: Scene, nbytes: int) -> None:
    scene.raw.lease()
    scene.publish()
    assert scene.result() is Result.OK
    truncated(scene.raw.segment_fd, nbytes)
    scene.raw.kick()
    scene.others_work()
    scene.raw.kick()
    scene.ends()


def test_a_client_that_truncates_its_relay_memory_ends_alone(scene: Scene) -> None:
    scene.raw.lease()
    [name] = [name for name in scene.prefill.objects() if f".lane.0.{scene.raw.facts.client}." in name]
    scene.fill(1)
    scene.announce(0, 1)
    os.truncate(SHM / name, 4096)
    scene.raw.area("LANE", "lane").write(0, head=1, doorbell=1)
    scene.raw.kick()
    scene.ends()


def test_a_source_that_is_truncated_fails_alone(scene: Scene) -> None:
    registered, fd = scene.raw.register(4 << 20)
    truncated(fd)
    scene.publish(
        inline_source_region=registered.region,
        inline_source=1 << 20,
        inline_length=1 << 18,
        bytes=1 << 18,
    )
    scene.ends()


def test_a_destination_that_is_truncated_fails_alone(scene: Scene) -> None:
    with RawClient(scene.decode.socket, rank=6) as receiver:
        receiver.attach()
        registered, fd = receiver.register(NBYTES)
        content = {"session": scene.decode.session, "capability": registered.capability, "address": 1 << 40}
        remote = scene.link.sender.open(msgspec.msgpack.encode({**content, "nbytes": NBYTES, "rail": 0}))
        truncated(fd)
        transfer = scene.link.sender.write(remote, [scene.link.source.address], [remote.address], NBYTES)
        with pytest.raises(TransferError) as failure:
            transfer.wait(30)
        assert failure.value.result is Result.REGION_GONE
        assert receiver.last_words().startswith("violation:")
    scene.others_work()


def test_truncating_while_others_send_disturbs_none_of_them(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES)
        link.source.array[:] = patterns.content(NBYTES, 1)
        for _ in range(5):
            with RawClient(prefill.socket, rank=5) as raw:
                raw.attach()
                raw.lease()
                moving = [
                    sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES) for _ in range(4)
                ]
                truncated(raw.segment_fd)
                raw.kick()
                for transfer in moving:
                    transfer.wait(30)
                assert (link.destination.array == link.source.array).all()
                raw.last_words()


# ---- the client plane ----


def test_another_abi_version_is_refused_and_both_are_named(scene: Scene) -> None:
    with RawClient(scene.prefill.socket, rank=6) as raw:
        with pytest.raises(Refused, match=r"layout 9, the daemon 1") as failure:
            raw.attach(layout=9 << 16)
        assert failure.value.code == "abi"
    with RawClient(scene.prefill.socket, rank=6) as raw:
        raw.attach(layout=C["ABI_VERSION"] + 3)  # another minor version


def test_another_protocol_version_is_refused_and_both_are_named(scene: Scene) -> None:
    with RawClient(scene.prefill.socket, rank=6) as raw:
        with pytest.raises(Refused, match=f"protocol 9, the daemon {protocol.PROTOCOL_VERSION}") as failure:
            raw.attach(version=9)
        assert failure.value.code == "version"


def test_clients_cannot_write_the_node_segment(scene: Scene) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(scene.raw.node_fd, 4096)
    with pytest.raises(OSError, match=r"Invalid argument|Permission denied|Bad file"):
        os.ftruncate(scene.raw.node_fd, 0)


@pytest.mark.parametrize("packet", [b"\xc1", b"\x80", b"GET / HTTP/1.1", b"\x00" * 60000], ids=range(4))
def test_a_packet_that_is_no_request_ends_the_session(scene: Scene, packet: bytes) -> None:
    scene.raw.send_bytes(packet)
    assert "not a request" in scene.ends(code="protocol")


def test_a_request_before_attaching_ends_the_session(scene: Scene) -> None:
    with RawClient(scene.prefill.socket, rank=6) as raw:
        raw.send(protocol.LeaseLane(1, 0))
        assert "at the wrong time" in raw.last_words()
    scene.others_work()


def test_attaching_twice_ends_the_session(scene: Scene) -> None:
    scene.raw.send(protocol.Attach(9, 1, C["ABI_VERSION"], 5, "again"))
    scene.ends(code="protocol")


def test_more_descriptors_than_allowed_end_the_session_and_leak_nothing(scene: Scene) -> None:
    before = processes.descriptors(scene.prefill.pid)
    fds = tuple(os.memfd_create("x") for _ in range(6))
    scene.raw.send(protocol.Unregister(9, 999), fds)
    for fd in fds:
        os.close(fd)
    scene.ends(code="protocol")
    until(lambda: processes.descriptors(scene.prefill.pid) <= before, "the daemon closes what it got")


def test_descriptors_that_nobody_asked_for_are_closed(scene: Scene) -> None:
    before = processes.descriptors(scene.prefill.pid)
    for _ in range(50):
        fd = os.memfd_create("x")
        with pytest.raises(Refused):
            scene.raw.ask(protocol.Unregister(scene.raw.new_id(), 999), protocol.Done, (fd, fd))
        os.close(fd)
    until(lambda: processes.descriptors(scene.prefill.pid) <= before + 1, "they are closed")


def test_a_client_that_asks_without_reading_is_cut_off(scene: Scene) -> None:
    scene.raw.socket.settimeout(2)

    def ask_on() -> None:
        while True:
            scene.raw.send(protocol.Unregister(scene.raw.new_id(), 999))

    with pytest.raises(OSError, match=r"timed out|reset|Broken pipe|not connected"):
        ask_on()
    scene.others_work()
    scene.raw.close()
    until(lambda: len(scene.prefill.cli("clients")["clients"]) == 1, "its row is free")


@pytest.mark.parametrize("kind", ["none", "socket", "short", "read-only"])
def test_shared_memory_that_cannot_be_mapped_is_refused(scene: Scene, kind: str, tmp_path: Path) -> None:
    request = protocol.Register(scene.raw.new_id(), 1 << 40, 65536, True, 0, 0, True)
    if kind == "none":
        with pytest.raises(Refused, match="0 descriptors; expected 1"):
            scene.raw.ask(request, protocol.Registered)
    elif kind == "socket":
        with socket.socket() as wrong, pytest.raises(Refused, match="must be a memfd"):
            scene.raw.ask(request, protocol.Registered, (wrong.fileno(),))
    else:
        path = tmp_path / "file"
        path.write_bytes(bytes(4096 if kind == "short" else 65536))
        fd = os.open(path, os.O_RDONLY)
        try:
            with pytest.raises(Refused):
                scene.raw.ask(request, protocol.Registered, (fd,))
        finally:
            os.close(fd)
    scene.others_work()


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": 0},
        {"bytes": -1},
        {"bytes": 1 << 70},
        {"address": -1},
        {"address": (1 << 64) - 1},
        {"rail": 7},
        {"offset": -4096},
        {"offset": 1 << 62},
    ],
    ids=str,
)
def test_regions_with_impossible_numbers_are_refused(scene: Scene, change: dict[str, int]) -> None:
    facts = {"address": 1 << 40, "bytes": 65536, "offset": 0, "rail": 0, **change}
    fd = os.memfd_create("x")
    os.ftruncate(fd, 65536)
    try:
        request = protocol.Register(
            scene.raw.new_id(), facts["address"], facts["bytes"], True, facts["offset"], facts["rail"], True
        )
        scene.raw.send(request, (fd,))
        message, _ = scene.raw.receive()
    except OverflowError:
        return  # msgpack has no such number
    finally:
        os.close(fd)
    assert isinstance(message, protocol.Failed)
    scene.others_work()


def test_a_client_has_memory_of_one_gpu(scene: Scene) -> None:
    def register(device: str) -> protocol.Registered:
        request = protocol.Register(
            scene.raw.new_id(), 1 << 40, 65536, False, 0, 0, False, memory="device", device=device
        )
        answer, _ = scene.raw.ask(request, protocol.Registered)
        return answer

    register("GPU-1")
    register("GPU-1")
    for device in ("GPU-2", ""):
        with pytest.raises(Refused, match="one client a GPU"):
            register(device)
    scene.others_work()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda n: protocol.Unregister(n, 999),
        lambda n: protocol.Unregister(n, -1),
        lambda n: protocol.LeaseLane(n, 99),
        lambda n: protocol.LeaseLane(n, -1),
        lambda n: protocol.OpenRegion(n, 999, bytes(16)),
        lambda n: protocol.OpenRegion(n, 0, b"short"),
        lambda n: protocol.CloseRegion(n, 999),
        lambda n: protocol.Note(n, 0, 1, 999, 0, b""),
        lambda n: protocol.Note(n, 1 << 40, 1, 0, 0, b""),
        lambda n: protocol.Note(n, 0, 1, 0, 0, bytes(protocol.NOTE_BYTES + 1)),
        lambda n: protocol.Abort(n, 0, 1.0),
        lambda n: protocol.Abort(n, 1, -1.0),
        lambda n: protocol.Abort(n, 1, float("nan")),
        lambda n: protocol.Abort(n, -5, 1.0),
        lambda n: protocol.Cancel(n, -1, 1),
        lambda n: protocol.Cancel(n, 1 << 40, 1),
        lambda n: protocol.Cancel(n, 0, -1),
        lambda n: protocol.Fence(n, -1, 1, 1.0),
        lambda n: protocol.Fence(n, 1 << 40, 1, 1.0),
        lambda n: protocol.ConnectPeer(n, "nonsense", 1.0),
        lambda n: protocol.ConnectPeer(n, "127.0.0.1:1", float("nan")),
    ],
    ids=range(21),
)
def test_requests_that_make_no_sense_are_answered_and_harmless(
    scene: Scene, request_of: Callable[[int], protocol.ClientRequest]
) -> None:
    scene.raw.send(request_of(scene.raw.new_id()))
    message, _ = scene.raw.receive()
    assert isinstance(message, (protocol.Failed, protocol.Done)), message
    if isinstance(message, protocol.Failed):
        assert message.code != "internal", message.text
    scene.publish()
    assert scene.result() is Result.OK
    scene.others_work()


def test_the_same_lane_is_leased_once(scene: Scene) -> None:
    scene.raw.lease()
    with pytest.raises(Refused, match="leased to this client already"):
        scene.raw.lease()


# ---- the peer plane ----


def control(node: Node) -> tuple[str, int]:
    return protocol.parse_session(node.session)


def rail_port(node: Node) -> int:
    """The port of rail 0, from the node segment."""
    with segment.open_segment(f"/railrelay.{node.instance}.node") as opened:
        return opened.area(C["AREA_RAILS"], "rail_state").get(0, "port")


def hears_the_end(stranger: socket.socket) -> bool:
    """Whether the other end closes; what it still says is dropped."""
    stranger.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(65536):
            pass
    return True


def framed(message: protocol.PeerMessage) -> bytes:
    packet = protocol.encode(message)
    return protocol.LENGTH_PREFIX.pack(len(packet)) + packet


FACTS = [protocol.RailFacts("rail0", "tcp", "127.0.0.1", 1)]


@pytest.mark.parametrize(
    "packet",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        protocol.LENGTH_PREFIX.pack(3) + b"\xc1\xc1\xc1",
        framed(protocol.Ping(1)),
        framed(protocol.PeerAbort(1, 1, [0], 0, 1)),
        framed(protocol.FenceRail(1, 1)),
        framed(protocol.PeerDone(1)) + framed(protocol.PeerOpenRegion(2, bytes(16))),
    ],
    ids=range(8),
)
def test_strangers_on_the_control_port_are_closed_and_harm_nobody(scene: Scene, packet: bytes) -> None:
    with socket.create_connection(control(scene.decode)) as stranger:
        stranger.sendall(packet)
        assert hears_the_end(stranger)
    scene.others_work()


def test_a_peer_of_another_version_is_refused_by_name(scene: Scene) -> None:
    with socket.create_connection(control(scene.decode)) as stranger:
        stranger.sendall(framed(protocol.Opening(1, 99, 5, bytes(protocol.NONCE_BYTES))))
        stranger.settimeout(20)
        answer = protocol.peer_message(stranger.recv(65536)[4:])
    assert isinstance(answer, protocol.Refused)
    assert answer.code == "version"
    assert "99" in answer.text
    scene.others_work()


@pytest.mark.parametrize(
    "preamble",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(64),
        protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, protocol.RAIL_VERSION, 0, 1, bytes(16)),
        protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, protocol.RAIL_VERSION, 0, 3, bytes(16)),
        protocol.RAIL_PREAMBLE.pack(protocol.RAIL_MAGIC, 99, 0, 1, bytes(16)),
    ],
    ids=range(4),
)
def test_a_rail_connection_without_a_token_is_closed(scene: Scene, preamble: bytes) -> None:
    scene.others_work()
    with socket.create_connection(("127.0.0.1", rail_port(scene.decode))) as stranger:
        stranger.sendall(preamble)
        assert hears_the_end(stranger)
    assert any("rail 0: connection from 127.0.0.1" in error["text"] for error in scene.decode.errors())
    scene.others_work()


def test_a_rail_connection_that_says_nothing_is_closed(scene: Scene) -> None:
    with socket.create_connection(("127.0.0.1", rail_port(scene.decode))) as stranger:
        assert hears_the_end(stranger)
    scene.others_work()


@dataclass
class ForgedSender:
    """A sending daemon by hand: a control connection and a rail connection with a token that is right."""

    control: socket.socket
    rail: socket.socket
    region: protocol.PeerRegion
    preamble: bytes

    def frame(self, *, payload: bytes = b"", **changes: int) -> bytes:
        facts = {
            "magic": 0x4D415246,
            "type": 1,
            "run_count": 1,
            "owner": self.region.owner,
            "sequence": 1,
            "bytes": 4096,
            "tag": 0,
            "grant": 0,
            "offset": 0,
            "length": 4096,
            "handle": self.region.handle,
            **changes,
        }
        return (
            struct.pack(
                "<IHHIIQQQQQII",
                facts["magic"], facts["type"], 0, facts["run_count"], facts["owner"], facts["sequence"],
                facts["bytes"], facts["tag"], facts["grant"], facts["offset"], facts["length"], facts["handle"],
            )
            + payload
        )  # fmt: skip


@pytest.fixture
def forged(scene: Scene) -> Iterator[ForgedSender]:
    with forging(scene, 4711) as sender:
        yield sender


@contextlib.contextmanager
def forging(scene: Scene, instance: int) -> Iterator[ForgedSender]:
    with socket.create_connection(control(scene.decode)) as link:
        link.settimeout(20)

        def ask(message: protocol.PeerMessage) -> protocol.PeerMessage:
            link.sendall(framed(message))
            (length,) = protocol.LENGTH_PREFIX.unpack(link.recv(4, socket.MSG_WAITALL))
            return protocol.peer_message(link.recv(length, socket.MSG_WAITALL))

        ask(protocol.Opening(1, protocol.PROTOCOL_VERSION, instance, bytes(protocol.NONCE_BYTES)))
        ask(protocol.Hello(1, "127.0.0.1:9", 0, FACTS, []))
        region = ask(protocol.PeerOpenRegion(2, decode_offer(scene.target.offer()).capability))
        assert isinstance(region, protocol.PeerRegion)
        token = ask(protocol.RailConnect(3, 0, 0, False, 1))
        assert isinstance(token, protocol.RailToken)
        with socket.create_connection(("127.0.0.1", rail_port(scene.decode))) as rail:
            rail.settimeout(20)
            preamble = protocol.RAIL_PREAMBLE.pack(
                protocol.RAIL_MAGIC, protocol.RAIL_VERSION, 0, token.connection, token.token
            )
            rail.sendall(preamble)
            yield ForgedSender(link, rail, region, preamble)


REPLY = struct.Struct("<IHHQQQ")


def test_a_frame_that_is_written_by_hand_is_placed(scene: Scene, forged: ForgedSender) -> None:
    forged.rail.sendall(forged.frame(payload=b"\x06" * 4096))
    _, kind, code, sequence, _, _ = REPLY.unpack(forged.rail.recv(REPLY.size, socket.MSG_WAITALL))
    assert (kind, code, sequence) == (1, Result.OK, 1)
    assert (scene.target.array[:4096] == 6).all()


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({"offset": (1 << 20) - 4095}, Result.OUT_OF_BOUNDS),
        ({"offset": (1 << 64) - 4096}, Result.OUT_OF_BOUNDS),
        ({"handle": 4095}, Result.REGION_GONE),
        ({"handle": 0xFFFFFFFF}, Result.REGION_GONE),
        ({"owner": 9}, Result.REGION_GONE),
    ],
    ids=str,
)
def test_a_frame_outside_what_was_offered_is_refused_and_places_nothing(
    scene: Scene, forged: ForgedSender, change: dict[str, int], result: Result
) -> None:
    forged.rail.sendall(forged.frame(payload=b"\x06" * 4096, **change))
    _, _, code, _, _, _ = REPLY.unpack(forged.rail.recv(REPLY.size, socket.MSG_WAITALL))
    assert code == result
    assert not scene.target.array.any()
    forged.rail.sendall(forged.frame(payload=b"\x05" * 4096, sequence=2))
    assert REPLY.unpack(forged.rail.recv(REPLY.size, socket.MSG_WAITALL))[2] == Result.OK
    scene.others_work()


@pytest.mark.parametrize(
    "change",
    [
        {"magic": 1},
        {"type": 3},
        {"sequence": 0},
        {"sequence": 2},
        {"run_count": 0},
        {"run_count": 16385},
        {"run_count": 0xFFFFFFFF},
        {"bytes": 0},
        {"bytes": 4095},
        {"bytes": 1 << 40},
        {"owner": 0xFFFFFFFF},
        {"grant": 1},
        {"grant": 1 << 40},
    ],
    ids=str,
)
def test_a_frame_that_no_sender_writes_ends_the_connection(
    scene: Scene, forged: ForgedSender, change: dict[str, int]
) -> None:
    forged.rail.sendall(forged.frame(payload=b"\x06" * 4096, **change))
    if change.get("grant"):
        forged.rail.shutdown(socket.SHUT_WR)
    assert hears_the_end(forged.rail)
    assert not scene.target.array.any()
    scene.others_work()


def test_a_frame_of_several_runs_is_placed_only_if_all_of_them_may_be(scene: Scene, forged: ForgedSender) -> None:
    run = struct.Struct("<QII")

    def ask(sequence: int, *runs: tuple[int, int]) -> int:
        table = b"".join(run.pack(offset, length, forged.region.handle) for offset, length in runs)
        total = sum(length for _, length in runs)
        frame = forged.frame(payload=table + b"\x06" * total, run_count=len(runs), bytes=total, sequence=sequence)
        for part in (frame[:100], frame[100:]):
            forged.rail.sendall(part)
        return int(REPLY.unpack(forged.rail.recv(REPLY.size, socket.MSG_WAITALL))[2])

    assert ask(1, (0, 4096), (1 << 20, 1)) == Result.OUT_OF_BOUNDS
    assert ask(2, (0, 4096), (8192, 0), (4096, 1)) == Result.OUT_OF_BOUNDS
    assert not scene.target.array.any()
    assert ask(3, (8192, 100), (0, 50), (4096, 7)) == Result.OK
    assert np.count_nonzero(scene.target.array) == 157
    assert scene.target.array[8192:8292].all()
    scene.others_work()


@pytest.mark.parametrize("seed", range(2))
def test_frames_with_random_faults_place_nothing_outside_their_region(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    fields = ("magic", "type", "run_count", "owner", "sequence", "bytes", "tag", "grant", "offset", "length", "handle")
    wide = ("sequence", "bytes", "tag", "grant", "offset")
    other = memory.make(scene.link.receiver, 1 << 20)
    for number in range(40):
        with forging(scene, 5000 + 100 * seed + number) as forged:
            changes = {}
            for field in rng.sample(fields, rng.randrange(1, 4)):
                bits = 64 if field in wide else 16 if field == "type" else 32
                changes[field] = rng.choice([*INTERESTING, rng.getrandbits(bits)]) & ((1 << bits) - 1)
            forged.rail.sendall(forged.frame(payload=b"\x06" * 9000, **changes))
    scene.others_work()
    assert not other.array.any()


def test_a_token_admits_once(scene: Scene, forged: ForgedSender) -> None:
    forged.rail.sendall(forged.frame(payload=b"\x06" * 4096))
    forged.rail.recv(REPLY.size, socket.MSG_WAITALL)
    with socket.create_connection(("127.0.0.1", rail_port(scene.decode))) as again:
        again.sendall(forged.preamble)
        assert hears_the_end(again)
    scene.others_work()


def test_a_sender_that_vanishes_in_the_middle_of_a_frame_places_nothing_later(
    scene: Scene, forged: ForgedSender
) -> None:
    forged.rail.sendall(forged.frame(payload=b"\x06" * 1000))
    until(lambda: bool(scene.target.array[:1000].all()), "what came is placed")
    forged.control.close()
    assert hears_the_end(forged.rail)
    scene.target.array[:] = 0
    scene.others_work()
    assert not scene.target.array.any()


def test_a_client_of_the_library_survives_a_hostile_neighbour_on_its_rank(nodes: Nodes) -> None:
    node = nodes.start(limits={"clients_per_rank": 2})
    with RawClient(node.socket, rank=0) as raw:
        raw.attach()
        with Client.connect(node.socket, rank=0) as client:
            link = memory.link(client, client, NBYTES)
            raw.area("RINGS", "ring").set(0, "produced", 1 << 40)
            raw.kick()
            assert raw.last_words().startswith("violation:")
            client.write(link.remote, [link.source.address], [link.remote.address], NBYTES).wait(30)
