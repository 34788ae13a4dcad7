"""Prompts in prefill, and the chunks of them that one step processes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.messages import Request
from triptych.core.pages import PagePlan
from triptych.workers.prefill.block_rows import BlockRows
from triptych.workers.prefill.prompt_logprobs import SCORED_TOKENS, PromptLogprobRows
from triptych.workers.prefill.prompt_statistics import PromptStatistics
from triptych.workers.prefill.rotary_positions import AXES, rotary_positions

UNENCODED = 1
"""Parts of a prompt that may wait for the compressor while the next part is prefilled."""


@dataclass(eq=False)
class LayerwisePrefill:
    """Progress of a prompt that is prefilled some layers at a time.

    Source: FlowPrefill (prefill that stops between layers)
    """

    encoder: str
    """Name of the compressor that encodes the layers."""
    reader: str
    """Name of the worker to which it reports encoded layers."""
    layers_per_part: int
    """Layers of a part."""
    next_layer: int = 0
    hidden: Tensor | None = None
    """Input of the next layer, [tokens, E]; None: the embedding."""
    unencoded: set[int] = field(default_factory=set[int])
    """First layers of parts that were handed over and are not reported encoded."""


@dataclass(eq=False)
class Prompt:
    """A prompt in prefill."""

    request: Request
    plan: PagePlan
    """That of its compression method."""
    equal: list[Request]
    """Requests with an equal prompt, for which it is computed too."""
    due: float
    """When its prefill is due, on the token clock of ``ChunkScheduler``."""
    pages: NDArray[np.int32]
    """Raw pages, [layers, kv_heads, pages of a head row]: of all layers, or of one part."""
    arena: str = ""
    """Where they are; empty: at the worker's home."""
    layers: range = range(0)
    """The layers of these pages."""
    read: int = 0
    """Tokens computed in all layers."""
    rounded: range = range(0)
    """Positions of the tokens that are rounded as the prefix cache stores them."""
    attention: Tensor | None = None
    """Attention that each token behind the rounded ones received so far, [layers, heads, tokens];
    None: not needed."""
    statistics: PromptStatistics | None = None
    """What is measured of its queries beside attention; None: nothing."""
    cached: int = 0
    """Tokens from the prefix cache."""
    scores: PromptLogprobRows | None = None
    """Log probabilities of its tokens; None: not requested."""
    seconds: float = 0.0
    """Its share of the time of all steps so far, by tokens."""
    layerwise: LayerwisePrefill | None = None
    """None: each step computes tokens in all layers."""
    features: Tensor | None = None
    """Inputs of the tokens of its images, [``image_positions``, E]; None: it has none."""
    two_way_images: bool = False
    """Whether the tokens of an image attend to all of it, and not only to those before them."""
    bounded: BlockRows | None = None
    """Where its tokens are, if some are dropped after each block of it. Then ``pages`` are all of
    its raw pages in no order, and in the order of head rows once it is read."""

    def __post_init__(self) -> None:
        runs = [run for image in self.request.images for run in image.runs]
        places = [np.arange(first, first + count) for first, count in runs]
        self.image_positions = np.concatenate([np.empty(0, np.int64), *places])
        """Positions of the features of its images, in order."""
        self.rotary = rotary_positions(self.request.images, self.request.known_tokens)
        """Rotary positions of its tokens, [3, tokens]; None: their positions."""
        two_way = runs if self.two_way_images else []
        self.blocks = [range(first, first + count) for first, count in two_way]
        """Tokens that attend to each other in both directions: no step divides them."""

    def block_at(self, position: int) -> range | None:
        """The block that a border at ``position`` would divide."""
        inside = (one for one in self.blocks if one.start < position < one.stop)
        return next(inside, None)

    @property
    def requests(self) -> list[Request]:
        """All requests for which it is computed."""
        return [self.request, *self.equal]

    @property
    def first_observed(self) -> int:
        """The first query that is measured: attention to rounded tokens decides nothing, and some
        methods need the last queries alone, and the rest of a block that they are in."""
        rule = self.plan.policy.observing_rule
        if rule is None or not rule.last_queries:
            return self.rounded.stop
        if self.bounded is not None:
            return max(0, self.bounded.block_end(self.read) - rule.last_queries)
        first = max(0, self.request.known_tokens - rule.last_queries)
        block = self.block_at(first)
        return first if block is None else block.start

    @property
    def tokens_left(self) -> int:
        return self.request.known_tokens - self.read

    @property
    def row_tokens(self) -> NDArray[np.int32]:
        """Tokens that each head row of its pages stores."""
        if self.bounded is not None:
            return self.bounded.row_tokens
        rows = self.pages.shape[0] * self.pages.shape[1]
        return np.repeat(np.int32(self.request.known_tokens), rows)

    @property
    def token_s(self) -> float:
        """Seconds per computed token."""
        return self.seconds / max(1, self.read - self.cached)

    @property
    def waits_for_compressor(self) -> bool:
        """Whether its next layers must wait until the compressor has encoded earlier ones."""
        return self.layerwise is not None and len(self.layerwise.unencoded) > UNENCODED


@dataclass(eq=False)
class PendingRequest:
    """A request in the queue, whose prompt has no pages yet."""

    request: Request
    due: float
    equal: list[Request] = field(default_factory=list[Request])
    """Requests with an equal prompt, for which it will be computed too."""
    layerwise: LayerwisePrefill | None = None
    """Set if it will be prefilled some layers at a time."""
    arena: str = ""
    """Where its raw pages are stored; empty: at the worker's home."""

    @property
    def requests(self) -> list[Request]:
        """All requests for which the prompt will be computed."""
        return [self.request, *self.equal]


@dataclass(frozen=True)
class PrefillChunk:
    """Work on a prompt in one step: some tokens in all layers, or all tokens in some layers."""

    prompt: Prompt
    start: int
    tokens: int
    layers: range
    has_last_layer: bool = True
    """Whether ``layers`` includes the last layer."""

    @property
    def end(self) -> int:
        return self.start + self.tokens

    @property
    def ends_prompt(self) -> bool:
        return self.has_last_layer and self.end == self.prompt.request.known_tokens

    @property
    def logits_at(self) -> range:
        """Tokens whose logits are needed: all, or the prompt's last one."""
        first = 0 if self.prompt.scores is not None else self.tokens - self.ends_prompt
        return range(first, self.tokens)

    @property
    def is_observed(self) -> bool:
        """Whether the attention of some of its queries counts."""
        return self.prompt.attention is not None and self.end > self.prompt.first_observed

    @property
    def statistics(self) -> PromptStatistics | None:
        """The statistics that its queries add to; None: they add to none."""
        return self.prompt.statistics if self.end > self.prompt.first_observed else None

    @property
    def is_two_way(self) -> bool:
        """Whether its tokens attend to each other in both directions; it is one block, then."""
        return any(one.start <= self.start < one.stop for one in self.prompt.blocks)

    def sequences(self) -> list["PrefillChunk"]:
        """Its parts, of which each is a sequence of its own for attention; often itself alone.

        Each reads the parts before it in pages, as a later chunk would. A part begins at the first
        query whose attention counts, if a method needs the last ones alone, and blocks are parts.
        """
        prompt = self.prompt
        rule = prompt.plan.policy.observing_rule
        borders = {edge for block in prompt.blocks for edge in (block.start, block.stop)}
        if rule is not None and rule.last_queries:
            borders.add(prompt.first_observed)
        inside = sorted(edge for edge in borders if self.start < edge < self.end)
        return [
            replace(self, start=start, tokens=end - start)
            for start, end in pairwise((self.start, *inside, self.end))
        ]

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + self.tokens)


@dataclass
class ChunkBudget:
    """Tokens that a step can still process."""

    tokens: int
    scored: int = SCORED_TOKENS
    """Limit for prompts with prompt logprobs: logits of each token take memory."""

    def take(self, prompt: Prompt, layers: range) -> PrefillChunk | None:
        """The next chunk of a prompt within the budget; None if it is empty.

        A chunk ends before a block that it would divide, or behind it if it begins with it.
        """
        count = min(self.tokens, prompt.tokens_left)
        if prompt.bounded is not None:
            count = min(count, prompt.bounded.block_end(prompt.read) - prompt.read)
        if prompt.scores is not None:
            count = min(count, self.scored)
        block = prompt.block_at(prompt.read + count)
        if block is not None:
            count = (block.start if block.start > prompt.read else block.stop) - prompt.read
        if prompt.scores is not None:
            self.scored -= count
        self.tokens -= count
        return PrefillChunk(prompt, prompt.read, count, layers) if count else None


def rotary_of(chunks: Sequence[PrefillChunk]) -> NDArray[np.int64]:
    """Rotary positions of the tokens of a step.

    Shapes:  -> (tokens,), or (AXES, tokens) if those of an image differ
    """
    if all(chunk.prompt.rotary is None for chunk in chunks):
        return np.concatenate([chunk.positions for chunk in chunks])
    return np.concatenate([_of_chunk(chunk) for chunk in chunks], axis=1)


def _of_chunk(chunk: PrefillChunk) -> NDArray[np.int64]:
    rotary = chunk.prompt.rotary
    if rotary is None:
        return np.tile(chunk.positions, (AXES, 1))
    return rotary[:, chunk.start : chunk.end]
