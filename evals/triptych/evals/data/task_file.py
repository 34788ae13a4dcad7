"""Task files of users: one JSON object a line, with a prompt, its answers and a metric.

Files of lm-evaluation-harness and LongBench are such lines with other fields; a template makes the
prompt of them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

from triptych.core.config import require
from triptych.core.errors import ConfigError
from triptych.evals.metrics.answer_scores import METRICS, NUMBER

MAX_LINE_BYTES = 8 << 20
MAX_LINES = 100_000
MAX_REFERENCES = 64
MAX_TOKENS = 4096
FIELDS = ("prompt", "answer", "answers", "metric", "max_tokens", "stop", "task")
"""Fields of a line; with a template also those that it and its file have."""
PLACE = re.compile(r"\{(\w+)\}")
"""A field in a template."""

Line = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """How lines become tasks."""

    template: str = ""
    """Text with fields of the line in braces; empty: the field ``prompt``."""
    metric: str = "f1"
    """Of lines without the field."""
    max_tokens: int = 64
    """Tokens of an answer, of lines without the field."""
    stop: tuple[str, ...] = ()
    """Texts at which an answer ends, of lines without the field."""
    limit: int = 0
    """Only this many tasks; 0: all."""

    def __post_init__(self) -> None:
        require(self.metric in METRICS, "metric", self.metric, f"one of {sorted(METRICS)}")
        most = self.max_tokens
        require(1 <= most <= MAX_TOKENS, "max_tokens", most, f"1 to {MAX_TOKENS}")
        require(self.limit >= 0, "limit", self.limit, ">= 0")
        if self.template:
            require("{" in self.template, "template", self.template, "a field, as in {question}")


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """One line of a task file."""

    number: int
    """Of the line, from 1 on."""
    task: str
    """Lines with the same name are reported together."""
    prompt: str
    references: tuple[str, ...]
    metric: str
    max_tokens: int
    stop: tuple[str, ...]


def read_task_file(file: Path, options: FileOptions) -> list[FileTask]:
    """Tasks of a file of JSON lines; blank lines are skipped.

    A line has ``prompt``, ``answer`` (a text) or ``answers`` (a list of texts, of which one must
    match), and may have ``metric``, ``max_tokens``, ``stop`` and ``task``. Other fields are refused
    unless there is a template.

    Raises: ConfigError with the number of the line, the field and what was expected
    """
    found = list[FileTask]()
    for number, text in islice(_lines(file), options.limit or None):
        if len(found) == MAX_LINES:
            text = f"expected at most {MAX_LINES} tasks; --limit reads fewer"
            raise ConfigError(f"{file}, line {number}: {text}")
        try:
            found.append(_task(number, _object(text), options, file.stem))
        except ConfigError as error:
            raise ConfigError(f"{file}, line {number}: {error}") from None
    if not found:
        raise ConfigError(f"{file}: expected a task in at least one line")
    return found


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their numbers; a long line is not read whole."""
    number = 0
    try:
        with file.open("rb") as stream:
            while data := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    text = f"longer than {MAX_LINE_BYTES} bytes"
                    raise ConfigError(f"{file}, line {number}: {text}")
                if data.strip():
                    yield number, data.rstrip().decode("utf-8-sig" if number == 1 else "utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        text = f"not UTF-8 (byte {error.start + 1})"
        raise ConfigError(f"{file}, line {number}: {text}") from None


def _object(text: str) -> Line:
    try:
        data: object = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        at = f" (column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"not JSON{at}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"expected an object, as in {{...}}, got a {type(data).__name__}")
    return cast("Line", data)


def _task(number: int, line: Line, options: FileOptions, name: str) -> FileTask:
    if not options.template:
        for field in line:
            if field not in FIELDS:
                what = f"expected one of {list(FIELDS)}, or a --template for files of other fields"
                raise ConfigError(f"{field[:64]!r}: {what}")
    metric = _text(line, "metric", options.metric)
    if metric not in METRICS:
        raise ConfigError(f"metric={metric[:64]!r}: expected one of {sorted(METRICS)}")
    references = _references(line)
    if metric == "number" and not all(NUMBER.search(one) for one in references):
        raise ConfigError(f"answer={references[0][:64]!r}: expected a number, as its metric says")
    return FileTask(
        number=number,
        task=_text(line, "task", name),
        prompt=_prompt(line, options.template),
        references=references,
        metric=metric,
        max_tokens=_max_tokens(line, options.max_tokens),
        stop=_texts(line, "stop") if "stop" in line else options.stop,
    )


def _prompt(line: Line, template: str) -> str:
    prompt = template or _text(line, "prompt", "")
    if template:
        prompt = PLACE.sub(lambda place: _text(line, place[1], None), template)
    if not prompt:
        raise ConfigError("prompt: expected a text that is not empty")
    return prompt


def _references(line: Line) -> tuple[str, ...]:
    if ("answer" in line) == ("answers" in line):
        raise ConfigError("expected either answer (a text) or answers (a list of texts)")
    found = _texts(line, "answers" if "answers" in line else "answer")
    if not 1 <= len(found) <= MAX_REFERENCES:
        raise ConfigError(f"answers: expected 1 to {MAX_REFERENCES} texts, got {len(found)}")
    return found


def _max_tokens(line: Line, usual: int) -> int:
    value = line.get("max_tokens", usual)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f"max_tokens={value!r:.64}: expected a whole number, 1 to {MAX_TOKENS}")
    return value


def _texts(line: Line, field: str) -> tuple[str, ...]:
    """A text, or a list of texts, none of them empty."""
    value = line[field]
    every: Sequence[object] = cast("list[object]", value) if isinstance(value, list) else [value]
    for one in every:
        if not isinstance(one, str) or not one:
            raise ConfigError(f"{field}={one!r:.64}: expected texts that are not empty")
    return tuple(cast("Sequence[str]", every))


def _text(line: Line, field: str, usual: str | None) -> str:
    """A field that is a text; ``usual`` if there is none, unless that is None."""
    value = line.get(field, usual)
    if value is None:
        raise ConfigError(f"{field!r}: the template has this field, the line has not")
    if not isinstance(value, str):
        raise ConfigError(f"{field}={value!r:.64}: expected a text")
    return value
