"""Upper bounds of the bytes of pages that a request needs, before it runs."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from triptych.core.messages import Floor
from triptych.core.pages import PagePlan


@dataclass(frozen=True, slots=True)
class RequestBytes:
    """Bytes of pages that one request needs in each stage."""

    raw: int
    """The prompt in raw 16-bit pages, or as many of its layers as there are at once: from the start
    of prefill to the end of encoding."""

    encoded: int
    """What there is beside them at most: new pages that the compressor fills while it still reads
    the raw ones."""

    compressed: int
    """What the decode stage takes over: encoded pages, and small ones of sink and window."""

    growth: int
    """What ``max_tokens`` more tokens can add to ``compressed`` pages, however full they are."""

    grown: int
    """The most that the request holds in the decode stage, before its last token."""

    shared: int = 0
    """Pages of a cached prefix that it reads in the compressor's arena beside all of these; taken
    to another arena they are its own."""

    @property
    def peak(self) -> int:
        """The most that it holds at any time, if all stages share one arena."""
        return max(self.raw + self.encoded, self.grown)

    def with_features(self, features: int) -> Self:
        """The same request with features of images, which prefill reads beside its raw pages."""
        return replace(self, raw=self.raw + features) if features else self

    def corrected(self, compressed: int, shared: int = 0) -> Self:
        """The same request once the compressor has counted its pages."""
        total = compressed + self.growth
        is_bound = compressed + shared <= self.compressed
        grown = min(self.grown - shared, total) if is_bound else total
        return type(self)(self.raw, self.encoded, compressed, self.growth, grown, shared)

    def moved(self) -> Self:
        """The same request in another arena than the prefix that it shared."""
        if not self.shared:
            return self
        return replace(
            self,
            compressed=self.compressed + self.shared,
            grown=self.grown + self.shared,
            shared=0,
        )


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """The longest requests that the page memory can hold."""

    prompt_tokens: int
    """Longest prompt: it is in 16-bit pages for a while."""
    total_tokens: int
    """Most tokens of prompt plus output."""

    @property
    def every_split(self) -> int:
        """Tokens that can be served however they are split into prompt and output; at least 1."""
        return max(1, min(self.prompt_tokens + 1, self.total_tokens))


@dataclass(frozen=True)
class ByteModel:
    """Page arithmetic of one model under one compression policy, as upper bounds.

    A head row is one (layer, KV head). What makes the numbers bounds is how the stages handle
    a row (``PagePlan``):

    - Prefill writes the whole prompt to raw pages. The compressor moves all its tokens.
    - Tokens older than the window are in high or low pages. High pages hold the fewest tokens,
      and a row with two classes has at most one page more than if all its tokens were high.
    - Sink and window are in small pages, which decode reuses, and so are older tokens that are
      fewer than take the bytes of a high page.
    - In a layer with a sliding window, high pages hold the tokens of the window, and less than a
      page of older ones.
    - A 16-bit policy encodes nothing: raw pages are the final ones. If layers have windows, it
      encodes in 16 bits.

    >>> from triptych.core.layout import Geometry
    >>> from triptych.core.policy import Policy
    >>> policy = Policy(name="uniform:k8v4", high_format="k8v4")
    >>> plan = PagePlan(Geometry(layers=1, kv_heads=1, head_dim=64), 3584, policy)
    >>> ByteModel(plan).estimate(prompt_tokens=512, max_tokens=64).raw // 3584  # 13 tokens a page
    40
    """

    plan: PagePlan

    @cached_property
    def _by_method(self) -> Mapping[str, Self]:
        return {name: replace(self, plan=plan) for name, plan in self.plan.by_method.items()}

    def of_method(self, name: str) -> Self:
        """The model of a compression method; of the server's default one for an empty name.

        Raises: UnknownMethod
        """
        plan = self.plan.of_method(name)
        return self if plan is self.plan else self._by_method[name]

    def estimate(self, prompt_tokens: int, max_tokens: int) -> RequestBytes:
        """Bound a request of ``prompt_tokens`` and up to ``max_tokens`` output tokens."""
        raw = self._bytes(self.plan.raw_row_pages(prompt_tokens))
        stored = self._stored_tokens(prompt_tokens)
        compressed = self._decode_bytes(stored)
        kept = raw if self.plan.keeps_raw and self.plan.compresses else 0
        return RequestBytes(
            raw=raw,
            encoded=compressed if self.plan.compresses else 0,
            compressed=compressed + kept,
            growth=self._growth_bytes(prompt_tokens, max_tokens),
            grown=self._decode_bytes(stored + max_tokens) + kept,
        )

    def grown_bytes(self, tokens: int) -> int:
        """The most that a request of ``tokens`` tokens takes in the decode stage, however they are
        split into prompt and output."""
        of_prompt = 0 if self.plan.reads_in_blocks else tokens
        return self.estimate(of_prompt, tokens - of_prompt).grown

    def of_floor(self, floor: Floor) -> Self:
        """The model of requests with a floor: with ``high`` none of their tokens is dropped."""
        plan = self.plan.of_floor(floor)
        return self if plan is self.plan else replace(self, plan=plan)

    def _stored_tokens(self, prompt_tokens: int) -> int:
        """Tokens of which the pages of a compressed prompt are at least as many as its own.

        Layers with budgets of their own fill one page more than the mean of the layers.
        """
        kept = self.plan.kept_tokens(prompt_tokens)
        return min(prompt_tokens, kept + self.plan.high.tokens * self.plan.reads_in_blocks)

    def estimate_in_parts(self, prompt_tokens: int, max_tokens: int) -> RequestBytes | None:
        """The same with layer-wise prefill; None if the prompt cannot use it.

        Two groups of layers are in raw pages at a time: the one in prefill and the one before it.
        """
        every, at_once = self.plan.geometry.layers, self.plan.layers_of(prompt_tokens)
        if 2 * at_once >= every:
            return None
        whole = self.estimate(prompt_tokens, max_tokens)
        more = every * self.plan.page_bytes  # a page of small pages that is not full, of each group
        return replace(
            whole,
            raw=whole.raw * 2 * at_once // every,
            encoded=whole.encoded + more,
            compressed=whole.compressed + more,
            grown=whole.grown + more,
        )

    def limits(
        self, capacity_bytes: int, context_tokens: int, *, is_layerwise: bool
    ) -> ContextLimits:
        """The longest requests, of up to ``context_tokens``, that ``capacity_bytes`` can hold.

        Pages grow with the prompt as long as the same number of layers is in raw pages at a time.
        A longer prompt may have fewer layers in them and need fewer pages than a shorter one, so
        the limit is the first length that does not fit.
        """

        def peak(prompt_tokens: int) -> int:
            parts = self.estimate_in_parts(prompt_tokens, 0) if is_layerwise else None
            return (parts or self.estimate(prompt_tokens, 0)).peak

        prompt = 0
        bounds = self.plan.layer_group_bounds if is_layerwise else ()
        for end in (*(bound for bound in bounds if bound < context_tokens), context_tokens):
            lengths = range(prompt + 1, end + 1)
            fitting = bisect_right(lengths, capacity_bytes, key=peak)
            prompt += fitting
            if fitting < len(lengths):
                break
        grown = range(1, context_tokens + 1)
        total = bisect_right(grown, capacity_bytes, key=self.grown_bytes)
        return ContextLimits(prompt_tokens=prompt, total_tokens=total)

    def _bytes(self, pages_per_row: int) -> int:
        return pages_per_row * self.plan.geometry.head_rows * self.plan.page_bytes

    def _encoded_pages(self, tokens: int) -> int:
        """High and low pages of all rows of ``tokens`` tokens."""
        if not self.plan.compresses:
            return 0
        older = tokens - self._fewest_recent
        return self.plan.most_encoded_pages(older) if older >= self.plan.retire_tokens else 0

    @property
    def _fewest_recent(self) -> int:
        """Tokens that are never in high or low pages."""
        return self.plan.sink_tokens + self.plan.policy.window_tokens

    def _decode_bytes(self, tokens: int) -> int:
        """Pages of ``tokens`` tokens in the decode stage."""
        plan, rows = self.plan, self.plan.geometry.head_rows
        return plan.stored_bytes(rows * plan.recent_pages(tokens), self._encoded_pages(tokens))

    def _growth_bytes(self, tokens: int, more: int) -> int:
        """Pages that ``more`` tokens can add, wherever the last pages of a row end."""
        plan, rows = self.plan, self.plan.geometry.head_rows
        if not plan.compresses:
            return self._bytes(plan.raw.pages(tokens + more) - plan.raw.pages(tokens))
        recent = plan.recent_pages(tokens + more) - plan.recent.pages(
            min(tokens, self._fewest_recent)
        )
        retires = more > 0 and tokens + more > plan.full_recent_tokens
        leaving = more + plan.retire_tokens if retires else 0
        return plan.stored_bytes(rows * recent, plan.most_encoded_pages(leaving))
