"""Bytes of pages that hold no token: in unified pages, and in slots of a fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.handles import KVHandle
from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.workers.compress.class_report import class_tokens


@dataclass(frozen=True)
class PageWaste:
    """Bytes of pages of high and low tokens, and those of their tokens."""

    used_bytes: int
    """Codes, scales, scores and positions of all tokens, each in its format."""
    unified_bytes: int
    """Pages whose format decides how many tokens they hold."""
    fixed_bytes: int
    """Pages of slots in which a token of the high format fits, whatever its format is."""

    @property
    def unified_waste(self) -> float:
        """Share of unified pages that holds no token."""
        return 1 - self.used_bytes / self.unified_bytes if self.unified_bytes else 0.0

    @property
    def fixed_waste(self) -> float:
        """Share of pages of fixed slots that holds no bytes of a token."""
        return 1 - self.used_bytes / self.fixed_bytes if self.fixed_bytes else 0.0


def page_waste(handle: KVHandle, plan: PagePlan) -> PageWaste:
    """Waste of the high and low pages of a prompt.

    ``fixed_bytes`` is what the same tokens take if every slot has the size of a high token.

    Source: LeanKV, section 5.1 (a fixed page wastes half of it for K4V2 in a slot of K8V4)
    """
    _, *rows = class_tokens(handle, plan)
    fixed = sum(plan.high.pages(sum(each)) for each in zip(*rows, strict=True))
    return PageWaste(
        used_bytes=sum(
            sum(row) * layout.token_bytes for layout, row in zip(plan.classes, rows, strict=True)
        ),
        unified_bytes=_bytes(plan.classes, rows),
        fixed_bytes=fixed * plan.page_bytes,
    )


def _bytes(layouts: Sequence[PageLayout], rows: Sequence[Sequence[int]]) -> int:
    return sum(
        layout.pages(tokens) * layout.page_bytes
        for layout, row in zip(layouts, rows, strict=True)
        for tokens in row
    )
