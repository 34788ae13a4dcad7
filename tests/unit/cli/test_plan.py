"""``triptych plan`` says what the pool, the layouts and the router will say."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.unit.cli.conftest import Run
from triptych.cli.checks.plan import byte_count
from triptych.cli.checks.sizing import Load, app_plan, fits, sizes
from triptych.cli.serving.panel import describe_pages
from triptych.core.config import AppConfig, AutoscalingConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, Geometry, PageLayout
from triptych.core.profile import Fidelity, Profile, Settings
from triptych.router.models.memory_estimate import ByteModel

SMALL = Geometry(layers=30, kv_heads=3, head_dim=64)
LARGE = Geometry(layers=80, kv_heads=8, head_dim=128)
GIB = 1 << 30


def config(**pool: object) -> AppConfig:
    return AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": 4 * GIB, **pool}})


@pytest.mark.parametrize("geometry", [SMALL, LARGE])
@pytest.mark.parametrize("load", [Load(1024, 256), Load(1, 1), Load(8000, 100)])
def test_what_is_said_to_fit_fits_and_no_more(geometry: Geometry, load: Load) -> None:
    for fit in fits(config(), geometry, 16384, load, None):
        layout = PageLayout(
            FORMATS[fit.formats.partition("+")[0]], geometry.head_dim, fit.page_bytes
        )
        assert fit.tokens_per_page == layout.tokens
        assert fit.pages == 4 * GIB // fit.page_bytes
        rows_of_pages = fit.tokens // fit.tokens_per_page
        taken = rows_of_pages * geometry.head_rows * fit.page_bytes
        assert taken <= fit.bookable_bytes < taken + 2 * geometry.head_rows * fit.page_bytes
        if fit.requests:
            booked = fit.peak_bytes + (fit.requests - 1) * fit.decoding_bytes
            assert booked <= fit.bookable_bytes < booked + fit.decoding_bytes


def test_the_first_line_is_what_the_router_would_book() -> None:
    plan = app_plan(config(), SMALL, 8192, None)
    (fit, *others) = fits(config(), SMALL, 8192, Load(1000, 100), None)
    assert fit.policy == plan.pages.policy.name == "uniform:k8v4"
    assert fit.bookable_bytes == plan.bookable_bytes
    assert fit.peak_bytes == ByteModel(plan.pages).estimate(1000, 100).peak
    usual = ("fp16", "k8v8", "k8v4", "k4v4", "k4v2")
    assert {other.policy for other in others} == {"diffkv", *(f"uniform:{one}" for one in usual)}


def test_fewer_bits_hold_more_tokens() -> None:
    found = {fit.policy: fit.tokens for fit in fits(config(), SMALL, 8192, Load(64, 64), None)}
    order = ["uniform:fp16", "uniform:k8v8", "uniform:k8v4", "uniform:k4v4", "uniform:k4v2"]
    assert [found[name] for name in order] == sorted(found[name] for name in order)


def test_what_calibration_measured_is_expected_of_its_policy_alone() -> None:
    measured = Fidelity(
        context=2048, bytes_ratio=0.3, kl=0.005, top1_agreement=0.97, perplexity_ratio=1.002
    )
    profile = Profile(
        model="m", weights="w", geometry=SMALL, settings=Settings(policy="diffkv"),
        measured=(replace(measured, context=1024, bytes_ratio=0.4), measured),
    )  # fmt: skip
    (fit, *others) = fits(config(), SMALL, 8192, Load(64, 64), profile)
    assert fit.expected_tokens == int(fit.bookable_bytes / (0.3 * 30 * 3 * 64 * 4))
    assert all(other.expected_tokens is None for other in others)


def test_memory_is_pages_checkpoints_rays_store_and_processes() -> None:
    one, two, scaled = (
        sizes(app_plan(replace(config(), decode=decode), SMALL, 8192, None), GIB)
        for decode in (
            config().decode,
            replace(config().decode, actor=replace(config().decode.actor, num_replicas=2)),
            replace(config().decode, autoscaling=AutoscalingConfig(max_replicas=2)),
        )
    )
    assert two.checkpoint_bytes == 2 * one.checkpoint_bytes > 2**20
    assert one.shared_memory_bytes == 4 * GIB + one.checkpoint_bytes + 256 * 2**20
    assert (one.workers, two.workers) == (3, 4)
    added = GIB + GIB + one.checkpoint_bytes  # a process, the weights in it, its checkpoint
    assert two.memory_bytes == one.memory_bytes + added
    assert scaled == two


def test_a_request_beyond_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="exceed the model's context of 8192 tokens"):
        fits(config(), SMALL, 8192, Load(8000, 500), None)


@pytest.mark.parametrize("text", ["", "4 gigabytes", "GiB", "-1GiB", "4GiBB"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a size such as 4GiB"):
        byte_count(text)


def test_a_model_is_planned_from_its_config_alone(run: Run, tmp_path: Path) -> None:
    shape = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, vocab_size=100, max_position_embeddings=512,
    )  # fmt: skip
    shape.save_pretrained(tmp_path)
    asked = ("plan", "--model", str(tmp_path), "--prompt-tokens", "100", "--json")
    code, out, _ = run(*asked, "--memory", "64MiB")
    data = json.loads(out)
    assert code == 0
    assert data["geometry"] == {
        "layers": 2,
        "kv_heads": 2,
        "head_dim": 16,
        "has_latents": False,
        "windows": [],
    }
    assert data["weights_bytes"] == 2 * data["parameters"] > 0
    assert data["per_pool"]["capacity_bytes"] == 64 << 20
    code, out, _ = run(*asked, "--gpus", "2", "--gpu-memory", "1GiB")
    data = json.loads(out)
    assert data["pools"] == 2
    assert data["per_pool"]["capacity_bytes"] == int(0.8 * (GIB - data["weights_bytes"]))
    code, _, err = run(*asked, "--gpus", "1", "--gpu-memory", "1k")
    assert code == 2
    assert "less than the weights" in err


def test_layers_with_sliding_windows_hold_more_tokens_of_long_requests() -> None:
    sliding = replace(SMALL, windows=tuple(512 * (layer % 6 < 5) for layer in range(SMALL.layers)))
    for load in (Load(100, 28), Load(8000, 100)):
        before, now = (
            {fit.policy: fit for fit in fits(config(), shape, 16384, load, None)}
            for shape in (SMALL, sliding)
        )
        for name, fit in now.items():
            is_long = load.prompt_tokens > 512
            assert (fit.tokens > 3 * before[name].tokens) == is_long
            assert (fit.decoding_bytes < before[name].decoding_bytes / 3) == is_long
            assert fit.token_bytes == before[name].token_bytes
    plan = app_plan(config(), sliding, 16384, None)
    assert f"({plan.cache_tokens_in(16384)} in requests of 16384)" in describe_pages(plan)
    assert plan.cache_tokens_in(16384) > 3 * plan.cache_tokens
