"""A study: methods, texts and tasks to run, and the results with their conditions."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from triptych.core.config import AppConfig, DType, require
from triptych.evals.data.cases import EqualBytes, Method
from triptych.evals.data.tasks import TASKS, Task, make_tasks
from triptych.evals.data.texts import Split, documents, text_hash
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.baselines import reference_of
from triptych.evals.methods.method_names import COMPARED, FULL, check_served, parse_methods
from triptych.evals.studies.report import (
    AnswerRow,
    Row,
    TaskRow,
    answer_rows,
    task_rows,
    text_rows,
)
from triptych.evals.studies.runner import (
    Advance,
    Group,
    Records,
    answer_group,
    check,
    evaluate,
    task_group,
    text_group,
)
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.store.model_store import resolve


@dataclass(frozen=True, kw_only=True)
class Study:
    """Methods, texts and tasks of a study."""

    model: str = ""
    """Name or path; empty: that of ``base``."""
    methods: tuple[str, ...] = COMPARED
    """Names as in ``method_names.parse_method``."""
    base: AppConfig = field(default_factory=AppConfig)
    """Settings that methods start from; ``default`` uses them unchanged."""
    dtype: DType = "float32"
    """Of the engines: float32 as in the full cache, so that only the cache differs."""
    contexts: tuple[int, ...] = (1024, 2048, 4096)
    """Tokens that are compressed."""
    documents: int = 6
    """Documents per context length."""
    steps: int = 128
    """Tokens that are forced and scored after each context."""
    split: Split = "evaluation"
    """Texts: settings are chosen on ``calibration`` and reported on ``test``."""
    texts: bool = True
    """Whether continuations of documents are scored; if not, tasks alone."""
    tasks: tuple[str, ...] = tuple(TASKS)
    """Generated tasks; none: texts alone."""
    task_context: int = 1024
    """Tokens of a task's prompt (the repetition has its own length)."""
    task_count: int = 8
    """Tasks of each kind."""
    greedy_tokens: int = 256
    """Tokens of a greedy answer to each document of the shortest context; 0: none."""
    seed: int = 0
    """Of the tasks; above 0 also of the cuts of the texts."""

    def __post_init__(self) -> None:
        require(bool(self.contexts), "contexts", self.contexts, "one context length or more")
        require(min(self.contexts, default=2) >= 2, "contexts", self.contexts, ">= 2 tokens each")
        require(self.documents >= 1, "documents", self.documents, ">= 1")
        require(self.steps >= 1, "steps", self.steps, ">= 1")
        require(self.task_count >= 1, "task_count", self.task_count, ">= 1")
        tokens = self.greedy_tokens
        require(tokens == 0 or tokens > 1, "greedy_tokens", tokens, "0 or > 1")
        something = self.texts or bool(self.tasks)
        require(something, "tasks", self.tasks, "one or more, if no text is scored")

    @property
    def model_name(self) -> str:
        return self.model or self.base.model.name


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A study with its model resolved and its cases generated."""

    study: Study
    path: Path
    facts: ModelFacts
    methods: list[Method | EqualBytes]
    groups: list[Group]
    tasks: list[Task]


@dataclass(frozen=True, kw_only=True)
class Results:
    """Rows of a study, with its conditions; the caller adds the host."""

    conditions: dict[str, object]
    rows: list[Row]
    tasks: list[TaskRow]
    answers: list[AnswerRow]

    def as_json(self) -> dict[str, object]:
        return {
            "conditions": self.conditions,
            "rows": [row.as_json() for row in self.rows],
            "tasks": [asdict(row) for row in self.tasks],
            "answers": [asdict(row) for row in self.answers],
        }


def prepare(study: Study) -> Prepared:
    """Resolve the model, parse the methods, generate the cases.

    Raises: ConfigError for a wrong setting or a method that cannot be served, ModelError if there
            is no such model
    """
    path = resolve(study.model_name)
    facts = describe(path)
    methods = parse_methods(study.methods, path, study.base, study.dtype)
    check_served(methods)
    vocabulary = Vocabulary(path)
    tasks = make_tasks(
        study.tasks,
        vocabulary,
        study.split,
        context=study.task_context,
        count=study.task_count,
        seed=study.seed,
    )
    groups = _groups(study, vocabulary, tasks)
    check(groups, facts.context_tokens)
    return Prepared(
        study=study, path=path, facts=facts, methods=methods, groups=groups, tasks=tasks
    )


def measure(
    prepared: Prepared, advance: Advance, announce: Callable[[str, int], None]
) -> dict[str, Records]:
    """Run all methods; ``announce`` is called with each name and its number of cases.

    Raises: ModelError if a request fails
    """
    cases = sum(len(group.cases) for group in prepared.groups)
    for name in (FULL, *(method.name for method in prepared.methods)):
        announce(name, cases)
    reference = reference_of(prepared.methods, prepared.path)
    return evaluate(reference, prepared.methods, prepared.groups, advance)


def report(prepared: Prepared, records: Mapping[str, Records]) -> Results:
    """Rows of all methods that have records; the full cache is the first."""
    by_name = {group.name: group for group in prepared.groups}
    answers = [group for name, group in by_name.items() if name.startswith("answers@")]
    vocabulary = Vocabulary(prepared.path)
    return Results(
        conditions=_conditions(prepared),
        rows=text_rows(records, prepared.groups),
        tasks=task_rows(records, by_name["tasks"], prepared.tasks) if prepared.tasks else [],
        answers=[row for group in answers for row in answer_rows(records, group, vocabulary)],
    )


def _groups(study: Study, vocabulary: Vocabulary, tasks: list[Task]) -> list[Group]:
    texts = {
        context: documents(
            vocabulary.encode,
            study.split,
            context=context,
            continuation=study.steps + 1,
            count=study.documents,
            seed=study.seed,
        )
        for context in study.contexts
    }
    groups = [text_group(found) for found in texts.values()] if study.texts else []
    if study.greedy_tokens:
        groups.append(answer_group(texts[min(texts)], study.greedy_tokens))
    if tasks:
        groups.append(task_group(tasks, study.task_context))
    return groups


def _conditions(prepared: Prepared) -> dict[str, object]:
    study = prepared.study
    left_out = {"base", "model"}
    settings = {key: value for key, value in vars(study).items() if key not in left_out}
    return {
        "model": study.model_name,
        "model_revision": prepared.facts.revision,
        "text_hash": text_hash(study.split),
        "default_compressor": asdict(study.base.compressor),
        **settings,
    }
