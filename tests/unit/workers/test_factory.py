"""Loading a model leaves nothing behind that slows down who computes afterwards."""

import os
import subprocess
import sys
from pathlib import Path

LOAD = """
import os, sys, time
from pathlib import Path
import torch
from triptych.core.config import AppConfig
from triptych.core.pages import PagePlan
from triptych.workers.factory import load_model
from triptych.workers.models.facts import describe

def threads():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
path = Path(sys.argv[1])
config = AppConfig.from_mapping({"compressor": {"profile": "none"}})
plan = PagePlan.of(config, describe(path).geometry)
before = threads()
model_context = load_model(config, plan, path, ("decode",))
assert model_context is not None
until = time.monotonic() + 10
while threads() > before and time.monotonic() < until:
    time.sleep(0.01)
loaded = threads()
torch.randn(512, 512) @ torch.randn(512, 512)
print(before, loaded, threads())
"""


def test_the_threads_that_load_a_model_end_with_it(tiny_model: Path) -> None:
    """More OpenMP threads than cores, and those that wait no longer spin between kernels."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tiny_model)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    before, loaded, computing = map(int, run.stdout.split())
    assert loaded == before
    assert computing > before  # so threads of OpenMP do show
