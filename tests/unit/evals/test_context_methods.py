"""Merged, pruned and rounded contexts: bytes, protected tokens, and the study over them."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, Geometry
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.context_methods import (
    Classes,
    Merging,
    Predicted,
    Pruning,
    arbitrary,
    classes_at,
    measured,
    two_levels,
)
from triptych.evals.methods.replaced_cache import ReplacedCache
from triptych.evals.studies.learned_study import LearnedStudy, continue_text, run_learned_study
from triptych.evals.training.captures import CapturePlan, capture_text
from triptych.evals.training.fit import FitPlan
from triptych.evals.training.learned_networks import (
    MergerPlan,
    ScorerPlan,
    train_merger,
    train_scorer,
)
from triptych.evals.training.output_matching import context_of, output_error
from triptych.workers.compress.learned.chunk_merger import MeanMerger
from triptych.workers.compress.learned.merge_requests import RequestCache
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer
from triptych.workers.models.load import LoadedModel, load

LAYERS, HEADS, TOKENS, DIM = 2, 2, 200, 32
FULL = LAYERS * HEADS * TOKENS * 4 * DIM
FRAME = RopeFrame(10 ** -torch.linspace(0, 3, DIM // 2))


@pytest.fixture
def cache() -> RequestCache:
    draw = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(LAYERS, HEADS, TOKENS, DIM, generator=draw) for _ in "kv")
    return RequestCache(keys, values, torch.rand(LAYERS, HEADS, TOKENS, generator=draw))


def test_pruning_keeps_sinks_and_newest_and_the_most_significant(cache: RequestCache) -> None:
    replaced, footprint = Pruning("prune", 0.5).replace(cache)
    count = replaced.keys.shape[2]
    assert footprint.full_bytes == FULL
    assert footprint.all_in_bytes == LAYERS * HEADS * count * (4 * DIM + 8)
    assert 0.49 < footprint.all_in_bytes / FULL <= 0.5
    scores = cache.significance[1, 0].clone()
    scores[:4] = scores[-64:] = 2.0
    expected = scores.topk(count).indices.sort().values
    assert torch.equal(replaced.keys[1, 0], cache.keys[1, 0, expected])
    assert torch.equal(replaced.values[1, 0], cache.values[1, 0, expected])


@pytest.mark.parametrize("ratio", [0.45, 0.5, 0.6, 0.9])
def test_classes_take_the_bytes_they_are_given(ratio: float, cache: RequestCache) -> None:
    centre = torch.full((LAYERS, HEADS, DIM), 0.5)
    replaced, footprint = classes_at("classes", ratio, TOKENS, centre).replace(cache)
    assert ratio - 0.01 < footprint.all_in_bytes / FULL <= ratio
    assert replaced.keys.shape == cache.keys.shape
    error = (replaced.keys - cache.keys).abs().mean((0, 1, 3))
    assert float(error[:4].max()) < 0.02  # sinks are in 8 bits
    assert float(error[-64:].max()) < 0.02
    assert float(error.max()) < 0.6


def test_significant_tokens_are_rounded_less(cache: RequestCache) -> None:
    centre = torch.zeros(LAYERS, HEADS, DIM)
    levels = two_levels(FORMATS["k4v2"], FORMATS["k8v4"], 0.3)
    replaced, _ = Classes("classes", levels, centre).replace(cache)
    error = (replaced.values - cache.values).square().mean(-1)[..., 4:-64].flatten()
    order = cache.significance[..., 4:-64].flatten().argsort()
    third = len(order) // 3
    assert error[order[-third:]].mean() < error[order[:third]].mean()


def test_more_bytes_are_closer(cache: RequestCache) -> None:
    centre = torch.zeros(LAYERS, HEADS, DIM)
    found = [classes_at("c", ratio, TOKENS, centre).replace(cache) for ratio in (0.4, 0.5, 0.65, 1)]
    errors = [float((replaced.values - cache.values).square().mean()) for replaced, _ in found]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 10


def test_below_the_smallest_format_all_tokens_are_in_it(cache: RequestCache) -> None:
    few = classes_at("c", 0.1, TOKENS, torch.zeros(LAYERS, HEADS, DIM))
    assert few.levels[1] == (FORMATS["k4v2"], 1.0)
    _, footprint = few.replace(cache)
    assert footprint.all_in_bytes > 0.1 * FULL


def test_merging_counts_the_bias_segment(cache: RequestCache) -> None:
    merging = Merging("mean", MeanMerger(4), FRAME)
    replaced, footprint = merging.replace(cache)
    kept = 4 + 64 + 132 // 4
    assert replaced.bias.shape == (LAYERS, HEADS, kept)
    assert footprint.all_in_bytes == LAYERS * HEADS * kept * (4 * DIM + 8 + 2)
    assert int((replaced.bias == math.log(4)).sum()) == LAYERS * HEADS * 33
    _, without = replace(merging, has_bias=False).replace(cache)
    assert without.all_in_bytes == LAYERS * HEADS * kept * (4 * DIM + 8)


def test_arbitrary_significance_has_the_same_numbers(cache: RequestCache) -> None:
    shuffled = arbitrary(cache)
    assert not torch.equal(shuffled, measured(cache))
    assert torch.equal(shuffled.sort(-1).values, measured(cache).sort(-1).values)


def test_predicted_significance_has_the_shape_of_the_measured(cache: RequestCache) -> None:
    scorer = TokenScorer(Geometry(layers=LAYERS, kv_heads=HEADS, head_dim=DIM), FRAME, 4)
    assert Predicted(scorer)(cache).shape == cache.significance.shape


# ------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> LoadedModel:
    return load(tiny_model, "float32", quantization="none")


def test_a_context_that_is_replaced_by_itself_gives_the_logits_of_the_full_cache(
    tiny_model: Path, loaded: LoadedModel
) -> None:
    (text,) = documents(
        Vocabulary(tiny_model).encode, "evaluation", context=96, continuation=17, count=1
    )
    tokens = (*text.context, *text.continuation[:-1])
    plan = CapturePlan(context=96, continuation=16)
    capture, full = capture_text(loaded, tokens, plan)
    assert full.shape == (16, loaded.vocab_size)
    cache = context_of(capture)
    same = ReplacedCache(cache.keys, cache.values, torch.zeros(cache.keys.shape[:3]))
    torch.testing.assert_close(continue_text(loaded, text, same), full, rtol=0.01, atol=0.05)
    half = ReplacedCache(cache.keys[:, :, ::2], cache.values[:, :, ::2], same.bias[:, :, ::2])
    assert not torch.allclose(continue_text(loaded, text, half), full, rtol=0.01, atol=0.05)
    assert float(output_error(half, capture)[0].mean()) > 0.01


def test_a_study_compares_all_methods_on_the_same_texts(tiny_model: Path, tmp_path: Path) -> None:
    texts = CapturePlan(context=128, continuation=16, documents=2, held_out=1)
    steps = FitPlan(steps=4, evaluate_every=2)
    scorer, merger, paper = (tmp_path / name for name in ("scorer", "merger", "paper"))

    def begin(_name: str, _steps: int) -> object:
        return lambda _step, _loss: None

    train_scorer(
        ScorerPlan(model=str(tiny_model), captures=texts, fit=steps, hidden=4),
        scorer,
        tmp_path / "work",
        begin,  # type: ignore[arg-type]
    )
    merging = MergerPlan(model=str(tiny_model), captures=texts, fit=steps, hidden=4, chunk_tokens=4)
    train_merger(merging, merger, tmp_path / "work", begin)  # type: ignore[arg-type]
    plain = replace(merging, variant="paper")
    train_merger(plain, paper, tmp_path / "work", begin)  # type: ignore[arg-type]
    calls = list[int]()
    study = LearnedStudy(
        model=str(tiny_model),
        scorer=scorer,
        mergers=(merger, paper),
        context=256,
        documents=2,
        steps=8,
    )
    found = run_learned_study(study, calls.append, lambda: calls.append(1))
    assert calls[0] == len(calls) - 1 == 2 * len(found.rows)
    rows = {row.method: row for row in found.rows}
    assert {"merge:learned@4", "merge:learned+scorer@4", "merge:paper@4", "merge:mean@4",
            "prune:attention@1/4", "quantize:attention@1/4"} <= set(rows)  # fmt: skip
    ratio = rows["merge:learned@4"].bytes_all_in_ratio
    for name in ("prune:attention@1/4", "quantize:attention@1/4"):
        assert ratio - 0.02 < rows[name].bytes_all_in_ratio <= ratio, name
    assert all(row.summary.documents == 2 and len(row.kl_of_documents) == 2 for row in found.rows)
    alone = run_learned_study(replace(study, mergers=()), calls.append, lambda: None)
    assert {row.method.split("@")[0] for row in alone.rows} == {
        f"{kind}:{by}" for kind in ("prune", "classes") for by in ("attention", "scorer", "random")
    }


def test_a_study_refuses_texts_of_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluation or test"):
        LearnedStudy(scorer=tmp_path, split="calibration")
