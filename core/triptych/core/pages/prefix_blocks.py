"""Blocks of the prefix cache, and the pages of requests that hold them as they are."""

from functools import cached_property

from triptych.core.config import PoolConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.core.pages.page_layouts import BLOCK_PAGES, PageLayouts


class PrefixBlocks(PageLayouts):
    """Which tokens are in blocks of the prefix cache, and which pages are never written again."""

    @property
    def caches_prompts(self) -> bool:
        """Whether requests of the method read and fill the prefix cache.

        Prefill reads the keys of a cached prefix token by token and without biases, so merged
        tokens cannot be one, nor can pages that are encoded whole, nor numbers that rounding does
        not give back; which tokens are merged, or
        dropped by a retention rule, depends on the whole prompt; and blocks of the cache are high,
        whatever modality their tokens have.
        """
        return self.prefix_bytes > 0 and self.prefix_block_tokens > 0

    @cached_property
    def prefix_block_tokens(self) -> int:
        """Tokens of a block of the prefix cache; 0 for methods that never use it."""
        form = self.high.format
        is_own = self.policy.decides_by_whole_prompt or self.codes_whole_pages or not form.is_stable
        return 0 if is_own else self.block_tokens

    @property
    def publishes_answers(self) -> bool:
        """Whether outputs of the method can be in the prefix cache.

        A policy that needs significance but does not score output tokens would classify them
        wrongly in the next turn.
        """
        is_judged = self.policy.needs_significance and not self.policy.score_every
        return self.caches_prompts and not is_judged

    @property
    def window_blocks(self) -> int:
        """Last blocks of a cached prefix that layers with a sliding window read; 0: none do.

        Their pages are in the window entry of a block, those of the other layers in the block.
        """
        return -(-(max(self.windows) - 1) // self.block_tokens)

    @property
    def _keeps_last_blocks(self) -> bool:
        """Whether layers with a sliding window keep what the next turn of a conversation reads."""
        return self.keeps_answers and self.publishes_answers

    @property
    def shares(self) -> bool:
        """Whether a request may read pages of a cached prefix in place.

        16-bit pages are always copied, and so are tokens of layers with a sliding window: they
        leave before the request ends.
        """
        is_quantized = self.policy.is_quantized
        return self.share_pages and is_quantized and self.caches_prompts and not all(self.windows)

    @property
    def rounds_prompts(self) -> bool:
        """Whether prefill rounds whole blocks of a prompt as the prefix cache stores them.

        16-bit blocks come back from the cache as they were computed.
        """
        return self.repeatable_prompts and self.policy.is_quantized and self.caches_prompts

    @property
    def has_fixed_pages(self) -> bool:
        """Whether some pages of a request are never written: blocks of a prompt, shared or own.

        Layers with a sliding window have none.
        """
        return self.shares or (self.rounds_prompts and not all(self.windows))

    @property
    def rounding(self) -> PageLayout:
        """The layout to whose numbers prefill rounds the tokens that it rounds; others are rounded
        to 16 bits."""
        is_own = self.codes_whole_pages or not self.high.format.is_stable
        return self.raw if is_own else self.high

    def rounded_tokens(self, prompt_tokens: int) -> range:
        """Positions of the prompt tokens that prefill rounds: whole blocks without the sink.

        They stay in the high format, whatever attention they receive.
        """
        if not self.rounds_prompts:
            return range(0)
        end = prompt_tokens // self.block_tokens * self.block_tokens
        return range(min(end, self.block_sink_pages * self.raw.tokens), end)

    @property
    def fixed_start(self) -> int:
        """The first token that may be in a fixed page: the one behind the sink.

        The high page of a block with the end of the sink holds that behind its other tokens, so a
        request reads the page up to it. If it saves no page, the page is not shared.
        """
        in_page = self.sink_tokens % self.high.tokens
        return self.sink_tokens + (-in_page % self.high.tokens if not self.sink_shift else 0)

    @property
    def sink_shift(self) -> int:
        """Tokens of the sink in the high page of a block that holds other tokens in front of them.

        0: there is no such page.
        """
        in_page = self.sink_tokens % self.high.tokens
        return in_page if self.policy.is_quantized and in_page <= self.retire_tokens else 0

    @property
    def prefix_blocks(self) -> int:
        """Blocks that ``prefix_bytes`` holds, computed with the size of any but the first block.

        It holds more once window entries have been evicted.
        """
        return self.prefix_bytes // (self.block_pages(1) * self.page_bytes)

    @property
    def block_sink_pages(self) -> int:
        """Raw pages of a head row in the first block of a prefix, beside its high pages.

        They hold the sink tokens exactly, since a request stores these with more bits.
        """
        wanted = self.raw.pages(self.policy.sink_tokens)
        return min(wanted, self.block_tokens // self.raw.tokens) if self.policy.is_quantized else 0

    def block_pages(self, index: int) -> int:
        """Pages of the block with this index in a prefix, and of its window entry."""
        return self.geometry.head_rows * self.block_row_pages(index)

    def block_row_pages(self, index: int) -> int:
        """Pages of a head row of the block with this index in a prefix."""
        return BLOCK_PAGES + (self.block_sink_pages if index == 0 else 0)

    def bytes_for_prefixes(self, config: PoolConfig) -> int:
        """Resolve ``pool.prefix_bytes``: ``auto`` is a quarter, or 0 if that holds too little.

        Raises: ConfigError if the setting is a number of bytes that holds too little
        """
        least = 2 * self.block_pages(0) * self.page_bytes
        setting = config.prefix_bytes
        if setting == "auto":
            quarter = config.kv_cache_memory_bytes // 4
            return quarter if quarter >= least else 0
        if 0 < setting < least:
            raise ConfigError(
                f"pool.prefix_bytes={setting}: expected 0, or at least {least} bytes (two blocks "
                f"of {self.block_tokens} tokens)"
            )
        return setting
