"""The connecting end of a control connection."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from helpers.waiting import LIMIT_S

LOOKS_UP: Final = """
import asyncio, gc, uvloop
from railrelay.daemon import dial

async def gives_up(host):
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, facts: print(facts["message"]))
    for _ in range(4):  # as many as threads that look names up
        try:
            await dial.connect(f"{host}:1", None, lambda: None, 0.0)
        except TimeoutError:
            print("gave up")
    for _ in range(8):  # behind them
        try:
            await loop.getaddrinfo(host, 1)
        except OSError:
            print("not found")
    gc.collect()

uvloop.run(gives_up("no-such-host.invalid"))
"""


MEETS_RESETS = """
import asyncio, gc, socket, ssl, struct, sys, uvloop, warnings
from railrelay.daemon import dial
from railrelay.daemon.link import Link

async def meets_resets():
    tls = ssl.create_default_context()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        session = f"127.0.0.1:{server.getsockname()[1]}"

        async def reset():
            while True:
                accepted, _ = await asyncio.get_running_loop().sock_accept(server)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()

        resets = asyncio.ensure_future(reset())
        for number in range(200):
            try:
                await dial.connect(session, tls, lambda: Link(lambda *_, **__: None), 5 if number % 2 else 0.0005)
            except Exception:
                pass
        resets.cancel()
        await asyncio.wait([resets])
    gc.collect()

warnings.simplefilter("always")
warnings.showwarning = lambda message, *_: print(message)
uvloop.run(meets_resets())
print("done")
"""


def test_a_name_that_is_not_found_after_the_time_out_is_no_internal_error() -> None:
    """In a process of its own: the loop's threads stay."""
    ended = subprocess.run(
        [sys.executable, "-c", LOOKS_UP], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.stdout.splitlines() == ["gave up"] * 4 + ["not found"] * 8, ended.stderr


def test_a_descriptor_that_the_loop_has_closed_is_not_closed_again() -> None:
    """A peer that resets the connection at once: the socket would close whatever has its number by then."""
    ended = subprocess.run(
        [sys.executable, "-c", MEETS_RESETS], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.stdout.splitlines() == ["done"], ended.stderr
