"""Whether the claims of the papers hold on a model: one number of a draw, beside a bound.

A claim holds if the 95 % interval of its number is on the claimed side of the bound, and does not
if it is on the other side. In between the draws do not decide it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Literal

from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.studies.ablation import Point, SeedStats

Figures = Mapping[str, float]
"""Figures of a part in one draw, by name."""
Holds = Literal["yes", "no", "open"]
DRIFTING = ("default", "leankv", "uniform:k4v2", "kivi:2", "snapkv")
"""Methods whose errors may grow with the answer."""
BASELINES = ("uniform:k4v2", "kivi:2", "snapkv")
"""Those that DiffKV is compared with in long answers."""
K8V4_KL = 7e-4
"""KL to the full cache of SmolLM2 with all tokens in K8V4: what a kernel adds should be less."""
WORTH = 0.03
"""Share of the bytes that a fourth level has to save: its pages take 2 % of a row."""
DEGRADED = 1.05
"""Perplexity over that of the full cache, of LeanKV's configuration with less than 5 % loss."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A statement of a paper, with the number and the bound that test it."""

    part: str
    paper: str
    says: str
    number: str
    """What is computed from the figures of a draw."""
    side: Literal["above", "below"]
    bound: float
    is_ratio: bool = False
    """A quotient of positive figures."""
    of_draw: Callable[[Figures], float] | None = None
    """The number of a draw; KeyError if it lacks a figure. None: ``of_points`` has it."""
    of_points: Callable[[Sequence[Point]], Sequence[float]] | None = None
    """The numbers of all draws of the ablation."""

    def numbers(self, found: ClaimsResults) -> Sequence[float]:
        """One for each draw that has the figures; none before all draws are measured."""
        if self.of_points is not None:
            return [] if found.ablation is None else self.of_points(found.ablation.points)
        draws = found.draws.get(self.part, {})
        return list(self._numbers(draws)) if len(draws) == found.conditions["seeds"] else []

    def _numbers(self, draws: Mapping[str, Figures]) -> Iterator[float]:
        assert self.of_draw is not None
        for figures in draws.values():
            try:
                yield self.of_draw(figures)
            except KeyError:  # a draw of few texts may lack a kind of text
                continue


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A claim on the measured model."""

    part: str
    paper: str
    claim: str
    number: str
    """What was computed, and the bound at which the claim holds."""
    mean: float
    """Of ratios: the geometric mean."""
    ci95: tuple[float, float]
    draws: int
    holds: Holds


def verdicts(found: ClaimsResults) -> list[Verdict]:
    """Those of the parts that are measured in all draws, in at least two."""
    every = [(claim, claim.numbers(found)) for claim in CLAIMS]
    return [_verdict(claim, numbers) for claim, numbers in every if len(numbers) > 1]


def _verdict(claim: Claim, numbers: Sequence[float]) -> Verdict:
    mean, ci95 = _mean_of(numbers, is_ratio=claim.is_ratio)
    return Verdict(
        part=claim.part,
        paper=claim.paper,
        claim=claim.says,
        number=f"{claim.number}: {claim.side} {claim.bound:g}",
        mean=mean,
        ci95=ci95,
        draws=len(numbers),
        holds=_holds(claim, *ci95),
    )


def _mean_of(numbers: Sequence[float], *, is_ratio: bool) -> tuple[float, tuple[float, float]]:
    """Mean and 95 % interval; those of ratios by their logarithms."""
    if not is_ratio:
        stats = SeedStats.of(numbers)
        return stats.mean, stats.ci95
    stats = SeedStats.of([log(number) for number in numbers])
    low, high = stats.ci95
    return exp(stats.mean), (exp(low), exp(high))


def _holds(claim: Claim, low: float, high: float) -> Holds:
    if low <= claim.bound <= high:
        return "open"
    return "yes" if (low > claim.bound) == (claim.side == "above") else "no"


# ---------------------------------------------------------------- numbers of a draw


def _layers(draw: Figures) -> list[float]:
    return [value for name, value in draw.items() if name.endswith(", mean") and "layer" in name]


def _ending(draw: Figures, end: str) -> list[float]:
    """Figures whose names end so.

    Raises: KeyError if there is none
    """
    found = [value for name, value in draw.items() if name.endswith(end)]
    if not found:
        raise KeyError(end)
    return found


def _quarters(draw: Figures, method: str) -> list[float]:
    """KL of a method in the parts of an answer, in their order.

    Raises: KeyError if there is none
    """
    return [max(kl, 1e-12) for kl in _starting(draw, f"{method}: KL, steps ")]


def _starting(draw: Figures, start: str) -> list[float]:
    found = [value for name, value in draw.items() if name.startswith(start)]
    if not found:
        raise KeyError(start)
    return found


def _growth(draw: Figures) -> float:
    """KL of the last part of an answer over that of the first, geometric mean over methods."""
    parts = [_quarters(draw, method) for method in DRIFTING]
    return exp(fmean(log(one[-1] / one[0]) for one in parts))


def _best_baseline(draw: Figures) -> float:
    """KL of the default at the end of an answer over that of the best baseline."""
    return _quarters(draw, "default")[-1] / min(_quarters(draw, name)[-1] for name in BASELINES)


def _dynamic_over_static(draw: Figures) -> float:
    dynamic, static = (_ending(draw, f": error, {kind}") for kind in ("dynamic", "static"))
    return exp(fmean(log(one / other) for one, other in zip(dynamic, static, strict=True)))


# ---------------------------------------------------------------- numbers of the ablation


def _kl_over(axis: str, setting: str, other: str) -> Callable[[Sequence[Point]], list[float]]:
    """KL of one setting over that of another one, draw by draw."""

    def of(points: Sequence[Point]) -> list[float]:
        kl = {point.setting: point.kl_by_seed for point in points if point.axis == axis}
        pairs = zip(kl.get(setting, ()), kl.get(other, ()), strict=True)
        return [one / two for one, two in pairs]

    return of


def _perplexities(axis: str, setting: str) -> Callable[[Sequence[Point]], Sequence[float]]:
    """Perplexity over that of the full cache, draw by draw."""

    def of(points: Sequence[Point]) -> Sequence[float]:
        found = (one for one in points if (one.axis, one.setting) == (axis, setting))
        return next((one.perplexity_by_seed for one in found), ())

    return of


CLAIMS: tuple[Claim, ...] = (
    Claim(
        part="ranges",
        paper="LeanKV, figure 1",
        says="attention weights span more orders of magnitude than norms of values",
        number="orders of weights less those of norms",
        side="above",
        bound=0.0,
        of_draw=lambda draw: draw["weights, orders"] - draw["value norms, orders"],
    ),
    Claim(
        part="critical",
        paper="LeanKV, figure 2",
        says="the number of critical tokens differs considerably between layers",
        number="mean of the layer with most over that with fewest",
        side="above",
        bound=2.0,
        is_ratio=True,
        of_draw=lambda draw: max(_layers(draw)) / min(_layers(draw)),
    ),
    Claim(
        part="critical",
        paper="LeanKV, figure 3",
        says="the number of critical tokens differs between heads",
        number="deviation between heads over that between queries of a head",
        side="above",
        bound=1.0,
        is_ratio=True,
        of_draw=lambda draw: (
            draw["deviation between heads"] / draw["deviation between queries of a head"]
        ),
    ),
    Claim(
        part="sparsity",
        paper="LeanKV, figure 8; DiffKV, figure 9",
        says="tokens chosen over all heads lose less than as many in each head",
        number="error of dynamic over static sparsity, geometric mean over shares",
        side="below",
        bound=1.0,
        is_ratio=True,
        of_draw=_dynamic_over_static,
    ),
    Claim(
        part="classes",
        paper="DiffKV, figure 12",
        says="prose is sparser than code",
        number="share of high tokens of the default in code less that in prose",
        side="above",
        bound=0.0,
        of_draw=lambda draw: draw["default, code: high"] - draw["default, prose: high"],
    ),
    Claim(
        part="classes",
        paper="LeanKV, section 5.1",
        says="unified pages waste less than slots of one size",
        number="share of empty bytes in fixed slots less that in unified pages",
        side="above",
        bound=0.0,
        of_draw=lambda draw: (
            fmean(_ending(draw, "waste of fixed slots"))
            - fmean(_ending(draw, "waste of unified pages"))
        ),
    ),
    Claim(
        part="four_levels",
        paper="DiffKV, section 7.2",
        says="a level of FP16 above K8V4 is not needed",
        number="bytes that it saves at equal KL, mean over budgets",
        side="below",
        bound=WORTH,
        of_draw=lambda draw: fmean(_ending(draw, "FP16, K8V4, K4V2: bytes saved")),
    ),
    Claim(
        part="four_levels",
        paper="DiffKV, section 7.2",
        says="a level between K8V4 and K4V2 is not needed",
        number="bytes that K4V4 saves at equal KL, mean over budgets",
        side="below",
        bound=WORTH,
        of_draw=lambda draw: fmean(_ending(draw, "K8V4, K4V4, K4V2: bytes saved")),
    ),
    Claim(
        part="memory",
        paper="LeanKV, section 7.4",
        says="H2O needs memory for the attention of prompts",
        number="peak over prefill without scores, in matrices of a layer",
        side="above",
        bound=1.0,
        of_draw=lambda draw: draw["h2o: MiB over none"] / draw["matrices of a layer, MiB"],
    ),
    Claim(
        part="memory",
        paper="LeanKV, section 7.4",
        says="scores of LeanKV and DiffKV need no such memory",
        number="peak over prefill without scores, in matrices of a layer",
        side="below",
        bound=1.0,
        of_draw=lambda draw: draw["diffkv: MiB over none"] / draw["matrices of a layer, MiB"],
    ),
    Claim(
        part="drift",
        paper="DiffKV, table 3",
        says="errors accumulate in long answers",
        number="KL of the last quarter over that of the first, geometric mean over methods",
        side="above",
        bound=1.0,
        is_ratio=True,
        of_draw=_growth,
    ),
    Claim(
        part="drift",
        paper="DiffKV, table 3",
        says="in long answers DiffKV loses less than the baselines",
        number="KL of the default in the last quarter over that of the best baseline",
        side="below",
        bound=1.0,
        is_ratio=True,
        of_draw=_best_baseline,
    ),
    Claim(
        part="products",
        paper="SageAttention",
        says="queries in 8 bits lose less than the cache's own rounding",
        number="KL of next tokens with one digit, K8V4",
        side="below",
        bound=K8V4_KL,
        of_draw=lambda draw: draw["K8V4, 1 digits: KL of next tokens, mean"],
    ),
    Claim(
        part="products",
        paper="ours, after SageAttention",
        says="queries in two digits, which kernels have, lose nothing",
        number="KL of next tokens, K8V4",
        side="below",
        bound=1e-7,
        of_draw=lambda draw: draw["K8V4, 2 digits: KL of next tokens, mean"],
    ),
    Claim(
        part="ablation",
        paper="LeanKV, figure 7; DiffKV, figure 8",
        says="keys need more bits than values",
        number="KL with low tokens in K2V4 over K4V2",
        side="above",
        bound=1.0,
        is_ratio=True,
        of_points=_kl_over("low_format", "K2V4", "K4V2"),
    ),
    Claim(
        part="ablation",
        paper="LeanKV, table 1",
        says="K8V4 and K4V2 without pruning lose less than 5 %",
        number="perplexity over that of the full cache",
        side="below",
        bound=DEGRADED,
        is_ratio=True,
        of_points=_perplexities("low_format", "K4V2"),
    ),
    Claim(
        part="ablation",
        paper="LeanKV, table 1",
        says="on small models pruning on top of them loses less than 5 %",
        number="perplexity over that of the full cache, alpha_low 0.1",
        side="below",
        bound=DEGRADED,
        is_ratio=True,
        of_points=_perplexities("combination", "both"),
    ),
    Claim(
        part="ablation",
        paper="LeanKV, figure 9; DiffKV, figure 10",
        says="quantization with pruning loses less than pruning alone",
        number="KL over that of half of the tokens in FP16",
        side="below",
        bound=1.0,
        is_ratio=True,
        of_points=_kl_over("combination", "both", "pruned, half"),
    ),
)
"""In the order of the parts; bounds are the papers' where they name one, otherwise ours."""
