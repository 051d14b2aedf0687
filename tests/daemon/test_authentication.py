"""The handshake's proofs, seals and tokens, and files of secrets: what is accepted, and what is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import RailFacts
from railrelay.daemon import authentication, config
from railrelay.daemon.authentication import ACCEPTING, CONNECTING, Keys, Secrets
from railrelay.daemon.config import ConfigError, Security
from railrelay.daemon.link import Link, LinkLost

OLD, NEW, OTHER = b"o" * 32, b"n" * 32, b"x" * 32
OPENING = protocol.Opening(1, protocol.PROTOCOL_VERSION, 5, b"c" * 32)
CHALLENGE = protocol.Challenge(1, protocol.PROTOCOL_VERSION, 7, b"s" * 32)
HELLO = protocol.Hello(2, "127.0.0.1:9", 0, [RailFacts("rail0", "tcp", "127.0.0.1", 1)], [])
HANDSHAKE = (OPENING, CHALLENGE, HELLO)


def replaced(at: int, **changes: object) -> tuple[protocol.Message, ...]:
    messages: list[Any] = list(HANDSHAKE)
    messages[at] = msgspec.structs.replace(messages[at], **changes)
    return tuple(messages)


# ---- proofs ----


def test_a_proof_is_good_for_its_secret_its_role_and_its_handshake_alone() -> None:
    shown = [authentication.proof(NEW, CONNECTING, HANDSHAKE)]
    assert authentication.matching([OLD, NEW], CONNECTING, HANDSHAKE, shown) == NEW
    assert authentication.matching([OLD, OTHER], CONNECTING, HANDSHAKE, shown) is None
    assert authentication.matching([NEW], ACCEPTING, HANDSHAKE, shown) is None
    assert authentication.matching([NEW], CONNECTING, HANDSHAKE, []) is None
    assert authentication.matching([NEW], CONNECTING, HANDSHAKE, [b"", shown[0][:-1], shown[0] + b"\0"]) is None


@pytest.mark.parametrize(
    "other",
    [
        replaced(0, instance=6),
        replaced(0, nonce=b"d" * 32),
        replaced(0, protocol=protocol.PROTOCOL_VERSION - 1),
        replaced(1, instance=8),
        replaced(1, nonce=b"t" * 32),
        replaced(1, protocol=protocol.PROTOCOL_VERSION - 1),
        replaced(2, session="127.0.0.2:9"),
        replaced(2, expect=7),
        replaced(2, rails=[]),
        HANDSHAKE[:2],
    ],
    ids=range(10),
)
def test_a_proof_covers_all_that_was_said(other: tuple[protocol.Message, ...]) -> None:
    shown = [authentication.proof(NEW, CONNECTING, HANDSHAKE)]
    assert authentication.matching([NEW], CONNECTING, other, shown) is None


def test_both_ends_have_the_same_keys_and_each_direction_its_own() -> None:
    here, there = (authentication.keys(NEW, role, HANDSHAKE) for role in (CONNECTING, ACCEPTING))
    assert (here.sends, here.receives, here.rails) == (there.receives, there.sends, there.rails)
    assert len({here.sends, here.receives, here.rails}) == 3
    assert authentication.keys(NEW, CONNECTING, replaced(1, nonce=b"t" * 32)) != here
    assert authentication.keys(OLD, CONNECTING, HANDSHAKE) != here


def test_a_rail_shows_no_token_that_was_said_on_the_control_connection() -> None:
    made, token = authentication.keys(NEW, CONNECTING, HANDSHAKE), b"t" * 16
    shown = authentication.shown_token(made, token, 3, 0)
    others = [authentication.shown_token(made, token, 5, 0), authentication.shown_token(made, token, 3, 1), token]
    assert len(shown) == len(token)
    assert shown not in others
    assert authentication.shown_token(None, token, 3, 0) == token


# ---- seals ----


def on_link(scenario: Callable[[Link, asyncio.StreamWriter, list[str]], Any]) -> None:
    """A link with keys, and a bare connection to it."""

    async def run() -> None:
        links: list[Link] = []
        reports: list[str] = []

        def report(code: ErrorCode, text: str, *, key: str = "") -> None:
            reports.append(f"{code}: {text}{key}")

        def new_link() -> Link:
            links.append(Link(report))
            links[0].keys = Keys(b"to", b"from", b"")
            return links[0]

        server = await asyncio.get_running_loop().create_server(new_link, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        while not links:
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(10):
                await scenario(links[0], writer, reports)
        finally:
            links[0].close("the test ends")
            writer.close()
            server.close()

    asyncio.run(run())


def sealed(count: int, message: protocol.PeerMessage, key: bytes = b"from") -> bytes:
    packet = protocol.encode(message)
    packet = authentication.seal(key, count, packet) + packet
    return protocol.LENGTH_PREFIX.pack(len(packet)) + packet


def close_of(handle: int) -> protocol.PeerCloseRegion:
    return protocol.PeerCloseRegion(handle, handle)


@pytest.mark.parametrize(
    "third",
    [
        sealed(1, close_of(1)),
        sealed(3, close_of(3)),
        sealed(2, close_of(2), b"to"),
        sealed(2, close_of(2))[:-1] + b"\x03",
        protocol.LENGTH_PREFIX.pack(len(protocol.encode(close_of(2)))) + protocol.encode(close_of(2)),
        protocol.LENGTH_PREFIX.pack(0),
        protocol.LENGTH_PREFIX.pack(16) + bytes(16),
    ],
    ids=["repeated", "one is missing", "sent back", "changed", "without a seal", "empty", "a seal of nothing"],
)
def test_a_packet_that_was_not_sealed_for_its_place_ends_the_connection(third: bytes) -> None:
    async def scenario(link: Link, writer: asyncio.StreamWriter, reports: list[str]) -> None:
        seen: list[int] = []
        link.handlers = {protocol.PeerCloseRegion: lambda message: seen.append(message.handle)}
        writer.write(sealed(0, close_of(0)) + sealed(1, close_of(1)) + third + sealed(3, close_of(4)))
        assert "not sealed" in await link.closed
        assert seen == [0, 1]
        assert len(reports) == 1

    on_link(scenario)


def test_without_keys_a_sealed_packet_is_no_message() -> None:
    async def scenario(link: Link, writer: asyncio.StreamWriter, _reports: list[str]) -> None:
        link.keys = None
        writer.write(sealed(0, close_of(0)))
        assert "not a message" in await link.closed
        with pytest.raises(LinkLost):
            await link.request(protocol.Ping(1), protocol.PeerDone, 1)

    on_link(scenario)


# ---- files ----


def secrets(*paths: Path) -> Secrets:
    return Secrets(Security(secret_files=tuple(map(str, paths))))


def written(path: Path, content: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_secret_is_the_content_of_its_file_without_the_line_end(tmp_path: Path) -> None:
    both = written(tmp_path / "one", OLD + b"\n"), written(tmp_path / "two", NEW, 0o400)
    assert secrets(*both).read() == [OLD, NEW]
    assert secrets(*both)
    assert not secrets()
    assert secrets().read() == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_that_others_could_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "secret", OLD, mode)
    with pytest.raises(ConfigError, match=rf"secret_files: .*secret: mode {mode:04o}; .* `chmod 600 .*secret`"):
        secrets(path).read()


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"short\n", "5 bytes; expected 32 to 4096"), (b" " * 64, "0 bytes"), (b"x" * 5000, "4097 bytes")],
)
def test_a_secret_that_can_be_guessed_or_is_none_is_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        secrets(written(tmp_path / "secret", content)).read()


def test_a_secret_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file .* `openssl rand -hex 32 >.*none` makes one"):
        secrets(tmp_path / "none").read()
    with pytest.raises(ConfigError, match="not a regular file"):
        secrets(tmp_path).read()
    os.mkfifo(tmp_path / "fifo", 0o600)  # would be waited for
    with pytest.raises(ConfigError, match="not a regular file"):
        secrets(tmp_path / "fifo").read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_is_replaced_by_a_second_file_that_comes_and_goes(tmp_path: Path) -> None:
    first, second = tmp_path / "secret", tmp_path / "secret.next"
    secrets = Secrets(Security(secret_files=(str(first), str(second))))
    old, new = b"o" * 32, b"n" * 32
    first.touch(0o600)
    first.write_bytes(old)
    assert secrets.read() == [old]
    second.touch(0o600)
    second.write_bytes(new)
    assert secrets.read() == [old, new]
    second.rename(first)
    assert secrets.read() == [new]
    first.unlink()
    with pytest.raises(ConfigError, match="secret"):
        secrets.read()


def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "secret", OLD)
    os.chown(path, 65534, -1)
    with pytest.raises(ConfigError, match="owner uid 65534; expected root or the daemon's uid 0"):
        secrets(path).read()


def test_a_file_that_went_bad_refuses_the_handshake(tmp_path: Path) -> None:
    path = written(tmp_path / "secret", OLD)
    known = secrets(path)
    assert known.usable() == [OLD]
    path.chmod(0o644)
    with pytest.raises(RelayError) as failure:
        known.usable()
    assert failure.value.code is ErrorCode.UNAUTHENTICATED


# ---- names of certificates ----


@pytest.mark.parametrize(
    ("host", "names", "named"),
    [
        ("node7", ["node7"], True),
        ("Node7.example.", ["node7.EXAMPLE"], True),
        ("node7.example", ["*.example"], True),
        ("a.node7.example", ["*.example"], False),
        ("node7", ["node8", "node77"], False),
        ("10.0.0.1", ["10.0.0.1"], True),
        ("10.0.0.1", ["*.0.0.1"], False),
        ("::1", ["0:0:0:0:0:0:0:1"], True),
        ("node7", [], False),
    ],
)
def test_a_certificate_is_that_of_the_hosts_it_names(host: str, names: list[str], named: bool) -> None:
    certificate = {"subjectAltName": tuple(("DNS", name) for name in names), "subject": ((("commonName", "node7"),),)}
    assert authentication.is_named(host, authentication.names(certificate)) is named
    assert authentication.names(None) == []


# ---- where a daemon listens ----


RAIL = '[[rail]]\naddress = "127.0.0.1"\n'


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ('[node]\nhost = "10.0.0.1"\n' + RAIL, 'node.host: "10.0.0.1"'),
        ('[node]\nhost = "fd00::1"\n' + RAIL, 'node.host: "fd00::1"'),
        ('[[rail]]\naddress = "10.0.0.1"\n', 'rail[0].address: "10.0.0.1"'),
        (RAIL + '[[rail]]\naddress = "fd00::1"\n', 'rail[1].address: "fd00::1"'),
    ],
)
def test_without_a_secret_only_loopback_addresses_may_be_configured(text: str, option: str) -> None:
    with pytest.raises(ConfigError) as failure:
        config.parse(text)
    assert str(failure.value).startswith(f"{option}: expected a loopback address")
    assert "secret_files" in str(failure.value)
    assert "allow_unauthenticated = true" in str(failure.value)
    for security in (
        'secret_files = ["/etc/railrelay/secret"]',
        "allow_unauthenticated = true",
        'tls_certificate = "a"\ntls_key = "b"\ntls_ca = "c"',
    ):
        config.parse(f"{text}\n[security]\n{security}\n")


def test_rails_that_do_not_listen_may_have_any_address() -> None:
    config.parse('[[rail]]\nnic = "verbs"\naddress = "10.0.0.1"\n')
    config.parse('[[rail]]\nnic = "emulated"\naddress = "10.0.0.1"\n')
