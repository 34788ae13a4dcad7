"""How many bytes of pages a request will take: upper bounds, before anything has run."""

from dataclasses import dataclass, replace
from typing import Self

from triptych.core.pages import PagePlan


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """Bytes of pages that one request takes at the stages of its life."""

    raw: int
    """The prompt in raw 16-bit pages: from the start of prefill to the end of encoding."""

    encoded: int
    """New pages that the compressor fills while it still reads the raw ones."""

    compressed: int
    """What the decode stage takes over: encoded pages and those of the recent window."""

    growth: int
    """What ``max_tokens`` more tokens can add to ``compressed`` pages, however full they are."""

    grown: int
    """The most that the request holds in the decode stage, before its last token."""

    @property
    def peak(self) -> int:
        """The most that it holds at any time if all stages share one arena."""
        return max(self.raw + self.encoded, self.grown)

    def corrected(self, compressed: int) -> Self:
        """The same request once the compressor has counted its pages."""
        total = compressed + self.growth
        grown = total if compressed > self.compressed else min(self.grown, total)
        return replace(self, compressed=compressed, grown=grown)


@dataclass(frozen=True)
class ByteModel:
    """Page arithmetic of one model under one compression policy, as upper bounds.

    A head row is one (layer, KV head); all rows of a request hold equally many tokens. What
    makes the numbers bounds is how the stages handle a row (``PagePlan``):

    - Prefill writes the whole prompt to raw pages.
    - The oldest raw page is encoded once it is full and all its tokens are older than the
      window; they go behind those in the row's last stored page. So a row that has been
      encoded has at most the window and one page of raw tokens, and at least the window.
    - One more raw page per row is allowed for: a page that is being encoded is held until
      its copy is complete.
    - A 16-bit policy encodes nothing: raw pages are the final ones.

    >>> from triptych.core.layout import Geometry
    >>> plan = PagePlan(Geometry(layers=1, kv_heads=1, head_dim=64), 3584, "k8v4", 64)
    >>> ByteModel(plan).estimate(prompt_tokens=512, max_tokens=64).raw // 3584  # 13 tokens a page
    40
    """

    plan: PagePlan

    def estimate(self, prompt_tokens: int, max_tokens: int) -> RequestBytes:
        """Bound a request that reads ``prompt_tokens`` and writes up to ``max_tokens``."""
        return RequestBytes(
            raw=self._bytes(self.plan.raw.pages(prompt_tokens)),
            encoded=self._bytes(self._stored_pages(prompt_tokens)),
            compressed=self._bytes(self._decode_pages(prompt_tokens)),
            growth=self._bytes(self._growth_pages(prompt_tokens, max_tokens)),
            grown=self._bytes(self._decode_pages(prompt_tokens + max_tokens)),
        )

    def _bytes(self, pages_per_row: int) -> int:
        return pages_per_row * self.plan.geometry.head_rows * self.plan.page_bytes

    def _stored_pages(self, tokens: int) -> int:
        """Stored pages of a row that holds ``tokens`` tokens in all."""
        if not self.plan.compresses:
            return 0
        return self.plan.stored.pages(max(0, tokens - self.plan.window_tokens))

    def _window_pages(self, tokens: int) -> int:
        """Raw pages of a row that holds ``tokens`` tokens in all, the page in transition aside."""
        if not self.plan.compresses:
            return self.plan.raw.pages(tokens)
        return self.plan.raw.pages(min(tokens, self.plan.window_tokens + self.plan.raw.tokens))

    def _decode_pages(self, tokens: int) -> int:
        transition = 1 if self.plan.compresses else 0
        return self._stored_pages(tokens) + self._window_pages(tokens) + transition

    def _growth_pages(self, tokens: int, more: int) -> int:
        """Pages of a row that ``more`` tokens can add, wherever its last pages end."""
        raw = self.plan.raw
        if not self.plan.compresses:
            return raw.pages(tokens + more) - raw.pages(tokens)
        fewest_raw = raw.pages(min(tokens, self.plan.window_tokens))
        more_raw = self._window_pages(tokens + more) + 1 - fewest_raw
        return self.plan.stored.pages(more) + more_raw
