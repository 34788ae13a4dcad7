"""``kvmerger`` served: pages hold the merged tokens of the model's own keys and attention."""

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny import save_tiny_qwen3
from tests.unit.conformance.rows import compress, layouts, stored
from tests.unit.workers.decode.test_resume import Stages
from tests.unit.workers.test_local_server import greedy
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.images import Segment
from triptych.core.layout import Geometry
from triptych.core.messages import Request, Sampling
from triptych.core.pages import PagePlan
from triptych.evals.methods.masked_attention import MaskedModel, RecordingAttention
from triptych.kernels.pages import segments
from triptych.kernels.retain import alike_sets, merge_sets
from triptych.workers.kv.handle_codec import unpack_run
from triptych.workers.local import LocalServer

TOKENS, KEPT = 240, 0.5
SETTINGS: Mapping[str, object] = {
    "policy": "kvmerger",
    "keep_share": KEPT,
    "recent_window_tokens": 4,
    "high_window_tokens": 4,
    "high_format": "k8v8",
    "kv_rotation": "hadamard",
}
PROMPT = tuple(random.Random(5).choices(range(2, 250), k=TOKENS))
REQUEST = Request(id="r", prompt=PROMPT, sampling=greedy(8), reply_to="client")
HIGH = replace(REQUEST, floor="high")


def test_pages_hold_the_sets_of_the_models_own_keys(tiny_model: Path) -> None:
    """What transformers computes in float32, and the stages in pages of 8 bits."""
    observing, masked = RecordingAttention(), MaskedModel(tiny_model)
    with torch.inference_mode():
        masked.model(torch.tensor(PROMPT), torch.arange(TOKENS), observing, torch.tensor([0]))
    stages = Stages.of(tiny_model, SETTINGS)
    ((_, done),) = compress(stages, [REQUEST])
    plan = stages.plan
    first, leaving = plan.sink_tokens, plan.leaving_tokens(TOKENS)
    some = slice(first, first + leaving)
    sets = leaving - round((1 - KEPT) * TOKENS)
    _, (_, keys, values, positions) = stored(stages, done)
    assert keys.shape[1] == sets
    kv_heads, same = plan.geometry.kv_heads, 0
    for layer, (key, value, sums) in enumerate(
        zip(observing.keys, observing.values, observing.sums, strict=True)
    ):
        key, value = key[:, some], value[:, some]
        sums = sums.view(kv_heads, -1, TOKENS).amax(1)  # the largest of a group of query heads
        set_of = alike_sets(key, torch.ones(leaving - 1, dtype=torch.bool), sets)
        expected = merge_sets(key, value, sums[:, some], set_of, sets)
        rows = slice(layer * kv_heads, (layer + 1) * kv_heads)
        is_same = positions[rows] == expected.pivots + first
        pairs = zip(positions[rows].tolist(), (expected.pivots + first).tolist(), strict=True)
        same += sum(len({*mine} & {*theirs}) for mine, theirs in pairs)
        for mine, theirs in ((keys[rows], expected.keys), (values[rows], expected.values)):
            norms = mine.norm(dim=-1), theirs.norm(dim=-1)  # rotated, and so of the same length
            off = (norms[0] - norms[1]).abs() / norms[1]
            assert off[is_same].median() < 0.01
    assert same >= 0.99 * positions.numel(), "16 bits may order two cosines otherwise"


def test_a_share_of_one_stores_what_a_high_floor_stores(tiny_model: Path) -> None:
    stages = Stages.of(tiny_model, {**SETTINGS, "keep_share": 1.0})
    low, high = (compress(stages, [replace(one, id=one.floor)])[0][1] for one in (REQUEST, HIGH))
    for mine, theirs in zip(stored(stages, low), stored(stages, high), strict=True):
        for first, second in zip(mine[1:], theirs[1:], strict=True):
            torch.testing.assert_close(first, second)


def test_a_merged_token_has_the_logarithm_of_its_members_as_bias(tiny_model: Path) -> None:
    stages = Stages.of(tiny_model, {**SETTINGS, "keep_share": 0.25})
    ((_, done),) = compress(stages, [REQUEST])
    leaving = stages.plan.leaving_tokens(TOKENS)
    biases = segments(torch.from_numpy(stages.pool.arena.data), stages.plan.high).scores
    _, (_, _, _, positions) = stored(stages, done)
    rows, sets = positions.shape

    _, high = layouts(stages)
    counts, ids = unpack_run(done.handle.runs[1], high, rows, stages.pool.capacity_pages)
    assert set(counts.tolist()) == {sets}
    held = biases[torch.from_numpy(ids).long()].view(rows, -1)[:, :sets]
    members = held.exp()
    assert torch.allclose(members.sum(1), torch.full((rows,), float(leaving)), rtol=1e-5)
    assert torch.allclose(members, members.round(), atol=1e-4)
    assert done.report.classes is not None
    assert done.report.classes.merged == pytest.approx(leaving / TOKENS)


def test_tokens_of_images_stay_and_no_set_crosses_them(tiny_model: Path) -> None:
    image = Segment("image", 60, 120)
    stages = Stages.of(tiny_model, SETTINGS)
    ((_, done),) = compress(stages, [REQUEST], segments=(image,))
    text, of_image = done.report.modalities
    assert (of_image.tokens, of_image.stored_tokens) == (60, 60)
    assert text.stored_tokens == round(KEPT * (TOKENS - 60))
    for _, _, _, positions in stored(stages, done):
        assert (positions >= -1).all()


def test_a_high_floor_merges_nothing(tiny_model: Path) -> None:
    stages = Stages.of(tiny_model, SETTINGS)
    ((_, done),) = compress(stages, [HIGH])
    held = sum((at >= 0).sum(1) for *_, at in stored(stages, done))
    assert (held == TOKENS).all()


@pytest.mark.parametrize("is_default", [True, False])
def test_a_server_of_another_model_answers_alike_again_and_without_a_limit(
    tmp_path: Path, is_default: bool
) -> None:
    """With the prefix cache, default settings, and answers that end where the context does."""
    model = save_tiny_qwen3(tmp_path / "qwen3")
    offered = {"policy": "kvmerger"} if is_default else {"methods": ["kvmerger", "snapkv"]}
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 64 << 20, "extent_pages": 64},
            "compressor": offered,
        }
    )
    method = "" if is_default else "kvmerger"
    endless = Sampling(temperature=0.0, ignore_eos=True)
    with LocalServer(config, model) as server:
        asked = [
            replace(server.request(PROMPT[:count], endless), method=method)
            for count in (1, 90, 240)
        ]
        first = server.complete(asked)
        again = [server.complete([replace(one, id=f"{one.id} again")])[0] for one in asked]
    assert [one.error for one in first] == [None] * 3
    assert [one.tokens for one in first] == [one.tokens for one in again]
    assert [one.cached_tokens for one in again] == [0] * 3
    report = first[2].report
    assert report is not None
    assert report.policy == "kvmerger"


@pytest.mark.parametrize(
    ("settings", "geometry", "says"),
    [
        ({"compressor": {"high_format": "fp16"}}, {}, "a quantized format with kvmerger"),
        ({"compressor": {"high_format": "kivi4"}}, {}, "kivi4 are encoded whole"),
        ({"decode": {"selection": {"method": "box"}}}, {}, "selection ranks pages by their keys"),
        ({"compressor": {"policy": "uniform:k8v4/kvmerger"}}, {}, "name it alone"),
        ({"compressor": {"policy": "kvmerger/snapkv"}}, {}, "name it alone"),
        ({"compressor": {"keep_share": 0}}, {}, "compressor.keep_share"),
        ({}, {"windows": (64, 0)}, "have a sliding window"),
        ({}, {"has_latents": True, "kv_heads": 1, "head_dim": 96}, "stores latents"),
    ],
)
def test_what_cannot_be_merged_is_refused_at_start(
    settings: dict[str, dict[str, object]], geometry: dict[str, object], says: str
) -> None:
    compressor = {"policy": "kvmerger", **settings.get("compressor", {})}
    shape = Geometry(**{"layers": 2, "kv_heads": 2, "head_dim": 64, **geometry})  # pyright: ignore
    with pytest.raises(ConfigError, match=says) as error:
        PagePlan.of(AppConfig.from_mapping({**settings, "compressor": compressor}), shape)
    assert "\n" not in str(error.value)
