from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from triptych.core.layout import FORMATS
from triptych.kernels import Past, prefill_attention, significance_of

BACKENDS = prefill_attention.backends
NewCache = Callable[..., Any]
"""``conftest.Cache``."""
RAGGED = [1, 70, 0, 129, 16]
"""New tokens of each sequence."""


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
) -> tuple[Tensor, Tensor]:
    """One head in float64: output [n, d] and sums [N]; the last n keys are the new ones."""
    asked = positions[-len(query) :, None]
    logits = query.double() @ key.double().T * query.shape[1] ** -0.5
    if softcap > 0:
        logits = softcap * (logits / softcap).tanh()
    hidden = positions > asked
    if window > 0:
        hidden |= asked - positions >= window
    weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights @ value.double(), weights.sum(0)


def check(backend: str, batch: Batch, tolerance: float, **options: Any) -> None:
    """Compare a batch without a past, its significance too, to ``dense`` head by head."""
    heads, kv_heads, dim = batch.query.shape[1], batch.key.shape[1], batch.query.shape[2]
    longest = max(end - start for start, end in zip(batch.offsets, batch.offsets[1:], strict=False))
    sums = torch.zeros(len(batch.offsets) - 1, heads, longest)
    got = prefill_attention.on(backend)(
        batch.query,
        batch.key,
        batch.value,
        batch.offsets,
        scale=dim**-0.5,
        significance=sums,
        **options,
    )
    assert got.dtype == batch.query.dtype
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
                **options,
            )
            torch.testing.assert_close(
                got[part, head].double(), want, rtol=tolerance, atol=tolerance
            )
            row = sums[index, head].double()
            torch.testing.assert_close(row[:count], received, rtol=1e-5, atol=1e-5)
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
def test_bfloat16_in_is_bfloat16_out(backend: str) -> None:
    check(backend, ragged_batch(RAGGED, 6, 2, 64, torch.bfloat16), 1e-2)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 33}, {"softcap": 1.5}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_windows_and_soft_caps_change_the_weights(backend: str, options: dict[str, Any]) -> None:
    check(backend, ragged_batch(RAGGED, 6, 2, 64), 1e-5, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_significance_is_not_needed_for_the_output(backend: str) -> None:
    batch = ragged_batch(RAGGED, 6, 2, 64)
    attend = prefill_attention.on(backend)
    arguments = (batch.query, batch.key, batch.value, batch.offsets)
    with_sums = attend(*arguments, scale=0.125, significance=torch.zeros(5, 6, 129))
    assert torch.equal(attend(*arguments, scale=0.125), with_sums)


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"softcap": 2.0}])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunks_over_a_past_in_pages_are_the_whole(
    backend: str, options: dict[str, Any], new_cache: NewCache
) -> None:
    # Numbers that float16 holds exactly, so that the pages lose nothing.
    counts, first = [90, 45], [64, 13]
    batch = ragged_batch(counts, 6, 2, 64)
    key, value = (part.half().float() for part in (batch.key, batch.value))
    whole_sums, sums = torch.zeros(2, 6, 90), torch.zeros(2, 6, 90)
    attend = prefill_attention.on(backend)
    whole = attend(
        batch.query, key, value, batch.offsets, scale=0.125, significance=whole_sums, **options
    )
    starts = [[0, first[0]], [90, 90 + first[1]]]
    early = torch.cat([torch.arange(*start) for start in starts])
    late = torch.cat([torch.arange(starts[0][1], 90), torch.arange(starts[1][1], 135)])
    head = attend(
        batch.query[early], key[early], value[early], [0, 64, 77],
        scale=0.125, significance=sums, **options,
    )  # fmt: skip
    cache = new_cache(64)
    stored = cache.fill(
        "fp16",
        [[count, count] for count in first],
        vectors=tuple(
            torch.stack([part[:64], part[90:154].new_zeros(64, 2, 64)]).transpose(1, 2)
            for part in (key, value)
        )
        if False
        else _first_chunks(key, value, first),
    )
    past = Past(cache.arena, stored.section.layout, stored.section.pages, stored.section.tokens)
    tail = attend(
        batch.query[late], key[late], value[late], [0, 26, 58],
        scale=0.125, past=past, significance=sums, **options,
    )  # fmt: skip
    torch.testing.assert_close(head, whole[early], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(tail, whole[late], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, whole_sums, rtol=1e-5, atol=1e-5)
