"""Tests of ``stored_mass_limits``: LeanKV's shares over the tokens that a request stores."""

import numpy as np
import pytest
import torch
from torch import Tensor

from triptych.core.layout import FORMATS, PageLayout
from triptych.kernels import Section, mass_limits, stored_mass_limits
from triptych.kernels.pages import segments

HEAD_DIM, PAGE_BYTES, PAGES, HEADS, NOW = 64, 3584, 200, 2, 1000
HIGH, LOW = (PageLayout(FORMATS[name], HEAD_DIM, PAGE_BYTES) for name in ("k8v4", "k4v2"))
RECENT = PageLayout(FORMATS["k8v8"], HEAD_DIM, PAGE_BYTES, "token", parts=8)
MASSES = (0.3, 0.05)

Means = list[list[Tensor]]
"""Significance of the tokens of each section and head, all of them a multiple of 1/4096."""


class Stored:
    """Sections of three layouts with random tokens; pages of one section follow each other."""

    def __init__(self, generator: np.random.Generator, counts: list[list[int]]) -> None:
        self.arena = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8)
        self.means: Means = []
        self.positions: Means = []
        self.sections = list[Section]()
        free = 0
        for layout, tokens in zip((HIGH, LOW, RECENT), counts, strict=True):
            width = max(1, max(layout.pages(count) for count in tokens))
            pages = torch.arange(HEADS * width, dtype=torch.int32).view(1, HEADS, width)
            pages += free * layout.parts
            free += layout.pool_pages(HEADS * width)
            self._fill(generator, layout, pages, tokens)
            backward = layout is LOW
            self.sections.append(
                Section(
                    layout,
                    pages.flip(-1) if backward else pages,
                    torch.tensor([tokens], dtype=torch.int32),
                    backward=backward,
                )
            )

    def _fill(
        self,
        generator: np.random.Generator,
        layout: PageLayout,
        pages: Tensor,
        tokens: list[int],
    ) -> None:
        parts = segments(self.arena, layout)
        means, positions = list[Tensor](), list[Tensor]()
        for head, count in enumerate(tokens):
            ages = torch.from_numpy(2 ** generator.integers(0, 9, count)).float()
            each = torch.from_numpy(generator.integers(0, 60, count)).float() / 4096
            at = pages[0, head].long()
            scores, where = parts.scores[at].flatten(), parts.positions[at].flatten()
            scores[:count], where[:count] = each * ages, (NOW - ages).int()
            parts.scores[at] = scores.view(len(at), -1)
            parts.positions[at] = where.view(len(at), -1)
            means.append(each)
            positions.append(NOW - ages)
        self.means.append(means)
        self.positions.append(positions)

    def limits(self, backend: str, end: int, masses: tuple[float, float]) -> Tensor:
        high, low, recent = self.sections
        one = [torch.tensor([number], dtype=torch.int32) for number in (0, NOW, end)]
        op = stored_mass_limits.on(backend)
        return op(self.arena, [high, low], recent, *one, masses=masses)


@pytest.mark.parametrize("backend", stored_mass_limits.backends)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "counts", [[[70, 33], [120, 5], [9, 4]], [[3, 0], [0, 2], [3, 3]], [[0, 0], [0, 0], [6, 2]]]
)
def test_limits_are_those_of_the_prompt_rule_over_all_stored_tokens(
    backend: str, seed: int, counts: list[list[int]]
) -> None:
    """Sums of these numbers are exact, so all backends have the same ties."""
    stored, end = Stored(np.random.default_rng(seed), counts), NOW - 4
    found = stored.limits(backend, end, MASSES)
    for head in range(HEADS):
        means, positions = (
            torch.cat([part[head] for part in parts[:2]])
            for parts in (stored.means, stored.positions)
        )
        judged = means[positions < end]
        total = sum(part[head].double().sum() for part in stored.means)
        for index, mass in enumerate(MASSES):
            wanted = mass_limits(judged[None].double(), torch.as_tensor([total]), mass)
            assert found[0, head, index].item() == wanted.item()


@pytest.mark.parametrize("backend", stored_mass_limits.backends)
def test_a_share_of_nothing_drops_no_token(backend: str) -> None:
    stored = Stored(np.random.default_rng(1), [[40, 12], [8, 8], [6, 6]])
    assert stored.limits(backend, NOW, (0.2, 0.0))[..., 1].eq(0).all()
