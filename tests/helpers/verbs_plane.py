"""Data planes without a daemon around them: a node of verbs rails with one client, driven by hand, for tests of the
verbs NIC. Runs in a process of its own (tests/verbs/plane_cases.py), on the stand-in or a real libibverbs."""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from railrelay.client.errors import Result
from railrelay.daemon import plane
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import Area, AreaPlan

# Real devices, such as those of the virtual machine in tests/vm ("rxe0=10.77.0.1,..."), or the stand-in's.
REAL: Final = bool(os.environ.get("RAILRELAY_VERBS_RAILS"))
DEVICES: Final = [
    entry.split("=")[0] for entry in os.environ.get("RAILRELAY_VERBS_RAILS", "stub0,stub1,stub2,stub3").split(",")
]
GID_INDEX: Final = 1 if REAL else 3
LIMIT_S: Final = 200.0 if REAL else 20.0
SLOTS: Final = 6
SLOT_BYTES: Final = 1 << 20
TABLE_ENTRIES: Final = 512
RING_SLICES: Final = 256
RING_TABLES: Final = 4
BOUNCE_SLOTS: Final = 4
TRANSFERS: Final = 1024
MAX_PEERS: Final = 4
INLINE, FINAL, EXPRESS = (abi.CONSTANTS[f"SLICE_{name}"] for name in ("INLINE", "FINAL", "EXPRESS"))

Event = tuple[int, int, int, int, int, int, int]
Block = tuple[int, int, int, int, int]  # source, destination, length, source region, remote region


def shape(rails: int) -> dict[str, int]:
    return {
        "rails": rails,
        "slots": SLOTS,
        "slot_bytes": SLOT_BYTES,
        "table_entries": TABLE_ENTRIES,
        "ring_slices": RING_SLICES,
        "ring_tables": RING_TABLES,
        "bounce_slots": BOUNCE_SLOTS,
        "transfers": TRANSFERS,
        "max_clients": 4,
        "trace_records": 64,
    }


@dataclass
class Memory:
    """A memfd, mapped here and by the plane."""

    fd: int
    nbytes: int
    view: mmap.mmap
    base: int = 0
    key_ids: tuple[int, ...] = ()
    lkeys: tuple[int, ...] = ()
    rkeys: tuple[int, ...] = ()

    def close(self) -> None:
        self.view.close()
        if self.fd >= 0:
            os.close(self.fd)


def memory(nbytes: int) -> Memory:
    fd = os.memfd_create("verbs-plane")
    os.ftruncate(fd, nbytes)
    return Memory(fd, nbytes, mmap.mmap(fd, nbytes))


class Node:
    """``devices``: one a rail. Client 0 is attached."""

    def __init__(self, devices: list[str], **options: object) -> None:
        self.rails = len(devices)
        self.options = options
        name = f"/railrelay-test.{os.getpid()}.{secrets.token_hex(4)}"
        constants = abi.CONSTANTS
        self.segment = segment.create(
            f"{name}.node",
            constants["SEGMENT_NODE"],
            [
                AreaPlan(constants["AREA_RAILS"], "rail_state", self.rails),
                AreaPlan(constants["AREA_LANES"], "lane_state", self.rails * 4),
                AreaPlan(constants["AREA_CLIENTS"], "client_state", 4),
                AreaPlan(constants["AREA_PEERS"], "peer_state", MAX_PEERS),
                AreaPlan(constants["AREA_ERRORS"], "error_record", 4),
                AreaPlan(constants["AREA_TRACE"], "trace_record", self.rails * 64),
            ],
            {**shape(self.rails), "instance": 7},
            mode=0o600,
            owner_pid=os.getpid(),
        )
        self.segment.publish()
        segment.unlink(self.segment.name)  # all here have it mapped, and nothing is left behind by a case that fails
        self.plane = plane.DataPlane(
            self.segment.buffer,
            instance=7,
            max_peers=MAX_PEERS,
            max_sessions=4,
            max_exports=64,
            regions_per_client=16,
            remotes_per_client=64,
            direct_slice_bytes=1 << 30,
            spin_us=0,
        )
        for device in devices:
            wanted: dict[str, Any] = {"nic": "verbs", "cpu": -1, "device": device, "gid_index": GID_INDEX, **options}
            self.plane.add_rail(**wanted)
        self.plane.start()
        self.events: list[Event] = []
        self.cookies = itertools.count(1)
        self.connections = itertools.count(1)
        self.serial = 0
        self.placed: dict[int, int] = {}  # by fenced connection
        self.fenced: dict[int, dict[int, int]] = {}  # the same: results by sequence
        self._client(name)

    # ---- events and commands ----

    def pump(self, timeout_s: float = 0.0) -> None:
        select.select([self.plane.event_fd], [], [], timeout_s)
        self.events += self.plane.events()

    def wait(self, kind: int, *, where: Callable[[Event], bool] = lambda _: True, limit_s: float = LIMIT_S) -> Event:
        deadline = time.monotonic() + limit_s
        while True:
            for index, event in enumerate(self.events):
                if event[0] == kind and where(event):
                    return self.events.pop(index)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no event {kind} within {limit_s:g} s; {self.events}")
            self.pump(left)

    def keep_fence(self, event: Event) -> None:
        """RECEIVER_FENCED."""
        self.placed[event[2]] = event[3]
        acks = self.plane.fence_acks(event[2])
        words = [int.from_bytes(acks[at : at + 8], "little") for at in range(0, len(acks), 8)]
        self.fenced[event[2]] = dict(zip(words[::2], words[1::2], strict=True))

    def note_late(self, event: Event) -> None:
        if event[0] == plane.FRAME_SETTLED:
            assert self.fenced[event[2]][event[3]] == Result.UNSETTLED
            self.fenced[event[2]][event[3]] = event[4]

    def command(self, call: Callable[[int], object], answers: int = 1) -> list[int]:
        cookie = next(self.cookies)
        call(cookie)
        return [self.wait(plane.COMMAND_DONE, where=lambda event: event[2] == cookie)[3] for _ in range(answers)]

    def counters(self, rail: int = 0) -> dict[str, int]:
        states = self.segment.area(abi.CONSTANTS["AREA_RAILS"], "rail_state")
        return dict(zip(abi.RAIL_COUNTERS, states.array(rail, "counters"), strict=False))

    def counted(self, label: str, value: int, rail: int = 0) -> None:
        """Waits until the counter is that high."""
        deadline = time.monotonic() + LIMIT_S
        while self.counters(rail)[label] < value:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{label} is not {value} after {LIMIT_S:g} s; {self.counters(rail)}")
            self.pump(0.001)

    def cycle(self) -> None:
        """Every rail goes through whole cycles: what was there before has been looked at."""
        for _ in range(3):
            self.command(lambda cookie: self.plane.holders(0, 0, 0, cookie), answers=self.rails)

    # ---- a client ----

    def _client(self, name: str) -> None:
        constants, rails = abi.CONSTANTS, self.rails
        self.client_segment = segment.create(
            f"{name}.client",
            constants["SEGMENT_CLIENT"],
            [
                AreaPlan(constants["AREA_CONTROL"], "client_control", 1),
                AreaPlan(constants["AREA_LANE"], "lane", rails),
                AreaPlan(constants["AREA_SLOT_HEADS"], "slice", rails * SLOTS),
                AreaPlan(constants["AREA_SLOT_TABLES"], "block", rails * SLOTS, TABLE_ENTRIES),
                AreaPlan(constants["AREA_RINGS"], "ring", rails),
                AreaPlan(constants["AREA_RING_SLICES"], "slice", rails * RING_SLICES),
                AreaPlan(constants["AREA_RING_TABLES"], "block", rails * RING_TABLES, TABLE_ENTRIES),
                AreaPlan(constants["AREA_TRANSFERS"], "transfer", TRANSFERS),
                AreaPlan(constants["AREA_BOUNCES"], "bounce", rails),
                AreaPlan(constants["AREA_BOUNCE_HEADS"], "bounce_frame", rails * BOUNCE_SLOTS),
                AreaPlan(constants["AREA_BOUNCE_RUNS"], "run", rails * BOUNCE_SLOTS, TABLE_ENTRIES),
                AreaPlan(constants["AREA_SLOT_TIMES"], "slice_times", rails * SLOTS),
                AreaPlan(constants["AREA_RING_TIMES"], "slice_times", rails * RING_SLICES),
            ],
            {**shape(rails), "instance": 7, "client": 0, "client_serial": 1},
            mode=0o600,
            owner_pid=os.getpid(),
        )
        self.client_segment.publish()
        segment.unlink(self.client_segment.name)
        cookie = next(self.cookies)
        made = self.client_segment
        self.serial += 1
        self.kicks = self.plane.attach_client(0, self.serial, made.fd, made.nbytes, cookie)
        for _ in range(rails):
            self.wait(plane.COMMAND_DONE, where=lambda event: event[2] == cookie)
        self.regions: list[Memory] = []
        self.lanes: dict[int, Memory] = {}
        self.bounces: dict[int, Memory] = {}
        self.heads = [0] * rails
        self.free = [list(range(SLOTS)) for _ in range(rails)]
        self.freed = [0] * rails
        self.produced = [0] * rails
        self.ended = [0] * rails
        self.tickets = [list(range(RING_SLICES)) for _ in range(rails)]
        self.generation = 0
        self.remotes = 0

    def another_client(self) -> None:
        """Client 0 leaves, and one with the same number takes its place."""
        self.plane.detach_client(0)
        for _ in range(self.rails):
            self.wait(plane.CLIENT_DETACHED)
        self.plane.release_client(0)
        self.client_segment.close()
        self._client(f"/railrelay-test.{os.getpid()}.{secrets.token_hex(4)}")

    def area(self, name: str, structure: str) -> Area:
        return self.client_segment.area(abi.CONSTANTS[f"AREA_{name}"], structure)

    def _publish(self, area: Area, row: int, field: str, value: int) -> None:
        """In one store, as the rail expects it: struct.pack_into() writes bytes one by one."""
        facts = abi.FIELDS[area.structure][field]
        at = area.offset + row * abi.SIZES[area.structure] + facts.offset
        self.client_segment.buffer[at : at + 8] = value.to_bytes(8, "little")

    def _register(self, made: Memory, base: int, nbytes: int) -> None:
        made.base = base
        keys = [self.plane.register_memory(rail, base, nbytes) for rail in range(self.rails)]
        made.key_ids = tuple(key[0] for key in keys)
        made.lkeys = tuple(key[1] for key in keys)
        made.rkeys = tuple(key[2] for key in keys)

    def region(self, nbytes: int) -> Memory:
        made, index = memory(nbytes), len(self.regions)
        self.plane.add_region(0, index, made.fd, 0, nbytes)
        self._register(made, self.plane.region_base(0, index), nbytes)
        self.plane.set_region_keys(0, index, list(made.lkeys))
        self.regions.append(made)
        return made

    def private_region(self, nbytes: int) -> int:
        """Its index: memory that only the client has."""
        index = len(self.regions)
        self.plane.add_region(0, index, -1, 0, nbytes)
        self.regions.append(Memory(-1, nbytes, mmap.mmap(-1, nbytes)))
        return index

    def bounce(self, rail: int = 0) -> Memory:
        nbytes = BOUNCE_SLOTS * (SLOT_BYTES + TABLE_ENTRIES * 16)
        made = memory(nbytes)
        self.command(lambda cookie: self.plane.add_bounce(0, rail, made.fd, nbytes, cookie))
        self._register(made, self.plane.bounce_base(0, rail), nbytes)
        self.command(lambda cookie: self.plane.set_bounce_keys(0, rail, list(made.rkeys), cookie))
        self.bounces[rail] = made
        return made

    def lease(self, rail: int = 0) -> Memory:
        made = memory(SLOTS * SLOT_BYTES)
        self.command(lambda cookie: self.plane.lease_lane(0, rail, made.fd, made.nbytes, 1, cookie))
        self._register(made, self.plane.lane_base(0, rail), made.nbytes)
        self.command(lambda cookie: self.plane.set_lane_keys(0, rail, list(made.lkeys), cookie))
        self.lanes[rail] = made
        return made

    def open(self, peer: int, handle: int, nbytes: int, rail: int = 0, *, of: Memory | None, **more: int) -> int:
        """Index of the remote; ``of``: registered memory of the peer, None for private memory."""
        index, self.remotes = self.remotes, self.remotes + 1
        self.plane.add_remote(
            0,
            index,
            peer,
            handle,
            nbytes,
            rail,
            more.get("owner", 0),
            more.get("window_bytes", 0),
            more.get("window_runs", 0),
            iova=of.base if of else 0,
            rkeys=list(of.rkeys) if of else [],
        )
        return index

    # ---- transfers ----

    def _begin(self, tag: int) -> tuple[int, int]:
        self.generation += 1
        transfers, row = self.area("TRANSFERS", "transfer"), self.generation % TRANSFERS
        transfers.write(row, generation=self.generation, tag=tag, timeout_ns=0, note=0)
        return row, self.generation

    def _slice(self, row: int, generation: int, peer: int, remote_rail: int, flags: int, total: int) -> dict[str, int]:
        return {
            "transfer": row,
            "generation": generation,
            "peer": peer,
            "remote_rail": remote_rail,
            "flags": flags,
            "total_slices": total,
            "table": 0,
        }

    def direct(
        self,
        blocks: list[Block],
        *,
        peer: int = 0,
        rail: int = 0,
        remote_rail: int = 0,
        tag: int = 5,
        express: bool = False,
    ) -> tuple[int, int]:
        """One transfer of one inline slice a block."""
        row, generation = self._begin(tag)
        slices = self.area("RING_SLICES", "slice")
        for number, (source, destination, length, source_region, remote) in enumerate(blocks):
            while not self.tickets[rail]:
                self.take_tickets(rail)
            flags = INLINE | (FINAL if number == len(blocks) - 1 else 0) | (EXPRESS if express else 0)
            at = rail * RING_SLICES + self.produced[rail] % RING_SLICES
            slices.write(
                at,
                **self._slice(row, generation, peer, remote_rail, flags, len(blocks)),
                block_count=1,
                bytes=length,
                inline_source=source,
                inline_destination=destination,
                inline_length=length,
                inline_source_region=source_region,
                inline_remote_region=remote,
                ticket=self.tickets[rail].pop(),
            )
            self.produced[rail] += 1
            self._publish(self.area("RINGS", "ring"), rail, "produced", self.produced[rail])
            os.eventfd_write(self.kicks[rail], 1)
        return row, generation

    def table(self, blocks: list[Block], *, peer: int = 0, rail: int = 0, remote_rail: int = 0) -> tuple[int, int]:
        """One transfer of one slice with a table of blocks; one at a time."""
        row, generation = self._begin(5)
        area = self.area("RING_TABLES", "block")
        for number, (source, destination, length, source_region, remote) in enumerate(blocks):
            fields = (source, destination, length, source_region, remote, 0)
            raw = b"".join(value.to_bytes(8 if index < 2 else 4, "little") for index, value in enumerate(fields))
            at = area.offset + (rail * RING_TABLES * TABLE_ENTRIES + number) * abi.SIZES["block"]
            self.client_segment.buffer[at : at + len(raw)] = raw
        self.area("RING_SLICES", "slice").write(
            rail * RING_SLICES + self.produced[rail] % RING_SLICES,
            **self._slice(row, generation, peer, remote_rail, FINAL, 1),
            block_count=len(blocks),
            bytes=sum(block[2] for block in blocks),
            ticket=self.tickets[rail].pop(),
        )
        self.produced[rail] += 1
        self._publish(self.area("RINGS", "ring"), rail, "produced", self.produced[rail])
        os.eventfd_write(self.kicks[rail], 1)
        return row, generation

    def take_tickets(self, rail: int) -> None:
        rings = self.area("RINGS", "ring")
        completed = rings.get(rail, "completed")
        ended = rings.array(rail, "ended")
        while self.ended[rail] < completed:
            self.tickets[rail].append(ended[self.ended[rail] % len(ended)])
            self.ended[rail] += 1
        if not self.tickets[rail]:
            time.sleep(0.001)

    def relay(
        self, parts: list[tuple[bytes, int, int]], *, peer: int = 0, rail: int = 0, remote_rail: int = 0, tag: int = 5
    ) -> tuple[int, int]:
        """One transfer of one slot: (content, destination, remote) each."""
        row, generation = self._begin(tag)
        lanes = self.area("LANE", "lane")
        deadline = time.monotonic() + LIMIT_S
        while not self.free[rail]:
            completed, freed = lanes.get(rail, "completed"), lanes.array(rail, "freed")
            while self.freed[rail] < completed:
                self.free[rail].append(freed[self.freed[rail] % len(freed)])
                self.freed[rail] += 1
            if time.monotonic() > deadline:
                raise TimeoutError("no free slot")
        slot = self.free[rail].pop(0)
        tables, at = self.area("SLOT_TABLES", "block"), slot * SLOT_BYTES
        buffer, position = self.lanes[rail].view, 0
        blocks = b""
        for content, destination, remote in parts:
            buffer[at + position : at + position + len(content)] = content
            fields = (position, destination, len(content), 0, remote, 0)
            blocks += b"".join(value.to_bytes(8 if index < 2 else 4, "little") for index, value in enumerate(fields))
            position += -(-len(content) // 256) * 256
        begin = tables.offset + (rail * SLOTS + slot) * TABLE_ENTRIES * 32
        self.client_segment.buffer[begin : begin + len(blocks)] = blocks
        head = self._slice(row, generation, peer, remote_rail, FINAL, 1)
        self.area("SLOT_HEADS", "slice").write(rail * SLOTS + slot, **head, block_count=len(parts), bytes=position)
        facts = abi.FIELDS["lane"]["announce"]
        word = lanes.offset + rail * abi.SIZES["lane"] + facts.offset + 4 * (self.heads[rail] % 256)
        self.client_segment.buffer[word : word + 4] = slot.to_bytes(4, "little")
        self.heads[rail] += 1
        self._publish(lanes, rail, "head", self.heads[rail])
        self._publish(lanes, rail, "doorbell", self.heads[rail])
        os.eventfd_write(self.kicks[rail], 1)
        return row, generation

    def empty(self, rail: int = 0, *, most: int = 1 << 30) -> int:
        """What the client's thread does: copies frames out of bounce memory to private regions. How many."""
        bounces, heads, runs = (
            self.area("BOUNCES", "bounce"),
            self.area("BOUNCE_HEADS", "bounce_frame"),
            self.area("BOUNCE_RUNS", "run"),
        )
        filled, emptied, count = bounces.get(rail, "filled"), bounces.get(rail, "emptied"), 0
        while emptied != filled and count < most:
            row = rail * BOUNCE_SLOTS + emptied % BOUNCE_SLOTS
            at = heads.get(row, "slot") * SLOT_BYTES
            for run in range(heads.get(row, "run_count")):
                begin = runs.offset + row * TABLE_ENTRIES * 16 + run * 16
                raw = bytes(self.client_segment.buffer[begin : begin + 16])
                offset, length, region = (int.from_bytes(raw[i:j], "little") for i, j in ((0, 8), (8, 12), (12, 16)))
                self.regions[region].view[offset : offset + length] = self.bounces[rail].view[at : at + length]
                at += length
            heads.set(row, "result", 0)
            emptied += 1
            count += 1
            self._publish(bounces, rail, "emptied", emptied)
        if count:
            os.eventfd_write(self.kicks[rail], 1)
        return count

    def filled(self, rail: int = 0) -> int:
        """Frames in bounce memory that were not emptied."""
        bounces = self.area("BOUNCES", "bounce")
        return bounces.get(rail, "filled") - bounces.get(rail, "emptied")

    def settled(self, transfer: tuple[int, int]) -> bool:
        return self.area("TRANSFERS", "transfer").get(transfer[0], "settled") == transfer[1]

    def result(self, transfer: tuple[int, int], *, limit_s: float = LIMIT_S) -> Result:
        deadline = time.monotonic() + limit_s
        while not self.settled(transfer):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"transfer {transfer} is not done after {limit_s:g} s; {self.counters()} {self.events}"
                )
            self.pump(0.001)
        return Result(self.area("TRANSFERS", "transfer").get(transfer[0], "result"))

    def close(self) -> None:
        """But for the memory, which may still be looked at."""
        self.plane.stop()
        self.client_segment.close()

    def close_memory(self) -> None:
        self.segment.close()
        for made in (*self.regions, *self.lanes.values(), *self.bounces.values()):
            made.close()


TIMEOUT: Final = 17 if REAL else 10  # 4.096 us << this
ROUTE: Final[dict[str, Any]] = {"timeout": TIMEOUT, "retry_count": 3, "rnr_retry": 7}


def endpoint_facts(node: Node, rail: int, through: int, *, sending: bool) -> tuple[int, dict[str, Any]]:
    endpoint, qpn, psn = node.plane.new_endpoint(rail, through, sending=sending)
    facts = node.plane.verbs_facts(through)
    return endpoint, {
        "gid": facts["gid"],
        "lid": facts["lid"],
        "mtu": facts["mtu"],
        "qpn": qpn,
        "psn": psn,
        "remote_through": through,
    }


@dataclass(frozen=True)
class Pair:
    """A connection from ``sender`` to ``receiver``: ids at both ends."""

    sender: int
    receiver: int


def connect(
    a: Node,
    b: Node,
    *,
    rail: int = 0,
    remote_rail: int = 0,
    through: int | None = None,
    remote_through: int | None = None,
    epoch: int = 1,
    timeout: int = TIMEOUT,
) -> Pair:
    """What the conductors do between CONNECT_WANTED and add_sender(); peer 0 of a, session 0 of b."""
    through = rail if through is None else through
    remote_through = remote_rail if remote_through is None else remote_through
    ours, our_facts = endpoint_facts(a, rail, through, sending=True)
    theirs, their_facts = endpoint_facts(b, remote_rail, remote_through, sending=False)
    pair = Pair(2 * next(a.connections), 2 * next(b.connections) + 1)
    b.plane.connect_endpoint(theirs, **our_facts, **{**ROUTE, "timeout": timeout})
    b.plane.add_receiver(remote_rail, pair.receiver, 0, theirs)
    a.plane.connect_endpoint(ours, **their_facts, **{**ROUTE, "timeout": timeout})
    a.plane.add_sender(rail, pair.sender, 0, remote_rail, False, epoch, ours)
    return pair


def export(b: Node, region: int, handle: int, nbytes: int) -> None:
    b.plane.add_export(handle, 0, 0, region, nbytes)


def lost(a: Node, pair: Pair) -> Event:
    """Waits for SENDER_LOST."""
    return a.wait(plane.SENDER_LOST, where=lambda event: event[2] == pair.sender)


def settle(a: Node, b: Node, pair: Pair, cookie: int, *, rail: int = 0) -> None:
    """Tells the sender what is known of the frames of a fenced connection."""
    results = b.fenced[pair.receiver]
    acks = b"".join(
        sequence.to_bytes(8, "little") + result.to_bytes(8, "little") for sequence, result in results.items()
    )
    a.plane.settle_sender(rail, pair.sender, b.placed[pair.receiver], acks, cookie)


def fence(a: Node, b: Node, pair: Pair, *, rail: int = 0, remote_rail: int = 0) -> int:
    """After SENDER_LOST: what the conductors do. How many frames were placed."""
    b.plane.fence_receiver(remote_rail, pair.receiver)
    b.keep_fence(b.wait(plane.RECEIVER_FENCED, where=lambda event: event[2] == pair.receiver))
    a.command(lambda cookie: settle(a, b, pair, cookie, rail=rail))
    return b.placed[pair.receiver]


def settle_late(a: Node, b: Node, pair: Pair, *, rail: int = 0) -> None:
    """Waits for news of a frame that its owner had not copied at the fence."""
    b.note_late(b.wait(plane.FRAME_SETTLED, where=lambda event: event[2] == pair.receiver))
    a.command(lambda cookie: settle(a, b, pair, cookie, rail=rail))
