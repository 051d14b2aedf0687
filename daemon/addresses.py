"""Whether what the configuration names are addresses of this machine, and whether other nodes can reach them."""

from __future__ import annotations

import errno
import ipaddress
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from railrelay.daemon.config import Config
from railrelay.daemon.pci import ROOT, text
from railrelay.daemon.verbs_ports import Address

_SHOWN: Final = 16  # addresses in an error


def check(config: Config) -> None:
    """OSError names every option whose address the daemon cannot listen on: an interface may still get its own."""
    wrong = foreign(config)
    if wrong:
        raise OSError(errno.EADDRNOTAVAIL, "; ".join(wrong))


def foreign(config: Config, root: Path = ROOT) -> list[str]:
    """What is wrong with each address that the daemon would listen on and this machine does not have."""
    return list(_foreign(config)) if root == ROOT else []


def _foreign(config: Config) -> Iterator[str]:
    for index, rail in enumerate(config.rail):
        if rail.nic == "tcp" and not _is_here(socket.AF_INET6 if ":" in rail.address else socket.AF_INET, rail.address):
            yield (
                f"rail[{index}].address: {json.dumps(rail.address)} is no address of this machine, which has"
                f" {_known()}; name that of the interface of rail {config.identity(index)}, or give it"
                f" this one (`ip address add {rail.address}/PREFIX dev INTERFACE`)"
            )
    host = config.node.host
    try:
        family, sockaddr = resolved(host, 0)
    except OSError as failure:
        yield str(failure.strerror)
        return
    if not _is_here(family, str(sockaddr[0])):
        means = "" if sockaddr[0] == host else f", which is {sockaddr[0]},"
        yield (
            f"node.host: {json.dumps(host)}{means} is no address of this machine, which has {_known()};"
            " name the one by which peers reach its control port"
        )


def unreachable(config: Config, root: Path = ROOT) -> str:
    """Why no other node could reach the control port although it could reach a rail; "" if there is no such rail."""
    outside = [
        f"rail[{index}].address is {json.dumps(rail.address)}" if rail.address else f"rail[{index}] is an RDMA rail"
        for index, rail in enumerate(config.rail)
        if rail.nic != "emulated" and not (rail.address and _ip(rail.address).is_loopback)
    ]
    if not outside or root != ROOT:
        return ""
    try:
        _, sockaddr = resolved(config.node.host, 0)
    except OSError:
        return ""
    if not _ip(str(sockaddr[0])).is_loopback:
        return ""
    means = "" if sockaddr[0] == config.node.host else f" is {sockaddr[0]} and"
    return (
        f"node.host: {json.dumps(config.node.host)}{means} reaches this machine alone, but {outside[0]}: for other"
        f" nodes name an address by which they reach the control port; this machine has {_known()}"
    )


def resolved(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """(address family, socket address) that the daemon listens on. OSError with the option in its text."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as failure:
        number = failure.errno if isinstance(failure, OSError) else errno.EINVAL
        why = failure.strerror if isinstance(failure, OSError) else "not a name of a host"
        raise OSError(
            number,
            f"node.host: {json.dumps(host)}: {why}; name an address of this machine, which has"
            f" {_known()}, or a name of one",
        ) from None
    return family, address


def _known() -> str:
    found = of_machine()
    more = f" and {len(found) - _SHOWN} more (`ip -br address`)" if len(found) > _SHOWN else ""
    return f"{', '.join(found[:_SHOWN]) or 'none'}{more}"


def of_machine(root: Path = ROOT) -> list[str]:
    """All but the link-local ones, IPv4 first."""
    fourth = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", text(root / "proc/net/fib_trie"))
    sixth = [bytes.fromhex(line.split()[0]) for line in text(root / "proc/net/if_inet6").splitlines()]
    found: set[Address] = {*map(ipaddress.IPv4Address, fourth), *map(ipaddress.IPv6Address, sixth)}
    shown = sorted(found, key=lambda address: (address.version, int(address)))
    return [str(address) for address in shown if not address.is_link_local]


def _is_here(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as failure:
        return failure.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _ip(address: str) -> Address:
    return ipaddress.ip_address(address)
