# llguidance lacks some type hints.
# pyright: reportUnknownMemberType=false
"""Guided decoding: masks the logits of tokens that a grammar does not allow next."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from triptych.core.errors import GrammarError
from triptych.core.grammar import LIMITS
from triptych.workers.models.load import LoadedModel


class GrammarMatcher:
    """Grammar state of one output."""

    def __init__(self, tokenizer: LLTokenizer, grammar: str) -> None:
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        self._tokens = 0

    def accept_token(self, token: int) -> None:
        """Advance by an output token. After a token that does not fit ``mask_logits`` raises."""
        self._tokens += 1
        self._matcher.consume_token(token)

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
        logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)


@dataclass(frozen=True)
class GrammarMatcherFactory:
    """Makes grammar matchers for one model.

    The first matcher prepares the vocabulary, which takes half a second.
    """

    model: LoadedModel

    def start(self, grammar: str) -> GrammarMatcher:
        """A matcher for an output without tokens."""
        return GrammarMatcher(self._tokenizer, grammar)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        tokens = self.model.tokenizer.backend.to_str()
        ends = list(self.model.eos_token_ids)
        return LLTokenizer(tokens, n_vocab=self.model.vocab_size, eos_token=ends or None)
