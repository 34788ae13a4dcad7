# torch leaves Tensor.tolist untyped.
# pyright: reportUnknownMemberType=false
"""Sampling: penalties, filters and a draw that is independent of the batch."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import GrammarError, ModelError
from triptych.core.messages import Sampling
from triptych.kernels import draw_tokens
from triptych.workers.device import put_beside
from triptych.workers.sampling.grammar import GrammarMatcher

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them would overflow."""

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled token, with log probabilities if the row asks for them.

    Log probabilities are those before bias, penalties, temperature and filters.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens with their log probabilities, best first."""
    error: GrammarError | None = None
    """Why there is no token, if the reason is the grammar and not logits that are not finite."""

    def checked_token(self) -> int:
        """The token.

        Raises: ModelError if the model's logits were not numbers; GrammarError if no token may
            follow
        """
        if self.token == _NO_TOKEN:
            text = "the model computed logits that are not finite numbers"
            raise self.error or ModelError(text)
        return self.token


class SamplerRow:
    """Sampling state of one output: settings, token counts and grammar."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        eos_token_ids: Sequence[int],
        output: Iterable[int] = (),
        grammar: GrammarMatcher | None = None,
    ) -> None:
        self.sampling = sampling
        self.prompt = prompt
        self.length = 0
        """Output tokens so far."""
        repeats = sampling.repetition_penalty != 1.0
        self._all_counts = _Counts(prompt if repeats else ()) if repeats else None
        counts = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._output_counts = _Counts(()) if counts else None
        eos = () if sampling.ignore_eos else tuple(eos_token_ids)
        self._ends = torch.tensor([*eos, *sampling.stop_token_ids], dtype=torch.int64)
        self._bias_ids = torch.tensor([i for i, _ in sampling.logit_bias], dtype=torch.int64)
        self._bias = torch.tensor([b for _, b in sampling.logit_bias], dtype=torch.float32)
        self._grammar = grammar
        for token in output:
            self.append(token)

    def append(self, token: int) -> None:
        """Count an output token."""
        self.length += 1
        if self._all_counts is not None:
            self._all_counts.add(token)
        if self._output_counts is not None:
            self._output_counts.add(token)
        if self._grammar is not None:
            self._grammar.accept_token(token)

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature < GREEDY_BELOW

    @property
    def is_edited(self) -> bool:
        """Whether logits change before the draw."""
        return (
            self._all_counts is not None
            or self._output_counts is not None
            or len(self._bias) > 0
            or self._suppresses_stop
            or self._grammar is not None
        )

    @property
    def _suppresses_stop(self) -> bool:
        return self.length < self.sampling.min_tokens and len(self._ends) > 0

    def edit(self, logits: Tensor) -> None:
        """Apply bias, penalties, the minimum length and the grammar, in place.

        Shapes:  logits (vocab,)
        Raises:  GrammarError if the grammar allows no token
        """
        vocab, settings = logits.shape[0], self.sampling
        if len(self._bias):
            known = self._bias_ids < vocab
            ids, bias = self._bias_ids[known], self._bias[known]
            logits.index_add_(0, ids.to(logits.device), bias.to(logits.device))
        if self._all_counts is not None and self._all_counts.ids.numel():
            ids = self._all_counts.ids.to(logits.device)
            old, penalty = logits[ids], settings.repetition_penalty
            logits[ids] = torch.where(old > 0, old / penalty, old * penalty)
        if self._output_counts is not None and self._output_counts.ids.numel():
            ids = self._output_counts.ids.to(logits.device)
            counts = self._output_counts.counts.to(logits.device)
            logits[ids] -= settings.presence_penalty + settings.frequency_penalty * counts
        if self._suppresses_stop:
            logits[self._ends[self._ends < vocab].to(logits.device)] = -torch.inf
        if self._grammar is not None:
            self._grammar.mask_logits(logits)

    def uniform(self) -> float:
        """A number in [0, 1) that depends only on the seed and the position in the output."""
        key = self.sampling.seed & (2**128 - 1)
        generator = np.random.Philox(key=key, counter=self.length)
        return (int(generator.random_raw()) >> 11) * 2.0**-53


class _Counts:
    """Distinct tokens and how often each came, ready for indexing at any time."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._slots = dict[int, int]()
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def ids(self) -> Tensor:
        return torch.as_tensor(self._ids[: len(self._slots)])

    @property
    def counts(self) -> Tensor:
        return torch.as_tensor(self._counts[: len(self._slots)])


Draw = Callable[[Tensor, Sequence[SamplerRow]], list[Drawn]]


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Drawn]:
    """Sample one token per row.

    Order, as in vLLM: bias, repetition penalty over prompt and output, presence and
    frequency penalties over the output, minimum length, grammar, temperature, then top-k,
    top-p and min-p. Ties at a filter's border all stay. A row whose logits are not finite, or
    whose grammar allows no token, gives a ``Drawn`` that raises when its token is asked for; the
    others are not touched.

    Shapes:  logits (N, vocab), one row each
    Dtypes:  float32; left unchanged
    """
    if not rows:
        return []
    edited, errors = _edit(logits, rows)
    settings = _settings(rows, errors)
    put = None if settings is None else put_beside(logits, settings)
    tokens = draw_tokens(edited, put)
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs >= 0 and i not in errors]
    if asking:
        return _with_logprobs(tokens, logits, rows, asking, errors)
    return _drawn(cast("list[int]", tokens.tolist()), errors)


def _drawn(tokens: Sequence[int], errors: Mapping[int, GrammarError]) -> list[Drawn]:
    return [
        Drawn(_NO_TOKEN, error=errors[i]) if i in errors else Drawn(token)
        for i, token in enumerate(tokens)
    ]


def _settings(rows: Sequence[SamplerRow], errors: Collection[int]) -> NDArray[np.float64] | None:
    """The ``settings`` argument of ``draw_tokens``, float64 [5, N]; None: all rows are greedy."""
    drawing = [i for i, row in enumerate(rows) if not row.is_greedy and i not in errors]
    if not drawing:
        return None
    settings = np.zeros((5, len(rows)))
    for i in drawing:
        one = rows[i].sampling
        least = log(one.min_p) if one.min_p > 0.0 else -inf
        settings[:, i] = one.temperature, one.top_k, one.top_p, least, rows[i].uniform()
    return settings


def _edit(logits: Tensor, rows: Sequence[SamplerRow]) -> tuple[Tensor, dict[int, GrammarError]]:
    """Edited logits, and the errors of some rows."""
    edits = [i for i, row in enumerate(rows) if row.is_edited]
    errors = dict[int, GrammarError]()
    if not edits:
        return logits, errors
    edited = logits.clone()
    for i in edits:
        try:
            rows[i].edit(edited[i])
        except GrammarError as error:
            errors[i] = error
    return edited, errors


def _with_logprobs(
    tokens: Tensor,
    logits: Tensor,
    rows: Sequence[SamplerRow],
    asking: Sequence[int],
    errors: Mapping[int, GrammarError],
) -> list[Drawn]:
    """Tokens, and log probabilities of the rows that ask for them.

    All numbers come in one copy, so that a device is waited for once; float64 holds each exactly.
    """
    widest = min(max(rows[i].sampling.logprobs for i in asking), logits.shape[1])
    chosen = tokens.clamp_min(0)  # rows without a token ask in vain
    if len(asking) < len(rows):
        logits, chosen = logits[asking], chosen[asking]
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(widest)
    own = logprobs.gather(1, chosen[:, None])
    parts = [tokens.double(), *(part.double().flatten() for part in (ids, values, own))]
    numbers = torch.cat(parts).cpu().numpy()
    ends = np.cumsum([len(rows), len(asking) * widest, len(asking) * widest])
    drawn_ids, *best, own_values = np.split(numbers, ends)
    drawn = _drawn([int(token) for token in drawn_ids], errors)
    best_ids, best_values = (part.reshape(len(asking), widest) for part in best)
    for place, i in enumerate(asking):
        if drawn[i].token < 0:
            continue
        wanted = rows[i].sampling.logprobs
        pairs = zip(best_ids[place, :wanted], best_values[place, :wanted], strict=True)
        top = tuple((int(token), float(value)) for token, value in pairs)
        drawn[i] = Drawn(drawn[i].token, float(own_values[place]), top)
    return drawn
