"""Benchmarks that need a GPU say at once that there is none."""

import subprocess
import sys
from pathlib import Path

import pytest

from triptych.kvpool.pool.cuda_driver import CudaDriver

pytestmark = pytest.mark.skipif(bool(CudaDriver().devices), reason="there is a GPU")


@pytest.mark.parametrize(
    "asked",
    ["gpu.py", "gpu.py --order token --dtype bf16", "gpu.py --only ceilings", "engines.py --gpu"],
)
def test_without_a_gpu_they_end_before_torch_is_imported(asked: str, root: Path) -> None:
    name, *options = asked.split()
    command = [
        sys.executable,
        "-X",
        "importtime",
        str(root / "benchmarks" / "kernels" / name),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    *imported, sentence = done.stderr.splitlines()
    assert sentence.startswith("no GPU: CUDA has no driver here")
    assert not any(line.endswith("| torch") for line in imported)


def test_an_unknown_order_of_keys_is_refused_with_the_known_ones(root: Path) -> None:
    command = [sys.executable, str(root / "benchmarks" / "kernels" / "gpu.py"), "--order", "row"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "no row (have token, channel)" in done.stderr
