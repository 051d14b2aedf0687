"""Shared memory that the daemon makes for a client: its segment, relay memory of its lanes, bounce memory. Runs on
worker threads: reserving a lane's 144 MiB takes longer than the event loop may stand still."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from railrelay.daemon.config import Config
from railrelay.daemon.node_state import shape
from railrelay.daemon.verbs import Keys
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import AreaPlan, Segment


@dataclass
class Memory:
    """A named object and its descriptor, until the descriptor has been handed on. close() forgets both; idempotent."""

    name: str
    fd: int
    nbytes: int
    number: int = 0  # by which the helper of an emulated NIC knows it; 0: it does not
    device: str = ""  # UUID of the GPU whose memory it is
    generation: int = 0  # of a lane
    unregistered: bool = False  # with verbs devices, which refused it
    keys: Keys = field(default_factory=Keys)  # on verbs rails

    def close_fd(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        self.close_fd()
        if self.name:
            segment.unlink(self.name)
            self.name = ""


def reserve(name: str, nbytes: int) -> Memory:
    """NoSharedMemory."""
    return Memory(name, segment.create_object(name, nbytes, 0o600), nbytes)


def client_areas(config: Config) -> list[AreaPlan]:
    constants, relay, rails = abi.CONSTANTS, config.relay, len(config.rail)
    return [
        AreaPlan(constants["AREA_CONTROL"], "client_control", 1),
        AreaPlan(constants["AREA_LANE"], "lane", rails),
        AreaPlan(constants["AREA_SLOT_HEADS"], "slice", rails * relay.slots),
        AreaPlan(constants["AREA_SLOT_TABLES"], "block", rails * relay.slots, relay.table_entries),
        AreaPlan(constants["AREA_RINGS"], "ring", rails),
        AreaPlan(constants["AREA_RING_SLICES"], "slice", rails * relay.ring_slices),
        AreaPlan(constants["AREA_RING_TABLES"], "block", rails * relay.ring_tables, relay.table_entries),
        AreaPlan(constants["AREA_TRANSFERS"], "transfer", relay.transfers),
        AreaPlan(constants["AREA_BOUNCES"], "bounce", rails),
        AreaPlan(constants["AREA_BOUNCE_HEADS"], "bounce_frame", rails * relay.bounce_slots),
        AreaPlan(constants["AREA_BOUNCE_RUNS"], "run", rails * relay.bounce_slots, relay.table_entries),
        AreaPlan(constants["AREA_SLOT_TIMES"], "slice_times", rails * relay.slots),
        AreaPlan(constants["AREA_RING_TIMES"], "slice_times", rails * relay.ring_slices),
    ]


def client_segment(config: Config, name: str, *, instance: int, client: int, serial: int, pid: int) -> Segment:
    """The segment of a client, published. NoSharedMemory."""
    made = segment.create(
        name,
        abi.CONSTANTS["SEGMENT_CLIENT"],
        client_areas(config),
        {**shape(config), "instance": instance, "client": client, "client_serial": serial},
        mode=0o600,
        owner_pid=pid,
    )
    made.publish()
    return made
