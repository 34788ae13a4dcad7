# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""LLVM vector code that scores the pages of one tile of summaries."""

from dataclasses import dataclass
from functools import cache
from math import exp, log2
from typing import Any

from llvmlite import ir

from triptych.kernels.codegen.native import compile_function, vector_lanes
from triptych.kernels.codegen.simd import FLOAT, I64, POINTER, Emitter, Value, vector
from triptych.kernels.select.summary import (
    BLOCKS,
    CODE_BYTES,
    DEVIATIONS,
    NUMBERS,
    TILE_PAGES,
    Kind,
    tile_bytes,
)


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """Parameters that a compiled function is specialised for."""

    kind: Kind
    group: int
    """Query heads per KV head."""
    head_dim: int
    has_masses: bool = False
    """Also writes the expected attention of pages, as in ``reference.expected_shares``."""


@cache
def score_tile_address(tile: ScoreTile) -> int:
    """Address of ``void(tile, query, scores, masses)``: the largest score over the heads of a page.

    tile: address of codes, numbers and positions of ``TILE_PAGES`` pages; query: floats
    [2, G, d], their sums [2, G], tokens of each block, and the number of pages of the tile;
    scores: ``TILE_PAGES`` floats, written; masses: [2, G, ``TILE_PAGES``] floats, written if the
    tile ``has_masses``. The vectors are the factors of the summary: the positive and the negative
    part of a query for a box, the query and its squares for moments. A mass is its first number
    times 2 to the power of the second, which is the same for all pages of a tile; 0 beyond the
    last page.
    """
    module = ir.Module("score_tile")
    kind = ir.FunctionType(ir.VoidType(), (POINTER, POINTER, POINTER, POINTER))
    function = ir.Function(module, kind, "score_tile")
    for argument in function.args:
        argument.add_attribute("noalias")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    _ScoreTileEmitter(builder, tile, function.args).emit()
    return compile_function(module, "score_tile")


class _ScoreTileEmitter:
    def __init__(self, builder: ir.IRBuilder, tile: ScoreTile, arguments: tuple) -> None:
        self.emit_ = Emitter(builder)
        self.build: Any = builder
        self.tile = tile
        self.at, self.query, self.scores, self.masses = arguments
        self.lanes = min(TILE_PAGES, vector_lanes())
        most = 24 if vector_lanes() == 16 else 10  # sums that fit in registers beside the codes
        self.products = 2 if tile.kind == "box" else BLOCKS + 1
        self.heads_at_once = most // self.products

    def emit(self) -> None:
        e, group = self.emit_, self.tile.group
        for page in range(0, TILE_PAGES, self.lanes):
            best: Value = None
            for first in range(0, group, self.heads_at_once):
                heads = range(first, min(group, first + self.heads_at_once))
                for score in self._scores(page, heads):
                    best = score if best is None else e.maximum(score, best)
            e.store(best, e.byte(self.scores, 4 * page))
        self.build.ret_void()

    def _scores(self, page: int, heads: range) -> list[Value]:
        """Scores of one vector of pages for each of ``heads``."""
        e, dim = self.emit_, self.tile.head_dim
        sums = [[self._zeros() for _ in range(self.products)] for _ in heads]
        with e.loop(I64(dim)) as channel:
            line = e.byte(self.at, self.build.mul(channel, I64(TILE_PAGES)))
            factors = self._factors(line, page)
            if page == 0 and heads.start == 0:
                self._prefetch(line)
            for slots, head in zip(sums, heads, strict=True):
                numbers = [self._query(part, head, channel) for part in range(2)]
                for (vector_, part), slot in zip(factors, slots, strict=True):
                    self.build.store(e.fma(vector_, numbers[part], self.build.load(slot)), slot)
        numbers = [self._number(index, page) for index in range(NUMBERS[self.tile.kind])]
        score = self._box if self.tile.kind == "box" else self._moments
        return [
            score(page, head, [self.build.load(slot) for slot in slots], numbers)
            for slots, head in zip(sums, heads, strict=True)
        ]

    def _factors(self, line: Value, page: int) -> list[tuple[Value, int]]:
        """Codes of a channel of pages, each with the index of its part of the query."""
        e, away = self.emit_, self.tile.head_dim * TILE_PAGES
        if self.tile.kind == "box":
            return [(e.widen(e.byte(line, n * away + page), 8, self.lanes)[0], n) for n in (0, 1)]
        pairs = range(BLOCKS // 2)
        means = [e.widen(e.byte(line, pair * away + page), 4, self.lanes) for pair in pairs]
        (above,) = e.widen(e.byte(line, len(pairs) * away + page), 8, self.lanes)
        return [*((mean, 0) for pair in means for mean in pair), (self.build.fmul(above, above), 1)]

    def _prefetch(self, line: Value) -> None:
        """Prefetch the same channel of the next tile.

        Weights evict the summaries from the caches between steps, and a tile is too short for the
        hardware prefetcher.
        """
        tile, away = self.tile, self.tile.head_dim * TILE_PAGES
        for vector_ in range(CODE_BYTES[tile.kind]):
            next_ = tile_bytes(tile.kind, tile.head_dim) + vector_ * away
            self.emit_.prefetch(self.emit_.byte(line, next_))

    def _query(self, part: int, head: int, channel: Value) -> Value:
        near = self.emit_.byte(self.query, 4 * (part * self.tile.group + head) * self.tile.head_dim)
        number = self.emit_.load(self.build.gep(near, [channel], source_etype=FLOAT), FLOAT)
        return self.emit_.splat(number, self.lanes)

    def _box(self, _page: int, head: int, products: list[Value], numbers: list[Value]) -> Value:
        e, build = self.emit_, self.build
        scale, zero, other_scale, other_zero = numbers
        above = e.fma(products[0], scale, build.fmul(zero, self._sum(0, head)))
        below = e.fma(products[1], other_scale, build.fmul(other_zero, self._sum(1, head)))
        return build.fadd(above, below)

    def _moments(self, page: int, head: int, products: list[Value], numbers: list[Value]) -> Value:
        e, build = self.emit_, self.build
        variance, total, best = products[-1], self._sum(0, head), None
        deviation, logits = e.sqrt(variance), list[Value]()
        for block in range(BLOCKS):
            scale, zero, spread = numbers[3 * block : 3 * block + 3]
            mean = e.fma(products[block], scale, build.fmul(zero, total))
            if self.tile.has_masses:
                square = build.fmul(variance, build.fmul(spread, spread))
                logits.append(e.fma(square, e.constant(0.5, square), mean))
            away = build.fmul(deviation, spread)
            score = e.fma(away, e.constant(DEVIATIONS, away), mean)
            best = score if best is None else e.maximum(score, best)
        if self.tile.has_masses:
            self._store_masses(page, head, logits)
        return best

    def _store_masses(self, page: int, head: int, logits: list[Value]) -> None:
        """Write the masses of pages; ``logits``: expected logit of a token of each block."""
        e, build, group = self.emit_, self.build, self.tile.group
        powers = [build.fmul(logit, e.constant(log2(exp(1)), logit)) for logit in logits]
        lanes = ir.Constant(powers[0].type, [float(page + lane) for lane in range(self.lanes)])
        is_there = build.fcmp_ordered("<", lanes, self._query_number(2 * group + BLOCKS))
        peak = powers[0]
        for power in powers[1:]:
            peak = e.maximum(power, peak)
        peak = e.largest(build.select(is_there, peak, e.constant(-1e30, peak)))
        peak = e.splat(peak, self.lanes)
        nothing = mass = e.constant(0.0, peak)
        for block, power in enumerate(powers):
            tokens = self._query_number(2 * group + block)
            mass = e.fma(e.exp2(build.fsub(power, peak)), tokens, mass)
        for part, numbers in enumerate((build.select(is_there, mass, nothing), peak)):
            e.store(numbers, e.byte(self.masses, 4 * ((part * group + head) * TILE_PAGES + page)))

    def _sum(self, part: int, head: int) -> Value:
        """The sum of one vector of a query, in all lanes."""
        return self._query_number(part * self.tile.group + head)

    def _query_number(self, index: int) -> Value:
        """Number ``index`` after the vectors of the queries, in all lanes."""
        e, tile = self.emit_, self.tile
        at = 4 * (2 * tile.group * tile.head_dim + index)
        return e.splat(e.load(e.byte(self.query, at), FLOAT), self.lanes)

    def _number(self, index: int, page: int) -> Value:
        codes = CODE_BYTES[self.tile.kind] * self.tile.head_dim
        at = TILE_PAGES * (codes + 4 * index) + 4 * page
        return self.emit_.load(self.emit_.byte(self.at, at), vector(FLOAT, self.lanes))

    def _zeros(self) -> Value:
        return self.emit_.variable(ir.Constant(vector(FLOAT, self.lanes), [0.0] * self.lanes))
