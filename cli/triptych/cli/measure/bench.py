"""``triptych bench``: benchmark a server or the attention kernels."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from triptych.cli.measure.bench_kernels import bench_attention, bench_selection
from triptych.cli.measure.bench_methods import bench_methods
from triptych.cli.measure.bench_results import bench_compare, bench_plot
from triptych.cli.measure.load_options import LoadOptions, levels_of_options, shallow
from triptych.cli.output import console, make_table, notes, progress_bars, write_json
from triptych.loadgen.measure import (
    Level,
    Results,
    Row,
    ServeBenchmark,
    measure,
    served_model,
)
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.processes import FindProcesses, named, tree_of
from triptych.loadgen.report.sample import Sample
from triptych.loadgen.report.stats import Slo
from triptych.loadgen.workload.openai_requests import Endpoint, PromptForm, Workload
from triptych.loadgen.workload.shapes import SHAPES

app = typer.Typer(help="Benchmark a server or the attention kernels.", no_args_is_help=True)

app.command("attention")(bench_attention)
app.command("compare")(bench_compare)
app.command("methods")(bench_methods)
app.command("plot")(bench_plot)
app.command("selection")(bench_selection)

COLUMNS = {
    "TTFT ms p50": "p50_ttft_ms",
    "p99": "p99_ttft_ms",
    "TPOT ms p50": "p50_tpot_ms",
    "p99 ": "p99_tpot_ms",
    "ITL ms p99": "p99_itl_ms",
    "out tok/s": "output_throughput",
    "req/s": "request_throughput",
    "good/s": "request_goodput",
    "good/s/GB KV": "goodput_per_gb_kv",
    "RSS MiB": "peak_rss_bytes",
    "CPU s": "server_cpu_s",
    "other": "other_cores",
    "failed": "failed",
}


@app.command("serve")
def bench_serve(
    url: Annotated[
        str, typer.Option(help="URL of an OpenAI-compatible server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option(help="Model name; default: the first of /v1/models.")
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Closed loop: concurrent requests, comma-separated.")
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Open loop: requests per second, comma-separated.")
    ] = "",
    requests: Annotated[
        int | None, typer.Option(min=1, help="Number of requests per level.")
    ] = None,
    workload: Annotated[str, typer.Option(help=f"Workload: {', '.join(SHAPES)}.")] = "uniform",
    trace: Annotated[
        Path | None, typer.Option(help="Trace file: BurstGPT (.csv) or Mooncake (.jsonl).")
    ] = None,
    speed: Annotated[float, typer.Option(help="Factor by which a trace is sped up.")] = 1.0,
    burstiness: Annotated[
        float | None, typer.Option(help="Gamma shape of arrival gaps; 1: Poisson, below 1: bursts.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length in tokens; default: the workload's.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Mean length in tokens; default: the workload's.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Truncate to this length.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Truncate to this length.")
    ] = None,
    endpoint: Annotated[Endpoint, typer.Option(help="OpenAI endpoint.")] = "completions",
    prompts: Annotated[PromptForm, typer.Option(help="Send token ids (exact) or text.")] = "tokens",
    vocab_size: Annotated[int, typer.Option(min=2, help="Token ids are below this.")] = 32_000,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")] = 0.0,
    warmup: Annotated[int, typer.Option(min=0, help="Warm-up requests.")] = 2,
    slo_ttft_ms: Annotated[float | None, typer.Option(help="TTFT limit for goodput, ms.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(help="TPOT limit for goodput, ms.")] = None,
    pid: Annotated[
        int | None, typer.Option(help="Server process to monitor, with its children.")
    ] = None,
    process_name: Annotated[str, typer.Option(help="Monitor commands with this text.")] = "",
    seed: Annotated[int | None, typer.Option(help="Workload seed; default: random.")] = None,
    timeout_s: Annotated[float, typer.Option(help="Seconds between events of a stream.")] = 600.0,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", show_envvar=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.")
    ] = None,
    save_dir: Annotated[
        Path | None, typer.Option(help="Folder for one result file per level, in vLLM's format.")
    ] = None,
    label: Annotated[str, typer.Option(help="Prefix of result file names.")] = "triptych",
) -> None:
    """Measure TTFT, ITL, TPOT, throughput and memory of any OpenAI-compatible server.

    A workload defines shared prefixes, lengths and pauses; prompts of the uniform workload are
    unique and have one length. Token counts come from the server's usage.
    """
    load = LoadOptions(
        shape=workload,
        trace=trace,
        speed=speed,
        limit=requests,
        burstiness=burstiness,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
        seed=random.SystemRandom().randrange(1 << 32) if seed is None else seed,
    ).resolve()
    levels = levels_of_options(load, concurrency, rate, requests)
    benchmark = ServeBenchmark(
        url=url,
        workload=Workload(
            **shallow(load),
            model=model or asyncio.run(served_model(url, api_key)),
            endpoint=endpoint,
            form=prompts,
            vocab_size=vocab_size,
            temperature=temperature,
        ),
        levels=levels,
        warmup_requests=warmup,
        slo=Slo(ttft_ms=slo_ttft_ms, tpot_ms=slo_tpot_ms),
        server=_server_processes(pid, process_name),
        timeout_s=timeout_s,
        api_key=api_key,
    )
    host = host_info()
    results = run_with_progress(benchmark)
    server = {"url": url, **workload_fields(results.workload, trace)}
    if json_file:
        rows = [row.as_json() for row in results.rows]
        write_json({"host": host, "server": server, "rows": rows}, json_file)
    if save_dir:
        save_details(save_dir, label, results.rows, {"host": host, **server})
    console.print(make_table(("load", *COLUMNS), [_line(row) for row in results.rows]))
    _report_errors(results.rows)


def workload_fields(workload: Workload, trace: Path | None) -> dict[str, object]:
    """Fields of a workload for result files: a trace by its name, not its content."""
    plain = shallow(workload)
    sessions = plain.pop("trace")
    return {**plain, "trace": str(trace) if trace else None, "trace_requests": len(sessions)}


def save_details(
    folder: Path, label: str, rows: Sequence[Row], about: Mapping[str, object]
) -> list[Path]:
    """Write one result file per level, with the names and fields of vLLM's ``bench serve``."""
    date, paths = time.strftime("%Y%m%d-%H%M%S"), list[Path]()
    for number, row in enumerate(rows):
        level = str(row.level).replace("/s", "qps").replace("c=", "concurrency")
        path = folder / f"{label}-{level}-{date}-{number}.json"
        head = {
            "date": date,
            "endpoint_type": "openai",
            "backend": "openai",
            "label": label,
            "model_id": about["model"],
            "tokenizer_id": about["model"],
            "burstiness": about["burstiness"],
            "workload": about["shape"],
            "about": about,
        }
        write_json({**head, **row.detailed_json()}, path)
        paths.append(path)
    return paths


def run_with_progress(benchmark: ServeBenchmark) -> Results:
    """Measure, with one progress bar per level."""
    bars = progress_bars(10)

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


def _report_errors(rows: list[Row]) -> None:
    """Print the errors; exit code 1 if no request of a level was completed."""
    for row in rows:
        for error, count in row.errors.items():
            notes.print(f"{row.level}: {count} x {error}", style="red", markup=False)
    if any(row.figures["completed"] == 0 for row in rows):
        raise typer.Exit(1)
