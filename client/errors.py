"""Error codes, the results of transfers, and the exceptions of the library. The daemon uses the same codes."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ErrorCode(StrEnum):
    """What went wrong, by name. Append only: the position is the number in the daemon's error log."""

    INTERNAL = "internal"
    # results of transfers, the names of Result
    CANCELLED = "cancelled"
    ABORTED = "aborted"
    TIMED_OUT = "timed_out"
    UNSETTLED = "unsettled"
    PEER_LOST = "peer_lost"
    REGION_GONE = "region_gone"
    BAD_REGION = "bad_region"
    OUT_OF_BOUNDS = "out_of_bounds"
    PROTOCOL = "protocol"
    SEGMENT_TRUNCATED = "segment_truncated"
    DAEMON_GONE = "daemon_gone"
    CLIENT_GONE = "client_gone"
    RAIL_DOWN = "rail_down"
    # attaching
    NO_DAEMON = "no_daemon"
    VERSION = "version"
    ABI = "abi"
    DENIED = "denied"
    BAD_RANK = "bad_rank"
    RANK_TAKEN = "rank_taken"
    DRAINING = "draining"
    # resources and arguments
    LIMIT = "limit"
    NO_MEMORY = "no_memory"
    BUSY = "busy"
    BAD_ARGUMENT = "bad_argument"
    BAD_ADDRESS = "bad_address"
    BAD_LENGTH = "bad_length"
    OVERLAP = "overlap"
    BAD_RAIL = "bad_rail"
    NOT_SUPPORTED = "not_supported"
    # peers
    BAD_SESSION = "bad_session"
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_REFUSED = "peer_refused"
    PEER_TIMEOUT = "peer_timeout"
    BAD_CAPABILITY = "bad_capability"
    RAIL_MISMATCH = "rail_mismatch"
    CONNECTION_LOST = "connection_lost"
    VIOLATION = "violation"
    # this process
    CLOSED = "closed"
    FORKED = "forked"
    WAIT_TIMEOUT = "wait_timeout"
    NO_LANE = "no_lane"
    GPU_ERROR = "gpu_error"  # also the name of a Result
    UNAUTHENTICATED = "unauthenticated"  # of peers

    @property
    def number(self) -> int:
        return _CODES.index(self)

    @classmethod
    def of(cls, number: int) -> ErrorCode:
        """The code with this number; INTERNAL for one that a newer daemon wrote."""
        return _CODES[number] if 0 <= number < len(_CODES) else cls.INTERNAL


_CODES = tuple(ErrorCode)


class Result(IntEnum):
    """How a transfer ended: enum rr_result of abi.h without the prefix."""

    OK = 0
    CANCELLED = 1
    ABORTED = 2
    TIMED_OUT = 3
    UNSETTLED = 4
    PEER_LOST = 5
    REGION_GONE = 6
    BAD_REGION = 7
    OUT_OF_BOUNDS = 8
    PROTOCOL = 9
    SEGMENT_TRUNCATED = 10
    DAEMON_GONE = 11
    CLIENT_GONE = 12
    RAIL_DOWN = 13
    GPU_ERROR = 14

    @classmethod
    def _missing_(cls, _: object) -> Result:
        return cls.PROTOCOL  # a newer daemon of the same major version may know more


RESULT_TEXT: dict[Result, str] = {
    Result.OK: "placed at the destination",
    Result.CANCELLED: "cancelled by its owner",
    Result.ABORTED: "aborted by the decode engine",
    Result.TIMED_OUT: "timed out; nothing of it can land any more",
    Result.UNSETTLED: "ended, but bytes of it may still land; do not reuse its pages before it settles",
    Result.PEER_LOST: "the peer's daemon is gone or restarted; open the peer and its regions again",
    Result.REGION_GONE: "the destination region was unregistered or its owner exited; ask for a new offer",
    Result.BAD_REGION: "a region that this client has not opened",
    Result.OUT_OF_BOUNDS: "an offset or length outside its region",
    Result.PROTOCOL: "the daemon found words in shared memory that no correct client writes; report this",
    Result.SEGMENT_TRUNCATED: "memory behind the client's mapping disappeared",
    Result.DAEMON_GONE: "the local daemon exited; once the client is attached again, open the offers anew and send",
    Result.CLIENT_GONE: "the owning client exited",
    Result.RAIL_DOWN: "no connection could be made on the rail; see `railrelay errors` on both nodes",
    Result.GPU_ERROR: "a CUDA call of this client failed; find out why, then connect a new Client",
}

# What a caller can do about it, where the code alone says so.
NEXT_STEP: dict[ErrorCode, str] = {
    ErrorCode.NO_DAEMON: "start railrelayd, or name its socket",
    ErrorCode.VERSION: "install the same railrelay version for daemon and engine",
    ErrorCode.ABI: "install the same railrelay version for daemon and engine",
    ErrorCode.RANK_TAKEN: "end the other client of this rank, or raise clients_per_rank",
    ErrorCode.DAEMON_GONE: (
        "start railrelayd again, which the client attaches to by itself (after another end connect a new Client), and"
        " open the offers again"
    ),
    ErrorCode.PEER_UNREACHABLE: "check that railrelayd runs there and that the control port is reachable",
    ErrorCode.BAD_CAPABILITY: "ask the peer's engine for a new offer",
    ErrorCode.FORKED: "connect a Client of its own in the child",
    ErrorCode.BUSY: "wait for its transfers or cancel them",
}


MAX_TEXT = 4096  # characters


class RelayError(Exception):
    """Root of all errors of the library. ``code`` says what; the text names the thing, the value and the next step."""

    def __init__(self, code: ErrorCode, text: str) -> None:
        if len(text) > MAX_TEXT:  # some of it may come from a peer
            text = f"{text[:MAX_TEXT]}..."
        super().__init__(code, text)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        step = NEXT_STEP.get(self.code)
        return f"{self.text}; {step}" if step else self.text


class ConnectError(RelayError):
    """No session with the local daemon: none runs, it refused, or versions differ. Nothing was started; correct what
    the text names and connect again."""


class PeerError(RelayError):
    """The peer cannot be reached, refused, or is gone. After PEER_LOST open the peer and its regions again."""


class RegionError(RelayError):
    """Memory could not be registered, opened or removed; the text names the limit that was hit."""


class Busy(RegionError):
    """Slices in flight still read the region. Wait for the transfers or cancel them, then unregister again."""


class ArgumentError(RelayError, ValueError):
    """A submission that cannot work: unknown address, bounds, zero length, overlap. Nothing of it was started."""


class WaitTimeout(RelayError, TimeoutError):
    """What was waited for has not happened yet. The transfer goes on: wait again, or cancel it."""


class DaemonGone(RelayError):
    """The local daemon exited or ended the session, or this client did after a CUDA call failed (GPU_ERROR). After an
    exit the client attaches by itself to the next daemon: Client.wait_attached(), then open the offers again."""


class TransferError(RelayError):
    """The transfer failed and is settled: its pages may be reused. ``result`` says how, ``bytes`` how many were
    placed before; which ones is not known, so send all of it again."""

    def __init__(self, result: Result, nbytes: int, text: str) -> None:
        super().__init__(ErrorCode[result.name], text)
        self.args = (result, nbytes, text)
        self.result = result
        self.bytes = nbytes


class Unsettled(TransferError):
    """The transfer ended, but bytes of it may still land. Do not reuse its pages on either side:
    ``Transfer.wait_settled()`` returns when they may be, as does the decode engine's ``receiver.abort(tag)``."""


_CLASSES: dict[ErrorCode, type[RelayError]] = {
    ErrorCode.DAEMON_GONE: DaemonGone,
    ErrorCode.WAIT_TIMEOUT: WaitTimeout,
    ErrorCode.BUSY: Busy,
    ErrorCode.NO_MEMORY: RegionError,
    ErrorCode.LIMIT: RegionError,
    ErrorCode.REGION_GONE: RegionError,
    ErrorCode.BAD_CAPABILITY: RegionError,
    ErrorCode.NO_DAEMON: ConnectError,
    ErrorCode.VERSION: ConnectError,
    ErrorCode.ABI: ConnectError,
    ErrorCode.DENIED: ConnectError,
    ErrorCode.BAD_RANK: ConnectError,
    ErrorCode.RANK_TAKEN: ConnectError,
    ErrorCode.DRAINING: ConnectError,
    ErrorCode.PEER_LOST: PeerError,
    ErrorCode.BAD_SESSION: PeerError,
    ErrorCode.PEER_UNREACHABLE: PeerError,
    ErrorCode.PEER_REFUSED: PeerError,
    ErrorCode.PEER_TIMEOUT: PeerError,
    ErrorCode.RAIL_MISMATCH: PeerError,
    ErrorCode.UNAUTHENTICATED: PeerError,
    ErrorCode.BAD_ARGUMENT: ArgumentError,
    ErrorCode.BAD_ADDRESS: ArgumentError,
    ErrorCode.BAD_LENGTH: ArgumentError,
    ErrorCode.BAD_REGION: ArgumentError,
    ErrorCode.OUT_OF_BOUNDS: ArgumentError,
    ErrorCode.OVERLAP: ArgumentError,
    ErrorCode.BAD_RAIL: ArgumentError,
}


def error(code: ErrorCode | str, text: str) -> RelayError:
    """The exception for a code that came from the daemon or from the C part."""
    try:
        code = ErrorCode(code)
    except ValueError:
        return RelayError(ErrorCode.INTERNAL, f"{code}: {text}")
    return _CLASSES.get(code, RelayError)(code, text)
