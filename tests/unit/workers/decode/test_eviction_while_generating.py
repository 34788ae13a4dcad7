"""``h2o:generate``: pages hold what H2O keeps of prompt and answer by the model's own attention."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.unit.workers.decode.test_resume import Client, Stages
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.messages import Request, Sampling
from triptych.core.pages import PagePlan
from triptych.evals.methods.masked_attention import MaskedModel, by_kv_head, ungrouped
from triptych.kernels.pages import segments
from triptych.workers.decode.decode_engine import DecodeEngine
from triptych.workers.models.attention_interface import LayerTraits

TOKENS, ANSWER = 96, 120
SETTINGS = {
    "policy": "h2o:generate",
    "keep_share": 0.5,
    "high_format": "k8v8",
    "recent_window_tokens": 4,
    "score_every_tokens": 1,
    "sink_tokens": 1,
}
PROMPT = tuple(random.Random(11).choices(range(2, 250), k=TOKENS))


def request(floor: str = "low") -> Request:
    sampling = Sampling(max_tokens=ANSWER, temperature=0.0, ignore_eos=True)
    made = Request(id="r0", prompt=PROMPT, sampling=sampling, reply_to="client")
    return replace(made, floor=floor)


def held(engine: DecodeEngine, stages: Stages, slot: int) -> list[set[int]]:
    """Positions of the tokens that each head row has in pages."""
    arena = torch.from_numpy(stages.pool.arena.data)
    found = [set[int]() for _ in range(stages.plan.geometry.head_rows)]
    for table in engine.tables:
        pages, counts = table.pages[:, slot], table.tokens[:, slot]
        known = segments(arena, table.layout).positions
        for row in range(len(found)):
            at = divmod(row, stages.plan.geometry.kv_heads)
            count, mine = int(counts[at]), torch.from_numpy(pages[at].copy()).long()
            if table.backward:
                mine = mine.flip(0)
            named = known[mine[: table.layout.pages(count)]].flatten()[:count].tolist()
            assert len(set(named)) == count
            found[row] |= set(named)
    return found


class Evicting:
    """H2O, transcribed: each head row reads what it keeps, and adds up the attention that tokens
    receive, the largest of its query heads."""

    def __init__(self, plan: PagePlan) -> None:
        self.plan = plan
        self.keys, self.values = dict[int, Tensor](), dict[int, Tensor]()
        self.sums, self.kept = dict[int, Tensor](), dict[int, Tensor]()

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values = key.transpose(0, 1), value.transpose(0, 1)
        new, heads = keys.shape[1], len(keys)
        if layer in self.keys:
            keys = torch.cat([self.keys[layer], keys], 1)
            values = torch.cat([self.values[layer], values], 1)
        count = keys.shape[1]
        old = self.sums.get(layer, torch.zeros(heads, 0))
        kept = self.kept.get(layer, torch.zeros(heads, 0, dtype=torch.bool))
        kept = torch.nn.functional.pad(kept, (0, new), value=True)
        logits = by_kv_head(query, heads) * traits.scale @ keys[:, None].mT
        ahead = torch.arange(count) > torch.arange(count - new, count)[:, None]
        hidden = ahead | ~kept[:, None, None]
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        received = weights.sum(2).amax(1)
        self.sums[layer] = torch.nn.functional.pad(old, (0, new)) + received
        self.keys[layer], self.values[layer], self.kept[layer] = keys, values, kept
        return ungrouped(weights @ values[:, None])

    def compress(self) -> None:
        """Keep half of the prompt: the sink and the window anyway, the newest, and the heaviest."""
        plan, budget = self.plan, TOKENS // 2
        first = plan.sink_tokens
        end = first + plan.leaving_tokens(TOKENS)
        for layer, sums in self.sums.items():
            for head, row in enumerate(sums):
                always = [*range(first), *range(end, TOKENS)]
                newest = [t for t in range(first, end) if t >= TOKENS - budget // 2]
                rest = [t for t in range(first, end) if t < TOKENS - budget // 2]
                rest.sort(key=lambda t: -float(row[t]))
                keep = (always + newest + rest)[: max(budget, len(always))]
                self.kept[layer][head] = False
                self.kept[layer][head, keep] = True

    def retire(self, seen: int) -> None:
        """Drop what is above the budget, once ``retire_tokens`` are older than the window."""
        plan, budget = self.plan, TOKENS // 2
        recent = plan.full_recent_tokens - plan.retire_tokens
        window = seen - (recent - plan.sink_tokens)
        for layer, sums in self.sums.items():
            for head, row in enumerate(sums):
                kept = self.kept[layer][head]
                old = [t for t in range(plan.sink_tokens, window) if kept[t]]
                before = [t for t in old if t < window - plan.retire_tokens]
                excess = len(old) - max(plan.retire_tokens, budget - recent)
                order = sorted(
                    before,
                    key=lambda t: (
                        t >= seen - budget // 2,
                        t if t >= seen - budget // 2 else float(row[t]),
                    ),
                )
                kept[order[: max(0, excess)]] = False


def test_pages_hold_what_h2o_keeps_of_prompt_and_answer(tiny_model: Path) -> None:
    stages, client = Stages.of(tiny_model, SETTINGS), Client()
    plan = stages.plan
    name, engine = stages.decoder()
    client.hear(engine.accept(stages.join(request())) or ())
    masked, h2o = MaskedModel(tiny_model), Evicting(plan)
    with torch.inference_mode():
        masked.model(torch.tensor(PROMPT), torch.arange(TOKENS), h2o, torch.tensor([TOKENS - 1]))
        h2o.compress()
        (running,) = engine._running.values()
        sizes, retired = set[int](), 0
        while running.output.finish is None:
            token, seen = running.output.tokens[-1], running.position
            if engine.tables[0].length(running.slot) == plan.full_recent_tokens:
                h2o.retire(seen)
                retired += 1
            client.hear(engine.step())
            masked.model(torch.tensor([token]), torch.tensor([seen]), h2o, torch.tensor([0]))
            if running.output.finish is None:
                rows = held(engine, stages, running.slot)
                expected = [
                    set(row.nonzero().flatten().tolist())
                    for layer in sorted(h2o.kept)
                    for row in h2o.kept[layer]
                ]
                assert [len(row) for row in rows] == [len(row) for row in expected]
                overlaps = [
                    len(row & other) / len(row) for row, other in zip(rows, expected, strict=True)
                ]
                assert min(overlaps) > 0.9, seen
                sizes |= {len(row) for row in rows}
    assert retired >= 3
    assert max(sizes) <= TOKENS // 2 + plan.retire_tokens + plan.recent.tokens
    assert stages.pool.expel(name)
    assert stages.pool.check() == []


def test_a_floor_of_high_keeps_all_tokens(tiny_model: Path) -> None:
    stages, client = Stages.of(tiny_model, SETTINGS), Client()
    name, engine = stages.decoder()
    client.hear(engine.accept(stages.join(request("high"))) or ())
    (running,) = engine._running.values()
    for _ in range(ANSWER - 2):
        client.hear(engine.step())
    assert held(engine, stages, running.slot) == [set(range(running.position))] * 4
    assert stages.pool.expel(name)


def test_without_measurements_the_method_is_refused() -> None:
    settings = {"compressor": {**SETTINGS, "score_every_tokens": 0, "profile": "none"}}
    config, shape = AppConfig.from_mapping(settings), Geometry(layers=2, kv_heads=2, head_dim=64)
    with pytest.raises(ConfigError, match="score_every_tokens=0: expected above 0"):
        PagePlan.of(config, shape)
