"""One control connection between two daemons: framing, requests and replies by id, and its end. Main thread only.

Whatever the other end sends, the worst that happens is that the connection closes with one error record.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Message
from railrelay.daemon import authentication
from railrelay.daemon.authentication import SEAL_BYTES, Keys
from railrelay.daemon.node_state import Report

MAX_UNSENT_BYTES: Final = 16 * 1024 * 1024
MAX_REQUESTS: Final = 1024  # that come, at a time
MAX_UNANSWERED: Final = MAX_REQUESTS // 2  # that go, at a time: the other end takes MAX_REQUESTS
MAX_WAITING: Final = 16 * MAX_REQUESTS  # that are to go
MESSAGES_A_TURN: Final = 64  # of the event loop: others have theirs
TEXT_CHARACTERS: Final = 1024  # of a refusal: local clients and the log get it

R = TypeVar("R", bound=Message)
Answer = Message | None
# Answers a request by its reply, an event by None; RelayError becomes Refused. What no correct peer says is RelayError
# PROTOCOL, or the OverflowError of a number that cannot be: it ends the connection.
Handlers = Mapping[type[Message], Callable[..., Answer | Awaitable[Answer]]]

_REPLIES: Final = (
    protocol.Welcome, protocol.Refused, protocol.PeerRegion, protocol.RailToken, protocol.RailFenced,
    protocol.PeerAborted, protocol.PeerDone,
)  # fmt: skip
_HANDSHAKE: Final = (protocol.Challenge, protocol.Looked)  # replies that nobody gives up waiting for
_EVENTS: Final = (protocol.RailLost, protocol.RailState)
TLS_HANDSHAKE: Final = b"\x16\x03"  # how TLS begins


class LinkLost(RelayError):
    """The connection ended before the reply came: whether the request was carried out is not known."""


class LinkSilent(RelayError):
    """No reply came in time; the connection stays open."""


class PeerRefused(RelayError):
    """The peer answered that it will not. proved: whoever answered so has the secret, if there is one."""

    def __init__(
        self, code: ErrorCode, text: str, answer: protocol.Refused | None = None, *, proved: bool = False
    ) -> None:
        super().__init__(code, text)
        self.answer = answer
        self.proved = proved


class Link(asyncio.Protocol):
    def __init__(self, report: Report, ids: itertools.count[int] | None = None) -> None:
        self.closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # the reason
        self.address = self._host = "?"
        self.lack = ""  # what is wrong with the connection, for what is said of its messages
        self.keys: Keys | None = None  # None: packets have no seals
        self.most_bytes = protocol.PEER_MESSAGE_BYTES  # of a packet that comes
        self._handlers: Handlers = {}
        self._hold_after = 0  # id of a request
        self._holds = False
        self._sent = self._taken = 0  # sealed packets
        self._report = report
        self._ids = ids or itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._unanswered: set[int] = set()  # by id, whether or not somebody still waits for the answer
        self._waiting: deque[protocol.PeerMessage | asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._resting = False
        self._heard = False
        self.greeted = False  # before, it is told and answered nothing but what handlers and requests are for
        self._pinging: asyncio.Task[None] | None = None
        self._reason = ""

    @property
    def handlers(self) -> Handlers:
        """What the other end sends after the answer to the last request of a handshake waits, unread, until there are
        any."""
        return self._handlers

    @handlers.setter
    def handlers(self, handlers: Handlers) -> None:
        self._handlers = handlers
        if self._holds:
            asyncio.get_running_loop().call_soon(self._read_on)  # not before the caller is ready for them

    @property
    def certificate(self) -> object:
        """Of the other end, as SSLObject.getpeercert() returns it; None without TLS."""
        return self._transport.get_extra_info("peercert") if self._transport is not None else None

    def new_id(self) -> int:
        return next(self._ids)

    def send(self, message: Message) -> None:
        """Nothing happens on a closed connection."""
        if self._transport is None or self._reason:
            return
        packet = protocol.encode(message)
        if self.keys is not None:
            packet = authentication.seal(self.keys.sends, self._sent, packet) + packet
            self._sent += 1
        self._transport.write(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.violate(f"does not read: {MAX_UNSENT_BYTES} bytes unsent")

    async def request(
        self, message: protocol.PeerMessage, reply: type[R], timeout_s: float, *, then_hold: bool = False
    ) -> R:
        """LinkLost, LinkSilent, PeerRefused. ``then_hold``: what comes behind the answer waits for handlers."""
        if self._transport is None or self._reason:
            raise LinkLost(ErrorCode.CONNECTION_LOST, self._reason or "not connected")
        assert not isinstance(message, _EVENTS)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[message.id] = future
        if then_hold:
            self._hold_after = message.id
        if isinstance(message, protocol.Ping):  # the other end counts none
            self.send(message)
        else:
            self._waiting.append(message)
            self._send_waiting()
            if len(self._waiting) > MAX_WAITING:
                self.violate(f"does not answer: {MAX_WAITING} requests wait")
        try:
            async with asyncio.timeout(timeout_s):  # wait_for() may swallow a cancel that comes with the answer
                answer = await future
        except TimeoutError:
            raise LinkSilent(
                ErrorCode.PEER_TIMEOUT, f"no answer to {type(message).__name__} within {timeout_s:.3g} s"
            ) from None
        finally:
            self._pending.pop(message.id, None)
        if isinstance(answer, protocol.Refused):
            code = ErrorCode(answer.code) if answer.code in set(ErrorCode) else ErrorCode.PEER_REFUSED
            raise PeerRefused(code, answer.text[:TEXT_CHARACTERS], answer)
        if not isinstance(answer, reply):
            self.violate(f"answered {type(message).__name__} by {type(answer).__name__}")
            raise LinkLost(ErrorCode.PROTOCOL, self._reason)
        return answer

    async def sent(self) -> None:
        """All requests so far are on their way. LinkLost."""
        if self._reason:
            raise LinkLost(ErrorCode.CONNECTION_LOST, self._reason)
        if self._waiting:
            mark: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(mark)
            await mark

    def _send_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            if not isinstance(first, asyncio.Future) and len(self._unanswered) >= MAX_UNANSWERED:
                return
            self._waiting.popleft()
            if isinstance(first, asyncio.Future):
                if not first.done():
                    first.set_result(None)
            else:
                assert not isinstance(first, _EVENTS)
                self._unanswered.add(first.id)
                self.send(first)

    def keep_alive(self, silence_s: float) -> None:
        """The handshake is done. From now on the connection is closed when the other end is silent for so long."""
        self.greeted = True
        self._pinging = asyncio.get_running_loop().create_task(self._ping(silence_s))

    def violate(self, what: str, code: ErrorCode = ErrorCode.PROTOCOL) -> None:
        """Closes the connection because of what the other end did."""
        if not self._reason:
            what = RelayError(code, what + self.lack).text  # not as long as the other end likes
            origin = f"control connection of {self._host}"  # names are made up easily
            key = origin if code is ErrorCode.PROTOCOL else f"{origin}: {code}"
            self._report(code, f"control connection of {self.address}: {what}", key=key)
            self.close(what)

    def close(self, reason: str) -> None:
        """Idempotent; ``closed`` and the waiting requests end at once."""
        if self._reason:
            return
        self._reason = reason
        if self._transport is not None:
            self._transport.close()
            asyncio.get_running_loop().call_later(1.0, self._transport.abort)  # if the other end reads no more
        if self._pinging is not None and self._pinging is not asyncio.current_task():
            self._pinging.cancel()
        for task in self._tasks:
            task.cancel()
        marks = [one for one in self._waiting if isinstance(one, asyncio.Future)]
        self._waiting.clear()
        ends: list[asyncio.Future[Any]] = [*self._pending.values(), *marks]
        for future in ends:
            if not future.done():
                future.set_exception(LinkLost(ErrorCode.CONNECTION_LOST, reason))
        if not self.closed.done():
            self.closed.set_result(reason)

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._reason:  # it took too long for TLS
            self._transport.abort()
            return
        self.address = self._host = (transport.get_extra_info("peername") or "?")[0]

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(f"connection lost ({exc})" if exc else "closed by the other end")

    def data_received(self, data: bytes) -> None:
        if self._reason:
            return
        self._heard = True
        self._received += data
        if not self._holds and not self._resting:
            self._parse()

    def _hold(self) -> None:
        self._holds = True
        if self._transport is not None:
            self._transport.pause_reading()

    def _read_on(self) -> None:
        self._holds = False
        if self._transport is not None and not self._reason:
            self._transport.resume_reading()
            if not self._resting:
                self._parse()

    def _rest(self) -> None:
        """The others have their turn; nothing more is read meanwhile."""
        self._resting = True
        assert self._transport is not None
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._rested)

    def _rested(self) -> None:
        self._resting = False
        if self._transport is not None and not self._reason and not self._holds:
            self._transport.resume_reading()
            self._parse()

    def _parse(self) -> None:
        prefix = protocol.LENGTH_PREFIX
        at = taken = 0
        while not self._reason and not self._holds and len(self._received) - at >= prefix.size:
            (length,) = prefix.unpack_from(self._received, at)
            if length > self.most_bytes:
                if self._received.startswith(TLS_HANDSHAKE, at):
                    foreign = "speaks TLS, which is not configured here (security.tls_ca)"
                    self.violate(foreign, ErrorCode.UNAUTHENTICATED)
                else:
                    self.violate(f"message of {length} bytes; at most {self.most_bytes}")
                return
            if len(self._received) - at - prefix.size < length:
                break
            if taken == MESSAGES_A_TURN:
                self._rest()
                break
            start = at + prefix.size
            packet = self._unsealed(bytes(self._received[start : start + length]))
            if packet is None:
                self.violate("a packet that was not sealed by who has authenticated")
                return
            try:
                message = protocol.peer_message(packet)
            except msgspec.MsgspecError as failure:
                self.violate(f"not a message ({failure})")
                return
            at = start + length
            taken += 1
            self._take(message)
        del self._received[:at]

    def _unsealed(self, packet: bytes) -> bytes | None:
        """None if its seal is wrong."""
        if self.keys is None:
            return packet
        shown, packet = packet[:SEAL_BYTES], packet[SEAL_BYTES:]
        good = hmac.compare_digest(authentication.seal(self.keys.receives, self._taken, packet), shown)
        self._taken += 1
        return packet if good else None

    def _take(self, message: protocol.PeerMessage) -> None:
        late = self.greeted and isinstance(message, _REPLIES)  # perhaps
        if isinstance(message, _REPLIES + _HANDSHAKE) and (late or message.id in self._pending):
            future = self._pending.get(message.id)
            if future is not None and not future.done():  # else its waiter has given up
                future.set_result(message)
                if message.id == self._hold_after:
                    self._hold()
            self._unanswered.discard(message.id)
            self._send_waiting()
            return
        if isinstance(message, protocol.Ping) and self.greeted:
            self.send(protocol.PeerDone(message.id))
            return
        handler = self.handlers.get(type(message))
        if handler is None:
            self.violate(f"unexpected {type(message).__name__}")
            return
        if len(self._tasks) >= MAX_REQUESTS:
            self.violate(f"{MAX_REQUESTS} requests at a time")
            return
        try:
            answer = handler(message)
        except (RelayError, OSError, ValueError, OverflowError) as failure:
            self._refuse(message, failure)
            return
        if inspect.iscoroutine(answer):
            work = answer
            task = asyncio.get_running_loop().create_task(self._answer(message, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(lambda _: work.close())  # it may be cancelled before it begins
        elif answer is not None:
            self.send(cast("Message", answer))

    async def _answer(self, message: protocol.PeerMessage, work: Awaitable[Answer]) -> None:
        try:
            answer = await work
        except (RelayError, OSError, ValueError, OverflowError) as failure:
            self._refuse(message, failure)
        else:
            if answer is not None:
                self.send(answer)

    def _refuse(self, message: protocol.PeerMessage, failure: Exception) -> None:
        name = type(message).__name__
        if isinstance(failure, (OverflowError, ValueError)):
            failure = RelayError(ErrorCode.PROTOCOL, f"{name} with a number that cannot be ({failure})")
        elif not isinstance(failure, RelayError):
            failure = RelayError(ErrorCode.INTERNAL, f"{name}: {failure}")
            self._report(failure.code, failure.text)
        if not isinstance(message, _EVENTS):
            self.send(protocol.Refused(message.id, failure.code, failure.text))
        if failure.code is ErrorCode.PROTOCOL:
            self.violate(failure.text)

    async def _ping(self, silence_s: float) -> None:
        while True:
            self._heard = False
            await asyncio.sleep(silence_s / 2)
            if self._heard:
                continue
            try:
                await self.request(protocol.Ping(self.new_id()), protocol.PeerDone, silence_s / 2)
            except LinkLost:
                return
            except RelayError:
                self._report(
                    ErrorCode.PEER_TIMEOUT, f"control connection of {self.address}: silent for {silence_s:g} s"
                )
                self.close(f"silent for {silence_s:g} s")
                return
