"""Codes of values on the inner part of their range, decoded so that no length is lost."""

import torch
from torch import Tensor

from triptych.kernels.codec.quantizer import Encoded

SPAN = 51 / 64
"""Share of the range of a vector that its decoded codes span."""
STEP = 15 / 16
"""How far apart codes are where numbers are rounded to them, next to where they are decoded."""


def encode_unbiased(vectors: Tensor, bits: int) -> Encoded:
    """Codes of the inner part of the range of each vector, about its middle.

    Few numbers of a rotated vector lie outside, and the others have smaller errors. That alone
    shortens a vector along itself, and attention adds these losses up where errors cancel. So codes
    are decoded ``1 / STEP`` times as far from the middle as numbers were rounded to them. Products
    with ``STEP`` and small integers are exact in float32, so results do not depend on whether they
    are fused with a sum.

    Shapes:  vectors [n, d] -> codes [n, d], metadata [n, 1, 2]
    Source:  OSCAR (a limited range); the factor between rounding and decoding is ours (docs/log.md)
    """
    top, numbers = 2**bits - 1, vectors.float()
    low, high = numbers.amin(-1, keepdim=True), numbers.amax(-1, keepdim=True)
    width = high - low
    scale = (width * SPAN / top).half()
    usable = scale > 0
    scale = torch.where(usable, scale, 1.0)
    wide = scale.float()
    zero = torch.where(usable, low + (width - top * wide) * 0.5, low).half()
    step = wide * STEP
    start = zero.float() + (wide - step) * (top / 2)
    codes = ((numbers - start) / step).round().clamp(0, top)
    codes = torch.where(usable, codes, 0.0).to(torch.uint8)
    return Encoded(codes, torch.stack((scale, zero), -1))
