"""Prefill attention on the CPU: blocks of queries whose weights stay in the cache.

The weights of a block exist in memory anyway, so their column sums cost next to nothing.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from triptych.kernels.codec.cpu import load_tokens
from triptych.kernels.pages import Past
from triptych.kernels.prefill.reference import Keys, add_sums, gather_keys, visible

BLOCK_FLOATS = 2**18
"""Weights of one block: 1 MiB, about the second-level cache of a core."""
MIN_BLOCK = 16
MAX_BLOCK = 64
"""Queries in a block; more of them compute more weights that causality hides."""


def prefill_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Sequence[int],
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    past: Past | None = None,
    significance: Tensor | None = None,
) -> Tensor:
    """See ``reference.prefill_attention``."""
    out = torch.empty_like(query)
    if window == 0 and softcap == 0 and past is None and significance is None:
        _attend_plainly(query, key, value, offsets, scale, out)
        return out
    for index, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        keys = gather_keys(load_tokens, key[start:end], value[start:end], past, index)
        sums = None if significance is None else significance[index]
        if sums is None or _has_no_gap(keys, end - start):
            _attend(query[start:end], keys, out[start:end], scale, window, softcap, sums)
        else:
            padded = torch.zeros(len(sums), keys.positions.shape[1])
            _attend(query[start:end], keys, out[start:end], scale, window, softcap, padded)
            add_sums(sums, padded, keys, end - start)
    return out


def _attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, offsets: Sequence[int], scale: float, out: Tensor
) -> None:
    """Causal attention of whole prompts: torch's own kernel is the fastest there is."""
    for start, end in pairwise(offsets):
        if start < end:
            q, k, v = (part[start:end].transpose(0, 1)[None] for part in (query, key, value))
            mixed = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
            out[start:end] = mixed[0].transpose(0, 1)


def _has_no_gap(keys: Keys, queries: int) -> bool:
    """Whether all heads have equally many past keys."""
    return bool((keys.past == keys.positions.shape[1] - queries).all())


def _attend(
    query: Tensor,
    keys: Keys,
    out: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sums: Tensor | None,
) -> None:
    """Attention of one sequence into ``out`` [n, H, d]; adds to ``sums`` [H, N] if wanted."""
    count, heads, dim = query.shape
    kv_heads, known, _ = keys.key.shape
    group, first = heads // kv_heads, known - count
    grouped = (query.float() * scale).view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    key, value = keys.key.transpose(1, 2).contiguous(), keys.value.contiguous()
    is_plain = window == 0 and _has_no_gap(keys, count)
    hidden = None if is_plain else ~visible(keys, count, window)[:, None]
    for start, end in _blocks(count, first, heads):
        size, seen = end - start, first + end
        asked = grouped[:, :, start:end].reshape(kv_heads, group * size, dim)
        logits = torch.bmm(asked, key[:, :, :seen]).view(kv_heads, group, size, seen)
        if softcap > 0:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        if hidden is None:
            later = torch.ones(size, size, dtype=torch.bool).triu_(1)
            logits[..., seen - size :].masked_fill_(later, float("-inf"))
        else:
            logits.masked_fill_(hidden[:, :, start:end, :seen], float("-inf"))
        weights = logits.softmax(-1)
        if sums is not None:
            sums[:, :seen] += weights.view(heads, size, seen).sum(1)
        attended = torch.bmm(weights.view(kv_heads, group * size, seen), value[:, :seen])
        attended = attended.view(kv_heads, group, size, dim).permute(2, 0, 1, 3)
        out[start:end] = attended.reshape(size, heads, dim)


def _blocks(count: int, first: int, heads: int) -> Iterator[tuple[int, int]]:
    """Runs of queries whose weights over all earlier keys fit ``BLOCK_FLOATS``."""
    start = 0
    while start < count:
        fitting = BLOCK_FLOATS // (heads * (first + start + MAX_BLOCK))
        end = min(count, start + min(MAX_BLOCK, max(MIN_BLOCK, fitting)))
        yield start, end
        start = end
