# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.flatten untyped in part.
"""A model whose attention after the prompt sees only what a baseline lets it see.

transformers' own layers in float32 with an attention of our own in the middle: first over the
prompt, noting what the baselines want to know, then over what follows it, with a mask. All
tokens of a text are fed at once: each sees what it would see if they came one by one.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from triptych.core.errors import ModelError
from triptych.evals.data.cases import Case
from triptych.evals.methods.eviction import WINDOW_TOKENS, Seen
from triptych.evals.methods.page_retrieval import Step
from triptych.evals.studies.runner import BATCH_CASES
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.hf_model import ATTENTION, run_hf_model
from triptych.workers.models.pretrained import read_config, read_weights

BLOCK_QUERIES = 256
"""Queries of a prompt whose weights exist at once."""
TINY = float(torch.finfo(torch.float32).tiny)
"""Keeps a query whose attention is all elsewhere from dividing by nothing."""


class Look(Protocol):
    """Which tokens the queries of a layer read."""

    def __call__(self, layer: int, step: Step) -> Tensor | None:
        """bool [KH, T, n]; None: all of those that came before them."""
        ...


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt that was read once, for all baselines."""

    seen: Seen
    values: tuple[Tensor, ...]
    """Of each layer: [KH, N, d] float32."""
    significance: Tensor
    """[L, KH, N]"""
    logits: Tensor
    """[vocab] after its last token."""


@dataclass
class Tally:
    """What a run read of what it could have read."""

    hit: float = 0.0
    """Attention that the tokens that were read have of all, summed over queries and heads."""
    queries: int = 0
    read: int = 0
    """Tokens, summed over queries and KV heads."""
    whole: int = 0

    @property
    def hit_share(self) -> float:
        return self.hit / max(1, self.queries)

    @property
    def read_share(self) -> float:
        return self.read / max(1, self.whole)


class Watching(Attend):
    """Attention over a prompt; keeps keys, values and who received how much."""

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
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        _check_plain(layer, window, softcap)
        tokens = len(query)
        grouped = _by_kv_head(query, key.shape[1]) * scale
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        sums = torch.zeros(*grouped.shape[:2], tokens)
        out = torch.empty_like(grouped)
        for start in range(0, tokens, BLOCK_QUERIES):
            end = min(start + BLOCK_QUERIES, tokens)
            weights = _weights(grouped[:, :, start:end], keys[:, :end], start)
            sums[..., :end] += weights.sum(2)
            out[:, :, start:end] = weights @ values[:, None, :end]
        first = max(0, tokens - WINDOW_TOKENS)
        self.last.append(_weights(grouped[:, :, first:], keys, first).mean(2).flatten(0, 1))
        self.sums.append(sums.flatten(0, 1))
        self.keys.append(keys)
        self.values.append(values)
        return _ungrouped(out)


class Reading(Attend):
    """Attention of what follows a prompt, through a ``Look``."""

    def __init__(self, prompt: Prompt, look: Look) -> None:
        self._prompt, self._look = prompt, look
        self._keys = list(prompt.seen.keys)
        self._values = list(prompt.values)
        self.tally = Tally()

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
        *,
        scale: float,
        window: int,
        softcap: float,
    ) -> Tensor:
        _check_plain(layer, window, softcap)
        first = self._keys[layer].shape[1]
        keys = torch.cat([self._keys[layer], key.transpose(0, 1)], 1)
        values = torch.cat([self._values[layer], value.transpose(0, 1)], 1)
        self._keys[layer], self._values[layer] = keys, values
        grouped = _by_kv_head(query, key.shape[1]) * scale
        weights = _weights(grouped, keys, first)
        whole = weights.shape[0] * sum(range(first + 1, first + len(query) + 1))
        step = Step(
            query=grouped,
            keys=keys,
            weights=weights,
            first=first,
            significance=self._prompt.significance[layer],
        )
        seen = self._look(layer, step)
        tally = self.tally
        tally.queries += weights.shape[0] * weights.shape[1] * weights.shape[2]
        tally.whole += whole
        if seen is None:
            tally.hit += float(weights.sum())
            tally.read += whole
            return _ungrouped(weights @ values[:, None])
        read = weights * seen[:, None]
        hit = read.sum(-1, keepdim=True)
        tally.hit += float(hit.sum())
        tally.read += int(seen.sum())
        return _ungrouped((read / hit.clamp_min(TINY)) @ values[:, None])


@dataclass
class MaskedModel:
    """The model, and the prompts that it has read last."""

    model_path: Path
    _read: OrderedDict[tuple[int, ...], Prompt] = field(
        default_factory=OrderedDict[tuple[int, ...], Prompt]
    )

    @cached_property
    def model(self) -> PreTrainedModel:
        path = self.model_path
        return read_weights(path, read_config(path), "float32", "cpu", ATTENTION)

    @cached_property
    def facts(self) -> ModelFacts:
        return describe(self.model_path)

    @torch.inference_mode()
    def read(self, tokens: Sequence[int]) -> Prompt:
        """Read a prompt, or find it among the last ``BATCH_CASES``.

        Raises: ModelError if the model's attention is not the plain one
        """
        name = tuple(tokens)
        if name not in self._read:
            watching = Watching()
            logits = self._feed(name, 0, watching, keep=1)[0]
            seen = Seen(
                keys=tuple(watching.keys),
                sums=torch.stack(watching.sums),
                last=torch.stack(watching.last),
            )
            self._read[name] = Prompt(
                seen=seen,
                values=tuple(watching.values),
                significance=seen.significance,
                logits=logits,
            )
            if len(self._read) > BATCH_CASES:
                self._read.popitem(last=False)
        self._read.move_to_end(name)
        return self._read[name]

    @torch.inference_mode()
    def follow(self, case: Case, look: Look) -> tuple[Tensor | None, tuple[int, ...], Tally]:
        """Logits before each of ``forced[1:]`` if scored, the free tokens, and what was read."""
        prompt = self.read(case.prompt)
        reading = Reading(prompt, look)
        kept, last = None, prompt.logits
        if case.forced:
            every = self._feed(case.forced, reading.tokens, reading, keep=len(case.forced))
            kept, last = (every[:-1] if case.scored else None), every[-1]
        tokens = list[int]()
        while len(tokens) < case.free_tokens:
            if tokens:
                last = self._feed(tokens[-1:], reading.tokens, reading, keep=1)[0]
            tokens.append(int(last.argmax()))
        return kept, tuple(tokens), reading.tally

    def _feed(self, tokens: Sequence[int], first: int, attend: Attend, *, keep: int) -> Tensor:
        """Logits after the last ``keep`` tokens, [keep, vocab]."""
        count = len(tokens)
        positions = torch.arange(first, first + count)
        wanted = torch.arange(count - keep, count)
        return run_hf_model(self.model, torch.tensor(tokens), positions, attend, wanted)


def _check_plain(layer: int, window: int, softcap: float) -> None:
    if window or softcap:
        raise ModelError(
            f"layer {layer}: sliding window {window}, softcap {softcap:g}; baselines know plain "
            "attention only, leave them out for this model"
        )


def _by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """(T, H, d) -> [KH, G, T, d]"""
    return query.transpose(0, 1).unflatten(0, (kv_heads, -1))


def _ungrouped(out: Tensor) -> Tensor:
    """[KH, G, T, d] -> (T, H, d)"""
    return out.flatten(0, 1).transpose(0, 1)


def _weights(query: Tensor, keys: Tensor, first: int) -> Tensor:
    """Causal attention of queries at ``first`` and on: [KH, G, T, n]."""
    logits = query @ keys[:, None].mT
    ahead = torch.arange(keys.shape[1]) > torch.arange(first, first + query.shape[2])[:, None]
    return logits.masked_fill_(ahead, float("-inf")).softmax(-1)
