"""Reference implementation of the codec ops. A token slot is a pair (page id, row of the page)."""

import torch
from torch import Tensor

from triptych.core.layout import PageLayout
from triptych.kernels.codec.quantizer import (
    FP16_MAX,
    Encoded,
    decode,
    encode,
    narrow,
    pack,
    unpack,
)
from triptych.kernels.pages import Section, segments

Slots = tuple[Tensor, Tensor]
"""Page id and row of each token slot, [n] each."""


def store_tokens(
    arena: Tensor,
    layout: PageLayout,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    rows: Tensor,
    positions: Tensor,
    scores: Tensor | None = None,
) -> None:
    """Encode tokens into given token slots; a page id of -1 skips the token.

    Shapes:  arena [P, page_bytes]; key, value [T, KH, d]; pages, rows [T, KH];
             positions [T]; scores [T, KH], zeros if None
    Dtypes:  arena uint8; key, value float32 or bfloat16; indices int32; scores float32
    """
    wanted = pages >= 0
    at = pages[wanted].long(), rows[wanted].long()
    into = segments(arena, layout)
    form = layout.format
    _write_keys(arena, layout, at, encode(key[wanted], form.key_bits, form.key_groups))
    _write_values(arena, layout, at, encode(value[wanted], form.value_bits, form.value_groups))
    into.positions[at] = positions[:, None].expand_as(pages)[wanted]
    into.scores[at] = torch.zeros_like(wanted, dtype=torch.float32)[wanted]
    if scores is not None:
        into.scores[at] = scores[wanted]


def append_tokens(
    arena: Tensor,
    section: Section,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    places: Tensor,
    positions: Tensor,
    mirror: Tensor | None = None,
) -> None:
    """Encode one new token of each request into its head rows, with score 0.

    ``slots``: batch slots, the rows of the section's page table. ``places``: index of the token in
    each head row of its slot; all head rows of a slot have the same length. Page table and token
    counts are not changed. ``mirror``: another arena with the same pages, which is written too.

    Shapes:  arena [P, page_bytes]; key, value [R, KH, d]; slots, places, positions [R]
    Dtypes:  arena uint8; key, value float32 or bfloat16; indices int32
    """
    head = torch.arange(key.shape[1], device=key.device)[None]
    pages, rows = _slots_of(section, slots.long()[:, None], head, places[:, None])
    rows = rows.expand_as(pages)
    for each in (arena,) if mirror is None else (arena, mirror):
        store_tokens(each, section.layout, key, value, pages, rows, positions)


def transcode(
    arena: Tensor,
    source_layout: PageLayout,
    target_layout: PageLayout,
    source_pages: Tensor,
    source_rows: Tensor,
    target_pages: Tensor,
    target_rows: Tensor,
) -> None:
    """Re-encode tokens from slots of one format into slots of another, with score and position.

    With equal bits and groups the codes are copied. With fewer bits and the same groups, bits are
    dropped without a second quantization error. Other pairs decode and quantize again. Source and
    target slots must not overlap.

    Shapes:  arena [P, page_bytes]; the indices [n]
    Dtypes:  arena uint8; indices int32
    Source:  DiffKV and LeanKV (compression after the prompt, downgrade while generating)
    """
    source, target = source_layout.format, target_layout.format
    read = source_pages.long(), source_rows.long()
    write = target_pages.long(), target_rows.long()
    old, new = segments(arena, source_layout), segments(arena, target_layout)
    keys = Encoded(unpack(old.keys[read], source.key_bits), old.key_metadata[read])
    values = Encoded(unpack(old.values[read], source.value_bits), old.value_metadata[read])
    scores, positions = old.scores[read], old.positions[read]
    keys = recode(keys, source.key_bits, target.key_bits, target.key_groups)
    values = recode(values, source.value_bits, target.value_bits, target.value_groups)
    _write_keys(arena, target_layout, write, keys)
    _write_values(arena, target_layout, write, values)
    new.scores[write], new.positions[write] = scores, positions


def move_tokens(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> None:
    """``transcode`` tokens of some batch slots from the pages of one section into another's.

    ``places`` and ``target_places``: index of each token in its head row of ``source`` and of
    ``target``. A token with a negative target place is not moved. Page tables and token counts are
    not changed.

    Shapes:  arena [P, page_bytes]; slots [R]; places, target_places [R, KH, T]
    Dtypes:  arena uint8; indices int32
    Source:  DiffKV and LeanKV (downgrade while generating)
    """
    row, head, token = (target_places >= 0).nonzero(as_tuple=True)
    slot = slots.long()[row]
    read = _slots_of(source, slot, head, places[row, head, token])
    write = _slots_of(target, slot, head, target_places[row, head, token])
    transcode(arena, source.layout, target.layout, *read, *write)


def round_tokens(
    layout: PageLayout, key: Tensor, value: Tensor, quantized: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values as pages give them back: from 16 bits, or from the format of ``layout``.

    Tokens are rounded to 16 bits. Those with ``quantized`` are then quantized and decoded to 16
    bits, twice: the second time changes the scale of few vectors by one unit, a third time changes
    nothing. So encoding the result and decoding it again gives the same bits.

    Shapes:  key, value [T, KH, d]; quantized [T] -> key, value [T, KH, d]
    Dtypes:  key, value float32 or bfloat16; quantized bool -> float32, numbers of float16
    Promise: ``round_tokens`` of the result is the result
    """
    form = layout.format
    return (
        _rounded(key, form.key_bits, form.key_groups, quantized),
        _rounded(value, form.value_bits, form.value_groups, quantized),
    )


def _rounded(vectors: Tensor, bits: int, groups: int, quantized: Tensor) -> Tensor:
    exact = vectors.float().clamp(-FP16_MAX, FP16_MAX).half()
    coarse = exact.flatten(0, 1)
    for _ in range(2):
        coarse = decode(encode(coarse, bits, groups)).clamp(-FP16_MAX, FP16_MAX).half()
    return torch.where(quantized[:, None, None], coarse.view_as(exact), exact).float()


def _slots_of(section: Section, slot: Tensor, head: Tensor, places: Tensor) -> Slots:
    column, row = places // section.layout.tokens, places % section.layout.tokens
    return section.forward_pages[slot, head, column.long()], row


def recode(encoded: Encoded, bits: int, to_bits: int, to_groups: int) -> Encoded:
    """Convert vectors to other bits and groups: copy, ``narrow``, or decode and encode again."""
    same_groups = encoded.metadata.shape[1] == to_groups
    if bits == to_bits and (bits == 16 or same_groups):
        return encoded
    if to_bits < bits < 16 and same_groups:
        return narrow(encoded, bits, to_bits)
    return encode(decode(encoded), to_bits, to_groups)


def load_tokens(
    arena: Tensor, layout: PageLayout, pages: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode whole head rows to keys, values and positions, padded to the longest row.

    Padding has keys and values 0 and positions -1.

    Shapes:  arena [P, page_bytes]; pages [R, M]; tokens [R] -> key, value [R, N, d],
             positions [R, N], with N the largest of ``tokens``
    Dtypes:  indices int32; key and value float32; positions int32
    """
    longest = int(tokens.max()) if len(tokens) else 0
    token = torch.arange(longest, device=arena.device)
    live = token < tokens[:, None]
    page = pages.long()[:, token // layout.tokens].where(live, 0).flatten()
    row = (token % layout.tokens).expand_as(live).flatten()
    part, form = segments(arena, layout), layout.format
    key = decode(Encoded(unpack(part.keys[page, row], form.key_bits), part.key_metadata[page, row]))
    value = decode(
        Encoded(unpack(part.values[page, row], form.value_bits), part.value_metadata[page, row])
    )
    positions = part.positions[page, row].view_as(live).where(live, -1)
    shape = (*live.shape, layout.head_dim)
    dead = ~live[..., None]
    return (
        key.view(shape).masked_fill(dead, 0.0),
        value.view(shape).masked_fill(dead, 0.0),
        positions,
    )


def _write_keys(arena: Tensor, layout: PageLayout, at: Slots, encoded: Encoded) -> None:
    into = segments(arena, layout)
    into.keys[at] = pack(encoded.codes, layout.format.key_bits)
    into.key_metadata[at] = encoded.metadata


def _write_values(arena: Tensor, layout: PageLayout, at: Slots, encoded: Encoded) -> None:
    into = segments(arena, layout)
    into.values[at] = pack(encoded.codes, layout.format.value_bits)
    into.value_metadata[at] = encoded.metadata
