from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS, UNTRACKED
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, KeyOrder
from triptych.kernels import Section, attend_rotated, decode_attention, rotate_back
from triptych.kernels.codec.quantizer import encode
from triptych.kernels.decode import gpu
from triptych.kernels.decode.byte_products import DIGITS, byte_logits

NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def attend(
    device: Any, query: Tensor, arena: Tensor, sections: Sequence[Section], **options: Any
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the kernels, copied to the CPU."""
    slots = options.pop("slots", torch.arange(len(query), dtype=torch.int32))
    options.setdefault("scale", query.shape[2] ** -0.5)
    options = {
        name: value.to(device.name) if isinstance(value, Tensor) else value
        for name, value in options.items()
    }
    query, arena, slots = device.take(query, arena, slots)
    lse = torch.empty(query.shape[:2], device=device.name)
    moved = [device.section(section) for section in sections]
    out = decode_attention.on("cuda")(query, arena, moved, slots, lse=lse, **options)
    assert out.dtype == torch.float32
    return out.cpu(), lse.cpu()


def check(
    device: Any, query: Tensor, arena: Tensor, sections: Sequence[Section], **options: Any
) -> None:
    """Compare to the reference: float32 queries closely, bfloat16 queries roughly.

    bfloat16 queries are rounded to 15 bits of their largest number: 1.3e-4 of a log-sum-exp at most
    in some random batches. Where keys have a scale for each channel, it multiplies the query, and
    the product is rounded to fp16: logits have errors of 2**-12 of each channel's part, 1.2e-3 at
    most in twelve batches.
    """
    got, lse = attend(device, query, arena, sections, **options)
    slots = options.pop("slots", torch.arange(len(query), dtype=torch.int32))
    options.setdefault("scale", query.shape[2] ** -0.5)
    want_lse = torch.empty_like(lse)
    reference = decode_attention.on("reference")
    want = reference(query.float(), arena, sections, slots, lse=want_lse, **options)
    tolerance = 1e-5 if query.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    is_scaled = any(section.layout.format.codes_whole_pages for section in sections)
    rough = 2e-3 if is_scaled else 3e-4
    closeness = 1e-5 if query.dtype == torch.float32 else rough
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=closeness)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["k8v4", "k4v2"])
def test_key_codes_are_multiplied_as_the_reference_of_bytes_does(
    name: str, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    """To the rounding of float32, where exact products of 16-bit queries differ by 1e-4."""
    cache = new_cache(64, pages=60)
    stored = cache.fill(name, [[50], [7]], order="token")
    query = (torch.randn(2, 4, 64) * torch.tensor([1e-3, 1.0, 30.0, 4.0])[:, None]).to(dtype)
    _, lse = attend(device, query, cache.arena, [stored.section], scale=0.125)
    for row, count in enumerate((50, 7)):
        coded = encode(stored.key[row, 0, :count].float(), int(name[1]), 1)
        logits = byte_logits(
            query[row], coded.codes, *coded.metadata[:, 0].unbind(-1), DIGITS[dtype]
        )
        want = (logits * 0.125).logsumexp(-1)
        torch.testing.assert_close(lse[row], want, rtol=2e-6, atol=2e-6)


def backward(section: Section) -> Section:
    """The same section with a backward page table."""
    return replace(section, pages=section.pages.flip(-1), backward=True)


@pytest.mark.parametrize(
    ("name", "head_dim", "order"),
    [
        *((name, 64, "token") for name in FORMATS),
        *((name, 96, "channel") for name in FORMATS),
        *((name, 96, "channel") for name in LATENTS),
        ("k8v4", 16, "token"),
        ("k4v2", 128, "token"),
        ("fp16", 256, "channel"),
        ("k4v4", 256, "token"),
    ],
)
def test_attention_over_pages_equals_dense_attention_over_decoded_tokens(
    name: str, head_dim: int, order: KeyOrder, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, pages=30)
    stored = cache.fill(name, [[1, 33], [70, 5]], order=order)
    check(device, torch.randn(2, 6, head_dim), cache.arena, [stored.section])


@pytest.mark.parametrize("heads", [16, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_latents_are_read_by_programs_that_share_their_heads(
    heads: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(512 + 64, pages=30)
    stored = [
        cache.fill("latent8/8", [[3], [20]]).section,
        backward(cache.fill("latent4", [[33], [1]]).section),
        cache.fill("latent16", [[1], [17]]).section,
    ]
    check(device, torch.randn(2, heads, 512 + 64).to(dtype), cache.arena, stored)


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_warps_of_an_amd_gpu_each_multiply_a_slice_of_wide_heads(
    dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    """Of pages with more tokens than a program reads at a time, one of them not full."""
    cache = new_cache(512 + 64, pages=30)
    counts = {"latent16": 9, "latent8": 60, "latent4": 110, "latent_fp8": 20}
    stored = [cache.fill(name, [[count]]).section for name, count in counts.items()]
    check(device, torch.randn(1, 10, 512 + 64).to(dtype), cache.arena, stored, softcap=3.0)


@pytest.mark.parametrize("name", ALONE)
def test_biases_are_added_to_logits_after_the_cap(
    name: str, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    stored = [
        cache.fill(name, [[1, 33], [40, 5]], has_bias=True).section,
        cache.fill("k8v8/8", [[2, 7], [9, 3]], order="token").section,
    ]
    check(device, torch.randn(2, 4, 64), cache.arena, stored, softcap=2.0)


@pytest.mark.parametrize("byte", [0x00, 0x7E, 0xFF, None])
@pytest.mark.parametrize("name", [*FORMATS, UNTRACKED])
def test_unused_bytes_of_pages_do_not_change_the_output(
    name: str, byte: int | None, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30, byte=byte)
    stored = cache.fill(name, [[1], [57]])
    check(device, torch.randn(2, 2, 64).bfloat16(), cache.arena, [stored.section])


@pytest.mark.parametrize("group", [1, 7, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_query_heads_of_a_group_get_an_output(
    group: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(128, pages=30)
    stored = [cache.fill("k8v4", [[40, 5]]).section, cache.fill("k4v2", [[3, 60]]).section]
    check(device, torch.randn(1, 2 * group, 128).to(dtype), cache.arena, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_sections_of_several_formats_are_one_softmax(
    head_dim: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, pages=100)
    stored = [
        cache.fill("k8v4", [[90, 0], [0, 64]], order="token").section,
        backward(cache.fill("k4v2", [[0, 150], [56, 0]], order="token").section),
        cache.fill("fp16", [[64, 1], [13, 1]]).section,
        cache.fill("k4v4", [[0, 9], [1, 45]]).section,
        backward(cache.fill("k8v8", [[2, 0], [0, 30]]).section),
    ]
    check(device, torch.randn(2, 6, head_dim).to(dtype), cache.arena, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["k8v8/8", "fp16/4", "k8v4/4"])
def test_small_pages_are_one_softmax_with_whole_ones(
    name: str, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=60)
    stored = [
        cache.fill(name, [[37, 1], [3, 20]], order="token").section,
        cache.fill("k8v4", [[90, 0], [0, 64]], order="token").section,
    ]
    check(device, torch.randn(2, 6, 64).to(dtype), cache.arena, stored)


def test_a_long_row_split_into_runs_gives_the_same_output(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=100)
    stored = [cache.fill("k8v4", [[1500], [3]]).section, cache.fill("fp16", [[60], [1]]).section]
    check(device, torch.randn(2, 3, 64), cache.arena, stored)


@pytest.mark.parametrize("processors", [1, 132])
def test_one_long_request_among_short_ones_shares_their_programs(
    processors: int, device: Any, new_cache: NewCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few programs runs are longer than the shortest ones."""
    monkeypatch.setattr(gpu, "processors", lambda _device: processors)  # pyright: ignore[reportUnknownLambdaType]
    cache = new_cache(64, pages=300)
    long, short = [[2500, 900], [90, 9]], [[3, 1], [0, 40], [17, 16], [1, 0]]
    stored = [
        cache.fill("k8v4", [*short, long[0]]).section,
        backward(cache.fill("k4v2", [long[1], *short]).section),
        cache.fill("fp16", [[1, 60]] * 5).section,
    ]
    check(device, torch.randn(5, 4, 64), cache.arena, stored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_outputs_that_are_rotated_back_have_the_bits_of_two_ops(
    head_dim: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, pages=60)
    stored = cache.fill("k8v4", [[90, 3], [5, 40]], order="token").section
    query, arena, slots = device.take(
        torch.randn(2, 6, head_dim), cache.arena, torch.arange(2, dtype=torch.int32)
    )
    given = query, arena, [device.section(stored)], slots
    got = attend_rotated.on("cuda")(*given, dtype, scale=0.1)
    mixed = decode_attention.on("cuda")(*given, scale=0.1)
    assert torch.equal(got, rotate_back.on("cuda")(mixed, dtype))
    plain = query.cpu(), cache.arena, [stored], slots.cpu()
    want = attend_rotated.on("reference")(*plain, dtype, scale=0.1)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    for one in got.cpu(), attend_rotated.on("cpu")(*plain, dtype, scale=0.1):
        torch.testing.assert_close(one, want, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("window", [1, 7, 50, 1000])
def test_a_window_hides_keys_that_are_too_old(
    window: int, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=60)
    stored = [
        cache.fill("k8v4", [[100, 60], [1, 33]]).section,
        cache.fill("fp16", [[20, 20], [20, 20]], first_position=100).section,
    ]
    positions = torch.full((2,), 119, dtype=torch.int32)
    query = torch.randn(2, 4, 64)
    check(device, query, cache.arena, stored, window=window, positions=positions)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("name", ["fp16", "k8v4"])
def test_a_soft_cap_bounds_the_logits(
    name: str, softcap: float, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    stored = cache.fill(name, [[100, 60]])
    check(device, torch.randn(1, 4, 64) * 20, cache.arena, [stored.section], softcap=softcap)


@pytest.mark.parametrize("size", [1e-30, 1e-6, 100.0, 1e6])
def test_queries_of_any_size_keep_their_digits(
    size: float, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    stored = cache.fill("k8v4", [[100, 60]])
    query = torch.randn(1, 4, 64) * size
    check(device, query, cache.arena, [stored.section], scale=min(1.0, 10 / size))


@pytest.mark.parametrize("size", [1e-4, 1e3])
def test_values_of_any_magnitude_keep_their_accuracy(
    size: float, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    vectors = torch.randn(1, 1, 50, 64)
    stored = cache.fill("k4v2", [[50]], vectors=(vectors, vectors * size)).section
    query = torch.randn(1, 2, 64).bfloat16()
    got, _ = attend(device, query, cache.arena, [stored])
    slots = torch.zeros(1, dtype=torch.int32)
    want = decode_attention.on("reference")(query, cache.arena, [stored], slots, scale=0.125)
    torch.testing.assert_close(got / size, want / size, rtol=2e-3, atol=2e-3)


def test_requests_read_the_tables_of_their_slots_through_any_strides(
    device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=60)
    section = cache.fill("k8v4", [[30, 60], [70, 1], [5, 90]]).section
    wide = torch.full((3, 3, 2, 9), 2**30, dtype=torch.int32)
    wide[:, 1, :, : section.pages.shape[2]] = section.pages
    strided = replace(section, pages=wide[:, 1], tokens=section.tokens.T.contiguous().T)
    slots = torch.tensor([2, 0, 2], dtype=torch.int32)
    check(device, torch.randn(3, 4, 64), cache.arena, [strided], slots=slots)


def test_the_output_of_a_request_without_tokens_is_zero(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=30)
    section = cache.fill("k8v4", [[0, 3]]).section
    got, lse = attend(device, torch.randn(1, 4, 64), cache.arena, [section])
    assert (got[0, :2] == 0).all()
    assert (lse[0, :2] == float("-inf")).all()
    assert got[0, 2:].abs().min() > 0


def _page_out_of_range(section: Section) -> Section:
    return replace(section, pages=section.pages * 0 + 10**6)


def _negative_page(section: Section) -> Section:
    return replace(section, pages=section.pages * 0 - 7)


def _more_tokens_than_pages(section: Section) -> Section:
    return replace(section, tokens=section.tokens * 5)


def _fewer_slots(section: Section) -> Section:
    return replace(section, pages=section.pages[:1], tokens=section.tokens[:1])


@pytest.mark.parametrize(
    "spoil", [_page_out_of_range, _negative_page, _more_tokens_than_pages, _fewer_slots]
)
def test_page_tables_out_of_range_give_nan(
    spoil: Callable[[Section], Section], device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    section = spoil(cache.fill("k8v4", [[40, 40], [40, 40]]).section)
    got, lse = attend(device, torch.randn(2, 4, 64), cache.arena, [section])
    assert got[1].isnan().all()
    assert lse[1].isnan().all()


def test_unsupported_inputs_are_an_error(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=30)
    section = cache.fill("k8v4", [[4]]).section
    with pytest.raises(ConfigError, match="positions"):
        attend(device, torch.randn(1, 1, 64), cache.arena, [section], window=3)
    with pytest.raises(ConfigError, match="expected 1, 128"):
        attend(device, torch.randn(1, 1, 128), cache.arena, [section])
