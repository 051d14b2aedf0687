"""How many queue pairs a NIC has: one for each other node by relay, one for each rail of each by the direct route."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from helpers import memory, rail_devices
from helpers.nodes import Node, Nodes

from railrelay.client import Client, Route

pytestmark = [
    pytest.mark.system,
    pytest.mark.parametrize("nic", [pytest.param("verbs", marks=rail_devices.marks("verbs"))]),
]

RAILS = 2
NBYTES = 65536
LIMIT_S = 60


def queue_pairs(node: Node, rail: int) -> int:
    """Of the daemon, on the device of that rail."""
    device = node.devices[rail]
    if node.fabric is not None:
        return sum(found.pid == node.pid for found in node.fabric.queue_pairs(device.address))
    command = ["rdma", "-j", "resource", "show", "qp", "link", f"{device.name}/1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    threads = {int(thread) for thread in os.listdir(f"/proc/{node.pid}/task")}  # the kernel names that which made it
    return sum(found.get("pid") in threads and found["type"] == "RC" for found in json.loads(shown))


def send_everywhere(senders: list[Client], others: list[Node], *, rails: int = RAILS) -> None:
    """From each rank to each rail of each other node."""
    for node in others:
        with node.connect(0) as receiver:
            for sender in senders:
                source = memory.make(sender, NBYTES)
                for rail in range(rails):
                    remote = sender.open(memory.make(receiver, NBYTES, rail=rail).offer())
                    sender.write(remote, [source.address], [remote.address], NBYTES).wait(LIMIT_S)


@pytest.mark.skipif(rail_devices.real(), reason="the kernel does not show what a queue pair's packets are marked with")
def test_packets_of_both_ends_have_the_traffic_class_that_is_configured(nodes: Nodes) -> None:
    sending, receiving = nodes.pair((1, 1), verbs={"traffic_class": 106, "service_level": 3})
    with sending.connect(0) as sender:
        send_everywhere([sender], [receiving], rails=1)
        assert sending.fabric is not None
        marked = [
            (found.pid, found.traffic_class, found.service_level)
            for node in (sending, receiving)
            for found in sending.fabric.queue_pairs(node.devices[0].address)
        ]
    assert sorted(marked) == sorted((node.pid, 106, 3) for node in (sending, receiving))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_queue_pairs_of_a_nic_grow_with_the_nodes_and_not_with_their_rails(
    nodes: Nodes, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    devices = nodes.devices.all
    sending, others_have = devices[:RAILS], devices[RAILS : 2 * RAILS]
    node = nodes.start(sending)
    others = [nodes.start(others_have) for _ in range(count - 1)]
    found = []
    for route in (Route.RELAY, Route.DIRECT):
        with node.connect(0, route=route) as first, node.connect(1, route=route) as second:
            send_everywhere([first, second], others)
            found.append([queue_pairs(node, rail) for rail in range(RAILS)])
    relay, direct = found
    with capsys.disabled():
        print(f"\n{count} nodes of {RAILS} rails: queue pairs of a NIC {relay[0]} by relay, {direct[0]} directly")
    assert relay == [len(others)] * RAILS
    assert direct == [len(others) * RAILS] * RAILS
