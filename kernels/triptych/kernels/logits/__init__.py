"""Logits of a head: the largest of each row in float32."""

from triptych.kernels.logits import reference
from triptych.kernels.op import Op

__all__ = ["recompute_largest"]

recompute_largest = Op(
    name="recompute_largest",
    spec=reference.recompute_largest,
    fast={
        "cpu": "triptych.kernels.logits.cpu:recompute_largest",
        "cuda": "triptych.kernels.logits.reference:recompute_largest",
    },
)
