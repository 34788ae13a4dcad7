"""The profiles that come along are readable, and named after the model that they are for."""

from pathlib import Path

import pytest

from triptych.core.config import CompressorConfig
from triptych.core.methods.table import policy_of
from triptych.core.profile import Profile
from triptych.workers.models.compression_profile import PACKAGED

PATHS = sorted(PACKAGED.glob("*"))


def test_there_is_one_for_the_default_model() -> None:
    assert {Profile.read(path).model for path in PATHS} >= {"smollm2-135m-instruct"}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_packaged_profile_is_whole(path: Path) -> None:
    profile = Profile.read(path)
    profile.check_model(path.stem, profile.geometry, path)
    policy = policy_of(CompressorConfig(), profile)
    assert policy.kv_rotation.rotated
    assert (
        len(policy.kv_rotation.key_centre)
        == 2 * profile.geometry.head_rows * profile.geometry.head_dim
    )
    assert profile.measured
    for found in profile.measured:
        assert found.bytes_ratio <= 0.32
        assert found.kl <= 0.01
        assert found.top1_agreement >= 0.96
        assert found.perplexity_ratio <= 1.01
