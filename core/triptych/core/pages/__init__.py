"""The page plan: the size of a page, and which formats hold which tokens of a request."""

from triptych.core.pages.page_plan import PagePlan

__all__ = ["PagePlan"]
