# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Prefill attention on the CPU in bfloat16, eight queries of a head at a time.

Logits and weights of eight queries stay in the first-level cache: products of bfloat16 numbers are
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
from triptych.kernels.floats import bfloat_pair, read_floats, round_floats, write_floats
from triptych.kernels.prefill.cpu_softmax import HIDDEN, finish_row

ROWS = 8
"""Queries of a block."""
TILE = 2 * LANES
"""Columns of a product that are computed together."""

COUNTER, QUERY, COUNT, HEADS, GROUP, DIM, KEY, VALUE, KNOWN, FIRST, OUT, MASK, MASK_HEAD = range(13)
SUMS, SUMS_STRIDE, SUMMED, SINKS, SCALE, KEY_HEAD, KEY_TOKEN, VALUE_HEAD, VALUE_TOKEN = range(
    13, 22
)
KEYS, VALUES = range(22, 24)
WORDS = 24
"""Words of a job. ``KEYS`` and ``VALUES`` are float32; ``KEY`` has tiles [d / 2, 32] of pairs of
channels, ``VALUE`` pairs of keys [N / 2, d rounded up]; both are of bfloat16, for each head."""


@intrinsic(prefer_literal=True)
def _multiply(typing_context, rows, row_bytes, columns, pair_bytes, pairs, out, out_bytes, count):
    """Product of ``count`` rows, a literal, with 32 columns: float32 to ``out``.

    Both sides are pairs of bfloat16: a row has ``pairs`` of them, and each column one at a time.
    """
    size = count.literal_value

    def emit(context, builder, signature, arguments):
        emitter, wide = Emitter(builder), vector(FLOAT, LANES)
        rows, columns, out = (builder.inttoptr(arguments[at], POINTER) for at in (0, 2, 5))
        row_bytes, pair_bytes, pairs, out_bytes = (arguments[at] for at in (1, 3, 4, 6))
        places = [(row, half) for row in range(size) for half in range(2)]
        zero = ir.Constant(wide, [0.0] * LANES)
        sums = {place: emitter.variable(zero) for place in places}
        starts = [emitter.byte(rows, builder.mul(row_bytes, I64(row))) for row in range(size)]
        with emitter.loop(pairs) as index:
            near = emitter.byte(columns, builder.mul(index, pair_bytes))
            kind = vector(BFLOAT, 2 * LANES)
            halves = [emitter.load(emitter.byte(near, 64 * half), kind) for half in range(2)]
            offset = builder.mul(index, I64(4))
            for row in range(size):
                pair = emitter.splat_pair(emitter.byte(starts[row], offset))
                for half in range(2):
                    slot = sums[row, half]
                    before = builder.load(slot, typ=wide)
                    builder.store(emitter.add_bfloat_pairs(before, halves[half], pair), slot)
        for (row, half), slot in sums.items():
            at = emitter.byte(out, builder.mul(out_bytes, I64(row)))
            emitter.store(builder.load(slot, typ=wide), emitter.byte(at, 64 * half))
        return context.get_dummy_value()

    word = types.int64
    return types.void(*[word] * 7, count), emit


@intrinsic
def _round(typing_context, source, target, vectors):
    """Round vectors of floats to bfloat16."""

    def emit(context, builder, signature, arguments):
        emitter = Emitter(builder)
        source, target = (builder.inttoptr(item, POINTER) for item in arguments[:2])
        with emitter.loop(arguments[2]) as index:
            at = emitter.byte(source, builder.mul(index, I64(64)))
            rounded = emitter.to_bfloats(emitter.load(at, vector(FLOAT, LANES)))
            emitter.store(rounded, emitter.byte(target, builder.mul(index, I64(32))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@kernel
def _wide(count, size):
    """``count`` rounded up to a multiple of ``size``."""
    return (count + size - 1) // size * size


@kernel
def _pack_keys(job, head, tile):
    dim, known = job[DIM], job[KNOWN]
    numbers = np.empty(dim, np.float32)
    place = job[KEY] + 2 * dim * (head * _wide(known, TILE) + tile * TILE)
    pairs = carray(pointer(place), (dim // 2, TILE), np.uint32)
    for at in range(TILE):
        key = tile * TILE + at
        numbers[:] = np.float32(0.0)
        if key < known:
            offset = head * job[KEY_HEAD] + key * job[KEY_TOKEN]
            read_floats(job[KEYS], FLOAT_KIND, offset, numbers)
            round_floats(numbers)
        words = numbers.view(np.uint32)
        for pair in range(dim // 2):
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
    """Attention of eight queries of a head, or of the last ones."""
    dim, count = job[DIM], min(ROWS, job[COUNT] - start)
    known, wide = _wide(job[KNOWN], TILE), _wide(dim, TILE)
    seen = known if job[MASK] else _wide(job[FIRST] + start + count, TILE)
    for row in range(count):
        at = job[QUERY] + 2 * dim * ((start + row) * job[HEADS] + head)
        query[row, :] = carray(pointer(at), dim, np.uint16)
    keys = job[KEY] + 2 * dim * known * (head // job[GROUP])
    near, out = query.ctypes.data, logits.ctypes.data
    for tile in range(seen // TILE):
        columns = keys + 2 * dim * TILE * tile
        _multiply(near, 2 * dim, columns, 4 * TILE, dim // 2, out + 4 * TILE * tile, 4 * known, 8)
    for row in range(count):
        limit = known if job[MASK] else job[FIRST] + start + row + 1
        line = logits[row, :seen]
        if job[MASK]:
            at = job[MASK] + head // job[GROUP] * job[MASK_HEAD] + (start + row) * known
            hidden = carray(pointer(at), known, np.uint8)
            for column in range(known):
                line[column] = np.float32(HIDDEN) if hidden[column] else line[column]
        sink = job[SINKS] + 4 * head if job[SINKS] else 0
        finish_row(line, limit, np.float32(job.view(np.float64)[SCALE]), sink, sums)
        _round(logits[row].ctypes.data, weights[row].ctypes.data, seen // LANES)
    values = job[VALUE] + 2 * wide * known * (head // job[GROUP])
    near, out = weights.ctypes.data, mixed.ctypes.data
    for channel in range(0, wide, TILE):
        columns = values + 4 * channel
        _multiply(near, 2 * known, columns, 4 * wide, seen // 2, out + 4 * channel, 4 * wide, 8)
    for row in range(count):
        offset = dim * ((start + row) * job[HEADS] + head)
        write_floats(mixed[row, :dim], job[OUT], BFLOAT_KIND, offset)


@team_body
def _work(address):
    """Take heads from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    known, dim = _wide(job[KNOWN], TILE), job[DIM]
    query = np.zeros((ROWS, dim), np.uint16)
    logits = np.empty((ROWS, known), np.float32)
    weights = np.zeros((ROWS, known), np.uint16)
    mixed = np.empty((ROWS, _wide(dim, TILE)), np.float32)
    sums = np.zeros(known, np.float32)
    while True:
        head = fetch_add(address, 1)
        if head >= job[HEADS]:
            break
        if job[SUMS]:
            place = job[SUMS] + 4 * head * job[SUMS_STRIDE]
            given = carray(pointer(place), job[SUMMED], np.float32)
            sums[: len(given)] = given
        for start in range(0, job[COUNT], ROWS):
            _attend_block(job, head, start, query, logits, weights, mixed, sums)
        if job[SUMS]:
            given[:] = sums[: len(given)]


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
    packed = [torch.empty(kv_heads, tiles, size, dtype=torch.bfloat16) for size in (dim, wide)]
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
    job.view(np.float64)[SCALE] = scale
    _start(job, _pack.address, _work.address, team_address(), team_threads())
