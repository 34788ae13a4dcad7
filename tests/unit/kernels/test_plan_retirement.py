"""Tests of ``plan_retirement`` against DiffKV's Algorithm 1, applied token after token."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.core.layout import FORMATS, PageLayout
from triptych.kernels import Retirement, Section, plan_retirement
from triptych.kernels.pages import segments

BACKENDS = [name for name in plan_retirement.backends if name != "cuda"]
PAGE_BYTES, HEAD_DIM = 1792, 64
HIGH, LOW = (PageLayout(FORMATS[name], HEAD_DIM, PAGE_BYTES) for name in ("k8v4", "k4v2"))
HEADS, COUNT, WINDOW = 2, 13, 40
SCALES = (1.0, 1.4)
"""Each head row has thresholds of its own."""
ORDER = {"dropped": 0, "low": 1, "high": 2}

Token = tuple[int, float]


@dataclass
class Row:
    """One head row: position and score of its tokens, in the order of their places."""

    high: list[Token] = field(default_factory=list[Token])
    low: list[Token] = field(default_factory=list[Token])

    def take(self, new: Token, now: int, leaving: int, is_high: float, is_low: float) -> None:
        """Algorithm 1 for one new token; the one at position ``leaving`` leaves the window."""

        def mean(one: Token) -> float:
            return float(np.float32(one[1]) / np.float32(now - one[0]))

        def least(tokens: list[Token], places: list[int]) -> int | None:
            return min(places, key=lambda place: (mean(tokens[place]), place), default=None)

        outside = [place for place, one in enumerate(self.high) if one[0] <= leaving]
        candidate = next((place for place in outside if self.high[place][0] == leaving), None)
        if candidate is None:
            self.high.append(new)
        elif mean(self.high[candidate]) >= is_high:
            victim = least(self.high, outside)
            assert victim is not None
            gone = self.high[victim]
            if mean(gone) >= is_high:
                self.high.append(new)
                return
            self.high[victim] = new
            if mean(gone) >= is_low:
                self.low.append(gone)
        elif mean(self.high[candidate]) >= is_low:
            gone, self.high[candidate] = self.high[candidate], new
            least_low = least(self.low, list(range(len(self.low))))
            if least_low is not None and mean(self.low[least_low]) < is_low:
                self.low[least_low] = gone
            else:
                self.low.append(gone)
        else:
            self.high[candidate] = new


class Cache:
    """The pages of one slot, updated by plans; only scores and positions are moved."""

    def __init__(self, pages: int) -> None:
        self.arena = torch.randint(0, 256, (pages, PAGE_BYTES), dtype=torch.uint8)
        table = torch.arange(pages, dtype=torch.int32)
        self.table = table[: pages // HEADS * HEADS].view(1, HEADS, -1)
        self.tokens = torch.zeros(1, HEADS, 2, dtype=torch.int32)

    def section(self, kind: int) -> Section:
        layout, tokens = (HIGH, LOW)[kind], self.tokens[..., kind].contiguous()
        return Section(layout, self.table, tokens, backward=kind == 1)

    def slot_of(self, head: int, kind: int, place: int) -> tuple[int, int]:
        column, row = divmod(place, (HIGH, LOW)[kind].tokens)
        return int(self.table[0, head, -1 - column if kind else column]), row

    def read(self, head: int, kind: int, place: int) -> Token:
        parts, (page, row) = (
            segments(self.arena, (HIGH, LOW)[kind]),
            self.slot_of(head, kind, place),
        )
        return int(parts.positions[page, row]), float(parts.scores[page, row])

    def write(self, head: int, kind: int, place: int, token: Token) -> None:
        parts, (page, row) = (
            segments(self.arena, (HIGH, LOW)[kind]),
            self.slot_of(head, kind, place),
        )
        parts.positions[page, row], parts.scores[page, row] = token

    def row(self, head: int) -> Row:
        counts = self.tokens[0, head].tolist()
        high, low = ([self.read(head, k, i) for i in range(counts[k])] for k in (0, 1))
        return Row(high, low)

    def apply(self, head: int, plan: Retirement[Tensor], coming: list[Token]) -> None:
        """Apply a plan: first move the downgraded tokens, then store the new ones."""
        parts = plan.places, plan.downgraded, plan.downgraded_places, plan.counts
        places, downgraded, downgraded_places, counts = (part[0, head].tolist() for part in parts)
        down = [
            (self.read(head, 0, downgraded_place), place)
            for downgraded_place, place in zip(downgraded, downgraded_places, strict=True)
            if place >= 0
        ]
        for token, place in down:
            self.write(head, 1, place, token)
        for token, place in zip(coming, places, strict=True):
            self.write(head, 0, place, token)
        self.tokens[0, head] = torch.tensor(counts)


def random_scores(generator: np.random.Generator, positions: list[int], now: int) -> list[float]:
    """Scores with means around the thresholds, some of them equal."""
    levels = generator.choice([0.0, 0.3, 0.9, 1.0, 1.1, 4.0], len(positions))
    means = levels * generator.choice([1.0, 1.5], len(positions)) / now
    return (means * (now - np.array(positions))).astype(np.float32).tolist()


def call(
    backend: str, cache: Cache, now: int, first_leaving: int, limits: list[tuple[float, float]]
) -> Retirement[Tensor]:
    return plan_retirement.on(backend)(
        cache.arena,
        cache.section(0),
        cache.section(1),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([now], dtype=torch.int32),
        torch.tensor([first_leaving], dtype=torch.int32),
        torch.tensor([limits], dtype=torch.float64),
        count=COUNT,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("alpha_high", "alpha_low", "rounds"),
    [
        (1.0, 0.5, 65),
        (1.0, 1.0, 65),
        (3.0, 0.0, 32),  # all tokens stay, so that a round takes as long as all before it
        pytest.param(3.0, 0.0, 65, marks=pytest.mark.conformance),
    ],
)
def test_a_plan_for_several_tokens_equals_algorithm_1_token_after_token(
    backend: str, alpha_high: float, alpha_low: float, rounds: int
) -> None:
    """8,400 tokens: three settings, two backends, two head rows, rounds of 13."""
    generator = np.random.default_rng(int(alpha_high * 10 + alpha_low * 100))
    cache = Cache(pages=HEADS * (rounds * COUNT // HIGH.tokens + 3))
    rows = [Row() for _ in range(HEADS)]
    ever = [dict[int, str]() for _ in range(HEADS)]
    for turn in range(rounds):
        first, now = turn * COUNT, (turn + 1) * COUNT + 20
        first_leaving, coming = first - WINDOW, list(range(first, first + COUNT))
        limits = [
            (min(1.0, scale * alpha_high / now), min(1.0, scale * alpha_low / now))
            for scale in SCALES
        ]
        for head, row in enumerate(rows):
            _shake_scores(generator, cache, row, head, now)
        plan = call(backend, cache, now, first_leaving, limits)
        for head, row in enumerate(rows):
            scores = random_scores(generator, coming, now)
            new = list(zip(coming, scores, strict=True))
            before = len(row.high) + len(row.low)
            for offset, token in enumerate(new):
                row.take(token, now, first_leaving + offset, *limits[head])
            cache.apply(head, plan, new)
            after = cache.row(head)
            assert sorted(after.high) == sorted(row.high)
            assert sorted(after.low) == sorted(row.low)
            assert len(after.high) + len(after.low) - before <= COUNT
            _check_no_token_went_up(ever[head], after, first + COUNT)
            rows[head] = after


def _shake_scores(
    generator: np.random.Generator, cache: Cache, row: Row, head: int, now: int
) -> None:
    """Set new random scores of all tokens, as decode steps do."""
    for kind, tokens in enumerate((row.high, row.low)):
        positions = [position for position, _ in tokens]
        for place, score in enumerate(random_scores(generator, positions, now)):
            tokens[place] = (positions[place], score)
            cache.write(head, kind, place, tokens[place])


def _check_no_token_went_up(ever: dict[int, str], row: Row, seen: int) -> None:
    """Check that no token moved to a higher class and that dropped tokens stay dropped."""
    now = {position: "high" for position, _ in row.high}
    now |= {position: "low" for position, _ in row.low}
    assert len(now) == len(row.high) + len(row.low)
    assert all(position in now for position in range(max(0, seen - WINDOW), seen))
    for position in range(seen):
        name = now.get(position, "dropped")
        assert ORDER[name] <= ORDER[ever.get(position, "high")]
        ever[position] = name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_thresholds_all_tokens_stay_high(backend: str) -> None:
    cache = Cache(pages=10)
    cache.tokens[..., 0] = 30
    for head in range(HEADS):
        for place in range(30):
            cache.write(head, 0, place, (place, 0.0))
    plan = call(backend, cache, now=100, first_leaving=10, limits=[(0.0, 0.0)] * HEADS)
    assert plan.places.tolist() == [[list(range(30, 30 + COUNT))] * HEADS]
    assert plan.downgraded.eq(-1).all()
    assert plan.downgraded_places.eq(-1).all()
    assert plan.counts.tolist() == [[[30 + COUNT, 0]] * HEADS]


@pytest.mark.parametrize("backend", BACKENDS)
def test_low_tokens_that_are_not_tracked_stay(backend: str) -> None:
    """Their pages are not read: the plan is that of low tokens above the low threshold."""
    generator = np.random.default_rng()
    cache, now = Cache(pages=30), 140
    cache.tokens[..., 0], cache.tokens[..., 1] = 60, 70
    for head in range(HEADS):
        for kind, count in enumerate(cache.tokens[0, head].tolist()):
            positions = list(range(kind * 60, kind * 60 + count))
            scores = random_scores(generator, positions, now)
            for place, position in enumerate(positions):
                score = 1e6 if kind else scores[place]
                cache.write(head, kind, place, (position, score))
    limits = torch.tensor([[(1.0 / now, 0.5 / now)] * HEADS], dtype=torch.float64)
    high, low = cache.section(0), cache.section(1)
    slots, seen, first = (torch.tensor([n], dtype=torch.int32) for n in (0, now, 20))
    untracked = replace(low, layout=replace(LOW, is_tracked=False))
    plans = [
        plan_retirement.on(backend)(
            cache.arena, high, one, slots, seen, first, limits, count=COUNT
        ).numbers
        for one in (low, untracked)
    ]
    assert torch.equal(*plans)
    assert (plans[0][..., 1] > 70).any()
