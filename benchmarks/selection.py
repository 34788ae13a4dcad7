# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Tensor.tolist has no element type.
"""Time of a decode step that reads chosen pages, in turns with one that reads all of them.

    python benchmarks/selection.py --json benchmarks/results/selection_decode.json

The same engines and requests: a coin decides step by step whether all pages are read, so both meet
the same noise, and steps that score tokens, which read all pages anyway, fall on both sides.
"""

import argparse
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

from torch import Tensor

from triptych.cli.loadgen.host import host_info
from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import Sampling, Send
from triptych.workers.decode import DecodeEngine
from triptych.workers.local import LocalServer
from triptych.workers.selection import Ids, Mask, Selector, StepChoice

VOCAB = 49_152


@dataclass(frozen=True)
class Row:
    """One policy and batch: milliseconds of a step."""

    policy: str
    requests: int
    prompt: int
    whole_ms: float
    """Median of the steps that read all pages."""
    selected_ms: float
    ratio: float
    whole_best_ms: float
    selected_best_ms: float
    pages_read: float
    """Share of the pages of layers that choose, in the steps that choose."""
    steps: int
    """Of each kind."""


class Turns:
    """Lets half of the steps read all pages, and keeps what each took."""

    def __init__(self, requests: int) -> None:
        self.requests, self.is_whole = requests, True
        self._coin = random.Random(1)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.shares = list[float]()
        self._step, self._choose = DecodeEngine.step, Selector.step

    def step(self, engine: DecodeEngine) -> Iterable[Send]:
        batch, begun = len(engine.requests()), time.perf_counter()
        sends = self._step(engine)
        if batch == self.requests:
            self.seconds[self.is_whole].append(time.perf_counter() - begun)
            self.is_whole = self._coin.random() < 0.5
        return sends

    def choose(
        self, selector: Selector, slots: Ids, positions: Tensor, is_dense: Mask
    ) -> StepChoice | None:
        choice = self._choose(selector, slots, positions, is_dense)
        if self.is_whole or choice is None:
            return None
        layer = selector.config.dense_layers
        for slot in choice.read[choice.read >= 0].tolist():
            read = int(selector.counts[layer, slot].sum())  # of the step before
            held = sum(
                int((-(-table.tokens[layer, slot] // table.layout.tokens)).sum())
                for table in selector.tables
            )
            if read:
                self.shares.append(read / held)
        return choice


def measure(policy: str, requests: int, prompt: int, answer: int, keep: float) -> Row:
    config = AppConfig.from_mapping(
        {
            "compressor": {"policy": policy},
            "pool": {"capacity_bytes": 3 << 30, "prefix_bytes": 0},
            "decode": {
                "selection": {"method": "moments", "keep_fraction": keep, "budget_tokens": 0}
            },
        }
    )
    generator, turns = random.Random(0), Turns(requests)
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    prompts = [[generator.randrange(VOCAB) for _ in range(prompt)] for _ in range(requests)]

    def step(engine: DecodeEngine) -> Iterable[Send]:
        return turns.step(engine)

    def choose(owner: Selector, slots: Ids, positions: Tensor, dense: Mask) -> StepChoice | None:
        return turns.choose(owner, slots, positions, dense)

    with (
        LocalServer(config) as server,
        patch.object(DecodeEngine, "step", step),
        patch.object(Selector, "step", choose),
    ):
        server.complete([server.request(asked, sampling) for asked in prompts])
    whole, selected = (turns.seconds[kind][2:] for kind in (True, False))
    return Row(
        policy=policy,
        requests=requests,
        prompt=prompt,
        whole_ms=round(median(whole) * 1e3, 2),
        selected_ms=round(median(selected) * 1e3, 2),
        ratio=round(median(whole) / median(selected), 3),
        whole_best_ms=round(min(whole) * 1e3, 2),
        selected_best_ms=round(min(selected) * 1e3, 2),
        pages_read=round(sum(turns.shares) / max(1, len(turns.shares)), 3),
        steps=min(len(whole), len(selected)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", default="auto,uniform:k8v4")
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--prompt", type=int, default=7900)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    rows = [
        measure(policy, int(requests), options.prompt, options.answer, options.keep)
        for policy in options.policies.split(",")
        for requests in options.requests.split(",")
    ]
    columns = list(asdict(rows[0]))
    console.print(make_table(columns, [list(asdict(row).values()) for row in rows]))
    if options.json:
        told = {key: getattr(options, key) for key in ("prompt", "answer", "keep")}
        write_json({"host": host, **told, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
