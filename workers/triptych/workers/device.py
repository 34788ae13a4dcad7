# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.from_numpy and torch's CUDA runtime have no type hints.
"""The device of a stage, and its access to memory shared with other processes."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError, PoolError
from triptych.kvpool import Arena, DeviceArenas

Bytes = NDArray[np.uint8]
Numbers = NDArray[Any]

_PORTABLE, _MAPPED = 1, 2
"""``cudaHostRegisterPortable``, ``cudaHostRegisterMapped``."""
_PINNED_BYTES = 1 << 20
"""Largest array that is copied through pinned memory, which torch keeps for the next one."""


@dataclass(frozen=True, slots=True)
class Captured:
    """Work that was captured as a graph."""

    replay: Callable[[], object]
    """Queues the work again, on the memory that it used when it was captured."""
    output: Tensor
    """What the work returned; each replay writes it again."""


class Device:
    """The CPU: shared memory is used without a copy."""

    name = torch.device("cpu")
    is_host = True
    can_capture = False
    """Whether the device has graphs."""

    def share(self, memory: Bytes) -> Tensor:
        """A tensor over memory that other processes map too."""
        return torch.from_numpy(memory)

    def share_part(self, memory: Bytes, part: Numbers) -> Tensor:
        """A tensor over an array in memory that other processes map too; all of it is mapped.

        Parts of one page of memory cannot be mapped apart.
        """
        start = part.ctypes.data - memory.ctypes.data
        shared = self.share(memory)[start : start + part.nbytes]
        return shared.view(torch.from_numpy(part).dtype).view(part.shape)

    def share_arena(self, arena: Arena) -> Tensor:
        """A tensor over all pages of a pool, uint8 [pages, bytes of a page]."""
        return self.share(arena.data)

    def put(self, numbers: Numbers) -> Tensor:
        """A tensor of an array: a view on the CPU, a copy elsewhere."""
        return torch.from_numpy(numbers)

    def put_into(self, target: Tensor, numbers: Numbers) -> None:
        """Copy an array into a tensor of the same shape and type on the device."""
        target.copy_(torch.from_numpy(numbers))

    def graph_pool(self) -> object:
        """Memory that several graphs share, which replay one after another."""
        return None

    def capture(self, work: Callable[[], Tensor], pool: object) -> Captured:
        """Capture work as a graph, without running it.

        The work must have run once with the same shapes. It only queues kernels: it puts nothing
        on the device and waits for nothing.

        Raises: RuntimeError if that does not hold, or the device has no graphs
        """
        raise RuntimeError(f"{self.name} has no graphs")

    @property
    def free_bytes(self) -> int:
        """Free device memory in bytes; 0 on the CPU."""
        return 0

    def wait(self) -> None:
        """Wait until all work of the device is done and other processes see its writes."""


CPU = Device()


class Gpu(Device):
    """A GPU, which reads and writes shared memory of the host over the bus.

    So pages outlive the process and the GPU that wrote them, and transfers to other nodes and to
    disk need no GPU.
    """

    name = torch.device("cuda")
    is_host = False
    can_capture = True

    def __init__(self) -> None:
        self._mapped = weakref.WeakValueDictionary[int, _Mapped]()

    def share(self, memory: Bytes) -> Tensor:
        """A tensor over host memory, which stays mapped for the GPU while a tensor uses it.

        Raises: PoolError if the driver refuses
        """
        address = memory.ctypes.data
        mapped = self._mapped.get(address)
        if mapped is None or mapped.memory.shape != memory.shape:
            mapped = self._mapped[address] = _Mapped(memory)
        return torch.as_tensor(mapped, device=self.name)

    def share_arena(self, arena: Arena) -> Tensor:
        if isinstance(arena, DeviceArenas):
            return torch.as_tensor(_Pages(arena), device=self.name)
        return super().share_arena(arena)

    def put(self, numbers: Numbers) -> Tensor:
        return _pinned(numbers).to(self.name, non_blocking=True)

    def put_into(self, target: Tensor, numbers: Numbers) -> None:
        target.copy_(_pinned(numbers), non_blocking=True)

    def graph_pool(self) -> object:
        return torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], Tensor], pool: object) -> Captured:
        graph, memory = torch.cuda.CUDAGraph(), cast(Any, pool)
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            output = work()
        return Captured(graph.replay, output)

    @property
    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # by torch, unused
        return free + kept

    def wait(self) -> None:
        torch.cuda.synchronize()


def _pinned(numbers: Numbers) -> Tensor:
    """A copy of an array in pinned memory, if it is small.

    A copy to the device from other memory makes the host wait for all queued work. torch does not
    use a pinned block again before the copy from it is done.
    """
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory() if 0 < numbers.nbytes <= _PINNED_BYTES else tensor


def put_beside(tensor: Tensor, numbers: Numbers) -> Tensor:
    """A tensor of an array, on the device of another tensor."""
    source = _pinned(numbers) if tensor.is_cuda else torch.from_numpy(numbers)
    return source.to(tensor.device, non_blocking=True)


def read_together(numbers: Sequence[Tensor]) -> list[NDArray[np.int32]]:
    """Tensors of int32 of one device on the host, after one wait; none if there are none."""
    if len(numbers) < 2:
        return [each.cpu().numpy() for each in numbers]
    flat = torch.cat([each.reshape(-1) for each in numbers]).cpu().numpy()
    ends = list(accumulate(each.numel() for each in numbers))
    return [
        part.reshape(tuple(each.shape))
        for part, each in zip(np.split(flat, ends[:-1]), numbers, strict=True)
    ]


class _Mapped:
    """Host memory that is mapped for the GPU; torch keeps this object while a tensor uses it."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        address, size = memory.ctypes.data, memory.nbytes
        runtime = cast(Any, torch.cuda.cudart())
        error = int(runtime.cudaHostRegister(address, size, _PORTABLE | _MAPPED))
        if error:
            raise PoolError(
                f"the GPU cannot map {size:,} bytes of shared memory (CUDA error {error}): lower "
                "pool.kv_cache_memory_bytes, or set num_gpus to 0 (the stage computes on the CPU)"
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address)

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": self.memory.shape,
            "typestr": "|u1",
            "data": (self.memory.ctypes.data, False),
            "strides": None,
        }


class _Pages:
    """Pages that are mapped for the GPU; torch keeps this object while a tensor uses it."""

    def __init__(self, arena: DeviceArenas) -> None:
        self._arena = arena

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": (self._arena.pages, self._arena.page_bytes),
            "typestr": "|u1",
            "data": (self._arena.address, False),
            "strides": None,
        }


_gpu = cache(Gpu)  # one, since memory is mapped once


def device_for(num_gpus: float) -> Device:
    """The device of a process with ``num_gpus`` GPUs from Ray; a fraction counts as one.

    Raises: ConfigError if torch sees none
    """
    if num_gpus <= 0:
        return CPU
    if not torch.cuda.is_available():
        raise ConfigError(
            f"num_gpus={num_gpus:g}, and torch {torch.__version__} sees no GPU: set it to 0 (the "
            "stage computes on the CPU), or install the CUDA build of torch where GPUs are"
        )
    return _gpu()
