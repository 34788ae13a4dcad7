"""Which methods are on the frontier, and what a floor of KL refuses."""

from dataclasses import replace
from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError, FloorNotMet
from triptych.core.layout import Geometry
from triptych.core.methods.frontier import check_max_kl, pareto
from triptych.core.pages import PagePlan
from triptych.core.profile import Fidelity, Profile, Settings

SMALL = Geometry(layers=2, kv_heads=1, head_dim=64)


def at(context: int, bytes_ratio: float, kl: float) -> Fidelity:
    return Fidelity(
        context=context, bytes_ratio=bytes_ratio, kl=kl, top1_agreement=1.0, perplexity_ratio=1.0
    )


MEASURED = {
    "uniform:k4v2": (at(1000, 0.25, 0.02),),
    "diffkv": (at(1000, 0.31, 0.005), at(4000, 0.29, 0.005)),
    "uniform:k4v4": (at(1000, 0.32, 0.004), at(4000, 0.32, 0.015)),
    "uniform:k8v2": (at(1000, 0.39, 0.017),),
    "uniform:k8v4": (at(1000, 0.44, 0.0006),),
    "uniform:fp16": (at(1000, 1.08, 0.0),),
}
PROFILE = Profile(
    model="small",
    weights="w",
    geometry=SMALL,
    settings=Settings(policy="diffkv", alpha_high=4.0),
    measured=MEASURED["diffkv"],
    measured_methods={name: each for name, each in MEASURED.items() if name != "diffkv"},
    pareto={"uniform:k4v2": 18.0, "diffkv": 24.0, "uniform:k8v4": 26.0},
)


def plan(profile: Profile | None = PROFILE, **compressor: object) -> PagePlan:
    config = AppConfig.from_mapping({"compressor": compressor})
    return PagePlan.of(config, SMALL, profile)


def test_the_frontier_has_no_method_that_another_beats_in_bytes_and_kl() -> None:
    assert set(pareto(MEASURED)) == {"uniform:k4v2", "diffkv", "uniform:k4v4", "uniform:k8v4"}


def test_an_adaptive_server_offers_the_frontier_or_what_is_listed_of_it() -> None:
    assert plan(adaptive=True).adaptive == tuple(PROFILE.pareto)
    assert set(plan(adaptive=True).by_method) == set(PROFILE.pareto)
    listed = plan(adaptive=True, methods=["uniform:k8v4", "uniform:fp16"])
    assert listed.adaptive == ("diffkv", "uniform:k8v4")
    assert set(listed.by_method) == {"diffkv", "uniform:k8v4", "uniform:fp16"}
    assert plan().adaptive == ()


@pytest.mark.parametrize(
    ("profile", "compressor", "message"),
    [
        (None, {"adaptive": True}, "0 methods are offered .* run 'triptych calibrate --pareto'"),
        (replace(PROFILE, pareto={}), {"adaptive": True}, "0 methods are offered"),
        (PROFILE, {"adaptive": True, "alpha_high": 1.0}, "0 methods are offered"),
        (PROFILE, {"adaptive": True, "methods": ["uniform:fp16"]}, "1 methods are offered"),
        (PROFILE, {"max_kl": 0.001}, "max_kl=0.001: .* the nearest is 'diffkv' with 0.005"),
        (None, {"max_kl": 0.001}, "of 'uniform:k8v4' no method .* none of them was measured"),
        (PROFILE, {"max_kl": -1.0}, r"max_kl=-1.0: expected >= 0"),
    ],
)
def test_a_server_without_a_choice_or_below_its_floor_does_not_start(
    profile: Profile | None, compressor: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(profile, **compressor)


def test_the_floor_is_that_of_the_nearest_length() -> None:
    check_max_kl(MEASURED, ["uniform:k4v4"], 0.0, 4000)
    check_max_kl(MEASURED, ["uniform:k4v4"], 0.004, 1000)
    with pytest.raises(FloorNotMet, match=r"'uniform:k4v4' with 0\.015"):
        check_max_kl(MEASURED, ["uniform:k4v4"], 0.004, 4000)
    check_max_kl(MEASURED, ["uniform:k4v4", "diffkv"], 0.005, 4000)


def test_a_profile_with_a_frontier_that_nobody_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for names, message in (
        ({"uniform:k8v8": 1.0}, "pareto: 'uniform:k8v8' has no measurements"),
        ({"my_module:policy": 1.0}, "expected one of Triptych's own"),
    ):
        replace(PROFILE, pareto=names).write(path)
        with pytest.raises(ConfigError, match=message):
            Profile.read(path)
