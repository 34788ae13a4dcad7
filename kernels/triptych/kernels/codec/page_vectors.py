# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled encoding of whole pages, as ``page_codecs`` defines it."""

import numpy as np
from numba import carray

from triptych.kernels.codec.page_codecs import LEAST_DEVIATION
from triptych.kernels.codec.page_codecs import NORMALIZATIONS as TIMES
from triptych.kernels.codec.vectors import pack, quantize
from triptych.kernels.codegen.numba_runtime import (
    from_half,
    kernel,
    pointer,
    summing_kernel,
    to_half,
)

NORMALIZATIONS = np.int64(TIMES)


@kernel
def encode_keys(vectors, part, page):
    """Encode the keys [T, d] of the page at address ``page`` by channel; changes ``vectors``."""
    tokens, dim = vectors.shape
    if part.scales:
        scales = carray(pointer(page + part.scales), tokens, np.uint16)
        by_token, _ = _balance(vectors)
        for token in range(tokens):
            scales[token] = to_half(np.float32(by_token[token]))
            scale = from_half(scales[token])
            for channel in range(dim):
                vectors[token, channel] /= scale
    codes = np.empty((tokens, dim), np.uint8)
    numbers, some = np.empty(tokens, np.float32), np.empty(tokens, np.uint8)
    for channel in range(dim):
        metadata = carray(pointer(page + part.metadata + 4 * channel), 2, np.uint16)
        for token in range(tokens):
            numbers[token] = vectors[token, channel]
        quantize(numbers, some, part.bits, False, metadata)
        for token in range(tokens):
            codes[token, channel] = some[token]
    for token in range(tokens):
        pack(codes[token], part, page + part.codes + token * part.token_stride)


@kernel
def encode_values(vectors, part, page):
    """Encode the values [T, d] of the page at address ``page`` by token; changes ``vectors``."""
    tokens, dim = vectors.shape
    if part.scales:
        scales = carray(pointer(page + part.scales), dim, np.uint16)
        _, by_channel = _balance(vectors)
        for channel in range(dim):
            scales[channel] = to_half(np.float32(by_channel[channel]))
        for token in range(tokens):
            for channel in range(dim):
                vectors[token, channel] /= from_half(scales[channel])
    codes = np.empty(dim, np.uint8)
    for token in range(tokens):
        metadata = carray(pointer(page + part.metadata + 4 * token), 2, np.uint16)
        quantize(vectors[token], codes, part.bits, False, metadata)
        pack(codes, part, page + part.codes + token * part.token_stride)


@kernel
def _balance(vectors):
    """Scales of tokens and of channels, float64 [T] and [d], as ``page_codecs.balance``."""
    tokens, dim = vectors.shape
    rest = vectors.astype(np.float64)
    by_token, by_channel = np.ones(tokens), np.ones(dim)
    mean, deviation = np.empty(dim), np.empty(dim)
    for _ in range(NORMALIZATIONS // 2):
        mean[:] = 0.0
        deviation[:] = 0.0
        for token in range(tokens):
            for channel in range(dim):
                mean[channel] += rest[token, channel]
        for token in range(tokens):
            for channel in range(dim):
                apart = rest[token, channel] - mean[channel] / tokens
                deviation[channel] += apart * apart
        for channel in range(dim):
            deviation[channel] = _divisor(mean[channel] / tokens, deviation[channel] / tokens)
            by_channel[channel] *= deviation[channel]
        for token in range(tokens):
            for channel in range(dim):
                rest[token, channel] /= deviation[channel]
            size = _divisor_of(rest[token])
            by_token[token] *= size
            for channel in range(dim):
                rest[token, channel] /= size
    size = np.exp(np.log(by_token).mean())
    return by_token / size, by_channel * size


@kernel
def _divisor(mean, variance):
    """Divisor of a row: its standard deviation, but at least ``LEAST_DEVIATION`` of its size."""
    least = LEAST_DEVIATION * np.sqrt(variance + mean * mean)
    deviation = max(np.sqrt(variance), least)
    return deviation if deviation > 0 else 1.0


@kernel
def _divisor_of(numbers):
    mean = numbers.sum() / len(numbers)
    return _divisor(mean, _squares(numbers, mean) / len(numbers))


@summing_kernel
def _squares(numbers, mean):
    squares = 0.0
    for number in numbers:
        squares += (number - mean) * (number - mean)
    return squares
