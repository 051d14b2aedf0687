"""Which clients may write which regions of other clients by themselves (the local route), and how they let go. Main
thread only.

A grant hands out the memory of one region, so only what the capability offered; the handle of GPU memory reaches the
whole allocation that the region lies in. It cannot be taken back: it ends by the word of the client that holds it
(LetGo, CloseRegion), or by the death of its process, which the pidfd tells. A client that does not answer in time is
ended, and holds what it holds until it is dead.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode
from railrelay.daemon.client import Client, Handed, Region
from railrelay.daemon.context import Context

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
_PAGE: Final = os.sysconf("SC_PAGESIZE")


def handed_of(message: protocol.Register, fds: list[int], pid: int) -> Handed:
    """What other clients of this daemon may import the memory by. Shared memory is handed out only if the region is all
    of its file, sealed against shrinking and of ordinary pages (a hole in huge pages may not be filled again): else
    whoever has the descriptor could reach more than was offered, or be ended by a SIGBUS. OSError."""
    if message.memory == "device":
        fd = os.dup(fds[0]) if message.handle == "vmm" else -1
        facts = (message.handle, "device", message.device, message.handle_bytes, message.offset, message.ipc)
        return Handed(*facts, fd, pid)
    if not message.shared:
        return Handed()
    whole = message.offset == 0 and -(-message.bytes // _PAGE) == -(-os.fstat(fds[0]).st_size // _PAGE)
    sealed = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & _SEALS == _SEALS
    if whole and sealed and os.fstatvfs(fds[0]).f_bsize == _PAGE:
        return Handed("shm", fd=os.dup(fds[0]), pid=pid)
    return Handed()


@dataclass(eq=False)
class _Holder:
    client: Client
    pidfd: int
    regions: dict[int, Region] = field(default_factory=dict)  # by remote index
    asked: set[int] = field(default_factory=set)  # to let go of
    ended: bool = False  # by its own word: it gets no more

    def __str__(self) -> str:
        return str(self.client)


class LocalRoute:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._holders: dict[Client, _Holder] = {}
        self._change = asyncio.get_running_loop().create_future()

    def grant(self, client: Client, remote: int, region: Region) -> bool:
        """The client may write the region, which it opened as ``remote``. False if it may not."""
        holder = self._holders.get(client)
        if holder is None:
            holder = self._holders[client] = _Holder(client, client.socket.dup_pidfd())
            asyncio.get_running_loop().add_reader(holder.pidfd, self._drop, holder)
        if not holder.ended and not client.leaving:
            holder.regions[remote] = region
        return remote in holder.regions

    def let_go(self, client: Client, remotes: list[int]) -> None:
        """By the client's word; no remotes: all, and for good."""
        holder = self._holders.get(client)
        if holder is None:
            return
        holder.ended |= not remotes
        for remote in remotes or list(holder.regions):
            holder.regions.pop(remote, None)
            holder.asked.discard(remote)
        self._tell()

    async def withdraw(self, region: Region, patience_s: float) -> list[str]:
        """Asks whoever may write the region to let go. Names those that still hold it after ``patience_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        for holder in self._of(region):
            for remote in [remote for remote, held in holder.regions.items() if held is region]:
                if remote not in holder.asked:
                    holder.asked.add(remote)
                    holder.client.send(protocol.RegionGone(remote))
                    loop.call_later(self._ctx.config.timeouts.peer_s, self._expect, holder, remote, region)
        while (left := self._of(region)) and loop.time() < deadline:
            await asyncio.wait([self._change], timeout=deadline - loop.time())
        return [str(holder) for holder in left]

    async def left(self, client: Client) -> None:
        """Returns once a client whose session has ended can write no region any more. While its process lives, what it
        holds may still be written: nobody may take its transfers for settled."""
        holder = self._holders.get(client)
        if holder is None:
            return
        if not holder.regions:
            self._drop(holder)
        elif client in self._holders:
            report = asyncio.get_running_loop().call_later(
                self._ctx.config.timeouts.settle_s,
                partial(
                    self._ctx.state.error,
                    ErrorCode.BUSY,
                    f"{client} has ended its session, but not let go of {len(holder.regions)} regions of other clients;"
                    " its row and rank stay taken until its process has ended",
                ),
            )
            while client in self._holders:
                await asyncio.wait([self._change])
            report.cancel()

    def close(self) -> None:
        """Idempotent."""
        for holder in list(self._holders.values()):
            self._drop(holder)

    def _of(self, region: Region) -> list[_Holder]:
        return [holder for holder in self._holders.values() if region in holder.regions.values()]

    def _expect(self, holder: _Holder, remote: int, region: Region) -> None:
        client = holder.client
        if holder.regions.get(remote) is not region or client.leaving:
            return
        text = f"did not let go of a region of {region.client} within {self._ctx.config.timeouts.peer_s:g} s"
        self._ctx.state.error(ErrorCode.BUSY, f"{client} {text}; its session was ended")
        client.socket.send_last(ErrorCode.BUSY, text)
        client.socket.close(text)

    def _drop(self, holder: _Holder) -> None:
        """Its process is dead, or it holds nothing."""
        if self._holders.pop(holder.client, None) is None:
            return
        asyncio.get_running_loop().remove_reader(holder.pidfd)
        os.close(holder.pidfd)
        holder.regions.clear()
        self._tell()

    def _tell(self) -> None:
        self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()
