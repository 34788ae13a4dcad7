"""Pointwise ops between the matrix products of a layer: norms, rotations, gated activation.

At batch size 1 each handles about a thousand numbers, for which torch needs ten calls and ten
passes.
"""

from triptych.kernels.op import Op
from triptych.kernels.pointwise import reference

__all__ = ["add_norm", "gate", "rms_norm", "rotate", "rotate_back", "rotate_kv"]

rms_norm = Op(
    name="rms_norm",
    spec=reference.rms_norm,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:rms_norm",
        "cuda": "triptych.kernels.pointwise.gpu:rms_norm",
    },
)

add_norm = Op(
    name="add_norm",
    spec=reference.add_norm,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:add_norm",
        "cuda": "triptych.kernels.pointwise.gpu:add_norm",
    },
)

rotate = Op(
    name="rotate",
    spec=reference.rotate,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:rotate",
        "cuda": "triptych.kernels.pointwise.gpu:rotate",
    },
)

gate = Op(
    name="gate",
    spec=reference.gate,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu:gate",
        "cuda": "triptych.kernels.pointwise.gpu:gate",
    },
)

rotate_kv = Op(
    name="rotate_kv",
    spec=reference.rotate_kv,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu_rotation:rotate_kv",
        "cuda": "triptych.kernels.pointwise.gpu:rotate_kv",
    },
)

rotate_back = Op(
    name="rotate_back",
    spec=reference.rotate_back,
    fast={
        "cpu": "triptych.kernels.pointwise.cpu_rotation:rotate_back",
        "cuda": "triptych.kernels.pointwise.gpu:rotate_back",
    },
)
