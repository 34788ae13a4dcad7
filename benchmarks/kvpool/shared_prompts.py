"""Work and bytes of requests that share a prompt which no cache has.

    python benchmarks/kvpool/shared_prompts.py --json benchmarks/results/shared_prompts.json

A server in this process with the default settings. ``equal``: requests with equal prompts, as the
choices of one request (``n``), or clients that ask the same at once, send them. ``beginning``:
requests with the same beginning and an end of their own. Every round has a new prompt. Prefill
tokens are those that the model computes. Bytes are those of the pool while all requests decode,
with the prefix cache counted once; the peak includes raw pages. Times are CPU times of the worker
thread, to reduce the effect of other processes, but for TTFT. ``simulated``: bursts of such
requests in virtual time, with the scheduler of the server.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig, RouterConfig
from triptych.core.messages import Failed, Sampling, Send
from triptych.kvpool import PoolStats
from triptych.loadgen.report.host import host_info
from triptych.simulator import Cluster, Costs, Job, Simulation
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.loop import Work
from triptych.workers.models.attention_interface import Attend
from triptych.workers.models.early_exit import Exits
from triptych.workers.models.runner import Runner
from triptych.workers.models.vision.feature_rows import FeatureRows
from triptych.workers.prefill.prefill_engine import PrefillEngine
from triptych.workers.stage import Engine

VOCAB = 49_152
MIB = 1 << 20
KINDS = ("equal", "beginning")
BURSTS, EVERY_S, ANSWER = 20, 30.0, 64
"""Of the simulation: number, seconds between them, and tokens of each answer."""


@dataclass
class CountingRunner:
    """A runner that counts the tokens of its forward passes."""

    runner: Runner
    tokens: int = 0

    @property
    def num_heads(self) -> int:
        return self.runner.num_heads

    @property
    def can_exit(self) -> bool:
        return self.runner.can_exit

    @property
    def step_bytes(self) -> int:
        return self.runner.step_bytes

    @property
    def can_capture(self) -> bool:
        return self.runner.can_capture

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        logits_at: Tensor,
        exits: Exits | None = None,
        given: FeatureRows | None = None,
    ) -> Tensor:
        self.tokens += len(tokens)
        return self.runner.forward(tokens, positions, attend, logits_at, exits, given)

    def embed(self, tokens: Tensor, given: FeatureRows | None = None) -> Tensor:
        return self.runner.embed(tokens, given)

    def through(self, layers: range, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return self.runner.through(layers, hidden, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.runner.logits(hidden)


@dataclass
class Watch:
    """Runs around the work of the engines."""

    requests: int
    stats: Callable[[], PoolStats]
    runner: CountingRunner | None = None
    cpu_ms: dict[str, float] = field(default_factory=dict[str, float])
    prefill_tokens: int = 0
    own_bytes: int = 0
    """Held by the requests, without shared pages."""
    cache_bytes: int = 0
    peak_bytes: int = 0

    def around(self, engine: Engine, work: Work) -> Iterable[Send] | None:
        if isinstance(engine, PrefillEngine) and self.runner is None:
            self.runner = engine.runner = CountingRunner(engine.runner)
        running = len(engine.slots()[0]) if isinstance(engine, DecodeEngine) else 0
        self._look(is_steady=running == self.requests)
        began = time.thread_time()
        done = work()
        took_ms = 1e3 * (time.thread_time() - began)
        self.cpu_ms[engine.stage] = self.cpu_ms.get(engine.stage, 0.0) + took_ms
        return done

    def _look(self, *, is_steady: bool) -> None:
        stats = self.stats()
        own = (stats.request_pages - stats.prefix_pages) * stats.page_bytes
        self.peak_bytes = max(self.peak_bytes, own + stats.prefix.bytes)
        if is_steady and not self.own_bytes:
            self.own_bytes, self.cache_bytes = own, stats.prefix.bytes


@dataclass(frozen=True)
class Row:
    """One kind of requests; medians over the rounds."""

    kind: str
    requests: int
    prompt_tokens: int
    prefill_tokens: float
    prefill_cpu_ms: float
    own_mib: float
    cache_mib: float
    peak_mib: float
    ttft_mean_s: float
    ttft_last_s: float


def tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCAB) for _ in range(count)]


def prompts_of(
    kind: str, count: int, length: int, common: int, chance: random.Random
) -> list[list[int]]:
    if kind == "equal":
        return [tokens(chance, length)] * count
    beginning = tokens(chance, common)
    return [beginning + tokens(chance, length - common) for _ in range(count)]


def ask(
    server: LocalServer, prompts: Sequence[Sequence[int]], answer: int
) -> tuple[list[float], list[tuple[int, ...]]]:
    """Ask all at once: seconds to each first token, and the answers."""
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    requests = [server.request(prompt, sampling) for prompt in prompts]
    began, first = time.monotonic(), dict[str, float]()
    answers = dict[str, list[int]]((one.id, []) for one in requests)
    for event in server.stream(requests):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        first.setdefault(event.request, time.monotonic() - began)
        answers[event.request] += event.tokens
    return list(first.values()), [tuple(answers[one.id]) for one in requests]


def measure(kind: str, count: int, options: argparse.Namespace) -> Row:
    """Ask several times, on a server of its own whose cache is empty."""
    chance, watches, first = random.Random(count), list[Watch](), list[list[float]]()
    for _ in range(options.rounds):
        prompts = prompts_of(kind, count, options.prompt, options.common, chance)
        with LocalServer(AppConfig.from_mapping({})) as server:
            server.pool.arena.data.fill(0)  # so that no page is touched for the first time
            ask(server, [tokens(chance, 64)], 2)  # warm
            base = server.pool.stat().prefix.bytes
            watch = Watch(count, server.pool.stat)
            with server.instrumented(watch.around):
                times, answers = ask(server, prompts, options.answers)
            watch.cache_bytes -= base
            watch.peak_bytes -= base
            watch.prefill_tokens = watch.runner.tokens if watch.runner else 0
        del server, watch.stats, watch.runner  # and the memory of the pool
        if kind == "equal" and len(set(answers)) > 1:
            raise RuntimeError("equal prompts were answered differently")
        watches.append(watch)
        first.append(times)

    def mid(values: Iterable[float], digits: int = 1) -> float:
        return round(statistics.median(values), digits)

    return Row(
        kind=kind,
        requests=count,
        prompt_tokens=options.prompt,
        prefill_tokens=mid(one.prefill_tokens for one in watches),
        prefill_cpu_ms=mid(one.cpu_ms["prefill"] for one in watches),
        own_mib=mid((one.own_bytes / MIB for one in watches), 2),
        cache_mib=mid((one.cache_bytes / MIB for one in watches), 2),
        peak_mib=mid((one.peak_bytes / MIB for one in watches), 2),
        ttft_mean_s=mid((statistics.mean(times) for times in first), 2),
        ttft_last_s=mid((max(times) for times in first), 2),
    )


def bursts(kind: str, count: int, options: argparse.Namespace) -> Iterator[Job]:
    """Bursts of requests that share a prompt; every burst has another one."""
    for burst in range(BURSTS):
        for number in range(count):
            name, common = f"{burst}-{number}", options.common
            own = (f"end of {name}", options.prompt - common)
            whole = (f"prompt {burst}", options.prompt)
            begun = ((f"beginning {burst}", common), own)
            yield Job(
                name,
                options.prompt,
                ANSWER,
                burst * EVERY_S,
                segments=(whole,) if kind == "equal" else begun,
            )


def simulate(kind: str, count: int, options: argparse.Namespace) -> dict[str, object]:
    plan = replace(Cluster().plan, prefix_bytes=256 * MIB)
    cluster = Cluster(plan=plan, router=RouterConfig(max_queued_requests=1 << 30))
    jobs = ((job,) for job in bursts(kind, count, options))
    trial = Simulation(cluster, Costs(), keep_gaps=False).run(jobs)
    times = [one.first_s - one.due_s for one in trial.outcomes]
    return {
        "kind": kind,
        "requests": count,
        "prefill_busy_s": round(trial.busy_s["prefill"], 2),
        "ttft_mean_s": round(statistics.mean(times), 3),
        "duration_s": round(trial.duration_s, 1),
        "waits": trial.counters.get("wait:shared_prompt", 0),
        "tokens_shared": trial.counters.get("shared_prompt:tokens", 0),
        "failed": sum(not one.is_done for one in trial.outcomes),
    }


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Of several requests to one, by kind."""
    found = dict[str, dict[str, float]]()
    for kind in dict.fromkeys(row.kind for row in rows):
        one, *more = (row for row in rows if row.kind == kind)
        for row in more:
            found[f"{kind}_{row.requests}"] = {
                "prefill_tokens": round(row.prefill_tokens / one.prefill_tokens, 3),
                "prefill_cpu": round(row.prefill_cpu_ms / one.prefill_cpu_ms, 3),
                "bytes": round((row.own_mib + row.cache_mib) / (one.own_mib + one.cache_mib), 3),
                "peak_bytes": round(row.peak_mib / one.peak_mib, 3),
            }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens of each prompt")
    parser.add_argument("--common", type=int, default=960, help="tokens of a common beginning")
    parser.add_argument("--answers", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    host, counts = host_info(), (1, options.requests)
    rows = [measure(kind, count, options) for kind in KINDS for count in counts]
    several = ratios(rows)
    simulated = [simulate(kind, count, options) for kind in KINDS for count in counts]
    lines = [list(asdict(row).values()) for row in rows]
    console.print(make_table(list(asdict(rows[0])), lines, "Requests that share a prompt"))
    console.print(f"of several to one: {several}")
    lines = [list(row.values()) for row in simulated]
    console.print(make_table(list(simulated[0]), lines, f"{BURSTS} bursts, simulated"))
    if options.json:
        found = {"host": host, "threads": 1, "of_several_to_one": several}
        measured = [asdict(row) for row in rows]
        write_json({**found, "rows": measured, "simulated": simulated}, options.json)


if __name__ == "__main__":
    main()
