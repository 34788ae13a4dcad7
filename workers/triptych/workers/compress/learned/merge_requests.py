# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Merges the KV caches of a batch of requests, each by its own chunk plan.

Chunks of all requests of a modality go through the network in one call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.config import require
from triptych.workers.compress.learned.chunk_merger import Chunks, Merged, Merger
from triptych.workers.compress.learned.chunk_plan import ChunkPlan
from triptych.workers.compress.learned.rope_frame import RopeFrame

TINY = 1e-8
"""Added to significance before its logarithm."""


@dataclass(frozen=True)
class RequestCache:
    """Keys and values of a request of N tokens at positions 0 to N - 1."""

    keys: Tensor
    """[L, KH, N, d] float32, after RoPE."""
    values: Tensor
    """[L, KH, N, d] float32."""
    significance: Tensor
    """[L, KH, N]: measured, or predicted by a scorer; ones: all tokens count the same."""


@dataclass(frozen=True)
class MergedCache:
    """Keys and values of n tokens, in order of position, with what attention adds to logits."""

    keys: Tensor
    """[L, KH, n, d]"""
    values: Tensor
    """[L, KH, n, d]"""
    bias: Tensor
    """[L, KH, n]; 0 for tokens that were kept."""
    positions: Tensor
    """(n,) int64: of a merged token that of its newest member, so that nothing is seen early."""


def merge_requests(
    mergers: Mapping[str, Merger],
    frame: RopeFrame,
    caches: Sequence[RequestCache],
    plans: Sequence[ChunkPlan],
) -> list[MergedCache]:
    """Merge each request by its plan; networks run once per modality for the whole batch.

    Raises:  ConfigError if a network merges another number of tokens than a plan
    Promise: a batch gives what its requests give one by one
    Source:  FastCache, section 3.2 (a network per modality; parts stay in their order)
    """
    for plan in plans:
        for modality in plan.chunks:
            takes = mergers[modality].chunk_tokens
            require(plan.chunk_tokens == takes, "chunk_tokens", plan.chunk_tokens, f"{takes}")
    found = {
        modality: _merge_modality(modality, mergers[modality], frame, caches, plans)
        for modality in sorted(
            {name for plan in plans for name, starts in plan.chunks.items() if starts}
        )
    }
    return [
        _in_order(cache, plan, {name: parts[index] for name, parts in found.items()})
        for index, (cache, plan) in enumerate(zip(caches, plans, strict=True))
    ]


def anchors(starts: Tensor, chunk_tokens: int) -> Tensor:
    """Middle of each chunk, a multiple of 1/2: (C,) -> (C,) float32."""
    return starts + (chunk_tokens - 1) / 2


def gather_chunks(
    cache: RequestCache, frame: RopeFrame, starts: Tensor, chunk_tokens: int
) -> Chunks:
    """Tokens of the chunks that begin at ``starts``, keys in the frame of each."""
    at = starts[:, None] + torch.arange(chunk_tokens)
    middle = anchors(starts, chunk_tokens)[:, None].expand(-1, chunk_tokens)
    return Chunks(
        keys=frame.to_local(cache.keys[:, :, at], middle),
        values=cache.values[:, :, at],
        log_significance=(cache.significance[:, :, at] + TINY).log(),
    )


def _merge_modality(
    modality: str,
    merger: Merger,
    frame: RopeFrame,
    caches: Sequence[RequestCache],
    plans: Sequence[ChunkPlan],
) -> list[tuple[Tensor, Merged]]:
    """Starts and merged tokens of each request."""
    starts = [torch.tensor(plan.chunks.get(modality, ()), dtype=torch.int64) for plan in plans]
    k, counts = merger.chunk_tokens, [len(some) for some in starts]
    parts = [
        gather_chunks(cache, frame, some, k) for cache, some in zip(caches, starts, strict=True)
    ]
    merged = merger(
        Chunks(
            keys=torch.cat([part.keys for part in parts], 2),
            values=torch.cat([part.values for part in parts], 2),
            log_significance=torch.cat([part.log_significance for part in parts], 2),
        )
    )
    turned = frame.rotate(merged.keys, anchors(torch.cat(starts), k))
    columns = zip(
        turned.split(counts, 2),
        merged.values.split(counts, 2),
        merged.bias.split(counts, 2),
        strict=True,
    )
    return [(some, Merged(*column)) for some, column in zip(starts, columns, strict=True)]


def _in_order(
    cache: RequestCache, plan: ChunkPlan, merged: Mapping[str, tuple[Tensor, Merged]]
) -> MergedCache:
    kept = torch.tensor(plan.kept, dtype=torch.int64)
    ends = [starts + plan.chunk_tokens - 1 for starts, _ in merged.values()]
    tokens = [one for _, one in merged.values()]
    positions = torch.cat([kept, *ends])
    order = positions.argsort()
    keys = torch.cat([cache.keys[:, :, kept], *(one.keys for one in tokens)], 2)
    values = torch.cat([cache.values[:, :, kept], *(one.values for one in tokens)], 2)
    none = cache.keys.new_zeros(*cache.keys.shape[:2], len(kept))
    bias = torch.cat([none, *(one.bias for one in tokens)], 2)
    return MergedCache(keys[:, :, order], values[:, :, order], bias[:, :, order], positions[order])
