"""Names on the command line, and the bytes that a handle stands for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.handles import LeaseId, LeaseRef
from triptych.core.layout import FORMATS, Geometry
from triptych.core.pages import PagePlan
from triptych.evals.methods.full_cache import simulated_format
from triptych.evals.methods.method_names import parse_method, parse_methods
from triptych.evals.methods.served_engines import EngineMethod
from triptych.evals.metrics.footprint import of_handle
from triptych.workers.kv.handle_codec import make_handle

HERE = Path()


def test_a_policy_takes_settings_behind_it_and_the_rest_stays_the_profiles() -> None:
    base = AppConfig.from_mapping({"prefill": {"max_num_batched_tokens": 96}})
    method = parse_method("uniform:k4v4+recent_window_tokens=0", HERE, base, "float32")
    assert isinstance(method, EngineMethod)
    assert method.config.compressor.policy == "uniform:k4v4"
    assert method.config.compressor.recent_window_tokens == 0
    assert method.config.prefill.max_num_batched_tokens == 96
    assert method.config.model.dtype == "float32"


def test_default_is_what_the_server_would_use() -> None:
    base = AppConfig.from_mapping({"compressor": {"policy": "uniform:k8v8"}})
    method = parse_method("default", HERE, base, "bfloat16")
    assert isinstance(method, EngineMethod)
    assert method.config.compressor == base.compressor


def test_settings_of_the_selection_have_a_name_before_them() -> None:
    base = AppConfig.from_mapping({"compressor": {"policy": "uniform:k8v8", "sink_tokens": 3}})
    name = "default+sink_tokens=5+selection.method=box+selection.keep_fraction=0.5"
    method = parse_method(name, HERE, base, "float32")
    assert isinstance(method, EngineMethod)
    assert method.config.compressor == replace(base.compressor, sink_tokens=5)
    assert method.config.decode.selection.method == "box"
    assert method.config.decode.selection.keep_fraction == 0.5


@pytest.mark.parametrize(
    "name",
    [
        "uniform:k9v9",
        "default+selection.method=best",
        "default+selection.keep=0.5",
        "uniform:k8v4+recent_window_tokens",
        "uniform:k8v4+window=3",
        "simulated:k9v4",
        "simulated:k4v4:3:1",
        "simulated:k4v4:2",
        "simulated:",
        "nonsense",
    ],
)
def test_a_wrong_name_is_an_error_that_repeats_it(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_method(name, HERE, AppConfig(), "float32")


def test_methods_come_once_each_and_full_alone_is_no_study() -> None:
    names = ["full", "simulated:k4v8", "simulated:k4v8", "default"]
    found = parse_methods(names, HERE, AppConfig(), "float32")
    assert [method.name for method in found] == ["simulated:k4v8", "default"]
    with pytest.raises(ConfigError):
        parse_methods(["full"], HERE, AppConfig(), "float32")


def test_simulated_formats_need_no_pages() -> None:
    form = simulated_format("k2v8")
    assert form.name not in FORMATS
    assert form.read_bytes(64) == FORMATS["k8v2"].read_bytes(64)
    grouped = simulated_format("k4v2:2:4")
    assert (grouped.key_groups, grouped.value_groups) == (2, 4)
    assert grouped.read_bytes(64) == FORMATS["k4v2"].read_bytes(64) + 4 * (1 + 3)


def test_a_handle_is_counted_page_by_page() -> None:
    """Two head rows: 10 tokens each in small pages of 3, 40 and 20 of K8V4 (32 a page)."""
    config = AppConfig.from_mapping({"compressor": {"policy": "uniform:k8v4"}})
    plan = PagePlan.of(config, Geometry(layers=1, kv_heads=2, head_dim=64))
    runs = [
        (plan.recent, np.array([10, 10], np.int32), np.arange(24, 32, dtype=np.int32)),
        (plan.high, np.array([40, 20], np.int32), np.arange(3, dtype=np.int32)),
    ]
    handle = make_handle(LeaseRef("arena", LeaseId(1), 1), runs, tokens=50)
    found = of_handle(handle, plan)
    assert found.full_bytes == 50 * 2 * 256
    assert found.data_bytes == 60 * 104 + 20 * 136
    assert found.all_in_bytes == (1 + 3) * 3584 + 4 * (8 + 3 + 4)
