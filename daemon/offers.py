"""What other daemons may open, by capability. Main thread only."""

from __future__ import annotations

import secrets
from typing import Final

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError
from railrelay.daemon.client import Client, Region

CAPABILITY_BYTES: Final = 16
SESSION_CHARACTERS: Final = 300  # a host name has at most 253
ANYBODY: Final = ""


class Offers:
    def __init__(self, own_session: str, most: int) -> None:
        """``most``: single peers that a region may be offered to."""
        self._own_session = own_session
        self._most = most
        self._by_capability: dict[bytes, tuple[Region, str]] = {}

    def offer(self, region: Region, session: str = ANYBODY) -> bytes:
        """The capability by which the daemon of this session, or any, opens the region; the same one each time.
        RelayError."""
        if session:
            session = _normal(session)
        if session not in region.offers:
            if len(region.offers) > self._most:
                text = f"region {region.index} of {region.client} has been offered to {self._most} single peers"
                raise RelayError(ErrorCode.LIMIT, f"{text}; raise limits.offers_per_region")
            region.offers[session] = secrets.token_bytes(CAPABILITY_BYTES)
        capability = region.offers[session]
        self._by_capability[capability] = (region, session)
        return capability

    def renew(self, region: Region) -> None:
        """All its capabilities are good (again)."""
        for session, capability in region.offers.items():
            self._by_capability[capability] = (region, session)

    def withdraw(self, region: Region) -> None:
        """From now on nobody can open it."""
        for capability in region.offers.values():
            self._by_capability.pop(capability, None)

    def withdraw_all(self, client: Client) -> None:
        for capability in [known for known, (region, _) in self._by_capability.items() if region.client is client]:
            del self._by_capability[capability]

    def find(self, capability: bytes, session: str) -> Region:
        """The region that the daemon of this session may open. RelayError BAD_CAPABILITY."""
        region, meant = self._by_capability.get(capability, (None, ANYBODY))
        if region is None:
            text = f"{self._own_session} offers no such region (any more); ask its engine for a new offer"
            raise RelayError(ErrorCode.BAD_CAPABILITY, text)
        if meant not in (ANYBODY, session):
            text = f"this region of {self._own_session} was offered to {meant} alone, not to {session}"
            raise RelayError(ErrorCode.BAD_CAPABILITY, text)
        return region


def _normal(session: str) -> str:
    try:
        session = protocol.format_session(*protocol.parse_session(session))
    except ValueError as failure:
        raise RelayError(ErrorCode.BAD_SESSION, str(failure)) from None
    if len(session) > SESSION_CHARACTERS:
        raise RelayError(ErrorCode.BAD_SESSION, f"session of {len(session)} characters; at most {SESSION_CHARACTERS}")
    return session
