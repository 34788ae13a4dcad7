"""Latency of a handoff over the pool's socket, and throughput of its free list.

    python benchmarks/kvpool/pool.py

Prints medians and 99th percentiles and writes ``benchmarks/results/pool.json``.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import PoolConfig
from triptych.core.layout import FORMATS, Geometry, PageLayout, default_page_bytes
from triptych.kvpool import PoolClient, PoolServer
from triptych.kvpool.pool.free_list import FreeList
from triptych.loadgen.report.host import host_info

HERE = Path(__file__).parent
SMOLLM2 = Geometry(layers=30, kv_heads=3, head_dim=64)
PARTS = ("take", "handoff", "attach", "release")

Row = dict[str, object]


def handoffs(tokens: int, repeats: int) -> list[Row]:
    """Reserve, commit, attach and release a request's pages, between two clients of a server."""
    page_bytes = default_page_bytes(SMOLLM2.head_dim)
    layout = PageLayout(FORMATS["k8v4"], SMOLLM2.head_dim, page_bytes)
    pages = SMOLLM2.head_rows * layout.pages(tokens)
    config = PoolConfig(kv_cache_memory_bytes=8 * pages * page_bytes, extent_pages=2 * pages)
    with PoolServer(config, page_bytes) as server:
        sender, receiver = PoolClient(server.address, "from"), PoolClient(server.address, "to")
        rounds = [handoff(sender, receiver, pages) for _ in range(repeats)]
        copied = receiver.bytes_copied
        for client in (sender, receiver):
            client.close()
    took = {name: [one[i] for one in rounds] for i, name in enumerate(PARTS)}
    took["take + handoff + attach"] = [sum(one[:3]) for one in rounds]
    about: Row = {"tokens": tokens, "pages": pages, "bytes_copied": copied}
    return [{"what": name, **about, **quantiles(times)} for name, times in took.items()]


def handoff(sender: PoolClient, receiver: PoolClient, pages: int) -> list[float]:
    """Milliseconds of each part."""
    marks = [time.perf_counter()]
    ids = sender.allocate(pages)
    marks.append(time.perf_counter())
    [lease_ref] = sender.handoff([("r", ids)])
    marks.append(time.perf_counter())
    [lease_ref] = receiver.attach([(lease_ref, ids)])
    marks.append(time.perf_counter())
    receiver.release([lease_ref.lease])
    marks.append(time.perf_counter())
    return [1e3 * (end - start) for start, end in pairwise(marks)]


def quantiles(times: list[float]) -> Row:
    ordered = sorted(times)
    return {"p50_ms": statistics.median(ordered), "p99_ms": ordered[int(0.99 * (len(times) - 1))]}


def free_list(batch: int, seconds: float) -> Row:
    """Pages taken and given back per second, in batches, on one core."""
    pages, done, start = FreeList(1 << 18), 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(100):
            pages.free(pages.allocate(batch))
        done += 100 * batch
    return {"batch": batch, "pages_per_s": done / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "pool.json")
    asked = parser.parse_args()
    rows = handoffs(asked.tokens, asked.repeats)
    console.print(make_table(tuple(rows[0]), [list(row.values()) for row in rows]))
    lists = [free_list(batch, 1.0) for batch in (1, 90, 5760)]
    console.print(make_table(tuple(lists[0]), [list(row.values()) for row in lists]))
    write_json({"host": host_info(), "handoff": rows, "free_list": lists}, asked.json)


if __name__ == "__main__":
    main()
