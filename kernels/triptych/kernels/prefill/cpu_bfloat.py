# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Prefill attention on the CPU in bfloat16, some queries of a head at a time.

Logits and weights of these queries stay in the cache: products of bfloat16 numbers are added up in
float32, and softmax is computed in float32. Its powers are rounded to bfloat16 for the product with
the values, which is divided by their sum.

The bits of a row do not depend on the other rows: each sum is in the order of the keys, and hidden
keys add zeros. Column sums of a head are added row after row.

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
    bfloat_pair,
    read_floats,
    round_floats,
    write_floats,
)
from triptych.kernels.pages import check_arena
from triptych.kernels.prefill.cpu_blocks import COLUMNS as TILE
from triptych.kernels.prefill.cpu_blocks import (
    ROWS,
    add_weights,
    exponentiate,
    hide,
    largest,
    multiply,
)
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

PADDING = TILE
"""Numbers between rows of logits, so that columns of a tile do not compete for cache lines."""

COUNTER, HEADS, GROUP, DIM, SCALE, WINDOW, CONFIG, PACK, QUERY, QUERY_KIND, QUERY_TOKEN = range(11)
QUERY_HEAD, OUT, SINKS, MASK, MASK_HEAD, LAYER, PARTS, KEYS, VALUES, STRIDES = range(11, 21)
ARENA, PAGE_COUNT, PAGE_BYTES, PAGE_TOKENS, KEY_ROWS, KEY_ROW, VALUE_ROWS, VALUE_ROW = range(24, 32)
BAD, PART, KNOWN, KEY, VALUE = range(32, 37)
WORDS = 37
"""Words of a job. ``PARTS``: address of the parts of prompts, see ``PartTable``.

With ``KEYS`` there is one part, whose ``KEYS`` and ``VALUES`` are float32; ``STRIDES`` of their
heads and tokens are in elements. Else keys and values are float16 numbers in the pages of an arena:
``KEY_ROWS`` is their offset in a page, and ``KEY_ROW`` the distance of two tokens, in bytes.

Set for each part: ``PART`` is its address, ``KNOWN`` its tokens and the earlier ones. ``KEY`` has
tiles [d / 2, 32] of pairs of channels, ``VALUE`` pairs of keys [N / 2, d]; both are of bfloat16,
for each head, and ``d`` is rounded up to whole tiles.
"""
FEW = 1 << 13
"""Up to so many logits one thread computes alone."""
_CONFIG = tile_config(LANES, 0, 0)


@kernel
def _wide(count, size):
    """``count`` rounded up to a multiple of ``size``."""
    return (count + size - 1) // size * size


@kernel
def _read(job, head, token, is_key, numbers):
    """Read the key or the value of a token as float32."""
    if job[KEYS]:
        place, strides = (KEYS, STRIDES) if is_key else (VALUES, STRIDES + 2)
        offset = head * job[strides] + token * job[strides + 1]
        read_floats(job[place], FLOAT, offset, numbers)
        return
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    entry, row = token // job[PAGE_TOKENS], token % job[PAGE_TOKENS]
    table = part[TABLE] + job[LAYER] * part[TABLE_LAYER] + head * part[TABLE_HEAD]
    ids = carray(pointer(table), part[WIDTH], np.int32)
    if entry >= len(ids) or not 0 <= ids[entry] < job[PAGE_COUNT]:
        job[BAD] = 1
        return
    page = job[ARENA] + np.int64(ids[entry]) * job[PAGE_BYTES]
    offsets = KEY_ROWS if is_key else VALUE_ROWS
    read_floats(page + job[offsets] + row * job[offsets + 1], HALF, 0, numbers)


@kernel
def _read_rounded(job, head, token, is_key, numbers):
    """Read the key or the value of a token, rounded to bfloat16; 0 behind the last one."""
    numbers[:] = np.float32(0.0)
    if token < job[KNOWN]:
        line = numbers[: job[DIM]]
        _read(job, head, token, is_key, line)
        round_floats(line)


@kernel
def _pack_keys(job, head, tile, memory):
    wide = _wide(job[DIM], TILE)
    place = job[KEY] + 2 * wide * (head * _wide(job[KNOWN], TILE) + tile * TILE)
    pairs = carray(pointer(place), (wide // 2, TILE), np.uint32)
    numbers = carray(pointer(memory), wide, np.float32)
    for at in range(TILE):
        _read_rounded(job, head, tile * TILE + at, True, numbers)
        words = numbers.view(np.uint32)
        for pair in range(wide // 2):
            pairs[pair, at] = bfloat_pair(words[2 * pair], words[2 * pair + 1])


@kernel
def _pack_values(job, head, tile, memory):
    wide = _wide(job[DIM], TILE)
    numbers = carray(pointer(memory), (2, wide), np.float32)
    for pair in range(tile * LANES, (tile + 1) * LANES):
        for at in range(2):
            _read_rounded(job, head, 2 * pair + at, False, numbers[at])
        words = numbers.view(np.uint32)
        place = job[VALUE] + 2 * wide * (head * _wide(job[KNOWN], TILE) + 2 * pair)
        pairs = carray(pointer(place), wide, np.uint32)
        for channel in range(wide):
            pairs[channel] = bfloat_pair(words[0, channel], words[1, channel])


@team_body
def _pack(address):
    """Take tiles of keys and values of a head from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    tiles = _wide(job[KNOWN], TILE) // TILE
    # An array of numba's counts its views, with an atomic operation each; an address does not.
    memory = np.empty(2 * _wide(job[DIM], TILE) + CACHE_LINE // 4, np.float32)
    near = line_address(memory)
    while True:
        index = fetch_add(address, 1)
        if index >= tiles * (job[HEADS] // job[GROUP]):
            break
        _pack_keys(job, index // tiles, index % tiles, near)
        _pack_values(job, index // tiles, index % tiles, near)
    memory[0] = np.float32(0.0)  # numba frees an array after its last use


@kernel
def _multiply_keys(job, query, head, begin, seen, logits):
    """Products of a block of queries with the keys from ``begin`` to ``seen``, whole tiles."""
    wide, pitch = _wide(job[DIM], TILE), logits.shape[1]
    keys = job[KEY] + 2 * wide * _wide(job[KNOWN], TILE) * (head // job[GROUP])
    near, out, block = query.ctypes.data, logits.ctypes.data, 2 * wide * TILE
    key = begin
    while key < seen:
        columns, target = keys + 2 * wide * key, out + 4 * key
        if key + TILE < seen:
            multiply(near, 2 * wide, columns, 4 * TILE, wide // 2, target, 4 * pitch, block, 2)
            key += 2 * TILE
        else:
            multiply(near, 2 * wide, columns, 4 * TILE, wide // 2, target, 4 * pitch, block, 1)
            key += TILE


@kernel
def _multiply_values(job, weights, head, begin, seen, mixed):
    """Products of a block of weights with the values from ``begin`` to ``seen``, whole tiles."""
    wide, pitch = _wide(job[DIM], TILE), weights.shape[1]
    values = job[VALUE] + 2 * wide * _wide(job[KNOWN], TILE) * (head // job[GROUP])
    near, out = weights.ctypes.data + 2 * begin, mixed.ctypes.data
    pairs, rows = (seen - begin) // 2, values + 2 * wide * begin
    channel = 0
    while channel < wide:
        columns, target = rows + 4 * channel, out + 4 * channel
        if channel + TILE < wide:
            multiply(near, 2 * pitch, columns, 4 * wide, pairs, target, 4 * wide, 4 * TILE, 2)
            channel += 2 * TILE
        else:
            multiply(near, 2 * pitch, columns, 4 * wide, pairs, target, 4 * wide, 4 * TILE, 1)
            channel += TILE


@kernel
def _soften(job, head, first, limit, line, weights, sums):
    """Replace the logits of a row by powers of 2, in ``weights`` as bfloat16.

    The row sees keys from ``first`` on, and ``limit`` of all. Returns what the powers are to be
    multiplied by; ``sums`` of keys get the products, if the part has sums.
    """
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    at, target = line.ctypes.data, weights.ctypes.data
    start, end = first // LANES, _wide(limit, LANES) // LANES
    hide(at, limit, end * LANES)
    hide(at, start * LANES, first)
    factor = np.float32(job.view(np.float64)[SCALE]) * LOG2_E
    most, rest = largest(at, start, end) * factor, np.float32(0.0)
    if job[SINKS]:
        sink = carray(pointer(job[SINKS]), job[HEADS], np.float32)[head] * LOG2_E
        most = max(most, sink)
        rest = np.exp2(sink - most)
    kept = min(max(start, part[SUMS_FROM] // LANES if part[SUMS] else end), end - 1)
    masked = end - 1
    if job[MASK] or first > 0:
        kept = masked = start
    total = exponentiate(at, target, (start, kept, masked, end), factor, most)
    inverse = np.float32(1.0) / (total + rest)
    if part[SUMS]:
        add_weights(at, inverse, sums.ctypes.data, kept, end)
    return inverse


@kernel
def _hide_masked(job, head, row, line):
    """Hide the logits of the keys that the mask of a query has."""
    at = job[MASK] + head // job[GROUP] * job[MASK_HEAD] + row * len(line)
    hidden = carray(pointer(at), len(line), np.uint8)
    for column in range(len(line)):
        line[column] = np.float32(HIDDEN) if hidden[column] else line[column]


@kernel
def _attend_block(job, head, start, query, logits, weights, mixed, factors, sums):
    """Attention of a block of queries of a head, or of the last ones."""
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    dim, count, known = job[DIM], min(ROWS, part[COUNT] - start), _wide(job[KNOWN], TILE)
    position = part[FIRST] + start
    begin = max(0, position - job[WINDOW] + 1) // TILE * TILE if job[WINDOW] else 0
    seen = known if job[MASK] else _wide(position + count, TILE)
    line = mixed[0, :dim]
    for row in range(count):
        token = part[START] + start + row
        offset = token * job[QUERY_TOKEN] + head * job[QUERY_HEAD]
        read_floats(job[QUERY], job[QUERY_KIND], offset, line)
        write_floats(line, query.ctypes.data, BFLOAT, row * query.shape[1])
    _multiply_keys(job, query, head, begin, seen, logits)
    for row in range(count):
        limit = position + row + 1
        first = max(0, limit - job[WINDOW]) if job[WINDOW] else 0
        if job[MASK]:
            _hide_masked(job, head, start + row, logits[row, :known])
            limit = known
        factors[row] = _soften(job, head, first, limit, logits[row], weights[row], sums)
        weights[row, begin : first // LANES * LANES] = np.uint16(0)
        weights[row, _wide(limit, LANES) : seen] = np.uint16(0)
    _multiply_values(job, weights, head, begin, seen, mixed)
    for row in range(count):
        line = mixed[row, :dim]
        line *= factors[row]
        offset = dim * ((part[START] + start + row) * job[HEADS] + head)
        write_floats(line, job[OUT], BFLOAT, offset)


@team_body
def _work(address):
    """Take heads of a part from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    part = carray(pointer(job[PART]), PART_WORDS, np.int64)
    known, wide = _wide(job[KNOWN], TILE), _wide(job[DIM], TILE)
    pitch = known + PADDING
    memory = np.zeros(ROWS * (6 * pitch + 6 * wide + 4) + 4 * known + CACHE_LINE, np.uint8)
    at = line_address(memory)
    logits = carray(pointer(at), (ROWS, pitch), np.float32)
    at += logits.nbytes
    weights = carray(pointer(at), (ROWS, pitch), np.uint16)
    at += weights.nbytes
    mixed = carray(pointer(at), (ROWS, wide), np.float32)
    at += mixed.nbytes
    query = carray(pointer(at), (ROWS, wide), np.uint16)
    at += query.nbytes
    factors = carray(pointer(at), ROWS, np.float32)
    at += factors.nbytes
    sums, first = carray(pointer(at), known, np.float32), part[SUMS_FROM]
    use_tiles(job[CONFIG])
    while True:
        head = fetch_add(address, 1)
        if head >= job[HEADS]:
            break
        place = part[SUMS] + job[LAYER] * part[SUMS_LAYER] + head * part[SUMS_HEAD]
        given = carray(pointer(place), part[SUMMED], np.float32)
        sums[:] = np.float32(0.0)
        for start in range(0, part[COUNT], ROWS):
            _attend_block(job, head, start, query, logits, weights, mixed, factors, sums)
        for token in range(part[SUMMED]):
            given[token] += sums[first + token]
    end_tiles()
    memory[0] = 0  # numba frees an array after its last use


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
        job[COUNTER] = 0
        run_team(team, job[PACK], job, 1 if few else threads)
        job[COUNTER] = 0
        run_team(team, body, job, 1 if few else threads)
        packed[0] = 0  # numba frees an array after its last use
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
