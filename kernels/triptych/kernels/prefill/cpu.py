# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.ops has no type hints.
"""Prefill attention on the CPU, in blocks of queries whose weights fit in the cache.

The weights of a block are in memory, so their column sums cost very little. Without sums, window,
softcap and padding, torch's flash attention is used, which is faster.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.kernels.codec.cpu import load_tokens
from triptych.kernels.pages import Past
from triptych.kernels.prefill.reference import Keys, add_sums, gather_keys, visible

BLOCK_FLOATS = 2**18
"""Weights of one block: 1 MiB, about the second-level cache of a core."""
MIN_BLOCK = 16
MAX_BLOCK = 64
"""Most queries in a block; larger blocks compute more weights that the causal mask hides."""
FLASH_BLOCK = 64
"""Tokens of a block of flash attention. Smaller blocks are more calls, larger ones more padding."""
FLASH_ROWS = 8
"""Queries are attended in groups of so many rows: float32 products of fewer round differently."""


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

    The sequence is divided into blocks of ``FLASH_BLOCK`` tokens from its beginning. A query
    attends to the keys of its block, all blocks in one call, and to those before the block; both
    are merged by log-sum-exp. The first and the last block are padded. So the shapes of all
    products, and with them the rounding of a token's output, depend on the token's position alone:
    it has the same bits however the prompt is divided into chunks and whatever of it is cached.
    """
    past, size = keys.key.shape[1] - len(query), FLASH_BLOCK
    first, lead = past - past % size, past % size
    used = lead + len(query)
    _, heads, dim = query.shape
    blocks = -(-used // size)
    whole = query.new_zeros(blocks * size, heads, dim)
    whole[lead:used] = query
    padding = (0, 0, 0, blocks * size - used)
    key, value = (F.pad(part.to(query.dtype), padding) for part in (keys.key, keys.value))
    queries = whole.view(blocks, size, heads, dim).transpose(1, 2)
    near, near_values = (
        part[:, first:].reshape(-1, blocks, size, dim).transpose(0, 1) for part in (key, value)
    )
    mixed, lse = _flash(queries, near, near_values, scale, is_causal=True)
    merged = mixed.float()
    for block, end in enumerate(range(first, first + blocks * size, size)):
        if end:
            rows = _rows_in_use(lead - block * size, used - block * size)
            part = (block, slice(None), rows)
            far, far_values = key[None, :, :end], value[None, :, :end]
            old, old_lse = _flash(queries[part][None], far, far_values, scale, is_causal=False)
            total = torch.logaddexp(lse[part], old_lse[0])
            share, old_share = (lse[part] - total).exp(), (old_lse[0] - total).exp()
            merged[part] = merged[part] * share[..., None] + old[0] * old_share[..., None]
    out.copy_(merged.transpose(1, 2).flatten(0, 1)[lead:used])


def _rows_in_use(first: int, end: int) -> slice:
    """The rows of a block from ``first`` to ``end``, in whole groups of ``FLASH_ROWS``."""
    start = max(0, first) // FLASH_ROWS * FLASH_ROWS
    return slice(start, min(FLASH_BLOCK, -(-end // FLASH_ROWS) * FLASH_ROWS))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention [B, H, n, d] and log-sum-exps [B, H, n]; key and value [B, KH, N, d]."""
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
