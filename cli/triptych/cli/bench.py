"""``triptych bench``: measure a server or the attention kernels."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triptych.cli.bench_attention import bench_attention
from triptych.cli.commas import integers, numbers
from triptych.cli.loadgen.host import host_info
from triptych.cli.loadgen.measure import (
    Level,
    Results,
    Row,
    ServeBenchmark,
    levels_of,
    measure,
    served_model,
)
from triptych.cli.loadgen.processes import FindProcesses, named, tree_of
from triptych.cli.loadgen.sample import Sample
from triptych.cli.loadgen.stats import Slo
from triptych.cli.loadgen.workload import Endpoint, PromptForm, Workload
from triptych.cli.output import console, make_table, notes, write_json

app = typer.Typer(help="Measure a server or the attention kernels.", no_args_is_help=True)

app.command("attention")(bench_attention)

COLUMNS = {
    "TTFT ms p50": "p50_ttft_ms",
    "p99": "p99_ttft_ms",
    "TPOT ms p50": "p50_tpot_ms",
    "p99 ": "p99_tpot_ms",
    "ITL ms p99": "p99_itl_ms",
    "out tok/s": "output_throughput",
    "req/s": "request_throughput",
    "good/s": "request_goodput",
    "RSS MiB": "peak_rss_bytes",
    "CPU s": "server_cpu_s",
    "other": "other_cores",
    "failed": "failed",
}


@app.command("serve")
def bench_serve(
    url: Annotated[
        str, typer.Option(help="An OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first that it lists.")] = None,
    concurrency: Annotated[str, typer.Option(help="Closed loop: so many at once, as in 1,4.")] = "",
    rate: Annotated[str, typer.Option(help="Open loop: Poisson arrivals per second.")] = "",
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of each level.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(min=1)] = 64,
    endpoint: Annotated[Endpoint, typer.Option(help="Which of the two APIs.")] = "completions",
    prompts: Annotated[PromptForm, typer.Option(help="Ids are exact, where taken.")] = "tokens",
    vocab_size: Annotated[int, typer.Option(min=2, help="Ids are drawn below this.")] = 32_000,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first level.")] = 2,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="Goodput: limit on TTFT.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Goodput: limit on TPOT.")] = None,
    pid: Annotated[int | None, typer.Option(help="Server process: it and its children.")] = None,
    process_name: Annotated[str, typer.Option(help="Server: commands that contain this.")] = "",
    seed: Annotated[int | None, typer.Option(help="Same seed, same prompts.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Of one request, between events.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures here.")
    ] = None,
) -> None:
    """Measure TTFT, ITL, TPOT, throughput and memory of any OpenAI-compatible server.

    Prompts are unique and of the length asked for; every answer has the same length. Token
    counts come from the server's usage.
    """
    concurrencies, rates = integers(concurrency), numbers(rate)
    workload = Workload(
        model=model or asyncio.run(served_model(url, api_key)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        endpoint=endpoint,
        form=prompts,
        vocab_size=vocab_size,
        temperature=temperature,
        seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
    )
    benchmark = ServeBenchmark(
        url=url,
        workload=workload,
        levels=levels_of(concurrencies or ([] if rates else [1, 4, 16]), rates, requests),
        warmup_requests=warmup,
        slo=Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms),
        server=_server_processes(pid, process_name),
        timeout_s=timeout_s,
        api_key=api_key,
    )
    host = host_info()
    results = run_with_progress(benchmark)
    if json_file:
        server = {"url": url, **asdict(results.workload)}
        rows = [row.as_json() for row in results.rows]
        write_json({"host": host, "server": server, "rows": rows}, json_file)
    console.print(make_table(("load", *COLUMNS), [_line(row) for row in results.rows]))
    _complain(results.rows)


def run_with_progress(benchmark: ServeBenchmark) -> Results:
    """Measure, with a bar for every level on a terminal."""
    bars = Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=notes,
        disable=not notes.is_terminal,
    )

    def on_level(level: Level) -> Callable[[Sample], None]:
        bar = bars.add_task(str(level), total=level.requests)
        return lambda _: bars.advance(bar)

    with bars:
        return asyncio.run(measure(benchmark, on_level))


def _server_processes(pid: int | None, name: str) -> FindProcesses | None:
    if pid is not None:
        return tree_of(pid)
    return named(name) if name else None


def _line(row: Row) -> list[object]:
    values = {title: row.figures.get(key) for title, key in COLUMNS.items()}
    rss = values["RSS MiB"]
    values["RSS MiB"] = None if rss is None else int(rss) >> 20
    return [str(row.level), *values.values()]


def _complain(rows: list[Row]) -> None:
    """Say what went wrong; exit code 1 if a level had no answer at all."""
    for row in rows:
        for error, count in row.errors.items():
            notes.print(f"{row.level}: {count} x {error}", style="red", markup=False)
    if any(row.figures["completed"] == 0 for row in rows):
        raise typer.Exit(1)
