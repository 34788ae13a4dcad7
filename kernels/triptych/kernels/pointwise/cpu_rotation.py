# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""The KV rotation on the CPU: one pass over queries, keys and values, and one over outputs."""

import numpy as np
import torch
from numba import carray
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.jobs import Job, job_start
from triptych.kernels.codegen.numba_runtime import (
    fetch_add,
    kernel,
    pointer,
    run_team,
    team_body,
)
from triptych.kernels.floats import FLOAT, KINDS, read_floats, write_floats
from triptych.kernels.hadamard import block_size
from triptych.kernels.hadamard_cpu import LARGEST_BLOCK, turn, turn_head

COUNTER, CHUNK, TOKENS, HEADS, DIM, BLOCK, TARGET, TARGET_KIND, CENTRE, CENTRED_FROM = range(10)
CENTRED_TO, SOURCES = 10, 11
"""Words of a job. ``CENTRE``: address of a vector for each head from ``CENTRED_FROM`` to
``CENTRED_TO``, which is subtracted."""
SOURCE_WORDS = 5
"""Of each source: heads, address, kind, and strides of tokens and heads in elements. Their heads
follow one another in the target."""
NUMBERS = 1 << 14
"""Approximate numbers that a thread takes at a time; for fewer one thread runs alone."""


def rotate_kv(
    query: Tensor, key: Tensor, value: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``reference.rotate_kv``."""
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    turned = torch.empty(len(query), heads + 2 * kv_heads, dim)
    rotate_kv_job(query, key, value, centre, turned).run()
    return turned[:, :heads], turned[:, heads : heads + kv_heads], turned[:, heads + kv_heads :]


def rotate_kv_job(query: Tensor, key: Tensor, value: Tensor, centre: Tensor, turned: Tensor) -> Job:
    """The job of ``rotate_kv``, with its results side by side in ``turned`` (T, H + 2 KH, d)."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if centre.shape != key.shape[1:] or centre.dtype != torch.float32:
        raise ConfigError(
            f"rotate_kv: centre {tuple(centre.shape)} {centre.dtype}: expected float32 "
            f"{tuple(key.shape[1:])}"
        )
    centred = heads, heads + kv_heads
    return _job("rotate_kv", (query, key, value), turned, centre.contiguous(), *centred)


def rotate_back(mixed: Tensor, dtype: torch.dtype) -> Tensor:
    """See ``reference.rotate_back``."""
    turned = torch.empty(mixed.shape, dtype=dtype)
    rotate_back_job(mixed, turned).run()
    return turned


def rotate_back_job(mixed: Tensor, turned: Tensor) -> Job:
    """The job of ``rotate_back``, with its result in ``turned``."""
    return _job("rotate_back", (mixed,), turned, None, 0, 0)


def _job(
    op: str,
    sources: tuple[Tensor, ...],
    target: Tensor,
    centre: Tensor | None,
    first: int,
    end: int,
) -> Job:
    """``centre`` is subtracted from the heads from ``first`` to ``end``."""
    tokens, heads, dim = target.shape
    words = np.zeros(SOURCES + SOURCE_WORDS * len(sources), np.int64)
    words[CHUNK] = max(1, NUMBERS // (heads * dim))
    words[TOKENS], words[HEADS], words[DIM] = tokens, heads, dim
    words[BLOCK] = min(block_size(dim), LARGEST_BLOCK)
    words[TARGET], words[TARGET_KIND] = target.data_ptr(), KINDS[target.dtype]
    words[CENTRE] = 0 if centre is None else centre.data_ptr()
    words[CENTRED_FROM], words[CENTRED_TO] = first, end
    at = SOURCES
    for source in sources:
        if source.stride(2) != 1 or source.dtype not in KINDS or source.shape[2] != dim:
            raise ConfigError(
                f"heads {tuple(source.shape)} {source.dtype}, strides {source.stride()}: expected "
                f"dense heads of {dim} numbers in {', '.join(map(str, KINDS))}"
            )
        words[at : at + SOURCE_WORDS] = (
            source.shape[1],
            source.data_ptr(),
            KINDS[source.dtype],
            source.stride(0),
            source.stride(1),
        )
        at += SOURCE_WORDS
    return Job(op, _start.address, words, _work.address, (sources, target, centre))


@job_start
def _start(words, body, team, threads):
    job = carray(pointer(words), SOURCES, np.int64)
    job[COUNTER] = 0
    run_team(team, body, job, threads if job[TOKENS] > job[CHUNK] else 1)
    return 0


@kernel
def _turn_token(job, sources, token, numbers):
    source = carray(pointer(sources), SOURCE_WORDS, np.int64)
    first, size = 0, 4 if job[TARGET_KIND] == FLOAT else 2
    for head in range(job[HEADS]):
        if head - first == source[0]:
            first, sources = head, sources + 8 * SOURCE_WORDS
            source = carray(pointer(sources), SOURCE_WORDS, np.int64)
        offset = token * source[3] + (head - first) * source[4]
        place = (token * job[HEADS] + head) * len(numbers)
        is_centred = job[CENTRED_FROM] <= head < job[CENTRED_TO]
        centre = job[CENTRE] + 4 * (head - job[CENTRED_FROM]) * len(numbers) if is_centred else 0
        near = source[1] + (4 if source[2] == FLOAT else 2) * offset
        if job[BLOCK] == len(numbers) and turn_head(
            near, source[2], job[TARGET] + size * place, job[TARGET_KIND], centre, job[BLOCK]
        ):
            continue
        read_floats(source[1], source[2], offset, numbers)
        turn(numbers, job[BLOCK])
        if is_centred:
            middle = carray(pointer(centre), len(numbers), np.float32)
            for channel in range(len(numbers)):
                numbers[channel] -= middle[channel]
        write_floats(numbers, job[TARGET], job[TARGET_KIND], place)


@team_body
def _work(address):
    """Take tokens from the shared counter until none is left."""
    job = carray(pointer(address), SOURCES, np.int64)
    numbers = np.empty(job[DIM], np.float32)
    while True:
        start = fetch_add(address, job[CHUNK])
        if start >= job[TOKENS]:
            break
        for token in range(start, min(job[TOKENS], start + job[CHUNK])):
            _turn_token(job, address + 8 * SOURCES, token, numbers)
