"""The judgements of the long runs in ``tests/e2e``."""

import pytest

from tests.e2e.abort_storm import Victim, compare
from tests.e2e.mixed_load import Growth, Report
from tests.e2e.repeats import Answer, Repeated, summary


def victim(tokens: tuple[int, ...], *logprobs: float, margin: float = 1.0) -> Victim:
    return Victim(tokens=tokens, logprobs=logprobs, margins=(margin,) * len(tokens))


@pytest.mark.parametrize(
    ("busy", "bound", "exceeds"),
    [
        (victim((1, 2, 3), -1.0, -1.0, -1.0), 0.0, False),
        (victim((1, 2, 3), -1.0, -1.5, -1.0), 0.4, True),
        (victim((1, 2, 3), -1.0, -1.5, -1.0), 0.5, False),
        (victim((1, 2, 4), -1.0, -1.0, -9.0), 0.5, False),  # a margin of 1 is twice the bound
        (victim((1, 2, 4), -1.0, -1.0, -9.0), 0.4, True),
    ],
)
def test_a_victim_may_differ_by_the_noise(busy: Victim, bound: float, exceeds: bool) -> None:
    calm = victim((1, 2, 3), -1.0, -1.0, -1.0)
    found = compare(0, 3, calm, busy)
    assert found.exceeds(bound) == exceeds
    assert (found.size > bound) == exceeds


def answer(*tokens: int, logprob: float = -1.0, margin: float = 0.5) -> Answer:
    count = len(tokens)
    return Answer(
        cached_tokens=0, tokens=list(tokens), logprobs=[logprob] * count, margins=[margin] * count
    )


def repeated(*answers: Answer) -> Repeated:
    return Repeated(topology="", policy="", prompt_tokens=40, answers=list(answers))


def test_repeated_answers_are_compared_token_by_token() -> None:
    same = repeated(answer(1, 2), answer(1, 2, logprob=-1.25), answer(1, 2))
    other = repeated(answer(1, 2), answer(1, 3, margin=0.25), answer(1, 2))
    assert (same.first_difference, same.margin, same.noise) == (None, None, 0.25)
    assert (other.first_difference, other.margin, other.noise) == (1, 0.25, 0.0)
    found = summary([same, other])
    assert (found["differ"], found["largest_noise"]) == (1, 0.25)


def test_growth_and_lost_goodput_are_faults() -> None:
    def report(slope: float, good: int, endings: dict[str, int], is_empty: bool) -> list[str]:
        growth = Growth(
            name="Router",
            pid=7,
            first_mb=1.0,
            last_mb=9.0,
            slope_mb_per_minute=slope,
            slope_with_shared=9.0,
            by_minute=[1.0, 9.0],
        )
        return Report(
            capacity_per_s=1.0,
            capacity_afterwards_per_s=1.0,
            median_s=1.0,
            polite_s={},
            offered_per_s={},
            polite_sent=10,
            polite_good=good,
            endings={"stream": endings},
            growth=[growth],
            is_empty=is_empty,
        ).faults

    assert report(0.99, 8, {"whole": 3, "429": 5}, True) == []
    assert len(report(1.0, 7, {"500": 1, "cut": 2}, False)) == 5
