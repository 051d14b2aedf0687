"""The connecting end of a control connection: TCP, TLS if it is configured, and the handshake. Main thread only."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

import msgspec
import uvloop

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon import authentication
from railrelay.daemon.authentication import ACCEPTING, CONNECTING, Secrets
from railrelay.daemon.link import Link, LinkLost, PeerRefused

Q = TypeVar("Q", protocol.Hello, protocol.Look)
R = TypeVar("R", protocol.Welcome, protocol.Looked)


async def connect(session: str, tls: ssl.SSLContext | None, new_link: Callable[[], Link], timeout_s: float) -> Link:
    """OSError; RelayError UNAUTHENTICATED, PeerRefused if its certificate is not to be trusted."""
    host, port = protocol.parse_session(session)
    try:
        async with asyncio.timeout(timeout_s):
            stream, loop = await _stream(host, port), asyncio.get_running_loop()
            try:
                _, link = await loop.create_connection(
                    new_link, sock=stream, ssl=tls, server_hostname=host if tls is not None else None
                )
            finally:
                # The loop owns the descriptor, and if the other end was quick it has closed it without telling the
                # socket, which would close somebody else's later.
                if isinstance(loop, uvloop.Loop):
                    stream.detach()
    except ssl.SSLCertVerificationError as failure:
        raise PeerRefused(ErrorCode.UNAUTHENTICATED, f"its certificate: {failure.verify_message}") from None
    except ssl.SSLError as failure:
        raise RelayError(ErrorCode.UNAUTHENTICATED, f"TLS: {failure.reason or failure}") from None
    except ConnectionResetError:
        if tls is None:
            raise
        text = "closed during the TLS handshake; is TLS configured there (security.tls_ca)?"
        raise RelayError(ErrorCode.UNAUTHENTICATED, text) from None
    link.address = session
    return link


async def _stream(host: str, port: int) -> socket.socket:
    """Connected. The name is looked up here: the loop would report the failure of a look-up that was given up as
    nobody's. OSError."""
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, number, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        stream = socket.socket(family, kind | socket.SOCK_NONBLOCK, number)
        try:
            await loop.sock_connect(stream, address)
        except OSError as one:
            stream.close()
            failure = one
        except BaseException:
            stream.close()
            raise
        else:
            return stream
    raise failure


async def greet(
    link: Link, secrets: Secrets, instance: int, say: Callable[[int], Q], reply: type[R], timeout_s: float
) -> tuple[protocol.Challenge, R]:
    """Authenticates both ends, if there is a secret. ``say(id)``: the second message, without proofs. What comes behind
    the answer waits for handlers. LinkLost, LinkSilent; PeerRefused, proved if it is so; UNAUTHENTICATED if the secret
    cannot be read."""
    known = secrets.usable()
    opening = protocol.Opening(link.new_id(), protocol.PROTOCOL_VERSION, instance, authentication.nonce())
    try:
        challenge = await link.request(opening, protocol.Challenge, timeout_s)
    except LinkLost as failure:
        if link.certificate is None:
            raise
        # TLS 1.3: it has looked at the certificate after the handshake.
        text = (
            f"{failure.text} after the TLS handshake; does security.tls_ca there know the certificate here, and has"
            " that not expired?"
        )
        raise RelayError(ErrorCode.UNAUTHENTICATED, text) from None
    if challenge.protocol != protocol.PROTOCOL_VERSION or len(challenge.nonce) != protocol.NONCE_BYTES:
        text = (
            f"answers by protocol {challenge.protocol} and a nonce of {len(challenge.nonce)} bytes; expected"
            f" {protocol.PROTOCOL_VERSION} and {protocol.NONCE_BYTES}"
        )
        raise PeerRefused(ErrorCode.VERSION, text)
    bare = say(link.new_id())
    said = msgspec.structs.replace(bare, proofs=authentication.proofs(known, CONNECTING, (opening, challenge, bare)))
    try:
        answer = await link.request(said, reply, timeout_s, then_hold=True)
    except PeerRefused as refusal:
        if refusal.answer is not None:
            prover = _prover(known, (opening, challenge, said), refusal.answer)
            refusal.proved = not known or prover is not None
        raise
    if known:
        secret = _prover(known, (opening, challenge, said), answer)
        if secret is None:
            text = "lets this daemon in but does not prove that it has the secret itself; it is not what it seems"
            raise PeerRefused(ErrorCode.UNAUTHENTICATED, text)
        messages = (opening, challenge, said, msgspec.structs.replace(answer, proof=b""))
        link.keys = authentication.keys(secret, CONNECTING, messages)
    return challenge, answer


def _prover(
    known: list[bytes],
    messages: tuple[protocol.PeerMessage, ...],
    answer: protocol.Welcome | protocol.Looked | protocol.Refused,
) -> bytes | None:
    """The secret by which the answer is proved."""
    bare = msgspec.structs.replace(answer, proof=b"")
    return authentication.matching(known, ACCEPTING, (*messages, bare), [answer.proof])
