"""Attaching and leaving of clients: rows, ranks, segments, and the order in which everything of a client ends. Main
thread only.

A client that left keeps its row, and its rank, until every rail has let go of its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import itertools
import logging
import socket
import time

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Message
from railrelay.daemon.client import Client
from railrelay.daemon.client_socket import ATTACH_TIMEOUT_S, NO_DESCRIPTORS, NO_ROOM, ClientSocket
from railrelay.daemon.context import Context, on_worker
from railrelay.daemon.descriptors import discard, hang_up
from railrelay.daemon.local_route import LocalRoute
from railrelay.daemon.memory import client_segment
from railrelay.daemon.peers import Peers
from railrelay.daemon.requests import Requests
from railrelay.daemon.rows import Rows
from railrelay.daemon.sessions import Sessions
from railrelay.daemon.transfers import Transfers
from railrelay.shm_layout import abi, faults
from railrelay.shm_layout.segment import ClientState, NoSharedMemory

MAX_TASKS = 256  # requests of one client at a time
MAX_RANK = 1 << 16
_SAME_VERSION = "install the same railrelay version for both"

log = logging.getLogger("railrelay")


class Clients:
    def __init__(
        self,
        ctx: Context,
        by_row: dict[int, Client],
        requests: Requests,
        sessions: Sessions,
        peers: Peers,
        transfers: Transfers,
        local: LocalRoute,
    ) -> None:
        self.by_row = by_row
        self._ctx = ctx
        self._requests = requests
        self._sessions = sessions
        self._peers = peers
        self._transfers = transfers
        self._local = local
        self._rows = Rows(ctx.config.limits.max_clients)
        self._serials = itertools.count(1)
        self._sockets: dict[ClientSocket, Client | None] = {}  # None: has not asked to attach yet
        self._tasks: dict[ClientSocket, set[asyncio.Task[None]]] = {}
        self._row_freed = asyncio.Event()
        self._closed = False

    def admit(self, unix: socket.socket, pid: int) -> None:
        """Credentials are in order."""
        most = 2 * self._rows.count + 16
        if len(self._sockets) >= most:
            text = (
                f"{len(self._sockets)} connections to the control socket, at most {most} (2 x limits.max_clients + 16);"
                f" one of pid {pid} was closed: end what connects without need, or raise limits.max_clients"
            )
            self._ctx.state.error(ErrorCode.LIMIT, text, key="connections to the control socket")
            hang_up(unix, pid)
            return
        try:
            connection = ClientSocket(unix, pid, self._on_message, self._on_end, self._ctx.state.error)
        except ProcessLookupError:
            hang_up(unix, pid)
            return
        except OSError as failure:
            text = NO_DESCRIPTORS if failure.errno in NO_ROOM else f"pidfd of pid {pid}: {failure.strerror}"
            self._ctx.state.error(ErrorCode.LIMIT, f"pid {pid} cannot attach: {text}")
            with contextlib.suppress(OSError):
                unix.send(protocol.encode(protocol.Failed(0, ErrorCode.LIMIT, text)))
            hang_up(unix, pid)
            return
        self._sockets[connection] = None
        self._tasks[connection] = set()
        asyncio.get_running_loop().call_later(ATTACH_TIMEOUT_S, self._expect_attach, connection)

    def _expect_attach(self, connection: ClientSocket) -> None:
        if connection in self._sockets and self._sockets[connection] is None and not self._tasks[connection]:
            connection.violate(f"did not attach within {ATTACH_TIMEOUT_S:g} s")

    # ---- requests ----

    def _on_message(self, connection: ClientSocket, message: protocol.ClientRequest, fds: list[int]) -> None:
        tasks = self._tasks[connection]
        client = self._sockets[connection]
        first = isinstance(message, protocol.Attach)
        if first is not (client is None and not tasks) or len(tasks) >= MAX_TASKS:
            discard(fds, connection.pid)
            connection.violate(
                f"sent {type(message).__name__} at the wrong time, or more than {MAX_TASKS} requests at a time"
            )
            return
        work = self._answer(connection, message, fds)
        task = self._ctx.spawn(work, f"{type(message).__name__} of pid {connection.pid}")
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        # Here, since one that is cancelled before it begins runs no line of its own.
        task.add_done_callback(lambda _: discard(fds, connection.pid))

    async def _answer(self, connection: ClientSocket, message: protocol.ClientRequest, fds: list[int]) -> None:
        reply: Message | None = protocol.Failed(
            message.id, ErrorCode.INTERNAL, f"{type(message).__name__} failed in the daemon; see `railrelay errors`"
        )
        try:
            client = self._sockets[connection]
            if isinstance(message, protocol.Attach):
                await self._attach(connection, message)
                reply = None
            elif client is None or not client.attached:
                reply = protocol.Failed(message.id, ErrorCode.PROTOCOL, "not attached")
            else:
                answer = self._requests.handle(client, message, fds)
                reply = await answer if inspect.isawaitable(answer) else answer
        except RelayError as failure:
            reply = protocol.Failed(message.id, failure.code, failure.text)
            client = self._sockets.get(connection)
            if failure.code is ErrorCode.LIMIT and client is not None:
                self._ctx.state.client_refused(client.row)
                self._ctx.state.error(failure.code, f"{client}: {failure.text}", key=f"{client}: {failure.text}")
        except NoSharedMemory as failure:
            reply = protocol.Failed(message.id, ErrorCode.NO_MEMORY, failure.strerror or "")
            self._ctx.state.error(ErrorCode.NO_MEMORY, failure.strerror or "", key="shared memory is full")
        except asyncio.CancelledError:  # the daemon ends, or the client is gone: that its connection ends says so
            reply = None
            raise
        except (OverflowError, ValueError) as failure:
            reply = protocol.Failed(message.id, ErrorCode.BAD_ARGUMENT, f"{type(message).__name__}: {failure}")
        except OSError as failure:
            no_room = failure.errno in NO_ROOM
            no_memory = failure.errno == errno.ENOMEM
            code = ErrorCode.LIMIT if no_room else ErrorCode.NO_MEMORY if no_memory else ErrorCode.INTERNAL
            text = f"{type(message).__name__}: {NO_DESCRIPTORS if no_room else failure}"
            reply = protocol.Failed(message.id, code, text)
            self._ctx.state.error(code, f"pid {connection.pid}: {text}")
        finally:
            if reply is not None:
                connection.send(reply)

    # ---- attaching ----

    async def _attach(self, connection: ClientSocket, message: protocol.Attach) -> None:
        ctx, config = self._ctx, self._ctx.config
        own_rail = self._checked_rail(message)
        await self._wait_for_rank(message.rank)
        row = self._rows.take()
        if row is None:
            raise RelayError(
                ErrorCode.LIMIT, f"{self._rows.count} clients are attached already; raise limits.max_clients"
            )
        client = Client(
            row, next(self._serials), connection.pid, message.rank, own_rail, message.name[:63], connection,
            Rows(config.limits.regions_per_client), Rows(config.limits.remotes_per_client), message.device,
        )  # fmt: skip
        self._sockets[connection] = self.by_row[row] = client
        try:
            name = ctx.names.client_segment(row, client.serial)
            segment = client.segment = await on_worker(
                lambda: client_segment(
                    config, name, instance=ctx.instance, client=row, serial=client.serial, pid=client.pid
                )
            )
            faults.point("daemon.attach.segment")
            kick_fds: list[int] = []
            done = ctx.commands.to_all(
                lambda cookie: kick_fds.extend(
                    ctx.plane.attach_client(row, client.serial, segment.fd, segment.nbytes, cookie)
                )
            )
            client.on_plane = True
            await done
        except BaseException:
            asyncio.get_running_loop().call_soon(connection.close, "could not attach")  # after the reply
            raise
        faults.point("daemon.attach.on_rails")
        client.attached = True
        ctx.state.client(
            row, ClientState.ATTACHED, pid=client.pid, rank=client.rank, serial=client.serial, name=client.name
        )
        log.info("%s attached, own rail %d", client, own_rail)
        relay = config.relay
        connection.send(
            protocol.Attached(
                message.id, row, client.serial, ctx.instance, ctx.session, own_rail, segment.nbytes,
                ctx.state.segment.nbytes, relay.lane_bytes, relay.bounce_bytes, int(relay.direct_slice_bytes),
                int(relay.express_bytes), int(config.limits.bytes_per_client),
            ),
            (segment.fd, ctx.state.reader_fd, *kick_fds),
        )  # fmt: skip
        faults.point("daemon.attach.answered")

    def _checked_rail(self, message: protocol.Attach) -> int:
        own_major = abi.CONSTANTS["ABI_MAJOR"]
        if message.protocol != protocol.PROTOCOL_VERSION:
            raise RelayError(
                ErrorCode.VERSION,
                f"the client speaks protocol {message.protocol}, the daemon {protocol.PROTOCOL_VERSION};"
                f" {_SAME_VERSION}",
            )
        if message.abi >> 16 != own_major:
            text = f"the client has shared-memory layout {message.abi >> 16}, the daemon {own_major}; {_SAME_VERSION}"
            raise RelayError(ErrorCode.ABI, text)
        if self._ctx.draining:
            raise RelayError(ErrorCode.DRAINING, "the daemon is going down")
        rail = self._ctx.config.rail_of(message.rank, self._ctx.nearest_rails) if 0 <= message.rank < MAX_RANK else None
        if rail is None:
            raise RelayError(ErrorCode.BAD_RANK, f"rank {message.rank} has no rail; see node.rail_of_rank")
        return rail

    async def _wait_for_rank(self, rank: int) -> None:
        """A restarted engine may attach once its predecessor has drained."""
        most, timeout_s = self._ctx.config.limits.clients_per_rank, self._ctx.config.timeouts.predecessor_s
        deadline = time.monotonic() + timeout_s
        while len(same := [client for client in self.by_row.values() if client.rank == rank]) >= most:
            ending = any(client.leaving or client.socket.exited() for client in same)
            remaining = deadline - time.monotonic()
            if not ending or remaining <= 0:
                drain = f"; {timeout_s:g} s were not enough for a drain" if ending else ""
                raise RelayError(
                    ErrorCode.RANK_TAKEN,
                    f"rank {rank} is taken by {', '.join(map(str, same))} (clients_per_rank {most}){drain}",
                )
            waiter = asyncio.ensure_future(self._row_freed.wait())
            await asyncio.wait([waiter], timeout=remaining)
            waiter.cancel()

    # ---- leaving ----

    def _on_end(self, connection: ClientSocket, reason: str) -> None:
        client = self._sockets.pop(connection)
        tasks = list(self._tasks.pop(connection))
        for task in tasks:
            task.cancel()
        if client is not None and not self._closed:
            client.leaving = True
            self._ctx.state.client_draining(client.row)
            log.info("%s %s", client, reason)
            self._ctx.spawn(self._leave(client, tasks), f"end of {client}")

    async def _leave(self, client: Client, tasks: list[asyncio.Task[None]]) -> None:
        ctx = self._ctx
        faults.point("daemon.detach.begun")
        if tasks:
            await asyncio.wait(tasks)
        self._requests.forget_regions(client)
        withdrawal = ctx.spawn(self._sessions.withdraw(client), f"withdrawal of the regions of {client}")
        if client.on_plane:
            client.rails_left = len(ctx.rails)
            ctx.plane.detach_client(client.row)
            await self._drained(client)
        faults.point("daemon.detach.drained")
        await withdrawal  # until then a rail may be placing a frame in the client's memory
        await self._requests.forget_memory(client)
        await self._local.left(client)
        if client.on_plane:
            ctx.plane.release_client(client.row)
            self._transfers.client_released(client.row)
        faults.point("daemon.detach.released")
        self._peers.leave(client)
        for rail, memory in client.lanes.items():
            ctx.state.lane_free(rail, client.row)
            memory.close()
        for memory in client.bounces:
            memory.close()
        if client.segment is not None:
            client.segment.close()
        ctx.state.client(client.row, ClientState.FREE)
        del self.by_row[client.row]
        self._rows.free(client.row)
        self._row_freed.set()
        self._row_freed.clear()

    def rail_drained(self, row: int) -> None:
        client = self.by_row[row]
        client.rails_left -= 1
        if not client.rails_left:
            client.drained.set()

    async def _drained(self, client: Client) -> None:
        """Slices that the NIC still reads end by themselves, or by the fence, or with a peer that nobody else needs."""
        timeouts = self._ctx.config.timeouts
        if await _within(client.drained, timeouts.settle_s):
            return
        self._peers.fence_senders(self._peers.peers_of(client))
        while not await _within(client.drained, max(timeouts.fence_s, 0.1)):
            self._ctx.state.error(
                ErrorCode.BUSY,
                f"{client} has left, but {client.rails_left} rails wait for an answer of its peers",
                key=f"drain of client {client.row}.{client.serial}",
            )
            self._peers.drop_unreachable(client)

    def violation(self, row: int, result: int, words: tuple[int, ...]) -> None:
        """A rail found words in the client's segment that no correct client writes."""
        client = self.by_row.get(row)
        if client is not None and not client.leaving:
            text = f"shared memory violates the protocol (result {result}, words {words})"
            self._ctx.state.error(ErrorCode.VIOLATION, f"{client}: {text}; it was detached")
            client.socket.send_last(ErrorCode.VIOLATION, text)
            client.socket.close("violated the protocol")

    def tell_all(self, message: Message) -> None:
        for client in self.by_row.values():
            if client.attached and not client.leaving:
                client.send(message)

    def close(self) -> None:
        """Forgets all clients without a drain; the data plane has stopped. Idempotent."""
        self._closed = True
        for connection in list(self._sockets):
            connection.close("the daemon ends")
        for client in self.by_row.values():
            for memory in (*client.lanes.values(), *client.bounces):
                memory.close()
            for region in client.regions.values():
                region.handed.close()
            if client.segment is not None:
                client.segment.close()


async def _within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
