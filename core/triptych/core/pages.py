"""What router and stages must agree on: the shape of pages, and which formats hold what."""

from dataclasses import dataclass, replace
from functools import cached_property

from triptych.core.config import AppConfig, PoolConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, Geometry, PageLayout, default_page_bytes, page_format
from triptych.core.policy import Policy
from triptych.core.profile import Profile

NEAR_SHARE = 0.8
"""Of a GPU's memory beside the model, at most so much is for copies of the pool's pages: steps need
some for what they compute."""
BLOCK_PAGES = 2
"""High pages of a head row in one block of a prefix: coarser blocks match less, finer ones cost
more look-ups and leases."""


@dataclass(frozen=True)
class PagePlan:
    """Where a request's keys and values go: raw 16-bit pages first, then the policy's formats.

    A token is written to a raw page. The first raw pages, which hold the sink tokens, and the
    newest ``window_tokens`` tokens stay there; when a whole raw page in between is older than the
    window, its tokens move into high and low pages. So raw pages are the prefill stage's
    output, the recent window, and the write buffer of the decode stage, and they pass from
    stage to stage as they are.
    """

    geometry: Geometry
    page_bytes: int
    policy: Policy
    prefix_bytes: int = 0
    """Page memory that keeps prefixes of prompts; 0: none is kept."""
    share_pages: bool = False
    """Whether requests read the pages of cached prefixes where they lie, if they can."""
    spread: bytes = b""
    """How the pages that a decode step reads are spread over head rows; empty: evenly."""
    chunk_tokens: int = 0
    """Prompt tokens, all layers of them, that a step of the prefill stage reads at most."""
    layers_at_once: int = 0
    """Layers that are handed over at a time of a prompt that is longer; 0: all."""

    @classmethod
    def of(
        cls,
        config: AppConfig,
        geometry: Geometry,
        profile: Profile | None = None,
        *,
        is_plain: bool = False,
    ) -> "PagePlan":
        """Resolve the settings that depend on the model.

        ``is_plain``: whether its layers can be run a few at a time.
        """
        page = config.pool.page_bytes
        plan = cls(
            geometry,
            default_page_bytes(geometry.head_dim, on_disk=bool(config.pool.arena_path))
            if page == "auto"
            else page,
            Policy.of(config.compressor, profile),
            share_pages=config.pool.share_pages,
            spread=_spread(config, profile),
        )
        plan.check_formats()
        plan = replace(plan, prefix_bytes=plan.bytes_for_prefixes(config.pool))
        if is_plain and plan.compresses and not plan.prefix_bytes:
            chunk_tokens = config.prefill.max_num_batched_tokens
            layers = config.experimental.layers_at_once
            plan = replace(plan, chunk_tokens=chunk_tokens, layers_at_once=layers)
        plan.check_capacity(config.pool.kv_cache_memory_bytes - plan.prefix_bytes)
        return plan

    def bytes_for_prefixes(self, config: PoolConfig) -> int:
        """Resolve ``pool.prefix_bytes``; a quarter that holds too little is not set aside.

        Raises: ConfigError if the setting is a number of bytes that holds too little
        """
        least = 2 * self.block_pages(0) * self.page_bytes
        asked = config.prefix_bytes
        if asked == "auto":
            quarter = config.kv_cache_memory_bytes // 4
            return quarter if quarter >= least else 0
        if 0 < asked < least:
            raise ConfigError(
                f"pool.prefix_bytes={asked}: expected 0, or at least {least} bytes (two blocks of "
                f"{self.block_tokens} tokens)"
            )
        return asked

    def check_formats(self) -> None:
        """Raise ConfigError when a page is too small for one token of a format in use."""
        for name in ("fp16", self.policy.high_format, self.policy.low_format):
            if name is not None:
                self._layout(name)

    def check_capacity(self, capacity_bytes: int) -> None:
        """Raise ConfigError when the pool cannot hold even one short request."""
        least = 4 * self.geometry.head_rows * self.page_bytes
        if capacity_bytes < least:
            raise ConfigError(
                f"pool.kv_cache_memory_bytes: {capacity_bytes} bytes are left for requests beside "
                f"pool.prefix_bytes={self.prefix_bytes}; this model needs at least {least} bytes "
                f"(four pages of {self.page_bytes} bytes for each of {self.geometry.head_rows} "
                "layers x KV heads)"
            )

    @cached_property
    def raw(self) -> PageLayout:
        """16-bit pages, token by token."""
        return PageLayout(FORMATS["fp16"], self.geometry.head_dim, self.page_bytes)

    @cached_property
    def high(self) -> PageLayout:
        """Pages of significant and of new tokens; raw pages if the policy keeps 16 bits."""
        return self._layout(self.policy.high_format)

    @cached_property
    def low(self) -> PageLayout | None:
        """Pages of less significant tokens."""
        low = self.policy.low_format
        return None if low is None else self._layout(low)

    @cached_property
    def classes(self) -> tuple[PageLayout, ...]:
        """Pages of the policy's classes, high ones first; none if raw pages are the final ones."""
        if not self.compresses:
            return ()
        return (self.high,) if self.low is None else (self.high, self.low)

    @property
    def compresses(self) -> bool:
        """False if the policy keeps 16 bits: then raw pages are the final ones."""
        return self.high.format.is_quantized

    @cached_property
    def sink_tokens(self) -> int:
        """First tokens of a sequence that raw pages hold for good: whole pages of them."""
        return self.raw.pages(self.policy.sink_tokens) * self.raw.tokens

    def leaving_pages(self, raw_tokens: int) -> int:
        """Raw pages of a head row, next to those of the sink, that hold no token of the window."""
        if not self.compresses:
            return 0
        between = raw_tokens - self.sink_tokens - self.policy.window_tokens
        return max(0, between) // self.raw.tokens

    def raw_pages(self, tokens: int) -> int:
        """The most raw pages of a head row of ``tokens`` tokens once the others are encoded."""
        return self.raw.pages(min(tokens, self.full_raw_tokens) if self.compresses else tokens)

    @cached_property
    def full_raw_tokens(self) -> int:
        """Raw tokens of a head row from which on its first page behind the sink leaves.

        It is older than the window by then, and the last page is full: the row would need one
        more, which is the one that leaves. So tokens leave in the step in which a page is needed
        anyway, and none lies empty in between.
        """
        least = self.sink_tokens + self.policy.window_tokens + self.raw.tokens
        return self.raw.pages(least) * self.raw.tokens

    def layers_of(self, prompt_tokens: int) -> int:
        """Layers of a prompt that are read, handed over and encoded at a time.

        All of them if it is read in one step anyway, or if a single layer would be more than a
        step. No step has more to do than one that reads ``chunk_tokens`` through all layers.
        """
        every = self.geometry.layers
        if not self.layers_at_once or prompt_tokens <= self.chunk_tokens:
            return every
        of_a_step = self.chunk_tokens * every // prompt_tokens
        return min(self.layers_at_once, of_a_step) or every

    @property
    def sink_pages(self) -> int:
        """Raw pages of a head row that are never encoded."""
        return self.sink_tokens // self.raw.tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, the unit in which prefixes are kept: two high pages of a head row."""
        return BLOCK_PAGES * self.high.tokens

    @property
    def shares(self) -> bool:
        """Whether a request may read pages of a cached prefix. Raw pages are copied instead: they
        hold the newest tokens of a request as well, so none of them is ever only read."""
        return self.share_pages and self.compresses and self.prefix_bytes > 0

    def shared_span(self, cached_tokens: int, raw_tokens: int) -> range:
        """The cached tokens of a prompt of ``raw_tokens`` that need no pages of its own.

        These are whole blocks, but none with tokens of the sink or of the window, which lie in raw
        pages.
        """
        size = self.block_tokens
        first = -(-self.sink_tokens // size)
        behind = self.sink_tokens + self.leaving_pages(raw_tokens) * self.raw.tokens
        last = min(cached_tokens, behind) // size
        return range(first * size, last * size) if self.shares and first < last else range(0)

    @property
    def prefix_blocks(self) -> int:
        """Blocks that ``prefix_bytes`` holds, all of them behind the first of a prompt."""
        return self.prefix_bytes // (self.block_pages(1) * self.page_bytes)

    @property
    def block_sink_pages(self) -> int:
        """Raw pages of a head row that the first block of a prefix keeps beside its high pages.

        They hold the sink tokens, which are not to be rounded: attention rests on them.
        """
        return min(self.sink_pages, self.block_tokens // self.raw.tokens) if self.compresses else 0

    def block_pages(self, index: int) -> int:
        """Pages of all head rows of the block with this place in a prefix."""
        sink = self.block_sink_pages if index == 0 else 0
        return self.geometry.head_rows * (BLOCK_PAGES + sink)

    def most_pages(self, tokens: int) -> int:
        """The most pages that ``tokens`` encoded tokens of a head row take in any two classes."""
        mixed = 1 if self.low is not None and tokens > 0 else 0
        return self.high.pages(tokens) + mixed

    def _layout(self, name: str) -> PageLayout:
        return PageLayout(page_format(name), self.geometry.head_dim, self.page_bytes)

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens in 16 bits, without any page."""
        return tokens * self.geometry.head_rows * self.geometry.head_dim * 4


def _spread(config: AppConfig, profile: Profile | None) -> bytes:
    is_even = config.decode.selection.head_budgets == "even"
    return b"" if is_even or profile is None else profile.spread_codes
