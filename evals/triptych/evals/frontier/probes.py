"""Probes of the frontier: what each method is asked about a compressed document."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from triptych.evals.data.cases import Case
from triptych.evals.data.tasks import DEEPEST, TaskBuilder, passkey_texts
from triptych.evals.data.texts import Document


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A case, the part of it that is scored, and the answer to its question."""

    case: Case
    scored_tokens: int = 0
    """Tokens of the continuation whose next-token distributions are compared."""
    expected: tuple[int, ...] = ()
    """The pass key; empty: nothing is asked."""


@dataclass(frozen=True, kw_only=True)
class ProbeGroup:
    """Probes of one kind and one context length."""

    name: str
    context: int
    probes: tuple[Probe, ...]


def text_probes(
    documents: Sequence[Document], builder: TaskBuilder, seed: int
) -> tuple[Probe, ...]:
    """Documents with a pass key in their context, which is asked for after the continuation.

    One prefill serves both measurements, and the question is as late as it can be: neither prefill
    nor compressor see it. The fact replaces the first tokens of the document, so that the
    continuation follows its context. The depths of the facts are evenly spaced.
    """
    rng = random.Random(f"{seed} frontier")
    count = len(documents)
    return tuple(
        _text_probe(document, builder, rng, DEEPEST * (number + 0.5) / count)
        for number, document in enumerate(documents)
    )


def _text_probe(
    document: Document, builder: TaskBuilder, rng: random.Random, depth: float
) -> Probe:
    fact, question, answer = passkey_texts(rng)
    used = len(builder.vocabulary.encode(fact))
    filler = replace(builder, filler=document.context[used:], context=len(document.context))
    task = filler.task("passkey", 0, [(depth, fact)], question, answer)
    return Probe(
        case=Case(
            name=document.name,
            prompt=task.case.prompt,
            forced=document.continuation + task.case.forced,
            free_tokens=task.case.free_tokens,
            scored=True,
        ),
        scored_tokens=len(document.continuation) - 1,
        expected=task.expected,
    )


def answer_probes(documents: Sequence[Document], tokens: int) -> tuple[Probe, ...]:
    """Greedy answers to each document's context."""
    return tuple(
        Probe(case=Case(name=one.name, prompt=one.context, free_tokens=tokens)) for one in documents
    )
