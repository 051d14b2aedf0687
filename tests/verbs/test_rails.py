"""Daemons with verbs rails: takeover and readmission, withdrawal and abort where the receiver can refuse nothing,
and memory that cannot be registered. On real devices, or on the stand-in's."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pytest
from helpers import memory, patterns, rail_devices, sockets
from helpers.engines import Engines
from helpers.memory import Link
from helpers.nodes import Node, Nodes
from helpers.traffic import Found, Traffic
from helpers.waiting import until

from railrelay.client import Client, RelayError, Result, Route, Transfer, TransferError
from railrelay.client.cli import _node
from railrelay.client.cli import rails as shown_rails
from railrelay.shm_layout import abi

pytestmark = [
    pytest.mark.system,
    pytest.mark.parametrize("nic", [pytest.param("verbs", marks=rail_devices.marks("verbs"))]),
]

BLOCK = 16384
NBYTES = 32 << 20
BLOCKS = NBYTES // BLOCK
FAULTS = 50
FAULT_BYTES = (8 << 20) if rail_devices.real() else NBYTES
LATE_S = 1.0
LOOK_S = 0.05 if rail_devices.real() else 0.005  # emulated, looks cost what is looked at
TAKEN_OVER_MS, REBUILT_MS = 100.0, 1000.0
UNIT = Path(__file__).resolve().parents[2] / "systemd/railrelayd.service"
WAIT_S = 30.0 * (4 if rail_devices.real() else 1)
TIMEOUTS = {"connect_s": 5, "peer_s": 5, "settle_s": 5} if not rail_devices.real() else {"connect_s": 20, "peer_s": 20}
stand_in_only = pytest.mark.skipif(rail_devices.real(), reason="needs what only the stand-in's devices can do")


@pytest.fixture
def nodes(tmp_path: Path, nic: str) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path, nic, limit_s=600)
    yield nodes
    if nodes.devices.fabric is None:
        for device in nodes.devices.all:
            rail_devices.port(device, None, up=True)
    nodes.close()


@pytest.fixture
def pair(nodes: Nodes) -> tuple[Node, Node]:
    return nodes.pair((2, 2), timeouts=TIMEOUTS)


@dataclass
class Stream:
    """Transfers from one client to another, checked one by one."""

    link: Link
    seed: int = 0

    def begin(self, tag: int = 5, timeout: float = 4 * WAIT_S) -> Transfer:
        self.seed += 1
        self.link.destination.array[:] = 0
        taken, put = patterns.order(BLOCKS, BLOCK, self.seed)
        return self.link.sender.write(
            self.link.remote,
            taken + np.uint64(self.link.source.address),
            put + np.uint64(self.link.remote.address),
            BLOCK,
            tag=tag,
            timeout=timeout,
        )

    def begun(self) -> None:
        until(lambda: bool(self.link.destination.array[::BLOCK].any()), "the first bytes land", WAIT_S)

    def end(self, transfer: Transfer) -> None:
        transfer.wait(WAIT_S)
        assert patterns.arrived(self.link.source.array, self.link.destination.array, BLOCKS, BLOCK, self.seed)

    def once(self) -> None:
        self.end(self.begin())


def stream(sender: Client, receiver: Client, rail: int | None = None) -> Stream:
    source, destination = memory.make(sender, NBYTES), memory.make(receiver, NBYTES, rail=rail)
    source.array[:] = patterns.content(NBYTES, 1)
    return Stream(Link(sender, receiver, source, destination, sender.open(destination.offer())))


def rails(node: Node) -> list[dict[str, Any]]:
    """As `railrelay rails` shows them, without a process for each look."""
    with _node.open_node(node.instance) as opened:
        return shown_rails.read(opened)


def rail(node: Node, number: int = 0) -> dict[str, Any]:
    return rails(node)[number]


def counter(node: Node, label: str) -> int:
    assert label in abi.RAIL_COUNTERS
    return sum(shown["counters"][label] for shown in rails(node))


# ---- takeover ----


# How long it takes is printed and not asserted: it is the machine's load that a maximum would test.


def times(log: str, by: str) -> list[float]:
    """How long slices had no connection, in ms, until there was one ``by`` these devices."""
    return sorted(map(float, re.findall(rf"connected through {by} ([\d.]+) ms after", log)))


def shown_times(what: str, found: list[float], limit_ms: float) -> str:
    if not found:
        return f"{what} 0 times (within {limit_ms:g} ms)"
    within = sum(ms < limit_ms for ms in found)
    return (
        f"{what} {len(found)} times, {within} within {limit_ms:g} ms: p50 {median(found):.0f}, max {found[-1]:.0f} ms"
    )


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("route", [Route.RELAY, Route.DIRECT])
def test_a_rail_whose_port_goes_down_is_taken_over_and_comes_back(
    pair: tuple[Node, Node], route: Route, side: str
) -> None:
    prefill, decode = pair
    broken = prefill if side == "prefill" else decode
    with prefill.connect(0, route=route) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        assert rail(prefill)["through"] == 0
        transfer = moving.begin()
        moving.begun()
        rail_devices.port(broken.devices[0], broken.fabric, up=False)
        moving.end(transfer)
        until(lambda: rail(broken)["up"] is False, "the port is seen to be down", WAIT_S)
        moving.once()
        assert (rail(prefill)["through"], rail(prefill)["nic"]) == (1, "verbs")
        assert rail(prefill)["takeovers"] == 1
        assert prefill.cli("rails")["rails"][0]["through"] == 1
        assert [lane["nic"] for lane in prefill.cli("lanes")["lanes"] if lane["rail"] == 0] == ["verbs of 1"]
        assert any("rail rail1 has taken over" in error["text"] for error in prefill.errors())
        rail_devices.port(broken.devices[0], broken.fabric, up=True)
        until(lambda: rail(prefill)["through"] == 0, "the rail is back", WAIT_S)
        assert rail(broken)["up"] is True
        moving.once()
        assert rail(prefill)["takeovers"] == 1
    before, taken, after = prefill.log.partition("connected through rail1")
    assert taken, prefill.log
    assert "is down: connection of rail 0 to" in before
    assert "its probe has passed, it is back" in after
    print(shown_times("taken over", times(prefill.log, "rail1"), TAKEN_OVER_MS))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_takeover_does_not_wait_for_an_engine_that_has_stopped(
    pair: tuple[Node, Node], engines: Engines, side: str
) -> None:
    prefill, decode = pair
    broken = prefill if side == "prefill" else decode
    slow = engines.start(decode, rank=0)
    with prefill.connect(0) as sender, decode.connect(2) as receiver:
        moving = stream(sender, receiver, rail=0)
        moving.once()
        stuck = sender.open(bytes.fromhex(slow.ask("memory", name="pages", nbytes=NBYTES, kind="private")))
        taken, put = patterns.order(BLOCKS, BLOCK, 2)
        source = moving.link.source
        with slow.paused():
            frames = counter(decode, "bounced_bytes")
            waiting = sender.write(stuck, taken + np.uint64(source.address), put + np.uint64(stuck.address), BLOCK)
            until(lambda: counter(decode, "bounced_bytes") > frames, "frames lie in bounce memory", WAIT_S)
            rail_devices.port(broken.devices[0], broken.fabric, up=False)
            until(lambda: rail(broken)["up"] is False, "the port is seen to be down", WAIT_S)
            moving.once()
            assert rail(prefill)["through"] == 1
            assert not waiting.settled
        waiting.wait(WAIT_S)
        assert slow.ask("arrived", name="pages", source_seed=1, blocks=BLOCKS, block_bytes=BLOCK, seed=2)
        rail_devices.port(broken.devices[0], broken.fabric, up=True)
        until(lambda: rail(prefill)["through"] == 0, "the rail is back", WAIT_S)


@stand_in_only
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_queue_pair_that_fails_is_rebuilt_at_once(pair: tuple[Node, Node], side: str) -> None:
    prefill, decode = pair
    broken = prefill if side == "prefill" else decode
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        transfer = moving.begin()
        moving.begun()
        assert rail_devices.break_connections(broken.devices[0], broken.fabric) > 0
        moving.end(transfer)
        assert rail(prefill)["takeovers"] == 0
    before, rebuilt, _ = prefill.log.partition("connected through its own device")
    assert rebuilt, prefill.log
    assert "lost (errno" in before
    print(shown_times("rebuilt", times(prefill.log, "its own device"), REBUILT_MS))


@stand_in_only
def test_a_rail_that_reaches_nobody_though_its_ports_are_up_is_taken_over(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        assert decode.fabric is not None
        with decode.fabric.held(decode.devices[0].address):
            moving.once()
            assert rail(prefill)["through"] == 1
            assert rail(prefill)["up"]
        until(lambda: rail(prefill)["through"] == 0, "the rail is back")
        moving.once()


@stand_in_only
@pytest.mark.parametrize("point", ["daemon.takeover.carries", "daemon.takeover.returning"])
def test_a_daemon_that_dies_while_a_rail_is_taken_over_or_comes_back_begins_anew(nodes: Nodes, point: str) -> None:
    prefill, decode = nodes.pair((2, 2), timeouts=TIMEOUTS)
    text = prefill.config_path.read_text()
    prefill.config_path.write_text(text.replace("[node]\n", f'[node]\nfault = "{point}"\n'))
    assert prefill.terminate() == 0
    doomed = nodes.again(prefill)
    with doomed.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        transfer = moving.begin(tag=9)
        rail_devices.port(prefill.devices[0], prefill.fabric, up=False)
        if point == "daemon.takeover.returning":
            moving.end(transfer)
            rail_devices.port(prefill.devices[0], prefill.fabric, up=True)
        assert doomed.wait() == -signal.SIGKILL
        until(lambda: transfer.done, "the transfer ends")
        prefill.config_path.write_text(text)
        nodes.again(prefill)
        sender.wait_attached(WAIT_S)
        receiver.receiver.abort(9)
        moving.link.remote = sender.open(moving.link.destination.offer())
        moving.once()
        rail_devices.port(prefill.devices[0], prefill.fabric, up=True)
        moving.once()


def test_without_another_rail_transfers_wait_and_go_on(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((1, 1), timeouts={**TIMEOUTS, "connect_s": 60})
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        rail_devices.port(prefill.devices[0], prefill.fabric, up=False)
        until(lambda: rail(prefill)["up"] is False, "the port is seen to be down", WAIT_S)
        transfer = moving.begin()
        rail_devices.port(prefill.devices[0], prefill.fabric, up=True)
        moving.end(transfer)
        assert rail(prefill)["takeovers"] == 0


class Fault(NamedTuple):
    kill: bool  # of queue pairs; else the port goes down and up
    node: int
    rail: int
    gently: bool  # a kill: no end is told of it; a port: it stays down until its rail is taken over


def faults(rng: random.Random) -> list[Fault]:
    """Half of them kills, half of them ports; on either end, on either rail."""
    wanted = [
        Fault(kill, node=number % 2, rail=number // 2 % 2, gently=number % 3 != 2)
        for kill in (True, False)
        for number in range(FAULTS // 2)
    ]
    rng.shuffle(wanted)
    return wanted


class Breaker:
    """Carries faults out, one after another, and waits until what is broken works again."""

    def __init__(self, nodes: tuple[Node, Node]) -> None:
        self.nodes = nodes
        self.kills = self.flaps = 0

    def carry_out(self, fault: Fault) -> None:
        node, prefill, rail = self.nodes[fault.node], self.nodes[0], fault.rail
        device = node.devices[rail]
        if fault.kill:
            silently = fault.gently and node.fabric is not None
            self._until(  # between two connections there is none
                lambda: rail_devices.break_connections(device, node.fabric, silently=silently) > 0,
                "a queue pair is killed",
            )
            self.kills += 1
        else:
            rail_devices.port(device, node.fabric, up=False)
            try:
                self._until(lambda: not rails(node)[rail]["up"], "the port is seen to be down")
                if fault.gently:
                    self._until(lambda: rails(prefill)[rail]["through"] != rail, "the rail is taken over")
            finally:
                rail_devices.port(device, node.fabric, up=True)
            self.flaps += 1
            self._until(lambda: rails(node)[rail]["up"], "the port is seen to be up")
        self._until(lambda: all(shown["through"] == n for n, shown in enumerate(rails(prefill))), "rails are their own")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, WAIT_S, pause_s=LOOK_S)


@pytest.mark.parametrize("seed", [1] if rail_devices.real() else [1, 2])
def test_nothing_is_lost_wrong_or_late_whatever_breaks(
    nodes: Nodes, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Queue pairs that fail, and ports that go down and up, while transfers are under way. In the virtual machine these
    take its only CPU: the daemons run with the priority that the service gives them."""
    nice = re.search(r"^Nice=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert nice is not None
    pair = prefill, decode = nodes.pair((2, 2), prefix=("nice", "-n", nice[1]), timeouts=TIMEOUTS)
    routes = [Route.RELAY] if rail_devices.real() else [Route.RELAY, Route.DIRECT]  # one CPU carries no more
    breaker = Breaker(pair)
    began = time.monotonic()
    with ExitStack() as stack:
        traffics = []
        for rank, route in enumerate(routes):
            sender = stack.enter_context(prefill.connect(rank, route=route))
            receiver = stack.enter_context(decode.connect(rank))
            traffics.append(Traffic(sender, receiver, range(2), FAULT_BYTES, BLOCK, WAIT_S))
        with ExitStack() as running:
            for traffic in traffics:
                running.enter_context(traffic)
            for fault in faults(random.Random(seed)):
                for traffic in traffics:
                    traffic.rail = fault.rail
                for traffic in traffics:
                    until(traffic.under_way, "a transfer is under way", 4 * WAIT_S, pause_s=0.001)
                    traffic.check()
                breaker.carry_out(fault)
        for traffic in traffics:
            traffic.last_look(LATE_S)
        found = sum((traffic.found for traffic in traffics), Found())
        assert prefill.peer_states() == {decode.session: "connected"}
    taken, rebuilt = times(prefill.log, r"rail\d"), times(prefill.log, "its own device")
    with capsys.disabled():
        print(
            f"\n{breaker.kills} kills + {breaker.flaps} port flaps ({FAULTS}) in {found.transfers} transfers,"
            f" {time.monotonic() - began:.0f} s: lost {found.lost} B (0), wrong {found.wrong} B (0), late {found.late}"
            f" B (0), hangs {found.hangs} (0); {shown_times('taken over', taken, TAKEN_OVER_MS)};"
            f" {shown_times('rebuilt', rebuilt, REBUILT_MS)}"
        )
    assert (breaker.kills, breaker.flaps) == (FAULTS // 2, FAULTS // 2)
    assert (found.lost, found.wrong, found.late, found.hangs) == (0, 0, 0, 0)


# ---- withdrawal and abort ----


def test_a_region_is_taken_back_from_a_sender_that_is_silent(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        transfer = moving.begin()
        moving.begun()
        with prefill.paused():
            moving.link.destination.region.unregister(timeout=WAIT_S)
            canary = patterns.content(NBYTES, 7)
            moving.link.destination.array[:] = canary
        try:
            transfer.wait(WAIT_S)
        except TransferError as failure:
            assert failure.result is Result.REGION_GONE  # noqa: PT017
        assert (moving.link.destination.array == canary).all()
        stream(sender, receiver).once()
    assert counter(decode, "fences") > 0 or transfer.result is Result.OK


def test_what_was_aborted_before_the_sender_knew_of_the_engine_is_refused(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        receiver.receiver.abort(77)
        moving = stream(sender, receiver)
        with pytest.raises(TransferError) as failure:
            moving.begin(tag=77).wait(WAIT_S)
        assert failure.value.result is Result.ABORTED
        assert not moving.link.destination.array.any()
        moving.once()
    with prefill.connect(0) as sender, decode.connect(0) as receiver:  # another engine in the same place
        moving = stream(sender, receiver)
        moving.end(moving.begin(tag=77))


def test_what_was_aborted_while_the_daemons_were_apart_is_refused(pair: tuple[Node, Node]) -> None:
    prefill, decode = pair
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        moving = stream(sender, receiver)
        moving.once()
        with prefill.paused():
            assert sockets.cut(decode, prefill, rails=False, control=True) > 0
            until(lambda: "control connection ended" in decode.log, "the receiver knows", WAIT_S)
            receiver.receiver.abort(78, timeout=WAIT_S)
        until(lambda: prefill.peer_states() == {decode.session: "connected"}, "they have met again", WAIT_S)
        with pytest.raises(TransferError) as failure:
            moving.begin(tag=78).wait(WAIT_S)
        assert failure.value.result is Result.ABORTED
        assert not moving.link.destination.array.any()
        moving.once()


# ---- memory ----


@stand_in_only
def test_memory_that_cannot_be_registered_is_an_error_that_says_why(pair: tuple[Node, Node]) -> None:
    prefill, _ = pair
    fabric, device = prefill.fabric, prefill.devices[1]
    assert fabric is not None
    with prefill.connect(0) as client:
        fabric.fail_registration(device.address)
        with pytest.raises(RelayError, match=rf"region .* \({1 << 20} bytes\).*{device.name}") as failure:
            client.alloc(1 << 20)
        assert failure.value.code.value == "no_memory"
        before = fabric.counts(device.address, prefill.pid)
        fabric.clear()
        for _ in range(3):
            memory.make(client, 1 << 20).region.unregister()
        assert fabric.counts(device.address, prefill.pid) == before


@stand_in_only
def test_each_registration_ends_with_its_owner(nodes: Nodes) -> None:
    prefill, decode = nodes.pair((2, 2), timeouts=TIMEOUTS)
    fabric = nodes.devices.fabric
    assert fabric is not None

    def registered() -> int:
        return sum(
            fabric.counts(device.address, node.pid)["memory_regions"]
            for node in (prefill, decode)
            for device in node.devices
        )

    before = registered()
    with prefill.connect(0) as sender, decode.connect(0) as receiver:
        link = memory.link(sender, receiver, NBYTES, destination="private")
        sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES).wait(WAIT_S)
        assert registered() > before
    until(lambda: registered() == before, "nothing is registered any more")
