"""What decode attention means: decode the pages, then one dense softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.kernels.codec import reference as codec
from triptych.kernels.pages import Section


def decode_attention(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of one query token per request over all its sections.

    Request r reads the tables of slot ``slots[r]`` in every section. The query's own key
    must be in a page already. ``window > 0`` hides keys that are ``window`` positions old
    or older and needs ``positions``, the position of each query; ``softcap > 0`` caps
    logits by tanh. ``lse`` is filled in place with the logarithm of the sum of the
    exponentials of all visible logits.

    Shapes:  query [R, H, d]; arena [P, page_bytes]; slots, positions [R]; lse [R, H]
             -> [R, H, d]
    Dtypes:  query float32 or bfloat16; arena uint8; indices int32; output and lse float32
    Promise: what lies in unused bytes of pages never changes the result
    Source:  DiffKV (mixed-precision pages in one kernel); FlashDecoding (splits)
    """
    rows, heads, dim = query.shape
    loaded = [_load(arena, section, slots) for section in sections]
    key, value, known = (torch.cat(parts, 2) for parts in zip(*loaded, strict=True))
    grouped = query.float().view(rows, key.shape[1], -1, dim)
    logits = grouped @ key.transpose(2, 3) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    visible = known >= 0
    if window > 0 and positions is not None:
        visible &= positions[:, None, None] - known < window
    logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
    weights = logits.softmax(-1)
    if lse is not None:
        lse[:] = logits.logsumexp(-1).view(rows, heads)
    return (weights @ value).view(rows, heads, dim)


def _load(arena: Tensor, section: Section, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and positions of the requests: [R, KH, N, d] twice and [R, KH, N]."""
    pages, tokens = section.pages[slots.long()], section.tokens[slots.long()]
    pages = pages.flip(-1) if section.backward else pages
    flat = codec.load_tokens(arena, section.layout, pages.flatten(0, 1), tokens.flatten())
    key, value, known = (part.view(*tokens.shape, *part.shape[1:]) for part in flat)
    return key, value, known
