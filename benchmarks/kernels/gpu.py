"""Check kernels and engines on a GPU; time what it can do at most, attention and selection.

    python benchmarks/kernels/gpu.py --json FILE

Needs a CUDA device, pytest, hypothesis and the dependencies of Triptych except Ray. First the tests
of kernels and engines run on the device; if one fails, nothing is timed, unless ``--only`` leaves
the tests out. ``ceilings`` are those of device memory, matrix products, and host memory that is
registered, read and written in place. Kernels are compiled in parallel before they are timed. The
file is written after each row. Where Triptych is not installed, set
PYTHONPATH=.:core:kernels:kvpool:router:workers:cli:loadgen. Whole steps of the engines are timed by
``benchmarks/kernels/engines.py --gpu``. Exit code 2 if there is no GPU.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from needs_gpu import require_gpu  # beside this file

ROOT = Path(__file__).parents[2]
TESTS = [
    "-c", "/dev/null", "--rootdir", str(ROOT), "--import-mode=importlib", "-q", "-rf",
    "--tb=short", "-p", "no:cacheprovider",
    str(ROOT / "tests/unit/kernels/gpu"), str(ROOT / "tests/unit/workers/gpu"),
]  # fmt: skip
"""The settings of the project name plug-ins that are not needed here."""


def words_of(*known: str) -> Callable[[str], list[str]]:
    """Parses known words with commas between."""

    def parse(given: str) -> list[str]:
        words = given.split(",")
        if unknown := sorted(set(words) - set(known)):
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)} (have {', '.join(known)})")
        return words

    return parse


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check all, then time decode attention.")
    parser.add_argument("--json", type=Path, help="write the rows here, after each row")
    steps = words_of("tests", "ceilings", "attention", "selection")
    parser.add_argument("--only", type=steps, default="tests,ceilings,attention,selection")
    parser.add_argument("-k", default="", metavar="WORDS", help="tests to run, as pytest -k")
    parser.add_argument("--formats", default="fp16,k8v8,k8v4,k4v2,diffkv")
    orders, dtypes = words_of("token", "channel"), words_of("bf16", "fp16", "fp32")
    parser.add_argument("--order", type=orders, default="token,channel", help="order of keys")
    parser.add_argument("--dtype", type=dtypes, default="bf16,fp32", help="types of queries")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--selection-batch", default="1,8,32")
    parser.add_argument("--selection-context", default="4096,8192,16384,32768")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    require_gpu("triptych kernels check compiles its kernels, make interpreter runs their tests")
    if "tests" in asked.only and run_tests(asked.jobs, asked.k):
        sys.exit("something is wrong on this device: nothing is timed")
    from gpu_rows import measure  # noqa: PLC0415 - imports torch, which takes seconds

    measure(asked)


def run_tests(jobs: int, words: str) -> int:
    """The exit status of pytest, in parallel where xdist is installed."""
    parallel = ["-n", str(jobs)] if importlib.util.find_spec("xdist") else []
    command = [sys.executable, "-m", "pytest", *TESTS, *parallel, "-k", words]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    main()
