"""Lengths of answers, learned from synthetic ones whose distribution is known."""

from bisect import bisect_left
from itertools import pairwise
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.effort import examples
from triptych.router.models.output_length import EDGES, MOST_TENANTS, PRIOR, Hazards, OutputLengths

AHEAD = (24, 64, 128, 256, 512, 1024, 2048, 4096)
NEVER = 1 << 30


def learn(lengths: OutputLengths, answers: list[int], limit: int = NEVER, tenant: str = "") -> None:
    """Answers that are written to their end, or to the limit."""
    for tokens in answers:
        before = 0
        while before < min(tokens, limit):
            after = min(tokens, limit, before + 32)
            lengths.note_written(tenant, before, after)
            before = after
        if tokens < limit:
            lengths.note_end(tenant, tokens)


def drawn(count: int, *, median: float = 400.0, spread: float = 0.6, seed: int = 0) -> list[int]:
    draw = Random(seed)
    return [max(1, round(median * exp(draw.gauss(0.0, spread)))) for _ in range(count)]


def quantiles(lengths: OutputLengths) -> list[int]:
    return [lengths.quantile("", 0, NEVER, share) for share in (0.1, 0.5, 0.9, 0.99)]


CHATS = [55, 200, 720, 2050]
"""Quantiles of answers."""


def test_before_anything_was_seen_answers_are_taken_to_be_longer_than_in_chats() -> None:
    found = quantiles(OutputLengths())
    assert found == pytest.approx([1.5 * tokens for tokens in CHATS], rel=0.07)


def test_the_prior_is_that_of_chats() -> None:
    hazards = Hazards()
    hazards.renew(PRIOR)
    assert hazards.shares == pytest.approx(PRIOR)
    before = [1.0]
    for share in PRIOR:
        before.append(before[-1] * (1.0 - share))
    at = bisect_left(EDGES, 724)
    assert before[at] == pytest.approx(0.1, rel=0.02)


def test_forecasts_are_hardly_cautious_once_enough_was_seen() -> None:
    lengths = OutputLengths()
    learn(lengths, drawn(1500, median=200, spread=1.0))
    assert quantiles(lengths)[:3] == pytest.approx([1.1 * t for t in CHATS[:3]], rel=0.15)


@pytest.mark.parametrize("written", [0, 100, 600])
def test_what_is_left_is_learned_for_answers_of_any_length_so_far(written: int) -> None:
    lengths = OutputLengths()
    learn(lengths, drawn(1500))
    truth = [tokens for tokens in drawn(20_000, seed=1) if tokens > written]
    for more, found in zip(AHEAD, lengths.survival("", written, NEVER, AHEAD), strict=True):
        share = sum(tokens > written + more for tokens in truth) / len(truth)
        assert found == pytest.approx(share, abs=0.08)


def test_an_answer_cut_at_its_limit_says_only_that_it_is_no_shorter() -> None:
    lengths = OutputLengths()
    learn(lengths, drawn(1500), limit=300)
    truth = drawn(20_000, seed=1)
    (found,) = lengths.survival("", 0, NEVER, [250])
    assert found == pytest.approx(sum(t > 250 for t in truth) / len(truth), abs=0.08)


def test_long_answers_are_learned_before_the_first_of_them_ends() -> None:
    lengths = OutputLengths()
    (before,) = lengths.survival("", 500, NEVER, [500])
    for _ in range(32):
        for written in range(0, 2000, 50):
            lengths.note_written("", written, written + 50)
    (after,) = lengths.survival("", 500, NEVER, [500])
    assert before < 0.4
    assert after > 0.9


def test_a_tenant_is_told_apart_and_another_is_like_all() -> None:
    lengths = OutputLengths()
    learn(lengths, [20] * 200, tenant="short")
    learn(lengths, [1000] * 200, tenant="long")
    (short,), (long,) = (lengths.survival(who, 0, NEVER, [100]) for who in ("short", "long"))
    (unknown,) = lengths.survival("nobody", 0, NEVER, [100])
    assert short < 0.25 < unknown < 0.8 < long


def test_a_change_of_the_load_is_followed() -> None:
    lengths = OutputLengths()
    learn(lengths, [1500] * 500)
    learn(lengths, [30] * 1000)
    assert lengths.quantile("", 0, NEVER, 0.9) < 100


@settings(max_examples=examples(200), deadline=None)
@given(
    answers=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 200_000)), max_size=20),
    written=st.integers(0, 200_000),
    left=st.integers(1, 4096),
    share=st.floats(0.001, 0.999),
)
def test_forecasts_are_probabilities_within_the_limit(
    answers: list[tuple[str, int]], written: int, left: int, share: float
) -> None:
    lengths = OutputLengths()
    for tenant, tokens in answers:
        lengths.note_written(tenant, 0, tokens)
        lengths.note_end(tenant, tokens)
    found = lengths.survival("a", written, written + left, AHEAD)
    assert all(0.0 <= later <= sooner <= 1.0 for sooner, later in pairwise((1.0, *found)))
    assert all(later == 0.0 for more, later in zip(AHEAD, found, strict=True) if more >= left)
    assert written <= lengths.quantile("a", written, written + left, share) <= written + left


def test_tenants_without_end_take_bounded_memory() -> None:
    lengths = OutputLengths()
    for number in range(2 * MOST_TENANTS):
        lengths.note_written(f"t{number}", 0, 10)
    assert len(lengths) == MOST_TENANTS
