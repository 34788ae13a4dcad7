"""Runs methods over groups of cases, and compares each with the full cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case, EqualBytes, Footprint, Method, Outcome
from triptych.evals.data.tasks import Task
from triptych.evals.data.texts import Document
from triptych.evals.metrics.fidelity import Steps, compare

BATCH_CASES = 8
"""Cases that a method runs at once; the logits of scored cases are kept until compared."""

Advance = Callable[[str, int], None]
"""Called with a method's name and the number of its cases that were finished."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cases that are reported together, all of one context length."""

    name: str
    context_tokens: int
    cases: tuple[Case, ...]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Result of one case: figures, not logits."""

    case: str
    steps: Steps | None
    tokens: tuple[int, ...]
    footprint: Footprint
    hit: float | None = None
    """As in ``Outcome``."""
    hit_bound: float | None = None
    """As in ``Outcome``."""


Records = dict[str, list[Record]]
"""Group name to one record per case, in order."""


def text_group(documents: Sequence[Document]) -> Group:
    """A group whose cases force each document's continuation; its first token is not scored.

    That token's logits come from prefill, before anything was compressed.
    """
    context = len(documents[0].context)
    cases = [
        Case(name=one.name, prompt=one.context, forced=one.continuation, scored=True)
        for one in documents
    ]
    return Group(name=f"text@{context}", context_tokens=context, cases=tuple(cases))


def answer_group(documents: Sequence[Document], tokens: int) -> Group:
    """A group of greedy answers to each document's context."""
    context = len(documents[0].context)
    cases = [Case(name=one.name, prompt=one.context, free_tokens=tokens) for one in documents]
    return Group(name=f"answers@{context}", context_tokens=context, cases=tuple(cases))


def task_group(tasks: Sequence[Task], context: int) -> Group:
    """A group of all tasks; the question is forced, the answer is greedy."""
    cases = tuple(task.case for task in tasks)
    return Group(name="tasks", context_tokens=context, cases=cases)


def check(groups: Sequence[Group], context_tokens: int) -> None:
    """Raise ConfigError if a case does not fit into the model's context."""
    for group in groups:
        longest = max(len(case.prompt) + case.answer_tokens for case in group.cases)
        if longest > context_tokens:
            raise ConfigError(
                f"{group.name}: {longest} tokens with what follows the prompt, the model takes "
                f"{context_tokens}; ask for a shorter context"
            )


def evaluate(
    reference: Method,
    methods: Sequence[Method | EqualBytes],
    groups: Sequence[Group],
    advance: Advance,
) -> dict[str, Records]:
    """Run every method over every group; the reference's own records come first.

    All methods run one batch of cases before the next batch, so that baselines share the prefill of
    a prompt. ``EqualBytes`` methods get the bytes that the first other method used in the batch.
    """
    named = (reference, *methods)
    records: dict[str, Records] = {one.name: {g.name: [] for g in groups} for one in named}
    for group in groups:
        for start in range(0, len(group.cases), BATCH_CASES):
            cases = group.cases[start : start + BATCH_CASES]
            outcomes = reference.run(cases)
            advance(reference.name, len(cases))
            full = [outcome.logits for outcome in outcomes]
            records[reference.name][group.name] += _records(cases, full, outcomes)
            share, is_known = 1.0, False
            for method in methods:
                bound = method.at(share) if isinstance(method, EqualBytes) else method
                outcomes = bound.run(cases)
                advance(method.name, len(cases))
                records[method.name][group.name] += _records(cases, full, outcomes)
                if not is_known and bound is method:
                    share, is_known = _share(outcomes), True
    return records


def _share(outcomes: Sequence[Outcome]) -> float:
    """All-in bytes as a share of the bytes in 16 bits."""
    held = sum(one.footprint.all_in_bytes for one in outcomes)
    return held / sum(one.footprint.full_bytes for one in outcomes)


def _records(
    cases: Sequence[Case], full: Sequence[Tensor | None], outcomes: Iterable[Outcome]
) -> list[Record]:
    return [
        Record(
            case=case.name,
            steps=_steps(case, logits, outcome.logits),
            tokens=outcome.tokens,
            footprint=outcome.footprint,
            hit=outcome.hit,
            hit_bound=outcome.hit_bound,
        )
        for case, logits, outcome in zip(cases, full, outcomes, strict=True)
    ]


def _steps(case: Case, full: Tensor | None, ours: Tensor | None) -> Steps | None:
    if full is None or ours is None:
        return None
    return compare(full, ours, case.forced[1:])
