"""Expected attention: its formula by hand, and the statistics that prefill keeps of queries."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.core.layout import Geometry
from triptych.core.pages import PagePlan
from triptych.core.policy import KVRotation
from triptych.kernels.hadamard import hadamard
from triptych.kernels.retain import (
    BUDGETS,
    SCORES,
    ObservedPrompt,
    expected_attention,
    mean_rotation,
)
from triptych.workers.compress.learned.rope_frame import RopeFrame
from triptych.workers.compress.raw_tokens import ModelCoordinates
from triptych.workers.models.attention_interface import LayerTraits
from triptych.workers.models.traits import ModelTraits, PlainTraits
from triptych.workers.prefill.prompt_statistics import QueryStatistics, known_frequencies

TRAITS = LayerTraits(scale=0.5)
FREQUENCIES = (1.0, 0.25)


def test_the_formula_by_hand() -> None:
    """Queries of mean (1, 0) and variance 2 in the second channel, scale 1: a key (a, b) has the
    logit a + b * b. The first four tokens take no part."""
    keys = torch.tensor([[9.0, 9.0]] * 4 + [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [-1.0, 1.0]])
    found = expected_attention(
        torch.tensor([[1.0, 0.0]]),
        torch.tensor([[[0.0, 0.0], [0.0, 2.0]]]),
        keys[None],
        torch.tensor([[7.0] * 4 + [1.0, 1.0, 3.0, 1.0]]),
        rotation=torch.eye(2),
        scale=1.0,
    )
    powers = [math.exp(1), math.exp(4), math.exp(0), math.exp(0)]
    wanted = [value / sum(powers) * norm for value, norm in zip(powers, (1, 1, 3, 1), strict=True)]
    assert found.flatten().tolist() == pytest.approx([0.0] * 4 + wanted)


def test_heads_of_a_group_are_averaged_and_the_mean_rotation_is_that_of_rope() -> None:
    torch.manual_seed(0)
    rotation = mean_rotation(torch.tensor(FREQUENCIES), 100)
    frame = RopeFrame(torch.tensor(FREQUENCIES))
    vector = torch.randn(4)
    ahead = torch.stack([frame.rotate(vector, torch.tensor(100 + step)) for step in range(512)])
    torch.testing.assert_close(rotation @ vector, ahead.mean(0), atol=1e-5, rtol=1e-4)
    mean, spread = torch.randn(2, 4), torch.eye(4).expand(2, 4, 4)
    keys, norms = torch.randn(1, 20, 4), torch.rand(1, 20)
    given = {"rotation": rotation, "scale": 0.5}
    both = expected_attention(mean, spread, keys, norms, **given)
    one, other = (
        expected_attention(mean[head, None], spread[head, None], keys, norms, **given)
        for head in range(2)
    )
    torch.testing.assert_close(both, (one + other) / 2)


def test_the_rule_keeps_the_first_four_tokens() -> None:
    prompt = ObservedPrompt(
        tokens=8,
        kv_heads=1,
        layers=range(1),
        model_layers=1,
        attention=torch.tensor([[[0.0, 0.0, 0.0, 0.0, 3.0, 1.0, 5.0, 4.0]]]),
        of_keys=lambda score: torch.zeros(()),
        kept=6,
    )
    mask = BUDGETS["per_head"](SCORES["expected"](prompt), prompt)
    assert mask.flatten().nonzero().flatten().tolist() == [0, 1, 2, 3, 6, 7]


@pytest.mark.parametrize("borders", [(0, 40), (0, 2, 40), (0, 7, 8, 39, 40)])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_chunks_add_up_to_the_statistics_of_the_prompt(
    borders: tuple[int, ...], is_rotated: bool
) -> None:
    torch.manual_seed(1)
    tokens, heads, geometry = 40, 4, Geometry(layers=1, kv_heads=2, head_dim=4)
    frame, positions = RopeFrame(torch.tensor(FREQUENCIES)), torch.arange(tokens)
    before, keys, values = torch.randn(heads, tokens, 4), *torch.randn(2, 2, tokens, 4)
    turned = frame.rotate(before, positions)
    basis = hadamard(4) if is_rotated else torch.eye(4)
    rotation = KVRotation(rotated=is_rotated)
    statistics = QueryStatistics(
        FREQUENCIES,
        ModelCoordinates.of(rotation, geometry, torch.device("cpu")),
        geometry,
        range(1),
        heads,
        tokens,
        torch.device("cpu"),
    )
    for start, end in pairwise(borders):
        part = (turned @ basis)[:, start:end].transpose(0, 1)
        statistics.add(0, start, part, TRAITS, lambda: torch.zeros(()))
    found = statistics.scores(lambda _: (keys @ basis, values @ basis))
    expected = expected_attention(
        before[:, 4:].mean(1),
        torch.stack([one.T.cov(correction=0) for one in before[:, 4:]]),
        keys,
        values.norm(dim=-1),
        rotation=mean_rotation(torch.tensor(FREQUENCIES), tokens),
        scale=TRAITS.scale,
    )
    torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=1e-4)


def test_a_model_whose_rope_is_not_known_is_refused_with_the_reason() -> None:
    plain = PlainTraits(
        norm_epsilon=1e-5, frequencies=FREQUENCIES, rotary_scale=1.0, is_tied=True, tensors={}
    )
    traits = ModelTraits(
        geometry=Geometry(layers=1, kv_heads=2, head_dim=64),
        num_heads=2,
        layers=(TRAITS,),
        context_tokens=100,
        eos_token_ids=(0,),
        vocab_size=10,
        plain=plain,
    )
    compressor = {"profile": "none", "methods": ["expected_attention"]}
    config = AppConfig.from_mapping({"compressor": compressor})
    plan = PagePlan.of(config, traits.geometry)
    assert known_frequencies(plan, traits) == FREQUENCIES
    for unknown in (None, replace(plain, rotary_sections=(1, 1))):
        with pytest.raises(ConfigError, match="'expected_attention' needs queries before RoPE"):
            known_frequencies(plan, replace(traits, plain=unknown))
    others = PagePlan.of(AppConfig.from_mapping({}), traits.geometry)
    assert known_frequencies(others, replace(traits, plain=None)) == ()
