# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped.
"""Rounds keys and values of prompts, and stores them in raw pages, on the CPU: as one job."""

import numpy as np
from numba import carray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.core.layout import PageLayout
from triptych.kernels.codec.codec_numba import (
    ARENA,
    BAD,
    COUNTER,
    FORM_WORDS,
    HEAD_DIM,
    ITEMS,
    KEY,
    KIND,
    KV_HEADS,
    SCRATCH,
    STORE_FORM,
    TOKEN_STRIDE,
    VALUE,
    VALUE_HEAD_STRIDE,
    encode_at,
    form_of,
    is_slot,
    round_at,
    scratch_of,
    word_at,
)
from triptych.kernels.codec.cpu import OUT_OF_RANGE, form_words
from triptych.kernels.codec.whole_vectors import round_pair
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.numba_runtime import (
    CACHE_LINE,
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.floats import FLOAT, KINDS
from triptych.kernels.pages import check_arena, check_rounded
from triptych.kernels.prompt_parts import (
    COUNT,
    FIRST,
    PART_WORDS,
    ROUNDED_FROM,
    ROUNDED_TO,
    START,
    TABLE,
    TABLE_HEAD,
    TABLE_LAYER,
    WIDTH,
    PartTable,
)

LAYER, PARTS, KEY_BITS, KEY_GROUPS, VALUE_BITS, VALUE_GROUPS, IS_FLOAT = range(
    VALUE_HEAD_STRIDE + 1, VALUE_HEAD_STRIDE + 8
)
WORDS = IS_FLOAT + 1
"""Words of a job; the first ones are those of ``codec_numba.store``. ``PARTS``: address of the
parts, see ``PartTable``; the rest is the format to whose numbers tokens are rounded."""
TOKENS = 32
"""Tokens that a thread takes at a time."""


def store_prompts_job(
    arena: Tensor,
    raw: PageLayout,
    rounding: PageLayout,
    layer: int,
    key: Tensor,
    value: Tensor,
    parts: PartTable,
) -> Job:
    """The job of ``round_tokens`` and ``store_tokens`` for the parts that its step has.

    Scores become 0, positions are those of the tokens. ``layer``: index into the tables of parts.

    Shapes:  key, value (T, KH, d)
    """
    check_arena(arena, raw)
    check_rounded("store_prompts", rounding)
    if key.dtype not in KINDS or value.dtype != key.dtype or raw.format.is_quantized:
        raise ConfigError(f"store_prompts: {key.dtype}, {value.dtype} to {raw.format.name} pages")
    if key.stride(2) != 1 or value.stride(2) != 1:
        raise ConfigError("store_prompts: heads are not dense")
    form, words = rounding.format, np.zeros(WORDS, np.int64)
    words[ITEMS], words[ARENA] = len(key), arena.data_ptr()
    words[ARENA + 1], words[HEAD_DIM] = arena.shape[0], key.shape[2]
    words[STORE_FORM : STORE_FORM + FORM_WORDS] = form_words(raw)
    words[KEY], words[VALUE], words[KIND] = key.data_ptr(), value.data_ptr(), KINDS[key.dtype]
    words[KV_HEADS] = key.shape[1]
    words[TOKEN_STRIDE : VALUE_HEAD_STRIDE + 1] = *key.stride()[:2], *value.stride()[:2]
    words[LAYER], words[PARTS] = layer, parts.address
    words[KEY_BITS:WORDS] = (
        form.key_bits,
        form.key_groups,
        form.value_bits,
        form.value_groups,
        int(form.has_float_codes),
    )
    kept = arena, key, value, parts
    return Job("store_prompts", _start.address, words, _work.address, kept, OUT_OF_RANGE)


@kernel
def _store_pair(job, form, token, head, page, row, times):
    """``_store`` for vectors that fit in registers; False, and nothing is done, for others."""
    has_ranges = job[KEY_GROUPS] == job[VALUE_GROUPS] == 1 and not job[IS_FLOAT]
    if times and not (has_ranges and max(job[KEY_BITS], job[VALUE_BITS]) < 16):
        return False
    size, strides = 4 if job[KIND] == FLOAT else 2, job[TOKEN_STRIDE : VALUE_HEAD_STRIDE + 1]
    return round_pair(
        job[KEY] + size * (token * strides[0] + head * strides[1]),
        job[VALUE] + size * (token * strides[2] + head * strides[3]),
        job[KIND],
        page + form.keys.codes + row * form.keys.token_stride,
        page + form.values.codes + row * form.values.token_stride,
        job[HEAD_DIM],
        np.float32((1 << job[KEY_BITS]) - 1),
        np.float32((1 << job[VALUE_BITS]) - 1),
        times,
    )


@kernel
def _store(job, form, part, token, head, numbers, codes, metadata):
    """Round and store one head of a token."""
    position = part[FIRST] + token - part[START]
    entry, row = position // form.tokens, position % form.tokens
    table = part[TABLE] + job[LAYER] * part[TABLE_LAYER] + head * part[TABLE_HEAD]
    page_id = word_at(table, min(entry, part[WIDTH] - 1))[0]
    if entry >= part[WIDTH] or not is_slot(job, form, page_id, row):
        job[BAD] = 1
        return
    page = job[ARENA] + np.int64(page_id) * form.page_bytes
    word_at(page + form.positions, row)[0] = position
    word_at(page + form.scores, row)[0] = 0
    times = 2 if part[ROUNDED_FROM] <= position < part[ROUNDED_TO] else 0
    strides = job[TOKEN_STRIDE : VALUE_HEAD_STRIDE + 1]
    if _store_pair(job, form, token, head, page, row, times):
        return
    at = numbers.ctypes.data
    round_at(
        job[KEY], job[KIND], token * strides[0] + head * strides[1], numbers, codes, metadata,
        job[KEY_BITS], job[KEY_GROUPS], job[IS_FLOAT], times,
    )  # fmt: skip
    encode_at(at, FLOAT, 0, form.keys, page, row, codes, numbers)
    round_at(
        job[VALUE], job[KIND], token * strides[2] + head * strides[3], numbers, codes, metadata,
        job[VALUE_BITS], job[VALUE_GROUPS], job[IS_FLOAT], times,
    )  # fmt: skip
    encode_at(at, FLOAT, 0, form.values, page, row, codes, numbers)


@kernel
def _part_of(parts, count, token):
    """Address of the part that has a token; the first part begins with token 0."""
    index = 0
    while (
        index + 1 < count
        and token
        >= carray(pointer(parts + 8 * PART_WORDS * (index + 1)), PART_WORDS, np.int64)[START]
    ):
        index += 1
    return parts + 8 * PART_WORDS * index


@team_body
def _work(address):
    """Take tokens from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    form = form_of(job[STORE_FORM : STORE_FORM + FORM_WORDS])
    count, parts = carray(pointer(job[PARTS]), 1, np.int64)[0], job[PARTS] + 8
    memory = np.empty(5 * job[HEAD_DIM] + SCRATCH + CACHE_LINE, np.uint8)
    numbers, codes, metadata = scratch_of(memory, job[HEAD_DIM])
    while True:
        start = fetch_add(address, TOKENS)
        if start >= job[ITEMS]:
            break
        for token in range(start, min(start + TOKENS, job[ITEMS])):
            part = carray(pointer(_part_of(parts, count, token)), PART_WORDS, np.int64)
            if token >= part[START] + part[COUNT]:
                job[BAD] = 1
                continue
            for head in range(job[KV_HEADS]):
                _store(job, form, part, token, head, numbers, codes, metadata)
    memory[0] = 0  # numba frees an array after its last use


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), WORDS, np.int64)
    job[COUNTER], job[BAD] = 0, 0
    run_team(team, body, job, threads if job[ITEMS] > TOKENS else 1)
    return job[BAD]
