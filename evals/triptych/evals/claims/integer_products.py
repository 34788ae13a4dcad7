# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# torch leaves Tensor.unflatten and others untyped in part.
"""KL divergence of attention weights and next tokens when query-key products are of integers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.evals.claims.draw import Draw
from triptych.evals.methods.masked_attention import by_kv_head, check_plain, ungrouped
from triptych.kernels.codec.quantizer import Encoded, encode
from triptych.kernels.decode.byte_products import byte_logits
from triptych.kernels.hadamard import hadamard
from triptych.workers.models.attention_interface import Attend, LayerTraits

BITS = ((8, 4), (4, 2))
"""Bits of keys and values: of K8V4 and of K4V2."""
DIGITS = (1, 2, 3)
"""Digits of a query: of bytes alone, which no kernel has, of 16-bit and of float32 queries."""


@dataclass(frozen=True)
class LayerCodes:
    """Keys and values of a layer as pages hold them."""

    keys: Encoded
    values: Tensor
    """Decoded: [KH, tokens, d] float32."""


class CodedAttention(Attend):
    """Dense causal attention over rotated keys and values in codes.

    ``bits``: of keys and of values. ``digits``: those of a query in products of integers; 0:
    products of float64. ``stored``: the codes of each layer, which are read if they are there and
    otherwise written: as pages, they are the same however queries are multiplied. Codes of other
    hidden states would be rounded otherwise here and there, which costs more than what is
    measured.
    """

    def __init__(self, bits: tuple[int, int], digits: int, stored: dict[int, LayerCodes]) -> None:
        self.bits, self.digits, self.stored = bits, digits, stored
        self.weights_kl = list[Tensor]()
        """KL divergence from the weights of float64 products, by layer: [H, n] float64."""

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        traits: LayerTraits,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Raises: ModelError for sliding windows or softcaps"""
        check_plain(layer, traits, sinks)
        tokens, kv_heads, dim = key.shape
        rotation = hadamard(dim)
        if layer not in self.stored:
            self.stored[layer] = self._encode(key, value, rotation)
        coded = self.stored[layer].keys
        codes = coded.codes.view(kv_heads, 1, tokens, dim)
        scale, zero = coded.metadata.view(kv_heads, 1, tokens, 2).unbind(-1)
        grouped = by_kv_head(query.float(), kv_heads) @ rotation
        hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        decoded = codes.double() * scale.double()[..., None] + zero.double()[..., None]
        logits = grouped.double() @ decoded.mT * traits.scale
        exact = logits.masked_fill(hidden, float("-inf")).log_softmax(-1)
        used = exact
        if self.digits:
            products = byte_logits(grouped, codes, scale, zero, self.digits).double()
            used = (products * traits.scale).masked_fill(hidden, float("-inf")).log_softmax(-1)
            apart = (exact.exp() * (exact - used)).masked_fill(hidden, 0.0)
            self.weights_kl.append(apart.sum(-1).flatten(0, 1))
        return ungrouped(used.exp().float() @ self.stored[layer].values[:, None])

    def _encode(self, key: Tensor, value: Tensor, rotation: Tensor) -> LayerCodes:
        """Codes of each token, by a scale and a zero of its own."""
        dim = key.shape[-1]
        keys, values = (one.float().transpose(0, 1) @ rotation for one in (key, value))
        key_bits, value_bits = self.bits
        coded = encode(values.reshape(-1, dim), value_bits, 1)
        scale, zero = coded.metadata.float().view(-1, 2).T[..., None]
        decoded = (coded.codes.float() * scale + zero).view(values.shape)
        # The rotation is orthogonal.
        return LayerCodes(encode(keys.reshape(-1, dim), key_bits, 1), decoded @ rotation.T)


def integer_products(draw: Draw) -> Mapping[str, float]:
    """KL divergence of attention weights and of next tokens from those of exact products.

    Keys and values with a scale for each token, in the bits of K8V4 and of K4V2; queries of one
    digit to the base 254 (7 bits of the largest number), of two and of three. Only the products
    differ.

    Source: SageAttention (products of integers in attention); digits are ours
    """
    found = dict[str, float]()
    for bits in BITS:
        weights = {digits: list[Tensor]() for digits in DIGITS}
        tokens = {digits: list[Tensor]() for digits in DIGITS}
        for text in draw.texts:
            ids = (*text.context, *text.continuation)
            stored = dict[int, LayerCodes]()
            exact = _log_probabilities(draw, ids, CodedAttention(bits, 0, stored))
            for digits in DIGITS:
                coded = CodedAttention(bits, digits, stored)
                mine = _log_probabilities(draw, ids, coded)
                weights[digits].append(torch.stack(coded.weights_kl))
                tokens[digits].append((exact.exp() * (exact - mine)).sum(-1))
        for digits in DIGITS:
            name = f"K{bits[0]}V{bits[1]}, {digits} digits"
            found[f"{name}: KL of weights, mean"] = float(torch.stack(weights[digits]).mean())
            found[f"{name}: KL of weights, largest"] = float(torch.stack(weights[digits]).max())
            found[f"{name}: KL of next tokens, mean"] = float(torch.stack(tokens[digits]).mean())
            found[f"{name}: KL of next tokens, largest"] = float(torch.stack(tokens[digits]).max())
    return found


def _log_probabilities(draw: Draw, ids: tuple[int, ...], attend: Attend) -> Tensor:
    """Of the tokens behind the context: [continuation, vocab] float64."""
    places = torch.arange(len(ids))
    with torch.inference_mode():
        network = draw.model.loaded.network
        logits = network(torch.tensor(ids), places, attend, places[draw.context :])
    return logits.double().log_softmax(-1)
