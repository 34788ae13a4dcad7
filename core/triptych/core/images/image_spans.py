"""Images of a prompt: their places in it, segments, and keys for the prefix cache.

The tokens of all images are alike: placeholders, which prefill replaces by features. So a key of
the prefix cache must not be made of them alone. ``content_keys`` puts a hash of the pixels in their
places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256, shake_256
from struct import unpack
from typing import Literal

KEY_TOKENS = 8
"""Tokens before an image whose keys cover it too. A block of the prefix cache may end behind the
first token of an image, whose key of 30 bits alone could be that of another image."""
LEAST_KEY = 1 << 30
"""No vocabulary has so many tokens, and keys fit into an int32 that is not negative."""
RGB = 3
"""Bytes of a pixel."""

Grid = tuple[int, int]
"""Rows and columns."""
NO_GRID: Grid = (0, 0)

Modality = Literal["text", "image"]
TEXT: Modality = "text"
IMAGE: Modality = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The tokens of one image in a prompt."""

    runs: tuple[tuple[int, int], ...]
    """Position of the first of some consecutive features, and their number: one run for each tile
    of an image. Tokens between two runs belong to the image too."""
    digest: bytes
    """``digest_of`` the image."""
    width: int
    height: int
    """Pixels."""
    feature_bytes: int
    """Bytes of its features."""
    grid: Grid = NO_GRID
    """Of its features, for models whose rotary positions of images count rows and columns; else
    ``NO_GRID``."""

    def __post_init__(self) -> None:
        places = [edge for first, count in self.runs for edge in (first, first + count)]
        if not places or places[0] < 0 or min(count for _, count in self.runs) < 1:
            raise ValueError(f"an image has no features at {self.runs}")
        if places != sorted(places):
            raise ValueError(f"the features of an image overlap: {self.runs}")
        rows, columns = self.grid
        if self.grid != NO_GRID and (rows < 1 or rows * columns != self.tokens):
            raise ValueError(f"{self.tokens} tokens are no {rows} x {columns} features")

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def features(self) -> int:
        """Number of features."""
        return sum(count for _, count in self.runs)

    @property
    def start(self) -> int:
        """Position of the first feature."""
        return self.runs[0][0]

    @property
    def stop(self) -> int:
        """Position behind the last feature."""
        return sum(self.runs[-1])

    @property
    def tokens(self) -> int:
        """Tokens from the first to the last feature."""
        return self.stop - self.start

    @property
    def rotary_tokens(self) -> int:
        """By how much rotary positions grow from the first token to the one behind the image."""
        return max(self.grid) or self.tokens


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one modality, such as an image, or the text between two images."""

    modality: Modality
    start: int
    end: int
    """After the last token."""


def image_segments(images: Sequence[ImageSpan]) -> tuple[Segment, ...]:
    """The segments of a prompt that are no text."""
    return tuple(Segment(IMAGE, image.start, image.stop) for image in images)


def all_segments(others: Sequence[Segment], tokens: int) -> tuple[Segment, ...]:
    """Segments of a sequence of ``tokens`` tokens from its first to its last token.

    ``others``: those that are no text, in order.

    >>> [(one.modality, one.start, one.end) for one in all_segments([Segment(IMAGE, 2, 5)], 6)]
    [('text', 0, 2), ('image', 2, 5), ('text', 5, 6)]
    """
    found, end = list[Segment](), 0
    for segment in others:
        if end < segment.start:
            found.append(Segment(TEXT, end, segment.start))
        found.append(segment)
        end = segment.end
    if end < tokens:
        found.append(Segment(TEXT, end, tokens))
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Image:
    """A decoded image."""

    width: int
    height: int
    rgb: bytes
    """Pixels, row by row: uint8 [height, width, 3]."""
    digest: bytes

    @classmethod
    def of(cls, width: int, height: int, rgb: bytes) -> "Image":
        """An image and its digest.

        Raises: ValueError if the number of bytes does not fit
        """
        if width < 1 or height < 1 or len(rgb) != RGB * width * height:
            raise ValueError(f"{len(rgb)} bytes are no RGB image of {width} x {height} pixels")
        return cls(width=width, height=height, rgb=rgb, digest=digest_of(width, height, rgb))


def digest_of(width: int, height: int, rgb: bytes) -> bytes:
    """SHA-256 of an image's size and pixels: equal for equal pictures, however they were stored."""
    hashed = sha256(b"%dx%d:" % (width, height))
    hashed.update(rgb)
    return hashed.digest()


def rotary_offset(images: Sequence[ImageSpan]) -> int:
    """Rotary position of a token behind some images, less its index.

    >>> rotary_offset([])
    0
    """
    return sum(image.rotary_tokens - image.tokens for image in images)


def content_keys(tokens: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """Tokens of a prompt as the prefix cache sees them.

    The tokens of an image, and ``KEY_TOKENS`` before it, are replaced by hashes of the image, the
    place in it, and what stood there. They are at least ``LEAST_KEY``, so that no token has their
    value. Two prompts have equal keys up to a place inside an image only if the image is the same.

    >>> span = ImageSpan(runs=((1, 2),), digest=b"a", width=1, height=1, feature_bytes=8)
    >>> [key >= LEAST_KEY for key in content_keys([5, 7, 7, 6], [span])]
    [True, True, True, False]
    """
    keys = list(tokens)
    for image in images:
        for at in range(max(0, image.start - KEY_TOKENS), min(image.start, len(keys))):
            keys[at] = _key(image.digest, image.start - at, keys[at])
        hashed = shake_256(image.digest).digest(4 * image.tokens)
        inside = [LEAST_KEY | number >> 2 for number in unpack(f"<{image.tokens}I", hashed)]
        keys[image.start : image.stop] = inside[: max(0, len(keys) - image.start)]
    return tuple(keys)


def _key(digest: bytes, before: int, token: int) -> int:
    """The key of the token that stands ``before`` an image."""
    hashed = blake2b(b"%d:%d:" % (before, token), key=digest, digest_size=4).digest()
    return LEAST_KEY | int.from_bytes(hashed, "little") >> 2
