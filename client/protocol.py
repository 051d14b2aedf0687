"""Messages of the two control planes, and their framing. The daemon imports this file; nothing here knows the daemon.

Client plane: a Unix SOCK_SEQPACKET socket, one msgpack message a packet, file descriptors beside it (SCM_RIGHTS).
Peer plane: TCP or TLS, each message a 4-byte little-endian length and msgpack; between daemons that have a secret, 16
bytes of seal before the msgpack (authentication.py).
A request carries an ``id`` that its reply repeats; on the peer plane both ends may ask. Events carry none.
"""

from __future__ import annotations

import socket
import struct
from array import array

import msgspec

PROTOCOL_VERSION = 3
CLIENT_MESSAGE_BYTES = 64 * 1024
PEER_MESSAGE_BYTES = 1024 * 1024
STRANGER_MESSAGE_BYTES = 16 * 1024  # before a control connection has authenticated
NONCE_BYTES = 32
NOTE_BYTES = 16 * 1024
Handle = bytes  # where a field named bytes hides the type


class Message(msgspec.Struct, tag_field="t", forbid_unknown_fields=True, frozen=True):
    """Base of all messages; the tag is the class name."""


# ---- client plane: requests ----


class Attach(Message, frozen=True, tag="Attach"):
    """First message of a client. Answered by Attached with descriptors
    [client segment, node segment, kick eventfd of rail 0, 1, ...]. device: UUID of the GPU of this rank, if the engine
    has said which it is."""

    id: int
    protocol: int
    abi: int
    rank: int
    name: str
    device: str = ""


class LeaseLane(Message, frozen=True, tag="LeaseLane"):
    """Lease of lane (rail, own rank). Answered by Leased with [relay memory]: shared memory, or what CUDA exported."""

    id: int
    rail: int


class Register(Message, frozen=True, tag="Register"):
    """Offers ``bytes`` at ``address`` (client's own numbering) as source and destination. With a descriptor the daemon
    maps it from ``offset`` (shared); without one the memory is private. Private memory that will be a destination
    (``receive``) needs bounce buffers: the reply then carries one descriptor of bounce memory a rail, unless the client
    has them already. Answered by Registered.

    memory "device": of the GPU ``device`` (UUID). handle says how other processes reach the allocation that it lies in
    at ``offset``, ``handle_bytes`` long: "vmm" (a descriptor that CUDA exported), "ipc" (the 64 bytes ``ipc``) or "".
    With ``dmabuf`` a dma-buf descriptor of its pages follows, from ``dmabuf_offset`` bytes before it on. Descriptors
    in the order [vmm, dma-buf], as far as there are."""

    id: int
    address: int
    bytes: int
    shared: bool
    offset: int
    rail: int
    receive: bool
    memory: str = "host"
    device: str = ""
    handle: str = ""
    handle_bytes: int = 0
    ipc: Handle = b""
    dmabuf: bool = False
    dmabuf_offset: int = 0


class Unregister(Message, frozen=True, tag="Unregister"):
    """Answered by Done, or by Failed ``busy`` while slices that read the region are in flight."""

    id: int
    region: int


class OfferRegion(Message, frozen=True, tag="OfferRegion"):
    """Asks for the capability of an own region by which the daemon of ``session`` alone may open it. Answered by
    Offered."""

    id: int
    region: int
    session: str


class ConnectPeer(Message, frozen=True, tag="ConnectPeer"):
    """Session of a peer daemon, ``host:port`` or ``[v6]:port``. Answered by PeerConnected."""

    id: int
    session: str
    timeout_s: float


class OpenRegion(Message, frozen=True, tag="OpenRegion"):
    """Exchanges the capability of an offered region for an index. Answered by RegionOpened; with ``local`` the reply
    for a region of the same daemon carries what the client needs to write there itself, and the client promises LetGo.
    """

    id: int
    peer: int
    capability: bytes
    local: bool = False


class CloseRegion(Message, frozen=True, tag="CloseRegion"):
    id: int
    remote: int


class LetGo(Message, frozen=True, tag="LetGo"):
    """The client has unmapped these remote regions (none: all), and writes there no more: the answer to RegionGone for
    a region that it may write itself. CloseRegion says the same of one. Answered by Done."""

    id: int
    remotes: list[int]


class Note(Message, frozen=True, tag="Note"):
    """Notification to deliver once transfer ``transfer`` of ``generation`` is placed. Sent and answered before the
    transfer is published, so that it is known when the last slice completes."""

    id: int
    transfer: int
    generation: int
    remote: int
    tag: int
    payload: bytes


class Abort(Message, frozen=True, tag="Abort"):
    """Decode side: no byte of transfers with ``tag`` into this client's regions may land after the reply. Answered by
    Aborted."""

    id: int
    tag: int
    timeout_s: float


class Cancel(Message, frozen=True, tag="Cancel"):
    """Ends a transfer early. Answered by Done at once; the end shows in the transfer table."""

    id: int
    transfer: int
    generation: int


class Fence(Message, frozen=True, tag="Fence"):
    """Sending side: asks for settlement of an unsettled transfer. Answered by Done or Failed ``unsettled``."""

    id: int
    transfer: int
    generation: int
    timeout_s: float


# ---- client plane: replies and events ----


class Attached(Message, frozen=True, tag="Attached"):
    """bytes_max: of all transfers that the client has in flight, 0: no limit; callers wait for it."""

    id: int
    client: int
    serial: int
    instance: int
    session: str
    own_rail: int
    segment_bytes: int
    node_bytes: int
    lane_bytes: int
    bounce_bytes: int
    direct_slice_bytes: int
    express_bytes: int
    bytes_max: int


class Leased(Message, frozen=True, tag="Leased"):
    """memory "device": on the GPU ``device`` (UUID); the descriptor is what CUDA exported."""

    id: int
    rail: int
    generation: int
    bytes: int
    memory: str = "host"
    device: str = ""


class Registered(Message, frozen=True, tag="Registered"):
    """direct: the NIC of the rail reads and writes the memory itself."""

    id: int
    region: int
    rail: int
    capability: bytes
    bounces: bool
    direct: bool


class Offered(Message, frozen=True, tag="Offered"):
    id: int
    capability: bytes


class PeerConnected(Message, frozen=True, tag="PeerConnected"):
    """local_rails[j] is the local rail that relays to the peer's rail j: the one of the same identity, or else j modulo
    the number of local rails."""

    id: int
    peer: int
    instance: int
    local_rails: list[int]


class RegionOpened(Message, frozen=True, tag="RegionOpened"):
    """owner: number of the owning client at the peer. window_bytes: 0, or the most bytes of one slice where the owner
    must copy them out of bounce memory itself; such slices wait for a grant, and have at most window_runs runs.
    export: what the peer calls this registration of the memory, whichever of its offers was opened.

    handle: "" or, if the client may write there itself, what names the memory: "shm" and "vmm" are a descriptor beside
    the message, "ipc" the bytes of a CUDA IPC handle; the region is at ``offset`` of it. The rest as in Register."""

    id: int
    remote: int
    address: int
    bytes: int
    rail: int
    owner: int
    window_bytes: int
    window_runs: int
    export: int
    memory: str = "host"
    device: str = ""
    handle: str = ""
    handle_bytes: int = 0
    offset: int = 0
    ipc: Handle = b""


class Aborted(Message, frozen=True, tag="Aborted"):
    """settled is false if a sending node could neither confirm nor be fenced; ``text`` says which."""

    id: int
    settled: bool
    transfers: int
    text: str


class Done(Message, frozen=True, tag="Done"):
    id: int


class Failed(Message, frozen=True, tag="Failed"):
    """code: a name of errors.ErrorCode. With id 0 it answers nothing: the daemon is about to close this session and
    says why."""

    id: int
    code: str
    text: str


class Notification(Message, frozen=True, tag="Notification"):
    """Event: data of a transfer is placed on all rails."""

    tag: int
    payload: bytes
    session: str


class PeerDown(Message, frozen=True, tag="PeerDown"):
    """Event: the peer's daemon restarted or is gone; its remote regions are no longer valid."""

    peer: int
    session: str
    text: str


class RegionGone(Message, frozen=True, tag="RegionGone"):
    """Event: the region was unregistered or its owner exited. The index stays taken until the client sends
    CloseRegion. A client that has it mapped answers with LetGo at once, or its session is ended."""

    remote: int


class Draining(Message, frozen=True, tag="Draining"):
    """Event: the daemon is going down."""

    text: str


ClientRequest = (
    Attach
    | LeaseLane
    | Register
    | Unregister
    | OfferRegion
    | ConnectPeer
    | OpenRegion
    | CloseRegion
    | LetGo
    | Note
    | Abort
    | Cancel
    | Fence
)
ClientReply = (
    Attached
    | Leased
    | Registered
    | Offered
    | PeerConnected
    | RegionOpened
    | Aborted
    | Done
    | Failed
    | Notification
    | PeerDown
    | RegionGone
    | Draining
)


# ---- peer plane ----


class RailFacts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rail as its node describes it: identity is what both ends compare, address and port where it accepts (port 0: a
    verbs or emulated rail). up: of the port of a verbs rail, as far as is known; changes are told by RailState."""

    identity: str
    nic: str
    address: str
    port: int
    up: bool = True


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One end of a queue pair. through: the rail of its own node whose device has it, which is another one while that
    has taken over. mtu in bytes."""

    through: int
    gid: bytes
    lid: int
    qpn: int
    psn: int
    mtu: int


class Opening(Message, frozen=True, tag="Opening"):
    """First message of the connecting daemon. ``instance`` of the sender, 0 of one that only looks; nonce: 32 random
    bytes. Answered by Challenge or Refused. These three keep their form in all versions."""

    id: int
    protocol: int
    instance: int
    nonce: bytes


class Challenge(Message, frozen=True, tag="Challenge"):
    """``instance`` and nonce of the accepting daemon. What follows is proved with both nonces."""

    id: int
    protocol: int
    instance: int
    nonce: bytes


class Hello(Message, frozen=True, tag="Hello"):
    """Second message of the connecting daemon. ``expect``: the instance it knew at this address before, 0 for none.
    proofs: one for each secret that the sender has; see authentication.py. Answered by Welcome or Refused."""

    id: int
    session: str
    expect: int
    rails: list[RailFacts]
    proofs: list[bytes]


class Welcome(Message, frozen=True, tag="Welcome"):
    """proof: by the secret that both have, b"" without one. From here on, both ways, each packet begins with its seal
    if there is one."""

    id: int
    session_index: int
    rails: list[RailFacts]
    proof: bytes


class Refused(Message, frozen=True, tag="Refused"):
    """proof: of a daemon that refuses who has authenticated, by its secret."""

    id: int
    code: str
    text: str
    proof: bytes = b""


class PeerOpenRegion(Message, frozen=True, tag="PeerOpenRegion"):
    id: int
    capability: bytes


class PeerRegion(Message, frozen=True, tag="PeerRegion"):
    """rkeys: of the region on the device of each verbs rail, 0 for others, where it begins at ``iova``; none of memory
    that the daemon cannot write. owner_serial: another client under the same number ``owner`` has another. aborted:
    tags that the owner has aborted before this session had a region of it, 8 bytes each, little-endian."""

    id: int
    handle: int
    address: int
    bytes: int
    rail: int
    owner: int
    window_bytes: int
    window_runs: int
    owner_serial: int = 0
    iova: int = 0
    rkeys: tuple[int, ...] = ()
    aborted: Handle = b""


class PeerCloseRegion(Message, frozen=True, tag="PeerCloseRegion"):
    id: int
    handle: int


class RailConnect(Message, frozen=True, tag="RailConnect"):
    """Asks for a single-use token for one connection from ``local_rail`` to ``remote_rail``; between verbs rails, for
    the other end of ``endpoint``, on the device of the receiver's rail ``through``. One with ``probe`` carries nothing:
    it is to show that the two devices reach each other. Answered by RailToken."""

    id: int
    local_rail: int
    remote_rail: int
    express: bool
    epoch: int
    endpoint: Endpoint | None = None
    through: int = -1
    probe: bool = False


class RailToken(Message, frozen=True, tag="RailToken"):
    """The receiving end of a queue pair is ready when this is sent; it has no token. Between daemons with a secret the
    connection shows not the token but what authentication.shown_token() makes of it."""

    id: int
    connection: int
    token: bytes
    endpoint: Endpoint | None = None


class FenceRail(Message, frozen=True, tag="FenceRail"):
    """Closes connection ``connection`` at the receiver for good. Answered by RailFenced: frames up to ``placed`` have
    arrived whole; ``acks`` holds the latest results, 16 bytes each: sequence and result. Every frame that arrived is
    among them unless the sender has its reply already. The result of a frame that the owner of its private memory has
    still to copy is "unsettled"; asked again, the answer waits up to ``wait_s`` for news of such frames."""

    id: int
    connection: int
    wait_s: float = 0.0


class RailFenced(Message, frozen=True, tag="RailFenced"):
    """``placed``: the latest frame that has arrived. ``acks``: ACK of each whose sender may not know its result."""

    id: int
    placed: int
    acks: bytes


class PeerAbort(Message, frozen=True, tag="PeerAbort"):
    """Receiver to sender: end the transfers with ``tag`` whose regions are among ``handles``; answer when settled. To
    client ``owner`` (owner_serial as in PeerRegion) nothing with this tag may be sent any more."""

    id: int
    tag: int
    handles: list[int]
    owner: int
    owner_serial: int


class PeerAborted(Message, frozen=True, tag="PeerAborted"):
    id: int
    settled: bool
    transfers: int


class PeerNote(Message, frozen=True, tag="PeerNote"):
    """Deliver a notification to the owner of region ``handle``. Answered by PeerDone or Refused."""

    id: int
    handle: int
    tag: int
    payload: bytes


class PeerRegionGone(Message, frozen=True, tag="PeerRegionGone"):
    """Receiver to sender: the region was unregistered or its owner exited. Answered by PeerDone once nothing that was
    posted names it, and nothing will."""

    id: int
    handle: int


class RailLost(Message, frozen=True, tag="RailLost"):
    """Event, receiver to sender: the receiving end of connection ``connection`` is in error, or was fenced. A queue
    pair does not say so to a sender that has nothing to send."""

    connection: int


class RailState(Message, frozen=True, tag="RailState"):
    """Event, receiver to sender: the port of this verbs rail went up or down."""

    rail: int
    up: bool


class Look(Message, frozen=True, tag="Look"):
    """Instead of Hello: asks for the node's rails without a session, for `railrelay doctor --peer`. Answered by Looked
    or Refused."""

    id: int
    proofs: list[bytes]


class Looked(Message, frozen=True, tag="Looked"):
    """mtus: of the interface of each rail in bytes, 0 if that is not known. proof as in Welcome."""

    id: int
    rails: list[RailFacts]
    mtus: list[int]
    proof: bytes


class Ping(Message, frozen=True, tag="Ping"):
    id: int


class PeerDone(Message, frozen=True, tag="PeerDone"):
    id: int


PeerMessage = (
    Opening
    | Challenge
    | Hello
    | Welcome
    | Refused
    | PeerOpenRegion
    | PeerRegion
    | PeerCloseRegion
    | RailConnect
    | RailToken
    | FenceRail
    | RailFenced
    | PeerAbort
    | PeerAborted
    | PeerNote
    | PeerRegionGone
    | RailLost
    | RailState
    | Look
    | Looked
    | Ping
    | PeerDone
)

encode = msgspec.msgpack.Encoder().encode
client_request = msgspec.msgpack.Decoder(ClientRequest).decode
client_reply = msgspec.msgpack.Decoder(ClientReply).decode
peer_message = msgspec.msgpack.Decoder(PeerMessage).decode

# First bytes on a rail connection: magic, version, connection id, token.
RAIL_PREAMBLE = struct.Struct("<8sIIQ16s")
RAIL_MAGIC = b"RLAYRAIL"
RAIL_VERSION = 1
LENGTH_PREFIX = struct.Struct("<I")
ACK = struct.Struct("<QQ")  # sequence and result


def receive(unix: socket.socket, max_fds: int, flags: int = 0) -> tuple[bytes, list[int], bool]:
    """(packet, descriptors, whether something was cut off) from a client-plane socket; b"" at the end of the stream.
    The descriptors are close-on-exec and the caller's. (socket.recv_fds() drops the flags that this takes.)"""
    sizes = (CLIENT_MESSAGE_BYTES, socket.CMSG_SPACE(max_fds * 4), socket.MSG_CMSG_CLOEXEC | flags)
    try:
        packet, ancillary, cut, _ = unix.recvmsg(*sizes)
    except ConnectionResetError:  # the other end died with packets unread: said once, before what it sent until then
        packet, ancillary, cut, _ = unix.recvmsg(*sizes)
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    fds = [fd for level, kind, data in ancillary if (level, kind) == rights for fd in array("i", data)]
    return packet, fds, bool(cut & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def parse_session(session: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` -> (host, port). ValueError names the text and the form expected."""
    host, colon, port = session.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"session {session!r}: an IPv6 address needs brackets, [v6]:port")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"session {session!r}: expected host:port or [v6]:port with a port from 1 to 65535")
    try:
        host.encode("idna")
    except UnicodeError as failure:  # as the resolver would be told
        raise ValueError(f"session {session!r}: {host!r} is no host name ({failure})") from None
    if not host.isprintable():
        raise ValueError(f"session {session!r}: {host!r} is no host name (it has characters that cannot be printed)")
    return host, int(port)


def format_session(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
