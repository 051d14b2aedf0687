"""What engines register as GPU memory, and what is refused."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from helpers import gpus, leaks
from helpers.gpus import Card, Control, Driver
from helpers.nodes import Nodes

from railrelay.client import ArgumentError, Client, ConnectError, ErrorCode, RelayError, cuda

pytestmark = [pytest.mark.gpu, pytest.mark.system]

NBYTES = 256 << 10


class ArrayInterface:
    """As CuPy's arrays."""

    def __init__(
        self, address: int, shape: tuple[int, ...], typestr: str = "<f4", strides: tuple[int, ...] | None = None
    ) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": shape,
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
            "strides": strides,
        }


class _Tensor(ctypes.Structure):
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
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Exchanged:
    """As JAX's arrays: DLPack."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        bits: int = 32,
        offset: int = 0,
    ) -> None:
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        self._tensor = _Tensor(address, 2, 0, len(shape), 2, bits, 1, self._shape, self._strides, offset, None, None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: Any) -> object:  # noqa: ANN401
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        capsule: object = new(ctypes.addressof(self._tensor), b"dltensor", None)
        return capsule


class Torch:
    """As torch's tensors, of any type of number."""

    def __init__(self, address: int, nbytes: int, *, contiguous: bool = True, is_cuda: bool = True) -> None:
        self._address, self._nbytes, self._contiguous = address, nbytes, contiguous
        self.is_cuda = is_cuda

    def data_ptr(self) -> int:
        return self._address

    def is_contiguous(self) -> bool:
        return self._contiguous

    def numel(self) -> int:
        return self._nbytes // 2

    def element_size(self) -> int:
        return 2


def tensors(address: int) -> list[object]:
    """The same NBYTES of GPU memory, by each of the ways to say so."""
    return [
        (address, NBYTES),
        ArrayInterface(address, (NBYTES // 1024, 256)),
        ArrayInterface(address, (NBYTES // 1024, 256), strides=(1024, 4)),
        ArrayInterface(address, (1, NBYTES // 4), strides=(77, 4)),
        ArrayInterface(address, (NBYTES,), "|u1"),
        Exchanged(address, (NBYTES // 1024, 256)),
        Exchanged(address, (NBYTES // 1024, 256), (256, 1)),
        Exchanged(address, (1, NBYTES // 4), (77, 1)),
        Exchanged(address - 64, (NBYTES,), bits=8, offset=64),
        Torch(address, NBYTES),
    ]


def refused(address: int) -> list[object]:
    return [
        ArrayInterface(address, (16, 16), strides=(128, 4)),
        ArrayInterface(address, (16, 16), strides=(4, 64)),
        ArrayInterface(address, (0, 16)),
        Exchanged(address, (16, 16), (32, 1)),
        Exchanged(address, (16, 16), (1, 16)),
        Torch(address, NBYTES, contiguous=False),
        Torch(address, 0),
    ]


@pytest.fixture
def client(nodes: Nodes) -> Iterator[Client]:
    with nodes.start().connect() as client:
        yield client


def test_tensors_of_each_kind(client: Client, gpu: Card) -> None:
    address = gpu.alloc(NBYTES + 64) + 64
    for tensor in tensors(address):
        region = client.register(tensor)
        assert (region.address, region.nbytes, region.device) == (address, NBYTES, gpu.uuid)
        region.unregister()


def test_tensors_with_gaps_are_refused(client: Client, gpu: Card) -> None:
    address = gpu.alloc(NBYTES)
    for tensor in refused(address):
        with pytest.raises(ArgumentError, match="empty or not contiguous"):
            client.register(tensor)
    client.register((address, NBYTES)).unregister()


@pytest.mark.parametrize(
    "wrong",
    [
        {"typestr": "<no4"},
        {"typestr": "|O8"},
        {"shape": None},
        {"shape": 16},
        {"shape": (-4, -4)},
        {"shape": (4.0, 4)},
        {"strides": (64,)},
        {"strides": ("a", "b")},
        {"data": None},
        {"data": (None, False)},
        {"data": (0, False)},
        {"data": (1 << 64, False)},
    ],
    ids=str,
)
def test_an_array_interface_that_cannot_be_is_named(client: Client, gpu: Card, wrong: dict[str, Any]) -> None:
    array = ArrayInterface(gpu.alloc(NBYTES), (4, 4))
    array.__cuda_array_interface__ |= wrong
    for receive in (True, False):
        with pytest.raises(ArgumentError, match=r"ArrayInterface: __cuda_array_interface__ .* cannot be used .*; pass"):
            client.register(array, receive=receive)
    del array.__cuda_array_interface__[next(iter(wrong))]
    if "strides" not in wrong:
        with pytest.raises(ArgumentError, match="cannot be used"):
            client.register(array)


def test_dlpack_that_cannot_be_is_named(client: Client, gpu: Card) -> None:
    class Refusing(Exchanged):
        def __dlpack__(self, **_: Any) -> object:  # noqa: ANN401
            raise BufferError("read-only arrays are not exported")

    class Other(Exchanged):
        def __dlpack__(self, **_: Any) -> object:  # noqa: ANN401
            return object()

    address = gpu.alloc(NBYTES)
    for tensor, why in ((Refusing(address, (16,)), "read-only arrays"), (Other(address, (16,)), "PyCapsule")):
        with pytest.raises(ArgumentError, match=f"{type(tensor).__name__}: DLPack cannot be used .*{why}"):
            client.register(tensor)


def test_a_read_only_array_of_a_gpu_is_a_source_only(client: Client, gpu: Card) -> None:
    array = ArrayInterface(gpu.alloc(NBYTES), (4, 4))
    array.__cuda_array_interface__["data"] = (array.__cuda_array_interface__["data"][0], True)
    with pytest.raises(ArgumentError, match="read-only; register it with receive=False"):
        client.register(array)
    client.register(array, receive=False).unregister()


def test_an_address_that_is_no_memory_is_not_laid_to_a_lacking_package(client: Client, gpu: Card) -> None:
    assert gpu.ordinal == 0
    with pytest.raises(ArgumentError, match=r"no readable and writable memory .* at 0x1000, nor of a GPU$"):
        client.register((0x1000, 4096))


def test_torch_tensors(client: Client, gpu: Card, driver: Driver) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not driver.is_real or not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        tensor = torch.zeros((64, 128), dtype=dtype, device=f"cuda:{gpu.ordinal}")
        region = client.register(tensor)
        assert (region.address, region.nbytes) == (tensor.data_ptr(), tensor.numel() * tensor.element_size())
        with pytest.raises(ArgumentError, match="not contiguous"):
            client.register(tensor[:, :64])
        region.unregister()
    client.register(torch.zeros(4096).numpy()).unregister()


def test_memory_of_two_gpus_is_refused(client: Client, two_gpus: tuple[Card, Card]) -> None:
    first, second = two_gpus
    region = client.register((first.alloc(NBYTES), NBYTES))
    with pytest.raises(ArgumentError, match=f"memory of {second.uuid}, but this client uses {first.uuid}"):
        client.register((second.alloc(NBYTES), NBYTES))
    region.unregister()
    client.register((first.alloc(NBYTES), NBYTES)).unregister()


def test_overlapping_gpu_memory_is_refused(client: Client, gpu: Card) -> None:
    address = gpu.alloc(NBYTES)
    client.register((address, NBYTES))
    for start, nbytes in ((address, NBYTES), (address + 4096, 4096), (address - 0, 1)):
        with pytest.raises(RelayError) as refusal:
            client.register((start, nbytes))
        assert refusal.value.code is ErrorCode.OVERLAP


def test_memory_past_its_allocation_is_refused(client: Client, gpu: Card) -> None:
    """A length that is wrong would show only when a copy destroys the context."""
    address = gpu.alloc(NBYTES)
    with pytest.raises(RelayError) as refusal:
        client.register((address, NBYTES + (64 << 20)))
    assert refusal.value.code in (ErrorCode.BAD_ADDRESS, ErrorCode.OUT_OF_BOUNDS, ErrorCode.BAD_LENGTH)


def test_expandable_memory_of_several_allocations(client: Client, gpu: Card) -> None:
    """As torch's expandable segments: one range of addresses, several allocations."""
    from cuda.bindings import driver

    unit = gpu.granularity()
    with gpu.current():
        result, base = driver.cuMemAddressReserve(4 * unit, 0, 0, 0)
        assert not result
        handles = [cuda.create(gpu.ordinal, unit) for _ in range(2)]
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = gpu.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for number, handle in enumerate(handles):
            assert not driver.cuMemMap(int(base) + number * unit, unit, 0, handle, 0)[0]
        assert not driver.cuMemSetAccess(int(base), 2 * unit, [access], 1)[0]
    region = client.register((int(base), 2 * unit))
    assert region.nbytes == 2 * unit
    region.unregister()
    client.register((int(base) + unit // 2, 4096)).unregister()
    with gpu.current():
        driver.cuMemUnmap(int(base), 2 * unit)
        for handle in handles:
            driver.cuMemRelease(handle)
        driver.cuMemAddressFree(int(base), 4 * unit)


def test_the_gpu_of_a_client(nodes: Nodes, gpu: Card) -> None:
    node = nodes.start()
    with node.connect(gpu=gpu.uuid) as client:
        assert client.register((gpu.alloc(NBYTES), NBYTES)).device == gpu.uuid
    unknown: tuple[Any, ...] = ("GPU-00000000-0000-0000-0000-000000000000", cuda.count(), str(cuda.count()), -1, 1.5)
    for one in unknown:
        with pytest.raises(ConnectError, match=f"this process sees {gpu.uuid}"):
            node.connect(gpu=one)
    with node.connect():  # nothing of those is left: the rank is free
        pass


def test_registering_over_and_over_keeps_nothing(client: Client, gpu: Card) -> None:
    address = gpu.allocated(4 << 20, "vmm")
    plain = gpu.alloc(NBYTES)
    for nbytes, start in ((NBYTES, plain), (4 << 20, address)):
        client.register((start, nbytes)).unregister()
    before = leaks.held()
    for _ in range(50):
        client.register((address, 4 << 20)).unregister()
        client.register((plain, NBYTES)).unregister()
    assert not leaks.left_behind(before)


def test_descriptors_for_other_processes(gpu: Card) -> None:
    """What the daemon and the emulated NIC get."""
    plain, mapped = gpu.alloc(NBYTES), gpu.allocated(4 << 20, "vmm")
    found = cuda.handles_of(gpu, plain + 4096, 4096)
    assert (found.kind, found.offset, len(found.ipc)) == ("ipc", 4096, 64)
    found.close()
    found = cuda.handles_of(gpu, mapped + 4096, 4096)
    assert (found.kind, found.offset) == ("vmm", 4096)
    assert found.allocation_bytes == 4 << 20
    again = gpu.open_vmm(found.vmm, found.allocation_bytes)
    gpu.write(mapped + 4096, np.full(64, 7, np.uint8))
    assert bool((gpu.read(again.address + found.offset, 64) == 7).all())
    gpu.unmap(again)
    found.close()


@pytest.mark.parametrize("function", ["cuMemGetAllocationGranularity", "cuMemRetainAllocationHandle"])
def test_handles_that_cannot_be_had_leave_no_descriptor(gpu: Card, control: Control, function: str) -> None:
    mapped = gpu.allocated(4 << 20, "vmm")
    before = leaks.held()
    for at in range(1, 8):
        control.fault(function, at, 999)
        with contextlib.suppress(cuda.CudaError, RelayError):
            cuda.handles_of(gpu, mapped, 4096).close()
    control.recover()
    assert not leaks.left_behind(before)


@pytest.mark.parametrize(
    ("function", "error", "code"),
    [
        ("cuDevicePrimaryCtxRetain", 2, ErrorCode.NO_MEMORY),
        ("cuMemHostRegister", 2, ErrorCode.NO_MEMORY),
        ("cuStreamCreateWithPriority", 2, ErrorCode.NO_MEMORY),
        ("cuMemHostAlloc", 2, ErrorCode.NO_MEMORY),
        ("cuMemAlloc", 2, ErrorCode.NO_MEMORY),
        ("cuMemcpy2DAsync", 719, ErrorCode.GPU_ERROR),
        ("cuMemHostRegister", 999, ErrorCode.GPU_ERROR),
    ],
)
def test_failing_preparation_is_told_and_can_be_tried_again(
    client: Client, gpu: Card, control: Control, function: str, error: int, code: ErrorCode
) -> None:
    address = gpu.alloc(NBYTES)
    control.fault(function, 1, error)
    with pytest.raises(RelayError) as failure:
        client.register((address, NBYTES))
    assert failure.value.code is code
    assert "CUDA_ERROR_" in str(failure.value)
    region = client.register((address, NBYTES))
    region.unregister()


def test_a_lane_that_could_not_be_prepared_is_prepared_later(nodes: Nodes, gpu: Card, control: Control) -> None:
    first, second = nodes.pair()
    with first.connect(gpu=gpu.ordinal) as sender, second.connect() as receiver:
        link = gpus.link(
            sender, receiver, gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "private")
        )
        arguments = ([link.source.address], [link.remote.address], NBYTES)
        for function in ("cuMemHostRegister", "cuStreamCreateWithPriority", "cuMemcpy2DAsync", "cuStreamSynchronize"):
            control.fault(function, 1, 2)
            with pytest.raises(RelayError):
                sender.write(link.remote, *arguments)
        sender.write(link.remote, *arguments).wait(20)


def test_the_callers_threads_keep_their_cuda_context(nodes: Nodes, gpu: Card, other_gpu: Card) -> None:
    """What torch takes for its device is the context that is current: no call may leave another one behind."""
    (first, second), node = nodes.pair((1, 1)), nodes.start(2)
    found: dict[str, int] = {}

    def current() -> int:
        return int(cuda._call("cuCtxGetCurrent") or 0)

    def through_both(name: str, sender: Client, receiver: Client) -> None:
        with sender, receiver:
            source, destination = gpus.make(sender, NBYTES, "gpu", gpu), gpus.make(receiver, NBYTES, "vmm", other_gpu)
            found[f"{name}: register"] = current()
            link = gpus.link(sender, receiver, source, destination)
            found[f"{name}: open"] = current()
            sender.write(link.remote, [source.address], [link.remote.address], NBYTES).wait(20)
            found[f"{name}: write"] = current()
            link.remote.close()
            destination.region.unregister(10)
        found[f"{name}: close"] = current()

    def on_a_thread(context: int) -> None:
        found.clear()
        if context:
            cuda._call("cuCtxSetCurrent", context)
        through_both("relay", first.connect(gpu=gpu.ordinal), second.connect(gpu=other_gpu.ordinal))
        through_both("local", node.connect(0, gpu=gpu.ordinal), node.connect(1, gpu=other_gpu.ordinal))

    for context in (0, other_gpu.context):
        with ThreadPoolExecutor(1) as thread:
            thread.submit(on_a_thread, context).result(60)
        assert found == dict.fromkeys(found, context)
