"""Algorithm 1 token after token, as the paper writes it, against the plan for whole pages."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from triptych.core.layout import FORMATS, PageLayout
from triptych.kernels import Section, plan_retirement
from triptych.kernels.pages import segments

BACKENDS = [name for name in plan_retirement.backends if name != "cuda"]
PAGE_BYTES, HEAD_DIM = 1792, 64
RAW, HIGH, LOW = (
    PageLayout(FORMATS[name], HEAD_DIM, PAGE_BYTES) for name in ("fp16", "k8v4", "k4v2")
)
HEADS = 2
ORDER = {"dropped": 0, "low": 1, "high": 2}


@dataclass
class Row:
    """One head row: (position, score) of its tokens, in the order of their places."""

    high: list[tuple[int, float]] = field(default_factory=list)
    low: list[tuple[int, float]] = field(default_factory=list)

    def take(self, token: tuple[int, float], now: int, is_high: float, is_low: float) -> None:
        """Algorithm 1 for one token that leaves the window, with its cases in the paper's order."""

        def mean(one: tuple[int, float]) -> float:
            return float(np.float32(one[1]) / np.float32(now - one[0]))

        def least(tokens: list[tuple[int, float]]) -> int:
            return min(range(len(tokens)), key=lambda place: (mean(tokens[place]), place))

        if mean(token) >= is_high:
            victim = least(self.high) if self.high else -1
            if victim < 0 or mean(self.high[victim]) >= is_high:
                self.high.append(token)
                return
            gone, self.high[victim] = self.high[victim], token
            if mean(gone) >= is_low:
                self.low.append(gone)
        elif mean(token) >= is_low:
            outcast = least(self.low) if self.low else -1
            if outcast >= 0 and mean(self.low[outcast]) < is_low:
                self.low[outcast] = token
            else:
                self.low.append(token)


class Cache:
    """The pages of one slot, kept as the plan says; only scores and positions are moved."""

    def __init__(self, pages: int) -> None:
        self.arena = torch.randint(0, 256, (pages, PAGE_BYTES), dtype=torch.uint8)
        self.leaving = torch.arange(HEADS, dtype=torch.int32)[None]
        table = torch.arange(HEADS, pages, dtype=torch.int32)
        self.table = table[: len(table) // HEADS * HEADS].view(1, HEADS, -1)
        self.tokens = torch.zeros(1, HEADS, 2, dtype=torch.int32)

    def section(self, kind: int) -> Section:
        layout, tokens = (HIGH, LOW)[kind], self.tokens[..., kind].contiguous()
        return Section(layout, self.table, tokens, backward=kind == 1)

    def cell(self, head: int, kind: int, place: int) -> tuple[int, int]:
        layout = (HIGH, LOW)[kind]
        column = place // layout.tokens
        return int(self.table[0, head, -1 - column if kind else column]), place % layout.tokens

    def read(self, head: int, kind: int, place: int) -> tuple[int, float]:
        parts, (page, row) = segments(self.arena, (HIGH, LOW)[kind]), self.cell(head, kind, place)
        return int(parts.positions[page, row]), float(parts.scores[page, row])

    def write(self, head: int, kind: int, place: int, token: tuple[int, float]) -> None:
        parts, (page, row) = segments(self.arena, (HIGH, LOW)[kind]), self.cell(head, kind, place)
        parts.positions[page, row], parts.scores[page, row] = token

    def row(self, head: int) -> Row:
        counts = self.tokens[0, head].tolist()
        lists = [[self.read(head, kind, i) for i in range(counts[kind])] for kind in (0, 1)]
        return Row(*lists)


def random_scores(generator: np.random.Generator, count: int, now: int) -> list[float]:
    """Sums that give means around the thresholds, some of them equal."""
    means = generator.choice([0.0, 0.3, 0.9, 1.0, 1.1, 4.0], count) * generator.random(count) * 2
    return (means / now * generator.integers(1, now + 1, count)).astype(np.float32).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("alpha_high", "alpha_low"), [(1.0, 0.3), (3.0, 0.0), (1.0, 1.0)])
def test_pages_at_once_are_algorithm_1_token_after_token(
    backend: str, alpha_high: float, alpha_low: float
) -> None:
    """In all 10,000 tokens: 6 cases of 128 pages of 13 of them or more."""
    generator = np.random.default_rng(int(alpha_high * 10 + alpha_low * 100))
    rounds = -(-10_000 // (6 * HEADS * RAW.tokens))
    cache = Cache(pages=2 + HEADS * (2 + rounds * RAW.tokens // HIGH.tokens + 1))
    rows = [Row() for _ in range(HEADS)]
    ever = [dict[int, str]() for _ in range(HEADS)]
    raw = segments(cache.arena, RAW)
    for turn in range(rounds):
        now = (turn + 1) * RAW.tokens + 64
        first = turn * RAW.tokens
        for head in range(HEADS):
            raw.positions[head] = torch.arange(first, first + RAW.tokens)
            raw.scores[head] = torch.tensor(random_scores(generator, RAW.tokens, now))
            _shake_scores(generator, cache, rows[head], head, now)
        plan = plan_retirement.on(backend)(
            cache.arena,
            RAW,
            cache.leaving,
            cache.section(0),
            cache.section(1),
            torch.zeros(1, dtype=torch.int32),
            torch.tensor([now], dtype=torch.int32),
            alpha_high=alpha_high,
            alpha_low=alpha_low,
        )
        for head in range(HEADS):
            leaving = list(
                zip(raw.positions[head].tolist(), raw.scores[head].tolist(), strict=True)
            )
            before = len(rows[head].high) + len(rows[head].low)
            for token in leaving:
                rows[head].take(token, now, min(1.0, alpha_high / now), min(1.0, alpha_low / now))
            _apply(cache, head, plan, leaving)
            after = cache.row(head)
            assert sorted(after.high) == sorted(rows[head].high)
            assert sorted(after.low) == sorted(rows[head].low)
            assert len(after.high) + len(after.low) - before <= RAW.tokens
            _check_nobody_went_up(ever[head], after, first + RAW.tokens)
            rows[head] = after


def _shake_scores(
    generator: np.random.Generator, cache: Cache, row: Row, head: int, now: int
) -> None:
    """New scores for all, as decoding would give: some fall below a threshold, some rise."""
    for kind, tokens in enumerate((row.high, row.low)):
        scores = random_scores(generator, len(tokens), now)
        for place, ((position, _), score) in enumerate(zip(tokens, scores, strict=True)):
            tokens[place] = (position, score)
            cache.write(head, kind, place, tokens[place])


def _apply(cache: Cache, head: int, plan: object, leaving: list[tuple[int, float]]) -> None:
    """Move as the plan says: down first, then in."""
    classes, targets, victims, fallen, counts = (part[0, head].tolist() for part in plan)  # type: ignore[attr-defined]
    down = [
        (cache.read(head, 0, victim), place)
        for victim, place in zip(victims, fallen, strict=True)
        if place >= 0
    ]
    for token, place in down:
        cache.write(head, 1, place, token)
    for token, name, place in zip(leaving, classes, targets, strict=True):
        if name:
            cache.write(head, 2 - name, place, token)
    cache.tokens[0, head] = torch.tensor(counts)


def _check_nobody_went_up(ever: dict[int, str], row: Row, seen: int) -> None:
    """Each token's class is at most what it was; whoever was dropped stays away."""
    now = {position: "high" for position, _ in row.high}
    now |= {position: "low" for position, _ in row.low}
    assert len(now) == len(row.high) + len(row.low)
    for position in range(seen):
        name = now.get(position, "dropped")
        assert ORDER[name] <= ORDER[ever.get(position, "high")]
        ever[position] = name


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_thresholds_all_stay_high(backend: str) -> None:
    cache = Cache(pages=10)
    raw = segments(cache.arena, RAW)
    raw.positions[:HEADS], raw.scores[:HEADS] = 3, 0.0
    plan = plan_retirement.on(backend)(
        cache.arena,
        RAW,
        cache.leaving,
        cache.section(0),
        None,
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([500], dtype=torch.int32),
        alpha_high=0.0,
        alpha_low=0.0,
    )
    assert plan.classes.eq(2).all()
    assert plan.targets.tolist() == [[list(range(RAW.tokens))] * HEADS]
    assert plan.victims.eq(-1).all()
    assert plan.counts.tolist() == [[[RAW.tokens, 0]] * HEADS]
