"""Receiving side: sessions of sending daemons, the regions each of them may write, and the fence. Main thread only.

A session belongs to one instance of a sending daemon. It outlives its control connection for session_linger_s, so that
the sender can come back and ask which frames were placed; what it could still write is fenced at once.

A sender on a verbs rail writes by itself, and nothing here can refuse a slice: before memory is withdrawn the sender
has confirmed that it lets go, or its queue pairs are fenced. What a sender must know before it writes again (regions
that are gone, tags that were aborted) is owed to it until it has confirmed it, over any number of control connections:
it gets that before any new queue pair.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ipaddress
import logging
import socket
import struct
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError, Result
from railrelay.client.protocol import RailFacts
from railrelay.daemon import authentication, topology
from railrelay.daemon.authentication import ACCEPTING
from railrelay.daemon.client import Client, Region
from railrelay.daemon.client_socket import MAX_EVENTS_UNSENT
from railrelay.daemon.context import Context, run_on_worker
from railrelay.daemon.flush import Flush
from railrelay.daemon.link import MAX_REQUESTS, Answer, Link
from railrelay.daemon.offers import SESSION_CHARACTERS, Offers
from railrelay.daemon.rails import Rails, check_facts
from railrelay.daemon.rows import Handles, Rows
from railrelay.daemon.verbs import checked_endpoint
from railrelay.shm_layout import faults

HELLO_TIMEOUT_S: Final = 5.0
MAX_STRANGERS: Final = 64  # control connections that have not authenticated, or said Hello, yet
STRANGERS_OF_A_HOST: Final = 16
DEBTS_AT_A_TIME: Final = 64
KEPT_FENCES: Final = 1024  # a session, of those that wait for nothing
LONGEST_NEWS_WAIT_S: Final = 60.0
KEPT_NOTES: Final = 4096  # ids of delivered notes a session, to tell a repeated one
PROBE_LIFE_S: Final = 30.0

Debt = tuple[str, int, int]  # what is owed: "gone", handle; or "abort", owner's serial, tag

log = logging.getLogger("railrelay")


@dataclass
class Export:
    """A region as one session may write it; ``users`` counts its PeerOpenRegion minus PeerCloseRegion. withdrawn: it is
    given out no more, and its sender is told."""

    handle: int
    region: Region
    users: int = 0
    letting_go: asyncio.Task[None] | None = None
    removal: asyncio.Future[int] | None = None

    @property
    def withdrawn(self) -> bool:
        return self.letting_go is not None or self.removal is not None


@dataclass
class Probe:
    """The receiving end of a queue pair that carries nothing."""

    endpoint: int
    expiry: asyncio.TimerHandle


@dataclass
class Fenced:
    """What arrived over a connection that is closed for good."""

    placed: int
    results: dict[int, int] = field(default_factory=dict)  # by sequence
    unsettled: set[int] = field(default_factory=set)  # sequences: their owners have still to copy them
    news: asyncio.Event = field(default_factory=asyncio.Event)  # since it was asked last

    def answer(self, number: int) -> protocol.RailFenced:
        self.news.clear()
        acks = b"".join(protocol.ACK.pack(*ack) for ack in self.results.items())
        return protocol.RailFenced(number, self.placed, acks)


@dataclass
class Session:
    index: int
    instance: int
    name: str
    rails: list[RailFacts]
    link: Link | None = None
    exports: dict[int, Export] = field(default_factory=dict)  # by handle
    tokens: set[int] = field(default_factory=set)  # connections that have not come yet
    receivers: dict[int, int] = field(default_factory=dict)  # connection -> rail
    fenced: OrderedDict[int, Fenced] = field(default_factory=OrderedDict)  # by connection
    waiting: dict[int, asyncio.Future[None]] = field(default_factory=dict)  # connections being fenced
    notes: OrderedDict[int, None] = field(default_factory=OrderedDict)
    notes_waiting: int = 0
    opening: int = 0  # queue pairs
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)  # local and remote rail -> latest connection
    probes: dict[int, Probe] = field(default_factory=dict)  # by connection
    owed: dict[Debt, Callable[[int], protocol.PeerMessage]] = field(default_factory=dict)
    paying: asyncio.Future[None] | None = None  # ends when what was owed at the last connection is on its way
    told: dict[int, tuple[int, Link | None]] = field(default_factory=dict)  # client's row -> its serial, and where
    linger: asyncio.TimerHandle | None = None
    ended: bool = False
    ending: asyncio.Task[None] | None = None  # until its regions are withdrawn


class Sessions:
    def __init__(self, ctx: Context, rails: Rails, offers: Offers, flush: Flush) -> None:
        self._ctx = ctx
        self._rails = rails
        self._offers = offers
        self._flush = flush
        self._rows = Rows(ctx.config.limits.max_peers)
        self._handles = Handles(ctx.config.limits.max_exports)
        self._by_index: dict[int, Session] = {}
        self._by_instance: dict[int, Session] = {}
        self._by_connection: dict[int, Session] = {}
        self._unsettled: dict[int, Fenced] = {}  # by connection
        self._strangers: dict[Link, str] = {}  # oldest first; where each comes from

    # ---- control connections ----

    def new_link(self, address: str) -> Link | None:
        """For a connection that was accepted. None: it is one too many."""
        origin = _origin(address)
        if not self._make_room(origin):
            return None
        link = Link(self._ctx.state.error)
        link.most_bytes = protocol.STRANGER_MESSAGE_BYTES
        link.handlers = {protocol.Opening: lambda opening: self._opening(link, opening)}
        self._strangers[link] = origin
        link.closed.add_done_callback(lambda _: self._strangers.pop(link, None))
        asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._expect_hello, link)
        return link

    def _make_room(self, origin: str) -> bool:
        """For one more stranger from there: the oldest of the host that has most is given up for one of a host that has
        fewer, or of the same."""
        share = Counter(self._strangers.values())
        if share[origin] >= STRANGERS_OF_A_HOST:
            crowd, limit = origin, f"{STRANGERS_OF_A_HOST} control connections of {origin} without Hello"
        elif len(self._strangers) >= MAX_STRANGERS:
            crowd, limit = share.most_common(1)[0][0], f"{MAX_STRANGERS} control connections without Hello"
        else:
            return True
        fair = crowd == origin or share[crowd] > share[origin] + 1
        which = f"the oldest of {crowd}" if fair else f"another of {origin}"
        text = (
            f"{limit}, the most that may wait; {which} was closed, and connects again by itself if it is a daemon: if"
            f" not, keep it from {self._ctx.session}"
        )
        self._ctx.state.error(ErrorCode.LIMIT, text, key="control connections without Hello")
        if fair:
            oldest = next(link for link, where in self._strangers.items() if where == crowd)
            del self._strangers[oldest]
            oldest.close(text)
        return fair

    def _opening(self, link: Link, opening: protocol.Opening) -> Answer:
        own = self._ctx
        link.handlers = {}
        if opening.protocol != protocol.PROTOCOL_VERSION:
            raise RelayError(
                ErrorCode.VERSION,
                f"{own.session} speaks protocol {protocol.PROTOCOL_VERSION}, the daemon that connects"
                f" {opening.protocol}; install the same railrelay version on both nodes",
            )
        if len(opening.nonce) != protocol.NONCE_BYTES:
            raise RelayError(ErrorCode.PROTOCOL, f"a nonce has {protocol.NONCE_BYTES} bytes, this {len(opening.nonce)}")
        challenge = protocol.Challenge(opening.id, protocol.PROTOCOL_VERSION, own.instance, authentication.nonce())
        # One try: what was proved wrongly is not proved again to the same challenge.
        link.handlers = {
            protocol.Hello: lambda hello: self._hello(link, opening, challenge, hello),
            protocol.Look: lambda look: self._look(link, opening, challenge, look),
        }
        return challenge

    def _authenticated(
        self, link: Link, opening: protocol.Opening, challenge: protocol.Challenge, last: protocol.Hello | protocol.Look
    ) -> bytes | None:
        """The secret that the other end has too; None if there are no secrets. RelayError UNAUTHENTICATED, and the
        connection ends behind it."""
        link.handlers = {}
        where, messages = f"peer at {link.address}", (opening, challenge, msgspec.structs.replace(last, proofs=[]))
        try:
            return authentication.check(self._ctx.secrets, messages, last.proofs, self._ctx.session, where)
        except RelayError as failure:
            self._turn_away(link, failure)
            raise

    def _turn_away(self, link: Link, failure: RelayError) -> None:
        """Ends the connection behind the answer that says why."""
        self._ctx.state.error(failure.code, failure.text, key=f"peer at {link.address}: {failure.code}")
        asyncio.get_running_loop().call_soon(link.close, failure.text)

    def _look(
        self, link: Link, opening: protocol.Opening, challenge: protocol.Challenge, look: protocol.Look
    ) -> Awaitable[Answer]:
        secret = self._authenticated(link, opening, challenge, look)
        return self._looked((opening, challenge, look), secret)

    async def _looked(
        self, messages: tuple[protocol.Opening, protocol.Challenge, protocol.Look], secret: bytes | None
    ) -> Answer:
        mtus: list[int] = []
        await run_on_worker(lambda: mtus.extend(topology.interface_mtus(self._ctx.config, self._ctx.verbs.ports)))
        looked = protocol.Looked(messages[-1].id, self._ctx.rails, mtus, b"")
        return _proved(looked, secret, messages)

    def _expect_hello(self, link: Link) -> None:
        if link in self._strangers and not link.closed.done():
            link.violate(f"no Hello within {HELLO_TIMEOUT_S:g} s")

    def _hello(
        self, link: Link, opening: protocol.Opening, challenge: protocol.Challenge, hello: protocol.Hello
    ) -> Answer:
        secret, messages = self._authenticated(link, opening, challenge, hello), (opening, challenge, hello)
        try:
            session = self._welcomed(link, opening.instance, hello)
        except RelayError as failure:
            if failure.code is ErrorCode.PROTOCOL:
                raise
            return _proved(protocol.Refused(hello.id, failure.code, failure.text), secret, messages)
        self._strangers.pop(link, None)
        welcome = protocol.Welcome(hello.id, session.index, self._ctx.rails, b"")
        link.send(_proved(welcome, secret, messages))
        link.most_bytes = protocol.PEER_MESSAGE_BYTES
        if secret is not None:
            link.keys = authentication.keys(secret, ACCEPTING, (*messages, welcome))
        self._connect(session, link)
        faults.point("daemon.session.made")
        return None

    def _welcomed(self, link: Link, instance: int, hello: protocol.Hello) -> Session:
        """The session of who has authenticated. RelayError."""
        self._check_certificate(link, hello)
        if self._ctx.draining:
            raise RelayError(ErrorCode.DRAINING, f"{self._ctx.session} is going down")
        if not hello.session.isprintable() or len(hello.session) > SESSION_CHARACTERS:
            raise RelayError(ErrorCode.PROTOCOL, f"session {hello.session[:64]!r}: expected host:port")
        check_facts(hello.session, instance, hello.rails)
        session = self._by_instance.get(instance)
        if hello.expect:
            if hello.expect != self._ctx.instance or session is None:
                raise RelayError(
                    ErrorCode.PEER_LOST, f"{self._ctx.session} does not know this session: it restarted or gave up"
                )
            if session.ended and not _goes_on(session):
                text = f"{self._ctx.session} has given this session up, and waits until nothing of it lands any more"
                raise RelayError(ErrorCode.DRAINING, text)
            return session
        if session is not None:
            self._end(session, "started anew")
        return self._new_session(instance, hello)

    def _check_certificate(self, link: Link, hello: protocol.Hello) -> None:
        """With TLS: that of who connects names the host of its session. Its chain has been checked."""
        if not self._ctx.config.security.tls:
            return
        try:
            host, _ = protocol.parse_session(hello.session)
        except ValueError as failure:
            raise RelayError(ErrorCode.BAD_SESSION, str(failure)) from None
        found = authentication.names(link.certificate)
        if not authentication.is_named(host, found):
            text = (
                f"the certificate of the peer at {link.address} is for {', '.join(found)[:200] or 'no host'}, not for"
                f" {host[:100]} of its session; set node.host there to a name of its certificate"
            )
            unfit = RelayError(ErrorCode.UNAUTHENTICATED, text)
            self._turn_away(link, unfit)
            raise unfit

    def _new_session(self, instance: int, hello: protocol.Hello) -> Session:
        index = self._rows.take()
        if index is None:
            raise RelayError(
                ErrorCode.LIMIT,
                f"{self._ctx.session} serves {self._rows.count} senders already; raise limits.max_peers there",
            )
        session = Session(index, instance, hello.session, hello.rails)
        self._by_index[index] = self._by_instance[instance] = session
        return session

    def _connect(self, session: Session, link: Link) -> None:
        if session.linger is not None:
            session.linger.cancel()
            session.linger = None
        if session.link is not None:
            old, session.link = session.link, None
            old.close("replaced by a new control connection")
            self._fence_all(session)
        session.link = link
        log.info("sender %s connected, instance %016x", session.name, session.instance)
        link.address = session.name
        link.handlers = {
            protocol.PeerOpenRegion: lambda message: self._open(session, message),
            protocol.PeerCloseRegion: lambda message: self._close_region(session, message),
            protocol.RailConnect: lambda message: self._rail_connect(session, message),
            protocol.FenceRail: lambda message: self._fence_rail(session, message),
            protocol.PeerNote: lambda message: self._note(session, message),
        }
        link.keep_alive(self._ctx.config.timeouts.peer_s)
        link.closed.add_done_callback(lambda _: self._link_lost(session, link))
        session.paying = None
        if session.owed:
            session.paying = asyncio.get_running_loop().create_future()
            debts, told = iter(list(session.owed)), session.paying
            for _ in range(min(DEBTS_AT_A_TIME, len(session.owed))):
                self._ctx.spawn(self._pay_some(session, link, debts, told), f"what {session.name} must know")

    async def _pay_some(self, session: Session, link: Link, debts: Iterator[Debt], told: asyncio.Future[None]) -> None:
        """Of debts that others pay, too. A sender gets no queue pair before it has been told them all."""
        for debt in debts:
            if session.link is not link:
                break
            await self._pay(session, link, debt)
        if not told.done():  # the others wait for answers
            told.set_result(None)

    async def _told(self, session: Session, link: Link) -> None:
        """What is owed so far is on its way. LinkLost."""
        paying = session.paying
        if session.link is link and paying is not None:
            ends: list[asyncio.Future[Any]] = [paying, link.closed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await link.sent()

    async def _pay(self, session: Session, link: Link, debt: Debt) -> None:
        reply = protocol.PeerDone if debt[0] == "gone" else protocol.PeerAborted
        owed = session.owed.get(debt)
        if owed is None:  # the region was closed meanwhile
            return
        with contextlib.suppress(RelayError):
            await link.request(owed(link.new_id()), reply, self._ctx.config.timeouts.peer_s)
            session.owed.pop(debt, None)

    def _link_lost(self, session: Session, link: Link) -> None:
        if session.link is not link or session.ended:
            return
        session.link = None
        log.info("sender %s: control connection ended: %s", session.name, link.closed.result())
        self._fence_all(session)
        session.linger = asyncio.get_running_loop().call_later(
            self._ctx.config.timeouts.session_linger_s, self._end, session, "did not come back"
        )

    def _end(self, session: Session, reason: str) -> None:
        if not session.ended:
            session.ended = True
            session.ending = self._ctx.spawn(self._finish(session, reason), f"end of the session of {session.name}")

    async def _finish(self, session: Session, reason: str) -> None:
        faults.point("daemon.session.ending")
        if session.linger is not None:
            session.linger.cancel()
        if session.link is not None:
            session.link.close(reason)
        for connection in list(session.tokens):
            self._rails.revoke(connection)
            self._keep(session, connection, Fenced(0))
        self._fence_all(session)
        if session.waiting:
            await asyncio.wait(list(session.waiting.values()))
        while late := next((fenced for fenced in session.fenced.values() if fenced.unsettled), None):
            late.news.clear()
            await late.news.wait()
        session.ending = None
        for export in list(session.exports.values()):
            export.users = 0
            await self._withdraw(session, export)
        if self._by_instance.get(session.instance) is session:  # not before: who is not known has nothing that may land
            del self._by_instance[session.instance]
        del self._by_index[session.index]
        self._rows.free(session.index)

    # ---- regions ----

    def _open(self, session: Session, message: protocol.PeerOpenRegion) -> Answer:
        region = self._offers.find(message.capability, session.name)
        if not region.receive:
            text = f"the region at {self._ctx.session} was registered as a source only; register it with receive=True"
            raise RelayError(ErrorCode.BAD_CAPABILITY, text)
        rail = self._ctx.rails[region.rail]
        if rail.nic == "emulated" and not region.direct:
            raise RelayError(
                ErrorCode.NOT_SUPPORTED,
                f"the emulated NIC of rail {rail.identity} at {self._ctx.session} cannot write private memory;"
                " register memory that the daemon maps (Client.alloc), or GPU memory where the rail's relay memory is",
            )
        export = next(
            (known for known in session.exports.values() if known.region is region and not known.withdrawn), None
        )
        if export is None:
            handle = self._handles.take()
            if handle is None:
                raise RelayError(
                    ErrorCode.LIMIT,
                    f"{self._ctx.session} has {self._handles.count} regions open;"
                    " close some, or raise limits.max_exports there",
                )
            self._ctx.plane.add_export(handle, session.index, region.client.row, region.index, region.nbytes)
            export = session.exports[handle] = Export(handle, region)
        aborted = self._untold_tags(session, region.client)
        export.users += 1
        window_bytes = 0 if region.direct else int(self._ctx.config.relay.slot_bytes)
        return protocol.PeerRegion(
            message.id,
            export.handle,
            region.address,
            region.nbytes,
            region.rail,
            region.client.row,
            window_bytes,
            self._ctx.config.relay.table_entries,
            region.client.serial,
            self._ctx.plane.region_base(region.client.row, region.index) if region.keys.rkeys else 0,
            tuple(region.keys.rkeys),
            aborted,
        )

    def _untold_tags(self, session: Session, client: Client) -> bytes:
        """Tags that the client has aborted, if its aborts have not reached the sender of this session: it had no region
        of the client, or another control connection."""
        known = any(
            export.region.client is client and export.users > 0 and not export.withdrawn
            for export in session.exports.values()
        )
        told = (client.serial, session.link)
        if (known and session.told.get(client.row) == told) or not self._ctx.verbs:
            return b""
        session.told[client.row] = told
        return struct.pack(f"<{len(client.aborted)}Q", *client.aborted)

    def _close_region(self, session: Session, message: protocol.PeerCloseRegion) -> Answer | Awaitable[Answer]:
        export = session.exports.get(message.handle)
        if export is None:
            raise RelayError(
                ErrorCode.BAD_REGION, f"region {message.handle} is not open in the session of {session.name}"
            )
        export.users -= 1
        if export.users > 0:
            return protocol.PeerDone(message.id)
        self._remove(export)  # here: who opens the region next, perhaps by the same packet, gets another handle
        return self._closed(session, export, message.id)

    async def _closed(self, session: Session, export: Export, number: int) -> Answer:
        await asyncio.shield(self._ctx.spawn(self._withdraw(session, export), "withdrawal of a region"))
        return protocol.PeerDone(number)

    async def withdraw(self, client: Client, region: Region | None = None) -> None:
        """After this no byte lands in the region, or in any of the client, any more. Its offers must be withdrawn
        already."""
        found = [
            (session, export)
            for session in self._by_index.values()
            for export in session.exports.values()
            if export.region.client is client and region in (None, export.region)
        ]
        work = [
            self._ctx.spawn(self._take_back(session, export), "withdrawal of a region") for session, export in found
        ]
        await asyncio.gather(*map(asyncio.shield, work))

    async def _take_back(self, session: Session, export: Export) -> None:
        if export.letting_go is None:
            export.letting_go = self._ctx.spawn(self._let_go(session, export), "end of a region")
        if self._ctx.rails[export.region.rail].nic == "verbs":
            await asyncio.shield(export.letting_go)
        await self._withdraw(session, export)

    async def _let_go(self, session: Session, export: Export) -> None:
        """Tells the sender that the region is gone. If its rail is verbs, nothing writes there any more at the end."""
        debt = ("gone", export.handle, 0)
        session.owed[debt] = lambda number: protocol.PeerRegionGone(number, export.handle)
        if session.link is not None:
            with contextlib.suppress(RelayError):
                request = session.owed[debt](session.link.new_id())
                await session.link.request(request, protocol.PeerDone, self._ctx.config.timeouts.peer_s / 2)
                session.owed.pop(debt, None)
                return
        await self._fence_verbs(session)

    async def _fence_verbs(self, session: Session) -> None:
        waiting = [
            self._fence(session, connection)
            for connection, rail in list(session.receivers.items())
            if self._ctx.rails[rail].nic == "verbs"
        ]
        if waiting:
            await asyncio.wait(waiting)

    async def _withdraw(self, session: Session, export: Export) -> None:
        """The handle is free for another region only once the sender too has closed it, or its session has ended:
        frames on their way still carry it."""
        await asyncio.shield(self._remove(export))
        if export.users <= 0 and session.exports.pop(export.handle, None) is not None:
            session.owed.pop(("gone", export.handle, 0), None)
            self._handles.free(export.handle)

    def _remove(self, export: Export) -> asyncio.Future[int]:
        """Begins it, if it has not begun yet."""
        if export.removal is None:
            export.removal = self._ctx.commands.to_all(
                lambda cookie: self._ctx.plane.remove_export(export.handle, cookie)
            )
        return export.removal

    # ---- rail connections and the fence ----

    def _rail_connect(self, session: Session, message: protocol.RailConnect) -> Answer | Awaitable[Answer]:
        if not 0 <= message.remote_rail < len(self._ctx.rails):
            raise RelayError(
                ErrorCode.BAD_RAIL, f"rail {message.remote_rail} of {len(self._ctx.rails)} at {self._ctx.session}"
            )
        nic = self._ctx.rails[message.remote_rail].nic
        if nic == "emulated":
            raise RelayError(
                ErrorCode.BAD_RAIL,
                f"rail {message.remote_rail} at {self._ctx.session} is emulated: only its own daemon reaches it",
            )
        if nic == "verbs":
            return self._queue_pair(session, message)
        self._check_room(session)
        keys = session.link.keys if session.link is not None else None
        connection, token = self._rails.issue(message.remote_rail, session.index, keys)
        self._by_connection[connection] = session
        session.tokens.add(connection)
        faults.point("daemon.rail.invited")
        return protocol.RailToken(message.id, connection, token)

    def _check_room(self, session: Session) -> None:
        """For one more connection."""
        most = 4 * len(self._ctx.rails) * len(session.rails)  # bulk and express, and their successors
        have = len(session.receivers) + len(session.tokens) + len(session.probes) + session.opening
        if have >= most:
            raise RelayError(
                ErrorCode.LIMIT,
                f"{session.name} has {have} rail connections to {self._ctx.session}, and at most {most} (4 for each"
                " pair of rails) are taken; if they do not end, restart the daemon there",
            )

    async def _queue_pair(self, session: Session, message: protocol.RailConnect) -> Answer:
        """It is ready to receive when the sender learns of it."""
        ctx, rail, through, link = self._ctx, message.remote_rail, message.through, session.link
        if not 0 <= message.local_rail < len(session.rails):
            raise RelayError(ErrorCode.BAD_RAIL, f"rail {message.local_rail} of {len(session.rails)} of {session.name}")
        if not 0 <= through < len(ctx.rails) or ctx.rails[through].nic != "verbs":
            raise RelayError(ErrorCode.BAD_RAIL, f"rail {through} at {ctx.session} is not verbs")
        remote = checked_endpoint(session.name, message.endpoint, None, session.rails)
        self._check_room(session)  # here, with others that came in the same packet under way
        session.opening += 1
        try:
            if not message.probe:
                await self._flush.prepare(rail, through)
            number, endpoint = await ctx.verbs.open(rail, through, answers=remote)
            with contextlib.suppress(RelayError):  # it is looked at below
                if link is not None:
                    await self._told(session, link)
        finally:
            session.opening -= 1
        if session.ended or session.link is not link:
            ctx.verbs.drop(number)
            raise RelayError(ErrorCode.CONNECTION_LOST, f"control connection of {session.name} ended")
        connection = self._rails.new_connection()
        self._by_connection[connection] = session
        if message.probe:
            expiry = asyncio.get_running_loop().call_later(PROBE_LIFE_S, self._end_probe, session, connection)
            session.probes[connection] = Probe(number, expiry)
        else:
            pair = (message.local_rail, rail)
            before, session.pairs[pair] = session.pairs.get(pair, 0), connection
            if before in session.receivers:  # the sender has lost it, or never heard of it
                self._fence(session, before)
            session.receivers[connection] = rail
            ctx.plane.add_receiver(rail, connection, session.index, number)
        return protocol.RailToken(message.id, connection, b"", endpoint)

    def _end_probe(self, session: Session, connection: int) -> None:
        probe = session.probes.pop(connection, None)
        if probe is not None:
            probe.expiry.cancel()
            self._ctx.verbs.drop(probe.endpoint)
            self._keep(session, connection, Fenced(0))

    def admit(self, rail: int, connection: int, index: int, accepted: socket.socket) -> None:
        """A connection has shown its token. One whose control connection is gone is fenced already."""
        session = self._by_index[index]
        if session.ended or session.link is None:
            accepted.close()
            self._keep(session, connection, Fenced(0))
            return
        session.tokens.discard(connection)
        session.receivers[connection] = rail
        faults.point("daemon.rail.admitted")
        self._ctx.plane.add_receiver(rail, connection, index, accepted.detach())

    def expired(self, connection: int, _index: int) -> None:
        self._keep(self._by_connection[connection], connection, Fenced(0))

    async def _fence_rail(self, session: Session, message: protocol.FenceRail) -> Answer:
        connection = message.connection
        if connection in session.tokens:
            self._rails.revoke(connection)
            self._keep(session, connection, Fenced(0))
        self._end_probe(session, connection)
        if connection in session.receivers:
            await asyncio.shield(self._fence(session, connection))
        fenced = session.fenced.get(connection)
        if fenced is None:
            raise RelayError(
                ErrorCode.PEER_LOST, f"{self._ctx.session} has no connection {connection} of {session.name}"
            )
        if fenced.unsettled and message.wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(message.wait_s, LONGEST_NEWS_WAIT_S)):
                    await fenced.news.wait()
        return fenced.answer(message.id)

    def _fence(self, session: Session, connection: int) -> asyncio.Future[None]:
        if connection not in session.waiting:
            rail = session.receivers[connection]
            session.waiting[connection] = asyncio.get_running_loop().create_future()
            self._ctx.plane.fence_receiver(rail, connection)
            if session.link is not None and self._ctx.rails[rail].nic == "verbs":
                session.link.send(protocol.RailLost(connection))
        return session.waiting[connection]

    def _fence_all(self, session: Session) -> None:
        for connection in list(session.probes):
            self._end_probe(session, connection)
        for connection in list(session.receivers):
            self._fence(session, connection)

    def tell_rail_state(self, rail: int, up: bool) -> None:
        for session in self._by_index.values():
            if session.link is not None:
                session.link.send(protocol.RailState(rail, up))

    def receiver_lost(self, connection: int) -> None:
        session = self._by_connection.get(connection)
        if session is not None and connection in session.receivers:
            self._fence(session, connection)

    def receiver_fenced(self, connection: int, placed: int, owner: str) -> None:
        """``owner``: a client that has still to copy frames out of its bounce memory."""
        acks = self._ctx.plane.fence_acks(connection)
        fenced = Fenced(placed, dict(protocol.ACK.iter_unpack(acks)))
        fenced.unsettled = {sequence for sequence, result in fenced.results.items() if result == Result.UNSETTLED}
        if fenced.unsettled:
            self._unsettled[connection] = fenced
        session = self._by_connection.get(connection)
        if session is None or session.receivers.pop(connection, None) is None:
            return
        if fenced.unsettled:
            self._ctx.state.error(
                ErrorCode.BUSY,
                f"{owner} has not copied {len(fenced.unsettled)} frames of {session.name} out of its bounce memory; the"
                " connection they came by has ended, and their transfers settle once it has copied them or has ended",
                key=f"unsettled frames for {owner}",
            )
        self._keep(session, connection, fenced)
        faults.point("daemon.fence.recorded")
        waiting = session.waiting.pop(connection, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def frame_settled(self, connection: int, sequence: int, result: int) -> None:
        """The owner has copied a frame that had arrived before the fence, or never will."""
        fenced = self._unsettled.get(connection)
        if fenced is None:  # of a sender that had more frames under way than it may
            return
        fenced.results[sequence] = result
        fenced.unsettled.discard(sequence)
        fenced.news.set()
        if not fenced.unsettled:
            del self._unsettled[connection]

    def _keep(self, session: Session, connection: int, fenced: Fenced) -> None:
        self._by_connection.pop(connection, None)
        session.tokens.discard(connection)
        session.fenced[connection] = fenced
        settled = [number for number, known in session.fenced.items() if not known.unsettled]
        if len(settled) > KEPT_FENCES:
            del session.fenced[settled[0]]

    # ---- notes and abort ----

    def _note(self, session: Session, message: protocol.PeerNote) -> Answer | Awaitable[Answer]:
        export = session.exports.get(message.handle)
        if export is None or export.withdrawn:
            raise RelayError(ErrorCode.REGION_GONE, f"region {message.handle} is gone at {self._ctx.session}")
        if len(message.payload) > protocol.NOTE_BYTES:
            raise RelayError(ErrorCode.LIMIT, f"note of {len(message.payload)} bytes; at most {protocol.NOTE_BYTES}")
        if message.id not in session.notes:
            if not export.region.client.socket.has_room:
                return self._note_later(session, message, export.region.client)
            session.notes[message.id] = None
            if len(session.notes) > KEPT_NOTES:
                session.notes.popitem(last=False)
            export.region.client.send(protocol.Notification(message.tag, message.payload, session.name))
            faults.point("daemon.note.delivered")
        return protocol.PeerDone(message.id)

    async def _note_later(self, session: Session, message: protocol.PeerNote, client: Client) -> Answer:
        """The engine does not read: its senders wait, half as long as they would for this daemon."""
        within_s = self._ctx.config.timeouts.peer_s / 2
        if session.notes_waiting >= MAX_REQUESTS // 2:
            within_s = 0.0
        session.notes_waiting += 1
        try:
            taken = await client.socket.wait_for_room(within_s)
        finally:
            session.notes_waiting -= 1
        if not taken:
            text = (
                f"{client} reads no notifications: {MAX_EVENTS_UNSENT} wait for it, and no more can; take them by"
                " Client.receiver.notifications"
            )
            self._ctx.state.error(ErrorCode.LIMIT, text, key=f"notifications of client {client.row}.{client.serial}")
            raise RelayError(ErrorCode.LIMIT, text)
        answer = self._note(session, message)
        return await answer if inspect.isawaitable(answer) else answer

    async def abort(self, client: Client, tag: int, timeout_s: float) -> tuple[bool, int, str]:
        """(settled, transfers, text): ends transfers with ``tag`` into the client's regions at all senders. The client
        has a tombstone for the tag already, so that only frames under way are in question (on verbs rails: slices that
        their sender may still post)."""
        concerned: dict[int, list[int]] = {}
        for session in self._by_index.values():
            handles = [export.handle for export in session.exports.values() if export.region.client is client]
            if handles:
                concerned[session.index] = handles
        ends = await asyncio.gather(
            *(
                self._abort(self._by_index[index], client, tag, handles, timeout_s)
                for index, handles in concerned.items()
            )
        )
        unsettled = [text for settled, _, text in ends if not settled]
        return not unsettled, sum(count for _, count, _ in ends), "; ".join(unsettled)[:4096]

    async def _abort(
        self, session: Session, client: Client, tag: int, handles: list[int], timeout_s: float
    ) -> tuple[bool, int, str]:
        """Asks the sender; if it cannot confirm in half the time, the fence makes sure of it. What clients of this
        daemon copy by themselves no fence stops: there the answer is needed."""
        count, own, debt = 0, session.instance == self._ctx.instance, ("abort", client.serial, tag)
        row, serial = client.row, client.serial
        session.owed[debt] = lambda number: protocol.PeerAbort(number, tag, handles, row, serial)
        if session.link is not None:
            request = session.owed[debt](session.link.new_id())
            with contextlib.suppress(RelayError):
                ended = await session.link.request(request, protocol.PeerAborted, timeout_s if own else timeout_s / 2)
                count = ended.transfers
                session.owed.pop(debt, None)
                if ended.settled:
                    return True, count, ""
        if own:
            return False, count, f"a client of this node has not confirmed the end of its copy within {timeout_s:g} s"
        self._fence_all(session)
        if session.waiting:
            _, unfenced = await asyncio.wait(list(session.waiting.values()), timeout=timeout_s / 2)
            if unfenced:
                return (
                    False,
                    count,
                    f"{session.name}: {len(unfenced)} rail connections are not fenced within {timeout_s:g} s",
                )
        return True, count, ""

    def close(self) -> None:
        """Closes the control connections. Idempotent; the data plane closes what belongs to rails."""
        for link in list(self._strangers):
            link.close("the daemon ends")
        for session in self._by_index.values():
            if session.linger is not None:
                session.linger.cancel()
            if session.link is not None:
                session.link.close("the daemon ends")


def _goes_on(session: Session) -> bool:
    """If it was given up, but has only waited for what may land: one engine that stands still keeps nobody else from
    the others of this node."""
    if session.ending is None:
        return False
    session.ending.cancel()
    session.ending, session.ended = None, False
    return True


def _origin(address: str) -> str:
    """Of IPv6 its network: a host has as many addresses there as it likes."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))


W = TypeVar("W", protocol.Welcome, protocol.Looked, protocol.Refused)


def _proved(answer: W, secret: bytes | None, messages: tuple[protocol.PeerMessage, ...]) -> W:
    if secret is None:
        return answer
    return msgspec.structs.replace(answer, proof=authentication.proof(secret, ACCEPTING, (*messages, answer)))
