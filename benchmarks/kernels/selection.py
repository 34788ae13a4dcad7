# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Tensor.tolist has no element type.
"""Time of a decode step with page selection, compared with one that reads all pages.

    python benchmarks/kernels/selection.py --threads 1 \
        --json benchmarks/results/selection_decode.json

Uses the decode engine of the server with real weights. Pages have random content in K8V4, sink and
window in FP16. A random choice per step decides whether all pages are read, so both kinds of steps
see the same machine noise.
"""

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import torch

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import AppConfig
from triptych.core.messages import CompressionReport, Join, Request, Sampling
from triptych.core.pages import PagePlan
from triptych.kernels import store_tokens
from triptych.kvpool import LocalPool
from triptych.loadgen.report.host import host_info
from triptych.workers.decode.decode_attention import Ids64
from triptych.workers.decode.page_selection import Ids, Mask, Selector, StepChoice
from triptych.workers.factory import load_model, make_engines
from triptych.workers.kv.handle_codec import make_handle
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe
from triptych.workers.models.store.model_store import resolve
from triptych.workers.stage import Engine


@dataclass(frozen=True)
class Row:
    """One batch: milliseconds of a step."""

    requests: int
    prompt: int
    whole_ms: float
    """Median of the steps that read all pages."""
    selected_ms: float
    ratio: float
    whole_best_ms: float
    selected_best_ms: float
    ratio_best: float
    pages_read: float
    """Share of the pages of layers that choose, in the steps that choose."""
    steps: int
    """Of each kind."""


class Turns:
    """Lets half of the steps read all pages, and keeps what each took."""

    def __init__(self) -> None:
        self.is_whole = True
        self._coin = random.Random(1)
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.shares = list[float]()
        self._choose = Selector.step

    def step(self, engine: Engine) -> None:
        begun = time.perf_counter()
        list(engine.step())
        self.seconds[self.is_whole].append(time.perf_counter() - begun)
        self.is_whole = self._coin.random() < 0.5

    def choose(
        self, selector: Selector, slots: Ids, positions: Ids64, is_dense: Mask
    ) -> StepChoice | None:
        choice = self._choose(selector, slots, positions, is_dense)
        if self.is_whole or choice is None:
            return None
        chosen = slice(selector.dense_layers, None)
        for slot in choice.read[choice.read >= 0].tolist():
            read = int(selector.counts[chosen, slot].sum())  # of the step before
            held = sum(
                int((-(-table.tokens[chosen, slot] // table.layout.tokens)).sum())
                for table in selector.tables
            )
            if read:
                self.shares.append(read / held)
        return choice


def measure(requests: int, prompt: int, answer: int, keep: float, spread: str) -> Row:
    config = AppConfig.from_mapping(
        {
            "compressor": {"policy": "uniform:k8v4"},
            "pool": {"prefix_bytes": 0},
            "decode": {
                "selection": {
                    "method": "moments",
                    "keep_fraction": keep,
                    "budget_tokens": 0,
                    "head_budgets": spread,
                }
            },
        }
    )
    path = resolve(config.model.name)
    facts = describe(path)
    plan = PagePlan.of(config, facts.geometry, find_profile(config, facts))
    pages = (plan.high.pages(prompt) + plan.raw_pages(prompt) + answer) * plan.geometry.head_rows
    pool = LocalPool(requests * pages, plan.page_bytes)
    model_context = load_model(config, plan, path, ("decode",))
    (engine,) = make_engines(config, plan, model_context, pool, ("decode",))
    turns = Turns()

    def choose(owner: Selector, slots: Ids, positions: Ids64, dense: Mask) -> StepChoice | None:
        return turns.choose(owner, slots, positions, dense)

    for number in range(requests):
        engine.accept(join(plan, pool, f"r{number}", prompt, answer))
    with patch.object(Selector, "step", choose):
        while engine.has_work():
            turns.step(engine)
    pool.close()
    whole, selected = (turns.seconds[kind][2:] for kind in (True, False))
    return Row(
        requests=requests,
        prompt=prompt,
        whole_ms=round(median(whole) * 1e3, 2),
        selected_ms=round(median(selected) * 1e3, 2),
        ratio=round(median(whole) / median(selected), 3),
        whole_best_ms=round(min(whole) * 1e3, 2),
        selected_best_ms=round(min(selected) * 1e3, 2),
        ratio_best=round(min(whole) / min(selected), 3),
        pages_read=round(sum(turns.shares) / max(1, len(turns.shares)), 3),
        steps=min(len(whole), len(selected)),
    )


def join(plan: PagePlan, pool: LocalPool, name: str, prompt: int, answer: int) -> Join:
    """A request whose prompt is read and compressed, to random keys and values."""
    arena, rows = torch.from_numpy(pool.arena.data), plan.geometry.head_rows
    recent = plan.sink_tokens + plan.policy.window_tokens
    sink, last = plan.sink_tokens, prompt - plan.policy.window_tokens
    runs = list[tuple[str, Ids, Ids]]()
    positions = torch.cat([torch.arange(sink), torch.arange(last, prompt)])
    parts = (plan.high, torch.arange(sink, last)), (plan.raw, positions)
    for layout, where in parts:
        count = len(where)
        ids = pool.allocate(rows * layout.pages(count)).reshape(rows, -1)
        token = torch.arange(count)
        slots = torch.from_numpy(ids)[:, token // layout.tokens].T.contiguous()
        inside = (token % layout.tokens).int()[:, None].repeat(1, rows)
        key, value = torch.randn(2, count, rows, layout.head_dim)
        store_tokens(arena, layout, key, value, slots, inside, where.int())
        runs.append((layout.format.name, np.full(rows, count, np.int32), ids.ravel()))
    assert recent == len(positions)
    (lease_ref,) = pool.handoff([(name, np.concatenate([ids for _, _, ids in runs]))])
    sampling = Sampling(temperature=0.0, max_tokens=answer, ignore_eos=True)
    request = Request(id=name, prompt=(5,) * prompt, sampling=sampling, reply_to="client")
    return Join(
        request=request,
        handle=make_handle(lease_ref, runs, tokens=prompt),
        report=CompressionReport(policy="uniform:k8v4", raw_bytes=1, stored_bytes=1),
        output_tokens=(5,),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompt", type=int, default=7900)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--keep", type=float, default=0.3)
    parser.add_argument("--spread", choices=("auto", "even"), default="auto")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host = host_info()
    torch.set_num_threads(options.threads)
    rows = [
        measure(int(requests), options.prompt, options.answer, options.keep, options.spread)
        for requests in options.requests.split(",")
    ]
    columns = list(asdict(rows[0]))
    console.print(make_table(columns, [list(asdict(row).values()) for row in rows]))
    if options.json:
        asked = ("prompt", "answer", "keep", "spread", "threads")
        fields = {key: getattr(options, key) for key in asked}
        write_json({"host": host, **fields, "rows": [asdict(row) for row in rows]}, options.json)


if __name__ == "__main__":
    main()
