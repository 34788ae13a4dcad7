"""What a prefix on disk saves, and what bringing it back costs those who decode.

    python benchmarks/disk_prefix.py --json benchmarks/results/disk_prefix.json

The three engines and the pool run in this process, with the settings of the server but for a memory
that keeps the prefix of one prompt. In turns: a prompt that nobody asked before (A), and one that
shares all but its last tokens with an earlier prompt whose prefix was evicted since and is on disk
alone (B); the files are put out of the page cache before (``posix_fadvise`` with DONTNEED). Times
run from the submission to the first token.

Then a request decodes, and stretches of its steps take turns: with nothing beside them, and with
prefixes being brought back from disk all the time, one after the other, as fast as they come. The
pool's threads share the interpreter with the engines here, which the server's do not.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Sampling
from triptych.core.pages import PagePlan
from triptych.kvpool import Namespace
from triptych.kvpool.client import WorkerPool
from triptych.workers.local import LocalServer
from triptych.workers.models import describe, resolve
from triptych.workers.prefixes import PrefixStore
from triptych.workers.profiles import find_profile

VOCAB = 49_152
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Row:
    """One kind of what was measured; times in milliseconds."""

    what: str
    count: int
    median_ms: float
    quartiles_ms: tuple[float, float]
    cached_tokens: int = 0
    """Of each prompt."""

    @classmethod
    def of(cls, what: str, times_s: Sequence[float], cached_tokens: int = 0) -> "Row":
        low, median, high = (
            round(1e3 * x, 2) for x in statistics.quantiles(times_s, n=4, method="inclusive")
        )
        return cls(what, len(times_s), median, (low, high), cached_tokens)


def config_for(shared: int, folder: Path) -> AppConfig:
    """Memory for the prefix of one prompt, and a disk for many."""

    def config(prefix_bytes: int | str) -> AppConfig:
        disk = {"disk_path": str(folder), "disk_bytes": 4 << 30, "disk_write_bytes_s": 1e9}
        return AppConfig.from_mapping({"pool": {"prefix_bytes": prefix_bytes, **disk}})

    facts = describe(resolve(config("auto").model.name))
    plan = PagePlan.of(config("auto"), facts.geometry, find_profile(config("auto"), facts))
    blocks = shared // plan.block_tokens
    pages = sum(plan.block_pages(place) for place in range(blocks)) + plan.block_pages(0)
    return config(pages * plan.page_bytes)


def ask(server: LocalServer, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were cached."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first_s, cached = 0.0, 0
    began_s = time.perf_counter()
    for event in server.stream([server.request(prompt, sampling)]):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        first_s = first_s or time.perf_counter() - began_s
        cached = max(cached, event.cached_tokens)
    return first_s, cached


def settle(server: LocalServer) -> None:
    """Wait until nothing is being written."""
    while server.pool.stat().disk.waiting:
        time.sleep(0.01)


def forget(folder: Path) -> None:
    """Put all objects out of the page cache."""
    for path in folder.glob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def first_tokens(
    server: LocalServer, folder: Path, rounds: int, shared: int, own: int
) -> list[Row]:
    """A B A B ..., and one untimed round before."""
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(count)]

    new, known = list[float](), list[float]()
    cached = set[int]()
    for number in range(rounds + 1):
        beginning = tokens(shared)
        ask(server, beginning + tokens(own))
        settle(server)
        new_s, _ = ask(server, tokens(shared + own))
        settle(server)
        forget(folder)
        known_s, saved = ask(server, beginning + tokens(own))
        if number:
            new.append(new_s)
            known.append(known_s)
            cached.add(saved)
    return [
        Row.of("first token, new prompt", new),
        Row.of("first token, prefix on disk", known, min(cached)),
    ]


def steps(
    server: LocalServer, folder: Path, stretches: int, steps_each: int, shared: int
) -> tuple[list[Row], float]:
    """Times of decode steps by turns, and MB/s that came from disk meanwhile."""
    chance = random.Random(1)
    prompts = [[chance.randrange(VOCAB) for _ in range(shared + 1)] for _ in range(2)]
    for prompt in prompts:
        ask(server, prompt)
        settle(server)
    model, other = AppConfig().model, server.pool.join("other")
    weights = describe(resolve(model.name)).weights
    namespace = PrefixStore(other, server.plan, weights, model.dtype).namespace("")
    busy, over = threading.Event(), threading.Event()
    moved = [0.0, 0.0]

    def bring_back() -> None:
        turn = 0
        while not over.is_set():
            if not busy.wait(0.05):
                continue
            forget(folder)
            before, began_s = other.stat().disk.loaded_bytes, time.perf_counter()
            bring(other, namespace, prompts[turn % 2])
            moved[0] += other.stat().disk.loaded_bytes - before
            moved[1] += time.perf_counter() - began_s
            turn += 1

    thread = threading.Thread(target=bring_back)
    thread.start()
    alone, beside = list[float](), list[float]()
    sampling = Sampling(temperature=0.0, max_tokens=2 * stretches * steps_each + 8, ignore_eos=True)
    began_s, seen = 0.0, 0
    for _ in server.stream([server.request(prompts[0][:64], sampling)]):
        now_s, seen = time.perf_counter(), seen + 1
        stretch, place = divmod(seen - 8, steps_each)
        if seen > 8 and place > 1:
            (beside if stretch % 2 else alone).append(now_s - began_s)
        busy.set() if stretch % 2 and seen > 8 else busy.clear()
        began_s = now_s
    over.set()
    thread.join()
    other.close()
    rows = [Row.of("step, nothing beside", alone), Row.of("step, restores beside", beside)]
    return rows, moved[0] / moved[1] / 1e6


def bring(pool: WorkerPool, namespace: Namespace, prompt: Sequence[int]) -> None:
    tokens = np.array(prompt, np.int32)
    while pool.restore_prefix(namespace, tokens, "").blocks:
        time.sleep(0.002)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shared", type=int, default=1024, help="tokens in common")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt alone")
    parser.add_argument("--stretches", type=int, default=8, help="of decode steps, of each kind")
    parser.add_argument("--steps", type=int, default=40, help="of each stretch")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name) / "tier"
        with LocalServer(config_for(options.shared, folder)) as server:
            rows = first_tokens(server, folder, options.rounds, options.shared, options.own)
            took, rate = steps(server, folder, options.stretches, options.steps, options.shared)
            disk = server.pool.stat().disk
    new, known, alone, beside = rows = [*rows, *took]
    ratios = {
        "first_token_new_over_disk": round(new.median_ms / known.median_ms, 2),
        "step_beside_restores_over_alone": round(beside.median_ms / alone.median_ms, 3),
    }
    console.print(make_table(list(asdict(new)), [list(asdict(row).values()) for row in rows]))
    console.print(f"{ratios}; {rate:.0f} MB/s came from disk beside the steps; {disk}")
    if options.json:
        told = {"threads": torch.get_num_threads(), "ratios": ratios}
        told |= {"restored_mb_per_s": round(rate, 1), "disk": asdict(disk)}
        write_json({"host": host, **told, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
