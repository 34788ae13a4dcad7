"""KVMerger: its sets, pivots and weights by hand, and against a transcription of the formula."""

import math

import pytest
import torch
from torch import Tensor

from triptych.kernels.hadamard import hadamard
from triptych.kernels.retain import alike_sets, merge_sets

ALL = torch.ones(4, dtype=torch.bool)


def test_neighbours_with_the_largest_cosines_are_joined_and_borders_never() -> None:
    """Cosines of neighbours: 0.8, 0, 1 and 0.6."""
    keys = torch.tensor([[[1.0, 0], [0.8, 0.6], [-0.6, 0.8], [-1.2, 1.6], [0.28, 0.96]]])
    assert alike_sets(keys, ALL, 5).tolist() == [[0, 1, 2, 3, 4]]
    assert alike_sets(keys, ALL, 4).tolist() == [[0, 1, 2, 2, 3]]
    assert alike_sets(keys, ALL, 3).tolist() == [[0, 0, 1, 1, 2]]
    assert alike_sets(keys, ALL, 2).tolist() == [[0, 0, 1, 1, 1]]
    border = torch.tensor([True, True, False, True])
    assert alike_sets(keys, border, 3).tolist() == [[0, 0, 1, 2, 2]]


def test_a_set_is_averaged_around_its_pivot_by_hand() -> None:
    """Three members at distances 0, 1 and 2 from the pivot: their mean is 1, so sigma^2 is 1/2 and
    the weights are 1, exp(-1) and exp(-4) before they are normalized."""
    keys = torch.tensor([[[5.0, 3.0], [5.0, 2.0], [5.0, 4.0], [9.0, 9.0]]])
    values = torch.tensor([[[10.0], [20.0], [30.0], [40.0]]])
    attention = torch.tensor([[0.1, 0.7, 0.7, 9.0]])
    set_of = torch.tensor([[0, 0, 0, 1]])
    found = merge_sets(keys, values, attention, set_of, 2)
    near, far = math.exp(-1), math.exp(-4)
    key = (2 + 3 * near + 4 * far) / (1 + near + far)
    value = (20 + 10 * near + 30 * far) / (1 + near + far)
    assert found.pivots.tolist() == [[1, 3]], "the earlier one of equals"
    torch.testing.assert_close(found.keys, torch.tensor([[[5.0, key], [9.0, 9.0]]]))
    torch.testing.assert_close(found.values, torch.tensor([[[value], [40.0]]]))
    torch.testing.assert_close(found.bias, torch.tensor([[math.log(3), 0.0]]))


def test_equal_keys_have_the_mean_of_their_values() -> None:
    keys, values = torch.ones(1, 3, 4), torch.tensor([[[1.0], [2.0], [6.0]]])
    found = merge_sets(keys, values, torch.zeros(1, 3), torch.zeros(1, 3, dtype=torch.int64), 1)
    assert torch.equal(found.keys, torch.ones(1, 1, 4))
    assert found.values.item() == pytest.approx(3.0)
    assert found.pivots.item() == 0


def transcribed(keys: Tensor, values: Tensor, attention: Tensor, sets: int) -> list[Tensor]:
    """The merged tokens of one head row, set by set: key, value, bias and pivot in a row each."""
    cosines = torch.cosine_similarity(keys[:-1], keys[1:], dim=-1)
    joined = set(cosines.argsort(descending=True)[: len(keys) - sets].tolist())
    members = [[0]]
    for at in range(1, len(keys)):
        if at - 1 in joined:
            members[-1].append(at)
        else:
            members.append([at])
    found = list[Tensor]()
    for some in members:
        pivot = max(some, key=lambda at: float(attention[at]))
        distances = torch.stack([(keys[at] - keys[pivot]).norm() for at in some])
        sigma = distances.mean() / math.sqrt(2)
        weights = torch.ones(1)
        if len(some) > 1:
            weights = (-(distances**2) / (2 * sigma**2)).exp()
        weights = weights / weights.sum()
        last = torch.tensor([math.log(len(some)), float(pivot)])
        found.append(torch.cat((weights @ keys[some], weights @ values[some], last)))
    return found


@pytest.mark.parametrize("sets", [1, 7, 20, 40])
def test_random_tokens_merge_as_in_the_formula_whatever_the_rotation(sets: int) -> None:
    kv_heads, tokens, dim = 3, 40, 16
    keys = torch.randn(kv_heads, tokens, dim)
    values, attention = torch.randn(kv_heads, tokens, dim), torch.rand(kv_heads, tokens)
    may_join = torch.ones(tokens - 1, dtype=torch.bool)
    set_of = alike_sets(keys, may_join, sets)
    rotation, centre = hadamard(dim), torch.randn(dim)
    plain = merge_sets(keys, values, attention, set_of, sets)
    turned = merge_sets(keys @ rotation - centre, values @ rotation, attention, set_of, sets)
    assert torch.equal(plain.pivots, turned.pivots)
    torch.testing.assert_close((turned.keys + centre) @ rotation, plain.keys)
    torch.testing.assert_close(turned.values @ rotation, plain.values)
    for head in range(kv_heads):
        expected = torch.stack(transcribed(keys[head], values[head], attention[head], sets))
        bias, pivots = plain.bias[head][:, None], plain.pivots[head][:, None].float()
        found = torch.cat((plain.keys[head], plain.values[head], bias, pivots), 1)
        torch.testing.assert_close(found, expected)
