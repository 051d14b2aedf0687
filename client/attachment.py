"""One life with one daemon: the control connection, the data path, and all that both know of peers and regions. It ends
with the daemon or by end(); what a client keeps over the daemon's restart is in client.py and regions.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railrelay.client import core, cuda, protocol
from railrelay.client.connection import LOCAL_TIMEOUT_S, Connection, Event, close_all
from railrelay.client.errors import (
    RESULT_TEXT,
    ArgumentError,
    ConnectError,
    DaemonGone,
    ErrorCode,
    RegionError,
    RelayError,
    Result,
    WaitTimeout,
)
from railrelay.client.gpu_memory import GpuMemory, GpuOptions
from railrelay.client.peers import Peer, Ready, RemoteTable
from railrelay.client.regions import Region
from railrelay.client.transfer import Completions, core_errors
from railrelay.shm_layout import abi, faults

_REPLY_MARGIN_S: Final = 1.0
_LOOK_S: Final = 0.005


@dataclass(frozen=True)
class Wish:
    """What a client asks every daemon for; see Client.connect."""

    path: Path
    rank: int
    name: str
    route: int
    local: bool
    feeder_cpu: int
    gpu: int | str | None
    gpu_options: GpuOptions
    timeout: float


class Attachment:
    """``session``: of the daemon. ``rails``: how many it has, ``own_rail``: that of the rank. ``gone``: the daemon has
    exited or ended the session."""

    def __init__(
        self,
        wish: Wish,
        on_note: Callable[[protocol.Notification], None],
        on_gone: Callable[[Attachment], None],
        on_draining: Callable[[str], None],
    ) -> None:
        """ConnectError. The functions are called on the control thread; ``on_gone`` once, unless end() comes first."""
        self.wish = wish
        self.local = wish.local
        self.gone = False
        self._on_note = on_note
        self._on_gone = on_gone
        self._on_draining = on_draining
        self._lock = threading.Lock()  # never held while waiting: the control thread takes it
        self._leasing = threading.Lock()
        self._asked_lanes: frozenset[int] = frozenset()
        self._attaching = threading.Lock()
        self._ending = threading.Lock()
        self._ended = False
        self._peers: dict[str, Peer] = {}
        self._kicks: list[int] = []
        self._gpu: GpuMemory | None = None
        self.held_regions: dict[int, Region] = {}  # what the C threads may read or write stays, whoever drops it
        self.connection = Connection(wish.path, wish.timeout)
        request = protocol.Attach(
            self.connection.new_id(), protocol.PROTOCOL_VERSION, abi.CONSTANTS["ABI_VERSION"], wish.rank, wish.name
        )
        try:
            facts: protocol.Attached = self.connection.ask_then(
                request, protocol.Attached, self._attached, wish.timeout
            )
        except BaseException as failure:
            self.connection.close()
            if hasattr(self, "core"):
                self.core.close()
            close_all(self._kicks)
            if isinstance(failure, DaemonGone):
                raise ConnectError(self.connection.last_code, failure.text) from None
            if isinstance(failure, RelayError) and not isinstance(failure, ConnectError):
                raise ConnectError(failure.code, failure.text) from None
            if isinstance(failure, OSError):
                text = f"the daemon's segments cannot be mapped: {failure.strerror or failure}"
                raise ConnectError(ErrorCode.INTERNAL, text) from None
            if isinstance(failure, Exception) and not isinstance(failure, ConnectError):
                raise ConnectError(ErrorCode.INTERNAL, f"attaching: {type(failure).__name__}: {failure}") from failure
            raise
        self.session = facts.session
        self.rails = len(self._kicks)
        self.own_rail = facts.own_rail
        self.bounce_bytes = facts.bounce_bytes
        if wish.gpu is not None:
            try:
                self.use_gpu(wish.gpu)
            except BaseException as failure:
                self.end(Result.CLIENT_GONE)
                if isinstance(failure, RelayError):
                    raise ConnectError(failure.code, failure.text) from None
                raise

    @property
    def has_ended(self) -> bool:
        """No thread of the library touches any memory any more."""
        return self._ended

    def end(self, result: Result) -> None:
        """What still runs ends with ``result``; then no thread of the library touches any memory. Idempotent."""
        with self._ending:
            if self._ended:
                return
            self.core.fail_all(result)
            self.remotes.let_go()
            self.connection.close()
            self.completions.dispatch()
            self.core.stop()
            if self._gpu is not None:
                self._gpu.close()  # the driver lets go of mappings while they are there
            self._ended = True
            self.core.close()
            self.held_regions.clear()
            close_all(self._kicks)

    # ---- peers ----

    def peer(self, session: str, timeout: float) -> Peer:
        """See Client.peer."""
        self.connection.check()
        try:
            session = protocol.format_session(*protocol.parse_session(session))
        except ValueError as failure:
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, str(failure)) from None
        with self._lock:
            known = self._peers.get(session)
        if known is not None:
            return known
        request = protocol.ConnectPeer(self.connection.new_id(), session, timeout)
        peer: Peer = self.connection.ask_then(
            request, protocol.PeerConnected, lambda facts, _: self._connected(session, facts), timeout + _REPLY_MARGIN_S
        )
        return peer

    def lease_lane(self, rail: int) -> None:
        """Once a rail, when the first transfer needs it."""
        with self._leasing:
            if not self.core.has_lane(rail):
                request = protocol.LeaseLane(self.connection.new_id(), rail)
                asked_before, self._asked_lanes = rail in self._asked_lanes, self._asked_lanes | {rail}
                try:
                    self.connection.ask_then(request, protocol.Leased, self._leased, LOCAL_TIMEOUT_S)
                except WaitTimeout:
                    raise
                except RelayError:  # an earlier request, which timed out, has it: its answer comes
                    if not (asked_before and self._has_lane_soon(rail)):
                        raise
            if self._gpu is not None:
                self._gpu.prepare_lane(rail)

    def _has_lane_soon(self, rail: int) -> bool:
        deadline = time.monotonic() + _REPLY_MARGIN_S
        while not self.core.has_lane(rail) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return self.core.has_lane(rail)

    # ---- memory ----

    def register(self, request: protocol.Register, region: Region, fds: tuple[int, ...] = ()) -> None:
        """Makes the region known here. RelayError, OSError."""
        on_gpu = request.memory == "device"

        def registered(reply: protocol.Registered, bounces: list[int]) -> None:
            faults.point("client.region.registered")
            try:
                self._add_bounces(bounces)
                with core_errors():
                    self.core.add_region(reply.region, request.address, request.bytes, reply.direct, on_gpu, reply.rail)
            except BaseException:
                self.connection.tell(protocol.Unregister(self.connection.new_id(), reply.region))
                raise
            self.held_regions[reply.region] = region
            region.registered(self, reply)

        def too_late(reply: protocol.Registered, bounces: list[int]) -> None:
            """The daemon hands out bounce memory once."""
            self.connection.tell(protocol.Unregister(self.connection.new_id(), reply.region))
            self._add_bounces(bounces)

        self.connection.ask_then(request, protocol.Registered, registered, LOCAL_TIMEOUT_S, fds, too_late)
        if on_gpu and self._gpu is not None and request.receive:  # nothing comes before the caller has the offer
            self._gpu.prepare_bounces(self.core.rails)

    def _add_bounces(self, bounces: list[int]) -> None:
        """Control thread; owns the descriptors."""
        try:
            with core_errors():
                for rail, bounce in enumerate(bounces):
                    self.core.add_bounce(rail, bounce, self.bounce_bytes)
        finally:
            close_all(bounces)

    def register_gpu(self, region: Region, address: int, nbytes: int, rail: int, *, receive: bool) -> None:
        """The same for memory of the rank's GPU."""
        at = cuda.where(address)
        if at is None:
            raise ArgumentError(ErrorCode.BAD_ADDRESS, f"{address:#x} is not GPU memory")
        memory = self.use_gpu(at.ordinal)
        memory.check(at.ordinal)
        if self.remotes.any_local:
            memory.prepare_local()
        handles = cuda.handles_of(memory.gpu, address, nbytes)
        try:
            request = protocol.Register(
                self.connection.new_id(),
                address,
                nbytes,
                shared=False,
                offset=handles.offset,
                rail=rail,
                receive=receive,
                memory="device",
                device=memory.gpu.uuid,
                handle=handles.kind,
                handle_bytes=handles.allocation_bytes if handles.kind else 0,
                ipc=handles.ipc,
                dmabuf=handles.dmabuf >= 0,
                dmabuf_offset=handles.dmabuf_offset,
            )
            self.register(request, region, handles.fds)
        finally:
            handles.close()

    def use_gpu(self, gpu: int | str) -> GpuMemory:
        with self._attaching:  # also on the control thread, which must not wait for who waits for it
            if self._gpu is None:
                self._gpu = GpuMemory(self.core, gpu, self.wish.gpu_options, self.connection.fd)
            return self._gpu

    def open_remote(self, opened: protocol.RegionOpened, fds: list[int]) -> None:
        """Control thread: see RemoteGpuMemory."""
        try:
            memory = self.use_gpu(opened.device)
        except ArgumentError as failure:
            text = f"{failure.text}; connect with local=False, or with gpu= the GPU that is to copy"
            raise RegionError(ErrorCode.NOT_SUPPORTED, text) from None
        memory.open_remote(opened, fds)

    def prepare_local(self) -> None:
        """See RemoteGpuMemory."""
        if self._gpu is not None:
            self._gpu.prepare_local()

    def close_remote(self, index: int) -> None:
        """See RemoteGpuMemory."""
        if self._gpu is not None:
            self._gpu.close_remote(index)

    def event_of(self, ready: Ready) -> core.HostEvent | core.GpuEvent | None:
        """``ready`` of write() for the core."""
        if ready is None or isinstance(ready, core.HostEvent | core.GpuEvent):
            return ready
        if self._gpu is None:
            text = f"ready is {type(ready).__name__}, but this client has no GPU memory; register it first"
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
        return self._gpu.event_of(ready)

    # ---- on the control thread ----

    def _attached(self, facts: protocol.Attached, fds: list[int]) -> protocol.Attached:
        if len(fds) < 2:
            close_all(fds)
            raise RelayError(ErrorCode.PROTOCOL, f"Attached came with {len(fds)} descriptors")
        segment, node, *self._kicks = fds
        try:
            with core_errors():
                self.core = core.ClientCore(
                    segment,
                    facts.segment_bytes,
                    node,
                    facts.node_bytes,
                    self._kicks,
                    own_rail=facts.own_rail,
                    route=self.wish.route,
                    direct_slice_bytes=facts.direct_slice_bytes,
                    express_bytes=facts.express_bytes,
                    bytes_max=facts.bytes_max,
                    feeder_cpu=self.wish.feeder_cpu,
                )
                if self.connection.pidfd >= 0:
                    self.core.watch_daemon(self.connection.pidfd)
        finally:
            close_all([segment, node])
        faults.point("client.attach.mapped")
        self.completions = Completions(self.core)
        self.remotes = RemoteTable(self.core, self.connection, self)
        self.connection.on_event = self._event
        self.connection.look = self.remotes.look
        self.connection.on_gone = self._gone
        self.connection.why_gone = self._gpu_failure
        return facts

    def _connected(self, session: str, facts: protocol.PeerConnected) -> Peer:
        with self._lock:
            known = self._peers.get(session)
            if known is not None and known.index == facts.peer:  # two threads connected at once
                return known
            with core_errors():
                self.core.add_peer(facts.peer, facts.local_rails)
            peer = self._peers[session] = Peer(self, session, facts.peer)
        return peer

    def _leased(self, leased: protocol.Leased, fds: list[int]) -> None:
        faults.point("client.lane.leased")
        try:
            with core_errors():
                if leased.memory == "device":
                    if self._gpu is None:
                        text = f"lane of rail {leased.rail} is memory of {leased.device}: connect with gpu="
                        raise RelayError(ErrorCode.NOT_SUPPORTED, text)
                    self._gpu.add_lane(leased.rail, fds[0], leased.bytes, leased.generation)
                else:
                    self.core.add_lane(leased.rail, fds[0], leased.bytes, leased.generation)
        finally:
            close_all(fds)

    def _event(self, event: Event) -> None:
        match event:
            case protocol.Notification():
                self._on_note(event)
            case protocol.RegionGone():
                self.remotes.gone(event.remote)
            case protocol.PeerDown():
                with self._lock:
                    lost = [peer for peer in self._peers.values() if peer.index == event.peer]
                    self._peers = {session: peer for session, peer in self._peers.items() if peer not in lost}
                for peer in lost:
                    peer.lost(event.text)
            case protocol.Draining():
                self._on_draining(event.text)

    def _gpu_failure(self) -> RelayError | None:
        name = self.core.gpu_error
        return DaemonGone(ErrorCode.GPU_ERROR, f"{name}: {RESULT_TEXT[Result.GPU_ERROR]}") if name else None

    def _gone(self) -> None:
        try:
            self.core.fail_all(Result.DAEMON_GONE)
            self.remotes.let_go()
            self.completions.dispatch()
        finally:
            self.gone = True
            self._on_gone(self)
