"""Where the time of the stages goes: what compression and the management of pages cost.

    python benchmarks/breakdown.py --json benchmarks/results/breakdown.json

Requests with random prompts run through the three engines in this process, with the settings of
the server. Nothing is estimated: each part is timed where it runs.
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.workers import decode
from triptych.workers.compress import CompressEngine
from triptych.workers.decode import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.prefill import PrefillEngine
from triptych.workers.window import Window

VOCAB = 49_152


class Stopwatch:
    """Seconds and calls of each part, as long as it is open."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self.calls = Counter[str]()

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[label] += time.perf_counter() - start
                self.calls[label] += 1

        return call

    def watch(self, stack: ExitStack, owner: Any, name: str, label: str) -> None:
        stack.enter_context(patch.object(owner, name, self.timed(label, getattr(owner, name))))


PARTS = [
    (PrefillEngine, "step", "prefill"),
    (PrefillEngine, "_start", "prefill pages"),
    (PrefillEngine, "_hand_over", "prefill pages"),
    (CompressEngine, "_plan", "compress plan"),
    (CompressEngine, "_take_pages", "compress pages"),
    (CompressEngine, "_publish", "compress prefixes"),
    (CompressEngine, "_encode", "compress encode"),
    (CompressEngine, "_hand_over", "compress pages"),
    (DecodeEngine, "step", "decode"),
    (DecodeEngine, "_make_room", "decode room"),
    (Window, "_transcode", "decode requantize"),
    (decode, "decode_attention", "decode attention"),
    (decode, "score_tokens", "decode scores"),
    (decode, "store_tokens", "decode store"),
]


def run(config: AppConfig, requests: int, prompt: int, answer: int) -> Stopwatch:
    watch, generator = Stopwatch(), random.Random(0)
    with LocalServer(config) as server, ExitStack() as stack:
        server.complete([server.request([5] * 700, _sampling(40))])  # compiles and warms up
        for owner, name, label in PARTS:
            watch.watch(stack, owner, name, label)
        prompts = [[generator.randrange(VOCAB) for _ in range(prompt)] for _ in range(requests)]
        server.complete([server.request(asked, _sampling(answer)) for asked in prompts])
    return watch


def _sampling(tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def rows_of(watch: Stopwatch) -> list[dict[str, object]]:
    """Shares of prefill for what happens once a prompt, of decode for what happens each step."""
    seconds = Counter(watch.seconds)
    parts = ("plan", "pages", "prefixes", "encode")
    seconds["compress"] = sum(seconds[f"compress {part}"] for part in parts)
    seconds["decode pages"] = seconds["decode room"] - seconds["decode requantize"]
    told = [
        ("prefill", "prefill"),
        ("prefill pages", "prefill"),
        ("compress", "prefill"),
        ("compress plan", "prefill"),
        ("compress pages", "prefill"),
        ("compress prefixes", "prefill"),
        ("compress encode", "prefill"),
        ("decode", "decode"),
        ("decode attention", "decode"),
        ("decode store", "decode"),
        ("decode scores", "decode"),
        ("decode requantize", "decode"),
        ("decode pages", "decode"),
    ]
    return [
        {
            "part": part,
            "seconds": round(seconds[part], 4),
            "of": whole,
            "share": round(seconds[part] / seconds[whole], 5),
        }
        for part, whole in told
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--policies", default="auto,uniform:k8v4")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    results = dict[str, list[dict[str, object]]]()
    for policy in options.policies.split(","):
        config = AppConfig.from_mapping({"compressor": {"policy": policy}})
        watch = run(config, options.requests, options.prompt, options.answer)
        results[policy] = rows_of(watch)
        steps = watch.calls["decode"]
        title = f"{policy}: {options.requests} prompts of {options.prompt}, {steps} decode steps"
        lines = [
            [row["part"], row["seconds"], f"{100 * float(str(row['share'])):.2f} % of {row['of']}"]
            for row in results[policy]
        ]
        console.print(make_table(("part", "seconds", "share"), lines, title))
    if options.json:
        told = {"requests": options.requests, "prompt": options.prompt, "answer": options.answer}
        threads = torch.get_num_threads()
        write_json({"host": host, "threads": threads, **told, "rows": results}, options.json)


if __name__ == "__main__":
    main()
