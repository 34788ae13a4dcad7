"""Peak rates of a GPU and its bus, beside those of kernels in ``benchmarks/kernels/gpu.py``.

They are those of device memory, of matrix products, and of host memory that kernels read and write
in place, as stages do with pages in host memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.kernels.bench.attention_gpu import device_seconds
from triptych.workers.device import device_for

Bytes = NDArray[np.uint8]

MATRIX = 8192
"""Rows and columns of both matrices of the product."""
COPIED_BYTES = 1 << 30
SHARED_BYTES = 1 << 26
"""Of host memory that kernels read or write: more than the cache holds."""
REGISTERED_BYTES = 4 << 30
READERS = 32
"""Programs that read the same host memory: blocks of queries of a prompt read the same pages."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit of the device."""

    name: str
    amount: float
    """Bytes read and written, or operations, of one call."""
    unit: str
    """Of ``rate``."""
    median_us: float
    fastest_us: float
    rate: float
    """Of the median call."""


def rate_of(name: str, amount: float, seconds: list[float], *, is_bytes: bool = True) -> Ceiling:
    """The row of a limit, from the bytes or operations of a call and the seconds of each."""
    unit, scale = ("GB/s", 1e9) if is_bytes else ("TFLOP/s", 1e12)
    typical, fastest = median(seconds), min(seconds)
    return Ceiling(name, amount, unit, typical * 1e6, fastest * 1e6, amount / typical / scale)


@dataclass(frozen=True, slots=True)
class Limit:
    """Work that shows one limit."""

    name: str
    amount: float
    """Bytes, or operations."""
    call: Callable[[], Tensor]
    is_bytes: bool = True


def limits(device: torch.device, host: Tensor, copied_bytes: int, matrix: int) -> Iterator[Limit]:
    """Each limit but that of registering memory.

    ``host``: random bytes in memory of the host that kernels of the device use in place. Reads and
    writes are kernels, since the driver would have a copy done by other units.

    Shapes:  host [n] int64
    """
    source = torch.randint(2**62, (copied_bytes // 8,), device=device)
    target = torch.empty_like(source)
    # Inverted bits: a plain copy is no kernel.
    yield Limit(
        "device memory, read and written",
        2.0 * copied_bytes,
        lambda: torch.bitwise_not(source, out=target),
    )
    one, two = (torch.randn(matrix, matrix, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(one)
    yield Limit(
        f"bfloat16 product of {matrix} x {matrix}",
        2.0 * matrix**3,
        lambda: torch.mm(one, two, out=product),
        is_bytes=False,
    )
    near, size = torch.empty_like(host, device=device), float(host.nbytes)
    yield Limit("host memory, read", size, lambda: torch.bitwise_not(host, out=near))
    yield Limit("host memory, written", size, lambda: torch.bitwise_not(near, out=host))
    sums = torch.empty(READERS, dtype=torch.int64, device=device)
    every = host.expand(READERS, -1)
    yield Limit(
        f"host memory, read by {READERS} programs",
        READERS * size,
        lambda: torch.sum(every, dim=1, out=sums),
    )


def registering(share: Callable[[Bytes], object], nbytes: int, repeats: int) -> Ceiling:
    """How fast host memory whose pages are there is mapped for the device.

    ``share``: maps memory until what it returns is gone.
    """
    memory, seconds = np.ones(nbytes, np.uint8), list[float]()
    for _ in range(repeats):
        start = perf_counter()
        mapped = share(memory)
        seconds.append(perf_counter() - start)
        del mapped
    return rate_of("host memory, registered", float(nbytes), seconds)


def ceilings(repeats: int) -> Iterator[Ceiling]:
    """Measure all limits of the current CUDA device."""
    device = device_for(1)
    yield registering(device.share, REGISTERED_BYTES, repeats=3)
    memory = np.random.default_rng(0).integers(2**62, size=SHARED_BYTES // 8).view(np.uint8)
    host = device.share(memory).view(torch.int64)
    for limit in limits(device.name, host, COPIED_BYTES, MATRIX):
        seconds = device_seconds(limit.call, repeats)
        yield rate_of(limit.name, limit.amount, seconds, is_bytes=limit.is_bytes)
