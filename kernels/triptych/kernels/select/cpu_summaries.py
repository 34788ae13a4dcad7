# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled computation of page summaries, in the threads of torch."""

import numpy as np
from numba import carray, types

from triptych.kernels.codec.vectors import PART_WORDS, RANGE, decode, part_of
from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import (
    fetch_add,
    from_half,
    kernel,
    pointer,
    run_team,
    summing_kernel,
    team_body,
)
from triptych.kernels.select.summary import BLOCKS, POSITIONS, TILE_PAGES

COUNTER, BAD, ITEMS, ARENA, PAGE_COUNT, PAGE_BYTES, HEAD_DIM, IS_BOX = range(8)
CODES, NUMBERS, MIXED, PAGE_TOKENS, POSITIONS_AT = range(8, 13)
"""``CODES``, ``NUMBERS``: vectors and numbers of a page. ``MIXED``: rotation block size, or 0."""
KEY_PART = 13
PAGES, ROWS, COLUMNS, MEMORY, SLOTS, KV_HEADS, TILES, BY_SLOT, BY_HEAD = range(
    KEY_PART + PART_WORDS, KEY_PART + PART_WORDS + 9
)
SUMMARIZE_WORDS = BY_HEAD + 1

CHUNK = 8
"""Pages that a thread takes at a time."""
TOP, BOX_TOP, MEAN_TOP = np.float32(255.0), np.float32(254.0), np.float32(15.0)
OUTWARDS, ROUNDING = np.float32(0.01), np.float32(2.0**-20)


@kernel
def run_summaries(job, team, body, threads):
    """Summarize pages in a team; False if a page id, a row or a column is out of range."""
    run_team(team, body, job, threads if job[ITEMS] > CHUNK else 1)
    return job[BAD] == 0


@kernel
def _load(part, page, keys, scales, codes, numbers):
    """Decode the keys of the page at address ``page`` into ``keys``, [d, tokens]."""
    tokens = keys.shape[1]
    if part.token_stride != 1 or part.groups != 1 or part.kind != RANGE:
        for token in range(tokens):
            decode(part, page, token, codes, numbers)
            keys[:, token] = numbers
        return
    metadata = carray(pointer(page + part.metadata), (tokens, 2), np.uint16)
    for token in range(tokens):
        scales[0, token], scales[1, token] = (
            from_half(metadata[token, 0]), from_half(metadata[token, 1])
        )  # fmt: skip
    units, mask = len(keys) * part.bits // 8, np.uint8(2**part.bits - 1)
    for unit in range(units):
        packed = carray(pointer(page + part.codes + unit * part.byte_stride), tokens, np.uint8)
        for share in range(8 // part.bits):
            _widen(packed, np.uint8(share * part.bits), mask, scales, keys[share * units + unit])


@kernel
def _widen(packed, shift, mask, scales, channel):
    for token in range(len(channel)):
        code = np.float32((packed[token] >> shift) & mask)
        channel[token] = code * scales[0, token] + scales[1, token]


@summing_kernel
def _box(keys, first, second):
    for channel in range(len(first)):
        low = high = keys[channel, 0]
        for token in range(keys.shape[1]):
            low, high = min(low, keys[channel, token]), max(high, keys[channel, token])
        first[channel], second[channel] = high, low


@kernel
def _unrotate(vectors, mixed):
    """Multiply vectors [d, tokens] by the Hadamard matrix in place."""
    # A slice costs more than a sum, so adjacent channels of one butterfly step are one slice.
    flat, tokens = vectors.reshape(vectors.size), vectors.shape[1]
    span = tokens
    while span < mixed * tokens:
        for low in range(0, len(flat), 2 * span):
            _butterfly(flat[low : low + span], flat[low + span : low + 2 * span])
        span *= 2
    share = np.float32(1.0 / np.sqrt(mixed))
    for number in range(len(flat)):
        flat[number] *= share


@kernel
def _butterfly(low, high):
    for each in range(len(low)):
        number, other = low[each], high[each]
        low[each], high[each] = number + other, number - other


@kernel
def block_of(block, tokens):
    """``summary.block_ends``"""
    start = block * tokens // BLOCKS
    return start, max(start + 1, (block + 1) * tokens // BLOCKS)


@summing_kernel
def _moments(keys, means, deviation, factors):
    """``reference.moments`` in two passes, since means can be far larger than deviations."""
    whole, covered = np.float32(0.0), 0
    deviation[:] = np.float32(0.0)
    for block in range(BLOCKS):
        start, end = block_of(block, keys.shape[1])
        share, squares = np.float32(1.0 / (end - start)), np.float32(0.0)
        for channel in range(len(deviation)):
            total = spread = np.float32(0.0)
            for token in range(start, end):
                total += keys[channel, token]
            mean = total * share
            for token in range(start, end):
                away = keys[channel, token] - mean
                spread += away * away
            means[block, channel] = mean
            deviation[channel] += spread
            squares += spread
        factors[block] = squares * share
        covered += end - start
    for channel in range(len(deviation)):
        square = deviation[channel] / np.float32(covered)
        deviation[channel] = np.sqrt(square)
        whole += square
    for block in range(BLOCKS):
        factors[block] = np.sqrt(factors[block] / whole) if whole > 0 else np.float32(0.0)


@kernel
def _codes(tile, page, index, dim):
    """Codes of one vector of a page: every ``TILE_PAGES``-th byte of the result."""
    at = tile + index * dim * TILE_PAGES + page
    return carray(pointer(at), dim * TILE_PAGES, np.uint8)


@kernel
def _numbers(tile, page, codes, count):
    """Numbers of a page: every ``TILE_PAGES``-th element of the result."""
    at = tile + TILE_PAGES * codes + 4 * page
    return carray(pointer(at), count * TILE_PAGES, np.float32)


@kernel
def _write_moments(tile, page, means, deviation, factors):
    dim = len(deviation)
    numbers = _numbers(tile, page, (BLOCKS // 2 + 1) * dim, 3 * BLOCKS)
    for block in range(BLOCKS):
        mean = means[block]
        low, high = _ends(mean)
        scale = _step(high - low, MEAN_TOP)
        codes, shift = _codes(tile, page, block // 2, dim), np.uint8(block % 2 * 4)
        for channel in range(dim):
            code = _code((mean[channel] - low) / scale, MEAN_TOP) << shift
            kept = codes[channel * TILE_PAGES] if shift else np.uint8(0)
            codes[channel * TILE_PAGES] = kept | np.uint8(code)
        numbers[3 * block * TILE_PAGES] = scale
        numbers[(3 * block + 1) * TILE_PAGES] = low
    scale, codes = _step(_ends(deviation)[1], TOP), _codes(tile, page, BLOCKS // 2, dim)
    for channel in range(dim):
        codes[channel * TILE_PAGES] = _code(deviation[channel] / scale, TOP)
    for block in range(BLOCKS):
        numbers[(3 * block + 2) * TILE_PAGES] = scale * factors[block]


@kernel
def _write_box(tile, page, most, least):
    """Write a box with codes rounded outwards."""
    dim = len(most)
    numbers = _numbers(tile, page, 2 * dim, 4)
    for index in range(2):
        from_above = index == 1
        vector = least if from_above else most
        low, high = _ends(vector)
        scale = (high - low) / BOX_TOP + max(abs(high), abs(low)) * ROUNDING
        if not scale > 0:
            scale = np.float32(1.0)
        codes = _codes(tile, page, index, dim)
        for channel in range(dim):
            away = high - vector[channel] if from_above else vector[channel] - low
            codes[channel * TILE_PAGES] = _code(np.ceil(away / scale + OUTWARDS), TOP)
        numbers[2 * index * TILE_PAGES] = -scale if from_above else scale
        numbers[(2 * index + 1) * TILE_PAGES] = high if from_above else low


@kernel
def _ends(vector):
    low = high = vector[0]
    for number in vector:
        low, high = min(low, number), max(high, number)
    return low, high


@kernel
def _step(range_, top):
    """Scale of codes 0 to ``top``; 1 if all numbers are equal."""
    return range_ / top if range_ > 0 else np.float32(1.0)


@kernel
def _code(steps, top):
    return np.uint8(min(max(np.rint(steps), np.float32(0.0)), top))


@kernel
def _write_positions(at, page, source, tokens):
    positions = carray(pointer(source), tokens, np.int32)
    ends = carray(pointer(at + 4 * page), TILE_PAGES + 1, np.int32)
    ends[0], ends[TILE_PAGES] = positions.min(), positions.max()


@team_body
def summarize(address):
    job = carray(pointer(address), SUMMARIZE_WORDS, np.int64)
    part = part_of(job[KEY_PART : KEY_PART + PART_WORDS])
    count, dim = job[ITEMS], job[HEAD_DIM]
    pages = carray(pointer(job[PAGES]), count, np.int32)
    rows = carray(pointer(job[ROWS]), count, np.int32)
    columns = carray(pointer(job[COLUMNS]), count, np.int32)
    codes, numbers = np.empty(dim, np.uint8), np.empty(dim, np.float32)
    first, second = np.empty(dim, np.float32), np.empty(dim, np.float32)
    means, factors = np.empty((BLOCKS, dim), np.float32), np.empty(BLOCKS, np.float32)
    before_positions = TILE_PAGES * (job[CODES] * dim + 4 * job[NUMBERS])
    tile_bytes = before_positions + TILE_PAGES * 4 * POSITIONS
    keys = np.empty((dim, job[PAGE_TOKENS]), np.float32)
    scales = np.empty((2, job[PAGE_TOKENS]), np.float32)
    while True:
        start = fetch_add(address, CHUNK)
        if start >= count:
            break
        for index in range(start, min(count, start + CHUNK)):
            page, column = np.int64(pages[index]), np.int64(columns[index])
            slot, head = np.int64(rows[index]) // job[KV_HEADS], rows[index] % job[KV_HEADS]
            is_page, is_row = 0 <= page < job[PAGE_COUNT], 0 <= slot < job[SLOTS]
            if not (is_page and is_row and 0 <= column < job[TILES] * TILE_PAGES):
                job[BAD] = 1
                continue
            near = job[ARENA] + page * job[PAGE_BYTES]
            _load(part, near, keys, scales, codes, numbers)
            tile = job[MEMORY] + slot * job[BY_SLOT] + head * job[BY_HEAD]
            tile += column // TILE_PAGES * tile_bytes
            if job[MIXED]:
                _unrotate(keys, job[MIXED])
            if job[IS_BOX]:
                _box(keys, first, second)
                _write_box(tile, column % TILE_PAGES, first, second)
            else:
                _moments(keys, means, first, factors)
                _write_moments(tile, column % TILE_PAGES, means, first, factors)
            at = tile + before_positions
            _write_positions(at, column % TILE_PAGES, near + job[POSITIONS_AT], keys.shape[1])


CALLS = CalledKernels((run_summaries, (types.int64[::1], *[types.int64] * 3)))
"""How Python calls the kernel."""
