"""Reference of decode attention and token scores: decode the pages, then one dense softmax."""

from collections.abc import Sequence

import torch
from torch import Tensor

from triptych.kernels.codec import reference as codec
from triptych.kernels.page_lists import PageLists, check_page_lists
from triptych.kernels.pages import Section, check_window, segments


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
    page_lists: PageLists | None = None,
) -> Tensor:
    """Attention of one query token per request over all sections of the request.

    Request r reads the page tables of batch slot ``slots[r]`` in every section. The query's own
    key must be stored before. ``window > 0`` hides keys that are ``window`` or more positions old,
    and needs ``positions``, the position of each query; ``softcap > 0`` caps logits by tanh.
    The bias of a token, where a section's layout has biases, is added to its capped logit.
    ``lse``, if given, is filled with the natural logarithm of the sum of exponentials of each head,
    an input of ``score_tokens``. With ``page_lists`` only the listed pages are read;
    ``select_pages`` writes such lists.

    Shapes:  query [R, H, d]; arena [P, page_bytes]; slots, positions [R]; lse [R, H] -> [R, H, d]
    Dtypes:  query float32 or bfloat16; arena uint8; indices int32; lse and output float32
    Promise: unused bytes of pages never change the result; lists of all pages
             give the same bits as no lists
    Source:  DiffKV (mixed-precision pages in one kernel); FlashDecoding (splits)
    """
    logits, value, _ = _logits(query, arena, sections, slots, scale, softcap, window, positions)
    if page_lists is not None:
        unread = ~_listed(page_lists, sections, slots)
        logits = logits.masked_fill(unread[:, :, None], float("-inf"))
    if lse is not None:
        lse[:] = logits.logsumexp(-1).view_as(lse)
    return (logits.softmax(-1) @ value).view_as(query)


def score_tokens(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    positions: Tensor | None = None,
    weight: float = 1.0,
    mirror: Tensor | None = None,
) -> None:
    """Add the attention that each stored token receives from the query to its score in its page.

    A token's score grows by ``weight`` times the largest softmax weight among the query
    heads of its KV head. Tokens with a bias have no score, nor have those of pages that are encoded
    whole. ``lse`` comes from ``decode_attention`` with the same arguments. Requests with slot -1
    are skipped.
    ``mirror``: another arena with the same pages, into which the new scores are copied; then no
    two requests share a page.

    Shapes:  as ``decode_attention``
    Source:  DiffKV (significance while generating: the maximum over the group's heads)
    """
    sections, scored = scored_sections(sections), slots >= 0
    if not sections or not scored.any():
        return
    query, slots, lse = query[scored], slots[scored], lse[scored]
    positions = None if positions is None else positions[scored]
    logits, _, _ = _logits(query, arena, sections, slots, scale, softcap, window, positions)
    grouped = lse.view(*logits.shape[:3], 1)
    received = (logits - grouped).exp().amax(2) * weight
    start = 0
    for section in sections:
        pages, tokens = section.forward_pages[slots.long()], section.tokens[slots.long()]
        token = torch.arange(int(tokens.max()), device=arena.device)
        live = token < tokens[..., None]
        page = pages.long()[..., token // section.layout.tokens][live]
        row = (token % section.layout.tokens).expand_as(live)[live]
        scores = segments(arena, section.layout).scores
        scores[page, row] += received[..., start : start + len(token)][live]
        start += len(token)
    if mirror is not None:
        copy_scores(arena, mirror, sections, slots)


def scored_sections(sections: Sequence[Section]) -> list[Section]:
    """The sections whose tokens have scores."""
    return [section for section in sections if section.layout.has_scores]


def copy_scores(source: Tensor, target: Tensor, sections: Sequence[Section], slots: Tensor) -> None:
    """Copy the scores of all pages of some slots to an arena with the same pages."""
    for section in sections:
        pages, tokens = section.forward_pages[slots.long()], section.tokens[slots.long()]
        ordinal = torch.arange(pages.shape[-1], device=pages.device)
        used = pages[ordinal < -(-tokens // section.layout.tokens)[..., None]].long()
        kept, written = (segments(each, section.layout).scores for each in (target, source))
        kept[used] = written[used]


def record_scores(
    progress: Tensor, slots: Tensor, positions: Tensor, layer: int, layers: int
) -> None:
    """Record that the scores of a layer are added for the tokens at some positions.

    ``progress`` counts, for each slot, the layers whose scores are added, over all positions; -1:
    no slot.

    Shapes:  progress [slots of the batch]; slots, positions [R]
    Dtypes:  progress int64; slots and positions int32
    """
    live = slots >= 0
    progress[slots[live].long()] = positions[live].long() * layers + layer + 1


def _listed(page_lists: PageLists, sections: Sequence[Section], slots: Tensor) -> Tensor:
    """Mask of tokens in pages that their request reads, [R, KH, N] in the order of ``_logits``.

    Entries beyond the end of a row are undefined.
    """
    check_page_lists(page_lists, len(slots), sections[0].tokens.shape[1])
    place = page_lists.rows.long().clamp(min=0)
    entry = torch.arange(page_lists.ordinals.shape[2], device=slots.device)
    named = page_lists.ordinals[place].where(entry < page_lists.counts[place][..., None], -1)
    parts, first = list[Tensor](), torch.zeros_like(page_lists.counts[place])
    for section in sections:
        tokens, room = section.tokens[slots.long()], section.layout.tokens
        page = torch.arange(int(tokens.max()), device=slots.device) // room
        ordinal = first[..., None] + page
        parts.append((ordinal[..., None] == named[:, :, None]).any(-1))
        first = first + (tokens + room - 1) // room
    return torch.cat(parts, 2) | (page_lists.rows < 0)[:, None, None]


def _logits(
    query: Tensor,
    arena: Tensor,
    sections: Sequence[Section],
    slots: Tensor,
    scale: float,
    softcap: float,
    window: int,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, KH, G, N] with -inf where hidden, values [R, KH, N, d], positions [R, KH, N]."""
    rows, _, dim = query.shape
    check_window(sections, window)
    loaded = [_load(arena, section, slots) for section in sections]
    key, value, known, bias = (torch.cat(parts, 2) for parts in zip(*loaded, strict=True))
    grouped = query.float().view(rows, key.shape[1], -1, dim)
    logits = grouped @ key.transpose(2, 3) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + bias[:, :, None]
    visible = known >= 0
    if window > 0 and positions is not None:
        visible &= positions[:, None, None] - known < window
    return logits.masked_fill(~visible[:, :, None], float("-inf")), value, known


def _load(arena: Tensor, section: Section, slots: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, positions and biases of the requests: [R, KH, N, d] and [R, KH, N] twice."""
    pages, tokens = section.forward_pages[slots.long()], section.tokens[slots.long()]
    flat = codec.load_tokens(arena, section.layout, pages.flatten(0, 1), tokens.flatten())
    key, value, known = (part.view(*tokens.shape, *part.shape[1:]) for part in flat)
    bias = torch.zeros_like(known, dtype=torch.float32)
    if section.layout.has_bias:
        live = known >= 0
        token = torch.arange(known.shape[2], device=arena.device)
        page = pages.long()[..., token // section.layout.tokens][live]
        row = (token % section.layout.tokens).expand_as(live)[live]
        bias[live] = segments(arena, section.layout).scores[page, row]
    return key, value, known, bias
