"""CPU time of the router's decisions against the number of workers and of waiting requests.

    python benchmarks/policies/decisions.py --json benchmarks/results/decisions.json

The server's scheduler runs in virtual time with more requests than the cluster holds. All messages
after the last arrival are timed. Needs no model and no server.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Literal

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import RouterConfig
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.stats import percentile
from triptych.simulator import Cluster, Costs, Job, Simulation
from triptych.simulator.setup import split_of

CASES = "10x1000,100x1000,1000x1000,1000x10000,1000x40000"
"""Workers and requests that wait beside those that run."""
WORKERS_PER_NODE = 10
STOP_S = 2.0
SLOTS = 32
BEGINNINGS = 50
PREFIX_BYTES = 200 << 20
"""Of each machine."""


def jobs(count: int) -> Iterator[tuple[Job, ...]]:
    """Requests of many sizes, all due at once; half of each prompt is one of some beginnings."""
    draw = Random(1)
    for number in range(count):
        tokens = draw.randint(64, 1024)
        common = (f"prefix {draw.randrange(BEGINNINGS)}", tokens // 2)
        parts = (common, (f"own {number}", tokens - common[1]))
        yield (Job(f"r{number}", tokens, draw.randint(8, 64), segments=parts),)


def measure(
    replicas: int, waiting: int, policy: str, placement: str, booking: Literal["forecast", "bounds"]
) -> dict[str, object]:
    """One cluster with a line of about this length."""
    prefill, compress, decode = split_of(replicas)
    cluster = Cluster(
        prefill=prefill,
        compress=compress,
        decode=decode,
        workers_per_node=WORKERS_PER_NODE,
        shared_cores=False,
        max_batch_requests=SLOTS,
        router=RouterConfig(
            batch_policy=policy,
            placement=placement,
            booking=booking,
            max_queued_requests=1 << 40,
        ),
    )
    cluster = replace(cluster, plan=replace(cluster.plan, prefix_bytes=PREFIX_BYTES))
    count = waiting + decode * SLOTS
    simulation = Simulation(cluster, Costs(), keep_gaps=False)
    trial = simulation.run(jobs(count), stop_s=STOP_S)
    times = [seconds * 1e3 for seconds in trial.decision_s[count:]]
    left = count - trial.counters.get("admitted", 0)
    return {
        "replicas": replicas,
        "waiting": waiting,
        "waiting_at_end": left,
        "policy": policy,
        "placement": placement,
        "booking": booking,
        "decisions": len(times),
        "p50_ms": percentile(times, 50),
        "p99_ms": percentile(times, 99),
        "mean_ms": sum(times) / len(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--policy", default="greedy_by_memory")
    parser.add_argument("--placement", default="least_bytes,dualmap")
    parser.add_argument("--cases", default=CASES)
    asked = parser.parse_args()
    host, rows = host_info(), list[dict[str, object]]()
    for case, placement in product(asked.cases.split(","), asked.placement.split(",")):
        replicas, waiting = map(int, case.split("x"))
        for booking in ("forecast", "bounds"):
            rows.append(measure(replicas, waiting, asked.policy, placement, booking))
        write_json({"simulated": True, "host": host, "rows": rows}, asked.json)
    console.print(make_table([*rows[0]], [[*row.values()] for row in rows], "CPU time"))


if __name__ == "__main__":
    main()
