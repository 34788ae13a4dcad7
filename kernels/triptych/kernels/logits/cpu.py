# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# numba is untyped: it passes the first argument of an intrinsic, and compiles the rest.
"""Logits of a head on the CPU.

To find the largest logits of a row, the row is divided into blocks. The ``count`` largest are in
the ``count`` blocks whose own largest logits are the largest, so all logits from the least of these
on are computed again: a few more than asked for, and without sorting a row.
"""

import numpy as np
import torch
from numba import carray, types
from torch import Tensor

from triptych.core.errors import ConfigError
from triptych.kernels.codegen.kernel_cache import CalledKernels
from triptych.kernels.codegen.numba_runtime import (
    LANES,
    fetch_add,
    kernel,
    largest_of,
    pointer,
    run_team,
    summing_kernel,
    team_address,
    team_body,
    team_threads,
)
from triptych.kernels.floats import KINDS, nth_largest, read_floats

COUNTER, ROWS, LOGITS, VOCAB, HIDDEN, WIDTH, WEIGHT, WEIGHT_KIND, LARGEST = range(9)
WORDS = 9
BLOCK = 4 * LANES


def recompute_largest(logits: Tensor, hidden: Tensor, weight: Tensor, count: int) -> Tensor:
    """See ``reference.recompute_largest``."""
    (rows, vocab), width = logits.shape, weight.shape[1]
    if hidden.shape != (rows, width) or len(weight) != vocab:
        raise ConfigError(
            f"logits {tuple(logits.shape)}, hidden {tuple(hidden.shape)}, weight "
            f"{tuple(weight.shape)}: they do not fit"
        )
    if not logits.dtype == hidden.dtype == torch.float32 or weight.dtype not in KINDS:
        raise ConfigError(
            f"logits {logits.dtype}, hidden {hidden.dtype}, weight {weight.dtype}: expected "
            f"float32, and a weight in {', '.join(map(str, KINDS))}"
        )
    logits, hidden, weight = logits.contiguous(), hidden.contiguous(), weight.contiguous()
    _start(
        _work.address,
        team_address(),
        team_threads() if rows > 1 else 1,
        rows,
        logits.data_ptr(),
        vocab,
        hidden.data_ptr(),
        width,
        weight.data_ptr(),
        KINDS[weight.dtype],
        count,
    )
    return logits


@kernel
def _start(
    body, team, threads, rows, logits, vocab, hidden, width, weight, weight_kind, largest
):  # fmt: skip
    job = np.empty(WORDS, np.int64)
    job[COUNTER], job[ROWS], job[LOGITS], job[VOCAB], job[HIDDEN] = 0, rows, logits, vocab, hidden
    job[WIDTH], job[WEIGHT], job[WEIGHT_KIND], job[LARGEST] = width, weight, weight_kind, largest
    run_team(team, body, job, threads)


@kernel
def _block_largest(row):
    """The largest logit of each block."""
    found = np.empty((len(row) + BLOCK - 1) // BLOCK, np.float32)
    whole, address = len(row) // BLOCK, row.ctypes.data
    for block in range(whole):
        found[block] = largest_of(address + 4 * BLOCK * block, BLOCK // LANES)
    if whole < len(found):
        rest = row[whole * BLOCK :]
        most = rest[0]
        for logit in rest:
            most = logit if logit > most else most
        found[whole] = most
    return found


@summing_kernel
def _dot(left, right):
    total = np.float32(0.0)
    for channel in range(len(left)):
        total += left[channel] * right[channel]
    return total


@team_body
def _work(address):
    """Take rows from the shared counter until none is left."""
    job = carray(pointer(address), WORDS, np.int64)
    vocab, width = job[VOCAB], job[WIDTH]
    weight = np.empty(width, np.float32)
    while True:
        index = fetch_add(address, 1)
        if index >= job[ROWS]:
            break
        row = carray(pointer(job[LOGITS] + 4 * index * vocab), vocab, np.float32)
        hidden = carray(pointer(job[HIDDEN] + 4 * index * width), width, np.float32)
        found = _block_largest(row)
        # A row with a NaN ends its request whatever its logits are.
        least = np.float32(-np.inf)
        if job[LARGEST] < len(found):
            least = nth_largest(found, job[LARGEST])
        for block in range(len(found)):
            if found[block] < least:
                continue
            for token in range(block * BLOCK, min(vocab, (block + 1) * BLOCK)):
                if row[token] >= least:
                    read_floats(job[WEIGHT], job[WEIGHT_KIND], token * width, weight)
                    row[token] = _dot(hidden, weight)


CALLS = CalledKernels((_start, (types.int64,) * 11))
"""How Python calls the kernel."""
