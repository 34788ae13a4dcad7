"""The baseline of prefill attention is FlashAttention: it computes what torch computes."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from triptych.kernels.bench.flash_attention import KEYS, QUERIES, flash_attention


def test_the_baseline_is_causal_attention(device: Any) -> None:
    query, key, value = torch.randn(3, 2, 256, 64)
    out = torch.full_like(query, float("nan"))
    inputs = device.take(query, key, value, out)
    scale = 0.1 * 1.4426950408889634  # in powers of two
    flash_attention[(256 // QUERIES, 2)](*inputs, 256, scale, 64, QUERIES, KEYS)
    want = scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.1)
    torch.testing.assert_close(inputs[3].cpu(), want, rtol=2e-2, atol=2e-3)
