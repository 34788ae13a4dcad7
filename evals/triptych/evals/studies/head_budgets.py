# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten, amax and others untyped in part.
"""Finds head budgets: how many of its pages each head row reads in a decode step.

For each head row and each share of its pages, the square of the attention that its queries miss is
measured. Shares are then allocated greedily, each to the row where it saves most. Squares are used
because the error of the logits grows faster than the missed attention; with the plain sum, heads
with flat attention get pages that other heads need more (docs/log.md).
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.head_budgets import BUDGET_STEPS, HeadBudgets, encode_head_budgets
from triptych.core.profile import Profile, Settings
from triptych.evals.data.cases import Case
from triptych.evals.data.texts import documents
from triptych.evals.data.vocabulary import Vocabulary
from triptych.evals.methods.masked_attention import MaskedModel
from triptych.evals.methods.page_retrieval import LayerQueries, masked_scores, page_scores
from triptych.kernels.select import Rule
from triptych.workers.models.compression_profile import find_profile
from triptych.workers.models.facts import describe

PAGE_TOKENS = 32
"""Of K8V4 pages at a head size of 64; the budgets are used for all page sizes."""
ALWAYS_READ = Rule.of(0.0)
"""Sink and window that are always read: the server's defaults."""


@dataclass(frozen=True, kw_only=True)
class HeadBudgetStudy:
    """The texts on which head rows are measured."""

    context: int
    """Tokens before those whose attention is measured."""
    documents: int = 3
    steps: int = 128


@dataclass
class MissedAttention:
    """A ``TokenMask`` that reads everything, and adds up what queries miss at each share."""

    sums: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """[KH, ``BUDGET_STEPS`` + 1], summed over texts."""

    def __call__(self, layer: int, queries: LayerQueries) -> None:
        """Add the squares, as means over queries and query heads."""
        tokens = queries.weights.shape[3]
        scores = page_scores("moments", queries, PAGE_TOKENS)
        scores = masked_scores(scores, ALWAYS_READ, queries.first, tokens, PAGE_TOKENS)
        visible, pages = scores.isneginf().logical_not().sum(2), scores.shape[2]
        padded = torch.nn.functional.pad(queries.weights, (0, pages * PAGE_TOKENS - tokens))
        mass = padded.unflatten(3, (pages, PAGE_TOKENS)).sum(4)
        order = scores.argsort(dim=2, descending=True, stable=True)
        got = mass.gather(3, order[:, None].expand_as(mass)).cumsum(3)
        forced = scores.isposinf().sum(2)
        missed = list[Tensor]()
        for part in range(BUDGET_STEPS + 1):
            count = (-(-visible * part // BUDGET_STEPS)).maximum(forced)
            at = (count - 1)[:, None, :, None].expand(*mass.shape[:3], 1)
            missed.append((1 - got.gather(3, at)[..., 0]).clamp_min(0).square().mean((1, 2)))
        here = torch.stack(missed, 1)
        self.sums[layer] = self.sums[layer] + here if layer in self.sums else here

    @property
    def curves(self) -> Tensor:
        """[L, KH, ``BUDGET_STEPS`` + 1]"""
        return torch.stack([self.sums[layer] for layer in sorted(self.sums)])


def find_head_budgets(
    model: Path, plan: HeadBudgetStudy, done: Callable[[str], None]
) -> HeadBudgets:
    """Run texts with the full cache, and allocate pages by the attention each row would miss.

    ``done`` is called with the name of each finished document.

    Raises: ConfigError if the texts are too short; ModelError for sliding windows or softcaps
    """
    masked, missed = MaskedModel(model), MissedAttention()
    longest = masked.facts.context_tokens
    if plan.context + plan.steps > longest:
        raise ConfigError(
            f"{plan.context} tokens and {plan.steps} steps: the model's context is {longest}; "
            "ask for a shorter context"
        )
    texts = documents(
        Vocabulary(model).encode,
        "calibration",
        context=plan.context,
        continuation=plan.steps,
        count=plan.documents,
    )
    for text in texts:
        masked.run(Case(name=text.name, prompt=text.context, forced=text.continuation), missed)
        done(text.name)
    return encode_head_budgets(allocate_budgets(missed.curves.flatten(0, 1).tolist()))


def profile_to_extend(config: AppConfig, path: Path) -> Profile:
    """The profile that the settings name, or an empty one for the model at ``path``."""
    facts = describe(path)
    return find_profile(config, facts) or Profile(
        model=config.model.name,
        weights=facts.weights,
        config=facts.config,
        geometry=facts.geometry,
        settings=Settings(),
    )


def allocate_budgets(curves: Sequence[Sequence[float]]) -> list[float]:
    """Shares of all head rows for every mean share, row after row.

    ``curves``: the cost of each row when it reads 0, 1, 2, ... parts of its pages. The allocation
    is greedy: the next step is the one that saves most per part. A step may be several parts, if
    the first of them alone save little.
    """
    rows, parts = len(curves), BUDGET_STEPS
    have = [0] * rows
    shares = [[0.0] * (parts + 1) for _ in range(rows)]
    steps = [(-gain, row, to) for row in range(rows) for gain, to in [_best_step(curves[row], 0)]]
    heapq.heapify(steps)
    given = 0
    for mean in range(1, parts + 1):
        while given < mean * rows and steps:
            _, row, to = heapq.heappop(steps)
            given += to - have[row]
            have[row] = to
            if to < parts:
                gain, further = _best_step(curves[row], to)
                heapq.heappush(steps, (-gain, row, further))
        for row in range(rows):
            shares[row][mean] = have[row] / parts
    return [share for row in shares for share in row]


def _best_step(curve: Sequence[float], start: int) -> tuple[float, int]:
    """The step from ``start`` that saves most per part: the saving, and the parts after it."""
    gains = [
        ((curve[start] - curve[to]) / (to - start), -to) for to in range(start + 1, len(curve))
    ]
    gain, to = max(gains)
    return gain, -to
