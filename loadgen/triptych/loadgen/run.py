"""Run a workload in a closed loop (fixed concurrency) or an open loop (arrival times)."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import httpx

from triptych.core.errors import BenchmarkError
from triptych.loadgen.client import send
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.workload.openai_requests import Workload
from triptych.loadgen.workload.turns import Session

OnDone = Callable[[Sample], None]

CALIBRATION_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one run, in the order in which they ended."""

    samples: tuple[Sample, ...]
    duration_s: float


async def closed_loop(
    client: httpx.AsyncClient,
    workload: Workload,
    sessions: Iterable[Session],
    concurrency: int,
    on_done: OnDone,
) -> Run:
    """Run sessions with a fixed concurrency until all are done; pauses are included."""
    samples = list[Sample]()

    def note(sample: Sample) -> None:
        samples.append(sample)
        on_done(sample)

    async def one_after_another(shared: Iterator[Session]) -> None:
        for session in shared:
            await _take_turns(client, workload, session, note)

    start, shared = perf_counter(), iter(sessions)
    await asyncio.gather(*(one_after_another(shared) for _ in range(concurrency)))
    return Run(tuple(samples), perf_counter() - start)


async def open_loop(
    client: httpx.AsyncClient, workload: Workload, sessions: Sequence[Session], on_done: OnDone
) -> Run:
    """Start each session at its arrival time, independent of the server's speed.

    Latency counts from the due time, so a slow client does not hide delays. A later turn is due
    one pause after the end of the turn before.
    """
    samples = list[Sample]()

    def note(sample: Sample) -> None:
        samples.append(sample)
        on_done(sample)

    bodies = [
        workload.body(session.turns[0]) for session in sessions
    ]  # built before the clock starts
    start = perf_counter()
    await asyncio.gather(
        *(
            _take_turns(client, workload, one, note, body, start + one.start_s)
            for one, body in zip(sessions, bodies, strict=True)
        )
    )
    return Run(tuple(samples), perf_counter() - start)


async def _take_turns(
    client: httpx.AsyncClient,
    workload: Workload,
    session: Session,
    note: OnDone,
    first: dict[str, object] | None = None,
    due_s: float | None = None,
) -> None:
    """Send the turns of one session; stop after a failed turn.

    ``first``: the body of the first turn; ``due_s``: its due time, None: now.
    """
    for turn in session.turns:
        body, first = first or workload.body(turn), None
        if due_s is not None:
            due_s += turn.pause_s
            await asyncio.sleep(due_s - perf_counter())
        sample = await send(client, workload.endpoint, body, due_s)
        note(sample)
        if sample.error is not None:
            return
        due_s = sample.ended_s


async def calibrate(client: httpx.AsyncClient, workload: Workload) -> Workload:
    """Find a prompt form that gives prompts of the wanted length on this server.

    Token ids are tried first; they are used if the server counts as many tokens as were sent.
    Otherwise text is sent, and the number of words is corrected until the server's token count
    is right, or as close as possible.

    Raises: BenchmarkError if the server rejects both
    """
    turn = replace(workload.turn(-1), output_tokens=1)
    wanted = turn.prompt_tokens
    if workload.endpoint == "completions" and workload.form == "tokens":
        sample = await send(client, workload.endpoint, workload.body(turn))
        # One more is a start token of the server's own; 0 is a server that reports no usage.
        if sample.error is None and sample.prompt_tokens in (wanted, wanted + 1, 0):
            return workload
    extra = 0
    for _ in range(CALIBRATION_ROUNDS):
        probe = replace(workload, form="text", extra_words=extra)
        sample = await send(client, probe.endpoint, probe.body(turn))
        if sample.error is not None:
            raise BenchmarkError(sample.error)
        if sample.prompt_tokens in (0, wanted):
            break
        extra = max(1 - wanted, extra + wanted - sample.prompt_tokens)
    return replace(workload, form="text", extra_words=extra)
