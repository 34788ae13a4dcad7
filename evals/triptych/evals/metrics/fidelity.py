# torch leaves Tensor.tolist untyped.
# pyright: reportUnknownMemberType=false
"""Distance of a method's next-token distributions from the full cache's, with intervals.

Needs torch and numpy alone, so that baselines in other environments can import it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Floats = NDArray[np.float64]
Interval = tuple[float, float]

CHUNK_STEPS = 32
"""Steps compared at once: float64 rows of a vocabulary are large."""
RESAMPLES = 4000


@dataclass(frozen=True)
class Steps:
    """Per-token figures of one document: each array has one value per teacher-forced token."""

    kl: Floats
    """KL(full || method), in nats."""
    agree: Floats
    """1 where both have the same most likely token, else 0."""
    nll_full: Floats
    """Negative log likelihood of the text's next token with the full cache, in nats."""
    nll: Floats
    """The same with the method's cache."""

    def as_json(self) -> dict[str, list[float]]:
        return {name: cast("list[float]", array.tolist()) for name, array in vars(self).items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Raises: KeyError if an array is missing"""
        names = ("kl", "agree", "nll_full", "nll")
        return cls(*(np.asarray(data[name], np.float64) for name in names))


def compare(full: Tensor, method: Tensor, targets: Sequence[int]) -> Steps:
    """Compare two runs over the same text.

    Shapes:  full, method [steps, vocab], logits before each of ``targets``
    Dtypes:  any float; compared in float64, float32 rounds more than a good method's KL
    """
    starts = range(0, len(targets), CHUNK_STEPS)
    slices = [slice(start, start + CHUNK_STEPS) for start in starts]
    parts = [_compare(full[part], method[part], targets[part]) for part in slices]
    return Steps(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _compare(full: Tensor, method: Tensor, targets: Sequence[int]) -> tuple[Floats, ...]:
    p, q = full.double().log_softmax(-1), method.double().log_softmax(-1)
    chosen = torch.tensor(targets)[:, None]
    columns = (
        (p.exp() * (p - q)).sum(-1),
        (full.argmax(-1) == method.argmax(-1)).double(),
        -p.gather(1, chosen)[:, 0],
        -q.gather(1, chosen)[:, 0],
    )
    return tuple(cast("Floats", column.numpy()) for column in columns)


# ------------------------------------------------------------------ over documents


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A method over all documents of a row; intervals are 95 % bootstraps over documents."""

    documents: int
    tokens: int
    kl: float
    kl_ci95: Interval | None
    kl_p99: float
    top1_agreement: float
    top1_ci95: Interval | None
    perplexity: float
    perplexity_full: float
    perplexity_ratio: float
    nll_difference: float
    nll_difference_ci95: Interval | None


def summarize(documents: Sequence[Sequence[Steps]]) -> Summary:
    """Summarize documents; each may have several pieces, as at several context lengths.

    Pieces of one document are correlated, so documents are resampled, not pieces. All differences
    are paired: method and full cache ran on the same tokens.
    """
    joined = [_join(pieces) for pieces in documents]
    every = _join(joined)
    difference = [float((one.nll - one.nll_full).mean()) for one in joined]
    return Summary(
        documents=len(joined),
        tokens=len(every.kl),
        kl=float(every.kl.mean()),
        kl_ci95=bootstrap([float(one.kl.mean()) for one in joined]),
        kl_p99=float(np.quantile(every.kl, 0.99)),
        top1_agreement=float(every.agree.mean()),
        top1_ci95=bootstrap([float(one.agree.mean()) for one in joined]),
        perplexity=exp(float(every.nll.mean())),
        perplexity_full=exp(float(every.nll_full.mean())),
        perplexity_ratio=exp(float((every.nll - every.nll_full).mean())),
        nll_difference=float(np.mean(difference)),
        nll_difference_ci95=bootstrap(difference),
    )


def kl_means(documents: Sequence[Sequence[Steps]]) -> list[float]:
    """Mean KL of each document, for paired comparisons of two methods."""
    return [float(_join(pieces).kl.mean()) for pieces in documents]


def bootstrap(values: Sequence[float], seed: int = 0) -> Interval | None:
    """95 % bootstrap interval of the mean over documents; None for a single document.

    For a paired interval of two methods over the same documents, pass the differences.
    """
    if len(values) < 2:
        return None
    drawn = np.random.default_rng(seed).integers(len(values), size=(RESAMPLES, len(values)))
    means = np.asarray(values, np.float64)[drawn].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def _join(pieces: Sequence[Steps]) -> Steps:
    columns = zip(*(vars(piece).values() for piece in pieces), strict=True)
    return Steps(*(np.concatenate(column) for column in columns))


# ------------------------------------------------------------------ whole answers


def first_divergence(full: Sequence[int], answer: Sequence[int]) -> int | None:
    """Tokens before the first difference of two answers; None if they are the same."""
    for at, (ours, theirs) in enumerate(zip(full, answer, strict=True)):
        if ours != theirs:
            return at
    return None
