"""The control protocol: local processes that send what they like over the Unix socket, with descriptors of any kind."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

import msgspec

from fuzz.reading import Input, Known, bent, kinds_of, message
from fuzz.scene import Scene, scene, turns
from railrelay.client import protocol
from railrelay.shm_layout import abi

REQUESTS: Final = kinds_of(protocol.ClientRequest)
MOST_CLIENTS: Final = 3


class Stranger:
    """One connection to the control socket."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self.known = Known()
        self.fds: list[int] = []
        with contextlib.suppress(OSError):
            self.socket.connect(path)

    def send(self, packet: bytes, fds: list[int]) -> None:
        with contextlib.suppress(OSError):
            socket.send_fds(self.socket, [packet], fds)

    def hear(self) -> None:
        """Remembers numbers and secrets of the daemon's answers."""
        with contextlib.suppress(OSError):
            while True:
                packet, fds, _ = protocol.receive(self.socket, 16)
                self.fds += fds
                if not packet:
                    return
                answer = protocol.client_reply(packet)
                for name in answer.__struct_fields__:
                    value = getattr(answer, name)
                    if name in ("region", "remote", "peer", "client", "generation", "rail"):
                        self.known.numbers.append(value)
                    elif name == "capability":
                        self.known.secrets.append(value)

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)


def descriptor(source: Input, stranger: Stranger) -> int:
    """A new descriptor of one kind or another."""
    kind = source.byte() % 12
    if kind < 6:
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        with contextlib.suppress(OSError, OverflowError):
            os.ftruncate(fd, (0, 1, 4096, 65536, 1 << 20, 1 << 40)[kind])
        return fd
    if kind == 6 and stranger.fds:
        return os.dup(source.choice(stranger.fds))
    if kind == 7:
        return os.eventfd(0)
    if kind == 8:
        return os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    if kind == 9:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM).detach()
    if kind == 10:
        return os.open("/proc/self/mem", os.O_RDWR)
    return os.open("/dev/zero", os.O_RDWR)


def request(source: Input, stranger: Stranger, at: Scene) -> tuple[bytes, list[int]]:
    kind = source.choice(REQUESTS)
    fields: dict[str, object] = {}
    likely = source.byte()
    if kind is protocol.Attach and likely < 0xC0:
        fields = {"protocol": protocol.PROTOCOL_VERSION, "abi": abi.CONSTANTS["ABI_VERSION"], "rank": 2 + likely % 64}
    if kind is protocol.Register and likely < 0xC0:
        fields = {"memory": "host", "device": "", "handle": "", "handle_bytes": 0, "ipc": b"", "dmabuf": False}
        if likely < 0x80:
            fields |= {"bytes": 4096, "address": 0, "offset": 0, "rail": likely % 2, "shared": bool(likely & 4)}
    if kind is protocol.ConnectPeer and likely < 0xC0:
        fields = {"session": at.session, "timeout_s": 0.05}
    made = message(kind, source, stranger.known, **fields)
    count = source.byte() % 6 if likely >= 0xC0 else int(getattr(made, "shared", False))
    return protocol.encode(made), [descriptor(source, stranger) for _ in range(count)]


async def _case(data: bytes) -> None:
    at, source = scene(), Input(data)
    strangers: list[Stranger] = []
    try:
        while not source.ended:
            step = source.byte() % 8
            if not strangers or (step == 0 and len(strangers) < MOST_CLIENTS):
                strangers.append(Stranger(at.socket))
                strangers[-1].known.secrets.append(msgspec.msgpack.decode(at.link.destination.offer())["capability"])
                continue
            stranger = source.choice(strangers)
            if step == 1:
                strangers.remove(stranger)
                stranger.close()
            elif step == 2:
                await turns(source.byte() % 16)
                stranger.hear()
            elif step == 3:
                stranger.send(source.take(source.byte()), [])
            else:
                packet, fds = request(source, stranger, at)
                stranger.send(bent(packet, source) if step == 4 else packet, fds)
                for fd in fds:
                    os.close(fd)
                if step > 5:
                    await turns(8)
                    stranger.hear()
    finally:
        for stranger in strangers:
            stranger.hear()
            stranger.close()
        await turns(4)


def run(data: bytes) -> None:
    at = scene()
    at.run(lambda: _case(data))
    if len(at.conductor._clients.by_row) > 8:
        at.settle()
