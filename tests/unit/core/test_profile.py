"""Profiles on disk, and what they answer where the settings say ``auto``."""

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.methods.table import METHODS, policy_of
from triptych.core.plugins import POLICY_NAMES
from triptych.core.policy import KVRotation, Policy
from triptych.core.profile import Fidelity, Profile, Settings

GEOMETRY = Geometry(layers=2, kv_heads=3, head_dim=32)
CENTRE = bytes(range(192)) * 2
PROFILE = Profile(
    model="some-model",
    weights="abc123",
    geometry=GEOMETRY,
    settings=Settings(policy="diffkv", alpha_high=5.0, recent_window_tokens=16),
    key_centre=Profile.pack(CENTRE),
    measured=(
        Fidelity(
            context=1024, bytes_ratio=0.3, kl=0.004, top1_agreement=0.97, perplexity_ratio=1.002
        ),
    ),
    texts="0123",
)


def policy(profile: Profile | None, **compressor: object) -> Policy:
    config = AppConfig.from_mapping({"compressor": compressor})
    return policy_of(config.compressor, profile)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    found = Profile.read(path)
    assert found == PROFILE
    assert found.centre == CENTRE
    found.check_model("abc123", GEOMETRY, path)


def test_a_profile_of_another_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"made for some-model .*abc123.*xyz.*calibrate"):
        PROFILE.check_model("xyz", GEOMETRY, tmp_path / "profile.json")


def test_a_profile_of_another_shape_says_so(tmp_path: Path) -> None:
    other = Geometry(layers=2, kv_heads=6, head_dim=16)
    with pytest.raises(ConfigError, match=r"kv_heads=3.*kv_heads=6.*calibrate"):
        PROFILE.check_model("abc123", other, tmp_path / "profile.json")


def test_a_window_of_a_profile_is_checked_like_one_of_the_settings() -> None:
    wrong = replace(PROFILE, settings=Settings(recent_window_tokens=-5))
    with pytest.raises(ConfigError, match="recent_window_tokens=-5"):
        policy(wrong)


def test_sixteen_bits_above_rotated_ones_are_rotated_and_share_no_prefix() -> None:
    found = policy(PROFILE, high_format="fp16", low_format="k8v4")
    assert found.kv_rotation == policy(PROFILE).kv_rotation
    assert found.compresses
    assert not found.is_quantized
    assert found.decides_by_whole_prompt
    assert not policy(PROFILE, policy="uniform:fp16").compresses


SCALES = (0.5, 1.0, 2.0, 1.0, 0.0, 4.0)


def test_scales_of_a_profile_are_those_of_the_policy_unless_they_are_left_out(
    tmp_path: Path,
) -> None:
    PROFILE.with_alpha_scales(SCALES).write(tmp_path / "profile.json")
    found = Profile.read(tmp_path / "profile.json")
    assert policy(found).alpha_scales == SCALES
    assert policy(found, head_alphas="even").alpha_scales == ()
    assert policy(found, policy="leankv").alpha_scales == ()
    assert found.with_alpha_scales(()) == PROFILE


@pytest.mark.parametrize("scales", [SCALES[:-1], (*SCALES[:-1], -1.0), (*SCALES[:-1], inf)])
def test_scales_of_another_model_are_refused(tmp_path: Path, scales: tuple[float, ...]) -> None:
    PROFILE.with_alpha_scales(scales).write(tmp_path / "profile.json")
    with pytest.raises(ConfigError, match="head_alphas"):
        Profile.read(tmp_path / "profile.json")


def test_without_scores_tokens_of_an_answer_stay_high() -> None:
    found = policy(PROFILE, alpha_high=float("inf"), score_every_tokens=0)
    assert found.answer_thresholds == (0.0, 0.0, 0.0, 0.0)
    assert policy(PROFILE).answer_thresholds == (5.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"surprise": 1}, "unknown key"),
        ({"key_centre": "AAAA"}, "3 bytes, expected 384"),
        ({"retrieval_heads": ((0, 1),)}, "have 1 and 0 layers, expected"),
        ({"key_centre": "not base64!"}, "key_centre"),
        ({"settings": {"alpha_high": "much"}}, "alpha_high"),
        ({"geometry": {"layers": 2}}, "kv_heads"),
        ({"settings": {"policy": "magic"}}, "compressor.policy='magic'"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message) as error:
        Profile.read(path)
    assert "profile.json" in str(error.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_what_is_no_profile_at_all_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"profile\.json"):
        Profile.read(path)
    with pytest.raises(ConfigError, match="missing"):
        Profile.read(tmp_path / "missing.json")


def test_auto_is_the_profile_if_there_is_one() -> None:
    found = policy(PROFILE)
    assert (found.name, found.high_format, found.low_format) == ("diffkv", "k8v4", "k4v2")
    assert (found.alpha_high, found.window_tokens) == (5.0, 16)
    assert found.kv_rotation == KVRotation(rotated=True, key_centre=CENTRE)
    plain = policy(None)
    assert (plain.name, plain.low_format, plain.window_tokens) == ("uniform:k8v4", None, 64)
    assert plain.kv_rotation == KVRotation(rotated=True)


def test_what_is_set_is_not_overruled_by_a_profile() -> None:
    found = policy(PROFILE, alpha_high=2, low_format="k4v4", recent_window_tokens=0)
    assert (found.alpha_high, found.low_format, found.window_tokens) == (2.0, "k4v4", 0)
    assert policy(PROFILE, policy="uniform:k8v8").low_format is None
    assert policy(PROFILE, basis="plain").kv_rotation == KVRotation()


def test_keys_are_centred_only_where_it_helps() -> None:
    assert policy(PROFILE, sink_tokens=0).kv_rotation == KVRotation(rotated=True)
    assert policy(PROFILE, policy="uniform:fp16").kv_rotation == KVRotation()


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        ({"alpha_high": 1, "alpha_low": 2}, "alpha_low=2.0: expected 0 to alpha_high"),
        ({"alpha_low": 6}, r"alpha_low=6.0: expected 0 to alpha_high \(5.0\)"),
        ({"alpha_high": -1}, "alpha_high=-1.0"),
        ({"low_format": "fp16"}, "low_format='fp16': expected a format with fewer bits"),
        ({"high_format": "k4v2"}, "low_format='k4v2': expected a format with fewer bits"),
        ({"floor": "high", "alpha_low": 0.1}, "alpha_low=0.1: expected 0 with compressor.floor"),
        ({"floor": "high", "mass_low": 0.01}, "mass_low=0.01: expected 0 with compressor.floor"),
        ({"floor": "none"}, "compressor.floor"),
        ({"low_format": "k8v8"}, "low_format='k8v8': expected a format with fewer bits"),
    ],
)
def test_thresholds_and_formats_out_of_order_are_refused(
    compressor: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        policy(PROFILE, **compressor)


def test_what_was_measured_holds_for_the_settings_that_it_was_measured_with() -> None:
    for same in (
        {},
        {"compressor": {"profile": "/some/file", "actor": {"num_replicas": 2}}},
        {"compressor": {"methods": ["uniform:fp16"]}},
    ):
        assert PROFILE.fidelity_of(AppConfig.from_mapping(same)) == {"diffkv": PROFILE.measured}
    spare = {"decode": {"plugins": [{"name": "entropy_stop", "enabled": False}]}}
    assert PROFILE.fidelity_of(AppConfig.from_mapping(spare)) == {"diffkv": PROFILE.measured}
    for other in (
        {"decode": {"plugins": ["entropy_stop"]}},
        {"decode": {"plugins": [{"name": "entropy_stop"}]}},
        {"compressor": {"policy": "uniform:k4v2"}},
        {"compressor": {"alpha_high": 1.0}},
        {"compressor": {"sink_tokens": 0}},
        {"decode": {"selection": {"method": "moments"}}},
    ):
        assert PROFILE.fidelity_of(AppConfig.from_mapping(other)) == {}


def test_settings_know_the_names_of_all_policies() -> None:
    assert list(POLICY_NAMES.builtin) == list(METHODS.builtin)


@pytest.mark.parametrize(
    "order", [bytes(96), bytes(range(16)), bytes([*range(15), 16]) * 6, b"\x00"]
)
def test_an_order_that_misses_a_pair_says_what_to_run(tmp_path: Path, order: bytes) -> None:
    """Six head rows of 32 channels have 16 pairs each."""
    path, good = tmp_path / "profile.json", bytes([3, 1, 0, 2, *range(15, 3, -1)]) * 6
    replace(PROFILE, pair_order=Profile.pack(good)).write(path)
    assert Profile.read(path).packed_pairs == good
    replace(PROFILE, pair_order=Profile.pack(order)).write(path)
    with pytest.raises(ConfigError, match=r"expected 6 orders of 16 pairs.*--pair-order' again"):
        Profile.read(path)
