"""Prefill placement on two live nodes of a Ray cluster, each with its own prefix cache.

    python benchmarks/policies/placement.py --json benchmarks/results/placement_live.json

Each policy gets its own server and the same requests: prompts with a few shared prefixes of
different popularity, four clients in a closed loop. The result is the share of cached prompt
tokens; times are not representative, since eight processes share the cores of one machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from triptych.cli.output import console, make_table, write_json
from triptych.cli.serving.scrape import read_metrics
from triptych.deployments.app import build_app
from triptych.loadgen.report.host import host_info

PORT, HEAD, NODES = 8187, "127.0.0.2", ("127.0.0.3", "127.0.0.4")
PARTS = ("prefill", "compressor", "decode")
"""Of each there is one on every node."""
COLUMNS = ("placement", "cached", "p50_ttft_ms", "p99_ttft_ms", "output_throughput", "failed")


def app_args(placement: str) -> dict[str, object]:
    def everywhere(part: str) -> dict[str, object]:
        return {"actor": {"num_replicas": len(NODES), "threads": 1, "resources": {part: 1}}}

    return {
        "model": {"name": "smollm2-135m-instruct"},
        "node_resource": "triptych",
        "min_nodes": len(NODES),
        **{part: everywhere(part) for part in PARTS},
        "pool": {"kv_cache_memory_bytes": 384 << 20, "prefix_bytes": 48 << 20, "extent_pages": 256},
        "router": {"placement": placement},
    }


def be_the_server(args: dict[str, object]) -> None:
    """Serve until the input ends."""
    cluster = Cluster(initialize_head=True, head_node_args=_node(HEAD, num_cpus=0))
    for address in NODES:
        parts = dict.fromkeys((*PARTS, "triptych"), 1.0)
        cluster.add_node(**_node(address, num_cpus=4, resources=parts))
    ray.init(address=cluster.address, _node_ip_address=HEAD)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    serve.run(build_app(args), name="triptych")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def _node(address: str, **more: object) -> dict[str, object]:
    rest = {"include_dashboard": False, "object_store_memory": 80 << 20}
    return {"node_ip_address": address, **rest, **more}


@contextmanager
def serving(args: dict[str, object], log: Path) -> Iterator[str]:
    """The server in processes of its own; none of them is left behind."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
    assert process.stdout is not None
    try:
        if "ready\n" not in iter(process.stdout.readline, ""):
            raise SystemExit(f"the server did not start:\n{log.read_text()[-4000:]}")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        tree = psutil.Process(process.pid).children(recursive=True)
        process.communicate(timeout=120)
        for left in psutil.wait_procs(tree, timeout=15)[1]:
            left.kill()


def measured(placement: str, requests: int, folder: Path) -> dict[str, object]:
    """One policy's figures."""
    out = folder / f"{placement}.json"
    with serving(app_args(placement), folder / "log") as url:
        command = [str(Path(sys.executable).with_name("triptych")), "bench", "serve"]
        command += ["--url", url, "--workload", "shared-prefix", "--seed", "1", "--warmup", "2"]
        command += ["--prompt-tokens", "640", "--output-tokens", "16", "--concurrency", "4"]
        command += ["--requests", str(requests), "--json", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        metrics = read_metrics(url)
    asked = metrics.total("triptych_prefix_cache_queries")
    hits = metrics.total("triptych_prefix_cache_hits")
    (row,) = json.loads(out.read_text())["rows"]
    reasons = metrics.by_label("triptych_router_decisions", "reason")
    chosen = {name: n for name, n in reasons.items() if name.startswith("placement:")}
    figures = {name: row[name] for name in COLUMNS if name in row}
    return {"placement": placement, "cached": hits / max(1.0, asked), **figures, "chosen": chosen}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="least_bytes,prefix_affinity,dualmap")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.serve:
        be_the_server(json.loads(asked.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        names = asked.policies.split(",")
        rows = [measured(name, asked.requests, Path(folder)) for name in names]
    console.print(make_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows], "live"))
    if asked.json:
        write_json({"host": host_info(), "nodes": len(NODES), "rows": rows}, asked.json)


if __name__ == "__main__":
    main()
