# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch.from_numpy has no type hints; numpy's comparisons lack types.
"""Page selection of decode attention: page summaries, and the pages that each request reads.

Summaries are made from the pages when a request joins, and again of each page that changes, so a
summary depends only on the bytes of its page: a takeover worker selects the same pages. Summaries
are in the memory of the worker, in the order of the page tables, not beside the pages: handles,
transports and tiers do not carry them.
"""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.config import SelectionConfig
from triptych.core.head_budgets import BUDGET_MAX
from triptych.core.pages import PagePlan
from triptych.core.table_layouts import TableLayouts
from triptych.kernels import PageLists, Rule, Summaries, select_pages, summarize_pages
from triptych.kernels.select import TILE_PAGES, WHOLE, KeyCodebooks, Kind, tile_bytes
from triptych.kvpool import Arena
from triptych.workers.decode.codebook_file import load_codebooks
from triptych.workers.decode.window import RetirementPlan
from triptych.workers.kv.block_table import Sections, SectionTable
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.method_tables import MethodTables

Ids = NDArray[np.int32]
Ids64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

ALL_TOKENS = (1 << 31) - 1
WORTH = 2
"""Selection pays off only where at most one page in so many is read (measured)."""
DENSE_LAYERS = 2
"""First layers that read every page, where there are no head budgets."""
PAGES_AT_ONCE = 4096
"""Pages that are summarized, and read from a disk, together: they must all fit into memory."""
MAP_NORESERVE = 0x4000
"""Linux on x86 and Arm; Python names it from 3.13 on."""


class TableSummaries:
    """Summaries of the full pages of one table, for all slots, layers and KV heads."""

    def __init__(
        self,
        kind: Kind,
        rotated: bool,
        arena: Arena,
        memory: DevicePages,
        table: SectionTable,
        codebooks: KeyCodebooks | None = None,
    ) -> None:
        self._arena, self._memory, self.table = arena, memory, table
        layers, slots, kv_heads, width = table.pages.shape
        head_dim = table.layout.head_dim
        room = table.layout.tokens
        tile = tile_bytes(kind, head_dim, room)
        shape = (slots, layers, kv_heads, -(-width // TILE_PAGES), tile)
        self._slot_bytes = int(np.prod(shape[1:]))
        self._unused = _unused_memory(slots * self._slot_bytes) if memory.device.is_host else None
        every = (
            torch.zeros(shape, dtype=torch.uint8, device=memory.device.name)
            if self._unused is None
            else torch.frombuffer(self._unused, dtype=torch.uint8).view(shape)
        )
        self.of_layer = [
            Summaries(
                *(kind, every[:, layer], head_dim, rotated, room),
                codebooks and codebooks.of_layer(layer),
            )
            for layer in range(layers)
        ]
        of_all = every.view(slots * layers, *shape[2:])
        self._all = Summaries(kind, of_all, head_dim, rotated, room, codebooks)

    def add(self, slot: int) -> None:
        """Summarize all full pages of a slot."""
        full = self.table.tokens[:, slot] // np.int32(self.table.layout.tokens)
        column = np.arange(self.table.width, dtype=np.int32)
        self._write(slot, column < full[..., None])

    def renew(self, slot: int, places: Ids) -> None:
        """Summarize the full pages that hold some places of each row, [layers, kv_heads, n]."""
        full = self.table.tokens[:, slot] // np.int32(self.table.layout.tokens)
        touched: Mask = np.zeros((*full.shape, self.table.width + 1), np.bool_)
        column = np.where(places >= 0, places // self.table.layout.tokens, self.table.width)
        np.put_along_axis(touched, column.astype(np.int64), True, axis=2)
        column = np.arange(self.table.width, dtype=np.int32)
        self._write(slot, touched[..., :-1] & (column < full[..., None]))

    def drop(self, slot: int) -> None:
        """Return the memory of a slot to the system, in whole system pages, on the host only."""
        if self._unused is None:
            return
        start, end = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = end // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start:
            self._unused.madvise(mmap.MADV_DONTNEED, start, end - start)

    def _write(self, slot: int, wanted: Mask) -> None:
        """Summarize pages of a slot, [layers, kv_heads, columns]."""
        layer, head, column = np.nonzero(wanted)
        if not len(column):
            return
        layers, _, kv_heads, _ = self.table.pages.shape
        rows = ((slot * layers + layer) * kv_heads + head).astype(np.int32)
        pages, columns = self.table.pages[:, slot][wanted], column.astype(np.int32)
        for start in range(0, len(pages), PAGES_AT_ONCE):
            some = slice(start, start + PAGES_AT_ONCE)
            self._arena.will_need(pages[some])
            parts = (self._memory.device.put(part[some]) for part in (pages, rows, columns))
            named, *places = parts
            summarize_pages(self._memory.near, self.table.layout, named, self._all, *places)


@dataclass(frozen=True, eq=False)
class StepChoice:
    """The page lists of one decode step."""

    owner: "Selector"
    slots: Tensor
    positions: Tensor
    due: Mapping[Rule, Tensor]
    """By rule: the list to select again for each request, or -1; int32 [R]."""
    read: Tensor
    """The list that each request reads, or -1 for all pages; int32 [R]."""

    def lists(self, layer: int, query: Tensor, *, scale: float, window: int) -> PageLists | None:
        """Lists of pages for a layer's queries [R, H, d]; None: all requests read all pages.

        A layer with a sliding window reads all of its few pages.
        """
        owner = self.owner
        if layer < owner.dense_layers or window > 0:
            return None
        known = owner.of_layer[layer]
        for rule, due in self.due.items():
            select_pages(
                query,
                owner.sections.of_layer[layer],
                known.summaries,
                self.slots,
                self.positions,
                rule,
                known.lists.of(due),
                scale=scale,
                head_budgets=known.head_budgets,
            )
        return known.lists.of(self.read)


@dataclass(frozen=True, eq=False)
class LayerChoice:
    """Summaries, lists and head budgets of a layer."""

    summaries: list[Summaries | None]
    """One for each table; None for the one of the window."""
    lists: PageLists
    head_budgets: Tensor | None
    """Head budgets, int32 [kv_heads, steps]; None: all heads have the same."""


class Selector:
    """Selects the pages that the requests of a decode worker read."""

    def __init__(
        self,
        config: SelectionConfig,
        kind: Kind,
        plan: PagePlan,
        arena: Arena,
        memory: DevicePages,
        sections: Sections,
    ) -> None:
        """Where tokens are compressed recent pages are the sink and the window, read in any case:
        they have no summaries.
        """
        tables = sections.tables
        self.config, self.sections, self.tables, self._memory = config, sections, tables, memory
        dense = config.dense_layers
        self.dense_layers = (0 if plan.head_budgets else DENSE_LAYERS) if dense == "auto" else dense
        rotated = plan.policy.kv_rotation.has_rotated_keys
        codebooks = None
        if kind == "a2ats":
            codebooks = load_codebooks(Path(config.codebooks), plan, memory.device.name)
        num_recent = len(TableLayouts.of(plan).recent)
        retiring = {one.recent for one in plan.by_method.values() if one.compresses}
        self._summaries = [
            None
            if at < num_recent and table.layout in retiring
            else TableSummaries(kind, rotated, arena, memory, table, codebooks)
            for at, table in enumerate(tables)
        ]
        """One for each table; None for those of recent pages."""
        layers, slots, kv_heads, _ = tables[0].pages.shape
        most = sum(table.width for table in tables)
        self.ordinals = memory.device.put(np.zeros((layers, slots, kv_heads, most), np.int32))
        self.counts = memory.device.put(np.zeros((layers, slots, kv_heads), np.int32))
        budgets = memory.device.put(_head_budgets(plan)) if plan.head_budgets else None
        nobody = memory.device.put(np.zeros(0, np.int32))
        self.of_layer = [
            LayerChoice(
                summaries=[part and part.of_layer[layer] for part in self._summaries],
                lists=PageLists(self.ordinals[layer], self.counts[layer], nobody),
                head_budgets=None if budgets is None else budgets[layer],
            )
            for layer in range(layers)
        ]
        self._is_chosen: Mask = np.zeros(slots, np.bool_)
        """Slots whose lists are up to date with their pages."""
        self._rules: list[Rule | None] = [None] * slots
        """Selection rule by slot; None: the request reads all pages."""

    @classmethod
    def of(
        cls,
        config: SelectionConfig,
        plan: PagePlan,
        arena: Arena,
        memory: DevicePages,
        sections: Sections,
    ) -> "Selector | None":
        """None if every page is read."""
        if config.method == "none":
            return None
        return cls(config, config.method, plan, arena, memory, sections)

    # ---------------------------------------------------------------- changes of a slot

    def join(self, slot: int, wanted: SelectionConfig | None) -> None:
        """Summarize all pages of a request whose tables are filled.

        ``wanted``: its page selection; None: it reads all pages.
        """
        for part in self._summaries if wanted else ():
            if part is not None:
                part.add(slot)
        self._is_chosen[slot] = False
        self._rules[slot] = None if wanted is None else _rule(wanted)

    def leave(self, slot: int) -> None:
        for part in self._summaries:
            if part is not None:
                part.drop(slot)

    def fill(self, slot: int, tables: MethodTables) -> None:
        """Summarize the newest raw page of each row, which is full now."""
        part = self._summaries[tables.places[0]]
        if part is not None:
            part.renew(slot, part.table.tokens[:, slot, :, None] - np.int32(1))
        self._is_chosen[slot] = False

    def retire(self, retirement: RetirementPlan, tables: MethodTables) -> None:
        """Summarize the high and low pages that a retirement has written."""
        classes = tables.places[1 : 1 + len(tables.classes.layouts)]
        written = retirement.plan.places, retirement.plan.downgraded_places
        for index, slot in enumerate(retirement.slots.tolist()):
            for place, tokens in zip(classes, written, strict=False):
                part = self._summaries[place]
                if part is not None:
                    part.renew(slot, tokens[:, index])
            self._is_chosen[slot] = False

    # ---------------------------------------------------------------- a step

    def step(self, slots: Ids, positions: Ids, scored: Ids64) -> StepChoice | None:
        """Decide which requests select pages in this step; None if every one reads all pages.

        Requests read all pages if their tokens are scored in this step (``scored``: their
        indices), as pages that are not read receive no score, or if the budget is more than half.
        """
        put = self._memory.device.put
        rules = [self._rules[int(slot)] for slot in slots]
        budgets = np.array([rule.budget_tokens if rule else ALL_TOKENS for rule in rules], np.int64)
        reads_all: Mask = positions < WORTH * budgets
        reads_all[scored] = True
        if reads_all.all():
            return None
        every = self.config.reselect_every
        due: Mask = ~reads_all & (~self._is_chosen[slots] | (positions % every == 0))
        self._is_chosen[slots[due]] = True
        return StepChoice(
            owner=self,
            slots=put(slots),
            positions=put(positions),
            due={
                rule: put(np.where(mine, slots, np.int32(-1)))
                for rule in dict.fromkeys(rules)
                if rule and (mine := due & np.array([other == rule for other in rules])).any()
            },
            read=put(np.where(reads_all, np.int32(-1), slots)),
        )


def _head_budgets(plan: PagePlan) -> Ids:
    """The head budgets of a plan as ``select_pages`` takes them, [layers, kv_heads, steps]."""
    parts = np.frombuffer(plan.head_budgets, np.uint8).astype(np.int64) * WHOLE
    rounded_up = -(-parts // BUDGET_MAX)
    geometry = plan.geometry
    return rounded_up.reshape(geometry.layers, geometry.kv_heads, -1).astype(np.int32)


def _rule(config: SelectionConfig) -> Rule:
    return Rule.of(
        config.keep_fraction,
        config.budget_tokens,
        config.sink_tokens,
        config.window_tokens,
        config.omitted_mass,
    )


def _unused_memory(size: int) -> mmap.mmap:
    """Zeroed memory that is not allocated until it is written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    return mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=flags)
