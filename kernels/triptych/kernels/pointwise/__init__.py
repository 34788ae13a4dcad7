"""Pointwise ops between the matrix products of a layer: RMS norm, RoPE, gated activation.

At batch size 1 each handles about a thousand numbers, for which torch needs ten calls and ten
passes.
"""

from triptych.kernels.op import Op
from triptych.kernels.pointwise import reference

__all__ = ["gate", "rms_norm", "rotate"]

rms_norm = Op(
    name="rms_norm",
    spec=reference.rms_norm,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:rms_norm",
        # torch has a fused kernel.
        "cuda": "triptych.kernels.pointwise.reference:rms_norm",
    },
)

rotate = Op(
    name="rotate",
    spec=reference.rotate,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:rotate",
        "cuda": "triptych.kernels.pointwise.reference:rotate",
    },
)

gate = Op(
    name="gate",
    spec=reference.gate,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:gate",
        "cuda": "triptych.kernels.pointwise.reference:gate",
    },
)
