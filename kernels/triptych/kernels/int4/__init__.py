"""Products of bfloat16 rows with weights in 4 bits, in groups with a step and a middle value."""

from triptych.kernels.int4 import reference
from triptych.kernels.int4.layout import OUTPUTS, PIECE, Int4Tiles
from triptych.kernels.op import Op

__all__ = ["OUTPUTS", "PIECE", "Int4Tiles", "add_norm_multiply_int4", "multiply_int4"]

multiply_int4 = Op(
    name="multiply_int4",
    spec=reference.multiply_int4,
    fast={"cpu": "triptych.kernels.int4.cpu:multiply_int4"},
)

add_norm_multiply_int4 = Op(
    name="add_norm_multiply_int4",
    spec=reference.add_norm_multiply_int4,
    fast={"cpu": "triptych.kernels.int4.cpu:add_norm_multiply_int4"},
)
