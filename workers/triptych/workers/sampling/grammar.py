# llguidance lacks some type hints.
# pyright: reportUnknownMemberType=false
"""Guided decoding: masks the logits of tokens that a grammar does not allow next."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import GrammarError
from triptych.core.grammar import LIMITS
from triptych.workers.models.load import LoadedModel
from triptych.workers.sampling.json_numbers import NumberScanner
from triptych.workers.sampling.tool_calls import MISTRAL_TAGS

MAX_COMPILED = 64
"""Compiled grammars that are kept, the most recently used ones."""


class GrammarMatcher:
    """Grammar state of one output."""

    def __init__(self, vocabulary: "Vocabulary", matcher: LLMatcher, numbers: NumberScanner | None):
        self._vocabulary, self._matcher, self._numbers = vocabulary, matcher, numbers
        self._tokens = 0

    def accept_token(self, token: int) -> None:
        """Advance by an output token. After a token that does not fit ``mask_logits`` raises."""
        self._tokens += 1
        self._matcher.consume_token(token)
        if self._numbers is not None:
            self._numbers.read(self._vocabulary.bytes_of(token))

    def mask_logits(self, logits: Tensor) -> None:
        """Set the logits of tokens that the grammar does not allow next to minus infinity.

        Shapes:  logits (vocab,)
        Raises:  GrammarError if the output violates the grammar, or the step exceeds a limit
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0][:200]
            raise GrammarError(
                f"the answer cannot go on in its grammar after {self._tokens} tokens: {reason}; "
                "ask for a simpler schema, expression or grammar"
            )
        allowed = np.zeros(logits.shape[0], np.bool_)
        bits = np.unpackbits(mask, bitorder="little")[: logits.shape[0]]
        allowed[: len(bits)] = bits
        if self._numbers is not None and self._numbers.is_full:
            allowed = self._without_digits(allowed)
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)

    def _without_digits(self, allowed: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Without tokens that begin with a digit, unless the grammar demands one (``enum``)."""
        shorter = allowed.copy()
        digits = self._vocabulary.begins_with_digit[: len(shorter)]
        shorter[: len(digits)] &= ~digits
        return shorter if shorter.any() else allowed


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary as the matcher needs it. Preparing it takes half a second."""

    tokenizer: LLTokenizer

    def bytes_of(self, token: int) -> bytes:
        return self.tokenizer.decode_bytes([token])

    @cached_property
    def begins_with_digit(self) -> NDArray[np.bool_]:
        """(vocab,)"""
        first = (self.bytes_of(token)[:1] for token in range(self.tokenizer.vocab_size))
        return np.fromiter((byte.isdigit() for byte in first), np.bool_)


@dataclass(eq=False)
class GrammarMatcherFactory:
    """Compiles grammars for one model; any thread.

    Compiling takes up to some tenths of a second: the ingress refuses grammars that take longer.
    It is done once for each grammar, outside of the loop that computes
    (``triptych.workers.sampling.preparation``).
    """

    model: LoadedModel
    _compiled: OrderedDict[str, LLMatcher] = field(
        default_factory=OrderedDict[str, LLMatcher], init=False
    )
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def is_ready(self, grammar: str) -> bool:
        """Whether ``start`` takes no time."""
        return grammar in self._compiled

    def compile(self, grammar: str) -> None:
        """Compile a grammar ahead of ``start``. Releases the GIL, and holds no lock meanwhile."""
        compiled = LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)

    def start(self, grammar: str) -> GrammarMatcher:
        """A matcher for an output without tokens."""
        while (matcher := self._copy(grammar)) is None:
            self.compile(grammar)
        return GrammarMatcher(self._vocabulary, matcher, NumberScanner.of(grammar))

    def _copy(self, grammar: str) -> LLMatcher | None:
        with self._lock:
            if grammar not in self._compiled:
                return None
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar].deep_copy()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        size, ends = self.model.vocab_size, list(self.model.eos_token_ids)
        tokens = without_tokens_from(self.model.tokenizer.backend.to_str(), size)
        made = LLTokenizer(tokens, n_vocab=size, eos_token=ends or None)
        added = self.model.tokenizer.added_tokens_decoder
        texts = [
            i
            for i, content in added.items()
            if (not content.special or content.content in MISTRAL_TAGS) and i < size
        ]
        vocabulary = Vocabulary(with_text_tokens(made, texts, ends))
        _ = vocabulary.begins_with_digit
        return vocabulary


def without_tokens_from(tokenizer: str, size: int) -> str:
    """A tokenizer's JSON without added tokens from id ``size`` on, which the model does not have.

    A grammar that demands the text of such a token would otherwise allow that token alone.
    """
    read = json.loads(tokenizer)
    known = [token for token in read["added_tokens"] if token["id"] < size]
    if len(known) == len(read["added_tokens"]):
        return tokenizer
    return json.dumps({**read, "added_tokens": known})


@dataclass(frozen=True)
class _TokenTable:
    """The tokens of another tokenizer, of which some have become text."""

    of: LLTokenizer
    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: int | None = None

    def __call__(self, text: bytes) -> list[int]:
        return self.of.tokenize_bytes(text)


def with_text_tokens(
    tokenizer: LLTokenizer, texts: Sequence[int], ends: Sequence[int]
) -> LLTokenizer:
    """A tokenizer in which the tokens ``texts`` are text, as ``<tool_call>`` of Qwen is.

    llguidance takes added tokens in angle brackets for special, as those that are marked so, and no
    text of a grammar matches special tokens: a model could not write a tag as the one token that it
    was trained on.
    """
    changed = {token for token in texts if tokenizer.is_special_token(token)} - set(ends)
    if not changed:
        return tokenizer
    size = tokenizer.vocab_size
    table = _TokenTable(
        of=tokenizer,
        tokens=[tokenizer.decode_bytes([token]) for token in range(size)],
        special_token_ids=[
            token
            for token in range(size)
            if tokenizer.is_special_token(token) and token not in changed
        ],
        eos_token_id=ends[0] if ends else tokenizer.eos_token,
    )
    wrapped = TokenizerWrapper(table)
    return LLTokenizer(wrapped, n_vocab=size, eos_token=list(ends) or None)
