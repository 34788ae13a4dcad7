# pyright: reportUnknownVariableType=false
# The arguments of kernels have no types.
"""The codec ops on the GPU: same bytes as the reference, one program per block of slots."""

from dataclasses import replace

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, Codec, PageLayout
from triptych.kernels.codec.gpu_pages import encode_pages
from triptych.kernels.codec.gpu_slots import (
    append_slots,
    load_slots,
    move_slots,
    store_slots,
    transcode_slots,
)
from triptych.kernels.codec.page_codecs import NORMALIZATIONS
from triptych.kernels.pages import (
    Section,
    check_append,
    check_arena,
    check_indices,
    check_moves,
    check_rounded,
    check_whole_pages,
    check_written_alone,
)
from triptych.kernels.triton.launch import (
    VECTOR_TYPES,
    Argument,
    Launch,
    check_device,
    dense,
    power_of_two,
)
from triptych.kernels.triton.triton_layout import form_of

COPY, NARROW, REQUANTIZE = range(3)
BLOCK_NUMBERS = 4096
"""Numbers that a program keeps in registers."""


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
    """See ``reference.store_tokens``.

    A token with an index out of range is skipped: an error would make the host wait.
    """
    for launch in plan_store(arena, layout, key, value, pages, rows, positions, scores):
        launch.run()


def plan_store(
    arena: Tensor,
    layout: PageLayout,
    key: Tensor,
    value: Tensor,
    pages: Tensor,
    rows: Tensor,
    positions: Tensor,
    scores: Tensor | None,
) -> list[Launch]:
    """The launch of one call."""
    check_arena(arena, layout)
    check_written_alone("store_tokens", layout)
    check_indices(pages, rows, positions)
    check_device("store_tokens", arena, key, value, pages, rows, positions, scores)
    if key.dtype not in VECTOR_TYPES or value.dtype != key.dtype:
        raise ConfigError(f"store_tokens: key {key.dtype}, value {value.dtype}: unsupported")
    key, value = dense(key), dense(value)
    scores = None if scores is None else scores.float().contiguous()
    items, block = pages.numel(), _block(layout.head_dim)
    arguments = (
        arena, arena.shape[0], key, value, pages.contiguous(), rows.contiguous(),
        positions.contiguous(), scores, items, *key.stride()[:2], *value.stride()[:2],
    )  # fmt: skip
    constants = {"FORM": form_of(layout), "BLOCK": block, "KV_HEADS": key.shape[1]}
    return [Launch(store_slots, (-(-items // block),), arguments, constants)]


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
    """See ``reference.append_tokens``; a token with a place out of range is skipped."""
    for launch in plan_append(arena, section, key, value, slots, places, positions, mirror):
        launch.run()


def plan_append(
    arena: Tensor,
    section: Section,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    places: Tensor,
    positions: Tensor,
    mirror: Tensor | None = None,
) -> list[Launch]:
    """The launch of one call."""
    check_arena(arena, section.layout)
    check_written_alone("append_tokens", section.layout)
    rows, heads = check_append(section, key, value, slots, places, positions)
    check_device("append_tokens", arena, section.pages, key, value, slots, places, positions)
    if mirror is not None:
        check_arena(mirror, section.layout)
        check_device("append_tokens", arena, mirror)
        if mirror.shape != arena.shape:
            raise ConfigError(
                f"append_tokens: mirror {tuple(mirror.shape)}: expected {tuple(arena.shape)}"
            )
    if key.dtype not in VECTOR_TYPES or value.dtype != key.dtype:
        raise ConfigError(f"append_tokens: key {key.dtype}, value {value.dtype}: unsupported")
    key, value = dense(key), dense(value)
    items, block = rows * heads, _block(section.layout.head_dim)
    arguments = (
        arena, mirror, arena.shape[0], key, value, slots.contiguous(), places.contiguous(),
        positions.contiguous(), items, _table(section), *key.stride()[:2], *value.stride()[:2],
    )  # fmt: skip
    constants = {
        "FORM": form_of(section.layout),
        "BACKWARD": section.backward,
        "BLOCK": block,
        "KV_HEADS": heads,
    }
    grid = -(-items // block), 1 if mirror is None else 2
    return [Launch(append_slots, grid, arguments, constants)]


def transcode(
    arena: Tensor,
    source_layout: PageLayout,
    target_layout: PageLayout,
    source_pages: Tensor,
    source_rows: Tensor,
    target_pages: Tensor,
    target_rows: Tensor,
) -> None:
    """See ``reference.transcode``; a token with an index out of range is skipped."""
    indices = (source_pages, source_rows, target_pages, target_rows)
    for launch in plan_transcode(arena, source_layout, target_layout, *indices):
        launch.run()


def round_tokens(
    layout: PageLayout, key: Tensor, value: Tensor, quantized: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.round_tokens``: a round trip through pages of its own, by the same kernels.

    So the bits are those that pages give back, however the compiler contracts products and sums.
    """
    check_rounded("round_tokens", layout)
    raw = replace(layout, format=FORMATS["fp16"])
    tokens, heads, _ = key.shape
    items = tokens * heads
    every = torch.arange(items, dtype=torch.int32, device=key.device)
    exact = every // raw.tokens, every % raw.tokens
    first = raw.pages(items)
    arena = torch.empty(
        first + layout.pages(items), layout.page_bytes, dtype=torch.uint8, device=key.device
    )
    wanted = quantized.repeat_interleave(heads)
    coarse = (first + every // layout.tokens).masked_fill(~wanted, -1), every % layout.tokens
    shape = tokens, heads
    store_tokens(arena, raw, key, value, exact[0].view(shape), exact[1].view(shape), every[:tokens])
    for _ in range(2):
        transcode(arena, raw, layout, *exact, *coarse)
        transcode(arena, layout, raw, *coarse, *exact)
    pages = torch.arange(first, dtype=torch.int32, device=key.device)[None]
    count = torch.full((1,), items, dtype=torch.int32, device=key.device)
    out = torch.empty(2, 1, items, layout.head_dim, device=key.device)
    positions = torch.empty(1, items, dtype=torch.int32, device=key.device)
    for launch in plan_load(arena, raw, pages, count, out[0], out[1], positions):
        launch.run()
    return out[0].view(key.shape), out[1].view(value.shape)


def plan_transcode(
    arena: Tensor, source_layout: PageLayout, target_layout: PageLayout, *indices: Tensor
) -> list[Launch]:
    """The launch of one call."""
    check_arena(arena, source_layout)
    check_arena(arena, target_layout)
    check_written_alone("transcode", source_layout, target_layout)
    check_indices(*indices)
    check_device("transcode", arena, *indices)
    block, count = _block(source_layout.head_dim), indices[0].numel()
    arguments = (arena, arena.shape[0], *(item.contiguous() for item in indices), count)
    constants = _conversions(source_layout, target_layout) | {"BLOCK": block}
    return [Launch(transcode_slots, (-(-count // block),), arguments, constants)]


def move_tokens(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> None:
    """See ``reference.move_tokens``; a token with a place out of range is not moved."""
    for launch in plan_moves(arena, source, target, slots, places, target_places):
        launch.run()


def plan_moves(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> list[Launch]:
    """The launch of one call."""
    for section in (source, target):
        check_arena(arena, section.layout)
    check_moves(source, target, slots, places, target_places)
    check_device("move_tokens", arena, source.pages, target.pages, slots, places, target_places)
    places, target_places = dense(places), dense(target_places)
    _, heads, most = target_places.shape
    check_written_alone("move_tokens", source.layout)
    if target.layout.format.codes_whole_pages:
        return [_plan_pages(arena, source, target, slots, places, target_places)]
    block, count = _block(source.layout.head_dim), target_places.numel()
    arguments = (
        arena, arena.shape[0], slots.contiguous(), places, *places.stride()[:2], target_places,
        *target_places.stride()[:2], most, heads, count, _table(source), _table(target),
    )  # fmt: skip
    constants = _conversions(source.layout, target.layout) | {
        "SOURCE_BACKWARD": source.backward,
        "TARGET_BACKWARD": target.backward,
        "BLOCK": block,
    }
    return [Launch(move_slots, (-(-count // block),), arguments, constants)]


def _plan_pages(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> Launch:
    """The launch of a move into pages that are encoded whole: a program encodes a page.

    A page whose places are out of range or not in order is not written.
    """
    layout = target.layout
    rows, heads, most = target_places.shape
    check_whole_pages(layout, most)
    arguments = (
        arena, arena.shape[0], slots.contiguous(), places, *places.stride()[:2], target_places,
        *target_places.stride()[:2], _table(source), _table(target),
    )  # fmt: skip
    constants = {
        "SOURCE": form_of(source.layout),
        "TARGET": form_of(layout),
        "SOURCE_BACKWARD": source.backward,
        "TARGET_BACKWARD": target.backward,
        "NORMALIZATIONS": NORMALIZATIONS if layout.format.is_balanced else 0,
    }
    return Launch(encode_pages, (most // layout.tokens, heads, rows), arguments, constants)


def _table(section: Section) -> tuple[Argument, ...]:
    pages = section.pages
    return (pages, pages.shape[0], pages.shape[2], *pages.stride())


def _conversions(source: PageLayout, target: PageLayout) -> dict[str, object]:
    """Constants of source and target layout, and of the conversion of keys and of values."""
    old, new = source.format, target.format
    return {
        "SOURCE": form_of(source),
        "TARGET": form_of(target),
        "KEY_CONVERSION": _conversion(
            (old.key_bits, old.key_codec), (new.key_bits, new.key_codec), new.is_clipped
        ),
        "VALUE_CONVERSION": _conversion(
            (old.value_bits, old.value_codec), (new.value_bits, new.value_codec), new.is_clipped
        ),
    }


def load_tokens(
    arena: Tensor, layout: PageLayout, pages: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.load_tokens``. The shape of the result makes the host wait for ``tokens``.

    Where a page id is out of range, keys and values are NaN.
    """
    longest = int(tokens.max()) if len(tokens) else 0
    shape = (len(tokens), longest)
    key, value = torch.empty(2, *shape, layout.head_dim, device=arena.device)
    positions = torch.empty(shape, dtype=torch.int32, device=arena.device)
    for launch in plan_load(arena, layout, pages, tokens, key, value, positions):
        launch.run()
    return key, value, positions


def plan_load(
    arena: Tensor,
    layout: PageLayout,
    pages: Tensor,
    tokens: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
) -> list[Launch]:
    """The launch of one call; it writes to ``key``, ``value`` and ``positions``."""
    check_arena(arena, layout)
    check_indices(pages, tokens)
    check_device("load_tokens", arena, pages, tokens)
    block, (rows, longest) = _block(layout.head_dim), positions.shape
    arguments = (
        arena, arena.shape[0], pages, pages.shape[1], *pages.stride(), tokens.contiguous(), longest,
        key, value, positions,
    )  # fmt: skip
    constants = {"FORM": form_of(layout), "BLOCK": block}
    return [Launch(load_slots, (rows, -(-longest // block)), arguments, constants)]


def _block(dim: int) -> int:
    return max(8, BLOCK_NUMBERS // power_of_two(dim))


def _conversion(source: tuple[int, Codec], target: tuple[int, Codec], is_clipped: bool) -> int:
    """The conversion of vectors; ``source``, ``target``: bits and codec."""
    (bits, codec), (to_bits, to_codec) = source, target
    if bits == to_bits == 16:
        return COPY
    if codec != to_codec:
        return REQUANTIZE
    if bits == to_bits:
        return COPY
    return NARROW if to_bits < bits < 16 and not is_clipped else REQUANTIZE
