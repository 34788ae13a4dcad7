"""Images of a prompt: which tokens stand for them, segments, and keys for the prefix cache.

The tokens of all images are alike: placeholders, which prefill replaces by features. So a key of
the prefix cache must not be made of them alone. ``content_keys`` puts a hash of the pixels in their
places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256, shake_256
from struct import unpack
from typing import Literal

from triptych.core.errors import RequestError

KEY_TOKENS = 8
"""Tokens before an image whose keys cover it too. A block of the prefix cache may end behind the
first token of an image, whose key of 30 bits alone could be that of another image."""
LEAST_KEY = 1 << 30
"""No vocabulary has so many tokens, and keys fit into an int32 that is not negative."""
RGB = 3
"""Bytes of a pixel."""

Modality = Literal["text", "image"]
TEXT: Modality = "text"
IMAGE: Modality = "image"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """The tokens of one image in a prompt."""

    start: int
    """Position of the first one."""
    tokens: int
    """Number of placeholders, and of features."""
    digest: bytes
    """``digest_of`` the image."""
    width: int
    height: int
    """Pixels."""
    feature_bytes: int
    """Bytes of its features."""

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def stop(self) -> int:
        return self.start + self.tokens


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """The tokens of an image in prompts of one model."""

    placeholder: int
    """Token id that the chat template writes once for an image."""
    before: tuple[int, ...] = ()
    """Tokens before the placeholders of an image."""
    tokens: int
    """Placeholders of an image."""
    after: tuple[int, ...] = ()
    """Tokens behind them."""
    feature_bytes: int
    """Bytes of the features of an image."""


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


def expand_images(
    tokens: Sequence[int], images: Sequence[Image], layout: ImageLayout
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replace the placeholder of each image by as many as it has features.

    ``tokens``: a prompt with one placeholder for each image, in order.

    Raises: RequestError if there are more or fewer placeholders than images
    """
    found = sum(token == layout.placeholder for token in tokens)
    if found != len(images):
        raise RequestError(
            f"the chat template made {found} image tokens of {len(images)} images: a text may not "
            "contain the image token, and an image must be in a message whose role may have some",
            "messages",
        )
    expanded, spans, rest = list[int](), list[ImageSpan](), iter(images)
    for token in tokens:
        if token != layout.placeholder:
            expanded.append(token)
            continue
        image = next(rest)
        expanded += layout.before
        spans.append(
            ImageSpan(
                start=len(expanded),
                tokens=layout.tokens,
                digest=image.digest,
                width=image.width,
                height=image.height,
                feature_bytes=layout.feature_bytes,
            )
        )
        expanded += [layout.placeholder] * layout.tokens
        expanded += layout.after
    return expanded, tuple(spans)


def content_keys(tokens: Sequence[int], images: Sequence[ImageSpan]) -> tuple[int, ...]:
    """Tokens of a prompt as the prefix cache sees them.

    The tokens of an image, and ``KEY_TOKENS`` before it, are replaced by hashes of the image, the
    place in it, and what stood there. They are at least ``LEAST_KEY``, so that no token has their
    value. Two prompts have equal keys up to a place inside an image only if the image is the same.

    >>> span = ImageSpan(start=1, tokens=2, digest=b"a", width=1, height=1, feature_bytes=8)
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
