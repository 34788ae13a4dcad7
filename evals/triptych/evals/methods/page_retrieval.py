# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten, amax and others untyped in part.
"""Page retrieval baselines: the whole cache is stored, each query reads the best pages.

The rankings of ``decode.selection`` and three more, for pages of any size, on unquantized keys.
The served kernels have 13 tokens in a 16-bit page and summaries in bytes; these baselines measure
the ranking alone, for all queries of a text at once.
"""

from dataclasses import dataclass
from math import log
from typing import Literal

import torch
from torch import Tensor

from triptych.kernels.select import Rule
from triptych.kernels.select.reference import moments
from triptych.kernels.select.summary import DEVIATIONS

Rank = Literal["box", "moments", "mean", "oracle", "static"]
"""How pages are ranked. ``box``: the corner of the box around a page's keys (Quest, TinyServe).
``moments``: mean and standard deviation of blocks of keys. ``mean``: the mean key of a page.
``oracle``: the largest true attention weight of a token in the page, which no summary can know.
``static``: the attention that the page received during prefill, for every query the same."""


@dataclass(frozen=True, kw_only=True)
class LayerQueries:
    """T queries of one layer, at positions from ``first`` on, with all n keys so far."""

    query: Tensor
    """[KH, G, T, d] float32, scaled."""
    keys: Tensor
    """[KH, n, d] float32."""
    weights: Tensor
    """[KH, G, T, n]: causal attention weights over all keys."""
    first: int
    significance: Tensor
    """[KH, N]: mean attention that each prompt token received during prefill."""


def page_scores(rank: Rank, queries: LayerQueries, page_tokens: int) -> Tensor:
    """Score of each full page for each query, the largest of its query group: [KH, T, full].

    Source: Quest, TinyServe section 3 (box); moments are ours (docs/log.md)
    """
    full = queries.keys.shape[1] // page_tokens
    if rank == "oracle":
        weights = queries.weights[..., : full * page_tokens].unflatten(-1, (full, page_tokens))
        return weights.amax((1, -1))
    if rank == "static":
        return _received(queries, full, page_tokens)
    pages = queries.keys[:, : full * page_tokens].unflatten(1, (full, page_tokens))
    query = queries.query.flatten(1, 2)
    if rank == "box":
        most, least = pages.amax(2), pages.amin(2)
        scores = query.relu() @ most.mT + query.clamp(max=0) @ least.mT
    elif rank == "mean":
        scores = query @ pages.mean(2).mT
    else:
        scores = _by_moments(query, pages)
    return scores.unflatten(1, queries.query.shape[1:3]).amax(1)


def _by_moments(query: Tensor, pages: Tensor) -> Tensor:
    """Scores of pages [KH, full, P, d] for queries [KH, n, d]: [KH, n, full]."""
    found = moments(pages.flatten(0, 1))
    means, deviation, factors = (part.unflatten(0, pages.shape[:2]) for part in found)
    reach = DEVIATIONS * (query.square() @ deviation.square().mT).sqrt()
    blocks = range(means.shape[2])
    every = [query @ means[:, :, b].mT + reach * factors[:, None, :, b] for b in blocks]
    return torch.stack(every).amax(0)


def _received(queries: LayerQueries, full: int, page_tokens: int) -> Tensor:
    """Attention per page during prefill: [KH, T, full]; infinity for pages after the prompt."""
    known = min(full, queries.significance.shape[1] // page_tokens)
    sums = queries.significance[:, : known * page_tokens].unflatten(1, (known, page_tokens)).sum(-1)
    scores = torch.full((len(sums), full), float("inf"))
    scores[:, :known] = sums
    return scores[:, None].expand(-1, queries.query.shape[2], -1)


def certified_hits(queries: LayerQueries, read: Tensor, page_tokens: int) -> Tensor:
    """The least share of its attention that each query can have on the tokens that it reads.

    No key of a page that is not read has a logit above the corner of the page's box, so these
    tokens have at most ``page_tokens exp(corner)`` of a page each beside what was read. The bound
    holds for every query; boxes are so wide that it is mostly near 0 (docs/log.md). The error of
    attention's output is at most twice what is missing from 1, times the largest norm of a value.

    Shapes:  read bool [KH, T, n], whole pages of ``page_tokens`` -> [KH, G, T]
    Source:  TinyServe, section 3.6 (error of the estimator; its bound takes an upper bound for an
             unbiased estimate, this one does not)
    """
    full = queries.keys.shape[1] // page_tokens
    tokens, group = queries.keys.shape[1], queries.query.shape[1]
    position = queries.first + torch.arange(queries.query.shape[2])[:, None]
    logits = queries.query @ queries.keys[:, None].mT
    is_read = (read & (torch.arange(tokens) <= position))[:, None].expand(-1, group, -1, -1)
    got = logits.masked_fill(~is_read, float("-inf")).logsumexp(-1)
    pages = queries.keys[:, : full * page_tokens].unflatten(1, (full, page_tokens))
    most, least = pages.amax(2)[:, None], pages.amin(2)[:, None]
    corners = queries.query.relu() @ most.mT + queries.query.clamp(max=0) @ least.mT
    is_whole = (torch.arange(full) + 1) * page_tokens - 1 <= position
    omitted = is_whole & ~read[..., : full * page_tokens : page_tokens]
    corners = corners.masked_fill(~omitted[:, None], float("-inf"))
    return (got - corners.logsumexp(-1) - log(page_tokens)).sigmoid()


def masked_scores(scores: Tensor, rule: Rule, first: int, tokens: int, page_tokens: int) -> Tensor:
    """Scores of all pages: infinity where always read, minus infinity for later pages.

    Always read are pages that hold a sink token or a token of the recent window, and the page that
    is not full yet.

    Shapes:  scores [KH, T, full pages] -> [KH, T, pages]; queries are at ``first`` and on
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
    """Mask of the tokens that each query reads, its own included: bool [KH, T, tokens].

    Pages that are always read count towards the number of pages; the best others fill the rest.

    Shapes:  scores [KH, T, full pages]; queries are at ``first`` to ``first + T - 1``
    """
    queries = scores.shape[1]
    position = torch.arange(first, first + queries)[:, None]
    padded = masked_scores(scores, rule, first, tokens, page_tokens)
    page = torch.arange(padded.shape[2])
    there = range(first + 1, first + queries + 1)  # tokens that each query may see
    counts = torch.tensor([rule.pages(-(-seen // page_tokens), seen) for seen in there])
    counts = counts.maximum(padded.isposinf().sum(-1))
    order = padded.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(padded, dtype=torch.bool)
    chosen.scatter_(-1, order, page < counts[..., None])
    read = chosen.repeat_interleave(page_tokens, -1)[..., :tokens]
    return read & (torch.arange(tokens) <= position)
