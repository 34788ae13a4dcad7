"""Scores of methods in the tasks of a file, beside those of the full cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from triptych.core.config import AppConfig, DType
from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case, EqualBytes, Method
from triptych.evals.data.task_file import FileOptions, FileTask, read_task_file
from triptych.evals.methods.baselines import reference_of
from triptych.evals.methods.method_names import DEFAULT, FULL, check_served, parse_methods
from triptych.evals.metrics.answer_scores import best_score
from triptych.evals.metrics.fidelity import Interval, bootstrap
from triptych.evals.studies.runner import Advance, Group, Record, Records, evaluate
from triptych.workers.models.facts import ModelFacts, describe
from triptych.workers.models.store.model_store import resolve
from triptych.workers.models.tokenizer import FastTokenizer, open_tokenizer

ALL = "all"
"""The row over all tasks of a file that has several."""


@dataclass(frozen=True, kw_only=True)
class FileStudy:
    """A task file and the methods that answer it."""

    file: Path
    options: FileOptions = field(default_factory=FileOptions)
    model: str = ""
    """Name or path; empty: that of ``base``."""
    methods: tuple[str, ...] = (DEFAULT,)
    """Names as in ``method_names.parse_method``."""
    base: AppConfig = field(default_factory=AppConfig)
    dtype: DType = "float32"
    is_chat: bool = False
    """Whether a prompt is the message of a user in the model's chat template."""


@dataclass(frozen=True, kw_only=True)
class ScoreRow:
    """A method's score in the lines of one task."""

    method: str
    task: str
    metric: str
    """Of all lines; ``mixed`` if they differ."""
    lines: int
    bytes_all_in_ratio: float
    """Of the prompts after compression, over 16 bits."""
    score: float
    """Mean over lines, 0 to 1."""
    score_ci95: Interval | None
    """Bootstrap over lines."""
    full_score: float
    """That of the full cache in the same lines."""
    over_full_ci95: Interval | None
    """Of the difference to the full cache, line by line; None for a single line."""
    same_answers: float
    """Share of answers that are the same text as that of the full cache."""


@dataclass(frozen=True, kw_only=True)
class AnsweredLine:
    """An answer to one line."""

    method: str
    line: int
    answer: str
    score: float


@dataclass(frozen=True, kw_only=True)
class FileResults:
    """Rows and answers of a study, with its conditions; the caller adds the host."""

    conditions: dict[str, object]
    rows: list[ScoreRow]
    answers: list[AnsweredLine]

    def as_json(self) -> dict[str, object]:
        return {
            "conditions": self.conditions,
            "rows": [asdict(row) for row in self.rows],
            "answers": [asdict(one) for one in self.answers],
        }


@dataclass(frozen=True, kw_only=True)
class PreparedFile:
    """A study with its file read and its prompts tokenized."""

    study: FileStudy
    path: Path
    facts: ModelFacts
    tokenizer: FastTokenizer
    tasks: Sequence[FileTask]
    methods: Sequence[Method | EqualBytes]
    group: Group


def prepare_file(study: FileStudy) -> PreparedFile:
    """Read the file, and parse the methods.

    Raises: ConfigError for a bad line, an unknown method, or a prompt that is too long for the
            model; ModelError if there is no such model
    """
    tasks = read_task_file(study.file, study.options)
    path = resolve(study.model or study.base.model.name)
    facts, tokenizer = describe(path), open_tokenizer(path)
    methods = parse_methods(study.methods, path, study.base, study.dtype)
    check_served(methods)
    if study.is_chat and not tokenizer.chat_template:
        raise ConfigError(f"{path}: the model has no chat template")
    cases = [_case(task, study, tokenizer, facts) for task in tasks]
    longest = max(len(case.prompt) for case in cases)
    return PreparedFile(
        study=study,
        path=path,
        facts=facts,
        tokenizer=tokenizer,
        tasks=tasks,
        methods=methods,
        group=Group(name="file", context_tokens=longest, cases=tuple(cases)),
    )


def _case(task: FileTask, study: FileStudy, tokenizer: FastTokenizer, facts: ModelFacts) -> Case:
    text = task.prompt
    if study.is_chat:
        message = {"role": "user", "content": text}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=not study.is_chat)
    room = facts.context_tokens - task.max_tokens
    if not 2 <= len(prompt) <= room:
        raise ConfigError(
            f"{study.file}, line {task.number}: a prompt of {len(prompt)} tokens and an answer of "
            f"{task.max_tokens}: expected 2 to {room} tokens, the model takes "
            f"{facts.context_tokens}"
        )
    return Case(name=f"line {task.number}", prompt=tuple(prompt), free_tokens=task.max_tokens)


def run_file(
    prepared: PreparedFile, advance: Advance, announce: Callable[[str, int], None]
) -> FileResults:
    """Answer all lines by all methods; ``announce`` is called with each and its number of lines.

    Raises: ModelError if a request fails; ConfigError if a metric needs a library that is missing
    """
    for name in (FULL, *(method.name for method in prepared.methods)):
        announce(name, len(prepared.tasks))
    reference = reference_of(prepared.methods, prepared.path)
    records = evaluate(reference, prepared.methods, [prepared.group], advance)
    return report_file(prepared, records)


def report_file(prepared: PreparedFile, records: Mapping[str, Records]) -> FileResults:
    """Rows of all methods by task; the full cache is the first method."""
    of_file = {name: every[prepared.group.name] for name, every in records.items()}
    answers = {
        name: [_answered(prepared, name, *pair) for pair in zip(prepared.tasks, every, strict=True)]
        for name, every in of_file.items()
    }
    study = prepared.study
    conditions: dict[str, object] = {
        "model": study.model or study.base.model.name,
        "model_revision": prepared.facts.revision,
        "file": study.file.name,
        "methods": list(study.methods),
        "dtype": study.dtype,
        "is_chat": study.is_chat,
        "options": asdict(study.options),
        "default_compressor": asdict(study.base.compressor),
    }
    return FileResults(
        conditions=conditions,
        rows=list(_rows(prepared.tasks, of_file, answers)),
        answers=[one for every in answers.values() for one in every],
    )


def _answered(prepared: PreparedFile, name: str, task: FileTask, record: Record) -> AnsweredLine:
    answer = text_of(record.tokens, task.stop, prepared.facts.eos_token_ids, prepared.tokenizer)
    score = best_score(task.metric, answer, task.references)
    return AnsweredLine(method=name, line=task.number, answer=answer, score=score)


def text_of(
    tokens: Sequence[int], stop: Sequence[str], ends: Sequence[int], tokenizer: FastTokenizer
) -> str:
    """The text of greedy tokens before the first end token and the first stop text."""
    until = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
    text = tokenizer.decode(list(tokens[:until]), skip_special_tokens=True)
    cuts = [at for one in stop if (at := text.find(one)) >= 0]
    return text[: min(cuts, default=len(text))].strip()


def _rows(
    tasks: Sequence[FileTask],
    records: Mapping[str, Sequence[Record]],
    answers: Mapping[str, Sequence[AnsweredLine]],
) -> Iterator[ScoreRow]:
    names = list(dict.fromkeys(task.task for task in tasks))
    full = next(iter(answers.values()))
    for method, ours in answers.items():
        for name in [*names, ALL] if len(names) > 1 else names:
            at = [index for index, task in enumerate(tasks) if name in (task.task, ALL)]
            metrics = {tasks[index].metric for index in at}
            prints = [records[method][index].footprint for index in at]
            scores = [ours[index].score for index in at]
            yield ScoreRow(
                method=method,
                task=name,
                metric=metrics.pop() if len(metrics) == 1 else "mixed",
                lines=len(at),
                bytes_all_in_ratio=sum(one.all_in_bytes for one in prints)
                / sum(one.full_bytes for one in prints),
                score=fmean(scores),
                score_ci95=bootstrap(scores),
                full_score=fmean(full[index].score for index in at),
                over_full_ci95=bootstrap([ours[i].score - full[i].score for i in at]),
                same_answers=fmean(float(ours[i].answer == full[i].answer) for i in at),
            )
