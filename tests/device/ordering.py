"""Stamped slots that alternate between 2D copies, batches and the gather kernel on one stream: is any of them announced
before it is filled? The reader is another process, with a CUDA context of its own."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from device import native
from device.native import Copier, Shared
from device.report import MIB, Options, Report, Skipped
from railrelay.client import cuda

MEETING_BYTES: Final = 512
DOORBELL, READ, TORN_SLOTS, TORN_LINES, STOP = (0, 16, 32, 33, 34)  # words of struct rd_meeting
SLOT_BYTES: Final = 65536
SLOTS: Final = 16
PIECE_BYTES: Final = 4096
PITCH: Final = 2 * PIECE_BYTES
STAMPS: Final = 1021  # a prime: a slot's place never sees the same stamp twice in a row
_STEP: Final = 1000
_STUCK_S: Final = 10.0
_SLOTS: Final = 100_000
_HERE: Final = Path(__file__).resolve().parent


class Ring(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("slots", "slot_bytes", "stamps", "piece_bytes", "pitch"))


RING: Final = Ring(SLOTS, SLOT_BYTES, STAMPS, PIECE_BYTES, PITCH)


def run(report: Report, options: Options, library: ctypes.CDLL, library_path: Path) -> None:
    if not options.gpus:
        raise Skipped("slots are filled by a GPU, and this run has none")
    count = 2000 if options.small else _SLOTS
    for memory in ("device", "host"):
        found = _measure(options, library, library_path, memory, count)
        shares = " + ".join(f"{way} {share:.0%}" for way, share in found.ways.items())
        report.row(
            f"ordering through {memory} memory, {options.place}, {count:,} slots of {SLOT_BYTES >> 10} KiB",
            f"{found.torn} torn ({found.lines} lines) of {found.read:,} read; {shares}; {found.seconds:.1f} s",
            "0 torn",
            found.torn == 0 and found.read == count,
            **vars(found),
        )
    wrong = _measure(options, library, library_path, "host", min(count, 2000), other_stream=True)
    report.row(
        "the same with doorbells on another stream, which is wrong: is it seen?",
        f"{wrong.torn} torn of {wrong.read:,} read",
        "> 0 torn",
        wrong.torn > 0,
        **vars(wrong),
    )


@dataclass(frozen=True)
class Found:
    torn: int
    lines: int
    read: int
    ways: dict[str, float]
    seconds: float


def _measure(
    options: Options, library: ctypes.CDLL, library_path: Path, memory: str, count: int, *, other_stream: bool = False
) -> Found:
    with contextlib.ExitStack() as stack:
        gpu = stack.enter_context(native.opened_gpu(0))
        meeting = Shared(4096)
        if memory == "device":
            relay, fd = stack.enter_context(native.memory_on(options.last_gpu, gpu, SLOTS * SLOT_BYTES))
            base, relay_bytes = relay.address, relay.nbytes
        else:
            shared = Shared(max(SLOTS * SLOT_BYTES, 2 * MIB))
            fd, relay_bytes = shared.fd, shared.nbytes
            base = gpu.host_register(shared.address, shared.nbytes)
        copiers = [Copier(library, gpu, 2 * SLOTS, base, 400) for _ in range(1 + other_stream)]
        for copier in copiers:
            stack.callback(copier.close)
        source = _stamped_source(gpu, library)
        doorbell = gpu.host_register(meeting.address, meeting.nbytes)
        reader = stack.enter_context(_reader(library_path, meeting, fd, relay_bytes, memory, options.last_gpu, count))
        began = time.monotonic()
        for done in range(0, count, _STEP):
            result = library.rd_write_slots(
                copiers[0].address,
                copiers[-1].address,
                meeting.address,
                ctypes.byref(RING),
                source,
                base,
                doorbell,
                done,
                min(done + _STEP, count),
                _STUCK_S * 1e9,
            )
            if result < 0:
                meeting.words[STOP] = 1
                raise RuntimeError(f"the reader stopped at slot {int(meeting.words[READ])}")
            copiers[0].check("rd_write_slots", result)
        if reader.wait(_STUCK_S):
            raise RuntimeError(f"the reader ended with {reader.returncode}")
        seconds = time.monotonic() - began
        torn, lines, read = (int(meeting.words[word]) for word in (TORN_SLOTS, TORN_LINES, READ))
        ways = native.way_shares({"bytes": [0, 0, 0]}, copiers[0].counters())
    return Found(torn, lines, read, ways, seconds)


def _stamped_source(gpu: cuda.Gpu, library: ctypes.CDLL) -> int:
    nbytes = STAMPS * (SLOT_BYTES // PIECE_BYTES) * PITCH
    image = np.zeros(nbytes, np.uint8)
    library.rd_stamp(ctypes.byref(RING), image.ctypes.data)
    source = gpu.alloc(nbytes)
    gpu.to_gpu(source, int(image.ctypes.data), nbytes)
    return source


@contextlib.contextmanager
def _reader(
    library: Path, meeting: Shared, fd: int, nbytes: int, memory: str, gpu: int, count: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Ready to read."""
    ready, theirs = os.pipe()
    arguments = [str(library), str(meeting.fd), str(fd), str(nbytes), memory, str(gpu), str(count), str(theirs)]
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from device import ordering; ordering.read(sys.argv[1:])"
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(_HERE.parent), *arguments], pass_fds=[meeting.fd, fd, theirs]
        )
    finally:
        os.close(theirs)
    try:
        with os.fdopen(ready, "rb") as pipe:
            if pipe.read(1) != b"+":
                raise RuntimeError(f"the reading process ended with {process.wait()}")
        yield process
    finally:
        meeting.words[STOP] = 1
        try:
            process.wait(_STUCK_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read(words: Sequence[str]) -> None:
    """The reading process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", type=Path)
    for name in ("meeting", "relay", "nbytes"):
        parser.add_argument(name, type=int)
    parser.add_argument("memory")
    for name in ("gpu", "count", "ready"):
        parser.add_argument(name, type=int)
    args = parser.parse_args(words)
    library = native.load(args.library)
    meeting = Shared(4096, args.meeting)
    with native.opened_gpu(args.gpu) as gpu:
        fetch: int | None = None
        copy = 0
        if args.memory == "device":
            mapping = gpu.open_vmm(args.relay, args.nbytes)
            base = mapping.address
            copy = gpu.host_alloc(SLOT_BYTES)
            (fetch,) = cuda.function_addresses(["cuMemcpyDtoH"])
        else:
            shared = Shared(args.nbytes, args.relay)
            base = shared.address
        os.write(args.ready, b"+")
        with gpu.current():
            done = library.rd_read_slots(
                meeting.address, ctypes.byref(RING), base, copy or None, fetch, 0, args.count, _STUCK_S * 1e9
            )
        if args.memory == "device":
            gpu.unmap(mapping)
    if done != args.count:
        meeting.words[STOP] = 1
        print(f"the reader stopped after slot {done}", flush=True)
        sys.exit(1)
