# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.norm and others untyped in part.
"""Finds the retrieval heads of a model, and the error of each layer that keeps what they choose.

A retrieval head attends from the answer of a question to the place in the prompt that has it. The
attention to the whole fact counts, not only that to the token which is copied.

Source: CompressKV (semantic retrieval heads, error of layers)
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.methods.retention.compresskv import HEADS
from triptych.core.methods.retention.kept_share import RETRIEVAL_QUERIES
from triptych.evals.data.cases import Case
from triptych.evals.data.tasks import DEEPEST, NOUNS, TaskBuilder, passkey_texts
from triptych.evals.data.texts import documents, prose
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import (
    MaskedModel,
    RecordingAttention,
    by_kv_head,
    causal_weights,
    check_plain,
    ungrouped,
)
from triptych.evals.methods.page_retrieval import LayerQueries
from triptych.kernels import sums_of_heads
from triptych.kernels.retain import BUDGETS, SCORES, ObservedPrompt
from triptych.workers.models.attention_interface import Attend, LayerTraits

KEPT_SHARE = 0.1
"""Share of the tokens with which the errors of layers are measured."""


@dataclass(frozen=True, kw_only=True)
class RetrievalStudy:
    """The prompts in which facts are hidden, and the texts for the errors of layers."""

    context: int
    """Tokens of each."""
    facts: int = 24
    documents: int = 3
    steps: int = 64
    """Tokens after each text whose attention is measured."""
    seed: int = 0


@dataclass(frozen=True)
class RetrievalHeads:
    """Ranked query heads and the attention error of each layer of a model."""

    scores: Tensor
    """Attention to the facts, a mean over the answer tokens that the model found: [L, H]."""
    errors: tuple[float, ...]
    found: int
    """Answer tokens that the model found; the others do not count."""
    asked: int
    """Answer tokens in all."""

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """Query heads of each layer, first those with the most attention to facts."""
        return ranked(self.scores)


def ranked(scores: Tensor) -> tuple[tuple[int, ...], ...]:
    """Query heads of each layer in the order of their scores; ties go to the first.

    >>> ranked(torch.tensor([[0.1, 0.7, 0.2]]))
    ((1, 2, 0),)
    """
    order: list[list[int]] = scores.argsort(dim=-1, descending=True, stable=True).tolist()
    return tuple(tuple(heads) for heads in order)


def find_retrieval_heads(
    model: Path, plan: RetrievalStudy, done: Callable[[str], None]
) -> RetrievalHeads:
    """Ask for facts, rank the heads by their attention to them, and measure the layers.

    ``done`` is called with the name of each prompt and text.

    Raises: ConfigError if prompts are too long, or the model finds no fact; ModelError for sliding
            windows or softcaps
    """
    masked, vocabulary = MaskedModel(model), Vocabulary(model)
    if plan.context + plan.steps > masked.facts.context_tokens:
        raise ConfigError(
            f"{plan.context} tokens and {plan.steps} steps: the model's context is "
            f"{masked.facts.context_tokens}; ask for a shorter context"
        )
    sums, found, asked = torch.zeros(()), 0, 0
    for question in questions(vocabulary, plan):
        received, hits = attention_to_fact(masked, question)
        sums = sums + received[..., hits].sum(-1)
        found, asked = found + int(hits.sum()), asked + len(hits)
        done(question.case.name)
    if not found:
        raise ConfigError(
            f"the model found none of {plan.facts} facts in {plan.context} tokens, so no head "
            "retrieves; ask for a shorter context"
        )
    scores = sums / found
    errors = _errors_of_layers(masked, vocabulary, plan, ranked(scores), done)
    return RetrievalHeads(scores, errors, found, asked)


@dataclass(frozen=True)
class Question:
    """A prompt with a fact, and the question behind it with its answer."""

    case: Case
    fact: range
    """Positions of the fact in the prompt."""
    answer: int
    """Tokens of the answer, the last ones that are forced."""


def questions(vocabulary: Vocabulary, plan: RetrievalStudy) -> list[Question]:
    """Facts at depths from the beginning to ``DEEPEST``: pass keys and numbers of words, in turn.

    They are in the prose of ``calibration``.
    """
    rng, found = random.Random(plan.seed), list[Question]()
    builder = TaskBuilder(vocabulary, vocabulary.encode(prose("calibration")), plan.context)
    for number in range(plan.facts):
        fact, question, answer = passkey_texts(rng)
        if number % 2:
            name, value = rng.choice(NOUNS), rng.randrange(10_000, 100_000)
            fact = f"\nThe magic number for {name} is {value}.\n"
            question = f"\nWhat is the magic number for {name}? The magic number for {name} is"
            answer = f" {value}"
        depth = DEEPEST * number / max(1, plan.facts - 1)
        task = builder.task("fact", number, [(depth, fact)], question, answer)
        case = Case(
            name=task.case.name,
            prompt=task.case.prompt,
            forced=(*task.case.forced, *task.expected),
            scored=True,
        )
        span = _span(vocabulary.encode(fact), task.case.prompt)
        found.append(Question(case, span, len(task.expected)))
    return found


def _span(part: Sequence[int], whole: Sequence[int]) -> range:
    """Where ``part`` stands in ``whole``."""
    size = len(part)
    starts = range(len(whole) - size + 1)
    first = next(at for at in starts if list(whole[at : at + size]) == list(part))
    return range(first, first + size)


class FactAttention:
    """A ``TokenMask`` that reads everything, and keeps the attention of each query to a fact."""

    def __init__(self, fact: range) -> None:
        self._fact, self._layers = fact, dict[int, Tensor]()

    def __call__(self, layer: int, queries: LayerQueries) -> None:
        of_fact = queries.weights[..., self._fact.start : self._fact.stop]
        self._layers[layer] = of_fact.sum(-1).flatten(0, 1)

    @property
    def received(self) -> Tensor:
        """[L, H, queries]"""
        return torch.stack([self._layers[layer] for layer in sorted(self._layers)])


def attention_to_fact(masked: MaskedModel, question: Question) -> tuple[Tensor, Tensor]:
    """Attention from the queries that predict the answer to the fact, and which of them find it.

    Shapes:  -> [L, H, answer tokens]; bool [answer tokens]
    """
    reading = FactAttention(question.fact)
    logits, _, _ = masked.run(question.case, reading)
    assert logits is not None  # the case is scored
    count, forced = question.answer, torch.tensor(question.case.forced)
    hits = logits[-count:].argmax(-1) == forced[-count:]
    return reading.received[..., -count - 1 : -1], hits


class _WindowAttention(RecordingAttention):
    """Records also the attention from the last queries by which CompressKV scores tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.window = list[Tensor]()
        """Of each layer: [H, N]."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        first = max(0, len(query) - RETRIEVAL_QUERIES)
        grouped = by_kv_head(query[first:], key.shape[1]) * traits.scale
        self.window.append(causal_weights(grouped, key.transpose(0, 1), first).sum(2).flatten(0, 1))
        return super().__call__(layer, query, key, value, traits, sinks)


class _ErrorAttention(Attend):
    """Full attention of the tokens after a prompt; measures how much a mask would change it."""

    def __init__(self, prompt: _WindowAttention, kept: Tensor) -> None:
        """``kept``: bool [L, KH, N]."""
        self._prompt, self._kept = prompt, kept
        self.errors = dict[int, float]()
        """Norm of the difference over the norm of the output, by layer."""

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
        keys = torch.cat([self._prompt.keys[layer], key.transpose(0, 1)], 1)
        values = torch.cat([self._prompt.values[layer], value.transpose(0, 1)], 1)
        grouped = by_kv_head(query, key.shape[1]) * traits.scale
        weights = causal_weights(grouped, keys, keys.shape[1] - len(query))
        kept = torch.nn.functional.pad(self._kept[layer], (0, len(query)), value=True)
        read = weights * kept[:, None, None]
        full = weights @ values[:, None]
        masked = (read / read.sum(-1, keepdim=True)) @ values[:, None]
        self.errors[layer] = float((full - masked).norm() / full.norm())
        return ungrouped(full)


@torch.inference_mode()
def _errors_of_layers(
    masked: MaskedModel,
    vocabulary: Vocabulary,
    plan: RetrievalStudy,
    heads: Sequence[Sequence[int]],
    done: Callable[[str], None],
) -> tuple[float, ...]:
    """Mean error of each layer over texts, if it keeps ``KEPT_SHARE`` of their tokens."""
    sums = [0.0] * len(heads)
    for text in documents(
        vocabulary.encode,
        "calibration",
        context=plan.context,
        continuation=plan.steps,
        count=plan.documents,
    ):
        prompt, count = _WindowAttention(), len(text.context)
        last = torch.tensor([count - 1])
        masked.model(torch.tensor(text.context), torch.arange(count), prompt, last)
        attend = _ErrorAttention(prompt, kept_by(heads, prompt.window, prompt.keys[0].shape[0]))
        positions = torch.arange(count, count + plan.steps)
        masked.model(torch.tensor(text.continuation), positions, attend, torch.tensor([0]))
        sums = [total + attend.errors[layer] for layer, total in enumerate(sums)]
        done(text.name)
    return tuple(round(total / plan.documents, 4) for total in sums)


def kept_by(
    heads: Sequence[Sequence[int]],
    window: Sequence[Tensor],
    kv_heads: int,
    share: float = KEPT_SHARE,
) -> Tensor:
    """Tokens that the first heads of each layer choose; the same share in all layers.

    ``window``: of each layer, the attention from the last queries, [H, N].

    Shapes:  -> bool [L, KH, N]
    """
    chosen = [some[:HEADS] for some in heads]
    attention = sums_of_heads(torch.stack(list(window)), chosen, kv_heads)
    layers, _, tokens = attention.shape
    prompt = ObservedPrompt(
        tokens=tokens,
        kv_heads=kv_heads,
        layers=range(layers),
        model_layers=layers,
        attention=attention,
        of_keys=lambda score: attention,
        kept=round(share * tokens),
    )
    return BUDGETS["per_head"](SCORES["retrieval_attention"](prompt), prompt)
