"""Check every Triton kernel and the engines on a GPU, then time decode attention and selection.

    python benchmarks/gpu.py --json FILE

Needs a CUDA device, pytest, hypothesis and the dependencies of Triptych except Ray. First the tests
of kernels and engines run on the device; if one fails, nothing is timed. Where Triptych is not
installed, set PYTHONPATH=.:core:kernels:kvpool:router:workers:cli. Whole steps of the engines are
timed by ``benchmarks/engines.py --gpu``.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from triptych.kernels.bench import attention_gpu, selection
from triptych.loadgen.report.host import host_info

ROOT = Path(__file__).parents[1]
TESTS = [
    "-c", "/dev/null", "--rootdir", str(ROOT), "--import-mode=importlib", "-q",
    str(ROOT / "tests/unit/kernels/gpu"), str(ROOT / "tests/unit/workers/gpu"),
]  # fmt: skip
"""The settings of the project name plug-ins that are not needed here."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check all, then time decode attention.")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--formats", default="fp16,k8v8,k8v4,k4v2,k8v4+k4v2+fp16")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--selection-batch", default="1,8,32")
    parser.add_argument("--selection-context", default="4096,8192,16384,32768")
    parser.add_argument("--repeats", type=int, default=50)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    tested = subprocess.run([sys.executable, "-m", "pytest", *TESTS], check=False)
    if tested.returncode:
        sys.exit("something is wrong on this device: nothing is timed")
    rows: list[dict[str, object]] = []
    options = {"batch": asked.batch, "context": asked.context, "repeats": asked.repeats}
    for row in attention_gpu.run(asked.formats.split(","), **options):
        rows.append(asdict(row))
        print(json.dumps(rows[-1]), flush=True)
    chosen: list[dict[str, object]] = []
    for row in selection.run_selection(
        ("cuda",),
        batches=[int(word) for word in asked.selection_batch.split(",")],
        contexts=[int(word) for word in asked.selection_context.split(",")],
        shape=attention_gpu.LAYER,
        repeats=asked.repeats,
        device="cuda",
    ):
        chosen.append(asdict(row))
        print(json.dumps(chosen[-1]), flush=True)
    if asked.json:
        found = {
            "host": host_info(),
            "device": torch.cuda.get_device_name(),
            "rows": rows,
            "selection": chosen,
        }
        asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
