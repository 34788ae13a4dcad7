"""Task files of users: what a line may say, how answers are scored, and a whole run."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from triptych.cli.main import app
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.evals.data import task_file
from triptych.evals.data.task_file import FileOptions, FileTask, read_task_file
from triptych.evals.metrics.answer_scores import METRICS, best_score, f1, normalized
from triptych.evals.studies.file_tasks import FileStudy, prepare_file, run_file, text_of
from triptych.workers.models.tokenizer import open_tokenizer

TEXTS = st.text(min_size=1, max_size=40).filter(str.strip)
BASE = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": 16 << 20}})


def written(folder: Path, *lines: object) -> Path:
    file = folder / "mine.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return file


@given(
    st.lists(
        st.fixed_dictionaries(
            {"prompt": TEXTS, "answers": st.lists(TEXTS, min_size=1, max_size=3)},
            optional={
                "metric": st.sampled_from(sorted(METRICS.keys() - {"number"})),
                "max_tokens": st.integers(1, task_file.MAX_TOKENS),
                "stop": st.lists(TEXTS, max_size=2),
                "task": TEXTS,
            },
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_line_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, lines: list[dict[str, object]], has_blanks: bool
) -> None:
    spaced = [part for line in lines for part in ((line, " ") if has_blanks else (line,))]
    file = written(tmp_path_factory.mktemp("lines"), *spaced)
    options = FileOptions(metric="contains", max_tokens=7, stop=("|",))
    found = read_task_file(file, options)
    assert [one.prompt for one in found] == [line["prompt"] for line in lines]
    for at, (one, line) in enumerate(zip(found, lines, strict=True)):
        assert one == FileTask(
            number=1 + at * (1 + has_blanks),
            task=line.get("task", "mine"),
            prompt=line["prompt"],
            references=tuple(line["answers"]),
            metric=line.get("metric", "contains"),
            max_tokens=line.get("max_tokens", 7),
            stop=tuple(line.get("stop", ("|",))),
        )


GOOD = {"prompt": "1 + 1 =", "answer": "2"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON (column 2)"),
        ("[" * 100_000, "not JSON"),
        ("3", "expected an object"),
        ({"answer": "2"}, "prompt: expected a text that is not empty"),
        ({**GOOD, "prompt": 5}, "prompt=5: expected a text"),
        ({"prompt": "x"}, "either answer"),
        ({**GOOD, "answers": ["2"]}, "either answer"),
        ({"prompt": "x", "answers": []}, "1 to 64 texts, got 0"),
        ({"prompt": "x", "answers": ["y"] * 65}, "1 to 64 texts, got 65"),
        ({"prompt": "x", "answers": ["y", 2]}, "answers=2: expected texts"),
        ({"prompt": "x", "answer": ""}, "answer='': expected texts"),
        ({**GOOD, "metric": "bleu"}, "metric='bleu': expected one of"),
        ({"prompt": "x", "answer": "two", "metric": "number"}, "answer='two': expected a number"),
        ({**GOOD, "max_tokens": 0}, "max_tokens=0: expected a whole number, 1 to 4096"),
        ({**GOOD, "max_tokens": 2.5}, "max_tokens=2.5"),
        ({**GOOD, "max_tokens": True}, "max_tokens=True"),
        ({**GOOD, "stop": [1]}, "stop=1: expected texts"),
        ({**GOOD, "max_token": 4}, "'max_token': expected one of"),
    ],
)
def test_a_bad_line_is_named_with_its_field(tmp_path: Path, line: object, said: str) -> None:
    file = written(tmp_path, GOOD, "", line)
    with pytest.raises(ConfigError) as caught:
        read_task_file(file, FileOptions())
    assert f"{file}, line 3: " in str(caught.value)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(file))
    assert len(read_task_file(file, FileOptions(limit=1))) == 1, "not read to its end"


def test_what_is_no_file_of_lines_is_refused(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_task_file(tmp_path / "missing.jsonl", FileOptions())
    with pytest.raises(ConfigError, match="a task in at least one line"):
        read_task_file(written(tmp_path, "", " "), FileOptions())
    file = tmp_path / "latin.jsonl"
    file.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"line 2: not UTF-8 \(byte 13\)"):
        read_task_file(file, FileOptions())
    monkeypatch.setattr(task_file, "MAX_LINES", 2)
    with pytest.raises(ConfigError, match="line 3: expected at most 2 tasks; --limit"):
        read_task_file(written(tmp_path, GOOD, GOOD, GOOD), FileOptions())
    assert len(read_task_file(file, FileOptions(limit=1))) == 1
    monkeypatch.setattr(task_file, "MAX_LINE_BYTES", 64)
    with pytest.raises(ConfigError, match="line 2: longer than 64 bytes"):
        read_task_file(written(tmp_path, GOOD, {**GOOD, "prompt": "x" * 60}), FileOptions())


def test_lines_of_other_harnesses_need_a_template(tmp_path: Path) -> None:
    line = {"context": "Ann is {8}.", "input": "How old?", "answers": ["8"], "length": 3, "_id": 1}
    file = written(tmp_path, line)
    with pytest.raises(ConfigError, match=r"line 1: 'context': .* or a --template"):
        read_task_file(file, FileOptions())
    (task,) = read_task_file(file, FileOptions(template="{context}\nQ: {input}\nA:"))
    assert task.prompt == "Ann is {8}.\nQ: How old?\nA:"
    with pytest.raises(ConfigError, match="line 1: 'question': the template has this field"):
        read_task_file(file, FileOptions(template="{question}"))
    with pytest.raises(ConfigError, match="template"):
        FileOptions(template="no field")


@pytest.mark.parametrize(
    ("metric", "answer", "references", "expected"),
    [
        ("exact_match", "The  Cat!", ["a dog", "cat"], 1),
        ("exact_match", "cats", ["cat"], 0),
        ("contains", "It is the red cat.", ["Red cat"], 1),
        ("contains", "category", ["cat"], 0),
        ("starts_with", "B. Because of it", ["B"], 1),
        ("starts_with", "Because", ["B"], 0),
        ("f1", "the big red cat", ["a red cat sat"], 2 * 2 / (3 + 3)),
        ("f1", "the", ["a"], 1),
        ("f1", "", ["cat"], 0),
        ("number", "So 3 + 4 = 1,007.50 in all", ["#### 1007.5"], 1),
        ("number", "none", ["7"], 0),
        ("rouge_l", "one two three", ["one three"], 2 * 1 * (2 / 3) / (1 + 2 / 3)),
    ],
)
def test_scores_are_those_of_the_usual_scripts(
    metric: str, answer: str, references: list[str], expected: float
) -> None:
    assert best_score(metric, answer, references) == pytest.approx(expected)


@given(st.text(max_size=30), st.text(max_size=30))
def test_scores_are_shares_and_equal_texts_match(answer: str, reference: str) -> None:
    for name, metric in METRICS.items():
        if name != "rouge_l":
            assert 0 <= metric(answer, reference) <= 1
    assert f1(answer, reference) == pytest.approx(f1(reference, answer))
    assert f1(answer, answer) == METRICS["exact_match"](answer, answer) == 1
    assert normalized(normalized(answer)) == normalized(answer)


def test_an_answer_ends_at_an_end_token_and_at_a_stop_text(tiny_model: Path) -> None:
    tokenizer = open_tokenizer(tiny_model)
    tokens = tokenizer.encode(" ab. cd", add_special_tokens=False)
    assert text_of(tokens, (), (1,), tokenizer) == "ab. cd"
    assert text_of(tokens, (".",), (1,), tokenizer) == "ab"
    assert text_of(tokens, ("cd", "b"), (1,), tokenizer) == "a"
    assert text_of([*tokens[:2], 1, *tokens], (), (1,), tokenizer) == "a"


def study_of(model: Path, folder: Path) -> FileStudy:
    """Lines whose answers are those of the full cache, so that it has all points."""
    draw = random.Random(5)
    texts = ["".join(draw.choices("abcdefgh ,.", k=draw.randint(150, 300))) for _ in range(6)]
    lines = [{"prompt": text, "answer": "?", "max_tokens": 12} for text in texts]
    study = FileStudy(
        file=written(folder, *lines),
        options=FileOptions(metric="exact_match"),
        model=str(model),
        base=BASE,
        methods=("uniform:fp16", "uniform:k8v8", "simulated:k1v1"),
    )
    prepared = prepare_file(study)
    answers = run_file(prepared, lambda _n, _c: None, lambda _n, _c: None).answers[:6]
    assert [one.method for one in answers] == ["full"] * 6
    whole = [
        {**line, "answer": one.answer, "task": "even" if one.line % 2 == 0 else "odd"}
        for line, one in zip(lines, answers, strict=True)
    ]
    written(folder, *whole)
    return study


def test_methods_are_scored_beside_the_full_cache(tiny_model: Path, tmp_path: Path) -> None:
    study = study_of(tiny_model, tmp_path)
    announced = dict[str, int]()
    done = list[tuple[str, int]]()
    prepared = prepare_file(study)
    found = run_file(prepared, lambda *one: done.append(one), announced.__setitem__)
    assert announced == dict.fromkeys(("full", *study.methods), 6)
    assert sum(count for _, count in done) == 24
    rows = {(row.method, row.task): row for row in found.rows}
    assert {task for _, task in rows} == {"even", "odd", "all"}
    full, good, bad = (rows[name, "all"] for name in ("full", "uniform:fp16", "simulated:k1v1"))
    assert (full.score, full.same_answers, full.bytes_all_in_ratio) == (1, 1, 1)
    assert full.over_full_ci95 == (0, 0)
    assert (good.score, good.lines, good.metric) == (1, 6, "exact_match")
    assert bad.score < 1
    assert bad.over_full_ci95
    assert bad.over_full_ci95[0] <= bad.score - bad.full_score <= bad.over_full_ci95[1]
    assert rows["uniform:k8v8", "all"].bytes_all_in_ratio < 1
    assert len(json.loads(json.dumps(found.as_json()))["answers"]) == 24


def test_the_command_writes_rows_and_says_what_is_wrong(tiny_model: Path, tmp_path: Path) -> None:
    file, out = written(tmp_path, {**GOOD, "metric": "number"}), tmp_path / "rows.json"
    common = ["eval", "tasks", str(file), "--model", str(tiny_model), "--max-tokens", "4"]
    run = CliRunner().invoke(app, [*common, "--methods", "uniform:k8v4", "--json", str(out)])
    assert run.exit_code == 0, run.output
    assert "same answers" in run.output
    data = json.loads(out.read_text())
    assert [row["method"] for row in data["rows"]] == ["full", "uniform:k8v4"]
    for options, said in (
        (["--chat"], "no chat template"),
        (["--max-tokens", "511"], "line 1: a prompt of 7 tokens"),
        (["--methods", "colour"], "colour"),
    ):
        with pytest.raises(ConfigError, match=said):
            CliRunner().invoke(app, [*common, *options], catch_exceptions=False)
