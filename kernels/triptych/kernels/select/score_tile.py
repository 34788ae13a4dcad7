# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""Scores of the pages of one tile of summaries as vector code."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from triptych.kernels.native import compile_function, vector_lanes
from triptych.kernels.select.summary import (
    BLOCKS,
    CODE_BYTES,
    DEVIATIONS,
    NUMBERS,
    TILE_PAGES,
    Kind,
    tile_bytes,
)
from triptych.kernels.simd import FLOAT, I64, POINTER, Emitter, Value, vector


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """What a compiled function is specialised for."""

    kind: Kind
    group: int
    """Query heads per KV head."""
    head_dim: int
    has_means: bool = False
    """Also says what is expected of the logits of each block, as ``reference.expected`` does."""


def query_floats(group: int, head_dim: int) -> int:
    """Floats of what the function knows of the queries: two vectors of each, and their sums."""
    return 2 * group * (head_dim + 1)


@cache
def score_tile_address(tile: ScoreTile) -> int:
    """Machine code of ``void(tile, query, scores, means)``: the largest score of a page's heads.

    tile: address of codes, numbers and positions of ``TILE_PAGES`` pages; query: floats
    [2, G, d] and their sums [2, G]; scores: room for ``TILE_PAGES`` floats; means: room for
    [G, ``BLOCKS``, ``TILE_PAGES``], where asked for. The vectors are those that the summary is
    multiplied by: the positive and the negative part of a query for a box, the query and its
    squares for moments.
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
        self.at, self.query, self.scores, self.means = arguments
        self.lanes = min(TILE_PAGES, vector_lanes())
        most = 24 if vector_lanes() == 16 else 10  # sums that registers hold beside the codes
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
        """Scores of some pages for some heads."""
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
        """A channel's numbers of some pages, each with the part of the query that it goes with."""
        e, away = self.emit_, self.tile.head_dim * TILE_PAGES
        if self.tile.kind == "box":
            return [(e.widen(e.byte(line, n * away + page), 8, self.lanes)[0], n) for n in (0, 1)]
        pairs = range(BLOCKS // 2)
        means = [e.widen(e.byte(line, pair * away + page), 4, self.lanes) for pair in pairs]
        (above,) = e.widen(e.byte(line, len(pairs) * away + page), 8, self.lanes)
        return [*((mean, 0) for pair in means for mean in pair), (self.build.fmul(above, above), 1)]

    def _prefetch(self, line: Value) -> None:
        """Ask for the same channel of the next tile: between steps the weights push all of them out
        of the caches, and a tile is too short for the processor to see where it leads."""
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
        deviation = e.sqrt(variance)
        for block in range(BLOCKS):
            scale, zero, spread = numbers[3 * block : 3 * block + 3]
            mean = e.fma(products[block], scale, build.fmul(zero, total))
            if self.tile.has_means:
                square = build.fmul(variance, build.fmul(spread, spread))
                expected = e.fma(square, e.constant(0.5, square), mean)
                at = 4 * ((head * BLOCKS + block) * TILE_PAGES + page)
                e.store(expected, e.byte(self.means, at))
            away = build.fmul(deviation, spread)
            score = e.fma(away, e.constant(DEVIATIONS, away), mean)
            best = score if best is None else e.maximum(score, best)
        return best

    def _sum(self, part: int, head: int) -> Value:
        """The sum of one of a query's vectors, in all lanes."""
        e, tile = self.emit_, self.tile
        at = 4 * (2 * tile.group * tile.head_dim + part * tile.group + head)
        return e.splat(e.load(e.byte(self.query, at), FLOAT), self.lanes)

    def _number(self, index: int, page: int) -> Value:
        codes = CODE_BYTES[self.tile.kind] * self.tile.head_dim
        at = TILE_PAGES * (codes + 4 * index) + 4 * page
        return self.emit_.load(self.emit_.byte(self.at, at), vector(FLOAT, self.lanes))

    def _zeros(self) -> Value:
        return self.emit_.variable(ir.Constant(vector(FLOAT, self.lanes), [0.0] * self.lanes))
