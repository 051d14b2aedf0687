"""The control path to CUDA over cuda-python: contexts, streams, memory and handles, and the addresses of the driver's
functions for the C parts. Imported only where GPU memory is used; a machine without GPU or cuda-python never gets here.

Nothing here runs per transfer. GPUs are named by UUID, so that CUDA_VISIBLE_DEVICES of an engine does not matter."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from typing import Any, Final

from railrelay.client.errors import ArgumentError, ErrorCode, RegionError, RelayError

READ_ONLY: Final = "the memory is read-only; register it with receive=False"
INSTALL: Final = "install railrelay[cuda]"
_DRIVER: Final = "`nvidia-smi` must list the GPUs, and CUDA_VISIBLE_DEVICES must not hide them"
BATCH_VERSION: Final = 13000  # the signatures of the batch copies that gpu_copy.h declares
_BATCHES: Final = ("cuMemcpyBatchAsync", "cuMemcpy3DBatchAsync")
VERSION: Final = 12000
IPC_BYTES: Final = 64
GATHER_SOURCE: Final = Path(__file__).with_name("gather.cu")
GATHER_KERNEL: Final = b"railrelay_gather"


class CudaError(RelayError):
    """A CUDA call failed; the text has the call and the error's name."""


def missing() -> str:
    """Why CUDA cannot be used here; "" if it can."""
    try:
        _driver()
    except RelayError as failure:
        return failure.text
    return ""


def in_use() -> bool:
    """Whether this process has loaded the driver, so that an address may be GPU memory."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return True


@cache
def _driver() -> Any:  # noqa: ANN401 - cuda-python has no types
    try:
        from cuda.bindings import driver
    except ImportError as failure:
        raise RelayError(ErrorCode.NOT_SUPPORTED, f"GPU memory needs cuda-python ({failure}); {INSTALL}") from None
    try:
        (result,) = driver.cuInit(0)
    except Exception as failure:  # noqa: BLE001 - its loader has exceptions of its own
        text = f"GPU memory needs the NVIDIA driver: {str(failure).splitlines()[0].rstrip('.')}; {_DRIVER}"
        raise RelayError(ErrorCode.NOT_SUPPORTED, text) from None
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RelayError(ErrorCode.NOT_SUPPORTED, f"GPU memory cannot be used: cuInit says {result.name}; {_DRIVER}")
    return driver


def _call(name: str, *arguments: object) -> Any:  # noqa: ANN401
    """What a function of the driver returns besides its status. CudaError."""
    result, *values = getattr(_driver(), name)(*arguments)
    if result != _driver().CUresult.CUDA_SUCCESS:
        code = ErrorCode.NO_MEMORY if result.name == "CUDA_ERROR_OUT_OF_MEMORY" else ErrorCode.GPU_ERROR
        raise CudaError(code, f"{name} says {result.name}")
    return values[0] if len(values) == 1 else values


def function_addresses(names: list[str]) -> list[int]:
    """Addresses of driver functions, 0 for one that this driver lacks. CudaError if that is not a batch copy."""
    addresses = []
    for name in names:
        batch = name in _BATCHES
        try:
            address, _ = _call("cuGetProcAddress", name.encode(), BATCH_VERSION if batch else VERSION, 0)
        except CudaError:
            if not batch:
                raise
            address = 0
        addresses.append(int(address))
    return addresses


@dataclass(frozen=True)
class Where:
    """What the driver knows of an address in GPU memory: ordinal of the GPU, and the allocation that it lies in."""

    ordinal: int
    base: int
    nbytes: int


def where(address: int) -> Where | None:
    """None for memory that is not a GPU's."""
    attribute = _driver().CUpointer_attribute
    kind, ordinal = ctypes.c_uint(), ctypes.c_int()
    base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
    asked = (
        (attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, kind),
        (attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ordinal),
        (attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, base),
        (attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, nbytes),
    )
    for name, value in asked:
        if _pointer_attribute()(ctypes.byref(value), int(name), address):
            return None
    if kind.value != int(_driver().CUmemorytype.CU_MEMORYTYPE_DEVICE):
        return None
    return Where(ordinal.value, base.value, nbytes.value)


@cache
def _pointer_attribute() -> Callable[..., int]:
    """cuPointerGetAttribute itself: cuda-python before 13.5 returns wrong ordinals."""
    (address,) = function_addresses(["cuPointerGetAttribute"])
    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)(address)


def uuid_of(ordinal: int) -> str:
    raw = _call("cuDeviceGetUuid", _call("cuDeviceGet", ordinal))
    return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"


def count() -> int:
    return int(_call("cuDeviceGetCount"))


def exports_dmabuf(ordinal: int) -> bool:
    """Whether NICs can be given its memory without a module of their own (nvidia-peermem)."""
    attribute = _driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
    return bool(_call("cuDeviceGetAttribute", attribute, _call("cuDeviceGet", ordinal)))


def ordinal_of(gpu: int | str) -> int:
    """The ordinal in this process of a GPU given by ordinal or UUID. RelayError names those that there are."""
    try:
        known = [uuid_of(ordinal) for ordinal in range(count())]
    except RelayError as failure:
        raise type(failure)(failure.code, f"GPU {gpu}: {failure.text}") from None
    text = str(gpu).removeprefix("cuda:")
    if text in known:
        return known.index(text)
    if text.isdecimal() and int(text) < len(known):
        return int(text)
    text = f"GPU {gpu}: this process sees {', '.join(known) or 'none'}; name one of them, by UUID or number"
    raise ArgumentError(ErrorCode.BAD_ARGUMENT, text)


@dataclass(frozen=True)
class Mapping:
    """GPU memory of another process (or of this one) in this process's address space."""

    address: int
    nbytes: int
    handle: int  # 0: opened by IPC handle


class Gpu:
    """One GPU as this process uses it: its primary context (the one that torch uses too), retained until close()."""

    def __init__(self, gpu: int | str) -> None:
        self.ordinal = ordinal_of(gpu)
        self.uuid = uuid_of(self.ordinal)
        self.context = int(_call("cuDevicePrimaryCtxRetain", _call("cuDeviceGet", self.ordinal)))
        self._lock = threading.Lock()
        self._opened: dict[bytes, tuple[int, int]] = {}  # IPC handle -> address, users
        self._undo: list[tuple[str, int]] = [("cuDevicePrimaryCtxRelease", self.ordinal)]

    def close(self) -> None:
        """Gives back what was made here, latest first. Idempotent. A lost context frees everything by itself."""
        with self._lock:
            undo, self._undo = self._undo, []
        while undo:
            name, argument = undo.pop()
            with contextlib.suppress(CudaError):
                if not undo:  # the context itself; a lost one cannot be made current, but goes with its last user
                    _call(name, argument)
                    return
                with self.current():
                    _call(name, argument)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The context is current on this thread meanwhile."""
        _call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            with contextlib.suppress(CudaError):
                _call("cuCtxPopCurrent")

    # ---- streams and events ----

    def stream(self) -> int:
        """A new stream of the highest priority that does not wait for the legacy default stream."""
        with self.current():
            _, highest = _call("cuCtxGetStreamPriorityRange")
            flags = _driver().CUstream_flags.CU_STREAM_NON_BLOCKING
            stream = int(_call("cuStreamCreateWithPriority", flags, highest))
        self._undo.append(("cuStreamDestroy", stream))
        return stream

    def recorded(self, stream: int) -> int:
        """A new event recorded on a stream of the caller; whoever takes it destroys it."""
        with self.current():
            event = int(_call("cuEventCreate", _driver().CUevent_flags.CU_EVENT_DISABLE_TIMING))
            try:
                _call("cuEventRecord", event, stream)
            except CudaError:
                _call("cuEventDestroy", event)
                raise
        return event

    def wait(self, stream: int, event: int) -> None:
        with self.current():
            _call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_streams(self) -> None:
        """Waits for the streams that stream() made."""
        with self.current():
            for name, stream in list(self._undo):
                if name == "cuStreamDestroy":
                    _call("cuStreamSynchronize", stream)

    def synchronize(self) -> None:
        with self.current():
            _call("cuCtxSynchronize")

    # ---- memory ----

    def host_alloc(self, nbytes: int) -> int:
        """Address of new pinned host memory, which the GPU reads at the same address."""
        with self.current():
            flags = ctypes.c_uint(1 | 2).value  # portable, mapped
            address = int(_call("cuMemHostAlloc", nbytes, flags))
        self._undo.append(("cuMemFreeHost", address))
        return address

    def host_register(self, address: int, nbytes: int) -> int:
        """Pins a mapping of this process for the GPU; the address under which the GPU knows it."""
        with self.current():
            _call("cuMemHostRegister", address, nbytes, 1 | 2)
            known = int(_call("cuMemHostGetDevicePointer", address, 0))
        self._undo.append(("cuMemHostUnregister", address))
        return known

    def host_unregister(self, address: int) -> None:
        """Takes back host_register(). What the GPU does with the memory must have ended."""
        self._undo.remove(("cuMemHostUnregister", address))
        with self.current():
            _call("cuMemHostUnregister", address)

    def alloc(self, nbytes: int) -> int:
        """Address of new memory of this GPU."""
        with self.current():
            address = int(_call("cuMemAlloc", nbytes))
        self._undo.append(("cuMemFree", address))
        return address

    def granularity(self) -> int:
        return granularity(self.ordinal)

    def create(self, nbytes: int) -> Mapping:
        """New memory of this GPU that can be exported; nbytes a multiple of granularity()."""
        return self._map(create(self.ordinal, nbytes), nbytes)

    def export(self, mapping: Mapping) -> int:
        """A descriptor of the memory, the caller's; it holds the memory like a mapping does."""
        return export(mapping.handle)

    def open_vmm(self, fd: int, nbytes: int) -> Mapping:
        """Maps memory that another process exported, for this GPU. The descriptor stays the caller's."""
        kind = _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._map(int(_call("cuMemImportFromShareableHandle", fd, kind)), nbytes)

    def open_ipc(self, handle: bytes, nbytes: int) -> Mapping:
        """The same for an allocation that cuMemAlloc made."""
        with self._lock:
            opened, users = self._opened.get(handle, (0, 0))
            if not users:
                raw = _driver().CUipcMemHandle()
                ctypes.memmove(raw.getPtr(), handle, IPC_BYTES)
                with self.current():
                    opened = int(_call("cuIpcOpenMemHandle", raw, 1))  # lazily enables access between peers
            self._opened[handle] = (opened, users + 1)
        at = where(opened)
        if at is None or at.base + at.nbytes < opened + nbytes:  # a copy past its end would end the context
            self.unmap(Mapping(opened, nbytes, 0))
            text = f"an IPC handle of less than the {nbytes} bytes that its owner says"
            raise RegionError(ErrorCode.OUT_OF_BOUNDS, text)
        return Mapping(opened, nbytes, 0)

    def _close_ipc(self, address: int) -> None:
        """An allocation is opened once, however many regions lie in it."""
        with self._lock:
            handle, users = next((known, users) for known, (at, users) in self._opened.items() if at == address)
            if users > 1:
                self._opened[handle] = (address, users - 1)
                return
            del self._opened[handle]
        _call("cuIpcCloseMemHandle", address)

    def unmap(self, mapping: Mapping) -> None:
        """Of create(), open_vmm() or open_ipc(). What the GPU still does with it must have ended."""
        with self.current():
            if not mapping.handle:
                self._close_ipc(mapping.address)
                return
            _call("cuMemUnmap", mapping.address, mapping.nbytes)
            _call("cuMemRelease", mapping.handle)
            _call("cuMemAddressFree", mapping.address, mapping.nbytes)

    def _map(self, handle: int, nbytes: int) -> Mapping:
        driver = _driver()
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        undo = contextlib.ExitStack()
        undo.callback(_call, "cuMemRelease", handle)
        with undo, self.current():
            address = int(_call("cuMemAddressReserve", nbytes, 0, 0, 0))
            undo.callback(_call, "cuMemAddressFree", address, nbytes)
            _call("cuMemMap", address, nbytes, 0, handle, 0)
            undo.callback(_call, "cuMemUnmap", address, nbytes)
            _call("cuMemSetAccess", address, nbytes, [access], 1)
            undo.pop_all()
        return Mapping(address, nbytes, handle)

    def to_host(self, destination: int, source: int, nbytes: int) -> None:
        with self.current():
            _call("cuMemcpyDtoH", destination, source, nbytes)

    def to_gpu(self, destination: int, source: int, nbytes: int) -> None:
        with self.current():
            _call("cuMemcpyHtoD", destination, source, nbytes)

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        with self.current():
            _call("cuMemsetD8", address, byte, nbytes)
            _call("cuCtxSynchronize")

    def memory(self) -> tuple[int, int]:
        """Bytes that are free, and all, on this GPU."""
        with self.current():
            free, total = _call("cuMemGetInfo")
        return int(free), int(total)

    # ---- the gather kernel ----

    def gather_kernel(self) -> int:
        """The kernel of gather.cu, compiled for this GPU by NVRTC. CudaError if there is no NVRTC here."""
        with self.current():
            module = int(_call("cuModuleLoadData", _compiled(*self._capability())))
            function = int(_call("cuModuleGetFunction", module, GATHER_KERNEL))
        self._undo.append(("cuModuleUnload", module))
        return function

    def _capability(self) -> tuple[int, int]:
        attribute = _driver().CUdevice_attribute
        major = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self.ordinal)
        minor = _call("cuDeviceGetAttribute", attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self.ordinal)
        return int(major), int(minor)


@cache
def _compiled(major: int, minor: int) -> bytes:
    try:
        from cuda.bindings import nvrtc

        _, program = nvrtc.nvrtcCreateProgram(GATHER_SOURCE.read_bytes(), b"gather.cu", 0, [], [])
        try:
            (result,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
            if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                _, size = nvrtc.nvrtcGetProgramLogSize(program)
                log = bytes(size)
                nvrtc.nvrtcGetProgramLog(program, log)
                raise CudaError(ErrorCode.GPU_ERROR, f"NVRTC says {result.name}: {log.decode(errors='replace')}")
            _, size = nvrtc.nvrtcGetCUBINSize(program)
            code = bytes(size)
            nvrtc.nvrtcGetCUBIN(program, code)
        finally:
            nvrtc.nvrtcDestroyProgram(program)
    except (ImportError, RuntimeError, OSError) as failure:
        raise CudaError(ErrorCode.NOT_SUPPORTED, f"no NVRTC to compile the gather kernel: {failure}") from None
    return code


# ---- memory without a context ----


def _properties(ordinal: int) -> Any:  # noqa: ANN401
    driver = _driver()
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    properties.allocFlags.gpuDirectRDMACapable = int(_call("cuDeviceGetAttribute", supported, ordinal))
    return properties


def granularity(ordinal: int) -> int:
    option = _driver().CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(_call("cuMemGetAllocationGranularity", _properties(ordinal), option))


def create(ordinal: int, nbytes: int) -> int:
    """Handle of new GPU memory, mapped nowhere; made without a context. nbytes: a multiple of granularity()."""
    try:
        return int(_call("cuMemCreate", nbytes, _properties(ordinal), 0))
    except CudaError as failure:
        if failure.code is ErrorCode.NO_MEMORY:
            text = f"{nbytes} bytes of memory of {uuid_of(ordinal)}: {failure.text}"
            raise RegionError(ErrorCode.NO_MEMORY, text) from None
        raise


def export(handle: int) -> int:
    kind = _driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return int(_call("cuMemExportToShareableHandle", handle, kind, 0))


def release(handle: int) -> None:
    _call("cuMemRelease", handle)


# ---- handles of memory that an engine has allocated ----


@dataclass(frozen=True)
class Handles:
    """How other processes reach GPU memory of this one. ``vmm``: a descriptor, or -1; ``ipc``: handle of cuMemAlloc
    memory, or empty; both name the whole allocation of ``allocation_bytes``, in which the memory begins at ``offset``
    (a VMM allocation is mapped as a whole or not at all). ``dmabuf``: a descriptor
    of the pages from ``dmabuf_offset`` bytes before the memory, or -1. The descriptors are the caller's."""

    vmm: int
    ipc: bytes
    offset: int
    allocation_bytes: int
    dmabuf: int
    dmabuf_offset: int

    @property
    def kind(self) -> str:
        return "vmm" if self.vmm >= 0 else "ipc" if self.ipc else ""

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(fd for fd in (self.vmm, self.dmabuf) if fd >= 0)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def handles_of(gpu: Gpu, address: int, nbytes: int) -> Handles:
    """What there is for the memory: one allocation has a VMM or IPC handle; memory put together of several (expandable
    segments) has a dma-buf descriptor at most. ArgumentError if part of the memory is not there."""
    with gpu.current():
        at = where(address)
        if at is None:
            raise ArgumentError(ErrorCode.BAD_ADDRESS, f"{address:#x} is not GPU memory")
        first = _allocation_at(address)
        last = _allocation_at(address + nbytes - 1) if first else 0
        beyond = address + nbytes - (at.base + at.nbytes)
        if beyond > 0 or (first and not last):  # a copy from or to there would end the context
            passed = f"passes the end of its allocation by {beyond}" if beyond > 0 else "is not mapped to its end"
            raise ArgumentError(ErrorCode.OUT_OF_BOUNDS, f"{address:#x} + {nbytes} bytes of GPU memory {passed}")
        if first:  # of the VMM calls; its range is the whole reservation, in which several allocations may lie
            unit = gpu.granularity()
            start = address // unit * unit
            while start - unit >= at.base and _allocation_at(start - unit) == first:
                start -= unit
            end = start + unit
            while end < at.base + at.nbytes and _allocation_at(end) == first:
                end += unit
            vmm = _exported(address) if last == first else -1
            return Handles(vmm, b"", address - start, end - start, *_dmabuf(address, nbytes))
        ipc = b""
        with contextlib.suppress(CudaError):
            raw = _call("cuIpcGetMemHandle", at.base)
            ipc = ctypes.string_at(raw.getPtr(), IPC_BYTES)  # cuda-python hides the bytes
        return Handles(-1, ipc, address - at.base, at.nbytes, *_dmabuf(address, nbytes))


def _allocation_at(address: int) -> int:
    """The handle of the allocation mapped there; 0 if it is not of the VMM calls."""
    try:
        handle = int(_call("cuMemRetainAllocationHandle", address))
    except CudaError:
        return 0
    _call("cuMemRelease", handle)
    return handle


def _exported(address: int) -> int:
    handle = _call("cuMemRetainAllocationHandle", address)
    try:
        return export(handle)
    except CudaError:  # made without a handle type that can be exported
        return -1
    finally:
        with contextlib.suppress(CudaError):  # the descriptor would be lost
            _call("cuMemRelease", handle)


def _dmabuf(address: int, nbytes: int) -> tuple[int, int]:
    page = os.sysconf("SC_PAGESIZE")
    first = address // page * page
    last = -(-(address + nbytes) // page) * page
    try:
        return dmabuf(first, last - first), address - first
    except CudaError:
        return -1, 0


def dmabuf(address: int, nbytes: int) -> int:
    """A dma-buf descriptor of whole pages of GPU memory mapped here; its GPU's context is current. CudaError."""
    kind = _driver().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(_call("cuMemGetHandleForAddressRange", address, nbytes, kind, 0))


# ---- what engines pass as memory ----


class _DlTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_DL_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged


def gpu_memory_of(tensor: Any, *, writable: bool) -> tuple[int, int] | None:  # noqa: ANN401
    """(address, bytes) of a contiguous tensor in GPU memory: torch, __cuda_array_interface__, or DLPack. None if it is
    something else. ArgumentError if it is not contiguous, not ``writable``, or what it says of itself cannot be."""
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "is_contiguous"):  # torch, of any type of number
        if not tensor.is_cuda:
            return None
        return _checked(tensor.data_ptr(), tensor.numel() * tensor.element_size(), tensor.is_contiguous())
    interface = getattr(tensor, "__cuda_array_interface__", None)
    try:
        if interface is not None:
            return _from_interface(interface, writable)
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] in _DL_CUDA:
            return _from_dlpack(tensor.__dlpack__())
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, BufferError, RuntimeError) as failure:
        way = "DLPack" if interface is None else f"__cuda_array_interface__ {interface!r}"
        why = f"{type(failure).__name__}: {failure}"
        text = f"{type(tensor).__name__}: {way} cannot be used ({why}); pass (address, bytes) instead"
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, text) from None
    return None


def _checked(address: int, nbytes: int, contiguous: bool) -> tuple[int, int]:
    if not contiguous or not nbytes:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, "the tensor is empty or not contiguous; register the whole of it")
    return address, nbytes


def _from_interface(interface: dict[str, Any], writable: bool) -> tuple[int, int]:
    import numpy as np  # the daemon imports this module, and needs no numpy

    kind, shape, (address, read_only) = np.dtype(interface["typestr"]), interface["shape"], interface["data"]
    if kind.hasobject:
        raise TypeError("Python objects are no memory of a GPU")
    if writable and read_only:
        raise ArgumentError(ErrorCode.BAD_ARGUMENT, READ_ONLY)
    strides = interface.get("strides")
    steps = None if strides is None else [8 * index(stride) for stride in strides]
    return _contiguous(index(address), shape, steps, 8 * kind.itemsize)


def _from_dlpack(capsule: object) -> tuple[int, int]:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DlTensor.from_address(pointer(capsule, b"dltensor"))
    address, item_bits = (tensor.data or 0) + tensor.byte_offset, tensor.bits * tensor.lanes
    steps = [stride * item_bits for stride in tensor.strides[: tensor.ndim]] if tensor.strides else None
    return _contiguous(address, tensor.shape[: tensor.ndim], steps, item_bits)


def _contiguous(
    address: int, shape: Sequence[int], steps_bits: Sequence[int] | None, item_bits: int
) -> tuple[int, int]:
    bits, contiguous = item_bits, True
    for axis in reversed(range(len(shape))):
        length = index(shape[axis])
        if length < 0:
            raise ValueError(f"a length of {length}")
        contiguous = contiguous and (steps_bits is None or steps_bits[axis] == bits or length == 1)
        bits *= length
    nbytes = bits // 8
    if nbytes and not 0 < address <= (1 << 64) - nbytes:
        raise ValueError(f"{nbytes} bytes at {address:#x}")
    return _checked(address, nbytes, contiguous)
