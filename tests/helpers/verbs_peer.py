"""The other end of RC queue pairs, made with pyverbs: what railrelay sends and receives is checked by code that is not
railrelay's."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import mmap
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, TypeVar

from helpers.verbs_rails import RAILS

try:
    import pyverbs.libibverbs_enums as enums
except ImportError:  # before 55
    import pyverbs.enums as enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, WC
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QPAttr, QPCap, QPEx, QPInitAttrEx
from pyverbs.wr import SGE, RecvWR

PORT: Final = 1
POLL_S: Final = 60.0
_ACCESS: Final = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
_OPERATIONS: Final = (
    enums.IBV_QP_EX_WITH_RDMA_WRITE | enums.IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | enums.IBV_QP_EX_WITH_SEND
)
_STATUS: Final = {
    getattr(enums, name): name.removeprefix("IBV_WC_")
    for name in dir(enums)
    if name.startswith("IBV_WC_") and name.endswith(("SUCCESS", "ERR"))
}
_STATE: Final = {
    getattr(enums, name): name.removeprefix("IBV_QPS_") for name in dir(enums) if name.startswith("IBV_QPS_")
}
_PORT_STATE: Final = {
    getattr(enums, name): name.removeprefix("IBV_PORT_")
    for name in ("IBV_PORT_DOWN", "IBV_PORT_INIT", "IBV_PORT_ARMED", "IBV_PORT_ACTIVE")
}
_QUEUE: Final = 512
_RECEIVES: Final = 64
_COMPLETIONS: Final = 4096
_MAX_READS: Final = 16
_RNR_TIMER: Final = 12  # 0.64 ms
_RNR_FOR_EVER: Final = 7
_POLL_PAUSE_S: Final = 0.001

T = TypeVar("T", bound=Any)


@dataclass(frozen=True)
class Address:
    """Of a queue pair."""

    number: int
    gid: str
    psn: int


@dataclass(frozen=True)
class Write:
    """From ``offset`` of own memory to a remote address; with ``imm`` it takes one of the peer's receives."""

    offset: int
    nbytes: int
    remote: int
    rkey: int
    imm: int | None = None
    signaled: bool = True


@dataclass(frozen=True)
class Completion:
    id: int
    status: str  # "SUCCESS", "RETRY_EXC_ERR", ...
    received: bool
    nbytes: int
    imm: int | None
    number: int  # of the queue pair


class Peer:
    """A device with a protection domain and one completion queue. Closes what was made with it."""

    def __init__(self, device: str, address: str | None = None) -> None:
        """``address``: of its GID; by default that of the rail."""
        self.device = device
        self._stack = contextlib.ExitStack()
        self.context = self._owned(Context(name=device))
        self.gid_index, self.gid = gid_of(self.context, address or RAILS[device])
        self.domain = self._owned(PD(self.context))
        self.queue = self._owned(CQ(self.context, _COMPLETIONS))
        self.unused = self._owned(MR(self.domain, _RECEIVES, _ACCESS))  # pyverbs 44 makes no receive without memory

    def memory(self, nbytes: int, descriptor: int | None = None) -> Memory:
        """Shared memory, registered: a new memfd, or one that exists."""
        return self._stack.enter_context(contextlib.closing(Memory(self, nbytes, descriptor)))

    def queue_pair(self, psn: int = 0x1234, receives: int = _RECEIVES) -> QueuePair:
        return self._stack.enter_context(contextlib.closing(QueuePair(self, psn, receives)))

    def port_state(self) -> str:
        """ACTIVE, DOWN, ..."""
        return _PORT_STATE[self.context.query_port(PORT).state]

    def poll(self, count: int = 1, limit_s: float = POLL_S) -> list[Completion]:
        """The next completions; fewer than ``count`` if there are no more within the limit."""
        found: list[Completion] = []
        deadline = time.monotonic() + limit_s
        while len(found) < count:
            taken, entries = self.queue.poll(count - len(found))
            found += [_completion(entry) for entry in entries[:taken]]
            if taken == 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_PAUSE_S)
        return found

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _owned(self, thing: T) -> T:
        self._stack.callback(thing.close)
        return thing


class Memory:
    def __init__(self, peer: Peer, nbytes: int, descriptor: int | None) -> None:
        if descriptor is None:
            self.descriptor = os.memfd_create("verbs-peer")
            os.ftruncate(self.descriptor, nbytes)
        else:
            self.descriptor = os.dup(descriptor)
        self.bytes = mmap.mmap(self.descriptor, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.region = MR(peer.domain, nbytes, _ACCESS, address=self.address)
        self.lkey: int = self.region.lkey
        self.rkey: int = self.region.rkey

    def close(self) -> None:
        if not self.bytes.closed:
            self.region.close()
            self.bytes.close()
            os.close(self.descriptor)


class QueuePair:
    def __init__(self, peer: Peer, psn: int, receives: int) -> None:
        self.peer = peer
        self.psn = psn
        self.pair = QPEx(
            peer.context,
            QPInitAttrEx(
                qp_type=enums.IBV_QPT_RC,
                scq=peer.queue,
                rcq=peer.queue,
                cap=QPCap(max_send_wr=_QUEUE, max_recv_wr=receives, max_send_sge=1, max_recv_sge=1),
                pd=peer.domain,
                sq_sig_all=0,
                comp_mask=enums.IBV_QP_INIT_ATTR_PD | enums.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                send_ops_flags=_OPERATIONS,
            ),
        )

    @property
    def address(self) -> Address:
        return Address(self.pair.qp_num, self.peer.gid, self.psn)

    def connect(self, remote: Address, timeout: int = 17, retries: int = 6) -> None:
        """``timeout``: of one attempt, 4.096 us x 2^timeout. With 7 retries soft-RoCE tries for ever."""
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = _ACCESS
        self.pair.to_init(attributes)
        attributes.path_mtu = self.peer.context.query_port(PORT).active_mtu
        attributes.dest_qp_num, attributes.rq_psn = remote.number, remote.psn
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = _MAX_READS, _RNR_TIMER
        route = GlobalRoute(dgid=GID(remote.gid), sgid_index=self.peer.gid_index, hop_limit=64)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=PORT)
        self.pair.to_rtr(attributes)
        attributes.timeout, attributes.retry_cnt, attributes.rnr_retry = timeout, retries, _RNR_FOR_EVER
        attributes.sq_psn, attributes.max_rd_atomic = self.psn, _MAX_READS
        self.pair.to_rts(attributes)

    def post(self, memory: Memory, writes: Sequence[Write], first_id: int = 0) -> None:
        """All of them with one doorbell; they complete as ``first_id`` and on."""
        pieces = [SGE(memory.address + write.offset, write.nbytes, memory.lkey) for write in writes]
        self.pair.wr_start()
        for number, (write, piece) in enumerate(zip(writes, pieces, strict=True), first_id):
            self.pair.wr_id = number
            self.pair.wr_flags = enums.IBV_SEND_SIGNALED if write.signaled else 0
            if write.imm is None:
                self.pair.wr_rdma_write(write.rkey, write.remote)
            else:
                self.pair.wr_rdma_write_imm(write.rkey, write.remote, write.imm)
            self.pair.wr_set_sge_list(1 if write.nbytes else 0, [piece] if write.nbytes else [])
        self.pair.wr_complete()
        for piece in pieces:  # it does not free itself
            piece.close()

    def send(self, memory: Memory, offset: int, nbytes: int, number: int = 0) -> None:
        """A message out of own memory, into the peer's next receive."""
        piece = SGE(memory.address + offset, nbytes, memory.lkey)
        self.pair.wr_start()
        self.pair.wr_id, self.pair.wr_flags = number, enums.IBV_SEND_SIGNALED
        self.pair.wr_send()
        self.pair.wr_set_sge_list(1, [piece])
        self.pair.wr_complete()
        piece.close()

    def receive(self, count: int = 1, first_id: int = 0, into: Memory | None = None, nbytes: int = 0) -> None:
        """Receives for writes with imm, or for messages of ``nbytes`` too: number n of them at n x nbytes."""
        for number in range(first_id, first_id + count):
            if into is None:
                piece = SGE(self.peer.unused.buf, _RECEIVES, self.peer.unused.lkey)
            else:
                piece = SGE(into.address + number * nbytes, nbytes, into.lkey)
            request = RecvWR(wr_id=number, num_sge=1, sg=[piece])
            self.pair.post_recv(request)
            request.close()
            piece.close()

    def state(self) -> str:
        """RTS, ERR, ..."""
        return _STATE[self.pair.query(enums.IBV_QP_STATE)[0].qp_state]

    def fail(self) -> None:
        """To ERR."""
        self.pair.modify(QPAttr(qp_state=enums.IBV_QPS_ERR), enums.IBV_QP_STATE)

    def close(self) -> None:
        self.pair.close()


def gid_of(context: Context, address: str) -> tuple[int, str]:
    """(index, GID) of RoCE v2 with that IPv4 address."""
    entries = context.query_gid_table(context.query_port(PORT).gid_tbl_len)
    for entry in entries:
        mapped = ipaddress.IPv6Address(entry.gid_str()).ipv4_mapped
        if entry.gid_type == enums.IBV_GID_TYPE_ROCE_V2 and str(mapped) == address:
            return entry.gid_index, entry.gid_str()
    raise LookupError(f"{context.name}: no RoCE v2 GID with {address} among {[entry.gid_str() for entry in entries]}")


def connected(one: QueuePair, other: QueuePair, timeout: int = 17, retries: int = 6) -> None:
    one.connect(other.address, timeout, retries)
    other.connect(one.address, timeout, retries)


def _completion(entry: WC) -> Completion:
    imm = socket.ntohl(entry.imm_data) if entry.wc_flags & enums.IBV_WC_WITH_IMM else None
    received = bool(entry.opcode & enums.IBV_WC_RECV)
    return Completion(entry.wr_id, _STATUS[entry.status], received, entry.byte_len, imm, entry.qp_num)
