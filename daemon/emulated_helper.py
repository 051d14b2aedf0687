"""The helper process of a rail with the emulated NIC: keeps memory mapped as the daemon says, while the mover thread
(emulated_mover.c) copies. Started by daemon/emulated.py; ends with the daemon.

Messages come over a socket, one at a time, each answered before the next. They are between two processes of one
installation, so that nothing here has a version."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import RelayError
from railrelay.client.protocol import Message
from railrelay.daemon.emulator import EVENTS, GPU_FUNCTIONS, Mover

MESSAGE_BYTES: Final = 4096
SCRATCH_BYTES: Final = 1 << 20
MIB: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1


log = logging.getLogger("railrelay")


class AddMemory(Message, frozen=True, tag="AddMemory"):
    """Memory that the daemon knows under ``base``. kind: "host" (a descriptor, from ``offset``), "vmm" (a descriptor of
    GPU memory of ``handle_bytes``, from ``offset``) or "ipc" (a CUDA handle, from ``offset``). wipe: GPU memory that is
    to be zeroed."""

    memory: int
    base: int
    nbytes: int
    kind: str
    offset: int
    handle: bytes = b""
    handle_bytes: int = 0
    wipe: bool = False


class RemoveMemory(Message, frozen=True, tag="RemoveMemory"):
    memory: int


class Ready(Message, frozen=True, tag="Ready"):
    """device: UUID of the GPU, or empty."""

    device: str


class Done(Message, frozen=True, tag="Done"):
    pass


class Refused(Message, frozen=True, tag="Refused"):
    text: str


encode = msgspec.msgpack.Encoder().encode
request = msgspec.msgpack.Decoder(AddMemory | RemoveMemory).decode
reply = msgspec.msgpack.Decoder(Ready | Done | Refused).decode


class Memory(Protocol):
    """How the mover reaches memory of one kind."""

    device: str

    def add(self, message: AddMemory, fds: list[int]) -> None: ...
    def remove(self, memory: int) -> None: ...


class HostMemory:
    device = ""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover

    def add(self, message: AddMemory, fds: list[int]) -> None:
        if message.kind != "host":
            raise ValueError(f'{message.kind} memory needs a rail with memory = "device"')
        self._mover.add_file(message.memory, message.base, message.nbytes, fds[0], message.offset)

    def remove(self, memory: int) -> None:
        self._mover.remove(memory)


class GpuMemory:
    """Everything is copied by one GPU: its own memory, that of others over NVLink or PCIe, and pinned host memory."""

    def __init__(self, mover: Mover, gpu: str, copies: str) -> None:
        """``copies``: as in the configuration. RelayError, OSError."""
        from railrelay.client import cuda

        self._mover = mover
        self._gpu = cuda.Gpu(gpu)
        self._undo: dict[int, Callable[[], None]] = {}
        self.device = self._gpu.uuid
        kernel = 0
        if copies != "engines":
            try:
                kernel = self._gpu.gather_kernel()
            except cuda.CudaError as failure:
                log.warning("no gather kernel, small pieces will be late: %s", failure.text)
        pinned = self._gpu.host_alloc(mover.list_bytes)
        scratch = self._gpu.alloc(2 * SCRATCH_BYTES)
        stream = self._gpu.stream()
        with self._gpu.current():
            mover.use_gpu(
                cuda.function_addresses(list(GPU_FUNCTIONS)),
                context=self._gpu.context,
                stream=stream,
                kernel=kernel,
                lists=pinned,
                events=[self._gpu.recorded(stream) for _ in range(EVENTS)],
                scratch_source=scratch,
                scratch_destination=scratch + SCRATCH_BYTES,
            )

    def add(self, message: AddMemory, fds: list[int]) -> None:
        mover, gpu, number = self._mover, self._gpu, message.memory
        if message.kind == "host":
            here = mover.add_file(number, message.base, message.nbytes, fds[0], message.offset)
            try:
                self._undo[number] = self._pinned(number, here, message.nbytes)
            except BaseException:
                mover.remove(number)
                raise
            return
        if message.kind == "vmm":
            opened = gpu.open_vmm(fds[0], message.handle_bytes)
        else:
            opened = gpu.open_ipc(message.handle, message.handle_bytes)
        try:
            if message.wipe:  # the driver does not promise that nothing of its last owner is in it
                gpu.fill(opened.address + message.offset, 0, message.nbytes)
            mover.add_address(number, message.base, message.nbytes, opened.address + message.offset)
        except BaseException:
            gpu.unmap(opened)
            raise
        self._undo[number] = partial(gpu.unmap, opened)

    def remove(self, memory: int) -> None:
        undo = self._undo.pop(memory)
        # The GPU lets go of it before the mapping goes; nothing that was posted uses it any more.
        undo()
        self._mover.remove(memory)

    def _pinned(self, number: int, address: int, nbytes: int) -> Callable[[], None]:
        page = os.sysconf("SC_PAGESIZE")
        first = address // page * page
        known = self._gpu.host_register(first, -(-(address + nbytes) // page) * page - first)
        self._mover.relocate(number, known + address - first)
        return partial(self._gpu.host_unregister, first)


@dataclass(frozen=True)
class Options:
    rail: str
    ring_fd: int
    kick_fd: int
    socket_fd: int
    daemon: int
    gpu: str
    copies: str


def main() -> int:
    options = _options()
    under_systemd = "JOURNAL_STREAM" in os.environ
    logging.basicConfig(
        level=logging.INFO,
        format=f"{'' if under_systemd else '%(asctime)s '}railrelay-emulated[%(process)d] %(levelname)s %(message)s",
    )
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != options.daemon:
        return 1
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the daemon drains, and then closes the socket
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=options.socket_fd) as daemon:
        mover = Mover(options.ring_fd, options.kick_fd)
        try:
            memory: Memory = GpuMemory(mover, options.gpu, options.copies) if options.gpu else HostMemory(mover)
        except (RelayError, OSError) as failure:
            text = failure.text if isinstance(failure, RelayError) else failure.strerror or str(failure)
            with contextlib.suppress(BrokenPipeError):
                daemon.send(encode(Refused(text)))
            return 1
        thread = threading.Thread(target=_move, args=(options.rail, mover), daemon=True)
        thread.start()
        with contextlib.suppress(BrokenPipeError):
            daemon.send(encode(Ready(memory.device)))
            _serve(daemon, memory)
        mover.stop()
        thread.join()
    log.info("%s", _summary(options.rail, mover))
    return 0


def _serve(daemon: socket.socket, memory: Memory) -> None:
    """Until the daemon closes the socket."""
    while True:
        try:
            packet, fds, _ = protocol.receive(daemon, 1)
        except ConnectionResetError:  # closed without having read the last answer
            return
        if not packet:
            return
        message = request(packet)
        answer: Message = Done()
        try:
            if isinstance(message, AddMemory):
                memory.add(message, fds)
            else:
                memory.remove(message.memory)
        except RelayError as failure:
            answer = Refused(failure.text)
        except (OSError, ValueError, KeyError) as failure:
            answer = Refused(str(failure))
        finally:
            for fd in fds:
                os.close(fd)
        with contextlib.suppress(BrokenPipeError):
            daemon.send(encode(answer))


def _move(rail: str, mover: Mover) -> None:
    """The mover thread. What fails here ends the process, and with it the rail."""
    try:
        mover.run()
    except BaseException as failure:  # noqa: BLE001 - whatever it is, the daemon must learn of it
        log.critical("rail %s: emulated NIC: %s", rail, failure)
        os._exit(1)


def _summary(rail: str, mover: Mover) -> str:
    found = mover.statistics()
    active_ns = found["active_ns"]
    achieved = f", {8 * found['bytes'] / active_ns:.1f} Gbit/s while active" if active_ns else ""
    return (
        f"rail {rail}: emulated NIC of {8e-9 * mover.bytes_per_s:g} Gbit/s: {found['bytes'] / MIB:.1f} MiB in"
        f" {found['requests']} requests{achieved}; {found['late_copies']} copies were late, at most by"
        f" {found['late_max_ns'] / 1000:.0f} us, all together by {found['late_ns'] / 1000:.0f} us, of which"
        f" {(active_ns - found['busy_ns']) / 1000:.0f} us were not made up for{_ways(mover)}"
    )


def _ways(mover: Mover) -> str:
    ways = {way: nbytes for way, nbytes in mover.copied_by().items() if nbytes}
    return f"; copied by {', '.join(f'{way} {nbytes / MIB:.1f} MiB' for way, nbytes in ways.items())}" if ways else ""


def _options() -> Options:
    parser = argparse.ArgumentParser(prog="railrelay-emulated-helper", description=__doc__.partition("\n")[0])
    parser.add_argument("--rail", required=True)
    for name in ("ring-fd", "kick-fd", "socket-fd", "daemon"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--copies", default="auto")
    return Options(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
