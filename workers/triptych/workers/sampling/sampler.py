# torch leaves Tensor.tolist untyped.
# pyright: reportUnknownMemberType=false
"""Sampling: penalties, filters and a draw that is independent of the batch."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import isfinite, log, nextafter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from triptych.core.errors import GrammarError, ModelError
from triptych.core.messages import Sampling
from triptych.workers.sampling.grammar import GrammarMatcher

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them would overflow."""

_NO_TOKEN = -1
_FLOORS = (-8.0, -16.0, -torch.inf)
"""Scaled logits from which tokens are candidates: e**-8 is 1/3000 of the best one."""


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
    values, tokens = _best(edited)
    drawn = list[Drawn]()
    for i, (row, row_logits, value, token) in enumerate(
        zip(rows, edited, values, tokens, strict=True)
    ):
        if i in errors:
            drawn.append(Drawn(_NO_TOKEN, error=errors[i]))
        elif not isfinite(value):
            drawn.append(Drawn(_NO_TOKEN))
        else:
            drawn.append(Drawn(token if row.is_greedy else _draw(row_logits, value, row)))
    _add_logprobs(drawn, logits, rows)
    return drawn


def _best(logits: Tensor) -> tuple[list[float], list[int]]:
    """The largest logit of each row, NaN if it has one, and its token.

    On a CPU by numpy, which takes a third of torch's time: 42 us for 8 rows of 49,152.

    Shapes:  logits (N, vocab)
    """
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        likeliest = numbers.argmax(axis=-1)
        return numbers[np.arange(len(numbers)), likeliest].tolist(), likeliest.tolist()
    best, tokens = logits.max(dim=-1)
    return cast("list[float]", best.tolist()), cast("list[int]", tokens.tolist())


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


def _draw(logits: Tensor, best: float, row: SamplerRow) -> int:
    """Sample by the inverse of the cumulative distribution, in the order of token ids.

    Weights are relative to the most likely token, so they need no normalisation. One row
    at a time: its numbers stay in the core's cache, which for 16 rows of 49,152 logits is
    several times faster than passes over all of them.

    Shapes:  logits (vocab,)
    """
    scaled = logits.sub(best).div_(row.sampling.temperature)
    border = _border(scaled, row.sampling)
    kept = (scaled >= border).nonzero().squeeze(1) if border > -torch.inf else None
    weights = (scaled if kept is None else scaled[kept]).exp()
    cumulative = weights.cumsum(dim=0, dtype=torch.float64)
    total = float(cumulative[-1])
    target = min(row.uniform() * total, nextafter(total, 0.0))
    place = int(torch.searchsorted(cumulative, target, right=True))
    return place if kept is None else int(kept[place])


def _border(scaled: Tensor, settings: Sampling) -> float:
    """The lowest scaled logit that top-k, top-p and min-p keep; the best one is 0.

    Only tokens near the best one are sorted, more of them until the border is found.

    Shapes:  scaled (vocab,)
    """
    vocab = scaled.shape[0]
    top_k = settings.top_k if 0 < settings.top_k < vocab else vocab
    least = log(settings.min_p) if settings.min_p > 0.0 else -torch.inf
    if top_k == vocab and settings.top_p >= 1.0:
        return least
    total = float(scaled.exp().sum(dtype=torch.float64)) if top_k == vocab else None
    for floor in _FLOORS:
        near = scaled[scaled >= floor].sort(descending=True).values
        found = _border_among(near, top_k, settings.top_p, total)
        if found is not None:
            return max(found, least)
    return least


def _border_among(near: Tensor, top_k: int, top_p: float, total: float | None) -> float | None:
    """The border, if it lies among the best tokens; ``total``: weight of all, if top-k keeps all.

    Shapes:  near (M,), falling
    """
    kept = near
    if total is None:
        if near.shape[0] < top_k:
            return None
        kept = near[near >= near[top_k - 1]]
    if top_p >= 1.0:
        return float(kept[-1])
    mass = kept.exp().cumsum(0, dtype=torch.float64)
    wanted = top_p * (float(mass[-1]) if total is None else total)
    needed = int((mass < wanted).sum())
    return float(kept[needed]) if needed < kept.shape[0] else None


def _add_logprobs(drawn: list[Drawn], logits: Tensor, rows: Sequence[SamplerRow]) -> None:
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs >= 0 and drawn[i].token >= 0]
    if not asking:
        return
    logprobs = logits[asking].log_softmax(dim=-1)
    widest = max(rows[i].sampling.logprobs for i in asking)
    values, ids = logprobs.topk(min(widest, logits.shape[1]))
    for place, i in enumerate(asking):
        wanted = rows[i].sampling.logprobs
        best_ids = cast("list[int]", ids[place, :wanted].tolist())
        best_values = cast("list[float]", values[place, :wanted].tolist())
        top = tuple(zip(best_ids, best_values, strict=True))
        token = drawn[i].token
        drawn[i] = Drawn(token, float(logprobs[place, token]), top)
