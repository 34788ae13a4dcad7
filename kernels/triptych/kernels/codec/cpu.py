"""The codec ops on the CPU: checks and addresses; ``codec_numba`` has the compiled loops."""

from functools import cache
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import Codec, PageLayout
from triptych.kernels.codec import codec_numba
from triptych.kernels.codec.codec_numba import UNTRACKED
from triptych.kernels.codec.quantizer import conversion
from triptych.kernels.codec.vectors import BY_CHANNEL, BY_NORM, FLOAT8, POLAR, RANGE, SEGMENTS
from triptych.kernels.codegen.jobs import Job
from triptych.kernels.codegen.numba_runtime import team_address, team_threads
from triptych.kernels.floats import KINDS
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

VALUE_KINDS: dict[Codec, int] = {
    "range": RANGE,
    "float": FLOAT8,
    "by_channel": RANGE,
    "balanced": RANGE,
    "by_norm": BY_NORM,
}
KEY_KINDS: dict[Codec, int] = {
    **VALUE_KINDS,
    "by_channel": BY_CHANNEL,
    "balanced": BY_CHANNEL,
    "by_norm": SEGMENTS,
    "polar": POLAR,
}
"""What codes of values and of keys are to compiled code, by their codec."""


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
    """See ``reference.store_tokens``."""
    check_arena(arena, layout)
    check_written_alone("store_tokens", layout)
    check_indices(pages, rows, positions)
    if key.dtype not in (torch.float32, torch.bfloat16) or value.dtype != key.dtype:
        raise ConfigError(f"store_tokens: key {key.dtype}, value {value.dtype}: unsupported")
    key, value = _dense(key), _dense(value)
    pages, rows, positions = pages.contiguous(), rows.contiguous(), positions.contiguous()
    scores = None if scores is None else scores.float().contiguous()
    job = _job(
        arena,
        key.shape[2],
        pages.numel(),
        *form_words(layout),
        key.data_ptr(),
        value.data_ptr(),
        KINDS[key.dtype],
        key.shape[1],
        *key.stride()[:2],
        *value.stride()[:2],
        positions.data_ptr(),
        0 if scores is None else scores.data_ptr(),
        pages.data_ptr(),
        rows.data_ptr(),
    )
    _run(job, codec_numba.store.address, "store_tokens")


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
    """See ``reference.append_tokens``."""
    if mirror is not None:
        append_tokens(mirror, section, key, value, slots, places, positions)
    append_job(arena, section, key, value, slots, places, positions).run()


def append_job(
    arena: Tensor,
    section: Section,
    key: Tensor,
    value: Tensor,
    slots: Tensor,
    places: Tensor,
    positions: Tensor,
) -> Job:
    """The job of ``append_tokens``; it keeps dense arguments."""
    check_written_alone("append_tokens", section.layout)
    pages, table = section.call_cache.get(
        lambda: _append_words(arena, section), arena, append_tokens
    )
    rows, heads = check_append(section, key, value, slots, places, positions)
    if key.dtype not in (torch.float32, torch.bfloat16) or value.dtype != key.dtype:
        raise ConfigError(f"append_tokens: key {key.dtype}, value {value.dtype}: unsupported")
    key, value = _dense(key), _dense(value)
    slots, places, positions = slots.contiguous(), places.contiguous(), positions.contiguous()
    words = _packed(
        0,
        0,
        rows * heads,
        *pages,
        key.data_ptr(),
        value.data_ptr(),
        KINDS[key.dtype],
        heads,
        *key.stride()[:2],
        *value.stride()[:2],
        positions.data_ptr(),
        0,
        *table,
        slots.data_ptr(),
        places.data_ptr(),
    )
    kept = arena, section, key, value, slots, places, positions
    start, body = codec_numba.start_append.address, codec_numba.append.address
    return Job("append_tokens", start, words, body, kept, OUT_OF_RANGE)


def transcode(
    arena: Tensor,
    source_layout: PageLayout,
    target_layout: PageLayout,
    source_pages: Tensor,
    source_rows: Tensor,
    target_pages: Tensor,
    target_rows: Tensor,
) -> None:
    """See ``reference.transcode``."""
    check_arena(arena, source_layout)
    check_arena(arena, target_layout)
    check_written_alone("transcode", source_layout, target_layout)
    indices = [item.contiguous() for item in (source_pages, source_rows, target_pages, target_rows)]
    check_indices(*indices)
    job = _job(
        arena,
        source_layout.head_dim,
        indices[0].numel(),
        *conversion_words(source_layout, target_layout),
        *(item.data_ptr() for item in indices),
    )
    _run(job, codec_numba.transcode.address, "transcode")


def move_tokens(
    arena: Tensor,
    source: Section,
    target: Section,
    slots: Tensor,
    places: Tensor,
    target_places: Tensor,
) -> None:
    """See ``reference.move_tokens``."""
    words = source.call_cache.get(lambda: _move_words(arena, source, target), arena, target)
    check_moves(source, target, slots, places, target_places)
    slots, places, target_places = slots.contiguous(), _dense(places), _dense(target_places)
    rows, heads, most = target_places.shape
    is_whole = target.layout.format.codes_whole_pages
    if is_whole:
        check_written_alone("move_tokens", source.layout)
        check_whole_pages(target.layout, most)
        run, at_once = target.layout.tokens, 1
    else:
        run = max(1, min(most, codec_numba.CHUNK))
        at_once = codec_numba.CHUNK // run
    runs = -(-most // run)
    job = _job(
        arena,
        source.layout.head_dim,
        rows * heads * runs,
        *words,
        slots.data_ptr(),
        heads,
        most,
        run,
        runs,
        at_once,
        places.data_ptr(),
        *places.stride()[:2],
        target_places.data_ptr(),
        *target_places.stride()[:2],
    )
    body = codec_numba.move_pages if is_whole else codec_numba.move
    _run(job, body.address, "move_tokens", alone=at_once)


def load_tokens(
    arena: Tensor, layout: PageLayout, pages: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.load_tokens``."""
    check_arena(arena, layout)
    check_indices(pages, tokens)
    pages, tokens = pages.contiguous(), tokens.contiguous()
    longest = int(tokens.max()) if len(tokens) else 0
    shape = (len(tokens), longest)
    key, value = (torch.empty(*shape, layout.head_dim) for _ in range(2))
    positions = torch.empty(shape, dtype=torch.int32)
    job = _job(
        arena,
        layout.head_dim,
        positions.numel(),
        *form_words(layout),
        pages.data_ptr(),
        pages.stride(0),
        pages.shape[1],
        tokens.data_ptr(),
        longest,
        key.data_ptr(),
        value.data_ptr(),
        positions.data_ptr(),
    )
    _run(job, codec_numba.load.address, "load_tokens")
    return key, value, positions


def round_tokens(
    layout: PageLayout, key: Tensor, value: Tensor, quantized: Tensor
) -> tuple[Tensor, Tensor]:
    """See ``reference.round_tokens``."""
    check_rounded("round_tokens", layout)
    if key.dtype not in KINDS or value.dtype != key.dtype:
        raise ConfigError(f"round_tokens: key {key.dtype}, value {value.dtype}: unsupported")
    key, value, form = _dense(key), _dense(value), layout.format
    quantized = quantized.to(torch.uint8).contiguous()
    tokens, heads, dim = key.shape
    out = torch.empty(tokens, heads, dim), torch.empty(tokens, heads, dim)
    job = _packed(
        0,
        0,
        tokens * heads,
        dim,
        KINDS[key.dtype],
        heads,
        key.data_ptr(),
        value.data_ptr(),
        *key.stride()[:2],
        *value.stride()[:2],
        quantized.data_ptr(),
        form.key_bits,
        form.key_groups,
        form.value_bits,
        form.value_groups,
        int(form.has_float_codes),
        out[0].data_ptr(),
        out[1].data_ptr(),
    )
    _run(job, codec_numba.round_trip.address, "round_tokens")
    return out


@cache
def form_words(layout: PageLayout) -> tuple[int, ...]:
    """A layout as the words of ``codec_numba.Form``."""
    form, offsets = layout.format, layout.offsets
    key_bytes, _, value_bytes, _, _, _ = form.segment_token_bytes(layout.head_dim)
    key_strides = (layout.tokens, 1) if layout.is_channel_major else (1, key_bytes)
    groups = 0 if form.key_widths else form.key_groups
    scales = (layout.token_scales, layout.channel_scales) if form.is_balanced else (0, 0)
    limited = form.limited_numbers(layout.head_dim)
    keys = (
        offsets[0], *key_strides, offsets[1], form.key_bits, groups,
        KEY_KINDS[form.key_codec], scales[0], limited[0], form.width_digits, layout.tokens,
    )  # fmt: skip
    values = (
        offsets[2], 1, value_bytes, offsets[3], form.value_bits, form.value_groups,
        VALUE_KINDS[form.value_codec], scales[1], limited[1], 0, layout.tokens,
    )  # fmt: skip
    page = layout.size_bytes, layout.parts
    tracked = offsets[4:] if layout.is_tracked else (UNTRACKED, UNTRACKED)
    return (layout.tokens, *tracked, *page, *_coded(*keys), *_coded(*values))


@cache
def conversion_words(source: PageLayout, target: PageLayout) -> tuple[int, ...]:
    """Source and target layout, and the conversion of keys and of values."""
    old, new = source.format, target.format
    conversions = (conversion(old, new, of_keys=of_keys) for of_keys in (True, False))
    return (*form_words(source), *form_words(target), *conversions)


Words = tuple[int, ...]


def _append_words(arena: Tensor, section: Section) -> tuple[Words, Words]:
    """The words of pages and of the page table in a job of ``append_tokens``."""
    layout = section.layout
    check_arena(arena, layout)
    shared = arena.data_ptr(), arena.shape[0], layout.head_dim
    return (*shared, *form_words(layout)), _table_words(section)


def _move_words(arena: Tensor, source: Section, target: Section) -> tuple[int, ...]:
    """The words of layouts and page tables in a job of ``move_tokens``."""
    for section in (source, target):
        check_arena(arena, section.layout)
    conversions = conversion_words(source.layout, target.layout)
    return (*conversions, *_table_words(source), *_table_words(target))


def _table_words(section: Section) -> tuple[int, ...]:
    """A page table as the words that ``codec_numba._page_in`` reads."""
    pages = section.pages
    slot, head, entry = pages.stride()
    slots, _, width = pages.shape
    if not section.backward:
        return (pages.data_ptr(), slot, head, entry, slots, width)
    return (pages.data_ptr() + 4 * entry * (width - 1), slot, head, -entry, slots, width)


def _coded(*part: int) -> tuple[int, ...]:
    """The words of a part; 16-bit parts have no metadata groups."""
    return (*part[:5], *(0 for _ in part[5:])) if part[4] == 16 else part


def _dense(vectors: Tensor) -> Tensor:
    return vectors if vectors.stride(2) == 1 else vectors.contiguous()


def _job(arena: Tensor, head_dim: int, items: int, *words: int) -> np.ndarray:
    return _packed(0, 0, items, arena.data_ptr(), arena.shape[0], head_dim, *words)


def _packed(*words: int) -> np.ndarray:
    """The words of a job as an array; ``np.array`` of ints takes as long as storing some tokens."""
    job = np.empty(len(words), np.int64)
    _struct(len(words)).pack_into(job.data, 0, *words)
    return job


@cache
def _struct(words: int) -> Struct:
    return Struct(f"{words}q")


def _run(job: np.ndarray, body: int, name: str, alone: int = codec_numba.CHUNK) -> None:
    if not codec_numba.run(job, team_address(), body, team_threads(), alone):
        raise ConfigError(f"{name}: {OUT_OF_RANGE}")


OUT_OF_RANGE = "an index is of a page or a row that the arena does not have"
