"""Which kernels a server compiles beside those that every method calls."""

from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.methods.kernel_needs import kernel_needs
from triptych.core.profile import Profile, Settings

BY_METHOD: dict[str, set[str]] = {
    **{name: set() for name in ("auto", "diffkv", "uniform:k8v4", "leankv", "snapkv", "h2o")},
    "uniform:fp16": {"steps_by_op"},
    "spherical": {"steps_by_op"},
    "epicache": {"steps_by_op"},
    "cake": {"steps_by_op"},
    "kvmerger": {"merged_tokens"},
    "kvarn": {"whole_pages"},
    "kivi": {"steps_by_op", "whole_pages"},
}


def needs(compressor: dict[str, object], **decode: object) -> set[str]:
    config = AppConfig.from_mapping({"compressor": compressor, "decode": decode})
    return set(kernel_needs(config))


@pytest.mark.parametrize("name", BY_METHOD)
def test_a_method_needs_what_its_policy_says(name: str) -> None:
    assert needs({"policy": name}) == BY_METHOD[name]


def test_each_method_that_a_request_may_name_counts() -> None:
    assert needs({"methods": ["epicache", "kvmerger"]}) == {"steps_by_op", "merged_tokens"}


def test_selection_of_pages_is_a_need() -> None:
    assert needs({}, selection={"method": "box"}) == {"page_selection"}


def test_a_method_whose_file_is_not_known_yet_may_need_more() -> None:
    assert needs({"policy": "oscar"}) == {"steps_by_op", "merged_tokens"}


def test_a_profile_that_the_settings_name_is_read(tmp_path: Path) -> None:
    profile = Profile(
        model="", weights="", geometry=Geometry(1, 1, 32), settings=Settings(policy="kvarn")
    )
    profile.write(tmp_path / "profile.json")
    assert needs({"profile": str(tmp_path / "profile.json")}) == {"whole_pages"}
