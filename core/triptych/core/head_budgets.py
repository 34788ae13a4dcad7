"""Head budgets: the share of its pages that each head row reads in a decode step.

The attention of some heads rests on a few pages, that of others on all pages. Budgets per head read
as many pages in total as one share for all heads, and miss less attention. Calibration finds the
budgets for a mean share of 0, 1/32, 2/32 and so on to 1.

Source: Ada-KV and HeadKV give heads budgets of what is kept; of what is read, and by the square of
        the attention that a head misses, is ours (docs/log.md)
"""

import math
from collections.abc import Iterable
from itertools import pairwise

from triptych.core.layout import Geometry

BUDGET_STEPS = 32
"""Steps of the mean share of pages; there is one budget per head row for each step and for 0."""
BUDGET_MAX = 255
"""Code of a share of 1, which is all pages."""

HeadBudgets = bytes
"""One byte for each share, [layers, kv_heads, ``BUDGET_STEPS`` + 1]."""


def encode_head_budgets(shares: Iterable[float]) -> HeadBudgets:
    """Encode shares from 0 to 1, in the order of layers, KV heads and steps; rounds up."""
    return bytes(math.ceil(share * BUDGET_MAX - 1e-6) for share in shares)


def check_head_budgets(head_budgets: HeadBudgets, geometry: Geometry) -> None:
    """Raise ValueError unless the size fits the geometry and each row grows to ``BUDGET_MAX``."""
    wanted = geometry.head_rows * (BUDGET_STEPS + 1)
    if len(head_budgets) != wanted:
        raise ValueError(f"spread has {len(head_budgets)} bytes, expected {wanted}")
    for first in range(0, wanted, BUDGET_STEPS + 1):
        row = head_budgets[first : first + BUDGET_STEPS + 1]
        if row[-1] != BUDGET_MAX or any(low > high for low, high in pairwise(row)):
            raise ValueError("spread: the shares of a head row must grow, up to 255")


def head_shares(head_budgets: HeadBudgets, share: float) -> tuple[float, ...]:
    """The share of each head row, in the order of layers and KV heads, for a mean of ``share``.

    Shares between two steps are on the line between them.

    >>> head_shares(encode_head_budgets(min(1, step / 16) for step in range(33)), 0.25)
    (0.5019607843137255,)
    """
    steps = BUDGET_STEPS + 1
    below = min(BUDGET_STEPS - 1, int(share * BUDGET_STEPS))
    part = share * BUDGET_STEPS - below
    pairs = (
        (head_budgets[row + below], head_budgets[row + below + 1])
        for row in range(0, len(head_budgets), steps)
    )
    return tuple((low + part * (high - low)) / BUDGET_MAX for low, high in pairs)
