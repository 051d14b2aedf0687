"""GPUs for tests: the real driver where there is one, else a stand-in on host memory (cuda_driver.c)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np

from helpers import memory
from helpers.patterns import Bytes
from helpers.processes import TESTS
from railrelay.client import Buffer, Client, Region, RemoteRegion, cuda

HELPERS: Final = TESTS / "helpers"
FORCE: Final = "RAILRELAY_TEST_GPU"
OBJECTS: Final = (
    "contexts",
    "streams",
    "events",
    "modules",
    "handles",
    "reservations",
    "allocated",
    "opened",
    "mapped",
    "host_allocated",
    "host_registered",
    "contexts_ended_in_use",
)
_PROBE: Final = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
result = driver.cuInit(0)
count = ctypes.c_int()
result = result or driver.cuDeviceGetCount(ctypes.byref(count))
sys.exit(f"cuInit says {result}, {count.value} GPUs" if result or not count.value else 0)
"""
_FLAGS: Final = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")


def why_no_gpu() -> str:
    """Why the real driver is not used; "" if it is."""
    forced = os.environ.get(FORCE, "")
    if forced not in ("", "stand-in"):
        raise ValueError(f"{FORCE}={forced}: expected stand-in, or nothing: the GPU that there is, else the stand-in")
    if forced:
        return f"{FORCE}={forced}"
    found = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=60, check=False)
    return found.stderr.strip().splitlines()[-1] if found.returncode else ""


def compiled(source: Path, target: Path, *more: str) -> Path:
    subprocess.run(
        [os.environ.get("CC", "cc"), *_FLAGS, *more, "-o", str(target), str(source)], check=True, timeout=120
    )
    return target


def build(directory: Path) -> Path:
    """The stand-ins for the driver and for NVRTC under the names by which programs look for them."""
    for source, soname in (("cuda_driver.c", "libcuda.so.1"), ("nvrtc.c", "libnvrtc.so.13")):
        compiled(HELPERS / source, directory / soname, "-shared", "-fPIC", f"-Wl,-soname,{soname}")
    return directory


class Control:
    """What tests ask of the stand-in in their own process."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        driver.cuda_driver_fault.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
        driver.cuda_driver_count.argtypes, driver.cuda_driver_count.restype = (ctypes.c_char_p,), ctypes.c_int64

    @classmethod
    def here(cls) -> Control:
        """Where the stand-in is loaded already, as in an engine process."""
        return cls(ctypes.CDLL("libcuda.so.1"))

    def fault(self, function: str, at: int, error: int, *, sticky: bool = False) -> None:
        """The at-th call of the function from now on says ``error``; "execution": what a stream does as the at-th."""
        self._driver.cuda_driver_fault(function.encode(), at, error, int(sticky))

    def recover(self) -> None:
        self._driver.cuda_driver_recover()

    def delay(self, most_us: int) -> None:
        self._driver.cuda_driver_delay(most_us)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No stream executes anything meanwhile."""
        self._driver.cuda_driver_hold(1)
        try:
            yield
        finally:
            self._driver.cuda_driver_hold(0)

    @contextmanager
    def dmabufs(self) -> Iterator[None]:
        """Memory has dma-buf descriptors meanwhile."""
        self._driver.cuda_driver_dmabuf(1)
        try:
            yield
        finally:
            self._driver.cuda_driver_dmabuf(0)

    def count(self, what: str) -> int:
        count: int = self._driver.cuda_driver_count(what.encode())
        assert count >= 0, what
        return count

    def counts(self) -> dict[str, int]:
        return {what: self.count(what) for what in OBJECTS}


@dataclass
class Driver:
    """``control``: None with a real GPU. ``environment``: what child processes need to find the same driver."""

    control: Control | None
    why: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_real(self) -> bool:
        return self.control is None


def load(directory: Path) -> Driver:
    """The driver for this process from now on."""
    why = why_no_gpu()
    if not why:
        return Driver(None, "")
    build(directory)
    libraries = [
        ctypes.CDLL(str(directory / name), mode=ctypes.RTLD_GLOBAL) for name in ("libcuda.so.1", "libnvrtc.so.13")
    ]
    paths = [str(directory), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    return Driver(Control(libraries[0]), why, {"LD_LIBRARY_PATH": ":".join(filter(None, paths))})


# ---- memory ----

Place = Literal["gpu", "vmm", "shared", "private"]  # gpu: of cuMemAlloc; vmm: of the virtual memory calls


class Card(cuda.Gpu):
    """A GPU as an engine uses it; close() frees the engine's memory."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._mappings: list[cuda.Mapping] = []

    def allocated(self, nbytes: int, place: Place = "gpu") -> int:
        """Address of new zeroed memory."""
        if place == "vmm":
            unit = self.granularity()
            self._mappings.append(self.create(-(-nbytes // unit) * unit))
            address = self._mappings[-1].address
        else:
            address = self.alloc(nbytes)
        self.fill(address, 0, nbytes)
        return address

    def read(self, address: int, nbytes: int) -> Bytes:
        found = np.empty(nbytes, np.uint8)
        self.to_host(int(found.ctypes.data), address, nbytes)
        return found

    def write(self, address: int, content: Bytes) -> None:
        self.to_gpu(address, int(content.ctypes.data), len(content))

    def close(self) -> None:
        mappings, self._mappings = self._mappings, []
        for mapping in mappings:
            with suppress(cuda.CudaError):
                self.unmap(mapping)
        super().close()


@dataclass
class Memory:
    """Registered memory of any place, all zeroes at first."""

    address: int
    nbytes: int
    owner: Buffer | Region
    gpu: Card | None = None
    array: Bytes | None = None

    def read(self) -> Bytes:
        if self.gpu is None:
            assert self.array is not None
            return self.array.copy()
        return self.gpu.read(self.address, self.nbytes)

    def write(self, content: Bytes) -> None:
        assert len(content) == self.nbytes
        if self.gpu is None:
            assert self.array is not None
            self.array[:] = content
        else:
            self.gpu.write(self.address, content)

    def offer(self) -> bytes:
        return self.owner.offer()

    @property
    def region(self) -> Region:
        return self.owner.region if isinstance(self.owner, Buffer) else self.owner


def stamped(nbytes: int, who: int) -> Bytes:
    """Lines of 64 bytes, each word of which says whose line it is and which."""
    lines = np.arange(nbytes // 64, dtype=np.uint64) + np.uint64((who + 1) << 40)
    return np.repeat(lines, 8).view(np.uint8)


def make(client: Client, nbytes: int, place: Place, gpu: Card | None = None, rail: int | None = None) -> Memory:
    if place in ("shared", "private"):
        host = memory.make(client, nbytes, "shared" if place == "shared" else "private", rail)
        return Memory(host.address, nbytes, host.owner, array=host.array)
    assert gpu is not None
    address = gpu.allocated(nbytes, place)
    return Memory(address, nbytes, client.register((address, nbytes), rail=rail), gpu=gpu)


@dataclass
class Link:
    """A sender, a receiver, memory of both, and the receiver's memory as the sender has opened it."""

    sender: Client
    receiver: Client
    source: Memory
    destination: Memory
    remote: RemoteRegion


def link(sender: Client, receiver: Client, source: Memory, destination: Memory) -> Link:
    return Link(sender, receiver, source, destination, sender.open(destination.offer()))
