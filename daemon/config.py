"""Configuration: a TOML file, checked completely before anything is opened. Every option has a default but the address
of a rail that is not RDMA; without a file there is one rail on 127.0.0.1."""

from __future__ import annotations

import errno
import grp
import ipaddress
import json
import os
import re
import stat
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from railrelay.client import paths
from railrelay.client.errors import ConnectError, RelayError
from railrelay.shm_layout import abi, faults

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB
CELL_BYTES: Final = abi.CONSTANTS["CELL_BYTES"]
MAX_RAILS: Final = abi.CONSTANTS["MAX_RAILS"]
MAX_CLIENTS: Final = 256
SOCKET_PATH_BYTES: Final = 107
DEVICE_NAME_BYTES: Final = 63
IDENTITY_BYTES: Final = abi.FIELDS["rail_state"]["name"].size - 1
MAX_SECRETS: Final = 2
NICS: Final = ("tcp", "verbs", "emulated")
FLUSHES: Final = ("auto", "always", "never")

EXAMPLE: Final = """\
# railrelayd configuration. What is commented out is the default.

[node]
# instance = "default"          # several daemons on one machine need different names
# socket = "/run/railrelay/default.sock"  # default: the first of /run/railrelay, $XDG_RUNTIME_DIR/railrelay and
#                               # /tmp/railrelay-<uid> that the daemon may write
# host = "127.0.0.1"            # where peers reach the control port; part of the session id
# port = 0                      # control port; 0: the kernel chooses
# rail_of_rank = []             # rail of each rank; empty: if all rails are RDMA the one nearest to GPU <rank> by PCIe,
#                               # else, or without GPUs, rank modulo rails
# fault = ""                    # for tests: a point of shm_layout/faults.h at which the daemon kills itself, "name" or
#                               # "name:passage"
# group = ""                    # users of this group may attach too, besides the daemon's own and root

[security]                      # who may connect from other nodes
# secret_files = []             # file with the secret that all nodes share, mode 0600 (`openssl rand -hex 32`); while
#                               # it is being replaced a second one. Read anew for each connection
# tls_certificate = ""          # PEM files: control connections by TLS. The certificate names node.host
# tls_key = ""
# tls_ca = ""                   # whose certificates peers may have
# allow_unauthenticated = false # true: without secret and TLS, listen on other addresses than loopback too

[relay]
# slots = 18                    # a lane
# slot_bytes = "8MiB"           # multiple of 64 KiB
# table_entries = 4096          # blocks a slot
# ring_slices = 128             # direct slices under way, a client and rail; power of two
# ring_tables = 32              # block tables of direct slices, a client and rail
# direct_slice_bytes = "4MiB"
# express_bytes = "1MiB"        # transfers up to this size go first
# bounce_slots = 4              # a client and rail, for private memory of receivers
# transfers = 1024              # a client, at a time

[limits]
# max_clients = 64
# clients_per_rank = 2
# max_peers = 64                # of all clients; of those that it alone uses a client gets two thirds
# max_exports = 4096            # regions opened by peers
# regions_per_client = 1024
# shared_bytes_per_client = 0   # of registered memory that the daemon maps. 0: twice the machine's memory
# lanes_per_client = 16         # each takes relay.slots x slot_bytes
# bytes_per_client = 0          # of transfers in flight, or one larger transfer alone; callers wait. 0: no limit
# offers_per_region = 4096      # to single peers
# remotes_per_client = 4096
# trace_records = 4096          # a rail: the latest slices, for `railrelay trace`; power of two

[timeouts]
# connect_s = 5                 # for a connection to a peer or one of its rails
# peer_s = 10                   # a peer's answer; silence of this length ends its control connection
# settle_s = 2                  # after its time-out, until a transfer is fenced
# fence_s = 3                   # more, until it is reported as unsettled
# drain_s = 10                  # for transfers in flight when the daemon is told to stop
# session_linger_s = 60         # a sending daemon that lost its control connection may resume
# predecessor_s = 5             # a restarted engine waits for the drain of its predecessor

[tcp]
# congestion = ""               # a name of net.ipv4.tcp_available_congestion_control; empty: the system's default
# notsent_lowat = "256KiB"
# user_timeout_s = 30           # data not acknowledged for this long ends a rail connection

[verbs]                         # rails with nic = "verbs"
# timeout = 17                  # a packet is repeated after 4.096 us x 2^timeout (17: 0.54 s)
# retry_count = 7               # repeats until a queue pair is lost; soft-RoCE (rxe) takes 7 for "for ever"
# rnr_retry = 7                 # the same for a receiver without a posted receive; 7: for ever
# min_rnr_timer = 12            # code of the pause that such a receiver asks for (12: 0.64 ms)
# traffic_class = 0             # of RoCE packets: DSCP x 4 + ECN bits; a DSCP of 26 is 104
# service_level = 0
# sq_depth = 1024               # work requests of a queue pair
# signal_every = 64             # of these one asks for a completion; so does the last of a slice
# flush = "auto"                # read back before an answer: "auto" (GPU memory only), "always" or "never"
# probe_s = 1                   # pause between probes of a rail that another one has taken over

[data]
# spin_us = -1                  # how long an idle rail thread spins; -1: 20, or 0 where cores are fewer than rails + 1

[[rail]]
address = "127.0.0.1"
# identity = "rail0"            # both daemons of a pair compare it; default rail<position>
# nic = "tcp"                   # or "verbs" (RDMA); "emulated", for measurements and tests only: a process copies
#                               # inside this node
# device = ""                   # verbs: RDMA device such as "mlx5_0"; default: the one with `address`, or the rail's
#                               # position
# port_number = 1               # verbs: port of the device
# gid_index = -1                # verbs: row of the port's GID table; -1: RoCE v2, routable, on the subnet of `address`
# rate_gbit = 400               # emulated: Gbit/s
# memory = "host"               # verbs, emulated: relay memory; "device": memory of the GPU that `gpu` names
# gpu = ""                      # memory = "device": UUID, "GPU-...", or number
# copies = "auto"               # emulated, memory = "device": "engines": the GPU's copy engines only, however slow;
#                               # "auto": a kernel for what they cannot carry at the rate
# cpu = -1                      # core that the rail's thread is pinned to; -1: none
# port = 0                      # tcp: 0: the kernel chooses
"""


class ConfigError(Exception):
    """The configuration cannot be used; the text names the option, the value and what is allowed."""


class Bytes(int):
    """A size in bytes; in the file a number, or text such as "8MiB" (KiB, MiB, GiB)."""

    @classmethod
    def parse(cls, value: object) -> Bytes:
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(value)
        match = re.fullmatch(r"(\d+)\s*(|B|KiB|MiB|GiB)", value) if isinstance(value, str) else None
        if match is None:
            raise ValueError('expected bytes, or text such as "64KiB", "8MiB", "1GiB"')
        return cls(int(match[1]) * {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB}[match[2]])


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Node(_Section, frozen=True):
    instance: str = "default"
    socket: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    rail_of_rank: tuple[int, ...] = ()
    fault: str = ""
    group: str = ""


class Security(_Section, frozen=True):
    secret_files: tuple[str, ...] = ()
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    allow_unauthenticated: bool = False

    @property
    def tls(self) -> bool:
        return bool(self.tls_ca)

    @property
    def authenticates(self) -> bool:
        return bool(self.secret_files) or self.tls

    @property
    def ways(self) -> str:
        """By which peers authenticate."""
        count = len(self.secret_files)
        secrets = [f"{count} secret{'s' if count > 1 else ''}"] if count else []
        return " and ".join(secrets + ["TLS"] * self.tls)


class Relay(_Section, frozen=True):
    slots: int = 18
    slot_bytes: Bytes = Bytes(8 * MIB)
    table_entries: int = 4096
    ring_slices: int = 128
    ring_tables: int = 32
    direct_slice_bytes: Bytes = Bytes(4 * MIB)
    express_bytes: Bytes = Bytes(MIB)
    bounce_slots: int = 4
    transfers: int = 1024

    @property
    def lane_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def bounce_bytes(self) -> int:
        return self.bounce_slots * self.slot_bytes

    @property
    def bounce_table_bytes(self) -> int:
        return self.bounce_slots * self.table_entries * abi.SIZES["run"]


class Limits(_Section, frozen=True):
    max_clients: int = 64
    clients_per_rank: int = 2
    max_peers: int = 64
    max_exports: int = 4096
    regions_per_client: int = 1024
    shared_bytes_per_client: Bytes = Bytes(0)
    lanes_per_client: int = MAX_RAILS
    bytes_per_client: Bytes = Bytes(0)
    offers_per_region: int = 4096
    remotes_per_client: int = 4096
    trace_records: int = 4096

    @property
    def shared_bytes(self) -> int:
        """shared_bytes_per_client, or its default: what is there may be registered anew before the old one ends, but no
        file of holes takes the daemon's address space."""
        return self.shared_bytes_per_client or 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class Timeouts(_Section, frozen=True):
    connect_s: float = 5
    peer_s: float = 10
    settle_s: float = 2
    fence_s: float = 3
    drain_s: float = 10
    session_linger_s: float = 60
    predecessor_s: float = 5


class Tcp(_Section, frozen=True):
    congestion: str = ""
    notsent_lowat: Bytes = Bytes(256 * KIB)
    user_timeout_s: float = 30


class Verbs(_Section, frozen=True):
    timeout: int = 17
    retry_count: int = 7
    rnr_retry: int = 7
    min_rnr_timer: int = 12
    traffic_class: int = 0
    service_level: int = 0
    sq_depth: int = 1024
    signal_every: int = 64
    flush: str = "auto"
    probe_s: float = 1


class Data(_Section, frozen=True):
    spin_us: int = -1


class Rail(_Section, frozen=True):
    """address: "" of a verbs rail whose address its GID says."""

    address: str = ""
    identity: str = ""
    nic: str = "tcp"
    device: str = ""
    port_number: int = 1
    gid_index: int = -1
    rate_gbit: float = 400
    memory: str = "host"
    gpu: str | int = ""
    copies: str = "auto"
    cpu: int = -1
    port: int = 0


class Config(_Section, frozen=True):
    node: Node = Node()
    security: Security = Security()
    relay: Relay = Relay()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tcp: Tcp = Tcp()
    verbs: Verbs = Verbs()
    data: Data = Data()
    rail: tuple[Rail, ...] = (Rail(address="127.0.0.1"),)

    @property
    def gid(self) -> int | None:
        """Of node.group."""
        return grp.getgrnam(self.node.group).gr_gid if self.node.group else None

    @property
    def spin_us(self) -> int:
        if self.data.spin_us >= 0:
            return self.data.spin_us
        return 20 if len(os.sched_getaffinity(0)) > len(self.rail) else 0

    def identity(self, rail: int) -> str:
        return self.rail[rail].identity or f"rail{rail}"

    def gpu_of(self, rail: int) -> str:
        """UUID of the GPU that the relay memory of a rail is on, by the driver's word; "" if it is host memory.
        ConfigError: the GPU is not to be had."""
        options = self.rail[rail]
        if options.memory != "device":
            return ""
        from railrelay.client import cuda  # only where GPUs are configured

        try:
            return cuda.uuid_of(cuda.ordinal_of(options.gpu))
        except RelayError as failure:
            raise ConfigError(f"rail[{rail}].gpu: {failure.text}") from None

    def rail_of(self, rank: int, nearest: Sequence[int] = ()) -> int | None:
        """``nearest``: rails of the node's GPUs by PCIe distance, the default of rail_of_rank where that is known. None
        for a rank that rail_of_rank does not name."""
        if not self.node.rail_of_rank:
            return nearest[rank % len(nearest)] if nearest else rank % len(self.rail)
        return self.node.rail_of_rank[rank] if rank < len(self.node.rail_of_rank) else None

    def socket_path(self) -> Path:
        """Where the control socket goes; makes a default directory. ConfigError."""
        if self.node.socket:
            return Path(self.node.socket)
        try:
            return paths.default_socket(self.node.instance, create=True)
        except (OSError, ConnectError) as failure:
            raise ConfigError(f"node.socket: no directory for the control socket ({failure}); name a path") from None


# Option -> smallest and largest value.
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "node.port": (0, 65535),
    "relay.slots": (2, abi.CONSTANTS["MAX_SLOTS"]),
    "relay.slot_bytes": (CELL_BYTES, GIB),
    "relay.table_entries": (1, 16384),
    "relay.ring_slices": (2, 1024),
    "relay.ring_tables": (1, 4096),
    "relay.direct_slice_bytes": (CELL_BYTES, GIB),
    "relay.express_bytes": (0, GIB),
    "relay.bounce_slots": (1, abi.CONSTANTS["MAX_SLOTS"]),
    "relay.transfers": (1, 1 << 20),
    "limits.max_clients": (1, MAX_CLIENTS),
    "limits.clients_per_rank": (1, MAX_CLIENTS),
    "limits.max_peers": (1, 1024),
    "limits.max_exports": (1, 1 << 20),
    "limits.regions_per_client": (1, 1 << 20),
    "limits.lanes_per_client": (1, MAX_RAILS),
    "limits.bytes_per_client": (0, 1 << 60),
    "limits.shared_bytes_per_client": (0, 1 << 60),
    "limits.offers_per_region": (1, 1 << 20),
    "limits.remotes_per_client": (1, 1 << 20),
    "limits.trace_records": (64, 1 << 20),
    "timeouts.connect_s": (0.05, 600),
    "timeouts.peer_s": (0.1, 600),
    "timeouts.settle_s": (0, 600),
    "timeouts.fence_s": (0, 600),
    "timeouts.drain_s": (0, 3600),
    "timeouts.session_linger_s": (0, 3600),
    "timeouts.predecessor_s": (0, 600),
    "tcp.notsent_lowat": (4 * KIB, GIB),
    "tcp.user_timeout_s": (1, 3600),
    "verbs.timeout": (1, 31),
    "verbs.retry_count": (0, 7),
    "verbs.rnr_retry": (0, 7),
    "verbs.min_rnr_timer": (0, 31),
    "verbs.traffic_class": (0, 255),
    "verbs.service_level": (0, 15),
    "verbs.sq_depth": (128, 32768),
    "verbs.signal_every": (1, 1024),
    "verbs.probe_s": (0.05, 600),
    "data.spin_us": (-1, 1_000_000),
}
_RAIL_RANGES: Final[dict[str, tuple[float, float]]] = {
    "cpu": (-1, 4095),
    "port": (0, 65535),
    "port_number": (1, 255),
    "gid_index": (-1, 65535),
    "rate_gbit": (0.001, 10_000),
}


def load(path: Path | None) -> Config:
    """The configuration in a file, or the defaults. ConfigError, without the path."""
    if path is None:
        return parse("")
    try:
        with open(path, opener=_open_file) as file:
            return parse(file.read())
    except OSError as failure:
        raise ConfigError(str(failure.strerror)) from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"not UTF-8 text ({failure.reason} at byte {failure.start})") from None


def _open_file(path: str, flags: int) -> int:
    """Waits for no writer of a FIFO. OSError unless it is a regular file."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file; name a TOML file, `railrelayd --print-example` writes one")
    return fd


def parse(text: str) -> Config:
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as failure:  # long numbers and deep nesting, too
        raise ConfigError(f"not TOML: {failure}") from None
    try:
        config = msgspec.convert(raw, Config, dec_hook=_decode)
    except msgspec.ValidationError as failure:
        raise ConfigError(_explained(str(failure), raw)) from None
    _check_texts("", raw)
    _check(config)
    return config


def _decode(kind: type, value: object) -> object:
    if kind is Bytes:
        return Bytes.parse(value)
    raise NotImplementedError(kind)


def _explained(text: str, raw: object) -> str:
    """msgspec's "Expected ... - at `$.relay.slots`" with the option first and the value that was found."""
    reason, _, where = text.partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    found: object = raw
    for step in re.findall(r"\w+", path):
        if isinstance(found, list):
            found = found[int(step)]
        elif isinstance(found, dict):
            found = found.get(step)
    field = re.search(r"(unknown|missing required) field `(\w+)`", reason)
    if field:
        return f"{path}{path and '.'}{field[2]}: {'no such option' if field[1] == 'unknown' else 'required'}"
    return f"{path or 'file'}: {_shown(found)}: {reason[:1].lower() + reason[1:].replace('`', '')}"


def _shown(value: object) -> str:
    return json.dumps(value, default=str)


def _check_texts(where: str, value: object) -> None:
    """No path, host or name that the system is asked for has a NUL."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_texts(f"{where}.{name}" if where else name, part)
    elif isinstance(value, list):
        for index, part in enumerate(value):
            _check_texts(f"{where}[{index}]", part)
    elif isinstance(value, str):
        _demand("\0" not in value, where, value, "text without NUL")


def _check(config: Config) -> None:
    for option, (least, most) in _RANGES.items():
        section, name = option.split(".")
        _check_range(option, getattr(getattr(config, section), name), least, most)
    relay = config.relay
    _demand(relay.slot_bytes % CELL_BYTES == 0, "relay.slot_bytes", relay.slot_bytes, f"a multiple of {CELL_BYTES}")
    _demand(relay.ring_slices.bit_count() == 1, "relay.ring_slices", relay.ring_slices, "a power of two")
    records = config.limits.trace_records
    _demand(records.bit_count() == 1, "limits.trace_records", records, "a power of two")
    _check_node(config)
    _check_security(config)
    verbs = config.verbs
    half = verbs.sq_depth // 2  # or a send queue could fill without a completion that frees it
    _demand(verbs.signal_every <= half, "verbs.signal_every", verbs.signal_every, f"at most half of sq_depth, {half}")
    expected = " or ".join(map(_shown, FLUSHES))
    _demand(verbs.flush in FLUSHES, "verbs.flush", verbs.flush, expected)
    _demand(1 <= len(config.rail) <= MAX_RAILS, "rail", len(config.rail), f"1 to {MAX_RAILS} [[rail]] sections")
    for index in range(len(config.rail)):
        _check_rail(config, index)


def _check_node(config: Config) -> None:
    node = config.node
    instance = re.fullmatch(r"[A-Za-z0-9_-]{1,32}", node.instance)
    _demand(instance is not None, "node.instance", node.instance, "1 to 32 letters, digits, '-' or '_'")
    short = len(os.fsencode(node.socket)) <= SOCKET_PATH_BYTES
    _demand(short, "node.socket", node.socket, f"a path of at most {SOCKET_PATH_BYTES} bytes")
    usable = node.host not in ("", "0.0.0.0", "::") and (":" not in node.host or _address(node.host) is not None)
    _demand(usable, "node.host", node.host, "an address or name under which peers reach this node, without a port")
    for rank, rail in enumerate(node.rail_of_rank):
        _check_range(f"node.rail_of_rank[{rank}]", rail, 0, len(config.rail) - 1)
    if node.fault:
        try:
            faults.parsed(node.fault)
        except ValueError as failure:
            raise ConfigError(f"node.fault: {failure}") from None
    if node.group:
        try:
            grp.getgrnam(node.group)
        except KeyError:
            raise ConfigError(f"node.group: {_shown(node.group)}: there is no such group") from None


def _check_security(config: Config) -> None:
    security, files = config.security, config.security.secret_files
    good = len(files) <= MAX_SECRETS and all(files) and len(set(files)) == len(files)
    _demand(good, "security.secret_files", list(files), f"up to {MAX_SECRETS} different files")
    for option in ("tls_certificate", "tls_key", "tls_ca"):
        value = getattr(security, option)
        together = bool(value) == any((security.tls_certificate, security.tls_key, security.tls_ca))
        _demand(together, f"security.{option}", value, "a PEM file: tls_certificate, tls_key and tls_ca go together")
    if _address(config.node.host) is not None:
        check_listening(config, "node.host", config.node.host)
    for index, rail in enumerate(config.rail):
        if rail.nic == "tcp" and _address(rail.address) is not None:
            check_listening(config, f"rail[{index}].address", rail.address)


def check_listening(config: Config, option: str, address: str) -> None:
    """ConfigError: the daemon would listen where strangers reach it."""
    security, found = config.security, _address(address.partition("%")[0])
    safe = security.authenticates or security.allow_unauthenticated or (found is not None and found.is_loopback)
    if not safe:
        raise ConfigError(
            f"{option}: {_shown(address)}: expected a loopback address, because whoever reaches this one could connect:"
            " set security.secret_files on all nodes (`openssl rand -hex 32 >FILE; chmod 600 FILE`), or"
            " security.allow_unauthenticated = true if everyone there is trusted"
        )


def _check_rail(config: Config, index: int) -> None:
    rail, name = config.rail[index], f"rail[{index}]"
    if rail.nic != "verbs" and not rail.address:
        raise ConfigError(f"{name}.address: required")
    if rail.address:
        address = _address(rail.address)
        usable = address is not None and not address.is_unspecified and not address.is_multicast
        _demand(usable, f"{name}.address", rail.address, "the IPv4 or IPv6 address of the rail's interface")
    _demand(rail.nic in NICS, f"{name}.nic", rail.nic, f"one of {', '.join(map(_shown, NICS))}")
    memories = ("host",) if rail.nic == "tcp" else ("host", "device")
    expected = " or ".join(map(_shown, memories))
    _demand(rail.memory in memories, f"{name}.memory", rail.memory, f"{expected} with nic = {_shown(rail.nic)}")
    if rail.nic == "verbs":
        usable = re.fullmatch(r"[\w.:-]*", rail.device, re.ASCII) is not None and len(rail.device) <= DEVICE_NAME_BYTES
        _demand(usable, f"{name}.device", rail.device, "the name of an RDMA device, as `ibv_devices` shows it")
        _demand(rail.port == 0, f"{name}.port", rail.port, 'none with nic = "verbs"; port_number is of the device')
    else:
        for option, default in (("device", ""), ("port_number", 1), ("gid_index", -1)):
            value = getattr(rail, option)
            _demand(value == default, f"{name}.{option}", value, 'none without nic = "verbs"')
    if rail.memory == "device":
        named = isinstance(rail.gpu, int) or rail.gpu.isdecimal() or rail.gpu.startswith("GPU-")
        expected = 'a UUID, "GPU-...", as `nvidia-smi -L` shows it, or a number such as 0, with memory = "device"'
        _demand(named, f"{name}.gpu", rail.gpu, expected)
    else:
        _demand(rail.gpu == "", f"{name}.gpu", rail.gpu, 'none without memory = "device"')
    if rail.nic != "emulated":
        rate = rail.rate_gbit
        _demand(rate == Rail().rate_gbit, f"{name}.rate_gbit", rate, 'none without nic = "emulated"')
    ways = ("auto", "engines") if rail.memory == "device" else ("auto",)
    expected = " or ".join(map(_shown, ways))
    _demand(rail.copies in ways, f"{name}.copies", rail.copies, f"{expected} with memory = {_shown(rail.memory)}")
    for option, (least, most) in _RAIL_RANGES.items():
        _check_range(f"{name}.{option}", getattr(rail, option), least, most)
    cores = sorted(os.sched_getaffinity(0))
    _demand(rail.cpu < 0 or rail.cpu in cores, f"{name}.cpu", rail.cpu, f"-1 or one of the usable cores {cores}")
    identity = config.identity(index)
    fits = len(identity.encode()) <= IDENTITY_BYTES and identity.isprintable()
    _demand(fits, f"{name}.identity", identity, f"at most {IDENTITY_BYTES} bytes of printable text")
    first = [config.identity(other) for other in range(index)]
    _demand(identity not in first, f"{name}.identity", identity, "different on each rail of a node")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _check_range(option: str, value: float, least: float, most: float) -> None:
    _demand(
        least <= value <= most,
        option,
        value,
        f"{least:g} to {most:g}" if least != int(least) else f"{int(least)} to {int(most)}",
    )


def _demand(good: bool, option: str, value: object, expected: str) -> None:
    if not good:
        raise ConfigError(f"{option}: {_shown(value)}: expected {expected}")
