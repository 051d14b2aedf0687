"""The child's side of helpers.engines: an engine process that obeys. One JSON request a line on stdin, one answer a
line on stdout. Run as ``python -m helpers.engine_process``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from helpers import patterns
from railrelay.client import Buffer, Client, RelayError, RemoteRegion, Transfer

CHILD_S = 60


class EngineProcess:
    """A method a request; arguments and results are JSON."""

    def __init__(self) -> None:
        self._client: Client | None = None
        self._arrays: dict[str, patterns.Bytes] = {}
        self._regions: dict[str, Any] = {}
        self._remotes: dict[str, RemoteRegion] = {}
        self._transfers: dict[str, Transfer] = {}

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    def connect(self, socket: str, rank: int = 0, route: str = "relay") -> str:
        self._client = Client.connect(socket, rank=rank, route=route, name=f"engine-{rank}")
        return self._client.session

    def memory(self, name: str, nbytes: int, kind: str = "shared", seed: int | None = None) -> str:
        """Content of ``seed``, or zeroes; its offer in hexadecimal."""
        if kind == "shared":
            buffer = self.client.alloc(nbytes)
            self._arrays[name], self._regions[name] = buffer.array, buffer
        else:
            self._arrays[name] = np.zeros(nbytes, np.uint8)
            self._regions[name] = self.client.register(self._arrays[name])
        if seed is not None:
            self._arrays[name][:] = patterns.content(nbytes, seed)
        offer: bytes = self._regions[name].offer()
        return offer.hex()

    def fill(self, name: str, seed: int) -> None:
        self._arrays[name][:] = patterns.content(len(self._arrays[name]), seed)

    def wipe(self, name: str) -> None:
        self._arrays[name][:] = 0

    def holds(self, name: str, seed: int) -> bool:
        """Whether all of it is the content of ``seed``."""
        return bool((self._arrays[name] == patterns.content(len(self._arrays[name]), seed)).all())

    def touched(self, name: str, stride: int = 1) -> int:
        """How many bytes, of every ``stride``-th, are not zero."""
        return int(np.count_nonzero(self._arrays[name][::stride]))

    def arrived(self, name: str, source_seed: int, blocks: int, block_bytes: int, seed: int) -> bool:
        source = patterns.content(blocks * block_bytes, source_seed)
        return patterns.arrived(source, self._arrays[name], blocks, block_bytes, seed)

    def wait_attached(self, timeout: float = 30.0) -> int:
        return self.client.wait_attached(timeout)

    def offer(self, name: str) -> str:
        offer: bytes = self._regions[name].offer()
        return offer.hex()

    def open(self, name: str, offer: str) -> None:
        self._remotes[name] = self.client.open(bytes.fromhex(offer))

    def write(
        self,
        transfer: str,
        source: str,
        remote: str,
        blocks: int,
        block_bytes: int,
        seed: int = 1,
        tag: int = 0,
        timeout: float = 30.0,
        notify: str | None = None,
    ) -> None:
        taken, put = patterns.order(blocks, block_bytes, seed)
        target = self._remotes[remote]
        self._transfers[transfer] = self.client.write(
            target,
            taken + np.uint64(self._regions[source].address),
            put + np.uint64(target.address),
            block_bytes,
            tag=tag,
            timeout=timeout,
            notify=notify.encode() if notify is not None else None,
        )

    def wait(self, transfer: str, timeout: float = 30.0) -> None:
        self._transfers[transfer].wait(timeout)

    def state(self, transfer: str) -> dict[str, Any]:
        found = self._transfers[transfer]
        result = found.result
        return {
            "done": found.done,
            "settled": found.settled,
            "result": result.name if result is not None else None,
            "bytes": found.bytes,
        }

    def counters(self) -> dict[str, int]:
        return self.client.counters()

    def unregister(self, name: str, timeout: float = 5.0) -> None:
        found = self._regions[name]
        (found.region if isinstance(found, Buffer) else found).unregister(timeout)

    def cancel(self, transfer: str, timeout: float = 10.0) -> None:
        self._transfers[transfer].cancel(timeout=timeout)

    def abort(self, tag: int, timeout: float = 10.0) -> int:
        return self.client.receiver.abort(tag, timeout)

    def notification(self, timeout: float = 20.0) -> list[Any]:
        found = self.client.receiver.notifications.get(timeout)
        return [found.tag, found.payload.decode(), found.session]

    def close(self) -> None:
        self.client.close()

    def hammer(self, source: str, remote: str, block_bytes: int) -> None:
        """Writes over and over in the background, until the process ends."""

        def run() -> None:
            source_at, target = self._regions[source], self._remotes[remote]
            blocks = min(source_at.nbytes, target.nbytes) // block_bytes
            offsets = np.arange(blocks, dtype=np.uint64) * np.uint64(block_bytes)
            while True:
                moved = self.client.write(
                    target, offsets + np.uint64(source_at.address), offsets + np.uint64(target.address), block_bytes
                )
                moved.wait(30)

        threading.Thread(target=run, daemon=True).start()

    def fork(self) -> int:
        """A child that holds everything that it inherits, and ends some time; its pid."""
        child = os.fork()
        if child:
            return child
        signal.alarm(CHILD_S)
        while True:
            time.sleep(CHILD_S)

    def use_after_fork(self, source: str, remote: str) -> str:
        """The code of the error that a forked child gets when it writes with this process's client."""
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(CHILD_S)
            try:
                self.write("forked", source, remote, 1, 4096)
                said = "nothing"
            except RelayError as failure:
                said = failure.code.value
            os.write(writing, said.encode())
            os._exit(0)
        os.close(writing)
        said = os.read(reading, 100).decode()
        os.close(reading)
        os.waitpid(child, 0)
        return said

    def exit(self, code: int) -> None:
        """At once, without closing anything."""
        os._exit(code)


def serve(engine: EngineProcess) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            answer = {"result": getattr(engine, request["verb"])(**request["arguments"])}
        except RelayError as failure:
            answer = {"error": type(failure).__name__, "code": failure.code.value, "text": str(failure)}
        except Exception as failure:  # noqa: BLE001
            answer = {"error": type(failure).__name__, "code": "", "text": str(failure)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(EngineProcess())
