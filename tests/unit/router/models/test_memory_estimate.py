"""The byte model against a row that is filled token by token as the stages do it."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.layout import FORMATS, Geometry
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.router import ByteModel
from triptych.router.state.byte_ledger import lines_after_encoding, lines_before_encoding

PAGE = 3584
FEWER_BITS = {"k8v8": "k8v4", "k8v4": "k4v2", "k4v4": "k4v2"}


def policy(high: str, low: str | None = None, sink: int = 1, window: int = 64) -> Policy:
    name = f"uniform:{high}" if low is None else "diffkv"
    return Policy(
        name=name, high_format=high, low_format=low, sink_tokens=sink, window_tokens=window
    )


HIGH_AND_LOW = [(name, None) for name in sorted(FORMATS)] + list(FEWER_BITS.items())
policies = st.builds(
    lambda formats, sink, window: policy(*formats, sink, window),
    st.sampled_from(HIGH_AND_LOW),
    st.integers(0, 30),
    st.integers(0, 100),
)
plans = st.builds(
    PagePlan,
    st.builds(Geometry, layers=st.integers(1, 3), kv_heads=st.integers(1, 3), head_dim=st.just(64)),
    st.just(PAGE),
    policies,
)
models = st.builds(ByteModel, plans)


@dataclass
class FakeRow:
    """Pages of one head row by the rules of the stages; ``most`` is what it ever held at once."""

    plan: PagePlan
    low_share: float = 0.0
    """Part of the encoded prompt that goes low."""
    raw_tokens: int = 0
    recent_tokens: int = 0
    recent_pages: int = 0
    """Small pages that it took; none is given back while it decodes."""
    high_tokens: int = 0
    low_tokens: int = 0
    most: int = 0

    @property
    def bytes(self) -> int:
        """Bytes that all head rows hold, if they are like this one."""
        plan, rows = self.plan, self.plan.geometry.head_rows
        encoded = plan.high.pages(self.high_tokens)
        encoded += plan.low.pages(self.low_tokens) if plan.low else 0
        raw = rows * plan.raw.pages(self.raw_tokens) * plan.page_bytes
        return raw + plan.stored_bytes(rows * self.recent_pages, rows * encoded)

    def read_prompt(self, tokens: int) -> None:
        self.raw_tokens = tokens
        self.most = self.bytes

    def encode(self) -> None:
        """Move all tokens from raw pages, which are held meanwhile."""
        if not self.plan.compresses:
            self.recent_tokens, self.raw_tokens = self.raw_tokens, 0
            self.recent_pages = self.plan.recent.pages(self.recent_tokens)
            return
        leaving = self.plan.leaving_tokens(self.raw_tokens)
        self.recent_tokens = self.raw_tokens - leaving
        self.recent_pages = self.plan.recent.pages(self.recent_tokens)
        self._leave(leaving)
        self.most = max(self.most, self.bytes)
        self.raw_tokens = 0

    def _leave(self, leaving: int) -> None:
        low = int(leaving * self.low_share) if self.plan.low else 0
        self.low_tokens += low
        self.high_tokens += leaving - low

    def write(self) -> None:
        """Retire old tokens, then take a place for the next one."""
        plan = self.plan
        if plan.compresses and self.recent_tokens == plan.full_recent_tokens:
            self._leave(plan.retire_tokens)
            self.recent_tokens -= plan.retire_tokens
        self.recent_tokens += 1
        self.recent_pages = max(self.recent_pages, plan.recent.pages(self.recent_tokens))
        self.most = max(self.most, self.bytes)


def fake_row(model: ByteModel, low_share: float = 0.0) -> FakeRow:
    return FakeRow(model.plan, low_share)


@given(
    model=models,
    prompt=st.integers(1, 600),
    new=st.integers(1, 300),
    low_share=st.floats(0, 1),
)
def test_estimates_bound_what_the_stages_take(
    model: ByteModel, prompt: int, new: int, low_share: float
) -> None:
    sizes = model.estimate(prompt, new)
    row = fake_row(model, low_share)
    row.read_prompt(prompt)
    assert sizes.raw == row.bytes
    row.encode()
    assert row.most <= sizes.raw + sizes.encoded <= sizes.peak
    planned = row.bytes
    assert planned <= sizes.compressed
    row.most = row.bytes
    for _ in range(new):
        row.write()
    assert row.most <= sizes.corrected(planned).grown <= sizes.grown <= sizes.peak


@given(model=models, prompt=st.integers(1, 600), new=st.integers(1, 300))
def test_the_bound_is_never_more_than_a_few_pages_a_row_above_the_truth(
    model: ByteModel, prompt: int, new: int
) -> None:
    row = fake_row(model)
    row.read_prompt(prompt)
    row.encode()
    row.most = row.bytes
    for _ in range(new):
        row.write()
    slack = model.estimate(prompt, new).grown - row.most
    # A second class may begin a page of its own; a page that is encoded whole waits for its tokens.
    allowed = 2 + (model.plan.low is not None) + model.plan.codes_whole_pages
    assert slack <= allowed * model.plan.geometry.head_rows * PAGE


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
    encoded = row.high_tokens
    row.high_tokens = kept.draw(st.integers(0, encoded))
    planned = row.bytes
    row.most = row.bytes
    for _ in range(new):
        row.write()
    assert row.most <= model.estimate(prompt, new).corrected(planned).grown


def test_a_plan_above_the_estimate_raises_the_bound() -> None:
    sizes = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, policy("k8v4"))).estimate(100, 10)
    higher = sizes.corrected(sizes.compressed + PAGE)
    assert higher.compressed == sizes.compressed + PAGE
    assert higher.grown == sizes.compressed + PAGE + sizes.growth


@pytest.mark.parametrize("shared_pages", [0, 12, 28])
def test_what_is_shared_is_booked_once_and_where_it_is_copied(shared_pages: int) -> None:
    """The bound on the whole holds for both parts together."""
    model = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, policy("k8v4")))
    alone = model.estimate(1056, 10)
    shared = 4 * PAGE * shared_pages
    sizes = alone.corrected(alone.compressed - shared - PAGE, shared)
    assert sizes.grown == alone.grown - shared
    assert (sizes.moved().grown, sizes.moved().shared) == (alone.grown, 0)
    assert lines_after_encoding(sizes, "here", "here") == {"here": sizes.grown}
    there = {"here": sizes.compressed, "there": alone.grown}
    assert lines_after_encoding(sizes, "here", "there") == there
    before = lines_before_encoding(sizes, "here", "here", "there")
    assert before["there"] == alone.grown
    assert lines_after_encoding(sizes.moved(), "there", "there") == {"there": alone.grown}


def test_smollm2_at_512_tokens_takes_what_the_arithmetic_says() -> None:
    model = ByteModel(PagePlan(Geometry(layers=30, kv_heads=3, head_dim=64), PAGE, policy("k8v4")))
    sizes = model.estimate(prompt_tokens=512, max_tokens=64)
    row = 90 * PAGE
    assert sizes.raw == 40 * row  # 13 tokens a page
    small = 349 * PAGE  # 93 tokens in 31 small pages of 90 rows, 8 in a page
    assert sizes.encoded == sizes.compressed == 14 * row + small  # 445 tokens, 32 a page
    assert sizes.grown == 16 * row + small


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_more_tokens_never_take_fewer_bytes(form: str) -> None:
    model = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, policy(form)))
    grown = [model.estimate(100, new).grown for new in range(200)]
    assert grown == sorted(grown)


def test_sixteen_bits_encode_nothing() -> None:
    sizes = ByteModel(PagePlan(Geometry(2, 2, 64), PAGE, policy("fp16"))).estimate(100, 50)
    assert sizes.encoded == 0
    assert sizes.compressed == sizes.raw
    assert sizes.peak == sizes.grown


layerwise_plans = st.builds(
    PagePlan,
    st.builds(Geometry, layers=st.integers(1, 9), kv_heads=st.just(1), head_dim=st.just(64)),
    st.just(PAGE),
    policies,
    chunk_tokens=st.integers(1, 100),
    layers_at_once=st.integers(0, 4),
)


@given(
    st.builds(ByteModel, plans | layerwise_plans),
    st.integers(0, 400),
    st.integers(1, 300),
    st.booleans(),
)
def test_requests_within_the_limits_fit_and_longer_ones_do_not(
    model: ByteModel, pages_per_row: int, context: int, is_layerwise: bool
) -> None:
    capacity = pages_per_row * model.plan.geometry.head_rows * PAGE

    def fits(prompt: int, answer: int) -> bool:
        parts = model.estimate_in_parts(prompt, answer) if is_layerwise else None
        return (parts or model.estimate(prompt, answer)).peak <= capacity

    limits = model.limits(capacity, context, is_layerwise=is_layerwise)
    assert limits.total_tokens <= context
    assert limits.prompt_tokens <= context
    for prompt in range(1, min(limits.prompt_tokens, limits.total_tokens) + 1):
        assert fits(prompt, limits.total_tokens - prompt)
    for total in range(2, min(limits.every_split, limits.total_tokens) + 1):
        assert fits(total - 1, 1)
    if limits.total_tokens < context:
        assert not fits(1, limits.total_tokens)
    if limits.prompt_tokens < context:
        assert not fits(limits.prompt_tokens + 1, 0)
