"""A client that speaks the protocol by hand and writes what it likes into its own shared memory: what the daemon must
survive. It has no threads."""

from __future__ import annotations

import mmap
import os
import socket
from types import TracebackType
from typing import Final, TypeVar

from helpers.waiting import LIMIT_S
from railrelay.client import protocol
from railrelay.client.regions import Offer, decode_offer
from railrelay.shm_layout import abi
from railrelay.shm_layout.segment import Area

_FDS_MAX: Final = 64

R = TypeVar("R", bound=protocol.Message)


class Refused(Exception):
    """The daemon answered Failed."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class RawClient:
    def __init__(self, path: str, rank: int = 0) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(LIMIT_S)
        self.socket.connect(path)
        self._ids = 0
        self._fds: list[int] = []
        self._maps: list[mmap.mmap] = []
        self.rank = rank

    def attach(self, *, version: int = protocol.PROTOCOL_VERSION, layout: int | None = None) -> protocol.Attached:
        """Maps the own segment. Refused."""
        layout = abi.CONSTANTS["ABI_VERSION"] if layout is None else layout
        request = protocol.Attach(self.new_id(), version, layout, self.rank, "raw")
        self.facts, fds = self.ask(request, protocol.Attached)
        self.segment_fd, self.node_fd, *self.kick_fds = fds
        self.memory = self.map(self.segment_fd, self.facts.segment_bytes)
        return self.facts

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def send(self, message: protocol.ClientRequest, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.socket, [protocol.encode(message)], fds)

    def send_bytes(self, packet: bytes) -> None:
        self.socket.send(packet)

    def receive(self) -> tuple[protocol.ClientReply | None, list[int]]:
        """None at the end of the stream. The descriptors end with this client."""
        try:
            packet, fds, _ = protocol.receive(self.socket, _FDS_MAX)
        except ConnectionResetError:
            return None, []
        self._fds += fds
        return (protocol.client_reply(packet) if packet else None), fds

    def ask(self, request: protocol.ClientRequest, reply: type[R], fds: tuple[int, ...] = ()) -> tuple[R, list[int]]:
        """Skips events. Refused, ConnectionError at the end of the stream."""
        self.send(request, fds)
        while True:
            message, received = self.receive()
            if message is None:
                raise ConnectionError("the daemon ended the session")
            if isinstance(message, protocol.Failed):
                raise Refused(message.code, message.text)
            if isinstance(message, reply):
                return message, received

    def last_words(self) -> str:
        """What the daemon says when it ends the session; waits for that."""
        said = ""
        while True:
            message, _ = self.receive()
            if message is None:
                return said
            if isinstance(message, protocol.Failed):
                said = f"{message.code}: {message.text}"

    def map(self, fd: int, nbytes: int) -> mmap.mmap:
        mapped = mmap.mmap(fd, nbytes)
        self._maps.append(mapped)
        return mapped

    def area(self, name: str, structure: str) -> Area:
        """An area of the own segment, writable."""
        with memoryview(self.memory) as whole:
            header = Area(whole, "segment_header", 0, abi.SIZES["segment_header"], 1)
            at, size = abi.CONSTANTS["AREA_TABLE_OFFSET"], abi.SIZES["area"]
            table = Area(whole, "area", at, size, header.get(0, "area_count"))
            for row in range(table.count):
                if table.get(row, "id") == abi.CONSTANTS[f"AREA_{name}"]:
                    return Area(
                        memoryview(self.memory),
                        structure,
                        table.get(row, "offset"),
                        table.get(row, "stride"),
                        table.get(row, "count"),
                    )
        raise KeyError(name)

    def lease(self, rail: int = 0) -> mmap.mmap:
        """Relay memory of the lane."""
        leased, fds = self.ask(protocol.LeaseLane(self.new_id(), rail), protocol.Leased)
        return self.map(fds[0], leased.bytes)

    def register(self, nbytes: int, *, shared: bool = True, rail: int = 0) -> tuple[protocol.Registered, int]:
        """(reply, the memfd behind it or -1). Addresses are 1 GiB apart."""
        fd = -1
        if shared:
            fd = os.memfd_create("raw")
            self._fds.append(fd)
            os.ftruncate(fd, nbytes)
        request = protocol.Register(self.new_id(), self.new_id() << 30, nbytes, shared, 0, rail, True)
        registered, _ = self.ask(request, protocol.Registered, (fd,) if shared else ())
        return registered, fd

    def open(self, offer: bytes) -> tuple[Offer, protocol.PeerConnected, protocol.RegionOpened]:
        content = decode_offer(offer)
        peer, _ = self.ask(protocol.ConnectPeer(self.new_id(), content.session, 5.0), protocol.PeerConnected)
        request = protocol.OpenRegion(self.new_id(), peer.peer, content.capability)
        opened, _ = self.ask(request, protocol.RegionOpened)
        return content, peer, opened

    def open_local(self, offer: bytes) -> tuple[protocol.PeerConnected, protocol.RegionOpened, list[int]]:
        """With the memory of a region of the same daemon, if it hands that out."""
        content = decode_offer(offer)
        peer, _ = self.ask(protocol.ConnectPeer(self.new_id(), content.session, 5.0), protocol.PeerConnected)
        request = protocol.OpenRegion(self.new_id(), peer.peer, content.capability, True)
        opened, fds = self.ask(request, protocol.RegionOpened)
        return peer, opened, fds

    def kick(self, rail: int = 0) -> None:
        os.eventfd_write(self.kick_fds[rail], 1)

    def close(self) -> None:
        self.socket.close()
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:
                continue  # a test's view of it still lives; it goes with that
        self._maps.clear()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
