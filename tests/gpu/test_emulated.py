"""Emulated rails whose relay memory is GPU memory: lanes, regions that the helper reaches by their handles, and what is
let go of when."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from helpers import gpus, memory, patterns, processes, rail_devices
from helpers.gpus import Card, Control, Driver, Link, Place
from helpers.nodes import SMALL, Node, Nodes, config_text, new_instance
from helpers.raw_client import RawClient
from helpers.waiting import until

from railrelay.client import Client, PageLayout, RelayError, Result, TransferError, cuda, protocol
from railrelay.client.errors import ErrorCode
from railrelay.daemon import checks
from railrelay.daemon.config import parse

pytestmark = [pytest.mark.gpu, pytest.mark.system]

KIB = 1 << 10
BLOCKS, BLOCK_BYTES = 40, 24 * KIB
NBYTES = BLOCKS * BLOCK_BYTES


def start(
    nodes: Nodes, of_rails: Sequence[int | str], *, rate_gbit: float = 50, copies: str = "auto", **relay: object
) -> Node:
    """Rail i has its relay memory on the GPU ``of_rails[i]``."""
    instance = new_instance()
    text = config_text(
        instance, nodes.directory / f"{instance}.sock", 0, {**SMALL, "relay": {**SMALL["relay"], **relay}}
    )
    for gpu in of_rails:
        options = {"address": "127.0.0.1", "nic": "emulated", "rate_gbit": rate_gbit, "memory": "device", "gpu": gpu}
        options |= {"copies": copies}
        text += "[[rail]]\n" + "".join(f"{option} = {json.dumps(value)}\n" for option, value in options.items())
    config = nodes.directory / f"{instance}.toml"
    config.write_text(text)
    return nodes.start_file(instance, config)


def both(gpu: Card, other_gpu: Card) -> tuple[int, int]:
    return gpu.ordinal, other_gpu.ordinal


def moved(link: Link, seed: int) -> None:
    """All blocks in a random order, checked."""
    content = patterns.content(NBYTES, seed)
    link.source.write(content)
    link.destination.write(np.zeros(NBYTES, np.uint8))
    taken, put = patterns.order(BLOCKS, BLOCK_BYTES, seed)
    link.sender.write(
        link.remote, taken + np.uint64(link.source.address), put + np.uint64(link.remote.address), BLOCK_BYTES
    ).wait(20)
    assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, seed)


@pytest.mark.parametrize("rail", [0, 1])
@pytest.mark.parametrize("destination", ["gpu", "vmm", "shared"])
@pytest.mark.parametrize("source", ["gpu", "vmm", "shared", "private"])
def test_every_source_to_every_destination(
    nodes: Nodes, gpu: Card, other_gpu: Card, source: Place, destination: Place, rail: int
) -> None:
    """The sender's own rail is 0: what goes to rail 1 is relayed in the memory of that rail's GPU."""
    node = start(nodes, both(gpu, other_gpu))
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=other_gpu.ordinal, local=False) as receiver,
    ):
        link = gpus.link(
            sender,
            receiver,
            gpus.make(sender, NBYTES, source, gpu),
            gpus.make(receiver, NBYTES, destination, other_gpu, rail),
        )
        for seed in range(3):
            moved(link, seed)
        link.sender.write(link.remote, [link.source.address], [link.remote.address + 64], 64).wait(20)
        [lane] = [lane for lane in node.cli("lanes", "--all")["lanes"] if lane["bytes"] or lane["direct_bytes"]]
        assert (lane["rail"], lane["nic"]) == (rail, "emulated")
        assert bool(lane["direct_bytes"]) is (rail == 0 and source != "private")
        link.source.region.unregister(10)
        link.destination.region.unregister(10)


def test_both_directions_over_both_rails_at_once(nodes: Nodes, gpu: Card, other_gpu: Card) -> None:
    node = start(nodes, both(gpu, other_gpu))
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as first,
        node.connect(1, gpu=other_gpu.ordinal, local=False) as second,
    ):
        ends = ((first, gpu, second, other_gpu), (second, other_gpu, first, gpu))
        links = [
            gpus.link(one, other, gpus.make(one, NBYTES, "gpu", card), gpus.make(other, NBYTES, "vmm", far, rail))
            for one, card, other, far in ends
            for rail in range(2)
        ]
        content = patterns.content(NBYTES, 1)
        for link in links:
            link.source.write(content)
        for seed in range(5):
            taken, put = patterns.order(BLOCKS, BLOCK_BYTES, seed)
            transfers = [
                link.sender.write(
                    link.remote,
                    taken + np.uint64(link.source.address),
                    put + np.uint64(link.remote.address),
                    BLOCK_BYTES,
                )
                for link in links
            ]
            for transfer, link in zip(transfers, links, strict=True):
                transfer.wait(20)
                assert patterns.arrived(content, link.destination.read(), BLOCKS, BLOCK_BYTES, seed)


def test_helpers_let_go_of_memory_with_its_registration_and_its_client(nodes: Nodes, gpu: Card) -> None:
    node = start(nodes, [gpu.ordinal] * 2)
    pids = processes.children(node.pid)
    assert len(pids) == 2

    def held() -> list[tuple[int, int]]:
        return [(processes.descriptors(pid), len(Path(f"/proc/{pid}/maps").read_text().splitlines())) for pid in pids]

    def rounds(client: Client, other: Client) -> None:
        for place in ("gpu", "vmm", "shared"):
            for rail in range(2):
                source = gpus.make(client, NBYTES, place, gpu)
                link = gpus.link(client, other, source, gpus.make(other, NBYTES, place, gpu, rail))
                moved(link, 1)
                link.source.region.unregister(10)
                link.destination.region.unregister(10)
                link.remote.close()

    with node.connect(0, gpu=gpu.ordinal, local=False) as first:  # the daemon loads the driver with the first lane
        rounds(first, first)
    daemon = processes.descriptors(node.pid)
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        rounds(sender, receiver)
        before = held()
        rounds(sender, receiver)
        assert [found[0] for found in held()] == [found[0] for found in before]
        assert all(now[1] <= then[1] + 4 for now, then in zip(held(), before, strict=True))  # the allocator's
    until(lambda: processes.descriptors(node.pid) <= daemon, "the daemon holds no GPU memory")


def test_the_daemon_has_no_context(nodes: Nodes, gpu: Card) -> None:
    """It loads the driver to make memory, but a context would show as threads and memory on the GPU."""
    node = start(nodes, [gpu.ordinal])
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        threads = processes.threads(node.pid)
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "private"), gpus.make(receiver, NBYTES, "gpu", gpu)
        )
        moved(link, 1)
        assert processes.threads(node.pid) <= threads + 4  # workers of the event loop


def test_a_lane_without_room_on_the_gpu_is_refused_by_name(nodes: Nodes, gpu: Card, control: Control) -> None:  # noqa: ARG001
    node = start(nodes, [gpu.ordinal], slots=256, slot_bytes="8MiB")  # 2 GiB; the stand-in has 1 GiB
    with node.connect(0, gpu=gpu.ordinal, local=False) as sender, node.connect(1, local=False) as receiver:
        source, destination = memory.make(sender, 4096, "private"), memory.make(receiver, 4096)
        remote = sender.open(destination.offer())
        with pytest.raises(RelayError, match=rf"2147483648 bytes of memory of {gpu.uuid}") as failure:
            sender.write(remote, [source.address], [remote.address], 4096).wait(20)
        assert failure.value.code is ErrorCode.NO_MEMORY


def test_a_client_without_a_gpu_is_told_why_it_has_no_lane(nodes: Nodes, gpu: Card) -> None:
    node = start(nodes, [gpu.ordinal])
    with node.connect(0, local=False) as sender, node.connect(1, local=False) as receiver:
        source, destination = memory.make(sender, 4096, "private"), memory.make(receiver, 4096)
        remote = sender.open(destination.offer())
        with pytest.raises(RelayError, match=rf"lane of rail 0 is memory of {gpu.uuid}: connect with gpu="):
            sender.write(remote, [source.address], [remote.address], 4096).wait(20)


def test_a_killed_helper_takes_its_rail_down(nodes: Nodes, gpu: Card) -> None:
    nodes.tolerated.append("rail_down:")
    node = start(nodes, [gpu.ordinal])
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "gpu", gpu)
        )
        moved(link, 1)
        [helper] = processes.children(node.pid)
        os.kill(helper, signal.SIGKILL)
        transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
        with pytest.raises(TransferError) as failure:
            transfer.wait(20)
        assert failure.value.result is Result.RAIL_DOWN


def test_a_cuda_error_in_the_helper_takes_its_rail_down_by_name(
    nodes: Nodes,
    gpu: Card,
    control: Control,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes.tolerated.append("rail_down:")
    monkeypatch.setenv("CUDA_DRIVER_FAULT", "cuMemcpyAsync:3:700:sticky")  # ILLEGAL_ADDRESS; in children only
    node = start(nodes, [gpu.ordinal])
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "gpu", gpu)
        )
        results = set()
        for _ in range(5):
            transfer = sender.write(link.remote, [link.source.address], [link.remote.address], NBYTES)
            try:
                transfer.wait(20)
            except TransferError as failure:
                results.add(failure.result)
        assert results == {Result.RAIL_DOWN}
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in node.log


def summary(node: Node) -> str:
    """What the helper says when it ends."""
    assert node.terminate() == 0
    [line] = [line for line in node.log.splitlines() if "copies were late" in line]
    return line


def test_later_copies_make_up_for_late_ones(
    nodes: Nodes,
    gpu: Card,
    control: Control,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each copy takes up to 8 ms and 4 on average, each slice 4.2 ms at the rate."""
    monkeypatch.setenv("CUDA_DRIVER_DELAY_US", "8000")
    node = start(nodes, [gpu.ordinal], rate_gbit=8, slot_bytes="4MiB", direct_slice_bytes="4MiB")
    monkeypatch.delenv("CUDA_DRIVER_DELAY_US")
    nbytes = 64 << 20
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        link = gpus.link(
            sender, receiver, gpus.make(sender, nbytes, "gpu", gpu), gpus.make(receiver, nbytes, "gpu", gpu)
        )
        sender.write(link.remote, [link.source.address], [link.remote.address], nbytes).wait(30)
    found = re.search(r"all together by (\d+) us, of which (\d+) us were not", summary(node))
    assert found
    late_us, lost_us = int(found[1]), int(found[2])
    assert 0 <= lost_us < late_us


def test_copy_engines_alone_carry_what_a_kernel_would(nodes: Nodes, gpu: Card) -> None:
    node = start(nodes, [gpu.ordinal], copies="engines")
    with (
        node.connect(0, gpu=gpu.ordinal, local=False) as sender,
        node.connect(1, gpu=gpu.ordinal, local=False) as receiver,
    ):
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "gpu", gpu)
        )
        taken, put = patterns.order(NBYTES // 256, 256, 1)
        content = patterns.content(NBYTES, 1)
        link.source.write(content)
        sources, destinations = taken + np.uint64(link.source.address), put + np.uint64(link.remote.address)
        sender.write(link.remote, sources, destinations, 256).wait(20)
        assert patterns.arrived(content, link.destination.read(), NBYTES // 256, 256, 1)
        rows, pages = 20, NBYTES // 20 // 4096
        layouts = [
            PageLayout.strided(base, rows, pages * 4096, 4096, 4096)
            for base in (link.source.address, link.remote.address)
        ]
        reverse = np.arange(pages)[::-1]
        sender.write_pages(link.remote, layouts[0], np.arange(pages), layouts[1], reverse).wait(20)
        wanted = np.frombuffer(content, np.uint8).reshape(rows, pages, 4096)[:, ::-1]
        assert np.array_equal(np.frombuffer(link.destination.read(), np.uint8).reshape(rows, pages, 4096), wanted)
    said = summary(node)
    assert "copied by " in said
    assert "kernel" not in said


@pytest.mark.parametrize("name", ["77", "GPU-12345678-0000-0000-0000-000000000000"])
def test_a_gpu_that_is_not_there_is_named_at_start(nodes: Nodes, gpu: Card, name: str) -> None:
    options = {"nic": "emulated", "memory": "device", "gpu": name}
    text = config_text(new_instance(), nodes.directory / "x", 1, {"tcp": SMALL["tcp"], "rail": options})
    code, line = nodes.fails(text)
    assert code == 2
    known = ", ".join(cuda.uuid_of(ordinal) for ordinal in range(cuda.count()))
    assert gpu.uuid in known
    wanted = f"rail[0].gpu: GPU {name}: this process sees {known}; name one of them"
    assert wanted in line
    path = nodes.directory / "unknown-gpu.toml"
    path.write_text(text)
    checked, looked = (
        subprocess.run(
            [sys.executable, "-m", f"railrelay.{words[0]}", *words[1:], "--config", str(path)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        for words in (("daemon.main", "--check"), ("client.cli", "doctor", "--instance", "none-such"))
    )
    assert checked.returncode == 2
    assert wanted in checked.stderr
    assert looked.returncode == 1
    assert wanted in looked.stdout


def test_doctor_names_the_gpu_of_relay_memory(gpu: Card) -> None:
    options = '[[rail]]\nnic = "emulated"\naddress = "127.0.0.1"\nmemory = "device"\ngpu = 0'
    found = checks.cuda_driver(checks.Node(parse(options)))
    assert found.result == checks.OK
    assert f"rail 0: {gpu.uuid}" in found.seen


def test_without_cuda_the_option_is_named_at_start(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "__init__.py").write_text('raise ImportError("none here")\n')
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    options = {"nic": "emulated", "memory": "device", "gpu": 0}
    text = config_text(new_instance(), nodes.directory / "x", 1, {"tcp": SMALL["tcp"], "rail": options})
    code, line = nodes.fails(text)
    assert code == 2
    assert "rail[0].gpu: GPU 0: GPU memory needs cuda-python (none here); install railrelay[cuda]" in line


@pytest.mark.parametrize("route", ["relay", "direct", "matched"])
def test_what_only_an_emulated_nic_reaches_goes_through_a_lane_on_a_tcp_rail(
    nodes: Nodes, gpu: Card, route: str
) -> None:
    """The address that the daemon has for it means nothing to a socket."""
    instance = new_instance()
    text = config_text(instance, nodes.directory / f"{instance}.sock", 0, SMALL)
    text += f'[[rail]]\naddress = "127.0.0.1"\nnic = "emulated"\nmemory = "device"\ngpu = {gpu.ordinal}\n'
    text += '[[rail]]\naddress = "127.0.0.1"\n'
    config = nodes.directory / f"{instance}.toml"
    config.write_text(text)
    mixed, plain = nodes.start_file(instance, config), nodes.start(2)
    with mixed.connect(1, gpu=gpu.ordinal, route=route) as sender, plain.connect(1) as receiver:
        source = gpus.make(sender, NBYTES, "gpu", gpu, 0)
        link = gpus.link(sender, receiver, source, gpus.make(receiver, NBYTES, "shared"))
        moved(link, 1)
        assert sender.counters()["slots"]


@rail_devices.every_nic()
def test_a_client_that_inherits_a_lane_reads_nothing_of_the_one_before(
    nodes: Nodes, gpu: Card, driver: Driver, nic: str
) -> None:
    """Nor of whoever had the memory before that: what the driver hands out is not zeroed by itself (the stand-in's is
    full of 0xdb). "tcp" stands for the emulated NIC."""
    if nic == "verbs":
        if driver.is_real:
            pytest.skip("the stand-in for verbs takes no dma-buf of a real GPU")
        nodes.environment["CUDA_DRIVER_DMABUF"] = "1"
        node = nodes.start(1, rail={"memory": "device", "gpu": gpu.ordinal})
    else:
        node = start(nodes, [gpu.ordinal])
    for rank in range(3):
        with RawClient(node.socket, rank) as raw:
            raw.attach()
            leased, fds = raw.ask(protocol.LeaseLane(raw.new_id(), 0), protocol.Leased)
            assert leased.memory == "device"
            lane = gpu.open_vmm(fds[0], leased.bytes)
            found = gpu.read(lane.address, leased.bytes)
            gpu.fill(lane.address, 0x10 + rank, leased.bytes)  # KV that it leaves behind
            gpu.unmap(lane)
        assert not np.count_nonzero(found), f"{np.count_nonzero(found)} foreign bytes"
        until(lambda: not node.cli("clients")["clients"], "the lane is free")
