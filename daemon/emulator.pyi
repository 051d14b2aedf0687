"""The moving part of the emulated NIC's helper process. ``run`` belongs to one thread, everything else to another."""

from typing import Final

GPU_FUNCTIONS: Final[tuple[str, ...]]  # of the CUDA driver, in the order in which use_gpu takes their addresses
EVENTS: Final[int]  # that use_gpu takes

class Mover:
    def __init__(self, ring_fd: int, kick_fd: int) -> None:
        """The descriptors stay the caller's, open as long as this object. OSError."""
    @property
    def bytes_per_s(self) -> int: ...
    @property
    def list_bytes(self) -> int:
        """How much pinned memory use_gpu wants for lists of pieces."""
    def use_gpu(
        self,
        functions: list[int],
        *,
        context: int,
        stream: int,
        kernel: int,
        lists: int,
        events: list[int],
        scratch_source: int,
        scratch_destination: int,
    ) -> None:
        """From now on copies are the GPU's. kernel: 0 for none, so that only copy engines copy; lists: pinned memory of
        list_bytes; events: EVENTS of them; scratch: 1 MiB each. Measures what copies cost. OSError names the CUDA call that failed."""
    def add_file(self, memory: int, base: int, nbytes: int, fd: int, offset: int) -> int:
        """Maps memory that the daemon knows under ``base``; returns where. The descriptor stays the caller's. OSError."""
    def add_address(self, memory: int, base: int, nbytes: int, here: int) -> None: ...
    def relocate(self, memory: int, here: int) -> None:
        """The copies are to use another address, that of the GPU."""
    def remove(self, memory: int) -> None:
        """Nothing that was posted uses it any more. OSError if it is not known."""
    def run(self) -> None:
        """Moves until stop(). OSError names the CUDA call that failed."""
    def stop(self) -> None:
        """Any thread."""
    def statistics(self) -> dict[str, int]:
        """Since the start: requests, bytes, busy_ns (bytes at the rate), active_ns, late_copies, late_ns, late_max_ns."""
    def copied_by(self) -> dict[str, int]:
        """Bytes that a GPU has copied by each way: strided, batch (copy engines), kernel."""
