"""Writer of the node segment: who is attached, which lanes are leased, peers, and the distinct error log, which
outlives the daemon's crash. Main thread only; rail threads write their own lines of the same rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Final, Protocol

from railrelay.client import paths
from railrelay.client.errors import ErrorCode
from railrelay.client.protocol import RailFacts
from railrelay.daemon.config import Config
from railrelay.shm_layout import abi, segment
from railrelay.shm_layout.segment import AreaPlan, ClientState, PeerState

ERROR_ROWS: Final = 128
MOST_CHARACTERS: Final = 4096  # of one error

log = logging.getLogger("railrelay")


class Report(Protocol):
    """NodeState.error, for parts that need nothing else of it."""

    def __call__(self, code: ErrorCode, text: str, *, key: str = "") -> None: ...


def shape(config: Config) -> dict[str, int]:
    """Header fields that say how many of everything there are."""
    relay = config.relay
    return {
        "rails": len(config.rail),
        "slots": relay.slots,
        "slot_bytes": relay.slot_bytes,
        "table_entries": relay.table_entries,
        "ring_slices": relay.ring_slices,
        "ring_tables": relay.ring_tables,
        "bounce_slots": relay.bounce_slots,
        "transfers": relay.transfers,
        "max_clients": config.limits.max_clients,
        "trace_records": config.limits.trace_records,
    }


class NodeState:
    """Owns the node segment. Closes idempotently."""

    def __init__(self, config: Config, instance: int, rails: Sequence[RailFacts]) -> None:
        limits, constants = config.limits, abi.CONSTANTS
        self._config = config
        self.segment = segment.create(
            paths.node_segment(config.node.instance),
            constants["SEGMENT_NODE"],
            [
                AreaPlan(constants["AREA_RAILS"], "rail_state", len(rails)),
                AreaPlan(constants["AREA_LANES"], "lane_state", len(rails) * limits.max_clients),
                AreaPlan(constants["AREA_CLIENTS"], "client_state", limits.max_clients),
                AreaPlan(constants["AREA_PEERS"], "peer_state", limits.max_peers),
                AreaPlan(constants["AREA_ERRORS"], "error_record", ERROR_ROWS),
                AreaPlan(constants["AREA_TRACE"], "trace_record", len(rails) * limits.trace_records),
            ],
            {**shape(config), "instance": instance},
            mode=0o640,
            owner_pid=os.getpid(),
        )
        self._lanes = self.segment.area(constants["AREA_LANES"], "lane_state")
        self._clients = self.segment.area(constants["AREA_CLIENTS"], "client_state")
        self._peers = self.segment.area(constants["AREA_PEERS"], "peer_state")
        self._errors = self.segment.area(constants["AREA_ERRORS"], "error_record")
        self._error_rows: dict[str, int] = {}
        self._rails = self.segment.area(constants["AREA_RAILS"], "rail_state")
        for index, facts in enumerate(rails):
            self._rails.write(
                index,
                name=facts.identity,
                address=facts.address,
                port=facts.port,
                cpu=config.rail[index].cpu,
                nic=facts.nic,
                down=not facts.up,
            )
        if config.gid is not None:  # the admin commands read it by name
            os.fchown(self.segment.fd, -1, config.gid)
        self.segment.publish()
        self.reader_fd = segment.open_object(self.segment.name)  # read-only, so that no client can write

    def phase(self, name: str) -> None:
        """RUNNING, DRAINING or CLOSED."""
        self.segment.header.set(0, "phase", abi.CONSTANTS[f"PHASE_{name}"])

    def rail(self, rail: int, facts: RailFacts) -> None:
        """What is known once its NIC is open."""
        self._rails.write(rail, address=facts.address, down=not facts.up)

    def rail_through(self, rail: int, through: int) -> None:
        self._rails.set(rail, "taken_by", 0 if through == rail else 1 + through)

    def count_takeover(self, rail: int) -> None:
        self._rails.set(rail, "takeovers", self._rails.get(rail, "takeovers") + 1)

    def client(
        self, row: int, state: ClientState, *, pid: int = 0, rank: int = 0, serial: int = 0, name: str = ""
    ) -> None:
        attached_ns = time.time_ns() if state is ClientState.ATTACHED else 0
        self._clients.write(
            row, pid=pid, rank=rank, serial=serial, name=name, attached_ns=attached_ns, regions=0, lanes=0, refused=0,
            state=state,
        )  # fmt: skip

    def client_counts(self, row: int, *, regions: int, lanes: int) -> None:
        self._clients.write(row, regions=regions, lanes=lanes)

    def client_refused(self, row: int) -> None:
        """It has asked for more than its limit."""
        self._clients.set(row, "refused", self._clients.get(row, "refused") + 1)

    def client_draining(self, row: int) -> None:
        self._clients.set(row, "state", ClientState.DRAINING)

    def lane(self, rail: int, client: int, *, pid: int, rank: int, generation: int) -> None:
        relay = self._config.relay
        row = rail * self._config.limits.max_clients + client
        self._lanes.write(
            row,
            client=client,
            pid=pid,
            rank=rank,
            generation=generation,
            slots=relay.slots,
            slot_bytes=relay.slot_bytes,
            leased=1,
        )

    def lane_free(self, rail: int, client: int) -> None:
        self._lanes.set(rail * self._config.limits.max_clients + client, "leased", 0)

    def peer(self, row: int, state: PeerState, *, session: str, instance: int, rails: int) -> None:
        since_ns = time.time_ns() if state is not PeerState.FREE else 0
        self._peers.write(row, session=session, instance=instance, rails=rails, since_ns=since_ns, state=state)

    def peer_counts(self, row: int, *, regions: int, fences: int) -> None:
        self._peers.write(row, regions=regions, fences=fences)

    def error(self, code: ErrorCode, text: str, *, key: str = "") -> None:
        """The one place where the daemon's errors end: a record, counted up for the same ``key`` (default: the text),
        with its first text and its last, and a log line for the first, second, fourth, eighth ... of them."""
        if self.reader_fd < 0:
            log.error("%s: %s", code, _one_line(text))
            return
        text = _one_line(text)
        key, now = key or text, time.time_ns()
        row = self._error_rows.get(key)
        if row is None:
            row = min(len(self._error_rows), ERROR_ROWS - 1)  # the last one is shared by all that found no other
            self._error_rows[key] = row
            if len(self._error_rows) > 8 * ERROR_ROWS:
                self._error_rows = {k: r for k, r in self._error_rows.items() if r < ERROR_ROWS - 1}
            if self._errors.get(row, "count") == 0:
                self._errors.write(row, first_ns=now, first_text=text)
        raw = text.encode()[: abi.FIELDS["error_record"]["text"].size - 1].decode(errors="ignore")
        count = self._errors.get(row, "count") + 1
        self._errors.write(row, code=code.number, text=raw, text_bytes=len(raw.encode()), last_ns=now, count=count)
        if count.bit_count() == 1:
            log.error("%s: %s%s", code, text, f" ({count} times)" if count > 1 else "")

    def close(self) -> None:
        if self.reader_fd < 0:
            return
        os.close(self.reader_fd)
        self.reader_fd = -1
        self.phase("CLOSED")
        self.segment.close()


def _one_line(text: str) -> str:
    """Clients and peers have a say in what errors say: that must not look like another line of the log."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text[:MOST_CHARACTERS])
