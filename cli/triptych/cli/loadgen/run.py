"""Runs a workload: in a closed loop, where so many are always under way, or as it arrives."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from time import perf_counter

import httpx

from triptych.cli.loadgen.client import send
from triptych.cli.loadgen.sample import Sample
from triptych.cli.loadgen.workload import Workload, poisson_arrivals_s
from triptych.core.errors import BenchmarkError

OnDone = Callable[[Sample], None]

CALIBRATION_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run, in the order in which they ended."""

    samples: tuple[Sample, ...]
    duration_s: float


async def closed_loop(
    client: httpx.AsyncClient, workload: Workload, indices: range, concurrency: int, on_done: OnDone
) -> Run:
    """Keep ``concurrency`` requests under way until all are done."""
    samples = list[Sample]()

    async def one_after_another(shared: Iterator[int]) -> None:
        for index in shared:
            sample = await send(client, workload.endpoint, workload.body(index))
            samples.append(sample)
            on_done(sample)

    start, shared = perf_counter(), iter(indices)
    await asyncio.gather(*(one_after_another(shared) for _ in range(concurrency)))
    return Run(tuple(samples), perf_counter() - start)


async def open_loop(
    client: httpx.AsyncClient,
    workload: Workload,
    indices: range,
    rate_per_s: float,
    on_done: OnDone,
) -> Run:
    """Send requests as a Poisson process, however slow the answers are.

    Latency counts from the moment a request was due, so a client that fell behind does not
    flatter the server.
    """
    samples = list[Sample]()
    bodies = [workload.body(index) for index in indices]
    start = perf_counter()

    async def one(body: dict[str, object], due_s: float) -> None:
        await asyncio.sleep(due_s - perf_counter())
        sample = await send(client, workload.endpoint, body, due_s)
        samples.append(sample)
        on_done(sample)

    due = poisson_arrivals_s(len(bodies), rate_per_s, workload.seed)
    await asyncio.gather(*(one(body, start + at) for body, at in zip(bodies, due, strict=True)))
    return Run(tuple(samples), perf_counter() - start)


async def calibrate(client: httpx.AsyncClient, workload: Workload) -> Workload:
    """Find prompts of the wanted length that this server takes.

    Token ids are tried first: a server that counts as many as were sent takes them. Else
    words are sent, and their number is corrected until the server's own count is right, or
    as near as it comes.

    Raises: BenchmarkError if the server refuses both
    """
    probe = replace(workload, output_tokens=1)
    if workload.endpoint == "completions" and workload.form == "tokens":
        sample = await send(client, probe.endpoint, probe.body(-1))
        # One more is a start token of the server's own; 0 is a server that reports no usage.
        taken = (workload.prompt_tokens, workload.prompt_tokens + 1, 0)
        if sample.error is None and sample.prompt_tokens in taken:
            return workload
    words = workload.prompt_tokens
    for _ in range(CALIBRATION_ROUNDS):
        probe = replace(probe, form="text", words=words)
        sample = await send(client, probe.endpoint, probe.body(-1))
        if sample.error is not None:
            raise BenchmarkError(sample.error)
        if sample.prompt_tokens in (0, workload.prompt_tokens):
            break
        words = max(1, words + workload.prompt_tokens - sample.prompt_tokens)
    return replace(workload, form="text", words=words)
