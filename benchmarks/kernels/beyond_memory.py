"""Decode a context that is four times as large as the memory for its pages.

    python benchmarks/kernels/beyond_memory.py --json benchmarks/results/beyond_memory.json

The pages are on disk (``pool.arena_path``). Each run is a process in its own memory cgroup. From
the first decode step on its limit is the memory of the process without pages, plus a share of the
bytes of the pages. Needs permission to create cgroups.
"""

import argparse
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB, AppConfig
from triptych.core.messages import Compressed, Failed, Message, Sampling, Send
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.kvpool import Arena
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.models.store.model_store import resolve

WARM_STEPS = 16
"""Steps that are not counted: the pages that the first queries want come into memory."""


@dataclass(frozen=True)
class Run:
    """What is asked of one process."""

    name: str
    keep: float
    """Share of the pages that a step reads; 1: all, without selection."""
    is_limited: bool
    asks_ahead: bool = True
    """Whether pages are asked for before they are touched."""


RUNS = (
    Run("all in memory, 10 % read", 0.1, is_limited=False),
    Run("a quarter in memory, 10 % read", 0.1, is_limited=True),
    Run("the same, not asked for ahead", 0.1, is_limited=True, asks_ahead=False),
    Run("all in memory, all read", 1.0, is_limited=False),
    Run("a quarter in memory, all read", 1.0, is_limited=True),
)


@dataclass(frozen=True)
class Row:
    """What became of it."""

    name: str
    pages_mib: float
    """Of the context, compressed."""
    resident_mib: float
    """Of the arena's file, in memory after the last step."""
    ttft_s: float
    step_ms: float
    """Median."""
    mean_step_ms: float
    step_p90_ms: float
    tokens: list[int]
    """In the table: how many are those of the first run."""


# ------------------------------------------------------------------ memory cgroups


class MemoryGroup:
    """A memory cgroup, of either version."""

    def __init__(self, name: str) -> None:
        root = Path("/sys/fs/cgroup")
        self._is_old = (root / "memory").is_dir()
        self._folder = (root / "memory" if self._is_old else root) / name

    @contextmanager
    def made(self) -> Iterator[None]:
        self._folder.mkdir()
        try:
            yield
        finally:
            self._folder.rmdir()

    def limit(self, nbytes: int) -> None:
        self._write("memory.limit_in_bytes" if self._is_old else "memory.max", nbytes)

    def enter(self) -> None:
        """Move this process here; memory that it takes from now on counts here."""
        self._write("cgroup.procs", os.getpid())

    def private_bytes(self) -> int:
        """What is taken and is no file in memory."""
        known = dict(line.split() for line in self._read("memory.stat").splitlines())
        used = int(self._read("memory.usage_in_bytes" if self._is_old else "memory.current"))
        return used - int(known["cache" if self._is_old else "file"])

    def _write(self, name: str, number: int) -> None:
        (self._folder / name).write_text(str(number), encoding="ascii")

    def _read(self, name: str) -> str:
        return (self._folder / name).read_text(encoding="ascii")


# ------------------------------------------------------------------ one process


def measure(run: Run, asked: argparse.Namespace, home: MemoryGroup) -> Row:
    """Answer one prompt in this process, which is to be a new one."""
    home.enter()
    config = config_of(run, asked)
    steps, stored, original = list[float](), [0], DecodeEngine.step

    def step(engine: DecodeEngine) -> Iterable[Send]:
        if not steps:
            os.sync()  # groups of version 1 do not slow down who writes faster than the disk
        if run.is_limited:
            home.limit(home.private_bytes() + int(asked.share * stored[0]))
        begun = time.perf_counter()
        sends = list(original(engine))
        steps.append(time.perf_counter() - begun)
        return sends

    def watch(message: Message) -> None:
        if isinstance(message, Compressed):
            stored[0] = message.report.stored_bytes

    with LocalServer(config, watch=watch) as server, patch.object(DecodeEngine, "step", step):
        if not run.asks_ahead:
            Arena.will_need = lambda *_: None  # type: ignore[method-assign]
        sampling = Sampling(temperature=0.0, max_tokens=asked.answer, ignore_eos=True)
        start, first, tokens = time.perf_counter(), 0.0, list[int]()
        for event in server.stream([server.request(text(config, asked.prompt), sampling)]):
            if isinstance(event, Failed):
                raise SystemExit(str(event))
            first = first or time.perf_counter() - start
            tokens += event.tokens
        kept = resident_bytes(Path(asked.folder))
    counted = sorted(steps[WARM_STEPS:])
    return Row(
        name=run.name,
        pages_mib=round(stored[0] / MIB, 1),
        resident_mib=round(kept / MIB, 1),
        ttft_s=round(first, 2),
        step_ms=round(median(counted) * 1e3, 2),
        mean_step_ms=round(sum(counted) / len(counted) * 1e3, 2),
        step_p90_ms=round(counted[len(counted) * 9 // 10] * 1e3, 2),
        tokens=tokens,
    )


def config_of(run: Run, asked: argparse.Namespace) -> AppConfig:
    chosen = {
        "method": "moments",
        "keep_fraction": run.keep,
        "budget_tokens": 0,
        "dense_layers": asked.dense_layers,
    }
    return AppConfig.from_mapping(
        {
            "compressor": {"policy": asked.policy},
            "pool": {
                "kv_cache_memory_bytes": asked.capacity_mib * MIB,
                "prefix_bytes": 0,
                "arena_path": asked.folder,
                "page_bytes": asked.page_bytes or "auto",
            },
            "decode": {"selection": chosen if run.keep < 1 else {}},
        }
    )


def text(config: AppConfig, tokens: int) -> list[int]:
    """The beginning of a text that ships with Python."""
    encode = Vocabulary(resolve(config.model.name)).encode
    (one,) = documents(encode, "evaluation", context=tokens, continuation=1, count=1)
    return list(one.context)


def resident_bytes(folder: Path) -> int:
    """Bytes of the arena's file that are in memory, as ``fincore`` of util-linux counts them."""
    (path,) = folder.iterdir()
    options = ("--bytes", "--noheadings", "--output", "RES")
    found = subprocess.run(["fincore", *options, path], check=True, capture_output=True, text=True)
    return int(found.stdout)


# ------------------------------------------------------------------ all of them


def run_all(asked: argparse.Namespace) -> Iterator[Row]:
    """One process after another."""
    for number in map(int, asked.runs.split(",")):
        run, home = RUNS[number], MemoryGroup(f"triptych-{os.getpid()}-{number}")
        console.print(f"==> {run.name}")
        spawn = multiprocessing.get_context("spawn")
        with home.made(), ProcessPoolExecutor(1, mp_context=spawn) as processes:
            yield processes.submit(measure, run, asked, home).result()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=7900)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--policy", default="uniform:k8v4")
    parser.add_argument("--dense-layers", type=int, default=2)
    parser.add_argument("--page-bytes", type=int, default=0)
    parser.add_argument("--capacity-mib", type=int, default=512)
    parser.add_argument("--share", type=float, default=0.25, help="of the pages, in memory")
    parser.add_argument("--runs", default=",".join(map(str, range(len(RUNS)))))
    parser.add_argument("--folder", help="on the disk; default: a temporary one")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    options = {name: value for name, value in vars(asked).items() if name not in ("json", "folder")}
    host = host_info()
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        asked.folder = folder
        rows = list(run_all(asked))
    first = rows[0].tokens
    fields = [asdict(row) | {"tokens": sum(map(int.__eq__, row.tokens, first))} for row in rows]
    console.print(make_table(list(fields[0]), [list(row.values()) for row in fields]))
    if asked.json:
        write_json({"host": host, "asked": options, "rows": fields}, asked.json)


if __name__ == "__main__":
    main()
