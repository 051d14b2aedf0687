"""The conductor: builds the daemon's parts, passes events of the data plane on to them, and takes everything down
again, children before parents. Main thread only.

Who knows whom: clients -> requests -> sessions, peers -> transfers -> context. Rail threads are reached through the
data plane alone, and answer through its event queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from secrets import randbits
from typing import Any, Final

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, Result
from railrelay.daemon import addresses, control_port, discovery, plane, tls, verbs
from railrelay.daemon.authentication import Secrets
from railrelay.daemon.client import Client
from railrelay.daemon.client_socket import ClientServer
from railrelay.daemon.clients import Clients
from railrelay.daemon.commands import Commands
from railrelay.daemon.config import Config
from railrelay.daemon.context import Context
from railrelay.daemon.emulated import Helper, Helpers
from railrelay.daemon.flush import Flush
from railrelay.daemon.instance import Instance
from railrelay.daemon.local_route import LocalRoute
from railrelay.daemon.node_state import NodeState
from railrelay.daemon.offers import Offers
from railrelay.daemon.peers import Peers
from railrelay.daemon.rails import Rails
from railrelay.daemon.requests import Requests
from railrelay.daemon.sessions import Sessions
from railrelay.daemon.tls import Tls
from railrelay.daemon.transfers import TICK_S, Transfers
from railrelay.daemon.verbs import RailPort, Verbs
from railrelay.shm_layout import faults

DRAIN_LOOK_S: Final = 0.02

log = logging.getLogger("railrelay")


class Conductor:
    """Serves from the end of start() until close()."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.socket_path = config.socket_path()
        self._open = contextlib.AsyncExitStack()
        self._tick: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """ConfigError, InstanceTaken, NoSharedMemory, OSError: nothing stays behind then."""
        try:
            await self._start()
        except BaseException:
            await self._open.aclose()
            raise

    async def _start(self) -> None:
        config, closing = self.config, self._open.callback
        loop = asyncio.get_running_loop()
        names = Instance(config.node.instance)
        closing(names.close)
        addresses.check(config)
        ports = verbs.ports_of(config.rail)
        secrets = Secrets(config.security)
        secrets.read()
        certificates = Tls(config.security, self._error)
        rails = Rails(config, self._error)
        closing(rails.close)
        listener = control_port.listening(config)
        closing(listener.close)
        self.session = protocol.format_session(config.node.host, listener.getsockname()[1])
        instance = randbits(62) + 1
        self._state = NodeState(config, instance, rails.facts)
        closing(self._state.close)
        faults.point("daemon.start.segment")
        self._plane = self._new_plane(instance, ports)
        closing(self._plane.stop)
        commands = Commands(len(rails.facts))
        nics = Verbs(config, self._plane, commands, rails.facts, ports)
        for rail in ports:
            self._state.rail(rail, rails.facts[rail])
        self._open.push_async_callback(nics.close)
        helpers = Helpers()
        closing(helpers.close)
        identities = [facts.identity for facts in rails.facts]
        await helpers.start(config.rail, identities, self._plane.emulated_fds, self._helper_ended)
        self.ctx = Context(
            config, names, instance, self.session, rails.facts, self._state, self._plane, commands, helpers, nics,
            secrets, certificates,
        )  # fmt: skip
        if len(ports) == len(config.rail):
            self.ctx.nearest_rails = discovery.rail_of_rank([ports[rail].device for rail in sorted(ports)])
        self._build(rails)
        closing(self._clients.close)
        closing(helpers.close)
        closing(self._plane.stop)  # before the memory of clients goes
        self._open.push_async_callback(nics.close)
        closing(self._local.close)
        self._open.push_async_callback(self.ctx.close_tasks)
        closing(self.ctx.commands.close)
        closing(self._peers.close)
        closing(self._sessions.close)
        closing(rails.close)
        loop.add_reader(self._plane.event_fd, self._take_events)
        closing(loop.remove_reader, self._plane.event_fd)
        rails.serve(self._sessions.admit, self._sessions.expired)
        port = control_port.ControlPort(listener, certificates, self._sessions.new_link, self._error)
        closing(port.close)
        clients = ClientServer(self.socket_path, config.gid, self._clients.admit, self._error)
        closing(clients.close)
        closing(self._stop_ticking)
        self._look()
        self._say_who_may_connect()
        self.ctx.spawn(self._look_at(certificates), "certificates")
        faults.point("daemon.start.listening")

    def _new_plane(self, instance: int, ports: dict[int, RailPort]) -> plane.DataPlane:
        config, limits = self.config, self.config.limits
        made = plane.DataPlane(
            self._state.segment.buffer,
            instance=instance,
            max_peers=limits.max_peers,
            max_sessions=limits.max_peers,
            max_exports=limits.max_exports,
            regions_per_client=limits.regions_per_client,
            remotes_per_client=limits.remotes_per_client,
            direct_slice_bytes=int(config.relay.direct_slice_bytes),
            spin_us=config.spin_us,
        )
        for number, rail in enumerate(config.rail):
            if rail.nic == "verbs":
                verbs.add_rail(made, number, config, ports[number])
            else:
                made.add_rail(nic=rail.nic, cpu=rail.cpu, bytes_per_s=int(rail.rate_gbit * 1e9 / 8))
        made.start()
        return made

    def _say_who_may_connect(self) -> None:
        security = self.config.security
        if security.authenticates:
            log.info("peers authenticate by %s", security.ways)
        elif security.allow_unauthenticated:
            log.warning("security.allow_unauthenticated: whoever reaches %s may connect as a peer", self.session)
        else:
            log.info("no security.secret_files: loopback only, for peers on this machine")
        if unreachable := addresses.unreachable(self.config):
            log.warning("%s", unreachable)

    def _build(self, rails: Rails) -> None:
        by_row: dict[int, Client] = {}
        offers = Offers(self.session, self.config.limits.offers_per_region)
        self._transfers = Transfers(self.ctx, by_row)
        self._peers = Peers(self.ctx, self._transfers.abort)
        flush = Flush(self.ctx)
        self._sessions = Sessions(self.ctx, rails, offers, flush)
        self._local = LocalRoute(self.ctx)
        requests = Requests(self.ctx, offers, self._sessions, self._peers, self._transfers, self._local, flush)
        self._clients = Clients(self.ctx, by_row, requests, self._sessions, self._peers, self._transfers, self._local)

    # ---- the duty cycle ----

    def _take_events(self) -> None:
        loop = asyncio.get_running_loop()
        for event in self._plane.events():
            loop.call_soon(self._handle, *event)  # each on its own: an error in one costs no other

    def _handle(self, kind: int, rail: int, a: int, b: int, c: int, d: int, e: int) -> None:
        """The fields of each kind of event are listed in plane.pyi."""
        match kind:
            case plane.COMMAND_DONE:
                self.ctx.commands.answered(a, b)
            case plane.CONNECT_WANTED:
                self._peers.connect_wanted(rail, a, b, bool(c), d)
            case plane.SENDER_ENDING:
                self._peers.sender_ending(a, b, e)
            case plane.SENDER_LOST:
                self._peers.sender_lost(a, b)
            case plane.RECEIVER_LOST:
                self._sessions.receiver_lost(a)
            case plane.RECEIVER_FENCED:
                self._sessions.receiver_fenced(a, b, str(self._clients.by_row.get(d)) if c else "")
            case plane.FRAME_SETTLED:
                self._sessions.frame_settled(a, b, c)
            case plane.CLIENT_DETACHED:
                self._clients.rail_drained(a)
            case plane.VIOLATION:
                self._clients.violation(a, b, (c, d, e))
            case plane.NOTE_DUE:
                self._note_due(a, b, c)
            case plane.TRANSFER_ENDED:
                self._transfers.ended(a, b, c)
            case plane.PORT_CHANGED:
                self._port_changed(rail, bool(a), b)

    def _port_changed(self, rail: int, up: bool, event: int) -> None:
        facts = self.ctx.rails[rail]
        if facts.up == up:
            return
        facts = self.ctx.rails[rail] = msgspec.structs.replace(facts, up=up)
        self._state.rail(rail, facts)
        port = self.ctx.verbs.ports[rail]
        where = f"rail {facts.identity}: port {port.port_number} of {port.device}"
        if up:
            log.info("%s is up", where)
        else:
            text = f"{where} is down (event {event}); check its cable and switch, it comes back by itself"
            self._error(ErrorCode.RAIL_DOWN, text, key=f"{where} is down")
        self._sessions.tell_rail_state(rail, up)
        self._peers.port_changed(rail, up)

    def _helper_ended(self, helper: Helper) -> None:
        self._error(ErrorCode.RAIL_DOWN, f"rail {helper.name}: emulated NIC: {helper.failure}; restart the daemon")
        self._plane.fail_nic(helper.rail, Result.RAIL_DOWN)

    def _note_due(self, row: int, transfer: int, generation: int) -> None:
        client = self._clients.by_row.get(row)
        if client is not None and not client.leaving:
            self.ctx.spawn(
                self._transfers.deliver_note(client, transfer, generation, self._peers), f"notification of {client}"
            )

    def _look(self) -> None:
        self._tick = asyncio.get_running_loop().call_later(TICK_S, self._look)
        if self._clients.by_row:
            self._transfers.tick()

    async def _look_at(self, certificates: Tls) -> None:
        while self.config.security.tls:
            certificates.look()
            await asyncio.sleep(tls.LOOK_S)

    def _stop_ticking(self) -> None:
        if self._tick is not None:
            self._tick.cancel()

    def _error(self, code: ErrorCode, text: str, *, key: str = "") -> None:
        self._state.error(code, text, key=key)

    def on_exception(self, _loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
        """What no handler caught."""
        failure = facts.get("exception")
        text = f"{facts['message']}: {type(failure).__name__}: {failure}" if failure else facts["message"]
        log.debug("%s", text, exc_info=failure)
        self._error(ErrorCode.INTERNAL, text)

    # ---- the end ----

    async def drain(self) -> None:
        """Nothing new is admitted; returns when no transfer is in flight, or after drain_s."""
        self.ctx.draining = True
        self._state.phase("DRAINING")
        self._clients.tell_all(protocol.Draining(f"daemon of {self.session} is going down"))
        deadline = time.monotonic() + self.config.timeouts.drain_s
        for look in itertools.count():
            live = self._plane.live_transfers()
            if not live:
                return
            if time.monotonic() >= deadline:
                self._error(
                    ErrorCode.DRAINING,
                    f"{live} transfers were in flight after {self.config.timeouts.drain_s:g} s of draining; they end as"
                    " DAEMON_GONE, unless timeouts.drain_s gives them more time",
                )
                return
            if look == 0:
                log.info("draining %d transfers", live)
            await asyncio.sleep(DRAIN_LOOK_S)

    async def close(self) -> None:
        """Idempotent."""
        await self._open.aclose()
