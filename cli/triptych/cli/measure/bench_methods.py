"""``triptych bench methods``: the compressor's time for each method, and methods under load."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from triptych.cli.list_options import names, numbers
from triptych.cli.output import console, make_table, progress_bars, write_json
from triptych.core.config import AppConfig, CompressorConfig, ModelConfig, PoolConfig
from triptych.loadgen.report.host import host_info

if TYPE_CHECKING:
    from triptych.evals.frontier.record_file import RecordFile, TimeRecord
    from triptych.evals.pipelines.pipeline_load import LoadRecord
    from triptych.evals.pipelines.pipeline_study import Part, PreparedPipelines

LOAD = {
    "method": "method",
    "req/s": "rate_per_s",
    "pipelined": "is_pipelined",
    "reclaim": "reclaims",
    "TTFT s": "ttft_s",
    "p99": "ttft_p99_s",
    "TPOT s": "tpot_s",
    "s/token": "norm_latency_s",
    "ratio": "compression_ratio",
    "mean held": "mean_held_bytes",
    "peak held": "peak_held_bytes",
}


def bench_methods(
    methods: Annotated[
        str, typer.Option(help="Methods that are served, as in `eval quality`, comma-separated.")
    ] = "diffkv,leankv,learned:merge,uniform:k8v4,snapkv",
    learned: Annotated[
        str, typer.Option(help="Files of learned networks, as compressor.learned.")
    ] = "auto",
    model: Annotated[str, typer.Option(help="Model name or path.")] = ModelConfig().name,
    parts: Annotated[
        str,
        typer.Option(
            help="What is measured: times (of the compressor at batch 1, 4, 8, 16), load (at each "
            "rate, pipelined and one request at a time), reclaim (raw pages freed after the "
            "compression or at the end of a request, at the highest rate)."
        ),
    ] = "times,load,reclaim",
    rates: Annotated[str, typer.Option(help="Requests per second, comma-separated.")] = "0.5,1,2",
    requests: Annotated[int, typer.Option(min=2, help="Requests of a run.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 32,
    pool_mib: Annotated[
        int, typer.Option(min=16, help="Page memory, MiB: enough for all raw pages at once.")
    ] = 1024,
    records: Annotated[
        Path,
        typer.Option(
            help="File to which each result is added as it comes; a run that is stopped goes on."
        ),
    ] = Path("methods.jsonl"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
) -> None:
    """Time compression methods alone, and under Poisson arrivals with the engines of the server.

    All stages run in this process. Requests that run one at a time are the baseline without a
    pipeline. The same command with the same --records goes on where it was stopped.
    """
    from triptych.evals.frontier.record_file import RecordFile
    from triptych.evals.pipelines.pipeline_study import PipelineStudy, loads_of, prepare_pipelines

    host = host_info()
    base = AppConfig(
        model=ModelConfig(name=model),
        compressor=CompressorConfig(learned=tuple(names(learned))),
        pool=PoolConfig(kv_cache_memory_bytes=pool_mib << 20),
    )
    study = PipelineStudy(
        methods=tuple(names(methods)),
        base=base,
        parts=cast("tuple[Part, ...]", tuple(names(parts))),  # checked by the study
        rates_per_s=tuple(numbers(rates)),
        requests=requests,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
    )
    prepared, file = prepare_pipelines(study), RecordFile(records)
    _run(prepared, file)
    times, loads = file.times(), list(loads_of(file))
    if json_file:
        body = {
            "host": host,
            "conditions": prepared.conditions,
            "times": [one.as_json() for one in times],
            "loads": [one.as_json() for one in loads],
        }
        write_json(body, json_file)
    _show(times, loads)


def _run(prepared: "PreparedPipelines", file: "RecordFile") -> None:
    from triptych.evals.pipelines.pipeline_study import run_pipelines

    bars = progress_bars(24)
    ids = {name: bars.add_task(name, total=total) for name, total in prepared.units().items()}
    with bars:
        run_pipelines(prepared, file, lambda name: bars.advance(ids[name]))


def _show(times: "Sequence[TimeRecord]", loads: "Sequence[LoadRecord]") -> None:
    from triptych.evals.pipelines.pipeline_study import times_by_method

    if times:
        found = times_by_method(times)
        batches = sorted({one.batch for one in times})
        head = ("method", *(f"batch {batch}" for batch in batches), "share of prefill")
        lines = [
            (
                name,
                *(row[batch].compress_us for batch in batches),
                row[1].compress_us / row[1].prefill_us,
            )
            for name, row in found.items()
        ]
        title = f"microseconds per token to compress prompts of {times[0].context} tokens"
        console.print(make_table(head, lines, title))
    if loads:
        rows = [one.as_json() for one in loads]
        lines = [[row[key] for key in LOAD.values()] for row in rows]
        console.print(make_table(tuple(LOAD), lines, "seconds and bytes"))
