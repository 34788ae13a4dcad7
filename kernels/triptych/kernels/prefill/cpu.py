# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.ops has no type hints.
"""Prefill attention on the CPU, in blocks of queries whose weights fit in the cache.

The weights of a block are in memory, so their column sums cost very little. Without sums, window,
softcap and padding, torch's flash attention is used, which is faster.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from triptych.kernels.codec.cpu import load_tokens
from triptych.kernels.pages import Past
from triptych.kernels.prefill.reference import Keys, add_sums, gather_keys, visible

BLOCK_FLOATS = 2**18
"""Weights of one block: 1 MiB, about the second-level cache of a core."""
MIN_BLOCK = 16
MAX_BLOCK = 64
"""Most queries in a block; larger blocks compute more weights that the causal mask hides."""


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
    for index, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        keys = gather_keys(load_tokens, key[start:end], value[start:end], past, index)
        sums = None if significance is None else significance[index]
        queries, mixed, is_even = query[start:end], out[start:end], _has_no_gap(keys, end - start)
        if is_even and sums is None and window == 0 and softcap == 0:
            _attend_flash(queries, keys, mixed, scale)
        elif is_even or sums is None:
            _attend(queries, keys, mixed, scale, window, softcap, sums)
        else:
            padded = torch.zeros(len(sums), keys.positions.shape[1])
            _attend(queries, keys, mixed, scale, window, softcap, padded)
            add_sums(sums, padded, keys, end - start)
    return out


def _attend_flash(query: Tensor, keys: Keys, out: Tensor, scale: float) -> None:
    """Causal attention of one sequence whose heads all have the same number of past tokens.

    Past and new keys are attended separately and merged by log-sum-exp: a mask takes longer. All is
    in float32, which takes no longer where 16-bit products have no unit of their own. Rounding each
    part to 16 bits made the output depend on where a chunk begins, and so on what is cached.
    """
    past = keys.key.shape[1] - len(query)
    queries = query.float().transpose(0, 1)[None]
    key, value = keys.key[None], keys.value[None]
    mixed, lse = _flash(queries, key[:, :, past:], value[:, :, past:], scale, is_causal=True)
    if past:
        old, old_lse = _flash(queries, key[:, :, :past], value[:, :, :past], scale, is_causal=False)
        whole = torch.logaddexp(lse, old_lse)
        mixed = mixed * (lse - whole).exp()[..., None] + old * (old_lse - whole).exp()[..., None]
    out.copy_(mixed[0].transpose(0, 1))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention [1, H, n, d] and log-sum-exps [1, H, n]; key and value [1, KH, N, d]."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, is_causal, scale=scale)


def _has_no_gap(keys: Keys, queries: int) -> bool:
    """Whether all heads have the same number of past keys, so that there is no padding."""
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
    """Write attention of one sequence to ``out`` [n, H, d]; add to ``sums`` [H, N] if given."""
    count, heads, dim = query.shape
    kv_heads, known, _ = keys.key.shape
    group, first = heads // kv_heads, known - count
    grouped = (query.float() * scale).view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    key, value = keys.key.transpose(1, 2).contiguous(), keys.value.contiguous()
    is_plain = window == 0 and _has_no_gap(keys, count)
    hidden = None if is_plain else ~visible(keys, count, window)[:, None]
    for start, end in _blocks(count, first, heads):
        size, seen = end - start, first + end
        queries = grouped[:, :, start:end].reshape(kv_heads, group * size, dim)
        logits = torch.bmm(queries, key[:, :, :seen]).view(kv_heads, group, size, seen)
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
    """Ranges of queries whose weights over all earlier keys fit ``BLOCK_FLOATS``."""
    start = 0
    while start < count:
        fitting = BLOCK_FLOATS // (heads * (first + start + MAX_BLOCK))
        end = min(count, start + min(MAX_BLOCK, max(MIN_BLOCK, fitting)))
        yield start, end
        start = end
