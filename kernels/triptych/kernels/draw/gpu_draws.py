# pyright: basic, reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# Triton's language is not Python: the checker takes tiles for integers.
"""Triton kernel of sampling: a program draws the token of a row.

A logit, less the largest one and divided by the temperature, is at most 0. The bits of its
magnitude, as an integer, are in the order of the magnitudes: so a border is found bit by bit, by
counting or weighing the tokens whose bits are not above it.
"""

import triton
import triton.language as tl

LAST = tl.constexpr(0x7F800000)
"""Bits of infinity: all tokens are below."""


@triton.jit
def draw_rows(logits, stride, settings, vocab, out, BLOCK: tl.constexpr):
    """Sample one token. Grid: rows. ``settings``: None, or float64 [5, rows]."""
    row = tl.program_id(0)
    at = logits + row.to(tl.int64) * stride
    best, token, is_finite = likeliest(at, vocab, BLOCK)
    if settings is not None:
        rows = tl.num_programs(0)
        temperature = tl.load(settings + row)
        if is_finite & (temperature > 0):
            top_k = tl.load(settings + rows + row)
            top_p = tl.load(settings + 2 * rows + row)
            log_min_p = tl.load(settings + 3 * rows + row).to(tl.float32)
            uniform = tl.load(settings + 4 * rows + row)
            heat = temperature.to(tl.float32)
            most = tl.cast(tl.abs(log_min_p), tl.int32, bitcast=True)
            border = tl.full((), LAST, tl.int32)
            if (top_k > 0) & (top_k < vocab):
                border = border_of(at, vocab, best, heat, border, top_k, False, BLOCK)
            if top_p < 1:
                _count, mass = kept_below(at, vocab, best, heat, border, BLOCK)
                border = border_of(at, vocab, best, heat, border, top_p * mass, True, BLOCK)
            border = tl.minimum(border, most)
            token = drawn(at, vocab, best, heat, border, uniform, token, BLOCK)
    tl.store(out + row, tl.where(is_finite, token, -1).to(tl.int64))


@triton.jit
def likeliest(at, vocab, BLOCK: tl.constexpr):
    """The largest logit, its token (the first of several), and whether all is well.

    That is: the largest logit is finite, and none is NaN.
    """
    best = tl.full((), float("-inf"), tl.float32)
    token = tl.full((), 0, tl.int32)
    wrong = tl.full((), 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        numbers = tl.load(at + ids, mask=ids < vocab, other=float("-inf"))
        wrong += tl.sum((numbers != numbers).to(tl.int32), 0)
        numbers = tl.where(numbers != numbers, float("-inf"), numbers)
        peak = tl.max(numbers, 0)
        first = tl.min(tl.where(numbers == peak, ids, 2**31 - 1), 0)
        token = tl.where(peak > best, first, token)
        best = tl.maximum(best, peak)
    is_finite = (wrong == 0) & (best > float("-inf")) & (best < float("inf"))
    return best, token, is_finite


@triton.jit
def weights_below(at, ids, vocab, best, heat, border):
    """Which of some tokens are not below a border, and their weights, float64; others have 0."""
    numbers = tl.load(at + ids, mask=ids < vocab, other=float("-inf"))
    scaled = (numbers - best) / heat
    bits = tl.cast(tl.abs(scaled), tl.int32, bitcast=True)
    kept = (ids < vocab) & (bits <= border)
    return kept, tl.where(kept, tl.exp(scaled), 0.0).to(tl.float64)


@triton.jit
def kept_below(at, vocab, best, heat, border, BLOCK: tl.constexpr):
    """How many tokens a border keeps, and the sum of their weights."""
    counts = tl.zeros([BLOCK], tl.int32)
    masses = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        kept, weights = weights_below(at, ids, vocab, best, heat, border)
        counts += kept.to(tl.int32)
        masses += weights
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def border_of(at, vocab, best, heat, most, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The border, at most ``most``, that keeps the fewest tokens with a count or mass of at least
    ``wanted``. ``most`` keeps as much.
    """
    low = tl.full((), -1, tl.int32)
    high = most
    below = tl.full((), 0, tl.int32)
    upto = tl.full((), 2**30, tl.int32)
    # With one token between the two, the border is found.
    while (high - low > 1) & (upto - below > 1):
        middle = low + (high - low) // 2
        count, mass = kept_below(at, vocab, best, heat, middle, BLOCK)
        reached = count.to(tl.float64) >= wanted
        if BY_MASS:
            reached = mass >= wanted
        high = tl.where(reached, middle, high)
        upto = tl.where(reached, count, upto)
        low = tl.where(reached, low, middle)
        below = tl.where(reached, below, count)
    return high


@triton.jit
def drawn(at, vocab, best, heat, border, uniform, token, BLOCK: tl.constexpr):
    """The first token whose cumulative weight exceeds its share; ``token`` if there is none."""
    _count, total = kept_below(at, vocab, best, heat, border, BLOCK)
    target = uniform * total
    before = tl.full((), 0.0, tl.float64)
    first = tl.full((), 2**31 - 1, tl.int32)
    last = token
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        _kept, weights = weights_below(at, ids, vocab, best, heat, border)
        cumulative = before + tl.cumsum(weights, 0)
        has_weight = weights > 0
        first = tl.minimum(
            first, tl.min(tl.where(has_weight & (cumulative > target), ids, 2**31 - 1), 0)
        )
        last = tl.maximum(last, tl.max(tl.where(has_weight, ids, -1), 0))
        before += tl.sum(weights, 0)
    # Sums are rounded: if none exceeds the target, it is the last token that can be drawn.
    return tl.where(first < 2**31 - 1, first, last)
