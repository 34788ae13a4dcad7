"""Products in 8 bits: rows are rotated and quantized as they come, weights once.

The ops around a product take part in it: those before it return ``QuantizedRows``, and those after
it take ``ScaledRows``, so that no pass only finds codes or multiplies by scales.
"""

from triptych.kernels.int8 import reference
from triptych.kernels.int8.product import Int8Product, has_vnni
from triptych.kernels.int8.rows import QuantizedRows, ScaledRows
from triptych.kernels.op import Op

__all__ = [
    "Int8Product",
    "QuantizedRows",
    "ScaledRows",
    "add_norm_quantize",
    "gate_quantize",
    "has_vnni",
    "quantize_rows",
]

quantize_rows = Op(
    name="quantize_rows",
    spec=reference.quantize_rows,
    fast={"cpu": "triptych.kernels.int8.cpu:quantize_rows"},
)

add_norm_quantize = Op(
    name="add_norm_quantize",
    spec=reference.add_norm_quantize,
    fast={"cpu": "triptych.kernels.int8.cpu:add_norm_quantize"},
)

gate_quantize = Op(
    name="gate_quantize",
    spec=reference.gate_quantize,
    fast={"cpu": "triptych.kernels.int8.cpu:gate_quantize"},
)
