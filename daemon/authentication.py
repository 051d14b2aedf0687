"""How two daemons show each other that they have the same secret, and what keeps a third one out of their control
connection afterwards. Main thread only.

The connecting end sends Opening, the accepting one Challenge, each with a fresh nonce and its instance id. Hello has an
HMAC-SHA256 of all three messages under each secret that the sender has (two while they are being replaced); Welcome has
one of all four under the secret that matched. Each end has a name of its own in what it proves, so that no proof can be
sent back to who made it, and both nonces are in it, so that none can be used again. Keys made of the same messages seal
every later packet of the connection: whoever only passes the handshake on can add nothing to it, leave out nothing and
repeat nothing. Nothing is hidden from who listens; that takes TLS.

Secret files are read anew for each handshake, so that they can be replaced while the daemon runs.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Message
from railrelay.daemon.config import ConfigError, Security

MIN_SECRET_BYTES: Final = 32
MAX_SECRET_BYTES: Final = 4096
SEAL_BYTES: Final = 16
CONNECTING: Final = b"railrelay connecting daemon"
ACCEPTING: Final = b"railrelay accepting daemon"
_RAILS: Final = b"railrelay rail connections"
_SESSION: Final = b"railrelay session"
_COUNT: Final = struct.Struct("<Q")
_TOKEN: Final = struct.Struct("<QI")


@dataclass(frozen=True)
class Keys:
    """Of one control connection, as one end of it uses them."""

    sends: bytes
    receives: bytes
    rails: bytes


class Secrets:
    """Those of the configuration; falsy if it names no file."""

    def __init__(self, security: Security) -> None:
        self.files = tuple(map(Path, security.secret_files))

    def __bool__(self) -> bool:
        return bool(self.files)

    def read(self) -> list[bytes]:
        """ConfigError names the file and what is wrong with it. Those after the first need not be there."""
        there = [path for path in self.files[1:] if os.path.lexists(path)]
        return [_read(path) for path in (*self.files[:1], *there)]

    def usable(self) -> list[bytes]:
        """The same for a handshake: RelayError UNAUTHENTICATED."""
        try:
            return self.read()
        except ConfigError as failure:
            raise RelayError(ErrorCode.UNAUTHENTICATED, str(failure)) from None


def _read(path: Path) -> bytes:
    def wrong(seen: str, todo: str) -> ConfigError:
        return ConfigError(f"security.secret_files: {path}: {seen}; {todo}")

    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as failure:
        raise wrong(failure.strerror or "cannot be opened", f"`openssl rand -hex 32 >{path}` makes one") from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise wrong("not a regular file", "name a file that holds the secret")
        if facts.st_mode & 0o077:
            raise wrong(f"mode {stat.S_IMODE(facts.st_mode):04o}", f"others must not read it: `chmod 600 {path}`")
        if facts.st_uid not in (0, os.geteuid()):
            raise wrong(f"owner uid {facts.st_uid}", f"expected root or the daemon's uid {os.geteuid()}")
        content = os.read(fd, MAX_SECRET_BYTES + 1).strip()
    finally:
        os.close(fd)
    if not MIN_SECRET_BYTES <= len(content) <= MAX_SECRET_BYTES:
        raise wrong(
            f"{len(content)} bytes",
            f"expected {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} that nobody can guess: `openssl rand -hex 32`",
        )
    return content


def nonce() -> bytes:
    return secrets.token_bytes(protocol.NONCE_BYTES)


def proof(secret: bytes, role: bytes, messages: Sequence[Message]) -> bytes:
    """That who has ``role`` knows the secret. ``messages``: the handshake so far, the last one without its proof."""
    return hmac.digest(secret, role + _digest(messages), "sha256")


def proofs(known: Sequence[bytes], role: bytes, messages: Sequence[Message]) -> list[bytes]:
    return [proof(secret, role, messages) for secret in known]


def matching(known: Sequence[bytes], role: bytes, messages: Sequence[Message], shown: Sequence[bytes]) -> bytes | None:
    """The secret that one of the proofs shows; all are compared, in constant time."""
    found = None
    for secret in known:
        expected = proof(secret, role, messages)
        for one in shown:
            if hmac.compare_digest(expected, one):
                found = secret
    return found


def check(secrets: Secrets, messages: Sequence[Message], shown: Sequence[bytes], own: str, where: str) -> bytes | None:
    """The secret that the connecting end has shown to ``own``; None if none is needed. RelayError UNAUTHENTICATED."""
    known = secrets.usable()
    if not known and not shown:
        return None
    if not known:
        wrong = f"{where} wants {own} to know a secret, which has none; set security.secret_files there"
        raise RelayError(ErrorCode.UNAUTHENTICATED, wrong)
    secret = matching(known, CONNECTING, messages, shown)
    if secret is None:
        wrong = f"none of the {len(known)} secrets of {own}" if shown else f"no secret to {own}, which wants one"
        text = f"{where} shows {wrong}; set the same security.secret_files on both nodes"
        raise RelayError(ErrorCode.UNAUTHENTICATED, text)
    return secret


def keys(secret: bytes, role: bytes, messages: Sequence[Message]) -> Keys:
    """Of a connection whose handshake was ``messages``, for the end that has ``role``."""
    session = hmac.digest(secret, _SESSION + _digest(messages), "sha256")
    connecting, accepting = (hmac.digest(session, end, "sha256") for end in (CONNECTING, ACCEPTING))
    ends = (connecting, accepting) if role == CONNECTING else (accepting, connecting)
    return Keys(*ends, hmac.digest(session, _RAILS, "sha256"))


def seal(key: bytes, count: int, packet: bytes) -> bytes:
    """Of the packet with this number in its direction."""
    return hmac.digest(key, _COUNT.pack(count) + packet, "sha256")[:SEAL_BYTES]


def shown_token(made: Keys | None, token: bytes, connection: int, rail: int) -> bytes:
    """What a rail connection shows of its token: nothing that could be heard on the control connection."""
    if made is None:
        return token
    return hmac.digest(made.rails, token + _TOKEN.pack(connection, rail), "sha256")[: len(token)]


def _digest(messages: Sequence[Message]) -> bytes:
    digest = hashlib.sha256()
    for message in messages:
        packet = protocol.encode(message)
        digest.update(protocol.LENGTH_PREFIX.pack(len(packet)) + packet)
    return digest.digest()


# ---- certificates ----


def names(certificate: object) -> list[str]:
    """DNS names and addresses of a certificate, as SSLObject.getpeercert() returns it."""
    entries = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return [value for kind, value in entries if kind in ("DNS", "IP Address")]


def is_named(host: str, found: Sequence[str]) -> bool:
    """Whether a certificate with these names is the host's. A leading "*" stands for one label."""
    try:
        return ipaddress.ip_address(host) in map(_address, found)
    except ValueError:
        host = host.lower().rstrip(".")
        return any(name.lower() in (host, "*." + host.partition(".")[2]) for name in found)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
