"""Memory of the bench's engines, on the host or on a GPU, that several clients of a process know; and matmuls."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from railrelay.client import Client, cuda
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.regions import Region

Bytes = npt.NDArray[np.uint8]

WIPED: Final = 0xA5
_MATMUL_SIZE: Final = 8192
_AHEAD: Final = 3  # matmuls that the GPU has to do while the thread waits


class Pool(Protocol):
    """The same bytes for each client that add() was called with, by its number."""

    nbytes: int

    def add(self, client: Client) -> Region: ...
    def put(self, offset: int, content: Bytes) -> None: ...
    def get(self, number: int, offset: int, nbytes: int) -> Bytes: ...
    def wipe(self) -> None: ...
    def close(self) -> None: ...


class HostPool:
    """Shared memory, a copy a client."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._copies: list[Bytes] = []

    def add(self, client: Client) -> Region:
        buffer = client.alloc(self.nbytes)
        self._copies.append(buffer.array)
        return buffer.region

    def put(self, offset: int, content: Bytes) -> None:
        for copy in self._copies:
            copy[offset : offset + len(content)] = content

    def get(self, number: int, offset: int, nbytes: int) -> Bytes:
        return self._copies[number][offset : offset + nbytes]

    def wipe(self) -> None:
        for copy in self._copies:
            copy[:] = WIPED

    def close(self) -> None:
        self._copies.clear()


class GpuPool:
    """Memory of one GPU, the same for all clients."""

    def __init__(self, nbytes: int, gpu: str) -> None:
        self.gpu = cuda.Gpu(gpu)
        unit = self.gpu.granularity()
        self.nbytes = -(-nbytes // unit) * unit
        self._memory = self.gpu.create(self.nbytes)

    def export(self) -> int:
        """A descriptor of the memory, the caller's."""
        return self.gpu.export(self._memory)

    def add(self, client: Client) -> Region:
        return client.register((self._memory.address, self.nbytes))

    def put(self, offset: int, content: Bytes) -> None:
        content = np.ascontiguousarray(content)
        self.gpu.to_gpu(self._memory.address + offset, int(content.ctypes.data), content.nbytes)

    def get(self, number: int, offset: int, nbytes: int) -> Bytes:  # noqa: ARG002 - there is one
        content = np.empty(nbytes, np.uint8)
        self.gpu.to_host(int(content.ctypes.data), self._memory.address + offset, nbytes)
        return content

    def wipe(self) -> None:
        self.gpu.fill(self._memory.address, WIPED, self.nbytes)

    def close(self) -> None:
        """After the clients."""
        self.gpu.unmap(self._memory)
        self.gpu.close()


def pool(nbytes: int, gpu: str) -> Pool:
    return GpuPool(nbytes, gpu) if gpu else HostPool(nbytes)


class Window(NamedTuple):
    """monotonic ns."""

    begin: int
    end: int


class Load:
    """Matmuls on a GPU, one after the other, in a thread of this process. ``values``: "random" takes an H200 to its
    power limit, where whatever moves bytes costs clock; of "zeros" it draws little more than half of that."""

    def __init__(self, gpu: str, values: str) -> None:
        self._values = values
        self._ordinal = cuda.ordinal_of(gpu)
        self._stop = threading.Event()
        self._going = threading.Event()
        self._failure = ""
        self._ended_ns: list[int] = []
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        """Returns once they follow each other. RelayError without torch."""
        self._thread.start()
        self._going.wait()
        if self._failure:
            raise RelayError(ErrorCode.NOT_SUPPORTED, f"matmuls need torch with CUDA: {self._failure}")

    def matmul_ms(self, window: Window) -> float:
        """Mean time of those that ended within."""
        inside = [ns for ns in list(self._ended_ns) if window.begin <= ns < window.end]
        return (inside[-1] - inside[0]) / (len(inside) - 1) / 1e6 if len(inside) > 1 else float("nan")

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._multiply()
        except Exception as failure:  # noqa: BLE001 - belongs to who started it
            self._failure = f"{type(failure).__name__}: {failure}"
            self._going.set()

    def _multiply(self) -> None:
        import torch

        torch.cuda.set_device(self._ordinal)
        shape = (_MATMUL_SIZE, _MATMUL_SIZE)
        made = torch.zeros if self._values == "zeros" else torch.randn
        left, right, product = (made(shape, device="cuda").to(torch.bfloat16) for _ in range(3))
        waiting: collections.deque[Any] = collections.deque()
        while not self._stop.is_set():
            torch.matmul(left, right, out=product)
            event = torch.cuda.Event()
            event.record()
            waiting.append(event)
            if len(waiting) > _AHEAD:
                waiting.popleft().synchronize()
                self._ended_ns.append(time.monotonic_ns())
            if len(self._ended_ns) == 20:  # clocks and caches are where they will stay
                self._going.set()
        torch.cuda.synchronize()
