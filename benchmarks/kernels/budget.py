"""Batch size and throughput of decode with a fixed page memory, by compression policy.

    python benchmarks/kernels/budget.py --json benchmarks/results/budget.json

More requests wait than fit; their prompts are different pieces of text. The batch is counted at
each decode step from the end of the first answer until no request waits, so it is the batch that
the memory sustains. Prefill takes its raw pages from the same budget. Answers must be long enough
that memory, not prefill, limits the batch.
"""

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import MIB, AppConfig
from triptych.core.messages import Failed, Sampling, Send
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.models.store.model_store import resolve


@dataclass(frozen=True)
class Row:
    """One policy under the budget."""

    policy: str
    mean_batch: float
    """Requests of a decode step while others wait for the memory of those that end."""
    largest_batch: int
    decode_tokens_per_s: float
    """Tokens of those steps over the time that they took."""
    tokens_per_s: float
    """Tokens of all answers over the whole run, prefill included."""
    seconds: float


def measure(policy: str, budget: int, prompts: Sequence[Sequence[int]], answer: int) -> Row:
    config = AppConfig.from_mapping(
        {
            "compressor": {"policy": policy},
            "pool": {"kv_cache_memory_bytes": budget, "prefix_bytes": 0},
            "decode": {"max_num_seqs": 64},
        }
    )
    requests, steps = len(prompts), list[tuple[int, float]]()
    original = DecodeEngine.step

    def step(engine: DecodeEngine) -> Iterable[Send]:
        batch, begun = len(engine.requests()), time.perf_counter()
        sends = original(engine)
        steps.append((batch, time.perf_counter() - begun))
        return sends

    with LocalServer(config) as server, patch.object(DecodeEngine, "step", step):
        sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
        start, begun = time.perf_counter(), set[str]()
        first, last = 0, 0
        for event in server.stream([server.request(list(asked), sampling) for asked in prompts]):
            if isinstance(event, Failed):
                raise SystemExit(f"{policy}: {event.message}")
            if event.finish and not first:
                first = len(steps)
            if len(begun) < requests:
                begun.add(event.request)
                last = len(steps)
        seconds = time.perf_counter() - start
    waiting = steps[first:last]
    if not waiting:
        raise SystemExit(f"{policy}: nobody waited for memory: ask for more or longer answers")
    tokens = sum(batch for batch, _ in waiting)
    return Row(
        policy=policy,
        mean_batch=round(tokens / len(waiting), 2),
        largest_batch=max(batch for batch, _ in steps),
        decode_tokens_per_s=round(tokens / sum(spent for _, spent in waiting), 1),
        tokens_per_s=round(requests * answer / seconds, 1),
        seconds=round(seconds, 1),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget-mib", type=int, default=256)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--policies", default="uniform:fp16,uniform:k8v4,auto")
    parser.add_argument("--rounds", type=int, default=1, help="the policies in turns, so often")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    encode = Vocabulary(resolve(AppConfig().model.name)).encode
    texts = documents(
        encode, "evaluation", context=options.prompt, continuation=1, count=options.requests
    )
    prompts = [text.context for text in texts]
    rows = [
        measure(policy, options.budget_mib * MIB, prompts, options.answer)
        for _ in range(options.rounds)
        for policy in options.policies.split(",")
    ]
    columns = list(asdict(rows[0]))
    console.print(make_table(columns, [list(asdict(row).values()) for row in rows]))
    if options.json:
        asked = ("budget_mib", "requests", "prompt", "answer")
        fields = {key: getattr(options, key) for key in asked}
        write_json({"host": host, **fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
