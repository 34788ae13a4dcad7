# pyright: reportUnknownMemberType=false
# Some methods of tensors have no types.
"""Prefill attention on the CPU, in blocks of queries whose weights fit in the cache.

The weights of a block are in memory, so their column sums cost very little.

The output for a token does not depend on where a chunk begins, to the last bit. Blocks are aligned
to positions, and each multiplies all keys up to a multiple of ``BLOCK``, hidden ones too. So sums
are of the same length, and as no product has fewer than ``MIN_QUERIES`` queries of a head, its rows
do not depend on each other.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from triptych.kernels.codec.cpu import load_tokens
from triptych.kernels.codegen.native import multiplies_words
from triptych.kernels.pages import Past
from triptych.kernels.prefill.cpu_bfloat import attend
from triptych.kernels.prefill.cpu_softmax import HIDDEN, softmax_
from triptych.kernels.prefill.reference import Keys, add_sums, gather_keys, is_two_way, visible

BLOCK_FLOATS = 2**18
"""Weights of one block: 1 MiB, about the second-level cache of a core."""
MIN_QUERIES = 16
BLOCK = 64
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
    sinks: Tensor | None = None,
    past: Past | None = None,
    significance: Tensor | None = None,
    two_way: Sequence[bool] = (),
) -> Tensor:
    """See ``reference.prefill_attention``."""
    out = torch.empty_like(query)
    for index, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        keys = gather_keys(load_tokens, key[start:end], value[start:end], past, index)
        sums = None if significance is None else significance[index]
        queries, mixed, is_even = query[start:end], out[start:end], _has_no_gap(keys, end - start)
        reads_all = is_two_way(two_way, index)
        if is_even or sums is None:
            _attend(queries, keys, mixed, scale, window, softcap, sinks, sums, reads_all)
        else:
            padded = torch.zeros(len(sums), keys.positions.shape[1])
            _attend(queries, keys, mixed, scale, window, softcap, sinks, padded, reads_all)
            add_sums(sums, padded, keys, end - start)
    return out


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
    sinks: Tensor | None,
    sums: Tensor | None,
    reads_all: bool,
) -> None:
    """Write attention of one sequence to ``out`` [n, H, d]; add to ``sums`` [H, N] if given."""
    count, heads, dim = query.shape
    kv_heads, known, _ = keys.key.shape
    is_causal = not reads_all and _has_no_gap(keys, count)
    is_plain = is_causal and window == 0
    if query.dtype == torch.bfloat16 and softcap == 0 and dim % 2 == 0 and multiplies_words():
        hidden = None if is_causal else ~visible(keys, count, window, reads_all)
        pair = keys.key, keys.value
        attend(query, *pair, out, scale, window=window, sinks=sinks, sums=sums, hidden=hidden)
        return
    group, first = heads // kv_heads, known - count
    grouped = (query.float() * scale).view(count, kv_heads, group, dim).permute(1, 2, 0, 3)
    key = F.pad(keys.key.transpose(1, 2), (0, -known % BLOCK))
    value = F.pad(keys.value, (0, 0, 0, -known % BLOCK))
    hidden = None if is_plain else _hidden(keys, count, window, reads_all)
    for start, end in _blocks(count, first, heads):
        size, rows = end - start, max(end - start, MIN_QUERIES)
        seen = known if reads_all else first + end
        seen += -seen % BLOCK
        queries = grouped[:, :, start:end]
        if size < rows:
            queries = F.pad(queries, (0, 0, 0, rows - size))
        logits = torch.bmm(queries.reshape(kv_heads, group * rows, dim), key[:, :, :seen])
        if softcap > 0:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        weights = logits.view(heads, rows, seen)
        if hidden is not None:
            grouped_weights = weights.view(kv_heads, group, rows, seen)[:, :, :size]
            grouped_weights.masked_fill_(hidden[:, :, start:end, :seen], HIDDEN)
        softmax_(weights, size, first + start + 1 if is_plain else None, sums, sinks)
        attended = torch.bmm(logits, value[:, :seen])
        attended = attended.view(kv_heads, group, rows, dim)[:, :, :size].permute(2, 0, 1, 3)
        out[start:end] = attended.reshape(size, heads, dim)


def _hidden(keys: Keys, count: int, window: int, reads_all: bool) -> Tensor:
    """Which keys a query may not read, [KH, 1, n, N rounded up to whole blocks]."""
    hidden = ~visible(keys, count, window, reads_all)[:, None]
    return F.pad(hidden, (0, -hidden.shape[-1] % BLOCK), value=True)


def _blocks(count: int, first: int, heads: int) -> Iterator[tuple[int, int]]:
    """Ranges of queries whose weights over all earlier keys fit ``BLOCK_FLOATS``.

    They begin at the first query, or at positions that are multiples of their size.
    """
    position, last = first, first + count
    while position < last:
        seen = position // BLOCK * BLOCK + BLOCK
        size = BLOCK
        while size > MIN_QUERIES and heads * size * seen > BLOCK_FLOATS:
            size //= 2
        end = min(last, position // size * size + size)
        yield position - first, end - first
        position = end
