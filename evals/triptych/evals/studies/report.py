"""Rows of a report: one per method and context length, and one over all lengths."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from triptych.evals.data.tasks import Task
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.metrics.fidelity import (
    Interval,
    Steps,
    Summary,
    bootstrap,
    first_divergence,
    kl_means,
    summarize,
)
from triptych.evals.metrics.text_overlap import bleu, rouge_1, rouge_l
from triptych.evals.studies.runner import Group, Record, Records

Context = int | Literal["all"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of a method at one context length, or over all of them."""

    method: str
    context: Context
    bytes_data_ratio: float
    bytes_all_in_ratio: float
    attention_hit: float | None
    """Share of all attention on the tokens that the method reads, where it is known."""
    attention_hit_bound: float | None
    """What is certain of that share from the summaries of the pages that it does not read."""
    summary: Summary
    kl_over_first_ci95: Interval | None
    """Paired 95 % interval of this method's KL less that of the first method that is not full."""
    kl_by_document: tuple[float, ...]
    """Mean KL of each document: shows whether one of them decides the mean."""

    def as_json(self) -> dict[str, object]:
        """Flat: ``summary`` comes with the other fields."""
        flat = {name: value for name, value in asdict(self).items() if name != "summary"}
        return flat | asdict(self.summary)


def text_rows(records: Mapping[str, Records], groups: Sequence[Group]) -> list[Row]:
    """Rows of every method over the scored groups, method by method."""
    scored = [group for group in groups if any(case.scored for case in group.cases)]
    parts: list[tuple[Context, list[Group]]] = [(g.context_tokens, [g]) for g in scored]
    if len(scored) > 1:
        parts.append(("all", scored))
    names = list(records)
    first = names[1] if len(names) > 1 else names[0]
    return [
        _row(name, context, _pick(records[name], part), _pick(records[first], part))
        for name in names
        for context, part in parts
    ]


def _pick(records: Records, groups: Iterable[Group]) -> list[list[Record]]:
    """Records of the groups by document: the first of each group belongs to the first document."""
    return [list(one) for one in zip(*(records[group.name] for group in groups), strict=True)]


def _row(name: str, context: Context, ours: list[list[Record]], first: list[list[Record]]) -> Row:
    steps = [_steps(one) for one in ours]
    means = kl_means(steps)
    pairs = zip(means, kl_means([_steps(one) for one in first]), strict=True)
    prints = [record.footprint for one in ours for record in one]
    full = sum(one.full_bytes for one in prints)
    every = [record for one in ours for record in one]
    hits = [record.hit for record in every if record.hit is not None]
    bounds = [record.hit_bound for record in every if record.hit_bound is not None]
    return Row(
        method=name,
        context=context,
        bytes_data_ratio=sum(one.data_bytes for one in prints) / full,
        bytes_all_in_ratio=sum(one.all_in_bytes for one in prints) / full,
        attention_hit=_mean(hits) if hits else None,
        attention_hit_bound=_mean(bounds) if bounds else None,
        summary=summarize(steps),
        kl_over_first_ci95=bootstrap([a - b for a, b in pairs]),
        kl_by_document=tuple(round(mean, 6) for mean in means),
    )


def _steps(records: Iterable[Record]) -> list[Steps]:
    return [record.steps for record in records if record.steps is not None]


# ------------------------------------------------------------------ tasks and answers


@dataclass(frozen=True, kw_only=True)
class TaskRow:
    """A method's share of right answers in one kind of task."""

    method: str
    task: str
    context: int
    cases: int
    score: float
    full_score: float
    """Score of the full cache: an upper reference, since a small model fails some tasks."""


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """A method's greedy answers next to those of the full cache."""

    method: str
    context: int
    answers: int
    tokens: int
    """Tokens of each answer."""
    identical: float
    """Share of answers that are the same to the last token."""
    first_divergence: float
    """Mean number of tokens before the first difference; all of them where there is none."""
    bleu: float
    rouge_1: float
    rouge_l: float


def task_rows(records: Mapping[str, Records], group: Group, tasks: Sequence[Task]) -> list[TaskRow]:
    """A row per method and kind of task; the group's cases are those of the tasks."""
    kinds = list(dict.fromkeys(task.kind for task in tasks))
    names = list(records)
    scores = {
        (name, kind): _mean(
            task.score(record.tokens)
            for task, record in zip(tasks, records[name][group.name], strict=True)
            if task.kind == kind
        )
        for name in names
        for kind in kinds
    }
    return [
        TaskRow(
            method=name,
            task=kind,
            context=group.context_tokens,
            cases=sum(task.kind == kind for task in tasks),
            score=score,
            full_score=scores[names[0], kind],
        )
        for (name, kind), score in scores.items()
    ]


def answer_rows(
    records: Mapping[str, Records], group: Group, vocabulary: Vocabulary
) -> list[AnswerRow]:
    """A row per method; the first method is the full cache."""
    (full, *_) = (of[group.name] for of in records.values())
    return [
        _answer_row(name, group, full, of[group.name], vocabulary) for name, of in records.items()
    ]


def _answer_row(
    name: str, group: Group, full: list[Record], ours: list[Record], vocabulary: Vocabulary
) -> AnswerRow:
    pairs = list(zip(full, ours, strict=True))
    divergences = [first_divergence(a.tokens, b.tokens) for a, b in pairs]
    reference = [vocabulary.decode(record.tokens) for record in full]
    answers = [vocabulary.decode(record.tokens) for record in ours]
    tokens = group.cases[0].free_tokens
    return AnswerRow(
        method=name,
        context=group.context_tokens,
        answers=len(pairs),
        tokens=tokens,
        identical=_mean(float(at is None) for at in divergences),
        first_divergence=_mean(float(tokens if at is None else at) for at in divergences),
        bleu=bleu(reference, answers),
        rouge_1=rouge_1(reference, answers),
        rouge_l=rouge_l(reference, answers),
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
