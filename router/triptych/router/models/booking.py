"""Forecast bookings: a request books the pages that it takes soon, not all that it can ever take.

A running request may hold no more pages than are booked for it (``PageLimit``), so the ledger is
right whatever the forecasts are worth. They decide three things: how much is booked at a time, how
much memory the running requests will need, and so how many of them run.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import inf

from triptych.core.layout import PageLayout
from triptych.core.pages import PagePlan
from triptych.router.models.memory_estimate import ByteModel, RequestBytes
from triptych.router.models.output_length import OutputLengths
from triptych.router.models.overcommit import AHEAD, Need
from triptych.router.models.page_ratio import PageRatios

LEAST_TOKENS = 16
"""Tokens for which memory is booked ahead, at least. It lasts longer than the router's answer."""
ROOMY_TOKENS = 64
"""The same while half of the memory is free, in a small memory."""
MOST_ROOMY_TOKENS = 256
"""The same in a large memory. Most chats never ask for more then."""
ROOMY_SHARE = 256
"""One part in so many of an arena is booked ahead of a request at most, above ``ROOMY_TOKENS``. In
the half that is free then, half as many requests can book so far ahead."""
SHARE_AHEAD = 8
"""Of the tokens of a sequence, one in so many is booked ahead. So what is booked and not held stays
a small share, and requests ask for more at an interval that grows with them."""
DEVIATIONS = 2.0
"""Standard deviations above the mean that the forecast share of the bound is taken to be."""
MOST_TOKENS = 1 << 20
"""Sequences of any model are taken to be shorter."""
CACHED_SIZES = 1 << 16
RENEW_NEEDS = 64
"""Changes of what is known of lengths after which the need of a request is forecast anew."""
PROMPT_TOKENS_A_STEP = 16
"""Prompt tokens that are prefilled and compressed in the time of a decode step, at least: so long
raw pages exist."""


def tokens_ahead(tokens: int) -> int:
    """Tokens for which memory is booked ahead of a sequence of ``tokens`` tokens."""
    return max(LEAST_TOKENS, tokens // SHARE_AHEAD)


@dataclass(eq=False, slots=True)
class Booking:
    """Tokens, held bytes and bound of one request; its tokens are those that pages hold."""

    bound: RequestBytes
    """Sizes for all of ``max_tokens``."""
    prompt_tokens: int
    most_tokens: int
    """Tokens that its pages can come to hold."""
    tenant: str
    profile: str
    method: str = ""
    """Compression method of the request; empty: the server's default."""
    written: int = 0
    """Output tokens of earlier attempts."""
    tokens: int = 0
    """Tokens, as its worker reported last."""
    held: int = 0
    """Bytes of pages of its own, likewise."""
    limit_tokens: int = 0
    """Most tokens that it may have by what is booked; 0: all."""
    lacks: int = 0
    """Bytes beyond ``held`` that its next token needs; 0: not known yet."""
    asks: bool = False
    """Whether more is to be booked for it."""
    is_roomy: bool = False
    """Whether half of the memory was free when memory was last booked for it."""
    paused_at: float = inf
    """When it paused at its limit."""
    is_fixed: bool = False
    """Whether its bound is booked from the start."""
    is_whole: bool = False
    """Whether its bound is booked, so that it will need nothing more."""
    is_encoded: bool = False
    """Whether its raw pages are free."""
    may_evict: bool = True
    """Whether its answer is the same if it is computed again."""
    lowers: bool = False
    """Whether its worker lowers it to stay within its bound, which is smaller therefore."""
    may_lower: bool = True
    """Whether that is possible: its floor allows it, and no worker has failed to do it."""
    evictions: int = 0
    """Times that its pages were freed before its end."""
    lowered: int = 0
    """Bytes that storing high tokens as low ones has freed."""
    lowerings: int = 0
    """Times that its worker was told to do that."""
    unlowerable: int = 0
    """Bytes that it holds beyond ``BookingModel.lowest`` and could not free."""
    latest: tuple[tuple[int, ...], Need] | None = None
    """The need that was computed last, and for what."""


@dataclass(eq=False)
class BookingModel:
    """Sizes to book, and the need for memory over time, by what was learned of earlier requests."""

    model: ByteModel
    capacity_bytes: int
    is_layerwise: bool
    lengths: OutputLengths = field(default_factory=OutputLengths)
    ratios: PageRatios = field(default_factory=PageRatios)

    def __post_init__(self) -> None:
        self._longest_prompt = cache(self._longest_prompt_of)
        self._grown = lru_cache(CACHED_SIZES)(self._bound)
        self.page_bytes = self.model.plan.page_bytes
        self.row_bytes = self.model.plan.geometry.head_rows * self.page_bytes
        """One page of each head row."""
        self._roomy_tokens = self._tokens_while_roomy()

    def _tokens_while_roomy(self) -> int:
        """Tokens for which memory is booked ahead while half of it is free."""
        plan = self.model.plan
        dearest = plan.high if plan.compresses else plan.raw
        fit = self.capacity_bytes // ROOMY_SHARE * dearest.tokens // self.row_bytes
        return min(MOST_ROOMY_TOKENS, max(ROOMY_TOKENS, fit))

    def plan_of(self, booking: Booking) -> PagePlan:
        """The page plan of a request's method."""
        return self.model.plan.of_method(booking.method)

    def _model_of(self, booking: Booking) -> ByteModel:
        return self.model.of_method(booking.method)

    def _bound(self, method: str, tokens: int) -> int:
        """The most bytes that ``tokens`` tokens take in the decode stage."""
        return self.model.of_method(method).grown_bytes(tokens)

    def first_tokens(self, booking: Booking) -> int:
        """Output tokens to book when a request starts; all if it could not be computed again."""
        prompt_tokens = booking.prompt_tokens
        left = booking.most_tokens - prompt_tokens
        ahead = min(left, self._tokens_ahead(booking, prompt_tokens))
        return ahead if self.is_recomputable(booking, prompt_tokens + ahead) else left

    def is_recomputable(self, booking: Booking, tokens: int) -> bool:
        """Whether a sequence can be read again as a prompt, with what is booked ahead of it.

        A request that could not gets its bound: it may neither be evicted nor need more later.
        """
        return tokens + tokens_ahead(tokens) <= self._longest_prompt(booking.method)

    def _longest_prompt_of(self, method: str) -> int:
        """Tokens of the longest prompt that the memory can hold under a method."""
        model, capacity = self.model.of_method(method), self.capacity_bytes
        return model.limits(capacity, MOST_TOKENS, is_layerwise=self.is_layerwise).prompt_tokens

    def can_evict(self, booking: Booking) -> bool:
        """Whether a request can be computed again after any token that it may reach."""
        reached = booking.most_tokens if booking.is_whole else booking.limit_tokens
        return booking.may_evict and self.is_recomputable(booking, reached)

    def ahead(self, booking: Booking) -> int:
        """Tokens of the sequence for which memory is to be booked now."""
        ahead = self._tokens_ahead(booking, booking.tokens)
        return min(booking.most_tokens, booking.tokens + ahead)

    def _tokens_ahead(self, booking: Booking, tokens: int) -> int:
        return max(self._roomy_tokens * booking.is_roomy, tokens_ahead(tokens))

    def grown(self, booking: Booking, shared: int) -> int:
        """Bytes to book for a request in the decode stage: those of its next tokens.

        They suffice for one more token at least. ``shared``: bytes of a cached prefix that it reads
        in place.
        """
        ahead = self.ahead(booking)
        if booking.is_whole or not self.is_recomputable(booking, ahead):
            return booking.bound.grown
        bound = self._grown(booking.method, ahead) - shared
        mean, deviation = self.ratios.at(booking.profile, ahead)
        forecast = int(min(1.0, mean + DEVIATIONS * deviation) * bound) - booking.lowered
        step_bytes = max(1, len(self.plan_of(booking).classes)) * self.row_bytes
        least = booking.held + max(step_bytes, booking.lacks)
        return min(booking.bound.grown, max(least, forecast))

    def lowest(self, low: PageLayout, booking: Booking, shared: int) -> int:
        """About the bytes of a request whose cold tokens are all in pages of ``low``.

        Tokens of whole blocks of a prompt stay as the prefix cache stores them, and those of layers
        with a sliding window stay high.
        """
        plan, prompt = self.plan_of(booking), booking.prompt_tokens
        tokens = max(booking.tokens, prompt)
        coded, fixed = plan.leaving_tokens(tokens), len(plan.fixed_span(prompt, prompt))
        lowered = low.pages(coded - fixed) + (0 if shared else plan.high.pages(fixed))
        pages = sum(
            rows * (plan.most_row_pages(coded, window) if window else lowered)
            for window, rows in plan.rows_by_window.items()
        )
        recent = plan.geometry.head_rows * plan.recent.pages(tokens - coded)
        return plan.stored_bytes(recent, pages)

    def lowered_bound(self, low: PageLayout, booking: Booking, shared: int) -> int:
        """The most bytes of a request that its worker lowers whenever it needs pages.

        In each head row all encoded tokens are low, but those of a page that is not full, of the
        high window, of whole blocks of the prompt, and of layers with a sliding window. Three pages
        more let a step take a page of each class and let a lowering begin.
        """
        plan, tokens = self.plan_of(booking), booking.most_tokens
        fixed = len(plan.fixed_span(booking.prompt_tokens, booking.prompt_tokens))
        older = max(0, tokens - plan.sink_tokens - plan.policy.window_tokens)
        young = max(0, plan.policy.high_window_tokens - plan.policy.window_tokens)
        lowered = low.pages(max(0, older - fixed)) + 1 + young
        lowered += 0 if shared else plan.high.pages(fixed)
        pages = sum(
            rows * ((plan.most_row_pages(older, window) if window else lowered) + 3)
            for window, rows in plan.rows_by_window.items()
        )
        recent = plan.geometry.head_rows * plan.recent_pages(tokens)
        return plan.stored_bytes(recent, pages)

    def growth(self, booking: Booking) -> int:
        """The most bytes that a running request can add to those that it holds."""
        left = booking.most_tokens - booking.tokens
        return self._model_of(booking).estimate(booking.tokens, left).growth

    def need(self, booking: Booking, sizes: RequestBytes) -> Need:
        """The bytes that will be booked for a request, over the tokens of the horizon.

        As if it had not been lowered: what that has freed serves those that run, not new ones.
        ``sizes``: what is booked for it at first.
        """
        tokens = max(booking.tokens, booking.prompt_tokens)
        raw = 0 if booking.is_encoded else sizes.peak
        key = (tokens, sizes.grown, raw, self.lengths.changes // RENEW_NEEDS)
        if booking.latest is None or booking.latest[0] != key:
            booking.latest = key, self._need(booking, tokens, sizes.grown, raw)
        return booking.latest[1]

    def _need(self, booking: Booking, tokens: int, booked: int, raw: int) -> Need:
        most, bound = booking.most_tokens, booking.bound.grown
        left = max(1, most - tokens)
        # Of the points behind its longest end, the first one stands for the moment before that.
        ahead = AHEAD
        if left <= AHEAD[-1]:
            place = bisect_left(AHEAD, left)
            ahead = (*AHEAD[:place], left - 1, *[left] * (len(AHEAD) - place - 1))
        written = booking.written + tokens - booking.prompt_tokens + 1
        survival = self.lengths.survival(booking.tenant, written, written + left, ahead)
        mean, _ = self.ratios.at(booking.profile, tokens)
        sizes = list[int]()
        for more in ahead:
            then = min(most, tokens + more)
            size = int(mean * self._grown(booking.method, min(most, then + tokens_ahead(then))))
            sizes.append(min(bound, max(size, booked)))
        raw_until = max(AHEAD[0], booking.prompt_tokens // PROMPT_TOKENS_A_STEP) if raw else 0
        count = bisect_right(AHEAD, raw_until)
        survival = (*([1.0] * count), *survival[count:])
        sizes[:count] = [max(raw, size) for size in sizes[:count]]
        return Need.of(survival, sizes, self.capacity_bytes)

    def note(self, booking: Booking, tokens: int, held: int, shared: int) -> None:
        """A request holds ``tokens`` tokens in ``held`` bytes of its own pages."""
        if booking.tokens and tokens > booking.tokens:
            start = booking.prompt_tokens - booking.written - 1
            self.lengths.note_written(booking.tenant, booking.tokens - start, tokens - start)
        booking.tokens, booking.held = max(booking.tokens, tokens), held
        bound = self._grown(booking.method, tokens)
        self.ratios.note(booking.profile, tokens, held + shared + booking.lowered, bound)

    def note_end(self, booking: Booking, output_tokens: int, limit: int) -> None:
        """A request finished; at its ``limit`` nothing says how long its answer would be."""
        before = booking.written + max(0, booking.tokens - booking.prompt_tokens) + 1
        self.lengths.note_written(booking.tenant, before, output_tokens)
        if output_tokens < limit:
            self.lengths.note_end(booking.tenant, output_tokens)
