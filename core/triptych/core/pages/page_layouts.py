"""Fields of a page plan, and the layout of each kind of page."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from triptych.core.layout import (
    ALIGN_BYTES,
    FORMATS,
    RECENT_TOKENS,
    Geometry,
    KeyOrder,
    PageLayout,
    page_format,
)
from triptych.core.methods.frontier import MeasuredMethod
from triptych.core.policy import Policy

RECENT_FORMAT = "k8v8"
"""Format of the sink and of the newest tokens of a request that is compressed."""
RECENT_PARTS = 8
"""Most small pages of a page."""
BLOCK_PAGES = 2
"""High pages of a head row in one block of the prefix cache. Larger blocks match fewer tokens,
smaller ones need more look-ups and leases."""


@dataclass(frozen=True)
class PageLayouts:
    """The fields of a ``PagePlan``, and what follows from them for pages of each kind."""

    geometry: Geometry
    page_bytes: int
    policy: Policy
    prefix_bytes: int = 0
    """Bytes of pages for the prefix cache; 0: there is none."""
    share_pages: bool = False
    """Whether requests read pages of cached prefixes in place instead of copying them."""
    repeatable_prompts: bool = False
    """Whether the tokens of an answer are the same, whatever of its prompt was cached."""
    keeps_answers: bool = False
    """Whether outputs are put into the prefix cache, those of conversations or all."""
    head_budgets: bytes = b""
    """Share of pages that each head row reads in a decode step (``core.head_budgets``); empty: all
    head rows read the same share."""
    chunk_tokens: int = 0
    """Most prompt tokens of a prefill step, in all layers."""
    layers_at_once: int = 0
    """Layers of a longer prompt that are prefilled and handed over at a time; 0: all."""
    keeps_raw: bool = False
    """Whether the raw pages of a prompt stay until its request ends, instead of being freed once it
    is compressed: an ablation of zombie reclaim. Only simulated workers do so."""
    key_order: KeyOrder = "channel"
    """Order of quantized keys in a page: by channel for decode on a CPU, by token on a GPU."""
    reads_low_tokens: bool = False
    """Whether step plug-ins or page selection read scores or positions of low tokens."""
    others: tuple[Policy, ...] = ()
    """Policies of the methods that a request may name beside the default one, ``policy``."""
    measured: tuple[MeasuredMethod, ...] = ()
    """What calibration measured with these settings, of any method."""
    adaptive: tuple[str, ...] = ()
    """Methods among which the router chooses for requests that name none; empty: they have the
    default one."""

    @cached_property
    def raw(self) -> PageLayout:
        """Layout of 16-bit pages."""
        raw = self.geometry.stored(FORMATS["fp16"])
        return PageLayout(raw, self.geometry.head_dim, self.page_bytes)

    @cached_property
    def recent(self) -> PageLayout:
        """Layout of pages for the sink and the newest tokens; as raw pages if high ones have 16
        bits."""
        if not self.policy.is_quantized:
            return self.raw
        form, dim = self.geometry.stored(page_format(RECENT_FORMAT)), self.geometry.head_dim
        whole = PageLayout(form, dim, self.page_bytes, "token")
        parts = RECENT_PARTS
        while parts > 1 and (
            self.page_bytes % (parts * ALIGN_BYTES)
            or whole.used_bytes(RECENT_TOKENS) > self.page_bytes // parts
        ):
            parts //= 2
        return replace(whole, parts=parts)

    @cached_property
    def high(self) -> PageLayout:
        """Layout of pages for significant and new tokens; as raw pages if these have 16 bits."""
        return replace(self.layout_of(self.policy.high_format), has_bias=self.merges)

    @cached_property
    def low(self) -> PageLayout | None:
        """Layout of pages for less significant tokens; None: the policy has no low class."""
        low = self.policy.low_format
        return None if low is None else replace(self.layout_of(low), is_tracked=self.tracks_low)

    @property
    def tracks_low(self) -> bool:
        """Whether low tokens have scores and positions.

        They need none if they stay low to the end, and nothing else asks for them. An answer that
        is published is found by positions, from the last block of the prompt on: it has none in low
        pages if as many new tokens are high, and none is downgraded while it is generated.
        """
        policy = self.policy
        parts = (policy,) if policy.images is None else (policy, policy.images)
        may_leave = any(part.drops_tokens or part.mass_high > 0 for part in parts)
        is_found = not self.keeps_answers or policy.high_window_tokens >= self.block_tokens
        return may_leave or self.reads_low_tokens or self.has_windows or not is_found

    @cached_property
    def classes(self) -> tuple[PageLayout, ...]:
        """Layouts of the policy's classes, high first; empty if raw pages are the final ones."""
        if not self.compresses:
            return ()
        return (self.high,) if self.low is None else (self.high, self.low)

    @cached_property
    def compresses(self) -> bool:
        """Whether tokens move from raw pages to others; False: raw pages are the final ones."""
        return self.policy.compresses or self.has_windows

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, 0 for layers whose pages hold tokens of all positions.

        Where tokens are merged, all layers do: networks are trained for models without windows, and
        rules refuse others.
        """
        given = () if self.merges else self.geometry.windows
        return given or (0,) * self.geometry.layers

    @cached_property
    def has_windows(self) -> bool:
        """Whether pages of some layers hold the tokens of a sliding window only."""
        return any(self.windows)

    @cached_property
    def rows_by_window(self) -> Mapping[int, int]:
        """Head rows by the sliding window whose tokens their pages hold; 0: tokens of all
        positions."""
        return self.geometry.rows_by_window if self.has_windows else {0: self.geometry.head_rows}

    @property
    def merges(self) -> bool:
        """Whether tokens of prompts are merged. Their high pages have biases."""
        return self.policy.merges

    @property
    def codes_whole_pages(self) -> bool:
        """Whether all tokens of a high page are encoded together.

        Tokens leave the recent pages a whole high page at a time.
        """
        return self.high.format.codes_whole_pages

    @property
    def reads_in_blocks(self) -> bool:
        """Whether tokens of a prompt are dropped while it is read."""
        return self.policy.reads_in_blocks

    @cached_property
    def sink_tokens(self) -> int:
        """First tokens of a sequence that stay in recent pages, rounded up to whole pages."""
        return self.recent.pages(self.policy.sink_tokens) * self.recent.tokens

    @property
    def sink_pages(self) -> int:
        """Recent pages of a head row that never retire."""
        return self.sink_tokens // self.recent.tokens

    @cached_property
    def retire_tokens(self) -> int:
        """Tokens of a head row that move from recent to high and low pages at a time, in decode.

        They free as many bytes of recent pages as a high page takes, or fill a high page.
        """
        if self.codes_whole_pages:
            return self.high.tokens
        return self.recent.parts * self.recent.tokens if self.compresses else 0

    @property
    def retire_pages(self) -> int:
        """Recent pages of a head row that retire at a time."""
        return self.retire_tokens // self.recent.tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: two high pages of a head row."""
        return BLOCK_PAGES * self.high.tokens

    def most_pages(self, tokens: int) -> int:
        """Most pages of ``tokens`` encoded tokens of a head row, in any two classes."""
        mixed = 1 if self.low is not None and tokens > 0 else 0
        return self.high.pages(tokens) + mixed

    def stored_bytes(self, recent: int, encoded: int) -> int:
        """Bytes of the pool's pages for recent pages and for high and low pages of a request.

        ``recent``, ``encoded``: pages of all head rows.
        """
        return (self.recent.pool_pages(recent) + encoded) * self.page_bytes

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens in 16 bits, without page overhead."""
        return 2 * tokens * self.geometry.token_numbers

    def layout_of(self, name: str) -> PageLayout:
        """Layout of pages of a format, as quantized pages are."""
        form, dim = self.geometry.stored(page_format(name)), self.geometry.head_dim
        return PageLayout(form, dim, self.page_bytes, self.key_order)
