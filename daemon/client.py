"""What the daemon knows of one attached client. Main thread only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from railrelay.client.protocol import Message, Note
from railrelay.daemon.descriptors import OWN, discard
from railrelay.daemon.memory import Memory
from railrelay.daemon.rows import Rows
from railrelay.daemon.verbs import Keys
from railrelay.shm_layout.segment import Segment

if TYPE_CHECKING:
    from railrelay.daemon.client_socket import ClientSocket
    from railrelay.daemon.peers import Peer

KEPT_TAGS: Final = 65536  # as the data plane keeps tombstones


@dataclass(eq=False)
class Handed:
    """What other clients of this daemon may import a region by, as in protocol.RegionOpened; ``fd`` is its own."""

    handle: str = ""
    memory: str = "host"
    device: str = ""
    handle_bytes: int = 0
    offset: int = 0
    ipc: bytes = b""
    fd: int = -1
    pid: int = OWN  # of the process that the descriptor came from

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            discard([self.fd], self.pid)
        self.fd, self.handle = -1, ""


@dataclass(eq=False)
class Region:
    """Memory that a client registered. ``receive``: peers may write it."""

    client: Client
    index: int
    address: int
    nbytes: int
    rail: int
    direct: bool  # the rail's NIC reads and writes it itself
    receive: bool
    memory: int = 0  # number by which helpers of emulated NICs know it; 0: they do not
    kind: str = "host"  # or "vmm", "ipc": what kind of memory that is
    handed: Handed = field(default_factory=Handed)
    keys: Keys = field(default_factory=Keys)  # on verbs rails
    offers: dict[str, bytes] = field(default_factory=dict)  # session that may open it ("": any) -> capability


@dataclass(eq=False)
class Remote:
    """A region of a peer that a client opened; the index stays taken until the client closes it."""

    index: int
    peer: Peer
    handle: int


@dataclass(eq=False)
class Client:
    row: int
    serial: int
    pid: int
    rank: int
    own_rail: int
    name: str
    socket: ClientSocket
    region_rows: Rows
    remote_rows: Rows
    gpu: str = ""  # UUID, once the client has said it
    segment: Segment | None = None
    on_plane: bool = False
    attached: bool = False
    leaving: bool = False
    lanes: dict[int, Memory] = field(default_factory=dict)  # by rail
    bounces: list[Memory] = field(default_factory=list)
    bounce_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    prefault_lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one worker thread a client
    regions: dict[int, Region] = field(default_factory=dict)
    shared_bytes: dict[int, int] = field(default_factory=dict)  # mapped here, by region
    remotes: dict[int, Remote] = field(default_factory=dict)
    notes: dict[int, Note] = field(default_factory=dict)  # by transfer: the latest only
    rails_left: int = 0  # of those that still have slices of a leaving client
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: OrderedDict[int, None] = field(default_factory=OrderedDict)  # tags: the latest KEPT_TAGS

    def abort(self, tag: int) -> None:
        self.aborted[tag] = None
        self.aborted.move_to_end(tag)
        if len(self.aborted) > KEPT_TAGS:
            self.aborted.popitem(last=False)

    def free_region(self, index: int) -> None:
        self.shared_bytes.pop(index, None)
        self.region_rows.free(index)

    def send(self, message: Message) -> None:
        self.socket.send(message)

    def __str__(self) -> str:
        return f"client {self.row} ({self.name!r}, rank {self.rank}, pid {self.pid})"
