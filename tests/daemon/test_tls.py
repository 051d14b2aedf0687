"""Until when certificates are valid."""

from __future__ import annotations

import os
import resource
import shutil
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from helpers.certificates import YEAR, Authority
from helpers.waiting import until

from railrelay.client.errors import ErrorCode
from railrelay.daemon import tls
from railrelay.daemon.config import ConfigError, Security


def ends(section: Mapping[str, object]) -> dict[str, datetime]:
    return {end.option: end.at for end in tls.ends(Security(**section))}  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [timedelta(days=3), timedelta(days=-3), 40 * YEAR])
def test_the_end_is_the_one_that_openssl_reads(tmp_path: Path, left: timedelta) -> None:
    """40 years: past 2049 a date has four digits of the year."""
    authority = Authority.make(tmp_path / "authority")
    before = datetime.now(UTC).replace(microsecond=0) + left
    found = ends(authority.section("node", left=left))
    assert before <= found["security.tls_certificate"] <= datetime.now(UTC) + left
    context = ssl.create_default_context(cafile=str(authority.directory / "ca.pem"))
    [known] = [one for one in context.get_ca_certs() if one["issuer"] == context.get_ca_certs()[-1]["issuer"]]
    assert found["security.tls_ca"].timestamp() == ssl.cert_time_to_seconds(str(known["notAfter"]))


def test_of_a_chain_the_first_end_counts_and_of_authorities_the_last(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "authority")
    short, long = (authority.section(name, left=left) for name, left in (("a", timedelta(days=2)), ("b", YEAR)))
    chain = Path(str(short["tls_certificate"])), Path(str(long["tls_certificate"]))
    both = "".join(path.read_text() for path in chain)
    (tmp_path / "both.pem").write_text(both)
    made = {"tls_certificate": str(tmp_path / "both.pem"), "tls_key": "k", "tls_ca": str(tmp_path / "both.pem")}
    found = ends(made)
    assert found["security.tls_certificate"] == ends(short)["security.tls_certificate"]
    assert found["security.tls_ca"] >= ends(long)["security.tls_certificate"]


def test_nobody_waits_for_a_file_that_is_none(tmp_path: Path) -> None:
    section = Authority.make(tmp_path / "authority").section("node")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for option in section:
        security = Security(**{**section, option: str(fifo)})  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=rf"^security\.{option}: .*/fifo: not a regular file"):
            tls.accepting_context(security)
        tls.ends(security)


def test_files_that_could_not_be_read_are_read_once_they_can_be(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path / "authority")
    own, new = authority.section("node"), authority.section("node")
    reports: list[tuple[str, str]] = []

    def report(_: ErrorCode, text: str, *, key: str = "") -> None:
        reports.append((text, key))

    read = tls.Tls(Security(**own), report)  # type: ignore[arg-type]
    before = read.accepting()
    for option in ("tls_certificate", "tls_key"):
        shutil.copy2(str(new[option]), str(own[option]))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert read.accepting() is before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert ["Too many open files" in text for text, _ in reports] == [True]
    until(lambda: read.accepting() is not before, "they are read")
    assert read.accepting() is read.accepting()


def test_what_stands_beside_certificates_in_a_file_does_not_matter(tmp_path: Path) -> None:
    own = Authority.make(tmp_path / "authority").section("node")
    path = Path(str(own["tls_certificate"]))
    expected = ends(own)
    path.write_bytes("# Schlüssel\n".encode("latin-1") + path.read_bytes())
    assert ends(own) == expected


def test_what_is_no_certificate_has_no_end(tmp_path: Path) -> None:
    path = tmp_path / "cut.pem"
    path.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    section = {"tls_certificate": str(path), "tls_key": "k", "tls_ca": str(tmp_path / "missing.pem")}
    assert ends(section) == {}
