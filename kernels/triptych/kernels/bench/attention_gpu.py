"""Benchmark of decode attention on a GPU against torch's in bfloat16 and a memory copy."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from triptych.kernels.bench.attention_cpu import (
    Case,
    Shape,
    build_case,
    check_case,
    torch_attention,
)

LAYER = Shape(heads=32, kv_heads=8, head_dim=128)
"""One layer of Llama-3.1-8B."""
COPY_BYTES = 2**30
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One measured case; times of the device, without the host."""

    format: str
    batch: int
    context: int
    """Tokens of each request."""
    time_us: float
    """Fastest call: noise only ever adds."""
    median_us: float
    host_us: float
    """Host time to queue a call that is not captured in a CUDA graph."""
    bytes: int
    """Bytes of pages that attention has to read."""
    gb_per_s: float
    share_of_copy: float
    """Bandwidth divided by that of a copy, reads and writes counted."""
    sdpa_us: float
    """Fastest form of torch's attention on contiguous bfloat16 keys and values."""
    speedup_vs_sdpa_bf16: float


def run(
    formats: Sequence[str] = ("fp16", "k8v8", "k8v4", "k4v2", "k8v4+k4v2+fp16"),
    *,
    batch: int = 32,
    context: int = 8192,
    shape: Shape = LAYER,
    repeats: int = 50,
) -> Iterator[GpuRow]:
    """Measure each format on the current CUDA device.

    Raises:  ConfigError for an unknown format; TriptychError if the kernels disagree with
             the reference
    """
    copied = COPY_BYTES * 2 / min(copy_seconds(repeats))
    query, baselines = torch_attention(shape, batch, context, "cuda", torch.bfloat16)
    baseline = min(min(device_seconds(call, repeats)) for call in baselines)
    for name in formats:
        case = build_case(shape, name, query, context)
        check_case(case, "cuda", name)
        yield _measure(case, name, context, copied, baseline, repeats)


def _measure(
    case: Case, name: str, context: int, copied: float, baseline: float, repeats: int
) -> GpuRow:
    seconds = device_seconds(lambda: case.attend("cuda"), repeats)
    speed = case.read_bytes / min(seconds)
    return GpuRow(
        format=name,
        batch=len(case.query),
        context=context,
        time_us=min(seconds) * 1e6,
        median_us=median(seconds) * 1e6,
        host_us=host_seconds(lambda: case.attend("cuda"), repeats) * 1e6,
        bytes=case.read_bytes,
        gb_per_s=speed / 1e9,
        share_of_copy=speed / copied,
        sdpa_us=baseline * 1e6,
        speedup_vs_sdpa_bf16=baseline / min(seconds),
    )


def copy_seconds(repeats: int) -> list[float]:
    """Seconds of copying ``COPY_BYTES``, for the bandwidth of device memory."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return device_seconds(lambda: target.copy_(source), repeats)


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
