"""Tests of ahead-of-time compilation: kernels compile without a GPU and without spills."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.cli import main as command
from triptych.core.errors import ConfigError
from triptych.core.layout import FORMATS, PageLayout, default_page_bytes
from triptych.kernels import PageLists, Rule, Section, Summaries
from triptych.kernels.codegen import aot, gates, variants
from triptych.kernels.select import gpu, tile_bytes

WIDE = variants.USUAL_VARIANTS["attend_chunks"]
PREFILL = ("attend_chunks", "alone d128 g4 bf16"), ("flash_attention", "d128 bf16")
"""Prefill attention without pages, and FlashAttention."""
LARGE = "attend_sections", "attend_chunks", "score_spans", "choose_pages", "encode_pages"
"""Kernels that take most of the time to compile."""
conformance = pytest.mark.conformance


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", "kernels", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return int(stop.value.code or 0)


@pytest.mark.timeout(900)  # the first run has an empty Triton cache
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=conformance)])
def test_every_kernel_compiles_without_spills(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``triptych kernels check`` compiles for all four targets."""
    path = tmp_path / "kernels.json"
    asked = "--jobs", "1", "--json", str(path), "--target", target
    assert check(monkeypatch, "--quick", *asked) == 0
    rows = json.loads(path.read_text())["rows"]
    every = {kernel for kernel, _ in variants.all_variants()}
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (kernel, target) for kernel in every
    }
    assert all(row["spill_bytes"] <= row["spill_limit"] and row["registers"] for row in rows)
    if target == "sm_90":
        _check_passes(rows)
    printed, lines = capsys.readouterr()
    assert "attend_sections" in printed
    assert ("FlashAttention 0.328" in " ".join(printed.split())) == (target == "sm_90")
    assert f"{target}: {len(rows)} in " in lines


def _check_passes(rows: list[dict[str, Any]]) -> None:
    """Which kernels may spill, and what the passes of the limited ones read."""
    assert {row["kernel"] for row in rows if row["spill_limit"]} == {
        "attend_sections",
        "flash_attention",
    }
    limited = {
        row["variant"]: [one["reads"] for one in row["passes"]]
        for row in rows
        if row["kernel"] == "attend_sections"
    }
    work = [aot.COUNTS] * 2
    assert limited["diffkv d128 g4 bf16"] == [*work, "k8v8 small", "k8v4", "k4v2", "k8v4"]
    assert limited["uniform:k4v2 d128 g4 bf16"] == [*work, "k8v8 small", "k4v2", "k4v2"]
    assert limited["uniform:fp16 d128 g4 bf16"] == [*work, "fp16"]
    prefill = [
        [one["reads"] for one in row["passes"]]
        for row in rows
        if (row["kernel"], row["variant"]) in PREFILL
    ]
    assert prefill == [[aot.BEFORE, aot.DIAGONAL]] * 2


def test_small_kernels_compile_for_amd_without_spills() -> None:
    """The other ones take a minute, and `make conformance` compiles them."""
    tasks = [task for task in aot.tasks(["gfx942"], "quick") if task.kernel not in LARGE]
    assert len(tasks) > 15
    for made in aot.compile_all(tasks):
        assert made.spill_bytes <= made.spill_limit, made.kernel
        assert made.registers


def test_the_default_has_what_engines_run_for_the_default_methods() -> None:
    every, served = variants.all_variants(), variants.served_variants()
    assert set(variants.usual_variants()) < set(served) < set(every)
    assert 6 * len(served) < len(every)
    methods = {name.split()[0] for kernel, name in served if kernel == "attend_sections"}
    assert {"diffkv", "uniform:k8v4", "uniform:fp16"} < methods
    assert len(aot.tasks(["sm_90", "gfx942"])) == 2 * len(served)
    assert len(aot.tasks(["sm_90"], "all")) == len(every)


def test_quick_and_all_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(monkeypatch, "--quick", "--all") == 2
    assert "--quick and --all exclude each other" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "target", ["sm_90", *(pytest.param(name, marks=conformance) for name in ("sm_80", "sm_100"))]
)
def test_prefill_issues_at_most_1_6_times_what_flash_attention_does(
    target: str, record_property: Callable[[str, str], None]
) -> None:
    made = [aot.compile_one(aot.Task(*name, target)) for name in PREFILL]
    (found,) = gates.over_flash(made)
    record_property("figure", str(found))
    assert found.is_within, str(found)


def test_a_kernel_that_spills_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel that needs most registers is compiled with few of them."""
    launch = variants.usual_variants()["attend_chunks", WIDE]
    squeezed = {("attend_chunks", WIDE): replace(launch, registers=128)}
    monkeypatch.setattr(aot, "usual_variants", lambda: squeezed)
    monkeypatch.setattr(aot, "_variants", lambda backend: squeezed)
    assert check(monkeypatch, "--quick", "--jobs", "1", "--target", "sm_90") == 1
    assert "spills" in capsys.readouterr().err


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no target 'sm_1'"):
        aot.tasks(["sm_90", "sm_1"])


@pytest.mark.parametrize("width", [1, 300])
def test_arguments_equal_to_one_compile(width: int) -> None:
    """Triton turns an argument of 1 into a constant, which some operations do not accept."""

    def ones(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    layout = PageLayout(FORMATS["k8v4"], 64, default_page_bytes(64))
    section = Section(layout, ones(1, 1, width), ones(1, 1))
    memory = ones(1, 1, -(-width // 16), tile_bytes("moments", 64), dtype=torch.uint8)
    known = [Summaries("moments", memory, 64), None]
    rule = Rule(keep=1, budget_tokens=1, sink_tokens=1, window_tokens=1)
    page_lists = PageLists(ones(1, 1, 2 * width), ones(1, 1), ones(1))
    query = ones(1, 1, 64, dtype=torch.bfloat16)
    for launch in gpu.plan(query, [section] * 2, known, ones(1), ones(1), rule, page_lists, 1.0):
        made = aot.compile_launch(launch, aot.Task(launch.name, "ones", "sm_90"))
        assert made.registers > 0
