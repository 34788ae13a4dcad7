"""The frontier on a tiny model: probes, a study that goes on where it stopped, its rows."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triptych.cli.main import app
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.methods.table import METHODS
from triptych.evals.frontier.frontier_plot import plot_frontier
from triptych.evals.frontier.frontier_rows import (
    FrontierRow,
    frontier_of,
    frontier_rows,
    is_served,
    overlap_rows,
    paper_of,
    time_rows,
)
from triptych.evals.frontier.frontier_study import (
    FRONTIER,
    FrontierStudy,
    PreparedFrontier,
    prepare_frontier,
    run_frontier,
)
from triptych.evals.frontier.record_file import RecordFile
from triptych.evals.methods.full_cache import FullCache

BASE = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": 16 << 20}})


@pytest.fixture(scope="module")
def prepared(tiny_model: Path) -> PreparedFrontier:
    study = FrontierStudy(
        model=str(tiny_model),
        base=BASE,
        methods=("uniform:k8v8", "simulated:k2v2", "snapkv+keep=0.5"),
        contexts=(256, 300),
        documents=2,
        steps=8,
        answer_tokens=6,
    )
    return prepare_frontier(study)


@pytest.fixture(scope="module")
def file(prepared: PreparedFrontier, tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    file = RecordFile(tmp_path_factory.mktemp("frontier") / "records.jsonl")
    run_frontier(prepared, file, lambda _name: None)
    return file


def rows_of(prepared: PreparedFrontier, file: RecordFile) -> list[FrontierRow]:
    return frontier_rows(prepared, file.probes())


def test_a_pass_key_is_in_the_context_and_the_text_goes_on_behind_it(
    prepared: PreparedFrontier,
) -> None:
    for group in prepared.groups_of("texts"):
        for probe in group.probes:
            text = bytes(token - 2 for token in probe.case.prompt)
            assert len(text) == group.context
            key = bytes(token - 2 for token in probe.expected).strip()
            assert text.count(key) == 2 or len(key) == 5
            assert len(probe.case.forced) > probe.scored_tokens + 1


def test_rows_have_bytes_fidelity_pass_keys_answers_and_times(
    prepared: PreparedFrontier, file: RecordFile
) -> None:
    rows = rows_of(prepared, file)
    names = ["full", "uniform:k8v8", "simulated:k2v2", "snapkv+keep=0.5"]
    assert [(row.method, row.context) for row in rows] == [
        (name, context) for context in (256, 300) for name in names
    ]
    full, good, bad, pruned = rows[:4]
    assert (full.summary.kl, full.bytes_all_in_ratio) == (0.0, 1.0)
    assert 0 < good.summary.kl < bad.summary.kl
    assert good.summary.tokens == 2 * 8
    assert pruned.bytes_all_in_ratio == pytest.approx(0.5, abs=0.01)
    assert [row.served for row in rows[:4]] == [False, True, False, False]
    answers = overlap_rows(prepared, file.probes())
    assert [row.method for row in answers] == names
    assert answers[0].identical == 1
    assert answers[0].rouge_1 >= answers[2].rouge_1
    (times,) = time_rows(prepared, file.times())
    assert times.method == "uniform:k8v8"
    assert all(0 < us < 1e5 for us in times.us_per_token.values())
    assert list(times.us_per_token) == [1, 4, 16]


def test_a_study_that_was_stopped_goes_on_and_other_studies_are_refused(
    prepared: PreparedFrontier,
    file: RecordFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = file.path.read_text().splitlines()
    torn = RecordFile(tmp_path / "torn.jsonl")
    lost = next(line for line in lines if '"snapkv+keep=0.5"' in line)
    lines.remove(lost)
    torn.path.write_text("\n".join([*lines, lost[:50]]))
    shutil.copytree(file.logits_folder, torn.logits_folder)
    monkeypatch.delattr(FullCache, "run")  # its logits are kept
    run_frontier(prepared, torn, lambda _name: None)
    assert rows_of(prepared, torn) == rows_of(prepared, file)
    other = replace(prepared, study=replace(prepared.study, steps=9))
    with pytest.raises(ConfigError, match=r"of another study \(steps=8\)"):
        run_frontier(other, torn, lambda _name: None)
    shutil.rmtree(torn.logits_folder)
    torn.path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="lacks logits of the full cache"):
        run_frontier(prepared, torn, lambda _name: None)


def test_records_that_kvpress_made_have_rows_behind_those_of_the_study(
    prepared: PreparedFrontier, file: RecordFile, tmp_path: Path
) -> None:
    more = RecordFile(tmp_path / "more.jsonl")
    more.path.write_bytes(file.path.read_bytes())
    pruned = [one for one in file.probes() if one.method == "snapkv+keep=0.5"]
    more.add(replace(one, method="kvpress:snapkv@0.5") for one in pruned)
    ours, theirs = (row for row in rows_of(prepared, more)[3:5])
    assert theirs == replace(ours, method="kvpress:snapkv@0.5", paper="SnapKV")
    assert not theirs.served
    assert paper_of("kvpress:leverage_score@0.25") == ""


def test_the_frontier_has_what_nothing_beats_in_both(
    prepared: PreparedFrontier, file: RecordFile, tmp_path: Path
) -> None:
    row = rows_of(prepared, file)[1]

    def at(size: float, kl: float) -> FrontierRow:
        return replace(row, bytes_all_in_ratio=size, summary=replace(row.summary, kl=kl))

    rows = [at(0.5, 0.1), at(0.3, 0.2), at(0.4, 0.3), at(0.2, 0.9)]
    assert frontier_of(rows) == [rows[3], rows[1], rows[0]]
    png, svg = plot_frontier(rows_of(prepared, file), tmp_path / "plane")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_every_method_of_the_default_study_has_its_paper() -> None:
    papers = {name: paper_of(name) for name in FRONTIER}
    assert papers["leankv"] == "LeanKV"
    assert paper_of("learned:paper") == "FastCache"
    assert all(paper or name.startswith("uniform:") for name, paper in papers.items())
    assert is_served("served:snapkv+keep_share=0.5")
    assert not is_served("snapkv+keep=0.5")


def test_the_default_study_has_every_method_that_a_server_of_the_default_model_offers() -> None:
    named = {name.removeprefix("served:").partition("+")[0] for name in FRONTIER}
    untrained = {"learned:paper", "learned:score"}
    assert set(METHODS.builtin) - untrained - {"uniform"} <= named


def test_methods_without_bytes_of_their_own_are_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"say which share it keeps, as in \+keep=0.3"):
        prepare_frontier(FrontierStudy(model=str(tiny_model), methods=("default", "h2o")))
    with pytest.raises(ConfigError, match="'plain_networks' needs training"):  # before any runs
        prepare_frontier(
            FrontierStudy(
                model=str(tiny_model),
                methods=("default", "learned:paper"),
                base=AppConfig.from_mapping({"compressor": {"learned": []}}),
            )
        )
    with pytest.raises(ConfigError, match="parts"):
        FrontierStudy(parts=("text",))  # pyright: ignore[reportArgumentType]


def test_the_command_writes_rows_and_goes_on(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["eval", "frontier", "--model", str(tiny_model), "--contexts", "256"]
    options += ["--documents", "2", "--steps", "4", "--parts", "texts", "--json", "rows.json"]
    for methods in ("simulated:k4v4", "simulated:k4v4,simulated:k8v8"):
        done = CliRunner().invoke(app, [*options, "--methods", methods])
        assert done.exit_code == 0, done.output
    data = json.loads(Path("rows.json").read_text())
    names = [row["method"] for row in data["rows"]]
    assert names == ["full", *["simulated:k4v4", "simulated:k8v8"]]
    assert data["conditions"]["split"] == "test"
