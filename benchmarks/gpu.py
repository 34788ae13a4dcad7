"""Check every Triton kernel and the engines on a GPU, then time decode attention and selection.

    python benchmarks/gpu.py --json FILE

Needs a CUDA device, pytest, hypothesis and the dependencies of Triptych except Ray. First the tests
of kernels and engines run on the device; if one fails, nothing is timed, unless ``--only`` leaves
the tests out. Kernels are compiled in parallel before they are timed. The file is written after
each row. Where Triptych is not installed, set
PYTHONPATH=.:core:kernels:kvpool:router:workers:cli:loadgen. Whole steps of the engines are timed by
``benchmarks/engines.py --gpu``.
"""

import argparse
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import torch

from triptych.core.layout import KeyOrder
from triptych.kernels.bench import attention_gpu, selection
from triptych.kernels.bench.attention_cpu import build_case
from triptych.loadgen.report.host import host_info

ROOT = Path(__file__).parents[1]
TESTS = [
    "-c", "/dev/null", "--rootdir", str(ROOT), "--import-mode=importlib", "-q", "-rf",
    "--tb=short", "-p", "no:cacheprovider",
    str(ROOT / "tests/unit/kernels/gpu"), str(ROOT / "tests/unit/workers/gpu"),
]  # fmt: skip
"""The settings of the project name plug-ins that are not needed here."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check all, then time decode attention.")
    parser.add_argument("--json", type=Path, help="write the rows here, after each row")
    parser.add_argument("--only", default="tests,attention,selection")
    parser.add_argument("--formats", default="fp16,k8v8,k8v4,k4v2,diffkv")
    parser.add_argument("--key-orders", default="token,channel")
    parser.add_argument("--queries", default="bf16,fp32", help="types of queries")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--selection-batch", default="1,8,32")
    parser.add_argument("--selection-context", default="4096,8192,16384,32768")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    steps = asked.only.split(",")
    if "tests" in steps and run_tests(asked.jobs):
        sys.exit("something is wrong on this device: nothing is timed")
    found: dict[str, Any] = {
        "host": host_info(),
        "device": torch.cuda.get_device_name(),
        "rows": [],
        "selection": [],
    }
    measured = {"attention": ("rows", attention), "selection": ("selection", selected)}
    for step, (name, rows) in measured.items():
        for row in rows(asked) if step in steps else ():
            found[name].append(asdict(row))
            print(json.dumps(found[name][-1]), flush=True)
            if asked.json:
                asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def run_tests(jobs: int) -> int:
    """The exit status of pytest, in parallel where xdist is installed."""
    parallel = ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", *TESTS, *parallel]
    return subprocess.run(command, check=False).returncode


def attention(asked: argparse.Namespace) -> Iterator[attention_gpu.GpuRow]:
    formats, orders = asked.formats.split(","), asked.key_orders.split(",")
    queries, sizes = asked.queries.split(","), (asked.batch, asked.context)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=spawn) as pool:
        made = [
            pool.submit(compile_case, name, order, query, *sizes)
            for name, order in attention_gpu.cases(formats, orders)
            for query in queries
        ]
        for future in made:
            future.result()
    yield from attention_gpu.run(
        formats, orders, queries, batch=asked.batch, context=asked.context, repeats=asked.repeats
    )


def compile_case(name: str, key_order: KeyOrder, query: str, batch: int, context: int) -> None:
    """Run a case once, which leaves its kernels in Triton's cache."""
    shape = attention_gpu.LAYER
    dtype = attention_gpu.DTYPES[query]
    asked = torch.randn(batch, shape.heads, shape.head_dim, device="cuda", dtype=dtype)
    build_case(shape, name, asked, context, key_order).attend("cuda")
    torch.cuda.synchronize()


def selected(asked: argparse.Namespace) -> Iterator[selection.SelectionRow]:
    batches, contexts = (
        [int(word) for word in words.split(",")]
        for words in (asked.selection_batch, asked.selection_context)
    )
    for batch, context in product(batches, contexts):
        yield from selection.run_selection(
            ("cuda",),
            batches=[batch],
            contexts=[context],
            shape=attention_gpu.LAYER,
            repeats=asked.repeats,
            device="cuda",
        )


if __name__ == "__main__":
    main()
