"""Batch policies on live servers with the same trace, from low load to twice the capacity.

    python benchmarks/serving/schedules.py --json benchmarks/results/schedules.json --folder runs

Each policy gets its own server; the order rotates from round to round. Rates are multiples of the
closed-loop throughput of the default policy. Beside latencies the result has the cost of each part:
CPU time by process, the share of the time that workers spent in steps, and bytes of keys and
values. About a quarter of an hour a round.
"""

import argparse
import asyncio
import tempfile
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray
from server import serving  # beside this file

from triptych.cli.list_options import names, numbers
from triptych.cli.measure.bench import save_details, workload_fields
from triptych.cli.measure.load_options import LoadOptions, shallow
from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.measure import Level, Results, ServeBenchmark, measure
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.processes import tree_of
from triptych.loadgen.report.stats import Slo
from triptych.loadgen.workload.openai_requests import Workload

MODEL = "smollm2-135m-instruct"
DEFAULT_POLICY = "greedy_by_memory"
POLICIES = (
    DEFAULT_POLICY,
    "dynamic",
    "fcfs",
    "static:p1c1d8",
    "static:p2c2d8",
    "static:p3c3d6",
    "static:p4c4d8",
)
FACTORS = (0.3, 0.7, 1.0, 2.0)
CLOSED = Level(requests=40, concurrency=8)
LENGTHS = LoadOptions(
    shape="mixed",
    prompt_tokens=200,
    output_tokens=24,
    max_prompt_tokens=1500,
    max_output_tokens=200,
)
DISTURBED = 0.1
"""Cores that were busy with something else; above that a run does not count."""
SLO = Slo(ttft_ms=2000.0, tpot_ms=200.0)
THIN = ("Router", "Ingress", "ProxyActor", "Pool")
"""Processes that compute no model."""
SHOWN = (
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "request_throughput",
    "request_goodput",
    "goodput_per_gb_kv",
    "peak_kv_bytes",
)

Row = dict[str, object]
Matrix = NDArray[np.float64]


def press(policy: str, levels: tuple[Level, ...], seed: int, port: int) -> Results:
    """Start a server with one policy, and measure every level."""
    args: dict[str, object] = {"model": {"name": MODEL}, "router": {"batch_policy": policy}}
    workload = Workload(**shallow(replace(LENGTHS, seed=seed).resolve()), model=MODEL)
    with tempfile.TemporaryDirectory() as folder, serving(args, port, Path(folder)) as server:
        benchmark = ServeBenchmark(
            url=server.url,
            workload=workload,
            levels=levels,
            warmup_requests=3,
            slo=SLO,
            server=tree_of(server.pid),
        )
        return asyncio.run(measure(benchmark, lambda _: lambda _: None))


def levels_at(saturation: float, factors: list[float], window_s: float) -> tuple[Level, ...]:
    """As many requests as come within the window, but enough for a percentile."""
    rates = [factor * saturation for factor in factors]
    return tuple(Level(requests=max(12, round(r * window_s)), rate_per_s=r) for r in rates)


def middle(rows: list[Row]) -> list[Row]:
    """Medians over the rounds that nothing disturbed, by policy and load."""
    groups = dict[tuple[object, object], list[Row]]()
    for row in (row for row in rows if cast("float", row["other_cores"]) <= DISTURBED):
        groups.setdefault((row["label"], row["load_factor"]), []).append(row)
    found = list[Row]()
    for (policy, factor), group in groups.items():
        values = {name: _median_of(group, name) for name in SHOWN}
        found.append({"label": policy, "load_factor": factor, "rounds": len(group), **values})
    return found


def overhead(rows: list[Row]) -> list[Row]:
    """What each process that computes no model takes: of a core while it is idle, and in CPU
    milliseconds for each request and each token, by least squares over all runs."""
    beside = ("duration", "completed", "total_output_tokens")
    work = np.array([[row[name] for name in beside] for row in rows], np.float64)
    found = list[Row]()
    for kind in THIN:
        spent = np.array([_cpu_s(row).get(kind, 0.0) for row in rows])
        idle, request, token = weights = not_negative(work, spent)
        error = float(np.sqrt(np.mean((work @ weights - spent) ** 2)))
        found.append(
            {
                "process": kind,
                "idle_cores": float(idle),
                "ms_per_request": float(request) * 1e3,
                "ms_per_token": float(token) * 1e3,
                "rms_error_s": error,
                "mean_cpu_s": float(spent.mean()),
            }
        )
    return found


def not_negative(work: Matrix, spent: Matrix) -> Matrix:
    """Least squares with no weight below 0: the best of all choices of columns that has none."""
    count = work.shape[1]
    best, least = np.zeros(count), float(np.sum(spent**2))
    for chosen in (c for n in range(1, count + 1) for c in combinations(range(count), n)):
        found, *_ = np.linalg.lstsq(work[:, chosen], spent, rcond=None)
        error = float(np.sum((work[:, chosen] @ found - spent) ** 2))
        if found.min() >= 0 and error < least:
            best, least = np.zeros(count), error
            best[list(chosen)] = found
    return best


def _cpu_s(row: Row) -> dict[str, float]:
    return cast("dict[str, float]", row["cpu_s"])


def _median_of(rows: list[Row], name: str) -> float:
    """Of those rows that have the figure: with no answer in time there is no goodput per GB."""
    values = [row[name] for row in rows]
    return median([float(value) for value in values if isinstance(value, int | float)] or [0.0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=1, help="to go on, or repeat one")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--load-factor", default=",".join(map(str, FACTORS)))
    parser.add_argument("--window-s", type=float, default=15.0, help="in which requests come")
    parser.add_argument("--saturation", type=float, help="requests per second; default: measured")
    parser.add_argument("--folder", type=Path, help="write each request of each run here")
    parser.add_argument("--port", type=int, default=8141)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    policies, factors = names(asked.policies), numbers(asked.load_factor)
    host, rows, saturation = host_info(), list[Row](), asked.saturation
    if saturation is None:
        closed = press(DEFAULT_POLICY, (CLOSED,), 0, asked.port)
        saturation = closed.rows[0].figures["request_throughput"]
        assert saturation is not None
    levels = levels_at(saturation, factors, asked.window_s)
    console.print(f"saturation: {saturation:.2f} requests a second")
    for turn in range(asked.first_round - 1, asked.first_round - 1 + asked.rounds):
        first = turn % len(policies)
        for policy in policies[first:] + policies[:first]:
            console.print(f"==> round {turn + 1}: {policy}")
            results = press(policy, levels, turn + 1, asked.port)
            rows += [
                {"label": policy, "round": turn + 1, "load_factor": factor, **row.as_json()}
                for factor, row in zip(factors, results.rows, strict=True)
            ]
            if asked.folder:
                about = {"host": host, **workload_fields(results.workload, None)}
                save_details(asked.folder, policy.replace(":", "-"), results.rows, about)
            write_json(
                {
                    "host": host,
                    "slo": asdict(SLO),
                    "saturation_per_s": saturation,
                    "medians": middle(rows),
                    "overhead": overhead(rows),
                    "rows": rows,
                },
                asked.json,
            )
    columns = ("label", "load_factor", *SHOWN)
    console.print(make_table(columns, [[row[name] for name in columns] for row in middle(rows)]))
    costs = overhead(rows)
    console.print(make_table(tuple(costs[0]), [list(row.values()) for row in costs]))


if __name__ == "__main__":
    main()
