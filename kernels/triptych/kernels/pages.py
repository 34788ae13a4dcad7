"""Typed views of the pages of an arena, page tables of a batch, and checks of both."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import METADATA_BYTES, PageLayout
from triptych.kernels.codegen.call_cache import CallCache


@dataclass(frozen=True, slots=True, eq=False)
class Section:
    """The pages of one format of a batch of requests: page table and token counts.

    A request has several sections, for example high, low and recent. Their order is arbitrary,
    since attention does not depend on the order of the keys.
    """

    layout: PageLayout
    pages: Tensor
    """int32 [S, KH, M], any strides: page ids of each slot and KV head, oldest first."""
    tokens: Tensor
    """int32 [S, KH]: tokens stored; only ``ceil(tokens / layout.tokens)`` ids are read."""
    backward: bool = False
    """Whether the first id is in the last column and the others follow to the left.

    Two sections can share one table, one from each side (DiffKV's bidirectional page table).
    """
    call_cache: CallCache = field(default_factory=CallCache, init=False, repr=False)

    @property
    def forward_pages(self) -> Tensor:
        """``pages`` with the oldest id in the first column; a copy if ``backward``."""
        return self.pages.flip(-1) if self.backward else self.pages


@dataclass(frozen=True, slots=True)
class Past:
    """Keys and values of earlier tokens, in pages: earlier chunks or a cached prefix."""

    arena: Tensor
    """uint8 [P, page_bytes]."""
    layout: PageLayout
    pages: Tensor
    """int32 [B, KH, M]."""
    tokens: Tensor
    """int32 [B, KH]."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Views of the six segments of all pages of an arena; they share its memory."""

    keys: Tensor
    """[P, T, bytes] for either key order; float16 [P, T, d] for 16-bit formats."""
    key_metadata: Tensor
    """float16 [P, T, groups, 2]: scale and zero; no groups for 16-bit formats. float16 [P, d, 2],
    by channel, if pages are encoded whole."""
    token_scales: Tensor
    """float16 [P, T], of keys; [P, 0] unless the format is balanced."""
    values: Tensor
    value_metadata: Tensor
    channel_scales: Tensor
    """float16 [P, d], of values; [P, 0] unless the format is balanced."""
    scores: Tensor
    """float32 [P, T]: scores, or logit biases if the layout has them; [P, 0] if tokens are not
    tracked."""
    positions: Tensor
    """int32 [P, T]; [P, 0] if tokens are not tracked."""


def segments(arena: Tensor, layout: PageLayout) -> Segments:
    """Views of the segments of an arena, with ``layout`` for all pages.

    Small pages are numbered over the whole arena, so P is then ``layout.parts`` times its pages.

    Shapes:  arena uint8 [pages, page_bytes], contiguous
    Raises:  ConfigError if the arena's pages have another size
    """
    check_arena(arena, layout)
    if layout.parts > 1:
        arena = arena.view(-1, layout.size_bytes)
    form, count, dim = layout.format, layout.tokens, layout.head_dim
    sizes = [count * size for size in form.segment_token_bytes(dim)]
    if not layout.is_tracked:
        sizes[4:] = 0, 0
    if form.codes_whole_pages:
        sizes[1] = METADATA_BYTES * dim
    parts = [
        arena[:, start : start + size] for start, size in zip(layout.offsets, sizes, strict=True)
    ]
    groups = (form.key_groups, form.value_groups) if form.is_quantized else (0, 0)
    key_shape = (dim, 2) if form.codes_whole_pages else (count, groups[0], 2)
    scales = [
        arena[:, start : start + 2 * size * form.is_balanced].view(torch.float16)
        for start, size in ((layout.token_scales, count), (layout.channel_scales, dim))
    ]
    return Segments(
        keys=_tokens_first(parts[0], layout),
        key_metadata=_split(parts[1].view(torch.float16), *key_shape),
        token_scales=scales[0],
        values=_split(_coded(parts[2], form.value_bits), count, -1),
        value_metadata=_split(parts[3].view(torch.float16), count, groups[1], 2),
        channel_scales=scales[1],
        scores=parts[4].view(torch.float32),
        positions=parts[5].view(torch.int32),
    )


def check_arena(arena: Tensor, layout: PageLayout) -> None:
    """Raise ``ConfigError`` unless ``arena`` is contiguous uint8 with pages of ``layout``."""
    if arena.dtype != torch.uint8 or not arena.is_contiguous() or arena.dim() != 2:
        raise ConfigError(f"arena {tuple(arena.shape)} {arena.dtype}: expected uint8 [P, bytes]")
    check_page_bytes(arena.shape[1], layout)


def check_window(sections: Sequence[Section], window: int) -> None:
    """Raise ``ConfigError`` if a sliding window needs positions that pages do not have."""
    untracked = [section.layout for section in sections if not section.layout.is_tracked]
    if window > 0 and untracked:
        raise ConfigError(
            f"a window of {window} tokens with pages of {untracked[0].format.name} that have no "
            "positions: expected pages whose tokens are tracked"
        )


def check_page_bytes(page_bytes: int, layout: PageLayout) -> None:
    """Raise ``ConfigError`` unless pages of ``layout`` have ``page_bytes`` bytes."""
    if page_bytes != layout.page_bytes:
        raise ConfigError(
            f"pages of the arena have {page_bytes} bytes, those of the layout {layout.page_bytes}"
        )


def _tokens_first(part: Tensor, layout: PageLayout) -> Tensor:
    part = _coded(part, layout.format.key_bits)
    if layout.is_channel_major:
        return _split(part, -1, layout.tokens).transpose(1, 2)
    return _split(part, layout.tokens, -1)


def _split(part: Tensor, *sizes: int) -> Tensor:
    """``part`` [P, n] as [P, *sizes]."""
    return part.view(part.shape[0], *sizes)


def _coded(part: Tensor, bits: int) -> Tensor:
    return part.view(torch.float16) if bits == 16 else part


def check_append(
    section: Section, key: Tensor, value: Tensor, slots: Tensor, places: Tensor, positions: Tensor
) -> tuple[int, int]:
    """Check the arguments of ``append_tokens``; returns the number of rows and of KV heads.

    Raises:  ConfigError if the shapes do not match
    """
    check_indices(section.pages, slots, places, positions)
    rows, heads, dim = shape = key.shape
    if (
        value.shape != shape
        or not slots.shape == places.shape == positions.shape == (rows,)
        or (heads, dim) != (section.pages.shape[1], section.layout.head_dim)
    ):
        raise ConfigError(
            f"key {tuple(shape)}, value {tuple(value.shape)}, slots {tuple(slots.shape)}, places "
            f"{tuple(places.shape)}, positions {tuple(positions.shape)}: expected [R, KH, d] twice "
            f"and [R], with {section.pages.shape[1]} KV heads of {section.layout.head_dim}"
        )
    return rows, heads


def check_moves(
    source: Section, target: Section, slots: Tensor, places: Tensor, target_places: Tensor
) -> None:
    """Raise ``ConfigError`` unless the arguments of ``move_tokens`` have matching shapes."""
    check_indices(source.pages, target.pages, slots, places, target_places)
    rows, heads, _ = shape = target_places.shape
    kv_heads = {section.pages.shape[1] for section in (source, target)}
    if places.shape != shape or slots.shape != (rows,) or kv_heads != {heads}:
        raise ConfigError(
            f"slots {tuple(slots.shape)}, places {tuple(places.shape)} and {tuple(shape)}, "
            f"{sorted(kv_heads)} KV heads: expected [R], and [R, KH, T] twice"
        )


def check_written_alone(name: str, *layouts: PageLayout) -> None:
    """Raise ``ConfigError`` for formats in which no token of a page can be written alone."""
    for layout in layouts:
        if layout.format.codes_whole_pages:
            raise ConfigError(
                f"{name}: pages of {layout.format.name} are encoded whole, {layout.tokens} tokens "
                "at a time: use move_tokens from pages of another format"
            )


def check_rounded(name: str, layout: PageLayout) -> None:
    """Raise ``ConfigError`` for formats whose decoded numbers may change when encoded again."""
    check_written_alone(name, layout)
    if not layout.format.repeats_codes:
        why = "limits the largest numbers of a vector"
        if layout.format.has_polar_keys:
            why = "has steps of the largest radius of a key, which decoding changes"
        raise ConfigError(
            f"{name}: {layout.format.name} {why}: expected a format that gives encoded numbers "
            "back, such as k8v4"
        )


def check_whole_pages(layout: PageLayout, tokens: int) -> None:
    """Raise ``ConfigError`` unless ``tokens`` tokens of a head row are whole pages of a format."""
    if tokens % layout.tokens:
        raise ConfigError(
            f"move_tokens: {tokens} tokens to {layout.format.name} pages: expected a multiple of "
            f"{layout.tokens}, since pages are encoded whole"
        )


def check_indices(*tensors: Tensor) -> None:
    """Raise ``ConfigError`` unless page ids, rows, counts and positions are int32."""
    for tensor in tensors:
        if tensor.dtype != torch.int32:
            raise ConfigError(f"indices {tuple(tensor.shape)} {tensor.dtype}: expected int32")
