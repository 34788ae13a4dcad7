"""Which share of a compressed prompt's tokens is recent, high, low, merged or pruned."""

from collections.abc import Sequence

import numpy as np

from triptych.core.handles import KVHandle, PageRun
from triptych.core.messages import ClassShares
from triptych.core.pages import PagePlan
from triptych.workers.compress.job import LayerGroup


def class_tokens(handle: KVHandle, plan: PagePlan) -> Sequence[Sequence[int]]:
    """Tokens of each head row: recent ones, then those of each class, high first.

    Pages of a cached prefix come last in a handle, and count with the high ones.
    """
    rows = [_tokens(run) for run in handle.runs]
    classes, fixed = rows[: 1 + len(plan.classes)], rows[1 + len(plan.classes) :]
    for extra in fixed:
        classes[1] = [a + b for a, b in zip(classes[1], extra, strict=True)]
    return classes


def class_shares(
    handle: KVHandle, plan: PagePlan, groups: Sequence[LayerGroup] = ()
) -> ClassShares:
    """Shares of the tokens of a prompt, means over head rows.

    ``plan``: that of the prompt's method. ``groups``: all layers of the prompt, which know its
    merged tokens; a handle counts those with the high ones.
    """
    recent, *classes = (sum(row) for row in class_tokens(handle, plan))
    high, low = (*classes, 0, 0)[:2]
    made, merged = _merged(groups)
    total = handle.tokens * plan.geometry.head_rows
    stored = recent + high - made + low + merged
    return ClassShares(
        recent=recent / total,
        high=(high - made) / total,
        low=low / total,
        merged=merged / total,
        pruned=(total - stored) / total,
    )


def _merged(groups: Sequence[LayerGroup]) -> tuple[int, int]:
    """Tokens that merging made, and those of which it made them, in all head rows."""
    parts = [
        (len(group.raw), one) for group in groups for plan in group.classes for one in plan.merged
    ]
    made = sum(rows * one.made for rows, one in parts)
    return made, sum(rows * one.members for rows, one in parts)


def _tokens(run: PageRun) -> list[int]:
    return np.frombuffer(run.tokens, "<i4").tolist()
