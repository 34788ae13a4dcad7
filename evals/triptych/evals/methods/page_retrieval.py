# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten, amax and others untyped in part.
"""Baselines that store everything and read the pages that a query needs.

The rankings of ``decode.selection`` and three more, for pages of any size, on keys that are not
rounded. The served kernels have 13 tokens in a 16-bit page and byte summaries; here the idea
alone is measured, all queries of a text at once.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from triptych.kernels.select import Rule
from triptych.kernels.select.reference import moments
from triptych.kernels.select.summary import DEVIATIONS

Rank = Literal["box", "moments", "mean", "oracle", "static"]
"""By what pages are ranked: the corner of the box around their keys (Quest, TinyServe), means and
deviations of their blocks of keys, the mean of all keys alone, the largest weight that attention
gives to one of their tokens (which no summary can know), or the attention that they received in the
prompt's pass, whatever the query is."""
RANKS: tuple[Rank, ...] = get_args(Rank)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One layer's T queries, at positions ``first`` and on, over all n keys so far."""

    query: Tensor
    """[KH, G, T, d] float32, scaled."""
    keys: Tensor
    """[KH, n, d] float32."""
    weights: Tensor
    """[KH, G, T, n]: attention over all keys that the queries may see."""
    first: int
    significance: Tensor
    """[KH, N]: mean attention that the prompt's tokens received in its pass."""


def page_scores(rank: Rank, step: Step, page_tokens: int) -> Tensor:
    """How promising each full page is to each query, the largest of its group: [KH, T, full].

    Source: Quest, TinyServe section 3 (box); moments are ours (docs/log.md)
    """
    full = step.keys.shape[1] // page_tokens
    if rank == "oracle":
        weights = step.weights[..., : full * page_tokens].unflatten(-1, (full, page_tokens))
        return weights.amax((1, -1))
    if rank == "static":
        return _received(step, full, page_tokens)
    pages = step.keys[:, : full * page_tokens].unflatten(1, (full, page_tokens))
    query = step.query.flatten(1, 2)
    if rank == "box":
        most, least = pages.amax(2), pages.amin(2)
        scores = query.relu() @ most.mT + query.clamp(max=0) @ least.mT
    elif rank == "mean":
        scores = query @ pages.mean(2).mT
    else:
        scores = _by_moments(query, pages)
    return scores.unflatten(1, step.query.shape[1:3]).amax(1)


def _by_moments(query: Tensor, pages: Tensor) -> Tensor:
    """Scores of pages [KH, full, P, d] for queries [KH, n, d]: [KH, n, full]."""
    found = moments(pages.flatten(0, 1))
    means, deviation, factors = (part.unflatten(0, pages.shape[:2]) for part in found)
    reach = DEVIATIONS * (query.square() @ deviation.square().mT).sqrt()
    blocks = range(means.shape[2])
    every = [query @ means[:, :, b].mT + reach * factors[:, None, :, b] for b in blocks]
    return torch.stack(every).amax(0)


def _received(step: Step, full: int, page_tokens: int) -> Tensor:
    """Pages that hold tokens from after the prompt have received nothing yet: they are read."""
    known = min(full, step.significance.shape[1] // page_tokens)
    sums = step.significance[:, : known * page_tokens].unflatten(1, (known, page_tokens)).sum(-1)
    scores = torch.full((len(sums), full), float("inf"))
    scores[:, :known] = sums
    return scores[:, None].expand(-1, step.query.shape[2], -1)


def marked_scores(scores: Tensor, rule: Rule, first: int, tokens: int, page_tokens: int) -> Tensor:
    """Scores of all pages; infinity for those that are read in any case, and less than nothing for
    those behind a query.

    Read in any case are pages that hold a first or a newest token, and the page that is being
    filled.

    Shapes:  scores [KH, T, full pages] -> [KH, T, pages]; queries stand at ``first`` and on
    """
    heads, queries, full = scores.shape
    pages = -(-tokens // page_tokens)
    position = torch.arange(first, first + queries)[:, None]
    page = torch.arange(pages)
    newest = (page + 1) * page_tokens - 1
    exists = page <= position // page_tokens
    competes = (page * page_tokens >= rule.sink_tokens) & (newest <= position - rule.window_tokens)
    competes &= page < position // page_tokens
    padded = torch.full((heads, queries, pages), float("inf"))
    padded[..., :full] = scores
    return padded.where(competes, float("inf")).where(exists, float("-inf"))


def visible_tokens(scores: Tensor, rule: Rule, first: int, tokens: int, page_tokens: int) -> Tensor:
    """Which tokens each query reads, its own among them: bool [KH, T, tokens].

    Beside those that are read in any case, which count, the best are read.

    Shapes:  scores [KH, T, full pages]; queries stand at ``first`` to ``first + T - 1``
    """
    queries = scores.shape[1]
    position = torch.arange(first, first + queries)[:, None]
    padded = marked_scores(scores, rule, first, tokens, page_tokens)
    page = torch.arange(padded.shape[2])
    there = range(first + 1, first + queries + 1)  # tokens that each query may see
    counts = torch.tensor([rule.pages(-(-seen // page_tokens), seen) for seen in there])
    counts = counts.maximum(padded.isposinf().sum(-1))
    order = padded.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(padded, dtype=torch.bool)
    chosen.scatter_(-1, order, page < counts[..., None])
    read = chosen.repeat_interleave(page_tokens, -1)[..., :tokens]
    return read & (torch.arange(tokens) <= position)
