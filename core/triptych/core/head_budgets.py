"""How the pages that a decode step reads are spread over head rows.

Some heads look at a few pages, others at all. So where half of the pages are read, the former need
not read half of theirs, and the latter may read all: as much is read, and less is lost. How it is
best spread is found by calibration, for a mean share of 0, 1/32, 2/32 and on.

Source: Ada-KV and HeadKV give heads budgets of what is kept; of what is read, and by the square of
        the attention that a head misses, is ours (docs/log.md)
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from triptych.core.layout import Geometry

SPREAD_STEPS = 32
"""Of the mean share of pages, for which a spread says what each head row reads."""
SPREAD_TOP = 255
"""Code of a share of 1."""

Spread = bytes
"""A code for each share, [layers, kv_heads, ``SPREAD_STEPS`` + 1]."""


def encode_spread(shares: Iterable[float]) -> Spread:
    """Shares from 0 to 1 in the order of layers, KV heads and steps, rounded up."""
    return bytes(math.ceil(share * SPREAD_TOP - 1e-6) for share in shares)


def check_spread(spread: Spread, geometry: Geometry) -> None:
    """Raise ValueError unless it is one of this geometry, up to everything, and never less."""
    wanted = geometry.head_rows * (SPREAD_STEPS + 1)
    if len(spread) != wanted:
        raise ValueError(f"spread has {len(spread)} bytes, expected {wanted}")
    for first in range(0, wanted, SPREAD_STEPS + 1):
        row = spread[first : first + SPREAD_STEPS + 1]
        if row[-1] != SPREAD_TOP or any(low > high for low, high in pairwise(row)):
            raise ValueError("spread: the shares of a head row must grow, up to 255")
