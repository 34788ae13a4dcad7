"""Calibration on a tiny model: a profile that the engines take, or a reason why not."""

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, ModelError
from triptych.core.methods.table import policy_of
from triptych.core.profile import Profile
from triptych.evals.studies.calibration import Calibration, CalibrationResult, Target, calibrate
from triptych.evals.studies.study import Results, Study, measure, prepare, report
from triptych.workers.local import LocalServer


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


def test_other_methods_are_measured_as_the_server_runs_them(found: CalibrationResult) -> None:
    measured = found.profile.measured_methods
    assert list(measured) == ["uniform:fp16", "uniform:k4v2"]
    (exact,), (coarse,) = measured.values()
    assert exact.context == coarse.context == 150
    assert 0 <= exact.kl < coarse.kl
    assert coarse.bytes_ratio < 0.7 < exact.bytes_ratio
    assert found.profile.fidelity_of(AppConfig()) == {"diffkv": found.profile.measured, **measured}


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
