"""The child's side of helpers.engines with a GPU. Run as ``python -m helpers.gpu_engine``."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import numpy as np

from helpers import gpus, patterns
from helpers.engine_process import EngineProcess, serve
from railrelay.client import Client, RelayError


class GpuEngine(EngineProcess):
    def __init__(self) -> None:
        super().__init__()
        self._card: gpus.Card | None = None
        self._memory: dict[str, gpus.Memory] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._wrong: list[str] = []
        self._rounds = 0

    def connect(self, socket: str, rank: int = 0, route: str = "relay", gpu: int = 0, copy: str = "auto") -> str:
        from railrelay.client.gpu_memory import GpuOptions

        if self._card is None:
            self._card = gpus.Card(gpu)
        options = GpuOptions(copy=copy)
        self._client = Client.connect(socket, rank=rank, route=route, gpu=self._card.uuid, gpu_options=options)
        return self._client.session

    def memory(self, name: str, nbytes: int, kind: str = "gpu", seed: int | None = None) -> str:
        self._memory[name] = made = gpus.make(self.client, nbytes, kind, self._card)  # type: ignore[arg-type]
        self._regions[name] = made.owner
        if seed is not None:
            made.write(patterns.content(nbytes, seed))
        return made.offer().hex()

    def fill(self, name: str, seed: int) -> None:
        self._memory[name].write(patterns.content(self._memory[name].nbytes, seed))

    def arrived(self, name: str, source_seed: int, blocks: int, block_bytes: int, seed: int) -> bool:
        source = patterns.content(blocks * block_bytes, source_seed)
        return patterns.arrived(source, self._memory[name].read(), blocks, block_bytes, seed)

    def fault(self, function: str, at: int, error: int, sticky: bool = False) -> None:
        gpus.Control.here().fault(function, at, error, sticky=sticky)

    def delay(self, most_us: int) -> None:
        gpus.Control.here().delay(most_us)

    def hold(self) -> None:
        """Until the process ends."""
        gpus.Control.here().held().__enter__()

    def counts(self) -> dict[str, int]:
        return gpus.Control.here().counts()

    def counters(self) -> dict[str, int]:
        return self.client.counters()

    def uuid(self) -> str:
        assert self._card is not None
        return self._card.uuid

    def card_works(self) -> bool:
        """The context is healthy: memory of the engine's own can be made, written and read."""
        assert self._card is not None
        address = self._card.alloc(4096)
        self._card.write(address, np.full(4096, 3, np.uint8))
        return bool((self._card.read(address, 4096) == 3).all())

    def stress(self, source: str, remote: str, thread: int, seed: int, words: int, stride_words: int) -> None:
        """A thread that sends stamped lines into a part of the remote memory over and over; see test_stress.py."""

        def run() -> None:
            memory, target = self._memory[source], self._remotes[remote]
            part = words * 8
            begin = thread * stride_words * 8
            rng = np.random.default_rng(seed)
            while not self._stop.is_set():
                piece = int(rng.choice([256, 1152 // 64 * 64, 4096, 24 << 10]))
                blocks = part // piece
                order = rng.permutation(blocks).astype(np.uint64) * np.uint64(piece)
                offsets = order + np.uint64(begin)
                self.client.write(
                    target, offsets + np.uint64(memory.address), offsets + np.uint64(target.address), piece, timeout=60
                ).wait(60)
                self._rounds += 1

        def guarded() -> None:
            try:
                run()
            except Exception as failure:  # noqa: BLE001
                self._wrong.append(f"thread {thread}: {failure!r}")

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def stop(self) -> dict[str, Any]:
        self._stop.set()
        for thread in self._threads:
            thread.join(70)
        self._threads.clear()
        self._stop.clear()
        wrong, self._wrong = self._wrong, []
        rounds, self._rounds = self._rounds, 0
        return {"wrong": wrong, "rounds": rounds}

    def stamp(self, name: str, who: int) -> None:
        """Each 64-byte line says in all its words whose it is and which."""
        self._memory[name].write(gpus.stamped(self._memory[name].nbytes, who))

    def is_stamped(self, name: str, who: int, part_bytes: int, of_bytes: int) -> str:
        """What is wrong with the lines of each part; "" if nothing."""
        found, expected = self._memory[name].read(), gpus.stamped(self._memory[name].nbytes, who)
        wrong = found != expected
        for begin in range(0, len(found), of_bytes):
            bad = np.nonzero(wrong[begin : begin + part_bytes] & (found[begin : begin + part_bytes] != 0))[0]
            if len(bad):
                return f"{len(bad)} bytes wrong from {begin + int(bad[0])} on"
        return ""

    def close_client(self) -> None:
        self.client.close()

    def rename(self, old: str, new: str) -> None:
        """Memory, region and remote region."""
        for table in (self._memory, self._regions, self._remotes):
            if old in table:
                table[new] = table[old]  # type: ignore[assignment]

    def close(self) -> None:
        with suppress(RelayError):
            super().close()
        if self._card is not None:
            self._card.close()
            self._card = None


if __name__ == "__main__":
    serve(GpuEngine())
