"""Peers: the daemons of other nodes, the regions opened there, and writing into them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from railrelay.client import core, protocol
from railrelay.client.connection import LOCAL_TIMEOUT_S, close_all
from railrelay.client.errors import ArgumentError, Busy, ErrorCode, PeerError, RegionError, RelayError, error
from railrelay.client.layout import PageLayout, addresses, page_numbers
from railrelay.client.regions import RemoteRegion, decode_offer
from railrelay.client.timeouts import nanoseconds, seconds
from railrelay.client.transfer import Transfer, core_errors, tag_of
from railrelay.shm_layout import faults

if TYPE_CHECKING:
    from railrelay.client.attachment import Attachment
    from railrelay.client.connection import Connection

Ready: TypeAlias = object  # core.HostEvent, a CUDA stream or event, or None

# Processes behind one daemon have address spaces of their own, and equal addresses (CUDA's always are). The core sees
# one space per peer, so the number of the process goes above bit 56, which no user address reaches.
_SPACE_SHIFT: Final = 56
_SPACES: Final = 256
_LET_GO_S: Final = 2.0


class RemoteGpuMemory(Protocol):
    """How GPU memory of another client of the same daemon is mapped here."""

    def open_remote(self, opened: protocol.RegionOpened, fds: list[int]) -> None: ...
    def prepare_local(self) -> None:
        """If there is a GPU in use: it may be the source, whatever the destination is."""

    def close_remote(self, index: int) -> None:
        """Nothing is copied there any more. For host memory too, where there is nothing to do."""


class RemoteTable:
    """The open regions of all peers of a client, as the core knows them. Its lock is never held while waiting."""

    def __init__(self, core: core.ClientCore, connection: Connection, gpu: RemoteGpuMemory) -> None:
        self._core = core
        self._gpu = gpu
        self._connection = connection
        self._lock = threading.Lock()
        self._open: dict[int, list[RemoteRegion]] = {}  # by index: each was opened by another offer of one registration
        self._closing: dict[int, RemoteRegion] = {}  # closed here; transfers in flight still name them
        self._last_space = 0
        self._ended = False
        self.any_local = False  # some region was one of the same node
        self.asked = False  # for a region that may be one of the same node

    def of(self, peer: Peer) -> list[RemoteRegion]:
        with self._lock:
            return [remote for remotes in self._open.values() for remote in remotes if remote.peer is peer]

    def is_open(self, remote: RemoteRegion) -> bool:
        return remote in self._open.get(remote.index, ())

    def add(self, peer: Peer, opened: protocol.RegionOpened, capability: bytes, fds: list[int]) -> RemoteRegion:
        """Control thread; owns the descriptors. Another offer of a registration that is known shares its index. A
        region of the same process that overlaps is an earlier registration, and closed."""
        faults.point("client.remote.opened")
        try:
            with self._lock:
                self._check_open()
                shared = self._share(peer, opened, capability)
            if shared is not None:
                self._connection.tell(protocol.CloseRegion(self._connection.new_id(), opened.remote))
                return shared
            self._map(opened, fds)
            with self._lock:
                self._check_open()
                self._supersede(peer, opened)
                remote = RemoteRegion(peer, opened, self._space(peer, opened.owner), capability)
                with core_errors():
                    self._core.add_remote(
                        remote.index,
                        peer.index,
                        remote.space + remote.address,
                        remote.nbytes,
                        remote.rail,
                        remote.owner,
                        opened.window_bytes,
                        opened.window_runs,
                        bool(opened.handle),
                        opened.memory == "device",
                    )
                self._open[remote.index] = [remote]
                return remote
        except BaseException:
            self._unmap(opened.remote)
            self._connection.tell(protocol.CloseRegion(self._connection.new_id(), opened.remote))
            raise
        finally:
            close_all(fds)

    def _supersede(self, peer: Peer, opened: protocol.RegionOpened) -> None:
        """Holding the lock. Busy."""
        for index, (other, *_) in list(self._open.items()):
            if _overlap(other, peer, opened):
                self._closing[index] = other
                del self._open[index]
        self._end_closing_soon()
        if any(_overlap(other, peer, opened) for other in self._closing.values()):
            raise Busy(ErrorCode.BUSY, f"an earlier registration of {opened.address:#x} still has transfers")

    def _share(self, peer: Peer, opened: protocol.RegionOpened, capability: bytes) -> RemoteRegion | None:
        """Holding the lock. Whoever opened the other offer need not know, and may close its own."""
        known = (*(remotes[0] for remotes in self._open.values()), *self._closing.values())
        for other in known:
            if other.peer is peer and other.export == opened.export and not other.withdrawn:
                remote = other.opened_again(capability)
                self._open.setdefault(other.index, []).append(remote)
                self._closing.pop(other.index, None)
                return remote
        return None

    def _check_open(self) -> None:
        if self._ended:
            raise RelayError(ErrorCode.CLOSED, "this Client is closed")

    def _map(self, opened: protocol.RegionOpened, fds: list[int]) -> None:
        """RegionError."""
        try:
            if opened.handle == "shm":
                self._core.map_remote(opened.remote, fds[0], opened.offset, opened.bytes)
            elif opened.handle:
                self._gpu.open_remote(opened, fds)
            if opened.handle:
                self.any_local = True
                self._gpu.prepare_local()
        except OSError as failure:
            text = f"{opened.bytes} bytes of a region of the same node cannot be mapped: {failure.strerror}"
            raise RegionError(ErrorCode.NO_MEMORY, text) from None

    def close(self, remote: RemoteRegion) -> None:
        with self._lock:
            if self._ended:
                return
            if self.is_open(remote):
                self._open[remote.index].remove(remote)
                if not self._open[remote.index]:
                    del self._open[remote.index]
                    self._closing[remote.index] = remote
            self._end_closing_soon()

    def look(self) -> bool:
        """Control thread: whether transfers still name regions that are closed."""
        with self._lock:
            if not self._ended:
                self._end_closing()
            return bool(self._closing) and not self._ended

    def gone(self, index: int) -> None:
        """Control thread: the peer withdrew the region."""
        self._unmap(index)
        faults.point("client.remote.unmapped")
        with self._lock:
            if index in self._open:
                self._closing[index] = self._open.pop(index)[0]
            if index not in self._closing:  # CloseRegion has said it, and the index may be another region's by now
                return
            self._closing[index].withdrawn = True
            self._connection.tell(protocol.LetGo(self._connection.new_id(), [index]))
            self._end_closing_soon()

    def let_go(self) -> None:
        """At the end of the session: unmaps every region of the same node, and tells the daemon."""
        with self._lock:
            self._ended = True
            for index in (*self._open, *self._closing):
                self._unmap(index)
        if self.asked:
            with contextlib.suppress(RelayError):
                self._connection.ask(protocol.LetGo(self._connection.new_id(), []), protocol.Done, _LET_GO_S)

    def _unmap(self, index: int) -> None:
        if self._core.unmap_remote(index):
            with contextlib.suppress(RelayError):  # a lost context has let go of its mappings by itself
                self._gpu.close_remote(index)

    def _end_closing_soon(self) -> None:
        """Now, or when the transfers have ended."""
        self._end_closing()
        if self._closing:
            self._connection.look_soon()

    def _end_closing(self) -> None:
        """An index is given back only when no transfer names it: the daemon may then use it for another region."""
        for index in list(self._closing):
            with contextlib.suppress(Busy), core_errors():
                self._core.remove_remote(index)
                self._unmap(index)
                del self._closing[index]
                self._connection.tell(protocol.CloseRegion(self._connection.new_id(), index))

    def _space(self, peer: Peer, owner: int) -> int:
        spaces = {
            remote.owner: remote.space
            for remote in (*(remotes[0] for remotes in self._open.values()), *self._closing.values())
            if remote.peer.index == peer.index
        }
        if owner in spaces:
            return spaces[owner]
        # The one that was free for longest: a write that began before its region was closed must not find that of
        # another process, at the same address, in its place.
        for step in range(1, _SPACES + 1):
            space = (self._last_space + step) % _SPACES << _SPACE_SHIFT
            if space not in spaces.values():
                self._last_space = space >> _SPACE_SHIFT
                return space
        text = f"regions of {_SPACES} processes of {peer.session} are open; close those of one"
        raise RegionError(ErrorCode.LIMIT, text)


def _overlap(remote: RemoteRegion, peer: Peer, opened: protocol.RegionOpened) -> bool:
    return (
        remote.peer.index == peer.index
        and remote.owner == opened.owner
        and remote.address < opened.address + opened.bytes
        and opened.address < remote.address + remote.nbytes
    )


class Peer:
    """A peer's daemon, made by Client.peer(). Any number of threads may call. PeerError PEER_LOST once it restarted or
    is gone: ask Client.peer() again and open the regions anew."""

    def __init__(self, attachment: Attachment, session: str, index: int) -> None:
        self.attachment = attachment  # a Peer ends with it
        self._opening = threading.Lock()
        self._down = ""
        self.session = session
        self.index = index

    @property
    def is_down(self) -> bool:
        """Its daemon restarted or is gone: open the peer and its regions again."""
        return bool(self._down)

    @property
    def regions(self) -> list[RemoteRegion]:
        """Those that are open."""
        return self.attachment.remotes.of(self)

    def has_open(self, remote: RemoteRegion) -> bool:
        """Whether it may be written."""
        return self.attachment.remotes.is_open(remote)

    def open(self, offer: bytes, timeout: float = LOCAL_TIMEOUT_S) -> RemoteRegion:
        """Exchanges an offer for the right to write into the region. The same offer gives the same object; another
        offer of the region one of its own, which is closed by itself. Raises RegionError (unknown or withdrawn offer),
        PeerError, ArgumentError, WaitTimeout."""
        content, timeout = decode_offer(offer), seconds(timeout)
        with self._opening:
            self._check_up()
            known = [remote for remote in self.regions if remote.capability == content.capability]
            if known:
                return known[0]
            if self.attachment.local:
                self.attachment.prepare_local()  # here, and not on the control thread: it may take a second
            connection = self.attachment.connection
            request = protocol.OpenRegion(connection.new_id(), self.index, content.capability, self.attachment.local)
            self.attachment.remotes.asked |= self.attachment.local
            remote: RemoteRegion = connection.ask_then(
                request,
                protocol.RegionOpened,
                lambda opened, fds: self.attachment.remotes.add(self, opened, content.capability, fds),
                timeout,
            )
            with core_errors():
                self.attachment.core.populate_remote(remote.index)
            return remote

    def write(
        self,
        sources: npt.ArrayLike,
        destinations: npt.ArrayLike,
        lengths: npt.ArrayLike,
        *,
        tag: int | bytes | str = 0,
        timeout: float = 30.0,
        notify: bytes | None = None,
        ready: Ready = None,
        within: RemoteRegion | None = None,
    ) -> Transfer:
        """Begins to write blocks: ``lengths[i]`` bytes from local address ``sources[i]`` to the peer's address
        ``destinations[i]``; three array-likes of integers [n], or one length for all. Any n, any length above 0.

        The memory must be registered here and open there, and must not change before ``source_done``. Destinations of
        one call must not overlap. ``tag`` (see tag_of) is what the decode engine can abort by. After ``timeout`` s the
        transfer ends with TIMED_OUT. ``notify``: payload that the decode engine's receiver gets, with the tag, once all
        is placed. ``ready``: no source byte is read before this HostEvent is set, or this CUDA event or what this CUDA
        stream was given so far has completed. ``within``: any region of the process at the peer that the
        destinations belong to; needed if regions of several processes are open.

        Raises ArgumentError (names the block), PeerError, DaemonGone. The first call to a rail leases its lane."""
        source = addresses(sources, "sources")
        destination = addresses(destinations, "destinations")
        every = np.ndim(lengths) == 0
        length = addresses([lengths] if every else lengths, "lengths")
        if len(source) != len(destination) or not (every or len(length) == len(source)):
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"{len(source)} sources, {len(destination)} destinations, {len(length)} lengths; expected equal",
            )
        tag, timeout_ns, remote = self._prepare(tag, timeout, notify, within)
        event = self.attachment.event_of(ready)
        return self._submit(
            lambda: self.attachment.core.reserve(
                self.index,
                source,
                destination,
                length,
                space=remote.space,
                tag=tag,
                timeout_ns=timeout_ns,
                note=notify is not None,
                ready=event,
            ),
            tag,
            notify,
            remote,
        )

    def write_pages(
        self,
        source: PageLayout,
        source_pages: npt.ArrayLike,
        destination: PageLayout,
        destination_pages: npt.ArrayLike,
        *,
        tag: int | bytes | str = 0,
        timeout: float = 30.0,
        notify: bytes | None = None,
        ready: Ready = None,
        within: RemoteRegion | None = None,
    ) -> Transfer:
        """Begins to write page ``source_pages[i]`` to page ``destination_pages[i]``, all rows of it: two array-likes of
        page numbers [n]. The layouts have equally many rows and the same ``piece_bytes``. Otherwise as write()."""
        from_pages = page_numbers(source_pages, "source_pages")
        to_pages = page_numbers(destination_pages, "destination_pages")
        if len(from_pages) != len(to_pages):
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"{len(from_pages)} source_pages, {len(to_pages)} destination_pages; expected as many of each",
            )
        if len(source.rows) != len(destination.rows) or source.piece_bytes != destination.piece_bytes:
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"source layout has {len(source.rows)} rows of {source.piece_bytes} bytes, destination layout"
                f" {len(destination.rows)} of {destination.piece_bytes}; take rows and heads that are equal",
            )
        starts = destination.starts()
        _check_space(starts, int(to_pages.max(initial=0)) * destination.page_stride)
        tag, timeout_ns, remote = self._prepare(tag, timeout, notify, within)
        event = self.attachment.event_of(ready)
        return self._submit(
            lambda: self.attachment.core.reserve_pages(
                self.index,
                source.starts(),
                source.page_stride,
                from_pages,
                starts + np.uint64(remote.space),
                destination.page_stride,
                to_pages,
                source.piece_bytes,
                tag=tag,
                timeout_ns=timeout_ns,
                note=notify is not None,
                ready=event,
            ),
            tag,
            notify,
            remote,
        )

    def read(self, *_: Any, **__: Any) -> NoReturn:  # noqa: ANN401
        """Not a goal: a node only writes into memory that was offered to it."""
        raise RelayError(
            ErrorCode.NOT_SUPPORTED, "railrelay does not read from peers; offer a region and let the peer write into it"
        )

    def close_region(self, remote: RemoteRegion) -> None:
        """Gives up the right to write into a region. Idempotent; waits for no transfer."""
        self.attachment.remotes.close(remote)

    def lost(self, text: str) -> None:
        """Control thread: the daemon there restarted or is gone."""
        self._down = text
        for remote in self.regions:
            remote.close()

    def _prepare(
        self, tag: int | bytes | str, timeout: float, notify: bytes | None, within: RemoteRegion | None
    ) -> tuple[int, int, RemoteRegion]:
        """(tag, time-out in ns, a region of the process that is written to)"""
        timeout = seconds(timeout, above_zero=True)
        if notify is not None and not isinstance(notify, bytes):
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, f"notify is {type(notify).__name__}; expected bytes")
        if notify is not None and len(notify) > protocol.NOTE_BYTES:
            text = f"notify has {len(notify)} bytes; at most {protocol.NOTE_BYTES}"
            raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
        self._check_up()
        if within is None:
            within = self._only_process()
        elif within.peer is not self or not self.attachment.remotes.is_open(within):
            raise ArgumentError(ErrorCode.BAD_REGION, f"{within} is not open at {self.session}")
        return tag_of(tag), nanoseconds(timeout), within

    def _only_process(self) -> RemoteRegion:
        """Some region of the one process whose regions are open."""
        remotes = self.regions
        owners = {remote.owner for remote in remotes}
        if len(owners) > 1:
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"regions of {len(owners)} processes of {self.session} are open; say by within= which process is meant",
            )
        if not remotes:
            text = f"no region of {self.session} is open; open() an offer of it first"
            raise ArgumentError(ErrorCode.BAD_REGION, text)
        return remotes[0]

    def _submit(
        self, reserve: Callable[[], core.Submission], tag: int, notify: bytes | None, remote: RemoteRegion
    ) -> Transfer:
        attachment, connection = self.attachment, self.attachment.connection
        submission = self._reserve(reserve)
        if notify is not None:
            note = protocol.Note(
                connection.new_id(), submission.index, submission.generation, remote.index, tag, notify
            )
            try:
                connection.ask(note, protocol.Done)
            except BaseException:
                submission.cancel()
                raise
            faults.point("client.transfer.noted")
        submission.publish()
        return Transfer(submission, connection, attachment.completions, tag, self.session)

    def _reserve(self, reserve: Callable[[], core.Submission]) -> core.Submission:
        while True:
            try:
                return reserve()
            except core.SubmitError as failure:
                if failure.code != ErrorCode.NO_LANE:
                    raise error(failure.code, str(failure)) from None
                self.attachment.lease_lane(failure.rail)

    def _check_up(self) -> None:
        self.attachment.connection.check()
        if self._down:
            raise PeerError(ErrorCode.PEER_LOST, f"peer {self.session}: {self._down}")


def _check_space(destinations: npt.NDArray[np.uint64], reach: int) -> None:
    highest = int(destinations.max(initial=0)) + reach
    if highest >> _SPACE_SHIFT:
        raise ArgumentError(ErrorCode.BAD_ADDRESS, f"destination {highest:#x} is no user address")
