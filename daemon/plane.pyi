"""The data plane: one C thread per rail, entered once, without the GIL. Everything here is called on the daemon's main
thread. Calls that take a ``cookie`` are commands to rail threads: each rail addressed answers with one event
(COMMAND_DONE, rail, cookie, value, 0, 0, 0), in the order given. The segment and all tables live as long as this object.
"""

from collections.abc import Sequence
from typing import Any, Final

COMMAND_DONE: Final[int]  # (kind, rail, cookie, value, 0, 0, 0)
CONNECT_WANTED: Final[int]  # (kind, rail, peer, remote_rail, express, epoch, 0): slices wait for a sender connection
SENDER_ENDING: Final[int]  # the same as SENDER_LOST, of verbs rails, before the drain
SENDER_LOST: Final[int]  # (kind, rail, connection, errno, peer, remote_rail, slices in flight)
RECEIVER_LOST: Final[int]  # (kind, rail, connection, errno, session, 0, 0); 0 = clean end of stream
RECEIVER_FENCED: Final[
    int
]  # (kind, rail, connection, placed, unsettled, client, 0): fence_acks(connection) has the results; client: one of those
# that frames with an UNSETTLED result are for
FRAME_SETTLED: Final[
    int
]  # (kind, rail, connection, sequence, result, 0, 0): what became of a frame whose result at the fence was UNSETTLED
CLIENT_DETACHED: Final[
    int
]  # (kind, rail, client, 0, 0, 0, 0): nothing of the client is in flight on this rail any more
VIOLATION: Final[
    int
]  # (kind, rail, client, result, a, b, c): words that no correct client writes; conductor detaches it
NOTE_DUE: Final[
    int
]  # (kind, rail, client, transfer, generation, 0, 0): all slices placed, deliver its Note, then finish_note()
TRANSFER_ENDED: Final[
    int
]  # (kind, rail, client, transfer, generation, result, 0): only for transfers watch() asked about

MAX_FLUSH_TARGETS: Final[int]
PORT_CHANGED: Final[int]  # (kind, rail, up, ibv event code, 0, 0, 0): verbs; the rail's own device

class DataPlane:
    @property
    def event_fd(self) -> int: ...
    def __init__(
        self,
        node_segment: memoryview,
        *,
        instance: int,
        max_peers: int,
        max_sessions: int,
        max_exports: int,
        regions_per_client: int,
        remotes_per_client: int,
        direct_slice_bytes: int,
        spin_us: int,
    ) -> None:
        """``node_segment``: the mapped, published node segment (rail, lane, client states are found through its table)."""
    def add_rail(
        self,
        *,
        nic: str,
        cpu: int,
        bytes_per_s: int = 0,
        device: str = "",
        port: int = 1,
        gid_index: int = 0,
        sq_depth: int = 1024,
        signal_every: int = 64,
        flush: str = "auto",
    ) -> int:
        """nic: "tcp", "emulated" with its rate, or "verbs" with a device name, its port and GID index (ValueError names
        them). OSError says what the device lacks. Returns the rail's number; before start()."""

    # verbs NICs. Rails name devices: `through` is the rail whose device is meant. register_memory() to connect_endpoint()
    # take no GIL while they wait and may be called on worker threads.
    def verbs_facts(self, rail: int) -> dict[str, Any]:
        """gid (bytes), lid, mtu (bytes), up, ethernet, max_sge, max_qp_wr, max_cqe, max_mr_size; as of now."""
    def queue_pairs(self, rail: int) -> int:
        """How many there are on the rail's device, of all rails, senders and receivers."""
    def register_memory(
        self,
        through: int,
        address: int,
        nbytes: int,
        *,
        dmabuf_fd: int = -1,
        dmabuf_offset: int = 0,
        flush: bool = False,
    ) -> tuple[int, int, int]:
        """(key id, lkey, rkey). address: this process's mapping, or with a dma-buf the address that work names it by.
        flush: a key for set_flush_targets() alone; a page is enough. OSError."""
    def deregister_memory(self, key: int) -> None:
        """Nothing may be posted that names its keys. OSError if it is not known."""
    def set_lane_keys(self, client: int, rail: int, lkeys: list[int], cookie: int) -> None:
        """Keys of the client's lane on the rail, by the rail whose device reads it. That rail alone answers; before the
        client learns of the lane."""
    def set_region_keys(self, client: int, region: int, lkeys: list[int]) -> None:
        """Before the client learns of the region."""
    def set_bounce_keys(self, client: int, rail: int, rkeys: list[int], cookie: int) -> None:
        """The rail answers. Memory for add_bounce() of a verbs rail has room for the run tables of all slots after the
        slots: bounce_slots * table_entries * 16 bytes more; all of it is registered."""
    def bounce_base(self, client: int, rail: int) -> int:
        """Address at which bounce memory is mapped here, for register_memory(). KeyError."""
    def new_endpoint(self, rail: int, through: int, *, sending: bool) -> tuple[int, int, int]:
        """(endpoint id, queue pair number, packet sequence number): a queue pair that serves ``rail``, for add_sender() or
        probe_endpoint() if ``sending``, else for add_receiver(). OSError."""
    def connect_endpoint(
        self,
        endpoint: int,
        *,
        gid: bytes,
        qpn: int,
        psn: int,
        lid: int,
        mtu: int,
        remote_through: int,
        timeout: int,
        retry_count: int,
        rnr_retry: int,
        min_rnr_timer: int = 12,
        traffic_class: int = 0,
        service_level: int = 0,
    ) -> None:
        """Ready to receive and to send; mtu in bytes, for the path. remote_through: the peer's rail whose device its end
        is on: picks the rkeys. OSError."""
    def drop_endpoint(self, endpoint: int) -> None:
        """One that has not been given to add_sender() or add_receiver(), or only probed. Idempotent."""
    def probe_endpoint(self, endpoint: int, cookie: int) -> None:
        """Writes no bytes through a connected endpoint that is not a sender or receiver. The endpoint's rail answers: value
        = 0, or the status of the completion (IBV_WC_...)."""
    def open_flush(self, rail: int, through: int) -> None:
        """The queue pair by which receivers of the rail through this device read flush targets, if it is not there. Before
        each add_receiver() while there are targets (if the rail's flush is "always", connect_endpoint() does that), and
        when the first target comes. Like new_endpoint(), for a worker. OSError."""
    def set_flush_targets(self, rail: int, through: int, targets: list[tuple[int, int]], cookie: int) -> None:
        """(address, rkey) of a byte of each GPU whose memory is received into, at most MAX_FLUSH_TARGETS: from now on
        receivers of the rail through this device read these, and no others, before they answer, so that what was written
        is there for the GPU. A rail with flush "always" reads a byte of host memory besides; one with "never" nothing.
        The rail answers once they are in force and nothing reads those of before any more."""
    def drain_handle(self, peer: int, handle: int, cookie: int) -> None:
        """After remove_remote() of all that name the peer's handle: each rail answers once no frame on its way names it."""
    def add_peer_tombstone(self, peer: int, owner: int, tag: int) -> None:
        """The peer's client ``owner`` (its row there) has aborted the tag: verbs rails post nothing with it any more. Kept
        until drop_peer() or forget_peer_owner()."""
    def forget_peer_owner(self, peer: int, owner: int) -> None:
        """Another client of the peer has this row now: what was aborted before is not its."""
    def emulated_fds(self, rail: int) -> tuple[int, int]:
        """Memory that the rail shares with its helper process, and the rail's kick eventfd; the plane's. -1: no emulated NIC."""
    def fail_nic(self, rail: int, result: int) -> None:
        """The emulated NIC's helper process has ended: what the rail has posted, and will, ends with ``result``."""
    def start(self) -> None: ...
    def stop(self) -> None:
        """Stops the threads, closes every connection. Idempotent."""
    def events(self) -> list[tuple[int, int, int, int, int, int, int]]:
        """Drains the event queue (call when event_fd is readable; it resets it)."""

    # clients; numbers are rows of the node segment
    def attach_client(self, client: int, serial: int, segment_fd: int, segment_bytes: int, cookie: int) -> list[int]:
        """Maps the client segment (fd stays the caller's) and begins to serve its rings. All rails answer. Returns the
        client's own kick eventfds, one a rail, to be passed to it; the plane owns them until release_client."""
    def detach_client(self, client: int) -> None:
        """No new slices are taken; queued ones are dropped; CLIENT_DETACHED comes from every rail once posted ones ended."""
    def release_client(self, client: int) -> None:
        """Unmaps everything of a client whose CLIENT_DETACHED came from all rails."""
    def lease_lane(
        self, client: int, rail: int, fd: int, nbytes: int, generation: int, cookie: int, *, base: int = 0
    ) -> None:
        """fd -1: memory that only the rail's NIC reaches, known under the made-up address ``base`` (bit 63 is set)."""
    def lane_base(self, client: int, rail: int) -> int:
        """Address under which the rail's NIC is told of a leased lane. KeyError."""
    def add_bounce(self, client: int, rail: int, fd: int, nbytes: int, cookie: int) -> None: ...
    def add_region(self, client: int, region: int, fd: int, offset: int, nbytes: int, *, base: int = 0) -> None:
        """fd -1: private memory, or with a made-up ``base`` as in lease_lane(). OSError if it cannot be mapped."""
    def region_base(self, client: int, region: int) -> int:
        """Address under which NICs are told of it; 0 for private memory. KeyError."""
    def prefault_region(self, client: int, region: int) -> None:
        """Maps the pages of a shared region now instead of on first use. Without the GIL; for a worker thread."""
    def prefault_rail(self, client: int, rail: int) -> None:
        """The same for relay and bounce memory of the client on one rail."""
    def remove_region(self, client: int, region: int, cookie: int) -> None:
        """All rails answer; value = slices in flight that read it. Then finish_region_removal(busy)."""
    def finish_region_removal(self, client: int, region: int, busy: bool) -> None: ...
    def add_remote(
        self,
        client: int,
        remote: int,
        peer: int,
        handle: int,
        nbytes: int,
        rail: int,
        owner: int,
        window_bytes: int,
        window_runs: int,
        *,
        iova: int = 0,
        rkeys: Sequence[int] = (),
    ) -> None:
        """rail: the peer's rail of the region; owner, window_bytes and window_runs as in protocol.RegionOpened. verbs: the
        address by which keys name its begin, and the keys by the peer's rail whose device writes it."""
    def remove_remote(self, client: int, remote: int) -> None: ...

    # transfers
    def cancel_transfer(self, client: int, transfer: int, generation: int, result: int) -> bool:
        """Ends a transfer early: nothing more of it is posted, the client's feeder is told. False if it is not known."""
    def report_unsettled(self, client: int, transfer: int, generation: int) -> bool:
        """Publishes RR_UNSETTLED for a cancelled transfer that still has slices out; settled follows when they end."""
    def find_transfers(self, tag: int, peer: int, handles: list[int]) -> list[tuple[int, int, int]]:
        """(client, transfer, generation) of live transfers with this tag that go to this peer (handles: empty = any)."""
    def overdue(self, now_ns: int) -> list[tuple[int, int, int, int, int]]:
        """(client, transfer, generation, result so far, overdue ns) of live transfers past their time-out."""
    def live_transfers(self) -> int:
        """How many transfers have not settled, over all clients."""
    def watch(self, client: int, transfer: int, generation: int) -> bool:
        """TRANSFER_ENDED will be sent when it settles; False if it has already."""
    def holders(self, client: int, transfer: int, generation: int, cookie: int) -> None:
        """All rails answer; value = number of posted slices there; the connections follow in holders_result(cookie)."""
    def holders_result(self, cookie: int) -> list[tuple[int, int]]:
        """(rail, connection) that carry posted slices of the transfer asked about."""
    def finish_note(self, client: int, transfer: int, generation: int, result: int) -> None: ...

    # peers (sending side)
    def add_peer(self, peer: int, remote_rails: int) -> None: ...
    def add_sender(
        self, rail: int, connection: int, peer: int, remote_rail: int, express: bool, epoch: int, fd: int
    ) -> None:
        """Hands over a connected non-blocking socket after its preamble was written; the plane owns and closes it. verbs: a
        connected endpoint's id in its place; it serves both classes, and express says nothing."""
    def settle_sender(self, rail: int, connection: int, placed: int, acks: bytes, cookie: int) -> None:
        """The receiver has fenced the connection: placed slices complete, refused ones fail, others are queued again. Those
        whose result is UNSETTLED wait for another call with all results that are known then."""
    def close_sender(self, rail: int, connection: int) -> None:
        """Closes a live connection as if it were lost: SENDER_LOST follows."""
    def fail_path(self, rail: int, peer: int, remote_rail: int, express: bool, result: int, cookie: int) -> None:
        """Fails the slices that wait for a connection on this path (not the posted ones)."""
    def drop_peer(self, peer: int, result: int, cookie: int) -> None:
        """Fails everything for the peer, posted included, with ``result`` and closes its sender connections. All rails answer."""
    def forget_peer(self, peer: int) -> None:
        """Frees what was kept of a peer, once drop_peer() has been answered."""

    # sessions (receiving side)
    def add_receiver(self, rail: int, connection: int, session: int, fd: int) -> None:
        """fd as in add_sender(). verbs: before the peer is told the endpoint's queue pair number."""
    def fence_receiver(self, rail: int, connection: int) -> None:
        """Closes it: RECEIVER_FENCED when nothing more arrives."""
    def fence_acks(self, connection: int) -> bytes:
        """The latest results, 16 bytes each: sequence and result, little-endian. UNSETTLED: the owner of the memory has
        still to copy the frame; FRAME_SETTLED follows."""
    def add_export(self, handle: int, session: int, client: int, region: int, nbytes: int) -> None: ...
    def remove_export(self, handle: int, cookie: int) -> None:
        """After all rails answered no byte lands there any more; frames on their way are refused (RR_REGION_GONE)."""
    def add_tombstone(self, client: int, tag: int, cookie: int) -> None:
        """Frames with this tag for this client are refused (RR_ABORTED) once all rails answered."""
