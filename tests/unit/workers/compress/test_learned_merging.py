"""Merging of chunks: exact for equal tokens, equivariant under shifts, and no token is lost."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.images import Segment
from triptych.core.layout import Geometry
from triptych.workers.compress.learned.chunk_merger import (
    BestTokenMerger,
    GatedMerger,
    MeanMerger,
    Merger,
    PaperMerger,
)
from triptych.workers.compress.learned.chunk_plan import plan_chunks
from triptych.workers.compress.learned.merge_requests import (
    MergedCache,
    RequestCache,
    merge_requests,
)
from triptych.workers.compress.learned.rope_frame import RopeFrame

GEOMETRY = Geometry(layers=2, kv_heads=2, head_dim=8)
FRAME = RopeFrame(torch.tensor([1.0, 0.3, 0.1, 0.03]))
SHAPE = GEOMETRY.layers, GEOMETRY.kv_heads


def randomized(network: GatedMerger | PaperMerger, seed: int = 0) -> GatedMerger | PaperMerger:
    """A network as training leaves it: no parameter is zero."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for part in network.parameters():
            part.add_(torch.randn(part.shape, generator=draw) * 0.3)
    shape = (*SHAPE, 2, network.chunk_tokens, GEOMETRY.head_dim)
    network.standardize(torch.randn(shape, generator=draw), torch.rand(shape, generator=draw) + 0.5)
    return network.requires_grad_(False)


def mergers(chunk_tokens: int) -> list[Merger]:
    return [
        MeanMerger(chunk_tokens),
        BestTokenMerger(chunk_tokens),
        GatedMerger(GEOMETRY, chunk_tokens, 16).requires_grad_(False),
        randomized(GatedMerger(GEOMETRY, chunk_tokens, 16)),
        randomized(PaperMerger(GEOMETRY, chunk_tokens)),
    ]


def random_cache(tokens: int, seed: int = 0) -> RequestCache:
    draw = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(*SHAPE, tokens, 8, generator=draw) for _ in "kv")
    return RequestCache(keys, values, torch.rand(*SHAPE, tokens, generator=draw))


def attention(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    weights = (keys @ query + bias).softmax(-1)
    return (weights[..., None] * values).sum(-2)


@pytest.mark.parametrize("chunk_tokens", [2, 4, 5])
@pytest.mark.parametrize("index", [0, 2, 3], ids=["mean", "untrained", "trained"])
def test_equal_tokens_merge_exactly(chunk_tokens: int, index: int) -> None:
    """Near-duplicate patches of an image in the limit: attention does not change at all."""
    tokens, chunk = 4 + chunk_tokens, slice(2, 2 + chunk_tokens)
    cache = random_cache(tokens)
    for part in (cache.keys, cache.values):
        part[:, :, chunk] = part[:, :, 2:3]
    cache.significance[:, :, chunk] = 0.25
    end = 2 + chunk_tokens
    plan = plan_chunks(
        [Segment("text", 0, 2), Segment("image", 2, end), Segment("text", end, tokens)],
        chunk_tokens,
        modalities=["image"],
        sink_tokens=0,
        window_tokens=0,
    )
    (merged,) = merge_requests({"image": mergers(chunk_tokens)[index]}, FRAME, [cache], [plan])
    assert merged.positions.tolist() == [0, 1, 1 + chunk_tokens, tokens - 2, tokens - 1]
    torch.testing.assert_close(merged.bias[:, :, 2], torch.full(SHAPE, math.log(chunk_tokens)))
    query = torch.randn(8)
    full = attention(query, cache.keys, cache.values, torch.zeros(*SHAPE, tokens))
    found = attention(query, merged.keys, merged.values, merged.bias)
    torch.testing.assert_close(found, full, rtol=1e-4, atol=1e-5)


def test_without_the_bias_equal_tokens_do_not_merge_exactly() -> None:
    cache = random_cache(6)
    for part in (cache.keys, cache.values):
        part[:, :, :5] = part[:, :, :1]
    plan = plan_chunks([Segment("text", 0, 6)], 5, sink_tokens=0, window_tokens=0)
    merger = MeanMerger(5, has_bias=False)
    (merged,) = merge_requests({"text": merger}, FRAME, [cache], [plan])
    query = torch.ones(8)
    full = attention(query, cache.keys, cache.values, torch.zeros(*SHAPE, 6))
    found = attention(query, merged.keys, merged.values, merged.bias)
    assert (full - found).abs().max() > 0.01


@pytest.mark.parametrize("index", range(5))
def test_a_shift_of_all_positions_rotates_keys_and_changes_nothing_else(index: int) -> None:
    """Attention of a query that shifts as well is the same, whatever the network learned."""
    merger, shift, tokens = mergers(4)[index], 40, 14
    cache = random_cache(tokens)
    plan = plan_chunks([Segment("text", 0, tokens)], 4, sink_tokens=1, window_tokens=2)
    (merged,) = merge_requests({"text": merger}, FRAME, [cache], [plan])

    def shifted(part: Tensor) -> Tensor:
        return torch.cat((torch.zeros(*SHAPE, shift, *part.shape[3:]), part), 2)

    moved = RequestCache(
        shifted(FRAME.rotate(cache.keys, torch.tensor(shift))),
        shifted(cache.values),
        shifted(cache.significance),
    )
    later = plan_chunks(
        [Segment("other", 0, shift), Segment("text", shift, shift + tokens)],
        4,
        sink_tokens=shift + 1,
        window_tokens=2,
    )
    (found,) = merge_requests({"text": merger}, FRAME, [moved], [later])
    turned = FRAME.rotate(merged.keys, torch.tensor(shift))
    torch.testing.assert_close(found.keys[:, :, shift:], turned, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.values[:, :, shift:], merged.values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.bias[:, :, shift:], merged.bias, rtol=1e-4, atol=1e-4)


def test_a_network_on_keys_of_absolute_positions_is_not_equivariant() -> None:
    """The negative control of the test before: without the frame, a shift changes the result."""
    frame = RopeFrame(torch.zeros(4))
    merger, cache = mergers(4)[3], random_cache(4)
    plan = plan_chunks([Segment("text", 0, 4)], 4, sink_tokens=0, window_tokens=0)
    (merged,) = merge_requests({"text": merger}, frame, [cache], [plan])
    turned = RequestCache(
        FRAME.rotate(cache.keys, torch.tensor(40)), cache.values, cache.significance
    )
    (found,) = merge_requests({"text": merger}, frame, [turned], [plan])
    assert (found.values - merged.values).abs().max() > 0.01


@given(
    tokens=st.integers(0, 40),
    chunk_tokens=st.integers(2, 6),
    sinks=st.integers(0, 3),
    window=st.integers(0, 8),
)
def test_every_token_is_merged_once_or_kept(
    tokens: int, chunk_tokens: int, sinks: int, window: int
) -> None:
    """For every remainder: the tokens of no whole chunk stay as they are, to the bit."""
    cache = random_cache(tokens)
    plan = plan_chunks(
        [Segment("text", 0, tokens)], chunk_tokens, sink_tokens=sinks, window_tokens=window
    )
    inner = max(0, tokens - sinks - window)
    chunks = inner // chunk_tokens
    assert plan.merged_tokens == tokens - chunks * (chunk_tokens - 1)
    merger = GatedMerger(GEOMETRY, chunk_tokens, 4).requires_grad_(False)
    (merged,) = merge_requests({"text": merger}, FRAME, [cache], [plan])
    assert merged.keys.shape[2] == plan.merged_tokens
    assert merged.positions.tolist() == sorted(merged.positions.tolist())
    kept = torch.isin(merged.positions, torch.tensor(plan.kept, dtype=torch.int64))
    at = merged.positions[kept]
    assert at.tolist() == list(plan.kept)
    assert torch.equal(merged.keys[:, :, kept], cache.keys[:, :, at])
    assert torch.equal(merged.values[:, :, kept], cache.values[:, :, at])
    assert not merged.bias[:, :, kept].any()
    assert merged.keys.isfinite().all()
    assert merged.bias.isfinite().all()


def test_chunks_do_not_cross_segments_and_each_modality_has_its_network() -> None:
    cache = random_cache(20)
    segments = [Segment("text", 0, 7), Segment("image", 7, 14), Segment("text", 14, 20)]
    plan = plan_chunks(segments, 3, modalities=("text", "image"), sink_tokens=1, window_tokens=1)
    assert plan.chunks == {"text": (1, 4, 14), "image": (7, 10)}
    assert plan.kept == (0, 13, 17, 18, 19)
    text, image = mergers(3)[3], mergers(3)[0]
    (merged,) = merge_requests({"text": text, "image": image}, FRAME, [cache], [plan])
    by_position = dict(zip(merged.positions.tolist(), range(20), strict=False))
    (pooled,) = merge_requests({"text": image, "image": image}, FRAME, [cache], [plan])
    torch.testing.assert_close(merged.keys[:, :, by_position[9]], pooled.keys[:, :, by_position[9]])
    assert not torch.allclose(merged.keys[:, :, by_position[3]], pooled.keys[:, :, by_position[3]])


def test_a_batch_gives_what_its_requests_give_one_by_one() -> None:
    caches = [random_cache(tokens, seed) for seed, tokens in enumerate((13, 0, 5, 22))]
    plans = [
        plan_chunks([Segment("text", 0, cache.keys.shape[2])], 5, sink_tokens=1, window_tokens=2)
        for cache in caches
    ]
    network = {"text": mergers(5)[3]}
    together = merge_requests(network, FRAME, caches, plans)
    for cache, plan, found in zip(caches, plans, together, strict=True):
        (alone,) = merge_requests(network, FRAME, [cache], [plan])
        _assert_equal(found, alone)


def _assert_equal(one: MergedCache, other: MergedCache) -> None:
    assert torch.equal(one.positions, other.positions)
    for name in ("keys", "values", "bias"):
        ours, theirs = getattr(one, name), getattr(other, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_wrong_segments_and_chunks_are_refused() -> None:
    with pytest.raises(ConfigError, match="consecutive segments"):
        plan_chunks([Segment("text", 0, 4), Segment("text", 5, 9)], 2)
    with pytest.raises(ConfigError, match="chunk_tokens=1"):
        plan_chunks([Segment("text", 0, 4)], 1)
    plan = plan_chunks([Segment("text", 0, 9)], 3, sink_tokens=0, window_tokens=0)
    with pytest.raises(ConfigError, match="expected 2"):
        merge_requests({"text": MeanMerger(2)}, FRAME, [random_cache(9)], [plan])


@pytest.mark.parametrize("index", [2, 3])
def test_equal_keys_and_values_that_are_constant_give_finite_numbers(index: int) -> None:
    nothing = torch.zeros(*SHAPE, 8, 8)
    cache = RequestCache(nothing, nothing, torch.zeros(*SHAPE, 8))
    plan = plan_chunks([Segment("text", 0, 8)], 4, sink_tokens=0, window_tokens=0)
    (merged,) = merge_requests({"text": mergers(4)[index]}, FRAME, [cache], [plan])
    assert merged.keys.isfinite().all()
    assert merged.values.isfinite().all()
