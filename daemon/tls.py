"""TLS of control connections: contexts made of the files that the configuration names, made again when one of these has
changed, and until when the certificates in them are valid. Main thread only."""

from __future__ import annotations

import logging
import math
import os
import re
import ssl
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from railrelay.client.errors import ErrorCode
from railrelay.daemon.config import ConfigError, Security
from railrelay.daemon.node_state import Report

LOOK_S: Final = 3600.0
_AGAIN_S: Final = 1.0  # after a failure, which need not be the files': there may have been no descriptor
SOON: Final = timedelta(days=7)
_OPTIONS: Final = ("tls_certificate", "tls_key", "tls_ca")
_CERTIFICATE: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_VERSION: Final = 0xA0  # tags of DER
_UTC_TIME: Final = 0x17

log = logging.getLogger("railrelay")


class Tls:
    """Files that are replaced count from the next connection on. While they do not go together, or cannot be read,
    what was read before stays in use, and an error record says so."""

    def __init__(self, security: Security, report: Report) -> None:
        """ConfigError."""
        self._security = security
        self._report = report
        self._seen = _stamps(security)
        self._again_at_s = math.inf
        self._accepting, self._connecting = accepting_context(security), connecting_context(security)

    def accepting(self) -> ssl.SSLContext | None:
        """None without TLS."""
        self._renew()
        return self._accepting

    def connecting(self) -> ssl.SSLContext | None:
        """None without TLS."""
        self._renew()
        return self._connecting

    def look(self) -> None:
        """Reports certificates that have expired or soon will. To be called every LOOK_S."""
        self._renew()
        for end in ends(self._security):
            if end.soon:
                self._report(ErrorCode.UNAUTHENTICATED, f"{end}; {end.todo}", key=f"{end.option}: {end.path}: expires")

    def _renew(self) -> None:
        seen, now_s = _stamps(self._security), time.monotonic()
        if seen == self._seen and now_s < self._again_at_s:
            return
        self._seen, self._again_at_s = seen, now_s + _AGAIN_S
        try:
            made = accepting_context(self._security), connecting_context(self._security)
        except ConfigError as failure:
            text = f"{failure}; TLS goes on with what was read before"
            self._report(ErrorCode.UNAUTHENTICATED, text, key=text)
            return
        self._again_at_s = math.inf
        self._accepting, self._connecting = made
        log.info("TLS: certificate, key and CA were read again%s", "".join(f"; {end}" for end in ends(self._security)))


def _stamps(security: Security) -> list[tuple[int, ...]]:
    """Of the files; the same only as long as nobody writes or replaces one, or changes who may read it."""
    if not security.tls:
        return []
    stamps: list[tuple[int, ...]] = []
    for option in _OPTIONS:
        try:
            facts = os.stat(getattr(security, option))
        except OSError as failure:
            stamps.append((failure.errno or 0,))
        else:
            stamps.append((facts.st_dev, facts.st_ino, facts.st_size, facts.st_ctime_ns))
    return stamps


def accepting_context(security: Security) -> ssl.SSLContext | None:
    """None without TLS. ConfigError."""
    return _context(security, ssl.Purpose.CLIENT_AUTH)


def connecting_context(security: Security) -> ssl.SSLContext | None:
    """None without TLS. ConfigError."""
    return _context(security, ssl.Purpose.SERVER_AUTH)


def _context(security: Security, purpose: ssl.Purpose) -> ssl.SSLContext | None:
    if not security.tls:
        return None
    for option in _OPTIONS:
        path = Path(getattr(security, option))
        try:
            mode = path.stat().st_mode
        except OSError as failure:
            raise ConfigError(f"security.{option}: {path}: {failure.strerror}") from None
        if not stat.S_ISREG(mode):
            raise ConfigError(f"security.{option}: {path}: not a regular file; name a PEM file")
        if option == "tls_key" and mode & 0o077:
            raise ConfigError(
                f"security.tls_key: {path}: mode {stat.S_IMODE(mode):04o}; others must not read it: `chmod 600 {path}`"
            )
    try:
        context = ssl.create_default_context(purpose, cafile=security.tls_ca)
        context.load_cert_chain(security.tls_certificate, security.tls_key, password="")  # or it would ask
    except (OSError, ValueError) as failure:
        raise ConfigError(f"security.tls_certificate, tls_key, tls_ca: {failure}; expected PEM files") from None
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    return context


# ---- validity ----


@dataclass(frozen=True)
class End:
    """Of what a file has: of the certificates of a chain the first to expire, of authorities the last."""

    option: str
    path: str
    at: datetime

    @property
    def left(self) -> timedelta:
        return self.at - datetime.now(UTC)

    @property
    def expired(self) -> bool:
        return self.left <= timedelta()

    @property
    def soon(self) -> bool:
        return self.left < SOON

    @property
    def todo(self) -> str:
        who = "all peers" if self.option == "security.tls_ca" else "this node"
        return f"connections of {who} fail from then on: put a new one in its place, which is read without a restart"

    def __str__(self) -> str:
        days = self.left / timedelta(days=1)
        when = f"has expired on {self.at:%Y-%m-%d %H:%M} UTC" if self.expired else f"expires in {days:.1f} days"
        return f"{self.option}: {self.path}: {when}"


def ends(security: Security) -> list[End]:
    """When the certificates expire; none without TLS, or of a file that cannot be read."""
    return list(_ends(security)) if security.tls else []


def _ends(security: Security) -> Iterator[End]:
    for option, which in (("tls_certificate", min), ("tls_ca", max)):
        path = getattr(security, option)
        if not os.path.isfile(path):  # a FIFO would keep whoever reads it
            continue
        try:
            pem = Path(path).read_text("latin-1")  # of any encoding, outside of certificates
            found = [_not_after(ssl.PEM_cert_to_DER_cert(one)) for one in _CERTIFICATE.findall(pem)]
        except (OSError, ValueError, IndexError):  # whoever makes a context of it says what is wrong
            continue
        if found:
            yield End(f"security.{option}", path, which(found))


def _not_after(certificate: bytes) -> datetime:
    """RFC 5280, 4.1: Certificate, tbsCertificate, validity, notAfter. The ssl module tells it of no certificate but the
    other end's."""
    fields = _parts(_parts(_parts(certificate)[0][1])[0][1])
    validity = fields[4 if fields[0][0] == _VERSION else 3][1]
    tag, text = _parts(validity)[1]
    form = "%y%m%d%H%M%SZ" if tag == _UTC_TIME else "%Y%m%d%H%M%SZ"
    return datetime.strptime(text.decode("ascii"), form).replace(tzinfo=UTC)


def _parts(content: bytes) -> list[tuple[int, bytes]]:
    """(tag, content) of the values that follow each other in DER."""
    found, at = [], 0
    while at < len(content):
        tag, length = content[at], content[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(content[at : at + size])
            at += size
        found.append((tag, content[at : at + length]))
        at += length
    return found
