# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.argmin and others untyped in part.
"""AQUA-KV: keys and values are predicted from the layer before, and the rest is quantized."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Rounding = Callable[[int, Tensor], Tensor]
"""A round trip of the vectors [KH, n, d] of a layer through codes."""


@dataclass(frozen=True)
class LayerPredictors:
    """Linear maps with a constant: of all KV heads of one layer to those of the next."""

    keys: Tensor
    """[L - 1, KH d + 1, KH d]: keys before RoPE from those of the layer before."""
    values: Tensor
    """[L - 1, 2 KH d + 1, KH d]: values from those of the layer before and from keys."""

    def replace(
        self, keys: Tensor, values: Tensor, round_keys: Rounding, round_values: Rounding
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they are decoded: predictions from decoded ones, plus rounded rests.

        Layer 0 has no prediction.

        Shapes:  keys, values [L, KH, n, d]; keys before RoPE
        """
        found_keys = [round_keys(0, keys[0])]
        found_values = [round_values(0, values[0])]
        for layer in range(1, len(keys)):
            shape = keys[layer].shape
            guess = heads_of(rows_of(found_keys[-1]) @ self.keys[layer - 1], shape)
            found_keys.append(guess + round_keys(layer, keys[layer] - guess))
            both = torch.cat((rows_of(found_values[-1])[:, :-1], rows_of(found_keys[-1])), -1)
            guess = heads_of(both @ self.values[layer - 1], shape)
            found_values.append(guess + round_values(layer, values[layer] - guess))
        return torch.stack(found_keys), torch.stack(found_values)


def fit_predictors(keys: Tensor, values: Tensor, ridge: float = 1e-3) -> LayerPredictors:
    """Least squares, one regression for the keys and one for the values of each layer.

    Shapes:  keys, values [L, KH, n, d]; keys before RoPE
    Source:  AQUA-KV (linear predictors between layers, fitted by one regression)
    """
    of_keys, of_values = list[Tensor](), list[Tensor]()
    for layer in range(1, len(keys)):
        inputs = rows_of(keys[layer - 1])
        of_keys.append(_regression(inputs, rows_of(keys[layer])[:, :-1], ridge))
        both = torch.cat((rows_of(values[layer - 1])[:, :-1], rows_of(keys[layer])), -1)
        of_values.append(_regression(both, rows_of(values[layer])[:, :-1], ridge))
    return LayerPredictors(torch.stack(of_keys), torch.stack(of_values))


def rows_of(vectors: Tensor) -> Tensor:
    """The vectors of all heads of a token in a row, and a one: [KH, n, d] -> [n, KH d + 1]."""
    rows = vectors.transpose(0, 1).flatten(1)
    return torch.cat((rows, torch.ones(len(rows), 1)), -1)


def heads_of(rows: Tensor, shape: torch.Size) -> Tensor:
    """[n, KH d] -> [KH, n, d]"""
    return rows.view(shape[1], shape[0], shape[2]).transpose(0, 1)


def _regression(inputs: Tensor, outputs: Tensor, ridge: float) -> Tensor:
    x, y = inputs.double(), outputs.double()
    gram = x.mT @ x
    level = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + level, x.mT @ y).float()
