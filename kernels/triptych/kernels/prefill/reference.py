"""Reference of ``prefill_attention``: one dense softmax per sequence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.codec.reference import load_tokens
from triptych.kernels.pages import Past


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one sequence: past keys, padded to the longest past of a head, then new keys."""

    key: Tensor
    """[KH, P + n, d]."""
    value: Tensor
    positions: Tensor
    """[KH, P + n]; -1 where a head's past is shorter than P."""
    past: Tensor
    """Past tokens of each head, [KH]."""


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
    """Causal attention of a ragged batch of prompts, or of the next chunk of each prompt.

    Sequence b has the tokens ``offsets[b]`` to ``offsets[b + 1]`` of the flat batch. Each token
    attends to all past tokens of its sequence and to new ones up to itself. The positions of new
    tokens follow the largest position of the past. ``window > 0`` hides keys that are ``window``
    or more positions old; ``softcap > 0`` caps logits by tanh. ``sinks``: a logit of each head
    that takes part in every softmax and has no value; neither is it scaled or capped. ``two_way``
    says of each sequence whether its new tokens attend to all new ones, whatever the window is;
    empty: none does.

    ``significance`` is added to in place and so accumulates over chunks: entry [b, h, j] grows by
    the attention that key j of head h, past keys first, receives from the new queries. None: it is
    not computed, which is faster.

    Shapes:  query [T, H, d]; key, value [T, KH, d]; sinks [H]; significance [B, H, N]
             -> [T, H, d]
    Dtypes:  query, key, value float32 or bfloat16 alike, and the output; sinks and significance
             float32
    Source:  LeanKV and DiffKV (token significance from attention); SARATHI (chunks); GPT-OSS
             (sinks); Gemma 3 (images that are seen in both directions)
    """
    out = torch.empty_like(query)
    for index, (start, end) in enumerate(pairwise(offsets)):
        if start == end:
            continue
        keys = gather_keys(load_tokens, key[start:end], value[start:end], past, index)
        weights = attention_weights(
            query[start:end],
            keys,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            two_way=is_two_way(two_way, index),
        )
        group = query.shape[1] // key.shape[1]
        attended = weights @ keys.value.repeat_interleave(group, 0)
        out[start:end] = attended.transpose(0, 1).to(out.dtype)
        if significance is not None:
            add_sums(significance[index], weights.sum(1), keys, end - start)
    return out


def attention_weights(
    query: Tensor,
    keys: Keys,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    two_way: bool = False,
) -> Tensor:
    """The attention that each new token of one sequence pays to each key, in float32.

    Shapes:  query [n, H, d] -> [H, n, P + n]; the rest as in ``prefill_attention``
    """
    logits = _logits(query, keys.key, scale, softcap)
    hidden = ~visible(keys, len(query), window, two_way)
    group = query.shape[1] // keys.key.shape[0]
    logits = logits.masked_fill(hidden.repeat_interleave(group, 0), float("-inf"))
    weights = logits.softmax(-1)
    if sinks is not None:
        weights *= torch.sigmoid(logits.logsumexp(-1) - sinks[:, None])[..., None]
    return weights


Load = Callable[[Tensor, PageLayout, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""An implementation of ``load_tokens``."""


def gather_keys(load: Load, key: Tensor, value: Tensor, past: Past | None, index: int) -> Keys:
    """Past and new keys of sequence ``index`` in float32; ``load`` reads the pages.

    Shapes:  key, value [n, KH, d]
    """
    heads = key.shape[1]
    key, value = key.transpose(0, 1).float(), value.transpose(0, 1).float()
    new = torch.arange(key.shape[1], dtype=torch.int32, device=key.device)
    if past is None:
        none = torch.zeros(heads, dtype=torch.int32, device=key.device)
        return Keys(key, value, new.expand(heads, -1), none)
    count = past.tokens[index]
    old = load(past.arena, past.layout, past.pages[index], count)
    first = int(old[2].max()) + 1 if old[2].numel() else 0
    return Keys(
        torch.cat((old[0], key), 1),
        torch.cat((old[1], value), 1),
        torch.cat((old[2], (new + first).expand(heads, -1)), 1),
        count,
    )


def is_two_way(two_way: Sequence[bool], index: int) -> bool:
    """Whether new tokens of a sequence attend to all new ones."""
    return bool(two_way) and two_way[index]


def visible(keys: Keys, queries: int, window: int, reads_all: bool) -> Tensor:
    """Mask of the keys that each query may read, bool [KH, n, P + n].

    ``reads_all``: each new token reads all new ones.
    """
    query_at = keys.positions[:, -queries:, None]
    key_at = keys.positions[:, None, :]
    seen = (key_at >= 0) & (key_at <= query_at)
    if window > 0:
        seen &= query_at - key_at < window
    if reads_all:
        seen[:, :, -queries:] = True
    return seen


def add_sums(significance: Tensor, sums: Tensor, keys: Keys, queries: int) -> None:
    """Add column sums [H, P + n] to ``significance`` [H, N], without the padding of the past."""
    padded = keys.positions.shape[1] - queries
    group = len(sums) // len(keys.past)
    for head in range(len(sums)):
        count = int(keys.past[head // group])
        significance[head, :count] += sums[head, :count]
        significance[head, count : count + queries] += sums[head, padded:]


def _logits(query: Tensor, key: Tensor, scale: float, softcap: float) -> Tensor:
    """Capped logits [H, n, P + n] of queries [n, H, d] and keys [KH, P + n, d]."""
    group = query.shape[1] // key.shape[0]
    grouped = key.repeat_interleave(group, 0)
    logits = query.transpose(0, 1).float() @ grouped.transpose(1, 2) * scale
    return softcap * torch.tanh(logits / softcap) if softcap > 0 else logits
