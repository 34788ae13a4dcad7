"""A whole study on a tiny model: rows, files and plots."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triptych.cli.main import app
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.evals.studies.plot import plot_quality
from triptych.evals.studies.study import Results, Study, measure, prepare, report

BASE = AppConfig.from_mapping(
    {"pool": {"kv_cache_memory_bytes": 16 << 20}, "compressor": {"recent_window_tokens": 20}}
)


def ignore(_name: str, _count: int) -> None:
    return


@pytest.fixture(scope="module")
def study(tiny_model: Path) -> Study:
    return Study(
        model=str(tiny_model),
        base=BASE,
        methods=("uniform:k8v8", "simulated:k2v2"),
        contexts=(100, 200),
        documents=2,
        steps=16,
        tasks=("passkey",),
        task_context=200,
        task_count=2,
        greedy_tokens=12,
    )


@pytest.fixture(scope="module")
def results(study: Study) -> Results:
    prepared = prepare(study)
    return report(prepared, measure(prepared, ignore, ignore))


def test_there_is_a_row_for_each_method_and_context_and_one_over_all(results: Results) -> None:
    names, contexts = ["full", "uniform:k8v8", "simulated:k2v2"], [100, 200, "all"]
    assert [(row.method, row.context) for row in results.rows] == [
        (name, context) for name in names for context in contexts
    ]
    for row in results.rows:
        assert row.summary.documents == 2
        assert row.summary.tokens == (32 if row.context == "all" else 16) * 2
    full, good, bad = (results.rows[at].summary for at in (2, 5, 8))
    assert full.kl == 0.0
    assert full.perplexity_ratio == 1.0
    assert 0 < good.kl * 20 < bad.kl
    low, high = results.rows[8].kl_over_first_ci95 or (0.0, 0.0)
    assert 0 < low <= bad.kl - good.kl <= high


def test_bytes_stand_next_to_the_full_cache(results: Results) -> None:
    full, good = results.rows[2], results.rows[5]
    assert (full.bytes_data_ratio, full.bytes_all_in_ratio) == (1.0, 1.0)
    assert 0.5 < good.bytes_data_ratio < good.bytes_all_in_ratio


def test_tasks_and_answers_stand_next_to_the_full_cache(results: Results) -> None:
    assert [row.method for row in results.tasks] == ["full", "uniform:k8v8", "simulated:k2v2"]
    assert all(row.cases == 2 and row.full_score == results.tasks[0].score for row in results.tasks)
    full, _, bad = results.answers
    assert (full.identical, full.first_divergence, full.rouge_l) == (1.0, 12.0, 1.0)
    assert bad.first_divergence < 12
    assert bad.bleu < full.bleu


def test_results_are_json_with_their_conditions(results: Results) -> None:
    data = json.loads(json.dumps(results.as_json()))
    assert {"model_revision", "text_hash", "dtype", "steps", "documents"} <= set(data["conditions"])
    wanted = {"method", "bytes_data_ratio", "bytes_all_in_ratio", "top1_agreement", "kl"}
    assert wanted | {"perplexity"} <= set(data["rows"][0])


def test_the_plot_is_written_twice(results: Results, tmp_path: Path) -> None:
    png, svg = plot_quality(results.rows, "all", tmp_path / "figures" / "quality")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "uniform:k8v8" in svg.read_text(encoding="utf-8") or "<svg" in svg.read_text("utf-8")
    with pytest.raises(ConfigError, match="4096"):
        plot_quality(results.rows, 4096, tmp_path / "none")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"contexts": (500,)}, "the model takes 512"),
        ({"contexts": ()}, "contexts"),
        ({"documents": 0}, "documents"),
        ({"tasks": ("passkeys",)}, "passkeys"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(
    tiny_model: Path, settings: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        prepare(Study(**{"model": str(tiny_model), "tasks": (), "greedy_tokens": 0, **settings}))


def test_the_command_prints_a_table_and_writes_the_rows(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--methods", "simulated:k8v4", "--contexts", "64", "--documents", "2"]
    options += ["--steps", "4", "--tasks", "none", "--greedy-tokens", "0", "--json", str(file)]
    done = CliRunner().invoke(app, ["eval", "quality", "--model", str(tiny_model), *options])
    assert done.exit_code == 0, done.output
    assert "simulated:k8v4" in done.output
    data = json.loads(file.read_text())
    assert [row["method"] for row in data["rows"]] == ["full", "simulated:k8v4"]
    assert data["host"]["versions"]["torch"]


def test_the_command_prints_intervals_of_another_seed_of_cuts(tiny_model: Path) -> None:
    options = ["--methods", "simulated:k8v4", "--contexts", "64", "--documents", "2"]
    options += ["--steps", "4", "--tasks", "none", "--greedy-tokens", "0", "--seed", "1"]
    command = ["eval", "quality", "--model", str(tiny_model), *options, "--intervals"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "95 % intervals, bootstrap over 2 documents" in done.output
