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


def test_a_name_that_is_not_found_after_the_time_out_is_no_internal_error() -> None:
    """In a process of its own: the loop's threads stay."""
    ended = subprocess.run(
        [sys.executable, "-c", LOOKS_UP], check=False, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert ended.stdout.splitlines() == ["gave up"] * 4 + ["not found"] * 8, ended.stderr
