"""Statistics of samples, with the names of vLLM's benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

import numpy as np

from triptych.loadgen.report.sample import Sample
from triptych.loadgen.run import Run

PERCENTILES = (50, 90, 99)

Figures = dict[str, int | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency limits of goodput; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None

    def holds(self, sample: Sample) -> bool:
        tpot_s = sample.tpot_s or 0.0
        return (self.ttft_ms is None or sample.ttft_s * 1e3 <= self.ttft_ms) and (
            self.tpot_ms is None or tpot_s * 1e3 <= self.tpot_ms
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Percentile with linear interpolation.

    >>> percentile([1.0, 2.0, 3.0, 4.0], 50)
    2.5
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarize(run: Run, slo: Slo) -> Figures:
    """Throughput and latency of one run; failed requests count only as failed.

    Units: milliseconds, and counts per second of the whole run
    """
    good = [sample for sample in run.samples if sample.error is None]
    inside = [sample for sample in good if slo.holds(sample)]
    read = sum(sample.prompt_tokens for sample in good)
    written = sum(sample.output_tokens for sample in good)
    return {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.samples) - len(good),
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(good) / run.duration_s,
        "request_goodput": len(inside) / run.duration_s if slo.is_set else None,
        "output_throughput": written / run.duration_s,
        "total_token_throughput": (read + written) / run.duration_s,
        **distribution("ttft", [sample.ttft_s for sample in good]),
        **distribution("tpot", [s.tpot_s for s in good if s.tpot_s is not None]),
        **distribution("itl", [gap for sample in good for gap in sample.token_gaps_s]),
        **distribution("chunk_gap", [gap for sample in good for gap in sample.chunk_gaps_s]),
        **distribution("e2el", [sample.e2e_s for sample in good]),
        **distribution("norm_latency", [s.e2e_s / max(1, s.output_tokens) for s in good]),
        "max_concurrent_requests": most_at_once(run.samples),
    }


def goodput_per_gb(figures: Figures) -> Figures:
    """Goodput per 10^9 bytes of held keys and values."""
    goodput, held = figures.get("request_goodput"), figures.get("mean_kv_bytes")
    return {"goodput_per_gb_kv": goodput / (held / 1e9) if goodput is not None and held else None}


def most_at_once(samples: Sequence[Sample]) -> int:
    """Maximum number of concurrent requests."""
    edges = sorted((at, step) for s in samples for at, step in ((s.started_s, 1), (s.ended_s, -1)))
    return max(accumulate(step for _, step in edges), default=0)


def per_request(run: Run) -> dict[str, object]:
    """Lists with a value per request, in seconds, as in vLLM's files."""
    samples = sorted(run.samples, key=lambda sample: sample.started_s)
    first = samples[0].started_s if samples else 0.0
    return {
        "input_lens": [sample.prompt_tokens for sample in samples],
        "output_lens": [0 if sample.error else sample.output_tokens for sample in samples],
        "ttfts": [sample.ttft_s if sample.chunks else 0.0 for sample in samples],
        "itls": [sample.token_gaps_s for sample in samples],
        "latencies": [sample.ended_s - sample.started_s for sample in samples],
        "start_times": [sample.started_s - first for sample in samples],
        "errors": [sample.error or "" for sample in samples],
    }


def distribution(name: str, seconds: Sequence[float]) -> Figures:
    """``mean_<name>_ms``, ``std_``, ``min_``, ``p50_`` and so on; empty without values."""
    if not seconds:
        return {}
    values = sorted(value * 1e3 for value in seconds)  # sorted again in no time
    figures: Figures = {
        f"mean_{name}_ms": fmean(values),
        f"std_{name}_ms": float(np.std(values)),
        f"median_{name}_ms": percentile(values, 50),
        f"min_{name}_ms": min(values),
        f"max_{name}_ms": max(values),
    }
    return figures | {f"p{p}_{name}_ms": percentile(values, p) for p in PERCENTILES}


def error_counts(samples: Sequence[Sample]) -> dict[str, int]:
    """Number of occurrences of each error, most frequent first."""
    errors = [sample.error for sample in samples if sample.error is not None]
    return dict(sorted(((e, errors.count(e)) for e in set(errors)), key=lambda pair: -pair[1]))
