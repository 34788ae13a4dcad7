# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.topk and others untyped in part.
"""Ways to compress the cache of a context: merging, pruning and precision classes.

The first four and the newest 64 tokens are neither merged nor dropped. Bytes are those of the
stored tokens with scores, positions and, where there is one, the bias segment; pages and tables
come on top for all methods alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from triptych.core.layout import FORMATS, PageFormat
from triptych.evals.data.cases import Footprint
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.output_matching import merge_context
from triptych.kernels.codec.quantizer import decode, encode
from triptych.kernels.hadamard import hadamard
from triptych.workers.compress.learned.chunk_merger import Merger
from triptych.workers.compress.learned.chunk_plan import SINK_TOKENS, WINDOW_TOKENS
from triptych.workers.compress.learned.merge_requests import RequestCache
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer, score_requests

BIAS_BYTES = 2
"""Of a token in the bias segment, float16."""
LADDER = tuple(FORMATS[name] for name in ("k4v2", "k4v4", "k8v4", "k8v8", "fp16"))
"""Formats by bytes."""
PROTECTED = FORMATS["k8v8"]
"""Format of sinks and newest tokens where others are quantized, as in the server."""

Significance = Callable[[RequestCache], Tensor]
"""Significance of the tokens of a context, [L, KH, N]."""


def measured(cache: RequestCache) -> Tensor:
    """Mean attention from all later tokens, as prefill sums it up."""
    return cache.significance


def arbitrary(cache: RequestCache) -> Tensor:
    """A negative control: the same numbers at random tokens."""
    draw = torch.Generator().manual_seed(0)
    return cache.significance[:, :, torch.randperm(cache.significance.shape[2], generator=draw)]


@dataclass(frozen=True)
class Predicted:
    """Significance by a scorer."""

    scorer: TokenScorer

    def __call__(self, cache: RequestCache) -> Tensor:
        (found,) = score_requests(self.scorer, [(cache.keys, cache.values)])
        return found


class ContextMethod(Protocol):
    """Replaces the cache of a context."""

    @property
    def name(self) -> str: ...

    def replace(self, cache: RequestCache) -> tuple[ReplacedCache, Footprint]: ...


@dataclass(frozen=True)
class Merging:
    """Chunks of tokens become one token each, in 16 bits."""

    name: str
    merger: Merger
    frame: RopeFrame
    significance: Significance = measured
    has_bias: bool = True
    """Whether pages need the bias segment."""

    def replace(self, cache: RequestCache) -> tuple[ReplacedCache, Footprint]:
        judged = RequestCache(cache.keys, cache.values, self.significance(cache))
        merged = merge_context(self.merger, self.frame, judged)
        extra = BIAS_BYTES if self.has_bias else 0
        count = merged.bias.numel()
        return merged, _footprint(cache, [(FORMATS["fp16"], count)], extra)


@dataclass(frozen=True)
class Pruning:
    """The most significant tokens of each head row stay in 16 bits, the others are dropped."""

    name: str
    bytes_ratio: float
    """All-in bytes over those of the keys and values in 16 bits."""
    significance: Significance = measured

    def replace(self, cache: RequestCache) -> tuple[ReplacedCache, Footprint]:
        tokens, dim = cache.keys.shape[2:]
        form = FORMATS["fp16"]
        count = int(self.bytes_ratio * tokens * form.read_bytes(dim) / form.token_bytes(dim))
        scores = _protected(self.significance(cache), float("inf"))
        at = scores.topk(min(count, tokens), -1).indices.sort(-1).values
        wide = at[..., None].expand(*at.shape, dim)
        keys, values = (part.gather(2, wide) for part in (cache.keys, cache.values))
        replaced = ReplacedCache(keys, values, torch.zeros(at.shape))
        return replaced, _footprint(cache, [(form, at.numel())])


ROUNDING = 1e-6
"""Of a token: sums of shares are not exact."""

Levels = tuple[tuple[PageFormat, float], ...]
"""Formats, and the share of the tokens in each, the most significant first; others are dropped."""


def two_levels(low: PageFormat, high: PageFormat, high_share: float) -> Levels:
    """Some tokens in a high format, and all others in a low one."""
    return (high, high_share), (low, 1.0 - high_share)


@dataclass(frozen=True)
class Classes:
    """The most significant tokens of all head rows in one format, the others in smaller ones.

    One threshold of a level serves all head rows, as DiffKV's does. Keys and values are rotated and
    keys are centred before they are rounded, as in the server.
    """

    name: str
    levels: Levels
    """Of the tokens that are neither sinks nor newest."""
    centre: Tensor
    """Mean key of each head, [L, KH, d]."""
    significance: Significance = measured

    def replace(self, cache: RequestCache) -> tuple[ReplacedCache, Footprint]:
        scores = _protected(self.significance(cache), -float("inf"))
        inner = scores.isfinite()
        count = int(inner.sum())
        ordered = scores.flatten().argsort(descending=True)[:count]
        parts, first, share = [(PROTECTED, ~inner)], 0, 0.0
        for form, part in self.levels:
            share += part
            end = int(share * count + ROUNDING)
            mask = torch.zeros(scores.numel(), dtype=torch.bool)
            mask[ordered[first:end]] = True
            parts.append((form, mask.view_as(scores)))
            first = end
        dropped = torch.zeros(scores.numel(), dtype=torch.bool)
        dropped[ordered[first:]] = True
        replaced = self._rounded(cache, parts, dropped.view_as(scores))
        return replaced, _footprint(cache, [(form, int(mask.sum())) for form, mask in parts])

    def _rounded(
        self, cache: RequestCache, parts: list[tuple[PageFormat, Tensor]], dropped: Tensor
    ) -> ReplacedCache:
        turn, centre = hadamard(cache.keys.shape[3]), self.centre[:, :, None]
        keys, values = (cache.keys - centre) @ turn, cache.values @ turn
        for form, mask in parts:
            if form.is_quantized and mask.any():
                keys[mask] = decode(encode(keys[mask], form.key_bits, form.key_groups))
                values[mask] = decode(encode(values[mask], form.value_bits, form.value_groups))
        bias = torch.zeros(keys.shape[:3]).masked_fill(dropped, float("-inf"))
        return ReplacedCache(keys @ turn + centre, values @ turn, bias)


def classes_at(name: str, bytes_ratio: float, tokens: int, centre: Tensor) -> Classes:
    """Classes that take as many bytes, of the two formats between which these lie.

    Below the smallest format, all tokens are in it: then they take more bytes.

    ``bytes_ratio``: all-in bytes over those of the keys and values in 16 bits.
    """
    dim = centre.shape[-1]
    protected = min(tokens, SINK_TOKENS + WINDOW_TOKENS)
    budget = bytes_ratio * tokens * FORMATS["fp16"].read_bytes(dim)
    budget -= protected * PROTECTED.token_bytes(dim)
    each = budget / max(1, tokens - protected)
    for low, high in pairwise(LADDER):
        least, most = (form.token_bytes(dim) for form in (low, high))
        if each <= most:
            share = max(0.0, (each - least) / (most - least))
            return Classes(name, two_levels(low, high, share), centre)
    return Classes(name, two_levels(LADDER[-2], LADDER[-1], 1.0), centre)


def _protected(scores: Tensor, value: float) -> Tensor:
    """Scores with another value for sinks and newest tokens."""
    token = torch.arange(scores.shape[-1])
    outer = (token < SINK_TOKENS) | (token >= len(token) - WINDOW_TOKENS)
    return scores.masked_fill(outer, value)


def _footprint(
    cache: RequestCache, counts: list[tuple[PageFormat, int]], extra_bytes: int = 0
) -> Footprint:
    """Bytes of tokens in each format; ``extra_bytes`` for each of them."""
    dim, entries = cache.keys.shape[3], cache.significance.numel()
    return Footprint(
        full_bytes=entries * FORMATS["fp16"].read_bytes(dim),
        data_bytes=sum(count * (form.read_bytes(dim) + extra_bytes) for form, count in counts),
        all_in_bytes=sum(count * (form.token_bytes(dim) + extra_bytes) for form, count in counts),
    )
