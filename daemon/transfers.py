"""Sending side: the ends of transfers that do not come by themselves. Time-outs, cancel, abort by the decode engine,
the fence that settles what is left, and notifications. Main thread only.

Stages after a time-out: cancel; settle_s later close the connections that still carry slices of the transfer, so that
the fence settles it; fence_s later tell the client that it is unsettled. Only an answer settles a transfer.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable
from typing import Final

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError, Result
from railrelay.daemon.client import Client
from railrelay.daemon.context import Context
from railrelay.daemon.link import Answer, PeerRefused
from railrelay.daemon.peers import Peer, Peers
from railrelay.shm_layout import faults

TICK_S: Final = 0.05

_NOTE_RESULTS: Final = {ErrorCode.REGION_GONE: Result.REGION_GONE, ErrorCode.LIMIT: Result.TIMED_OUT}

Key = tuple[int, int, int]  # client, transfer, generation


class _Stage(enum.IntEnum):
    CANCELLED = 1
    FENCED = 2
    REPORTED = 3


class Transfers:
    def __init__(self, ctx: Context, clients: dict[int, Client]) -> None:
        """``clients``: by row."""
        self._ctx = ctx
        self._clients = clients
        self._stages: dict[Key, _Stage] = {}
        self._waiting: dict[Key, list[asyncio.Future[None]]] = {}

    def tick(self) -> None:
        """Looks for overdue transfers; the conductor calls it every TICK_S."""
        ctx, timeouts = self._ctx, self._ctx.config.timeouts
        stages: dict[Key, _Stage] = {}
        for client, transfer, generation, result, overdue_ns in ctx.plane.overdue(time.monotonic_ns()):
            key = (client, transfer, generation)
            stage = self._stages.get(key)
            if stage is None:
                if not result:
                    ctx.plane.cancel_transfer(*key, Result.TIMED_OUT)
                stage = _Stage.CANCELLED
            elif stage is _Stage.CANCELLED and overdue_ns >= timeouts.settle_s * 1e9:
                ctx.spawn(self._fence(key), f"fence of transfer {transfer}")
                stage = _Stage.FENCED
            elif stage is _Stage.FENCED and overdue_ns >= (timeouts.settle_s + timeouts.fence_s) * 1e9:
                if ctx.plane.report_unsettled(*key):
                    owner = self._clients.get(client)
                    ctx.state.error(
                        ErrorCode.UNSETTLED,
                        f"{owner or f'client {client}'}: a transfer is unsettled {overdue_ns / 1e9:.1f} s after its"
                        " time-out: the peer does not answer",
                        key=f"unsettled {client}",
                    )
                stage = _Stage.REPORTED
            stages[key] = stage
        self._stages = stages

    def ended(self, client: int, transfer: int, generation: int) -> None:
        for waiting in self._waiting.pop((client, transfer, generation), ()):
            if not waiting.done():
                waiting.set_result(None)

    def client_released(self, row: int) -> None:
        """Nothing of its transfers is in flight any more, also of those that never got their last slice."""
        for key in [key for key in self._waiting if key[0] == row]:
            self.ended(*key)

    async def settle(self, key: Key, patience_s: float) -> None:
        """Returns once nothing of the transfer can land any more. After ``patience_s`` what carries it is fenced."""
        if not self._ctx.plane.watch(*key):
            return
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        done, _ = await asyncio.wait([waiting], timeout=patience_s)
        if not done:
            await self._fence(key)
            await waiting

    async def _fence(self, key: Key) -> None:
        plane, cookies = self._ctx.plane, list[int]()
        if key[0] not in self._clients:
            return

        def ask(cookie: int) -> None:
            cookies.append(cookie)
            plane.holders(*key, cookie)

        await self._ctx.commands.to_all(ask)
        for rail, connection in plane.holders_result(cookies[0]):
            plane.close_sender(rail, connection)

    def abort(self, peer: Peer, message: protocol.PeerAbort) -> Awaitable[Answer]:
        """The decode engine behind ``peer`` aborts: from now on nothing goes to it under this tag; what does is ended,
        and the answer comes when that has settled."""
        peer.aborted(self._ctx.plane, message.owner, message.owner_serial, (message.tag,))
        return self._abort(peer, message)

    async def _abort(self, peer: Peer, message: protocol.PeerAbort) -> Answer:
        plane = self._ctx.plane
        found = plane.find_transfers(message.tag, peer.row, message.handles) if message.handles else []
        for key in found:
            plane.cancel_transfer(*key, Result.ABORTED)
            faults.point("daemon.abort.cancelled")
        await asyncio.gather(*(self.settle(key, self._ctx.config.timeouts.settle_s) for key in found))
        return protocol.PeerAborted(message.id, True, len(found))

    async def fence(self, client: Client, message: protocol.Fence) -> protocol.Message:
        key = (client.row, message.transfer, message.generation)
        try:
            async with asyncio.timeout(message.timeout_s):
                await self.settle(key, 0.0)
        except TimeoutError:
            raise RelayError(
                ErrorCode.UNSETTLED,
                f"transfer {message.transfer} is not settled within {message.timeout_s:g} s; ask again",
            ) from None
        return protocol.Done(message.id)

    async def deliver_note(self, client: Client, transfer: int, generation: int, peers: Peers) -> None:
        """All slices are placed: notify the receiver, then the transfer may end."""
        result = Result.OK
        note = client.notes.get(transfer)
        remote = client.remotes.get(note.remote) if note is not None else None
        if note is None or note.generation != generation or remote is None:
            self._ctx.state.error(ErrorCode.PROTOCOL, f"{client}: a transfer with a note that was not given")
            result = Result.PROTOCOL
        else:
            del client.notes[transfer]
            tag, payload, handle = note.tag, note.payload, remote.handle
            faults.point("daemon.note.due")
            try:
                await peers.ask(
                    remote.peer,
                    lambda n: protocol.PeerNote(n, handle, tag, payload),
                    protocol.PeerDone,
                    self._ctx.config.timeouts.peer_s,
                )
            except PeerRefused as refusal:
                result = _NOTE_RESULTS.get(refusal.code, Result.PEER_LOST)
                if refusal.code is ErrorCode.LIMIT:
                    text = f"peer {remote.peer.session} did not take a notification: {refusal.text}"
                    self._ctx.state.error(ErrorCode.LIMIT, text, key=f"notifications of {remote.peer.session}")
            except RelayError:
                result = Result.PEER_LOST
        faults.point("daemon.note.confirmed")
        if self._clients.get(client.row) is client:
            self._ctx.plane.finish_note(client.row, transfer, generation, result)
