"""Page layouts as compile-time constants of Triton kernels, and arguments of page tables."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.kernels.codec.quantizer import step_share
from triptych.kernels.page_lists import PageLists
from triptych.kernels.pages import Section
from triptych.kernels.triton.launch import Argument, has_asm, is_for_amd, power_of_two

MIN_DOT = 16
"""Smallest width of a tile for tensor cores."""
MIN_BYTES = 32
"""Fewest bytes that tensor cores add up at a time."""
LISTED_AT_ONCE = 1024
"""Most entries of a page list that a program reads at a time."""
MOST_AT_ONCE = 2048
"""Most numbers of a tile of several rows."""
WIDE_DIM = 256
"""Channels of a head above which a program has few tokens and query heads at a time, in
``WIDE_WARPS`` warps."""
WIDE_WARPS = 8


@dataclass(frozen=True)
class Form:
    """The layout of keys, values and metadata in a page; offsets in bytes.

    A packed byte holds ``8 / bits`` channels, one in each of that many *parts* of a vector:
    kernels keep a tile for each part, so that unpacking needs no shuffle.
    """

    page_bytes: int
    parts: int
    """Pages of this layout in one page of the arena."""
    tokens: int
    dim: int
    parts_of_key: int
    """Parts of a key, each of ``key_units`` channels, or of those of ``key_parts``."""
    parts_of_value: int
    key_bits: int
    key_units: int
    """Units of a key: packed bytes, or fp16 numbers; equals the channels of one part. Of a key with
    segments the most bytes of one."""
    key_tile: int
    """The smallest power of two that is at least ``key_units`` and ``MIN_DOT``."""
    key_stride: int
    """From one token to the next, in units."""
    key_unit_stride: int
    """From one unit to the next, in units."""
    key_bytes: int
    """Units of a key as it is stored, with all segments."""
    key_widths: int
    """A digit for each segment of a key, to the base 256: bits, and 16 times the sixteenths of the
    channels that it has, the first one lowest; 0: all channels have the same bits."""
    key_metadata: int
    value_bits: int
    value_units: int
    value_tile: int
    values: int
    value_metadata: int
    is_float: bool
    """Whether codes are float8 numbers."""
    is_polar: bool
    """Whether a byte of a key is radius and angle of a pair of channels."""
    by_channel: bool
    """Whether keys have a scale and a zero for each channel of a page."""
    is_balanced: bool
    """Whether keys also have a scale for each token, and values one for each channel."""
    token_scales: int
    channel_scales: int
    key_limited: int
    """How many of the largest magnitudes of a key become the next one."""
    value_limited: int
    by_norm: bool
    """Whether codes are steps by the norm of a vector or segment."""
    scores: int
    has_bias: bool
    """Whether logit biases are in the place of scores."""
    positions: int
    is_tracked: bool
    """Whether tokens have scores, or biases, and positions."""
    page_tile: int
    """The smallest power of two that is at least ``tokens`` and ``MIN_DOT``."""
    read_tile: int
    """Tokens of a page that decode attention reads at a time."""
    by_tile: bool
    """Whether decode attention reads tiles of tokens of several pages, since a page has few."""
    has_asm: bool
    """Whether kernels may use the assembly of NVIDIA's GPUs."""
    slices: int
    """See ``slices_of``."""

    @property
    def has_byte_keys(self) -> bool:
        """Whether decode multiplies codes of keys as bytes: integers with a scale for each token.

        Tensor cores multiply 32 of them at a time.
        """
        has_integers = not (self.is_float or self.is_polar or self.by_norm)
        is_whole = not (self.by_channel or self.by_tile)
        return has_integers and is_whole and self.key_tile >= MIN_BYTES

    @property
    def key_segments(self) -> tuple[tuple[int, int, int, int, int, float], ...]:
        """Bits, first channel, bytes, first byte and first part of each segment of a key, and the
        step of its codes as a share of its norm."""
        found = list[tuple[int, int, int, int, int, float]]()
        channel, byte, part, left = 0, 0, 0, self.key_widths
        while left:
            bits, channels = left % 16, left // 16 % 16 * self.dim // 16
            units = channels * bits // 8
            found.append((bits, channel, units, byte, part, step_share(bits, channels)))
            channel, byte, part = channel + channels, byte + units, part + 8 // bits
            left >>= 8
        return tuple(found)

    @property
    def key_parts(self) -> tuple[tuple[int, int], ...]:
        """First channel and channels of each part of a key."""
        if not self.key_widths:
            units = self.key_units
            return tuple((share * units, units) for share in range(self.parts_of_key))
        return tuple(
            (channel + share * units, units)
            for bits, channel, units, *_ in self.key_segments
            for share in range(8 // bits)
        )

    @property
    def value_step(self) -> float:
        """The step of codes of values as a share of their norm."""
        return step_share(self.value_bits, self.dim)

    @property
    def key_alignment(self) -> int:
        """Bytes, at most 16, of which the address of each 16-bit key is a multiple.

        Arenas begin at a multiple of 16 bytes, and such keys lie token by token.
        """
        return math.gcd(16, self.page_bytes, 2 * self.key_stride)

    @property
    def name(self) -> str:
        """The page format, as far as codes show it, and whether pages are small.

        Not a field, since compilers put those into symbols.
        """
        bits = f"k{self.key_bits}v{self.value_bits}"
        kinds = {
            "fp8": self.is_float,
            "kvarn": self.is_balanced,
            "kivi": self.by_channel,
            "block_gtq": self.by_norm,
        }
        plain = "fp16" if self.key_bits == 16 else bits
        plain = f"polar {plain}" if self.is_polar else plain
        name = next((kind for kind, holds in kinds.items() if holds), plain)
        return f"{name} small" if self.parts > 1 else name

    def __repr__(self) -> str:
        """A name that is a valid identifier, since compilers put it into symbols."""
        return "form_" + "_".join(str(int(getattr(self, item.name))) for item in fields(self))

    __str__ = __repr__


def slices_of(dim: int) -> int:
    """Slices of the channels of vectors whose products warps of a program add up, one each.

    1: each warp multiplies whole vectors. On AMD's GPUs the products of 16 tokens with 16 queries
    are one tile of a matrix instruction, which all warps would compute, each with both operands
    whole in its registers: twice 128 registers of 256 for wide heads.
    """
    return WIDE_WARPS if is_for_amd() and dim > WIDE_DIM else 1


def form_of(layout: PageLayout) -> Form:
    """The ``Form`` of a page layout.

    Raises:  ConfigError if a vector has several quantization groups
    """
    return _form_of(layout, has_asm(), slices_of(layout.head_dim))


@cache
def _form_of(layout: PageLayout, has_asm: bool, slices: int) -> Form:
    form, dim, at = layout.format, layout.head_dim, layout.offsets
    if form.key_groups > 1 or form.value_groups > 1:
        raise ConfigError(
            f"page format {form.name} has {form.key_groups} key and {form.value_groups} value "
            "groups: GPU kernels read one group per vector; use a format with one"
        )
    key_units, value_units = (
        dim * bits // 8 if bits < 16 else dim for bits in (form.key_bits, form.value_bits)
    )
    page_tile = max(MIN_DOT, power_of_two(layout.tokens))
    key_strides = (1, layout.tokens) if layout.is_channel_major else (key_units, 1)
    segments, key_bytes = form.key_segments(dim), key_units
    if segments:
        key_units = max(each.channels * each.bits // 8 for each in segments)
    return Form(
        page_bytes=layout.size_bytes,
        parts=layout.parts,
        tokens=layout.tokens,
        dim=dim,
        parts_of_key=sum(8 // each.bits for each in segments) or max(1, 8 // form.key_bits),
        parts_of_value=max(1, 8 // form.value_bits),
        key_bits=form.key_bits,
        key_units=key_units,
        key_tile=max(MIN_DOT, power_of_two(key_units)),
        key_stride=key_strides[0],
        key_unit_stride=key_strides[1],
        key_bytes=key_bytes,
        key_widths=form.width_digits,
        key_metadata=at[1],
        value_bits=form.value_bits,
        value_units=value_units,
        value_tile=max(MIN_DOT, power_of_two(value_units)),
        values=at[2],
        value_metadata=at[3],
        is_float=form.has_float_codes,
        is_polar=form.has_polar_keys,
        by_channel=form.codes_whole_pages,
        is_balanced=form.is_balanced,
        token_scales=layout.token_scales,
        channel_scales=layout.channel_scales,
        key_limited=form.limited_numbers(dim)[0],
        value_limited=form.limited_numbers(dim)[1],
        by_norm=form.has_norms,
        scores=at[4],
        has_bias=layout.has_bias,
        positions=at[5],
        is_tracked=layout.is_tracked,
        page_tile=page_tile,
        read_tile=page_tile if slices == 1 else MIN_DOT,
        by_tile=form.key_bits == 16
        or (layout.tokens < MIN_DOT and form.key_bits == form.value_bits == 8),
        has_asm=has_asm,
        slices=slices,
    )


def section_arguments(section: Section) -> Iterator[Argument]:
    """Arguments of a section: table, token counts, slots, width, strides of both."""
    yield section.pages
    yield section.tokens
    yield min(section.pages.shape[0], section.tokens.shape[0])
    yield section.pages.shape[2]
    yield from section.pages.stride()
    yield from section.tokens.stride()


def page_list_arguments(page_lists: PageLists) -> Iterator[Argument]:
    """Arguments of page lists: ordinals, counts, rows, sizes and strides."""
    yield page_lists.ordinals
    yield page_lists.counts
    yield page_lists.rows.contiguous()
    yield min(page_lists.ordinals.shape[0], page_lists.counts.shape[0])
    yield page_lists.ordinals.shape[2]
    yield from page_lists.ordinals.stride()[:2]
    yield from page_lists.counts.stride()


def chunk_of(entries: int, rows: int = 1) -> int:
    """Entries that a program reads at a time, for ``rows`` lists of ``entries`` entries."""
    return max(MIN_DOT, min(LISTED_AT_ONCE, MOST_AT_ONCE // rows, power_of_two(entries)))
