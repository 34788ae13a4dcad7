"""The byte ledger as a state machine, and the rule for what is booked when."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from triptych.router.models.memory_estimate import RequestBytes
from triptych.router.state.byte_ledger import (
    ByteLedger,
    Lines,
    lines_after_encoding,
    lines_before_encoding,
)

CAPACITY = 100
SIZES = RequestBytes(raw=40, encoded=10, compressed=15, growth=20, grown=30)


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger, self.truth = ByteLedger(CAPACITY), dict[str, Lines]()

    @rule(
        request=st.sampled_from("abcd"),
        lines=st.dictionaries(st.sampled_from(["gpu0", "gpu1"]), st.integers(0, 120)),
    )
    def book(self, request: str, lines: Lines) -> None:
        wanted = {**self.truth, request: lines}
        fits = all(sum(one.get(arena, 0) for one in wanted.values()) <= CAPACITY for arena in lines)
        assert self.ledger.fits(request, lines) == fits
        assert self.ledger.book(request, lines) == fits
        if fits:
            self.truth = wanted

    @rule(request=st.sampled_from("abcd"))
    def release(self, request: str) -> None:
        self.ledger.release(request)
        self.truth.pop(request, None)

    @invariant()
    def sums_are_exact_and_within_capacity(self) -> None:
        for arena in ("gpu0", "gpu1"):
            booked = sum(lines.get(arena, 0) for lines in self.truth.values())
            assert self.ledger.booked(arena) == booked
            assert 0 <= self.ledger.free(arena) == CAPACITY - booked

    @invariant()
    def nothing_is_booked_when_nothing_runs(self) -> None:
        if not self.truth:
            assert self.ledger.arenas == {}


TestByteLedger = LedgerMachine.TestCase


def test_a_negative_booking_is_refused() -> None:
    with pytest.raises(ValueError, match="negative booking"):
        ByteLedger(CAPACITY).book("a", {"gpu0": -1})


def test_one_arena_is_booked_for_the_higher_of_both_peaks() -> None:
    assert lines_before_encoding(SIZES, "cpu", "cpu", "cpu") == {"cpu": 50}


@pytest.mark.parametrize(
    ("raw", "work", "final", "lines"),
    [
        ("a", "a", "b", {"a": 50, "b": 30}),
        ("a", "b", "b", {"a": 40, "b": 50}),
        ("a", "b", "a", {"a": 70, "b": 50}),
        ("a", "b", "c", {"a": 40, "b": 50, "c": 30}),
        ("a", "a", "a/1", {"a": 40, "a/1": 30}),
        ("a/1", "a/2", "a/3", {"a/1": 40, "a/3": 30}),
        ("a/1", "a/2", "a/1", {"a/1": 50}),
        ("a/1", "b/1", "b/2", {"a/1": 40, "b/1": 40, "b/2": 30}),
        ("a/1", "a/2", "b", {"a/1": 40, "a/2": 10, "b": 30}),
    ],
)
def test_each_arena_is_booked_for_its_own_part(
    raw: str, work: str, final: str, lines: dict[str, int]
) -> None:
    """Arenas of one pool, such as a/1 and a/2, are read and written in place."""
    assert lines_before_encoding(SIZES, raw, work, final) == lines


def test_after_encoding_only_the_pages_and_their_growth_stay_booked() -> None:
    assert lines_after_encoding(SIZES, "gpu1", "gpu1") == {"gpu1": 30}
    assert lines_after_encoding(SIZES, "pool/1", "pool/2") == {"pool/2": 30}


def test_pages_are_booked_twice_until_they_are_fetched() -> None:
    lines = lines_after_encoding(SIZES, "gpu0", "gpu1")
    assert lines == {"gpu0": SIZES.compressed, "gpu1": 30}


def test_held_booked_and_bound_are_figures_of_their_own() -> None:
    ledger = ByteLedger(100)
    ledger.hold("r", 5)  # nothing is booked yet
    assert (ledger.held_bytes, ledger.bound_bytes) == (0, 0)
    assert ledger.book("r", {"a": 20})
    assert (ledger.held_of("r"), ledger.bound_of("r")) == (0, 20)
    ledger.bind("r", 70)
    ledger.hold("r", 12)
    assert (ledger.held_bytes, ledger.booked("a"), ledger.bound_bytes) == (12, 20, 70)
    assert ledger.book("r", {"a": 10})
    assert (ledger.held_bytes, ledger.bound_bytes) == (10, 70)  # never more than is booked
    ledger.release("r")
    assert (ledger.held_bytes, ledger.bound_bytes, ledger.held_of("r")) == (0, 0, 0)
