"""Reference quantizers of formats whose pages are encoded whole: those of KIVI and of KVarN."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triptych.core.layout import PageFormat
from triptych.kernels.codec.quantizer import FP16_MAX, Encoded, decode, encode

NORMALIZATIONS = 16
"""Divisions by the deviation of channels and of tokens, in turns. Source: KVarN"""
LEAST_DEVIATION = 1 / 64
"""Least deviation that a row is divided by, as a part of its root mean square. Without it scales
of a page whose tokens are all alike, as in an answer that repeats one, exceed float16."""


@dataclass(frozen=True, slots=True)
class EncodedPages:
    """Keys and values of n pages of T tokens before packing."""

    key_codes: Tensor
    """uint8 [n, T, d]."""
    key_metadata: Tensor
    """float16 [n, d, 2]: scale and zero of each channel."""
    token_scales: Tensor
    """float16 [n, T]: of keys; ones unless the format is balanced."""
    value_codes: Tensor
    """uint8 [n, T, d]."""
    value_metadata: Tensor
    """float16 [n, T, 2]: scale and zero of each token."""
    channel_scales: Tensor
    """float16 [n, d]: of values; ones unless the format is balanced."""


def encode_pages(key: Tensor, value: Tensor, form: PageFormat) -> EncodedPages:
    """Quantize the keys of each page by channel, and the values by token.

    Balanced formats divide keys by a scale for each token first, and values by one for each
    channel, as ``balance`` finds them. The other scale that it finds, of the axis along which
    scales and zeros are, would change nothing.

    Shapes:  key, value [n, T, d]
    Promise: a key differs by at most half a step of its channel, a value by half a step of its
             token, times the scale of the other axis, and roundings of float16
    Source:  KIVI (keys by channel, values by token); KVarN (scales of both axes)
    """
    key, value = (vectors.float().clamp(-FP16_MAX, FP16_MAX) for vectors in (key, value))
    pages, tokens, dim = key.shape
    token_scales = key.new_ones(pages, tokens, dtype=torch.float16)
    channel_scales = key.new_ones(pages, dim, dtype=torch.float16)
    if form.is_balanced:
        token_scales = balance(key)[0].half()
        channel_scales = balance(value)[1].half()
        key = key / token_scales.float()[..., None]
        value = value / channel_scales.float()[:, None]
    keys = encode(key.transpose(1, 2).flatten(0, 1), form.key_bits, 1)
    values = encode(value.flatten(0, 1), form.value_bits, 1)
    return EncodedPages(
        keys.codes.view(pages, dim, tokens).transpose(1, 2),
        keys.metadata.view(pages, dim, 2),
        token_scales,
        values.codes.view(pages, tokens, dim),
        values.metadata.view(pages, tokens, 2),
        channel_scales,
    )


def decode_pages(encoded: EncodedPages) -> tuple[Tensor, Tensor]:
    """Keys ``r_t (S_c code + Z_c)`` and values ``c_c (s_t code + z_t)``, float32 [n, T, d]."""
    pages, tokens, dim = encoded.key_codes.shape
    codes = encoded.key_codes.transpose(1, 2).flatten(0, 1)
    keys = decode(Encoded(codes, encoded.key_metadata.view(-1, 1, 2)))
    keys = keys.view(pages, dim, tokens).transpose(1, 2)
    codes = encoded.value_codes.flatten(0, 1)
    values = decode(Encoded(codes, encoded.value_metadata.reshape(-1, 1, 2)))
    return (
        keys * encoded.token_scales.float()[..., None],
        values.view(pages, tokens, dim) * encoded.channel_scales.float()[:, None],
    )


def balance(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Scales r_t and c_c by which x_tc / (r_t c_c) has about the same deviation along both axes.

    Sinkhorn's iteration: channels are divided by their standard deviation over the tokens, then
    tokens by theirs over the channels, and so on. A row of zeros is left as it is. The geometric
    mean of the r_t is 1, so that numbers keep their size.

    Shapes:  vectors [n, T, d] -> r float64 [n, T], c float64 [n, d]
    Source:  KVarN (variance normalization of both axes, 16 times, in logarithms)
    """
    rest = vectors.double()
    token = rest.new_ones(len(rest), rest.shape[1], 1)
    channel = rest.new_ones(len(rest), 1, rest.shape[2])
    for step in range(NORMALIZATIONS):
        by_channel = step % 2 == 0
        axis = 1 if by_channel else 2
        size = rest.square().mean(axis, keepdim=True).sqrt()
        deviation = rest.std(axis, correction=0, keepdim=True).maximum(LEAST_DEVIATION * size)
        deviation = torch.where(deviation > 0, deviation, 1.0)
        rest = rest / deviation
        if by_channel:
            channel = channel * deviation
        else:
            token = token * deviation
    typical = token.log().mean(1, keepdim=True).exp()
    return (token / typical).squeeze(2), (channel * typical).squeeze(1)
