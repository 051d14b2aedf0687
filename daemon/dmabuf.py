"""The dma-buf of relay memory on a GPU, by which a verbs device registers it. Its export needs a CUDA context, which
the daemon never has: a process of its own makes one, zeroes the new memory (the driver does not promise that nothing of
its last owner is in it), exports, hands the descriptor over and ends."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import sys
from typing import Final

from railrelay.client.errors import ErrorCode, RelayError

EXPORT_S: Final = 60.0  # a GPU's context may take seconds
TEXT_BYTES: Final = 4096


async def export(fd: int, nbytes: int, gpu: str) -> int:
    """A dma-buf descriptor of new VMM memory of the GPU with this UUID, which is zeroed. RelayError."""
    text, exported = "", -1
    try:
        with contextlib.ExitStack() as held:
            kept = os.dup(fd)  # it may be closed meanwhile
            held.callback(os.close, kept)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            held.callback(ours.close)
            held.callback(theirs.close)
            ours.setblocking(False)
            command = [sys.executable, "-P", "-m", "railrelay.daemon.dmabuf", str(kept), str(nbytes), gpu]
            process = await asyncio.create_subprocess_exec(
                *command, str(theirs.fileno()), stdin=asyncio.subprocess.DEVNULL, pass_fds=(kept, theirs.fileno())
            )
            theirs.close()
            try:
                async with asyncio.timeout(EXPORT_S):
                    await _readable(ours)
                text, exported = _received(ours)
            except TimeoutError:
                text = f"no answer within {EXPORT_S:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())
    except OSError as failure:
        text = str(failure)
    except BaseException:
        if exported >= 0:
            os.close(exported)
        raise
    if exported < 0:
        text = text or "its helper process has ended"
        raise RelayError(ErrorCode.NO_MEMORY, f"relay memory of {gpu}: no dma-buf: {text}")
    return exported


async def _readable(end: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(end.fileno(), tell)
    try:
        await ready
    finally:
        loop.remove_reader(end.fileno())


def _received(end: socket.socket) -> tuple[str, int]:
    """(text, -1) or ("", descriptor)"""
    try:
        text, fds, _, _ = socket.recv_fds(end, TEXT_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
    except OSError as failure:
        return str(failure), -1
    return text.decode(errors="replace"), fds[0] if fds else -1


def main() -> int:
    fd, nbytes, gpu, answer = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    from railrelay.client import cuda

    with socket.socket(fileno=answer) as daemon:
        try:
            device = cuda.Gpu(gpu)
            memory = device.open_vmm(fd, nbytes)
            device.fill(memory.address, 0, nbytes)
            with device.current():
                exported = cuda.dmabuf(memory.address, nbytes)
        except (RelayError, OSError) as failure:
            daemon.send(str(failure).encode()[:TEXT_BYTES])
            return 1
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [exported]))
        daemon.sendmsg([b"exported"], [rights])
    return 0


if __name__ == "__main__":
    sys.exit(main())
