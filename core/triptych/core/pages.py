"""The page plan: the size of a page, and which formats hold which tokens of a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from triptych.core.config import AppConfig, PoolConfig
from triptych.core.errors import ConfigError, FloorNotMet, UnknownMethod
from triptych.core.layout import (
    ALIGN_BYTES,
    FORMATS,
    RECENT_TOKENS,
    Geometry,
    KeyOrder,
    PageLayout,
    page_format,
)
from triptych.core.methods.frontier import Measured, MeasuredMethod, check_max_kl, nearest
from triptych.core.methods.learned_files import LearnedFile
from triptych.core.methods.table import policies_of
from triptych.core.policy import Policy
from triptych.core.profile import Profile

NEAR_SHARE = 0.8
"""Largest share of a GPU's memory beside the model for copies of the pool's pages; steps compute in
the rest."""
RECENT_FORMAT = "k8v8"
"""Format of the sink and of the newest tokens of a request that is compressed."""
RECENT_PARTS = 8
"""Most small pages of a page."""
BLOCK_PAGES = 2
"""High pages of a head row in one block of the prefix cache. Larger blocks match fewer tokens,
smaller ones need more look-ups and leases."""


@dataclass(frozen=True)
class PagePlan:
    """Which pages hold a request's keys and values: raw, recent, high and low pages.

    Prefill writes raw 16-bit pages. The compressor moves the tokens of a prompt to high and low
    pages, except the sink and the newest ones, which it moves to recent pages: small pages, so
    that a short prompt does not take a whole page for each head row. Decode writes new tokens to
    recent pages. When so many of them are older than the window that they free the bytes of a high
    page, or fill one that is encoded whole, they move to high and low pages. A 16-bit policy leaves
    all tokens in raw pages. If only high tokens have 16 bits, recent and high pages do too.

    Pages of a layer with a sliding window hold the tokens that later ones can read, and less than a
    page of older ones. Behind the recent window all of them are high, in pages that belong to the
    request alone. If layers have windows, a 16-bit policy moves tokens to high pages too, of 16
    bits, since raw pages have the same tokens in all layers.

    A server can offer several methods: this is the plan of its default one, and ``of_method`` has
    those of the others. They differ in the policy alone.
    """

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

    @classmethod
    def of(
        cls,
        config: AppConfig,
        geometry: Geometry,
        profile: Profile | None = None,
        *,
        is_plain: bool = False,
        learned: Sequence[LearnedFile] = (),
    ) -> "PagePlan":
        """Resolve the settings that depend on the model.

        ``is_plain``: whether its layers can be run a few at a time. ``learned``: files of networks
        for it.
        """
        page = config.pool.page_bytes
        default, *others = policies_of(config.compressor, profile, learned)
        for policy in (default, *others):
            _check_selection(config, policy)
        plan = cls(
            geometry,
            geometry.page_bytes(on_disk=bool(config.pool.arena_path)) if page == "auto" else page,
            default,
            # Decode would read pages in host memory over the bus at each step.
            share_pages=config.pool.share_pages and config.pool.arena == "host",
            repeatable_prompts=config.pool.repeatable_prompts,
            keeps_answers=config.pool.keep_answers != "never",
            head_budgets=_head_budgets(config, profile),
            key_order="token" if config.decode.actor.num_gpus else "channel",
            reads_low_tokens=bool(config.decode.plugins)
            or config.decode.selection.method != "none",
            others=tuple(others),
        )
        plan = plan.with_measurements(config, profile, learned)
        for one in plan.by_method.values():
            one.check_formats()
            _check_blocks(one)
        plan = replace(plan, prefix_bytes=plan.bytes_for_prefixes(config.pool))
        compress = any(one.compresses for one in plan.by_method.values())
        # A group of layers is encoded before its decode worker, and with it an arena, is chosen.
        in_parts = is_plain and config.pool.arena == "host"
        if in_parts and compress and not plan.prefix_bytes:
            chunk_tokens = config.prefill.max_num_batched_tokens
            layers = config.experimental.layers_at_once
            plan = replace(plan, chunk_tokens=chunk_tokens, layers_at_once=layers)
        plan.check_capacity(config.pool.kv_cache_memory_bytes - plan.prefix_bytes)
        return plan

    @cached_property
    def by_method(self) -> Mapping[str, "PagePlan"]:
        """The plan of each method that the server offers, its default first."""
        plans = {policy.name: replace(self, policy=policy, others=()) for policy in self.others}
        return {self.policy.name: self, **plans}

    def of_method(self, name: str) -> "PagePlan":
        """The plan of a method; of the default one for an empty name.

        Raises: UnknownMethod if the server does not offer it
        """
        if not name:
            return self
        if name not in self.by_method:
            raise UnknownMethod(name, tuple(self.by_method))
        return self.by_method[name]

    def with_measurements(
        self, config: AppConfig, profile: Profile | None, learned: Sequence[LearnedFile]
    ) -> "PagePlan":
        """The plan with what the profile knows of methods, and those to choose among.

        Raises: ConfigError if an adaptive server has no choice, or no method meets its floor
        """
        found = profile.fidelity_of(config, learned) if profile else {}
        times = profile.pareto if profile else {}
        measured = tuple(
            MeasuredMethod(name=name, fidelity=each, compress_us=times.get(name, 0.0))
            for name, each in found.items()
        )
        names = tuple(name for name in times if name in found and name in self.by_method)
        is_adaptive, limit = config.compressor.adaptive, config.compressor.max_kl
        if is_adaptive and len(names) < 2:
            raise ConfigError(
                f"compressor.adaptive: {len(names)} methods are offered that the profile has "
                "measured with these settings and has on its frontier, and a choice needs two: "
                "run 'triptych calibrate --pareto', set compressor.profile to its file, and leave "
                "the settings of methods, decode.selection and decode.plugins as it measured them"
            )
        plan = replace(self, measured=measured, adaptive=names if is_adaptive else ())
        try:
            check_max_kl(plan.fidelity, plan.adaptive or (self.policy.name,), limit, 0)
        except FloorNotMet as error:
            raise ConfigError(f"compressor.max_kl={limit:g}: {error}") from error
        return plan

    @cached_property
    def fidelity(self) -> Measured:
        """The measured fidelity of each method."""
        return {one.name: one.fidelity for one in self.measured}

    def kl_of(self, method: str, tokens: int) -> float | None:
        """Measured KL of a method near a length; None if nobody measured it."""
        found = nearest(self.fidelity.get(method, ()), tokens)
        return None if found is None else found.kl

    def may_lower(self, method: str, max_kl: float, tokens: int) -> bool:
        """Whether a request with a limit of KL meets it if all of its tokens are low.

        ``max_kl``: 0 is no limit.
        """
        low = self.of_method(method).policy.low_format
        kl = self.kl_of(f"uniform:{low}", tokens)
        return not max_kl or (kl is not None and kl <= max_kl)

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

    def check_formats(self) -> None:
        """Raise ConfigError when a page is too small for one token of a format in use."""
        for name in ("fp16", self.policy.high_format, self.policy.low_format):
            if name is not None:
                self._layout(name)
        if self.geometry.has_latents:
            _check_latents(self)
        if self.codes_whole_pages and (
            not self.high.tokens or self.high.tokens % self.recent.tokens
        ):
            raise ConfigError(
                f"pool.page_bytes={self.page_bytes}: {self.policy.name!r} encodes "
                f"{self.high.tokens} tokens at a time, and small pages hold {self.recent.tokens}: "
                "use a size with small pages of 3 tokens, such as 'auto'"
            )
        if self.policy.key_merging is not None and any(self.geometry.windows):
            raise ConfigError(
                f"compressor.policy={self.policy.name}: layers of this model have a sliding "
                "window, and some members of a merged token may be older than it: use a method "
                "that merges no tokens, such as 'snapkv'"
            )
        for file in self.policy.mergers.values():
            if file.chunk_tokens > self.retire_tokens:
                raise ConfigError(
                    f"compressor.learned: {file.path!r} merges {file.chunk_tokens} tokens; at most "
                    f"{self.retire_tokens} with pool.page_bytes={self.page_bytes}"
                )

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
        return replace(self._layout(self.policy.high_format), has_bias=self.merges)

    @cached_property
    def low(self) -> PageLayout | None:
        """Layout of pages for less significant tokens; None: the policy has no low class."""
        low = self.policy.low_format
        return None if low is None else replace(self._layout(low), is_tracked=self.tracks_low)

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

    @cached_property
    def sink_tokens(self) -> int:
        """First tokens of a sequence that stay in recent pages, rounded up to whole pages."""
        return self.recent.pages(self.policy.sink_tokens) * self.recent.tokens

    @cached_property
    def retire_tokens(self) -> int:
        """Tokens of a head row that move from recent to high and low pages at a time, in decode.

        They free as many bytes of recent pages as a high page takes, or fill a high page.
        """
        if self.codes_whole_pages:
            return self.high.tokens
        return self.recent.parts * self.recent.tokens if self.compresses else 0

    def leaving_tokens(self, tokens: int) -> int:
        """Tokens of each head row that the compressor moves to high and low pages.

        ``tokens``: length of the prompt. The tokens behind the sink leave if they are older than
        the window and fill high pages, or so much of the last one that it takes no more bytes
        than they do in recent pages. Behind fixed pages, which end with a block, pages are filled
        from there on. Tokens that are merged leave in whole chunks.
        """
        if not self.compresses:
            return 0
        ready = max(0, tokens - self.sink_tokens - self.policy.window_tokens)
        if self.codes_whole_pages:
            return ready - ready % self.high.tokens
        has_blocks = self.has_fixed_pages and self.sink_tokens + ready >= self.block_tokens
        chunk = self.policy.merged_tokens
        rest = (ready + self.sink_shift * has_blocks) % (self.high.tokens * chunk)
        leaving = ready if rest >= self.retire_tokens else max(0, ready - rest)
        return leaving // chunk * chunk

    def kept_tokens(self, tokens: int) -> int:
        """Tokens of a head row that are stored of a prompt of ``tokens`` tokens that is read in
        blocks, the mean over head rows: at least the sink and the newest ones; all of them without
        blocks."""
        rule = self.policy.retention
        if rule is None or not self.reads_in_blocks:
            return tokens
        return min(tokens, max(rule.most_tokens(tokens), self.full_recent_tokens))

    def raw_row_pages(self, tokens: int) -> int:
        """Raw pages of a head row of a prompt, the mean over head rows: of all tokens, or of the
        budget and a block.

        Layers with budgets of their own fill one page more than the mean says.
        """
        rule = self.policy.retention
        if rule is None or not self.reads_in_blocks:
            return self.raw.pages(tokens)
        most = self.kept_tokens(tokens) + rule.block_tokens
        return self.raw.pages(tokens) if tokens <= most else self.raw.pages(most) + 1

    @property
    def reads_in_blocks(self) -> bool:
        """Whether tokens of a prompt are dropped while it is read."""
        return self.policy.reads_in_blocks

    def of_floor(self, floor: str) -> "PagePlan":
        """The plan by which prefill reads prompts of requests with a floor: with ``high`` none of
        their tokens is dropped."""
        return self._without_blocks if floor == "high" and self.reads_in_blocks else self

    @cached_property
    def _without_blocks(self) -> "PagePlan":
        rule = self.policy.retention
        assert rule is not None
        whole = replace(self.policy, retention=replace(rule, block_tokens=0))
        return replace(self, policy=whole, others=())

    def encoded_tokens(self, leaving: int) -> int:
        """High and low tokens of each head row, dropped ones included, of ``leaving`` tokens.

        About so many where a rule merges them: it merges those of prompts alone.
        """
        rule = self.policy.key_merging
        return (
            leaving // self.policy.merged_tokens
            if rule is None
            else round(rule.keep_share * leaving)
        )

    def recent_pages(self, tokens: int) -> int:
        """Most recent pages of a head row of ``tokens`` tokens after compression."""
        most = min(tokens, self.full_recent_tokens) if self.compresses else tokens
        return self.recent.pages(most)

    @cached_property
    def full_recent_tokens(self) -> int:
        """Recent tokens of a head row at which those behind the sink retire in decode.

        ``retire_tokens`` of them are older than the window, and the last page is full. The emptied
        pages are the next ones to be written, so no recent page is ever empty for long.
        """
        least = self.sink_tokens + self.policy.window_tokens + self.retire_tokens
        return self.recent.pages(least) * self.recent.tokens

    def layers_of(self, prompt_tokens: int) -> int:
        """Layers of a prompt that are prefilled, handed over and encoded at a time.

        All layers if the prompt fits one step, if a single layer is more work than a step, or if
        all layers are compressed together. No step computes more than ``chunk_tokens`` tokens in
        all layers.
        """
        every = self.geometry.layers
        if self.compresses_all_layers or prompt_tokens <= self.chunk_tokens:
            return every
        of_a_step = self.chunk_tokens * every // prompt_tokens
        return min(self.layers_at_once, of_a_step) or every

    @property
    def compresses_all_layers(self) -> bool:
        """Whether all layers of a prompt are compressed together, however long it is."""
        is_layerwise = self.layers_at_once > 0 and self.compresses
        is_whole = self.policy.compares_layers or self.reads_in_blocks
        return not is_layerwise or self.merges or self.keeps_raw or is_whole

    @property
    def layer_group_bounds(self) -> tuple[int, ...]:
        """Prompt lengths between which ``layers_of`` is constant: it may change after each."""
        if self.compresses_all_layers:
            return ()
        every = self.geometry.layers
        steps = {self.chunk_tokens * every // layers for layers in range(1, every + 1)}
        return tuple(sorted({self.chunk_tokens, *steps}))

    @property
    def sink_pages(self) -> int:
        """Recent pages of a head row that never retire."""
        return self.sink_tokens // self.recent.tokens

    @property
    def retire_pages(self) -> int:
        """Recent pages of a head row that retire at a time."""
        return self.retire_tokens // self.recent.tokens

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache: two high pages of a head row."""
        return BLOCK_PAGES * self.high.tokens

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

    def fixed_span(self, block_tokens: int, tokens: int) -> range:
        """The tokens in fixed pages, of a sequence of ``tokens`` tokens after prefill.

        These are whole blocks of its first ``block_tokens`` tokens, without the sink, which is in
        recent pages. Blocks with tokens of the window are not among them.
        """
        size = self.block_tokens
        behind = self.sink_tokens + self.leaving_tokens(tokens)
        last = min(block_tokens, behind) // size * size
        is_any = self.has_fixed_pages and self.fixed_start < last
        return range(self.fixed_start, last) if is_any else range(0)

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

    def most_pages(self, tokens: int) -> int:
        """Most pages of ``tokens`` encoded tokens of a head row, in any two classes."""
        mixed = 1 if self.low is not None and tokens > 0 else 0
        return self.high.pages(tokens) + mixed

    def visible_tokens(self, tokens: int, window: int) -> int:
        """Those of ``tokens`` encoded tokens of a head row that later tokens read.

        At least ``policy.window_tokens`` of what ``first_read`` names are in recent pages. All of
        them without a window (0).
        """
        if not window:
            return tokens
        reads = window - 1
        if self._keeps_last_blocks:
            reads = max(reads, (self.window_blocks + 1) * self.block_tokens - 1)
        return min(tokens, max(0, reads - self.policy.window_tokens))

    def first_read(self, tokens: int, window: int) -> int:
        """The first position that is read later in a layer with a sliding window; 0 without one.

        ``tokens``: length of the sequence so far.

        The next token reads ``window - 1`` tokens before it. If outputs are cached, the next turn
        may go on behind the last whole block, and reads the blocks of the window before it.
        """
        if not window:
            return 0
        first = max(0, tokens - window + 1)
        if not self._keeps_last_blocks:
            return first
        blocks = max(0, tokens // self.block_tokens - self.window_blocks)
        return min(first, blocks * self.block_tokens)

    def first_kept(self, tokens: int, window: int) -> int:
        """The first position of a prompt of ``tokens`` tokens whose token the pages of a layer with
        a sliding window keep; 0 without one (0).

        Tokens that are encoded together are kept or dropped together.
        """
        first = self.first_read(tokens, window)
        if self.codes_whole_pages:
            behind = max(0, first - self.sink_tokens)
            return min(first, self.sink_tokens + behind // self.high.tokens * self.high.tokens)
        return first

    def most_row_pages(self, tokens: int, window: int) -> int:
        """Most pages of a head row of which ``tokens`` tokens were encoded, in a layer with a
        sliding window; 0: without one.

        In a layer with a window the tokens that retired last may be older than the window, and the
        first page may hold one token that is not.
        """
        if not window:
            return self.most_pages(tokens)
        kept = max(self.visible_tokens(tokens, window), self.retire_tokens)
        return self.high.pages(min(tokens, kept + self.high.tokens - 1))

    def most_encoded_pages(self, tokens: int) -> int:
        """Most high and low pages of a request of which each head row has encoded ``tokens``
        tokens."""
        return sum(
            rows * self.most_row_pages(tokens, window)
            for window, rows in self.rows_by_window.items()
        )

    def _layout(self, name: str) -> PageLayout:
        form, dim = self.geometry.stored(page_format(name)), self.geometry.head_dim
        return PageLayout(form, dim, self.page_bytes, self.key_order)

    def stored_bytes(self, recent: int, encoded: int) -> int:
        """Bytes of the pool's pages for recent pages and for high and low pages of a request.

        ``recent``, ``encoded``: pages of all head rows.
        """
        return (self.recent.pool_pages(recent) + encoded) * self.page_bytes

    def raw_bytes(self, tokens: int) -> int:
        """Bytes of the keys and values of ``tokens`` tokens in 16 bits, without page overhead."""
        return 2 * tokens * self.geometry.token_numbers


def _check_blocks(plan: PagePlan) -> None:
    """Raise ConfigError for models whose layers drop tokens of a prompt by another rule."""
    if plan.reads_in_blocks and plan.has_windows:
        raise ConfigError(
            f"compressor: {plan.policy.name!r} drops tokens of each layer while a prompt is read, "
            "and this model has layers with a sliding window, whose tokens are dropped by their "
            "positions: choose another method, such as 'snapkv'"
        )


def _check_latents(plan: PagePlan) -> None:
    """Raise ConfigError for methods that treat keys and values of a token in different ways."""
    policy = plan.policy
    parts = (policy,) if policy.images is None else (policy, policy.images)
    if policy.key_merging is not None:
        raise ConfigError(
            f"compressor.policy={policy.name}: this model stores latents, which have no keys of "
            "heads to compare: use a method that merges no tokens, such as 'uniform:k4v4'"
        )
    if any(part.merger or part.scorer for part in parts):
        raise ConfigError(
            f"compressor.policy={policy.name}: this model stores latents, which are keys and "
            "values at once, and learned networks read and merge these apart: use a method "
            "without them"
        )
    if plan.low is not None and plan.low.format == plan.high.format:
        raise ConfigError(
            f"compressor.low_format={policy.low_format}: this model stores latents, whose format "
            f"is then {plan.low.format.name}, as with high_format={policy.high_format}: use one "
            "with fewer bits, such as 'k4v2'"
        )


def _check_selection(config: AppConfig, policy: Policy) -> None:
    """Raise ConfigError if pages would be ranked whose summaries are not like their logits.

    Summaries are of keys alone, without biases, and are made of pages whose keys are read token by
    token.
    """
    how = config.decode.selection.method
    high = page_format(policy.high_format)
    if high.codes_whole_pages and how != "none":
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method={how}: pages of "
            f"{high.name} have no summaries; serve the method without selection"
        )
    if how == "a2ats" and (policy.kv_rotation.bases or policy.kv_rotation.pair_order):
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method=a2ats: codes are of "
            "keys before RoPE, and coordinates of each head mix what RoPE turns; use 'moments' or "
            "'box'"
        )
    if policy.merges and how != "none":
        raise ConfigError(
            f"compressor.methods: {policy.name!r} with decode.selection.method={how}: selection "
            "ranks pages by their keys, and merged tokens have biases beside them; serve the "
            "method without selection"
        )


def _head_budgets(config: AppConfig, profile: Profile | None) -> bytes:
    is_even = config.decode.selection.head_budgets == "even"
    return b"" if is_even or profile is None else profile.head_budget_codes
