# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""An emitter of float vector code as LLVM IR, with the operations that page kernels need."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir

from triptych.core.layout import Codec
from triptych.kernels.codec.quantizer import COSINES
from triptych.kernels.codegen.native import multiplies_bfloat, vector_lanes

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
HALF, FLOAT, POINTER = ir.HalfType(), ir.FloatType(), ir.PointerType()
Value = Any
"""A value of LLVM IR; llvmlite has no more precise type."""


class _BFloat(ir.Type):
    """LLVM's bfloat, for which llvmlite has no class."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()

EXP2 = (  # minimax for 2**x - 1 over x in [-1/2, 1/2], highest power first; Cephes, exp2f
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)

SHIFT = 1.5 * 2**23
"""Adding and subtracting it rounds a float32 to the nearest integer, ties to even."""


LANES = 16
"""Of vectors of floats; on most processors they are several registers."""


def vector(element: ir.Type, lanes: int) -> Any:
    return ir.VectorType(element, lanes)


class Emitter:
    """Emits operations on float vectors into an ``IRBuilder``; all pointers are byte pointers."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.build: Any = builder

    def byte(self, pointer: Value, offset: Value | int) -> Value:
        """The address ``offset`` bytes after ``pointer``."""
        index = I64(offset) if isinstance(offset, int) else offset
        return self.build.gep(pointer, [index], source_etype=I8)

    def load(self, pointer: Value, kind: ir.Type) -> Value:
        return self.build.load(pointer, typ=kind, align=1)

    def store(self, value: Value, pointer: Value) -> None:
        self.build.store(value, pointer, align=1)

    def constant(self, number: float, like: Value) -> Value:
        """A constant of the type of ``like`` with ``number`` in all lanes."""
        kind = like.type
        if isinstance(kind, ir.VectorType):
            return ir.Constant(kind, [number] * kind.count)
        return ir.Constant(kind, number)

    def splat(self, scalar: Value, lanes: int) -> Value:
        kind = vector(scalar.type, lanes)
        first = self.build.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        order = ir.Constant(vector(I32, lanes), [0] * lanes)
        return self.build.shuffle_vector(first, ir.Constant(kind, ir.Undefined), order)

    def fma(self, left: Value, right: Value, plus: Value) -> Value:
        kinds = (left.type, left.type, left.type)
        return self.build.call(
            self._intrinsic("llvm.fma", left, kinds, left.type), [left, right, plus]
        )

    def add_bfloat_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        """Add products of 32 bfloat16 numbers, of two neighbours to each of 16 float sums."""
        if not multiplies_bfloat():
            for numbers in zip(self._halves(left), self._halves(right), strict=True):
                sums = self.fma(*numbers, sums)
            return sums
        pairs = vector(BFLOAT, 2 * sums.type.count)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        function = self.declare(name, sums.type, (sums.type, pairs, pairs))
        return self.build.call(function, [sums, left, right])

    def add_word_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        """Add products of 16-bit integers, of two neighbours to each 32-bit sum."""
        return self.in_registers(self._add_word_pairs, sums, left, right)

    def _add_word_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        names = {16: "avx512.pmaddw.d.512", 8: "avx2.pmadd.wd", 4: "sse2.pmadd.wd"}
        return self._add_pairs(names[sums.type.count], sums, left, right)

    def add_byte_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        """Add products of unsigned and signed 8-bit integers, of two neighbours to each of 16 bits.

        They are saturated.
        """
        return self.in_registers(self._add_byte_pairs, sums, left, right)

    def _add_byte_pairs(self, sums: Value, left: Value, right: Value) -> Value:
        names = {32: "avx512.pmaddubs.w.512", 16: "avx2.pmadd.ub.sw", 8: "ssse3.pmadd.ub.sw.128"}
        return self._add_pairs(names[sums.type.count], sums, left, right)

    def add_byte_quads(self, sums: Value, left: Value, right: Value) -> Value:
        """Add products of unsigned and signed bytes, of four neighbours to each of 16 32-bit sums.

        Only where ``native.multiplies_bytes``.
        """
        octets = vector(I8, 4 * sums.type.count)
        name = "llvm.x86.avx512.vpdpbusd.512"
        function = self.declare(name, sums.type, (sums.type, octets, octets))
        return self.build.call(function, [sums, left, right])

    def _add_pairs(self, name: str, sums: Value, left: Value, right: Value) -> Value:
        function = self.declare(f"llvm.x86.{name}", sums.type, (left.type, right.type))
        total = self.build.add(sums, self.build.call(function, [left, right]))
        # LLVM would add integers in another order, with sums that do not fit in registers: it does
        # not know what this assembly returns.
        same = ir.FunctionType(sums.type, (sums.type,))
        return self.build.asm(same, "", "=v,0", [total], side_effect=False)

    def in_registers(self, operate: Callable[..., Value], first: Value, *others: Value) -> Value:
        """An operation on vectors, for as many lanes of the first at a time as a register has."""
        bits = first.type.count * (32 if first.type.element == FLOAT else first.type.element.width)
        count = max(1, bits // (32 * vector_lanes()))
        vectors = (first, *others)
        parts = [
            operate(*(self.lanes(each, part, count) for each in vectors)) for part in range(count)
        ]
        while len(parts) > 1:
            parts = [self.joined(*pair) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def lanes(self, values: Value, part: int, parts: int) -> Value:
        """One of ``parts`` parts of a vector."""
        size = values.type.count // parts
        order = ir.Constant(vector(I32, size), list(range(part * size, (part + 1) * size)))
        return values if parts == 1 else self.build.shuffle_vector(values, values, order)

    def joined(self, left: Value, right: Value) -> Value:
        """The lanes of two vectors in one."""
        size = 2 * left.type.count
        order = ir.Constant(vector(I32, size), list(range(size)))
        return self.build.shuffle_vector(left, right, order)

    def _halves(self, pairs: Value) -> tuple[Value, Value]:
        """The first and the second of pairs of bfloat16 numbers, as float32."""
        lanes = pairs.type.count // 2
        return self.halves(self.build.bitcast(pairs, vector(I32, lanes)))

    def halves(self, words: Value) -> tuple[Value, Value]:
        """The lower and the upper bfloat16 number of 32-bit words, as float32."""
        build, kind = self.build, vector(FLOAT, words.type.count)
        lower = build.shl(words, self.constant(16, words))
        upper = build.and_(words, self.constant(0xFFFF0000, words))
        return build.bitcast(lower, kind), build.bitcast(upper, kind)

    def to_bfloats(self, values: Value) -> Value:
        """Round 16 floats to bfloat16, ties to even."""
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        function = self.declare(name, vector(BFLOAT, values.type.count), (values.type,))
        return self.build.call(function, [values])

    def splat_pair(self, pointer: Value) -> Value:
        """Two neighbouring bfloat16 numbers in memory, 16 times."""
        return self.build.bitcast(self.splat(self.load(pointer, I32), 16), vector(BFLOAT, 32))

    def maximum(self, left: Value, right: Value) -> Value:
        """The larger number of each lane; ``right`` where ``left`` is NaN."""
        return self.build.select(self.build.fcmp_ordered(">", left, right), left, right)

    def minimum(self, left: Value, right: Value) -> Value:
        """The smaller number of each lane; ``right`` where ``left`` is NaN."""
        return self.build.select(self.build.fcmp_ordered("<", left, right), left, right)

    def absolute(self, values: Value) -> Value:
        """Numbers without their signs; 0 for NaN."""
        sizes = self.build.call(
            self._intrinsic("llvm.fabs", values, (values.type,), values.type), [values]
        )
        return self.maximum(sizes, self.constant(0.0, values))

    def total_word(self, words: Value) -> Value:
        """The sum of all lanes of 32-bit integers."""
        name = f"llvm.vector.reduce.add.v{words.type.count}i32"
        return self.build.call(self.declare(name, I32, (words.type,)), [words])

    def total(self, values: Value) -> Value:
        """The sum of all lanes."""
        add = self._intrinsic("llvm.vector.reduce.fadd", values, (FLOAT, values.type))
        return self.build.call(add, [FLOAT(0.0), values], fastmath=("reassoc",))

    def largest(self, values: Value) -> Value:
        """The largest lane; no lane may be NaN."""
        pick = self._intrinsic("llvm.vector.reduce.fmax", values, (values.type,))
        return self.build.call(pick, [values], fastmath=("nnan",))

    def smallest(self, values: Value) -> Value:
        """The smallest lane; no lane may be NaN."""
        pick = self._intrinsic("llvm.vector.reduce.fmin", values, (values.type,))
        return self.build.call(pick, [values], fastmath=("nnan",))

    def exp2(self, power: Value) -> Value:
        """2**power within 2e-7, and at least 2**-125, for powers up to 127."""
        build, low = self.build, self.maximum(power, self.constant(-125.0, power))
        # The sum has the nearest integer in its lowest bits.
        shifted = build.fadd(low, self.constant(SHIFT, low))
        part = build.fsub(low, build.fsub(shifted, self.constant(SHIFT, low)))
        result = self.constant(EXP2[0], part)
        for coefficient in EXP2[1:]:
            result = self.fma(result, part, self.constant(coefficient, part))
        kind = vector(I32, power.type.count) if isinstance(power.type, ir.VectorType) else I32
        exponent = build.bitcast(shifted, kind)
        exponent = build.shl(exponent, self.constant(23, exponent))
        return build.bitcast(build.add(build.bitcast(result, kind), exponent), power.type)

    def bfloat_power(self, low: Value, high: Value) -> Value:
        """2**(step / 128 - 127) as 32 bfloat16 numbers, within 0.5 %, of 16 and 16 steps.

        A step is rounded to an integer, whose bits are exponent and fraction of the power, but for
        the fraction's curve: 2**f - 1 is f - 0.343 f (1 - f) within 0.3 %. Below step 0, and for
        NaN, the result is 0; no step is above 2**15.
        """
        build, words = self.build, vector(I16, 32)
        counts = [self._rounded(steps) for steps in (low, high)]
        if not multiplies_bfloat():
            return self.joined(*(self._power_bits(count) for count in counts))
        function = self.declare(
            "llvm.x86.avx512.packusdw.512", words, tuple(part.type for part in counts)
        )
        packed = build.bitcast(build.call(function, counts), vector(I64, 8))
        order = ir.Constant(vector(I32, 8), [0, 2, 4, 6, 1, 3, 5, 7])
        bits = build.bitcast(build.shuffle_vector(packed, packed, order), words)
        fraction = build.and_(bits, self.constant(127, bits))
        curve = build.mul(fraction, build.sub(self.constant(128, bits), fraction))
        function = self.declare("llvm.x86.avx512.pmul.hr.sw.512", words, (words, words))
        return build.sub(bits, build.call(function, [curve, self.constant(88, bits)]))

    def _power_bits(self, counts: Value) -> Value:
        """As ``bfloat_power``, of integers, with the same bits."""
        build = self.build
        zero = self.constant(0, counts)
        bits = build.select(build.icmp_signed(">", counts, zero), counts, zero)
        fraction = build.and_(bits, self.constant(127, bits))
        curve = build.mul(fraction, build.sub(self.constant(128, bits), fraction))
        curve = build.add(build.mul(curve, self.constant(88, bits)), self.constant(1 << 14, bits))
        power = build.sub(bits, build.ashr(curve, self.constant(15, bits)))
        return build.trunc(power, vector(I16, power.type.count))

    def _rounded(self, values: Value) -> Value:
        """The nearest int32 of 16 floats; the least one for NaN and below it."""
        return self.in_registers(self._round, values)

    def _round(self, values: Value) -> Value:
        kind, mask = vector(I32, values.type.count), ir.IntType(16)
        if values.type.count < LANES:
            name = "avx.cvt.ps2dq.256" if values.type.count == 8 else "sse2.cvtps2dq"
            function = self.declare(f"llvm.x86.{name}", kind, (values.type,))
            return self.build.call(function, [values])
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        function = self.declare(name, kind, (values.type, kind, mask, I32))
        return self.build.call(function, [values, ir.Constant(kind, None), mask(-1), I32(4)])

    def from_bfloats(self, numbers: Value, half: int) -> Value:
        """The lower or upper 16 of 32 bfloat16 numbers, given as words, as float32."""
        build, lanes = self.build, numbers.type.count // 2
        order = [half * lanes + lane for lane in range(lanes)]
        part = build.shuffle_vector(numbers, numbers, ir.Constant(vector(I32, lanes), order))
        wide = build.zext(part, vector(I32, lanes))
        return build.bitcast(build.shl(wide, self.constant(16, wide)), vector(FLOAT, lanes))

    def inverse(self, values: Value) -> Value:
        """1 / value within 1e-7, of 16 positive normal numbers."""
        if vector_lanes() < values.type.count:
            return self.build.fdiv(self.constant(1.0, values), values)
        kind, mask = values.type, ir.IntType(16)
        function = self.declare("llvm.x86.avx512.rcp14.ps.512", kind, (kind, kind, mask))
        near = self.build.call(function, [values, ir.Constant(kind, None), mask(-1)])
        error = self.fma(self.build.fneg(values), near, self.constant(1.0, values))
        return self.fma(near, error, near)

    def sqrt(self, value: Value) -> Value:
        return self.build.call(
            self._intrinsic("llvm.sqrt", value, (value.type,), value.type), [value]
        )

    def tanh(self, value: Value) -> Value:
        """1 - 2 / (exp(2 value) + 1), for |value| below 40."""
        power = self.build.fmul(value, self.constant(2.0 * 1.4426950408889634, value))
        most = self.constant(126.0, value)
        power = self.build.select(self.build.fcmp_ordered("<", power, most), power, most)
        one = self.constant(1.0, value)
        below = self.build.fadd(self.exp2(power), one)
        return self.build.fsub(one, self.build.fdiv(self.constant(2.0, value), below))

    def widen(self, pointer: Value, bits: int, lanes: int, codec: Codec = "range") -> list[Value]:
        """Load codes as float vectors, one for each block of channels packed in the bytes.

        Reads ``lanes`` float16 numbers if ``bits`` is 16, else ``lanes`` bytes, whose ``codec`` may
        be that of float8 numbers or of pairs; others have integers.
        """
        if bits == 16:
            return [self.build.fpext(self.load(pointer, vector(HALF, lanes)), vector(FLOAT, lanes))]
        whole = self.build.zext(self.load(pointer, vector(I8, lanes)), vector(I32, lanes))
        if codec == "float":
            return [self._from_float8(whole)]
        if codec == "polar":
            return self._from_pairs(whole)
        parts: list[Value] = []
        for shift in range(0, 8, bits):
            part = self.build.lshr(whole, self.constant(shift, whole)) if shift else whole
            if shift + bits < 8:
                part = self.build.and_(part, self.constant(2**bits - 1, part))
            parts.append(self.build.sitofp(part, vector(FLOAT, lanes)))
        return parts

    def _from_float8(self, bytes_: Value) -> Value:
        """Float8 numbers, e4m3, as float32.

        With exponent and mantissa in the place of those of a float16, which has a bias of 15
        instead of 7, a number is 2**-8 times itself. NaN becomes 480.
        """
        build, like = self.build, bytes_
        sign = build.shl(build.and_(like, self.constant(0x80, like)), self.constant(8, like))
        rest = build.shl(build.and_(like, self.constant(0x7F, like)), self.constant(7, like))
        numbers = self.half(build.or_(sign, rest), 0)
        return build.fmul(numbers, self.constant(256.0, numbers))

    def _from_pairs(self, bytes_: Value) -> list[Value]:
        """The two channels of each pair, as ``quantizer.polar_numbers``."""
        build, like = self.build, bytes_
        radius = build.sitofp(
            build.and_(like, self.constant(7, like)), vector(FLOAT, like.type.count)
        )
        eighth = build.lshr(like, self.constant(3, like))
        parts: list[Value] = []
        for place, shift in ((eighth, 25), (build.not_(eighth), 24)):
            size = build.bitcast(build.fmul(self.looked_up(COSINES, place), radius), like.type)
            sign = build.shl(like, self.constant(shift, like))
            sign = build.and_(sign, self.constant(0x80000000, like))
            parts.append(build.bitcast(build.or_(size, sign), radius.type))
        return parts

    def looked_up(self, numbers: Sequence[float], index: Value) -> Value:
        """The number of eight that the lowest three bits of each lane of an index name."""
        return self.in_registers(partial(self._looked_up, numbers), index)

    def _looked_up(self, numbers: Sequence[float], index: Value) -> Value:
        lanes = index.type.count
        kind, words = vector(FLOAT, lanes), vector(I32, lanes)
        names = {16: "avx512.permvar.sf.512", 8: "avx2.permps"}
        if lanes in names and vector_lanes() >= lanes:
            function = self.declare(f"llvm.x86.{names[lanes]}", kind, (kind, words))
            place = self.build.and_(index, self.constant(7, index))
            return self.build.call(function, [ir.Constant(kind, [*numbers] * (lanes // 8)), place])
        found = [ir.Constant(kind, [number] * lanes) for number in numbers]
        for bit in range(3):
            is_set = self.build.and_(index, self.constant(1 << bit, index))
            is_set = self.build.icmp_signed("!=", is_set, self.constant(0, is_set))
            found = [
                self.build.select(is_set, odd, even)
                for even, odd in zip(found[::2], found[1::2], strict=True)
            ]
        return found[0]

    def load_live(self, pointer: Value, live: Value) -> Value:
        """Load the int32 lanes that are ``live``; the others are 0 and their memory is not read."""
        kind: Any = vector(I32, live.type.count)
        name = f"llvm.masked.load.v{kind.count}i32.p0"
        function = self.declare(name, kind, (POINTER, I32, live.type, kind))
        return self.build.call(function, [pointer, I32(4), live, ir.Constant(kind, None)])

    def store_live(self, values: Value, pointer: Value, live: Value) -> None:
        """Store the float lanes that are ``live``; the memory of the others is not written."""
        kind: Any = values.type
        name = f"llvm.masked.store.v{kind.count}f32.p0"
        function = self.declare(name, ir.VoidType(), (kind, POINTER, I32, live.type))
        self.build.call(function, [values, pointer, I32(4), live])

    def half(self, words: Value, shift: int) -> Value:
        """The float16 number at bit ``shift`` of each 32-bit word, as float32."""
        lanes = words.type.count
        down = self.build.lshr(words, self.constant(shift, words)) if shift else words
        short = self.build.trunc(down, vector(I16, lanes))
        return self.build.fpext(
            self.build.bitcast(short, vector(HALF, lanes)), vector(FLOAT, lanes)
        )

    def hadamard(self, parts: list[Value]) -> list[Value]:
        """Product of the numbers of vectors, a power of two of them, with 1 and -1.

        Not normalised: twice the same multiplies by the number of numbers.
        """
        build, lanes = self.build, parts[0].type.count
        step = 1
        while step < lanes:
            order = ir.Constant(vector(I32, lanes), [lane ^ step for lane in range(lanes)])
            signs = ir.Constant(
                vector(FLOAT, lanes), [-1.0 if lane & step else 1.0 for lane in range(lanes)]
            )
            parts = [
                self.fma(part, signs, build.shuffle_vector(part, part, order)) for part in parts
            ]
            step *= 2
        apart = 1
        while apart < len(parts):
            pairs = [(parts[at & ~apart], parts[at | apart]) for at in range(len(parts))]
            parts = [
                build.fsub(left, right) if at & apart else build.fadd(left, right)
                for at, (left, right) in enumerate(pairs)
            ]
            apart *= 2
        return parts

    def prefetch(self, pointer: Value) -> None:
        """Prefetch the cache line at ``pointer``; any address is safe."""
        kinds = (POINTER, I32, I32, I32)
        function = self.declare("llvm.prefetch.p0", ir.VoidType(), kinds)
        self.build.call(function, [pointer, I32(0), I32(3), I32(1)])

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """A loop over the index 0 to ``count - 1``; the ``with`` body emits the loop body."""
        before = self.build.block
        head = self.build.append_basic_block("head")
        body = self.build.append_basic_block("body")
        after = self.build.append_basic_block("after")
        self.build.branch(head)
        self.build.position_at_end(head)
        index = self.build.phi(I64)
        index.add_incoming(I64(0), before)
        self.build.cbranch(self.build.icmp_signed("<", index, count), body, after)
        self.build.position_at_end(body)
        yield index
        index.add_incoming(self.build.add(index, I64(1), flags=("nsw",)), self.build.block)
        self.build.branch(head)
        self.build.position_at_end(after)

    def variable(self, value: Value) -> Value:
        """A stack variable with an initial value; the optimizer keeps it in a register."""
        with self.build.goto_entry_block():
            slot = self.build.alloca(value.type)
        self.build.store(value, slot)
        return slot

    def _intrinsic(
        self, stem: str, like: Value, arguments: tuple[ir.Type, ...], result: ir.Type = FLOAT
    ) -> ir.Function:
        kind = like.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        return self.declare(f"{stem}.{suffix}", result, arguments)

    def declare(self, name: str, result: ir.Type, arguments: tuple[ir.Type, ...]) -> ir.Function:
        module = self.build.module
        if name in module.globals:
            return module.globals[name]
        return ir.Function(module, ir.FunctionType(result, arguments), name)
