# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled conversions of float32 to float8 (e4m3) and back, as torch rounds them."""

import numpy as np

from triptych.kernels.codegen.numba_runtime import (
    bits_of_float,
    float_of_bits,
    from_half,
    inlined,
)

SMALLEST_NORMAL = np.float32(2.0**-6)


@inlined
def to_float8(number):
    """Round a float32 of at most 448 to float8, ties to even; returns the byte."""
    bits = np.uint32(bits_of_float(number))
    sign, size = (bits >> np.uint32(24)) & np.uint32(0x80), bits & np.uint32(0x7FFFFFFF)
    if abs(number) < SMALLEST_NORMAL:
        steps = np.uint32(np.rint(abs(number) * np.float32(512.0)))
        return np.uint8(sign | steps)
    odd = (size >> np.uint32(20)) & np.uint32(1)
    rounded = (size + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    return np.uint8(sign | (rounded - np.uint32(120 << 3)))


@inlined
def power_above(number):
    """The least power of two that is not below a positive float32."""
    bits = np.uint32(bits_of_float(number)) + np.uint32(0x7FFFFF)
    return float_of_bits(np.int32(bits & np.uint32(0x7F800000)))


@inlined
def from_float8(byte):
    """The float32 of a float8 number.

    With exponent and mantissa in the place of those of a float16, which has a bias of 15 instead
    of 7, a number is 2**-8 times itself. NaN becomes 480.
    """
    sign, rest = np.uint16(byte & 0x80) << np.uint16(8), np.uint16(byte & 0x7F) << np.uint16(7)
    return from_half(np.uint16(sign | rest)) * np.float32(256.0)
