"""Byte arithmetic of the unified page: which format holds how many tokens, and where they lie.

All pages of a pool have the same size in bytes; the format decides how many tokens fit.
Source: DiffKV and LeanKV (unified pages with six segments).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from triptych.core.errors import ConfigError

KeyOrder = Literal["token", "channel"]
"""``token``: keys lie as [tokens, channel bytes]; ``channel``: as [channel bytes, tokens]."""

ALIGN_BYTES = 16
PAGE_ALIGN_BYTES = 256
DISK_ALIGN_BYTES = 4096
METADATA_BYTES = 4
"""One fp16 scale and one fp16 zero per quantization group."""
RECENT_TOKENS = 3
"""Least tokens of a small page of recent tokens. With 3 tokens of K8V8 an eighth of a page that 32
tokens of K8V4 fill is full too. Tokens of formats that are encoded page by page are a multiple, so
that whole small pages move to a page."""

GPU_GROUPS = {256: 32, 576: 16}
"""Most query heads of a KV head that GPU kernels take, by the largest head size."""

Codec = Literal["range", "float", "by_channel", "balanced", "by_norm", "polar"]
"""How the numbers of a page become codes.

``range``: the codes of a token's vector divide its range evenly, by a scale and a zero. ``float``:
codes are float8 numbers (e4m3), by a power of two for each token; the zero is 0. ``by_channel``: as
``range``, but keys have a scale and a zero for each channel of a page. ``balanced``: as
``by_channel``, after keys and values of a page are divided by a scale for each token and channel.
``by_norm``: codes are equally spaced around 0, by the norm of a vector; a key is divided into
segments of channels, each with its own bits and norm.
``polar``: values as ``range``; a byte of a key holds radius and angle of the pair of channels that
RoPE rotates together, by a step of the radius for each token; the zero is 0.
"""


class KeySegment(NamedTuple):
    """Channels of a key that have codes of the same bits, and one scale."""

    bits: int
    channel: int
    """The first one."""
    channels: int
    byte: int
    """The first one of its packed codes."""


@dataclass(frozen=True, slots=True)
class PageFormat:
    """Precision of the keys and values of a page: ``K8V4`` has 8-bit keys and 4-bit values.

    ``K4V2C`` is ``K4V2`` whose values are limited (clipped) as OSCAR limits them. ``R3A5V4`` has a
    radius of 3 and an angle of 5 bits for each pair of channels of a key.
    """

    name: str
    key_bits: int
    value_bits: int
    key_groups: int = 1
    value_groups: int = 1
    codec: Codec = "range"
    values_are_keys: bool = False
    """Whether the value of a token is its key, which is stored once: a latent."""
    key_clip: float = 0.0
    """Quantile of the magnitudes of a key to which larger ones are limited before their range is
    divided; 0: none are limited."""
    value_clip: float = 0.0
    """The same for values."""
    key_widths: tuple[tuple[int, int], ...] = ()
    """Segments of a key: bits of a code, and sixteenths of the channels. Empty: all channels have
    ``key_bits``, which otherwise is the mean."""

    @property
    def is_quantized(self) -> bool:
        return self.key_bits < 16

    @property
    def has_float_codes(self) -> bool:
        """Whether codes are float8 numbers."""
        return self.codec == "float"

    @property
    def key_codec(self) -> Codec:
        """How keys become codes."""
        return self.codec

    @property
    def value_codec(self) -> Codec:
        """How values become codes."""
        return "range" if self.codec == "polar" else self.codec

    @property
    def has_polar_keys(self) -> bool:
        """Whether codes of keys are radius and angle of the pairs that RoPE rotates."""
        return self.codec == "polar"

    @property
    def is_balanced(self) -> bool:
        """Whether a token's key has a scale, and a channel of a page's values has one."""
        return self.codec == "balanced"

    @property
    def codes_whole_pages(self) -> bool:
        """Whether scales of keys belong to the channels of a page.

        Then all tokens of a page are encoded together, and none is written alone later.
        """
        return self.codec in ("by_channel", "balanced")

    @property
    def suits_any_method(self) -> bool:
        """Whether tokens of any method can be in this format, and not of one method alone."""
        return not (self.codes_whole_pages or self.key_widths or self.has_polar_keys)

    @property
    def is_clipped(self) -> bool:
        """Whether some numbers of a vector are limited before it is encoded.

        Then decoded vectors may have other codes than before when they are encoded again.
        """
        return max(self.key_clip, self.value_clip) > 0

    @property
    def has_norms(self) -> bool:
        """Whether codes of a vector, or of a segment of it, are multiplied by a share of its norm.

        The stored scale makes decoded vectors as long as the given ones.
        """
        return self.codec == "by_norm"

    @property
    def is_stable(self) -> bool:
        """Whether decoded vectors have the same codes when they are encoded again."""
        return not (self.is_clipped or self.has_norms or self.has_polar_keys)

    def key_segments(self, head_dim: int) -> tuple[KeySegment, ...]:
        """The segments of a key; empty: all channels have the same bits.

        Raises: ConfigError if the channels of a head are not a multiple of 16

        >>> FORMATS["block_gtq"].key_segments(64)[1]
        KeySegment(bits=2, channel=16, channels=16, byte=8)
        """
        if self.key_widths and head_dim % 16:
            raise ConfigError(
                f"{self.name} with head_dim {head_dim}: segments of keys are sixteenths of the "
                "channels: expected a multiple of 16; use another method, such as 'saw_int4'"
            )
        found, channel, byte = list[KeySegment](), 0, 0
        for bits, share in self.key_widths:
            channels = share * head_dim // 16
            found.append(KeySegment(bits, channel, channels, byte))
            channel, byte = channel + channels, byte + channels * bits // 8
        return tuple(found)

    @property
    def width_digits(self) -> int:
        """``key_widths`` as a number for kernels: a digit to the base 256 for each segment, bits
        and 16 times the sixteenths, the first segment lowest."""
        digits = (bits + 16 * share for bits, share in self.key_widths)
        return sum(digit << 8 * place for place, digit in enumerate(digits))

    def limited_numbers(self, head_dim: int) -> tuple[int, int]:
        """How many numbers of a key and of a value may be above the limit, and become it.

        >>> FORMATS["k2v2"].limited_numbers(64)
        (2, 5)
        """
        clips = self.key_clip, self.value_clip
        keys, values = (head_dim - 1 - int(clip * head_dim) if clip else 0 for clip in clips)
        return keys, values

    def token_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one KV head in all six segments, padding aside."""
        return sum(self.stored_token_bytes(head_dim))

    def read_bytes(self, head_dim: int) -> int:
        """Bytes of one token of one KV head that attention reads (segments 1 to 4)."""
        return sum(self.stored_token_bytes(head_dim)[:4])

    def stored_token_bytes(self, head_dim: int) -> tuple[int, int, int, int, int, int]:
        """Bytes that one token adds to each of the six segments."""
        keys, of_keys, values, of_values, score, position = self.segment_token_bytes(head_dim)
        if self.values_are_keys:
            values = of_values = 0
        return keys, of_keys, values, of_values, score, position

    def segment_token_bytes(self, head_dim: int) -> tuple[int, int, int, int, int, int]:
        """Bytes from one token to the next in each of the six segments."""
        metadata = METADATA_BYTES if self.is_quantized else 0
        key_metadata = metadata * self.key_groups
        if self.codes_whole_pages:
            key_metadata = 2 if self.is_balanced else 0
        if self.key_widths:
            key_metadata = 2 * len(self.key_widths)
        return (
            head_dim * self.key_bits // 8,
            key_metadata,
            head_dim * self.value_bits // 8,
            metadata * self.value_groups,
            4,  # score, float32
            4,  # position, int32
        )

    def segment_page_bytes(self, head_dim: int) -> tuple[int, int, int, int, int, int]:
        """Bytes that each of the six segments of a page takes beside those of its tokens."""
        if not self.codes_whole_pages:
            return (0, 0, 0, 0, 0, 0)
        values = 2 * head_dim if self.is_balanced else 0
        return (0, METADATA_BYTES * head_dim, 0, values, 0, 0)


FORMATS: dict[str, PageFormat] = {
    form.name: form
    for form in (
        PageFormat("fp16", 16, 16),
        PageFormat("k8v8", 8, 8),
        PageFormat("k8v4", 8, 4),
        PageFormat("k4v4", 4, 4),
        PageFormat("k4v2", 4, 2),
        PageFormat("k4v8", 4, 8),
        PageFormat("k8v2", 8, 2),
        PageFormat("k2v4", 2, 4),
        PageFormat("k4v1", 4, 1),
        PageFormat("k2v2", 2, 2, key_clip=0.96, value_clip=0.92),
        PageFormat("k4v2c", 4, 2, value_clip=0.92),
        PageFormat("fp8", 8, 8, codec="float"),
        PageFormat("kivi4", 4, 4, codec="by_channel"),
        PageFormat("kivi2", 2, 2, codec="by_channel"),
        PageFormat("kvarn", 4, 2, codec="balanced"),
        PageFormat("block_gtq", 2, 2, codec="by_norm", key_widths=((4, 4), (2, 4), (1, 8))),
        PageFormat("r3a5v4", 4, 4, codec="polar"),
        PageFormat("r3a5v2", 4, 2, codec="polar"),
    )
}

LATENT_FORMATS: dict[str, PageFormat] = {
    form.name: form
    for form in (
        PageFormat("latent16", 16, 16, values_are_keys=True),
        PageFormat("latent8", 8, 8, values_are_keys=True),
        PageFormat("latent4", 4, 4, values_are_keys=True),
        PageFormat("latent_fp8", 8, 8, codec="float", values_are_keys=True),
    )
}
"""Formats of latents. No setting names them: they stand in the place of the others for models that
have latents."""


def page_format(name: str) -> PageFormat:
    """Look a format up by its name, such as ``k8v4``."""
    try:
        return FORMATS[name.lower()]
    except KeyError:
        raise ConfigError(f"no page format {name!r} (have {sorted(FORMATS)})") from None


def stored_format(name: str) -> PageFormat:
    """Look up the format of stored pages, latents included."""
    return LATENT_FORMATS[name] if name in LATENT_FORMATS else page_format(name)


def latent_format(form: PageFormat) -> PageFormat:
    """The format of latents in the place of ``form``: its codec, with the more bits of the two.

    Raises: ConfigError if pages of ``form`` are encoded whole, keys and values each in its own way
    """
    bits = max(form.key_bits, form.value_bits)
    for latent in LATENT_FORMATS.values():
        if (latent.codec, latent.key_bits) == (form.codec, bits):
            return latent
    raise ConfigError(
        f"this model stores latents, which are keys and values at once, and pages of {form.name} "
        "encode these in different ways: use another method, such as 'uniform:k4v4'"
    )


def align(count: int, step: int) -> int:
    """The smallest multiple of ``step`` that is not below ``count``."""
    return -(-count // step) * step


def default_page_bytes(
    head_dim: int, *, on_disk: bool = False, form: PageFormat = FORMATS["k8v4"]
) -> int:
    """Page size in which 32 tokens of ``form`` fill every byte (3,584 at head_dim 64).

    On a disk the next multiple of what a disk reads: else nearly every page takes two of these.
    """
    grain = DISK_ALIGN_BYTES if on_disk else PAGE_ALIGN_BYTES
    return align(32 * form.token_bytes(head_dim), grain)


@dataclass(frozen=True)
class PageLayout:
    """Where the six segments of a page of one format lie.

    Segments, in order: key codes, key metadata, value codes, value metadata, scores
    (float32), positions (int32). Each starts at a multiple of 16 bytes. Metadata is
    ``[tokens, groups, 2]`` fp16: scale and zero. 16-bit formats have no metadata and
    keep their keys token by token whatever ``key_order`` says.

    Formats that are encoded page by page have ``[head_dim, 2]`` fp16 as metadata of keys: scale and
    zero of each channel. If they are balanced, ``[tokens]`` fp16, a scale of each token's key,
    follow there, and ``[head_dim]`` fp16, a scale of each channel, follow the metadata of values.

    Formats with segments of keys have the codes of one segment of a token behind those of another,
    each packed alone, and ``[segments, tokens]`` fp16 as metadata of keys: a scale. A number of a
    segment of b bits is the scale times ``2 * code - (2**b - 1)``.

    Where values are keys, the third and fourth segment are the first and second one. So whatever
    reads values of such pages reads keys, and whatever writes both writes the same bytes twice.
    Their keys lie token by token, as values do.

    With ``has_bias`` the fifth segment holds a logit bias of each token in place of its score:
    attention adds it to the scaled, capped logit. A token that stands for k equal ones has log k.
    Such pages take no more bytes, and their tokens have no scores.

    Without ``is_tracked`` the fifth and sixth segment are empty: tokens have neither a score nor a
    position. That suits tokens that never leave their pages.

    With ``parts`` a page of the pool holds so many small pages of equal size, each with six
    segments of its own. Small page number ``i`` of pool page ``p`` has the id ``p * parts + i``.

    >>> PageLayout(FORMATS["k8v4"], head_dim=64, page_bytes=3584).tokens
    32
    >>> PageLayout(FORMATS["k8v8"], head_dim=64, page_bytes=3584, parts=8).tokens
    3
    >>> PageLayout(FORMATS["k4v2"], head_dim=64, page_bytes=3584, is_tracked=False).tokens
    64
    """

    format: PageFormat
    head_dim: int
    page_bytes: int
    """Bytes of a page of the pool."""
    key_order: KeyOrder = "channel"
    parts: int = 1
    """Pages of this layout in one page of the pool."""
    has_bias: bool = False
    """Whether tokens have a logit bias (float32) in place of a score."""
    is_tracked: bool = True
    """Whether tokens have a score, or a bias, and a position."""

    def __post_init__(self) -> None:
        self.format.key_segments(self.head_dim)
        if not self.is_tracked and (self.has_bias or self.format.codes_whole_pages):
            raise ConfigError(
                f"pages of {self.format.name} without scores and positions: expected tokens that "
                "have no bias and are encoded alone"
            )
        if self.page_bytes % self.parts:
            raise ConfigError(
                f"page_bytes={self.page_bytes}: expected a multiple of {self.parts}, the number of "
                "small pages in a page"
            )
        if self.tokens < 1:
            raise ConfigError(
                f"page_bytes={self.page_bytes}: too small for one {self.format.name} token of "
                f"head_dim {self.head_dim}; use at least {self.parts * self.used_bytes(1)} bytes"
            )

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of one page of this layout."""
        return self.page_bytes // self.parts

    @cached_property
    def tokens(self) -> int:
        """Tokens of one KV head in one page of this layout."""
        count = self.size_bytes // self.token_bytes
        while count > 0 and self.used_bytes(count) > self.size_bytes:
            count -= 1
        return count - count % RECENT_TOKENS if self.format.codes_whole_pages else count

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one KV head in all segments, padding aside."""
        form = self.format
        return (form.token_bytes if self.is_tracked else form.read_bytes)(self.head_dim)

    @cached_property
    def offsets(self) -> tuple[int, int, int, int, int, int]:
        """Byte offset of each segment inside the page."""
        ends = self._ends(self.tokens)
        if self.format.values_are_keys:
            return (0, ends[0], 0, ends[0], *ends[3:5])
        return (0, *ends[:5])

    @property
    def is_channel_major(self) -> bool:
        """Whether keys are stored as [channel bytes, tokens]."""
        form = self.format
        return form.is_quantized and not form.values_are_keys and self.key_order == "channel"

    @property
    def token_scales(self) -> int:
        """Byte offset of the scales of keys by token, if the format is balanced."""
        return self.offsets[1] + METADATA_BYTES * self.head_dim

    @property
    def channel_scales(self) -> int:
        """Byte offset of the scales of values by channel, if the format is balanced."""
        return self.offsets[3] + METADATA_BYTES * self.tokens

    @property
    def has_scores(self) -> bool:
        """Whether tokens have scores that decode adds to.

        Tokens with a bias have none, nor have tokens that cannot leave their page, or not alone.
        """
        return self.is_tracked and not self.has_bias and not self.format.codes_whole_pages

    @property
    def read_bytes(self) -> float:
        """Bytes of one token of one KV head that attention reads, in a full page."""
        of_token = self.format.read_bytes(self.head_dim) + 4 * self.has_bias
        of_page = sum(self.format.segment_page_bytes(self.head_dim))
        return of_token + of_page / self.tokens if of_page else of_token

    def pages(self, tokens: int) -> int:
        """Pages of this layout that ``tokens`` tokens of one KV head take."""
        return -(-tokens // self.tokens)

    def pool_pages(self, pages: int) -> int:
        """Pages of the pool that ``pages`` pages of this layout take."""
        return -(-pages // self.parts)

    def used_bytes(self, tokens: int) -> int:
        """Bytes of the six segments for ``tokens`` tokens."""
        return self._ends(tokens)[5]

    def _ends(self, tokens: int) -> tuple[int, int, int, int, int, int]:
        end, ends, dim = 0, list[int](), self.head_dim
        per_token = self.format.stored_token_bytes(dim)
        if not self.is_tracked:
            per_token = (*per_token[:4], 0, 0)
        segments = zip(per_token, self.format.segment_page_bytes(dim), strict=True)
        for each, of_page in segments:
            end = align(end + tokens * each + of_page, ALIGN_BYTES)
            ends.append(end)
        return (ends[0], ends[1], ends[2], ends[3], ends[4], ends[5])


@dataclass(frozen=True, slots=True)
class Geometry:
    """Layers, KV heads and head size of a model, which decide the shape of its pages."""

    layers: int
    kv_heads: int
    head_dim: int
    has_latents: bool = False
    """Whether the value of a token is its key: one latent for all heads (MLA)."""
    windows: tuple[int, ...] = field(default=(), repr=False)
    """Sliding window of each layer in tokens, 0 for those that attend to all tokens; empty: all do.
    Not part of ``repr``, which is hashed: what lies in a page does not depend on it."""

    @property
    def rows_by_window(self) -> Mapping[int, int]:
        """Head rows by the sliding window of their layer; 0: none.

        >>> Geometry(layers=3, kv_heads=2, head_dim=64, windows=(512, 512, 0)).rows_by_window
        {512: 4, 0: 2}
        """
        layers = Counter(self.windows) if self.windows else {0: self.layers}
        return {window: self.kv_heads * count for window, count in layers.items()}

    @property
    def head_rows(self) -> int:
        """One head row is one (layer, KV head) of one request."""
        return self.layers * self.kv_heads

    @property
    def gpu_group(self) -> int:
        """Most query heads of a KV head that GPU kernels take; 0: they take no such heads."""
        return next((most for dim, most in GPU_GROUPS.items() if self.head_dim <= dim), 0)

    @property
    def token_numbers(self) -> int:
        """Numbers of keys and values of one token, in all head rows."""
        return self.head_rows * self.head_dim * (1 if self.has_latents else 2)

    def stored(self, form: PageFormat) -> PageFormat:
        """The format in which pages of this model are stored where a setting says ``form``.

        Raises: ConfigError as ``latent_format``
        """
        return latent_format(form) if self.has_latents else form

    def page_bytes(self, *, on_disk: bool = False) -> int:
        """The default size of a page (``default_page_bytes``)."""
        form = self.stored(FORMATS["k8v4"])
        return default_page_bytes(self.head_dim, on_disk=on_disk, form=form)
