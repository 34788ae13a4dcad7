"""The page tables of each method in a decode worker, over one set of arrays for all methods.

Attention reads all tables of a slot, and a slot has pages in those of its method alone. Methods
share the tables of the formats that they have in common, so a step reads requests of different
methods in one call, out of one pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.core.table_layouts import TableLayouts
from triptych.workers.kv.block_table import PageTable, SectionTable

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class MethodTables:
    """The tables that requests of one method use."""

    plan: PagePlan
    recent: PageTable
    """Pages to which new tokens go: recent ones, or raw ones if the method keeps 16 bits."""
    classes: PageTable
    """Pages of the method's classes; without tables if it keeps 16 bits."""
    fixed: SectionTable | None
    """Read-only pages of cached prefixes; None if there are none."""
    places: tuple[int, ...]
    """Indices of ``sections`` among the sections of the worker."""

    @cached_property
    def tables(self) -> list[SectionTable]:
        """The table of recent pages, then those of the classes."""
        return [*self.recent.tables, *self.classes.tables]

    @cached_property
    def sections(self) -> list[SectionTable]:
        """All tables that attention reads for a slot of this method: ``tables``, then ``fixed``."""
        return self.tables if self.fixed is None else [*self.tables, self.fixed]


class WorkerTables:
    """All tables of a decode worker, and those that each method uses."""

    def __init__(
        self,
        plan: PagePlan,
        recent: Sequence[tuple[Ids, Ids]],
        class_entries: Ids,
        class_tokens: Ids,
        fixed: Sequence[tuple[Ids, Ids]],
    ) -> None:
        """Tables over the arrays of a checkpoint.

        Shapes:  recent: for each layout of ``TableLayouts`` entries [layers, slots, kv_heads,
                 entries of a row] and tokens [1, layers, slots, kv_heads]; fixed: likewise, tokens
                 [layers, slots, kv_heads]; class_entries [layers, slots, kv_heads, entries];
                 class_tokens [tables of all groups, layers, slots, kv_heads]
        """
        self._layouts = layouts = TableLayouts.of(plan)
        self._class_entries, self._class_tokens = class_entries, class_tokens
        self._recent = [
            PageTable([layout], *arrays)
            for layout, arrays in zip(layouts.recent, recent, strict=True)
        ]
        self._fixed = [
            SectionTable(layout, *arrays)
            for layout, arrays in zip(layouts.fixed, fixed, strict=True)
        ]
        self._groups = dict[tuple[PageLayout, ...], tuple[PageTable, int]]()
        """Tables of some classes, and the index of the first one among the tables of classes."""
        first = 0
        for group in layouts.classes:
            self._groups[group] = self._class_table(group, first), first
            self._groups.setdefault(group[:1], (self._class_table(group[:1], first), first))
            first += len(group)
        class_tables = (self._groups[group][0] for group in layouts.classes)
        self.sections = [
            table for each in (*self._recent, *class_tables) for table in each.tables
        ] + self._fixed
        """All tables that attention reads; the fixed ones last."""
        self.num_recent, self.num_fixed = len(self._recent), len(self._fixed)
        self.methods = [self._of_method(one) for one in plan.by_method.values()]
        """In the order of ``PagePlan.by_method``."""

    def _class_table(self, group: tuple[PageLayout, ...], first: int) -> PageTable:
        return PageTable(group, self._class_entries, self._class_tokens[first : first + len(group)])

    def _of_method(self, plan: PagePlan) -> MethodTables:
        """The tables of a method; methods with equal formats get the same objects."""
        recent_at, places = self._layouts.recent.index(plan.recent), list[int]()
        classes = self._class_table((), 0)
        if plan.classes:
            classes, first = self._groups[plan.classes]
            places = [len(self._recent) + first + index for index in range(len(plan.classes))]
        fixed = None
        if plan.has_fixed_pages:
            index = self._layouts.fixed.index(plan.high)
            fixed = self._fixed[index]
            places.append(len(self.sections) - len(self._fixed) + index)
        recent = self._recent[recent_at]
        return MethodTables(plan, recent, classes, fixed, (recent_at, *places))
