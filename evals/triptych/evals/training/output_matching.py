# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""Attention of later queries over a compressed context, beside that over the full one."""

import torch
from torch import Tensor

from triptych.core.images import IMAGE, TEXT, Segment, all_segments
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.training.captures import Capture
from triptych.workers.compress.learned.chunk_merger import Merger
from triptych.workers.compress.learned.chunk_plan import ChunkPlan, plan_chunks
from triptych.workers.compress.learned.merge_requests import RequestCache, merge_requests
from triptych.workers.compress.learned.rope_frame import RopeFrame

LSE_WEIGHT = 0.1
"""Weight of the log-sum-exp in the loss: it keeps the balance with tokens that were not merged."""


def context_of(capture: Capture) -> RequestCache:
    """The context of a capture as the cache of a request, with measured significance."""
    length = capture.context
    return RequestCache(
        keys=capture.keys[:, :, :length].float(),
        values=capture.values[:, :, :length].float(),
        significance=capture.significance[length],
    )


def chunk_plan_of(capture: Capture, chunk_tokens: int, offset: int = 0) -> ChunkPlan:
    """Chunks of a text between sinks and recent window, or of the images of a chat.

    ``offset``: phase of the chunks in a text; those of an image begin with it, as when it is
    served.
    """
    text = [Segment(TEXT, 0, capture.context)]
    if not capture.images:
        return plan_chunks(text, chunk_tokens, offset=offset)
    every = all_segments(capture.images, capture.context)
    return plan_chunks(every, chunk_tokens, modalities=(IMAGE,), window_tokens=0)


def merge_capture(
    merger: Merger, frame: RopeFrame, capture: Capture, offset: int = 0
) -> ReplacedCache:
    """The context of a capture after merging. ``offset``: as in ``chunk_plan_of``."""
    plan = chunk_plan_of(capture, merger.chunk_tokens, offset)
    return _merged(merger, frame, context_of(capture), plan)


def merge_context(merger: Merger, frame: RopeFrame, cache: RequestCache) -> ReplacedCache:
    """A text merged between sinks and recent window."""
    plan = plan_chunks([Segment(TEXT, 0, cache.keys.shape[2])], merger.chunk_tokens)
    return _merged(merger, frame, cache, plan)


def _merged(
    merger: Merger, frame: RopeFrame, cache: RequestCache, plan: ChunkPlan
) -> ReplacedCache:
    (merged,) = merge_requests(dict.fromkeys(plan.chunks, merger), frame, [cache], [plan])
    return ReplacedCache(merged.keys, merged.values, merged.bias)


def attend(replaced: ReplacedCache, capture: Capture) -> tuple[Tensor, Tensor]:
    """Outputs [L, H, M, d] and log-sum-exps [L, H, M] of the captured queries.

    They read the replaced context, and all tokens after the context up to their own.
    """
    kv_heads, count, context = replaced.keys.shape[1], capture.queries.shape[2], capture.context
    keys = torch.cat((replaced.keys, capture.keys[:, :, context:].float()), 2)
    values = torch.cat((replaced.values, capture.values[:, :, context:].float()), 2)
    ahead = torch.ones(count, count, dtype=torch.bool).triu(1)
    own = torch.zeros(count, count).masked_fill(ahead, float("-inf"))
    before = replaced.bias[:, :, None, None].expand(-1, -1, 1, count, -1)
    bias = torch.cat((before, own.expand(*before.shape[:3], count, count)), -1)
    logits = capture.queries.float().unflatten(1, (kv_heads, -1)) @ keys[:, :, None].mT + bias
    lse = logits.logsumexp(-1, keepdim=True)
    outputs = (logits - lse).exp() @ values[:, :, None]
    return outputs.flatten(1, 2), lse[..., 0].flatten(1, 2)


def output_error(replaced: ReplacedCache, capture: Capture) -> tuple[Tensor, Tensor]:
    """Squared error of attention outputs over their square, and squared error of log-sum-exps.

    Shapes:  -> [L] twice
    Source:  ours; FastCache reconstructs the cache or compares logits
    """
    outputs, lse = attend(replaced, capture)
    full = capture.outputs.float()
    relative = (outputs - full).square().mean((1, 2, 3)) / full.square().mean((1, 2, 3))
    return relative, (lse - capture.lse).square().mean((1, 2))


def matching_loss(replaced: ReplacedCache, capture: Capture) -> Tensor:
    """Loss of each layer: [L]."""
    relative, lse = output_error(replaced, capture)
    return relative + LSE_WEIGHT * lse
