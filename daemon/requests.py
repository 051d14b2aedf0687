"""What an attached client may ask for, one method a request. Main thread only; a handler that is cancelled because its
client leaves never resumes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import struct
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import msgspec

from railrelay.client import protocol
from railrelay.client.errors import ErrorCode, RelayError, Result
from railrelay.client.protocol import Message
from railrelay.daemon import dmabuf
from railrelay.daemon.client import KEPT_TAGS, Client, Region, Remote
from railrelay.daemon.client_socket import NO_ROOM
from railrelay.daemon.config import MAX_CLIENTS
from railrelay.daemon.context import Context, on_worker, run_on_worker
from railrelay.daemon.emulated import Source, made_up_base
from railrelay.daemon.flush import Flush, Place
from railrelay.daemon.local_route import LocalRoute, handed_of
from railrelay.daemon.memory import Memory, reserve
from railrelay.daemon.offers import CAPABILITY_BYTES, Offers
from railrelay.daemon.peers import Peer, Peers
from railrelay.daemon.sessions import Sessions
from railrelay.daemon.transfers import Transfers
from railrelay.shm_layout import faults

LONGEST_WAIT_S: Final = 3600.0
LARGEST_DEVICE_REGION: Final = 1 << 40  # made-up addresses of one memory
IPC_BYTES: Final = 64
TAG_BYTES: Final = 8

Reply = Message | None  # None: it was sent already, with descriptors


class Requests:
    def __init__(
        self,
        ctx: Context,
        offers: Offers,
        sessions: Sessions,
        peers: Peers,
        transfers: Transfers,
        local: LocalRoute,
        flush: Flush,
    ) -> None:
        self._ctx = ctx
        self._offers = offers
        self._sessions = sessions
        self._peers = peers
        self._transfers = transfers
        self._local = local
        self._flush = flush
        self._generations = itertools.count(1)
        self._bounce_serials = itertools.count(1)
        self._handlers: dict[type[Message], Callable[[Client, Any], Reply | Awaitable[Reply]]] = {
            protocol.LeaseLane: self._lease_lane,
            protocol.Unregister: self._unregister,
            protocol.OfferRegion: self._offer_region,
            protocol.ConnectPeer: self._connect_peer,
            protocol.OpenRegion: self._open_region,
            protocol.CloseRegion: self._close_region,
            protocol.LetGo: self._let_go,
            protocol.Note: self._note,
            protocol.Abort: self._abort,
            protocol.Cancel: self._cancel,
            protocol.Fence: transfers.fence,
        }

    def handle(self, client: Client, message: protocol.ClientRequest, fds: list[int]) -> Reply | Awaitable[Reply]:
        """RelayError, NoSharedMemory, or OverflowError for a number that cannot be. The descriptors stay the
        caller's."""
        if isinstance(message, protocol.Register):
            return self._register(client, message, fds)
        return self._handlers[type(message)](client, message)

    def forget_regions(self, client: Client) -> None:
        """From now on nobody can open a region of this client."""
        self._offers.withdraw_all(client)

    async def forget_memory(self, client: Client) -> None:
        """Verbs devices and helpers of emulated NICs let go of the memory of a client that has nothing in flight any
        more."""
        for rail, lane in client.lanes.items():
            await self._forget_lane(rail, lane)
        for memory in client.bounces:
            await self._ctx.verbs.deregister(memory.keys)
        for region in client.regions.values():
            await self._forget_region(region)

    async def _forget_lane(self, rail: int, lane: Memory) -> None:
        await self._ctx.verbs.deregister(lane.keys)
        if lane.number:
            await self._ctx.helpers.remove(lane.number, rail=rail)

    async def _forget_region(self, region: Region) -> None:
        region.handed.close()
        await self._flush.remove(region.keys)
        await self._ctx.verbs.deregister(region.keys)
        number, region.memory = region.memory, 0
        if number:
            await self._ctx.helpers.remove(number, region.kind)

    def _count(self, client: Client) -> None:
        self._ctx.state.client_counts(client.row, regions=len(client.regions), lanes=len(client.lanes))

    # ---- lanes and memory ----

    async def _lease_lane(self, client: Client, message: protocol.LeaseLane) -> Reply:
        ctx, rail = self._ctx, message.rail
        self._check_rail(rail)
        memory = client.lanes.get(rail)
        if memory is None:
            most = ctx.config.limits.lanes_per_client
            if len(client.lanes) >= most:
                raise RelayError(
                    ErrorCode.LIMIT, f"lane {rail}<-{client.rank}: {client} has {most}; raise limits.lanes_per_client"
                )
            memory = await self._new_lane(client, rail)
        elif not memory.unregistered:
            raise RelayError(ErrorCode.BAD_ARGUMENT, f"lane {rail}<-{client.rank} is leased to this client already")
        if ctx.rails[rail].nic == "verbs":
            await self._register_lane(client, rail, memory)
        kind = "device" if memory.device else "host"
        faults.point("daemon.lane.leased")
        leased = protocol.Leased(message.id, rail, memory.generation, memory.nbytes, kind, memory.device)
        client.socket.send(leased, (memory.fd,))
        memory.close_fd()
        self._count(client)
        return None

    async def _new_lane(self, client: Client, rail: int) -> Memory:
        """Leased, as far as the data plane is concerned."""
        ctx = self._ctx
        generation = next(self._generations)
        client.lanes[rail] = Memory("", -1, 0)  # taken, while the memory is being made
        try:
            name = ctx.names.lane_memory(rail, client.row, generation)
            device = ctx.helpers.device(rail) or ctx.verbs.gpu(rail)
            memory = client.lanes[rail] = await on_worker(lambda: self._lane_memory(name, device))
            faults.point("daemon.lane.reserved")
            memory.generation = generation
            emulated = ctx.helpers.get(rail) is not None
            if emulated or device:
                memory.number = ctx.helpers.new_memory()
            if emulated:
                await self._show_lane(rail, memory)
            ctx.state.lane(rail, client.row, pid=client.pid, rank=client.rank, generation=generation)
            fd, base = (-1, made_up_base(memory.number)) if memory.number else (memory.fd, 0)
            await ctx.commands.send(
                lambda cookie: ctx.plane.lease_lane(client.row, rail, fd, memory.nbytes, generation, cookie, base=base)
            )
        except Exception:
            ctx.state.lane_free(rail, client.row)
            failed = client.lanes.pop(rail)
            failed.close()
            await self._forget_lane(rail, failed)
            raise
        await run_on_worker(lambda: ctx.plane.prefault_rail(client.row, rail))
        return memory

    def _lane_memory(self, name: str, device: str) -> Memory:
        nbytes = self._ctx.config.relay.lane_bytes
        if not device:
            return reserve(name, nbytes)
        from railrelay.daemon import device_memory  # only where GPUs are configured

        return device_memory.reserve(device, nbytes)

    async def _register_lane(self, client: Client, rail: int, memory: Memory) -> None:
        """If that fails the lane stays, and the client may ask for it again."""
        ctx = self._ctx
        memory.unregistered = False
        try:
            if memory.keys.dmabuf < 0 and memory.device:
                memory.keys.dmabuf = await dmabuf.export(memory.fd, memory.nbytes, memory.device)
            base = ctx.plane.lane_base(client.row, rail)
            await ctx.verbs.register(memory.keys, f"relay memory of rail {rail}", base, memory.nbytes)
        except RelayError:
            memory.unregistered = True
            raise
        keys = memory.keys.lkeys
        await ctx.commands.send(lambda cookie: ctx.plane.set_lane_keys(client.row, rail, keys, cookie))

    async def _show_lane(self, rail: int, memory: Memory) -> None:
        """The data plane of an emulated rail knows relay memory by a made-up address; only the helper maps it."""
        helpers = self._ctx.helpers
        kind = "vmm" if memory.device else "host"
        source = Source(
            made_up_base(memory.number), memory.nbytes, kind, fd=memory.fd, handle_bytes=memory.nbytes,
            wipe=bool(memory.device),
        )  # fmt: skip
        await helpers.add(memory.number, source, rail)

    async def _register(self, client: Client, message: protocol.Register, fds: list[int]) -> Reply:
        ctx = self._ctx
        rail = client.own_rail if message.rail < 0 else message.rail
        self._check_rail(rail)
        if message.bytes <= 0 or message.address < 0 or message.address + message.bytes > 1 << 64:
            raise RelayError(
                ErrorCode.BAD_LENGTH,
                f"region of {message.bytes} bytes at {message.address:#x}: not in a 64-bit address space",
            )
        of_gpu = message.memory == "device"
        expected = (message.handle == "vmm") + message.dmabuf if of_gpu else int(message.shared)
        if len(fds) != expected or (of_gpu and message.shared):
            raise RelayError(ErrorCode.BAD_ARGUMENT, f"Register came with {len(fds)} descriptors; expected {expected}")
        if of_gpu:
            self._check_gpu(client, message.device)
        if message.shared:
            _check_file(fds[0], message.offset, message.bytes)
        else:
            _check_handle(message)
        # Where the rail's relay memory is GPU memory, an emulated NIC reaches other GPU memory by its handle. A verbs
        # device does by a dma-buf.
        copied = of_gpu and message.handle != "" and ctx.helpers.device(rail) != ""
        reached = copied or (of_gpu and message.dmabuf and ctx.rails[rail].nic == "verbs")
        direct = message.shared or reached
        if message.shared:
            self._check_shared(client, message.bytes)
        number = ctx.helpers.new_memory() if direct else 0
        index = client.region_rows.take()
        if index is None:
            ctx.helpers.free_memory(number)
            raise RelayError(
                ErrorCode.LIMIT, f"{client} has {client.region_rows.count} regions; raise limits.regions_per_client"
            )
        base = made_up_base(number) if reached else 0
        if reached and not copied:  # a device takes memory at the place in a page where the dma-buf has it
            base += message.dmabuf_offset % mmap.PAGESIZE
        mapped = fds[0] if message.shared else -1
        receive = message.receive or message.shared
        kind = message.handle if copied else "host"
        region = Region(
            client,
            index,
            message.address,
            message.bytes,
            rail,
            direct,
            receive,
            number,
            kind,
        )
        try:
            region.handed = handed_of(message, fds, client.pid)
            ctx.plane.add_region(client.row, index, mapped, message.offset, message.bytes, base=base)
        except OSError as failure:
            region.handed.close()
            client.free_region(index)
            ctx.helpers.free_memory(number)
            if failure.errno in NO_ROOM:
                raise
            code = ErrorCode.NO_MEMORY if failure.errno == errno.ENOMEM else ErrorCode.BAD_ARGUMENT
            raise RelayError(code, f"region of {message.bytes} bytes cannot be mapped: {failure.strerror}") from None
        if message.shared:
            client.shared_bytes[index] = message.bytes
        try:
            async with client.prefault_lock:
                await run_on_worker(lambda: ctx.plane.prefault_region(client.row, index))
        except asyncio.CancelledError:  # the client leaves
            region.handed.close()
            raise
        client.regions[index] = region
        faults.point("daemon.region.mapped")
        self._count(client)
        if direct:
            try:
                if message.shared or copied:
                    fd = fds[0] if message.shared or kind == "vmm" else -1  # else it may be the dma-buf
                    base = ctx.plane.region_base(client.row, index)
                    source = Source(
                        base, message.bytes, kind, message.offset, fd, message.ipc, message.handle_bytes, pid=client.pid
                    )  # fmt: skip
                    await ctx.helpers.add(number, source)
                if ctx.verbs and not copied:
                    await self._register_region(client, region, message, fds)
            except (RelayError, OSError):
                readers = await ctx.commands.to_all(lambda cookie: ctx.plane.remove_region(client.row, index, cookie))
                if readers:  # it named the region before it was told of it
                    client.socket.close(f"region {index} was used before it was registered")
                    raise
                await self._forget_region(region)
                del client.regions[index]
                ctx.plane.finish_region_removal(client.row, index, False)
                client.free_region(index)
                raise
        async with client.bounce_lock:
            fresh = receive and not direct and not client.bounces
            if fresh:
                try:
                    await self._add_bounces(client)
                except Exception:
                    if client.bounces:  # some rails have theirs already, and each gets them only once
                        client.socket.close("its bounce memory could not be mapped")
                        raise
                    client.regions.pop(index).handed.close()
                    ctx.plane.finish_region_removal(client.row, index, False)
                    client.free_region(index)
                    raise
            capability = self._offers.offer(region)
            faults.point("daemon.region.offered")
            reply = protocol.Registered(message.id, index, rail, capability, fresh, direct)
            client.socket.send(reply, tuple(memory.fd for memory in client.bounces) if fresh else ())
            for memory in client.bounces:
                memory.close_fd()
        return None

    async def _register_region(
        self, client: Client, region: Region, message: protocol.Register, fds: list[int]
    ) -> None:
        ctx = self._ctx
        if message.dmabuf:
            region.keys.dmabuf, region.keys.pid = os.dup(fds[-1]), client.pid
        base = ctx.plane.region_base(client.row, region.index)
        what = f"region {region.index} of {client}"
        await ctx.verbs.register(region.keys, what, base, region.nbytes, dmabuf_offset=message.dmabuf_offset)
        if message.memory == "device" and region.receive:
            place = Place(what, base, min(region.nbytes, mmap.PAGESIZE), message.dmabuf_offset)
            await self._flush.add(client.serial, region.keys, place)
        ctx.plane.set_region_keys(client.row, region.index, region.keys.lkeys)

    async def _add_bounces(self, client: Client) -> None:
        ctx, made = self._ctx, list[Memory]()
        try:
            for rail in range(len(ctx.rails)):
                name = ctx.names.bounce_memory(rail, client.row, next(self._bounce_serials))
                nbytes = ctx.config.relay.bounce_bytes
                if ctx.rails[rail].nic == "verbs":  # the run tables, too, come by a write of the sender
                    nbytes += ctx.config.relay.bounce_table_bytes
                made.append(await on_worker(partial(reserve, name, nbytes)))
            faults.point("daemon.bounce.made")
            client.bounces = made  # before the plane knows of it: if the client leaves now, they end with it
            for rail, memory in enumerate(made):
                await self._add_bounce(client, rail, memory)
                await run_on_worker(partial(ctx.plane.prefault_rail, client.row, rail))
                if ctx.rails[rail].nic == "verbs":
                    await self._register_bounce(client, rail, memory)
        except BaseException:
            if not client.bounces:
                for memory in made:
                    memory.close()
            raise

    def _add_bounce(self, client: Client, rail: int, memory: Memory) -> Awaitable[int]:
        return self._ctx.commands.send(
            lambda cookie: self._ctx.plane.add_bounce(client.row, rail, memory.fd, memory.nbytes, cookie)
        )

    async def _register_bounce(self, client: Client, rail: int, memory: Memory) -> None:
        ctx = self._ctx
        base = ctx.plane.bounce_base(client.row, rail)
        await ctx.verbs.register(memory.keys, f"bounce memory of rail {rail}", base, memory.nbytes)
        keys = memory.keys.rkeys
        await ctx.commands.send(lambda cookie: ctx.plane.set_bounce_keys(client.row, rail, keys, cookie))

    async def _unregister(self, client: Client, message: protocol.Unregister) -> Reply:
        region = client.regions.pop(message.region, None)
        if region is None:
            raise RelayError(ErrorCode.BAD_REGION, f"{client} has no region {message.region}")
        self._offers.withdraw(region)
        faults.point("daemon.region.withdrawing")
        try:
            await self._end_region(client, region)
        except asyncio.CancelledError:  # the client leaves, and its regions end with it
            client.regions[region.index] = region
            raise
        return protocol.Done(message.id)

    async def _end_region(self, client: Client, region: Region) -> None:
        """RelayError BUSY while it is read, or may be written by the local route."""
        ctx, index = self._ctx, region.index
        readers = await ctx.commands.to_all(lambda cookie: ctx.plane.remove_region(client.row, index, cookie))
        if readers:
            ctx.plane.finish_region_removal(client.row, index, True)
            client.regions[index] = region
            self._offers.renew(region)
            raise RelayError(ErrorCode.BUSY, f"{readers} slices in flight read region {index} of {client}")
        writers = await self._local.withdraw(region, ctx.config.timeouts.settle_s)
        if writers:
            ctx.plane.finish_region_removal(client.row, index, True)
            client.regions[index] = region  # to be asked for again; nobody can open it any more
            raise RelayError(
                ErrorCode.BUSY, f"region {index} of {client} may still be written by {', '.join(writers)}; ask again"
            )
        await self._sessions.withdraw(client, region)
        await self._forget_region(region)
        faults.point("daemon.region.withdrawn")
        ctx.plane.finish_region_removal(client.row, index, False)
        client.free_region(index)
        self._count(client)

    def _check_shared(self, client: Client, nbytes: int) -> None:
        registered, most = sum(client.shared_bytes.values()), self._ctx.config.limits.shared_bytes
        if nbytes > most - registered:
            raise RelayError(
                ErrorCode.LIMIT,
                f"region of {nbytes} bytes: {client} has {registered} of {most} bytes of shared memory registered;"
                " raise limits.shared_bytes_per_client",
            )

    def _check_gpu(self, client: Client, device: str) -> None:
        """What makes sure of its memory, and copies it, is one GPU a client."""
        if client.gpu not in ("", device) or not device:
            raise RelayError(
                ErrorCode.BAD_ARGUMENT, f"memory of GPU {device[:64]!r}: {client} uses {client.gpu!r}; one client a GPU"
            )
        client.gpu = device

    def _offer_region(self, client: Client, message: protocol.OfferRegion) -> Reply:
        region = client.regions.get(message.region)
        if region is None:
            raise RelayError(ErrorCode.BAD_REGION, f"{client} has no region {message.region}")
        return protocol.Offered(message.id, self._offers.offer(region, message.session))

    def _check_rail(self, rail: int) -> None:
        if not 0 <= rail < len(self._ctx.rails):
            raise RelayError(ErrorCode.BAD_RAIL, f"rail {rail}; this node has rails 0 to {len(self._ctx.rails) - 1}")

    # ---- peers ----

    async def _connect_peer(self, client: Client, message: protocol.ConnectPeer) -> Reply:
        if self._ctx.draining:
            raise RelayError(ErrorCode.DRAINING, "the daemon is going down")
        peer = await self._peers.connect(client, message.session, _timeout(message.timeout_s))
        return protocol.PeerConnected(message.id, peer.row, peer.instance, peer.local_rails)

    async def _open_region(self, client: Client, message: protocol.OpenRegion) -> Reply:
        ctx = self._ctx
        peer = self._peers.get(message.peer, client)
        if len(message.capability) != CAPABILITY_BYTES:
            raise RelayError(
                ErrorCode.BAD_CAPABILITY, f"a capability has {CAPABILITY_BYTES} bytes, this {len(message.capability)}"
            )
        index = client.remote_rows.take()
        if index is None:
            raise RelayError(
                ErrorCode.LIMIT,
                f"{client} has {client.remote_rows.count} remote regions; raise limits.remotes_per_client",
            )
        try:
            opened = await self._peers.ask(
                peer,
                lambda n: protocol.PeerOpenRegion(n, message.capability),
                protocol.PeerRegion,
                self._ctx.config.timeouts.peer_s,
            )
            faults.point("daemon.remote.opened")
            try:
                _check_region(peer, opened)
            except RelayError as failure:
                self._peers.violated(peer, failure)
                raise
            self._peers.region_opened(peer, opened.handle)
            try:
                self._peers.check(peer, client)  # it may have gone meanwhile
                if ctx.verbs:
                    tags = struct.unpack(f"<{len(opened.aborted) // TAG_BYTES}Q", opened.aborted)
                    peer.aborted(ctx.plane, opened.owner, opened.owner_serial, tags)
                self._ctx.plane.add_remote(
                    client.row,
                    index,
                    peer.row,
                    opened.handle,
                    opened.bytes,
                    opened.rail,
                    opened.owner,
                    opened.window_bytes,
                    opened.window_runs,
                    iova=opened.iova,
                    rkeys=list(opened.rkeys),
                )
            except Exception:
                self._peers.close_region(peer, opened.handle)
                raise
        except Exception:
            client.remote_rows.free(index)
            raise
        client.remotes[index] = Remote(index, peer, opened.handle)
        faults.point("daemon.remote.added")
        reply = protocol.RegionOpened(
            message.id, index, opened.address, opened.bytes, opened.rail, opened.owner, opened.window_bytes,
            opened.window_runs, opened.handle,
        )  # fmt: skip
        # What the peer here has let open is offered, unless it was withdrawn meanwhile.
        region = None
        if message.local and peer.instance == ctx.instance:
            with contextlib.suppress(RelayError):
                region = self._offers.find(message.capability, ctx.session)
        if region is None or not region.handed.handle or not self._local.grant(client, index, region):
            return reply
        faults.point("daemon.local.granted")
        about, fd = {**vars(region.handed)}, region.handed.fd
        del about["fd"], about["pid"]
        client.socket.send(msgspec.structs.replace(reply, **about), (fd,) if fd >= 0 else ())
        return None

    def _let_go(self, client: Client, message: protocol.LetGo) -> Reply:
        self._local.let_go(client, message.remotes)
        return protocol.Done(message.id)

    def _close_region(self, client: Client, message: protocol.CloseRegion) -> Reply:
        remote = client.remotes.pop(message.remote, None)
        if remote is None:
            raise RelayError(ErrorCode.BAD_REGION, f"{client} has not opened remote region {message.remote}")
        self._local.let_go(client, [remote.index])
        self._ctx.plane.remove_remote(client.row, remote.index)
        self._peers.close_region(remote.peer, remote.handle)
        client.remote_rows.free(remote.index)
        return protocol.Done(message.id)

    # ---- transfers ----

    def _note(self, client: Client, message: protocol.Note) -> Reply:
        if message.remote not in client.remotes:
            raise RelayError(ErrorCode.BAD_REGION, f"{client} has not opened remote region {message.remote}")
        if len(message.payload) > protocol.NOTE_BYTES:
            raise RelayError(
                ErrorCode.BAD_LENGTH, f"notification of {len(message.payload)} bytes; at most {protocol.NOTE_BYTES}"
            )
        if not 0 <= message.transfer < self._ctx.config.relay.transfers or not 0 <= message.tag < 1 << 64:
            raise RelayError(
                ErrorCode.BAD_ARGUMENT,
                f"notification of transfer {message.transfer} with tag {message.tag}: expected a transfer from 0 to"
                f" {self._ctx.config.relay.transfers - 1} (relay.transfers) and a tag from 0 to 2**64 - 1; install the"
                " same railrelay version for client and daemon",
            )
        client.notes[message.transfer] = message
        return protocol.Done(message.id)

    async def _abort(self, client: Client, message: protocol.Abort) -> Reply:
        ctx, timeout_s = self._ctx, _timeout(message.timeout_s)
        deadline = time.monotonic() + timeout_s
        if not 0 < message.tag < 1 << 64:
            raise RelayError(ErrorCode.BAD_ARGUMENT, f"tag {message.tag}: expected 1 to 2**64 - 1")
        client.abort(message.tag)  # first: sessions that open a region from now on learn of it
        refused = ctx.commands.to_all(lambda cookie: ctx.plane.add_tombstone(client.row, message.tag, cookie))
        done, _ = await asyncio.wait([refused], timeout=timeout_s)
        if not done:
            return protocol.Aborted(
                message.id, False, 0, f"this process has not emptied its bounce memory within {timeout_s:g} s"
            )
        faults.point("daemon.abort.refusing")
        remaining = max(deadline - time.monotonic(), 0.0)
        settled, transfers, text = await self._sessions.abort(client, message.tag, remaining)
        return protocol.Aborted(message.id, settled, transfers, text)

    def _cancel(self, client: Client, message: protocol.Cancel) -> Reply:
        self._ctx.plane.cancel_transfer(client.row, message.transfer, message.generation, Result.CANCELLED)
        return protocol.Done(message.id)


def _timeout(timeout_s: float) -> float:
    if not timeout_s >= 0:
        raise RelayError(ErrorCode.BAD_ARGUMENT, f"timeout of {timeout_s} s; expected 0 or more")
    return min(timeout_s, LONGEST_WAIT_S)


def _check_file(fd: int, offset: int, nbytes: int) -> None:
    try:
        # First, since it waits for nobody. Only shared memory knows seals. A file of a slow file system would hold up
        # this thread in fstat(), and the rails in a page fault.
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise RelayError(
            ErrorCode.NOT_SUPPORTED, "the descriptor of a shared region must be a memfd or shared memory object"
        ) from None
    facts = os.fstat(fd)
    if offset < 0 or offset + nbytes > facts.st_size:
        raise RelayError(
            ErrorCode.OUT_OF_BOUNDS,
            f"{nbytes} bytes at offset {offset} of a file of {facts.st_size} bytes cannot be a region",
        )


def _check_handle(message: protocol.Register) -> None:
    """Of memory that the daemon cannot map."""

    def demand(good: bool, what: str) -> None:
        if not good:
            raise RelayError(ErrorCode.BAD_ARGUMENT, f"Register: {what}")

    demand(message.memory in ("host", "device"), f"memory {message.memory!r}: expected host or device")
    kinds = ("", "vmm", "ipc") if message.memory == "device" else ("",)
    demand(message.handle in kinds, f"handle {message.handle!r} of {message.memory} memory")
    if message.handle in ("vmm", "ipc"):
        demand(message.bytes <= LARGEST_DEVICE_REGION, f"{message.bytes} bytes of GPU memory in one region")
        inside = message.offset >= 0 and message.offset + message.bytes <= message.handle_bytes
        demand(inside, f"{message.bytes} bytes at {message.offset} of an allocation of {message.handle_bytes}")
    demand(len(message.ipc) == (IPC_BYTES if message.handle == "ipc" else 0), f"handle of {len(message.ipc)} bytes")


def _check_region(peer: Peer, opened: protocol.PeerRegion) -> None:
    """What the peer says of its region must fit the tables here."""
    numbers = (opened.handle, opened.owner, opened.window_bytes, opened.window_runs)
    if not (
        0 <= opened.rail < len(peer.rails)
        and 0 < opened.bytes < 1 << 63
        and 0 <= opened.address < 1 << 64
        and all(0 <= number < (1 << 32) - 1 for number in numbers)
        and opened.owner < MAX_CLIENTS
        and 0 <= opened.owner_serial < 1 << 63
        and 0 <= opened.iova < (1 << 64) - opened.bytes
        and len(opened.rkeys) in (0, len(peer.rails))
        and all(0 <= key < 1 << 32 for key in opened.rkeys)
        and len(opened.aborted) % TAG_BYTES == 0
        and len(opened.aborted) <= KEPT_TAGS * TAG_BYTES
    ):
        raise RelayError(ErrorCode.PROTOCOL, f"peer {peer.session} describes a region that cannot be: {opened}")
