"""``triptych train`` and ``triptych eval learned`` as a user calls them."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run

TINY = ("--documents", "2", "--held-out", "1", "--hidden", "4", "--evaluate-every", "2")


def test_a_scorer_is_trained_and_compared(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    path, report = tmp_path / "scorer.safetensors", tmp_path / "scorer.json"
    options = ("--context", "128", "--steps", "4", *TINY)
    code, out, err = run(
        *("train", "scorer", str(tiny_model), "--output", str(path), "--json", str(report)),
        *options,
    )
    assert code == 0, err
    assert "correlation" in out
    assert "scorer, 4 steps: held-out loss" in err
    found = json.loads(report.read_text())
    assert found["record"]["kind"] == "scorer"
    assert found["parts"]["scorer"]["steps"] == 4
    rows = tmp_path / "rows.json"
    code, out, err = run(
        *("eval", "learned", "--scorer", str(path), "--model", str(tiny_model)),
        *("--context", "300", "--documents", "1", "--steps", "4", "--json", str(rows)),
    )
    assert code == 0, err
    assert "classes:scorer@0.1" in out
    assert json.loads(rows.read_text())["conditions"]["split"] == "evaluation"


def test_a_compressor_is_trained(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "compressor.safetensors"
    code, out, err = run(
        *("train", "compressor", str(tiny_model), "--output", str(path), "--chunk-tokens", "3"),
        *("--context", "128", "--continuation", "8", "--steps", "2", *TINY),
    )
    assert code == 0, err
    assert "mean pooling error" in out
    assert path.is_file()


def test_mistakes_are_one_line(run: Run, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"torn")
    code, _, err = run(
        "eval", "learned", "--scorer", str(tmp_path / "torn"), "--model", str(tiny_model)
    )
    assert (code, len(err.strip().splitlines())) == (1, 1)
    code, _, err = run("eval", "learned", "--model", str(tiny_model))
    assert (code, "a scorer, or compressors" in err) == (2, True)


@pytest.mark.conformance  # half a minute of training
def test_a_process_that_is_killed_goes_on_and_writes_the_same_file(
    tiny_model: Path, tmp_path: Path
) -> None:
    def command(folder: Path) -> list[str]:
        code = "from triptych.cli.main import main; main()"
        output = str(folder / "scorer.safetensors")
        options = ["--context", "128", "--steps", "120", "--patience", "120", *TINY]
        words = ["train", "scorer", str(tiny_model), "--output", output, *options]
        return [sys.executable, "-c", code, *words]

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    subprocess.run(command(whole), check=True, capture_output=True)
    state = cut / "scorer.safetensors.work" / "scorer.safetensors"
    with subprocess.Popen(command(cut), stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 120
        while not state.exists() and time.monotonic() < end and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
    assert not (cut / "scorer.safetensors").exists()
    subprocess.run(command(cut), check=True, capture_output=True)
    expected = (whole / "scorer.safetensors").read_bytes()
    assert (cut / "scorer.safetensors").read_bytes() == expected
