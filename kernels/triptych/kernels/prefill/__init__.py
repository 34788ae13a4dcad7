"""Attention of new prompt tokens over new and earlier keys, with token significance."""

from triptych.kernels.op import Op
from triptych.kernels.prefill import reference
from triptych.kernels.prefill.significance import (
    ALWAYS_HIGH,
    largest_sums,
    mean_sums,
    significance_of,
    sums_of_heads,
)

__all__ = [
    "ALWAYS_HIGH",
    "largest_sums",
    "mean_sums",
    "prefill_attention",
    "significance_of",
    "sums_of_heads",
]

prefill_attention = Op(
    name="prefill_attention",
    spec=reference.prefill_attention,
    fast={
        "cpu": "triptych.kernels.prefill.cpu:prefill_attention",
        "cuda": "triptych.kernels.prefill.gpu:prefill_attention",
    },
)
