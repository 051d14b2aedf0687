"""Rails with nic = "verbs": which RDMA port each one has, registration of memory on all of them, and the ends of queue
pairs. Main thread, except for the verbs calls themselves: they may take long, and run on worker threads.

Memory is registered on the devices of all verbs rails, because another rail may take over (takeover.py). What was
registered is deregistered only after its last use, and before its mapping goes: whoever owns the memory sees to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import msgspec

from railrelay.client.errors import ErrorCode, RelayError
from railrelay.client.protocol import Endpoint, RailFacts
from railrelay.daemon.commands import Commands
from railrelay.daemon.config import Config, ConfigError, Rail
from railrelay.daemon.descriptors import OWN, discard
from railrelay.daemon.plane import DataPlane

GID_BYTES: Final = 16
MTUS: Final = (256, 512, 1024, 2048, 4096)
_NUMBERS: Final = {"qpn": 24, "psn": 24, "lid": 16}  # bits

T = TypeVar("T")


@dataclass(frozen=True)
class RailPort:
    """What a verbs rail opens. address: "" if only the device can tell it."""

    device: str
    port_number: int
    gid_index: int
    address: str


@dataclass(frozen=True)
class Facts:
    """What the data plane knows of a rail's port and device; mtu in bytes."""

    gid: bytes
    lid: int
    mtu: int
    up: bool
    ethernet: bool
    max_sge: int
    max_qp_wr: int
    max_cqe: int
    max_mr_size: int


@dataclass(eq=False)
class Keys:
    """Of one piece of memory on the device of each rail; 0 for rails that are not verbs."""

    lkeys: list[int] = field(default_factory=list)
    rkeys: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    dmabuf: int = -1  # descriptor of GPU memory, its own
    pid: int = OWN  # of the process that the descriptor came from
    work: asyncio.Future[None] | None = None

    def close(self) -> None:
        """Idempotent."""
        if self.dmabuf >= 0:
            discard([self.dmabuf], self.pid)
            self.dmabuf = -1


def ports_of(rails: Sequence[Rail]) -> dict[int, RailPort]:
    """The port of each verbs rail, by rail. ConfigError."""
    wanted = {number: rail for number, rail in enumerate(rails) if rail.nic == "verbs"}
    if all(rail.device and rail.gid_index >= 0 for rail in wanted.values()):
        return {
            number: RailPort(rail.device, rail.port_number, rail.gid_index, rail.address)
            for number, rail in wanted.items()
        }
    from railrelay.daemon import discovery  # needs pyverbs

    found = discovery.resolve(list(wanted.values()), names=[f"rail[{number}]" for number in wanted])
    return {
        number: RailPort(port.device, port.port_number, port.gid_index, port.address)
        for number, port in zip(wanted, found, strict=True)
    }


def add_rail(plane: DataPlane, number: int, config: Config, port: RailPort) -> None:
    """Opens the device for the data plane. ConfigError."""
    verbs = config.verbs
    try:
        plane.add_rail(
            nic="verbs",
            cpu=config.rail[number].cpu,
            device=port.device,
            port=port.port_number,
            gid_index=port.gid_index,
            sq_depth=verbs.sq_depth,
            signal_every=verbs.signal_every,
            flush=verbs.flush,
        )
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else failure
        raise ConfigError(f"rail[{number}]: device {port.device!r} port {port.port_number}: {reason}") from None


class Verbs:
    """Closes asynchronously, before the data plane stops: no worker is in a verbs call then."""

    def __init__(
        self,
        config: Config,
        plane: DataPlane,
        commands: Commands,
        facts: list[RailFacts],
        ports: dict[int, RailPort],
    ) -> None:
        """Completes ``facts`` of verbs rails: their address, and whether the port is up. ConfigError."""
        self.ports = ports
        self._config = config
        self._plane = plane
        self._commands = commands
        self._rails = len(facts)
        self._work: set[asyncio.Future[None]] = set()
        self._gpus = {rail: config.gpu_of(rail) for rail in ports}
        for rail, port in ports.items():
            try:
                found = self.facts(rail)
            except OSError as failure:
                where = f"device {port.device!r} port {port.port_number}"
                raise ConfigError(f"rail[{rail}]: {where}: {failure.strerror}") from None
            address = facts[rail].address or port.address or address_of(found.gid)
            facts[rail] = msgspec.structs.replace(facts[rail], address=address, up=found.up)

    def __bool__(self) -> bool:
        return bool(self.ports)

    def facts(self, rail: int) -> Facts:
        """Asks the device. OSError."""
        return Facts(**self._plane.verbs_facts(rail))

    def gpu(self, rail: int) -> str:
        """UUID of the GPU whose memory the lanes of a verbs rail are; "" if they are host memory."""
        return self._gpus.get(rail, "")

    # ---- memory ----

    async def register(
        self, keys: Keys, what: str, address: int, nbytes: int, *, dmabuf_offset: int = 0, flush: bool = False
    ) -> None:
        """On all verbs rails. The mapping must stay until deregister() has returned, also if this is cancelled.
        ``flush``: for set_flush_targets() alone. RelayError: nothing is registered."""
        dmabuf_fd = keys.dmabuf

        def work() -> None:
            lkeys, rkeys = [0] * self._rails, [0] * self._rails
            try:
                for rail in self.ports:
                    number, lkeys[rail], rkeys[rail] = self._plane.register_memory(
                        rail, address, nbytes, dmabuf_fd=dmabuf_fd, dmabuf_offset=dmabuf_offset, flush=flush
                    )
                    keys.ids.append(number)
            except OSError as failure:
                with contextlib.suppress(OSError):
                    self._deregister(keys)
                raise RelayError(
                    ErrorCode.NO_MEMORY, self._refused(rail, what, nbytes, dmabuf_fd >= 0, failure)
                ) from None
            keys.lkeys, keys.rkeys = lkeys, rkeys

        keys.work = self._begin(work)
        await asyncio.shield(keys.work)

    async def deregister(self, keys: Keys) -> None:
        """Nothing uses it any more, or may. Idempotent."""
        if keys.work is not None:
            await asyncio.wait([keys.work])
        try:
            if keys.ids:
                await asyncio.shield(self._begin(lambda: self._deregister(keys)))
        finally:
            keys.close()

    def _deregister(self, keys: Keys) -> None:
        """All of them, also if one fails. OSError: the first failure."""
        failures = list[OSError]()
        while keys.ids:
            try:
                self._plane.deregister_memory(keys.ids.pop())
            except OSError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _refused(self, rail: int, what: str, nbytes: int, dmabuf: bool, failure: OSError) -> str:
        """Which limit it was, and what to do."""
        device, most = self.ports[rail].device, 0
        with contextlib.suppress(OSError):
            most = self.facts(rail).max_mr_size
        text = f"{what} ({nbytes} bytes) cannot be registered with {device}: {failure.strerror}"
        if most and nbytes > most:
            return f"{text}; the device takes at most {most} bytes (max_mr_size): register smaller regions"
        if dmabuf:
            return (
                f"{text}; GPU memory is registered by its dma-buf, which needs Linux 5.12, a driver of the NIC and the"
                " open NVIDIA kernel module that support it; `railrelay doctor` checks them"
            )
        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        if failure.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM) and soft != resource.RLIM_INFINITY:
            return (
                f"{text}; the daemon may lock {soft} bytes (memlock): raise it by LimitMEMLOCK=infinity in its unit, or"
                " by `ulimit -l unlimited` before it starts"
            )
        return f"{text}; `railrelay doctor` checks what the device needs"

    # ---- queue pairs ----

    async def open(self, rail: int, through: int, *, answers: Endpoint | None = None) -> tuple[int, Endpoint]:
        """(number of the endpoint, what the other end is told of it): a queue pair of ``rail`` on the device of
        ``through``. It sends, and is to be connected; or it ``answers`` the one of a sender, who may send from here on.
        RelayError RAIL_DOWN."""

        def work() -> tuple[int, int, int, Facts]:
            facts = self.facts(through)
            number, qpn, psn = self._plane.new_endpoint(rail, through, sending=answers is None)
            if answers is not None:
                try:
                    self._connect(number, facts.mtu, answers)
                except OSError:
                    self.drop(number)
                    raise
            return number, qpn, psn, facts

        def undo(made: list[tuple[int, int, int, Facts]]) -> None:
            for number, *_ in made:
                self.drop(number)

        number, qpn, psn, facts = await self._call(rail, through, work, undo)
        return number, Endpoint(through, facts.gid, facts.lid, qpn, psn, facts.mtu)

    async def connect(self, rail: int, number: int, own: Endpoint, remote: Endpoint) -> None:
        """From here on the other end may be sent to. RelayError RAIL_DOWN; the endpoint is dropped then."""
        try:
            await self._call(
                rail, own.through, lambda: self._connect(number, own.mtu, remote), lambda _: self.drop(number)
            )
        except RelayError:
            self.drop(number)
            raise

    def _connect(self, number: int, mtu: int, remote: Endpoint) -> None:
        """On a worker. OSError."""
        verbs = self._config.verbs
        self._plane.connect_endpoint(
            number,
            gid=remote.gid,
            qpn=remote.qpn,
            psn=remote.psn,
            lid=remote.lid,
            mtu=min(mtu, remote.mtu),
            remote_through=remote.through,
            timeout=verbs.timeout,
            retry_count=verbs.retry_count,
            rnr_retry=verbs.rnr_retry,
            min_rnr_timer=verbs.min_rnr_timer,
            traffic_class=verbs.traffic_class,
            service_level=verbs.service_level,
        )

    async def probe(self, rail: int, number: int, timeout_s: float) -> None:
        """Writes nothing to the other end of a connected endpoint. RelayError RAIL_DOWN."""
        answered = self._commands.send(lambda cookie: self._plane.probe_endpoint(number, cookie))
        done, _ = await asyncio.wait([answered], timeout=timeout_s)
        if not done or answered.result():
            reason = f"completion status {answered.result()}" if done else f"no completion within {timeout_s:g} s"
            raise RelayError(ErrorCode.RAIL_DOWN, f"rail {rail}: a write of no bytes: {reason}")

    async def open_flush(self, rail: int, through: int) -> None:
        """As in DataPlane. RelayError RAIL_DOWN."""
        await self._call(rail, through, lambda: self._plane.open_flush(rail, through), lambda _: None)

    def set_flush_targets(self, rail: int, through: int, targets: list[tuple[int, int]]) -> asyncio.Future[int]:
        """As in DataPlane; done when the rail has answered."""
        return self._commands.send(lambda cookie: self._plane.set_flush_targets(rail, through, targets, cookie))

    def drop(self, number: int) -> None:
        """Of an endpoint that the data plane was not given as a sender or receiver."""
        self._plane.drop_endpoint(number)

    async def _call(self, rail: int, through: int, call: Callable[[], T], undo: Callable[[list[T]], None]) -> T:
        """``undo`` if the waiter is cancelled meanwhile, once the call has ended: of what it made, if anything."""
        made: list[T] = []
        work = self._begin(lambda: made.append(call()))
        try:
            await asyncio.shield(work)
        except OSError as failure:
            how = "" if through == rail else f", through rail {through}"
            raise RelayError(
                ErrorCode.RAIL_DOWN,
                f"rail {rail}: queue pair on {self.ports[through].device}{how}: {failure.strerror or failure}",
            ) from None
        except asyncio.CancelledError:
            work.add_done_callback(lambda _: undo(made))
            raise
        return made[0]

    # ---- workers ----

    def _begin(self, work: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().run_in_executor(None, work)
        self._work.add(future)
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: asyncio.Future[None]) -> None:
        self._work.discard(future)
        if not future.cancelled():
            future.exception()  # its waiter may have gone

    async def close(self) -> None:
        """Idempotent."""
        while self._work:
            await asyncio.wait(list(self._work))


def address_of(gid: bytes) -> str:
    """The IP address that a GID says; of InfiniBand a link-local one of IPv6."""
    address = ipaddress.IPv6Address(gid)
    return str(address.ipv4_mapped or address)


def checked_endpoint(
    origin: str, endpoint: Endpoint | None, through: int | None, rails: Sequence[RailFacts]
) -> Endpoint:
    """What a peer says of its end; of the device of rail ``through``, if that was asked for. RelayError if it cannot
    be."""
    if endpoint is None:
        raise RelayError(ErrorCode.BAD_RAIL, f"{origin}: its rail is not verbs; configure the same nic on both nodes")
    good = (
        through in (None, endpoint.through)
        and 0 <= endpoint.through < len(rails)
        and rails[endpoint.through].nic == "verbs"
        and len(endpoint.gid) == GID_BYTES
        and endpoint.mtu in MTUS
        and all(0 <= getattr(endpoint, name) < 1 << bits for name, bits in _NUMBERS.items())
    )
    if not good:
        raise RelayError(ErrorCode.PROTOCOL, f"{origin} describes a queue pair that cannot be: {endpoint}")
    return endpoint
