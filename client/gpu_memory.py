"""A client's use of its GPU: made when the first GPU memory is registered, or the first lane in GPU memory is leased.

Prepares what the C part copies with: for each lane a stream, pinned lists of pieces, the gather kernel, and addresses
of the relay memory and of the doorbell for the GPU."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Final

from railrelay.client import core, cuda, protocol
from railrelay.client.errors import ArgumentError, ErrorCode, RegionError, RelayError
from railrelay.client.transfer import core_errors

log = logging.getLogger(__name__)

LIST_RUNS: Final = 8192  # of one slot; a slot closes earlier if it has more
LOCAL_LISTS: Final = 16
LOCAL_BLOCKS: Final = 2  # times the thread blocks: no NIC sets the pace of the local route
RUN_BYTES: Final = 48
SCRATCH_BYTES: Final = 1 << 20
THREAD_BLOCKS_MAX: Final = 1024
NIC_GBIT_MAX: Final = 10_000
GBIT_BYTES: Final = 0.125  # a nanosecond, at one Gbit/s
_SAME_PROCESS: Final = (
    "a process cannot open its own memory of cudaMalloc; connect this client with local=False, or have the other one in"
    " another process"
)


class Copy(StrEnum):
    """How a GPU fills slots: by what each way costs, or always by one of them where it can."""

    AUTO = "auto"
    STRIDED = "strided"  # 2D copies by the copy engine
    BATCH = "batch"  # copy batches by the copy engine
    KERNEL = "kernel"  # the gather kernel

    @property
    def number(self) -> int:
        return list(Copy).index(self) - 1


@dataclass(frozen=True)
class GpuOptions:
    """``copy``: see Copy. ``nic_gbit``: Gbit/s that filling a slot should keep up with. ``thread_blocks``: of the
    gather kernel, 1024 threads each; four keep up with 400 Gbit/s on an H200 and leave 128 of 132 SMs alone."""

    copy: Copy | str = Copy.AUTO
    nic_gbit: float = 400.0
    thread_blocks: int = 4

    def __post_init__(self) -> None:
        blocks, gbit = self.thread_blocks, self.nic_gbit
        if (
            self.copy not in list(Copy)
            or not (isinstance(gbit, Real) and 0 < gbit <= NIC_GBIT_MAX)
            or not (isinstance(blocks, Integral) and 1 <= blocks <= THREAD_BLOCKS_MAX)
        ):
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"{self}: copy is one of {', '.join(Copy)}, nic_gbit a number above 0 and at most {NIC_GBIT_MAX},"
                f" thread_blocks a whole number from 1 to {THREAD_BLOCKS_MAX}",
            )


class GpuMemory:
    """Of one client; all its GPU memory is of one GPU."""

    def __init__(self, client_core: core.ClientCore, gpu: int | str, options: GpuOptions, control_fd: int) -> None:
        self._core = client_core
        self._options = options
        self._lock = threading.Lock()
        self._lanes: dict[int, cuda.Mapping] = {}
        self._remotes: dict[int, cuda.Mapping] = {}
        self._known: dict[tuple[int, int], int] = {}
        self._event_stream = 0
        self._local = 0  # where the GPU counts what it has copied by the local route
        self._scratch = 0
        self._kernel = -1
        self.gpu = cuda.Gpu(gpu)
        try:
            self._core.use_gpu(cuda.function_addresses(list(core.FUNCTION_NAMES)), self.gpu.context, control_fd)
        except BaseException:
            self.gpu.close()
            raise

    def close(self) -> None:
        """After the core was stopped: nothing is enqueued any more. Waits for what the GPU still copies."""
        with contextlib.suppress(RelayError):
            self.gpu.synchronize_streams()  # of the library: the engine's own may wait for something else
        self._core.forget_local_signal()
        for mapping in (*self._lanes.values(), *self._remotes.values()):
            with contextlib.suppress(RelayError):
                self.gpu.unmap(mapping)
        self._lanes.clear()
        self._remotes.clear()
        self.gpu.close()

    def add_lane(self, rail: int, fd: int, nbytes: int, generation: int) -> None:
        """A lane in GPU memory: mapped for this client's GPU, which may be another than the one it lies on."""
        mapping = self.gpu.open_vmm(fd, nbytes)
        try:
            with core_errors():
                self._core.add_gpu_lane(rail, mapping.address, nbytes, generation)
        except BaseException:
            self.gpu.unmap(mapping)
            raise
        self._lanes[rail] = mapping

    def prepare_lane(self, rail: int) -> None:
        """From now on the GPU fills the lane. Idempotent."""
        with self._lock, core_errors():
            if self._core.has_copier(rail):
                return
            mapped = self._lanes.get(rail)
            base = mapped.address if mapped else self._registered(self._core.lane_area(rail))
            doorbell = self._registered(self._core.segment_area) + self._core.doorbell_offset(rail)
            self._set_copier(rail, bounce=False, lists=self._core.slots, base=base, doorbell=doorbell)
            log.debug("lane of rail %d: copies cost %s", rail, self._core.copy_costs(rail))

    def prepare_bounces(self, rails: int) -> None:
        """From now on frames for this client's GPU memory are copied there out of bounce memory. Idempotent."""
        with self._lock, core_errors():
            for rail in range(rails):
                area = self._core.bounce_area(rail)
                if not self._core.has_bounce_copier(rail) and area[0]:
                    base = self._registered(area)
                    self._set_copier(rail, bounce=True, lists=1, base=base, doorbell=0)

    def open_remote(self, opened: protocol.RegionOpened, fds: list[int]) -> None:
        """Maps memory of another client of this node, for this client's GPU, as a destination. RelayError."""
        if opened.handle == "vmm":
            mapping = self.gpu.open_vmm(fds[0], opened.handle_bytes)
        else:
            try:
                mapping = self.gpu.open_ipc(opened.ipc, opened.handle_bytes)
            except cuda.CudaError as failure:
                if "CUDA_ERROR_INVALID_CONTEXT" not in failure.text:
                    raise
                raise RegionError(ErrorCode.NOT_SUPPORTED, f"{failure.text}: {_SAME_PROCESS}") from None
        try:
            with core_errors():
                self._core.map_gpu_remote(opened.remote, mapping.address + opened.offset, opened.bytes)
        except BaseException:
            self.gpu.unmap(mapping)
            raise
        self._remotes[opened.remote] = mapping

    def prepare_local(self) -> None:
        """From now on the GPU copies what it is source or destination of on the local route. Idempotent."""
        with self._lock, core_errors():
            if not self._local:
                local = self.gpu.host_alloc(8)
                ctypes.memset(local, 0, 8)
                self._set_copier(-1, bounce=False, lists=LOCAL_LISTS, base=local, doorbell=0)
                self._local = local

    def close_remote(self, index: int) -> None:
        mapping = self._remotes.pop(index, None)
        if mapping is not None:
            self.gpu.unmap(mapping)

    def check(self, ordinal: int) -> None:
        """ArgumentError if memory is of another GPU."""
        if self.gpu.ordinal != ordinal:
            raise ArgumentError(
                ErrorCode.BAD_ARGUMENT,
                f"memory of {cuda.uuid_of(ordinal)}, but this client uses {self.gpu.uuid}; one client a GPU",
            )

    def event_of(self, ready: object) -> core.GpuEvent:
        """What a stream has been given so far, or what a recorded event stands for, as an event of the library's own.
        Streams and events of torch, cuda-python, or with the CUDA stream protocol."""
        stream = _handle(ready, "__cuda_stream__", "cuda_stream")
        if stream is None:
            event = _handle(ready, "__cuda_event__", "cuda_event")
            if event is None:
                text = f"ready is {type(ready).__name__}; expected HostEvent, or a CUDA stream or event"
                raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
            with self._lock:
                stream = self._event_stream = self._event_stream or self.gpu.stream()
                self.gpu.wait(stream, event)
                return core.GpuEvent(self._core, self.gpu.recorded(stream))
        return core.GpuEvent(self._core, self.gpu.recorded(stream))

    def _registered(self, area: tuple[int, int]) -> int:
        """Address of shared memory for the GPU; once, also where what follows fails and is tried again."""
        if area not in self._known:
            self._known[area] = self.gpu.host_register(*area)
        return self._known[area]

    def _set_copier(self, rail: int, *, bounce: bool, lists: int, base: int, doorbell: int) -> None:
        if not self._scratch:
            self._scratch = self.gpu.alloc(2 * SCRATCH_BYTES)
        self._core.set_copier(
            rail,
            bounce=bounce,
            stream=self.gpu.stream(),
            kernel=self._gather_kernel(),
            lists=self.gpu.host_alloc(lists * LIST_RUNS * RUN_BYTES),
            list_count=lists,
            list_runs=LIST_RUNS,
            thread_blocks=self._options.thread_blocks * (LOCAL_BLOCKS if rail < 0 else 1),
            forced=Copy(self._options.copy).number,
            base=base,
            doorbell=doorbell,
            scratch=(self._scratch, self._scratch + SCRATCH_BYTES),
            nic_rate=0.0 if rail < 0 else self._options.nic_gbit * GBIT_BYTES,
        )

    def _gather_kernel(self) -> int:
        if self._kernel < 0:
            try:
                self._kernel = self.gpu.gather_kernel()
            except RelayError as failure:
                if self._options.copy == Copy.KERNEL:
                    raise
                log.warning("no gather kernel, the copy engine does all: %s", failure.text)
                self._kernel = 0
        return self._kernel


def _handle(thing: object, protocol: str, attribute: str) -> int | None:
    """The handle that an object has by a protocol of cuda-python, or in torch's attribute."""
    found = getattr(thing, protocol, None)
    if found is not None:
        handle = found() if callable(found) else found
        return _number(thing, protocol, handle[1] if isinstance(handle, tuple) and len(handle) == 2 else handle)
    handle = getattr(thing, attribute, None)
    return None if handle is None else _number(thing, attribute, handle)


def _number(thing: object, name: str, handle: Any) -> int:  # noqa: ANN401 - also handles of cuda-python
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(handle, str | bytes | float) and 0 <= int(handle) < 1 << 64:
            return int(handle)
    text = f"ready is {type(thing).__name__}, of which {name} gives {handle!r}; expected the address of a CUDA handle"
    raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)
