"""The byte model against a row that is filled token by token as the stages do it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.layout import FORMATS, Geometry, PageLayout
from triptych.core.pages import PagePlan
from triptych.router import ByteModel

PAGE = 3584
plans = st.builds(
    PagePlan,
    st.builds(Geometry, layers=st.integers(1, 3), kv_heads=st.integers(1, 3), head_dim=st.just(64)),
    st.just(PAGE),
    st.sampled_from(sorted(FORMATS)),
    st.integers(0, 100),
)
models = st.builds(ByteModel, plans)


@dataclass
class FakeRow:
    """Pages of one head row by the rules of the stages; ``most`` is what it ever held at once."""

    raw: PageLayout
    stored: PageLayout
    window: int
    raw_tokens: int = 0
    stored_tokens: int = 0
    most: int = 0

    @property
    def pages(self) -> int:
        return self.raw.pages(self.raw_tokens) + self.stored.pages(self.stored_tokens)

    def read_prompt(self, tokens: int) -> None:
        self.raw_tokens = tokens
        self.most = self.pages

    def encode(self) -> None:
        """Encode every full raw page that is older than the window; all are held meanwhile."""
        if not self.stored.format.is_quantized:
            return
        leaving = max(0, self.raw_tokens - self.window) // self.raw.tokens * self.raw.tokens
        self.stored_tokens += leaving
        self.most = max(self.most, self.pages)
        self.raw_tokens -= leaving

    def write(self) -> None:
        self.encode()
        self.raw_tokens += 1
        self.most = max(self.most, self.pages)


def fake_row(model: ByteModel) -> FakeRow:
    raw = PageLayout(FORMATS["fp16"], 64, PAGE)
    return FakeRow(
        raw, PageLayout(FORMATS[model.plan.stored_format], 64, PAGE), model.plan.window_tokens
    )


@given(model=models, prompt=st.integers(1, 600), new=st.integers(1, 300))
def test_estimates_bound_what_the_stages_take(model: ByteModel, prompt: int, new: int) -> None:
    sizes = model.estimate(prompt, new)
    per_page = model.plan.geometry.head_rows * PAGE
    row = fake_row(model)
    row.read_prompt(prompt)
    assert sizes.raw == row.pages * per_page
    row.encode()
    assert row.most * per_page <= sizes.raw + sizes.encoded <= sizes.peak
    planned = row.pages * per_page
    assert planned <= sizes.compressed
    row.most = row.pages
    for _ in range(new):
        row.write()
    assert row.most * per_page <= sizes.corrected(planned).grown <= sizes.grown <= sizes.peak


@given(model=models, prompt=st.integers(1, 600), new=st.integers(1, 300))
def test_the_bound_is_never_more_than_three_pages_a_row_above_the_truth(
    model: ByteModel, prompt: int, new: int
) -> None:
    row = fake_row(model)
    row.read_prompt(prompt)
    row.encode()
    row.most = row.pages
    for _ in range(new):
        row.write()
    slack = model.estimate(prompt, new).grown - row.most * model.plan.geometry.head_rows * PAGE
    assert slack <= 3 * model.plan.geometry.head_rows * PAGE


@given(
    model=models,
    prompt=st.integers(1, 600),
    new=st.integers(1, 300),
    kept=st.data(),
)
def test_growth_bounds_a_request_that_dropped_tokens(
    model: ByteModel, prompt: int, new: int, kept: st.DataObject
) -> None:
    row = fake_row(model)
    row.read_prompt(prompt)
    row.encode()
    if model.plan.stored_format != "fp16":
        row.stored_tokens = kept.draw(st.integers(0, row.stored_tokens))
    planned = row.pages * model.plan.geometry.head_rows * PAGE
    row.most = row.pages
    for _ in range(new):
        row.write()
    grown = model.estimate(prompt, new).corrected(planned).grown
    assert row.most * model.plan.geometry.head_rows * PAGE <= grown


def test_a_plan_above_the_estimate_raises_the_bound() -> None:
    sizes = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, "k8v4", 64)).estimate(100, 10)
    higher = sizes.corrected(sizes.compressed + PAGE)
    assert higher.compressed == sizes.compressed + PAGE
    assert higher.grown == sizes.compressed + PAGE + sizes.growth


def test_smollm2_at_512_tokens_takes_what_the_arithmetic_says() -> None:
    model = ByteModel(PagePlan(Geometry(layers=30, kv_heads=3, head_dim=64), PAGE, "k8v4", 64))
    sizes = model.estimate(prompt_tokens=512, max_tokens=64)
    row = 90 * PAGE
    assert sizes.raw == 40 * row  # 13 tokens a page
    assert sizes.encoded == 14 * row  # 448 tokens, 32 a page
    assert sizes.compressed == (14 + 6 + 1) * row
    assert sizes.grown == (16 + 6 + 1) * row


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_more_tokens_never_take_fewer_bytes(form: str) -> None:
    model = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, form, 64))
    grown = [model.estimate(100, new).grown for new in range(200)]
    assert grown == sorted(grown)


def test_sixteen_bits_encode_nothing() -> None:
    sizes = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, "fp16", 64)).estimate(100, 50)
    assert sizes.encoded == 0
    assert sizes.compressed == sizes.raw
    assert sizes.peak == sizes.grown
