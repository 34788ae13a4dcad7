"""Reference implementation of the codec ops. A token slot is a pair (page id, row of the page)."""

from typing import cast

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageFormat, PageLayout
from triptych.kernels.codec.page_codecs import EncodedPages, decode_pages, encode_pages
from triptych.kernels.codec.quantizer import (
    COPY,
    FP16_MAX,
    NARROW,
    Encoded,
    conversion,
    decode,
    encode_as,
    narrow,
    pack,
    pack_segments,
    unpack,
    unpack_segments,
)
from triptych.kernels.pages import (
    Section,
    Segments,
    check_rounded,
    check_whole_pages,
    check_written_alone,
    segments,
)

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
    check_written_alone("store_tokens", layout)
    wanted = pages >= 0
    at = pages[wanted].long(), rows[wanted].long()
    into = segments(arena, layout)
    form = layout.format
    _write_keys(arena, layout, at, encode_as(form, key[wanted], of_keys=True))
    _write_values(arena, layout, at, encode_as(form, value[wanted], of_keys=False))
    if not layout.is_tracked:
        return
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

    Pages of tokens that are not tracked get neither. Score and position of such tokens become 0.

    With equal bits and groups the codes are copied. With fewer bits and the same groups, bits are
    dropped without a second quantization error. Other pairs, and targets that limit numbers, decode
    and quantize again. Source and
    target slots must not overlap.

    Shapes:  arena [P, page_bytes]; the indices [n]
    Dtypes:  arena uint8; indices int32
    Source:  DiffKV and LeanKV (compression after the prompt, downgrade while generating)
    """
    check_written_alone("transcode", source_layout, target_layout)
    read = source_pages.long(), source_rows.long()
    write = target_pages.long(), target_rows.long()
    old, new = segments(arena, source_layout), segments(arena, target_layout)
    parts = _read(old, source_layout, read)
    scores, positions = _tracked(old, source_layout, read)
    forms = source_layout.format, target_layout.format
    keys, values = (
        _recoded(part, *forms, of_keys=of_keys)
        for part, of_keys in zip(parts, (True, False), strict=True)
    )
    _write_keys(arena, target_layout, write, keys)
    _write_values(arena, target_layout, write, values)
    if target_layout.is_tracked:
        new.scores[write], new.positions[write] = scores, positions


def _tracked(parts: Segments, layout: PageLayout, at: Slots) -> tuple[Tensor, Tensor]:
    """Scores and positions of some slots; 0 if tokens are not tracked."""
    if layout.is_tracked:
        return parts.scores[at], parts.positions[at]
    return torch.zeros_like(at[1], dtype=torch.float32), torch.zeros_like(at[1]).int()


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

    If pages of the target are encoded whole, T is a multiple of the tokens of a page, and each run
    of so many tokens fills a page in the order of its places, or stays.

    Shapes:  arena [P, page_bytes]; slots [R]; places, target_places [R, KH, T]
    Dtypes:  arena uint8; indices int32
    Raises:  ConfigError if a page that is encoded whole would be filled in part
    Source:  DiffKV and LeanKV (downgrade while generating); KIVI (whole groups of tokens)
    """
    if target.layout.format.codes_whole_pages:
        _move_pages(arena, source, target, slots, places, target_places)
        return
    row, head, token = (target_places >= 0).nonzero(as_tuple=True)
    slot = slots.long()[row]
    read = _slots_of(source, slot, head, places[row, head, token])
    write = _slots_of(target, slot, head, target_places[row, head, token])
    transcode(arena, source.layout, target.layout, *read, *write)


def _move_pages(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> None:
    """``move_tokens`` into pages that are encoded whole."""
    check_written_alone("move_tokens", source.layout)
    layout = target.layout
    room, form = layout.tokens, layout.format
    check_whole_pages(layout, target_places.shape[2])
    by_page = (*target_places.shape[:2], -1, room)
    runs = target_places.reshape(by_page)
    row, head, run = (runs[..., 0] >= 0).nonzero().unbind(1)
    first = runs[row, head, run][:, :1]
    expected = first + torch.arange(room, device=first.device)
    if (first % room).any() or not torch.equal(runs[row, head, run], expected.int()):
        raise ConfigError(
            f"move_tokens: a page of {form.name} holds {room} tokens and is encoded whole: "
            "expected its places in order, from the first one on"
        )
    slot = slots.long()[row]
    at = _slots_of(source, slot[:, None], head[:, None], places.reshape(by_page)[row, head, run])
    read = at[0].long(), at[1].long()
    pages = target.forward_pages[slot, head, (first[:, 0] // room).long()].long()
    old, new = segments(arena, source.layout), segments(arena, layout)
    flat = read[0].flatten(), read[1].flatten()
    key, value = (
        decode(part).view(*read[0].shape, layout.head_dim)
        for part in _read(old, source.layout, flat)
    )
    made = encode_pages(key, value, form)
    codes = pack(made.key_codes.flatten(0, 1), form.key_bits)
    new.keys[pages] = codes.view(len(pages), room, -1)
    new.key_metadata[pages] = made.key_metadata
    codes = pack(made.value_codes.flatten(0, 1), form.value_bits)
    new.values[pages] = codes.view(len(pages), room, -1)
    new.value_metadata[pages] = made.value_metadata[:, :, None]
    if form.is_balanced:
        new.token_scales[pages] = made.token_scales
        new.channel_scales[pages] = made.channel_scales
    new.scores[pages], new.positions[pages] = _tracked(old, source.layout, read)


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
    Raises:  ConfigError for formats whose decoded numbers may have other codes than before
    """
    check_rounded("round_tokens", layout)
    form = layout.format
    return (
        _rounded(key, form, quantized, of_keys=True),
        _rounded(value, form, quantized, of_keys=False),
    )


def _rounded(vectors: Tensor, form: PageFormat, quantized: Tensor, *, of_keys: bool) -> Tensor:
    exact = vectors.float().clamp(-FP16_MAX, FP16_MAX).half()
    coarse = exact.flatten(0, 1)
    for _ in range(2):
        made = encode_as(form, coarse, of_keys=of_keys)
        coarse = decode(made).clamp(-FP16_MAX, FP16_MAX).half()
    return torch.where(quantized[:, None, None], coarse.view_as(exact), exact).float()


def _slots_of(section: Section, slot: Tensor, head: Tensor, places: Tensor) -> Slots:
    column, row = places // section.layout.tokens, places % section.layout.tokens
    return section.forward_pages[slot, head, column.long()], row


def _recoded(encoded: Encoded, old: PageFormat, new: PageFormat, *, of_keys: bool) -> Encoded:
    """Keys or values of one format in another: copied, ``narrow``, or decoded and encoded again."""
    how = conversion(old, new, of_keys=of_keys)
    if how == COPY:
        return encoded
    if how == NARROW:
        return narrow(
            encoded, *(form.key_bits if of_keys else form.value_bits for form in (old, new))
        )
    return encode_as(new, decode(encoded), of_keys=of_keys)


def _read(
    parts: Segments, layout: PageLayout, at: tuple[Tensor, Tensor]
) -> tuple[Encoded, Encoded]:
    """Keys and values in some slots, before they are decoded."""
    form = layout.format
    of_keys, packed = form.key_segments(layout.head_dim), parts.keys[at]
    keys = unpack_segments(packed, of_keys) if of_keys else unpack(packed, form.key_bits)
    values = unpack(parts.values[at], form.value_bits)
    return (
        Encoded(keys, parts.key_metadata[at], form.key_codec, of_keys),
        Encoded(values, parts.value_metadata[at], form.value_codec),
    )


def load_tokens(
    arena: Tensor, layout: PageLayout, pages: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Decode whole head rows to keys, values and positions, padded to the longest row.

    Padding has keys and values 0 and positions -1. Tokens that are not tracked have position 0.

    Shapes:  arena [P, page_bytes]; pages [R, M]; tokens [R] -> key, value [R, N, d],
             positions [R, N], with N the largest of ``tokens``
    Dtypes:  indices int32; key and value float32; positions int32
    """
    longest = int(tokens.max()) if len(tokens) else 0
    token = torch.arange(longest, device=arena.device)
    live = token < tokens[:, None]
    page = pages.long()[:, token // layout.tokens].where(live, 0).flatten()
    row = (token % layout.tokens).expand_as(live).flatten()
    part = segments(arena, layout)
    if layout.format.codes_whole_pages:
        key, value = _read_from_pages(part, layout, page, row)
    else:
        key, value = map(decode, _read(part, layout, (page, row)))
    positions = _tracked(part, layout, (page, row))[1].view_as(live).where(live, -1)
    shape = (*live.shape, layout.head_dim)
    dead = ~live[..., None]
    return (
        key.view(shape).masked_fill(dead, 0.0),
        value.view(shape).masked_fill(dead, 0.0),
        positions,
    )


def _read_from_pages(
    parts: Segments, layout: PageLayout, page: Tensor, row: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys and values of tokens in pages that are encoded whole, float32 [n, d]."""
    pages, place = cast(
        tuple[Tensor, Tensor],
        page.unique(return_inverse=True),  # pyright: ignore[reportUnknownMemberType]
    )
    form, shape = layout.format, (len(pages), layout.tokens, layout.head_dim)
    ones = parts.scores.new_ones(shape, dtype=torch.float16)
    encoded = EncodedPages(
        unpack(parts.keys[pages].flatten(0, 1), form.key_bits).view(shape),
        parts.key_metadata[pages],
        parts.token_scales[pages] if form.is_balanced else ones[:, :, 0],
        unpack(parts.values[pages].flatten(0, 1), form.value_bits).view(shape),
        parts.value_metadata[pages, :, 0],
        parts.channel_scales[pages] if form.is_balanced else ones[:, 0],
    )
    key, value = decode_pages(encoded)
    return key[place, row.long()], value[place, row.long()]


def _write_keys(arena: Tensor, layout: PageLayout, at: Slots, encoded: Encoded) -> None:
    into = segments(arena, layout)
    if encoded.segments:
        into.keys[at] = pack_segments(encoded.codes, encoded.segments)
    else:
        into.keys[at] = pack(encoded.codes, layout.format.key_bits)
    into.key_metadata[at] = encoded.metadata


def _write_values(arena: Tensor, layout: PageLayout, at: Slots, encoded: Encoded) -> None:
    into = segments(arena, layout)
    into.values[at] = pack(encoded.codes, layout.format.value_bits)
    into.value_metadata[at] = encoded.metadata
