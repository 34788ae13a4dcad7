"""Tests of the list of layouts that engines, ahead-of-time compilation and benchmarks share."""

import json

import numpy as np
import pytest
import torch

from triptych.core.layout import FORMATS
from triptych.core.methods.table import METHODS
from triptych.core.table_layouts import TableLayouts
from triptych.kernels.bench.attention_cpu import Shape, build_case, check_case
from triptych.kernels.codegen.variants import SERVED, all_variants
from triptych.kernels.served_layouts import PROFILED, served_layouts
from triptych.kernels.triton.triton_layout import form_of
from triptych.workers.models.compression_profile import PACKAGED


def test_every_method_and_format_has_its_layouts() -> None:
    served = served_layouts(128)
    known = {section for one in served.values() for section in [one.sections]}
    assert len(known) == len(served)
    formats = {layout.format.name for one in served.values() for layout, _ in one.sections}
    assert formats == set(FORMATS)
    assert {"diffkv", "learned:merge", "kivi", "kvarn", "streaming_llm"} <= set(served)
    assert set(served) <= {*METHODS.builtin, *(f"uniform:{name}" for name in FORMATS), PROFILED}
    assert all(
        layout.key_order == "token"
        for one in served.values()
        for layout, _ in one.sections
        if layout.format.is_quantized
    )


def test_the_included_profile_stores_what_is_compiled_by_default() -> None:
    (profile,) = PACKAGED.glob("*.json")
    settings = json.loads(profile.read_text(encoding="utf-8"))["settings"]
    assert f"{settings['policy']} {settings['low_format']}" == PROFILED
    assert PROFILED in SERVED.methods


def test_what_a_decode_worker_reads_is_compiled() -> None:
    """The forms of the kernel that attends to all tables of a slot, in the order of its tables."""
    made = {
        tuple(map(str, launch.constants["FORMS"]))  # pyright: ignore[reportArgumentType]
        for (kernel, _), launch in all_variants().items()
        if kernel == "attend_sections"
    }
    for dim in (64, 128):
        for one in served_layouts(dim).values():
            assert tuple(str(form_of(layout)) for layout, _ in one.sections) in made


@pytest.mark.parametrize("method", served_layouts(64))
def test_benchmarks_measure_attention_over_the_pages_of_a_method(method: str) -> None:
    torch.manual_seed(3)
    query = torch.randn(2, 9, 64)
    case = build_case(Shape(), method, query, 500)
    layouts = [layout for layout, _ in served_layouts(64)[method].sections]
    assert [one.layout.format.name for one in case.sections] == [one.format.name for one in layouts]
    assert [one.backward for one in case.sections] == [
        backward for _, backward in served_layouts(64)[method].sections
    ]
    tokens = np.stack([one.tokens.numpy() for one in case.sections])
    assert (tokens.sum(0) == 500).all()
    assert check_case(case, "cpu", method) < 2e-3


def test_sections_are_in_the_order_of_the_tables() -> None:
    plan = served_layouts(64)["diffkv"].plan
    layouts = TableLayouts.of(plan)
    assert [one for one, _ in layouts.sections] == [plan.recent, *plan.classes, plan.high]
    assert [back for _, back in layouts.sections] == [False, False, True, False]
