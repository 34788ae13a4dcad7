"""Prompts on their way through the prefill stage."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.messages import Request
from triptych.workers.prefill.prompt_logprobs import SCORED_TOKENS, PromptLogprobRows

UNENCODED = 1
"""Parts of a prompt that may wait for their compressor while the next one is read."""


@dataclass(eq=False)
class LayerwisePrefill:
    """Where a prompt is that is read some layers at a time.

    Source: FlowPrefill (prefill that stops between layers)
    """

    encoder: str
    """The compressor that gets the layers."""
    reader: str
    """Where it says that they are encoded."""
    at_once: int
    """Layers of a part."""
    layer: int = 0
    """The next one."""
    hidden: Tensor | None = None
    """What it reads, [tokens, E]; None: the embedding."""
    unencoded: set[int] = field(default_factory=set[int])
    """Parts that were handed over and may still have their raw pages, by their first layer."""


@dataclass(eq=False)
class Prompt:
    """A prompt that is being read."""

    request: Request
    due: float
    """When it is to be read to its end, on the clock of the engine's chunks."""
    pages: NDArray[np.int32]
    """Raw pages, [layers, kv_heads, pages of a head row]: of all layers, or of those of a part."""
    read: int = 0
    """Tokens that are through all layers."""
    attention: Tensor | None = None
    """Attention that each token received so far, [layers, heads, tokens]; None: nobody asks."""
    cached: int = 0
    """Tokens that a prefix of another request saved."""
    scores: PromptLogprobRows | None = None
    """How likely its tokens were; None: nobody asks."""
    seconds: float = 0.0
    """Its share of the steps so far, by tokens."""
    ascent: LayerwisePrefill | None = None
    """None: each step reads tokens through all layers."""

    @property
    def left(self) -> int:
        return self.request.known_tokens - self.read

    @property
    def token_s(self) -> float:
        """Seconds per token that was computed here."""
        return self.seconds / max(1, self.read - self.cached)

    @property
    def waits(self) -> bool:
        """Whether nothing of it can be read before its compressor has done more."""
        return self.ascent is not None and len(self.ascent.unencoded) > UNENCODED


@dataclass(frozen=True)
class PendingRequest:
    """A request whose prompt has no pages yet."""

    request: Request
    due: float
    ascent: LayerwisePrefill | None = None
    """How it will be read, if it is some layers at a time."""


@dataclass(frozen=True)
class Piece:
    """What one step reads of a prompt: some tokens in all layers, or all tokens in some layers."""

    prompt: Prompt
    start: int
    tokens: int
    layers: range
    is_through: bool = True
    """Whether the last layer is among them."""

    @property
    def is_last(self) -> bool:
        return self.is_through and self.start + self.tokens == self.prompt.request.known_tokens

    @property
    def logits_at(self) -> range:
        """Which of its tokens' logits are needed: of all, or of the prompt's last one."""
        first = 0 if self.prompt.scores is not None else self.tokens - self.is_last
        return range(first, self.tokens)

    @property
    def positions(self) -> NDArray[np.int64]:
        return np.arange(self.start, self.start + self.tokens)


@dataclass
class Room:
    """What a step can still take in."""

    tokens: int
    scored: int = SCORED_TOKENS
    """Of prompts whose every token is scored: their logits take memory."""

    def fill(self, prompt: Prompt, layers: range) -> Piece | None:
        """As much of a prompt as there is room for; None if that is nothing."""
        count = min(self.tokens, prompt.left)
        if prompt.scores is not None:
            count = min(count, self.scored)
            self.scored -= count
        self.tokens -= count
        return Piece(prompt, prompt.read, count, layers) if count else None
