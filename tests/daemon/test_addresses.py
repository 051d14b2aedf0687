"""Addresses that the configuration names and this machine does not have, before a daemon runs and when it starts."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.machine_tree import MachineTree
from helpers.processes import LIMIT_S

from railrelay.client.cli import FAILED, main
from railrelay.daemon import addresses, config

FOREIGN = "203.0.113.1"  # of documentation
TRUSTED = "[security]\nallow_unauthenticated = true\n"
HERE = '[[rail]]\naddress = "127.0.0.1"\n'
NODE = "[node]\nhost = {}\n"

CASES = [
    (
        f'{TRUSTED}{HERE}[[rail]]\nidentity = "second"\naddress = "{FOREIGN}"\n',
        f'rail[1].address: "{FOREIGN}"',
        "rail second",
    ),
    (f'{TRUSTED}[[rail]]\naddress = "2001:db8::1"\n', 'rail[0].address: "2001:db8::1"', "rail rail0"),
    (f"{NODE.format(json.dumps(FOREIGN))}{TRUSTED}{HERE}", f'node.host: "{FOREIGN}"', "control port"),
    (f"{NODE.format(json.dumps('no-such-host.invalid'))}{HERE}", 'node.host: "no-such-host.invalid"', "a name of one"),
    (f"{NODE.format(json.dumps('a..b'))}{HERE}", 'node.host: "a..b": not a name of a host', "a name of one"),
]


def daemon(path: Path, *options: str) -> tuple[int, str]:
    """Exit code and last line of railrelayd."""
    command = [sys.executable, "-m", "railrelay.daemon.main", "--config", str(path), *options]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(("text", "option", "todo"), CASES)
def test_every_command_names_option_address_the_machines_addresses_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, option: str, todo: str
) -> None:
    path = tmp_path / "railrelayd.toml"
    path.write_text(text)
    chosen = ["--instance", "none-such", "--config", str(path)]
    said = {"check": daemon(path, "--check"), "start": daemon(path)}
    for verb in ("topo", "doctor"):
        code = main([verb, *chosen])
        said[verb] = (code, capsys.readouterr().out)
    for how, (code, words) in said.items():
        assert code == FAILED, how
        assert option in words, how
        assert "this machine, which has 127.0.0.1" in words, how
        assert todo in words, how


def test_a_control_port_on_loopback_beside_a_rail_that_others_reach_is_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = [one for one in addresses.of_machine() if not one.startswith("127.") and one != "::1"]
    if not outside:
        pytest.skip("this machine has loopback addresses alone")
    path = tmp_path / "railrelayd.toml"
    path.write_text(f'{TRUSTED}[[rail]]\naddress = "{outside[0]}"\n')
    expected = f'node.host: "127.0.0.1" reaches this machine alone, but rail[0].address is "{outside[0]}"'
    assert main(["topo", "--instance", "none-such", "--config", str(path)]) == 0
    assert expected in capsys.readouterr().out
    main(["doctor", "--instance", "none-such", "--config", str(path), "--json"])
    [row] = [row for row in json.loads(capsys.readouterr().out)["checks"] if row["check"] == "addresses"]
    assert (row["result"], expected in row["seen"]) == ("warn", True)
    command = [sys.executable, "-m", "railrelay.daemon.main", "--config", str(path), "--check"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_S)
    assert done.returncode == 0
    assert expected in done.stderr


def test_rails_of_this_machine_and_those_that_only_name_one_are_good() -> None:
    assert addresses.foreign(config.parse("")) == []
    emulated = config.parse(f'[[rail]]\naddress = "{FOREIGN}"\nnic = "emulated"\n')
    assert addresses.foreign(emulated) == []
    assert addresses.unreachable(emulated) == addresses.unreachable(config.parse("")) == ""
    assert "but rail[0] is an RDMA rail: for" in addresses.unreachable(config.parse('[[rail]]\nnic = "verbs"\n'))


def test_of_many_addresses_the_first_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [f"10.0.0.{number}" for number in range(20)]
    monkeypatch.setattr(addresses, "of_machine", lambda: many)
    [wrong] = addresses.foreign(config.parse(f'{TRUSTED}[[rail]]\naddress = "{FOREIGN}"\n'))
    assert f"which has {', '.join(many[:16])} and 4 more (`ip -br address`); name" in wrong


def test_a_machine_has_its_addresses_without_networks_broadcasts_and_link_local_ones(tmp_path: Path) -> None:
    tree = MachineTree(tmp_path / "machine")
    leaves = [("0.0.0.0", "/0 universe UNICAST"), ("10.1.0.0", "/24 link UNICAST"), ("10.1.0.7", "/32 host LOCAL")]
    leaves += [("10.1.0.255", "/32 link BROADCAST"), ("127.0.0.0", "/8 host LOCAL"), ("127.0.0.1", "/32 host LOCAL")]
    trie = "\n".join(f"           |-- {address}\n              {leaf}" for address, leaf in leaves)
    tree.write("proc/net/fib_trie", f"Main:\n{trie}\nLocal:\n{trie}\n")
    sixth = ["fe8000000000000000fc00fffe000001 04 40 20 80 eth0", "fd000000000000000000000000000002 04 40 00 82 eth0"]
    tree.write("proc/net/if_inet6", "\n".join(sixth))
    assert addresses.of_machine(tree.root) == ["10.1.0.7", "127.0.0.1", "fd00::2"]


def test_an_address_of_a_family_that_the_kernel_does_not_have_is_none_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with ipv6.disable=1, which takes a boot."""

    class WithoutIPv6(socket.socket):
        def __init__(self, family: int = -1, *rest: int) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *rest)

    monkeypatch.setattr(socket, "socket", WithoutIPv6)
    [wrong] = addresses.foreign(config.parse(f'{TRUSTED}[[rail]]\naddress = "2001:db8::1"\n'))
    assert wrong.startswith('rail[0].address: "2001:db8::1" is no address of this machine')
