"""Certificate authorities and certificates of nodes, as PEM files."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


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

    def section(self, *names: str, ca: Path | None = None) -> dict[str, object]:
        """A [security] section with a new certificate for hosts of these names; ``ca``: whom it trusts, if another."""
        stem = self.directory / ("-".join(names).replace("*", "any") or "nobody")
        certificate = self.ca.issue_cert(*names)
        chain = b"".join(part.bytes() for part in certificate.cert_chain_pems)
        stem.with_suffix(".crt").write_bytes(chain)
        key = stem.with_suffix(".key")
        key.touch(0o600)
        key.write_bytes(certificate.private_key_pem.bytes())
        return {
            "tls_certificate": str(stem.with_suffix(".crt")),
            "tls_key": str(key),
            "tls_ca": str(ca or self.directory / "ca.pem"),
        }

    def connecting(self, *names: str) -> ssl.SSLContext:
        """As a daemon with such a certificate connects; without names it has none."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        if names:
            self.ca.issue_cert(*names).configure_cert(context)
        return context
