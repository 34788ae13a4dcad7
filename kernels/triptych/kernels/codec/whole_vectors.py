# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Codes and round trips of vectors that fit in registers, with the bits of ``vectors``."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from triptych.kernels.codec.vectors import FP16_MAX
from triptych.kernels.codegen.numba_runtime import LANES, kernel
from triptych.kernels.codegen.simd import FLOAT, HALF, I8, I32, I64, POINTER, Emitter, vector
from triptych.kernels.floats import load_vectors

WIDE = vector(FLOAT, LANES)


@kernel
def round_whole(source, kind, target, dim, top, times):
    """Round the vector at an address to float16, then ``times`` times to what its codes decode to.

    Codes, 0 to ``top``, divide the range of the vector. Returns False, and writes nothing, for
    vectors that are not of 64 or 128 numbers, or have a NaN.
    """
    if dim == 64:
        return _round_whole(source, kind, target, 64, top, times)
    if dim == 128:
        return _round_whole(source, kind, target, 128, top, times)
    return False


@kernel
def halve_whole(source, kind, target, dim):
    """Round the vector at an address to float16, and write it; see ``round_whole``."""
    if dim == 64:
        return _halve_whole(source, kind, target, 64)
    if dim == 128:
        return _halve_whole(source, kind, target, 128)
    return False


@kernel
def quantize_whole(source, kind, codes, metadata, dim, top, limited):
    """Quantize the vector at an address to a byte of ``codes`` for each number, 0 to ``top``, and
    write scale and zero to ``metadata``; see ``round_whole``. The bits are those of ``quantize``.

    ``limited``: how many of the largest magnitudes become the next one before.
    """
    if dim == 64:
        return _quantize_whole(source, kind, codes, metadata, 64, top, limited)
    if dim == 128:
        return _quantize_whole(source, kind, codes, metadata, 128, top, limited)
    return False


@intrinsic(prefer_literal=True)
def _quantize_whole(typing_context, source, kind, codes, metadata, dim, top, limited):
    count = dim.literal_value // LANES

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        source, codes, metadata = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 3))
        numbers = load_vectors(emitter, source, arguments[1], count)
        has_nan = _has_nan(emitter, numbers)
        with builder.if_then(builder.not_(has_nan)):
            slots = [emitter.variable(part) for part in numbers]
            with builder.if_then(builder.icmp_signed(">", arguments[6], I64(0))):
                below = _below_largest(emitter, numbers, arguments[6])
                for slot, part in zip(slots, below, strict=True):
                    builder.store(part, slot)
            inside = [_limit(emitter, builder.load(slot, typ=WIDE)) for slot in slots]
            scale, zero, found = _codes(emitter, inside, arguments[5])
            for index, number in enumerate((scale, zero)):
                half = builder.fptrunc(number, HALF)
                emitter.store(half, emitter.byte(metadata, 2 * index))
            for index, part in enumerate(found):
                whole = builder.fptosi(part, vector(I32, LANES))
                place = emitter.byte(codes, LANES * index)
                emitter.store(builder.trunc(whole, vector(I8, LANES)), place)
        return builder.not_(has_nan)

    word = types.int64
    return types.boolean(word, word, word, word, dim, types.float32, word), emit


@kernel
def round_pair(key, value, kind, key_halves, value_halves, dim, key_top, value_top, times):
    """``round_whole`` of a key and of a value, whose results are written as float16.

    Neither waits for the other, as steps of a round trip do.
    """
    tops = key_top, value_top
    if dim == 64:
        return _round_pair(key, value, kind, key_halves, value_halves, 64, tops, times)
    if dim == 128:
        return _round_pair(key, value, kind, key_halves, value_halves, 128, tops, times)
    return False


@intrinsic(prefer_literal=True)
def _round_pair(typing_context, key, value, kind, key_halves, value_halves, dim, tops, times):
    count = dim.literal_value // LANES

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        sources, targets = (
            [builder.inttoptr(arguments[at], POINTER) for at in pair] for pair in ((0, 1), (3, 4))
        )
        loaded = [load_vectors(emitter, source, arguments[2], count) for source in sources]
        has_nan = _has_nan(emitter, [*loaded[0], *loaded[1]])
        with builder.if_then(builder.not_(has_nan)):
            slots = [
                [emitter.variable(_through_half(emitter, part)) for part in numbers]
                for numbers in loaded
            ]
            with emitter.loop(arguments[7]):
                before = [[builder.load(slot, typ=WIDE) for slot in own] for own in slots]
                trips = [
                    _trip(emitter, numbers, builder.extract_value(arguments[6], at))
                    for at, numbers in enumerate(before)
                ]
                for own, after in zip(slots, trips, strict=True):
                    for slot, number in zip(own, after, strict=True):
                        builder.store(number, slot)
            for own, target in zip(slots, targets, strict=True):
                for index, slot in enumerate(own):
                    half = builder.fptrunc(builder.load(slot, typ=WIDE), vector(HALF, LANES))
                    emitter.store(half, emitter.byte(target, 2 * LANES * index))
        return builder.not_(has_nan)

    word, pair = types.int64, types.UniTuple(types.float32, 2)
    return types.boolean(word, word, word, word, word, dim, pair, word), emit


@intrinsic(prefer_literal=True)
def _halve_whole(typing_context, source, kind, target, dim):
    count = dim.literal_value // LANES

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        source, target = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        numbers = load_vectors(emitter, source, arguments[1], count)
        has_nan = _has_nan(emitter, numbers)
        with builder.if_then(builder.not_(has_nan)):
            for index, part in enumerate(numbers):
                place = emitter.byte(target, 2 * LANES * index)
                emitter.store(_to_half(emitter, part), place)
        return builder.not_(has_nan)

    word = types.int64
    return types.boolean(word, word, word, dim), emit


@intrinsic(prefer_literal=True)
def _round_whole(typing_context, source, kind, target, dim, top, times):
    count = dim.literal_value // LANES

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        source, target = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2))
        numbers = load_vectors(emitter, source, arguments[1], count)
        has_nan = _has_nan(emitter, numbers)
        with builder.if_then(builder.not_(has_nan)):
            slots = [emitter.variable(_through_half(emitter, part)) for part in numbers]
            with emitter.loop(arguments[5]):
                before = [builder.load(slot, typ=numbers[0].type) for slot in slots]
                for slot, after in zip(slots, _trip(emitter, before, arguments[4]), strict=True):
                    builder.store(after, slot)
            for index, slot in enumerate(slots):
                place = emitter.byte(target, 4 * LANES * index)
                emitter.store(builder.load(slot, typ=numbers[0].type), place)
        return builder.not_(has_nan)

    word = types.int64
    return types.boolean(word, word, word, dim, types.float32, word), emit


def _has_nan(emitter, vectors):
    build = emitter.build
    found = [build.fcmp_unordered("uno", part, part) for part in vectors]
    mask = found[0]
    for other in found[1:]:
        mask = build.or_(mask, other)
    bits = build.bitcast(mask, ir.IntType(mask.type.count))
    return build.icmp_unsigned("!=", bits, bits.type(0))


def _limit(emitter, numbers):
    """Limit numbers to the range of float16."""
    most = emitter.constant(float(FP16_MAX), numbers)
    return emitter.minimum(emitter.maximum(numbers, emitter.build.fneg(most)), most)


def _below_largest(emitter, numbers, count):
    """Vectors whose ``count`` largest magnitudes become the next one; without NaN."""
    build, words = emitter.build, vector(I32, LANES)
    rest = ir.Constant(words, [0x7FFFFFFF] * LANES)
    sizes = [build.and_(build.bitcast(part, words), rest) for part in numbers]
    most = emitter.splat(_largest_after(emitter, sizes, count), LANES)
    positive = build.bitcast(most, WIDE)
    negative, zeros = build.fneg(positive), emitter.constant(0.0, positive)
    found = []
    for part, size in zip(numbers, sizes, strict=True):
        signed = build.select(build.fcmp_ordered(">", part, zeros), positive, negative)
        found.append(build.select(build.icmp_signed(">", size, most), signed, part))
    return found


def _largest_after(emitter, sizes, count):
    """The largest word after ``count`` of those in some vectors; magnitudes have the order of their
    bits, and a maximum of words takes a quarter of the time of one of floats.

    Lanes are sorted across the vectors, so that the largest word left is in the first one. Each
    step finds it, and takes it out of all lanes that begin with it.
    """
    build, rows = emitter.build, list(sizes)
    words, mask = rows[0].type, ir.IntType(LANES)
    for end in range(len(rows) - 1, 0, -1):
        for at in range(end):
            pair = rows[at], rows[at + 1]
            above = build.icmp_signed(">", *pair)
            rows[at] = build.select(above, *pair)
            rows[at + 1] = build.select(above, *reversed(pair))
    slots = [emitter.variable(row) for row in rows]
    found, taken = emitter.variable(I32(0)), emitter.variable(I64(0))
    population = emitter.declare(f"llvm.ctpop.i{LANES}", mask, (mask,))
    largest = emitter.declare(f"llvm.vector.reduce.smax.v{LANES}i32", I32, (words,))
    with emitter.loop(build.add(count, I64(1))):
        left = [build.load(slot, typ=words) for slot in slots]
        most, before = build.call(largest, [left[0]]), build.load(taken, typ=I64)
        is_early = build.icmp_signed("<=", before, count)
        build.store(build.select(is_early, most, build.load(found, typ=I32)), found)
        first = build.icmp_signed("==", left[0], emitter.splat(most, LANES))
        number = build.call(population, [build.bitcast(first, mask)])
        build.store(build.add(before, build.zext(number, I64)), taken)
        below = [*left[1:], ir.Constant(words, [-1] * LANES)]
        for slot, own, next_one in zip(slots, left, below, strict=True):
            build.store(build.select(first, next_one, own), slot)
    return build.load(found, typ=I32)


def _to_half(emitter, numbers):
    """Round to float16; beyond its range to its largest numbers."""
    return emitter.build.fptrunc(_limit(emitter, numbers), vector(HALF, LANES))


def _through_half(emitter, numbers):
    return emitter.build.fpext(_to_half(emitter, numbers), numbers.type)


def _divided(emitter, number, divisor, inverse):
    """The correctly rounded quotient, given the correctly rounded inverse of the divisor.

    Source: Markstein, Computation of elementary functions on the IBM RISC System/6000 (1990)
    """
    near = emitter.build.fmul(number, inverse)
    rest = emitter.fma(emitter.build.fneg(near), divisor, number)
    return emitter.fma(rest, inverse, near)


def _half_scalar(build, number):
    return build.fpext(build.fptrunc(number, HALF), FLOAT)


def _trip(emitter, numbers, top):
    """Quantize vectors that share a range, and decode the codes again, to float16."""
    build = emitter.build
    scale, zero, codes = _codes(emitter, numbers, top)
    step, zeros = emitter.splat(scale, LANES), emitter.splat(zero, LANES)
    decoded = (build.fadd(build.fmul(code, step), zeros) for code in codes)
    return [_through_half(emitter, number) for number in decoded]


def _codes(emitter, numbers, top):
    """Scale, zero and codes of vectors that share a range, as float32; without one, 1 and 0."""
    build = emitter.build
    lowest, highest = numbers[0], numbers[0]
    for part in numbers[1:]:
        lowest, highest = emitter.minimum(lowest, part), emitter.maximum(highest, part)
    low, high = emitter.smallest(lowest), emitter.largest(highest)
    scale = _half_scalar(build, build.fdiv(build.fsub(high, low), top))
    zero = _half_scalar(build, low)
    is_range = build.and_(
        build.fcmp_ordered(">", scale, FLOAT(0.0)),
        build.fcmp_ordered("<", scale, FLOAT(float("inf"))),
    )
    scale = build.select(is_range, scale, FLOAT(1.0))
    step = emitter.splat(scale, LANES)
    inverse = emitter.splat(build.fdiv(FLOAT(1.0), scale), LANES)
    most = emitter.splat(build.select(is_range, top, FLOAT(0.0)), LANES)
    zeros = emitter.splat(zero, LANES)
    nearest = emitter.declare(f"llvm.rint.v{LANES}f32", numbers[0].type, (numbers[0].type,))
    codes = []
    for part in numbers:
        quotient = _divided(emitter, build.fsub(part, zeros), step, inverse)
        code = build.call(nearest, [quotient])
        codes.append(emitter.minimum(emitter.maximum(code, emitter.constant(0.0, code)), most))
    return scale, zero, codes
