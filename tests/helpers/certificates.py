"""Certificate authorities and certificates of nodes, as PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import trustme

YEAR: Final = timedelta(days=365)


@dataclass(frozen=True)
class Authority:
    """Keeps its files in ``directory``."""

    directory: Path
    ca: trustme.CA

    @classmethod
    def make(cls, directory: Path) -> Authority:
        directory.mkdir()
        made = cls(directory, trustme.CA())
        made.ca.cert_pem.write_to_path(str(directory / "ca.pem"))
        return made

    def section(self, *names: str, ca: Path | None = None, left: timedelta = YEAR) -> dict[str, object]:
        """A [security] section with a new certificate for hosts of these names; ``ca``: whom it trusts, if another.
        ``left``: until the certificate expires."""
        number = len(list(self.directory.glob("*.key")))
        certificate_path, key_path = self.directory / f"{number}.crt", self.directory / f"{number}.key"
        now = datetime.now(UTC)
        certificate = self.ca.issue_cert(*names, not_before=now - YEAR, not_after=now + left)
        certificate_path.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
        key_path.touch(0o600)
        key_path.write_bytes(certificate.private_key_pem.bytes())
        return {
            "tls_certificate": str(certificate_path),
            "tls_key": str(key_path),
            "tls_ca": str(ca or self.directory / "ca.pem"),
        }

    def connecting(self, *names: str) -> ssl.SSLContext:
        """As a daemon with such a certificate connects; without names it has none."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        if names:
            self.ca.issue_cert(*names).configure_cert(context)
        return context
