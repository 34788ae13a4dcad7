# pyright: basic, reportMissingTypeStubs=false
# llvmlite ships no types.
"""Scores of the pages of one tile of summaries as vector code."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir

from triptych.kernels.native import compile_function, vector_lanes
from triptych.kernels.select.summary import DEVIATIONS, TILE_PAGES, Kind
from triptych.kernels.simd import FLOAT, I64, POINTER, Emitter, Value, vector


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """What a compiled function is specialised for."""

    kind: Kind
    group: int
    """Query heads per KV head."""
    head_dim: int
    has_means: bool = False
    """Also says what logits of a page mean on average, as ``reference.expected`` does."""


def query_floats(group: int, head_dim: int) -> int:
    """Floats of what the function knows of the queries: two vectors of each, and their sums."""
    return 2 * group * (head_dim + 1)


@cache
def score_tile_address(tile: ScoreTile) -> int:
    """Machine code of ``void(tile, query, scores, means)``: the largest score of a page's heads.

    tile: address of codes, numbers and positions of ``TILE_PAGES`` pages; query: floats
    [2, G, d] and their sums [2, G]; scores: room for ``TILE_PAGES`` floats; means: room for
    [G, ``TILE_PAGES``], where asked for. The vectors are those that the two of the summary are
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
        self.heads_at_once = 10 if vector_lanes() == 16 else 5

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
        sums = [(self._zeros(), self._zeros()) for _ in heads]
        with e.loop(I64(dim)) as channel:
            line = e.byte(self.at, self.build.mul(channel, I64(TILE_PAGES)))
            codes = [
                e.widen(e.byte(line, part * dim * TILE_PAGES + page), 8, self.lanes)[0]
                for part in range(2)
            ]
            if self.tile.kind == "moments":
                codes[1] = self.build.fmul(codes[1], codes[1])
            for pair, head in zip(sums, heads, strict=True):
                for part, slot in enumerate(pair):
                    near = e.byte(self.query, 4 * (part * self.tile.group + head) * dim)
                    number = e.load(self.build.gep(near, [channel], source_etype=FLOAT), FLOAT)
                    product = e.fma(codes[part], e.splat(number, self.lanes), self.build.load(slot))
                    self.build.store(product, slot)
        numbers = [self._number(index, page) for index in range(4)]
        return [
            self._score(page, head, *(self.build.load(slot) for slot in pair), *numbers)
            for pair, head in zip(sums, heads, strict=True)
        ]

    def _score(
        self, page: int, head: int, first: Value, second: Value, scale: Value, *others: Value
    ) -> Value:
        e, (zero, *other) = self.emit_, others
        score = e.fma(first, scale, self.build.fmul(zero, self._sum(0, head)))
        if self.tile.kind == "box":
            return self.build.fadd(
                score, e.fma(second, other[0], self.build.fmul(other[1], self._sum(1, head)))
            )
        variance = self.build.fmul(second, self.build.fmul(other[0], other[0]))
        if self.tile.has_means:
            mean = e.fma(variance, e.constant(0.5, variance), score)
            e.store(mean, e.byte(self.means, 4 * (head * TILE_PAGES + page)))
        deviation = e.sqrt(variance)
        return e.fma(deviation, e.constant(DEVIATIONS, deviation), score)

    def _sum(self, part: int, head: int) -> Value:
        """The sum of one of a query's vectors, in all lanes."""
        e, tile = self.emit_, self.tile
        at = 4 * (2 * tile.group * tile.head_dim + part * tile.group + head)
        return e.splat(e.load(e.byte(self.query, at), FLOAT), self.lanes)

    def _number(self, index: int, page: int) -> Value:
        at = TILE_PAGES * (2 * self.tile.head_dim + 4 * index) + 4 * page
        return self.emit_.load(self.emit_.byte(self.at, at), vector(FLOAT, self.lanes))

    def _zeros(self) -> Value:
        return self.emit_.variable(ir.Constant(vector(FLOAT, self.lanes), [0.0] * self.lanes))
