"""Goodput at three times the capacity of a server, and its recovery time afterwards.

    python benchmarks/serving/overload.py --json benchmarks/results/overload_simulated.json
    python benchmarks/serving/overload.py --live --json benchmarks/results/overload_live.json

One minute at 0.6 of saturation, two minutes at 3 times saturation, one minute at 0.6. Without
``--live`` the scheduler runs in virtual time; with it a server is started (eight minutes). Goodput
counts answers inside both limits, by the second in which they ended. Its peak is the best of steady
runs; the server is back when of the requests that come within ``WINDOW_S`` as many are good as
before (less 5 %).
"""

import argparse
import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from random import Random
from time import perf_counter

from server import serving  # beside this file

from triptych.cli.output import console, make_table, write_json
from triptych.cli.serving.scrape import read_metrics
from triptych.core.config import RouterConfig
from triptych.core.messages import NO_SLO, Slo
from triptych.loadgen.client import open_client, send
from triptych.loadgen.report.gauges import watch_gauges
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.report.stats import percentile
from triptych.loadgen.workload.arrivals import arrivals_s
from triptych.loadgen.workload.load import Load
from triptych.loadgen.workload.simulated import tpot_s
from triptych.simulator import Cluster, Costs, Job, Simulation
from triptych.simulator.capacity import saturation_rate

QUIET, OVERLOAD = 0.6, 3.0
PHASES_S = (60.0, 120.0, 60.0)
STEADY = (0.6, 0.8, 1.0, 1.25)
WINDOW_S = 10.0
SLO = Slo(ttft_s=2.0, tpot_s=0.2)
LIVE_CLIENTS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 200, 24

CLUSTERS = {
    "1+1+1 on two cores": Cluster(),
    "6+2+12 with cores of their own": Cluster(
        prefill=6, compress=2, decode=12, workers_per_node=10, shared_cores=False
    ),
}


@dataclass(frozen=True, slots=True)
class Seen:
    """Result of one request at its client."""

    due_s: float
    end_s: float
    ttft_s: float
    tpot_s: float
    error: str

    @property
    def fate(self) -> str:
        """Outcome of a request: an error, the missed limit, or ``good``."""
        if self.error:
            return self.error
        if self.ttft_s > SLO.ttft_s:
            return "late first token"
        return "slow tokens" if self.tpot_s > SLO.tpot_s else "good"

    @property
    def is_good(self) -> bool:
        return self.fate == "good"


def rates_s(saturation: float) -> list[tuple[float, float]]:
    """Rate and length of each phase."""
    factors = (QUIET, OVERLOAD, QUIET)
    return [(f * saturation, s) for f, s in zip(factors, PHASES_S, strict=True)]


def due_times(phases: Sequence[tuple[float, float]], seed: int) -> list[float]:
    times, start = list[float](), 0.0
    for number, (rate, seconds) in enumerate(phases):
        found = arrivals_s(round(rate * seconds), rate, f"{seed}/{number}")
        times += [start + at for at in found if at < seconds]
        start += seconds
    return times


def judge(
    seen: Sequence[Seen], phases: Sequence[tuple[float, float]], peak: float
) -> dict[str, object]:
    """The figures of one run with its three phases."""
    ends = [0.0, *(sum(s for _, s in phases[: n + 1]) for n in range(len(phases)))]
    spans = list(pairwise(ends))
    goodput = [goodput_of(seen, *span) for span in spans]
    before = good_share(seen, *spans[0])
    over = spans[1][1]
    back = next(
        (
            after
            for after in range(round(spans[2][1] - over - WINDOW_S) + 1)
            if good_share(seen, over + after, over + after + WINDOW_S) >= 0.95 * before
        ),
        None,
    )
    return {
        "goodput_before": goodput[0],
        "goodput_overloaded": goodput[1],
        "goodput_after": goodput[2],
        "peak_goodput": peak,
        "of_peak": goodput[1] / peak if peak else 0.0,
        "good_share_before": before,
        "back_after_s": back,
        "requests": len(seen),
        "fates": [dict(Counter(one.fate for one in _came(seen, *span))) for span in spans],
    }


def goodput_of(seen: Sequence[Seen], begin: float, end: float) -> float:
    return sum(one.is_good and begin <= one.end_s < end for one in seen) / (end - begin)


def good_share(seen: Sequence[Seen], begin: float, end: float) -> float:
    """Of those that came in a span."""
    came = _came(seen, begin, end)
    return sum(one.is_good for one in came) / len(came) if came else 1.0


def _came(seen: Sequence[Seen], begin: float, end: float) -> list[Seen]:
    return [one for one in seen if begin <= one.due_s < end]


# ---------------------------------------------------------------- in virtual time


def simulate(
    cluster: Cluster, times: Sequence[float], asked: Slo, seed: int
) -> tuple[list[Seen], int, float]:
    """What clients saw, the most that was booked in all arenas, and 99 % of decisions in ms."""
    sizes = Load(shape="mixed", prompt_tokens=PROMPT_TOKENS, output_tokens=OUTPUT_TOKENS, seed=seed)
    turns = [session.turns[0] for session in sizes.sessions(len(times))]
    jobs = [
        (Job(f"r{n}", turn.prompt_tokens, turn.output_tokens, at_s=at, slo=asked),)
        for n, (at, turn) in enumerate(zip(times, turns, strict=True))
    ]
    trial = Simulation(cluster, Costs(), keep_gaps=False).run(jobs)
    seen = [
        Seen(one.due_s, one.last_s, one.first_s - one.due_s, tpot_s(one) or 0.0, one.error)
        for one in trial.outcomes
    ]
    decisions = percentile([seconds * 1e3 for seconds in trial.decision_s], 99)
    return seen, trial.peak_booked_bytes, decisions


def simulated_rows(policies: Sequence[str], seed: int) -> list[dict[str, object]]:
    rows = list[dict[str, object]]()
    for name, cluster in CLUSTERS.items():
        saturation = saturation_rate(cluster, Costs(), PROMPT_TOKENS, OUTPUT_TOKENS)
        room = cluster.capacity_bytes * len({arena for _, arena, _ in cluster.workers})
        for policy in policies:
            for asked in (NO_SLO, SLO):
                router = RouterConfig(batch_policy=policy)
                here = replace(cluster, router=router)
                peak = max(
                    goodput_of(
                        simulate(here, due_times([(f * saturation, 60.0)], seed), asked, seed)[0],
                        0.0,
                        60.0,
                    )
                    for f in STEADY
                )
                phases = rates_s(saturation)
                seen, booked, p99 = simulate(here, due_times(phases, seed), asked, seed)
                fields = {"cluster": name, "policy": policy, "requests_say_slo": asked is SLO}
                figures = judge(seen, phases, peak)
                memory = {"peak_booked": booked / room, "decision_p99_ms": p99}
                rows.append({**fields, **figures, **memory, "saturation_per_s": saturation})
    return rows


# ---------------------------------------------------------------- live


def body(draw: Random, *, asks: bool) -> dict[str, object]:
    limits = {"ttft_slo_ms": SLO.ttft_s * 1e3, "tpot_slo_ms": SLO.tpot_s * 1e3} if asks else {}
    return {
        "prompt": [draw.randrange(1000, 9000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **limits,
    }


async def closed(url: str, seconds: float, draw: Random) -> list[Sample]:
    """Closed loop of this many clients without pauses: the capacity of the server."""
    samples, until = list[Sample](), perf_counter() + seconds

    async def client_loop() -> None:
        async with open_client(url, 1) as client:
            while perf_counter() < until:
                samples.append(await send(client, "completions", body(draw, asks=False)))

    await asyncio.gather(*(client_loop() for _ in range(LIVE_CLIENTS)))
    return samples


async def opened(url: str, times: Sequence[float], draw: Random) -> list[Seen]:
    bodies = [body(draw, asks=True) for _ in times]
    async with open_client(url, len(times)) as client:
        begin = perf_counter()

        async def one(at: float, asked: dict[str, object]) -> Seen:
            await asyncio.sleep(begin + at - perf_counter())
            sample = await send(client, "completions", asked, begin + at)
            error = "" if sample.error is None else sample.error[:8]
            end_s = perf_counter() - begin
            if error:
                return Seen(at, end_s, 0.0, 0.0, error)
            return Seen(at, end_s, sample.ttft_s, sample.tpot_s or 0.0, "")

        return list(await asyncio.gather(*map(one, times, bodies)))


async def live_row(url: str, seed: int) -> dict[str, object]:
    draw, seconds = Random(seed), PHASES_S[0]
    await closed(url, seconds / 3, draw)  # warms up
    samples = await closed(url, seconds, draw)
    done = [one for one in samples if one.error is None]
    saturation = len(done) / (max(s.ended_s for s in done) - min(s.started_s for s in done))
    peak = 0.0
    for factor in STEADY[1:3]:
        phase = [(factor * saturation, seconds)]
        seen = await opened(url, due_times(phase, seed), draw)
        peak = max(peak, goodput_of(seen, 0.0, seconds))
    phases = rates_s(saturation)
    async with watch_gauges(url, None) as series:
        seen = await opened(url, due_times(phases, seed), draw)
    metrics = read_metrics(url)
    memory = {
        "peak_booked": max(series.booked_bytes) / metrics.total("triptych_router_capacity_bytes"),
        "workers_lost": metrics.total("triptych_router_decisions", reason="peers_lost"),
    }
    return {"saturation_per_s": saturation, **judge(seen, phases, peak), **memory}


def live_rows(seed: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder, serving({}, 8179, Path(folder)) as server:
        return [asyncio.run(live_row(server.url, seed))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--policy", default="greedy_by_memory,dynamic,fcfs")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    host = host_info()
    if asked.live:
        rows = live_rows(asked.seed)
    else:
        rows = simulated_rows(asked.policy.split(","), asked.seed)
    limits = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    write_json({"simulated": not asked.live, "host": host, "slo": limits, "rows": rows}, asked.json)
    shown = [name for name in rows[0] if name not in ("fates", "requests")]
    console.print(make_table(shown, [[row[name] for name in shown] for row in rows], "overload"))


if __name__ == "__main__":
    main()
