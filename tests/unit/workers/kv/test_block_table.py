"""Free list, page tables and window together: no page is lost or named twice, for 10,000 rounds."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from triptych.core.errors import PoolExhausted
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.kernels.pages import segments
from triptych.kvpool.pool.free_list import FreeList
from triptych.workers.decode.checkpoint import Checkpoint
from triptych.workers.decode.window import Window
from triptych.workers.device import CPU, read_together
from triptych.workers.kv.block_table import PageTable, Sections
from triptych.workers.kv.device_pages import DevicePages
from triptych.workers.kv.handle_codec import small_pages

SLOTS, LONGEST, PAGES = 3, 200, 40


def policy(alpha_high: float, alpha_low: float, window: int) -> Policy:
    return Policy(
        name="diffkv",
        high_format="k8v4",
        low_format="k4v2",
        alpha_high=alpha_high,
        alpha_low=alpha_low,
        window_tokens=window,
        high_window_tokens=30,
        score_every=1,
    )


class Slots:
    """Requests that come, grow and go, with the pages of one free list."""

    def __init__(self, plan: PagePlan) -> None:
        self.plan = plan
        self.free = FreeList(PAGES)
        self.arena = torch.zeros(PAGES, plan.page_bytes, dtype=torch.uint8)
        self.checkpoint = checkpoint = Checkpoint.create(plan, None, SLOTS, LONGEST)
        memory = DevicePages(CPU, self.arena, self.arena)
        self.method = checkpoint.tables.methods[0]
        self.window = Window(memory, checkpoint, self.method, Sections(checkpoint.sections, CPU))
        self.tables = self.method.tables
        self.recent, self.high, self.low = self.tables
        self.seen = dict[int, int]()
        self.taken = {slot: list[int]() for slot in range(SLOTS)}
        self.unused = {slot: list[int]() for slot in range(SLOTS)}
        """Empty recent pages of each slot."""

    def step(self, slot: int) -> None:
        """One more token; raises PoolExhausted."""
        self.seen.setdefault(slot, 0)
        at = np.array([slot], np.int32)
        if self.window.is_full(int(at[0])):
            alphas = self.window.plan.policy.answer_thresholds
            plan = self.window.prepare(at, [self.seen[slot]], alphas)
            retirement = self.window.planned(at, plan.numpy())
            self._grow(self.method.classes, at, retirement.plan.counts)
            self.unused[slot] += self.window.apply(retirement)[0].tolist()
        if self.recent.length(slot) % self.recent.layout.tokens == 0:
            self._grow_recent(self.method.recent, at)
        column, row = divmod(int(self.recent.tokens[0, slot, 0]), self.recent.layout.tokens)
        self.recent.tokens[:, slot] += 1
        parts = segments(self.arena, self.plan.recent)
        for page in self.recent.pages[:, slot, :, column].ravel().tolist():
            parts.positions[page, row] = self.seen[slot]
            parts.scores[page, row] = random.choice([0.0, 0.1, 0.5, 5.0])
        self.seen[slot] += 1

    def end(self, slot: int) -> None:
        self.free.free(np.array(self.taken[slot], np.int32))
        for table in self.tables:
            table.clear(slot)
        self.taken[slot], self.unused[slot] = [], []
        self.seen.pop(slot, None)

    def held(self, slot: int) -> list[int]:
        """Every page of the pool that a table names, or that has unused recent pages."""
        recent, parts = self.recent.read(slot)[1].tolist(), self.plan.recent.parts
        small = [*recent, *self.unused[slot]]
        assert len(set(small)) == len(small), "no small page is named twice"
        pages = {page // parts for page in small}
        assert len(small) == parts * len(pages), "no small page is lost"
        named = [*recent, *self.checkpoint.unused_pages(slot).tolist()]
        assert {page // parts for page in named} == {page // parts for page in recent}
        ids = [*pages]
        for table in self.tables[1:]:
            ids += table.read(slot)[1].tolist()
        return ids

    def positions(self, slot: int, head: int) -> list[int]:
        found = list[int]()
        for table in self.tables:
            parts = segments(self.arena, table.layout)
            for place in range(int(table.tokens[0, slot, head])):
                column, row = divmod(place, table.layout.tokens)
                found.append(int(parts.positions[int(table.pages[0, slot, head, column]), row]))
        return found

    def _grow_recent(self, table: PageTable, at: np.ndarray) -> None:
        slot, wanted = int(at[0]), table.tokens_plus_one(at)
        lacking, parts = int(table.count_lacking(at, wanted)[0]), self.plan.recent.parts
        more = self.plan.recent.pool_pages(max(0, lacking - len(self.unused[slot])))
        fresh = self.free.allocate(more)
        self.taken[slot] += fresh.tolist()
        self.unused[slot] += small_pages(fresh, parts).tolist()
        ids = np.array(self.unused[slot][:lacking], np.int32)
        del self.unused[slot][:lacking]
        table.append_pages(at, wanted, ids, np.zeros(1, np.int64))

    def _grow(self, table: PageTable, at: np.ndarray, tokens: np.ndarray) -> None:
        fresh = self.free.allocate(int(table.count_lacking(at, tokens)[0]))
        self.taken[int(at[0])] += fresh.tolist()
        table.append_pages(at, tokens, fresh, np.zeros(1, np.int64))


@pytest.mark.parametrize(
    ("alpha_high", "alpha_low", "window"), [(0.0, 0.0, 20), (1.0, 0.3, 20), (8.0, 0.0, 0)]
)
def test_no_page_is_lost_and_none_is_named_twice(
    alpha_high: float, alpha_low: float, window: int
) -> None:
    """The pool is too small for all slots at their longest, so it runs dry again and again."""
    random.seed(int(alpha_high * 10 + window))
    geometry = Geometry(layers=1, kv_heads=2, head_dim=64)
    slots = Slots(
        PagePlan(geometry, 1792, policy(alpha_high, alpha_low, window), reads_low_tokens=True)
    )
    dry = rounds = 0
    while rounds < 10_000 // 3 + 1:
        slot = random.randrange(SLOTS)
        before = slots.seen.get(slot, 0)
        if before == LONGEST or random.random() < 0.003:
            slots.end(slot)
        else:
            try:
                slots.step(slot)
            except PoolExhausted:
                dry += 1
                slots.end(slot)
        rounds += 1
        assert sorted(slots.held(slot)) == sorted(slots.taken[slot])
        held = [page for each in range(SLOTS) for page in slots.held(each)]
        assert sorted([*held, *slots.free.peek().tolist()]) == list(range(PAGES))
        if rounds % 50 == 0 and slots.seen.get(slot):
            _check_positions(slots, slot, alpha_low)
    assert dry > 3


def _check_positions(slots: Slots, slot: int, alpha_low: float) -> None:
    seen = slots.seen[slot]
    for head in range(2):
        found = slots.positions(slot, head)
        assert len(found) == len(set(found))
        assert set(range(max(0, seen - 30), seen)) <= set(found)
        if alpha_low == 0:
            assert sorted(found) == list(range(seen))


def test_thresholds_of_answers_are_scaled_by_head_row() -> None:
    random.seed(5)
    geometry = Geometry(layers=1, kv_heads=2, head_dim=64)
    scaled = replace(policy(1.0, 0.0, 20), alpha_scales=(0.0, 1e6))
    slots = Slots(PagePlan(geometry, 1792, scaled, reads_low_tokens=True))
    for _ in range(LONGEST):
        slots.step(0)
    assert slots.low.tokens[0, 0, 0] == 0
    assert slots.low.tokens[0, 0, 1] > 60


def test_plans_are_read_together() -> None:
    given = [
        torch.arange(24, dtype=torch.int32).reshape(2, 3, 4),
        torch.ones(5, 1, dtype=torch.int32),
    ]
    for tensors in given[:1], given:
        found = read_together(tensors)
        assert [one.tolist() for one in found] == [one.tolist() for one in tensors]
