"""The result file of ``triptych eval claims``: written part by part, and completed later."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run
from triptych.cli.quality.claims_file import ClaimsFile
from triptych.core.errors import ConfigError
from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.studies.ablation import AblationResults, Point, SeedStats

CONDITIONS: dict[str, object] = {"seeds": 2, "model": "m", "axes": ("pruning",)}
STATS = SeedStats.of([1.0, 2.0])
ABLATION = AblationResults(
    conditions={"context": 64},
    points=[
        Point(
            axis="pruning",
            setting="0",
            method="default",
            bytes_read_ratio=0.3,
            bytes_held_ratio=0.3,
            attention_hit=None,
            kl=STATS,
            top1_agreement=STATS,
            perplexity_ratio=STATS,
            is_neutral=True,
        )
    ],
    scores=[],
)


def one_draw() -> ClaimsResults:
    return ClaimsResults(conditions=CONDITIONS, ablation=ABLATION).with_draw("drift", 1, {"KL": 1})


def test_parts_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    first = ClaimsFile.open(path, CONDITIONS)
    assert not first.known.draws
    first.write(one_draw())
    second = ClaimsFile.open(path, CONDITIONS)
    assert second.known.draws == {"drift": {"1": {"KL": 1.0}}}
    assert second.known.ablation == ABLATION
    second.write(second.known.with_draw("drift", 2, {"KL": 3}))
    data = json.loads(path.read_text())
    assert [(one["part"], one["stats"]["mean"]) for one in data["figures"]] == [("drift", 2.0)]
    assert data["seconds"] >= second.seconds_before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_names_the_machines_and_commits_of_all_its_runs(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    hosts = [{"commit": commit} for commit in ("a", "b", "c")]
    for draw, host in enumerate(hosts, 1):
        file = replace(ClaimsFile.open(path, CONDITIONS), host=host)
        file.write(file.known.with_draw("drift", draw, {"KL": 1}))
    data = json.loads(path.read_text())
    assert (data["earlier_hosts"], data["host"]) == (hosts[:2], hosts[2])
    replace(ClaimsFile.open(path, CONDITIONS), host=hosts[0])
    assert json.loads(path.read_text()) == data  # a run that measures nothing leaves it as it is


def test_claims_are_in_the_file_once_all_draws_are(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    file = ClaimsFile.open(path, CONDITIONS)
    found = file.known
    for draw, orders in enumerate((7.0, 8.0), 1):
        found = found.with_draw(
            "ranges", draw, {"weights, orders": orders, "value norms, orders": 2}
        )
        file.write(found)
        claims = json.loads(path.read_text())["claims"]
        assert len(claims) == (draw == 2)
    assert (claims[0]["part"], claims[0]["paper"]) == ("ranges", "LeanKV, figure 1")
    assert (claims[0]["mean"], claims[0]["draws"]) == (5.5, 2)
    assert claims[0]["holds"] == "open"  # 5.5 +- 6.4 with two draws


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "claims.json"
    ClaimsFile.open(path, CONDITIONS).write(one_draw())
    with pytest.raises(ConfigError, match=r"seeds=2, not 5: give the same .* another --json"):
        ClaimsFile.open(path, CONDITIONS | {"seeds": 5})
    assert json.loads(path.read_text())["draws"]


@pytest.mark.parametrize("text", ['{"host": {}}', "[]", "{"])
def test_a_file_of_another_command_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "quality.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a file of this command"):
        ClaimsFile.open(path, CONDITIONS)
    assert path.read_text() == text


def test_the_command_says_which_settings_differ(run: Run, tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "claims.json"
    asked = ("eval", "claims", "--parts", "ranges", "--model", str(tiny_model), "--json", str(path))
    small = ("--context", "160", "--documents", "2", "--steps", "12", "--seeds", "2")
    assert run(*asked, *small)[0] == 0
    before = json.loads(path.read_text())
    assert {one["part"] for one in before["figures"]} == {"ranges"}
    code, _, notes = run(*asked, *small[:-1], "3")
    assert code == 2
    assert "seeds=2, not 3" in notes.replace("\n", " ")
    assert run(*asked, *small)[0] == 0
    assert json.loads(path.read_text())["draws"] == before["draws"]
