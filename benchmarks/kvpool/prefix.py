"""TTFT of prompts with a cached prefix, compared with new prompts.

    python benchmarks/kvpool/prefix.py --json benchmarks/results/prefix.json

The three engines run in this process with the settings of the server. A new prompt (A) alternates
with one that shares all but its last tokens with an earlier prompt (B); both have the same length
and are random token ids. Before each B another request with its prefix is answered, untimed. So A
and B differ only in the prefix cache. Times run from the submission to the first token; the answers
go on for a few tokens, so that prefixes are published.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Failed, Sampling
from triptych.loadgen.report.host import host_info
from triptych.workers.local import LocalServer

VOCAB = 49_152
ANSWER_TOKENS = 4


@dataclass(frozen=True)
class Row:
    """One kind of prompt under one policy; times in milliseconds."""

    policy: str
    kind: str
    prompts: int
    prompt_tokens: int
    cached_tokens: int
    """Of each prompt."""
    median_ms: float
    quartiles_ms: tuple[float, float]
    fastest_ms: float
    slowest_ms: float


def ask(server: LocalServer, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's were cached."""
    sampling = Sampling(temperature=0.0, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    first_s, cached = 0.0, 0
    began_s = time.perf_counter()
    for event in server.stream([server.request(prompt, sampling)]):
        if isinstance(event, Failed):
            raise RuntimeError(event.message)
        first_s = first_s or time.perf_counter() - began_s
        cached = max(cached, event.cached_tokens)
    return first_s, cached


def measure(policy: str, rounds: int, shared: int, own: int) -> list[Row]:
    """A B A B ..., and one untimed round before."""
    chance = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(VOCAB) for _ in range(count)]

    config = AppConfig.from_mapping({"compressor": {"policy": policy}})
    taken: dict[str, list[tuple[float, int]]] = {"new": [], "known": []}
    with LocalServer(config) as server:
        for number in range(rounds + 1):
            beginning = tokens(shared)
            new = ask(server, tokens(shared + own))
            ask(server, beginning + tokens(own))
            known = ask(server, beginning + tokens(own))
            if number:
                taken["new"].append(new)
                taken["known"].append(known)
        policy = server.plan.policy.name
    return [row_of(policy, kind, shared + own, found) for kind, found in taken.items()]


def row_of(policy: str, kind: str, prompt_tokens: int, found: list[tuple[float, int]]) -> Row:
    times = sorted(1e3 * seconds for seconds, _ in found)
    (cached,) = {cached for _, cached in found}
    low, median, high = statistics.quantiles(times, n=4, method="inclusive")
    return Row(
        policy=policy,
        kind=kind,
        prompts=len(found),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached,
        median_ms=round(median, 1),
        quartiles_ms=(round(low, 1), round(high, 1)),
        fastest_ms=round(times[0], 1),
        slowest_ms=round(times[-1], 1),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--shared", type=int, default=1024, help="tokens in common")
    parser.add_argument("--own", type=int, default=32, help="tokens of each prompt alone")
    parser.add_argument("--policies", default="auto,uniform:fp16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host, rows, ratios = host_info(), list[Row](), dict[str, float]()
    for policy in options.policies.split(","):
        new, known = measure(policy, options.rounds, options.shared, options.own)
        rows += [new, known]
        ratios[new.policy] = round(new.median_ms / known.median_ms, 2)
    lines = [
        [row.policy, row.kind, row.cached_tokens, row.median_ms, f"{row.quartiles_ms}"]
        for row in rows
    ]
    columns = ("policy", "prompt", "cached", "median ms", "quartiles ms")
    console.print(make_table(columns, lines, f"first token after {rows[0].prompt_tokens} tokens"))
    console.print(f"times faster: {ratios}")
    if options.json:
        fields = {"host": host, "threads": torch.get_num_threads(), "times_faster": ratios}
        write_json({**fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
