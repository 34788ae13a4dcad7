"""The layouts of the pages that a decode worker reads in one call of attention."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan

T = TypeVar("T")


@dataclass(frozen=True)
class TableLayouts:
    """The layouts of all tables of a worker, for all methods that its server offers."""

    recent: tuple[PageLayout, ...]
    """Pages of new tokens: recent ones, then raw ones, as far as there are methods for them."""
    classes: tuple[tuple[PageLayout, ...], ...]
    """Groups of tables that share the entries of a row, one format from each side."""
    fixed: tuple[PageLayout, ...]

    @classmethod
    def of(cls, plan: PagePlan) -> "TableLayouts":
        """A method with one class uses the first table of a group of two, if it has its format."""
        plans = sorted(plan.by_method.values(), key=lambda one: not one.compresses)
        pairs = _distinct(one.classes for one in plans if len(one.classes) > 1)
        alone = _distinct(one.classes for one in plans if len(one.classes) == 1)
        firsts = {pair[0] for pair in pairs}
        return cls(
            _distinct(one.recent for one in plans),
            (*pairs, *(one for one in alone if one[0] not in firsts)),
            _distinct(one.high for one in plans if one.has_fixed_pages),
        )

    @property
    def sections(self) -> tuple[tuple[PageLayout, bool], ...]:
        """The layouts in the order in which attention reads them, and whether a row's pages are
        entered backward: the second class of a group shares the entries of the first."""
        classes = (
            (layout, index > 0) for group in self.classes for index, layout in enumerate(group)
        )
        recent, fixed = (((layout, False) for layout in some) for some in (self.recent, self.fixed))
        return (*recent, *classes, *fixed)

    @property
    def class_tables(self) -> int:
        """Number of tables of classes."""
        return sum(len(group) for group in self.classes)


def _distinct(layouts: Iterable[T]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(layouts))
