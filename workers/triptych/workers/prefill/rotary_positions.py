"""Rotary positions of prompts whose images have positions by row and column."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from triptych.core.images import ImageSpan

AXES = 3
"""Time, row and column."""


def rotary_positions(images: Sequence[ImageSpan], tokens: int) -> NDArray[np.int64] | None:
    """Rotary positions of the tokens of a prompt; None: each is the index of the token.

    All features of an image have the position of the first as their time. Their rows and columns
    count from there, and the token behind the image comes after the larger of both.

    Shapes:  -> (AXES, tokens)
    Source:  Qwen2-VL, M-RoPE (section 2.1)
    """
    if not any(max(image.grid) for image in images):
        return None
    found = np.tile(np.arange(tokens), (AXES, 1))
    for image in images:
        rows, columns = image.grid
        if rows * columns:
            first = found[0, image.start]
            found[0, image.start : image.stop] = first
            found[1, image.start : image.stop] = first + np.repeat(np.arange(rows), columns)
            found[2, image.start : image.stop] = first + np.tile(np.arange(columns), rows)
            found[:, image.stop :] += image.rotary_tokens - image.tokens
    return found
