"""How many cases a test tries: few in ``make check test``, all elsewhere."""

import pytest
from hypothesis import settings

EXPLORE = "explore"
"""The profile of ``make explore``, which draws other examples at every run."""


def examples(count: int) -> int:
    """``count`` under ``make explore``; else a quarter, which are the same ones at every run."""
    if settings.get_current_profile_name() == EXPLORE:
        return count
    return max(count // 4, min(count, 10))


def in_parts(count: int) -> pytest.MarkDecorator:
    """Parametrize by ``part``, a slice of a test's cases; all but the first are ``conformance``."""
    parts = [
        pytest.param(
            slice(first, None, count),
            id=f"{first + 1} of {count}",
            marks=[pytest.mark.conformance] if first else [],
        )
        for first in range(count)
    ]
    return pytest.mark.parametrize("part", parts)
