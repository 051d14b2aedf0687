"""A session of this process with the daemon of its node: the entry to everything else."""

from __future__ import annotations

import os
import threading
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

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
)
from railrelay.client.gpu_memory import GpuMemory, GpuOptions
from railrelay.client.layout import PageLayout
from railrelay.client.paths import default_socket
from railrelay.client.peers import Peer, Ready, RemoteTable
from railrelay.client.receiver import Receiver
from railrelay.client.regions import Buffer, Region, RemoteRegion, decode_offer, memory_of, shared_memory
from railrelay.client.transfer import Completions, Transfer, core_errors, nanoseconds
from railrelay.shm_layout import abi

_REPLY_MARGIN_S: Final = 1.0
_GPU_OPTIONS: Final = GpuOptions()
Addresses: TypeAlias = npt.NDArray[np.uint64]


class Route(StrEnum):
    """How bytes travel. RELAY is the design; the others are there to measure it against."""

    RELAY = "relay"  # through the lane of the destination's rail; own-rail blocks in shared memory go straight
    RELAY_ALL = "relay_all"  # the same, but own-rail blocks go through their lane too
    DIRECT = "direct"  # own rail to the far rail, all destinations at once
    MATCHED = "matched"  # the destination's rail, straight from the source: destination affinity without a relay
    SERIAL = "serial"  # own rail, one transfer after the other in the order of submission
    SCHEDULED = "scheduled"  # own rail, one transfer after the other in rounds with a shifting offset

    @property
    def number(self) -> int:
        return {
            Route.RELAY: core.ROUTE_RELAY,
            Route.RELAY_ALL: core.ROUTE_RELAY_ALL,
            Route.MATCHED: core.ROUTE_MATCHED,
            Route.DIRECT: core.ROUTE_DIRECT,
            Route.SERIAL: core.ROUTE_SERIAL,
            Route.SCHEDULED: core.ROUTE_SCHEDULED,
        }[self]


class Client:
    """Made by Client.connect(). Any number of threads may call; a forked child must connect a Client of its own.

    ``session``: "host:port" of the own daemon, by which peers reach it. ``rank``: local GPU. ``rails``: how many the
    node has. ``own_rail``: the one of this rank. ``receiver``: the decode side."""

    @classmethod
    def connect(
        cls,
        socket: str | os.PathLike[str] | None = None,
        *,
        instance: str = "default",
        rank: int,
        name: str = "",
        route: Route | str = Route.RELAY,
        local: bool = True,
        feeder_cpu: int = -1,
        gpu: int | str | None = None,
        gpu_options: GpuOptions = _GPU_OPTIONS,
        timeout: float = 10.0,
    ) -> Client:
        """Attaches to the daemon at ``socket``, or to that of ``instance`` at its default place (paths.default_socket).

        ``local``: into regions of other clients of the same daemon, whatever the route, bytes are copied from memory to
        memory; without it they go through the daemon and its NICs like all others.
        ``name`` is shown by the admin commands. ``feeder_cpu``: CPU to pin the feeder thread to, -1 for none. ``gpu``:
        CUDA ordinal or UUID of the rank's GPU; without it the client takes that of the first GPU memory it registers.
        Raises ConnectError: no daemon, no permission, another version, rank out of range or taken, no such GPU."""
        path = default_socket(instance) if socket is None else Path(socket)
        if route not in list(Route):
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"route {route!r}: one of {', '.join(Route)}")
        return cls(path, rank, name, Route(route), local, feeder_cpu, gpu, gpu_options, timeout)

    def __init__(
        self,
        path: Path,
        rank: int,
        name: str,
        route: Route,
        local: bool,
        feeder_cpu: int,
        gpu: int | str | None,
        gpu_options: GpuOptions,
        timeout: float,
    ) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # never held while waiting: the control thread takes it
        self._leasing = threading.Lock()
        self._attaching = threading.Lock()
        self._closing = threading.Lock()
        self.closed = False
        self._peers: dict[str, Peer] = {}
        self.held_regions: dict[int, Region] = {}  # what the C threads may read or write stays, whoever drops it
        self._kicks: list[int] = []
        self._gpu: GpuMemory | None = None
        self._gpu_options = gpu_options
        self.rank = rank
        self.local = local
        self.draining = ""  # what a daemon that is going down said
        self.connection = Connection(path, timeout)
        self.receiver = Receiver(self.connection)
        request = protocol.Attach(
            self.connection.new_id(), protocol.PROTOCOL_VERSION, abi.CONSTANTS["ABI_VERSION"], rank, name
        )
        try:
            facts: protocol.Attached = self.connection.ask_then(
                request, protocol.Attached, lambda facts, fds: self._attached(facts, fds, route, feeder_cpu), timeout
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
            raise
        if gpu is not None:
            try:
                self._use_gpu(gpu)
            except RelayError as failure:
                self.close()
                raise ConnectError(failure.code, failure.text) from None
        self.session = facts.session
        self.rails = len(self._kicks)
        self.own_rail = facts.own_rail
        self._bounce_bytes = facts.bounce_bytes

    def alloc(self, nbytes: int, *, rail: int | None = None) -> Buffer:
        """New memory that this process and the daemon share, zeroed and registered (see register() for ``rail``): the
        way without a bounce copy on the decode side. Raises RegionError NO_MEMORY."""
        self.connection.check()
        fd, array = shared_memory(nbytes)
        try:
            region = self._register(
                protocol.Register(
                    self.connection.new_id(), int(array.ctypes.data), nbytes, True, 0, self._rail(rail), True
                ),
                array,
                (fd,),
            )
        finally:
            os.close(fd)
        return Buffer(array, region)

    def register(self, buffer: Any, *, rail: int | None = None, receive: bool = True) -> Region:  # noqa: ANN401
        """Makes memory of this process known as source and, with ``receive``, as destination.

        ``buffer``: contiguous numpy array or other object with the buffer protocol (writable if ``receive``); a torch
        tensor, or what has ``__cuda_array_interface__`` or DLPack, in the memory of this rank's GPU; or a tuple
        (address, bytes) of either, whose memory the caller keeps alive until unregister() has returned. ``rail``: the
        one that serves it, by default the client's own. Register a whole pool once: each registration is a request to
        the daemon. Memory of alloc() is registered already.

        Raises RegionError (the text names the limit), ArgumentError (overlaps a registered region, not contiguous)."""
        self.connection.check()
        on_gpu = _gpu_memory_of(buffer)
        if on_gpu is not None:
            return self._register_gpu(*on_gpu, buffer, self._rail(rail), receive=receive)
        address, nbytes, keep = memory_of(buffer, writable=receive)
        request = protocol.Register(self.connection.new_id(), address, nbytes, False, 0, self._rail(rail), receive)
        return self._register(request, keep)

    def peer(self, session: str, timeout: float = 5.0) -> Peer:
        """The daemon with this session ("host:port" or "[v6]:port"), connected on first use and then kept. Raises
        PeerError (unreachable within ``timeout`` seconds, refused), ArgumentError."""
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

    def open(self, offer: bytes, timeout: float = 5.0) -> RemoteRegion:
        """Connects to the peer that an offer comes from and opens it there; see Peer.open()."""
        return self.peer(decode_offer(offer).session, timeout).open(offer)

    def write(
        self,
        target: RemoteRegion | Peer | str,
        sources: npt.ArrayLike,
        destinations: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        tag: int | bytes | str = 0,
        timeout: float = 30.0,
        notify: bytes | None = None,
        ready: Ready = None,
    ) -> Transfer:
        """Peer.write() to the process that owns the region ``target``, or to a peer or session. Contiguous uint64
        arrays and a RemoteRegion take a shorter way."""
        plain = notify is None and ready is None and type(tag) is int and timeout > 0
        if plain and type(target) is RemoteRegion and self.remotes.is_open(target) and not target.peer.is_down:
            one = type(lengths) is int
            try:
                submission = self.core.write_now(
                    target.peer.index,
                    target.space,
                    cast(Addresses, sources),
                    cast(Addresses, destinations),
                    None if one else cast(Addresses, lengths),
                    cast(int, lengths) if one else 0,
                    cast(int, tag),
                    nanoseconds(timeout),
                )
                return Transfer(submission, self.connection, self.completions, cast(int, tag), target.peer.session)
            except (core.SubmitError, TypeError, ValueError, OverflowError):
                pass  # below is the way that says what is wrong, or leases the lane first
        peer, within = self._target(target)
        return peer.write(
            sources, destinations, lengths, tag=tag, timeout=timeout, notify=notify, ready=ready, within=within
        )

    def write_pages(
        self,
        target: RemoteRegion | Peer | str,
        source: PageLayout,
        source_pages: npt.ArrayLike,
        destination: PageLayout,
        destination_pages: npt.ArrayLike,
        *,
        tag: int | bytes | str = 0,
        timeout: float = 30.0,
        notify: bytes | None = None,
        ready: Ready = None,
    ) -> Transfer:
        """Peer.write_pages() to the process that owns the region ``target``, or to a peer or session."""
        peer, within = self._target(target)
        return peer.write_pages(
            source,
            source_pages,
            destination,
            destination_pages,
            tag=tag,
            timeout=timeout,
            notify=notify,
            ready=ready,
            within=within,
        )

    def counters(self) -> dict[str, int]:
        """Counters of this client's data path since it connected; times end in _ns."""
        self.connection.check_process()
        return self.core.counters()

    def close(self) -> None:
        """Ends the session: running transfers end with CLIENT_GONE, regions are withdrawn. Idempotent."""
        if os.getpid() != self._pid:
            self.connection.close()  # a forked child has only copies of descriptors
            return
        with self._closing:
            if self.closed:
                return
            self.closed = True
            self.core.fail_all(Result.CLIENT_GONE)
            self.remotes.let_go()
            self.connection.close()
            self._wake_all()
            self.core.stop()
            if self._gpu is not None:
                self._gpu.close()  # the driver lets go of mappings while they are there
            self.core.close()
            self.held_regions.clear()
            close_all(self._kicks)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client(rank {self.rank}, {self.session})"

    # ---- for the rest of the package ----

    def lease_lane(self, rail: int) -> None:
        """Once a rail, when the first transfer needs it."""
        with self._leasing:
            if not self.core.has_lane(rail):
                request = protocol.LeaseLane(self.connection.new_id(), rail)
                self.connection.ask_then(request, protocol.Leased, self._leased)
            if self._gpu is not None:
                self._gpu.prepare_lane(rail)

    def _use_gpu(self, gpu: int | str) -> GpuMemory:
        with self._attaching:  # also on the control thread, which must not wait for who waits for it
            if self._gpu is None:
                self._gpu = GpuMemory(self.core, gpu, self._gpu_options, self.connection.fd)
            return self._gpu

    def open_remote(self, opened: protocol.RegionOpened, fds: list[int]) -> None:
        """Control thread: see RemoteGpuMemory."""
        try:
            memory = self._use_gpu(opened.device)
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

    def _target(self, target: RemoteRegion | Peer | str) -> tuple[Peer, RemoteRegion | None]:
        if isinstance(target, RemoteRegion):
            return target.peer, target
        return (self.peer(target) if isinstance(target, str) else target), None

    def _rail(self, rail: int | None) -> int:
        if rail is None:
            return self.own_rail
        if not 0 <= rail < self.rails:
            raise ArgumentError(ErrorCode.BAD_RAIL, f"rail {rail}; this node has 0 to {self.rails - 1}")
        return rail

    def _register_gpu(self, address: int, nbytes: int, keep: object, rail: int, *, receive: bool) -> Region:
        at = cuda.where(address)
        if at is None:
            raise ArgumentError(ErrorCode.BAD_ADDRESS, f"{address:#x} is not GPU memory")
        memory = self._use_gpu(at.ordinal)
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
            return self._register(request, keep, handles.fds)
        finally:
            handles.close()

    def _register(self, request: protocol.Register, keep: object, fds: tuple[int, ...] = ()) -> Region:
        on_gpu = request.memory == "device"

        def registered(reply: protocol.Registered, bounces: list[int]) -> Region:
            try:
                with core_errors():
                    for bounce_rail, bounce in enumerate(bounces):
                        self.core.add_bounce(bounce_rail, bounce, self._bounce_bytes)
                    self.core.add_region(reply.region, request.address, request.bytes, reply.direct, on_gpu, reply.rail)
            except (RelayError, OSError):
                self.connection.tell(protocol.Unregister(self.connection.new_id(), reply.region))
                raise
            finally:
                close_all(bounces)
            region = Region(
                self, reply.region, request.address, request.bytes, reply.rail, reply.capability, keep, request.device
            )
            self.held_regions[reply.region] = region
            return region

        region: Region = self.connection.ask_then(request, protocol.Registered, registered, LOCAL_TIMEOUT_S, fds)
        if on_gpu and self._gpu is not None and request.receive:  # nothing comes before the caller has the offer
            try:
                self._gpu.prepare_bounces(self.core.rails)
            except BaseException:
                region.unregister()
                raise
        return region

    # ---- on the control thread ----

    def _attached(self, facts: protocol.Attached, fds: list[int], route: Route, feeder_cpu: int) -> protocol.Attached:
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
                    route=route.number,
                    direct_slice_bytes=facts.direct_slice_bytes,
                    express_bytes=facts.express_bytes,
                    feeder_cpu=feeder_cpu,
                )
        finally:
            close_all([segment, node])
        self.completions = Completions(self.core.completion_fd)
        self.remotes = RemoteTable(self.core, self.connection, self)
        self.connection.on_event = self._event
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
                self.receiver.notifications.put(event)
            case protocol.RegionGone():
                self.remotes.gone(event.remote)
            case protocol.PeerDown():
                with self._lock:
                    lost = [peer for peer in self._peers.values() if peer.index == event.peer]
                    self._peers = {session: peer for session, peer in self._peers.items() if peer not in lost}
                for peer in lost:
                    peer.lost(event.text)
            case protocol.Draining():
                self.draining = event.text

    def _gpu_failure(self) -> RelayError | None:
        name = self.core.gpu_error
        return DaemonGone(ErrorCode.GPU_ERROR, f"{name}: {RESULT_TEXT[Result.GPU_ERROR]}") if name else None

    def _gone(self) -> None:
        self.core.fail_all(Result.DAEMON_GONE)
        self.remotes.let_go()
        self._wake_all()

    def _wake_all(self) -> None:
        self.completions.dispatch()
        self.receiver.notifications.end()


def _gpu_memory_of(buffer: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """(address, bytes) if it is GPU memory."""
    if not isinstance(buffer, tuple):
        return cuda.gpu_memory_of(buffer)
    address, nbytes = (int(part) for part in buffer)
    if cuda.in_use() and not cuda.missing() and address > 0 and cuda.where(address) is not None:
        return address, nbytes
    return None
