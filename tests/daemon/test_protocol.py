"""Session ids, the framing of the peer plane, and what becomes of a peer that breaks it."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import pytest

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon.link import MAX_REQUESTS, MAX_UNANSWERED, MESSAGES_A_TURN, Link, LinkLost, LinkSilent, PeerRefused

TIME_LIMIT_S = 10


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node7:4000", "node7", 4000), ("10.0.0.1:1", "10.0.0.1", 1), ("[fe80::1]:65535", "fe80::1", 65535)],
)
def test_session_is_parsed_and_formatted_back(text: str, host: str, port: int) -> None:
    assert protocol.parse_session(text) == (host, port)
    assert protocol.format_session(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        *["", "node7", "node7:", ":4000", "node7:0", "node7:65536", "node7:x", "::1:4000", "a:٣"],
        *["..:1", "x" * 64 + ".y:1", "ä" * 70 + ":1", "\ud800:1", "a\0b:1"],
    ],
)
def test_session_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="session "):
        protocol.parse_session(text)


@dataclass
class Wire:
    """A link that talks to a bare TCP connection."""

    link: Link
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reports: list[tuple[ErrorCode, str]]

    async def send(self, message: protocol.PeerMessage) -> None:
        packet = protocol.encode(message)
        self.writer.write(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)
        await self.writer.drain()

    async def receive(self) -> protocol.PeerMessage:
        (length,) = protocol.LENGTH_PREFIX.unpack(await self.reader.readexactly(protocol.LENGTH_PREFIX.size))
        return protocol.peer_message(await self.reader.readexactly(length))


Scenario = Callable[[Wire], Coroutine[None, None, None]]


def on_wire(scenario: Scenario) -> None:
    """Runs ``scenario(wire)`` in a loop of its own, within TIME_LIMIT_S."""

    async def run() -> None:
        reports: list[tuple[ErrorCode, str]] = []
        links: list[Link] = []

        def report(code: ErrorCode, text: str, *, key: str = "") -> None:
            reports.append((code, key or text))

        def new_link() -> Link:
            links.append(Link(report))
            links[-1].greeted = True
            return links[-1]

        server = await asyncio.get_running_loop().create_server(new_link, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while not links:
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(TIME_LIMIT_S):
                await scenario(Wire(links[0], reader, writer, reports))
        finally:
            links[0].close("the test ends")
            writer.close()
            server.close()

    asyncio.run(run())


def test_messages_arrive_whole_however_they_are_cut() -> None:
    async def scenario(wire: Wire) -> None:
        seen: list[protocol.PeerCloseRegion] = []
        wire.link.handlers = {protocol.PeerCloseRegion: seen.append}
        packets = [protocol.encode(protocol.PeerCloseRegion(number, 7)) for number in range(50)]
        stream = b"".join(protocol.LENGTH_PREFIX.pack(len(packet)) + packet for packet in packets)
        for at in range(0, len(stream), 3):
            wire.writer.write(stream[at : at + 3])
            await asyncio.sleep(0)
        await wire.send(protocol.Ping(99))
        assert await wire.receive() == protocol.PeerDone(99)
        assert [message.id for message in seen] == list(range(50))

    on_wire(scenario)


@pytest.mark.parametrize(
    "stream",
    [
        protocol.LENGTH_PREFIX.pack(protocol.PEER_MESSAGE_BYTES + 1),
        protocol.LENGTH_PREFIX.pack(4) + b"junk",
        protocol.LENGTH_PREFIX.pack(0),
        protocol.LENGTH_PREFIX.pack(len(protocol.encode(protocol.FenceRail(1, 2))))
        + protocol.encode(protocol.FenceRail(1, 2)),
    ],
    ids=["too long", "not msgpack", "empty", "not expected here"],
)
def test_violation_closes_the_connection_with_one_report(stream: bytes) -> None:
    async def scenario(wire: Wire) -> None:
        wire.writer.write(stream * 2)
        assert await wire.reader.read() == b""
        assert [code for code, _ in wire.reports] == [ErrorCode.PROTOCOL]
        assert wire.link.closed.done()

    on_wire(scenario)


@pytest.mark.parametrize(
    "message",
    [protocol.Ping(1), protocol.PeerDone(1), protocol.Refused(1, "busy", ""), protocol.Looked(1, [], [], b"")],
)
def test_nothing_but_the_handshake_is_taken_before_it_is_done(message: protocol.PeerMessage) -> None:
    async def scenario(wire: Wire) -> None:
        wire.link.greeted = False
        await wire.send(message)
        assert await wire.reader.read() == b""
        assert [code for code, _ in wire.reports] == [ErrorCode.PROTOCOL]

    on_wire(scenario)


def test_who_sends_much_takes_no_turn_of_the_others() -> None:
    async def scenario(wire: Wire) -> None:
        seen: list[protocol.PeerCloseRegion] = []
        wire.link.handlers = {protocol.PeerCloseRegion: seen.append}
        packets = [protocol.encode(protocol.PeerCloseRegion(number, 7)) for number in range(5000)]
        wire.writer.write(b"".join(protocol.LENGTH_PREFIX.pack(len(packet)) + packet for packet in packets))
        turns = [0]
        while len(seen) < len(packets):
            await asyncio.sleep(0)
            turns.append(len(seen))
        assert max(after - before for before, after in itertools.pairwise(turns)) <= MESSAGES_A_TURN
        assert [message.id for message in seen] == list(range(len(packets)))

    on_wire(scenario)


def test_connection_that_comes_up_after_its_link_was_closed_ends() -> None:
    async def run() -> None:
        link = Link(lambda *_, **__: None)
        link.close("too late")
        server = await asyncio.get_running_loop().create_server(lambda: link, "127.0.0.1", 0)
        async with asyncio.timeout(TIME_LIMIT_S):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        server.close()

    asyncio.run(run())


def test_request_gets_its_own_reply_even_out_of_order() -> None:
    async def scenario(wire: Wire) -> None:
        asked = [
            asyncio.create_task(wire.link.request(protocol.Ping(number), protocol.PeerDone, 5)) for number in (1, 2)
        ]
        assert [await wire.receive() for _ in asked] == [protocol.Ping(1), protocol.Ping(2)]
        await wire.send(protocol.PeerDone(2))
        await wire.send(protocol.Refused(1, "busy", "later"))
        assert await asked[1] == protocol.PeerDone(2)
        with pytest.raises(PeerRefused, match="later") as refused:
            await asked[0]
        assert refused.value.code is ErrorCode.BUSY

    on_wire(scenario)


def test_no_more_requests_go_than_the_other_end_takes_and_none_is_left_out() -> None:
    async def scenario(wire: Wire) -> None:
        asked = [
            asyncio.create_task(
                wire.link.request(protocol.PeerAbort(number, number, [], 0, 1), protocol.PeerAborted, timeout_s)
            )
            for number, timeout_s in enumerate([0.001] * MAX_UNANSWERED + [5.0] * MAX_REQUESTS)
        ]
        came = [await wire.receive() for _ in range(MAX_UNANSWERED)]
        for given_up in asked[:MAX_UNANSWERED]:
            with pytest.raises(LinkSilent):
                await given_up
        sent = asyncio.create_task(wire.link.sent())
        await wire.send(protocol.Ping(9999))
        assert await wire.receive() == protocol.PeerDone(9999)  # the other end has requests yet to answer
        for number in range(len(asked)):
            assert sent.done() == (len(came) == len(asked))
            await wire.send(protocol.PeerAborted(number, True, 0))
            if len(came) < len(asked):
                came.append(await wire.receive())
        assert [message.id for message in came if isinstance(message, protocol.PeerAbort)] == list(range(len(asked)))
        assert await asyncio.gather(*asked[MAX_UNANSWERED:])

    on_wire(scenario)


def test_silent_peer_and_lost_connection_are_told_apart() -> None:
    async def scenario(wire: Wire) -> None:
        with pytest.raises(LinkSilent):
            await wire.link.request(protocol.Ping(1), protocol.PeerDone, 0.01)
        await wire.send(protocol.PeerDone(1))  # late: ignored
        asked = asyncio.create_task(wire.link.request(protocol.Ping(2), protocol.PeerDone, 5))
        await wire.receive()
        wire.writer.close()
        with pytest.raises(LinkLost):
            await asked
        with pytest.raises(LinkLost):
            await wire.link.request(protocol.Ping(3), protocol.PeerDone, 5)
        assert wire.reports == []

    on_wire(scenario)


def test_handler_that_refuses_is_answered_by_refused() -> None:
    def refuse(message: protocol.PeerCloseRegion) -> None:
        raise RelayError(ErrorCode.BAD_REGION, f"region {message.handle}")

    async def scenario(wire: Wire) -> None:
        wire.link.handlers = {protocol.PeerCloseRegion: refuse}
        await wire.send(protocol.PeerCloseRegion(5, 17))
        assert await wire.receive() == protocol.Refused(5, "bad_region", "region 17")

    on_wire(scenario)


def test_peer_that_answers_no_ping_is_closed() -> None:
    async def scenario(wire: Wire) -> None:
        wire.link.keep_alive(0.05)
        assert "silent" in await wire.link.closed

    on_wire(scenario)


def test_what_comes_right_behind_the_answer_to_a_handshake_waits_for_handlers() -> None:
    async def scenario(wire: Wire) -> None:
        seen: list[protocol.PeerMessage] = []
        asked = asyncio.create_task(wire.link.request(protocol.Ping(1), protocol.PeerDone, 5, then_hold=True))
        await wire.receive()
        messages = [protocol.PeerDone(1), *(protocol.PeerRegionGone(number, 7) for number in range(2, 50))]
        packets = [protocol.encode(message) for message in messages]
        wire.writer.write(b"".join(protocol.LENGTH_PREFIX.pack(len(packet)) + packet for packet in packets))
        await asked
        await wire.send(protocol.PeerRegionGone(50, 7))
        wire.link.handlers = {protocol.PeerRegionGone: seen.append}
        assert seen == []  # not before who sets them goes on
        await wire.send(protocol.Ping(99))
        assert await wire.receive() == protocol.PeerDone(99)
        assert seen == [*messages[1:], protocol.PeerRegionGone(50, 7)]

    on_wire(scenario)
