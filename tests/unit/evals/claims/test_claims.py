"""Figures of the claims of LeanKV and DiffKV: exact on inputs whose answer is known."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.config import AppConfig, PoolConfig
from triptych.core.errors import ConfigError
from triptych.core.handles import KVHandle, LeaseId, LeaseRef, PageRun
from triptych.core.layout import FORMATS, Geometry
from triptych.core.messages import ClassShares
from triptych.core.pages import PagePlan
from triptych.core.policy import Policy
from triptych.evals.claims.attention_shape import context_weights, critical_shares
from triptych.evals.claims.claims_results import ClaimsResults
from triptych.evals.claims.claims_study import AXES, PARTS, ClaimsStudy, Keep, measure_claims
from triptych.evals.claims.draw import ClaimModel, Draw
from triptych.evals.claims.head_sparsity import kept
from triptych.evals.claims.integer_products import integer_products
from triptych.evals.claims.precision_levels import (
    DROPPED,
    FAMILIES,
    four_levels,
    kl_of,
    settings,
)
from triptych.evals.claims.scorer_memory import scorer_peaks
from triptych.evals.claims.verdicts import CLAIMS, verdicts
from triptych.evals.metrics.fidelity import Summary
from triptych.evals.metrics.fragmentation import page_waste
from triptych.evals.studies.ablation import AXES as ALL_AXES
from triptych.evals.studies.report import Row
from triptych.evals.studies.study import Results, Study
from triptych.workers.compress.class_report import class_shares

SMALL = AppConfig(pool=PoolConfig(kv_cache_memory_bytes=16 << 20))
GEOMETRY = Geometry(layers=1, kv_heads=2, head_dim=64)
PLAN = PagePlan(
    GEOMETRY, 3584, Policy(name="diffkv", high_format="k8v4", low_format="k4v2", alpha_high=1.0)
)


def handle(tokens: int, **counts: list[int]) -> KVHandle:
    runs = tuple(
        PageRun(format=name, tokens=np.array(rows, "<i4").tobytes(), pages=b"")
        for name, rows in counts.items()
    )
    return KVHandle(
        lease_ref=LeaseRef(arena="arena", lease=LeaseId(1), generation=1), runs=runs, tokens=tokens
    )


def test_shares_of_classes_add_up_to_one() -> None:
    found = class_shares(handle(200, k8v8=[20, 20], k8v4=[100, 30], k4v2=[50, 40]), PLAN)
    shares = ClassShares(recent=40 / 400, high=130 / 400, low=90 / 400, pruned=140 / 400)
    assert found == shares


@pytest.mark.parametrize("seed", range(5))
def test_a_unified_page_wastes_less_than_a_page_of_each_class_and_row(seed: int) -> None:
    generator = np.random.default_rng(seed)
    high, low = generator.integers(0, 300, (2, 2)).tolist()
    waste = page_waste(handle(1000, k8v8=[0, 0], k8v4=high, k4v2=low), PLAN)
    used = sum(high) * PLAN.high.token_bytes + sum(low) * 56
    assert waste.used_bytes == used
    assert waste.unified_bytes - used < 4 * PLAN.page_bytes
    assert waste.fixed_bytes == PLAN.page_bytes * sum(
        -(-(a + b) // PLAN.high.tokens) for a, b in zip(high, low, strict=True)
    )


def test_low_tokens_in_slots_of_the_high_format_waste_half() -> None:
    waste = page_waste(handle(6400, k8v8=[0, 0], k8v4=[0, 0], k4v2=[3200, 3200]), PLAN)
    assert waste.unified_waste < 0.03
    assert waste.fixed_waste == pytest.approx(1 - 56 / 112)


@pytest.fixture(scope="module")
def draw(tiny_model: Path) -> Draw:
    return Draw(ClaimModel(tiny_model), 1, 160, 2, 12, "evaluation", SMALL)


def test_critical_tokens_are_the_fewest_with_most_of_the_attention(draw: Draw) -> None:
    capture = draw.captures[0]
    weights = context_weights(capture)
    mine = critical_shares(capture)
    for layer, head in ((0, 0), (1, 3)):
        counts = list[int]()
        for row in weights[layer, head]:
            ordered, running = sorted(row.tolist(), reverse=True), 0.0
            for count, weight in enumerate(ordered, 1):
                running += weight
                if running >= 0.95 * sum(ordered) - 1e-7:
                    counts.append(count)
                    break
        wanted = np.mean(counts) / capture.context
        assert mine[layer, head, 0].item() == pytest.approx(wanted, abs=2e-3)


def test_weights_of_a_capture_are_those_of_its_outputs(draw: Draw) -> None:
    """The rest of the attention is on the tokens behind the context."""
    total = context_weights(draw.captures[0]).sum(-1)
    assert ((total > 0.3) & (total < 1 + 1e-2)).all()


def test_products_of_integers_lose_less_with_each_digit(draw: Draw) -> None:
    figures = integer_products(draw)
    for bits in ("K8V4", "K4V2"):
        one, two, three = (
            figures[f"{bits}, {count} digits: KL of weights, mean"] for count in (1, 2, 3)
        )
        assert 0 < three < two / 100 < one / 10_000
        assert figures[f"{bits}, 2 digits: KL of weights, largest"] < 2e-7
        assert 0 <= figures[f"{bits}, 2 digits: KL of next tokens, mean"] < 1e-7


@pytest.mark.parametrize("by_head", [False, True])
def test_as_many_tokens_of_a_layer_are_kept(draw: Draw, by_head: bool) -> None:
    capture = draw.captures[0]
    mask = kept(capture, 0.6, by_head=by_head)
    layers, heads, tokens = mask.shape
    assert mask[..., :3].all()
    assert mask[..., tokens - 64 :].all()
    assert torch.equal(mask.sum((1, 2)), torch.full((layers,), round(0.6 * tokens) * heads))
    assert (mask.sum(2) == round(0.6 * tokens)).all() == by_head


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> ClaimsResults:
    study = ClaimsStudy(
        model=str(tiny_model),
        base=SMALL,
        parts=("ranges", "critical", "sparsity", "classes", "drift"),
        seeds=2,
        context=160,
        documents=2,
        steps=12,
        answer_tokens=24,
    )
    return measured(study, ClaimsResults(conditions=study.conditions))


def measured(
    study: ClaimsStudy, known: ClaimsResults, keep: Keep = lambda _f: None
) -> ClaimsResults:
    return measure_claims(study, known, lambda _n, _c: None, lambda _n, _c: None, keep)


def test_every_part_has_figures_with_intervals(found: ClaimsResults) -> None:
    parts = {figure.part for figure in found.figures}
    assert parts == {"ranges", "critical", "sparsity", "classes", "drift"}
    for figure in found.figures:
        low, high = figure.stats.ci95
        assert low <= figure.stats.mean <= high
    assert json.dumps(found.as_json())
    by_name = {figure.name: figure.stats.mean for figure in found.figures}
    assert by_name["default, repetition: waste of fixed slots"] >= 0
    assert by_name["leankv: tokens before greedy answers part"] <= 6
    assert "snapkv: KL, steps 0 to 6" in by_name


def test_every_part_has_a_claim_whose_figures_are_there(found: ClaimsResults) -> None:
    told = verdicts(found)
    assert {one.part for one in told} == {"ranges", "critical", "sparsity", "classes", "drift"}
    assert {claim.part for claim in CLAIMS} == {*PARTS, "ablation"}
    assert all(one.paper and one.claim and one.draws == 2 for one in told)


@pytest.mark.parametrize(
    ("orders", "holds"),
    [((7.0, 7.1, 7.2), "yes"), ((1.0, 1.1, 1.2), "no"), ((1.0, 2.0, 3.0), "open")],
)
def test_a_claim_holds_if_its_interval_is_beside_the_bound(
    orders: tuple[float, ...], holds: str
) -> None:
    found = ClaimsResults(conditions={"seeds": 3})
    for seed, value in enumerate(orders, 1):
        assert not verdicts(found)  # of some draws alone
        figures = {"weights, orders": value, "value norms, orders": 2.0}
        found = found.with_draw("ranges", seed, figures)
    (told,) = verdicts(found)
    assert (told.holds, told.draws) == (holds, 3)
    assert told.mean == pytest.approx(np.mean(orders) - 2)


def test_ratios_have_geometric_means_and_positive_intervals() -> None:
    found = ClaimsResults(conditions={"seeds": 2})
    for seed, dynamic in enumerate((2.0, 8.0), 1):
        figures = {"keep 0.5: error, dynamic": dynamic, "keep 0.5: error, static": 1.0}
        found = found.with_draw("sparsity", seed, figures)
    (told,) = verdicts(found)
    assert told.mean == pytest.approx(4.0)
    assert 0 < told.ci95[0] < 1 < told.ci95[1]
    assert told.holds == "open"


def test_figures_are_read_back(found: ClaimsResults) -> None:
    read = ClaimsResults.from_json(json.loads(json.dumps(found.as_json())))
    assert read.figures == found.figures
    assert read.draws == found.draws


def test_a_stopped_run_continues_where_it_was(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[str, int]]()
    stop_at = ("critical", 2)

    def part(name: str) -> Callable[[Draw, ClaimsStudy], dict[str, float]]:
        def measure(draw: Draw, _study: ClaimsStudy) -> dict[str, float]:
            if (name, draw.seed) == stop_at:
                raise KeyboardInterrupt
            calls.append((name, draw.seed))
            return {} if draw.seed == 3 else {"figure": float(draw.seed)}

        return measure

    for name in ("ranges", "critical"):
        monkeypatch.setitem(PARTS, name, part(name))
    study = ClaimsStudy(model=str(tiny_model), parts=("ranges", "critical"), seeds=3)
    kept = [ClaimsResults(conditions=study.conditions)]
    with pytest.raises(KeyboardInterrupt):
        measured(study, kept[0], kept.append)
    assert calls == [("ranges", 1), ("critical", 1), ("ranges", 2)]
    assert not kept[-1].figures
    stop_at = ("", 0)
    complete = measured(study, kept[-1], kept.append)
    assert calls[3:] == [("critical", 2), ("ranges", 3), ("critical", 3)]
    assert [(one.part, one.stats.mean) for one in complete.figures] == [
        ("ranges", 1.5),
        ("critical", 1.5),
    ]
    assert measured(study, complete) == complete
    assert len(calls) == 6


def ablated(study: Study) -> Results:
    """KL of each method by the name of its low format and the draw."""
    kl = {"k2v4": 0.4, "k4v2": 0.1}
    rows = [
        Row(
            method=name,
            context=study.contexts[0],
            bytes_data_ratio=0.3,
            bytes_all_in_ratio=0.3,
            attention_hit=None,
            attention_hit_bound=None,
            summary=Summary(
                documents=1,
                tokens=32,
                kl=kl.get(name[-4:], 0.2) * study.seed,
                kl_ci95=None,
                kl_p99=1.0,
                top1_agreement=0.9,
                top1_ci95=None,
                perplexity=10.0 + study.seed,
                perplexity_full=10.0 + study.seed,
                perplexity_ratio=1.0 + study.seed / 1000,
                nll_difference=0.0,
                nll_difference_ci95=None,
            ),
            kl_over_first_ci95=None,
            kl_by_document=(0.1,),
        )
        for name in study.methods
    ]
    names = ("model", "model_revision", "text_hash", "default_compressor")
    return Results(conditions=dict.fromkeys(names, ""), rows=rows, tasks=[], answers=[])


def test_a_stopped_ablation_continues_with_the_next_draw(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def measure(study: Study, _begin: object, _advance: object) -> Results:
        calls.append(study.seed)
        if calls == [1, 2]:
            raise KeyboardInterrupt
        return ablated(study)

    monkeypatch.setattr("triptych.evals.claims.claims_study.ablate_one", measure)
    study = ClaimsStudy(model=str(tiny_model), parts=("ablation",), seeds=3)
    kept = [ClaimsResults(conditions=study.conditions)]
    with pytest.raises(KeyboardInterrupt):
        measured(study, kept[0], kept.append)
    read = ClaimsResults.from_json(json.loads(json.dumps(kept[-1].as_json())))
    assert list(read.ablation_draws) == ["1"]
    complete = measured(study, read, kept.append)
    assert calls == [1, 2, 2, 3]
    assert "ablation_draws" not in complete.as_json()
    told = {one.claim: one for one in verdicts(complete)}
    assert len(told) == sum(claim.part == "ablation" for claim in CLAIMS)
    keys = told["keys need more bits than values"]
    assert (keys.holds, keys.mean) == ("yes", pytest.approx(4.0))
    again = ClaimsResults.from_json(json.loads(json.dumps(complete.as_json())))
    assert verdicts(again) == verdicts(complete)


def test_other_parts_have_the_same_conditions(tiny_model: Path) -> None:
    study = ClaimsStudy(model=str(tiny_model), parts=("ranges",))
    assert replace(study, parts=("drift",)).conditions == study.conditions
    assert replace(study, seeds=3).conditions != study.conditions


def test_parts_and_axes_are_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="part 'colour'"):
        ClaimsStudy(parts=("colour",))
    assert set(AXES) <= set(ALL_AXES)
    assert ClaimsStudy(parts=("drift", "ranges")).chosen == ("ranges", "drift")
    assert ClaimsStudy().chosen == (*PARTS, "ablation")
    assert ClaimsStudy(seeds=3).ablation().axes == AXES
    assert ClaimsStudy(documents=9, ablation_documents=2).ablation().documents == 2
    quick = ClaimsStudy(model="m", parts=("drift",), split="test").quick()
    assert (quick.model, quick.parts, quick.split) == ("m", ("drift",), "test")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bytes_each", [58.0, 64.0, 80.0])
def test_levels_of_all_families_take_the_same_bytes(family: str, bytes_each: float) -> None:
    for levels in settings(family, bytes_each, 64):
        sizes = [form.token_bytes(64) for form, _ in levels]
        assert sizes == sorted(sizes, reverse=True)
        assert sum(size * share for size, (_, share) in zip(sizes, levels, strict=True)) == (
            pytest.approx(bytes_each)
        )
        assert any(
            sum(share for _, share in levels) == pytest.approx(1 - dropped) for dropped in DROPPED
        )
        assert all(share >= 0 for _, share in levels)


def test_kl_of_levels_falls_with_their_bytes(draw: Draw) -> None:
    texts = range(2)
    kl = [kl_of(draw, ((FORMATS[name], 1.0),), texts) for name in ("k4v2", "k4v4", "k8v8", "fp16")]
    assert kl == sorted(kl, reverse=True)
    assert kl[3] < kl[0] / 20  # sinks and newest tokens have 8 bits
    dropped = kl_of(draw, ((FORMATS["fp16"], 0.5),), texts)
    assert dropped > kl[3]


def test_levels_are_compared_at_equal_bytes(draw: Draw) -> None:
    found = four_levels(draw)
    shares = {name.partition(" of FP16")[0] for name in found}
    assert len(shares) == 3
    for name, value in found.items():
        assert value > 0 if name.endswith("KL") else value < 1
    families = {name.split(", ", 1)[1].rpartition(":")[0] for name in found}
    assert families == set(FAMILIES)


@pytest.mark.conformance  # half a minute
@pytest.mark.slow
def test_memory_of_scorers_is_measured_in_processes_of_their_own(draw: Draw) -> None:
    found = scorer_peaks(draw, 150, ("diffkv",))
    assert abs(found["diffkv: MiB over none"]) < 200
