"""What runs on a GPU, without one: kernels in Triton's interpreter, engines on a fake device.

The interpreter is chosen before Triton is imported and holds for a whole process, so the files of
folders ``gpu`` have processes of their own: long files each one, the short files of a folder one
together. With a GPU, pytest runs these files as they are.
"""

import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

FILES = sorted(Path(__file__).parent.glob("*/gpu/test_*.py"))
LONG = {
    f"test_gpu_{name}"
    for name in (
        *("codec", "decode", "draw", "engines", "methods"),
        *("mixed_graphs", "prefill", "resume", "scores", "select"),
    )
}
"""Files that take so long that only ``make interpreter`` runs them."""


def runs() -> list[Any]:
    """Each long file, and the short files of each folder."""
    long = [path for path in FILES if path.stem in LONG]
    short = groupby((path for path in FILES if path.stem not in LONG), lambda path: path.parts[-3])
    return [
        *(pytest.param([path], id=path.stem, marks=[pytest.mark.interpreter]) for path in long),
        *(pytest.param(list(paths), id=folder) for folder, paths in short),
    ]


@pytest.mark.timeout(900)  # whole files, on cores that others may use too
@pytest.mark.skipif(torch.cuda.is_available(), reason="the files run on the GPU")
@pytest.mark.parametrize("paths", runs())
def test_what_runs_on_a_gpu_is_right(paths: list[Path], root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, paths)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
