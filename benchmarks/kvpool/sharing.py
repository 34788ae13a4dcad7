"""Memory and time of requests with a common prefix, with shared and with copied pages.

    python benchmarks/kvpool/sharing.py --json benchmarks/results/sharing.json

Two servers in this process with the settings of the real one, with ``pool.share_pages`` (shared)
and without (copied). Alternating: several requests with the prefix of an earlier prompt run
together. While all of them decode, held bytes come from the pool and booked bytes from the router.
Decode steps count while all requests run. Times are CPU times of the single worker thread, to
reduce the effect of other processes.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Sampling, Send
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.loop import Work
from triptych.workers.stage import Engine

VOCAB = 49_152
MIB = 1 << 20


@dataclass
class Watch:
    """Stands around the work of the engines."""

    requests: int
    server: LocalServer
    step_ms: list[float] = field(default_factory=list[float])
    compress_ms: float = 0.0
    """Of all requests of a round."""
    own_bytes: int = 0
    """Held by the requests."""
    shared_bytes: int = 0
    """Of the cache, counted for each request that reads them."""
    prefix_bytes: int = 0
    """Of the cache, counted once."""
    booked_bytes: int = 0

    def around(self, engine: Engine, work: Work) -> Iterable[Send] | None:
        running = len(engine.slots()[0]) if isinstance(engine, DecodeEngine) else 0
        if running == self.requests and not self.own_bytes:
            self._look()
        began = time.thread_time()
        done = work()
        took_ms = 1e3 * (time.thread_time() - began)
        if engine.stage == "compress":
            self.compress_ms += took_ms
        elif running == self.requests:
            self.step_ms.append(took_ms)
        return done

    def _look(self) -> None:
        ledger = self.server.pool.stat()
        self.prefix_bytes = ledger.prefix.bytes
        self.shared_bytes = ledger.prefix.shared_bytes
        self.own_bytes = (ledger.request_pages - ledger.prefix_pages) * ledger.page_bytes
        self.booked_bytes = sum(self.server.booked_bytes.values())


@dataclass(frozen=True)
class Row:
    """One way of having the beginning, under one policy; bytes while all requests decode."""

    policy: str
    kind: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of each prompt."""
    own_mib: float
    """Held by the requests."""
    booked_mib: float
    """Promised to them by the router, up to their last tokens."""
    read_of_cache_mib: float
    """Pages of the cache that requests read, counted for each."""
    cache_mib: float
    steps: int
    step_ms: float
    """Median."""
    step_quartiles_ms: tuple[float, float]
    compress_ms: float
    """For each request, median over the rounds."""


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def answer(server: LocalServer, prompts: Sequence[Sequence[int]], count: int) -> int:
    """Ask all at once; the fewest tokens that one of them had cached."""
    sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
    cached = dict[str, int]()
    for event in server.stream([server.request(prompt, sampling) for prompt in prompts]):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        cached[event.request] = max(cached.get(event.request, 0), event.cached_tokens)
    return min(cached.values())


def measure(policy: str, rounds: int, count: int, shared: int, own: int, answers: int) -> list[Row]:
    """A B A B ..., and one prompt before, which leaves the beginning."""
    chance = random.Random(0)
    beginning = tokens(chance, shared)
    first = beginning + tokens(chance, own)
    servers = {kind: server_of(policy, share=kind == "shared") for kind in ("copied", "shared")}
    watches = {kind: list[Watch]() for kind in servers}
    cached = 0
    for server in servers.values():
        server.__enter__()
        answer(server, [first], 4)
    for _ in range(rounds):
        prompts = [beginning + tokens(chance, own) for _ in range(count)]
        for kind, server in servers.items():
            watches[kind].append(Watch(count, server))
            with server.instrumented(watches[kind][-1].around):
                cached = answer(server, prompts, answers)
    name = servers["shared"].plan.policy.name
    for server in servers.values():
        server.__exit__(None, None, None)
    return [row_of(name, kind, count, shared + own, cached, seen) for kind, seen in watches.items()]


def server_of(policy: str, *, share: bool) -> LocalServer:
    settings = {"compressor": {"policy": policy}, "pool": {"share_pages": share}}
    return LocalServer(AppConfig.from_mapping(settings))


def row_of(
    policy: str, kind: str, count: int, prompt: int, cached: int, seen: Sequence[Watch]
) -> Row:
    steps = [step for watch in seen for step in watch.step_ms]
    low, median, high = statistics.quantiles(steps, n=4, method="inclusive")
    last = seen[-1]
    return Row(
        policy=policy,
        kind=kind,
        requests=count,
        prompt_tokens=prompt,
        cached_tokens=cached,
        own_mib=round(last.own_bytes / MIB, 1),
        booked_mib=round(last.booked_bytes / MIB, 1),
        read_of_cache_mib=round(last.shared_bytes / MIB, 1),
        cache_mib=round(last.prefix_bytes / MIB, 1),
        steps=len(steps),
        step_ms=round(median, 1),
        step_quartiles_ms=(round(low, 1), round(high, 1)),
        compress_ms=round(statistics.median(watch.compress_ms / count for watch in seen), 1),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--shared", type=int, default=1024, help="tokens in common")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt alone")
    parser.add_argument("--answers", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--policies", default="auto,uniform:k8v4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    host, rows, ratios = host_info(), list[Row](), dict[str, dict[str, float]]()
    for policy in options.policies.split(","):
        copied, shared = measure(
            policy, options.rounds, options.requests, options.shared, options.own, options.answers
        )
        rows += [copied, shared]
        ratios[copied.policy] = {
            "own_bytes": round(shared.own_mib / copied.own_mib, 3),
            "booked_bytes": round(shared.booked_mib / copied.booked_mib, 3),
            "step_time": round(shared.step_ms / copied.step_ms, 3),
            "compress_time": round(shared.compress_ms / copied.compress_ms, 3),
        }
    lines = [[row.policy, row.kind, row.own_mib, row.booked_mib, row.cache_mib] for row in rows]
    for line, row in zip(lines, rows, strict=True):
        line += [row.step_ms, f"{row.step_quartiles_ms}", row.compress_ms]
    columns = ("policy", "beginning", "own MiB", "booked MiB", "cache MiB")
    times = ("step ms", "quartiles ms", "compress ms")
    title = f"{rows[0].requests} requests with {rows[0].cached_tokens} cached tokens"
    console.print(make_table((*columns, *times), lines, title))
    console.print(f"shared to copied: {ratios}")
    if options.json:
        fields = {"host": host, "threads": 1, "shared_to_copied": ratios}
        write_json({**fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
