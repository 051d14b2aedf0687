"""Closing of descriptors that came from clients: who sends some whose close takes long waits alone."""

from __future__ import annotations

import contextlib
import os
import select
import socket

from helpers.sockets import lingering
from helpers.waiting import LIMIT_S, until

from railrelay.daemon import descriptors


def ends(receiver: int) -> None:
    """Waits until nobody has the other end of the pipe."""
    with open(receiver, "rb") as pipe:
        assert select.select([pipe], [], [], LIMIT_S)[0]
        assert not pipe.read()


def test_closes_of_one_process_that_wait_hold_up_no_other() -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(lingering()) for _ in range(32)]
        descriptors.discard(slow, 1)
        receiver, sender = os.pipe()
        descriptors.discard([sender], 2)
        ends(receiver)
        assert descriptors.waiting(1) == len(slow) - 1
        assert descriptors.waiting(2) == 0
    until(lambda: not any(os.path.exists(f"/proc/self/fd/{fd}") for fd in slow), "they are closed in the end")


def test_a_socket_with_descriptors_unread_in_it_hangs_up_at_once() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.settimeout(LIMIT_S)
    with lingering() as fd:
        socket.send_fds(theirs, [b"unread"], [fd])
        os.close(fd)
        descriptors.hang_up(ours, 3)
        with contextlib.suppress(ConnectionResetError):
            assert not theirs.recv(1)
    theirs.close()
