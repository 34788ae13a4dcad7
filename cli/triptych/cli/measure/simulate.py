"""``triptych simulate``: run the real scheduler with simulated workers in virtual time."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, cast

import typer

from triptych.cli.list_options import integers, names, numbers
from triptych.cli.measure.load_options import LoadOptions
from triptych.cli.measure.simulate_fit import simulate_fit, simulate_replay
from triptych.cli.output import console, make_table, progress_bars, renamed_option, write_json
from triptych.core import messages as core
from triptych.core.config import RouterConfig, require
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.stats import Slo
from triptych.loadgen.workload.load import Load
from triptych.loadgen.workload.shapes import SHAPES
from triptych.loadgen.workload.simulated import (
    decision_ms,
    figures_of,
    jobs_of,
    per_job,
    shard_figures,
)
from triptych.loadgen.workload.turns import requests_of
from triptych.router import check_policies
from triptych.simulator import Cluster, Costs, Simulation, Trial
from triptych.simulator.capacity import saturation_rate
from triptych.simulator.setup import split_of

app = typer.Typer(help="Simulate a cluster with the real scheduler.", invoke_without_command=True)
app.command("fit")(simulate_fit)
app.command("replay")(simulate_replay)

NEAR_SATURATION = 0.8
NODE_WORKERS = 10
"""Workers per node with ``--replicas``."""
UNLIMITED_QUEUE = 1 << 40

COLUMNS = {
    "TTFT ms mean": "mean_ttft_ms",
    "p99": "p99_ttft_ms",
    "queue p99": "p99_queue_ms",
    "cached": "prefix_hit_ratio",
    "TPOT ms mean": "mean_tpot_ms",
    "out tok/s": "output_throughput",
    "req/s": "request_throughput",
    "good/s": "request_goodput",
    "held bytes": "mean_held_kv_bytes",
    "good/s/GB KV": "goodput_per_gb_kv",
    "failed": "failed",
}

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a policy at a rate or a concurrency."""

    policy: str
    placement: str
    rate_per_s: float | None
    concurrency: int | None
    seed: int
    shards: int = 1
    roles: str = "both"
    zombie_reclaim: str = "on"

    def __str__(self) -> str:
        pace = f"c={self.concurrency}" if self.concurrency else f"{self.rate_per_s:.3g}/s"
        is_trace = self.rate_per_s is None and not self.concurrency
        return f"{self.label} {'trace' if is_trace else pace}"

    @property
    def label(self) -> str:
        """Name of the case, without defaults."""
        is_default = self.placement == RouterConfig().placement
        placed = self.policy if is_default else f"{self.policy}+{self.placement}"
        divided = placed if self.shards == 1 else f"{placed}+{self.shards}shards"
        named = divided if self.roles == "both" else f"{divided}+{self.roles}"
        return named if self.zombie_reclaim == "on" else f"{named}+no_reclaim"


@app.callback()
def simulate(
    context: typer.Context,
    replicas: Annotated[
        int | None, typer.Option(help="Total workers: of 10, 3 prefill, 1 compress, 6 decode.")
    ] = None,
    prefill: Annotated[int, typer.Option(min=1, help="Number of prefill workers.")] = 1,
    encode: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of encode workers, for workloads with images; 0: prefill workers encode.",
        ),
    ] = 1,
    image_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an image.")] = 196,
    compress: Annotated[int, typer.Option(min=1, help="Number of compress workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Number of decode workers.")] = 1,
    colocated: Annotated[
        int,
        typer.Option(min=0, help="Number of colocated workers (all stages); 0: separate stages."),
    ] = 0,
    roles: Annotated[
        str,
        typer.Option(help="router.roles of colocated workers, comma-separated to compare."),
    ] = "both",
    workers_per_node: Annotated[
        int | None,
        typer.Option(
            min=0, help="Workers per node; 0: one node; default: 10 with --replicas, else 0."
        ),
    ] = None,
    own_cores: Annotated[
        bool | None,
        typer.Option(
            help="Each worker has its own cores (default with --replicas), or all share them."
        ),
    ] = None,
    slots: Annotated[
        int, typer.Option(min=1, help="Requests per decode worker (decode.max_num_seqs).")
    ] = 32,
    capacity_mib: Annotated[
        int, typer.Option(min=1, help="Page memory per node for requests, MiB.")
    ] = 600,
    max_queued: Annotated[
        int | None, typer.Option(min=1, help="router.max_queued_requests; default: no limit.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="router.batch_policy, comma-separated to compare.")
    ] = "greedy_by_memory",
    placement: Annotated[
        str, typer.Option(help="router.placement, comma-separated to compare.")
    ] = "least_bytes",
    affinity_ttft_s: Annotated[
        float,
        typer.Option(help="router.affinity_ttft_s, s: expected TTFT above which dualmap switches."),
    ] = RouterConfig().affinity_ttft_s,
    shards: Annotated[
        str, typer.Option(help="Number of router shards, comma-separated to compare.")
    ] = "1",
    shard_overload: Annotated[
        float, typer.Option(help="router.shard_overload: load limit of a shard, times the mean.")
    ] = RouterConfig().shard_overload,
    cells: Annotated[str | None, typer.Option(hidden=True)] = None,
    cell_overload: Annotated[float | None, typer.Option(hidden=True)] = None,
    prefill_batch_tokens: Annotated[
        int, typer.Option(min=1, help="router.prefill_batch_tokens.")
    ] = RouterConfig().prefill_batch_tokens,
    zombie_reclaim: Annotated[
        str,
        typer.Option(
            help="Free the raw pages of a prompt once it is compressed (on), or when its request "
            "ends (off); on,off to compare."
        ),
    ] = "on",
    prefix_mib: Annotated[
        int, typer.Option(min=0, help="Prefix cache per node, MiB; 0: none.")
    ] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests per run.")] = 1000,
    rate: Annotated[
        str, typer.Option(help="Requests per second, comma-separated; default: 0.8 of saturation.")
    ] = "",
    load_factor: Annotated[
        str, typer.Option(help="Rates as multiples of the saturation rate, comma-separated.")
    ] = "",
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Closed loop: concurrent requests.")
    ] = None,
    workload: Annotated[str, typer.Option(help=f"Workload: {', '.join(SHAPES)}.")] = "mixed",
    trace: Annotated[Path | None, typer.Option(help="Trace file, .csv or .jsonl.")] = None,
    speed: Annotated[float, typer.Option(help="Factor by which a trace is sped up.")] = 1.0,
    burstiness: Annotated[float | None, typer.Option(help="Gamma shape of arrival gaps.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Mean prompt tokens.")] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Mean output tokens.")] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Truncate prompts.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(min=1, help="Truncate outputs.")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests set no max_tokens and may fill a context of so many tokens; default: "
            "max_tokens is the length of the answer.",
        ),
    ] = None,
    costs_file: Annotated[
        Path | None,
        typer.Option("--costs", help="Cost file of simulate fit; default: built-in costs."),
    ] = None,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="TTFT limit for goodput, ms.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="TPOT limit for goodput, ms.")] = None,
    send_slo: Annotated[
        bool,
        typer.Option(
            help="Send the limits as SLO; the router rejects requests that would miss it."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the first run of each case.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs of each case, with successive seeds.")
    ] = 1,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    detailed: Annotated[bool, typer.Option(help="Add every request to the JSON.")] = False,
) -> None:
    """Run the server's scheduler with simulated requests and workers, in virtual time.

    Policies, state and decisions are those of the server. The duration of each step comes from
    costs that are fitted to measured runs.
    """
    if context.invoked_subcommand is not None:
        return
    shards = renamed_option("--cells", cells, "--shards", shards)
    shard_overload = renamed_option(
        "--cell-overload", cell_overload, "--shard-overload", shard_overload
    )
    router = RouterConfig(
        max_queued_requests=max_queued or UNLIMITED_QUEUE,
        affinity_ttft_s=affinity_ttft_s,
        prefill_batch_tokens=prefill_batch_tokens,
        shard_overload=shard_overload,
    )
    cluster = replace(
        cluster_of(replicas, (prefill, compress, decode), colocated, workers_per_node, own_cores),
        capacity_bytes=capacity_mib << 20,
        max_batch_requests=slots,
        router=router,
    )
    cluster = replace(cluster, plan=replace(cluster.plan, prefix_bytes=prefix_mib << 20))
    if trace is None and workload in SHAPES and SHAPES[workload].has_images:
        apart = 0 if colocated else encode
        cluster = replace(cluster, has_images=True, encode=apart, image_tokens=image_tokens)
    costs = Costs.read(costs_file) if costs_file else Costs()
    load = LoadOptions(
        shape="uniform" if trace else workload,
        trace=trace,
        speed=speed,
        limit=requests,
        burstiness=burstiness,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
    ).resolve()
    if "switch" in names(roles):
        roles = renamed_option(
            "--roles switch", roles.replace("switch", "dynamic"), "--roles dynamic", roles
        )
    policies, placements = names(policy), names(placement)
    for name, where in product(policies, placements):
        check_policies(RouterConfig(batch_policy=name, placement=where), slots)
    for one in names(roles):
        require(one in ("both", "dynamic"), "--roles", one, "both, dynamic or both,dynamic")
        require(one == "both" or bool(colocated), "--roles", one, "--colocated workers")
    for one in names(zombie_reclaim):
        require(one in ("on", "off"), "--zombie-reclaim", one, "on, off or on,off")
    for count in integers(shards):
        replace(
            cluster, router=replace(router, shards=count)
        )  # raises ConfigError if the shards do not divide the cluster
    saturation = saturation_of(cluster, costs, load)
    rates = rates_of(rate, load_factor, concurrency, saturation, has_trace=trace is not None)
    cases = [
        Case(
            policy=name,
            placement=where,
            rate_per_s=one,
            concurrency=concurrency,
            seed=seed + offset,
            shards=count,
            roles=role,
            zombie_reclaim=reclaim,
        )
        for one in rates
        for offset in range(seeds)
        for name, where, count, role, reclaim in product(
            policies, placements, integers(shards), names(roles), names(zombie_reclaim)
        )
    ]
    slo = Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms)
    require(slo.is_set or not send_slo, "--send-slo", send_slo, "--slo-ttft-ms or --slo-tpot-ms")
    rows = run_cases(
        cases,
        cluster,
        costs,
        load,
        requests,
        slo,
        detailed=detailed,
        send_slo=send_slo,
        max_model_len=max_model_len,
    )
    if json_file:
        about = {"costs": costs.as_dict(), "workload": load.shape, "saturation_per_s": saturation}
        write_rows(rows, cluster, about, json_file)
    show(rows)


def cluster_of(
    replicas: int | None,
    stages: tuple[int, int, int],
    colocated: int,
    workers_per_node: int | None,
    own_cores: bool | None,
) -> Cluster:
    """Workers of each stage, or a total number on nodes that have cores for their workers.

    Raises: ConfigError if both are given
    """
    is_large = replicas is not None
    if replicas is not None:
        require(stages == (1, 1, 1), "--replicas", replicas, "no other counts")
        stages = split_of(replicas)
    if colocated:
        require(stages == (1, 1, 1), "--colocated", colocated, "no other counts")
        stages = (0, 0, 0)
    prefill, compress, decode = stages
    return Cluster(
        prefill=prefill,
        compress=compress,
        decode=decode,
        colocated=colocated,
        workers_per_node=NODE_WORKERS * is_large if workers_per_node is None else workers_per_node,
        shared_cores=not (is_large if own_cores is None else own_cores),
    )


def write_rows(rows: list[Row], cluster: Cluster, about: Mapping[str, object], path: Path) -> None:
    """Write the result file of all runs."""
    head = {"simulated": True, "host": host_info(), "cluster": cluster_fields(cluster)}
    decisions = rows[0]["decision_ms"] if len(rows) == 1 else worst_decisions(rows)
    write_json({**head, **about, "decision_ms": decisions, "rows": rows}, path)


def show(rows: list[Row]) -> None:
    """Print a table with a line per run."""
    table = [
        [row["label"], row["level"], *(row.get(key) for key in COLUMNS.values())] for row in rows
    ]
    console.print(make_table(("policy", "load", *COLUMNS), table, "simulated"))


def rates_of(
    rate: str, load_factor: str, concurrency: int | None, saturation: float, *, has_trace: bool
) -> list[float | None]:
    """Rates in requests per second; None for a trace or a closed loop.

    Raises: ConfigError if more than one is given
    """
    given = [name for name in (rate, load_factor, concurrency) if name]
    require(len(given) <= 1, "--rate, --load-factor, --concurrency", given, "one of them")
    if load_factor:
        return [factor * saturation for factor in numbers(load_factor)]
    if rate:
        return list(numbers(rate))
    return [None] if concurrency or has_trace else [NEAR_SATURATION * saturation]


def saturation_of(cluster: Cluster, costs: Costs, load: Load) -> float:
    """Estimated maximum request rate of the cluster for this load."""
    sample = load.sessions(min(500, len(load.trace) or 500))
    turns = [turn for session in sample for turn in session.turns]
    text = sum(turn.prompt_tokens for turn in turns) / len(turns)
    images = sum(len(turn.images) for turn in turns) / len(turns)
    output = sum(turn.output_tokens for turn in turns) / len(turns)
    return saturation_rate(cluster, costs, text + images * cluster.image_tokens, output, images)


def run_cases(
    cases: list[Case],
    cluster: Cluster,
    costs: Costs,
    load: Load,
    requests: int,
    slo: Slo,
    *,
    detailed: bool = False,
    send_slo: bool = False,
    max_model_len: int | None = None,
) -> list[Row]:
    """Simulate each case, with a progress bar."""
    bars = progress_bars(24)
    rows, asked = list[Row](), core.NO_SLO
    if send_slo:
        asked = core.Slo(ttft_s=(slo.ttft_ms or 0) / 1e3, tpot_s=(slo.tpot_ms or 0) / 1e3)
    with bars:
        for case in cases:
            sessions = replace(load, seed=case.seed).sessions(requests, rate_per_s=case.rate_per_s)
            bar = bars.add_task(str(case), total=requests_of(sessions))
            router = replace(
                cluster.router,
                batch_policy=case.policy,
                placement=case.placement,
                shards=case.shards,
                roles=case.roles,
            )
            plan = replace(cluster.plan, keeps_raw=case.zombie_reclaim == "off")
            simulation = Simulation(
                replace(cluster, router=router, plan=plan),
                costs,
                on_tick=lambda trial, bar=bar: bars.update(bar, completed=len(trial.outcomes)),
            )
            started = time.process_time()
            jobs = jobs_of(sessions, asked, max_model_len, cluster.image_tokens)
            trial = simulation.run(jobs, case.concurrency)
            spent_s = time.process_time() - started
            bars.update(bar, completed=len(trial.outcomes))
            row = row_of(case, trial, slo, spent_s)
            rows.append({**row, **per_job(trial)} if detailed else row)
    return rows


def row_of(case: Case, trial: Trial, slo: Slo, spent_s: float) -> Row:
    """The figures of one run, with the names of measured runs."""
    done = sum(one.is_done for one in trial.outcomes) or 1
    figures = figures_of(trial, slo)
    return {
        "simulated": True,
        "label": case.label,
        "placement": case.placement,
        "zombie_reclaim": case.zombie_reclaim,
        "level": str(case).partition(" ")[2],
        "seed": case.seed,
        "max_concurrency": case.concurrency,
        "request_rate": case.rate_per_s,
        "num_prompts": len(trial.outcomes),
        **figures,
        "stage_seconds": {name: s / done for name, s in trial.state_seconds.items() if s},
        "busy_seconds": trial.busy_s,
        "counters": trial.counters,
        "decision_ms": decision_ms(trial),
        "cpu_s": spent_s,
        **shard_figures(case.shards, trial),
    }


def worst_decisions(rows: list[Row]) -> dict[str, float]:
    """The maximum of each figure over all runs."""
    each = [cast("dict[str, float]", row["decision_ms"]) for row in rows]
    return {name: max(decisions[name] for decisions in each) for name in each[0]}


def cluster_fields(cluster: Cluster) -> dict[str, object]:
    """Fields of a cluster for result files."""
    names = ("prefill", "compress", "decode", "colocated", "workers_per_node", "shared_cores")
    names += ("encode", "has_images", "image_tokens")
    names += ("capacity_bytes", "max_batch_requests", "chunk_tokens", "high_share")
    return {
        **{name: getattr(cluster, name) for name in names},
        "prefix_bytes": cluster.plan.prefix_bytes,
    }
