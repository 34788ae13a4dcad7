"""An ablation on a tiny model: one setting at a time, spread over draws."""

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triptych.cli.main import app
from triptych.core.errors import ConfigError
from triptych.evals.data.texts import documents
from triptych.evals.methods.method_names import parse_methods
from triptych.evals.studies.ablation import (
    AXES,
    Ablation,
    AblationResults,
    SeedStats,
    ablate,
    with_page_times,
)
from triptych.evals.studies.plot import plot_axes


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> AblationResults:
    plan = Ablation(
        model=str(tiny_model),
        axes=("keep", "dense"),
        seeds=2,
        context=200,
        documents=1,
        steps=4,
        tasks=("passkey",),
        methods=("h2o+keep=0.5", "quest+keep=0.5"),
        task_context=200,
        task_count=1,
    )
    begun, done = dict[str, int](), dict[str, int]()

    def advance(name: str, count: int) -> None:
        done[name] = done.get(name, 0) + count

    result = ablate(plan, begun.__setitem__, advance)
    assert begun == done
    assert list(begun) == [f"{kind}, draw {n}" for n in (1, 2) for kind in ("texts", "tasks")]
    return result


def test_every_setting_has_a_point_with_its_spread(found: AblationResults) -> None:
    assert [(point.axis, point.setting) for point in found.points] == [
        (axis, label) for axis in ("keep", "dense") for label in AXES[axis]
    ]
    dense = {point.setting: point for point in found.points if point.axis == "dense"}
    none, both = dense["0"], dense["2"]  # the model has two layers
    assert none.kl.mean > 1e-6 > both.kl.mean >= 0
    assert 1.0 == both.bytes_read_ratio > none.bytes_read_ratio
    assert none.attention_hit is not None
    assert both.attention_hit is not None
    assert none.attention_hit.mean < 0.999 < both.attention_hit.mean
    assert none.kl.deviation > 0


def test_the_same_method_is_measured_once_for_all_axes(found: AblationResults) -> None:
    shared = [point for point in found.points if point.method == "moments+keep=0.3"]
    assert len(shared) == 2
    assert shared[0].kl == shared[1].kl


def test_tasks_stand_next_to_the_full_cache(found: AblationResults) -> None:
    assert [score.method for score in found.scores] == ["full", "h2o+keep=0.5", "quest+keep=0.5"]
    assert all(score.cases == 2 for score in found.scores)
    assert len({score.full_score for score in found.scores}) == 1


def test_a_spread_is_students(found: AblationResults) -> None:
    spread = SeedStats.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert spread.mean == 3
    assert spread.deviation == pytest.approx(sqrt(2.5))
    assert spread.ci95[1] - 3 == pytest.approx(2.776 * sqrt(2.5 / 5))
    assert json.loads(json.dumps(found.as_json()))["points"][0]["kl"]["ci95"]


def test_page_sizes_have_the_time_of_a_call(found: AblationResults) -> None:
    """Other axes have none: they do not change how long a page takes."""
    assert all(point.attention_us is None for point in found.points)
    point = replace(found.points[0], axis="page", setting="32")
    timed, other = with_page_times([point, found.points[1]], 256)
    assert timed.attention_us is not None
    assert timed.attention_us > 0
    assert other == found.points[1]


def test_axes_are_drawn(found: AblationResults, tmp_path: Path) -> None:
    png, _ = plot_axes(found.points, tmp_path / "axes")
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="--axes"):
        plot_axes([], tmp_path / "none")


def test_all_axes_name_methods_that_there_are() -> None:
    for axis in AXES.values():
        names = list(axis.values())
        assert len(parse_methods(names, Path(), Ablation().base, "float32")) == len(names)


def test_draws_differ_and_repeat() -> None:
    def cut(seed: int) -> list[str]:
        pieces = documents(
            lambda text: list(text.encode()),
            "evaluation",
            context=300,
            continuation=20,
            count=6,
            seed=seed,
        )
        assert all((len(one.context), len(one.continuation)) == (300, 20) for one in pieces)
        assert sum(one.name.startswith("pydoc") for one in pieces) == 3
        return [one.name for one in pieces]

    assert cut(1) == cut(1)
    assert len({tuple(cut(seed)) for seed in range(5)}) == 5


def test_wrong_plans_are_refused() -> None:
    with pytest.raises(ConfigError, match="2 to 20"):
        Ablation(seeds=1)
    with pytest.raises(ConfigError, match="page"):
        Ablation(axes=("pages",))
    with pytest.raises(ConfigError, match="axis"):
        Ablation(axes=(), tasks=())


def test_the_commands_print_tables_and_write_files(tiny_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ablation.json"
    small = ["--model", str(tiny_model), "--steps", "4", "--documents", "1", "--json", str(file)]
    asked = ["--axes", "rank", "--seeds", "2", "--context", "100", "--tasks", "none"]
    done = CliRunner().invoke(app, ["eval", "ablate", *small, *asked])
    assert done.exit_code == 0, done.output
    assert "oracle" in done.output
    assert len(json.loads(file.read_text())["points"]) == len(AXES["rank"])
    asked = ["--methods", "simulated:k4v2", "--baselines", "--contexts", "100", "--tasks", "none"]
    done = CliRunner().invoke(app, ["eval", "quality", *small, *asked, "--greedy-tokens", "0"])
    assert done.exit_code == 0, done.output
    rows = {row["method"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["h2o"]["bytes_all_in_ratio"] == pytest.approx(
        rows["simulated:k4v2"]["bytes_all_in_ratio"], rel=0.02
    )
    assert 0 < rows["knorm"]["attention_hit"] < 1
