"""Queue pairs of other processes on real RDMA devices, and making them fail: the kernel takes orders from whoever has a
duplicate of the descriptor with which the process has opened the device. Needs the rights of a debugger."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from helpers.descriptors import duplicates

_CLASS: Final = Path("/sys/class/infiniband_verbs")
_IOCTL: Final = 0xC0181B01  # RDMA_VERBS_IOCTL: _IOWR(0x1b, 1, struct ib_uverbs_ioctl_hdr)
_DRIVERS: Final = {"rxe": 14}  # enum rdma_driver_id, by the start of a device's name
_DEVICE, _QUEUE_PAIR = 0, 4  # enum uverbs_default_objects
_INVOKE_WRITE, _INFO_HANDLES = 0, 1  # enum uverbs_methods_device
_MANDATORY: Final = 1
_MODIFY: Final = 26  # IB_USER_VERBS_CMD_MODIFY_QP
_STATE, _ERROR = 1, 6  # IBV_QP_STATE, IBV_QPS_ERR
_MOST: Final = 4096

_HEADER: Final = struct.Struct("=4HQ2I")
_ATTRIBUTE: Final = struct.Struct("=4HQ")
_TO_MODIFY: Final = struct.Struct("=64x2I24xB15x")  # struct ib_uverbs_modify_qp: handle, mask, state


def fail(device: str) -> int:
    """All of the device, in all processes but this one: they go into ERR, what was posted is flushed, and no event says
    so; how many."""
    count = 0
    for context in _contexts(device):
        try:
            for handle in _handles(context, device):
                with contextlib.suppress(OSError):  # destroyed meanwhile
                    _modify(context, device, handle)
                    count += 1
        finally:
            os.close(context)
    return count


def _contexts(device: str) -> Iterator[int]:
    [node] = [entry.name for entry in _CLASS.glob("uverbs*") if (entry / "ibdev").read_text().strip() == device]
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if pid != os.getpid():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                yield from duplicates(pid, lambda link: link == f"/dev/infiniband/{node}")


def _handles(context: int, device: str) -> list[int]:
    total, handles = ctypes.c_uint32(), (ctypes.c_uint32 * _MOST)()
    _order(
        context,
        device,
        _INFO_HANDLES,
        (0, 8, _QUEUE_PAIR),
        (1, ctypes.sizeof(total), ctypes.addressof(total)),
        (2, ctypes.sizeof(handles), ctypes.addressof(handles)),
    )
    return handles[: total.value]


def _modify(context: int, device: str, handle: int) -> None:
    command = ctypes.create_string_buffer(_TO_MODIFY.pack(handle, _STATE, _ERROR), _TO_MODIFY.size)
    _order(
        context,
        device,
        _INVOKE_WRITE,
        (0, ctypes.sizeof(command), ctypes.addressof(command)),
        (2, 8, _MODIFY),
    )


def _order(context: int, device: str, method: int, *attributes: tuple[int, int, int]) -> None:
    """Attributes: number, bytes, and the address of the value, or what it is if it has 8 bytes. OSError."""
    length = _HEADER.size + len(attributes) * _ATTRIBUTE.size
    driver = next(number for name, number in _DRIVERS.items() if device.startswith(name))
    packed = _HEADER.pack(length, _DEVICE, method, len(attributes), 0, driver, 0) + b"".join(
        _ATTRIBUTE.pack(number, nbytes, _MANDATORY, 0, value) for number, nbytes, value in attributes
    )
    fcntl.ioctl(context, _IOCTL, bytearray(packed))
