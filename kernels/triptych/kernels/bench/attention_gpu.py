"""Benchmark of decode attention on a GPU against torch's in bfloat16 and a memory copy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from time import perf_counter

import torch

from triptych.core.layout import KeyOrder
from triptych.kernels.bench.attention_cpu import (
    Shape,
    build_case,
    check_case,
    torch_attention,
)

LAYER = Shape(heads=32, kv_heads=8, head_dim=128)
"""One layer of Llama-3.1-8B."""
COPY_BYTES = 2**30
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Types of queries by their names on the command line."""
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One measured case; times of the device, without the host."""

    format: str
    key_order: KeyOrder
    query: str
    """Type of the query, a name of ``DTYPES``."""
    batch: int
    context: int
    """Tokens of each request."""
    error: float
    """Relative error against the reference."""
    median_us: float
    fastest_us: float
    host_us: float
    """Host time to queue a call that is not captured in a CUDA graph."""
    bytes: int
    """Bytes of pages that attention has to read."""
    gb_per_s: float
    """Of the median call, as are the ratios that follow."""
    share_of_copy: float
    """Bandwidth divided by that of a copy, reads and writes counted."""
    sdpa_us: float
    """Median of the fastest form of torch's attention on contiguous bfloat16 keys and values."""
    speedup_vs_sdpa_bf16: float


def run(
    formats: Sequence[str] = ("fp16", "k8v8", "k8v4", "k4v2", "diffkv"),
    key_orders: Sequence[KeyOrder] = ("token", "channel"),
    queries: Sequence[str] = ("bf16", "fp32"),
    *,
    batch: int = 32,
    context: int = 8192,
    shape: Shape = LAYER,
    repeats: int = 50,
) -> Iterator[GpuRow]:
    """Measure each combination on the current CUDA device; fp16 pages have one order of keys.

    Raises:  ConfigError for an unknown format; TriptychError if the kernels disagree with
             the reference
    """
    copied = COPY_BYTES * 2 / median(copy_seconds(repeats))
    query, baselines = torch_attention(shape, batch, context, "cuda", torch.bfloat16)
    baseline = min(median(device_seconds(call, repeats)) for call in baselines)
    for name, order in cases(formats, key_orders):
        case = build_case(shape, name, query, context, order)
        for dtype in queries:
            asked = replace(case, query=query.to(DTYPES[dtype]))
            error = check_case(asked, "cuda", name)
            seconds = device_seconds(lambda asked=asked: asked.attend("cuda"), repeats)
            speed = case.read_bytes / median(seconds)
            yield GpuRow(
                format=name,
                key_order=order,
                query=dtype,
                batch=batch,
                context=context,
                error=error,
                median_us=median(seconds) * 1e6,
                fastest_us=min(seconds) * 1e6,
                host_us=host_seconds(lambda asked=asked: asked.attend("cuda"), repeats) * 1e6,
                bytes=case.read_bytes,
                gb_per_s=speed / 1e9,
                share_of_copy=speed / copied,
                sdpa_us=baseline * 1e6,
                speedup_vs_sdpa_bf16=baseline / median(seconds),
            )


def cases(formats: Sequence[str], key_orders: Sequence[KeyOrder]) -> Iterator[tuple[str, KeyOrder]]:
    """Each format in each order of keys; fp16 pages have one."""
    for name, order in product(formats, key_orders):
        if name != "fp16" or order == key_orders[0]:
            yield name, order


def copy_seconds(repeats: int) -> list[float]:
    """Seconds of copying ``COPY_BYTES`` of random bytes, for the bandwidth of device memory.

    The copy inverts all bits, since a plain copy in a CUDA graph takes half as long again.
    """
    source = torch.randint(2**62, (COPY_BYTES // 8,), device="cuda")
    target = torch.empty_like(source)
    return device_seconds(lambda: torch.bitwise_not(source, out=target), repeats)


def device_seconds(call: Call, repeats: int) -> list[float]:
    """Seconds of each call, between two CUDA events.

    The call is captured in a CUDA graph and replayed, which excludes the host's work.
    """
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 1)]
    for before, after in pairs:
        before.record()
        graph.replay()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairs[1:]]


def host_seconds(call: Call, repeats: int) -> float:
    """Median seconds until a call returns while the device is idle."""
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times)
