"""Measure one turn of one server: the same client, prompts and figures for all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.peers.busy import busy_core
from benchmarks.peers.servers import Running
from benchmarks.peers.weights import MODEL
from benchmarks.peers.workloads import PeerWorkload, sessions_of, warmup_of
from triptych.core.errors import BenchmarkError
from triptych.loadgen.client import open_client
from triptych.loadgen.measure import OPEN_LOOP_CONNECTIONS
from triptych.loadgen.report.processes import watch
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.report.stats import Slo, error_counts, summarize
from triptych.loadgen.run import Run, closed_loop, open_loop
from triptych.loadgen.workload.openai_requests import Workload
from triptych.loadgen.workload.turns import Session, requests_of

Figures = dict[str, float]


@dataclass(frozen=True)
class Conditions:
    """Settings that all turns of a result file share."""

    peers: Sequence[str]
    """All have turns in each round: one that came later would be compared across time."""
    topologies: Sequence[str]
    seed: int
    requests: int | None
    """In each round; None: enough for the number of clients."""


async def measure_turn(
    server: Running, workload: PeerWorkload, scope: str, conditions: Conditions
) -> tuple[Figures, dict[str, int]]:
    """Figures and errors of one round.

    Raises: BenchmarkError if the warm-up fails
    """
    form = Workload(model=MODEL, seed=conditions.seed)
    if workload.name not in server.warm:
        await _warm_up(server, workload, form)
    sessions = sessions_of(workload, scope, conditions.requests)
    with busy_core(workload.is_busy) as busy_s:
        async with watch(server.processes) as usage:
            before = busy_s()
            run = await _press(server.url, workload, form, sessions)
            busy = busy_s() - before
    cost = usage.figures()
    figures = _numbers({**summarize(run, Slo()), **cost})
    figures |= derived(figures, busy) | {"start_s": server.started_in_s}
    errors = error_counts(run.samples) | wrong_lengths(run.samples, sessions)
    return figures, errors


def derived(figures: Figures, busy_s: float) -> Figures:
    """CPU time of a request, and the cores that neither server, client nor busy loop used."""
    other = figures["other_cores"] - busy_s / figures["duration"]
    return {
        "cpu_s_per_request": figures["server_cpu_s"] / max(1.0, figures["completed"]),
        "other_cores": max(0.0, other),
    }


def wrong_lengths(samples: Sequence[Sample], sessions: Sequence[Session]) -> dict[str, int]:
    """An error if the server counts other tokens than were sent, or answers more or fewer."""
    good = [sample for sample in samples if sample.error is None]
    if len(good) < requests_of(sessions):
        return {}  # the failed ones have errors of their own
    turns = [turn for session in sessions for turn in session.turns]
    found = {
        "prompt tokens": (
            sum(one.prompt_tokens for one in good),
            sum(turn.prompt_tokens for turn in turns),
        ),
        "output tokens": (
            sum(one.output_tokens for one in good),
            sum(turn.output_tokens for turn in turns),
        ),
    }
    return {
        f"{counted} {name} instead of {sent}": 1
        for name, (counted, sent) in found.items()
        if counted != sent
    }


async def _warm_up(server: Running, workload: PeerWorkload, form: Workload) -> None:
    async with open_client(server.url, 2) as client:
        run = await closed_loop(client, form, warmup_of(workload), 2, _ignore)
    for error in error_counts(run.samples):
        raise BenchmarkError(f"{server.peer.name}: the warm-up failed: {error}")
    server.warm.add(workload.name)


async def _press(
    url: str, workload: PeerWorkload, form: Workload, sessions: Sequence[Session]
) -> Run:
    if workload.rate_per_s is not None:
        async with open_client(url, OPEN_LOOP_CONNECTIONS) as client:
            return await open_loop(client, form, sessions, _ignore)
    async with open_client(url, workload.clients) as client:
        return await closed_loop(client, form, sessions, workload.clients, _ignore)


_ignore: Callable[[Sample], None] = lambda _: None  # noqa: E731


def _numbers(figures: dict[str, int | float | None]) -> Figures:
    return {name: value for name, value in figures.items() if value is not None}
