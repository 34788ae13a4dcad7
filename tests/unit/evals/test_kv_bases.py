"""Bases of keys and values: moments by hand, and on a tiny model."""

from pathlib import Path

import torch

from triptych.evals.studies.kv_bases import (
    Moments,
    PairEnergies,
    axes_of,
    energy,
    fit_bases,
    fit_pair_order,
    second_moment,
)
from triptych.workers.models.attention_interface import LayerTraits


def test_moments_by_hand() -> None:
    """OSCAR's two sums: of queries, and of values weighted by k (sum of q q^T) k^T."""
    queries = torch.tensor([[1.0, 0.0], [2.0, 1.0]])
    moment = second_moment(queries)
    assert torch.equal(moment, torch.tensor([[5.0, 2.0], [2.0, 1.0]]).double())
    weights = energy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]]), moment)
    assert weights.tolist() == [5.0, 1.0, 2.0]
    values = torch.tensor([[1.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    assert torch.equal(
        second_moment(values, weights), torch.tensor([[7.0, 2.0], [2.0, 11.0]]).double()
    )


def test_axes_begin_with_the_one_of_the_largest_moment() -> None:
    axes = axes_of(torch.diag(torch.tensor([1.0, 9.0, 4.0])).double())
    assert axes.abs().tolist() == [[0, 0, 1], [1, 0, 0], [0, 1, 0]]


def test_queries_of_a_group_count_together_and_texts_add_up() -> None:
    query, key, value = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    moments, layers = Moments([5, 7]), list[int]()
    together = moments(0, query, key, value, LayerTraits(scale=1.0))
    group = query[:, 2:].reshape(-1, 8).double()
    assert torch.allclose(moments.of_queries[0, 1], group.mT @ group)
    weights = energy(key[:, 1], moments.of_queries[0, 1])
    assert torch.allclose(moments.of_values[0, 1], second_moment(value[:, 1], weights))
    for text in (slice(0, 5), slice(5, 12)):
        alone = Moments([text.stop - text.start], lambda: layers.append(0))
        got = alone(0, query[text], key[text], value[text], LayerTraits(scale=1.0))
        assert torch.allclose(got, together[text], atol=1e-6)
    assert layers == [0, 0]


def test_bases_of_a_model_are_orthogonal(tiny_model: Path) -> None:
    bases = fit_bases(tiny_model, [range(1, 40), range(5, 50)])
    unit = bases @ bases.mT
    assert bases.shape[0] == 2
    assert torch.allclose(unit, torch.eye(unit.shape[-1]).expand_as(unit), atol=1e-4)


def test_energy_of_pairs_is_the_mean_of_queries_and_centred_keys() -> None:
    """Queries of a group count together; channels c and c + d / 2 are a pair."""
    query, key, value = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    centre = torch.randn(1, 2, 8)
    energies = PairEnergies([5, 7], centre)
    energies(0, query, key, value, LayerTraits(scale=1.0))
    for head in range(2):
        of_queries = query[:, 2 * head : 2 * head + 2].reshape(-1, 2, 4).square().sum(1).mean(0)
        of_keys = (key[:, head] - centre[0, head]).view(-1, 2, 4).square().sum(1).mean(0)
        assert torch.allclose(energies.of_pairs[0, head], (of_queries + of_keys) / 2)


def test_each_head_of_a_model_has_all_of_its_pairs_in_order(tiny_model: Path) -> None:
    order = fit_pair_order(tiny_model, [range(1, 40), range(5, 50)])
    assert order.dtype == torch.uint8
    every = torch.arange(order.shape[-1]).expand_as(order)
    assert torch.equal(order.long().sort(-1).values, every)
    assert not torch.equal(order.long(), every)
