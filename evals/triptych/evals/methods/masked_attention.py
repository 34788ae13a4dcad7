# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.flatten untyped in part.
"""A transformers model in float32 whose attention after the prompt is masked by a baseline.

The prompt runs with full attention, which records what the baselines need. The tokens after it run
with a mask. All tokens of a continuation are fed at once; the mask gives each the tokens that it
would read one by one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from triptych.core.errors import ModelError
from triptych.evals.data.cases import Case
from triptych.evals.methods.eviction import PromptAttention
from triptych.evals.methods.page_retrieval import LayerQueries
from triptych.evals.studies.runner import BATCH_CASES
from triptych.kernels.retain import WINDOW_TOKENS
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.hf_model import HFModel

BLOCK_QUERIES = 256
"""Queries of a prompt whose attention weights are in memory at once."""
TINY = float(torch.finfo(torch.float32).tiny)
"""Smallest divisor when attention is normalized over the tokens that are read."""


class TokenMask(Protocol):
    """Chooses the tokens that the queries of a layer read."""

    def __call__(self, layer: int, queries: LayerQueries) -> Tensor | None:
        """bool [KH, T, n]; None: all tokens before each query."""
        ...


@dataclass(frozen=True, kw_only=True)
class PrefilledPrompt:
    """A prompt after prefill, shared by all baselines."""

    attention: PromptAttention
    values: tuple[Tensor, ...]
    """Of each layer: [KH, N, d] float32."""
    significance: Tensor
    """[L, KH, N]"""
    logits: Tensor
    """[vocab] after its last token."""


@dataclass
class ReadCounts:
    """Number of keys that queries read, and that full attention would have read."""

    hit: float = 0.0
    """Attention weight on the tokens that were read, summed over queries and heads."""
    queries: int = 0
    read: int = 0
    """Tokens, summed over queries and KV heads."""
    total: int = 0
    """Tokens that full attention reads, summed likewise."""

    @property
    def hit_share(self) -> float:
        return self.hit / max(1, self.queries)

    @property
    def read_share(self) -> float:
        return self.read / max(1, self.total)


class RecordingAttention(Attend):
    """Attention over a prompt; records keys, values and the attention each token received."""

    def __init__(self) -> None:
        self.keys = list[Tensor]()
        self.values = list[Tensor]()
        self.sums = list[Tensor]()
        self.last = list[Tensor]()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_plain(layer, traits, sinks)
        tokens = len(query)
        grouped = by_kv_head(query, key.shape[1]) * traits.scale
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        sums = torch.zeros(*grouped.shape[:2], tokens)
        out = torch.empty_like(grouped)
        for start in range(0, tokens, BLOCK_QUERIES):
            end = min(start + BLOCK_QUERIES, tokens)
            weights = causal_weights(grouped[:, :, start:end], keys[:, :end], start)
            sums[..., :end] += weights.sum(2)
            out[:, :, start:end] = weights @ values[:, None, :end]
        first = max(0, tokens - WINDOW_TOKENS)
        self.last.append(causal_weights(grouped[:, :, first:], keys, first).mean(2).flatten(0, 1))
        self.sums.append(sums.flatten(0, 1))
        self.keys.append(keys)
        self.values.append(values)
        return ungrouped(out)


class MaskedAttention(Attend):
    """Attention of the tokens after a prompt, through a ``TokenMask``."""

    def __init__(self, prompt: PrefilledPrompt, mask: TokenMask) -> None:
        self._prompt, self._mask = prompt, mask
        self._keys = list(prompt.attention.keys)
        self._values = list(prompt.values)
        self.counts = ReadCounts()

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._keys[-1].shape[1]

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        check_plain(layer, traits, sinks)
        first = self._keys[layer].shape[1]
        keys = torch.cat([self._keys[layer], key.transpose(0, 1)], 1)
        values = torch.cat([self._values[layer], value.transpose(0, 1)], 1)
        self._keys[layer], self._values[layer] = keys, values
        grouped = by_kv_head(query, key.shape[1]) * traits.scale
        weights = causal_weights(grouped, keys, first)
        total = weights.shape[0] * sum(range(first + 1, first + len(query) + 1))
        queries = LayerQueries(
            query=grouped,
            keys=keys,
            weights=weights,
            first=first,
            significance=self._prompt.significance[layer],
        )
        mask = self._mask(layer, queries)
        counts = self.counts
        counts.queries += weights.shape[0] * weights.shape[1] * weights.shape[2]
        counts.total += total
        if mask is None:
            counts.hit += float(weights.sum())
            counts.read += total
            return ungrouped(weights @ values[:, None])
        read = weights * mask[:, None]
        hit = read.sum(-1, keepdim=True)
        counts.hit += float(hit.sum())
        counts.read += int(mask.sum())
        return ungrouped((read / hit.clamp_min(TINY)) @ values[:, None])


@dataclass
class MaskedModel:
    """The model, and its last ``BATCH_CASES`` prompts after prefill."""

    model_path: Path
    _prompts: OrderedDict[tuple[int, ...], PrefilledPrompt] = field(
        default_factory=OrderedDict[tuple[int, ...], PrefilledPrompt]
    )

    @cached_property
    def model(self) -> HFModel:
        return HFModel.read(self.model_path, self.facts, "float32", "cpu")

    @cached_property
    def facts(self) -> ModelFacts:
        return describe(self.model_path)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int]) -> PrefilledPrompt:
        """Prefill a prompt, or return it if it is among the last ``BATCH_CASES``.

        Raises: ModelError for sliding windows or softcaps
        """
        name = tuple(tokens)
        if name not in self._prompts:
            recording = RecordingAttention()
            logits = self._feed(name, 0, recording, keep=1)[0]
            attention = PromptAttention(
                keys=tuple(recording.keys),
                sums=torch.stack(recording.sums),
                last=torch.stack(recording.last),
            )
            self._prompts[name] = PrefilledPrompt(
                attention=attention,
                values=tuple(recording.values),
                significance=attention.significance,
                logits=logits,
            )
            if len(self._prompts) > BATCH_CASES:
                self._prompts.popitem(last=False)
        self._prompts.move_to_end(name)
        return self._prompts[name]

    @torch.inference_mode()
    def run(self, case: Case, mask: TokenMask) -> tuple[Tensor | None, tuple[int, ...], ReadCounts]:
        """Logits before each of ``forced[1:]`` if scored, the free tokens, and what was read."""
        prompt = self.prefill(case.prompt)
        attend = MaskedAttention(prompt, mask)
        kept, last = None, prompt.logits
        if case.forced:
            every = self._feed(case.forced, attend.tokens, attend, keep=len(case.forced))
            kept, last = (every[:-1] if case.scored else None), every[-1]
        tokens = list[int]()
        while len(tokens) < case.free_tokens:
            if tokens:
                last = self._feed(tokens[-1:], attend.tokens, attend, keep=1)[0]
            tokens.append(int(last.argmax()))
        return kept, tuple(tokens), attend.counts

    def _feed(self, tokens: Sequence[int], first: int, attend: Attend, *, keep: int) -> Tensor:
        """Logits after the last ``keep`` tokens, [keep, vocab]."""
        count = len(tokens)
        positions = torch.arange(first, first + count)
        wanted = torch.arange(count - keep, count)
        return self.model(torch.tensor(tokens), positions, attend, wanted)


def check_plain(layer: int, traits: LayerTraits, sinks: Tensor | None) -> None:
    if traits.window or traits.softcap or sinks is not None:
        raise ModelError(
            f"layer {layer}: sliding window {traits.window}, softcap {traits.softcap:g}, "
            f"{'no ' if sinks is None else ''}attention sinks; baselines know plain "
            "attention only, leave them out for this model"
        )


def by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """(T, H, d) -> [KH, G, T, d]"""
    return query.transpose(0, 1).unflatten(0, (kv_heads, -1))


def ungrouped(out: Tensor) -> Tensor:
    """[KH, G, T, d] -> (T, H, d)"""
    return out.flatten(0, 1).transpose(0, 1)


def causal_weights(query: Tensor, keys: Tensor, first: int) -> Tensor:
    """Causal attention of queries at ``first`` and on: [KH, G, T, n]."""
    logits = query @ keys[:, None].mT
    ahead = torch.arange(keys.shape[1]) > torch.arange(first, first + query.shape[2])[:, None]
    return logits.masked_fill_(ahead, float("-inf")).softmax(-1)
