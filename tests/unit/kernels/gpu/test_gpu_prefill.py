from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS
from triptych.core.errors import ConfigError
from triptych.kernels import Past, prefill_attention

NewCache = Callable[..., Any]
"""``conftest.Cache``."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
RAGGED = [1, 70, 0, 40]
"""Number of new tokens of each sequence."""


def offsets_of(counts: list[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts) + 1)]


def check(
    device: Any,
    counts: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    past: Past | None = None,
    also_plain: bool = False,
    sinks: Tensor | None = None,
    **options: Any,
) -> None:
    """Compare output and significance to the reference; nothing else may be written.

    ``also_plain``: the output without significance must be the same.
    """
    offsets = offsets_of(counts)
    query = torch.randn(offsets[-1], heads, head_dim).to(dtype)
    # Keys and values are views of one tensor, as in the models.
    both = torch.randn(offsets[-1], kv_heads, 2 * head_dim).to(dtype)
    key, value = both[..., :head_dim], both[..., head_dim:]
    longest = max(counts) + (0 if past is None else int(past.tokens.max()))
    want_sums = torch.rand(len(counts), heads, longest + 3)
    (got_sums,) = device.take(want_sums.clone())
    options = {"scale": head_dim**-0.5, **options}
    want = prefill_attention.on("reference")(
        query, key, value, offsets, past=past, significance=want_sums, sinks=sinks, **options
    )
    moved = None
    if past is not None:
        arena, pages, tokens = device.take(past.arena, past.pages, past.tokens)
        moved = Past(arena, past.layout, pages, tokens)
    inputs = device.take(query, key, value)
    if sinks is not None:
        (options["sinks"],) = device.take(sinks)
    attend = prefill_attention.on("cuda")
    got = attend(*inputs, offsets, past=moved, significance=got_sums, **options)
    assert got.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)
    limit = tolerance if dtype == torch.float32 else 2 * tolerance
    torch.testing.assert_close(got_sums.cpu(), want_sums, rtol=limit, atol=limit)
    if also_plain:
        plain = attend(*inputs, offsets, past=moved, **options)
        torch.testing.assert_close(plain, got, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 256, 576])
def test_each_sequence_attends_to_itself_causally(head_dim: int, device: Any) -> None:
    check(device, RAGGED, 4, 2, head_dim, also_plain=True)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 2), (16, 1)])
def test_query_heads_share_the_keys_of_their_group(heads: int, kv_heads: int, device: Any) -> None:
    check(device, [35, 3], heads, kv_heads, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_16_bit_inputs_give_an_output_of_the_same_type(
    head_dim: int, dtype: torch.dtype, device: Any
) -> None:
    check(device, RAGGED, 4, 2, head_dim, dtype)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 1.5},
        {"sinks": torch.tensor([-100.0, 2.0])},
        {"two_way": (False, True, False)},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_before_the_block_of_a_query_are_seen_whole(
    head_dim: int, options: dict[str, Any], device: Any
) -> None:
    """Longer than the largest block, so that tiles without masks are read too."""
    check(device, [300, 129, 5], 2, 1, head_dim, torch.bfloat16, also_plain=True, **options)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 33}, {"softcap": 1.5}])
def test_windows_and_soft_caps_change_the_weights(options: dict[str, Any], device: Any) -> None:
    check(device, RAGGED, 4, 2, 64, **options)


@pytest.mark.parametrize("options", [{"also_plain": True}, {"window": 20}, {"softcap": 1.5}])
@pytest.mark.parametrize("name", [None, "k8v4"])
def test_some_sequences_attend_in_both_directions(
    name: str | None, options: dict[str, Any], device: Any, new_cache: NewCache
) -> None:
    past = None
    if name is not None:
        cache = new_cache(64, pages=60)
        section = cache.fill(name, [[40, 11], [0, 0], [3, 9]]).section
        past = Past(cache.arena, section.layout, section.pages, section.tokens)
    check(device, [70, 33, 16], 4, 2, 64, past=past, two_way=(True, False, True), **options)


@pytest.mark.parametrize("options", [{"also_plain": True}, {"window": 33, "softcap": 1.5}])
def test_sinks_take_part_in_the_softmax_and_have_no_value(
    options: dict[str, Any], device: Any, new_cache: NewCache
) -> None:
    sinks = torch.tensor([-100.0, -1.0, 2.0, 40.0])
    check(device, RAGGED, 4, 2, 64, sinks=sinks, **options)
    cache = new_cache(64, pages=60)
    section = cache.fill("k8v4", [[40, 11], [0, 0]]).section
    past = Past(cache.arena, section.layout, section.pages, section.tokens)
    check(device, [20, 5], 4, 2, 64, past=past, sinks=sinks, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {"also_plain": True}) for name in (*ALONE, *LATENTS)),
        ("k4v2", {"window": 25}),
        ("fp16", {"softcap": 2.0}),
    ],
)
def test_past_pages_are_attended_before_new_keys(
    name: str, options: dict[str, Any], device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=60)
    stored = cache.fill(name, [[40, 11], [0, 0], [7, 50]], first_position=100, order="token")
    section = stored.section
    past = Past(cache.arena, section.layout, section.pages, section.tokens)
    check(device, [20, 5, 50], 4, 2, 64, past=past, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_past_pages_of_other_head_sizes(
    head_dim: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, pages=60)
    section = cache.fill("k8v4", [[70, 11], [13, 0]]).section
    past = Past(cache.arena, section.layout, section.pages, section.tokens)
    check(device, [20, 35], 4, 2, head_dim, dtype, past)


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize(("name", "dtype"), [(None, torch.float32), ("latent8", torch.bfloat16)])
def test_warps_of_an_amd_gpu_each_multiply_a_slice_of_wide_heads(
    name: str | None, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    past, dim = None, 512 + 64
    if name is not None:
        cache = new_cache(dim, pages=60)
        section = cache.fill(name, [[50], [3]]).section
        past = Past(cache.arena, section.layout, section.pages, section.tokens)
    check(device, [20, 35], 4, 1, dim, dtype, past, also_plain=True)


def test_a_page_id_out_of_range_gives_nan(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=30)
    section = cache.fill("k8v4", [[40], [3]]).section
    section.pages[0] += 10**6
    arena, pages, tokens = device.take(cache.arena, section.pages, section.tokens)
    past = Past(arena, section.layout, pages, tokens)
    query, key, value = device.take(*torch.randn(3, 6, 1, 64).unbind())
    got = prefill_attention.on("cuda")(query, key, value, [0, 3, 6], scale=0.1, past=past)
    assert got[:3].isnan().all()
    assert got[3:].isfinite().all()


def _tables(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tensor, tensor[:, :1], tensor[:, :1]


def test_without_new_tokens_the_output_is_empty(device: Any) -> None:
    (empty,) = device.take(torch.randn(0, 2, 64))
    got = prefill_attention.on("cuda")(*_tables(empty), [0, 0, 0], scale=0.1)
    assert got.shape == (0, 2, 64)


def test_unsupported_inputs_are_an_error(device: Any) -> None:
    (wide,) = device.take(torch.randn(4, 2, 640))
    attend = prefill_attention.on("cuda")
    with pytest.raises(ConfigError, match="head_dim 640"):
        attend(*_tables(wide), [0, 4], scale=0.1)
    with pytest.raises(ConfigError, match="float64"):
        attend(*_tables(wide[..., :64].double()), [0, 4], scale=0.1)
