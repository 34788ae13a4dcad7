"""Limits of a device, with the CPU in its place: each work does what its row counts."""

import numpy as np
import torch

from benchmarks.kernels.gpu_ceilings import limits, rate_of, registering


def test_a_rate_is_that_of_the_median_call() -> None:
    seconds = [4e-3, 1e-3, 2e-3]
    row = rate_of("memory", 8e9, seconds)
    assert (row.rate, row.unit) == (4000.0, "GB/s")
    assert (row.median_us, row.fastest_us) == (2000.0, 1000.0)
    row = rate_of("product", 8e12, seconds, is_bytes=False)
    assert (row.rate, row.unit) == (4000.0, "TFLOP/s")


def test_each_work_moves_or_computes_what_is_counted() -> None:
    words = np.random.default_rng(1).integers(2**62, size=1024)
    host, before = torch.from_numpy(words), torch.from_numpy(words.copy())
    found = {one.name: one for one in limits(torch.device("cpu"), host, 4096, 16)}
    amounts = [one.amount for one in found.values()]
    assert amounts == [2 * 4096, 2 * 16**3, 8192, 8192, 32 * 8192]
    assert [one.is_bytes for one in found.values()] == [True, False, True, True, True]
    found["host memory, read"].call()
    host.zero_()
    found["host memory, written"].call()  # what was read, inverted twice
    assert torch.equal(host, before)
    sums = found["host memory, read by 32 programs"].call()
    assert sums.shape == (32,)
    assert torch.equal(sums, host.sum().expand(32))
    product = found["bfloat16 product of 16 x 16"].call()
    assert product.shape == (16, 16)
    assert product.dtype == torch.bfloat16


def test_memory_is_registered_anew_each_time() -> None:
    shared = list[int]()
    row = registering(lambda memory: shared.append(memory.nbytes), 4096, repeats=3)
    assert shared == [4096] * 3
    assert row.amount == 4096
    assert 0 < row.fastest_us <= row.median_us
