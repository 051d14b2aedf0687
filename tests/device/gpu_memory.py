"""GPU memory that the daemon uses beyond the buffers. It has no CUDA context: helpers and engines do, and theirs is not
counted."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from typing import Final

from device import native, systems
from device.report import MIB, NOT_MEASURED, Options, Report, Skipped

_LIMIT_BYTES: Final = 16 * MIB
_LANES: Final = 7
_LANE_BYTES: Final = 144 * MIB
_RESERVE: Final = """
import sys
from railrelay.daemon import device_memory
held = [device_memory.reserve(sys.argv[1], int(sys.argv[3])) for _ in range(int(sys.argv[2]))]
print(sum(memory.nbytes for memory in held), flush=True)
sys.stdin.read()
"""


def run(report: Report, options: Options) -> None:
    if not options.gpus:
        raise Skipped("host memory has no daemon's share of a GPU")
    for ordinal in range(options.gpus):
        _reserved(report, options, ordinal)
    _processes(report, options)


def _reserved(report: Report, options: Options, ordinal: int) -> None:
    """The relay memory of a rail, made as the daemon makes it, in a process that does nothing else."""
    lane_bytes = 2 * MIB if options.stand_in else _LANE_BYTES
    with native.opened_gpu(ordinal) as gpu:
        before, _ = gpu.memory()
        words = [sys.executable, "-c", _RESERVE, gpu.uuid, str(_LANES), str(lane_bytes)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            reserved = int(process.stdout.readline())
            during, _ = gpu.memory()
            process.communicate("")
        after, _ = gpu.memory()
    beyond = before - during - reserved
    report.timed(
        f"GPU {ordinal}: memory beyond {_LANES} lanes of {lane_bytes // MIB} MiB",
        f"{beyond / MIB:.1f} MiB; {(before - after) / MIB:.1f} MiB after they were released",
        f"<= {_LIMIT_BYTES // MIB} MiB",
        beyond <= _LIMIT_BYTES,
        beyond_bytes=beyond,
        left_bytes=before - after,
    )


def _processes(report: Report, options: Options) -> None:
    """Does the driver list the daemon among the processes with a context, with lanes leased and in use?"""
    with systems.daemon(options) as node, systems.link(node, options, 8 * MIB) as link:
        link.sender.write(link.remote, [link.source.address], [link.remote.address], MIB).wait(60)
        listed = _listed()
    if listed is None:
        report.row("contexts of the daemon", f"{NOT_MEASURED}no nvidia-smi")
        return
    shown = ", ".join(f"{pid}: {used}" for pid, used in listed.items()) or "none"
    report.timed(
        "contexts of the daemon, two lanes in use",
        f"the daemon (pid {node.pid}) has {'one' if node.pid in listed else 'none'}; processes with a context: {shown}",
        "none",
        node.pid not in listed,
    )


def _listed() -> dict[int, str] | None:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    words = [smi, "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        lines = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30).stdout.splitlines()
        return {int(pid): used.strip() for pid, used in (line.split(",", 1) for line in lines if "," in line)}
    return None
