"""TTFT of a short prompt that arrives during the prefill of a long one.

    python benchmarks/policies/overtaking.py --json benchmarks/results/overtaking.json

The three engines run in this process with the settings of the server. Two chunk orders alternate:
arrival order (A), and that of the server, by due time (B). The short prompt is sent once the long
one's first step has begun. Both times are TTFT; that of the long prompt shows the cost of being
overtaken.
"""

import argparse
import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path
from unittest.mock import patch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Sampling
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer
from triptych.workers.prefill.chunk_scheduler import ChunkScheduler

VOCAB = 49_152
ANSWER_TOKENS = 2
HEAD_START_S = 0.3
"""By then the first step of the long prompt has begun, and not ended."""


def in_order_of_arrival() -> AbstractContextManager[object]:
    """Chunks as they were before prompts could overtake each other."""
    numbers = count()

    def due(_chunks: ChunkScheduler, _tokens: int, _ttft_s: float = 0.0) -> float:
        return next(numbers)

    return patch.object(ChunkScheduler, "due", due)


def first_token_s(server: LocalServer, prompt: Sequence[int]) -> float:
    """Seconds from the submission to the first token; the answer is read to its end."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first_s, began_s = 0.0, time.perf_counter()
    for event in server.stream([server.request(prompt, sampling)]):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        first_s = first_s or time.perf_counter() - began_s
    return first_s


def race(server: LocalServer, long: Sequence[int], short: Sequence[int]) -> dict[str, float]:
    """First tokens of a long prompt and of a short one behind it, in milliseconds."""
    times = dict[str, float]()

    def read_long() -> None:
        times["long"] = 1e3 * first_token_s(server, long)

    thread = threading.Thread(target=read_long)
    thread.start()
    time.sleep(HEAD_START_S)
    times["short"] = 1e3 * first_token_s(server, short)
    thread.join()
    return times


def summary(times: Sequence[float]) -> dict[str, object]:
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "median_ms": round(median, 1),
        "quartiles_ms": [round(low, 1), round(high, 1)],
        "all_ms": [round(one, 1) for one in times],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--long", type=int, default=4096)
    parser.add_argument("--short", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host, chance = host_info(), random.Random(0)
    config = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": 2 << 30, "prefix_bytes": 0}})
    found: dict[str, list[dict[str, float]]] = {"as they came": [], "due first": []}

    def tokens(number: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(number)]

    with LocalServer(config) as server:
        first_token_s(server, tokens(options.short))
        for _ in range(options.rounds):
            for name, runs in found.items():
                with in_order_of_arrival() if name == "as they came" else nullcontext():
                    runs.append(race(server, tokens(options.long), tokens(options.short)))
    rows = [
        {"order": name, "prompt": prompt, "tokens": getattr(options, prompt)}
        | summary([run[prompt] for run in runs])
        for prompt in ("short", "long")
        for name, runs in found.items()
    ]
    pairs = list(zip(*found.values(), strict=True))
    ratios = {
        prompt: round(statistics.median(a[prompt] / b[prompt] for a, b in pairs), 2)
        for prompt in ("short", "long")
    }
    lines = [[row["prompt"], row["order"], row["median_ms"], row["quartiles_ms"]] for row in rows]
    console.print(make_table(("prompt", "read", "median ms", "quartiles"), lines, "first token"))
    console.print(f"times sooner: {ratios}")
    if options.json:
        write_json({"host": host, "times_sooner": ratios, "rows": rows}, options.json)


if __name__ == "__main__":
    main()
