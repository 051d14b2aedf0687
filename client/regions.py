"""Memory: registered regions of this process, memory that the daemon can map, offers, and regions of peers."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import mmap
import operator
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from railrelay.client import cuda, protocol
from railrelay.client.connection import LOCAL_TIMEOUT_S
from railrelay.client.errors import ArgumentError, Busy, DaemonGone, ErrorCode, RegionError, RelayError, WaitTimeout
from railrelay.client.timeouts import seconds
from railrelay.client.transfer import core_errors
from railrelay.shm_layout import faults

if TYPE_CHECKING:
    from railrelay.client.attachment import Attachment
    from railrelay.client.peers import Peer

_REPLY_MARGIN_S: Final = 1.0
_MADV_POPULATE_WRITE: Final = 23
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Addressed(Protocol):
    """What has an address and a size in bytes: Region, Buffer, RemoteRegion."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a peer needs to write into a region. It is a secret of the two engines; see Region.offer()."""

    session: str
    capability: bytes
    address: int
    nbytes: int
    rail: int


def decode_offer(offer: bytes) -> Offer:
    try:
        return msgspec.msgpack.decode(offer, type=Offer)
    except msgspec.MsgspecError as failure:
        raise ArgumentError(
            ErrorCode.BAD_ARGUMENT, f"not an offer ({failure}); pass the bytes of Region.offer() unchanged"
        ) from None


class Region:
    """Registered memory of this process; made by Client.register(). ``address`` is virtual, ``rail`` the one that
    serves it, ``device`` the UUID of its GPU ("" for host memory). Register once, not per request; after a restart of
    the daemon the client registers it again, by itself."""

    def __init__(
        self,
        register: Callable[[Attachment, Region], None],
        address: int,
        nbytes: int,
        keep: object,
        device: str = "",
        *,
        fd: int = -1,
    ) -> None:
        """``register(attachment, region)``: asks a daemon for it. ``fd``: what that needs, owned by the region."""
        self._register = register
        self._attachment: Attachment | None = None
        self._capability = b""
        self._keep = keep  # the memory must outlive the registration
        self._fd = fd
        self._in_core = False
        self._registered = False
        self._refusal: RelayError | None = None
        self._lock = threading.Lock()  # of who registers or unregisters
        self.is_over = False
        self.index = -1
        self.rail = -1
        self.address = address
        self.nbytes = nbytes
        self.device = device

    @property
    def is_registered(self) -> bool:
        """From register() until unregister()."""
        return self._registered

    def offer(self, *, to: str | None = None) -> bytes:
        """Bytes for the peer's engine, by the engines' own channel; it passes them to Client.open(). They hold until
        the daemon of this node ends.

        Whoever holds them may write into the region, from any node that the daemon lets in. With ``to``, the session of
        one daemon (Client.session of its engines), no other daemon can open it; each session gets an offer of its own.
        How far a session is to be believed, README's "Who may do what" says. Raises RegionError (also for a region that
        the daemon did not take when the client attached again), PeerError, and DaemonGone while there is no daemon."""
        attachment = self._attachment
        if self._refusal is not None:
            text = (
                f"{self} is not registered any more, since the daemon that came did not take it: {self._refusal.text}"
            )
            raise RegionError(self._refusal.code, text)
        if attachment is None or not self._registered:
            raise RegionError(ErrorCode.REGION_GONE, f"{self} is not registered any more")
        connection, capability = attachment.connection, self._capability
        connection.check()
        if to is not None:
            request = protocol.OfferRegion(connection.new_id(), self.index, to)
            capability = connection.ask(request, protocol.Offered).capability
        return msgspec.msgpack.encode(Offer(attachment.session, capability, self.address, self.nbytes, self.rail))

    def unregister(self, timeout: float = 5.0) -> None:
        """Ends the registration; once it returns nobody reads or writes the memory, and peers' writes are refused.

        Waits up to ``timeout`` seconds for transfers that still use the region, then raises Busy; call it again later.
        Idempotent."""
        deadline = time.monotonic() + seconds(timeout)
        pause = 0.0005
        while self._registered:
            try:
                with self._lock:
                    self._unregister(min(LOCAL_TIMEOUT_S, max(0.0, deadline - time.monotonic()) + _REPLY_MARGIN_S))
            except Busy:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.05)

    def _unregister(self, timeout: float = LOCAL_TIMEOUT_S) -> None:
        attachment = self._attachment
        if attachment is None or not self._registered:
            return
        connection = attachment.connection
        connection.check_process()
        if self._in_core and not attachment.has_ended:
            # First, so that no transfer begins that reads it while the daemon lets go of it.
            try:
                with core_errors():
                    attachment.core.remove_region(self.index)
            except RelayError as failure:
                if not _is_over(failure):
                    raise
                if not attachment.has_ended:
                    text = f"{self}: the threads that may be reading or writing it are being stopped"
                    raise Busy(ErrorCode.BUSY, text) from None
        self._in_core = False
        faults.point("client.region.removed")
        request = protocol.Unregister(connection.new_id(), self.index)
        try:
            connection.ask_then(request, protocol.Done, lambda *_: self._ended(attachment), timeout)
        except WaitTimeout as failure:
            raise Busy(ErrorCode.BUSY, f"{self}: {failure.text}") from None
        except RelayError as failure:
            if _is_over(failure):  # nobody is left who could use it
                self._ended(attachment)
            elif self._registered:  # else an earlier request was answered late
                raise

    def _ended(self, attachment: Attachment) -> None:
        """Any thread."""
        self._registered = False
        attachment.held_regions.pop(self.index, None)
        self.forget()

    # ---- for Client and Attachment ----

    def register(self, attachment: Attachment) -> None:
        """RelayError, OSError: it is not registered then."""
        with self._lock:
            try:
                self._register(attachment, self)
            except BaseException:
                self._unregister()
                raise

    def register_again(self, attachment: Attachment) -> None:
        """The same with another daemon, if it is registered still."""
        with self._lock:
            if self._registered:
                self._register(attachment, self)

    def refused(self, attachment: Attachment, refusal: RelayError) -> None:
        """By that daemon, for good."""
        with self._lock:
            if self._attachment is attachment:  # it had it, and something after that failed
                self._unregister()
            self._refusal, self._registered = refusal, False
            self.forget()

    def registered(self, attachment: Attachment, reply: protocol.Registered) -> None:
        """Control thread: the daemon has it."""
        self.index, self.rail, self._capability = reply.region, reply.rail, reply.capability
        self._attachment = attachment
        self._in_core = self._registered = True

    def forget(self) -> None:
        """It is not registered any more, and will not be. Idempotent, any thread."""
        self.is_over = True
        self._keep = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"Region({self.address:#x} +{self.nbytes}, rail {self.rail})"


class Buffer:
    """Memory that this process and the daemon both map (a sealed memfd): the daemon sends from it and places bytes in
    it without a copy by the client. Made and registered by Client.alloc(). ``array`` is a writable view, uint8."""

    def __init__(self, array: npt.NDArray[np.uint8], region: Region) -> None:
        self.array = array
        self.region = region
        self.address = region.address
        self.nbytes = region.nbytes

    def offer(self, *, to: str | None = None) -> bytes:
        """What a peer's engine needs to write into it; see Region.offer."""
        return self.region.offer(to=to)

    def close(self, timeout: float = 5.0) -> None:
        """Unregisters (see Region.unregister) and drops the mapping, which ends with the last view of ``array``.
        Idempotent."""
        self.region.unregister(timeout)
        self.array = np.empty(0, np.uint8)

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shared_memory(nbytes: int) -> tuple[int, npt.NDArray[np.uint8]]:
    """(descriptor, mapping) of new memory that can neither shrink nor grow; the descriptor is the caller's."""
    if nbytes <= 0:
        raise ArgumentError(ErrorCode.BAD_LENGTH, f"alloc of {nbytes} bytes; expected 1 or more")
    available = _available_bytes()
    if nbytes > available:  # memfds have no limit of their own: without this the kernel would kill processes instead
        text = f"alloc of {nbytes} bytes of shared memory: {available} bytes are available"
        raise RegionError(ErrorCode.NO_MEMORY, text)
    fd = os.memfd_create("railrelay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # a file that shrinks is a SIGBUS in the daemon
        mapped = mmap.mmap(fd, nbytes)
        with contextlib.suppress(OSError):  # a kernel before 5.14: the pages are mapped on first use
            mapped.madvise(_MADV_POPULATE_WRITE)
        return fd, np.frombuffer(mapped, np.uint8)
    except OSError as failure:
        os.close(fd)
        text = f"alloc of {nbytes} bytes of shared memory: {failure.strerror}"
        raise RegionError(ErrorCode.NO_MEMORY, text) from None


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


class RemoteRegion:
    """A region of a peer that this client may write; made by Peer.open(). ``address`` is the one its owner uses; it is
    valid together with ``owner``, the process there that it belongs to."""

    def __init__(self, peer: Peer, opened: protocol.RegionOpened, space: int, capability: bytes) -> None:
        self.peer = peer
        self.index = opened.remote
        self.address = opened.address
        self.nbytes = opened.bytes
        self.rail = opened.rail
        self.owner = opened.owner
        self.export = opened.export
        self.space = space  # what the core's addresses of this process are raised by
        self.capability = capability
        self.withdrawn = False

    def close(self) -> None:
        """Later writes to the region are refused here. Idempotent."""
        self.peer.close_region(self)

    def opened_again(self, capability: bytes) -> RemoteRegion:
        """The same, by another offer."""
        other = copy.copy(self)
        other.capability = capability
        return other

    def __repr__(self) -> str:
        return f"RemoteRegion({self.address:#x} +{self.nbytes}, rail {self.rail}, {self.peer.session})"


def _is_over(failure: RelayError) -> bool:
    """The daemon is gone, or the client closed."""
    return isinstance(failure, DaemonGone) or failure.code == ErrorCode.CLOSED


def check_mapped(address: int, nbytes: int, *, writable: bool) -> None:
    """What is not memory of this process would end it when it is first used."""
    end, at = address + nbytes, address
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, *_ = line.split(maxsplit=2)
        first, last = (int(edge, 16) for edge in span.split("-"))
        if first <= at < last and access[0] == "r" and (access[1] == "w" or not writable):
            at = last
        if at >= end:
            return
    needed = "readable and writable" if writable else "readable"
    text = f"({address:#x}, {nbytes}): no {needed} memory of this process at {at:#x}"
    if cuda.in_use():  # else nothing here can be a GPU's
        lack = cuda.missing()
        text += f"; if it is a GPU's: {lack}" if lack else ", nor of a GPU"
    raise ArgumentError(ErrorCode.BAD_ADDRESS, text)


def span_of(pair: tuple[Any, ...]) -> tuple[int, int]:
    """(address, bytes) as engines pass it."""
    try:
        address, nbytes = map(operator.index, pair)
    except (TypeError, ValueError):
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"{pair!r}: expected (address, bytes), two integers") from None
    if address <= 0 or nbytes <= 0 or address + nbytes > 1 << 64:
        text = f"({address:#x}, {nbytes}): expected an address and a size above 0, 2**64 at most together"
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
    return address, nbytes


def memory_of(buffer: Any, *, writable: bool) -> tuple[int, int, object]:  # noqa: ANN401
    """(address, bytes, object to keep) of contiguous memory with the buffer protocol, or of (address, bytes)."""
    if isinstance(buffer, tuple):
        address, nbytes = span_of(buffer)
        return address, nbytes, None
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError):
        raise ArgumentError(
            ErrorCode.BAD_ARGUMENT,
            f"{type(buffer).__name__} has no buffer protocol; pass an array or (address, bytes)",
        ) from None
    if not view.c_contiguous or not view.nbytes:
        raise ArgumentError(
            ErrorCode.BAD_ARGUMENT,
            f"memory of shape {view.shape} and strides {view.strides} is empty or not contiguous; register the whole",
        )
    if view.format == "O" or getattr(getattr(buffer, "dtype", None), "hasobject", False):
        text = "an array of Python objects: its bytes are pointers of this process; register an array of numbers"
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
    if writable and view.readonly:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, cuda.READ_ONLY)
    return int(np.frombuffer(view, np.uint8).ctypes.data), view.nbytes, view
