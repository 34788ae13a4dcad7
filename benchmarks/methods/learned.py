"""Time of learned networks: batches next to single requests, and prefill without attention sums.

    python benchmarks/methods/learned.py --json benchmarks/results/learned_speed.json

Networks have random weights: their time does not depend on what they learned. Every figure is CPU
time of one thread, so that other programs change it little: the fastest of some calls, and calls
that are compared run in turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from triptych.cli.output import console, make_table, write_json
from triptych.core.config import ModelConfig
from triptych.core.images import TEXT, Segment
from triptych.core.layout import Geometry
from triptych.kernels import prefill_attention
from triptych.loadgen.report.host import host_info
from triptych.workers.compress.learned.chunk_merger import GatedMerger, Merger, PaperMerger
from triptych.workers.compress.learned.chunk_plan import plan_chunks
from triptych.workers.compress.learned.merge_requests import RequestCache, merge_requests
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.learned.token_scorer import TokenScorer, score_requests
from triptych.workers.models.attention_interface import Attend, LayerTraits
from triptych.workers.models.facts import describe
from triptych.workers.models.load import LoadedModel, load
from triptych.workers.models.store.model_store import resolve

BATCH = 8
CHUNK_TOKENS = 5
HIDDEN = 8
"""Units of the hidden layers of the packaged compressor."""


@dataclass(frozen=True)
class BatchRow:
    """A network on one request, and on a batch of equal ones."""

    network: str
    tokens: int
    single_ms: float
    batch_ms: float
    of_singles: float
    """Time of the batch over that of as many single calls."""


@dataclass(frozen=True)
class PrefillRow:
    """Prefill of a prompt: all layers, the kernels of the server, no pages."""

    tokens: int
    with_sums_ms: float
    without_sums_ms: float
    scorer_ms: float
    saved: float
    """Share of prefill that is saved when the scorer replaces the sums."""


class Attention(Attend):
    """The attention of the prefill stage, with or without the sums that each token receives."""

    def __init__(self, *, sums: bool) -> None:
        self._sums = sums

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        del layer, sinks
        count, heads = query.shape[:2]
        mixed = prefill_attention(
            query.float(),
            key.half(),
            value.half(),
            [0, count],
            scale=traits.scale,
            window=traits.window,
            softcap=traits.softcap,
            significance=torch.zeros(1, heads, count) if self._sums else None,
        )
        return mixed.to(query.dtype)


def fastest_ms(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The least CPU time of each call, in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for index, call in enumerate(calls):
            start = time.process_time()
            call()
            best[index] = min(best[index], (time.process_time() - start) * 1e3)
    return best


def random_cache(geometry: Geometry, tokens: int) -> RequestCache:
    shape = geometry.layers, geometry.kv_heads, tokens
    keys, values = (torch.randn(*shape, geometry.head_dim) for _ in "kv")
    return RequestCache(keys, values, torch.rand(shape))


def batch_rows(
    geometry: Geometry, frame: RopeFrame, lengths: Sequence[int], rounds: int
) -> list[BatchRow]:
    """Scorer and mergers on prompts of each length."""
    scorer = TokenScorer(geometry, frame, 64).requires_grad_(False)
    mergers: dict[str, Merger] = {
        "compressor": GatedMerger(geometry, CHUNK_TOKENS, HIDDEN).requires_grad_(False),
        "compressor, paper": PaperMerger(geometry, CHUNK_TOKENS).requires_grad_(False),
    }
    rows = list[BatchRow]()
    for tokens in lengths:
        cache = random_cache(geometry, tokens)
        rows.append(_batch_row("scorer", tokens, partial(_score, scorer, cache), rounds))
        for name, merger in mergers.items():
            merge = partial(_merge, merger, frame, cache)
            rows.append(_batch_row(name, tokens, merge, rounds))
    return rows


def _score(scorer: TokenScorer, cache: RequestCache, count: int) -> object:
    return score_requests(scorer, [(cache.keys, cache.values)] * count)


@torch.inference_mode()
def _merge(merger: Merger, frame: RopeFrame, cache: RequestCache, count: int) -> object:
    plan = plan_chunks([Segment(TEXT, 0, cache.keys.shape[2])], CHUNK_TOKENS)
    return merge_requests({TEXT: merger}, frame, [cache] * count, [plan] * count)


def _batch_row(name: str, tokens: int, run: Callable[[int], object], rounds: int) -> BatchRow:
    run(BATCH)
    single, batch = fastest_ms([lambda: run(1), lambda: run(BATCH)], rounds)
    return BatchRow(name, tokens, single, batch, batch / (BATCH * single))


def prefill_rows(
    model: str, frame: RopeFrame, lengths: Sequence[int], rounds: int
) -> list[PrefillRow]:
    """Prefill with and without sums, in turns, and the scorer that replaces them."""
    loaded = load(resolve(model), ModelConfig().dtype)
    scorer = TokenScorer(loaded.geometry, frame, 64).requires_grad_(False)
    rows = list[PrefillRow]()
    for tokens in lengths:
        ids = torch.randint(loaded.vocab_size, (tokens,))
        cache = random_cache(loaded.geometry, tokens)
        calls = (
            partial(_prefill, loaded, ids, sums=True),
            partial(_prefill, loaded, ids, sums=False),
            partial(_score, scorer, cache, 1),
        )
        calls[0]()
        with_sums, without, scoring = fastest_ms(calls, rounds)
        saved = 1 - (without + scoring) / with_sums
        rows.append(PrefillRow(tokens, with_sums, without, scoring, saved))
    return rows


@torch.inference_mode()
def _prefill(loaded: LoadedModel, ids: Tensor, *, sums: bool) -> object:
    places = torch.arange(len(ids))
    return loaded.network(ids, places, Attention(sums=sums), places[-1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ModelConfig().name)
    parser.add_argument("--lengths", default="80,128,256,1024", help="of the batches")
    parser.add_argument("--prompts", default="512,2048", help="of prefill, in tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    host, facts = host_info(), describe(resolve(options.model))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    frame = RopeFrame.of(facts)
    lengths = [int(length) for length in options.lengths.split(",")]
    batches = batch_rows(facts.geometry, frame, lengths, options.rounds)
    prompts = [int(length) for length in options.prompts.split(",")]
    prefills = prefill_rows(options.model, frame, prompts, options.rounds)
    for rows in (batches, prefills):
        columns = list(asdict(rows[0]))
        console.print(make_table(columns, [list(asdict(row).values()) for row in rows]))
    if options.json:
        found = {
            "threads": torch.get_num_threads(),
            "batches": [asdict(row) for row in batches],
            "prefill": [asdict(row) for row in prefills],
        }
        write_json({"host": host, **found}, options.json)


if __name__ == "__main__":
    main()
