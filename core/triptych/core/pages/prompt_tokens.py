"""Which tokens of a prompt are read, kept and encoded at a time."""

from dataclasses import replace
from functools import cached_property
from typing import Self

from triptych.core.pages.prefix_blocks import PrefixBlocks


class PromptTokens(PrefixBlocks):
    """The way of a prompt's tokens from raw to recent, high and low pages."""

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

    def of_floor(self, floor: str) -> Self:
        """The plan by which prefill reads prompts of requests with a floor: with ``high`` none of
        their tokens is dropped."""
        return self._without_blocks if floor == "high" and self.reads_in_blocks else self

    @cached_property
    def _without_blocks(self) -> Self:
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
