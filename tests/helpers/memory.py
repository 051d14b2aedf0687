"""Memory of an in-process client, of both kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from helpers.patterns import Bytes
from railrelay.client import Buffer, Client, Region, RemoteRegion

Kind = Literal["shared", "private"]
KINDS: tuple[Kind, ...] = ("shared", "private")


@dataclass
class Memory:
    """Registered memory, all zeroes at first."""

    array: Bytes
    owner: Buffer | Region

    @property
    def address(self) -> int:
        return self.owner.address

    @property
    def region(self) -> Region:
        return self.owner.region if isinstance(self.owner, Buffer) else self.owner

    def offer(self) -> bytes:
        return self.owner.offer()


def make(client: Client, nbytes: int, kind: Kind = "shared", rail: int | None = None) -> Memory:
    if kind == "shared":
        buffer = client.alloc(nbytes, rail=rail)
        return Memory(buffer.array, buffer)
    array = np.zeros(nbytes, np.uint8)
    return Memory(array, client.register(array, rail=rail))


@dataclass
class Link:
    """A sender, a receiver, memory of both, and the receiver's memory as the sender has opened it."""

    sender: Client
    receiver: Client
    source: Memory
    destination: Memory
    remote: RemoteRegion


def link(
    sender: Client, receiver: Client, nbytes: int, *, source: Kind = "shared", destination: Kind = "shared"
) -> Link:
    taken, put = make(sender, nbytes, source), make(receiver, nbytes, destination)
    return Link(sender, receiver, taken, put, sender.open(put.offer()))
