# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch and transformers leave tolist and from_pretrained untyped.
"""Baselines on a tiny model: masks do what dropping and not reading do, at equal bytes."""

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from tests.effort import examples
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.evals.data.cases import Case, EqualBytes, Method
from triptych.evals.methods.baselines import (
    BASELINES,
    PAGED,
    Baselines,
    EvictionBaseline,
    UnmaskedFullCache,
    reference_of,
)
from triptych.evals.methods.full_cache import FullCache
from triptych.evals.methods.masked_attention import causal_weights
from triptych.evals.methods.method_names import parse_methods
from triptych.evals.methods.page_retrieval import (
    LayerQueries,
    certified_hits,
    page_scores,
    visible_tokens,
)
from triptych.evals.metrics.fidelity import compare
from triptych.evals.studies.runner import Group, Records, evaluate
from triptych.kernels.select import Rule

BASE = AppConfig.from_mapping(
    {"pool": {"kv_cache_memory_bytes": 16 << 20}, "compressor": {"recent_window_tokens": 20}}
)


def case(tokens: int = 200, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)
    text = torch.randint(2, 250, (tokens + 33,), generator=draw).tolist()
    return Case(
        name=f"random-{seed}",
        prompt=tuple(text[:tokens]),
        forced=tuple(text[tokens:]),
        free_tokens=5,
        scored=True,
    )


def parsed(path: Path, name: str) -> Method:
    method = Baselines(path).parse(name)
    assert not isinstance(method, EqualBytes)
    return method


@pytest.mark.parametrize("name", [*BASELINES, "static"])
def test_a_baseline_that_keeps_all_is_the_full_cache(tiny_model: Path, name: str) -> None:
    (full,) = FullCache(tiny_model).run([case()])
    (ours,) = parsed(tiny_model, f"{name}+keep=1").run([case()])
    torch.testing.assert_close(ours.logits, full.logits, atol=1e-3, rtol=1e-4)
    assert ours.tokens == full.tokens
    assert ours.hit == pytest.approx(1.0, abs=1e-5)
    assert ours.footprint.data_bytes >= ours.footprint.full_bytes == full.footprint.full_bytes


def test_the_full_cache_is_read_with_the_baselines_if_there_is_nothing_else(
    tiny_model: Path,
) -> None:
    names = ["h2o+keep=0.5", "quest+keep=0.5"]
    masked = reference_of(parse_methods(names, tiny_model, BASE, "float32"), tiny_model)
    assert isinstance(masked, UnmaskedFullCache)
    (ours,), (full,) = masked.run([case()]), FullCache(tiny_model).run([case()])
    torch.testing.assert_close(ours.logits, full.logits, atol=1e-3, rtol=1e-4)
    assert (ours.tokens, ours.footprint) == (full.tokens, full.footprint)
    served = parse_methods(["default", *names], tiny_model, BASE, "float32")
    assert isinstance(reference_of(served, tiny_model), FullCache)


@pytest.mark.parametrize("name", ["streaming_llm", "h2o", "snapkv", "knorm"])
def test_a_mask_is_as_good_as_dropping(tiny_model: Path, name: str) -> None:
    """The same tokens taken out of transformers' cache give the same logits."""
    asked = case()
    method = parsed(tiny_model, f"{name}+keep=0.4")
    assert isinstance(method, EvictionBaseline)
    (ours,) = method.run([asked])
    kept = method.policy(method.model.prefill(asked.prompt).attention, 80)
    model = cast("Any", LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval())
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.tensor([asked.prompt]), past_key_values=cache)
        for layer, masks in zip(cast("Any", cache.layers), kept, strict=True):
            chosen = torch.stack([mask.nonzero()[:, 0] for mask in masks])[None, :, :, None]
            layer.keys = layer.keys.gather(2, chosen.expand(-1, -1, -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, chosen.expand(-1, -1, -1, layer.keys.shape[3]))
        positions = torch.arange(200, 233)[None]
        logits = model(
            torch.tensor([asked.forced]), past_key_values=cache, position_ids=positions
        ).logits[0]
    torch.testing.assert_close(ours.logits, logits[:-1], atol=1e-3, rtol=1e-4)
    assert ours.footprint.all_in_bytes == round(0.4 * ours.footprint.full_bytes)


def test_baselines_take_the_bytes_of_the_first_method(tiny_model: Path) -> None:
    names = ["uniform:k8v4", *BASELINES]
    methods = parse_methods(names, tiny_model, BASE, "float32")
    cases = tuple(case(400, seed) for seed in range(2))
    group = Group(name="text", context_tokens=400, cases=cases)
    records = evaluate(FullCache(tiny_model), methods, [group], lambda _n, _c: None)
    assert list(records) == ["full", *names]
    wanted = share(records["uniform:k8v4"], "all_in_bytes")
    for name in BASELINES:
        if name not in PAGED:
            assert share(records[name], "all_in_bytes") == pytest.approx(wanted, rel=0.01)
    assert all(record.hit is None for record in records["uniform:k8v4"]["text"])
    assert all(0 < (record.hit or 0) < 1 for record in records["knorm"]["text"])


def test_pages_are_read_up_to_the_bytes_that_there_are(tiny_model: Path) -> None:
    """One of two layers reads all, summaries count, and a page more makes it exact enough."""
    method = Baselines(tiny_model).parse("quest+page=4+dense_layers=1+window_tokens=8")
    assert isinstance(method, EqualBytes)
    (outcome,) = method.at(0.8).run([case(400)])
    assert outcome.footprint.data_bytes / outcome.footprint.full_bytes == pytest.approx(
        0.8, abs=0.02
    )
    assert outcome.footprint.all_in_bytes > outcome.footprint.full_bytes


def share(records: Records, kind: str) -> float:
    prints = [record.footprint for record in records["text"]]
    return sum(getattr(one, kind) for one in prints) / sum(one.full_bytes for one in prints)


def test_what_is_best_to_know_ranks_best(tiny_model: Path) -> None:
    """Pages by their largest weight beat pages by what a prompt's pass saw."""
    (full,) = FullCache(tiny_model).run([case()])
    kls = dict[str, float]()
    for name in ("oracle", "static"):
        (ours,) = parsed(tiny_model, f"{name}+keep=0.4+dense_layers=0").run([case()])
        assert ours.logits is not None
        assert full.logits is not None
        kls[name] = float(compare(full.logits, ours.logits, case().forced[1:]).kl.mean())
    assert kls["oracle"] < kls["static"]


def test_pages_are_chosen_query_by_query_as_the_rule_says() -> None:
    """Against a loop over queries and pages."""
    draw = torch.Generator().manual_seed(3)
    first, queries, page, kv_heads = 50, 9, 4, 2
    tokens = first + queries
    step = LayerQueries(
        query=torch.randn(kv_heads, 3, queries, 8, generator=draw),
        keys=torch.randn(kv_heads, tokens, 8, generator=draw),
        weights=torch.rand(kv_heads, 3, queries, tokens, generator=draw),
        first=first,
        significance=torch.rand(kv_heads, first, generator=draw),
    )
    rule = Rule.of(0.5, 0, 5, 10, 0.0)
    for rank in PAGED.values():
        scores = page_scores(rank, step, page)
        found = visible_tokens(scores, rule, first, tokens, page)
        for head in range(kv_heads):
            for query in range(queries):
                at = first + query
                last = at // page
                forced = {
                    j
                    for j in range(last + 1)
                    if j * page < 5 or j * page + page - 1 > at - 10 or j == last
                }
                if rank == "static":
                    forced |= {j for j in range(last + 1) if (j + 1) * page > first}
                others = sorted(
                    (j for j in range(last + 1) if j not in forced),
                    key=lambda j: (-score(rank, step, head, query, j, page), j),
                )
                room = max(0, rule.pages(last + 1, at + 1) - len(forced))
                read = forced | set(others[:room])
                expected = {t for t in range(at + 1) if t // page in read}
                assert set(found[head, query].nonzero()[:, 0].tolist()) == expected, rank


def score(rank: str, queries: LayerQueries, head: int, query: int, page: int, size: int) -> float:
    inside = slice(page * size, (page + 1) * size)
    keys = queries.keys[head, inside]
    each = list[float]()
    for group in range(queries.query.shape[1]):
        q = queries.query[head, group, query]
        if rank == "oracle":
            each.append(float(queries.weights[head, group, query, inside].max()))
        elif rank == "static":
            each.append(float(queries.significance[head, inside].sum()))
        elif rank == "box":
            each.append(float(torch.maximum(q * keys.amax(0), q * keys.amin(0)).sum()))
        elif rank == "mean":
            each.append(float(q @ keys.mean(0)))
        else:
            each.append(by_quarters(q, keys))
    return max(each)


def by_quarters(query: Tensor, keys: Tensor) -> float:
    """The most that three deviations above the mean of a quarter of a page's keys make."""
    bounds = [quarter * len(keys) // 4 for quarter in range(5)]
    quarters = [keys[start : max(start + 1, end)] for start, end in itertools.pairwise(bounds)]
    away = torch.cat([quarter - quarter.mean(0) for quarter in quarters]).square().mean(0)
    reach = (query.square() * away).sum().sqrt()
    return max(
        float(query @ quarter.mean(0))
        + 3 * float(reach * (quarter.var(0, correction=0).sum() / away.sum()).sqrt().nan_to_num())
        for quarter in quarters
    )


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        (["h2o"], "before it"),
        (["h2o", "default"], "before it"),
        (["default", "h2o+page=4"], "expected one of"),
        (["default", "quest+page=0"], "1 token"),
        (["default", "quest+page=2.5"], "whole number"),
        (["default", "snapkv+keep=2"], "0 to 1"),
        (["default", "snapkv+keep=much"], "number"),
    ],
)
def test_a_wrong_baseline_is_an_error_that_says_why(names: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_methods(names, Path(), BASE, "float32")


@given(seed=st.integers(0, 10_000), page=st.sampled_from([4, 8, 16]), sharp=st.floats(0.1, 4.0))
@settings(max_examples=examples(60), deadline=None)
def test_what_boxes_certify_is_never_more_than_what_is_read(
    seed: int, page: int, sharp: float
) -> None:
    """Keys in clusters of a few tokens, so that pages differ; whatever pages are read."""
    draw = torch.Generator().manual_seed(seed)
    first, queries, kv_heads, dim = 90, 7, 2, 8
    tokens = first + queries
    near = torch.randn(kv_heads, tokens // 5 + 1, dim, generator=draw).repeat_interleave(5, 1)
    keys = sharp * near[:, :tokens] + torch.randn(kv_heads, tokens, dim, generator=draw)
    query = torch.randn(kv_heads, 3, queries, dim, generator=draw)
    weights = causal_weights(query, keys, first)
    significance = torch.rand(kv_heads, first, generator=draw)
    step = LayerQueries(
        query=query, keys=keys, weights=weights, first=first, significance=significance
    )
    rule = Rule.of(0.3, 0, 4, 8, 0.0)
    read = visible_tokens(page_scores("box", step, page), rule, first, tokens, page)
    certain = certified_hits(step, read, page)
    hit = (weights * read[:, None]).sum(-1)
    assert (certain <= hit + 1e-5).all()
    assert certain.max() > 0
    every = torch.ones_like(read)
    torch.testing.assert_close(certified_hits(step, every, page), torch.ones_like(certain))


def test_only_pages_in_boxes_are_certified(tiny_model: Path) -> None:
    (boxes,) = parsed(tiny_model, "quest+keep=0.4+dense_layers=1").run([case()])
    (others,) = parsed(tiny_model, "moments+keep=0.4+dense_layers=1").run([case()])
    assert boxes.hit_bound is not None
    assert boxes.hit is not None
    assert 0.5 <= boxes.hit_bound <= boxes.hit, "one of two layers reads everything"
    assert others.hit_bound is None
