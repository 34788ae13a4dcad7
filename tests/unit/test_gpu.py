"""What runs on a GPU, without one: kernels in Triton's interpreter, engines on a fake device.

The interpreter is chosen before Triton is imported and holds for a whole process, so each file of
a folder ``gpu`` has a process of its own. With a GPU, pytest runs these files as they are.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = sorted(Path(__file__).parent.glob("*/gpu/test_*.py"))
LONG = {
    f"test_gpu_{name}"
    for name in ("decode", "engines", "methods", "mixed_graphs", "prefill", "resume", "select")
}
"""Files that take so long that only ``make interpreter`` runs them."""


@pytest.mark.timeout(900)  # a whole file, on cores that others may use too
@pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the GPU")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.interpreter] if path.stem in LONG else [])
        for path in CASES
    ],
    ids=lambda path: path.stem,
)
def test_what_runs_on_a_gpu_is_right(path: Path, root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
