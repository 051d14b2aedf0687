"""One run of the virtual machine: a command on rails of soft-RoCE.

The machine is emulated (TCG), so it needs no privileges, and times in it mean little. It sees the host's files at their
own paths and can change none of them; it has no network but its rails: veth pairs vK and pK, all pK in one bridge, and
the RDMA device rxeK on vK."""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

from vm.kernel import Kernel

GUEST: Final = Path(__file__).resolve().parent / "guest"
OVER_LIMIT: Final = 124
NOT_BOOTED: Final = 125
CRASHED: Final = 126
BOOT_LIMIT_S: Final = 420  # takes 10 s, or 120 s beside others on the same cores
_MEMORY_MIB: Final = 4096
_KERNEL_OPTIONS: Final = (
    "console=ttyS0 quiet panic=-1 mitigations=off apparmor=0 audit=0 random.trust_cpu=on no_timer_check"
    " nokaslr norandmaps"  # what is at the same place in all processes is translated once
)
# Kernel and libraries choose what is fast in hardware: emulated, carry-less products take the checksum of a packet, and
# "rep movsb" a copy, several times as long as plain code.
_CPU: Final = "max,la57=off,pclmulqdq=off,erms=off,avx=off,avx2=off"
_TAIL_LINES: Final = 25


def addresses(rails: int) -> dict[str, str]:
    """Of the rails' RDMA devices."""
    return {f"rxe{rail}": f"10.77.0.{rail + 1}" for rail in range(rails)}


class Machine:
    def __init__(self, kernel: Kernel, folder: Path, rails: int) -> None:
        """``folder`` is empty, and /run/vm inside."""
        self.kernel = kernel
        self.folder = folder
        self.rails = rails
        self.boot_s: float | None = None

    def run(self, command: str, environment: Mapping[str, str], limit_s: float, output: BinaryIO) -> int:
        """Its exit status, or OVER_LIMIT, NOT_BOOTED or CRASHED. What it prints goes to ``output`` while it runs."""
        self._write(command, environment)
        reader, writer = os.pipe()
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((self.folder / "qemu.log").open("wb"))
            stack.callback(os.close, reader)
            try:
                process = subprocess.Popen(
                    self._qemu(writer), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[writer]
                )
            finally:
                os.close(writer)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ended = self._follow(reader, output, began, limit_s)
        if self.boot_s is None:
            return NOT_BOOTED
        if not ended:
            return OVER_LIMIT
        status = self.folder / "status"
        return int(status.read_text()) if status.exists() else CRASHED

    def tail(self) -> str:
        """What QEMU and the kernel said last."""
        lines = [
            line
            for name in ("qemu.log", "console.log")
            if (self.folder / name).exists()
            for line in (self.folder / name).read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        ]
        return "\n".join(lines)

    def _follow(self, reader: int, output: BinaryIO, began: float, limit_s: float) -> bool:
        """False if the machine had not ended by itself."""
        progress = _Progress()
        with selectors.DefaultSelector() as selector:
            selector.register(reader, selectors.EVENT_READ)
            while True:
                readable = selector.select(0.2)
                elapsed_s = time.monotonic() - began
                if self.boot_s is None and (self.folder / "started").exists():
                    self.boot_s = elapsed_s
                    progress.end(f"vm: booted in {elapsed_s:.1f} s")
                if readable:
                    data = os.read(reader, 1 << 16)
                    if not data:
                        return True
                    output.write(data)
                    output.flush()
                if self.boot_s is None:
                    progress.show(f"vm: booting Linux {self.kernel.release}, {elapsed_s:.0f} s")
                if elapsed_s > (min(BOOT_LIMIT_S, limit_s) if self.boot_s is None else limit_s):
                    return False

    def _write(self, command: str, environment: Mapping[str, str]) -> None:
        shutil.copy(GUEST / "start", self.folder / "start")
        (self.folder / "command").write_text(command + "\n")
        (self.folder / "environment").write_text(
            "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
        )
        links = ["link set lo up", "link add br0 type bridge", "link set br0 mtu 9000 up"]
        devices = []
        for rail, (device, address) in enumerate(addresses(self.rails).items()):
            links += [
                f"link add v{rail} mtu 9000 type veth peer name p{rail} mtu 9000",
                f"link set p{rail} master br0 up",
                f"link set v{rail} up",
                f"addr add {address}/24 dev v{rail}",
            ]
            devices.append(f"link add {device} type rxe netdev v{rail}")
        (self.folder / "links").write_text("\n".join(links) + "\n")
        (self.folder / "devices").write_text("\n".join(devices) + "\n")

    def _qemu(self, output: int) -> list[str]:
        return [
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64"),
            *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"),
            *("-machine", "q35", "-m", str(_memory_mib())),
            *("-accel", "tcg,thread=multi,tb-size=512", "-cpu", _CPU, "-smp", "1"),  # more CPUs are slower
            *("-kernel", str(self.kernel.image), "-initrd", str(self.kernel.initramfs), "-append", _KERNEL_OPTIONS),
            *("-serial", f"file:{_escaped(self.folder / 'console.log')}"),
            *("-chardev", f"file,id=output,path=/proc/self/fd/{output}"),
            *("-device", "virtio-serial-pci", "-device", "virtserialport,chardev=output,name=output"),
            *("-device", "virtio-rng-pci"),
            *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
            *("-fsdev", f"local,id=run,path={_escaped(self.folder)},security_model=none"),
            *("-device", "virtio-9p-pci,fsdev=run,mount_tag=run"),
        ]


class _Progress:
    """One line on a terminal, a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._next = time.monotonic() + 5.0

    def show(self, text: str) -> None:
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() >= self._next:
            self._next += 10.0
            print(text, file=sys.stderr, flush=True)

    def end(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._terminal else text, file=sys.stderr, flush=True)


def _memory_mib() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) // 1024
    return min(_MEMORY_MIB, max(available * 3 // 4, 1024))


def _escaped(path: Path) -> str:
    return str(path).replace(",", ",,")
