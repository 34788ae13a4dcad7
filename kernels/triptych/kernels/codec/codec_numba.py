# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Compiled codec kernels over many token slots, in the threads of torch."""

from collections import namedtuple

import numpy as np
from numba import carray, types

from triptych.kernels.codec.page_vectors import encode_keys, encode_values
from triptych.kernels.codec.quantizer import REQUANTIZE
from triptych.kernels.codec.vectors import (
    PART_WORDS,
    RANGE,
    decode,
    encode,
    pack,
    part_of,
    recode,
    round_vector,
)
from triptych.kernels.codec.whole_vectors import halve_whole, quantize_whole, round_whole
from triptych.kernels.codegen.jobs import job_start
from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import (
    CACHE_LINE,
    fetch_add,
    kernel,
    line_address,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.floats import FLOAT, HALF, read_floats

Form = namedtuple("Form", "tokens scores positions page_bytes parts keys values")
"""A page layout: tokens per page, offsets of scores and positions, bytes of a page, pages in one of
the arena, and ``Part`` of keys, values. Offsets are ``UNTRACKED`` if there are none."""
UNTRACKED = -1
FORM_WORDS = 5 + 2 * PART_WORDS

SHARED_WORDS = 6
COUNTER, BAD, ITEMS, ARENA, PAGE_COUNT, HEAD_DIM = range(SHARED_WORDS)
"""Indices of the first words of every job; ``COUNTER`` and ``BAD`` are 0 at the start."""

STORE_FORM = SHARED_WORDS
KEY, VALUE, KIND, KV_HEADS, TOKEN_STRIDE, HEAD_STRIDE, VALUE_TOKEN_STRIDE = range(
    STORE_FORM + FORM_WORDS, STORE_FORM + FORM_WORDS + 7
)
VALUE_HEAD_STRIDE, POSITIONS, SCORES = range(VALUE_TOKEN_STRIDE + 1, VALUE_TOKEN_STRIDE + 4)
PAGES, ROWS = range(SCORES + 1, SCORES + 3)
STORE_WORDS = ROWS + 1

TABLE_WORDS = 6
"""Address of the first page id; strides of slots, heads, ids; number of slots and of ids."""
APPEND_TABLE = SCORES + 1
APPEND_SLOTS, APPEND_PLACES = range(APPEND_TABLE + TABLE_WORDS, APPEND_TABLE + TABLE_WORDS + 2)
APPEND_WORDS = APPEND_PLACES + 1

SOURCE_FORM = SHARED_WORDS
TARGET_FORM = SOURCE_FORM + FORM_WORDS
KEY_CONVERSION, VALUE_CONVERSION = range(TARGET_FORM + FORM_WORDS, TARGET_FORM + FORM_WORDS + 2)
CONVERSION_WORDS = VALUE_CONVERSION + 1
SOURCE_PAGES, SOURCE_ROWS, TARGET_PAGES, TARGET_ROWS = range(CONVERSION_WORDS, CONVERSION_WORDS + 4)
TRANSCODE_WORDS = TARGET_ROWS + 1

SOURCE_TABLE = CONVERSION_WORDS
TARGET_TABLE = SOURCE_TABLE + TABLE_WORDS
SLOTS, HEADS, MOST, RUN, RUNS, AT_ONCE = range(
    TARGET_TABLE + TABLE_WORDS, TARGET_TABLE + TABLE_WORDS + 6
)
PLACES, ROW_STRIDE, HEAD_PLACES, TO, TO_ROW_STRIDE, TO_HEAD_PLACES = range(AT_ONCE + 1, AT_ONCE + 7)
MOVE_WORDS = TO_HEAD_PLACES + 1

LOAD_FORM = SHARED_WORDS
TABLE, TABLE_STRIDE, WIDTH, TOKENS, LONGEST, OUT_KEY, OUT_VALUE, OUT_POSITIONS = range(
    LOAD_FORM + FORM_WORDS, LOAD_FORM + FORM_WORDS + 8
)
LOAD_WORDS = OUT_POSITIONS + 1

# A job of ``round_tokens`` has no arena behind its first three words.
ROUND_DIM, ROUND_KIND, ROUND_HEADS, ROUND_KEY, ROUND_VALUE, ROUND_STRIDES = range(3, 9)
ROUND_QUANTIZED, ROUND_KEY_BITS, ROUND_KEY_GROUPS, ROUND_VALUE_BITS, ROUND_VALUE_GROUPS = range(
    ROUND_STRIDES + 4, ROUND_STRIDES + 9
)
ROUND_IS_FLOAT, ROUND_OUT_KEY, ROUND_OUT_VALUE = range(
    ROUND_VALUE_GROUPS + 1, ROUND_VALUE_GROUPS + 4
)
ROUND_WORDS = ROUND_OUT_VALUE + 1

CHUNK = 64
"""Items that a thread takes at a time."""


SCRATCH = 8
"""Bytes of scratch memory beside those of a vector."""


@kernel
def scratch_of(memory, dim):
    """Scratch memory of a thread: a float32 vector, its codes, and metadata of two numbers.

    ``memory``: ``5 * dim + SCRATCH`` bytes and a cache line. The views do not keep it: numba counts
    those that do, with an atomic operation for each function that gets one.
    """
    near = line_address(memory)
    numbers = carray(pointer(near), dim, np.float32)
    metadata = carray(pointer(near + 4 * dim), 2, np.uint16)
    return numbers, carray(pointer(near + 4 * dim + SCRATCH), dim, np.uint8), metadata


@kernel
def run(job, team, body, threads, alone):
    """Run a job in a team of threads; up to ``alone`` items in the calling thread.

    Returns: False if a page id or a row is out of range
    """
    run_team(team, body, job, threads if job[ITEMS] > alone else 1)
    return job[BAD] == 0


@kernel
def form_of(words):
    keys, values = part_of(words[5:]), part_of(words[5 + PART_WORDS :])
    return Form(words[0], words[1], words[2], words[3], words[4], keys, values)


@kernel
def is_slot(job, form, page, row):
    return 0 <= page < job[PAGE_COUNT] * form.parts and 0 <= row < form.tokens


@kernel
def word_at(address, index):
    """A view of the int32 word ``index`` words after ``address``; scores are copied as bits."""
    return carray(pointer(address + 4 * np.int64(index)), 1, np.int32)


@kernel
def _page_in(table, slot, head, place, room):
    """Page id of token number ``place`` of a head row, -1 if out of range, and its row."""
    address, slot_stride, head_stride, stride, slots, width = table
    column = place // np.int32(room)
    row = place - column * np.int32(room)
    if not (0 <= slot < slots and 0 <= column < width):
        return np.int32(-1), row
    return word_at(address, slot * slot_stride + head * head_stride + column * stride)[0], row


@kernel
def _table(words):
    return words[0], words[1], words[2], words[3], words[4], words[5]


@kernel
def _quantize(address, kind, part, page, row, codes):
    """Encode a vector that fits in registers; False, and nothing is done, for others."""
    if part.kind != RANGE or part.groups != 1 or part.bits == 16:
        return False
    metadata, top = page + part.metadata + 4 * row, np.float32((1 << part.bits) - 1)
    to, dim, limited = codes.ctypes.data, len(codes), part.limited
    if not quantize_whole(address, kind, to, metadata, dim, top, limited):
        return False
    pack(codes, part, page + part.codes + row * part.token_stride)
    return True


@kernel
def _recode(conversion, source, old, old_row, target, new, new_row, codes, numbers):
    """``recode``, in registers where the source has 16 bits or numbers are limited."""
    if conversion == REQUANTIZE and source.bits == 16:
        address = old + source.codes + old_row * source.token_stride
        if _quantize(address, HALF, target, new, new_row, codes):
            return
    elif conversion == REQUANTIZE and target.limited:
        decode(source, old, old_row, codes, numbers)
        if _quantize(numbers.ctypes.data, FLOAT, target, new, new_row, codes):
            return
    recode(conversion, source, old, old_row, target, new, new_row, codes, numbers)


@kernel
def encode_at(address, kind, offset, part, page, row, codes, numbers):
    """Read a vector and encode it."""
    if part.bits == 16:
        source = address + (4 if kind == FLOAT else 2) * offset
        target = page + part.codes + row * part.token_stride
        if halve_whole(source, kind, target, len(numbers)):
            return
    elif _quantize(address + (4 if kind == FLOAT else 2) * offset, kind, part, page, row, codes):
        return
    read_floats(address, kind, offset, numbers)
    encode(numbers, part, page, row, codes)


@kernel
def _store(job, form, page_id, row, token, head, codes, numbers):
    """Encode one head of a token into a slot; without scores in the job the score is 0.

    ``row`` is an int64 in all calls, since numba compiles a function for each set of types.
    """
    if not is_slot(job, form, page_id, row):
        job[BAD] = 1
        return
    page = job[ARENA] + np.int64(page_id) * form.page_bytes
    offset = token * job[TOKEN_STRIDE] + head * job[HEAD_STRIDE]
    encode_at(job[KEY], job[KIND], offset, form.keys, page, row, codes, numbers)
    offset = token * job[VALUE_TOKEN_STRIDE] + head * job[VALUE_HEAD_STRIDE]
    encode_at(job[VALUE], job[KIND], offset, form.values, page, row, codes, numbers)
    if form.scores == UNTRACKED:
        return
    word_at(page + form.positions, row)[0] = word_at(job[POSITIONS], token)[0]
    score = word_at(page + form.scores, row)
    score[0] = word_at(job[SCORES], token * job[KV_HEADS] + head)[0] if job[SCORES] else 0


@team_body
def store(address):
    job = carray(pointer(address), STORE_WORDS, np.int64)
    form = form_of(job[STORE_FORM : STORE_FORM + FORM_WORDS])
    items = job[ITEMS]
    pages = carray(pointer(job[PAGES]), items, np.int32)
    rows = carray(pointer(job[ROWS]), items, np.int32)
    memory = np.empty(5 * job[HEAD_DIM] + SCRATCH + CACHE_LINE, np.uint8)
    numbers, codes, _ = scratch_of(memory, job[HEAD_DIM])
    while True:
        start = fetch_add(address, CHUNK)
        if start >= items:
            break
        for item in range(start, min(items, start + CHUNK)):
            if pages[item] == -1:
                continue
            token, head = item // job[KV_HEADS], item % job[KV_HEADS]
            _store(job, form, pages[item], np.int64(rows[item]), token, head, codes, numbers)
    memory[0] = 0  # numba frees an array after its last use


@job_start
def start_append(words, body, team, threads):
    job = carray(pointer(words), APPEND_WORDS, np.int64)
    job[COUNTER], job[BAD] = 0, 0
    run_team(team, body, job, threads if job[ITEMS] > CHUNK else 1)
    return job[BAD]


@team_body
def append(address):
    job = carray(pointer(address), APPEND_WORDS, np.int64)
    form = form_of(job[STORE_FORM : STORE_FORM + FORM_WORDS])
    table = _table(job[APPEND_TABLE : APPEND_TABLE + TABLE_WORDS])
    memory = np.empty(5 * job[HEAD_DIM] + SCRATCH + CACHE_LINE, np.uint8)
    numbers, codes, _ = scratch_of(memory, job[HEAD_DIM])
    items = job[ITEMS]
    while True:
        start = fetch_add(address, CHUNK)
        if start >= items:
            break
        for item in range(start, min(items, start + CHUNK)):
            token, head = item // job[KV_HEADS], item % job[KV_HEADS]
            slot = np.int64(word_at(job[APPEND_SLOTS], token)[0])
            place = word_at(job[APPEND_PLACES], token)[0]
            page, row = _page_in(table, slot, head, place, form.tokens)
            _store(job, form, page, row, token, head, codes, numbers)
    memory[0] = 0  # numba frees an array after its last use


@kernel
def _tracked(form, page, row):
    """The bits of the score of a token, and its position; 0 if tokens are not tracked."""
    if form.scores == UNTRACKED:
        return np.int32(0), np.int32(0)
    return word_at(page + form.scores, row)[0], word_at(page + form.positions, row)[0]


@kernel
def _transcode(job, source, old_page, old_row, target, new_page, new_row, codes, numbers):
    """Re-encode the token of one slot into another; a slot out of range sets ``BAD``."""
    if not (is_slot(job, source, old_page, old_row) and is_slot(job, target, new_page, new_row)):
        job[BAD] = 1
        return
    old = job[ARENA] + np.int64(old_page) * source.page_bytes
    new = job[ARENA] + np.int64(new_page) * target.page_bytes
    _recode(
        job[KEY_CONVERSION], source.keys, old, old_row, target.keys, new, new_row, codes, numbers
    )
    _recode(
        job[VALUE_CONVERSION],
        source.values,
        old,
        old_row,
        target.values,
        new,
        new_row,
        codes,
        numbers,
    )
    if target.scores == UNTRACKED:
        return
    score, position = _tracked(source, old, old_row)
    word_at(new + target.scores, new_row)[0] = score
    word_at(new + target.positions, new_row)[0] = position


@team_body
def transcode(address):
    job = carray(pointer(address), TRANSCODE_WORDS, np.int64)
    source = form_of(job[SOURCE_FORM : SOURCE_FORM + FORM_WORDS])
    target = form_of(job[TARGET_FORM : TARGET_FORM + FORM_WORDS])
    items = job[ITEMS]
    source_pages = carray(pointer(job[SOURCE_PAGES]), items, np.int32)
    source_rows = carray(pointer(job[SOURCE_ROWS]), items, np.int32)
    target_pages = carray(pointer(job[TARGET_PAGES]), items, np.int32)
    target_rows = carray(pointer(job[TARGET_ROWS]), items, np.int32)
    memory = np.empty(5 * job[HEAD_DIM] + SCRATCH + CACHE_LINE, np.uint8)
    numbers, codes, _ = scratch_of(memory, job[HEAD_DIM])
    while True:
        start = fetch_add(address, CHUNK)
        if start >= items:
            break
        for item in range(start, min(items, start + CHUNK)):
            _transcode(
                job, source, source_pages[item], np.int64(source_rows[item]), target,
                target_pages[item], np.int64(target_rows[item]), codes, numbers,
            )  # fmt: skip
    memory[0] = 0  # numba frees an array after its last use


@team_body
def move(address):
    job = carray(pointer(address), MOVE_WORDS, np.int64)
    source = form_of(job[SOURCE_FORM : SOURCE_FORM + FORM_WORDS])
    target = form_of(job[TARGET_FORM : TARGET_FORM + FORM_WORDS])
    table = _table(job[SOURCE_TABLE : SOURCE_TABLE + TABLE_WORDS])
    target_table = _table(job[TARGET_TABLE : TARGET_TABLE + TABLE_WORDS])
    memory = np.empty(5 * job[HEAD_DIM] + SCRATCH + CACHE_LINE, np.uint8)
    numbers, codes, _ = scratch_of(memory, job[HEAD_DIM])
    runs, at_once = job[ITEMS], job[AT_ONCE]
    while True:
        start = fetch_add(address, at_once)
        if start >= runs:
            break
        for item in range(start, min(runs, start + at_once)):
            first, item = item % job[RUNS] * job[RUN], item // job[RUNS]
            row, head = item // job[HEADS], item % job[HEADS]
            slot = np.int64(word_at(job[SLOTS], row)[0])
            places = row * job[ROW_STRIDE] + head * job[HEAD_PLACES]
            target_places = row * job[TO_ROW_STRIDE] + head * job[TO_HEAD_PLACES]
            for token in range(first, min(first + job[RUN], job[MOST])):
                place = word_at(job[PLACES], places + token)[0]
                to = word_at(job[TO], target_places + token)[0]
                if to < 0:
                    continue
                page, page_row = _page_in(table, slot, head, place, source.tokens)
                new_page, new_row = _page_in(target_table, slot, head, to, target.tokens)
                _transcode(job, source, page, page_row, target, new_page, new_row, codes, numbers)
    memory[0] = 0  # numba frees an array after its last use


@team_body
def move_pages(address):
    """``move`` into pages that are encoded whole: an item is a page, ``RUN`` its tokens."""
    job = carray(pointer(address), MOVE_WORDS, np.int64)
    source = form_of(job[SOURCE_FORM : SOURCE_FORM + FORM_WORDS])
    target = form_of(job[TARGET_FORM : TARGET_FORM + FORM_WORDS])
    table = _table(job[SOURCE_TABLE : SOURCE_TABLE + TABLE_WORDS])
    target_table = _table(job[TARGET_TABLE : TARGET_TABLE + TABLE_WORDS])
    room, dim = job[RUN], job[HEAD_DIM]
    codes = np.empty(dim, np.uint8)
    keys, values = np.empty((room, dim), np.float32), np.empty((room, dim), np.float32)
    olds, rows = np.empty(room, np.int64), np.empty(room, np.int64)
    while True:
        item = fetch_add(address, 1)
        if item >= job[ITEMS]:
            break
        first, item = item % job[RUNS] * room, item // job[RUNS]
        row, head = item // job[HEADS], item % job[HEADS]
        slot = np.int64(word_at(job[SLOTS], row)[0])
        places = job[PLACES] + 4 * (row * job[ROW_STRIDE] + head * job[HEAD_PLACES] + first)
        to = job[TO] + 4 * (row * job[TO_ROW_STRIDE] + head * job[TO_HEAD_PLACES] + first)
        start = word_at(to, 0)[0]
        if start < 0:
            continue
        page, _ = _page_in(target_table, slot, head, start, target.tokens)
        is_good = start % np.int32(room) == 0 and is_slot(job, target, page, 0)
        for token in range(room):
            place = word_at(places, token)[0]
            is_good = is_good and word_at(to, token)[0] == start + token
            old, old_row = _page_in(table, slot, head, place, source.tokens)
            is_good = is_good and is_slot(job, source, old, old_row)
            if is_good:
                olds[token] = job[ARENA] + np.int64(old) * source.page_bytes
                rows[token] = old_row
                decode(source.keys, olds[token], rows[token], codes, keys[token])
                decode(source.values, olds[token], rows[token], codes, values[token])
        if not is_good:
            job[BAD] = 1
            continue
        new = job[ARENA] + np.int64(page) * target.page_bytes
        encode_keys(keys, target.keys, new)
        encode_values(values, target.values, new)
        for token in range(room):
            score, position = _tracked(source, olds[token], rows[token])
            word_at(new + target.scores, token)[0] = score
            word_at(new + target.positions, token)[0] = position


@team_body
def load(address):
    job = carray(pointer(address), LOAD_WORDS, np.int64)
    form, dim, longest = (
        form_of(job[LOAD_FORM : LOAD_FORM + FORM_WORDS]),
        job[HEAD_DIM],
        job[LONGEST],
    )
    items = job[ITEMS]
    keys = carray(pointer(job[OUT_KEY]), (items, dim), np.float32)
    values = carray(pointer(job[OUT_VALUE]), (items, dim), np.float32)
    positions = carray(pointer(job[OUT_POSITIONS]), items, np.int32)
    memory = np.empty(5 * dim + SCRATCH + CACHE_LINE, np.uint8)
    _, codes, _ = scratch_of(memory, dim)
    while True:
        start = fetch_add(address, CHUNK)
        if start >= items:
            break
        for item in range(start, min(items, start + CHUNK)):
            line, token = item // longest, item % longest
            keys[item], values[item], positions[item] = 0.0, 0.0, -1
            if token >= word_at(job[TOKENS], line)[0]:
                continue
            entry, row = token // form.tokens, token % form.tokens
            page_id = word_at(job[TABLE], line * job[TABLE_STRIDE] + min(entry, job[WIDTH] - 1))[0]
            if entry >= job[WIDTH] or not is_slot(job, form, page_id, row):
                job[BAD] = 1
                continue
            page = job[ARENA] + np.int64(page_id) * form.page_bytes
            decode(form.keys, page, row, codes, keys[item])
            decode(form.values, page, row, codes, values[item])
            _, positions[item] = _tracked(form, page, row)
    memory[0] = 0  # numba frees an array after its last use


@kernel
def round_at(address, kind, offset, numbers, codes, metadata, bits, groups, is_float, times):
    """Read a vector and round it, see ``round_vector``."""
    if groups == 1 and not is_float and bits < 16:
        source = address + (4 if kind == FLOAT else 2) * offset
        top = np.float32((1 << bits) - 1)
        if round_whole(source, kind, numbers.ctypes.data, len(numbers), top, times):
            return
    read_floats(address, kind, offset, numbers)
    round_vector(numbers, codes, metadata, bits, groups, is_float, times)


@team_body
def round_trip(address):
    job = carray(pointer(address), ROUND_WORDS, np.int64)
    dim, heads, items = job[ROUND_DIM], job[ROUND_HEADS], job[ITEMS]
    quantized = carray(pointer(job[ROUND_QUANTIZED]), items // heads, np.uint8)
    keys = carray(pointer(job[ROUND_OUT_KEY]), (items, dim), np.float32)
    values = carray(pointer(job[ROUND_OUT_VALUE]), (items, dim), np.float32)
    memory = np.empty(5 * dim + SCRATCH + CACHE_LINE, np.uint8)
    _, codes, metadata = scratch_of(memory, dim)
    key_bits, key_groups = job[ROUND_KEY_BITS], job[ROUND_KEY_GROUPS]
    value_bits, value_groups = job[ROUND_VALUE_BITS], job[ROUND_VALUE_GROUPS]
    strides, is_float = job[ROUND_STRIDES : ROUND_STRIDES + 4], job[ROUND_IS_FLOAT]
    while True:
        start = fetch_add(address, CHUNK)
        if start >= items:
            break
        for item in range(start, min(items, start + CHUNK)):
            token, head = item // heads, item % heads
            times = 2 if quantized[token] else 0
            at = token * strides[0] + head * strides[1]
            round_at(
                job[ROUND_KEY], job[ROUND_KIND], at, keys[item], codes, metadata, key_bits,
                key_groups, is_float, times,
            )  # fmt: skip
            at = token * strides[2] + head * strides[3]
            round_at(
                job[ROUND_VALUE], job[ROUND_KIND], at, values[item], codes, metadata, value_bits,
                value_groups, is_float, times,
            )  # fmt: skip
    memory[0] = 0  # numba frees an array after its last use


CALLS = CalledKernels((run, (types.int64[::1], *[types.int64] * 4)))
"""How Python calls the kernel."""
