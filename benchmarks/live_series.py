"""Short runs of our own server under many loads: what the simulator is fitted to and checked with.

    python benchmarks/live_series.py --out benchmarks/results/live

One server answers all of them, in turn. Each run is one result file as
``triptych bench serve --save-dir`` writes it; ``fit-`` and ``held-`` in front of the name say what
it is for.
"""

import argparse
import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from server import serving

from triptych.cli.bench import described, save_details
from triptych.cli.commas import words
from triptych.cli.load_options import LoadOptions, shallow
from triptych.cli.loadgen.host import host_info
from triptych.cli.loadgen.measure import Level, ServeBenchmark, measure
from triptych.cli.loadgen.processes import tree_of
from triptych.cli.loadgen.stats import Slo
from triptych.cli.loadgen.workload import Workload
from triptych.cli.output import console

MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    level: Level
    options: LoadOptions


def lengths(prompt: int, output: int, seed: int, shape: str = "uniform") -> LoadOptions:
    return LoadOptions(
        shape=shape, prompt_tokens=prompt, output_tokens=output, max_prompt_tokens=1500, seed=seed
    )


def closed(count: int, requests: int) -> Level:
    return Level(requests=requests, concurrency=count)


def opened(rate: float, requests: int) -> Level:
    return Level(requests=requests, rate_per_s=rate)


CASES = (
    Case("fit-1", closed(1, 4), lengths(256, 24, 1)),
    Case("held-1", closed(2, 6), lengths(384, 24, 2)),
    Case("fit-2", closed(4, 10), lengths(192, 24, 3)),
    Case("held-2", opened(0.4, 12), lengths(192, 24, 4)),
    Case("fit-3", closed(2, 4), lengths(768, 12, 5)),
    Case("held-3", closed(6, 14), lengths(96, 40, 6)),
    Case("fit-4", closed(8, 16), lengths(48, 48, 7)),
    Case("held-4", closed(4, 12), lengths(192, 24, 8, "mixed")),
    Case("fit-5", opened(0.6, 16), lengths(128, 24, 9, "mixed")),
    Case("held-5", opened(0.8, 16), lengths(96, 24, 10, "burstgpt")),
    Case("fit-6", closed(12, 20), lengths(192, 16, 11)),
    Case("held-6", closed(16, 20), lengths(128, 24, 12)),
)


def settings(threads: int | None, record: Path | None) -> dict[str, object]:
    """The defaults; or stages with so many threads of their own, and a router that is recorded."""
    found: dict[str, object] = {"model": {"name": MODEL}}
    if record is not None:
        found["router"] = {"record": str(record.resolve())}
    if threads is not None:
        actor = {"actor": {"threads": threads}}
        found |= {"prefill": actor, "compressor": actor, "decode": actor}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8131)
    parser.add_argument("--threads", type=int, help="of each stage; default: all cores, in turns")
    parser.add_argument("--only", default="", help="names of runs, with commas between them")
    parser.add_argument("--record", type=Path, help="write the router's decisions here")
    asked = parser.parse_args()
    wanted = words(asked.only) or [case.name for case in CASES]
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(settings(asked.threads, asked.record), asked.port, Path(folder)) as server,
    ):
        for case in (case for case in CASES if case.name in wanted):
            workload = Workload(**shallow(case.options.resolve()), model=MODEL)
            benchmark = ServeBenchmark(
                url=server.url,
                workload=workload,
                levels=(case.level,),
                warmup_requests=1,
                slo=Slo(ttft_ms=2000.0, tpot_ms=200.0),
                server=tree_of(server.pid),
            )
            results = asyncio.run(measure(benchmark, lambda _: lambda _: None))
            about = {"host": host_info(), **described(results.workload, None)}
            (path,) = save_details(asked.out, case.name, results.rows, about)
            figures = results.rows[0].figures
            ttft, wrote = figures.get("mean_ttft_ms"), figures["output_throughput"]
            other = figures.get("other_cores")
            console.print(f"{path.name}: TTFT {ttft} ms, {wrote} tokens/s, other {other}")


if __name__ == "__main__":
    main()
