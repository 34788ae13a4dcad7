"""What every method is given, and what it hands back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt to compress, then tokens that are forced, then tokens that are free.

    Only the prompt is seen by the compressor. What is forced comes after: a text's
    continuation, or the question about the prompt.
    """

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()
    """Tokens after the prompt, whatever the model would say."""
    free_tokens: int = 0
    """Tokens of the greedy answer after them."""
    scored: bool = False
    """Whether the logits before ``forced[1:]`` are kept; the first comes from the prompt alone."""

    @property
    def answer_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.forced) + self.free_tokens


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one compressed prompt, next to its keys and values in 16 bits."""

    full_bytes: int
    """Keys and values of all tokens in 16 bits, nothing else."""
    data_bytes: int
    """What attention reads: codes and scales of the tokens that are stored; of a method that
    leaves out pages, those that it reads, on the mean of its steps, and their summaries."""
    all_in_bytes: int
    """All that is held for the prompt: whole pages with scores and positions, and their tables."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a method did with a case."""

    logits: Tensor | None
    """[forced tokens - 1, vocab] float32, before each of ``forced[1:]``, if the case is scored."""
    tokens: tuple[int, ...]
    """The free tokens."""
    footprint: Footprint
    hit: float | None = None
    """Share of all attention that goes to what is read, where a method's masks tell."""


class Method(Protocol):
    """A way to keep a prompt's keys and values."""

    @property
    def name(self) -> str: ...

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Take the cases one by one or together; the outcomes come in their order."""
        ...


@dataclass(frozen=True)
class EqualBytes:
    """A method that is given as many bytes as another one took."""

    name: str
    at: Callable[[float], Method]
    """Makes the method from a share of the bytes that 16 bits take."""
