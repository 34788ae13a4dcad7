"""Fits costs to measurements: the simulator is run until its results match the server.

Gauss-Newton with damping (Levenberg-Marquardt) over the logarithms of the costs, so that none is
ever negative. What the runs do not determine stays near where it started.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from triptych.core.errors import ConfigError
from triptych.simulator.cluster import Simulation, Trial
from triptych.simulator.costs import Costs
from triptych.simulator.setup import Chain, Cluster

PRIOR_WEIGHT = 0.1
"""Weight of a change of a cost by a factor e, relative to such an error of a figure."""
STEP = 0.1
"""Step in log space for numerical derivatives; a simulation is not a smooth function."""
ROUNDS = 25
DAMPINGS = 5
LEAST_GAIN = 1e-3

VARIED = tuple(one.name for one in fields(Costs) if not one.name.startswith("encode_"))
"""Costs that are fitted: measured runs have no images."""
FITTED = ("mean_ttft_s", "p50_ttft_s", "mean_tpot_s", "p50_tpot_s", "request_throughput")
"""Figures that a fit uses. The 90th percentile of a short run is a single request."""

Figures = dict[str, float]
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Observation:
    """One measured run: workload, machine and results."""

    name: str
    sessions: Sequence[Chain]
    concurrency: int | None
    cores: int
    """Cores of the machine."""
    free_cores: float
    """Cores that other processes left free."""
    measured: Figures


@dataclass(frozen=True)
class Prediction:
    """One run as measured and as simulated."""

    name: str
    measured: Figures
    predicted: Figures

    @property
    def ratios(self) -> Figures:
        """Predicted over measured."""
        return {name: self.predicted[name] / value for name, value in self.measured.items()}


@dataclass(frozen=True)
class Fitted:
    """The fitted costs and their errors."""

    costs: Costs
    predictions: list[Prediction]
    rounds: int


def summary(ttft_s: Sequence[float], tpot_s: Sequence[float], rate: float) -> Figures:
    """The figures that are compared: latencies in seconds, requests per second.

    Raises: ConfigError if the run had no answer of two tokens
    """
    if not ttft_s or not tpot_s or rate <= 0:
        raise ConfigError("a run without an answer of at least two tokens cannot be fitted")
    return {
        "mean_ttft_s": fmean(ttft_s),
        "p50_ttft_s": float(np.percentile(ttft_s, 50)),
        "p90_ttft_s": float(np.percentile(ttft_s, 90)),
        "mean_tpot_s": fmean(tpot_s),
        "p50_tpot_s": float(np.percentile(tpot_s, 50)),
        "p90_tpot_s": float(np.percentile(tpot_s, 90)),
        "request_throughput": rate,
    }


def summary_of(trial: Trial) -> Figures:
    """The same of a simulated run."""
    done = [one for one in trial.outcomes if one.is_done]
    tpot_s = [
        (one.last_s - one.first_s) / (one.job.answer_tokens - 1)
        for one in done
        if one.job.answer_tokens > 1
    ]
    return summary([one.first_s - one.due_s for one in done], tpot_s, len(done) / trial.duration_s)


def predict(observation: Observation, cluster: Cluster, costs: Costs) -> Prediction:
    """Simulate one measured run."""
    machine = replace(cluster, cores=observation.cores, free_cores=observation.free_cores)
    trial = Simulation(machine, costs, keep_gaps=False).run(
        observation.sessions, observation.concurrency
    )
    return Prediction(observation.name, observation.measured, summary_of(trial))


def fit(
    observations: Sequence[Observation],
    cluster: Cluster,
    start: Costs,
    on_round: Callable[[int, float], None] = lambda _round, _loss: None,
) -> Fitted:
    """Fit costs so that simulated runs match measured ones.

    Raises: ConfigError if there is nothing to fit to
    """
    if not observations:
        raise ConfigError("nothing to fit to: name result files of bench serve --save-dir")
    first = _logs(start)

    def residuals(point: Vector) -> Vector:
        costs = _costs(point, start)
        errors = [
            log(ratio)
            for observation in observations
            for name, ratio in predict(observation, cluster, costs).ratios.items()
            if name in FITTED
        ]
        return np.array([*errors, *(PRIOR_WEIGHT * (point - first))])

    point, errors, damping, rounds = first, residuals(first), 1.0, 0
    for rounds in range(1, ROUNDS + 1):
        on_round(rounds, _loss(errors))
        slope = _slope(residuals, point, errors)
        found = _improve(residuals, point, errors, slope, damping)
        if found is None:
            break
        gain = _loss(errors) - _loss(found[1])
        (point, errors), damping = found[:2], max(1e-3, found[2] / 3)
        if gain < LEAST_GAIN:
            break
    costs = _costs(point, start)
    return Fitted(costs, [predict(one, cluster, costs) for one in observations], rounds)


def _improve(
    residuals: Callable[[Vector], Vector],
    point: Vector,
    errors: Vector,
    slope: Vector,
    damping: float,
) -> tuple[Vector, Vector, float] | None:
    """A step that makes the errors smaller, ever shorter ones being tried; None: there is none."""
    square = slope.T @ slope
    for _ in range(DAMPINGS):
        lifted = square + damping * np.diag(np.diag(square) + 1e-6)
        move = np.clip(np.linalg.solve(lifted, -slope.T @ errors), -1.0, 1.0)
        there = point + move
        found = residuals(there)
        if _loss(found) < _loss(errors):
            return there, found, damping
        damping *= 4
    return None


def _slope(residuals: Callable[[Vector], Vector], point: Vector, errors: Vector) -> Vector:
    columns = list[Vector]()
    for index in range(len(point)):
        moved = point.copy()
        moved[index] += STEP
        columns.append((residuals(moved) - errors) / STEP)
    return np.stack(columns, axis=1)


def _loss(errors: Vector) -> float:
    return float(errors @ errors)


def _logs(costs: Costs) -> Vector:
    return np.array([log(max(costs.as_dict()[name], 1e-9)) for name in VARIED])


def _costs(point: Vector, others: Costs) -> Costs:
    """The costs at a point; those that are not varied as in ``others``."""
    varied = {name: exp(value) for name, value in zip(VARIED, point, strict=True)}
    return replace(others, **varied)
