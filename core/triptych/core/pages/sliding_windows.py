"""Tokens and pages of layers with a sliding window."""

from triptych.core.pages.prompt_tokens import PromptTokens


class SlidingWindows(PromptTokens):
    """Which tokens the pages of layers with a sliding window hold."""

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
