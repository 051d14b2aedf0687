"""Segments in POSIX shared memory, as Python sees them: made by the daemon, read by it and by the admin commands.

A segment is created exclusively, filled, and published by its version word last; a reader finds areas through the table
in the header only. Words have one writer each (abi.h); a word read here is one load, so counters are never torn.
Times in the node segment and in headers (``*_ns``) are Unix time.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import posix_ipc

from railrelay.shm_layout import abi

Value = int | str | tuple[int, ...]

_FORMATS: Final = {"u16": "H", "u32": "I", "i32": "i", "u64": "Q"}
_SHM_DIRECTORY: Final = "/dev/shm"
_ENDED: Final = "ZX"


class SegmentState(enum.Enum):
    """What an opener finds. Only READY may be read; UNSIZED and UNPUBLISHED become READY soon, or the creator died."""

    ABSENT = "does not exist"
    UNSIZED = "has no size yet"
    UNPUBLISHED = "is not published yet"
    FOREIGN = "is not a railrelay segment"
    INCOMPATIBLE = "has another major version"
    TRUNCATED = "is smaller than it says"
    READY = "is ready"


class ClientState(enum.IntEnum):
    """client_state.state"""

    FREE = 0
    ATTACHED = 1
    DRAINING = 2


class PeerState(enum.IntEnum):
    """peer_state.state"""

    FREE = 0
    CONNECTING = 1
    CONNECTED = 2
    LOST = 3


class SegmentError(Exception):
    """The segment cannot be used; ``state`` says why, the text what to do."""

    def __init__(self, state: SegmentState, text: str) -> None:
        super().__init__(text)
        self.state = state


class NoSharedMemory(OSError):
    """Shared memory is full; the text names bytes wanted and free."""


class AreaPlan(NamedTuple):
    """An area to lay out: ``elements`` of ``per_element`` structures each."""

    area: int
    structure: str
    elements: int
    per_element: int = 1

    @property
    def stride(self) -> int:
        return abi.SIZES[self.structure] * self.per_element


class Area:
    """Typed access to an array of one structure in a mapped segment."""

    def __init__(self, buffer: memoryview, structure: str, offset: int, stride: int, count: int) -> None:
        self.structure = structure
        self.count = count
        self.offset = offset
        self._buffer = buffer
        self.stride = stride
        self._fields = abi.FIELDS[structure]

    def get(self, row: int, field: str) -> int:
        facts = self._fields[field]
        value: int = struct.unpack_from(_FORMATS[facts.ctype], self._buffer, self._at(row, facts))[0]
        return value

    def set(self, row: int, field: str, value: int) -> None:
        facts = self._fields[field]
        struct.pack_into(_FORMATS[facts.ctype], self._buffer, self._at(row, facts), value)

    def array(self, row: int, field: str) -> tuple[int, ...]:
        facts = self._fields[field]
        return struct.unpack_from(f"{facts.count}{_FORMATS[facts.ctype]}", self._buffer, self._at(row, facts))

    def text(self, row: int, field: str) -> str:
        facts = self._fields[field]
        at = self._at(row, facts)
        return bytes(self._buffer[at : at + facts.size]).split(b"\0", 1)[0].decode(errors="replace")

    def set_text(self, row: int, field: str, text: str) -> None:
        """Longer text is cut; the last byte stays zero."""
        facts = self._fields[field]
        at = self._at(row, facts)
        raw = text.encode()[: facts.size - 1].decode(errors="ignore").encode()
        self._buffer[at : at + facts.size] = raw.ljust(facts.size, b"\0")

    def write(self, row: int, **values: int | str) -> None:
        for field, value in values.items():
            if isinstance(value, str):
                self.set_text(row, field, value)
            else:
                self.set(row, field, value)

    def record(self, row: int) -> dict[str, Value]:
        """All fields of a row but the reserved ones."""
        return {field: self._value(row, field) for field in self._fields if not field.startswith("reserved")}

    def _value(self, row: int, field: str) -> Value:
        facts = self._fields[field]
        if facts.ctype == "char":
            return self.text(row, field)
        return self.array(row, field) if facts.count > 1 else self.get(row, field)

    def _at(self, row: int, facts: abi.Field) -> int:
        if not 0 <= row < self.count:
            raise IndexError(f"{self.structure} row {row} of {self.count}")
        return self.offset + row * self.stride + facts.offset


class Segment:
    """A mapped segment. Closes idempotently; its creator also unlinks the name."""

    def __init__(self, name: str, fd: int, nbytes: int, *, writable: bool, owned: bool) -> None:
        self.name = name
        self.fd = fd
        self.nbytes = nbytes
        self._owned = owned
        self._closed = False
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
        self.buffer = memoryview(self._map)
        self.header = Area(self.buffer, "segment_header", 0, abi.SIZES["segment_header"], 1)

    def area(self, area: int, structure: str) -> Area:
        """The area with this id (abi.CONSTANTS["AREA_..."]); its elements begin with ``structure``.
        KeyError if absent."""
        size = abi.SIZES["area"]
        count = min(self.header.get(0, "area_count"), abi.CONSTANTS["AREAS_MAX"])
        table = Area(self.buffer, "area", abi.CONSTANTS["AREA_TABLE_OFFSET"], size, count)
        for row in range(count):
            if table.get(row, "id") == area:
                offset, stride = table.get(row, "offset"), table.get(row, "stride")
                elements = table.get(row, "count")
                if stride < abi.SIZES[structure] or offset + stride * elements > self.nbytes:
                    raise SegmentError(
                        SegmentState.TRUNCATED, f"{self.name}: area {area} does not fit into {self.nbytes} bytes"
                    )
                return Area(self.buffer, structure, offset, stride, elements)
        raise KeyError(f"{self.name}: no area {area}")

    def publish(self) -> None:
        """Everything else is written before the version: SYNC version."""
        self.header.set(0, "version", abi.CONSTANTS["ABI_VERSION"])

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BufferError):  # the data plane looks into it until it is freed itself
            self.buffer.release()
            self._map.close()
        os.close(self.fd)
        if self._owned:
            unlink(self.name)

    def __enter__(self) -> Segment:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create_object(name: str, nbytes: int, mode: int) -> int:
    """A new object of reserved (not sparse) memory, as a descriptor. FileExistsError, or NoSharedMemory."""
    fd = _shm_open(name, os.O_CREAT | os.O_EXCL, mode)
    try:
        os.fchmod(fd, mode)
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as failure:
        os.close(fd)
        unlink(name)
        if failure.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        free = os.statvfs(_SHM_DIRECTORY)
        raise NoSharedMemory(
            failure.errno,
            f"{name}: {nbytes} bytes of shared memory wanted, {free.f_bavail * free.f_frsize} free in {_SHM_DIRECTORY};"
            " use fewer or smaller slots, or make it larger",
        ) from None
    except BaseException:
        os.close(fd)
        unlink(name)
        raise
    return fd


def unlink(name: str) -> bool:
    """False if there was no such object."""
    try:
        posix_ipc.unlink_shared_memory(name)
    except posix_ipc.ExistentialError:
        return False
    return True


def objects(prefix: str) -> list[str]:
    """Names (as shm_open takes them) of the shared memory objects that start with ``prefix``."""
    return sorted(f"/{name}" for name in os.listdir(_SHM_DIRECTORY) if f"/{name}".startswith(prefix))


def create(
    name: str, kind: int, areas: Iterable[AreaPlan], header: Mapping[str, int], *, mode: int, owner_pid: int
) -> Segment:
    """A filled segment that is not published yet. FileExistsError, or NoSharedMemory."""
    line = abi.CONSTANTS["LINE_BYTES"]
    areas = list(areas)
    offset = _aligned(abi.CONSTANTS["AREA_TABLE_OFFSET"] + abi.SIZES["area"] * abi.CONSTANTS["AREAS_MAX"], line)
    offsets = []
    for plan in areas:
        offsets.append(offset)
        offset = _aligned(offset + plan.stride * plan.elements, line)
    fd = create_object(name, offset, mode)
    try:
        segment = Segment(name, fd, offset, writable=True, owned=True)
    except BaseException:  # no descriptor is left for the mapping
        os.close(fd)
        unlink(name)
        raise
    segment.header.write(
        0,
        magic=abi.CONSTANTS["MAGIC"],
        kind=kind,
        line_bytes=line,
        segment_bytes=offset,
        owner_pid=owner_pid,
        owner_start=process_start(owner_pid),
        created_ns=time.time_ns(),
        area_count=len(areas),
        phase=abi.CONSTANTS["PHASE_RUNNING"],
        **header,
    )
    table = Area(
        segment.buffer, "area", abi.CONSTANTS["AREA_TABLE_OFFSET"], abi.SIZES["area"], abi.CONSTANTS["AREAS_MAX"]
    )
    for row, (plan, at) in enumerate(zip(areas, offsets, strict=True)):
        table.write(row, id=plan.area, count=plan.elements, offset=at, stride=plan.stride)
    return segment


def open_object(name: str) -> int:
    """A read-only descriptor. FileNotFoundError, PermissionError."""
    return _shm_open(name, 0, 0, read_only=True)


def open_lock(name: str) -> int:
    """A writable descriptor of an object that is created if need be, for flock(). PermissionError."""
    return _shm_open(name, os.O_CREAT, 0o600)


def is_current(name: str, fd: int) -> bool:
    """Whether the name still stands for the object behind the descriptor."""
    try:
        return os.path.samestat(os.stat(_SHM_DIRECTORY + name), os.fstat(fd))
    except FileNotFoundError:
        return False


def look(name: str) -> SegmentState:
    """The state of a segment, without waiting."""
    try:
        fd = open_object(name)
    except FileNotFoundError:
        return SegmentState.ABSENT
    try:
        return _state(fd)
    finally:
        os.close(fd)


def open_segment(name: str, timeout_s: float = 1.0) -> Segment:
    """Maps a published segment read-only; waits a moment for one that is being made. SegmentError, PermissionError."""
    deadline = time.monotonic() + timeout_s
    while True:
        state = look(name)
        if state is SegmentState.READY:
            fd = open_object(name)
            return Segment(name, fd, os.fstat(fd).st_size, writable=False, owned=False)
        waiting = state in (SegmentState.UNSIZED, SegmentState.UNPUBLISHED)
        if not waiting or time.monotonic() >= deadline:
            raise SegmentError(state, f"segment {name} {state.value}{_next_step(name, state)}")
        time.sleep(0.01)


class OwnerState(enum.Enum):
    """The very process that a segment belongs to. An UNREAPED one has ended, but its parent has not asked how."""

    RUNNING = "running"
    UNREAPED = "unreaped"
    GONE = "gone"


def owner_state(segment: Segment) -> OwnerState:
    state, start = _process(segment.header.get(0, "owner_pid"))
    if start == 0 or start != segment.header.get(0, "owner_start"):
        return OwnerState.GONE
    return OwnerState.UNREAPED if state in _ENDED else OwnerState.RUNNING


def owner_alive(segment: Segment) -> bool:
    return owner_state(segment) is OwnerState.RUNNING


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks after boot, which tells it from a later one of the same pid; 0 if none."""
    return _process(pid)[1]


def _process(pid: int) -> tuple[str, int]:
    """(state as /proc names it, start time); ("", 0) if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0].decode(), int(fields[19])


def _shm_open(name: str, flags: int, mode: int, *, read_only: bool = False) -> int:
    try:
        fd: int = posix_ipc.SharedMemory(name, flags, mode=mode, read_only=read_only).fd
    except posix_ipc.ExistentialError:
        kind = FileExistsError if flags & os.O_EXCL else FileNotFoundError
        number = errno.EEXIST if flags & os.O_EXCL else errno.ENOENT
        raise kind(number, os.strerror(number), name) from None
    except posix_ipc.PermissionsError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name) from None
    except OSError as failure:
        if failure.errno is None:  # so it says that no descriptor is left
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), name) from None
        raise
    return fd


def _state(fd: int) -> SegmentState:
    size = os.fstat(fd).st_size
    least = abi.CONSTANTS["AREA_TABLE_OFFSET"] + abi.SIZES["area"] * abi.CONSTANTS["AREAS_MAX"]
    if size == 0:
        return SegmentState.UNSIZED
    if size < least:
        return SegmentState.FOREIGN
    with mmap.mmap(fd, least, mmap.MAP_SHARED, mmap.PROT_READ) as mapped, memoryview(mapped) as buffer:
        header = Area(buffer, "segment_header", 0, abi.SIZES["segment_header"], 1)
        version = header.get(0, "version")  # SYNC version: before any other word
        magic = header.get(0, "magic")
        if magic not in (0, abi.CONSTANTS["MAGIC"]):
            return SegmentState.FOREIGN
        if version == 0:
            return SegmentState.UNPUBLISHED
        if magic == 0:
            return SegmentState.FOREIGN
        if version >> 16 != abi.CONSTANTS["ABI_MAJOR"]:
            return SegmentState.INCOMPATIBLE
        return SegmentState.TRUNCATED if size < header.get(0, "segment_bytes") else SegmentState.READY


def _next_step(name: str, state: SegmentState) -> str:
    if state is SegmentState.ABSENT:
        return "; is railrelayd running under this instance name?"
    if state is SegmentState.INCOMPATIBLE:
        fd = open_object(name)
        with mmap.mmap(fd, abi.SIZES["segment_header"], mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            version: int = struct.unpack_from("I", mapped, abi.FIELDS["segment_header"]["version"].offset)[0]
        os.close(fd)
        return f" {version >> 16}, this program reads {abi.CONSTANTS['ABI_MAJOR']}; install the same railrelay version"
    return "; its creator may have died: start railrelayd again"


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
