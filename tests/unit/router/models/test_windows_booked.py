"""The byte model of layers with sliding windows, against rows that are filled page by page."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.models.test_memory_estimate import HIGH_AND_LOW, PAGE, policy
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.router import ByteModel
from triptych.router.models.booking import Booking, BookingModel

windows = st.lists(st.sampled_from([0, 3, 24, 90, 200, 512]), min_size=1, max_size=4).filter(any)
plans = st.builds(
    lambda sliding, kv_heads, formats, sink, recent, keeps_answers: PagePlan(
        Geometry(len(sliding), kv_heads, 64, windows=tuple(sliding)),
        PAGE,
        policy(*formats, sink, recent),
        prefix_bytes=PAGE,
        keeps_answers=keeps_answers,
    ),
    windows,
    st.integers(1, 3),
    st.sampled_from(HIGH_AND_LOW),
    st.integers(0, 30),
    st.integers(0, 100),
    st.booleans(),
)


@dataclass
class Row:
    """High and low tokens of a head row, by the rules of the stages."""

    plan: PagePlan
    window: int
    low_share: float
    first: int = 0
    """Position of its first high token."""
    high: int = 0
    low: int = 0

    @property
    def pages(self) -> int:
        low = self.plan.low.pages(self.low) if self.plan.low else 0
        return self.plan.high.pages(self.high) + low

    def encode(self, tokens: int) -> None:
        start, leaving = self.plan.sink_tokens, self.plan.leaving_tokens(tokens)
        if not self.window:
            self.low = int(leaving * self.low_share) if self.plan.low else 0
            self.high = leaving - self.low
            return
        end = start + leaving
        self.first = min(end, max(start, self.plan.first_kept(tokens, self.window)))
        self.high = end - self.first

    def retire(self, seen: int) -> None:
        room = self.plan.high.tokens
        while self.window and self.high:
            in_page = min(room, self.high)
            if self.first + in_page > self.plan.first_read(seen, self.window):
                break
            self.first, self.high = self.first + in_page, self.high - in_page
        self.high += self.plan.retire_tokens


@dataclass
class Held:
    """Pages of a request in decode: those that expire are its next ones."""

    plan: PagePlan
    low_share: float
    recent: int = 0
    most_recent: int = 0
    encoded: int = 0
    """Pages that it ever had in high and low tables at once."""
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = [
            Row(self.plan, window, self.low_share)
            for window in self.plan.windows
            for _ in range(self.plan.geometry.kv_heads)
        ]

    @property
    def bytes(self) -> int:
        recent = self.plan.recent.pages(self.most_recent) * self.plan.geometry.head_rows
        return self.plan.stored_bytes(recent, self.encoded)

    def encode(self, tokens: int) -> None:
        for row in self.rows:
            row.encode(tokens)
        self.recent = self.most_recent = tokens - self.plan.leaving_tokens(tokens)
        self._count()

    def write(self, seen: int) -> None:
        """Store the token at position ``seen``."""
        if self.recent == self.plan.full_recent_tokens:
            for row in self.rows:
                row.retire(seen)
            self.recent -= self.plan.retire_tokens
        self.recent += 1
        self.most_recent = max(self.most_recent, self.recent)
        self._count()

    def _count(self) -> None:
        self.encoded = max(self.encoded, sum(row.pages for row in self.rows))


@given(plans, st.integers(1, 900), st.integers(1, 500), st.floats(0, 1))
def test_no_request_takes_more_than_its_estimate(
    plan: PagePlan, prompt: int, new: int, low_share: float
) -> None:
    sizes = ByteModel(plan).estimate(prompt, new)
    held = Held(plan, low_share)
    held.encode(prompt)
    planned = held.bytes
    assert planned <= sizes.compressed == sizes.encoded
    for seen in range(prompt, prompt + new):
        held.write(seen)
    assert held.bytes <= sizes.corrected(planned).grown <= sizes.grown <= sizes.peak


@given(plans, st.integers(1, 900), st.integers(1, 500))
def test_an_estimate_is_no_more_than_a_few_pages_a_row_too_large(
    plan: PagePlan, prompt: int, new: int
) -> None:
    held = Held(plan, 0.0)
    held.encode(prompt)
    for seen in range(prompt, prompt + new):
        held.write(seen)
    slack = ByteModel(plan).estimate(prompt, new).grown - held.bytes
    assert slack <= 5 * plan.geometry.head_rows * PAGE


@given(plans, st.integers(1, 2000), st.integers(1, 2000))
def test_windows_only_save_bytes_of_classes_and_longer_requests_take_more(
    plan: PagePlan, tokens: int, more: int
) -> None:
    model = ByteModel(plan)
    grown = [model.estimate(count, 0).grown for count in (tokens, tokens + more)]
    assert grown == sorted(grown)
    if plan.policy.is_quantized:
        whole = replace(plan, geometry=replace(plan.geometry, windows=()))
        assert grown[0] <= ByteModel(whole).estimate(tokens, 0).grown


@pytest.mark.parametrize("form", ["fp16", "k8v4"])
def test_bytes_of_sliding_layers_stop_growing(form: str) -> None:
    """Five of six layers have a window of 512 tokens, as in Gemma 3."""
    sliding = tuple(0 if layer % 6 == 5 else 512 for layer in range(24))
    geometry = Geometry(24, 1, 256, windows=sliding)
    plan = PagePlan(geometry, geometry.page_bytes(), policy(form))
    model = ByteModel(plan)
    recent = plan.sink_tokens + plan.policy.window_tokens
    lengths = 32_000, 64_000
    long, longer = (model.estimate(tokens, 0).grown for tokens in lengths)
    pages, more_pages = (plan.most_pages(tokens - recent) for tokens in lengths)
    assert longer - long == 4 * (more_pages - pages) * plan.page_bytes


def test_what_can_be_lowered_is_that_of_the_other_layers() -> None:
    geometry = Geometry(2, 2, 64, windows=(512, 0))
    plan = PagePlan(geometry, PAGE, policy("k8v4", "k4v2"))
    model = ByteModel(plan)
    books = BookingModel(model, 1 << 30, is_layerwise=False)
    booking = Booking(model.estimate(4000, 100), 4000, 4100, "", "")
    low = plan.low
    assert low is not None
    row = 2 * PAGE
    lowest = books.lowest(low, booking, 0)
    full_row = low.pages(plan.leaving_tokens(4000)) * row
    window_row = plan.most_row_pages(plan.leaving_tokens(4000), 512) * row
    recent = plan.stored_bytes(4 * plan.recent.pages(4000 - plan.leaving_tokens(4000)), 0)
    assert lowest == full_row + window_row + recent
    assert lowest <= books.lowered_bound(low, booking, 0) < booking.bound.grown
