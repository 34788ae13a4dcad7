# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""LLVM vector code for one page of decode attention, by layout and group size.

The vectors are explicit because the automatic vectorizer keeps neither the logits nor the output
of a page in registers.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from triptych.core.layout import PageLayout
from triptych.kernels.codegen.native import compile_function, vector_lanes
from triptych.kernels.codegen.simd import FLOAT, HALF, I32, I64, POINTER, Emitter, Value, vector

CACHE_LINE = 64
LOG2_E = 1.4426950408889634
HIDDEN = -1e30
"""Logit of a hidden key; finite, since the difference of two infinities is NaN."""


@dataclass(frozen=True, slots=True)
class PageStep:
    """Parameters that a compiled page step is specialised for."""

    layout: PageLayout
    group: int
    """Query heads per KV head."""
    is_windowed: bool
    is_capped: bool
    is_scoring: bool = False
    """Whether the step adds the weights of a finished softmax to token scores."""


def state_floats(group: int, head_dim: int) -> int:
    """Floats of one running softmax: outputs [G, d], largest logits [G], sums [G]."""
    return group * (head_dim + 2)


def query_floats(group: int, head_dim: int) -> int:
    """Floats of the scaled queries [G, d] and the sum of each [G]."""
    return group * (head_dim + 1)


def scratch_floats(step: PageStep) -> int:
    """Floats of logits [G, padded tokens], rescale factors [G] and zero terms [G].

    For keys with scales by channel also those of a page's queries, as ``query_floats``. For keys
    with segments also the sum of each query's numbers in each segment.
    """
    form = step.layout.format
    own = query_floats(1, step.layout.head_dim) * form.codes_whole_pages + len(form.key_widths)
    return step.group * (_padded_tokens(step.layout) + 2 + own)


@cache
def page_step_address(step: PageStep) -> int:
    """Address of ``void(page, upcoming, live, query, state, scratch, oldest, cap)``.

    The function adds the first ``live`` tokens of ``page`` to a running softmax (``state``), and
    prefetches the page ``upcoming``: pages are scattered in memory, so that the hardware prefetcher
    cannot predict the next one.

    page, upcoming, query, state, scratch: pointers; live: int64 >= 1; oldest: int32, the smallest
    position that may be read; cap: float32. Logits are in powers of two: the caller scales
    the query by log2(e), or with a cap divides it by the cap and multiplies the cap instead.
    Biases of the page, if its layout has them, are natural logarithms.

    For a scoring step the state has the log2 of finished sums in the place of the largest logits,
    and the weight in the place of the sums; it changes only the scores of the page.
    """
    module = ir.Module("page_step")
    kind = ir.FunctionType(
        ir.VoidType(), (POINTER, POINTER, I64, POINTER, POINTER, POINTER, I32, FLOAT)
    )
    function = ir.Function(module, kind, "page_step")
    function.args[5].add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _PageStepEmitter(builder, step, function.args).emit()
    return compile_function(module, "page_step")


def _padded_tokens(layout: PageLayout) -> int:
    lanes = vector_lanes()
    return -(-layout.tokens // lanes) * lanes


def _blocks(units: int) -> list[tuple[int, int]]:
    """Split a row of ``units`` into (start, width), with powers of two as widths."""
    blocks: list[tuple[int, int]] = []
    start, width = 0, vector_lanes()
    while start < units:
        while start + width > units:
            width //= 2
        blocks.append((start, width))
        start += width
    return blocks


def _tiles(items: list, size: int) -> list[list]:
    """Split ``items`` into runs of nearly equal length of at most ``size``."""
    count = -(-len(items) // max(1, size))
    step = -(-len(items) // count)
    return [items[start : start + step] for start in range(0, len(items), step)]


@dataclass(frozen=True, slots=True)
class _KeyPart:
    """Channels of keys with codes of the same bits: a segment, or all of them."""

    index: int
    bits: int
    channel: int
    """The first one."""
    byte: int
    """Of a key, with which its codes begin."""
    units: int
    """Packed bytes, or 16-bit numbers."""
    scales: int | None
    """Byte offset of the scales of a page's tokens; None: scales and zeros are of whole keys."""


class _PageStepEmitter:
    def __init__(self, builder: ir.IRBuilder, step: PageStep, arguments: tuple) -> None:
        self.emit_ = Emitter(builder)
        self.build: Any = builder
        self.step, self.layout = step, step.layout
        self.page, self.upcoming, self.live, self.query, self.state = arguments[:5]
        self.scratch, self.oldest, self.cap = arguments[5:]
        self.lanes = vector_lanes()
        self.padded = _padded_tokens(step.layout)
        self.room = 20 if self.lanes == 16 else 10

    def emit(self) -> None:
        if self.layout.format.codes_whole_pages:
            self._scale_query()
        for part in self._parts_of_key():
            if self.layout.is_channel_major:
                self._logits_by_channel(part)
            else:
                self._logits_by_token(part)
        if self.step.is_scoring:
            self._add_scores()
        else:
            self._softmax()
            self._weigh_values()
        self.build.ret_void()

    def _scale_query(self) -> None:
        """Multiply the queries by the scales of the channels, and by their zeros, for this page.

        The products are where ``_logits_by_*`` and ``_finished_logits`` look for the query and for
        its sum.
        """
        e, group, dim = self.emit_, self.step.group, self.layout.head_dim
        given = self.query
        own = e.byte(self.scratch, 4 * group * (self.padded + 2))
        for head in range(group):
            sums: dict[int, Value] = {}
            for start, width in _blocks(dim):
                words = e.load(
                    e.byte(self.page, self.layout.offsets[1] + 4 * start), vector(I32, width)
                )
                numbers = e.load(e.byte(given, 4 * (head * dim + start)), vector(FLOAT, width))
                product = self.build.fmul(numbers, e.half(words, 0))
                e.store(product, e.byte(own, 4 * (head * dim + start)))
                nothing = ir.Constant(vector(FLOAT, width), [0.0] * width)
                sums[width] = e.fma(numbers, e.half(words, 16), sums.get(width, nothing))
            total = FLOAT(0.0)
            for part in sums.values():
                total = self.build.fadd(total, e.total(part))
            e.store(total, e.byte(own, 4 * (group * dim + head)))
        self.query = own

    def _parts_of_key(self) -> list[_KeyPart]:
        """The segments of keys, or one part; the sums of the queries in segments are stored."""
        e, form, dim = self.emit_, self.layout.format, self.layout.head_dim
        segments = form.key_segments(dim)
        if not segments:
            units = dim if form.key_bits == 16 else dim * form.key_bits // 8
            return [_KeyPart(0, form.key_bits, 0, 0, units, None)]
        for index, each in enumerate(segments):
            for head in range(self.step.group):
                total = FLOAT(0.0)
                for start, width in _blocks(each.channels):
                    near = e.byte(self.query, 4 * (head * dim + each.channel + start))
                    numbers = e.load(near, vector(FLOAT, width))
                    total = self.build.fadd(total, e.total(numbers))
                e.store(total, self._segment_sum(index, head))
        return [
            _KeyPart(
                index,
                each.bits,
                each.channel,
                each.byte,
                each.channels * each.bits // 8,
                self.layout.offsets[1] + 2 * index * self.layout.tokens,
            )
            for index, each in enumerate(segments)
        ]

    def _scaled(self, part: _KeyPart, head: int, dot: Value, scales: Value, at: Value) -> Value:
        """The logits after a segment, given products of queries and codes: ``scales`` times those
        with ``2 * code - top``, and those of earlier segments, which are at ``at``."""
        e, lanes = self.emit_, None if dot.type == FLOAT else dot.type.count
        total = e.load(self._segment_sum(part.index, head), FLOAT)
        offset = self.build.fmul(total, FLOAT(1.0 - 2.0**part.bits))
        wide = offset if lanes is None else e.splat(offset, lanes)
        twice = self.build.fadd(self.build.fadd(dot, dot), wide)
        if part.index == 0:
            return self.build.fmul(twice, scales)
        return self.build.fadd(self.build.fmul(twice, scales), e.load(at, dot.type))

    def _logits_by_channel(self, part: _KeyPart) -> None:
        """Dot products for keys [channel bytes, tokens]: a query number times a row of codes."""
        e, form, dim = self.emit_, self.layout.format, self.layout.head_dim
        rows = part.units
        first = e.byte(self.page, part.byte * self.layout.tokens)
        blocks = list(range(0, self.padded, self.lanes))
        for heads in _tiles(list(range(self.step.group)), self.room):
            for tile in _tiles(blocks, self.room // len(heads)):
                sums = {(g, t): self._zeros(self.lanes) for g in heads for t in tile}
                with e.loop(I64(rows)) as row:
                    if heads[0] == tile[0] == part.index == 0:
                        self._prefetch(row, rows)
                    line = e.byte(first, self.build.mul(row, I64(self.layout.tokens)))
                    parts = [
                        e.widen(e.byte(line, t), part.bits, self.lanes, form.key_codec)
                        for t in tile
                    ]
                    for share in range(8 // part.bits):
                        for g in heads:
                            channel = part.channel + share * rows
                            near = e.byte(self.query, 4 * (g * dim + channel))
                            number = e.load(self._element(near, row), FLOAT)
                            wide = e.splat(number, self.lanes)
                            for t, codes in zip(tile, parts, strict=True):
                                self._add_product(sums[g, t], codes[share], wide)
                for (g, t), slot in sums.items():
                    dot, at = self.build.load(slot), self._logit(g, t)
                    if part.scales is not None:
                        scales = self._halves(part.scales + 2 * t)
                        dot = self._scaled(part, g, dot, scales, at)
                    e.store(dot, at)

    def _logits_by_token(self, part: _KeyPart) -> None:
        """Dot products for keys [tokens, channel bytes]: a row of codes times the query."""
        e, form, dim = self.emit_, self.layout.format, self.layout.head_dim
        unit, units = 2 if form.key_bits == 16 else 1, part.units
        of_token = form.segment_token_bytes(dim)[0]
        blocks = _blocks(units)
        widths = sorted({width for _, width in blocks})
        with e.loop(self.live) as token:
            if part.index == 0:
                self._prefetch(token, self.layout.tokens)
            line = e.byte(self.page, self.build.mul(token, I64(of_token)))
            for heads in _tiles(list(range(self.step.group)), self.room // len(widths)):
                sums = {
                    (g, w): ir.Constant(vector(FLOAT, w), [0.0] * w) for g in heads for w in widths
                }
                for start, width in blocks:
                    near = e.byte(line, part.byte + start * unit)
                    codes = e.widen(near, part.bits, width, form.key_codec)
                    for share, some in enumerate(codes):
                        for g in heads:
                            channel = part.channel + share * units + start
                            near = e.byte(self.query, 4 * (g * dim + channel))
                            numbers = e.load(near, vector(FLOAT, width))
                            sums[g, width] = e.fma(some, numbers, sums[g, width])
                for g in heads:
                    dot = FLOAT(0.0)
                    for width in widths:
                        dot = self.build.fadd(dot, e.total(sums[g, width]))
                    at = self._element(self._logit(g, 0), token)
                    if part.scales is not None:
                        near = e.byte(e.byte(self.page, part.scales), self.build.mul(token, I64(2)))
                        scale = self.build.fpext(e.load(near, HALF), FLOAT)
                        dot = self._scaled(part, g, dot, scale, at)
                    e.store(dot, at)

    def _softmax(self) -> None:
        """Compute the weights of value codes from logits, and rescale the running sums."""
        e, group, dim = self.emit_, self.step.group, self.layout.head_dim
        starts, live, key_metadata, shown = self._blocks_of_keys()
        biases = [self._bias(start, mask) for start, mask in zip(starts, live, strict=True)]
        value_metadata = [self._metadata(3, t, mask) for t, mask in zip(starts, live, strict=True)]
        with e.loop(I64(group)) as head:
            row = e.byte(self.scratch, self.build.mul(head, I64(4 * self.padded)))
            logits = self._finished_logits(head, row, starts, key_metadata, shown, biases)
            peak = logits[0]
            for logit in logits[1:]:
                peak = e.maximum(logit, peak)
            largest_at = self._element(e.byte(self.state, 4 * group * dim), head)
            before = e.load(largest_at, FLOAT)
            largest = e.maximum(e.largest(peak), before)
            e.store(largest, largest_at)
            rescale = e.exp2(self.build.fsub(before, largest))
            wide = e.splat(largest, self.lanes)
            total = zero_term = ir.Constant(vector(FLOAT, self.lanes), [0.0] * self.lanes)
            nothing = total
            for start, mask, logit, metadata in zip(
                starts, shown, logits, value_metadata, strict=True
            ):
                weight = self.build.select(mask, e.exp2(self.build.fsub(logit, wide)), nothing)
                total = self.build.fadd(total, weight)
                if metadata:
                    zero_term = e.fma(weight, metadata[1], zero_term)
                    weight = self.build.fmul(weight, metadata[0])
                e.store(weight, e.byte(row, 4 * start))
            sum_at = self._element(e.byte(self.state, 4 * group * (dim + 1)), head)
            e.store(e.fma(e.load(sum_at, FLOAT), rescale, e.total(total)), sum_at)
            e.store(rescale, self._element(self._rescale(0), head))
            e.store(e.total(zero_term), self._element(self._zero_term(0), head))

    def _blocks_of_keys(self) -> tuple[list[int], list[Value], list[Any], list[Value]]:
        """First token, live mask, key metadata and visible mask of each block of tokens."""
        starts = list(range(0, self.padded, self.lanes))
        live = [self._live(start) for start in starts]
        metadata = [self._key_metadata(t, mask) for t, mask in zip(starts, live, strict=True)]
        shown = [self._shown(t, mask) for t, mask in zip(starts, live, strict=True)]
        return starts, live, metadata, shown

    def _finished_logits(
        self,
        head: Value,
        row: Value,
        starts: list[int],
        metadata: list[Any],
        shown: list[Value],
        biases: list[Any],
    ) -> list[Value]:
        """Logits of one head, block by block, from the dot products at ``row``."""
        e = self.emit_
        sums_at = e.byte(self.query, 4 * self.step.group * self.layout.head_dim)
        query_sum = e.splat(e.load(self._element(sums_at, head), FLOAT), self.lanes)
        logits: list[Value] = []
        for start, mask, pair, bias in zip(starts, shown, metadata, biases, strict=True):
            dot = e.load(e.byte(row, 4 * start), vector(FLOAT, self.lanes))
            if self.layout.format.codes_whole_pages:
                dot = self.build.fadd(dot, query_sum)
                dot = self.build.fmul(dot, pair[0]) if pair else dot
            elif pair:
                dot = e.fma(pair[0], dot, self.build.fmul(pair[1], query_sum))
            if self.step.is_capped:
                dot = self.build.fmul(e.tanh(dot), e.splat(self.cap, self.lanes))
            if bias is not None:
                dot = e.fma(bias, e.constant(LOG2_E, dot), dot)
            logits.append(self.build.select(mask, dot, e.constant(HIDDEN, dot)))
        return logits

    def _add_scores(self) -> None:
        """Add the largest weight among the heads, times the weight of the step, to each score."""
        e, group, dim = self.emit_, self.step.group, self.layout.head_dim
        starts, live, metadata, shown = self._blocks_of_keys()
        with e.loop(I64(group)) as head:
            row = e.byte(self.scratch, self.build.mul(head, I64(4 * self.padded)))
            sum_at = self._element(e.byte(self.state, 4 * group * dim), head)
            finished = e.splat(e.load(sum_at, FLOAT), self.lanes)
            logits = self._finished_logits(head, row, starts, metadata, shown, [None] * len(starts))
            for start, logit in zip(starts, logits, strict=True):
                power = self.build.fsub(logit, finished)
                e.store(e.exp2(power), e.byte(row, 4 * start))
        weight = e.splat(e.load(e.byte(self.state, 4 * group * (dim + 1)), FLOAT), self.lanes)
        for start, mask, seen in zip(starts, live, shown, strict=True):
            best = e.load(self._logit(0, start), vector(FLOAT, self.lanes))
            for head in range(1, group):
                other = e.load(self._logit(head, start), vector(FLOAT, self.lanes))
                best = e.maximum(best, other)
            best = self.build.select(seen, best, e.constant(0.0, best))
            at = e.byte(self.page, self.layout.offsets[4] + 4 * start)
            score = self.build.bitcast(e.load_live(at, mask), best.type)
            e.store_live(e.fma(best, weight, score), at, mask)

    def _weigh_values(self) -> None:
        """Add each value row, times its weight, to the rescaled outputs."""
        e, form, dim = self.emit_, self.layout.format, self.layout.head_dim
        unit = 2 if form.value_bits == 16 else 1
        units = form.segment_token_bytes(dim)[2] // unit
        shares = max(1, 8 // form.value_bits)
        for heads in _tiles(list(range(self.step.group)), self.room // shares):
            for tile in _tiles(_blocks(units), self.room // (shares * len(heads))):
                sums = {
                    (g, start, share): self._rescaled(g, start + share * units, width)
                    for g in heads
                    for start, width in tile
                    for share in range(shares)
                }
                with e.loop(self.live) as token:
                    near = e.byte(self.page, self.layout.offsets[2])
                    line = e.byte(near, self.build.mul(token, I64(units * unit)))
                    for start, width in tile:
                        near = e.byte(line, start * unit)
                        codes = e.widen(near, form.value_bits, width, form.value_codec)
                        for g in heads:
                            weight = e.load(self._element(self._logit(g, 0), token), FLOAT)
                            wide = e.splat(weight, width)
                            for share, part in enumerate(codes):
                                self._add_product(sums[g, start, share], part, wide)
                for (g, start, share), slot in sums.items():
                    channel = start + share * units
                    whole = self._with_earlier(g, channel, self.build.load(slot))
                    e.store(whole, self._output(g, channel))

    def _prefetch(self, index: Value, rounds: int) -> None:
        """Prefetch part ``index`` of ``rounds`` of what attention reads of the next page."""
        e = self.emit_
        end = self.layout.offsets[5 if self.layout.has_bias else 4]
        lines = -(-end // (CACHE_LINE * rounds))
        near = e.byte(self.upcoming, self.build.mul(index, I64(lines * CACHE_LINE)))
        for line in range(lines):
            e.prefetch(e.byte(near, line * CACHE_LINE))

    def _zeros(self, lanes: int) -> Value:
        return self.emit_.variable(ir.Constant(vector(FLOAT, lanes), [0.0] * lanes))

    def _add_product(self, slot: Value, left: Value, right: Value) -> None:
        self.build.store(self.emit_.fma(left, right, self.build.load(slot)), slot)

    def _element(self, pointer: Value, index: Value) -> Value:
        return self.build.gep(pointer, [index], source_etype=FLOAT)

    def _logit(self, head: int, token: int) -> Value:
        return self.emit_.byte(self.scratch, 4 * (head * self.padded + token))

    def _rescale(self, head: int) -> Value:
        return self.emit_.byte(self.scratch, 4 * (self.step.group * self.padded + head))

    def _zero_term(self, head: int) -> Value:
        return self.emit_.byte(self.scratch, 4 * (self.step.group * (self.padded + 1) + head))

    def _segment_sum(self, index: int, head: int) -> Value:
        """The sum of a query's numbers in a segment; there are none of pages encoded whole."""
        floats = self.step.group * (self.padded + 2 + index) + head
        return self.emit_.byte(self.scratch, 4 * floats)

    def _output(self, head: int, channel: int) -> Value:
        return self.emit_.byte(self.state, 4 * (head * self.layout.head_dim + channel))

    def _rescaled(self, head: int, channel: int, lanes: int) -> Value:
        """A sum of products of this page: it begins with earlier pages and with the zeros.

        Values with scales by channel are added to those of earlier pages at the end.
        """
        e = self.emit_
        zeros = e.splat(e.load(self._zero_term(head), FLOAT), lanes)
        if self.layout.format.is_balanced:
            return e.variable(zeros)
        return e.variable(e.fma(*self._earlier(head, channel, lanes), zeros))

    def _earlier(self, head: int, channel: int, lanes: int) -> tuple[Value, Value]:
        """Outputs of earlier pages, and the factor by which they shrink."""
        e = self.emit_
        old = e.load(self._output(head, channel), vector(FLOAT, lanes))
        return old, e.splat(e.load(self._rescale(head), FLOAT), lanes)

    def _with_earlier(self, head: int, channel: int, page: Value) -> Value:
        """The output after this page, whose sum of products is ``page``."""
        if not self.layout.format.is_balanced:
            return page
        e, lanes = self.emit_, page.type.count
        at = e.byte(self.page, self.layout.channel_scales + 2 * channel)
        scales = self.build.fpext(e.load(at, vector(HALF, lanes)), vector(FLOAT, lanes))
        old, rescale = self._earlier(head, channel, lanes)
        return e.fma(page, scales, self.build.fmul(old, rescale))

    def _live(self, start: int) -> Value:
        kind = vector(I64, self.lanes)
        tokens = ir.Constant(kind, [start + lane for lane in range(self.lanes)])
        return self.build.icmp_signed("<", tokens, self.emit_.splat(self.live, self.lanes))

    def _metadata(self, segment: int, start: int, live: Value) -> tuple[Value, Value] | None:
        """Scales and zeros of a block of tokens, 0 for those that are not live."""
        if not self.layout.format.is_quantized:
            return None
        e = self.emit_
        words = e.load_live(e.byte(self.page, self.layout.offsets[segment] + 4 * start), live)
        return e.half(words, 0), e.half(words, 16)

    def _key_metadata(self, start: int, live: Value) -> tuple[Value, ...] | None:
        """Scales and zeros of a block of keys; only scales, if zeros belong to channels."""
        form = self.layout.format
        if form.key_widths:
            return None
        if not form.codes_whole_pages:
            return self._metadata(1, start, live)
        return (self._token_scales(start),) if form.is_balanced else None

    def _token_scales(self, start: int) -> Value:
        """Scales of the keys of a block of tokens; those of tokens that are not live may be NaN."""
        return self._halves(self.layout.token_scales + 2 * start)

    def _halves(self, offset: int) -> Value:
        """16-bit numbers of a block of tokens, as float32."""
        e, lanes = self.emit_, self.lanes
        near = e.byte(self.page, offset)
        return self.build.fpext(e.load(near, vector(HALF, lanes)), vector(FLOAT, lanes))

    def _bias(self, start: int, live: Value) -> Value | None:
        """Biases of a block of tokens, 0 for those that are not live; None if there are none."""
        if not self.layout.has_bias:
            return None
        e = self.emit_
        words = e.load_live(e.byte(self.page, self.layout.offsets[4] + 4 * start), live)
        return self.build.bitcast(words, vector(FLOAT, self.lanes))

    def _shown(self, start: int, live: Value) -> Value:
        """Mask of the tokens of a block that the query may read."""
        if not self.step.is_windowed:
            return live
        e = self.emit_
        positions = e.load_live(e.byte(self.page, self.layout.offsets[5] + 4 * start), live)
        recent = self.build.icmp_signed(">=", positions, e.splat(self.oldest, self.lanes))
        return self.build.and_(live, recent)
