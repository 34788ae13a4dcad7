# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Prefill attention on the CPU in bfloat16, some queries of a head at a time.

Logits and weights of these queries and of some keys stay in the cache: products of bfloat16 numbers
are added up in float32. Weights are powers of two, computed as bfloat16 numbers (``soften``), less
the largest logit of the keys until then. Their product with the values is divided by their sum.

The bits of a row do not depend on the other rows: each sum is in the order of the keys, and hidden
keys add zeros. Threads take ``SHARE`` queries of a head at a time, so that nine heads on two
threads take half of the time. Column sums of these queries are added row after row,
and then those of all shares, so that no bit depends on the number of threads.

Source: online softmax, FlashAttention (Dao et al., 2022)

Keys and values are numbers in memory, or, in a job, those of raw pages.
"""

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.kernels.codec.cpu import OUT_OF_RANGE
from triptych.kernels.codegen.amx import end_tiles, tile_config, use_tiles
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.numba_runtime import (
    CACHE_LINE,
    LANES,
    fetch_add,
    kernel,
    line_address,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.floats import (
    BFLOAT,
    FLOAT,
    HALF,
    KINDS,
    read_floats,
    write_floats,
)
from triptych.kernels.pages import check_arena
from triptych.kernels.prefill.cpu_blocks import COLUMNS as TILE
from triptych.kernels.prefill.cpu_blocks import (
    ROWS,
    add_weights,
    hide,
    multiply,
    soften,
)
from triptych.kernels.prefill.cpu_moves import clear, move, pair_rows, total_of, transpose_pairs
from triptych.kernels.prefill.cpu_softmax import HIDDEN, LOG2_E
from triptych.kernels.prompt_parts import (
    COUNT,
    FIRST,
    PART_WORDS,
    START,
    SUMMED,
    SUMS,
    SUMS_FROM,
    SUMS_HEAD,
    SUMS_LAYER,
    TABLE,
    TABLE_HEAD,
    TABLE_LAYER,
    WIDTH,
    PartTable,
)

STRIPE = 1024
"""Keys whose logits are computed together, so that those of a block of queries stay in the cache.
With 256 a prompt of 3,584 tokens takes 7 % longer: each row has a largest logit to be found."""
SHARE = 128
"""Queries of a head that one thread computes: whole blocks of ``ROWS``."""
PADDING = TILE
"""Numbers between rows of logits, so that columns of a tile do not compete for cache lines."""
ZERO, ONE = np.float32(0.0), np.float32(1.0)
LEAST = np.float32(-(2.0**100))
"""Less than the logits of all keys that are seen, and far above a hidden one."""

COUNTER, HEADS, GROUP, DIM, SCALE, WINDOW, CONFIG, PACK, QUERY, QUERY_KIND, QUERY_TOKEN = range(11)
QUERY_HEAD, OUT, SINKS, MASK, MASK_HEAD, LAYER, PARTS, KEYS, VALUES, STRIDES = range(11, 21)
ARENA, PAGE_COUNT, PAGE_BYTES, PAGE_TOKENS, KEY_ROWS, KEY_ROW, VALUE_ROWS, VALUE_ROW = range(24, 32)
BAD, PART, KNOWN, KEY, VALUE, BROKEN, ADDED = range(32, 39)
WORDS = 39
"""Words of a job. ``PARTS``: address of the parts of prompts, see ``PartTable``.

With ``KEYS`` there is one part, whose ``KEYS`` and ``VALUES`` are float32; ``STRIDES`` of their
heads and tokens are in elements. Else keys and values are float16 numbers in the pages of an arena:
``KEY_ROWS`` is their offset in a page, and ``KEY_ROW`` the distance of two tokens, in bytes.

Set for each part: ``PART`` is its address, ``KNOWN`` its tokens and the earlier ones. ``KEY`` has
tiles [d / 2, 32] of pairs of channels, ``VALUE`` pairs of keys [N / 2, d]; both are of bfloat16,
for each head, and ``d`` is rounded up to whole tiles. ``ADDED`` has the column sums [H, shares, N]
of each share of the queries, N rounded up; 0: none are asked for. ``BROKEN``: whether a key is not
finite, which makes the outputs NaN: powers of NaN are 0.
"""
FEW = 1 << 13
"""Up to so many logits one thread computes alone."""
_CONFIG = tile_config(LANES, 0, 0)


@kernel
def _wide(count, size):
    """``count`` rounded up to a multiple of ``size``."""
    return (count + size - 1) // size * size


@kernel
def _place(job, head, token, is_key):
    """The address of the key or the value of a token, and the kind of its numbers; 0 if unknown."""
    if job[KEYS]:
        place, strides = (KEYS, STRIDES) if is_key else (VALUES, STRIDES + 2)
        return job[place] + 4 * (head * job[strides] + token * job[strides + 1]), FLOAT
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    entry, row = token // job[PAGE_TOKENS], token % job[PAGE_TOKENS]
    table = part[TABLE] + job[LAYER] * part[TABLE_LAYER] + head * part[TABLE_HEAD]
    ids = carray(pointer(table), part[WIDTH], np.int32)
    if entry >= len(ids) or not 0 <= ids[entry] < job[PAGE_COUNT]:
        job[BAD] = 1
        return 0, HALF
    page = job[ARENA] + np.int64(ids[entry]) * job[PAGE_BYTES]
    offsets = KEY_ROWS if is_key else VALUE_ROWS
    return page + job[offsets] + row * job[offsets + 1], HALF


@kernel
def _move(source, source_kind, target, target_kind, count, factor):
    """Move a vector of numbers times ``factor``; whether they are finite."""
    checked = move(source, source_kind, target, target_kind, count // LANES, factor)
    if count % LANES > 0:
        checked += _move_rest(source, source_kind, target, target_kind, count, factor)
    return checked == ZERO


@kernel
def _move_rest(source, source_kind, target, target_kind, count, factor):
    rest, first = np.empty(count % LANES, np.float32), count // LANES * LANES
    read_floats(source, source_kind, first, rest)
    checked = np.sum(ZERO * rest)
    rest *= factor
    write_floats(rest, target, target_kind, first)
    return checked


@kernel
def _round_rows(job, head, tile, is_key, rows):
    """Round the keys or values of a tile to bfloat16; 0 behind the last one."""
    size = 2 * _wide(job[DIM], TILE)
    for at in range(TILE):
        token, line = tile * TILE + at, rows + size * at
        source, kind = (0, HALF) if token >= job[KNOWN] else _place(job, head, token, is_key)
        if source == 0:
            clear(line, size // CACHE_LINE)
        elif not _move(source, kind, line, BFLOAT, job[DIM], ONE) and is_key:
            job[BROKEN] = 1


@kernel
def _pack_keys(job, head, tile, rows):
    wide = _wide(job[DIM], TILE)
    _round_rows(job, head, tile, True, rows)
    place = job[KEY] + 2 * wide * (head * _wide(job[KNOWN], TILE) + tile * TILE)
    for half in range(2):
        for block in range(wide // TILE):
            near = rows + 2 * wide * LANES * half + 4 * LANES * block
            target = place + 4 * (TILE * LANES * block + LANES * half)
            transpose_pairs(near, 2 * wide, target, 4 * TILE)


@kernel
def _pack_values(job, head, tile, rows):
    wide = _wide(job[DIM], TILE)
    _round_rows(job, head, tile, False, rows)
    place = job[VALUE] + 2 * wide * (head * _wide(job[KNOWN], TILE) + tile * TILE)
    for pair in range(LANES):
        near = rows + 4 * wide * pair
        pair_rows(near, near + 2 * wide, place + 4 * wide * pair, wide // LANES)


@team_body
def _pack(address):
    """Take tiles of keys and values of a head from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    tiles = _wide(job[KNOWN], TILE) // TILE
    # An array of numba's counts its views, with an atomic operation each; an address does not.
    memory = np.zeros(TILE * _wide(job[DIM], TILE) + CACHE_LINE // 2, np.uint16)
    near = line_address(memory)
    while True:
        index = fetch_add(address, 1)
        if index >= tiles * (job[HEADS] // job[GROUP]):
            break
        _pack_keys(job, index // tiles, index % tiles, near)
        _pack_values(job, index // tiles, index % tiles, near)
    memory[0] = 0  # numba frees an array after its last use


@kernel
def _multiply_keys(job, query, head, begin, end, logits):
    """Products of a block of queries with the keys from ``begin`` to ``end``, whole tiles."""
    wide, pitch = _wide(job[DIM], TILE), logits.shape[1]
    keys = job[KEY] + 2 * wide * _wide(job[KNOWN], TILE) * (head // job[GROUP])
    near, out = query.ctypes.data, logits.ctypes.data
    for key in range(begin, end, TILE):
        columns, target = keys + 2 * wide * key, out + 4 * (key - begin)
        multiply(near, 2 * wide, columns, 4 * TILE, wide // 2, target, 4 * pitch, 0)


@kernel
def _add_values(job, weights, head, begin, end, mixed):
    """Add products of a block of weights with the values from ``begin`` to ``end``."""
    wide = _wide(job[DIM], TILE)
    values = job[VALUE] + 2 * wide * _wide(job[KNOWN], TILE) * (head // job[GROUP])
    near, out = weights.ctypes.data, mixed.ctypes.data
    pairs, rows = (end - begin) // 2, values + 2 * wide * begin
    for channel in range(0, wide, TILE):
        columns, target = rows + 4 * channel, out + 4 * channel
        multiply(near, weights.strides[0], columns, 4 * wide, pairs, target, 4 * wide, 1)


@kernel
def _hide_masked(job, head, row, begin, line):
    """Hide the logits of the keys from ``begin`` on that the mask of a query has."""
    known = _wide(job[KNOWN], TILE)
    at = job[MASK] + head // job[GROUP] * job[MASK_HEAD] + row * known + begin
    hidden = carray(pointer(at), len(line), np.uint8)
    for column in range(len(line)):
        line[column] = np.float32(HIDDEN) if hidden[column] else line[column]


@kernel
def _begin(job, head, start, count, query, mixed, totals, most):
    """Read the queries of a block, and set what is added up for them to nothing."""
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    size = 4 if job[QUERY_KIND] == FLOAT else 2
    for row in range(count):
        token = part[START] + start + row
        source = job[QUERY] + size * (token * job[QUERY_TOKEN] + head * job[QUERY_HEAD])
        _move(source, job[QUERY_KIND], query[row].ctypes.data, BFLOAT, job[DIM], ONE)
    clear(mixed.ctypes.data, mixed.nbytes // CACHE_LINE)
    clear(totals.ctypes.data, totals.nbytes // CACHE_LINE)
    most[:] = LEAST


@kernel
def _end(job, head, start, count, mixed, totals, most):
    """Write the results of a block; ``totals`` get what weights are to be multiplied by."""
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    dim = job[DIM]
    for row in range(count):
        total, less = total_of(totals[row].ctypes.data), ONE
        if job[SINKS]:
            sink = carray(pointer(job[SINKS]), job[HEADS], np.float32)[head] * LOG2_E
            largest_ = max(sink, most[row])
            less = np.exp2(most[row] - largest_)
            total = total * less + np.exp2(sink - largest_)
        inverse = np.float32(np.nan) if job[BROKEN] else less / total
        totals[row, 0] = inverse
        target = job[OUT] + 2 * dim * ((part[START] + start + row) * job[HEADS] + head)
        _move(mixed[row].ctypes.data, FLOAT, target, BFLOAT, dim, inverse)


@kernel
def _stripe_end(key, seen):
    """Where the stripe of a key ends: at the same keys for all rows, or behind the last one."""
    return min((key // STRIPE + 1) * STRIPE, seen)


@kernel
def _attend_block(job, head, start, query, logits, weights, mixed, totals, most, shifts):
    """Attention of a block of queries of a head, or of the last ones, some keys at a time.

    ``shifts``: what the logits of some keys were reduced by, for each row.
    """
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    count, known = min(ROWS, part[COUNT] - start), _wide(job[KNOWN], TILE)
    position = part[FIRST] + start
    begin = max(0, position - job[WINDOW] + 1) // TILE * TILE if job[WINDOW] else 0
    seen = known if job[MASK] else _wide(position + count, TILE)
    factor = np.float32(job.view(np.float64)[SCALE]) * LOG2_E
    _begin(job, head, start, count, query, mixed, totals, most)
    key = begin
    while key < seen:
        end = _stripe_end(key, seen)
        near = weights[:, key:] if part[SUMS] else weights
        _multiply_keys(job, query, head, key, end, logits)
        for row in range(count):
            at, limit = logits[row].ctypes.data, position + row + 1
            if job[MASK]:
                _hide_masked(job, head, start + row, key, logits[row, : end - key])
            elif limit < end:
                hide(at, max(limit - key, 0), end - key)
            if job[WINDOW] and key < limit - job[WINDOW]:
                hide(at, 0, min(limit - job[WINDOW], end) - key)
        soften(
            logits.ctypes.data, 4 * logits.shape[1], near.ctypes.data, 2 * weights.shape[1],
            (count, (end - key) // TILE), factor, most.ctypes.data, totals.ctypes.data,
            mixed.ctypes.data, mixed.shape[1] // LANES,
        )  # fmt: skip
        shifts[:, key // STRIPE] = most
        _add_values(job, near, head, key, end, mixed)
        key = end
    _end(job, head, start, count, mixed, totals, most)
    return begin, seen


@kernel
def _add_sums(part, begin, seen, count, weights, totals, most, shifts, sums):
    """Add the weights of a block to the sums of keys, row after row."""
    begin = max(begin, part[SUMS_FROM] // TILE * TILE)
    for row in range(count):
        key = begin
        while key < seen:
            end = _stripe_end(key, seen)
            factor = np.exp2(shifts[row, key // STRIPE] - most[row]) * totals[row, 0]
            near = weights.ctypes.data + 2 * (row * weights.shape[1] + key)
            add_weights(near, factor, sums.ctypes.data + 4 * key, (end - key) // TILE)
            key = end


@team_body
def _work(address):
    """Take shares of the queries of a head from the shared counter until none is left.

    The last queries of a head, which see most keys, come first.
    """
    job = carray(pointer(address), WORDS, np.int64)
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    shares = _wide(part[COUNT], SHARE) // SHARE
    known, wide = _wide(job[KNOWN], TILE), _wide(job[DIM], TILE)
    blocks, pitch = _wide(known, STRIPE) // STRIPE, STRIPE + PADDING
    kept = known + PADDING if part[SUMS] else pitch
    size = ROWS * (4 * pitch + 2 * kept + 6 * wide + 4 * (LANES + 1 + blocks))
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    at = line_address(memory)
    logits = carray(pointer(at), (ROWS, pitch), np.float32)
    at += logits.nbytes
    weights = carray(pointer(at), (ROWS, kept), np.uint16)
    at += weights.nbytes
    mixed = carray(pointer(at), (ROWS, wide), np.float32)
    at += mixed.nbytes
    query = carray(pointer(at), (ROWS, wide), np.uint16)
    at += query.nbytes
    totals = carray(pointer(at), (ROWS, LANES), np.float32)
    at += totals.nbytes
    most = carray(pointer(at), ROWS, np.float32)
    at += most.nbytes
    shifts = carray(pointer(at), (ROWS, blocks), np.float32)
    use_tiles(job[CONFIG])
    while True:
        index = fetch_add(address, 1)
        if index >= job[HEADS] * shares:
            break
        head, share = index // shares, shares - 1 - index % shares
        place = job[ADDED] + 4 * known * (head * shares + share)
        sums = carray(pointer(place), known if job[ADDED] else 0, np.float32)
        sums[:] = ZERO
        for start in range(share * SHARE, min((share + 1) * SHARE, part[COUNT]), ROWS):
            begin, seen = _attend_block(
                job, head, start, query, logits, weights, mixed, totals, most, shifts
            )
            if job[ADDED]:
                rows = min(ROWS, part[COUNT] - start)
                _add_sums(part, begin, seen, rows, weights, totals, most, shifts, sums)
    end_tiles()
    memory[0] = 0  # numba frees an array after its last use


@kernel
def _give_sums(job):
    """Add up the column sums of all shares, in the order of their queries, for the part."""
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    shares, known = _wide(part[COUNT], SHARE) // SHARE, _wide(job[KNOWN], TILE)
    for head in range(job[HEADS]):
        added = job[ADDED] + 4 * (known * head * shares + part[SUMS_FROM])
        sums = carray(pointer(added), part[SUMMED], np.float32)
        for share in range(1, shares):
            sums += carray(pointer(added + 4 * known * share), part[SUMMED], np.float32)
        place = part[SUMS] + job[LAYER] * part[SUMS_LAYER] + head * part[SUMS_HEAD]
        given = carray(pointer(place), part[SUMMED], np.float32)
        given += sums


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    parts, job[BAD] = carray(pointer(job[PARTS]), 1, np.int64)[0], 0
    wide = _wide(job[DIM], TILE)
    for index in range(parts):
        job[PART] = job[PARTS] + 8 * (1 + PART_WORDS * index)
        part = carray(pointer(job[PART]), PART_WORDS, np.int64)
        job[KNOWN] = part[FIRST] + part[COUNT]
        size = job[HEADS] // job[GROUP] * _wide(job[KNOWN], TILE) * wide
        packed = np.empty(2 * size + CACHE_LINE // 2, np.uint16)
        job[KEY] = line_address(packed)
        job[VALUE] = job[KEY] + 2 * size
        few = job[HEADS] * part[COUNT] * job[KNOWN] < FEW
        shares = _wide(part[COUNT], SHARE) // SHARE if part[SUMS] else 0
        added = np.empty(job[HEADS] * shares * _wide(job[KNOWN], TILE) + LANES, np.float32)
        job[ADDED] = line_address(added) if part[SUMS] else 0
        job[COUNTER], job[BROKEN] = 0, 0
        run_team(team, job[PACK], job, 1 if few else threads)
        job[COUNTER] = 0
        run_team(team, body, job, 1 if few else threads)
        if part[SUMS]:
            _give_sums(job)
        packed[0], added[0] = 0, 0  # numba frees an array after its last use
    return job[BAD]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    scale: float,
    *,
    window: int = 0,
    sinks: Tensor | None,
    sums: Tensor | None,
    hidden: Tensor | None,
) -> None:
    """Write attention of one sequence to ``out``, and add column sums to ``sums``.

    ``hidden``: keys that a query may not read, beside those after it and before its window; None:
    no others. The last key is the last query's.

    Shapes:  query, out [n, H, d]; key, value [KH, N, d]; sinks [H]; sums [H, N]; hidden [KH, n, N]
    Dtypes:  query, out bfloat16; key, value, sums float32; hidden bool
    """
    count, (kv_heads, known, _) = len(query), key.shape
    tiles = -(-known // TILE) * TILE
    mask = None if hidden is None else torch.ones(kv_heads, count, tiles, dtype=torch.bool)
    if hidden is not None and mask is not None:
        mask[:, :, :known] = hidden
    part = PartTable.of_tensors(count, known, sums)
    job = _words(query, kv_heads, out, scale, window if hidden is None else 0, part, 0)
    job[KEYS], job[VALUES] = key.data_ptr(), value.data_ptr()
    job[STRIDES : STRIDES + 4] = *key.stride()[:2], *value.stride()[:2]
    if mask is not None:
        job[MASK], job[MASK_HEAD] = mask.data_ptr(), mask.stride(0)
    sinks = None if sinks is None else sinks.float().contiguous()
    job[SINKS] = 0 if sinks is None else sinks.data_ptr()
    Job("prefill_attention", _start.address, job, _work.address, (mask, sinks, part)).run()


def attend_parts_job(
    query: Tensor,
    kv_heads: int,
    arena: Tensor,
    raw: PageLayout,
    layer: int,
    scale: float,
    window: int,
    out: Tensor,
    parts: PartTable,
) -> Job:
    """The job of ``prefill_attention`` for the parts that its step has, whose keys and values, new
    ones too, are in pages. ``layer``: index into the tables of parts.

    Shapes:  query (T, H, d) with dense heads; out (T, H, d) dense
    Dtypes:  out bfloat16
    """
    check_arena(arena, raw)
    if raw.format.is_quantized or raw.parts > 1 or query.stride(2) != 1 or query.dtype not in KINDS:
        raise ConfigError(f"attend_parts: {query.dtype} over pages of {raw.format.name}")
    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.shape != query.shape:
        raise ConfigError(f"attend_parts: output {out.dtype} {tuple(out.shape)}")
    job = _words(query, kv_heads, out, scale, window, parts, layer)
    job[ARENA], job[PAGE_COUNT], job[PAGE_BYTES] = arena.data_ptr(), arena.shape[0], raw.size_bytes
    bytes_, offsets = 2 * query.shape[2], raw.offsets
    job[PAGE_TOKENS : VALUE_ROW + 1] = raw.tokens, offsets[0], bytes_, offsets[2], bytes_
    kept = query, arena, out, parts
    return Job("attend_parts", _start.address, job, _work.address, kept, OUT_OF_RANGE)


def _words(
    query: Tensor,
    kv_heads: int,
    out: Tensor,
    scale: float,
    window: int,
    parts: PartTable,
    layer: int,
) -> NDArray[np.int64]:
    """The words that both kinds of jobs have."""
    _, heads, dim = query.shape
    job = np.zeros(WORDS, np.int64)
    job[HEADS], job[GROUP], job[DIM], job[WINDOW] = heads, heads // kv_heads, dim, window
    job.view(np.float64)[SCALE] = scale
    job[CONFIG], job[PACK] = _CONFIG.ctypes.data, _pack.address
    job[QUERY], job[QUERY_KIND] = query.data_ptr(), KINDS[query.dtype]
    job[QUERY_TOKEN], job[QUERY_HEAD] = query.stride()[:2]
    job[OUT], job[LAYER], job[PARTS] = out.data_ptr(), layer, parts.address
    return job
