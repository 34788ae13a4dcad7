"""Compare our server with ``transformers`` generate on the same weights, alternating A B C.

    python benchmarks/serving/serve.py --rounds 2

Writes ``benchmarks/results/serve.json`` and prints the best round of each. Rounds alternate because
the load of other processes changes; each row has their cores (``other_cores``).
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from server import serving

from triptych.cli.output import console, make_table, write_json
from triptych.loadgen.measure import ServeBenchmark, levels_of, measure
from triptych.loadgen.report.host import host_info
from triptych.loadgen.report.processes import tree_of
from triptych.loadgen.workload.openai_requests import Workload

HERE = Path(__file__).parent
MODEL = "smollm2-135m-instruct"

Row = dict[str, object]


def triptych(topology: str, asked: argparse.Namespace, seed: int) -> list[Row]:
    """Serve in one topology and press with every level of load."""
    args: dict[str, object] = {
        "topology": topology,
        "model": {"name": MODEL, "dtype": asked.dtype},
        "compressor": {"policy": asked.policy},
    }
    workload = Workload(
        model=MODEL,
        prompt_tokens=asked.prompt_tokens,
        output_tokens=asked.output_tokens,
        seed=seed,
    )
    levels = levels_of(asked.levels, [], asked.requests)
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(args, asked.port, Path(folder)) as server,
    ):
        benchmark = ServeBenchmark(
            url=server.url, workload=workload, levels=levels, server=tree_of(server.pid)
        )
        results = asyncio.run(measure(benchmark, lambda _: lambda _: None))
    return [{"start_s": server.started_in_s, **row.as_json()} for row in results.rows]


def transformers(asked: argparse.Namespace) -> list[Row]:
    """The baseline in a process of its own, so that no memory of ours is in its figures."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        options = {
            "--dtype": asked.dtype,
            "--batch": ",".join(map(str, asked.levels)),
            "--prompt-tokens": asked.prompt_tokens,
            "--output-tokens": asked.output_tokens,
            "--repeats": asked.repeats,
            "--json": path,
        }
        flat = [str(part) for pair in options.items() for part in pair]
        script = str(HERE / "transformers_generate.py")
        subprocess.run([sys.executable, script, "--model", MODEL, *flat], check=True)
        return json.loads(path.read_text(encoding="utf-8"))["rows"]


def best(rows: list[Row]) -> list[Row]:
    """Of every system and load, the round with the highest throughput."""
    found = dict[tuple[object, object], Row]()
    for row in rows:
        key = (row["system"], row["max_concurrency"])
        if key not in found or row["output_throughput"] > found[key]["output_throughput"]:  # type: ignore[operator]
            found[key] = row
    return list(found.values())


def show(rows: list[Row]) -> None:
    names = ("system", "max_concurrency", "p50_ttft_ms", "p50_tpot_ms", "output_throughput")
    names += ("request_throughput", "peak_rss_bytes", "other_cores", "failed")
    console.print(make_table(names, [[row.get(name) for name in names] for row in rows]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--systems", default="disaggregated,colocated,transformers")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--requests", type=int, help="of each level; default: 10, 12, 32")
    parser.add_argument("--repeats", type=int, default=2, help="static batches of the baseline")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "serve.json")
    asked = parser.parse_args()
    asked.levels = [int(part) for part in asked.concurrency.split(",")]
    host, rows = host_info(), list[Row]()
    for turn in range(asked.rounds):
        for system in asked.systems.split(","):
            console.print(f"==> round {turn + 1}: {system}")
            run: Callable[[], list[Row]] = (
                (lambda: transformers(asked))
                if system == "transformers"
                else (lambda system=system, turn=turn: triptych(system, asked, turn))
            )
            rows += [{"system": system, "round": turn + 1, **row} for row in run()]
            write_json({"host": host, "asked": _plain(asked), "rows": rows}, asked.json)
    show(best(rows))


def _plain(asked: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(asked).items() if name != "json"}


if __name__ == "__main__":
    main()
