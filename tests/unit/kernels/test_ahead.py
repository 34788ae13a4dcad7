"""Kernels compile for GPUs that are not here, and nothing spills."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from triptych.cli import main as command
from triptych.core.errors import ConfigError
from triptych.kernels import ahead, variants

WIDE = variants.USUAL_VARIANTS["attend_chunks"]
USUAL_TARGETS = "sm_90", "gfx942"
"""One of each maker: all four take a minute; ``triptych kernels check`` compiles for all."""


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", "kernels", "check", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return int(stop.value.code or 0)


@pytest.mark.timeout(900)  # the first time nothing is in Triton's cache
def test_every_kernel_fits_the_usual_targets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    asked = [word for name in USUAL_TARGETS for word in ("--target", name)]
    assert check(monkeypatch, "--quick", "--jobs", "1", "--json", str(path), *asked) == 0
    rows = json.loads(path.read_text())["rows"]
    every = {kernel for kernel, _ in variants.all_variants()}
    assert {(row["kernel"], row["target"]) for row in rows} == {
        (kernel, target) for kernel in every for target in USUAL_TARGETS
    }
    assert all(row["spill_bytes"] == 0 < row["registers"] for row in rows)
    assert "attend_sections" in capsys.readouterr().out


def test_a_kernel_that_spills_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that needs most, with few registers."""
    launch = variants.usual_variants()["attend_chunks", WIDE]
    squeezed = {("attend_chunks", WIDE): replace(launch, registers=64)}
    monkeypatch.setattr(ahead, "usual_variants", lambda: squeezed)
    monkeypatch.setattr(ahead, "_variants", lambda: squeezed)
    assert check(monkeypatch, "--quick", "--jobs", "1", "--target", "sm_90") == 1
    assert "spills" in capsys.readouterr().err


def test_an_unknown_target_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no target 'sm_1'"):
        ahead.tasks(["sm_90", "sm_1"])
