"""Loads and figures of simulated runs, in the same form as measured runs."""

from collections.abc import Iterable, Iterator, Mapping

from triptych.core import messages as core
from triptych.loadgen.report.stats import Figures, Slo, distribution, goodput_per_gb, percentile
from triptych.loadgen.workload.turns import Session
from triptych.simulator import Job, Outcome, Trial


def jobs_of(
    sessions: Iterable[Session],
    asked: core.Slo = core.NO_SLO,
    total_tokens: int | None = None,
    image_tokens: int = 0,
) -> Iterator[tuple[Job, ...]]:
    """Sessions in the simulator's form; ``asked``: the SLO of each request.

    ``total_tokens``: requests set no ``max_tokens``, so the server allows as many as a context of
    this length has left. None: ``max_tokens`` is the length of the answer.
    ``image_tokens``: of each image, beside those of the text.
    """
    for number, session in enumerate(sessions):
        lengths = [one.prompt_tokens + image_tokens * len(one.images) for one in session.turns]
        yield tuple(
            Job(
                id=f"{number}.{turn}",
                prompt_tokens=lengths[turn],
                max_tokens=max(one.output_tokens, (total_tokens or 0) - lengths[turn]),
                output_tokens=one.output_tokens,
                at_s=session.start_s if turn == 0 else one.pause_s,
                slo=asked,
                images=tuple((name, image_tokens) for name in one.images),
                segments=tuple((part.key, part.tokens) for part in one.segments),
            )
            for turn, one in enumerate(session.turns)
        )


def figures_of(trial: Trial, slo: Slo) -> Figures:
    """Figures of a simulated run, like ``summarize`` of a measured one.

    Inter-token latencies are those of decode steps; the bytes of keys and values are what the
    router has booked, which is more than what is held (``mean_held_kv_bytes``).
    """
    done = [one for one in trial.outcomes if one.is_done]
    inside = [one for one in done if is_inside(one, slo)]
    read = sum(one.job.prompt_tokens for one in done)
    written = sum(one.job.answer_tokens for one in done)
    duration = trial.duration_s or 1e-9
    figures: Figures = {
        "duration": trial.duration_s,
        "completed": len(done),
        "failed": len(trial.outcomes) - len(done),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(done) / duration,
        "request_goodput": len(inside) / duration if slo.is_set else None,
        "output_throughput": written / duration,
        "total_token_throughput": (read + written) / duration,
        "prefix_hit_ratio": sum(one.cached_tokens for one in done) / max(1, read),
        **distribution("queue", [one.began_s - one.due_s for one in done]),
        **distribution("ttft", [one.first_s - one.due_s for one in done]),
        **distribution("tpot", [tpot for one in done if (tpot := tpot_s(one)) is not None]),
        **distribution("itl", weighted(trial.gaps)),
        **distribution("e2el", [one.last_s - one.due_s for one in done]),
        **distribution(
            "norm_latency", [(one.last_s - one.due_s) / one.job.answer_tokens for one in done]
        ),
        "mean_kv_bytes": trial.mean_booked_bytes,
        "mean_held_kv_bytes": trial.mean_held_bytes,
        "peak_kv_bytes": trial.peak_booked_bytes,
    }
    return figures | goodput_per_gb(figures)


def tpot_s(outcome: Outcome) -> float | None:
    """Time per output token after the first; None for an answer of one token."""
    count = outcome.job.answer_tokens
    return (outcome.last_s - outcome.first_s) / (count - 1) if count > 1 else None


def is_inside(outcome: Outcome, slo: Slo) -> bool:
    """Whether a request met all limits."""
    ttft_s = outcome.first_s - outcome.due_s
    return (slo.ttft_ms is None or ttft_s * 1e3 <= slo.ttft_ms) and (
        slo.tpot_ms is None or (tpot_s(outcome) or 0.0) * 1e3 <= slo.tpot_ms
    )


MOST_VALUES = 200_000


def weighted(gaps: Mapping[float, int]) -> list[float]:
    """Expand gaps and their counts to a list; long lists are thinned out evenly."""
    total = sum(gaps.values())
    every = max(1, total // MOST_VALUES)
    values, seen = list[float](), 0
    for gap, count in sorted(gaps.items()):
        before, seen = seen // every, seen + count
        values += [gap] * (seen // every - before)
    return values


def per_job(trial: Trial) -> dict[str, object]:
    """Lists with a value per request, in seconds, as in the file of a measured run."""
    outcomes = sorted(trial.outcomes, key=lambda one: one.due_s)
    return {
        "input_lens": [one.job.prompt_tokens for one in outcomes],
        "output_lens": [one.job.answer_tokens if one.is_done else 0 for one in outcomes],
        "ttfts": [max(0.0, one.first_s - one.due_s) for one in outcomes],
        "itls": [_gaps(one) for one in outcomes],
        "latencies": [one.last_s - one.due_s for one in outcomes],
        "start_times": [one.due_s for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def _gaps(outcome: Outcome) -> list[float]:
    """The mean gap for each token; the simulator keeps no single gaps."""
    gap = tpot_s(outcome)
    return [] if gap is None else [gap] * (outcome.job.answer_tokens - 1)


def decision_ms(trial: Trial) -> dict[str, float]:
    """CPU time of the router's decisions, in milliseconds."""
    values = [seconds * 1e3 for seconds in trial.decision_s]
    return {
        "p50": percentile(values, 50),
        "p99": percentile(values, 99),
        "mean": sum(values) / len(values),
        "max": max(values),
        "count": float(len(values)),
    }


def shard_figures(shards: int, trial: Trial) -> dict[str, object]:
    """Balance of several router shards, and the load of the busiest one.

    ``shard_balance``: work of the busiest shard's workers over the mean of all shards.
    ``router_cpu_s``: real CPU time of the busiest router, decisions and ticks.
    """
    parts = trial.shards.values()
    mean_s = sum(part.busy_s for part in parts) / shards or 1e-9
    return {
        "shards": shards,
        "shard_balance": max(part.busy_s for part in parts) / mean_s,
        "shard_requests": [part.requests for part in parts],
        "shard_choices": trial.shard_choices if shards > 1 else {},
        "router_cpu_s": max(part.router_s for part in parts),
    }
