"""The configuration: defaults, the printed example, and errors that name option, value and what is allowed."""

import os
from pathlib import Path

import pytest

from railrelay.daemon import config
from railrelay.daemon.config import ConfigError, parse

EMULATED = '[[rail]]\naddress = "127.0.0.1"\nnic = "emulated"\n'
VERBS = '[[rail]]\nnic = "verbs"\n'


def test_without_a_file_there_is_one_rail_on_loopback() -> None:
    loaded = config.load(None)
    assert [rail.address for rail in loaded.rail] == ["127.0.0.1"]
    assert loaded.relay.lane_bytes == 18 * 8 * 1024 * 1024
    assert loaded.identity(0) == "rail0"


def test_printed_example_says_the_defaults() -> None:
    commented_in = "\n".join(
        line.removeprefix("# ") if line.startswith("# ") and " = " in line else line
        for line in config.EXAMPLE.split("\n")
    )
    loaded, defaults = parse(commented_in), parse("")
    assert parse(config.EXAMPLE) == defaults
    assert (loaded.relay, loaded.limits, loaded.timeouts) == (defaults.relay, defaults.limits, defaults.timeouts)
    assert (loaded.tcp, loaded.verbs, loaded.data) == (defaults.tcp, defaults.verbs, defaults.data)
    assert loaded.security == defaults.security


def test_sizes_are_numbers_or_text_with_a_unit() -> None:
    assert parse("[relay]\nslot_bytes = 131072").relay.slot_bytes == 131072
    assert parse('[relay]\nslot_bytes = "128KiB"').relay.slot_bytes == 131072
    assert parse('[relay]\nslot_bytes = "1 GiB"').relay.slot_bytes == 1 << 30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[relay]\nslots = 0", "relay.slots: 0: expected 2 to 256"),
        ("[relay]\nslots = 257", "relay.slots: 257: expected 2 to 256"),
        ('[relay]\nslots = "many"', 'relay.slots: "many": expected int, got str'),
        ("[relay]\nslot_bytes = 4096", "relay.slot_bytes: 4096: expected 65536 to 1073741824"),
        ("[relay]\nslot_bytes = 100000", "relay.slot_bytes: 100000: expected a multiple of 65536"),
        ('[relay]\nslot_bytes = "8MB"', 'relay.slot_bytes: "8MB": expected bytes, or text such as'),
        ("[relay]\nring_slices = 100", "relay.ring_slices: 100: expected a power of two"),
        ("[limits]\ntrace_records = 32", "limits.trace_records: 32: expected 64 to 1048576"),
        ("[limits]\ntrace_records = 1000", "limits.trace_records: 1000: expected a power of two"),
        ("[relay]\nslot = 3", "relay.slot: no such option"),
        ("[relays]\n", "relays: no such option"),
        ("rail = []", "rail: 0: expected 1 to 16 [[rail]] sections"),
        ("[[rail]]\ncpu = -1", "rail[0].address: required"),
        ('[[rail]]\naddress = "eth0"', 'rail[0].address: "eth0": expected the IPv4 or IPv6 address'),
        ('[[rail]]\naddress = "0.0.0.0"', 'rail[0].address: "0.0.0.0": expected'),
        ('[[rail]]\naddress = "127.0.0.1"\nport = 65536', "rail[0].port: 65536: expected 0 to 65535"),
        (
            '[[rail]]\naddress = "127.0.0.1"\nnic = "roce"',
            'rail[0].nic: "roce": expected one of "tcp", "verbs", "emulated"',
        ),
        (VERBS + 'device = "mlx5 0"', 'rail[0].device: "mlx5 0": expected the name of an RDMA device'),
        (VERBS + "port = 4791", "rail[0].port: 4791: expected none with"),
        (VERBS + "port_number = 0", "rail[0].port_number: 0: expected 1 to 255"),
        (VERBS + "gid_index = -2", "rail[0].gid_index: -2: expected -1 to 65535"),
        (VERBS + 'memory = "device"', 'rail[0].gpu: "": expected a UUID'),
        (EMULATED + 'device = "mlx5_0"', 'rail[0].device: "mlx5_0": expected none without nic = "verbs"'),
        ("[verbs]\ntimeout = 0", "verbs.timeout: 0: expected 1 to 31"),
        ("[verbs]\ntraffic_class = 256", "verbs.traffic_class: 256: expected 0 to 255"),
        ("[verbs]\nretry_count = 8", "verbs.retry_count: 8: expected 0 to 7"),
        ("[verbs]\nsignal_every = 1024", "verbs.signal_every: 1024: expected at most half of sq_depth, 512"),
        ('[verbs]\nflush = "often"', 'verbs.flush: "often": expected "auto" or "always" or "never"'),
        (EMULATED + "rate_gbit = 0", "rail[0].rate_gbit: 0.0: expected 0.001 to 10000"),
        (EMULATED + 'rate_gbit = "fast"', 'rail[0].rate_gbit: "fast": expected float, got str'),
        (EMULATED + 'memory = "disk"', 'rail[0].memory: "disk": expected "host" or "device" with nic = "emulated"'),
        (
            EMULATED + 'memory = "device"',
            'rail[0].gpu: "": expected a UUID, "GPU-...", as `nvidia-smi -L` shows it, or a number such as 0',
        ),
        (EMULATED + 'memory = "device"\ngpu = "H200"', 'rail[0].gpu: "H200": expected a UUID'),
        (EMULATED + 'memory = "device"\ngpu = "cuda:0"', 'rail[0].gpu: "cuda:0": expected a UUID'),
        ('[[rail]]\naddress = "127.0.0.1"\nrate_gbit = 10', "rail[0].rate_gbit: 10.0: expected none without nic ="),
        (VERBS + "rate_gbit = 10", "rail[0].rate_gbit: 10.0: expected none without nic ="),
        (EMULATED + "gpu = 0", 'rail[0].gpu: 0: expected none without memory = "device"'),
        (EMULATED + 'copies = "engines"', 'rail[0].copies: "engines": expected "auto" with memory = "host"'),
        (
            EMULATED + 'memory = "device"\ngpu = 0\ncopies = "kernel"',
            'rail[0].copies: "kernel": expected "auto" or "engines" with memory = "device"',
        ),
        (
            '[[rail]]\naddress = "127.0.0.1"\nmemory = "device"',
            'rail[0].memory: "device": expected "host" with nic = "tcp"',
        ),
        (
            '[[rail]]\naddress = "127.0.0.1"\n[[rail]]\naddress = "127.0.0.1"\nidentity = "rail0"',
            'rail[1].identity: "rail0": expected different on each rail',
        ),
        ("[node]\nrail_of_rank = [0, 1]", "node.rail_of_rank[1]: 1: expected 0 to 0"),
        ('[node]\ninstance = "a/b"', 'node.instance: "a/b": expected 1 to 32 letters'),
        ('[node]\nhost = "0.0.0.0"', 'node.host: "0.0.0.0": expected an address or name'),
        ('[node]\nhost = "node7:4000"', 'node.host: "node7:4000": expected an address or name'),
        ('[node]\ngroup = "a\\u0000b"', 'node.group: "a\\u0000b": expected text without NUL'),
        (
            '[security]\nsecret_files = ["a", "\\u0000"]',
            'security.secret_files[1]: "\\u0000": expected text without NUL',
        ),
        ('[[rail]]\naddress = "\\u0000"', 'rail[0].address: "\\u0000": expected text without NUL'),
        ('[node]\ngroup = "no such group"', 'node.group: "no such group": there is no such group'),
        ('[security]\nsecret_files = ["a", "a"]', 'security.secret_files: ["a", "a"]: expected up to 2 different'),
        ('[security]\nsecret_files = ["a", "b", "c"]', 'security.secret_files: ["a", "b", "c"]: expected up to 2'),
        ('[security]\ntls_ca = "ca.pem"', 'security.tls_certificate: "": expected a PEM file'),
        ("[timeouts]\npeer_s = nan", "timeouts.peer_s: NaN: expected 0.1 to 600"),
        ("slots = ", "not TOML"),
    ],
)
def test_error_names_option_value_and_limit(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as failure:
        parse(text)
    assert str(failure.value).startswith(expected)


def test_a_rail_is_never_emulated_unless_the_configuration_says_so() -> None:
    assert {rail.nic for rail in parse("").rail + parse(config.EXAMPLE).rail} == {"tcp"}
    [rail] = parse(EMULATED + 'memory = "device"\ngpu = 3').rail
    assert (rail.nic, rail.rate_gbit, rail.memory, rail.gpu, rail.copies) == ("emulated", 400, "device", 3, "auto")


def test_a_verbs_rail_needs_no_address() -> None:
    [rail] = parse(VERBS).rail
    assert (rail.address, rail.device, rail.port_number, rail.gid_index) == ("", "", 1, -1)
    [rail] = parse(VERBS + 'device = "mlx5_0"\ngid_index = 3\nmemory = "device"\ngpu = 0').rail
    assert (rail.device, rail.gid_index, rail.memory) == ("mlx5_0", 3, "device")


def test_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^No such file"):
        config.load(tmp_path / "missing.toml")
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match=r"^not UTF-8 text"):
        config.load(tmp_path / "latin.toml")


def test_nobody_waits_for_a_file_that_is_none(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(ConfigError, match=r"^not a regular file; name a TOML file"):
            config.load(path)


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 5000], ids=["digits", "nesting"])
def test_what_the_toml_parser_gives_up_on_is_a_configuration_error(value: str) -> None:
    with pytest.raises(ConfigError, match="not TOML"):
        parse(f"[relay]\nslots = {value}")


def test_rank_without_a_rail_has_none() -> None:
    loaded = parse('[node]\nrail_of_rank = [1, 0]\n[[rail]]\naddress = "127.0.0.1"\n[[rail]]\naddress = "127.0.0.2"')
    assert [loaded.rail_of(rank) for rank in range(3)] == [1, 0, None]
    assert loaded.rail_of(0, nearest=(0, 1)) == 1
    assert parse('[[rail]]\naddress = "127.0.0.1"').rail_of(5) == 0
    two = parse('[[rail]]\naddress = "127.0.0.1"\n[[rail]]\naddress = "127.0.0.2"')
    assert [two.rail_of(rank, nearest=(0, 0, 1)) for rank in range(4)] == [0, 0, 1, 0]
