"""Bookings by forecast against bookings by bounds, in virtual time at saturation.

    python benchmarks/policies/booking.py --json benchmarks/results/booking.json

Chats set no ``max_tokens``, so each may write until the end of its context of 4,096 tokens. Lengths
are log-normal as in ShareGPT (prompts: median 80 tokens; answers: median 200, mean 330), or all
answers run to their limit. ``oracle`` books bounds and knows the length of each answer;
``unlimited`` has so much memory that nothing waits for it: what the simulated workers can compute.
The rules were tuned on seeds 1 to 3. Needs no model and no server.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import exp
from pathlib import Path
from random import Random

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import RouterConfig
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.stats import percentile
from triptych.simulator import Cluster, Costs, Job, Simulation

MIB = 1 << 20
CAPACITIES = (64, 256)
UNLIMITED_MIB = 1 << 20
RISKS = (0.002, 0.0005)
CONTEXT = 4096
SHORT_CONTEXT = 2048
"""Of the adversarial load; the bound of every request fits the smallest memory several times."""
SLOTS = 64
CHATS, WRITERS = 400, 60
BURST, PAUSE_S = 50, 90.0


def chat(draw: Random, number: int, at_s: float) -> Job:
    prompt = min(2000, max(4, round(exp(draw.gauss(4.4, 1.1)))))
    most = CONTEXT - prompt
    answer = min(most, max(1, round(exp(draw.gauss(5.3, 1.0)))))
    return Job(f"r{number}", prompt, most, at_s, output_tokens=answer)


def chats(seed: int) -> Iterator[Job]:
    """More than can run, all within seconds."""
    draw = Random(seed)
    return (chat(draw, number, number / 50) for number in range(CHATS))


def bursts(seed: int) -> Iterator[Job]:
    """Bursts, each of more than can run, and pauses in which the queue becomes short."""
    draw = Random(seed)
    return (chat(draw, n, n // BURST * PAUSE_S) for n in range(CHATS))


def writers(seed: int) -> Iterator[Job]:
    """Every answer runs to its limit."""
    draw = Random(seed)
    for number in range(WRITERS):
        prompt = min(1000, max(4, round(exp(draw.gauss(4.4, 1.1)))))
        yield Job(f"r{number}", prompt, SHORT_CONTEXT - prompt, number / 50)


LOADS = {"chats": chats, "bursts": bursts, "all to max_tokens": writers}


def known(jobs: Iterator[Job]) -> Iterator[Job]:
    """The same with ``max_tokens`` set to the length of each answer."""
    return (replace(job, max_tokens=job.answer_tokens) for job in jobs)


def measure(load: str, mib: int, booking: str, risk: float, seed: int) -> dict[str, object]:
    router = RouterConfig(
        booking="forecast" if booking == "forecast" else "bounds",
        overcommit_risk=risk,
        max_queued_requests=1 << 30,
    )
    cluster = Cluster(
        capacity_bytes=mib * MIB, max_batch_requests=SLOTS, shared_cores=False, router=router
    )
    jobs = LOADS[load](seed)
    jobs = known(jobs) if booking == "oracle" else jobs
    trial = Simulation(cluster, Costs(), keep_gaps=False).run((job,) for job in jobs)
    done = [one for one in trial.outcomes if one.is_done]
    counted, count = trial.counters, max(1, len(done))
    refused = sum(one.error == "context_length_exceeded" for one in trial.outcomes)
    return {
        "load": load,
        "mib": mib,
        "booking": booking,
        "risk": risk if booking == "forecast" else None,
        "seed": seed,
        "completed": len(done),
        "refused": refused,
        "failed": len(trial.outcomes) - len(done) - refused,
        "duration_s": trial.duration_s,
        "output_tokens_per_s": sum(one.job.answer_tokens for one in done) / trial.duration_s,
        "decoding": trial.state_seconds.get("decoding", 0.0) / trial.duration_s,
        "booked_of_capacity": trial.mean_booked_bytes / cluster.capacity_bytes,
        "booked_by_held": trial.mean_booked_bytes / max(1.0, trial.mean_held_bytes),
        "bound_by_booked": trial.mean_bound_bytes / max(1.0, trial.mean_booked_bytes),
        "preempted_share": counted.get("growth:preempted", 0) / count,
        "recomputed_share": counted.get("recomputed", 0) / count,
        "lowered_share": counted.get("growth:lowered", 0) / count,
        "decision_p50_ms": percentile([seconds * 1e3 for seconds in trial.decision_s], 50),
    }


def cases(seeds: Sequence[int]) -> Iterator[tuple[str, int, str, float, int]]:
    for load, seed in product(LOADS, seeds):
        yield load, UNLIMITED_MIB, "unlimited", 0.5, seed
        for mib in CAPACITIES:
            yield load, mib, "bounds", 0.5, seed
            if load != "all to max_tokens":
                yield load, mib, "oracle", 0.5, seed
            for risk in RISKS:
                yield load, mib, "forecast", risk, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", default="4,5,6")
    asked = parser.parse_args()
    seeds = [int(seed) for seed in asked.seeds.split(",")]
    host, rows = host_info(), list[dict[str, object]]()
    for case in cases(seeds):
        rows.append(measure(*case))
        write_json({"simulated": True, "host": host, "rows": rows}, asked.json)
    shown = [[f"{v:.3g}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    console.print(make_table([*rows[0]], shown, "Bookings"))


if __name__ == "__main__":
    main()
