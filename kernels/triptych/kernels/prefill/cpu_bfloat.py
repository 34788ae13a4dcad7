# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Prefill attention on the CPU in bfloat16, some queries of a head at a time.

Logits and weights of these queries stay in the cache: products of bfloat16 numbers are
added up in float32, softmax is computed in float32, and its weights are rounded to bfloat16 for the
product with the values.

The bits of a row do not depend on the other rows: each sum is in the order of the keys, and hidden
keys add zeros. Column sums of a head are added row after row.
"""

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic
from torch import Tensor

from triptych.kernels.codegen.amx import (
    add_bfloat_products,
    end_tiles,
    load_tile,
    store_tile,
    tile_config,
    use_tiles,
    zero_tile,
)
from triptych.kernels.codegen.native import multiplies_tiles
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_address,
    team_body,
    team_threads,
)
from triptych.kernels.codegen.simd import BFLOAT, FLOAT, I64, POINTER, Emitter, vector
from triptych.kernels.floats import BFLOAT as BFLOAT_KIND
from triptych.kernels.floats import FLOAT as FLOAT_KIND
from triptych.kernels.floats import (
    bfloat_pair,
    copy_floats,
    read_floats,
    round_floats,
    write_floats,
)
from triptych.kernels.prefill.cpu_softmax import HIDDEN, exponentiate_row

ROWS = 16 if multiplies_tiles() else 8
"""Queries of a block: as many as a tile has rows, or as there are registers for."""
TILE = 2 * LANES
"""Columns of a product that are computed together."""
PADDING = TILE
"""Numbers between rows of logits, so that columns of a tile do not compete for cache lines."""

COUNTER, QUERY, COUNT, HEADS, GROUP, DIM, KEY, VALUE, KNOWN, FIRST, OUT, MASK, MASK_HEAD = range(13)
SUMS, SUMS_STRIDE, SUMMED, SINKS, SCALE, KEY_HEAD, KEY_TOKEN, VALUE_HEAD, VALUE_TOKEN = range(
    13, 22
)
KEYS, VALUES, CONFIG = range(22, 25)
WORDS = 25
"""Words of a job. ``KEYS`` and ``VALUES`` are float32; ``KEY`` has tiles [d / 2, 32] of pairs of
channels, ``VALUE`` pairs of keys [N / 2, d]; both are of bfloat16, for each head, and ``d`` is
rounded up to whole tiles. ``CONFIG`` is for ``use_tiles``."""
_CONFIG = tile_config(LANES, 0, 5)


@intrinsic
def _multiply(typing_context, rows, row_bytes, columns, pair_bytes, pairs, out, out_bytes):
    """Product of a block of rows with 32 columns: float32 to ``out``.

    Both sides are pairs of bfloat16: a row has ``pairs`` of them, a multiple of 16, and each column
    one at a time.
    """
    product = _tile_product if multiplies_tiles() else _vector_product

    def emit(context, builder, signature, arguments):
        pointers = [builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 5)]
        product(Emitter(builder), *pointers, *(arguments[at] for at in (1, 3, 4, 6)))
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 7), emit


def _vector_product(emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes):
    builder, wide = emitter.build, vector(FLOAT, LANES)
    places = [(row, half) for row in range(ROWS) for half in range(2)]
    zero = ir.Constant(wide, [0.0] * LANES)
    sums = {place: emitter.variable(zero) for place in places}
    starts = [emitter.byte(rows, builder.mul(row_bytes, I64(row))) for row in range(ROWS)]
    with emitter.loop(pairs) as index:
        near = emitter.byte(columns, builder.mul(index, pair_bytes))
        kind = vector(BFLOAT, 2 * LANES)
        halves = [emitter.load(emitter.byte(near, 64 * half), kind) for half in range(2)]
        offset = builder.mul(index, I64(4))
        for row in range(ROWS):
            pair = emitter.splat_pair(emitter.byte(starts[row], offset))
            for half in range(2):
                slot = sums[row, half]
                before = builder.load(slot, typ=wide)
                builder.store(emitter.add_bfloat_pairs(before, halves[half], pair), slot)
    for (row, half), slot in sums.items():
        at = emitter.byte(out, builder.mul(out_bytes, I64(row)))
        emitter.store(builder.load(slot, typ=wide), emitter.byte(at, 64 * half))


def _tile_product(emitter, rows, columns, out, row_bytes, pair_bytes, pairs, out_bytes):
    builder, sums, left, right = emitter.build, (0, 1), 2, (3, 4)
    for tile in sums:
        zero_tile(emitter, tile)
    with emitter.loop(builder.udiv(pairs, I64(LANES))) as index:
        load_tile(emitter, left, emitter.byte(rows, builder.mul(index, I64(64))), row_bytes)
        near = emitter.byte(columns, builder.mul(index, builder.mul(pair_bytes, I64(LANES))))
        for half in range(2):
            load_tile(emitter, right[half], emitter.byte(near, 64 * half), pair_bytes)
            add_bfloat_products(emitter, sums[half], left, right[half])
    for half in range(2):
        store_tile(emitter, sums[half], emitter.byte(out, 64 * half), out_bytes)


@intrinsic
def _weigh(typing_context, powers, factor, sums, weights, vectors):
    """Multiply vectors of floats, add them to ``sums``, and round them to bfloat16 ``weights``."""

    def emit(context, builder, signature, arguments):
        emitter, kind = Emitter(builder), vector(FLOAT, LANES)
        powers, sums, weights = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 3))
        factor = emitter.splat(arguments[1], LANES)
        with emitter.loop(arguments[4]) as index:
            offset = builder.mul(index, I64(4 * LANES))
            weight = builder.fmul(emitter.load(emitter.byte(powers, offset), kind), factor)
            slot = emitter.byte(sums, offset)
            emitter.store(builder.fadd(emitter.load(slot, kind), weight), slot)
            target = emitter.byte(weights, builder.mul(index, I64(2 * LANES)))
            emitter.store(emitter.to_bfloats(weight), target)
        return context.get_dummy_value()

    word = types.int64
    return types.void(word, types.float32, word, word, word), emit


@kernel
def _wide(count, size):
    """``count`` rounded up to a multiple of ``size``."""
    return (count + size - 1) // size * size


@kernel
def _pack_keys(job, head, tile):
    dim, known = job[DIM], job[KNOWN]
    wide = _wide(dim, TILE)
    numbers = np.zeros(wide, np.float32)
    place = job[KEY] + 2 * wide * (head * _wide(known, TILE) + tile * TILE)
    pairs = carray(pointer(place), (wide // 2, TILE), np.uint32)
    for at in range(TILE):
        key, line = tile * TILE + at, numbers[:dim]
        line[:] = np.float32(0.0)
        if key < known:
            offset = head * job[KEY_HEAD] + key * job[KEY_TOKEN]
            read_floats(job[KEYS], FLOAT_KIND, offset, line)
            round_floats(line)
        words = numbers.view(np.uint32)
        for pair in range(wide // 2):
            pairs[pair, at] = bfloat_pair(words[2 * pair], words[2 * pair + 1])


@kernel
def _pack_values(job, head, tile):
    dim, known = job[DIM], job[KNOWN]
    wide = _wide(dim, TILE)
    numbers = np.zeros((2, wide), np.float32)
    for pair in range(tile * LANES, (tile + 1) * LANES):
        for at in range(2):
            value = 2 * pair + at
            line = numbers[at, :dim]
            line[:] = np.float32(0.0)
            if value < known:
                offset = head * job[VALUE_HEAD] + value * job[VALUE_TOKEN]
                read_floats(job[VALUES], FLOAT_KIND, offset, line)
                round_floats(line)
        words = numbers.view(np.uint32)
        place = job[VALUE] + 2 * wide * (head * _wide(known, TILE) + 2 * pair)
        pairs = carray(pointer(place), wide, np.uint32)
        for channel in range(wide):
            pairs[channel] = bfloat_pair(words[0, channel], words[1, channel])


@team_body
def _pack(address):
    """Take tiles of keys and values of a head from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    tiles = _wide(job[KNOWN], TILE) // TILE
    while True:
        index = fetch_add(address, 1)
        if index >= tiles * (job[HEADS] // job[GROUP]):
            break
        _pack_keys(job, index // tiles, index % tiles)
        _pack_values(job, index // tiles, index % tiles)


@kernel
def _attend_block(job, head, start, query, logits, weights, mixed, sums):
    """Attention of a block of queries of a head, or of the last ones."""
    dim, count = job[DIM], min(ROWS, job[COUNT] - start)
    known, wide = _wide(job[KNOWN], TILE), _wide(dim, TILE)
    seen = known if job[MASK] else _wide(job[FIRST] + start + count, TILE)
    for row in range(count):
        at = job[QUERY] + 2 * dim * ((start + row) * job[HEADS] + head)
        query[row, :dim] = carray(pointer(at), dim, np.uint16)
    keys = job[KEY] + 2 * wide * known * (head // job[GROUP])
    near, out, pitch = query.ctypes.data, logits.ctypes.data, logits.shape[1]
    for tile in range(seen // TILE):
        columns = keys + 2 * wide * TILE * tile
        _multiply(near, 2 * wide, columns, 4 * TILE, wide // 2, out + 4 * TILE * tile, 4 * pitch)
    for row in range(count):
        limit = known if job[MASK] else job[FIRST] + start + row + 1
        line = logits[row, :seen]
        if job[MASK]:
            at = job[MASK] + head // job[GROUP] * job[MASK_HEAD] + (start + row) * known
            hidden = carray(pointer(at), known, np.uint8)
            for column in range(known):
                line[column] = np.float32(HIDDEN) if hidden[column] else line[column]
        sink = job[SINKS] + 4 * head if job[SINKS] else 0
        factor = exponentiate_row(line, limit, np.float32(job.view(np.float64)[SCALE]), sink)
        vectors = _wide(limit, LANES) // LANES
        powers, target = out + 4 * pitch * row, weights.ctypes.data + 2 * pitch * row
        _weigh(powers, factor, sums.ctypes.data, target, vectors)
        weights[row, vectors * LANES : seen] = np.uint16(0)
    values = job[VALUE] + 2 * wide * known * (head // job[GROUP])
    near, out = weights.ctypes.data, mixed.ctypes.data
    for channel in range(0, wide, TILE):
        columns = values + 4 * channel
        _multiply(near, 2 * pitch, columns, 4 * wide, seen // 2, out + 4 * channel, 4 * wide)
    for row in range(count):
        offset = dim * ((start + row) * job[HEADS] + head)
        write_floats(mixed[row, :dim], job[OUT], BFLOAT_KIND, offset)


@team_body
def _work(address):
    """Take heads from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    known, dim = _wide(job[KNOWN], TILE), job[DIM]
    query = np.zeros((ROWS, _wide(dim, TILE)), np.uint16)
    logits = np.empty((ROWS, known + PADDING), np.float32)
    weights = np.zeros((ROWS, known + PADDING), np.uint16)
    mixed = np.empty((ROWS, _wide(dim, TILE)), np.float32)
    sums = np.zeros(known, np.float32)
    use_tiles(job[CONFIG])
    while True:
        head = fetch_add(address, 1)
        if head >= job[HEADS]:
            break
        if job[SUMS]:
            place = job[SUMS] + 4 * head * job[SUMS_STRIDE]
            given = carray(pointer(place), job[SUMMED], np.float32)
            copy_floats(given, sums[: len(given)])
        for start in range(0, job[COUNT], ROWS):
            _attend_block(job, head, start, query, logits, weights, mixed, sums)
        if job[SUMS]:
            copy_floats(sums, given)
    end_tiles()


@kernel
def _start(job, pack, body, team, threads):
    run_team(team, pack, job, threads)
    job[COUNTER] = 0
    run_team(team, body, job, threads)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scale: float,
    *,
    sinks: Tensor | None,
    sums: Tensor | None,
    hidden: Tensor | None,
) -> None:
    """Write attention of one sequence to ``out``, and add column sums to ``sums``.

    ``hidden``: keys that a query may not read; None: those after it, the last of which is the last
    query's.

    Shapes:  query, out [n, H, d]; key, value [KH, N, d]; sinks [H]; sums [H, N]; hidden [KH, n, N]
    Dtypes:  query, out bfloat16; key, value, sums float32; hidden bool
    """
    (count, heads, dim), (kv_heads, known, _) = query.shape, key.shape
    wide, tiles = -(-dim // TILE) * TILE, -(-known // TILE) * TILE
    packed = [torch.empty(kv_heads, tiles, wide, dtype=torch.bfloat16) for _ in range(2)]
    query, sinks = query.contiguous(), None if sinks is None else sinks.float().contiguous()
    mask = None if hidden is None else torch.ones(kv_heads, count, tiles, dtype=torch.bool)
    if hidden is not None and mask is not None:
        mask[:, :, :known] = hidden
    job = np.zeros(WORDS, np.int64)
    job[QUERY], job[OUT], job[COUNT], job[HEADS] = query.data_ptr(), out.data_ptr(), count, heads
    job[GROUP], job[DIM], job[KNOWN], job[FIRST] = heads // kv_heads, dim, known, known - count
    job[KEY], job[VALUE] = (tensor.data_ptr() for tensor in packed)
    job[KEYS], job[VALUES] = key.data_ptr(), value.data_ptr()
    job[KEY_HEAD], job[KEY_TOKEN] = key.stride()[:2]
    job[VALUE_HEAD], job[VALUE_TOKEN] = value.stride()[:2]
    if mask is not None:
        job[MASK], job[MASK_HEAD] = mask.data_ptr(), mask.stride(0)
    if sums is not None:
        job[SUMS], job[SUMS_STRIDE] = sums.data_ptr(), sums.stride(0)
        job[SUMMED] = min(sums.shape[1], known)
    job[SINKS] = 0 if sinks is None else sinks.data_ptr()
    job[CONFIG] = _CONFIG.ctypes.data
    job.view(np.float64)[SCALE] = scale
    _start(job, _pack.address, _work.address, team_address(), team_threads())
