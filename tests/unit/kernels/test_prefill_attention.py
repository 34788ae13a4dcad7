from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS
from triptych.kernels import Past, multiplies_words, prefill_attention, significance_of
from triptych.kernels.prefill.cpu_bfloat import SHARE, STRIPE

BACKENDS = [name for name in prefill_attention.backends if name != "cuda"]
"""Backends on the CPU; tests of the GPU backend are in ``gpu/``."""
NewCache = Callable[..., Any]
"""``conftest.Cache``."""
RAGGED = [1, 70, 0, 129, 16]
"""Number of new tokens of each sequence."""


@dataclass(frozen=True)
class Batch:
    query: Tensor
    key: Tensor
    value: Tensor
    offsets: list[int]


def ragged_batch(
    counts: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> Batch:
    offsets = [sum(counts[:index]) for index in range(len(counts) + 1)]
    query = torch.randn(offsets[-1], heads, head_dim).to(dtype)
    key, value = torch.randn(2, offsets[-1], kv_heads, head_dim).to(dtype)
    return Batch(query, key, value, offsets)


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    two_way: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one head in float64: output [n, d], sums [N]; the last n keys are new.

    A sink is one more key, whose value is not added. ``two_way``: all new keys are visible.
    """
    asked = positions[-len(query) :, None]
    logits = query.double() @ key.double().T * query.shape[1] ** -0.5
    if softcap > 0:
        logits = softcap * (logits / softcap).tanh()
    hidden = positions > asked
    if window > 0:
        hidden |= asked - positions >= window
    if two_way:
        hidden[:, -len(query) :] = False
    logits = logits.masked_fill(hidden, float("-inf"))
    if sink is not None:
        logits = torch.cat([logits, sink.double().expand(len(query), 1)], 1)
    weights = logits.softmax(-1)[:, : len(key)]
    return weights @ value.double(), weights.sum(0)


def check(
    backend: str,
    batch: Batch,
    tolerance: float,
    sinks: Tensor | None = None,
    two_way: Sequence[bool] = (),
    **options: Any,
) -> None:
    """Compare output and significance of a batch without a past to ``dense``, by head."""
    heads, kv_heads, dim = batch.query.shape[1], batch.key.shape[1], batch.query.shape[2]
    longest = max(end - start for start, end in pairwise(batch.offsets))
    sums = torch.zeros(len(batch.offsets) - 1, heads, longest)
    got = prefill_attention.on(backend)(
        batch.query,
        batch.key,
        batch.value,
        batch.offsets,
        scale=dim**-0.5,
        significance=sums,
        sinks=sinks,
        two_way=two_way,
        **options,
    )
    assert got.dtype == batch.query.dtype
    # Weights of bfloat16 inputs are bfloat16 numbers on the CPU, within 0.5 %.
    near = 1e-5 if got.dtype == torch.float32 else 5e-3
    for index, start in enumerate(batch.offsets[:-1]):
        part = slice(start, batch.offsets[index + 1])
        count = part.stop - start
        for head in range(heads):
            mine = head * kv_heads // heads
            want, received = dense(
                batch.query[part, head],
                batch.key[part, mine],
                batch.value[part, mine],
                torch.arange(count),
                sink=None if sinks is None else sinks[head],
                two_way=bool(two_way) and two_way[index],
                **options,
            )
            torch.testing.assert_close(
                got[part, head].double(), want, rtol=tolerance, atol=tolerance
            )
            row = sums[index, head].double()
            torch.testing.assert_close(row[:count], received, rtol=near, atol=near)
            assert (row[count:] == 0).all()


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_sequence_attends_to_itself_causally(backend: str, head_dim: int) -> None:
    check(backend, ragged_batch(RAGGED, 6, 2, head_dim), 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (9, 3), (16, 1), (4, 4)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_query_heads_share_the_keys_of_their_group(backend: str, heads: int, kv_heads: int) -> None:
    check(backend, ragged_batch([50, 3], heads, kv_heads, 64), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_inputs_give_a_bfloat16_output(backend: str) -> None:
    check(backend, ragged_batch(RAGGED, 6, 2, 64, torch.bfloat16), 1e-2)


@pytest.mark.parametrize("dim", [16, 80, 128, 256])
@pytest.mark.parametrize("window", [0, 25])
def test_bfloat16_heads_of_any_size_with_windows_and_sinks(dim: int, window: int) -> None:
    batch = ragged_batch(RAGGED, 6, 2, dim, torch.bfloat16)
    two_way = [False, False, False, window > 0, False]
    check("cpu", batch, 1e-2, sinks=torch.randn(6), two_way=two_way, window=window)


@pytest.mark.parametrize("window", [0, 1500])
def test_bfloat16_weights_of_many_keys_are_made_some_keys_at_a_time(window: int) -> None:
    check("cpu", ragged_batch([2 * STRIPE + 40], 2, 1, 32, torch.bfloat16), 1e-2, window=window)


def test_no_bit_of_outputs_and_sums_depends_on_the_number_of_threads() -> None:
    batch = ragged_batch([2 * SHARE + 40], 3, 1, 64, torch.bfloat16)
    results, threads = list[tuple[Tensor, Tensor]](), torch.get_num_threads()
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        sums = torch.zeros(1, 3, batch.offsets[-1])
        inputs = batch.query, batch.key, batch.value, batch.offsets
        out = prefill_attention.on("cpu")(*inputs, scale=0.125, significance=sums)
        results.append((out, sums))
    torch.set_num_threads(threads)
    for out, sums in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(sums, results[0][1])


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 33}, {"softcap": 1.5}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_and_soft_caps_change_the_weights(backend: str, options: dict[str, Any]) -> None:
    check(backend, ragged_batch(RAGGED, 6, 2, 64), 1e-5, **options)


@pytest.mark.parametrize("options", [{}, {"window": 33, "softcap": 1.5}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_take_part_in_the_softmax_and_have_no_value(
    backend: str, options: dict[str, Any]
) -> None:
    sinks = torch.tensor([-100.0, -1.0, 0.0, 1.0, 3.0, 40.0])
    check(backend, ragged_batch(RAGGED, 6, 2, 64), 1e-5, sinks, **options)


@pytest.mark.parametrize("options", [{}, {"window": 33}, {"window": 200, "softcap": 1.5}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_some_sequences_attend_in_both_directions(backend: str, options: dict[str, Any]) -> None:
    batch = ragged_batch(RAGGED, 6, 2, 64)
    check(backend, batch, 1e-5, two_way=(True, False, True, True, False), **options)


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("backend", BACKENDS)
def test_text_then_an_image_in_both_directions_then_text(
    backend: str, window: int, new_cache: NewCache
) -> None:
    """Three calls, of which each reads those before it in pages, as one dense attention."""
    borders, heads = (0, 50, 130, 150), 4
    batch = ragged_batch([150], heads, 2, 64)
    batch = replace(batch, key=batch.key.half().float(), value=batch.value.half().float())
    sums, got = torch.zeros(1, heads, 150), torch.empty_like(batch.query)
    for start, end in pairwise(borders):
        past = past_of(new_cache(64), batch, [start]) if start else None
        part = chunk_of(batch, [start], [end])
        got[part.index] = prefill_attention.on(backend)(
            *(tensor[part.index] for tensor in (batch.query, batch.key, batch.value)),
            part.offsets,
            scale=0.125,
            past=past,
            window=window,
            significance=sums,
            two_way=(start == 50,),
        )
    at = torch.arange(150)
    in_image = (at >= 50) & (at < 130)
    seen = at <= at[:, None]
    if window:
        seen &= at[:, None] - at < window
    seen |= in_image & in_image[:, None]
    for head in range(heads):
        key, value = batch.key[:, head // 2].double(), batch.value[:, head // 2].double()
        logits = batch.query[:, head].double() @ key.T * 0.125
        weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
        torch.testing.assert_close(got[:, head].double(), weights @ value, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums[0, head].double(), weights.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_significance_is_not_needed_for_the_output(backend: str) -> None:
    batch = ragged_batch(RAGGED, 6, 2, 64)
    attend = prefill_attention.on(backend)
    arguments = (batch.query, batch.key, batch.value, batch.offsets)
    with_sums = attend(*arguments, scale=0.125, significance=torch.zeros(5, 6, 129))
    torch.testing.assert_close(attend(*arguments, scale=0.125), with_sums, rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``starts[b]`` to ``ends[b]`` of each sequence of a batch."""

    index: Tensor
    """Indices of the chunk's tokens in the batch."""
    offsets: list[int]


def chunk_of(batch: Batch, starts: list[int], ends: list[int]) -> Chunk:
    spans = list(zip(batch.offsets, starts, ends, strict=False))
    index = torch.cat([torch.arange(at + start, at + end) for at, start, end in spans])
    lengths = [end - start for _, start, end in spans]
    return Chunk(index, [sum(lengths[:count]) for count in range(len(lengths) + 1)])


def past_of(cache: Any, batch: Batch, counts: list[int]) -> Past:
    """Store the first ``counts[b]`` tokens of each sequence in float16 pages."""
    vectors = torch.zeros(2, len(counts), batch.key.shape[1], max(counts), batch.key.shape[2])
    for index, (start, count) in enumerate(zip(batch.offsets, counts, strict=False)):
        vectors[0, index, :, :count] = batch.key[start : start + count].transpose(0, 1)
        vectors[1, index, :, :count] = batch.value[start : start + count].transpose(0, 1)
    rows = [[count] * batch.key.shape[1] for count in counts]
    section = cache.fill("fp16", rows, vectors=(vectors[0], vectors[1])).section
    return Past(cache.arena, section.layout, section.pages, section.tokens)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_over_past_pages_equal_the_whole_prompt(
    backend: str, options: dict[str, Any], new_cache: NewCache
) -> None:
    batch = ragged_batch([90, 45, 20], 6, 2, 64)
    # Numbers that float16 represents exactly, so that pages add no error.
    batch = replace(batch, key=batch.key.half().float(), value=batch.value.half().float())
    first, ends = [64, 13, 0], [90, 45, 20]
    sums, whole_sums = torch.zeros(3, 6, 90), torch.zeros(3, 6, 90)

    def attend(chunk: Chunk, past: Past | None, significance: Tensor | None) -> Tensor:
        return prefill_attention.on(backend)(
            batch.query[chunk.index],
            batch.key[chunk.index],
            batch.value[chunk.index],
            chunk.offsets,
            scale=0.125,
            past=past,
            significance=significance,
            **options,
        )

    whole = attend(chunk_of(batch, [0, 0, 0], ends), None, whole_sums)
    early, late = chunk_of(batch, [0, 0, 0], first), chunk_of(batch, first, ends)
    head = attend(early, None, sums)
    past = past_of(new_cache(64), batch, first)
    tail, without_sums = attend(late, past, sums), attend(late, past, None)
    torch.testing.assert_close(head, whole[early.index], rtol=1e-5, atol=1e-5)
    for part in (tail, without_sums):
        torch.testing.assert_close(part, whole[late.index], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[], [64], [26, 128], [26, 150], [199], [7, 14, 21, 101, 150]])
def test_chunks_hardly_change_the_16_bits_of_a_token(cuts: list[int], new_cache: NewCache) -> None:
    """A value may lie where float32 sums round to either of two neighbours, but few do; none where
    the processor multiplies bfloat16."""
    batch = ragged_batch([200], 6, 2, 64, torch.bfloat16)
    attention = prefill_attention.on("cpu")

    def attend(cuts: list[int]) -> Tensor:
        parts = list[Tensor]()
        for start, end in pairwise([0, *cuts, 200]):
            past = past_of(new_cache(64), batch, [start]) if start else None
            q, k, v = (part[start:end] for part in (batch.query, batch.key, batch.value))
            parts.append(attention(q, k, v, [0, end - start], scale=0.125, past=past))
        return torch.cat(parts)

    chunked, whole = attend(cuts), attend([100])
    assert (chunked != whole).float().mean() <= (0 if multiplies_words() else 1e-3)
    torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("window", [0, 25])
@pytest.mark.parametrize("name", [*ALONE, *LATENTS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_heads_of_a_compressed_past_can_have_different_tokens(
    backend: str, name: str, window: int, new_cache: NewCache
) -> None:
    cache = new_cache(64)
    kept = [[40, 11], [0, 0], [7, 33]]
    stored = cache.fill(name, kept, first_position=100)
    past = Past(cache.arena, stored.section.layout, stored.section.pages, stored.section.tokens)
    counts = [20, 5, 30]
    batch = ragged_batch(counts, 4, 2, 64)
    sums = torch.zeros(3, 4, 80)
    got = prefill_attention.on(backend)(
        batch.query,
        batch.key,
        batch.value,
        batch.offsets,
        scale=0.125,
        window=window,
        past=past,
        significance=sums,
    )
    for index, head in product(range(3), range(4)):
        part, old = slice(*batch.offsets[index : index + 2]), kept[index][head // 2]
        first = 100 + max(kept[index]) if max(kept[index]) else 0
        positions = torch.cat(
            (stored.positions[index, head // 2, :old], first + torch.arange(counts[index]))
        )
        want, received = dense(
            batch.query[part, head],
            torch.cat((stored.key[index, head // 2, :old], batch.key[part, head // 2])),
            torch.cat((stored.value[index, head // 2, :old], batch.value[part, head // 2])),
            positions,
            window=window,
        )
        torch.testing.assert_close(got[part, head].double(), want, rtol=1e-5, atol=1e-5)
        row = sums[index, head].double()
        torch.testing.assert_close(row[: len(received)], received, rtol=1e-5, atol=1e-5)
        assert (row[len(received) :] == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_attention_of_each_query_sums_to_one(backend: str) -> None:
    batch = ragged_batch([200], 6, 2, 64)
    sums = torch.zeros(1, 6, 200)
    arguments = (batch.query, batch.key, batch.value, batch.offsets)
    prefill_attention.on(backend)(*arguments, scale=0.125, significance=sums)
    torch.testing.assert_close(sums.sum(-1), torch.full((1, 6), 200.0))


def test_significance_is_the_mean_over_later_queries_and_the_largest_of_the_group() -> None:
    sums = torch.tensor([[4.0, 3.0, 2.0, 9.0], [8.0, 1.5, 0.5, 9.0]])
    assert torch.equal(significance_of(sums, 3, 1), torch.tensor([[8.0 / 3, 1.5, 2.0]]))
    assert significance_of(torch.rand(5, 6, 10), 10, 2).shape == (5, 2, 10)
