"""The benchmark of decode attention on a GPU, at a tiny size: its clocks alone are replaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from triptych.kernels.bench import attention_cpu, attention_gpu


def test_each_row_is_checked_and_has_a_median(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)  # cuBLAS would require an environment variable

    def seconds(call: Callable[[], object], repeats: int) -> list[float]:
        call()
        return [1e-6 * (1 + at) for at in range(repeats)]

    def baseline(*given: Any) -> Any:
        shape, batch, context, _device, dtype = given
        return attention_cpu.torch_attention(shape, batch, context, device.name, dtype)

    monkeypatch.setattr(attention_gpu, "device_seconds", seconds)
    monkeypatch.setattr(attention_gpu, "host_seconds", lambda call, repeats: 1e-6)
    monkeypatch.setattr(attention_gpu, "copy_seconds", lambda repeats: [1e-3])
    monkeypatch.setattr(attention_gpu, "torch_attention", baseline)
    formats, shape = ["fp16", "k8v4"], attention_cpu.Shape(heads=4, kv_heads=2, head_dim=64)
    rows = list(attention_gpu.run(formats, batch=2, context=50, shape=shape, repeats=3))
    assert [(row.format, row.key_order, row.query) for row in rows] == [
        (name, order, query)
        for name, order in attention_gpu.cases(formats, ("token", "channel"))
        for query in ("bf16", "fp32")
    ]
    for row in rows:
        assert 0 < row.error < 5e-3
        assert (row.fastest_us, row.median_us) == (pytest.approx(1), pytest.approx(2))
