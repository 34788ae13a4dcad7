"""Files of the release before: every old name works, says so once, and means what it meant."""

import logging
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from triptych.core.config import AppConfig
from triptych.core.config.renamed import ALIASES, RENAMED, with_new_names
from triptych.core.errors import ConfigError

BEFORE = {
    "model": {"served_name": "tiny", "longest_tokens": 4096, "window_overlap_tokens": 100},
    "prefill": {"chunk_tokens": 256, "layers_at_once": 3},
    "compressor": {"basis": "rotated"},
    "decode": {"max_batch_requests": 8, "selection": {"method": "moments", "spread": "even"}},
    "pool": {"capacity_bytes": 1 << 28, "prefix_bytes": 0},
    "router": {
        "patience_s": 2.0,
        "cells": 1,
        "cell_overload": 2.0,
        "trace_url": "http://127.0.0.1:4318/v1/traces",
        "roles": "switch",
    },
    "topology": "colocated",
}
NOW = {
    "model": {"served_model_name": "tiny", "max_model_len": 4096},
    "prefill": {"max_num_batched_tokens": 256},
    "compressor": {"kv_rotation": "hadamard"},
    "decode": {"max_num_seqs": 8, "selection": {"method": "moments", "head_budgets": "even"}},
    "pool": {"kv_cache_memory_bytes": 1 << 28, "prefix_bytes": 0},
    "router": {
        "max_overtake_s": 2.0,
        "shards": 1,
        "shard_overload": 2.0,
        "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
        "roles": "dynamic",
    },
    "experimental": {"context_window_overlap_tokens": 100, "layers_at_once": 3},
    "topology": "colocated",
}


def hint_at(path: str) -> Any:
    """The type of a setting. Raises: KeyError if there is none."""
    cls: Any = AppConfig
    for name in path.split("."):
        assert is_dataclass(cls)
        assert name in {field.name for field in fields(cls)}
        cls = get_type_hints(cls)[name]
    return cls


def nested(path: str, value: object) -> dict[str, object]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def test_a_file_of_the_release_before_means_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert AppConfig.from_mapping(BEFORE) == AppConfig.from_mapping(NOW)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) == len(RENAMED)  # max_context_tokens is not in it, roles is
    assert "router.trace_url is now router.otlp_traces_endpoint; the old name" in " ".join(told)
    assert "router.roles: switch is now router.roles: dynamic" in " ".join(told)


def test_new_names_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    AppConfig.from_mapping(NOW)
    assert not caplog.records


@pytest.mark.parametrize(("old", "new"), [*RENAMED.items(), *ALIASES.items()])
def test_every_old_name_is_gone_and_every_new_one_is_a_setting(old: str, new: Any) -> None:
    hint_at(new.path)
    with pytest.raises(AssertionError):
        hint_at(old)


@pytest.mark.parametrize("old", RENAMED)
def test_a_setting_under_both_names_is_an_error(old: str) -> None:
    both = nested(old, 1)
    section: Any = both
    *parents, last = RENAMED[old].path.split(".")
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = 1
    with pytest.raises(ConfigError, match="are both given, which are one setting"):
        with_new_names(both)


def test_a_context_with_a_longest_sequence_is_the_size_of_a_window() -> None:
    old = AppConfig.from_mapping({"model": {"max_context_tokens": 64, "longest_tokens": 1000}})
    assert (old.model.max_model_len, old.experimental.context_window_tokens) == (1000, 64)
    assert old.context_tokens(512) == 64
    alone = AppConfig.from_mapping({"model": {"max_context_tokens": 64, "longest_tokens": 0}})
    assert (alone.model.max_model_len, alone.context_tokens(512)) == (64, 64)


@pytest.mark.parametrize(
    ("given", "prefix_bytes"),
    [
        ({"enable_prefix_caching": False}, 0),
        ({"enable_prefix_caching": True}, "auto"),
        ({"enable_prefix_caching": True, "prefix_bytes": 1 << 26}, 1 << 26),
    ],
)
def test_names_that_users_of_vllm_know_are_accepted(
    given: dict[str, object], prefix_bytes: object, caplog: pytest.LogCaptureFixture
) -> None:
    config = AppConfig.from_mapping(
        {"pool": given, "compressor": {"kv_cache_dtype": "uniform:k8v8"}}
    )
    assert config.pool.prefix_bytes == prefix_bytes
    assert config.compressor.policy == "uniform:k8v8"
    assert not caplog.records


@pytest.mark.parametrize("value", ["no", 0, None, []])
def test_an_alias_takes_no_other_values(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"pool\.enable_prefix_caching=.*: expected true or false"
    ):
        with_new_names({"pool": {"enable_prefix_caching": value}})


@pytest.mark.parametrize("data", [{"pool": 3}, {"pool": None}, {"decode": {"selection": []}}, {}])
def test_what_is_no_section_is_left_for_the_check_of_types(data: dict[str, object]) -> None:
    assert with_new_names(data) == (data, [])


def test_the_given_settings_are_not_changed() -> None:
    given = {"pool": {"capacity_bytes": 1 << 28}}
    AppConfig.from_mapping(given)
    assert given == {"pool": {"capacity_bytes": 1 << 28}}
