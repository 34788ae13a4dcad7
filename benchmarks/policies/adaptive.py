"""An adaptive server next to fixed methods: links of several speeds, and memory that runs short.

    python -m benchmarks.policies.adaptive --plot docs/adaptive \
        --json benchmarks/results/adaptive.json

In virtual time, with the scheduler of the server. ``links``: prompts are read and compressed on one
machine, answers are written on another, and the speed of the link between them changes from 10
Mbit/s to 10 Gbit/s and back. The first 50 requests after each change are not counted. ``memory``:
one machine; for a while more requests come than its page memory holds, first without and then with
limits of KL for half of them. Bytes and errors of methods are those of the model's profile. Needs
no model and no server.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from random import Random
from statistics import mean

from benchmarks.policies.adaptive_plot import plot
from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig, CompressorConfig, PoolConfig, RouterConfig
from triptych.core.pages import PagePlan
from triptych.core.profile import Profile
from triptych.loadgen.report.host import host_info
from triptych.simulator import Cluster, Costs, Job, Simulation
from triptych.simulator.cluster import Outcome
from triptych.simulator.setup import SMOLLM2
from triptych.workers.models.compression_profile import PACKAGED

SMOLLM2_PROFILE = PACKAGED / "0f450573a792f80c.json"
ADAPTIVE = "adaptive"
MBIT = 1_000_000 / 8
SPEEDS_MBIT = (10, 100, 1000, 10_000, 1000, 100, 10)
RATES = {10: 0.12, 100: 0.6, 1000: 0.6, 10_000: 0.6}
"""Requests per second at each speed: what a link of 10 Mbit/s can carry, and half of what two
prefill workers can read."""
COUNT, SKIPPED = 150, 50
PAUSE_S = 120.0
"""Between two speeds, in which what waits is served."""
FLOORS = (0.003, 0.001)
MIB = 1 << 20
MEMORY_MIB, MEMORY_RATES, MEMORY_COUNTS = 160, (0.25, 2.5, 0.25), (40, 250, 80)


def plan(method: str) -> PagePlan:
    """The page plan of a server with this fixed method, or of an adaptive one."""
    is_adaptive = method == ADAPTIVE
    compressor = CompressorConfig(adaptive=is_adaptive, profile=str(SMOLLM2_PROFILE))
    config = AppConfig(compressor=compressor, pool=PoolConfig(prefix_bytes=0))
    found = PagePlan.of(config, SMOLLM2, Profile.read(SMOLLM2_PROFILE))
    if is_adaptive:
        return found
    others = PagePlan.of(
        replace(config, compressor=replace(compressor, adaptive=True)),
        SMOLLM2,
        Profile.read(SMOLLM2_PROFILE),
    )
    return replace(found, policy=others.of_method(method).policy, measured=others.measured)


def job(draw: Random, name: str, at_s: float, max_kl: float = 0.0) -> Job:
    prompt = min(3000, max(64, round(exp(draw.gauss(6.9, 0.5)))))
    answer = min(400, max(8, round(exp(draw.gauss(4.4, 0.6)))))
    return Job(name, prompt, 1024, at_s, output_tokens=answer, max_kl=max_kl)


@dataclass(frozen=True)
class Phase:
    """A time in which the load is the same."""

    begin_s: float
    jobs: tuple[Job, ...]


def phases(seed: int, loads: Sequence[tuple[float, int]], floors: Sequence[float]) -> list[Phase]:
    """``loads``: requests per second, and how many, of each phase."""
    draw, at_s, found = Random(seed), 0.0, list[Phase]()
    for number, (rate, count) in enumerate(loads):
        begin_s, jobs = at_s, list[Job]()
        for index in range(count):
            at_s += draw.expovariate(rate)
            limit = floors[index % (2 * len(floors)) // 2] if floors and index % 2 else 0.0
            jobs.append(job(draw, f"{number}-{index}", at_s, limit))
        found.append(Phase(begin_s, tuple(jobs)))
        at_s += PAUSE_S
    return found


def run(cluster: Cluster, parts: Sequence[Phase]) -> tuple[dict[str, Outcome], dict[str, int]]:
    jobs = [[one] for part in parts for one in part.jobs]
    trial = Simulation(cluster, Costs(), keep_gaps=False).run(jobs)
    return {one.job.id: one for one in trial.outcomes}, trial.counters


def counted(part: Phase, outcomes: dict[str, Outcome], skipped: int) -> list[Outcome]:
    return [outcomes[one.id] for one in part.jobs[skipped:]]


def summary(method: str, found: Sequence[Outcome]) -> dict[str, object]:
    shares = Counter(one.method for one in found)
    done = [one for one in found if one.is_done]
    return {
        "method": method,
        "job_s": mean(one.last_s - one.due_s for one in done),
        "failed": len(found) - len(done),
        "kl": mean(kl_of(one) for one in done),
        "methods": {name: count / len(found) for name, count in shares.most_common()},
    }


ADAPTIVE_PLAN = plan(ADAPTIVE)


def kl_of(one: Outcome) -> float:
    """KL of the method of a request; of its low class, if its tokens were lowered."""
    low = ADAPTIVE_PLAN.of_method(one.method).policy.low_format
    name = f"uniform:{low}" if one.is_lowered else one.method
    return ADAPTIVE_PLAN.kl_of(name, one.job.prompt_tokens) or 0.0


def links(methods: Sequence[str], seed: int) -> Iterator[dict[str, object]]:
    """The rows of each speed of the link, in the order of time."""
    parts = phases(seed, [(RATES[speed], COUNT) for speed in SPEEDS_MBIT], ())
    steps = [(part.begin_s, s * MBIT) for part, s in zip(parts, SPEEDS_MBIT, strict=True)]
    for method in methods:
        cluster = Cluster(
            prefill=2, decodes_apart=True, workers_per_node=3, shared_cores=False,
            capacity_bytes=1024 * MIB, links=tuple(steps), plan=plan(method),
            router=RouterConfig(max_queued_requests=1 << 30),
        )  # fmt: skip
        outcomes, _ = run(cluster, parts)
        for number, (part, speed) in enumerate(zip(parts, SPEEDS_MBIT, strict=True)):
            row = summary(method, counted(part, outcomes, SKIPPED))
            yield {"phase": number, "mbit_s": speed, "seed": seed, **row}


def memory(methods: Sequence[str], seed: int) -> Iterator[dict[str, object]]:
    """The rows of little load, much and little again; half of the requests have a limit of KL."""
    loads = list(zip(MEMORY_RATES, MEMORY_COUNTS, strict=True))
    for floors in ((), FLOORS):
        parts = phases(seed, loads, floors)
        for method in methods if not floors else (ADAPTIVE,):
            cluster = Cluster(
                prefill=2, decode=2, shared_cores=False, max_batch_requests=64,
                capacity_bytes=MEMORY_MIB * MIB, plan=plan(method),
                router=RouterConfig(max_queued_requests=1 << 30),
            )  # fmt: skip
            outcomes, counters = run(cluster, parts)
            below = sum(0 < one.job.max_kl < kl_of(one) for one in outcomes.values() if one.is_done)
            for number, (part, rate) in enumerate(zip(parts, MEMORY_RATES, strict=True)):
                found = counted(part, outcomes, 0)
                yield {
                    "phase": number, "rate": rate, "seed": seed, "floors": bool(floors),
                    "below_floor": below,
                    "lowered": sum(one.is_lowered for one in found),
                    "evicted": counters.get("growth:evicted", 0),
                    **summary(method, found),
                }  # fmt: skip


def with_ratios(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """Rows with job times relative to the best and the worst fixed method of the same phase."""

    def key(row: dict[str, object]) -> tuple[object, ...]:
        return row["phase"], row["seed"]

    fixed = [row for row in rows if row["method"] != ADAPTIVE]
    for row in rows:
        same = [float(str(one["job_s"])) for one in fixed if key(one) == key(row)]
        row["to_best"] = float(str(row["job_s"])) / min(same)
        row["to_worst"] = float(str(row["job_s"])) / max(same)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="write PATH.png and PATH.svg")
    options = parser.parse_args()
    methods = (*ADAPTIVE_PLAN.adaptive, ADAPTIVE)
    host = host_info()
    over_links = with_ratios([row for seed in options.seeds for row in links(methods, seed)])
    in_memory = with_ratios([row for seed in options.seeds for row in memory(methods, seed)])
    body = {"host": host, "links": over_links, "memory": in_memory}
    if options.json:
        write_json(body, options.json)
    for title, rows, name in (("links", over_links, "mbit_s"), ("memory", in_memory, "rate")):
        head = ("phase", name, "method", "job_s", "to_best", "to_worst", "kl", "failed", "methods")
        lines = [
            [row[column] for column in head] for row in rows if row["seed"] == options.seeds[0]
        ]
        console.print(make_table(head, lines, title))
    if options.plot:
        plot(over_links, ADAPTIVE_PLAN.adaptive, options.plot)


if __name__ == "__main__":
    main()
