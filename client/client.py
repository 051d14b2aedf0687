"""A client of the daemon of its node: the entry to everything else. It attaches again by itself when the daemon was
restarted; what the daemon has to know then is kept here and in regions.py."""

from __future__ import annotations

import operator
import os
import random
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from railrelay.client import core, cuda, protocol
from railrelay.client.attachment import Attachment, Wish
from railrelay.client.errors import (
    ArgumentError,
    ConnectError,
    DaemonGone,
    ErrorCode,
    PeerError,
    RelayError,
    Result,
    WaitTimeout,
    error,
)
from railrelay.client.gpu_memory import GpuOptions
from railrelay.client.layout import PageLayout
from railrelay.client.paths import default_socket
from railrelay.client.peers import Peer, Ready
from railrelay.client.receiver import Receiver
from railrelay.client.regions import (
    Buffer,
    Region,
    RemoteRegion,
    check_mapped,
    decode_offer,
    memory_of,
    shared_memory,
    span_of,
)
from railrelay.client.timeouts import LONGEST_S, nanoseconds, seconds
from railrelay.client.transfer import Transfer
from railrelay.shm_layout import faults

_GPU_OPTIONS: Final = GpuOptions()
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_LOOK_S: Final = 0.05  # between the exit of the daemon and the notice of it nobody tells
# What no waiting changes: another daemon than the one that was there.
_FINAL: Final = frozenset({ErrorCode.VERSION, ErrorCode.ABI, ErrorCode.DENIED, ErrorCode.BAD_RANK})
_FINAL_OF_REGIONS: Final = frozenset(
    {
        ErrorCode.BAD_ARGUMENT,
        ErrorCode.BAD_ADDRESS,
        ErrorCode.BAD_LENGTH,
        ErrorCode.OUT_OF_BOUNDS,
        ErrorCode.OVERLAP,
        ErrorCode.BAD_RAIL,
        ErrorCode.NOT_SUPPORTED,
    }
)
_PATIENCE_S: Final = 10.0  # with limits, which others may be at: then a region is given up, and not the others with it
_NUMBERS: Final = (float, int)
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
    node has. ``own_rail``: the one of this rank. ``receiver``: the decode side.

    When the daemon exits, every transfer that runs ends with DAEMON_GONE, calls raise DaemonGone, and a thread attaches
    again as soon as a daemon answers at the same place: then all regions are registered anew, under new offers, and
    what peers offered must be opened again. See wait_attached()."""

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
        reattach: bool = True,
        feeder_cpu: int = -1,
        gpu: int | str | None = None,
        gpu_options: GpuOptions = _GPU_OPTIONS,
        timeout: float = 10.0,
    ) -> Client:
        """Attaches to the daemon at ``socket``, or to that of ``instance`` at its default place (paths.default_socket).

        ``local``: into regions of other clients of the same daemon, whatever the route, bytes are copied from memory to
        memory; without it they go through the daemon and its NICs like all others. ``reattach``: without it the client
        is of no use any more once the daemon has exited.
        ``name`` is shown by the admin commands. ``feeder_cpu``: CPU to pin the feeder thread to, -1 for none. ``gpu``:
        CUDA ordinal or UUID of the rank's GPU; without it the client takes that of the first GPU memory it registers.
        Raises ConnectError (no daemon, no permission, another version, rank out of range or taken, no such GPU),
        ArgumentError."""
        path = _path_of(socket, instance)
        rank, feeder_cpu = _integer(rank, "rank"), _integer(feeder_cpu, "feeder_cpu")
        cpus = os.sysconf("SC_NPROCESSORS_CONF")
        if not -1 <= feeder_cpu < cpus:
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"feeder_cpu {feeder_cpu}; expected -1, or 0 to {cpus - 1}")
        if not isinstance(name, str):
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"name {name!r}: expected text")
        if route not in list(Route):
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"route {route!r}: one of {', '.join(Route)}")
        if not isinstance(gpu_options, GpuOptions):
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"gpu_options {gpu_options!r}: expected {_GPU_OPTIONS}")
        limit_s = seconds(timeout, above_zero=True)
        wish = Wish(path, rank, name, Route(route).number, local, feeder_cpu, gpu, gpu_options, limit_s)
        return cls(wish, reattach=reattach)

    def __init__(self, wish: Wish, *, reattach: bool) -> None:
        self._pid = os.getpid()
        self._wish = wish
        self._reattach = reattach
        self._changed = threading.Condition()  # guards what follows; never held while waiting for a daemon
        self._attachments = 0
        self._regions: list[Region] = []
        self._thread: threading.Thread | None = None
        self._given_up: RelayError | None = None
        self._left: Attachment | None = None  # the latest that has been given up for another
        self._closing = threading.Lock()
        self._stopping = threading.Event()
        self.closed = False
        self.rank = wish.rank
        self.draining = ""  # what a daemon that is going down said
        self.receiver = Receiver()
        self._attachment = self._attach()
        self._use(self._attachment)

    @property
    def session(self) -> str:
        """Of the daemon; another one after a restart, unless its port is configured."""
        return self._attachment.session

    @property
    def rails(self) -> int:
        """How many the node has."""
        return self._attachment.rails

    @property
    def own_rail(self) -> int:
        """That of this rank."""
        return self._attachment.own_rail

    @property
    def attachments(self) -> int:
        """How often this client has attached: another number says that offers are others, and that peers' offers must
        be opened again."""
        return self._attachments

    def wait_attached(self, timeout: float = 30.0) -> int:
        """Sleeps until the daemon is there and knows all regions; returns ``attachments``. After a restart no byte of
        what was under way before lands in this client's regions any more, unless a client of the same node, which
        copies by itself, has not noticed yet: its transfer ends with DAEMON_GONE when it has. A region that this daemon
        does not take (it has fewer rails, or other limits) is over: its offer() says why.

        Raises WaitTimeout; DaemonGone if the client does not attach again (``reattach``, a session that the daemon
        ended, a refusal that waiting does not change)."""
        self._attachment.connection.check_process()
        timeout = seconds(timeout)
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                attachment = self._attachment
                if self.closed:
                    attachment.connection.check()
                if not attachment.gone and not attachment.connection.is_over():
                    return self._attachments
                if self._given_up is not None and self._thread is None:
                    raise DaemonGone(self._given_up.code, self._given_up.text)
                left = deadline - time.monotonic()
                if left <= 0:
                    why = f" ({self._given_up.text})" if self._given_up is not None else ""
                    text = f"no daemon at {self._wish.path} has taken this client again within {timeout:g} s{why}"
                    raise WaitTimeout(ErrorCode.WAIT_TIMEOUT, text)
                self._changed.wait(min(left, _LOOK_S))

    def alloc(self, nbytes: int, *, rail: int | None = None) -> Buffer:
        """New memory that this process and the daemon share, zeroed and registered (see register() for ``rail``): the
        way without a bounce copy on the decode side. Raises RegionError NO_MEMORY."""
        attachment = self._attachment
        attachment.connection.check()
        chosen = self._rail(rail)
        fd, array = shared_memory(nbytes)
        address = int(array.ctypes.data)

        def register(attachment: Attachment, region: Region) -> None:
            new_id = attachment.connection.new_id()
            request = protocol.Register(new_id, address, nbytes, True, 0, chosen, True)
            attachment.register(request, region, (fd,))

        return Buffer(array, self._registered(attachment, Region(register, address, nbytes, array, fd=fd)))

    def register(self, buffer: Any, *, rail: int | None = None, receive: bool = True) -> Region:  # noqa: ANN401
        """Makes memory of this process known as source and, with ``receive``, as destination.

        ``buffer``: contiguous numpy array or other object with the buffer protocol (writable if ``receive``); a torch
        tensor, or what has ``__cuda_array_interface__`` or DLPack, in the memory of this rank's GPU; or a tuple
        (address, bytes) of either, whose memory the caller keeps alive until unregister() has returned. ``rail``: the
        one that serves it, by default the client's own. Register a whole pool once: each registration is a request to
        the daemon. Memory of alloc() is registered already.

        Raises RegionError (the text names the limit), ArgumentError (overlaps a registered region, not contiguous)."""
        attachment = self._attachment
        attachment.connection.check()
        on_gpu = _gpu_memory_of(buffer, writable=receive)
        chosen = self._rail(rail)
        if on_gpu is not None:
            address, nbytes = on_gpu
            at = cuda.where(address)

            def register_gpu(attachment: Attachment, region: Region) -> None:
                attachment.register_gpu(region, address, nbytes, chosen, receive=receive)

            device = cuda.uuid_of(at.ordinal) if at is not None else ""
            return self._registered(attachment, Region(register_gpu, address, nbytes, buffer, device))
        address, nbytes, keep = memory_of(buffer, writable=receive)

        def register(attachment: Attachment, region: Region) -> None:
            if keep is None:  # the caller's: freed meanwhile, it would end this process when it is first used
                check_mapped(address, nbytes, writable=receive)
            new_id = attachment.connection.new_id()
            attachment.register(protocol.Register(new_id, address, nbytes, False, 0, chosen, receive), region)

        return self._registered(attachment, Region(register, address, nbytes, keep))

    def peer(self, session: str, timeout: float = 5.0) -> Peer:
        """The daemon with this session ("host:port" or "[v6]:port"), connected on first use and then kept. Raises
        PeerError (unreachable within ``timeout`` seconds, refused), ArgumentError."""
        return self._attachment.peer(session, seconds(timeout))

    def open(self, offer: bytes, timeout: float = 5.0) -> RemoteRegion:
        """Connects to the peer that an offer comes from and opens it there; see Peer.open()."""
        session, deadline = decode_offer(offer).session, time.monotonic() + seconds(timeout)
        while True:
            try:
                peer = self.peer(session, max(0.0, deadline - time.monotonic()))
                return peer.open(offer, max(0.0, deadline - time.monotonic()))
            except PeerError as failure:
                # The daemon there has restarted, and what was lost is the connection to the one before.
                if failure.code != ErrorCode.PEER_LOST or time.monotonic() > deadline:
                    raise
                time.sleep(_FIRST_PAUSE_S)

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
        plain = notify is None and ready is None and type(tag) is int
        limited = type(timeout) in _NUMBERS and 0 < timeout <= LONGEST_S
        remote = target if type(target) is RemoteRegion else None
        if plain and limited and remote and remote.peer.has_open(remote) and not remote.peer.is_down:
            attachment, one = remote.peer.attachment, type(lengths) is int
            try:
                submission = attachment.core.write_now(
                    remote.peer.index,
                    remote.space,
                    cast(Addresses, sources),
                    cast(Addresses, destinations),
                    None if one else cast(Addresses, lengths),
                    cast(int, lengths) if one else 0,
                    cast(int, tag),
                    nanoseconds(timeout),
                )
                return Transfer(
                    submission, attachment.connection, attachment.completions, cast(int, tag), remote.peer.session
                )
            except core.SubmitError as failure:
                if failure.code == ErrorCode.LIMIT:  # it has waited for as long as it may
                    raise error(failure.code, str(failure)) from None
            except (TypeError, ValueError, OverflowError):
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
        """Counters of this client's data path since it attached; times end in _ns."""
        attachment = self._attachment
        attachment.connection.check_process()
        return attachment.core.counters()

    def close(self) -> None:
        """Ends the session: running transfers end with CLIENT_GONE, regions are withdrawn. Idempotent."""
        if os.getpid() != self._pid:
            self._attachment.connection.close()  # a forked child has only copies of descriptors
            return
        with self._closing:
            if self.closed:
                return
            self._stopping.set()
            with self._changed:
                self.closed = True
                thread = self._thread
            if thread is not None:
                thread.join()
            self._attachment.end(Result.CLIENT_GONE)
            self.receiver.notifications.end()
            for region in self._regions:
                region.forget()
            self._regions.clear()
            with self._changed:
                self._changed.notify_all()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client(rank {self.rank}, {self.session})"

    @property
    def attachment(self) -> Attachment:
        """The present one, for the rest of the library and its tests."""
        return self._attachment

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

    # ---- attaching, and attaching again ----

    def _attach(self) -> Attachment:
        return Attachment(self._wish, self.receiver.notifications.put, self._lost, self._drains)

    def _drains(self, text: str) -> None:
        self.draining = text

    def _use(self, attachment: Attachment) -> None:
        with self._changed:
            self._attachment = attachment
            self._attachments += 1
            self._thread = self._given_up = None
            self.draining = ""
            self.receiver.attach(attachment.connection)
            if attachment.gone:
                self._begin_again(attachment)
            self._changed.notify_all()

    def _lost(self, attachment: Attachment) -> None:
        """Its control thread."""
        with self._changed:
            if getattr(self, "_attachment", None) is attachment and not self.closed:
                self._begin_again(attachment)

    def _begin_again(self, attachment: Attachment) -> None:
        """Holding ``_changed``. What the daemon ended for a reason that it gave is not asked for again."""
        if self._left is attachment:  # _use() and its control thread have both seen its end
            return
        self._left = attachment
        self.receiver.notifications.end()
        if not self._reattach or attachment.connection.was_ended():
            self._given_up = attachment.connection.failure
        else:
            thread = threading.Thread(
                target=self._attach_again, args=[attachment], name="railrelay-reattach", daemon=True
            )
            try:
                thread.start()
                self._thread = thread
            except RuntimeError as failure:
                self._given_up = ConnectError(ErrorCode.LIMIT, f"this client cannot attach again: {failure}")
        self._changed.notify_all()

    def _attach_again(self, old: Attachment) -> None:
        old.end(Result.DAEMON_GONE)  # from here on nothing that was under way is written into regions
        pause_s = _FIRST_PAUSE_S
        refused_since_s: dict[Region, float] = {}
        while not self._stopping.wait(pause_s * random.uniform(0.5, 1.0)):
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            attachment = None
            try:
                attachment = self._attach()
                faults.point("client.reattach.connected")
                self._register_again(attachment, refused_since_s)
            except Exception as failure:  # noqa: BLE001 - whatever it was, the next try may do
                if attachment is None:
                    refused_since_s.clear()  # by a daemon that is not there any more
                else:
                    attachment.end(Result.DAEMON_GONE)
                text = f"attaching again: {type(failure).__name__}: {failure}"
                reason = failure if isinstance(failure, RelayError) else ConnectError(ErrorCode.INTERNAL, text)
                with self._changed:
                    self._given_up = reason
                    if attachment is None and reason.code in _FINAL:
                        self._thread = None
                        self._changed.notify_all()
                        return
            else:
                self._use(attachment)
                return
        with self._changed:
            self._thread = None

    def _register_again(self, attachment: Attachment, refused_since_s: dict[Region, float]) -> None:
        """All regions but those that this daemon will not take, which end. Raises why it is to be tried again."""
        waiting: list[RelayError] = []
        for region in list(self._regions):
            try:
                region.register_again(attachment)
                refused_since_s.pop(region, None)
            except (DaemonGone, ConnectError, WaitTimeout):
                raise
            except RelayError as failure:
                attachment.connection.check()
                now_s = time.monotonic()
                if failure.code in _FINAL_OF_REGIONS or now_s - refused_since_s.setdefault(region, now_s) > _PATIENCE_S:
                    region.refused(attachment, failure)
                else:
                    waiting.append(failure)
        if waiting:
            raise waiting[0]

    def _registered(self, attachment: Attachment, region: Region) -> Region:
        """Registered now and, until it is unregistered, with each daemon to come."""
        with self._changed:  # first: should the daemon exit right after its answer, the next one has to know
            self._regions = [known for known in self._regions if not known.is_over]
            self._regions.append(region)
        try:
            region.register(attachment)
        except BaseException:
            region.forget()
            raise
        return region


def _path_of(socket: object, instance: object) -> Path:
    if isinstance(socket, str | os.PathLike):
        return Path(socket)
    if socket is None and isinstance(instance, str):
        return default_socket(instance)
    text = f"socket {socket!r}, instance {instance!r}: expected a path, or None and text"
    raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)


def _integer(value: int, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{name} {value!r}: expected an integer") from None


def _gpu_memory_of(buffer: Any, *, writable: bool) -> tuple[int, int] | None:  # noqa: ANN401
    """(address, bytes) if it is GPU memory."""
    if not isinstance(buffer, tuple):
        return cuda.gpu_memory_of(buffer, writable=writable)
    address, nbytes = span_of(buffer)
    if cuda.in_use() and not cuda.missing() and cuda.where(address) is not None:
        return address, nbytes
    return None
