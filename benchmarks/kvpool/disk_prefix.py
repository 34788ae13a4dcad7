"""TTFT with a prefix on disk, and the slow-down of decode steps while prefixes are restored.

    python benchmarks/kvpool/disk_prefix.py --json benchmarks/results/disk_prefix.json

The three engines and the pool run in this process, with the settings of the server but for a memory
that keeps the prefix of one prompt. A new prompt (A) alternates with one that shares all but its
last tokens with an earlier prompt whose prefix was evicted and is only on disk (B); its files are
first dropped from the page cache (``posix_fadvise`` with DONTNEED). Times run from the submission
to the first token.

Then a request decodes. Stretches of steps without other work alternate with stretches during which
``--per-second`` prefixes of as many tokens are restored from disk. As in the server, the pool is
its own process.
"""

import argparse
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from prefix import ask

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.core.pages import PagePlan
from triptych.kvpool import DiskSettings, LocalPool, Namespace, PrefixSettings, Publication
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve

VOCAB = 49_152
ANSWER_TOKENS = 4
WARM = 8
"""Steps that are not measured."""


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
    server: LocalServer, stretches: int, steps_each: int, shared: int, per_second: float
) -> tuple[list[Row], int]:
    """Times of decode steps by turns, and how many prefixes were brought back meanwhile."""
    plan = server.plan
    blocks, pages = shared // plan.block_tokens, plan.block_pages(1)
    command = [sys.executable, __file__, "--pool", str(blocks), str(pages), str(plan.page_bytes)]
    other = subprocess.Popen(
        [*command, str(per_second)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin
    assert other.stdout
    other.stdout.readline()
    alone, beside = list[float](), list[float]()
    sampling = Sampling(
        temperature=0.0, max_tokens=2 * stretches * steps_each + WARM, ignore_eos=True
    )
    prompt = list(range(100, 164))
    began_s = time.perf_counter()
    for number, _ in enumerate(server.stream([server.request(prompt, sampling)]), -WARM):
        now_s = time.perf_counter()
        stretch, place = divmod(number, steps_each)
        if number >= 0 and place == 0:
            other.stdin.write("go\n" if stretch % 2 else "rest\n")
            other.stdin.flush()
        elif number >= 0 and place > 1:
            (beside if stretch % 2 else alone).append(now_s - began_s)
        began_s = time.perf_counter()
    other.stdin.write("end\n")
    other.stdin.flush()
    restored = int(other.stdout.readline())
    other.wait()
    rows = [Row.of("step, nothing beside", alone), Row.of("step, restores beside", beside)]
    return rows, restored


def be_a_pool(blocks: int, block_pages: int, page_bytes: int, per_second: float) -> None:
    """Bring prefixes of so many blocks back from disk while the other side says so."""
    count = blocks * block_pages
    room = count * page_bytes
    limits = PrefixSettings(block_tokens=64, total_bytes=room, tenant_bytes=room)
    space = Namespace(salt=b"", model="", revision="", profile="")
    chains = [np.arange(first, first + 64 * blocks + 1, dtype=np.int32) for first in (0, 10**6)]
    says = queue.SimpleQueue[str]()
    threading.Thread(
        target=lambda: [says.put(line.strip()) for line in sys.stdin], daemon=True
    ).start()
    with tempfile.TemporaryDirectory() as name:
        disk = DiskSettings(
            path=Path(name), capacity_bytes=4 << 30, tenant_bytes=4 << 30, write_bytes_s=1e9
        )
        with LocalPool(2 * count, page_bytes, "w", limits, disk) as pool:
            for tokens in chains:
                ids = pool.allocate(count)
                pool.arena.data[ids] = 7
                new = Publication(
                    namespace=space,
                    tokens=tokens[:-1],
                    blocks=np.split(ids, blocks),
                    seconds=1.0,
                    tenant="",
                )
                if pool.publish_prefix(new) != blocks:
                    raise SystemExit("the prefixes were not kept")
                while pool.stat().disk.waiting:
                    time.sleep(0.01)
            print("ready", flush=True)
            restored, goes = 0, False
            while True:
                try:
                    word = says.get(timeout=1 / per_second if goes else None)
                except queue.Empty:
                    word = ""
                if word == "end":
                    break
                goes = word == "go" if word else goes
                if goes:
                    forget(Path(name))
                    while pool.restore_prefix(space, chains[restored % 2], "").blocks:
                        time.sleep(0.002)
                    restored += 1
            print(restored, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--shared", type=int, default=1024, help="tokens in common")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt alone")
    parser.add_argument("--stretches", type=int, default=8, help="of decode steps, of each kind")
    parser.add_argument("--steps", type=int, default=40, help="of each stretch")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary one")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--per-second", type=float, default=5.0, help="prefixes brought back")
    parser.add_argument("--pool", nargs=4, type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.pool:
        *sizes, per_second = options.pool
        be_a_pool(*map(int, sizes), per_second)
        return
    host = host_info()
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        folder = Path(name) / "tier"
        with LocalServer(config_for(options.shared, folder)) as server:
            rows = first_tokens(server, folder, options.rounds, options.shared, options.own)
            took, restored = steps(
                server, options.stretches, options.steps, options.shared, options.per_second
            )
            disk = server.pool.stat().disk
    new, known, alone, beside = rows = [*rows, *took]
    ratios = {
        "first_token_new_over_disk": round(new.median_ms / known.median_ms, 2),
        "step_beside_restores_over_alone": round(beside.median_ms / alone.median_ms, 3),
    }
    console.print(make_table(list(asdict(new)), [list(asdict(row).values()) for row in rows]))
    console.print(f"{ratios}; {restored} prefixes came from disk beside the steps; {disk}")
    if options.json:
        fields = {"threads": torch.get_num_threads(), "ratios": ratios}
        fields |= {"restored": restored, "per_second": options.per_second, "disk": asdict(disk)}
        write_json({"host": host, **fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
