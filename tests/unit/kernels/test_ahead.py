"""Kernels compile for GPUs that are not here, and nothing spills."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.cli import main as command
from triptych.core.errors import ConfigError
from triptych.kernels import ahead, variants


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", "kernels", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return int(stop.value.code or 0)


def test_every_kernel_fits_every_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    assert check(monkeypatch, "--quick", "--jobs", "1", "--json", str(path)) == 0
    rows = json.loads(path.read_text())["rows"]
    every = {kernel for kernel, _ in variants.all_variants()}
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (kernel, target) for kernel in every for target in ahead.TARGETS
    }
    assert all(row["spill_bytes"] == 0 < row["registers"] for row in rows)
    assert all(name in capsys.readouterr().out for name in ("attend_sections",))


def test_registers_that_do_not_fit_are_found() -> None:
    task = ahead.Task("attend_sections", "k8v4+k4v2+fp16 d128 g4 bf16", "sm_90")
    launch = variants.usual_variants()[task.kernel, task.variant]
    made = ahead.compile_launch(replace(launch, registers=64), task)
    assert made.registers <= 64
    assert made.spill_bytes > 0


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no target 'sm_1'"):
        ahead.tasks(["sm_90", "sm_1"])
