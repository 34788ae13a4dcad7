"""Images of prompts: which tokens stand for them, their places, segments, and keys."""

from triptych.core.images.image_layout import (
    Fixed,
    ImageLayout,
    Resizing,
    Rows,
    Tiling,
    expand_images,
)
from triptych.core.images.image_spans import (
    IMAGE,
    KEY_TOKENS,
    NO_GRID,
    TEXT,
    Grid,
    Image,
    ImageSpan,
    Modality,
    Segment,
    all_segments,
    content_keys,
    image_segments,
    rotary_offset,
)

__all__ = [
    "IMAGE",
    "KEY_TOKENS",
    "NO_GRID",
    "TEXT",
    "Fixed",
    "Grid",
    "Image",
    "ImageLayout",
    "ImageSpan",
    "Modality",
    "Resizing",
    "Rows",
    "Segment",
    "Tiling",
    "all_segments",
    "content_keys",
    "expand_images",
    "image_segments",
    "rotary_offset",
]
