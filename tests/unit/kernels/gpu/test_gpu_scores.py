from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.moves import ALONE, LATENTS
from triptych.core.errors import ConfigError
from triptych.kernels import Section, decode_attention, record_scores, score_tokens

NewCache = Callable[..., Any]
"""``conftest.Cache``."""


def check(
    device: Any, query: Tensor, arena: Tensor, sections: Sequence[Section], **options: Any
) -> None:
    """Compare the bytes of all pages to the reference, scores within rounding errors."""
    slots = options.pop("slots", torch.arange(len(query), dtype=torch.int32))
    options = {"scale": query.shape[2] ** -0.5, **options}
    weight = options.pop("weight", 1.0)
    lse = torch.empty(query.shape[:2])
    decode_attention.on("reference")(query, arena, sections, slots, lse=lse, **options)
    # Twice: scores are added to.
    want, (got,) = arena.clone(), device.take(arena.clone())
    for _ in range(2):
        score_tokens.on("reference")(query, want, sections, slots, lse, weight=weight, **options)
        moved = {
            name: value.to(device.name) if isinstance(value, Tensor) else value
            for name, value in options.items()
        }
        inputs = device.take(query, slots, lse)
        score_tokens.on("cuda")(
            inputs[0], got, [device.section(part) for part in sections], *inputs[1:],
            weight=weight, **moved,
        )  # fmt: skip
    assert not torch.equal(want, arena)
    same = got.cpu() == want
    tolerance = 1e-4 if query.dtype == torch.float32 else 5e-3
    words = (~same).view(*want.shape[:1], -1, 4).any(2)
    mine, its = got.cpu().view(torch.float32)[words], want.view(torch.float32)[words]
    torch.testing.assert_close(mine, its, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("name", [*ALONE, *LATENTS])
def test_scores_grow_by_the_largest_weight_of_the_group(
    name: str, head_dim: int, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(head_dim, pages=30)
    order = "channel" if head_dim == 64 else "token"
    stored = cache.fill(name, [[1, 33], [70, 5]], order=order)
    check(device, torch.randn(2, 6, head_dim), cache.arena, [stored.section])


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize(
    ("name", "dtype"), [("latent16", torch.float32), ("latent4", torch.bfloat16)]
)
def test_warps_of_an_amd_gpu_each_multiply_a_slice_of_wide_heads(
    name: str, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(512 + 64, pages=30)
    stored = cache.fill(name, [[1], [40]])
    check(device, torch.randn(2, 6, 512 + 64).to(dtype), cache.arena, [stored.section])


@pytest.mark.parametrize("group", [1, 16, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_of_all_sections_and_heads_grow(
    group: int, dtype: torch.dtype, device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(128, pages=60)
    high = cache.fill("k8v4", [[40, 5], [3, 90]], order="token").section
    low = cache.fill("k4v2", [[3, 60], [0, 1]], order="token").section
    low = replace(low, pages=low.pages.flip(-1), backward=True)
    query = torch.randn(2, 2 * group, 128).to(dtype)
    slots = torch.tensor([1, 0], dtype=torch.int32)
    check(device, query, cache.arena, [high, low], slots=slots, weight=0.25)


@pytest.mark.parametrize("options", [{"window": 20}, {"softcap": 1.5}])
def test_hidden_tokens_get_no_score_and_logits_are_capped(
    options: dict[str, Any], device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    stored = cache.fill("k8v4", [[100, 60]]).section
    positions = torch.tensor([70], dtype=torch.int32)
    check(device, torch.randn(1, 4, 64) * 5, cache.arena, [stored], positions=positions, **options)


def test_requests_that_share_a_page_all_add_to_its_scores(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=30)
    section = cache.fill("fp16", [[30]]).section
    query = torch.randn(1, 2, 64)
    (want,) = device.take(cache.arena.clone())
    (got,) = device.take(cache.arena)
    lse = torch.zeros(1, 2)
    score = score_tokens.on("cuda")
    for arena, times, weight in ((want, 1, 3.0), (got, 3, 1.0)):
        repeated = device.take(query.repeat(times, 1, 1), torch.zeros(times).int())
        (sums,) = device.take(lse.repeat(times, 1))
        score(repeated[0], arena, [device.section(section)], repeated[1], sums, scale=0.1,
              weight=weight)  # fmt: skip
    words = (got != want).view(len(got), -1, 4).any(2)
    torch.testing.assert_close(got.view(torch.float32)[words], want.view(torch.float32)[words])


def test_a_row_with_a_page_id_out_of_range_keeps_its_scores(
    device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=30)
    section = cache.fill("k8v4", [[70]]).section
    section.pages[0, 0, -1] = 10**6
    (arena,) = device.take(cache.arena.clone())
    moved, (query, slots) = (
        device.section(section),
        device.take(torch.randn(1, 2, 64), torch.zeros(1).int()),
    )
    lse = torch.empty(1, 2, device=device.name)
    decode_attention.on("cuda")(query, arena, [moved], slots, scale=0.1, lse=lse)
    score_tokens.on("cuda")(query, arena, [moved], slots, lse, scale=0.1)
    assert torch.equal(arena.cpu(), cache.arena)


def test_an_lse_of_a_wrong_shape_is_an_error(device: Any, new_cache: NewCache) -> None:
    cache = new_cache(64, pages=30)
    section = device.section(cache.fill("k8v4", [[4]]).section)
    query, slots, lse = device.take(torch.randn(1, 2, 64), torch.zeros(1).int(), torch.zeros(2, 1))
    with pytest.raises(ConfigError, match="lse"):
        score_tokens.on("cuda")(
            query, cache.arena.to(device.name), [section], slots, lse, scale=1.0
        )


def test_new_scores_are_copied_to_a_mirror_and_rows_without_a_slot_are_skipped(
    device: Any, new_cache: NewCache
) -> None:
    cache = new_cache(64, pages=40)
    section = cache.fill("k8v4", [[40, 5], [3, 90], [70, 70]]).section
    (arena,), (mirror,) = device.take(cache.arena.clone()), device.take(cache.arena.clone())
    query, slots, positions = device.take(
        torch.randn(3, 4, 64), torch.tensor([2, -1, 0]).int(), torch.tensor([92, 7, 92]).int()
    )
    lse = torch.empty(3, 4, device=device.name)
    sections = [device.section(section)]
    whole = torch.tensor([2, 1, 0], dtype=torch.int32, device=device.name)
    options = {"scale": 0.1, "positions": positions, "window": 90}
    decode_attention.on("cuda")(query, arena, sections, whole, lse=lse, **options)
    want = cache.arena.clone()
    some = [0, 2]
    score_tokens.on("reference")(
        query[some].cpu(), want, [section], slots[some].cpu(), lse[some].cpu(), scale=0.1,
        positions=positions[some].cpu(), window=90,
    )  # fmt: skip
    score_tokens.on("cuda")(query, arena, sections, slots, lse, mirror=mirror, **options)
    assert torch.equal(arena, mirror)
    assert not torch.equal(arena.cpu(), cache.arena)
    words = (arena.cpu() != want).view(len(want), -1, 4).any(2)  # else NaN of unused bytes
    mine, its = arena.cpu().view(torch.float32)[words], want.view(torch.float32)[words]
    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize("rows", [1, 5])
def test_progress_is_recorded_for_rows_with_a_slot(backend: str, rows: int, device: Any) -> None:
    slots = torch.tensor([3, -1, 0, 6, -1])[:rows].int()
    positions = torch.tensor([100, 7, 2**30, 0, 3])[:rows].int()
    progress = torch.full((8,), -5, dtype=torch.int64)
    want = progress.clone()
    for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
        if slot >= 0:
            want[slot] = position * 48 + 17
    inputs = (progress, slots, positions)
    if backend == "cuda":
        inputs = device.take(*inputs)
    record_scores.on(backend)(*inputs, 16, 48)
    assert torch.equal(inputs[0].cpu(), want)
