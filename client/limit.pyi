"""What `railrelay bench` measures against: a plain C sender and receiver, one thread and one connection a part, and
scattered copies. Parts are (addresses, lengths) in this process. Nothing here holds the GIL while it works."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

def send(
    fds: Sequence[int],
    cpus: Sequence[int],
    parts: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]],
    bytes_per_call: int,
    gap_ns: int,
    round_ns: npt.NDArray[np.uint64],
) -> int:
    """Sends the parts as often as ``round_ns`` [connections, rounds] has columns, asleep for ``gap_ns`` between; each
    round ends with the receiver's reply and its time goes there. Returns ns from the first byte to the last reply.
    ``fds``: connected blocking sockets. ``cpus``: core of each thread, -1 for none. OSError."""

def receive(
    fds: Sequence[int],
    cpus: Sequence[int],
    parts: Sequence[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]],
    bytes_per_call: int,
    rounds: int,
) -> int:
    """The other side: reads into the parts and replies. OSError."""

def gather(
    addresses: npt.NDArray[np.uint64], lengths: npt.NDArray[np.uint64], slots: npt.NDArray[np.uint8], slot_bytes: int
) -> int:
    """Copies blocks into slots, as a lane's feeder must; returns the CPU time in ns."""

def copy(sources: npt.NDArray[np.uint64], destinations: npt.NDArray[np.uint64], length: int) -> int:
    """Copies blocks of ``length`` bytes from address to address by memcpy in a plain loop; returns ns."""

def process_cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process since it began; 0 if there is none."""
