"""The command railrelayd: options, logging, signals, exit codes (0 clean, 1 other error, 2 configuration, 3 instance
taken, 4 no memory)."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from railrelay.daemon import addresses, authentication, config, tls
from railrelay.daemon.conductor import Conductor
from railrelay.daemon.config import Config, ConfigError
from railrelay.daemon.instance import InstanceTaken
from railrelay.daemon.logs import LogHandler
from railrelay.shm_layout import faults
from railrelay.shm_layout.segment import NoSharedMemory

log = logging.getLogger("railrelay")


def main() -> int:
    options = _options()
    if options.print_example:
        sys.stdout.write(config.EXAMPLE)
        return 0
    under_systemd = "JOURNAL_STREAM" in os.environ
    logging.basicConfig(
        handlers=[LogHandler()],
        level=logging.DEBUG if options.verbose else logging.INFO,
        format=f"{'' if under_systemd else '%(asctime)s '}railrelayd[%(process)d] %(levelname)s %(message)s",
    )
    try:
        loaded = config.load(options.config)
        if options.check:
            authentication.Secrets(loaded.security).read()
            tls.accepting_context(loaded.security)
            for end in tls.ends(loaded.security):
                if end.soon:
                    log.warning("%s; %s", end, end.todo)
            for rail in range(len(loaded.rail)):
                loaded.gpu_of(rail)
            addresses.check(loaded)
            if unreachable := addresses.unreachable(loaded):
                log.warning("%s", unreachable)
            log.info("%s: good", options.config or "configuration")
            return 0
        if loaded.node.fault:
            faults.arm(loaded.node.fault)
        _raise_descriptor_limit()
        uvloop.run(_serve(loaded, options.ready_fd))
    except ConfigError as failure:
        log.critical("%s: %s", options.config or "configuration", failure)
        return 2
    except InstanceTaken as failure:
        log.critical("%s", failure)
        return 3
    except NoSharedMemory as failure:
        log.critical("%s", failure.strerror)
        return 4
    except MemoryError as failure:
        log.critical("%s", failure)
        return 4
    except OSError as failure:
        log.critical("%s", failure.strerror or failure)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="railrelayd", description="Per-node relay daemon for KV-cache transfer.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; without one: one rail on 127.0.0.1")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    parser.add_argument("--print-example", action="store_true", help="print a configuration with all options and exit")
    parser.add_argument(
        "--ready-fd", type=_writable, metavar="N", help="write one line of JSON to this descriptor once ready"
    )
    parser.add_argument("--verbose", action="store_true", help="log more")
    return parser.parse_args()


def _writable(text: str) -> int:
    """A descriptor that whoever started this process has passed on."""
    wrong = argparse.ArgumentTypeError(f"{text}: expected the number of an open descriptor that can be written to")
    try:
        fd = int(text)
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, ValueError, OverflowError):
        raise wrong from None
    if mode == os.O_RDONLY:
        raise wrong
    return fd


def _raise_descriptor_limit() -> None:
    """To what the system allows: every shared region keeps one descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(loaded: Config, ready_fd: int | None) -> None:
    loop = asyncio.get_running_loop()
    conductor = Conductor(loaded)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await conductor.start()
    loop.set_exception_handler(conductor.on_exception)
    try:
        _say_ready(conductor, ready_fd)
        await stop.wait()
        _notify("STOPPING=1")
        await conductor.drain()
    finally:
        await conductor.close()
    log.info("ended")


def _say_ready(conductor: Conductor, ready_fd: int | None) -> None:
    facts = {
        "instance": conductor.config.node.instance,
        "session": conductor.session,
        "socket": str(conductor.socket_path),
    }
    log.info("ready instance=%(instance)s session=%(session)s socket=%(socket)s", facts)
    if ready_fd is not None:
        try:
            with open(ready_fd, "wb") as ready:
                ready.write(msgspec.json.encode(facts) + b"\n")
        except OSError as failure:
            raise OSError(failure.errno, f"--ready-fd {ready_fd}: {failure.strerror}; its reader has gone") from None
    _notify("READY=1")


def _notify(state: str) -> None:
    """Tells systemd, if it started us."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)


if __name__ == "__main__":
    sys.exit(main())
