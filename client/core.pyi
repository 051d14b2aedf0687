"""The client's data path: submission, feeder thread, bounce thread, waiting. C without the GIL; any number of threads may call.

Addresses are the client's own virtual addresses (sources) and the peer's, as it registered them (destinations).
"""

from typing import Final

import numpy as np
import numpy.typing as npt

ROUTE_RELAY: Final[int]
ROUTE_DIRECT: Final[int]
ROUTE_SERIAL: Final[int]
ROUTE_SCHEDULED: Final[int]
ROUTE_MATCHED: Final[int]  # straight from the source, out of the NIC of the destination's rail
ROUTE_RELAY_ALL: Final[int]  # as relay, but own-rail blocks too go through a lane

FUNCTION_NAMES: Final[tuple[str, ...]]  # of the CUDA driver, as use_gpu() wants their addresses

class SubmitError(Exception):
    """Bad arguments of a submission: ``.code`` (a name of errors.ErrorCode) and a text that names block, value and limit."""

    code: str
    rail: int  # of "no_lane": lease it and ask again
    def __init__(self, code: str, text: str, rail: int = -1) -> None: ...

class HostEvent:
    """Something a transfer waits for before its first byte is read; set() may be called from any thread."""
    def __init__(self) -> None: ...
    def set(self) -> None: ...
    def is_set(self) -> bool: ...

class GpuEvent:
    """A recorded CUDA event that transfers wait for; destroyed with the last of them and this object."""
    def __init__(self, core: ClientCore, event: int) -> None: ...

class Submission:
    """One transfer in the client. Result fields are valid once done."""
    def __init__(self, *args: object, **kwargs: object) -> None:
        """TypeError: comes from ClientCore.reserve()."""
    index: int
    generation: int
    done: bool
    source_done: bool
    settled: bool
    result: int  # rr_result
    bytes: int
    nbytes: int  # asked for
    gpu_error: str  # of its client
    def publish(self) -> None:
        """Begins the transfer (reserve() alone does not)."""
    def wait(self, timeout_ns: int) -> bool:
        """Sleeps until done; 0 = look only, -1 = no limit. True if done. Releases the GIL; interrupted by signals."""
    def wait_source(self, timeout_ns: int) -> bool: ...
    def wait_settled(self, timeout_ns: int) -> bool: ...
    def cancel(self) -> None: ...
    def arm_async(self) -> bool:
        """The completion eventfd will be written when done. False if it is done already."""

class ClientCore:
    def __init__(
        self,
        segment_fd: int,
        segment_bytes: int,
        node_fd: int,
        node_bytes: int,
        kick_fds: list[int],
        *,
        own_rail: int,
        route: int,
        direct_slice_bytes: int,
        express_bytes: int,
        bytes_max: int,
        feeder_cpu: int,
    ) -> None:
        """Maps both segments (fds may be closed afterwards), starts the feeder thread. OSError, or SubmitError("abi")."""
    rails: int
    completion_fd: int  # eventfd, written when a submission armed by arm_async() is done
    def add_lane(self, rail: int, fd: int, nbytes: int, generation: int) -> None: ...
    def has_lane(self, rail: int) -> bool: ...
    slots: int  # of a lane
    segment_area: tuple[int, int]  # address, bytes
    gpu_error: str  # name of the CUDA error that ended this client, or ""
    def use_gpu(self, functions: list[int], context: int, hang_up_fd: int) -> None:
        """``functions``: addresses of FUNCTION_NAMES, once. The core keeps a duplicate of the descriptor, which it shuts down after a CUDA error."""
    def add_gpu_lane(self, rail: int, address: int, nbytes: int, generation: int) -> None: ...
    def has_copier(self, rail: int) -> bool: ...
    def has_bounce_copier(self, rail: int) -> bool: ...
    def lane_area(self, rail: int) -> tuple[int, int]: ...
    def bounce_area(self, rail: int) -> tuple[int, int]: ...
    def doorbell_offset(self, rail: int) -> int: ...
    def set_copier(
        self,
        rail: int,
        *,
        bounce: bool,
        stream: int,
        kernel: int,
        lists: int,
        list_count: int,
        list_runs: int,
        thread_blocks: int,
        forced: int,
        base: int,
        doorbell: int,
        scratch: tuple[int, int],
        nic_rate: float,
    ) -> None:
        """rail -1: the local route; base is then the pinned word that the GPU counts its lists in.
        The lane (or the bounce memory) is filled (or emptied) by a GPU from now on; see struct rc_copier_facts. Measures its costs.
        OSError, or SubmitError("gpu_error")."""
    def copy_costs(self, rail: int) -> dict[str, float] | None:
        """ns, and GB/s: struct rg_costs of the lane."""
    def add_bounce(self, rail: int, fd: int, nbytes: int) -> None:
        """First call starts the bounce thread."""
    def add_region(self, region: int, address: int, nbytes: int, shared: bool, on_gpu: bool, rail: int) -> None:
        """SubmitError("overlap") if part of it is registered already."""
    def remove_region(self, region: int) -> None:
        """SubmitError("busy") while a transfer reads it."""
    def add_peer(self, peer: int, local_rails: list[int]) -> None: ...
    def add_remote(
        self,
        remote: int,
        peer: int,
        address: int,
        nbytes: int,
        rail: int,
        owner: int,
        window_bytes: int,
        window_runs: int,
        local: bool,
        on_gpu: bool,
    ) -> None:
        """local: by the local route, into what map_remote() or map_gpu_remote() has mapped."""
    def map_gpu_remote(self, remote: int, address: int, nbytes: int) -> None:
        """The same for GPU memory that is mapped at ``address`` for this client's GPU."""
    def map_remote(self, remote: int, fd: int, offset: int, nbytes: int) -> None:
        """Memory of another client of the same daemon, before add_remote(local=True)."""
    def populate_remote(self, remote: int) -> None:
        """Touches its pages; takes its time, without the GIL."""
    def unmap_remote(self, remote: int) -> bool:
        """After this no byte is written there; transfers that would end with REGION_GONE. Whether it was mapped."""
    def remove_remote(self, remote: int) -> None:
        """SubmitError("busy") while a transfer writes to it."""
    def reserve(
        self,
        peer: int,
        sources: npt.NDArray[np.uint64],
        destinations: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        *,
        space: int,
        tag: int,
        timeout_ns: int,
        note: bool,
        ready: HostEvent | GpuEvent | None,
    ) -> Submission:
        """Checks everything (regions, bounds, zero lengths, overlapping destinations) and prepares; publish() begins. One length
        may stand for all. ``space`` is added to each destination, which is below 2**56."""
    def write_now(
        self,
        peer: int,
        space: int,
        sources: npt.NDArray[np.uint64],
        destinations: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64] | None,
        length: int,
        tag: int,
        timeout_ns: int,
    ) -> Submission:
        """reserve() and publish() in one, without note and event; ``lengths`` None: ``length`` is every block's. ValueError or
        TypeError if an array is not contiguous uint64."""
    def reserve_pages(
        self,
        peer: int,
        source_rows: npt.NDArray[np.uint64],
        source_stride: int,
        source_pages: npt.NDArray[np.int64],
        destination_rows: npt.NDArray[np.uint64],
        destination_stride: int,
        destination_pages: npt.NDArray[np.int64],
        piece_bytes: int,
        *,
        tag: int,
        timeout_ns: int,
        note: bool,
        ready: HostEvent | GpuEvent | None,
    ) -> Submission:
        """Row r of page p is piece_bytes at rows[r] + pages[p] * stride, on both sides; len(rows) and len(pages) agree."""
    def fail_all(self, result: int) -> None:
        """The daemon is gone: every unfinished transfer ends with ``result``; waiters wake."""
    def counters(self) -> dict[str, int]:
        """feeder_sleeps, feeder_wakes, slots, copied_bytes, stalls, stall_ns, direct_slices, bounced_bytes,
        fast_submissions, bytes_local"""
    def watch_daemon(self, pidfd: int) -> None:
        """Of what the daemon received, nothing is placed in private regions once it has exited."""
    def stop(self) -> None:
        """Ends every submission and stops the threads; the mappings stay. Idempotent."""
    def forget_local_signal(self) -> None:
        """After stop(), when the GPU is idle: the word that set_copier(-1, base=...) named goes."""
    def close(self) -> None:
        """The same, and unmaps. Idempotent."""
