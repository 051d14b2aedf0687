"""What there is without parts of CUDA: no cuda-python, no driver, no GPU, no NVRTC, a driver without copy batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.engines import Engines
from helpers.gpus import Driver
from helpers.nodes import Node, Nodes
from helpers.processes import TESTS

pytestmark = [pytest.mark.gpu, pytest.mark.system]

_PROGRAM = """
import json, sys
import numpy as np
from railrelay.client import Client, RelayError

first, second, hidden = sys.argv[1], sys.argv[2], sys.argv[3:]
for name in hidden:
    sys.modules[name] = None
said = {}
with Client.connect(first, rank=0) as sender, Client.connect(second, rank=0) as receiver:
    source, destination = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
    region, target = sender.register(source), sender.open(receiver.register(destination).offer())
    sender.write(target, [region.address], [target.address], 1 << 20).wait(20)
    said["host"] = bool((source == destination).all())

    class Tensor:
        __cuda_array_interface__ = {"shape": (64,), "typestr": "<f4", "data": (1 << 40, False), "version": 3}

    for name, what in (("tensor", Tensor()), ("pointer", (int(np.zeros(64, np.uint8).ctypes.data), 64))):
        try:
            said[name] = sender.register(what).device
        except RelayError as failure:
            said[name] = str(failure)
try:
    Client.connect(first, rank=0, gpu=0).close()
    said["connect"] = "works"
except RelayError as failure:
    said["connect"] = str(failure)
print(json.dumps(said))
"""


def run(nodes: Nodes, environment: Mapping[str, str], *hidden: str) -> dict[str, object]:
    first, second = nodes.pair()
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    found = subprocess.run(
        [sys.executable, "-c", _PROGRAM, first.socket, second.socket, *hidden],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=variables,
    )
    assert found.returncode == 0, found.stderr
    said: dict[str, object] = json.loads(found.stdout)
    return said


def test_without_cuda_python_host_memory_works(nodes: Nodes) -> None:
    said = run(nodes, {}, "cuda", "cuda.bindings")
    assert said["host"] is True
    assert said["pointer"] == ""
    for way in ("tensor", "connect"):
        assert "GPU memory needs cuda-python" in str(said[way])
        assert "install railrelay[cuda]" in str(said[way])


def test_without_a_driver_host_memory_works(nodes: Nodes, driver: Driver) -> None:
    if driver.is_real:
        pytest.skip("this machine has a driver")
    said = run(nodes, {"LD_LIBRARY_PATH": ""})
    assert said["host"] is True
    assert "GPU memory needs the NVIDIA driver" in str(said["tensor"])
    assert "GPU memory needs the NVIDIA driver" in str(said["connect"])


def test_without_a_gpu_host_memory_works(nodes: Nodes, driver: Driver) -> None:
    said = run(nodes, {**driver.environment, "CUDA_VISIBLE_DEVICES": "", "CUDA_DRIVER_GPUS": "0"})
    assert said["host"] is True
    assert "CUDA_ERROR_NO_DEVICE" in str(said["connect"])


def relayed(nodes: Nodes, engines: Engines, environment: Mapping[str, str], copy: str = "auto") -> dict[str, int]:
    """Counters of the sender after a transfer that must arrive."""
    first, second = nodes.pair()
    sender = engines.start_gpu(first, environment=environment, copy=copy)
    receiver = engines.start_gpu(second, environment=environment)
    sender.ask("memory", name="a", nbytes=1 << 20, seed=1)
    sender.ask("open", name="a", offer=receiver.ask("memory", name="a", nbytes=1 << 20))
    for blocks, size in ((4096, 256), (64, 16 << 10)):
        sender.ask("write", transfer="t", source="a", remote="a", blocks=blocks, block_bytes=size, seed=2)
        sender.ask("wait", transfer="t")
        assert receiver.ask("arrived", name="a", source_seed=1, blocks=blocks, block_bytes=size, seed=2)
    counters: dict[str, int] = sender.ask("counters")
    return counters


def stand_in(driver: Driver) -> dict[str, str]:
    if driver.is_real:
        pytest.skip("a real driver has all its parts")
    return dict(driver.environment)


def test_without_nvrtc_the_copy_engine_does_all(nodes: Nodes, engines: Engines, driver: Driver, tmp_path: Path) -> None:
    environment = stand_in(driver)
    alone = tmp_path / "driver"
    alone.mkdir()
    (alone / "libcuda.so.1").symlink_to(Path(environment["LD_LIBRARY_PATH"].split(":")[0]) / "libcuda.so.1")
    counters = relayed(nodes, engines, {"LD_LIBRARY_PATH": str(alone)})
    assert counters["gpu_kernel_pieces"] == 0
    assert counters["gpu_batch_pieces"] + counters["gpu_strided_pieces"] > 4000
    assert "no gather kernel, the copy engine does all" in engines.started[0].log.read_text()


def test_a_kernel_that_does_not_compile(nodes: Nodes, engines: Engines, driver: Driver) -> None:
    counters = relayed(nodes, engines, {**stand_in(driver), "CUDA_DRIVER_NVRTC_FAILS": "1"})
    assert counters["gpu_kernel_pieces"] == 0
    assert "NVRTC" in engines.started[0].log.read_text()


def test_a_driver_without_copy_batches(nodes: Nodes, engines: Engines, driver: Driver) -> None:
    counters = relayed(nodes, engines, {**stand_in(driver), "CUDA_DRIVER_VERSION": "12060"}, copy="batch")
    assert counters["gpu_batch_pieces"] > 4000


def test_gpus_that_the_engine_hides(nodes: Nodes, engines: Engines, driver: Driver) -> None:
    """CUDA_VISIBLE_DEVICES changes ordinals, not what a GPU is called."""
    environment = {**stand_in(driver), "CUDA_VISIBLE_DEVICES": "1"}
    node: Node = nodes.start()
    engine = engines.start_gpu(node, environment=environment)
    assert engine.ask("uuid").endswith("1")
