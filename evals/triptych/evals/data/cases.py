"""Cases that every method runs, and their outcomes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt to compress, then teacher-forced tokens, then greedy tokens.

    The compressor sees the prompt alone. Forced tokens follow: a text's continuation, or the
    question about the prompt.
    """

    name: str
    prompt: tuple[int, ...]
    forced: tuple[int, ...] = ()
    """Teacher-forced tokens after the prompt."""
    free_tokens: int = 0
    """Number of greedy tokens after them."""
    scored: bool = False
    """Whether the logits before ``forced[1:]`` are kept; the first comes from the prompt alone."""

    @property
    def answer_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.forced) + self.free_tokens


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Bytes of one compressed prompt, and of its keys and values in 16 bits."""

    full_bytes: int
    """Keys and values of all tokens in 16 bits, nothing else."""
    data_bytes: int
    """What attention reads: codes and scales of the stored tokens. For page retrieval: the mean
    over steps of the pages read, and all summaries."""
    all_in_bytes: int
    """All bytes stored for the prompt: whole pages with scores and positions, and their tables."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a method on a case."""

    logits: Tensor | None
    """[forced tokens - 1, vocab] float32, before each of ``forced[1:]``, if the case is scored."""
    tokens: tuple[int, ...]
    """The greedy tokens."""
    footprint: Footprint
    hit: float | None = None
    """Share of all attention on the tokens read, for methods with masks."""
    hit_bound: float | None = None
    """A lower bound of that share which needs no weights of what is not read, for pages in
    boxes."""


class Method(Protocol):
    """A way to store a prompt's keys and values."""

    @property
    def name(self) -> str: ...

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Run the cases, together or one by one; outcomes are in the order of the cases."""
        ...


@dataclass(frozen=True)
class EqualBytes:
    """A method that gets as many bytes as another one used."""

    name: str
    at: Callable[[float], Method]
    """Makes the method from a share of the bytes in 16 bits."""
