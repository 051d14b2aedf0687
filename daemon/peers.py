"""Sending side: the daemons that local clients send to, one control connection each, rail connections to them, and what
happens when one of these is lost. Main thread only.

A lost rail connection is settled by the receiver's word alone (FenceRail). While a peer is silent its slices stay as
they are; only its return, as the same instance or as another, decides about them.

On verbs rails three things go on at once when a connection is lost: the drain here, the fence there, and the making of
the next queue pair. Nothing is sent again before the first two are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError, Result
from railrelay.client.protocol import Message, RailFacts
from railrelay.daemon import dial, rails, verbs
from railrelay.daemon.authentication import shown_token
from railrelay.daemon.client import Client
from railrelay.daemon.config import MAX_CLIENTS
from railrelay.daemon.context import Context
from railrelay.daemon.link import Answer, Link, LinkLost, LinkSilent, PeerRefused
from railrelay.daemon.plane import DataPlane
from railrelay.daemon.rows import Rows
from railrelay.daemon.takeover import Pair, Takeover
from railrelay.shm_layout import faults
from railrelay.shm_layout.segment import PeerState

FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 2.0
MOST_ACKS: Final = 256
MOST_LOST_EARLY: Final = 4096
# How a queue pair ends that does not reach its other end. EFAULT: its device could not send, which soft-RoCE says while
# it has no route, as right after its port came up.
NOT_REACHED: Final = (errno.ETIMEDOUT, errno.EFAULT)

log = logging.getLogger("railrelay")

R = TypeVar("R", bound=Message)
Request = Callable[[int], protocol.PeerMessage]


@dataclass(eq=False)
class Peer:
    row: int
    session: str
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))  # go on over reconnects
    instance: int = 0
    rails: list[RailFacts] = field(default_factory=list)
    local_rails: list[int] = field(default_factory=list)
    link: Link | None = None
    users: set[Client] = field(default_factory=set)
    callers: list[Client] = field(default_factory=list)  # of connect(): one for each call
    openings: Counter[int] = field(default_factory=Counter)  # of regions by local clients, by handle
    fences: int = 0
    opening: int = 0  # queue pairs
    lost_early: set[int] = field(default_factory=set)  # connections whose end there is lost, while some are opened
    owners: dict[int, int] = field(default_factory=dict)  # number of a client of the peer -> its serial
    gone: bool = False
    failure: RelayError | None = None  # of the last attempt to connect
    news: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    keeper: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        return self.link is not None and not self.link.closed.done()

    def is_of(self, client: Client) -> bool:
        """Whether nobody else uses it or waits for it."""
        return self.users | set(self.callers) == {client}

    def aborted(self, plane: DataPlane, owner: int, serial: int, tags: Iterable[int]) -> None:
        """Nothing with these tags may be sent to this client of the peer. RelayError: there cannot be such a client."""
        if not 0 <= owner < MAX_CLIENTS or not 0 <= serial < 1 << 63:
            raise RelayError(ErrorCode.PROTOCOL, f"peer {self.session} names a client {owner} of serial {serial}")
        known = self.owners.get(owner, -1)
        if serial < known:  # what it aborted ended with it
            return
        if serial > known >= 0:
            plane.forget_peer_owner(self.row, owner)
        self.owners[owner] = serial
        for tag in tags:
            if 0 < tag < 1 << 64:
                plane.add_peer_tombstone(self.row, owner, tag)

    @contextlib.contextmanager
    def opens(self) -> Iterator[None]:
        """A queue pair is being made: until it has ended here, what is said of its other end is kept."""
        self.opening += 1
        try:
            yield
        finally:
            self.opening -= 1
            if not self.opening:
                self.lost_early.clear()

    def tell(self) -> None:
        """Wakes whoever waits for a change of link, failure or gone."""
        self.news.set_result(None)
        self.news = asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Sender:
    peer: Peer
    rail: int
    remote_rail: int
    connection: int | None  # as the receiver numbers it; None: the emulated NIC has no receiver
    pair: Pair | None = None  # of the queue pair
    epoch: int = 0
    seen_at: float | None = None  # when it was known that it cannot go on
    asking: asyncio.Task[None] | None = None  # the receiver, what was placed: while the sender is drained
    answer: protocol.RailFenced | None = None
    lost: bool = False  # the data plane uses it no more
    given_back: bool = False  # closed because the rail's own devices carry again


@dataclass(eq=False)
class Successor:
    """Of a lost connection: a queue pair that is made while the fence is under way. Slices that are sent again wait for
    both."""

    sender: Sender  # what is lost
    pair: Pair  # of its devices
    opens: contextlib.ExitStack  # Peer.opens() until it is used or dropped
    link: Link | None
    making: asyncio.Task[None] | None = None
    replaced: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    made: tuple[int, int] | None = None  # connection and endpoint; both ends ready
    wanted: bool = False  # _connect_rail() will take it


class Peers:
    def __init__(
        self, ctx: Context, on_abort: Callable[[Peer, protocol.PeerAbort], Answer | Awaitable[Answer]]
    ) -> None:
        self._ctx = ctx
        self._on_abort = on_abort
        self._rows = Rows(ctx.config.limits.max_peers)
        self._by_row: dict[int, Peer] = {}
        self._by_session: dict[str, Peer] = {}
        self._senders: dict[int, Sender] = {}
        self._successors: dict[tuple[int, int, int], Successor] = {}  # by peer row, rail and remote rail
        self._sender_ids = itertools.count(2, 2)  # even; see rails.Rails
        self._takeover = Takeover(ctx, self.probe)

    def get(self, row: int, client: Client) -> Peer:
        """A peer that this client has connected. RelayError."""
        peer = self._by_row.get(row)
        if peer is None:
            raise RelayError(ErrorCode.PEER_LOST, f"peer {row} is not connected; connect it (again)")
        self.check(peer, client)
        return peer

    def check(self, peer: Peer, client: Client) -> None:
        if peer.gone or client not in peer.users:
            raise RelayError(ErrorCode.PEER_LOST, f"peer {peer.row} is not connected; connect it (again)")

    # ---- connecting and leaving ----

    async def connect(self, client: Client, session: str, timeout_s: float) -> Peer:
        """RelayError."""
        try:
            session = protocol.format_session(*protocol.parse_session(session))
        except ValueError as failure:
            raise RelayError(ErrorCode.BAD_SESSION, str(failure)) from None
        deadline = time.monotonic() + timeout_s
        while True:
            peer = self._by_session.get(session) or self._new_peer(client, session)
            peer.callers.append(client)
            try:
                await self._link(peer, deadline)
                peer.users.add(client)
            except RelayError:
                restarted = peer.gone and peer.instance
                if not restarted:
                    raise
            else:
                return peer
            finally:
                peer.callers.remove(client)
                self._drop_unused(peer)

    def leave(self, client: Client) -> None:
        """The client has nothing in flight any more."""
        for remote in list(client.remotes.values()):
            self.close_region(remote.peer, remote.handle)
        client.remotes.clear()
        for peer in list(self._by_row.values()):
            peer.users.discard(client)
            self._drop_unused(peer)

    def peers_of(self, client: Client) -> list[Peer]:
        return [peer for peer in self._by_row.values() if client in peer.users]

    def drop_unreachable(self, client: Client) -> None:
        """A leaving client waits for answers of peers that cannot be reached: those nobody else uses are given up."""
        for peer in self.peers_of(client):
            if not peer.connected and all(user.leaving for user in peer.users):
                self.drop(peer, "cannot be reached, and its last user has left")

    def _drop_unused(self, peer: Peer) -> None:
        if not peer.users and not peer.callers:
            self.drop(peer, "")

    def _new_peer(self, client: Client, session: str) -> Peer:
        most, left = self._rows.count, self._rows.left
        own = sum(peer.is_of(client) for peer in self._by_row.values() if not peer.gone)
        if left and own >= 2 * left:  # a client gets what is free but for a part, so that others have some, too
            raise RelayError(
                ErrorCode.LIMIT,
                f"{client} alone uses or waits for {own} of {most} peers, and {left} are left for all others;"
                " raise limits.max_peers",
            )
        row = self._rows.take()
        if row is None:
            raise RelayError(ErrorCode.LIMIT, f"all {most} peers are in use or waited for; raise limits.max_peers")
        peer = self._by_row[row] = self._by_session[session] = Peer(row, session)
        self._show(peer, PeerState.CONNECTING)
        peer.keeper = self._ctx.spawn(self._keep(peer), f"control connection to {session}")
        return peer

    def drop(self, peer: Peer, text: str, code: ErrorCode = ErrorCode.PEER_LOST) -> None:
        """Ends everything with the peer; its users are told ``text``, who waits for it is told ``code``. Idempotent."""
        if peer.gone:
            return
        peer.gone = True
        if text:
            text = f"peer {peer.session} {text}"
            peer.failure = RelayError(code, text)
            if peer.instance or code is ErrorCode.UNAUTHENTICATED:
                self._ctx.state.error(code, text)
        del self._by_session[peer.session]
        if peer.keeper is not None and peer.keeper is not asyncio.current_task():
            peer.keeper.cancel()
        if peer.link is not None:
            peer.link.close("not used any more")
        peer.tell()
        for client in peer.users:
            client.send(protocol.PeerDown(peer.row, peer.session, text))
        faults.point("daemon.peer.dropped")
        self._ctx.spawn(self._forget(peer), f"end of peer {peer.session}")

    async def _forget(self, peer: Peer) -> None:
        plane = self._ctx.plane
        # First, so that no rail takes a new slice for the peer after it has dropped the old ones.
        for client in peer.users:
            for remote in client.remotes.values():
                if remote.peer is peer:
                    plane.remove_remote(client.row, remote.index)
        if peer.instance:
            await self._ctx.commands.to_all(lambda cookie: plane.drop_peer(peer.row, Result.PEER_LOST, cookie))
            plane.forget_peer(peer.row)
        self._senders = {number: sender for number, sender in self._senders.items() if sender.peer is not peer}
        for key in [key for key in self._successors if key[0] == peer.row]:
            self._drop_successor(self._successors.pop(key))
        self._takeover.forget(peer)
        for rail in self._ctx.verbs.ports:
            self._show_rail(rail)
        del self._by_row[peer.row]
        self._ctx.state.peer(peer.row, PeerState.FREE, session="", instance=0, rails=0)
        self._rows.free(peer.row)

    # ---- the control connection ----

    async def _keep(self, peer: Peer) -> None:
        """Connects, and connects again, until the peer is dropped."""
        pause_s = FIRST_PAUSE_S
        while not peer.gone:
            try:
                link = await self._dial(peer)
            except PeerRefused as refusal:
                stranger = refusal.code is ErrorCode.UNAUTHENTICATED
                code = ErrorCode.UNAUTHENTICATED if stranger else ErrorCode.PEER_LOST
                text = f"refused: {refusal.text}"
                # Slices are settled by the word of the peer itself that it has ended the session, and by nothing else.
                if not peer.instance or (refusal.proved and refusal.code is ErrorCode.PEER_LOST):
                    self.drop(peer, text, code)
                    return
                peer.failure = RelayError(refusal.code, f"peer {peer.session} {text}")
                if refusal.code is not ErrorCode.DRAINING:
                    self._ctx.state.error(refusal.code, peer.failure.text)
            except (OSError, RelayError) as failure:
                reason = "no answer" if isinstance(failure, TimeoutError) else str(failure)
                stranger = isinstance(failure, RelayError) and failure.code is ErrorCode.UNAUTHENTICATED
                code = ErrorCode.UNAUTHENTICATED if stranger else ErrorCode.PEER_UNREACHABLE
                peer.failure = RelayError(code, f"peer {peer.session}: {reason}")
                if peer.instance or stranger:
                    self._ctx.state.error(code, peer.failure.text)
            else:
                began = time.monotonic()
                self._up(peer, link)
                reason = await link.closed
                if time.monotonic() - began > LONGEST_PAUSE_S:  # else it is one that breaks as soon as it is there
                    pause_s = FIRST_PAUSE_S
                self._ctx.state.error(
                    ErrorCode.CONNECTION_LOST, f"peer {peer.session}: control connection ended: {reason}"
                )
                self._show(peer, PeerState.LOST)
                self._close_pairs(f"control connection to {peer.session} ended", peer)  # the receiver fences them, too
            peer.tell()
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _dial(self, peer: Peer) -> Link:
        ctx, timeout_s = self._ctx, self._ctx.config.timeouts.connect_s
        tls = ctx.tls.connecting()
        link = await dial.connect(peer.session, tls, lambda: Link(ctx.state.error, peer.ids), timeout_s)

        def hello(number: int) -> protocol.Hello:
            return protocol.Hello(number, ctx.session, peer.instance, ctx.rails, [])

        try:
            challenge, welcome = await dial.greet(link, ctx.secrets, ctx.instance, hello, protocol.Welcome, timeout_s)
            rails.check_facts(peer.session, challenge.instance, welcome.rails)
            _check_same(peer, challenge, welcome)
            if not peer.instance:
                ctx.plane.add_peer(peer.row, len(welcome.rails))
        except BaseException:
            link.close("handshake failed")
            raise
        faults.point("daemon.peer.welcomed")
        peer.instance, peer.rails = challenge.instance, welcome.rails
        peer.local_rails = _same_rails(ctx.rails, welcome.rails)
        return link

    def _up(self, peer: Peer, link: Link) -> None:
        link.handlers = {
            protocol.PeerAbort: lambda message: self._on_abort(peer, message),
            protocol.PeerRegionGone: lambda message: self._region_gone(peer, message),
            protocol.RailLost: lambda message: self._rail_lost(peer, message),
            protocol.RailState: lambda message: self._rail_state(peer, message),
        }
        link.keep_alive(self._ctx.config.timeouts.peer_s)
        peer.link = link
        log.info("peer %s connected, instance %016x, %d rails", peer.session, peer.instance, len(peer.rails))
        self._show(peer, PeerState.CONNECTED)
        peer.tell()

    async def _link(self, peer: Peer, deadline: float) -> Link:
        """RelayError."""
        while not peer.connected:
            remaining = deadline - time.monotonic()
            if peer.gone:
                raise peer.failure or RelayError(ErrorCode.PEER_LOST, f"peer {peer.session} was dropped")
            if remaining <= 0:
                raise peer.failure or RelayError(
                    ErrorCode.PEER_UNREACHABLE, f"peer {peer.session}: not connected in time"
                )
            await asyncio.wait([peer.news], timeout=remaining)
        assert peer.link is not None
        return peer.link

    async def ask(self, peer: Peer, request: Request, reply: type[R], timeout_s: float) -> R:
        """A request that may be repeated under the same id if the connection is lost meanwhile. RelayError."""
        deadline = time.monotonic() + timeout_s
        number = next(peer.ids)
        while True:
            link = await self._link(peer, deadline)
            try:
                return await link.request(request(number), reply, max(0.0, deadline - time.monotonic()))
            except LinkLost:
                await asyncio.sleep(0)
            except LinkSilent as failure:
                raise RelayError(failure.code, f"peer {peer.session}: {failure.text}") from None

    # ---- regions ----

    def violated(self, peer: Peer, failure: RelayError) -> None:
        """The peer has answered what no correct one does."""
        if peer.link is not None:
            peer.link.violate(failure.text)

    def region_opened(self, peer: Peer, handle: int) -> None:
        peer.openings[handle] += 1
        self._show_counts(peer)

    def close_region(self, peer: Peer, handle: int) -> None:
        """Not repeated if the connection is lost: a second close could take another client's opening back."""
        peer.openings[handle] -= 1
        last = peer.openings[handle] <= 0
        if last:
            del peer.openings[handle]
        self._show_counts(peer)
        if peer.gone:
            return
        if self._ctx.verbs and last:  # what another client goes on writing there never drains
            self._ctx.spawn(self._drain_and_close(peer, handle), f"close of a region of {peer.session}")
        elif peer.link is not None:
            peer.link.send(protocol.PeerCloseRegion(next(peer.ids), handle))

    async def _drain_and_close(self, peer: Peer, handle: int) -> None:
        link = peer.link
        await self._drained(peer, handle)
        if link is not None and link is peer.link and not peer.gone:
            link.send(protocol.PeerCloseRegion(next(peer.ids), handle))

    async def _drained(self, peer: Peer, handle: int) -> None:
        plane = self._ctx.plane
        await self._ctx.commands.to_all(lambda cookie: plane.drain_handle(peer.row, handle, cookie))

    def _show_counts(self, peer: Peer) -> None:
        if not peer.gone:
            self._ctx.state.peer_counts(peer.row, regions=peer.openings.total(), fences=peer.fences)

    def _region_gone(self, peer: Peer, message: protocol.PeerRegionGone) -> Answer | Awaitable[Answer]:
        for client in peer.users:
            for remote in client.remotes.values():
                if remote.peer is peer and remote.handle == message.handle:
                    client.send(protocol.RegionGone(remote.index))
                    if self._ctx.verbs:  # nothing but this keeps a slice from being posted
                        self._ctx.plane.remove_remote(client.row, remote.index)
        return self._answer_gone(peer, message) if self._ctx.verbs else protocol.PeerDone(message.id)

    async def _answer_gone(self, peer: Peer, message: protocol.PeerRegionGone) -> Answer:
        await self._drained(peer, message.handle)
        return protocol.PeerDone(message.id)

    # ---- rail connections ----

    def connect_wanted(self, rail: int, row: int, remote_rail: int, express: bool, epoch: int) -> None:
        peer = self._by_row.get(row)
        if peer is not None and not peer.gone:
            if rail in self._ctx.verbs.ports:
                self._takeover.wanted(peer, rail, remote_rail)
                if successor := self._successors.get((row, rail, remote_rail)):
                    successor.wanted = True
            self._ctx.spawn(
                self._connect_rail(peer, rail, remote_rail, express, epoch),
                f"rail {rail} to rail {remote_rail} of {peer.session}",
            )

    async def _connect_rail(self, peer: Peer, rail: int, remote_rail: int, express: bool, epoch: int) -> None:
        ctx, deadline, pause_s = self._ctx, time.monotonic() + self._ctx.config.timeouts.connect_s, FIRST_PAUSE_S
        nics = {ctx.rails[rail].nic, peer.rails[remote_rail].nic}
        if "emulated" in nics or len(nics) > 1:
            self._connect_emulated(peer, rail, remote_rail, express, epoch)
            return
        work = self._connect_verbs if "verbs" in nics else self._connect_tcp
        while not peer.gone:
            try:
                sender, handed = await work(peer, rail, remote_rail, express, epoch, deadline)
            except (RelayError, OSError) as failure:  # whatever it is, the path must not wait for ever
                if peer.gone:
                    return
                text = failure.text if isinstance(failure, RelayError) else f"rail {rail} to {peer.session}: {failure}"
                ctx.state.error(ErrorCode.RAIL_DOWN, text)
                if time.monotonic() >= deadline:
                    self._fail_path(peer, rail, remote_rail, express)
                    return
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)
                continue
            faults.point("daemon.rail.connected")
            number = next(self._sender_ids)
            self._senders[number] = sender
            ctx.plane.add_sender(rail, number, peer.row, remote_rail, express, epoch, handed)
            if sender.pair is not None:
                self._show_rail(rail)
                self._takeover.carries(peer, sender, partial(self._end_takeover, number))
            return

    async def _connect_tcp(
        self, peer: Peer, rail: int, remote_rail: int, express: bool, epoch: int, deadline: float
    ) -> tuple[Sender, int]:
        """The sender, and its socket for the data plane. RelayError."""
        token = await self.ask(
            peer,
            lambda n: protocol.RailConnect(n, rail, remote_rail, express, epoch),
            protocol.RailToken,
            _left(deadline),
        )
        connected = await rails.connect(
            self._ctx.rails[rail],
            peer.rails[remote_rail],
            remote_rail,
            token.connection,
            shown_token(peer.link.keys if peer.link is not None else None, token.token, token.connection, remote_rail),
            self._ctx.config.tcp,
            _left(deadline),
        )
        if peer.gone:
            connected.close()
            raise RelayError(ErrorCode.PEER_LOST, f"peer {peer.session} was dropped")
        return Sender(peer, rail, remote_rail, token.connection), connected.detach()

    async def _connect_verbs(
        self, peer: Peer, rail: int, remote_rail: int, express: bool, epoch: int, deadline: float
    ) -> tuple[Sender, int]:
        """The sender, and its endpoint for the data plane. RelayError."""
        taken = await self._take_successor(peer, rail, remote_rail)
        if taken is None:
            pair = self._takeover.choose(peer, rail, remote_rail)
            with peer.opens():
                made = await self._connected_pair(peer, rail, remote_rail, pair, express, epoch, _left(deadline))
            taken = (pair, *made)
        pair, connection, endpoint = taken
        if peer.gone:
            self._ctx.verbs.drop(endpoint)
            raise RelayError(ErrorCode.PEER_LOST, f"peer {peer.session} was dropped")
        return Sender(peer, rail, remote_rail, connection, pair, epoch), endpoint

    async def _connected_pair(
        self, peer: Peer, rail: int, remote_rail: int, pair: Pair, express: bool, epoch: int, timeout_s: float
    ) -> tuple[int, int]:
        """As _queue_pair()."""

        def request(number: int, endpoint: protocol.Endpoint) -> protocol.RailConnect:
            return protocol.RailConnect(number, rail, remote_rail, express, epoch, endpoint, pair.there)

        return await self._queue_pair(peer, rail, pair, request, timeout_s)

    # ---- the successor of a lost queue pair ----

    def _prepare(self, sender: Sender) -> None:
        peer, key = sender.peer, _path_of(sender)
        if key in self._successors or not peer.connected:
            return
        opens = contextlib.ExitStack()
        opens.enter_context(peer.opens())
        pair = self._takeover.choose(peer, sender.rail, sender.remote_rail)
        successor = self._successors[key] = Successor(sender, pair, opens, peer.link)
        successor.making = self._ctx.spawn(
            self._make(successor), f"next queue pair of rail {sender.rail} to {peer.session}"
        )

    async def _make(self, successor: Successor) -> None:
        sender, timeout_s = successor.sender, self._ctx.config.timeouts.connect_s
        peer, rail, epoch = sender.peer, sender.rail, sender.epoch + 1
        try:
            successor.made = await self._connected_pair(
                peer, rail, sender.remote_rail, successor.pair, False, epoch, timeout_s
            )
        except RelayError as failure:  # it is tried again if it is wanted
            log.info("rail %s to %s: %s", self._ctx.rails[rail].identity, peer.session, failure.text)

    def _replace_successors(self) -> None:
        """A port went down. Those of its device will not be used, and who waits for one waits for another."""
        for key, old in list(self._successors.items()):
            if old.pair == self._takeover.choose(old.sender.peer, old.sender.rail, old.sender.remote_rail):
                continue
            self._drop_successor(self._successors.pop(key))
            self._prepare(old.sender)
            if new := self._successors.get(key):
                new.wanted = old.wanted
            old.replaced.set_result(None)

    async def _take_successor(self, peer: Peer, rail: int, remote_rail: int) -> tuple[Pair, int, int] | None:
        """Its devices, connection and endpoint. None: there is none, or it cannot be used any more."""
        key = (peer.row, rail, remote_rail)
        while successor := self._successors.get(key):
            assert successor.making is not None
            await asyncio.wait([successor.making, successor.replaced], return_when=asyncio.FIRST_COMPLETED)
            if self._successors.get(key) is not successor:
                continue
            del self._successors[key]
            taken, made = None, successor.made
            if made is not None and self._stands(successor, made[0]):
                taken, successor.made = (successor.pair, *made), None
            self._drop_successor(successor)
            return taken
        return None

    def _stands(self, successor: Successor, connection: int) -> bool:
        """What ends a sender that is in use has not come."""
        lost = successor.sender
        peer, best = lost.peer, self._takeover.choose(lost.peer, lost.rail, lost.remote_rail)
        same = peer.connected and peer.link is successor.link and successor.pair == best
        return same and connection not in peer.lost_early and self._takeover.usable(peer, best)

    def _drop_successor(self, successor: Successor) -> None:
        """Once it is made, if it was not taken."""

        def drop(_: asyncio.Future[None]) -> None:
            successor.opens.close()
            made, successor.made = successor.made, None
            if made is not None:
                self._ctx.verbs.drop(made[1])
                self._forsake(successor.sender.peer, made[0])

        assert successor.making is not None
        if successor.making.done():
            drop(successor.making)
        else:
            successor.making.add_done_callback(drop)

    async def _queue_pair(
        self,
        peer: Peer,
        rail: int,
        pair: Pair,
        request: Callable[[int, protocol.Endpoint], protocol.RailConnect],
        timeout_s: float,
    ) -> tuple[int, int]:
        """(connection as the receiver numbers it, endpoint here), both ends ready. Inside peer.opens(). RelayError."""
        nics, usable = self._ctx.verbs, self._takeover.usable(peer, pair)
        try:
            endpoint, own = await nics.open(rail, pair.here)
        except RelayError:
            self._takeover.suspect(peer, pair)
            raise
        try:
            token = await self.ask(peer, lambda n: request(n, own), protocol.RailToken, timeout_s)
        except BaseException as failure:
            if isinstance(failure, PeerRefused) and failure.code is ErrorCode.RAIL_DOWN:  # its end failed
                self._takeover.suspect(peer, pair)
            nics.drop(endpoint)
            raise
        link = peer.link
        try:
            remote = verbs.checked_endpoint(f"peer {peer.session}", token.endpoint, pair.there, peer.rails)
        except RelayError as failure:
            nics.drop(endpoint)
            self._forsake(peer, token.connection)
            if failure.code is ErrorCode.PROTOCOL:
                self.violated(peer, failure)
            raise
        try:
            await nics.connect(rail, endpoint, own, remote)
        except BaseException as failure:
            if isinstance(failure, RelayError):
                self._takeover.suspect(peer, pair)
            self._forsake(peer, token.connection)
            raise
        # What ends a sender that is in use may have come before it was one.
        fenced = token.connection in peer.lost_early or peer.link is not link or not peer.connected
        if fenced or (usable and not self._takeover.usable(peer, pair)):
            nics.drop(endpoint)
            self._forsake(peer, token.connection)
            reason = "the peer has lost its end" if fenced else "a port went down"
            text = f"rail {rail} to rail {pair.there} of {peer.session}: {reason} while the queue pair was connected"
            raise RelayError(ErrorCode.CONNECTION_LOST, f"{text}; it is tried again")
        return token.connection, endpoint

    def _forsake(self, peer: Peer, connection: int) -> None:
        """The receiver has a queue pair that nobody will use."""
        if not peer.gone and peer.link is not None:
            self._ctx.spawn(self._fence_unused(peer, connection), f"end of an unused queue pair of {peer.session}")

    async def _fence_unused(self, peer: Peer, connection: int) -> None:
        with contextlib.suppress(RelayError):  # it ends with the control connection, too
            await self.ask(
                peer,
                lambda n: protocol.FenceRail(n, connection),
                protocol.RailFenced,
                self._ctx.config.timeouts.peer_s,
            )

    async def probe(self, peer: Peer, rail: int, remote_rail: int) -> None:
        """Whether the devices of the two rails reach each other: a queue pair that carries nothing but a write of zero
        bytes. RelayError."""
        pair, timeout_s = Pair(rail, remote_rail), self._ctx.config.timeouts.connect_s

        def request(number: int, endpoint: protocol.Endpoint) -> protocol.RailConnect:
            return protocol.RailConnect(number, rail, remote_rail, False, 0, endpoint, remote_rail, probe=True)

        with peer.opens():
            connection, endpoint = await self._queue_pair(peer, rail, pair, request, timeout_s)
        try:
            await self._ctx.verbs.probe(rail, endpoint, timeout_s)
        finally:
            self._ctx.verbs.drop(endpoint)
            self._forsake(peer, connection)

    def _connect_emulated(self, peer: Peer, rail: int, remote_rail: int, express: bool, epoch: int) -> None:
        """There is nothing to connect: the emulated NIC copies between clients of this daemon."""
        ctx = self._ctx
        local, remote = ctx.rails[rail], peer.rails[remote_rail]
        if peer.instance == ctx.instance and local.nic == remote.nic:
            number = next(self._sender_ids)
            self._senders[number] = Sender(peer, rail, remote_rail, None)
            ctx.plane.add_sender(rail, number, peer.row, remote_rail, express, epoch, -1)
            return
        ctx.state.error(
            ErrorCode.RAIL_DOWN,
            f"rail {local.identity} ({local.nic}) to {remote.identity} ({remote.nic}) of {peer.session}: "
            + (
                "the emulated NIC only reaches clients of its own daemon"
                if "emulated" in (local.nic, remote.nic)
                else "configure the same nic for this rail on both nodes"
            ),
        )
        self._fail_path(peer, rail, remote_rail, express)

    def _fail_path(self, peer: Peer, rail: int, remote_rail: int, express: bool) -> None:
        plane = self._ctx.plane
        self._takeover.given_up(peer, rail, remote_rail)
        self._ctx.commands.send(
            lambda cookie: plane.fail_path(rail, peer.row, remote_rail, express, Result.RAIL_DOWN, cookie)
        )

    def sender_ending(self, number: int, error: int, in_flight: int) -> None:
        """A queue pair that posts nothing more is drained; the receiver is fenced and a successor made meanwhile."""
        sender = self._senders.get(number)
        if sender is None or sender.peer.gone or sender.pair is None:
            return
        peer = sender.peer
        if error in NOT_REACHED:
            self._takeover.suspect(peer, sender.pair)
        if in_flight:
            self._takeover.lost(peer, sender.rail, sender.remote_rail, sender.seen_at or time.monotonic())
            self._prepare(sender)  # first: it takes longer
        sender.asking = self._ctx.spawn(self._ask_early(sender), f"fence of rail {sender.rail} at {peer.session}")

    async def _ask_early(self, sender: Sender) -> None:
        with contextlib.suppress(RelayError):  # it is asked again
            sender.answer = await self._ask_fence(sender, 0.0)

    async def _ask_fence(self, sender: Sender, wait_s: float) -> protocol.RailFenced:
        assert sender.connection is not None
        request = partial(protocol.FenceRail, connection=sender.connection, wait_s=wait_s)
        return await self.ask(sender.peer, request, protocol.RailFenced, self._ctx.config.timeouts.peer_s)

    def sender_lost(self, number: int, error: int) -> None:
        sender = self._senders.get(number)
        if sender is None or sender.peer.gone:
            return
        peer, sender.lost = sender.peer, True
        peer.fences += 1
        self._show_counts(peer)
        where = f"peer {peer.session}: connection of rail {sender.rail} to rail {sender.remote_rail}"
        if sender.given_back:
            log.info("%s given back to its own devices", where)
        else:
            reason = os.strerror(error) if error else "closed"
            self._ctx.state.error(ErrorCode.CONNECTION_LOST, f"{where} lost (errno {error}, {reason})")
        self._ctx.spawn(self._settle(number, sender), f"fence of rail {sender.rail} at {peer.session}")

    async def _settle(self, number: int, sender: Sender) -> None:
        peer, plane, connection = sender.peer, self._ctx.plane, sender.connection
        if connection is None:  # nothing is posted any more
            await self._ctx.commands.send(partial(plane.settle_sender, sender.rail, number, 0, b""))
            self._senders.pop(number, None)
            return
        wait_s = 0.0
        faults.point("daemon.fence.asked")
        if sender.asking is not None:
            await asyncio.wait([sender.asking])
        while not peer.gone:
            try:
                answer, sender.answer = sender.answer, None
                fenced = answer or await self._ask_fence(sender, wait_s)
            except PeerRefused as refusal:
                self.drop(peer, f"cannot tell what was placed: {refusal.text}")
            except RelayError as failure:
                if peer.gone:
                    return
                self._ctx.state.error(failure.code, f"fence of rail {sender.rail} waits: {failure.text}")
                await asyncio.sleep(FIRST_PAUSE_S)
            else:
                acks, odd = divmod(len(fenced.acks), protocol.ACK.size)
                if odd or acks > min(fenced.placed, MOST_ACKS) or fenced.placed >= 1 << 63:
                    self.drop(peer, f"says that {fenced.placed} frames came, with {len(fenced.acks)} bytes of results")
                    return
                faults.point("daemon.fence.answered")
                settle = partial(plane.settle_sender, sender.rail, number, fenced.placed, fenced.acks)
                await self._ctx.commands.send(settle)
                self._senders.pop(number, None)
                if sender.pair is not None:
                    self._end_unwanted(sender)
                    self._takeover.settled(peer, sender.rail, sender.remote_rail)
                    self._show_rail(sender.rail)
                if all(result != Result.UNSETTLED for _, result in protocol.ACK.iter_unpack(fenced.acks)):
                    return
                wait_s = self._ctx.config.timeouts.peer_s / 2
                await asyncio.sleep(FIRST_PAUSE_S)

    def _end_unwanted(self, sender: Sender) -> None:
        """Its settlement is in force: slices that are sent again have asked for a connection before."""
        successor = self._successors.get(_path_of(sender))
        if successor is not None and not successor.wanted:
            self._drop_successor(self._successors.pop(_path_of(sender)))

    # ---- ports of verbs rails ----

    def _end_takeover(self, number: int) -> None:
        """The rail's own devices carry again: what is not placed is sent over them, after the fence."""
        sender = self._senders.get(number)
        if sender is not None and not sender.lost:
            sender.given_back = True
            self._ctx.plane.close_sender(sender.rail, number)

    def _rail_state(self, peer: Peer, message: protocol.RailState) -> None:
        if not 0 <= message.rail < len(peer.rails) or peer.rails[message.rail].nic != "verbs":
            raise RelayError(ErrorCode.PROTOCOL, f"peer {peer.session} tells the state of a rail {message.rail}")
        peer.rails[message.rail] = msgspec.structs.replace(peer.rails[message.rail], up=message.up)
        if not message.up:
            self._close_pairs(f"port of rail {message.rail} of {peer.session} is down", peer, there=message.rail)
            self._replace_successors()
        self._takeover.port_changed(message.up, self._used(peer), there=message.rail)

    def _rail_lost(self, peer: Peer, message: protocol.RailLost) -> None:
        for number, sender in self._senders.items():
            if sender.peer is peer and sender.connection == message.connection and sender.pair is not None:
                self._close_pair(number, sender)
                return
        if peer.opening and len(peer.lost_early) < MOST_LOST_EARLY:  # it may be one that is not a sender yet
            peer.lost_early.add(message.connection)

    def port_changed(self, rail: int, up: bool) -> None:
        """Of a rail here; its facts know it already."""
        if not up:
            self._close_pairs(f"port of rail {rail} is down", here=rail)
            self._replace_successors()
        self._takeover.port_changed(up, self._used(), here=rail)

    def _used(self, peer: Peer | None = None) -> list[Sender]:
        """Queue pairs to this peer, or to all."""
        return [
            sender
            for sender in self._senders.values()
            if sender.pair is not None and not sender.lost and peer in (None, sender.peer)
        ]

    def _close_pairs(
        self, why: str, peer: Peer | None = None, *, here: int | None = None, there: int | None = None
    ) -> None:
        """Queue pairs, of all peers or one, on all devices or those of a rail here or there."""
        for number, sender in self._senders.items():
            pair = sender.pair
            if pair is None or peer not in (None, sender.peer):
                continue
            if here in (None, pair.here) and there in (None, pair.there):
                log.info("%s: connection of rail %d to %s closed", why, sender.rail, sender.peer.session)
                self._close_pair(number, sender)

    def _close_pair(self, number: int, sender: Sender) -> None:
        sender.seen_at = sender.seen_at or time.monotonic()
        self._ctx.plane.close_sender(sender.rail, number)

    def _show_rail(self, rail: int) -> None:
        """By which device the rail sends now."""
        others = [
            sender.pair.here
            for sender in self._senders.values()
            if sender.rail == rail and sender.pair is not None and sender.pair.here != rail
        ]
        self._ctx.state.rail_through(rail, others[-1] if others else rail)

    def fence_senders(self, peers: list[Peer]) -> None:
        """Closes the rail connections to these peers; their slices are settled by the fence."""
        for number, sender in self._senders.items():
            if sender.peer in peers:
                self._ctx.plane.close_sender(sender.rail, number)

    def _show(self, peer: Peer, state: PeerState) -> None:
        if not peer.gone:
            self._ctx.state.peer(peer.row, state, session=peer.session, instance=peer.instance, rails=len(peer.rails))

    def close(self) -> None:
        """Closes the control connections. Idempotent; the data plane closes what belongs to rails."""
        for peer in self._by_row.values():
            peer.gone = True
            peer.tell()
            if peer.keeper is not None:
                peer.keeper.cancel()
            if peer.link is not None:
                peer.link.close("the daemon ends")


def _path_of(sender: Sender) -> tuple[int, int, int]:
    return sender.peer.row, sender.rail, sender.remote_rail


def _left(deadline: float) -> float:
    return max(0.05, deadline - time.monotonic())


def _check_same(peer: Peer, challenge: protocol.Challenge, welcome: protocol.Welcome) -> None:
    if peer.instance and (challenge.instance, len(welcome.rails)) != (peer.instance, len(peer.rails)):
        raise PeerRefused(ErrorCode.PEER_LOST, "another instance answers", proved=True)


def _same_rails(own: list[RailFacts], theirs: list[RailFacts]) -> list[int]:
    """For each of their rails the own one of the same identity, or else the one at the same position, modulo ours."""
    by_identity = {facts.identity: index for index, facts in enumerate(own)}
    return [by_identity.get(facts.identity, index % len(own)) for index, facts in enumerate(theirs)]
