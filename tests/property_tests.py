"""How many examples a property test draws."""

from hypothesis import settings

EXPLORE = "explore"
"""The profile of ``make explore``, which draws other examples at every run."""


def examples(count: int) -> int:
    """``count`` under ``make explore``; else a quarter, which are the same ones at every run."""
    if settings.get_current_profile_name() == EXPLORE:
        return count
    return max(count // 4, min(count, 10))
