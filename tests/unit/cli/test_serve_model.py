"""``triptych serve MODEL`` writes the config file that its options describe."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli.conftest import Run
from triptych.cli.serving import serve as command
from triptych.cli.serving.serve_file import read_http, read_serve_file
from triptych.core.config import AppConfig
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.workers.decode.plugins.pipeline import Pipeline

STAGES = ("prefill", "compressor", "decode")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would serve, instead of a server."""
    seen = dict[str, Any]()

    def note(path: Path, _temporary: str) -> None:
        (app,) = read_serve_file(path)
        keys = Path(app.config.ingress.api_keys) if app.config.ingress.api_keys else None
        entries = json.loads(keys.read_text()) if keys else []
        seen.update(config=app.config, http=read_http(path), keys=entries, path=path)

    monkeypatch.setattr(command, "serve_file", note)
    return seen


def test_the_options_that_users_of_vllm_give(run: Run, served: dict[str, Any]) -> None:
    code, _, err = run(
        *("serve", "Qwen/Qwen3-0.6B", "--port", "9000", "--host", "0.0.0.0"),
        *("--max-model-len", "8192", "--max-num-seqs", "7", "--api-key", "secret"),
        *("--served-model-name", "qwen", "--served-model-name", "gpt-4"),
        *("--dtype", "float32", "--kv-cache-memory-bytes", "2GiB", "--no-enable-prefix-caching"),
        *("--generation-config", "none", "--set", "topology=colocated"),
        *("--ingresses", "2", "--set", "decode.actor.num_cpus=2"),
    )
    assert (code, err) == (0, "")
    config: AppConfig = served["config"]
    assert (served["http"].host, served["http"].port) == ("0.0.0.0", 9000)
    assert config.model.name == "Qwen/Qwen3-0.6B"
    assert config.model.served_names == ("qwen", "gpt-4")
    assert (config.model.max_model_len, config.model.dtype) == (8192, "float32")
    assert config.model.generation_config == "none"
    assert config.decode.max_num_seqs == 7
    assert config.ingress.num_replicas == 2
    assert config.decode.actor.num_cpus == 2
    assert config.pool.kv_cache_memory_bytes == 2 << 30
    assert config.pool.prefix_bytes == 0
    assert config.topology == "colocated"
    assert served["keys"] == [{"name": "key-1", "sha256": hashlib.sha256(b"secret").hexdigest()}]
    assert not served["path"].exists()  # the keys go with the server


@pytest.mark.parametrize(
    ("preset", "policy", "plugin"),
    [
        ("tinyserve", "uniform:fp16", ""),
        ("tinyserve:full_cache", "uniform:fp16", ""),
        ("tinyserve:streaming_llm", "streaming_llm", ""),
        ("tinyserve:snapkv", "snapkv", ""),
        ("tinyserve:pyramidkv", "pyramidkv", ""),
        ("tinyserve:soft_prune", "diffkv", "soft_prune"),
        ("tinyserve:entropy_stop", "uniform:fp16", "entropy_stop"),
    ],
)
def test_presets_are_tinyserve_and_its_six_baselines(
    run: Run, served: dict[str, Any], preset: str, policy: str, plugin: str
) -> None:
    """Each can be planned, and a setting that is given counts more than the preset's."""
    code, _, err = run("serve", "some/model", "--preset", preset, "--set", "decode.max_num_seqs=3")
    assert (code, err) == (0, "")
    config: AppConfig = served["config"]
    assert config.compressor.policy == policy
    assert [step.called for step in config.decode.steps] == ([plugin] if plugin else [])
    assert (config.decode.selection.method == "box") == (preset == "tinyserve")
    assert config.decode.max_num_seqs == 3
    plan = PagePlan.of(config, Geometry(layers=2, kv_heads=2, head_dim=64))
    rule = plan.policy.retention
    assert (rule is None) == (policy in ("uniform:fp16", "diffkv"))
    assert rule is None or rule.keep_share == 0.3
    Pipeline.of(config.decode.steps, plan.policy, can_exit=False)


def test_an_unknown_preset_is_told_what_there_is(run: Run, served: dict[str, Any]) -> None:
    code, _, err = run("serve", "some/model", "--preset", "tinyserve:h3o")
    assert code == 2
    assert "tinyserve:entropy_stop" in err.replace("\n", "")
    assert not served


def test_a_model_alone_gets_memory_for_pages_by_what_is_free(
    run: Run, served: dict[str, Any], tmp_path: Path
) -> None:
    code, _, _ = run("serve", str(tmp_path))
    assert code == 0
    config: AppConfig = served["config"]
    assert config.model.served_names == (str(tmp_path), tmp_path.name)
    assert config.pool.kv_cache_memory_bytes >= 64 << 20
    assert config.pool.kv_cache_memory_bytes % (64 << 20) == 0


def test_a_config_file_takes_no_options(run: Run, served: dict[str, Any], tmp_path: Path) -> None:
    code, _, err = run("serve", str(tmp_path / "config.yaml"), "--port", "9000")
    assert code == 2
    assert "set them in the file" in err
    assert not served


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("topology", "expected KEY=VALUE"),
        ("pool.kv_cache_memory_bytes=many", "a size such as 4GiB"),
        ("decode.max_num_seq=2", "did you mean"),
        ("model.name.part=2", "is a value, not a section"),
    ],
)
def test_a_wrong_setting_is_named(
    run: Run, served: dict[str, Any], setting: str, reason: str
) -> None:
    code, _, err = run("serve", "some/model", "--set", setting)
    assert code == 2
    assert reason in err.replace("\n", " ")
    assert not served


@pytest.mark.parametrize(("on_gpus", "expected"), [((), 7), (("prefill",), 7), (STAGES, 0)])
def test_kernels_are_compiled_where_a_stage_computes_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, on_gpus: Sequence[str], expected: int
) -> None:
    started = list[Sequence[str]]()

    def start(words: Sequence[str]) -> int:
        started.append(words)
        return 7

    monkeypatch.setattr(command, "start_child", start)
    gpus = {stage: {"actor": {"num_gpus": 1}} for stage in on_gpus}
    disaggregated: dict[str, object] = {"topology": "disaggregated", **gpus}
    assert command.start_compiling([AppConfig.from_mapping(disaggregated)]) == expected
    assert len(started) == (expected > 0)
