# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled encode, decode and recode of one vector of a page, as ``quantizer`` defines them."""

from collections import namedtuple

import numpy as np
from numba import carray

from triptych.kernels.codec.float8 import from_float8, power_above, to_float8
from triptych.kernels.codec.quantizer import (
    COPY,
    COSINES,
    LEAST_NUMBER,
    NARROW,
    NORMAL_STEPS,
    TANGENTS,
    TOP_RADIUS,
)
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    from_half,
    inlined,
    kernel,
    largest_of,
    pointer,
    smallest_of,
    to_half,
)
from triptych.kernels.floats import nth_largest

FP16_MAX = np.float32(65504.0)
FLOAT8_MAX = np.float32(448.0)
LEAST_SCALE = np.float32(2.0**-24)
LEAST_STEP = np.float32(LEAST_NUMBER)

Part = namedtuple(
    "Part",
    "codes byte_stride token_stride metadata bits groups kind scales limited segments tokens",
)
"""Layout of the keys or the values of a page: offsets and strides in bytes.

``kind``: what codes are. ``scales``: offset of the scales of the axis that has no zeros, in
balanced formats: of tokens for keys, of channels for values; 0: there are none. ``limited``: how
many of the largest magnitudes of a vector become the next one. ``segments``: a byte for each
segment of a key, bits and 16 times the sixteenths of the channels, the first one lowest.
``tokens``: how many a page has.
"""
PART_WORDS = len(Part._fields)

RANGE, FLOAT8, BY_CHANNEL, BY_NORM, SEGMENTS, POLAR = range(6)
"""Codes divide the range of a token's vector, are float8 numbers, divide the range of a channel in
a page, are steps by the norm of a vector, or by that of each segment, or are radius and angle of a
pair of channels."""
STEPS_OF_1, STEPS_OF_2, STEPS_OF_4 = (np.float32(NORMAL_STEPS[bits]) for bits in (1, 2, 4))
POLAR_COSINES = np.array(COSINES, np.float32)
POLAR_TANGENTS = np.array(TANGENTS, np.float32)


@kernel
def part_of(words):
    return Part(
        words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7], words[8],
        words[9], words[10],
    )  # fmt: skip


@inlined
def encode(numbers, part, page, row, codes):
    """Quantize a float32 vector into row ``row`` of the page at address ``page``.

    ``codes``: scratch memory, one uint8 per channel. Formats that limit numbers change ``numbers``.
    """
    at = page + part.codes + row * part.token_stride
    if part.bits == 16:
        halves = carray(pointer(at), len(numbers), np.uint16)
        for channel in range(len(numbers)):
            halves[channel] = to_half(_saturate(numbers[channel]))
        return
    if part.kind == SEGMENTS:
        _encode_segments(numbers, part, page, row, codes)
        return
    if part.kind == POLAR:
        _quantize_pairs(numbers, codes, _metadata(part, page, row, 0))
        pack(codes, part, at)
        return
    if part.limited:
        _limit(numbers, part.limited)
    width = len(numbers) // part.groups
    for group in range(part.groups):
        inside = slice(group * width, (group + 1) * width)
        metadata = _metadata(part, page, row, group)
        if part.kind == BY_NORM:
            scale = quantize_by_norm(numbers[inside], codes[inside], part.bits)
            metadata[0] = to_half(np.float32(2.0) * scale)
            metadata[1] = to_half(_saturate(np.float32(1 - (1 << part.bits)) * scale))
            continue
        quantize(numbers[inside], codes[inside], part.bits, part.kind == FLOAT8, metadata)
    pack(codes, part, at)


@inlined
def decode(part, page, row, codes, numbers):
    """Decode row ``row`` of the page at address ``page`` into ``numbers``, a float32 vector."""
    at = page + part.codes + row * part.token_stride
    if part.bits == 16:
        halves = carray(pointer(at), len(numbers), np.uint16)
        for channel in range(len(numbers)):
            numbers[channel] = from_half(halves[channel])
        return
    if part.kind == SEGMENTS:
        _decode_segments(part, page, row, codes, numbers)
        return
    unpack(part, at, codes)
    if part.kind == BY_CHANNEL:
        _decode_by_channel(part, page, row, codes, numbers)
        return
    if part.kind == POLAR:
        _decode_pairs(codes, from_half(_metadata(part, page, row, 0)[0]), numbers)
        return
    width = len(numbers) // part.groups
    for group in range(part.groups):
        metadata = _metadata(part, page, row, group)
        scale, zero = from_half(metadata[0]), from_half(metadata[1])
        inside = slice(group * width, (group + 1) * width)
        _numbers_of(codes[inside], part.kind == FLOAT8, scale, zero, numbers[inside])
    if part.scales:
        scales = carray(pointer(page + part.scales), len(numbers), np.uint16)
        for channel in range(len(numbers)):
            numbers[channel] *= from_half(scales[channel])


@inlined
def _decode_by_channel(part, page, row, codes, numbers):
    metadata = carray(pointer(page + part.metadata), (len(numbers), 2), np.uint16)
    for channel in range(len(numbers)):
        scale, zero = from_half(metadata[channel, 0]), from_half(metadata[channel, 1])
        numbers[channel] = np.float32(codes[channel]) * scale + zero
    if part.scales:
        scale = from_half(carray(pointer(page + part.scales + 2 * row), 1, np.uint16)[0])
        for channel in range(len(numbers)):
            numbers[channel] *= scale


@kernel
def _decode_pairs(codes, step, numbers):
    """Numbers of the codes of pairs, as ``quantizer.polar_numbers``, times the step."""
    pairs = len(codes) // 2
    for pair in range(pairs):
        low, high = codes[pair], codes[pairs + pair]
        radius, eighth = np.float32(low & 7), (low >> 3) | ((high & 3) << 1)
        left, right = radius * POLAR_COSINES[eighth], radius * POLAR_COSINES[7 - eighth]
        numbers[pair] = (-left if high & 4 else left) * step
        numbers[pairs + pair] = (-right if high & 8 else right) * step


@inlined
def _encode_segments(numbers, part, page, row, codes):
    """Quantize and pack each segment of a key, and write its scale."""
    at, channel, index = page + part.codes + row * part.token_stride, 0, 0
    left = part.segments
    while left:
        bits, channels = left & 15, ((left >> 4) & 15) * len(numbers) // 16
        inside = slice(channel, channel + channels)
        scale = carray(
            pointer(page + part.metadata + 2 * (index * part.tokens + row)), 1, np.uint16
        )
        scale[0] = to_half(quantize_by_norm(numbers[inside], codes[inside], bits))
        _pack(codes[inside], bits, part.byte_stride, at)
        at += channels * bits // 8 * part.byte_stride
        channel, index, left = channel + channels, index + 1, left >> 8


@inlined
def _decode_segments(part, page, row, codes, numbers):
    at, first, index = page + part.codes + row * part.token_stride, 0, 0
    left = part.segments
    while left:
        bits, channels = left & 15, ((left >> 4) & 15) * len(numbers) // 16
        halves = carray(
            pointer(page + part.metadata + 2 * (index * part.tokens + row)), 1, np.uint16
        )
        scale, top = from_half(halves[0]), np.float32((1 << bits) - 1)
        _unpack(codes[first : first + channels], bits, part.byte_stride, at)
        for channel in range(first, first + channels):
            odd = np.float32(2.0) * np.float32(codes[channel]) - top
            numbers[channel] = odd * scale
        at += channels * bits // 8 * part.byte_stride
        first, index, left = first + channels, index + 1, left >> 8


@kernel
def quantize_by_norm(numbers, codes, bits):
    """Codes of a vector, and its scale as float16, as ``quantizer.encode_by_norm`` has them."""
    total = np.float64(0.0)
    for channel in range(len(numbers)):
        number = np.float64(_saturate(numbers[channel]))
        total += number * number
    norm, top = np.float32(np.sqrt(total)), np.float32((1 << bits) - 1)
    unit = STEPS_OF_1 if bits == 1 else (STEPS_OF_2 if bits == 2 else STEPS_OF_4)
    share = np.float32(np.float64(unit) / np.sqrt(np.float64(len(numbers))))
    step, half = max(norm * share, LEAST_STEP), np.float32(1 << (bits - 1))
    squares = np.float32(0.0)
    for channel in range(len(numbers)):
        code = np.floor(_saturate(numbers[channel]) / step) + half
        code = min(max(code, np.float32(0.0)), top)
        odd = np.float32(2.0) * code - top
        squares += odd * odd
        codes[channel] = np.uint8(np.int32(code))
    return from_half(to_half(norm / np.sqrt(squares)))


@inlined
def _numbers_of(codes, is_float, scale, zero, numbers):
    """Numbers of the codes of a group; a loop for each kind, so that both vectorize."""
    if is_float:
        for channel in range(len(codes)):
            numbers[channel] = from_float8(codes[channel]) * scale + zero
    else:
        for channel in range(len(codes)):
            numbers[channel] = np.float32(codes[channel]) * scale + zero


@inlined
def recode(conversion, source, read_page, read_row, target, write_page, write_row, codes, numbers):
    """Copy, narrow or requantize one vector of a slot into a slot of another format."""
    if conversion == COPY:
        _copy(source, read_page, read_row, target, write_page, write_row, len(numbers))
    elif conversion == NARROW:
        unpack(source, read_page + source.codes + read_row * source.token_stride, codes)
        ratio = np.uint32(((1 << source.bits) - 1) // ((1 << target.bits) - 1))
        # A multiplication and a shift divide codes up to 255 exactly, and can be vectorized.
        half, inverse = ratio // np.uint32(2), np.uint32(65536) // ratio + np.uint32(1)
        for channel in range(len(codes)):
            codes[channel] = np.uint8(
                ((np.uint32(codes[channel]) + half) * inverse) >> np.uint32(16)
            )
        pack(codes, target, write_page + target.codes + write_row * target.token_stride)
        for group in range(source.groups):
            old = _metadata(source, read_page, read_row, group)
            new = _metadata(target, write_page, write_row, group)
            new[0] = to_half(from_half(old[0]) * np.float32(ratio))
            new[1] = old[1]
    else:
        decode(source, read_page, read_row, codes, numbers)
        encode(numbers, target, write_page, write_row, codes)


@inlined
def round_vector(numbers, codes, metadata, bits, groups, is_float, times):
    """Round a vector to float16 in place, then ``times`` times to what its codes decode to.

    ``codes``, ``metadata``: scratch memory, one uint8 per channel and two uint16.
    """
    for channel in range(len(numbers)):
        numbers[channel] = from_half(to_half(_saturate(numbers[channel])))
    if bits == 16:
        return
    width = len(numbers) // groups
    for _ in range(times):
        for group in range(groups):
            inside = slice(group * width, (group + 1) * width)
            quantize(numbers[inside], codes[inside], bits, is_float, metadata)
            scale, zero = from_half(metadata[0]), from_half(metadata[1])
            _numbers_of(codes[inside], is_float, scale, zero, numbers[inside])
            for channel in range(group * width, (group + 1) * width):
                numbers[channel] = from_half(to_half(_saturate(numbers[channel])))


@inlined
def pack(codes, part, at):
    """Pack codes to bytes at address ``at``, ``part.byte_stride`` bytes apart."""
    _pack(codes, part.bits, part.byte_stride, at)


@inlined
def _pack(codes, bits, stride, at):
    count = len(codes) * bits // 8
    packed = carray(pointer(at), count * stride, np.uint8)
    if bits == 8:
        for index in range(count):
            packed[index * stride] = codes[index]
    elif bits == 4:
        for index in range(count):
            packed[index * stride] = codes[index] | (codes[count + index] << 4)
    elif bits == 2:
        for index in range(count):
            packed[index * stride] = (
                codes[index]
                | (codes[count + index] << 2)
                | (codes[2 * count + index] << 4)
                | (codes[3 * count + index] << 6)
            )
    else:
        for index in range(count):
            byte = np.uint8(0)
            for share in range(8):
                byte |= codes[share * count + index] << share
            packed[index * stride] = byte


@inlined
def unpack(part, at, codes):
    """Unpack bytes at address ``at`` to codes; the inverse of ``pack``."""
    _unpack(codes, part.bits, part.byte_stride, at)


@inlined
def _unpack(codes, bits, stride, at):
    count = len(codes) * bits // 8
    packed = carray(pointer(at), count * stride, np.uint8)
    mask = np.uint8((1 << bits) - 1)
    for share in range(8 // bits):
        shift = share * bits
        for index in range(count):
            codes[share * count + index] = (packed[index * stride] >> shift) & mask


@inlined
def _copy(source, read_page, read_row, target, write_page, write_row, channels):
    count = channels * source.bits // 8
    read = read_page + source.codes + read_row * source.token_stride
    write = write_page + target.codes + write_row * target.token_stride
    old = carray(pointer(read), count * source.byte_stride, np.uint8)
    new = carray(pointer(write), count * target.byte_stride, np.uint8)
    if source.byte_stride == target.byte_stride == 1:
        for index in range(count):
            new[index] = old[index]
    else:
        for index in range(count):
            new[index * target.byte_stride] = old[index * source.byte_stride]
    left, index = source.segments, 0
    while left:
        at = 2 * (index * source.tokens + read_row)
        to = 2 * (index * target.tokens + write_row)
        scale = carray(pointer(write_page + target.metadata + to), 1, np.uint16)
        scale[0] = carray(pointer(read_page + source.metadata + at), 1, np.uint16)[0]
        left, index = left >> 8, index + 1
    for group in range(source.groups):
        metadata = _metadata(target, write_page, write_row, group)
        old_metadata = _metadata(source, read_page, read_row, group)
        metadata[0], metadata[1] = old_metadata[0], old_metadata[1]


@inlined
def _metadata(part, page, row, group):
    """Scale and zero of one group, a view as uint16 bits."""
    return carray(pointer(page + part.metadata + 4 * (row * part.groups + group)), 2, np.uint16)


@kernel
def _limit(numbers, count):
    """Set the ``count`` largest magnitudes to the next one, as ``quantizer.limit``."""
    sizes = np.empty(len(numbers), np.float32)
    for channel in range(len(numbers)):
        sizes[channel] = abs(numbers[channel])
    most = nth_largest(sizes, count + 1)
    for channel in range(len(numbers)):
        if abs(numbers[channel]) > most:
            numbers[channel] = most if numbers[channel] > 0 else -most


@kernel
def quantize(numbers, codes, bits, is_float, metadata):
    """Codes, scale and zero of a group, as ``quantizer.encode`` or ``encode_floats`` has them."""
    if is_float:
        _quantize_floats(numbers, codes, metadata)
        return
    low, high = _range(numbers)
    low, high = _saturate(low), _saturate(high)
    top = np.float32((1 << bits) - 1)  # 2**bits would be a loop
    metadata[0], metadata[1] = to_half((high - low) / top), to_half(low)
    scale, zero = from_half(metadata[0]), from_half(metadata[1])
    if not (scale > 0 and np.isfinite(scale)):
        metadata[0] = to_half(np.float32(1.0))
        codes[:] = 0
        return
    for channel in range(len(numbers)):
        step = np.rint((_saturate(numbers[channel]) - zero) / scale)
        # To int32 first: a conversion of floats to bytes goes by way of int64.
        codes[channel] = np.uint8(np.int32(min(max(step, np.float32(0.0)), top)))


@kernel
def _quantize_pairs(numbers, codes, metadata):
    """Codes and step of the pairs of a vector, as ``quantizer.encode_polar`` has them."""
    pairs, largest = len(numbers) // 2, np.float32(0.0)
    for channel in range(len(numbers)):
        numbers[channel] = from_half(to_half(_saturate(numbers[channel])))
    for pair in range(pairs):
        left, right = numbers[pair], numbers[pairs + pair]
        largest = max(largest, left * left + right * right)
    metadata[0] = to_half(np.sqrt(largest) / np.float32(TOP_RADIUS))
    metadata[1] = np.uint16(0)
    step = from_half(metadata[0])
    if not step > 0:
        metadata[0] = to_half(np.float32(1.0))
        codes[:] = 0
        return
    for pair in range(pairs):
        left, right = numbers[pair], numbers[pairs + pair]
        radius = np.rint(np.sqrt(left * left + right * right) / step)
        code = np.int32(min(max(radius, np.float32(0.0)), np.float32(TOP_RADIUS)))
        eighth = np.int32(0)
        for border in range(len(POLAR_TANGENTS)):
            eighth += abs(right) > abs(left) * POLAR_TANGENTS[border]
        code |= (eighth << 3) | (np.int32(left < 0) << 6) | (np.int32(right < 0) << 7)
        codes[pair], codes[pairs + pair] = np.uint8(code & 15), np.uint8(code >> 4)


@kernel
def _quantize_floats(numbers, codes, metadata):
    low, high = _range(numbers)
    low, high = _saturate(low), _saturate(high)
    largest = max(-low, high)
    metadata[0], metadata[1] = to_half(np.float32(1.0)), np.uint16(0)
    if not largest > 0:
        codes[:] = 0
        return
    metadata[0] = to_half(max(power_above(largest / FLOAT8_MAX), LEAST_SCALE))
    scale = from_half(metadata[0])
    for channel in range(len(numbers)):
        step = _saturate(numbers[channel]) / scale
        codes[channel] = to_float8(min(max(step, -FLOAT8_MAX), FLOAT8_MAX))


@kernel
def _range(numbers):
    """The smallest and the largest number of a vector; NaN if the first one is."""
    low = high = numbers[0]
    whole = len(numbers) // LANES if low == low else 0
    if whole:
        low = smallest_of(numbers.ctypes.data, whole)
        high = largest_of(numbers.ctypes.data, whole)
    for channel in range(whole * LANES, len(numbers)):
        number = numbers[channel]
        low = number if number < low else low
        high = number if number > high else high
    return low, high


@inlined
def _saturate(number):
    return min(max(number, -FP16_MAX), FP16_MAX)
