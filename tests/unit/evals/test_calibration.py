"""Calibration on a tiny model: a profile that the engines take, or a reason why not."""

import json
from base64 import b64decode
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.learned import networks_beside
from tests.tiny import save_tiny_qwen3
from triptych.cli.main import app
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.messages import Sampling
from triptych.core.methods.table import offered_methods, policy_of
from triptych.core.profile import Profile
from triptych.evals.studies.alpha_scales import Unit
from triptych.evals.studies.calibration import (
    Calibration,
    CalibrationResult,
    Target,
    calibrate,
    with_other_methods,
)
from triptych.evals.studies.pareto import with_pareto
from triptych.evals.studies.study import Results, Study, measure, prepare, report
from triptych.workers.compress.learned.artefact import read_record
from triptych.workers.compress.learned.known_networks import find_networks
from triptych.workers.local import LocalServer
from triptych.workers.models import compression_profile
from triptych.workers.models.facts import describe


def run(study: Study) -> Results:
    prepared = prepare(study)
    return report(prepared, measure(prepared, lambda _n, _c: None, lambda _n, _c: None))


@pytest.fixture(scope="module")
def plan(tiny_model: Path) -> Calibration:
    return Calibration(
        model=str(tiny_model),
        target=Target(kl=50.0, top1_agreement=0.0, perplexity_ratio=1e3),
        low_formats=("k4v2",),
        alphas=(0.5, 1e6),
        windows=(20,),
        contexts=(150,),
        documents=2,
        steps=12,
        other_methods=("uniform:fp16", "uniform:k4v2"),
        pool_bytes=16 << 20,
    )


@pytest.fixture(scope="module")
def found(plan: Calibration) -> CalibrationResult:
    return calibrate(plan, run)


def test_the_smallest_candidate_that_is_near_enough_is_chosen(
    plan: Calibration, found: CalibrationResult
) -> None:
    by_name = {row.method: row for row in found.rows}
    assert set(by_name) == {"full", *plan.candidates}
    sizes = {name: by_name[name].bytes_all_in_ratio for name in plan.candidates}
    assert found.chosen == min(sizes, key=lambda name: sizes[name])
    assert found.profile.settings == plan.candidates[found.chosen]
    assert [one.context for one in found.profile.measured] == [150]
    assert found.profile.measured[0].kl == pytest.approx(by_name[found.chosen].summary.kl, abs=1e-6)


def test_candidates_may_drop_tokens_but_never_more_than_are_low(plan: Calibration) -> None:
    some = replace(plan, alphas=(1.0, 3.0), low_alphas=(0.0, 2.0), low_formats=("k4v2", "k4v1"))
    settings = some.candidates.values()
    assert [(one.low_format, one.alpha_high, one.alpha_low) for one in settings] == [
        (low, high, dropped)
        for low in ("k4v2", "k4v1")
        for high, dropped in ((1.0, 0.0), (3.0, 0.0), (3.0, 2.0))
    ]


@pytest.mark.parametrize("unit", ["head", "layer"])
def test_scales_are_kept_if_they_take_fewer_bytes(plan: Calibration, unit: Unit) -> None:
    scaled = calibrate(replace(plan, alphas=(1.0,), scales=unit, other_methods=()), run)
    assert scaled.scaled is not None
    (plain,) = (row for row in scaled.rows if row.method == scaled.chosen)
    is_smaller = scaled.scaled.bytes_all_in_ratio < plain.bytes_all_in_ratio
    assert bool(scaled.profile.alpha_scales) == is_smaller
    best = scaled.scaled if is_smaller else plain
    assert scaled.profile.measured[0].kl == pytest.approx(best.summary.kl, abs=1e-6)


def test_other_methods_are_measured_as_the_server_runs_them(found: CalibrationResult) -> None:
    measured = found.profile.measured_methods
    assert list(measured) == ["uniform:fp16", "uniform:k4v2"]
    (exact,), (coarse,) = measured.values()
    assert exact.context == coarse.context == 150
    assert 0 <= exact.kl < coarse.kl
    assert coarse.bytes_ratio < 0.7 < exact.bytes_ratio
    assert found.profile.fidelity_of(AppConfig()) == {"diffkv": found.profile.measured, **measured}


def test_the_frontier_has_the_methods_that_keep_all_tokens_and_their_times(
    plan: Calibration, found: CalibrationResult
) -> None:
    """16 bits take too many bytes, and a rule that drops tokens forgets what is asked later."""
    near = replace(found.profile.measured[0], bytes_ratio=0.1, kl=0.0)
    measured = {**found.profile.measured_methods, "snapkv": (near,)}
    profile = with_pareto(replace(found.profile, measured_methods=measured), plan)
    assert set(profile.pareto) == {"diffkv", "uniform:k4v2"}
    assert min(profile.pareto.values()) > 0
    alone = replace(found.profile, measured_methods={"snapkv": (near,)})
    with pytest.raises(ConfigError, match="fewer than two are on a frontier"):
        with_pareto(alone, plan)


def test_an_estimate_of_a_network_holds_for_that_network_alone(
    tiny_model: Path, plan: Calibration, found: CalibrationResult
) -> None:
    """Methods are added to a profile; those that were measured before stay."""
    of_images, merger, paper, scorer = networks_beside(tiny_model)
    asked = replace(plan, other_methods=("learned:score", "snapkv"), learned=(scorer,))
    profile = with_other_methods(found.profile, asked, run)
    assert list(profile.measured_methods) == [
        "uniform:fp16",
        "uniform:k4v2",
        "learned:score",
        "snapkv",
    ]
    assert all(one.kl > 0 for (one,) in list(profile.measured_methods.values())[2:])
    assert profile.measured_networks == {"learned:score": read_record(Path(scorer)).tensors}
    facts = describe(tiny_model)
    for file, expected in ((scorer, True), (merger, False), (paper, False), (of_images, False)):
        config = AppConfig.from_mapping({"compressor": {"learned": [file]}})
        fidelity = profile.fidelity_of(config, find_networks(config, facts))
        assert ("learned:score" in fidelity) == expected
        assert "snapkv" in fidelity


def test_all_methods_are_those_that_a_server_can_offer(
    tiny_model: Path, found: CalibrationResult
) -> None:
    facts = describe(tiny_model)
    without = offered_methods()
    assert "uniform:k4v4" in without
    assert {"leankv", "tova"} < set(without)
    assert not any(name.startswith("learned:") for name in without)
    config = AppConfig.from_mapping({"compressor": {"learned": networks_beside(tiny_model)}})
    networks = find_networks(config, facts)
    every = offered_methods(networks)
    assert set(every) - set(without) == {"learned:merge", "learned:paper", "learned:score"}
    for name in every:
        one = replace(config.compressor, policy=name)
        assert policy_of(one, found.profile, networks).name == name


def test_an_unreachable_target_names_the_nearest_miss(plan: Calibration) -> None:
    with pytest.raises(ModelError, match=r"no candidate reaches KL 1e-09.*comes nearest with"):
        calibrate(replace(plan, target=Target(kl=1e-9)), run)
    with pytest.raises(ConfigError, match="min_top1=2"):
        Target(top1_agreement=2)


def test_the_engines_take_the_profile(
    tiny_model: Path, found: CalibrationResult, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    found.profile.write(path)
    pool = {"kv_cache_memory_bytes": 16 << 20}
    config = AppConfig.from_mapping({"pool": pool, "compressor": {"profile": str(path)}})
    with LocalServer(config, tiny_model) as server:
        policy = server.plan.policy
        assert policy == policy_of(config.compressor, Profile.read(path))
        assert policy.name == "diffkv"
        assert len(policy.kv_rotation.key_centre) == 2 * 2 * 2 * 32
    replace(found.profile, weights="of another").write(path)
    with pytest.raises(ConfigError, match="of another"):
        LocalServer(config, tiny_model)


# ------------------------------------------------------------------ another architecture

LIMITS = ("--max-kl", "50", "--min-top1", "0", "--max-perplexity-ratio", "1e3")
SIZES = ("--contexts", "150", "--documents", "1", "--steps", "4")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_qwen3(tmp_path_factory.mktemp("qwen3"))


def test_a_model_without_a_profile_gets_one_that_auto_finds(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibrate, put the file beside the included profiles, measure a further method, and serve."""

    def run_command(output: Path, *options: str) -> Profile:
        command = ["calibrate", str(qwen3), "--output", str(output), *SIZES, *options]
        CliRunner().invoke(app, command, catch_exceptions=False)
        return Profile.read(output)

    with pytest.raises(ConfigError, match="profile='auto': there is none"):
        run_command(tmp_path / "none.json", "--profile", "auto", "--methods", "leankv")
    facts = describe(qwen3)
    included = tmp_path / f"{facts.weights}.json"
    monkeypatch.setattr(compression_profile, "PACKAGED", tmp_path)
    settings = ("--alphas", "3", "--low-formats", "k4v2", "--windows", "20", "--methods", "")
    first = run_command(included, *LIMITS, *settings)
    assert (first.settings.alpha_high, first.settings.recent_window_tokens) == (3.0, 20)
    assert not first.measured_methods
    rows = tmp_path / "rows.json"
    measure = ("--profile", "auto", "--methods", "leankv", "--json", str(rows))
    more = run_command(tmp_path / "more.json", *measure)
    written = json.loads(rows.read_text())["measured_methods"]
    assert written == {"leankv": [asdict(one) for one in more.measured_methods["leankv"]]}
    assert (more.settings, more.key_centre) == (first.settings, first.key_centre)
    assert [one.context for one in more.measured_methods["leankv"]] == [150]
    more.write(included)
    config = AppConfig.from_mapping(
        {"model": {"name": str(qwen3)}, "pool": {"kv_cache_memory_bytes": 16 << 20}}
    )
    with LocalServer(config, qwen3) as server:
        policy = server.plan.policy
        assert (policy.name, policy.alpha_high) == ("diffkv", 3.0)
        assert policy.kv_rotation.key_centre == b64decode(more.key_centre)
        sampling = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
        (answer,) = server.complete([server.request(list(range(2, 202)), sampling)])
        assert answer.error is None
        assert answer.report is not None
        assert answer.report.policy == "diffkv"
