"""Tests of the call cache: values of one tensor are never used for another."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch

from triptych.core.errors import ConfigError
from triptych.kernels.bench.attention_cpu import Case, Shape, build_case
from triptych.kernels.bench.selection import SelectionCase
from triptych.kernels.codegen.call_cache import CallCache
from triptych.kernels.decode import decode_attention
from triptych.kernels.select import Rule


@pytest.fixture
def case() -> Case:
    shape = Shape()
    return build_case(shape, "k8v4", torch.randn(2, shape.heads, shape.head_dim), 200)


def attend(backend: str, case: Case, arena: torch.Tensor) -> torch.Tensor:
    slots = torch.arange(2).int()
    return decode_attention.on(backend)(case.query, arena, case.sections, slots, scale=0.125)


def test_the_same_tables_are_read_in_another_arena(case: Case) -> None:
    first = attend("cpu", case, case.arena)
    other = case.arena.roll(1, 0)
    torch.testing.assert_close(first, attend("reference", case, case.arena), atol=1e-4, rtol=1e-4)
    second = attend("cpu", case, other)
    torch.testing.assert_close(second, attend("reference", case, other), atol=1e-4, rtol=1e-4)
    assert not torch.equal(first, second)


def test_a_wrong_arena_is_refused_after_a_right_one(case: Case) -> None:
    attend("cpu", case, case.arena)
    for _ in range(2):
        with pytest.raises(ConfigError, match="bytes"):
            attend("cpu", case, case.arena[:, :-8].contiguous())


def test_another_rule_gives_another_selection_from_the_same_tables(case: Case) -> None:
    few, many = (SelectionCase.of(case, "moments", Rule.of(share), 200) for share in (0.3, 0.8))
    few.select("cpu")
    many.summaries[:] = few.summaries
    many.select("cpu")
    assert (many.page_lists.counts > few.page_lists.counts).all()


def test_page_lists_can_be_used_for_the_requests_of_another_call(case: Case) -> None:
    chosen = SelectionCase.of(case, "moments", Rule.of(0.5), 200)
    chosen.select("cpu")
    both = chosen.attend("cpu")
    second = decode_attention.on("cpu")(
        case.query[1:],
        case.arena,
        case.sections,
        torch.tensor([1]).int(),
        scale=case.query.shape[2] ** -0.5,
        page_lists=chosen.page_lists.of(torch.tensor([1]).int()),
    )
    torch.testing.assert_close(second, both[1:], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="expected 2"):
        decode_attention.on("cpu")(
            case.query, case.arena, case.sections, torch.arange(2).int(), scale=0.125,
            page_lists=chosen.page_lists.of(torch.tensor([1]).int()),
        )  # fmt: skip


def test_copied_page_lists_are_read_from_their_own_memory(case: Case) -> None:
    chosen = SelectionCase.of(case, "moments", Rule.of(0.3), 200)
    chosen.select("cpu")
    chosen.attend("cpu")
    first = chosen.page_lists
    fewer = replace(first, ordinals=first.ordinals.clone(), counts=first.counts - 1)
    few = replace(chosen, page_lists=fewer)
    torch.testing.assert_close(few.attend("cpu"), few.attend("reference"), atol=1e-4, rtol=1e-4)
    assert not torch.equal(few.attend("cpu"), chosen.attend("cpu"))


def test_an_arena_is_freed_with_the_sections_that_cache_it(case: Case) -> None:
    arena = case.arena.clone()
    held, sections = weakref.ref(arena), [replace(section) for section in case.sections]
    gc.disable()
    try:
        decode_attention.on("cpu")(case.query, arena, sections, torch.arange(2).int(), scale=0.125)
        del arena
        assert held() is not None
        del sections
        assert held() is None
    finally:
        gc.enable()


def test_a_failed_computation_is_not_cached() -> None:
    cache, calls = CallCache(), list[int]()

    def compute(number: int) -> int:
        calls.append(number)
        return 12 // number

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.get(lambda: compute(0), 0)
    assert [cache.get(partial(compute, number), number) for number in (3, 3, 4)] == [4, 4, 3]
    assert calls == [0, 0, 3, 4]
