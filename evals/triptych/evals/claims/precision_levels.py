"""Whether a fourth level pays, above or between the three of DiffKV: KL at equal bytes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from triptych.core.layout import FORMATS, PageFormat
from triptych.evals.claims.draw import Draw
from triptych.evals.methods.context_methods import Classes, Levels
from triptych.evals.metrics.fidelity import compare
from triptych.evals.studies.learned_study import continue_text
from triptych.evals.training.output_matching import context_of

FACTORS = (1.0, 1.2, 1.4)
"""Bytes of a token over those of one in K4V2."""
NEAR = 1.1
"""Budgets around each, by this factor, give the slope of KL over bytes of three levels."""
DROPPED = (0.0, 0.1, 0.25)
"""Shares of the tokens that are dropped."""
FP16, K8V8, K8V4, K4V4, K4V2 = (FORMATS[name] for name in ("fp16", "k8v8", "k8v4", "k4v4", "k4v2"))
THREE = "K8V4, K4V2"
TOP_SHARES, MIDDLE_SHARES = (0.01, 0.03, 0.1), (0.1, 0.3, 0.5)


@dataclass(frozen=True)
class Family:
    """Formats of the levels, and a share of the tokens that one of them may have."""

    high: PageFormat
    low: PageFormat
    fourth: PageFormat | None = None
    shares: tuple[float, ...] = ()
    """Of the fourth level."""


FAMILIES: Mapping[str, Family] = {
    THREE: Family(K8V4, K4V2),
    "K8V4, K4V4": Family(K8V4, K4V4),
    "K4V4, K4V2": Family(K4V4, K4V2),
    "FP16, K8V4, K4V2": Family(K8V4, K4V2, FP16, TOP_SHARES),
    "K8V8, K8V4, K4V2": Family(K8V4, K4V2, K8V8, TOP_SHARES),
    "K8V4, K4V4, K4V2": Family(K8V4, K4V2, K4V4, MIDDLE_SHARES),
}
"""By formats; the last level of all of them is that of dropped tokens."""


def four_levels(draw: Draw) -> Mapping[str, float]:
    """KL of three levels (K8V4, K4V2, dropped) and of four, in the same bytes.

    Shares of the levels are chosen on the first half of the texts, and KL is that of the others, so
    that four levels gain nothing by having more settings. ``bytes saved`` is the share of the bytes
    that three levels would need in addition for the KL of four, by the slope of their log KL over
    log bytes; below 0 four levels are worse.

    Sinks and the newest tokens are in K8V8 and not counted.

    Source: DiffKV, sections 5.3 (two bidirectional tables) and 7.2 (FP16 over K8V4 as future work);
            LeanKV, section 4 (more than three levels)
    """
    found = dict[str, float]()
    dim = draw.model.facts.geometry.head_dim
    half = max(1, len(draw.texts) // 2)
    parts = range(half), range(half if len(draw.texts) > 1 else 0, len(draw.texts))
    for factor in FACTORS:
        each = factor * K4V2.token_bytes(dim)
        if each * NEAR > K8V4.token_bytes(dim):
            continue
        share = each / FP16.read_bytes(dim)
        every = {family: settings(family, each, dim) for family in FAMILIES}
        kl = {name: _best(draw, some, *parts) for name, some in every.items() if some}
        less, more = (
            _best(draw, settings(THREE, each * by, dim), *parts) for by in (1 / NEAR, NEAR)
        )
        slope = math.log(less / more) / (2 * math.log(NEAR))
        for family, value in kl.items():
            found[f"{share:.3g} of FP16, {family}: KL"] = value
            if family != THREE:
                saved = 1 - (value / kl[THREE]) ** (1 / slope)
                found[f"{share:.3g} of FP16, {family}: bytes saved"] = saved
    return found


def settings(family: str, each: float, dim: int) -> Sequence[Levels]:
    """Shares of levels that take ``each`` bytes a token, for each share that is dropped.

    With no token in its fourth level a family has the settings of three levels as well.
    """
    return list(_settings(FAMILIES[family], each, dim))


def _settings(family: Family, each: float, dim: int) -> Iterator[Levels]:
    most, least = (form.token_bytes(dim) for form in (family.high, family.low))
    for dropped, share in product(DROPPED, (0.0, *family.shares)):
        rest, left = 1.0 - dropped - share, each
        levels = list[tuple[PageFormat, float]]()
        if family.fourth is not None:
            levels, left = [(family.fourth, share)], each - share * family.fourth.token_bytes(dim)
        high = (left - rest * least) / (most - least)
        if 0.0 <= high <= rest:
            levels += [(family.high, high), (family.low, rest - high)]
            yield tuple(sorted(levels, key=lambda one: -one[0].token_bytes(dim)))


def _best(draw: Draw, every: Sequence[Levels], chosen_on: range, told_on: range) -> float:
    """KL on some texts of the setting that is the best one on others."""
    best = min(every, key=lambda levels: kl_of(draw, levels, chosen_on))
    return kl_of(draw, best, told_on)


def kl_of(draw: Draw, levels: Levels, texts: range) -> float:
    """Mean KL to the full cache of the tokens behind some texts, whose contexts are compressed."""
    method = Classes("levels", levels, draw.model.mean_keys)
    return fmean(_kl(draw, method, at) for at in texts)


def _kl(draw: Draw, method: Classes, at: int) -> float:
    known = draw.known_kl.get((method.levels, at))
    if known is None:
        text, (capture, full) = draw.texts[at], draw.readings[at]
        replaced, _ = method.replace(context_of(capture))
        ours = continue_text(draw.model.loaded, text, replaced)
        steps = compare(full[: len(ours)], ours, text.continuation[1:])
        known = draw.known_kl[method.levels, at] = float(steps.kl.mean())
    return known
