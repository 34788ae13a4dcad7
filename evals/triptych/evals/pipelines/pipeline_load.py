"""Requests of one compression method at a rate, through the engines of the server.

Clients do not wait for each other (an open loop), so a method that is slow in any stage makes a
queue there. Without a pipeline, requests run one after the other, as in scripts around
``model.generate``; the time since a request's arrival counts in both.
"""

import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from triptych.core.config import AppConfig, require
from triptych.core.errors import ModelError
from triptych.core.messages import Failed, Request, Sampling
from triptych.evals.pipelines.kept_raw_pages import KeptRawPages
from triptych.kvpool import LocalPool
from triptych.router import RequestTrace
from triptych.workers.local import LocalServer

SAMPLE_S = 0.02
"""Time between two looks at the memory that is held."""
SETTLE_S = 10.0
STAGES = {
    "prefill": ("prefilling",),
    "compress": ("prefilled", "compressing", "planned", "encoding"),
    "decode": ("compressed", "decoding"),
}
"""States of a request, by the stage in which it is or for which it waits."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """How requests of a method run."""

    rate_per_s: float
    """Requests per second, as a Poisson process."""
    is_pipelined: bool = True
    """Whether stages work on several requests at once; if not, one request runs at a time."""
    reclaims: bool = True
    """Whether raw pages are freed once a prompt is compressed, or when its request ends."""

    def __post_init__(self) -> None:
        require(self.rate_per_s > 0, "rate", self.rate_per_s, "> 0")


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """Figures of a method in one pipeline; times in seconds from a request's arrival."""

    method: str
    rate_per_s: float
    is_pipelined: bool
    reclaims: bool
    prompt_tokens: int
    output_tokens: int
    requests: int
    duration_s: float
    """From the first arrival to the last token."""
    ttft_s: float
    """Mean, to the first token."""
    ttft_p99_s: float
    tpot_s: float
    """Mean time of a token after the first."""
    norm_latency_s: float
    """Mean time of a request, over its output tokens."""
    stage_s: Mapping[str, float]
    """Mean time of a request in each stage and in the queue before it."""
    mean_held_bytes: float
    """Pages of all requests, mean over the run."""
    peak_held_bytes: int
    compression_ratio: float
    """Bytes of raw pages over those of compressed ones, at the end of compression."""

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "kind": "load"}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises: TypeError if a value is missing"""
        return cls(**{name: value for name, value in data.items() if name != "kind"})

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(
            rate_per_s=self.rate_per_s, is_pipelined=self.is_pipelined, reclaims=self.reclaims
        )


@dataclass
class _Sample:
    """Times of one request; of ``time.monotonic``."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0


def run_pipeline(
    name: str,
    config: AppConfig,
    model_path: Path,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    pipeline: Pipeline,
    seed: int = 0,
) -> LoadRecord:
    """Serve the prompts, each for ``output_tokens``, and measure.

    The same ``seed`` has the same arrival times, in units of the mean gap, at every rate.

    Raises: ModelError if a request fails
    """
    settings = replace(
        config,
        pool=replace(config.pool, prefix_bytes=0, disk_path="", disk_bytes=0),
        experimental=replace(config.experimental, layers_at_once=0)
        if not pipeline.reclaims
        else config.experimental,
    )
    kind = LocalPool if pipeline.reclaims else KeptRawPages
    sampling = Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
    with LocalServer(settings, model_path, make_pool=kind) as server:
        server.complete([server.request(prompts[0], sampling)])  # compiles and warms up
        requests = [server.request(prompt, sampling) for prompt in prompts]
        gaps = random.Random(seed)
        offsets = [0.0]
        for _ in requests[1:]:
            offsets.append(offsets[-1] + gaps.expovariate(1.0) / pipeline.rate_per_s)
        with _HeldMemory(server) as memory:
            samples = _serve(server, requests, offsets, is_pipelined=pipeline.is_pipelined)
        traces = _traces(server, requests)
    stages = {
        stage: float(np.mean([_seconds_in(trace, states) for trace in traces]))
        for stage, states in STAGES.items()
    }
    known = [trace.report for trace in traces if trace.report is not None]
    ttft = [one.first_s - one.due_s for one in samples]
    return LoadRecord(
        method=name,
        rate_per_s=pipeline.rate_per_s,
        is_pipelined=pipeline.is_pipelined,
        reclaims=pipeline.reclaims,
        prompt_tokens=round(float(np.mean([len(prompt) for prompt in prompts]))),
        output_tokens=output_tokens,
        requests=len(requests),
        duration_s=max(one.last_s for one in samples) - samples[0].due_s,
        ttft_s=float(np.mean(ttft)),
        ttft_p99_s=float(np.percentile(ttft, 99)),
        tpot_s=float(np.mean([(s.last_s - s.first_s) / (output_tokens - 1) for s in samples])),
        norm_latency_s=float(np.mean([(s.last_s - s.due_s) / output_tokens for s in samples])),
        stage_s=stages,
        mean_held_bytes=memory.mean_bytes,
        peak_held_bytes=memory.peak_bytes,
        compression_ratio=sum(one.raw_bytes for one in known)
        / sum(one.stored_bytes for one in known),
    )


def _traces(server: LocalServer, requests: Sequence[Request]) -> list[RequestTrace]:
    """Traces of requests that have ended; the router hears of an end after the client."""
    wanted, give_up_s = [request.id for request in requests], time.monotonic() + SETTLE_S
    while True:
        known = {one.request: one for one in server.request_traces}
        found = [known[name] for name in wanted]
        if all(trace.ended for trace in found):
            return found
        if time.monotonic() > give_up_s:
            raise ModelError(f"requests did not end within {SETTLE_S:g} s of their last tokens")
        time.sleep(SAMPLE_S)


def _seconds_in(trace: RequestTrace, states: Sequence[str]) -> float:
    ends = [*(at for _, at in trace.steps[1:]), trace.ended]
    pairs = zip(trace.steps, ends, strict=True)
    return sum(end - at for (state, at), end in pairs if state in states)


def _serve(
    server: LocalServer,
    requests: Sequence[Request],
    offsets: Sequence[float],
    *,
    is_pipelined: bool,
) -> list[_Sample]:
    """Send each request at its time, from a thread of its own, and wait for all.

    Without a pipeline, none is sent before the one before it has ended.
    """
    start_s = time.monotonic()
    samples = [_Sample(start_s + offset) for offset in offsets]
    failures = list[Failed]()

    def client(request: Request, sample: _Sample) -> None:
        time.sleep(max(0.0, sample.due_s - time.monotonic()))
        for event in server.stream([request]):
            if isinstance(event, Failed):
                failures.append(event)
                return
            sample.last_s = time.monotonic()
            sample.first_s = sample.first_s or sample.last_s

    pairs = zip(requests, samples, strict=True)
    threads = [threading.Thread(target=client, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
        if not is_pipelined:
            thread.join()
    for thread in threads:
        thread.join()
    if failures:
        raise ModelError(f"{failures[0].request}: {failures[0].message}")
    return samples


class _HeldMemory:
    """Samples the pages that requests hold, in a thread."""

    def __init__(self, server: LocalServer) -> None:
        self._server, self._ended = server, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._seen = list[int]()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def mean_bytes(self) -> float:
        return float(np.mean(self._seen))

    @property
    def peak_bytes(self) -> int:
        return max(self._seen)

    def _look(self) -> None:
        page_bytes = self._server.plan.page_bytes
        while True:
            self._seen.append(self._server.pool.stat().held_pages * page_bytes)
            if self._ended.wait(SAMPLE_S):
                return
